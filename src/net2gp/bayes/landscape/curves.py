"""Paths of low loss between two trained networks."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from net2gp.bayes.landscape.alike import check_alike, check_functions
from net2gp.bayes.model.model import Model, architecture_of, checked_data
from net2gp.bayes.model.prior import WeightPrior
from net2gp.errors import (
    InputError,
    check_count,
    check_flag,
    check_positive,
    check_seed,
)
from net2gp.inputs import describe, num_rows, rows
from net2gp.linear.linearized import Linearized
from net2gp.progress import progress
from net2gp.types import Data, Inputs, Likelihood, Params


@dataclass(frozen=True)
class CurveTraining:
    """How a curve between two networks is trained: Adam with a cosine schedule on random batches.

    Args:
        steps: The number of steps, each at one random place of the curve.
        learning_rate: The largest step size of Adam.
        batch_size: Points per step; None takes all.
        seed: Makes places and batches repeatable.

    Raises:
        InputError: If a number is not positive.
    """

    steps: int = 1000
    learning_rate: float = 1e-2
    batch_size: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_count(self.steps, "steps")
        check_positive(self.learning_rate, "learning_rate", single=True)
        if self.batch_size is not None:
            check_count(self.batch_size, "batch_size")
        check_seed(self.seed)


@dataclass(frozen=True, eq=False)
class Curve:
    """A curve θ(t) in the parameters of a network, for t from 0 to 1.

    A Bézier curve is Σ_k binom(K−1, k) tᵏ (1−t)ᴷ⁻¹⁻ᵏ θ_k, and a polyline joins θ_0, …, θ_{K−1} by straight
    lines. Both begin at θ_0 and end at θ_{K−1}; with K = 2 both are the straight line.

    Args:
        architecture: The network at the start of the curve.
        points: The control points θ_k: parameters by name, each with an axis of length K in front.
        polyline: Whether straight pieces join the points, in place of a Bézier curve.
    """

    architecture: Linearized = field(repr=False)
    points: Params = field(repr=False)
    polyline: bool = False

    @property
    def num_points(self) -> int:
        """The number K of control points, both ends included."""
        return len(next(iter(self.points.values())))

    def params(self, t: float | Tensor) -> Params:
        """Compute θ(t).

        Args:
            t: A number from 0 to 1.

        Returns:
            The parameters by name.

        Raises:
            InputError: If `t` is outside of the curve.
        """
        check_positive(t, "t", zero=True, single=True)
        if float(t) > 1:
            raise InputError(f"t must be from 0 to 1, but is {float(t):g}. Pass for example 0.5.")
        weights = _weights(float(t), self.num_points, self.polyline)
        return _combined(weights, self.points)

    def network(self, t: float | Tensor) -> nn.Module:
        """Make the network at a place of the curve.

        Args:
            t: A number from 0 to 1.

        Returns:
            A copy of the network with the parameters θ(t).
        """
        network = deepcopy(self.architecture.network)
        values = {**self.architecture.frozen, **self.params(t)}
        network.load_state_dict(values, strict=False)
        return network

    def losses(
        self,
        data: Data,
        likelihood: Likelihood,
        *,
        prior: WeightPrior | float | None = None,
        num_places: int = 21,
    ) -> Tensor:
        """Compute the loss −log p(y, θ(t))/N at evenly spaced t.

        Args:
            data: The points over which the loss is averaged.
            likelihood: The loss is the negative log likelihood per point.
            prior: Adds −log p(θ)/N to the loss; None adds nothing.
            num_places: The number of values of t from 0 to 1, both included.

        Returns:
            The losses, (num_places,).
        """
        check_count(num_places, "num_places")
        model = Model.of(self.architecture, likelihood, prior)
        batch = checked_data(model, data)
        found = []
        with torch.no_grad(), progress("curve", num_places) as advance:
            for t in torch.linspace(0, 1, num_places, dtype=torch.float64):
                found.append(-model.log_joint(self.params(t), batch) / len(batch[1]))
                advance()
        return torch.stack(found)


def straight_line(network_a: nn.Module | Linearized, network_b: nn.Module | Linearized) -> Curve:
    """Join two networks by the straight line (1 − t) θ_a + t θ_b.

    Args:
        network_a: The network at t = 0, or its linearization.
        network_b: The network at t = 1, of the same architecture.

    Returns:
        The line as a curve.

    Raises:
        NetworkError: If the networks differ in more than the values of their parameters.

    >>> from net2gp.likelihoods import Gaussian
    >>> line = straight_line(nn.Linear(2, 1), nn.Linear(2, 1))
    >>> data = torch.ones(4, 2), torch.ones(4, 1)
    >>> line.losses(data, Gaussian(noise_var=1.0), num_places=5).shape
    torch.Size([5])
    """
    one, other = (
        n if isinstance(n, Linearized) else architecture_of(n) for n in (network_a, network_b)
    )
    check_alike(one, other)
    return Curve(one, {n: torch.stack([v, other.params[n]]) for n, v in one.params.items()})


def curve_between(
    network_a: nn.Module | Linearized,
    network_b: nn.Module | Linearized,
    data: Data,
    likelihood: Likelihood,
    *,
    bends: int = 1,
    polyline: bool = False,
    prior: WeightPrior | float | None = None,
    training: CurveTraining | None = None,
) -> Curve:
    """Find a curve of low loss between two trained networks.

    The ends stay, and the control points between them minimize E_t[−log p(y, θ(t))/N] for t uniform from 0 to
    1. They start on the straight line. Each step of the optimizer takes one random t and one batch, and costs
    as much as a step of training the network. Minima that a straight line separates by a high barrier are
    often joined by such a curve, so that they are parts of one connected set.

    Args:
        network_a: The network at t = 0, or its linearization.
        network_b: The network at t = 1, of the same architecture.
        data: The training data.
        likelihood: The loss is the negative log likelihood per point.
        bends: The number of control points between the ends.
        polyline: Whether straight pieces join the control points, in place of a Bézier curve.
        prior: Adds −log p(θ)/N to the loss, as in the training of the ends; None adds nothing.
        training: Steps, learning rate and batch size; None takes `CurveTraining()`.

    Returns:
        The curve.

    Raises:
        InputError: If an argument is of the wrong kind, or the targets do not fit.
        NetworkError: If the networks differ in more than the values of their parameters.

    >>> from net2gp.likelihoods import Gaussian
    >>> x, noise = torch.linspace(-1, 1, 8)[:, None], Gaussian(noise_var=1.0)
    >>> one, other = (nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)) for _ in range(2))
    >>> curve = curve_between(one, other, (x, x), noise, training=CurveTraining(steps=2))
    >>> curve.num_points
    3

    Reference: Garipov et al., Loss surfaces, mode connectivity, and fast ensembling of DNNs, NeurIPS 2018.
    """
    check_count(bends, "bends")
    check_flag(polyline, "polyline")
    if training is not None and not isinstance(training, CurveTraining):
        raise InputError(
            f"training must be CurveTraining(...) or None, but is {describe(training)}. Pass for example "
            "training=net2gp.bayes.CurveTraining(steps=500)."
        )
    line = straight_line(network_a, network_b)
    network = line.architecture
    x, y = checked_data(Model.of(network, likelihood, prior), data)
    check_functions(
        network, network_b if isinstance(network_b, Linearized) else architecture_of(network_b), x
    )
    model = Model.of(network, likelihood, prior, num_data=num_rows(x))
    chosen = CurveTraining() if training is None else training
    start = torch.arange(1, bends + 1, dtype=torch.float64) / (bends + 1)
    inner = {
        name: torch.stack([line.params(t)[name] for t in start]).requires_grad_()
        for name in network.params
    }
    ends = {name: (value[:1], value[1:]) for name, value in line.points.items()}

    def loss(t: float, batch: tuple[Inputs, Tensor]) -> Tensor:
        points = {name: torch.cat([a, inner[name], b]) for name, (a, b) in ends.items()}
        params = _combined(_weights(t, bends + 2, polyline), points)
        return -model.log_joint(params, batch) / num_rows(x)

    optimizer = torch.optim.Adam(list(inner.values()), lr=chosen.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, chosen.steps)
    generator = torch.Generator().manual_seed(chosen.seed)
    with torch.enable_grad(), progress("curve", chosen.steps) as advance:
        for _ in range(chosen.steps):
            t = float(torch.rand((), generator=generator))
            optimizer.zero_grad()
            value = loss(t, _batch(x, y, chosen.batch_size, generator))
            value.backward()
            optimizer.step()
            schedule.step()
            advance(note=f"loss {float(value.detach()):.3g}")
    points = {n: torch.cat([a, inner[n].detach(), b]) for n, (a, b) in ends.items()}
    return Curve(network, points, polyline)


def barrier(losses: Tensor) -> Tensor:
    """Compute how far the losses along a curve rise above the line between the losses of its ends.

    The barrier is max_t L(t) − (1 − t) L(0) − t L(1), and at least 0, its value at the ends.

    Args:
        losses: Losses at evenly spaced places, both ends included: (R,), as `Curve.losses` gives them.

    Returns:
        The barrier, a scalar.

    Raises:
        InputError: If there are fewer than two losses.

    >>> barrier(torch.tensor([1.0, 3.0, 2.0]))
    tensor(1.5000)

    Reference: Frankle et al., Linear mode connectivity and the lottery ticket hypothesis, ICML 2020.
    """
    if not isinstance(losses, Tensor) or losses.dim() != 1 or len(losses) < 2:
        raise InputError(
            f"losses must be two or more numbers along a curve, but is {describe(losses)}. Pass what "
            "curve.losses(data, likelihood) returns."
        )
    t = torch.linspace(0, 1, len(losses), dtype=losses.dtype, device=losses.device)
    return (losses - (1 - t) * losses[0] - t * losses[-1]).max().clamp(min=0)


def _weights(t: float, count: int, polyline: bool) -> list[float]:
    """The weights of the control points at t, which add up to 1."""
    last = count - 1
    if polyline:
        return [max(0.0, 1.0 - abs(t * last - k)) for k in range(count)]
    return [math.comb(last, k) * t**k * (1 - t) ** (last - k) for k in range(count)]


def _combined(weights: list[float], points: Params) -> Params:
    return {
        name: torch.tensordot(torch.tensor(weights, dtype=value.dtype).to(value), value, 1)
        for name, value in points.items()
    }


def _batch(
    x: Inputs, y: Tensor, size: int | None, generator: torch.Generator
) -> tuple[Inputs, Tensor]:
    if size is None or size >= num_rows(x):
        return x, y
    index = torch.randperm(num_rows(x), generator=generator)[:size].to(y.device)
    return rows(x, index), y[index]
