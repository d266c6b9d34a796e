"""Rows of the table by trained networks: many at once, with learning rates and priors of their own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from exact_rows import ACTIVATIONS
from regression_images import Digits, Problem
from table_scores import scores
from torch import Tensor

from net2gp.metrics import accuracy

PART = 5000
"""Images that are predicted at once."""

GROUPS = (
    (200, (1, 2, 3, 5), 6),
    (500, (1, 2, 3, 5), 6),
    (1000, (1, 2, 3, 5), 6),
    (2000, (1, 2, 3), 6),
    (2000, (1, 2, 3), 6),
    (5000, (1, 2), 3),
)
"""Width, the depths of which one is drawn, and the number of trials that share both and run together."""

WARMUP = 0.05


@dataclass(frozen=True)
class Trial:
    """One network of a random search: σ_w²/fan_in and σ_b² are the variances that it starts with."""

    depth: int
    width: int
    weight_var: float
    bias_var: float
    learning_rate: float
    decay: float

    @staticmethod
    def drawn(depth: int, width: int, generator: np.random.Generator) -> Trial:
        """Bias variances evenly, all else evenly in the logarithm.

        The ranges are those in which small networks did well on the images for choosing of 1000 digits:
        wider starts leave their own function in what a few thousand steps learn.
        """
        log_uniform = lambda low, high: 10 ** generator.uniform(math.log10(low), math.log10(high))
        return Trial(
            depth,
            width,
            weight_var=log_uniform(0.1, 3),
            bias_var=generator.uniform(0, 2),
            learning_rate=log_uniform(5e-4, 5e-3) * (500 / width) ** 0.5,
            decay=log_uniform(1e-6, 3e-3),
        )

    def __str__(self) -> str:
        """Return the name in the paper's table."""
        return f"{self.depth}-{self.width}-{self.weight_var:.2f}-{self.bias_var:.2f}"


