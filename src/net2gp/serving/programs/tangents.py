"""Processes with a tangent kernel, in weight space: their training points become a matrix of weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from net2gp.errors import NotAvailable
from net2gp.linear.forward.factors import Factor, in_dtype, scaled
from net2gp.linear.jacobians.tangent import TangentKernel
from net2gp.linear.linearized import Linearized
from net2gp.posteriors.conditioning.conditioned import Conditioned, NoiseFactor, SpectralFactor
from net2gp.posteriors.conditioning.systems import CurvatureFactor
from net2gp.posteriors.conditioning.whitened import Whitened
from net2gp.posteriors.weights.structure import prior_vector
from net2gp.serving.programs.gradients import (
    blocks,
    check_network,
    direct,
    outputs,
    outputs_and_gradients,
)
from net2gp.serving.programs.moments import Law, Moments, left_open
from net2gp.types import Inputs, Params

MOST_NUMBERS = 2**26
"""Numbers of a matrix of weights that a program may hold: half a gigabyte in float64."""


def tangent_process(process: Conditioned | Whitened) -> Law:
    """Return the law of a Gaussian process with the tangent kernel of a network.

    Its program holds no inputs, but a matrix with a column of P numbers for each training row, or each
    parameter: what the data say, in terms of the weights.

    Raises:
        NotAvailable: If the prior mean is a function of your own, or the matrix is too large.
    """
    kernel = process.kernel
    assert isinstance(kernel, TangentKernel)
    linearized, C = kernel.linearized, process.num_outputs
    check_network(linearized)
    mean = process.prior_mean
    if not (mean is None or isinstance(mean, Linearized)):
        raise NotAvailable(
            f"a prior mean of the kind {type(mean).__name__} cannot be exported. Condition with "
            "mean=linearized or without a mean."
        )
    if process.weights is None:
        raise NotAvailable(
            "the mean of this posterior is not known in terms of weights. Pass draws=32."
        )
    deviations = prior_vector(kernel.prior_var, linearized.params).double().sqrt()
    weights = deviations[:, None] * process.weights.double()
    cover = weight_blocks(process, linearized)

    def moments(x: Inputs) -> Moments:
        out, found = outputs_and_gradients(linearized, x, C)
        moved = _products(found, weights)[..., 0]
        if mean is not None:
            moved = moved + (out if mean is linearized else outputs(mean, x))
        covariances = cover(found, None)
        prior = prior_variances(kernel.prior_var, found)
        return Moments(moved, covariances, novelty=left_open(covariances, prior))

    carries = "what the training rows say about the weights, as a matrix"
    return Law(moments, C, "tangent kernel", carries)


Cover = Callable[[dict[str, Factor], Tensor | None], Tensor]
"""From gradients and last-layer features to the covariances of the outputs, (B, C, C), in float64."""


def weight_blocks(process: Conditioned | Whitened, linearized: Linearized) -> Cover:
    """Return the function from gradients J to J V Jᵀ − (J W)(J W)ᵀ, or (J W)(J W)ᵀ in weight space."""
    kernel = process.kernel
    assert isinstance(kernel, TangentKernel)
    deviations = prior_vector(kernel.prior_var, linearized.params).double().sqrt()[:, None]
    W = deviations * _whitened_root(process, kernel, len(deviations))
    if isinstance(process, Whitened):
        return lambda found, phi: (side := _products(found, W)) @ side.mT
    return difference(kernel.prior_var, W)


def difference(prior_var: Params, W: Tensor) -> Cover:
    """Return the function from gradients J to J V Jᵀ − (J W)(J W)ᵀ, in float64, since the two may cancel.

    Args:
        prior_var: The diagonal of V, by parameter.
        W: (P, r).
    """
    prior = {name: value.double() for name, value in prior_var.items()}

    def cover(found: dict[str, Factor], phi: Tensor | None) -> Tensor:
        side = _products(found, W)
        parts = [
            blocks(scaled(in_dtype(found[name], torch.float64), value))
            for name, value in prior.items()
        ]
        return torch.stack(parts).sum(0) - side @ side.mT

    return cover


def prior_variances(prior_var: Params, found: dict[str, Factor]) -> Tensor:
    """Return the diagonal of J V Jᵀ, (B, C), for the diagonal of V, by parameter."""
    parts = [
        blocks(scaled(in_dtype(found[name], torch.float64), value.double()))
        for name, value in prior_var.items()
    ]
    return torch.stack(parts).sum(0).diagonal(dim1=1, dim2=2)


def _whitened_root(
    process: Conditioned | Whitened, kernel: TangentKernel, num_weights: int
) -> Tensor:
    """L⁻ᵀ (P, P) in weight space; else Φ(X)ᵀMᵀ (P, r), MᵀM being the inverse of the noisy Gram matrix."""
    count = num_weights if isinstance(process, Whitened) else len(process.alpha)
    if num_weights * count > MOST_NUMBERS:
        raise NotAvailable(
            f"the program would hold a matrix of {num_weights} × {count} numbers. Use laplace(..., "
            "structure=Kron()), fewer points, or pass draws=32."
        )
    with torch.no_grad():
        if isinstance(process, Whitened):
            eye = torch.eye(num_weights, dtype=torch.float64)
            return torch.linalg.solve_triangular(process.precision.L.mT, eye, upper=True)
        if process.cache is not None:
            return process.cache.double()
        root = inverse_root(process)
        return kernel.precise().adjoint(process.x, root.mT.contiguous()).double()


def inverse_root(process: Conditioned) -> Tensor:
    """M with MᵀM = (K + Λ⁻¹)⁻¹: (rows, rows).

    Raises:
        NotAvailable: If there is no factorization, as after conjugate gradients.
    """
    factor = process.factor
    if not isinstance(factor, NoiseFactor | CurvatureFactor | SpectralFactor):
        raise NotAvailable(
            "a posterior by conjugate gradients has no factorization to export. Condition with "
            "solver=Cholesky() or solver=Lanczos()."
        )
    return factor.root(torch.eye(len(process.alpha), dtype=torch.float64))


def _products(found: dict[str, Factor], W: Tensor) -> Tensor:
    """J W for W (P, r): (B, C, r)."""
    total: Tensor | None = None
    start = 0
    for factor in found.values():
        J = direct(factor).double()
        size = J.shape[2]
        part = J @ W[start : start + size]
        total = part if total is None else total + part
        start += size
    assert total is not None
    return total
