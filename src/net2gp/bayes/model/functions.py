"""Functions drawn from the prior of a network."""

from __future__ import annotations

import torch
from torch import nn

from net2gp.bayes.model.model import architecture_of
from net2gp.bayes.model.prior import WeightPrior, as_prior
from net2gp.errors import check_count, check_generator
from net2gp.linear.linearized import Linearized, Output, Patterns
from net2gp.posteriors.recipes.drawn import Chosen
from net2gp.posteriors.recipes.members import Members


def prior_functions(
    network: nn.Module | Linearized,
    prior: WeightPrior | float = 1.0,
    num_samples: int = 16,
    *,
    only: Patterns | None = None,
    output: Output | None = None,
    generator: torch.Generator | None = None,
) -> Chosen:
    """Draw functions f(·; θ_s) with θ_s from the prior.

    What a prior of weights means is seen in the functions that it gives: their size, how fast they vary,
    and whether some are far from the others.

    Args:
        network: The network. It runs in eval mode, and its own values are not used for what is drawn.
        prior: The prior of the parameters; a number is the variance of independent Gaussians.
        num_samples: The number of functions S.
        only: Chooses parameters by name pattern, as in `linearize`; the others stay as they are.
        output: Picks the tensor of outputs from what the network returns.
        generator: Makes the draws repeatable. None uses torch's global random state.

    Returns:
        A function of N points with values (S, N, C). It is the same function in each call, and its `members`
        hold the weights.

    Raises:
        InputError: If the prior does not cover the parameters.
        NotAvailable: If the prior is flat.

    >>> functions = prior_functions(nn.Linear(1, 1), 1.0, num_samples=3)
    >>> functions(torch.linspace(0, 1, 5)[:, None]).shape
    torch.Size([3, 5, 1])
    """
    check_count(num_samples, "num_samples")
    check_generator(generator)
    chosen = as_prior(prior)
    if not isinstance(network, Linearized):
        network = architecture_of(network, only, output)
    chosen.check(network.params)
    return Chosen(Members(network, chosen.sample(network.params, num_samples, generator)))
