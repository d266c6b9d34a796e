"""Ensembles: networks of one architecture that were trained from independent starts."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TypedDict, Unpack

import torch
from torch import nn
from torch.func import grad

from net2gp.bayes.model.prior import NormalPrior, WeightPrior
from net2gp.bayes.optimum.crew import Crew, perceptrons
from net2gp.bayes.optimum.descent import Optimum, descend
from net2gp.bayes.optimum.objective import Objective
from net2gp.bayes.optimum.settings import Training
from net2gp.bayes.optimum.starts import Factory, check_alike, member_seeds, starts
from net2gp.bayes.optimum.task import Task, check_flags, check_training, prepare
from net2gp.bayes.optimum.teams import Single
from net2gp.errors import InputError
from net2gp.inputs import ordinary_tensors
from net2gp.keywords import check_known, lists
from net2gp.likelihoods.targets import shape_targets
from net2gp.likelihoods.traits import has_gaussian_noise
from net2gp.linalg.chance import random_normal
from net2gp.linear.linearized import Output, Patterns
from net2gp.posteriors.posterior import Posterior
from net2gp.types import Data, Likelihood, Params


class Options(TypedDict, total=False):
    """The options that are seldom changed: see `ensemble`."""

    randomized: bool
    bootstrap: bool
    snapshots: bool
    vectorize: bool | None


@lists(randomized=False, bootstrap=False, snapshots=False, vectorize=None)
@ordinary_tensors()
def ensemble(
    network: nn.Module | Factory,
    data: Data,
    likelihood: Likelihood,
    *,
    num_members: int = 5,
    prior: WeightPrior | float | None = 1.0,
    only: Patterns | None = None,
    output: Output | None = None,
    training: Training | None = None,
    **options: Unpack[Options],
) -> Posterior:
    """Train several networks from independent starts; their average predicts better than each of them.

    Independent optima are no draws from the posterior. With few data they agree more than the posterior
    does: on 40 points and 20 tanh units, 5 members have 0.06 of the standard deviations of NUTS between the
    data and 0.15 outside. `randomized=True` gives the spread of a Gaussian process (0.93 and 0.81 there).

    Every member maximizes the log joint as in `map_estimate`, on batches of its own. Members share vectorized
    passes, which are many times faster for small perceptrons, unless batch norm or the like forbids it, or
    they are convolutional or large; then they train one after the other. Both ways give the same networks,
    except that dropout draws other masks.

    With `randomized`, member s minimizes −log p(θ − a_s) − Σ_n log p(y_n + ε_n | f(x_n; θ)), where a_s is
    drawn from the prior and ε_n from the Gaussian noise. For a model that is linear in θ the members are then
    exact draws from the posterior. Other likelihoods keep their targets.

    Args:
        network: A network, whose layers are initialized again for each member by their `reset_parameters`, or
            a function that makes a network in each call. It is not changed.
        data: The data, (x, y) or a DataLoader.
        likelihood: How targets follow the outputs; `Gaussian()` learns the noise, which is averaged over the
            members.
        num_members: The number of members S.
        prior: The prior of the parameters, as in `map_estimate`.
        only: The parameters to draw and to train, by name pattern; None takes all.
        output: Picks the tensor of outputs from what the network returns.
        training: Optimizer, schedule, batches and early stopping of each member; None is `Training()`.
        randomized: Whether to anchor members at draws of a Gaussian prior and to perturb their targets.
        bootstrap: Whether each member gets N rows that are drawn with replacement.
        snapshots: Whether to train one network instead, whose learning rate falls and restarts S times within
            `training.num_steps`, and to keep it at the end of each cycle.
        vectorize: Whether members share vectorized passes; None decides by what fits and is fast.

    Returns:
        A posterior over the members. `module_of(posterior, s)` is member s, and `recipe.statistics` has its
        log joint, its number of steps, and its held-out loss and noise if there are such.

    Raises:
        InputError: If options contradict each other or the data, or a training diverges.
        NetworkError: If a layer cannot be initialized again, or a factory makes unlike networks.

    >>> from net2gp.likelihoods import Gaussian
    >>> x = torch.linspace(-1, 1, 20)[:, None]
    >>> network = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    >>> posterior = ensemble(network, (x, x.sin()), Gaussian(), training=Training(num_steps=200))
    >>> far, near = posterior.marginal(torch.tensor([[4.0], [0.5]])).variance.flatten()
    >>> bool(far > 10 * near)
    True

    References: Lakshminarayanan, Pritzel and Blundell, Simple and scalable predictive uncertainty estimation
    using deep ensembles, NeurIPS 2017; Pearce et al., Uncertainty in neural networks: approximately Bayesian
    ensembling, AISTATS 2020; Huang et al., Snapshot ensembles, ICLR 2017.
    """
    check_known(options, Options)
    check_flags(options, ("randomized", "bootstrap", "snapshots"))
    settings = Training() if training is None else training
    if options.get("snapshots"):
        return _snapshots(
            network, (data, likelihood, prior), (only, output), settings, num_members, options
        )
    check_training(training)
    networks = starts(network, num_members, settings.seed, only)
    task = prepare(networks[0], data, likelihood, prior, (only, output), training)
    check_alike(networks, task.model.architecture, task.x)
    objective = task.objective
    if options.get("randomized"):
        objective = randomized(task, objective, num_members, settings.seed)
    if options.get("bootstrap"):
        objective = resampled(objective, num_members, settings.seed)
    crew = Crew(task, networks, settings, options.get("vectorize"))
    return task.posterior(crew.train(objective, settings, held=task.held), "ensemble")


def randomized(task: Task, objective: Objective, count: int, seed: int) -> Objective:
    """Anchor members at draws of the prior, and perturb their targets by draws of Gaussian noise.

    Args:
        task: The checked problem.
        objective: What members minimize.
        count: The number of members S.
        seed: The seed of the draws.

    Returns:
        The objective with anchors, and with targets of each member if the noise is Gaussian.

    Raises:
        InputError: If the noise is open, or the prior is not Gaussian with mean zero.
    """
    if objective.learns:
        raise InputError(
            "randomized=True draws noise for the targets, but its variance is open. Pass for example "
            "Gaussian(noise_var=0.1), or the likelihood that map_estimate(...) found."
        )
    _check_gaussian(task)
    assert task.model.prior is not None
    params = task.model.params
    device = next(iter(params.values())).device
    generator = torch.Generator().manual_seed(seed)
    anchors = {
        name: value.to(device)
        for name, value in task.model.prior.sample(params, count, generator).items()
    }
    if not has_gaussian_noise(objective.likelihood):
        return replace(objective, anchors=anchors)
    f = torch.zeros(objective.num_rows, _num_outputs(task), dtype=objective.y.dtype, device=device)
    y = shape_targets(f, objective.y)
    noise = random_normal((count, *y.shape), generator=generator, device=device).to(y.dtype)
    targets = y + objective.likelihood.noise_variance(y).sqrt() * noise
    return replace(objective, anchors=anchors, targets=targets)


def resampled(objective: Objective, count: int, seed: int) -> Objective:
    """Give each member N rows that are drawn with replacement."""
    generator, N = torch.Generator().manual_seed(seed), objective.num_rows
    index = torch.randint(N, (count, N), generator=generator)
    return replace(objective, resampled=index.to(objective.y.device))


def _num_outputs(task: Task) -> int:
    y = task.y
    return 1 if y.dim() == 1 else y.shape[1]


def _check_gaussian(task: Task) -> None:
    """Raise unless the prior is a Gaussian around zero: its score is linear."""
    prior, params = task.model.prior, task.model.params
    if isinstance(prior, NormalPrior):
        return
    if prior is not None:
        draw = prior.sample(params, 1, torch.Generator().manual_seed(0))
        one: Params = {n: v[0].to(params[n]) for n, v in draw.items()}
        scores = [grad(prior.log_prob)({n: k * v for n, v in one.items()}) for k in (1, 2)]
        if all(torch.allclose(scores[1][n], 2 * v, rtol=1e-3) for n, v in scores[0].items()):
            return
    raise InputError(
        "randomized=True needs a Gaussian prior with mean zero, whose draws anchor the members, but the "
        f"prior is {'flat' if prior is None else type(prior).__name__}. Pass prior=1.0 or a NormalPrior."
    )


def _snapshots(
    network: nn.Module | Factory,
    problem: tuple[Data, Likelihood, WeightPrior | float | None],
    choice: tuple[Patterns | None, Output | None],
    training: Training,
    count: int,
    options: Options,
) -> Posterior:
    """One network, kept at the end of each of S cycles of its learning rate."""
    others = [name for name in ("randomized", "bootstrap", "vectorize") if options.get(name)]
    if others or count > training.num_steps:
        raise InputError(
            f"snapshots are of one network in {training.num_steps} steps, so that {others[0]}=True "
            "does not apply."
            if others
            else f"{count} snapshots need at least {count} steps, but num_steps is {training.num_steps}."
        )
    one = network if isinstance(network, nn.Module) else starts(network, 1, training.seed, None)[0]
    task = prepare(one, *problem, choice, training)
    flat = perceptrons(task, [one], training)
    team = flat or Single(copy.deepcopy(one), task.names, choice[1])
    cycle = replace(training, num_steps=training.num_steps // count)
    found: list[Optimum] = []
    for seed in member_seeds(training.seed, count):
        found.append(descend(team, task.objective, cycle, [seed], held=task.held))
    return task.posterior(found, "ensemble")
