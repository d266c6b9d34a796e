"""When wide networks are Gaussian processes, and two ways in which they are not.

    python papers/lecture/conditions.py --out figures [--quick]

The central limit theorem behind the limit asks that the output weights are independent and have a finite
variance. Stated before the run, for one hidden layer of ReLUs at one input:

- independent Gaussian weights: the excess kurtosis of f is 15/width, and falls with slope −1;
- Cauchy weights, scaled by 1/width: f stays Cauchy. Its tail index is 1 at every width, and one hidden unit
  carries most of Σ (v_j h_j)² at every width, where among Gaussians its share vanishes. Scaled by 1/√width,
  f grows as √width instead of settling;
- Gaussian weights with one shared random scale, s² ~ inverse gamma(ν/2, ν/2): f becomes a Student-t process.
  Its excess kurtosis tends to 6/(ν − 4), and does not fall to zero.

Neal (1996), "Priors for infinite networks", section 2.2; Der and Lee (2006), "Beyond Gaussian processes: on
the distributions of infinite networks"; Tracey and Wolpert (2018), "Upgrading from Gaussian processes to
Student's-t processes".
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from net2gp.limits import HiddenLayer, excess_kurtosis
from net2gp.plots import COLORS, FAINT, INK

sys.path.append(str(Path(__file__).parents[1]))
from claims import Claim, at_most
from common import Study, Topic, run, write
from studies import Slope

FREEDOM = 12.0
"""ν: the degrees of freedom of the Student-t process."""

TAIL = 0.01
"""The share of draws from which tail indices are estimated."""

BLOCK = 2**23
"""Numbers of hidden units that are drawn at once."""


@dataclass(frozen=True, eq=False)
class Draws:
    """What is kept of S networks of one width.

    Args:
        width: The number of hidden units.
        kernel: (2/n) Σ h_j², the variance of f given the hidden layer with Gaussian weights: (S,).
        cauchy: (1/n) Σ v_j h_j with Cauchy weights v: (S,).
        share: The largest of (v_j h_j)² in their sum, with Cauchy weights: (S,).
        gaussian_share: The same with Gaussian weights: (S,).
    """

    width: int
    kernel: Tensor
    cauchy: Tensor
    share: Tensor
    gaussian_share: Tensor

    @staticmethod
    def of(width: int, count: int, seed: int) -> Draws:
        """Draw hidden layers h_j = max(0, √2 g_j) with g ~ N(0, 1), and output weights."""
        generator = torch.Generator().manual_seed(seed)
        parts: list[tuple[Tensor, ...]] = []
        size = max(1, BLOCK // width)
        for start in range(0, count, size):
            shape = (min(size, count - start), width)
            hidden = torch.randn(shape, generator=generator).mul_(2**0.5).clamp_(min=0)
            cauchy = torch.empty(shape).cauchy_(generator=generator).mul_(hidden)
            normal = torch.randn(shape, generator=generator).mul_(hidden)
            parts.append(
                (
                    hidden.square().sum(1).double() / width,
                    cauchy.double().sum(1) / width,
                    _share(cauchy),
                    _share(normal),
                )
            )
        return Draws(width, *(torch.cat(column) for column in zip(*parts, strict=True)))


def _share(terms: Tensor) -> Tensor:
    squares = terms.double().square_()
    return squares.amax(1) / squares.sum(1).clamp(min=1e-300)


def kurtosis(kernel: Tensor, scale: Tensor | None = None) -> tuple[float, float]:
    """The excess kurtosis of f ~ N(0, scale · kernel), and its standard error by 50 batches.

    Given the kernel f is Gaussian, so that E f⁴ = 3 E kernel²; averages over f itself would be noisier.
    """
    variance = kernel if scale is None else kernel * scale

    def value(part: Tensor) -> Tensor:
        return 3 * part.square().mean(-1) / part.mean(-1).square() - 3

    batches = value(variance[: len(variance) // 50 * 50].reshape(50, -1))
    return float(value(variance)), float(batches.std()) / 50**0.5


def tail_index(values: Tensor) -> tuple[float, float]:
    """Hill's estimate of the index α of P(|f| > t) ~ t^−α, and its standard error α/√k over the k largest."""
    count = int(TAIL * len(values))
    top = values.abs().sort(descending=True).values[: count + 1]
    index = 1 / float((top[:-1] / top[-1]).log().mean())
    return index, index / count**0.5


