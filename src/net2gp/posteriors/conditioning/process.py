"""The law of f: what differs between the methods that find a posterior."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from net2gp.inputs import chunks
from net2gp.likelihoods.links import Contrast
from net2gp.types import Inputs, Kernel

BLOCK_NUMBERS = 2**25
"""Numbers of the covariances of one chunk of points."""


class Process(Protocol):
    """A Gaussian process f as predictions and samples need it; its data and likelihood are elsewhere.

    A process of a kernel also has `centered(x)`, its mean without the prior's. One around a network also has
    `linearized`, `covariance`, `prior_var`, `draw_weights` and `draw_networks`.
    """

    @property
    def num_outputs(self) -> int:
        """C."""

    @property
    def kernel(self) -> Kernel:
        """The covariance function of the prior."""

    def facts(self) -> dict[str, str]:
        """What it says of itself, by name."""

    def check(self, x: Inputs) -> None:
        """Raise an error that says what to change, if `x` cannot be points of this process."""

    def mean(self, x: Inputs) -> Tensor:
        """E f(x): (N, C), without any variance."""

    def moments(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """The mean (N, C) and the covariance of each point by itself (N, C, C)."""

    def diagonal(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """The mean and the variances: (N, C) each."""

    def contrast(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """The mean and Var[f_c − f_t] for the class t of the largest mean: (N, C) each."""

    def joint(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """The mean (N·C,) and the covariance (N·C, N·C) of all points together, index n·C + c."""

    def prior_variances(self, x: Inputs) -> Tensor:
        """The variances before any data: (N, C)."""

    def functions(
        self, num_samples: int, generator: torch.Generator | None
    ) -> Callable[[Inputs], Tensor]:
        """Functions drawn from the process, inputs to (S, N, C), if it can be drawn as functions."""


def contrast_by_blocks(process: Process, x: Inputs) -> tuple[Tensor, Tensor]:
    """`Process.contrast` from the covariances (N, C, C), a chunk of points at a time."""
    means, variances = [], []
    for part in chunks(x, max(1, BLOCK_NUMBERS // process.num_outputs**2)):
        mean, blocks = process.moments(part)
        means.append(mean)
        # before anything is rounded to the network's dtype: variances of contrasts are small differences
        variances.append(Contrast.variances(mean.to(blocks.dtype), blocks).to(mean.dtype))
    return torch.cat(means), torch.cat(variances)
