"""Names under which classes are saved. Files keep them, whatever module a class lives in."""

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

    A file holds the fields: numbers, texts, tensors, and tuples, dicts and savable values of these. `load`
    calls the class with them, so the module that defines the class must have been imported. Nothing in a
    file is executed, and a name in a file finds only registered classes.

    Args:
        tag: The names of your project and of the class, with a dot between them. It consists of letters,
            digits, underscores and dots. Files keep it, so it should not change when the class moves or is
            renamed.

    Returns:
        A decorator that returns the class as it is.

    Raises:
        InputError: If `tag` has another form. The decorator raises it if the class is no dataclass or if
            another class has the tag.

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
        # A notebook cell or module that runs a second time defines the same class again.
        if known is not None and _place(known) != _place(cls):
            raise InputError(
                f"the tag {tag!r} already belongs to {'.'.join(_place(known))}. Pass another to savable."
            )
        _CLASSES[tag] = cls
        return cls

    return register


def tag_of(cls: type) -> str | None:
    """Return the tag of a class, or None if it has none."""
    return next((tag for tag, known in _CLASSES.items() if known is cls), None)


def class_of(tag: str) -> type | None:
    """Return the class that was registered with a tag, or None."""
    return _CLASSES.get(tag)


def _place(cls: type) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__
