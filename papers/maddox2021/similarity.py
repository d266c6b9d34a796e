"""Do similar tasks have similar Jacobians? LeNets of MNIST, KMNIST and Fashion-MNIST, compared.

    python papers/maddox2021/similarity.py --out figures [--quick]

Trains LeNet-5 on each task by itself and compares the networks by the cosine between the diagonals of their
JᵀJ, and of their Fisher information: networks that started from the same weights and from others, on each
task's own images and on images of all tasks, before and after training. Prints the similarities of MNIST to
KMNIST and to Fashion-MNIST with standard errors over seeds, says where the first is larger, as the source has
it, and judges the claims of similarity.toml; draws the matrices. Needs mnist.npz, kmnist_test.npz and
fashion_mnist.npz in NET2GP_DATA.

Maddox, Tang, Moreno, Wilson & Damianou (2021), "Fast adaptation with linearized neural networks", whose
figure has separately trained LeNets; Achille et al. (2019), "Task2Vec".
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import net2gp as n2g
from net2gp import data, metrics
from net2gp.data import LeNet5
from net2gp.plots import plot_similarities

sys.path.append(str(Path(__file__).parents[1]))
import claims
import findings
from studies import save

READERS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "MNIST": lambda: data.mnist("test"),
    "KMNIST": data.kmnist_test,
    "Fashion": lambda: data.fashion_mnist("test"),
}
TRAINING = 8000
"""Images of each task: all have the 10,000 of a test half, which is all there is of KMNIST."""

MEASURES = ("Jacobian", "Jacobian of weights", "Fisher", "Fisher of filters")
"""Of weights: without the biases, of which those of the outputs have the largest gradients at the start."""

Embeddings = dict[str, list[n2g.tasks.TaskEmbedding]]
"""One for each seed, by task."""


@dataclass(frozen=True)
class Options:
    """How long is trained, on what, and where."""

    seeds: int = 5
    steps: int = 500
    images: int = 200
    device: str = "cpu"
    batch: int = 64
    learning_rate: float = 3e-3


@dataclass(frozen=True, eq=False)
class Task:
    """Images to train on, and others to test and compare at."""

    train: tuple[Tensor, Tensor]
    held_out: tuple[Tensor, Tensor]

    @staticmethod
    def read(name: str, device: str) -> Task:
        """From NET2GP_DATA, in an order drawn once: the files are partly sorted by writer."""
        x, y = (value.to(device) for value in READERS[name]())
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).to(device)
        first, rest = order[:TRAINING], order[TRAINING:]
        return Task((x[first], y[first]), (x[rest], y[rest]))


def untrained(seed: int, device: str) -> nn.Module:
    """LeNet-5 as torch initializes it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LeNet5().to(device).eval()


def trained(task: Task, seed: int, options: Options) -> nn.Module:
    """The network of that seed after `steps` of Adam on the task."""
    network = untrained(seed, options.device).train()
    optimizer = torch.optim.Adam(network.parameters(), lr=options.learning_rate)
    generator = torch.Generator().manual_seed(seed)
    x, y = task.train
    for _ in range(options.steps):
        index = torch.randint(len(x), (options.batch,), generator=generator).to(x.device)
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x[index]), y[index]).backward()
        optimizer.step()
    return network.eval().requires_grad_(False)


def embed(network: nn.Module, x: Tensor) -> dict[str, n2g.tasks.TaskEmbedding]:
    """The diagonals of JᵀJ and of the Fisher information, of parameters and of filters, by measure."""
    jacobian = n2g.tasks.task_embedding(network, x, n2g.Gaussian(1.0))
    fisher = n2g.tasks.task_embedding(network, x, n2g.Categorical())
    parts = {name: part for name, part in jacobian.parts.items() if not name.endswith("bias")}
    found = (jacobian, n2g.tasks.TaskEmbedding(parts), fisher, fisher.pooled(n2g.tasks.PerFilter()))
    return dict(zip(MEASURES, found, strict=True))


def alike(one: n2g.tasks.TaskEmbedding, other: n2g.tasks.TaskEmbedding, measure: str) -> float:
    """The cosine; of filters that of the reference, which weighs all of them alike."""
    return 1 - float(n2g.tasks.task_distance(one, other, balanced=measure == "Fisher of filters"))


@dataclass(frozen=True, eq=False)
class Comparison:
    """Similarities (S, T, T) of the tasks under one measure, in one setting, for S seeds."""

    measure: str
    networks: str  # trained or untrained
    images: str  # own or common
    start: str  # same or other
    values: Tensor

    @staticmethod
    def of(embeddings: Embeddings, setting: tuple[str, str, str, str]) -> Comparison:
        """Seed s against seed s, or against the next one: no network is in two pairs of the same tasks."""
        measure, _, _, start = setting
        shift = 0 if start == "same" else 1
        found = list(embeddings.values())
        count = len(found[0])
        values = [
            [[alike(a[s], b[(s + shift) % count], measure) for b in found] for a in found]
            for s in range(count)
        ]
        return Comparison(*setting, torch.tensor(values, dtype=torch.float64))

    @property
    def words(self) -> str:
        """The setting."""
        return f"{self.measure}, {self.networks}, {self.images} images, {self.start} start"

    def pair(self, name: str) -> Tensor:
        """MNIST against another task: (S,)."""
        return self.values[:, 0, list(READERS).index(name)]

    @property
    def margin(self) -> Tensor:
        """By how much MNIST is more like KMNIST than like Fashion-MNIST: (S,)."""
        return self.pair("KMNIST") - self.pair("Fashion")