@dataclass(frozen=True, eq=False)
class Found:
    """All numbers of a run, each with an entry per width; pairs are a value and its standard error."""

    widths: list[int]
    gaussian: list[tuple[float, float]]
    shared: list[tuple[float, float]]
    tails: list[tuple[float, float]]
    gaussian_tails: list[tuple[float, float]]
    shares: list[float]
    gaussian_shares: list[float]
    sizes: list[float]
    widest: Draws
    scale: Tensor
    normal: Tensor


def measure(quick: bool) -> Found:
    """Draw networks of all widths."""
    widths = [16, 64, 256] if quick else [16, 64, 256, 1024, 4096]
    count = 50_000 if quick else 100_000
    draws = [Draws.of(width, count, seed) for seed, width in enumerate(widths)]
    generator = torch.Generator().manual_seed(99)
    # χ² with a whole number of degrees of freedom is a sum of squares
    squares = torch.randn(int(FREEDOM), count, generator=generator, dtype=torch.float64).square()
    scale = FREEDOM / squares.sum(0)
    normal = torch.randn(count, generator=generator, dtype=torch.float64)
    return Found(
        widths,
        [kurtosis(one.kernel) for one in draws],
        [kurtosis(one.kernel, scale) for one in draws],
        [tail_index(one.cauchy) for one in draws],
        [tail_index(one.kernel.sqrt() * normal) for one in draws],
        [float(one.share.mean()) for one in draws],
        [float(one.gaussian_share.mean()) for one in draws],
        [float(one.cauchy.abs().median()) * one.width**0.5 for one in draws],
        draws[-1],
        scale,
        normal,
    )


def claims(found: Found) -> list[Claim]:
    """What was stated before the run."""
    x = torch.ones(1, 4, dtype=torch.float64)
    made: list[Claim] = []
    for width, (value, error) in zip(found.widths, found.gaussian, strict=True):
        theory = float(excess_kurtosis([HiddenLayer(nn.ReLU(), width)], x, weight_var=2.0))
        apart = abs(value - theory) / error
        made.append(
            at_most(f"Gaussian, width {width}: errors from 15/width = {theory:.3g}", apart, 4)
        )
    slope = _slope(found.widths, [value for value, _ in found.gaussian])
    made.append(at_most("Gaussian: slope of the excess kurtosis + 1", abs(slope + 1), 0.1))
    limit = 6 / (FREEDOM - 4)
    (value, error), width = found.shared[-1], found.widths[-1]
    # both the scale and the finite width add to the kurtosis, and their product too
    there = 3 * (1 + limit / 3) * (1 + 5 / width) - 3
    made.append(
        at_most(
            f"shared scale, width {width}: errors from {there:.3g}", abs(value - there) / error, 4
        )
    )
    lowest = min(value + 4 * error for value, error in found.shared)
    made.append(at_most(f"shared scale: {limit:g} less the lowest kurtosis", limit - lowest, 0))
    error = (TAIL * len(found.normal)) ** -0.5  # of an index that is 1
    for width, (index, _) in zip(found.widths, found.tails, strict=True):
        name = f"Cauchy, width {width}: errors of the tail index from 1"
        made.append(at_most(name, abs(index - 1) / error, 4))
    logs = torch.tensor(found.widths, dtype=torch.float64).log()
    apart = _slope(found.widths, [index for index, _ in found.tails])
    apart *= float((logs - logs.mean()).norm()) / error
    made.append(at_most("Cauchy: errors of the tail index's slope from 0", abs(apart), 4))
    lightest = min(index for index, _ in found.gaussian_tails)
    made.append(at_most("4 less the smallest tail index of Gaussians", 4 - lightest, 0))
    made.append(at_most("Cauchy: 0.6 less the largest unit's share", 0.6 - min(found.shares), 0))
    fall = found.gaussian_shares[-1] / found.gaussian_shares[0]
    made.append(at_most("Gaussian: the largest unit's share, last to first width", fall, 1 / 3))
    slope = _slope(found.widths, found.sizes)
    made.append(at_most("Cauchy by 1/√width: slope of |f| less 1/2", abs(slope - 0.5), 0.1))
    return made


