"""Wide networks with one narrow layer: deep Gaussian processes, not Gaussian ones.

    python papers/deep/bottleneck.py --out figures [--quick]

Networks have two hidden layers of GELUs, with weights N(0, σ_w²/fan_in) such that all units have variance one
(σ_w² = 1 / E φ² = 2.3517). Stated before the run:

- with both layers of width n, the excess kurtosis of an output falls as 1/n: the network becomes a Gaussian
  process;
- with n units in the first layer and 8 in the second, it stays. The limit is the kurtosis of a Gaussian whose
  variance is an average over 8 units, 3 (E φ⁴ / E[φ²]² − 1) / 8 = 2.331: within .1 from n = 1024 on;
- the outputs of such networks have the law of the deep Gaussian process that
  `deep.layers_of(network, narrow=8)` describes, at one point and at two. A single Gaussian process with the
  same covariance has another law.

Agrawal, Papamarkou and Hinkle (2020), "Wide neural networks with bottlenecks are deep Gaussian processes".
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.axes import Axes
from scipy.stats import ks_2samp
from torch import Tensor, nn

from net2gp.deep import draw, layers_of
from net2gp.limits import HiddenLayer, excess_kurtosis, finite_width, sample_kernels, sample_outputs
from net2gp.plots import COLORS, FAINT, INK

sys.path.append(str(Path(__file__).parents[1]))
from claims import Claim, at_most
from pages import Study, Topic, at_least, panels, run, tidy, within
from studies import Slope, circle

NARROW = 8
"""The number of units in the narrow layer."""

INFINITE = 10**12
"""A width that is infinite for all purposes."""

# K̂ of one layer at an input of variance one is E φ² if weights have variance one
WEIGHT_VAR = 1 / float(
    finite_width([HiddenLayer(nn.GELU(), 1)], torch.ones(1, 1, dtype=torch.float64)).kernel
)
"""σ_w², which keeps the variance of units at one."""


def hidden(*widths: int) -> list[HiddenLayer]:
    """Hidden layers of these widths."""
    return [HiddenLayer(nn.GELU(), width) for width in widths]


def module(*widths: int) -> nn.Sequential:
    """The network of two inputs and one output with these hidden widths, without biases."""
    layers: list[nn.Module] = []
    before = 2
    for width in widths:
        layers += [nn.Linear(before, width, bias=False), nn.GELU()]
        before = width
    return nn.Sequential(*layers, nn.Linear(before, 1, bias=False))


def inputs(angles: Tensor) -> Tensor:
    """Points on a circle, such that the first layer's units have variance one: (N, 2)."""
    return circle(angles.double()) / WEIGHT_VAR**0.5


@dataclass(frozen=True)
class Kurtosis:
    """An excess kurtosis and its standard error."""

    value: float
    error: float

    @staticmethod
    def of(widths: tuple[int, ...], count: int, seed: int) -> Kurtosis:
        """Draw K̂ of `count` networks. Given K̂ the output is Gaussian, so E f⁴ = 3 E K̂²."""
        generator = torch.Generator().manual_seed(seed)
        x = inputs(torch.zeros(1))
        kernels = sample_kernels(
            hidden(*widths), x, count, weight_var=WEIGHT_VAR, generator=generator
        ).flatten()
        parts = kernels.reshape(50, -1)
        values = 3 * parts.square().mean(1) / parts.mean(1).square() - 3
        whole = 3 * float(kernels.square().mean() / kernels.mean().square()) - 3
        return Kurtosis(whole, float(values.std()) / 50**0.5)


def bottleneck(quick: bool) -> Study:
    """Kurtosis over width, and networks beside the deep Gaussian process that they are."""
    widths = [64, 256, 1024] if quick else [64, 128, 256, 512, 1024, 2048]
    count = 80_000 if quick else 100_000
    narrow = [Kurtosis.of((width, NARROW), count, i) for i, width in enumerate(widths)]
    wide = [Kurtosis.of((width, width), count, 50 + i) for i, width in enumerate(widths)]
    figure, axes = panels(3, height=3.8)
    _over_width(axes[0], widths, narrow, wide)
    made = _kurtosis_claims(widths, narrow, wide)
    made += _laws(axes[1], 20_000 if quick else 100_000, 256 if quick else 1024)
    _functions(axes[2], 512)
    text = (
        "If all layers of a network get wide, its outputs become Gaussian. If one layer keeps 8 units, they "
        "do not: what follows the narrow layer is a Gaussian process of 8 random functions, and the whole is "
        "a deep Gaussian process, which `deep.layers_of` reads off the network. Here depth does more than "
        "another kernel: the 8 functions can adapt to data, while a kernel of infinite width is fixed."
    )
    title = "One narrow layer makes the difference"
    return Study("bottleneck", title, text, figure, tuple(made))


def limit() -> float:
    """The excess kurtosis with infinitely many units before eight, by quadrature."""
    return float(
        excess_kurtosis(hidden(INFINITE, NARROW), inputs(torch.zeros(1)), weight_var=WEIGHT_VAR)
    )


