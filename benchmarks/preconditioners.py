"""Products and seconds of conjugate gradients with the preconditioners there are.

    python benchmarks/preconditioners.py [--points 2000]

It prints a table, of which docs/guide/many_points.md has the iterations: one less than the products.
"""

from __future__ import annotations

import argparse
import time
import warnings
from dataclasses import dataclass, field

import torch
from rich.console import Console
from torch import Tensor, nn

import net2gp as n2g
from net2gp.errors import NotConverged
from net2gp.kernels import BaseKernel

PRECONDITIONERS = (
    n2g.solvers.PivotedCholesky(100),
    n2g.solvers.RandomPivots(100),
    n2g.solvers.RandomPivots(),
)


@dataclass(frozen=True)
class Counted(BaseKernel):
    """A kernel that holds its matrix at some points and counts products with it."""

    kernel: BaseKernel
    matrix: Tensor
    calls: list[int] = field(default_factory=list)

    def __call__(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return self.kernel(x, y)

    def diag(self, x: Tensor) -> Tensor:
        return self.kernel.diag(x)

    def precise(self) -> Counted:
        return self

    def matmul(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        self.calls.append(v.shape[1])
        return self.matrix @ v


def row(name: str, kernel: BaseKernel, x: Tensor, y: Tensor, noise: float) -> str:
    cells, matrix = [], kernel(x)
    for preconditioner in PRECONDITIONERS:
        counted = Counted(kernel, matrix)
        solver = n2g.solvers.CG(
            preconditioner=preconditioner,
            num_probes=0,
            store_gram=False,
            variance=n2g.solvers.Exact(),
        )
        start = time.perf_counter()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", NotConverged)
            n2g.condition(counted, (x, y), n2g.Gaussian(noise), solver=solver)
        over = "over " if any(issubclass(w.category, NotConverged) for w in caught) else ""
        cells.append(f"{over}{len(counted.calls)} ({time.perf_counter() - start:.1f} s)")
    return f"| {name} | {noise:g} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--points", type=int, default=2000)
    count = parser.parse_args().points
    torch.manual_seed(0)
    x = torch.randn(count, 5, dtype=torch.float64)
    y = torch.sin(x).sum(1, keepdim=True) + 0.1 * torch.randn(count, 1, dtype=torch.float64)
    layers = [nn.Linear(5, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)]
    relu = n2g.nngp(nn.Sequential(*layers).double(), weight_var=2.0, bias_var=0.1)
    lines = ["| kernel | noise | " + " | ".join(map(str, PRECONDITIONERS)) + " |"]
    lines += ["|---|---:|---:|---:|---:|"]
    for name, kernel in (("RBF(1.5)", n2g.RBF(1.5)), ("NNGP of a ReLU network", relu)):
        lines += [row(name, kernel, x, y, noise) for noise in (1e-1, 1e-2, 1e-4)]
    Console(width=200).print("\n".join(lines), markup=False)


if __name__ == "__main__":
    main()
