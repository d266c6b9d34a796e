"""A posterior from variances of a network's parameters that were found elsewhere."""

from __future__ import annotations

from torch import Tensor, nn

from net2gp.errors import InputError, check_positive
from net2gp.inputs import describe
from net2gp.linear.linearized import Linearized, PriorVar, linearize
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.recipes.around_network import around_network
from net2gp.posteriors.weights.diagonal import DiagonalCovariance
from net2gp.streams import held_or_streamed
from net2gp.types import Data, Likelihood


def from_variances(
    network: nn.Module | Linearized,
    variance: Tensor,
    data: Data,
    likelihood: Likelihood,
    *,
    prior_var: PriorVar = 1.0,
) -> Posterior:
    """Make a posterior of the variances of a network's parameters that an inference of your own found.

    The parameters have the law N(θ*, diag(variance)). The outputs are those of the linearized network, so
    that f at x has the mean f(x; θ*) and the covariance J(x) diag(variance) J(x)ᵀ.
    The posterior has no evidence, which only the inference could know. Cost: one forward pass of one point.

    Args:
        network: The network at the mean θ*, or its linearization, which chooses parameters and outputs.
        variance: One positive number per parameter, (P,), in the order of `network.named_parameters()`.
        data: The inputs and targets that the inference saw. Of a `data.Stream` one batch is read, and none
            is kept.
        likelihood: How targets follow the outputs.
        prior_var: The variance of the prior, which `novelty` compares with: a number, or by pattern.

    Returns:
        A posterior with the surface of all others.

    Raises:
        InputError: If `variance` is not one positive number per parameter.

    >>> import torch
    >>> from net2gp.likelihoods import Gaussian
    >>> data = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0]])
    >>> variance = torch.tensor([1.0, 0.5, 0.25])
    >>> posterior = from_variances(nn.Linear(2, 1).eval(), variance, data, Gaussian(0.1))
    >>> posterior.marginal(data[0]).variance
    tensor([[3.2500]])

    Reference: Blundell et al., Weight uncertainty in neural networks, ICML 2015.
    """
    linearized = network if isinstance(network, Linearized) else linearize(network, only="*")
    count = linearized.num_params
    if not isinstance(variance, Tensor) or variance.shape != (count,):
        raise InputError(
            f"variance must be a tensor of shape ({count},), one number per parameter, but is "
            f"{describe(variance)}. Concatenate the flattened variances in the order of "
            "network.named_parameters()."
        )
    check_positive(variance, "variance")
    kept = held_or_streamed(data, linearized.example)
    return around_network(linearized, DiagonalCovariance(variance), prior_var, likelihood, kept)
