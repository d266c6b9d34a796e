"""A paper or book as a value."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

CONFERENCES = {
    "NeurIPS": "Advances in Neural Information Processing Systems",
    "ICML": "International Conference on Machine Learning",
    "ICLR": "International Conference on Learning Representations",
    "AISTATS": "International Conference on Artificial Intelligence and Statistics",
    "UAI": "Conference on Uncertainty in Artificial Intelligence",
    "AAAI": "AAAI Conference on Artificial Intelligence",
    "ACML": "Asian Conference on Machine Learning",
}
"""Conferences by their usual names. Any other venue is a journal, or of a book the publisher."""


@dataclass(frozen=True)
class Reference:
    """A paper or book.

    Args:
        key: Its name in BibTeX.
        authors: Family name first, with "and" between authors.
        year: The year of publication.
        title: The title.
        venue: The conference, journal or publisher.
        doi: The digital object identifier, or "".
        arxiv: The number at arXiv, or "".
        book: Whether it is a book.
    """

    key: str
    authors: str
    year: int
    title: str
    venue: str
    doi: str = ""
    arxiv: str = ""
    book: bool = False

    @property
    def bibtex(self) -> str:
        """The entry for BibTeX, in UTF-8."""
        kind, place, venue = "article", "journal", self.venue
        if self.book:
            kind, place = "book", "publisher"
        elif self.venue in CONFERENCES:
            kind, place, venue = "inproceedings", "booktitle", CONFERENCES[self.venue]
        fields = {"author": self.authors, "title": f"{{{self.title}}}", "year": f"{self.year}"}
        fields[place] = venue
        fields |= {"doi": self.doi} if self.doi else {}
        fields |= {"eprint": self.arxiv, "archiveprefix": "arXiv"} if self.arxiv else {}
        lines = ",\n".join(f"  {name} = {{{value}}}" for name, value in fields.items())
        return f"@{kind}{{{self.key},\n{lines}\n}}"

    def __str__(self) -> str:
        """Authors, year, title, venue, and where to find it."""
        names = self.authors.removesuffix(" and others").split(" and ")
        who = ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else names[0]
        if self.authors.endswith(" and others"):
            who = ", ".join(names) + " et al."
        places = [self.venue, *([f"doi:{self.doi}"] if self.doi else [])]
        places += [f"arXiv:{self.arxiv}"] if self.arxiv else []
        return f"{who} ({self.year}). {self.title}. {', '.join(places)}."


def read(text: str) -> Iterator[Reference]:
    """Read entries that are divided by empty lines.

    Args:
        text: In each entry a line with key, year, "book" if it is one, and venue; one with the authors; one
            with the title; and, if known, one with doi:... and arXiv:...; indented lines go on.

    Yields:
        The references.

    >>> (book,) = read("neal1996 1996 book Springer\\nNeal, R. M.\\nBayesian learning")
    >>> print(book)
    Neal, R. M. (1996). Bayesian learning. Springer.
    """
    for entry in re.split(r"\n\s*\n", text.strip()):
        head, authors, title, *rest = re.sub(r"\n\s+", " ", entry).split("\n")
        key, year, venue = head.split(" ", 2)
        links = dict(link.split(":", 1) for link in " ".join(rest).split())
        yield Reference(
            key=key,
            authors=authors,
            year=int(year),
            title=title,
            venue=venue.removeprefix("book "),
            doi=links.get("doi", ""),
            arxiv=links.get("arXiv", ""),
            book=venue.startswith("book "),
        )
