"""Structural layers that torch lacks: sum pooling, and convolutions that do not share their weights.

They are ordinary modules that train, move and save like any other, and they have an infinite-width limit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from net2gp.errors import InputError


class SumPool1d(nn.Module):
    """Sums over windows: y[n, c, t] = Σ_k x[n, c, stride · t + k − padding], with zeros beyond the edge.

    The cost is O(N·C·T·window).

    Args:
        kernel_size: The size of the window.
        stride: The distance between windows; None takes the size of the window, as in `nn.AvgPool1d`.
        padding: How many zeros are added at both ends.

    Reference: average pooling times the window's size (https://arxiv.org/abs/1912.02803, table 2).

    >>> SumPool1d(2)(torch.arange(6.0).reshape(1, 1, 6))
    tensor([[[1., 5., 9.]]])
    """

    def __init__(self, kernel_size: int, stride: int | None = None, padding: int = 0) -> None:
        super().__init__()
        self.kernel_size = _sizes(kernel_size, 1, "kernel_size")
        self.stride = _sizes(kernel_size if stride is None else stride, 1, "stride")
        self.padding = _sizes(padding, 1, "padding", least=0)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C, T) to (N, C, T')."""
        padded = F.pad(x, self.padding * 2)
        return padded.unfold(-1, self.kernel_size[0], self.stride[0]).sum(-1)

    def extra_repr(self) -> str:
        """Return the window, for printing."""
        return _window(self)


class SumPool2d(nn.Module):
    """Sums over windows of (kernel_height, kernel_width), with zeros beyond the edge.

    The cost is O(N·C·H·W·window).

    Args:
        kernel_size: The size of the window, one number or one per axis.
        stride: The distance between windows; None takes the size of the window, as in `nn.AvgPool2d`.
        padding: How many zeros are added at both ends, one number or one per axis.

    Reference: average pooling times the window's size (https://arxiv.org/abs/1912.02803, table 2).

    >>> SumPool2d(2)(torch.arange(8.0).reshape(1, 1, 2, 4))
    tensor([[[[10., 18.]]]])
    """

    def __init__(
        self,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        padding: int | Sequence[int] = 0,
    ) -> None:
        super().__init__()
        self.kernel_size = _sizes(kernel_size, 2, "kernel_size")
        self.stride = _sizes(kernel_size if stride is None else stride, 2, "stride")
        self.padding = _sizes(padding, 2, "padding", least=0)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C, H, W) to (N, C, H', W')."""
        padded = F.pad(x, _both_sides(self.padding))
        return F.avg_pool2d(padded, self.kernel_size, self.stride, divisor_override=1)

    def extra_repr(self) -> str:
        """Return the window, for printing."""
        return _window(self)


class SumPool3d(nn.Module):
    """Sums over windows of (kernel_depth, kernel_height, kernel_width), with zeros beyond the edge.

    The cost is O(N·C·D·H·W·window).

    Args:
        kernel_size: The size of the window, one number or one per axis.
        stride: The distance between windows; None takes the size of the window, as in `nn.AvgPool3d`.
        padding: How many zeros are added at both ends, one number or one per axis.

    Reference: average pooling times the window's size (https://arxiv.org/abs/1912.02803, table 2).

    >>> SumPool3d(2)(torch.ones(1, 1, 2, 2, 4))
    tensor([[[[[8., 8.]]]]])
    """

    def __init__(
        self,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        padding: int | Sequence[int] = 0,
    ) -> None:
        super().__init__()
        self.kernel_size = _sizes(kernel_size, 3, "kernel_size")
        self.stride = _sizes(kernel_size if stride is None else stride, 3, "stride")
        self.padding = _sizes(padding, 3, "padding", least=0)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C, D, H, W) to (N, C, D', H', W')."""
        padded = F.pad(x, _both_sides(self.padding))
        return F.avg_pool3d(padded, self.kernel_size, self.stride, divisor_override=1)

    def extra_repr(self) -> str:
        """Return the window, for printing."""
        return _window(self)


