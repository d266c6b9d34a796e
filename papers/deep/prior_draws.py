"""Functions that are drawn from deep Gaussian processes, over the depth.

    python papers/deep/prior_draws.py --out figures [--quick]

Layers are squared exponentials f_l ~ GP(0, σ² exp(−d²/2ℓ²)). Stated before the run:

- gallery: every layer is marginally N(0, σ²); two layers with ℓ = .8, σ = 1.3 and ℓ = .7, σ = 1 have the
  covariance .670574 at a distance of one half, and the kurtosis of their increment is 5.457;
- depth: the distance of two points has the law of `log_distances` in each layer. With σ²/ℓ² = 2 its median
  is about 2e-26 after 200 layers, with 6 it is .54; the collapse begins at 2e^γ = 3.562. The log slope of a
  layer has mean ½ log(σ²/ℓ²) − .635181 and variance 1.233701;
- spectra: the median of log10 σ₁/σ₂ of the Jacobian in 5 dimensions is .141, .240, .823 and 1.472 after 1, 2,
  10 and 20 layers. It stays below .3 after 20 layers that see the inputs, if layers contract
  (σ²/ℓ² = 1/10); it grows as without inputs if they expand (σ²/ℓ² = 1).

Duvenaud et al. (2014), "Avoiding pathologies in very deep networks"; Dunlop et al. (2018), "How deep are deep
Gaussian processes?"; Lu et al. (2020), "Interpretable deep Gaussian processes with moments".
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import ks_2samp, kstest
from torch import Tensor

from net2gp import RBF
from net2gp.deep import (
    Layer,
    collapse_threshold,
    composed,
    distance_quantiles,
    draw,
    draw_jacobians,
    effective_depth,
    increment_kurtosis,
    log_distances,
    log_slope,
)
from net2gp.plots import COLORS, FAINT, INK

sys.path.append(str(Path(__file__).parents[1]))
from claims import Claim, at_most
from pages import Study, Topic, at_least, panels, run, tidy, within

DEPTHS = (1, 2, 5, 10)
"""The depths of the gallery."""

LINE, PLANE = RBF(output_var=2.5), RBF(output_var=0.8)
"""The layers of the gallery in one and two dimensions: a little below the thresholds of the collapse."""

CHANCE = 1e-3
"""The smallest p-value that passes for chance."""


def generator(seed: int) -> torch.Generator:
    """A source of random numbers."""
    return torch.Generator().manual_seed(seed)


def errors_apart(values: Tensor, expected: float) -> float:
    """How many standard errors the mean of the values is from what it should be."""
    return float((values.mean() - expected).abs() / (values.std() / len(values) ** 0.5))


def gallery(quick: bool) -> Study:
    """Draws of one, two, five and ten layers in one and two dimensions."""
    figure = Figure(figsize=(12.6, 8.6), layout="constrained")
    axes = figure.subplots(3, len(DEPTHS))
    x = torch.linspace(-4, 4, 200 if quick else 400, dtype=torch.float64)[:, None]
    rows = (
        (False, 2, "f(… f(x))"),
        (True, 5, "f(… f(x), x)"),
    )
    for row, (connected, seed, label) in enumerate(rows):
        layers = [LINE] * max(DEPTHS)
        draws = draw(layers, x, 3, input_connected=connected, generator=generator(seed))
        for ax, depth in zip(axes[row], DEPTHS, strict=True):
            for line, color in zip(draws.values[depth - 1][..., 0], COLORS, strict=False):
                ax.plot(x[:, 0], line, color=color, lw=1.2)
            ax.set(ylim=(-5, 5), xlabel="x")
            tidy(ax)
        axes[row, 0].set_ylabel(label)
    side = torch.linspace(-2, 2, 24 if quick else 48, dtype=torch.float64)
    grid = torch.cartesian_prod(side, side)
    layers = [Layer(PLANE, 2)] * max(DEPTHS)
    draws = draw(layers, grid, 1, generator=generator(6))
    for ax, depth in zip(axes[2], DEPTHS, strict=True):
        values = draws.values[depth - 1][0, :, 0].reshape(len(side), len(side))
        ax.imshow(values.T, origin="lower", extent=(-2, 2, -2, 2), cmap="RdBu", vmin=-2, vmax=2)
        ax.set(xlabel="$x_1$", xticks=[-2, 0, 2], yticks=[-2, 0, 2])
    axes[2, 0].set_ylabel("$x_2$   (first of two outputs)")
    for ax, depth in zip(axes[0], DEPTHS, strict=True):
        ax.set_title(f"{depth} layer{'s' if depth > 1 else ''}")
    text = (
        "Draws of `deep.draw` at many points at once. Ten composed layers are flat nearly everywhere, with "
        "jumps in between (top), unless every layer sees the inputs too (middle). In the plane deep "
        "functions vary along one direction at each place (bottom). Given the layer before, each layer is a "
        "Gaussian process, and every value is N(0, σ²); values at several points together are not Gaussian."
    )
    claims = (*_marginals(20_000), *_moments(100_000 if quick else 400_000))
    return Study("gallery", "What deep functions look like", text, figure, claims)


def _marginals(count: int) -> list[Claim]:
    x = torch.tensor([[0.3], [1.0]], dtype=torch.float64)
    draws = draw([LINE] * max(DEPTHS), x, count, generator=generator(10))
    scale = 2.5**0.5
    chances = [
        kstest((draws.values[depth - 1][:, point, 0] / scale).numpy(), "norm").pvalue
        for depth in DEPTHS
        for point in range(2)
    ]
    return [at_least("layers 1, 2, 5, 10 are N(0, σ²): smallest p-value", min(chances), CHANCE)]


def _moments(count: int) -> list[Claim]:
    inner, outer = RBF(0.8, 1.3**2), RBF(0.7)
    pair = torch.tensor([[0.0], [0.5]], dtype=torch.float64)
    f = draw([inner, outer], pair, count, generator=generator(11)).outputs[..., 0]
    kernel = composed(outer, inner)
    covariance, kurtosis = (
        float(values[0, 1]) for values in (kernel(pair), increment_kurtosis(kernel, pair))
    )
    parts = (f[:, 0] - f[:, 1]).reshape(50, -1)
    estimates = parts.pow(4).mean(1) / parts.square().mean(1).square()
    return [
        at_most(
            "two layers: |covariance − .670574|, closed form", abs(covariance - 0.670574), 1e-6
        ),
        at_most("two layers: errors of the covariance", errors_apart(f.prod(1), covariance), 4),
        at_most("two layers: |kurtosis − 5.457|, closed form", abs(kurtosis - 5.457), 1e-3),
        at_most("two layers: errors of the kurtosis", errors_apart(estimates, kurtosis), 4),
    ]


def depth(quick: bool) -> Study:
    """Traces over depth below and above the threshold, and the effective depth."""
    count, num_layers = (1000 if quick else 4000), 200
    figure, axes = panels(3, height=3.8)
    made: list[Claim] = []
    for ax, variance, median, seed in ((axes[0], 2.0, 2e-26, 0), (axes[1], 6.0, 0.54, 1)):
        layer = RBF(output_var=variance)
        pair = torch.tensor([[0.0], [0.5]], dtype=torch.float64)
        logs = draw([layer] * num_layers, pair, count, generator=generator(seed)).log_distances()
        chain = log_distances(
            layer, 0.5, num_layers, num_samples=count, generator=generator(seed + 50)
        )
        chance = min(
            ks_2samp(logs[:, at - 1, 1].numpy(), chain[:, at].numpy()).pvalue
            for at in (1, 2, 10, 50, 200)
        )
        found = float(logs[:, -1, 1].median()) / math.log(10)
        made += [
            at_least(f"σ²/ℓ² = {variance:g}: distances as log_distances, p", chance, CHANCE),
            within(
                f"σ²/ℓ² = {variance:g}: log10 of the median distance after 200 layers",
                found,
                math.log10(median) - (1.5 if variance < 3 else 0.1),
                math.log10(median) + (1.5 if variance < 3 else 0.1),
            ),
        ]
        _traces(ax, layer, logs[:5, :, 1] / math.log(10))
        ax.set_title(f"σ²/ℓ² = {variance:g}: {'collapse' if variance < 3 else 'ergodic'}")
    made += _slopes(count)
    depths = _effective(axes[2], quick)
    made.append(
        at_least(
            "effective depth at .8 of the threshold, over its depth at .3",
            depths[0.8] / depths[0.3],
            4,
        )
    )
    made.append(
        at_least(
            "effective depth at 1.25 of the threshold, over its depth at 3",
            depths[1.25] / depths[3.0],
            4,
        )
    )
    text = (
        "The distance of two points over the layers: exact quantiles (`deep.distance_quantiles`) and five "
        "draws. Below σ²/ℓ² = 3.562 all points become one. Above, distances come to a law that does not "
        "depend on the inputs. Both ways more layers change nothing from some depth on "
        "(`deep.effective_depth`), and this depth is large only near the threshold."
    )
    return Study("depth", "How deep is deep?", text, figure, tuple(made))


def _traces(ax: Axes, layer: RBF, traces: Tensor) -> None:
    layers = torch.arange(1, traces.shape[1] + 1)
    bands = distance_quantiles(
        layer, 0.5, len(layers), levels=(0.05, 0.25, 0.5, 0.75, 0.95)
    ) / math.log(10)
    for low, high in ((0, 4), (1, 3)):
        ax.fill_between(layers, bands[:, low], bands[:, high], color=COLORS[0], alpha=0.18, lw=0)
    ax.plot(layers, bands[:, 2], color=COLORS[0], label="median and quantiles")
    for number, trace in enumerate(traces):
        ax.plot(layers, trace, color=INK, lw=0.6, label=None if number else "draws")
    ax.set(xlabel="layer", ylabel="log10 distance of two points")
    ax.legend(frameon=False, fontsize=8, loc="lower left")
    tidy(ax)


def _slopes(count: int) -> list[Claim]:
    """The mean and the variance of log |f'| in one layer, from drawn Jacobians."""
    layer = RBF(output_var=2.0)
    logs = draw_jacobians([layer], torch.zeros(1, 1), 5 * count, generator=generator(60)).log_norms[
        0
    ]
    law = log_slope(layer)
    squares = (logs[:, 0] - law.mean).square()
    return [
        at_most(
            "|mean of log |f'| − (½ log 2 − .635181)|, closed form",
            abs(float(law.mean) - 0.5 * math.log(2) + 0.635181),
            1e-6,
        ),
        at_most("log |f'|: errors of the mean", errors_apart(logs[:, 0], float(law.mean)), 4),
        at_most("log |f'|: errors of the variance 1.233701", errors_apart(squares, 1.233701), 4),
    ]


