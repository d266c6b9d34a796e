"""What the cells of table.py say: tables, claims, and figures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import findings
import numpy as np
import torch
from claims import Claim, at_most, compared, judge
from findings import Entry
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter
from scipy.stats import spearmanr
from studies import panels, save

from net2gp.plots import COLORS, INK

Cells = dict[str, dict[str, Any]]
LABELS = {"relu": "ReLU", "tanh": "tanh"}
WAYS = {"NNGP": COLORS[0], "NTK-GP": COLORS[2], "MAP network": COLORS[1]}


def report(
    cells: Cells, left_out: list[str], numbers: dict[str, Any], out: Path, *, quick: bool
) -> bool:
    """Print and draw everything; whether all agree."""
    found = list(entries(cells, numbers)) if numbers else []
    print_rows(cells, numbers)
    findings.add(found)
    for one in found:
        if not one.holds:
            print(f"{one.name} is {one.ours:.4f}, the paper has {one.paper:.4f} ± {one.allowed:g}")
    print_certainty(cells)
    agree = judge(claims(cells, numbers, quick=quick))
    if left_out:
        findings.leave_out(f"cells that are not there: {', '.join(left_out)}")
    stem = "lee2018_table_quick" if quick else "lee2018_table"
    rows = both(cells)
    if rows:
        save(draw_table(cells, rows, numbers), out, f"{stem}.png")
        save(draw_certainty(cells, rows), out, f"{stem}_certainty.png")
    if any(name.startswith("width-") for name in cells):
        save(draw_widths(cells), out, f"{stem}_widths.png")
    return agree and all(one.holds for one in found)


def rows_of(cells: Cells, kind: str) -> list[str]:
    """The rows that have a cell of this kind, in the order of the table."""
    return [name.removeprefix(f"{kind}-") for name in cells if name.startswith(f"{kind}-")]


def both(cells: Cells) -> list[str]:
    """The rows with a Gaussian process and a network."""
    return [row for row in rows_of(cells, "gp") if f"sgd-{row}" in cells]


def of_paper(numbers: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The paper's rows by their names here."""
    rows = numbers.get("rows", [])
    return {f"{row['data']}-{row['size']}-{row['activation']}": row for row in rows}


def entries(cells: Cells, numbers: dict[str, Any]) -> Iterator[Entry]:
    """Accuracies beside those of the paper."""
    allowed = numbers["tolerance"]
    for row, theirs in of_paper(numbers).items():
        name, short = shown(row), row.rpartition("-")[0]
        known, within = theirs["gp_accuracy"], allowed["gp"][theirs["size"]]
        if (cell := cells.get(f"gp-{row}")) is not None:
            for what, one in (
                (f"GP-{cell['name']}", cell),
                (f"GP-{theirs['gp']} as in the paper", cell["paper"]),
            ):
                ours = one["accuracy"]
                holds = abs(ours - known) <= within
                yield Entry(f"{name}: {what}", known, ours, within, holds)
        if (cell := cells.get(f"sgd-{row}")) is not None:
            known, within, ours = (
                theirs["network_accuracy"],
                allowed["network"][short],
                cell["accuracy"],
            )
            holds = ours >= known - within
            text = f"{name}: NN-{cell['name']}, the paper's NN-{theirs['network']}"
            yield Entry(text, known, ours, within, holds, "at least")


def shown(row: str) -> str:
    """A row in words."""
    data, size, activation = row.split("-")
    return f"{data} {size} {LABELS[activation]}"


def print_rows(cells: Cells, numbers: dict[str, Any]) -> None:
    """The table of the paper, with the paper's numbers beside."""
    known = of_paper(numbers)
    print(
        f"\n{'':<17}{'GP here':<20}{'accuracy':>9}{'paper':>8}  {'paper GP':<16}{'here':>8}  "
        f"{'network here':<20}{'accuracy':>9}{'paper':>8}"
    )
    for row in dict.fromkeys([*known, *rows_of(cells, "gp"), *rows_of(cells, "sgd")]):
        theirs, gp = known.get(row, {}), cells.get(f"gp-{row}", {})
        network = cells.get(f"sgd-{row}", {})
        print(
            f"{shown(row):<17}{gp.get('name', ''):<20}{digits(gp):>9}"
            f"{digits(theirs, 'gp_accuracy'):>8}  {theirs.get('gp', ''):<16}"
            f"{digits(gp.get('paper', {})):>8}  {network.get('name', ''):<20}{digits(network):>9}"
            f"{digits(theirs, 'network_accuracy'):>8}"
        )


def digits(cell: dict[str, Any], key: str = "accuracy") -> str:
    """Four digits, or nothing."""
    return f"{cell[key]:.4f}" if key in cell else ""


def ways(cells: Cells, row: str) -> dict[str, dict[str, Any]]:
    """The three predictions of a row."""
    gp = cells[f"gp-{row}"]
    return dict(zip(WAYS, (gp, gp["ntk"], cells[f"sgd-{row}"]), strict=True))


