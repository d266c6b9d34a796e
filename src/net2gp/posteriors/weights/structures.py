"""Values that say how the covariance of a network's parameters is represented."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from net2gp.errors import InputError, check_count, check_positive
from net2gp.inputs import describe
from net2gp.linear.curvatures.curvature import ExactFisher, Fisher


@dataclass(frozen=True)
class Full:
    """The whole (P, P) precision. Exact; N·C·P² + P³ operations, for up to some ten thousand parameters."""

    fisher: Fisher = field(default_factory=ExactFisher)

    def __post_init__(self) -> None:
        _check_fisher(self)


@dataclass(frozen=True)
class Diagonal:
    """The diagonal of the precision: parameters independent. P numbers; too sure away from the data."""

    fisher: Fisher = field(default_factory=ExactFisher)

    def __post_init__(self) -> None:
        _check_fisher(self)


@dataclass(frozen=True)
class Kron:
    """A Kronecker product for each layer (KFAC): layers independent. Some passes over the data, any depth.

    Parameters that are not weights of a Linear or a convolution, such as gains, keep a matrix each if they
    have up to 4096 entries. Larger ones, such as embeddings, are refused by name. With `rest=Diagonal()`
    those of more than 256 entries keep their variances alone.
    """

    fisher: Fisher = field(default_factory=ExactFisher)
    rest: Diagonal | None = None

    def __post_init__(self) -> None:
        _check_fisher(self)
        if not isinstance(self.rest, Diagonal | None):
            raise InputError(
                f"rest must be Diagonal() or None, but is {_shown(self.rest)}. Pass Kron(rest=Diagonal())."
            )
        if self.rest is not None and self.rest.fisher != ExactFisher():
            raise InputError(
                "rest takes the fisher of Kron() itself: pass Kron(fisher, rest=Diagonal())."
            )


@dataclass(frozen=True)
class LowRank:
    """The `rank` directions that the data say most about; in all others the prior stays.

    Nor does the evidence count the others: it is too large for a wide prior. So by default a prior that is
    left open is chosen with Kronecker factors; `tuning=Evidence()` takes this evidence at its word.
    """

    rank: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        check_count(self.rank, "rank", example=100)


@dataclass(frozen=True)
class LastLayer:
    """Only the weights of the last linear layer, its inputs as they are.

    `structure` is that of its precision; left out it is `Full()` up to 4000 weights, else `Kron()`. Its
    Jacobian φ ⊗ I is never built: N·(D² + C²) memory at most for D features and C outputs.
    """

    structure: Full | Diagonal | Kron | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.structure, Full | Diagonal | Kron | None):
            raise InputError(
                "LastLayer takes the structure of its weights, Full(), Diagonal(), Kron() or None, but got "
                f"{_shown(self.structure)}. Pass for example LastLayer(Kron())."
            )


@dataclass(frozen=True)
class Subnetwork:
    """The whole precision of the `num_weights` parameters that are least known; all others are fixed.

    Least known are those with the largest variance under `Diagonal()`, of those that the data depend on. To
    choose parameters by name, pass only= instead.

    Reference: Daxberger et al., Bayesian deep learning via subnetwork inference, ICML 2021.
    """

    num_weights: int

    def __post_init__(self) -> None:
        check_count(self.num_weights, "num_weights", example=1000)


@dataclass(frozen=True)
class FunctionSpace:
    """The Gaussian process itself, over all parameters: an (N·C)² system.

    `num_points` conditions on a random subset of so many points of the data instead of on all.

    A classifier is sure of most of its data, which then tell little. With `tol` rows of the Gram matrix are
    left out as long as the precision that they would add is, in every direction of the parameters, at most
    about `tol` of what there is (a few Lanczos steps look for the direction). It takes a fraction of the
    time. Variances are right to about `tol` of themselves (digits, 64-256-256-10, 500 points: .1 %, .4 % at
    most), in the worst case to 2√tol. With 0 all rows are kept. By default it is 0.01 for classifiers with
    more than 1000 rows, else 0; the `structure` of the posterior says which.
    """

    num_points: int | None = None
    seed: int = 0
    tol: float | None = None

    def __post_init__(self) -> None:
        if self.num_points is not None:
            check_count(self.num_points, "num_points", example=500)
        if self.tol is not None:
            if isinstance(self.tol, bool) or not isinstance(self.tol, int | float):
                raise InputError(
                    f"tol must be a number, but is {_shown(self.tol)}. Pass for example tol=0.001."
                )
            check_positive(self.tol, "tol", zero=True)


def _check_fisher(structure: Full | Diagonal | Kron) -> None:
    if not isinstance(structure.fisher, Fisher):
        name = type(structure).__name__
        raise InputError(
            f"{name} takes a Fisher matrix, ExactFisher(), EmpiricalFisher() or "
            f"MonteCarloFisher(num_samples), but got {_shown(structure.fisher)}. Pass for example "
            f"{name}(ExactFisher()), or {name}()."
        )


def _shown(value: object) -> str:
    return repr(value) if isinstance(value, str | int | float) else describe(value)


@dataclass(frozen=True, eq=False)
class Sampled:
    """All of the precision, never formed: `num_samples` draws of the posterior, each a linear system.

    For networks and data of which neither the (P, P) precision nor the (N·C, N·C) Gram matrix fits. Block
    conjugate gradients solve all systems together to the relative residual `tol`: an iteration is a
    forward-mode and a backward pass over the data for each draw. The `rank` largest eigenvalues of the
    curvature of `num_points` points precondition. The wider the prior, the more iterations. The
    evidence takes `num_probes` Lanczos runs more (0: none). `start`, the `covariance.draws` of a posterior
    with another prior or on other data, saves iterations. With `checkpoint`, a path, the state is written
    every so many seconds, and a run that was killed goes on from it. A `seed` means the same draws on the
    same kind of device only.

    A classifier is sure of most of its training points, which then say next to nothing: `leave_out` is the
    share of the curvature, Σ_n tr Λ_n, whose points are left out, those with the least first.

    Reference: Antorán et al., Sampling-based inference for large linear models, with application to
    linearised Laplace, ICLR 2023.
    """

    num_samples: int = 32
    tol: float = 1e-2
    max_iterations: int = 200
    rank: int = 100
    num_points: int = 2000
    num_probes: int = 8
    leave_out: float = 0.0
    seed: int = 0
    start: Tensor | None = field(default=None, repr=False)
    checkpoint: str | Path | None = None
    every_seconds: float = 60.0

    def __post_init__(self) -> None:
        check_count(self.num_samples, "num_samples", example=32)
        check_count(self.max_iterations, "max_iterations", example=200)
        check_count(self.rank, "rank", example=100)
        check_count(self.num_points, "num_points", example=2000)
        check_positive(self.tol, "tol")
        check_positive(self.every_seconds, "every_seconds", zero=True)
        check_positive(self.leave_out, "leave_out", zero=True)
        if self.leave_out >= 1:
            raise InputError(
                f"leave_out is a share below 1, but is {self.leave_out:g}. Try leave_out=0.001."
            )
        if self.tol >= 1:
            raise InputError(
                f"tol must be below 1, the residual of no solution at all, but is {self.tol:g}. Try tol=0.01."
            )
        if (
            isinstance(self.seed, bool)
            or not isinstance(self.seed, int)
            or not 0 <= self.seed < 2**62
        ):
            raise InputError(
                f"seed must be a whole number from 0, but is {self.seed!r}. Try seed=0."
            )
        if self.start is not None and not isinstance(self.start, Tensor):
            raise InputError(
                f"start must be a tensor, earlier.covariance.draws, but is {describe(self.start)}."
            )
        if self.checkpoint is not None and not isinstance(self.checkpoint, str | Path):
            raise InputError(f"checkpoint must be a path, but is {describe(self.checkpoint)}.")
        if self.num_probes == 1 or self.num_probes < 0:
            raise InputError(
                f"num_probes must be 0, or at least 2 to average over, but is {self.num_probes}."
            )


Structure = Full | Diagonal | Kron | LowRank | LastLayer | Subnetwork | FunctionSpace | Sampled
