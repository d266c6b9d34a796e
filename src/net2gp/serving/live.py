"""A posterior that is corrected while it answers: points are added, and taken back."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from net2gp.errors import InputError
from net2gp.inputs import num_rows
from net2gp.posteriors.posterior import Posterior
from net2gp.serving.programs.answers import Answers
from net2gp.types import Inputs


def answers_of(posterior: Posterior[Any], x: Inputs) -> Answers:
    """Return what a program of the posterior would return, by the posterior itself.

    Args:
        posterior: A posterior with Gaussian noise, or over classes.
        x: N points.

    Returns:
        `mean`, `std` or `probabilities`, `epistemic`, `aleatoric` and `novelty`, with a row for each point.
    """
    law, parts = posterior.predict(x), posterior.split(x)
    answers = {"epistemic": parts.epistemic, "aleatoric": parts.aleatoric}
    if hasattr(law, "probs"):
        marginal = posterior.marginal(x)
        own = {"probabilities": law.probs, "mean": marginal.mean, "std": marginal.variance.sqrt()}
    else:
        own = {"mean": law.mean, "std": law.variance.sqrt()}
    return {**own, **answers, "novelty": posterior.novelty(x)}


class Live:
    """A posterior with corrections that can be undone, for several threads.

    Args:
        posterior: A posterior that `update` extends, such as one of `condition` or `adapt`.

    >>> import net2gp as n2g
    >>> x = torch.zeros(1, 1, dtype=torch.float64)
    >>> live = Live(n2g.condition(n2g.RBF(), (x, x), n2g.Gaussian(0.1)))
    >>> before = live.answers(x)["mean"]
    >>> number = live.correct(x, torch.ones(1, 1, dtype=torch.float64))
    >>> bool(live.answers(x)["mean"] > before + 0.4)
    True
    >>> live.undo(number)
    >>> torch.equal(live.answers(x)["mean"], before)
    True
    """

    def __init__(self, posterior: Posterior[Any]) -> None:
        self.base = self.posterior = posterior
        self.corrections: dict[int, tuple[Inputs, Tensor]] = {}
        self._next = 0
        self._lock = threading.Lock()

    def answers(self, x: Inputs) -> Answers:
        """Return the answers of the posterior as it is now.

        Args:
            x: N points.
        """
        with torch.no_grad():
            return answers_of(self.posterior, x)

    def correct(self, x: Inputs, y: Tensor) -> int:
        """Add points with their targets, by `update`.

        Args:
            x: The points.
            y: Their targets.

        Returns:
            The number by which `undo` takes them back.

        Raises:
            NotAvailable: If the posterior cannot be extended.
            InputError: If they do not have the form of the data.
        """
        if num_rows(x) == 0:
            raise InputError("a correction needs one point or more.")
        with self._lock:
            self.posterior = self.posterior.update((x, y))
            number, self._next = self._next, self._next + 1
            self.corrections = {**self.corrections, number: (x, y)}
            return number

    def undo(self, number: int) -> None:
        """Take a correction back: the posterior is what the others make of the first one.

        Args:
            number: What `correct` returned.

        Raises:
            InputError: If there is no such correction.
        """
        with self._lock:
            if number not in self.corrections:
                known = ", ".join(map(str, self.corrections)) or "none"
                raise InputError(f"there is no correction {number}. There are: {known}.")
            left = {key: pair for key, pair in self.corrections.items() if key != number}
            posterior = self.base
            for pair in left.values():
                posterior = posterior.update(pair)
            self.posterior, self.corrections = posterior, left
