"""The tables and the claims of `regression.py`.

1. Nowhere (table × kind of training) is the default worse than the bare network in NLL by more than two
   standard errors of their difference over seeds.
2. On average over tables its 90 % intervals contain 85 to 95 % of the test rows.
3. Networks of few points: `laplace` and `adapt` with 5 and 10 have an NLL at most 1 above that of N(0, 1),
   which knows mean and variance of y. One or two points know no scale but their own: the standard deviation
   of predictions is at least their root mean square with one, an eighth of it with two. No structure has
   more noise than the variance of y, or of the points themselves where that is more.
4. `adapt` on the network's own training rows leaves the RMSE within 2 %, or makes it smaller.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

BARE, DEFAULT, PROCESS, PEER_FULL = "network", "laplace", "RBF GP", "laplace-torch full"
Row = dict[str, Any]

EXPLANATION = """\
Standardized tables; networks of two hidden layers of 64 ReLU units, trained plainly (1500 batches of Adam,
nearly by heart), with weight decay, with early stopping on a fifth of the rows, or with BatchNorm and
Dropout; mean over seeds, which are also splits. `network`: the bare network with its mean squared training
residual as noise. `laplace`: `n2g.laplace(network, rows, n2g.Gaussian())`, nothing else said, and in brackets
its NLL minus that of the network, seed by seed, with the standard error; the columns after it are its
structures. `LowRank` has rank 50, `Subnetwork` 300 weights, and `FunctionSpace` is asked for by name up to
2000 rows. laplace-torch: prior precision and noise by Adam on its marginal likelihood, as in its regression
example, until they settle (500 steps at most); the whole precision on one table and seed, its determinant by
eigenvalues while it is tuned, as a call takes up to a minute. Its Kron has no factors for BatchNorm, whose
parameters stay fixed, and in 0.3 the gradient of its Kron evidence in the noise lacks the determinant
(`math.pow` cuts it), so that its noise is the mean squared training residual: the columns show what a user
gets. RBF GP: one length scale for each input, tuned on 300 rows."""


def report(rows: Sequence[Row], machine: Row, path: Path, console: Console) -> int:
    """Print the tables, write them, and say which claims fail."""
    many = [row for row in rows if not row["count"] and not row.get("failed")]
    few = [row for row in rows if row["count"]]
    lines = [
        "# Defaults for regression",
        "",
        f"Tables of {len(rows)} results, those of every run in the folder of cells:",
        "",
        *(f"- {line}" for line in machine["runs"]),
        "",
    ]
    lines += [machine["made_by"], "", EXPLANATION]
    sections = [
        ("Test negative log likelihood", cells(many, "nll")),
        ("Inside 90 % intervals", cells(many, "inside90")),
        ("Inside 50 % intervals", cells(many, "inside50")),
        ("Inside 95 % intervals", cells(many, "inside95")),
        ("CRPS", cells(many, "crps")),
        ("Noise variance, of targets with variance 1", cells(many, "noise_var")),
        ("Test root mean squared error", cells(many, "rmse")),
        ("Few points: NLL; noise variance; inside 90 %", cells_of_few(few)),
    ]
    for heading, (columns, body) in sections:
        if not body:
            continue
        table = Table(title=heading, title_justify="left")
        for i, column in enumerate(columns):
            table.add_column(column, justify="right" if i else "left")
        for line in body:
            table.add_row(*line)
        console.print(table)
        lines += ["", f"## {heading}", "", "| " + " | ".join(columns) + " |"]
        lines += ["|---" + "|---:" * (len(columns) - 1) + "|"]
        lines += ["| " + " | ".join(line) + " |" for line in body]
    broken = list(failures(many, few))
    verdict = [f"- fails: {line}" for line in broken] or ["All four claims hold."]
    lines += ["", "## Claims", "", *(__doc__ or "").strip().splitlines()[2:], "", *verdict]
    path.write_text("\n".join(lines) + "\n")
    console.print("\n".join([*verdict, f"written to {path}"]), highlight=False)
    return 1 if broken else 0


def failures(many: Sequence[Row], few: Sequence[Row]) -> Iterator[str]:
    """What is not as it is claimed."""
    default = grouped(many, DEFAULT, "nll")
    for key, network in grouped(many, BARE, "nll").items():
        if key in default:
            gap, error = difference(default[key], network)
            if gap > 2 * error:
                yield f"{' '.join(key)}: NLL {gap:+.3f} ± {error:.3f} beside the bare network"
    inside = grouped(many, DEFAULT, "inside90")
    if inside:
        by_table: dict[str, list[float]] = {}
        for (name, _), values in inside.items():
            by_table.setdefault(name, []).append(float(np.mean(list(values.values()))))
        average = float(np.mean([np.mean(values) for values in by_table.values()]))
        if not 0.85 <= average <= 0.95:
            yield f"90 % intervals contain {average:.1%} on average over tables"
    network = grouped(many, BARE, "rmse")
    for key, adapted in grouped(many, "adapt", "rmse").items():
        ratio = np.mean([adapted[s] / network[key][s] for s in adapted]) if key in network else 1.0
        if ratio > 1.02:
            yield f"{' '.join(key)}: adapt has {ratio:.3f} times the network's RMSE"
    yield from false_certainty(few)


def false_certainty(few: Sequence[Row]) -> Iterator[str]:
    """Few points: noise that runs away, intervals that are too short."""
    for row in few:
        bound = max(1.0, row["scale"] ** 2)
        if row["method"] != BARE and row["noise_var"] > 1.01 * bound:
            yield f"{row['count']} points of {row['data']}, {row['method']}: noise {row['noise_var']:.3g}"
    keys = dict.fromkeys((r["data"], r["kind"], r["count"], r["method"]) for r in few)
    known = 0.5 * math.log(2 * math.pi) + 0.5
    for key in keys:
        if key[3] not in (DEFAULT, "adapt"):
            continue
        chosen = [r for r in few if (r["data"], r["kind"], r["count"], r["method"]) == key]
        name = f"{key[2]} points of {key[0]}, {key[1]}, {key[3]}"
        loss = float(np.mean([r["nll"] for r in chosen]))
        if key[2] > 2 and loss > known + 1:
            yield f"{name}: NLL {loss:.3g}"
        least = key[2] ** -3
        if key[2] <= 2 and min(r["stddev"] / r["scale"] for r in chosen) < 0.999 * least:
            yield f"{name}: standard deviations of less than {least} times the points' own scale"


def grouped(rows: Sequence[Row], method: str, key: str) -> dict[tuple[str, str], dict[int, float]]:
    """By table and kind of training: the value of each seed."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for row in rows:
        if row["method"] == method and key in row:
            found.setdefault((row["data"], row["kind"]), {})[row["seed"]] = row[key]
    return found


