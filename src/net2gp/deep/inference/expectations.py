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


ENOUGH = 8
"""How many points there must be for each output, so that correlations among them are removed too."""


@lru_cache(maxsize=16)
@ordinary_tensors()
def standard_points(
    count: int, num_outputs: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Make quasi-random points of mean 0 and variance 1, which few normal points do not have by themselves.

    They are copied to a device once, since recorded steps cannot copy.

    Args:
        count: The number of points.
        num_outputs: The number of columns C. Columns are uncorrelated if there are enough points.
        dtype: The dtype.
        device: The device.

    Returns:
        The points, (count, C).

    >>> points = standard_points(8, 1, torch.float64, torch.device("cpu"))
    >>> round(float(points.var(correction=0)), 6)
    1.0
    """
    z = MonteCarlo(count).base_sample(num_outputs, like=torch.empty(0, dtype=torch.float64))
    z = z - z.mean(0)
    if count >= ENOUGH * num_outputs:
        L = torch.linalg.cholesky(z.mT @ z / count)
        z = torch.linalg.solve_triangular(L, z.mT, upper=False).mT
    else:
        z = z / z.square().mean(0).sqrt()
    return z.to(dtype=dtype, device=device)


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
    nodes = standard_points(CLASS_NODES, mean.shape[1], mean.dtype, mean.device)
    std = variance.sqrt()
    rows, count = len(mean), len(nodes)
    f = (mean + std * nodes[:, None]).flatten(0, 1)
    log_prob = likelihood.log_prob(f, y.repeat(count)).reshape(count, rows).mean(0)
    with torch.no_grad():
        residual = likelihood.residual(f, y.repeat(count)).reshape(count, rows, -1).mean(0)
        probs = f.softmax(-1).reshape(count, rows, -1)
        curvature = torch.diag_embed((probs - probs.square()).mean(0))
    return ExpectedDerivatives(log_prob, residual, curvature)
