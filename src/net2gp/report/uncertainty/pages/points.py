"""The sections about single points: images as tiles, rows of a table as rows."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any

from net2gp.report.uncertainty.pages.parts import section, table, text
from net2gp.report.uncertainty.pages.pictures import Pictures
from net2gp.report.uncertainty.pages.words import number, percent

Values = dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """A point with what is said about it.

    Args:
        name: What the point is called.
        shown: Its image, or the cells of its row.
        words: HTML about it.
        pulls: The points that pull it.
    """

    name: str
    shown: list[str]
    words: str
    pulls: tuple[Entry, ...] = ()


def cases_section(values: Values, pictures: Pictures) -> str:
    """Write the sure and wrong and the unsure and right, with the training points that pull them."""
    found, labels = values["cases"], values["task"] == "classes"
    titles = {
        "sure_and_wrong": "Sure and wrong" if labels else "Farthest out, in predicted deviations",
        "unsure_and_right": "Unsure and right" if labels else "Unsure and close",
    }
    words = f"Training points behind these are not shown: {found['without_pulls']}"
    if found["without_pulls"] is None:
        where = "where a plus pulls the prediction up and a minus down"
        words = f"""Below each are the training points that pull the most: the largest terms k(x, x_n) α_n of
            the sum that the mean is, with the residual α_n of target n,
            {"towards the class that was said" if labels else where}. Each has its share of the sizes of all
            terms that were looked at."""
    parts = [text(words)]
    for kind, title in titles.items():
        entries = [_case(values, case, pictures) for case in found[kind]]
        parts += [f"<h3>{title}</h3>", _entries(title, entries, pictures.columns)]
    return section("cases", "Cases: what does that look like?", *parts)


def _case(values: Values, case: Values, pictures: Pictures) -> Entry:
    names = values["names"]
    if values["task"] == "classes":
        words = f"says <b>{escape(names[case['said']])}</b> with {_sure(case['probability'])}"
        if case["said"] != case["is"]:
            words += f", is <b>{escape(names[case['is']])}</b>"
    else:
        words = f"{_said(names, case)}, is <b>{number(case['is'])}</b> ({number(case['off'])} deviations)"
    pulls = tuple(
        Entry(
            f"training {pull['index']}",
            pictures.known.get(pull["index"], []),
            f"{_target(values, pull['y'])}, {_share(pull['share'])}",
        )
        for pull in case["pulls"]
    )
    shown = pictures.held_out.get(case["index"], [])
    return Entry(f"held-out {case['index']}", shown, words, pulls)


def _said(names: list[str], line: Values) -> str:
    name = f"{escape(names[line['output']])}: " if len(names) > 1 else ""
    return f"{name}says <b>{number(line['said'])}</b> ± {number(line['spread'])}"


def _sure(probability: float) -> str:
    return percent(probability) if probability < 0.9995 else f"more than {percent(0.999)}"


def _share(share: float) -> str:
    return f"{'+' if share > 0 else '−'}{percent(abs(share), 0)}"


def _target(values: Values, y: Any) -> str:
    if values["task"] == "classes":
        return escape(values["names"][int(y)])
    return "y = " + (", ".join(number(v) for v in y) if isinstance(y, list) else number(y))


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
    entries = [
        Entry(
            f"training {row['index']}",
            pictures.known.get(row["index"], []),
            _suspicion(values, row),
        )
        for row in found["rows"]
    ]
    return section(
        "labels", title, text(words), _entries(title, entries, pictures.columns) if entries else ""
    )


def _suspicion(values: Values, row: Values) -> str:
    names = values["names"]
    if values["task"] == "numbers":
        return f"is <b>{number(row['is'])}</b>, of the others {_said(names, row)}"
    return (
        f"labeled <b>{escape(names[row['is']])}</b> ({percent(row['p'], 2)}), the others say "
        f"<b>{escape(names[row['said']])}</b> with {_sure(row['probability'])}"
    )


def _entries(label: str, entries: list[Entry], columns: list[str]) -> str:
    """Rows of a table if points have columns, else tiles."""
    if not entries:
        return text("There are none.")
    if not columns:
        return f'<ul class="tiles">{"".join(_tile(entry) for entry in entries)}</ul>'
    rows = []
    for entry in entries:
        rows.append([entry.name, entry.words, *entry.shown])
        rows += [[f"↳ {pull.name}", pull.words, *pull.shown] for pull in entry.pulls]
    return table(label, ["point", "prediction, or target and pull", *columns], rows)


def _tile(entry: Entry) -> str:
    pulls = "".join(
        f"<li>{''.join(pull.shown) or pull.name} {pull.words}</li>" for pull in entry.pulls
    )
    below = f'<ul class="pulls">{pulls}</ul>' if pulls else ""
    return f"<li>{''.join(entry.shown)}<div>{entry.name}: {entry.words}</div>{below}</li>"
