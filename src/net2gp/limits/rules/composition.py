"""Calls whose arguments are all functions of one and the same signal: they are one function of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from net2gp.limits.duals.activations import activation_of
from net2gp.limits.graph.function_registry import name_of, run
from net2gp.limits.graph.translate import Data, Logits, Parameter, Signal
from net2gp.limits.modules.pointwise import Pointwise
from net2gp.limits.signals import expressions as ex

_COMPARISONS = {"gt", "ge", "lt", "le", "eq", "ne", "greater", "less", "isfinite", "signbit"}
_LINEAR = {"add", "iadd", "sub", "isub", "rsub", "mul", "imul", "multiply", "cat", "stack"}


@dataclass(frozen=True, eq=False)
class Condition:
    """A comparison such as u > 0.

    Args:
        function: The comparison, as a function of the values of `base`.
        base: The expression that it depends on.
        signal: A signal of the same layout as the result.
    """

    function: Callable[[Tensor], Tensor]
    base: ex.Expression
    signal: Signal


Part = Signal | Condition


def composed_call(node: fx.Node, args: tuple, kwargs: dict) -> Signal | Condition | None:
    """Return the value of a call whose arguments are numbers and functions of one signal.

    All other calls give None. Sums and products of signals have rules of their own, and give None too.
    """
    parts = [value for value in args if isinstance(value, Signal | Condition)]
    others = [*kwargs.values(), *(value for value in args if value not in parts)]
    compares = any(isinstance(value, Condition) for value in parts)
    name = name_of(node.target)
    wanted = compares or name in _COMPARISONS or _divides_by_signal(name, args)
    wanted = wanted or (len(parts) > 1 and name not in _LINEAR)
    plain = not any(isinstance(value, Part | Data | Parameter | Logits) for value in others)
    if not wanted or not plain or len({id(part) for part in parts}) < 1:
        return None
    functions = [_function(part) for part in parts]
    layouts = [_signal(part).layout for part in parts]
    if any(found is None for found in functions) or any(one != layouts[0] for one in layouts):
        return None
    bases = {found[1].order: found[1] for found in functions if found is not None}
    if len(bases) != 1:
        return None
    base = next(iter(bases.values()))
    table = {id(part): found[0] for part, found in zip(parts, functions, strict=True) if found}

    def apply(u: Tensor) -> Tensor:
        values = (table[id(v)](u) if id(v) in table else _like(v, u) for v in args)
        result: Tensor = run(node.target, tuple(values), kwargs)
        return result

    kind = _kind(apply)
    if kind is None:
        return None
    signal = _signal(parts[0])
    if kind == torch.bool:
        return Condition(apply, base, signal)
    activation = activation_of(Pointwise(apply))
    return signal.each(lambda e: ex.Point(activation, base, e.positions))


def _divides_by_signal(name: str, args: tuple) -> bool:
    return (
        name in ("truediv", "div", "divide", "itruediv")
        and len(args) > 1
        and isinstance(args[1], Signal)
    )


def _signal(part: Part) -> Signal:
    return part.signal if isinstance(part, Condition) else part


def _function(part: Part) -> tuple[Callable[[Tensor], Tensor], ex.Expression] | None:
    if isinstance(part, Condition):
        return part.function, part.base
    return ex.as_function(part.blocks[0][1]) if len(part.blocks) == 1 else None


def _like(value: Any, u: Tensor) -> Any:
    """Return a constant tensor in the precision of u, and other arguments unchanged."""
    return value.to(u) if isinstance(value, Tensor) and value.is_floating_point() else value


def _kind(function: Callable[[Tensor], Tensor]) -> torch.dtype | None:
    """Return the dtype of the function's result if it acts entry by entry, and None otherwise.

    The function is tried on a box, on the same numbers flattened, and on each number alone: a function
    that looks at neighbors or at shapes gives different results.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64)
    try:
        with torch.no_grad():
            whole, flat = function(x), function(x.flatten())
            alone = torch.stack([function(value.reshape(1))[0] for value in x.flatten()])
    except (RuntimeError, IndexError, ValueError, TypeError, AttributeError):
        return None
    if not isinstance(whole, Tensor) or whole.shape != x.shape:
        return None
    if not (whole.is_floating_point() or whole.dtype == torch.bool):
        return None
    for found in (flat, alone):
        if not torch.allclose(found.double(), whole.flatten().double(), 1e-12, 1e-12, True):
            return None
    return whole.dtype
