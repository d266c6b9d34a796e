"""The page on convergence, another source and stability: its parts on small problems."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

from shared_data import shared_data

pytest.importorskip("matplotlib")
PAPERS = Path(__file__).parents[2] / "papers"
FOLDERS = [str(PAPERS), str(PAPERS / "decks")]
MODULES = ("page", "convergence", "domain", "stability", "claims", "pages")


@pytest.fixture(scope="module")
def page():
    kept = {name: sys.modules.pop(name, None) for name in MODULES}
    sys.path[:0] = FOLDERS
    try:
        yield importlib.import_module("page")
    finally:
        for folder in FOLDERS:
            sys.path.remove(folder)
        for name, module in kept.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def test_the_page_names_its_topics(page, capsys):
    assert page.main(["--list"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["convergence", "domain", "images_moved"]


def test_losses_of_a_wide_network_are_foretold_within_five_percent(page, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["convergence"], "STEPS", [0, 1, 10, 60, 300])
    arguments = ["--quick", "--only", "convergence", "--out", str(tmp_path)]
    assert page.main(arguments) == 0
    assert (tmp_path / "decks_convergence.png").read_bytes().startswith(b"\x89PNG")
    assert "Asking networks" in (tmp_path / "decks.html").read_text()


def test_aligned_digits_of_another_source_are_recognized(page, monkeypatch):
    monkeypatch.setenv("NET2GP_DATA", str(shared_data()))
    domain = sys.modules["domain"]
    monkeypatch.setattr(domain, "POOL", 100)
    source = domain.digits(200)
    laws, align = domain.without_labels(source, 3)
    right = {
        name: float((law.probs.argmax(1) == source.y_test).float().mean())
        for name, law in laws.items()
    }
    assert right["aligned"] > right["network"] + 0.05
    assert align(source.x_test).shape == (200, 1, 28, 28)


def test_the_labels_of_a_seed_are_balanced_and_its_own(page):
    domain, y = sys.modules["domain"], torch.arange(10).repeat(9)
    chosen = [domain.balanced(y, 4, torch.Generator().manual_seed(s)) for s in (0, 0, 1)]
    assert torch.equal(y[chosen[0]].bincount(), torch.full((10,), 4))
    assert torch.equal(chosen[0], chosen[1])
    assert not torch.equal(chosen[0], chosen[2])
