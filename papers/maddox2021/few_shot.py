"""A few labeled images of each new class: closed-form adaptation of a trained network beside fine-tuning.

    NET2GP_DATA=... python papers/maddox2021/few_shot.py --out figures [--quick]
    NET2GP_DATA=... python papers/maddox2021/few_shot.py --out figures \\
        --tasks "CIFAR groups" --seeds 3 --test 500 --device cuda

A LeNet-5 that was trained on digits learns Kuzushiji characters (KMNIST) and letters (notMNIST); a ResNet-20
that was trained on the ten classes of CIFAR-10 learns to tell four groups of them apart. Adaptation is
`adapt_classes`: Gaussian process regression of one-hot codes with the trained network's tangent kernel,
averaged over its outputs so that the new classes may be any number, and standardized; nothing of the network
is trained. Controls are the same from the untrained network, from the last layer alone, and from an RBF
kernel of the pixels; fine-tuning takes a new last layer. Seconds are those of learning, not of prediction: of
the processor, or on a GPU of the clock.

How the kernel is standardized and codes become probabilities was decided on choices of images (seeds 100 to
102) that are not among those reported, and so was the weight decay of fine-tuning; all with the LeNet-5, so
that fine-tuning of the ResNet-20 may not be at its best.

Maddox et al. (2021), "Fast adaptation with linearized neural networks".
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import net2gp as n2g
from net2gp import data, metrics
from net2gp.plots import COLORS, FAINT

sys.path.append(str(Path(__file__).parents[1]))
import claims
import findings
import studies

SHOTS = [1, 2, 5, 10, 20, 50]
GP, UNTRAINED = "GP, trained network", "GP, untrained network"
MEASURES = {"accuracy": 1, "NLL": -1, "ECE": -1, "seconds": -1}
"""Whether more is better (1) or less (−1)."""

STYLES = {
    GP: {"color": COLORS[0], "linewidth": 2.4, "zorder": 5},
    UNTRAINED: {"color": FAINT},
    "GP, last layer": {"color": COLORS[0], "linestyle": ":"},
    "GP, pixels": {"color": COLORS[2]},
    "fine-tuned, all": {"color": COLORS[1]},
    "fine-tuned, last layer": {"color": COLORS[1], "linestyle": ":"},
}
GROUPS = torch.tensor([0, 0, 1, 2, 3, 2, 1, 3, 0, 0])
"""Vehicles, bird and frog, cat and dog, deer and horse."""

Predict = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Task:
    """A trained network, its last layer, and images of other classes."""

    network: nn.Module
    last: str
    x: Tensor
    y: Tensor

    @property
    def num_classes(self) -> int:
        """How many new classes there are."""
        return int(self.y.max()) + 1


def lenet(images: Callable[[], tuple[Tensor, Tensor]]) -> Callable[[], Task]:
    """The LeNet-5 of MNIST, and other images of its size."""

    def make() -> Task:
        x, y = images()
        network = data.pretrained("full_mnist_lenet_adaml2")
        return Task(network, last_linear(network), x.reshape(-1, 1, 28, 28), y)

    return make


def cifar_groups() -> Task:
    """ResNet-20 and the test images of CIFAR-10, which it was not trained on."""
    x, y = data.cifar10("test")
    network = data.pretrained("resnet20_cifar10")
    return Task(network, last_linear(network), data.IMAGENET(x), GROUPS[y])


TASKS: dict[str, Callable[[], Task]] = {
    "KMNIST": lenet(data.kmnist_test),
    "notMNIST": lenet(data.notmnist),
    "CIFAR groups": cifar_groups,
}


def last_linear(network: nn.Module) -> str:
    """The name of the last linear layer."""
    return [name for name, module in network.named_modules() if isinstance(module, nn.Linear)][-1]


def untrained(network: nn.Module) -> nn.Module:
    """The same architecture, its weights drawn anew."""
    fresh = deepcopy(network)
    for module in fresh.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return fresh.eval()


def adapted(kernel: n2g.Linearized | nn.Module, x: Tensor, y: Tensor) -> Predict:
    """In closed form, with the kernel of a network."""
    posterior = n2g.adapt_classes(kernel, (x, y))
    return lambda points: posterior.predict(points).probs


def process_of_pixels(task: Task, x: Tensor, y: Tensor) -> Predict:
    """A squared-exponential kernel of the pixels, its length the median distance."""
    flat = x.flatten(1)
    kernel = n2g.RBF(lengthscale=float(torch.pdist(flat).median()))
    posterior = n2g.adapt_classes(kernel, (flat, y))
    return lambda points: posterior.predict(points.flatten(1)).probs


def fine_tuned(task: Task, x: Tensor, y: Tensor) -> Predict:
    """A new last layer, trained with all others: 200 steps of Adam on up to 100 images, with weight decay."""
    network = deepcopy(task.network)
    new = replace_last(network, task)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3, weight_decay=0.03)
    for _ in range(200):
        batch = torch.randperm(len(y), device=x.device)[:100]
        optimizer.zero_grad()
        cross_entropy(network(x[batch]), y[batch]).backward()
        optimizer.step()
    assert network.get_submodule(task.last) is new
    return softmax_of(network)


def fine_tuned_last(task: Task, x: Tensor, y: Tensor) -> Predict:
    """A new last layer, trained alone on the features of the others: 300 steps of Adam, with weight decay."""
    network = deepcopy(task.network)
    new = replace_last(network, task)
    seen: list[Tensor] = []
    hook = new.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    with torch.no_grad():
        network(x)
    hook.remove()
    optimizer = torch.optim.Adam(new.parameters(), lr=1e-2, weight_decay=0.1)
    for _ in range(300):
        optimizer.zero_grad()
        cross_entropy(new(seen[0]), y).backward()
        optimizer.step()
    return softmax_of(network)


def replace_last(network: nn.Module, task: Task) -> nn.Linear:
    """The new last layer, in the network's place of the old."""
    parent, _, name = task.last.rpartition(".")
    old = network.get_submodule(task.last)
    assert isinstance(old, nn.Linear)
    new = nn.Linear(old.in_features, task.num_classes).to(old.weight)
    setattr(network.get_submodule(parent), name, new)
    return new


