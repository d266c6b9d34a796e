"""Options that are passed by keyword: shown in signatures, and checked by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

Made = TypeVar("Made", bound=Callable[..., Any])


def lists(**defaults: object) -> Callable[[Made], Made]:
    """Show the keywords that `**options` takes in a signature, with their defaults."""

    def shown(made: Made) -> Made:
        signature = inspect.signature(made)
        named = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        for name, value in defaults.items():
            named.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value))
        vars(made)["__signature__"] = signature.replace(parameters=named)
        return made

    return shown


def check_known(options: Any, known: Any) -> None:
    """Raise a TypeError, as Python does, for an option that the type `known` does not have."""
    for name in options:
        if name not in known.__annotations__:
            names = ", ".join(known.__annotations__)
            raise TypeError(f"there is no option '{name}'. The options are: {names}.")
