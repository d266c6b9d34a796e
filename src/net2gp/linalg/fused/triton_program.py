"""Kernel matrices, and products with them whose entries are never written to memory, on NVIDIA GPUs.

One program of the GPU has some rows of x. It goes through the points y block by block: inner products, the
lines of the scalar graph in registers, and the product with a block of vectors. Sums over a few thousand
points are in float32, and their sum in float64. Another program writes the entries. Both serve matrices of
every size, so that nothing is compiled anew for other points.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from net2gp.linalg.fused.scalar_graph import ScalarGraph
from net2gp.linalg.fused.triton_source import source

try:
    import triton
except ImportError:
    triton = None

WIDEST = 128
"""The most columns of vectors that one launch multiplies; more would take the entries of k twice."""


@dataclass(frozen=True)
class Settings:
    """How a product is cut, and how exact it is.

    Args:
        rows: Rows of x that one program has.
        columns: Points y of a block.
        warps: Groups of 32 threads of a program.
        stages: Blocks that are loaded ahead.
        gram: The precision of inner products, as Triton names it.
        outer: The precision of products with vectors, likewise.
        together: Points over which sums are in float32.
    """

    rows: int = 128
    columns: int = 64
    warps: int = 8
    stages: int = 2
    gram: str = "tf32x3"
    outer: str = "tf32x3"
    together: int = 4096

    @staticmethod
    def depth(width: int) -> int:
        """Return how many columns of x enter a product at a time, for x with `width` columns."""
        return min(64, max(16, 1 << (width - 1).bit_length()))


def available(t: Tensor) -> bool:
    """Whether programs can be made for tensors like `t`."""
    return triton is not None and t.is_cuda and t.dtype == torch.float32


def multiply(
    graph: ScalarGraph,
    points: tuple[Tensor, Tensor],
    numbers: tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]],
    own: Tensor | None,
    v: Tensor,
    settings: Settings | None = None,
) -> Tensor:
    """Compute k(x, y) v with entries in single precision.

    Args:
        graph: k as arithmetic on pairs.
        points: x (n, d) and y (m, d), in float32 on a GPU.
        numbers: What `ScalarGraph.numbers` gives.
        own: k(x_n, x_n), (n,), if y is x, else None.
        v: Vectors, (m, k).
        settings: Sizes of blocks and precisions; None takes the default.

    Returns:
        The product, (n, k), in float64.
    """
    x, y = (t.contiguous() for t in points)
    settings = settings or Settings()
    left, right, shared = (_stacked(each, x) for each in numbers)
    diagonal = x if own is None else own.to(x).contiguous()
    parts = []
    for part in v.to(torch.float32).split(WIDEST, 1):
        out = torch.zeros(len(x), part.shape[1], dtype=torch.float64, device=x.device)
        program(graph, widths(part.shape[1])).product[(-(-len(x) // settings.rows),)](
            *(x, y, part.contiguous(), out, diagonal, left, right, shared),
            *(len(x), len(y), part.shape[1]),
            D=x.shape[1],
            BD=settings.depth(x.shape[1]),
            BM=settings.rows,
            BN=settings.columns,
            TOGETHER=settings.together,
            SAME=own is not None,
            GRAM=settings.gram,
            OUTER=settings.outer,
            num_warps=settings.warps,
            num_stages=settings.stages,
        )
        parts.append(out)
    return torch.cat(parts, 1)


def matrix(
    graph: ScalarGraph,
    points: tuple[Tensor, Tensor],
    numbers: tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]],
    own: Tensor | None,
    settings: Settings | None = None,
) -> Tensor:
    """Compute k(x, y) in single precision, in one pass over memory.

    Args:
        graph: k as arithmetic on pairs.
        points: x (n, d) and y (m, d), in float32 on a GPU.
        numbers: What `ScalarGraph.numbers` gives.
        own: k(x_n, x_n), (n,), if y is x, else None.
        settings: Sizes of blocks and precisions; None takes the default.

    Returns:
        The matrix, (n, m).
    """
    x, y = (t.contiguous() for t in points)
    settings = settings or Settings()
    left, right, shared = (_stacked(each, x) for each in numbers)
    out = x.new_empty(len(x), len(y))
    grid = (-(-len(x) // settings.rows), -(-len(y) // settings.columns))
    program(graph, widths(1)).entries[grid](
        *(x, y, out, x if own is None else own.to(x).contiguous(), left, right, shared),
        *(len(x), len(y)),
        D=x.shape[1],
        BD=settings.depth(x.shape[1]),
        BM=settings.rows,
        BN=settings.columns,
        SAME=own is not None,
        GRAM=settings.gram,
        num_warps=settings.warps,
        num_stages=settings.stages,
    )
    return out


def _stacked(values: Sequence[Tensor], like: Tensor) -> Tensor:
    """Numbers one after the other in memory: (count, n)."""
    return torch.stack([v.to(like).reshape(-1) for v in values]) if values else like


def widths(count: int) -> tuple[int, ...]:
    """Return blocks of columns, each a power of two and at least 16, that hold `count` columns.

    >>> widths(1), widths(65), widths(128)
    ((16,), (64, 16), (128,))
    """
    found = []
    while count > 0:
        largest = 1 << (count.bit_length() - 1)
        if largest < 16 or (largest < count < 2 * largest and count - largest > largest // 2):
            largest = max(16, 1 << (count - 1).bit_length())
        found.append(largest)
        count -= largest
    return tuple(found)


@lru_cache(maxsize=64)
def program(graph: ScalarGraph, blocks: tuple[int, ...]) -> ModuleType:
    """Return a module whose `product` multiplies with the kernel of the graph.

    Triton reads the source of its functions from files, so the text is written into a folder that lives as
    long as this process. It is made of the names in `CODE` and of numbers alone.
    """
    text = source(graph, blocks)
    path = Path(_folder().name) / f"product_{abs(hash((graph, blocks)))}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@lru_cache(maxsize=1)
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="net2gp_")
