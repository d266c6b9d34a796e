"""What all estimators share: checked arrays in, arrays out, and a posterior between them."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import Tags, check_array, check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from net2gp.errors import InputError
from net2gp.interop.sklearn.weighting import left_over
from net2gp.likelihoods import Bernoulli, Categorical
from net2gp.linalg import psd_root
from net2gp.posteriors import Posterior
from net2gp.types import Likelihood

Array = np.ndarray


class Estimator(BaseEstimator):
    """An estimator with a posterior.

    `fit` sets `posterior_`, `likelihood_` (of a point of weight 1) and `log_marginal_likelihood_value_`, the
    logarithm of the evidence, or NaN if the method has none.
    """

    posterior_: Posterior
    likelihood_: Likelihood
    log_marginal_likelihood_value_: float

    def _example(self) -> Tensor:
        """A tensor with the dtype and device of inputs."""
        return torch.empty(0, dtype=torch.float64)

    def _tensor(self, X: Array) -> Tensor:
        """A copy, since arrays may be read-only."""
        example = self._example()
        return torch.tensor(X, dtype=example.dtype, device=example.device)

    def _targets(self, y: Array) -> Tensor:
        """A copy where the inputs are; targets of a network of half precision are float32."""
        example = self._example()
        dtype = torch.promote_types(example.dtype, torch.float32)
        return torch.tensor(y, dtype=dtype, device=example.device)

    def _counts(self, weights: Array | None) -> Tensor | None:
        """Weights where the inputs are."""
        return None if weights is None else torch.from_numpy(weights).to(self._example().device)

    def _points(self, X: Any) -> Tensor:
        """New points as `fit` has seen them."""
        check_is_fitted(self)
        return self._tensor(validate_data(self, X, dtype=np.float64, reset=False))

    def _keep(self, posterior: Posterior, likelihood: Likelihood, weights: Tensor | None) -> None:
        """Keep what fit has found."""
        self.posterior_, self.likelihood_ = posterior, likelihood
        evidence = float("nan") if posterior.evidence is None else float(posterior.evidence)
        missing = left_over(likelihood, weights, posterior.num_outputs)
        self.log_marginal_likelihood_value_ = evidence + missing


class Regressor(RegressorMixin, Estimator):
    """A regressor whose `_fit` finds the posterior of targets from `_center`, in units of `_spread`."""

    _flat: bool
    _center: Array | float = 0.0
    _spread: Array | float = 1.0

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Find the posterior.

        Args:
            X: N points, (N, D).
            y: Targets, (N,) or (N, C).
            sample_weight: How often each point counts, (N,): the point has noise of variance noise_var/w.
                A point of weight 0 is left out, and one of weight 2 is there twice.

        Returns:
            The estimator.

        Raises:
            InputError: If the data do not suit the network.
        """
        X, y = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True)
        kept, weights = checked_weights(sample_weight, len(X))
        self._flat = y.ndim == 1
        columns = np.asarray(y, dtype=np.float64).reshape(len(y), -1)[kept]
        self._fit(X[kept], columns, weights)
        return self

    @abstractmethod
    def _fit(self, X: Array, y: Array, weights: Array | None) -> None:
        """Find the posterior of points with positive weights, which are None if all are 1."""

    def predict(
        self, X: Any, return_std: bool = False, return_cov: bool = False
    ) -> Array | tuple[Array, Array]:
        """Predict targets. The mean alone needs no variance, and costs far less.

        Args:
            X: M points, (M, D).
            return_std: Whether to return the standard deviation of each target, noise included.
            return_cov: Whether to return the covariance of the targets of all points, noise included.

        Returns:
            The means, (M,) or (M, C) as the targets were; with `return_std` also standard deviations of this
            shape, with `return_cov` covariances (M, M) or (M, M, C).

        Raises:
            InputError: If both are asked for.
        """
        if return_std and return_cov:
            raise InputError(
                "ask for return_std or return_cov, not for both: std² is on the diagonal."
            )
        x = self._points(X)
        if return_cov:
            mean, covariance = self._joint(x)
            blocks = np.einsum("ncmc->nmc", covariance)
            return self._shaped(mean), blocks[..., 0] if self._flat else blocks
        if not return_std:
            return self._shaped(self._rescaled(self.posterior_.mean(x)))
        law = self.posterior_.predict(x, likelihood=self.likelihood_)
        stddev = law.variance.detach().sqrt().cpu().numpy() * self._spread
        return self._shaped(self._rescaled(law.mean)), self._shaped(stddev)

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> Array:
        """Draw targets of all points together, noise included.

        Args:
            X: M points, (M, D).
            n_samples: The number of draws S.
            random_state: A seed, a `RandomState`, or None for numpy's global one.

        Returns:
            The draws, (M, S), or (M, C, S) if the targets had columns.
        """
        mean, covariance = self._joint(self._points(X))
        root = psd_root(torch.from_numpy(covariance.reshape(mean.size, mean.size))).numpy()
        noise = check_random_state(random_state).standard_normal((root.shape[1], n_samples))
        draws = (mean.reshape(-1, 1) + root @ noise).reshape(*mean.shape, n_samples)
        return draws[:, 0] if self._flat else draws

    def _joint(self, x: Tensor) -> tuple[Array, Array]:
        """The mean (M, C) and the covariance (M, C, M, C) of the targets.

        What `predict` has beyond f is independent between points: noise, and what novel points gain.
        """
        law = self.posterior_.predict(x, likelihood=self.likelihood_)
        of_f = self.posterior_.joint(x).covariance_matrix.detach().double().cpu().numpy().copy()
        np.fill_diagonal(of_f, law.variance.detach().cpu().numpy().reshape(-1))
        shape = tuple(law.mean.shape)
        spread = np.broadcast_to(self._spread, shape[1:])
        covariance = of_f.reshape(*shape, *shape) * spread[:, None, None] * spread
        return self._rescaled(law.mean), covariance

    def _rescaled(self, mean: Tensor) -> Array:
        return mean.detach().cpu().numpy() * self._spread + self._center

    def _shaped(self, values: Array) -> Array:
        return values.reshape(-1) if self._flat else values


