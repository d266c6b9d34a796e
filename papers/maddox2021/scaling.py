"""Seconds to a posterior with all parameters of a network, against the points and against the parameters.

    python papers/maddox2021/scaling.py --out figures --device cuda
    python papers/maddox2021/scaling.py --out figures --points 300 1000 --widths 10 30 100
    python papers/maddox2021/scaling.py --out figures --quick

The networks of the original program's speed test: an MLP 5-200-2000-200-1 with ELU (803,601 parameters) and
300 to 100,000 points, and five layers of widths 10 to 1825 (P to 10⁷) with 1000 points; unit prior variance,
noise variance log 2, the defaults there. Timed is all from the data to means and variances at 1000 test
points, after a warm-up. Function space is `condition`: exact where the Gram matrix can be factorized, else
conjugate gradients, without the evidence. Weight space is exact for few parameters, else `Sampled`: draws
of the posterior by conjugate gradients to the residual of the original program (.01), and one more system for
the mean of the linear model; its variances have the sampling error of the draws. How far means (of their
spread) and variances (median of |log ratio|) are from those of function space is printed.

Of the original program only the ends of its curves are published; between them a power law is drawn and
compared with. It had a GPU of another generation.

Claims: both spaces have the same posterior. Means differ by at most 5 % of their spread, as both are solved
to a residual of 1 %; variances by at most two standard errors of the draws, 2√(2/S), and by 0.1 % where
neither is approximate. On a GPU each size is at least ten times faster than the original program.

Maddox et al. (2021), "Fast adaptation with linearized neural networks".
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor, nn

import net2gp as n2g
from net2gp.linalg import LowRankPlusIdentity, block_cg, nystrom
from net2gp.plots import COLORS, FAINT, INK

sys.path.append(str(Path(__file__).parents[1]))
import claims
import findings
import studies

NUM_TEST = 1000
NOISE_VAR = float(np.log(2))
POINTS = [300, 1000, 3000, 10_000, 30_000, 60_000, 100_000]
WIDTHS = [10, 30, 100, 300, 1000, 1500, 1825]
SMALL = 3000
"""Parameters up to which the precision of the weights is factorized."""

PUBLISHED = {
    "points": {
        "function space": ((300, 1.7), (1e5, 330.0)),
        "weight space": ((300, 3.3), (1e5, 95.0)),
    },
    "parameters": {
        "function space": ((391, 0.8), (7.5e7, 42.0)),
        "weight space": ((391, 0.95), (6.8e6, 30.0)),
    },
}
"""The ends of the original program's curves; in weight space it ran out of memory at P = 9.2e6."""

OUT_OF_MEMORY = 9.2e6


@dataclass(frozen=True)
class Result:
    """One posterior: its time and memory, and how far it is from the exact one where there is one."""

    axis: str
    size: int
    space: str
    exact: bool
    seconds: float
    gigabytes: float
    mean_error: float
    variance_error: float


def deep(width: int) -> nn.Sequential:
    """Five layers of one width: P = 391 for width 10."""
    sizes = [4, *[width] * 4]
    layers: list[nn.Module] = []
    for one, other in pairwise(sizes):
        layers += [nn.Linear(one, other), nn.ELU()]
    return nn.Sequential(*layers, nn.Linear(width, 1))


def wide() -> nn.Sequential:
    """5-200-2000-200-1: P = 803,601."""
    return nn.Sequential(
        nn.Linear(5, 200),
        nn.ELU(),
        nn.Linear(200, 2000),
        nn.ELU(),
        nn.Linear(2000, 200),
        nn.ELU(),
        nn.Linear(200, 1),
    )


def problem(network: nn.Sequential, count: int, device: torch.device) -> tuple[Tensor, ...]:
    """Inputs, targets and test inputs of a smooth function with noise."""
    generator = torch.Generator().manual_seed(0)
    first = network[0]
    assert isinstance(first, nn.Linear)
    x = torch.randn(count + NUM_TEST, first.in_features, generator=generator)
    noise = NOISE_VAR**0.5 * torch.randn(len(x), 1, generator=generator)
    y = 2 * (2 * x[:, :1]).sin() + x[:, 1:2] * x[:, 2:3] + noise
    return x[:count].to(device), y[:count].to(device), x[count:].to(device)


