"""A Gaussian process or a network? Accuracy, calibration, time and stability over the number of data.

    python papers/lecture/gp_or_network.py --out figures [--quick]

On subsets of MNIST: the Gaussian process of an infinitely wide network (NNGP) and of its tangent kernel
(NTK), each without training, beside the same network at finite width: its most probable parameters under a
prior of the same form (MAP), trained without a prior (SGD), and an ensemble of five such networks. The
variance of MAP's prior is multiplied by the best of three factors on a held-out fifth of the data: under the
prior of the NNGP itself the most probable wide network is nearly constant, since its 200,000 parameters
outweigh some hundred digits. gp_or_network.toml has what is claimed of the NNGP, written down before the run.
Also claimed: the ensemble's NLL is better than its members', and the time of the Gaussian process grows
faster than the time of the network.

A second table is over the width of the network, which the Gaussian process does not have.

Needs mnist.npz (see net2gp.data). Lee et al. (2018), "Deep neural networks as Gaussian processes".
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from torch import Tensor, nn

import net2gp as n2g
from net2gp import bayes, metrics
from net2gp.plots import COLORS

sys.path.append(str(Path(__file__).parents[1]))
from claims import Claim, at_most, claims_of, compared
from common import Study, Topic, run, with_files, write
from studies import Slope

WEIGHT_VAR, BIAS_VAR, WIDTH, MEMBERS = 1.6, 0.1, 200, 5
"""Of the prior, and of the networks."""

FACTORS = (1.0, 30.0, 1000.0)
"""Of the prior variance of the most probable network."""

MEASURES = ("accuracy", "NLL", "ECE", "fit", "predict")
"""What is measured; the last two are seconds."""

Points = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Sizes:
    """How much is computed: numbers of data, repetitions, test points, steps of training, widths."""

    counts: tuple[int, ...]
    repeats: int
    test: int
    steps: int
    widths: tuple[int, ...]

    @staticmethod
    def of(quick: bool) -> Sizes:
        """Minutes, or seconds."""
        if quick:
            return Sizes((50, 100, 200), 2, 1000, 100, (10, 100))
        return Sizes((50, 100, 200, 500, 1000), 3, 2000, 300, (5, 20, 100))


def network(width: int = WIDTH) -> nn.Sequential:
    """Two hidden layers of ReLUs, drawn from the prior."""
    module = nn.Sequential(
        nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )
    return module.eval()


def prior(module: nn.Module, factor: float = 1.0) -> bayes.NormalPrior:
    """Weights N(0, factor · weight_var / fan_in) and biases N(0, factor · bias_var)."""
    variances = bayes.fan_in_variances(module, factor * WEIGHT_VAR, factor * BIAS_VAR)
    return bayes.NormalPrior(variances)


def drawn(module: nn.Module, seed: int) -> nn.Module:
    """The network with parameters drawn from its prior."""
    params = {name: value.detach() for name, value in module.named_parameters()}
    draw = prior(module).sample(params, 1, torch.Generator().manual_seed(seed))
    return bayes.module_with(module, draw, 0)


Fit = Callable[[Points, int], n2g.Posterior]
"""From data and a seed to a posterior."""


def methods(steps: int, width: int = WIDTH) -> dict[str, Fit]:
    """Everything that is compared, by name."""
    limit = n2g.limits.infinite_width(network(), weight_var=WEIGHT_VAR, bias_var=BIAS_VAR)

    def training(points: Points, seed: int) -> bayes.Training:
        size = min(64, len(points[1]))
        return bayes.Training(num_steps=steps, learning_rate=1e-3, batch_size=size, seed=seed)

    def with_factor(points: Points, seed: int, factor: float) -> n2g.Posterior:
        module = drawn(network(width), seed)
        options = {"prior": prior(module, factor), "training": training(points, seed)}
        return bayes.map_estimate(module, points, n2g.Categorical(), **options)

    def most_probable(points: Points, seed: int) -> n2g.Posterior:
        x, y = points
        held = torch.arange(len(y)) % 5 == 0
        rest, last = (x[~held], y[~held]), (x[held], y[held])
        with torch.no_grad():
            losses = {
                factor: float(
                    metrics.nll(with_factor(rest, seed, factor).predict(last[0]), last[1])
                )
                for factor in FACTORS
            }
        return with_factor(points, seed, min(losses, key=lambda factor: losses[factor]))

    def descended(points: Points, seed: int) -> n2g.Posterior:
        module = drawn(network(width), seed)
        options = {"prior": None, "training": training(points, seed)}
        return bayes.map_estimate(module, points, n2g.Categorical(), **options)

    def ensemble(points: Points, seed: int) -> n2g.Posterior:
        numbers = iter(range(MEMBERS * (seed + 1), MEMBERS * (seed + 2) + 1))
        return bayes.ensemble(
            lambda: drawn(network(width), next(numbers)),
            points,
            n2g.Categorical(),
            num_members=MEMBERS,
            prior=None,
            training=training(points, seed),
        )

    return {
        "NNGP": lambda points, _: n2g.adapt_classes(limit.nngp, points, num_classes=10),
        "NTK": lambda points, _: n2g.adapt_classes(limit.ntk, points, num_classes=10),
        "MAP": most_probable,
        "SGD": descended,
        "ensemble": ensemble,
    }


def tasks(sizes: Sizes) -> Iterator[tuple[int, int, Points, Points]]:
    """Balanced training data for each number and repetition, and the test data."""
    x, y = n2g.data.mnist("train")
    test_x, test_y = n2g.data.mnist("test")
    mean = x[:10000].mean()
    flat = lambda images: (images.flatten(1) - mean) / 0.3
    test = flat(test_x[: sizes.test]), test_y[: sizes.test]
    for repeat in range(sizes.repeats):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(repeat))
        for count in sizes.counts:
            rows = torch.cat([order[y[order] == c][: count // 10] for c in range(10)])
            yield count, repeat, (flat(x[rows]), y[rows]), test


def score(fit: Fit, train: Points, test: Points, seed: int) -> Tensor:
    """All measures of one method on one task: (5,)."""
    start = time.perf_counter()
    posterior = fit(train, seed)
    middle = time.perf_counter()
    with torch.no_grad():
        law = posterior.predict(test[0])
        probs = law.probs.double()
    end = time.perf_counter()
    found = (
        metrics.accuracy(probs, test[1]),
        metrics.nll(law, test[1]),
        metrics.expected_calibration_error(probs, test[1]),
    )
    times = torch.tensor([middle - start, end - middle], dtype=torch.float64)
    return torch.cat([torch.stack(found).double(), times])


def measure(sizes: Sizes) -> dict[str, Tensor]:
    """By method all measures: (counts, repeats, measures)."""
    shape = (len(sizes.counts), sizes.repeats, len(MEASURES))
    chosen = methods(sizes.steps)
    found = {name: torch.zeros(shape, dtype=torch.float64) for name in chosen}
    for count, repeat, train, test in tasks(sizes):
        for name, fit in chosen.items():
            found[name][sizes.counts.index(count), repeat] = score(fit, train, test, repeat)
    return found


def over_width(sizes: Sizes) -> dict[int, Tensor]:
    """The most probable network by width, at the third number of data: (repeats, measures) each."""
    chosen = [task for task in tasks(sizes) if task[0] == sizes.counts[2]]
    return {
        width: torch.stack(
            [
                score(methods(sizes.steps, width)["MAP"], train, test, repeat)
                for _, repeat, train, test in chosen
            ]
        )
        for width in sizes.widths
    }


def conditions(sizes: Sizes) -> list[tuple[float, float]]:
    """The condition numbers of the Gram matrices of NNGP and NTK, by number of data."""
    limit = n2g.limits.infinite_width(network(), weight_var=WEIGHT_VAR, bias_var=BIAS_VAR)
    found = []
    for _, repeat, (x, _), _ in tasks(sizes):
        if repeat == 0:
            values = [torch.linalg.eigvalsh(gram) for gram in limit(x.double())]
            found.append(tuple(float(value[-1] / value[0]) for value in values))
    return found


def claims(found: dict[str, Tensor], sizes: Sizes, quick: bool) -> list[Claim]:
    """What gp_or_network.toml and the docstring state."""
    signs = {"accuracy": 1.0, "NLL": -1.0, "ECE": -1.0}

    def margins(measure: str, rival: str) -> Tensor:
        place, sign = MEASURES.index(measure), signs[measure]
        return sign * (found["NNGP"] - found[rival])[..., place].reshape(-1)

    made = list(claims_of(__file__, "NNGP", margins, quick=quick))
    gain = (found["SGD"] - found["ensemble"])[..., MEASURES.index("NLL")].reshape(-1)
    made.append(compared("ensemble, NLL, beside SGD", gain, "better", quick=quick))
    place = MEASURES.index("fit")
    if not quick:  # times of small problems are overhead
        large = slice(-3, None)
        slopes = [
            Slope.fit(sizes.counts[large], found[name][large, :, place]).value
            for name in ("NNGP", "MAP")
        ]
        made.append(at_most("exponent of time in N, MAP less NNGP", slopes[1] - slopes[0], 0.0))
    return made


def tables(found: dict[str, Tensor], widths: dict[int, Tensor], sizes: Sizes) -> str:
    """Means over the repetitions: over N, over the width, and how stable and how parallel the methods are."""
    head = "".join(f"{name:>10}" for name in MEASURES)
    lines = [f"{'N':>6}  {'method':<10}{head}"]
    for index, count in enumerate(sizes.counts):
        for name, values in found.items():
            cells = "".join(f"{value:>10.4f}" for value in values[index].mean(0).tolist())
            lines.append(f"{count:>6}  {name:<10}{cells}")
    lines += ["", f"{'width':>6}  parameters{head}   (MAP, N = {sizes.counts[2]})"]
    for width, values in widths.items():
        number = sum(p.numel() for p in network(width).parameters())
        cells = "".join(f"{value:>10.4f}" for value in values.mean(0).tolist())
        lines.append(f"{width:>6}  {number:>10}{cells}")
    best = found["NNGP"][2].mean(0)
    lines.append(f"{'∞':>6}  {'N² numbers':>10}" + "".join(f"{v:>10.4f}" for v in best.tolist()))
    lines += ["", f"{'N':>6}{'condition of the NNGP matrix':>32}{'of the NTK matrix':>20}"]
    for count, (one, other) in zip(sizes.counts, conditions(sizes), strict=True):
        lines.append(f"{count:>6}{one:>32.3g}{other:>20.3g}")
    place = MEASURES.index("fit")
    ratio = found["ensemble"][..., place].mean() / found["SGD"][..., place].mean()
    lines += [
        "",
        f"{MEMBERS} networks in vectorized passes take {float(ratio):.2g} times as long as one",
    ]
    return "\n".join(lines)


def draw(found: dict[str, Tensor], sizes: Sizes) -> Figure:
    """A panel per measure, over the number of data."""
    figure = Figure(figsize=(14.4, 3.4), layout="constrained")
    axes = figure.subplots(1, 4)
    titles = ("test error", "NLL", "expected calibration error", "seconds to fit")
    for place, (ax, title) in enumerate(zip(axes, titles, strict=True)):
        for (name, values), color in zip(found.items(), COLORS, strict=False):
            part = 1 - values[..., 0] if place == 0 else values[..., place]
            mean, error = part.mean(1), part.std(1) / max(1, part.shape[1]) ** 0.5
            ax.errorbar(
                sizes.counts, mean, error, color=color, marker="o", ms=3.5, label=name, capsize=2
            )
        ax.set(xscale="log", yscale="log", xlabel="training digits N", title=title)
        ax.set_xticks(sizes.counts, [str(count) for count in sizes.counts])
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        ax.yaxis.set_major_formatter("{x:g}")
        ax.minorticks_off()
    axes[0].legend(frameon=False, fontsize=8)
    return figure


def gp_or_network(quick: bool) -> Study:
    """All methods over the number of data, and the network over its width."""
    sizes = Sizes.of(quick)
    found = measure(sizes)
    numbers = tables(found, over_width(sizes), sizes)
    text = (
        "The Gaussian process of an infinitely wide network and of its tangent kernel need no training, and "
        "are better calibrated than networks of finite width on up to 1000 digits of MNIST. Their time is "
        "less, but grows faster with the number of data."
    )
    title = "A Gaussian process or a network"
    made = tuple(claims(found, sizes, quick))
    return Study("gp_or_network", title, text, draw(found, sizes), made, numbers)


TOPICS: list[Topic] = with_files([gp_or_network], "mnist.npz")


def figures(out: Path, quick: bool) -> list[Path]:
    """Write the figure; none without mnist.npz."""
    return [write(topic(quick), out) for topic in TOPICS]


if __name__ == "__main__":
    raise SystemExit(run(TOPICS, __doc__))
