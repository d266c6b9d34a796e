"""The demo: from a trained network to its Gaussian process, in figures and one page."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

import torch

from net2gp._version import __version__
from net2gp.errors import InputError
from net2gp.progress import progress
from net2gp.report import digits, regression, transfer
from net2gp.report.page import Section, page

SCENES: dict[str, Callable[[], list[Section]]] = {
    "regression": regression.scene,
    "digits": digits.scene,
    "transfer": transfer.scene,
}

TITLE = "The Gaussian process in your network"

LEAD = """Small networks are trained below, each within seconds. Each one is then treated as the Gaussian
process that it is around its parameters, which says what the network knows and what it does not. Nothing
is trained a second time."""


def demo(out: str | os.PathLike = "demo_output") -> Path:
    """Run all scenes and write their figures and one page.

    Only built-in data are used. Seeds are fixed, so all numbers except the timings repeat, and the global
    random state does not change. A terminal shows a progress bar.

    Args:
        out: The folder to write into.

    Returns:
        The path of the page.
    """
    folder = _writable(Path(out))
    start = perf_counter()
    sections: list[Section] = []
    with progress("demo", len(SCENES)) as advance:
        for name, scene in SCENES.items():
            advance(0, note=name)
            with torch.random.fork_rng(devices=[]), _one_thread():
                torch.manual_seed(0)
                sections += scene()
            advance(note=name)
    for section in sections:
        for figure in section.figures:
            _put(folder / f"{figure.name}.png", figure.png)
    footer = f"""Written by net2gp {__version__} with PyTorch {torch.__version__} on one CPU thread in
        {perf_counter() - start:.0f} seconds. Timings vary; every other number repeats. Networks
        and data were chosen, after trying others, to be small and to show one thing each; they are not
        averages over problems. A network that is calibrated already gains little from its process."""
    path = folder / "index.html"
    _put(path, page(TITLE, LEAD, sections, footer).encode())
    return path


def _put(path: Path, content: bytes) -> None:
    """Write a file beside its place and then rename it, so that it is there whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as error:
        raise InputError(
            f"{path} could not be written: {error.strerror}. Free some space, or pass another folder: "
            "net2gp demo --out some_folder."
        ) from None
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread inside.

    Work this small loses more by waiting for a second thread on a busy core than it gains.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _writable(folder: Path) -> Path:
    """Make the folder if needed, and refuse before any computation if it cannot be written."""
    probe = folder / ".net2gp-probe"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise InputError(
            f"cannot write into the folder {folder} ({error.strerror}). Pass another one: "
            "net2gp demo --out some_folder."
        ) from error
    return folder
