"""Kernels of any network by averaging over random draws of its parameters."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from net2gp.errors import InputError, NetworkError, check_dtype_and_device, one_number
from net2gp.inputs import check_inputs, describe, num_rows, rows, tensors
from net2gp.kernels.base import BaseKernel
from net2gp.limits.prior import Parameterization, Variances
from net2gp.limits.sampling.channels import widened
from net2gp.limits.sampling.draws import Draws, normal_draws, own_draws
from net2gp.limits.sampling.kernel_samples import BUDGET, Sampling, settings
from net2gp.progress import progress
from net2gp.types import Inputs


@dataclass(frozen=True, eq=False)
class Estimate:
    """A mean over draws of the parameters, and the standard error of each of its entries.

    Args:
        mean: The mean.
        standard_error: The standard error of each entry, of the same shape.
        num_samples: The number of draws.
    """

    mean: Tensor
    standard_error: Tensor
    num_samples: int


@dataclass(eq=False)
class _Running:
    """The mean and the squared deviations of a growing sample (Chan, Golub and LeVeque, 1983)."""

    count: int = 0
    mean: Tensor | float = 0.0
    squares: Tensor | float = 0.0

    def add(self, batch: Tensor) -> None:
        """Add samples, which are stacked along the first axis."""
        batch = batch.double()
        size, mean = batch.shape[0], batch.mean(0)
        gap, total = mean - self.mean, self.count + batch.shape[0]
        within = (batch - mean).square().sum(0)
        self.squares = self.squares + within + gap.square() * (self.count * size / total)
        self.mean = self.mean + gap * (size / total)
        self.count = total

    def estimate(self, dtype: torch.dtype, variance: float | Tensor) -> Estimate:
        """Return the estimate so far; the standard error of a single draw is infinite."""
        mean, squares = torch.as_tensor(self.mean), torch.as_tensor(self.squares)
        if self.count > 1:
            error = (squares / ((self.count - 1) * self.count)).sqrt()
        else:
            error = torch.full_like(mean, float("inf"))
        return Estimate((mean * variance).to(dtype), (error * variance).to(dtype), self.count)


@dataclass(frozen=True, eq=False)
class MonteCarloKernel(BaseKernel):
    """A kernel that is estimated from draws of a network's parameters.

    The draws are numbered and do not depend on the points, so that every matrix is a mean of positive
    semi-definite matrices, and a block of a larger matrix equals the block alone. With several outputs, or
    outputs at several positions, the kernel is their mean: outputs count as independent copies.

    Args:
        network: The network, whose parameters are replaced by draws.
        draws: How parameters are drawn.
        num_samples: The number of draws.
        tangent: Whether it is the tangent kernel; otherwise it is the covariance of the outputs.
        variance: A factor of the kernel.
        product_dtype: The dtype of results, or None for the dtype of the network.
    """

    network: nn.Module
    draws: Draws
    num_samples: int
    tangent: bool
    variance: float | Tensor = 1.0
    product_dtype: torch.dtype | None = None

    @property
    def nngp(self) -> MonteCarloKernel:
        """Return the covariance of the outputs over the same draws."""
        return replace(self, tangent=False)

    @property
    def ntk(self) -> MonteCarloKernel:
        """Return the mean of the empirical tangent kernels of the same draws."""
        return replace(self, tangent=True)

    def check(self, x: Inputs) -> None:
        """Raise an error that says what to change, if the network cannot take `x`."""
        check_inputs(x)
        like = next(self.network.parameters())
        for value in tensors(x):
            check_dtype_and_device(value, "x", like, "the network")

    def result_dtype(self, x: Inputs) -> torch.dtype:
        """Return the dtype of the network, or float64 if precise."""
        return self.product_dtype or next(self.network.parameters()).dtype

    def __call__(self, x: Inputs, y: Inputs | None = None) -> Tensor:
        """Compute k(x, y), (N, M)."""
        return self.estimate(x, y).mean

    def estimate(self, x: Inputs, y: Inputs | None = None) -> Estimate:
        """Estimate the kernel matrix.

        Args:
            x: N points.
            y: M points, or None for x itself.

        Returns:
            k(x, y) and its standard errors: (N, M).
        """
        return _last(self.stream(x, y, every=self.num_samples))

    def estimates(self, x: Inputs, y: Inputs | None = None) -> tuple[Estimate, Estimate]:
        """Estimate both kernels from one pass over the draws.

        Args:
            x: N points.
            y: M points, or None for x itself.

        Returns:
            The NNGP and the tangent kernel.
        """
        first, second = _last(self._streams(x, y, tangent=True, every=self.num_samples))
        return first, second

    def stream(self, x: Inputs, y: Inputs | None = None, *, every: int = 10) -> Iterator[Estimate]:
        """Estimate k(x, y) from more and more draws; only running sums are kept.

        Args:
            x: N points.
            y: M points, or None for x itself.
            every: The number of draws between two estimates.

        Yields:
            The estimate after each further `every` draws.
        """
        for found in self._streams(x, y, tangent=self.tangent, every=every):
            yield found[-1]

    def _streams(
        self, x: Inputs, y: Inputs | None, *, tangent: bool, every: int, diagonal: bool = False
    ) -> Iterator[tuple[Estimate, ...]]:
        """Yield running estimates of the NNGP and, if `tangent`, of the tangent kernel."""
        self.check(x)
        y = None if y is x else y
        if y is not None:
            self.check(y)
        if every < 1:
            raise InputError(f"every must be at least 1, but {every} was given.")
        totals = tuple(_Running() for _ in range(1 + tangent))
        dtype = self.result_dtype(x)
        sampling = Sampling(self.network, self.draws, x, y, tangent, diagonal)
        size = self._draws_at_once(x, y, tangent)
        with progress("draws", total=self.num_samples) as advance:
            done = 0
            while done < self.num_samples:
                count = min(size, self.num_samples - done, every - done % every)
                for total, batch in zip(totals, sampling.batch(done, count), strict=True):
                    total.add(batch)
                done += count
                advance(count)
                if done % every == 0 or done == self.num_samples:
                    yield tuple(total.estimate(dtype, self.variance) for total in totals)

    def _draws_at_once(self, x: Inputs, y: Inputs | None, tangent: bool) -> int:
        """Return how many draws fit into the budget, with parameters, activations and gradients."""
        points = num_rows(x) + (0 if y is None else num_rows(y))
        pairs = num_rows(x) * num_rows(x if y is None else y)
        size = sum(value.numel() for value in self.network.parameters())
        numbers = size * (1 + 2 * points * tangent) + 3 * pairs + points * self._activations(x)
        return max(1, BUDGET // (8 * numbers))

    def _activations(self, x: Inputs) -> int:
        """Return how many numbers the layers compute for one point."""
        count = 0

        def add(module: nn.Module, args: Any, out: Any) -> None:
            nonlocal count
            count += sum(
                t.numel()
                for t in (out if isinstance(out, tuple) else (out,))
                if isinstance(t, Tensor)
            )

        handles = [module.register_forward_hook(add) for module in self.network.modules()]
        try:
            with torch.no_grad(), settings(next(self.network.parameters()).device, 0):
                Sampling(self.network, self.draws, x, None, False, False).call(
                    {}, rows(x, slice(0, 1))
                )
        finally:
            for handle in handles:
                handle.remove()
        return count

    def diag(self, x: Inputs) -> Tensor:
        """Compute the diagonal of k(x, x), (N,)."""
        found = _last(
            self._streams(x, None, tangent=self.tangent, every=self.num_samples, diagonal=True)
        )
        return found[-1].mean

    def scaled(self, variance: float | Tensor) -> MonteCarloKernel:
        """Return variance · k."""
        return replace(self, variance=self.variance * one_number(variance, "variance"))

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> MonteCarloKernel:
        """Return the same kernel with the network on another device or in another dtype."""
        moved = copy.deepcopy(self.network).to(device=device, dtype=dtype)
        drawn = copy.deepcopy(self.draws.network).to(dtype=dtype)
        return replace(self, network=moved, draws=replace(self.draws, network=drawn))


def _last(items: Iterator[Any]) -> Any:
    *_, last = items
    return last


def monte_carlo_kernel(
    network: nn.Module,
    num_samples: int = 100,
    *,
    tangent: bool = False,
    weight_var: Variances | None = None,
    bias_var: Variances | None = None,
    parameterization: Parameterization | None = None,
    width: int | None = None,
    generator: torch.Generator | None = None,
) -> MonteCarloKernel:
    """Return the kernel of any network, estimated from draws of its parameters.

        NNGP:  k(x, x') = 1/S Σ_s f(x; θ_s) · f(x'; θ_s) / C
        NTK:   k(x, x') = 1/S Σ_s Σ_p r_p ∂f(x; θ_s)/∂θ_p · ∂f(x'; θ_s)/∂θ_p / C     (tangent=True)

    The module must only be callable, so that max pooling, softmax attention and LSTMs are no obstacle.
    Without variances each layer's `reset_parameters()` draws, and r = 1. With variances, weights are
    N(0, weight_var / fan_in), biases are N(0, bias_var), and gains of norms are one; r is the variance of the
    parameter in the NTK parameterization, and one in the standard one. A `twin` in the NTK parameterization
    has its standard normal parameters redrawn.

    The trace over outputs in the NTK is estimated with one random vector of signs per draw, which is exact
    for one output. `estimate(x)` has the standard errors, which fall as 1/√S; the mean differs from the limit
    of infinite width by O(1/width). The cost is S·N passes, and for the NTK also S·N·M·P operations and N·P
    memory.

    Args:
        network: The module. It is copied.
        num_samples: The number of draws S.
        tangent: Whether the kernel is the NTK; otherwise it is the NNGP.
        weight_var: The variance of weights times their fan-in, a number or a mapping from names of layers.
            None is 1 if `bias_var` is given; if neither is, layers draw their own parameters.
        bias_var: The variance of biases (0 if left out), in the same forms.
        parameterization: "ntk" (the default with variances) or "standard".
        width: The width of the `twin` that is drawn in place of the network, or None for the network itself.
        generator: The source of the seed. Without one the draws are always the same.

    Returns:
        The kernel.

    Raises:
        NetworkError: `network` is no module with parameters, or couples the points of a batch.
        InputError: `num_samples` is less than 1.

    >>> network = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.MaxPool1d(2), nn.Linear(32, 1))
    >>> kernel = monte_carlo_kernel(network, 200, weight_var=2.0, bias_var=0.1)
    >>> estimate = kernel.estimate(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    >>> estimate.mean.shape, estimate.num_samples
    (torch.Size([2, 2]), 200)

    Reference: Novak et al., Bayesian deep convolutional networks with many channels are Gaussian processes,
    2019, section 4.
    """
    if not isinstance(network, nn.Module) or not any(True for _ in network.parameters()):
        raise NetworkError(f"a module with parameters is needed, but got {describe(network)}.")
    if num_samples < 1:
        raise InputError(f"num_samples must be at least 1, but {num_samples} was given.")
    _check_batches(network)
    seed = 0
    if generator is not None:
        device = generator.device
        seed = int(torch.randint(2**62, (1,), generator=generator, device=device))
    if width is not None:
        network = widened(network, width)
    template = copy.deepcopy(network).cpu()
    if weight_var is None and bias_var is None:
        draws = own_draws(template, seed, parameterization)
    else:
        kinds = parameterization or "ntk"
        given = (1.0 if weight_var is None else weight_var, bias_var or 0.0, kinds)
        draws = normal_draws(template, seed, *given)
    draws(0)
    return MonteCarloKernel(copy.deepcopy(network), draws, num_samples, tangent)


def _check_batches(network: nn.Module) -> None:
    for name, module in network.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            raise NetworkError(
                f"{type(module).__name__} ('{name}') in training couples the points of a batch, so that "
                "k(x, x') would depend on the other points. Call network.eval()."
            )
