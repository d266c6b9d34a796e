"""What chains can be asked for beside the model."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from net2gp.bayes.chains.adaptation import windows
from net2gp.errors import InputError, check_count, check_positive
from net2gp.linear.linearized import Output, Patterns
from net2gp.types import Params


class Options(TypedDict, total=False):
    """What `hmc` and `nuts` take beside the model and the numbers of draws and chains.

    Attributes:
        warmup: The draws of each chain that adapt the step size and the mass matrix, and are dropped: 1000.
        target_acceptance: The mean acceptance probability that the step size is adapted to: 0.8.
        mass: "diagonal" or "dense", the mass matrix that is learned from the draws of the warmup.
        step_size: A fixed step in units of the mass matrix (of the prior's width without warmup); None
            adapts it.
        start: Where chains start: "prior" draws from the prior (if it is flat, at the network's values),
            "network" takes the network's own values, and a dict holds parameters by name with an
            axis of length num_chains in front.
        seed: Fixes all random numbers: 0.
        checkpoint: A file that keeps the state. A run that was killed goes on from it to the same draws.
        checkpoint_seconds: The least time between two writes of that file: 60.
        only: Chooses parameters by name pattern, as in `linearize`; the others stay fixed.
        output: Picks the tensor of outputs from what the network returns.
    """

    warmup: int
    target_acceptance: float
    mass: Literal["diagonal", "dense"]
    step_size: float | None
    start: Literal["prior", "network"] | Params
    seed: int
    checkpoint: str | os.PathLike | None
    checkpoint_seconds: float
    only: Patterns | None
    output: Output | None


@dataclass(frozen=True)
class Settings:
    """`Options` with their defaults, and the numbers of draws and chains."""

    num_draws: int
    num_chains: int
    warmup: int = 1000
    target_acceptance: float = 0.8
    mass: str = "diagonal"
    step_size: float | None = None
    start: Any = "prior"
    seed: int = 0
    checkpoint: str | os.PathLike | None = None
    checkpoint_seconds: float = 60.0
    only: Patterns | None = None
    output: Output | None = None

    def __post_init__(self) -> None:
        check_count(self.num_draws, "num_draws", example=1000)
        check_count(self.num_chains, "num_chains", example=4)
        check_count(self.warmup, "warmup", example=1000, zero=True)
        if not 0 < self.target_acceptance < 1:
            raise InputError(
                "target_acceptance must lie between 0 and 1, but is "
                f"{self.target_acceptance}. Pass for example target_acceptance=0.8."
            )
        if self.mass not in ("diagonal", "dense"):
            raise InputError(f'mass must be "diagonal" or "dense", but is {self.mass!r}.')
        if self.step_size is not None:
            check_positive(self.step_size, "step_size", single=True)

    @property
    def parts(self) -> list[tuple[int, bool]]:
        """The parts of the warmup and the draws, each with whether a mass matrix is learned from it."""
        return [*windows(self.warmup), (self.num_draws, False)]


def settings_of(num_draws: int, num_chains: int, options: Options) -> Settings:
    """Check the options and fill in their defaults."""
    unknown = set(options) - set(Options.__annotations__)
    if unknown:
        raise InputError(
            f"there is no option {sorted(unknown)[0]!r}. The options are "
            f"{', '.join(sorted(Options.__annotations__))}."
        )
    return Settings(num_draws, num_chains, **options)
