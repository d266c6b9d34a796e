"""Limits against a table of numbers computed by other means: closed forms, quadrature and sampling.

The numbers are those of `analytic_refs.json` of the reference data: one layer and deep ReLU networks at
two points of three inputs, erf, tanh, and trigonometric features.
"""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

from net2gp.limits import activation_of, infinite_width, nngp
from net2gp.limits.modules.pointwise import Erf, Rbf
from net2gp.limits.phase import critical_line, fixed_point, slope
from shared_data import shared_reference

A, B = (0.3, -1.2, 0.7), (1.0, 0.4, -0.5)
POINTS = torch.tensor([A, B], dtype=torch.float64)
VARIANCES = {"weight_var": 1.6, "bias_var": 0.1}

DEEP_RELU = {
    1: ((1.0418666666666667, 0.2862278814666008, 0.7816000000000001),
        (1.9837333333333333, 0.22169274395003857, 1.4632)),
    2: ((0.9334933333333334, 0.4559444206441601, 0.72528),
        (2.52048, 0.5628425065209733, 1.8958400000000002)),
    3: ((0.8467946666666667, 0.5249884720294751, 0.680224),
        (2.8631786666666668, 0.8343019246986957, 2.196896)),
    5: ((0.7219485866666667, 0.5591323039208558, 0.61534336),
        (3.17633152, 1.2167174428927767, 2.5367001600000005)),
    10: ((0.5727281128789333, 0.5330132509483336, 0.5377957122048002),
         (3.085260876868267, 1.7093502555380775, 2.7010044694528004)),
}  # fmt: skip
"""Kernels (k_aa, k_ab, k_bb) and tangent kernels by the number of hidden layers."""

TANH = {
    0.20000000998: 0.14718182305988073,
    1.0000000099: 0.39429449219763835,
    2.0000000098: 0.5199757465310173,
    5.0000000095: 0.6684448852933871,
    10.000000009: 0.7572662770225669,
    20.000000008: 0.8251071264724525,
    50.000000005000004: 0.8880745116858015,
    100.0: 0.9205368634305169,
}
"""E[tanh²] by variance, by adaptive quadrature."""


def deep(depth: int, activation: type[nn.Module]) -> nn.Module:
    layers: list[nn.Module] = []
    width = 3
    for _ in range(depth):
        layers += [nn.Linear(width, 8), activation()]
        width = 8
    return nn.Sequential(*layers, nn.Linear(width, 1))


def triple(kernel: torch.Tensor) -> list[float]:
    return [kernel[0, 0].item(), kernel[0, 1].item(), kernel[1, 1].item()]


@pytest.mark.parametrize("depth", DEEP_RELU)
def test_deep_relu_kernels(depth):
    for kernel, expected in zip(
        infinite_width(deep(depth, nn.ReLU), **VARIANCES)(POINTS), DEEP_RELU[depth], strict=True
    ):
        assert triple(kernel) == pytest.approx(expected, rel=1e-12)


def test_one_layer_of_erf():
    found = nngp(deep(1, Erf), **VARIANCES)(POINTS)[0, 1].item()
    assert found == pytest.approx(-0.023860315597894505, abs=1e-13)


def test_trigonometric_features_are_the_squared_exponential():
    lengthscale = 0.9
    network = nn.Sequential(nn.Linear(3, 8, bias=False), Rbf(1 / (2 * lengthscale**2)))
    found = nngp(network, weight_var=3.0)(POINTS)[0, 1].item()
    distance = (POINTS[0] - POINTS[1]).square().sum().item()
    assert found == pytest.approx(0.06256151675264705, rel=1e-12)
    assert found == pytest.approx(math.exp(-distance / (2 * lengthscale**2)), rel=1e-12)


@pytest.mark.parametrize("variance", TANH)
def test_tanh_is_right_at_small_and_large_variances(variance):
    found = activation_of(nn.Tanh()).variance(torch.tensor([variance], dtype=torch.float64), False)
    assert found[0].item() == pytest.approx(TANH[variance], rel=1e-8)


def test_the_table_here_is_that_of_the_reference():
    reference = json.loads((shared_reference() / "analytic_refs.json").read_text())
    for row in reference["deep_relu_nngp_ntk"]:
        assert (tuple(row["K"]), tuple(row["NTK"])) == DEEP_RELU[row["L"]]
    assert {row["var"]: row["quad"] for row in reference["tanh_qaa_quad_vs_nngp_grid"]} == TANH
    weight_var, bias_var, expected = reference["relu"]["example"]
    assert fixed_point(nn.ReLU(), weight_var, bias_var).item() == pytest.approx(expected)
    assert slope(nn.ReLU(), expected, weight_var).item() == pytest.approx(weight_var / 2)
    for row in reference["tanh_critical_line"]:
        found = critical_line(nn.Tanh(), row["sb2"]).item()
        assert found == pytest.approx(row["sw2_critical"], rel=1e-4)
        assert fixed_point(nn.Tanh(), found, row["sb2"]).item() == pytest.approx(
            row["qstar"], rel=1e-3
        )
