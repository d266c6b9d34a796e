"""The scenes of the demo about digits: calibration, detection of foreign images, and the kernel itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import net2gp as n2g
from net2gp import data, metrics, plots
from net2gp.report.page import Figure, Section, Table
from net2gp.report.tools import Stopwatch, canvas, mlp, shown, train

Pair = tuple[Tensor, Tensor]
STRANGERS = ("rotated by 90°", "noise")


def scene() -> list[Section]:
    """Show a network trained on a hundred digits, the process around it, and what each of them knows."""
    watch = Stopwatch()
    known = _per_class(*data.digits("train"), 0, 10)
    held_out = _per_class(*data.digits("train"), 10, 30)
    test = data.digits("test")
    before = nn.Sequential(nn.Flatten(), mlp(64, 64, 10)).eval().requires_grad_(False)
    network = nn.Sequential(nn.Flatten(), mlp(64, 64, 10))
    network.load_state_dict(before.state_dict())
    with watch("training the network"):
        train(network, known, nn.functional.cross_entropy, steps=500).requires_grad_(False)
    with watch("these lines"):
        posterior = _calibrated(network, known, held_out)
    with watch("predicting 445 digits"):
        probs = {
            "GP around the network": posterior.predict(test[0]).probs,
            "network": network(test[0]).softmax(-1),
        }
    return [
        _calibration(probs, test[1], posterior, watch),
        _detection(network, posterior, known, test[0]),
        _kernel(before, network, held_out),
    ]


def _per_class(x: Tensor, y: Tensor, start: int, stop: int) -> Pair:
    """Select the digits with numbers start to stop − 1 of every class, sorted by class."""
    rows = torch.cat([(y == label).nonzero()[start:stop, 0] for label in range(10)])
    return x[rows], y[rows]


def _calibrated(network: nn.Module, known: Pair, held_out: Pair) -> Any:
    variances = (0.01, 0.03, 0.1, 0.3)
    tried = [n2g.adapt(network, known, n2g.Categorical(), prior_var=v) for v in variances]
    posterior = min(tried, key=lambda p: metrics.nll(p.predict(held_out[0]), held_out[1]))
    return posterior


def _calibration(probs: dict[str, Tensor], y: Tensor, posterior: Any, watch: Stopwatch) -> Section:
    figure = canvas(4.6, 4.4)
    plots.plot_reliability(figure.subplots(), probs, y, num_bins=10)
    rows = []
    for name, values in probs.items():
        log_loss = metrics.nll(torch.distributions.Categorical(values), y)
        error = metrics.expected_calibration_error(values, y, num_bins=10)
        scores = (metrics.accuracy(values, y), log_loss, error, metrics.brier(values, y))
        rows.append((name, f"{scores[0]:.1%}", *(f"{score:.3f}" for score in scores[1:])))
    confidence = {name: float(values.max(-1).values.mean()) for name, values in probs.items()}
    variance = float(next(iter(posterior.kernel.prior_var.values())))
    text = f"""
        A tanh network (64–64–10) learned handwritten digits from only ten examples of each. On 445 test
        digits it claims to be {confidence["network"]:.0%} sure on average. Averaging over the process
        around it, without any further training, brings that to
        {confidence["GP around the network"]:.0%}; the table says how often each is right.

        On the diagonal of the diagram, confidence equals accuracy. Below it, predictions are overconfident.
        Larger dots stand for more digits. The prior variance ({variance:g}) is the one of four with the
        lowest loss on 200 held-out digits. Held-out data judge better than the evidence here, since the
        network was trained on the same data.
        """
    note = (
        "ECE: expected calibration error, ten bins. Lower is better for NLL, ECE and Brier score."
    )
    picture = Figure.draw("reliability", figure, "Accuracy against confidence, network and GP")
    return Section(
        "Classification: confidence that can be believed",
        text,
        (picture,),
        shown(_calibrated),
        Table(("", "accuracy", "NLL", "ECE", "Brier"), tuple(rows), note),
        watch.seconds,
    )


def _entropy(probs: Tensor) -> Tensor:
    return torch.distributions.Categorical(probs).entropy()


def _detector(network: nn.Module, known: Pair, x: Tensor) -> tuple[Any, Tensor]:
    posterior = n2g.adapt(network, known, n2g.Categorical(), zero_mean=True)
    f = posterior.marginal(x)  # of the ten logits: mean (N, 10) and covariance (N, 10, 10)
    score = f.variance.sum(-1)
    return posterior, score


def _detection(network: nn.Module, around: Any, known: Pair, x: Tensor) -> Section:
    watch = Stopwatch()
    strangers = {
        STRANGERS[0]: torch.rot90(x, 1, (2, 3)),
        STRANGERS[1]: torch.rand(x.shape, generator=torch.Generator().manual_seed(0)),
    }
    with watch("these lines"):
        posterior, _ = _detector(network, known, x)
    with watch("scoring everything"):
        values = _scores(network, around, posterior, {"test digits": x, **strangers})
    rows = []
    for name, found in values.items():
        areas = [metrics.auroc(found["test digits"], found[kind]) for kind in STRANGERS]
        rows.append((name, *(f"{area:.3f}" for area in areas)))
    text = f"""
        What does each of them say about images that are not upright digits: test digits turned by 90° and
        uniform noise? The entropy of a network only compares the ten classes. A process also has a variance
        of f itself, which grows away from the data. Here the network provides only the kernel
        (`zero_mean=True`), so the evidence determines the prior variance.

        The table has the area under the ROC curve: the probability that such an image gets a higher score
        than a test digit, where 1 is perfect and 0.5 is chance. There is a price: with zero mean, the
        probabilities themselves are far too cautious
        (NLL {metrics.nll(posterior.predict(x), data.digits("test")[1]):.2f}, accuracy
        {metrics.accuracy(posterior.predict(x).probs, data.digits("test")[1]):.1%}). Use this process to
        detect and the one above to predict.
        """
    return Section(
        "Strangers: images unlike the training data",
        text,
        (_histograms(values),),
        shown(_detector),
        Table(("score", *STRANGERS), tuple(rows)),
        watch.seconds,
    )


def _scores(
    network: nn.Module, around: Any, kernel_only: Any, images: dict[str, Tensor]
) -> dict[str, dict[str, Tensor]]:
    """Compute each kind of score for each kind of image."""
    values: dict[str, dict[str, Tensor]] = {}
    for kind, z in images.items():
        f = kernel_only.marginal(z)
        found = {
            "network: entropy": _entropy(network(z).softmax(-1)),
            "GP around the network: entropy": _entropy(around.predict(z).probs),
            "GP with zero mean: entropy": _entropy(kernel_only.likelihood.predict(f).probs),
            "GP with zero mean: variance of f": f.variance.sum(-1),
        }
        for name, score in found.items():
            values.setdefault(name, {})[kind] = score
    return values


def _histograms(values: dict[str, dict[str, Tensor]]) -> Figure:
    figure = canvas(9, 3.4)
    left, right = figure.subplots(1, 2)
    panels = {
        left: ("network: entropy", "entropy of the network's probabilities (nats)"),
        right: (
            "GP with zero mean: variance of f",
            "variance of f under the GP, summed over logits",
        ),
    }
    for ax, (name, label) in panels.items():
        edges = torch.linspace(0, float(torch.cat(list(values[name].values())).max()), 46)
        for color, (kind, numbers) in zip(plots.COLORS, values[name].items(), strict=False):
            ax.hist(numbers.numpy(), edges.numpy(), color=color, alpha=0.55, label=kind)
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_xlabel(label)
        ax.set_ylabel("images")
    left.legend(frameon=False)
    return Figure.draw("strangers", figure, "Histograms of scores for digits and for strangers")


def _similarity(network: nn.Module, x: Tensor) -> Tensor:
    K = n2g.linearize(network).trace_kernel()(x)  # averaged over the ten outputs
    scale = K.diagonal().sqrt()
    similarity = K / (scale[:, None] * scale)
    return similarity


def _kernel(before: nn.Module, after: nn.Module, held_out: Pair) -> Section:
    watch = Stopwatch()
    x, y = held_out
    with watch("these lines, twice"):
        similar = {"at initialization": _similarity(before, x), "trained": _similarity(after, x)}
    same = y[:, None] == y[None, :]
    own = torch.eye(len(y), dtype=torch.bool)
    figure = canvas(9, 4.3)
    rows = []
    for ax, (name, values) in zip(figure.subplots(1, 2), similar.items(), strict=True):
        plots.plot_kernel(ax, values)
        ax.images[0].set(cmap="cividis", clim=(0, 1))  # one scale for both
        ax.set_title(name, fontsize=11)
        ax.set_xticks(torch.arange(10) * 20 + 9.5, [str(label) for label in range(10)])
        ax.set_yticks(torch.arange(10) * 20 + 9.5, [str(label) for label in range(10)])
        ax.tick_params(length=0)
        pair = (values[same & ~own].mean(), values[~same].mean())
        rows.append((name, *(f"{value:.3f}" for value in (*pair, pair[0] - pair[1]))))
    text = """
        This is what the network has learned, as a covariance. Each entry says how much the outputs at two
        digits move together when parameters change (the tangent kernel J Jᵀ, scaled to a diagonal of one).
        The 200 digits are sorted by class, and none of them was used in training. Blocks on the diagonal
        mean that the network treats the digits of a class alike.
        """
    note = "Mean similarity of two different digits. The few values below zero are drawn as zero."
    picture = Figure.draw(
        "kernel", figure, "Heat maps of the tangent kernel before and after training"
    )
    return Section(
        "The kernel: what the network finds similar",
        text,
        (picture,),
        shown(_similarity),
        Table(("", "same class", "other classes", "difference"), tuple(rows), note),
        watch.seconds,
    )
