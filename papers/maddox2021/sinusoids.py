"""Sinusoids from few points: the Gaussian process of a trained network against what else one could do.

    python papers/maddox2021/sinusoids.py --out figures [--quick]

A tanh network learns a source task, a sinusoid or a straight line, and is then adapted to a sinusoid of
which 5, 10 or 20 points are known: as the Gaussian process that it is, by fine-tuning, and with the other
models of baselines.py. Prints negative log likelihood and error on other points of the target, says against
which methods the Gaussian process of the trained network has the better likelihood, and judges the claims of
sinusoids.toml. Point predictors get as variance their mean squared residual on the known
points of the target, at least 1e-3. Four adaptations of a published network are reproduced where the folder
`reference` is beside NET2GP_DATA. Draws examples and scores.

Maddox, Tang, Moreno, Wilson & Damianou (2021), "Fast adaptation with linearized neural networks"; the tasks
are those of Yoon et al. (2018), "Bayesian model-agnostic meta-learning".
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.stats import wilcoxon
from torch import Tensor

import net2gp as n2g
from net2gp import metrics
from net2gp.data import data_folder
from net2gp.plots import COLORS, FAINT, INK, plot_regression

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parent))
import claims
import findings
from baselines import (
    FAMILIES,
    NOISE_FLOOR,
    SIZES,
    Batch,
    DeepKernel,
    FeatureRegression,
    Law,
    Problems,
    Stack,
    adapted,
    fine_tuned,
    fisher_kernel,
    mlp,
    point_law,
    problems,
    single,
    squared_errors,
    stacked,
    train_source,
)
from studies import Row, print_table, save

GRID = torch.linspace(-6, 6, 121, dtype=torch.float64)[:, None]
FEATURES = mlp(1, 40, 40, 100, seed=0, tanh_at_the_end=True)
NETWORK = mlp(1, 40, 40, 1, seed=0)
CLAIMED, CONVERGED = (
    "GP, zero mean, source noise",
    "GP of converged network, zero mean, source noise",
)
"""The published method, but for its prior variance, which the evidence chooses here; and the same of a
network trained with Adam until its source is learned, which the published schedule often does not reach."""

CLAIMS = {"as published": CLAIMED, "converged": CONVERGED}
CONFIDENCE = 0.95

Scores = dict[str, Tensor]
"""By method, a number for each size, family and seed: (N, F, S)."""


@dataclass(frozen=True)
class Options:
    """How many tasks, and how long each model learns: epochs of the source network, steps of the others."""

    seeds: int = 20
    epochs: int = 2500
    converging: int = 2000
    fine_tuning: int = 1000
    ablr: int = 1000
    dkl: int = 300
    rbf: int = 500
    further: int = 150
    """Steps of ABLR and DKL on the target, as published of ABLR."""


QUICK = Options(seeds=6, fine_tuning=500, rbf=200)
"""Minutes on two cores."""


@dataclass(frozen=True, eq=False)
class Models:
    """Everything that is learned from the sources alone, and the networks before that."""

    options: Options
    source: Batch
    start: Stack
    trained: Stack
    converged: Stack
    features: FeatureRegression
    deep: DeepKernel

    @staticmethod
    def learn(source: Batch, options: Options) -> Models:
        """From the sources of all tasks."""
        seeds = [seed for _ in FAMILIES for seed in range(options.seeds)]
        start = stacked([mlp(1, 40, 40, 1, seed=seed) for seed in seeds])
        trained = train_source(start, source, options.epochs)
        converged = fine_tuned(start, source, options.converging)
        drawn = [mlp(1, 40, 40, 100, seed=seed, tanh_at_the_end=True) for seed in seeds]
        features = FeatureRegression.start(drawn).learned(source, options.ablr)
        deep = DeepKernel(source, trained[:-2])
        deep.learn(source, options.dkl)
        return Models(options, source, start, trained, converged, features, deep)

    def noises(self, stack: Stack) -> list[float]:
        """The published noise variance: the network's squared error on its source, at least the floor."""
        return squared_errors(stack, self.source).clamp(min=NOISE_FLOOR).tolist()

    def laws(self, points: Batch, x: Tensor) -> dict[str, Law]:
        """What each method predicts at x after it has seen the points."""
        return self.processes(points, x) | self.untrained(points, x) | self.others(points, x)

    def processes(self, points: Batch, x: Tensor) -> dict[str, Law]:
        """Gaussian processes of the trained networks."""
        networks, converged = (
            [single(NETWORK, stack, i) for i in range(len(x))]
            for stack in (self.trained, self.converged)
        )
        noises, fewer = self.noises(self.trained), self.noises(self.converged)
        return {
            CLAIMED: adapted(networks, points, x, noises, zero_mean=True),
            "GP, zero mean, own noise": adapted(networks, points, x, None, zero_mean=True),
            "GP, network mean, source noise": adapted(networks, points, x, noises),
            "GP, network mean, own noise": adapted(networks, points, x, None),
            "GP, zero mean, source noise, unit prior": adapted(
                networks, points, x, noises, zero_mean=True, prior_var=1.0
            ),
            CONVERGED: adapted(converged, points, x, fewer, zero_mean=True),
            "Fisher kernel, source noise": fisher_kernel(networks, self.source, points, x, noises),
        }

    def untrained(self, points: Batch, x: Tensor) -> dict[str, Law]:
        """Without the source: networks at their start, the same in all families, and an RBF kernel."""
        some, times = slice(0, self.options.seeds), len(FAMILIES)
        few, at = Batch(points.x[some], points.y[some]), x[some]
        networks = [single(NETWORK, self.start, i) for i in range(len(x))]
        own = {
            f"untrained GP, {word} mean, own noise": adapted(
                networks[some], few, at, None, zero_mean=word == "zero"
            ).repeat(times)
            for word in ("zero", "network")
        }
        noises = self.noises(self.trained)
        rbf = DeepKernel(few)
        rbf.learn(few, self.options.rbf)
        same = adapted(networks, points, x, noises, zero_mean=True)
        return {f"untrained {CLAIMED}": same, **own, "RBF GP": rbf.law(at).repeat(times)}

    def others(self, points: Batch, x: Tensor) -> dict[str, Law]:
        """Baselines that start from the source."""
        steps, further = self.options.fine_tuning, self.options.further
        deep = DeepKernel(self.source, self.trained[:-2])
        deep.load_state_dict(self.deep.state_dict())
        deep.learn(points, further)
        networks = {
            "fine-tuned, all layers": fine_tuned(self.trained, points, steps),
            "fine-tuned, last layer": fine_tuned(self.trained, points, steps, last=True),
            "source network": self.trained,
        }
        return {
            "ABLR": self.features.learned(points, further).law(FEATURES, points, x),
            "DKL": deep.law(x),
            **{name: point_law(stack, points, x) for name, stack in networks.items()},
        }


