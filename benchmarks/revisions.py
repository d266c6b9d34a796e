"""Copies of two revisions of the source, for programs that compare them."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEFORE = "cf8e9c1^"
"""The last revision before the rooms were divided into sub-packages."""

REVIEWED = "6fcf856"
"""The revision at which the shape of the source was first measured."""

AFTER = "HEAD"


def extract(revision: str, folder: Path) -> Path:
    """The folder `src` of a revision, written below `folder`."""
    packed = subprocess.run(
        ["git", "archive", revision, "src"], cwd=ROOT, check=True, capture_output=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as files:
        files.extractall(folder, filter="data")
    return folder / "src"


def named(revision: str) -> str:
    """The short hash of a revision."""
    command = ["git", "rev-parse", "--short", revision]
    found = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return found.stdout.strip()


def surroundings(source: Path) -> dict[str, str]:
    """The environment of a program that imports net2gp from `source`, on one thread."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return {**os.environ, **threads, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
