"""Recompute flows that neural-tangents leaves to an ODE solver, with a tighter tolerance.

    .venv-peers/neural-tangents/bin/python benchmarks/reference_flows.py

checks that the solver with its own tolerance, 1.4e-8, gives the numbers of every `gd_*` run in
`tests/reference_data/neural_tangents_predict.npz`, and writes those with 1e-13 to
`neural_tangents_predict_tight.npz` beside it, under the same names. For each run it prints how far the
stored numbers are from the solver's own, how far from the tight ones, and what 1e-12 instead of 1e-13 would
change. neural-tangents has no argument for the tolerance, so its name for the solver is bound to one that
has.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.ode import odeint
from neural_tangents import predict
from neural_tangents._src import predict as source

FOLDER = Path(__file__).parents[1] / "tests" / "reference_data"
STORED = FOLDER / "neural_tangents_predict.npz"
Arrays = dict[str, np.ndarray]


def mean_square(f: jax.Array, y: jax.Array) -> jax.Array:
    """‖f − y‖² / 2NC."""
    return 0.5 * jnp.mean((f - y) ** 2)


def cross_entropy(f: jax.Array, y: jax.Array) -> jax.Array:
    """A mean over points and outputs, as in the documentation of neural-tangents."""
    return -jnp.mean(jax.nn.log_softmax(f) * y)


def outputs(run: dict[str, Any], stored: Arrays, tolerance: float) -> Arrays:
    """Outputs at training and test points at the end of a run."""
    source.ode = SimpleNamespace(odeint=partial(odeint, rtol=tolerance, atol=tolerance))
    squared = run["loss"].startswith("mse")
    flow = predict.gradient_descent(
        mean_square if squared else cross_entropy,
        jnp.asarray(stored["ntk_dd"]),
        jnp.asarray(stored["y_train" if squared else "y_onehot"]),
        learning_rate=run["learning_rate"],
        momentum=run["momentum"],
    )
    start = (jnp.asarray(stored[name]) for name in ("fx_train_0", "fx_test_0", "ntk_td"))
    train, test = flow(run["t"], *start)
    return {f"{run['name']}__train": np.asarray(train), f"{run['name']}__test": np.asarray(test)}


def gap(one: Arrays, other: Arrays) -> float:
    """The largest difference."""
    return max(float(np.abs(value - other[name]).max()) for name, value in one.items())


def main() -> None:
    """Check, print and write."""
    jax.config.update("jax_enable_x64", True)
    runs = json.loads(STORED.with_suffix(".json").read_text())["runs"]
    with np.load(STORED) as archive:
        stored = dict(archive)
    tight: Arrays = {}
    for run in runs:
        if not run["name"].startswith("gd_"):
            continue
        loose, middle, fine = (outputs(run, stored, tol) for tol in (1.4e-8, 1e-12, 1e-13))
        gaps = gap(loose, stored), gap(fine, stored), gap(middle, fine)
        print(f"{run['name']:<22}" + "  ".join(f"{value:.1e}" for value in gaps), flush=True)
        # rounding alone, which another processor may do otherwise
        if gaps[0] > 1e-12:
            raise SystemExit(f"this is not how the numbers of {run['name']} were made")
        tight |= fine
    np.savez(FOLDER / "neural_tangents_predict_tight.npz", **tight)


if __name__ == "__main__":
    main()
