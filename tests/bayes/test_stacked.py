"""Perceptrons of many members without a graph: outputs and gradients are those of autograd."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from net2gp.bayes.model.stacked import FEW_THREADS, ONE_THREAD, Room, fast_tanh, stacked_mlp
from net2gp.linear.linearized import linearize

NETWORKS = {
    "wide": lambda: nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)),
    "deep": lambda: nn.Sequential(
        nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 6), nn.Sigmoid(), nn.Linear(6, 2)
    ),
    "two nonlinearities in a row": lambda: nn.Sequential(
        nn.Linear(2, 3), nn.Tanh(), nn.ReLU(), nn.Tanh(), nn.Linear(3, 2)
    ),
    "nonlinear at both ends": lambda: nn.Sequential(
        nn.Tanh(), nn.Linear(2, 3), nn.SiLU(), nn.Linear(3, 2), nn.Tanh()
    ),
    "no bias": lambda: nn.Sequential(
        nn.Linear(2, 3, bias=False), nn.GELU("tanh"), nn.Linear(3, 1, bias=False)
    ),
    "linear": lambda: nn.Linear(3, 2),
}


@pytest.mark.parametrize("own", [False, True], ids=["shared rows", "own rows"])
@pytest.mark.parametrize("name", NETWORKS)
def test_stacked_gradients_are_those_of_autograd_also_in_used_memory(name, own):
    torch.manual_seed(0)
    network = NETWORKS[name]().double()
    architecture = linearize(network)
    inputs = next(m for m in network.modules() if isinstance(m, nn.Linear)).in_features
    room = Room()
    for num_rows in (7, 7, 4):
        x = torch.randn((3, num_rows, inputs) if own else (num_rows, inputs), dtype=torch.float64)
        kept = x.clone()
        theta = torch.randn(3, architecture.num_params, dtype=torch.float64)
        layers = stacked_mlp(architecture, x[0] if own else x)
        leaf = theta.clone().requires_grad_()
        rows = x if own else x.expand(3, *x.shape)
        expected = torch.stack(
            [architecture.evaluate(architecture.unflatten(leaf[k]), rows[k]) for k in range(3)]
        )
        slopes = torch.randn_like(expected)
        (gradient,) = torch.autograd.grad(expected, leaf, slopes)
        for memory in (None, room):
            f, saved = layers.forward(theta, x, own, memory)
            found, pushed = torch.ones_like(theta), slopes.clone()
            layers.backward(theta, saved, pushed, found, memory)
            torch.testing.assert_close(f, expected.detach(), rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(found - 1, gradient, rtol=1e-11, atol=1e-12)
            assert torch.equal(pushed, slopes)
            assert torch.equal(x, kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("count", [1000, ONE_THREAD + 1])
def test_fast_tanh_is_tanh_to_the_last_places_in_each_dtype_and_size(dtype, count):
    a = torch.linspace(-30, 30, count, dtype=dtype)
    a[:4] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0], dtype=dtype)
    expected = a.double().tanh()
    threads = torch.get_num_threads()
    try:
        for many in (1, FEW_THREADS + 1):
            torch.set_num_threads(many)
            found = fast_tanh(a, torch.empty_like(a))
            scale = 4 * torch.finfo(dtype).eps
            torch.testing.assert_close(
                found.double(), expected, rtol=scale, atol=0.0, equal_nan=True
            )
            again = a.clone()
            assert fast_tanh(again, again) is again
            torch.testing.assert_close(again, found, rtol=0.0, atol=0.0, equal_nan=True)
    finally:
        torch.set_num_threads(threads)
