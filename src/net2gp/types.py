"""The nouns: what flows between the rooms, as type aliases and protocols."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor
from torch.distributions import Distribution
from torch.utils.data import DataLoader, Dataset
from typing_extensions import TypeVar

Predicted = TypeVar("Predicted", bound=Distribution, default=Distribution, covariant=True)
"""The law of y that a likelihood predicts."""

Params = dict[str, Tensor]
"""Parameters by name, as `named_parameters()` gives them."""

Inputs = Tensor | tuple[Tensor, ...] | Mapping[str, Tensor]
"""What a network takes: a tensor, or a tuple or dict of tensors with a common first (batch) axis."""

Data = DataLoader | Dataset | tuple[Inputs | np.ndarray, Tensor | np.ndarray] | Mapping[str, Tensor]
"""Inputs and targets: a pair, a dict with "labels", or a `Dataset` or loader of these, not shuffled."""

Mean = Callable[[Inputs], Tensor]
"""A prior mean: inputs of N points to (N, C)."""


@runtime_checkable
class Kernel(Protocol):
    """A covariance function.

    Outputs are independent (K ⊗ I) unless `joint` is true; then rows run point by point, index n·C + c.
    """

    @property
    def joint(self) -> bool:
        """Whether the kernel couples the outputs."""

    def check(self, x: Inputs) -> None:
        """Raise an error that says what to change, if `x` cannot be an input of this kernel."""

    def __call__(self, x: Inputs, y: Inputs | None = None) -> Tensor:
        """k(x, y): (N, M), or (N·C, M·C) if joint; y = x if left out."""

    def blocks(self, x: Inputs) -> Tensor:
        """k(x_n, x_n) for each point: (N, 1, 1), or (N, C, C) if joint."""

    def diag(self, x: Inputs) -> Tensor:
        """The diagonal of k(x, x): (N,), or (N·C,) if joint."""

    def matmul(self, x: Inputs, y: Inputs, v: Tensor) -> Tensor:
        """k(x, y) @ v for v of shape (M or M·C, k), never storing k(x, y)."""

    def precise(self) -> Kernel:
        """The same kernel of the same inputs, its products and results in float64."""

    def scaled(self, variance: float | Tensor) -> Kernel:
        """variance · k."""

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Kernel:
        """The same kernel with its tensors on another device or in another dtype."""


@runtime_checkable
class FeatureKernel(Kernel, Protocol):
    """A kernel with an explicit finite feature map: k(x, y) = Φ(x) Φ(y)ᵀ."""

    @property
    def num_features(self) -> int:
        """P, the width of Φ."""

    def features(self, x: Inputs) -> Tensor:
        """Φ(x): (N, C, P)."""

    def apply(self, x: Inputs, w: Tensor) -> Tensor:
        """Φ(x) w: (N·C, k) for w of shape (P, k), without storing Φ(x)."""

    def adjoint(self, x: Inputs, u: Tensor) -> Tensor:
        """Φ(x)ᵀ u: (P, k) for u of shape (N·C, k), without storing Φ(x)."""


@runtime_checkable
class Likelihood(Protocol[Predicted]):
    """p(y | f), point by point; f is (N, C)."""

    def check(self, f: Tensor, y: Tensor) -> None:
        """Raise an error that says what to change, if `y` cannot be the targets of outputs `f`."""

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """log p(y_n | f_n): (N,)."""

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        """∇_f log p(y_n | f_n): (N, C)."""

    def curvature(self, f: Tensor) -> Tensor:
        """Fisher information −E_y ∇²_f log p(y | f_n): (N, C, C), positive semi-definite.

        For Gaussian, Bernoulli, Categorical and Poisson it is the negative Hessian itself, whatever y is.
        """

    def predict(self, f: MultivariateNormal) -> Predicted:
        """p(y_n) = ∫ p(y_n | f_n) N(f_n) df_n; `f` has batch N and event C."""


Own = TypeVar("Own", bound=Likelihood, default=Likelihood, covariant=True)
"""The likelihood that a posterior has, so that its predictions have a type: `.probs` or `.mean`."""

Observed = TypeVar("Observed", bound=Likelihood)
"""The likelihood that a method is given, and that the posterior which it returns has."""

Outcome = TypeVar("Outcome", bound=Distribution)
"""The law of y that a posterior predicts."""
