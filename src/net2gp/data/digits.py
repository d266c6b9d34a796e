"""The 8 × 8 digits that come with scikit-learn."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from net2gp.errors import InputError


def digits(split: Literal["train", "test"] = "train") -> tuple[Tensor, Tensor]:
    """Read handwritten digits without a download.

    These are the 1797 digits that scikit-learn ships. Every fourth digit of each class is a test digit,
    which keeps classes and writers balanced.

    Args:
        split: "train" or "test".

    Returns:
        Images (N, 1, 8, 8) in [0, 1] and labels (N,) in 0..9.

    Raises:
        InputError: If `split` is something else.
        ImportError: If scikit-learn is not installed.

    >>> x, y = digits("test")
    >>> x.shape, float(x.max())
    (torch.Size([445, 1, 8, 8]), 1.0)

    Reference: Alpaydin & Kaynak (1998), Optical recognition of handwritten digits.
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
