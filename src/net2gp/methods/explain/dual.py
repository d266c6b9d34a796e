"""From a trained network to the linear model and the Gaussian process that it is the posterior of."""

from __future__ import annotations

from torch import nn

from net2gp.errors import InputError
from net2gp.inputs import describe
from net2gp.linear import Linearized, linearize
from net2gp.linear.linearized import PriorVar
from net2gp.posteriors.recipes.dual import AroundZero, Dual, make_dual
from net2gp.types import Data, Likelihood

__all__ = ["AroundZero", "Dual", "dual"]


def dual(
    network: nn.Module | Linearized,
    data: Data,
    likelihood: Likelihood,
    prior_var: PriorVar,
) -> Dual:
    """The transformed data, and with them the linear model and Gaussian process, of a trained network.

    `prior_var` is the variance of the prior N(0, prior_var) that weight decay stands for: with the sum
    of the losses −log p(y | x, θ) and a penalty ½ δ‖θ‖², prior_var = 1/δ. Pass a `Linearized` to choose
    parameters or outputs. Cost: a forward pass and one in forward mode; what is solved, and when, is up
    to the methods of `Dual`.

    >>> import torch
    >>> from net2gp.likelihoods import Gaussian
    >>> network = nn.Linear(1, 1).double().eval()
    >>> x = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    >>> found = dual(network, (x, 3 * x), Gaussian(noise_var=0.5), prior_var=1.0)
    >>> found.targets.flatten()  # the data of a linear network are transformed to themselves
    tensor([0., 3.], dtype=torch.float64)
    >>> one, other = found.linear_model(), found.gaussian_process()
    >>> torch.allclose(one.marginal(x).covariance_matrix, other.marginal(x).covariance_matrix)
    True

    Reference: Khan et al., Approximate inference turns deep networks into Gaussian processes, NeurIPS 2019.
    """
    if not isinstance(network, nn.Module | Linearized):
        raise InputError(
            f"network must be a torch.nn.Module or a Linearized, but is {describe(network)}. "
            "Pass the network, or linearize(network)."
        )
    linearized = network if isinstance(network, Linearized) else linearize(network)
    return make_dual(linearized, data, likelihood, prior_var)
