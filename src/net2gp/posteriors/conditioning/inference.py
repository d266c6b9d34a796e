"""Inference with non-Gaussian likelihoods: Gaussian sites by Laplace's method or variationally."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from net2gp.errors import NotConverged, warn
from net2gp.likelihoods.expectations import expected_derivatives
from net2gp.likelihoods.traits import is_canonical, negative_hessian
from net2gp.linalg import psd_root
from net2gp.posteriors.conditioning.solvers import Inference, Variational
from net2gp.posteriors.conditioning.systems import MatrixFreeSystem, Sites, State, System
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
    if isinstance(inference, Variational):
        return _variational(system, likelihood, mean, y, inference, start)
    mode = _newton(system, likelihood, mean, y, inference, start)
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

    Each step solves with the current residual and curvature, and is halved until the objective rises. If the
    curvature is not the Hessian (the likelihood is not canonical), such steps are safe but slow, so the step
    with the Hessian is tried as well and taken if it leads higher.
    """
    tol = inference.tol
    if isinstance(system, MatrixFreeSystem):
        # Conjugate gradients are no more accurate than their own tolerance: below it, f never stops changing.
        tol = max(tol, system.tol)
    canonical = is_canonical(likelihood, mean, y)
    with torch.no_grad(), progress("Newton", None) as advance:
        f = torch.zeros_like(mean) if start is None else start
        state: State | None = None
        for _ in range(inference.max_iterations):
            target = system.solve(_sites(likelihood, mean, y, f), near=f)
            if state is None:
                # The line search starts at f = 0 even if `start` is given: only the solution `target` has a
                # dual vector, which interpolation needs, and f = 0 has the dual vector 0.
                state = _nothing(target)
                value = likelihood.log_prob(mean, y).sum()
            moved, new_value = _line_search(system, likelihood, mean, y, state, target, value)
            if not canonical:
                step = system.step(_sites(likelihood, mean, y, f, hessian=True))
                moved, new_value = _better(likelihood, mean, y, step, (moved, new_value))
            change = (moved.f - f).abs().max() / (1.0 + f.abs().max())
            state, f, value = moved, moved.f, new_value
            advance(note=f"change {float(change):.1e}")
            if change <= tol:
                break
        else:
            warn(
                f"Newton's method stopped after {inference.max_iterations} iterations with a relative "
                f"change of {float(change):.1e} above tol = {tol:.1e}. "
                "Pass inference=Laplace(max_iterations=...), or a smaller prior_var.",
                NotConverged,
            )
        sites = _sites(likelihood, mean, y, f)
        return sites, system.solve(sites, near=f)


def _nothing(like: State) -> State:
    """The state f = 0, the mean of the prior."""
    zero = torch.zeros_like(like.quadratic)
    return replace(like, f=0 * like.f, dual=0 * like.dual, quadratic=zero)


def _sites(
    likelihood: Likelihood, mean: Tensor, y: Tensor, f: Tensor, *, hessian: bool = False
) -> Sites:
    """The second-order expansion of log p(y | mean + f), around f."""
    curvature = (
        negative_hessian(likelihood, mean + f, y) if hessian else likelihood.curvature(mean + f)
    )
    natural = (curvature @ f[..., None])[..., 0] + likelihood.residual(mean + f, y)
    return Sites(natural, curvature)


def _better(
    likelihood: Likelihood, mean: Tensor, y: Tensor, state: State | None, best: tuple[State, Tensor]
) -> tuple[State, Tensor]:
    """`state` and its objective if it is higher than the best so far, else the best."""
    if state is None:
        return best
    value = likelihood.log_prob(mean + state.f, y).sum() - 0.5 * state.quadratic
    return (state, value) if bool(value > best[1]) else best