def score(laws: Sequence[dict[str, Law]], test: Batch) -> tuple[Scores, Scores]:
    """Negative log likelihood and root mean squared error on the test points, of laws for each size."""
    count = test.x.shape[1]
    surprise: Scores = {}
    error: Scores = {}
    for name in laws[0]:
        cells = [
            (m[:count], v[:count], y[:, 0])
            for law in (each[name] for each in laws)
            for m, v, y in zip(law.mean, law.var, test.y, strict=True)
        ]
        shape = (len(laws), len(FAMILIES), -1)
        losses = [metrics.gaussian_nll((m, v), y) for m, v, y in cells]
        surprise[name] = torch.stack(losses).reshape(shape)
        error[name] = torch.stack([metrics.rmse(m, y) for m, _, y in cells]).reshape(shape)
    return surprise, error


def print_scores(surprise: Scores, error: Scores) -> None:
    """A table for each family: mean ± standard error over seeds, and the median."""
    for f, family in enumerate(FAMILIES):
        heads = "".join(f"{f'NLL, {n} points':>30}" for n in SIZES)
        print(f"\n{family:<50}{heads}{'RMSE':>24}")
        for name, values in surprise.items():
            cells = [v[f] for v in values]
            line = "".join(
                f"{float(v.mean()):>10.2f} ± {standard_error(v):<7.2f} ({float(v.median()):>6.2f})"
                for v in cells
            )
            errors = [f"{float(v[f].mean()):.2f}±{standard_error(v[f]):.2f}" for v in error[name]]
            print(f"{name:<50}{line}   {'  '.join(errors)}")


def standard_error(values: Tensor) -> float:
    """Of the mean."""
    return float(values.std() / len(values) ** 0.5)


