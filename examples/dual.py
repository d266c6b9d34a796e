"""A regression network as the linear model and the Gaussian process that it is the posterior of.

One learns: `dual` and its transformed data, that both posteriors and their evidences agree, predictions with
uncertainty in a gap of the data, and what each training point does to them (`leave_one_out`,
`removal_effects`).
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

import net2gp as n2g
from net2gp import plots
from net2gp.explain import dual, leave_one_out, removal_effects

NOISE_VAR, PRIOR_VAR = 0.05, 2.0


def main(out: Path) -> None:
    torch.manual_seed(0)
    x = torch.cat([torch.linspace(-3, -0.5, 25), torch.linspace(1, 3, 20)])[:, None].double()
    y = (1.5 * x).sin() + NOISE_VAR**0.5 * torch.randn_like(x)
    network = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1)).double()
    options = {"max_iter": 3000, "tolerance_grad": 1e-7, "line_search_fn": "strong_wolfe"}
    optimizer = torch.optim.LBFGS(network.parameters(), tolerance_change=1e-14, **options)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        decay = sum(p.square().sum() for p in network.parameters()) / (2 * PRIOR_VAR)
        value = (network(x) - y).square().sum() / (2 * NOISE_VAR) + decay
        value.backward()
        return value

    optimizer.step(loss)
    network.eval().requires_grad_(False)

    found = dual(network, (x, y), n2g.Gaussian(NOISE_VAR), prior_var=PRIOR_VAR)
    weights, functions = found.linear_model(), found.gaussian_process()
    grid = torch.linspace(-4, 4, 200).double()[:, None]
    one, other = weights.marginal(grid), functions.marginal(grid)
    print(f"linear model and process differ by {(one.variance - other.variance).abs().max():.0e}")
    print(f"process and network differ by {(other.mean - network(grid)).abs().max():.0e}")
    print(f"log evidence: {float(weights.evidence):.6f} and {float(functions.evidence):.6f}")
    left_out = functions.likelihood.predict(leave_one_out(functions))
    print(f"each point predicted from the others: NLL {-float(left_out.log_prob(y).mean()):.3f}")
    effect = removal_effects(functions, torch.zeros(1, 1).double())[0, :, 0]
    strongest = effect.abs().argmax()
    print(f"f(0) would change most, by {effect[strongest]:.3f}, without x = {x[strongest, 0]:.2f}")

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    plots.plot_regression(axes[0], grid, other.mean, other.variance, data=(x, y), label="process")
    axes[0].set_title("the network's Gaussian process")
    plots.plot_kernel(axes[1], functions.kernel(grid), label="k(x, x')")
    axes[1].set_title("its kernel over x from −4 to 4")
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "dual.png", dpi=120)
    print("wrote", out / "dual.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("example_output"), help="for the figure")
    main(parser.parse_args().out)
