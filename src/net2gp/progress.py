"""A progress bar for long loops: silent unless standard error is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Advance = Callable[..., None]
"""advance(steps=1, note="") moves the bar on and replaces the note shown behind it."""


_showing: ContextVar[bool] = ContextVar("showing", default=False)


@contextmanager
def progress(description: str, total: int | None = None) -> Iterator[Advance]:
    """Show a bar while the block runs; the block gets a function that moves it.

    The bar appears only on a terminal and disappears when the block ends, so logs, notebooks that
    capture output and tests stay clean. Of nested bars only the outermost shows.

    >>> with progress("tiles", total=2) as advance:
    ...     advance()
    ...     advance(note="residual 1e-9")
    """
    if not sys.stderr.isatty() or _showing.get():
        yield lambda steps=1, note="": None
        return
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
    token = _showing.set(True)
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(description, total=total, note="")
            yield lambda steps=1, note="": bar.update(task, advance=steps, note=note)
    finally:
        _showing.reset(token)
