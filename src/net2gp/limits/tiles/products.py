"""Products of kernel matrices with vectors, without the matrices.

On a GPU in single precision, entries stay in registers (`net2gp.linalg.fused`), where the kernel depends on
inner products of rows and on numbers of single rows. Elsewhere they are tiles that fit into a cache, each
multiplied as soon as it is computed, and of k(x, x) one half is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import cast

import torch
from torch import Tensor

from net2gp.limits.plan import remember
from net2gp.limits.tiles import compiled_tiles
from net2gp.limits.tiles.angle_polynomial import only_data
from net2gp.limits.tiles.batch import Tiles
from net2gp.limits.tiles.matrices import arranged, cell_of, cells_of, own_blocks
from net2gp.linalg.fused import ScalarGraph, available, matrix, multiply, recorded
from net2gp.progress import progress


def product(left: Tiles, right: Tiles | None, v: Tensor) -> Tensor:
    """Compute k(x, x') v, or k(x, x) v if `right` is None.

    Args:
        left: x, with its tangent kernel if that is the kernel that multiplies.
        right: x', or None for x itself.
        v: Vectors, one row for each column of the matrix, in the dtype of the kernel.

    Returns:
        The product, in the dtype of the kernel, summed in float64 over tiles.
    """
    graph = scalar_graph(left) if available(next(iter(left.data.values()))) else None
    if graph is not None:
        return fused(graph, left, left if right is None else right, v).to(v.dtype)
    return tiled(left, right, v)


def entries(left: Tiles, right: Tiles | None) -> Tensor | None:
    """Compute the kernel matrix in one pass over memory.

    Args:
        left: x.
        right: x', or None for x itself.

    Returns:
        The matrix of the NNGP, or of the tangent kernel if `left` has it; None off a GPU, in double
        precision, and where the kernel is not arithmetic on pairs.
    """
    if not available(next(iter(left.data.values()))):
        return None
    graph = scalar_graph(left)
    if graph is None:
        return None
    return matrix(graph, *_operands(graph, left, left if right is None else right))


def scalar_graph(tiles: Tiles) -> ScalarGraph | None:
    """Return the kernel as arithmetic on single numbers of pairs, or None if it is not that."""
    raw = only_data(tiles.plan.program)
    if raw is None:
        return None
    width = tiles.data[raw.reference].shape[-1]
    known, key = tiles.plan.compiled, ("scalar", tiles.tangent, width, tiles.prior.dtype)
    if key not in known:
        remember(known, key, _recorded(tiles, raw.reference, width))
    return cast("ScalarGraph | None", known[key])


def _recorded(tiles: Tiles, name: str, width: int) -> ScalarGraph | None:
    evaluate = compiled_tiles.program(tiles)
    count, weights = len(tiles.profile), len(tiles.prior.weight_vars)

    def function(
        x: Tensor, y: Tensor, left: list[Tensor], right: list[Tensor], shared: list[Tensor]
    ) -> Tensor:
        sides = ([t.reshape(-1) for t in side] for side in (left, right))
        found = evaluate([x[None]], [y[None]], *sides, shared[:weights], shared[weights:])
        value = found[1] if tiles.tangent else found[0]
        assert value is not None
        return value

    if len(tiles.data) != 1 or name not in tiles.data:
        return None
    counts = (count, count, weights + len(tiles.prior.bias_vars))
    return recorded(function, width, counts, tiles.prior.dtype)


def fused(graph: ScalarGraph, left: Tiles, right: Tiles, v: Tensor) -> Tensor:
    """Compute the product with entries that are never written to memory."""
    return multiply(graph, *_operands(graph, left, right), v)


Operands = tuple[
    tuple[Tensor, Tensor], tuple[list[Tensor], list[Tensor], list[Tensor]], Tensor | None
]
"""Points, numbers of rows and of all pairs, and the diagonal where both sides are the same."""


def _operands(graph: ScalarGraph, left: Tiles, right: Tiles) -> Operands:
    one, two, first, second, weights, biases = compiled_tiles.flat(left, right)
    numbers = graph.numbers(first, second, [*weights, *biases])
    own = (left.own[1] if left.tangent else left.own[0]) if right is left else None
    return (one[0][0], two[0][0]), numbers, own


def tiled(left: Tiles, right: Tiles | None, v: Tensor) -> Tensor:
    """Compute the product tile by tile; the diagonal of k(x, x) is exact."""
    other = left if right is None else right
    size = prod(left.plan.layout.shape) if left.plan.program.output.positions else 1
    cell, cells = cell_of(left, other), list(cells_of(left, right))
    mirrored = right is None and left.device.type != "cuda"
    exact = own_blocks(left)[1 if left.tangent else 0] if right is None else None
    result = v.new_zeros(left.count * size, v.shape[1], dtype=torch.float64)
    with progress("kernel products", total=len(cells)) as advance:
        for (i, j), (top, first) in zip(cells, _fresh(cells), strict=True):
            found = cell(i, j)[1 if left.tangent else 0]
            assert found is not None
            tile = arranged(found, left.plan)
            if exact is not None:
                _exact_diagonal(tile, exact, i, j)
            a, b = (slice(s.start * size, s.stop * size) for s in (i, j))
            # the last tiles of a row or column may overlap the ones before
            rows, columns = slice(top * size, None), slice(first * size, None)
            result[a][rows] += tile[rows, columns] @ v[b][columns]
            if mirrored and i.start != j.start:
                result[b] += tile.T @ v[a]
            advance()
    return result.to(v.dtype)


def _fresh(cells: list[tuple[slice, slice]]) -> Iterator[tuple[int, int]]:
    """The first row and column of each cell that no cell before it has."""
    rows, above, right = slice(0, 0), 0, 0
    for i, j in cells:
        if i != rows:
            rows, above, right = i, max(0, rows.stop - i.start), j.start
        yield above, max(0, right - j.start)
        right = j.stop


def _exact_diagonal(tile: Tensor, exact: Tensor, i: slice, j: slice) -> None:
    """Replace the blocks of points with themselves, whose correlation is one only up to rounding."""
    first, last = max(i.start, j.start), min(i.stop, j.stop)
    if first >= last:
        return
    size, count = exact.shape[1], last - first
    square = tile[(first - i.start) * size :, (first - j.start) * size :]
    square = square[: count * size, : count * size]
    blocks = square.unflatten(0, (count, size)).unflatten(2, (count, size)).diagonal(0, 0, 2)
    blocks.copy_(exact[first:last].permute(1, 2, 0))
