"""CIFAR-10 for `certainty_cifar.py`: test images corrupted by this program, strangers, and a packed folder.

The corruptions and their strengths are five of those of Hendrycks & Dietterich (2019, CIFAR-10-C), computed
here in a few lines each: the numbers are theirs, the images are not. A packed folder has the same layout as
the one that NET2GP_DATA names, with CIFAR-10 in parts that are small enough to be sent one by one.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from net2gp import data

PART = 40_000_000
"""Bytes of a part of the packed data."""

STRENGTHS: dict[str, tuple[float, ...]] = {
    "noise": (0.04, 0.06, 0.08, 0.09, 0.10),
    "blur": (0.4, 0.6, 0.7, 0.8, 1.0),
    "contrast": (0.75, 0.5, 0.4, 0.3, 0.15),
    "brightness": (0.05, 0.1, 0.15, 0.2, 0.3),
    "pixels": (0.95, 0.9, 0.85, 0.75, 0.65),
}
"""For each kind: standard deviations of noise and of the blur in pixels, what is left of the contrast, what
is added to the brightness, and the sides of the smaller images."""


def corrupted(x: Tensor, kind: str, strength: int) -> Tensor:
    """Images (N, 3, H, W) in [0, 1] after a corruption of the strength 1 to 5, in [0, 1] again."""
    amount = STRENGTHS[kind][strength - 1]
    if kind == "noise":
        generator = torch.Generator().manual_seed(strength)
        changed = x + amount * torch.randn(x.shape, generator=generator).to(x)
    elif kind == "blur":
        changed = blurred(x, amount)
    elif kind == "contrast":
        mean = x.mean((2, 3), keepdim=True)
        changed = mean + amount * (x - mean)
    elif kind == "brightness":
        changed = x + amount
    else:
        small = tuple(round(amount * side) for side in x.shape[2:])
        changed = F.interpolate(F.interpolate(x, small, mode="area"), x.shape[2:], mode="nearest")
    return changed.clamp(0, 1)


def blurred(x: Tensor, width: float) -> Tensor:
    """Images after a Gaussian filter of this standard deviation, with edges continued."""
    reach = int(4 * width + 0.5)
    weights = torch.arange(-reach, reach + 1).to(x).div(width).square().mul(-0.5).softmax(0)
    line = weights.expand(x.shape[1], 1, 1, -1)
    x = F.conv2d(F.pad(x, (reach, reach, 0, 0), mode="replicate"), line, groups=x.shape[1])
    tall = line.transpose(2, 3)
    return F.conv2d(F.pad(x, (0, 0, reach, reach), mode="replicate"), tall, groups=x.shape[1])


def strangers(count: int) -> dict[str, Tensor]:
    """Images of other kinds in the format of CIFAR-10: (N, 3, 32, 32) in [0, 1]."""
    generator = torch.Generator().manual_seed(0)
    found = {"Fashion-MNIST": data.fashion_mnist("test")[0], "notMNIST": data.notmnist()[0]}
    images = {
        name: F.pad(x[:count].reshape(-1, 1, 28, 28), (2, 2, 2, 2)).expand(-1, 3, -1, -1)
        for name, x in found.items()
    }
    return images | {"noise": torch.rand(count, 3, 32, 32, generator=generator)}


def pack(folder: Path) -> None:
    """Write what the program reads into `folder`: CIFAR-10 in parts, the rest, beside the last part."""
    source = data.data_folder()
    whole = (source / "cifar10.npz").read_bytes()
    for number, start in enumerate(range(0, len(whole), PART)):
        part = folder / f"part{number}"
        part.mkdir(parents=True, exist_ok=True)
        (part / "bytes").write_bytes(whole[start : start + PART])
    (part / "nets").mkdir(exist_ok=True)
    for name in ("notmnist.npz", "nets/resnet20_cifar10.npz"):
        (part / name).write_bytes((source / name).read_bytes())
    with np.load(source / "fashion_mnist.npz") as stored:
        test = {key: stored[key] for key in ("x_test", "y_test")}
    np.savez_compressed(part / "fashion_mnist.npz", **test)


def use_packed(folder: Path) -> None:
    """Put the parts together, once, and read data from there."""
    parts = sorted(folder.glob("part*"))
    if not parts or not (parts[-1] / "notmnist.npz").is_file():
        raise SystemExit(f"{folder} lacks parts of the data: send all that --pack has written.")
    whole = parts[-1] / "cifar10.npz"
    if not whole.is_file():
        whole.write_bytes(b"".join((part / "bytes").read_bytes() for part in parts))
    os.environ["NET2GP_DATA"] = str(parts[-1])
