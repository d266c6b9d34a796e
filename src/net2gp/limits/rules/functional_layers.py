"""Layers called as functions with the weights of a module, as in the forward of a subclass of a layer."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from net2gp.limits.graph.function_registry import function_rule, name_of
from net2gp.limits.graph.trace import attribute_of, parameter_of
from net2gp.limits.graph.translate import Data, Parameter, Signal, Translation
from net2gp.limits.rules import layer_rules
from net2gp.limits.rules.weighted_layers import (
    Geometry,
    Names,
    convolution,
    embedding,
    kind_name,
    linear,
    with_bias,
)
from net2gp.limits.signals.positions import Window


def _names(translation: Translation, node: fx.Node, weight: Any, bias: Any, kind: str) -> Names:
    """Return the names of the weights and biases that a function is called with."""
    if not isinstance(weight, Parameter) or weight.layer is None or weight.own != weight.shape:
        raise translation.refuse(
            f"the function {name_of(node.target)}",
            node,
            f"Use the module of that name, e.g. nn.{kind}, or the weights of one as they are. ",
        )
    layer = translation.graph.get_submodule(weight.layer)
    attribute: Any = attribute_of(translation.graph, weight.path)
    whole = tuple(attribute.shape) == weight.shape and parameter_of(layer, "weight") is attribute
    if kind_name(layer) != kind or not whole:
        raise translation.refuse(
            f"the function {name_of(node.target)} with '{weight.path}' of {kind_name(layer)}", node
        )
    if translation.kinds.setdefault(weight.name, kind) != kind:
        raise translation.refuse(f"{kind} with the weights of another kind of layer", node)
    if bias is None:
        return with_bias(translation, weight.name, None, "")
    if not isinstance(bias, Parameter) or bias.layer is None or bias.own != bias.shape:
        raise translation.refuse(f"{kind} with biases that belong to no layer", node)
    return with_bias(
        translation, weight.name, attribute_of(translation.graph, bias.path), bias.path
    )


def _bound(args: tuple, kwargs: dict, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the arguments of a call by name."""
    return {**dict(zip(names, args, strict=False)), **kwargs}


@function_rule("linear")
def _(translation: Translation, node: fx.Node, args: tuple, kwargs: dict) -> Any:
    given = _bound(args, kwargs, ("input", "weight", "bias"))
    value, weight = given["input"], given["weight"]
    names = _names(translation, node, weight, given.get("bias"), "Linear")
    if not isinstance(value, Data | Signal):
        raise translation.refuse(f"Linear of {type(value).__name__}", node)
    return linear(weight.shape[1], weight.shape[0], translation, node, value, names)


@function_rule("conv1d", "conv2d", "conv3d")
def _(translation: Translation, node: fx.Node, args: tuple, kwargs: dict) -> Any:
    options = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    given = _bound(args, kwargs, options)
    value, weight = given["input"], given["weight"]
    rank = int(name_of(node.target)[4])
    names = _names(translation, node, weight, given.get("bias"), f"Conv{rank}d")
    if not isinstance(value, Data | Signal):
        raise translation.refuse(f"a convolution of {type(value).__name__}", node)
    kernel = weight.shape[2:]
    stride, dilation = (_each(given.get(name, 1), rank) for name in ("stride", "dilation"))
    padding = given.get("padding", 0)
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    if padding == "same":
        pads = tuple((r // 2, r - r // 2) for r in reach)
    else:
        pads = tuple((p, p) for p in _each(0 if padding == "valid" else padding, rank))
    groups = int(given.get("groups", 1))
    window = Window(kernel, stride, dilation, pads)
    geometry = Geometry(weight.shape[1] * groups, weight.shape[0], groups, window)
    return convolution(geometry, translation, node, value, names)


def _each(value: Any, rank: int) -> tuple[int, ...]:
    """Return an option of a convolution, once per axis."""
    values = tuple(value) if isinstance(value, tuple | list) else (value,)
    return values * rank if len(values) == 1 else values


@function_rule("embedding")
def _(translation: Translation, node: fx.Node, args: tuple, kwargs: dict) -> Any:
    options = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq")
    given = _bound(args, kwargs, options)
    names = _names(translation, node, given["weight"], None, "Embedding")
    if given.get("max_norm") is not None or given.get("scale_grad_by_freq"):
        raise translation.refuse("an Embedding with max_norm or scale_grad_by_freq", node)
    sizes, unused = given["weight"].shape, given.get("padding_idx")
    return embedding(sizes, unused, translation, node, given["input"], names.weight)


def _check_gains(translation: Translation, node: fx.Node, *gains: Any) -> None:
    """Refuse gains and shifts that belong to no norm layer; those that do count as 1 and 0."""
    for gain in gains:
        layer = gain.layer if isinstance(gain, Parameter) else None
        norm = layer is not None and isinstance(translation.graph.get_submodule(layer), NORMS)
        if gain is not None and not norm:
            raise translation.refuse(
                f"the function {name_of(node.target)} with a gain that belongs to no norm layer",
                node,
            )


NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)


@function_rule("layer_norm", "rms_norm")
def _(translation: Translation, node: fx.Node, args: tuple, kwargs: dict) -> Any:
    centered = name_of(node.target) == "layer_norm"
    rest = ("weight", "bias", "eps") if centered else ("weight", "eps")
    given = _bound(args, kwargs, ("input", "normalized_shape", *rest))
    _check_gains(translation, node, given.get("weight"), given.get("bias"))
    axes = layer_rules.last_axes(given["input"], len(given["normalized_shape"]), translation, node)
    eps = given.get("eps", 1e-5 if centered else None)
    eps = layer_rules.smallest(translation, node) if eps is None else float(eps)
    return layer_rules.normalized_over(given["input"], axes, centered, eps, translation, node)


@function_rule("group_norm")
def _(translation: Translation, node: fx.Node, args: tuple, kwargs: dict) -> Any:
    given = _bound(args, kwargs, ("input", "num_groups", "weight", "bias", "eps"))
    _check_gains(translation, node, given.get("weight"), given.get("bias"))
    eps = float(given.get("eps", 1e-5))
    return layer_rules.grouped(given["input"], int(given["num_groups"]), eps, translation, node)
