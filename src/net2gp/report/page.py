"""A self-contained HTML page of figures, tables, code and text, without scripts, network or fonts."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from io import BytesIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure as MatplotlibFigure


@dataclass(frozen=True)
class Figure:
    """A picture.

    Args:
        name: The file name without ending.
        png: The bytes of the PNG file.
        alt: The description for readers who cannot see the picture.
        width: The largest width on the page in pixels, which keeps square figures small.
    """

    name: str
    png: bytes = field(repr=False)
    alt: str
    width: int = 900

    @classmethod
    def draw(
        cls, name: str, figure: MatplotlibFigure, alt: str, *, width: int | None = None
    ) -> Figure:
        """Render a matplotlib figure at twice the resolution of the page.

        Args:
            name: The file name without ending.
            figure: The figure.
            alt: The description for readers who cannot see the picture.
            width: The largest width on the page in pixels. None means 100 per inch.

        Returns:
            The picture.
        """
        buffer = BytesIO()
        figure.savefig(buffer, format="png", dpi=200, metadata={"Software": None})
        return cls(name, buffer.getvalue(), alt, width or int(100 * figure.get_figwidth()))


@dataclass(frozen=True)
class Table:
    """Rows of text below a head.

    Args:
        head: The names of the columns.
        rows: The rows. The first cell names the row.
        note: An explanation of the columns.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Args:
        title: The heading.
        text: What was done and what one sees. An empty line starts a paragraph, and `backticks` mark code.
        figures: The pictures.
        code: The code that made them.
        table: A table of numbers, or None.
        seconds: The duration of each step.
    """

    title: str
    text: str
    figures: tuple[Figure, ...]
    code: str = ""
    table: Table | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)


def page(title: str, lead: str, sections: Sequence[Section], footer: str = "") -> str:
    """Write the HTML of a page with its figures inside.

    Args:
        title: The title of the page.
        lead: The text below the title.
        sections: The parts of the page.
        footer: The text at the end.

    Returns:
        The HTML.

    >>> html = page("A title", "What this is.", [Section("One", "See `adapt`.", ())])
    >>> "<h2>One</h2>" in html and "<code>adapt</code>" in html and "<script" not in html
    True
    """
    body = "\n".join(_section(section) for section in sections)
    return _PAGE.format(
        title=escape(title),
        style=STYLE,
        lead=paragraphs(lead),
        body=body,
        footer=paragraphs(footer),
    )


def _section(section: Section) -> str:
    pictures = "".join(_picture(figure) for figure in section.figures)
    small = sum(figure.width for figure in section.figures) <= 500
    layout = "beside" if section.figures and small else "above"
    parts = [
        f"<h2>{escape(section.title)}</h2>",
        f'<div class="{layout}"><div class="figures">{pictures}</div>',
        f"<div>{paragraphs(section.text)}</div></div>",
    ]
    if section.table is not None:
        parts.append(_table(section.table))
    if section.code:
        parts.append(f"<pre><code>{escape(section.code)}</code></pre>")
    if section.seconds:
        parts.append(_timings(section.seconds))
    return "<section>\n" + "\n".join(parts) + "\n</section>"


def _picture(figure: Figure) -> str:
    data = base64.b64encode(figure.png).decode()
    return (
        f'<figure style="max-width:{figure.width}px">'
        f'<img alt="{escape(figure.alt)}" src="data:image/png;base64,{data}"></figure>'
    )


def paragraphs(text: str) -> str:
    """Write paragraphs, which empty lines divide, with `backticks` as code."""
    marked = (
        re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(part.strip(), quote=False))
        for part in re.split(r"\n\s*\n", text)
    )
    return "\n".join(f"<p>{part}</p>" for part in marked if part)


def _table(table: Table) -> str:
    head = "".join(f"<th scope='col'>{escape(cell)}</th>" for cell in table.head)
    lines = []
    for row in table.rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        lines.append(f"<tr><th scope='row'>{escape(row[0])}</th>{cells}</tr>")
    rows = "\n".join(lines)
    note = f'<div class="note">{paragraphs(table.note)}</div>' if table.note else ""
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table>'
        f"</div>{note}"
    )


def _timings(seconds: Mapping[str, float]) -> str:
    steps = " · ".join(f"{escape(name)} {value:.2f} s" for name, value in seconds.items())
    return f'<p class="timings">{steps}</p>'


STYLE = """
:root { color-scheme: light dark; --ink: #1d2329; --soft: #5b6670; --line: #dfe3e7; --ground: #ffffff;
  --panel: #f4f6f8; --accent: #0072b2; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ec; --soft: #9aa6b1; --line: #333b43;
  --ground: #14181c; --panel: #1e242a; --accent: #56b4e9; } figure { filter: brightness(0.92); } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); line-height: 1.55;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: clamp(1.7rem, 5vw, 2.4rem); line-height: 1.15; margin: 0 0 0.75rem; text-wrap: balance; }
h2 { font-size: 1.35rem; line-height: 1.25; margin: 0 0 1rem; }
header { border-left: 4px solid var(--accent); padding-left: 1.1rem; margin-bottom: 2.5rem; }
header p { font-size: 1.1rem; color: var(--soft); max-width: 44rem; margin: 0.4rem 0; }
section { padding: 2rem 0; border-top: 1px solid var(--line); }
section p { max-width: 46rem; }
.beside { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr));
  gap: 1.5rem; }
.beside p:first-child { margin-top: 0; }
.figures { display: flex; flex-wrap: wrap; gap: 1rem; align-items: flex-start; }
figure { margin: 0; flex: 1 1 20rem; background: #ffffff; border: 1px solid var(--line);
  border-radius: 8px; padding: 0.6rem; }
img { display: block; width: 100%; height: auto; }
.scroll { overflow-x: auto; margin: 1rem 0 0.4rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.95rem; }
th, td { padding: 0.4rem 0.9rem 0.4rem 0; text-align: right; border-bottom: 1px solid var(--line); }
th { font-weight: 600; vertical-align: bottom; }
tbody th { font-weight: 400; min-width: 11rem; }
th:first-child { text-align: left; }
.note p, .timings { color: var(--soft); font-size: 0.88rem; max-width: 46rem; margin: 0.4rem 0; }
code { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: 0.88em; background: var(--panel); padding: 0.1em 0.3em; border-radius: 4px; }
pre { background: var(--panel); border-radius: 8px; padding: 0.9rem 1rem; overflow-x: auto;
  line-height: 1.5; margin: 1.2rem 0 0.6rem; }
pre code { background: none; padding: 0; font-size: 0.85rem; }
footer { border-top: 1px solid var(--line); padding-top: 1rem; color: var(--soft); font-size: 0.9rem; }
@media print { section { break-inside: avoid; } }
""".strip()

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
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
{body}
<footer>
{footer}
</footer>
</main>
</body>
</html>
"""
