"""Blocks of vectors for random limits: what people write in forward, right or not."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ACTIVATIONS = (torch.relu, F.leaky_relu, F.gelu, torch.erf, torch.relu, torch.sin)


class Block(nn.Module):
    """Takes (N, width) that is Gaussian in the limit, and the inputs, to such again."""

    def __init__(self, pick: random.Random, width: int) -> None:
        super().__init__()
        self.width, self.half = width, width // 2
        self.act = pick.choice(ACTIVATIONS)
        self.choice = pick.random()
        self.out = nn.Linear(width, width)
        self.build(width)

    def build(self, width: int) -> None:
        """The layers of the block."""

    def pick(self, *options: str) -> str:
        """One of the options, the same at every width."""
        return options[int(self.choice * len(options))]


class Dense(Block):
    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return self.out(self.act(h))


class Residual(Block):
    def build(self, width: int) -> None:
        self.inner = nn.Linear(width, width)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        u = self.act(h)
        kind = self.pick("plus", "minus", "alpha", "twice", "augmented", "reused")
        if kind == "plus":
            return self.out(u + self.act(self.inner(u)))
        if kind == "minus":
            return self.out(2 * u - self.inner(u))
        if kind == "alpha":
            return self.out(torch.add(u, self.act(self.inner(u)), alpha=0.5))
        if kind == "twice":
            return self.out(u) + self.out(self.act(self.inner(u)))
        if kind == "augmented":
            v = self.inner(u)
            v += 0.5 * u
            return self.out(v)
        v = u
        v += self.inner(u)
        return self.out(v + u)


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 0.7 * super().forward(x)


class Skipping(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Masked(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * torch.ones_like(self.weight).tril(), self.bias)


class Standardized(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean(1, keepdim=True)
        return F.linear(x, weight, self.bias)


class Renamed(nn.Linear):
    def extra_repr(self) -> str:
        return "a layer like any other"


class Cube(nn.ReLU):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 0.5 - 0.1 * x


class Doubled(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


SUBCLASSES = (Scaled, Skipping, Masked, Standardized, Renamed)


class Subclassed(Block):
    def build(self, width: int) -> None:
        self.layer = SUBCLASSES[int(self.choice * len(SUBCLASSES))](width, width)
        self.cube, self.norm = Cube(), Doubled(width)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        kind = self.pick("layer", "layer", "cube", "norm")
        if kind == "cube":
            return self.out(self.cube(h))
        if kind == "norm":
            return self.out(self.act(self.norm(h)))
        return self.out(self.act(self.layer(self.act(h))))


class Replaced(Block):
    def build(self, width: int) -> None:
        self.layer = layer = nn.Linear(width, width)
        layer.forward = lambda x: 1.5 * F.linear(x, layer.weight, layer.bias)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return self.out(self.act(self.layer(self.act(h))))


class Cut(Block):
    def build(self, width: int) -> None:
        self.narrow = nn.Linear(self.half, width)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        u, d = self.act(h), self.half
        kind = self.pick("halves", "ends", "narrow", "chunk", "overlap", "stride", "product")
        if kind == "halves":
            return self.narrow(u[:, :d] + u[:, d:])
        if kind == "ends":
            return self.narrow(u[..., :d] - 0.5 * u[..., -d:])
        if kind == "narrow":
            return self.narrow(u.narrow(1, 0, d) + u.narrow(1, d, d))
        if kind == "chunk":
            first, second = u.chunk(2, -1)
            return self.narrow(first - second)
        if kind == "overlap":
            q = d // 2
            return self.narrow(u[:, :d] + u[:, q : q + d])
        if kind == "stride":
            return self.narrow(u[:, ::2] + u[:, 1::2])
        return self.narrow(h[:, :d] * torch.sigmoid(h[:, d:]))


class Moved(Block):
    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        u, d = self.act(h), self.half
        kind = self.pick("half", "quarter", "one", "flip", "index", "shuffle", "back", "swap")
        if kind == "half":
            return self.out(u + torch.roll(u, d, 1))
        if kind == "quarter":
            return self.out(u - torch.roll(u, d // 2, 1))
        if kind == "one":
            return self.out(u + torch.roll(u, 1, 1))
        if kind == "flip":
            return self.out(u + u.flip(1))
        if kind == "index":
            return self.out(u + u[:, torch.arange(self.width - 1, -1, -1)])
        if kind == "shuffle":
            return self.out(u + u.view(-1, 2, d).transpose(1, 2).flatten(1))
        if kind == "back":
            return self.out(u + torch.roll(torch.roll(u, d, 1), d, 1))
        return self.out(u + torch.cat([u[:, d:], u[:, :d]], 1))


class Tied(Block):
    def build(self, width: int) -> None:
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        kind = self.pick("weight", "bias", "both", "none")
        if kind in ("weight", "both"):
            self.second.weight = self.first.weight
        if kind in ("bias", "both"):
            self.second.bias = self.first.bias

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        u = self.act(h)
        return self.out(self.first(u) - 0.5 * self.act(self.second(u)))


class InPlace(Block):
    def build(self, width: int) -> None:
        self.relu, self.same = nn.ReLU(inplace=True), nn.Identity()

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        kind = self.pick("last", "view", "identity", "multiply", "contiguous", "unsqueezed")
        u = self.out(self.act(h))
        if kind == "last":
            return self.out(self.relu(u))
        if kind == "view":
            v = F.relu(u.view(-1, self.width), inplace=True)
            return self.out(u + v)
        if kind == "identity":
            v = self.relu(self.same(u))
            return self.out(u - 0.5 * v)
        if kind == "multiply":
            return self.out(torch.relu(u.mul_(2.0)))
        if kind == "contiguous":
            v = torch.relu_(u.contiguous())
            return self.out(v + 2 * u)
        v = u.unsqueeze(1).clamp_(min=0)
        return self.out(v.squeeze(1) + u)


class Viewed(Block):
    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        u = self.act(h)
        kind = self.pick("heads", "expand", "expand_as", "axes", "batch", "repeat")
        if kind == "heads":
            return self.out(u.view(u.shape[0], 2, -1).flatten(1))
        if kind == "expand":
            return self.out(u[:, :, None].expand(-1, -1, 3).sum(2))
        if kind == "expand_as":
            wide = torch.cat([u[:, :, None], 0.5 * u[:, :, None]], 2)
            return self.out(wide.mean(2, keepdim=True).expand_as(wide).sum(2))
        if kind == "axes":
            return self.out(u.unsqueeze(0).transpose(0, 1).squeeze(1))
        if kind == "batch":
            return self.out(u.reshape(x.size(0), self.width))
        return self.out(u[:, None].repeat(1, 2, 1).sum(1))


class Gated(Block):
    def build(self, width: int) -> None:
        self.gate, self.value = nn.Linear(width, width), nn.Linear(width, width)
        self.narrow, self.one = nn.Linear(self.half, width), nn.Linear(width, 1)
        self.glu = nn.GLU(-1)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        kind = self.pick("product", "glu", "functional", "swiglu", "one", "self", "highway")
        u = self.act(h)
        if kind == "product":
            return self.out(self.value(u) * torch.sigmoid(self.gate(u)))
        if kind == "glu":
            return self.narrow(self.glu(self.value(u)))
        if kind == "functional":
            return self.narrow(F.glu(self.value(u), 1))
        if kind == "swiglu":
            first, second = self.value(u).chunk(2, -1)
            return self.narrow(F.silu(first) * second)
        if kind == "one":
            return self.out(u * torch.sigmoid(self.one(u)))
        if kind == "self":
            return self.out(h * h)
        t = torch.sigmoid(self.gate(u))
        return self.out(t * self.value(u) + (1 - t) * u)


class Joined(Block):
    def build(self, width: int) -> None:
        self.inner, self.both = nn.Linear(width, width), nn.Linear(2 * width, width)
        self.three = nn.Linear(width + self.half, width)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        kind = self.pick("cat", "axis", "tensors", "self", "part", "again", "stack")
        u = self.act(h)
        v = self.act(self.inner(u))
        if kind == "cat":
            return self.both(torch.cat([u, v], 1))
        if kind == "axis":
            return self.both(torch.cat((u, 2 * v), axis=-1))
        if kind == "tensors":
            return self.both(torch.concat(tensors=[u, v], dim=1))
        if kind == "self":
            return self.both(torch.cat([u, u], 1))
        if kind == "part":
            return self.three(torch.cat([u[:, : self.half], v], 1))
        if kind == "again":
            first, second = torch.cat([u, v], 1).chunk(2, 1)
            return self.out(first + second)
        return self.both(torch.stack([u, v], 1).flatten(1))


class Dropping(Block):
    def build(self, width: int) -> None:
        self.drop = nn.Dropout(0.3)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        kind = self.pick("module", "functional", "always", "feature")
        u = self.act(h)
        if kind == "module":
            return self.out(self.drop(u))
        if kind == "functional":
            return self.out(F.dropout(u, 0.4, self.training))
        if kind == "always":
            return self.out(F.dropout(u, 0.2))
        return self.out(F.alpha_dropout(u, 0.2, self.training))


class Normed(Block):
    def build(self, width: int) -> None:
        kinds = (
            nn.LayerNorm(width),
            nn.RMSNorm(width),
            nn.GroupNorm(2, width),
            nn.LayerNorm(width),
        )
        self.norm = kinds[int(self.choice * len(kinds))]
        self.before = self.choice * 8 % 1 < 0.5

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return self.out(self.act(self.norm(h)) if self.before else self.norm(self.act(h)))


class Odd(Block):
    """What must be refused, or is harmless."""

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        u = self.act(h)
        kind = self.pick("double", "int", "no_grad", "detach", "count", "roll", "mean", "gain")
        if kind == "double":
            return self.out(u.to(x).double())
        if kind == "int":
            return self.out((3 * u).to(torch.int64).to(u.dtype))
        if kind == "no_grad":
            with torch.no_grad():
                v = self.out(u)
            return self.out(v)
        if kind == "detach":
            return self.out(u + self.out(u).detach())
        if kind == "count":
            return self.out(u) / x.shape[0]
        if kind == "roll":
            return self.out(u + torch.roll(u, 1, 0))
        if kind == "mean":
            return self.out(u - u.mean(0, keepdim=True))
        return self.out(u * torch.sigmoid(x[:, :1]))


class Mixed(Block):
    """Two operations on channels, one after the other, beside the signal itself."""

    def build(self, width: int) -> None:
        self.drop, self.norm = nn.Dropout(0.3), nn.LayerNorm(width)
        self.inner, self.both = nn.Linear(width, width), nn.Linear(2 * width, width)

    def change(self, u: Tensor, number: int) -> Tensor:
        d = self.half
        changes = (
            lambda: self.drop(u),
            lambda: torch.roll(u, d, 1),
            lambda: torch.cat([u[:, d:], u[:, :d]], 1),
            lambda: torch.cat([u[:, :d], 2 * u[:, d:]], -1),
            lambda: self.norm(u),
            lambda: -0.5 * u,
            lambda: self.inner(u),
            lambda: u.view(u.shape[0], 2, -1).flatten(1),
        )
        return changes[number % len(changes)]()

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        u = self.act(h)
        number = int(self.choice * 512)
        v = self.change(u, number)
        w = self.change(v, number // 8)
        kind = number // 64 % 4
        if kind == 0:
            return self.out(v + w)
        if kind == 1:
            return self.out(u - 0.5 * w)
        if kind == 2:
            return self.both(torch.cat([v, w], 1))
        return self.inner(v) + self.inner(w)


VECTORS = (
    Dense,
    Residual,
    Subclassed,
    Replaced,
    Cut,
    Moved,
    Tied,
    InPlace,
    Viewed,
    Gated,
    Joined,
    Dropping,
    Normed,
    Odd,
    Mixed,
    Mixed,
)
