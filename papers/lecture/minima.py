"""Minima of a network on digits: the loss around them, between them, and up to symmetries.

    python papers/lecture/minima.py --out figures [--quick]

Trains networks of two hidden layers from independent starts, with weight decay, and draws filter-normalized
slices of the loss, the loss along straight lines and trained curves between two minima, the line after
the units of one network were matched to the other, and a map of the functions along the trainings.

Li et al. (2018), "Visualizing the loss landscape of neural nets"; Garipov et al. (2018), "Loss surfaces, mode
connectivity, and fast ensembling of DNNs"; Ainsworth et al. (2023), "Git Re-Basin"; Fort et al. (2019), "Deep
ensembles: a loss landscape perspective".
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache

import torch
from common import (
    Images,
    Study,
    Training,
    at_least,
    at_most,
    digits,
    legend_above,
    mlp,
    panels,
    run,
    tidy,
)
from torch import Tensor, nn

import net2gp as n2g
from net2gp import bayes
from net2gp.plots import COLORS, FAINT, INK

WIDTH, DECAY = 32, 1e-3


@cache
def points(split: str) -> Images:
    """All digits."""
    return digits(split)


@cache
def trained(seed: int, decay: float = DECAY) -> nn.Module:
    """A minimum of the loss from its own start."""
    network = mlp(64, WIDTH, WIDTH, 10, seed=seed)
    return Training(500, decay=decay)(network, points("train"))


def prior_var() -> float:
    """The variance of the Gaussian prior that the weight decay is."""
    return 1 / (DECAY * len(points("train")[1]))


def objective(curve: bayes.Curve, places: int = 31) -> tuple[Tensor, Tensor]:
    """The training loss along a curve, without and with decay·‖θ‖²/2: (places,) each."""
    loss = curve.losses(points("train"), n2g.Categorical(), num_places=places)
    squares = [
        sum(float(value.square().sum()) for value in curve.params(t).values())
        for t in torch.linspace(0, 1, places)
    ]
    return loss, loss + 0.5 * DECAY * torch.tensor(squares)


def ratio(losses: Tensor) -> float:
    """The largest loss along a curve beside the larger one of its ends."""
    return float(losses.max() / losses[[0, -1]].max())


def landscape(quick: bool) -> Study:
    """Slices in one and two dimensions, with and without weight decay."""
    likelihood, data = n2g.Categorical(), points("train")
    count = 15 if quick else 31
    figure, axes = panels(3)
    for ax, decay in zip(axes[:2], (0.0, DECAY), strict=True):
        found = bayes.loss_slice(trained(0, decay), data, likelihood, num_points=count)
        levels = torch.logspace(-2, 1, 13).tolist()
        shown = found.losses.clamp(1e-2, 10)
        args = (found.coordinates, found.coordinates, shown.mT)
        image = ax.contourf(*args, levels=levels, norm="log", cmap="viridis")
        ax.contour(*args, levels=levels, colors="white", linewidths=0.4)
        ax.plot(0, 0, "+", color="white", markersize=9)
        ax.set_title("no weight decay" if decay == 0 else f"weight decay {decay:g}", fontsize=10)
        ax.set(xlabel="first direction", ylabel="second direction", aspect="equal")
    bar = figure.colorbar(image, ax=axes[1], ticks=[0.01, 0.1, 1, 10])
    bar.ax.set_title("loss", fontsize=9)
    bar.ax.set_yticklabels(["0.01", "0.1", "1", "10"])
    centers = []
    for color, decay in zip(COLORS, (0.0, DECAY), strict=False):
        for seed in range(3):
            found = bayes.loss_slice(
                trained(0, decay), data, likelihood, directions=1, num_points=31, seed=seed
            )
            name = "no weight decay" if decay == 0 else f"weight decay {decay:g}"
            axes[2].plot(
                found.coordinates, found.losses, color=color, label=name if not seed else None
            )
            centers.append(float(found.losses[15] / found.losses.max()))
    axes[2].set(xlabel="step along a random direction", ylabel="loss per digit", yscale="log")
    tidy(axes[2])
    axes[2].legend(frameon=False, labelcolor=INK, fontsize=8, loc="upper center")
    return Study(
        "landscape",
        "The loss around a minimum",
        """The training loss of a network on digits along random directions whose filters are as long
