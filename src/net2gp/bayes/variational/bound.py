"""The evidence lower bound of a Gaussian over weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import vmap

from net2gp.bayes.model.model import Batch, Model, checked_data
from net2gp.bayes.variational.gaussian_weights import GaussianWeights
from net2gp.bayes.variational.noisy_pass import Estimator, NoisyPass, Spread, Uses, find_uses, run
from net2gp.calling import lacks_vmap
from net2gp.errors import InputError, check_count, check_generator
from net2gp.inputs import describe, map_inputs, num_rows
from net2gp.linalg.chance import normal_like
from net2gp.linear.forward.evaluation import evaluating, without_checkpoints
from net2gp.linear.forward.modes import in_eval_mode
from net2gp.types import Inputs, Likelihood, Params

ESTIMATORS = ("local", "flipout", "weights")


@dataclass(frozen=True, eq=False)
class Passes:
    """Passes of a model's network with Gaussian weights.

    Args:
        model: The network, prior and likelihood.
        estimator: How a pass draws.
        uses: How the network uses its parameters.
    """

    model: Model
    estimator: Estimator
    uses: Uses = field(repr=False)

    @classmethod
    def of(cls, model: Model, estimator: Estimator, x: Inputs) -> Passes:
        """See how the network uses its parameters at the first point.

        Raises:
            InputError: If the estimator is not known.
            NetworkError: If the network cannot take the inputs.
        """
        if not isinstance(estimator, str) or estimator not in ESTIMATORS:
            raise InputError(
                f'estimator must be "local", "flipout" or "weights", but is {estimator!r}.'
            )
        uses = Uses(frozenset(), True)
        if estimator != "weights":
            with in_eval_mode(model.architecture, x), without_checkpoints():
                uses = find_uses(model.architecture, x)
        return cls(model, "weights" if uses.hidden else estimator, uses)

    def outputs(
        self, means: Params, spread: Spread, x: Inputs, generator: torch.Generator
    ) -> Tensor:
        """Draw f(x_n; θ) with θ ~ N(μ, diag σ²), (N, C), within `running`; the law at each point is exact.

        Args:
            means: The means μ, by name.
            spread: The variances or standard deviations.
            x: N points.
            generator: Draws the noise.
        """
        network = self.model.architecture
        x = map_inputs(x, torch.clone)  # a network may change its inputs in place
        if self.estimator == "weights":
            draws = {
                n: torch.addcmul(m, spread.deviation(n), normal_like(m, generator))
                for n, m in means.items()
            }
            return run(network, draws, x)
        with NoisyPass(means, spread, self.uses, self.estimator, num_rows(x), generator):
            return run(network, means, x)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Keep the network in eval mode, without checkpoints and with dense gradients within this context."""
        network = self.model.architecture.network
        with evaluating(network), without_checkpoints():
            lookups = (
                m for m in network.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)
            )
            sparse = [module for module in lookups if module.sparse]
            for module in sparse:
                module.sparse = False
            try:
                yield
            finally:
                for module in sparse:
                    module.sparse = True

    def log_likelihood(
        self,
        means: Params,
        spread: Spread,
        batch: Batch,
        likelihood: Likelihood,
        generator: torch.Generator,
        num_samples: int,
    ) -> Tensor:
        """Estimate (N/B) Σ_n E_q log p(y_n | f(x_n; θ)) as the average over passes, without bias."""
        x, y = batch
        share = 1.0 if self.model.num_data is None else self.model.num_data / num_rows(x)

        def once(_: Tensor | None = None) -> Tensor:
            return likelihood.log_prob(self.outputs(means, spread, x, generator), y).sum()

        if num_samples == 1:
            return share * once()
        try:
            dummy = torch.zeros(num_samples, device=generator.device)
            return share * vmap(once, randomness="different")(dummy).mean()
        except (RuntimeError, NotImplementedError) as error:
            if not lacks_vmap(error):
                raise
        return share * torch.stack([once() for _ in range(num_samples)]).mean()


def elbo(
    weights: GaussianWeights,
    model: Model,
    batch: Batch,
    *,
    estimator: Estimator = "local",
    num_samples: int = 1,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Estimate the bound L(q) = E_q[log p(y | θ) + log p(θ)]/T + H(q) ≤ log ∫ p(y, θ)^(1/T) dθ.

    At the temperature T = 1 it is E_q log p(y | θ) − KL(q ‖ p), a lower bound of the log evidence. The
    expectation of the prior is in closed form for Gaussian priors. A batch of B of the model's `num_data`
    points counts N/B times, so the estimate has no bias for a random batch. It is differentiable in the
    mean and variance of q.

    Args:
        weights: The law q of the parameters.
        model: The network, prior and likelihood.
        batch: Inputs and targets.
        estimator: How a pass draws: see `mean_field`.
        num_samples: The number of passes S.
        generator: Makes the draws repeatable. None seeds them by zero.

    Returns:
        A scalar, the average over the passes.

    Raises:
        InputError: If the estimator is not known.

    >>> from net2gp.likelihoods import Gaussian
    >>> x = torch.ones(1, 1)
    >>> model = Model.of(nn.Linear(1, 1, bias=False), Gaussian(noise_var=1.0))
    >>> best = GaussianWeights({"weight": 0.5 * x}, {"weight": 0.5 * x})  # the posterior itself
    >>> bound = elbo(best, model, (x, x), num_samples=1000)
    >>> bool((bound + 1.5155).abs() < 0.05)  # log N(1; 0, 2)
    True

    Reference: Blundell et al., Weight uncertainty in neural networks, ICML 2015.
    """
    check_count(num_samples, "num_samples")
    check_generator(generator)
    if not isinstance(weights, GaussianWeights) or not isinstance(model, Model):
        raise InputError(
            "elbo takes a GaussianWeights, a Model and a batch, but got "
            f"{describe(weights)} and {describe(model)}."
        )
    batch = checked_data(model, batch)
    like = next(iter(weights.mean.values()))
    generator = generator or torch.Generator(like.device).manual_seed(0)
    passes = Passes.of(model, estimator, batch[0])
    spread = Spread(weights.variance, squared=True)
    with passes.running():
        fitted = passes.log_likelihood(
            weights.mean, spread, batch, model.likelihood, generator, num_samples
        )
    prior = weights.expected_log_prior(model.prior, num_samples=num_samples, generator=generator)
    return (fitted + prior) / model.temperature + weights.entropy()
