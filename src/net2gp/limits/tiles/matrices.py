"""Kernel matrices tile by tile, so that intermediate results stay in the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from net2gp.limits.moments.evaluation import Pair
from net2gp.limits.plan import Plan, remember
from net2gp.limits.signals.layout import POSITION
from net2gp.limits.tiles import compiled_tiles
from net2gp.limits.tiles.angle_polynomial import (
    fitted,
    has_closed_forms,
    is_homogeneous,
    is_short,
    only_data,
)
from net2gp.limits.tiles.batch import Tiles, large_tile, pairs, positions, small_tile
from net2gp.memory import check_memory
from net2gp.progress import progress

COMPILED_ENTRIES = 2**26
"""From this many entries of moments on, a compilation pays on a GPU."""

ANGLE_PAIRS = 2**16
"""From this many pairs of points on, a polynomial in the angle is worth fitting."""


def arranged(t: Tensor, plan: Plan) -> Tensor:
    """Arrange moments (*S, *S, n, m) as a matrix, with rows in the order of the network's flattened output.

    Copies and channels of the output are independent, so they become identity matrices between positions.
    """
    if not plan.program.output.positions:
        return t
    rank = len(plan.program.output.positions)
    n, m = t.shape[-2:]
    t = t.permute(2 * rank, *range(rank), 2 * rank + 1, *range(rank, 2 * rank))
    place = 1
    for kind, size, _ in plan.layout.factors:
        if kind == POSITION:
            place += 1
        elif size > 1:
            eye = torch.eye(size, dtype=t.dtype, device=t.device)
            half = t.dim() // 2
            t = t.unsqueeze(place).unsqueeze(half + place + 1)
            shape = [1] * t.dim()
            shape[place] = shape[half + 1 + place] = size
            t = t * eye.reshape(shape)
            place += 1
    per_point = t[0].numel() // (m * prod(t.shape[t.dim() // 2 + 1 :])) if n else 1
    return t.reshape(n * per_point, m * per_point)


def tile_sizes(left: int, right: int, cells: int) -> tuple[int, int]:
    """Return the rows and columns of a tile with that many pairs."""
    # twice as wide as tall, since rows are contiguous in memory
    columns = min(right, max(1, int((2 * cells) ** 0.5)))
    return max(1, min(left, cells // columns)), columns


def matrix(left: Tiles, right: Tiles | None, scale: float | Tensor) -> Pair:
    """Return k(x, x') of both kernels, or k(x, x) if `right` is None.

    Only the upper half of k(x, x) is computed on a CPU, and its diagonal is exact.
    """
    graph = torch.is_grad_enabled() and (
        left.prior.requires_grad
        or (isinstance(scale, Tensor) and scale.requires_grad)
        or any(t.requires_grad for side in (left, right) if side for t in side.data.values())
    )
    if graph:
        return _with_gradients(left, right, scale)
    with torch.no_grad():
        return _filled(left, right, scale)


def _with_gradients(left: Tiles, right: Tiles | None, scale: float | Tensor) -> Pair:
    cov, ntk = (
        None if t is None else arranged(t, left.plan)
        for t in pairs(left, left if right is None else right)
    )
    assert cov is not None
    if right is None:
        exact, steep = own_blocks(left)
        cov = _scattered(cov, exact)
        ntk = None if ntk is None or steep is None else _scattered(ntk, steep)
    return cov * scale, None if ntk is None else ntk * scale


def own_blocks(tiles: Tiles) -> tuple[Tensor, Tensor | None]:
    """Return k(x_n, x_n) of every point: (N, 1, 1), or (N, C, C) for outputs with positions."""
    result: list[Tensor | None] = []
    for t in tiles.own:
        if t is None:
            result.append(None)
            continue
        if not tiles.plan.program.output.positions:
            result.append(t[:, None, None])
        else:
            blocks = [arranged(t[..., n : n + 1, None], tiles.plan) for n in range(t.shape[-1])]
            result.append(torch.stack(blocks))
    assert result[0] is not None
    return result[0], result[1]


def _scattered(square: Tensor, blocks: Tensor) -> Tensor:
    """Replace the blocks on the diagonal of a matrix."""
    n, size = blocks.shape[:2]
    wide = square.reshape(n, size, n, size)
    wide = torch.diagonal_scatter(wide, blocks.permute(1, 2, 0), 0, 0, 2)
    return wide.reshape(n * size, n * size)


def cells_of(left: Tiles, right: Tiles | None) -> Iterator[tuple[slice, slice]]:
    """Yield the rows and columns of tiles; of k(x, x) those of one half on a CPU."""
    other = left if right is None else right
    entries = positions(left.plan)
    if left.device.type == "cuda":
        yield from _large_cells(left.count, other.count, max(1, large_tile(entries) // entries))
        return
    cells = max(1, small_tile(left.prior.dtype) // entries)
    tall, wide = tile_sizes(left.count, other.count, cells)
    if right is None:
        tall = wide = max(1, int((tall * wide) ** 0.5))
    for i in range(0, left.count, tall):
        for j in range(i if right is None else 0, other.count, wide):
            yield slice(i, min(i + tall, left.count)), slice(j, min(j + wide, other.count))


Cell = Callable[[slice, slice], Sequence[Tensor | None]]


def cell_of(left: Tiles, other: Tiles) -> Cell:
    """Return the function that computes one tile: a polynomial in the angle if it serves, or the program."""
    on_gpu = left.device.type == "cuda"
    program = left.plan.program
    # once compiled, a short program costs no more than a polynomial
    served = on_gpu and is_short(program) and has_closed_forms(program)
    by_angle = None if served else _by_angle(left, other)
    if by_angle is not None:
        return by_angle
    if on_gpu and not program.fusible and has_closed_forms(program):
        return _compiled(left, other)
    return lambda i, j: pairs(left.rows(i.start, i.stop), other.rows(j.start, j.stop))


def _compiled(left: Tiles, other: Tiles) -> Cell:
    """Return a function for tiles that is compiled for their size if there is enough work to pay for it."""
    entries = positions(left.plan) * left.count * other.count

    def cell(i: slice, j: slice) -> Sequence[Tensor | None]:
        one, two = left.rows(i.start, i.stop), other.rows(j.start, j.stop)
        if entries < COMPILED_ENTRIES:
            return pairs(one, two)
        return compiled_tiles.compiled(one, two)(*compiled_tiles.flat(one, two))

    return cell


def _by_angle(left: Tiles, other: Tiles) -> Cell | None:
    """Return a function for tiles from angles alone, or None if the kernels depend on more than angles."""
    program, prior = left.plan.program, left.prior
    raw = only_data(program)
    if raw is None or left.count * other.count < ANGLE_PAIRS:
        return None
    x, y = left.data[raw.reference][0], other.data[raw.reference][0]
    squares = [(t * t).mean(-1) for t in ((x,) if other is left else (x, y))]
    low, high = min(float(t.min()) for t in squares), max(float(t.max()) for t in squares)
    scaled = is_homogeneous(program, prior)
    # inputs of equal norm up to rounding: a wider spread would be an error of the kernel, not of rounding
    if low <= 0 or not (scaled or high - low <= 32 * torch.finfo(x.dtype).eps * high):
        return None
    # tables of activations without a closed form are only right to about 1e-10 themselves
    exact = 2e-12 if has_closed_forms(program) else 1e-9
    tolerance = max(2 * torch.finfo(x.dtype).eps, exact)
    square = 1.0 if scaled else (low + high) / 2
    key = (left.tangent, scaled, square, tolerance, *prior.values())
    known = left.plan.polynomials
    if key in known:
        found = known[key]
    else:
        fit = fitted(program, prior, left.tangent, square, scaled, tolerance)
        found = remember(known, key, fit)
    if found is None:
        return None
    roots = [t.sqrt() for t in (squares[0], squares[-1])]
    one, two = (
        t / (root * t.shape[-1] ** 0.5)[:, None] for t, root in zip((x, y), roots, strict=True)
    )

    def cell(i: slice, j: slice) -> Sequence[Tensor | None]:
        results = found(one[i] @ two[j].T)
        if scaled:
            for t in results:
                t.mul_(roots[0][i, None]).mul_(roots[1][j])
        return results

    return cell


def _large_cells(tall: int, wide: int, pairs: int) -> Iterator[tuple[slice, slice]]:
    """Yield few cells of one size; the last ones of a row or column overlap the ones before.

    One size means one compilation.
    """
    rows = min(tall, max(1, pairs // wide, int(pairs**0.5)))
    columns = min(wide, max(1, pairs // rows))
    for i in range(0, tall, rows):
        for j in range(0, wide, columns):
            top, left = min(i, tall - rows), min(j, wide - columns)
            yield slice(top, top + rows), slice(left, left + columns)


def _filled(left: Tiles, right: Tiles | None, scale: float | Tensor) -> Pair:
    other = left if right is None else right
    cell = cell_of(left, other)
    per_point = left.plan.layout.shape
    size = prod(per_point) if left.plan.program.output.positions else 1
    shape = (left.count * size, other.count * size)
    example = left.own[0]
    count = 2 if left.tangent else 1
    check_memory(
        count * example.element_size() * shape[0] * shape[1],
        example.device,
        f"the kernel matrix of {shape[0]} × {shape[1]} entries",
        "solver=CG(), which multiplies with it tile by tile",
    )
    results = [torch.empty(shape, dtype=example.dtype, device=example.device) for _ in range(count)]
    cells = list(cells_of(left, right))
    mirrored = right is None and left.device.type != "cuda"
    with progress("kernel tiles", total=len(cells)) as advance:
        for i, j in cells:
            found = cell(i, j)
            a, b = (slice(s.start * size, s.stop * size) for s in (i, j))
            for result, t in zip(results, found, strict=False):
                assert t is not None
                tile = arranged(t, left.plan)
                result[a, b] = tile
                if mirrored and i.start != j.start:
                    result[b, a] = tile.T
            advance()
    if right is None:
        for result, blocks in zip(results, own_blocks(left), strict=False):
            assert blocks is not None
            n, c = blocks.shape[:2]
            result.view(n, c, n, c).diagonal(0, 0, 2).copy_(blocks.permute(1, 2, 0))
    if not (isinstance(scale, float | int) and scale == 1):
        for result in results:
            result.mul_(scale)
    return results[0], results[1] if count == 2 else None


def diagonal(tiles: Tiles) -> tuple[Tensor, Tensor | None]:
    """Return the diagonals of both kernels."""
    blocks = [None if b is None else b.diagonal(0, 1, 2).reshape(-1) for b in own_blocks(tiles)]
    assert blocks[0] is not None
    return blocks[0], blocks[1]
