"""One-dimensional regression problems drawn from a seed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from net2gp.errors import InputError


@dataclass(frozen=True, eq=False)
class Sinusoid:
    """Noisy samples of amplitude · sin(frequency · x + phase).

    Args:
        amplitude: The amplitude of the curve.
        phase: Its phase.
        frequency: Its frequency.
        x: Inputs, (N, 1).
        y: Targets, (N, 1).
    """

    amplitude: float
    phase: float
    frequency: float
    x: Tensor
    y: Tensor

    @property
    def noise_var(self) -> float:
        """The variance of the noise in y, (0.01 amplitude)²."""
        return (0.01 * self.amplitude) ** 2

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        """The pair (x, y)."""
        return self.x, self.y

    def truth(self, x: Tensor) -> Tensor:
        """Evaluate the curve without noise.

        Args:
            x: Inputs of any shape.

        Returns:
            The curve at `x`.
        """
        return self.amplitude * torch.sin(self.frequency * x + self.phase)


def sinusoid_task(seed: int, num_points: int = 10) -> Sinusoid:
    """Draw a sinusoid of random amplitude, phase and frequency, and samples of it.

    A ~ U(0.1, 5), b ~ U(0, 2π), w ~ U(0.5, 2), x ~ U(−5, 5), y = A sin(w x + b) + 0.01 A ε. The
    same seed gives the same curve for any number of points.

    Args:
        seed: The seed of the random numbers.
        num_points: The number of samples.

    Returns:
        The curve with its samples.

    >>> task = sinusoid_task(seed=0, num_points=5)
    >>> task.x.shape, bool((task.y - task.truth(task.x)).abs().max() < 0.05 * task.amplitude)
    (torch.Size([5, 1]), True)

    Reference: Yoon et al. (2018), Bayesian model-agnostic meta-learning.
    """
    _check_points(num_points)
    # The curve is drawn before its points, so the number of points does not change it.
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(3, generator=generator, dtype=torch.float64).tolist()
    amplitude, phase = 0.1 + 4.9 * uniform[0], 2 * math.pi * uniform[1]
    frequency = 0.5 + 1.5 * uniform[2]
    x = 10 * torch.rand(num_points, 1, generator=generator, dtype=torch.float64) - 5
    noise = torch.randn(num_points, 1, generator=generator, dtype=torch.float64)
    y = amplitude * (torch.sin(frequency * x + phase) + 0.01 * noise)
    dtype = torch.get_default_dtype()
    return Sinusoid(amplitude, phase, frequency, x.to(dtype), y.to(dtype))


@dataclass(frozen=True, eq=False)
class Curve:
    """Noisy samples of a fixed curve on [0, 6], with a gap in the inputs.

    Args:
        x: Inputs, (N, 1).
        y: Targets, (N, 1).
        noise_var: The variance of the noise.
        gap: The interval without inputs.
    """

    x: Tensor
    y: Tensor
    noise_var: float
    gap: tuple[float, float]

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        """The pair (x, y)."""
        return self.x, self.y

    def truth(self, x: Tensor) -> Tensor:
        """Evaluate the curve sin(1.3 x) + 0.6 sin(2.9 x + 1) − 0.2 x without noise.

        Args:
            x: Inputs of any shape.

        Returns:
            The curve at `x`.
        """
        return torch.sin(1.3 * x) + 0.6 * torch.sin(2.9 * x + 1) - 0.2 * x


def snelson_like(seed: int = 0, num_points: int = 150, *, noise_var: float = 0.05) -> Curve:
    """Draw samples of a curve with a gap in its middle, where a good posterior is uncertain.

    The data resemble the toy data of Snelson & Ghahramani (2006), Sparse Gaussian processes using
    pseudo-inputs, but the formula is another.

    Args:
        seed: The seed of the random numbers.
        num_points: The number of samples.
        noise_var: The variance of the noise.

    Returns:
        The curve with its samples.

    >>> curve = snelson_like()
    >>> curve.x.shape, bool(((curve.x > curve.gap[0]) & (curve.x < curve.gap[1])).any())
    (torch.Size([150, 1]), False)
    """
    _check_points(num_points)
    gap = (2.0, 3.5)
    width = gap[1] - gap[0]
    generator = torch.Generator().manual_seed(seed)
    x = (6 - width) * torch.rand(num_points, 1, generator=generator, dtype=torch.float64)
    x = torch.where(x > gap[0], x + width, x)
    noise = torch.randn(num_points, 1, generator=generator, dtype=torch.float64)
    dtype = torch.get_default_dtype()
    curve = Curve(x.to(dtype), x.to(dtype), noise_var, gap)
    y = curve.truth(x) + math.sqrt(noise_var) * noise
    return Curve(curve.x, y.to(dtype), noise_var, gap)


def _check_points(num_points: int) -> None:
    if num_points < 1:
        raise InputError(f"num_points must be at least 1, but is {num_points}.")
