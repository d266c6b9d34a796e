"""The bound of a single layer with its best Gaussian over inducing values, in closed form."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from net2gp.deep.inference.inducing import factor, project
from net2gp.deep.inference.sparse_layer import AffineMean
from net2gp.errors import InputError, check_positive
from net2gp.inputs import gather
from net2gp.likelihoods.targets import shape_targets
from net2gp.likelihoods.traits import has_gaussian_noise
from net2gp.types import Data, Kernel, Likelihood


def collapsed_bound(kernel: Kernel, data: Data, likelihood: Likelihood, points: Tensor) -> Tensor:
    """Compute the bound of a sparse Gaussian process under Gaussian noise, without any search.

    With A = L⁻¹ K(Z, X), K(Z, Z) = L Lᵀ and Q = AᵀA, the largest value of the stochastic bound over all
    Gaussians at the inducing points Z is

        log N(y | 0, Q + σ² I) − (1 / 2σ²) Σ_n (k(x_n, x_n) − Q_nn)  ≤  log p(y),

    with equality for Z = X. The cost is O(N M²). It is differentiable in Z and in the numbers of the kernel.

    Args:
        kernel: The kernel.
        data: Inputs and real targets.
        likelihood: Gaussian noise.
        points: The inducing points Z, with M rows.

    Returns:
        The bound, a number in float64.

    Raises:
        InputError: If the likelihood is not Gaussian noise of a known variance.

    >>> from net2gp.kernels import RBF
    >>> from net2gp.likelihoods import Gaussian
    >>> x = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    >>> collapsed_bound(RBF(), (x, x), Gaussian(1.0), x)
    tensor(-2.7581, dtype=torch.float64)

    Reference: Titsias, "Variational learning of inducing variables in sparse Gaussian processes", 2009.
    """
    if not has_gaussian_noise(likelihood) or likelihood.noise_var is None:
        raise InputError(
            "collapsed_bound is for Gaussian noise of a known variance. Pass Gaussian(noise_var=0.1), or use "
            "deep.fit(1, data, likelihood) for other likelihoods."
        )
    x, y = gather(data)
    assert isinstance(x, Tensor)
    rows, Z = x.double(), points.double()
    flat = y.reshape(len(y), -1).double()
    target = shape_targets(flat, flat)
    noise = likelihood.noise_variance(flat)
    check_positive(noise, "noise_var")
    precise = kernel.precise()
    found = project(precise, Z, factor(precise, Z), AffineMean(), rows)
    total = rows.new_zeros(())
    for r, v in zip(target.mT, noise.mT, strict=True):
        total = total + _one_output(found.weights / v.sqrt(), r / v.sqrt())
        total = total - 0.5 * ((found.residual[:, 0] / v).sum() + v.log().sum())
    return total


def _one_output(A: Tensor, r: Tensor) -> Tensor:
    """log N(r | 0, AᵀA + I) by the matrix determinant lemma."""
    R = torch.linalg.cholesky(torch.eye(len(A)).to(A) + A @ A.mT)
    c = torch.linalg.solve_triangular(R, (A @ r)[:, None], upper=False)
    fit = r.square().sum() - c.square().sum()
    return -0.5 * (len(r) * math.log(2 * math.pi) + fit) - R.diagonal().log().sum()