def _kurtosis_claims(
    widths: list[int], narrow: list[Kurtosis], wide: list[Kurtosis]
) -> list[Claim]:
    made = [at_most("|limit by quadrature − 2.33|", abs(limit() - 2.33), 0.005)]
    for width, found in zip(widths, narrow, strict=True):
        if width >= 1024:
            name = f"{width} and 8 units: excess kurtosis (± {found.error:.2g})"
            made.append(within(name, found.value, 2.23, 2.43))
    slope = Slope.fit(widths, torch.tensor([one.value for one in wide]))
    made.append(within("both layers wide: slope of the kurtosis", slope.value, -1.1, -0.9))
    for width, found in zip(widths[-2:], wide[-2:], strict=True):
        theory = float(
            excess_kurtosis(hidden(width, width), inputs(torch.zeros(1)), weight_var=WEIGHT_VAR)
        )
        apart = abs(found.value - theory) / (found.error + theory * 10 / width)
        made.append(at_most(f"{width} and {width} units: errors from 1/width theory", apart, 4))
    return made


def _over_width(ax: Axes, widths: list[int], narrow: list[Kurtosis], wide: list[Kurtosis]) -> None:
    for found, color, label in (
        (narrow, COLORS[1], "n, then 8 units"),
        (wide, COLORS[0], "n, then n units"),
    ):
        values = [one.value for one in found]
        errors = [2 * one.error for one in found]
        ax.errorbar(widths, values, errors, color=color, marker="o", ms=4, label=label)
    theory = [
        float(excess_kurtosis(hidden(n, n), inputs(torch.zeros(1)), weight_var=WEIGHT_VAR))
        for n in widths
    ]
    ax.plot(widths, theory, color=INK, ls="--", label="first order in 1/n")
    ax.axhline(limit(), color=FAINT, ls=":", label=f"{limit():.3f}, by quadrature")
    ax.set(xscale="log", yscale="log", xlabel="n", ylabel="excess kurtosis of an output")
    ax.set_xticks(widths, [str(width) for width in widths])
    ax.minorticks_off()
    ax.set_title("A narrow layer keeps the kurtosis")
    ax.legend(frameon=False, fontsize=8)
    tidy(ax)


def _laws(ax: Axes, count: int, width: int) -> list[Claim]:
    """Networks and their deep Gaussian process at two points."""
    x, network = inputs(torch.tensor([0.0, 0.7])), module(width, NARROW)
    layers = layers_of(network, narrow=NARROW, weight_var=WEIGHT_VAR)
    deep = draw(layers, x, count, generator=torch.Generator().manual_seed(0)).outputs[..., 0]
    finite = sample_outputs(
        network,
        x,
        count // 2,
        weight_var=WEIGHT_VAR,
        generator=torch.Generator().manual_seed(1),
    )[..., 0]
    normal = torch.randn(count, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    increments = [values[:, 0] - values[:, 1] for values in (finite, deep)]
    gaussian = normal * increments[1].std()
    edges = torch.linspace(-5, 5, 51, dtype=torch.float64)
    for values, color, style, label in (
        (increments[0], COLORS[0], "o", f"networks, {width} and 8 units"),
        (increments[1], COLORS[1], "-", "deep Gaussian process"),
        (gaussian, FAINT, "--", "Gaussian process"),
    ):
        density = torch.histogram(values, edges).hist / len(values) / float(edges[1] - edges[0])
        places = (edges[1:] + edges[:-1]) / 2
        seen = density > 0
        ax.plot(places[seen], density[seen], style, color=color, ms=3.5, label=label)
    ax.set(yscale="log", xlabel="f(x) − f(x')", ylabel="density", ylim=(2e-4, 6))
    ax.set_title("Networks and their deep process")
    ax.legend(frameon=False, fontsize=8, loc="upper left")
    tidy(ax)
    chances = [
        ks_2samp(deep[:, 0].numpy(), finite[:, 0].numpy()).pvalue,
        ks_2samp(increments[1].numpy(), increments[0].numpy()).pvalue,
    ]
    alone = ks_2samp(gaussian.numpy(), increments[0].numpy()).pvalue
    return [
        at_least("networks as the deep process: smallest p-value", min(chances), 1e-3),
        at_most("networks as one Gaussian process: p-value", alone, 1e-6),
    ]


def _functions(ax: Axes, width: int) -> None:
    """Functions on the circle: networks above, draws of the deep process below."""
    angles = torch.linspace(0, 2 * math.pi, 100)
    network = module(width, NARROW)
    layers = layers_of(network, narrow=NARROW, weight_var=WEIGHT_VAR)
    deep = draw(layers, inputs(angles), 3, generator=torch.Generator().manual_seed(3)).outputs
    finite = sample_outputs(
        network,
        inputs(angles),
        3,
        weight_var=WEIGHT_VAR,
        generator=torch.Generator().manual_seed(4),
    )
    for values, style, label in ((finite, "-", "networks"), (deep, "--", "deep Gaussian process")):
        for number, (line, color) in enumerate(zip(values[..., 0], COLORS, strict=False)):
            ax.plot(angles, line, style, color=color, lw=1.2, label=None if number else label)
    ax.set(xlabel="angle of x on a circle", ylabel="f(x)", xlim=(0, 2 * math.pi))
    ax.set_xticks([0, math.pi, 2 * math.pi], ["0", "π", "2π"])
    ax.set_title("Three functions of each")
    ax.legend(frameon=False, fontsize=8)
    tidy(ax)


TOPICS: list[Topic] = [bottleneck]

if __name__ == "__main__":
    raise SystemExit(run(TOPICS, __doc__, "deep"))