class _LocallyConnected(nn.Module):
    """A layer with its own weights and biases at every place of an input with `rank` axes of positions."""

    rank: ClassVar[int]
    bias: nn.Parameter | None

    def __init__(
        self,
        input_shape: Sequence[int],
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        padding_mode: str = "zeros",
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.in_channels, *size = _sizes(input_shape, 1 + self.rank, "input_shape")
        self.input_size, self.out_channels = tuple(size), out_channels
        self.kernel_size = _sizes(kernel_size, self.rank, "kernel_size")
        self.stride = _sizes(stride, self.rank, "stride")
        self.padding = _sizes(padding, self.rank, "padding", least=0)
        self.padding_mode = _check_mode(padding_mode)
        self.output_size = _places(self.input_size, self.kernel_size, self.stride, self.padding)
        filters = (out_channels, self.in_channels, *self.kernel_size)
        self.weight = nn.Parameter(torch.empty(*filters, *self.output_size))
        self.bias = nn.Parameter(torch.empty(out_channels, *self.output_size)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights, as a convolution does."""
        _reset(self.weight, self.bias, self.in_channels * math.prod(self.kernel_size))

    def extra_repr(self) -> str:
        """Return the arguments of the constructor, for printing."""
        return _connections(self)


class LocallyConnected1d(_LocallyConnected):
    """A convolution with its own weights at every place:

        y[n, o, t] = bias[o, t] + Σ_{c, k} weight[o, c, k, t] · x[n, c, stride · t + k − padding].

    Weights and biases start uniform within ±1/√(in_channels · kernel_size), as in `nn.Conv1d`.
    Cost: O(N · out_channels · in_channels · kernel_size · places).
    Reference: Novak et al., Bayesian deep convolutional networks with many channels are Gaussian
    processes (https://arxiv.org/abs/1810.05148).

    Args:
        input_shape: (in_channels, length), since the number of weights depends on both.
        out_channels: The number of channels of the output.
        kernel_size: The places of a window.
        stride: The distance between windows.
        padding: The places added at both ends.
        padding_mode: What is added, "zeros" or "circular".
        bias: Whether there are biases, one per channel and place of the output.

    Raises:
        InputError: A size is no positive whole number, or the window is larger than the padded input.

    >>> layer = LocallyConnected1d((3, 8), out_channels=5, kernel_size=3, padding=1)
    >>> layer.weight.shape, layer(torch.zeros(2, 3, 8)).shape
    (torch.Size([5, 3, 3, 8]), torch.Size([2, 5, 8]))
    """

    rank = 1

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, in_channels, T) to (N, out_channels, T')."""
        _check_input(x, self.in_channels, self.input_size)
        patches = _pad(x, self.padding, self.padding_mode).unfold(
            2, self.kernel_size[0], self.stride[0]
        )
        y = torch.einsum("nctk,ockt->not", patches, self.weight)
        return y if self.bias is None else y + self.bias


class LocallyConnected2d(_LocallyConnected):
    """A convolution with its own weights at every place:

        y[n, o, h, w] = bias[o, h, w] + Σ_{c, i, j} weight[o, c, i, j, h, w]
                                        · x[n, c, stride · h + i − padding, stride · w + j − padding].

    Weights and biases start uniform within ±1/√(in_channels · kernel_height · kernel_width), as in
    `nn.Conv2d`.
    Cost: O(N · out_channels · in_channels · kernel_height · kernel_width · places).
    Reference: Novak et al., Bayesian deep convolutional networks with many channels are Gaussian
    processes (https://arxiv.org/abs/1810.05148).

    Args:
        input_shape: (in_channels, height, width), since the number of weights depends on all three.
        out_channels: The number of channels of the output.
        kernel_size: The places of a window, one number or one per axis.
        stride: The distance between windows, one number or one per axis.
        padding: The places added at both ends, one number or one per axis.
        padding_mode: What is added, "zeros" or "circular".
        bias: Whether there are biases, one per channel and place of the output.

    Raises:
        InputError: A size is no positive whole number, or the window is larger than the padded input.

    >>> layer = LocallyConnected2d((3, 8, 6), out_channels=5, kernel_size=3, stride=2)
    >>> layer.weight.shape, layer(torch.zeros(2, 3, 8, 6)).shape
    (torch.Size([5, 3, 3, 3, 3, 2]), torch.Size([2, 5, 3, 2]))
    """

    rank = 2

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, in_channels, H, W) to (N, out_channels, H', W')."""
        _check_input(x, self.in_channels, self.input_size)
        padded = _pad(x, self.padding, self.padding_mode)
        rows = padded.unfold(2, self.kernel_size[0], self.stride[0])
        patches = rows.unfold(3, self.kernel_size[1], self.stride[1])
        y = torch.einsum("nchwij,ocijhw->nohw", patches, self.weight)
        return y if self.bias is None else y + self.bias


def _sizes(value: int | Sequence[int], count: int, name: str, *, least: int = 1) -> tuple[int, ...]:
    """Return one whole number per axis."""
    sizes = (value,) * count if isinstance(value, int) else tuple(value)
    if len(sizes) != count or any(not isinstance(n, int) or n < least for n in sizes):
        example = (3,) * count if least else (1,) * count
        raise InputError(
            f"{name} must be {count} whole number{'s' * (count > 1)} of at least {least}, but {value!r}"
            f" was given. Pass for example {name}={example if count > 1 else example[0]}."
        )
    return sizes


def _check_mode(mode: str) -> str:
    if mode not in ("zeros", "circular"):
        raise InputError(
            f"padding_mode must be 'zeros' or 'circular', but {mode!r} was given. For another, put a "
            "padding layer before this one, e.g. nn.ReflectionPad2d(1)."
        )
    return mode


def _places(
    size: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
) -> tuple[int, ...]:
    """Return how many places the window takes along each axis."""
    axes = zip(size, kernel, stride, padding, strict=True)
    places = tuple((n + 2 * p - k) // s + 1 for n, k, s, p in axes)
    if min(places) < 1:
        raise InputError(
            f"kernel_size must fit into the padded input, but the kernel is {kernel} and the input "
            f"{size} with padding {padding}. Pass a smaller kernel_size, or more padding."
        )
    return places


def _check_input(x: Tensor, channels: int, size: tuple[int, ...]) -> None:
    if tuple(x.shape[1:]) != (channels, *size):
        raise InputError(
            f"x must have shape (N, {', '.join(map(str, (channels, *size)))}), as the input_shape that "
            f"the layer was made for, but {tuple(x.shape)} came. Make the layer with "
            f"input_shape={tuple(x.shape[1:])}."
        )


def _both_sides(padding: tuple[int, ...]) -> list[int]:
    """Return the same padding before and behind, last axis first, as `F.pad` expects it."""
    return [p for size in reversed(padding) for p in (size, size)]


def _pad(x: Tensor, padding: tuple[int, ...], mode: str) -> Tensor:
    if not any(padding):
        return x
    return F.pad(x, _both_sides(padding), mode="constant" if mode == "zeros" else mode)


def _reset(weight: Tensor, bias: Tensor | None, fan_in: int) -> None:
    bound = 1 / math.sqrt(fan_in)
    nn.init.uniform_(weight, -bound, bound)
    if bias is not None:
        nn.init.uniform_(bias, -bound, bound)


def _window(pool: SumPool1d | SumPool2d | SumPool3d) -> str:
    return f"kernel_size={pool.kernel_size}, stride={pool.stride}, padding={pool.padding}"


def _connections(layer: _LocallyConnected) -> str:
    shape = (layer.in_channels, *layer.input_size)
    mode = "" if layer.padding_mode == "zeros" else f", padding_mode={layer.padding_mode!r}"
    bias = "" if layer.bias is not None else ", bias=False"
    return (
        f"{shape}, {layer.out_channels}, kernel_size={layer.kernel_size}, stride={layer.stride}, "
        f"padding={layer.padding}{mode}{bias}"
    )
