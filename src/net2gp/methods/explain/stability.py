"""How mean, variance and novelty move when inputs do, and how far they can."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from net2gp.errors import InputError, NotAvailable, check_positive
from net2gp.inputs import describe, num_rows, ordinary_tensors, rows
from net2gp.methods.explain.perturbations import Objective, Perturbation, ProjectedGradient
from net2gp.posteriors.conditioning.conditioned import Conditioned
from net2gp.posteriors.conditioning.whitened import Whitened
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.recipes.trained_ensemble import TrainedEnsemble
from net2gp.progress import progress
from net2gp.types import Inputs, Kernel

PAIRS = 64
"""How many pairs of points a kernel gets at once: of their matrix only the diagonal is used."""


@dataclass(frozen=True, eq=False)
class Stability:
    """A posterior at points that were moved by several distances.

    Args:
        distances: The distances: (S,).
        points: The points at each distance: (S, N, …).
        change: ‖E f(x') − E f(x)‖ over the outputs: (S, N).
        variance: The variance of f at the moved points, averaged over the outputs: (S, N).
        novelty: The share of the prior variance that the data leave open there: (S, N).
    """

    distances: Tensor
    points: Tensor = field(repr=False)
    change: Tensor = field(repr=False)
    variance: Tensor = field(repr=False)
    novelty: Tensor = field(repr=False)


@ordinary_tensors()
def stability(
    posterior: Posterior,
    x: Tensor,
    distances: Sequence[float] | Tensor,
    *,
    perturbation: Perturbation | None = None,
    y: Tensor | None = None,
) -> Stability:
    """Move inputs by several distances, and return how mean, variance and novelty follow.

    Cost: one prediction per distance; perturbations that follow gradients need a forward and a backward pass
    of the mean per step in addition.

    Args:
        posterior: The posterior.
        x: N points, one tensor of real numbers.
        distances: How far the points are moved, zero or positive.
        perturbation: Where to: `RandomNoise()`, `Toward(points=…)`, `FastGradient()` or
            `ProjectedGradient()`, which is also the meaning of None.
        y: Targets whose log density at the mean an adversary lowers, such as the predicted classes. None
            lets it move the mean as far as it can.

    Returns:
        The moved points, and what the posterior says there.

    Raises:
        InputError: If `x` is no tensor of real numbers, if there are no distances or negative ones, or if `y`
            does not fit.

    >>> from net2gp.kernels import RBF
    >>> from net2gp.likelihoods import Gaussian
    >>> from net2gp.posteriors.condition import condition
    >>> x = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    >>> posterior = condition(RBF(), (x, x), Gaussian(noise_var=0.01))
    >>> found = stability(posterior, x[1:], [0.0, 0.5, 5.0])
    >>> found.novelty[:, 0].round(decimals=1)
    tensor([0.0000, 0.1000, 1.0000], dtype=torch.float64)

    References: Goodfellow et al., Explaining and harnessing adversarial examples, ICLR 2015; Bietti et al., A
    kernel perspective for regularizing deep neural networks, ICML 2019.
    """
    if not isinstance(posterior, Posterior):
        raise InputError(
            f"expected a posterior, but got {describe(posterior)}. Pass what condition, adapt, laplace or "
            "another method returns."
        )
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() < 2:
        raise InputError(
            f"x must be one tensor of N points of real numbers, but is {describe(x)}. Inputs such as tokens "
            "cannot be moved by small distances; pass their embeddings to the rest of the network."
        )
    if perturbation is not None and not isinstance(perturbation, Perturbation):
        raise InputError(
            f"perturbation must be a value such as FastGradient(), but is {describe(perturbation)}."
        )
    check_positive(cast(Any, distances), "distances", zero=True)
    far = torch.as_tensor(distances, dtype=x.dtype, device=x.device)
    if far.dim() != 1 or not len(far):
        raise InputError(
            f"distances must be one or more numbers, but is {describe(distances)}. Pass for example "
            "distances=[0.0, 0.1, 1.0]."
        )
    chosen, x = perturbation or ProjectedGradient(), x.detach()
    with torch.no_grad():
        begin = posterior.mean(x)
    objective = _objective(posterior, begin, y)
    places, found = [], []
    with progress("distances", len(far)) as advance:
        for distance in far.tolist():
            at = chosen(x, distance, objective).detach()
            with torch.no_grad():
                mean, variance = posterior.process.diagonal(at)
                novelty = posterior.novelty(at)
            change = (mean - begin).norm(dim=1)
            places.append(at)
            found.append(torch.stack([change, variance.mean(1).to(change), novelty.to(change)]))
            advance()
    change, variance, novelty = torch.stack(found, 1)
    return Stability(far, torch.stack(places), change, variance, novelty)


def _objective(posterior: Posterior, begin: Tensor, y: Tensor | None) -> Objective:
    if y is None:
        return lambda at: (posterior.mean(at) - begin).square().sum(1)
    posterior.likelihood.check(begin, y)
    return lambda at: -posterior.likelihood.log_prob(posterior.mean(at), y)


@torch.no_grad()
def kernel_distance(kernel: Kernel, x: Inputs, other: Inputs) -> Tensor:
    """Return the distance of points in the space that a kernel spans, output by output.

    d(x, x')² = k(x, x) + k(x', x') − 2k(x, x') is the variance of f(x) − f(x') before data. No function of
    norm 1 in this space differs by more than d between the points. Differences are taken in float64.

    Args:
        kernel: The covariance function.
        x: N points.
        other: N points, each the partner of one of `x`.

    Returns:
        The distances, (N, C) for coupled outputs and else (N, 1), in float64.

    Raises:
        InputError: If there are more points of one kind than of the other.

    >>> from net2gp.kernels import RBF
    >>> kernel_distance(RBF(), torch.zeros(1, 1), torch.ones(1, 1))
    tensor([[0.8871]], dtype=torch.float64)

    Reference: Bietti et al., A kernel perspective for regularizing deep neural networks, ICML 2019.
    """
    if not isinstance(kernel, Kernel) or isinstance(kernel, type):
        raise InputError(
            f"kernel must be a Kernel, but is {describe(kernel)}. Pass posterior.kernel, or RBF()."
        )
    count = num_rows(x)
    if num_rows(other) != count:
        raise InputError(
            f"each point needs a partner, but there are {count} points and {num_rows(other)} others."
        )
    kernel.check(x)
    kernel.check(other)
    precise, parts = kernel.precise(), []
    for start in range(0, count, PAIRS):
        left, right = (rows(v, slice(start, start + PAIRS)) for v in (x, other))
        cross = precise(left, right).diagonal()
        squared = precise.diag(left) + precise.diag(right) - 2 * cross
        parts.append(squared.clamp(min=0.0).sqrt().reshape(num_rows(left), -1).double())
    return torch.cat(parts)


@torch.no_grad()
def change_bound(posterior: Posterior, x: Inputs, other: Inputs) -> Tensor:
    """Return how far what the data added to the prior mean can change between points: ‖h‖ d(x, x').

    h(x) = E f(x) − m(x) lies in the space that the kernel spans, with the squared norm αᵀKα, so that
    |h(x) − h(x')| ≤ ‖h‖ d(x, x') with `kernel_distance` d. With a prior mean of zero it bounds the mean
    itself. For every posterior whose covariance is below its prior, d itself bounds changes of the standard
    deviation: |σ(x) − σ(x')| ≤ d(x, x').

    Args:
        posterior: A kernel conditioned on data, as `condition` and `adapt` return it.
        x: N points.
        other: N points, each the partner of one of `x`.

    Returns:
        Bounds on |h(x) − h(x')|, (N, C), in float64.

    Raises:
        NotAvailable: If the mean is not made of a kernel, as after `laplace`, whose mean is the network.

    >>> from net2gp.kernels import RBF
    >>> from net2gp.likelihoods import Gaussian
    >>> from net2gp.posteriors.condition import condition
    >>> x = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    >>> posterior = condition(RBF(), (x, x), Gaussian(noise_var=0.01))
    >>> (posterior.mean(x[1:]) - posterior.mean(x[:1])).abs(), change_bound(posterior, x[1:], x[:1])
    (tensor([[0.9752]], dtype=torch.float64), tensor([[1.0922]], dtype=torch.float64))

    Reference: Bietti et al., A kernel perspective for regularizing deep neural networks, ICML 2019.
    """
    distance = kernel_distance(posterior.kernel, x, other)
    return distance * _norms(posterior.process).to(distance)


def _norms(process: Any) -> Tensor:
    """The norm of the centered mean, one number, or (C,) if the outputs are independent."""
    if isinstance(process, Conditioned | Whitened) and process.weights is not None:
        return process.weights.double().norm(dim=0)
    if not isinstance(process, Conditioned | TrainedEnsemble) or getattr(process, "tangent", None):
        raise NotAvailable(
            "this posterior has no mean made of its kernel, so its norm is not known. Use adapt, condition, "
            "or posterior.dual().condition() for the linear model of laplace; for changes of the standard "
            "deviation kernel_distance(posterior.kernel, x, other) is the bound."
        )
    product = process.kernel.precise().matmul(process.x, process.x, process.alpha)
    return (process.alpha * product).sum(0).clamp(min=0.0).sqrt()
