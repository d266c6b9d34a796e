"""Small modules that the reference networks are made of: what a PyTorch user writes in `forward`.

At the end, XLA's padding in numbers that torch's layers take.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Sum(nn.Module):
    """A residual block: the sum of its branches."""

    def __init__(self, branches: list[nn.Module]) -> None:
        super().__init__()
        self.first, self.second = branches

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x)


class Product(nn.Module):
    """A gate: the product of its branches."""

    def __init__(self, branches: list[nn.Module]) -> None:
        super().__init__()
        self.first, self.second = branches

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) * self.second(x)


class Concatenate(nn.Module):
    """The branches side by side along one axis."""

    def __init__(self, branches: list[nn.Module], dim: int) -> None:
        super().__init__()
        self.branches, self.dim = nn.ModuleList(branches), dim

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=self.dim)


class Mean(nn.Module):
    """Global average pooling over some axes."""

    def __init__(self, axes: tuple[int, ...]) -> None:
        super().__init__()
        self.axes = axes

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(self.axes)


class Total(nn.Module):
    """Global sum pooling over some axes."""

    def __init__(self, axes: tuple[int, ...]) -> None:
        super().__init__()
        self.axes = axes

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(self.axes)


class Permuted(nn.Module):
    """A layer of the last axes, where other axes are last."""

    def __init__(self, layer: nn.Module, axes: tuple[int, ...]) -> None:
        super().__init__()
        self.layer, self.axes = layer, axes
        self.inverse = tuple(axes.index(i) for i in range(len(axes)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.permute(self.axes)).permute(self.inverse)


class Times(nn.Module):
    """Multiplication with a number, or with a constant for each place."""

    def __init__(self, factor: float | Tensor) -> None:
        super().__init__()
        if isinstance(factor, Tensor):
            self.register_buffer("factor", factor)
        else:
            self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Contract(nn.Module):
    """Contraction of the last axis with a constant vector or matrix."""

    def __init__(self, constant: Tensor) -> None:
        super().__init__()
        self.register_buffer("constant", constant)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.constant


class Index(nn.Module):
    """x[index]: cropping, striding, one place."""

    def __init__(self, index: tuple[int | slice, ...]) -> None:
        super().__init__()
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        return x[self.index]


class Resize(nn.Module):
    """An image at another resolution."""

    def __init__(self, size: tuple[int, ...], mode: str) -> None:
        super().__init__()
        self.size, self.mode = size, mode

    def forward(self, x: Tensor) -> Tensor:
        if self.mode == "nearest":
            return F.interpolate(x, self.size, mode="nearest-exact")
        return F.interpolate(x, self.size, mode="bilinear", antialias=True)


class Fold(nn.Module):
    """A full transposed convolution whose overhang is wrapped around and added, with a bias after it."""

    def __init__(self, convolution: nn.Module, folds: list[Tensor], channels: int) -> None:
        super().__init__()
        self.convolution = convolution
        self.register_buffer("rows", folds[0])
        self.register_buffer("columns", folds[1].T.contiguous())
        self.bias = nn.Parameter(torch.zeros(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.rows @ self.convolution(x) @ self.columns + self.bias


class Attention(nn.Module):
    """Self-attention over all places of (N, C, places…), maybe with a learned embedding of the places.

    With one head the keys are the queries and their products are divided by the width; with several
    heads keys and queries are drawn apart and the products are divided by its root.
    """

    takes_side = True

    def __init__(self, width: int, heads: int, spatial: tuple[int, ...], mechanism: str) -> None:
        super().__init__()
        self.heads, self.spatial, self.mechanism = heads, spatial, mechanism
        self.depth = width if heads == 1 else max(1, width // heads)
        self.kind = "none"
        self.place_values = False
        self.scale = 1 / self.depth if heads == 1 else self.depth**-0.5
        self.position: nn.Parameter | None = None

    def locate(self, x: Tensor) -> Tensor:
        if self.kind == "sum":
            return x + self.position
        if self.kind == "concat":
            return torch.cat([x, self.position.expand(x.shape[0], -1, -1)], dim=-1)
        return x

    def attend(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        hidden = None if mask is None else mask.flatten(1).unsqueeze(1) == 0
        if self.mechanism == "softmax":
            scores = scores if hidden is None else scores.masked_fill(hidden, float("-inf"))
            return scores.softmax(dim=-1)
        scores = scores if hidden is None else scores.masked_fill(hidden, 0.0)
        functions = {"identity": lambda s: s, "relu": torch.relu, "abs": torch.abs}
        return functions[self.mechanism](scores)

    def split(self, x: Tensor) -> Tensor:
        return x if self.heads == 1 else x.unflatten(-1, (self.heads, self.depth)).transpose(1, 2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x.flatten(2).transpose(1, 2)
        located = self.locate(x)
        key = self.split(self.key(located))
        query = key if self.heads == 1 else self.split(self.query(located))
        value = self.split(self.value(located if self.place_values else x))
        y = self.attend(query @ key.transpose(-2, -1) * self.scale, mask) @ value
        y = y if self.heads == 1 else y.transpose(1, 2).flatten(2)
        y = self.out(y).transpose(1, 2)
        y = y if len(self.spatial) == 1 else y.unflatten(2, self.spatial)
        return y


class Masked(nn.Module):
    """A layer whose outputs at masked places are zero; `places` picks the mask's places that it keeps."""

    takes_side = True

    def __init__(self, layer: nn.Module, places: tuple[slice, ...] | None) -> None:
        super().__init__()
        self.layer, self.places = layer, places

    def next(self, mask: Tensor) -> Tensor:
        return mask if self.places is None else mask[self.places]

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.layer(x) * self.next(mask)


