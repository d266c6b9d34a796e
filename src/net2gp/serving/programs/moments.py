"""What a program computes of the law of f, before the likelihood."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from net2gp.types import Inputs


@dataclass(frozen=True, eq=False)
class Moments:
    """The law of f(x) at B points, as a graph computes it.

    Args:
        mean: The means, (B, C).
        blocks: The covariances, (B, C, C), in float64.
        novelty: The share of the prior variance that the training inputs leave open, (B,), or None.
        excess: By how much points are more novel than ordinary ones, (B,), or None.
        gained: The variance that predictions gain at novel points, (B, C), or None.
        draws: Outputs of S drawn networks (S, B, C) in place of a Gaussian law, or None.
    """

    mean: Tensor
    blocks: Tensor
    novelty: Tensor | None = None
    excess: Tensor | None = None
    gained: Tensor | None = None
    draws: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Law:
    """A function from points to `Moments` that can be traced.

    Args:
        moments: The function.
        num_outputs: The number of outputs C.
        structure: What the program is made of, in a few words.
        carries: What it holds of the training data.
        advice: What to do if its operations depend on values, so that they cannot be written down.
    """

    moments: Callable[[Inputs], Moments]
    num_outputs: int
    structure: str
    carries: str
    advice: str = "Pass draws=32, which needs the network's forward pass alone."


def left_open(covariances: Tensor, prior_variances: Tensor) -> Tensor:
    """Return the share of the prior variance that data leave open, (B,), zero where there is none.

    Args:
        covariances: Covariances of the outputs, (B, C, C).
        prior_variances: Their variances before any data, (B, C).
    """
    left = covariances.diagonal(dim1=1, dim2=2).sum(-1)
    whole = prior_variances.to(left).sum(-1)
    return torch.where(whole > 0, left / torch.where(whole > 0, whole, 1.0), 0.0)
