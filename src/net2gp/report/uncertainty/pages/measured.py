"""The sections with curves: calibration, and refusing the least certain points."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from scipy import stats

from net2gp.report.uncertainty.calibration import LEVELS
from net2gp.report.uncertainty.pages.drawing import STYLES, Chart
from net2gp.report.uncertainty.pages.parts import cell, section, soft, table, text
from net2gp.report.uncertainty.pages.words import called, number, percent

Values = dict[str, Any]
MEAN_ALONE = """The mean alone is what the posterior's mean predicts without any variance of f. """
BARE = """The bare network is what the mean predicts without any variance of f. """
ONE_SPREAD = (
    """The mean with one spread has the same mean, and one standard deviation for all points. """
)
CROSS_FITTED = """What is chosen on the held-out data themselves (a temperature, a spread, a factor) is
    chosen by cross-fitting: for each fifth of the points on the other four fifths, so that the comparison
    with the posterior, which has seen none of them, is fair. It needs labels, which the posterior does
    not."""


def calibration_section(values: Values) -> str:
    """Write reliability or coverage, with the scores of all predictions beside each other."""
    labels = values["task"] == "classes"
    parts = _of_labels(values) if labels else _of_numbers(values)
    return section("calibration", "Calibration: is it as right as it says?", *parts, _fair(values))


def _fair(values: Values) -> str:
    compared = values["compared"]
    words = "Intervals contain the true value in 95 % of cases. "
    if len(compared) > 1:
        around = BARE if values["around_network"] else MEAN_ALONE
        words += around if values["task"] == "classes" else ONE_SPREAD
        words += CROSS_FITTED
    chosen = [
        f"{called(values, name)}: {number(min(v['chosen']))} to {number(max(v['chosen']))}"
        for name, v in compared.items()
        if v.get("chosen")
    ]
    return text(words) + (soft(f"Chosen: {'; '.join(chosen)}.") if chosen else "")


def _of_labels(values: Values) -> list[str]:
    compared = values["compared"]
    head = ("", "right", "mean confidence", "log loss", "Brier", "ECE", "smooth ECE")
    rows = [
        [
            called(values, name),
            *(cell(f[k], share=True) for k in ("accuracy", "confidence")),
            *(cell(f[k]) for k in ("nll", "brier", "ece", "smooth_ece")),
        ]
        for name, f in compared.items()
    ]
    own = compared["posterior"]
    words = f"""If the posterior's probabilities were right, the ECE of {values["n"]:,} points would stay
        below {number(own["ece_if_right"])} in 95 % of cases; it is {number(own["ece"]["value"])}. The
        smooth ECE (Błasiok and Nakkiran, 2023) has no bins to choose. Both are too large on average for
        few points, which their intervals take into account."""
    bins = f"<details><summary>The bins as a table</summary>{_bins(own)}</details>"
    return [
        f'<div class="charts">{_reliability(values)}<div>{text(words)}{bins}</div></div>',
        table("scores of all predictions", head, rows),
    ]


def _reliability(values: Values) -> str:
    compared = values["compared"]
    chart = Chart(
        "Accuracy against confidence. On the diagonal they are equal. The table below has the numbers.",
        *("confidence", "share that is right", (0, 1), (0, 1)),
    )
    for line in compared["posterior"]["bins"]:
        chart.whisker(line["confidence"], *line["band"])
    chart.legend.append(("band", "", "where 95 % would lie if the posterior is right"))
    chart.line([0, 1], [0, 1], "ideal", "as right as it says")
    for style, (name, found) in zip(STYLES, compared.items(), strict=False):
        xs = [line["confidence"] for line in found["bins"]]
        ys = [line["accuracy"]["value"] for line in found["bins"]]
        chart.line(xs, ys, style)
        chart.dots(xs, ys, style)
        chart.legend.append(("dots", style, called(values, name)))
    return chart.html()


def _bins(found: Values) -> str:
    rows = [
        [
            percent(line["confidence"]),
            cell(line["accuracy"], share=True),
            "–".join(percent(v) for v in line["band"]),
            f"{line['accuracy']['n']:,}",
        ]
        for line in found["bins"]
    ]
    head = ["mean confidence", "right", "expected if right", "points"]
    return table("bins of the reliability diagram", head, rows)


def _of_numbers(values: Values) -> list[str]:
    compared, names = values["compared"], values["names"]
    charts = [_coverage(values), _transforms(values), _quantiles(values)]
    head = (
        "",
        "in 50 % intervals",
        "in 90 % intervals",
        "in 95 % intervals",
        "width of 90 %",
        "log loss",
    )
    shares = ("coverage50", "coverage90", "coverage95")
    rows = [
        [
            called(values, name),
            *(cell(f[k], share=True) for k in shares),
            cell(f["width90"]),
            cell(f["nll"]),
        ]
        for name, f in compared.items()
    ]
    parts = [
        f'<div class="charts">{"".join(charts)}</div>',
        table("scores of all predictions", head, rows),
    ]
    if len(names) > 1:
        own = compared["posterior"]["outputs"]
        lines = [
            [name, cell(one, share=True, n=True)] for name, one in zip(names, own, strict=True)
        ]
        parts.append(table("coverage of each output", ["output", "in 90 % intervals"], lines))
    return parts


