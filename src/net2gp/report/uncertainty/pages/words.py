"""Sentences that follow from the values: the verdict, and the limits of what was done."""

from __future__ import annotations

from typing import Any

from net2gp.report.uncertainty.statistics import Estimate

FEW = 100
"""Held-out points below which the verdict says that there are few."""

NOTICED = 0.8
"""The area under the ROC curve from which other data count as noticed."""

MOST_PLACES = 3
"""Weak parts of the data that the verdict names."""

Values = dict[str, Any]
Sentence = dict[str, str]


def percent(value: float | None, digits: int = 1) -> str:
    """Write a share as a percentage.

    >>> percent(0.9123), percent(None)
    ('91.2\xa0%', '–')
    """
    if value is None:
        return "–"
    text = f"{100 * value:.{digits}f}"
    return f"{text}\u00a0%"


def number(value: float | None, digits: int = 3) -> str:
    """Write a number with three digits, or as many as are asked for.

    >>> number(0.012345), number(-12345.0), number(None)
    ('0.0123', '−12300', '–')
    """
    if value is None:
        return "–"
    text = f"{value:.{digits}g}"
    if "e" in text and 1e-5 < abs(value) < 1e7:
        text = f"{float(text):f}".rstrip("0").rstrip(".")
    return text.replace("-", "−")


def shown(one: Estimate, *, share: bool = False, n: bool = True) -> str:
    """Write a number with its interval and number of points.

    >>> shown({"value": 0.9, "low": 0.85, "high": 0.94, "n": 200}, share=True)
    '90.0\xa0% (85.0–94.0, n\xa0=\xa0200)'
    """
    if one["value"] is None:
        return "–"
    write = (lambda v: percent(v)[:-2]) if share else number
    ends = [one["low"], one["high"]]
    parts = [] if None in ends else ["–".join(write(v) for v in ends)]
    parts += [f"n\u00a0=\u00a0{one['n']:,}"] if n else []
    text = percent(one["value"]) if share else number(one["value"])
    return f"{text} ({', '.join(parts)})" if parts else text


def verdict(values: Values) -> list[Sentence]:
    """Say what the values mean, the most important first.

    Args:
        values: The values of a report.

    Returns:
        Sentences, each with a tone: "good", "warn", or "plain".
    """
    lines = _right(values) if values["task"] == "classes" else _covered(values)
    lines += [*_refusing(values), *_beside(values), *_distrust(values)]
    if values["n"] < FEW:
        text = (
            f"These are only {values['n']} held-out points, which is few: the intervals are wide, "
        )
        lines.insert(0, _say("warn", text + "and weak parts of the data can hardly be found."))
    if values["constant"]:
        text = f"All held-out targets are equal ({', '.join(values['constant'])}): this says little about "
        lines.insert(0, _say("warn", text + "errors elsewhere."))
    if values["known_points"]:
        text = f"{values['known_points']} of the held-out points are also training points, so that "
        lines.insert(0, _say("warn", text + "all numbers flatter the posterior. Take them out."))
    return lines


def _say(tone: str, text: str) -> Sentence:
    return {"tone": tone, "says": text}


def _right(values: Values) -> list[Sentence]:
    score = values["scores"]
    right, sure = score["accuracy"], score["confidence"]
    text = f"On data like the held-out set the most probable class is right in {shown(right, share=True)} of "
    text += f"cases, and the posterior is {percent(sure['value'])} sure on average. "
    own = values["compared"]["posterior"]
    if own["ece"]["value"] > own["ece_if_right"]:
        text += (
            f"Its confidence is off by {number(own['ece']['value'])} on average (ECE), where right "
        )
        text += f"probabilities would hardly exceed {number(own['ece_if_right'])}. "
    if sure["value"] > right["high"]:
        return [_say("warn", text + "It is surer than it should be.")]
    if sure["value"] < right["low"]:
        return [_say("warn", text + "It is less sure than it could be.")]
    if own["ece"]["value"] > own["ece_if_right"]:
        return [_say("warn", text + "It is too sure in some cases and not sure enough in others.")]
    return [_say("good", text + "Its confidence fits.")]


def _covered(values: Values) -> list[Sentence]:
    inside = values["scores"]["coverage90"]
    text = f"On data like the held-out set, 90 % intervals contain {shown(inside, share=True)} of targets. "
    if inside["high"] < 0.9:
        tone, end = "warn", "They are too narrow."
    elif inside["low"] > 0.9:
        tone, end = "warn", "They are wider than they need to be."
    else:
        tone, end = "good", "This agrees with what they say."
    return [_say(tone, text + end)]


def _refusing(values: Values) -> list[Sentence]:
    rows = values["refusing"]["rows"]
    whole, tenth = rows["0"], rows["10"]
    share = values["task"] == "classes"
    several = len(values["names"]) > 1
    of = "error rate" if share else "RMSE" + " in units of the targets' deviations" * several
    if not whole["value"]:
        return [_say("good", f"There is no error among the held-out points (n = {values['n']:,}).")]
    ratio = tenth["value"] / whole["value"]
    text = f"Refusing the 10 % least certain {_ratio(ratio)}: the {of} goes from "
    text += f"{shown(whole, share=share)} to {shown(tenth, share=share)}"
    removed, gain = values["refusing"]["removed"], values["refusing"]["gain"]
    helps = gain["low"] is not None and gain["low"] > 0
    if removed is not None:
        text += f", as {shown(removed, share=True, n=False)} of the {removed['n']} errors are among them"
        helps = removed["low"] > 0.1
    if helps:
        return [_say("good", text + ".")]
    return [_say("warn", text + ". Refusing points at random may do as well.")]


