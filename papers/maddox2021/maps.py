"""What the programs on maps share: a network of one map, adapted to few points of another by several methods.

The network is 2-500-500-2 with tanh (3-500-500-2 with elevation): of each place a mean and a raw scale,
trained by the likelihood y ~ N(mean, softplus(raw)²). Inputs and values are standardized by the source;
errors and likelihoods are given in the units of the data.

- GP of the network: f(x; θ*) + J(x)(θ − θ*) of the mean, prior variance and noise by the evidence;
- GP, zero mean: the same kernel without f(x; θ*);
- GP, as published: likewise, with prior variance one and the mean squared error at the source for noise;
- GP, untrained: the same with a network that was not trained, so that only its architecture speaks;
- GP, last layer: Bayesian linear regression on the last hidden layer, around the network;
- RBF GP: a Gaussian process that knows nothing of the source, its length scales by the evidence;
- network + RBF GP: the same of what the network leaves over;
- source network, fine-tuned, last layer tuned: networks. Tuning is by Adam, and every fifth of the few points
  tells when to stop.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import net2gp as n2g
from net2gp import metrics

sys.path.append(str(Path(__file__).parents[1]))
import claims
from baselines import adapt_to_few

Points = tuple[Tensor, Tensor]
"""x (N, D) and y (N, 1)."""

Predict = Callable[[Tensor], Points]
"""Means and variances (M, 1) of y at x (M, D)."""

LIKELIHOOD = n2g.HeteroscedasticGaussian()
SIZES = (10, 20, 50, 100, 200)
MEASURES = ("rmse", "nll")
GP = "GP of the network"


@dataclass(frozen=True)
class Options:
    """How long is trained, how often adapted, to how many points, and tested on how many."""

    repeats: int = 5
    steps: int = 3000
    tuning_steps: int = 200
    sizes: tuple[int, ...] = SIZES
    tests: int = 1000
    first: int = 0
    """The seed of the first repetition."""

    quick: bool = False
    """Whether claims are judged as those of a quick run."""


@dataclass(frozen=True, eq=False)
class Transfer:
    """A source to train on, and targets to adapt to, one after the other in the repetitions."""

    name: str
    unit: str
    source: Points
    targets: Sequence[Points]

    @property
    def spread(self) -> float:
        """The standard deviation of the source's values."""
        return float(self.source[1].std())

    def inputs(self, x: Tensor) -> Tensor:
        """x as the network takes it."""
        return (x - self.source[0].mean(0)) / self.source[0].std(0)

    def standardized(self, points: Points) -> Points:
        """x and y as the network takes them."""
        x, y = points
        return self.inputs(x), (y - self.source[1].mean()) / self.spread

    def in_units(self, predict: Predict) -> Predict:
        """A prediction from places as they are, of values in their unit."""

        def predicted(x: Tensor) -> Points:
            mean, variance = predict(self.inputs(x))
            return mean * self.spread + self.source[1].mean(), variance * self.spread**2

        return predicted

    def choose(self, repeat: int, options: Options) -> tuple[Points, Points]:
        """As many points as the largest size asks for, of which smaller ones take the first, and others."""
        x, y = self.standardized(self.targets[repeat % len(self.targets)])
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(repeat))
        few, rest = order.tensor_split([max(options.sizes)])
        rest = rest[: options.tests]
        assert len(rest) >= 20
        return (x[few], y[few]), (x[rest], y[rest])


