"""Levels of latent variables with layers between them, as variables of a bound that can be climbed."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from net2gp.deep.latent.layer import LatentLayer, Targets
from net2gp.deep.latent.psi import GaussianRows
from net2gp.types import Params

FIRST_VARIANCE = 0.1
"""The variance of latent variables at the start, where their means have variance 1."""

FIRST_NOISE = 0.05
"""The share of noise in the second moment of targets at the start."""

UPPER_NOISES = (0.4, 0.999)
"""The same for a level that is added on top, which must not explain every detail of the level below.

The second is tried if the first ends below the bound without the level. A layer that is all noise explains
nothing and costs nothing, so that the search starts near that bound.
"""


@dataclass(frozen=True, eq=False)
class Tower:
    """Levels from the top to the data, h_0 → h_1 → … → y, each with a diagonal Gaussian law per row.

    Args:
        inputs: Inputs above the first level, or None for a first level with the prior N(0, I).
        targets: The data, less their means.
        num_levels: The number of levels of latent variables.
        variables: Means, points and the logarithms of positive numbers, by name.
    """

    inputs: Tensor | None
    targets: Targets
    num_levels: int
    variables: Params

    @property
    def num_layers(self) -> int:
        """The number of layers: between levels, below inputs, and above the data."""
        return self.num_levels + (0 if self.inputs is None else 1)

    def level(self, index: int) -> GaussianRows:
        """The law of a level."""
        found = self.variables
        return GaussianRows(found[f"level{index}.mean"], found[f"level{index}.log_var"].exp())

    def layer(self, index: int) -> LatentLayer:
        """A layer, counted from the top."""
        own = f"layer{index}"
        numbers = [self.variables[f"{own}.log_{n}"].exp() for n in ("scale", "var", "noise")]
        return LatentLayer(numbers[0], numbers[1], numbers[2], self.variables[f"{own}.points"])

    def ends(self, index: int) -> tuple[GaussianRows, Targets]:
        """What enters a layer, and what it is to explain."""
        above = index if self.inputs is None else index - 1
        rows = (
            GaussianRows(self.inputs)
            if above < 0 and self.inputs is not None
            else self.level(above)
        )
        if above + 1 == self.num_levels:
            return rows, self.targets
        below = self.level(above + 1)
        return rows, Targets(below.mean, below.variance)

    def bound(self) -> Tensor:
        """Compute the bound on log p(y), or on log p(y | x) with inputs.

        It is the sum of the bounds of the layers and the entropies of the levels, and without inputs
        E log N(h_0 | 0, I) of the first level.
        """
        total = torch.stack(
            [self.layer(k).bound(*self.ends(k)) for k in range(self.num_layers)]
        ).sum()
        for k in range(self.num_levels):
            one = self.level(k)
            assert one.variance is not None
            total = total + 0.5 * (one.variance.log() + math.log(2 * math.pi * math.e)).sum()
        if self.inputs is None:
            top = self.level(0)
            assert top.variance is not None
            squares = top.mean.square() + top.variance
            total = total - 0.5 * (squares + math.log(2 * math.pi)).sum()
        return total

    def bound_with(self, values: Params) -> Tensor:
        """The bound with other variables in place of some."""
        return self.with_variables(values).bound()

    def with_variables(self, values: Params) -> Tower:
        """The same tower with other variables in place of some."""
        return replace(self, variables=self.variables | values)


def components(values: Tensor, width: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Principal components of variance 1, and small random numbers where there are too few of them.

    Args:
        values: (N, D).
        width: The number Q of components.
        generator: The source of random numbers.

    Returns:
        The components (N, Q), and the standard deviations along them relative to the first, (Q,).
    """
    centered = values - values.mean(0)
    U, S, _ = torch.linalg.svd(centered, full_matrices=False)
    rank = min(width, int((S / S[0] > 1e-8).sum()))
    found = U[:, :rank] * len(values) ** 0.5
    more = 0.1 * torch.randn(
        len(values), width - rank, generator=generator, dtype=torch.float64
    ).to(values.device)
    share = torch.cat([S[:rank] / S[0], 0.1 * S.new_ones(width - rank)])
    return torch.cat([found, more], 1), share


def level_variables(index: int, mean: Tensor, variance: float = FIRST_VARIANCE) -> Params:
    """The variables of a level at the start."""
    return {
        f"level{index}.mean": mean,
        f"level{index}.log_var": torch.full_like(mean, math.log(variance)),
    }


def layer_variables(
    index: int,
    rows: Tensor,
    share: Tensor,
    targets: Targets,
    count: int,
    generator: torch.Generator,
    noise: float = FIRST_NOISE,
) -> Params:
    """The variables of a layer at the start.

    Args:
        index: The number of the layer.
        rows: The means of its inputs, (N, Q).
        share: How much of the targets varies along each input, relative to the first, (Q,).
        targets: Its outputs. Uncertain ones have a variance and a noise of their own for each output.
        count: The number of inducing points, which are some of the rows.
        generator: The source of random numbers.
        noise: The share of noise in the second moment of the targets.

    Returns:
        The variables by name.
    """
    order = torch.randperm(len(rows), generator=generator)[:count].to(rows.device)
    spread = rows.std(0, correction=0).clamp(min=1e-3)
    scale = 2.0 * spread / share.clamp(min=0.05)
    if targets.variance is None:
        present = torch.ones_like(targets.mean) if targets.present is None else targets.present
        total = (targets.mean.square().sum() / present.sum()).reshape(1)
    else:
        total = (targets.mean.square() + targets.variance).mean(0)
    own = f"layer{index}"
    # a little apart from the rows, so that no two points are the same
    shift = 0.01 * spread * torch.randn(count, rows.shape[1], generator=generator).to(rows)
    return {
        f"{own}.points": rows[order] + shift,
        f"{own}.log_scale": scale.log(),
        f"{own}.log_var": ((1 - noise) * total).log(),
        f"{own}.log_noise": (noise * total).log(),
    }