def _effective(ax: Axes, quick: bool) -> dict[float, int]:
    ratios = (0.3, 0.5, 0.8, 1.25, 2.0, 3.0) if quick else (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
    if not quick:
        ratios += (1.2, 1.25, 1.4, 1.6, 1.8, 2.0, 2.5, 3.0, 4.0, 6.0)
    threshold = collapse_threshold()
    found = {r: effective_depth(RBF(output_var=r * threshold), 0.5) for r in ratios}
    for below, color in ((True, COLORS[1]), (False, COLORS[2])):
        part = [r for r in ratios if (r < 1) == below]
        label = "until points are one" if below else "until inputs are forgotten"
        ax.plot(part, [found[r] for r in part], color=color, marker="o", ms=3.5, label=label)
    ax.axvline(1, color=FAINT, ls=":", label="threshold 2e$^γ$")
    ax.set(xscale="log", yscale="log", xlabel="σ²/ℓ² over the threshold", ylabel="effective depth")
    ax.set_xticks([0.1, 0.3, 1, 3], ["0.1", "0.3", "1", "3"])
    ax.set_title("Layers that matter")
    ax.minorticks_off()
    ax.legend(frameon=False, fontsize=8)
    tidy(ax)
    return found


@dataclass(frozen=True)
class Case:
    """Layers whose Jacobians are drawn."""

    name: str
    ratio: float
    """σ²/ℓ² of layers from the second on."""

    connected: bool


CASES = (
    Case("f(… f(x)), any σ²/ℓ²", 1.0, False),
    Case("f(… f(x), x), σ²/ℓ² = 1", 1.0, True),
    Case("f(… f(x), x), σ²/ℓ² = 1/10", 0.1, True),
)

MEDIANS = {1: 0.141, 2: 0.240, 10: 0.823, 20: 1.472}
"""The medians of log10 σ₁/σ₂ without input connections, by depth."""


def spectra(quick: bool) -> Study:
    """The singular values of Jacobians in five dimensions over 20 layers."""
    count = 40_000 if quick else 100_000
    figure, axes = panels(3, height=3.8)
    made: list[Claim] = []
    for case, color, seed in zip(CASES, COLORS, range(3), strict=False):
        layers = [Layer(RBF(output_var=case.ratio), 5)] * 20
        draws = draw_jacobians(
            layers,
            torch.zeros(1, 5),
            count // 20 if case.connected else count,
            input_connected=case.connected,
            generator=generator(seed),
        )
        logs = torch.stack([draws.log_singular_values(l)[:, 0] for l in range(1, 21)])
        logs = logs / math.log(10)
        apart = (logs[:, :, 0] - logs[:, :, 1]).quantile(
            torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64), dim=1
        )
        axes[0].plot(range(1, 21), apart[1], color=color, label=case.name)
        axes[0].fill_between(range(1, 21), apart[0], apart[2], color=color, alpha=0.15, lw=0)
        made += _spectrum_claims(case, apart[1])
        if case.ratio == 1.0 and not case.connected:
            _bars(axes[1], logs, "Composed layers")
        if case.ratio == 0.1:
            _bars(axes[2], logs, "Layers that see x, σ²/ℓ² = 1/10")
    axes[0].set(xlabel="layers", ylabel="log10 $σ_1/σ_2$ of ∂f/∂x", xticks=[1, 5, 10, 15, 20])
    axes[0].set_title("One direction takes over")
    axes[0].legend(frameon=False, fontsize=8)
    tidy(axes[0])
    text = (
        "The Jacobian of f at a point, drawn exactly with `deep.draw_jacobians`, for functions of five "
        "variables with five outputs. With depth the largest singular value leaves the others behind: f "
        "changes in one direction only, and forgets the others. Layers that see the inputs as well keep all "
        "directions, but only if a layer contracts what it gets from the layer before. Bars go from the 5 to "
        "the 95 percent quantile."
    )
    return Study("spectra", "How many directions are left", text, figure, tuple(made))


