"""Double descent: the test error of least squares on random ReLU features, over their number.

    python papers/lecture/double_descent.py --out figures [--quick]

The targets are a linear function of 10 inputs with noise, seen at 100 points. The error has its peak where
there are as many features as points, and falls a second time beyond. A ridge removes the peak.

Belkin et al. (2019), "Reconciling modern machine-learning practice and the classical bias-variance
trade-off".
"""

from __future__ import annotations

import torch
from common import Study, at_least, at_most, panels, run, tidy, within
from torch import Tensor

from net2gp import bayes
from net2gp.plots import COLORS, FAINT, INK

POINTS, INPUTS, NOISE = 100, 10, 0.5
RATIOS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.4, 2, 3, 5, 10, 20)


def task(seed: int, count: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training data with noise and test data without."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count + 1000, INPUTS, generator=generator, dtype=torch.float64)
    slope = torch.randn(INPUTS, generator=generator, dtype=torch.float64) / INPUTS**0.5
    clean = x @ slope
    noise = NOISE * torch.randn(count, generator=generator, dtype=torch.float64)
    return (x[:count], clean[:count] + noise), (x[count:], clean[count:])


def errors(seeds: int, widths: list[int], ridge: float) -> tuple[Tensor, Tensor]:
    """Train and test errors, (S, W) each, with new data and new features for each seed."""
    found = [
        bayes.double_descent(*task(seed, POINTS), widths, ridge=ridge, seed=seed)
        for seed in range(seeds)
    ]
    return torch.cat([one.train for one in found]), torch.cat([one.test for one in found])


def descent(quick: bool) -> Study:
    """The curve with and without a ridge, and the claims about its peak."""
    seeds, widths = (20, [round(ratio * POINTS) for ratio in RATIOS])
    if quick:
        widths = [w for w in widths if w <= 1000]
    train, test = errors(seeds, widths, 0.0)
    ridged = errors(seeds, widths, 1e-2 * POINTS)[1]
    curve = test.mean(0)
    peak = int(curve.argmax())
    ratio = [w / POINTS for w in widths]
    figure, (ax,) = panels(1, 3.6)
    figure.set_figwidth(6.5)
    low, high = test.quantile(torch.tensor([0.1, 0.9], dtype=torch.float64), 0)
    ax.fill_between(ratio, low, high, color=COLORS[0], alpha=0.2, linewidth=0)
    ax.plot(ratio, curve, color=COLORS[0], label="test, least norm")
    ax.plot(ratio, ridged.mean(0), color=COLORS[2], label="test, ridge")
    ax.plot(ratio, train.mean(0).clamp(min=1e-4), color=COLORS[1], label="training, least norm")
    ax.axvline(1, color=FAINT, linewidth=1, linestyle=":")
    ax.set(xscale="log", yscale="log", ylim=(1e-2, None))
    ax.set_xlabel("features per training point, P/N")
    ax.set_ylabel("mean squared error")
    tidy(ax)
    ax.legend(frameon=False, labelcolor=INK)
    before = float(curve[: widths.index(POINTS // 2) + 1].min())
    return Study(
        "double_descent",
        "Double descent",
        f"""Least squares on P random ReLU features of N = {POINTS} points in {INPUTS} dimensions,
targets with noise of standard deviation {NOISE}: means over {seeds} draws of data and features (band:
10 % to 90 % of them). At P = N a single function fits the data, and the noise bends it far away. With
more features there is a choice, and the function of least norm is smoother the larger the choice is.
The second descent ends at {float(curve[-1]):.2f}, far below the peak, but not below the first minimum
of {before:.2f}, as the noise is fitted too. `bayes.double_descent` gives these numbers; with a ridge,
which is a Gaussian prior, there is no peak, and more features help throughout.""",
        figure,
        (
            within("P/N at the peak of the test error", ratio[peak], 0.9, 1.1),
            at_most("last test error beside the peak", float(curve[-1] / curve[peak]), 0.1),
            at_least("peak beside the first minimum", float(curve[peak]) / before, 2),
            at_most(
                "largest test error with a ridge beside the peak",
                float(ridged.mean(0).max() / curve[peak]),
                0.1,
            ),
        ),
    )


TOPICS = [descent]

if __name__ == "__main__":
    raise SystemExit(run(TOPICS, __doc__))
