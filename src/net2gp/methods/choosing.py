"""Choose what is left open of Laplace's approximation: prior variance, noise, link."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from net2gp.errors import InputError
from net2gp.inputs import gather
from net2gp.linear.linearized import PriorVar
from net2gp.methods.laplace_tuning import (
    Evidence,
    LogDet,
    Matched,
    Search,
    Task,
    Tuned,
    Tuning,
    Validation,
)
from net2gp.methods.matching import Build, has_open_link, match
from net2gp.progress import progress


def tuned(
    task: Task,
    log_det: LogDet,
    build: Build,
    prior_var: PriorVar | None,
    tuning: Tuning | None,
    temperature: float,
) -> Tuned:
    """Everything that is open chosen, and all with the evidence that it has."""
    chosen = Matched() if tuning is None else tuning
    if not isinstance(chosen, Evidence | Validation | Matched):
        raise InputError(
            f"tuning must be Matched(), Evidence() or Validation(data), but is {chosen!r}."
        )
    if tuning is not None and prior_var is not None:
        _check_used(task, tuning)
    search = Search(task, log_det, prior_var, temperature, chosen)
    best = search.at(search.maximize())
    if isinstance(chosen, Validation) and prior_var is None:
        return _validated(search, best, chosen, build)
    if isinstance(chosen, Matched) and has_open_link(task.likelihood):
        return match(search, best, chosen, build)
    return best


def _check_used(task: Task, tuning: Tuning) -> None:
    """Raise if a prior variance that is given leaves nothing for `tuning` to choose."""
    if isinstance(tuning, Validation) or (isinstance(tuning, Evidence) and tuning.per_layer):
        raise InputError(
            f"{type(tuning).__name__} chooses prior variances, but prior_var is given. Leave out tuning= or "
            "prior_var=."
        )
    if not task.open_noise and not has_open_link(task.likelihood):
        raise InputError(
            "prior_var is given, and the likelihood leaves neither noise nor link open: nothing is left for "
            "tuning= to choose. Leave out tuning= or prior_var=."
        )


def _validated(search: Search, best: Tuned, validation: Validation, build: Build) -> Tuned:
    x, y = gather(validation.data)
    if not len(validation.grid):
        raise InputError("Validation needs a grid of prior variances, e.g. grid=(0.01, 0.1, 1.0).")
    search.task.likelihood.check(search.task.linearized(x), y)
    choices: list[tuple[float, Tuned]] = []
    noise = [np.log(1 / (best.scale * search.temperature))] if search.task.open_noise else []
    with progress("prior variance", len(validation.grid)) as advance:
        for value in validation.grid:
            one = search.at(np.array([np.log(value), *noise]))
            law = build(one).predict(x)
            score = float(law.log_prob(_targets(law, y)).double().mean())
            choices.append((score, one))
            advance(note=f"log p(y) {score:.4f}")
    return max(choices, key=lambda choice: choice[0])[1]


def _targets(law: torch.distributions.Distribution, y: Tensor) -> Tensor:
    """The targets in the shape that the law is asked about."""
    if isinstance(law, torch.distributions.Categorical):
        return y
    return y.reshape(law.batch_shape + law.event_shape).to(law.mean.dtype)
