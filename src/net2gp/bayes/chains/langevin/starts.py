"""Where Langevin chains start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from net2gp.bayes.model.model import Model
from net2gp.errors import InputError, check_count
from net2gp.inputs import describe
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.recipes.drawn import Drawn
from net2gp.types import Params

Start = Posterior | Params | Literal["network", "prior"] | None
"""A posterior of networks, parameters by name, or what else chains can start from."""


def num_starts(start: Start) -> int | None:
    """The number of networks that `start` has, or None if it can have any number."""
    if isinstance(start, Posterior) and isinstance(start.process, Drawn):
        return len(start.process.members)
    if isinstance(start, Mapping) and start:
        return len(next(iter(start.values())))
    return None


def starts(model: Model, start: Any, num_chains: int, seed: int) -> tuple[Tensor, Params]:
    """The first parameters of all chains.

    Args:
        model: The network and its prior.
        start: None or "network" for the network's own parameters, "prior" for draws from the prior, a
            posterior of networks, each of which starts a chain, a posterior of parameters, which are
            drawn, or parameters by name with an axis of chains in front.
        num_chains: The number of chains C; the first C networks are taken.
        seed: The seed of the draws.

    Returns:
        The parameters (C, P), and values that differ between chains but are not sampled.

    Raises:
        InputError: If `start` is of another architecture or has fewer networks than chains.
    """
    check_count(num_chains, "num_chains", example=4)
    network = model.architecture
    if start is None or start == "network":
        return network.flatten(network.params).detach().repeat(num_chains, 1), {}
    have = num_starts(start)
    if have is not None and have < num_chains:
        raise InputError(
            f"start has {have} networks for {num_chains} chains. Pass num_chains={have}, or a larger "
            "ensemble."
        )
    values = {n: v[:num_chains] for n, v in _values(model, start, num_chains, seed).items()}
    for name, own in network.params.items():
        found = tuple(values[name].shape[1:]) if name in values else None
        if found != tuple(own.shape):
            raise InputError(
                f"'{name}' has shape {tuple(own.shape)} in the network and {found} in start. Pass a "
                "posterior of the same architecture and parameters."
            )
    flat = torch.cat([values[name].flatten(1) for name in network.params], 1)
    device = network.example.device
    fixed = {n: v.detach().to(device) for n, v in values.items() if n not in network.params}
    return flat.detach().to(network.example), fixed


def _values(model: Model, start: Any, num_chains: int, seed: int) -> Params:
    generator = torch.Generator(model.architecture.example.device).manual_seed(seed)
    if isinstance(start, Posterior):
        if isinstance(start.process, Drawn):
            return start.process.members.values
        return start.sample_weights(num_chains, generator=generator)
    if isinstance(start, Mapping) and all(isinstance(v, Tensor) for v in start.values()):
        return dict(start)
    if start == "prior" and model.prior is not None:
        return model.prior.sample(model.params, num_chains, generator)
    raise InputError(
        'start must be a posterior, such as ensemble(network, data, likelihood), "network", "prior" if there '
        f"is one, or parameters by name, but is {describe(start)}."
    )
