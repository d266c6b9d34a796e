"""Is the promised coverage met, exactly, and what does it cost in width? Beside MAPIE.

    python benchmarks/conformal.py [--splits 200] [--quick] [--output FOLDER]

Problems: `diabetes` (442 patients, 10 columns, from scikit-learn), `waves` (442 draws of a sine with
heavy-tailed noise that grows away from zero), and `digits` (1797 images of 8 × 8 pixels, 10 classes). Each
random split has 100 known rows, 100 held-out rows (digits: 300), and the rest as new rows. The posteriors are
an RBF process with a length scale and a noise that were written down before the run, on purpose too small on
`waves`, and `adapt_classes` on an RBF kernel. alpha is 0.1.

Given the known rows, all divisions of the others into held-out and new ones are equally likely. So the number
of covered new rows has the beta-binomial law, exactly, whatever the data are. The columns: the promise, the
mean coverage, how many standard errors of that law it is from the promise, and the share of splits outside of
the law's central 95 %. Within groups (patients by sex, waves by the sign of x, digits by class) this is
counted for each group by itself. The jackknife+ takes known and held-out rows together and promises more than
1 − 2·alpha; its coverage has no known law.

MAPIE gets the same posteriors through a model of scikit-learn, in an environment of its own (`peers.py`). Its
jackknife+ fits the model once per row, so that it runs in five splits; its RAPS chooses a penalty on a part
of the held-out rows. CPU seconds are per split, with fits and predictions, on one thread.

Claims (papers/claims.py says what the words mean):

- every mean coverage from held-out rows is within 3.3 standard errors of its law, and the share of splits
  outside of the central 95 % is not larger than chance allows (99.9 %). APS without random numbers gives the
  most probable class of every row the score 0, so that it may only cover more, not less;
- the jackknife+ covers at least what it promises, and 1 − alpha up to .02;
- where MAPIE does the same, intervals differ by less than 1e-8 and sets not at all. For split standardized
  residuals this is said of the upper ends: MAPIE 1.6.0 takes the score of rank k − 1 for the lower ones;
- the jackknife+ takes less than a fifth of the CPU time of MAPIE's, and its intervals are no wider on average
  than those from held-out rows;
- randomized cumulative sets (APS) are no larger than MAPIE's.

The exit status says whether they hold. Where MAPIE cannot be installed, its rows and claims are left out, and
the table says so. A quick run has 40 splits and two of MAPIE's jackknife+, and writes nothing. Writes
`conformal.md` and `conformal.png`.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from scipy.stats import betabinom
from torch import Tensor

from conformal_problems import ALPHA, Found, Problem, counted, diabetes, digits, waves
from net2gp import conformal
from peers import PEERS, NotInstalled, ensure
from run import HERE, RESULTS, environment, made_by, processor

sys.path.append(str(Path(__file__).resolve().parent.parent / "papers"))
import claims

SCORES = {
    "split absolute": conformal.AbsoluteResidual(),
    "split standardized": conformal.StandardizedResidual(),
}
SETS = {
    "LAC": conformal.ClassProbability(),
    "APS": conformal.CumulativeProbability(),
    "APS, randomized": conformal.RandomizedCumulativeProbability(),
    "RAPS, randomized": conformal.RandomizedCumulativeProbability(penalty=0.01, free_classes=1),
}


@contextmanager
def timed(found: Found) -> Iterator[None]:
    """Add the CPU seconds of the block."""
    start = time.process_time()
    yield
    spent = time.process_time() - start
    found.seconds = spent if math.isnan(found.seconds) else found.seconds + spent


def kept(found: Found, answer: conformal.Intervals, y: Tensor) -> Tensor:
    """Keep intervals, and return which rows they cover."""
    found.widths.append(float(answer.width.mean()))
    found.answers.append(torch.cat([answer.lower, answer.upper], 1).numpy())
    return answer.contains(y)[:, 0]


def share(inside: Tensor) -> float:
    return float(inside.double().mean())


def numbers(p: Problem, splits: int) -> dict[str, Found]:
    """All methods on a regression."""
    found: dict[str, Found] = defaultdict(Found)
    for seed in range(splits):
        known, held_out, new = p.split(seed)
        alone = found["the posterior alone"]
        law = p.posterior(known).predict(p.x[new])
        half = 1.6448536 * law.stddev
        own = conformal.Intervals(law.mean - half, law.mean + half)
        alone.shares.append(share(kept(alone, own, p.y[new])))
        by_split(p, found, known, held_out, new)
        by_jackknife(p, found, torch.cat([known, held_out]), new)
    return dict(found)


def by_split(
    p: Problem, found: dict[str, Found], known: Tensor, held_out: Tensor, new: Tensor
) -> None:
    """Intervals from held-out rows, for all and for groups."""
    calibration = (p.x[held_out], p.y[held_out])
    for name, score in SCORES.items():
        with timed(found[name]):
            promise = conformal.calibrate_intervals(p.posterior(known), calibration, score=score)
            answer = promise.intervals(p.x[new])
        found[name].counts += counted(promise, kept(found[name], answer, p.y[new]), None)
    f, place = found["split standardized, groups"], p.groups[new]
    with timed(f):
        groups = p.groups[held_out]
        promise = conformal.calibrate_intervals(p.posterior(known), calibration, groups=groups)
        answer = promise.intervals(p.x[new], groups=place)
    f.counts += counted(promise, kept(f, answer, p.y[new]), place)


def by_jackknife(p: Problem, found: dict[str, Found], both: Tensor, new: Tensor) -> None:
    """Intervals from known and held-out rows together, for all and for groups."""
    for name, score in SCORES.items():
        f = found[name.replace("split", "jackknife+")]
        with timed(f):
            answer = conformal.jackknife_plus(p.posterior(both), score=score).intervals(p.x[new])
        f.shares.append(share(kept(f, answer, p.y[new])))
    f, place = found["jackknife+ standardized, groups"], p.groups[new]
    with timed(f):
        promise = conformal.jackknife_plus(p.posterior(both), groups=p.groups[both])
        answer = promise.intervals(p.x[new], groups=place)
    inside = kept(f, answer, p.y[new])
    f.shares.append(share(inside))
    worst = min(share(inside[place == g]) for g in (0, 1))
    found["jackknife+ standardized, worst group"].shares.append(worst)


def labels(p: Problem, splits: int) -> tuple[dict[str, Found], dict[str, list[np.ndarray]]]:
    """All methods on classes, and the probabilities for the peer."""
    found: dict[str, Found] = defaultdict(Found)
    shared: dict[str, list[np.ndarray]] = defaultdict(list)
    ways = {name: (score, None) for name, score in SETS.items()}
    ways["LAC, groups"] = (SETS["LAC"], conformal.ByClass())
    for seed in range(splits):
        known, held_out, new = p.split(seed)
        posterior, y = p.posterior(known), p.y[new]
        for part, index in {"held_out": held_out, "new": new}.items():
            probs = posterior.predict(p.x[index]).probs
            shared[f"probs {part}"].append(probs.numpy())
            shared[f"labels {part}"].append(p.y[index].numpy())
        alone, order = found["the posterior alone"], probs.sort(dim=-1, descending=True)
        members = torch.zeros_like(probs, dtype=torch.bool)
        members.scatter_(1, order.indices, order.values.cumsum(-1) - order.values < 1 - ALPHA)
        alone.widths.append(float(members.sum(-1).double().mean()))
        alone.shares.append(share(members.gather(1, y[:, None])))
        for name, (score, groups) in ways.items():
            draws = torch.Generator().manual_seed(seed)
            with timed(found[name]):
                promise = conformal.calibrate_sets(
                    posterior,
                    (p.x[held_out], p.y[held_out]),
                    score=score,
                    groups=groups,
                    generator=draws,
                )
                sets = promise.sets(p.x[new], generator=draws)
            found[name].counts += counted(promise, sets.contains(y), None if groups is None else y)
            found[name].widths.append(float(sets.sizes.double().mean()))
            found[name].answers.append(sets.members.numpy())
    return dict(found), shared


def peer(
    arrays: dict[str, object], covered: Callable[[str, np.ndarray], Found]
) -> dict[str, Found]:
    """MAPIE's answers, in its environment."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "arrays.npz", Path(folder) / "result.npz"
        np.savez(source, **{name: np.asarray(value) for name, value in arrays.items()})
        command = [str(ensure(PEERS["mapie"])), str(HERE / "worker_mapie.py"), str(source)]
        env = environment() | {"OMP_NUM_THREADS": "1"}
        subprocess.run([*command, str(target)], env=env, check=True, timeout=3600)
        with np.load(target) as file:
            result = dict(file)
    names = [name for name in result if not name.startswith("s ")]
    found = {f"MAPIE, {name}": covered(name, result[name]) for name in names}
    for name in names:
        found[f"MAPIE, {name}"].seconds = float(result[f"s {name}"])
    return found


