"""The sections about parts of the data, other data, and the price of a guarantee."""

from __future__ import annotations

from html import escape
from typing import Any

from net2gp.report.uncertainty.pages.drawing import Chart
from net2gp.report.uncertainty.pages.parts import cell, section, soft, table, text
from net2gp.report.uncertainty.pages.words import number, percent

MOST_ROWS = 12
MOST_CLASSES = 25
Values = dict[str, Any]


def slices_section(values: Values) -> str:
    """Write the tested slices, weakest first, and the true classes."""
    found, labels = values["slices"], values["task"] == "classes"
    rows = [
        [
            escape(row["name"]),
            percent(row["said"]),
            cell(row["is"], share=True),
            f"{row['is']['n']:,}",
            _chance(row["p_holm"]),
            _flag(row),
        ]
        for row in found["rows"][:MOST_ROWS]
    ]
    also = ", the predicted classes and the" if labels else " and the"
    words = f"""On one random half of the held-out points ({found["looked_at"]:,}) a shallow tree
        looked for the parts with the worst calibration. These leaves{also} quarters of each column of a table
        were tested on the other half ({found["tested_on"]:,}), with Holm's correction for
        {found["tests"]} tests. A small corrected p speaks against chance."""
    parts = [text(words)]
    if rows:
        is_ = "is right" if labels else "is inside"
        head = ["part", "says", is_, "points", "corrected p", ""]
        parts.append(table("tested parts of the data", head, rows))
        if len(found["rows"]) > MOST_ROWS:
            parts.append(soft(f"The other {len(found['rows']) - MOST_ROWS} are in the JSON file."))
    else:
        parts.append(text("No part has ten points on the half that tests it, so none was tested."))
    if not found["tree"]:
        parts.append(text("The tree needs scikit-learn: `pip install 'net2gp[plots]'`."))
    return section(
        "slices", "Slices: where is it worse than it says?", *parts, _classes(found["classes"])
    )


def _classes(rows: list[Values]) -> str:
    """The share of each true class that is found; of many classes, the worst."""
    if not rows:
        return ""
    worst = sorted(rows, key=lambda row: (row["found"]["n"] > 0, row["found"]["value"] or 0.0))
    shown = rows if len(rows) <= MOST_CLASSES else worst[:MOST_CLASSES]
    lines = [
        [escape(row["name"]), _or_none(row["found"]), f"{row['found']['n']:,}"] for row in shown
    ]
    rest = len(rows) - len(shown)
    return (
        "<h3>Examples of each class that are found</h3>"
        + table("share of each true class that is found", ["class", "found", "points"], lines)
        + (
            soft(f"The other {rest} classes, of which more are found, are in the JSON file.")
            if rest
            else ""
        )
    )


def _or_none(one: Values) -> str:
    return cell(one, share=True) if one["n"] else "no example among the held-out points"


def _chance(p: float) -> str:
    return "&lt; 0.001" if p < 0.001 else f"{p:.3f}"


def _flag(row: Values) -> str:
    if not row["found"]:
        return ""
    return f'<span class="flag">▲ {"too sure" if row["too_sure"] else "not sure enough"}</span>'


def others_section(values: Values) -> str:
    """Write how other data differ, with histograms."""
    found = values["others"]
    if not found:
        return ""
    rows, charts = [], []
    for name, kinds in found.items():
        for kind in ("uncertainty", "novelty"):
            if kind not in kinds:
                continue
            one = kinds[kind]
            pair = [number(m["value"]) for m in one["means"]]
            rows.append(
                [
                    f"{escape(name)}, {kind}",
                    *(cell(one[k], share=k == "fpr95") for k in ("auroc", "fpr95")),
                    *pair,
                    f"{kinds['n']:,}",
                ]
            )
        charts += [_histogram(name, k, kinds[k]) for k in ("uncertainty", "novelty") if k in kinds]
    labels = values["task"] == "classes"
    what = (
        "the entropy of the classes (nats)"
        if labels
        else "the predicted deviation"
        + " in units of the targets', averaged" * (len(values["names"]) > 1)
    )
    words = f"""Uncertainty is {what}; novelty is the share of the prior variance that the training data
        leave open at a point. AUROC is the probability that another point has a higher score than a
        held-out one (1 is perfect, ½ is chance). FPR95 is the share of the other points that would pass a
        threshold that 95 % of held-out points pass (0 is perfect, 95 % is chance)."""
    sure = [
        f"On {name} the most probable class has {percent(kinds['confidence']['value'])} on average."
        for name, kinds in found.items()
        if "confidence" in kinds
    ]
    head = ["data, score", "AUROC", "FPR95", "mean, held-out", "mean, other", "points"]
    return section(
        "others",
        "Other data: does it notice?",
        text(words),
        table("detection of other data", head, rows),
        f'<div class="charts">{"".join(charts)}</div>',
        soft(" ".join(sure)) if sure else "",
    )


def _histogram(name: str, kind: str, one: Values) -> str:
    edges, shares = one["edges"], one["shares"]
    chart = Chart(
        f"Histograms of the {kind} of held-out points and of {name}, AUROC {one['auroc']['value']:.3f}.",
        *(f"{kind}", "share of points", (edges[0], edges[-1]), (0, 1.05 * max(map(max, shares)))),
    )
    for style, heights, label in zip("ab", shares, ("held-out", name), strict=True):
        chart.bars(edges, heights, style, label)
    return chart.html()


def guarantee_section(values: Values) -> str:
    """Write the width or the size that a guarantee of 90 % costs."""
    found = values["guarantee"]
    title = "A guarantee, and what it costs"
    words = """A conformal promise covers new targets with probability 90 % or more, on average and for data
        like the held-out set, however wrong the posterior is (`net2gp.conformal`)."""
    if "outputs" not in found and "sets" not in found:
        text_ = (
            f"{words} It takes at least nine points to calibrate; half of the held-out points are "
        )
        return section("guarantee", title, text(text_ + f"{found['calibrated_on']}."))
    words += f""" Here it was calibrated on a random half of the held-out points
        ({found["calibrated_on"]:,}) and measured on the other half."""
    if "sets" in found:
        rows, notes = [], []
        for one in found["sets"]:
            level = percent(one["level"], 0)
            rows.append(
                [
                    f"most probable classes up to {level}",
                    *_pair(one, "plain_coverage", "plain_size"),
                ]
            )
            rows.append([f"conformal sets of {level}", *_pair(one, "coverage", "size")])
            notes.append(
                f"Conformal sets of {level} hold each class of probability {number(one['least'])} or more; "
                f"{percent(one['empty']['value'])} of them are empty."
            )
        notes.append(
            "A set is empty where the most probable class alone is right more often than needed."
        )
        body = table("sets of classes", ["", "hold the label", "mean size"], rows)
        body += soft(" ".join(notes))
        return section("guarantee", title, text(words), body)
    rows = []
    for one in found["outputs"]:
        name = escape(one["name"])
        rows.append([f"{name}: posterior", *_pair(one, "plain_coverage", "plain_width"), ""])
        times = f"× {number(one['ratio'])}"
        rows.append([f"{name}: conformal", *_pair(one, "coverage", "width"), times])
    head = ["90 % intervals", "contain the target", "mean width", "ratio"]
    return section("guarantee", title, text(words), table("widths of intervals", head, rows))


def _pair(one: Values, share: str, size: str) -> list[str]:
    return [cell(one[share], share=True, n=True), cell(one[size])]
