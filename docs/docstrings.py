"""For the docs build: docstrings are plain text with doctests, and become Markdown here."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    """Turn the docstring of every object into Markdown."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring is not None:
            paragraphs = obj.docstring.value.split("\n\n")
            obj.docstring.value = "\n\n".join(map(markdown, paragraphs))


def markdown(paragraph: str) -> str:
    """A doctest as a code block, an indented formula as it is, other text without emphasis by *."""
    if paragraph.startswith(">>> "):
        return f"```pycon\n{paragraph}\n```"
    if paragraph.startswith("    "):
        return paragraph
    pieces = re.split(r"(`[^`]*`)", paragraph)
    text = "".join(p if p.startswith("`") else p.replace("*", r"\*") for p in pieces)
    # the names of keyword arguments, as in "**initial: …", are no text
    return re.sub(r"^( +)\\\*\\\*(\w+:)", r"\1**\2", text, flags=re.MULTILINE)
