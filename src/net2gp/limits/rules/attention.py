"""Attention written out: logits q kᵀ, what is done to them, and their product with the values."""

from __future__ import annotations

from dataclasses import replace
from math import isclose, prod
from typing import Any

import torch
from torch import Tensor, fx

from net2gp.limits.graph.function_registry import function_rule, run
from net2gp.limits.graph.translate import Data, Logits, Signal, Translation, permuted, plain
from net2gp.limits.signals import expressions as ex
from net2gp.limits.signals.expressions import Expression
from net2gp.limits.signals.layout import CHANNEL, POSITION, Heads, Layout


@function_rule("matmul", "bmm")
def _(translation: Translation, node: fx.Node, args: tuple, kwargs: dict) -> Any:
    a, b = args[0], args[1]
    if isinstance(a, Signal) and isinstance(b, Signal):
        return logits_of(translation, node, a, b)
    if isinstance(a, Logits) and isinstance(b, Signal):
        return attended(translation, node, a, b)
    if isinstance(a, Data) and isinstance(b, Signal):
        return routed(translation, node, a, b, from_left=True)
    if isinstance(a, Signal) and isinstance(b, Data):
        return routed(translation, node, b, a, from_left=False)
    return None


@function_rule("scaled_dot_product_attention")
def _(translation: Translation, node: fx.Node, args: tuple, kwargs: dict) -> Any:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    query, key, value = given["query"], given["key"], given["value"]
    if not all(isinstance(one, Signal) for one in (query, key, value)):
        return None
    count = len(key.layout.groups)
    logits = logits_of(
        translation, node, query, permuted(key, (*range(count - 2), count - 1, count - 2))
    )
    scale = given.get("scale")
    logits = scaled_logits(logits, logits.size**-0.5 if scale is None else float(scale))
    mask = given.get("attn_mask")
    if given.get("is_causal"):
        mask = torch.ones(ex.size(logits.query), ex.size(logits.key), dtype=torch.bool).tril()
    if isinstance(mask, Tensor) and mask.dtype == torch.bool:
        logits = filled_logits(translation, node, logits, ~mask, float("-inf"))
    elif isinstance(mask, Data) and not mask.floating:
        logits = kept_logits(translation, node, logits, mask)
    elif mask is not None:
        logits = masked_logits(translation, node, logits, mask, 1.0, True)
    if given.get("dropout_p"):
        raise translation.refuse("dropout of attention weights", node)
    logits = replace(logits, steps=(*logits.steps, lambda t, masks: torch.softmax(t, -1)))
    return attended(translation, node, logits, value)


def logits_of(translation: Translation, node: fx.Node, a: Signal, b: Signal) -> Logits:
    """Return q kᵀ, contracted over the channels of both."""
    one, other = a.layout.groups, b.layout.groups
    if (
        len(one) < 2
        or len(one) != len(other)
        or [factor.kind for factor in one[-1]] != [CHANNEL]
        or [factor.kind for factor in other[-2]] != [CHANNEL]
        or one[:-2] != other[:-2]
        or any(factor.kind == POSITION for group in one[:-2] for factor in group)
    ):
        raise translation.refuse(
            "a matrix product of two signals that is not q kᵀ over channels", node
        )
    query, first = without_factor(a.only("attention"))
    key, second = without_factor(b.only("attention"))
    factors = tuple(factor for factor in (first, second) if factor != 1)
    return Logits(query, key, one[-1][0].size, factors, one[:-1], (a.layout, b.layout))


def without_factor(e: Expression) -> tuple[Expression, float]:
    """Return a signal and the number that it was multiplied by."""
    factor = 1.0
    while isinstance(e, ex.Sum) and len(e.terms) == 1:
        factor *= e.terms[0][0]
        e = e.terms[0][1]
    return e, factor


