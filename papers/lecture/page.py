"""The figures of the lecture on Bayesian networks as one page.

    python papers/lecture/page.py --out DIR [--quick] [--only TOPIC ...] [--list]

Runs every topic, writes its figure and one HTML page with all of them into the folder, prints the claims, and
exits with 0 if all of them hold. To add a figure, write a function from `quick` to a `Study` and put it into
`TOPICS`.
"""

from __future__ import annotations

import argparse
import base64
from html import escape
from pathlib import Path
from time import perf_counter

import bayes_or_descent
import capacity
import claims
import conditions
import double_descent
import dropout
import ensembles
import evidence_ranks
import features
import finite_width
import gp_or_network
import gp_to_network
import harder_data
import inference
import maximum_likelihood
import minima
import ntk_depth
import priors
import torch
from common import Study, Topic, write

TOPICS: list[Topic] = [
    *maximum_likelihood.TOPICS,
    *minima.TOPICS,
    *capacity.TOPICS,
    *double_descent.TOPICS,
    *inference.TOPICS,
    *priors.TOPICS,
    *dropout.TOPICS,
    *ensembles.TOPICS,
    *conditions.TOPICS,
    *finite_width.TOPICS,
    *gp_to_network.TOPICS,
    *features.TOPICS,
    *ntk_depth.TOPICS,
    *bayes_or_descent.TOPICS,
    *gp_or_network.TOPICS,
    *evidence_ranks.TOPICS,
    *harder_data.TOPICS,
]

TITLE = "Bayesian networks, in figures"

LEAD = """From one minimum of the loss to many, from overfitting to priors, and from networks to Gaussian
processes. Each figure comes from a program that checks what it claims; the tables below the figures say
what was claimed and what was found."""

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


def section(study: Study, picture: Path, topic: str) -> str:
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
        f"<p><code>python papers/lecture/page.py --only {topic}</code></p>"
        f'<img width="{width}" alt="{escape(study.title)}" src="data:image/png;base64,{image}">'
        f"{f'<pre>{escape(study.table)}</pre>' if study.table else ''}"
        f"<table><tr><th>claim</th><th>found</th><th>holds</th></tr>{rows}</table></section>"
    )


def html(sections: list[tuple[Study, str]], seconds: float) -> str:
    """The page."""
    links = "".join(f'<a href="#{s.name}">{escape(s.title)}</a>' for s, _ in sections)
    body = "\n".join(text for _, text in sections)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{TITLE}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>'
        f"<body><main><header><h1>{TITLE}</h1><p>{escape(LEAD)}</p></header><nav>{links}</nav>{body}"
        f"<footer>Written with PyTorch {torch.__version__} in {seconds:.0f} seconds.</footer>"
        "</main></body></html>"
    )


def main(arguments: list[str] | None = None) -> int:
    """Run all topics, or those that are named, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder of the page")
    parser.add_argument("--quick", action="store_true", help="smaller sizes")
    parser.add_argument("--only", nargs="*", help="names of topics, such as descent")
    parser.add_argument(
        "--list", action="store_true", help="print the names of the topics, and end"
    )
    options = parser.parse_args(arguments)
    names = {topic.__name__ for topic in TOPICS}
    if options.list:
        for topic in TOPICS:
            print(f"{topic.__name__:<20}{(topic.__doc__ or '').splitlines()[0]}")
        return 0
    unknown = set(options.only or ()) - names
    if unknown:
        parser.error(f"there is no topic {sorted(unknown)}: choose from {sorted(names)}")
    start, good, sections = perf_counter(), True, []
    for topic in TOPICS:
        if options.only and topic.__name__ not in options.only:
            continue
        began = perf_counter()
        study = topic(options.quick)
        picture = write(study, options.out)
        print(f"{picture} ({perf_counter() - began:.0f} s)")
        good = claims.judge(study.claims) and good
        print(flush=True)
        sections.append((study, section(study, picture, topic.__name__)))
    path = options.out / "index.html"
    path.write_text(html(sections, perf_counter() - start), encoding="utf-8")
    print(path)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