def peer_numbers(p: Problem, splits: int, few: int) -> dict[str, Found]:
    parts = [torch.stack(rows).numpy() for rows in zip(*map(p.split, range(splits)), strict=True)]
    rows = dict(zip(("known", "held_out", "new"), parts, strict=True))
    settings = {"lengthscale": p.lengthscale, "noise_var": p.noise_var, "num_jackknife": few}

    def covered(name: str, ends: np.ndarray) -> Found:
        y = p.y.numpy()[rows["new"][: len(ends)], 0]
        inside = (ends[..., 0] <= y) & (y <= ends[..., 1])
        widths = (ends[..., 1] - ends[..., 0]).mean(1)
        return Found(shares=list(inside.mean(1)), widths=list(widths), answers=list(ends))

    own = {"x": p.x.numpy(), "y": p.y[:, 0].numpy(), "alpha": ALPHA}
    return peer({**own, **rows, **settings}, covered)


def peer_labels(shared: dict[str, list[np.ndarray]]) -> dict[str, Found]:
    def covered(name: str, members: np.ndarray) -> Found:
        y = np.stack(shared["labels new"])
        inside = np.take_along_axis(members, y[..., None], 2)[..., 0]
        sizes = members.sum(-1).mean(1)
        return Found(shares=list(inside.mean(1)), widths=list(sizes), answers=list(members))

    return peer({**shared, "alpha": ALPHA}, covered)


