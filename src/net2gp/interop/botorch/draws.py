"""Functions drawn from a posterior, which can be evaluated anywhere, as deterministic models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from botorch.models.deterministic import DeterministicModel
from torch import Tensor, nn

from net2gp.errors import NotAvailable, check_count
from net2gp.kernels.stretched import Stretched
from net2gp.limits.limit_kernels import LimitKernel
from net2gp.limits.sampling.twin import twin
from net2gp.linalg.chance import random_normal
from net2gp.posteriors.conditioning.conditioned import Conditioned
from net2gp.posteriors.posterior import Posterior
from net2gp.types import FeatureKernel, Kernel

if TYPE_CHECKING:
    from net2gp.interop.botorch.model import PosteriorModel

Function = Callable[[Tensor], Tensor]
"""From N points to values (N, C)."""


class DrawnFunction(DeterministicModel):
    """One function drawn from the posterior of a model, in the model's own inputs and outcomes.

    Args:
        model: The model, whose transforms are applied.
        function: The function of transformed inputs, with transformed outcomes.
    """

    def __init__(self, model: PosteriorModel, function: Function) -> None:
        super().__init__()
        self.model, self.function = model, function
        self._num_outputs = model.num_outputs

    @property
    def batch_shape(self) -> torch.Size:
        """(), since it is one function."""
        return torch.Size()

    def forward(self, X: Tensor) -> Tensor:
        """Return the values of the function, in the space of the outcomes.

        Args:
            X: Points: (*b, n, d).

        Returns:
            The values: (*b, n, C).
        """
        points = self.model.transform_inputs(X)
        shaped = self.model.shaped(points)
        flat = shaped.reshape(-1, *self.model.input_shape)
        values = self.function(flat).to(X.dtype).reshape(*X.shape[:-1], -1)
        if hasattr(self.model, "outcome_transform"):
            values, _ = self.model.outcome_transform.untransform(values, X=X)
        return values if self.model.outputs is None else values[..., list(self.model.outputs)]


def drawn_function(
    fitted: Posterior, width: int, generator: torch.Generator | None
) -> Callable[[Tensor], Tensor]:
    """Draw a function from a posterior, by features or by a finite network."""
    check_count(width, "width", example=1024)
    if isinstance(fitted.kernel, FeatureKernel):
        functions = fitted.sample_functions(1, generator=generator)
        return lambda x: functions(x)[0]
    if not isinstance(fitted.process, Conditioned) or fitted.process.noise is None:
        raise NotAvailable(
            "functions are drawn from posteriors under Gaussian noise, or from kernels with features. Draw "
            "values at candidates: botorch.generation.MaxPosteriorSampling(model)(candidates)."
        )
    if fitted.process.rows_per_point > 1:
        raise NotAvailable(
            "functions of coupled outputs are drawn for kernels with features alone. Draw values at "
            "candidates: botorch.generation.MaxPosteriorSampling(model)(candidates)."
        )
    prior = [prior_function(fitted.kernel, width, generator) for _ in range(fitted.num_outputs)]
    return _conditioned(fitted.process, lambda x: torch.cat([f(x) for f in prior], 1), generator)


def prior_function(kernel: Kernel, width: int, generator: torch.Generator | None) -> Function:
    """Draw a function with the law of a limit from a finite network of that width: (N, 1) values."""
    if isinstance(kernel, Stretched):
        inner = prior_function(kernel.kernel, width, generator)
        return lambda x: inner(x / kernel.lengthscale.to(x))
    if not isinstance(kernel, LimitKernel) or kernel.tangent:
        raise NotAvailable(
            "functions are drawn for nngp(network) and for kernels with features, such as "
            f"linearize(network).kernel(), but the kernel is {type(kernel).__name__}. Draw values at "
            "candidates: botorch.generation.MaxPosteriorSampling(model)(candidates)."
        )
    prior = kernel.limit.prior
    network = twin(
        copy.deepcopy(kernel.limit.graph).double(),  # values at the data are nearly cancelled
        width,
        weight_var=dict(prior.weight_vars),
        bias_var=dict(prior.bias_vars),
        parameterization="standard",
        generator=generator,
    ).requires_grad_(False)
    return _OneOutput(network, float(kernel.variance) ** 0.5)


@dataclass(frozen=True)
class _OneOutput:
    """The first output of a network, times a scale; its outputs are independent copies of each other."""

    network: nn.Module
    scale: float

    def __call__(self, x: Tensor) -> Tensor:
        dtype = next(self.network.parameters()).dtype
        return self.scale * self.network(x.to(dtype)).flatten(1)[:, :1].to(x)


def _conditioned(
    process: Conditioned, prior: Function, generator: torch.Generator | None
) -> Function:
    """Correct a prior draw f₀ at the data by Matheron's rule.

    f(x) = E f(x) + f₀(x) − k(x, X)(K + Λ⁻¹)⁻¹(f₀(X) + ε), whose law is the posterior's.

    Reference: Wilson et al., Pathwise conditioning of Gaussian processes, JMLR 2021.
    """
    assert process.noise is not None
    assert isinstance(process.x, Tensor)
    shape = process.alpha.shape
    noise = random_normal(tuple(shape), generator=generator, device=process.alpha.device)
    drawn = prior(process.x).reshape(shape).to(process.alpha)
    weights = process.factor.solve(drawn + process.noise.sqrt()[:, None] * noise)
    precise = process.kernel.precise()

    def function(x: Tensor) -> Tensor:
        missed = precise(x, process.x).to(weights) @ weights
        return process.mean(x) + prior(x) - missed.reshape(len(x), -1).to(x)

    return function
