"""How much networks of one ensemble or posterior differ, in their weights and as functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from net2gp.bayes.model.model import architecture_of, check_likelihood
from net2gp.errors import InputError
from net2gp.inputs import describe
from net2gp.likelihoods.responses import target_moments
from net2gp.likelihoods.traits import has_gaussian_noise, has_one_class, is_classifier
from net2gp.linear.linearized import Linearized
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.recipes.members import Members
from net2gp.types import Inputs, Likelihood


@dataclass(frozen=True, eq=False)
class Diversity:
    """Comparisons of S networks in pairs.

    Args:
        distances: √(mean over points and targets of (E[y | f_s] − E[y | f_t])²): (S, S).
        cosines: The cosines of the angles between the vectors of all parameters: (S, S).
        disagreement: The share of points that two classifiers put into different classes: (S, S); None for
            regression.
        places: A map of the functions: (S, 2). Its distances are as near to `distances` as two axes allow.
        explained: The share of the variance between the functions that each axis of the map shows: (2,).
    """

    distances: Tensor = field(repr=False)
    cosines: Tensor = field(repr=False)
    disagreement: Tensor | None = field(repr=False)
    places: Tensor = field(repr=False)
    explained: Tensor


def diversity(
    networks: Posterior | Sequence[nn.Module | Linearized],
    x: Inputs,
    *,
    likelihood: Likelihood | None = None,
) -> Diversity:
    """Compare the networks of a posterior by their weights and by their predictions.

    The members of a mixture are compared too: a Gaussian around a network counts as the network at its
    center. Networks whose weights are far apart may still be the same function, since hidden units can
    change places, so diversity is judged by functions: by the distances of E[y | f] at the points and by
    disagreement. The map is classical multidimensional scaling of these distances, which equals principal
    components of the predictions. Cost: one pass of each network over the points, and O(S²·N·D + S³).

    Args:
        networks: A posterior of networks, such as an ensemble, a Markov chain or a mixture; or two or more
            networks of one architecture.
        x: N points, best such that were not trained on.
        likelihood: How targets follow the outputs. None takes the posterior's own, and for bare networks
            compares the outputs themselves.

    Returns:
        The comparisons, in float64.

    Raises:
        InputError: If there are fewer than two networks, or the posterior has none.

    >>> one, other = (nn.Linear(1, 1, bias=False) for _ in range(2))
    >>> _ = nn.init.constant_(one.weight, 1.0), nn.init.constant_(other.weight, -1.0)
    >>> found = diversity([one, other], torch.ones(4, 1))
    >>> float(found.distances[0, 1]), float(found.cosines[0, 1])
    (2.0, -1.0)

    Reference: Fort, Hu & Lakshminarayanan, Deep ensembles: a loss landscape perspective, 2019.
    """
    if likelihood is not None:
        check_likelihood(likelihood)
    if not isinstance(networks, Posterior | list | tuple):
        raise InputError(
            f"networks must be a posterior or a list of networks, but is {describe(networks)}. Pass what "
            "ensemble(network, data, likelihood) returns, or [network, other]."
        )
    if isinstance(networks, Posterior):
        likelihood = networks.likelihood if likelihood is None else likelihood
        parts = list(_groups(networks, x))
    else:
        alone = [n if isinstance(n, Linearized) else architecture_of(n) for n in networks]
        parts = [_single(one, x) for one in alone]
    if len({weights.shape[1] for _, weights in parts}) > 1:
        raise InputError(
            "the networks are of unlike architectures. Compare networks with the same parameters."
        )
    outputs = torch.cat([values for values, _ in parts]) if parts else torch.zeros(0)
    if len(outputs) < 2:
        raise InputError(f"diversity compares two or more networks, but there are {len(outputs)}.")
    weights = torch.cat([own for _, own in parts]).double()
    unit = torch.nn.functional.normalize(weights, dim=1)
    means = _expected(outputs.double(), likelihood)
    distances = torch.cdist(means.flatten(1), means.flatten(1), compute_mode=_EXACT)
    distances = distances / means[0].numel() ** 0.5
    disagreement = None
    if is_classifier(likelihood):
        several = not has_one_class(likelihood) and means.shape == outputs.shape
        disagreement = _disagreement(means, several)
    return Diversity(distances, unit @ unit.mT, disagreement, *_scaled(distances))


_EXACT = "donot_use_mm_for_euclid_dist"  # products would lose the digits of small distances


def _groups(posterior: Posterior, x: Inputs) -> Iterator[tuple[Tensor, Tensor]]:
    """Outputs (S, N, C) and weights (S, P) of the networks inside of a posterior."""
    process: Any = posterior.process
    inner = getattr(process, "members", None)
    if isinstance(inner, Members):
        names = [name for name in inner.architecture.params if name in inner.values]
        own = inner.architecture
        shared = own.flatten(own.params).expand(len(inner), -1)  # dropout moves no parameter
        moved = [inner.values[name].flatten(1) for name in names]
        weights = torch.cat(moved, 1) if moved else shared
        yield process.values(x).detach(), weights.detach()
    elif inner is not None:
        for member in inner:
            yield from _groups(member, x)
    elif isinstance(getattr(process, "linearized", None), Linearized):
        yield _single(process.linearized, x)
    else:
        raise InputError(
            f"diversity compares networks, but this posterior has none: it is {describe(process)}. Pass an "
            "ensemble, a chain, a mixture of posteriors around networks, or a list of networks."
        )


def _single(network: Linearized, x: Inputs) -> tuple[Tensor, Tensor]:
    return network(x).detach()[None], network.flatten(network.params).detach()[None]


def _expected(outputs: Tensor, likelihood: Likelihood | None) -> Tensor:
    """E[y | f] of all networks: (S, N, D)."""
    if likelihood is None or has_gaussian_noise(likelihood):
        return outputs
    mean = target_moments(likelihood, outputs.flatten(0, 1))[0]
    return mean.reshape(*outputs.shape[:2], -1).detach()


def _disagreement(means: Tensor, several: bool) -> Tensor:
    """The share of points with different classes, or, if each output is a label, with any different label."""
    binary = several or means.shape[-1] == 1
    labels = means > 0.5 if binary else means.argmax(-1, keepdim=True)
    return torch.stack([(labels != own).any(-1).double().mean(1) for own in labels])


def _scaled(distances: Tensor) -> tuple[Tensor, Tensor]:
    """Classical multidimensional scaling to two axes, and the share of variance of each."""
    squares = distances.square()
    centered = squares - squares.mean(0) - squares.mean(1, keepdim=True) + squares.mean()
    values, vectors = torch.linalg.eigh(-0.5 * centered)
    largest = values.flip(0)[:2].clamp(min=0)
    total = values.clamp(min=0).sum()
    places = vectors.flip(1)[:, :2] * largest.sqrt()
    return places, torch.where(total > 0, largest / total, torch.zeros_like(largest))
