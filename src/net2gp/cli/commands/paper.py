"""`net2gp paper`: reproductions run again, one at a time or all on one page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from net2gp.cli.running import ERROR, Common, Result, UsageError, say
from net2gp.report.reproductions import PaperResult


@dataclass(kw_only=True)
class PaperOptions(Common):
    """Which reproductions, in which size, and where results go."""

    name: Annotated[
        str | None, typer.Argument(help="Which one, such as neal1996. Left out: list them.")
    ] = None
    options: Annotated[
        list[str],
        typer.Argument(help="Options of the program itself, behind two dashes: -- --device cuda."),
    ] = field(default_factory=list)
    quick: Annotated[
        bool, typer.Option("--quick/--full", help="Small sizes, or those of the paper.")
    ] = True
    everything: Annotated[
        bool, typer.Option("--all", help="Run all of them and write one page, the atlas.")
    ] = False
    recorded: Annotated[
        bool,
        typer.Option(
            "--recorded", help="With --all: run nothing, take what was kept in papers/results."
        ),
    ] = False
    record: Annotated[
        bool, typer.Option("--record", help="Keep what was found in papers/results, for the atlas.")
    ] = False
    out: Annotated[
        Path | None,
        typer.Option(help="A folder for figures and the log; with --all the page [atlas.html]."),
    ] = None
    papers: Annotated[
        Path | None, typer.Option(help="The folder `papers` of a clone of net2gp.")
    ] = None


def paper(options: PaperOptions) -> Result:
    """Run a reproduction of a paper again: paper, ours, difference, and whether it is within bounds.

    \b
    Examples:
      net2gp paper
      net2gp paper neal1996
      net2gp paper neal1996 --full --out figures
      net2gp paper jacot2018 --full -- --device cuda
      net2gp paper --all --out atlas.html
      net2gp paper --all --recorded --out atlas.html

    Without a name it lists them. The programs are those of a clone of net2gp. The exit code is 0 if
    everything came out as expected, else 1. A program that stops does not stop the others of --all.
    """
    _check(options)
    if options.everything:
        return _all(options)
    if options.name is None:
        return _list(options)
    from net2gp.report.papers import run_paper
    from net2gp.report.records import keep_record

    result = run_paper(
        options.name,
        quick=options.quick,
        options=options.options,
        out=options.out,
        folder=options.papers,
    )
    if options.record and result.ended:
        say(f"recorded in {keep_record(result, options.papers)}.")
    return _result([result], str(result))


def _check(options: PaperOptions) -> None:
    """Refuse options that do not go together."""
    if options.everything and options.name is not None:
        raise UsageError("pass a name or --all, not both.")
    if options.name is None and not options.everything and (options.record or options.out):
        raise UsageError(
            "say which reproduction: pass a name, or --all. `net2gp paper` lists them."
        )
    if options.recorded and (options.record or not options.everything):
        raise UsageError("--recorded makes a page of what was kept: net2gp paper --all --recorded.")


def _list(options: PaperOptions) -> Result:
    from net2gp.report.papers import list_papers

    papers = list_papers(options.papers)
    width = max(len(one.name) for one in papers)
    found = [{"name": one.name, "title": one.title, "full": one.full} for one in papers]
    return Result(
        {"papers": found}, "\n".join(f"{one.name:<{width}}  {one.title}" for one in papers)
    )


def _all(options: PaperOptions) -> Result:
    from net2gp.report.atlas import atlas, recorded_atlas

    page = (options.out or Path("atlas.html")).expanduser()
    if options.recorded:
        results = recorded_atlas(page, folder=options.papers)
    else:
        results = atlas(page, options.quick, record=options.record, folder=options.papers)
    outcomes = "\n".join(f"{one.paper.name} ({one.kind}): {one.outcome}" for one in results)
    return _result(results, f"{outcomes}\nThe page is at {page.resolve()}.")


def _result(results: Sequence[PaperResult], text: str) -> Result:
    code = 0 if all(one.agrees for one in results) else ERROR
    return Result({"papers": [one.as_dict() for one in results]}, text, code)
