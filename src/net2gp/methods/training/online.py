"""Train a network while the marginal likelihood chooses its weight decay and noise."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from net2gp.errors import EmptyClass, InputError, NotAvailable, check_count, check_positive
from net2gp.inputs import gather, num_rows, rows
from net2gp.likelihoods.places import EachPlace
from net2gp.likelihoods.traits import (
    has_one_class,
    has_open_link,
    has_open_noise,
    of_points,
)
from net2gp.linear import linearize
from net2gp.linear.forward.calls import recordable, recording
from net2gp.linear.linearized import expand_prior
from net2gp.linear.precision import check_full
from net2gp.methods.laplace_approximation.laplace import laplace
from net2gp.methods.laplace_approximation.search import Search, Tuned
from net2gp.methods.laplace_approximation.task import make_task, owned
from net2gp.methods.laplace_approximation.tuning import Evidence
from net2gp.methods.training.vogn import check_trainable
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.weights import Kron, Structure
from net2gp.progress import progress
from net2gp.types import Data, Inputs, Likelihood, Params

CHECKED_POINTS = 8
"""Points whose targets are checked before the training."""

STEP = 0.5
"""How far the logarithms of the hyper-parameters go, of the way to the largest evidence."""


@dataclass(frozen=True)
class Schedule:
    """How a network is trained by Adam, and when its hyper-parameters are chosen.

    Args:
        num_epochs: How many passes over the data.
        batch_size: How many points each step takes.
        learning_rate: The learning rate at the start; it falls to a hundredth along a cosine.
        every: After how many epochs prior variances and noise are chosen again.
        burn_in: How many epochs go by before they are chosen for the first time.
        seed: The seed of the order of the points.

    Raises:
        InputError: An option is not a positive number, or `burn_in` is negative.
    """

    num_epochs: int = 100
    batch_size: int = 128
    learning_rate: float = 1e-3
    every: int = 5
    burn_in: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        for name, example in (("num_epochs", 100), ("batch_size", 128), ("every", 5)):
            check_count(getattr(self, name), name, example=example)
        check_positive(self.learning_rate, "learning_rate")
        if isinstance(self.burn_in, bool) or not isinstance(self.burn_in, int) or self.burn_in < 0:
            raise InputError(
                f"burn_in must be a whole number of epochs, zero or more, but is {self.burn_in!r}. "
                "Pass for example burn_in=10."
            )


@recording()
def train_by_evidence(
    network: nn.Module,
    data: Data,
    likelihood: Likelihood,
    *,
    structure: Structure | None = None,
    schedule: Schedule | None = None,
    tuning: Evidence | None = None,
) -> Posterior:
    """Train `network` in place; its prior variances, one per layer, and its noise are learned on the way.

    Epochs of Adam on −log p(y | θ) + ½ Σ θ²/prior_var alternate with steps of the hyper-parameters towards
    the largest Laplace evidence at the present θ. It takes no validation data and no search over weight
    decays. Beside the training it costs one curvature each time that the hyper-parameters are chosen.

    Args:
        network: The network, whose parameters are changed.
        data: The training data, a pair (x, y) or a `DataLoader`.
        likelihood: How targets follow the outputs; the noise of `Gaussian()` is learned.
        structure: What of the precision is kept, over all weights: `Full()`, `Diagonal()`, `Kron()` or one of
            your own. None means `Kron()`.
        schedule: How the network is trained; None means `Schedule()`.
        tuning: How the hyper-parameters are chosen; None means `Evidence(per_layer=True)`.

    Returns:
        The posterior of the trained network, with its evidence.

    Raises:
        InputError: `structure`, `schedule` or `tuning` is of another kind.

    >>> from net2gp.likelihoods import Gaussian
    >>> _ = torch.manual_seed(0)
    >>> network = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
    >>> x = torch.linspace(-2, 2, 50)[:, None]
    >>> y = x.sin() + 0.1 * torch.randn(50, 1)
    >>> schedule = Schedule(num_epochs=200, learning_rate=0.02)
    >>> posterior = train_by_evidence(network, (x, y), Gaussian(), schedule=schedule)
    >>> 0.005 < posterior.likelihood.noise_var < 0.03  # the noise variance was 0.01
    True

    Reference: Immer et al., Scalable marginal likelihood estimation for model selection in deep learning,
    ICML 2021.
    """
    plan, chosen = Schedule() if schedule is None else schedule, structure or Kron()
    how = Evidence(per_layer=True) if tuning is None else tuning
    if not isinstance(how, Evidence):
        raise InputError(f"tuning must be Evidence(), but is {how!r}.")
    if not isinstance(plan, Schedule):
        raise InputError(f"schedule must be Schedule(num_epochs=100) or None, but is {plan!r}.")
    _check_structure(chosen)
    check_trainable(network)
    check_full(network)
    x, y = gather(data)
    _check_points(likelihood, y)
    x, y = recordable(x), y.clone() if y.is_inference() else y
    _check_targets(network, x, y, likelihood)
    optimizer = torch.optim.Adam(network.parameters(), plan.learning_rate)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, plan.num_epochs, 0.01 * plan.learning_rate
    )
    found: Tuned | None = None
    logs: np.ndarray | None = None
    generator = torch.Generator().manual_seed(plan.seed)
    with progress("epochs", plan.num_epochs) as advance:
        for epoch in range(plan.num_epochs):
            objective = _Objective(found, likelihood, num_rows(x))
            loss = _epoch(network, (x, y), optimizer, objective, plan.batch_size, generator)
            decay.step()
            if epoch >= plan.burn_in and (epoch - plan.burn_in) % plan.every == 0:
                logs, found = _step(_search(network, (x, y), likelihood, chosen, how), logs)
            advance(note=f"loss {loss:.4f}")
    network.eval()
    if found is None:
        return laplace(network, (x, y), likelihood, structure=chosen, tuning=how)
    final, prior = found.likelihood, found.prior_var
    left = Evidence() if has_open_link(final) else None  # which keeps the link, as training had it
    return laplace(network, (x, y), final, prior_var=prior, structure=chosen, tuning=left)


def _check_targets(network: nn.Module, x: Inputs, y: Tensor, likelihood: Likelihood) -> None:
    """Raise what is wrong with the targets of some points, before any step is taken."""
    few = slice(0, CHECKED_POINTS)
    own = of_points(likelihood, few)
    own = own.with_noise(1.0) if has_open_noise(own) else own
    own.check(linearize(network.eval())(rows(x, few)), y[few])


def _check_points(likelihood: Likelihood, y: Tensor) -> None:
    """Raise if targets are at places of a point."""
    most = 1 if has_one_class(likelihood) else 2
    if isinstance(likelihood, EachPlace) or (y.dim() > most and y[0].numel() > 1):
        raise NotAvailable(
            f"train_by_evidence has targets for points, not for places of them, but y is {tuple(y.shape)}. "
            "Train the network yourself, and pass it to laplace(network, (x, y), likelihood, "
            "tuning=net2gp.tuning.Evidence(per_layer=True), structure=net2gp.Kron())."
        )


def _check_structure(structure: object) -> None:
    """Raise unless the evidence is of all weights, with a prior variance for each layer."""
    traits = structure.traits() if isinstance(structure, Structure) else None
    if traits is None or not (traits.all_weights and traits.any_prior):
        raise InputError(
            "structure must be Kron(), Full(), Diagonal(), one of your own over all weights, or None, but is "
            f"{structure!r}."
        )


@dataclass(frozen=True, eq=False)
class _Objective:
    """−log p(y | θ)/N + ½ Σ θ²/(N·prior_var), at the hyper-parameters that were found last."""

    found: Tuned | None
    likelihood: Likelihood
    num_points: int

    def __call__(self, f: Tensor, y: Tensor, params: Params) -> Tensor:
        """The loss of a batch."""
        likelihood = self.likelihood if self.found is None else self.found.likelihood
        if has_open_noise(likelihood):
            likelihood = likelihood.with_noise(1.0)
        loss = -likelihood.log_prob(f, y).mean()
        if self.found is None:
            return loss
        prior = expand_prior(self.found.prior_var, params)
        distance = sum((p.square() / prior[name]).sum() for name, p in params.items())
        return loss + 0.5 * distance / self.num_points


def _epoch(
    network: nn.Module,
    data: tuple[Inputs, Tensor],
    optimizer: torch.optim.Optimizer,
    objective: _Objective,
    batch_size: int,
    generator: torch.Generator,
) -> float:
    """One pass over the data in a random order; the mean loss."""
    network.train()
    x, y = data
    total = 0.0
    params: Params = dict(network.named_parameters())
    for index in torch.randperm(num_rows(x), generator=generator).split(batch_size):
        index = index.to(y.device)
        part = rows(x, index)
        optimizer.zero_grad()
        arguments = (part,) if isinstance(part, Tensor) else tuple(part)
        out = network(**part) if isinstance(part, Mapping) else network(*arguments)
        loss = objective(out.reshape(len(index), -1), y[index], params)
        loss.backward()
        optimizer.step()
        total += float(loss.detach()) * len(index)
    return total / num_rows(x)


def _search(
    network: nn.Module,
    data: tuple[Inputs, Tensor],
    likelihood: Likelihood,
    structure: Structure,
    tuning: Evidence,
) -> Search:
    network.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EmptyClass)  # said once, at the end
        task, chosen = make_task(network, owned(data), likelihood, structure)
    return Search(task, chosen.curvature(task), chosen, tuning)


def _step(search: Search, logs: np.ndarray | None) -> tuple[np.ndarray, Tuned]:
    best = search.maximize()
    moved = best if logs is None else logs + STEP * (best - logs)
    return moved, search.at(moved)
