"""The module that a call of a torch function is: F.relu(x) is nn.ReLU()(x)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from net2gp.limits.modules import pointwise as points


def from_function(
    target: Callable[..., Any] | str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> nn.Module | None:
    """Return the pointwise module that does the same as a call that torch.fx reports.

    Args:
        target: A torch function, an operator or the name of a Tensor method.
        args: The arguments; the first is the signal.
        kwargs: The named arguments.

    Returns:
        The module, or None if there is none. A call with further tensors among its arguments is not
        pointwise and has none.

    >>> from_function(torch.nn.functional.leaky_relu, (torch.zeros(1), 0.2), {})
    LeakyReLU(negative_slope=0.2)
    >>> from_function("tanh", (torch.zeros(1),), {})
    Tanh()
    >>> from_function(torch.matmul, (torch.zeros(1), torch.zeros(1)), {})

    Reference: the table is `torch.nn.functional`'s own.
    """
    name = _name(target)
    rest = dict(kwargs)
    signal = args[0] if args else rest.pop("input", None)
    if _is_plain(signal):
        return None
    rest.pop("inplace", None)
    if name is None or not all(_is_plain(value) for value in [*args[1:], *rest.values()]):
        return None
    maker = _MAKERS.get(name)
    return None if maker is None else maker(*args[1:], **rest)


def _name(target: Callable[..., Any] | str) -> str | None:
    if isinstance(target, str):
        name = target
    else:
        home = getattr(target, "__module__", None) or "torch"
        if home.split(".")[0] not in ("torch", "_operator", "operator", "builtins"):
            return None
        name = getattr(target, "__name__", "")
    return name.removeprefix("special_").strip("_")


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _power(exponent: float) -> nn.Module | None:
    if exponent != int(exponent) or exponent < 0:
        return None
    return points.Monomial(int(exponent))


def _clamp(min: float | None = None, max: float | None = None) -> nn.Module:
    if min == 0 and max is None:
        return nn.ReLU()
    low, high = -math.inf if min is None else min, math.inf if max is None else max
    return nn.Hardtanh(low, high) if low < high else points.Polynomial([high])


def _rrelu(lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False) -> nn.Module:
    return nn.RReLU(lower, upper).train(training)


def _smooth(function: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: points.Pointwise(function, ())


_MAKERS: dict[str, Callable[..., nn.Module | None]] = {
    "relu": lambda *_: nn.ReLU(),
    "relu6": lambda *_: nn.ReLU6(),
    "leaky_relu": lambda negative_slope=0.01, *_: nn.LeakyReLU(negative_slope),
    "rrelu": _rrelu,
    "elu": lambda alpha=1.0, *_: nn.ELU(alpha),
    "celu": lambda alpha=1.0, *_: nn.CELU(alpha),
    "selu": lambda *_: nn.SELU(),
    "gelu": lambda approximate="none": nn.GELU(approximate),
    "silu": lambda *_: nn.SiLU(),
    "mish": lambda *_: nn.Mish(),
    "softplus": lambda beta=1.0, threshold=20.0: nn.Softplus(beta, threshold),
    "sigmoid": nn.Sigmoid,
    "expit": nn.Sigmoid,
    "logsigmoid": nn.LogSigmoid,
    "log_sigmoid": nn.LogSigmoid,
    "tanh": nn.Tanh,
    "softsign": nn.Softsign,
    "tanhshrink": nn.Tanhshrink,
    "hardtanh": lambda min_val=-1.0, max_val=1.0, *_: nn.Hardtanh(min_val, max_val),
    "hardsigmoid": lambda *_: nn.Hardsigmoid(),
    "hardswish": lambda *_: nn.Hardswish(),
    "hardshrink": lambda lambd=0.5: nn.Hardshrink(lambd),
    "softshrink": lambda lambd=0.5: nn.Softshrink(lambd),
    "threshold": lambda threshold, value, *_: nn.Threshold(threshold, value),
    "sin": points.Sin,
    "cos": points.Cos,
    "erf": points.Erf,
    "erfc": lambda: points.Erf(-1.0, 1.0, 1.0),
    "exp": points.Exp,
    "abs": points.Abs,
    "absolute": points.Abs,
    "sign": points.Sign,
    "sgn": points.Sign,
    "square": lambda: points.Monomial(2),
    "pow": _power,
    "clamp": _clamp,
    "clip": _clamp,
    "clamp_min": lambda min: _clamp(min),
    "clamp_max": lambda max: _clamp(None, max),
    "atan": _smooth(torch.atan),
    "arctan": _smooth(torch.atan),
    "asinh": _smooth(torch.asinh),
    "arcsinh": _smooth(torch.asinh),
    "sinc": _smooth(torch.sinc),
}
