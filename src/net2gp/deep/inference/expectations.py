"""Expected log densities under independent Gaussian outputs, and what natural gradients need of them."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from net2gp.inputs import ordinary_tensors
from net2gp.likelihoods.expectations import ExpectedDerivatives, expected_derivatives
from net2gp.likelihoods.links import MonteCarlo
from net2gp.likelihoods.traits import has_one_class
from net2gp.types import Likelihood

CLASS_NODES = 32
"""The number of quasi-random points that integrate the logits of classes out in a step."""


@lru_cache(maxsize=8)
@ordinary_tensors()
def _nodes(num_classes: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The quasi-random points, which are copied to a device once: recorded steps cannot copy."""
    like = torch.empty(0, dtype=dtype, device=device)
    return MonteCarlo(CLASS_NODES).base_sample(num_classes, like=like)


def expectations(
    likelihood: Likelihood, mean: Tensor, variance: Tensor, y: Tensor
) -> ExpectedDerivatives:
    """Compute E log p(y | f), the expected residual and curvature for f_rc ~ N(mean_rc, variance_rc).

    They are exact for Gaussian noise and by a Gauss rule for labels and noise scales; logits of classes and
    likelihoods of your own take a fixed quasi-random sample. All are differentiable.

    Args:
        likelihood: The likelihood.
        mean: Means of the outputs, (R, C).
        variance: Their variances, (R, C).
        y: Targets of the R rows.

    Returns:
        The expectations, (R,), (R, C) and (R, C, C).

    >>> from net2gp.likelihoods import Gaussian
    >>> expectations(Gaussian(0.5), torch.zeros(1, 1), torch.ones(1, 1), torch.ones(1)).residual
    tensor([[2.]])
    """
    if not has_one_class(likelihood):
        return expected_derivatives(likelihood, mean, torch.diag_embed(variance), y)
    # Roots of diagonal matrices are known, and those of equal entries have no derivative in eigh.
    nodes = _nodes(mean.shape[1], mean.dtype, mean.device)
    std = variance.sqrt()
    rows, count = len(mean), len(nodes)
    f = (mean + std * nodes[:, None]).flatten(0, 1)
    log_prob = likelihood.log_prob(f, y.repeat(count)).reshape(count, rows).mean(0)
    with torch.no_grad():
        residual = likelihood.residual(f, y.repeat(count)).reshape(count, rows, -1).mean(0)
        probs = f.softmax(-1).reshape(count, rows, -1)
        curvature = torch.diag_embed((probs - probs.square()).mean(0))
    return ExpectedDerivatives(log_prob, residual, curvature)
