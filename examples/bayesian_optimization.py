"""Find the maximum of an expensive function with a network at infinite width as the surrogate.

One learns: `NetworkGP` is a model for BoTorch's acquisition functions, a loop is a few lines, and functions
drawn from the posterior are maximized like any other.
"""

import argparse
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from botorch.acquisition import LogExpectedImprovement, PosteriorMean
from botorch.optim import optimize_acqf
from botorch.test_functions import Branin
from torch import Tensor

from net2gp import plots
from net2gp.interop.botorch import NetworkGP

UNIT = torch.tensor([[0.0], [1.0]], dtype=torch.float64)


def wavy(x: Tensor) -> Tensor:
    return torch.sin(9 * x) + x


def maximizer(acquisition: torch.nn.Module, bounds: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # restarts of BoTorch's optimizer
        return optimize_acqf(acquisition, bounds, q=1, num_restarts=4, raw_samples=64)[0]


def one_dimension(axes) -> None:
    x = torch.tensor([[0.05], [0.3], [0.45], [0.6], [0.97]], dtype=torch.float64)
    y = wavy(x)
    model = NetworkGP(x, y, bounds=UNIT)
    grid = torch.linspace(0, 1, 300, dtype=torch.float64)[:, None]
    law = model.posterior(grid)
    mean, variance = law.mean.detach(), law.variance.detach()
    plots.plot_regression(axes[0], grid, mean, variance, data=(x, y), truth=wavy(grid))
    for seed in range(6):
        draw = model.draw_function(generator=torch.Generator().manual_seed(seed))
        best = maximizer(PosteriorMean(draw), UNIT)
        axes[0].plot(grid, draw(grid), lw=0.7, color="gray")
        axes[0].plot(best, draw(best), "v", color="black", ms=5)
    axes[0].set(title="six drawn functions and their maxima", xlim=(0, 1))
    acquisition = LogExpectedImprovement(model, best_f=y.max())
    axes[1].plot(grid, acquisition(grid[:, None]).detach().exp())
    axes[1].axvline(float(maximizer(acquisition, UNIT)), color="black", lw=0.8)
    axes[1].set(title="expected improvement, and where to look next", xlim=(0, 1))


def branin(ax) -> None:
    function = Branin(negate=True)
    bounds = function.bounds.double()
    low, high = bounds
    x, model = low + (high - low) * torch.rand(6, 2, dtype=torch.float64), None
    for _ in range(14):
        y = function(x)[:, None]
        start = None if model is None else model.hyperparameters
        model = NetworkGP(x, y, bounds=bounds, start=start)
        x = torch.cat([x, maximizer(LogExpectedImprovement(model, best_f=y.max()), bounds)])
    chosen = function(x)
    random = function(low + (high - low) * torch.rand(20, 20, 2, dtype=torch.float64))
    optimum = function.optimal_value
    ax.semilogy(optimum - chosen.cummax(0).values, label="NetworkGP and LogEI")
    gaps = optimum - random.cummax(1).values.median(0).values
    ax.semilogy(gaps, label="random points (median of 20)")
    ax.axvline(5.5, color="gray", lw=0.8)
    ax.set(title="Branin: how far the best point is from the maximum", xlabel="evaluations")
    ax.legend()
    print(f"Branin: best {float(chosen.max()):.4f} of {optimum:.4f} after {len(x)} evaluations")


def main(out: Path) -> None:
    torch.manual_seed(0)
    out.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(1, 3, figsize=(15, 4), layout="constrained")
    one_dimension(axes[:2])
    branin(axes[2])
    path = out / "bayesian_optimization.png"
    figure.savefig(path, dpi=130)
    print(f"wrote {path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("example_output"), help="for the figure")
    main(parser.parse_args().out)