def _ratio(ratio: float) -> str:
    """The words for what is left of an error.

    >>> _ratio(0.5), _ratio(0.97)
    ('halves the error', 'hardly changes the error')
    """
    names = [
        (0.02, "removes all errors"),
        (0.27, "takes away three quarters of the error or more"),
        (0.45, "more than halves the error"),
        (0.55, "halves the error"),
        (0.72, "takes away a third of the error or more"),
        (0.95, "reduces the error"),
        (1.05, "hardly changes the error"),
    ]
    return next((words for limit, words in names if ratio <= limit), "increases the error")


def called(values: Values, name: str) -> str:
    """Name a prediction: around a network, the mean is the network itself."""
    if not values["around_network"]:
        return name
    return name.replace("mean alone", "bare network").replace("mean with", "network with")


def _beside(values: Values) -> list[Sentence]:
    compared = values["compared"]
    own = compared["posterior"]["nll"]
    others = {n: v["nll"] for n, v in compared.items() if n != "posterior"}
    if not others or own["value"] is None:
        return []
    beaten = {n: v for n, v in values["differences"].items() if v["low"] is not None}
    better = [called(values, n) for n, v in beaten.items() if v["low"] > 0]
    worse = [called(values, n) for n, v in beaten.items() if v["high"] < 0]
    text = f"Its log loss is {shown(own)}; "
    text += (
        "; ".join(f"the {called(values, n)} has {number(v['value'])}" for n, v in others.items())
        + ". "
    )
    if worse:
        return [_say("warn", text + f"Better on these points: the {' and the '.join(worse)}.")]
    if better:
        return [_say("good", text + f"It predicts better than the {' and the '.join(better)}.")]
    return [_say("plain", text + "The differences are within chance.")]


def _distrust(values: Values) -> list[Sentence]:
    places = []
    for row in values["slices"]["rows"]:
        if row["found"] and row["too_sure"]:
            real = shown(row["is"], share=True)
            says = f"{percent(row['said'])} sure, right in {real}"
            if values["task"] == "numbers":
                says = f"90 % intervals contain {real}"
            places.append(f"where {row['name']} ({says})")
    places, more = places[:MOST_PLACES], len(places[MOST_PLACES:])
    if more:
        parts = "one more part" if more == 1 else f"{more} more parts"
        places.append(f"on {parts} of the data, see Slices")
    missing = [row["name"] for row in values["slices"]["classes"] if row["found"]["n"] == 0]
    if missing:
        names = ", ".join(missing[:MOST_PLACES])
        names += f" and {len(missing) - MOST_PLACES} more" if len(missing) > MOST_PLACES else ""
        kind = "class" if len(missing) == 1 else "classes"
        places.append(f"on {kind} {names}, of which there is no held-out example")
    for name, kinds in values["others"].items():
        best = max(
            (v["auroc"] for k, v in kinds.items() if k in ("uncertainty", "novelty")), key=_value
        )
        if best["value"] < NOTICED:
            places.append(
                f"on {name}, which it hardly tells from held-out data (AUROC {shown(best)})"
            )
    if places:
        return [_say("warn", "Do not trust it " + "; ".join(places) + ".")]
    tests = values["slices"]["tests"]
    if tests:
        text = (
            f"On none of {tests} parts of the data that were tested is it surer than right, after "
        )
        return [_say("good", text + "correction for the number of tests.")]
    return [_say("plain", "There are too few points to look for weak parts of the data.")]


def _value(one: Estimate) -> float:
    return float(one["value"] or 0.0)


def limits(values: Values) -> list[str]:
    """Say what the report cannot know.

    Args:
        values: The values of a report.

    Returns:
        Sentences.
    """
    found = [
        "All numbers are about data like the held-out set. If the world changes, they no longer hold; a "
        "report on new data with targets is the only check.",
        "Intervals in brackets contain what they are for in 95 % of cases, each by itself, if the held-out "
        "points are independent draws. Points that belong together (frames of a film, visits of a patient) "
        "make them too narrow.",
        "If the held-out points were used to choose the network, the prior or the stopping time, the "
        "numbers are too good.",
        "A posterior is right about inputs that resemble its data. Novelty and entropy catch some strange "
        "inputs and not others, and say nothing about inputs that were made to deceive.",
    ]
    if values["task"] == "classes":
        found.append(
            "Most of the log loss of a classifier that is rarely wrong comes from its few errors. With fewer "
            "than about ten of them, the interval of the log loss is too narrow."
        )
    structure = values["facts"].get("structure", "")
    if "LastLayer" in structure:
        found.append(
            "Only the last layer is uncertain here; all layers before it are taken as known, so that inputs "
            "whose features look familiar look familiar."
        )
    if any(name in structure for name in ("Diagonal", "Kron", "LowRank", "Subnetwork")):
        found.append(
            f"The covariance of the parameters is an approximation ({structure}); between and beyond the "
            "data its variances may be off by a factor."
        )
    if "network" in values["facts"]:
        found.append(
            "The network is linearized around its parameters. Other networks that fit the data as well, far "
            "from this one, are not part of the posterior; an ensemble would have some of them."
        )
    if values.get("drawn"):
        found.append(
            "The law of a target has no closed form here, so its quantiles come from 999 draws, and counts "
            "that equal the target are divided at random."
        )
    return found
