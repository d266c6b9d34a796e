"""The tangent kernel of networks of growing width: its limit, and how little it moves in training.

    python papers/jacot2018/run.py --out figures
    python papers/jacot2018/run.py --out figures --device cuda --seeds 32 --largest 8192

Trains networks with two hidden layers at each width and fits exponents of width: of the distance of
the kernel, of the features and of the function from where theory holds them, of the weights and
their moves, and of the posterior with the kernel of a finite network from that with its limit.
Kernels move by less than the proven width^(-1/2) if the law of the last layer's weights a is symmetric;
with E a³ ≠ 0 and an activation that is not odd they move by just that (expected.toml says why).

Jacot, Gabriel & Hongler (2018), "Neural tangent kernel: convergence and generalization in neural
networks", figures 1 and 2.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path

import torch
from gpytorch.distributions import MultivariateNormal
from matplotlib.axes import Axes
from torch import Tensor, nn
from torch.distributions import kl_divergence

import net2gp as n2g
from net2gp.limits import infinite_width
from net2gp.plots import COLORS
from net2gp.training import max_learning_rate

sys.path.append(str(Path(__file__).parents[1]))
import findings
import studies
from studies import Architecture, Factors, Networks, Row, Slope


@dataclass(frozen=True)
class Study:
    """An architecture, and what to do with it."""

    architecture: Architecture
    in_full: bool = False
    """Whether to look at weights, posteriors and times before the end too."""
    repeats: int = 1
    """How often to draw what is asked for; if more than once, then without the largest width."""


# kernels of single skewed networks move twice as far as of others, or half as far: a slope needs many
STUDIES = {
    "tanh": Study(Architecture(2, 2, nn.Tanh(), weight_var=1.5, bias_var=0.1), in_full=True),
    "relu": Study(Architecture(2, 2, nn.ReLU(), weight_var=2.0, bias_var=0.1)),
    "gelu": Study(Architecture(2, 2, nn.GELU(), weight_var=1.5, bias_var=0.1), repeats=4),
    "skewed gelu": Study(
        Architecture(2, 2, nn.GELU(), weight_var=1.5, bias_var=0.1, skewed=True), repeats=4
    ),
}
TIMES = [0.25, 1.0, 4.0, 20.0]
ANGLES = torch.linspace(0, 2 * math.pi, 17, dtype=torch.float64)[:-1]
X, Y = studies.circle(ANGLES), ANGLES.sin() + 0.5 * (2 * ANGLES).cos()
TRAIN, TEST = slice(0, None, 2), slice(1, None, 2)
NOISE = n2g.Gaussian(noise_var=0.01)
Measures = dict[str, Tensor]


@cache
def at_infinite_width(architecture: Architecture) -> tuple[Tensor, MultivariateNormal]:
    """The tangent kernel at all points, and its posterior at the test points."""
    ntk = infinite_width(architecture.module(1), **architecture.prior).ntk
    return ntk(X), n2g.condition(ntk, (X[TRAIN], Y[TRAIN]), NOISE).joint(X[TEST])


def kernels(networks: Networks, x: Tensor) -> Tensor:
    """The tangent kernels of all networks where their weights are now: (S, N, N), in float64."""
    count = len(networks.weights[0])
    linearized = [n2g.linearize(networks.module(index)) for index in range(count)]
    of = [one.kernel(prior_var=networks.variances).precise()(x) for one in linearized]
    return torch.stack(of).cpu()


def inner(networks: Networks, one: Factors, other: Factors) -> Tensor:
    """⟨J, J'⟩ of the features at two times, in the NTK parameterization: (S,)."""
    total = torch.zeros(len(one[0][0]), device=one[0][0].device, dtype=torch.float64)
    for rate, (h, g), (h2, g2) in zip(networks.rates, one, other, strict=True):
        weight = rate * (h * h2).sum(-1, dtype=torch.float64) + networks.architecture.bias_var
        total += (weight * (g * g2).sum(-1, dtype=torch.float64)).sum(1)
    return total.cpu()


def relative(one: Tensor, other: Tensor) -> Tensor:
    """‖one − other‖ / ‖other‖ of matrices: (S,)."""
    return torch.linalg.matrix_norm(one - other) / torch.linalg.matrix_norm(other)