def print_certainty(cells: Cells) -> None:
    """Accuracy, error, NLL and ECE of both Gaussian processes and the MAP network."""
    print(f"\n{'':<17}{'':<14}{'accuracy':>9}{'MSE':>9}{'NLL':>9}{'ECE':>9}")
    for row in both(cells):
        for name, one in ways(cells, row).items():
            columns = "".join(f"{one[key]:>9.4f}" for key in ("accuracy", "mse", "NLL", "ECE"))
            print(f"{shown(row):<17}{name:<14}{columns}")
            numbers = {f"{shown(row)}, {name}: {key}": one[key] for key in ("mse", "NLL", "ECE")}
            findings.show(numbers)


def claims(cells: Cells, numbers: dict[str, Any], *, quick: bool) -> Iterator[Claim]:
    """What was written down before the first run, as far as there are cells."""
    rows = both(cells)
    if len(rows) >= 3:
        yield from paired(cells, rows, quick=quick)
    for kind, what in (("gp", "Gaussian process"), ("sgd", "network")):
        yield from growing(cells, kind, what)
    lead = lambda row: cells[f"gp-{row}"]["accuracy"] - cells[f"sgd-{row}"]["accuracy"]
    leads = [lead(row) for row in rows if row.startswith("CIFAR")]
    if leads:
        text = f"{100 * min(leads):+.2f} points at least"
        yield Claim("CIFAR-10: the Gaussian process leads in all rows", text, min(leads) > 0)
    for row in rows:
        if row.startswith("MNIST-50k"):
            bound = numbers["tolerance"]["lead_of_mnist_50k"]
            yield at_most(f"{shown(row)}: lead of either", abs(lead(row)), bound)
    for row in rows_of(cells, "width"):
        yield from widening(cells, row, numbers)


def paired(cells: Cells, rows: list[str], *, quick: bool) -> Iterator[Claim]:
    """Differences over the rows of the table."""
    for key, word, sign in (
        ("accuracy", "better", -1),
        ("NLL", "better", 1),
        ("ECE", "no worse", 1),
    ):
        differences = [sign * (cells[f"sgd-{r}"][key] - cells[f"gp-{r}"][key]) for r in rows]
        name = f"{key} over {len(rows)} rows, Gaussian process beside network"
        yield compared(name, torch.tensor(differences).double(), word, quick=quick)


def growing(cells: Cells, kind: str, what: str) -> Iterator[Claim]:
    """That accuracy grows with the number of training images."""
    lines: dict[str, list[float]] = {}
    for row in rows_of(cells, kind):
        data, _, activation = row.split("-")
        name = f"{data} {LABELS[activation]}"
        lines.setdefault(name, []).append(cells[f"{kind}-{row}"]["accuracy"])
    for name, line in lines.items():
        if len(line) > 1:
            text = " < ".join(f"{value:.4f}" for value in line)
            holds = bool((np.diff(line) > 0).all())
            yield Claim(f"{name}: more images, a better {what}", text, holds)


def widening(cells: Cells, row: str, numbers: dict[str, Any]) -> Iterator[Claim]:
    """That networks come to the Gaussian process of the row as they get wider."""
    cell, gp = cells[f"width-{row}"], cells.get(f"gp-{row}")
    means = np.array(cell["accuracies"]).mean(1)
    allowed = numbers.get("tolerance", {"width_correlation": 0.8, "width_gap": {}})
    least = allowed["width_correlation"]
    order = float(spearmanr(cell["widths"], means).statistic)
    yield Claim(
        f"{shown(row)}: width against accuracy, Spearman at least {least:g}",
        f"{order:.3f}",
        order >= least,
    )
    if gp is not None:
        gaps = np.abs(gp["accuracy"] - means)
        bound = allowed["width_gap"].get(row.split("-")[1], 0.03)
        yield at_most(f"{shown(row)}: the widest and the Gaussian process", float(gaps[-1]), bound)
        text = f"{gaps[-1]:.4f}, {gaps[0]:.4f}"
        yield Claim(
            f"{shown(row)}: the widest miss half of what the narrowest do",
            text,
            bool(gaps[-1] < gaps[0] / 2),
        )


def groups(rows: list[str]) -> list[list[str]]:
    """The rows of each data set."""
    names = dict.fromkeys(row.split("-")[0] for row in rows)
    return [[row for row in rows if row.startswith(f"{name}-")] for name in names]


def ticks(ax: Axes, rows: list[str]) -> None:
    """Sizes and activations under a row's place."""
    labels = [f"{size}\n{LABELS[act]}" for _, size, act in (row.split("-") for row in rows)]
    ax.set_xticks(range(len(rows)), labels)
    ax.set_xlim(-0.6, len(rows) - 0.4)


