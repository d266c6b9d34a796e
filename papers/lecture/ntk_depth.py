"""The tangent kernel of ever deeper networks: order, chaos, the edge between them, and residual networks.

    python papers/lecture/ntk_depth.py --out figures [--quick]

The normalized tangent kernel ρ_L = Θ(x, x') / Θ(x, x) of a network of L layers forgets its inputs. Stated
before the run, for pairs of inputs at several angles:

- ordered phase: ρ_L → 1, so that the kernel matrix has rank one, and 1 − ρ_L falls as L χ^L with slope χ;
- chaotic phase: ρ_L → 0, the kernel matrix becomes the identity, and ρ_L falls as χ^−L;
- edge of chaos: ρ_L → 1/3 for erf and 1/4 for ReLU. This matrix has full rank, but is the same for all data.
  The differences between pairs fall as 1/L, and the distance to the limit as 1/L up to a logarithm;
- residual ReLU networks: as on the edge (1/4, and 1/L between pairs), whatever the variance of their weights.

Hayou, Doucet and Rousseau (2019), "Mean-field behaviour of neural tangent kernel for deep neural networks".
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from net2gp.limits import TangentDepth, critical_line, fixed_point, slope, tangent_depth
from net2gp.limits.modules import Erf
from net2gp.plots import COLORS, FAINT, INK

sys.path.append(str(Path(__file__).parents[1]))
from claims import Claim, at_most
from common import Study, Topic, run, write
from studies import Slope

CORRELATIONS = torch.tensor([-0.3, 0.2, 0.6, 0.9], dtype=torch.float64)
"""Of the pairs of inputs, after the first layer."""

BIAS_VAR, ORDERED, CHAOTIC = 0.05, 0.8, 3.0
"""Variances of erf networks: of biases, and of weights in both phases."""

BRANCHES = (0.5, 1.0, 2.0)
"""Weight variances of residual networks."""

Curve = dict[str, TangentDepth]


@dataclass(frozen=True, eq=False)
class Found:
    """The networks by name: off the edge, on it and with residual branches."""

    off: Curve
    edge: Curve
    residual: Curve
    slopes: dict[str, float]


def measure(quick: bool) -> Found:
    """Follow all networks."""
    depth = 400 if quick else 2000
    c = CORRELATIONS
    edge = float(critical_line(Erf(), BIAS_VAR))
    off = {
        "ordered": tangent_depth(Erf(), ORDERED, BIAS_VAR, c, 80),
        "chaotic": tangent_depth(Erf(), CHAOTIC, BIAS_VAR, c, 80),
    }
    on = {
        "erf": tangent_depth(Erf(), edge, BIAS_VAR, c, depth),
        "ReLU": tangent_depth(nn.ReLU(), 2.0, 0.0, c, depth, variance=1.0),
    }
    # the variance doubles with each layer at the largest branch, so that float64 holds 1000 layers
    residual = {
        f"{branch:g}": tangent_depth(
            nn.ReLU(), branch, 0.0, c, min(depth, 900), variance=1.0, residual=True
        )
        for branch in BRANCHES
    }
    phases = {"ordered": ORDERED, "chaotic": CHAOTIC}
    slopes = {n: float(slope(Erf(), fixed_point(Erf(), w, BIAS_VAR), w)) for n, w in phases.items()}
    return Found(off, on, residual, slopes)


def rate(values: Tensor, first: int, last: int) -> Tensor:
    """The factor per layer between two depths."""
    return (values[last - 1] / values[first - 1]) ** (1 / (last - first))


def power(depths: Tensor, values: Tensor) -> float:
    """The exponent p of values ~ L^p over the second half of the depths, on a logarithmic scale."""
    deepest = int(depths[-1])
    chosen = torch.logspace(math.log10(deepest / 5), math.log10(deepest), 20).round().long() - 1
    return Slope.fit(depths[chosen].tolist(), values[chosen]).value


def spread(found: TangentDepth) -> Tensor:
    """The largest difference between pairs: (L,)."""
    return found.normalized.amax(1) - found.normalized.amin(1)


def claims(found: Found) -> list[Claim]:
    """What was stated before the run."""
    made: list[Claim] = []
    ordered, chaotic = found.off["ordered"], found.off["chaotic"]
    per_layer = (1 - ordered.normalized) / ordered.depths[:, None]
    apart = (rate(per_layer, 20, 40) / found.slopes["ordered"] - 1).abs().max()
    made.append(at_most("ordered: rate of (1 − ρ)/L beside χ", float(apart), 0.02))
    made.append(
        at_most("ordered: 1 − ρ at 80 layers", float(1 - ordered.normalized[-1].min()), 1e-6)
    )
    apart = (rate(chaotic.normalized, 50, 80) * found.slopes["chaotic"] - 1).abs().max()
    made.append(at_most("chaotic: rate of ρ beside 1/χ", float(apart), 0.02))
    made.append(at_most("chaotic: ρ at 80 layers", float(chaotic.normalized[-1].max()), 1e-3))
    for name, limit in (("erf", 1 / 3), ("ReLU", 1 / 4)):
        made += _polynomial(f"edge, {name}", found.edge[name], limit)
    for name, curve in found.residual.items():
        made += _polynomial(f"residual, branch {name}", curve, 1 / 4)
    return made


def _polynomial(name: str, found: TangentDepth, limit: float) -> list[Claim]:
    away = (found.normalized - limit).abs()
    deepest = float(away[-1].max())
    depth = int(found.depths[-1])
    exponent = power(found.depths, away.amax(1))
    return [
        at_most(
            f"{name}: |ρ − {limit:.3g}| at {depth} layers", deepest, 12 * math.log(depth) / depth
        ),
        at_most(f"{name}: exponent of |ρ − {limit:.3g}| beside −1", abs(exponent + 1), 0.3),
        at_most(
            f"{name}: exponent of differences between pairs beside −1",
            abs(power(found.depths, spread(found)) + 1),
            0.2,
        ),
    ]


def draw(found: Found) -> Figure:
    """ρ over depth in all phases, its exponential and its polynomial forgetting."""
    figure = Figure(figsize=(12.6, 3.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    styles = {"ordered": COLORS[0], "chaotic": COLORS[1]}
    for name, color in styles.items():
        _fan(left, found.off[name], color, f"erf, {name}")
    _fan(left, found.edge["erf"], COLORS[2], "erf, edge")
    _fan(left, found.edge["ReLU"], COLORS[3], "ReLU, edge")
    for limit in (1 / 3, 1 / 4):
        left.axhline(limit, color=FAINT, linestyle=":", linewidth=1)
    left.set(xscale="log", xlim=(1, 1500), ylim=(-0.35, 1.03), ylabel=r"$\rho_L$")
    left.set_title("Normalized tangent kernel of four pairs")
    ordered, chaotic = found.off["ordered"], found.off["chaotic"]
    away = (1 - ordered.normalized[:, 0]).clamp(min=1e-15)
    middle.plot(ordered.depths, away, color=COLORS[0], label=r"ordered: $1-\rho_L$")
    middle.plot(
        chaotic.depths, chaotic.normalized[:, 1], color=COLORS[1], label=r"chaotic: $\rho_L$"
    )
    _exponential(middle, found, away, chaotic.normalized[:, 1])
    middle.set(yscale="log", ylim=(1e-12, 2), title="Off the edge: exponentially")
    curves = {
        f"edge, {name}": (one, COLORS[2 + i]) for i, (name, one) in enumerate(found.edge.items())
    }
    shades = (COLORS[4], COLORS[5], INK)
    for (name, one), color in zip(found.residual.items(), shades, strict=True):
        curves[rf"residual, $\sigma_w^2={name}$"] = (one, color)
    for name, (one, color) in curves.items():
        right.plot(one.depths, spread(one), color=color, label=name)
    depths = found.edge["ReLU"].depths[20:].double()
    right.plot(depths, 12 / depths, color=FAINT, linestyle="--", label="slope −1")
    right.set(xscale="log", yscale="log", title="On it, and with residuals: as 1/L")
    right.set_ylabel("difference between pairs")
    left.legend(frameon=False, fontsize=8, loc="upper right", bbox_to_anchor=(1, 0.95))
    for ax in (left, middle, right):
        ax.set_xlabel("layers L")
    for ax in (middle, right):
        ax.legend(frameon=False, fontsize=8)
    return figure


def _fan(ax: Axes, found: TangentDepth, color: str, label: str) -> None:
    for pair in range(found.normalized.shape[1]):
        values = found.normalized[:, pair]
        ax.plot(found.depths, values, color=color, linewidth=1.2, label=None if pair else label)


def _exponential(ax: Axes, found: Found, ordered: Tensor, chaotic: Tensor) -> None:
    depths = torch.arange(15, 81, dtype=torch.float64)
    low, high = found.slopes["ordered"], found.slopes["chaotic"]
    lines = (
        ordered[39] / (40 * low**40) * depths * low**depths,
        chaotic[59] * high ** (60 - depths),
    )
    for line, label in zip(lines, (r"$L\chi^L$ and $\chi^{-L}$", None), strict=True):
        ax.plot(depths, line, color=INK, linestyle="--", linewidth=1, label=label)


def ntk_depth(quick: bool) -> Study:
    """The normalized tangent kernel in both phases, on the edge and with residual branches."""
    found = measure(quick)
    text = (
        "The tangent kernel of a deep network forgets its inputs: exponentially in the ordered phase, where "
        "all inputs become alike, and in the chaotic phase, where all become orthogonal. On the edge of "
        "chaos, and in residual networks of any weight variance, it forgets them only as 1/L."
    )
    title = "The tangent kernel with depth"
    return Study("ntk_depth", title, text, draw(found), tuple(claims(found)))


TOPICS: list[Topic] = [ntk_depth]


def figures(out: Path, quick: bool) -> list[Path]:
    """Write the figure."""
    return [write(topic(quick), out) for topic in TOPICS]


if __name__ == "__main__":
    raise SystemExit(run(TOPICS, __doc__))
