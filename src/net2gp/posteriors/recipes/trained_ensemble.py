"""The law of an ensemble of networks at a time of its training, as a process, and its recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from net2gp.errors import NotAvailable
from net2gp.inputs import chunks, num_rows
from net2gp.kernels.base import dtype_of
from net2gp.linalg import kron_identity
from net2gp.linalg.chance import random_normal
from net2gp.posteriors.conditioning.conditioned import TEST_BYTES
from net2gp.posteriors.conditioning.problem import check_points, kernel_facts, kernel_variances
from net2gp.posteriors.conditioning.process import contrast_by_blocks, evaluated
from net2gp.posteriors.conditioning.samples import FunctionSamples
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.recipe import Recipe
from net2gp.posteriors.recipes.dual import Dual
from net2gp.types import Data, FeatureKernel, Inputs, Kernel, Likelihood, Mean


@dataclass(frozen=True, eq=False)
class TrainedEnsemble:
    """An ensemble that starts as GP(m, K) and has moved along Θ to f₀(x) + Θ(x, X) W (y − f₀(X)).

    Its mean is m(x) + Θ(x, X) α with α = W(y − m(X)), and its covariance is

        K(x, x') + Θ(x, X) B Θ(X, x') − Θ(x, X) W K(X, x') − K(x, X) W Θ(X, x')

    with B = W (K(X, X) + noise) W. All matrices are fields, so a prediction solves nothing: it costs K(x, X),
    Θ(x, X) and O(R²) per test row. The covariances are differences of nearly equal numbers and therefore come
    from the kernels in float64.

    Args:
        kernel: The covariance K at the start.
        tangent: The kernel Θ that training moves along, or None if it is K.
        prior_mean: The mean m at the start, or None for zero.
        x: The training points X.
        num_outputs: The number of outputs C.
        alpha: α, (R, columns): rows are points and columns outputs if the kernels treat outputs as
            independent copies; otherwise there is one column, and output c of point n is row n·C + c.
        W: What training has done: (R, R), symmetric.
        B: W (K(X, X) + noise) W: (R, R).
        noise: The variance at the start that the ridge adds to the training outputs.
    """

    kernel: Kernel
    tangent: Kernel | None
    prior_mean: Mean | None = field(repr=False)
    x: Inputs = field(repr=False)
    num_outputs: int
    alpha: Tensor = field(repr=False)
    W: Tensor = field(repr=False)
    B: Tensor = field(repr=False)
    noise: float = 0.0

    @property
    def rows_per_point(self) -> int:
        """How many rows belong to a training point: C, or 1 if the outputs share them."""
        return self.num_outputs // self.alpha.shape[1]

    def facts(self) -> dict[str, str]:
        """The kernel at the start."""
        return kernel_facts(self.kernel)

    @evaluated
    def check(self, x: Inputs) -> None:
        """Raise unless `x` are points of the kernel with as many outputs as the data."""
        check_points(self.kernel, self.num_outputs, x)

    @evaluated
    def centered(self, x: Inputs) -> Tensor:
        """E f(x) − m(x): (N, C), by a product with Θ(x, X) that does not store it."""
        product = (self.tangent or self.kernel).precise().matmul(x, self.x, self.alpha)
        return product.reshape(num_rows(x), self.num_outputs).to(dtype_of(self.kernel, x))

    @evaluated
    def mean(self, x: Inputs) -> Tensor:
        """E f(x): (N, C)."""
        centered = self.centered(x)
        return centered if self.prior_mean is None else self.prior_mean(x) + centered

    @evaluated
    def moments(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """The mean (N, C) and the covariance of each point (N, C, C)."""
        size = max(1, TEST_BYTES // (16 * len(self.alpha) * self.rows_per_point))
        blocks = torch.cat([self._blocks(part) for part in chunks(x, size)])
        return self.mean(x), blocks

    @evaluated
    def diagonal(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """The mean and the variances: (N, C) each."""
        mean, blocks = self.moments(x)
        return mean, blocks.diagonal(dim1=1, dim2=2).to(mean.dtype)

    contrast = contrast_by_blocks

    @evaluated
    def joint(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """The mean (N·C,) and the covariance (N·C, N·C) of all points together."""
        mean, (Theta, K) = self.mean(x), self._cross(x)
        crossed = Theta @ self.W @ K.mT
        covariance = self.kernel.precise()(x) + Theta @ self.B @ Theta.mT - crossed - crossed.mT
        if self.rows_per_point < self.num_outputs:
            covariance = kron_identity(covariance, self.num_outputs)
        return mean.reshape(-1), (0.5 * (covariance + covariance.mT)).to(mean.dtype)

    @evaluated
    def prior_variances(self, x: Inputs) -> Tensor:
        """The variances before training: (N, C)."""
        return kernel_variances(self.kernel, self.num_outputs, x)

    @evaluated
    def functions(
        self, num_samples: int, generator: torch.Generator | None
    ) -> Callable[[Inputs], Tensor]:
        """Functions of the ensemble, for a kernel with features that is also the tangent kernel.

        A function that starts with the weights w₀ ends with w₀ + Φ(X)ᵀ W (y − m(X) − Φ(X) w₀ − ε), where ε is
        the part of the ridge.
        """
        if not isinstance(self.kernel, FeatureKernel) or self.tangent is not None:
            raise NotAvailable(
                "sample_functions needs a kernel with features that is also the tangent kernel, as "
                "gradient_flow(linearize(network), data).ntk_gp() has it. Use posterior.sample(x, "
                "num_samples) at fixed points, or flow.path(t, x, start=function) for one function."
            )
        precise, device = self.kernel.precise(), self.W.device
        assert isinstance(precise, FeatureKernel)
        draw = lambda rows: random_normal((rows, num_samples), generator=generator, device=device)
        w0 = draw(self.kernel.num_features)
        begin = precise.apply(self.x, w0) + self.noise**0.5 * draw(len(self.alpha))
        weights = w0 + precise.adjoint(self.x, self.alpha - self.W @ begin)
        return FunctionSamples(self.kernel, self.prior_mean, self.num_outputs, weights)

    def _cross(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """Θ(x, X) and K(x, X) in float64."""
        K = self.kernel.precise()(x, self.x)
        return K if self.tangent is None else self.tangent.precise()(x, self.x), K

    def _blocks(self, x: Inputs) -> Tensor:
        """The covariance of the outputs at each point: (N, C, C), float64."""
        per_point = self.rows_per_point
        Theta, K = (part.unflatten(0, (-1, per_point)) for part in self._cross(x))
        crossed = Theta @ self.W @ K.mT
        blocks = self.kernel.precise().blocks(x) + Theta @ self.B @ Theta.mT - crossed - crossed.mT
        blocks = 0.5 * (blocks + blocks.mT)
        # Rounding may leave tiny variances negative.
        variances = blocks.diagonal(dim1=1, dim2=2)
        blocks = blocks + torch.diag_embed(variances.clamp(min=0.0) - variances)
        if per_point < self.num_outputs:
            blocks = blocks * torch.eye(self.num_outputs).to(blocks)
        return blocks


@dataclass(frozen=True)
class ByGradientFlow(Recipe):
    """How an ensemble was trained, and until when.

    Args:
        time: The time in steps of gradient descent; infinity is convergence.
    """

    time: float

    def extend(self, posterior: Posterior, data: Data, likelihood: Likelihood | None) -> Posterior:
        """Refused: more data change the training from its first step on."""
        raise NotAvailable(
            "update is for a Gaussian process that was conditioned on data; more data change the training of "
            "an ensemble from its first step on. Call gradient_flow with all data."
        )

    def dual(self, posterior: Posterior) -> Dual:
        """Refused: an ensemble is not the linear model of one network."""
        raise NotAvailable(
            "dual is of one network, and this is the law of an ensemble in training. Use "
            "dual(network, data, likelihood, prior_var) from net2gp.explain with one of its networks."
        )

    def tempered(self, posterior: Posterior, factor: float) -> Posterior:
        """Refused: the covariance of an ensemble follows from its start and its training."""
        raise NotAvailable(
            "tempered is for a Gaussian over a network's parameters, and this is the law of an ensemble: its "
            "covariance follows from its start and its training. Use flow.posterior(t) at another time, or "
            "call gradient_flow with another ridge or with other weight variances."
        )

    def facts(self, posterior: Posterior) -> dict[str, str]:
        """The time."""
        return {"time": f"{self.time:g}"}

    def without_evidence(self) -> str:
        """That training has no evidence."""
        return (
            "an ensemble in training has no evidence. Use condition(infinite_width(network).nngp, data, "
            "Gaussian(noise_var)) for the evidence of the process at its start."
        )
