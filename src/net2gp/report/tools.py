"""What the scenes of the demo share: training, timing, and the display of the code that ran."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from textwrap import dedent
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from matplotlib.figure import Figure as MatplotlibFigure

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Stopwatch:
    """Durations of steps. Steps of the same name add up.

    Args:
        seconds: The durations so far.

    >>> watch = Stopwatch()
    >>> with watch("training"):
    ...     pass
    >>> list(watch.seconds)
    ['training']
    """

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, step: str) -> Iterator[None]:
        """Time the block as `step`."""
        start = perf_counter()
        yield
        self.seconds[step] = self.seconds.get(step, 0.0) + perf_counter() - start


def train(
    network: nn.Module, data: tuple[Tensor, Tensor], loss: Loss, *, steps: int, rate: float = 1e-2
) -> nn.Module:
    """Train with full-batch Adam and a cosine schedule, and set eval mode. Frozen parameters stay fixed."""
    x, y = data
    optimizer = torch.optim.Adam([p for p in network.parameters() if p.requires_grad], lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    network.train()
    for _ in range(steps):
        optimizer.zero_grad()
        loss(network(x), y).backward()
        optimizer.step()
        schedule.step()
    return network.eval()


def mlp(*sizes: int) -> nn.Sequential:
    """Build linear layers of these sizes with tanh between them.

    >>> len(mlp(1, 20, 1))
    3
    """
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def shown(function: Callable[..., Any]) -> str:
    """Return the statements of a function as text, without its docstring and its last return.

    The page shows the code that ran. A copy of the code could become different from it.
    """
    source = dedent(inspect.getsource(function))
    definition = ast.parse(source).body[0]
    assert isinstance(definition, ast.FunctionDef)
    body = definition.body
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]
    if isinstance(body[-1], ast.Return):
        body = body[:-1]
    lines = source.splitlines()[body[0].lineno - 1 : body[-1].end_lineno]
    return dedent("\n".join(lines))


def canvas(width: float, height: float) -> MatplotlibFigure:
    """Make an empty figure of that size in inches, independent of the global state of pyplot."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")
