"""The 8 × 8 digits that come with scikit-learn."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from net2gp.errors import InputError


def digits(split: Literal["train", "test"] = "train") -> tuple[Tensor, Tensor]:
    """Handwritten digits: x (N, 1, 8, 8) in [0, 1], y (N,) in 0..9; no download.

    1797 digits of scikit-learn's bundled copy; in every class each fourth one is a test digit,
    which keeps the classes and the writers balanced.

    Reference: Alpaydin & Kaynak (1998), Optical recognition of handwritten digits.

    >>> x, y = digits("test")
    >>> x.shape, float(x.max())
    (torch.Size([445, 1, 8, 8]), 1.0)
    """
    if split not in ("train", "test"):
        raise InputError(f"split must be 'train' or 'test', but is {split!r}.")
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "the digits come with scikit-learn, which is not installed: pip install net2gp[plots]"
        ) from error
    bunch = load_digits()
    x = torch.as_tensor(bunch.images, dtype=torch.get_default_dtype())[:, None] / 16
    y = torch.as_tensor(bunch.target, dtype=torch.int64)
    rank = torch.empty_like(y)
    for label in range(10):
        rank[y == label] = torch.arange(int((y == label).sum()))
    chosen = (rank % 4 == 3) == (split == "test")
    return x[chosen], y[chosen]