def _coverage(values: Values) -> str:
    compared, n = values["compared"], values["n"]
    chart = Chart(
        "How often central intervals contain the target, against what they say. On the diagonal both agree.",
        *("what intervals say", "share of targets inside", (0, 1), (0, 1)),
    )
    low, high = (stats.binom.ppf(q, n, LEVELS) / n for q in (0.025, 0.975))
    chart.band(LEVELS, low, high, f"where 95 % of {n:,} points would lie")
    chart.line([0, 1], [0, 1], "ideal", "as right as they say")
    for style, (name, found) in zip(STYLES, compared.items(), strict=False):
        ys = np.mean([[one["value"] for one in curve] for curve in found["curves"]], 0)
        chart.line(LEVELS, ys, style, called(values, name))
    return chart.html()


def _transforms(values: Values) -> str:
    """The histogram of the probability of a smaller target, which is flat if predictions are right."""
    counts = np.array(values["compared"]["posterior"]["histograms"], dtype=float)
    total = counts.sum(1)[:, None]
    low, high = (stats.binom.ppf(q, values["n"], 0.1) / values["n"] * 10 for q in (0.025, 0.975))
    shares = 10 * counts / total
    chart = Chart(
        "Histogram of the predicted probability of a smaller target (PIT). It is flat if predictions are "
        "right, high at both ends if they are too narrow, high in the middle if they are too wide.",
        *(
            "predicted probability of a smaller target",
            "density",
            (0, 1),
            (0, max(2.0, 1.1 * shares.max())),
        ),
    )
    chart.band([0, 1], [low, low], [high, high], "where 95 % of each bar would lie")
    for style, line, name in zip(STYLES, shares, values["names"], strict=False):
        chart.bars(np.linspace(0, 1, 11).tolist(), line.tolist(), style, name)
    return chart.html()


def _quantiles(values: Values) -> str:
    """Quantiles of the standardized targets against those of a Gaussian."""
    at = np.linspace(0.02, 0.98, 49)
    xs = stats.norm.ppf(at)
    ys = stats.norm.ppf(np.clip(values["compared"]["posterior"]["quantiles"], 1e-6, 1 - 1e-6))
    size = max(2.6, float(np.abs(ys).max()) * 1.05)
    chart = Chart(
        "Quantiles of standardized targets against those expected (QQ). On the diagonal both agree; a "
        "steeper line means errors larger than predicted.",
        *("expected quantile", "quantile of the targets", (-2.2, 2.2), (-size, size)),
    )
    n = values["n"]
    low, high = (
        stats.norm.ppf(stats.beta.ppf(q, n * at, n * (1 - at) + 1)) for q in (0.025, 0.975)
    )
    chart.band(xs, low, high, "where 95 % of each would lie")
    chart.line([-2.2, 2.2], [-2.2, 2.2], "ideal")
    for style, line, name in zip(STYLES, ys, values["names"], strict=False):
        chart.line(xs, line, style, name)
    return chart.html()


def refusing_section(values: Values) -> str:
    """Write the curve of error against refused points, its slider and its table."""
    found, labels = values["refusing"], values["task"] == "classes"
    several = len(values["names"]) > 1
    error = "error rate" if labels else "standardized RMSE" if several else "RMSE"
    data = {
        "rows": found["curve"],
        "percent": labels,
        "doubt": "P(wrong)" if labels else f"the {'standardized ' * several}deviation",
        "error": error,
    }
    slider = (
        '<div class="slider" id="abstain"><label for="refused">Refuse the least certain</label>'
        '<input type="range" id="refused" min="0" max="95" step="1" value="0">'
        '<output id="kept-text" for="refused"></output></div>'
        f'<script type="application/json" id="curve">{_json(data)}</script>'
    )
    rows = [
        [f"{p} %", cell(one, share=labels), f"{one['n']:,}"] for p, one in found["rows"].items()
    ]
    words = """If points may be refused, or given to a person, the least certain should be the wrong ones.
        Thresholds are taken from the same points, which makes the numbers slightly too good for few of
        them."""
    if several and not labels:
        words += " Standardized means in units of the standard deviation of the held-out targets."
    below = table("error by share of refused points", ["refused", "error", "kept"], rows)
    return section(
        "refusing",
        "Refusing: does it know when it is wrong?",
        text(words),
        f'<div class="charts"><div>{_risk(found, error)}{slider}</div>{below}</div>',
    )


def _risk(found: Values, error: str) -> str:
    curve = np.array([line[:2] for line in found["curve"]])
    labels = error == "error rate"
    curve[:, 1] *= 100 if labels else 1
    chart = Chart(
        "Error of the points that are kept against the share that is refused. A curve that falls means that "
        "uncertain points are those that are wrong. The table has the numbers.",
        "% refused, the least certain first",
        "error rate, %" if labels else error,
        *((0, 95), (0, float(curve[:, 1].max()) * 1.1 or 1.0)),
    )
    chart.line([0, 95], [curve[0, 1]] * 2, "ideal", "refusing at random")
    chart.line(curve[:, 0], curve[:, 1], "a", "posterior")
    chart.marker(0, "kept")
    return chart.html()


def _json(value: Any) -> str:
    """JSON that may stand in a script element."""
    return json.dumps(value).replace("<", "\\u003c")
