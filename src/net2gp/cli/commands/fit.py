"""`net2gp fit`: a trained network and data become a posterior in a file."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer
from torch import nn

from net2gp.cli.files import check_output
from net2gp.cli.methods import (
    METHODS,
    NEW_CLASSES,
    Settings,
    check_used,
    fit_posterior,
    structure_of,
)
from net2gp.cli.options import (
    DATA_HELP,
    NETWORK_HELP,
    DataOptions,
    MethodOptions,
    NetworkOptions,
    one_of,
)
from net2gp.cli.predicting import predictions, scores, shown
from net2gp.cli.problem import Problem, make_problem, placed
from net2gp.cli.reading.data import Loaded, Wanted, read_data
from net2gp.cli.reading.networks import Source, build
from net2gp.cli.running import Result
from net2gp.cli.saved import Note, save_posterior
from net2gp.errors import InputError
from net2gp.posteriors.posterior import Posterior


@dataclass(kw_only=True)
class FitOptions(DataOptions, NetworkOptions, MethodOptions):
    """A network, data, and how the posterior is found."""

    network: Annotated[str, typer.Argument(help=NETWORK_HELP)]
    data: Annotated[Path, typer.Argument(help=DATA_HELP)]
    method: Annotated[str, typer.Option(help=f"One of {', '.join(METHODS)}.")] = "laplace"
    structure: Annotated[
        str,
        typer.Option(
            help="What laplace keeps: full, kron, diagonal, last_layer, function_space, low_rank:20, "
            "subnetwork:100, sampled:32; chosen by the size of the network if left out."
        ),
    ] = ""
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path(
        "posterior.safetensors"
    )


@dataclass(frozen=True, eq=False)
class Prepared:
    """What methods get: a network with its data, and data that were held out.

    Args:
        source: Where the network is.
        problem: The network and the data to learn from.
        held_out: Data that are kept back, or None.
        kept: How to find them again.
    """

    source: Source
    problem: Problem
    held_out: Loaded | None
    kept: dict[str, Any]


def prepare(
    options: DataOptions,
    network: NetworkOptions,
    name: str,
    data: Path,
    method: MethodOptions,
    *,
    new_classes: bool = False,
) -> Prepared:
    """Read a network and data, and keep some of them back.

    Args:
        options: How data are read.
        network: How the network is built.
        name: The network.
        data: The file of data.
        method: The task, the held-out data, the seed.
        new_classes: Whether the classes may be others than the outputs of the network.
    """
    wanted = Wanted(options.target, options.features, options.image_size, needs_target=True)
    loaded = read_data(data, wanted)
    source = Source(name, network.weights)
    module: nn.Module = placed(build(source), network.device, network.dtype)
    try:
        share: float | None = float(method.held_out) if method.held_out else None
    except ValueError:
        share = None
    held_out, kept = None, dict[str, Any]()
    if share is not None:
        loaded, held_out = loaded.divided(share, method.seed)
        kept = {"share": share, "seed": method.seed}
        if data.suffix == ".npy":  # whose targets are a file, and no columns
            kept["target"] = [str(Path(one).expanduser().resolve()) for one in options.target]
    problem = make_problem(module, loaded, options, method.task, new_classes=new_classes)
    if method.held_out and share is None:
        path = Path(method.held_out)
        if path.suffix == ".npy":
            raise InputError(
                "a .npy file has no targets. Held-out data of .npy need a share, such as --held-out 0.2, or "
                "a .npz with arrays x and y."
            )
        held_out = read_data(path, problem.reading.wanted(needs_target=True))
        kept = {"path": str(path.expanduser().resolve())}
    return Prepared(source, problem, held_out, kept)


def fit(options: FitOptions) -> Result:
    """Turn a trained network and its data into a posterior, and save it.

    \b
    Examples:
      net2gp fit resnet20.pt2 cifar.npz -o posterior.safetensors
      net2gp fit model.py:build train.csv --weights w.safetensors --target price
      net2gp fit model.py:build train.csv --weights w.pt --standardize both --method adapt
      net2gp fit model.py:build train.csv --method nngp --target price --held-out 0.2
      net2gp fit net.pt2 pictures/ --image-mean 0.5,0.5,0.5 --image-std 0.2,0.2,0.2

    The file remembers where the network is, which columns are its inputs, and how they are standardized, so
    that `net2gp predict` needs the file and new data alone.
    """
    path = check_output(options.output, [".safetensors"])
    one_of(options.method, list(METHODS), "--method")
    structure_of(options.structure)
    check_used(options.method, options)
    new = options.method in NEW_CLASSES
    prepared = prepare(options, options, options.network, options.data, options, new_classes=new)
    problem, held_out = prepared.problem, prepared.held_out
    both = None if held_out is None else problem.also(held_out)
    settings = Settings.of(options, options.structure, both)
    start = perf_counter()
    posterior = fit_posterior(options.method, problem, settings)
    seconds = perf_counter() - start
    found = {} if both is None else _scored(posterior, problem, both)
    note = Note(
        problem.reading,
        prepared.source.as_dict(),
        options.method,
        {"structure": options.structure, "tuning": options.tuning, "seed": options.seed},
        str(options.data.expanduser().resolve()),
        prepared.kept,
        options.dtype,
        shlex.join(["net2gp", *sys.argv[1:]]),
    )
    save_posterior(posterior.to("cpu"), path, note)
    values = {
        "output": path,
        "task": problem.reading.task,
        "method": options.method,
        "posterior": repr(posterior),
        "points": len(problem.x),
        "held_out_points": 0 if held_out is None else len(held_out),
        "scores": found,
        "seconds": seconds,
    }
    about = f" On {len(held_out)} held-out points: {shown(found)}." if held_out is not None else ""
    text = (
        f"{path}: {options.method}, {problem.reading.task}, {len(problem.x)} points, {seconds:.1f} s."
        f"{about}\nNext: net2gp predict {path} NEW_DATA"
    )
    return Result(values, text)


def _scored(posterior: Posterior, problem: Problem, data: tuple[Any, Any]) -> dict[str, float]:
    x, y = data
    return scores(predictions(posterior, x, problem.reading, (0.5,), 256), y, problem.reading)
