"""The effect of depth on compositions of squared-exponential layers: slopes, and distances of two points.

A layer is a Gaussian process of kernel `RBF(lengthscale, output_var)` with `width` outputs. Slopes depend
only on s = output_var / lengthscale².
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from net2gp.errors import InputError, check_count, check_positive
from net2gp.kernels import RBF


class LogSlope(NamedTuple):
    """Mean and variance of log ‖f'‖ of one layer. Independent layers add up.

    Args:
        mean: The mean, a number.
        variance: The variance, a number.
    """

    mean: Tensor
    variance: Tensor


def log_slope(layer: RBF, *, width: int = 1) -> LogSlope:
    """Compute mean and variance of log ‖∂f/∂t‖, the logarithm of the factor by which a layer scales short
    distances.

    A squared-exponential process has ∂f/∂t ~ N(0, s I) with s = σ²/ℓ², so ‖∂f/∂t‖² is s times a χ² variable
    of H = `width` degrees of freedom. With the digamma function ψ,

        mean = ½ log s + ½ (ψ(H/2) + log 2),        variance = ¼ ψ'(H/2).

    For H = 1 these are ½ log s − (γ + log 2)/2 and π²/8. The mean is the Lyapunov exponent of the depth: the
    slope of L layers is approximately log-normal with mean L · mean and variance L · variance, for large L.

    Args:
        layer: A kernel `RBF(lengthscale, output_var)` with a single length scale.
        width: The number H of outputs of a layer.

    Returns:
        Mean and variance.

    >>> log_slope(RBF(lengthscale=1.0, output_var=1.0))
    LogSlope(mean=tensor(-0.6352, dtype=torch.float64), variance=tensor(1.2337, dtype=torch.float64))

    Reference: Duvenaud, Rippel, Adams & Ghahramani, "Avoiding pathologies in very deep networks", 2014.
    """
    # The Hurwitz zeta function at 2 is ψ', which torch.polygamma computes only to 1e-9.
    half = torch.tensor(checked(layer, width) / 2, dtype=torch.float64)
    center = 0.5 * (torch.digamma(half) + math.log(2.0))
    return LogSlope(0.5 * ratio(layer).log() + center, 0.25 * torch.special.zeta(2.0, half))


def mean_slope(layer: RBF, *, width: int = 1) -> Tensor:
    """Compute E ‖∂f/∂t‖ = √(2s) Γ((H+1)/2) / Γ(H/2). For one output it is 1 at s = π/2.

    Args:
        layer: A kernel `RBF(lengthscale, output_var)` with a single length scale.
        width: The number H of outputs of a layer.

    Returns:
        The mean slope.

    >>> round(mean_slope(RBF(lengthscale=1.0, output_var=math.pi / 2)).item(), 12)
    1.0

    Reference: Duvenaud, Rippel, Adams & Ghahramani, "Avoiding pathologies in very deep networks", 2014.
    """
    half = checked(layer, width) / 2
    return (2 * ratio(layer)).sqrt() * math.exp(math.lgamma(half + 0.5) - math.lgamma(half))


def collapse_threshold(*, width: int = 1) -> float:
    """Compute the s = σ²/ℓ² at which the Lyapunov exponent is 0: ½ exp(−ψ(H/2)), or 2e^γ for one output.

    With smaller s, all points come together as layers are stacked. With larger s, nearby points move apart.

    Args:
        width: The number H of outputs of a layer.

    Returns:
        The threshold.

    >>> round(collapse_threshold(), 6)
    3.562145

    Reference: Dunlop, Girolami, Stuart & Teckentrup, "How deep are deep Gaussian processes?", 2018.
    """
    check_count(width, "width")
    return 0.5 * math.exp(-torch.digamma(torch.tensor(width / 2, dtype=torch.float64)).item())


def log_distances(
    layer: RBF,
    distance: float,
    num_layers: int,
    *,
    width: int = 1,
    num_samples: int = 1000,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw log ‖f_l(x) − f_l(x')‖ for l = 0 … L, for two points at a given distance.

    The distance of two points is itself a Markov chain: given d, the squared distance after the next layer
    is exactly 2σ²(1 − exp(−d² / 2ℓ²)) times a χ² variable of `width` degrees of freedom. The computation
    carries logarithms, so it can follow a collapse to any depth. The cost is S·L.

    Args:
        layer: A kernel `RBF(lengthscale, output_var)` with a single length scale.
        distance: The distance of the two inputs.
        num_layers: The number L of layers.
        width: The number of outputs of a layer.
        num_samples: The number S of draws.
        generator: The source of random numbers. None means torch's global one.

    Returns:
        Log distances, (S, L + 1).

    >>> chain = log_distances(RBF(output_var=2.0), 0.5, 200, generator=torch.Generator().manual_seed(0))
    >>> bool(chain[:, -1].median() < math.log(1e-20))
    True

    Reference: Dunlop, Girolami, Stuart & Teckentrup, "How deep are deep Gaussian processes?", 2018.
    """
    checked(layer, width)
    check_positive(distance, "distance")
    check_count(num_layers, "num_layers")
    check_count(num_samples, "num_samples")
    output_var, scale = (
        torch.as_tensor(value, dtype=torch.float64).reshape(()).item()
        for value in (layer.output_var, layer.lengthscale)
    )
    current = torch.full((num_samples,), math.log(distance), dtype=torch.float64)
    path = [current]
    for _ in range(num_layers):
        normal = torch.randn(num_samples, width, generator=generator, dtype=torch.float64)
        # With z = d² / 2ℓ², log(1 − e^(−z)) is log z − z/2 up to O(z²) for small z, where z may underflow.
        log_z = 2 * current - math.log(2 * scale**2)
        z = log_z.exp()
        apart = torch.where(z > 1e-8, torch.log(-torch.expm1(-z)), log_z - z / 2)
        square = normal.square().sum(1).log() + math.log(2 * output_var) + apart
        current = 0.5 * square
        path.append(current)
    return torch.stack(path, dim=1)


def ratio(layer: RBF) -> Tensor:
    """Compute σ²/ℓ² in float64."""
    output_var, scale = (
        torch.as_tensor(value, dtype=torch.float64).reshape(())
        for value in (layer.output_var, layer.lengthscale)
    )
    return output_var / scale.square()


def checked(layer: RBF, width: int) -> int:
    """Return the width after checks of layer and width."""
    if not isinstance(layer, RBF):
        raise InputError(
            f"A layer is a squared-exponential kernel, n2g.RBF(lengthscale, output_var), but got a "
            f"{type(layer).__name__}."
        )
    if torch.as_tensor(layer.lengthscale).numel() != 1:
        raise InputError(
            "A layer has one length scale here, but this one has one for each input: distances then "
            "depend on the direction. Give n2g.RBF(lengthscale=0.7), a number."
        )
    check_count(width, "width")
    return width
