"""The eigendecomposition of a Gram matrix: the evidence at any noise and scale in O(N)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from net2gp.errors import check_positive
from net2gp.likelihoods import Gaussian
from net2gp.memory import check_memory
from net2gp.posteriors.condition import condition, conditioned
from net2gp.posteriors.conditioning.conditioned import SpectralFactor
from net2gp.posteriors.conditioning.gaussian import (
    as_rows,
    assemble,
    gaussian_evidence,
    to_features,
)
from net2gp.posteriors.conditioning.problem import Problem, make_problem
from net2gp.posteriors.conditioning.solvers import Cholesky, WeightCholesky
from net2gp.posteriors.posterior import Posterior
from net2gp.types import Data, FeatureKernel, Kernel, Mean


@dataclass(frozen=True, eq=False)
class Spectrum:
    """The eigendecomposition K = Q diag(eigenvalues) Qᵀ of a Gram matrix, and the data in its basis.

    For every noise σ² and scale s of the kernel,

        log N(y | m, sK + σ²I) = −½ Σ_i [z_i² / (sλ_i + σ²) + log(sλ_i + σ²)] + const,  z = Qᵀ(y − m),

    which costs O(N). If the kernel has fewer features than rows, the P×P matrix ΦᵀΦ is decomposed instead.
    It has the same eigenvalues except for zeros; `remainder` is the energy of the data in their directions.
    Call `spectrum(kernel, data)` to make one.

    Args:
        problem: The checked data, kernel and prior mean.
        eigenvalues: The eigenvalues λ that were kept: (rank,).
        energies: The squared coordinates z² of the targets in the basis: (rank, columns).
        remainder: The squared length of the targets outside the basis: (columns,).
        num_zeros: The number of zero eigenvalues that were left out.
        Q: The eigenvectors of the Gram matrix, (rows, rows), or None if ΦᵀΦ was decomposed.
        U: The eigenvectors of ΦᵀΦ, (P, rank), or None if the Gram matrix was decomposed.
    """

    problem: Problem = field(repr=False)
    eigenvalues: Tensor = field(repr=False)
    energies: Tensor = field(repr=False)
    remainder: Tensor = field(repr=False)
    num_zeros: int
    Q: Tensor | None = field(default=None, repr=False)
    U: Tensor | None = field(default=None, repr=False)

    def log_marginal_likelihood(
        self, noise_var: float | Tensor, scale: float | Tensor = 1.0
    ) -> Tensor:
        """Return log N(y | m, scale·K + noise_var·I), differentiable in both numbers, in O(N).

        Args:
            noise_var: The noise variance, a positive number or a tensor of such.
            scale: The factor of the kernel, a number or a tensor.

        Returns:
            The evidence, in the shape that both tensors broadcast to: noises (A, 1) and scales (B,) give the
            evidence (A, B) of a whole grid.

        Raises:
            InputError: If a noise variance is not positive.
        """
        check_positive(noise_var, "noise_var")
        like = self.eigenvalues
        noise = torch.as_tensor(noise_var, dtype=torch.float64, device=like.device)
        factor = torch.as_tensor(scale, dtype=torch.float64, device=like.device)
        values = like * factor[..., None] + noise[..., None]
        quadratic = (self.energies.sum(1) / values).sum(-1) + self.remainder.sum() / noise
        columns = self.energies.shape[1]
        log_det = columns * (values.log().sum(-1) + self.num_zeros * noise.log())
        return gaussian_evidence(quadratic, log_det, columns * (len(like) + self.num_zeros))

    def slopes(self, noise_var: float, scale: float) -> tuple[float, float]:
        """Return the derivatives of the evidence with respect to noise and scale, in O(N).

        Args:
            noise_var: The noise variance.
            scale: The factor of the kernel.

        Returns:
            The derivative by `noise_var` and the derivative by `scale`.
        """
        values = self.eigenvalues * scale + noise_var
        columns = self.energies.shape[1]
        own = 0.5 * (self.energies.sum(1) / values**2 - columns / values)
        outside = 0.5 * (self.remainder.sum() / noise_var**2 - columns * self.num_zeros / noise_var)
        return float(own.sum() + outside), float((own * self.eigenvalues).sum())

    def condition(self, noise_var: float, scale: float = 1.0) -> Posterior:
        """Return the posterior at this noise and scale of the kernel, without another decomposition.

        Args:
            noise_var: The noise variance, positive.
            scale: The factor of the kernel.

        Returns:
            The posterior of the scaled kernel under `Gaussian(noise_var)`.

        Raises:
            InputError: If the noise variance is not positive.
        """
        check_positive(noise_var, "noise_var")
        problem = self.problem
        kernel = problem.kernel.scaled(scale)
        likelihood = Gaussian(noise_var)
        if self.Q is None:
            # Weight space needs another factorization, but only of the small P×P matrix.
            data = (problem.x, problem.y)
            return condition(kernel, data, likelihood, mean=problem.mean, solver=WeightCholesky())
        scaled = replace(problem, kernel=kernel, likelihood=likelihood)
        factor = SpectralFactor(self.Q, self.eigenvalues * scale + noise_var)
        alpha = factor.solve(as_rows(problem, problem.target))
        evidence = self.log_marginal_likelihood(noise_var, scale)
        return conditioned(scaled, assemble(scaled, alpha, factor, evidence, None), Cholesky())


def spectrum(kernel: Kernel, data: Data, *, mean: Mean | None = None) -> Spectrum:
    """Decompose k(X, X) once, to condition and to read the evidence at many noises and scales.

    Cost: one eigendecomposition of size min(N·C, P).

    Args:
        kernel: The prior covariance.
        data: (x, y) with real targets, or a DataLoader.
        mean: The prior mean, a function from N points to (N, C). None is zero.

    Returns:
        The decomposition, with the evidence at any noise and scale.

    Raises:
        InputError: If the data do not suit the kernel.
        TooLarge: If the decomposition does not fit into memory.

    >>> from net2gp.kernels import RBF
    >>> x = torch.linspace(0, 1, 5, dtype=torch.float64)[:, None]
    >>> fixed = spectrum(RBF(), (x, x.sin()))
    >>> bool(fixed.log_marginal_likelihood(0.01) > fixed.log_marginal_likelihood(10.0))
    True
    """
    problem = make_problem(kernel, data, Gaussian(1.0), mean)
    return decompose(problem)


def decompose(problem: Problem) -> Spectrum:
    """The spectrum of a problem whose noise is not chosen yet."""
    t = as_rows(problem, problem.target)
    features = (
        problem.kernel.num_features if isinstance(problem.kernel, FeatureKernel) else math.inf
    )
    size = int(min(features, problem.num_rows))
    check_memory(
        8 * (4 * size**2 + (problem.num_rows * size if features < problem.num_rows else 0)),
        problem.offset.device,
        f"an eigendecomposition of size {size}",
        "tune on a subset of the points, or pass prior_var and noise_var",
    )
    if features < problem.num_rows:
        return _from_features(problem, t)
    eigenvalues, Q = torch.linalg.eigh(problem.gram().detach())
    nothing = t.new_zeros(t.shape[1])
    return Spectrum(problem, eigenvalues.clamp(min=0.0), (Q.mT @ t) ** 2, nothing, 0, Q)


def _from_features(problem: Problem, t: Tensor) -> Spectrum:
    assert isinstance(problem.kernel, FeatureKernel)
    Phi = problem.features().detach().flatten(0, 1)
    eigenvalues, U = torch.linalg.eigh(Phi.mT @ Phi)
    # Eigenvalues below this floor are rounding errors, and dividing by them would invent energy.
    floor = eigenvalues.max() * len(eigenvalues) * torch.finfo(torch.float64).eps
    kept = eigenvalues > floor
    eigenvalues, U = eigenvalues[kept], U[:, kept]
    return _seen_in_features(problem, t, Phi.mT @ t, eigenvalues, U)


def _seen_in_features(
    problem: Problem, t: Tensor, pulled: Tensor, eigenvalues: Tensor, U: Tensor
) -> Spectrum:
    """The spectrum from the targets t, `pulled` = Φᵀt and the decomposition of ΦᵀΦ.

    The left singular vectors of Φ are ΦU/√λ, so that the coordinates of t are Uᵀ(Φᵀt)/√λ.
    """
    energies = (U.mT @ pulled) ** 2 / eigenvalues[:, None]
    remainder = ((t * t).sum(0) - energies.sum(0)).clamp(min=0.0)
    return Spectrum(problem, eigenvalues, energies, remainder, len(t) - len(eigenvalues), U=U)


def share_spectrum(one: Spectrum, problem: Problem) -> Spectrum:
    """The spectrum for other targets at the same points, by one product with the basis."""
    t = as_rows(problem, problem.target)
    if one.Q is not None:
        return replace(one, problem=problem, energies=(one.Q.mT @ t) ** 2)
    assert one.U is not None
    pulled = to_features(problem, t)
    assert pulled is not None
    return _seen_in_features(problem, t, pulled, one.eigenvalues, one.U)
