"""Memory of `laplace` for outputs at places, beside laplace-torch: jobs of `dense.py`, each in a process."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peers import PEERS, ROOT, NotInstalled, ensure

HERE = Path(__file__).resolve().parent
OURS, THEIRS = "net2gp", "laplace-torch"
LIMIT_GB = 8
LIMIT = 900
"""Seconds for a process."""

EXPONENT = 1.1
"""The largest power of the number of outputs by which a peak may grow."""

CHANNELS = {"pixels": 4, "characters": 51}
Row = dict[str, Any]


def jobs(quick: bool) -> Iterator[Row]:
    """What is measured: more points, then larger ones, and the peer at one point."""
    if quick:
        for points in (4, 16):
            yield job(OURS, "pixels", "last layer", points, 64)
        return
    for structure in ("last layer", "Kron", "diagonal"):
        most = 36 if structure == "last layer" else 12  # it takes more points together than others
        for points, size in ((4, 128), (most, 128), (4, 64)):
            yield job(OURS, "pixels", structure, points, size)
    for structure in ("last layer", "Kron"):
        for points in (128, 512):
            yield job(OURS, "characters", structure, points, 64)
    for structure in ("last layer", "Kron", "diagonal"):
        yield job(THEIRS, "pixels", structure, 1, 128) | {"flat": False}
        yield job(THEIRS, "characters", structure, 4, 64) | {"flat": False}
    for structure, size in (("Kron", 16), ("Kron", 32), ("diagonal", 16)):
        yield job(THEIRS, "pixels", structure, 1, size) | {"flat": False}
    for structure in ("Kron", "diagonal"):
        yield job(THEIRS, "pixels", structure, 1, 128) | {"flat": True}


def job(library: str, problem: str, structure: str, points: int, size: int) -> Row:
    """One measurement."""
    names = ("library", "problem", "structure", "points", "size", "limit_gb")
    return dict(zip(names, (library, problem, structure, points, size, LIMIT_GB), strict=True))


def outputs(row: Row) -> int:
    """How many outputs all points have together."""
    places = row["size"] ** 2 if row["problem"] == "pixels" else row["size"]
    return row["points"] * places * CHANNELS[row["problem"]]


def memory_rows(quick: bool) -> list[Row]:
    """All jobs with what came of them."""
    pythons: dict[str, Path] = {OURS: Path(sys.executable)}
    try:
        pythons |= {} if quick else {THEIRS: ensure(PEERS["laplace"])}
    except NotInstalled as reason:
        print(f"missing: {reason}")
    found = []
    for one in jobs(quick):
        if one["library"] in pythons:
            found.append(one | answer(pythons[one["library"]], one))
            print(line(found[-1]), flush=True)
    return found


def answer(python: Path, one: Row) -> Row:
    """What the worker says."""
    path = os.pathsep.join(str(part) for part in (ROOT / "src", HERE))
    settings = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [str(python), str(HERE / "worker_dense.py"), json.dumps(one)]
    kind = {"capture_output": True, "text": True, "timeout": LIMIT}
    try:
        done = subprocess.run(command, env=os.environ | settings, **kind)
    except subprocess.TimeoutExpired:
        return {"failed": f"no answer within {LIMIT} s"}
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["no output"])[-1]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def exponents(found: list[Row]) -> Iterator[tuple[str, float]]:
    """The power of the number of outputs by which our peaks grow, from the fewest to the most."""
    ours = [row for row in found if row["library"] == OURS]
    for problem, structure in dict.fromkeys((r["problem"], r["structure"]) for r in ours):
        mine = [r for r in ours if (r["problem"], r["structure"]) == (problem, structure)]
        sizes = [r["size"] for r in mine]
        usual = max(set(sizes), key=sizes.count)
        fewest = min(r["points"] for r in mine)
        by = {
            "points": [r for r in mine if r["size"] == usual],
            "places": [r for r in mine if r["points"] == fewest],
        }
        for what, some in by.items():
            some.sort(key=outputs)
            if len({r["size" if what == "places" else "points"] for r in some}) < 2:
                continue
            for stage in ("fit", "predict"):
                yield (
                    f"{problem}, {structure}, memory of {stage}, power of {what}",
                    power(some, stage),
                )


def power(some: list[Row], stage: str) -> float:
    """The slope of the logarithms; infinite where there is no peak."""
    first, last = some[0], some[-1]
    key = f"{stage} MB"
    if "failed" in first or "failed" in last or min(first[key], last[key]) <= 0:
        return math.inf
    return math.log(last[key] / first[key]) / math.log(outputs(last) / outputs(first))


def line(row: Row) -> str:
    """A row of the table."""
    what = f"{row['points']} × {row['size']}" + ("²" if row["problem"] == "pixels" else "")
    name = row["library"] + (", flattened" if row.get("flat") else "")
    cells = [row["problem"], row["structure"], name, what, f"{outputs(row):,}"]
    cells += [f"{row[key]:.0f}" if key in row else "" for key in ("fit MB", "predict MB")]
    said = row.get("failed", "").replace("|", "/")
    return "| " + " | ".join([*cells, said[:160]]) + " |"


def memory_page(found: list[Row]) -> str:
    """The section of the page."""
    lines = [
        "## Memory",
        "",
        f"Megabytes above the network and its data, each from a process with {LIMIT_GB} GB of address",
        "space; where a step failed its peak stands there too, and what was said. A Jacobian of one image of",
        "128 × 128 would have 7.8 GB, and a matrix of its outputs by its outputs 17.2 GB.",
        "",
        "| places | structure | library | points | outputs | fit, MB | predict, MB | it says |",
        "|---|---|---|---|---:|---:|---:|---|",
    ]
    return "\n".join([*lines, *map(line, found)])
