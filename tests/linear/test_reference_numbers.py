"""The numbers that neural-tangents gives for finite networks in float64.

Traces there are divided by the number of outputs, as in `TraceKernel`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from net2gp.linear import linearize

FILE = Path(__file__).parents[1] / "reference_data" / "neural_tangents_empirical.npz"


@pytest.fixture(scope="module")
def arrays() -> dict[str, Tensor]:
    with np.load(FILE) as archive:
        return {name: torch.from_numpy(archive[name]) for name in archive.files}


def mlp(arrays: dict[str, Tensor], activation: str) -> nn.Module:
    act = nn.Tanh if activation == "tanh" else nn.ReLU
    network = nn.Sequential(nn.Linear(5, 8), act(), nn.Linear(8, 6), act(), nn.Linear(6, 3))
    network = network.double().eval()
    network.load_state_dict(
        {
            f"{2 * i}.{name}": arrays[f"mlp_{letter}{i}"]
            for i in range(3)
            for name, letter in (("weight", "W"), ("bias", "b"))
        }
    )
    return network


def convolutional(arrays: dict[str, Tensor]) -> nn.Module:
    layers = nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten()
    network = nn.Sequential(*layers, nn.Linear(36, 3)).double().eval()
    names = {"0.weight": "cnn_K", "0.bias": "cnn_kb", "4.weight": "cnn_L", "4.bias": "cnn_lb"}
    network.load_state_dict({name: arrays[source] for name, source in names.items()})
    return network


def assert_same(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert float((actual - expected).abs().max()) <= 1e-10 * float(expected.abs().max())


def by_points(K: Tensor, num_outputs: int = 3) -> Tensor:
    """(N·C, M·C) as (N, M, C, C)."""
    return K.unflatten(1, (-1, num_outputs)).unflatten(0, (-1, num_outputs)).permute(0, 2, 1, 3)


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_tangent_kernels_of_a_multilayer_perceptron(arrays, activation: str) -> None:
    linearized = linearize(mlp(arrays, activation))
    x1, x2 = arrays["mlp_x1"], arrays["mlp_x2"]
    expected = {
        key.removeprefix(f"mlp_{activation}_"): value
        for key, value in arrays.items()
        if key.startswith(f"mlp_{activation}_")
    }
    kernel, trace = linearized.kernel(), linearized.trace_kernel()
    full_11, full_12 = by_points(kernel(x1)), by_points(kernel(x1, x2))
    assert_same(linearized(x1), expected["f1"])
    assert_same(linearized(x2), expected["f2"])
    assert_same(full_11, expected["ntk_full_11"])
    assert_same(full_12, expected["ntk_full_12"])
    assert_same(full_11.diagonal(dim1=2, dim2=3), expected["ntk_diagout_11"])
    assert_same(full_12.diagonal(dim1=2, dim2=3), expected["ntk_diagout_12"])
    assert_same(trace(x1), expected["ntk_trace_11"])
    assert_same(trace(x1, x2), expected["ntk_trace_12"])
    assert_same(kernel.blocks(x1), expected["ntk_diagbatch_full_11"])
    assert_same(trace.diag(x1), expected["ntk_diagbatch_trace_11"])
    vector = expected["vp_vec"].reshape(-1, 1)
    assert_same(kernel.matmul(x1, x2, vector).reshape(-1, 3), expected["ntkvp_12"])


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_output_products_of_a_multilayer_perceptron(arrays, activation: str) -> None:
    f = linearize(mlp(arrays, activation))(arrays["mlp_x1"])
    prefix = f"mlp_{activation}_nngp_"
    full = torch.einsum("nc,md->nmcd", f, f)
    assert_same(full, arrays[f"{prefix}full_11"])
    assert_same(full.diagonal(dim1=2, dim2=3), arrays[f"{prefix}diagout_11"])
    assert_same(f @ f.T / 3, arrays[f"{prefix}trace_11"])
    assert_same(torch.einsum("nc,nd->ncd", f, f), arrays[f"{prefix}diagbatch_full_11"])
    assert_same((f * f).mean(1), arrays[f"{prefix}diagbatch_trace_11"])


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_taylor_polynomials_of_a_multilayer_perceptron(arrays, activation: str) -> None:
    prefix = f"mlp_{activation}_"
    linearized = linearize(mlp(arrays, activation))
    moved = {
        f"{2 * i}.{name}": arrays[f"{prefix}new{letter}{i}"]
        for i in range(3)
        for name, letter in (("weight", "W"), ("bias", "b"))
    }
    x = arrays["mlp_x1"]
    assert_same(linearized.taylor(x, moved), arrays[f"{prefix}linearize"])
    assert_same(linearized.evaluate(moved, x), arrays[f"{prefix}f_new"])
    for order in range(4):
        assert_same(linearized.taylor(x, moved, order), arrays[f"{prefix}taylor{order}"])


def test_tangent_kernels_of_a_convolutional_network(arrays) -> None:
    linearized = linearize(convolutional(arrays))
    x1, x2 = arrays["cnn_x1"], arrays["cnn_x2"]
    kernel, trace = linearized.kernel(), linearized.trace_kernel()
    assert_same(linearized(x1), arrays["cnn_f1"])
    assert_same(by_points(kernel(x1)), arrays["cnn_ntk_full_11"])
    assert_same(by_points(kernel(x1, x2)), arrays["cnn_ntk_full_12"])
    assert_same(trace(x1), arrays["cnn_ntk_trace_11"])
    assert_same(trace(x1, x2), arrays["cnn_ntk_trace_12"])
