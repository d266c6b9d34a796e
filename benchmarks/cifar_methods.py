"""The methods of `fidelity_cifar.py`: how K networks are trained or sampled, and what they predict.

The prior of the reference is N(0, 1/5) for every parameter. Chains move by the steps of `net2gp.bayes`, with
gradients from the CUDA graph of `Copies`. Their step sizes are given as SGD's learning rate for the mean
loss, which is N times the learning rate for the negative log joint.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

import net2gp as n2g
from cifar_networks import Copies
from net2gp import bayes

PRIOR_VAR = 0.2
NUM_DRAWS, NUM_PASSES, RANK = 10, 30, 10


@dataclass(frozen=True)
class Plan:
    """What a method does.

    Args:
        kind: The name of a function of KINDS.
        epochs: How many epochs each network is trained.
        rate: The largest learning rate for the mean loss.
        momentum: The share of the momentum that stays after a step.
        last: The learning rate of a chain after burn-in.
        burn_in: Epochs before a chain's networks are collected.
        every: Epochs between two networks that are collected.
        cycle: Epochs of a cycle of the learning rate; 0 for a chain without cycles.
        begin: "fresh" (as networks are initialized) or "sgd" (the trained networks of that method).
        options: Numbers that only one kind has.
    """

    kind: str
    epochs: int
    rate: float
    momentum: float = 0.9
    last: float = 0.0
    burn_in: int = 0
    every: int = 1
    cycle: int = 0
    begin: str = "fresh"
    options: dict[str, float] = field(default_factory=dict)


TRAINED = {"decay": 10.0}
"""Weight decay as the paper found best, instead of 1/v = 5."""

PLANS = {
    "sgd": Plan("descent", 25, 0.4, options=TRAINED | {"swag_epochs": 5, "swag_rate": 0.04}),
    "cyclical": Plan("langevin", 50, 0.4, burn_in=22, cycle=25),
    "warm sghmc": Plan("langevin", 15, 0.003, last=0.003, burn_in=3, begin="sgd"),
    "microcanonical": Plan(
        "microcanonical", 15, 0.003, last=0.003, burn_in=3, begin="sgd", options={"length": 30.0}
    ),
    "dropout": Plan("descent", 25, 0.4, options=TRAINED | {"dropout": 0.1}),
    "mean field": Plan("mean_field", 20, 1e-3, begin="sgd", options={"stddev": 0.01}),
    "sghmc": Plan("langevin", 50, 0.1, last=0.003, burn_in=25),
    "sgld": Plan("langevin", 50, 1.0, momentum=0.0, last=0.03, burn_in=25),
}


def run(
    plan: Plan, copies: Copies, images: Tensor, seed: int, trained: Tensor | None
) -> dict[str, Tensor]:
    """Train or sample all copies: the class probabilities that each gives, (K, N, 10), by name."""
    torch.manual_seed(seed)
    copies.start([seed + number for number in range(len(copies))])
    if plan.begin == "sgd":
        assert trained is not None
        copies.values.copy_(trained[: len(copies)].to(copies.values))
    return KINDS[plan.kind](plan, copies, images, seed)


def seed_of(name: str, group: int) -> int:
    """A seed for each group of a method."""
    return 1000 * group + zlib.crc32(name.encode()) % 100_000


def check(copies: Copies, epoch: int) -> None:
    """Stop a run that cannot recover."""
    if not bool(copies.losses.isfinite().all()):
        raise FloatingPointError(f"diverged in epoch {epoch}")


def cosine(rate: float, done: float) -> float:
    """A rate that falls to zero."""
    return rate * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def warm(epoch: float) -> float:
    """A factor that rises to 1 over the first two epochs, in which gradients are large."""
    return min(1.0, (epoch + 0.02) / 2)


def batches(copies: Copies) -> Iterator[tuple[float, Tensor]]:
    """Every step of an epoch: how much of it is over, and numbers of points, (K, batch)."""
    size, steps = len(copies.labels), len(copies.labels) // copies.batch
    orders = torch.stack([torch.randperm(size, device=copies.device) for _ in range(len(copies))])
    for step in range(steps):
        yield step / steps, orders[:, step * copies.batch : (step + 1) * copies.batch]


def descent(plan: Plan, copies: Copies, images: Tensor, seed: int) -> dict[str, Tensor]:
    """Gradient descent with momentum; in some epochs more, moments of the iterates are collected for SWAG."""
    decay = plan.options["decay"] / len(copies.labels)
    optimizer = torch.optim.SGD([copies.values], plan.rate, plan.momentum, weight_decay=decay)
    copies.values.grad = copies.gradients
    wandering = int(plan.options.get("swag_epochs", 0))
    swags = [n2g.training.Swag(RANK) for _ in range(len(copies))]
    found = {}
    for epoch in range(plan.epochs + wandering):
        if epoch == plan.epochs:
            found = at_optimum(copies, images)
        for part, chosen in batches(copies):
            rate = cosine(plan.rate, (epoch + part) / plan.epochs) * warm(epoch + part)
            late = epoch >= plan.epochs
            optimizer.param_groups[0]["lr"] = plan.options["swag_rate"] if late else rate
            copies.gradient(chosen)
            optimizer.step()
        check(copies, epoch)
        if epoch >= plan.epochs:
            swags = [swag.collect(copies.module(i)) for i, swag in enumerate(swags)]
    copies.values.grad = None
    if "dropout" in plan.options:
        passes = [all_probs(copies, images) for _ in range(NUM_PASSES)]
        return {"": torch.stack(passes).mean(0)}
    if not found:
        return at_optimum(copies, images)
    generator = torch.Generator(copies.device).manual_seed(seed)
    means = [torch.cat([v.reshape(-1) for v in swag.mean.values()]) for swag in swags]
    moves = [swag.covariance().draw(NUM_DRAWS, generator) for swag in swags]
    draws = [
        [mean + move[:, s] for mean, move in zip(means, moves, strict=True)]
        for s in range(NUM_DRAWS)
    ]
    return found | {"swag": averaged(copies, images, [torch.stack(values) for values in draws])}


def at_optimum(copies: Copies, images: Tensor) -> dict[str, Tensor]:
    """Predictions of trained networks, of Laplace posteriors of their last layers, and the networks."""
    found = {"": all_probs(copies, images), "networks": copies.values.clone()}
    return found | {"laplace": last_layers(copies, images)}


def rate_at(plan: Plan, epoch: float) -> float:
    """The learning rate of chains: cycles, or a cosine down to `last` at the end of burn-in."""
    if plan.cycle:
        return warm(epoch) * max(cosine(plan.rate, epoch % plan.cycle / plan.cycle), 1e-6)
    return plan.last + cosine(plan.rate - plan.last, epoch / max(1, plan.burn_in)) * warm(epoch)


def is_quiet(plan: Plan, epoch: float) -> bool:
    """Whether there is no noise: the first part of a cycle looks for a mode."""
    return bool(plan.cycle) and epoch % plan.cycle < 0.8 * plan.cycle


def slope_of(copies: Copies, chosen: Tensor) -> Tensor:
    """Gradients of the log joint, (K, P), estimated on minibatches."""
    return torch.add(
        -copies.gradient(chosen) * len(copies.labels), copies.values, alpha=-1 / PRIOR_VAR
    )


def scales(copies: Copies) -> Tensor:
    """Squared scales (P,) in which chains move: for weights of convolutions v over their initial variance.

    A convolution in front of a normalization can be multiplied by any number, so that the prior alone says
    how long its weights are: much longer than at initialization, and steps have to be longer by as much.
    """
    parts = []
    for shape in copies.shapes.values():
        fan_in = shape[1:].numel() if len(shape) == 4 else 0
        parts.append(torch.full((shape.numel(),), max(1.0, PRIOR_VAR * fan_in / 2)))
    return torch.cat(parts).to(copies.device)


def lengthen(copies: Copies) -> None:
    """Make convolutions, weights and biases alike, as long as under the prior; functions stay the same."""
    for row in copies.values:
        parts = copies.split(row)
        for name, weight in parts.items():
            if name.endswith("conv.weight"):
                factor = math.sqrt(PRIOR_VAR) / weight.square().mean().sqrt()
                weight.mul_(factor)
                parts[name.replace("weight", "bias")].mul_(factor)


class Average:
    """The predictions of a chain, averaged over the epochs that the plan collects."""

    def __init__(self, plan: Plan, copies: Copies, images: Tensor) -> None:
        self.plan, self.copies, self.images = plan, copies, images
        self.total, self.count = torch.zeros(()), 0

    def see(self, epoch: int) -> None:
        check(self.copies, epoch)
        late = (epoch % self.plan.cycle if self.plan.cycle else epoch) + 1 - self.plan.burn_in
        if late > 0 and late % self.plan.every == 0:
            self.total, self.count = (
                self.total + all_probs(self.copies, self.images),
                self.count + 1,
            )

    def result(self) -> dict[str, Tensor]:
        return {"": self.total / self.count}


def langevin(plan: Plan, copies: Copies, images: Tensor, seed: int) -> dict[str, Tensor]:
    """SGHMC, or SGLD without momentum, at temperature 1."""
    values, scale = copies.values, torch.ones((), device=copies.device)
    if not plan.cycle:
        lengthen(copies)
        scale = scales(copies)
    momentum, average = torch.zeros_like(values), Average(plan, copies, images)
    for epoch in range(plan.epochs):
        for part, chosen in batches(copies):
            rate = rate_at(plan, epoch + part) / len(copies.labels)
            slope = slope_of(copies, chosen)
            noise = None if is_quiet(plan, epoch + part) else torch.randn_like(values)
            if plan.momentum:
                size = (rate * scale).sqrt()
                bayes.sghmc_step(values, momentum, slope, size, plan.momentum, noise)
            else:
                bayes.sgld_step(values, slope, 2 * rate * scale, noise)
        average.see(epoch)
    return average.result()


def microcanonical(plan: Plan, copies: Copies, images: Tensor, seed: int) -> dict[str, Tensor]:
    """Microcanonical Langevin dynamics on minibatches, with steps as long as those of SGHMC."""
    lengthen(copies)
    values, size = copies.values, len(copies.labels)
    scale, one = scales(copies).sqrt().expand_as(values), values.new_ones(len(copies), 1)
    direction = F.normalize(torch.randn_like(values), dim=1)
    _, first = next(batches(copies))
    state = values.clone(), direction, slope_of(copies, first)
    average = Average(plan, copies, images)
    for epoch in range(plan.epochs):
        for part, chosen in batches(copies):

            def gradient(position: Tensor, chosen: Tensor = chosen) -> Tensor:
                copies.values.copy_(position)
                return slope_of(copies, chosen)

            step = math.sqrt(rate_at(plan, epoch + part) / size * values.shape[1]) * one
            length, noise = plan.options["length"] * step, torch.randn_like(values)
            state = bayes.microcanonical_step(gradient, state, step, length, noise, scale=scale)
        average.see(epoch)
    return average.result()


def mean_field(plan: Plan, copies: Copies, images: Tensor, seed: int) -> dict[str, Tensor]:
    """Bayes by backprop: Adam on means and on ρ, σ = log(1 + e^ρ), with one draw for each batch."""
    mean, size = copies.values.clone(), len(copies.labels)
    rho = torch.full_like(mean, math.log(math.expm1(plan.options["stddev"])))
    optimizer = torch.optim.Adam([mean, rho])
    for epoch in range(plan.epochs):
        for part, chosen in batches(copies):
            optimizer.param_groups[0]["lr"] = cosine(plan.rate, (epoch + part) / plan.epochs)
            stddev, noise = F.softplus(rho), torch.randn_like(mean)
            copies.values.copy_(mean + stddev * noise)
            slope = copies.gradient(chosen)
            mean.grad = slope + mean / (PRIOR_VAR * size)
            to_stddev = slope * noise + (stddev / PRIOR_VAR - 1 / stddev) / size
            rho.grad = to_stddev * torch.sigmoid(rho)
            optimizer.step()
        check(copies, epoch)
    stddev = F.softplus(rho)
    draws = [mean + stddev * torch.randn_like(mean) for _ in range(NUM_DRAWS)]
    return {"": averaged(copies, images, draws)}


KINDS: dict[str, Callable[[Plan, Copies, Tensor, int], dict[str, Tensor]]] = {
    "descent": descent,
    "langevin": langevin,
    "microcanonical": microcanonical,
    "mean_field": mean_field,
}


def all_probs(copies: Copies, images: Tensor) -> Tensor:
    """What each copy predicts: (K, N, 10)."""
    return torch.stack([copies.probs(i, images) for i in range(len(copies))]).cpu()


def averaged(copies: Copies, images: Tensor, draws: Sequence[Tensor]) -> Tensor:
    """Predictions averaged over draws of all copies, each (K, P)."""
    total = torch.zeros(())
    for values in draws:
        copies.values.copy_(values)
        total = total + all_probs(copies, images)
    return total / len(draws)


@torch.no_grad()
def last_layers(copies: Copies, images: Tensor) -> Tensor:
    """Laplace posteriors of the last layers by `n2g.laplace`, each with its own features as data."""
    found = []
    for i in range(len(copies)):
        module = copies.module(i)
        run = lambda x, module=module: torch.cat(
            [module.features(p) for p in x.float().split(2000)]
        )
        inputs = run(copies.images)
        with torch.enable_grad():
            posterior = n2g.laplace(
                module.head,
                (inputs, copies.labels),
                n2g.Categorical(),
                structure=n2g.Full(),
                prior_var=PRIOR_VAR,
            )
        found.append(posterior.predict(run(images)).probs.detach().float().cpu())
    return torch.stack(found)
