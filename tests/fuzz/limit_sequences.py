"""Blocks of sequences (N, T, width) and of maps (N, width, T) for random limits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuzz.limit_blocks import Block

LENGTH = 4
HEADS = 2


class Attending(Block):
    """Attention written out, with masks, biases, dropout and scales of all kinds."""

    def build(self, width: int) -> None:
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.drop = nn.Dropout(0.3)
        distance = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs().double()
        self.register_buffer("distance", distance)
        self.register_buffer("slopes", torch.tensor([1.0, 0.25]).double()[:, None, None] * distance)

    def split(self, t: Tensor) -> Tensor:
        return t.view(t.shape[0], t.shape[1], HEADS, -1).transpose(1, 2)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        kind = self.pick(
            "plain", "heads", "causal", "bias", "slopes", "drop", "root", "shared", "sdpa", "merged"
        )
        q, k, v = self.query(h), self.key(h), self.value(h)
        if kind in ("heads", "slopes", "merged"):
            q, k, v = self.split(q), self.split(q), self.split(v)
        if kind == "shared":
            k = q
        if kind == "sdpa":
            return self.out(
                F.scaled_dot_product_attention(q, q, v, is_causal=True, scale=1 / q.size(-1))
            )
        scale = q.shape[-1] ** 0.5 if kind == "root" else q.shape[-1]
        logits = q @ k.transpose(-2, -1) / scale
        if kind == "causal":
            keep = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
            logits = logits.masked_fill(~keep, float("-inf"))
        if kind == "bias":
            logits = logits - self.distance
        if kind == "slopes":
            logits = logits - self.slopes
        weights = torch.softmax(logits, -1)
        if kind == "drop":
            weights = self.drop(weights)
        mixed = weights @ v
        if kind in ("heads", "slopes"):
            mixed = mixed.transpose(1, 2).flatten(2)
        if kind == "merged":  # heads and sizes in the wrong order
            mixed = mixed.permute(0, 2, 3, 1).flatten(2)
        return self.out(mixed)


class Placed(Block):
    """Positions: parameters of their own, flips, rolls, sums, crops."""

    def build(self, width: int) -> None:
        self.table = nn.Parameter(torch.zeros(LENGTH, width))
        self.vector = nn.Parameter(torch.zeros(1, 1, width))

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        kind = self.pick(
            "table", "vector", "flip", "roll", "cumsum", "expand", "average", "token", "mask"
        )
        u = self.act(h)
        if kind == "table":
            return self.out(u) + self.table
        if kind == "vector":
            return self.out(u) + self.vector.expand(u.shape[0], LENGTH, -1)
        if kind == "flip":
            return self.out(u + u.flip(1))
        if kind == "roll":
            return self.out(u - 0.5 * torch.roll(u, 1, 1))
        if kind == "cumsum":
            return self.out(u.cumsum(1))
        if kind == "expand":
            return self.out(u + u.mean(1, keepdim=True).expand_as(u))
        if kind == "average":
            return self.out(u - u.mean(1, keepdim=True))
        if kind == "token":
            start = self.vector.expand(u.shape[0], -1, -1)
            return self.out(torch.cat([start, u], 1)[:, :LENGTH])
        return self.out(u * (x[:, :, :1] > 0))


class Recurrent(Block):
    """nn.RNN and RNNCell with dropout, states, and weights that are shared."""

    def build(self, width: int) -> None:
        self.kind = self.pick("plain", "dropout", "cell", "state", "tied", "zero")
        layers = 2 if self.kind == "dropout" else 1
        options = {"nonlinearity": "relu", "batch_first": True}
        drop = 0.3 if self.kind == "dropout" else 0.0
        self.rnn = nn.RNN(width, width, layers, dropout=drop, **options)
        self.other = nn.RNN(width, width, 1, **options)
        if self.kind == "tied":
            for name, value in list(self.rnn.named_parameters()):
                setattr(self.other, name, value)
        self.cell = nn.RNNCell(width, width, nonlinearity="relu")
        self.start = nn.Parameter(torch.zeros(1, width))

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        u = self.act(h)
        if self.kind in ("plain", "dropout"):
            return self.out(self.rnn(u)[0])
        if self.kind == "tied":
            return self.out(self.rnn(u)[0] + self.other(u.flip(1))[0])
        if self.kind == "state":
            state = self.start.expand(u.shape[0], -1)
        elif self.kind == "zero":
            state = torch.zeros(u.shape[0], self.width, dtype=x.dtype)
        else:
            state = self.cell(u[:, 0])
        return self.out(u + self.cell(u[:, 1], state)[:, None])


class Padded(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (self.kernel_size[0] - 1, 0)))


class Halved(nn.Conv1d):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return 0.5 * super()._conv_forward(input, weight, bias)


class Map(Block):
    """Blocks of maps end in a convolution of one place."""

    def build(self, width: int) -> None:
        self.out = nn.Conv1d(width, width, 1)
        self.layers(width)

    def layers(self, width: int) -> None:
        """The layers of the block."""


class Convolved(Map):
    def layers(self, width: int) -> None:
        self.kind = self.pick(
            "same", "causal", "halved", "groups", "depthwise", "dilated", "circular", "again"
        )
        options = {"padding": 1}
        if self.kind == "groups":
            options["groups"] = 2
        if self.kind == "depthwise":
            options["groups"] = width
        if self.kind == "dilated":
            options = {"padding": 2, "dilation": 2}
        if self.kind == "circular":
            options["padding_mode"] = "circular"
        kinds = {"causal": Padded, "halved": Halved}
        options = {} if self.kind == "causal" else options
        self.conv = kinds.get(self.kind, nn.Conv1d)(width, width, 3, **options)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        v = self.conv(self.act(h))
        if self.kind == "again":
            v = v + self.conv(self.act(v))
        return self.out(v if self.kind == "depthwise" else self.act(v))


class Pooled(Map):
    def layers(self, width: int) -> None:
        self.up = nn.Upsample(scale_factor=2)
        self.flat = nn.Linear(width * LENGTH, width)
        self.squeeze = nn.Linear(width, width)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        u = self.act(h)
        kind = self.pick("average", "max", "excite", "orders", "shuffle", "join", "pad", "cut")
        if kind == "average":
            return self.out(self.up(F.avg_pool1d(u, 2)))
        if kind == "max":
            return self.out(self.up(F.max_pool1d(u, 2)))
        if kind == "excite":
            gate = torch.sigmoid(self.squeeze(u.mean(2)))
            return self.out(u * gate[:, :, None])
        if kind == "orders":
            both = self.flat(u.flatten(1)) + self.flat(u.transpose(1, 2).flatten(1))
            return self.out(u) + both[:, :, None]
        if kind == "shuffle":
            n, c, t = u.shape
            mixed = u.view(n, 2, c // 2, t).transpose(1, 2).reshape(n, c, t)
            return self.out(u + mixed)
        if kind == "join":
            wide = torch.cat([u, u.mean(2, keepdim=True).expand_as(u)], 2)
            return self.out(wide[:, :, ::2])
        if kind == "pad":
            return self.out(F.pad(u, (1, 0))[..., :-1])
        return self.out(u + torch.cat([u[:, self.half :], u[:, : self.half]], 1))


SEQUENCES = (Attending, Placed, Recurrent, Attending, Placed)
MAPS = (Convolved, Pooled)
