"""A batch as a program sees it: its data, and what is known of each point, in rows that can be cut."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from net2gp.limits.moments.evaluation import Evaluation, Pair, Profile
from net2gp.limits.moments.expression_moments import run
from net2gp.limits.plan import Plan
from net2gp.limits.prior import Prior

TILE_BYTES = 2**21
"""The size of a tile of moments in single precision; a tile in double precision takes half of it."""


@dataclass(frozen=True, eq=False)
class Tiles:
    """A batch as a program sees it, in rows that can be cut.

    Args:
        plan: The plan for inputs of this shape.
        prior: The variances of the weights.
        data: The tensors that the program reads, each (positions, points, channels).
        tangent: Whether the tangent kernel is computed too.
        profile: What the program needs of single points, such as variances; points lie on the last axis.
        own: The moments of the output of each point with itself, and their tangent kernel.
    """

    plan: Plan
    prior: Prior
    data: dict[str, Tensor]
    tangent: bool
    profile: Profile
    own: Pair

    @staticmethod
    def of(plan: Plan, prior: Prior, data: dict[str, Tensor], tangent: bool) -> Tiles:
        """Run the program over each point with itself, which gives profile and diagonal."""
        n = next(iter(data.values())).shape[1]
        entries = positions(plan)
        on_gpu = next(iter(data.values())).is_cuda
        budget = large_tile(entries) if on_gpu else small_tile(prior.dtype)
        size = max(1, budget // entries)
        profiles: list[Profile] = []
        owns: list[Pair] = []
        for start in range(0, n, size):
            part = {name: t[:, start : start + size] for name, t in data.items()}
            evaluation = Evaluation(plan.program, prior, tangent, part)
            owns.append(run(evaluation))
            profiles.append(evaluation.profile)
        profile = {key: torch.cat([one[key] for one in profiles], -1) for key in profiles[0]}
        cov = torch.cat([own[0] for own in owns], -1)
        tangents = [own[1] for own in owns if own[1] is not None]
        ntk = torch.cat(tangents, -1) if tangents else (torch.zeros_like(cov) if tangent else None)
        return Tiles(plan, prior, data, tangent, profile, (cov, ntk))

    @property
    def device(self) -> torch.device:
        """Return the device of the data."""
        return next(iter(self.data.values())).device

    @property
    def count(self) -> int:
        """Return the number of points."""
        return next(iter(self.data.values())).shape[1]

    def rows(self, start: int, stop: int) -> Tiles:
        """Return the points from `start` to before `stop`."""
        return replace(
            self,
            data={name: t[:, start:stop] for name, t in self.data.items()},
            profile={key: t[..., start:stop] for key, t in self.profile.items()},
        )


def positions(plan: Plan) -> int:
    """Return the largest number of entries that one pair of points has in any signal."""
    full = plan.program.full
    return max(prod(e.positions) ** (2 if full[e.order] else 1) for e in plan.program.nodes)


def large_tile(entries: int) -> int:
    """Return the number of entries of a tile on a GPU, which is smaller for signals with positions."""
    return 2**29 if entries == 1 else 2**28


def small_tile(dtype: torch.dtype) -> int:
    """Return the number of entries of a tile that fits into a core's cache with all intermediate results."""
    return TILE_BYTES // 4 if dtype.itemsize <= 4 else TILE_BYTES // 2 // dtype.itemsize


def pairs(left: Tiles, right: Tiles) -> Pair:
    """Return the moments of the output between all points of two batches."""
    evaluation = Evaluation(
        left.plan.program,
        left.prior,
        left.tangent,
        left.data,
        right.data,
        (left.profile, right.profile),
    )
    cov, ntk = run(evaluation)
    if left.tangent and ntk is None:
        ntk = torch.zeros_like(cov)
    return cov, ntk
