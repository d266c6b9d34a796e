"""The methods of `fidelity_cifar.py`: what happens in an epoch, and which predictions come of it.

The energy is U(θ) = Σ_n −log p(y_n | θ) + ‖θ‖²/2v with the prior N(0, v = 1/5) of the reference. Each run
advances K networks at once. A run is a dict of tensors and an epoch, which is all that has to be kept for it
to go on later: random numbers are seeded by the run and the epoch.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

import net2gp as n2g
from cifar_networks import Copies

PRIOR_VAR = 0.2


@dataclass(frozen=True)
class Plan:
    """What a method does.

    Args:
        kind: The name of a function of EPOCHS.
        epochs: How many epochs each network is trained.
        rate: The step size for gradients of the mean loss; N times the step size for U.
        momentum: Its decay in a step.
        burn_in: Epochs before networks are collected.
        every: Epochs between two networks that are collected.
        cycle: Epochs of a cycle of the step size; 0 for one that stays what it is after `burn_in`.
        begin: "fresh" (as networks are initialized) or "sgd" (the trained networks of that method).
        options: Numbers that only one kind has.
    """

    kind: str
    epochs: int
    rate: float
    momentum: float = 0.9
    burn_in: int = 0
    every: int = 1
    cycle: int = 0
    begin: str = "fresh"
    options: dict[str, float] = field(default_factory=dict)


PLANS = {
    # weight decay 10 instead of 1/v = 5 is what was best in the reference's paper
    "sgd": Plan("descent", 30, 0.1, options={"decay": 10.0, "swag_epochs": 6, "swag_rate": 0.02}),
    "sghmc": Plan("langevin", 150, 0.1, burn_in=75, every=3),
    "cyclical": Plan("langevin", 150, 0.2, burn_in=50, every=25, cycle=25),
    "sgld": Plan("langevin", 150, 0.2, momentum=0.0, burn_in=75, every=3),
    "warm sghmc": Plan("langevin", 60, 0.1, burn_in=20, every=2, begin="sgd"),
    "microcanonical": Plan(
        "microcanonical", 60, 0.1, burn_in=20, every=2, begin="sgd", options={"length": 30.0}
    ),
    "mean field": Plan("mean_field", 40, 1e-3, begin="sgd", options={"stddev": 0.01}),
    "dropout": Plan("descent", 40, 0.1, options={"decay": 10.0, "dropout": 0.1}),
}

Run = dict[str, Tensor]
LAST = 0.3
"""The step size of chains after burn-in, beside the largest one."""

NUM_DRAWS, NUM_PASSES, RANK = 10, 30, 10


def seeded(name: str, epoch: int) -> None:
    """Random numbers of an epoch, the same however often the run was interrupted."""
    torch.manual_seed(zlib.crc32(f"{name} {epoch}".encode()))


def batches(copies: Copies) -> list[Tensor]:
    """Numbers of points for every step of an epoch, (K, batch), each copy in an order of its own."""
    size = len(copies.labels)
    orders = torch.stack([torch.randperm(size, device=copies.device) for _ in range(len(copies))])
    steps = size // copies.batch
    return list(orders[:, : steps * copies.batch].reshape(len(copies), steps, -1).unbind(1))


def cosine(rate: float, done: float) -> float:
    """A rate that falls to zero."""
    return rate * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def warm(epoch: float) -> float:
    """A factor that rises to 1 over the first two epochs, in which gradients are large."""
    return min(1.0, (epoch + 0.02) / 2)


def rate_at(plan: Plan, epoch: float) -> float:
    """The step size of chains: cycles, or a cosine down to LAST at the end of burn-in."""
    if plan.cycle:
        rate = max(cosine(plan.rate, epoch % plan.cycle / plan.cycle), 0.02 * plan.rate)
        return warm(epoch) * rate
    low = LAST * plan.rate
    return low + cosine(plan.rate - low, epoch / plan.burn_in) * warm(epoch)


def scales(copies: Copies) -> Tensor:
    """Squared scales (P,) in which chains move: for weights of convolutions v over their initial variance.

    A convolution in front of a normalization can be multiplied by any number, so that the prior alone says
    how long its weights are: much longer than at initialization, and steps have to be longer by as much.
    """
    parts = []
    for shape in copies.shapes.values():
        fan_in = shape[1:].numel() if len(shape) == 4 else 0
        ratio = max(1.0, PRIOR_VAR * fan_in / 2) if fan_in else 1.0
        parts.append(torch.full((shape.numel(),), ratio, device=copies.device))
    return torch.cat(parts)


def lengthened(values: Tensor, copies: Copies) -> Tensor:
    """The same functions with convolutions, weights and biases alike, as long as under the prior."""
    found = values.clone()
    for row in found:
        parts = copies.split(row)
        for name, weight in parts.items():
            if name.endswith("conv.weight"):
                factor = math.sqrt(PRIOR_VAR) / weight.square().mean().sqrt()
                weight.mul_(factor)
                parts[name.replace("weight", "bias")].mul_(factor)
    return found


def begin(plan: Plan, copies: Copies, name: str, group: int, trained: Tensor | None) -> Run:
    """The state before the first epoch; `trained` are the networks of "sgd"."""
    copies.start([1000 * group + i + zlib.crc32(name.encode()) % 997 for i in range(len(copies))])
    values = copies.values.clone()
    if plan.begin == "sgd" and trained is not None:
        values = trained[: len(copies)].to(values)
    if plan.kind in ("langevin", "microcanonical"):
        values = lengthened(values, copies)
    run = {"values": values, "velocity": torch.zeros_like(values)}
    run["probs"], run["count"] = torch.zeros(0), torch.zeros(())
    if plan.kind == "microcanonical":
        seeded(name, -1)
        run["velocity"] = F.normalize(torch.randn_like(values), dim=1)
    if plan.kind == "mean_field":
        stddev = plan.options["stddev"]
        run["rho"] = torch.full_like(values, math.log(math.expm1(stddev)))
        for key in ("m1", "m2", "r1", "r2"):
            run[key] = torch.zeros_like(values)
    return run


def descent(plan: Plan, copies: Copies, run: Run, epoch: int) -> None:
    """Gradient descent with momentum; in the last epochs moments of the iterates are collected for SWAG."""
    values, velocity, size = copies.values, run["velocity"], len(copies.labels)
    swag, total = int(plan.options.get("swag_epochs", 0)), plan.epochs
    orders = batches(copies)
    for step, chosen in enumerate(orders):
        now = epoch + step / len(orders)
        rate = cosine(plan.rate, now / total) if epoch < total else plan.options["swag_rate"]
        rate *= warm(now)
        gradient = copies.gradient(chosen).add(values, alpha=plan.options["decay"] / size)
        velocity.mul_(plan.momentum).add_(gradient)
        values.add_(velocity, alpha=-rate)
    if epoch >= total:
        first = epoch == total
        count = epoch - total
        mean = values.clone() if first else run["mean"].mul_(count).add_(values).div_(count + 1)
        squares = values.square()
        run["squares"] = (
            squares if first else run["squares"].mul_(count).add_(squares).div_(count + 1)
        )
        deviation = (values - mean)[None]
        old = torch.zeros(0, *values.shape).to(values) if first else run["deviations"]
        run["mean"], run["deviations"] = mean, torch.cat([old, deviation])[-min(swag, RANK) :]


def langevin(plan: Plan, copies: Copies, run: Run, epoch: int) -> None:
    """Langevin dynamics with friction at temperature 1 (SGHMC); SGLD without momentum."""
    values, velocity, size = copies.values, run["velocity"], len(copies.labels)
    scale, orders = scales(copies), batches(copies)
    kept, temperature = plan.momentum, plan.options.get("temperature", 1.0)
    for step, chosen in enumerate(orders):
        rate = rate_at(plan, epoch + step / len(orders)) / size
        slope = copies.gradient(chosen).mul(size).add_(values, alpha=1 / PRIOR_VAR)
        noise = torch.randn_like(values).mul_(scale.sqrt())
        velocity.mul_(kept).addcmul_(slope, scale, value=-rate)
        velocity.add_(noise, alpha=math.sqrt(2 * (1 - kept) * rate * temperature))
        values.add_(velocity)


def microcanonical(plan: Plan, copies: Copies, run: Run, epoch: int) -> None:
    """Microcanonical Langevin dynamics (Robnik et al., 2023) in scaled coordinates, with noisy gradients.

    A velocity u of length 1 turns away from the gradient, and a little at random. One step moves all P
    numbers as far as a step of `langevin` at equilibrium, √(P·rate/N).
    """
    values, direction, size = copies.values, run["velocity"], len(copies.labels)
    scale, orders, dimensions = scales(copies).sqrt(), batches(copies), copies.values.shape[1]
    for step, chosen in enumerate(orders):
        length = math.sqrt(rate_at(plan, epoch + step / len(orders)) / size * dimensions)
        slope = copies.gradient(chosen).mul(size).add_(values, alpha=1 / PRIOR_VAR).mul_(scale)
        norm = slope.norm(dim=1, keepdim=True)
        along, angle = -slope / norm, length * norm / (dimensions - 1)
        # cosh and sinh over eᵃ, so that large angles do not overflow
        tail = torch.exp(-2 * angle)
        cosine_part = (direction * along).sum(1, keepdim=True)
        turned = direction * 2 * torch.exp(-angle)
        turned = turned + along * ((1 - tail) + cosine_part * (1 + tail - 2 * torch.exp(-angle)))
        turned = F.normalize(turned, dim=1)
        share = math.sqrt(math.expm1(2 / plan.options["length"]) / dimensions)
        direction.copy_(F.normalize(turned + share * torch.randn_like(turned), dim=1))
        values.addcmul_(direction, scale.expand_as(direction), value=length)


def mean_field(plan: Plan, copies: Copies, run: Run, epoch: int) -> None:
    """Bayes by backprop: Adam on means and on ρ, σ = log(1 + e^ρ), with one draw for each batch."""
    mean, rho, size = run["values"], run["rho"], len(copies.labels)
    orders = batches(copies)
    for step, chosen in enumerate(orders):
        rate = cosine(plan.rate, (epoch + step / len(orders)) / plan.epochs)
        stddev, noise = F.softplus(rho), torch.randn_like(mean)
        copies.values.copy_(mean + stddev * noise)
        slope = copies.gradient(chosen)
        to_mean = slope + mean / (PRIOR_VAR * size)
        to_stddev = slope * noise + (stddev / PRIOR_VAR - 1 / stddev) / size
        number = epoch * len(orders) + step + 1
        adam(mean, to_mean, run["m1"], run["m2"], rate, number)
        adam(rho, to_stddev * torch.sigmoid(rho), run["r1"], run["r2"], rate, number)


def adam(
    value: Tensor, slope: Tensor, first: Tensor, second: Tensor, rate: float, number: int
) -> None:
    """One step of Adam, in place."""
    first.lerp_(slope, 0.1)
    second.mul_(0.999).addcmul_(slope, slope, value=0.001)
    root = (second / (1 - 0.999**number)).sqrt_().add_(1e-8)
    value.addcdiv_(first, root, value=-rate / (1 - 0.9**number))


EPOCHS: dict[str, Callable[[Plan, Copies, Run, int], None]] = {
    "descent": descent,
    "langevin": langevin,
    "microcanonical": microcanonical,
    "mean_field": mean_field,
}


def length_of(plan: Plan) -> int:
    """Epochs of a run, with those in which SWAG collects."""
    return plan.epochs + int(plan.options.get("swag_epochs", 0))


def collect(plan: Plan, copies: Copies, run: Run, epoch: int, images: Tensor) -> None:
    """Add the present networks of a chain to its averages, where the plan says so."""
    after = epoch + 1 - plan.burn_in
    if plan.kind not in ("langevin", "microcanonical") or after <= 0 or after % plan.every:
        return
    found = torch.stack([copies.probs(i, images) for i in range(len(copies))]).cpu()
    run["probs"] = found if not len(run["probs"]) else run["probs"] + found
    run["count"] = run["count"] + 1


def predictions(plan: Plan, copies: Copies, run: Run, images: Tensor) -> dict[str, Tensor]:
    """Class probabilities (K, N, 10) that each network gives, by the name of the prediction."""
    if plan.kind in ("langevin", "microcanonical"):
        return {"": run["probs"] / run["count"]}
    if plan.kind == "mean_field":
        return {"": averaged(copies, images, run["values"], F.softplus(run["rho"]))}
    if "dropout" in plan.options:
        return {"": averaged(copies, images, run["values"], None, NUM_PASSES)}
    copies.values.copy_(run["trained"])
    single = torch.stack([copies.probs(i, images) for i in range(len(copies))]).cpu()
    found = {"": single, "laplace": last_layers(copies, images)}
    variance = (run["squares"] - run["mean"].square()).clamp(min=1e-30)
    found["swag"] = averaged(copies, images, run["mean"], variance.sqrt(), low=run["deviations"])
    return found


def averaged(
    copies: Copies,
    images: Tensor,
    mean: Tensor,
    stddev: Tensor | None,
    num_draws: int = NUM_DRAWS,
    low: Tensor | None = None,
) -> Tensor:
    """Probabilities averaged over networks around `mean`; with `low`, half of the variance has low rank."""
    seeded("draws", 0)
    total = 0.0
    for _ in range(num_draws):
        values = mean.clone()
        if stddev is not None:
            share = 0.5**0.5 if low is not None else 1.0
            values += share * stddev * torch.randn_like(mean)
        if low is not None:
            weights = torch.randn(len(low), len(mean), 1, device=mean.device)
            values += (weights * low).sum(0) / math.sqrt(2 * max(1, len(low) - 1))
        copies.values.copy_(values)
        total = total + torch.stack([copies.probs(i, images) for i in range(len(copies))]).cpu()
    return total / num_draws  # type: ignore[operator, return-value]


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
