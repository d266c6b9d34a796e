"""Deep networks as Gaussian processes: the program's parts, and its numbers against the reference."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from net2gp.limits import activation_of, nngp
from shared_data import shared_data, shared_reference


def load_program():
    path = Path(__file__).parents[2] / "papers" / "lee2018" / "run.py"
    spec = importlib.util.spec_from_file_location("papers_lee2018", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


run = load_program()


@pytest.fixture
def digits(monkeypatch):
    monkeypatch.setenv("NET2GP_DATA", str(shared_data()))


def setting_of(name, **changes):
    settings = run.expected_of(run.__file__)["mnist"]
    return next(one for one in settings if run.name_of(one) == name) | changes


def test_images_have_mean_zero_and_one_norm():
    images = torch.rand(5, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    x = run.Digits.of(images, torch.arange(5)).x
    torch.testing.assert_close(x.mean(1), torch.zeros(5).double(), rtol=0, atol=1e-14)
    torch.testing.assert_close(x.square().mean(1), torch.ones(5).double(), rtol=1e-14, atol=0)


def test_targets_of_balanced_digits_have_mean_zero():
    y = run.Digits.of(torch.rand(30, 1, 28, 28), torch.arange(30) % 10).y
    assert set(y.unique().tolist()) == {-0.1, 0.9}
    torch.testing.assert_close(y.mean(0), torch.zeros(10).double(), rtol=0, atol=1e-15)
    torch.testing.assert_close(y.sum(1), torch.zeros(30).double(), rtol=0, atol=1e-14)


def test_the_depth_is_the_number_of_hidden_layers():
    network = run.multilayer(nn.Tanh(), 3)
    assert sum(isinstance(layer, nn.Tanh) for layer in network) == 3
    assert network(torch.zeros(2, 784)).shape == (2, 10)


def test_bins_are_of_a_hundred_digits_in_the_order_of_their_variance():
    variance = torch.rand(1050, generator=torch.Generator().manual_seed(0)).double()
    result = run.Result(1.0, torch.zeros(1050, 10), variance, 3 * variance + 1, 1.0, 0.0)
    predicted, realized = result.bins
    assert predicted.shape == (10,)
    assert (np.diff(predicted) > 0).all()
    np.testing.assert_allclose(realized, 3 * predicted + 1, rtol=1e-12)
    assert result.numbers["pearson"] == pytest.approx(1.0)
    assert result.numbers["spearman"] == pytest.approx(1.0)


def test_the_critical_line_of_tanh_is_that_of_the_reference():
    rows = run.check_critical_line()
    assert len(rows) == 7
    assert max(abs(row.found / row.expected - 1) for row in rows) <= 1e-4


def test_the_critical_line_expected_is_that_of_the_reference_file():
    points = json.loads((shared_reference() / "analytic_refs.json").read_text())
    known = {point["sb2"]: point["sw2_critical"] for point in points["tanh_critical_line"]}
    for point in run.expected_of(run.__file__)["critical"]:
        assert point["weight_var"] == pytest.approx(known[point["bias_var"]], rel=1e-9)


def test_a_lookup_is_exact_at_its_entries_and_linear_between():
    lookup = activation_of(run.LookupTanh())
    q, c = lookup.variances[3], lookup.correlations[100:102]
    exact = activation_of(nn.Tanh()).dual(q * c, q, q, False)[0]
    torch.testing.assert_close(lookup.dual(q * c, q, q, False)[0], exact, rtol=1e-9, atol=0)
    between = lookup.dual(q * c.mean(), q, q, False)[0]
    torch.testing.assert_close(between, exact.mean(), rtol=1e-9, atol=0)


def test_a_lookup_makes_inputs_one_that_are_more_alike_than_its_last_correlation():
    lookup, q = activation_of(run.LookupTanh()), torch.tensor(1.0, dtype=torch.float64)
    last, beyond = (lookup.dual(c * q, q, q, False)[0] for c in (0.99999, 0.9999999))
    assert last == beyond
    exact = activation_of(nn.Tanh())
    assert exact.dual(0.9999999 * q, q, q, False)[0] > exact.dual(0.99999 * q, q, q, False)[0]


def test_a_network_by_lookup_is_near_the_exact_one():
    x = run.Digits.of(torch.rand(6, 1, 28, 28), torch.arange(6)).x
    variances = {"weight_var": 1.6, "bias_var": 0.2}
    exact = nngp(run.multilayer(nn.Tanh(), 2), **variances)(x)
    lookup = nngp(run.multilayer(run.LookupTanh(), 2), **variances)(x)
    assert 0 < float((exact - lookup).abs().max()) < 5e-3


@pytest.mark.usefixtures("digits")
def test_predictions_are_those_of_the_reference_digit_by_digit():
    known = np.load(shared_reference() / "nngp_mnist1k_relu20_exact.npz")
    test = run.held_out_digits(500)
    result = run.regress(setting_of("1k ReLU-20-1.45-0.28"), run.training_digits(1000), test)
    np.testing.assert_allclose(result.mean.numpy(), known["mean"][:500], rtol=0, atol=1e-6)
    np.testing.assert_allclose(result.variance.numpy(), known["var"][:500], rtol=1e-6)


@pytest.mark.usefixtures("digits")
def test_accuracy_and_calibration_of_a_hundred_digits_are_those_of_the_reference():
    ((setting, result),) = run.classify("100")
    assert list(run.differences(setting, result)) == []
    assert result.accuracy == pytest.approx(setting["accuracy"], abs=2e-4)


@pytest.mark.usefixtures("digits")
@pytest.mark.parametrize(("weight_var", "bias_var"), [(1.5, 0.1), (5.0, 2.0)])
def test_deep_relu_cells_of_the_phase_diagram_are_those_of_the_reference(weight_var, bias_var):
    path = shared_reference() / "nngp_phase_mnist500_depth50.json"
    grid = json.loads(path.read_text())["relu"]
    known = grid["acc"][grid["sb2"].index(bias_var)][grid["sw2"].index(weight_var)]
    cell = {"activation": "relu", "depth": 50, "weight_var": weight_var, "bias_var": bias_var}
    result = run.regress(cell, run.training_digits(500), run.held_out_digits(1000))
    assert result.accuracy == pytest.approx(known, abs=2e-3)


def test_a_map_names_rows_whose_best_cell_moved():
    reference = np.array([[0.7, 0.9], [0.1, 0.8]])
    found = np.array([[0.9, 0.7], [0.1, 0.8]])
    moved = run.PhaseMap("relu", [1.0, 2.0], [0.0, 0.1], found, reference)
    assert moved.ridge == [1.0, 2.0]
    assert moved.reference_ridge == [2.0, 2.0]
    assert moved.gap == pytest.approx(0.2)
    assert len(list(run.check_maps([moved]))) == 2
    same = run.PhaseMap("relu", [1.0, 2.0], [0.0, 0.1], reference, reference)
    assert list(run.check_maps([same])) == []


def test_a_wrong_number_is_reported():
    result = run.Result(
        0.5,
        torch.zeros(10_000, 10),
        torch.rand(10_000, generator=torch.Generator().manual_seed(0)),
        torch.ones(10_000) + torch.rand(10_000, generator=torch.Generator().manual_seed(1)),
        1.0,
        0.0,
    )
    found = list(run.differences(setting_of("1k ReLU-20-1.45-0.28"), result))
    assert any("accuracy is 0.5, expected 0.9242" in line for line in found)
    assert any("pearson is" in line for line in found)


@pytest.mark.slow
@pytest.mark.usefixtures("digits")
@pytest.mark.parametrize("name", ["100", "1k", "5k", "phase"])
def test_the_tables_and_figures_are_reproduced(name, tmp_path, capsys):
    assert run.main(["--out", str(tmp_path), "--runs", name]) == 0
    assert "all numbers agree" in capsys.readouterr().out
    figures = list(tmp_path.glob("*.png"))
    assert figures
    assert all(figure.stat().st_size > 20_000 for figure in figures)
