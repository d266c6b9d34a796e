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


def maximizer(acquisition: torch.nn.Module, bounds: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # restarts of BoTorch's optimizer
        return optimize_acqf(acquisition, bounds, q=1, num_restarts=4, raw_samples=64)[0]


def drawn_functions(ax) -> None:
    truth = lambda x: torch.sin(9 * x) + x
    x = torch.tensor([[0.05], [0.3], [0.45], [0.6], [0.97]], dtype=torch.float64)
    bounds = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    model = NetworkGP(x, truth(x), bounds=bounds)
    grid = torch.linspace(0, 1, 300, dtype=torch.float64)[:, None]
    law = model.posterior(grid)
    plots.plot_regression(ax, grid, law.mean, law.variance, data=(x, truth(x)), truth=truth(grid))
    for seed in range(6):
        draw = model.draw_function(generator=torch.Generator().manual_seed(seed))
        best = maximizer(PosteriorMean(draw), bounds)
        ax.plot(grid, draw(grid), lw=0.7, color="gray")
        ax.plot(best, draw(best), "v", color="black", ms=5)
    ax.set(title="six drawn functions and their maxima", xlim=(0, 1))


def branin(ax) -> None:
    function = Branin(negate=True)
    low, high = bounds = function.bounds.double()
    x, start = low + (high - low) * torch.rand(6, 2, dtype=torch.float64), None
    for _ in range(14):
        y = function(x)[:, None]
        model = NetworkGP(x, y, bounds=bounds, start=start)
        start = model.hyperparameters
        x = torch.cat([x, maximizer(LogExpectedImprovement(model, best_f=y.max()), bounds)])
    found, best = function(x), function.optimal_value
    random = function(low + (high - low) * torch.rand(20, 20, 2, dtype=torch.float64))
    ax.semilogy(best - found.cummax(0).values, label="NetworkGP and LogEI")
    median = (best - random.cummax(1).values).median(0).values
    ax.semilogy(median, label="random points (median of 20)")
    ax.set(title="Branin: distance of the best value from the maximum", xlabel="evaluations")
    ax.legend()
    print(f"Branin: best {float(found.max()):.4f} of {best:.4f} after {len(x)} evaluations")


def main(out: Path) -> None:
    torch.manual_seed(0)
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    drawn_functions(axes[0])
    branin(axes[1])
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "bayesian_optimization.png", dpi=120)
    print("wrote", out / "bayesian_optimization.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("example_output"), help="for the figure")
    main(parser.parse_args().out)
