"""One rule per layer: from a layer's input and output gradients to its parameters' gradients.

A rule gets the layer, its input (rows first) and the gradients of all outputs with respect to the
layer's output, (rows, C, …); it returns a factor for each of the layer's parameters. To add a layer,
register a rule here; the conformance suite then tests it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from net2gp.linear.factors import Direct, Factor, Lookup, Outer

Rule = Callable[[nn.Module, Tensor, Tensor], dict[str, Factor]]
RULES: dict[type[nn.Module], Rule] = {}


def register(*kinds: type[nn.Module]) -> Callable[[Rule], Rule]:
    """Make a function the rule of these layer types."""

    def add(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(kinds, rule))
        return rule

    return add


def find_rule(module: nn.Module) -> Rule | None:
    """The rule of a layer, or None; a subclass counts only if it kept the layer's forward."""
    for kind in type(module).__mro__:
        if kind in RULES:
            methods = ("forward", "_conv_forward")
            same = all(getattr(type(module), m, None) is getattr(kind, m, None) for m in methods)
            return RULES[kind] if same else None
    return None


def _one(like: Tensor) -> Tensor:
    return like.new_ones(())


@register(nn.Linear)
def _linear(module: nn.Module, a: Tensor, g: Tensor) -> dict[str, Factor]:
    """W a_t + b at every place t before the last axis."""
    B, C = g.shape[:2]
    g = g.reshape(B, C, 1, -1, g.shape[-1]).mT
    weight = Outer(a.reshape(B, 1, -1, a.shape[-1]), g, _one(g))
    return {"weight": weight, "bias": Direct(g.sum((2, 4)))}


@register(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def _convolution(module: nn.Module, a: Tensor, g: Tensor) -> dict[str, Factor]:
    """A convolution is a linear map of the patch around every place."""
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    B, C, groups = g.shape[0], g.shape[1], module.groups
    g = g.reshape(B, C, groups, module.out_channels // groups, -1)
    weight = Outer(_patches(module, a), g, _one(g))
    return {"weight": weight, "bias": Direct(g.sum(4).reshape(B, C, -1))}


def _patches(module: nn.Conv1d | nn.Conv2d | nn.Conv3d, a: Tensor) -> Tensor:
    """(B, groups, places, channels · kernel), in the order of the weight's own entries."""
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    a = F.pad(a, tuple(module._reversed_padding_repeated_twice), mode=mode)
    spatial = zip(a.shape[2:], module.kernel_size, module.stride, module.dilation, strict=True)
    for axis, (size, kernel, stride, dilation) in enumerate(spatial, start=2):
        places = torch.arange(0, size - dilation * (kernel - 1), stride, device=a.device)
        taps = torch.arange(kernel, device=a.device) * dilation
        index = (places[:, None] + taps[None, :]).reshape(-1)
        a = a.index_select(axis, index)
        a = a.reshape(*a.shape[:axis], len(places), kernel, *a.shape[axis + 1 :])
        a = a.movedim(axis + 1, -1)
    dims = len(module.kernel_size)
    B, channels = a.shape[:2]
    a = a.reshape(B, module.groups, channels // module.groups, *a.shape[2:])
    a = a.permute(0, 1, *range(3, 3 + dims), 2, *range(3 + dims, 3 + 2 * dims))
    return a.reshape(B, module.groups, a.shape[2 : 2 + dims].numel(), -1)


@register(nn.Embedding)
def _embedding(module: nn.Module, a: Tensor, g: Tensor) -> dict[str, Factor]:
    """A row of the table at every place; padding has no gradient."""
    assert isinstance(module, nn.Embedding)
    B, C = g.shape[:2]
    ids = a.reshape(B, -1)
    if module.padding_idx is not None:
        ids = torch.where(ids == module.padding_idx, -1, ids)
    g = g.reshape(B, C, -1, g.shape[-1])
    return {"weight": Lookup(ids, g, _one(g), module.num_embeddings)}


@register(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
def _batch_norm(module: nn.Module, a: Tensor, g: Tensor) -> dict[str, Factor]:
    """The affine part; in eval mode the statistics are constants."""
    assert isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)
    normal = F.batch_norm(a, module.running_mean, module.running_var, eps=module.eps)
    return _per_channel(normal, g)


@register(nn.GroupNorm)
def _group_norm(module: nn.Module, a: Tensor, g: Tensor) -> dict[str, Factor]:
    """The affine part, per channel."""
    assert isinstance(module, nn.GroupNorm)
    return _per_channel(F.group_norm(a, module.num_groups, eps=module.eps), g)


@register(nn.LayerNorm)
def _layer_norm(module: nn.Module, a: Tensor, g: Tensor) -> dict[str, Factor]:
    """The affine part, over the normalized axes."""
    assert isinstance(module, nn.LayerNorm)
    normal = F.layer_norm(a, module.normalized_shape, eps=module.eps)
    size = torch.Size(module.normalized_shape).numel()
    B, C = g.shape[:2]
    g, normal = g.reshape(B, C, -1, size), normal.reshape(B, 1, -1, size)
    return {"weight": Direct((g * normal).sum(2)), "bias": Direct(g.sum(2))}


def _per_channel(normal: Tensor, g: Tensor) -> dict[str, Factor]:
    B, C, channels = g.shape[:3]
    g, normal = g.reshape(B, C, channels, -1), normal.reshape(B, 1, channels, -1)
    return {"weight": Direct((g * normal).sum(-1)), "bias": Direct(g.sum(-1))}
