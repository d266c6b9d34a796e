"""The prior as a law."""

from __future__ import annotations

from gpytorch.distributions import MultivariateNormal

from net2gp.inputs import num_rows
from net2gp.kernels import IndependentOutputs, settled
from net2gp.likelihoods.laws import gaussian_law
from net2gp.types import Inputs, Kernel, Mean


def prior(
    kernel: Kernel, x: Inputs, *, mean: Mean | None = None, num_outputs: int = 1
) -> MultivariateNormal:
    """The law of f ~ GP(mean, kernel) at the points x, before any data: event N·C, index n·C + c.

    This is what a Gaussian process is: a Gaussian for every finite set of points, each the marginal of
    any larger one. `num_outputs` is for kernels of independent outputs; joint kernels know theirs.

    >>> import torch
    >>> from net2gp.kernels import RBF
    >>> law = prior(RBF(), torch.tensor([[0.0], [1.0]]))
    >>> law.mean, law.covariance_matrix
    (tensor([0., 0.]), tensor([[1.0000, 0.6065], [0.6065, 1.0000]]))

    Reference: Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, section 2.2.
    """
    kernel = settled(kernel, x)
    joint = kernel if kernel.joint else IndependentOutputs(kernel, num_outputs)
    covariance = joint(x)
    center = covariance.new_zeros(len(covariance))
    if mean is not None:
        center = mean(x).reshape(num_rows(x) * (len(covariance) // num_rows(x))).to(center)
    return gaussian_law(center, covariance)
