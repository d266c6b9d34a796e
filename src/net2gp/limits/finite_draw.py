"""The values of expressions for one finite draw of the weights, computed literally.

`proof` compares them with what the network computes, so each function here follows the meaning of its
expression and takes no shortcut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from net2gp.limits.graph.trace import attribute_of
from net2gp.limits.graph.translate import Signal
from net2gp.limits.signals import expressions as ex
from net2gp.limits.signals.expressions import Expression
from net2gp.limits.signals.layout import Layout, arranged, collected


@dataclass(eq=False)
class Draw:
    """A module with weights, the data at some points, and the values of expressions found so far.

    Args:
        module: The network with its weights.
        data: The inputs by reference.
        memory: Values (n, *positions, channels) by the number of the expression.
    """

    module: fx.GraphModule
    data: dict[str, Tensor]
    memory: dict[int, Tensor] = field(default_factory=dict)

    def value(self, e: Expression) -> Tensor:
        """Return the channels of a signal at its positions, (n, *positions, channels)."""
        if e.order not in self.memory:
            part = getattr(e, "part", None)
            if part is not None:
                self.memory[e.order] = self.value(part.whole)[..., part.first : part.last]
            else:
                self.memory[e.order] = VALUES[type(e)](self, e)
        return self.memory[e.order]

    def believe(self, signal: Signal, tensor: Tensor) -> None:
        """Take the values of a signal from a tensor that the network has computed."""
        values, start = collected(tensor, signal.layout), 0
        for width, e in signal.blocks:
            self.memory[e.order] = values[..., start : start + width].clone()
            start += width

    def tensor(self, name: str, own: str) -> Any:
        """Return a parameter by the name of its layer and its own name, or by its full name."""
        found = attribute_of(self.module, name)
        return getattr(found, own) if isinstance(found, nn.Module) else found


def _raw(draw: Draw, e: ex.Raw) -> Tensor:
    t = draw.data[e.reference][:, :, e.first : e.last].movedim(0, 1)
    return t.reshape(t.shape[0], *e.positions, t.shape[-1])


def _weighted(draw: Draw, e: ex.Weighted) -> Tensor:
    inputs = [draw.value(part) for _, part in e.inputs]
    weight = draw.tensor(e.weight, "weight")
    bias = None if e.shift is None else attribute_of(draw.module, e.shift)
    only = e.inputs[0][1]
    if isinstance(only, ex.Raw) and only.tokens:
        tokens = inputs[0][..., 0]
        found = weight[tokens.nan_to_num(0.0).long()]
        return found.masked_fill(tokens.isnan()[..., None], 0.0)
    u = torch.cat(inputs, -1)
    if e.local:
        return _local(e, u, weight, bias)
    if e.window is not None:
        return _convolved(draw, e, u, weight, bias)
    if e.rows is not None:
        weight = weight[e.rows[0] : e.rows[1]]
        bias = None if bias is None else bias[e.rows[0] : e.rows[1]]
    kept = [n + 1 for n in range(u.dim() - 2) if n not in e.averaged]
    u = u.permute(0, *kept, *(n + 1 for n in e.averaged), u.dim() - 1)
    before = u.shape[: 1 + len(kept)]
    if e.averaged:
        u = arranged(u.reshape(-1, *u.shape[1 + len(kept) :]), Layout((e.axis,)))
        u = u.reshape(*before, -1)
    if u.shape[-1] != weight.shape[1] and not bool(u.any()):
        u = u.new_zeros(*before, weight.shape[1])  # the state that a recurrent layer starts from
    return nn.functional.linear(u, weight, bias)


def _padded(e: ex.Weighted, u: Tensor) -> Tensor:
    """Move channels in front and pad: (n, *positions, channels) → (n, channels, *padded positions)."""
    assert e.window is not None
    u = u.movedim(-1, 1)
    for number in range(len(e.window.kernel)):
        u = e.window.padded(u, number, number + 2)
    return u


def _convolved(
    draw: Draw, e: ex.Weighted, u: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    window, rank = e.window, u.dim() - 2
    assert window is not None
    padded = _padded(e, u)
    if isinstance(attribute_of(draw.module, e.weight), nn.modules.conv._ConvTransposeNd):
        weight = weight.transpose(0, 1).flip(tuple(range(2, 2 + rank)))
    groups = u.shape[-1] // weight.shape[1]
    rows = slice(None) if e.rows is None else slice(*e.rows)
    convolve: Any = (nn.functional.conv1d, nn.functional.conv2d, nn.functional.conv3d)[rank - 1]
    if groups == 1:
        weight, bias = weight[rows], None if bias is None else bias[rows]
    found = convolve(padded, weight, bias, window.stride, 0, window.dilation, groups)
    return (found if groups == 1 else found[:, rows]).movedim(1, -1)


def _local(e: ex.Weighted, u: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    assert e.window is not None
    patches, rank = _padded(e, u), len(e.window.kernel)
    for number, size in enumerate(e.window.kernel):
        patches = patches.unfold(number + 2, size, e.window.stride[number])
    places, steps = "pqr"[:rank], "ijk"[:rank]
    y = torch.einsum(f"nc{places}{steps},oc{steps}{places}->n{places}o", patches, weight)
    y = y if bias is None else y + bias.movedim(0, -1)
    return y if e.rows is None else y[..., e.rows[0] : e.rows[1]]


def _parameter(draw: Draw, e: ex.Parameter) -> Tensor:
    found = draw.tensor(e.weight, "weight").reshape(e.shape).movedim(e.channel, -1)
    found = found if e.rows is None else found[..., e.rows[0] : e.rows[1]]
    points = next(iter(draw.data.values())).shape[1]
    return found.reshape(1, *e.positions, found.shape[-1]).expand(
        points, *(-1,) * (1 + len(e.positions))
    )


def _sum(draw: Draw, e: ex.Sum) -> Tensor:
    total = e.terms[0][0] * draw.value(e.terms[0][1])
    for c, term in e.terms[1:]:
        total = total + c * draw.value(term)
    return total


def _mapped(draw: Draw, e: ex.Mapped) -> Tensor:
    return e.map(draw.value(e.input), 1)


def _gained(draw: Draw, e: ex.Gained) -> Tensor:
    gain = draw.data[e.reference][..., 0].T
    return draw.value(e.input) * gain.reshape(gain.shape[0], *e.positions, 1)


def _routed(draw: Draw, e: ex.Routed) -> Tensor:
    matrix, u = draw.data[e.reference].movedim(1, 0), draw.value(e.input)
    found = matrix @ u.reshape(u.shape[0], -1, u.shape[-1])
    return found.reshape(u.shape[0], *e.positions, u.shape[-1])


def _attended(draw: Draw, e: ex.Attended | ex.RandomlyAttended) -> Tensor:
    assert e.heads is not None
    query, key, value = (
        arranged(draw.value(part), layout)
        for part, layout in (
            (e.query, e.heads.query),
            (e.key, e.heads.key),
            (e.value, e.heads.value),
        )
    )
    if isinstance(e, ex.RandomlyAttended):
        weights = query @ key * (e.gain * e.heads.size**-0.5)
    else:
        logits = query @ key * (e.gain / e.heads.size)
        masks = tuple(draw.data[name].movedim(1, 0) for name in e.masks)
        flat = logits.flatten(1, -3) if logits.dim() > 3 else logits[:, None]
        parts = [e.mechanism(flat[:, head], masks) for head in range(flat.shape[1])]
        weights = torch.stack(parts, 1).reshape(logits.shape)
    return collected(weights @ value, e.heads.result)


def _point(draw: Draw, e: ex.Point) -> Tensor:
    return e.activation(draw.value(e.input))


def _normalized(draw: Draw, e: ex.Normalized) -> Tensor:
    u = draw.value(e.input)
    split = u.reshape(*u.shape[:-1], e.groups, -1)
    axes = (*(number + 1 for number in e.over), -1)
    if e.center:
        split = split - split.mean(axes, keepdim=True)
    square = split.square().mean(axes, keepdim=True)
    return (split * torch.rsqrt(square + e.eps)).reshape(u.shape)


def _dropped(draw: Draw, e: ex.Dropped) -> Tensor:
    return draw.value(e.input)


def _product(draw: Draw, e: ex.Product) -> Tensor:
    return draw.value(e.left) * draw.value(e.right)


VALUES: dict[type, Callable[[Draw, Any], Tensor]] = {
    ex.Raw: _raw,
    ex.Weighted: _weighted,
    ex.Parameter: _parameter,
    ex.Sum: _sum,
    ex.Mapped: _mapped,
    ex.Gained: _gained,
    ex.Routed: _routed,
    ex.Attended: _attended,
    ex.RandomlyAttended: _attended,
    ex.Point: _point,
    ex.Normalized: _normalized,
    ex.Dropped: _dropped,
    ex.Product: _product,
}
