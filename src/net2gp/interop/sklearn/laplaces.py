"""A network and the data that it was trained on: Laplace's approximation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from net2gp.interop.sklearn.estimator import Array, Classifier, Regressor, likelihood_of
from net2gp.interop.sklearn.networks import OfNetwork
from net2gp.interop.sklearn.perceptron import Perceptron, distinct, moments, train
from net2gp.interop.sklearn.weighting import copies, repeated, weighted
from net2gp.likelihoods import Gaussian
from net2gp.linear import Linearized, linearize
from net2gp.linear.linearized import PriorVar
from net2gp.methods import laplace
from net2gp.methods.laplace_approximation.tuning import Tuning
from net2gp.posteriors import Posterior
from net2gp.posteriors.recipes.around_network import AroundNetwork
from net2gp.posteriors.weights import Structure
from net2gp.types import Likelihood


class LaplaceRegressor(OfNetwork, Regressor):
    """A regression network with error bars: Laplace's approximation on the data that it was trained on.

    Predictions are the network's own, and each gets a covariance: what `net2gp.laplace` returns. `fit` does
    not train a network that is given; pass it the data of its training. Without a network `fit` trains a
    small perceptron of its own, one hidden layer of 32 tanh units, on standardized inputs and targets. If
    targets have several columns, a noise that is chosen is the same share of each column's variance, and
    `posterior_` and `likelihood_` are those of standardized targets.

    Args:
        network: A trained module, or `net2gp.linearize(module, only=...)` to choose parameters. None trains a
            perceptron.
        noise_var: The variance of the noise. None chooses it.
        prior_var: The prior variance of the parameters, a number or a dict by name pattern. None chooses it.
        structure: What is kept of the precision of the parameters, such as `net2gp.Kron()`. None chooses it
            by size.
        tuning: How what is open is chosen, as in `net2gp.laplace`. None is `net2gp.tuning.Matched()`.
        alpha: The weight decay ½ alpha |θ|² of the perceptron's training, to which standardized squared
            errors are added, ½ Σ (y − f)².
        random_state: A seed or `RandomState` for the perceptron's initial weights.

    After `fit`: `posterior_`, `linearized_`, `likelihood_`, `log_marginal_likelihood_value_`,
    `n_features_in_`, and `feature_names_in_` of tables.

    >>> X = np.linspace(-2, 2, 40)[:, None]
    >>> y = np.sin(2 * X[:, 0]) + 0.1 * np.cos(99 * X[:, 0])
    >>> model = LaplaceRegressor(random_state=0).fit(X, y)
    >>> _, std = model.predict([[0.0], [6.0]], return_std=True)
    >>> bool(std[1] > 3 * std[0])
    True

    References: MacKay, A practical Bayesian framework for backpropagation networks, 1992; Daxberger et al.,
    Laplace redux, NeurIPS 2021.
    """

    def __init__(
        self,
        network: nn.Module | Linearized | None = None,
        *,
        noise_var: float | None = None,
        prior_var: PriorVar | None = None,
        structure: Structure | None = None,
        tuning: Tuning | None = None,
        alpha: float = 1.0,
        random_state: Any = None,
    ) -> None:
        self.network = network
        self.noise_var = noise_var
        self.prior_var = prior_var
        self.structure = structure
        self.tuning = tuning
        self.alpha = alpha
        self.random_state = random_state

    def _fit(self, X: Array, y: Array, weights: Array | None) -> None:
        self._center, self._spread = 0.0, 1.0
        trained, likelihood, log_size = self.network is None, Gaussian(self.noise_var), 0.0
        if trained and y.shape[1] > 1:
            center, spread = moments(
                torch.from_numpy(y), None if weights is None else torch.from_numpy(weights)
            )
            self._center, self._spread = center.numpy(), spread.numpy()
            y = (y - self._center) / self._spread
            if self.noise_var is not None:
                likelihood = Gaussian(self.noise_var / spread.square())
            log_size = float(spread.log().sum()) * (len(y) if weights is None else weights.sum())
        self.linearized_ = self._trained(X, y, weights) if trained else self._linearization()
        data = self._tensor(X), self._targets(y)
        self._keep(*_approximated(self, data, likelihood, self._counts(weights)))
        self.log_marginal_likelihood_value_ -= log_size

    def _trained(self, X: Array, y: Array, weights: Array | None) -> Linearized:
        first, counts = distinct(np.hstack([X, y]), weights)
        x, targets, w = (torch.from_numpy(v) for v in (X[first], y[first], counts))
        center, spread = targets.new_zeros(y.shape[1]), targets.new_ones(y.shape[1])
        if y.shape[1] == 1:
            center, spread = moments(targets, w)
        network = Perceptron(x, center, spread, self._seed(), w)

        def loss(f: Tensor) -> Tensor:
            return 0.5 * (w[:, None] * ((f - targets) / spread).square()).sum()

        train(network, x, loss, self.alpha)
        return linearize(network)


class LaplaceClassifier(OfNetwork, Classifier):
    """A classification network that knows where it is certain: Laplace's approximation on its training data.

    The logits keep their values and get a covariance, and probabilities are at most as sure as the network's:
    what `net2gp.laplace` returns. `fit` does not train a network that is given; pass it the data of its
    training. Without a network `fit` trains a small perceptron of its own, one hidden layer of 32 tanh units,
    on standardized inputs.

    Args:
        network: A trained module with a logit per class, or one logit for two classes; or
            `net2gp.linearize(module, only=...)` to choose parameters. None trains a perceptron.
        prior_var: The prior variance of the parameters, a number or a dict by name pattern. None chooses it.
        structure: What is kept of the precision of the parameters, such as `net2gp.Kron()`. None chooses it
            by size.
        tuning: How what is open is chosen, as in `net2gp.laplace`. None is `net2gp.tuning.Matched()`.
        classes: The label of each output, in its order. None are the labels of the data, sorted.
        alpha: The weight decay ½ alpha |θ|² of the perceptron's training, to which cross-entropies are added.
        random_state: A seed or `RandomState` for the perceptron's initial weights.

    After `fit`: `classes_` and all that `LaplaceRegressor` has.

    >>> X = np.repeat([[0.0, 0.0], [3.0, 0.0], [0.0, 3.0]], 8, 0) + np.linspace(-1, 1, 24)[:, None]
    >>> model = LaplaceClassifier(random_state=0).fit(X, np.repeat(["a", "b", "c"], 8))
    >>> model.predict([[0.1, 0.1], [2.8, 0.3], [0.0, 2.6]])
    array(['a', 'b', 'c'], dtype='<U1')

    References: MacKay, The evidence framework applied to classification networks, 1992; Daxberger et al.,
    Laplace redux, NeurIPS 2021.
    """

    def __init__(
        self,
        network: nn.Module | Linearized | None = None,
        *,
        prior_var: PriorVar | None = None,
        structure: Structure | None = None,
        tuning: Tuning | None = None,
        classes: Any = None,
        alpha: float = 0.1,
        random_state: Any = None,
    ) -> None:
        self.network = network
        self.prior_var = prior_var
        self.structure = structure
        self.tuning = tuning
        self.classes = classes
        self.alpha = alpha
        self.random_state = random_state

    def _fit(self, X: Array, labels: Array, weights: Array | None) -> None:
        trained = self.network is None
        self.linearized_ = self._trained(X, labels, weights) if trained else self._linearization()
        x, y = self._tensor(X), torch.from_numpy(labels).long().to(self._example().device)
        likelihood = likelihood_of(self.linearized_(x[:1]).shape[1], len(self.classes_))
        self._keep(*_approximated(self, (x, y), likelihood, self._counts(weights)))

    def _trained(self, X: Array, labels: Array, weights: Array | None) -> Linearized:
        first, counts = distinct(np.column_stack([X, labels]), weights)
        x, y, w = (torch.from_numpy(v) for v in (X[first], labels[first], counts))
        zero = x.new_zeros(len(self.classes_))
        network = Perceptron(x, zero, zero + 1, self._seed(), w)

        def loss(f: Tensor) -> Tensor:
            return (w * nn.functional.cross_entropy(f, y, reduction="none")).sum()

        train(network, x, loss, self.alpha)
        return linearize(network)


def _approximated(
    estimator: LaplaceRegressor | LaplaceClassifier,
    data: tuple[Tensor, Tensor],
    likelihood: Likelihood,
    weights: Tensor | None,
) -> tuple[Posterior, Likelihood, Tensor | None]:
    """The posterior, the likelihood of a point of weight 1, and the weights that the posterior's has.

    Points with whole-number weights are repeated. With other weights, prior, noise and link are chosen at the
    nearest whole numbers, and the covariance at this choice is the exact one.
    """
    network, prior_var = estimator.linearized_, estimator.prior_var
    found = laplace(
        network,
        data if weights is None else repeated(data, weights),
        likelihood,
        prior_var=prior_var,
        structure=estimator.structure,
        tuning=estimator.tuning,
    )
    if weights is None or torch.equal(copies(weights).double(), weights):
        return found, found.likelihood, None
    own = weighted(found.likelihood, weights)
    exact = laplace(network, data, own, prior_var=found.prior_var, structure=found.structure)
    assert isinstance(found.process, AroundNetwork)
    process = replace(found.process, covariance=exact.covariance)
    return replace(exact, process=process), found.likelihood, weights
