"""Random choices for random networks, with sizes that coincide more often than chance would have it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

Shape = tuple[int, ...]
T = TypeVar("T")


class Refused(Exception):
    """The wrap does not fit this block."""


class Dice:
    """Choices from one seed. Sizes prefer `base`, so that points, outputs, channels and features agree."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)
        self.base = self.one(2, 2, 3, 3, 4)

    def one(self, *options: T) -> T:
        return self.random.choice(options)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def size(self, smallest: int = 1) -> int:
        if self.chance(0.65) and self.base >= smallest:
            return self.base
        return self.random.randint(smallest, 5)

    def divisor(self, number: int) -> int:
        return self.one(*(d for d in range(1, number + 1) if number % d == 0))


class Step(nn.Module):
    """A network from a function of its parts, which are attributes of the module."""

    def __init__(self, function: Callable, **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def extra_repr(self) -> str:
        return self.function.__qualname__.split(".")[0]

    def forward(self, *x: Tensor, **keywords: Tensor) -> Tensor:
        return self.function(self, *x, **keywords)


def weights(*shape: int, scale: float = 0.7) -> nn.Parameter:
    return nn.Parameter(scale * torch.randn(shape))


Make = Callable[[Shape], nn.Module]
"""A random block that takes points of a shape."""

Build = Callable[[Dice, Shape], nn.Module]
Wrap = Callable[[Dice, Shape, Make], nn.Module]

BLOCKS: dict[int, list[Build]] = {1: [], 2: [], 3: [], 4: []}
"""Builders of blocks by the number of axes of a point."""

TOKENS: list[Build] = []
"""Builders of blocks that take integers, (length,) a point, below `VOCABULARY`."""

WRAPS: list[Wrap] = []
"""What code does around a block."""

VOCABULARY = 4


def block(*ranks: int) -> Callable[[Build], Build]:
    def register(build: Build) -> Build:
        for rank in ranks:
            BLOCKS[rank].append(build)
        return build

    return register


def of_tokens(build: Build) -> Build:
    TOKENS.append(build)
    return build


def wrap(build: Wrap) -> Wrap:
    WRAPS.append(build)
    return build
