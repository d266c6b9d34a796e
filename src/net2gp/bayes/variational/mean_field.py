"""Mean-field variational inference: independent Gaussians over the weights, by stochastic gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from net2gp.bayes.model.model import Model, check_likelihood
from net2gp.bayes.model.prior import NormalPrior, WeightPrior
from net2gp.bayes.variational.ascent import Fit, Settings, fit
from net2gp.bayes.variational.bound import Passes
from net2gp.bayes.variational.gaussian_weights import GaussianWeights
from net2gp.bayes.variational.noisy_pass import Estimator
from net2gp.errors import NotAvailable
from net2gp.inputs import gather, num_rows, ordinary_tensors
from net2gp.keywords import check_known, lists
from net2gp.likelihoods.traits import has_open_noise
from net2gp.linear.linearized import Linearized, Output, Patterns, example_of
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.recipes.around_network import around_network
from net2gp.posteriors.recipes.drawn import ByDrawing, check_posterior, drawn_posterior
from net2gp.posteriors.recipes.members import Members
from net2gp.posteriors.weights.diagonal import DiagonalCovariance
from net2gp.tags import savable
from net2gp.types import Data, Likelihood


class Options(TypedDict, total=False):
    """The options that are seldom changed: see `mean_field`."""

    output: Output | None
    num_steps: int
    batch_size: int | None
    learning_rate: float
    optimizer: Callable[[list[Tensor]], Optimizer] | None
    schedule: Callable[[Optimizer], LRScheduler] | None
    num_samples: int
    num_draws: int
    initial_var: float
    patience: int | None
    seed: int


@savable("recipe.ByMeanField")
@dataclass(frozen=True, eq=False)
class ByMeanField(ByDrawing):
    """The recipe of `mean_field`: it holds the Gaussian that the networks were drawn from.

    Args:
        weights: The law q of the parameters.
    """

    weights: GaussianWeights | None = field(default=None, repr=False)

    def without_evidence(self) -> str:
        """Why there is no evidence."""
        return (
            "mean_field has a lower bound of the evidence and not the evidence itself. "
            'posterior.recipe.statistics["elbo"] has the bound at each step.'
        )


@lists(
    output=None,
    num_steps=2000,
    batch_size=None,
    learning_rate=1e-2,
    optimizer=None,
    schedule=None,
    num_samples=1,
    num_draws=64,
    initial_var=1e-4,
    patience=None,
    seed=0,
)
@ordinary_tensors()
def mean_field(
    network: nn.Module | Linearized,
    data: Data,
    likelihood: Likelihood,
    *,
    prior: WeightPrior | float | None = 1.0,
    temperature: float = 1.0,
    estimator: Estimator = "local",
    only: Patterns | None = None,
    **options: Unpack[Options],
) -> Posterior:
    """Find the Gaussian q(θ) = N(μ, diag σ²) that is closest to the posterior: Bayes by backprop.

    It maximizes the bound E_q[log p(y | θ) + log p(θ)]/T + H(q), which is −KL(q ‖ p(θ | y)) plus a constant
    at the temperature T = 1, by stochastic gradients in μ and log σ. For a linear model with Gaussian noise
    the optimum is the posterior mean, and σ² is 1/diag(precision), which is less than the marginal variance.

    Predictions average the network itself over `num_draws` draws from q, which the posterior holds.
    `posterior.recipe.weights` is q itself, and `linearized_mean_field(posterior)` is the Gaussian process
    around μ in its place.

    The estimators differ in the noise of the gradients and agree in their expectation. A step costs as much
    as about 2.6 plain training steps of a perceptron by "local", 3.2 by "flipout" and 1.8 by "weights", and
    less than two for convolutions.

    - "local" draws the outputs of linear layers for each point. Convolutions and layers along a sequence use
      a weight at several places of a point, where outputs depend on each other; they draw as "flipout" does.
    - "flipout" draws one weight noise per step and multiplies it by random signs for each point.
    - "weights" draws the weights once for all points. The other estimators do this for parameters of all
      other layers, for parameters that are used more than once, and for points that are not on the first
      axis.

    The network is in eval mode, so batch norm keeps its statistics.

    Args:
        network: The network, which is not changed; μ starts at its parameters.
        data: Inputs and targets, all in memory.
        likelihood: How targets follow the outputs. `Gaussian()` without a variance learns it with q. With few
            data the bound may prefer wide noise to a network that fits; give the noise then.
        prior: The prior of the parameters. A number is the variance of independent Gaussians, and None is a
            flat prior. KL(q ‖ p) is in closed form for Gaussian priors and drawn for others.
        temperature: Divides the log joint; less than 1 gives a cold posterior.
        estimator: How a step draws: "local", "flipout" or "weights".
        only: Chooses the stochastic parameters by name pattern, as in `linearize`; the others stay fixed.
        output: Picks the tensor of outputs from what the network returns.
        num_steps: The largest number of steps.
        batch_size: The number of points per step, shuffled in each epoch. None takes all.
        learning_rate: The first step size of Adam, which falls to zero along a cosine.
        optimizer: Makes another optimizer from the tensors [μ, log σ] and, with open noise, [log variance]:
            `lambda tensors: torch.optim.SGD(tensors, lr=0.01)`. The loss is −bound/N.
        schedule: Makes a schedule for the optimizer, which takes a step after each of its steps.
        num_samples: The number of passes per step, whose gradients are averaged. They run vectorized where
            torch can do so.
        num_draws: The number of networks that are drawn from q in the end.
        initial_var: The first variance of all parameters.
        patience: Stop early when the average bound of that many steps is not larger than of those before.
            None takes all steps.
        seed: The seed of batches and draws.

    Returns:
        A posterior of `num_draws` networks. `recipe.statistics["elbo"]` has the estimated bound per step.

    Raises:
        InputError: If an option is out of range, the prior does not cover the parameters, or the bound
            becomes infinite.
        NetworkError: If the network has dropout or batch statistics in training mode.

    >>> from net2gp.likelihoods import Gaussian
    >>> x = torch.ones(4, 1)
    >>> model = nn.Linear(1, 1, bias=False)
    >>> options = {"num_steps": 200, "learning_rate": 0.1, "num_samples": 100}
    >>> posterior = mean_field(model, (x, x), Gaussian(1.0), **options)
    >>> bool((posterior.recipe.weights.variance["weight"] - 1 / 5).abs() < 0.01)  # N = 4 and the prior
    True

    References: Blundell et al., Weight uncertainty in neural networks, ICML 2015; Kingma, Salimans and
    Welling, Variational dropout and the local reparameterization trick, NeurIPS 2015; Wen et al., Flipout,
    ICLR 2018.
    """
    check_known(options, Options)
    chosen = dict(options)
    output = chosen.pop("output", None)
    settings = Settings(**chosen)  # type: ignore[arg-type]
    x, y = gather(data, example_of(network))
    check_likelihood(likelihood)
    open_noise = has_open_noise(likelihood)
    start = likelihood.with_noise(1.0) if has_open_noise(likelihood) else likelihood
    model = Model.of(
        network,
        start,
        prior,
        num_data=num_rows(x),
        temperature=temperature,
        only=only,
        output=output,  # type: ignore[arg-type]
    )
    start.check(model.architecture(x), y)
    found = fit(Passes.of(model, estimator, x), (x, y), settings, open_noise=open_noise)
    return _posterior(model, found, (x, y), settings)


def _posterior(model: Model, found: Fit, data: tuple, settings: Settings) -> Posterior:
    like = model.architecture.example
    # Draws have a seed of their own, so that they do not depend on the number of steps.
    generator = torch.Generator(like.device).manual_seed(settings.seed + 1)
    members = Members(
        replace(model.architecture, params=found.weights.mean),
        found.weights.sample(settings.num_draws, generator),
    )
    recipe = ByMeanField("mean_field", model.temperature, 1, {"elbo": found.bounds}, found.weights)
    return drawn_posterior(members, found.likelihood, data, prior=model.prior, recipe=recipe)


def linearized_mean_field(posterior: Posterior) -> Posterior:
    """Return the Gaussian process f(x; μ) + J(x)(θ − μ) with θ ~ q, for the q that `mean_field` found.

    Its mean is one network, and its variances J diag(σ²) Jᵀ are in closed form, without draws.

    Args:
        posterior: What `mean_field` returned, with a Gaussian prior.

    Returns:
        A posterior around the network at μ.

    Raises:
        NotAvailable: If the posterior is not of `mean_field`, or if its prior is not a `NormalPrior`.

    >>> from net2gp.likelihoods import Gaussian
    >>> x = torch.ones(4, 1)
    >>> found = mean_field(nn.Linear(1, 1), (x, x), Gaussian(1.0), num_steps=10)
    >>> linearized_mean_field(found).marginal(x).variance.shape
    torch.Size([4, 1])
    """
    check_posterior(posterior)
    recipe, process = posterior.recipe, posterior.process
    if not isinstance(recipe, ByMeanField) or recipe.weights is None:
        raise NotAvailable(
            "linearized_mean_field is for the posterior of mean_field, which holds a Gaussian over the "
            "parameters. Use laplace(network, data, likelihood) for a Gaussian around another network."
        )
    prior = getattr(process, "prior", None)
    if not isinstance(prior, NormalPrior):
        raise NotAvailable(
            "a linearized posterior compares with a Gaussian prior, but mean_field had another one. Pass "
            "for example prior=1.0 to mean_field, or use the posterior as it is."
        )
    assert posterior.x is not None
    assert posterior.y is not None
    network: Linearized = process.architecture  # type: ignore[attr-defined]
    covariance = DiagonalCovariance(network.flatten(recipe.weights.variance))
    data = posterior.x, posterior.y
    return around_network(network, covariance, prior.variance, posterior.likelihood, data)