def verdict(ours: Tensor, theirs: Tensor, confidence: float) -> str:
    """+ if ours is smaller, − if larger, · if neither, by Wilcoxon's signed-rank test over the seeds.

    Differences are paired, and some are in the thousands: a test on ranks does not mind.
    """
    differences = (ours - theirs).numpy()
    if not differences.any() or wilcoxon(differences).pvalue >= 1 - confidence:
        return "·"
    return "+" if float(np.median(differences)) < 0 else "−"


def verdicts(surprise: Scores, claimed: str, confidence: float) -> dict[str, str]:
    """Against each other method, a sign for each family and size: `+++ +++ +++`."""
    return {
        name: " ".join(
            "".join(
                verdict(surprise[claimed][n, f], values[n, f], confidence)
                for n in range(len(values))
            )
            for f in range(len(FAMILIES))
        )
        for name, values in surprise.items()
        if name != claimed
    }


def print_verdicts(surprise: Scores, confidence: float) -> None:
    """Against each other method, where the process is better in negative log likelihood, and where worse."""
    for claimed in CLAIMS.values():
        print(f"\nNLL of {claimed} against: {', '.join(FAMILIES)}; {SIZES} points each")
        for name, signs in verdicts(surprise, claimed, confidence).items():
            print(f"{name:<50}{signs}")


def ranked(
    name: str, margin: Tensor, word: str, *, exception: str = "", quick: bool = False
) -> claims.Claim:
    """That the process is "better" or "no worse" by the differences (S,) and Wilcoxon's signed-rank test."""
    sign = verdict(torch.zeros_like(margin), margin, CONFIDENCE)
    middle = float(margin.median())
    better = middle > 0 if quick else sign == "+"
    holds = better if word == "better" else sign != "−"
    found = f"median {middle:+.2f} ({sign})"
    stale = sign == "+" and not quick
    return claims.Claim(f"{name}: {word}", found, holds, exception, stale=stale)


def agrees(surprise: Scores, quick: bool) -> bool:
    """Whether the claims of sinusoids.toml hold in every family, for the median over the sizes."""
    found = []
    for f, family in enumerate(FAMILIES):

        def margin(key: str, rival: str, f: int = f) -> Tensor:
            return (surprise[rival] - surprise[CLAIMS[key]])[:, f].median(0).values

        found += claims.claims_of(__file__, family, margin, quick=quick, compare=ranked)
    return claims.judge(found)


def published_rows(numbers: dict[str, Any]) -> list[Row]:
    """The adaptations of the stored network to its four tasks: zero mean, unit prior, noise of the source."""
    folder = data_folder().parent / "reference"
    with np.load(folder / "finite_ntk_toy_n10.npz", allow_pickle=False) as archive:
        arrays = {key: torch.from_numpy(archive[key]).double() for key in archive.files}
    noise = json.loads((folder / "finite_ntk_toy_n10.json").read_text())["noise"]
    network = single(NETWORK, [arrays[f"w{i}"][None] for i in range(6)], 0)
    rows = []
    for index in range(4):
        task = f"t{index + 1}"
        posterior = n2g.adapt(
            network,
            (arrays[f"{task}_x"], arrays[f"{task}_y"]),
            n2g.Gaussian(noise),
            prior_var=1.0,
            zero_mean=True,
        )
        inside = arrays[f"{task}_xs"][:, 0].abs() <= 5
        law = posterior.predict(arrays[f"{task}_xs"][inside])
        truth = arrays[f"{task}_truth"][inside, None]
        found = {"RMSE": metrics.rmse(law.mean, truth), "NLL": metrics.gaussian_nll(law, truth)}
        for name, value in found.items():
            label = f"published network, task {index + 1}, {name}"
            rows.append(Row(label, numbers[name][index], float(value), numbers["tolerance"]))
    return rows


SHOWN = {
    CLAIMED: "GP of the network",
    CONVERGED: "GP, converged network",
    f"untrained {CLAIMED}": "GP, untrained network",
    "fine-tuned, all layers": "fine-tuned, all layers",
    "fine-tuned, last layer": "fine-tuned, last layer",
    "ABLR": "ABLR",
    "DKL": "DKL",
    "RBF GP": "RBF GP",
}


