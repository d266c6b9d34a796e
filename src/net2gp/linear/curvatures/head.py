"""The last linear layer of a network, wherever it is applied, and what multiplies its weights.

A head is an `nn.Linear`, or a convolution with a kernel of one place, in whose parameters the output is
linear. If it is applied at several places (tokens, atoms, pixels) that are then summed, averaged or picked,
f(x) = Σ_t w_t (W h_t + b) = W φ + b s with φ = Σ_t w_t h_t and s = Σ_t w_t.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from net2gp.errors import NetworkError
from net2gp.inputs import chunks, follows, map_inputs, num_rows, rows, tensors
from net2gp.linear.curvatures.beside import POINTS_PER_LOOK, check_alone, check_columns
from net2gp.linear.curvatures.kept_features import direct_rows, keep, keeps, kept
from net2gp.linear.curvatures.place_features import place_features
from net2gp.linear.forward.calls import recording
from net2gp.linear.forward.evaluation import LOCK, accepts
from net2gp.linear.forward.modes import in_eval_mode
from net2gp.linear.forward.places import channels_of
from net2gp.linear.planning.proof import TOLERANCE
from net2gp.linear.precision import HALF, rechosen
from net2gp.types import Inputs, Params

if TYPE_CHECKING:
    from net2gp.linear.linearized import Linearized

CHECKED_POINTS = 8
"""The number of points at which the output is compared with what a head would give."""

POINTS = 1500
"""The number of points whose features are computed together."""

DIGITS = 16
"""The base of numbers that go through a pass of half precision, which has eight bits or more."""


def last_linearized(linearized: Linearized, x: Inputs) -> Linearized:
    """Return the same network with the parameters of its last layer as the chosen ones."""
    called = _called(linearized, x)
    values = {**linearized.params, **linearized.frozen}
    few = _few(x)
    for name in reversed(called):
        prefix = f"{name}." if name else ""
        names = [f"{prefix}{part}" for part in ("weight", "bias") if f"{prefix}{part}" in values]
        own = linearized.network.get_submodule(name)._parameters
        if (
            sum(value is not None for value in own.values()) != len(names)
            or f"{prefix}weight" not in names
        ):
            continue  # another layer owns the weight, or it is computed from other parameters
        found = rechosen(linearized, names)
        if _is_linear(found, few):
            check_alone(linearized, name, _unclear(found, x))
            check_columns(name, _change(found, few)[1])
            return found
    kind = type(linearized.network).__name__
    if not called:
        raise NetworkError(
            f"LastLayer() needs an nn.Linear, or a convolution with a kernel of one place, at the end, but "
            f"{kind} calls none. Pass only= with the names of the last parameters, and structure=Full() or "
            "Kron()."
        )
    shown = ", ".join(f"'{name}'" for name in called[:-5:-1])
    raise NetworkError(
        f"LastLayer() found no layer in whose weights the output of {kind} is linear. It looked at {shown}"
        f"{' and all before them' if len(called) > 4 else ''}. Return the logits, without a softmax or "
        "another function behind the layer: pick them with linearize(network, output=...). Or choose "
        "parameters with "
        f"only=['{called[-1]}.*'] and structure=Full() or Kron()."
    )


def _unclear(found: Linearized, x: Inputs) -> Inputs:
    """Return the points at which parameters might reach the output beside the head.

    Where features are kept, they are computed now, and the output is seen to be the head's own at a point, or
    not: then a few of such points are enough.
    """
    if channels_of(found) is not None or not keeps(x) or not has_features(found, x):
        return x
    for part in chunks(x, POINTS):
        features_and_outputs(found, part)
        if kept(found, part) is None:
            return x
    look = ~direct_rows(found, x)
    look[:POINTS_PER_LOOK] = True
    return rows(x, look.nonzero().flatten().to(tensors(x)[0].device))


def _called(linearized: Linearized, x: Inputs) -> list[str]:
    """Return the names of all layers that could be a head, in the order of their last calls."""
    called: dict[str, None] = {}

    def note(name: str) -> None:
        called.pop(name, None)
        called[name] = None

    with LOCK:
        handles = [
            module.register_forward_hook(lambda *_, name=name: note(name))
            for name, module in linearized.network.named_modules()
            if _is_head(module)
        ]
        try:
            linearized(rows(x, slice(0, 1)))
        finally:
            for handle in handles:
                handle.remove()
    return list(called)


def _is_head(module: nn.Module) -> bool:
    if isinstance(module, nn.Linear):
        return True
    if not isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return False
    alone = set(module.kernel_size) | set(module.stride) | {module.groups} == {1}
    return alone and (isinstance(module.padding, str) or set(module.padding) == {0})


def _few(x: Inputs) -> Inputs:
    count = num_rows(x)
    chosen = torch.linspace(0, count - 1, min(count, CHECKED_POINTS)).round().long()
    return rows(x, chosen.to(tensors(x)[0].device))


def _moved(found: Linearized) -> Params:
    """Return the layer's parameters with the opposite sign and noise, so that kinks behind it show."""
    generator = torch.Generator().manual_seed(0)
    moved = {}
    for name, value in found.params.items():
        noise = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value)
        moved[name] = -value + (0.1 + 0.5 * value.square().mean().sqrt()) * noise
    return moved


