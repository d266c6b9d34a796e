"""The sections about parts of the data and single points."""

from __future__ import annotations

from html import escape
from typing import Any

from net2gp.report.uncertainty.pages.drawing import Chart
from net2gp.report.uncertainty.pages.parts import cell, section, soft, table, text
from net2gp.report.uncertainty.pages.pictures import Pictures
from net2gp.report.uncertainty.pages.words import number, percent

MOST_ROWS = 12
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
    also = "the predicted classes and the" if labels else "the"
    words = f"""On one random half of the held-out points ({found["looked_at"]:,}) a shallow tree
        looked for the parts with the worst calibration. These, {also} quarters of each column of a table
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
    if found["classes"]:
        lines = [
            [escape(row["name"]), _or_none(row["found"]), f"{row['found']['n']:,}"]
            for row in found["classes"]
        ]
        parts.append("<h3>Examples of each class that are found</h3>")
        parts.append(
            table("share of each true class that is found", ["class", "found", "points"], lines)
        )
    return section("slices", "Slices: where is it worse than it says?", *parts)


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
        else "the predicted deviation in units of the targets'"
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


def cases_section(values: Values, pictures: Pictures) -> str:
    """Write the sure and wrong and the unsure and right, with the training points that pull them."""
    found, labels = values["cases"], values["task"] == "classes"
    titles = {
        "sure_and_wrong": "Sure and wrong" if labels else "Farthest out, in predicted deviations",
        "unsure_and_right": "Unsure and right" if labels else "Unsure and close",
    }
    parts = []
    if found["without_pulls"] is None:
        where = "where a plus pulls the prediction up and a minus down"
        words = f"""Below each are the training points that pull the most: the largest terms k(x, x_n) α_n of
            the sum that the mean is, with the residual α_n of target n,
            {"towards the class that was said" if labels else where}."""
        parts.append(text(words))
    else:
        parts.append(text(f"Training points behind these are not shown: {found['without_pulls']}"))
    for kind, title in titles.items():
        parts.append(f"<h3>{title}</h3>")
        items = [_case(values, case, pictures) for case in found[kind]]
        rows = "" if pictures.are_images else " rows"
        parts.append(
            f'<ul class="tiles{rows}">{"".join(items)}</ul>' if items else text("There are none.")
        )
    return section("cases", "Cases: what does that look like?", *parts)


def _case(values: Values, case: Values, pictures: Pictures) -> str:
    names = values["names"]
    if values["task"] == "classes":
        words = f"says <b>{escape(names[case['said']])}</b> with {_sure(case['probability'])}"
        if case["said"] != case["is"]:
            words += f", is <b>{escape(names[case['is']])}</b>"
    else:
        name = escape(names[case["output"]])
        words = (
            f"{name}: says <b>{number(case['said'])}</b> ± {number(case['spread'])}, is "
            f"<b>{number(case['is'])}</b> ({number(case['off'])} deviations)"
        )
    pulls = "".join(
        f"<li>{pictures.known.get(p['index'], '')} {_target(values, p['y'])} {_signed(p['pull'])}</li>"
        for p in case["pulls"]
    )
    shown = pictures.held_out.get(case["index"], "")
    return f"<li>{shown}<div>{words}</div>{f'<ul class=pulls>{pulls}</ul>' if pulls else ''}</li>"


def _sure(probability: float) -> str:
    return percent(probability) if probability < 0.9995 else f"more than {percent(0.999)}"


def _target(values: Values, y: Any) -> str:
    if values["task"] == "classes":
        return escape(values["names"][int(y)])
    return "y = " + (", ".join(number(v) for v in y) if isinstance(y, list) else number(y))


def _signed(value: float) -> str:
    return ("+" if value > 0 else "") + number(value)


def labels_section(values: Values, pictures: Pictures) -> str:
    """Write the training targets that all other data speak against."""
    found, labels = values["label_errors"], values["task"] == "classes"
    title = "Suspected labels in the training data"
    if "reason" in found:
        return section("labels", title, text(f"Not available here: {found['reason']}"))
    words = f"""Each of the {found["looked_at"]:,} training points that fit the worst (of {found["n"]:,}) was
        left out in closed form and predicted by all others. {found["suspected"]:,} of them """
    words += (
        "have a label to which the others give less than 1 %. Some are right and rare; look at them."
        if labels
        else "lie farther out than a single one of the data set should (5 %, corrected for their number)."
    )
    items = [
        f"<li>{pictures.known.get(row['index'], '')}<div>training point {row['index']}: "
        f"{_suspicion(values, row)}</div></li>"
        for row in found["rows"]
    ]
    rows = "" if pictures.are_images else " rows"
    return section(
        "labels",
        title,
        text(words),
        f'<ul class="tiles{rows}">{"".join(items)}</ul>' if items else "",
    )


def _suspicion(values: Values, row: Values) -> str:
    names = values["names"]
    if values["task"] == "classes":
        return (
            f"labeled <b>{escape(names[row['is']])}</b> ({percent(row['p'], 2)}), the others say "
            f"<b>{escape(names[row['said']])}</b> with {_sure(row['probability'])}"
        )
    return (
        f"{escape(names[row['output']])} = <b>{number(row['is'])}</b>, the others say "
        f"{number(row['said'])} ± {number(row['spread'])}"
    )


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
