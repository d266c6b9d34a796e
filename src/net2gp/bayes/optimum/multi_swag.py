"""Multi-SWAG: a Gaussian around each of several trained networks, from the paths of their optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from net2gp.bayes.model.prior import NormalPrior, WeightPrior
from net2gp.bayes.optimum.crew import Crew
from net2gp.bayes.optimum.objective import Objective, evaluate, score
from net2gp.bayes.optimum.settings import Training
from net2gp.bayes.optimum.starts import Factory, check_alike, starts
from net2gp.bayes.optimum.task import Task, check_flags, check_training, placed, prepare
from net2gp.bayes.optimum.teams import Single
from net2gp.calling import called
from net2gp.errors import InputError, NoMinibatches, check_count, check_positive, warn
from net2gp.inputs import chunks, num_rows, ordinary_tensors
from net2gp.keywords import check_known, lists
from net2gp.likelihoods.traits import has_open_noise
from net2gp.linear.forward.evaluation import evaluating
from net2gp.linear.linearized import Output, Patterns
from net2gp.methods.training.swag import Swag
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.recipes.around_network import around_network
from net2gp.posteriors.recipes.mixed import mixture
from net2gp.types import Data, Inputs, Likelihood


class Options(TypedDict, total=False):
    """How weights are collected: see `multi_swag`."""

    rank: int
    num_collected: int
    collect_every: int | None
    collecting_rate: float | None
    vectorize: bool | None


@lists(rank=20, num_collected=30, collect_every=None, collecting_rate=None, vectorize=None)
@ordinary_tensors()
def multi_swag(
    network: nn.Module | Factory,
    data: Data,
    likelihood: Likelihood,
    *,
    num_members: int = 5,
    prior: WeightPrior | float = 1.0,
    only: Patterns | None = None,
    output: Output | None = None,
    training: Training | None = None,
    **options: Unpack[Options],
) -> Posterior:
    """Train an ensemble, let each member wander on, and mix the Gaussians of the weights on their paths.

    Each member trains as in `ensemble`. Then it goes on with a constant learning rate, and after every
    `collect_every` steps its weights are collected into a `training.Swag`. Member m is the Gaussian
    N(θ̄_m, Σ_m) of its collected weights, with the network linearized at θ̄_m; the statistics of batch norm
    are estimated again there, from the training rows. The result is the mixture of these Gaussians. Cost: the
    ensemble's, the further steps, and (rank + 2)·P numbers per member.

    `posterior.predict(x)` uses the linearized networks, and `predict(x, samples=WeightSamples(30))` averages
    the networks themselves at drawn weights, as the paper does.

    Args:
        network: A network whose layers are initialized again for each member, or a function that makes one.
        data: The data, (x, y) or a DataLoader.
        likelihood: How targets follow the outputs; `Gaussian()` learns the noise of each member, which is
            the mean squared residual at θ̄_m.
        num_members: The number of members.
        prior: The variance of a Gaussian prior, or a `NormalPrior`.
        only: The parameters to draw, train and collect, by name pattern; None takes all.
        output: Picks the tensor of outputs from what the network returns.
        training: The first training of each member; its optimizer collects as well.
        rank: The number of recent weights that Σ_m has off its diagonal; 0 is a diagonal.
        num_collected: The number of collected weights per member.
        collect_every: The number of steps between two of them; None is one epoch.
        collecting_rate: The constant learning rate while collecting; None is the first training's.
        vectorize: Whether members share vectorized passes, as in `ensemble`.

    Returns:
        A mixture of Gaussians around networks.

    Raises:
        InputError: If the prior is not Gaussian, a number is out of range, or a training diverges.

    Warns:
        NoMinibatches: If `training.batch_size` is not smaller than the number of rows.

    >>> from net2gp.likelihoods import Gaussian
    >>> x = torch.linspace(-1, 1, 20)[:, None]
    >>> network = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    >>> training = Training(num_steps=200, batch_size=5)
    >>> posterior = multi_swag(network, (x, x.sin()), Gaussian(), num_members=2, training=training)
    >>> posterior.split(x).between.shape
    torch.Size([20, 1])

    References: Maddox et al., A simple baseline for Bayesian uncertainty in deep learning, NeurIPS 2019;
    Wilson and Izmailov, Bayesian deep learning and a probabilistic perspective of generalization, NeurIPS
    2020.
    """
    check_known(options, Options)
    check_flags(options, ())
    check_training(training)
    settings = Training() if training is None else training
    swag, count = Swag(options.get("rank", 20)), options.get("num_collected", 30)
    check_count(count, "num_collected", example=30)
    networks = starts(network, num_members, settings.seed, only)
    task = prepare(networks[0], data, likelihood, prior, (only, output), training)
    if not isinstance(task.model.prior, NormalPrior):
        raise InputError(
            "multi_swag makes Gaussians around networks, whose prior must be Gaussian too. Pass prior=1.0 or "
            "a NormalPrior."
        )
    check_alike(networks, task.model.architecture, task.x)
    every = options.get("collect_every")
    every = _steps_of_epoch(task.objective, settings) if every is None else every
    check_count(every, "collect_every")
    _check_batches(task.objective, settings)
    crew = Crew(task, networks, settings, options.get("vectorize"))
    crew.train(task.objective, settings, held=task.held)
    paths = [replace(swag, only=task.names)] * num_members

    def collect(member: int, step: int, module: Callable[[], nn.Module]) -> None:
        if step % every == 0:
            paths[member] = paths[member].collect(module())

    wandering = _wandering(settings, every * count, options.get("collecting_rate"))
    crew.train(task.objective, wandering, see=collect)
    pairs = zip(paths, networks, strict=True)
    return mixture([_around(task, path, start, settings) for path, start in pairs])


def _check_batches(objective: Objective, training: Training) -> None:
    """Warn if steps take all rows, so that only the drift of the optimizer moves a member."""
    rows, size = objective.num_rows, training.batch_size
    if size is None or size >= rows:
        warn(
            f"every step takes all {rows} rows (batch_size={size}), so that a path shows the drift of the "
            "optimizer and no noise of minibatches, and the Gaussians are too narrow. Pass for example "
            f"training=Training(batch_size={max(1, rows // 4)}), or use ensemble(..., randomized=True).",
            NoMinibatches,
        )


def _steps_of_epoch(objective: Objective, training: Training) -> int:
    return max(1, objective.num_rows // (training.batch_size or objective.num_rows))


def _wandering(training: Training, num_steps: int, rate: float | None) -> Training:
    """The training at a constant learning rate while weights are collected."""
    if rate is not None:
        check_positive(rate, "collecting_rate", single=True)
    make = training.optimizer

    def remade(leaves: list[Tensor]) -> Optimizer:
        assert make is not None
        optimizer = make(leaves)
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] if rate is None else rate
        return optimizer

    return replace(
        training,
        num_steps=num_steps,
        learning_rate=training.learning_rate if rate is None else rate,
        optimizer=None if make is None else remade,
        schedule="constant",
        seed=training.seed + 1,
    )


def _around(task: Task, path: Swag, start: nn.Module, training: Training) -> Posterior:
    """The Gaussian of the collected weights, around the network at their mean."""
    covariance = path.covariance()
    architecture = task.model.architecture
    mean = {name: value.to(architecture.example) for name, value in path.mean.items()}
    module = copy.deepcopy(start)
    module.load_state_dict(mean, strict=False)
    refresh_statistics(module, task.objective.x, training.batch_size)
    buffers = {name: value.detach() for name, value in module.named_buffers()}
    team = Single(module, task.names, task.output)
    rows = task.objective if task.held is None else task.held
    noise = score(rows, evaluate(team, rows.x, training.batch_size))[1]
    likelihood = task.likelihood
    if noise is not None and has_open_noise(likelihood):
        likelihood = likelihood.with_noise(float(noise))
    assert isinstance(task.model.prior, NormalPrior)
    prior_var = task.model.prior.variance
    found = placed(architecture, {**buffers, **mean})
    return around_network(found, covariance, prior_var, likelihood, (task.x, task.y))


@torch.no_grad()
def refresh_statistics(network: nn.Module, x: Inputs, batch_size: int | None) -> None:
    """Estimate the statistics of batch norm again, as averages over batches of rows, for new weights.

    Args:
        network: The network, which is changed; layers in eval mode keep their statistics.
        x: Inputs of N rows.
        batch_size: The number of rows of a batch; None for all at once. Rows that do not fill a batch are
            left out.
    """
    norms = [
        module
        for module in network.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        and module.training
        and module.track_running_stats
    ]
    if not norms:
        return
    kept = [norm.momentum for norm in norms]
    size = num_rows(x) if batch_size is None else min(batch_size, num_rows(x))
    with evaluating(network):
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum, norm.training = None, True  # None averages over all batches alike
        for part in chunks(x, size):
            if num_rows(part) == size:
                called(network, part, None)
        for norm, momentum in zip(norms, kept, strict=True):
            norm.momentum = momentum