def untrained(num_inputs: int, seed: int) -> nn.Sequential:
    """D-500-500-2 with tanh, as torch initializes it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        sizes = [num_inputs, 500, 500]
        hidden = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.Tanh())]
        return nn.Sequential(*hidden, nn.Linear(500, 2)).eval()


Loss = Callable[[nn.Module, Points], Tensor]
"""What a network is trained to have little of on points."""


def surprise(network: nn.Module, points: Points) -> Tensor:
    """The mean negative log likelihood."""
    return -LIKELIHOOD.log_prob(network(points[0]), points[1]).mean()


def train(
    network: nn.Sequential,
    points: Points,
    steps: int,
    *,
    loss: Loss = surprise,
    batch: int = 200,
    seed: int = 0,
) -> nn.Sequential:
    """The network, changed: Adam on random batches, its learning rate falling to zero on a cosine."""
    x, y = points
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        index = torch.randint(len(x), (min(batch, len(x)),), generator=generator)
        optimizer.zero_grad()
        loss(network, (x[index], y[index])).backward()
        optimizer.step()
        schedule.step()
    return network.requires_grad_(False)


def tune_network(
    network: nn.Sequential, points: Points, only: str, steps: int, loss: Loss = surprise
) -> nn.Module:
    """The network after Adam on four fifths of the points, at the step that is best on the other fifth."""
    network = copy.deepcopy(network)
    chosen = [p.requires_grad_() for name, p in network.named_parameters() if name.startswith(only)]
    held = torch.arange(len(points[0])) % 5 == 0
    fit, check = ((points[0][rows], points[1][rows]) for rows in (~held, held))
    optimizer = torch.optim.Adam(chosen, lr=1e-3)
    best, state = math.inf, {}
    for step in range(steps + 1):
        if step % 5 == 0:
            with torch.no_grad():
                value = float(loss(network, check))
            if value < best:
                best, state = value, copy.deepcopy(network.state_dict())
        optimizer.zero_grad()
        loss(network, fit).backward()
        optimizer.step()
    network.load_state_dict(state)
    return network.requires_grad_(False)


def of_network(network: nn.Module) -> Predict:
    """The network's own mean and variance."""

    def predict(x: Tensor) -> Points:
        law = LIKELIHOOD.scale
        mean, raw = network(x).split(1, -1)
        return mean, law.log_std(raw).mul(2).exp()

    return predict


def of_posterior(posterior: Any, offset: Tensor | float = 0.0) -> Predict:
    """Mean and variance of y, the noise included."""

    def predict(x: Tensor) -> Points:
        law = posterior.predict(x)
        return law.mean + offset, law.variance

    return predict


def mean_of(network: nn.Module, only: str = "*") -> n2g.Linearized:
    """The linearization of the network's first output."""
    return n2g.linearize(network, only=only, output=lambda both: both[:, :1])


def adapted(network: nn.Module, points: Points, *, zero_mean: bool = False, only: str = "*") -> Any:
    """The Gaussian process of the network's mean, prior variance and noise by the evidence."""
    return adapt_to_few(mean_of(network, only), points, n2g.Gaussian(), zero_mean=zero_mean)


def published(network: nn.Module, points: Points, noise_var: float) -> Any:
    """With weights of variance one around zero, and the noise of the source."""
    likelihood = n2g.Gaussian(noise_var)
    return n2g.adapt(mean_of(network), points, likelihood, prior_var=1.0, zero_mean=True)


def rbf(points: Points) -> Any:
    """The RBF process with the largest evidence, from short and from long length scales.

    Longitude and latitude share one, elevation has its own: with one each the evidence of few points likes
    stripes. It also often thinks that there is no noise, and the surprise at other points is then without
    bound: noise is at least a hundredth of the variance.
    """
    x, y = (value.double() for value in points)
    spread = float(y.var().clamp(min=1e-6))

    def build(lengthscale: Tensor, output_var: float, noise_var: float) -> Any:
        lengths = torch.cat([lengthscale[:1], lengthscale])
        noise = noise_var + 0.01 * spread
        return n2g.condition(n2g.RBF(lengths, output_var), (x, y), n2g.Gaussian(noise))

    rest = {"max_iterations": 25, "output_var": spread, "noise_var": 0.1 * spread}
    starts = (torch.full((x.shape[1] - 1,), start).double() for start in (0.3, 1.5))
    found = [n2g.tune(build, lengthscale=start, **rest) for start in starts]
    return max(found, key=lambda posterior: float(posterior.log_marginal_likelihood()))


def of_rbf(points: Points, network: nn.Module | None = None) -> Predict:
    """An RBF process around the mean of the few values, or around a network."""
    x, y = points
    base = (lambda _: y.mean()) if network is None else (lambda at: network(at)[:, :1])
    inner = of_posterior(rbf((x, y - base(x))))

    def predict(at: Tensor) -> Points:
        mean, variance = (value.to(at) for value in inner(at.double()))
        return mean + base(at), variance

    return predict