def softmax_of(network: nn.Module) -> Predict:
    """A network's probabilities, some images at a time."""
    return lambda points: torch.cat([network(part) for part in points.split(500)]).softmax(-1)


METHODS: dict[str, Callable[[Task, Tensor, Tensor], Predict]] = {
    GP: lambda task, x, y: adapted(task.network, x, y),
    UNTRAINED: lambda task, x, y: adapted(untrained(task.network), x, y),
    "GP, last layer": lambda task, x, y: adapted(
        n2g.linearize(task.network, only=f"{task.last}.*"), x, y
    ),
    "GP, pixels": process_of_pixels,
    "fine-tuned, all": fine_tuned,
    "fine-tuned, last layer": fine_tuned_last,
}


def scores(predict: Predict, x: Tensor, y: Tensor) -> list[float]:
    """Accuracy, negative log likelihood, calibration error."""
    with torch.no_grad():
        probs = predict(x).double().cpu()
    y = y.cpu()
    nll = -probs[torch.arange(len(y)), y].clamp(min=1e-300).log().mean()
    calibration = metrics.expected_calibration_error(probs, y)
    return [float(metrics.accuracy(probs, y)), float(nll), float(calibration)]


def choose(y: Tensor, seed: int) -> tuple[dict[int, Tensor], Tensor]:
    """So many points of each class, the fewer among the more, and others that are among none."""
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    most = [order[y[order] == c][: max(SHOTS)] for c in y.unique()]
    few = {shots: torch.cat([part[:shots] for part in most]) for shots in SHOTS}
    rest = torch.ones(len(y), dtype=torch.bool)
    rest[torch.cat(most)] = False
    return few, order[rest[order]]


def timed(method: Callable[[], Predict], device: str) -> tuple[Predict, float]:
    """What a method learns, and in how many seconds."""
    on_gpu = device.startswith("cuda")
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    clock = time.perf_counter if on_gpu else time.process_time
    wait()
    started = clock()
    predict = method()
    wait()
    return predict, clock() - started


def run_task(task: Task, options: argparse.Namespace) -> dict[str, Tensor]:
    """Scores and seconds of each method: (shots, seeds, 4)."""
    found = {name: torch.zeros(len(options.shots), options.seeds, 4) for name in METHODS}
    task.network.to(options.device)
    for seed in range(options.seeds):
        few, rest = choose(task.y, options.first + seed)
        test = [t[rest[: options.test]].to(options.device) for t in (task.x, task.y)]
        for row, shots in enumerate(options.shots):
            train = [t[few[shots]].to(options.device) for t in (task.x, task.y)]
            for name, method in METHODS.items():
                torch.manual_seed(options.first + seed)
                predict, seconds = timed(partial(method, task, *train), options.device)
                found[name][row, seed] = torch.tensor([*scores(predict, *test), seconds])
    return found


def margins(found: dict[str, Tensor], measure: str, rival: str) -> Tensor:
    """By how much adaptation is better than a rival: (shots, seeds)."""
    index = list(MEASURES).index(measure)
    return MEASURES[measure] * (found[GP] - found[rival])[..., index]


