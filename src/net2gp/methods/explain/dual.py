"""From a trained network to the linear model and the Gaussian process that it corresponds to."""

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
    """Return the transformed data of a trained network, with its linear model and its Gaussian process.

    Cost: one forward pass and one forward-mode pass. The methods of `Dual` solve the systems.

    Args:
        network: The trained network, or `linearize(network, ...)` to choose parameters or outputs.
        data: The data that it was trained on, (x, y) or a DataLoader.
        likelihood: The likelihood whose negative logarithm is the loss.
        prior_var: The variance of the prior N(0, prior_var) that weight decay corresponds to, a number or a
            dict by name pattern. If the loss is the sum of −log p(y | x, θ) plus ½ δ‖θ‖², it is 1/δ.

    Returns:
        The dual view.

    Raises:
        InputError: If `network` is neither a module nor a linearized network, or if the data do not suit the
            likelihood.

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
