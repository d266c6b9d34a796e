"""Whether two networks differ in nothing but the values of their parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from net2gp.errors import NetworkError
from net2gp.inputs import rows
from net2gp.linear.linearized import Linearized
from net2gp.types import Inputs

PASSING = ("training", "num_batches_tracked")
"""Attributes of modules that say nothing about what they compute in eval mode."""


def check_modules(one: nn.Module, other: nn.Module) -> None:
    """Raise unless two networks have the same modules with the same settings, such as slopes of activations.

    Args:
        one: A network.
        other: Another network.

    Raises:
        NetworkError: If a module differs in its name, kind or settings; the message says where.
    """
    first, second = dict(one.named_modules()), dict(other.named_modules())
    for name in [*first, *(n for n in second if n not in first)]:
        a, b = first.get(name), second.get(name)
        place = f"'{name}'" if name else "the network"
        if type(a) is not type(b):
            raise NetworkError(
                f"the networks are of unlike architectures: one has {_kind(a)} where the other has "
                f"{_kind(b)}, at {place}. Pass two networks of one architecture."
            )
        assert a is not None
        assert b is not None
        mine, theirs = _settings(a), _settings(b)
        wrong = next((k for k in {**mine, **theirs} if mine.get(k) != theirs.get(k)), None)
        if wrong is not None:
            raise NetworkError(
                f"the networks are of unlike architectures: {wrong} of {place} ({_kind(a)}) is "
                f"{mine.get(wrong)!r} in one and {theirs.get(wrong)!r} in the other. Pass two networks of "
                "one architecture."
            )


def check_alike(one: Linearized, other: Linearized) -> None:
    """Raise unless two networks differ only in the values of the parameters that were chosen.

    Args:
        one: A network.
        other: Another network.

    Raises:
        NetworkError: If they differ in shapes, modules, settings or values that stay fixed.
    """
    shapes, others = ({n: tuple(v.shape) for n, v in net.params.items()} for net in (one, other))
    wrong = sorted(n for n in shapes.keys() | others.keys() if shapes.get(n) != others.get(n))
    if wrong:
        raise NetworkError(
            f"the networks are of unlike architectures: '{wrong[0]}' has shape {shapes.get(wrong[0])} in one "
            f"and {others.get(wrong[0])} in the other. Pass two networks of one architecture."
        )
    check_modules(one.network, other.network)
    for name, value in one.frozen.items():
        if name not in other.frozen or not torch.equal(value, other.frozen[name].to(value)):
            raise NetworkError(
                f"the networks differ in '{name}', which does not move along a curve. Statistics of batch "
                "norm would have to be computed again at every place: use networks without batch norm. "
                "Parameters that only= leaves out must be equal."
            )


def check_functions(one: Linearized, other: Linearized, x: Inputs) -> None:
    """Raise unless the code of one network computes what another one computes, with its parameters.

    Args:
        one: A network.
        other: Another network.
        x: Points, of which three are taken.

    Raises:
        NetworkError: If the outputs differ.
    """
    few = rows(x, slice(0, 3))
    with torch.no_grad():
        same = torch.allclose(one.evaluate(other.params, few), other(few), equal_nan=True)
    if not same:
        raise NetworkError(
            "the networks are of unlike architectures: the code of one computes something else than the "
            "other does with the same parameters. Pass two networks of one architecture."
        )


def _kind(module: nn.Module | None) -> str:
    return "nothing" if module is None else type(module).__name__


def _settings(module: nn.Module) -> dict[str, Any]:
    """What a module computes with besides parameters; own modules may count their calls by whole numbers."""
    own = not type(module).__module__.startswith("torch.")
    plain = (bool, float, str) if own else (bool, int, float, str, tuple)
    found = {}
    for name, value in vars(module).items():
        if name.startswith("_") or name in PASSING:
            continue
        if isinstance(value, plain):
            found[name] = value
        elif callable(value) and hasattr(value, "__qualname__"):
            code = getattr(value, "__code__", None)
            found[name] = (value.__qualname__, code and (code.co_code, code.co_consts))
    return found
