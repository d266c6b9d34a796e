"""Columns of a Jacobian for parameters without a layer rule, vectorized if that is right, else in a loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.func import jacrev, vmap

from net2gp.errors import NetworkError
from net2gp.inputs import follows, map_inputs, num_rows, rows
from net2gp.linear.forward.calls import fresh_leaves, recording, run
from net2gp.linear.forward.evaluation import differentiates, without_vmap_warnings
from net2gp.linear.planning.proof import COUPLED, differing, plain_pullback
from net2gp.linear.precision import check_gradients
from net2gp.progress import progress
from net2gp.types import Inputs, Params

if TYPE_CHECKING:
    from net2gp.linear.linearized import Linearized


def leftover_jacobian(
    linearized: Linearized, x: Inputs, names: Sequence[str], mix: Tensor | None = None
) -> Tensor:
    """Return the gradients (B, C, p) of the parameters `names`, one example at a time, for any network.

    With `mix` (B, C, K) they are (B, K, p), the gradients of the combinations Σ_c mix_bck f_c. They are
    vectorized over examples if the network's operations allow it. torch batches some operations wrongly, and
    only for some sizes, so the result is compared with plain reverse mode each time, and gradients that
    differ are computed again, point by point and output by output. So are gradients that are to be
    differentiated in `x`, since plain autograd is right for more operations than torch.func.

    The cost is C + 1 backward passes if they are vectorized, and B·C passes of one point if not.
    """
    follow, wrong = follows(x), tuple(names)
    x = x if follow else map_inputs(x, lambda value: value.detach())
    found = None if follow else _vectorized(linearized, x, names, mix)
    u, wanted = plain_pullback(linearized, x, names, mix)
    if found is not None and all(J.shape[:2] == u.shape for J in found.values()):
        wrong = differing(_pulled(found, u), wanted, rounding=linearized.rounding)
    if wrong:
        looped = _looped(linearized, x, wrong, mix)
        check_gradients(linearized, {name: [J] for name, J in looped.items()})
        _check_alone(linearized, x, _pulled(looped, u), mix)
        found = {**(found or {}), **looped}
    assert found is not None
    check_gradients(linearized, {name: [J] for name, J in found.items()})
    return torch.cat([_columns(found[name]) for name in names], -1)


def _columns(J: Tensor) -> Tensor:
    return J.reshape(*J.shape[:2], -1)


def _pulled(jacobians: Params, u: Tensor) -> Params:
    return {n: _columns(J).flatten(0, 1).mT @ u.flatten() for n, J in jacobians.items()}


def _vectorized(
    linearized: Linearized, x: Inputs, names: Sequence[str], mix: Tensor | None
) -> Params | None:
    """Return the gradients (B, C, *shape) by parameter, or None if the network cannot be vectorized."""
    others = {name: value for name, value in linearized.params.items() if name not in names}
    chosen = {name: linearized.params[name] for name in names}

    def single(params: Params, point: Inputs, columns: Tensor | None) -> Tensor:
        alone = map_inputs(point, lambda value: value[None])
        out = linearized.evaluate({**others, **params}, alone)[0]
        return out if columns is None else out @ columns

    try:
        with without_vmap_warnings():
            axes = (None, 0, None if mix is None else 0)
            return vmap(jacrev(single), in_dims=axes)(chosen, x, mix)
    except (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError):
        # data-dependent Python, in-place updates and unbatched operators cannot be vectorized
        return None


def _looped(linearized: Linearized, x: Inputs, names: Sequence[str], mix: Tensor | None) -> Params:
    parts: dict[str, list[Tensor]] = {name: [] for name in names}
    with progress("per-example gradients", num_rows(x)) as advance:
        for n in range(num_rows(x)):
            columns = None if mix is None else mix[n]
            found = _of_point(linearized, rows(x, slice(n, n + 1)), names, columns)
            for name in names:
                parts[name].append(found[name])
            advance()
    like = linearized.example
    return {name: torch.stack(pieces).to(like.dtype) for name, pieces in parts.items()}


def _of_point(
    linearized: Linearized, point: Inputs, names: Sequence[str], columns: Tensor | None
) -> Params:
    """Return the gradients (C, *shape) of one point by parameter, with one torch.autograd.grad per output."""
    leaves = fresh_leaves(linearized, names)
    values = [leaves[name] for name in names]
    follow = follows(point)
    whole = run(linearized, leaves, point, follow=follow)
    with recording():
        out = whole[0] if columns is None else whole[0] @ columns
        outputs = list(out)
    if not out.requires_grad:  # this point uses none of these parameters
        return {n: leaves[n].new_zeros(len(out), *leaves[n].shape) for n in names}
    with differentiates():
        gradients = [
            torch.autograd.grad(
                one, values, retain_graph=True, create_graph=follow, materialize_grads=True
            )
            for one in outputs
        ]
    return dict(zip(names, map(torch.stack, zip(*gradients, strict=True)), strict=True))


def _check_alone(linearized: Linearized, x: Inputs, alone: Params, mix: Tensor | None) -> None:
    """Raise unless points have the same gradients alone as in their batch.

    Rounding errors are judged by the gradients of all parameters that are trained, chosen or not: a chosen
    gradient may be small only because larger ones cancel in it.
    """
    own = dict(linearized.network.named_parameters())
    free = {n: v for n, v in linearized.frozen.items() if n in own and own[n].requires_grad}
    everything = replace(linearized, params={**linearized.params, **free})
    _, together = plain_pullback(everything, x, list(everything.params), mix)
    slack = COUPLED.get(linearized.example.dtype, COUPLED[torch.float32])
    both = {**together, **alone}
    differ = differing(both, together, slack, rounding=linearized.rounding)
    names = [name for name in differ if name in alone]
    if names:
        raise NetworkError(
            f"the gradients of {_some(names)} at a point depend on the other points of its batch: the "
            "network couples its points, or takes another way for another number of them. Use a network "
            f"that treats points one by one, or leave these parameters out: {leave_out(names)}."
        )


def leave_out(names: Sequence[str]) -> str:
    """Return what to type so that the parameters `names` are not chosen.

    >>> print(leave_out(["a.bias"]))
    linearize(network, only=["*", "!a.bias"])
    """
    patterns = ", ".join(f'"!{name}"' for name in names)
    return f'linearize(network, only=["*", {patterns}])'


def _some(names: Sequence[str], limit: int = 5) -> str:
    more = f", … ({len(names)} in all)" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
