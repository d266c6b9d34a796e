"""For the docs build: the page of reproductions, made from what was recorded of their runs."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from net2gp.report.atlas import READING, counts, made, said, summary_rows, table
from net2gp.report.page import Table
from net2gp.report.papers import list_papers
from net2gp.report.records import read_records
from net2gp.report.reproductions import Paper, PaperResult

PLACE, SUMMARY = "<!-- atlas -->", "<!-- reproductions -->"


def on_page_markdown(markdown: str, page: Any, **others: Any) -> str:
    """Put the tables on the page of the atlas, and the first of them on that of reproductions."""
    if page.file.src_uri == "atlas.md":
        return markdown.replace(PLACE, sections(list_papers(), read_records()))
    if page.file.src_uri == "reproductions.md":
        return markdown.replace(SUMMARY, summary(list_papers(), read_records(), "atlas.md"))
    return markdown


def sections(papers: Sequence[Paper], results: Sequence[PaperResult]) -> str:
    """What ran, and all of what it found, as Markdown."""
    parts = ["## What ran", counts(papers, results), READING, summary(papers, results)]
    for paper in papers:
        parts += [f"## {paper.name}", f"{paper.title}."]
        parts += [f"Where the expected numbers are from: {paper.source}"]
        parts += [part for one in results if one.paper == paper for part in run(one)]
    return "\n\n".join(parts)


def run(result: PaperResult) -> list[str]:
    """One run: how it was made, what came, the rows, and behind them all that was printed."""
    return [
        f"### {result.paper.name}, {result.kind}",
        made(result),
        *filter(None, [said(result)]),
        f"{result.outcome[0].upper()}{result.outcome[1:]}.",
        html(table(result)),
        "<details><summary>What the program printed</summary>"
        f"<pre>{escape(result.printed)}</pre></details>",
    ]


def summary(papers: Sequence[Paper], results: Sequence[PaperResult], page: str = "") -> str:
    """A line for each reproduction and kind of run, with a link to its section."""
    lines = ["| | run | as expected | date (UTC) | seconds |", "|---|---|---|---|---:|"]
    for name, kind, outcome, date, seconds in summary_rows(papers, results):
        short, _, title = name.partition(": ")
        kind = f"`{kind}`" if "--" in kind else kind
        cells = f"[{short}]({page}#{short}): {title}", kind, outcome, date, seconds
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)


def html(rows: Table) -> str:
    """A table as HTML, where no character of a name is markup."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows.head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n"
        for row in rows.rows
    )
    rows_of_head = f"<thead><tr>{head}</tr></thead>"
    return f'<div class="atlas">\n<table>{rows_of_head}\n<tbody>{body}</tbody></table></div>'