def linear_descent(f: Tensor, kernel: Tensor, steps: list[float]) -> Tensor:
    """Gradient descent of the functions f (S, N) if their kernel (…, N, N) never changes."""
    for step in steps:
        residual = (f[:, TRAIN] - Y[TRAIN])[..., None]
        f = f - step * (kernel[..., TRAIN] @ residual)[..., 0] / residual.shape[1]
    return f


def train(study: Study, width: int, options: argparse.Namespace) -> Measures:
    """Draw and train networks of one width; every measure is (S,), or (S, times) over time."""
    architecture, count = study.architecture, study.repeats * options.seeds
    generator = torch.Generator(options.device).manual_seed(options.seed + width)
    networks = Networks.draw(architecture, width, count, generator)
    limit, posterior = at_infinite_width(architecture)
    x, y = (t.to(options.device, torch.float32) for t in (X, Y))
    stable = max_learning_rate(limit[TRAIN, TRAIN])
    stages = studies.growing_steps(stable / 20, stable / 2, TIMES)
    start = networks.copy() if study.in_full else networks
    f, features = networks.factors(x)
    path = [kernels(networks, x)]
    for stage in stages:
        for step in stage:
            networks.step_(x[TRAIN], y[TRAIN], step)
        if study.in_full or stage is stages[-1]:
            path.append(kernels(networks, x))
    end, moved = networks.factors(x)
    f, end, steps = f.double().cpu(), end.double().cpu(), [*chain(*stages)]
    own, common = (linear_descent(f, kernel, steps) for kernel in (path[0], limit))
    size = inner(networks, features, features)
    change = size + inner(networks, moved, moved) - 2 * inner(networks, features, moved)
    return {
        "kernel at initialization to its limit": relative(path[0], limit),
        "kernel during training": relative(path[-1], path[0]),
        "features J during training": (change / size).sqrt(),
        "function to that of its linearization": (end - own).norm(dim=1),
        "function to that of the limit's kernel": (end - common).norm(dim=1),
        "from the start": torch.stack([relative(kernel, path[0]) for kernel in path], 1),
        "from the end": torch.stack([relative(kernel, path[-1]) for kernel in path], 1),
        **(weight_norms(start, networks) if study.in_full else {}),
        **(posteriors(start, x, y, posterior) if study.in_full else {}),
    }


def weight_norms(start: Networks, end: Networks) -> Measures:
    """Spectral norms in the NTK parameterization, ω = W / √(weight_var / fan_in), layer by layer."""
    result = {}
    for layer, rate in enumerate(start.rates):
        before, after = start.weights[layer], end.weights[layer]
        size, move = (studies.spectral(w) / rate**0.5 for w in (before, after - before))
        result[f"weights of layer {layer + 1}"] = size
        result[f"move of layer {layer + 1}"] = move
        result[f"relative move of layer {layer + 1}"] = move / size
    return result


def posteriors(networks: Networks, x: Tensor, y: Tensor, exact: MultivariateNormal) -> Measures:
    """Regression with the kernel of each finite network, against that with the limit."""
    gaps, divergences = [], []
    for index in range(len(networks.weights[0])):
        linearized = n2g.linearize(networks.module(index).double())
        kernel = linearized.kernel(prior_var=networks.variances)
        data = x[TRAIN].double(), y[TRAIN].double()
        found = n2g.condition(kernel, data, NOISE).joint(x[TEST].double())
        found = MultivariateNormal(found.mean.cpu(), found.covariance_matrix.cpu())
        gaps.append((found.mean - exact.mean).square().mean().sqrt())
        divergences.append(kl_divergence(found, exact))
    return {
        "posterior mean to that of the NTK-GP": torch.stack(gaps),
        "KL of the posterior to the NTK-GP": torch.stack(divergences),
    }


def draw(ax: Axes, widths: list[int], curves: dict[str, Tensor], title: str) -> None:
    """Measures over width, a dot for each network and a line through geometric means, with slopes."""
    for (label, values), color in zip(curves.items(), COLORS, strict=False):
        at = widths[: len(values)]
        label = f"{label}: {Slope.fit(at, values).value:+.2f}"
        ax.loglog(at, values, ".", color=color, markersize=2, alpha=0.5)
        ax.loglog(at, values.log().mean(1).exp(), "o-", color=color, markersize=4, label=label)
    ax.set(xlabel="width", title=title)
    ax.legend(frameon=False, fontsize=7)


