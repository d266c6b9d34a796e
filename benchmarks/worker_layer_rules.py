"""One revision's side of `layer_rules.py`: runs the jobs that it reads from stdin, by name.

After each run the worker prints a JSON object: the CPU seconds, the highest memory, and a few numbers of the
result, by which the revisions and the peer are compared; or the message of the error that came.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

import net2gp as n2g
from measure import peak_memory

warnings.simplefilter("ignore")
torch.set_num_threads(1)

CLASSES = 3
Build = Callable[[int], nn.Module]


class Encoder(nn.Module):
    """Four layers of torch's encoder."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
        self.embed = nn.Linear(8, width)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x)).mean(1))


class RMSBlocks(nn.Module):
    """Four blocks as in recent language models: RMSNorm, attention by function, a gated perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        parts = {"one": nn.RMSNorm(width), "two": nn.RMSNorm(width)}
        parts |= {
            "attend": nn.Linear(width, 3 * width, False),
            "out": nn.Linear(width, width, False),
        }
        wide = 2 * width
        parts |= {"gate": nn.Linear(width, wide, False), "up": nn.Linear(width, wide, False)}
        parts |= {"down": nn.Linear(wide, width, False)}
        self.embed, self.head = nn.Linear(8, width), nn.Linear(width, CLASSES)
        copies = [{name: _fresh(part) for name, part in parts.items()} for _ in range(4)]
        self.blocks = nn.ModuleList(nn.ModuleDict(block) for block in copies)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            parts = (
                block["attend"](block["one"](h)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
            )
            mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
            h = h + block["out"](mixed.transpose(1, 2).flatten(2))
            n = block["two"](h)
            h = h + block["down"](F.silu(block["gate"](n)) * block["up"](n))
        return self.head(h[:, -1])


def _fresh(part: nn.Module) -> nn.Module:
    if isinstance(part, nn.RMSNorm):
        return nn.RMSNorm(part.normalized_shape)
    assert isinstance(part, nn.Linear)
    return nn.Linear(part.in_features, part.out_features, bias=False)


class Recurrent(nn.Module):
    """A recurrent layer, and a head on its last state; with a loop over cells, or without."""

    def __init__(self, kind: type[nn.Module], width: int) -> None:
        super().__init__()
        self.cells = issubclass(kind, nn.RNNCellBase)
        options = {} if self.cells else {"batch_first": True}
        self.recurrent, self.head = kind(8, width, **options), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if not self.cells:
            return self.head(self.recurrent(x)[0][:, -1])
        state = None
        for now in x.unbind(1):
            state = self.recurrent(now, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


class Tokens(nn.Module):
    """A bag of embeddings, or a table that is the output layer too."""

    def __init__(self, width: int, tied: bool) -> None:
        super().__init__()
        self.tied, number = tied, 12 if tied else 500
        self.table = nn.Embedding(number, width) if tied else nn.EmbeddingBag(number, width)
        self.inner, self.head = nn.Linear(width, width), nn.Linear(width, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        if not self.tied:
            return self.head(self.inner(self.table(ids)).tanh())
        h = self.inner(self.table(ids).mean(1)).tanh()
        return F.linear(h, self.table.weight)[:, :CLASSES] + self.head(h)


def decoder(width: int) -> nn.Module:
    """Transposed convolutions of an image, and a head."""
    layers = [nn.ConvTranspose2d(8, width, 4, 2, 1), nn.ReLU()]
    layers += [nn.ConvTranspose2d(width, width // 2, 4, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2 * width, CLASSES))


class Pairs(nn.Module):
    """A bilinear layer of a vector and a function of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.pair, self.head = nn.Bilinear(width, width, width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pair(x, x.sin()).tanh())


NETWORKS: dict[str, tuple[Callable[[int], nn.Module], Callable[[int, bool], Tensor], int, int]] = {
    "encoder": (Encoder, lambda n, quick: torch.randn(n, 16 if quick else 64, 8), 128, 16),
    "RMSNorm blocks": (RMSBlocks, lambda n, quick: torch.randn(n, 16 if quick else 64, 8), 128, 16),
    "LSTM": (partial(Recurrent, nn.LSTM), lambda n, quick: torch.randn(n, 10 if quick else 50, 8), 128, 32),
    "GRU": (partial(Recurrent, nn.GRU), lambda n, quick: torch.randn(n, 10 if quick else 50, 8), 128, 32),
    "LSTM cells": (
        partial(Recurrent, nn.LSTMCell), lambda n, quick: torch.randn(n, 10 if quick else 50, 8), 128, 48,
    ),
    "transposed convolutions": (decoder, lambda n, quick: torch.randn(n, 8, 8, 8), 32, 64),
    "bilinear": (Pairs, lambda n, quick: torch.randn(n, 16 if quick else 64), 64, 256),
    "bag of embeddings": (
        partial(Tokens, tied=False), lambda n, quick: torch.randint(500, (n, 20)), 128, 256,
    ),
    "tied embedding": (partial(Tokens, tied=True), lambda n, quick: torch.randint(12, (n, 20)), 128, 256),
}  # fmt: skip
"""How each network is built from its width, its points, the width and the number of points."""


def case(name: str, quick: bool) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    build, points, width, count = NETWORKS[name]
    width, count = (16, 12) if quick else (width, count)
    network, x = build(width).eval(), points(count, quick)
    return network, x, torch.arange(count) % CLASSES


def tangent(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The tangent kernel of all outputs at points that were not seen before."""
    return n2g.linearize(network).kernel()(x)


def by_functions(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The same from the Jacobian, by `torch.func` (the peer)."""
    params = {name: value.detach() for name, value in network.named_parameters()}

    def single(values: dict[str, Tensor], point: Tensor) -> Tensor:
        return functional_call(network, values, (point[None],))[0]

    rows = vmap(jacrev(single), in_dims=(None, 0), chunk_size=8)(params, x)
    J = torch.cat([J.flatten(2) for J in rows.values()], 2).flatten(0, 1)
    return J @ J.mT


def kron(network: nn.Module, x: Tensor, y: Tensor, structure: object) -> Tensor:
    """A posterior of Kronecker factors with a given prior variance, and its variances at all points."""
    posterior = n2g.laplace(network, (x, y), n2g.Categorical(), structure=structure, prior_var=0.1)
    return posterior.marginal(x).variance


QUANTITIES: dict[str, Callable[[nn.Module, Tensor, Tensor], Tensor]] = {
    "tangent kernel": tangent,
    "tangent kernel by torch.func": by_functions,
    "Kron": partial(kron, structure=n2g.Kron()),
    "Kron, else diagonal": partial(kron, structure=n2g.Kron(rest=n2g.Diagonal())),
}


def run(job: dict) -> dict:
    """The answer to one job."""
    network, x, y = case(job["network"], job["quick"])
    work = QUANTITIES[job["quantity"]]
    gc.collect()
    try:
        with peak_memory() as seen:
            start = time.process_time()
            found = work(network, x, y)
            seconds = time.process_time() - start
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error)[:200]}"}
    numbers = found.detach().flatten()[:: max(1, found.numel() // 64)].double().tolist()
    return {"seconds": seconds, "megabytes": max(seen), "numbers": numbers}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)
