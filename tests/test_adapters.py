"""The page on adapters: what counts as right."""

import ast
import importlib
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def program():
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module("adapters")
    finally:
        sys.path.remove(str(FOLDER))


def row(error=1e-3, copied=0, structured=True):
    names = ("kernel", "variances", "padding")
    return {name: {"error": error, "allowed": 1e-2} for name in names} | {
        "copied": copied,
        "structured": structured,
    }


def test_errors_beyond_rounding_and_copies_of_the_base_are_faults(program):
    assert program.faults_of(row()) == []
    assert len(program.faults_of(row(error=2e-2))) == 3
    assert len(program.faults_of(row(error=float("nan")))) == 3
    assert program.faults_of(row(copied=8)) == ["8 bytes of frozen parameters were copied"]
    assert program.faults_of(row(structured=False)) == ["adapters went without a layer rule"]
    assert program.faults_of({"failed": "no output"}) == ["no output"]


def test_diagonals_of_two_libraries_must_agree(program):
    jobs = [job for job in program.costs(False) if job["kind"] == "float32"]
    rows = [{"variances": [1.0, 2.0]} for _ in jobs]
    assert program.disagreements(jobs, rows) == []
    rows[-1] = {"variances": [1.0, 2.1]}
    (fault,) = program.disagreements(jobs, rows)
    assert fault == "the diagonals of both libraries give other variances"
    rows[-1], rows[0] = {"failed": "not for this dtype"}, {"failed": "an error"}
    assert program.disagreements(jobs, rows) == ["kron, float32: an error"]


def test_the_worker_is_python_and_knows_every_job(program):
    text = (FOLDER / "worker_adapters.py").read_text(encoding="utf-8")
    names = {node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)}
    assert {job["task"] for job in (*program.checks(False), *program.costs(False))} <= names
