"""Kernels of finite networks by Monte Carlo, written without the library: the judge of its limits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d)
CHANNELS = 2
"""Outputs whose gradients are taken in each draw."""


@dataclass(frozen=True)
class Kernels:
    """Means of both kernels over draws, (2, N, N), and their standard errors."""

    mean: Tensor
    error: Tensor


def deviations(network: nn.Module, weight_var: float, bias_var: float) -> dict[nn.Parameter, float]:
    """The standard deviation of the entries of each parameter that is drawn and trained."""
    found: dict[nn.Parameter, float] = {}
    for module in network.modules():
        for name, value in module.named_parameters(recurse=False):
            if isinstance(module, NORMS):
                continue
            variance = weight_var
            if "bias" in name:
                variance = bias_var
            elif isinstance(module, nn.Linear | nn.RNNBase | nn.RNNCellBase):
                variance = weight_var / value.shape[1]
            elif isinstance(module, TRANSPOSED):
                variance = weight_var / (value.shape[0] * math.prod(value.shape[2:]))
            elif isinstance(module, CONVOLUTIONS):
                variance = weight_var / math.prod(value.shape[1:])
            found.setdefault(value, math.sqrt(variance))
    return found


def sample(
    network: nn.Module, x: Tensor, drawn: dict[nn.Parameter, float]
) -> tuple[Tensor, Tensor]:
    """Both kernels of one draw."""
    with torch.no_grad():
        for value, deviation in drawn.items():
            value.normal_(0, deviation) if deviation else value.zero_()
        for module in network.modules():
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx] = 0
    y = network(x).flatten(1)
    covariance = y.detach() @ y.detach().T / y.shape[1]
    trained = [value for value, deviation in drawn.items() if deviation]
    tangent = torch.zeros_like(covariance)
    for channel in range(CHANNELS):
        rows = []
        for point in range(len(y)):
            gradients = torch.autograd.grad(
                y[point, channel], trained, retain_graph=True, allow_unused=True
            )
            rows.append(
                torch.cat(
                    [
                        (drawn[value] * g).flatten()
                        for value, g in zip(trained, gradients, strict=True)
                        if g is not None
                    ]
                )
            )
        jacobian = torch.stack(rows)
        tangent += jacobian @ jacobian.T / CHANNELS
    return covariance, tangent


def estimate(
    make: Callable[[int], nn.Module], x: Tensor, width: int, draws: int, variances: tuple
) -> Kernels:
    """Means over draws of networks of this width."""
    network = make(width).double()
    drawn = deviations(network, *variances)
    found = torch.stack([torch.stack(sample(network, x, drawn)) for _ in range(draws)])
    return Kernels(found.mean(0), found.std(0) / math.sqrt(draws))


def extrapolated(small: Kernels, large: Kernels) -> Kernels:
    """The limit of widths n and 2n, whose errors fall as 1/n."""
    error = (4 * large.error.square() + small.error.square()).sqrt()
    return Kernels(2 * large.mean - small.mean, error)


def deviation(found: Kernels, limit: Tensor) -> tuple[float, float]:
    """The largest distance in standard errors, and over the largest entry; the greater of both kernels."""
    scores, parts = [], []
    for mean, error, k in zip(found.mean, found.error, limit, strict=True):
        scale = float(k.abs().max()) + 1e-300
        distance = (mean - k).abs()
        scores.append(float((distance / (error + 1e-9 * scale)).max()))
        parts.append(float(distance.max()) / scale)
    return max(scores), max(parts)
