"""Gaussian laws as values."""

from __future__ import annotations

from gpytorch.distributions import MultivariateNormal
from linear_operator import to_linear_operator
from torch import Tensor

from net2gp.show import as_html, as_text, number


class Law(MultivariateNormal):
    """GPyTorch's multivariate normal, with variances as they are.

    GPyTorch raises variances below 1e-6 (float32) or 1e-10 (float64) to that floor, which would be most
    of the variance of targets on a small scale.
    """

    def _facts(self) -> dict[str, str]:
        return {
            "shape": f"{tuple(self.mean.shape)}",
            "mean": number(self.mean),
            "stddev": number(self.variance.sqrt()),
        }

    __repr__, _repr_html_ = as_text, as_html

    @property
    def variance(self) -> Tensor:
        """The diagonal of the covariance, never negative."""
        diagonal = self.lazy_covariance_matrix.diagonal(dim1=-2, dim2=-1)
        return diagonal.clamp(min=0.0).reshape(self.mean.shape)


def gaussian_law(mean: Tensor, covariance: Tensor) -> Law:
    """N(mean, covariance), not factorized before it must be: a covariance may be singular.

    >>> import torch
    >>> gaussian_law(torch.zeros(2), torch.zeros(2, 2)).variance
    tensor([0., 0.])
    """
    return Law(mean, to_linear_operator(covariance))
