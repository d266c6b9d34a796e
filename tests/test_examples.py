"""Every example runs as a user would run it, from another folder, and draws what it announces."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from net2gp.errors import JitterAdded, NotConverged

FOLDER = Path(__file__).parent.parent / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))


def test_there_are_examples_to_run():
    assert len(EXAMPLES) >= 7


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_its_figures_exist(path, tmp_path):
    pytest.importorskip("matplotlib")
    sources = os.pathsep.join([str(FOLDER.parent / "src"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {
        "MPLBACKEND": "Agg",
        "OMP_NUM_THREADS": "1",
        "PYTHONIOENCODING": "utf-8",
        "PYTHONPATH": sources.rstrip(os.pathsep),
        "PYTHONWARNINGS": "default",
    }
    done = subprocess.run(
        [sys.executable, str(path), "--out", "figures"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for warning in (NotConverged, JitterAdded):
        assert warning.__name__ not in done.stderr, done.stderr
    lines = done.stdout.splitlines()
    announced = [line.removeprefix("wrote ") for line in lines if line.startswith("wrote ")]
    assert len(lines) > len(announced), "an example prints something useful"
    assert announced, "an example draws a figure"
    for name in announced:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG"), name


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_says_what_one_learns_and_stays_short(path):
    text = path.read_text(encoding="utf-8")
    docstring = ast.parse(text).body[0]
    assert "One learns: " in ast.literal_eval(docstring.value)
    code = [line for line in text.splitlines()[docstring.end_lineno :] if line.strip()]
    assert len(code) <= 60, "an example is read in one go"
