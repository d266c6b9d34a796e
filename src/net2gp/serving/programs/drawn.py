"""A fixed set of drawn networks, as a program: what serves any network and any law of its weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from net2gp.errors import NotAvailable
from net2gp.linear.forward.evaluation import evaluating
from net2gp.linear.linearized import Linearized
from net2gp.posteriors.conditioning.process import linearizations_of
from net2gp.posteriors.conditioning.samples import WeightSamples
from net2gp.posteriors.posterior import Posterior
from net2gp.serving.programs.gradients import check_network, outputs
from net2gp.serving.programs.moments import Law, Moments
from net2gp.types import Inputs


def drawn_networks(posterior: Posterior[Any], samples: WeightSamples) -> Law:
    """Return the law of the network itself at S draws of its weights, as `predict(x, samples=...)` has it.

    A point costs S forward passes. Their mean and covariance take the place of those of the posterior.

    Raises:
        NotAvailable: If the posterior has no law of weights.
    """
    num_draws, generator = samples.num_samples, torch.Generator().manual_seed(samples.seed)
    weights = posterior.sample_weights(num_draws, generator=generator)
    linearized = next(iter(linearizations_of(posterior.process)), None)
    if linearized is None:
        raise NotAvailable(
            "draws=... needs a posterior over the weights of a network, as laplace gives it."
        )
    check_network(linearized)
    C = posterior.num_outputs
    networks = [
        _at(linearized, {n: value[s] for n, value in weights.items()}) for s in range(num_draws)
    ]

    def moments(x: Inputs) -> Moments:
        with evaluating(linearized.network):
            draws = torch.stack([outputs(network, x) for network in networks])
        centered = (draws - draws.mean(0)).double()
        blocks = torch.einsum("sbc,sbd->bcd", centered, centered) / num_draws
        return Moments(draws.mean(0), blocks, draws=draws)

    return Law(moments, C, f"{num_draws} drawn networks", "nothing")


def _at(linearized: Linearized, params: dict[str, Tensor]) -> Linearized:
    return replace(linearized, params={name: params[name] for name in linearized.params})