def _line_search(
    system: System,
    likelihood: Likelihood,
    mean: Tensor,
    y: Tensor,
    state: State,
    target: State,
    value: Tensor,
) -> tuple[State, Tensor]:
    """The first point on the way back from `target` to `state`, by halving, that is no worse than `value`."""
    step = 1.0
    while True:
        moved = target if step == 1.0 else _between(system, state, target, step)
        new = likelihood.log_prob(mean + moved.f, y).sum() - 0.5 * moved.quadratic
        # At convergence the objective changes by rounding alone, which must not count as a fall.
        slack = 1e-12 * (1.0 + value.abs())
        if bool(new >= value - slack) or step < 1e-6:
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

    The mode moves with the prior. One more Newton step from the (constant) mode moves in the same way to
    first order, since the derivative of a Newton step with respect to its start vanishes at a fixed point.
    This holds for steps with the Hessian only, so the Hessian is used even if the curvature differs from it.
    """
    if isinstance(system, MatrixFreeSystem):
        log_det = system.estimate_log_det(mode.factor)  # type: ignore[arg-type]
        return likelihood.log_prob(mean + mode.f, y).sum() - 0.5 * (mode.quadratic + log_det)
    if not torch.is_grad_enabled() or not _needs_gradient(system):
        return likelihood.log_prob(mean + mode.f, y).sum() - 0.5 * (mode.quadratic + mode.log_det)
    at_mode = mode.f.detach()
    hessian = not is_canonical(likelihood, mean + at_mode, y)
    moved = system.step(_sites(likelihood, mean, y, at_mode, hessian=hessian))
    assert moved is not None
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
    start: Tensor | None,
) -> Inferred:
    """The sites of the largest evidence lower bound."""
    canonical = is_canonical(likelihood, mean, y)
    with torch.no_grad():
        if canonical:
            sites, _ = _newton(system, likelihood, mean, y, inference, start)
        else:
            # The mode may be a spike with little mass, such as a scale of zero, so it is no start here.
            sites = _sites(likelihood, mean, y, torch.zeros_like(mean) if start is None else start)
        sites, converged = _natural_steps(system, likelihood, mean, y, inference, sites)
    if not canonical:
        sites, converged = _ascend(system, likelihood, mean, y, inference, sites)
    if not converged:
        warn(
            f"variational inference stopped after {inference.max_iterations} iterations at a bound that "
            "still changes. Pass Variational(max_iterations=...).",
            NotConverged,
        )
    with torch.no_grad():
        state = system.solve(sites)
    # The bound is stationary in the sites, so they count as constants in its gradient with respect to the
    # prior.
    moved = system.solve(sites) if torch.is_grad_enabled() and _needs_gradient(system) else state
    return Inferred(sites, state, _bound_and_target(system, likelihood, mean, y, sites, moved)[0])


def _natural_steps(
    system: System,
    likelihood: Likelihood,
    mean: Tensor,
    y: Tensor,
    inference: Variational,
    sites: Sites,
) -> tuple[Sites, bool]:
    """Natural-gradient steps on the bound: the sites, and whether the bound has stopped changing.

    A step of size one replaces each site by the expected residual and curvature under q. Smaller steps
    interpolate the natural parameters, and are taken if the bound would fall.
    """
    state = system.solve(sites)
    bound, target = _bound_and_target(system, likelihood, mean, y, sites, state)
    step = 1.0
    with progress("variational inference", inference.max_iterations) as advance:
        for _ in range(inference.max_iterations):
            natural = torch.lerp(sites.natural, target.natural, step)
            trial = Sites(natural, torch.lerp(sites.curvature, target.curvature, step))
            new_state = system.solve(trial)
            new_bound, new_target = _bound_and_target(system, likelihood, mean, y, trial, new_state)
            # Written with `not`, so that a bound that is NaN counts as a fall.
            if not new_bound >= bound - 1e-13 * (1 + bound.abs()):
                step /= 2
                if step < 1e-4:  # no step raises the bound, so it is at its maximum up to rounding
                    return sites, True
                continue
            change = (new_state.f - state.f).abs().max() / (1 + state.f.abs().max())
            gain = (new_bound - bound).abs() / (1 + bound.abs())
            sites, state, bound, target = trial, new_state, new_bound, new_target
            advance(note=f"bound {float(bound):.4f}")
            # The bound is quadratic around its maximum, so a gain of tol means a change of √tol.
            if gain <= inference.tol and change <= inference.tol**0.5:
                return sites, True
    return sites, False


def _ascend(
    system: System,
    likelihood: Likelihood,
    mean: Tensor,
    y: Tensor,
    inference: Variational,
    sites: Sites,
) -> tuple[Sites, bool]:
    """L-BFGS on the bound over b and S with Λ = SSᵀ, for likelihoods whose curvature is not the Hessian.

    For these the expected curvature is not the derivative of the bound, so natural-gradient steps stop beside
    its maximum. The expected Hessian would be the derivative, but it may be indefinite, and then no S exists.
    """
    N, C = sites.natural.shape
    with torch.no_grad():
        # The search is far better conditioned in units of the posterior's deviations at each point.
        V = system.covariances(system.solve(sites))
        unit = psd_root(V + 1e-10 * V.diagonal(dim1=1, dim2=2).mean() * torch.eye(C).to(V))
        start = torch.cat([unit @ sites.natural[..., None], unit @ psd_root(sites.curvature)], -1)
        unit = torch.linalg.inv(unit)

    def unpack(point: Tensor) -> Sites:
        values = unit @ point.reshape(N, C, 1 + C)
        S = values[..., 1:]
        return Sites(values[..., 0], S @ S.mT, S)

    def objective(values: np.ndarray) -> tuple[float, np.ndarray]:
        with torch.enable_grad():
            point = torch.as_tensor(values, device=mean.device).requires_grad_()
            trial = unpack(point)
            state = fixed.solve(trial)
            bound = _bound_and_target(fixed, likelihood, mean, y, trial, state)[0]
            (gradient,) = torch.autograd.grad(bound, point)
        return -float(bound.detach()), -gradient.cpu().numpy()

    fixed = replace(system, **{k: v.detach() for k, v in vars(system).items()})  # type: ignore[type-var]
    options = {
        "maxiter": 10 * inference.max_iterations,
        "ftol": 0.1 * inference.tol,
        "gtol": 0.0,
        "maxcor": 40,
    }
    found = minimize(
        objective, start.reshape(-1).cpu().numpy(), jac=True, method="L-BFGS-B", options=options
    )
    best = unpack(torch.as_tensor(found.x, device=mean.device))
    return Sites(best.natural, best.curvature), found.nit < options["maxiter"]


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
