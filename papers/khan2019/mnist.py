"""Trained LeNets as Gaussian processes: means, kernels and uncertainty on MNIST.

    python papers/khan2019/mnist.py --out figures

Reads the authors' weights of LeNet-5, trained with Adam and with VOGN on all digits, and with VOGN on zeros
and ones alone. Prints beside the numbers of mnist.toml: accuracies, the tangent kernel within and between
classes, the posterior mean J θ* of the transformed data, epistemic and aleatoric variances, and the
entropies of digits that the network has never seen. Draws means and kernels sorted by class, and for some
test digits the training digits that the network finds most like them or that count most for them. Needs
mnist.npz and nets/ in NET2GP_DATA, and the weights for two classes in ../reference beside it.

Khan, Immer, Abedi & Korzepa (2019), "Approximate inference turns deep networks into Gaussian processes",
figures 3 to 5.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.distributions import Categorical

import net2gp as n2g
from net2gp import data, metrics
from net2gp.data import LeNet5, data_folder, pretrained
from net2gp.errors import NotStationary
from net2gp.explain import aggregate, nearest, removal_effects, similarity, split
from net2gp.plots import COLORS, INK, Picture, plot_class_kernel, plot_class_means, plot_gallery

sys.path.append(str(Path(__file__).parents[1]))
import findings
from studies import Row, save

ADAM, VOGN = "full_mnist_lenet_adaml2", "full_mnist_lenet_vogn"
BINARY = "2_class_mnist_zone_lenet_vogn"
TITLES = {ADAM: "LeNet-5, Adam", VOGN: "LeNet-5, VOGN", BINARY: "LeNet-5 of zeros and ones, VOGN"}
PER_CLASS = 30
LAPLACE_DIGITS = 2000
LAPLACE_PRIOR_VAR = 1e4
INFLUENCE_PRIOR_VAR = 1e-3
SHOWN = 5


@dataclass(frozen=True, eq=False)
class Digits:
    """Training and test digits, and the first 30 training digits of each class."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    some: tuple[Tensor, Tensor]

    @staticmethod
    def read() -> Digits:
        """From NET2GP_DATA."""
        (x, y), test = data.mnist("train"), data.mnist("test")
        index = torch.cat([(y == c).nonzero()[:PER_CLASS, 0] for c in range(10)])
        return Digits((x, y), test, (x[index], y[index]))


@dataclass(frozen=True, eq=False)
class View:
    """A network as a Gaussian process sees it at some digits."""

    name: str
    linearized: n2g.Linearized
    labels: Tensor
    mean: Tensor  # J θ*, (N, C)
    kernel: Tensor  # Σ_c J_c J_cᵀ, (N, N)
    similarity: Tensor

    @staticmethod
    def of(name: str, digits: Digits) -> View:
        """Of the 300 digits."""
        linearized = n2g.linearize(network(name))
        kernel, (x, labels) = linearized.kernel(), digits.some
        theta = linearized.flatten(linearized.params)[:, None]
        mean = kernel.apply(x, theta).reshape(len(x), -1)
        return View(name, linearized, labels, mean, aggregate(kernel, x), similarity(kernel, x))


def network(name: str) -> nn.Module:
    """LeNet-5 with the weights of that name."""
    if name != BINARY:
        return pretrained(name)
    module = LeNet5(num_classes=2)
    file = data_folder().parent / "reference" / f"dnn2gp_model_{name}.npz"
    module.load_state_dict(data.state_dict(file))
    return module.eval()


