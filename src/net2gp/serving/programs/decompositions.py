"""Backward operations in terms of operations that every runtime has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions

aten = torch.ops.aten


@lru_cache(maxsize=1)
def table() -> dict[Any, Callable[..., Any]]:
    """Return what replaces operations: torch's own rules, and those for what torch leaves to its kernels."""
    known: dict[Any, Callable[..., Any]] = get_decompositions(
        [
            aten.elu_backward,
            aten.gelu_backward,
            aten.hardsigmoid_backward,
            aten.hardswish_backward,
            aten.hardtanh_backward,
            aten.leaky_relu_backward,
            aten.mse_loss_backward,
            aten.native_batch_norm_backward,
            aten.native_group_norm_backward,
            aten.native_layer_norm_backward,
            aten._native_batch_norm_legit_no_training,
            aten._softmax_backward_data,
            aten._log_softmax_backward_data,
            aten.select_backward,
            aten.sigmoid_backward,
            aten.silu_backward,
            aten.slice_backward,
            aten.softplus_backward,
            aten.tanh_backward,
            aten.addmm,
            aten.addcmul,
            aten.new_zeros,
            aten.new_ones,
            aten.new_full,
        ]
    )
    own: dict[Any, Callable[..., Any]] = {
        aten.convolution_backward.default: _convolution_backward,
        aten.max_pool2d_with_indices_backward.default: _max_pool_backward,
        aten.avg_pool2d_backward.default: _avg_pool_backward,
        aten.acos.default: _acos,
        aten.atan2.default: _atan2,
        aten.baddbmm.default: _add_products,
        aten.constant_pad_nd.default: _pad,
        aten.threshold_backward.default: _threshold_backward,
    }
    return {**known, **own}


def _convolution_backward(
    g: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, *settings: Any
) -> tuple[Tensor | None, None, None]:
    """The gradient in the input alone; a convolution with the flipped kernel where nothing is skipped."""
    stride, padding, dilation, transposed, _, groups, wanted = settings
    if wanted[1] or wanted[2]:
        return NotImplemented
    if not wanted[0]:
        return None, None, None
    axes = list(range(2, weight.dim()))
    if transposed:
        back = aten.convolution(g, weight, None, stride, padding, dilation, False, [0], groups)
        return back, None, None
    sizes = zip(dilation, weight.shape[2:], padding, strict=True)
    border = [d * (k - 1) - p for d, k, p in sizes]
    if set(stride) == {1} and groups == 1 and min(border) >= 0:
        turned = weight.transpose(0, 1).flip(axes)
        back = aten.convolution(g, turned, None, stride, border, dilation, False, [0], 1)
        return back, None, None
    more = [
        int(x.shape[axis]) - ((int(g.shape[axis]) - 1) * s - 2 * p + d * (int(k) - 1) + 1)
        for axis, s, p, d, k in zip(axes, stride, padding, dilation, weight.shape[2:], strict=True)
    ]
    back = aten.convolution(g, weight, None, stride, padding, dilation, True, more, groups)
    return back, None, None


def _threshold_backward(g: Tensor, x: Tensor, threshold: float) -> Tensor:
    """The gradient where the input is above the threshold: runtimes multiply faster than they choose."""
    return g * (x > threshold).to(g.dtype)


def _max_pool_backward(g: Tensor, x: Tensor, *settings: Any) -> Tensor:
    """Add each gradient at the place that the maximum came from."""
    indices, flat = settings[-1], torch.zeros_like(x).flatten(-2)
    return flat.scatter_add(-1, indices.flatten(-2), g.flatten(-2)).reshape(x.shape)


def _avg_pool_backward(g: Tensor, x: Tensor, *settings: Any) -> Tensor:
    """Spread each gradient evenly over its window, by a transposed convolution of every channel."""
    kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override = settings
    if ceil_mode or (any(padding) and not count_include_pad):
        return NotImplemented
    kernel = [*kernel_size] * (2 // len(kernel_size))
    stride = [*(stride or kernel)] * (2 // len(stride or kernel))
    padding = [*padding] * (2 // len(padding))
    size = divisor_override or kernel[0] * kernel[1]
    weight = torch.full((1, 1, *kernel), 1 / size, dtype=g.dtype, device=g.device)
    more = [
        int(x.shape[-2 + i]) - ((int(g.shape[-2 + i]) - 1) * stride[i] - 2 * padding[i] + kernel[i])
        for i in range(2)
    ]
    flat = g.reshape(-1, 1, *g.shape[-2:])
    wide = aten.convolution(flat, weight, None, stride, padding, [1, 1], True, more, 1)
    return wide.reshape(x.shape)


def _pad(x: Tensor, pad: Sequence[int], value: float = 0.0) -> Tensor:
    """Join borders of constants to the sides, which leaves the number of rows open: torch's rule fixes it."""
    for number in range(len(pad) // 2):
        axis = x.dim() - 1 - number
        before, after = pad[2 * number : 2 * number + 2]
        if before == after == 0:
            continue  # the axis may be that of the rows, whose number stays open
        x = x.narrow(axis, max(-before, 0), int(x.shape[axis]) + min(before, 0) + min(after, 0))
        parts = []
        for size in (before, after):
            shape = [*x.shape[:axis], max(size, 0), *x.shape[axis + 1 :]]
            parts.append(x.new_full(shape, value) if size > 0 else None)
        sides = [part for part in (parts[0], x, parts[1]) if part is not None]
        x = torch.cat(sides, axis) if len(sides) > 1 else x
    return x


def _add_products(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """beta · x + alpha · a b, whose sum is over axes that torch's rule cannot compare."""
    product = a @ b
    product = product if alpha == 1 else alpha * product
    return product if beta == 0 else (x if beta == 1 else beta * x) + product


def _acos(c: Tensor) -> Tensor:
    """The angle of (c, √(1 − c²)) in float64, where onnxruntime has no arc cosine or tangent."""
    if c.dtype is not torch.float64:
        return NotImplemented
    angle = aten.acos.default(c.float()).double()
    return _refined(angle, c, (1 - c * c).clamp(min=0).sqrt())


def _atan2(y: Tensor, x: Tensor) -> Tensor:
    """The angle of (x, y) in float64."""
    if y.dtype is not torch.float64:
        return NotImplemented
    length = (x * x + y * y).clamp(min=1e-300).sqrt()
    angle = aten.atan2.default(y.float(), x.float()).double()
    return _refined(angle, x / length, y / length)


def _refined(angle: Tensor, c: Tensor, s: Tensor) -> Tensor:
    """Add to an angle in float32 what it misses: sin(θ − θ₀) = s cos θ₀ − c sin θ₀, which is θ − θ₀ here."""
    return angle + s * (angle + torch.pi / 2).sin() - c * angle.sin()