def attended(translation: Translation, node: fx.Node, logits: Logits, value: Signal) -> Signal:
    """Return attention weights times values."""
    groups = value.layout.groups
    if groups[:-2] != logits.layout[:-1] or any(f.kind == POSITION for f in groups[-1]):
        raise translation.refuse("attention over values with other axes", node)
    query, size = logits.query, logits.size
    positions = query.positions
    layout = Layout((*logits.layout, groups[-1]))
    heads = Heads(*logits.layouts, value.layout, layout, size)
    scaling, gain = split_scale(logits)
    if scaling is None:
        raise translation.refuse(
            "attention logits without a scale of 1/d or 1/√d",
            node,
            f"Here d = {size}: divide by d or by d**0.5 in a step of its own. ",
        )
    v = value.only("attention")
    if scaling == "linear":
        steps = logits.steps

        def mechanism(t: Tensor, masks: tuple[Tensor, ...]) -> Tensor:
            for step in steps:
                t = step(t, masks)
            return t

        e: Expression = ex.Attended(
            query, logits.key, v, gain, mechanism, logits.masks, positions, heads
        )
        return Signal(((value.layout.width, e),), layout)
    parts = (query, logits.key, v)
    alone = all(ex.independent(a, b) for n, a in enumerate(parts) for b in parts[:n])
    if logits.steps or not alone or not all(ex.is_gaussian(part) for part in parts):
        raise translation.refuse(
            "attention with logits scaled by 1/√d",
            node,
            "Its limit is known in closed form only without softmax and with separate weights for q, k "
            "and v; with logits scaled by 1/d it is known for any function of them. ",
        )
    if prod(factor.size for group in logits.layout[:-1] for factor in group) == 1:
        raise translation.refuse(
            "attention of one head with logits scaled by 1/√d",
            node,
            "Its logits stay random and are shared by all channels, so that the result is not Gaussian; with "
            "several heads, whose number counts as infinite, it is. ",
        )
    e = ex.RandomlyAttended(query, logits.key, v, gain, positions, heads)
    return Signal(((value.layout.width, e),), layout)


def split_scale(logits: Logits) -> tuple[str | None, float]:
    """Return which power of the head's size d the logits were divided by, and the factor that remains.

    With 1/d the gain multiplies E[q k]; with 1/√d it multiplies a Gaussian of variance E[q²] E[k²].
    """
    # the power can only be read off the numbers: 1/d may also come as two factors 1/√d, one on q, one on k
    d = logits.size
    product = prod(logits.factors)
    for factor in logits.factors:
        if isclose(factor, 1 / d, rel_tol=1e-9):
            return "linear", product * d
    root = [factor for factor in logits.factors if isclose(factor, d**-0.5, rel_tol=1e-9)]
    if len(root) == 2 or isclose(product, 1 / d, rel_tol=1e-9):
        return "linear", product * d
    if len(root) == 1:
        return "root", product * d**0.5
    return None, product


def routed(
    translation: Translation, node: fx.Node, data: Data, signal: Signal, from_left: bool
) -> Signal:
    """Multiply one axis of positions of a signal by a matrix from the data: A x, or x A."""
    signal = plain(signal, translation, node)
    axis = len(signal.layout.groups) - (2 if from_left else 1)
    if axis < 0 or axis == signal.layout.channel_axis() or prod(data.shape[:-2]) != 1:
        raise translation.refuse("a matrix product of data with the channels of a signal", node)
    number = signal.layout.position_numbers(axis)[0]
    before, after = prod(signal.positions[:number]), prod(signal.positions[number + 1 :])

    def extract(t: Tensor) -> Tensor:
        t = t.reshape(t.shape[0], *t.shape[-2:])
        t = t if from_left else t.mT
        eyes = [torch.eye(size, dtype=t.dtype, device=t.device) for size in (before, after)]
        wide = torch.einsum("ab,nij,cd->naicbjd", eyes[0], t, eyes[1])
        size = t.shape[1] * before * after
        return wide.reshape(t.shape[0], size, -1).movedim(0, 1).contiguous()

    key = f"matrix {before} {after} {from_left}"
    reference = translation.reference(data, key, extract)
    shape = list(signal.layout.shape)
    shape[axis] = data.shape[-2] if from_left else data.shape[-1]
    layout = Layout.of(shape, signal.layout.channel_axis())
    return replace(signal.each(lambda e: ex.Routed(reference, e, layout.positions)), layout=layout)


def kept_logits(translation: Translation, node: fx.Node, logits: Logits, mask: Data) -> Logits:
    """Return the logits where the mask of the data is true, and −∞ elsewhere."""
    place = len(logits.masks)
    name = _mask(translation, node, mask, logits)
    step = lambda t, masks: t.masked_fill(~masks[place].bool(), float("-inf"))
    return replace(logits, steps=(*logits.steps, step), masks=(*logits.masks, name))


