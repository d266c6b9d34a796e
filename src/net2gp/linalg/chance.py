"""Random numbers, drawn where their generator lives, and random choices that are always the same."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

MANY = 10**5
"""Numbers of which a choice is made without an order of all of them."""

ROWS = 64
"""Rows whose random numbers are drawn together, unless these are more than `NUMBERS`."""

NUMBERS = 2**24


def random_normal(
    shape: tuple[int, ...],
    *,
    generator: torch.Generator | None,
    device: torch.device | str,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Standard normal numbers on `device`, drawn where the generator lives."""
    source = generator.device if generator is not None else device
    return torch.randn(shape, dtype=dtype, device=source, generator=generator).to(device)


def normal_like(
    like: Tensor, generator: torch.Generator, shape: tuple[int, ...] | None = None
) -> Tensor:
    """Standard normal numbers in the dtype and on the device of a tensor, and in its shape by default."""
    size = like.shape if shape is None else shape
    return torch.randn(size, generator=generator, device=like.device, dtype=like.dtype)


def fixed_choice(total: int, count: int, seed: int = 0) -> Tensor:
    """At most `count` of the numbers below `total`, in order, the same ones in each call.

    >>> fixed_choice(5, 5), len(fixed_choice(100, 7))
    (tensor([0, 1, 2, 3, 4]), 7)
    """
    if total > MANY:
        found = np.random.default_rng(seed).choice(total, min(count, total), False, shuffle=False)
        return torch.from_numpy(np.sort(found))
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(total, generator=generator)[:count].sort().values


def by_rows(
    draw: Callable[[int, torch.Generator], Tensor],
    first: int,
    count: int,
    seed: int,
    device: torch.device | str = "cpu",
    *,
    width: int = 1,
) -> Tensor:
    """Random numbers that belong to rows: the same ones in whatever pieces the rows come.

    Args:
        draw: Draws numbers for some rows, which are the first axis, from a generator.
        first: The number of the first row.
        count: How many rows.
        seed: The seed of all numbers.
        device: Where the generator lives.
        width: How many numbers a row has; of long rows fewer are drawn together.

    Returns:
        The numbers of these rows.

    >>> draw = lambda rows, generator: torch.rand(rows, generator=generator)
    >>> bool((by_rows(draw, 0, 200, seed=0)[70:] == by_rows(draw, 70, 130, seed=0)).all())
    True
    """
    together = min(ROWS, max(1, NUMBERS // width))
    blocks = range(first // together, (first + count - 1) // together + 1)
    seeds = [(1_000_003 * (seed + 1) + block) % 2**63 for block in blocks]
    parts = [draw(together, torch.Generator(device).manual_seed(one)) for one in seeds]
    start = first - together * blocks.start
    return torch.cat(parts)[start : start + count]
