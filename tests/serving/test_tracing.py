"""Graphs hold for any number of rows, and compute what points share once."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from net2gp.linear.linearized import linearize
from net2gp.serving.programs.gradients import direct, outputs_and_gradients, patches
from net2gp.serving.programs.tracing import repeated, traced


def slope(function):
    def backward(x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = function(x)
            return torch.autograd.grad(y, x, torch.cos(y))[0]

    return backward


@pytest.mark.parametrize(
    "function",
    [
        nn.Conv2d(2, 4, 3, padding=1),
        nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2),
        nn.Conv2d(2, 4, (3, 2), dilation=2, stride=(1, 3)),
        nn.ConvTranspose2d(2, 3, 3, stride=2),
        lambda x: F.max_pool2d(x, 3, stride=2, padding=1),
        lambda x: F.avg_pool2d(x, 3, stride=2, padding=1),
        lambda x: F.avg_pool2d(x, 2, divisor_override=3),
        lambda x: F.adaptive_avg_pool2d(x, 1),
        lambda x: F.pad(x, (1, -2, 0, 3), value=2.0),
        nn.GroupNorm(2, 2),
        nn.LayerNorm(9),
        nn.BatchNorm2d(2).eval(),
        *(nn.ELU(), nn.GELU(), nn.Hardswish(), nn.LeakyReLU(), nn.SiLU(), nn.Softplus(), nn.Softmax(-1)),
    ],
    ids=lambda function: type(function).__name__,
)  # fmt: skip
def test_backward_operations_have_rules_for_any_number_of_rows(function):
    torch.manual_seed(0)
    if isinstance(function, nn.Module):
        function.requires_grad_(False)
    graph = traced(slope(function), [torch.randn(3, 2, 11, 9)])
    assert not any("backward" in str(node.target) for node in graph.graph.nodes)
    for count in (1, 3, 6):
        x = torch.randn(count, 2, 11, 9)
        assert torch.allclose(graph(x), slope(function)(x), atol=1e-5)


def test_padding_leaves_the_number_of_rows_open_if_they_are_the_last_axis():
    graph = traced(lambda x: F.pad(x.mT, (0, 0, 1, 2)), [torch.randn(3, 2)])
    for count in (1, 3, 6):
        x = torch.randn(count, 2)
        assert torch.equal(graph(x), F.pad(x.mT, (0, 0, 1, 2)))


def test_a_network_runs_once_for_the_gradients_of_all_outputs():
    network = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        linearized = linearize(network.eval())

    def function(x):
        out, found = outputs_and_gradients(linearized, x, 4)
        return out, torch.cat([direct(factor) for factor in found.values()], -1)

    graph = traced(function, [torch.randn(3, 2)])
    forward = [node for node in graph.graph.nodes if str(node.target) == "aten.tanh.default"]
    assert len(forward) == 2
    for count in (1, 3, 7):
        x = torch.randn(count, 2)
        out, J = graph(x)
        assert torch.allclose(out, network(x), atol=1e-6)
        assert torch.allclose(J, linearized.jacobian(x), atol=1e-6)


def test_repeated_rows_are_next_to_each_other():
    assert repeated(torch.tensor([[1], [2]]), 3).flatten().tolist() == [1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv1d(4, 6, 3, padding=2, stride=2, groups=2),
        nn.Conv2d(4, 6, (3, 2), padding="same", dilation=2),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular", groups=4),
        nn.Conv3d(4, 2, 2),
    ],
    ids=["1d", "same", "circular", "3d"],
)
def test_patches_times_weights_are_the_convolution(layer):
    torch.manual_seed(0)
    x = torch.randn(2, 4, *(7, 6, 5)[: len(layer.kernel_size)])
    found = patches(layer, x)  # (B, groups, places, inputs)
    weight = layer.weight.reshape(layer.groups, 1, -1, found.shape[-1]).transpose(0, 1)
    out = (found @ weight.mT).mT.reshape(2, layer.out_channels, -1)
    assert torch.allclose(out + layer.bias[:, None], layer(x).flatten(2), atol=1e-5)
