"""A few labeled images of each new class: closed-form adaptation of a trained network beside fine-tuning.

    NET2GP_DATA=... python papers/maddox2021/few_shot.py --out figures
    NET2GP_DATA=... python papers/maddox2021/few_shot.py --out figures --tasks "CIFAR groups" --device cuda

A LeNet-5 that was trained on digits learns Kuzushiji characters (KMNIST) and letters (notMNIST); a ResNet-20
that was trained on the ten classes of CIFAR-10 learns to tell four groups of them apart. Adaptation is
Gaussian process classification with the trained network's tangent kernel, averaged over its outputs so that
the new classes may be any number, and its scale by the evidence; nothing of the network is trained. Controls
are the same with an untrained network and with the last layer alone. Wall seconds are those of learning, not
of prediction.

Maddox et al. (2021), "Fast adaptation with linearized neural networks".
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import net2gp as n2g
from net2gp import data, metrics
from net2gp.plots import COLORS

sys.path.append(str(Path(__file__).parents[1]))
import studies

SHOTS = [1, 2, 5, 10, 20, 50]
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


TASKS = {
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


def gaussian_process(kernel: object, x: Tensor, y: Tensor) -> Predict:
    """Classification with a kernel, its scale by the evidence."""

    def build(scale: float) -> object:
        return n2g.condition(kernel.scaled(scale), (x, y), n2g.Categorical())  # type: ignore[attr-defined]

    # a prior variance of f of about ten, to begin with
    start = 10.0 / float(kernel.diag(x).mean())  # type: ignore[operator]
    posterior = n2g.tune(build, scale=start)
    return lambda points: torch.cat([posterior.predict(part).probs for part in points.split(500)])


def process_of_network(task: Task, x: Tensor, y: Tensor) -> Predict:
    """All parameters of the trained network."""
    return gaussian_process(n2g.linearize(task.network).trace_kernel(), x, y)


def process_of_untrained(task: Task, x: Tensor, y: Tensor) -> Predict:
    """All parameters of the network before its training."""
    return gaussian_process(n2g.linearize(untrained(task.network)).trace_kernel(), x, y)


def process_of_last_layer(task: Task, x: Tensor, y: Tensor) -> Predict:
    """The inputs of the last layer as features."""
    linearized = n2g.linearize(task.network, only=f"{task.last}.*")
    return gaussian_process(linearized.trace_kernel(), x, y)


def process_of_pixels(task: Task, x: Tensor, y: Tensor) -> Predict:
    """A squared-exponential kernel of the pixels, its length the median distance."""
    flat = x.flatten(1)
    length = float(torch.pdist(flat).median())
    predict = gaussian_process(n2g.RBF(lengthscale=length), flat, y)
    return lambda points: predict(points.flatten(1))


def fine_tuned(task: Task, x: Tensor, y: Tensor, *, only_last: bool) -> Predict:
    """A new last layer, trained alone or with all others: 200 steps of Adam, with weight decay."""
    network = deepcopy(task.network)
    parent, _, name = task.last.rpartition(".")
    old = network.get_submodule(task.last)
    assert isinstance(old, nn.Linear)
    new = nn.Linear(old.in_features, task.num_classes).to(x.device)
    setattr(network.get_submodule(parent) if parent else network, name, new)
    params = new.parameters() if only_last else network.parameters()
    optimizer = torch.optim.Adam(params, lr=1e-2 if only_last else 1e-3, weight_decay=1e-3)
    for _ in range(200):
        optimizer.zero_grad()
        cross_entropy(network(x), y).backward()
        optimizer.step()

    @torch.no_grad()
    def predict(points: Tensor) -> Tensor:
        return torch.cat([network(part) for part in points.split(500)]).softmax(-1)

    return predict


METHODS: dict[str, Callable[[Task, Tensor, Tensor], Predict]] = {
    "GP, trained network": process_of_network,
    "GP, untrained network": process_of_untrained,
    "GP, last layer": process_of_last_layer,
    "GP, pixels": process_of_pixels,
    "fine-tuned, all": lambda task, x, y: fine_tuned(task, x, y, only_last=False),
    "fine-tuned, last layer": lambda task, x, y: fine_tuned(task, x, y, only_last=True),
}


def scores(predict: Predict, x: Tensor, y: Tensor) -> list[float]:
    """Accuracy, negative log likelihood, calibration error."""
    with torch.no_grad():
        probs = predict(x).double().cpu()
    y = y.cpu()
    nll = -probs[torch.arange(len(y)), y].clamp(min=1e-300).log().mean()
    calibration = metrics.expected_calibration_error(probs, y)
    return [float(metrics.accuracy(probs, y)), float(nll), float(calibration)]


def choose(y: Tensor, shots: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """So many points of each class, and all others."""
    order = torch.randperm(len(y), generator=generator)
    few = torch.cat([order[y[order] == c][:shots] for c in y.unique()])
    rest = torch.ones(len(y), dtype=torch.bool)
    rest[few] = False
    return few, order[rest[order]]


def run_task(task: Task, options: argparse.Namespace) -> dict[str, Tensor]:
    """Scores and seconds of each method: (shots, seeds, 4)."""
    found: dict[str, list[list[list[float]]]] = {name: [] for name in METHODS}
    for shots in options.shots:
        rows: dict[str, list[list[float]]] = {name: [] for name in METHODS}
        for seed in range(options.seeds):
            torch.manual_seed(seed)
            few, rest = choose(task.y, shots, torch.Generator().manual_seed(1000 * shots + seed))
            train = [t[few].to(options.device) for t in (task.x, task.y)]
            test = [t[rest[: options.test]].to(options.device) for t in (task.x, task.y)]
            for name, method in METHODS.items():
                started = time.perf_counter()
                predict = method(task, *train)
                seconds = time.perf_counter() - started
                rows[name].append([*scores(predict, *test), seconds])
        for name in METHODS:
            found[name].append(rows[name])
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in found.items()}


def print_tables(title: str, found: dict[str, Tensor], shots: list[int]) -> None:
    """Mean ± standard error over seeds, a column for each number of shots."""
    for index, what in enumerate(("accuracy", "NLL", "ECE", "seconds")):
        print(f"\n{title}, {what}, by shots of each class")
        print(f"{'':<26}" + "".join(f"{count:>18}" for count in shots))
        for name, values in found.items():
            part = values[:, :, index]
            error = part.std(1) / part.shape[1] ** 0.5
            cells = [f"{m:.3f} ± {e:.3f}" for m, e in zip(part.mean(1), error, strict=True)]
            print(f"{name:<26}" + "".join(f"{cell:>18}" for cell in cells))


def draw(results: dict[str, dict[str, Tensor]], shots: list[int], out: Path) -> None:
    """Accuracy, NLL and seconds over shots, a row for each task."""
    figure, axes = studies.panels(3 * len(results), height=3.2)
    for row, (title, found) in enumerate(results.items()):
        for column, (index, what) in enumerate(((0, "accuracy"), (1, "NLL"), (3, "seconds"))):
            ax = axes[3 * row + column]
            for (name, values), color in zip(found.items(), COLORS, strict=False):
                part = values[:, :, index]
                ax.errorbar(
                    shots,
                    part.mean(1),
                    part.std(1) / part.shape[1] ** 0.5,
                    fmt="o-",
                    markersize=3,
                    color=color,
                    label=name,
                )
            ax.set(xscale="log", xlabel="shots of each class", title=f"{title}: {what}")
            ax.set_xticks(shots, [str(count) for count in shots])
            if what == "seconds":
                ax.set_yscale("log")
    axes[0].legend(frameon=False, fontsize=6)
    studies.save(figure, out, "maddox2021_few_shot.png")


def main(arguments: list[str] | None = None) -> int:
    """Print the tables, write the figure; 0 if adaptation beats the untrained network and takes seconds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder for the figure")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["KMNIST", "notMNIST"])
    parser.add_argument("--shots", nargs="+", type=int, default=SHOTS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--test", type=int, default=2000, help="test images")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    # a vanishing scale is a prediction of equal chances, which one shot may ask for
    warnings.simplefilter("ignore", n2g.errors.NotConverged)
    results = {}
    for name in options.tasks:
        task = TASKS[name]()
        task.network.to(options.device)
        results[name] = run_task(task, options)
        print_tables(name, results[name], options.shots)
    draw(results, options.shots, options.out)
    good = True
    for name, found in results.items():
        ours, control = (found[f"GP, {kind} network"] for kind in ("trained", "untrained"))
        better = bool((ours[..., 0].mean(1) > control[..., 0].mean(1)).all())
        slowest = float(ours[..., 3].max())
        print(f"{name}: trained kernel better than untrained {better}, slowest {slowest:.1f} s")
        good = good and better and slowest < 60
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
