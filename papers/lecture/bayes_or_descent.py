"""Bayesian inference or gradient descent: NNGP, NTK-GP and networks trained by SGD, on digits and on
images.

    NET2GP_DATA=... python papers/lecture/bayes_or_descent.py --out figures [--quick]

Networks of two hidden ReLU layers, all of them for the squared error of centered one-hot targets on
subsets of MNIST and CIFAR-10. The NNGP is Bayesian inference at infinite width, the NTK-GP is Gaussian
process regression with the kernel of gradient descent, "descent" is the law of infinitely wide networks
that gradient descent has trained to the end, and SGD trains networks of finite width in batches with
momentum; every parameter has the variance that it is drawn with as a factor of its learning rate, which
is the NTK parameterization. Stated before the run, for both data sets:

- the mean of M networks trained by SGD is where the mean of M draws of "descent" would be: its squared
  distance from the mean of "descent", in units of the variance over M and averaged over outputs, is
  about 1, and at most 2;
- the spread of the ensemble's members is the spread of "descent", within a third;
- the NNGP's accuracy is no worse than a single network's, and so is the ensemble's, as in the tables of
  Lee et al. (2018) for few data;
- with the same noise, the NLL of NNGP, NTK-GP and ensemble is better than a single network's: a point
  estimate has no uncertainty.

Lee et al. (2018), "Deep neural networks as Gaussian processes"; Lee et al. (2019), "Wide neural
networks of any depth evolve as linear models"; Lee et al. (2020), "Finite versus infinite neural
networks". Needs mnist.npz and cifar10.npz.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from common import WIDTH as INCHES
from common import Claim, Study, Topic, at_most, claims, run, tidy, with_files, within
from matplotlib.figure import Figure
from torch import Tensor, nn

import net2gp as n2g
from net2gp import bayes, data, metrics
from net2gp.plots import COLORS

PRIOR = {"weight_var": {"0": 1.6, "2": 1.6, "4": 0.1}, "bias_var": {"0": 0.1, "2": 0.1, "4": 0.01}}
"""With these, f has about the variance of the targets before it has seen data."""

NOISE_VAR = 0.01
METHODS = ("NNGP", "NTK-GP", "descent", "SGD", "SGD ensemble")
MEASURES = ("accuracy", "MSE", "NLL", "seconds")
Images = tuple[Tensor, Tensor]
Law = tuple[Tensor, Tensor]
"""Mean and variance of the outputs, (N, 10) each."""


@dataclass(frozen=True)
class Size:
    """How much is computed."""

    count: int
    repeats: int
    test: int
    width: int
    members: int
    steps: int

    @staticmethod
    def of(quick: bool) -> Size:
        """Minutes, or a minute."""
        return Size(100, 2, 500, 256, 4, 300) if quick else Size(500, 3, 2000, 512, 5, 1000)


def standardized(images: Tensor) -> Tensor:
    """Each image as a vector of mean 0 and variance 1."""
    flat = images.flatten(1)
    return (flat - flat.mean(1, keepdim=True)) / flat.std(1, keepdim=True)


def targets(y: Tensor) -> Tensor:
    """One-hot, less 0.1."""
    return nn.functional.one_hot(y, 10).float() - 0.1


def tasks(name: str, size: Size) -> Iterator[tuple[Images, Images]]:
    """Balanced subsets and the test images."""
    read = data.mnist if name == "MNIST" else data.cifar10
    (x, y), (test_x, test_y) = read("train"), read("test")
    test = standardized(test_x[: size.test]), test_y[: size.test]
    for repeat in range(size.repeats):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(repeat))
        rows = torch.cat([order[y[order] == c][: size.count // 10] for c in range(10)])
        yield (standardized(x[rows]), y[rows]), test


def network(inputs: int, width: int) -> nn.Sequential:
    """Two hidden layers."""
    layers = [nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10)).eval()


def trained(train: Images, size: Size, rate: float, seed: int) -> nn.Module:
    """A network drawn from the prior, after SGD with momentum in batches of 50."""
    x, y = train[0], targets(train[1])
    start = network(x.shape[1], size.width)
    variances = bayes.fan_in_variances(start, **PRIOR)
    values = {name: value.detach() for name, value in start.named_parameters()}
    generator = torch.Generator().manual_seed(seed)
    module = bayes.module_with(start, bayes.NormalPrior(variances).sample(values, 1, generator), 0)
    module.requires_grad_(True)
    groups = [
        {"params": [p], "lr": rate * float(variances[n])} for n, p in module.named_parameters()
    ]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, size.steps)
    for _ in range(size.steps):
        index = torch.randperm(len(x), generator=generator)[:50]
        optimizer.zero_grad()
        (0.5 * (module(x[index]) - y[index]).square().mean()).backward()
        optimizer.step()
        schedule.step()
    return module


def laws(
    train: Images, test: Tensor, size: Size, repeat: int
) -> tuple[dict[str, Law], dict[str, float]]:
    """Means and variances of f at the test images by each method, and the seconds that it took."""
    x, y, at = train[0].double(), targets(train[1]).double(), test.double()
    limit = n2g.infinite_width(network(x.shape[1], size.width), **PRIOR)
    found: dict[str, Law] = {}
    seconds: dict[str, float] = {}
    noise = n2g.Gaussian(noise_var=NOISE_VAR)
    for name, kernel in (("NNGP", limit.nngp), ("NTK-GP", limit.ntk)):
        start = time.perf_counter()
        law = n2g.condition(kernel, (x, y), noise).marginal(at)
        found[name] = law.mean, law.variance
        seconds[name] = time.perf_counter() - start
    start = time.perf_counter()
    flow = n2g.gradient_flow(limit, (x, y))
    law = flow.at(torch.inf, at)
    found["descent"] = law.mean.reshape(len(at), 10), law.variance.reshape(len(at), 10)
    seconds["descent"] = time.perf_counter() - start
    start = time.perf_counter()
    rate = 0.1 * n2g.training.max_learning_rate(flow)
    members = [trained(train, size, rate, size.members * repeat + k) for k in range(size.members)]
    f = torch.stack([member(test).detach() for member in members]).double()
    seconds["SGD ensemble"] = time.perf_counter() - start
    seconds["SGD"] = seconds["SGD ensemble"] / size.members
    found["SGD"] = f[0], torch.zeros_like(f[0])
    found["SGD ensemble"] = f.mean(0), f.var(0)
    return found, seconds


def scores(law: Law, labels: Tensor) -> tuple[float, float, float]:
    """Accuracy, mean squared error and Gaussian NLL per output with the common noise."""
    mean, variance = law
    y = targets(labels).double()
    nll = metrics.gaussian_nll((mean, variance + NOISE_VAR), y)
    return (
        float((mean.argmax(1) == labels).double().mean()),
        float((mean - y).square().mean()),
        float(nll),
    )


@dataclass(frozen=True, eq=False)
class Found:
    """Of one data set: scores (methods, repeats, measures), and distances (repeats,)."""

    scores: Tensor
    distance: Tensor
    spread: Tensor


def measure(name: str, size: Size) -> Found:
    """All methods on all subsets."""
    rows, apart, spread = [], [], []
    for repeat, (train, test) in enumerate(tasks(name, size)):
        found, seconds = laws(train, test[0], size, repeat)
        rows.append([[*scores(found[m], test[1]), seconds[m]] for m in METHODS])
        (mean, _), (expected, variance) = found["SGD ensemble"], found["descent"]
        apart.append(float((mean - expected).square().mean() / variance.mean() * size.members))
        spread.append(float((found["SGD ensemble"][1].mean() / found["descent"][1].mean()).sqrt()))
    columns = (torch.tensor(v, dtype=torch.float64) for v in (apart, spread))
    return Found(torch.tensor(rows, dtype=torch.float64).transpose(0, 1), *columns)


def claims_of(name: str, found: Found, quick: bool) -> list[Claim]:
    """What was stated before the run."""
    value = lambda method, score: found.scores[METHODS.index(method), :, MEASURES.index(score)]
    made = [
        at_most(
            f"{name}: squared distance of SGD's mean from descent, of draws 1",
            float(found.distance.mean()),
            2.0,
        ),
        within(
            f"{name}: spread of SGD beside the spread of descent",
            float(found.spread.mean()),
            2 / 3,
            4 / 3,
        ),
    ]
    for method in ("NNGP", "SGD ensemble"):
        margin = value(method, "accuracy") - value("SGD", "accuracy")
        made.append(
            claims.compared(
                f"{name}: accuracy of {method}, beside SGD", margin, "no worse", quick=quick
            )
        )
    for method in ("NNGP", "NTK-GP", "SGD ensemble"):
        margin = value("SGD", "NLL") - value(method, "NLL")
        made.append(
            claims.compared(f"{name}: NLL of {method}, beside SGD", margin, "better", quick=quick)
        )
    return made


def bayes_or_descent(quick: bool) -> Study:
    """Both data sets, all methods."""
    size = Size.of(quick)
    figure = Figure(figsize=(3 * INCHES, 3.6), layout="constrained")
    axes = figure.subplots(1, 3)
    made: list[Claim] = []
    lines: list[str] = []
    for place, name in enumerate(("MNIST", "CIFAR-10")):
        found = measure(name, size)
        lines.append(
            f"{name + ', N = ' + str(size.count):<18}" + "".join(f"{m:>10}" for m in MEASURES)
        )
        for method, rows in zip(METHODS, found.scores, strict=True):
            lines.append(f"{method:<18}" + "".join(f"{v:>10.4f}" for v in rows.mean(0).tolist()))
        for ax, column, label in zip(
            axes, range(3), ("accuracy", "mean squared error", "NLL per output"), strict=True
        ):
            means, spreads = found.scores[:, :, column].mean(1), found.scores[:, :, column].std(1)
            at = torch.arange(len(METHODS)) + 0.4 * place - 0.2
            ax.bar(
                at, means, 0.4, yerr=spreads / size.repeats**0.5, color=COLORS[place], label=name
            )
            ax.set_xticks(range(len(METHODS)), METHODS, rotation=25, fontsize=8)
            ax.set_title(label, fontsize=10)
            tidy(ax)
        made += claims_of(name, found, quick)
    axes[2].legend(frameon=False, fontsize=8, loc="upper left")
    return Study(
        "bayes_or_descent",
        "Bayesian inference or gradient descent",
        f"""{size.count} images of MNIST and of CIFAR-10 as vectors, squared error, means over
{size.repeats} subsets. Two Gaussian processes without training (`condition` with `limit.nngp` and
`limit.ntk`), the law of infinitely wide networks after gradient descent (`gradient_flow`), one network
of width {size.width} trained by SGD, and {size.members} of them. SGD's networks are draws of the law of
gradient descent, which is not the posterior. One network has a poor NLL, since it has no uncertainty.""",
        figure,
        tuple(made),
        "\n".join(lines),
    )


TOPICS: list[Topic] = with_files([bayes_or_descent], "mnist.npz", "cifar10.npz")

if __name__ == "__main__":
    raise SystemExit(run(TOPICS, __doc__))
