"""More points than a Gram matrix fits: conjugate gradients on products with the network's Jacobian.

One learns: `solver=CG(store_gram=False)` never stores k(X, X); a `NotConverged` warning says when to
doubt the result; `Lanczos(rank)` caches variances, from above; `update` continues from the solution.
"""

import argparse
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

import net2gp as n2g
from net2gp import plots
from net2gp.errors import NotConverged

torch.set_default_dtype(torch.float64)


def main(out: Path) -> None:
    torch.manual_seed(0)
    x, noise_var = torch.randn(240, 5), 0.05
    y = torch.sin(x.sum(1, keepdim=True)) + noise_var**0.5 * torch.randn(240, 1)
    old, new, x_test = (x[:200], y[:200]), (x[200:], y[200:]), torch.randn(100, 5)
    network = nn.Sequential(nn.Linear(5, 48), nn.Tanh(), nn.Linear(48, 1)).eval()
    kernel, likelihood = n2g.linearize(network).kernel(1.0), n2g.Gaussian(noise_var)
    exact = n2g.condition(kernel, old, likelihood, solver=n2g.solvers.Cholesky())
    exact_std = exact.marginal(x_test).variance.sqrt()

    def residual(posterior):
        (x, y), alpha = (posterior.x, posterior.y), posterior.process.alpha
        left = y - kernel.matmul(x, x, alpha) - noise_var * alpha
        return float(left.norm() / y.norm())

    hasty = n2g.solvers.CG(max_iterations=3, preconditioner=None, store_gram=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", NotConverged)
        rough = n2g.condition(kernel, old, likelihood, solver=hasty)
    print(f"3 iterations: residual {residual(rough):.1e}, and a warning that says so:")
    print("   ", caught[0].message)

    figure, ax = plt.subplots(figsize=(5.5, 5), layout="constrained")
    for color, rank in zip(plots.COLORS, (10, 40, 120), strict=False):
        solver = n2g.solvers.CG(variance=n2g.solvers.Lanczos(rank), num_probes=4, store_gram=False)
        posterior = n2g.condition(kernel, old, likelihood, solver=solver)
        std = posterior.marginal(x_test).variance.sqrt()
        print(f"rank {rank:3}: residual {residual(posterior):.1e}", end=", ")
        print(
            f"cached std / exact std: {(std / exact_std).min():.4f} … {(std / exact_std).max():.4f}"
        )
        ax.loglog(exact_std, std, ".", color=color, label=f"Lanczos({rank})")

    updated = posterior.update(new)
    whole = n2g.condition(kernel, (x, y), likelihood, solver=n2g.solvers.Cholesky())
    gap = (updated.marginal(x_test).mean - whole.marginal(x_test).mean).abs().max()
    print(
        f"updated with {len(new[0])} points: at most {gap:.1e} from the exact mean of all {len(x)}"
    )

    ax.loglog(exact_std, exact_std, "--", color=plots.FAINT, linewidth=1, label="exact")
    ax.set(xlabel="exact standard deviation of f", ylabel="cached standard deviation of f")
    ax.legend(frameon=False)
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "large_scale_cg.png", dpi=120)
    print("wrote", out / "large_scale_cg.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("example_output"), help="for the figure")
    main(parser.parse_args().out)
