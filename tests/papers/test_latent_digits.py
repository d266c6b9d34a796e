"""The measures of the program on latent maps of digits, where the answer is known."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

from net2gp.deep import LatentSearch, latent_variables

PAPERS = Path(__file__).parents[2] / "papers"


@pytest.fixture
def program(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(PAPERS / "deep"), str(PAPERS), *sys.path])
    before = set(sys.modules)
    yield importlib.import_module("latent_digits")
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if file.startswith(str(PAPERS)):  # other papers have modules of the same names
            del sys.modules[name]


def test_neighbors_of_separate_classes_agree(program):
    places = torch.tensor([[0.0], [0.1], [5.0], [5.1]])
    assert program.neighbors_agree(places, torch.tensor([0, 0, 1, 1])) == 1.0
    assert program.neighbors_agree(places, torch.tensor([0, 1, 0, 1])) == 0.0


def test_images_come_back_from_their_rows_and_figures_are_drawn(program):
    pytest.importorskip("sklearn")
    images = program.Images.read("scikit-learn", 4)
    assert images.rows.shape == (12, int(images.used.sum()))
    assert images.new_rows.shape == (30, int(images.used.sum()))
    torch.testing.assert_close(
        images.picture(images.rows[3]).flatten()[images.used], images.rows[3]
    )
    few = LatentSearch(num_steps=2, num_inducing=4)
    one, deep = (latent_variables(images.rows, widths, search=few) for widths in (2, (2, 2)))
    found = program.Found(images, one, deep)
    assert len(program.draw(found).axes) == 4
    assert len(program.claims(found, quick=True)) == 2
