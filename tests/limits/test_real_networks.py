"""Networks as people write them: their limits by one call, against finite networks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from net2gp.limits.kernels import infinite_width, nngp, ntk
from net2gp.limits.sampling.monte_carlo import monte_carlo_kernel

BIAS = 8.0
"""Slack for the bias of networks of width n: BIAS / n of the greatest entry."""


class LeNet5(nn.Module):
    """LeCun et al., Gradient-based learning applied to document recognition, 1998; all maps connected."""

    def __init__(self, classes: int = 10, size: int = 28) -> None:
        super().__init__()
        left = (size // 2 - 4) // 2
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, 5, padding=2),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.AvgPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Linear(16 * left * left, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.features(x), 1))


class Block(nn.Module):
    """He et al., Identity mappings in deep residual networks, 2016, without batch normalization."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.shortcut = None
        if stride != 1 or before != after:
            self.shortcut = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(x)
        skip = x if self.shortcut is None else self.shortcut(a)
        return skip + self.conv2(F.relu(self.conv1(a)))


class ResNet(nn.Module):
    def __init__(self, blocks: int = 3, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        stages = []
        for stage in range(3):
            before, after = width * 2 ** max(0, stage - 1), width * 2**stage
            for number in range(blocks):
                first = number == 0
                stages.append(Block(before if first else after, after, 2 if first and stage else 1))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stages(self.stem(x)))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class EncoderLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        a = self.norm1(x)
        q, k, v = (
            layer(a).view(n, t, self.heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, scale=1 / q.size(-1))
        x = x + self.out(mixed.transpose(1, 2).reshape(n, t, -1))
        return x + self.mlp(self.norm2(x))


class Encoder(nn.Module):
    """A transformer encoder of tokens, or of patches of an image."""

    def __init__(self, tokens: int | None, length: int, width: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.tokens = tokens
        self.embed = nn.Embedding(tokens, width) if tokens else nn.Conv2d(3, width, 4, stride=4)
        self.position = nn.Parameter(torch.randn(1, length, width))
        self.layers = nn.Sequential(*(EncoderLayer(width, 2) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        if not self.tokens:
            h = h.flatten(2).transpose(1, 2)
        return self.head(self.norm(self.layers(h + self.position)).mean(1))


def images(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def words(*shape: int) -> Tensor:
    return torch.randint(12, shape, generator=torch.Generator().manual_seed(0))


SMALL = {
    "lenet-5": lambda: (LeNet5(size=12), images(3, 1, 12, 12)),
    "resnet-20": lambda: (ResNet(width=2), images(2, 3, 4, 4)),
    "encoder of tokens": lambda: (Encoder(12, 6), words(3, 6)),
    "encoder of patches": lambda: (Encoder(None, 4), images(3, 3, 8, 8)),
}
LARGE = {
    "lenet-5": lambda: (LeNet5(), images(2, 1, 28, 28)),
    "resnet-20": lambda: (ResNet(width=4), images(2, 3, 12, 12)),
    "encoder of tokens": lambda: (Encoder(12, 10, layers=4), words(3, 10)),
    "encoder of patches": lambda: (Encoder(None, 16, layers=4), images(3, 3, 16, 16)),
}
WIDTHS = {
    "resnet-20": lambda: (ResNet(1, 2), ResNet(1, 4)),
    "encoder of tokens": lambda: (Encoder(12, 6, 8, 1), Encoder(12, 6, 24, 1)),
    "encoder of patches": lambda: (Encoder(None, 4, 8, 1), Encoder(None, 4, 24, 1)),
}
VARIANCES = {"weight_var": 1.6, "bias_var": 0.1}


def check(network: nn.Module, x: Tensor, width: int, num_samples: int) -> None:
    double = x.double() if x.is_floating_point() else x
    limit = infinite_width(copy.deepcopy(network).double(), **VARIANCES)
    kernel = monte_carlo_kernel(network.float(), num_samples, width=width, **VARIANCES)
    found = kernel.estimates(x.float() if x.is_floating_point() else x)
    for estimate, expected in zip(found, limit(double), strict=True):
        slack = 5 * estimate.standard_error.double() + BIAS / width * float(expected.max())
        gap = (estimate.mean.double() - expected.double()).abs()
        assert bool((gap <= slack).all()), (gap / float(expected.max()), slack)


@pytest.mark.parametrize("name", SMALL)
def test_networks_as_they_are_have_the_limit_of_finite_ones(name):
    network, x = SMALL[name]()
    check(network, x, width=48, num_samples=24)


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_larger_networks_have_the_limit_of_finite_ones(name):
    network, x = LARGE[name]()
    check(network, x, width=96, num_samples=48)


@pytest.mark.parametrize("name", SMALL)
def test_kernels_are_one_call_and_widths_do_not_matter(name):
    network, x = SMALL[name]()
    network = network.double()
    first, second = infinite_width(network, **VARIANCES)(x)
    torch.testing.assert_close(nngp(network, **VARIANCES)(x), first)
    torch.testing.assert_close(ntk(network, **VARIANCES)(x), second)
    for k in (first.double(), second.double()):
        assert float(torch.linalg.eigvalsh(k).min()) > -1e-6 * float(k.max())


@pytest.mark.parametrize("name", WIDTHS)
def test_a_wider_network_has_the_same_limit(name):
    pair, x = WIDTHS[name](), SMALL[name]()[1]
    one, other = (infinite_width(network.double(), **VARIANCES)(x) for network in pair)
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
