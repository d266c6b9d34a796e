"""A trained network on new data: its linearization, conditioned on them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from net2gp.interop.sklearn.estimator import Array, Classifier, Regressor, likelihood_of
from net2gp.interop.sklearn.networks import OfNetwork
from net2gp.interop.sklearn.perceptron import Perceptron, moments
from net2gp.interop.sklearn.weighting import repeated, weighted
from net2gp.likelihoods import Gaussian
from net2gp.linear import Linearized, linearize
from net2gp.linear.linearized import PriorVar
from net2gp.methods import adapt
from net2gp.posteriors import Posterior, condition
from net2gp.types import Kernel, Likelihood


class LinearizedRegressor(OfNetwork, Regressor):
    """Regression with a network that was trained elsewhere: its linearization, conditioned on new data.

    f(x) = f(x; θ*) + J(x)(θ − θ*) with θ − θ* ~ N(0, prior_var), and y = f + ε: what `net2gp.adapt` returns.
    `fit` never trains the network. What is left open of `prior_var` and `noise_var` maximizes the evidence.
    Use `LaplaceRegressor` for the data that the network was trained on.

    Args:
        network: A trained module, or `net2gp.linearize(module, only=...)` to choose parameters. None is a
            small perceptron with random weights, which is a baseline.
        noise_var: The variance of the noise. None chooses it.
        prior_var: The prior variance of θ − θ*, a number or a dict by name pattern. None chooses a number.
        zero_mean: Whether the prior mean is zero, so that the network only gives the kernel.
        random_state: A seed or `RandomState` for the weights of the perceptron.

    After `fit`: `posterior_`, `linearized_`, `likelihood_`, `log_marginal_likelihood_value_`,
    `n_features_in_`, and `feature_names_in_` of tables.

    >>> import numpy as np
    >>> _ = torch.manual_seed(0)
    >>> network = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
    >>> X = np.linspace(-2, 2, 20)[:, None]
    >>> model = LinearizedRegressor(network).fit(X, np.sin(X[:, 0]))
    >>> bool(model.score(X, np.sin(X[:, 0])) > 0.99)
    True

    Reference: Maddox et al., Fast adaptation with linearized neural networks, AISTATS 2021.
    """

    def __init__(
        self,
        network: nn.Module | Linearized | None = None,
        *,
        noise_var: float | None = None,
        prior_var: PriorVar | None = None,
        zero_mean: bool = False,
        random_state: Any = None,
    ) -> None:
        self.network = network
        self.noise_var = noise_var
        self.prior_var = prior_var
        self.zero_mean = zero_mean
        self.random_state = random_state

    def _fit(self, X: Array, y: Array, weights: Array | None) -> None:
        baseline = self.network is None
        self.linearized_ = self._baseline(X, y, weights) if baseline else self._linearization()
        data, w = (self._tensor(X), self._targets(y)), self._counts(weights)
        if w is None:
            adapted = self._adapted(data)
            self._keep(adapted, adapted.likelihood, None)
            return
        own, likelihood = data[1], Gaussian(self.noise_var)
        if self.noise_var is not None and self.prior_var is not None:
            kernel: Kernel = self.linearized_.kernel(self.prior_var)
        else:
            many = repeated(data, w)
            found = self._adapted(many)
            kernel, likelihood = found.kernel, found.likelihood
            if not torch.equal(
                found.data[1], many[1]
            ):  # the network has learned these targets already
                own = self.linearized_(data[0])
        mean, noise = None if self.zero_mean else self.linearized_, weighted(likelihood, w)
        posterior = condition(kernel, data, noise, mean=mean)
        if own is not data[1]:
            around = condition(kernel, (data[0], own), noise, mean=mean)
            posterior = replace(around, evidence=posterior.evidence)
        self._keep(posterior, likelihood, w)

    def _adapted(self, data: tuple[Tensor, Tensor]) -> Posterior[Gaussian]:
        """What `adapt` makes of points of weight 1."""
        noise, prior_var = Gaussian(self.noise_var), self.prior_var
        return adapt(self.linearized_, data, noise, prior_var=prior_var, zero_mean=self.zero_mean)

    def _baseline(self, X: Array, y: Array, weights: Array | None) -> Linearized:
        """A perceptron with random weights."""
        counts = None if weights is None else torch.from_numpy(weights)
        x, (center, spread) = torch.from_numpy(X), moments(torch.from_numpy(y), counts)
        return linearize(Perceptron(x, center, spread, self._seed(), counts))


class LinearizedClassifier(OfNetwork, Classifier):
    """Classification with a network that was trained elsewhere: its linearization, conditioned on data.

    f(x) = f(x; θ*) + J(x)(θ − θ*) with θ − θ* ~ N(0, prior_var), and p(y = c | f) = softmax(f)_c, by
    Laplace's approximation of the posterior of f: what `net2gp.adapt` returns. `fit` never trains the
    network. An open `prior_var` maximizes the evidence. Use `LaplaceClassifier` for the data that the network
    was trained on.

    Args:
        network: A trained module with a logit per class, or one logit for two classes; or
            `net2gp.linearize(module, only=...)` to choose parameters. None is a small perceptron with random
            weights, which is a baseline.
        prior_var: The prior variance of θ − θ*, a number or a dict by name pattern. None chooses a number.
        zero_mean: Whether the prior mean is zero, so that the network only gives the kernel.
        classes: The label of each output, in its order. None are the labels of the data, sorted.
        random_state: A seed or `RandomState` for the weights of the perceptron.

    After `fit`: `classes_` and all that `LinearizedRegressor` has.

    >>> import numpy as np
    >>> _ = torch.manual_seed(0)
    >>> network = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 3))
    >>> X = np.repeat([[0.0, 0.0], [3.0, 0.0], [0.0, 3.0]], 5, 0) + np.linspace(-0.5, 0.5, 15)[:, None]
    >>> model = LinearizedClassifier(network).fit(X, np.repeat(["a", "b", "c"], 5))
    >>> model.predict([[0.1, 0.1], [2.8, 0.3], [0.0, 2.6]])
    array(['a', 'b', 'c'], dtype='<U1')

    Reference: Khan et al., Approximate inference turns deep networks into Gaussian processes, NeurIPS 2019.
    """

    def __init__(
        self,
        network: nn.Module | Linearized | None = None,
        *,
        prior_var: PriorVar | None = None,
        zero_mean: bool = False,
        classes: Any = None,
        random_state: Any = None,
    ) -> None:
        self.network = network
        self.prior_var = prior_var
        self.zero_mean = zero_mean
        self.classes = classes
        self.random_state = random_state

    def _fit(self, X: Array, labels: Array, weights: Array | None) -> None:
        baseline = self.network is None
        self.linearized_ = self._baseline(X, weights) if baseline else self._linearization()
        w = self._counts(weights)
        x, y = self._tensor(X), torch.from_numpy(labels).long().to(self._example().device)
        outputs = self.linearized_(x[:1]).shape[1]
        likelihood: Likelihood = likelihood_of(outputs, len(self.classes_))
        if w is None:
            self._keep(self._adapted((x, y), likelihood), likelihood, None)
            return
        if self.prior_var is None:
            kernel = self._adapted(repeated((x, y), w), likelihood).kernel
        else:
            kernel = self.linearized_.kernel(self.prior_var)
        mean = None if self.zero_mean else self.linearized_
        posterior = condition(kernel, (x, y), weighted(likelihood, w), mean=mean)
        self._keep(posterior, likelihood, w)

    def _adapted(self, data: tuple[Tensor, Tensor], likelihood: Likelihood) -> Posterior:
        """What `adapt` makes of points of weight 1."""
        prior_var, zero_mean = self.prior_var, self.zero_mean
        return adapt(self.linearized_, data, likelihood, prior_var=prior_var, zero_mean=zero_mean)

    def _baseline(self, X: Array, weights: Array | None) -> Linearized:
        """A perceptron with random weights."""
        x, counts = torch.from_numpy(X), None if weights is None else torch.from_numpy(weights)
        zero = x.new_zeros(len(self.classes_))
        return linearize(Perceptron(x, zero, zero + 1, self._seed(), counts))
