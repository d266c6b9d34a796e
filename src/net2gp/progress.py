"""A progress bar for long loops. It shows on a terminal and in notebooks and is silent everywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from html import escape
from typing import Any

Advance = Callable[..., None]
"""advance(steps=1, note="") moves the bar forward and replaces the note behind it."""

SECONDS = 0.2
"""The least number of seconds between two updates of a bar in a notebook."""


_showing: ContextVar[bool] = ContextVar("showing", default=False)


@contextmanager
def progress(description: str, total: int | None = None) -> Iterator[Advance]:
    """Show a bar while the block runs.

    The bar appears on a terminal or in a notebook and disappears when the block ends, so logs, pipes and
    tests stay clean. Only the outermost of nested bars is shown.

    Args:
        description: The text before the bar.
        total: The number of steps. None means that it is not known.

    Yields:
        A function `advance(steps=1, note="")` that moves the bar.

    >>> with progress("tiles", total=2) as advance:
    ...     advance()
    ...     advance(note="residual 1e-9")
    """
    bar = _bar()
    if bar is None or _showing.get():
        yield lambda steps=1, note="": None
        return
    # A context variable, since loops in several threads each have an outermost bar.
    token = _showing.set(True)
    try:
        with bar(description, total) as advance:
            yield advance
    finally:
        _showing.reset(token)


Bar = Callable[[str, int | None], AbstractContextManager[Advance]]


def _bar() -> Bar | None:
    if sys.stderr.isatty():
        return _terminal_bar
    return _notebook_bar if _in_notebook() else None


def _in_notebook() -> bool:
    """Whether a Jupyter kernel runs this code. Its output is no terminal, but somebody reads it."""
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return any(kind.__name__ == "ZMQInteractiveShell" for kind in type(shell).__mro__)


@contextmanager
def _terminal_bar(description: str, total: int | None) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total, note="")
        yield lambda steps=1, note="": bar.update(task, advance=steps, note=note)


@contextmanager
def _notebook_bar(description: str, total: int | None) -> Iterator[Advance]:
    from IPython.display import HTML, display

    picture: Any = display(HTML(_html(description, 0, total, "")), display_id=True)
    done, shown = 0, time.monotonic()

    def advance(steps: int = 1, note: str = "") -> None:
        nonlocal done, shown
        done += steps
        if picture is not None and time.monotonic() - shown >= SECONDS:
            shown = time.monotonic()
            picture.update(HTML(_html(description, done, total, note)))

    try:
        yield advance
    finally:
        if picture is not None:
            picture.update(HTML(""))


def _html(description: str, done: int, total: int | None, note: str) -> str:
    share = "" if total is None else f' value="{done}" max="{total}"'
    count = f"{done}" if total is None else f"{done}/{total}"
    return f"{escape(description)} <progress{share}></progress> {count} {escape(note)}"
