"""Random numbers, drawn where their generator lives, and random choices that are always the same."""

from __future__ import annotations

import torch
from torch import Tensor


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
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(total, generator=generator)[:count].sort().values
