"""Cholesky factors with random pivots, of high rank in one matrix, and preconditioners made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from net2gp.errors import InputError
from net2gp.linalg.cholesky import cholesky
from net2gp.linalg.low_rank import Pivots
from net2gp.progress import progress

PART_BYTES = 2**27
"""How many bytes of a factor are converted to float64 at a time."""


@torch.no_grad()
def random_pivots(
    diag: Tensor,
    columns: Callable[[Tensor], Tensor],
    square: Callable[[Tensor], Tensor],
    rank: int,
    *,
    generator: torch.Generator,
    block: int = 64,
    dtype: torch.dtype = torch.float64,
) -> Pivots:
    """Approximate K ≈ L Lᵀ from columns of K at pivots that are drawn by what remains of the diagonal.

    The expected trace of K − L Lᵀ is close to that of the best approximation of a slightly lower rank. Pivots
    are proposed in blocks, and a proposal is accepted with the probability that its remaining diagonal has
    shrunk to under the earlier ones of its block, so that the law of the pivots is that of single draws. The
    cost is the columns of the accepted pivots, and O(n r²) as matrix products. Memory is one matrix (n, r) in
    the chosen dtype, and two of a block of columns.

    Args:
        diag: The diagonal of K, (n,).
        columns: Maps indices (k,) to K[:, indices], (n, k).
        square: Maps indices (k,) to K[indices, indices], (k, k).
        rank: The largest number of pivots.
        generator: The source of the choices, on the CPU.
        block: How many pivots are proposed at a time.
        dtype: The dtype in which L is held.

    Returns:
        The factor, its pivots and the remaining diagonal. There are fewer than `rank` pivots if rounding is
        all that remains.

    Raises:
        InputError: If `rank` or `block` is below 1, or an entry of K is not finite.

    >>> K = torch.tensor([[4.0, 2.0], [2.0, 1.0]])
    >>> generator = torch.Generator().manual_seed(0)
    >>> found = random_pivots(
    ...     K.diagonal(), lambda i: K[:, i], lambda i: K[i][:, i], 2, generator=generator
    ... )
    >>> torch.allclose(found.L @ found.L.mT, K.double())
    True

    References: Chen, Epperly, Tropp and Webber, Randomly pivoted Cholesky, 2023; Epperly, Tropp and Webber,
    Embrace rejection: kernel matrix approximation by accelerated randomly pivoted Cholesky, 2024.
    """
    if rank < 1 or block < 1:
        raise InputError(
            f"rank and block must be at least 1, but rank={rank} and block={block} came."
        )
    n = diag.shape[0]
    _check_rows(diag, torch.arange(n, device=diag.device))
    remaining = diag.to(torch.float64, copy=True).clamp_(min=0.0)
    rank = min(rank, n)
    rows = remaining.new_empty(rank, n, dtype=dtype)  # Lᵀ, so that a new vector is contiguous
    index = torch.empty(rank, dtype=torch.long, device=diag.device)
    size, largest = 0, float(remaining.max())
    floor = 10 * torch.finfo(dtype).eps * largest
    with progress("random pivots", rank) as advance:
        while size < rank and float(remaining.max()) > floor:
            proposed = _proposals(remaining, block, generator)
            near = rows[:size, proposed].double()
            entries = square(proposed)
            floor = max(floor, 10 * torch.finfo(entries.dtype).eps * largest)
            left = entries.double() - near.mT @ near
            order, factor = _accepted(left, remaining[proposed], rank - size, floor, generator)
            # the diagonal is known anew here, without the rounding of all subtractions before
            known = torch.minimum(remaining[proposed], left.diagonal().clamp(min=0.0))
            remaining[proposed] = known
            if len(order):
                chosen = proposed[order]
                panel = columns(chosen)
                _check_rows(panel, chosen)
                new = _new_rows(panel, rows[:size], chosen, factor)
                remaining -= new.square().sum(0)
                remaining.clamp_(min=0.0)[chosen] = 0.0
                rows[size : size + len(order)] = new
                index[size : size + len(order)] = chosen
                size += len(order)
                advance(len(order))
            # A proposal that rounding has used up must not be drawn for ever.
            spent = proposed[left.diagonal() <= floor]
            remaining[spent] = 0.0
    return Pivots(rows[:size].mT, index[:size], remaining)


def _proposals(remaining: Tensor, block: int, generator: torch.Generator) -> Tensor:
    """Indices that are drawn with replacement, in proportion to the remaining diagonal."""
    total = remaining.cumsum(0)
    places = torch.rand(block, generator=generator, dtype=torch.float64).to(total.device)
    found = torch.searchsorted(total, places * total[-1])
    return found.clamp(max=len(remaining) - 1)


def _accepted(
    left: Tensor, before: Tensor, most: int, floor: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """The proposals that are accepted, in order, and the lower Cholesky factor among them."""
    A, share = left.cpu().numpy(), before.cpu().numpy()
    dice = torch.rand(len(A), generator=generator, dtype=torch.float64).numpy()
    own, rows = A.diagonal().copy(), np.zeros_like(A)
    order: list[int] = []
    for place in range(len(A)):
        if len(order) == most:
            break
        if not (own[place] > floor and dice[place] * share[place] < own[place]):
            continue
        earlier = rows[: len(order)]
        row = (A[place] - earlier[:, place] @ earlier) / np.sqrt(own[place])
        rows[len(order)] = row
        own -= row**2
        order.append(place)
    factor = torch.from_numpy(np.tril(rows[: len(order), order].T)).to(left.device)
    return torch.tensor(order, dtype=torch.long, device=left.device), factor


def _new_rows(panel: Tensor, rows: Tensor, chosen: Tensor, factor: Tensor) -> Tensor:
    """The rows of Lᵀ for new pivots in float64: T⁻¹ (K[:, pivots] − L L[pivots]ᵀ)ᵀ."""
    new = panel.to(torch.float64).mT.contiguous()
    if len(rows):
        weights = rows[:, chosen]
        for part in _parts(rows):
            new[:, part] -= weights.mT.double() @ rows[:, part].double()
    if not new.is_cuda:
        return torch.linalg.solve_triangular(factor, new, upper=False)
    # cuBLAS takes a hundred times as long for a triangular solve with so many columns
    eye = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
    return torch.linalg.solve_triangular(factor, eye, upper=False) @ new


def _parts(rows: Tensor) -> Iterator[slice]:
    """Slices of the columns of (r, n), so small that they can be converted."""
    size = max(1, PART_BYTES // (8 * max(1, len(rows))))
    for start in range(0, rows.shape[1], size):
        yield slice(start, start + size)


def _check_rows(values: Tensor, indices: Tensor) -> None:
    if bool(torch.isfinite(values.sum())):
        return
    bad = ~torch.isfinite(values)
    if not bool(bad.any()):
        return
    rows = bad.reshape(len(values), -1).any(1).nonzero().flatten().tolist()
    shown = ", ".join(map(str, rows[:5])) + (", …" if len(rows) > 5 else "")
    many = f"row {shown}" if len(rows) == 1 else f"{len(rows)} rows: {shown}"
    raise InputError(
        f"kernel entries must be finite, but are NaN or infinite in {many}. Drop these points, or scale "
        "the inputs: x / x.std(0)."
    )


@dataclass(frozen=True, eq=False)
class FactorPlusIdentity:
    """The matrix M = I + L Lᵀ as a preconditioner, with nothing of the size of L beside it.

    With LᵀL = BBᵀ the columns of Q = L B⁻ᵀ are orthonormal, and M = I + Q BᵀB Qᵀ. With I + BᵀB = TTᵀ the
    matrix R = I − Q (I − T⁻¹) Qᵀ is a root of the inverse, M⁻¹ = RᵀR. It needs triangular r × r factors
    alone; a product with (n, k) costs O(n r k + r² k) in float64. A rounded L gives another matrix M
    that is still positive definite.

    Args:
        L: The factor, (n, r), in any dtype.
        inner: B, (r, r), lower.
        outer: T, (r, r), lower.
        index: The rows of the pivots that L was made with, if they are known.

    >>> matrix = FactorPlusIdentity.from_factor(torch.tensor([[3.0], [0.0]]).sqrt())
    >>> matrix.inverse_sqrt(torch.ones(2, 1, dtype=torch.float64)).flatten()
    tensor([0.5000, 1.0000], dtype=torch.float64)
    """

    L: Tensor
    inner: Tensor
    outer: Tensor
    index: Tensor | None = None

    @classmethod
    @torch.no_grad()
    def from_factor(cls, L: Tensor, index: Tensor | None = None) -> FactorPlusIdentity:
        """Build I + L Lᵀ in O(n r² + r³).

        Args:
            L: A matrix, (n, r).
            index: The rows of its pivots.

        Returns:
            The matrix.
        """
        rows = L.mT
        gram = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=L.device)
        for part in _parts(rows):
            some = rows[:, part].double()
            gram += some @ some.mT
        # Columns that depend on each other to rounding get directions that M leaves as they are.
        gram.diagonal().add_(10 * torch.finfo(torch.float64).eps * gram.diagonal().sum())
        inner = cholesky(gram, what="LᵀL").L
        outer = inner.mT @ inner
        outer.diagonal().add_(1.0)
        return cls(L, inner, cholesky(outer, what="I + LᵀL").L, index)

    def inverse_sqrt(self, v: Tensor) -> Tensor:
        """Compute R v for v (n, k), with M⁻¹ = RᵀR."""
        inner = self._coordinates(v)
        kept = inner - torch.linalg.solve_triangular(self.outer, inner, upper=False)
        return v - self._combined(kept)

    def inverse_sqrt_transposed(self, v: Tensor) -> Tensor:
        """Compute Rᵀ v for v (n, k)."""
        inner = self._coordinates(v)
        kept = inner - torch.linalg.solve_triangular(self.outer.mT, inner, upper=True)
        return v - self._combined(kept)

    def log_det(self) -> Tensor:
        """Compute log |M|."""
        return 2 * self.outer.diagonal().log().sum()

    def _coordinates(self, v: Tensor) -> Tensor:
        """Qᵀ v."""
        rows = self.L.mT
        inner = torch.zeros(len(rows), v.shape[1], dtype=torch.float64, device=v.device)
        for part in _parts(rows):
            inner += rows[:, part].double() @ v[part].double()
        return torch.linalg.solve_triangular(self.inner, inner, upper=False)

    def _combined(self, inner: Tensor) -> Tensor:
        """Q c."""
        weights = torch.linalg.solve_triangular(self.inner.mT, inner, upper=True)
        rows = self.L.mT
        return torch.cat([rows[:, part].double().mT @ weights for part in _parts(rows)])
