"""Gaussian priors under which the entries of one filter vary together."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from net2gp.errors import InputError, check_count, check_positive
from net2gp.inputs import describe
from net2gp.linalg.chance import random_normal
from net2gp.tags import savable
from net2gp.types import Params


@savable("bayes.CorrelatedPrior")
@dataclass(frozen=True, eq=False)
class CorrelatedPrior:
    """Independent filters with N(0, Σ) over the entries of each.

    Σ is a covariance of K entries. A parameter is divided into filters along its last axes, as many axes
    as have K entries together: with K = 25 the weights (O, I, 5, 5) of a convolution are O·I filters, and
    with K = 25·I they are O filters. Cost: K³ once, then K per parameter.

    Args:
        covariance: Σ, a symmetric positive definite matrix (K, K).

    Raises:
        InputError: If Σ is no matrix, not symmetric or not positive definite.

    >>> prior = CorrelatedPrior.spatial((3, 3), variance=2.0, lengthscale=1.5)
    >>> prior.log_prob({"weight": torch.zeros(4, 1, 3, 3)})
    tensor(-39.0297)

    Reference: Fortuin et al., Bayesian neural network priors revisited, ICLR 2022.
    """

    covariance: Tensor = field(repr=False)

    def __post_init__(self) -> None:
        matrix = self.covariance
        if not isinstance(matrix, Tensor) or matrix.dim() != 2 or len(matrix) != matrix.shape[1]:
            raise InputError(
                f"covariance must be a matrix (K, K) over a filter's entries, but is {describe(matrix)}. "
                "Use CorrelatedPrior.spatial((3, 3))."
            )
        symmetric = torch.allclose(
            matrix, matrix.mT, rtol=1e-5, atol=1e-6 * float(matrix.abs().max())
        )
        if not symmetric or int(torch.linalg.cholesky_ex(matrix.double())[1]):
            raise InputError(
                "covariance must be symmetric and positive definite, but is not. Add a small variance to "
                "its diagonal: covariance + 1e-3 * torch.eye(len(covariance))."
            )

    @classmethod
    def spatial(
        cls, kernel_size: tuple[int, ...], variance: float = 1.0, lengthscale: float = 1.0
    ) -> CorrelatedPrior:
        """Correlations e^{−d/lengthscale} of two pixels at the distance d within a filter of a convolution.

        Args:
            kernel_size: The numbers of pixels along each axis of a filter.
            variance: The variance of each entry.
            lengthscale: In pixels.

        Returns:
            The prior of parameters (…, *kernel_size).

        Raises:
            InputError: If an argument is not positive.
        """
        if not isinstance(kernel_size, tuple | list) or not kernel_size:
            raise InputError(
                f"kernel_size must be the pixels along each axis, but is {describe(kernel_size)}. Pass for "
                "example kernel_size=(3, 3)."
            )
        for size in kernel_size:
            check_count(size, "kernel_size", example=3)
        check_positive(variance, "variance", single=True)
        check_positive(lengthscale, "lengthscale", single=True)
        axes = [torch.arange(size, dtype=torch.float64) for size in kernel_size]
        pixels = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).reshape(-1, len(axes))
        gaps = (pixels[:, None] - pixels).square().sum(-1).sqrt()
        return cls(float(variance) * (-gaps / float(lengthscale)).exp())

    def check(self, params: Params) -> None:
        """Raise unless every parameter consists of filters of K entries.

        Args:
            params: Parameters by name.

        Raises:
            InputError: If the last axes of a parameter do not have K entries together.
        """
        size = len(self.covariance)
        wrong = [name for name, value in params.items() if not _divides(value, size)]
        if wrong:
            raise InputError(
                f"a filter has {size} entries by the covariance, but no last axes of '{wrong[0]}' have "
                f"{size} entries together: its shape is {tuple(params[wrong[0]].shape)}. "
                "Give other parameters a prior of their own: PriorByName({'*': 1.0, '0.weight': prior})."
            )

    def log_prob(self, params: Params) -> Tensor:
        """Σ −½ wᵀΣ⁻¹w − ½ log|2πΣ| over the filters."""
        parts = []
        for value in params.values():
            root = self._root(value)
            filters = value.reshape(-1, len(root))
            whitened = torch.linalg.solve_triangular(root, filters.mT, upper=False)
            logs = 2 * root.diagonal().log().sum() + len(root) * math.log(2 * math.pi)
            parts.append(-0.5 * (whitened.square().sum() + len(filters) * logs))
        return torch.stack(parts).sum()

    def sample(
        self, params: Params, num_samples: int, generator: torch.Generator | None = None
    ) -> Params:
        """Draws L ε with L Lᵀ = Σ."""
        self.check(params)
        drawn = {}
        for name, value in params.items():
            shape = (num_samples, value.numel() // len(self.covariance), len(self.covariance))
            normal = random_normal(shape, generator=generator, device=value.device)
            filters = normal.to(value.dtype) @ self._root(value).mT
            drawn[name] = filters.reshape(num_samples, *value.shape)
        return drawn

    def _root(self, like: Tensor) -> Tensor:
        root = torch.linalg.cholesky(self.covariance.double().to(like.device))
        return root.to(like.dtype)


def _divides(value: Tensor, size: int) -> bool:
    """Whether some of the last axes have `size` entries together."""
    return any(math.prod(value.shape[axis:]) == size for axis in range(value.dim()))
