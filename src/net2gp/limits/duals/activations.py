"""What each activation module is in the limit: a registry from `nn.Module` to Gaussian expectations.

Closed forms are used where they exist, and quadrature for every other pointwise function.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import singledispatch
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from net2gp.errors import NetworkError
from net2gp.limits.duals import closed_forms as closed
from net2gp.limits.duals import power_forms as powers
from net2gp.limits.duals.piecewise_linear import PiecewiseLinear
from net2gp.limits.duals.quadrature import Quadrature
from net2gp.limits.modules import pointwise as points


class UnsupportedLayer(NetworkError):
    """An error for a layer without an infinite-width rule."""


class Activation(Protocol):
    """A pointwise function φ and its expectations under centered Gaussians, with z ~ N(0, 1).

    A class of your own that derives from this one has `mean`, `mean_slope`, `dual` and the function itself;
    `variance` and the rest then have defaults. All expectations are elementwise, broadcast, keep dtype and
    device, and can be differentiated.
    """

    @abstractmethod
    def __call__(self, u: Tensor) -> Tensor:
        """Apply φ to every entry.

        Args:
            u: Any tensor.

        Returns:
            φ(u), of the same shape.
        """

    @property
    def kinks(self) -> tuple[float, ...] | None:
        """Return where φ or φ' jumps; None means that such places are searched for."""
        return None

    @property
    def formula(self) -> str:
        """Return what `activation_table` prints for the dual."""
        return "E[φ(u)φ(v)]"

    @abstractmethod
    def mean(self, var: Tensor) -> Tensor:
        """Compute E[φ(√var z)].

        Args:
            var: Variances, zero or positive.

        Returns:
            The means, of the same shape.
        """

    @abstractmethod
    def mean_slope(self, var: Tensor) -> Tensor:
        """Compute E[φ'(√var z)].

        Args:
            var: Variances, zero or positive.

        Returns:
            The mean slopes, of the same shape.
        """

    def variance(self, var: Tensor, slope: bool) -> tuple[Tensor, Tensor | None]:
        """Compute E[φ(√var z)²], which is exactly the diagonal of `dual`.

        Args:
            var: Variances, zero or positive.
            slope: Whether to compute E[φ'(√var z)²] too.

        Returns:
            E[φ²], and E[φ'²] or None, of the same shape.
        """
        return self.dual(var, var, var, slope)

    @abstractmethod
    def dual(
        self, cov: Tensor, var1: Tensor, var2: Tensor, slope: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Compute E[φ(u) φ(v)] for Gaussian u and v; the arguments broadcast.

        Args:
            cov: Covariances of u and v.
            var1: Variances of u.
            var2: Variances of v.
            slope: Whether to compute E[φ'(u) φ'(v)] too.

        Returns:
            E[φ(u) φ(v)], and E[φ'(u) φ'(v)] or None, of the broadcast shape.
        """


@dataclass(frozen=True)
class Applied:
    """The function u ↦ function(u, *arguments, **options), which equals another one with the same parts.

    Tables of expectations are kept by activation, so two layers with the same options must compare equal.
    """

    function: Callable[..., Tensor]
    arguments: tuple[float | None, ...] = ()
    options: tuple[tuple[str, float | str], ...] = ()

    def __call__(self, u: Tensor) -> Tensor:
        """Apply the function to u."""
        return self.function(u, *self.arguments, **dict(self.options))


@singledispatch
def activation_of(layer: nn.Module) -> Activation:
    """Return the activation of a pointwise layer; add your own with `@activation_of.register`.

    Closed forms cost about ten passes over memory, other activations a table lookup of about twenty.

    Args:
        layer: A pointwise layer, such as `nn.ReLU()` or `Pointwise(function)`.

    Returns:
        The function φ with its Gaussian expectations.

    Raises:
        NetworkError: An `UnsupportedLayer`, if no expectations are registered for this kind of layer.

    >>> activation_of(nn.ReLU()).variance(torch.tensor([3.0]), True)
    (tensor([1.5000]), tensor([0.5000]))

    Reference: Daniely, Frostig, Singer (2016), Toward deeper understanding of neural networks.
    """
    known = ", ".join(
        sorted(kind.__name__ for kind in activation_of.registry if kind is not object)
    )
    raise UnsupportedLayer(
        f"no expectations are known for the layer {type(layer).__name__}. Known: {known}. Wrap a pointwise "
        "function as Pointwise(function), or add a rule with @activation_of.register."
    )


@activation_of.register
def _(layer: nn.PReLU) -> Activation:
    if layer.weight.numel() != 1:
        raise UnsupportedLayer(
            f"PReLU has {layer.weight.numel()} slopes, one per channel, but in the limit all channels share "
            "one distribution. Use nn.PReLU(num_parameters=1)."
        )
    return powers.ABReLU(float(layer.weight.detach()), 1.0)


@activation_of.register
def _(layer: nn.RReLU) -> Activation:
    if layer.training:
        raise UnsupportedLayer(
            "RReLU draws its slopes at random while training. Call network.eval() for the mean slope, or use "
            "nn.LeakyReLU."
        )
    return powers.ABReLU((layer.lower + layer.upper) / 2, 1.0)


@activation_of.register
def _(layer: nn.GELU) -> Activation:
    if layer.approximate == "none":
        return closed.Gelu()
    return _numeric(Applied(F.gelu, options=(("approximate", "tanh"),)), (), layer)


def _numeric(
    function: Callable[[Tensor], Tensor], kinks: tuple[float, ...], layer: nn.Module
) -> Quadrature:
    return Quadrature(function, kinks, type(layer).__name__)


@activation_of.register(nn.Tanh)
@activation_of.register(nn.Sigmoid)
@activation_of.register(nn.SiLU)
@activation_of.register(nn.Mish)
@activation_of.register(nn.LogSigmoid)
@activation_of.register(nn.Tanhshrink)
def _(layer: nn.Module) -> Activation:
    return _numeric(_SMOOTH[type(layer).__name__], (), layer)


@activation_of.register
def _(layer: nn.Softplus) -> Activation:
    if layer.threshold >= 20:
        return _numeric(Applied(_softplus, (layer.beta,)), (), layer)
    cut = layer.threshold / layer.beta
    return _numeric(Applied(F.softplus, (layer.beta, layer.threshold)), (cut,), layer)


@activation_of.register
def _(layer: nn.Hardtanh) -> Activation:
    low, high = float(layer.min_val), float(layer.max_val)
    knots = tuple(end for end in (low, high) if math.isfinite(end))
    slopes = (*(() if math.isinf(low) else (0.0,)), 1.0, *(() if math.isinf(high) else (0.0,)))
    return PiecewiseLinear(knots, slopes, min(max(0.0, low), high), type(layer).__name__)


@activation_of.register
def _(layer: nn.Softshrink) -> Activation:
    if not layer.lambd:
        return powers.polynomial((0.0, 1.0))
    knots = (-float(layer.lambd), float(layer.lambd))
    return PiecewiseLinear(knots, (1.0, 0.0, 1.0), 0.0, type(layer).__name__)


@activation_of.register
def _(layer: nn.Threshold) -> Activation:
    function = Applied(F.threshold, (layer.threshold, layer.value))
    return _numeric(function, (float(layer.threshold),), layer)


_BY_LAYER: dict[type[nn.Module], Callable[[Any], Activation]] = {
    nn.Identity: lambda layer: powers.polynomial((0.0, 1.0)),
    nn.ReLU: lambda layer: powers.ABReLU(0.0, 1.0),
    nn.LeakyReLU: lambda layer: powers.ABReLU(float(layer.negative_slope), 1.0),
    points.Sin: lambda layer: closed.Sin(layer.amplitude, layer.frequency, layer.phase),
    points.Cos: lambda layer: closed.Sin(
        layer.amplitude, layer.frequency, layer.phase + math.pi / 2
    ),
    points.Erf: lambda layer: closed.Erf(layer.amplitude, layer.frequency, layer.shift),
    points.SigmoidLike: lambda layer: closed.Erf(0.5, 1 / layer.scale, 0.5),
    points.Rbf: lambda layer: closed.Rbf(layer.gamma),
    points.Exp: lambda layer: closed.Exp(layer.amplitude, layer.rate),
    points.ExpNormalized: lambda layer: powers.ExpNormalized(layer.gamma, layer.shift),
    points.GaussianBump: lambda layer: closed.GaussianBump(layer.amplitude, layer.rate),
    points.Gabor: lambda layer: closed.Gabor(),
    points.Sign: lambda layer: powers.Step(2.0, -1.0),
    points.Step: lambda layer: powers.Step(),
    points.Abs: lambda layer: powers.ABReLU(-1.0, 1.0),
    points.ABReLU: lambda layer: powers.ABReLU(layer.negative, layer.positive),
    points.Monomial: lambda layer: powers.polynomial((*(0.0,) * layer.degree, 1.0)),
    points.RectifiedMonomial: lambda layer: (
        powers.RectifiedPower(layer.degree) if layer.degree else powers.Step()
    ),
    points.Polynomial: lambda layer: powers.polynomial(layer.coefficients),
    points.Hermite: lambda layer: powers.hermite(layer.degree),
    points.Pointwise: lambda layer: Quadrature(
        layer.function, layer.kinks, getattr(layer.function, "__name__", "φ")
    ),
    nn.ELU: lambda layer: _numeric(Applied(F.elu, (layer.alpha,)), (0.0,), layer),
    nn.CELU: lambda layer: _numeric(Applied(F.celu, (layer.alpha,)), (0.0,), layer),
    nn.SELU: lambda layer: _numeric(F.selu, (0.0,), layer),
    nn.Softsign: lambda layer: _numeric(F.softsign, (0.0,), layer),
    nn.Hardsigmoid: lambda layer: PiecewiseLinear(
        (-3.0, 3.0), (0.0, 1 / 6, 0.0), 0.5, type(layer).__name__
    ),
    nn.Hardswish: lambda layer: _numeric(_hardswish, (-3.0, 3.0), layer),
    nn.Hardshrink: lambda layer: _numeric(
        Applied(F.hardshrink, (layer.lambd,)), (-layer.lambd, layer.lambd), layer
    ),
}
for _kind, _form in _BY_LAYER.items():
    activation_of.register(_kind, _form)


def _softplus(u: Tensor, beta: float = 1.0) -> Tensor:
    # torch's softplus becomes linear at 20/beta, with a jump of 2e-9 that the integrals would resolve
    return torch.logaddexp(beta * u, torch.zeros_like(u)) / beta


def _mish(u: Tensor) -> Tensor:
    return u * torch.tanh(_softplus(u))


def _log_sigmoid(u: Tensor) -> Tensor:
    return -_softplus(-u)


def _tanhshrink(u: Tensor) -> Tensor:
    return u - torch.tanh(u)


def _hardswish(u: Tensor) -> Tensor:
    # torch's hardswish has no second derivative, which gradients of E[φ'φ''] need
    return u * (u + 3).clamp(0, 6) / 6


_SMOOTH: dict[str, Callable[[Tensor], Tensor]] = {
    "Tanh": torch.tanh,
    "Sigmoid": torch.sigmoid,
    "SiLU": F.silu,
    "Mish": _mish,
    "LogSigmoid": _log_sigmoid,
    "Tanhshrink": _tanhshrink,
}
