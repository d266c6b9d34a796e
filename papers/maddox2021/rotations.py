"""By how much is a picture turned? Few labeled pictures of a new kind, and a network that learned others.

    python papers/maddox2021/rotations.py --out figures [--quick]
    NET2GP_DATA=... python papers/maddox2021/rotations.py --out figures

The paper regresses the angle by which faces are rotated. Here pictures are turned by angles that are uniform
within ±45°, inside a disk, so that no corner gives the angle away; a small convolutional network learns the
angle of the source's pictures, and is adapted to 10, 20, 50 or 100 labeled pictures of the target:

- digits: from the handwritten digits 0 to 4 to 5 to 9, 8 × 8 pixels, which come with scikit-learn;
- letters: from MNIST digits to printed letters (notMNIST);
- faces: from 30 people to the other ten of the Olivetti faces, other people in each repetition.

The last two need NET2GP_DATA. Each repetition has a network, labeled pictures and test pictures of its own.
Methods, beside the Gaussian process of the network (all parameters, prior and noise by the evidence):
the same of the last layer (linear regression on the learned features), of a network that was not trained, and
of an RBF kernel on pixels; and networks: as it is, and fine-tuned in all layers or the last one, where every
fifth picture tells when to stop. Networks get as variance their squared error on the labeled pictures, and at
least that on pictures of the source which they have not seen.

Prints errors, likelihoods and seconds, says where adaptation is better or worse, judges the claims of
rotations.toml, and draws curves. Likelihoods are of angles in degrees: 4.7 is that of knowing nothing.

Maddox et al. (2021), "Fast adaptation with linearized neural networks"; the task is that of Wilson et al.
(2016), "Deep kernel learning".
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.functional import affine_grid, avg_pool2d, grid_sample, mse_loss, pad

import net2gp as n2g
from net2gp import data, metrics
from net2gp.errors import InputError

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parent))
import findings
import maps
from baselines import adapt_to_few
from map_studies import STYLES
from maps import GP, Options, Points, Predict, Scores, of_posterior
from studies import panels, save

LARGEST = 45.0
"""Degrees that a picture is turned by at most."""

SPREAD = LARGEST / 3**0.5
"""The standard deviation of the angles; targets are in units of it."""

NUM_SOURCE = 5000

OPTIONS = Options(repeats=10, steps=800, tuning_steps=100, sizes=(10, 20, 50, 100), tests=500)
QUICK = replace(OPTIONS, repeats=3, steps=300, tuning_steps=50, sizes=(20, 100), quick=True)
"""Minutes on two cores."""


@dataclass(frozen=True, eq=False)
class Transfer:
    """Upright pictures (N, 1, H, H) of source and target for each seed, and by what to shrink them."""

    name: str
    pictures: Callable[[int], tuple[Tensor, Tensor]]
    shrink: int = 1


def digits() -> Transfer:
    """0 to 4, and 5 to 9."""
    (x, y), (others, labels) = data.digits("train"), data.digits("test")
    x, y = pad(torch.cat([x, others]), (2, 2, 2, 2)), torch.cat([y, labels])
    return Transfer("digits", lambda seed: (x[y < 5], x[y >= 5]))


def letters() -> Transfer:
    """Digits of MNIST, and letters of many fonts."""
    source, target = data.mnist("train")[0][:10_000], data.notmnist()[0]
    return Transfer("letters", lambda seed: (source, target), shrink=2)


def faces() -> Transfer:
    """Thirty people, and ten others."""
    found = data.arrays("olivetti", "x", "y")
    x = torch.from_numpy(found["x"]).float()[:, None] / 255
    person = torch.from_numpy(found["y"]).long()

    def pictures(seed: int) -> tuple[Tensor, Tensor]:
        order = torch.randperm(40, generator=torch.Generator().manual_seed(seed))
        known = torch.isin(person, order[:30])
        return x[known], x[~known]

    return Transfer("faces", pictures, shrink=4)


TRANSFERS = {"digits": digits, "letters": letters, "faces": faces}


def turned(pictures: Tensor, degrees: Tensor, shrink: int = 1) -> Tensor:
    """Pictures (N, 1, H, H) rotated counterclockwise about their middle, black outside of a disk, smaller."""
    angle = degrees.deg2rad()
    rows = [torch.stack([angle.cos(), -angle.sin()], 1), torch.stack([angle.sin(), angle.cos()], 1)]
    matrices = torch.cat([torch.stack(rows, 1), torch.zeros(len(angle), 2, 1)], 2)
    grid = affine_grid(matrices, list(pictures.shape), align_corners=False)
    found = grid_sample(pictures, grid, padding_mode="border", align_corners=False)
    inside = grid[:1].square().sum(-1) <= 1
    return avg_pool2d(found * inside, shrink)


def task(pictures: Tensor, count: int, shrink: int, generator: torch.Generator) -> Points:
    """`count` pictures, each as often as it takes, turned by random angles, and the angles over `SPREAD`."""
    repeated = torch.arange(count) % len(pictures)
    index = torch.randperm(len(pictures), generator=generator)[repeated]
    degrees = LARGEST * (2 * torch.rand(count, generator=generator) - 1)
    return turned(pictures[index], degrees, shrink), degrees[:, None] / SPREAD


@dataclass(frozen=True, eq=False)
class Problem:
    """What one repetition has: pictures of the source to train on and to test on, and of the target."""

    train: Points
    held_out: Points
    few: Points
    test: Points


def problem(transfer: Transfer, seed: int, options: Options) -> Problem:
    """No picture is in two parts, however turned."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for pictures, counts in zip(
        transfer.pictures(seed),
        ((NUM_SOURCE, options.tests), (max(options.sizes), options.tests)),
        strict=True,
    ):
        order = torch.randperm(len(pictures), generator=generator)
        cut = len(order) * 4 // 5 if not parts else len(order) // 2
        for some, count in zip(order.tensor_split([cut]), counts, strict=True):
            parts.append(task(pictures[some], count, transfer.shrink, generator))
    return Problem(*parts)