def _spectrum_claims(case: Case, medians: Tensor) -> list[Claim]:
    if not case.connected:
        return [
            within(f"{at} layers: median log10 σ₁/σ₂", float(medians[at - 1]), m - 0.02, m + 0.02)
            for at, m in MEDIANS.items()
        ]
    name = f"20 layers that see x, σ²/ℓ² = {case.ratio:g}: median log10 σ₁/σ₂"
    judge, bound = (at_most, 0.3) if case.ratio < 1 else (at_least, 1.0)
    return [judge(name, float(medians[-1]), bound)]


def _bars(ax: Axes, logs: Tensor, title: str) -> None:
    levels = torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)
    for depth, color, shift in zip(
        (1, 2, 10, 20), COLORS, (-0.24, -0.08, 0.08, 0.24), strict=False
    ):
        relative = logs[depth - 1] - logs[depth - 1, :, :1].median()
        low, middle, high = relative.quantile(levels, dim=0)
        places = torch.arange(1, 6) + shift
        ax.vlines(places, low, high, color=color, alpha=0.5, lw=4)
        ax.plot(places, middle, "o", color=color, ms=4, label=f"{depth}")
    ax.set(xlabel="singular value", ylabel="log10, from the largest's median", title=title)
    ax.set(ylim=(-16, 1.5), xticks=range(1, 6))
    ax.legend(frameon=False, fontsize=8, title="layers", title_fontsize=8, loc="lower left")
    tidy(ax)


TOPICS: list[Topic] = [gallery, depth, spectra]

if __name__ == "__main__":
    raise SystemExit(run(TOPICS, __doc__, "deep"))
