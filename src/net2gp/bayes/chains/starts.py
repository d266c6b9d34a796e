"""Where chains start, and how many there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from net2gp.bayes.chains.diagnostics import INDEPENDENT
from net2gp.bayes.model.model import Model
from net2gp.errors import InputError, check_count
from net2gp.inputs import describe
from net2gp.linear.linearized import Linearized
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.recipes.drawn import ByDrawing, Drawn
from net2gp.types import Params

Start = Posterior | nn.Module | Linearized | Params | Literal["network", "prior"] | None
"""What chains can start from: see `starts`."""

NUM_CHAINS = 4
"""The number of chains if neither `num_chains` nor `start` says otherwise."""


def count_chains(num_chains: int | None, start: Any) -> int:
    """The number of chains that a method runs.

    Args:
        num_chains: What was passed. None takes one chain per network of an ensemble or of a dict, as many
            chains as an earlier run had, and 4 otherwise, as for one network or draws of `mean_field`.
        start: What was passed as `start`.

    Returns:
        The number of chains C.

    Raises:
        InputError: If it is no positive whole number.
    """
    if num_chains is not None:
        check_count(num_chains, "num_chains", example=NUM_CHAINS)
        return num_chains
    if isinstance(start, Posterior) and isinstance(start.process, Drawn):
        if _is_chain(start):
            assert isinstance(start.recipe, ByDrawing)
            return start.recipe.num_chains
        drawn = isinstance(start.recipe, ByDrawing) and start.recipe.method == "mean_field"
        count = len(start.process.members)
        return NUM_CHAINS if drawn or count == 1 else count
    if isinstance(start, Mapping) and start:
        first = next(iter(start.values()))
        return len(first) if isinstance(first, Tensor) and first.dim() else NUM_CHAINS
    return NUM_CHAINS


def starts(
    model: Model, start: Any, num_chains: int, generator: torch.Generator
) -> tuple[Tensor, Params]:
    """The first parameters of all chains.

    Args:
        model: The network and its prior.
        start: None or "network" for the network's own parameters; "prior" for draws from the prior; another
            network of this architecture, where all chains start; a posterior of networks, whose first C
            start a chain each, or all chains if it has one; the posterior of earlier chains, which go on
            where they ended; a Gaussian posterior around a network, from which C draws are taken; or
            parameters by name with an axis of chains in front.
        num_chains: The number of chains C.
        generator: Makes the draws.

    Returns:
        The parameters (C, P), and values that differ between chains but are not sampled.

    Raises:
        InputError: If `start` is of another kind or architecture, or has fewer networks than chains.
    """
    network = model.architecture
    if start is None or (isinstance(start, str) and start == "network"):
        return network.flatten(network.params).detach().repeat(num_chains, 1), {}
    values = _chosen(_values(model, start, num_chains, generator), start, num_chains)
    known = {**network.params, **network.frozen}
    for name in [*network.params, *(n for n in values if n not in network.params)]:
        wanted = tuple(known[name].shape) if name in known else None
        found = tuple(values[name].shape[1:]) if name in values else None
        if found != wanted:
            raise InputError(
                f"'{name}' has shape {wanted} in the network and {found} in start. Pass a "
                "start of the same architecture and parameters."
            )
    flat = torch.cat([values[name].flatten(1) for name in network.params], 1)
    device = network.example.device
    fixed = {n: v.detach().to(device) for n, v in values.items() if n not in network.params}
    moved = {n: v for n, v in fixed.items() if not bool((v == network.frozen[n]).all())}
    return flat.detach().to(network.example), moved


def _is_chain(posterior: Posterior) -> bool:
    recipe = posterior.recipe
    return isinstance(recipe, ByDrawing) and recipe.method not in ("", *INDEPENDENT)


def _chosen(values: Params, start: Any, num_chains: int) -> Params:
    """The values of C networks out of all that there are."""
    lengths = {len(value) if value.dim() else 0 for value in values.values()}
    if len(lengths) != 1 or 0 in lengths:
        raise InputError(
            "the parameters in start must have one axis in front that counts chains, the same for all, but "
            f"its lengths are {sorted(lengths)}. Stack the values of each parameter."
        )
    have = lengths.pop()
    if have == 1:
        return {name: value.expand(num_chains, *value.shape[1:]) for name, value in values.items()}
    if have < num_chains:
        raise InputError(
            f"start has {have} networks for {num_chains} chains. Pass num_chains={have}, or a larger "
            "ensemble."
        )
    if isinstance(start, Posterior) and _is_chain(start):
        # neighbors in a chain are alike: take the last draws of equally long pieces, the chains themselves
        index = torch.tensor([(k + 1) * have // num_chains - 1 for k in range(num_chains)])
        return {name: value[index.to(value.device)] for name, value in values.items()}
    return {name: value[:num_chains] for name, value in values.items()}


def _values(model: Model, start: Any, num_chains: int, generator: torch.Generator) -> Params:
    if isinstance(start, Posterior):
        if isinstance(start.process, Drawn):
            return start.process.members.values
        return start.sample_weights(num_chains, generator=generator)
    if isinstance(start, Linearized):
        return {name: value[None] for name, value in {**start.frozen, **start.params}.items()}
    if isinstance(start, nn.Module):
        own = {**dict(start.named_parameters()), **dict(start.named_buffers())}
        return {name: value.detach()[None] for name, value in own.items()}
    if isinstance(start, Mapping) and start and all(isinstance(v, Tensor) for v in start.values()):
        return dict(start)
    if isinstance(start, str) and start == "prior" and model.prior is not None:
        return model.prior.sample(model.params, num_chains, generator)
    shown = repr(start) if isinstance(start, str) else describe(start)
    raise InputError(
        'start must be a posterior, such as ensemble(network, data, likelihood), a network, "network", '
        f'"prior" if there is one, or a dict of stacked parameters, but is {shown}.'
    )
