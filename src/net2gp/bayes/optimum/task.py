"""What map_estimate and ensemble share: checked arguments before training, and a posterior after it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from net2gp.bayes.model.model import Model, architecture_of, check_likelihood
from net2gp.bayes.model.prior import NormalPrior, WeightPrior
from net2gp.bayes.optimum.descent import Optimum
from net2gp.bayes.optimum.objective import Objective
from net2gp.bayes.optimum.settings import Training
from net2gp.errors import InputError, check_flag
from net2gp.inputs import describe, gather, num_rows, rows
from net2gp.likelihoods.traits import has_open_noise, of_points, tied_points
from net2gp.linear.forward.evaluation import evaluating
from net2gp.linear.linearized import Linearized, Output, Patterns, expand_prior
from net2gp.methods.training.vogn import check_trainable
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.recipes.drawn import ByDrawing, drawn_posterior
from net2gp.posteriors.recipes.members import Members
from net2gp.types import Data, Inputs, Likelihood, Params

Choice = tuple[Patterns | None, Output | None]
"""The parameters in training by name pattern, and what picks the tensor of outputs."""


@dataclass(frozen=True, eq=False)
class Task:
    """A checked problem: a network, its prior, data and a likelihood that may have open noise.

    Args:
        model: The network in eval mode with its prior; if noise is open, its likelihood has a stand-in.
        likelihood: The likelihood as it was given.
        x: All inputs.
        y: All targets.
        objective: What training minimizes, over the rows that are not held out.
        held: The held-out rows, or None.
    """

    model: Model
    likelihood: Likelihood
    x: Inputs
    y: Tensor
    objective: Objective
    held: Objective | None

    @property
    def names(self) -> list[str]:
        """The names of the parameters in training."""
        return list(self.model.params)

    @property
    def output(self) -> Output | None:
        """What picks the tensor of outputs."""
        return self.model.architecture.output

    def posterior(self, optima: Sequence[Optimum], method: str) -> Posterior:
        """Put what training found into one posterior.

        Args:
            optima: Trained networks, in the order of the members.
            method: The name of the method.

        Returns:
            A posterior over the networks. Learned noise is averaged over them, which keeps the variance of
            the mixture of their predictions.
        """
        states: Params = {
            name: torch.cat([one.state[name] for one in optima]) for name in optima[0].state
        }
        statistics = {
            name: torch.cat([one.statistics[name] for one in optima])
            for name in optima[0].statistics
        }
        likelihood = self.likelihood
        noises = [one.noise for one in optima if one.noise is not None]
        if noises and has_open_noise(likelihood):
            statistics["noise_var"] = torch.cat(noises)
            likelihood = likelihood.with_noise(float(statistics["noise_var"].mean()))
        first = {name: value[0] for name, value in states.items()}
        architecture = placed(self.model.architecture, first)
        moved = [n for n, v in states.items() if n in self.model.params or (v != v[:1]).any()]
        members = Members(architecture, {name: states[name] for name in moved})
        recipe = ByDrawing(method, statistics=statistics)
        data = (self.x, self.y)
        return drawn_posterior(members, likelihood, data, prior=self.model.prior, recipe=recipe)


def prepare(
    network: nn.Module,
    data: Data,
    likelihood: Likelihood,
    prior: WeightPrior | float | None,
    choice: Choice,
    training: Training | None,
) -> Task:
    """Check the arguments of a method that trains.

    Args:
        network: The network, which is copied.
        data: The data.
        likelihood: How targets follow outputs; Gaussian noise may be open.
        prior: As in `Model.of`.
        choice: The parameters in training, and the output.
        training: The settings; None for the defaults.

    Returns:
        The task.

    Raises:
        InputError: If an argument is of the wrong kind, or the targets do not fit.
    """
    if not isinstance(network, nn.Module):
        raise InputError(f"network must be an nn.Module, but is {describe(network)}.")
    check_training(training)
    check_trainable(network)
    settings = Training() if training is None else training
    only, output = choice
    architecture = architecture_of(copy.deepcopy(network).eval(), only, output)
    check_likelihood(likelihood)
    closed = likelihood.with_noise(1.0) if has_open_noise(likelihood) else likelihood
    model = Model.of(architecture, closed, prior)
    x, y = gather(data, architecture.example)
    architecture.check(x)
    f = architecture(rows(x, slice(0, 3)))
    likelihood.check(f.new_zeros(num_rows(x), f.shape[1]), y)
    kept, held = _divided(x, y, likelihood, settings, architecture)
    given, variances = model.prior, None
    if isinstance(given, NormalPrior):
        variances = expand_prior(given.variance, architecture.params)
    return Task(model, likelihood, x, y, replace(kept, prior=given, variances=variances), held)


def check_training(training: Training | None) -> None:
    """Raise unless this is `Training(...)` or None."""
    if training is not None and not isinstance(training, Training):
        raise InputError(
            f"training must be Training(...) or None, but is {describe(training)}. Pass for example "
            "training=net2gp.bayes.Training(num_steps=1000)."
        )


def check_flags(options: Any, names: Sequence[str]) -> None:
    """Raise unless the named options are True or False, and `vectorize` one of these or None."""
    for name in names:
        check_flag(options.get(name, False), name)
    if options.get("vectorize") is not None:
        check_flag(options["vectorize"], "vectorize")


def _divided(
    x: Inputs, y: Tensor, likelihood: Likelihood, training: Training, architecture: Linearized
) -> tuple[Objective, Objective | None]:
    """The rows to train on, and the held-out rows."""
    chosen = training.held_out
    if chosen is None:
        return Objective(x, y, likelihood), None
    if not isinstance(chosen, float | int):
        if tied_points(likelihood) is not None:
            raise InputError(
                "the likelihood holds the noise of each training point and not of the points in held_out. "
                "Pass a share of the data, as Training(held_out=0.1)."
            )
        other, targets = gather(chosen, architecture.example)
        architecture.check(other, "held_out")
        held = Objective(other, targets, likelihood)
        likelihood.check(architecture(other), targets)
        return Objective(x, y, likelihood), held
    N = num_rows(x)
    count = max(1, round(chosen * N))
    if count >= N:
        raise InputError(f"held_out={chosen} leaves none of the {N} rows to train on. Pass less.")
    order = torch.randperm(N, generator=torch.Generator().manual_seed(training.seed)).to(y.device)
    parts = (order[count:].sort().values, order[:count].sort().values)
    kept, held = (Objective(rows(x, part), y[part], of_points(likelihood, part)) for part in parts)
    return kept, held


def placed(architecture: Linearized, values: Params) -> Linearized:
    """A linearization with other parameters and buffers, in a module of its own that has them too.

    Args:
        architecture: The linearization.
        values: Values by name; what is not named stays.

    Returns:
        The new linearization, whose module is in eval mode.
    """
    network = copy.deepcopy(architecture.network).eval()
    params = {n: values.get(n, v).detach().clone() for n, v in architecture.params.items()}
    frozen = {n: values.get(n, v).detach().clone() for n, v in architecture.frozen.items()}
    known = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    with torch.no_grad():
        for name, value in {**params, **frozen}.items():
            known[name].copy_(value)
    return linearize_like(architecture, network, params, frozen)


def linearize_like(
    architecture: Linearized, network: nn.Module, params: Params, frozen: Params
) -> Linearized:
    """A linearization of another module of the same architecture, with fresh plans."""
    with evaluating(network):
        found = Linearized(network, params, frozen, architecture.output)
    found.trust()
    return found