def draw_widths(widths: list[int], measures: dict[str, Measures], out: Path) -> None:
    """Kernel, features and functions over width."""
    names = [
        "kernel at initialization to its limit",
        "kernel during training",
        "features J during training",
        "function to that of the limit's kernel",
        "function to that of its linearization",
    ]
    figure, axes = studies.panels(len(names))
    for ax, name in zip(axes, names, strict=True):
        draw(ax, widths, {label: found[name] for label, found in measures.items()}, name)
    studies.save(figure, out, "jacot2018_widths.png")


def draw_weights(widths: list[int], measures: Measures, out: Path) -> None:
    """Wide networks do not learn features: weights grow, their moves do not."""
    figure, axes = studies.panels(3)
    for ax, what in zip(axes, ("weights", "move", "relative move"), strict=True):
        curves = {f"layer {k}": measures[f"{what} of layer {k}"] for k in (1, 2, 3)}
        draw(ax, widths, curves, f"{what}, in spectral norm")
    axes[1].set_ylim(0.1, 10)
    studies.save(figure, out, "jacot2018_weights.png")


def draw_kernels(widths: list[int], measures: Measures, out: Path) -> None:
    """Posteriors of finite kernels over width, and kernels over time."""
    figure, axes = studies.panels(3)
    names = "KL of the posterior to the NTK-GP", "posterior mean to that of the NTK-GP"
    curves = dict(zip(("KL", "RMSE of means"), (measures[name] for name in names), strict=True))
    draw(axes[0], widths, curves, "posterior of a finite kernel to NTK-GP")
    for ax, end in zip(axes[1:], ("start", "end"), strict=True):
        for index, color in zip(range(0, len(widths), 2), COLORS, strict=False):
            distance = measures[f"from the {end}"][index].mean(0)
            times = [0.0, *TIMES]
            ax.plot(
                times, distance, "o-", color=color, markersize=4, label=f"width {widths[index]}"
            )
        ax.set_xscale("symlog", linthresh=0.25)
        ax.set(xlabel="time", title=f"kernel at time t from that at the {end}")
        ax.legend(frameon=False, fontsize=7)
    studies.save(figure, out, "jacot2018_kernels.png")


def table(widths: list[int], measures: dict[str, Measures]) -> list[Row]:
    """Fitted exponents beside the expected ones."""
    expected = studies.expected_of(__file__)
    rows, tolerance = [], expected["tolerance"]
    for study, found in measures.items():
        for name, value in {**expected["bounds"], **expected[study]}.items():
            fit = Slope.fit(widths[: len(found[name])], found[name])
            bound = name not in expected[study]
            note = f"± {fit.error:.3f}; {found[name][0].mean():.2g} → {found[name][-1].mean():.2g}"
            allowed = tolerance["slope"] + tolerance["errors"] * fit.chance
            rows.append(Row(f"{study}: {name}", value, fit.value, allowed, note, bound))
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Print the table, write the figures; the exit status says whether the numbers agree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder for the figures")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--largest", type=int, default=2048, help="widths double from 64 to this")
    parser.add_argument("--seeds", type=int, default=24, help="networks of each width")
    parser.add_argument("--seed", type=int, default=0)
    options = findings.parse(parser, arguments, quick={"largest": 1024, "seeds": 8})
    torch.manual_seed(options.seed)
    widths = [2**k for k in range(6, options.largest.bit_length())]
    measures = {}
    for name, study in STUDIES.items():
        some = widths[: max(2, len(widths) - (study.repeats > 1))]
        found = [train(study, width, options) for width in some]
        measures[name] = {key: torch.stack([one[key] for one in found]) for key in found[0]}
    draw_widths(widths, measures, options.out)
    draw_weights(widths, measures["tanh"], options.out)
    draw_kernels(widths, measures["tanh"], options.out)
    return 0 if studies.print_table(table(widths, measures)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
