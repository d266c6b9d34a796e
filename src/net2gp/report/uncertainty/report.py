"""The verb: a posterior and held-out data in, a page and its numbers out."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch

from net2gp.data.scaling import Scaling
from net2gp.errors import InputError, Net2GPWarning
from net2gp.inputs import num_rows
from net2gp.keywords import check_known, lists
from net2gp.posteriors import Posterior
from net2gp.progress import progress
from net2gp.report.uncertainty.abstaining import abstaining, constant
from net2gp.report.uncertainty.calibration import calibration, differences
from net2gp.report.uncertainty.cases import cases, label_errors
from net2gp.report.uncertainty.facts import Given, checked, facts
from net2gp.report.uncertainty.guarantee import guarantee
from net2gp.report.uncertainty.outcomes import Labels, Numbers, answers, in_units
from net2gp.report.uncertainty.pages.assembly import assembled
from net2gp.report.uncertainty.pages.pictures import Pictures
from net2gp.report.uncertainty.pages.words import limits, verdict
from net2gp.report.uncertainty.scores import broken, scored
from net2gp.report.uncertainty.slices import slices
from net2gp.report.uncertainty.strangers import strangers
from net2gp.types import Data, Inputs

PARTS = 6
"""Steps of the bar after the predictions."""


@dataclass(frozen=True, eq=False)
class UncertaintyReport:
    """What a posterior is worth on held-out data, as a page and as numbers.

    Args:
        html: The page, complete in itself.
        values: The numbers of the page: dicts, lists, texts, numbers and None. Under "scores" are estimates,
            each with "value", "low", "high" and the number "n" of points.
    """

    html: str = field(repr=False)
    values: dict[str, Any] = field(repr=False)

    def save(self, path: str | os.PathLike) -> tuple[Path, Path]:
        """Write PATH.html and PATH.json. Each is written beside its place and then renamed.

        Args:
            path: The path without ending, or with one of the two, in a folder that exists.

        Returns:
            The paths of the page and of the numbers.

        Raises:
            InputError: If the folder does not exist or cannot be written.
        """
        place = Path(path)
        if place.suffix in (".html", ".json"):
            place = place.with_suffix("")
        if not place.parent.is_dir():
            raise InputError(
                f"the folder {place.parent} does not exist. Make it first, or save elsewhere."
            )
        texts = {
            ".html": self.html,
            ".json": json.dumps(self.values, indent=1, ensure_ascii=False, allow_nan=False) + "\n",
        }
        found = []
        for ending, text in texts.items():
            found.append(_written(place.with_name(place.name + ending), text))
        return found[0], found[1]

    def failures(self, limits: Mapping[str, float]) -> list[str]:
        """Compare scores with limits: at least for what should be large, at most for what should be small.

        Args:
            limits: Limits by the name of a score, such as `{"coverage90": 0.88, "nll": 0.5}`.

        Returns:
            A sentence for each limit that is missed; empty if all hold.

        Raises:
            InputError: If a name is unknown, or if a limit is no number.
        """
        return broken(self.values["scores"], limits)


class Options(TypedDict, total=False):
    """How points and numbers are shown."""

    columns: Sequence[str] | None
    classes: Sequence[str] | None
    images: bool | None
    scaling: Scaling | None
    title: str | None
    command: str | None


@lists(columns=None, classes=None, images=None, scaling=None, title=None, command=None)
def uncertainty_report(
    posterior: Posterior,
    held_out: Data,
    *,
    others: Mapping[str, Inputs] | None = None,
    **options: Unpack[Options],
) -> UncertaintyReport:
    """Measure what a posterior's uncertainty is worth on held-out data, as one page that opens offline.

    The page has a verdict in words, calibration beside the mean alone and beside its best single correction,
    the error at each share of refused points, parts of the data that are worse than they claim, other data,
    single cases with the training points behind them, suspected labels, and the price of a guarantee. Every
    number has an interval that contains it in 95 % of cases and the number of points. The held-out data must
    not have been used to fit or choose anything.

    Cost: one prediction and one `novelty` of each point, in batches; a few hundred gradients for the points
    behind the cases.

    Args:
        posterior: Any posterior of one label, or of numbers, per point.
        held_out: Data (x, y) that the posterior has not seen, or a DataLoader.
        others: Inputs of other kinds by name, to see whether they are noticed.
        columns: The names of the columns of x, (N, D), for slices and rows.
        classes: The names of the classes, or of the outputs of a regression.
        images: Whether points are images, (N, H, W) or (N, 1 or 3, H, W). None guesses from the shape.
        scaling: With which inputs and targets were standardized. The page is then in the units before, and so
            are the limits of `failures`.
        title: The title of the page.
        command: What to type to make the page again, which it then shows.

    Returns:
        The page and its numbers.

    Raises:
        InputError: If the data are the posterior's own, or names, shapes or the scaling do not fit.
        NotAvailable: If the posterior predicts several labels per point, or targets at places.

    >>> from net2gp.kernels import RBF
    >>> from net2gp.likelihoods import Gaussian
    >>> from net2gp.posteriors import condition
    >>> x = torch.linspace(-3, 3, 90, dtype=torch.float64)[:, None]
    >>> y = torch.sin(x) + 0.3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).double()
    >>> posterior = condition(RBF(), (x[::3], y[::3]), Gaussian(noise_var=0.09))
    >>> report = uncertainty_report(posterior, (x[1::3], y[1::3]), columns=["time"])
    >>> report.values["scores"]["coverage90"]["n"], report.failures({"coverage90": 0.5})
    (30, [])

    References: Guo et al. (2017), On calibration of modern neural networks. Geifman & El-Yaniv (2017),
    Selective classification for deep neural networks.
    """
    start = time.perf_counter()
    check_known(options, Options)
    given = checked(posterior, held_out, others, **_of_points(options))
    total = num_rows(given.x) + sum(num_rows(x) for x in given.others.values())
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always", Net2GPWarning)
        with progress("report", total + PARTS) as advance:
            found = in_units(answers(posterior, given.x, given.y, advance), given.scaling)
            others_found = {
                n: in_units(answers(posterior, x, None, advance), given.scaling)
                for n, x in given.others.items()
            }
            given = given.named(found)
            values = _values(posterior, given, found, others_found, advance)
    values["title"] = options.get("title") or "How far to trust this posterior"
    values["facts"] = facts(posterior, given)
    values["warnings"] = sorted({str(w.message) for w in caught})
    values["verdict"], values["limits"] = verdict(values), limits(values)
    values["command"] = options.get("command")
    values["seconds"] = round(time.perf_counter() - start, 2)
    pictures = Pictures.of(posterior, given, values)
    return UncertaintyReport(assembled(values, pictures), values)


def _of_points(options: Options) -> dict[str, Any]:
    """The options about points, of which those that are left out are None."""
    return {name: options.get(name) for name in ("columns", "classes", "images", "scaling")}


def _values(
    posterior: Posterior,
    given: Given,
    found: Labels | Numbers,
    others: dict[str, Labels | Numbers],
    advance: Any,
) -> dict[str, Any]:
    """Everything that is measured, step by step."""
    labels = isinstance(found, Labels)
    values: dict[str, Any] = {
        "task": "classes" if labels else "numbers",
        "n": len(found),
        "names": list(given.names),
        "known_points": given.known_points,
        "around_network": hasattr(posterior.process, "covariance"),
        "drawn": isinstance(found, Numbers) and found.drawn,
        "constant": constant(found, given.names),
    }
    values["compared"] = calibration(found)
    values["differences"] = differences(found)
    advance(note="calibration")
    values["refusing"] = abstaining(found)
    advance(note="refusing")
    shown = replace(found, x=given.shown(found.x))
    values["slices"] = slices(shown, given.columns, given.names, given.images)
    advance(note="slices")
    values["others"] = strangers(found, others)
    values["guarantee"] = guarantee(found, list(given.names))
    advance(note="guarantee")
    values["cases"] = cases(posterior, found, given.scaling)
    advance(note="cases")
    values["label_errors"] = label_errors(posterior, given.scaling)
    values["scores"] = scored(values, found)
    advance(note="labels")
    return values


def _written(path: Path, text: str) -> Path:
    """Write a file beside its place and rename it, so that nothing half-written stays."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    except OSError as error:
        raise InputError(f"cannot write {path} ({error.strerror}). Save elsewhere.") from error
    finally:
        beside.unlink(missing_ok=True)
    return path
