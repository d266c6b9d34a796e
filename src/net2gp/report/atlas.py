"""The atlas: one page of all reproductions, with every number beside the expected one and its source."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from net2gp._version import __version__
from net2gp.errors import InputError
from net2gp.progress import progress
from net2gp.report.page import Section, Table, page
from net2gp.report.papers import (
    HEAD,
    Paper,
    PaperResult,
    find_papers,
    list_papers,
    run_paper,
    tally,
)

TITLE = "Atlas of reproductions"

LEAD = """Numbers and claims of papers on networks and Gaussian processes, beside what net2gp found when these
programs ran. Every number in a column "ours" is from the run whose command, date and revision stand above the
table. What did not run has no numbers here, and the first table says so."""


def atlas(
    path: str | os.PathLike,
    quick: bool = True,
    names: Sequence[str] | None = None,
    *,
    folder: str | os.PathLike | None = None,
) -> tuple[PaperResult, ...]:
    """Run reproductions and write one self-contained page of what they found.

    The page is written anew after each program, so an interrupted run leaves a page of what has run.

    Args:
        path: The HTML file to write.
        quick: Whether to run the small versions, which take from seconds to some minutes each. Full runs
            take minutes to days.
        names: Which reproductions. None runs all.
        folder: The folder `papers` of a checkout. None looks for it.

    Returns:
        What the programs found, in the order in which they ran.

    Raises:
        InputError: If the folder or a name is unknown, or if the file cannot be written.
    """
    papers = list_papers(folder)
    chosen = papers if names is None else find_papers(list(names), folder)
    target = Path(path).expanduser()
    results: list[PaperResult] = []
    _write(target, papers, results)
    with progress("papers", len(chosen)) as advance:
        for paper in chosen:
            advance(0, note=paper.name)
            results.append(run_paper(paper.name, quick=quick, folder=folder))
            _write(target, papers, results)
            advance(note=paper.name)
    return tuple(results)


def _write(path: Path, papers: Sequence[Paper], results: Sequence[PaperResult]) -> None:
    """Write the page beside its place, and then put it there in one step."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(atlas_page(papers, results), encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise InputError(
            f"cannot write {path} ({error.strerror}). Pass a file in a folder that exists: "
            "net2gp paper --all --out atlas.html."
        ) from error


def atlas_page(papers: Sequence[Paper], results: Sequence[PaperResult]) -> str:
    """Return the page of these results as HTML.

    Args:
        papers: All reproductions, also those that did not run.
        results: What those that ran found.

    Returns:
        The HTML.
    """
    ran = {result.paper.name: result for result in results}
    rows = tuple(_summary(paper, ran.get(paper.name)) for paper in papers)
    missing = len(papers) - len(ran)
    counts = f"Numbers and claims: {tally(row for result in results for row in result.rows)}."
    text = f"""{len(ran)} of {len(papers)} reproductions ran; {missing} did not. {counts if ran else ""}

        `within?` compares the difference with what was allowed before the run: ≤ and ≥ mark bounds, and rows
        without a number are claims in words, which the programs judge. Some programs compare with the
        numbers of a paper, others with what it proves or with an independent computation: each section
        says which. An excepted claim is one of a paper's that was stated beforehand not to hold here; the
        note has the reason."""
    summary = Section(
        "What ran", text, (), table=Table(("", "kind", "outcome", "date (UTC)", "seconds"), rows)
    )
    sections = [summary, *(_section(result) for result in results)]
    return page(TITLE, LEAD, sections, f"Written by net2gp {__version__}.")


def _summary(paper: Paper, result: PaperResult | None) -> tuple[str, ...]:
    if result is None:
        return (f"{paper.name}: {paper.title}", "", "not run", "", "")
    kind = "quick" if result.quick else "full"
    name = f"{paper.name}: {paper.title}"
    return (name, kind, result.outcome, result.date, f"{result.seconds:.0f}")


def _section(result: PaperResult) -> Section:
    said = [f"Not computed: {what}." for what in result.left_out]
    if result.quick:
        said.insert(0, f"A quick run: {result.paper.quick}")
        if any(row.bound in ("claim", "exception") for row in result.rows):
            said.insert(1, "A comparison counts as better by its mean alone, without a test.")
    text = f"""Where the expected numbers are from: {result.paper.source}

        {" ".join(said)}

        `{result.command}`, revision {result.revision}, {result.date} UTC, {result.seconds:.0f} s.

        {result.outcome[0].upper()}{result.outcome[1:]}."""
    return Section(result.paper.title, text, (), table=_table(result) if result.rows else None)


def _table(result: PaperResult) -> Table:
    """The rows, without columns that are empty in all of them."""
    lines = [(row.title, *row.cells(), row.note) for row in result.rows]
    some = [any(cells) for cells in zip(*lines, strict=True)]
    head = ("", *HEAD, "note")
    return Table(
        tuple(name for name, there in zip(head, some, strict=True) if there),
        tuple(
            tuple(cell for cell, there in zip(line, some, strict=True) if there) for line in lines
        ),
    )
