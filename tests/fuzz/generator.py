"""A random network and random points from a seed."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fuzz import wraps
from fuzz.dice import BLOCKS, TOKENS, VOCABULARY, WRAPS, Dice, Shape
from net2gp.types import Inputs

for name in ("vectors", "sequences", "images"):  # each registers its blocks
    importlib.import_module(f"fuzz.{name}")

LARGEST = 60
"""Numbers in a point behind a block, beyond which another block is drawn."""

MOST_PARAMETERS = 600


@dataclass(frozen=True)
class Case:
    """A network in eval mode, two sets of points in float64, and how to name what failed."""

    seed: int
    network: nn.Module
    x: Inputs
    z: Inputs
    output: Callable | None
    ingredients: tuple[str, ...]

    def describe(self) -> str:
        return (
            f"seed {self.seed}: {', '.join(self.ingredients)}\n{self.network!r}\n"
            f"x {shapes(self.x)}, z {shapes(self.z)}"
        )

    def source(self) -> str:
        """The code of the random parts."""
        builders = {title(b): b for b in registered()}
        names = dict.fromkeys(self.ingredients)
        return "\n".join(inspect.getsource(builders[n]) for n in names if n in builders)


def registered() -> list[Callable]:
    """All builders of blocks and wraps."""
    return [*(b for builds in BLOCKS.values() for b in builds), *TOKENS, *WRAPS]


def title(build: Callable) -> str:
    return f"{build.__module__.removeprefix('fuzz.')}.{build.__name__}"


def shapes(x: Inputs) -> str:
    if isinstance(x, Tensor):
        return str(tuple(x.shape))
    values = x.items() if isinstance(x, dict) else enumerate(x)
    return "{" + ", ".join(f"{name}: {tuple(value.shape)}" for name, value in values) + "}"


@contextlib.contextmanager
def reproducible(seed: int) -> Iterator[None]:
    """Within it torch's random numbers come from `seed`, and new tensors are float64."""
    before = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def draws(seed: int) -> Iterator[Case]:
    """Networks of this seed, one after the other, the same for each call."""
    for attempt in range(50):
        found = None
        with reproducible(1000 * seed + attempt), contextlib.suppress(RuntimeError, ValueError):
            # a block may take its sample and no other points, an unpooling for one
            found = _Draw(seed, Dice(f"{seed}/{attempt}")).case()
        if found is not None:
            yield found