def draw_table(cells: Cells, rows: list[str], numbers: dict[str, Any]) -> Figure:
    """Test errors of the best models, here and in the paper."""
    known, parts = of_paper(numbers), groups(rows)
    figure, axes = panels(len(parts), height=3.4)
    for ax, names in zip(np.atleast_1d(axes), parts, strict=True):
        kinds = (("gp", "Gaussian process", COLORS[0], -0.12), ("sgd", "network", COLORS[1], 0.12))
        for kind, label, color, shift in kinds:
            ours = [100 * (1 - cells[f"{kind}-{row}"]["accuracy"]) for row in names]
            place = np.arange(len(names)) + shift
            ax.plot(place, ours, "o", color=color, markersize=6, label=label)
            if known:
                key = "gp_accuracy" if kind == "gp" else "network_accuracy"
                theirs = [100 * (1 - known[row][key]) for row in names]
                look = {"markerfacecolor": "none", "markeredgewidth": 1.2, "markersize": 10}
                ax.plot(place, theirs, "o", color=color, label=f"{label}, paper", **look)
        ticks(ax, names)
        log_scale(ax, "y")
        ax.set_ylabel("test error in %")
        ax.set_title(title(names[0]), fontsize=9)
    legend(figure, np.atleast_1d(axes)[0], columns=4 if len(parts) > 1 else 2)
    return figure


def draw_certainty(cells: Cells, rows: list[str]) -> Figure:
    """NLL and calibration error of both Gaussian processes and of the MAP network."""
    figure, axes = panels(2, height=3.4)
    figure.set_figwidth(max(7.2, 0.8 * len(rows)))
    for ax, key in zip(axes, ("NLL", "ECE"), strict=True):
        for place, (name, color) in enumerate(WAYS.items()):
            values = [ways(cells, row)[name][key] for row in rows]
            x = np.arange(len(rows)) + 0.22 * (place - 1)
            ax.plot(x, values, "o", color=color, markersize=5, label=name)
        ticks(ax, rows)
        ax.tick_params(axis="x", labelsize=7)
        starts = [i for i in range(1, len(rows)) if rows[i][:5] != rows[i - 1][:5]]
        for start in starts:
            ax.axvline(start - 0.5, color=INK, linewidth=0.6, alpha=0.4)
        for start in (0, *starts):
            ax.text(start - 0.5, 1.0, f" {title(rows[start])}", transform=ax.get_xaxis_transform(),
                    va="bottom", fontsize=8)  # fmt: skip
        log_scale(ax, "y")
        ax.set_ylabel("negative log-likelihood" if key == "NLL" else "calibration error")
    legend(figure, axes[0], columns=3)
    return figure


def draw_widths(cells: Cells) -> Figure:
    """Accuracy of trained networks over their width, with the Gaussian process as a line."""
    rows = rows_of(cells, "width")
    parts = list(dict.fromkeys(row.rpartition("-")[0] for row in rows))
    figure, axes = panels(len(parts), height=3.4)
    for ax, part in zip(np.atleast_1d(axes), parts, strict=True):
        for activation, color in zip(LABELS, COLORS, strict=False):
            cell, gp = (cells.get(f"{kind}-{part}-{activation}") for kind in ("width", "gp"))
            if cell is not None:
                values = 100 * np.array(cell["accuracies"])
                ax.plot(
                    cell["widths"],
                    values.mean(1),
                    color=color,
                    label=f"{LABELS[activation]} networks",
                )
                ax.plot(cell["widths"], values, ".", color=color, alpha=0.5, markersize=4)
            if gp is not None and cell is not None:
                label = f"{LABELS[activation]} Gaussian process"
                ax.axhline(
                    100 * gp["accuracy"], color=color, linestyle="--", linewidth=1, label=label
                )
        log_scale(ax, "x")
        ax.set_xlabel("width of both hidden layers")
        ax.set_ylabel("test accuracy in %")
        ax.set_title(f"{title(part)}, {part.split('-')[1]} training images", fontsize=9)
    legend(figure, np.atleast_1d(axes)[0], columns=4 if len(parts) > 1 else 2)
    return figure


def title(row: str) -> str:
    """The data of a row."""
    return {"CIFAR": "CIFAR-10", "digits": "8 × 8 digits"}.get(row.split("-")[0], "MNIST")


def log_scale(ax: Axes, axis: str) -> None:
    """A logarithmic axis with plain numbers, more of them where it spans less than a decade."""
    scale = {"x": ax.set_xscale, "y": ax.set_yscale}[axis]
    scale("log")
    chosen = ax.xaxis if axis == "x" else ax.yaxis
    low, high = ax.get_xlim() if axis == "x" else ax.get_ylim()
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    chosen.set_major_formatter(plain)
    chosen.set_minor_formatter(plain if high < 10 * low else NullFormatter())


def legend(figure: Figure, ax: Axes, columns: int) -> None:
    """One legend below all axes."""
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=columns, fontsize=8, frameon=False
    )
