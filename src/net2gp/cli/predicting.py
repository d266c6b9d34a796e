"""Predictions of a posterior as arrays by name, as columns of a table, and as scores."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any, cast

import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor
from torch.distributions import Distribution, Independent, Normal

from net2gp.cli.files import replacing
from net2gp.cli.problem import Reading
from net2gp.errors import InputError, NotAvailable
from net2gp.likelihoods.laws import Average
from net2gp.posteriors.posterior import Posterior
from net2gp.progress import progress

SUFFIXES = (".csv", ".parquet", ".npz")
HALVINGS = 60
"""How often the interval around a quantile is halved."""


def predictions(
    posterior: Posterior, x: Tensor, reading: Reading, levels: Sequence[float], batch_size: int
) -> dict[str, np.ndarray]:
    """Predict points batch by batch.

    Regression has `mean`, `std` and `quantiles` of the targets, in their own units, `epistemic_var` and
    `aleatoric_var`; classification `probs`, `label`, and both variances of each class. `novelty` is the share
    of the prior variance that the data leave open. What a method does not give is left out.

    Args:
        posterior: The posterior.
        x: N points.
        reading: The task and its units.
        levels: The levels of the quantiles.
        batch_size: How many points are predicted together.

    Returns:
        Arrays with N rows each.
    """
    parts: list[dict[str, Tensor]] = []
    with progress("predict", len(x)) as advance:
        for batch in x.split(batch_size):
            parts.append(_predicted(posterior, batch, reading, levels))
            advance(len(batch))
    found = {
        name: torch.cat([part[name] for part in parts]).detach().cpu().numpy() for name in parts[0]
    }
    _check_finite(found)
    return found


def _check_finite(found: Mapping[str, np.ndarray]) -> None:
    """Refuse predictions that say nothing, which would be empty cells of a table."""
    good = np.all([np.isfinite(v.reshape(len(v), -1)).all(1) for v in found.values()], axis=0)
    if not good.all():
        raise InputError(
            f"the predictions of {int((~good).sum())} of {len(good)} points are not finite (first of point "
            f"{int(good.argmin()) + 1}): their inputs are too large for the network. Leave these points out."
        )


def _predicted(
    posterior: Posterior, x: Tensor, reading: Reading, levels: Sequence[float]
) -> dict[str, Tensor]:
    law, found = posterior.predict(x), {}
    if reading.task == "classification":
        probs = cast(Any, law).probs
        probs = torch.cat([1 - probs, probs], 1) if probs.shape[1] == 1 else probs
        found = {"probs": probs, "label": probs.argmax(1)}
    else:
        width = reading.scaling.width(law.mean)
        found = {
            "mean": reading.scaling.back(law.mean),
            "std": law.variance.sqrt() * width,
            "quantiles": torch.stack(
                [reading.scaling.back(quantile(law, level)) for level in levels], -1
            ),
        }
    for name in ("split", "novelty"):
        try:
            value = getattr(posterior, name)(x)
        except NotAvailable:
            continue
        if name == "novelty":
            found[name] = value
            continue
        scale = 1.0 if reading.task == "classification" else width.square()
        found |= {
            "epistemic_var": value.epistemic * scale,
            "aleatoric_var": value.aleatoric * scale,
        }
    return found


def quantile(law: Distribution, level: float) -> Tensor:
    """Return the quantile of each target by itself, by halving an interval if the law is not Gaussian.

    Args:
        law: The law of N points with C targets.
        level: A probability.

    Returns:
        The quantiles, (N, C).

    >>> quantile(Independent(Normal(torch.zeros(1, 1), torch.ones(1, 1)), 1), 0.975).round(decimals=4)
    tensor([[1.9600]])
    """
    mean, std = law.mean, law.variance.sqrt()
    if isinstance(_base(law), MultivariateNormal | Normal):
        return mean + std * NormalDist().inv_cdf(level)  # float32 would round a level near 1 to 1
    # Cantelli: no quantile is further from the mean than this many standard deviations
    far = max((1 - level) / level, level / (1 - level)) ** 0.5
    low, high = mean - far * std, mean + far * std
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        below = _cdf(law, middle) < level
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return (low + high) / 2


def _base(law: Distribution) -> Distribution:
    return _base(law.base_dist) if isinstance(law, Independent) else law


def _cdf(law: Distribution, value: Tensor) -> Tensor:
    law = _base(law)
    if isinstance(law, Average):
        parts = zip(law.weights, law.laws, strict=True)
        return cast(Tensor, sum(weight.to(value) * _cdf(one, value) for weight, one in parts))
    if isinstance(law, MultivariateNormal):
        return Normal(law.mean, law.variance.sqrt(), validate_args=False).cdf(value)
    return law.cdf(value)


def columns(
    found: Mapping[str, np.ndarray], reading: Reading, levels: Sequence[float]
) -> dict[str, np.ndarray]:
    """Predictions as columns of a table, with names of targets and classes.

    Args:
        found: What `predictions` returned.
        reading: The names.
        levels: The levels of the quantiles.

    Returns:
        Columns with N entries each.
    """
    if reading.task == "classification":
        names = [str(one) for one in reading.classes]
        table = {"label": np.array(names)[found["label"]]}
        table |= {f"prob_{name}": found["probs"][:, i] for i, name in enumerate(names)}
        for name in ("epistemic_var", "aleatoric_var"):
            if name in found:
                table[name] = found[name].sum(1)
    else:
        count = found["mean"].shape[1]
        targets = (
            list(reading.targets)
            if len(reading.targets) == count
            else [str(i) for i in range(count)]
        )
        ends = [""] if count == 1 else [f"_{name}" for name in targets]
        table = {}
        for c, end in enumerate(ends):
            table |= {f"mean{end}": found["mean"][:, c], f"std{end}": found["std"][:, c]}
            table |= {
                f"quantile_{level}{end}": found["quantiles"][:, c, i]
                for i, level in enumerate(levels)
            }
            for name in ("epistemic_var", "aleatoric_var"):
                if name in found:
                    table[f"{name}{end}"] = found[name][:, c]
    return table | ({"novelty": found["novelty"]} if "novelty" in found else {})


def write_table(path: Path, table: Mapping[str, np.ndarray | Sequence]) -> None:
    """Write columns to .csv or .parquet, or nothing.

    Args:
        path: The file.
        table: The columns.
    """
    with replacing(path) as partial:
        if path.suffix.lower() == ".parquet":
            try:
                import pandas as pd
            except ImportError:
                raise ImportError(
                    "writing parquet needs pandas and pyarrow: pip install 'net2gp[tables]'."
                ) from None
            pd.DataFrame(dict(table)).to_parquet(partial)
            return
        with partial.open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(table)
            rows.writerows(
                zip(*(np.asarray(column).tolist() for column in table.values()), strict=True)
            )


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays to .npz, or nothing."""
    with replacing(path) as partial, partial.open("wb") as file:
        np.savez_compressed(file, **cast(Any, dict(arrays)))


