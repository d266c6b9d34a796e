"""Networks of a posterior as ordinary modules."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from torch import nn

from net2gp.bayes.optimum.task import placed
from net2gp.errors import InputError, NotAvailable
from net2gp.inputs import describe
from net2gp.linear.linearized import Linearized
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.recipes.around_network import AroundNetwork
from net2gp.posteriors.recipes.drawn import Drawn, check_posterior
from net2gp.posteriors.recipes.mixed import Mixed


def module_of(posterior: Posterior, index: int = 0) -> nn.Module:
    """Return one network of a posterior as a new module in eval mode.

    Args:
        posterior: A posterior over networks: a set of them, a Gaussian around one, or a mixture of such.
        index: The number of the network: a draw or a trained member. A Gaussian around a network counts as
            one, its mean, and the members of a mixture are counted one after the other.

    Returns:
        A module with these parameters and buffers; changing it does not change the posterior.

    Raises:
        NotAvailable: If the posterior has no networks.
        InputError: If there are not that many.

    >>> import torch
    >>> from net2gp.bayes.optimum.map_estimate import map_estimate
    >>> from net2gp.bayes.optimum.settings import Training
    >>> from net2gp.likelihoods import Gaussian
    >>> x = torch.linspace(-1, 1, 20)[:, None]
    >>> training = Training(num_steps=20)
    >>> posterior = map_estimate(nn.Linear(1, 1), (x, 2 * x), Gaussian(0.01), training=training)
    >>> bool((module_of(posterior)(x) == posterior.mean(x)).all())
    True
    """
    check_posterior(posterior)
    count = _count(posterior)
    if isinstance(index, bool) or not isinstance(index, int):
        raise InputError(
            f"index must be the number of a network, from 0 to {count - 1}, but is {describe(index)}."
        )
    if not -count <= index < count:
        raise InputError(
            f"there are {count} networks, but number {index} was asked for. Pass 0 to {count - 1}."
        )
    return placed(next(islice(_networks(posterior), index % count, None)), {}).network


def _count(posterior: Posterior) -> int:
    process = posterior.process
    if isinstance(process, Drawn):
        return len(process.members)
    if isinstance(process, AroundNetwork):
        return 1
    if isinstance(process, Mixed):
        return sum(map(_count, process.members))
    raise NotAvailable(
        "this posterior has no networks to return: it is a Gaussian process. Use posterior.sample_functions."
    )


def _networks(posterior: Posterior) -> Iterator[Linearized]:
    process = posterior.process
    if isinstance(process, Drawn):
        yield from process.members.each()
    elif isinstance(process, AroundNetwork):
        yield process.linearized
    elif isinstance(process, Mixed):
        for member in process.members:
            yield from _networks(member)