def untrained(size: int, seed: int) -> nn.Sequential:
    """Two convolutions and two linear layers for pictures of this size, as torch initializes them."""
    side = (size - 3) // 2
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        convolutions = nn.Conv2d(1, 12, 3), nn.ReLU(), nn.Conv2d(12, 24, 3, stride=2), nn.ReLU()
        head = nn.Linear(24 * side**2, 64), nn.ReLU(), nn.Linear(64, 1)
        return nn.Sequential(*convolutions, nn.Flatten(), *head).eval()


LAST = "7."
"""What the names of the last layer's parameters begin with."""


def loss(network: nn.Module, points: Points) -> Tensor:
    """The mean squared error."""
    return mse_loss(network(points[0]), points[1])


def of_network(network: nn.Module, few: Points, floor: float) -> Predict:
    """The network's output, and one variance for all: the squared error on the few points, or the floor."""
    variance = max(float(loss(network, few)), floor)

    def predict(x: Tensor) -> Points:
        mean = network(x)
        return mean, torch.full_like(mean, variance)

    return predict


def of_pixels(points: Points) -> Predict:
    """An RBF process of the pixels, length scale, variance and noise by the evidence."""
    x, y = points[0].flatten(1).double(), points[1].double()
    length, middle = float(torch.pdist(x).median()), y.mean()

    def build(lengthscale: float, output_var: float, noise_var: float) -> Any:
        # few points may have the largest evidence without noise: at least a hundredth of the angles' variance
        noise = n2g.Gaussian(noise_var + 0.01)
        return n2g.condition(n2g.RBF(lengthscale, output_var), (x, y - middle), noise)

    inner = of_posterior(
        n2g.tune(build, lengthscale=length, output_var=1.0, noise_var=0.1, max_iterations=25),
        middle,
    )

    def predict(at: Tensor) -> Points:
        mean, variance = inner(at.flatten(1).double())
        return mean.to(at), variance.to(at)

    return predict


def methods(
    network: nn.Sequential, start: nn.Sequential, floor: float, steps: int
) -> dict[str, Callable[[Points], Predict]]:
    """By name, what makes a prediction from few points; `start` is an untrained network."""
    noise = n2g.Gaussian()
    last = n2g.linearize(network, only=f"{LAST}*")
    tuned = lambda few, only: maps.tune_network(network, few, only, steps, loss)
    return {
        GP: lambda few: of_posterior(adapt_to_few(network, few, noise)),
        "GP, last layer": lambda few: of_posterior(adapt_to_few(last, few, noise)),
        "GP, untrained": lambda few: of_posterior(adapt_to_few(start, few, noise, zero_mean=True)),
        "RBF GP": of_pixels,
        "source network": lambda few: of_network(network, few, floor),
        "fine-tuned": lambda few: of_network(tuned(few, ""), few, floor),
        "last layer tuned": lambda few: of_network(tuned(few, LAST), few, floor),
    }