as the filters of the network (`bayes.loss_slice`). A step of 1 changes each filter by its own length,
so networks with small and large weights can be compared. Left and middle: a plane; right: three lines
for each of the networks.""",
        figure,
        (at_most("loss of the network beside the highest of its slices", max(centers), 0.05),),
    )


def join(one: nn.Module, other: nn.Module, steps: int) -> dict[str, bayes.Curve]:
    """The straight line, the line between matched networks, a Bézier curve and a polyline."""
    data, likelihood, prior = points("train"), n2g.Categorical(), prior_var()
    training = bayes.CurveTraining(steps, learning_rate=2e-2, batch_size=256)
    matched = bayes.permute_units(other, bayes.match_weights(other, one))
    bent = {
        polyline: bayes.curve_between(
            *(one, other, data, likelihood),
            bends=2,
            polyline=polyline,
            prior=prior,
            training=training,
        )
        for polyline in (False, True)
    }
    return {
        "straight line": bayes.straight_line(one, other),
        "line, units matched": bayes.straight_line(one, matched),
        "Bézier curve": bent[False],
        "polyline": bent[True],
    }


def without_decay(one: nn.Module, other: nn.Module, steps: int) -> Tensor:
    """The training loss along a curve that was trained without weight decay."""
    training = bayes.CurveTraining(steps, learning_rate=1e-2, batch_size=256)
    curve = bayes.curve_between(
        one, other, points("train"), n2g.Categorical(), bends=2, training=training
    )
    return objective(curve)[0]


def connectivity(quick: bool) -> Study:
    """Curves between pairs of minima; the figure shows the first pair, the claims are about the worst."""
    pairs = [(0, 1)] if quick else [(0, 1), (2, 3), (4, 5)]
    steps = 1000 if quick else 2000
    curves = [join(trained(a), trained(b), steps) for a, b in pairs]
    plain = [ratio(without_decay(trained(a), trained(b), steps)) for a, b in pairs]
    found = [{name: objective(curve) for name, curve in each.items()} for each in curves]
    ratios = {name: [ratio(each[name][1]) for each in found] for name in found[0]}
    straight = [ratio(each["straight line"][0]) for each in found]
    barriers = [
        [float(bayes.barrier(each[n][0])) for n in ("straight line", "line, units matched")]
        for each in found
    ]
    figure, axes = panels(2)
    for color, (name, curve) in zip(COLORS, curves[0].items(), strict=False):
        axes[0].plot(torch.linspace(0, 1, 31), found[0][name][1], color=color, label=name)
        axes[1].plot(torch.linspace(0, 1, 11), 100 * test_errors(curve), color=color)
    axes[0].set(xlabel="place on the curve, t", ylabel="training loss with weight decay")
    axes[1].set(xlabel="place on the curve, t", ylabel="test error in %")
    for ax in axes:
        tidy(ax)
        ax.set_yscale("log")
    legend_above(figure, axes[0])
    return Study(
        "connectivity",
        "Minima are connected, but not by straight lines",
        """Two networks of the same architecture, trained from independent starts. The straight line
between them crosses a high barrier. A curve with two bends (`bayes.curve_between`) stays as low as its
ends, so both belong to one connected set of good networks. Much of the barrier comes from symmetry:
hidden units can change places without any change of the function. `bayes.match_weights` finds the order
in which the second network is nearest to the first one, and the barrier of the straight line falls.""",
        figure,
        (
            at_least("straight line beside its ends, loss", min(ratios["straight line"]), 5),
            at_most("Bézier curve beside its ends, loss", max(ratios["Bézier curve"]), 1.2),
            at_most("polyline beside its ends, loss", max(ratios["polyline"]), 1.2),
            at_least("straight line beside its ends, loss without decay", min(straight), 5),
            at_most(
                "curve trained without decay beside its ends, loss without decay", max(plain), 1.2
            ),
            at_least(
                "share of the barrier that matching removes",
                min(1 - after / before for before, after in barriers),
                0.3,
            ),
        ),
    )


def test_errors(curve: bayes.Curve) -> Tensor:
    """The test error at eleven places of a curve."""
    x, y = points("test")
    with torch.no_grad():
        return torch.tensor(
            [
                float((curve.network(t)(x).argmax(1) != y).double().mean())
                for t in torch.linspace(0, 1, 11)
            ]
        )


def symmetries(quick: bool) -> Study:
    """Networks with other parameters and the same function."""
    x = points("test")[0].double()
    worst, moved = {}, {}
    for name, activation in (("ReLU", nn.ReLU), ("tanh", nn.Tanh)):
        network = mlp(64, WIDTH, WIDTH, 10, seed=3, activation=activation)
        network = Training(150, decay=DECAY)(network, points("train")).double()
        generator = torch.Generator().manual_seed(0)
        orders = {n: torch.randperm(WIDTH, generator=generator) for n in ("0", "2")}
        factors = {n: scales(name, generator) for n in ("0", "2")}
        for kind, twin in (
            (f"{name}, units permuted", bayes.permute_units(network, orders)),
            (
                f"{name}, {'scaled' if name == 'ReLU' else 'signs flipped'}",
                bayes.scale_units(network, factors),
            ),
        ):
            with torch.no_grad():
                worst[kind] = float((twin(x) - network(x)).abs().max())
            moved[kind] = distance(network, twin)
    figure, (ax,) = panels(1, 3.0)
    figure.set_figwidth(6.5)
    names = list(worst)
    ax.barh(
        names,
        [moved[n] for n in names],
        color=COLORS[0],
        height=0.35,
        align="edge",
        label="parameters",
    )
    ax.barh(
        names,
        [worst[n] for n in names],
        color=COLORS[1],
        height=-0.35,
        align="edge",
        label="function",
    )
    ax.set(
        xscale="log",
        xlim=(1e-17, 1e2),
        xlabel="change: relative length, and largest difference of logits",
    )
    ax.axvline(1e-12, color=FAINT, linewidth=1, linestyle=":")
    ax.invert_yaxis()
    tidy(ax)
    legend_above(figure, ax)
    return Study(
        "symmetries",
        "Many parameters, one function",
        """Hidden units change places, ReLU units are multiplied by positive numbers, and tanh units
