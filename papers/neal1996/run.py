"""From networks to Gaussian processes: how the outputs of random networks become normal with width.

    python papers/neal1996/run.py --out figures

Draws networks of growing width, with one and three hidden layers, and holds their outputs against the limit:
histograms, the distance of distribution functions, and the excess kurtosis, which falls as 1/width.
Two outputs of a network are uncorrelated at any width, and dependent at every finite one: the
correlation of their squares falls as 1/width too. Lines are the closed forms of
`net2gp.limits.finite_width`, marks are samples.

Neal (1996), "Bayesian learning for neural networks", chapter 2.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import kstest, norm
from torch import Tensor, nn

from net2gp.limits import FiniteWidth, HiddenLayer, finite_width, nngp, sample_outputs
from net2gp.plots import COLORS, FAINT, INK

sys.path.append(str(Path(__file__).parents[1]))
import findings
from studies import Architecture, Networks, Row, Slope, expected_of, panels, print_table, save

ACTIVATIONS = {"relu": nn.ReLU(), "tanh": nn.Tanh()}
LABELS = {"relu": "ReLU", "tanh": "tanh"}
X = torch.tensor([[1.0, 1.0]], dtype=torch.float64)
NUM_OUTPUTS = 64
NUM_GROUPS = 20
NUM_TESTED = 5000


@dataclass(frozen=True)
class Estimate:
    """A number from a sample, and its standard error."""

    value: float
    error: float


@dataclass(frozen=True, eq=False)
class Width:
    """Outputs of networks of one width, beside what is known of them."""

    width: int
    kurtosis: Estimate
    correlation: Estimate
    square_correlation: Estimate
    distance: float
    p_value: float
    known_kurtosis: float
    known_square_correlation: float
    known_distance: float


@dataclass(frozen=True, eq=False)
class Case:
    """One architecture at growing widths."""

    setting: dict[str, Any]
    widths: list[Width]

    @property
    def name(self) -> str:
        """The architecture in words."""
        depth = self.setting["depth"]
        return f"{LABELS[self.setting['activation']]}, {depth} hidden layer{'s' * (depth > 1)}"

    def of(self, name: str) -> np.ndarray:
        """One of the numbers, or its estimate, at every width."""
        values = [getattr(one, name) for one in self.widths]
        return np.array([v.value if isinstance(v, Estimate) else v for v in values], float)

    def errors(self, name: str) -> np.ndarray:
        """The standard errors of one of the estimates."""
        return np.array([getattr(one, name).error for one in self.widths])

    def slope(self, name: str) -> Slope:
        """p in estimate ∝ widthᵖ, over the widths that expected.toml names.

        The correlation of squares r stands for the variance of the random kernel, v = 2r / (1 − 3r).
        """
        chosen = self.of("width") >= self.setting["slope_from"]
        values = self.of(name)[chosen]
        if name == "square_correlation":
            values = 2 * values / (1 - 3 * values)
        return Slope.fit(list(self.of("width")[chosen]), torch.as_tensor(values))


def prior(setting: dict[str, Any]) -> dict[str, float]:
    """The variances as net2gp takes them."""
    return {"weight_var": setting["weight_var"], "bias_var": setting["bias_var"]}


def limit_variance(setting: dict[str, Any]) -> float:
    """k(x, x) of the Gaussian process at infinite width."""
    network = architecture(setting).module(1)
    kernel = nngp(network, weight_var=setting["weight_var"], bias_var=setting["bias_var"])
    return float(kernel.diag(X))


def architecture(setting: dict[str, Any]) -> Architecture:
    """The network of a case, but for its width."""
    return Architecture(2, setting["depth"], ACTIVATIONS[setting["activation"]], **prior(setting))


def measure(setting: dict[str, Any], width: int, count: int, generator: torch.Generator) -> Width:
    """Draw `count` networks with many outputs each, and take their moments."""
    layers = [HiddenLayer(ACTIVATIONS[setting["activation"]], width)] * setting["depth"]
    f = sample_outputs(
        layers, X, count, num_outputs=NUM_OUTPUTS, generator=generator, **prior(setting)
    )[:, 0]
    f = f / limit_variance(setting) ** 0.5
    known = finite_width(layers, X, **prior(setting))
    return Width(
        width=width,
        kurtosis=estimate(excess_kurtosis, f),
        correlation=estimate(mean_correlation, f),
        square_correlation=estimate(mean_correlation, f.square()),
        # outputs of one network share its kernel, and a test wants independent draws
        distance=float(kstest(f[:, 0].numpy(), norm.cdf).statistic),
        p_value=float(kstest(f[:NUM_TESTED, 0].numpy(), norm.cdf).pvalue),
        known_kurtosis=float(known.excess_kurtosis),
        known_square_correlation=float(known.square_correlation),
        known_distance=edgeworth_distance(known),
    )


def edgeworth_distance(known: FiniteWidth) -> float:
    """max |F − Φ| for a mixture of normals over the random kernel K̂, to first order in 1/width.

    F(z) − Φ(z) = −φ(z) (z (E K̂ − K) / 2K + (z³ − 3z) Var K̂ / 8K²) in units of the limit.
    """
    z = np.linspace(-5, 5, 2001)
    shift, variance = float(known.shift / known.kernel), float(known.excess_kurtosis) / 3
    return float(np.abs(norm.pdf(z) * (z * shift / 2 + (z**3 - 3 * z) * variance / 8)).max())


def estimate(statistic: Any, f: Tensor) -> Estimate:
    """A statistic of all networks; its standard error from the spread over groups of them."""
    groups = torch.stack([statistic(part) for part in f.tensor_split(NUM_GROUPS)])
    return Estimate(float(statistic(f)), float(groups.std()) / NUM_GROUPS**0.5)


def excess_kurtosis(f: Tensor) -> Tensor:
    """E[f⁴] / E[f²]² − 3 of outputs (S, C) with mean zero and one law."""
    return f.pow(4).mean() / f.square().mean().square() - 3


def mean_correlation(f: Tensor) -> Tensor:
    """The correlation of two columns of (S, C), averaged over all pairs."""
    r = torch.corrcoef(f.T)
    return (r.sum() - r.trace()) / (r.numel() - len(r))


def study(count: int, seed: int = 0) -> list[Case]:
    """Every case of expected.toml at every width."""
    generator = torch.Generator().manual_seed(seed)
    cases = []
    for setting in expected_of(__file__)["case"]:
        widths = [measure(setting, width, count, generator) for width in setting["widths"]]
        cases.append(Case(setting, widths))
    return cases


def compare(cases: list[Case], count: int) -> list[Row]:
    """What should hold, beside what was found."""
    tolerance = expected_of(__file__)["tolerance"]
    rows = []
    for case in cases:
        rows += _moments(case, "kurtosis", "excess kurtosis", tolerance)
        rows += _moments(case, "square_correlation", "correlation of squares", tolerance)
        worst = max(case.widths, key=lambda one: abs(one.correlation.value) / one.correlation.error)
        label = f"{case.name}: correlation of outputs, width {worst.width}"
        allowed = tolerance["standard_errors"] * worst.correlation.error
        rows.append(Row(label, 0.0, worst.correlation.value, allowed))
        one = next(w for w in case.widths if w.width == case.setting["distance_at"])
        label = f"{case.name}: distance from the limit, width {one.width}"
        # an empirical distribution function is about 0.87/√S from its own law
        rows.append(Row(label, one.known_distance, one.distance, 2 / count**0.5))
        last = case.widths[-1]
        label = f"{case.name}: p that it is the limit, width {last.width}"
        rows.append(Row(label, 0.5, last.p_value, 0.5 - tolerance["p_value"]))
    return rows


def _moments(case: Case, name: str, words: str, tolerance: dict[str, float]) -> list[Row]:
    """The slope over the width, and the value at the largest one."""
    last = case.widths[-1]
    found, known = getattr(last, name), getattr(last, f"known_{name}")
    # the closed form is the leading order in 1/width where there are several layers
    higher = 0.0 if case.setting["depth"] == 1 else tolerance["second_order"] * known
    allowed = tolerance["standard_errors"] * found.error + higher
    label = f"{case.name}: {words}"
    return [
        Row(f"{label}, slope", -1.0, case.slope(name).value, tolerance["slope"]),
        Row(f"{label}, width {last.width}", known, found.value, allowed),
    ]


def draw_histograms(count: int, seed: int = 0) -> Figure:
    """Outputs of networks, drawn weight by weight, against the density of the limit."""
    setting, widths = expected_of(__file__)["case"][0], (1, 4, 64)
    scale = limit_variance(setting) ** 0.5
    generator = torch.Generator().manual_seed(seed)
    figure, axes = panels(len(widths), height=2.8)
    grid = np.linspace(-6, 6, 241)
    for ax, width in zip(axes, widths, strict=True):
        drawn = Networks.draw(architecture(setting), width, count, generator)
        f = drawn(X.float())[:, 0].numpy() / scale
        edges = np.linspace(-6, 6, 41)
        ax.hist(f, edges, density=True, color=COLORS[0], alpha=0.55, label="networks")
        ax.plot(grid, norm.pdf(grid), color=INK, linewidth=1.2, label="limit")
        ax.set_yscale("log")
        ax.set_ylim(1e-5, 10)
        ax.set_title(f"width {width}", fontsize=9)
        ax.set_xlabel("output / standard deviation of the limit")
    axes[0].set_ylabel("density")
    axes[-1].legend(frameon=False, loc="upper right")
    return figure


def draw_widths(cases: list[Case], count: int) -> Figure:
    """Kurtosis, correlations and distance over the width, on logarithmic axes."""
    figure, axes = panels(3, height=3.3)
    for case, color, marker in zip(cases, COLORS, "osD^", strict=False):
        width = case.of("width")
        style: dict[str, Any] = {"color": color, "marker": marker, "linestyle": "none"}
        for ax, name in zip(axes, ("kurtosis", "square_correlation"), strict=False):
            ax.plot(width, case.of(f"known_{name}"), color=color, linewidth=1)
            ax.errorbar(
                width, case.of(name), case.errors(name), markersize=4, label=case.name, **style
            )
        axes[2].plot(width, case.of("known_distance"), color=color, linewidth=1)
        axes[2].plot(width, case.of("distance"), markersize=4, **style)
    _floor(
        axes[1],
        max(np.abs(case.of("correlation")).max() for case in cases),
        "correlation of outputs: below",
    )
    _floor(axes[2], 0.87 / count**0.5, "sampling error")
    labels = "excess kurtosis", "correlation of squares of two outputs", "distance from the limit"
    for ax, label in zip(axes, labels, strict=True):
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xlabel("width")
        ax.set_ylabel(label)
    axes[1].legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0.0, 0.12))
    return figure


def _floor(ax: Axes, height: float, label: str) -> None:
    ax.axhline(height, color=FAINT, linestyle="--", linewidth=1)
    ax.text(0.02, height * 1.15, label, color=FAINT, transform=ax.get_yaxis_transform(), fontsize=8)


def main(arguments: list[str] | None = None) -> int:
    """Print the table, write the figures; the exit status says whether the numbers agree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder for the figures")
    parser.add_argument("--count", type=int, default=100_000, help="networks of each width")
    options = findings.parse(parser, arguments, quick={"count": 20_000})
    cases = study(options.count)
    agree = print_table(compare(cases, options.count))
    save(draw_histograms(options.count), options.out, "neal1996_histograms.png")
    save(draw_widths(cases, options.count), options.out, "neal1996_width.png")
    return 0 if agree else 1


if __name__ == "__main__":
    raise SystemExit(main())
