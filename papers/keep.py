"""Runs programs of this folder, and keeps what they printed beside the numbers of the paper.

    NET2GP_DATA=... python papers/keep.py schoenholz2017/run.py
    NET2GP_DATA=... python papers/keep.py maddox2021/rotations.py --quick

Writes papers/results/FOLDER_PROGRAM.md with the command, revision, seconds, exit status and the whole
output. Whatever stands behind the name of the program is passed on to it. The exit status is that of the
program.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).parent / "results"


def revision() -> str:
    """The revision, and whether the library or the papers were changed since."""
    git = ["git", "-C", str(ROOT)]
    name = subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], text=True).strip()
    watched = ["src", "papers/*.py", "papers/*.toml"]
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", *watched], check=False)
    return f"{name}, with changes" if changed.returncode else name


def title(program: Path) -> str:
    """The first line of the docstring of a program."""
    return program.read_text(encoding="utf-8").split('"""', 2)[1].splitlines()[0].rstrip(".")


def record(name: str, options: list[str]) -> int:
    """Run a program and write the page of its output; its exit status."""
    program = ROOT / "papers" / name
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "PYTHONIOENCODING": "utf-8"}
    start, at = perf_counter(), revision()
    with TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, str(program), "--out", folder, *options],
            env=environment,
            capture_output=True,
            encoding="utf-8",
            check=False,
        )
    seconds = perf_counter() - start
    lines = [line.rstrip() for line in done.stdout.splitlines() if not line.startswith(folder)]
    command = " ".join([f"python papers/{name}", "--out figures", *options])
    verdict = "as stated" if done.returncode == 0 else f"not all as stated (exit {done.returncode})"
    text = (
        f"# {title(program)}\n\nMade by `{command}` at revision {at}, in {seconds:.0f} seconds "
        f"on a shared CPU. What came is {verdict}.\n\n```text\n"
        + "\n".join(lines).strip()
        + "\n```\n"
    )
    if done.returncode and done.stderr:
        text += f"\nIt ended with\n\n```text\n{done.stderr.strip().splitlines()[-1]}\n```\n"
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / (name.replace("/", "_").removesuffix(".py") + ".md")).write_text(text, "utf-8")
    return done.returncode


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    sys.exit(record(sys.argv[1], sys.argv[2:]))
