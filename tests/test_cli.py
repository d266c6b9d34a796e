"""The command line: what it prints, where it writes, and how it refuses."""

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner

from net2gp import __version__
from net2gp.cli import app

SOURCES = Path(__file__).parent.parent / "src"


def run(*arguments):
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def no_scenes(monkeypatch):
    monkeypatch.setattr(import_module("net2gp.report.demo"), "SCENES", {})


def test_the_version_is_that_of_the_package():
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"net2gp {__version__}\n")


def test_without_a_command_the_help_lists_the_commands():
    assert "demo" in run().output
    assert "--out" in run("demo", "--help").output


def test_the_entry_point_runs_in_a_process_of_its_own():
    done = subprocess.run(
        [sys.executable, "-c", "from net2gp.cli import main; main()", "--version"],
        env=os.environ | {"PYTHONPATH": str(SOURCES)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == f"net2gp {__version__}\n"


def test_the_demo_says_where_its_page_is(tmp_path, no_scenes):
    result = run("demo", "--out", str(tmp_path / "new" / "folder"))
    page = tmp_path / "new" / "folder" / "index.html"
    assert result.exit_code == 0
    assert str(page) in result.stdout
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_the_demo_writes_into_demo_output_if_not_told_otherwise(tmp_path, monkeypatch, no_scenes):
    monkeypatch.chdir(tmp_path)
    assert run("demo").exit_code == 0
    assert (tmp_path / "demo_output" / "index.html").is_file()


def test_away_from_a_terminal_only_the_last_line_is_printed(tmp_path, no_scenes):
    result = run("demo", "--out", str(tmp_path))
    assert result.stdout.count("\n") == 1
    assert result.stderr == ""


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_file_in_the_way_is_refused_in_one_line(tmp_path, below):
    (tmp_path / "taken").write_text("mine")
    result = run("demo", "--out", str(tmp_path / "taken" / below))
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "net2gp: cannot write into the folder" in result.stderr
    assert "net2gp demo --out some_folder" in result.stderr
    assert "Traceback" not in result.stderr
    assert (tmp_path / "taken").read_text() == "mine"


def test_a_missing_dependency_is_named_without_a_traceback(tmp_path, monkeypatch):
    def scene():
        raise ImportError(
            "plots need matplotlib, which is not installed: pip install net2gp[plots]"
        )

    monkeypatch.setattr(import_module("net2gp.report.demo"), "SCENES", {"broken": scene})
    result = run("demo", "--out", str(tmp_path))
    assert result.exit_code == 1
    assert "pip install net2gp[plots]" in result.stderr
