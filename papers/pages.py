"""Pages of figures with claims: what the programs of a topic share, and one HTML page of all of them."""

from __future__ import annotations

import argparse
import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from time import perf_counter

import matplotlib

matplotlib.use("Agg")

import claims
import findings
import torch
from claims import Claim
from matplotlib.axes import Axes
from matplotlib.figure import Figure

WIDTH = 4.2
"""Inches per panel of a figure."""

STYLE = """
:root { color-scheme: light; }
body { margin: 0; background: #fff; color: #1d2329; line-height: 1.55;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 66rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
header { border-left: 4px solid #0072b2; padding-left: 1.1rem; margin-bottom: 2rem; }
header p { color: #5b6670; font-size: 1.1rem; max-width: 46rem; }
nav a { margin-right: 1rem; color: #0072b2; }
section { padding: 1.5rem 0; border-top: 1px solid #dfe3e7; }
section p { max-width: 48rem; }
img { display: block; max-width: 100%; height: auto; }
table { border-collapse: collapse; font-size: 0.92rem; margin-top: 0.8rem; }
th, td { text-align: left; padding: 0.3rem 1.2rem 0.3rem 0; border-bottom: 1px solid #dfe3e7; }
td:nth-child(2) { font-variant-numeric: tabular-nums; }
code { background: #f4f6f8; padding: 0.1em 0.3em; border-radius: 4px; font-size: 0.88em; }
pre { font-size: 0.82rem; line-height: 1.35; overflow-x: auto; }
footer { border-top: 1px solid #dfe3e7; padding-top: 1rem; color: #5b6670; font-size: 0.9rem; }
"""


@dataclass(frozen=True, eq=False)
class Study:
    """A figure, what it shows, and the claims that were checked.

    A topic is a function from `quick` to a study; the `page.py` of a folder has the list of its topics.
    """

    name: str
    title: str
    text: str
    figure: Figure
    claims: tuple[Claim, ...]
    table: str = ""
    """Numbers in columns, for the terminal and the page."""


Topic = Callable[[bool], Study]


def tidy(ax: Axes) -> None:
    """Take away the frame's upper and right line."""
    ax.spines[["top", "right"]].set_visible(False)


def at_least(name: str, found: float, bound: float) -> Claim:
    """That a number is not smaller than a bound."""
    return Claim(f"{name}: at least {bound:g}", f"{found:.3g}", found >= bound)


def within(name: str, found: float, low: float, high: float) -> Claim:
    """That a number is between two others."""
    return Claim(f"{name}: from {low:g} to {high:g}", f"{found:.3g}", low <= found <= high)


def panels(count: int, height: float = 3.4) -> tuple[Figure, list]:
    """A row of axes, apart from pyplot's global state."""
    figure = Figure(figsize=(WIDTH * count, height), layout="constrained")
    axes = figure.subplots(1, count, squeeze=False)[0]
    return figure, list(axes)


def write(study: Study, out: Path, prefix: str) -> Path:
    """Write the figure of a study, and print its table."""
    if study.table:
        print(study.table)
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{prefix}_{study.name}.png"
    study.figure.savefig(path, dpi=160)
    return path


def run(
    topics: Sequence[Topic],
    description: str | None,
    prefix: str,
    arguments: list[str] | None = None,
) -> int:
    """The command line of a program: figures, a table of claims, and 0 if all of them hold."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder for the figures")
    parser.add_argument(
        "--quick", action="store_true", help="smaller sizes, seconds instead of minutes"
    )
    options = findings.parse(parser, arguments)
    good = True
    for topic in topics:
        study = topic(options.quick)
        print(write(study, options.out, prefix))
        findings.topic(study.title)
        good = claims.judge(study.claims) and good
    return 0 if good else 1


def section(study: Study, picture: Path, command: str) -> str:
    """The HTML of one topic, with its picture inside and the command that made it."""
    image = base64.b64encode(picture.read_bytes()).decode()
    width = int(100 * study.figure.get_figwidth())
    rows = "".join(
        f"<tr><td>{escape(c.name)}</td><td>{escape(c.found)}</td><td>{escape(c.verdict)}</td></tr>"
        for c in study.claims
    )
    pieces = study.text.split("`")
    text = "".join(
        f"<code>{escape(part)}</code>" if place % 2 else escape(part)
        for place, part in enumerate(pieces)
    )
    return (
        f'<section id="{study.name}"><h2>{escape(study.title)}</h2><p>{text}</p>'
        f"<p><code>{command}</code></p>"
        f'<img width="{width}" alt="{escape(study.title)}" src="data:image/png;base64,{image}">'
        f"{f'<pre>{escape(study.table)}</pre>' if study.table else ''}"
        f"<table><tr><th>claim</th><th>found</th><th>holds</th></tr>{rows}</table></section>"
    )


@dataclass(frozen=True)
class Page:
    """One HTML page of several topics.

    Args:
        title: The title.
        lead: What the page is about.
        command: The command that writes it.
        prefix: The start of the names of the figures' files.
        file: The name of the page's file.
    """

    title: str
    lead: str
    command: str
    prefix: str
    file: str = "index.html"

    def html(self, sections: list[tuple[Study, str]], seconds: float) -> str:
        """The page."""
        links = "".join(f'<a href="#{s.name}">{escape(s.title)}</a>' for s, _ in sections)
        body = "\n".join(text for _, text in sections)
        return (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{self.title}</title>'
            f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style>'
            f"</head><body><main><header><h1>{self.title}</h1><p>{escape(self.lead)}</p></header>"
            f"<nav>{links}</nav>{body}"
            f"<footer>Written with PyTorch {torch.__version__} in {seconds:.0f} seconds.</footer>"
            "</main></body></html>"
        )

    def main(
        self, topics: Sequence[Topic], description: str | None, arguments: list[str] | None
    ) -> int:
        """The command line: run all topics, or those that are named, and write the page."""
        parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
        parser.add_argument("--out", type=Path, default=Path("figures"), help="folder of the page")
        parser.add_argument("--quick", action="store_true", help="smaller sizes")
        parser.add_argument("--only", nargs="*", help="names of topics, such as descent")
        parser.add_argument(
            "--list", action="store_true", help="print the names of the topics, and end"
        )
        options = findings.parse(parser, arguments)
        names = {topic.__name__ for topic in topics}
        if options.list:
            for topic in topics:
                print(f"{topic.__name__:<20}{(topic.__doc__ or '').splitlines()[0]}")
            return 0
        unknown = set(options.only or ()) - names
        if unknown:
            parser.error(f"there is no topic {sorted(unknown)}: choose from {sorted(names)}")
        start, good, sections = perf_counter(), True, []
        for topic in topics:
            if options.only and topic.__name__ not in options.only:
                continue
            began = perf_counter()
            study = topic(options.quick)
            picture = write(study, options.out, self.prefix)
            print(f"{picture} ({perf_counter() - began:.0f} s)")
            findings.topic(study.title)
            good = claims.judge(study.claims) and good
            print(flush=True)
            sections.append(
                (study, section(study, picture, f"{self.command} --only {topic.__name__}"))
            )
        path = options.out / self.file
        path.write_text(self.html(sections, perf_counter() - start), encoding="utf-8")
        print(path)
        return 0 if good else 1