def expected() -> dict[str, Any]:
    """The numbers of mnist.toml."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def row(name: str, key: str, found: float, tolerance: str = "exact") -> Row:
    """A line of the table: what mnist.toml has for a network beside what was found."""
    numbers = expected()
    value = numbers[name][key]
    words = f"{TITLES[name]}: {key.replace('_', ' ')}"
    return Row(words, value, float(found), numbers["tolerance"][tolerance] * abs(value))


def print_rows(rows: list[Row]) -> bool:
    """Print the reference beside what was found; whether all agree."""
    print(f"{'':<52}{'reference':>12}{'found':>12}{'within':>10}")
    for one in rows:
        mark = "" if one.agrees else "  <-- differs"
        numbers = f"{one.expected:>12.5g}{one.found:>12.5g}{one.tolerance:>10.1g}"
        print(f"{one.name:<52}{numbers}{mark}")
    findings.add(one.entry for one in rows)
    return all(one.agrees for one in rows)


def accuracies(view: View, digits: Digits) -> list[Row]:
    """Accuracy and loss on the test digits."""
    x, y = digits.test
    law = Categorical(logits=view.linearized(x).double())
    return [
        row(view.name, "accuracy", metrics.accuracy(law.probs, y)),
        row(view.name, "nll", metrics.nll(law, y)),
    ]


def blocks(view: View) -> list[Row]:
    """The kernel within classes, each digit against the others, and between them."""
    same = view.labels[:, None] == view.labels
    within = same & ~torch.eye(len(same), dtype=torch.bool)
    rows = []
    for key, K in (("similarity", view.similarity), ("kernel", view.kernel)):
        rows.append(row(view.name, f"{key}_within", K.double()[within].mean()))
        rows.append(row(view.name, f"{key}_between", K.double()[~same].mean()))
    return rows


def means(view: View) -> Row:
    """How often the largest entry of J θ* is the class."""
    found = (view.mean.argmax(1) == view.labels).double().mean()
    return row(view.name, "mean_argmax_accuracy", found)


def uncertainty(view: View, digits: Digits) -> tuple[n2g.Posterior, list[Row]]:
    """Epistemic and aleatoric variance, summed over classes, under a diagonal Laplace approximation."""
    some = digits.train[0][:LAPLACE_DIGITS], digits.train[1][:LAPLACE_DIGITS]
    with warnings.catch_warnings():
        # the network was trained on thirty times as many digits
        warnings.simplefilter("ignore", NotStationary)
        posterior = n2g.laplace(
            view.linearized,
            some,
            n2g.Categorical(),
            prior_var=LAPLACE_PRIOR_VAR,
            structure=n2g.Diagonal(),
            tuning=n2g.tuning.Evidence(),  # no link that is matched to the network: as in the paper
        )
    assert isinstance(posterior, n2g.Posterior)
    parts = split(posterior, digits.some[0])
    return posterior, [
        row(view.name, "epistemic", parts.epistemic.double().sum(1).mean(), "variance"),
        row(view.name, "aleatoric", parts.aleatoric.double().sum(1).mean()),
    ]


def two_classes(view: View, digits: Digits) -> tuple[Tensor, list[Row]]:
    """Entropies (10,) by digit, and what a network of zeros and ones makes of the other digits."""
    x, y = digits.test
    law, seen = Categorical(logits=view.linearized(x).double()), y < 2
    entropy = law.entropy()
    by_digit = view.kernel.double().reshape(10, PER_CLASS, 10, PER_CLASS).mean((1, 3)).diagonal()
    found = {
        "accuracy": metrics.accuracy(law.probs[seen], y[seen]),
        "entropy_seen": entropy[seen].mean(),
        "entropy_unseen": entropy[~seen].mean(),
        "kernel_0": by_digit[0],
        "kernel_1": by_digit[1],
        "kernel_unseen_least": by_digit[2:].min(),
        "kernel_unseen_most": by_digit[2:].max(),
    }
    each = torch.stack([entropy[y == c].mean() for c in range(10)])
    return each, [row(view.name, key, value) for key, value in found.items()]


def draw_views(views: list[View]) -> Figure:
    """Posterior mean and kernel of each network, side by side."""
    plt.rcParams.update({"font.size": 8})
    figure, axes = plt.subplots(
        len(views),
        2,
        figsize=(7.2, 3.5 * len(views)),
        layout="constrained",
        squeeze=False,
        width_ratios=(1, 1.9),
    )
    for (left, right), view in zip(axes, views, strict=True):
        plot_class_means(left, view.mean, view.labels)
        left.set(title="posterior mean J θ*", xlabel="output", ylabel="digit")
        # few digits have gradients so large that they would take all of the colors
        limit = float(view.kernel.abs().quantile(0.995))
        plot_class_kernel(right, view.kernel, view.labels, limit=limit)
        right.set(title=f"{TITLES[view.name]}: kernel", xlabel="digit", ylabel="digit")
    return figure


def draw_two_classes(view: View, entropies: Tensor) -> Figure:
    """The same, and the entropy of each digit's prediction."""
    plt.rcParams.update({"font.size": 8})
    figure, axes = plt.subplots(
        1, 3, figsize=(10, 3.5), layout="constrained", width_ratios=(1, 2.1, 1.6)
    )
    plot_class_means(axes[0], view.mean, view.labels)
    axes[0].set(title="posterior mean J θ*", xlabel="output", ylabel="digit")
    plot_class_kernel(axes[1], view.kernel, view.labels)
    axes[1].set(title="kernel", xlabel="digit", ylabel="digit")
    colors = [COLORS[0]] * 2 + [COLORS[1]] * 8
    axes[2].bar(range(10), entropies.tolist(), color=colors)
    axes[2].set(title="mean entropy of test digits", xlabel="digit", xticks=range(10))
    axes[2].spines[["top", "right"]].set_visible(False)
    for height, words, color in ((0.95, "trained on", COLORS[0]), (0.88, "never seen", COLORS[1])):
        axes[2].text(0.02, height, words, color=color, transform=axes[2].transAxes)
    figure.suptitle(TITLES[view.name], fontsize=9, color=INK)
    return figure


