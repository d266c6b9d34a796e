"""The page on depth: its measures on laws that are known, and topics that the page can run."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")
PAPERS = Path(__file__).parents[2] / "papers"


@pytest.fixture
def program(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(PAPERS / "deep"), str(PAPERS), *sys.path])
    kept = {name: sys.modules.pop(name, None) for name in ("page", "pages", "claims", "studies")}
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if file.startswith(str(PAPERS)):  # other papers have modules of the same names
            del sys.modules[name]
    sys.modules.update({name: module for name, module in kept.items() if module is not None})


def test_the_kurtosis_of_a_narrow_layer_is_that_of_the_quadrature(program):
    bottleneck = program("bottleneck")
    assert bottleneck.limit() == pytest.approx(2.3309, abs=1e-4)
    found = bottleneck.Kurtosis.of((8,), 20_000, seed=0)
    assert found.value == pytest.approx(bottleneck.limit(), abs=4 * found.error + 0.02)


def test_standard_errors_are_counted(program):
    draws = program("prior_draws")
    values = torch.tensor([-1.0, 1.0] * 50, dtype=torch.float64)
    assert draws.errors_apart(values, 0.0) == pytest.approx(0.0)
    assert draws.errors_apart(values, 0.5) == pytest.approx(5.0, rel=0.01)


def test_the_page_has_all_topics_and_can_run_one(program, monkeypatch, tmp_path, capsys):
    page = program("page")
    names = [topic.__name__ for topic in page.TOPICS]
    assert names[:4] == ["gallery", "depth", "spectra", "bottleneck"]
    pages = program("pages")

    def gallery(quick):
        figure, _ = pages.panels(1)
        return pages.Study("small", "Small", "", figure, (pages.at_least("one", 0.5, 1.0),))

    monkeypatch.setattr(page, "TOPICS", [gallery])
    assert page.main(["--out", str(tmp_path), "--quick"]) == 1
    assert "When does depth help?" in (tmp_path / "deep.html").read_text(encoding="utf-8")
    assert (tmp_path / "deep_small.png").exists()
    assert "0 of 1 came out as stated" in capsys.readouterr().out