def verdict(found: dict[str, Tensor], rival: str, row: int, measure: str) -> str:
    """Whether adaptation is better than a rival, by Student's t of the paired differences (95 %)."""
    return claims.verdict(margins(found, measure, rival)[row])


def print_tables(title: str, found: dict[str, Tensor], shots: list[int]) -> None:
    """Mean ± standard error over seeds, a column for each number of shots.

    A rival that is significantly better than adaptation has a +, one that is worse a −.
    """
    marks = {"better": "−", "worse": "+", "undecided": " "}
    for index, measure in enumerate(MEASURES):
        print(f"\n{title}, {measure}, by shots of each class")
        print(f"{'':<24}" + "".join(f"{count:>17}" for count in shots))
        for name, values in found.items():
            part = values[:, :, index]
            error = part.std(1) / part.shape[1] ** 0.5
            words = [verdict(found, name, row, measure) for row in range(len(shots))]
            cells = [
                f"{m:.3f} ± {e:.3f}{marks[word]}"
                for m, e, word in zip(part.mean(1), error, words, strict=True)
            ]
            print(f"{name:<24}" + "".join(f"{cell:>17}" for cell in cells))


def print_where_not_best(title: str, found: dict[str, Tensor], shots: list[int]) -> None:
    """The rivals that are significantly better than adaptation, and where."""
    for measure in ("accuracy", "NLL"):
        for rival in found:
            where = [n for r, n in enumerate(shots) if verdict(found, rival, r, measure) == "worse"]
            if where:
                counts = ", ".join(str(n) for n in where)
                print(f"{title}: not the best in {measure}: {rival} is better at {counts} shots")


def draw(results: dict[str, dict[str, Tensor]], shots: list[int], out: Path) -> None:
    """Scores and seconds over shots, a row for each task."""
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    size = (13.5, 3.0 * len(results) + 0.6)
    figure, axes = plt.subplots(len(results), 4, figsize=size, layout="constrained", squeeze=False)
    for row, (title, found) in enumerate(results.items()):
        for index, measure in enumerate(MEASURES):
            ax = axes[row, index]
            for name, values in found.items():
                part = values[:, :, index]
                error = part.std(1) / part.shape[1] ** 0.5 if part.shape[1] > 1 else None
                style = {"elinewidth": 0.8, "label": name, **STYLES[name]}
                ax.errorbar(shots, part.mean(1), error, marker="o", markersize=3, **style)
            ax.set(xscale="log", xlabel="shots of each class", title=f"{title}: {measure}")
            ax.set_xticks(shots, [str(count) for count in shots])
            ax.minorticks_off()
            if measure == "seconds":
                ax.set_yscale("log")
    handles = axes[0, 0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=6, frameon=False)
    studies.save(
        figure, out, f"maddox2021_few_shot{'_cifar' if 'CIFAR groups' in results else ''}.png"
    )


def agrees(title: str, found: dict[str, Tensor], quick: bool) -> bool:
    """Whether the claims of few_shot.toml hold for a task, over all shots."""
    pooled = lambda measure, rival: margins(found, measure, rival).mean(0)
    slowest = claims.at_most(
        f"{title}, seconds of adaptation",
        float(found[GP][..., 3].max()),
        claims.stated(__file__)["seconds"],
    )
    return claims.judge([*claims.claims_of(__file__, title, pooled, quick=quick), slowest])


def main(arguments: list[str] | None = None) -> int:
    """Print the tables, write the figure; 0 if all claims came out as stated."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder for the figure")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["KMNIST", "notMNIST"])
    parser.add_argument("--shots", nargs="+", type=int, choices=SHOTS, default=SHOTS)
    parser.add_argument("--seeds", type=int, default=5, help="choices of images")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--test", type=int, default=1000, help="test images")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="5 and 20 shots, 3 choices, 300 test")
    options = findings.parse(parser, arguments)
    if options.quick:
        options.shots, options.seeds, options.test = [5, 20], 3, 300
    if options.seeds < 3:
        parser.error("--seeds must be at least 3: claims are judged by their spread")
    results = {}
    for name in options.tasks:
        results[name] = run_task(TASKS[name](), options)
        print_tables(name, results[name], options.shots)
    print()
    for name, found in results.items():
        print_where_not_best(name, found, options.shots)
    draw(results, options.shots, options.out)
    good = [agrees(name, found, options.quick) for name, found in results.items()]
    return 0 if all(good) else 1


if __name__ == "__main__":
    raise SystemExit(main())
