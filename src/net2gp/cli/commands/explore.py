"""`net2gp explore`: a page to play with, of all networks or of one's own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from net2gp.cli.files import check_output, replacing
from net2gp.cli.options import DATA_HELP, NETWORK_HELP, DataOptions, NetworkOptions
from net2gp.cli.problem import make_problem, placed
from net2gp.cli.reading.data import Wanted, read_data
from net2gp.cli.reading.networks import Source, build
from net2gp.cli.running import Result, UsageError


@dataclass(kw_only=True)
class ExploreOptions(DataOptions, NetworkOptions):
    """A network and data, if the page is about them."""

    network: Annotated[str | None, typer.Argument(help=NETWORK_HELP)] = None
    data: Annotated[Path | None, typer.Argument(help=DATA_HELP)] = None
    output: Annotated[Path, typer.Option("--output", "-o", help="The page.")] = Path(
        "explorer.html"
    )


def explore(options: ExploreOptions) -> Result:
    """Write a page on which networks of any width can be played with, offline, in any browser.

    \b
    Examples:
      net2gp explore
      net2gp explore model.py:build train.csv --weights w.safetensors -o mine.html
    """
    from net2gp.explorer import write_explorer

    path = check_output(options.output, [".html", ".htm"])
    if options.network is None:
        with replacing(path) as partial:
            write_explorer(partial)
    else:
        if options.data is None:
            raise UsageError("a network needs data to be looked at: net2gp explore NETWORK DATA.")
        wanted = Wanted(options.target, options.features, options.image_size, needs_target=True)
        network = placed(
            build(Source(options.network, options.weights)), options.device, options.dtype
        )
        problem = make_problem(network, read_data(options.data, wanted), options, "")
        with replacing(path) as partial:
            data, likelihood = (problem.x, problem.y), problem.likelihood(None)
            write_explorer(partial, problem.network, data, likelihood=likelihood)
    return Result({"output": path}, f"The page is at {path.resolve()}. Open it in a browser.")
