"""The sweep of priors by VOGN: what it measures, and that its claims can fail."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from net2gp.tuning import EVIDENCE, Selection

pytest.importorskip("matplotlib")
PAPERS = Path(__file__).parents[2] / "papers"


@pytest.fixture
def program(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(PAPERS / "khan2019"), str(PAPERS), *sys.path])
    before = set(sys.modules)
    yield importlib.import_module("vogn_toy")
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if file.startswith(str(PAPERS)):
            del sys.modules[name]


def table(evidence, loss):
    columns = {EVIDENCE: evidence, "test loss": loss, "train loss": loss}
    scores = {
        name: torch.tensor(v, dtype=torch.float64)[:, None].expand(3, 2)
        for name, v in columns.items()
    }
    return Selection("δ", (0.1, 1.0, 100.0), scores)


def test_training_lowers_the_loss_and_scores_are_finite(program, monkeypatch):
    monkeypatch.setattr(program, "DRAWS", 1)
    whole = sys.modules["toy"].generate(0)
    problem = replace(whole, x_test=whole.x_test[:50], y_test=whole.y_test[:50])
    short, longer = (program.scores_of(program.train(problem, 1.0, n), problem) for n in (1, 15))
    assert set(longer) == {EVIDENCE, "test loss", "train loss"}
    assert longer["train loss"] < short["train loss"]
    assert all(torch.isfinite(torch.tensor(value)) for value in longer.values())


def test_claims_hold_for_the_stored_curves_and_fail_for_others(program):
    stored = table([-120.0, -110.0, -130.0], [0.2, 0.1, 0.5])
    assert all(claim.holds for claim in program.claims_of(stored, stored, stored))
    other = table([-150.0, -140.0, -130.0], [0.2, 0.3, 0.9])
    assert [claim.holds for claim in program.claims_of(other, stored, stored)] == [
        False,
        False,
        True,
        False,
        False,
    ]
