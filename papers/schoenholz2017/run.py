"""Order, chaos and how deep a signal travels: the phase diagrams of tanh and ReLU networks.

    python papers/schoenholz2017/run.py --out figures

Prints the points named in expected.toml beside the values found, and draws q*, the slope χ₁ with the
critical line, and the depth scale of correlations over weight and bias variances.

Schoenholz, Gilmer, Ganguli & Sohl-Dickstein (2017), "Deep information propagation", figures 1 and 2.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize, TwoSlopeNorm
from torch import nn

from net2gp.limits import PhaseDiagram, critical_line, fixed_point, phase_diagram, slope

sys.path.append(str(Path(__file__).parents[1]))
import findings

ACTIVATIONS = {"tanh": nn.Tanh(), "relu": nn.ReLU()}
INK = "#222222"


@dataclass(frozen=True)
class Row:
    """One number of the table: what it is, what was expected, what was found."""

    name: str
    expected: float
    found: float

    @property
    def error(self) -> float:
        """The relative difference."""
        return abs(self.found / self.expected - 1)


def expectations() -> dict[str, Any]:
    """The reference numbers beside this program."""
    return tomllib.loads(Path(__file__).with_name("expected.toml").read_text())


def table() -> list[Row]:
    """Every number of expected.toml, recomputed."""
    rows, expected = [], expectations()
    for point in expected["critical"]:
        name, bias_var = point["activation"], point["bias_var"]
        weight_var = critical_line(ACTIVATIONS[name], bias_var)
        q = fixed_point(ACTIVATIONS[name], weight_var, bias_var)
        where = f"{name:<5} bias_var {bias_var:<5g}"
        rows.append(Row(f"{where} critical weight_var", point["weight_var"], float(weight_var)))
        rows.append(Row(f"{where} q* there", point["fixed_point"], float(q)))
    for point in expected["settled"]:
        name, weight_var, bias_var = point["activation"], point["weight_var"], point["bias_var"]
        q = fixed_point(ACTIVATIONS[name], weight_var, bias_var)
        chi = slope(ACTIVATIONS[name], q, weight_var)
        where = f"{name:<5} bias_var {bias_var:<5g} weight_var {weight_var:<4g}"
        rows.append(Row(f"{where} q*", point["fixed_point"], float(q)))
        rows.append(Row(f"{where} slope", point["slope"], float(chi)))
    return rows


def draw(out: Path, size: int) -> Path:
    """Write the figure: a row an activation; q*, χ₁ and the depth scale in columns."""
    plt.rcParams.update({"font.size": 9, "axes.edgecolor": INK, "text.color": INK})
    figure, axes = plt.subplots(2, 3, figsize=(10.5, 6.2), layout="constrained", sharex="row")
    ranges = {"tanh": (0.3, 4.5, 2.0), "relu": (0.3, 3.0, 2.0)}
    for row, (name, (low, high, top)) in zip(axes, ranges.items(), strict=True):
        weight_vars = torch.linspace(low, high, size, dtype=torch.float64)
        # just above zero, where the limit of no bias is no longer the whole row
        bias_vars = torch.linspace(top / 1000, top, size, dtype=torch.float64)
        grid = phase_diagram(ACTIVATIONS[name], weight_vars, bias_vars)
        for ax, panel in zip(row, _panels(grid), strict=True):
            _panel(ax, name, grid, *panel)
    for ax in axes[-1]:
        ax.set_xlabel("weight variance $\\sigma_w^2$")
    for ax in axes[:, 0]:
        ax.set_ylabel("bias variance $\\sigma_b^2$")
    out.mkdir(parents=True, exist_ok=True)
    path = out / "phase_diagram.png"
    figure.savefig(path, dpi=160)
    plt.close(figure)
    return path


def _panels(grid: PhaseDiagram) -> list[tuple[torch.Tensor, str, str, Normalize]]:
    return [
        (grid.variance, "variance $q^*$", "viridis", LogNorm(1e-2, 1e1)),
        (grid.slope, "slope $\\chi_1$", "RdBu_r", TwoSlopeNorm(1.0, 0.2, 1.8)),
        (
            grid.depth_scales.correlation,
            "depth scale $\\xi_c$ in layers",
            "magma",
            LogNorm(1, 100),
        ),
    ]


def _panel(
    ax: Axes,
    name: str,
    grid: PhaseDiagram,
    values: torch.Tensor,
    label: str,
    colors: str,
    norm: Normalize,
) -> None:
    shown = values.masked_fill(grid.variance.isinf(), torch.nan)
    mesh = ax.pcolormesh(
        grid.weight_vars.numpy(),
        grid.bias_vars.numpy(),
        shown.clamp(norm.vmin, norm.vmax).numpy(),
        cmap=colors,
        norm=norm,
        shading="gouraud" if not bool(shown.isnan().any()) else "nearest",
        rasterized=True,
    )
    ax.set_facecolor("#dddddd")
    ax.figure.colorbar(mesh, ax=ax, extend="both", pad=0.02)
    ax.set_title(f"{'tanh' if name == 'tanh' else 'ReLU'}: {label}", fontsize=9)
    _line(ax, name, grid)
    ax.set_xlim(float(grid.weight_vars[0]), float(grid.weight_vars[-1]))
    ax.set_ylim(0, float(grid.bias_vars[-1]))


def _line(ax: Axes, name: str, grid: PhaseDiagram) -> None:
    if name == "relu":
        ax.axvline(2.0, color=INK, linewidth=1.4, linestyle="--")
        ax.plot(2.0, 0.0, "o", color=INK, markersize=5, clip_on=False)
        ax.text(2.5, 1.0, "$q^*$ diverges", ha="center", color=INK)
        return
    # denser towards zero, where the line is steep
    bias_vars = torch.linspace(0, 1, 60, dtype=torch.float64).square() * grid.bias_vars[-1]
    line = critical_line(ACTIVATIONS[name], bias_vars)
    ax.plot(line.numpy(), bias_vars.numpy(), color=INK, linewidth=1.4)
    if "chi" in ax.get_title():
        ax.text(1.3, 1.3, "ordered", ha="center", color=INK)
        ax.text(3.6, 0.4, "chaotic", ha="center", color=INK)


def main(arguments: list[str] | None = None) -> int:
    """Print the table, write the figure; the exit status says whether the numbers agree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder for the figure")
    parser.add_argument("--size", type=int, default=60, help="points along each axis of the figure")
    options = findings.parse(parser, arguments, quick={"size": 20})
    rows, tolerance = table(), expectations()["tolerance"]["relative"]
    print(f"{'':<42}{'expected':>14}{'found':>14}{'error':>10}")
    for row in rows:
        print(f"{row.name:<42}{row.expected:>14.8f}{row.found:>14.8f}{row.error:>10.1e}")
    findings.add(
        findings.Entry(r.name, r.expected, r.found, tolerance * r.expected, r.error <= tolerance)
        for r in rows
    )
    print(draw(options.out, options.size))
    return 0 if all(row.error <= tolerance for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