def difference(one: dict[int, float], other: dict[int, float]) -> tuple[float, float]:
    """The mean difference seed by seed, and its standard error."""
    gaps = np.array([one[seed] - other[seed] for seed in one if seed in other])
    return float(gaps.mean()), float(gaps.std(ddof=1) / math.sqrt(len(gaps))) if len(
        gaps
    ) > 1 else 0.0


def cells(rows: Sequence[Row], key: str) -> tuple[list[str], list[list[str]]]:
    """A row for each table and kind, a column for each method: the mean over seeds."""
    methods = list(dict.fromkeys(row["method"] for row in rows if row["method"] != "adapt"))
    if key == "rmse":
        methods = [BARE, "adapt", PROCESS]
    values = {method: grouped(rows, method, key) for method in methods}
    values = {method: found for method, found in values.items() if found}
    keys = dict.fromkeys((r["data"], r["kind"]) for r in rows if r["kind"])
    sizes = {row["data"]: row["num_rows"] for row in rows}
    body = []
    for name, kind in keys:
        line = [f"{name}, {sizes[name]} rows, {kind}"]
        for method, found in values.items():
            seeds = found.get((name, "" if method == PROCESS else kind), {})
            if not seeds:
                line.append("–")
                continue
            text = number(float(np.mean(list(seeds.values()))))
            base = grouped(rows, BARE, key).get((name, kind))
            if method == DEFAULT and key == "nll" and base:
                gap, error = difference(seeds, base)
                text += f" ({number(gap, True)} ± {number(error)})"
            line.append(text)
        body.append(line)
    if body and key.startswith("inside"):
        body.append(average_over_tables(values))
    return ["table, training", *values], body


def average_over_tables(values: dict[str, dict[tuple[str, str], dict[int, float]]]) -> list[str]:
    line = ["average over tables"]
    for found in values.values():
        names = dict.fromkeys(name for name, _ in found)
        means = [
            np.mean([np.mean(list(v.values())) for key, v in found.items() if key[0] == name])
            for name in names
        ]
        line.append(f"{np.mean(means):.3f}")
    return line


def cells_of_few(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """A row for each number of points, a column for each method."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    body = []
    for name, kind, count in dict.fromkeys((r["data"], r["kind"], r["count"]) for r in rows):
        line = [f"{name}, {kind}, {count}"]
        for method in methods:
            of = [
                r
                for r in rows
                if (r["data"], r["kind"], r["count"], r["method"]) == (name, kind, count, method)
            ]
            parts = (
                number(float(np.mean([r[k] for r in of]))) for k in ("nll", "noise_var", "inside90")
            )
            line.append("; ".join(parts))
        body.append(line)
    return ["table, training, points", *methods], body


def number(value: float, sign: bool = False) -> str:
    plus = "+" if sign else ""
    return f"{value:{plus}.3f}" if 1e-3 <= abs(value) < 100 else f"{value:{plus}.2g}"
