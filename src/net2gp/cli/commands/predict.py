"""`net2gp predict`: a saved posterior and new data become predictions in a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from torch import Tensor

from net2gp.cli.files import check_output
from net2gp.cli.options import POSTERIOR_HELP, PredictionOptions, numbers
from net2gp.cli.predicting import (
    SUFFIXES,
    columns,
    predictions,
    scores,
    shown,
    write_arrays,
    write_table,
)
from net2gp.cli.problem import Reading, example
from net2gp.cli.reading.data import Loaded, read_data
from net2gp.cli.running import Result, UsageError, say
from net2gp.cli.saved import open_posterior
from net2gp.errors import InputError

MOST_LISTED = 12
"""Columns that are named."""


@dataclass(kw_only=True)
class PredictOptions(PredictionOptions):
    """A posterior, new data, and what is written."""

    posterior: Annotated[Path, typer.Argument(help=POSTERIOR_HELP)]
    data: Annotated[
        Path, typer.Argument(help="New data, in a file of the same kind of columns or shapes.")
    ]
    quantiles: Annotated[
        str, typer.Option(help="Levels of the quantiles of a regression, with commas.")
    ] = "0.05,0.95"
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The file to write: .csv, .parquet or .npz.")
    ] = Path("predictions.csv")


def predict(options: PredictOptions) -> Result:
    """Predict new data with a saved posterior.

    \b
    Examples:
      net2gp predict posterior.safetensors new.csv -o predictions.csv
      net2gp predict posterior.safetensors images.npz -o predictions.npz --json
      net2gp predict posterior.safetensors new.csv --network moved/model.py:build
      net2gp predict posterior.safetensors new.csv --quantiles 0.1,0.5,0.9

    A regression has mean, std and quantiles of the target, a classification the probability of each class and
    the label. epistemic_var is the part of the variance that more data would remove, aleatoric_var the part
    that stays (for classes summed over them), and novelty how much of the prior variance is open, 0 to 1.
    If the data have targets, the predictions are scored.
    """
    path = check_output(options.output, SUFFIXES)
    levels = numbers(options.quantiles, "--quantiles")
    if not all(0 < level < 1 for level in levels) or not levels:
        raise UsageError(f"--quantiles must lie between 0 and 1, but are {options.quantiles}.")
    posterior, note, network = open_posterior(options.posterior, options)
    reading = note.reading
    loaded = read_data(options.data, reading.wanted(needs_target=False))
    like = example(network).to(options.device)
    x = reading.inputs(loaded, like)
    found = predictions(posterior, x, reading, levels, options.batch_size)
    table = columns(found, reading, levels)
    if path.suffix.lower() == ".npz":
        write_arrays(path, found)
    else:
        write_table(path, table)
    known = _scored(found, loaded, reading, like)
    values = {
        "output": path,
        "task": reading.task,
        "points": len(loaded),
        "columns": list(table),
        "scores": known,
    }
    about = f" With the targets of the file: {shown(known)}." if known else ""
    return Result(values, f"{path}: {len(loaded)} points, {_listed(path, found, table)}.{about}")


def _scored(
    found: Mapping[str, np.ndarray], loaded: Loaded, reading: Reading, like: Tensor
) -> dict[str, float]:
    """Scores if there are targets, and they are such as the posterior knows."""
    if loaded.y is None:
        return {}
    try:
        return scores(found, reading.values(loaded, like), reading)
    except InputError as error:
        say(f"the predictions are written, but not scored: {error}")
        return {}


def _listed(path: Path, arrays: Mapping[str, object], table: Mapping[str, object]) -> str:
    """What was written: arrays or columns, the first of them if they are many."""
    what, names = (
        ("arrays", list(arrays)) if path.suffix.lower() == ".npz" else ("columns", list(table))
    )
    more = f", … ({len(names)} in all)" if len(names) > MOST_LISTED else ""
    return f"{what} {', '.join(names[:MOST_LISTED])}{more}"
