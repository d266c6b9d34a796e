"""Gaussian laws as values."""

from __future__ import annotations

from gpytorch.distributions import MultivariateNormal
from linear_operator import to_linear_operator
from torch import Tensor


def gaussian_law(mean: Tensor, covariance: Tensor) -> MultivariateNormal:
    """N(mean, covariance), not factorized before it must be: a covariance may be singular.

    >>> import torch
    >>> gaussian_law(torch.zeros(2), torch.zeros(2, 2)).covariance_matrix
    tensor([[0., 0.],
            [0., 0.]])
    """
    return MultivariateNormal(mean, to_linear_operator(covariance))
