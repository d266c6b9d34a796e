"""The gradients of all outputs of a network in its parameters, written so that they can be traced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from net2gp.calling import functional_call
from net2gp.errors import NotAvailable
from net2gp.inputs import map_inputs, tensors
from net2gp.linear.forward.evaluation import LOCK, differentiable, evaluating
from net2gp.linear.forward.factors import Direct, Factor, Outer, jacobian
from net2gp.linear.forward.layers import Rule, find_rule
from net2gp.linear.linearized import Linearized
from net2gp.linear.precision import HALF
from net2gp.serving.programs.tracing import repeated
from net2gp.types import Inputs

DRAWS_INSTEAD = "Pass draws=32, which serves any network by drawn weights."
"""What to do about a network whose gradients cannot be written out."""

PIECE = 4096
"""Entries of gradients that are summed at a time."""


@dataclass(frozen=True, eq=False)
class _Tap:
    """One call of a layer: its prepared input, and its output, from where gradients are taken."""

    module: nn.Module
    rule: Rule
    names: dict[str, str]
    a: Tensor
    out: Tensor


def outputs(linearized: Linearized, x: Inputs) -> Tensor:
    """Return f(x; θ*), (B, C), without any check of values, which a graph cannot have."""
    keywords = dict(x) if isinstance(x, dict) else {}
    arguments = () if keywords else tuple(tensors(x))
    values = {**linearized.frozen, **linearized.params}
    with differentiable(linearized.network):
        out = functional_call(linearized.network, values, arguments, keywords)
    out = out if linearized.output is None else linearized.output(out)
    return out.reshape(out.shape[0], -1)


def check_network(linearized: Linearized) -> None:
    """Raise unless the network can be written out as a graph of one precision.

    Raises:
        NotAvailable: If it has parameters of half precision.
    """
    if linearized.rounding in HALF:
        raise NotAvailable(
            f"export writes networks of float32 or float64, but this one has {linearized.rounding}. Convert "
            "the network with network.float() before the posterior is made."
        )


def outputs_and_gradients(
    linearized: Linearized, x: Inputs, num_outputs: int
) -> tuple[Tensor, dict[str, Factor]]:
    """Return f(x; θ*) and the gradients of all outputs in the chosen parameters, from one backward pass.

    The backward pass is that of C batches. A layer keeps its points in front.

    Args:
        linearized: The network, in float32 or float64.
        x: B points.
        num_outputs: The number of outputs C.

    Returns:
        The outputs (B, C), and a factor for each parameter.

    Raises:
        NotAvailable: If a parameter is used in another way than as that of a layer with a rule.
    """
    C = num_outputs
    with torch.enable_grad():
        out, near = _tapped(linearized, x)
        tapped = {name for tap in near for name in tap.names.values()}
        _check_all(linearized, tapped)
        wide, far = _tapped(linearized, map_inputs(x, lambda value: repeated(value, C)))
        seed = torch.eye(C, dtype=out.dtype, device=out.device)
        seed = seed.repeat(out.shape[0], 1)
        grads = torch.autograd.grad(wide, [tap.out for tap in far], seed, allow_unused=True)
    found: dict[str, Factor] = {}
    for tap, g in zip(near, grads, strict=True):
        g = tap.out.new_zeros(tap.out.shape) if g is None else g.detach()
        g = g.unflatten(0, (out.shape[0], C))
        for suffix, factor in tap.rule.factors(tap.module, tap.a.detach(), g).items():
            name = tap.names.get(suffix)
            if name is not None:
                found[name] = _sum(found[name], factor) if name in found else factor
    return out.detach(), {name: found[name] for name in linearized.params}


def _check_all(linearized: Linearized, tapped: set[str]) -> None:
    missing = [name for name in linearized.params if name not in tapped]
    if missing:
        raise NotAvailable(
            f"the gradient of the parameter '{missing[0]}' cannot be exported: it is not the weight or the "
            f"bias of a module that has a rule. {DRAWS_INSTEAD}"
        )


def _sum(one: Factor, other: Factor) -> Direct:
    return Direct(jacobian(one) + jacobian(other))


def _tapped(linearized: Linearized, x: Inputs) -> tuple[Tensor, list[_Tap]]:
    taps: list[_Tap] = []
    with _hooks(linearized, taps):
        return outputs(linearized, x), taps


@contextlib.contextmanager
def _hooks(linearized: Linearized, taps: list[_Tap]) -> Iterator[None]:
    network = linearized.network
    own = {id(value): name for name, value in network.named_parameters()}
    with LOCK, evaluating(network), contextlib.ExitStack() as stack:
        for module in network.modules():
            rule = find_rule(module)
            names = {
                suffix: own[id(value)]
                for suffix, value in module.named_parameters(recurse=False)
                if own[id(value)] in linearized.params
            }
            if rule is not None and names:
                hook = _tap(rule, names, taps)
                handle = module.register_forward_hook(hook, with_kwargs=True, prepend=True)
                stack.callback(handle.remove)
        yield


def _tap(rule: Rule, names: dict[str, str], taps: list[_Tap]) -> Any:
    def hook(module: nn.Module, given: tuple, keywords: dict, out: Tensor) -> Tensor:
        a = given[0] if given else keywords["input"]
        out = out if out.requires_grad else out.detach().requires_grad_()
        windows = isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        prepared = patches(module, a) if windows else rule.prepare(module, a)
        taps.append(_Tap(module, rule, names, prepared, out))
        return out

    return hook


def patches(module: nn.Module, a: Tensor) -> Tensor:
    """Return the patches that a convolution sees, from one slice for each place of its kernel.

    Args:
        module: The convolution.
        a: Its input, (B, channels, *sizes).

    Returns:
        The patches (B, groups, places, channels · kernel), in the order of the weight's entries.
    """
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    border = tuple(module._reversed_padding_repeated_twice)
    a = F.pad(a, border, mode=mode) if any(border) else a
    axes = list(zip(module.kernel_size, module.stride, module.dilation, strict=True))
    reach = [
        (int(size) - d * (k - 1) - 1) // s + 1
        for size, (k, s, d) in zip(a.shape[2:], axes, strict=True)
    ]
    parts = []
    for place in product(*(range(k) for k, _, _ in axes)):
        part = a
        for axis, (offset, count, (_, s, d)) in enumerate(zip(place, reach, axes, strict=True), 2):
            start = offset * d
            part = part.narrow(axis, start, (count - 1) * s + 1)
            part = part if s == 1 else part[(slice(None),) * axis + (slice(None, None, s),)]
        parts.append(part)
    groups, width = module.groups, module.in_channels // module.groups * len(parts)
    return torch.stack(parts, 2).reshape(a.shape[0], groups, width, prod(reach)).mT


def blocks(factor: Factor) -> Tensor:
    """Return J_b J_bᵀ of each point, (B, C, C), from the gradients in a parameter.

    A weight that is used at one place needs no gradient: with its inputs a and output gradients g it is
    Σ_o g_co g_do Σ_i a_i² scale_oi².
    """
    if isinstance(factor, Outer) and factor.g.shape[2] == 1 and factor.g.shape[4] == 1:
        a, g = factor.a[:, 0, 0].square(), factor.g[:, :, 0, :, 0]
        if factor.scale.dim():
            spread = (a @ factor.scale[0].square().mT)[:, None]
        else:
            spread = (a.sum(-1) * factor.scale.square())[:, None, None]
        return (g * spread) @ g.mT
    return squared(direct(factor))


def squared(J: Tensor) -> Tensor:
    """Return J Jᵀ for J (B, C, p) as the sum of the products of pieces of it.

    One sum over a hundred thousand entries loses two digits of float32, sums of some thousand none.
    """
    products = [piece @ piece.mT for piece in J.split(PIECE, -1)]
    total = products[0]
    for one in products[1:]:
        total = total + one
    return total


def direct(factor: Factor) -> Tensor:
    """Return the gradients (B, C, p), whatever the form of the factor."""
    if isinstance(factor, Outer):
        B, C, S, O, T = factor.g.shape
        stacked = factor.g.transpose(1, 2).reshape(B * S, C * O, T)
        product = stacked @ factor.a.reshape(B * S, T, -1)
        J = product.reshape(B, S, C, O, -1).transpose(1, 2)
        J = J * factor.scale if factor.scale.dim() else J
        return factor.entries(J)
    return jacobian(factor)
