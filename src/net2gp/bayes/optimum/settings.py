"""How networks are trained: the optimizer, its schedule, mini-batches and early stopping."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau

from net2gp.errors import InputError, check_count, check_positive, check_seed
from net2gp.inputs import describe
from net2gp.types import Data

MakeOptimizer = Callable[[list[Tensor]], Optimizer]
"""What makes an optimizer for a list of parameters, such as `lambda p: torch.optim.SGD(p, lr=0.1)`."""

MakeSchedule = Callable[[Optimizer], Any]
"""What makes a learning-rate schedule for an optimizer, as those of `torch.optim.lr_scheduler`."""

ELEMENTWISE = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop")
"""Optimizers of torch that move each number by itself, so that stacked networks do not disturb each other."""


@dataclass(frozen=True, eq=False)
class Training:
    """Settings of a training to the most probable parameters.

    The loss is −log p(θ, y)/N, estimated from a batch, so that learning rates mean what they mean for a mean
    loss. The schedule steps after every step of the optimizer; a `ReduceLROnPlateau` steps after every look
    at the held-out rows, and gets their loss.

    Args:
        num_steps: The number of steps of the optimizer.
        learning_rate: The learning rate of Adam, if no other optimizer is given.
        optimizer: A function from a list of parameters to any torch optimizer. None is Adam.
        schedule: A function from an optimizer to a schedule, "cosine" for a learning rate that falls to zero
            along half a cosine, or "constant".
        batch_size: The number of rows of a batch; None takes all rows in every step. Batches are shuffled in
            every epoch, and the rows that do not fill a batch wait for the next epoch.
        held_out: Rows for early stopping: a share of the data, or other data. None trains for all steps on
            all rows.
        patience: The number of looks at the held-out rows without progress after which training stops. The
            parameters of the best look are kept.
        look_every: The number of steps between two looks.
        seed: The seed of batches, held-out rows, dropout and starts.

    Raises:
        InputError: If a setting is out of range.

    >>> Training(num_steps=500, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)).num_steps
    500
    """

    num_steps: int = 2000
    learning_rate: float = 0.01
    optimizer: MakeOptimizer | None = field(default=None, repr=False)
    schedule: MakeSchedule | Literal["cosine", "constant"] = "cosine"
    batch_size: int | None = 128
    held_out: float | Data | None = field(default=None, repr=False)
    patience: int = 10
    look_every: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        check_count(self.num_steps, "num_steps")
        check_positive(self.learning_rate, "learning_rate", single=True)
        check_count(self.patience, "patience")
        check_count(self.look_every, "look_every")
        if self.batch_size is not None:
            check_count(self.batch_size, "batch_size")
        check_seed(self.seed)
        if self.optimizer is not None and not callable(self.optimizer):
            raise InputError(
                f"optimizer must be a function that makes an optimizer, but is {describe(self.optimizer)}. "
                "Pass for example optimizer=lambda params: torch.optim.SGD(params, lr=0.1)."
            )
        named = isinstance(self.schedule, str) and self.schedule in ("cosine", "constant")
        if not callable(self.schedule) and not named:
            raise InputError(
                'schedule must be "cosine", "constant" or a function from an optimizer to a schedule, but is '
                f"{self.schedule!r}. Pass schedule=lambda o: torch.optim.lr_scheduler.StepLR(o, 100)."
            )
        if isinstance(self.held_out, float | int) and not 0 < self.held_out < 1:
            raise InputError(
                f"held_out must be a share between 0 and 1 or data, but is {self.held_out!r}. Pass 0.1."
            )

    def make_optimizer(self, leaves: list[Tensor]) -> Optimizer:
        """Make the optimizer of some parameters.

        Args:
            leaves: The parameters.

        Returns:
            The optimizer.

        Raises:
            InputError: If `optimizer` does not return one.
        """
        if self.optimizer is None:
            return torch.optim.Adam(leaves, lr=self.learning_rate, fused=True)
        made = self.optimizer(leaves)
        if not isinstance(made, Optimizer):
            raise InputError(
                f"optimizer must return a torch optimizer, but returned {describe(made)}. Pass for example "
                "optimizer=lambda params: torch.optim.SGD(params, lr=0.1)."
            )
        return made

    def make_schedule(self, optimizer: Optimizer) -> Any:
        """Make the schedule of an optimizer.

        Args:
            optimizer: The optimizer.

        Returns:
            The schedule, or None for a constant learning rate.
        """
        if self.schedule == "constant":
            return None
        if self.schedule == "cosine":
            return CosineAnnealingLR(optimizer, self.num_steps)
        assert callable(self.schedule)
        return self.schedule(optimizer)

    def keeps_members_apart(self, shapes: list[torch.Size]) -> bool:
        """Whether one optimizer of stacked networks does what one optimizer for each of them does.

        Args:
            shapes: The shapes of the parameters of one network.

        Returns:
            True for optimizers that move each number by itself and put the same parameters into the same
            groups, with a schedule that does not read the loss.
        """
        optimizer, groups = self._trial(shapes)
        if not _is_of_torch(optimizer, ELEMENTWISE):
            return False
        if groups != self._trial([torch.Size((2, *shape)) for shape in shapes])[1]:
            return False
        return not isinstance(self.make_schedule(optimizer), ReduceLROnPlateau)

    def takes_flat(self, shapes: list[torch.Size]) -> bool:
        """Whether the optimizer treats all numbers of a network alike, however they are arranged.

        Args:
            shapes: The shapes of the parameters of one network.

        Returns:
            True for elementwise optimizers and L-BFGS with one group.
        """
        optimizer, groups = self._trial(shapes)
        return _is_of_torch(optimizer, (*ELEMENTWISE, "LBFGS")) and len(groups) == 1

    def _trial(self, shapes: list[torch.Size]) -> tuple[Optimizer, list[tuple[str, list[int]]]]:
        """An optimizer of zeros, and the options of each group with the numbers of its parameters."""
        leaves = [torch.zeros(shape, requires_grad=True) for shape in shapes]
        optimizer, order = self.make_optimizer(leaves), {id(p): i for i, p in enumerate(leaves)}
        groups = [
            (repr({**group, "params": None}), [order[id(p)] for p in group["params"]])
            for group in optimizer.param_groups
        ]
        return optimizer, groups


def _is_of_torch(optimizer: Optimizer, names: tuple[str, ...]) -> bool:
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim") and kind.__name__ in names
