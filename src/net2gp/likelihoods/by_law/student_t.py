"""Regression with outliers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution

from net2gp.errors import InputError, check_positive
from net2gp.likelihoods.by_law.base import LawLikelihood
from net2gp.likelihoods.targets import check_real_targets, shape_targets
from net2gp.tags import savable


@savable("student_t.StudentT")
@dataclass(frozen=True, eq=False)
class StudentT(LawLikelihood):
    """Regression y_c = f_c + s ε_c with s² = scale_var and ε of Student's law with ν degrees of freedom.

    With e = y − f, log p(y | f) = Σ_c const − ½ (ν + 1) log(1 + e_c²/(ν s²)). The residual is (ν + 1)
    e/(ν s² + e²), which decreases for large errors, so an outlier has little influence. Therefore log p is
    not concave, and its Hessian is indefinite beyond |e| = s √ν. The curvature is the Fisher information
    diag((ν + 1)/((ν + 3) s²)), which is positive everywhere. Newton's method uses it for its steps and
    halves them until the objective increases; it takes a step with the Hessian only where that leads higher.
    The covariance of `Laplace()` uses the Fisher information. There may be several modes; the search starts
    at the prior mean or at the network and ends in a mode uphill of it. The cost is O(N·C).

    For f ~ N(m, v), E y = m if ν > 1 and Var y = v + s² ν/(ν − 2) if ν > 2, else infinite.

    Args:
        scale_var: s², one positive number, or a tensor (C,) with one per output. The variance of the noise
            is s² ν/(ν − 2).
        degrees_of_freedom: ν > 0. The noise is nearly Gaussian for large ν; 4 is a common choice against
            outliers.

    Raises:
        InputError: If an argument is not positive or `scale_var` has more than one axis.

    >>> StudentT(degrees_of_freedom=3.0).residual(torch.zeros(2, 1), torch.tensor([1.0, 100.0]))
    tensor([[1.0000],
            [0.0400]])

    Reference: Vanhatalo, Jylänki & Vehtari (2009), Gaussian process regression with Student-t likelihood.
    """

    scale_var: float | Tensor = 1.0
    degrees_of_freedom: float = 4.0
    canonical: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_positive(self.scale_var, "scale_var")
        if isinstance(self.scale_var, Tensor) and self.scale_var.dim() > 1:
            raise InputError(
                f"scale_var must be a number, or (C,) for each output, but has shape "
                f"{tuple(self.scale_var.shape)}. Pass e.g. scale_var=0.1."
            )
        check_positive(self.degrees_of_freedom, "degrees_of_freedom")

    def _scale_var(self, f: Tensor) -> Tensor:
        scale = torch.as_tensor(self.scale_var, dtype=f.dtype, device=f.device)
        if scale.dim() and scale.shape[0] not in (1, f.shape[-1]):
            raise InputError(
                f"scale_var of shape ({scale.shape[0]},) is read as one for each output, but there are "
                f"{f.shape[-1]} outputs. Pass one number, or as many as outputs."
            )
        return scale

    def law(self, f: Tensor) -> Distribution:
        """Return Student's law at f."""
        scale = self._scale_var(f).sqrt()
        return torch.distributions.StudentT(self.degrees_of_freedom, f, scale, validate_args=False)

    def check(self, f: Tensor, y: Tensor) -> None:
        """Check that `y` is floating and (N, C), or (N,) with one output."""
        check_real_targets(f, y)
        shape_targets(f, y)
        self._scale_var(f)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        """Compute (ν + 1) e/(ν s² + e²): (N, C)."""
        error, df = shape_targets(f, y).to(f) - f, self.degrees_of_freedom
        return (df + 1) * error / (df * self._scale_var(f) + error.square())

    def information(self, f: Tensor) -> Tensor:
        """Compute (ν + 1)/((ν + 3) s²), in the shape of f."""
        df = self.degrees_of_freedom
        return ((df + 1) / ((df + 3) * self._scale_var(f))).expand(f.shape)

    def moments(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Compute E y and Var y for f ~ N(mean, variance) in closed form."""
        noise = self.law(mean)
        return noise.mean, noise.variance + variance
