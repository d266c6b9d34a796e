"""Non-Gaussian likelihoods: the sites of Laplace's method and of variational inference."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from net2gp.errors import NotConverged
from net2gp.likelihoods import expected_derivatives
from net2gp.posteriors.solvers import Inference, Variational
from net2gp.posteriors.systems import MatrixFreeSystem, Sites, State, System
from net2gp.progress import progress
from net2gp.types import Likelihood


@dataclass(frozen=True, eq=False)
class Inferred:
    """The sites that inference found, the posterior at the training points, and the evidence."""

    sites: Sites
    state: State
    evidence: Tensor


def infer(
    system: System,
    likelihood: Likelihood,
    mean: Tensor,
    y: Tensor,
    inference: Inference,
    start: Tensor | None = None,
) -> Inferred:
    """Combine the prior of `system` around `mean` (N, C) with the likelihood of `y`.

    `start` is a first guess of f − mean at the training points, from an earlier posterior.
    """
    mode = _newton(system, likelihood, mean, y, inference, start)
    if isinstance(inference, Variational):
        return _variational(system, likelihood, mean, y, inference, mode)
    return Inferred(*mode, _laplace_evidence(system, likelihood, mean, y, mode[1]))


def _newton(
    system: System,
    likelihood: Likelihood,
    mean: Tensor,
    y: Tensor,
    inference: Inference,
    start: Tensor | None,
) -> tuple[Sites, State]:
    """The mode of log p(y | f) − ½ fᵀK⁻¹f, and the sites there.

    Each step solves with the current residual and curvature; it is halved until the objective rises,
    which also makes Gauss–Newton curvature (heteroscedastic likelihoods) safe.
    """
    with torch.no_grad(), progress("Newton", None) as advance:
        f = torch.zeros_like(mean) if start is None else start
        state: State | None = None
        value = torch.tensor(-torch.inf, dtype=mean.dtype, device=mean.device)
        for _ in range(inference.max_iterations):
            target = system.solve(_sites(likelihood, mean, y, f))
            moved, new_value = _line_search(system, likelihood, mean, y, state, target, value)
            change = (moved.f - f).abs().max() / (1.0 + f.abs().max())
            state, f, value = moved, moved.f, new_value
            advance(note=f"change {float(change):.1e}")
            if change <= inference.tol:
                break
        else:
            warnings.warn(
                f"Newton's method stopped after {inference.max_iterations} iterations with a relative "
                f"change of {float(change):.1e} above tol = {inference.tol:.1e}. "
                "Pass inference=Laplace(max_iterations=...), or a smaller prior_var.",
                NotConverged,
                stacklevel=4,
            )
        sites = _sites(likelihood, mean, y, f)
        return sites, system.solve(sites)


def _sites(likelihood: Likelihood, mean: Tensor, y: Tensor, f: Tensor) -> Sites:
    """The second-order expansion of log p(y | mean + f), around f."""
    curvature = likelihood.curvature(mean + f)
    natural = (curvature @ f[..., None])[..., 0] + likelihood.residual(mean + f, y)
    return Sites(natural, curvature)


def _line_search(
    system: System,
    likelihood: Likelihood,
    mean: Tensor,
    y: Tensor,
    state: State | None,
    target: State,
    value: Tensor,
) -> tuple[State, Tensor]:
    """The farthest point on the way to `target`, halving, whose objective is no worse than `value`."""
    step = 1.0
    while True:
        moved = target if state is None or step == 1.0 else _between(system, state, target, step)
        new = likelihood.log_prob(mean + moved.f, y).sum() - 0.5 * moved.quadratic
        slack = 1e-12 * (1.0 + value.abs())
        if state is None or bool(new >= value - slack) or step < 1e-6:
            return moved, new
        step /= 2


def _between(system: System, state: State, target: State, step: float) -> State:
    f = torch.lerp(state.f, target.f, step)
    dual = torch.lerp(state.dual, target.dual, step)
    return State(f, dual, system.quadratic(f, dual), target.log_det, target.factor)


def _laplace_evidence(
    system: System, likelihood: Likelihood, mean: Tensor, y: Tensor, mode: State
) -> Tensor:
    """log p(y | f̂) − ½ f̂ᵀK⁻¹f̂ − ½ log|I + ΛK|, differentiable in the prior.

    The mode moves with the prior. One more Newton step from the (constant) mode moves the same way to
    first order, since the derivative of a Newton step by its start vanishes at a fixed point.
    """
    if isinstance(system, MatrixFreeSystem):
        log_det = system.estimate_log_det(mode.factor)  # type: ignore[arg-type]
        return likelihood.log_prob(mean + mode.f, y).sum() - 0.5 * (mode.quadratic + log_det)
    if not torch.is_grad_enabled() or not _needs_gradient(system):
        return likelihood.log_prob(mean + mode.f, y).sum() - 0.5 * (mode.quadratic + mode.log_det)
    moved = system.solve(_sites(likelihood, mean, y, mode.f.detach()))
    log_det = system.log_det(likelihood.curvature(mean + moved.f))
    return likelihood.log_prob(mean + moved.f, y).sum() - 0.5 * (moved.quadratic + log_det)


def _needs_gradient(system: System) -> bool:
    return any(isinstance(v, Tensor) and v.requires_grad for v in vars(system).values())


def _variational(
    system: System,
    likelihood: Likelihood,
    mean: Tensor,
    y: Tensor,
    inference: Variational,
    mode: tuple[Sites, State],
) -> Inferred:
    """Natural-gradient steps on the evidence lower bound, started at the Laplace approximation.

    A step of size one replaces each site by the expected residual and curvature under q; smaller
    steps interpolate the natural parameters, and are taken when the bound would fall.
    """
    sites, state = mode
    with torch.no_grad(), progress("variational inference", inference.max_iterations) as advance:
        bound, target = _bound_and_target(system, likelihood, mean, y, sites, state)
        step = 1.0
        for _ in range(inference.max_iterations):
            candidate = Sites(
                torch.lerp(sites.natural, target.natural, step),
                torch.lerp(sites.curvature, target.curvature, step),
            )
            new_state = system.solve(candidate)
            new_bound, new_target = _bound_and_target(
                system, likelihood, mean, y, candidate, new_state
            )
            if new_bound < bound - 1e-9 * (1 + bound.abs()) and step > 1e-4:
                step /= 2
                continue
            change = (new_state.f - state.f).abs().max() / (1 + state.f.abs().max())
            gain = (new_bound - bound).abs() / (1 + bound.abs())
            sites, state, bound, target = candidate, new_state, new_bound, new_target
            advance(note=f"bound {float(bound):.4f}")
            if gain <= inference.tol and change <= inference.tol**0.5:
                break
        else:
            warnings.warn(
                f"variational inference stopped after {inference.max_iterations} iterations at a bound "
                f"of {float(bound):.6g} that still changes. Pass Variational(max_iterations=...).",
                NotConverged,
                stacklevel=4,
            )
    if _needs_gradient(system) and torch.is_grad_enabled():
        # the bound is stationary in the sites, so the gradient holds them fixed
        bound, _ = _bound_and_target(system, likelihood, mean, y, sites, system.solve(sites))
    return Inferred(sites, state, bound)


def _bound_and_target(
    system: System, likelihood: Likelihood, mean: Tensor, y: Tensor, sites: Sites, state: State
) -> tuple[Tensor, Sites]:
    """The bound E log p(y | f) − KL(q ‖ prior), and the sites that a full natural-gradient step gives.

    KL = ½ [fᵀK⁻¹f − tr(ΛV) + log|I + ΛK|] for q = N(f, V) with V⁻¹ = K⁻¹ + Λ.
    """
    V = system.covariances(state)
    expected = expected_derivatives(likelihood, mean + state.f, V, y)
    divergence = 0.5 * (state.quadratic - (sites.curvature * V).sum() + state.log_det)
    natural = (expected.curvature @ state.f[..., None])[..., 0] + expected.residual
    return expected.log_prob.sum() - divergence, Sites(natural, expected.curvature)