def queries(view: View, digits: Digits) -> Tensor:
    """Test digits to explain: a sure one, the least sure one that is right, and the surest mistake."""
    x, y = digits.test
    probs = view.linearized(x).double().softmax(1)
    sure, guess = probs.max(1)
    right = guess == y
    least = torch.where(right, sure, 2.0).argmin()
    mistake = torch.where(right, -1.0, sure).argmax()
    return torch.stack([torch.where(right, sure, 0.0).argmax(), least, mistake])


def draw_neighbors(view: View, digits: Digits) -> Figure:
    """For some test digits the nearest of the 300 training digits, and those that count most for them."""
    index, (x_some, y_some) = queries(view, digits), digits.some
    x = digits.test[0][index]
    guess, truth = view.linearized(x).argmax(1), digits.test[1][index]
    near = nearest(view.linearized.kernel(), x, x_some, SHOWN)
    posterior = n2g.adapt(
        view.linearized, digits.some, n2g.Categorical(), prior_var=INFLUENCE_PRIOR_VAR
    )
    effects = -removal_effects(posterior, x)
    support = effects.gather(2, guess[:, None, None].expand(-1, len(x_some), 1))[..., 0]
    support = support - effects.mean(2)
    strongest = support.abs().topk(SHOWN, dim=1).indices
    gallery = []
    for m in range(len(x)):
        words = f"{int(truth[m])}, seen as {int(guess[m])}"
        pictures = [Picture(x[m], words, framed=True)]
        for n, value in zip(near.index[m], near.similarity[m], strict=True):
            pictures.append(Picture(x_some[n], f"{int(y_some[n])}:  {value:.2f}"))
        for n in strongest[m]:
            effect = f"{support[m, n]:+.2g}".replace("-", "−")
            pictures.append(Picture(x_some[n], f"{int(y_some[n])}:  {effect}"))
        gallery.append([pictures[0], None, *pictures[1 : 1 + SHOWN], None, *pictures[1 + SHOWN :]])
    figure = plt.figure(figsize=(10.5, 1.05 * len(gallery) + 0.4), layout="constrained")
    headings = [
        (0, "test digit"),
        (2, "most similar training digits, by the normalized kernel"),
        (3 + SHOWN, "training digits that count most, for (+) or against (−)"),
    ]
    return plot_gallery(figure, gallery, headings)


def main(arguments: list[str] | None = None) -> int:
    """Print the table, write the figures; the exit status says whether the numbers agree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder for the figures")
    options = findings.parse(parser, arguments, quick={})
    digits = Digits.read()
    adam, vogn, binary = (View.of(name, digits) for name in (ADAM, VOGN, BINARY))
    rows: list[Row] = []
    for view in (adam, vogn):
        rows += [*accuracies(view, digits), *blocks(view), means(view)]
    rows += uncertainty(adam, digits)[1]
    entropies, found = two_classes(binary, digits)
    rows += [*found, *blocks(binary)]
    save(draw_views([adam, vogn]), options.out, "khan2019_mnist.png")
    save(draw_two_classes(binary, entropies), options.out, "khan2019_two_classes.png")
    save(draw_neighbors(adam, digits), options.out, "khan2019_neighbors.png")
    return 0 if print_rows(rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
