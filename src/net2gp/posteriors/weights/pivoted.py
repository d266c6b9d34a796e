"""The covariance of parameters from the rows of the data that say something: the others are left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from net2gp.inputs import chunks, follows, num_rows, ordinary_tensors, rows
from net2gp.linalg import block_matmul, cholesky, lanczos, pivots
from net2gp.linear.forward.factors import Factor, accumulate, add_blocks, picked, pulled, pushed
from net2gp.linear.jacobians.tangent import TangentKernel
from net2gp.linear.linearized import Linearized
from net2gp.memory import available_memory
from net2gp.posteriors.weights.covariance import Covariance, normal
from net2gp.posteriors.weights.structure import prior_vector
from net2gp.tags import savable
from net2gp.types import Inputs

BLOCK = 192
"""Candidates for pivots whose rows of the kernel are computed together."""

SHARE = 0.5
"""Pivots beyond this share of the rows are no gain: a Cholesky factor of all rows is as fast."""

PROBES, ATTEMPTS = 4, 8
"""Lanczos steps that find the direction in which most is missed; and how often more rows are asked for."""

TEST_BYTES = 2**27
"""What the cross-covariances of one chunk of test points may take."""


@dataclass(frozen=True, eq=False)
class RowSystem:
    """A = SᵀKS over all rows n·K + k of the data, Σ_c S_nck f_c(x_n), by the pivots among them.

    With Λ = SSᵀ each row is observed with unit noise. L has what the pivots explain of the rows `kept`.
    """

    L: Tensor  # (n, r)
    T: Tensor  # (r, r), lower triangular: the pivots' own rows of L
    kept: Tensor  # (n,)
    index: Tensor  # (r,), the pivots
    missed: float  # the trace of A − LLᵀ
    num_rows: int

    @cached_property
    @ordinary_tensors()
    def R(self) -> Tensor:
        """The Cholesky factor of B = I + LᵀL."""
        B = self.L.mT @ self.L
        B.diagonal().add_(1.0)
        return cholesky(B, what="I + LᵀL").L

    def rest(self) -> Tensor:
        """What the rest adds to log|I + A|, at most: as if all of the other rows had the same information."""
        count = max(1, self.num_rows - len(self.index))
        return count * torch.log1p(torch.tensor(self.missed / count, dtype=torch.float64))


@torch.no_grad()
def row_system(
    kernel: TangentKernel, x: Inputs, S: Tensor, tol: float, gram: Tensor | None = None
) -> RowSystem | None:
    """Rows of SᵀKS, S (N, C, K), such that no direction of the parameters misses much more than tol.

    The whitened gradients Φ of all rows give the posterior precision M = I + ΦᵀΦ. Of rows with less than a
    level nothing is kept, and of others what the pivots down to that level explain: Φ̂, and M̂ = I + Φ̂ᵀΦ̂.
    The level is lowered until λ, the largest eigenvalue of M̂^(−½) DᵀD M̂^(−½) with D = Φ − Φ̂, is at most
    tol, as far as a few Lanczos steps show, which find it from below. As M − M̂ = Φ̂ᵀD + DᵀΦ̂ + DᵀD,
    variances are then right to about 2√λ of themselves in the worst direction; in most, where Φ̂ and D have
    nothing to do with each other, to λ.

    None if the pivots are most of the rows, or the gradients do not fit into memory. Cost: one forward and C
    backward passes over the data; with n rows kept and r pivots, n·r entries of the kernel and 2nr²
    operations. Where `gram`, K itself, is known, its entries are read and no pass is needed.
    """
    found = _Gram.of(S, gram) if gram is not None else _Rows.of(kernel, x, S)
    if found is None:
        return None
    level = tol / 8
    for _ in range(ATTEMPTS):
        system = _explained(found, level)
        if system is None:
            return None
        missed = _most_missed(found, system)
        if missed <= tol:
            return system
        level *= min(0.3, 0.5 * tol / missed)
    return None


@dataclass(frozen=True, eq=False)
class _Rows:
    """The gradients of all rows n·K + k, as factors with K outputs, and the diagonal of ΦΦᵀ."""

    factors: list[Factor]
    diagonal: Tensor
    K: int

    @classmethod
    def of(cls, kernel: TangentKernel, x: Inputs, S: Tensor) -> _Rows | None:
        factors = kernel.precise().factors(x, S)
        if factors is None:
            return None
        N, _, K = S.shape
        blocks = torch.zeros(N, K, K, dtype=torch.float64, device=S.device)
        for factor in factors:
            add_blocks(blocks, factor)
        return cls(factors, blocks.diagonal(dim1=1, dim2=2).reshape(-1), K)

    def columns(self, kept: Tensor) -> Callable[[Tensor], Tensor]:
        """The columns of some of the kept rows, on the kept rows."""
        mine = [picked(factor, kept // self.K, kept) for factor in self.factors]

        def columns(index: Tensor) -> Tensor:
            panel = self.diagonal.new_zeros(len(kept), len(index))
            for factor in mine:  # whose rows are points of one output
                accumulate(panel, factor, picked(factor, index, index), 1)
            return panel

        return columns

    def gram(self, v: Tensor) -> Tensor:
        """ΦΦᵀv for v (N·K, 1)."""
        by_point = v.reshape(-1, self.K)
        rows = torch.zeros_like(by_point)
        for factor in self.factors:
            rows += pushed(factor, pulled(factor, by_point))
        return rows.reshape(-1, 1)


@dataclass(frozen=True, eq=False)
class _Gram:
    """SᵀKS itself, where K is known, and its diagonal."""

    matrix: Tensor

    @classmethod
    def of(cls, S: Tensor, K: Tensor) -> _Gram:
        S = S.to(K)
        return cls(block_matmul(S.mT, block_matmul(S.mT, K).mT))

    @property
    def diagonal(self) -> Tensor:
        return self.matrix.diagonal()

    def columns(self, kept: Tensor) -> Callable[[Tensor], Tensor]:
        """The columns of some of the kept rows, on the kept rows."""
        return lambda index: self.matrix[:, kept[index]][kept]

    def gram(self, v: Tensor) -> Tensor:
        """ΦΦᵀv for v (N·K, 1)."""
        return self.matrix @ v


def _explained(matrix: _Gram | _Rows, level: float) -> RowSystem | None:
    """The pivots down to a level, of the rows above it."""
    diagonal = matrix.diagonal
    kept = (diagonal > level).nonzero()[:, 0]
    columns = matrix.columns(kept)
    room = available_memory(diagonal.device) // (32 * max(1, len(kept)))
    most = min(int(SHARE * len(diagonal)), room)
    found = pivots(diagonal[kept], columns, most, block=BLOCK, largest=level)
    if len(found.index) == most and bool((found.remaining > level).any()):
        return None
    missed = float(diagonal.sum() - diagonal[kept].sum() + found.remaining.sum())
    T = found.L[found.index].tril()
    return RowSystem(found.L, T, kept, kept[found.index], missed, len(diagonal))


def _most_missed(matrix: _Gram | _Rows, system: RowSystem) -> float:
    """The largest eigenvalue of D M̂⁻¹ Dᵀ, by Lanczos.

    With D = Φ − Φ̂ and Q = T⁻¹Φ_Z, of the pivots Z: Φ̂ = LQ at the rows kept, M̂⁻¹ = I − Qᵀ(I − B⁻¹)Q.
    """
    solve, kept = torch.linalg.solve_triangular, system.kept

    def product(v: Tensor) -> Tensor:
        along = solve(system.T.mT, system.L.mT @ v[kept], upper=True)
        rows = matrix.gram(v.index_add(0, system.index, along, alpha=-1.0))
        along = solve(system.T, rows[system.index], upper=False)
        known = torch.cholesky_solve(along, system.R)
        # of the rows kept it is Φw − LQw; of the others what M̂⁻¹ leaves of Φw
        back = torch.zeros_like(v)
        back[system.index] = solve(system.T.mT, along - known, upper=True)
        less = matrix.gram(back)
        less[kept] = system.L @ along
        return rows - less

    if not system.missed > 0.0:
        return 0.0
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(system.num_rows, generator=generator, dtype=torch.float64)
    found = lanczos(product, start.to(matrix.diagonal), min(PROBES, system.num_rows))
    return float(torch.linalg.eigvalsh(found.T)[-1])


@savable("pivoted.Pivoted")
@dataclass(frozen=True, eq=False)
class Pivoted(Covariance):
    """Σ = V − V^½ Φᵀ T⁻ᵀ (I − B⁻¹) T⁻¹ Φ V^½, Φ (r, P) being the whitened gradients of r rows of the data.

    T is the Cholesky factor of ΦΦᵀ, so T⁻¹Φ has orthonormal rows, along which B = I + LᵀL = RRᵀ is the
    posterior precision. The rows are the entries `index` (n·K + k) of Σ_c mix_nck f_c(x_n). Directions
    that they do not span keep the prior.

    Reference: Bach, Jordan, Predictive low-rank decomposition for kernel methods, ICML 2005.
    """

    kernel: TangentKernel
    x: Inputs = field(repr=False)
    mix: Tensor = field(repr=False)
    index: Tensor = field(repr=False)
    T: Tensor = field(repr=False)
    R: Tensor = field(repr=False)

    @classmethod
    def of(cls, kernel: TangentKernel, x: Inputs, S: Tensor, system: RowSystem) -> Pivoted:
        """The posterior under all rows of a system, with the points that have a pivot."""
        K = S.shape[2]
        used, place = torch.unique(system.index // K, return_inverse=True)
        index = place * K + system.index % K
        return cls(kernel, rows(x, used), S[used], index, system.T, system.R)

    def log_det(self) -> Tensor:
        """log|B|."""
        return 2 * self.R.diagonal().log().sum()

    def blocks(self, linearized: Linearized, x: Inputs) -> Tensor:
        """J_n Σ J_nᵀ for each point: (N, C, C)."""
        parts = []
        for prior, less in self._pieces(x):
            by_point = less.unflatten(1, prior.shape[:2])
            parts.append(prior - torch.einsum("rnc,rnd->ncd", by_point, by_point))
        found = torch.cat(parts)
        negative = found.diagonal(dim1=1, dim2=2).clamp(max=0.0)
        return found - torch.diag_embed(negative)

    def variances(self, linearized: Linearized, x: Inputs) -> Tensor:
        """The diagonals of the blocks: (N, C)."""
        parts = []
        for prior, less in self._pieces(x):
            variances = prior.diagonal(dim1=1, dim2=2)
            parts.append(variances - less.square().sum(0).reshape(variances.shape))
        return torch.cat(parts).clamp(min=0.0).to(self.kernel.linearized.example.dtype)

    def joint(self, linearized: Linearized, x: Inputs) -> Tensor:
        """J Σ Jᵀ over all points: (N·C, N·C)."""
        less = torch.cat([part for _, part in self._pieces(x)], 1)
        return self.kernel.precise()(x) - less.mT @ less

    def draw(self, num_samples: int, generator: torch.Generator | None) -> Tensor:
        """V^½ (w − Qᵀ(Qw − R⁻ᵀz)) with Q = T⁻¹Φ, of standard normal w and z: (P, S)."""
        kernel, mix = self.kernel.precise(), self.mix
        prior = prior_vector(kernel.prior_var, kernel.linearized.params).double()
        w, z = (normal(like, num_samples, generator) for like in (prior, self.T.diagonal()))
        solve = torch.linalg.solve_triangular
        outputs = kernel.apply(self.x, w).unflatten(0, mix.shape[:2])
        along = (mix.mT @ outputs).flatten(0, 1)[self.index]
        along = solve(self.T, along, upper=False) - solve(self.R.mT, z, upper=True)
        back = outputs.new_zeros(mix.shape[0] * mix.shape[2], num_samples)
        back[self.index] = solve(self.T.mT, along, upper=True)
        sides = mix @ back.unflatten(0, (mix.shape[0], mix.shape[2]))
        return prior.sqrt()[:, None] * (w - kernel.adjoint(self.x, sides.flatten(0, 1)))

    @cached_property
    @ordinary_tensors()
    def _rows(self) -> list[Factor]:
        """The gradients of the rows, each a point of one output."""
        found, K = self.kernel.precise().factors(self.x, self.mix), self.mix.shape[2]
        if found is None:
            raise MemoryError("the gradients of the training points do not fit into memory.")
        return [picked(factor, self.index // K, self.index) for factor in found]

    @cached_property
    @ordinary_tensors()
    def _less(self) -> Tensor:
        """E (r, r) with EᵀE = T⁻ᵀ(I − B⁻¹)T⁻¹: one product in place of two solves for each test row."""
        eye = torch.eye(len(self.T), dtype=self.T.dtype, device=self.T.device)
        root = cholesky(eye - torch.cholesky_inverse(self.R), what="I − B⁻¹").L
        return torch.linalg.solve_triangular(self.T.mT, root, upper=True).mT.contiguous()

    def _pieces(self, x: Inputs) -> Iterator[tuple[Tensor, Tensor]]:
        """For chunks of points the prior's blocks (n, C, C) and E k(rows, x), (r, n·C)."""
        kernel, C, r = self.kernel.precise(), self.mix.shape[1], len(self.T)
        size = min(kernel.points_at_once(x), max(1, TEST_BYTES // (8 * C * r)))
        for part in chunks(x, size):
            with torch.set_grad_enabled(
                follows(part)
            ):  # and not at the yield, which leaves the block
                found = self._part(kernel, part)
            yield found

    def _part(self, kernel: TangentKernel, x: Inputs) -> tuple[Tensor, Tensor]:
        C, r, n, factors = self.mix.shape[1], len(self.T), num_rows(x), kernel.factors(x)
        assert factors is not None
        prior, cross = self.T.new_zeros(n, C, C), self.T.new_zeros(r, n * C)
        for one, other in zip(self._rows, factors, strict=True):
            add_blocks(prior, other)
            accumulate(cross, one, other, 1, C)
        return prior, self._less @ cross
