"""One rule per layer: from a layer's input and output gradients to its parameters' gradients.

A rule has two steps. `prepare` gets the layer and its input while the layer runs, and keeps what the
gradients need of it; `factors` gets that (rows first) and the gradients of some outputs with respect to
the layer's output, (rows, C, …), and returns a factor for each of the layer's parameters. To add a
layer, register a rule with `layer_rule`; the conformance suite then tests it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from net2gp.linear.forward.factors import Direct, Factor, Lookup, Outer

Prepare = Callable[[nn.Module, Tensor], Tensor]
Factors = Callable[[nn.Module, Tensor, Tensor], dict[str, Factor]]


@dataclass(frozen=True)
class Rule:
    """How a layer's parameters get their gradients.

    Args:
        prepare: From the layer and its input to what `factors` needs.
        factors: From the layer, the prepared input and the gradients of its output to factors by name.
    """

    prepare: Prepare
    factors: Factors


RULES: dict[type[nn.Module], Rule] = {}


def layer_rule(
    *kinds: type[nn.Module], prepare: Prepare = lambda module, a: a
) -> Callable[[Factors], Factors]:
    """Make a function, and the step before it, the rule of these layer types, which makes gradients fast.

    Args:
        kinds: The classes of the layers. A subclass counts only if it keeps the layer's `forward`.
        prepare: From the layer and its input to what the gradients need of it, rows first; the input itself
            unless given.

    Returns:
        A decorator for the function of the layer, what was prepared, and the gradients (rows, C, …) of the
        network's outputs with respect to the layer's output. That function returns an `Outer`, a `Lookup` or
        a `Direct` for the parameters `weight` and `bias`.

    >>> class Gain(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.weight = nn.Parameter(torch.ones(3))
    ...
    ...     def forward(self, x):
    ...         return x * self.weight
    >>> @layer_rule(Gain)
    ... def gain_factors(layer, a, g):
    ...     return {"weight": Direct(a[:, None] * g)}
    >>> find_rule(Gain()).factors is gain_factors
    True
    >>> del RULES[Gain]  # a rule of this example only

    Reference: Novak, Sohl-Dickstein and Schoenholz, Fast finite width neural tangent kernel, 2022.
    """

    def add(factors: Factors) -> Factors:
        RULES.update(dict.fromkeys(kinds, Rule(prepare, factors)))
        return factors

    return add


def find_rule(module: nn.Module) -> Rule | None:
    """Return the rule of a layer, or None if it has none or overrides the forward of the layer with one."""
    for kind in type(module).__mro__:
        if kind in RULES:
            methods = ("forward", "_conv_forward")
            same = all(getattr(type(module), m, None) is getattr(kind, m, None) for m in methods)
            own = any(method in vars(module) for method in methods)
            return RULES[kind] if same and not own else None
    return None


def _one(like: Tensor) -> Tensor:
    return like.new_ones(())


_Convolution = nn.modules.conv._ConvNd
"""What all convolutions, transposed ones too, derive from."""


@layer_rule(nn.Linear)
def _linear(module: nn.Module, a: Tensor, g: Tensor) -> dict[str, Factor]:
    """Return the factors of W a_t + b at every place t before the last axis."""
    B, C = g.shape[:2]
    g = g.reshape(B, C, 1, -1, g.shape[-1]).mT
    weight = Outer(a.reshape(B, 1, -1, a.shape[-1]), g, _one(g))
    # most networks use a layer at one place, where a sum would be a copy
    bias = g.reshape(B, C, -1) if g.shape[4] == 1 else g.sum((2, 4))
    return {"weight": weight, "bias": Direct(bias)}


class Part(nn.Module):
    """The layer W_r x + b_r with some consecutive rows r of parameters that have more.

    Args:
        rows: The first row, and how many rows the parameter has, for those of weight and bias that have more.
    """

    def __init__(self, rows: dict[str, tuple[int, int]]) -> None:
        super().__init__()
        self.rows = rows

    def padded(self, suffix: str, g: Tensor) -> Tensor:
        """Return gradients (B, C, …, rows, places) of all rows, which are zero for the others."""
        start, rows = self.rows.get(suffix, (0, g.shape[-2]))
        return F.pad(g, (0, 0, start, rows - start - g.shape[-2]))


@layer_rule(Part)
def _part(module: nn.Module, a: Tensor, g: Tensor) -> dict[str, Factor]:
    """Return the factors of some rows of a weight and a bias as those of all rows."""
    assert isinstance(module, Part)
    weight, bias = _linear(module, a, g).values()
    assert isinstance(weight, Outer)
    assert isinstance(bias, Direct)
    whole = Direct(module.padded("bias", bias.J[..., None])[..., 0])
    return {"weight": replace(weight, g=module.padded("weight", weight.g)), "bias": whole}


class Turned(nn.Module):
    """The layer x W + b, whose weight is the transpose of that of a linear layer."""


@layer_rule(Turned)
def _turned(module: nn.Module, a: Tensor, g: Tensor) -> dict[str, Factor]:
    """Return the factors of a linear layer with the entries of the weight in another order."""
    weight, bias = _linear(module, a, g).values()
    assert isinstance(weight, Outer)
    return {"weight": replace(weight, turned=True), "bias": bias}


def _windows(a: Tensor, module: nn.Module) -> Tensor:
    """Return the windows (B, channels, *places, *kernel) that a convolution sees."""
    assert isinstance(module, _Convolution)
    axes = zip(module.kernel_size, module.stride, module.dilation, strict=True)
    for axis, (kernel, stride, dilation) in enumerate(axes, start=2):
        a = a.unfold(axis, dilation * (kernel - 1) + 1, stride)[..., ::dilation]
    return a


def _patches(module: nn.Module, a: Tensor) -> Tensor:
    """Return the patches (B, groups, places, channels · kernel), in the order of the weight's entries."""
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    a = a if a.dim() == 2 + len(module.kernel_size) else a[None]  # without a batch, as torch allows
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    a = F.pad(a, tuple(module._reversed_padding_repeated_twice), mode=mode)
    a = _windows(a, module)
    dims = len(module.kernel_size)
    B, channels = a.shape[:2]
    a = a.reshape(B, module.groups, channels // module.groups, *a.shape[2:])
    a = a.permute(0, 1, *range(3, 3 + dims), 2, *range(3 + dims, 3 + 2 * dims))
    return a.reshape(B, module.groups, a.shape[2 : 2 + dims].numel(), -1)


@layer_rule(nn.Conv1d, nn.Conv2d, nn.Conv3d, prepare=_patches)
def _convolution(module: nn.Module, a: Tensor, g: Tensor) -> dict[str, Factor]:
    """Return the factors of a convolution, which is a linear map of the patch around every place."""
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    B, C, groups = g.shape[0], g.shape[1], module.groups
    g = g.reshape(B, C, groups, module.out_channels // groups, -1)
    return {"weight": Outer(a, g, _one(g)), "bias": Direct(g.sum(4).reshape(B, C, -1))}


def _batched(module: nn.Module, a: Tensor) -> Tensor:
    assert isinstance(module, _Convolution)
    return a if a.dim() == 2 + len(module.kernel_size) else a[None]


@layer_rule(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, prepare=_batched)
def _transposed_convolution(module: nn.Module, a: Tensor, g: Tensor) -> dict[str, Factor]:
    """Return the factors of a map from the channels of every place to the patch of outputs around it."""
    assert isinstance(module, _Convolution)
    assert isinstance(module.padding, tuple)
    (B, C), groups, dims = g.shape[:2], module.groups, len(module.kernel_size)
    border = [size for size in module.padding[::-1] for _ in range(2)]
    patches = _windows(F.pad(g.flatten(0, 1), border), module)  # (B·C, channels, *places, *kernel)
    for axis, size in enumerate(a.shape[2:], start=2):
        patches = patches.narrow(axis, 0, size)  # output_padding may leave room for more
    patches = patches.movedim(tuple(range(2, 2 + dims)), tuple(range(-dims, 0)))
    patches = patches.reshape(B, C, groups, -1, a.shape[2:].numel())
    a = a.reshape(B, groups, a.shape[1] // groups, -1).mT
    bias = Direct(g.flatten(3).sum(3))
    return {"weight": Outer(a, patches, _one(g), turned=True), "bias": bias}


def _real_ids(module: nn.Module, ids: Tensor) -> Tensor:
    """Replace padding by the id −1, since it has no gradient."""
    assert isinstance(module, nn.Embedding)
    padding = module.padding_idx
    return ids if padding is None else torch.where(ids == padding, -1, ids)


@layer_rule(nn.Embedding, prepare=_real_ids)
def _embedding(module: nn.Module, a: Tensor, g: Tensor) -> dict[str, Factor]:
    """Return the factor of a lookup of a row of the table at every place."""
    assert isinstance(module, nn.Embedding)
    B, C = g.shape[:2]
    g = g.reshape(B, C, -1, g.shape[-1])
    return {"weight": Lookup(a.reshape(B, -1), g, _one(g), module.num_embeddings)}


def _fixed_statistics(module: nn.Module, a: Tensor) -> Tensor:
    """Normalize the input while the layer runs, when it holds the statistics of the linearization."""
    assert isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)
    mean, var = module.running_mean, module.running_var
    return F.batch_norm(a, mean, var, training=mean is None, eps=module.eps)


def _group_statistics(module: nn.Module, a: Tensor) -> Tensor:
    assert isinstance(module, nn.GroupNorm)
    return F.group_norm(a, module.num_groups, eps=module.eps)


@layer_rule(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, prepare=_fixed_statistics)
@layer_rule(nn.GroupNorm, prepare=_group_statistics)
def _per_channel(module: nn.Module, a: Tensor, g: Tensor) -> dict[str, Factor]:
    """Return the factors of the affine part of a norm, per channel, from the normalized input."""
    B, C, channels = g.shape[:3]
    g, a = g.reshape(B, C, channels, -1), a.reshape(B, 1, channels, -1)
    return {"weight": Direct((g * a).sum(-1)), "bias": Direct(g.sum(-1))}


def _layer_statistics(module: nn.Module, a: Tensor) -> Tensor:
    assert isinstance(module, nn.LayerNorm)
    return F.layer_norm(a, module.normalized_shape, eps=module.eps)


def _root_mean_square(module: nn.Module, a: Tensor) -> Tensor:
    assert isinstance(module, nn.RMSNorm)
    return F.rms_norm(a, module.normalized_shape, eps=module.eps)


@layer_rule(nn.LayerNorm, prepare=_layer_statistics)
@layer_rule(nn.RMSNorm, prepare=_root_mean_square)
def _layer_norm(module: nn.Module, a: Tensor, g: Tensor) -> dict[str, Factor]:
    """Return the factors of the affine part over the normalized axes."""
    assert isinstance(module, nn.LayerNorm | nn.RMSNorm)
    size = torch.Size(module.normalized_shape).numel()
    B, C = g.shape[:2]
    g, a = g.reshape(B, C, -1, size), a.reshape(B, 1, -1, size)
    return {"weight": Direct((g * a).sum(2)), "bias": Direct(g.sum(2))}


class Shift(nn.Module):
    """The layer x + p with a parameter p in the shape in which it broadcasts over the signal x."""

    suffix = "bias"

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape = shape


class Scale(Shift):
    """The layer x · p with a parameter p in the shape in which it broadcasts over the signal x."""

    suffix = "weight"


def _over_places(module: nn.Module, g: Tensor) -> Tensor:
    """Sum g (B, C, …) over the axes along which the parameter broadcasts: (B, C, p)."""
    assert isinstance(module, Shift)
    shape = module.shape[-(g.dim() - 2) :] if g.dim() > 2 else ()
    shape = (*[1] * (g.dim() - 2 - len(shape)), *shape)
    axes = [axis for axis, size in enumerate(shape, start=2) if size == 1]
    return (g.sum(axes) if axes else g).reshape(*g.shape[:2], -1)


@layer_rule(Scale)
def _scale(module: nn.Module, a: Tensor, g: Tensor) -> dict[str, Factor]:
    """Return the factor of a scale: the signal times its gradient, at every place."""
    return {"weight": Direct(_over_places(module, g * a[:, None]))}


@layer_rule(Shift)
def _shift(module: nn.Module, a: Tensor, g: Tensor) -> dict[str, Factor]:
    """Return the factor of a shift: the gradient of the signal, at every place."""
    return {"bias": Direct(_over_places(module, g))}
