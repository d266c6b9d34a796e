"""Laplace's approximation with all parameters and all points, where no matrix of either size fits.

Draws of N(0, A⁻¹), A = V⁻¹ + Σ_n J_nᵀ Λ_n J_n, are solutions of linear systems: with Λ_n = R_n R_nᵀ and
standard normal ε₀, ε_n, the solution of A w = V^{−1/2} ε₀ + Σ_n J_nᵀ R_n ε_n has that law. Each product with
A is a forward-mode and a backward pass over the data; a sketch of the curvature of some points preconditions.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from net2gp.errors import InputError
from net2gp.inputs import num_rows, rows, tensors
from net2gp.likelihoods.traits import has_gaussian_noise, has_open_link, of_points
from net2gp.linalg import (
    Checkpoint,
    LowRankPlusIdentity,
    block_cg,
    log_det_quadrature,
    nystrom,
)
from net2gp.linear.curvatures.curvature import ExactFisher
from net2gp.linear.curvatures.ggn import GaussNewton
from net2gp.linear.jacobians.capture import plan
from net2gp.linear.jacobians.passes import capacity, column_pullbacks, memory_budget, points_at_once
from net2gp.linear.linearized import PriorVar, expand_prior
from net2gp.methods.laplace_approximation.choosing import tuned
from net2gp.methods.laplace_approximation.functions import by_factors, no_determinant
from net2gp.methods.laplace_approximation.matching import match_link, some_points
from net2gp.methods.laplace_approximation.regression import is_regression
from net2gp.methods.laplace_approximation.tuning import (
    Evidence,
    Matched,
    Task,
    Tuned,
    Tuning,
    Validation,
)
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.recipes.around_network import ByLaplace, around_network
from net2gp.posteriors.weights.drawn import DrawnCovariance
from net2gp.posteriors.weights.precision import prior_vector
from net2gp.posteriors.weights.structures import Sampled
from net2gp.progress import progress

LANCZOS_STEPS = 16
"""Products of each probe of the determinant: the preconditioned spectrum is short."""


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
        x, likelihood, root = self.task.x, self.task.likelihood, self.root[:, None]
        share = 1.0
        if part is not None:
            share = num_rows(x) / len(part)
            x, likelihood = rows(x, part), of_points(likelihood, part)
        fisher = GaussNewton(self.task.linearized, x, likelihood)
        return self.scale * share * root * fisher.matmul(root * v)


def sampled(
    task: Task, prior_var: PriorVar | None, tuning: Tuning | None, temperature: float
) -> tuple[Posterior, float]:
    """The posterior by draws, and tr H; what is open is chosen with Kronecker factors of all the data.

    References: Papandreou, Yuille, Gaussian sampling by local perturbations, NeurIPS 2010; Antorán et al.,
    Sampling-based inference for large linear models, with application to linearised Laplace, ICLR 2023.
    """
    structure = task.structure
    assert isinstance(structure, Sampled)
    check_start(structure, task.linearized.num_params)
    plan(task.linearized, task.x)
    if structure.checkpoint is not None:
        Checkpoint(structure.checkpoint).check_writable()
    found = _chosen(task, prior_var, tuning, temperature)
    prior = expand_prior(found.prior_var, task.params)
    told = _with_say(task, structure.leave_out)
    precision = Precision(told, prior_vector(prior, task.params).sqrt(), found.scale)
    preconditioner = _sketch(precision, structure)
    right, size = _right_hand_side(precision, structure)
    draws = precision.root[:, None] * _draws(precision, preconditioner, right, structure)
    evidence = None
    if structure.num_probes:
        distance = sum(
            (value.double().square() / prior[name].double()).sum()
            for name, value in task.params.items()
        )
        noise = getattr(found.likelihood, "noise_var", None) if task.open_noise else None
        fit = task.log_likelihood(
            None if noise is None else torch.as_tensor(noise, dtype=torch.float64)
        )
        evidence = fit - 0.5 * distance - 0.5 * _log_det(precision, preconditioner, structure)
    # what steered the solve is not part of its result
    recipe = ByLaplace(temperature, replace(structure, start=None, checkpoint=None))
    posterior = around_network(
        task.linearized,
        DrawnCovariance(draws),
        found.prior_var,
        found.likelihood,
        (task.x, task.y),
        evidence=evidence,
        recipe=recipe,
    )
    if isinstance(tuning, Matched | None) and has_open_link(task.likelihood):
        x = some_points(task.x, (tuning or Matched()).count(task.f.shape[1]))
        posterior = match_link(posterior, x)
    return posterior, size * temperature


def _with_say(task: Task, leave_out: float) -> Task:
    """The task without its points of least curvature, that together have the share `leave_out` of it."""
    if leave_out == 0:
        return task
    if has_gaussian_noise(task.likelihood):
        raise InputError(
            "leave_out is for classes, of which a network may be sure; with Gaussian noise every point has "
            "its say. Pass Sampled(leave_out=0)."
        )
    traces = task.likelihood.curvature(task.f).diagonal(dim1=1, dim2=2).sum(1)
    order = traces.argsort()
    below = traces[order].cumsum(0) < leave_out * traces.sum()
    part = order[~below].sort().values
    likelihood = of_points(task.likelihood, part)
    return replace(
        task, x=rows(task.x, part), y=task.y[part], f=task.f[part], likelihood=likelihood
    )


def _chosen(
    task: Task, prior_var: PriorVar | None, tuning: Tuning | None, temperature: float
) -> Tuned:
    """Prior and noise: as given, of the linear model, or by Kronecker factors (the diagonal without them)."""
    if prior_var is not None and not task.open_noise and not isinstance(tuning, Validation):
        nothing = torch.full((), float("nan"), dtype=torch.float64)
        return Tuned(prior_var, task.likelihood, 1.0 / temperature, nothing)
    if isinstance(tuning, Matched | None) and is_regression(task):
        return tuned(task, no_determinant, None, prior_var, tuning, temperature)
    # the link is matched with the draws, afterwards
    by = Evidence() if isinstance(tuning, Matched | None) else tuning
    return tuned(task, *by_factors(task), prior_var, by, temperature)


def _sketch(precision: Precision, structure: Sampled) -> LowRankPlusIdentity:
    """The largest eigenvalues of the curvature of some points, as a preconditioner for that of all."""
    count, like = num_rows(precision.task.x), precision.root
    generator = torch.Generator(like.device).manual_seed(structure.seed + 2)
    part = torch.randperm(count, generator=generator, device=like.device)
    part = part[: structure.num_points].sort().values
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
    normal = partial(torch.randn, generator=generator, dtype=torch.float64, device=like.device)
    first = normal(len(precision.root), count)
    total = torch.zeros_like(first)
    budget = capacity(task.linearized, task.x, memory_budget(like.device))
    size = points_at_once(num_rows(task.x), count, budget)
    for start in range(0, num_rows(task.x), size):
        part = slice(start, start + size)
        f = task.f[part].to(like.dtype)
        R = ExactFisher().root(task.likelihood, f, task.y[part], start)
        noise = normal(len(f), R.shape[2], count)
        noise = (R @ noise.to(like)).reshape(-1, count)
        pulled = column_pullbacks(task.linearized, rows(task.x, part), noise.to(like), budget)
        total += pulled.double()
    trace = float(total.square().sum(0).mean())
    right = first + precision.scale**0.5 * precision.root[:, None] * total
    return right, trace * precision.scale


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
    for value in [*task.params.values(), *tensors(task.x), task.y, task.f, precision.root, *own]:
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def check_start(structure: Sampled, num_params: int) -> None:
    """Raise unless the draws to start from are as many and as long as those to be found."""
    start = structure.start
    if start is not None and start.shape != (num_params, structure.num_samples):
        raise InputError(
            f"start must be the draws of an earlier posterior, ({num_params}, {structure.num_samples}), but "
            f"has shape {tuple(start.shape)}. Pass start=earlier.covariance.draws and num_samples as then."
        )
