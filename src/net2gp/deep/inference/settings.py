"""How a deep Gaussian process is fitted."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from net2gp.errors import InputError, check_count, check_flag, check_positive, check_seed
from net2gp.linalg.checkpoint import check_path

Start = Literal["shallow", "linear"]
"""Where the first layer starts: at a shallow fit of the targets, or at its mean function."""


@dataclass(frozen=True, eq=False)
class Ascent:
    """Settings of `deep.fit`: how the bound is estimated and climbed.

    Adam moves kernels, inducing points, inner layers and open noise with a learning rate that falls to zero
    along half a cosine. The last layer follows by natural gradients, which under Gaussian noise and with a
    rate of 1 are its optimum given the draws through the other layers.

    Args:
        objective: What is climbed. "bound" is the variational bound on the evidence. "predictive" is the log
            density of the prediction itself, minus divergences: a deep sigma point process, whose inner
            layers stand at `num_samples` learned multiples of their standard deviations. Its predictions
            are often sharper, and it has no evidence. It becomes too certain unless there are many more
            rows than inducing points. With fewer than 30 rows per inducing point, half of the steps climb
            the bound before.
        divergence_weight: The factor of the divergences in the objective "predictive".
        hold_out: Whether the objective "predictive" keeps a tenth of the rows back and ends at the look at
            which they were most likely. It does so between 100 rows and 100 rows per inducing point.
        num_steps: The number of steps.
        learning_rate: The learning rate of Adam. Its variables have the scale of 1: logarithms, whitened
            values, and inducing points in standard deviations of their inputs. With batches, and
            for the objective "predictive", the numbers of kernels and the weights of sigma points move three
            times as fast, since there are few of them.
        natural_rate: The share of the way to its optimum that the last layer goes in each step. None means 1
            under Gaussian noise, since the optimum is then known in closed form, and 0.1 otherwise. It is 0.1
            as well if batches have fewer than five rows per inducing point, and in the second half of the
            steps on batches if noise is more than 0.3 of the variance of the targets, which averages over
            batches. With batches of labels or counts it falls to 0.01 in the end. After the last step, a last
            layer under Gaussian noise goes to its optimum for all rows.
        num_samples: The number of draws through the layers per row and step.
        batch_size: The number of rows of a batch; None takes all rows in every step.
        num_inducing: The number of inducing points per layer. None means 100, or the number of distinct
            rows if it is smaller; a tenth of the rows at most for the objective "predictive".
        starts: The starts that are tried, each for half of the steps. The first is followed to the end,
            unless the bound of a later one is better by 3 or more. "shallow" lets the first layer start as a
            shallow fit of the targets, "linear" at its mean function.
        num_restarts: How many times each start is tried, with other random numbers.
        relevances: Whether each input of an `RBF` gets a length scale of its own. Each of several outputs of
            an inner layer then has a variance, length scales and inducing points of its own, so that outputs
            can look at different inputs, and those that are not needed become linear.
        tune: Whether the numbers of the kernels are trained. False keeps them as they are.
        move_points: Whether inducing points are trained.
        look_every: The number of steps between two looks at the average bound.
        patience: The number of looks without a new best average after which training stops. None never stops
            early.
        num_draws: The number of draws of the inner layers that the posterior predicts with.
        seed: The seed of all random numbers.
        checkpoint: A file that keeps the state. A run that was killed goes on from it to the same result.
        checkpoint_seconds: The least time between two writes of that file.

    Raises:
        InputError: If a setting is out of range.

    >>> Ascent(num_steps=500).learning_rate
    0.02
    """

    objective: Literal["bound", "predictive"] = "bound"
    divergence_weight: float = 1.0
    hold_out: bool = True
    num_steps: int = 1000
    learning_rate: float = 0.02
    natural_rate: float | None = None
    num_samples: int = 8
    batch_size: int | None = None
    num_inducing: int | None = None
    starts: tuple[Start, ...] = ("shallow", "linear")
    num_restarts: int = 1
    relevances: bool = True
    tune: bool = True
    move_points: bool = True
    look_every: int = 25
    patience: int | None = None
    num_draws: int = 100
    seed: int = 0
    checkpoint: str | os.PathLike | None = None
    checkpoint_seconds: float = 60.0

    def __post_init__(self) -> None:
        for name in ("num_steps", "num_samples", "num_restarts", "look_every", "num_draws"):
            check_count(getattr(self, name), name)
        for name in ("batch_size", "num_inducing", "patience"):
            if getattr(self, name) is not None:
                check_count(getattr(self, name), name)
        if self.objective not in ("bound", "predictive"):
            raise InputError(
                f'objective must be "bound" or "predictive", but is {self.objective!r}.'
            )
        check_positive(self.divergence_weight, "divergence_weight", single=True)
        check_positive(self.learning_rate, "learning_rate", single=True)
        object.__setattr__(self, "learning_rate", float(self.learning_rate))
        if self.natural_rate is not None:
            check_positive(self.natural_rate, "natural_rate", single=True)
            if self.natural_rate > 1:
                raise InputError(
                    f"natural_rate is a share of at most 1, but is {self.natural_rate}. Pass for example 0.1."
                )
        check_seed(self.seed)
        check_path(self.checkpoint)
        check_positive(self.checkpoint_seconds, "checkpoint_seconds", zero=True, single=True)
        for name in ("hold_out", "relevances", "tune", "move_points"):
            check_flag(getattr(self, name), name)
        if not isinstance(self.starts, tuple | list):
            raise InputError(
                f'starts must be a tuple of "shallow" and "linear", but is {self.starts!r}.'
            )
        unknown = [start for start in self.starts if start not in ("shallow", "linear")]
        if not self.starts or unknown:
            raise InputError(
                f'starts must be a tuple of "shallow" and "linear", but is {self.starts!r}.'
            )
