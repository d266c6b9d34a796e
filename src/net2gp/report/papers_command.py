"""The command `net2gp paper`: reproductions run again, one at a time or all on one page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from net2gp.errors import Net2GPError


def paper(
    name: Annotated[
        str | None, typer.Argument(help="Which one, such as neal1996. Left out: list them.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick/--full", help="Small sizes, or those of the paper.")
    ] = True,
    everything: Annotated[
        bool, typer.Option("--all", help="Run all of them and write one page, the atlas.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="A folder for figures and the log; with --all the page [atlas.html]."),
    ] = None,
    papers: Annotated[
        Path | None, typer.Option(help="The folder `papers` of a clone of net2gp.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> None:
    """Run a reproduction of a paper again: paper, ours, difference, and whether it is within bounds.

    Examples: `net2gp paper` lists them; `net2gp paper neal1996`; `net2gp paper neal1996 --full --out
    figures`; `net2gp paper --all --out atlas.html`. The exit status is 0 if everything came out as
    expected, else 1.
    """
    from net2gp.report.atlas import atlas
    from net2gp.report.papers import list_papers, run_paper

    if everything and name is not None:
        raise typer.BadParameter("pass a name or --all, not both", param_hint="NAME")
    try:
        if everything:
            page = (out or Path("atlas.html")).expanduser()
            results = atlas(page, quick, folder=papers)
            shown = "\n".join(f"{one.paper.name}: {one.outcome}" for one in results)
            text = f"{shown}\nThe page is at {page.resolve()}."
        elif name is None:
            entries = list_papers(papers)
            width = max(len(one.name) for one in entries)
            found = [{"name": one.name, "title": one.title} for one in entries]
            lines = "\n".join(f"{one.name:<{width}}  {one.title}" for one in entries)
            typer.echo(json.dumps(found, indent=1) if as_json else lines)
            return
        else:
            results = (run_paper(name, quick=quick, out=out, folder=papers),)
            text = str(results[0])
    except Net2GPError as error:
        typer.echo(f"net2gp: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(json.dumps([one.as_dict() for one in results], indent=1) if as_json else text)
    if not all(one.agrees for one in results):
        raise typer.Exit(1)
