"""The nouns of the library, as type aliases and protocols: everything that flows between the rooms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor
from torch.distributions import Distribution
from torch.utils.data import DataLoader, Dataset
from typing_extensions import TypeVar

Predicted = TypeVar("Predicted", bound=Distribution, default=Distribution, covariant=True)
"""The distribution of y that a likelihood predicts."""

Params = dict[str, Tensor]
"""Parameters by name, as `named_parameters()` gives them."""

Inputs = Tensor | tuple[Tensor, ...] | Mapping[str, Tensor]
"""What a network takes: a tensor, or a tuple or dict of tensors that share their first (batch) axis."""


@dataclass(frozen=True, eq=False)
class Stream:
    """Data that are read batch by batch, in as many passes as a method needs, and are never held together.

    Methods that sum over the data take it: `laplace`, but for `FunctionSpace()` of all points, `condition` in
    weight space, the embeddings of tasks, and the posteriors of optimizers. Their memory does not depend on
    the number of points, and their posteriors do not keep the data. The order of the points does not matter;
    a loader that shuffles or augments at random is summed over whatever comes. Each pass must give equally
    many points.

    Args:
        data: A `DataLoader`, a `Dataset`, or anything that gives batches each time it is iterated over: pairs
            (x, y), or dicts with an entry "labels". A pair of tensors or of (memory-mapped) arrays is cut.

    >>> import torch
    >>> Stream([(torch.zeros(4, 2), torch.ones(4, 1)), (torch.zeros(3, 2), torch.ones(3, 1))])
    Stream()
    """

    data: DataLoader | Dataset | Iterable[Any] = field(repr=False)


Data = (
    DataLoader
    | Dataset
    | Stream
    | tuple[Inputs | np.ndarray, Tensor | np.ndarray]
    | Mapping[str, Tensor]
)
"""Inputs and targets: a pair, a dict with "labels", or a `Dataset`, an unshuffled loader or a `Stream` of
these."""

Mean = Callable[[Inputs], Tensor]
"""A prior mean, which maps the inputs of N points to (N, C)."""


@runtime_checkable
class Kernel(Protocol):
    """A covariance function.

    Outputs are independent copies (K ⊗ I) unless `outputs(x)` says how many are coupled; then rows run point
    by point, index n·C + c. `net2gp.kernels.BaseKernel` gives it all to a class with `__call__` and `diag`.
    """

    def outputs(self, x: Inputs) -> int | None:
        """Count the outputs that the kernel couples.

        It depends on what `x` looks like, and not on what the kernel has seen before.

        Args:
            x: Points, of which the first are enough.

        Returns:
            C, or None where outputs are independent copies of each other, as many as the data have.
        """

    def check(self, x: Inputs) -> None:
        """Raise an error that says what to change, if `x` cannot be an input of this kernel.

        Args:
            x: N points.
        """

    def __call__(self, x: Inputs, y: Inputs | None = None) -> Tensor:
        """Compute the kernel matrix.

        Args:
            x: N points.
            y: M points, or None for x itself.

        Returns:
            k(x, y), of shape (N, M), or (N·C, M·C) if C outputs are coupled.
        """

    def blocks(self, x: Inputs) -> Tensor:
        """Compute the covariance of the outputs at each point by itself.

        Args:
            x: N points.

        Returns:
            k(x_n, x_n) for each point, of shape (N, 1, 1), or (N, C, C) if C outputs are coupled.
        """

    def diag(self, x: Inputs) -> Tensor:
        """Compute the variances alone.

        Args:
            x: N points.

        Returns:
            The diagonal of k(x, x), of shape (N,), or (N·C,) if C outputs are coupled.
        """

    def matmul(self, x: Inputs, y: Inputs, v: Tensor) -> Tensor:
        """Multiply the kernel matrix by another without storing it.

        Args:
            x: N points.
            y: M points.
            v: A matrix of shape (M, k), or (M·C, k) if C outputs are coupled.

        Returns:
            k(x, y) v, of shape (N, k), or (N·C, k).
        """

    def precise(self) -> Kernel:
        """The same kernel of the same inputs, its products and results in float64."""

    def scaled(self, variance: float | Tensor) -> Kernel:
        """Multiply the kernel by a number.

        Args:
            variance: The factor: a positive number, or a tensor of one element, which may require a gradient.

        Returns:
            The kernel variance · k.
        """

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Kernel:
        """Move the kernel.

        Args:
            device: Where the tensors shall be, or None to leave them.
            dtype: The dtype of floating tensors, or None to keep it.

        Returns:
            The same kernel with its tensors on that device and in that dtype.
        """


@runtime_checkable
class FeatureKernel(Kernel, Protocol):
    """A kernel with an explicit finite feature map: k(x, y) = Φ(x) Φ(y)ᵀ."""

    @property
    def num_features(self) -> int:
        """P, the width of Φ."""

    def features(self, x: Inputs) -> Tensor:
        """Compute the feature map.

        Args:
            x: N points.

        Returns:
            Φ(x), of shape (N, C, P).
        """

    def apply(self, x: Inputs, w: Tensor) -> Tensor:
        """Multiply Φ(x) by a matrix without storing Φ(x).

        Args:
            x: N points.
            w: A matrix of shape (P, k).

        Returns:
            Φ(x) w, of shape (N·C, k).
        """

    def adjoint(self, x: Inputs, u: Tensor) -> Tensor:
        """Multiply Φ(x)ᵀ by a matrix without storing Φ(x).

        Args:
            x: N points.
            u: A matrix of shape (N·C, k), with rows point by point.

        Returns:
            Φ(x)ᵀ u, of shape (P, k).
        """


@runtime_checkable
class Likelihood(Protocol[Predicted]):
    """A conditional law p(y | f) that treats every point by itself.

    f are the outputs of the network, of shape (N, C). `net2gp.likelihoods.traits` lists the optional members
    that other rooms ask for.
    """

    def check(self, f: Tensor, y: Tensor) -> None:
        """Raise an error that says what to change, if `y` cannot be the targets of outputs `f`.

        Args:
            f: Outputs of the network, (N, C).
            y: Targets of the same points.

        Raises:
            InputError: If shape, dtype, device or values of the targets do not fit this likelihood.
        """

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """Compute the log density of each point.

        Args:
            f: Outputs, (N, C).
            y: Targets, in a shape that `check` accepts.

        Returns:
            log p(y_n | f_n), of shape (N,).
        """

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        """Compute the gradient of the log density in f.

        Args:
            f: Outputs, (N, C).
            y: Targets, in a shape that `check` accepts.

        Returns:
            ∇_f log p(y_n | f_n), of shape (N, C).
        """

    def curvature(self, f: Tensor) -> Tensor:
        """Compute the Fisher information −E_y ∇²_f log p(y | f_n), which is positive semi-definite.

        For Gaussian, Bernoulli, Categorical and Poisson it is the negative Hessian itself, whatever y is.

        Args:
            f: Outputs, (N, C).

        Returns:
            One matrix per point, of shape (N, C, C).
        """

    def predict(self, f: MultivariateNormal) -> Predicted:
        """Integrate f out: p(y_n) = ∫ p(y_n | f_n) N(f_n) df_n.

        Args:
            f: The Gaussian law of the outputs, with batch N and event C.

        Returns:
            The law of the targets, one per point.
        """


Own = TypeVar("Own", bound=Likelihood, default=Likelihood, covariant=True)
"""The likelihood of a posterior. It gives predictions their type, with `.probs` or `.mean`."""

Observed = TypeVar("Observed", bound=Likelihood)
"""The likelihood that is passed to a method and that the returned posterior keeps."""

Outcome = TypeVar("Outcome", bound=Distribution)
"""The distribution of y that a posterior predicts."""
