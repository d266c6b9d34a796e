"""Stochastic gradient ascent of the evidence lower bound in the mean and the deviations of a Gaussian."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from net2gp.bayes.model.model import Batch
from net2gp.bayes.model.prior import NormalPrior
from net2gp.bayes.variational.bound import Passes
from net2gp.bayes.variational.gaussian_weights import GaussianWeights
from net2gp.bayes.variational.noisy_pass import Spread
from net2gp.errors import InputError, check_count, check_positive, check_seed
from net2gp.inputs import describe, num_rows, rows
from net2gp.likelihoods.traits import GaussianNoise, of_points
from net2gp.linalg.chance import normal_like
from net2gp.linear.linearized import Linearized
from net2gp.linear.parameters import expand_prior
from net2gp.progress import progress
from net2gp.types import Inputs, Likelihood, Params

CHECK = 50
"""The number of steps between two looks at the bound, which wait for the device and let other threads run."""


@dataclass(frozen=True)
class Settings:
    """The options of `mean_field`, which has the meaning of each."""

    num_steps: int = 2000
    batch_size: int | None = None
    learning_rate: float = 1e-2
    optimizer: Callable[[list[Tensor]], Optimizer] | None = None
    schedule: Callable[[Optimizer], LRScheduler] | None = None
    num_samples: int = 1
    num_draws: int = 64
    initial_var: float = 1e-4
    patience: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_steps", "num_samples", "num_draws"):
            check_count(getattr(self, name), name)
        for name in ("batch_size", "patience"):
            if getattr(self, name) is not None:
                check_count(getattr(self, name), name)
        check_positive(self.learning_rate, "learning_rate", single=True)
        check_positive(self.initial_var, "initial_var", single=True)
        check_seed(self.seed)
        for name, example in (
            ("optimizer", "lambda tensors: torch.optim.SGD(tensors, lr=0.01)"),
            ("schedule", "lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 100)"),
        ):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise InputError(
                    f"{name} must be a function, but is {describe(getattr(self, name))}. Pass for example "
                    f"{name}={example}."
                )

    def start(self, leaves: list[Tensor]) -> tuple[Optimizer, LRScheduler | None]:
        """Make the optimizer and its schedule."""
        if self.optimizer is not None:
            made = self.optimizer(leaves)
            if not isinstance(made, Optimizer):
                raise InputError(
                    f"optimizer must return a torch optimizer, but returned {describe(made)}. Pass for "
                    "example optimizer=lambda tensors: torch.optim.SGD(tensors, lr=0.01)."
                )
            return made, None if self.schedule is None else self.schedule(made)
        fused = leaves[0].device.type in ("cpu", "cuda")
        adam = torch.optim.Adam(leaves, lr=self.learning_rate, fused=fused)
        if self.schedule is not None:
            return adam, self.schedule(adam)
        return adam, torch.optim.lr_scheduler.CosineAnnealingLR(adam, self.num_steps)


@dataclass(frozen=True, eq=False)
class Fit:
    """What a fit found.

    Args:
        weights: The law q of the parameters.
        likelihood: The likelihood, with the noise that was learned.
        bounds: The estimated bound of each step.
    """

    weights: GaussianWeights
    likelihood: Likelihood
    bounds: Tensor = field(repr=False)


def fit(passes: Passes, data: Batch, settings: Settings, *, open_noise: bool) -> Fit:
    """Maximize the bound.

    Args:
        passes: Draws outputs of the network.
        data: All inputs and targets.
        settings: The options.
        open_noise: Whether the variance of the likelihood's Gaussian noise is learned.

    Returns:
        The law of the parameters, the likelihood and the course of the bound.

    Raises:
        InputError: If the bound becomes infinite or NaN.
    """
    ascent = Ascent.of(passes, data, settings, open_noise)
    optimizer, schedule = settings.start(ascent.leaves)
    generator = torch.Generator(ascent.mean.device).manual_seed(settings.seed)
    bounds: list[Tensor] = []
    with progress("mean field", settings.num_steps) as advance, torch.enable_grad():
        stream, converged = _batches(data, settings, passes.model.likelihood), False
        while len(bounds) < settings.num_steps and not converged:
            before = len(bounds)
            with passes.running():
                for batch in islice(stream, CHECK):
                    bounds.append(_step(ascent, optimizer, batch, generator))
                    if schedule is not None:
                        schedule.step()
                    converged = _has_converged(bounds, settings.patience)
                    if converged:
                        break
            _check(bounds)
            advance(len(bounds) - before, note=f"bound {float(bounds[-1]):.4g}")
    return Fit(ascent.weights(), ascent.likelihood_found(), torch.stack(bounds))


@dataclass(frozen=True, eq=False)
class Ascent:
    """The tensors that an ascent moves, and the bound as a function of them.

    Args:
        passes: Draws outputs of the network.
        settings: The options.
        mean: The means μ, flat: (P,).
        log_deviation: log σ, flat: (P,).
        log_noise: The logarithm of the noise variance, or None if it is given.
        precision: The inverse variances of a Gaussian prior, one number or flat, or None for another prior.
    """

    passes: Passes
    settings: Settings
    mean: Tensor
    log_deviation: Tensor
    log_noise: Tensor | None
    precision: Tensor | None

    @classmethod
    def of(cls, passes: Passes, data: Batch, settings: Settings, open_noise: bool) -> Ascent:
        """Start at the parameters of the network, and with the noise of its residuals."""
        model = passes.model
        network = model.architecture
        mean = network.flatten(network.params).detach().clone().requires_grad_()
        log_deviation = torch.full_like(mean, 0.5 * math.log(settings.initial_var))
        log_noise = None
        if open_noise:
            # with unit noise the residual is y − f itself
            residual = model.likelihood.residual(network(data[0]), data[1])
            least = torch.finfo(mean.dtype).eps
            log_noise = residual.detach().square().mean().clamp_min(least).log().requires_grad_()
        wide = None
        if isinstance(model.prior, NormalPrior):
            parts = expand_prior(model.prior.variance, network.params)
            each = {n: v.expand_as(network.params[n]) for n, v in parts.items()}
            one = isinstance(model.prior.variance, int | float)
            wide = 1 / (next(iter(parts.values())) if one else network.flatten(each))
        return cls(passes, settings, mean, log_deviation.requires_grad_(), log_noise, wide)

    @property
    def leaves(self) -> list[Tensor]:
        """The tensors that move."""
        noise = [] if self.log_noise is None else [self.log_noise]
        return [self.mean, self.log_deviation, *noise]

    def climb(self, batch: Batch, likelihood: Likelihood, generator: torch.Generator) -> Tensor:
        """Set the gradients of −bound/N, estimated from a batch, and return the bound.

        The entropy and a Gaussian prior have gradients in closed form. Autograd would pass over all
        parameters several times as often for them.
        """
        model = self.passes.model
        network, size = model.architecture, model.num_data or num_rows(batch[0])
        # "local" needs variances and the others need deviations; power is the exponent of σ
        power = 2 if self.passes.estimator == "local" else 1
        wide = self.log_deviation.detach().mul(power).exp_().requires_grad_()
        means, spread = network.unflatten(self.mean), Spread(network.unflatten(wide), power == 2)
        if self.log_noise is not None:
            likelihood = cast(GaussianNoise, likelihood).with_noise(self.log_noise.exp())
        count = self.settings.num_samples
        drawn = self.passes.log_likelihood(means, spread, batch, likelihood, generator, count)
        if self.precision is None and model.prior is not None:
            drawn = drawn + self._drawn_prior(means, spread, generator)
        scale = 1 / (size * model.temperature)
        (-scale * drawn).backward()
        with torch.no_grad():
            assert self.mean.grad is not None
            assert wide.grad is not None
            bound = drawn.detach() / model.temperature + self._entropy()
            if self.precision is not None:
                variance = wide if power == 2 else wide.square()
                bound = bound + self._closed_prior(variance) / model.temperature
                self.mean.grad.addcmul_(self.mean, self.precision, value=scale)
                # σ²/2s² has the derivative 1/2s² in σ², and σ/s² in σ
                if power == 2:
                    wide.grad.add_(self.precision, alpha=0.5 * scale)
                else:
                    wide.grad.addcmul_(wide, self.precision, value=scale)
            least = wide.new_tensor(-1 / size)
            slope = wide.grad
            self.log_deviation.grad = torch.addcmul(least, slope, wide, value=power, out=slope)
        return bound

    def _entropy(self) -> Tensor:
        constant = 0.5 * len(self.mean) * math.log(2 * math.pi * math.e)
        return self.log_deviation.detach().sum() + constant

    def _closed_prior(self, variance: Tensor) -> Tensor:
        """E_q log p(θ) for a Gaussian prior."""
        assert self.precision is not None
        logs = math.log(2 * math.pi) - self.precision.log()
        if self.precision.dim():
            both = torch.addcmul(variance, self.mean, self.mean)
            return -0.5 * (torch.dot(both, self.precision) + logs.sum())
        total = variance.sum() + torch.dot(self.mean, self.mean)
        return -0.5 * (total * self.precision + len(variance) * logs)

    def _drawn_prior(self, means: Params, spread: Spread, generator: torch.Generator) -> Tensor:
        prior = self.passes.model.prior
        assert prior is not None
        draws = [
            prior.log_prob(
                {n: m + spread.deviation(n) * normal_like(m, generator) for n, m in means.items()}
            )
            for _ in range(self.settings.num_samples)
        ]
        return torch.stack(draws).mean()

    def weights(self) -> GaussianWeights:
        """The present law q."""
        network: Linearized = self.passes.model.architecture
        variance = (2 * self.log_deviation.detach()).exp()
        flat = (self.mean.detach().clone(), variance.clamp_min(torch.finfo(variance.dtype).tiny))
        return GaussianWeights(*(network.unflatten(one) for one in flat))

    def likelihood_found(self) -> Likelihood:
        """The likelihood with the present noise."""
        likelihood = self.passes.model.likelihood
        if self.log_noise is None:
            return likelihood
        return cast(GaussianNoise, likelihood).with_noise(float(self.log_noise.detach().exp()))


def _step(
    ascent: Ascent,
    optimizer: Optimizer,
    batch: tuple[Inputs, Tensor, Likelihood],
    generator: torch.Generator,
) -> Tensor:
    """Take one step and return the bound in front of it."""
    x, y, likelihood = batch
    size = ascent.passes.model.num_data or num_rows(x)
    kept: list[Tensor] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        kept.append(ascent.climb((x, y), likelihood, generator))
        return -kept[-1] / size

    optimizer.step(closure)  # type: ignore[arg-type]
    return kept[0]


def _batches(
    data: Batch, settings: Settings, likelihood: Likelihood
) -> Iterator[tuple[Inputs, Tensor, Likelihood]]:
    """Batches for all steps; each epoch has an order of its own, and its last batch may be smaller."""
    (x, y), done = data, 0
    count, size = num_rows(x), settings.batch_size or num_rows(x)
    # Orders have a generator of their own, so that they do not depend on what a step draws.
    generator = torch.Generator().manual_seed(settings.seed)
    while size >= count:
        if done == settings.num_steps:
            return
        yield x, y, likelihood
        done += 1
    while True:
        for part in torch.randperm(count, generator=generator).to(y.device).split(size):
            if done == settings.num_steps:
                return
            yield rows(x, part), y[part], of_points(likelihood, part)
            done += 1


def _check(bounds: list[Tensor]) -> None:
    last = torch.stack(bounds[-CHECK:])
    if not bool(last.isfinite().all()):
        step = len(bounds) - len(last) + int((~last.isfinite()).nonzero()[0])
        raise InputError(
            f"the bound became infinite or NaN at step {step}: the steps are too large. Pass a smaller "
            "learning_rate, and standardize inputs and targets."
        )


def _has_converged(bounds: list[Tensor], patience: int | None) -> bool:
    """Whether the last steps together did not raise the bound."""
    if patience is None or len(bounds) % patience or len(bounds) < 2 * patience:
        return False
    new, old = bounds[-patience:], bounds[-2 * patience : -patience]
    return bool(torch.stack(new).mean() <= torch.stack(old).mean())
