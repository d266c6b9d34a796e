"""The most probable parameters of a network, by any optimizer of torch."""

from __future__ import annotations

import copy

from torch import nn

from net2gp.bayes.model.prior import WeightPrior
from net2gp.bayes.optimum.crew import perceptrons
from net2gp.bayes.optimum.descent import descend
from net2gp.bayes.optimum.settings import Training
from net2gp.bayes.optimum.task import prepare
from net2gp.bayes.optimum.teams import Single
from net2gp.inputs import ordinary_tensors
from net2gp.linear.linearized import Output, Patterns
from net2gp.posteriors.posterior import Posterior
from net2gp.types import Data, Likelihood


@ordinary_tensors()
def map_estimate(
    network: nn.Module,
    data: Data,
    likelihood: Likelihood,
    *,
    prior: WeightPrior | float | None = 1.0,
    only: Patterns | None = None,
    output: Output | None = None,
    training: Training | None = None,
) -> Posterior:
    """Train a copy of a network to its most probable parameters.

    They maximize log p(θ) + Σ_n log p(y_n | f(x_n; θ)). The network starts from its present parameters and
    trains in the mode in which it is: modules in training mode use dropout and batch statistics, and modules
    in eval mode do not. Open Gaussian noise is learned along: its variance is the mean squared residual of
    the training rows, or of the held-out rows if there are some. Cost: a forward and a backward pass per
    step.

    Args:
        network: The network, which is not changed; `module_of(posterior)` is the trained copy.
        data: The data, (x, y) or a DataLoader.
        likelihood: How targets follow the outputs; `Gaussian()` learns the noise.
        prior: The prior of the parameters. A number is the variance of independent Gaussians, and None is a
            flat prior, under which the result is the maximum likelihood.
        only: The parameters to train, by name patterns as in `linearize`; the others stay. None trains all,
            whatever their `requires_grad`.
        output: Picks the tensor of outputs from what the network returns.
        training: Optimizer, schedule, batches and early stopping; None is `Training()`.

    Returns:
        A posterior that is one network. Its `likelihood` has the learned noise, and `recipe.statistics` the
        log joint, the number of steps and the held-out loss.

    Raises:
        InputError: If the training diverges, or an argument does not fit the network.

    >>> import torch
    >>> from net2gp.likelihoods import Gaussian
    >>> x = torch.linspace(-1, 1, 20)[:, None]
    >>> training = Training(num_steps=300, learning_rate=0.1)
    >>> posterior = map_estimate(nn.Linear(1, 1), (x, 2 * x), Gaussian(0.01), training=training)
    >>> posterior.mean(torch.ones(1, 1))
    tensor([[1.99...]])

    Reference: MacKay, A practical Bayesian framework for backpropagation networks, Neural Computation 1992.
    """
    task = prepare(network, data, likelihood, prior, (only, output), training)
    settings = Training() if training is None else training
    flat = perceptrons(task, [network], settings)
    team = flat or Single(copy.deepcopy(network), task.names, output)
    found = descend(team, task.objective, settings, [settings.seed], held=task.held)
    return task.posterior([found], "map_estimate")
