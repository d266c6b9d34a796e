"""Programs are compared with the posterior that they come from, before they are written."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from net2gp.errors import NotAvailable
from net2gp.inputs import num_rows, rows, tensors
from net2gp.posteriors.conditioning.samples import WeightSamples
from net2gp.posteriors.posterior import Posterior
from net2gp.serving.programs.answers import Answers
from net2gp.types import Inputs

MOST_POINTS = 17
"""The number of points at which a program is compared with its posterior."""

TOLERANCE = 1e-4
"""The largest difference, as a share of the largest entry."""


def check_program(
    program: fx.GraphModule, posterior: Posterior[Any], x: Inputs, given: dict[str, Any]
) -> None:
    """Raise unless the program gives what the posterior says, at one point and at more.

    Args:
        program: The graph.
        posterior: The posterior.
        x: Points.
        given: The options of the export.

    Raises:
        NotAvailable: If it does not.
    """
    some = rows(x, slice(0, MOST_POINTS))
    wanted = expected(posterior, some, given)
    for part in (slice(0, 1), slice(0, num_rows(some))):
        with torch.no_grad():
            found: Answers = program(*tensors(rows(some, part)))
        for name, value in wanted.items():
            gap = _gap(found[name], value[part], value)
            if not gap <= TOLERANCE:
                raise NotAvailable(
                    f"the program's {name} differs from the posterior's by {gap:.1e} of its size, so nothing "
                    "was written. The network may couple the points of a batch, or use a layer twice in a "
                    "way that has no formula. Pass draws=32, or report the network."
                )


def _gap(found: Tensor, wanted: Tensor, scale: Tensor) -> float:
    size = float(scale.double().abs().max().clamp(min=1e-30))
    return float((found.double() - wanted.double()).abs().max()) / size


def expected(posterior: Posterior[Any], x: Inputs, given: dict[str, Any]) -> Answers:
    """Return what the posterior says of `std`, `mean` and `probabilities`, where that is comparable."""
    draws: WeightSamples | None = given["draws"]
    if draws is not None:
        generator = torch.Generator().manual_seed(draws.seed)
        f = posterior.sample(x, draws.num_samples, generator=generator, linear=False)
        return {"mean": f.mean(0)} | _of_targets(posterior.predict(x, samples=draws))
    law = posterior.predict(x)
    classes = hasattr(law, "probs")
    found: Answers = {}
    if classes:
        marginal = posterior.marginal(x)
        found = {"mean": marginal.mean, "std": marginal.variance.sqrt()}
    widened = getattr(posterior.process, "widening", None) is not None
    novel = bool(getattr(getattr(posterior.likelihood, "link", None), "novelty_var", 0.0))
    if given["novelty"] or not (widened or novel):
        found |= _of_targets(law)
    else:
        found |= {} if classes else {"mean": law.mean}
    return found


def _of_targets(law: Any) -> Answers:
    if hasattr(law, "probs"):
        return {"probabilities": law.probs}
    return {"mean": law.mean, "std": law.variance.sqrt()}
