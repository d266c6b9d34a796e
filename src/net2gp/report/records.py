"""Records of reproductions: what their programs found, kept as JSON beside them."""

from __future__ import annotations

import json
import os
from pathlib import Path

from net2gp.errors import InputError
from net2gp.report.papers import list_papers, papers_folder
from net2gp.report.reproductions import PaperResult

RESULTS = "results"
"""Where records lie, in the folder of the reproductions: a file for each, with one run of each command."""


def keep_record(result: PaperResult, folder: str | os.PathLike | None = None) -> Path:
    """Keep what a reproduction found, in place of an earlier run of the same command.

    Args:
        result: What `run_paper` returned.
        folder: The folder `papers` of a checkout. None looks for it.

    Returns:
        The file, `results/NAME.json` in that folder.

    Raises:
        InputError: If the program did not end, so that there is nothing to keep, or if the file cannot be
            written.
    """
    if not result.ended:
        raise InputError(
            f"{result.paper.name} did not end ({result.outcome}), so that nothing is recorded. Run it again."
        )
    path = papers_folder(folder) / RESULTS / f"{result.paper.name}.json"
    kept = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    found = result.as_dict() | {"paper": result.paper.name}
    runs = [run for run in kept if run["command"] != result.command] + [found]
    runs.sort(key=lambda run: (not run["quick"], run["command"]))
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(exist_ok=True)
        part.write_text(json.dumps(runs, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise InputError(
            f"cannot write {path} ({error.strerror}). Pass --papers with a clone that can be written to."
        ) from error
    return path


def read_records(folder: str | os.PathLike | None = None) -> tuple[PaperResult, ...]:
    """Return what was kept of the reproductions, in the order of `list_papers`, quick runs first.

    Args:
        folder: The folder `papers` of a checkout. None looks for it.

    Returns:
        The results.

    Raises:
        InputError: If the folder is not found, or if a record is of no reproduction.
    """
    place = papers_folder(folder) / RESULTS
    papers = {paper.name: paper for paper in list_papers(folder)}
    unknown = {path.stem for path in place.glob("*.json")} - set(papers)
    if unknown:
        raise InputError(
            f"{place} has records of {', '.join(sorted(unknown))}, which papers.toml does not name. Delete "
            "them, or name their programs there."
        )
    return tuple(
        PaperResult.from_dict(paper, run)
        for name, paper in papers.items()
        if (path := place / f"{name}.json").is_file()
        for run in json.loads(path.read_text(encoding="utf-8"))
    )
