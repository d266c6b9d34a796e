"""Choose hyper-parameters by the marginal likelihood: a sweep, and the table of its results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from net2gp.errors import InputError
from net2gp.inputs import describe
from net2gp.posteriors.posterior import Posterior
from net2gp.progress import progress

EVIDENCE = "log marginal likelihood"
"""The name of the score that is maximized; all others are losses."""

V = TypeVar("V")
D = TypeVar("D")


@dataclass(frozen=True, eq=False)
class Fit:
    """The result of one setting on one data set: its evidence, and its losses by name.

    Args:
        evidence: A posterior, whose log marginal likelihood is taken, or that number itself.
        losses: Other scores by name, such as a test loss; smaller is better.
    """

    evidence: Posterior | Tensor | float
    losses: Mapping[str, Tensor | float] = field(default_factory=dict)

    @property
    def scores(self) -> dict[str, float]:
        """The evidence and the losses as numbers."""
        known = self.evidence
        if not isinstance(known, Tensor | float | int):
            known = known.log_marginal_likelihood()
        return {name: _number(value) for name, value in {EVIDENCE: known, **self.losses}.items()}


def _number(value: Tensor | float) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)


@dataclass(frozen=True, eq=False)
class Selection:
    """The table of a sweep over V values on D data sets.

    Args:
        name: The name of what was varied.
        values: The V values.
        scores: The evidence, under the name "log marginal likelihood", and the losses by name: (V, D) each.

    Raises:
        InputError: If the scores do not have this shape, or if the evidence is missing.

    >>> evidence, loss = torch.tensor([[-3.0, -4.0], [-2.0, -3.5]]), torch.tensor([[1.0, 2.0], [2.0, 1.5]])
    >>> table = Selection("width", (8, 16), {"log marginal likelihood": evidence, "test loss": loss})
    >>> table.best(), table.best("test loss")
    (16, 8)
    >>> print(table)
         width  log marginal likelihood                test loss
             8          -3.5000 ± 0.500         1.5000 ± 0.500 *
            16        -2.7500 ± 0.750 *           1.7500 ± 0.250
    """

    name: str
    values: tuple[Any, ...]
    scores: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        shapes = {name: tuple(score.shape) for name, score in self.scores.items()}
        if (
            EVIDENCE not in shapes
            or len(set(shapes.values())) > 1
            or len(shapes[EVIDENCE]) != 2
            or shapes[EVIDENCE][0] != len(self.values)
        ):
            raise InputError(
                f"scores must have '{EVIDENCE}' and be (V, D) each, for V = {len(self.values)} values "
                f"and D data sets, but are {shapes}. Stack the numbers of each score."
            )

    @property
    def evidence(self) -> Tensor:
        """The evidence log p(y) of every value on every data set: (V, D)."""
        return self.scores[EVIDENCE]

    @property
    def losses(self) -> dict[str, Tensor]:
        """The other scores, by name."""
        return {name: score for name, score in self.scores.items() if name != EVIDENCE}

    def mean(self, score: str = EVIDENCE) -> Tensor:
        """Return the mean over the data sets.

        Args:
            score: The name of a score.

        Returns:
            The mean for each value: (V,).
        """
        return self._of(score).mean(1)

    def standard_error(self, score: str = EVIDENCE) -> Tensor:
        """Return the standard error s/√D of the mean over the data sets.

        Args:
            score: The name of a score.

        Returns:
            The standard error for each value: (V,); NaN if there is one data set.
        """
        values = self._of(score)
        if values.shape[1] < 2:
            return values.new_full(values.shape[:1], math.nan)
        return values.std(1) / values.shape[1] ** 0.5

    def best_index(self, score: str = EVIDENCE) -> int:
        """Return the index of the value with the largest mean evidence, or the smallest mean loss.

        A value whose score is not finite on some data set is never the best.

        Args:
            score: The name of a score.

        Returns:
            The index of the value.

        Raises:
            InputError: If no value has a finite score on all data sets.
        """
        mean = self.mean(score) if score == EVIDENCE else -self.mean(score)
        if not bool(mean.isfinite().any()):
            raise InputError(
                f"no {self.name} has a finite {score} on all data sets, so that none is best. "
                f"Look at selection.scores['{score}']."
            )
        return int(mean.nan_to_num(-math.inf, -math.inf, -math.inf).argmax())

    def best(self, score: str = EVIDENCE) -> Any:
        """Return the value with the largest mean evidence, or the smallest mean loss.

        Args:
            score: The name of a score.

        Returns:
            The value.
        """
        return self.values[self.best_index(score)]

    def _of(self, score: str) -> Tensor:
        if score not in self.scores:
            raise InputError(f"there is no score '{score}'. Known: {', '.join(self.scores)}.")
        return self.scores[score]

    def __str__(self) -> str:
        rows = [f"{self.name:>10}" + "".join(f"{name:>25}" for name in self.scores)]
        best = {name: self.best_index(name) for name in self.scores}
        for index, value in enumerate(self.values):
            row = f"{value:>10.4g}" if isinstance(value, float) else f"{value!s:>10}"
            for name in self.scores:
                mean, error = self.mean(name)[index], self.standard_error(name)[index]
                row += f"{mean:.4f} ± {error:.3f}{' *' if best[name] == index else ''}".rjust(25)
            rows.append(row)
        return "\n".join(rows)


def sweep(
    fit: Callable[[V, D], Fit],
    values: Sequence[V],
    datasets: Sequence[D],
    *,
    name: str = "value",
) -> Selection:
    """Fit every value on every data set, and make a table of evidence and losses.

    The evidence comes from the training data alone. If its optimum is near the optimum of the test loss, no
    validation set was needed.

    Args:
        fit: A function of a value and a data set that trains in any way, and returns
            `Fit(posterior, {"test loss": …})`.
        values: The values to try: numbers, or anything else that `fit` understands.
        datasets: The data sets, in any form that `fit` understands.
        name: The name of what is varied, for the table.

    Returns:
        The table, with the best value by evidence or by any loss.

    Raises:
        InputError: If there are no values or data sets, or if `fit` does not return a `Fit` with the same
            losses each time.

    >>> from net2gp.kernels import RBF
    >>> from net2gp.likelihoods import Gaussian
    >>> from net2gp.posteriors.condition import condition
    >>> x = torch.linspace(0, 6, 30, dtype=torch.float64)[:, None]
    >>> def fit(lengthscale, y):
    ...     return Fit(condition(RBF(lengthscale), (x, y), Gaussian(0.01)))
    >>> sweep(fit, [0.01, 1.0, 100.0], [x.sin(), x.cos()], name="lengthscale").best()
    1.0

    Reference: Khan et al., Approximate inference turns deep networks into Gaussian processes,
    NeurIPS 2019; MacKay, A practical Bayesian framework for backpropagation networks, 1992.
    """
    values, datasets = tuple(values), list(datasets)
    if not values or not datasets:
        raise InputError(
            f"sweep needs values and data sets, but got {len(values)} and {len(datasets)}. "
            "Pass for example values=[0.1, 1.0], datasets=[(x, y)]."
        )
    table: dict[str, list[float]] = {}
    with progress(f"sweep of {name}", len(values) * len(datasets)) as advance:
        for value in values:
            for dataset in datasets:
                found = fit(value, dataset)
                if not isinstance(found, Fit):
                    raise InputError(
                        f"fit must return Fit(posterior, losses), but returned {describe(found)}."
                    )
                scores = found.scores
                if table and set(scores) != set(table):
                    raise InputError(
                        f"fit must give the same losses every time, but gave {sorted(scores)} at "
                        f"{name} = {value} after {sorted(table)}."
                    )
                for key, score in scores.items():
                    table.setdefault(key, []).append(score)
                advance(note=f"{name} = {value}")
    shape = (len(values), len(datasets))
    columns = {k: torch.tensor(v, dtype=torch.float64).reshape(shape) for k, v in table.items()}
    return Selection(name, values, columns)
