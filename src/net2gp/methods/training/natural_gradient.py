"""Natural-gradient variational inference with a diagonal Gaussian: the steps, as pure functions.

The steps act elementwise on tensors of one shape, and states are tuples of tensors, so that
`torch.func.vmap` can run many at once. The second half of the file has the evidence of the Gaussian process
that each step corresponds to.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from net2gp.errors import InputError, check_positive
from net2gp.inputs import describe, map_inputs
from net2gp.linalg import cholesky
from net2gp.linear.linearized import Linearized, PriorVar, expand_prior
from net2gp.memory import check_memory
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.weights.diagonal import DiagonalCovariance
from net2gp.types import Params


class GaussianPrior(NamedTuple):
    """The prior θ ~ N(mean, 1/precision), with independent entries.

    Args:
        mean: The means μ₀.
        precision: The inverses δ of the variances.
    """

    mean: Tensor
    precision: Tensor


class NaturalState(NamedTuple):
    """The Gaussian q(θ) = N(mean, 1/precision), and the running average of gradients.

    Args:
        mean: The means μ.
        precision: The inverses s of the variances.
        momentum: The running average m of gradients, which starts at zero.
    """

    mean: Tensor
    precision: Tensor
    momentum: Tensor


def draw(mean: Tensor, precision: Tensor, noise: Tensor) -> Tensor:
    """θ = μ + ε/√s for standard normal noise ε.

    >>> draw(torch.tensor(1.0), torch.tensor(4.0), torch.tensor(-1.0))
    tensor(0.5000)
    """
    return mean + noise * precision.rsqrt()


def natural_step(
    state: NaturalState,
    gradient: Tensor,
    curvature: Tensor,
    prior: GaussianPrior,
    *,
    learning_rate: float | Tensor,
    decays: tuple[float, float],
) -> NaturalState:
    """Take one step of natural-gradient descent on KL(q ‖ posterior), for the prior N(μ₀, 1/δ):

        s ← β₂ s + (1 − β₂)(h + δ),   m ← β₁ m + (1 − β₁) g,   μ ← μ − η (m + δ(μ − μ₀)) / s.

    A step with η = 1 − β₂ and β₁ = 0 is the natural gradient itself: q ← q^β₂ (p₀ e^{−ℓ})^{1−β₂} with the
    loss ℓ replaced by its second-order expansion. At a fixed point s = E h + δ and E g + δ(μ − μ₀) = 0, which
    is the mean-field optimum if h is the Hessian. The average m starts at zero without a correction, so the
    first steps are short; the fixed point is the same.

    Args:
        state: The Gaussian q and the average of gradients before the step.
        gradient: An estimate g of E_q ∇(−log p(y | θ)), summed over all N points.
        curvature: An estimate h of the diagonal of E_q ∇²(−log p(y | θ)), summed over all N points.
        prior: The prior N(μ₀, 1/δ).
        learning_rate: The rate η.
        decays: The numbers β₁ and β₂, from 0 to 1.

    Returns:
        The state after the step.

    Reference: Khan et al., Fast and scalable Bayesian deep learning by weight-perturbation in Adam,
    ICML 2018; Khan et al., Approximate inference turns deep networks into Gaussian processes, NeurIPS 2019.

    >>> state = NaturalState(torch.tensor(0.0), torch.tensor(2.0), torch.tensor(0.0))
    >>> prior = GaussianPrior(torch.tensor(0.0), torch.tensor(1.0))
    >>> rates = {"learning_rate": 1.0, "decays": (0.0, 0.5)}
    >>> natural_step(state, torch.tensor(-6.0), torch.tensor(3.0), prior, **rates)
    NaturalState(mean=tensor(2.), precision=tensor(3.), momentum=tensor(-6.))
    """
    slow, slower = decays
    precision = slower * state.precision + (1 - slower) * (curvature + prior.precision)
    momentum = slow * state.momentum + (1 - slow) * gradient
    pull = prior.precision * (state.mean - prior.mean)
    return NaturalState(
        state.mean - learning_rate * (momentum + pull) / precision, precision, momentum
    )


class NewtonState(NamedTuple):
    """The Gaussian q(θ) = N(mean, 1/(λ(hessian + δ))), the average of gradients, and the number of steps.

    Args:
        mean: The means μ.
        hessian: The average h of Hessian diagonals of the mean loss.
        momentum: The running average g of gradients, which starts at zero.
        step: The number of steps that were taken.
    """

    mean: Tensor
    hessian: Tensor
    momentum: Tensor
    step: Tensor


def newton_step(
    state: NewtonState,
    gradient: Tensor,
    hessian: Tensor,
    decay: Tensor,
    *,
    learning_rate: float | Tensor,
    decays: tuple[float, float],
    clip: float = float("inf"),
) -> NewtonState:
    """Take one step of IVON, the improved variational online Newton method:

        g ← β₁ g + (1 − β₁) ĝ,
        h ← β₂ h + (1 − β₂) ĥ + ½ (1 − β₂)² (h − ĥ)² / (h + δ),
        μ ← μ − η (g/(1 − β₁ᵗ) + δ μ) / (h + δ), where the change before η is clipped to ±clip.

    ĥ may be negative. The last term of h comes from moving along geodesics of the positive numbers, and keeps
    h + δ positive: it becomes ½(h + δ)(1 + (1 − x)²) for x = (1 − β₂)(h − ĥ)/(h + δ).

    Args:
        state: The Gaussian q, the average of gradients and the number of steps before the step.
        gradient: The gradient ĝ = ∇ℓ̄(θ) of the mean loss at a draw θ from q.
        hessian: The estimate ĥ = ĝ (θ − μ)/σ², whose mean over draws is E_q ∇²ℓ̄ (Stein's identity).
        decay: The number δ = 1/(λ · prior_var), for λ = N data points.
        learning_rate: The rate η.
        decays: The numbers β₁ and β₂, from 0 to 1.
        clip: The largest change of a mean before it is multiplied by η.

    Returns:
        The state after the step.

    Reference: Shen et al., Variational learning is effective for large deep networks, ICML 2024; Lin et al.,
    Handling the positive-definite constraint in the Bayesian learning rule, ICML 2020.
    """
    slow, slower = decays
    step = state.step + 1
    momentum = slow * state.momentum + (1 - slow) * gradient
    gap = state.hessian - hessian
    correction = 0.5 * (1 - slower) ** 2 * gap.square() / (state.hessian + decay)
    curved = state.hessian - (1 - slower) * gap + correction
    pull = momentum / (1 - slow**step) + decay * state.mean
    move = (pull / (curved + decay)).clamp(-clip, clip)
    return NewtonState(state.mean - learning_rate * move, curved, momentum, step)


def divergence(mean: Tensor, precision: Tensor, prior: GaussianPrior) -> Tensor:
    """The divergence KL(N(μ, 1/s) ‖ N(μ₀, 1/δ)) = ½ Σ [δ/s − 1 − log(δ/s) + δ(μ − μ₀)²], a number.

    >>> divergence(torch.zeros(2), torch.ones(2), GaussianPrior(torch.zeros(2), torch.ones(2)))
    tensor(0.)
    """
    ratio = prior.precision / precision
    distance = prior.precision * (mean - prior.mean).square()
    return 0.5 * (ratio - 1 - ratio.log() + distance).sum()


def converged_evidence(posterior: Posterior, *, weights: Params | None = None) -> Tensor:
    """Return log N(ỹ | 0, J diag(prior_var) Jᵀ + Λ⁻¹), the evidence of the linear model after training.

    With J the Jacobian and Λ the likelihood's curvature at the mean μ of q, and r = ∇_f log p(y | f), the
    transformed data are ỹ = Jμ + Λ⁻¹r. The variances of q play no role. For softmax Λ is singular, and the
    density is restricted to the directions of ỹ in its range. Computed in float64; cost O((N·C)³).

    Args:
        posterior: A posterior from `VOGN`, `VOGGN`, `OGGN`, `IVON` or `laplace`, with its data.
        weights: Parameters by name at which J, Λ and r are taken in place of μ, for instance a draw from q,
            where the steps of variational inference take them. None is μ.

    Returns:
        The evidence, a float64 scalar.

    Reference: Khan et al., Approximate inference turns deep networks into Gaussian processes, NeurIPS 2019.
    """
    linearized = posterior.linearized.to(dtype=torch.float64)
    prior = flat_prior(linearized, posterior.prior_var, None)
    return _transformed_density(posterior, prior, 1.0, weights)


def iteration_evidence(
    posterior: Posterior,
    *,
    rate: float,
    prior_mean: Params | None = None,
    weights: Params | None = None,
) -> Tensor:
    """Return log N(ỹ | J m, J S Jᵀ + Λ⁻¹/rate), the evidence of one step of inference from q = N(μ, 1/s).

    A step of natural-gradient inference, q ← q^{1−β} (p₀ p(y | θ))^β with β = `rate`, is Bayesian inference
    in a linear model. Its prior N(m, S) is the normalized q^{1−β} p₀^β, S = 1/((1−β)s + βδ) and
    m = S((1−β)s μ + βδ μ₀), and its noise is Λ⁻¹/β, since the likelihood is raised to the power β. At rate 1
    the result is `converged_evidence`. Computed in float64; cost O((N·C)³).

    Args:
        posterior: A posterior from `VOGN`, `VOGGN`, `OGGN` or `IVON`, taken at any step.
        rate: The step size β of the precision, 1 − β₂, above 0 and at most 1.
        prior_mean: The prior mean μ₀ by parameter name. None is zero.
        weights: Parameters at which J, Λ and r are taken, as in `converged_evidence`.

    Returns:
        The evidence, a float64 scalar.

    Raises:
        InputError: If the rate is out of range, or if the covariance of the posterior is not diagonal.

    Reference: Khan et al., Approximate inference turns deep networks into Gaussian processes, NeurIPS 2019.
    """
    if not 0 < rate <= 1:
        raise InputError(
            f"rate must be above 0 and at most 1, but is {rate}. Pass the step of the precision, 1 - beta2."
        )
    covariance = posterior.covariance
    if not isinstance(covariance, DiagonalCovariance):
        raise InputError(
            "the evidence of an iteration needs a posterior with a diagonal covariance, but this one has a "
            f"{type(covariance).__name__}. Pass what VOGN, VOGGN, OGGN or IVON return."
        )
    linearized = posterior.linearized.to(dtype=torch.float64)
    prior = flat_prior(linearized, posterior.prior_var, prior_mean)
    own = covariance.variance.double().reciprocal() * (1 - rate)
    precision = own + rate * prior.precision
    center = own * linearized.flatten(linearized.params) + rate * prior.precision * prior.mean
    return _transformed_density(
        posterior, GaussianPrior(center / precision, precision), rate, weights
    )


def _transformed_density(
    posterior: Posterior, prior: GaussianPrior, rate: float, weights: Params | None
) -> Tensor:
    """log N(ỹ | J m, J S Jᵀ + Λ⁻¹/rate) for the prior N(m, S) of the parameters.

    With Λ·rate = R Rᵀ the whitened data are Rᵀ(ỹ − Jm) ~ N(0, I + RᵀJSJᵀR), and log|R| accounts for the
    change of variables.
    """
    linearized = posterior.linearized.to(dtype=torch.float64)
    if weights is not None:
        at = {name: weights[name].to(value) for name, value in linearized.params.items()}
        linearized = replace(linearized, params=at)
    inputs, y = posterior.data
    x = map_inputs(inputs, lambda v: v.double() if v.is_floating_point() else v)
    y = y.double() if y.is_floating_point() else y
    with torch.no_grad():
        f = linearized(x)
        posterior.likelihood.check(f, y)
        check_memory(
            3 * 8 * f.numel() ** 2,
            f.device,
            f"a Gram matrix of {f.numel()} outputs and its factor",
            "pass fewer points to optimizer.posterior",
        )
        residual, curvature = posterior.likelihood.residual(f, y), posterior.likelihood.curvature(f)
        values, vectors = torch.linalg.eigh(curvature)
        seen = values > values.amax(1, keepdim=True) * f.shape[1] * torch.finfo(f.dtype).eps
        root = torch.where(seen, (values * rate).clamp(min=0).sqrt(), 0.0)
        inverse = torch.where(seen, root.reciprocal(), 0.0)
        R = vectors * root[:, None, :]
        shift = linearized.unflatten(linearized.flatten(linearized.params) - prior.mean)
        # Rᵀ Λ⁻¹ r is R⁺ r times the rate, since R is a root of rate·Λ.
        gap = R.mT @ linearized.jvp(x, shift)[..., None]
        gap = gap + rate * inverse[..., None] * (vectors.mT @ residual[..., None])
        kernel = linearized.kernel(linearized.unflatten(prior.precision.reciprocal()))
        M = _sandwich(kernel(x), R)
        M.diagonal().add_(1.0)
        factor = cholesky(M, what="the covariance of the transformed data")
    white = factor.half_solve(gap.reshape(-1))
    volume = root[seen].log().sum() - 0.5 * factor.log_det()
    return volume - 0.5 * (white.square().sum() + int(seen.sum()) * math.log(2 * math.pi))


def _sandwich(K: Tensor, R: Tensor) -> Tensor:
    """Rᵀ K R for the block diagonal R of blocks (N, C, C)."""
    N, C = R.shape[:2]
    half = torch.einsum("ncd,ncm->ndm", R, K.reshape(N, C, N * C)).reshape(N * C, N, C)
    return torch.einsum("knc,ncd->knd", half, R).reshape(N * C, N * C)


def flat_prior(
    linearized: Linearized, prior_var: PriorVar, prior_mean: Params | None
) -> GaussianPrior:
    """The prior in the order of `Linearized.flatten`."""
    params = linearized.params
    variances = expand_prior(prior_var, params)
    for name, value in variances.items():
        check_positive(value, f"prior_var for '{name}'")
    means = {name: torch.zeros_like(value) for name, value in params.items()} | (prior_mean or {})
    for name, value in means.items():
        if name not in params or value.shape != params[name].shape:
            raise InputError(
                f"prior_mean has '{name}', {describe(value)}, which is no parameter with that shape. "
                "Pass a dict of names and tensors as named_parameters() gives them."
            )
    precision = {n: variances[n].reciprocal().expand(value.shape) for n, value in params.items()}
    return GaussianPrior(
        linearized.flatten({n: value.to(params[n]) for n, value in means.items()}),
        linearized.flatten(precision),
    )
