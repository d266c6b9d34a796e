"""The page: the verdict first, then what was done, then the evidence, then the limits."""

from __future__ import annotations

from html import escape
from typing import Any

from net2gp.report.page import STYLE as PLAIN
from net2gp.report.uncertainty.pages.found import (
    guarantee_section,
    others_section,
    slices_section,
)
from net2gp.report.uncertainty.pages.measured import calibration_section, refusing_section
from net2gp.report.uncertainty.pages.parts import facts, section, soft, text
from net2gp.report.uncertainty.pages.pictures import Pictures
from net2gp.report.uncertainty.pages.points import cases_section, labels_section
from net2gp.report.uncertainty.pages.style import SCRIPT, STYLE
from net2gp.report.uncertainty.pages.words import number, percent

Values = dict[str, Any]
MENU = {
    "verdict": "Verdict",
    "done": "What was done",
    "calibration": "Calibration",
    "refusing": "Refusing",
    "slices": "Slices",
    "others": "Other data",
    "cases": "Cases",
    "labels": "Labels",
    "guarantee": "Guarantee",
    "limits": "Limits",
}
CARDS = {
    "classes": (
        ("accuracy", "right"),
        ("confidence", "mean confidence"),
        ("ece", "ECE"),
        ("nll", "log loss"),
    ),
    "numbers": (
        ("coverage90", "in 90 % intervals"),
        ("rmse", "RMSE"),
        ("width90", "width of 90 %"),
        ("nll", "log loss"),
    ),
}
TONES = {"good": "✓", "warn": "▲", "plain": "•"}


def assembled(values: Values, pictures: Pictures) -> str:
    """Write the page.

    Args:
        values: The values of the report.
        pictures: The points that it shows.

    Returns:
        HTML that needs nothing else.
    """
    sections = [
        _verdict(values),
        _done(values),
        calibration_section(values),
        refusing_section(values),
        slices_section(values),
        others_section(values),
        cases_section(values, pictures),
        labels_section(values, pictures),
        guarantee_section(values),
        _limits(values),
    ]
    body = "\n".join(part for part in sections if part)
    links = "".join(
        f'<li><a href="#{name}">{title}</a></li>'
        for name, title in MENU.items()
        if f'<section id="{name}">' in body
    )
    kind = "labels" if values["task"] == "classes" else "numbers"
    lead = (
        f"A report on {values['n']:,} held-out points with {kind} that the posterior had not seen."
    )
    return _PAGE.format(
        title=escape(values["title"]),
        style=f"{PLAIN}\n{STYLE}",
        lead=text(lead),
        links=links,
        body=body,
        script=SCRIPT,
        versions=escape(", ".join(f"{k} {v}" for k, v in values["facts"]["versions"].items())),
        seconds=f"{values['seconds']:g}",
    )


def _verdict(values: Values) -> str:
    lines = "".join(_sentence(**line) for line in values["verdict"])
    cards = []
    for name, title in CARDS[values["task"]]:
        one = values["scores"][name]
        share = name in ("accuracy", "confidence", "coverage90")
        write = percent if share else number
        ends = "" if one["low"] is None else f"{write(one['low'])} to {write(one['high'])}"
        cards.append(
            f"<div><dt>{title}</dt><dd>{write(one['value'])}<small>{ends}</small></dd></div>"
        )
    return section(
        "verdict",
        "Verdict",
        f'<ul class="verdict">{lines}</ul>',
        f'<dl class="cards">{"".join(cards)}</dl>',
    )


def _sentence(tone: str, says: str) -> str:
    mark = f'<b aria-hidden="true">{TONES[tone]}</b>'
    return f'<li class="{tone}">{mark}{escape(says, quote=False)}</li>'


def _done(values: Values) -> str:
    known = values["facts"]
    names = {
        "network": "network",
        "kernel": "kernel",
        "P": "parameters",
        "structure": "structure",
        "likelihood": "likelihood",
        "prior_var": "prior variance",
        "noise_var": "noise variance",
        "noise_std": "standard deviation of the noise",
        "log_evidence": "log evidence",
        "N": "training points",
        "C": "outputs",
        "method": "method",
        "members": "members",
        "solver": "solver",
        "inference": "inference",
        "temperature": "temperature",
        "held_out": "held-out data",
    }
    pairs = [(title, str(known[name])) for name, title in names.items() if name in known]
    hashes = [(f"{name}, SHA-256", value) for name, value in known["hashes"].items()]
    if values["warnings"]:
        said = "".join(f"<li>{escape(words)}</li>" for words in values["warnings"])
        warned = f"<h3>Warnings while the report was made</h3><ul>{said}</ul>"
    else:
        warned = soft("No warning was given while the report was made.")
    command = values["command"]
    again = (
        f"<h3>Make it again</h3><pre><code>{escape(command)}</code></pre>"
        if command
        else soft("Make it again with net2gp.report.uncertainty_report(posterior, held_out).")
    )
    more = f"<details><summary>Fingerprints of the data and the network</summary>{facts(hashes)}</details>"
    return section("done", "What was done", facts(pairs), more, warned, again)


def _limits(values: Values) -> str:
    lines = "".join(f"<li>{escape(words, quote=False)}</li>" for words in values["limits"])
    return section("limits", "Limits", f"<ul>{lines}</ul>")


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
{style}
</style>
</head>
<body>
<main>
<header>
<h1>{title}</h1>
{lead}
</header>
<nav aria-label="Parts of the report"><ul>{links}</ul></nav>
{body}
<footer>
<p>Written in {seconds} s by {versions}. This page needs no network; its numbers are in the JSON file
beside it.</p>
</footer>
</main>
<script>
{script}
</script>
</body>
</html>
"""
