"""The prior as a law."""

from __future__ import annotations

from gpytorch.distributions import MultivariateNormal

from net2gp.inputs import num_rows
from net2gp.kernels import IndependentOutputs
from net2gp.likelihoods.laws import gaussian_law
from net2gp.types import Inputs, Kernel, Mean


def prior(
    kernel: Kernel, x: Inputs, *, mean: Mean | None = None, num_outputs: int = 1
) -> MultivariateNormal:
    """Return the law of f ~ GP(mean, kernel) at the points x, before any data.

    This is what a Gaussian process is: a Gaussian for every finite set of points, such that the Gaussian of a
    subset is a marginal of the larger one.

    Args:
        kernel: The covariance function.
        x: N points: a tensor, or a tuple or dict of tensors with N rows each.
        mean: A function from N points to (N, C). None is zero.
        num_outputs: The number of outputs C, for kernels that treat outputs as independent copies. Joint
            kernels know their own.

    Returns:
        A Gaussian with event shape N·C, where output c of point n has index n·C + c.

    >>> import torch
    >>> from net2gp.kernels import RBF
    >>> law = prior(RBF(), torch.tensor([[0.0], [1.0]]))
    >>> law.mean, law.covariance_matrix
    (tensor([0., 0.]), tensor([[1.0000, 0.6065], [0.6065, 1.0000]]))

    Reference: Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, section 2.2.
    """
    alone = kernel.outputs(x) is None
    covariance = (IndependentOutputs(kernel, num_outputs) if alone else kernel)(x)
    center = covariance.new_zeros(len(covariance))
    if mean is not None:
        center = mean(x).reshape(num_rows(x) * (len(covariance) // num_rows(x))).to(center)
    return gaussian_law(center, covariance)
