"""How a network and its posterior follow moved images: noise, shifts, and adversarial steps.

    NET2GP_DATA=... python papers/decks/stability.py --out figures [--quick]

Images of MNIST's test half are moved by a distance (Euclidean, of all pixels): by noise, toward the image
that is shifted by two pixels, and by one or ten steps against the predicted class along the gradient of the
posterior's mean, which after `laplace` is the network itself. Shown are the change of the logits, the
variance, the novelty, and how sure network and posterior become of another class. The fifth panel has a
regression on the network's tangent kernel, whose change has a bound: norm of the function times distance in
the kernel's space (Bietti et al. 2019).
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

import net2gp as n2g
from net2gp import data, metrics, plots
from net2gp.errors import Net2GPWarning
from net2gp.explain import (
    FastGradient,
    Perturbation,
    ProjectedGradient,
    RandomNoise,
    Stability,
    Toward,
    change_bound,
    kernel_distance,
    stability,
)

sys.path.append(str(Path(__file__).parents[1]))
from claims import Claim, at_most
from pages import Study, Topic, at_least, panels, run, tidy

DISTANCES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0]
PGD = "ten steps"


def images(split: str, count: int) -> tuple[Tensor, Tensor]:
    """Some random digits."""
    x, y = data.mnist(split)
    chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:count]
    return x[chosen], y[chosen]


def moved(posterior: n2g.Posterior, x: Tensor, y: Tensor) -> dict[str, Stability]:
    """The posterior at moved images, by the way in which they were moved."""
    ways: dict[str, Perturbation] = {
        "noise": RandomNoise(),
        "shift by 2 pixels": Toward(points=x.roll(2, -1)),
        "one step": FastGradient(),
        PGD: ProjectedGradient(),
    }
    return {n: stability(posterior, x, DISTANCES, perturbation=w, y=y) for n, w in ways.items()}


def loss(network: nn.Module, at: Tensor, y: Tensor) -> float:
    """The cross entropy of the network with the classes that it predicted for the images themselves."""
    with torch.no_grad():
        return float(nn.functional.cross_entropy(network(at), y))


def surety(posterior: n2g.Posterior, found: Stability, y: Tensor) -> tuple[Tensor, Tensor]:
    """The NLL of the first prediction under the network and the posterior, by distance: (S,) each."""
    network = posterior.linearized.network
    with torch.no_grad():
        own = [loss(network, at, y) for at in found.points]
        law = [float(metrics.nll(posterior.predict(at), y)) for at in found.points]
    return torch.tensor(own), torch.tensor(law)


def regression(network: nn.Module, count: int) -> n2g.Posterior:
    """One-hot codes regressed on the tangent kernel of all parameters, with a mean of zero."""
    x, y = images("train", count)
    kernel = n2g.linearize(network).kernel(1e-3)
    return n2g.condition(kernel, (x, nn.functional.one_hot(y, 10).float()), n2g.Gaussian(0.01))


def images_moved(quick: bool) -> Study:
    """LeNet-5 and its posterior under noise, shifts and adversaries; bounds from the kernel."""
    network = data.pretrained("full_mnist_lenet_adaml2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Net2GPWarning)  # MNIST's network was trained on all images
        posterior = n2g.laplace(network, images("train", 500 if quick else 3000), n2g.Categorical())
    x, _ = images("test", 60 if quick else 300)
    y = network(x).detach().argmax(1)
    found = moved(posterior, x, y)
    figure, axes = panels(5)
    titles = {"change": "change of logits", "variance": "variance", "novelty": "novelty"}
    for ax, (field, title) in zip(axes, titles.items(), strict=False):
        values = {name: getattr(one, field) for name, one in found.items()}
        plots.plot_stability(ax, found[PGD].distances, values, label=title)
    axes[1].set_yscale("log")
    own, law = surety(posterior, found[PGD], y)
    for value, name, color in ((own, "network", plots.FAINT), (law, "posterior", plots.COLORS[0])):
        axes[3].plot(DISTANCES, value, color=color, label=name)
    axes[3].set(xlabel="distance", title="NLL of the first prediction, ten steps")
    axes[3].legend(frameon=False)
    tidy(axes[3])
    claims = list(claims_of(posterior, network, x, y, found))
    claims += bounded(axes[4], network, x[: 20 if quick else 60], 60 if quick else 150)
    wrong = [network(one.points[-1]).argmax(1).ne(y).float().mean() for one in found.values()]
    table = "\n".join(
        f"{name:<20} at distance {DISTANCES[-1]:g}: change {one.change[-1].median():.2f}, novelty "
        f"{one.novelty[0].median():.3f} → {one.novelty[-1].median():.3f}, other class {float(share):.2f}"
        for (name, one), share in zip(found.items(), wrong, strict=True)
    )
    return Study(
        "stability",
        "How predictions follow moved inputs",
        "Steps along the gradient change a LeNet's logits many times as much as noise of the same length, "
        "which changes neither class nor novelty. The default `laplace` posterior finds adversarial images "
        "more novel, though by no means all of them, and is less sure than the network of what it says about "
        "them. What a function in the space of a kernel can change is bounded by its norm times the distance "
        "of the features. The bound holds, and is loose.",
        figure,
        tuple(claims),
        table,
    )


def claims_of(
    posterior: n2g.Posterior,
    network: nn.Module,
    x: Tensor,
    y: Tensor,
    found: dict[str, Stability],
) -> list[Claim]:
    """What is said of LeNet-5 and of its posterior at distance 2, and of all distances."""
    middle = DISTANCES.index(2.0)
    losses = {name: loss(network, one.points[middle], y) for name, one in found.items()}
    own, law = surety(posterior, found[PGD], y)
    at = found[PGD].points[middle]
    change = (posterior.marginal(at).stddev - posterior.marginal(x).stddev).abs().double()
    bound = kernel_distance(posterior.kernel, x, at)
    novelty = {name: one.novelty[middle] for name, one in found.items()}
    apart = metrics.auroc(found[PGD].novelty[0], novelty[PGD])
    return [
        at_least("ten steps over one step, cross entropy", losses[PGD] / losses["one step"], 1.0),
        at_least("one step over noise, cross entropy", losses["one step"] / losses["noise"], 10.0),
        at_least("network over posterior, NLL, ten steps", float(own[middle] / law[middle]), 1.0),
        at_least("AUROC of novelty, images after ten steps", float(apart), 0.6),
        at_most(
            "share of images with noise in another class",
            float(network(found["noise"].points[middle]).argmax(1).ne(y).float().mean()),
            0.02,
        ),
        at_most("change of σ over its bound, largest", float((change / bound).max()), 1.0),
    ]


def bounded(ax, network: nn.Module, x: Tensor, count: int) -> list[Claim]:
    """Draw what a regression changes against its bound; that the bound holds."""
    posterior = regression(network, count)
    found = stability(posterior, x, DISTANCES[1:])
    bounds = torch.stack([change_bound(posterior, x, at).norm(dim=1) for at in found.points])
    values = {"measured, ten steps": found.change, "bound": bounds}
    plots.plot_stability(ax, found.distances, values, label="change of the regression")
    ax.set_yscale("log")
    return [
        at_most("change over its bound, largest", float((found.change / bounds).max()), 1.0),
        at_least("change over its bound, largest", float((found.change / bounds).max()), 0.01),
    ]


TOPICS: list[Topic] = [images_moved]


if __name__ == "__main__":
    raise SystemExit(run(TOPICS, __doc__, "decks"))
