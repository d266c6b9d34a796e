"""Hyper-parameters by the marginal likelihood of a network's Gaussian process, without validation data.

    python papers/khan2019/run.py --out figures
    python papers/khan2019/run.py --out figures --only wine --device cuda --splits 20

Trains networks over prior precision, noise and width on toy data and on red wine, and holds −log marginal
likelihood and test loss against the authors' stored curves: optima of the same data sets should be in the
same or a neighboring cell. Single cells that do not depend on rounding are reproduced to three digits
behind the point, as are the fits, and the in-between uncertainty on Snelson's data. Tables of the sweeps
are kept in --out, and used again.

Khan, Immer, Abedi & Korzepa (2019), "Approximate inference turns deep networks into Gaussian processes".
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor

from net2gp import laplace
from net2gp.plots import COLORS, FAINT, INK, plot_selection
from net2gp.tuning import EVIDENCE, Selection

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parent))
import findings
import snelson
import studies
import toy
import variational
import widths
import wine
from studies import Row, expected_of

EXPECTED = expected_of(__file__)
FITS = (0.01, 10**-0.2, 10**1.4)
"""The δ whose fits are drawn: .01, .63 and 25."""


def kept(path: Path, compute: Callable[[], Selection]) -> Selection:
    """The table that is stored at `path`, or else computed and stored there."""
    if not path.exists():
        table = compute()
        path.parent.mkdir(parents=True, exist_ok=True)
        arrays = {key: value.numpy() for key, value in table.scores.items()}
        np.savez(path, values=np.array(table.values), name=np.array(table.name), **arrays)
    with np.load(path, allow_pickle=False) as archive:
        scores = {
            k: torch.from_numpy(archive[k]) for k in archive.files if k not in ("values", "name")
        }
        return Selection(str(archive["name"]), tuple(archive["values"].tolist()), scores)


def as_stored(name: str, like: Selection, prefix: str = "map", evidence: str = "mlh") -> Selection:
    """The stored curves on the values and data sets of `like`."""
    archive, count = toy.stored(name), like.evidence.shape[1]
    values = archive["params"].tolist()
    rows = [int(np.argmin(np.abs(np.log(np.array(values) / value)))) for value in like.values]
    keys = {
        EVIDENCE: evidence,
        "test loss": f"test_loss_{prefix}",
        "train loss": f"train_loss_{prefix}",
    }
    scores = {k: torch.from_numpy(archive[key][rows, :count]) for k, key in keys.items()}
    return Selection(like.name, tuple(values[row] for row in rows), scores)


def compare(title: str, found: Selection, expected: Selection, every: int = 1) -> list[Row]:
    """Optima of found and stored curves, in cells of the stored grid, of which each so-manieth is there."""
    rows = []
    for score in (EVIDENCE, "test loss"):
        here, there = found.best_index(score), expected.best_index(score)
        note = f"{found.values[here]:.4g} ({float(found.mean(score)[here]):.4g}), "
        note += f"stored {found.values[there]:.4g} ({float(expected.mean(score)[there]):.4g})"
        gap = abs(found.mean(score)[here] - found.mean(score)[there])
        error = found.scores[score][here] - found.scores[score][there]
        paired = float(gap / (error.std() / len(error) ** 0.5)) if here != there else 0.0
        note += f"; {paired:.1f} standard errors better there" if here != there else ""
        name = f"{title}: best by {score}"
        cells = every * abs(here - there)
        rows.append(Row(name, 0.0, cells, EXPECTED["optima"]["step"], note))
    return rows


def draw_sweeps(sweeps: dict[str, Selection], out: Path, name: str) -> None:
    """A panel for each sweep, −evidence on the left axis and losses on the right.

    Sweeps of one hyper-parameter get the same limits, so that stored and found curves compare.
    """
    figure, axes = studies.panels(len(sweeps))
    figure.set_size_inches(4.6 * len(sweeps), 3.4)
    figure.get_layout_engine().set(wspace=0.06)
    drawn: dict[str, list[Any]] = {}
    for ax, (title, table) in zip(np.atleast_1d(axes), sweeps.items(), strict=True):
        plot_selection(ax, table, losses=["test loss", "train loss"])
        handles = ax.get_legend().legend_handles
        ax.legend(handles=handles, frameon=False, fontsize=7, loc="upper center")
        ax.set_title(title, fontsize=9)
        drawn.setdefault(table.name, []).append(ax)
    for same in drawn.values():
        for group in (same, [ax.right_ax for ax in same]):
            limits = np.array([ax.get_ylim() for ax in group])
            for ax in group:
                ax.set_ylim(limits[:, 0].min(), limits[:, 1].max())
    studies.save(figure, out, name)


def toy_points() -> list[Row]:
    """Single networks whose basin does not depend on rounding."""
    setting = EXPECTED["toy"]
    problems = toy.problems(3)
    deltas = sorted({point["delta"] for point in setting["point"]})
    table = toy.train_grid(deltas, problems).selection()
    return point_rows("toy", table, setting["point"], setting["tolerance"])


def point_rows(
    title: str, table: Selection, points: list[dict[str, Any]], tolerance: float
) -> list[Row]:
    """Evidence and test loss of single cells against the stored numbers."""
    rows = []
    for point in points:
        at = min(range(len(table.values)), key=lambda i: abs(table.values[i] - point["delta"]))
        for key, score in (("evidence", EVIDENCE), ("test", "test loss")):
            found = float(table.scores[score][at, point["set"]])
            name = f"{title} δ = {point['delta']:.4g}, set {point['set']}: {score}"
            rows.append(Row(name, point[key], found, tolerance, f"{found:.5f}"))
    return rows


def toy_sweep(options: argparse.Namespace) -> list[Row]:
    """The curve over δ by Laplace, beside the stored one."""
    problems = toy.problems(options.sets)
    table = kept(
        options.out / f"khan2019_toy_delta_{options.sets}.npz",
        lambda: toy.train_grid(toy.DELTAS, problems, device=options.device).selection(),
    )
    theirs = as_stored("dnn2gp_toy_delta_original", table)
    panels = {"Laplace, stored": theirs, "Laplace, here": table}
    draw_sweeps(panels, options.out, "khan2019_toy_delta.png")
    return compare("toy δ, Laplace", table, theirs)


def toy_inference(options: argparse.Namespace) -> list[Row]:
    """The curve over δ by variational inference, beside the stored one and that of the mean-field optimum."""
    deltas = toy.DELTAS[1 :: options.every] if options.every > 1 else toy.DELTAS
    problems, tables = toy.problems(options.sets), {}
    for word, steps in (
        ("vogn", variational.AS_STORED),
        ("meanfield", variational.MEAN_FIELD),
    ):
        name = f"khan2019_toy_{word}_{options.sets}_{options.every}_{options.steps}.npz"
        steps = replace(steps, num_steps=options.steps)
        tables[word] = kept(
            options.out / name,
            lambda steps=steps: variational.infer(
                deltas, problems, steps, device=options.device
            ).selection(),
        )
    theirs = as_stored("dnn2gp_toy_delta_original", tables["vogn"], "vi", "convimlh")
    panels = {
        "VI, stored": theirs,
        "VI with the curvature of the stored runs, here": tables["vogn"],
        "VI, mean-field optimum, here": tables["meanfield"],
    }
    draw_sweeps(panels, options.out, "khan2019_toy_vi.png")
    return vi_rows(tables["vogn"], theirs, options.every)


def vi_rows(found: Selection, expected: Selection, every: int) -> list[Row]:
    """The optima, and how many standard errors the curves are apart where they are farthest."""
    rows = compare("toy δ, VI", found, expected, every)
    archive, sets = toy.stored("dnn2gp_toy_delta_original"), found.evidence.shape[1]
    at = [int(np.argmin(np.abs(archive["params"] - value))) for value in found.values]
    name = "−evidence of a step"
    stored = {**expected.scores, name: -torch.from_numpy(archive["vimlh"][at, :sets])}
    for score, here in found.scores.items():
        gap = here - stored[score]
        errors = gap.mean(1).abs() / (gap.std(1) / sets**0.5)
        worst = int(errors.argmax())
        note = f"{float(gap[worst].mean()):.4f} at δ = {found.values[worst]:.3g}"
        title = f"toy, VI: {score}, standard errors apart"
        limit = EXPECTED["variational"]["errors"]
        rows.append(Row(title, 0.0, float(errors[worst]), limit, note, at_most=True))
    return rows


def toy_widths(options: argparse.Namespace) -> list[Row]:
    """The curve over width, means over starts."""
    count, starts = min(5, options.sets), options.starts
    values = [int(v) for v in toy.stored(widths.STORED)["params"] if v <= options.largest]
    sets = toy.problems(count, widths.STORED)
    table = kept(
        options.out / f"khan2019_toy_width_{count}_{starts}_{options.largest}.npz",
        lambda: widths.selection(values, sets, seeds=range(starts), device=options.device),
    )
    found = widths.averaged(table, starts)
    theirs = as_stored(widths.STORED, found)
    draw_sweeps(
        {"width, stored": theirs, "width, here": found}, options.out, "khan2019_toy_width.png"
    )
    return width_rows(table, theirs, starts)


def width_rows(table: Selection, expected: Selection, starts: int) -> list[Row]:
    """The optima of the means over starts, and how far the curves are apart."""
    setting, found = EXPECTED["width"], widths.averaged(table, starts)
    alone = float((found.evidence[0] - expected.evidence[0]).abs().max())
    rows = [Row("toy width 1: evidence, largest gap", 0.0, alone, setting["alone"], f"{alone:.1e}")]
    errors = widths.apart(table, starts, expected.evidence)[1:].abs()
    worst = int(errors.argmax())
    title = "toy width from 2 on: evidence, deviations of a start apart"
    note = f"at {found.values[1 + worst]:g} units"
    rows.append(Row(title, 0.0, float(errors[worst]), setting["errors"], note, at_most=True))
    return [*rows, *compare("toy width", found, expected)]


def noisier(options: argparse.Namespace) -> list[Row]:
    """New data of higher variance: whether the evidence still finds the δ of the test loss."""
    problems = [
        toy.generate(seed, low_var=0.09, high_var=2.25, share=0.2) for seed in range(options.sets)
    ]
    table = kept(
        options.out / f"khan2019_toy_noisier_{options.sets}.npz",
        lambda: toy.train_grid(toy.DELTAS, problems, device=options.device).selection(),
    )
    draw_sweeps({"higher variance": table}, options.out, "khan2019_toy_noisier.png")
    evidence, test = table.best(), table.best("test loss")
    gap = abs(math.log10(evidence) - math.log10(test))
    note = f"evidence {evidence:.3g}, test loss {test:.3g}"
    limit = EXPECTED["optima"]["decades"]
    return [Row("higher variance: decades between optima", 0.0, gap, limit, note, at_most=True)]


def fits(options: argparse.Namespace) -> list[Row]:
    """Fits on the first data set with ± one standard deviation of the Gaussian process."""
    deltas = [*FITS, *[p["delta"] for p in EXPECTED["toy"]["point"] if p["set"] == 0]]
    problem, name = toy.problems(1)[0], "dnn2gp_toy_delta_original"
    grid, archive = toy.train_grid(deltas, [problem]), toy.stored(name)
    x = torch.from_numpy(archive["data_x"][0])
    figure, axes = studies.panels(len(FITS))
    rows = []
    for index, delta in enumerate(deltas):
        at = int(np.argmin(np.abs(np.log(archive["params"] / delta))))
        known = [torch.from_numpy(archive[key][at, 0]) for key in ("fit_map", "fit_gpcov")]
        law = laplace(grid.at(index, 0), problem.data, toy.NOISE, prior_var=1 / delta).marginal(x)
        here = [law.mean[:, 0], law.variance[:, 0].sqrt()]
        if delta > 1.5:
            for word, one, other in zip(("mean", "deviation"), here, known, strict=True):
                gap = float((one - other).abs().max())
                title = f"toy δ = {delta:.4g}, set 0: {word} of the fit, largest gap"
                rows.append(Row(title, 0.0, gap, EXPECTED["toy"]["tolerance"], f"{gap:.1e}"))
        if index < len(FITS):
            draw_fit(axes[index], problem, x[:, 0], here, known)
            axes[index].set_title(f"δ = {delta:.2g}")
    axes[0].legend(frameon=False, fontsize=7, loc="upper left")
    studies.save(figure, options.out, "khan2019_toy_fits.png")
    return rows


def draw_fit(
    ax: Axes, problem: toy.Problem, x: Tensor, here: list[Tensor], known: list[Tensor]
) -> None:
    """One network and its band, the stored ones dashed."""
    ax.plot(problem.x[:, 0], problem.y, ".", color=FAINT, markersize=3, label="data")
    mean, std = here
    ax.fill_between(x, mean - std, mean + std, color=COLORS[0], alpha=0.25, linewidth=0)
    ax.plot(x, mean, color=COLORS[0], label="here ± 1σ of the GP")
    for sign in (-1, 0, 1):
        curve = known[0] + sign * known[1]
        ax.plot(x, curve, ":", color=INK, linewidth=1, label=None if sign else "stored")
    ax.set(xlabel="x", ylim=(-3.2, 3.2))


def wine_points() -> list[Row]:
    """Single networks on the first split, in float64."""
    setting, split = EXPECTED["wine"], wine.splits(1)[0]
    rows = []
    for point in setting["point"]:
        shape = {key: point[key] for key in ("width", "num_hidden") if key in point}
        cell = wine.Setting(delta=point["delta"], **shape)
        network = wine.train([(cell, split)], dtype=torch.float64)[0]
        scores = wine.fit(network, cell, split).scores
        columns = {key: torch.tensor([[v]], dtype=torch.float64) for key, v in scores.items()}
        table = Selection("δ", (point["delta"],), columns)
        rows += point_rows(f"wine width {cell.width}", table, [point], setting["tolerance"])
    return rows


def wine_sweeps(options: argparse.Namespace) -> list[Row]:
    """The curves over δ, noise and width."""
    rows, panels = [], {}
    for name in wine.SWEEPS:
        table = kept(
            options.out / f"khan2019_wine_{name}_{options.splits}.npz",
            lambda name=name: wine.selection(
                name, wine.splits(options.splits), device=options.device
            ),
        )
        theirs = as_stored(f"dnn2gp_{name}_wine", table)
        rows += compare(f"wine {table.name}", table, theirs)
        panels[f"wine, {table.name}"] = table
        draw_sweeps(
            {f"{table.name}, stored": theirs, f"{table.name}, here": table},
            options.out,
            f"khan2019_wine_{name}.png",
        )
    draw_sweeps(panels, options.out, "khan2019_wine.png")
    return rows


def snelson_numbers(options: argparse.Namespace) -> list[Row]:
    """The stored network: evidence, deviations, and one law by two ways; then one of our own."""
    setting, known = EXPECTED["snelson"], snelson.reference()
    grid = torch.from_numpy(toy.stored("snelson_dnn2gp_laplace")["XT"])
    dual = known.dual()
    process, linear = (one.marginal(grid) for one in (dual.gaussian_process(), dual.linear_model()))
    tolerance = setting["tolerance"]
    found = float(dual.log_marginal_likelihood())
    rows = [Row("Snelson: evidence", setting["evidence"], found, tolerance)]
    for place, expected in zip(snelson.PLACES, setting["deviations"], strict=True):
        nearest = int((grid[:, 0] - place).abs().argmin())
        std = float(process.variance[nearest, 0]) ** 0.5
        rows.append(
            Row(f"Snelson: deviation at x = {place:g}", expected, std, tolerance, f"{std:.4f}")
        )
    for word in ("mean", "variance"):
        gap = float((getattr(process, word) - getattr(linear, word)).abs().max())
        title = f"Snelson: {word} of linear model and Gaussian process"
        rows.append(Row(title, 0.0, gap, setting["equal"], f"{gap:.1e}"))
    snelson.draw(known, options.out, "khan2019_snelson.png")
    own = snelson.train()
    snelson.draw(own, options.out, "khan2019_snelson_trained.png")
    rows.append(_gap_ratio(own, grid))
    return rows


def _gap_ratio(own: snelson.Snelson, grid: Tensor) -> Row:
    """A network trained here is several times less sure in the gap than beside it."""
    law = laplace(own.network, own.data, own.likelihood, prior_var=1 / snelson.DELTA)
    at = torch.tensor(snelson.PLACES, dtype=torch.float64)[:, None]
    std = law.marginal(at).variance[:, 0].sqrt()
    error = float((own.network(own.x) - own.y).detach().square().mean())
    note = f"deviations {', '.join(f'{v:.3f}' for v in std.tolist())}, train loss {error:.4f}"
    title = "Snelson, trained here: −deviation in the gap over that in the data"
    return Row(title, -5.0, -float(std[1] / std[0]), 0.0, note, at_most=True)


PARTS: dict[str, list[Callable[[argparse.Namespace], list[Row]]]] = {
    "points": [lambda options: toy_points(), lambda options: wine_points()],
    "fits": [fits],
    "snelson": [snelson_numbers],
    "toy": [toy_sweep],
    "vi": [toy_inference],
    "noisier": [noisier],
    "width": [toy_widths],
    "wine": [wine_sweeps],
}


def main(arguments: list[str] | None = None) -> int:
    """Print the tables, write the figures; the exit status says whether the numbers agree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder for the figures")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--sets", type=int, default=10, help="toy data sets, at most 10")
    parser.add_argument("--splits", type=int, default=20, help="splits of wine, at most 20")
    parser.add_argument("--largest", type=int, default=1000, help="largest width on toy data")
    parser.add_argument("--starts", type=int, default=10, help="of each width, at least 3")
    parser.add_argument("--every", type=int, default=1, help="of the δ by VI, each so-manieth")
    parser.add_argument("--steps", type=int, default=5000, help="of VI")
    parser.add_argument("--device", default="cpu", help="where networks train")
    options = findings.parse(parser, arguments, quick={"only": ["points", "fits", "snelson"]})
    rows = [row for part in options.only for study in PARTS[part] for row in study(options)]
    return 0 if studies.print_table(rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