class Classifier(ClassifierMixin, Estimator):
    """A classifier whose `_fit` finds the posterior of labels 0, …, C − 1."""

    classes_: Array

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Find the posterior.

        Args:
            X: N points, (N, D).
            y: Labels of any type, (N,).
            sample_weight: How often each point counts, (N,): its log-likelihood is multiplied by w. A point
                of weight 0 is left out, and one of weight 2 is there twice.

        Returns:
            The estimator.

        Raises:
            InputError: If there are fewer than two classes, or others than the network has.
        """
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        kept, weights = checked_weights(sample_weight, len(X))
        self.classes_, labels = self._labels(y[kept])
        if len(self.classes_) < 2:
            raise InputError(
                f"a classifier needs at least two classes, but y has {len(self.classes_)} class"
                f"{'' if kept.all() else ' at the points of positive sample_weight'}: {self.classes_}."
            )
        self._fit(X[kept], labels, weights)
        return self

    @abstractmethod
    def _fit(self, X: Array, labels: Array, weights: Array | None) -> None:
        """Find the posterior of points with positive weights, which are None if all are 1."""

    def _labels(self, y: Array) -> tuple[Array, Array]:
        """The classes in their order, and the number of the class of each point."""
        classes: Any = getattr(self, "classes", None)
        if classes is None:
            return np.unique(y, return_inverse=True)
        known = np.asarray(classes)
        if known.ndim != 1 or len(set(known.tolist())) != len(known):
            raise InputError(f"classes must be different labels, but is {classes!r}.")
        places = {label: place for place, label in enumerate(known.tolist())}
        strangers = sorted({str(label) for label in y.tolist() if label not in places})
        if strangers:
            raise InputError(f"y has labels that classes lacks: {', '.join(strangers[:8])}.")
        return known, np.array([places[label] for label in y.tolist()])

    def predict_proba(self, X: Any) -> Array:
        """Predict the probability of each class, with f integrated out.

        Args:
            X: M points, (M, D).

        Returns:
            Probabilities in the order of `classes_`, (M, C).
        """
        x = self._points(X)
        law: Any = self.posterior_.predict(x, likelihood=self.likelihood_)
        probs = law.probs.detach().double().cpu().numpy()
        if probs.shape[1] == 1:
            probs = np.hstack([1 - probs, probs])
        return probs / probs.sum(1, keepdims=True)

    def predict(self, X: Any) -> Array:
        """Predict the most probable class.

        Args:
            X: M points, (M, D).

        Returns:
            Labels, (M,).
        """
        best = self.predict_proba(X).argmax(1)
        return self.classes_[best]


def checked_weights(sample_weight: Any, count: int) -> tuple[Array, Array | None]:
    """Return which points count, and the weights of these, or None if all are 1.

    Args:
        sample_weight: One weight per point, one number for all, or None.
        count: The number of points N.

    Returns:
        A mask (N,), and positive weights or None.

    Raises:
        InputError: If weights are negative, all zero, or not one per point.
    """
    if sample_weight is None:
        return np.ones(count, dtype=bool), None
    weights = check_array(
        sample_weight, ensure_2d=False, dtype=np.float64, input_name="sample_weight"
    )
    if weights.ndim == 0:
        weights = np.full(count, float(weights))
    if weights.shape != (count,):
        raise InputError(
            f"sample_weight must have shape ({count},), one weight per point, but has {weights.shape}."
        )
    kept = weights > 0
    if (weights < 0).any():
        raise InputError(
            "sample_weight has negative weights. A point of weight 0 is left out, one of weight 2 counts "
            "twice."
        )
    if not kept.any():
        raise InputError(
            "all weights of sample_weight are zero, which leaves every point out. Leave sample_weight out to "
            "count each point once."
        )
    return kept, None if (weights[kept] == 1).all() else weights[kept]


def likelihood_of(num_outputs: int, num_classes: int) -> Categorical | Bernoulli:
    """Return the likelihood of classes for a network: one logit for two classes, or one output per class.

    Args:
        num_outputs: The outputs of the network.
        num_classes: The classes of the data.

    Returns:
        The likelihood.

    Raises:
        InputError: If the two do not fit.
    """
    if num_outputs == 1 and num_classes == 2:
        return Bernoulli()
    if num_outputs != num_classes:
        raise InputError(
            f"the network has {num_outputs} outputs, but there are {num_classes} classes. If y lacks some of "
            "them, pass classes=[...], the label of each output in its order."
        )
    return Categorical()