def draw_examples(problem: Problems, laws: dict[str, Law], num_points: int, seed: int) -> Figure:
    """One target in each family (rows): mean and two standard deviations of each method (columns)."""
    plt.rcParams.update({"font.size": 8})
    seeds = len(problem.truths)
    figure, axes = plt.subplots(
        len(FAMILIES), len(SHOWN), figsize=(17, 6.6), sharex=True, sharey=True, layout="constrained"
    )
    truth = problem.truths[seed].truth(GRID)
    for f, row in enumerate(axes):
        index = f * seeds + seed
        points = problem.target[slice(0, num_points)].task(index)
        for ax, (name, title) in zip(row, SHOWN.items(), strict=True):
            mean, var = (v[index, -len(GRID) :] for v in (laws[name].mean, laws[name].var))
            source = [values[:, 0] for values in problem.source.task(index)]
            ax.plot(*source, "+", color=FAINT, markersize=4, label="source")
            plot_regression(ax, GRID, mean, var, data=points, truth=truth, label="mean ± 2 sd")
            handles, labels = ax.get_legend_handles_labels()
            ax.get_legend().remove()
            ax.plot(*points, "o", color=INK, markersize=3.5)
            ax.set_ylim(-9, 9)
            ax.set_title(title if f == 0 else "", fontsize=9)
            ax.set_ylabel(FAMILIES[f])
            ax.label_outer()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    return figure


def draw_scores(surprise: Scores) -> Figure:
    """Mean negative log likelihood of every method, with standard errors, for each family and size."""
    plt.rcParams.update({"font.size": 8})
    figure, axes = plt.subplots(
        1, len(FAMILIES), figsize=(12, 4.6), sharey=True, sharex=True, layout="constrained"
    )
    places = np.arange(len(surprise))
    for f, (ax, family) in enumerate(zip(axes, FAMILIES, strict=True)):
        for n, (size, color) in enumerate(zip(SIZES, COLORS, strict=False)):
            values = [one[n, f] for one in surprise.values()]
            middle = [float(v.mean()) for v in values]
            errors = [standard_error(v) for v in values]
            style = {"fmt": "o", "color": color, "markersize": 3.5, "label": f"{size} points"}
            ax.errorbar(middle, places + 0.22 * (n - 1), xerr=errors, **style)
        ax.set_xscale("symlog", linthresh=3)
        ax.set_xlabel("negative log likelihood")
        ax.set_title(family, fontsize=9)
        ax.grid(axis="x", color=FAINT, alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(places, list(surprise))
    axes[0].invert_yaxis()
    axes[0].legend(frameon=False)
    return figure


def run(options: Options, out: Path) -> Scores:
    """Learn, adapt, print the tables and draw; the negative log likelihoods."""
    problem = problems(options.seeds)
    models = Models.learn(problem.source, options)
    for name, stack in (("as published", models.trained), ("converged", models.converged)):
        left = squared_errors(stack, problem.source) / problem.source.y.var((1, 2))
        parts = left.reshape(len(FAMILIES), -1).median(1).values.tolist()
        words = ", ".join(f"{part:.4f} ({f})" for part, f in zip(parts, FAMILIES, strict=True))
        print(f"median share of the source's variance that networks {name} miss: {words}")
    x = torch.cat([problem.test.x, GRID.expand(len(problem.test.x), -1, -1)], 1)
    laws = [models.laws(problem.target[slice(0, size)], x) for size in SIZES]
    surprise, error = score(laws, problem.test)
    print_scores(surprise, error)
    save(draw_examples(problem, laws[1], SIZES[1], seed=0), out, "maddox2021_sinusoids.png")
    save(draw_scores(surprise), out, "maddox2021_sinusoids_nll.png")
    return surprise


def main(arguments: list[str] | None = None) -> int:
    """Print the tables, write the figures; 0 if all claims came out as stated."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder for the figures")
    parser.add_argument("--seeds", type=int, default=20, help="targets, at least 6")
    parser.add_argument("--epochs", type=int, default=2500, help="of the source networks")
    parser.add_argument("--quick", action="store_true", help="6 targets")
    options = findings.parse(parser, arguments)
    if options.seeds < 6:
        parser.error("--seeds must be at least 6: fewer ranks never reach significance")
    chosen = QUICK if options.quick else Options(seeds=options.seeds, epochs=options.epochs)
    surprise = run(chosen, options.out)
    print_verdicts(surprise, CONFIDENCE)
    agree = agrees(surprise, options.quick)
    try:
        rows = published_rows(claims.stated(__file__)["published"])
    except (n2g.errors.InputError, FileNotFoundError) as error:
        findings.leave_out(f"published network left out: {error}")
        return 0 if agree else 1
    print()
    return 0 if print_table(rows) and agree else 1


if __name__ == "__main__":
    raise SystemExit(main())