def _slope(widths: list[int], values: list[float]) -> float:
    return Slope.fit(widths, torch.tensor(values)).value


def draw(found: Found) -> Figure:
    """Kurtosis, tail index and the laws of f at the largest width."""
    figure = Figure(figsize=(12.6, 3.5), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    widths = found.widths
    _curve(left, widths, found.shared, COLORS[1], "one shared scale")
    _curve(left, widths, found.gaussian, COLORS[0], "independent Gaussians")
    left.plot(
        widths, [15 / width for width in widths], color=INK, linestyle="--", label="15 / width"
    )
    left.axhline(6 / (FREEDOM - 4), color=FAINT, linestyle=":", label=r"$6\,/\,(\nu-4)$")
    left.set(
        xscale="log", yscale="log", ylabel="excess kurtosis of f", title="A shared scale stays"
    )
    _curve(middle, widths, found.tails, COLORS[2], "Cauchy weights")
    _curve(middle, widths, found.gaussian_tails, COLORS[0], "Gaussian weights")
    middle.axhline(1, color=FAINT, linestyle=":")
    middle.set(
        xscale="log", yscale="log", ylabel="tail index of f (Hill)", title="Heavy tails stay"
    )
    middle.set_yticks([1, 2, 5, 10], ["1", "2", "5", "10"])
    for ax in (left, middle):
        ax.set_xlabel("width")
        ax.set_xticks(widths, [str(width) for width in widths])
        ax.minorticks_off()
        ax.legend(frameon=False, fontsize=8)
    widest = found.widest
    root = widest.kernel.sqrt() * found.normal
    laws = {
        "Gaussian weights": (root, COLORS[0]),
        "one shared scale": (root * found.scale.sqrt(), COLORS[1]),
        "Cauchy weights": (widest.cauchy, COLORS[2]),
    }
    for name, (values, color) in laws.items():
        size = (values.abs() / values.abs().median()).sort(descending=True).values
        share = torch.arange(1, len(size) + 1, dtype=torch.float64) / len(size)
        right.plot(size[::10], share[::10], color=color, label=name)
    right.set(xscale="log", yscale="log", xlim=(0.3, 300), ylim=(2e-4, 1))
    right.set(
        xlabel="t, in medians of |f|", ylabel="P(|f| > t)", title=f"Tails at width {widest.width}"
    )
    right.legend(frameon=False, fontsize=8)
    return figure


def _curve(
    ax: Axes, widths: list[int], pairs: list[tuple[float, float]], color: str, label: str
) -> None:
    values, errors = zip(*pairs, strict=True)
    ax.errorbar(widths, values, [2 * e for e in errors], color=color, marker="o", ms=4, label=label)


def conditions(quick: bool) -> Study:
    """Independent Gaussians, a shared scale and Cauchy weights over the width."""
    found = measure(quick)
    lines = [f"{'width':>6}{'Gaussian':>12}{'shared':>12}{'tail index':>12}{'largest share':>15}"]
    for i, width in enumerate(found.widths):
        kurtoses = f"{found.gaussian[i][0]:>12.4f}{found.shared[i][0]:>12.4f}"
        lines.append(f"{width:>6}{kurtoses}{found.tails[i][0]:>12.3f}{found.shares[i]:>15.3f}")
    text = (
        "A wide network is a Gaussian process if its weights are independent and have a finite variance: the "
        "excess kurtosis of f then falls as 1/width. With Cauchy weights the tails of f stay as heavy at "
        "every width, and with one random scale for all weights f becomes a Student-t process."
    )
    title = "When there is no Gaussian limit"
    return Study("conditions", title, text, draw(found), tuple(claims(found)), "\n".join(lines))


TOPICS: list[Topic] = [conditions]


def figures(out: Path, quick: bool) -> list[Path]:
    """Write the figure."""
    return [write(topic(quick), out) for topic in TOPICS]


if __name__ == "__main__":
    raise SystemExit(run(TOPICS, __doc__))