def stated(name: str, found: dict[str, Found], quick: bool) -> Iterator[claims.Claim]:
    """What the head of this program claims, of one problem."""
    for method, f in found.items():
        if f.counts:
            outside, chance = f.outside
            told = f"{name}, {method}"
            if method == "APS":
                yield claims.at_most(f"{told}, standard errors below the promise", -f.distance, 3.3)
                continue
            yield claims.at_most(f"{told}, standard errors from the promise", abs(f.distance), 3.3)
            yield claims.at_most(f"{told}, share outside of the central 95 %", outside, chance)
        elif method.startswith("jackknife+") and "worst" not in method:
            gap = abs(f.coverage - (1 - ALPHA))
            below = 1 - 2 * ALPHA - f.coverage
            yield claims.at_most(f"{name}, {method}, coverage below the promise", below, 0.0)
            yield claims.at_most(f"{name}, {method}, coverage away from .9", gap, 0.02)
    for method in (*SCORES, "jackknife+ absolute", "jackknife+ standardized", "LAC"):
        other = found.get(f"MAPIE, {method}")
        if other is not None:
            pairs = zip(found[method].answers, other.answers, strict=False)
            # columns are lower and upper ends, or classes
            used = slice(1, 2) if method == "split standardized" else slice(None)
            apart = max(float(np.abs(a.astype(float) - b)[:, used].max()) for a, b in pairs)
            yield claims.at_most(f"{name}, {method}, difference to MAPIE", apart, 1e-8)
        if other is not None and method == "jackknife+ standardized":
            times = found[method].seconds / len(found[method].shares) / other.seconds
            yield claims.at_most(f"{name}, {method}, time relative to MAPIE's", times, 0.2)
    for method in SCORES if "split absolute" in found else ():
        rival = found[method.replace("split", "jackknife+")]
        margin = torch.tensor(found[method].widths) - torch.tensor(rival.widths)
        yield claims.compared(
            f"{name}, jackknife+ beside {method}", margin, "no worse", quick=quick
        )
    other = found.get("MAPIE, APS, randomized")
    if other is not None:
        margin = torch.tensor(other.widths) - torch.tensor(found["APS, randomized"].widths)
        yield claims.compared(f"{name}, APS sets beside MAPIE's", margin, "no worse", quick=quick)


