"""The table of rules for functions and tensor methods, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from net2gp.limits.graph.translate import Translation

Rule = Callable[[Translation, fx.Node, tuple, dict], Any]
"""From the translation, a node and its arguments to a value, or None if the rule does not apply."""

FUNCTIONS: dict[str, Rule] = {}


def function_rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for functions and methods of these names."""

    def register(function: Rule) -> Rule:
        for name in names:
            FUNCTIONS[name] = function
        return function

    return register


def name_of(target: Any) -> str:
    """Return the plain name of a function or method: `add` for torch.add, operator.add and x.add."""
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    return name.strip("_")


def run(target: Any, args: tuple, kwargs: dict) -> Any:
    """Call a function, or a method by its name."""
    if isinstance(target, str):
        return getattr(args[0], target)(*args[1:], **kwargs)
    return target(*args, **kwargs)
