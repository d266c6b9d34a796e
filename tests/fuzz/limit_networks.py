"""Random networks of blocks, their limits, and whether finite networks have them."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import torch
from torch import Tensor, nn

from fuzz.limit_blocks import VECTORS
from fuzz.limit_referee import deviation, estimate, extrapolated
from fuzz.limit_sequences import LENGTH, MAPS, SEQUENCES
from net2gp.errors import InputError, NetworkError
from net2gp.limits.kernels import infinite_width

SMALL = 8
OUTPUTS = 256
POINTS = 3
CPU_SECONDS = 60
"""For one limit, of this program's own time: a busy machine does not count."""

BAD = ("wrong", "raw", "timeout")


class Network(nn.Module):
    """A layer of weights, some blocks, and a head over the mean of positions."""

    def __init__(self, seed: int, width: int) -> None:
        super().__init__()
        pick = random.Random(seed)
        self.kind = ("vector", "vector", "sequence", "map", "vector", "tokens")[seed % 6]
        blocks = {"vector": VECTORS, "map": MAPS}.get(self.kind, SEQUENCES)
        if self.kind == "tokens":
            self.first: nn.Module = nn.Embedding(5, width, padding_idx=pick.choice((None, 2)))
        elif self.kind == "map":
            self.first = nn.Conv1d(3, width, 3, padding=1)
        else:
            self.first = nn.Linear(3, width)
        chosen = [pick.choice(blocks) for _ in range(pick.randint(1, 2))]
        self.blocks = nn.ModuleList(block(pick, width) for block in chosen)
        self.act = pick.choice((torch.relu, torch.erf))
        self.ending = pick.choice(("mean", "flat", "last"))
        places = 1 if self.kind == "vector" or self.ending != "flat" else LENGTH
        self.head = nn.Linear(width * places, OUTPUTS)
        self.train(pick.random() < 0.3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = block(h, x)
        u = self.act(h)
        if self.kind != "vector":
            axis = 2 if self.kind == "map" else 1
            if self.ending == "flat":
                u = u.flatten(1)
            else:
                u = u.mean(axis) if self.ending == "mean" else u.select(axis, -1)
        return self.head(u)

    @property
    def title(self) -> str:
        """Its blocks, and whether it is in training."""
        names = [f"{type(b).__name__}({b.choice:.2f})" for b in self.blocks]
        return f"{self.kind} {' '.join(names)}{' train' if self.training else ''}"


@dataclass(frozen=True)
class Outcome:
    """What became of one network."""

    seed: int
    verdict: str
    title: str
    text: str


def inputs_of(seed: int) -> Tensor:
    """Three points for the network of this number."""
    generator = torch.Generator().manual_seed(seed)
    kind = Network(seed, SMALL).kind
    if kind == "tokens":
        return torch.randint(5, (POINTS, LENGTH), generator=generator)
    shape = {"vector": (3,), "sequence": (LENGTH, 3), "map": (3, LENGTH)}[kind]
    return torch.randn(POINTS, *shape, generator=generator, dtype=torch.float64)


class TooLong(BaseException):
    """The time for one network is over."""


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise `TooLong` after so many seconds of this process's own time."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooLong

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def outcome(seed: int) -> Outcome:
    """The limit of the network of this number, and whether finite networks have it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _outcome(seed)


def _outcome(seed: int) -> Outcome:
    network, x, variances = Network(seed, SMALL).double(), inputs_of(seed), (1.5, 0.2)
    title = network.title
    try:
        with time_limit(CPU_SECONDS):
            found = infinite_width(network, weight_var=variances[0], bias_var=variances[1])
            limit = torch.stack([k.double() for k in found(x)])
    except (NetworkError, InputError) as error:
        return Outcome(seed, "refused", title, str(error).split("\n")[0])
    except TooLong:
        return Outcome(seed, "timeout", title, "")
    except Exception as error:
        return Outcome(seed, "raw", title, f"{type(error).__name__}: {error}")
    if not bool(limit.isfinite().all()):
        return Outcome(seed, "wrong", title, "not finite")
    make = lambda width: Network(seed, width)
    z, part = deviation(estimate(make, x, 96, 48, variances), limit)
    if z > 4 and part > 0.05:
        pair = [estimate(make, x, width, 200, variances) for width in (96, 192)]
        z, part = deviation(extrapolated(*pair), limit)
    wrong = z > 5 and part > 0.05
    return Outcome(seed, "wrong" if wrong else "agrees", title, f"z {z:.1f}, {part:.1%} off")
