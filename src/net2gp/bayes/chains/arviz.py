"""Draws of Markov chains to ArviZ and back."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from net2gp.bayes.chains.diagnostics import chain_values
from net2gp.bayes.model.model import Model, checked_data
from net2gp.bayes.model.prior import WeightPrior
from net2gp.errors import InputError
from net2gp.inputs import describe
from net2gp.linear.forward.kinds import check_kind
from net2gp.linear.linearized import linearize
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.recipes.drawn import ByDrawing, Drawn, check_posterior, drawn_posterior
from net2gp.posteriors.recipes.members import Members
from net2gp.types import Data, Inputs, Likelihood

if TYPE_CHECKING:
    from xarray import DataTree


def to_arviz(posterior: Posterior, x: Inputs | None = None) -> DataTree:
    """Hand the draws of Markov chains to ArviZ 1.x, for its summaries and plots.

    Args:
        posterior: What `hmc`, `nuts` or another method with chains returned.
        x: N points. None takes the points of the data.

    Returns:
        A DataTree with the groups "posterior" (the parameters by name, with the axes chain and draw in
        front), "posterior_predictive" (f(x) as "f", with the axes chain, draw, point and output: judge chains
        by it, since weights are not identifiable) and "observed_data" (the targets). The method, the
        temperature and the statistics of the chains are attributes of the group "posterior".

    Raises:
        NotAvailable: If the posterior does not come from Markov chains.
        InputError: If ArviZ is not installed.
    """
    arviz = _arviz()
    check_posterior(posterior)
    points = posterior.data[0] if x is None else x
    values, recipe = chain_values(posterior, points)
    assert isinstance(posterior.process, Drawn)
    draws = {
        name: value.detach().cpu().reshape(recipe.num_chains, -1, *value.shape[1:]).numpy()
        for name, value in posterior.process.members.values.items()
    }
    groups: dict[str, dict[str, Any]] = {
        "posterior": draws,
        "posterior_predictive": {"f": values.detach().cpu().numpy()},
        "observed_data": {"y": posterior.data[1].detach().cpu().numpy()},
    }
    tree = arviz.from_dict(groups, dims={"f": ["point", "output"]})
    tree["posterior"].attrs |= {
        "inference_library": "net2gp",
        "method": recipe.method,
        "temperature": recipe.temperature,
        **{name: value.detach().cpu().numpy() for name, value in recipe.statistics.items()},
    }
    return tree


def from_arviz(
    tree: DataTree,
    network: nn.Module,
    data: Data,
    likelihood: Likelihood,
    *,
    prior: WeightPrior | float | None = None,
) -> Posterior:
    """Make a posterior of draws that ArviZ holds, whichever sampler made them.

    Args:
        tree: A DataTree whose group "posterior" has parameters of the network by name, with the axes chain
            and draw in front. Variables of other names are left out.
        network: A module of the architecture. Parameters without draws keep its values.
        data: The data, as in `laplace`.
        likelihood: How targets follow the outputs.
        prior: The prior of the parameters, for `novelty`; None if it is not known.

    Returns:
        The posterior.

    Raises:
        InputError: If no variable is a parameter of the network, or a shape does not fit.
    """
    network = check_kind(network)
    known = dict(network.named_parameters())
    try:
        group = tree["posterior"]
        found = {str(name): value for name, value in group.data_vars.items() if str(name) in known}
    except (KeyError, TypeError, AttributeError, IndexError):
        raise InputError(
            'tree must be a DataTree of ArviZ with a group "posterior", but is '
            f"{describe(tree)}. Pass what to_arviz or arviz.from_dict returned."
        ) from None
    if not found:
        raise InputError(
            f'the group "posterior" has {sorted(map(str, group.data_vars))}, none of which is a parameter of '
            f"the network: {sorted(known)}. Name the variables as the parameters."
        )
    model = Model.of(linearize(network, only=list(found)), likelihood, prior)
    values = {}
    for name, like in model.params.items():
        array = found[name].transpose("chain", "draw", ...).to_numpy()
        values[name] = torch.tensor(array).flatten(0, 1).to(like)
    attributes = group.attrs
    chains = int(group.sizes["chain"])
    statistics = {
        str(name): torch.as_tensor(value)
        for name, value in attributes.items()
        if getattr(value, "shape", None) == (chains,)
    }
    recipe = ByDrawing(
        str(attributes.get("method", "from_arviz")),
        float(attributes.get("temperature", 1.0)),
        chains,
        statistics,
    )
    pair = checked_data(model, data)
    members = Members(model.architecture, values)
    return drawn_posterior(members, likelihood, pair, prior=model.prior, recipe=recipe)


def _arviz() -> Any:
    try:
        return import_module("arviz_base")
    except ImportError:
        raise InputError(
            'to_arviz needs ArviZ 1.x, which is not installed. Type pip install "arviz-base>=0.6", or '
            'pip install "net2gp[arviz]".'
        ) from None