def score(transfer: Transfer, options: Options) -> tuple[Scores, Tensor]:
    """RMSE, negative log likelihood and seconds of every method; and the networks' RMSE at the source."""
    values: dict[str, Tensor] = {}
    source = []
    for repeat in range(options.repeats):
        seed = options.first + repeat
        parts = problem(transfer, seed, options)
        start = untrained(parts.few[0].shape[-1], seed)
        network = maps.train(start, parts.train, options.steps, loss=loss, batch=100, seed=seed)
        floor = float(loss(network, parts.held_out))
        source.append(floor**0.5 * SPREAD)
        other = untrained(parts.few[0].shape[-1], 1000 + seed)
        for name, make in methods(network, other, floor, options.tuning_steps).items():
            empty = torch.zeros(len(options.sizes), options.repeats, 3)
            for row, size in enumerate(options.sizes):
                started = time.perf_counter()
                predict = make((parts.few[0][:size], parts.few[1][:size]))
                seconds = time.perf_counter() - started
                mean, variance = predict(parts.test[0])
                error = SPREAD * metrics.rmse(mean, parts.test[1])
                surprise = metrics.gaussian_nll((mean, variance), parts.test[1]) + math.log(SPREAD)
                cell = torch.tensor([float(error), float(surprise), seconds])
                values.setdefault(name, empty)[row, repeat] = cell
    return Scores(options.sizes, values), torch.tensor(source)


def print_seconds(scores: Scores) -> None:
    """Wall seconds of learning from the few pictures, the mean over repetitions."""
    print(f"\n{'seconds':<20}" + "".join(f"{f'n = {size}':>20}" for size in scores.sizes))
    for name, value in scores.values.items():
        print(f"{name:<20}" + "".join(f"{mean:>20.3f}" for mean in value[..., 2].mean(1)))


def draw(found: dict[str, Scores]) -> Figure:
    """RMSE above, negative log likelihood below, over the number of labeled pictures."""
    figure, _ = panels(1)
    figure.clear()
    figure.set_size_inches(3.6 * len(found) + 1.8, 6)
    axes = figure.subplots(2, len(found), squeeze=False, sharex=True)
    for column, (name, scores) in enumerate(found.items()):
        for measure, what in enumerate(("RMSE in degrees", "negative log likelihood")):
            ax = axes[measure, column]
            for index, (method, values) in enumerate(scores.values.items()):
                one = values[..., measure]
                apart = 1.02 ** (index - len(scores.values) / 2)  # bars do not hide each other
                x = [apart * size for size in scores.sizes]
                error = one.std(1) / one.shape[1] ** 0.5
                ax.errorbar(x, one.mean(1), error, label=method, elinewidth=0.8, **STYLES[method])
            ax.set_xscale("log")
            ax.set_xticks(scores.sizes, [str(size) for size in scores.sizes])
            ax.minorticks_off()
            ax.set_ylabel(what if column == 0 else "")
        axes[0, column].set_title(name)
        axes[1, column].set_xlabel("labeled pictures")
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(), loc="outside right center", frameon=False
    )
    return figure


def run(names: list[str], options: Options, out: Path) -> bool:
    """Every transfer whose data are there; whether the claims of rotations.toml hold."""
    found: dict[str, Scores] = {}
    agree = True
    for name in names:
        try:
            transfer = TRANSFERS[name]()
        except InputError as error:
            findings.leave_out(f"{name} left out: {error}")
            continue
        found[name], source = score(transfer, options)
        error = float(source.std()) / len(source) ** 0.5
        print(f"\n{name}: RMSE at new pictures of the source {source.mean():.2f} ± {error:.2f}")
        maps.print_scores(name, "degrees", found[name])
        print_seconds(found[name])
        agree &= maps.compare(__file__, name, found[name], options.quick)
    if found:
        save(draw(found), out, "maddox2021_rotations.png")
    return agree


def main(arguments: list[str] | None = None) -> int:
    """Print the tables, write the figure; 0 if all claims came out as stated."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder for the figure")
    parser.add_argument("--only", choices=list(TRANSFERS), help="one of the transfers")
    parser.add_argument("--repeats", type=int, default=OPTIONS.repeats, help="networks and choices")
    parser.add_argument("--steps", type=int, default=OPTIONS.steps, help="steps at the source")
    parser.add_argument("--first", type=int, default=OPTIONS.first, help="the first seed")
    parser.add_argument("--quick", action="store_true", help="three small repetitions")
    chosen = findings.parse(parser, arguments)
    if chosen.repeats < 3:
        parser.error("--repeats must be at least 3: standard errors are over them")
    options = replace(OPTIONS, repeats=chosen.repeats, steps=chosen.steps, first=chosen.first)
    if chosen.quick:
        options = replace(QUICK, first=chosen.first)
    names = [chosen.only] if chosen.only else list(TRANSFERS)
    return 0 if run(names, options, chosen.out) else 1


if __name__ == "__main__":
    raise SystemExit(main())
