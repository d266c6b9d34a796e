"""Deep networks as Gaussian processes: MNIST by regression, its uncertainty, and the phase diagram.

    python papers/lee2018/run.py --out figures
    python papers/lee2018/run.py --out figures --runs 1k 10k

An exact Gaussian process with the NNGP kernel of an ordinary `nn.Sequential` is fitted to digits as a
regression: images with mean zero and variance one, one-hot labels less 0.1, no noise but a jitter
of 1e-10. Prints accuracy, mean squared error and how well the variance predicts it beside the numbers of
expected.toml; draws variance against error in bins of 100 digits, and the accuracy at depth 50 over weight
and bias variances with the critical line on top. Digits come from mnist.npz in NET2GP_DATA.

Lee, Bahri, Novak, Schoenholz, Pennington & Sohl-Dickstein (2018), "Deep neural networks as Gaussian
processes", table 1 and figures 3 and 4.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from scipy.stats import pearsonr, spearmanr
from torch import Tensor, nn

import net2gp as n2g
from net2gp.data import mnist
from net2gp.errors import JitterAdded
from net2gp.limits import critical_line, nngp
from net2gp.metrics import accuracy
from net2gp.plots import COLORS, INK

sys.path += [str(folder) for folder in Path(__file__).parents[:2]]
import findings
from findings import Entry
from lookup import LookupTanh
from regression_images import Digits, multilayer
from studies import Row, expected_of, panels, print_table, save

JITTER = 1e-10
BIN = 100
SIZES = {"100": 100, "1k": 1000, "5k": 5000, "10k": 10_000}


ACTIVATIONS = {"relu": nn.ReLU(), "tanh": nn.Tanh(), "lookup": LookupTanh()}
LABELS = {"relu": "ReLU", "tanh": "tanh", "lookup": "tanh(table)"}


def training_digits(count: int) -> Digits:
    """The first count/10 training digits of every class, in the order of the file."""
    return Digits.of(*mnist("train")).first(count)


def held_out_digits(count: int = 10_000) -> Digits:
    """The first `count` test digits."""
    images, labels = mnist("test")
    return Digits.of(images[:count], labels[:count])


@dataclass(frozen=True, eq=False)
class Result:
    """A regression's score, and variance and squared error of each test digit: (M,)."""

    accuracy: float
    mean: Tensor
    variance: Tensor
    error: Tensor
    prior_variance: float
    seconds: float

    @property
    def bins(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean variance and mean error of 100 digits after another, in the order of their variance."""
        order = self.variance.argsort()[: len(self.variance) // BIN * BIN]
        variance, error = (t[order].reshape(-1, BIN).mean(1) for t in (self.variance, self.error))
        return variance.numpy(), error.numpy()

    @property
    def numbers(self) -> dict[str, float]:
        """What is compared with the reference."""
        return {
            "accuracy": self.accuracy,
            "mse": float(self.error.mean()),
            "pearson": float(pearsonr(*self.bins).statistic),
            "spearman": float(spearmanr(self.variance, self.error).statistic),
            "q": self.prior_variance,
        }


def regress(setting: dict[str, Any], train: Digits, test: Digits) -> Result:
    """Condition the NNGP on the training digits and score it on the test digits."""
    start = time.perf_counter()
    network = multilayer(ACTIVATIONS[setting["activation"]], setting["depth"])
    kernel = nngp(network, weight_var=setting["weight_var"], bias_var=setting["bias_var"])
    posterior = n2g.condition(kernel, (train.x, train.y), n2g.Gaussian(noise_var=JITTER))
    found = posterior.marginal(test.x)
    error = (found.mean - test.y).square().mean(1)
    return Result(
        accuracy=float(accuracy(found.mean, test.labels)),
        mean=found.mean,
        variance=found.variance[:, 0],
        error=error,
        prior_variance=float(kernel.diag(test.x[:1])),
        seconds=time.perf_counter() - start,
    )


def name_of(setting: dict[str, Any]) -> str:
    """A run as the paper names it: digits, activation, depth, weight and bias variance."""
    parts = (setting[key] for key in ("depth", "weight_var", "bias_var"))
    return f"{setting['run']} {LABELS[setting['activation']]}-" + "-".join(f"{p:g}" for p in parts)


def classify(run: str) -> list[tuple[dict[str, Any], Result]]:
    """Every regression of expected.toml with this many digits."""
    train, test = training_digits(SIZES[run]), held_out_digits()
    settings = [one for one in expected_of(__file__)["mnist"] if one["run"] == run]
    return [(setting, regress(setting, train, test)) for setting in settings]


def entries(setting: dict[str, Any], result: Result) -> Iterator[Entry]:
    """The numbers of a run beside those of expected.toml."""
    tolerance, numbers = expected_of(__file__)["tolerance"], result.numbers
    if "paper" in setting:
        found, name = numbers["accuracy"], f"{name_of(setting)}: accuracy of table 1"
        yield Entry(
            name, setting["paper"], found, None, True, "shown", "the paper's are other digits"
        )
    for key, found in numbers.items():
        if key in setting:
            allowed = tolerance[key] * (setting[key] if key == "q" else 1)
            holds = abs(found - setting[key]) <= allowed
            yield Entry(f"{name_of(setting)}: {key}", setting[key], found, allowed, holds)
    least, found = tolerance["pearson_at_least"], numbers["pearson"]
    yield Entry(f"{name_of(setting)}: pearson", least, found, 0.0, found >= least, "at least")


def differences(setting: dict[str, Any], result: Result) -> Iterator[str]:
    """What is further from the reference than expected.toml allows, in words."""
    for one in entries(setting, result):
        if not one.holds:
            bound = "at least " if one.bound == "at least" else ""
            yield f"{one.name} is {one.ours:.6g}, expected {bound}{one.paper:.6g} ± {one.allowed:g}"


def print_run(setting: dict[str, Any], result: Result) -> None:
    """A run in two lines: found, and below it what the reference has."""
    columns = {"q": 9, "accuracy": 10, "mse": 10, "pearson": 9, "spearman": 10}
    found = "".join(f"{result.numbers[key]:>{width}.4f}" for key, width in columns.items())
    known = "".join(
        f"{setting[key]:>{width}.4f}" if key in setting else " " * width
        for key, width in columns.items()
    )
    print(f"{name_of(setting):<28}{found}{result.seconds:>9.1f}")
    paper = f"   paper {setting['paper']:.4f}" if "paper" in setting else ""
    print(f"{'':<28}{known}{paper}", flush=True)


def draw_uncertainty(shown: list[tuple[dict[str, Any], Result]]) -> Figure:
    """Mean squared error against predicted variance, a point for each 100 digits."""
    figure, axes = panels(len(shown), height=3.0)
    for ax, (setting, result), color in zip(np.atleast_1d(axes), shown, COLORS, strict=False):
        variance, error = result.bins
        power = int(np.floor(np.log10(variance.max())))
        variance = variance / 10.0**power
        ax.scatter(variance, error, s=14, color=color, alpha=0.8, linewidths=0)
        slope, offset = np.polyfit(variance, error, 1)
        ends = np.array([variance.min(), variance.max()])
        ax.plot(ends, slope * ends + offset, color=INK, linewidth=1)
        ax.set_title(f"{name_of(setting)}\nPearson {result.numbers['pearson']:.3f}", fontsize=9)
        ax.set_xlabel(f"predicted variance, in $10^{{{power}}}$")
        ax.set_ylabel("mean squared error")
        ax.set_ylim(0)
    return figure


@dataclass(frozen=True, eq=False)
class PhaseMap:
    """Accuracies (B, W) over bias and weight variances beside those of the reference."""

    activation: str
    weight_vars: list[float]
    bias_vars: list[float]
    found: np.ndarray
    reference: np.ndarray

    @property
    def ridge(self) -> list[float]:
        """The best weight variance of each row; of equal ones the smallest."""
        return [self.weight_vars[i] for i in self.found.argmax(1)]

    @property
    def reference_ridge(self) -> list[float]:
        """The same of the reference."""
        return [self.weight_vars[i] for i in self.reference.argmax(1)]

    @property
    def resolved(self) -> np.ndarray:
        """Cells where the reference tells digits apart: in the others its kernel is a constant."""
        return self.reference > 0.6

    @property
    def gap(self) -> float:
        """The largest difference from the reference in cells that it resolves."""
        return float(np.abs(self.found - self.reference)[self.resolved].max())


def phase_map(activation: str) -> PhaseMap:
    """The accuracy in each cell of the reference's grid."""
    setting = expected_of(__file__)["phase"]
    train, test = training_digits(setting["num_train"]), held_out_digits(setting["num_test"])
    found = []
    for bias_var in setting["bias_vars"]:
        for weight_var in setting["weight_vars"]:
            cell = {"activation": activation, "depth": setting["depth"]}
            cell |= {"weight_var": weight_var, "bias_var": bias_var}
            with warnings.catch_warnings():
                # deep in the ordered phase the kernel is a constant, and singular
                warnings.simplefilter("ignore", JitterAdded)
                found.append(regress(cell, train, test).accuracy)
    reference = np.array(setting["accuracy"][activation])
    axes = setting["weight_vars"], setting["bias_vars"]
    return PhaseMap(activation, *axes, np.array(found).reshape(reference.shape), reference)


def print_map(shown: PhaseMap) -> None:
    """Differences from the reference cell by cell, and the best weight variance of each row."""
    print(
        f"{LABELS[shown.activation]} at depth 50: found − reference in points, at weight variances"
    )
    print(" " * 10 + "".join(f"{w:>8g}" for w in shown.weight_vars) + "    best  reference")
    ridges = zip(shown.ridge, shown.reference_ridge, strict=True)
    for bias_var, found, reference, (best, known) in zip(
        shown.bias_vars, shown.found, shown.reference, ridges, strict=True
    ):
        cells = "".join(
            f"{100 * (a - b):>8.1f}" if b > 0.6 else f"   ({a:.2f})"[-8:]
            for a, b in zip(found, reference, strict=True)
        )
        print(f"bias {bias_var:<5g}{cells}{best:>8g}{known:>11g}", flush=True)


def draw_phase(maps: list[PhaseMap]) -> Figure:
    """Heat maps of the accuracy: critical line, and the best cell of each row in a frame."""
    figure, axes = panels(1)
    axes.remove()
    figure.set_size_inches(5.0, 2.6 * len(maps) + 0.4)
    rows = list(np.atleast_1d(figure.subplots(len(maps), 1, sharex=True)))
    for ax, shown in zip(rows, maps, strict=True):
        mesh = ax.imshow(
            shown.found, origin="lower", cmap="viridis", vmin=0, vmax=0.9, aspect="auto"
        )
        for (i, j), value in np.ndenumerate(shown.found):
            color = "white" if value < 0.6 else INK
            text = f"{value:.2f}"[1:]
            ax.text(j, i, text, ha="center", va="center", color=color, fontsize=8, zorder=5)
        marks: list[Artist] = [
            _draw_line(ax, shown),
            _frames(ax, shown.found, "here", "white", "-"),
            _frames(ax, shown.reference, "in the reference", COLORS[1], ":"),
        ]
        table = " through a lookup table" if shown.activation == "lookup" else ""
        name = "ReLU" if shown.activation == "relu" else "tanh"
        ax.set_title(f"{name}{table}, depth 50", fontsize=9)
        ax.set_xticks(range(len(shown.weight_vars)), [f"{w:g}" for w in shown.weight_vars])
        ax.set_yticks(range(len(shown.bias_vars)), [f"{b:g}" for b in shown.bias_vars])
        ax.set_ylabel("bias variance $\\sigma_b^2$")
        ax.spines[["top", "right"]].set_visible(True)
    rows[-1].set_xlabel("weight variance $\\sigma_w^2$")
    figure.colorbar(mesh, ax=rows, label="test accuracy", shrink=0.5, pad=0.02)
    box = {"frameon": True, "facecolor": "#bbbbbb", "edgecolor": "none"}
    figure.legend(handles=marks, loc="outside lower center", ncols=3, fontsize=8, **box)
    return figure


def _frames(ax: Axes, accuracies: np.ndarray, where: str, color: str, style: str) -> Rectangle:
    """A frame around the best cell of each row."""
    look: dict[str, Any] = {"fill": False, "edgecolor": color, "linestyle": style, "linewidth": 1.6}
    for row, column in enumerate(accuracies.argmax(1)):
        frame = Rectangle((column - 0.46, row - 0.46), 0.92, 0.92, label=f"best {where}", **look)
        ax.add_patch(frame)
    return frame


def _draw_line(ax: Axes, shown: PhaseMap) -> Line2D:
    """The critical line in a plot whose axes run over the cells, not the variances."""
    if shown.activation == "relu":
        # with a bias the variance of a ReLU network diverges instead
        bias_vars = torch.zeros(1)
        weight_vars = critical_line(nn.ReLU(), bias_vars)
    else:
        # denser towards zero, where the line is steep
        bias_vars = torch.linspace(0, 1, 60, dtype=torch.float64).square() * shown.bias_vars[-1]
        weight_vars = critical_line(nn.Tanh(), bias_vars)
    x = np.interp(weight_vars, shown.weight_vars, np.arange(len(shown.weight_vars)))
    y = np.interp(bias_vars, shown.bias_vars, np.arange(len(shown.bias_vars)))
    (line,) = ax.plot(x, y, color=COLORS[1], linewidth=1.6, label="critical")
    if len(bias_vars) == 1:
        line.set(marker="o", markersize=17, markerfacecolor="none", markeredgewidth=1.6)
        return Line2D([], [], color=COLORS[1], linewidth=1.6, label="critical")
    return line


def check_critical_line() -> list[Row]:
    """Points of the critical line of tanh beside those of expected.toml."""
    rows, expected = [], expected_of(__file__)
    for point in expected["critical"]:
        found = float(critical_line(nn.Tanh(), point["bias_var"]))
        name = f"tanh critical weight variance at bias variance {point['bias_var']:g}"
        allowed = expected["tolerance"]["critical"] * point["weight_var"]
        rows.append(Row(name, point["weight_var"], found, allowed))
    return rows


def check_maps(maps: list[PhaseMap]) -> Iterator[str]:
    """Where the maps differ from the reference by more than expected.toml allows, in words."""
    tolerance = expected_of(__file__)["tolerance"]["phase"]
    for shown in maps:
        allowed = tolerance[shown.activation]
        if shown.gap > allowed:
            yield f"{LABELS[shown.activation]}: a cell differs by {shown.gap:.3f}, more than {allowed}"
        # with exact expectations the ridge of tanh reaches further into the ordered phase
        if shown.activation != "tanh" and shown.ridge != shown.reference_ridge:
            yield f"{LABELS[shown.activation]}: best at {shown.ridge}, not {shown.reference_ridge}"


def map_entries(maps: list[PhaseMap]) -> Iterator[Entry]:
    """The largest difference of each map from the reference."""
    tolerance = expected_of(__file__)["tolerance"]["phase"]
    for one in maps:
        allowed, wrong = tolerance[one.activation], list(check_maps([one]))
        name = f"{LABELS[one.activation]} at depth 50: largest difference of a cell"
        yield Entry(name, 0.0, one.gap, allowed, not wrong, "at most", "; ".join(wrong))


def main(arguments: list[str] | None = None) -> int:
    """Print the tables, write the figures; the exit status says whether the numbers agree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder for the figures")
    parser.add_argument(
        "--runs",
        nargs="+",
        choices=[*SIZES, "phase"],
        default=["100", "1k", "5k", "phase"],
        help="numbers of training digits, and the phase diagram",
    )
    options = findings.parse(parser, arguments, quick={"runs": ["100", "1k"]})
    wrong: list[str] = []
    runs = [run for run in options.runs if run in SIZES]
    if runs:
        print(f"{'':<36}q  accuracy       mse  pearson  spearman  seconds")
    for run in runs:
        shown = classify(run)
        for setting, result in shown:
            print_run(setting, result)
            findings.add(entries(setting, result))
            wrong += differences(setting, result)
        tabled = [pair for pair in shown if "paper" in pair[0]]
        save(draw_uncertainty(tabled or shown), options.out, f"lee2018_uncertainty_{run}.png")
    if "phase" in options.runs:
        wrong += [] if print_table(check_critical_line()) else ["the critical line differs"]
        maps = [phase_map(name) for name in ("tanh", "lookup", "relu")]
        for one in maps:
            print_map(one)
        findings.add(map_entries(maps))
        wrong += check_maps(maps)
        save(draw_phase(maps), options.out, "lee2018_phase.png")
    print(*(wrong or ["all numbers agree"]), sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