def _change(found: Linearized, x: Inputs) -> tuple[Params, Tensor]:
    """Return a step of the layer's parameters, and its effect on the output."""
    moved = _moved(found)
    with torch.no_grad():
        change = found.evaluate(moved, x) - found.evaluate(found.params, x)
    return {name: moved[name] - value for name, value in found.params.items()}, change


def _is_linear(found: Linearized, x: Inputs) -> bool:
    """Whether the output depends on the layer's parameters, and does so linearly."""
    step, change = _change(found, x)
    return bool(change.abs().max() > 0) and _close(found.jvp(x, step), change, found)


def _close(one: Tensor, other: Tensor, found: Linearized) -> bool:
    tolerance = max(1e-3, TOLERANCE[found.rounding][0])
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * float(other.abs().max()))


def has_features(found: Linearized, x: Inputs) -> bool:
    """Whether f = W φ(x) + b s(x) + const, with one φ for all outputs of a point, or of a place.

    This is false if every place has outputs of its own, such as the pixels of an image, and these are not
    told to be places.
    """
    few = _few(x)
    step, change = _change(found, few)
    change = change.reshape(-1, channels_of(found) or change.shape[1])
    if change.shape[1] != len(found.example):
        return False
    return _close(features(found, few) @ weights_of(step).T, change, found)


def weights_of(params: Params) -> Tensor:
    """Return the parameters of a head as one matrix: (C, D + 1) with the bias at the end, or (C, D)."""
    values = [value.flatten(1) if value.dim() > 1 else value[:, None] for value in params.values()]
    return torch.cat(values, 1)


def features(linearized: Linearized, x: Inputs) -> Tensor:
    """Return the features φ that the weights of the head multiply, with s at the end for a bias: (N, D')."""
    return features_and_outputs(linearized, x)[0]


