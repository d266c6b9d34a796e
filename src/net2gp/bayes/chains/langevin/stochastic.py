"""What SGLD and SGHMC share: their options, preconditioning, and the noise of minibatch gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from net2gp.bayes.chains.langevin.walks import DEFAULTS, Options, Setup, State, Walk
from net2gp.errors import InputError, NotConverged, check_count, check_positive, warn

AVERAGE = 0.99
"""How much of the averages of squares is kept in a step."""

DAMPING = 0.01
"""The share of the average root that is added to all, so that no step is a hundred times the others."""

NOISE_EVERY = 10
"""Steps of warmup from one estimate of the gradients' noise to the next."""


class StochasticOptions(Options, total=False):
    """The options of chains with minibatches: see `sgld`."""

    step_size: float | None
    batch_size: int | None
    num_cycles: int | None
    precondition: bool
    gradient_noise: bool


STOCHASTIC: dict[str, Any] = {
    "step_size": None,
    "batch_size": None,
    "num_cycles": None,
    "precondition": False,
    "gradient_noise": False,
    **DEFAULTS,
}
"""The defaults of `StochasticOptions`."""


@dataclass(frozen=True, eq=False)
class Tuned:
    """What is learned of the gradients during warmup and stays fixed while draws are taken.

    Args:
        setup: The run.
        precondition: Whether each parameter gets a step size of its own.
        gradient_noise: Whether the variance of the gradients' noise is estimated.
    """

    setup: Setup
    precondition: bool
    gradient_noise: bool

    def begin(self, walk: Walk) -> None:
        """Add log joints, scales and averages to the state."""
        state, position = walk.state, walk.state["position"]
        state["value"], slope = self.setup.target.both(position, walk.batches.draw())
        if self.precondition:
            state["squares"] = slope.square()
            state["scale"] = _scale(state["squares"])
        if self.gradient_noise:
            state["gradient_noise"] = torch.zeros_like(position)
            state["weight"] = position.new_zeros(())
            state["noisy"] = position.new_zeros(len(position))

    def gradient(self, walk: Walk, step: int) -> Tensor:
        """The gradient of the log joint on the next minibatch, from which warmup steps also learn."""
        state, target = walk.state, self.setup.target
        position = state["position"]
        index = walk.batches.draw()
        if step % NOISE_EVERY == 0:
            state["value"], slope = target.both(position, index)
        else:
            slope = target.gradient(position, index)
        if self.setup.plan.warming(step):
            if self.precondition:
                state["squares"].lerp_(slope.square(), 1 - AVERAGE)
                state["scale"] = _scale(state["squares"])
            if self.gradient_noise and step % NOISE_EVERY == 0:
                gap = slope - target.gradient(position, walk.batches.draw())
                state["gradient_noise"].lerp_(gap.square_().div_(2), 1 - AVERAGE)
                state["weight"].lerp_(torch.ones_like(state["weight"]), 1 - AVERAGE)
        return slope

    def remaining(self, walk: Walk, wanted: Tensor, factor: Tensor) -> Tensor:
        """The variance that is left to inject, wanted − factor·V, where V is the gradients' variance.

        It is zero where the gradients alone are noisier than the dynamics want.
        """
        if not self.gradient_noise:
            return wanted
        noise = walk.state["gradient_noise"] / walk.state["weight"].clamp_min(1e-30)
        left = wanted - factor * noise
        walk.state["noisy"] = (left < 0).to(left.dtype).mean(1)
        return left.clamp_min_(0)

    def statistics(self, state: State, sizes: Tensor) -> dict[str, Tensor]:
        """The step size of each chain; warn if gradients are too noisy for it."""
        share = float(state["noisy"].max()) if "noisy" in state else 0.0
        if share > 0.01:
            warn(
                f"the gradients of minibatches are noisier than the steps of {self.setup.method} stand for "
                f"{share:.0%} of the parameters, whose variances are too large. Pass a smaller step_size or "
                "a larger batch_size.",
                NotConverged,
            )
        return {"step_size": sizes[:, 0].clone()}


def _scale(squares: Tensor) -> Tensor:
    """G = 1/(√V + damping), divided by its geometric mean: (C, P)."""
    roots = squares.sqrt()
    roots = roots + DAMPING * roots.mean(1, keepdim=True) + 1e-30
    logs = -roots.log()
    return (logs - logs.mean(1, keepdim=True)).exp()


def tuned(setup: Setup, options: Any) -> Tuned:
    """Check the options of minibatches and preconditioning.

    Args:
        setup: The run.
        options: All options.

    Returns:
        What learns from the gradients.

    Raises:
        InputError: If an option is out of range.
    """
    size = options["batch_size"]
    if size is not None:
        check_count(size, "batch_size", example=32)
    learns = bool(options["precondition"]) or bool(options["gradient_noise"])
    if learns and setup.plan.warmup == 0:
        raise InputError(
            "precondition and gradient_noise are learned during warmup, but warmup is 0. Pass for example "
            "warmup=1000."
        )
    return Tuned(setup, bool(options["precondition"]), bool(options["gradient_noise"]))


def chosen_step(
    step_size: Any, setup: Setup, walk: Walk, rule: Callable[[Tensor], Tensor]
) -> Tensor:
    """The step size of each chain: the given one, or what a rule makes of the largest curvature.

    Args:
        step_size: The number that was passed, or None.
        setup: The run.
        walk: The chains at their start.
        rule: Step sizes from curvatures.

    Returns:
        The step sizes: (C, 1).

    Raises:
        InputError: If the number is not positive.
    """
    start = setup.start
    if step_size is not None:
        check_positive(step_size, "step_size", single=True)
        return start.new_full((len(start), 1), float(step_size))
    index = walk.batches.draw()
    with torch.no_grad(), setup.target.ready():
        largest = curvature(lambda p: setup.target.gradient(p, index), start, walk.generator)
    return rule(largest)[:, None]


def curvature(
    gradient: Callable[[Tensor], Tensor], position: Tensor, generator: torch.Generator
) -> Tensor:
    """The largest curvature of −log p at each chain, by ten power iterations on differences of gradients.

    Args:
        gradient: Computes ∇ log p: (C, P) to (C, P).
        position: Where: (C, P).
        generator: Draws the first direction.

    Returns:
        Estimates of |λ|_max of the Hessians: (C,).
    """
    kind = {"dtype": position.dtype, "device": position.device}
    direction = torch.randn(position.shape, generator=generator, **kind)  # type: ignore[call-overload]
    width = 1e-4 if position.dtype == torch.float64 else 1e-2
    size = position.new_ones(len(position))
    for _ in range(10):
        direction = direction / direction.norm(dim=1, keepdim=True).clamp_min(1e-30)
        ahead, behind = (gradient(position + sign * width * direction) for sign in (1, -1))
        direction = (ahead - behind) / (2 * width)
        size = direction.norm(dim=1)
    return size.clamp_min(1e-30)
