"""What the programs of the lecture share: a small trainer, data, and the command line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import torch
from torch import Tensor, nn

from net2gp import data
from net2gp.errors import InputError

sys.path.append(str(Path(__file__).parents[1]))
import claims
import findings
import pages
from claims import Claim
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pages import WIDTH as WIDTH
from pages import Study as Study
from pages import Topic as Topic
from pages import at_least as at_least
from pages import panels as panels
from pages import tidy as tidy
from pages import within as within

Images = tuple[Tensor, Tensor]
"""Flat pictures (N, 64) and labels (N,)."""


def legend_above(figure: Figure, ax: Axes) -> None:
    """One legend for the whole figure, above its panels."""
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)


def ticks_at(ax: Axes, values: Sequence[int]) -> None:
    """Ticks of a logarithmic axis at these numbers only."""
    ax.set_xticks(values, [str(value) for value in values])
    ax.minorticks_off()


def at_most(name: str, found: float, bound: float) -> Claim:
    """That a number is not larger than a bound."""
    return claims.at_most(name, found, bound)


def digits(split: str, count: int | None = None) -> Images:
    """The digits of scikit-learn as vectors; the first `count` of a fixed random order."""
    x, y = data.digits("train" if split == "train" else "test")
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:count]
    return x.flatten(1)[order], y[order]


def mlp(*sizes: int, seed: int = 0, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers of these sizes with an activation between them, as torch initializes them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for before, after in pairwise(sizes):
            layers += [nn.Linear(before, after), activation()]
        return nn.Sequential(*layers[:-1])


def cross_entropy(f: Tensor, y: Tensor) -> Tensor:
    """The negative log likelihood of labels per point."""
    return nn.functional.cross_entropy(f, y)


def squared_error(f: Tensor, y: Tensor) -> Tensor:
    """Half the mean squared error."""
    return 0.5 * (f - y).square().mean()


@dataclass(frozen=True)
class Training:
    """Adam on all data with a cosine schedule; `decay` adds decay·‖θ‖²/2 to the loss per point.

    With `batch` it is stochastic gradient descent on batches of that size, with momentum 0.9.
    """

    steps: int = 300
    rate: float = 1e-2
    decay: float = 0.0
    cosine: bool = True
    batch: int | None = None

    def __call__(
        self,
        network: nn.Module,
        points: tuple[Tensor, Tensor],
        loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
        watch: Callable[[int, nn.Module], None] | None = None,
    ) -> nn.Module:
        """Train in place, and leave the network in eval mode; `watch(step, network)` sees it on the way."""
        x, y = points
        optimizer: torch.optim.Optimizer = torch.optim.Adam(network.parameters(), lr=self.rate)
        if self.batch is not None:
            optimizer = torch.optim.SGD(network.parameters(), lr=self.rate, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # of dropout and batches
            for step in range(self.steps):
                if watch is not None:
                    watch(step, network.eval())
                network.train()
                optimizer.zero_grad()
                squares = sum(p.square().sum() for p in network.parameters())
                some = slice(None) if self.batch is None else torch.randperm(len(x))[: self.batch]
                (loss(network(x[some]), y[some]) + 0.5 * self.decay * squares).backward()
                optimizer.step()
                if self.cosine:
                    schedule.step()
        if watch is not None:
            watch(self.steps, network.eval())
        return network.eval()


def with_files(topics: Sequence[Topic], *names: str) -> list[Topic]:
    """The topics, or none with a line that says so, if a file is missing in the folder NET2GP_DATA."""
    try:
        missing = [name for name in names if not (data.data_folder() / name).exists()]
    except InputError as error:
        missing = [str(error)]
    if missing:
        names = ", ".join(t.__name__ for t in topics)
        findings.leave_out(f"{names}: left out, without {', '.join(missing)}")
        return []
    return list(topics)


def error_rate(network: Callable[[Tensor], Tensor], points: Images) -> float:
    """The share of pictures that are put into a wrong class."""
    with torch.no_grad():
        return float((network(points[0]).argmax(1) != points[1]).double().mean())


def write(study: Study, out: Path) -> Path:
    """Write the figure of a study, and print its table."""
    return pages.write(study, out, "lecture")


def run(
    topics: Sequence[Topic], description: str | None, arguments: list[str] | None = None
) -> int:
    """The command line of a program: figures, a table of claims, and 0 if all of them hold."""
    return pages.run(topics, description, "lecture", arguments)
