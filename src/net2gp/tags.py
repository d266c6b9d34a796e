"""Names under which classes are saved: stable words in files, whatever module a class lives in."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import TypeVar

from net2gp.errors import InputError

T = TypeVar("T", bound=type)

_CLASSES: dict[str, type] = {}


def savable(tag: str) -> Callable[[T], T]:
    """Let `save` and `load` know a dataclass of your own by `tag`: a likelihood, a kernel or a mean.

    Saved are the fields: numbers, texts, tensors, and tuples, dicts and savable values of these. `load` calls
    the class with them, so that the module that defines it must have been imported. Nothing in a file is
    executed, and a name in a file finds no class unless it was registered.

    Args:
        tag: letters, digits, underscores and dots, with a dot: the name of your project and of the class. A
            file keeps it, so that it should not change when the class moves or is renamed.

    Returns:
        A decorator that returns the class as it is.

    >>> from dataclasses import dataclass
    >>> @savable("example.Count")
    ... @dataclass(frozen=True)
    ... class Count:
    ...     limit: int = 3
    >>> tag_of(Count)
    'example.Count'
    """
    if not isinstance(tag, str) or not re.fullmatch(r"\w+(\.\w+)+", tag):
        raise InputError(
            f"a tag has words with dots between them, but is {tag!r}. Pass for example "
            'savable("project.Name").'
        )

    def register(cls: T) -> T:
        if not isinstance(cls, type) or not is_dataclass(cls):
            raise InputError(
                f"savable is for dataclasses, whose fields are saved, but {cls!r} is none. Put @dataclass("
                "frozen=True) below @savable(...)."
            )
        known = _CLASSES.get(tag)
        # a cell or module that is run again defines the same class anew
        if known is not None and _place(known) != _place(cls):
            raise InputError(
                f"the tag {tag!r} is that of {'.'.join(_place(known))} already. Pass another to savable."
            )
        _CLASSES[tag] = cls
        return cls

    return register


def tag_of(cls: type) -> str | None:
    """The tag of a class, or None if it has none."""
    return next((tag for tag, known in _CLASSES.items() if known is cls), None)


def class_of(tag: str) -> type | None:
    """The class that was registered with a tag, or None."""
    return _CLASSES.get(tag)


def _place(cls: type) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__
