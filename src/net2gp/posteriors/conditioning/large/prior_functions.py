"""Functions drawn from a prior, which can be evaluated at any points.

Variances of linear combinations of values depend on second moments alone. So a draw need not be Gaussian:
the mean over all draws of g(x) g(x') has to be k(x, x'), and it is for everything here but networks of finite
width, for which it is up to O(1/width).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, singledispatch
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from net2gp.errors import Net2GPError
from net2gp.inputs import chunks, num_rows, tensors
from net2gp.kernels import RBF, IndependentOutputs, Periodic
from net2gp.kernels.base import Precise, Product, Scaled, Sum, widened
from net2gp.kernels.periodic import circle
from net2gp.kernels.stretched import Stretched
from net2gp.limits.limit_kernels import LimitKernel
from net2gp.limits.sampling.twin import twin
from net2gp.linalg.chance import random_normal
from net2gp.tags import savable
from net2gp.types import FeatureKernel, Inputs, Kernel

NUM_WAVES = 1024
"""Random frequencies of one function with a squared-exponential kernel."""

WIDTH = 512
"""The width of the networks that stand for functions with the kernel of a limit."""

PART_BYTES = 2**27
"""How much memory the waves at some points may take."""


class PriorFunctions(Protocol):
    """S functions with E[g(x) g(x')] = k(x, x')."""

    @property
    def exact(self) -> bool:
        """Whether this holds exactly, not only up to O(1/width)."""

    def __call__(self, x: Inputs) -> Tensor:
        """The values in float64, (N, S), or (N·C, S) if C outputs are coupled."""


@dataclass(frozen=True)
class Draw:
    """How many functions are drawn for which points, and from which source."""

    num_samples: int
    points: Inputs
    generator: torch.Generator

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers in float64, drawn on the CPU and moved to the points."""
        device = tensors(self.points)[0].device
        return random_normal(shape, generator=self.generator, device=device)


def prior_functions(kernel: Kernel, draw: Draw) -> PriorFunctions | None:
    """Draw functions with the covariance of a kernel, or return None if nothing is known of its functions.

    Kernels with features, RBF and Periodic, limits of networks that do not couple outputs (NNGP), stretched
    inputs, copies for several outputs, multiples, sums and products of these are known.
    """
    if isinstance(kernel, FeatureKernel):
        weights = draw.normal(kernel.num_features, draw.num_samples)
        return FeatureFunctions(kernel, weights)
    return _drawn(kernel, draw)


@singledispatch
def _drawn(kernel: Kernel, draw: Draw) -> PriorFunctions | None:
    return None


@savable("drawn.FeatureFunctions")
@dataclass(frozen=True, eq=False)
class FeatureFunctions:
    """Φ(x) w for standard normal w (P, S)."""

    kernel: FeatureKernel
    weights: Tensor

    exact = True

    def __call__(self, x: Inputs) -> Tensor:
        """Φ(x) w."""
        return self.kernel.apply(x, self.weights).double()


@savable("drawn.Waves")
@dataclass(frozen=True, eq=False)
class Waves:
    """√(2 variance / F) Σ_f a_f cos(ω_fᵀx + b_f): random Fourier features, with frequencies of its own each.

    Args:
        frequencies: ω, (D, S·F).
        phases: b, (S·F,).
        amplitudes: a, standard normal, (S·F,).
        num_samples: S.
        variance: k(x, x).
        period: If given, points are wrapped around a circle first.

    Reference: Rahimi and Recht, Random features for large-scale kernel machines, 2007.
    """

    frequencies: Tensor
    phases: Tensor
    amplitudes: Tensor
    num_samples: int
    variance: float | Tensor
    period: float | Tensor | None = None

    exact = True

    def __call__(self, x: Inputs) -> Tensor:
        """The values, some points at a time."""
        size = max(1, PART_BYTES // (8 * len(self.phases)))
        return torch.cat([self._values(part) for part in chunks(x, size)])

    def _values(self, x: Inputs) -> Tensor:
        assert isinstance(x, Tensor)
        points = x.double()
        if self.period is not None:
            points = circle(points, self.period)
        waves = torch.addmm(self.phases, points, self.frequencies).cos_().mul_(self.amplitudes)
        waves = waves.reshape(len(x), self.num_samples, -1)
        scale = torch.as_tensor(self.variance, dtype=torch.float64, device=x.device)
        return waves.sum(2) * (2 * scale / waves.shape[2]).sqrt()


def _waves(kernel: RBF, columns: int, draw: Draw, period: float | Tensor | None = None) -> Waves:
    count = draw.num_samples * NUM_WAVES
    frequencies = draw.normal(columns, count)
    lengthscale = torch.as_tensor(kernel.lengthscale).detach().to(frequencies)
    phases = torch.rand(count, generator=draw.generator, dtype=torch.float64) * 2 * torch.pi
    return Waves(
        frequencies / lengthscale.reshape(-1, 1),
        phases.to(frequencies.device),
        draw.normal(count),
        draw.num_samples,
        kernel.output_var,
        period,
    )


@_drawn.register
def _of_rbf(kernel: RBF, draw: Draw) -> PriorFunctions:
    assert isinstance(draw.points, Tensor)
    return _waves(kernel, draw.points.shape[1], draw)


@_drawn.register
def _of_periodic(kernel: Periodic, draw: Draw) -> PriorFunctions:
    assert isinstance(draw.points, Tensor)
    columns = 2 * draw.points.shape[1]
    return _waves(kernel._on_the_circle, columns, draw, kernel.period)


@savable("drawn.ScaledFunctions")
@dataclass(frozen=True, eq=False)
class ScaledFunctions:
    """√variance · g."""

    functions: PriorFunctions
    variance: float | Tensor

    @property
    def exact(self) -> bool:
        """As for g."""
        return self.functions.exact

    def __call__(self, x: Inputs) -> Tensor:
        """√variance · g(x)."""
        values = self.functions(x)
        return values * torch.as_tensor(self.variance).to(values).sqrt()


@_drawn.register
def _of_scaled(kernel: Scaled, draw: Draw) -> PriorFunctions | None:
    found = prior_functions(kernel.kernel, draw)
    return None if found is None else ScaledFunctions(found, kernel.variance)


@savable("drawn.CombinedFunctions")
@dataclass(frozen=True, eq=False)
class CombinedFunctions:
    """Sums or products of independent functions, whose covariances are sums or products too."""

    functions: tuple[Any, ...]
    product: bool

    @property
    def exact(self) -> bool:
        """Whether all parts are."""
        return all(one.exact for one in self.functions)

    def __call__(self, x: Inputs) -> Tensor:
        """Σ g_i(x) or Π g_i(x)."""
        values = torch.stack([one(x) for one in self.functions])
        return values.prod(0) if self.product else values.sum(0)


@_drawn.register(Sum)
@_drawn.register(Product)
def _of_combined(kernel: Sum | Product, draw: Draw) -> PriorFunctions | None:
    counts = {part.outputs(draw.points) for part in kernel.kernels}
    found = [prior_functions(part, draw) for part in kernel.kernels]
    # A product of independent copies has no covariance between outputs, which a common factor would give it.
    if len(counts) > 1 or any(one is None for one in found):
        return None
    return CombinedFunctions(tuple(found), isinstance(kernel, Product))


@savable("drawn.WidenedFunctions")
@dataclass(frozen=True, eq=False)
class WidenedFunctions:
    """g of inputs in float64, after a change of scale if there is one."""

    functions: PriorFunctions
    lengthscale: Tensor | None = None
    center: Tensor | None = None

    @property
    def exact(self) -> bool:
        """As for g."""
        return self.functions.exact

    def __call__(self, x: Inputs) -> Tensor:
        """g((x − c) / ℓ)."""
        x = widened(x)
        if self.lengthscale is None:
            return self.functions(x)
        assert isinstance(x, Tensor)
        moved = x if self.center is None else x - self.center.to(x)
        return self.functions(moved / self.lengthscale.to(x))


@_drawn.register
def _of_precise(kernel: Precise, draw: Draw) -> PriorFunctions | None:
    found = prior_functions(kernel.kernel, replace(draw, points=widened(draw.points)))
    return None if found is None else WidenedFunctions(found)


@_drawn.register
def _of_stretched(kernel: Stretched, draw: Draw) -> PriorFunctions | None:
    found = prior_functions(kernel.kernel, draw)
    if found is None:
        return None
    return WidenedFunctions(found, kernel.lengthscale, kernel.center)


@savable("drawn.Copies")
@dataclass(frozen=True, eq=False)
class Copies:
    """C independent outputs from S·C functions, with rows n·C + c."""

    functions: PriorFunctions
    num_outputs: int

    @property
    def exact(self) -> bool:
        """As for g."""
        return self.functions.exact

    def __call__(self, x: Inputs) -> Tensor:
        """(N·C, S)."""
        values = self.functions(x)
        return values.reshape(num_rows(x) * self.num_outputs, -1)


@_drawn.register
def _of_copies(kernel: IndependentOutputs, draw: Draw) -> PriorFunctions | None:
    C = kernel.num_outputs
    found = prior_functions(kernel.kernel, replace(draw, num_samples=C * draw.num_samples))
    return None if found is None else Copies(found, C)


@savable("drawn.Networks")
@dataclass(frozen=True, eq=False)
class Networks:
    """Wide networks with random weights, drawn when they are first used.

    Args:
        kernel: The NNGP kernel of the limit.
        num_samples: S.
        seed: The seed of all weights.
    """

    kernel: LimitKernel
    num_samples: int
    seed: int

    exact = False

    @cached_property
    def _networks(self) -> list[nn.Module]:
        generator = torch.Generator().manual_seed(self.seed)
        return [wide_network(self.kernel, WIDTH, generator) for _ in range(self.num_samples)]

    def __call__(self, x: Inputs) -> Tensor:
        """The first output of each network."""
        variance = torch.as_tensor(self.kernel.variance, dtype=torch.float64)
        inputs = self.kernel.limit.inputs(widened(x))
        device = inputs[0].device
        values = []
        for network in self._networks:
            parts = [network.to(device)(*part) for part in chunks(inputs, 4096)]
            values.append(torch.cat(parts).reshape(num_rows(x), -1)[:, 0])
        return torch.stack(values, 1) * variance.sqrt().to(device)


@_drawn.register
def _of_limit(kernel: LimitKernel, draw: Draw) -> PriorFunctions | None:
    if kernel.tangent or kernel.outputs(draw.points) is not None:
        return None
    seed = int(torch.randint(2**31, (1,), generator=draw.generator))
    try:
        kernel.limit.inputs(draw.points)
        wide_network(kernel, 8, torch.Generator().manual_seed(seed))
    except Net2GPError:  # the network cannot be widened
        return None
    return Networks(kernel, draw.num_samples, seed)


def wide_network(kernel: LimitKernel, width: int, generator: torch.Generator) -> nn.Module:
    """A random network whose outputs have the kernel of the limit up to O(1/width), but for its factor."""
    prior = kernel.limit.prior
    network = twin(
        kernel.limit.graph,
        width,
        weight_var=prior.weight_vars,
        bias_var=prior.bias_vars,
        parameterization="standard",
        generator=generator,
    )
    return network.double().requires_grad_(False).eval()