def squared_error(network: nn.Module, points: Points) -> float:
    """The mean squared error of the network's mean."""
    with torch.no_grad():
        return float((network(points[0])[:, :1] - points[1]).square().mean())


def methods(
    network: nn.Sequential, source: Points, options: Options
) -> dict[str, Callable[[Points], Predict]]:
    """By name, what makes a prediction from few points."""
    noise = max(1e-3, squared_error(network, source))
    start = untrained(network[0].in_features, seed=1)
    steps = options.tuning_steps
    return {
        GP: lambda few: of_posterior(adapted(network, few)),
        "GP, zero mean": lambda few: of_posterior(adapted(network, few, zero_mean=True)),
        "GP, as published": lambda few: of_posterior(published(network, few, noise)),
        "GP, untrained": lambda few: of_posterior(adapted(start, few, zero_mean=True)),
        "GP, last layer": lambda few: of_posterior(adapted(network, few, only="4.*")),
        "RBF GP": of_rbf,
        "network + RBF GP": lambda few: of_rbf(few, network),
        "source network": lambda few: of_network(network),
        "fine-tuned": lambda few: of_network(tune_network(network, few, "", steps)),
        "last layer tuned": lambda few: of_network(tune_network(network, few, "4", steps)),
    }


@dataclass(frozen=True, eq=False)
class Scores:
    """RMSE and negative log likelihood (sizes, repeats, 2) of each method, in the units of the data."""

    sizes: tuple[int, ...]
    values: dict[str, Tensor]

    def verdict(self, rival: str, size: int, measure: int) -> str:
        """Whether the GP of the network is better than a rival, by Student's t of the paired differences."""
        row = self.sizes.index(size)
        return claims.verdict((self.values[rival] - self.values[GP])[row, :, measure])

    def margin(self, measure: str, rival: str) -> Tensor:
        """By how much the GP of the network is better, the mean over all sizes: a number a repetition, (R,).

        Of errors it is the logarithm of their ratio, which counts small and large ones alike.
        """
        theirs, ours = (self.values[name][..., MEASURES.index(measure)] for name in (rival, GP))
        return (theirs / ours).log().mean(0) if measure == "rmse" else (theirs - ours).mean(0)


def score(
    transfer: Transfer, makers: dict[str, Callable[[Points], Predict]], options: Options
) -> Scores:
    """Every method at every size, on the same points."""
    values = {name: torch.zeros(len(options.sizes), options.repeats, 2) for name in makers}
    for repeat in range(options.repeats):
        (x, y), (x_test, y_test) = transfer.choose(repeat, options)
        for row, size in enumerate(options.sizes):
            for name, make in makers.items():
                mean, variance = make((x[:size], y[:size]))(x_test)
                error = metrics.rmse(mean, y_test) * transfer.spread
                nll = metrics.gaussian_nll((mean, variance), y_test) + math.log(transfer.spread)
                values[name][row, repeat] = torch.stack([error, nll])
    return Scores(options.sizes, values)


def print_scores(name: str, unit: str, scores: Scores) -> None:
    """A line for each method, a column for each size: mean ± standard error; then who is better where."""
    for measure, title in enumerate((f"RMSE in {unit}", "negative log likelihood")):
        print(f"\n{name}: {title}")
        print(f"{'':<20}" + "".join(f"{f'n = {size}':>20}" for size in scores.sizes))
        for method, value in scores.values.items():
            one = value[..., measure]
            errors = one.std(1) / one.shape[1] ** 0.5
            cells = [f"{m:.4g} ± {e:.2g}" for m, e in zip(one.mean(1), errors, strict=True)]
            print(f"{method:<20}" + "".join(f"{cell:>20}" for cell in cells))
        print(f"{GP} is, beside")
        for rival in scores.values:
            if rival != GP:
                words = [scores.verdict(rival, size, measure) for size in scores.sizes]
                print(f"{rival:<20}" + "".join(f"{word:>20}" for word in words))


def compare(program: str, name: str, scores: Scores, quick: bool) -> bool:
    """Print what the .toml beside a program claims of every transfer; whether it holds for this one."""
    return claims.judge(claims.claims_of(program, name, scores.margin, quick=quick))
