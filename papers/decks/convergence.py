"""The loss of gradient descent, foretold by the tangent kernel before the first step, and measured.

    python papers/decks/convergence.py --out figures [--quick]

Networks 1-m-1 with tanh fit 20 points of a sine, as torch initializes and trains them: full batches, with and
without momentum, at half of the largest stable rate that the kernel names, and just below and above it. Jacot
et al. (2018) and Lee et al. (2019) say that the prediction gets exact with the width.
"""

from __future__ import annotations

import sys
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import net2gp as n2g
from net2gp import plots

sys.path.append(str(Path(__file__).parents[1]))
from claims import Claim, at_most
from pages import Study, Topic, at_least, panels, run

NARROW = 16
STEPS = [0, 1, 2, 3, 5, 10, 20, 30, 50, 100, 200, 300]


def problem() -> tuple[Tensor, Tensor]:
    """Twenty points of a sine."""
    x = torch.linspace(-2, 2, 20, dtype=torch.float64)[:, None]
    return x, torch.sin(2 * x)


def network(width: int) -> nn.Module:
    """A network with one hidden layer, as torch initializes it."""
    torch.manual_seed(0)
    layers = (nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 1))
    return nn.Sequential(*layers).double().eval()


def measured(
    start: nn.Module, rate: float, momentum: float | None, steps: list[int]
) -> list[float]:
    """The losses ‖f − y‖² / 2N after these numbers of steps of gradient descent."""
    trained, (x, y), losses = deepcopy(start), problem(), []
    optimizer = torch.optim.SGD(trained.parameters(), lr=rate, momentum=momentum or 0.0)
    for step in range(max(steps) + 1):
        loss = 0.5 * mse_loss(trained(x), y)
        if step in steps:
            losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def convergence(quick: bool) -> Study:
    """Predicted and measured losses of wide and narrow networks, and the largest stable rate."""
    width = 4096 if quick else 16384
    cases = {
        f"width {width}": (width, None),
        f"width {width}, momentum 0.9": (width, 0.9),
        f"width {NARROW}": (NARROW, None),
    }
    figure, axes = panels(3)
    claims: list[Claim] = []
    lines = []
    for ax, (name, (size, momentum)) in zip(axes, cases.items(), strict=True):
        start = network(size)
        found = n2g.training.convergence(start, problem(), momentum=momentum)
        losses = measured(start, found.learning_rate, momentum, STEPS)
        predicted = found.loss(STEPS)
        worst = float((torch.tensor(losses, dtype=torch.float64) / predicted - 1).abs().max())
        plots.plot_convergence(ax, found, measured=(STEPS, losses))
        ax.set_title(name)
        claim = at_most if size == width else at_least
        claims.append(claim(f"{name}: relative error of the loss", worst, 0.05))
        lines.append(f"{name:<30}{found}")
    for momentum in (None, 0.9):
        largest = n2g.training.convergence(network(width), problem(), momentum=momentum)
        for factor, claim in ((0.95, at_most), (1.05, at_least)):
            rate = factor * largest.max_learning_rate
            first, last = measured(network(width), rate, momentum, [0, 100])
            text = f"loss after 100 steps over the first one, {factor:g} of the largest rate"
            claims.append(claim(f"{text}, momentum {momentum or 0:g}", last / first, 1.0))
    return Study(
        "convergence",
        "What the tangent kernel says about convergence",
        "Lines are predictions of `training.convergence` from the network at its start, dots are losses of "
        "torch.optim.SGD, ticks time constants of the kernel's directions. A wide network does what was "
        " foretold, at the first step as after hundreds; a narrow one learns features and leaves the line.",
        figure,
        tuple(claims),
        "\n".join(lines),
    )


TOPICS: list[Topic] = [convergence]


if __name__ == "__main__":
    raise SystemExit(run(TOPICS, __doc__, "decks"))
