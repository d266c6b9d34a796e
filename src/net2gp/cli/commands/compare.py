"""`net2gp compare`: several methods on one data set, in one table and one figure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import torch
import typer

from net2gp.cli.commands.fit import Prepared, prepare
from net2gp.cli.files import check_output, replacing
from net2gp.cli.methods import METHODS, Settings, fit_posterior, structure_of
from net2gp.cli.options import (
    DATA_HELP,
    NETWORK_HELP,
    DataOptions,
    MethodOptions,
    NetworkOptions,
    one_of,
)
from net2gp.cli.predicting import predictions, scores, write_table
from net2gp.cli.problem import Problem
from net2gp.cli.running import Result, UsageError, say
from net2gp.errors import Net2GPError
from net2gp.progress import progress

NETWORK = "network"
"""The name of the bare network in the table."""


@dataclass(kw_only=True)
class CompareOptions(DataOptions, NetworkOptions, MethodOptions):
    """A network, data, and the methods."""

    network: Annotated[str, typer.Argument(help=NETWORK_HELP)]
    data: Annotated[Path, typer.Argument(help=DATA_HELP)]
    methods: Annotated[
        str,
        typer.Option(
            help="Methods with commas; laplace takes a structure behind a slash: laplace/kron, "
            "laplace/low_rank:20."
        ),
    ] = "laplace,laplace/last_layer,laplace/diagonal"
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A .csv or .parquet file for the table.")
    ] = None
    figure: Annotated[Path | None, typer.Option(help="A .png file for the figure.")] = None


def compare(options: CompareOptions) -> Result:
    """Fit several methods to the same data and score them on held-out data, beside the bare network.

    \b
    Examples:
      net2gp compare resnet20.pt2 cifar.npz --held-out 0.5
      net2gp compare model.py:build train.csv --weights w.pt --methods laplace,nngp,ensemble
      net2gp compare net.pt2 train.csv --held-out test.csv -o table.csv --figure figure.png

    The bare network of a regression has one standard deviation for all points: the root mean square of its
    errors on the data that are not held out. A method that fails is reported, and the others go on.
    """
    table = None if options.output is None else check_output(options.output, [".csv", ".parquet"])
    figure = None if options.figure is None else check_output(options.figure, [".png"])
    names = [name.strip() for name in options.methods.split(",") if name.strip()]
    for name in names:
        method, _, structure = name.partition("/")
        one_of(method, list(METHODS), "--methods")
        structure_of(structure)
    if not names:
        raise UsageError("--methods is empty. Pass for example --methods laplace,nngp.")
    options = replace(options, held_out=options.held_out or "0.2")
    prepared = prepare(options, options, options.network, options.data, options)
    found, failed = _all(prepared, options, names)
    if len(found) == 1 and failed:
        raise next(iter(failed.values()))
    rows = [{"method": name, **one.scores, **one.seconds} for name, one in found.items()]
    if table is not None:
        write_table(table, {key: [row.get(key, "") for row in rows] for key in rows[-1]})
    if figure is not None:
        _draw(figure, prepared, found)
    values = {
        "task": prepared.problem.reading.task,
        "points": len(prepared.problem.x),
        "held_out_points": len(prepared.held_out or ()),
        "rows": rows,
        "failed": {name: str(error) for name, error in failed.items()},
        "output": table,
        "figure": figure,
    }
    return Result(values, _text(rows))


@dataclass(frozen=True, eq=False)
class Scored:
    """One row: predictions of the held-out points, their scores, and how long it took."""

    predicted: Mapping[str, np.ndarray]
    scores: Mapping[str, float]
    seconds: Mapping[str, float]


def _all(
    prepared: Prepared, options: CompareOptions, names: list[str]
) -> tuple[dict[str, Scored], dict[str, Net2GPError]]:
    """Fit and score all methods; return what failed beside it."""
    _load_derivatives()
    problem, held_out = prepared.problem, prepared.held_out
    assert held_out is not None
    x, y = problem.also(held_out)
    bare = _bare(problem, x)
    found, failed = {NETWORK: Scored(bare, scores(bare, y, problem.reading), {})}, {}
    with progress("compare", len(names)) as advance:
        for name in names:
            advance(0, note=name)
            method, _, structure = name.partition("/")
            settings = Settings.of(options, structure, (x, y))
            start = perf_counter()
            try:
                posterior = fit_posterior(method, problem, settings)
                middle = perf_counter()
                predicted = predictions(posterior, x, problem.reading, (0.5,), 256)
            except Net2GPError as error:
                say(f"{name} failed: {' '.join(str(error).split())}")
                failed[name] = error
            else:
                seconds = {
                    "fit_seconds": middle - start,
                    "predict_seconds": perf_counter() - middle,
                }
                found[name] = Scored(predicted, scores(predicted, y, problem.reading), seconds)
            advance(note=name)
    return found, failed


def _load_derivatives() -> None:
    """Let torch load what it needs for derivatives before a clock starts: some seconds, once."""
    import_module("net2gp.methods")
    torch.func.jvp(torch.sin, (torch.ones(2),), (torch.ones(2),))
    torch.func.vmap(torch.func.jacrev(torch.sin))(torch.ones(2, 2))


@torch.no_grad()
def _bare(problem: Problem, x: torch.Tensor) -> dict[str, np.ndarray]:
    """The predictions of the network alone."""
    reading = problem.reading
    out = torch.cat([problem.network(batch) for batch in x.split(256)]).flatten(1).cpu()
    out = out.to(torch.promote_types(out.dtype, torch.float32))
    if reading.task == "classification":
        probs = torch.cat([-out, out], 1).div(2).softmax(1) if out.shape[1] == 1 else out.softmax(1)
        return {"probs": probs.numpy(), "label": probs.argmax(1).numpy()}
    own = torch.cat([problem.network(batch) for batch in problem.x.split(256)]).flatten(1)
    error = (own - problem.y).square().mean(0).sqrt().cpu()
    std = (error * reading.scaling.width(error)).expand(out.shape)
    return {"mean": reading.scaling.back(out).numpy(), "std": std.numpy()}


def _draw(path: Path, prepared: Prepared, found: Mapping[str, Scored]) -> None:
    """Calibration on the left; on the right, how errors fall if uncertain points are left out."""
    from net2gp import plots  # the first import says which extra is missing

    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise ImportError("figures need matplotlib: pip install 'net2gp[plots]'.") from None
    held_out, reading = prepared.held_out, prepared.problem.reading
    assert held_out is not None
    y = prepared.problem.also(held_out)[1].cpu()
    canvas, (left, right) = pyplot.subplots(1, 2, figsize=(10, 5 + 0.2 * len(found)))
    if reading.task == "classification":
        probs = {name: torch.from_numpy(one.predicted["probs"]) for name, one in found.items()}
        plots.plot_reliability(left, probs, y)
        pairs = {
            name: (1 - p.max(1).values, (p.argmax(1) != y).double()) for name, p in probs.items()
        }
        plots.plot_risk_coverage(right, pairs, risk="error rate of the most certain")
    else:
        y = reading.scaling.back(y.double())
        laws = {
            name: tuple(torch.from_numpy(one.predicted[key]).double() for key in ("mean", "std"))
            for name, one in found.items()
        }
        plots.plot_coverage(
            left, {name: (mean, std.square()) for name, (mean, std) in laws.items()}, y
        )
        pairs = {
            name: (std.mean(1), (mean - y).square().mean(1))
            for name, (mean, std) in laws.items()
            if name != NETWORK
        }
        plots.plot_risk_coverage(right, pairs, risk="squared error of the most certain")
    _style((left, right), list(found))
    canvas.tight_layout()
    with replacing(path) as partial:
        canvas.savefig(partial, dpi=150)
    pyplot.close(canvas)


def _style(axes: Iterable[Any], names: list[str]) -> None:
    """Give each method one color and dash in all pictures, and put legends below them."""
    from net2gp.plots import COLORS

    dashes = ("-", "--", ":", "-.")
    for ax in axes:
        for line in ax.get_lines():
            name = str(line.get_label()).partition(" (")[0]
            if name in names:
                turn, color = divmod(names.index(name), len(COLORS))
                line.set(color=COLORS[color], linestyle=dashes[turn % len(dashes)])
        ax.legend(loc="upper left", bbox_to_anchor=(0, -0.14), frameon=False)


def _text(rows: list[dict[str, Any]]) -> str:
    """The table as text, with columns below each other."""
    from io import StringIO

    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    names = list(rows[-1])
    for name in names:
        table.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    for row in rows:
        cells = [row.get(name, "") for name in names]
        table.add_row(*(f"{c:.4g}" if isinstance(c, float) else str(c) for c in cells))
    out = StringIO()
    Console(file=out, width=200, no_color=True).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().split("\n"))
