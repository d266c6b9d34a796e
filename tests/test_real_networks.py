"""The page on networks from the package index: what counts as right, and what is shown."""

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
        yield importlib.import_module("real_networks")
    finally:
        sys.path.remove(str(FOLDER))


def outcome(verdict, message=""):
    return {"verdict": verdict, "message": message, "seconds": 1.0}


def test_what_is_typed_is_python(program):
    for network in program.NETWORKS:
        for code in (network.setup, *program.ATTEMPTS.values(), *network.extra.values()):
            ast.parse(code)
        assert set(network.refused) <= set(program.ATTEMPTS) | set(network.extra)


def test_only_refusals_that_were_stated_are_right(program):
    network = program.Network("a", "b", "", refused={"Kron": "rest=Diagonal()"})
    right = lambda attempt, found: program.is_right(network, attempt, found)
    assert right("kernel", outcome("right"))
    assert right("Kron", outcome("refused", "pass Kron(rest=Diagonal())"))
    assert not right("Kron", outcome("refused", "something else"))
    assert not right("adapt", outcome("refused", "pass Kron(rest=Diagonal())"))
    assert not any(right("adapt", outcome(word)) for word in ("raw", "wrong", "no answer"))


def test_the_page_has_what_was_typed_and_what_came(program):
    network = program.NETWORKS[0]
    found = {
        network.name: {
            "network": {"num_params": 1234, "revision": "abc"},
            "kernel": outcome("right") | {"error": 2e-7},
            "adapt": outcome("raw", "TypeError: no"),
        }
    }
    text = program.page(found)
    assert network.setup in text
    assert "1,234" in text
    assert "Run at revision abc." in text
    assert "right (2e-07), 1.0 s" in text
    assert "**raw**, 1.0 s" in text
    assert "- adapt: raw. TypeError: no" in text
    assert program.NETWORKS[1].setup not in text
