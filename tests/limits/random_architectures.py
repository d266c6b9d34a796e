"""Random networks as a PyTorch user would write them: `architecture(seed)` gives one and inputs for it.

Every block takes a Gaussian signal to a Gaussian signal (it ends in a layer of weights), so that blocks
can be put together in any order.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLOSED: tuple[Callable[[], nn.Module], ...] = (nn.ReLU, lambda: nn.LeakyReLU(0.2), nn.GELU)
"""Activations whose moments are formulas."""

INTEGRATED: tuple[Callable[[], nn.Module], ...] = (
    nn.Tanh,
    nn.SiLU,
    nn.Sigmoid,
    nn.ELU,
    nn.Softplus,
    nn.Hardtanh,
    nn.Mish,
)
"""Activations whose moments are integrals."""

DEAR = tuple(type(build()) for build in INTEGRATED)

OUTPUTS = 32
POINTS = 3


@dataclass(frozen=True)
class Architecture:
    """A network in float64, inputs for it, and variances."""

    name: str
    network: nn.Module
    x: Tensor
    weight_var: float
    bias_var: float
    dear: bool
    """Whether there are integrals for pairs of positions."""


@dataclass(frozen=True)
class Kind:
    """What layers are made of: the number of spatial axes, or zero for Linear on the last axis."""

    random: random.Random
    axes: int
    rare: float = 0.5
    """How often an activation is one whose moments are integrals: dear for many pairs of positions."""

    @property
    def channel(self) -> int:
        return 1 if self.axes else -1

    def weights(self, before: int, after: int) -> nn.Module:
        """Weights that keep the shape of the positions."""
        pick, bias = self.random.choice, self.random.random() < 0.8
        if not self.axes:
            return nn.Linear(before, after, bias=bias)
        conv = nn.Conv1d if self.axes == 1 else nn.Conv2d
        size, dilation = pick(((1, 1), (3, 1), (3, 2)))
        mode = pick(("zeros", "zeros", "circular", "reflect", "replicate"))
        return conv(
            before,
            after,
            size,
            padding=dilation * (size - 1) // 2,
            dilation=dilation,
            groups=pick((1, 1, 2)),
            bias=bias,
            padding_mode=mode,
        )

    def norm(self, width: int) -> nn.Module:
        if self.axes:
            return nn.GroupNorm(self.random.choice((1, 2)), width)
        return self.random.choice((nn.LayerNorm, nn.RMSNorm))(width)

    def activation(self) -> nn.Module:
        integrated = self.random.random() < self.rare
        return self.random.choice(INTEGRATED if integrated else CLOSED)()


class Plain(nn.Module):
    def __init__(self, kind: Kind, width: int) -> None:
        super().__init__()
        self.act, self.weights = kind.activation(), kind.weights(width, width)

    def forward(self, h: Tensor) -> Tensor:
        return self.weights(self.act(h))


class Residual(Plain):
    def forward(self, h: Tensor) -> Tensor:
        return h + 0.7 * self.weights(self.act(h))


class Doubled(Plain):
    def forward(self, h: Tensor) -> Tensor:
        return self.weights(self.act((h + h) / 2 + 0.5 * h))


class Repeated(Plain):
    """The same weights twice."""

    def forward(self, h: Tensor) -> Tensor:
        once = self.weights(self.act(h))
        return self.weights(self.act(once)) + once


class SelfGated(Plain):
    def forward(self, h: Tensor) -> Tensor:
        return self.weights(self.act(h) * h)


class TwoLayers(nn.Module):
    def __init__(self, kind: Kind, width: int) -> None:
        super().__init__()
        self.one, self.two = kind.activation(), kind.activation()
        self.first, self.second = kind.weights(width, 2 * width), kind.weights(2 * width, width)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.second(self.two(self.first(self.one(h))))


class Branches(nn.Module):
    """One branch is computed from the other."""

    def __init__(self, kind: Kind, width: int) -> None:
        super().__init__()
        self.one, self.two = kind.activation(), kind.activation()
        self.first, self.second = kind.weights(width, width), kind.weights(width, width)

    def forward(self, h: Tensor) -> Tensor:
        a = self.first(self.one(h))
        return self.second(self.two(a)) - a


class PostActivation(Branches):
    def forward(self, h: Tensor) -> Tensor:
        a = self.one(h)
        return self.second(a + self.two(self.first(a)))


class Gated(nn.Module):
    def __init__(self, kind: Kind, width: int) -> None:
        super().__init__()
        self.act, self.squash = kind.activation(), nn.ReLU() if kind.rare < 0.5 else nn.Sigmoid()
        self.value, self.gate, self.out = (kind.weights(width, width) for _ in range(3))

    def forward(self, h: Tensor) -> Tensor:
        a = self.act(h)
        return self.out(self.value(a) * self.squash(self.gate(a)))


class GaussianProduct(Gated):
    """A product of signals that share weights."""

    def forward(self, h: Tensor) -> Tensor:
        a = self.act(h)
        one = self.value(a)
        return self.out(one * (0.5 * one + self.gate(a)))


class Concatenated(nn.Module):
    def __init__(self, kind: Kind, width: int) -> None:
        super().__init__()
        self.one, self.two, self.channel = kind.activation(), kind.activation(), kind.channel
        self.first, self.second = kind.weights(width, width), kind.weights(width, 2 * width)
        self.out = kind.weights(4 * width, width)

    def forward(self, h: Tensor) -> Tensor:
        parts = [self.first(self.one(h)), h, self.second(self.one(h))]
        return self.out(self.two(torch.cat(parts, dim=self.channel)))


class NormBefore(nn.Module):
    def __init__(self, kind: Kind, width: int) -> None:
        super().__init__()
        self.norm, self.act, self.weights = (
            kind.norm(width),
            kind.activation(),
            kind.weights(width, width),
        )

    def forward(self, h: Tensor) -> Tensor:
        return h + self.weights(self.act(self.norm(h)))


class NormAfter(NormBefore):
    def forward(self, h: Tensor) -> Tensor:
        return self.weights(self.norm(self.act(h)))


class Attention(nn.Module):
    """Attention with logits divided by the size of the heads, on (N, T, C)."""

    def __init__(self, kind: Kind, width: int) -> None:
        super().__init__()
        pick = kind.random.choice
        self.heads, self.tied, self.fused = pick((1, 2)), pick((True, False)), pick((True, False))
        self.norm = kind.norm(width)
        self.query, self.value = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key = self.query if self.tied else nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, h: Tensor) -> Tensor:
        a = self.norm(h)
        q, k, v = (
            layer(a).view(h.shape[0], h.shape[1], self.heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, scale=1 / q.shape[-1])
        else:
            mixed = torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1], dim=-1) @ v
        return h + self.out(mixed.transpose(1, 2).flatten(2))


class Separable(nn.Module):
    """A depthwise convolution and weights that mix the channels."""

    def __init__(self, kind: Kind, width: int) -> None:
        super().__init__()
        conv = nn.Conv1d if kind.axes == 1 else nn.Conv2d
        self.act = kind.activation()
        self.depthwise = conv(width, width, 3, padding=1, groups=width)
        self.mixing = conv(width, width, 1)

    def forward(self, h: Tensor) -> Tensor:
        return self.mixing(self.depthwise(self.act(h)))


BLOCKS = (
    Plain,
    Residual,
    Doubled,
    Repeated,
    SelfGated,
    TwoLayers,
    Branches,
    PostActivation,
    Gated,
    GaussianProduct,
    Concatenated,
    NormBefore,
    NormAfter,
)


SQUARES = (SelfGated, Gated, GaussianProduct)
CHEAP = tuple(block for block in BLOCKS if block is not SelfGated)
"""Those without integrals of their own."""


class Positions(nn.Module):
    """A learned vector for each position, added."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, length, width))

    def forward(self, h: Tensor) -> Tensor:
        return h + self.table


