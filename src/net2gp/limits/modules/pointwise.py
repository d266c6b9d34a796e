"""Pointwise layers that torch.nn lacks, as ordinary modules.

Put them in your network like any `nn.Module`; `activation_of` knows their infinite-width duals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from net2gp.limits.integrals.polynomials import hermite_coefficients, horner


class Shown(nn.Module):
    """A layer whose numbers are printed with its name."""

    def extra_repr(self) -> str:
        """Return the numbers, for printing."""
        own = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return ", ".join(str(value) for name, value in own.items() if name != "training")


class Sin(Shown):
    """The function amplitude · sin(frequency · x + phase).

    Args:
        amplitude: The factor in front.
        frequency: The factor of x.
        phase: What is added to the argument.

    >>> Sin(2.0)(torch.tensor([torch.pi / 2]))
    tensor([2.])
    """

    def __init__(self, amplitude: float = 1.0, frequency: float = 1.0, phase: float = 0.0) -> None:
        super().__init__()
        self.amplitude, self.frequency, self.phase = amplitude, frequency, phase

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function to every entry."""
        return self.amplitude * torch.sin(self.frequency * x + self.phase)


class Cos(Shown):
    """The function amplitude · cos(frequency · x + phase).

    Args:
        amplitude: The factor in front.
        frequency: The factor of x.
        phase: What is added to the argument.

    >>> Cos()(torch.zeros(1))
    tensor([1.])
    """

    def __init__(self, amplitude: float = 1.0, frequency: float = 1.0, phase: float = 0.0) -> None:
        super().__init__()
        self.amplitude, self.frequency, self.phase = amplitude, frequency, phase

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function to every entry."""
        return self.amplitude * torch.cos(self.frequency * x + self.phase)


class Erf(Shown):
    """The function amplitude · erf(frequency · x) + shift.

    Args:
        amplitude: The factor in front.
        frequency: The factor of x.
        shift: What is added to the result.

    >>> Erf()(torch.zeros(1))
    tensor([0.])
    """

    def __init__(self, amplitude: float = 1.0, frequency: float = 1.0, shift: float = 0.0) -> None:
        super().__init__()
        self.amplitude, self.frequency, self.shift = amplitude, frequency, shift

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function to every entry."""
        return self.amplitude * torch.erf(self.frequency * x) + self.shift


