"""From networks to Gaussian processes: what the program measures, and that it holds."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import ks_2samp

from net2gp.limits.finite_width import HiddenLayer, finite_width, sample_outputs


def load_program():
    path = Path(__file__).parents[2] / "papers" / "neal1996" / "run.py"
    spec = importlib.util.spec_from_file_location("papers_neal1996", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


run = load_program()
SHALLOW, DEEP = run.expected_of(run.__file__)["case"][:2]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("setting", [SHALLOW, DEEP], ids=["shallow", "deep"])
def test_networks_drawn_weight_by_weight_have_the_law_of_the_samples(setting):
    drawn = run.Networks.draw(run.architecture(setting), 4, 20_000, seeded())(run.X.float())
    layers = [HiddenLayer(run.ACTIVATIONS[setting["activation"]], 4)] * setting["depth"]
    sampled = sample_outputs(layers, run.X, 20_000, generator=seeded(1), **run.prior(setting))
    assert ks_2samp(drawn[:, 0].numpy(), sampled[:, 0, 0].numpy()).pvalue > 0.01


def test_normal_samples_have_no_excess_and_no_correlation():
    f = torch.randn(20_000, 8, dtype=torch.float64, generator=seeded())
    for statistic in (run.excess_kurtosis, run.mean_correlation):
        found = run.estimate(statistic, f)
        assert abs(found.value) < 4 * found.error


def test_a_common_scale_leaves_outputs_uncorrelated_and_their_squares_not():
    f = torch.randn(20_000, 8, dtype=torch.float64, generator=seeded())
    f = f * (torch.rand(20_000, 1, dtype=torch.float64, generator=seeded(1)) + 0.5)
    outputs, squares = (run.estimate(run.mean_correlation, g) for g in (f, f.square()))
    assert abs(outputs.value) < 4 * outputs.error
    assert squares.value > 20 * squares.error


@pytest.mark.parametrize("width", [4, 16])
def test_kurtosis_and_correlation_of_squares_are_those_of_the_closed_form(width):
    found = run.measure(SHALLOW, width, 20_000, seeded())
    assert found.known_kurtosis == pytest.approx(15 / width)
    assert found.known_square_correlation == pytest.approx(5 / (2 * width + 15))
    assert abs(found.kurtosis.value - found.known_kurtosis) < 4 * found.kurtosis.error
    gap = abs(found.square_correlation.value - found.known_square_correlation)
    assert gap < 4 * found.square_correlation.error


def test_the_distance_from_the_limit_is_that_of_the_edgeworth_series():
    found = run.measure(SHALLOW, 16, 40_000, seeded())
    assert found.distance == pytest.approx(found.known_distance, abs=2 / 40_000**0.5)
    assert found.p_value < 1e-3


def test_the_edgeworth_distance_halves_with_twice_the_width():
    known = [finite_width([HiddenLayer(torch.nn.Tanh(), n)] * 2, run.X) for n in (50, 100)]
    wide, wider = (run.edgeworth_distance(one) for one in known)
    assert wide == pytest.approx(2 * wider, rel=1e-9)


def test_slopes_of_exact_numbers_are_minus_one():
    def at(width):
        squares = 5 / (2 * width + 15)
        exact = [run.Estimate(value, 0.01) for value in (15 / width, 0.0, squares)]
        return run.Width(width, *exact, 0.0, 0.5, 15 / width, squares, 0.0)

    case = run.Case(SHALLOW, [at(width) for width in (32, 64, 128)])
    for name in ("kurtosis", "square_correlation"):
        assert case.slope(name).value == pytest.approx(-1.0, abs=1e-12)
    np.testing.assert_allclose(case.errors("kurtosis"), 0.01)
    assert case.name == "ReLU, 1 hidden layer"


@pytest.mark.slow
def test_the_table_holds_and_the_figures_are_drawn(tmp_path, capsys):
    assert run.main(["--out", str(tmp_path)]) == 0
    assert "differs" not in capsys.readouterr().out
    for name in ("neal1996_histograms.png", "neal1996_width.png"):
        assert (tmp_path / name).stat().st_size > 20_000
