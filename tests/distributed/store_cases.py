"""Kernels and points of which stores are made, and what a store must hold, computed slowly."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor, nn

import net2gp as n2g
from net2gp.inputs import num_rows, rows
from net2gp.kernels import BaseKernel


def points(count: int = 7, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, *(shape or (2,)), generator=generator, dtype=torch.float64)


def pooled() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        convolution = nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1)
        pool = nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        return nn.Sequential(*convolution, *pool, nn.Linear(4, 1)).double()


def three_outputs() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double().eval()


@dataclass(frozen=True, eq=False)
class Named(BaseKernel):
    """A kernel of two named inputs, which no file knows."""

    def __call__(self, x, y=None):
        return n2g.RBF()(x["a"], None if y is None else y["a"]) + self._second(x, y)

    def _second(self, x, y):
        return x["b"].double() @ (x if y is None else y)["b"].double().T

    def diag(self, x):
        return 1 + x["b"].double().square().sum(1)


CASES = {
    "rbf": lambda: (n2g.RBF(0.8, 1.5), points()),
    "nngp with pooling": lambda: (n2g.nngp(pooled()), points(7, 1, 4, 4)),
    "ntk with pooling": lambda: (n2g.ntk(pooled(), weight_var=1.5), points(7, 1, 4, 4)),
    "coupled outputs": lambda: (n2g.linearize(three_outputs()).kernel(0.7), points()),
    "named inputs": lambda: (Named(), {"a": points(), "b": torch.arange(14).reshape(7, 2)}),
}


def slow_matrix(kernel, x, tile: int) -> Tensor:
    """The matrix from the same tiles, of which all below the diagonal is mirrored."""
    count = kernel.outputs(x) or 1
    K = torch.full((num_rows(x) * count,) * 2, float("nan"), dtype=torch.float64)
    for i in range(0, num_rows(x), tile):
        for j in range(i, num_rows(x), tile):
            left, right = rows(x, slice(i, i + tile)), rows(x, slice(j, j + tile))
            part = kernel(left) if i == j else kernel(left, right)
            K[i * count : (i + tile) * count, j * count : (j + tile) * count] = part
    for row in range(len(K)):
        K[row, :row] = K[:row, row]
    return K


def contents(folder: Path) -> dict[str, str]:
    """The digest of every file in a folder."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    found = {str(path.relative_to(folder)): path.read_bytes() for path in files}
    return {name: sha256(content).hexdigest() for name, content in sorted(found.items())}
