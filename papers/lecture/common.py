"""What the programs of the lecture share: a small trainer, the form of a study, and the command line."""

from __future__ import annotations

import argparse
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
from claims import Claim
from matplotlib.axes import Axes
from matplotlib.figure import Figure

WIDTH = 4.2
"""Inches per panel of a figure."""

Images = tuple[Tensor, Tensor]
"""Flat pictures (N, 64) and labels (N,)."""


@dataclass(frozen=True, eq=False)
class Study:
    """A figure, what it shows, and the claims that were checked.

    A topic is a function from `quick` to a study; `page.py` has the list of topics.
    """

    name: str
    title: str
    text: str
    figure: Figure
    claims: tuple[Claim, ...]
    table: str = ""
    """Numbers in columns, for the terminal and the page."""


Topic = Callable[[bool], Study]


def tidy(ax: Axes) -> None:
    """Take away the frame's upper and right line."""
    ax.spines[["top", "right"]].set_visible(False)


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


def at_least(name: str, found: float, bound: float) -> Claim:
    """That a number is not smaller than a bound."""
    return Claim(f"{name}: at least {bound:g}", f"{found:.3g}", found >= bound)


def within(name: str, found: float, low: float, high: float) -> Claim:
    """That a number is between two others."""
    return Claim(f"{name}: from {low:g} to {high:g}", f"{found:.3g}", low <= found <= high)


def panels(count: int, height: float = 3.4) -> tuple[Figure, list]:
    """A row of axes, apart from pyplot's global state."""
    figure = Figure(figsize=(WIDTH * count, height), layout="constrained")
    axes = figure.subplots(1, count, squeeze=False)[0]
    return figure, list(axes)


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
        print(f"{', '.join(t.__name__ for t in topics)}: left out, without {', '.join(missing)}")
        return []
    return list(topics)


def error_rate(network: Callable[[Tensor], Tensor], points: Images) -> float:
    """The share of pictures that are put into a wrong class."""
    with torch.no_grad():
        return float((network(points[0]).argmax(1) != points[1]).double().mean())


def write(study: Study, out: Path) -> Path:
    """Write the figure of a study, and print its table."""
    if study.table:
        print(study.table)
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"lecture_{study.name}.png"
    study.figure.savefig(path, dpi=160)
    return path


def run(
    topics: Sequence[Topic], description: str | None, arguments: list[str] | None = None
) -> int:
    """The command line of a program: figures, a table of claims, and 0 if all of them hold."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder for the figures")
    parser.add_argument(
        "--quick", action="store_true", help="smaller sizes, seconds instead of minutes"
    )
    options = parser.parse_args(arguments)
    good = True
    for topic in topics:
        study = topic(options.quick)
        print(write(study, options.out))
        good = claims.judge(study.claims) and good
    return 0 if good else 1
