"""On a GPU the limits are those of the CPU: eager, compiled, and by the kernels of our own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from limits.neural_tangents_cases import build, load_cases
from net2gp.inputs import map_inputs
from net2gp.limits import infinite_width
from net2gp.limits.tiles import matrices
from net2gp.types import Inputs

CASES = load_cases("given") | load_cases("further")
DEVICE = "cuda"

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def needs_a_gpu() -> None:
    if DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def moved(x: Inputs, dtype: torch.dtype) -> Inputs:
    return map_inputs(x, lambda v: v.to(DEVICE, dtype if v.is_floating_point() else None))


def distance(ours: Tensor, wanted: Tensor) -> float:
    return float((ours.cpu().double() - wanted.double()).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("name", CASES)
def test_the_device_changes_nothing(name: str) -> None:
    built = build(CASES[name])
    pair = infinite_width(
        built.network,
        weight_var=built.weight_var,
        bias_var=built.bias_var,
        parameterization=built.parameterization,
    )
    wanted = (*pair(built.inputs1), *pair(built.inputs1, built.inputs2))
    built.network.to(DEVICE)
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 2e-3)):
        x, y = moved(built.inputs1, dtype), moved(built.inputs2, dtype)
        found = (*pair(x), *pair(x, y))
        for ours, expected in zip(found, wanted, strict=True):
            assert ours.device.type == DEVICE
            assert ours.dtype == dtype
            assert distance(ours, expected) < tolerance


def pooled() -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for dilation in (1, 1, 2):
        padding = dilation
        layers += [nn.Conv2d(channels, 4, 3, padding=padding, dilation=dilation), nn.LeakyReLU(0.1)]
        channels = 4
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 1)
    return nn.Sequential(*layers, nn.AvgPool2d(2), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), *head)


@pytest.mark.parametrize("parameterization", ["ntk", "standard"])
def test_convolution_and_function_in_one_kernel_are_the_two_one_after_the_other(parameterization):
    pair = infinite_width(pooled(), weight_var=1.7, bias_var=0.2, parameterization=parameterization)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, 6, 8, generator=generator, dtype=torch.float64)
    y = torch.randn(3, 3, 6, 8, generator=generator, dtype=torch.float64)
    wanted = (*pair(x), *pair(x, y))
    found = (*pair(x.to(DEVICE)), *pair(x.to(DEVICE), y.to(DEVICE)))
    for ours, expected in zip(found, wanted, strict=True):
        assert distance(ours, expected) < 1e-12
    assert torch.equal(pair.nngp(x.to(DEVICE)), found[0])


def test_compiled_tiles_are_the_tiles(monkeypatch) -> None:
    network = nn.Sequential(nn.Linear(9, 4), nn.ReLU(), nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 1))
    pair = infinite_width(network, weight_var=1.7, bias_var=0.2)
    x = torch.randn(40, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    wanted = pair(x)
    monkeypatch.setattr(matrices, "COMPILED_ENTRIES", 1)
    for weight_var in (1.7, 1.1):  # other variances need no other compilation
        pair = infinite_width(network, weight_var=weight_var, bias_var=0.2)
        wanted = pair(x)
        for ours, expected in zip(pair(x.to(DEVICE)), wanted, strict=True):
            assert distance(ours, expected) < 1e-12
