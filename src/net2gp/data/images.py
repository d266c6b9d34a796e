"""Public sets of images, and how their colors are standardized.

Images are floats in [0, 1] of shape (N, channels, height, width) in torch's default dtype. Labels are
integers (N,).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from net2gp.data.files import arrays
from net2gp.errors import InputError

Split = Literal["train", "test"]


def _check_split(split: str) -> None:
    if split not in ("train", "test"):
        raise InputError(f"split must be 'train' or 'test', but is {split!r}.")


def _images(x: np.ndarray, y: np.ndarray, full: int = 255) -> tuple[Tensor, Tensor]:
    pixels = torch.from_numpy(x.astype(np.int32))[:, None].to(torch.get_default_dtype()) / full
    return pixels, torch.from_numpy(y.astype(np.int64))


def _split_images(name: str, split: str, full: int = 255) -> tuple[Tensor, Tensor]:
    _check_split(split)
    found = arrays(name, f"x_{split}", f"y_{split}")
    return _images(found[f"x_{split}"], found[f"y_{split}"], full)


def mnist(split: Split = "train") -> tuple[Tensor, Tensor]:
    """Read MNIST, 60,000 and 10,000 digits, from mnist.npz.

    Args:
        split: "train" or "test".

    Returns:
        Images (N, 1, 28, 28) and labels (N,).
    """
    return _split_images("mnist", split)


def fashion_mnist(split: Split = "train") -> tuple[Tensor, Tensor]:
    """Read Fashion-MNIST, 60,000 and 10,000 images, from fashion_mnist.npz.

    Args:
        split: "train" or "test".

    Returns:
        Images (N, 1, 28, 28) and labels (N,).
    """
    return _split_images("fashion_mnist", split)


def usps(split: Split = "train") -> tuple[Tensor, Tensor]:
    """Read USPS, 7,291 and 2,007 digits, from usps.npz, which counts in 1/2000.

    Args:
        split: "train" or "test".

    Returns:
        Images (N, 1, 16, 16) and labels (N,).
    """
    return _split_images("usps", split, full=2000)


def kmnist_test() -> tuple[Tensor, Tensor]:
    """Read the test half of Kuzushiji-MNIST from kmnist_test.npz: x (10000, 1, 28, 28), y (10000,)."""
    found = arrays("kmnist_test", "x", "y")
    return _images(found["x"], found["y"])


def notmnist() -> tuple[Tensor, Tensor]:
    """Read letters A to J in many fonts from notmnist.npz: x (10000, 1, 28, 28), y (10000,)."""
    found = arrays("notmnist", "x", "y")
    return _images(found["x"], found["y"])


def cifar10_bytes(split: Split = "train") -> tuple[Tensor, Tensor]:
    """Read CIFAR-10 as stored images, 50,000 and 10,000, from cifar10.npz.

    The file holds differences modulo 256: between neighboring pixels, and of red and blue against green.
    Sums modulo 256 undo them exactly. The 10,000 test images take about a second.

    Args:
        split: "train" or "test".

    Returns:
        Bytes (N, 32, 32, 3) and labels (N,).
    """
    _check_split(split)
    found = arrays("cifar10", f"r_{split}", f"y_{split}")
    planes = found[f"r_{split}"]
    # uint8 sums wrap around at 256. They are taken in place, since a copy of the training images is 150 MB.
    np.cumsum(planes, axis=-1, dtype=np.uint8, out=planes)
    np.cumsum(planes, axis=-2, dtype=np.uint8, out=planes)
    planes[0] += planes[1]
    planes[2] += planes[1]
    pixels = np.ascontiguousarray(planes.transpose(1, 2, 3, 0))
    return torch.from_numpy(pixels), torch.from_numpy(found[f"y_{split}"].astype(np.int64))


def cifar10(split: Split = "train") -> tuple[Tensor, Tensor]:
    """Read CIFAR-10 as networks take it, 50,000 and 10,000 images, from cifar10.npz.

    Args:
        split: "train" or "test".

    Returns:
        Images (N, 3, 32, 32) in [0, 1] and labels (N,).
    """
    pixels, y = cifar10_bytes(split)
    return pixels.permute(0, 3, 1, 2).contiguous().to(torch.get_default_dtype()).div_(255), y


@dataclass(frozen=True)
class Channels:
    """The mean and standard deviation of each color channel. A call standardizes images.

    Args:
        mean: One mean per channel.
        std: One standard deviation per channel.

    >>> Channels(mean=(0.5,), std=(0.25,))(torch.ones(1, 1, 2, 2)).unique()
    tensor([2.])
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """Standardize images.

        Args:
            x: Images, (N, channels, height, width).

        Returns:
            (x − mean) / std, channel by channel.

        Raises:
            InputError: If the images have another number of channels or axes.
        """
        if x.dim() != 4 or x.shape[1] != len(self.mean):
            raise InputError(
                f"images must have shape (N, {len(self.mean)}, height, width), but have shape "
                f"{tuple(x.shape)}. For bytes (N, height, width, channels) permute the axes first."
            )
        mean, std = (x.new_tensor(value)[:, None, None] for value in (self.mean, self.std))
        return (x - mean) / std


IMAGENET = Channels(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
"""The standardization with which `ResNet20` was trained."""

CIFAR10 = Channels(mean=(0.4914, 0.4822, 0.4465), std=(0.2023, 0.1994, 0.2010))
"""The standardization with which `LeNet5Cifar` was trained."""
