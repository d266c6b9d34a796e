"""Comparison of gradients with plain reverse-mode autograd, where one random vector reveals any error.

A wrong Jacobian J̃ ≠ J has J̃ᵀu = Jᵀu for a random u with probability zero, and Jᵀu is one backward pass of
torch.autograd through one ordinary forward pass, without torch.func, vmap or layer rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from net2gp.linear.forward.calls import fresh_leaves, recording, run
from net2gp.linear.forward.evaluation import differentiates
from net2gp.linear.precision import HALF
from net2gp.types import Inputs, Params

if TYPE_CHECKING:
    from net2gp.linear.linearized import Linearized

TOLERANCE = {
    torch.float64: (1e-9, 1e-12),
    torch.float32: (1e-3, 1e-5),
    torch.float16: (1.5e-2, 4e-3),
    torch.bfloat16: (1e-1, 3e-2),
}
"""Errors that rounding may cause, relative to the parameter's own gradient and to the largest gradient. In
half precision they are about 30 and 8 roundings of the same sign; whatever assigns gradients to other points
or parameters is off by as much as the gradients themselves."""

GPU_TOLERANCE = 2e-2, 1e-3
"""The same errors in float32 on a GPU, where products have 10 bits (TF32) if the caller allows it."""

COUPLED = {torch.float64: 1e3, torch.float32: 1e1}
"""How many times these errors the gradients of a point alone may differ from those in its batch."""


def random_like(value: Tensor, seed: int = 0) -> Tensor:
    """Return standard normal numbers of the shape of `value`, which are the same at each call."""
    generator = torch.Generator().manual_seed(7919 + seed)
    return torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value)


def plain_pullback(
    linearized: Linearized, x: Inputs, names: Sequence[str], mix: Tensor | None = None
) -> tuple[Tensor, Params]:
    """Return a random u (N, C), and Jᵀu of the parameters `names` by plain reverse mode.

    With `mix` (N, C, K), J is the Jacobian of the combinations Σ_c mix_nck f_c of the outputs.
    """
    leaves = fresh_leaves(linearized, names)
    out = run(linearized, leaves, x)
    with recording():
        out = out if mix is None else (out[:, None] @ mix)[:, 0]
    u = random_like(out)
    return u, gradients(out, {name: leaves[name] for name in names}, u)


def gradients(out: Tensor, leaves: Params, u: Tensor, keep: bool = False) -> Params:
    """Compute Jᵀu of the leaves, which is zero where the output does not depend on them."""
    if not out.requires_grad:
        return {name: torch.zeros_like(value) for name, value in leaves.items()}
    values = list(leaves.values())
    with differentiates():
        found = torch.autograd.grad(out, values, u, retain_graph=keep, materialize_grads=True)
    return dict(zip(leaves, found, strict=True))


def differing(
    found: Params, wanted: Params, slack: float = 1.0, *, rounding: torch.dtype | None = None
) -> tuple[str, ...]:
    """Return the parameters whose values differ from `wanted` by more than `slack` times rounding errors.

    These are of the dtype `rounding` if the network computes in a coarser one than that of the values.

    A gradient that is zero up to rounding, such as the gradient of a bias in front of a softmax, is compared
    with the largest of the others.
    """
    sizes = {name: _size(value) for name, value in wanted.items()}
    largest = max(sizes.values(), default=0.0)
    names = []
    for name, value in wanted.items():
        own, overall = _tolerance(value, rounding)
        error = _size(found[name].reshape(-1) - value.reshape(-1))
        # written so that NaN counts as a difference
        if not error <= slack * (own * sizes[name] + overall * largest):
            names.append(name)
    return tuple(names)


def _tolerance(value: Tensor, rounding: torch.dtype | None) -> tuple[float, float]:
    if rounding in HALF:
        return TOLERANCE[rounding]
    if value.is_cuda and value.dtype != torch.float64:
        return GPU_TOLERANCE
    return TOLERANCE.get(value.dtype, TOLERANCE[torch.float32])


def _size(value: Tensor) -> float:
    return float(value.detach().abs().max()) if value.numel() else 0.0
