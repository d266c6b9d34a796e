"""The influence of each training point on a prediction, in closed form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor

from net2gp.errors import InputError, NotAvailable
from net2gp.inputs import describe, join, num_rows, rows, tensors
from net2gp.likelihoods.laws import gaussian_law
from net2gp.likelihoods.traits import rows_per_point
from net2gp.linalg import psd_root
from net2gp.linear.forward.evaluation import evaluating
from net2gp.memory import check_memory
from net2gp.posteriors.conditioning.conditioned import Conditioned
from net2gp.posteriors.conditioning.process import Process
from net2gp.posteriors.conditioning.whitened import Whitened
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.predicting import is_gaussian
from net2gp.posteriors.recipes.around_network import AroundNetwork
from net2gp.posteriors.weights.function_space import ConditionedCovariance
from net2gp.tags import savable
from net2gp.types import FeatureKernel, Inputs


def contributions(posterior: Posterior, x: Inputs) -> Tensor:
    """Return what each training point adds to the mean at each point of x: k(x_m, X_n) α_n.

    By the representer theorem the sum over n is the mean minus the prior mean, `posterior.centered(x)`. Here
    α_n is the residual of point n under the posterior mean. A posterior from `laplace` has the network as its
    mean, which is no such sum; use its `dual().gaussian_process()`. Cost: k(x, X).

    Args:
        posterior: A posterior from `condition`, `adapt` or a dual.
        x: M points.

    Returns:
        The contributions of N training points: (M, N, C).

    Raises:
        NotAvailable: If the mean of the posterior is the network itself.

    >>> from net2gp.kernels import RBF
    >>> from net2gp.likelihoods import Gaussian
    >>> from net2gp.posteriors.condition import condition
    >>> X = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    >>> posterior = condition(RBF(), (X, 1 + X), Gaussian(noise_var=1.0))
    >>> contributions(posterior, X[:1])[..., 0]
    tensor([[0.2167, 0.5667]], dtype=torch.float64)

    Reference: Schölkopf, Herbrich and Smola, A generalized representer theorem, COLT 2001.
    """
    _check(posterior)
    if not isinstance(posterior.process, Conditioned | Whitened):
        raise NotAvailable(
            "contributions come from a kernel, but the mean of this posterior is the network itself. Pass "
            "what condition, adapt or dual(...).gaussian_process() return, or use removal_effects."
        )
    known, C = posterior.data[0], posterior.num_outputs
    M, N = num_rows(x), num_rows(known)
    alpha = _residuals(posterior, _index(posterior, None))
    if isinstance(posterior.process, Conditioned) and posterior.process.rows_per_point < C:
        cross = posterior.kernel.precise()(x, known)
        return (cross[..., None] * alpha).to(_dtype(posterior, x))
    _check_memory(M * C, N * C, alpha)
    cross = posterior.kernel.precise()(x, known).reshape(M, C, N, C)
    return torch.einsum("mcnd,nd->mnc", cross, alpha).to(_dtype(posterior, x))


def removal_effects(posterior: Posterior, x: Inputs, *, points: Tensor | None = None) -> Tensor:
    """Return how the mean at each point of x changes when a training point is left out.

    The change is −Σ_mn (I − Λ_nΣ_nn)⁻¹ α_n, where Σ is the posterior covariance of f, and α_n and Λ_n are the
    residual and the curvature of point n. Removing one site from a Gaussian posterior has this closed form,
    so nothing is solved again. It is exact for Gaussian noise; for other likelihoods the remaining points
    keep their sites. Around a network, Σ is the covariance that the posterior keeps, in any structure.

    Cost: one solve with k(X, X_n) per point n in function space, one row of features per point in weight
    space.

    Args:
        posterior: Any posterior that holds its data.
        x: M points.
        points: Indices of the training points to leave out in turn. None takes all N.

    Returns:
        The changes of the mean: (M, N, C).

    Raises:
        InputError: If the indices are not training points, or if the covariance of the posterior is too wide
            to take a point out, as with `Diagonal`, `Kron` or `LowRank`.

    >>> from net2gp.kernels import RBF
    >>> from net2gp.likelihoods import Gaussian
    >>> from net2gp.posteriors.condition import condition
    >>> X = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    >>> posterior = condition(RBF(), (X, 1 + X), Gaussian(noise_var=1.0))
    >>> removal_effects(posterior, X[:1])[..., 0]
    tensor([[-0.1768, -0.2833]], dtype=torch.float64)

    Reference: Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, section 5.4.2.
    """
    cavity = _cavity(posterior, x, points)
    assert cavity.cross is not None
    effect = -torch.einsum("ndmc,ndk->mnck", cavity.cross, cavity.pull)
    return effect.flatten(2).to(_dtype(posterior, x))


def leave_one_out(posterior: Posterior, *, points: Tensor | None = None) -> MultivariateNormal:
    """Return the law of f at each training point as the other points predict it.

    It is N(μ_n − Σ_nn (I − Λ_nΣ_nn)⁻¹ α_n, (I − Σ_nnΛ_n)⁻¹Σ_nn), as in `removal_effects`. The mean of
    log p(y_n) under `likelihood.predict(leave_one_out(posterior))` is a cross-validation with N folds at the
    price of none.

    Args:
        posterior: Any posterior that holds its data.
        points: Indices of the training points to predict. None takes all N.

    Returns:
        A Gaussian with batch shape N and event shape C.

    Raises:
        InputError: As in `removal_effects`.

    >>> from net2gp.kernels import RBF
    >>> from net2gp.likelihoods import Gaussian
    >>> from net2gp.posteriors.condition import condition
    >>> X = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    >>> leave_one_out(condition(RBF(), (X, 1 + X), Gaussian(noise_var=1.0))).mean.flatten()
    tensor([0.6065, 0.3033], dtype=torch.float64)
    """
    return _law_of(posterior, _cavity(posterior, None, points))


def _law_of(posterior: Posterior, cavity: _Cavity) -> MultivariateNormal:
    mean = posterior.marginal(cavity.x).mean
    shift = (cavity.blocks @ cavity.pull).flatten(1)
    inner = torch.eye(cavity.blocks.shape[-1]).to(cavity.blocks) - cavity.blocks @ cavity.curvature
    covariance = torch.linalg.solve(inner, cavity.blocks)
    covariance = 0.5 * (covariance + covariance.mT)
    if covariance.shape[-1] != mean.shape[1]:
        covariance = covariance * torch.eye(mean.shape[1]).to(covariance)
    return gaussian_law(mean - shift.to(mean.dtype), covariance.to(mean.dtype))


@savable("explain.Removal")
@dataclass(frozen=True, eq=False)
class Removal:
    """What it takes to leave out each training point in turn, for blocks of c outputs with k columns.

    Args:
        pull: (I − Λ_nΣ_nn)⁻¹ α_n: (N, c, k).
        gain: (I − Λ_nΣ_nn)⁻¹ Λ_n: (N, c, c).
    """

    pull: Tensor
    gain: Tensor

    def moments(self, posterior: Posterior, x: Inputs) -> tuple[Tensor, Tensor]:
        """Compute the moments of f at each point of x as all training points but one predict it.

        The mean changes by −Σ_mn (I − Λ_nΣ_nn)⁻¹ α_n, and the covariance by Σ_mn (I − Λ_nΣ_nn)⁻¹Λ_n Σ_nm.

        Args:
            posterior: The posterior.
            x: M points.

        Returns:
            The means and the variances, (M, N, C) each, float64.
        """
        known, index = posterior.data[0], torch.arange(len(self.pull), device=self.pull.device)
        cross = cross_covariance(posterior.process, known, x, index)
        mean, variance = (v.double()[:, None] for v in posterior.process.diagonal(x))
        effect = torch.einsum("ndmc,ndk->mnck", cross, self.pull).flatten(2)
        gained = torch.einsum("ndmc,nde,nemc->mnc", cross, self.gain, cross)
        return mean - effect, variance + gained


def removal(posterior: Posterior) -> tuple[MultivariateNormal, Removal]:
    """Prepare to leave out each training point in turn.

    Args:
        posterior: A posterior that holds its data.

    Returns:
        The law of `leave_one_out`, and what it takes to predict other points.
    """
    cavity = _cavity(posterior, None, None)
    inner = torch.eye(cavity.blocks.shape[-1]).to(cavity.blocks) - cavity.curvature @ cavity.blocks
    gain = torch.linalg.solve(inner, cavity.curvature)
    return _law_of(posterior, cavity), Removal(cavity.pull, gain)


@dataclass(frozen=True, eq=False)
class _Cavity:
    """The quantities for leaving points out, in float64, for blocks of c outputs with k columns (c·k = C).

    Args:
        x: The points that are left out.
        cross: Σ between them and other points: (N, c, M, c).
        blocks: Σ_nn: (N, c, c).
        curvature: Λ_n: (N, c, c).
        pull: (I − Λ_nΣ_nn)⁻¹ α_n: (N, c, k).
    """

    x: Inputs
    cross: Tensor | None
    blocks: Tensor
    curvature: Tensor
    pull: Tensor


@torch.no_grad()
def _cavity(posterior: Posterior, x: Inputs | None, points: Tensor | None) -> _Cavity:
    _check(posterior)
    if not is_gaussian(posterior.process):
        raise NotAvailable(
            "a point is taken out in closed form of a Gaussian law, but this posterior is a set or a mixture "
            "of networks. Ask each member, or find it anew without the point."
        )
    index = _index(posterior, points)
    left_out = rows(posterior.data[0], index)
    cross = None if x is None else cross_covariance(posterior.process, left_out, x, index)
    blocks = _own_covariances(posterior.process, left_out)
    c = blocks.shape[1]
    # Outputs that share a kernel also share their noise, so the curvature of one output holds for all.
    Lam = _curvature(posterior, index)[:, :c, :c]
    alpha = _residuals(posterior, index).reshape(len(index), c, -1)
    _check_removable(Lam, blocks)
    inner = torch.eye(c).to(blocks) - Lam @ blocks
    return _Cavity(left_out, cross, blocks, Lam, torch.linalg.solve(inner, alpha))


def _check(posterior: Any) -> None:
    if not isinstance(posterior, Posterior):
        raise InputError(
            f"the posterior, {describe(posterior)}, does not hold the data that it was conditioned on. "
            "Pass what condition, adapt, laplace or dual return."
        )
    if rows_per_point(posterior.likelihood) is not None:
        raise NotAvailable(
            "influence is of points with one target each, and this posterior has targets at places. Take "
            "one place: laplace(linearize(network, output=lambda out: out[:, :, 0, 0]), (x, y[:, 0, 0]), "
            "likelihood)."
        )


def _check_removable(Lam: Tensor, blocks: Tensor) -> None:
    """Raise if a covariance is wider than any that has seen the point, which satisfies Λ^½ Σ Λ^½ < 1."""
    R = psd_root(Lam)
    if bool((torch.linalg.eigvalsh(R.mT @ blocks @ R) > 1 + 1e-6).any()):
        raise InputError(
            "a point cannot be taken out of this posterior: its covariance there is larger than the point "
            "itself allows, as covariances that leave correlations out are (Diagonal, Kron, LowRank). "
            "Pass laplace(..., structure=Full()) or FunctionSpace()."
        )


def _index(posterior: Posterior, points: Tensor | None) -> Tensor:
    x, y = posterior.data
    N = num_rows(x)
    if points is None:
        return torch.arange(N, device=y.device)
    if (
        points.dim() != 1
        or points.is_floating_point()
        or bool(((points < 0) | (points >= N)).any())
    ):
        raise InputError(
            f"points must hold indices of the {N} training points, but is {describe(points)}. "
            "Pass for example points=torch.arange(10)."
        )
    return points.nonzero()[:, 0] if points.dtype == torch.bool else points


def _own_covariances(process: Process, left_out: Inputs) -> Tensor:
    """Σ_nn of the points left out: (N, c, c), float64."""
    if isinstance(process, Conditioned):
        return _own_by_factor(process, left_out)
    if isinstance(process, Whitened):
        by_point = _halves(process, left_out).unflatten(1, (-1, process.num_outputs))
        return torch.einsum("pnc,pnd->ncd", by_point, by_point)
    if isinstance(process, AroundNetwork) and isinstance(process.covariance, ConditionedCovariance):
        with evaluating(process.linearized.network):
            return _own_by_factor(process.covariance.process, left_out)
    return process.moments(left_out)[1].to(torch.float64)


def _own_by_factor(process: Conditioned, left_out: Inputs) -> Tensor:
    precise, C = process.kernel.precise(), process.rows_per_point
    N, total = num_rows(left_out), num_rows(process.x) * C
    _check_memory(total, N * C, process.alpha)
    K = precise(process.x, left_out)
    solved = process.factor.solve(K)
    own = torch.bmm(K.mT.reshape(N, C, total), solved.mT.reshape(N, C, total).mT)
    return precise.blocks(left_out) - 0.5 * (own + own.mT)


def cross_covariance(process: Process, left_out: Inputs, x: Inputs, index: Tensor) -> Tensor:
    """Compute Σ between training points and other points.

    Args:
        process: The law of f.
        left_out: N training points.
        x: M points.
        index: The places of the N points among the training points.

    Returns:
        The covariances for blocks of c outputs: (N, c, M, c), float64.
    """
    if isinstance(process, Conditioned):
        return _cross_by_factor(process, left_out, x, index)
    if isinstance(process, Whitened):
        cross = _halves(process, left_out).mT @ _halves(process, x)
        return cross.reshape(num_rows(left_out), process.num_outputs, num_rows(x), -1)
    if isinstance(process, AroundNetwork) and isinstance(process.covariance, ConditionedCovariance):
        with evaluating(process.linearized.network):
            return _cross_by_factor(process.covariance.process, left_out, x, index)
    N, M, C = num_rows(left_out), num_rows(x), process.num_outputs
    _check_memory((N + M) * C, (N + M) * C, tensors(x)[0])
    joint = process.joint(join([left_out, x]))[1].to(torch.float64)
    return joint[: N * C, N * C :].reshape(N, C, M, C)


def _cross_by_factor(process: Conditioned, left_out: Inputs, x: Inputs, index: Tensor) -> Tensor:
    precise, C = process.kernel.precise(), process.rows_per_point
    M, total = num_rows(x), num_rows(process.x) * C
    _check_memory(total, M * C, process.alpha)
    if process.noise is not None:
        # k(X, x) − K(K + D)⁻¹k(X, x) = D(K + D)⁻¹k(X, x) takes no K, and no difference of near numbers
        cross = process.noise[:, None] * process.factor.solve(precise(process.x, x))
        return cross.reshape(-1, C, M, C)[index]
    solved = process.factor.solve(precise(process.x, x))
    cross = precise(left_out, x) - precise(process.x, left_out).mT @ solved
    return cross.reshape(num_rows(left_out), C, M, C)


def _halves(process: Whitened, x: Inputs) -> Tensor:
    """L⁻¹Φ(x)ᵀ, whose Gram matrix is Σ: (P, N·C)."""
    precise = process.kernel.precise()
    assert isinstance(precise, FeatureKernel)
    return process.precision.half_solve(precise.features(x).flatten(0, 1).mT)


def _residuals(posterior: Posterior, index: Tensor) -> Tensor:
    """α_n = b_n − Λ_nμ_n, the residual of each site at the posterior mean: (N, C), float64."""
    process = posterior.process
    if isinstance(process, Conditioned):
        return process.alpha.detach().reshape(-1, process.num_outputs)[index]
    sites = getattr(process, "sites", None)
    if sites is not None:
        centered = posterior.centered(rows(posterior.data[0], index)).to(torch.float64)[..., None]
        return sites.natural[index] - (sites.curvature[index] @ centered)[..., 0]
    return _expand(posterior)[0][index]


def _curvature(posterior: Posterior, index: Tensor) -> Tensor:
    """Λ_n: (N, C, C), float64."""
    sites = getattr(posterior.process, "sites", None)
    return (_expand(posterior)[1] if sites is None else sites.curvature)[index]


def _expand(posterior: Posterior) -> tuple[Tensor, Tensor]:
    """Residuals and curvatures at the posterior mean of all points, since each may have its own noise.

    The temperature divides the curvature but not the residual, as in `Dual`.
    """
    x, y = posterior.data
    mean = posterior.marginal(x).mean.to(torch.float64)
    likelihood = posterior.likelihood
    return likelihood.residual(mean, y), likelihood.curvature(mean) / posterior.temperature


def _dtype(posterior: Posterior, x: Inputs) -> torch.dtype:
    return posterior.mean(rows(x, slice(0, 1))).dtype


def _check_memory(height: int, width: int, like: Tensor) -> None:
    check_memory(
        3 * 8 * height * width,
        like.device,
        f"a {height} × {width} cross-covariance",
        "pass fewer points at a time",
    )