def scores(found: Mapping[str, np.ndarray], y: Tensor, reading: Reading) -> dict[str, float]:
    """Score predictions of held-out points.

    Args:
        found: What `predictions` returned.
        y: Their targets, as the likelihood takes them.
        reading: The task and its units.

    Returns:
        For classes accuracy, nll, ece and brier; for numbers rmse, coverage90 and, of a Gaussian with the
        predicted mean and standard deviation of each target, nll and crps. All are in the units of the file.
    """
    from net2gp import metrics

    y = y.cpu()
    if reading.task == "classification":
        probs = torch.from_numpy(found["probs"])
        logs = probs.double().clamp(min=1e-300).log()
        return {
            "accuracy": float(metrics.accuracy(probs, y)),
            "nll": float(torch.nn.functional.nll_loss(logs, y)),
            "ece": float(metrics.expected_calibration_error(probs, y)),
            "brier": float(metrics.brier(probs, y)),
        }
    mean, std = (torch.from_numpy(found[name]).double() for name in ("mean", "std"))
    y, var = reading.scaling.back(y.double()), std.square().clamp(min=1e-300)
    return {
        "rmse": float(metrics.rmse(mean, y)),
        "nll": float(metrics.gaussian_nll((mean, var), y)),
        "crps": float(metrics.crps_gaussian(mean, var, y)),
        "coverage90": float(metrics.coverage(mean, var, y, 0.9)),
    }


def shown(values: Mapping[str, float]) -> str:
    """Scores in one line."""
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())
