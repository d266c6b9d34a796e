"""Full disks and Ctrl-C: a file is written whole or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cli.conftest import FIT, heard
from net2gp.cli import predicting
from net2gp.posteriors import writing

SOURCES = Path(__file__).parents[2] / "src"

FULL = """
import resource, signal, sys
from typer.testing import CliRunner
from net2gp.cli import app
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as Python itself does
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
for line in sys.stdin.read().strip().split("\\n"):
    found = CliRunner().invoke(app, line.split())
    print(found.exit_code, found.stderr.strip().split("\\n")[-1].replace("\\n", " "))
"""


def files(folder):
    return {one.name: one.read_bytes() for one in folder.iterdir() if one.is_file()}


def test_a_full_disk_leaves_older_files_as_they_were(fitted, run):
    for name in (
        "out.csv",
        "out.npz",
        "kernel.npz",
        "report.html",
        "report.json",
        "table.csv",
        "figure.png",
    ):
        (fitted / name).write_text("older")
    pair = "model.py:regressor train.csv --weights regressor.safetensors --target price"
    lines = [
        " ".join(FIT),
        "predict posterior.safetensors train.csv -o out.csv",
        "predict posterior.safetensors train.csv -o out.npz",
        f"kernel {pair} -o kernel.npz",
        "report posterior.safetensors --held-out test.csv -o report.html",
        f"compare {pair} --standardize both --methods laplace --figure figure.png",
    ]
    before = files(fitted)
    done = subprocess.run(
        [sys.executable, "-c", FULL],
        input="\n".join(lines),
        env=os.environ | {"PYTHONPATH": str(SOURCES)},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    answers = done.stdout.strip().split("\n")
    assert len(answers) == len(lines)
    for line, answer in zip(lines, answers, strict=True):
        assert answer.startswith("1 net2gp: "), (line, answer)
        assert "not an error that net2gp foresaw" not in answer
        assert "space" in answer or "write" in answer or "large" in answer, (line, answer)
    assert files(fitted) == before


def interrupted(*_, **__):
    raise KeyboardInterrupt


def test_ctrl_c_during_a_fit_leaves_the_older_posterior(fitted, run, monkeypatch):
    def half(tensors, path, **_):
        Path(path).write_bytes(b"half")
        raise KeyboardInterrupt

    before = files(fitted)
    monkeypatch.setattr(writing, "save_file", half)
    answer = run(*FIT)
    assert answer.code == 130
    assert "net2gp: interrupted. No file was left half-written." in answer.err
    assert files(fitted) == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_result_that_cannot_be_printed_is_an_error_in_one_line(options):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "net2gp", "info", *options],
            env=os.environ | {"PYTHONPATH": str(SOURCES)},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == "net2gp: No space left on device.\n"


@pytest.mark.parametrize("ending", ["csv", "npz"])
def test_ctrl_c_during_a_prediction_leaves_nothing_half(fitted, run, monkeypatch, ending):
    before = files(fitted)
    monkeypatch.setattr(predicting.np, "savez_compressed", interrupted)
    monkeypatch.setattr(predicting.csv, "writer", interrupted)
    assert run("predict", "posterior.safetensors", "test.csv", "-o", f"out.{ending}").code == 130
    assert files(fitted) == before


def test_ctrl_c_from_outside_ends_a_process_within_seconds(fitted):
    """Many draws take minutes; the signal comes while they are made."""
    command = [sys.executable, "-m", "net2gp", *FIT, "--method", "nuts", "--noise-var", "0.01"]
    process = subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": str(SOURCES)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heard,
    )
    before = files(fitted)
    assert process.stderr is not None
    process.stderr.readline()  # the task is guessed: the fit begins
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert out == ""
    assert "Traceback" not in err
    assert files(fitted) == before