class MaskedMean(nn.Module):
    """The mean over the places that are not masked."""

    takes_side = True

    def __init__(self, axes: tuple[int, ...]) -> None:
        super().__init__()
        self.axes = axes

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return (x * mask).sum(self.axes) / mask.sum(self.axes)


class Aggregate(nn.Module):
    """Every vertex becomes the sum of its predecessors: y[n, j] = Σ_i A[n, i, j] x[n, i]."""

    takes_side = True

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return torch.bmm(adjacency.transpose(1, 2), x)


class AggregateColumns(nn.Module):
    """The same between the columns of an image, row by row."""

    takes_side = True

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return x @ adjacency.unsqueeze(1)


class AggregatePixels(nn.Module):
    """The same between all pixels of an image; the adjacency is (N, H, W, H, W)."""

    takes_side = True

    def __init__(self, size: tuple[int, ...]) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        edges = adjacency.flatten(3).flatten(1, 2).transpose(1, 2)
        pixels = torch.bmm(edges, x.flatten(2).transpose(1, 2))
        return pixels.transpose(1, 2).unflatten(2, self.size)


class TwoInputs(nn.Module):
    """Layers one after another, some of which also take a mask or an adjacency."""

    def __init__(self, steps: list[nn.Module]) -> None:
        super().__init__()
        self.steps = nn.ModuleList(steps)

    def forward(self, x: Tensor, side: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x, side) if getattr(step, "takes_side", False) else step(x)
            side = step.next(side) if isinstance(step, Masked) else side
        return x


def window_of(layer: dict[str, Any], name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The window and its strides, which are 1 if left out."""
    window = tuple(layer[name])
    return window, tuple(layer.get("strides") or (1,) * len(window))


def padding_of(
    size: tuple[int, ...], window: tuple[int, ...], strides: tuple[int, ...], kind: str
) -> tuple[list[tuple[int, int]], tuple[int, ...]]:
    """XLA's padding before and behind, and how many places come out."""
    if kind == "VALID":
        places = [(n - k) // s + 1 for n, k, s in zip(size, window, strides, strict=True)]
        return [(0, 0)] * len(size), tuple(places)
    places = [-(-n // s) for n, s in zip(size, strides, strict=True)]
    sizes = zip(size, window, strides, places, strict=True)
    totals = [max((m - 1) * s + k - n, 0) for n, k, s, m in sizes]
    return [(total // 2, total - total // 2) for total in totals], tuple(places)


def padded_size(size: tuple[int, ...], pads: list[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(n + low + high for n, (low, high) in zip(size, pads, strict=True))


def pad_layer(pads: list[tuple[int, int]], circular: bool) -> nn.Module:
    zeros = {1: nn.ZeroPad1d, 2: nn.ZeroPad2d, 3: nn.ZeroPad3d}
    wrapped = {1: nn.CircularPad1d, 2: nn.CircularPad2d, 3: nn.CircularPad3d}
    amounts = tuple(amount for pair in reversed(pads) for amount in pair)
    return (wrapped if circular else zeros)[len(pads)](amounts)


def transposed_crop(window: int, stride: int) -> int:
    """How many places XLA's SAME leaves out before the first, of the full transposed convolution."""
    total = window + stride - 2
    before = window - 1 if stride > window - 1 else -(-total // 2)
    return window - 1 - before


def fold_matrix(full: int, size: int) -> Tensor:
    """(size, full): every place of the full output wrapped into the middle ones."""
    start = (full - size) // 2
    places = (torch.arange(full) - start) % size
    return F.one_hot(places, size).T.double()