def function_space(network: nn.Module, x: Tensor, y: Tensor, test: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance by the Gram matrix, or by products with it."""
    kernel = n2g.linearize(network).kernel(prior_var=1.0)
    solver = (
        n2g.solvers.Cholesky() if factorized(x) else n2g.solvers.CG(tol=TOLERANCE, num_probes=0)
    )
    posterior = n2g.condition(kernel, (x, y), n2g.Gaussian(NOISE_VAR), solver=solver)
    found = posterior.marginal(test)
    return found.mean, found.variance


def factorized(x: Tensor) -> bool:
    """Whether the Gram matrix and its factor fit into memory."""
    return 3 * 8 * len(x) ** 2 < n2g.memory.available_memory(x.device)


def weight_space(draws: int) -> Callable[..., tuple[Tensor, Tensor]]:
    """Mean and variance from the parameters."""

    def run(network: nn.Module, x: Tensor, y: Tensor, test: Tensor) -> tuple[Tensor, Tensor]:
        linearized = n2g.linearize(network)
        noise = n2g.Gaussian(NOISE_VAR)
        if linearized.num_params <= SMALL:
            solver = n2g.solvers.WeightCholesky()
            kernel = linearized.kernel(prior_var=1.0)
            found = n2g.condition(kernel, (x, y), noise, solver=solver).marginal(test)
            return found.mean, found.variance
        structure = n2g.structures.Sampled(
            num_samples=draws,
            tol=TOLERANCE,
            num_probes=0,
            rank=rank_of(linearized, x),
            num_points=SKETCH,
        )
        posterior = n2g.laplace(linearized, (x, y), noise, prior_var=1.0, structure=structure)
        mean = linear_mean(linearized, x, y, test)
        return mean, posterior.marginal(test).variance

    return run


def rank_of(linearized: n2g.Linearized, x: Tensor) -> int:
    """Of the preconditioner: a sketch has as many numbers in float64 as fit into 4 GB."""
    return min(500, len(x), int(4e9 / 8 / linearized.num_params))


def linear_mean(linearized: n2g.Linearized, x: Tensor, y: Tensor, test: Tensor) -> Tensor:
    """J(test) w for (I + F) w = J(x)ᵀ y / noise, by products with the Fisher matrix F."""
    fisher, part = (
        n2g.linear.GaussNewton(linearized, some, n2g.Gaussian(NOISE_VAR))
        for some in (x, x[:SKETCH])
    )
    share = len(x) / len(part.x)
    sketch = nystrom(
        lambda v: share * part.matmul(v),
        linearized.num_params,
        rank_of(linearized, x),
        generator=torch.Generator(x.device).manual_seed(0),
        device=x.device,
    )
    right = sum(
        linearized.flatten(linearized.vjp(inputs, targets / NOISE_VAR)).double()
        for inputs, targets in zip(x.split(10_000), y.split(10_000), strict=True)
    )
    solution = block_cg(
        lambda v: v + fisher.matmul(v),
        right,
        preconditioner=LowRankPlusIdentity(*sketch),
        tol=TOLERANCE,
    )
    return linearized.jvp(test, linearized.unflatten(solution.x.to(x)))


TOLERANCE, SKETCH = 1e-2, 6000


def timed(
    run: Callable[[], tuple[Tensor, Tensor]], device: torch.device
) -> tuple[float, float, Tensor, Tensor]:
    """Seconds (the better of two runs, if the first is short), peak GiB, mean and variance."""
    seconds = []
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    while not seconds or (len(seconds) < 3 and sum(seconds) < 3):
        started = time.perf_counter()
        mean, variance = run()
        value = float(variance.sum())  # waits for the device
        seconds.append(time.perf_counter() - started)
        assert np.isfinite(value)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else float("nan")
    return min(seconds), peak, mean, variance


def measure(axis: str, size: int, options: argparse.Namespace) -> list[Result]:
    """Both spaces at one size."""
    device = torch.device(options.device)
    torch.manual_seed(0)
    network = (wide() if axis == "points" else deep(size)).eval().to(device)
    x, y, test = problem(network, size if axis == "points" else 1000, device)
    runs = {"function space": function_space, "weight space": weight_space(options.draws)}
    found: dict[str, tuple[float, float, Tensor, Tensor]] = {}
    rows = []
    for space, run in runs.items():
        seconds, peak, mean, variance = timed(partial(run, network, x, y, test), device)
        found[space] = seconds, peak, mean, variance
        _, _, best_mean, best_variance = found["function space"]
        spread = best_mean.std()
        row = Result(
            axis,
            size if axis == "points" else n2g.linearize(network).num_params,
            space,
            factorized(x) if space == "function space" else axis == "parameters" and size <= 30,
            seconds,
            peak,
            float((mean - best_mean).square().mean().sqrt() / spread),
            float((variance / best_variance).log().abs().median()),
        )
        print(json.dumps(row.__dict__), flush=True)
        rows.append(row)
    return rows


def published(axis: str, space: str, size: float) -> float:
    """Seconds of the original program, by a power law between the ends of its curve."""
    (a, ta), (b, tb) = PUBLISHED[axis][space]
    return float(ta * (size / a) ** (np.log(tb / ta) / np.log(b / a)))


def crossing(rows: list[Result]) -> float | None:
    """The last size at which the faster space changes, of exact function space and weight space."""
    slow = {row.size: row.seconds for row in rows if row.space == "function space" and row.exact}
    fast = {row.size: row.seconds for row in rows if row.space == "weight space"}
    gaps = [(size, float(np.log(fast[size] / slow[size]))) for size in sorted(slow)]
    found = None
    for (a, left), (b, right) in pairwise(gaps):
        if (left > 0) != (right > 0):
            found = float(a * (b / a) ** (left / (left - right)))
    return found


COLOR = {"function space": COLORS[0], "weight space": COLORS[1]}


def panel(ax: Axes, axis: str, rows: list[Result]) -> None:
    """Seconds of both spaces, with the published curves; hollow: function space by conjugate gradients."""
    for space, color in COLOR.items():
        own = sorted((r.size, r.seconds, r.exact) for r in rows if r.space == space)
        ax.loglog([r[0] for r in own], [r[1] for r in own], "-", color=color, label=space)
        for size, seconds, exact in own:
            fill = "white" if space == "function space" and not exact else color
            ax.loglog(size, seconds, "o", color=color, markerfacecolor=fill)
        ends = PUBLISHED[axis][space]
        label = f"{space}, original (ends published)"
        ax.loglog(*zip(*ends, strict=True), "s--", color=color, alpha=0.5, label=label)
    ax.set_ylim(0.02, 900)
    cross = crossing(rows)
    if cross is not None:
        ax.axvline(cross, color=INK, linewidth=0.8, linestyle=":")
        text = f" crossover\n {cross:,.0f}"
        ax.annotate(text, (cross, 0.025), color=INK, fontsize=7)
    if axis == "parameters":
        ax.axvline(OUT_OF_MEMORY, color=FAINT, linewidth=0.8)
        text = "original: out of\nmemory from here "
        ax.annotate(text, (OUT_OF_MEMORY, 200), fontsize=7, ha="right")
    ax.set_xlabel("points N (P = 803,601)" if axis == "points" else "parameters P (N = 1000)")
    ax.set_ylabel("seconds")


def draw(rows: list[Result], out: Path) -> None:
    """Both axes side by side."""
    axes_of = [axis for axis in PUBLISHED if any(row.axis == axis for row in rows)]
    figure, axes = studies.panels(len(axes_of), height=3.4)
    for ax, axis in zip(np.atleast_1d(axes), axes_of, strict=True):
        panel(ax, axis, [row for row in rows if row.axis == axis])
    np.atleast_1d(axes)[0].legend(fontsize=6.5, loc="upper left")
    studies.save(figure, out, "maddox2021_scaling.png")


def stated(rows: list[Result], draws: int, on_gpu: bool) -> list[claims.Claim]:
    """What the head of this program claims."""
    exact = {(row.axis, row.size) for row in rows if row.space == "function space" and row.exact}
    found = []
    for row in rows:
        name = f"{row.axis} {row.size:,}, {row.space}"
        if on_gpu:
            ratio = published(row.axis, row.space, row.size) / row.seconds
            words = f"{name}: 10 times faster than the original"
            found.append(claims.Claim(words, f"{ratio:.1f}×", ratio >= 10))
        if row.space == "weight space":
            found.append(claims.at_most(f"{name}: means off by", row.mean_error, 0.05))
            if (row.axis, row.size) in exact:
                bound = 1e-3 if row.exact else 2 * (2 / draws) ** 0.5
                found.append(claims.at_most(f"{name}: variances off by", row.variance_error, bound))
    return found


def main(arguments: list[str] | None = None) -> int:
    """Print the table, write the figure; 0 if all claims hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder for the figure")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--points", type=int, nargs="*", default=POINTS)
    parser.add_argument("--widths", type=int, nargs="*", default=WIDTHS)
    parser.add_argument("--draws", type=int, default=32)
    parser.add_argument("--quick", action="store_true", help="few points, small networks, 8 draws")
    options = findings.parse(parser, arguments)
    if options.quick:
        options.points, options.widths, options.draws = [100], [10, 30, 100], 8
    warnings.simplefilter("ignore", n2g.errors.NotStationary)
    if not options.quick:
        measure("points", 300, options)
    rows = [row for size in options.points for row in measure("points", size, options)]
    rows += [row for width in options.widths for row in measure("parameters", width, options)]
    draw(rows, options.out)
    names = ("", "size", "space", "s", "original", "faster", "GiB", "mean off", "variance off")
    print("{:<12}{:>12}{:>16}{:>10}{:>10}{:>8}{:>8}{:>10}{:>14}".format(*names))
    for row in rows:
        old = published(row.axis, row.space, row.size)
        print(
            f"{row.axis:<12}{row.size:>12,}{row.space:>16}{row.seconds:>10.3f}{old:>10.1f}"
            f"{old / row.seconds:>7.1f}×{row.gigabytes:>8.1f}{row.mean_error:>10.4f}"
            f"{row.variance_error:>14.3f}"
        )
    findings.show(
        {f"{r.axis} {r.size:,}, {r.space}: seconds": r.seconds for r in rows},
        {
            f"{r.axis} {r.size:,}, {r.space}: seconds": published(r.axis, r.space, r.size)
            for r in rows
        },
    )
    for axis in PUBLISHED:
        print(f"crossover in {axis}: {crossing([row for row in rows if row.axis == axis])}")
    return 0 if claims.judge(stated(rows, options.draws, options.device != "cpu")) else 1


if __name__ == "__main__":
    raise SystemExit(main())
