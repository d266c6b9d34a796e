"""One HTML file with everything inside that the page needs."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import lru_cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from torch import nn

from net2gp._version import __version__
from net2gp.data.scaling import Scaling
from net2gp.errors import InputError
from net2gp.explorer.own_network import Shown, own_network
from net2gp.explorer.tables import tables
from net2gp.posteriors import Posterior
from net2gp.structures import Structure
from net2gp.types import Data, Likelihood

MATHS = (
    "activations",
    "tables",
    "kernels",
    "linear_algebra",
    "gaussian_process",
    "phase",
    "networks",
    "search",
    "training",
    "posteriors",
    "jobs",
)
"""Scripts that compute, which the background workers of the page get as well."""

SCREEN = (
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
    "eight",
    "python",
    "page",
)
"""Scripts that show."""


def write_explorer(
    path: str | os.PathLike,
    network: nn.Module | Posterior | None = None,
    data: Data | None = None,
    *,
    likelihood: Likelihood | None = None,
    structure: Structure | None = None,
    scaling: Scaling | None = None,
    columns: Sequence[str] = (),
) -> Path:
    """Write a page on which networks of any width can be played with as Gaussian processes.

    It is one HTML file of less than 400 kB that works offline in any current browser. With a network and
    its data it begins with them: Laplace's posterior on the line of the inputs, if they are numbers, on their
    plane, if they are pairs, else on the plane of their first two principal components. Mean, standard
    deviation, its epistemic and aleatoric part and the novelty are computed here, since a browser does not
    run torch. Of a posterior of any method it shows the same, as far as the method gives it.

    Cost: about a second for the tables of the page, and for a network one call of `laplace` and its
    predictions at 161 places of a line or 37² places of a plane. A bar shows the time that is left. Where
    37² places would take more than a minute there are fewer, which the page says.

    Args:
        path: The HTML file to write, in a folder that exists. It is written beside `path` first and then
            moved there, so that an interrupted write leaves an older file intact.
        network: A trained network, a posterior, or None.
        data: Its training data, (x, y) or a DataLoader, with one float tensor as inputs. A posterior that
            keeps its data needs none.
        likelihood: How targets follow outputs. None is `Gaussian()` for numbers and `Categorical()` for
            labels.
        structure: What `laplace` keeps of the covariance. None is `LastLayer()` for networks with more than
            100,000 parameters, and the default of `laplace` for others.
        scaling: With which inputs and targets were standardized. Axes that are inputs, and all targets, are
            then shown in the units before.
        columns: The names of the columns of inputs (N, 1) or (N, 2).

    Returns:
        The path of the file.

    Raises:
        InputError: If the folder does not exist, `path` is a folder, only one of network and data is given,
            or the inputs are no tensor of numbers.

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
    if (network is None) != (data is None) and not isinstance(network, Posterior):
        missing = "network" if network is None else "data"
        raise InputError(
            f"a network is shown with its data, but {missing} is missing. Pass both, or none."
        )
    shown = None
    if network is not None:
        how = Shown(scaling or Scaling(), columns)
        shown = own_network(network, data, likelihood, structure, how)
    write_atomically(path, page(shown))
    return path


def page(own: dict[str, Any] | None = None) -> str:
    """Return the HTML of the page, with what `own_network` computed, if it did."""
    screen = (*SCREEN[:-1], "own", SCREEN[-1]) if own else SCREEN
    parts = {
        "title": "net2gp explorer",
        "style": asset("style.css"),
        "own": asset("own.html").replace("{{values}}", _json(own)) if own else "",
        "sections": asset("sections.html"),
        "version": escape(__version__),
        "tables": _json(tables()),
        "maths": scripts("maths", MATHS),
        "worker": asset("maths/worker.js"),
        "page": scripts("screen", screen),
    }
    html = asset("page.html")
    for name, text in parts.items():
        html = html.replace("{{" + name + "}}", text)
    return html


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def scripts(folder: str, names: tuple[str, ...]) -> str:
    """Return the scripts of a folder one after the other, to be read strictly."""
    return '"use strict";\n' + "\n".join(asset(f"{folder}/{name}.js") for name in names)


@lru_cache
def asset(name: str) -> str:
    """Return the text of a file that belongs to this package."""
    return (files("net2gp.explorer") / "assets" / name).read_text(encoding="utf-8")


def write_atomically(path: Path, text: str) -> None:
    """Write a text beside its place and move it there, so that a reader sees all of it or the old one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
