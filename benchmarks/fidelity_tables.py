"""The tables, the figure and the claims of `fidelity.py`, from its rows."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from bayes_cells import PAIRS, Row, head, machine, markdown

TRUTH, SAME = "NUTS", "NUTS, every other chain beside the rest"
NEAREST = "microcanonical"
FARTHER = ("ensemble of 10", "dropout", "mean field", "Laplace")
R_HAT, QUICK_R_HAT = 1.01, 2.0
TOLERANCE = 0.01
"""A difference of total variation that does not count."""

COLUMNS = ("agreement", "total variation", "W2 of y", "W2 of f", "stddev of f", "NLL", "RMSE")
COLUMNS += ("seconds",)
CHAIN_COLUMNS = {
    "prior_var": "v",
    "noise_var": "noise",
    "draws": "draws",
    "r_hat": "largest R̂",
    "r_hat_most": "R̂ at 95 % of points below",
    "bulk_ess": "smallest ESS",
    "tail_ess": "in the tail",
    "divergences": "divergences",
    "gradients": "gradients",
    "seconds": "CPU s",
}
EXPLANATION = """\
One hidden layer of 50 tanh units, one split of each table, prior N(0, v) of all parameters and Gaussian noise
as in the first table (standardized targets). NUTS: four or five chains in float64 from draws of the prior,
each after 250 to 500 draws of warm-up; R̂ and effective sample sizes are of predictions f(x) at the test
points, the worst of them, since weights are not identifiable. Its second row compares half of its chains with
the others, which is how close the same posterior comes to itself. Agreement: the share of test points whose
most probable bin, of 20 between quantiles of the training targets, is the same as under NUTS. Total
variation: half the L1 distance of the probabilities of these bins. W₂: distance of the laws of y and of f at
a test point, in standard deviations of the targets, averaged. NLL and RMSE: on test points, in units of the
table. Seconds: CPU seconds from data to posterior on one thread, training included. Optimizers take {steps}
steps on all data; chains are {chains} (the microcanonical ones 5) of {draws} draws, every {thin} steps, after
{warmup} steps from an ensemble of 5. One split and one seed: small differences between methods are chance."""


def report(rows: Sequence[Row], options: argparse.Namespace, console: Console) -> int:
    """Print the tables and write them; the status says whether what is claimed holds."""
    made = machine(options)
    broken = claims(rows, options)
    sizes = {key: getattr(options.sizes, key) for key in options.sizes.__dataclass_fields__}
    lines = ["# Fidelity to the posterior on regression tables", "", head(made), ""]
    lines += [EXPLANATION.format(**sizes), "", "## The reference", ""]
    chains = [r for r in rows if r["method"] == TRUTH and not r["failed"]]
    body = [
        [r["data"], *(f"{r[key]:.4g}" for key in CHAIN_COLUMNS), " and ".join(r["processors"])]
        for r in chains
    ]
    lines += markdown(["table", *CHAIN_COLUMNS.values(), "chains ran on"], body)
    for data in dict.fromkeys(row["data"] for row in rows):
        table = Table(title=data, title_justify="left")
        for name in ("method", *COLUMNS):
            table.add_column(name, justify="left" if name == "method" else "right")
        body = [cells(row) for row in rows if row["data"] == data]
        for line in body:
            table.add_row(*line)
        console.print(table)
        lines += ["", f"## {data}", "", *markdown(["method", *COLUMNS], body)]
        lines += ["", *nearest([row for row in rows if row["data"] == data])]
    options.output.mkdir(parents=True, exist_ok=True)
    stem = options.output / ("fidelity_quick" if options.quick else "fidelity")
    if drawn(rows, stem.with_suffix(".png")):
        lines += ["", f"![total variation beside seconds]({stem.name}.png)"]
    said = [f"- {line}" for line in broken] or ["Everything that is claimed holds."]
    lines += ["", "## Claims", "", options.claims, "", *said]
    console.print("\n".join(said), highlight=False)
    stem.with_suffix(".json").write_text(json.dumps({"machine": made, "rows": rows}) + "\n")
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n")
    return 1 if broken else 0


def cells(row: Row) -> list[str]:
    """A line of a table."""
    if row["failed"]:
        return [row["method"], row["failed"], *[""] * (len(COLUMNS) - 1)]
    shown = (f"{row[n]:.0f}" if abs(row[n]) >= 100 else f"{row[n]:.3f}" for n in COLUMNS)
    return [row["method"], *shown]


def nearest(rows: Sequence[Row]) -> list[str]:
    """Which methods are nearest to NUTS, and who predicts best."""
    good = [r for r in rows if not r["failed"] and r["method"] not in (TRUTH, SAME)]
    if not good:
        return []
    near = sorted(good, key=lambda r: r["total variation"])[:3]
    said = ", ".join(f"{r['method']} ({r['total variation']:.3f})" for r in near)
    best = min((r for r in rows if not r["failed"] and r["method"] != SAME), key=lambda r: r["NLL"])
    return [f"Nearest in total variation: {said}. Smallest NLL: {best['method']}."]


def claims(rows: Sequence[Row], options: argparse.Namespace) -> list[str]:
    """What is not as the program claims."""
    most = QUICK_R_HAT if options.quick else R_HAT
    broken = [f"{r['data']}: {r['method']}: {r['failed']}" for r in rows if r["failed"]]
    good = {(r["data"], r["method"]): r for r in rows if not r["failed"]}
    for (data, method), row in good.items():
        if method == TRUTH and not row["r_hat"] < most:
            broken.append(f"{data}: R̂ of NUTS is {row['r_hat']:.3f} and not below {most}.")
        if options.quick:
            continue
        ours = good.get((data, PAIRS.get(method, "")))
        if ours is not None:
            broken += behind(ours, row)
        if method in FARTHER and (data, NEAREST) in good:
            first = good[data, NEAREST]
            if first["total variation"] >= row["total variation"]:
                broken.append(f"{data}: {NEAREST} is not nearer to NUTS than {method}.")
    return broken


def behind(ours: Row, theirs: Row) -> list[str]:
    """In what a method is behind its counterpart."""
    found = []
    gap = np.array(ours["of points"]) - np.array(theirs["of points"])
    error = math.hypot(
        gap.std(ddof=1) / math.sqrt(len(gap)), ours["member error"], theirs["member error"]
    )
    pair = f"{ours['method']} {{}} {theirs['method']}"
    if gap.mean() > max(2 * error, TOLERANCE):
        found.append(f"{ours['data']}: " + pair.format("is farther from NUTS than") + ".")
    if ours["seconds"] > theirs["seconds"]:
        found.append(f"{ours['data']}: " + pair.format("takes longer than") + ".")
    return found


def look(name: str, number: int) -> Row:
    """A color and a shape for each method."""
    shape = "*" if name == SAME else "x" if name in PAIRS else "os^D"[number // 10 % 4]
    color = "black" if name == SAME else f"C{number % 10}"
    return {"marker": shape, "color": color, "ms": 11 if name == SAME else 7, "alpha": 0.85}


def drawn(rows: Sequence[Row], path: Path) -> bool:
    """Draw agreement and total variation beside seconds, a panel for each table; whether plots are there."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt
    except ImportError:
        return path.is_file()
    tables = list(dict.fromkeys(r["data"] for r in rows if not r["failed"]))
    if not tables:
        return False
    names = dict.fromkeys(r["method"] for r in rows if not r["failed"] and r["method"] != TRUTH)
    looks = {name: look(name, number) for number, name in enumerate(names)}
    fig, axes = plt.subplots(2, len(tables), figsize=(1 + 5 * len(tables), 10), squeeze=False)
    for column, data in zip(axes.T, tables, strict=True):
        some = [r for r in rows if r["data"] == data and not r["failed"] and r["method"] != TRUTH]
        for ax, key in zip(column, ("agreement", "total variation"), strict=True):
            for row in some:
                ax.plot(
                    row["seconds"], row[key], ls="", label=row["method"], **looks[row["method"]]
                )
            ax.set(xscale="log", xlabel="CPU seconds", ylabel=key, title=data)
            ax.grid(alpha=0.3, which="both")
        column[1].set_yscale("log")
    known = {line.get_label(): line for ax in axes.flat for line in ax.get_lines()}
    fig.tight_layout()
    title = "Closeness to NUTS\n(crosses: other libraries)"
    fig.legend(known.values(), known, title=title, loc="center left", bbox_to_anchor=(1, 0.5))
    fig.savefig(path, dpi=100, bbox_inches="tight")
    plt.close(fig)
    return True