def features_and_outputs(linearized: Linearized, x: Inputs) -> tuple[Tensor, Tensor]:
    """Return φ (N, D') and the network's outputs (N, C), from one pass and two backward passes to the head.

    Outputs at P places give P rows for each point.

    w_t is the derivative of a point's first output in the first channel at the place t. To find the point
    that t belongs to, the outputs are also multiplied by the numbers of their points before they are summed
    and differentiated, digit by digit where a pass has few of them. φ is differentiable in `x`.
    """
    follow = follows(x)
    layer = _layer(linearized)
    if channels_of(linearized) is not None:
        return place_features(linearized, layer, x)
    if not follow and (known := kept(linearized, x)) is not None:
        return known
    calls, out = _cut(linearized, layer, x, follow)
    if not calls:  # these points do not pass the head
        width = weights_of(linearized.params).shape[1]
        return out.detach().new_zeros(len(out), width), out.detach()
    with torch.inference_mode(False), torch.enable_grad():
        places, first = [z for _, z in calls], out[:, 0]
        weights = torch.autograd.grad(
            first.sum(), places, create_graph=follow, retain_graph=True, materialize_grads=True
        )
        base = DIGITS if linearized.rounding in HALF else len(out)
        owners = _owners(first, weights, places, base, layer)
    bias = len(linearized.params) == 2
    phi = out.new_zeros(len(out), linearized.example[0].numel() + bias)
    for (h, _), w, owner in zip(calls, weights, owners, strict=True):
        flat, each = (_by_place(value, layer).to(out.dtype) for value in (h, w))
        flat = torch.cat([flat, torch.ones_like(flat[:, :1])], 1) if bias else flat
        phi = phi.index_add(0, owner, each[:, :1] * flat)
    out = out.detach()
    if not follow:
        z = calls[0][1]
        own = (
            len(calls) == 1 and z.numel() == out.numel() and torch.equal(z.reshape(out.shape), out)
        )
        keep(linearized, x, phi, out, direct=own)
    return phi, out


def gradient_of(linearized: Linearized, phi: Tensor, u: Tensor) -> Tensor:
    """Return Σ_n J_nᵀ u_n for the head's parameters, from features (N, D') and u (N, C): (P,) in float64."""
    total = u.double().mT @ phi.double()
    bias = len(linearized.params) == 2
    parts = [total[:, :-1] if bias else total] + ([total[:, -1]] if bias else [])
    return torch.cat([part.reshape(-1) for part in parts])


def _owners(
    first: Tensor, weights: Sequence[Tensor], places: Sequence[Tensor], base: int, layer: nn.Module
) -> list[Tensor]:
    """Return for each call of the layer which point each of its places belongs to."""
    powers = [1]
    while powers[-1] * base < len(first):
        powers.append(powers[-1] * base)
    each = [_by_place(w.detach(), layer)[:, 0].to(first.dtype) for w in weights]
    owners = [torch.zeros_like(w, dtype=torch.long) for w in each]
    for power in powers:
        digits = torch.arange(len(first), device=first.device) // power % base
        total = (first * (digits + 1).to(first)).sum()
        more = power < powers[-1]
        found = torch.autograd.grad(total, places, retain_graph=more, materialize_grads=True)
        for owner, w, g in zip(owners, each, found, strict=True):
            digit = (_by_place(g, layer)[:, 0].to(w) / w).nan_to_num(1.0, 1.0, 1.0)
            owner += power * (digit.round().clamp(1, base).long() - 1)
    return [owner.clamp(max=len(first) - 1) for owner in owners]


def _layer(linearized: Linearized) -> nn.Module:
    name = next(iter(linearized.params)).removesuffix("weight").removesuffix(".")
    return linearized.network.get_submodule(name)


def _cut(
    linearized: Linearized, layer: nn.Module, x: Inputs, follow: bool
) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Return inputs and outputs of each call of the layer, and the network outputs that depend on them."""
    linearized.check(x)
    calls: list[tuple[Tensor, Tensor]] = []

    def hook(module: nn.Module, given: tuple, keywords: dict, out: Tensor) -> Tensor:
        h = given[0] if given else keywords["input"]
        z = out.detach().requires_grad_()
        calls.append((h if follow else h.detach(), z))
        return z.clone()  # later operations may change it in place

    def own(value: Tensor) -> Tensor:
        copied = value.is_inference() or (follow and value.requires_grad)
        return value.clone() if copied else value.detach()

    with LOCK, in_eval_mode(linearized, x), recording(), accepts(x):
        handle = layer.register_forward_hook(hook, with_kwargs=True)
        try:
            return calls, linearized.evaluate(linearized.params, map_inputs(x, own))
        finally:
            handle.remove()


def _by_place(value: Tensor, layer: nn.Module) -> Tensor:
    """Return a tensor of the layer as (places, channels)."""
    value = value if isinstance(layer, nn.Linear) else value.movedim(1, -1)
    return value.reshape(-1, value.shape[-1])