class SigmoidLike(nn.Module):
    """The function (erf(x / 2.4020563531719796) + 1)/2, the error function closest to the sigmoid on [−5, 5].

    >>> SigmoidLike()(torch.zeros(1))
    tensor([0.5000])
    """

    scale = 2.4020563531719796

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function to every entry."""
        return torch.erf(x / self.scale) / 2 + 0.5


class Rbf(Shown):
    """The function √2 sin(√(2γ)·x + π/4), whose kernel is the squared exponential exp(−γ|x − x'|²).

    Args:
        gamma: γ, half the inverse squared length scale.

    >>> Rbf(0.5)(torch.zeros(1))
    tensor([1.0000])
    """

    def __init__(self, gamma: float = 1.0) -> None:
        super().__init__()
        self.gamma = gamma

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function to every entry."""
        return math.sqrt(2) * torch.sin(math.sqrt(2 * self.gamma) * x + math.pi / 4)


class Exp(Shown):
    """The function amplitude · exp(rate · x).

    Args:
        amplitude: The factor in front.
        rate: The factor of x.

    >>> Exp(2.0)(torch.zeros(1))
    tensor([2.])
    """

    def __init__(self, amplitude: float = 1.0, rate: float = 1.0) -> None:
        super().__init__()
        self.amplitude, self.rate = amplitude, rate

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function to every entry."""
        return self.amplitude * torch.exp(self.rate * x)


class ExpNormalized(nn.Module):
    """The function r·exp(√γ·x/r − γ/2 + γ·shift/2), with r the root mean square of the features along `dim`.

    Its kernel is √(q q') exp(γ(ρ + shift)), with ρ the correlation. r is held fixed in the derivative, so
    that a wide network has the tangent kernel of the limit. The layer is not pointwise, but a pointwise
    function of the normalized signal.

    Args:
        gamma: γ, the rate of the kernel.
        shift: What is added to the correlation in the kernel.
        dim: The axis of the features.

    >>> ExpNormalized(shift=1.0)(torch.zeros(1, 2) + 1.0)
    tensor([[2.7183, 2.7183]])
    """

    def __init__(self, gamma: float = 1.0, shift: float = -1.0, dim: int = -1) -> None:
        super().__init__()
        self.gamma, self.shift, self.dim = gamma, shift, dim

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function to the normalized features."""
        scale = x.detach().square().mean(self.dim, keepdim=True).sqrt()
        scale = torch.where(scale > 0, scale, 1.0)
        exponent = math.sqrt(self.gamma) * x / scale + self.gamma / 2 * (self.shift - 1)
        return scale * torch.exp(exponent)

    def extra_repr(self) -> str:
        """Return the parameters, for printing."""
        return f"{self.gamma}, {self.shift}, dim={self.dim}"


class GaussianBump(Shown):
    """The function amplitude · exp(−rate · x²).

    Args:
        amplitude: The height of the bump.
        rate: The factor of x² in the exponent.

    >>> GaussianBump()(torch.zeros(1))
    tensor([1.])
    """

    def __init__(self, amplitude: float = 1.0, rate: float = 1.0) -> None:
        super().__init__()
        self.amplitude, self.rate = amplitude, rate

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function to every entry."""
        return self.amplitude * torch.exp(-self.rate * x * x)


class Gabor(nn.Module):
    """The function exp(−x²) sin(x).

    >>> Gabor()(torch.zeros(1))
    tensor([0.])
    """

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function to every entry."""
        return torch.exp(-x * x) * torch.sin(x)


class Sign(nn.Module):
    """The sign of x: −1, 0 or 1.

    >>> Sign()(torch.tensor([-3.0, 0.0]))
    tensor([-1.,  0.])
    """

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function to every entry."""
        return torch.sign(x)


class Step(nn.Module):
    """The step function: 0 for x < 0, 1 for x > 0, and 1/2 at x = 0.

    >>> Step()(torch.tensor([-3.0, 0.0, 2.0]))
    tensor([0.0000, 0.5000, 1.0000])
    """

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function to every entry."""
        return (
            0.5 * torch.sign(x) + 0.5
        )  # unlike torch.heaviside, sign has a gradient, which is zero


class Abs(nn.Module):
    """The absolute value |x|.

    >>> Abs()(torch.tensor([-3.0]))
    tensor([3.])
    """

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function to every entry."""
        return x.abs()


class ABReLU(Shown):
    """The function negative · min(x, 0) + positive · max(x, 0).

    Args:
        negative: The slope for x < 0.
        positive: The slope for x > 0.

    >>> ABReLU(0.5, 2.0)(torch.tensor([-1.0, 1.0]))
    tensor([-0.5000,  2.0000])
    """

    def __init__(self, negative: float = 0.0, positive: float = 1.0) -> None:
        super().__init__()
        self.negative, self.positive = negative, positive

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function to every entry."""
        return self.negative * x.clamp_max(0) + self.positive * x.clamp_min(0)


class Monomial(Shown):
    """The power x^degree.

    Args:
        degree: The power, zero or more.

    >>> Monomial(3)(torch.tensor([2.0]))
    tensor([8.])
    """

    def __init__(self, degree: int) -> None:
        super().__init__()
        self.degree = degree

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function to every entry."""
        return x**self.degree


class RectifiedMonomial(Shown):
    """The power max(x, 0)^degree; degree 0 is the step function.

    Args:
        degree: The power, zero or more.

    >>> RectifiedMonomial(2)(torch.tensor([-1.0, 3.0]))
    tensor([0., 9.])
    """

    def __init__(self, degree: int) -> None:
        super().__init__()
        self.degree = degree

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function to every entry."""
        if self.degree == 0:
            return torch.heaviside(x, torch.full((), 0.5, dtype=x.dtype, device=x.device))
        return x.clamp_min(0) ** self.degree


class Polynomial(nn.Module):
    """The polynomial Σ_n coefficients[n] xⁿ.

    Args:
        coefficients: The coefficients, lowest power first.

    >>> Polynomial([1.0, 0.0, 2.0])(torch.tensor([3.0]))
    tensor([19.])
    """

    def __init__(self, coefficients: Sequence[float]) -> None:
        super().__init__()
        self.coefficients = tuple(float(value) for value in coefficients)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function to every entry."""
        return horner(self.coefficients, x)

    def extra_repr(self) -> str:
        """Return the parameters, for printing."""
        return f"{list(self.coefficients)}"


class Hermite(nn.Module):
    """The probabilists' Hermite polynomial of a degree, divided by √degree!.

    Args:
        degree: The degree, zero or more.

    >>> Hermite(2)(torch.tensor([3.0]))
    tensor([5.6569])
    """

    def __init__(self, degree: int) -> None:
        super().__init__()
        self.degree, self.coefficients = degree, hermite_coefficients(degree)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function to every entry."""
        return horner(self.coefficients, x)

    def extra_repr(self) -> str:
        """Return the parameters, for printing."""
        return f"{self.degree}"


class Pointwise(nn.Module):
    """Any function of one number, applied to each entry.

    Args:
        function: Maps a tensor to a tensor of the same shape. It must not grow faster than a polynomial, and
            must not change later, since what is found out about it is kept.
        kinks: The places where the function or its derivative jumps; None searches for them.

    >>> Pointwise(lambda x: x * torch.tanh(x))(torch.zeros(2))
    tensor([0., 0.])
    """

    def __init__(
        self, function: Callable[[Tensor], Tensor], kinks: Sequence[float] | None = None
    ) -> None:
        super().__init__()
        self.function = function
        self.kinks = None if kinks is None else tuple(sorted(float(value) for value in kinks))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function to every entry."""
        return self.function(x)

    def extra_repr(self) -> str:
        """Return the parameters, for printing."""
        return f"{getattr(self.function, '__name__', self.function)}, kinks={self.kinks}"
