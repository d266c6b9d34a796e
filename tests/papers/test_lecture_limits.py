"""The measures of the lecture's programs on the limits of networks, on laws that are known."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

PAPERS = Path(__file__).parents[2] / "papers"


@pytest.fixture
def program(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(PAPERS / "lecture"), str(PAPERS), *sys.path])
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if file.startswith(str(PAPERS)):  # other papers have modules of the same names
            del sys.modules[name]


def test_tail_index_and_kurtosis_are_those_of_known_laws(program):
    conditions = program("conditions")
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(50_000, generator=generator, dtype=torch.float64)
    for index in (1.0, 2.5):
        found, error = conditions.tail_index(uniform ** (-1 / index))  # Pareto's law
        assert found == pytest.approx(index, abs=4 * error)
    draws = conditions.Draws.of(16, 20_000, seed=0)
    value, error = conditions.kurtosis(draws.kernel)
    assert value == pytest.approx(15 / 16, abs=4 * error)
    assert float(draws.share.mean()) > 0.6 > float(draws.gaussian_share.mean())


def test_exponents_and_rates_are_found_again(program):
    ntk_depth = program("ntk_depth")
    depths = torch.arange(1, 401)
    assert ntk_depth.power(depths, 3.0 / depths) == pytest.approx(-1.0, abs=1e-6)
    values = 0.7 ** depths[:, None].double()
    torch.testing.assert_close(ntk_depth.rate(values, 20, 40), torch.tensor([0.7]).double())


def test_ranks_are_averaged_over_data_sets(program):
    evidence_ranks = program("evidence_ranks")
    one = torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
    other = torch.tensor([[1.0, 30.0], [2.0, 20.0], [3.0, 10.0]])
    assert evidence_ranks.ranks(one, other) == pytest.approx((0.0, 1.0))