def table(name: str, found: dict[str, Found]) -> str:
    """One line per method."""
    size = "set size" if name == "digits" else "width"
    lines = [
        f"## {name}\n",
        f"| | promise | coverage | standard errors | outside 95 % | {size} | CPU s |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for method, f in found.items():
        cells = ["", f"{f.coverage:.4f}", "", ""]
        if f.counts:
            expected = sum(m * k / (n + 1) for _, m, k, n in f.counts)
            cells[0] = f"{expected / sum(m for _, m, *_ in f.counts):.4f}"
            cells[2:] = [f"{f.distance:+.2f}", f"{f.outside[0]:.3f}"]
        elif "jackknife+" in method or "CV+" in method:
            cells[0] = f"> {1 - 2 * ALPHA:.1f}"
        width = f"{np.mean(f.widths):.3f}" if f.widths else ""
        count = 1 if method.startswith("MAPIE") else max(1, len(f.widths))
        seconds = "" if math.isnan(f.seconds) else f"{f.seconds / count:.4f}"
        lines.append(f"| {method} | " + " | ".join([*cells, width, seconds]) + " |")
    return "\n".join(lines)


def draw(found: dict[str, dict[str, Found]], path: Path) -> None:
    """Bands on `waves`, and the coverage of all splits beside its law."""
    figure, axes = plt.subplots(1, 3, figsize=(14, 3.9), layout="constrained")
    p = waves()
    known, held_out, new = p.split(0)
    grid = torch.linspace(-3, 3, 300, dtype=torch.float64)[:, None]
    posterior = p.posterior(known)
    promise = conformal.calibrate_intervals(
        posterior, (p.x[held_out], p.y[held_out]), groups=(p.x[held_out, 0].abs() > 1.5).long()
    )
    law, band = (
        posterior.predict(grid),
        promise.intervals(grid, groups=(grid[:, 0].abs() > 1.5).long()),
    )
    line = grid[:, 0].numpy()
    axes[0].fill_between(
        line,
        band.lower[:, 0],
        band.upper[:, 0],
        color="C0",
        alpha=0.25,
        lw=0,
        label="promised 90 %, groups |x| < 1.5 and beyond",
    )
    half = 1.645 * law.stddev[:, 0]
    axes[0].fill_between(
        line,
        law.mean[:, 0] - half,
        law.mean[:, 0] + half,
        color="C1",
        alpha=0.5,
        lw=0,
        label="the posterior's own 90 %",
    )
    axes[0].plot(p.x[new, 0], p.y[new, 0], ".", color="0.3", ms=3)
    axes[0].set(xlabel="x", ylabel="y", title="waves: one split, new rows", ylim=(-2.4, 2.1))
    axes[0].legend(loc="lower right", fontsize=8)
    for ax, (name, method) in zip(
        axes[1:], (("diabetes", "split standardized"), ("digits", "APS, randomized")), strict=True
    ):
        counts = found[name][method].counts
        _, m, k, n = counts[0]
        values = np.arange(m + 1)
        shares = np.array([c for c, *_ in counts]) / m
        edges = np.linspace(shares.min() - 0.01, shares.max() + 0.01, 16)
        ax.hist(shares, edges, density=True, color="C0", alpha=0.4, label=f"{len(counts)} splits")
        ax.plot(
            values / m,
            betabinom.pmf(values, m, k, n + 1 - k) * m,
            color="k",
            label="beta-binomial law",
        )
        ax.axvline(k / (n + 1), color="C3", lw=1, label=f"promise {k / (n + 1):.3f}")
        alone = float(np.mean(found[name]["the posterior alone"].shares))
        ax.axvline(alone, color="C1", ls="--", lw=1, label=f"posterior alone {alone:.3f}")
        low = min(alone, edges[0]) - 0.01
        ax.set(
            xlabel="share of new rows covered",
            title=f"{name}: {method}",
            xlim=(low, max(edges[-1], alone) + 0.01),
        )
        ax.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--splits", type=int, default=200)
    parser.add_argument("--quick", action="store_true", help="40 splits; writes nothing")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    splits, few = (40, 2) if options.quick else (options.splits, 5)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found: dict[str, dict[str, Found]] = {}
    missing = ""
    for p in (diabetes(), waves()):
        found[p.name] = numbers(p, splits)
        print(f"{p.name} done", flush=True)
    found["digits"], shared = labels(digits(), splits)
    print("digits done", flush=True)
    try:
        for p in (diabetes(), waves()):
            found[p.name] |= peer_numbers(p, splits, few)
        found["digits"] |= peer_labels(shared)
    except NotInstalled as reason:
        missing = f"\n\nMAPIE is left out: {reason}."
    text = "\n\n".join(table(name, each) for name, each in found.items())
    print(text + missing)
    if not options.quick:
        options.output.mkdir(exist_ok=True, parents=True)
        draw(found, options.output / "conformal.png")
        head = HEAD.format(splits=splits, few=few) + f" {made_by()} {processor()}"
        note = f"# Promised coverage\n\n{head}{missing}\n\n![bands and coverages](conformal.png)\n\n{text}\n"
        (options.output / "conformal.md").write_text(note, encoding="utf-8")
    judged = [claim for name, each in found.items() for claim in stated(name, each, options.quick)]
    return 0 if claims.judge(judged) else 1


HEAD = """Coverage of new rows at alpha = 0.1 over {splits} random splits. Held-out rows promise k/(n + 1),
and the number of covered rows has a beta-binomial law: the mean should be within 3.3 standard errors, and
about 5 % of the splits outside of the law's central 95 %. "Groups" are calibrated and counted one by one:
patients by sex, waves by the sign of x, digits by class. The jackknife+ takes known and held-out rows (200)
and promises more than 0.8. "Worst group" is the mean over splits of the smaller coverage of two groups, which
is below the common one by chance as well. "APS" has no random numbers: the first classes of all rows have the
score 0, and it covers more than it promises if these alone are right often enough.

MAPIE has the same posteriors. Its jackknife+ ran in {few} splits, its RAPS chooses a penalty on a part of the
held-out rows, its "APS" compares sums without random numbers with a threshold from sums with them, and with
split standardized residuals its lower ends take the score of rank k − 1 (release 1.6.0). Widths are in
standard deviations of the targets for diabetes. CPU seconds are per split on one thread; fits count for
intervals, not for sets. The posteriors' hyper-parameters were fixed before the run."""


if __name__ == "__main__":
    raise SystemExit(main())