class Stack:
    """S networks of one shape. Parameters lie in one tensor (S, P), of which the layers are views."""

    def __init__(
        self, trials: Sequence[Trial], activation: str, num_inputs: int, chance: torch.Generator
    ) -> None:
        """Draw the parameters from their priors."""
        first, self.activation = trials[0], ACTIVATIONS[activation]
        sizes = [num_inputs, *[first.width] * first.depth, 10]
        shapes = [shape for i, o in pairwise(sizes) for shape in ((o, i), (1, o))]
        count, device = len(trials), chance.device
        # networks begin at multiples of 32 bytes, which fast matrix products on a GPU ask for
        total = -(-sum(a * b for a, b in shapes) // 8) * 8
        self.theta = torch.zeros(count, total, device=device)
        self.gradient = torch.zeros_like(self.theta)
        self.layers = self._views(self.theta, shapes)
        self.slots = self._views(self.gradient, shapes)
        column = lambda values: torch.tensor(list(values), device=device)[:, None]
        weight_vars = column(trial.weight_var for trial in trials)[..., None]
        bias_vars = column(trial.bias_var for trial in trials)[..., None]
        for weight, bias in zip(self.layers[::2], self.layers[1::2], strict=True):
            weight.normal_(generator=chance).mul_((weight_vars / weight.shape[2]).sqrt())
            bias.normal_(generator=chance).mul_(bias_vars.sqrt())
        self.rates = column(trial.learning_rate for trial in trials)
        self.decays = column(trial.decay for trial in trials)

    @staticmethod
    def _views(flat: Tensor, shapes: list[tuple[int, int]]) -> list[Tensor]:
        sizes = [a * b for a, b in shapes]
        parts = flat[:, : sum(sizes)].split(sizes, 1)
        return [part.view(-1, *shape) for part, shape in zip(parts, shapes, strict=True)]

    def __call__(self, x: Tensor, layers: Sequence[Tensor] | None = None) -> Tensor:
        """f(x) of every network: (S, N, 10)."""
        layers = self.layers if layers is None else layers
        h = x.expand(len(self.theta), *x.shape)
        for place, (weight, bias) in enumerate(zip(layers[::2], layers[1::2], strict=True)):
            h = torch.baddbmm(bias, self.activation(h) if place else h, weight.mT)
        return h

    def predict(self, x: Tensor) -> Tensor:
        """f(x) in parts, without derivatives: (S, N, 10), zero for networks that have diverged."""
        with torch.no_grad():
            found = torch.cat([self(part) for part in x.split(PART)], 1)
        return found.nan_to_num(0.0, 0.0, 0.0)

    def descend(self, x: Tensor, y: Tensor) -> Tensor:
        """Write the gradients of each network's ½‖f(x) − y‖²/N into `gradient`."""
        leaves = [layer.detach().requires_grad_() for layer in self.layers]
        loss = 0.5 * (self(x, leaves) - y).square().sum() / len(x)
        for slot, found in zip(self.slots, torch.autograd.grad(loss, leaves), strict=True):
            slot.copy_(found)
        return loss.detach()


def train(stack: Stack, train: Digits, steps: int, batch: int, chance: torch.Generator) -> None:
    """Adam on the loss with weight decay ½ decay ‖θ‖², whose minimum is the most probable θ under a prior.

    The learning rate rises over the first steps, then falls to zero as a cosine. Nothing is read back from
    the device, and the update is in place, since its memory traffic is what a step of a wide network costs.
    """
    x, y = train.x.float(), train.y.float()
    first, second = torch.zeros_like(stack.theta), torch.zeros_like(stack.theta)
    count, place, order = len(x), len(x), torch.empty(0)
    batch = min(batch, count)
    for step in range(steps):
        if place + batch > count:
            order, place = torch.randperm(count, generator=chance, device=chance.device), 0
        index = order[place : place + batch]
        place += batch
        stack.descend(x[index], y[index])
        with torch.no_grad():
            g = stack.gradient
            g.addcmul_(stack.theta, stack.decays)
            first.lerp_(g, 0.1)
            second.mul_(0.999).addcmul_(g, g, value=0.001)
            # the corrections of Adam for averages that start at zero, in the rate and in what is added
            rise, spread = 1 - 0.9 ** (step + 1), math.sqrt(1 - 0.999 ** (step + 1))
            torch.sqrt(second, out=g)
            g.add_(1e-8 * spread).reciprocal_().mul_(first)
            rate = stack.rates * (-share(step, steps) * spread / rise)
            stack.theta.addcmul_(g, rate)


def share(step: int, steps: int) -> float:
    """The part of the learning rate that a step has."""
    rise = max(1, round(WARMUP * steps))
    if step < rise:
        return (step + 1) / rise
    return 0.5 + 0.5 * math.cos(math.pi * (step - rise) / max(1, steps - rise))


def searched(
    activation: str,
    known: Problem,
    steps: int,
    batch: int,
    seed: int,
    groups: Sequence[tuple[int, tuple[int, ...], int]] = GROUPS,
) -> dict[str, Any]:
    """The best of a random search on the images for choosing, and its scores on the test images.

    Its errors are taken for normal with the mean squared error of the images for choosing.
    """
    tried, best = [], None
    for trials, valid, test in runs(activation, known, steps, batch, seed, groups):
        for trial, v, t in zip(trials, valid, test, strict=True):
            right, error = judged(v, known.valid)
            tried.append(asdict(trial) | {"validation": right, "validation_mse": error})
            if best is None or (right, -error) > best[0]:
                best = (right, -error), trial, t.double()
    assert best is not None
    (right, error), trial, mean = best
    variance = torch.full_like(mean[:, 0], -error)
    found = scores(mean, variance, known.test)
    return asdict(trial) | found | {"name": str(trial), "validation": right, "tried": tried}


def runs(
    activation: str,
    known: Problem,
    steps: int,
    batch: int,
    seed: int,
    groups: Sequence[tuple[int, tuple[int, ...], int]],
) -> Iterator[tuple[list[Trial], Tensor, Tensor]]:
    """Group by group the trials, and what they predict for the images for choosing and for the test."""
    generator = np.random.default_rng(seed)
    chance = torch.Generator(known.train.x.device).manual_seed(seed)
    for width, depths, count in groups:
        depth = int(generator.choice(depths))
        trials = [Trial.drawn(depth, width, generator) for _ in range(count)]
        stack = Stack(trials, activation, known.train.x.shape[1], chance)
        train(stack, known.train, steps, batch, chance)
        yield trials, *(stack.predict(part.x.float()) for part in (known.valid, known.test))


def judged(outputs: Tensor, images: Digits) -> tuple[float, float]:
    """Accuracy and mean squared error."""
    error = (outputs.double() - images.y).square().mean()
    return float(accuracy(outputs, images.labels)), float(error)


RATES = (3e-4, 1e-3, 2e-3, 4e-3)
REPEATS = 3


def swept(
    activation: str, known: Problem, steps: int, batch: int, widths: Sequence[int]
) -> dict[str, Any]:
    """Test accuracy of networks with two hidden layers over their width.

    Each width has three networks at four learning rates; the rate with the best mean accuracy on the images
    for choosing counts. σ_w² = 0.5, σ_b² = 0.1 and the weight decay of 3e-4 are the same for all widths.
    """
    found: dict[str, Any] = {"widths": list(widths), "accuracies": [], "rates": []}
    chance = torch.Generator(known.train.x.device).manual_seed(0)
    for width in widths:
        scaled = [rate * (500 / max(width, 100)) ** 0.5 for rate in RATES]
        trials = [Trial(2, width, 0.5, 0.1, rate, 3e-4) for rate in scaled for _ in range(REPEATS)]
        stack = Stack(trials, activation, known.train.x.shape[1], chance)
        train(stack, known.train, steps, batch, chance)
        valid, test = (
            torch.tensor([judged(one, part)[0] for one in stack.predict(part.x.float())])
            for part in (known.valid, known.test)
        )
        best = int(valid.reshape(-1, REPEATS).mean(1).argmax())
        found["accuracies"].append(test.reshape(-1, REPEATS)[best].tolist())
        found["rates"].append(scaled[best])
    return found
