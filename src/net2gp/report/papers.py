"""Reproductions run again: the programs in the folder `papers` of a checkout, and what they found.

Each program computes numbers of a paper through the public interface of net2gp, holds them against expected
ones, and writes both as JSON (papers/findings.py says how). Here they run in processes of their own.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

import net2gp
from net2gp._version import __version__
from net2gp.errors import InputError
from net2gp.progress import progress
from net2gp.report.reproductions import Paper, PaperResult, PaperRow

INDEX = "papers.toml"
"""The file that names the programs, in the folder where they lie."""


def papers_folder(folder: str | os.PathLike | None = None) -> Path:
    """Find the folder of the reproductions, which is part of a checkout and not of the installed package.

    Args:
        folder: Where it is. None looks beside the sources of this package, then in the current folder and
            in those above it.

    Returns:
        The folder, which has a file papers.toml.

    Raises:
        InputError: If there is none.
    """
    if folder is not None:
        found = Path(folder).expanduser().resolve()
        if not (found / INDEX).is_file():
            raise InputError(
                f"{found} has no reproductions: there is no {INDEX} in it. Pass the folder `papers` of a "
                "clone of net2gp."
            )
        return found
    package = Path(str(net2gp.__file__)).resolve().parent
    here = Path.cwd()
    for place in (package.parents[1], here, *here.parents):
        if (place / "papers" / INDEX).is_file():
            return place / "papers"
    raise InputError(
        "the reproductions are programs of the repository, not of the installed package, and no clone was "
        f"found here ({here}). Clone net2gp and say where: run_paper(name, folder='net2gp/papers'), or "
        "net2gp paper NAME --papers net2gp/papers."
    )


def list_papers(folder: str | os.PathLike | None = None) -> tuple[Paper, ...]:
    """Return the reproductions that can be run.

    Args:
        folder: The folder `papers` of a checkout. None looks for it.

    Returns:
        The reproductions, in the order of papers.toml.

    Raises:
        InputError: If the folder is not found.
    """
    place = papers_folder(folder)
    index = tomllib.loads((place / INDEX).read_text(encoding="utf-8"))
    return tuple(
        Paper(name=name, **entry | {"program": place / entry["program"]})
        for name, entry in index.items()
    )


def find_papers(names: list[str], folder: str | os.PathLike | None = None) -> tuple[Paper, ...]:
    """Return the reproductions with these names.

    Raises:
        InputError: If there is no such reproduction.
    """
    known = {paper.name: paper for paper in list_papers(folder)}
    for name in names:
        if name not in known:
            raise InputError(f"there is no reproduction {name!r}. There are: {', '.join(known)}.")
    return tuple(known[name] for name in names)


def run_paper(
    name: str,
    *,
    quick: bool = True,
    options: Sequence[str] = (),
    out: str | os.PathLike | None = None,
    folder: str | os.PathLike | None = None,
) -> PaperResult:
    """Run a reproduction and return its numbers beside the expected ones.

    The program runs in a process of its own with the sources of its checkout. A full run takes minutes to
    days, as the `full` of a `Paper` says; what it needs beyond the repository is read from the folder that
    NET2GP_DATA names.

    Args:
        name: One of the names of `list_papers()`.
        quick: Whether to run the small version, which takes seconds to some minutes.
        options: More options of the program, such as `("--device", "cuda")`.
        out: The folder for figures and for the program's own output, `NAME.log`. None keeps neither.
        folder: The folder `papers` of a checkout. None looks for it.

    Returns:
        What was found. A program that fails is a result too, with the reason as its `error`.

    Raises:
        InputError: If the folder or the name is unknown, or if `out` cannot be made.
    """
    (paper,) = find_papers([name], folder)
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(out).expanduser().resolve() if out is not None else Path(scratch) / "figures"
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"cannot make the folder {place} ({error.strerror}). Pass another one as `out`."
            ) from error
        with progress(name, None):
            return _run(paper, quick, options, place, Path(scratch) / "found.json")


def _run(paper: Paper, quick: bool, options: Sequence[str], out: Path, found: Path) -> PaperResult:
    checkout = _checkout(paper)
    program = str(paper.program.relative_to(checkout))
    given = [*(["--quick"] if quick else []), *options]
    date, revision, start = datetime.now(UTC), _revision(checkout), perf_counter()
    log = out / f"{paper.name}.log"
    with log.open("w", encoding="utf-8") as stream:
        done = subprocess.run(
            [sys.executable, program, *given, "--out", str(out), "--json", str(found)],
            cwd=checkout,
            env=_environment(checkout),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
    seconds = perf_counter() - start
    printed = _without_places(log.read_text(encoding="utf-8"), checkout, out)
    written: dict[str, Any] = {"rows": [], "left_out": [], "error": ""}
    if found.is_file():
        written = json.loads(found.read_text(encoding="utf-8"))
    else:
        last = printed.splitlines()[-1:]
        written["error"] = f"exit status {done.returncode}: {' '.join(last)}"
    return PaperResult(
        paper=paper,
        rows=tuple(PaperRow(**row) for row in written["rows"]),
        left_out=tuple(written["left_out"]),
        error=written["error"],
        status=done.returncode,
        quick=quick,
        command=shlex.join(["python", program, *given]),
        revision=revision,
        date=date.strftime("%Y-%m-%d %H:%M"),
        seconds=seconds,
        options=tuple(options),
        machine=_machine(),
        printed=printed,
    )


def _environment(checkout: Path) -> dict[str, str]:
    """That of this process, with the sources of the checkout first, and output as it comes."""
    sources = [str(checkout / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(sources),
        "PYTHONIOENCODING": "utf-8",
        "PYTHONUNBUFFERED": "1",
    }


def _without_places(text: str, checkout: Path, out: Path) -> str:
    """What a program printed, without where files lie on this machine."""
    for place, word in ((out, "figures"), (checkout, "."), (Path(sys.prefix), "python")):
        text = text.replace(str(place), word)
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())


def _machine() -> str:
    """Processor, threads, PyTorch, and a GPU if there is one."""
    threads = torch.get_num_threads()
    words = [
        platform.machine(),
        f"{threads} thread{'s' if threads > 1 else ''}",
        f"PyTorch {torch.__version__}",
    ]
    if torch.cuda.is_available():
        words.append(torch.cuda.get_device_name())
    return ", ".join(words)


def _checkout(paper: Paper) -> Path:
    """The folder above the one with the index."""
    return next(p.parent for p in paper.program.parents if (p / INDEX).is_file())


def _revision(checkout: Path) -> str:
    """The commit of a checkout, and whether files differ from it. For a copy, NET2GP_REVISION says it."""
    if told := os.environ.get("NET2GP_REVISION"):
        return told
    git = ["git", "-C", str(checkout)]
    try:
        commit = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        )
        status = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True
        )
    except OSError:
        return f"unknown, net2gp {__version__}"
    if commit.returncode:
        return f"unknown, net2gp {__version__}"
    return commit.stdout.strip() + (" with changes" if status.stdout.strip() else "")
