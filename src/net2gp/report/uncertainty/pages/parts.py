"""Pieces of HTML that the sections share: tables, lists, facts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from net2gp.report.page import paragraphs
from net2gp.report.uncertainty.pages.words import number, percent
from net2gp.report.uncertainty.statistics import Estimate


def section(name: str, title: str, *parts: str) -> str:
    """Put parts under a heading that the menu links to."""
    body = "\n".join(filter(None, parts))
    return f'<section id="{name}">\n<h2>{escape(title)}</h2>\n{body}\n</section>'


def text(words: str) -> str:
    """Write paragraphs."""
    return paragraphs(words)


def soft(words: str) -> str:
    """Write a remark."""
    return f'<p class="soft">{escape(words, quote=False)}</p>'


def table(label: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a table that scrolls by itself where it is too wide, also by keyboard.

    Args:
        label: What the table holds, for readers who jump to it.
        head: The names of the columns.
        rows: Cells as HTML; the first names the row.

    Returns:
        HTML.

    >>> '<th scope="row">one</th><td>2</td>' in table("numbers", ["", "n"], [["one", "2"]])
    True
    """
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    lines = "\n".join(_row(row) for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}"><table>'
        f"<thead><tr>{top}</tr></thead>\n<tbody>{lines}</tbody></table></div>"
    )


def _row(row: Sequence[str]) -> str:
    """A row; an arrow marks those that belong to the one above."""
    start = '<tr class="below">' if row[0].startswith("↳") else "<tr>"
    cells = "".join(f"<td>{cell}</td>" for cell in row[1:])
    return f'{start}<th scope="row">{row[0]}</th>{cells}</tr>'


def cell(one: Estimate, *, share: bool = False, n: bool = False) -> str:
    """Write a number with its interval below it in small print."""
    if one["value"] is None:
        return "–"
    write = (lambda v: percent(v)[:-2]) if share else number
    parts = (
        [] if None in (one["low"], one["high"]) else [f"{write(one['low'])}–{write(one['high'])}"]
    )
    parts += [f"n = {one['n']:,}"] if n else []
    value = percent(one["value"]) if share else number(one["value"])
    return value + (f' <small class="soft">{", ".join(parts)}</small>' if parts else "")


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Write names with their values, both plain text."""
    lines = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in pairs)
    return f'<dl class="facts">{lines}</dl>'