change their sign; the next layer takes each change back (`bayes.permute_units`, `bayes.scale_units`).
The parameters move as far as they are long, and the function stays as it is to the last digits (no bar:
exactly). A posterior over parameters therefore has many equal modes, and parameters are not identified
by any amount of data. Predictions are.""",
        figure,
        (
            *(at_most(f"{n}: largest change of a logit", worst[n], 1e-12) for n in names),
            at_least("smallest relative change of the parameters", min(moved.values()), 0.1),
        ),
    )


def scales(name: str, generator: torch.Generator) -> Tensor:
    """Positive factors for ReLU units, signs for tanh units."""
    if name == "ReLU":
        return torch.rand(WIDTH, generator=generator, dtype=torch.float64) * 2 + 0.5
    return torch.randint(2, (WIDTH,), generator=generator).double() * 2 - 1


def distance(one: nn.Module, other: nn.Module) -> float:
    """‖θ − θ'‖/‖θ‖."""
    a, b = (torch.cat([p.detach().flatten() for p in n.parameters()]) for n in (one, other))
    return float((a - b).norm() / a.norm())


def snapshots(seed: int) -> list[nn.Module]:
    """Networks along one training on 300 digits: every 5 steps, after the first 30."""
    path: list[nn.Module] = []

    def watch(step: int, network: nn.Module) -> None:
        if step >= 30 and step % 5 == 0:
            path.append(deepcopy(network))

    network = mlp(64, WIDTH, WIDTH, 10, seed=seed)
    Training(100, decay=DECAY)(network, digits("train", 300), watch=watch)
    return path


def modes(quick: bool) -> Study:
    """Independent starts against snapshots of one training: weights, disagreement, and a map."""
    starts = 4
    paths = [snapshots(seed) for seed in range(starts)]
    each = len(paths[0])
    everything = [network for path in paths for network in path]
    found = bayes.diversity(everything, points("test")[0], likelihood=n2g.Categorical())
    assert found.disagreement is not None
    figure, axes = panels(3)
    for start, color in zip(range(starts), COLORS, strict=False):
        own = found.places[start * each : (start + 1) * each]
        axes[0].plot(own[:, 0], own[:, 1], ".-", color=color, label=f"start {start + 1}")
        axes[0].plot(*own[-1], "*", color=color, markersize=13)
    share = 100 * found.explained
    axes[0].set(
        xlabel=f"axis 1 ({share[0]:.0f} % of variance)", ylabel=f"axis 2 ({share[1]:.0f} %)"
    )
    tidy(axes[0])
    axes[0].legend(frameon=False, labelcolor=INK, fontsize=8)
    places = [each * (start + 0.5) - 0.5 for start in range(starts)]
    names = [f"start {start + 1}" for start in range(starts)]
    for ax, values, name in (
        (axes[1], found.cosines, "cosine of parameters"),
        (axes[2], found.disagreement, "disagreement on test digits"),
    ):
        image = ax.imshow(values, cmap="viridis", vmin=0)
        figure.colorbar(image, ax=ax, shrink=0.85)
        ax.set_title(name, fontsize=10)
        ax.set_xticks(places, names, fontsize=8)
        ax.set_yticks(places, names, fontsize=8)
    ends = [(start + 1) * each - 1 for start in range(starts)]
    others = ~torch.eye(starts, dtype=torch.bool)
    apart = found.disagreement[ends][:, ends][others].mean()
    along = torch.stack([found.disagreement[end, end - 4] for end in ends]).mean()
    cosines = found.cosines[ends][:, ends][others]
    return Study(
        "modes",
        "Independent starts find different functions",
        f"""{starts} trainings on 300 digits from independent starts, from step 30 to step 100. Left: a
map of their functions on test digits (`bayes.diversity`; stars are the ends), in which distances are as
near as two axes allow to the distances of predicted probabilities. Middle and right: all pairs of
snapshots. The parameters of independent networks are nearly orthogonal, and their ends disagree more
than the last 20 steps of one training change, which is what ensembles average over.""",
        figure,
        (
            at_most("largest cosine of independent parameters", float(cosines.max()), 0.5),
            at_least(
                "disagreement of starts above the last 20 steps of one",
                float(apart - along),
                0.02,
            ),
        ),
    )


TOPICS = [landscape, connectivity, symmetries, modes]

if __name__ == "__main__":
    raise SystemExit(run(TOPICS, __doc__))
