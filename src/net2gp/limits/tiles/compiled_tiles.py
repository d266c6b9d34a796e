"""A tile's program as one compiled function, for devices where memory traffic dominates the cost.

The program is recorded once for tiles of one size, and passed to `torch.compile`, which fuses each layer's
elementwise work. Variances are inputs of the compiled function, so that other values need no new
compilation. If compilation fails, the program runs uncompiled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from net2gp.limits.moments.evaluation import Evaluation, Pair
from net2gp.limits.moments.expression_moments import run
from net2gp.limits.plan import remember
from net2gp.limits.prior import Prior
from net2gp.limits.signals.positions import functional_windows
from net2gp.limits.tiles.batch import Tiles

Flat = tuple[list[Tensor], ...]


def flat(left: Tiles, right: Tiles) -> Flat:
    """Return all tensors that a tile depends on, as lists in a fixed order."""
    prior = left.prior
    return (
        [left.data[name] for name in sorted(left.data)],
        [right.data[name] for name in sorted(right.data)],
        [left.profile[key] for key in sorted(left.profile)],
        [right.profile[key] for key in sorted(right.profile)],
        [_tensor(prior.weight_vars[name], left) for name in sorted(prior.weight_vars)],
        [_tensor(prior.bias_vars[name], left) for name in sorted(prior.bias_vars)],
    )


def _tensor(value: float | Tensor, like: Tiles) -> Tensor:
    return torch.as_tensor(value, dtype=like.prior.dtype, device=like.device)


def program(left: Tiles) -> Callable[..., Pair]:
    """Return the moments of the output as a function of the lists that `flat` returns."""
    names, keys = sorted(left.data), sorted(left.profile)
    weights, biases = sorted(left.prior.weight_vars), sorted(left.prior.bias_vars)

    def function(*lists: list[Tensor]) -> Pair:
        one, two, first, second, weight, bias = lists
        prior: Prior = replace(
            left.prior,
            weight_vars=dict(zip(weights, weight, strict=True)),
            bias_vars=dict(zip(biases, bias, strict=True)),
        )
        profiles = (dict(zip(keys, first, strict=True)), dict(zip(keys, second, strict=True)))
        data, others = dict(zip(names, one, strict=True)), dict(zip(names, two, strict=True))
        return run(Evaluation(left.plan.program, prior, left.tangent, data, others, profiles))

    return function


def compiled(left: Tiles, right: Tiles) -> Callable[..., Any]:
    """Return the program for tiles of these sizes, compiled if that works."""
    from torch.fx.experimental.proxy_tensor import make_fx

    example = flat(left, right)
    key = (left.tangent, left.prior.dtype, str(left.device), left.count, right.count)
    known = left.plan.compiled
    if key not in known:
        function = program(left)
        try:
            with torch.no_grad(), functional_windows():
                graph = make_fx(function)(*example)
                found: Callable[..., Any] = torch.compile(graph, dynamic=False)
                found(*example)  # compiles, so that a failure shows here
        except Exception:  # compilers fail in many ways, and none of them matters for the result
            found = function
        remember(known, key, found)
    return known[key]
