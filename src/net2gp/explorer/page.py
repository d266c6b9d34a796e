"""One HTML file with everything inside that the page needs."""

from __future__ import annotations

import json
import os
import tempfile
from functools import lru_cache
from html import escape
from importlib.resources import files
from pathlib import Path

from net2gp._version import __version__
from net2gp.errors import InputError
from net2gp.explorer.tables import tables

MATHS = (
    "activations",
    "tables",
    "kernels",
    "linear_algebra",
    "gaussian_process",
    "phase",
    "networks",
    "search",
    "jobs",
)
"""Scripts that compute, which the background workers of the page get as well."""

PAGE = (
    "state",
    "model",
    "drawing",
    "points",
    "controls",
    "plots",
    "background",
    "finite",
    "story",
    "charts",
    "cards",
    "page",
)
"""Scripts that show."""


def write_explorer(path: str | os.PathLike) -> Path:
    """Write a page on which networks of any width can be played with as Gaussian processes.

    It is one HTML file that works offline in any current browser.

    Args:
        path: The HTML file to write, in a folder that exists. It is written beside `path` first and then moved
            there, so that an interrupted write leaves an older file intact.

    Returns:
        The path of the file.

    Raises:
        InputError: If the folder does not exist, or `path` is a folder.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     page = write_explorer(folder + "/explorer.html")
    ...     page.stat().st_size < 400_000
    True
    """
    path = Path(path).expanduser()
    if path.is_dir():
        raise InputError(f"{path} is a folder. Pass a file in it: {path / 'explorer.html'}.")
    if not path.parent.is_dir():
        raise InputError(f"there is no folder {path.parent}. Create it, or pass another path.")
    write_atomically(path, page())
    return path


def page() -> str:
    """Return the HTML of the page."""
    parts = {
        "title": "net2gp explorer",
        "style": asset("style.css"),
        "own": "",
        "sections": asset("sections.html"),
        "version": escape(__version__),
        "tables": json.dumps(tables(), separators=(",", ":")),
        "maths": scripts(MATHS),
        "worker": asset("worker.js"),
        "page": scripts(PAGE),
    }
    html = asset("page.html")
    for name, text in parts.items():
        html = html.replace("{{" + name + "}}", text)
    return html


def scripts(names: tuple[str, ...]) -> str:
    """Return scripts one after the other, strictly read."""
    return '"use strict";\n' + "\n".join(asset(f"{name}.js") for name in names)


@lru_cache
def asset(name: str) -> str:
    """Return the text of a file that belongs to this package."""
    return (files("net2gp.explorer") / "assets" / name).read_text(encoding="utf-8")


def write_atomically(path: Path, text: str) -> None:
    """Write a text beside its place and move it there, so that a reader sees all of it or the old one."""
    handle, beside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(beside, 0o644)
        os.replace(beside, path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise
