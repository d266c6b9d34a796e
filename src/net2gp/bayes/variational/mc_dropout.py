"""Dropout of a trained network as a posterior."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from net2gp.bayes.model.model import architecture_of, check_likelihood
from net2gp.bayes.variational.masks import draw_masks
from net2gp.errors import InputError, NotAvailable, check_seed
from net2gp.inputs import gather, ordinary_tensors
from net2gp.likelihoods.traits import has_open_noise
from net2gp.linear.forward.evaluation import evaluating
from net2gp.linear.forward.kinds import check_kind
from net2gp.linear.linearized import Linearized, Output, example_of
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.recipes.drawn import ByDrawing, Drawn
from net2gp.posteriors.recipes.members import MemberCovariance
from net2gp.tags import savable
from net2gp.types import Data, Likelihood, Params


@savable("bayes.DrawnMasks")
@dataclass(frozen=True, eq=False)
class DrawnMasks(Drawn):
    """The law of f that gives each of S masked networks the probability 1/S."""

    @property
    def kernel(self) -> MemberCovariance:
        """Refuse: dropout has no law of f before the data."""
        raise NotAvailable(
            "dropout of a trained network has no prior, so f has no covariance before the data. Use "
            "mean_field(network, data, likelihood, prior=1.0) for a posterior with one."
        )

    def draw_weights(self, num_samples: int, generator: torch.Generator | None) -> Params:
        """Refuse: the networks have the same parameters."""
        raise NotAvailable(
            "the networks of mc_dropout share their parameters and differ in the units that are dropped. "
            "posterior.process.members.values has the masks."
        )


@ordinary_tensors()
def mc_dropout(
    network: nn.Module | Linearized,
    data: Data,
    likelihood: Likelihood,
    *,
    num_samples: int = 100,
    output: Output | None = None,
    seed: int = 0,
) -> Posterior:
    """Keep dropout at work in a trained network: predictions average over masks of its units.

    A draw fixes the masks of all layers, the same for all points, so that it is a function, can be evaluated
    anywhere and has covariances between points. At each single point the law is that of Monte Carlo dropout.
    All kinds of nn.Dropout count, and calls of torch.nn.functional.dropout as F.dropout(x, p, self.training).
    Everything else, such as batch norm, is in eval mode. Cost of a prediction: `num_samples` passes,
    vectorized where torch can do so.

    Args:
        network: The network, trained with dropout, in any mode; it is not changed.
        data: The inputs and targets that it was trained on.
        likelihood: How targets follow the outputs; Gaussian noise must be given.
        num_samples: The number of draws S.
        output: Picks the tensor of outputs from what the network returns.
        seed: The seed of the masks.

    Returns:
        A posterior of S networks. It has no prior, and so no `novelty`.

    Raises:
        NetworkError: If the network does not call dropout, or does so where points are not on the first
            axis.
        InputError: If the noise is open.

    >>> from net2gp.likelihoods import Gaussian
    >>> network = nn.Sequential(nn.Linear(1, 50), nn.ReLU(), nn.Dropout(0.2), nn.Linear(50, 1))
    >>> x = torch.linspace(-1, 1, 5)[:, None]
    >>> mc_dropout(network, (x, x), Gaussian(0.01)).predict(x).variance.shape
    torch.Size([5, 1])

    Reference: Gal and Ghahramani, Dropout as a Bayesian approximation, ICML 2016.
    """
    check_likelihood(likelihood)
    if has_open_noise(likelihood):
        raise InputError(
            "the variance of the noise is open, and dropout does not learn it. Pass "
            "Gaussian(noise_var=...), for example the mean squared residual of held-out data."
        )
    check_seed(seed)
    module = network.network if isinstance(network, Linearized) else network
    module = check_kind(module)
    x, y = gather(data, example_of(network))
    with evaluating(module):
        if not isinstance(network, Linearized):
            network = architecture_of(network, output=output)
        f = network(x)
        likelihood.check(f, y)
        members = draw_masks(network, x, num_samples, seed=seed)
    recipe = ByDrawing("mc_dropout")
    return Posterior(DrawnMasks(members, f.shape[1]), likelihood, x, y, None, recipe)