class ClassToken(nn.Module):
    """A learned vector before the first position."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, width))

    def forward(self, h: Tensor) -> Tensor:
        return torch.cat([self.token.expand(h.shape[0], -1, -1), h], dim=1)


class MeanOf(nn.Module):
    """Global average pooling."""

    def __init__(self, dims: tuple[int, ...]) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, h: Tensor) -> Tensor:
        return h.mean(self.dims)


class TakeLast(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h[:, -1]


class Recurrent(nn.Module):
    """nn.RNN and what is read from it: the last state, or all of them."""

    def __init__(self, kind: Kind, before: int, width: int) -> None:
        super().__init__()
        pick = kind.random.choice
        self.mean = pick((True, False))
        self.rnn = nn.RNN(
            before,
            width,
            num_layers=pick((1, 2)),
            nonlinearity=pick(("tanh", "relu")),
            batch_first=True,
        )
        self.weights = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out, last = self.rnn(x)
        return self.weights(out.mean(1) if self.mean else last[-1])


def architecture(seed: int) -> Architecture:
    """The network of this number."""
    chance = random.Random(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        family = FAMILIES[seed % len(FAMILIES)]
        network, x = family(chance)
    return Architecture(
        f"{seed}-{family.__name__}",
        network.double().eval(),
        x.double() if x.is_floating_point() else x,
        chance.choice((1.0, 1.4, 2.0)),
        chance.choice((0.0, 0.1, 0.3)),
        family in (convolutional, transformer)
        and any(isinstance(m, DEAR) for m in network.modules()),
    )


def _head(kind: Kind, width: int) -> list[nn.Module]:
    return [kind.activation(), nn.Linear(width, OUTPUTS)]


def _blocks(kind: Kind, width: int, most: int, choice: tuple) -> list[nn.Module]:
    """Some blocks, of which at most one squares: powers of powers come near their limits late."""
    chosen: list[type] = []
    for _ in range(kind.random.randint(0, most)):
        squared = any(block in SQUARES for block in chosen)
        chosen.append(kind.random.choice([b for b in choice if not (squared and b in SQUARES)]))
    return [block(kind, width) for block in chosen]


def dense(chance: random.Random) -> tuple[nn.Module, Tensor]:
    kind, width, inputs = Kind(chance, 0), chance.choice((2, 4)), chance.choice((1, 3, 5))
    layers = [nn.Linear(inputs, width), *_blocks(kind, width, 3, BLOCKS), *_head(kind, width)]
    return nn.Sequential(*layers), torch.randn(POINTS, inputs)


def convolutional(chance: random.Random) -> tuple[nn.Module, Tensor]:
    kind, width, inputs = Kind(chance, chance.choice((1, 2)), 0.05), 4, chance.choice((1, 2, 3))
    size = (6,) if kind.axes == 1 else (3, 4)
    x = torch.randn(POINTS, inputs, *size)
    conv = nn.Conv1d if kind.axes == 1 else nn.Conv2d
    pool = nn.AvgPool1d if kind.axes == 1 else nn.AvgPool2d
    layers: list[nn.Module] = [
        conv(inputs, width, 3, padding=1, stride=chance.choice((1, 3 - kind.axes)))
    ]
    layers += _blocks(kind, width, 2, (*CHEAP, Separable, Separable, Separable))
    if chance.random() < 0.5:
        layers += [kind.activation(), pool(2, stride=1, padding=chance.choice((0, 1)))]
        layers += [conv(width, width, 2, stride=chance.choice((1, 2)))]
    layers.append(kind.activation())
    if chance.random() < 0.5:
        layers += [MeanOf(tuple(range(2, 2 + kind.axes))), nn.Linear(width, OUTPUTS)]
    else:
        flat = nn.Sequential(*layers, nn.Flatten())(x).shape[1]
        layers += [nn.Flatten(), nn.Linear(flat, OUTPUTS)]
    return nn.Sequential(*layers), x


def transformer(chance: random.Random) -> tuple[nn.Module, Tensor]:
    kind, width, length = Kind(chance, 0, 0.05), 4, chance.choice((3, 5))
    if chance.random() < 0.5:
        x = torch.randint(4, (POINTS, length))
        layers: list[nn.Module] = [nn.Embedding(4, width)]
    else:
        x = torch.randn(POINTS, length, 3)
        layers = [nn.Linear(3, width)]
    if chance.random() < 0.5:
        layers.append(ClassToken(width))
        length += 1
    layers.append(Positions(length, width))
    first, *others = (*_blocks(kind, width, 3, (*CHEAP, Attention)), Attention(kind, width))
    layers += [first, *others]
    layers.append(kind.activation())
    ending = chance.choice(("mean", "flatten", "last"))
    if ending == "flatten":
        layers += [nn.Flatten(), nn.Linear(length * width, OUTPUTS)]
    else:
        layers += [MeanOf((1,)) if ending == "mean" else TakeLast(), nn.Linear(width, OUTPUTS)]
    return nn.Sequential(*layers), x


def recurrent(chance: random.Random) -> tuple[nn.Module, Tensor]:
    kind, width = Kind(chance, 0), 4
    if chance.random() < 0.5:
        x = torch.randint(4, (POINTS, 4))
        layers: list[nn.Module] = [nn.Embedding(4, width), Recurrent(kind, width, width)]
    else:
        x = torch.randn(POINTS, 4, 3)
        layers = [Recurrent(kind, 3, width)]
    return nn.Sequential(*layers, *_blocks(kind, width, 1, BLOCKS), *_head(kind, width)), x


FAMILIES = (dense, convolutional, dense, transformer, convolutional, recurrent, transformer)
"""Seeds go round."""
