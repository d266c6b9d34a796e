"""Fully connected networks by their shape: depth, activation, circles in front and a linear path beside."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from net2gp.errors import InputError, check_count, check_flag, check_positive
from net2gp.kernels.periodic import circle
from net2gp.limits.modules.pointwise import Cos, Erf, Rbf, Sin

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "cos": Cos,
    "erf": Erf,
    "gelu": nn.GELU,
    "rbf": Rbf,
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "sin": Sin,
    "tanh": nn.Tanh,
}
"""Activations by the word for them; "rbf" is √2 sin(x + π/4), whose kernel is the squared exponential."""


class Circle(nn.Module):
    """The layer x ↦ (cos 2πx/period, sin 2πx/period), after which every function is periodic.

    Args:
        period: The length that goes once around the circle.

    >>> import torch
    >>> Circle(4.0)(torch.tensor([[2.0]])).round()
    tensor([[-1., -0.]])
    """

    def __init__(self, period: float) -> None:
        super().__init__()
        self.period = period

    def forward(self, x: Tensor) -> Tensor:
        """Wrap every column around a circle.

        Args:
            x: N points, (N, D).

        Returns:
            Sines and cosines, (N, 2D).
        """
        return circle(x, self.period)

    def extra_repr(self) -> str:
        """Return the period, for printing."""
        return f"{self.period:.4g}"


class WithTrend(nn.Module):
    """The sum of a network and of a linear function of the same inputs.

    Args:
        body: The network.
        trend: The linear layer.
    """

    def __init__(self, body: nn.Module, trend: nn.Linear) -> None:
        super().__init__()
        self.body, self.trend = body, trend

    def forward(self, x: Tensor) -> Tensor:
        """Add the outputs of both.

        Args:
            x: N points, (N, D).

        Returns:
            The sum, (N, C).
        """
        return self.body(x) + self.trend(x)


@dataclass(frozen=True)
class Shape:
    """What a fully connected network is but for its width and variances.

    Args:
        activation: The word for its activation, a key of `ACTIVATIONS`.
        depth: The number of hidden layers; a network without any is linear.
        period: The period of all its functions, or None.
        trend: Whether a linear function of the inputs is added.

    Raises:
        InputError: If the activation is not known, or a number is out of range.
    """

    activation: str = "relu"
    depth: int = 1
    period: float | None = None
    trend: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.activation, str) or self.activation not in ACTIVATIONS:
            raise InputError(
                f"the activation {self.activation!r} is not known here. There are: "
                f"{', '.join(sorted(ACTIVATIONS))}."
            )
        check_count(self.depth, "depth", example=2, zero=True)
        if self.period is not None:
            check_positive(self.period, "period", single=True)

    def __str__(self) -> str:
        words = [f"{self.depth} × {self.activation}" if self.depth else "linear"]
        words += [] if self.period is None else [f"period {self.period:.4g}"]
        return " + ".join([*words, "trend"] if self.trend else words)

    def body(self, num_features: int, width: int, num_outputs: int) -> nn.Sequential:
        """The network behind the circles and without the trend.

        Args:
            num_features: The number of its inputs.
            width: The number of units of each hidden layer.
            num_outputs: The number of outputs.

        Returns:
            The layers Linear, activation, …, Linear.
        """
        sizes = [num_features, *[width] * self.depth]
        layers: list[nn.Module] = []
        for one, other in itertools.pairwise(sizes):
            layers += [nn.Linear(one, other), _activation(self.activation)]
        return nn.Sequential(*layers, nn.Linear(sizes[-1], num_outputs))

    def module(self, num_inputs: int, width: int, num_outputs: int) -> nn.Module:
        """The whole network, with the parameters that torch draws.

        Args:
            num_inputs: The number of inputs.
            width: The number of units of each hidden layer.
            num_outputs: The number of outputs.

        Returns:
            The module.
        """
        features = num_inputs if self.period is None else 2 * num_inputs
        body = self.body(features, width, num_outputs)
        if self.period is not None:
            body = nn.Sequential(Circle(self.period), *body)
        if not self.trend:
            return body
        return WithTrend(body, nn.Linear(num_inputs, num_outputs, bias=False))


def _activation(word: str) -> nn.Module:
    return Rbf(0.5) if word == "rbf" else ACTIVATIONS[word]()


@dataclass(frozen=True)
class Family:
    """The networks among which `network_like` chooses.

    Args:
        activations: Words for activations: "relu", "erf", "gelu", "sin", "cos", "rbf", and "tanh" and "silu",
            which have no closed form and take about ten times as long; "erf" is close to "tanh".
        depths: Numbers of hidden layers.
        trends: Whether a linear function of the inputs is added: False, True or both.
        period: The period of all functions; None for functions that need not repeat.

    Raises:
        InputError: If one of the first three is no tuple with an entry.

    >>> [str(shape) for shape in Family(("rbf", "relu"), depths=(0, 1), trends=(False,)).shapes()]
    ['linear', '1 × rbf', '1 × relu']
    """

    activations: tuple[str, ...] = ("rbf", "relu", "erf", "gelu")
    depths: tuple[int, ...] = (0, 1, 2)
    trends: tuple[bool, ...] = (False, True)
    period: float | None = None

    def __post_init__(self) -> None:
        for name in ("activations", "depths", "trends"):
            given = getattr(self, name)
            if isinstance(given, str) or not isinstance(given, tuple) or not given:
                raise InputError(
                    f"{name} of a Family is a tuple with one entry or more, but is {given!r}. Pass for "
                    "example Family(activations=('relu', 'tanh'), depths=(1, 2))."
                )
        for depth in self.depths:
            check_count(depth, "depths", example=2, zero=True)
        for trend in self.trends:
            check_flag(trend, "trends")
        list(self.shapes())  # each shape checks its entries

    def shapes(self) -> Iterator[Shape]:
        """The shapes, from simple to involved: few layers first, and first without a trend."""
        for depth in sorted(self.depths):
            for trend in sorted(self.trends):
                if depth == 0 and trend and self.period is None:
                    continue  # a linear network has its trend
                for activation in self.activations[: 1 if depth == 0 else None]:
                    yield Shape(activation, depth, self.period, trend)
