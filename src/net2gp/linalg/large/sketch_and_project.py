"""Accelerated sketch-and-project: systems solved on random blocks of their rows, some rows at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from net2gp.errors import InputError, NotConverged, check_finite, warn
from net2gp.linalg.cg import Solution
from net2gp.linalg.checkpoint import Checkpoint
from net2gp.linalg.low_rank import nystrom

POWER_STEPS = 10
"""Power iterations for the length of a step."""

GROWTH = 10.0
"""A residual that is so many times the smallest one means that the steps were too bold."""

PATIENCE = 20
"""After so many passes that together do not take a tenth off the residual, nothing more is to be gained."""


@dataclass(frozen=True)
class Blocks:
    """How a system A = I + G is solved by blocks of rows.

    Args:
        block_size: The number of groups of rows in a block.
        rank: The rank of the Nyström approximation of each block of G.
        passes: The most passes over all rows.
        tol: The relative residual that every column must reach.
        seed: The seed of the blocks and of their approximations.
        group: How many successive rows stay together.
    """

    block_size: int
    rank: int
    passes: int
    tol: float
    seed: int = 0
    group: int = 1


@torch.no_grad()
def sketch_and_project(
    product: Callable[[Tensor, Tensor], Tensor],
    square: Callable[[Tensor], Tensor],
    b: Tensor,
    blocks: Blocks,
    *,
    x0: Tensor | None = None,
    on_step: Callable[[int, float], None] | None = None,
    checkpoint: Checkpoint | None = None,
) -> Solution:
    """Solve (I + G) x = b for positive semi-definite G from products with blocks of its rows.

    A step takes a random block B of rows and its residual g = x_B + G_B x − b_B, and moves x_B by
    −η (Ĝ + ρI)⁻¹ g. Ĝ is a Nyström approximation of G_BB of rank r, ρ = 1 + its smallest eigenvalue, and 1/η
    the largest eigenvalue of (Ĝ + ρI)⁻¹ (I + G_BB), by power iteration. Nesterov's acceleration carries three
    sequences, and a tail average is kept beside the last one. After each pass the true residual of both is
    computed, and the best x so far is what is returned. If it has grown, the acceleration is made more
    careful and starts again from the best x.

    A pass costs two products with all of G, of k columns each; memory is O(n k) and one block of G.

    Args:
        product: Maps row numbers (m,) and v (n, k) to rows of G v, (m, k).
        square: Maps row numbers (m,) to G among them, (m, m).
        b: Right-hand sides, (n, k).
        blocks: The blocks and when to stop.
        x0: Where to start. None means zero.
        on_step: Is called after each block with the number of steps and the largest residual.
        checkpoint: Where the state, six (n, k) matrices, is written now and then. A solve that was
            interrupted continues from it with the same numbers.

    Returns:
        The solution; its `iterations` count passes.

    Raises:
        InputError: If an entry of G or b is not finite.

    >>> G = torch.diag(torch.tensor([3.0, 1.0, 0.0], dtype=torch.float64))
    >>> b = torch.tensor([[4.0], [2.0], [1.0]], dtype=torch.float64)
    >>> blocks = Blocks(block_size=2, rank=2, passes=60, tol=1e-8)
    >>> solution = sketch_and_project(lambda i, v: G[i] @ v, lambda i: G[i][:, i], b, blocks)
    >>> torch.allclose(solution.x, torch.ones_like(b))
    True

    References: Rathore et al., Turbocharging Gaussian process inference with approximate sketch-and-project,
    2025; Gower and Richtárik, Randomized iterative methods for linear systems, 2015.
    """
    check_finite(b, "b")
    solver = _Solver(product, square, b.to(torch.float64), blocks)
    solver.begin(x0, checkpoint)
    while solver.reason is None:
        solver.step()
        if solver.place == 0:
            solver.judge()
        if on_step is not None:
            on_step(solver.steps, solver.history[-1])
        if checkpoint is not None and (checkpoint.due or solver.reason is not None):
            checkpoint.write(*solver.state())
    if solver.reason:
        _warn(solver)
    x = solver.best * solver.scale
    return Solution(x, solver.relative, solver.passes, not solver.reason, tuple(solver.history))


@dataclass(eq=False)
class _Solver:
    """The three sequences, the best solution, and where in a pass the iteration is."""

    product: Callable[[Tensor, Tensor], Tensor]
    square: Callable[[Tensor], Tensor]
    b: Tensor
    blocks: Blocks
    steps: int = 0
    place: int = 0
    passes: int = 0
    caution: float = 1.0
    averaged: int = 0
    floor: float = 0.0
    history: list[float] = field(default_factory=list)
    reason: str | None = None
    v: Tensor = field(init=False)
    z: Tensor = field(init=False)
    w: Tensor = field(init=False)
    average: Tensor = field(init=False)

    def begin(self, x0: Tensor | None, checkpoint: Checkpoint | None) -> None:
        """Start from x0, or where the checkpoint is."""
        norms = torch.linalg.vector_norm(self.b, dim=0)
        self.scale = norms.where(norms > 0, torch.ones_like(norms))
        self.unit = self.b / self.scale
        self.generator = torch.Generator().manual_seed(self.blocks.seed)
        found = None if checkpoint is None else checkpoint.load(self.b.device)
        if found is not None:
            self._restore(*found)
            return
        if x0 is None:
            self.best, residual = torch.zeros_like(self.unit), self.unit
        else:
            self.best = x0.to(self.unit) / self.scale * (norms > 0)
            residual = self.unit - self._whole(self.best)
        self.relative = torch.linalg.vector_norm(residual, dim=0)
        self.history.append(float(self.relative.max()))
        self.reason = "" if self.history[0] <= self.blocks.tol else None
        self._restart()
        self._shuffle()

    def step(self) -> None:
        """Move the rows of one block."""
        size = self.blocks.block_size
        points = self.order[self.place * size : (self.place + 1) * size]
        group = torch.arange(self.blocks.group, device=points.device)
        index = (points[:, None] * self.blocks.group + group).reshape(-1)
        G = self.square(index).double()
        rows = self.product(index, self.z).double()
        if not bool(torch.isfinite(G.sum() + rows.sum())):
            self._refuse(index, G, rows)
        move, length, floor = self._direction(G, self.z[index] + rows - self.unit[index])
        # The least an average step gains in any direction decides how bold the acceleration may be.
        share = len(index) / len(self.unit)
        least = length / floor
        self.floor = least if self.floor == 0 else min(self.floor, 0.9 * self.floor + 0.1 * least)
        mu, nu = self.caution * share * self.floor, 1 / share
        beta, gamma = 1 - math.sqrt(mu / nu), 1 / math.sqrt(mu * nu)
        alpha = 1 / (1 + gamma * nu)
        self.w = self.z.clone()
        self.w[index] -= length * move
        self.v.mul_(beta).add_(self.z, alpha=1 - beta)
        self.v[index] -= gamma * length * move
        self.z = alpha * self.v + (1 - alpha) * self.w
        self.average += self.w
        self.averaged += 1
        self.steps += 1
        self.place = (self.place + 1) % self.count

    def judge(self) -> None:
        """After a pass: the true residuals of the last solution and of the tail average."""
        self.passes += 1
        k = self.unit.shape[1]
        both = torch.cat([self.w, self.average / self.averaged], 1)
        residual = torch.linalg.vector_norm(self.unit.repeat(1, 2) - self._whole(both), dim=0)
        for candidate, reached in ((both[:, :k], residual[:k]), (both[:, k:], residual[k:])):
            better = reached < self.relative
            self.best = torch.where(better, candidate, self.best)
            self.relative = torch.where(better, reached, self.relative)
        self.history.append(float(self.relative.max()))
        self._decide(float(residual[:k].max()))
        # The tail is the second half of what has been done: it begins anew at powers of two.
        if self.passes & (self.passes - 1) == 0:
            self.average, self.averaged = torch.zeros_like(self.w), 0
        self._shuffle()

    def state(self) -> tuple[dict[str, Tensor], dict[str, object]]:
        """What a checkpoint holds."""
        names = ("v", "z", "w", "average", "best", "relative", "order", "unit", "scale")
        tensors = {name: getattr(self, name) for name in names}
        tensors["generator"] = self.generator.get_state()
        return tensors, {name: getattr(self, name) for name in NUMBERS}

    def _restore(self, tensors: dict[str, Tensor], numbers: dict[str, object]) -> None:
        self.generator.set_state(tensors.pop("generator").cpu())
        for name, value in (tensors | numbers).items():
            setattr(self, name, value)
        if self.reason == OUT_OF_PASSES and self.passes < self.blocks.passes:
            self.reason = None  # it continues if it is given more

    def _decide(self, last: float) -> None:
        now = self.history[-1]
        if now <= self.blocks.tol:
            self.reason = ""
        elif self.passes >= self.blocks.passes:
            self.reason = OUT_OF_PASSES
        elif len(self.history) > PATIENCE and now > 0.9 * self.history[-1 - PATIENCE]:
            self.reason = STALLED
        elif not last < GROWTH * now:
            self.caution /= 4
            self._restart()

    def _restart(self) -> None:
        self.v, self.z, self.w = self.best.clone(), self.best.clone(), self.best.clone()
        self.average, self.averaged = torch.zeros_like(self.best), 0

    def _shuffle(self) -> None:
        points = len(self.unit) // self.blocks.group
        order = torch.randperm(points, generator=self.generator)
        self.order = order.to(self.unit.device)

    @property
    def count(self) -> int:
        """The number of blocks of a pass."""
        points = len(self.unit) // self.blocks.group
        return -(-points // self.blocks.block_size)

    def _whole(self, v: Tensor) -> Tensor:
        index = torch.arange(len(v), device=v.device)
        return v + self.product(index, v).double()

    def _direction(self, G: Tensor, g: Tensor) -> tuple[Tensor, float, float]:
        """(Ĝ + ρI)⁻¹ g, the length η of a step, and ρ."""
        size = len(G)
        rank = min(self.blocks.rank, size)
        U, values = nystrom(lambda v: G @ v, size, rank, generator=self.generator, device=G.device)
        # What is left of G beside Ĝ is about as large as the last eigenvalue, and nothing at full rank.
        rho = 1.0 + (0.0 if rank == size or len(values) < rank else float(values[-1]))
        shares = (rho / (values + rho))[:, None]

        def solved(v: Tensor, power: float = 1.0) -> Tensor:
            return (v - U @ ((1 - shares**power) * (U.mT @ v))) / rho**power

        probe = torch.randn(size, 1, dtype=torch.float64, generator=self.generator).to(G)
        largest = 1.0
        for _ in range(POWER_STEPS):
            probe = probe / torch.linalg.vector_norm(probe)
            inner = solved(probe, 0.5)
            probe = solved(inner + G @ inner, 0.5)
            largest = max(1.0, float(torch.linalg.vector_norm(probe)))
        return solved(g), 1 / largest, rho

    def _refuse(self, index: Tensor, G: Tensor, rows: Tensor) -> None:
        bad = ~torch.isfinite(G).all(1) | ~torch.isfinite(rows).all(1)
        some = ", ".join(map(str, sorted(index[bad].tolist())[:5]))
        raise InputError(
            f"products with the kernel must be finite, but are NaN or infinite in {int(bad.sum())} of "
            f"{len(index)} rows, among them {some}. Drop these points, or scale the inputs: x / x.std(0)."
        )


NUMBERS = ("steps", "place", "passes", "caution", "averaged", "floor", "history", "reason")
"""Fields of a `_Solver` that a checkpoint holds as numbers."""

OUT_OF_PASSES = "the passes ran out"
STALLED = "the residual stalled"


def _warn(solver: _Solver) -> None:
    reached, tol = solver.history[-1], solver.blocks.tol
    advice = {
        OUT_OF_PASSES: f"Pass passes={2 * solver.blocks.passes}, a higher rank, or a larger block_size",
        STALLED: "The precision of the products may allow no more: pass x in float64, or raise noise_var",
    }[solver.reason or STALLED]
    warn(
        f"sketch-and-project stopped at a relative residual of {reached:.2e}, above the tolerance of "
        f"{tol:.2e}, after {solver.passes} passes: {solver.reason}. {advice}.",
        NotConverged,
    )
