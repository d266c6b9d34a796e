"""Values that say how the covariance of a network's parameters is represented."""

from __future__ import annotations

from dataclasses import dataclass, field

from net2gp.errors import InputError
from net2gp.linear.curvature import GGN, Fisher


@dataclass(frozen=True)
class Full:
    """The whole (P, P) precision. Exact; N·C·P² + P³ operations, for up to some ten thousand parameters."""

    fisher: Fisher = field(default_factory=GGN)


@dataclass(frozen=True)
class Diagonal:
    """The diagonal of the precision: parameters independent. P numbers; too sure away from the data."""

    fisher: Fisher = field(default_factory=GGN)


@dataclass(frozen=True)
class Kron:
    """A Kronecker product for each layer (KFAC): layers independent. Some passes over the data, any depth."""

    fisher: Fisher = field(default_factory=GGN)


@dataclass(frozen=True)
class LowRank:
    """The `rank` directions that the data say most about; in all others the prior stays."""

    rank: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise InputError(f"rank must be at least 1, but is {self.rank}.")


@dataclass(frozen=True)
class LastLayer:
    """Only the weights of the last linear layer, its inputs as they are.

    `structure` is that of its precision; left out it is `Full()` up to 4000 weights, else `Kron()`. Its
    Jacobian φ ⊗ I is never built: N·(D² + C²) memory at most for D features and C outputs.
    """

    structure: Full | Diagonal | Kron | None = None


@dataclass(frozen=True)
class Subnetwork:
    """The whole precision of the `num_weights` parameters that are least known; all others are fixed.

    Least known are those with the largest variance under `Diagonal()`. To choose parameters by name, pass
    only= instead.

    Reference: Daxberger et al., Bayesian deep learning via subnetwork inference, ICML 2021.
    """

    num_weights: int

    def __post_init__(self) -> None:
        if self.num_weights < 1:
            raise InputError(f"num_weights must be at least 1, but is {self.num_weights}.")


@dataclass(frozen=True)
class FunctionSpace:
    """The Gaussian process itself, exact over all parameters: an (N·C)² system.

    `num_points` conditions on a random subset of so many points of the data instead of on all.
    """

    num_points: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_points is not None and self.num_points < 1:
            raise InputError(
                f"num_points must be at least 1, or None for all points, but is {self.num_points}."
            )


Structure = Full | Diagonal | Kron | LowRank | LastLayer | Subnetwork | FunctionSpace
