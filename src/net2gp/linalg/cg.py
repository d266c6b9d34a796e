"""Block conjugate gradients: many right-hand sides at once, with nothing but products with the matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from net2gp.errors import InputError, NotConverged, check_finite, warn
from net2gp.linalg.checkpoint import Checkpoint

Matmul = Callable[[Tensor], Tensor]
"""Maps v (n, k) to A v (n, k)."""

OUT_OF_ITERATIONS = "the iterations ran out"
STALLED = "the residual stalled"
NOT_DEFINITE = "the curvature was not positive"


class Preconditioner(Protocol):
    """A symmetric positive definite M ≈ A with a cheap root R of the inverse, M⁻¹ = RᵀR.

    The root of `LowRankPlusIdentity` is symmetric. Where it is not, as for `FactorPlusIdentity`, a method
    `inverse_sqrt_transposed` multiplies by Rᵀ.
    """

    def inverse_sqrt(self, v: Tensor) -> Tensor:
        """Multiply by a root of the inverse.

        Args:
            v: A matrix, (n, k).

        Returns:
            R v, (n, k).
        """


def transposed_root(preconditioner: Preconditioner) -> Matmul:
    """Return the product with Rᵀ, which is the product with R itself if R is symmetric."""
    found: Matmul = getattr(preconditioner, "inverse_sqrt_transposed", preconditioner.inverse_sqrt)
    return found


@dataclass(frozen=True)
class Solution:
    """The result of `block_cg`.

    Args:
        x: The solution, in the shape of b, in float64.
        relative_residuals: ‖b − A x‖ / ‖b‖ of each column, (k,), computed from x at the end.
        iterations: The number of iterations.
        converged: Whether all relative residuals are within the tolerance.
        history: The largest relative residual before the first iteration and after each one.
    """

    x: Tensor
    relative_residuals: Tensor
    iterations: int
    converged: bool
    history: tuple[float, ...]


@torch.no_grad()
def block_cg(
    matmul: Matmul,
    b: Tensor,
    *,
    preconditioner: Preconditioner | None = None,
    x0: Tensor | None = None,
    tol: float = 1e-8,
    max_iterations: int = 1000,
    on_step: Callable[[int, float], None] | None = None,
    checkpoint: Checkpoint | None = None,
) -> Solution:
    """Solve A x = b for symmetric positive definite A.

    Each iteration minimizes the energy q(x) = ½ xᵀ A x − xᵀ b of every column over a space that grows by k
    directions and is shared by all columns. So q decreases monotonically, and since
    q(x) − q(A⁻¹b) = ½ ‖x − A⁻¹b‖²_A, so does the error. The residual may increase now and then.

    The residual block is kept as Q C with orthonormal Q (Dubrulle's rQ form). The directions P are
    orthonormalized and made conjugate explicitly, so columns of b may be dependent, zero, or finish at
    different times. Zero columns give zero. A preconditioner M is split, R A Rᵀ with RᵀR = M⁻¹, but the
    stopping rule is the plain relative residual ‖b − A x‖ / ‖b‖. It is checked on b − A x itself: if the
    recursion was too optimistic, the iteration restarts from x, within `max_iterations`. If `tol` is not
    reached, a `NotConverged` warning says why and what to try, and the best x so far is returned. An
    iteration costs one product with (n, k) and O(n k²); there is one more product at the end. Memory is
    O(n k).

    Args:
        matmul: Computes A v. It gets float64 and may answer in float32, since all sums are float64. It runs
            without autograd.
        b: Right-hand sides, (n,) or (n, k).
        preconditioner: M ≈ A, or None for none.
        x0: Where to start, in the shape of b. None means zero.
        tol: The relative residual that every column must reach.
        max_iterations: The most iterations.
        on_step: Is called with the iteration and the largest residual after each iteration.
        checkpoint: Where the state, seven (n, k) blocks, is written now and then. A solve that was
            interrupted continues from it with the same numbers and with the right-hand side that was
            written.

    Returns:
        The solution and how it was reached.

    >>> A = torch.tensor([[4.0, 2.0], [2.0, 5.0]], dtype=torch.float64)
    >>> solution = block_cg(lambda v: A @ v, torch.tensor([[6.0, 0.0], [7.0, 0.0]]))
    >>> torch.allclose(solution.x, torch.tensor([[1.0, 0.0], [1.0, 0.0]]).double())
    True
    >>> solution.converged, solution.iterations
    (True, 1)

    References: Dubrulle, Retooling the method of block conjugate gradients, 2001; O'Leary, The
    block conjugate gradient algorithm and related methods, 1980.
    """
    columns = _check(b, x0, tol)
    norms = _norms(columns)
    scale = norms.where(norms > 0, torch.ones_like(norms))
    unit = columns / scale  # the norms of residual columns are then relative residuals
    system = _System(matmul, preconditioner, tol, max_iterations, on_step, checkpoint)
    state = system.resume(unit.device)
    if state is not None:
        unit, scale = state["unit"], state["scale"]
        x, residual = state["x"], state["residual"]
    elif x0 is None:
        x, residual = torch.zeros_like(unit), unit
    else:
        x = x0.detach().to(unit).reshape(unit.shape) / scale * (norms > 0)
        residual = unit - system.product(x)
    if state is None:
        system.history.append(_largest(residual))
    system.fixed = {"unit": unit, "scale": scale}
    x, residual, reason = _refine(system, unit, x, residual, state)
    system.keep({"x": x, "residual": residual}, ended=True, reason=reason)
    reached = _norms(residual)
    if reason:
        _warn(float(reached.max()), system, reason)
    return Solution(
        (x * scale).reshape(b.shape), reached, system.iterations, not reason, tuple(system.history)
    )


@dataclass
class _System:
    """The operator, the stopping rule, and the record of the run so far."""

    matmul: Matmul
    preconditioner: Preconditioner | None
    tol: float
    max_iterations: int
    on_step: Callable[[int, float], None] | None
    checkpoint: Checkpoint | None = None
    history: list[float] = field(default_factory=list)
    # The rounding of the dtype in which matmul answers.
    eps: float = torch.finfo(torch.float64).eps
    # The tensors that do not change, for the checkpoint.
    fixed: dict[str, Tensor] = field(default_factory=dict)
    # Why a solve that was read from a checkpoint had ended: "" if it converged, None if it had not ended.
    ended: str | None = None

    @property
    def iterations(self) -> int:
        return len(self.history) - 1

    def product(self, v: Tensor) -> Tensor:
        result = self.matmul(v)
        if result.shape != v.shape:
            raise InputError(
                f"matmul must keep the shape {tuple(v.shape)}, but gave {tuple(result.shape)}."
            )
        if not bool(torch.isfinite(result.sum())):
            check_finite(result, "matmul(v)")
        self.eps = torch.finfo(result.dtype).eps
        return result.to(torch.float64)

    def resume(self, device: torch.device) -> dict[str, Tensor] | None:
        """Return the state of the checkpoint, if there is one."""
        found = None if self.checkpoint is None else self.checkpoint.load(device)
        if found is None:
            return None
        tensors, numbers = found
        self.history, self.eps = list(numbers["history"]), float(numbers["eps"])  # type: ignore[call-overload, arg-type]
        ended = numbers["ended"]
        # A solve that ran out of iterations continues if it is given more.
        more = ended == OUT_OF_ITERATIONS and self.iterations < self.max_iterations
        self.ended = None if ended is None or more else str(ended)
        return tensors

    def keep(self, state: dict[str, Tensor], *, ended: bool = False, reason: str = "") -> None:
        """Write the state if it is time, or at the end."""
        if self.checkpoint is None or self.ended is not None:
            return
        if ended or self.checkpoint.due:
            numbers = {"history": self.history, "eps": self.eps, "ended": reason if ended else None}
            self.checkpoint.write(self.fixed | state, numbers)

    def half(self, v: Tensor) -> Tensor:
        """Compute R v, where RᵀR is the inverse of the preconditioner."""
        return v if self.preconditioner is None else self.preconditioner.inverse_sqrt(v)

    def half_transposed(self, v: Tensor) -> Tensor:
        """Compute Rᵀ v."""
        return v if self.preconditioner is None else transposed_root(self.preconditioner)(v)

    def record(self, residual: float) -> None:
        self.history.append(residual)
        if self.on_step is not None:
            self.on_step(self.iterations, residual)


def _refine(
    system: _System, unit: Tensor, x: Tensor, residual: Tensor, state: dict[str, Tensor] | None
) -> tuple[Tensor, Tensor, str]:
    """Run cycles until the true residual passes.

    Returns x, its residual, and why the iteration gave up, which is empty if it did not.
    """
    if system.ended is not None:
        return x, residual, system.ended
    reached = _largest(residual)
    inside = state if state is not None and "P" in state else None
    while reached > system.tol:
        new_x, reason = _cycle(system, x, residual, inside)
        inside = None
        new_residual = unit - system.product(new_x)
        if reason:
            # A cycle that was cut short may end with a larger residual and still be nearer to the solution.
            better = _energy(unit, new_x, new_residual) < _energy(unit, x, residual)
        else:
            better = _norms(new_residual) < _norms(residual)
        x, residual = torch.where(better, new_x, x), torch.where(better, new_residual, residual)
        before, reached = reached, _largest(residual)
        system.history[-1] = reached
        # A cycle that does not even halve the true residual has reached the precision of the products.
        if reached > system.tol and (reason == OUT_OF_ITERATIONS or reached > 0.5 * before):
            return x, residual, reason or STALLED
    return x, residual, ""


def _cycle(
    system: _System, x: Tensor, residual: Tensor, inside: dict[str, Tensor] | None
) -> tuple[Tensor, str]:
    """Run block CG from x and its residual until the recursion passes.

    Returns x, and why the cycle gave up, which is empty if it did not.
    """
    begin = {"x": x, "residual": residual}
    if inside is None:
        Q, C = torch.linalg.qr(system.half(residual))  # R residual = Q C throughout
        P = Q
        size = 0.0  # a lower bound on ‖A‖
    else:
        x, residual, Q, C, P = (inside[name] for name in ("new_x", "recursed", "Q", "C", "P"))
        size = float(inside["size"])
    while system.iterations < system.max_iterations:
        V = system.half_transposed(P)
        AV = system.product(V)
        AP = system.half(AV)
        curvature = P.mT @ AP
        factor, info = torch.linalg.cholesky_ex(0.5 * (curvature + curvature.mT))
        if int(info) != 0:
            return x, NOT_DEFINITE
        # PᵀQ is the identity in exact arithmetic while all directions are independent. It is computed because
        # the QR fills in arbitrary directions when they are not, and the step must minimize over span(P).
        step = torch.cholesky_solve(P.mT @ Q, factor)
        x = x + V @ (step @ C)
        residual = residual - AV @ (step @ C)
        system.record(_largest(residual))
        # Products round by about eps·‖A‖‖x‖. A recursive residual well below this is not the true residual.
        size = max(size, float((_norms(AV) / _norms(V)).max()))
        floor = 0.1 * system.eps * size * _norms(x)
        if bool((_norms(residual) <= floor.clamp(min=system.tol)).all()):
            return x, ""
        Q, S = torch.linalg.qr(Q - AP @ step)
        C = S @ C
        P = torch.linalg.qr(Q - P @ torch.cholesky_solve(AP.mT @ Q, factor))[0]
        now = {"new_x": x, "recursed": residual, "Q": Q, "C": C, "P": P}
        system.keep(begin | now | {"size": torch.tensor(size, dtype=torch.float64)})
    return x, OUT_OF_ITERATIONS


def _energy(b: Tensor, x: Tensor, residual: Tensor) -> Tensor:
    """Compute ½ xᵀ A x − xᵀ b of each column, with A x = b − residual."""
    return -0.5 * (x * (b + residual)).sum(0)


def _norms(v: Tensor) -> Tensor:
    return torch.linalg.vector_norm(v, dim=0)


def _largest(residual: Tensor) -> float:
    return float(_norms(residual).max()) if residual.numel() else 0.0


def _check(b: Tensor, x0: Tensor | None, tol: float) -> Tensor:
    if b.dim() not in (1, 2):
        raise InputError(f"b must have shape (n,) or (n, k), but has shape {tuple(b.shape)}.")
    if x0 is not None and x0.shape != b.shape:
        raise InputError(
            f"x0 must have the shape of b, {tuple(b.shape)}, but has shape {tuple(x0.shape)}."
        )
    if not tol > 0.0:
        raise InputError(f"tol must be positive, but is {tol:g}. Pass for example tol=1e-8.")
    check_finite(b, "b")
    columns = b.detach().to(torch.float64)
    return columns.unsqueeze(-1) if b.dim() == 1 else columns


def _warn(reached: float, system: _System, reason: str) -> None:
    advice = {
        OUT_OF_ITERATIONS: (
            "Try a preconditioner of higher rank, a larger noise_var, "
            f"or max_iterations={max(2 * system.max_iterations, 100)}"
        ),
        STALLED: (
            "This is about what the precision of the products allows. Compute them in float64, or "
            "raise noise_var"
        ),
        NOT_DEFINITE: (
            "The matrix is not positive definite to the precision of the products. Raise "
            "noise_var, or compute the products in float64"
        ),
    }[reason]
    looser = f", or accept tol={2 * reached:.0e}" if reached < 0.1 else ""
    warn(
        f"conjugate gradients stopped at a relative residual of {reached:.2e}, above the tolerance "
        f"of {system.tol:.2e}, after {system.iterations} iterations: {reason}. {advice}{looser}.",
        NotConverged,
    )