@function_rule("softmax")
def _(translation: Translation, node: fx.Node, args: tuple, kwargs: dict) -> Any:
    if not isinstance(args[0], Logits):
        return None
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if dim not in (-1, len(args[0].layout) + 1):
        raise translation.refuse("softmax of logits over anything but the last axis", node)
    return replace(args[0], steps=(*args[0].steps, lambda t, masks: torch.softmax(t, -1)))


@function_rule(
    "relu", "abs", "tanh", "sigmoid", "exp", "square", "leaky_relu", "elu", "gelu", "silu"
)
def _(translation: Translation, node: fx.Node, args: tuple, kwargs: dict) -> Any:
    if not isinstance(args[0], Logits):
        return None
    return replace(
        args[0],
        steps=(*args[0].steps, lambda t, masks: run(node.target, (t, *args[1:]), kwargs)),
    )


def scaled_logits(logits: Logits, factor: float) -> Logits:
    """Multiply logits, or attention weights, by a number."""
    # before any other step a number is a scale of q kᵀ, whose power of d counts; later it is a plain step
    if not logits.steps:
        return replace(logits, factors=(*logits.factors, factor))
    return replace(logits, steps=(*logits.steps, lambda t, masks: t * factor))


def masked_logits(
    translation: Translation, node: fx.Node, logits: Logits, other: Any, sign: float, first: bool
) -> Logits:
    """Add a mask of the module or of the data to logits."""
    if not first and sign != 1:
        raise translation.refuse("subtracting logits", node)
    if isinstance(other, int | float | Tensor):
        number = _same_for_heads(translation, node, torch.as_tensor(other))
        return replace(logits, steps=(*logits.steps, lambda t, masks: t + sign * number.to(t)))
    if not isinstance(other, Data):
        raise translation.refuse(f"adding {type(other).__name__} to attention logits", node)
    place = len(logits.masks)
    name = _mask(translation, node, other, logits)
    step = lambda t, masks: t + sign * masks[place].to(t)
    return replace(logits, steps=(*logits.steps, step), masks=(*logits.masks, name))


def filled_logits(
    translation: Translation, node: fx.Node, logits: Logits, mask: Any, value: float
) -> Logits:
    """Fill logits with a number where a mask of the module or of the data is true."""
    if isinstance(mask, Tensor):
        fixed = _same_for_heads(translation, node, mask)
        step = lambda t, masks: t.masked_fill(fixed.to(t.device), value)
        return replace(logits, steps=(*logits.steps, step))
    if not isinstance(mask, Data):
        raise translation.refuse(f"a mask that is {type(mask).__name__}", node)
    place = len(logits.masks)
    name = _mask(translation, node, mask, logits)
    step = lambda t, masks: t.masked_fill(masks[place].bool(), value)
    return replace(logits, steps=(*logits.steps, step), masks=(*logits.masks, name))


PER_HEAD = "Heads that differ have no common limit: use the same mask or bias for all of them. "


def _same_for_heads(translation: Translation, node: fx.Node, fixed: Tensor) -> Tensor:
    """Return a fixed mask or bias as (from, to); refuse it if it differs between points or heads."""
    if prod(fixed.shape[:-2]) != 1:
        raise translation.refuse("a mask or bias that differs between heads", node, PER_HEAD)
    return fixed.reshape(fixed.shape[-2:])


def _mask(translation: Translation, node: fx.Node, data: Data, logits: Logits) -> str:
    """Return the name of a mask of the data in the form (from, n, to), without the axis of heads."""
    shape = data.shape
    if len(shape) != len(logits.layout) + 1:
        raise translation.refuse(
            f"a mask from the inputs of shape (N, {str(shape)[1:]} on logits of "
            f"{len(logits.layout) + 2} axes",
            node,
            "Give it as many axes as the logits have: keep[:, None, None, :]. ",
        )
    if prod(shape[:-2]) != 1:
        raise translation.refuse("a mask that differs between heads", node, PER_HEAD)
    wide = shape[-2:]

    def extract(t: Tensor) -> Tensor:
        return t.reshape(t.shape[0], *wide).movedim(0, 1)

    return translation.reference(data, f"mask {wide}", extract)
