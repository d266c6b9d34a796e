"""A step function: the first example that deep Gaussian processes are asked to fit.

    python benchmarks/deep_step.py [--seeds 10] [--cells FOLDER] [--output FOLDER]
    python benchmarks/deep_step.py --quick

Forty inputs on an even grid of [-2, 2], targets 0 for x < 0 and 1 for x > 0, noise of standard deviation .05.
Three fits: `deep.fit(2, data, Gaussian())` with default settings, gpytorch's deep Gaussian process of two
layers with the same numbers of inducing points, steps and draws and the same learning rate, and an RBF
Gaussian process tuned by its evidence. GPflux is left out: it needs TensorFlow. Scores are means over seeds:
the negative log density of 400 fresh targets on the same interval, the largest overshoot of the mean beyond
[0, 1], and the part of the range of the first layer that it passes through between x = -.2 and x = .2.

Claims, which the exit status asserts for ten seeds and default settings: our mean negative log density is at
most -1.31 and below the RBF process's and gpytorch's, the largest overshoot over all seeds is at most .05,
and the first layer passes at least .8 of its range near the jump on every seed. A quick run asserts that all
fits end. `--cells` keeps each fit, so that a run that was stopped goes on. Writes `deep_step.md` and
`deep_step.png`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import net2gp as n2g
from deep_peers import Fit, Run, log_density, mean_of
from net2gp.deep import Ascent, fit
from run import RESULTS, made_by, processor

NOISE = 0.05
GRID = torch.linspace(-2, 2, 801, dtype=torch.float64)[:, None]
NEAR = 0.2
METHODS = ("net2gp, 2 layers", "gpytorch, 2 layers", "RBF process")

Row = dict[str, Any]


def main() -> int:
    options = parse(sys.argv[1:])
    made_by()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    options.cells.mkdir(parents=True, exist_ok=True)
    rows = []
    for seed in range(options.seeds):
        for method in METHODS:
            row = kept(options.cells / f"{method}_{seed}.json", method, seed, options.steps)
            print(
                f"seed {seed}: {method}: NLL {row['nll']:.3f}, {row['seconds']:.0f} s", flush=True
            )
            rows.append(row)
    options.output.mkdir(parents=True, exist_ok=True)
    return report(rows, options)


def parse(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed and 60 steps: seconds")
    parser.add_argument("--seeds", type=int, help="how many seeds (default 10)")
    parser.add_argument("--cells", type=Path, help="folder of what each fit gave, kept")
    parser.add_argument("--output", type=Path, help="folder of the result files")
    options = parser.parse_args(given)
    options.cells = options.cells or Path(tempfile.mkdtemp(prefix="net2gp-deep-step-"))
    options.seeds = options.seeds or (1 if options.quick else 10)
    options.steps = 60 if options.quick else Ascent().num_steps
    scratch = Path(tempfile.gettempdir()) / "net2gp-deep-step"
    options.output = options.output or (scratch if options.quick else RESULTS)
    return options


def problem(seed: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training data (40, 1), and 400 fresh test points."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.linspace(-2, 2, 40, dtype=torch.float64)[:, None]
    test = 4 * torch.rand(400, 1, generator=generator, dtype=torch.float64) - 2
    pairs = []
    for points in (x, test):
        noise = torch.randn(len(points), 1, generator=generator, dtype=torch.float64)
        pairs.append((points, (points > 0).double() + NOISE * noise))
    return pairs[0], pairs[1]


def kept(path: Path, method: str, seed: int, steps: int) -> Row:
    """What a fit gave, from its file if there is one."""
    if not path.is_file():
        part = path.with_suffix(".part")
        part.write_text(json.dumps(one(method, seed, steps)))
        part.rename(path)
    return json.loads(path.read_text())


def one(method: str, seed: int, steps: int) -> Row:
    """Fit one method to one seed, and score it."""
    data, (x, y) = problem(seed)
    started = time.process_time()
    hidden = None
    if method == METHODS[1]:
        usual = Ascent()
        settings = (2, steps, len(data[0]), None, usual.learning_rate, usual.num_samples, 1)
        peer = Fit(data[0], data[1][:, 0], Run(*settings, seed=seed)).climb()
        seconds = time.process_time() - started
        density = log_density(peer.predict(x), y[:, 0])
        found = peer.predict(GRID)
        mean, hidden = mean_of(found), peer.hidden(GRID)[:, 0].double()
        second = (found[0].exp()[:, None] * (found[2] + found[1].square())).sum(0)
        std = (second - mean.square()).clamp(min=0).sqrt()
    else:
        if method == METHODS[0]:
            ascent = Ascent(num_steps=steps, seed=seed)
            posterior = fit(2, data, n2g.Gaussian(), ascent=ascent)
        else:
            posterior = tuned(data)
        seconds = time.process_time() - started
        law = posterior.predict(x)
        density = law.log_prob(y)
        shown = posterior.predict(GRID)
        mean, std = shown.mean[:, 0], shown.variance[:, 0].sqrt()
        if method == METHODS[0]:
            hidden = posterior.process.hidden(GRID).mean(0)[:, 0]
    row: Row = {"method": method, "seed": seed, "nll": float(-density.mean()), "seconds": seconds}
    row["overshoot"] = float(torch.maximum(mean - 1, -mean).max().clamp(min=0))
    row["near"] = math.nan if hidden is None else near_jump(hidden)
    row["curves"] = [v.tolist() for v in (mean, std) + (() if hidden is None else (hidden,))]
    return row


def near_jump(hidden: Tensor) -> float:
    """The part of the range of a function that it passes through within .2 of the jump."""
    inside = hidden[GRID[:, 0].abs() <= NEAR + 1e-9]
    return float((inside.max() - inside.min()) / (hidden.max() - hidden.min()))


def tuned(data: tuple[Tensor, Tensor]) -> Any:
    """An RBF Gaussian process whose length scale, variance and noise maximize the evidence."""

    def builder(lengthscale: Tensor, variance: Tensor, noise: Tensor) -> Any:
        return n2g.condition(
            variance * n2g.RBF(lengthscale), data, n2g.Gaussian(noise), mean=center
        )

    def center(x: Tensor) -> Tensor:
        return data[1].mean() * torch.ones(len(x), 1).to(data[1])

    return n2g.tune(builder, lengthscale=0.5, variance=0.25, noise=0.01)


def report(rows: Sequence[Row], options: argparse.Namespace) -> int:
    """Write the table and the figure, and check the claims."""
    lines = [
        "# A step by deep Gaussian processes",
        "",
        f"{processor()}, one thread. {made_by()}",
        "",
    ]
    lines += ["Means over seeds ± standard errors; CPU seconds of a fit. See `deep_step.py`.", ""]
    lines += [
        "| | NLL | overshoot (largest) | part of the first layer near the jump (least) | seconds |"
    ]
    lines += ["|---|---:|---:|---:|---:|"]
    for method in METHODS:
        mine = [row for row in rows if row["method"] == method]
        nll = np.array([row["nll"] for row in mine])
        error = nll.std(ddof=1) / math.sqrt(len(nll)) if len(nll) > 1 else 0.0
        over, near = (np.array([row[key] for row in mine]) for key in ("overshoot", "near"))
        seconds = np.mean([row["seconds"] for row in mine])
        part = "" if np.isnan(near).any() else f"{near.mean():.3f} ({near.min():.3f})"
        lines.append(
            f"| {method} | {nll.mean():.3f} ± {error:.3f} | {over.mean():.3f} ({over.max():.3f}) "
            f"| {part} | {seconds:.1f} |"
        )
    lines += ["", "![fits](deep_step.png)"]
    broken = [] if options.quick else list(failures(rows))
    verdict = [f"- fails: {line}" for line in broken] or ["All claims hold."]
    if not options.quick:
        lines += ["", "## Claims", "", *verdict]
    (options.output / "deep_step.md").write_text("\n".join(lines) + "\n")
    kept = [{key: value for key, value in row.items() if key != "curves"} for row in rows]
    (options.output / "deep_step.json").write_text(json.dumps(kept) + "\n")
    draw(rows, options.output / "deep_step.png")
    print("\n".join(lines))
    return 1 if broken else 0


def failures(rows: Sequence[Row]) -> list[str]:
    """What is not as it is claimed."""
    means = {m: np.mean([r["nll"] for r in rows if r["method"] == m]) for m in METHODS}
    ours = [row for row in rows if row["method"] == METHODS[0]]
    broken = []
    if means[METHODS[0]] > -1.31:
        broken.append(f"our NLL is {means[METHODS[0]]:.3f}, above -1.31.")
    for other in METHODS[1:]:
        if means[METHODS[0]] > means[other]:
            broken.append(f"our NLL is above the NLL of {other}, {means[other]:.3f}.")
    if max(row["overshoot"] for row in ours) > 0.05:
        broken.append(f"the overshoot is up to {max(row['overshoot'] for row in ours):.3f}.")
    if min(row["near"] for row in ours) < 0.8:
        least = min(row["near"] for row in ours)
        broken.append(f"the first layer passes only {least:.3f} of its range near the jump.")
    return broken


def draw(rows: Sequence[Row], path: Path) -> None:
    """Fits of the first seed above, first layers of all seeds below."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(12, 6), sharex=True, constrained_layout=True)
    (x, y), _ = problem(0)
    grid = GRID[:, 0].numpy()
    for column, method in enumerate(METHODS):
        mine = [row for row in rows if row["method"] == method]
        mean, std = (np.array(values) for values in mine[0]["curves"][:2])
        top, bottom = axes[:, column]
        top.fill_between(grid, mean - 2 * std, mean + 2 * std, alpha=0.25, lw=0)
        top.plot(grid, mean)
        top.plot(x[:, 0], y[:, 0], "k.", ms=3)
        top.set(title=method, ylim=(-0.5, 1.5), ylabel="f" if column == 0 else None)
        for row in mine:
            if len(row["curves"]) > 2:
                hidden = np.array(row["curves"][2])
                hidden = (hidden - hidden.min()) / (hidden.max() - hidden.min())
                bottom.plot(grid, hidden, lw=0.8, alpha=0.7)
        bottom.set(xlabel="x", ylabel="first layer, scaled to [0, 1]" if column == 0 else None)
    axes[1, 2].axis("off")
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
