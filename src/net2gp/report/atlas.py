"""The atlas: one page of all reproductions, with every number beside the expected one and its source."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from net2gp._version import __version__
from net2gp.errors import InputError
from net2gp.progress import progress
from net2gp.report.page import Section, Table, page
from net2gp.report.papers import find_papers, list_papers, run_paper
from net2gp.report.records import keep_record, read_records
from net2gp.report.reproductions import HEAD, Paper, PaperResult, tally

TITLE = "Atlas of reproductions"

LEAD = """Numbers and claims of papers on networks and Gaussian processes, beside what net2gp found when these
programs ran. Every number in a column "ours" is from the run whose command, date and revision stand above the
table. What did not run has no numbers here, and the first table says so."""


def atlas(
    path: str | os.PathLike,
    quick: bool = True,
    names: Sequence[str] | None = None,
    *,
    record: bool = False,
    folder: str | os.PathLike | None = None,
) -> tuple[PaperResult, ...]:
    """Run reproductions and write one self-contained page of what they found.

    The page is written anew after each program, so an interrupted run leaves a page of what has run.

    Args:
        path: The HTML file to write.
        quick: Whether to run the small versions, which take from seconds to some minutes each. Full runs
            take minutes to days.
        names: Which reproductions. None runs all.
        record: Whether to keep what was found in the folder's `results`, but for programs that stopped.
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
            if record and results[-1].ended:
                keep_record(results[-1], folder)
            _write(target, papers, results)
            advance(note=paper.name)
    return tuple(results)


def recorded_atlas(
    path: str | os.PathLike, *, folder: str | os.PathLike | None = None
) -> tuple[PaperResult, ...]:
    """Write the page of what was recorded of the reproductions, without running any.

    Args:
        path: The HTML file to write.
        folder: The folder `papers` of a checkout. None looks for it.

    Returns:
        What was recorded.

    Raises:
        InputError: If the folder is unknown, or if the file cannot be written.
    """
    results = read_records(folder)
    _write(Path(path).expanduser(), list_papers(folder), results)
    return results


def _write(path: Path, papers: Sequence[Paper], results: Sequence[PaperResult]) -> None:
    """Write the page beside its place, and then put it there in one step."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(atlas_page(papers, results), encoding="utf-8")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
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
    text = f"{counts(papers, results)}\n\n        {READING}"
    head = ("", "run", "outcome", "date (UTC)", "seconds")
    summary = Section("What ran", text, (), table=Table(head, summary_rows(papers, results)))
    sections = [summary, *(_section(result) for result in results)]
    return page(TITLE, LEAD, sections, f"Written by net2gp {__version__}.")


READING = """`within?` compares the difference with what was allowed before the run: ≤ and ≥ mark bounds,
and rows without a number are claims in words, which the programs judge. Some programs compare with the
numbers of a paper, others with what it proves or with an independent computation: each section says which. An
excepted claim is one of a paper's that was stated beforehand not to hold here; the note has the reason."""


def counts(papers: Sequence[Paper], results: Sequence[PaperResult]) -> str:
    """How many reproductions ran, and how much of what they found is as expected, in words."""
    ran = {result.paper.name for result in results}
    found = f" Numbers and claims: {tally(row for result in results for row in result.rows)}."
    return (
        f"{len(ran)} of {len(papers)} reproductions ran; {len(papers) - len(ran)} did not."
        f"{found if ran else ''}"
    )


def summary_rows(
    papers: Sequence[Paper], results: Sequence[PaperResult]
) -> tuple[tuple[str, ...], ...]:
    """Name and title, kind of run, outcome, date and seconds of each run, and of parts together.

    What did not run has a row as well.
    """
    rows = []
    for paper in papers:
        name, kinds = f"{paper.name}: {paper.title}", defaultdict(list)
        for one in (result for result in results if result.paper.name == paper.name):
            kinds["full, in parts" if one.is_part else one.kind].append(one)
        rows += [
            (name, kind, _outcome(runs), runs[0].date, f"{sum(one.seconds for one in runs):.0f}")
            for kind, runs in kinds.items()
        ] or [(name, "", "not run", "", "")]
    return tuple(rows)


def _outcome(runs: Sequence[PaperResult]) -> str:
    """The outcome of one run, or of several together if all of them ended."""
    if len(runs) > 1 and all(one.ended for one in runs):
        return tally(row for one in runs for row in one.rows)
    return "; ".join(one.outcome for one in runs)


def said(result: PaperResult) -> str:
    """What to know about a run: what is left out, and what a full run would take."""
    words = [f"Not computed: {what}." for what in result.left_out]
    if result.quick:
        words.insert(0, f"A quick run: {result.paper.quick} Full run: {result.paper.full}")
        if any(row.bound in ("claim", "exception") for row in result.rows):
            words.insert(1, "A comparison counts as better by its mean alone, without a test.")
    return " ".join(words)


def made(result: PaperResult) -> str:
    """By which command, at which revision, when, and on what a run was made."""
    machine = f", on {result.machine}" if result.machine else ""
    return (
        f"`{result.command}`, revision {result.revision}, {result.date} UTC, "
        f"{result.seconds:.0f} s{machine}."
    )


def _section(result: PaperResult) -> Section:
    text = f"""Where the expected numbers are from: {result.paper.source}

        {said(result)}

        {made(result)}

        {result.outcome[0].upper()}{result.outcome[1:]}."""
    return Section(result.paper.title, text, (), table=table(result) if result.rows else None)


def table(result: PaperResult) -> Table:
    """The rows of a run, without columns that are empty in all of them."""
    lines = [(row.title, *row.cells(), row.note) for row in result.rows]
    some = [any(cells) for cells in zip(*lines, strict=True)]
    head = ("", *HEAD, "note")
    return Table(
        tuple(name for name, there in zip(head, some, strict=True) if there),
        tuple(
            tuple(cell for cell, there in zip(line, some, strict=True) if there) for line in lines
        ),
    )
