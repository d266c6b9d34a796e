"""`net2gp explore`: a page to play with, of all networks or of one's own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from net2gp.cli.files import check_output, replacing
from net2gp.cli.methods import structure_of
from net2gp.cli.options import (
    DATA_HELP,
    NETWORK_HELP,
    DataOptions,
    NetworkOptions,
    PredictionOptions,
)
from net2gp.cli.problem import example, make_problem, placed
from net2gp.cli.reading.data import Wanted, read_data
from net2gp.cli.reading.networks import Source, build
from net2gp.cli.running import Result, UsageError
from net2gp.cli.saved import open_posterior


@dataclass(kw_only=True)
class ExploreOptions(DataOptions, NetworkOptions):
    """A network and data, or a posterior, if the page is about them."""

    source: Annotated[
        str | None,
        typer.Argument(
            metavar="[NETWORK | POSTERIOR]",
            help=f"{NETWORK_HELP} Or the file that `net2gp fit` wrote.",
        ),
    ] = None
    data: Annotated[
        Path | None, typer.Argument(help=f"{DATA_HELP} A posterior has those of its fit.")
    ] = None
    network: Annotated[
        str, typer.Option(help="The network of a posterior, if it is not where it was at fit.")
    ] = ""
    task: Annotated[
        str, typer.Option(help="regression or classification; guessed if left out.")
    ] = ""
    structure: Annotated[
        str,
        typer.Option(
            help="What laplace keeps, as in fit; last_layer above 100,000 parameters if left out."
        ),
    ] = ""
    output: Annotated[Path, typer.Option("--output", "-o", help="The page.")] = Path(
        "explorer.html"
    )


def explore(options: ExploreOptions) -> Result:
    """Write a page on which networks of any width can be played with, offline, in any browser.

    \b
    Examples:
      net2gp explore
      net2gp explore model.py:build train.csv --weights w.safetensors -o mine.html
      net2gp explore posterior.safetensors -o mine.html

    With a network and data, or a posterior, the page begins with what it says on a line or plane through the
    data. Places of the plane are predicted one after the other: a ResNet-20 takes about half a minute.
    """
    from net2gp.explorer import write_explorer

    path = check_output(options.output, [".html", ".htm"])
    if options.source is None:
        given: dict[str, Any] = {}
    elif options.source.endswith(".safetensors"):
        given = _of_posterior(options, Path(options.source))
    else:
        given = _of_network(options, options.source)
    with replacing(path) as partial:
        write_explorer(partial, **given)
    return Result({"output": path}, f"The page is at {path.resolve()}. Open it in a browser.")


def _of_network(options: ExploreOptions, name: str) -> dict[str, Any]:
    if options.data is None:
        raise UsageError("a network needs data to be looked at: net2gp explore NETWORK DATA.")
    structure = structure_of(options.structure)
    wanted = Wanted(options.target, options.features, options.image_size, needs_target=True)
    loaded = read_data(options.data, wanted)
    network = placed(build(Source(name, options.weights)), options.device, options.dtype)
    problem = make_problem(network, loaded, options, options.task)
    return {
        "network": problem.network,
        "data": (problem.x, problem.y),
        "likelihood": problem.likelihood(None),
        "structure": structure,
        "scaling": problem.reading.scaling,
        "columns": problem.reading.features,
    }


def _of_posterior(options: ExploreOptions, path: Path) -> dict[str, Any]:
    if options.structure or options.standardize != "none" or options.target or options.features:
        raise UsageError(
            f"{path} knows its structure, columns and scaling. Leave out --structure, --standardize, "
            "--target and --features, or pass a network instead: net2gp explore NETWORK DATA."
        )
    place = PredictionOptions(
        network=options.network, weights=options.weights, device=options.device
    )
    posterior, note, network = open_posterior(path, place)
    data = None
    if options.data is not None or posterior.x is None:
        found = options.data or Path(note.data)
        loaded = read_data(found, note.reading.wanted(needs_target=True))
        like = example(network).to(options.device)
        data = note.reading.inputs(loaded, like), note.reading.values(loaded, like)
    return {
        "network": posterior,
        "data": data,
        "scaling": note.reading.scaling,
        "columns": note.reading.features,
    }
