"""Capacity and overfitting: test error over width, remedies, and Gaussian processes beside networks.

    python papers/lecture/capacity.py --out figures [--quick]

The test error of networks on digits over their width; training and test loss over the training of one
network on labels with errors, alone, with weight decay and with dropout; and the gap between training and
test error of the Gaussian processes of infinite width (NNGP and NTK) and of networks trained with weight
decay (MAP) and without (SGD), over width and depth.

Neyshabur et al. (2015), "In search of the real inductive bias"; Srivastava et al. (2014), "Dropout"; Lee et
al. (2018), "Deep neural networks as Gaussian processes".
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from common import (
    Images,
    Study,
    Training,
    at_least,
    at_most,
    cross_entropy,
    digits,
    error_rate,
    mlp,
    panels,
    run,
    squared_error,
    ticks_at,
    tidy,
)
from torch import Tensor, nn

import net2gp as n2g
from net2gp.plots import COLORS, FAINT, INK

Table = tuple[Tensor, Tensor]


def widths(quick: bool) -> Study:
    """Training and test error over the width of one hidden layer."""
    sizes = [2, 4, 8, 16, 32, 64, 128, 256] if quick else [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
    seeds = 3 if quick else 5
    train, test = digits("train", 300), digits("test")
    errors = torch.zeros(2, seeds, len(sizes), dtype=torch.float64)
    for place, width in enumerate(sizes):
        for seed in range(seeds):
            network = Training(200)(mlp(64, width, 10, seed=seed), train)
            errors[:, seed, place] = torch.tensor([error_rate(network, d) for d in (train, test)])
    mean = 100 * errors.mean(1)
    figure, (ax,) = panels(1, 3.4)
    figure.set_figwidth(6.5)
    for values, row, color, name in zip(
        mean, 100 * errors, COLORS[1::-1], ("training", "test"), strict=True
    ):
        ax.fill_between(
            sizes, row.min(0).values, row.max(0).values, color=color, alpha=0.2, linewidth=0
        )
        ax.plot(sizes, values, ".-", color=color, label=name)
    ax.axvline(300 / 75, color=FAINT, linewidth=1, linestyle=":")
    ax.text(
        300 / 75 * 1.08,
        float(mean[1].max()) * 0.9,
        "as many parameters\nas training digits",
        fontsize=8,
        color=INK,
    )
    ax.set(xscale="log", xlabel="width of the hidden layer", ylabel="error in %")
    tidy(ax)
    ticks_at(ax, sizes)
    ax.legend(frameon=False, labelcolor=INK)
    first_fit = int((mean[0] <= 0.1).nonzero()[0])
    return Study(
        "width",
        "Wider networks generalize better",
        f"""Networks with one hidden layer, trained on 300 digits without any regularization (means of
{seeds} starts; bands are their range). Once a network is wide enough to fit the training digits, more
units do not hurt: the test error keeps falling or stays, although there are up to {sizes[-1] // 4}
parameters per digit.""",
        figure,
        (
            at_most(
                "test error of the widest beside the first that fits",
                float(mean[1, -1] / mean[1, first_fit]),
                1.0,
            ),
            at_most("training error of the widest in %", float(mean[0, -1]), 0.1),
            at_most("widest beside narrowest, test error", float(mean[1, -1] / mean[1, 0]), 0.5),
        ),
    )


def with_dropout(seed: int, share: float) -> nn.Sequential:
    """The same network with dropout behind each hidden layer."""
    plain = mlp(64, 128, 128, 10, seed=seed)
    parts: list[nn.Module] = []
    for module in plain:
        parts.append(module)
        if isinstance(module, nn.ReLU):
            parts.append(nn.Dropout(share))
    return nn.Sequential(*parts)


def noisy_digits(count: int, share: float) -> Images:
    """Digits of which a share has a label drawn at random."""
    x, y = digits("train", count)
    generator = torch.Generator().manual_seed(1)
    wrong = torch.rand(count, generator=generator) < share
    return x, torch.where(wrong, torch.randint(10, (count,), generator=generator), y)


def overfitting(quick: bool) -> Study:
    """Training and test loss over the steps: alone, with weight decay, with dropout."""
    steps = 300 if quick else 600
    train, test = noisy_digits(400, 0.15), digits("test")
    ways: dict[str, tuple[nn.Module, float]] = {
        "nothing": (mlp(64, 128, 128, 10), 0.0),
        "weight decay": (mlp(64, 128, 128, 10), 1e-2),
        "dropout": (with_dropout(0, 0.6), 0.0),
    }
    found: dict[str, Tensor] = {}
    for name, (network, decay) in ways.items():
        losses: list[tuple[float, float]] = []

        def watch(step: int, net: nn.Module, losses: list = losses) -> None:
            if step % 10 == 0:
                with torch.no_grad():
                    losses.append(tuple(float(cross_entropy(net(x), y)) for x, y in (train, test)))

        Training(steps, rate=3e-3, decay=decay, cosine=False)(network, train, watch=watch)
        found[name] = torch.tensor(losses)
    figure, axes = panels(3)
    at = torch.arange(0, steps + 1, 10)
    for ax, (name, losses) in zip(axes, found.items(), strict=True):
        ax.plot(at, losses[:, 0], color=COLORS[1], label="training, 15 % of labels random")
        ax.plot(at, losses[:, 1], color=COLORS[0], label="test, true labels")
        ax.set_title(name, fontsize=10)
        ax.set(xlabel="steps of Adam", ylabel="loss per digit", ylim=(0, 2.5))
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, labelcolor=INK, fontsize=8, loc="upper right")
    last = {name: float(losses[-1, 1]) for name, losses in found.items()}
    return Study(
        "overfitting",
        "Overfitting and its remedies",
        """A network of two hidden layers on 400 digits, of which 15 % have a random label. Without
regularization it learns the wrong labels by heart: the training loss goes to zero, and the test loss
rises after its minimum. Weight decay, which is a Gaussian prior, keeps both losses near each other.
With dropout the wrong labels are learned much more slowly, and the test loss stays low.""",
        figure,
        (
            at_least(
                "nothing: last test loss beside its minimum",
                last["nothing"] / float(found["nothing"][:, 1].min()),
                1.5,
            ),
            at_most(
                "weight decay: last test loss beside nothing's",
                last["weight decay"] / last["nothing"],
                0.7,
            ),
            at_most(
                "dropout: last test loss beside nothing's", last["dropout"] / last["nothing"], 0.7
            ),
        ),
    )


NOISE = 0.3
INPUTS = 5


@cache
def regression(seed: int) -> tuple[Table, Table]:
    """A smooth function of five inputs with noise, at 60 points; test points with noise too."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(560, INPUTS, generator=generator)
    y = (x[:, :1] * 1.5).sin() + 0.5 * x[:, 1:2] * x[:, 2:3]
    y = y + NOISE * torch.randn(560, 1, generator=generator)
    return (x[:60], y[:60]), (x[60:], y[60:])


def rmse(f: Callable[[Tensor], Tensor], points: Table) -> float:
    """The root mean squared error."""
    with torch.no_grad():
        return float((f(points[0]) - points[1]).square().mean().sqrt())


def errors_of(method: str, depth: int, width: int, seed: int) -> tuple[float, float]:
    """Training and test error of one method; Gaussian processes have no width."""
    train, test = regression(seed)
    network = mlp(INPUTS, *[width] * depth, 1, seed=seed)
    if method in ("NNGP", "NTK-GP"):
        kernel = (n2g.nngp if method == "NNGP" else n2g.ntk)(network, weight_var=2.0, bias_var=0.1)
        f = n2g.condition(kernel, train, n2g.Gaussian(noise_var=NOISE**2)).mean
    else:
        decay = 2 * NOISE**2 / len(train[0])
        prior, none = Training(800, 5e-3, decay), Training(1500, 2e-2, batch=20)
        f = (prior if method == "MAP" else none)(network, train, squared_error)
    return rmse(f, train), rmse(f, test)


def gaps(quick: bool) -> Study:
    """The gap between test and training error of four methods over width and depth."""
    sizes = [4, 16, 64, 256] if quick else [4, 8, 16, 32, 64, 128, 256]
    depths, seeds = ([1, 2, 4], 2) if quick else ([1, 2, 3, 4, 6], 4)
    by_width = {
        m: torch.tensor(
            [
                [errors_of(m, 2, w, s) for s in range(seeds)]
                for w in (sizes if m in ("MAP", "SGD") else sizes[:1])
            ]
        )
        for m in METHODS
    }
    by_depth = {
        m: torch.tensor([[errors_of(m, d, 64, s) for s in range(seeds)] for d in depths])
        for m in METHODS
    }
    figure, axes = panels(3)
    for color, method in zip(COLORS, METHODS, strict=False):
        wide, deep = by_width[method].mean(1), by_depth[method].mean(1)
        if len(wide) == 1:
            axes[0].axhline(
                float(wide[0, 1] - wide[0, 0]),
                color=color,
                linestyle="--",
                label=f"{method}, infinite width",
            )
            axes[2].axhline(float(wide[0, 1]), color=color, linestyle="--")
        else:
            axes[0].plot(sizes, wide[:, 1] - wide[:, 0], ".-", color=color, label=method)
            axes[2].plot(sizes, wide[:, 1], ".-", color=color)
        axes[1].plot(depths, deep[:, 1] - deep[:, 0], ".-", color=color)
    for ax, name in zip(axes, ("width", "hidden layers", "width"), strict=True):
        ax.set(
            xlabel=name, ylabel="test error − training error" if ax is not axes[2] else "test error"
        )
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_ylim(0, None)
    for ax in (axes[0], axes[2]):
        ax.set_xscale("log")
        ticks_at(ax, sizes)
    axes[1].set_xticks(depths)
    axes[2].axhline(NOISE, color=FAINT, linewidth=1, linestyle=":")
    axes[0].legend(frameon=False, labelcolor=INK, fontsize=8, loc="lower right")
    last = {m: float(v.mean(1)[-1, 1] - v.mean(1)[-1, 0]) for m, v in by_width.items()}
    test = {m: float(v.mean(1)[-1, 1]) for m, v in by_width.items()}
    share = {m: value / test["SGD"] for m, value in test.items()}
    return Study(
        "gaps",
        "The NNGP overfits less than networks trained to the end",
        f"""Regression on 60 points with noise of standard deviation {NOISE} (dotted), which the
Gaussian processes and the prior of MAP know. Networks trained to the end (SGD) fit the noise once they
are wide, and weight decay as a Gaussian prior (MAP) keeps part of the gap away. At the largest width
the NNGP, the limit of infinite capacity, has a smaller gap than SGD; the NTK-GP is close to SGD. A
small gap is not a small error: the test error of the NNGP is {share["NNGP"]:.2f} times, of the NTK-GP
{share["NTK-GP"]:.2f} times and of MAP {share["MAP"]:.2f} times that of SGD. Root mean squared errors,
means over {seeds} data sets; left and right for two hidden layers, middle for width 64.""",
        figure,
        (
            at_most(
                "gap of the NNGP beside SGD at the largest width", last["NNGP"] / last["SGD"], 0.9
            ),
            at_most("gap of MAP beside SGD at the largest width", last["MAP"] / last["SGD"], 0.9),
        ),
    )


METHODS = ("NNGP", "NTK-GP", "MAP", "SGD")

TOPICS = [widths, overfitting, gaps]

if __name__ == "__main__":
    raise SystemExit(run(TOPICS, __doc__))
