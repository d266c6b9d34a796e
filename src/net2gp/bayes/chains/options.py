"""What chains can be asked for beside the model."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from net2gp.bayes.chains.adaptation import windows
from net2gp.bayes.chains.starts import Start, count_chains
from net2gp.errors import InputError, check_count, check_positive, check_seed
from net2gp.keywords import check_known
from net2gp.linalg.checkpoint import check_path
from net2gp.linear.linearized import Output, Patterns


class Options(TypedDict, total=False):
    """What `hmc` and `nuts` take beside the model and the numbers of draws and chains.

    Attributes:
        warmup: The draws of each chain that adapt the step size and the mass matrix, and are dropped: 1000.
        target_acceptance: The mean acceptance probability that the step size is adapted to: 0.8.
        mass: "diagonal" or "dense", the mass matrix that is learned from the draws of the warmup.
        step_size: A fixed step in units of the mass matrix (of the prior's width without warmup); None
            adapts it.
        start: Where chains start: "prior", the default, draws from the prior (if it is flat, at the network's
            values), and "network" takes the network's own values. A network, a posterior or a dict of
            stacked parameters start them elsewhere: see the guide on chains.
        seed: Fixes all random numbers: 0.
        checkpoint: A file that keeps the state. A run that was killed goes on from it to the same draws.
        checkpoint_seconds: The least time between two writes of that file: 60.
        only: Chooses parameters by name pattern, as in `linearize`; the others stay fixed. None draws all,
            whatever their `requires_grad`.
        output: Picks the tensor of outputs from what the network returns.
    """

    warmup: int
    target_acceptance: float
    mass: Literal["diagonal", "dense"]
    step_size: float | None
    start: Start
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
        check_count(self.warmup, "warmup", example=1000, zero=True)
        check_seed(self.seed)
        check_path(self.checkpoint)
        check_positive(self.checkpoint_seconds, "checkpoint_seconds", zero=True, single=True)
        check_positive(self.target_acceptance, "target_acceptance", single=True)
        if self.target_acceptance >= 1:
            raise InputError(
                "target_acceptance must lie between 0 and 1, but is "
                f"{self.target_acceptance}. Pass for example target_acceptance=0.8."
            )
        if not isinstance(self.mass, str) or self.mass not in ("diagonal", "dense"):
            raise InputError(f'mass must be "diagonal" or "dense", but is {self.mass!r}.')
        if self.step_size is not None:
            check_positive(self.step_size, "step_size", single=True)

    @property
    def parts(self) -> list[tuple[int, bool]]:
        """The parts of the warmup and the draws, each with whether a mass matrix is learned from it."""
        return [*windows(self.warmup), (self.num_draws, False)]


def settings_of(num_draws: int, num_chains: int | None, options: Options) -> Settings:
    """Check the options and fill in their defaults."""
    check_known(options, Options)
    return Settings(num_draws, count_chains(num_chains, options.get("start")), **options)