class _Draw:
    """The state of one draw: the choices and the names of what was used."""

    def __init__(self, seed: int, dice: Dice) -> None:
        self.seed = seed
        self.dice = dice
        self.used: list[str] = []

    def case(self) -> Case | None:
        dice = self.dice
        kind = dice.one(*["tensor"] * 12, "tuple", "dict")
        tokens = dice.chance(0.12)
        shape = self.shape(tokens)
        number, other = dice.size(), dice.one(1, 2, 3, 4, dice.base)
        body = self.body(shape, tokens)
        x, z = (self.points(n, shape, tokens) for n in (number, other))
        if kind != "tensor":
            left = self.body(second := self.shape(False), False)
            body = _Two(left, body, dice.one("cat", "product"))
            x, z = ((self.points(n, second, False), own) for n, own in ((number, x), (other, z)))
            if kind == "dict":
                body = _Named(body)
                x, z = ({"left": pair[0], "right": pair[1]} for pair in (x, z))
        network, output = self.ending(body, x)
        settle(network)
        total = sum(p.numel() for p in network.parameters())
        if not 0 < total <= MOST_PARAMETERS:
            return None
        return Case(self.seed, network.eval(), x, z, output, tuple(self.used))

    def shape(self, tokens: bool) -> Shape:
        rank = 1 if tokens else self.dice.one(1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 4)
        sizes = tuple(self.dice.size() for _ in range(rank))
        return tuple(min(s, 2) for s in sizes) if rank == 4 else sizes

    def points(self, number: int, shape: Shape, tokens: bool) -> Tensor:
        if tokens:
            return torch.randint(VOCABULARY, (number, *shape))
        return torch.randn(number, *shape)

    def body(self, shape: Shape, tokens: bool) -> nn.Sequential:
        layers: list[nn.Module] = []
        sample = self.points(2, shape, tokens)
        for depth in range(self.dice.one(1, 1, 2, 2, 3)):
            layer, sample = self.fitting(sample, tokens and depth == 0)
            layers.append(layer)
            if self.dice.chance(0.4):
                layers.append(self.dice.one(nn.Tanh, nn.GELU, nn.Softplus, nn.ReLU, nn.SiLU)())
        return nn.Sequential(*layers)

    def fitting(self, sample: Tensor, tokens: bool) -> tuple[nn.Module, Tensor]:
        """A block that takes `sample`, and what it makes of it."""
        for _ in range(40):
            before = len(self.used)
            state = torch.get_rng_state()
            try:
                layer = self.make(tuple(sample.shape[1:]), tokens)
                settle(layer)
                out = layer.eval()(sample.clone()).detach()
                alone = layer(sample[:1].clone()).detach()
            except (RuntimeError, ValueError, IndexError, AssertionError, wraps.Refused, KeyError):
                # sizes that the block cannot take
                del self.used[before:]
                torch.set_rng_state(state)
                continue
            sane = bool(torch.isfinite(out).all()) and float(out.abs().max()) < 30
            fits = out.dim() <= 5 and out.shape[0] == 2 and 0 < out[0].numel() <= LARGEST
            if sane and fits and alone.shape == out[:1].shape:
                return layer, out
            del self.used[before:]
        raise RuntimeError(f"no block takes points of shape {tuple(sample.shape[1:])}")

    def make(self, shape: Shape, tokens: bool = False, depth: int = 0) -> nn.Module:
        if tokens:
            return self.named(self.dice.one(*TOKENS))(self.dice, shape)
        if len(shape) > 4:
            raise wraps.Refused
        if depth < 2 and self.dice.chance(0.4 if depth == 0 else 0.25):
            build = self.named(self.dice.one(*WRAPS))
            return build(self.dice, shape, lambda inner: self.make(inner, depth=depth + 1))
        return self.named(self.dice.one(*BLOCKS[len(shape)]))(self.dice, shape)

    def named(self, build: Callable) -> Callable:
        self.used.append(title(build))
        return build

    def ending(self, body: nn.Module, x: Inputs) -> tuple[nn.Module, Callable | None]:
        """A head, or none where the body has few outputs; sometimes a richer return value."""
        dice = self.dice
        out = call(body.eval(), x).detach()
        width = out[0].numel()
        if width <= 4 and dice.chance(0.4):
            network: nn.Module = body
        else:
            network = _Headed(body, nn.Linear(width, dice.one(1, dice.base, dice.base)))
        if dice.chance(0.08):
            self.used.append("dictionary output")
            return _Returns(network), lambda out: out["logits"]
        return network, None


class _Headed(nn.Module):
    def __init__(self, body: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.body, self.head = body, head

    def forward(self, *x: Tensor, **keywords: Tensor) -> Tensor:
        return self.head(self.body(*x, **keywords).flatten(1))


class _Returns(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *x: Tensor, **keywords: Tensor) -> dict[str, Tensor]:
        out = self.inner(*x, **keywords)
        return {"logits": out, "loss": out.sum()}


class _Two(nn.Module):
    """Two inputs, joined behind a block for each."""

    def __init__(self, left: nn.Module, right: nn.Module, kind: str) -> None:
        super().__init__()
        self.left, self.right, self.kind = left, right, kind

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        left, right = self.left(x).flatten(1), self.right(y).flatten(1)
        if self.kind == "cat":
            return torch.cat([left, right], 1)
        return left * right.mean(1, keepdim=True)


class _Named(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *, left: Tensor, right: Tensor) -> Tensor:
        return self.inner(left, right)


def call(network: nn.Module, x: Inputs) -> Tensor:
    if isinstance(x, dict):
        return network(**x)
    return network(*x) if isinstance(x, tuple) else network(x)


def settle(network: nn.Module) -> None:
    """Norms with statistics and gains other than the initial ones; biases other than zero."""
    for module in network.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None:
            nn.init.normal_(module.running_mean, std=0.3)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
        names = dict(module.named_parameters(recurse=False))
        normed = isinstance(
            module, nn.modules.batchnorm._NormBase | nn.LayerNorm | nn.GroupNorm | nn.RMSNorm
        )
        for name, value in names.items():
            if normed:
                nn.init.normal_(value, mean=float(name == "weight"), std=0.4)
            elif "bias" in name and value.dim():
                nn.init.normal_(value, std=0.3)
