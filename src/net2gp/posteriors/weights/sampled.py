"""`Sampled()`: all parameters and all points, where no matrix of either size fits.

Draws of N(0, A⁻¹), A = V⁻¹ + Σ_n J_nᵀ Λ_n J_n, are solutions of linear systems: with Λ_n = R_n R_nᵀ and
standard normal ε₀, ε_n, the solution of A w = V^{−1/2} ε₀ + Σ_n J_nᵀ R_n ε_n has that law. Each product with
A is a forward-mode and a backward pass over the data; a sketch of the curvature of some points preconditions.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from net2gp.errors import InputError, check_count, check_positive
from net2gp.inputs import describe, num_rows, rows
from net2gp.likelihoods.traits import bound_to, has_gaussian_noise, of_points, root_times
from net2gp.linalg import (
    Checkpoint,
    LowRankPlusIdentity,
    block_cg,
    log_det_quadrature,
    nystrom,
)
from net2gp.linalg.chance import by_rows, fixed_choice
from net2gp.linear.jacobians.capture import plan
from net2gp.linear.jacobians.passes import capacity, column_pullbacks, memory_budget, points_at_once
from net2gp.linear.linearized import Linearized, PriorVar, expand_prior
from net2gp.posteriors.weights.covariance import Covariance, normal
from net2gp.posteriors.weights.kron import factors
from net2gp.posteriors.weights.structure import Curvature, Solved, Structure, Traits, prior_vector
from net2gp.posteriors.weights.tasks.task import Task
from net2gp.progress import progress
from net2gp.tags import savable
from net2gp.types import Inputs

LANCZOS_STEPS = 16
"""Products of each probe of the determinant: the preconditioned spectrum is short."""


@savable("structures.Sampled")
@dataclass(frozen=True, eq=False)
class Sampled(Structure):
    """All of the precision, never formed: draws of the posterior, each of them a linear system.

    It is for networks and data where neither the (P, P) precision nor the (N·C, N·C) Gram matrix fits. Block
    conjugate gradients solve all systems together. An iteration is a forward-mode and a backward pass over
    the data for each draw, and the wider the prior, the more iterations there are. Prior and noise that are
    left open are chosen with the linear model of a regression, or with Kronecker factors.

    Args:
        num_samples: How many draws. Variances have a relative standard error of √(2/num_samples).
        tol: The relative residual at which the systems count as solved, below 1.
        max_iterations: The most iterations; a warning says so if the residual is then above `tol`.
        rank: How many of the largest eigenvalues of the curvature precondition the systems.
        num_points: How many points these eigenvalues are found from.
        num_probes: How many Lanczos runs estimate the determinant of the evidence; 0 leaves the evidence out.
        leave_out: For classes, the share of the curvature Σ_n tr Λ_n whose points are left out, those with
            the least first. A classifier is sure of most of its training points, which then say little.
        seed: The seed of all random numbers. It means the same draws on the same kind of device only.
        start: Draws to start from, (P, num_samples): the `covariance.draws` of a posterior with another prior
            or on other data. It saves iterations. None starts from zero.
        checkpoint: A path that the state is written to, from which a run that was killed goes on; None writes
            nothing.
        every_seconds: How often the state is written.

    Raises:
        InputError: an option is out of its range; the text says which, and what to pass.

    References: Papandreou, Yuille, Gaussian sampling by local perturbations, NeurIPS 2010; Antorán et al.,
    Sampling-based inference for large linear models, with application to linearised Laplace, ICLR 2023.
    """

    num_samples: int = 32
    tol: float = 1e-2
    max_iterations: int = 200
    rank: int = 100
    num_points: int = 2000
    num_probes: int = 8
    leave_out: float = 0.0
    seed: int = 0
    start: Tensor | None = field(default=None, repr=False)
    checkpoint: str | Path | None = None
    every_seconds: float = 60.0

    def __post_init__(self) -> None:
        check_count(self.num_samples, "num_samples", example=32)
        check_count(self.max_iterations, "max_iterations", example=200)
        check_count(self.rank, "rank", example=100)
        check_count(self.num_points, "num_points", example=2000)
        check_positive(self.tol, "tol")
        check_positive(self.every_seconds, "every_seconds", zero=True)
        check_positive(self.leave_out, "leave_out", zero=True)
        if self.leave_out >= 1:
            raise InputError(
                f"leave_out is a share below 1, but is {self.leave_out:g}. Try leave_out=0.001."
            )
        if self.tol >= 1:
            raise InputError(
                f"tol must be below 1, the residual of no solution at all, but is {self.tol:g}. Try tol=0.01."
            )
        if (
            isinstance(self.seed, bool)
            or not isinstance(self.seed, int)
            or not 0 <= self.seed < 2**62
        ):
            raise InputError(
                f"seed must be a whole number from 0, but is {self.seed!r}. Try seed=0."
            )
        if self.start is not None and not isinstance(self.start, Tensor):
            raise InputError(
                f"start must be a tensor, earlier.covariance.draws, but is {describe(self.start)}."
            )
        if self.checkpoint is not None and not isinstance(self.checkpoint, str | Path):
            raise InputError(f"checkpoint must be a path, but is {describe(self.checkpoint)}.")
        if self.num_probes == 1 or self.num_probes < 0:
            raise InputError(
                f"num_probes must be 0, or at least 2 to average over, but is {self.num_probes}."
            )

    def curvature(self, task: Task) -> SampledCurvature:
        """Nothing is computed yet, but what would stop a long solve is checked."""
        check_start(self, task.linearized.num_params)
        plan(task.linearized, task.few())
        if self.checkpoint is not None:
            Checkpoint(self.checkpoint).check_writable()
        return SampledCurvature(task, _without_least(task, self.leave_out), self)

    def traits(self) -> Traits:
        """All of the covariance, found by one long solve."""
        passes = self.max_iterations + LANCZOS_STEPS + 4
        return Traits(
            whole=True, all_weights=False, any_prior=False, solved_once=True, passes=passes
        )


def check_start(structure: Sampled, num_params: int) -> None:
    """Raise unless the draws to start from are as many and as long as those to be found."""
    start = structure.start
    if start is not None and start.shape != (num_params, structure.num_samples):
        raise InputError(
            f"start must be the draws of an earlier posterior, ({num_params}, {structure.num_samples}), but "
            f"has shape {tuple(start.shape)}. Pass start=earlier.covariance.draws and num_samples as then."
        )


def _without_least(task: Task, leave_out: float) -> Task:
    """The task without its points of least curvature, that together have the share `leave_out` of it."""
    if leave_out == 0:
        return task
    if has_gaussian_noise(task.likelihood):
        raise InputError(
            "leave_out is for classes, whose points a network may be sure of; with Gaussian noise all points "
            "have information. Pass Sampled(leave_out=0)."
        )
    task = task.whole("Sampled(leave_out=...)", "Sampled(leave_out=0)")
    traces = task.likelihood.curvature(task.f).diagonal(dim1=1, dim2=2).sum(1)
    order = traces.argsort()
    below = traces[order].cumsum(0) < leave_out * traces.sum()
    return task.at(order[~below].sort().values)


@dataclass(frozen=True, eq=False)
class SampledCurvature(Curvature):
    """Σ_n J_nᵀ Λ_n J_n by products; `used` has the points that are not left out."""

    used: Task
    structure: Sampled

    def solved(self, prior_var: PriorVar, scale: float) -> Solved:
        """The draws, the evidence if it is asked for, and tr H, which the right-hand sides estimate."""
        task, structure = self.task, self.structure
        prior = expand_prior(prior_var, task.params)
        precision = Precision(self.used, prior_vector(prior, task.params).sqrt(), scale)
        preconditioner = _sketch(precision, structure)
        right, trace = _right_hand_side(precision, structure)
        draws = precision.root[:, None] * _draws(precision, preconditioner, right, structure)
        evidence = None
        if structure.num_probes:
            log_det = _log_det(precision, preconditioner, structure)
            evidence = self.evidence(prior, task.noise(scale), scale, log_det)
        # what steered the solve is not part of its result
        kept = replace(structure, start=None, checkpoint=None)
        return Solved(DrawnCovariance(draws), evidence, kept, trace)

    def searched(self, *, per_layer: bool, literal: bool) -> Curvature:
        """Kronecker factors of all points."""
        return factors(self.task)


@dataclass(frozen=True, eq=False)
class Precision:
    """I + scale·V^{1/2} H V^{1/2}, the precision in units of the prior, by products: (P, P)."""

    task: Task
    root: Tensor  # V^{1/2}, (P,) in float64
    scale: float

    def matmul(self, v: Tensor) -> Tensor:
        """For v (P, k), a forward-mode and a backward pass per column."""
        return v + self.curvature(v)

    def curvature(self, v: Tensor, part: Tensor | None = None) -> Tensor:
        """scale·V^{1/2} H V^{1/2} v; estimated from the points `part`, if they are given."""
        task, root, share = self.task, self.root[:, None], 1.0
        if part is not None:
            task, share = task.at(part), task.sums.count / len(part)
        return self.scale * share * root * task.fisher_times(root * v)


def _sketch(precision: Precision, structure: Sampled) -> LowRankPlusIdentity:
    """The largest eigenvalues of the curvature of some points, as a preconditioner for all points."""
    like = precision.root
    generator = torch.Generator(like.device).manual_seed(structure.seed + 2)
    count = precision.task.sums.count
    part = fixed_choice(count, structure.num_points, structure.seed + 2).to(like.device)
    rank = min(structure.rank, len(like))
    with progress("preconditioner", None):
        found = nystrom(
            lambda v: precision.curvature(v, part),
            len(like),
            rank,
            generator=generator,
            device=like.device,
        )
    return LowRankPlusIdentity(*found)


def _draws(
    precision: Precision, preconditioner: LowRankPlusIdentity, right: Tensor, structure: Sampled
) -> Tensor:
    """Draws in units of the prior: (P, S), in float64."""
    checkpoint = None
    if structure.checkpoint is not None:
        key = _fingerprint(precision, structure)
        checkpoint = Checkpoint(structure.checkpoint, key, structure.every_seconds)
    start = None
    if structure.start is not None:
        start = structure.start.to(precision.root) / precision.root[:, None]
    with progress("draws", structure.max_iterations) as advance:
        solution = block_cg(
            precision.matmul,
            right,
            preconditioner=preconditioner,
            x0=start,
            tol=structure.tol,
            max_iterations=structure.max_iterations,
            on_step=lambda _, residual: advance(note=f"residual {residual:.1e}"),
            checkpoint=checkpoint,
        )
    return solution.x


def _right_hand_side(precision: Precision, structure: Sampled) -> tuple[Tensor, float]:
    """ε₀ + V^{1/2} Σ_n J_nᵀ R_n ε_n, (P, S), and ‖Σ_n J_nᵀ R_n ε_n‖² on average, which estimates tr H."""
    task, count = precision.task, structure.num_samples
    like = task.linearized.example
    # on the device itself: a CPU takes seconds for as many numbers as a large network needs
    generator = torch.Generator(like.device).manual_seed(structure.seed)
    randn = partial(torch.randn, generator=generator, dtype=torch.float64, device=like.device)
    first = randn(len(precision.root), count)
    total = torch.zeros_like(first)
    budget = capacity(task.linearized, task.few(), memory_budget(like.device))
    for piece in task.pieces("right-hand sides"):
        size = points_at_once(num_rows(piece.x), count, budget)
        for start in range(0, num_rows(piece.x), size):
            part = slice(start, start + size)
            f = piece.f[part].to(like.dtype)
            noise = _noise(piece, part, f, structure)
            pulled = column_pullbacks(task.linearized, rows(piece.x, part), noise.to(like), budget)
            total += pulled.double()
    trace = float(total.square().sum(0).mean())
    return first + precision.scale**0.5 * precision.root[:, None] * total, trace


def _noise(piece: Task, part: slice, f: Tensor, structure: Sampled) -> Tensor:
    """R_n ε_n of some points, (n·C, S), with ε that belong to the points, in whatever pieces they come."""
    before, likelihood = piece.among or (0, piece.likelihood)
    points = slice(before + part.start, before + part.start + len(f))

    def epsilon(width: int) -> Tensor:
        def draw(count: int, generator: torch.Generator) -> Tensor:
            shape, device = (count, width, structure.num_samples), generator.device
            return torch.randn(shape, generator=generator, dtype=torch.float64, device=device)

        numbers = width * structure.num_samples
        return by_rows(draw, points.start, len(f), structure.seed, f.device, width=numbers)

    own = bound_to(of_points(likelihood, points), piece.y[part])
    found = root_times(own, f, epsilon)
    return found.reshape(-1, structure.num_samples)


def _log_det(
    precision: Precision, preconditioner: LowRankPlusIdentity, structure: Sampled
) -> Tensor:
    """log|A| = log|M| + tr log(M^{−1/2} A M^{−1/2}), the second part by Lanczos quadrature."""
    half = preconditioner.inverse_sqrt
    with progress("determinant", None) as advance:

        def product(v: Tensor) -> Tensor:
            advance()
            return half(precision.matmul(half(v)))

        rest, _ = log_det_quadrature(
            product,
            len(precision.root),
            num_probes=structure.num_probes,
            rank=min(LANCZOS_STEPS, len(precision.root)),
            generator=torch.Generator(precision.root.device).manual_seed(structure.seed + 1),
            device=precision.root.device,
        )
    return preconditioner.log_det() + rest


def _fingerprint(precision: Precision, structure: Sampled) -> str:
    """Of everything that the draws depend on."""
    task, digest = precision.task, hashlib.sha256()
    numbers = structure.num_samples, structure.seed, structure.tol, structure.rank
    digest.update(repr((numbers, structure.num_points, precision.scale, task.likelihood)).encode())
    # the text of a long tensor leaves most of it out
    own = [value for value in vars(task.likelihood).values() if isinstance(value, Tensor)]
    # the outputs too: what they depend on beside the chosen parameters is in the network's code and buffers
    for value in [*task.params.values(), precision.root, *own]:
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    for content in task.contents():
        digest.update(content)
    return digest.hexdigest()


@savable("drawn.DrawnCovariance")
@dataclass(frozen=True, eq=False)
class DrawnCovariance(Covariance):
    """Σ = W Wᵀ / S with S independent draws of θ − θ* as the columns of W (P, S).

    An unbiased estimate of the covariance that they were drawn from: variances have a relative standard
    error of √(2/S). Predictions take S forward-mode passes, and never a Jacobian.
    """

    draws: Tensor

    def pushed(self, linearized: Linearized, x: Inputs) -> Tensor:
        """J(x) W / √S: (N, C, S)."""
        count = self.draws.shape[1]
        root = self.draws.to(linearized.example.dtype) / count**0.5
        return linearized.kernel().apply(x, root).reshape(num_rows(x), -1, count)

    def blocks(self, linearized: Linearized, x: Inputs) -> Tensor:
        """J_n Σ J_nᵀ for each point: (N, C, C)."""
        root = self.pushed(linearized, x)
        return root @ root.mT

    def variances(self, linearized: Linearized, x: Inputs) -> Tensor:
        """The diagonals of the blocks: (N, C)."""
        return self.pushed(linearized, x).square().sum(-1)

    def joint(self, linearized: Linearized, x: Inputs) -> Tensor:
        """J Σ Jᵀ over all points: (N·C, N·C), in float64."""
        root = self.pushed(linearized, x).flatten(0, 1).double()
        return root @ root.mT

    def columns(self, num_draws: int) -> Tensor:
        """W / √S of all draws, whatever their number."""
        return self.draws / self.draws.shape[1] ** 0.5

    def draw(self, num_samples: int, generator: torch.Generator | None) -> Tensor:
        """Draws of N(0, Σ), as random combinations W z / √S of the stored ones: (P, num_samples)."""
        count = self.draws.shape[1]
        return self.draws @ normal(self.draws[0], num_samples, generator) / count**0.5
