"""LeNets on MNIST as Gaussian processes: the table holds and the figures are drawn."""

import importlib.util
import sys
from pathlib import Path

import pytest

from shared_data import shared_data, shared_reference


def load_program():
    path = Path(__file__).parents[2] / "papers" / "khan2019" / "mnist.py"
    spec = importlib.util.spec_from_file_location("papers_khan2019_mnist", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_table_holds_and_the_figures_are_drawn(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("NET2GP_DATA", str(shared_data()))
    shared_reference()
    assert load_program().main(["--out", str(tmp_path)]) == 0
    assert "differs" not in capsys.readouterr().out
    for name in ("mnist", "two_classes", "neighbors"):
        assert (tmp_path / f"khan2019_{name}.png").stat().st_size > 20_000


def test_every_number_has_its_reference():
    program = load_program()
    numbers = program.expected()
    assert set(numbers) == {"tolerance", *program.TITLES}
    wrong = program.row(program.ADAM, "accuracy", 0.98)
    right = program.row(program.ADAM, "accuracy", 0.9914)
    assert right.agrees
    assert not wrong.agrees
