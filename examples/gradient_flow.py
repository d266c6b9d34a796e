"""Training in function space: the law of infinitely wide networks at every time, beside real ones.

One learns: `gradient_flow` and its `at(t, x)`; `twin` and `max_learning_rate` for training finite networks
beside it; and that the trained ensemble, `nngp()` and `ntk_gp()` end with different error bars.
"""

import argparse
import math
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap

import net2gp as n2g
from net2gp import plots

torch.set_default_dtype(torch.float64)
PRIOR = {"weight_var": 2.0, "bias_var": 0.3}


def main(out: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.tensor([-2.2, -1.8, -1.3, -0.6, 0.1, 1.4, 1.7, 2.1])[:, None]
    y, grid = torch.sin(2 * x), torch.linspace(-3, 3, 121)[:, None]
    network = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1))
    rate = 0.5 * n2g.training.max_learning_rate(n2g.gradient_flow(network, (x, y), **PRIOR))
    flow = n2g.gradient_flow(network, (x, y), learning_rate=rate, **PRIOR)

    twins = [n2g.limits.twin(network, 1024, generator=draw, **PRIOR) for _ in range(30)]
    states, _ = stack_module_state(twins)
    outputs = lambda state, points: functional_call(twins[0], state, (points,))
    loss = lambda state: (outputs(state, x) - y).square().mean() / 2
    step = vmap(grad(loss))
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
    stops, found = [0, 10, 500], {}
    for t in range(stops[-1] + 1):
        if t in stops:
            found[t] = vmap(lambda state: outputs(state, grid))(states).detach()[..., 0]
        states = {name: states[name] - rate * g for name, g in step(states).items()}

    for ax, t in zip(axes.flat, stops, strict=False):
        law = flow.at(float(t), grid)
        ax.plot(grid, found[t].T, color=plots.FAINT, linewidth=0.4)
        plots.plot_regression(ax, grid, law.mean, law.variance, data=(x, y), label="law, ± 2σ")
        ax.plot(grid, found[t].mean(0), "--", color=plots.COLORS[1], label="mean of 30 networks")
        ax.set(title=f"after {t} steps", ylim=(-3.5, 3.5))
        off, spread = (found[t].mean(0) - law.mean[:, 0]).abs().mean(), found[t].std(0).mean()
        print(f"after {t:3} steps the mean of the networks is off by {off:.2f},", end=" ")
        print(f"their spread is {spread:.2f}, that of the law {law.stddev.mean():.2f}")

    last = axes[1, 1]
    named = (("ensemble", flow), ("nngp()", flow.nngp()), ("ntk_gp()", flow.ntk_gp()))
    for (name, one), color in zip(named, plots.COLORS, strict=False):
        last.plot(grid, one.at(math.inf, grid).stddev, color=color, label=name)
    last.plot(x, 0 * x, ".", color=plots.INK)
    last.set(title="t = ∞: three laws, three error bars", xlabel="x", ylabel="σ")
    for ax in (axes[0, 0], last):
        ax.legend(frameon=False, loc="upper center", ncols=3)
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "gradient_flow.png", dpi=120)
    print("wrote", out / "gradient_flow.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("example_output"), help="for the figure")
    main(parser.parse_args().out)
