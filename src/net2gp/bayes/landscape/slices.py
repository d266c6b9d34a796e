"""The loss of a network along one or two directions of its parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from net2gp.bayes.model.model import Model, architecture_of, checked_data
from net2gp.bayes.model.prior import WeightPrior
from net2gp.errors import InputError, check_count, check_positive, check_seed
from net2gp.inputs import describe
from net2gp.linalg.chance import random_normal
from net2gp.linear.linearized import Linearized
from net2gp.progress import progress
from net2gp.types import Data, Likelihood, Params

Directions = int | Sequence[Params]
"""The number of random directions, or the directions themselves."""


@dataclass(frozen=True, eq=False)
class LossSlice:
    """The loss at θ* + Σ_k a_k d_k over a grid of coordinates a.

    Args:
        coordinates: The values of each coordinate, (R,); 0 is the network itself.
        losses: The loss per point: (R,) for one direction, (R, R) for two, where losses[i, j] is at
            coordinates[i] along the first direction and coordinates[j] along the second.
        directions: The directions d_k, each with a value per parameter.
    """

    coordinates: Tensor
    losses: Tensor
    directions: tuple[Params, ...] = field(repr=False)


def loss_slice(
    network: nn.Module | Linearized,
    data: Data,
    likelihood: Likelihood,
    *,
    directions: Directions = 2,
    reach: float = 1.0,
    num_points: int = 21,
    prior: WeightPrior | float | None = None,
    seed: int = 0,
) -> LossSlice:
    """Compute the loss −log p(y, θ)/N around a trained network, along filter-normalized random directions.

    A Gaussian direction d is divided into filters, the rows of each weight: the weights into one unit or one
    channel. Each row of d gets the length of the same row of θ*, so that a step of 1 changes every filter by
    as much as it is long. Slices of networks whose weights have different scales can then be compared, while
    plain random directions make networks with large weights look flat. Biases and other vectors do not move.
    The cost is a forward pass over the data per point of the grid.

    Args:
        network: The trained network, or its linearization, which chooses parameters and output.
        data: The points over which the loss is averaged.
        likelihood: The loss is the negative log likelihood per point.
        directions: 1 or 2 random directions, or one or two dicts of values by parameter name, which are
            taken as they are.
        reach: Coordinates run from −reach to reach.
        num_points: The number R of values per coordinate; an odd number includes the network itself.
        prior: Adds −log p(θ)/N to the loss; None adds nothing.
        seed: Makes the random directions repeatable.

    Returns:
        The coordinates, the losses and the directions.

    Raises:
        InputError: If there are not one or two directions, or a direction does not fit the parameters.

    >>> from net2gp.likelihoods import Gaussian
    >>> network = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.constant_(network.weight, 2.0)
    >>> x = torch.ones(3, 1)
    >>> found = loss_slice(network, (x, 2 * x), Gaussian(noise_var=1.0), directions=1, num_points=3)
    >>> (found.losses - found.losses[1]).round(decimals=4)  # a step of 1 moves the weight by its length
    tensor([2., 0., 2.])

    Reference: Li et al., Visualizing the loss landscape of neural nets, NeurIPS 2018.
    """
    check_positive(reach, "reach", single=True)
    check_count(num_points, "num_points")
    check_seed(seed)
    architecture = network if isinstance(network, Linearized) else architecture_of(network)
    chosen = _directions(directions, architecture, seed)
    model = Model.of(architecture, likelihood, prior)
    x, y = checked_data(model, data)
    example = architecture.example
    steps = torch.linspace(
        -float(reach), float(reach), num_points, dtype=example.dtype, device=example.device
    )
    grid = torch.cartesian_prod(*[steps] * len(chosen)).reshape(-1, len(chosen))
    losses = []
    with torch.no_grad(), progress("slice", len(grid)) as advance:
        for point in grid:
            params = dict(architecture.params)
            for step, direction in zip(point, chosen, strict=True):
                params = {name: value + step * direction[name] for name, value in params.items()}
            losses.append(-model.log_joint(params, (x, y)) / len(y))
            advance()
    return LossSlice(steps, torch.stack(losses).reshape([num_points] * len(chosen)), chosen)


def _directions(given: Directions, network: Linearized, seed: int) -> tuple[Params, ...]:
    wrong = isinstance(given, bool) or not isinstance(given, int | tuple | list)
    count = 0 if wrong else given if isinstance(given, int) else len(given)
    if count not in (1, 2):
        raise InputError(
            f"directions must be 1, 2, or a list of one or two dicts of parameters, but is {describe(given)}."
        )
    if not isinstance(given, int):
        for direction in given:
            _check_direction(direction, network.params)
        return tuple(dict(direction) for direction in given)
    generator = torch.Generator().manual_seed(seed)
    return tuple(_filter_normalized(network.params, generator) for _ in range(count))


def _check_direction(direction: Params, params: Params) -> None:
    if not isinstance(direction, Mapping) or set(direction) != set(params):
        came = sorted(direction) if isinstance(direction, Mapping) else describe(direction)
        raise InputError(f"a direction has a value for each of {sorted(params)}, but is {came}.")
    for name, value in params.items():
        if getattr(direction[name], "shape", None) != value.shape:
            raise InputError(
                f"'{name}' of a direction must have shape {tuple(value.shape)}, but is "
                f"{describe(direction[name])}."
            )


def _filter_normalized(params: Params, generator: torch.Generator) -> Params:
    """Draw a direction whose filters are as long as those of the parameters; vectors stay put."""
    found = {}
    for name, value in params.items():
        drawn = random_normal(tuple(value.shape), generator=generator, device=value.device)
        if value.dim() < 2:
            found[name] = torch.zeros_like(value)
            continue
        rows = drawn.flatten(1)
        lengths = value.flatten(1).double().norm(dim=1, keepdim=True)
        unit = rows / rows.norm(dim=1, keepdim=True)
        found[name] = (unit * lengths).reshape(value.shape).to(value.dtype)
    return found