def compare(tasks: dict[str, Task], options: Options) -> list[Comparison]:
    """All settings, seeds and measures."""
    seeds = range(options.seeds)
    own = {name: task.held_out[0][: options.images] for name, task in tasks.items()}
    mixed = torch.cat([x[: options.images // len(own)] for x in own.values()])
    common = dict.fromkeys(tasks, mixed)
    start = [untrained(seed, options.device) for seed in seeds]
    before = dict.fromkeys(tasks, start)
    after = {name: [trained(tasks[name], seed, options) for seed in seeds] for name in tasks}
    for name, networks in after.items():
        x, y = tasks[name].held_out
        right = [float(metrics.accuracy(net(x).softmax(-1), y)) for net in networks]
        print(f"{name}: accuracy {min(right):.3f} to {max(right):.3f} on {len(x)} other images")
    found = []
    for kind, networks in (("trained", after), ("untrained", before)):
        for images in ("own", "common"):
            embeddings = embed_all(networks, own if images == "own" else common)
            for measure in MEASURES:
                parts = {name: [e[measure] for e in each] for name, each in embeddings.items()}
                settings = [(measure, kind, images, start) for start in ("same", "other")]
                found += [Comparison.of(parts, setting) for setting in settings]
    return sorted(found, key=lambda one: MEASURES.index(one.measure))


def embed_all(
    networks: dict[str, list[nn.Module]], x: dict[str, Tensor]
) -> dict[str, list[dict[str, n2g.tasks.TaskEmbedding]]]:
    """The embeddings of every network of every task; those that tasks share are computed once."""
    found: dict[tuple[int, int], dict[str, n2g.tasks.TaskEmbedding]] = {}
    for name, each in networks.items():
        for network in each:
            key = id(network), id(x[name])
            if key not in found:
                found[key] = embed(network, x[name])
    return {name: [found[id(n), id(x[name])] for n in each] for name, each in networks.items()}


def mean_and_error(values: Tensor) -> tuple[float, float]:
    """Of the seeds."""
    return float(values.mean()), float(values.std() / len(values) ** 0.5)


def verdict(margin: Tensor) -> str:
    """Whether the margin is positive, negative, or neither, by Student's t test over the seeds."""
    if abs(float(margin.mean())) <= 1e-3:
        return "undecided"
    return {"better": "holds", "worse": "reversed"}.get(claims.verdict(margin), "undecided")


def print_comparisons(comparisons: list[Comparison]) -> None:
    """A line for each setting: similarities, margin and verdict."""
    print(f"\n{'':<60}{'to KMNIST':>14}{'to Fashion':>16}{'margin':>16}  KMNIST closer")
    for one in comparisons:
        cells = [mean_and_error(v) for v in (one.pair("KMNIST"), one.pair("Fashion"), one.margin)]
        line = "".join(f"{mean:>8.3f} ± {error:.3f}" for mean, error in cells)
        print(f"{one.words:<60}{line}  {verdict(one.margin)}")


def agrees(comparisons: list[Comparison], quick: bool) -> bool:
    """Whether the claims of similarity.toml hold."""
    found = {one.words: one for one in comparisons}
    numbers = claims.stated(__file__)
    return claims.judge(
        claims.compared(
            f"{words}: KMNIST beside Fashion",
            found[words].margin,
            word,
            exception=numbers["exception"].get(words, ""),
            quick=quick,
        )
        for words, word in numbers["claim"].items()
    )


def draw(comparisons: list[Comparison], measure: str) -> Figure:
    """The mean matrices of a measure, by start (rows) and by networks and images (columns)."""
    columns = [("trained", "own"), ("trained", "common"), ("untrained", "own")]
    plt.rcParams.update({"font.size": 8})
    figure, axes = plt.subplots(2, 3, figsize=(10.5, 6.4), layout="constrained")
    for line, start in zip(axes, ("same", "other"), strict=True):
        for ax, (kind, images) in zip(line, columns, strict=True):
            words = f"{measure}, {kind}, {images} images, {start} start"
            (one,) = [c for c in comparisons if c.words == words]
            plot_similarities(ax, one.values.mean(0), list(READERS))
            weights = f"{'the same' if start == 'same' else 'another'} start"
            ax.set_title(f"{kind}, {weights},\n{images} images", fontsize=8)
    name = measure.replace("Jacobian", "JᵀJ").replace("Fisher", "the Fisher information")
    figure.suptitle(f"cosine similarity of diagonals of {name}")
    return figure


def main(arguments: list[str] | None = None) -> int:
    """Print the tables, write the figures; 0 if all claims came out as stated."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder for the figures")
    parser.add_argument("--seeds", type=int, default=5, help="networks of each task, at least 3")
    parser.add_argument("--steps", type=int, default=500, help="steps of Adam on 64 images each")
    parser.add_argument("--images", type=int, default=200, help="images to compare networks at")
    parser.add_argument("--device", default="cpu", help="where to train and compare, e.g. cuda")
    parser.add_argument("--quick", action="store_true", help="3 seeds, 100 images")
    options = findings.parse(parser, arguments)
    if options.seeds < 3:
        parser.error("--seeds must be at least 3: standard errors are over them")
    setting = Options(options.seeds, options.steps, options.images, options.device)
    if options.quick:
        setting = Options(seeds=3, steps=300, images=60, device=options.device)
    tasks = {name: Task.read(name, setting.device) for name in READERS}
    comparisons = compare(tasks, setting)
    print_comparisons(comparisons)
    for measure in MEASURES:
        name = measure.lower().replace(" ", "_")
        save(draw(comparisons, measure), options.out, f"maddox2021_similarity_{name}.png")
    return 0 if agrees(comparisons, options.quick) else 1


if __name__ == "__main__":
    raise SystemExit(main())
