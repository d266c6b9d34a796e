"""Rows and posteriors for `conformal.py`, and counts of covered rows beside their law."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from scipy.stats import betabinom, binom
from sklearn.datasets import load_diabetes
from torch import Tensor

import net2gp as n2g
from net2gp import conformal, data

ALPHA = 0.1
KNOWN, CENTRAL = 100, 0.95


@dataclass(frozen=True, eq=False)
class Problem:
    """Rows in one order, which splits permute, and the posterior of some of them."""

    name: str
    x: Tensor
    y: Tensor
    groups: Tensor
    held_out: int
    lengthscale: float
    noise_var: float = math.nan

    def posterior(self, rows: Tensor) -> n2g.Posterior:
        kernel, known = n2g.RBF(lengthscale=self.lengthscale), (self.x[rows], self.y[rows])
        if math.isnan(self.noise_var):
            return n2g.adapt_classes(kernel, known)
        return n2g.condition(kernel, known, n2g.Gaussian(self.noise_var))

    def split(self, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Known, held-out and new rows."""
        order = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(seed))
        end = KNOWN + self.held_out
        return order[:KNOWN], order[KNOWN:end], order[end:]


def diabetes() -> Problem:
    x, y = (torch.from_numpy(v) for v in load_diabetes(return_X_y=True))
    groups = (x[:, 1] > 0).long()
    x, y = (x - x.mean(0)) / x.std(0), ((y - y.mean()) / y.std())[:, None]
    return Problem("diabetes", x, y, groups, 100, 5.0, 0.5)


def waves() -> Problem:
    generator = torch.Generator().manual_seed(0)
    x = 6 * torch.rand(442, 1, generator=generator, dtype=torch.float64) - 3
    z = torch.randn(442, 1, generator=generator, dtype=torch.float64)
    y = torch.sin(2 * x) + (0.05 + 0.05 * x.abs()) * z * z.abs()
    return Problem("waves", x, y, (x[:, 0] > 0).long(), 100, 1.0, 0.003)


def digits() -> Problem:
    parts = [data.digits(which) for which in ("train", "test")]
    x = torch.cat([part[0] for part in parts]).flatten(1).double()
    y = torch.cat([part[1] for part in parts])
    return Problem("digits", x, y, y, 300, 3.0)


@dataclass
class Found:
    """What one method gave: covered rows with their law, widths or sizes, answers, and CPU seconds."""

    counts: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Covered rows, new rows, the rank k, and the number n of calibration rows; one entry per group."""
    shares: list[float] = field(default_factory=list)
    widths: list[float] = field(default_factory=list)
    answers: list[np.ndarray] = field(default_factory=list)
    seconds: float = math.nan

    @property
    def coverage(self) -> float:
        if not self.counts:
            return float(np.mean(self.shares))
        return sum(c for c, *_ in self.counts) / sum(m for _, m, *_ in self.counts)

    @property
    def distance(self) -> float:
        """From the promise, in standard errors of the beta-binomial laws."""
        gap = sum(c - m * k / (n + 1) for c, m, k, n in self.counts)
        return gap / math.sqrt(sum(betabinom.var(m, k, n + 1 - k) for _, m, k, n in self.counts))

    @property
    def outside(self) -> tuple[float, float]:
        """The share of entries outside the central part of their law, and what chance allows."""
        tail = (1 - CENTRAL) / 2
        share = chance = 0.0
        for c, m, k, n in self.counts:
            low, high = (betabinom.ppf(q, m, k, n + 1 - k) for q in (tail, 1 - tail))
            inside = betabinom.cdf(high, m, k, n + 1 - k) - betabinom.cdf(low - 1, m, k, n + 1 - k)
            share, chance = share + (not low <= c <= high), chance + 1 - inside
        total = len(self.counts)
        return share / total, float(binom.ppf(0.999, total, chance / total)) / total


def counted(
    promise: conformal.Promise, inside: Tensor, place: Tensor | None
) -> Iterator[tuple[int, int, int, int]]:
    """Covered rows and the numbers of their law, for each group."""
    for g, n in enumerate(promise.groups.counts):
        mine = inside if place is None else inside[place == g]
        if len(mine):
            k = math.ceil((1 - ALPHA) * (n + 1) - 1e-9)
            yield int(mine.sum()), len(mine), k, n
