"""Eight regression tables with customary splits and with gaps: wide predictions where inputs are novel.

    NET2GP_DATA=... python benchmarks/uci_gaps.py --cells FOLDER [--data yacht] [--kinds gaps] [--minutes 60]
    NET2GP_DATA=... python benchmarks/uci_gaps.py --cells FOLDER --report
    NET2GP_DATA=... python benchmarks/uci_gaps.py --quick

A gap split leaves out the middle third of the rows when sorted by one input (Foong et al., 'In-between'
uncertainty in Bayesian neural networks, 2019): a split for each input that varies, with the networks of
`uci_networks.py`. Inputs of a few values have no gap between them, but a third of the rows is novel there
as well; a second table has the inputs of at least ten values alone. Likelihoods are Gaussian, and
heteroscedastic, where the network has the noise as a second output and is trained on the density. `net2gp`
is `laplace(network, data, likelihood)` with nothing else said, and "with limits" is
`bayes.with_limits(laplace(...))`, its mixture with two networks of infinite width, NNGP and NTK, which are
also shown by themselves. "Not widened" is the same posterior without
the variance that its predictions gain at novel inputs. A mixture of five has five networks, each with its
posterior. What each method gave on each split is kept in `--cells`: a run that was stopped goes on. Writes
`uci_gaps.json` and `uci_gaps.md`.

Claims, which the exit status asserts, for Gaussian noise and of what was run:

- with gaps every NLL of the default is finite, and its mean on energy is below 5;
- with gaps the mixture with limits is finite, and has on every table the smallest mean NLL of all methods, up
  to .01;
- with gaps the default is on no table worse in NLL than the network, laplace-torch or the RBF process by more
  than two standard errors of the difference and .01, but for `EXCEPTIONS`;
- on customary splits no structure is worse in NLL than the same one not widened, likewise.

It is a goal, and not a claim, that the default is at least as good on customary splits as the best lines that
could be gathered from the literature, which are partly from memory (`AIMS`). A quick run has the gaps of
yacht alone, without the RBF process.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from run import RESULTS, made_by, processor
from uci_gap_cells import (
    AIMS,
    CONDITIONED,
    DEFAULT,
    ENERGY,
    EXCEPTIONS,
    FEW_VALUES,
    KINDS,
    LATE,
    METHODS,
    MIXTURE,
    MOST_ROWS,
    NARROW,
    QUICK_METHODS,
    RIVALS,
    TABLES,
    TOLERANCE,
    TUNING,
    WITH_LIMITS,
    Job,
    Row,
    run,
    tables_of,
)


def every(options: argparse.Namespace) -> Iterator[Job]:
    """All jobs, those that take long at the end."""
    jobs = [
        Job(options.cells, kind, likelihood, name, method)
        for likelihood in options.likelihoods
        for kind in options.kinds
        for name in sorted(options.data, key=lambda n: len(tables_of(kind, n)[0].y.flatten()))
        for method in METHODS[likelihood]
        if not options.methods or method in options.methods
    ]
    yield from sorted(jobs, key=lambda job: LATE.get(job.method, 0))


def main() -> int:
    options = parse(sys.argv[1:])
    made_by()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    options.cells.mkdir(parents=True, exist_ok=True)
    before = len(list(options.cells.glob("*.json")))
    for job in [] if options.report else every(options):
        if time.monotonic() < options.ends and job.left:
            run(job, options.ends)
            print(f"{job.kind}, {job.likelihood}, {job.data}: {job.method}", flush=True)
    added = len(list(options.cells.glob("*.json"))) - before
    if added:
        with (options.cells / RUNS).open("a") as runs:
            runs.write(f"{added} results: {processor()}. {made_by()}\n")
    return report(options)


def parse(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = list(dict.fromkeys(name for methods in METHODS.values() for name in methods))
    parser.add_argument("--quick", action="store_true", help="the gaps of yacht: a minute")
    parser.add_argument("--data", nargs="+", choices=TABLES, default=list(TABLES))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--likelihoods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--methods", nargs="+", choices=names)
    parser.add_argument("--minutes", type=float, default=math.inf, help="end after that time")
    parser.add_argument("--cells", type=Path, help="folder of what each method gave, kept")
    parser.add_argument(
        "--report", action="store_true", help="judge what is in the cells, or in the results"
    )
    parser.add_argument("--output", type=Path, help="folder of the result files")
    options = parser.parse_args(given)
    scratch = Path(tempfile.mkdtemp(prefix="net2gp-uci-gaps-"))
    options.ends = time.monotonic() + 60 * options.minutes
    options.cells = options.cells or scratch
    if options.quick:
        options.data, options.kinds, options.likelihoods = ["yacht"], ["gaps"], ["gaussian"]
        options.methods = options.methods or QUICK_METHODS
    options.output = options.output or (scratch if options.quick else RESULTS)
    return options


RUNS = "runs.txt"
"""A line for every run that left results in the folder of cells."""

Scores = dict[tuple[str, str, str, str], dict[int, Row]]
"""By kind, likelihood, table and method, what each split gave."""


def report(options: argparse.Namespace) -> int:
    """Write and print the tables, and check the claims."""
    found: Scores = {}
    for job in every(options):
        count = len(tables_of(job.kind, job.data)[0])
        rows = {split: job.read(split) for split in range(count)}
        known = {split: row for split, row in rows.items() if row is not None}
        if known:
            found[job.kind, job.likelihood, job.data, job.method] = known
    stored = options.report and not found
    if stored:
        found = recorded(options)
    broken = list(failures(found))
    lines = page(found, options, broken)
    print("\n".join(lines))
    if stored:
        return 1 if broken or not found else 0
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "uci_gaps.md").write_text("\n".join(lines) + "\n")
    content = [{"of": key, "splits": rows} for key, rows in found.items()]
    (options.output / "uci_gaps.json").write_text(json.dumps(content) + "\n")
    return 1 if broken else 0


def recorded(options: argparse.Namespace) -> Scores:
    """The results that an earlier run wrote, of those that are asked for."""
    path = options.output / "uci_gaps.json"
    wanted = {(job.kind, job.likelihood, job.data, job.method) for job in every(options)}
    content = json.loads(path.read_text()) if path.is_file() else []
    return {
        tuple(one["of"]): {int(split): row for split, row in one["splits"].items()}
        for one in content
        if tuple(one["of"]) in wanted
    }


def page(found: Scores, options: argparse.Namespace, broken: list[str]) -> list[str]:
    """The lines of the page."""
    sizes = {"rows": MOST_ROWS, "tuning": TUNING, "most": CONDITIONED}
    path = options.cells / RUNS
    runs = path.read_text().splitlines() if path.is_file() else []
    lines = ["# Regression tables with gaps", "", made_by(), "", *(f"- {line}" for line in runs)]
    lines += ["", EXPLANATION.format(**sizes)]
    for kind in options.kinds:
        for likelihood in options.likelihoods:
            least = [0, FEW_VALUES] if kind == "gaps" else [0]
            for key, title in (("nll", "test NLL"), ("rmse", "test RMSE")):
                lines += ["", f"## {kind.capitalize()}, {likelihood}: {title}"]
                for few in least if key == "nll" else [0]:
                    said = ["", f"Inputs of at least {few} values alone:"] if few else []
                    lines += [*said, "", *table(found, kind, likelihood, key, few)]
    verdict = [f"- fails: {line}" for line in broken] or ["All hold."]
    known = [
        f"- excepted, {data} beside {name}: {why}"
        for (data, name), why in EXCEPTIONS.items()
        if ("gaps", "gaussian", data, name) in found
    ]
    lines += ["", "## Claims", "", *verdict, *known]
    short = list(behind(found))
    return lines + (["", "## Short of the aims", "", *short] if short else [])


EXPLANATION = """\
One network for each split, the same for all methods: one hidden layer of 50 tanh units, full-batch Adam on
standardized data, weight decay chosen on a tenth of the training points. Mean ± standard error over splits,
in the units of the table; in parentheses the largest of the splits with gaps, or the number of splits that
were run, where some are left. `network` is the bare network with the mean squared training residual as its
noise, or its own noise. `net2gp` is `laplace(network, data, likelihood)`, here with the whole covariance;
"not widened" leaves out the variance that its predictions gain at novel inputs. "With limits" is the mixture
of the default with a ReLU network of two layers and infinite width, its NNGP and its tangent kernel (NTK),
with a length scale for each input. A mixture of five has five networks of other seeds, each with its
posterior. RBF GP: a length scale for each input. It and the wide networks are tuned on at most {tuning}
points and conditioned on at most {most}. laplace-torch: prior precision and noise by 1000 steps of
Adam on its marginal likelihood. A gap is the middle third of the rows, sorted by one input; of tables with
more than {rows} rows a fixed random choice of so many is used there. Aims are partly from memory, and not
to be quoted."""


def mean_and_error(values: np.ndarray) -> tuple[float, float]:
    """The mean and its standard error."""
    error = values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return float(values.mean()), float(error)


def table(found: Scores, kind: str, likelihood: str, key: str, least: int = 0) -> list[str]:
    """A row for each table, a column for each method; the best mean is bold."""
    names = [
        name
        for name in METHODS[likelihood]
        if any(of[:2] == (kind, likelihood) and of[3] == name for of in found)
    ]
    aims = kind == "customary" and key == "nll"
    head = ["table", *names, *(["aim, partly from memory"] if aims else [])]
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    for data in TABLES:
        known = {
            name: chosen(found[kind, likelihood, data, name], kind, data, key, least)
            for name in names
            if (kind, likelihood, data, name) in found
        }
        known = {name: values for name, values in known.items() if len(values)}
        if not known:
            continue
        full = {name: v for name, v in known.items() if len(v) == max(map(len, known.values()))}
        best = min(full, key=lambda name: full[name].mean())
        count = len(full[best])
        line = [f"{data} ({count} splits)"]
        for name in names:
            if name not in known:
                line.append("")
                continue
            mean, error = mean_and_error(known[name])
            mark, some = ("**" if name == best else ""), len(known[name])
            beside = f" ({known[name].max():.2f})" if kind == "gaps" and key == "nll" else ""
            beside += f" ({some} splits)" if some < count else ""
            line.append(f"{mark}{mean:.3f}{mark} ± {error:.3f}{beside}")
        lines.append("| " + " | ".join([*line, *([f"{AIMS[data]:.2f}"] if aims else [])]) + " |")
    return lines


def chosen(rows: dict[int, Row], kind: str, data: str, key: str, least: int) -> np.ndarray:
    """The values of splits that did not fail, of inputs with that many values."""
    _, counts = tables_of(kind, data)
    return np.array(
        [
            row[key]
            for split, row in sorted(rows.items())
            if not row["failed"] and (not least or counts[split] >= least)
        ]
    )


def failures(found: Scores) -> Iterator[str]:
    """What is not as it is claimed."""
    for (kind, likelihood, data, method), rows in found.items():
        said = [row["failed"] for row in rows.values() if row["failed"]]
        if said and method.startswith("net2gp"):
            yield f"{kind}, {likelihood}, {data}: {method} failed: {said[0]}"
        if likelihood != "gaussian":
            continue
        if kind == "gaps" and method == DEFAULT:
            nll = np.array([row["nll"] for row in rows.values() if not row["failed"]])
            if not np.isfinite(nll).all() or (data == "energy" and nll.mean() >= ENERGY):
                yield f"gaps, {data}: NLL {nll.mean():.3f}, at most {nll.max():.3f}"
        if kind == "gaps" and method == WITH_LIMITS:
            yield from not_best(found, data)
        if kind == "gaps" and method in RIVALS and (data, method) not in EXCEPTIONS:
            yield from worse(found, (kind, likelihood, data), DEFAULT, method)
        if kind == "customary" and method.endswith(NARROW):
            yield from worse(found, (kind, likelihood, data), method.removesuffix(NARROW), method)


def not_best(found: Scores, data: str) -> Iterator[str]:
    """Which methods have a smaller mean NLL with gaps than the mixture with limits, over all splits."""
    means = {
        method: np.mean([row["nll"] for row in rows.values() if not row["failed"]])
        for (kind, likelihood, name, method), rows in found.items()
        if (kind, likelihood, name) == ("gaps", "gaussian", data)
        and len(rows) == len(tables_of(kind, data)[0])
    }
    for method, mean in means.items():
        if not means[WITH_LIMITS] <= mean + TOLERANCE:
            yield f"gaps, {data}: {means[WITH_LIMITS]:.3f} with limits, {mean:.3f} by {method}"


def worse(found: Scores, of: tuple[str, str, str], one: str, other: str) -> Iterator[str]:
    """Where one method is behind another by more than chance, split by split."""
    first, second = found.get((*of, one), {}), found[(*of, other)]
    shared = [s for s in first if s in second and not first[s]["failed"] + second[s]["failed"]]
    if not shared:
        return
    mean, error = mean_and_error(np.array([first[s]["nll"] - second[s]["nll"] for s in shared]))
    if mean > 2 * error + TOLERANCE:
        yield f"{', '.join(of)}: {one} is behind {other}: {mean:.3f} ± {error:.3f}"


def behind(found: Scores) -> Iterator[str]:
    """Where the default is behind an aim on customary splits."""
    for data, aim in AIMS.items():
        best = {
            (likelihood, method): mean_and_error(chosen(rows, kind, data, "nll", 0))
            for (kind, likelihood, name, method), rows in found.items()
            if (kind, name) == ("customary", data) and method in (DEFAULT, MIXTURE)
        }
        if not best:
            continue
        (likelihood, method), (mean, error) = min(best.items(), key=lambda item: item[1][0])
        if mean > aim + 2 * error:
            yield f"- {data}: {mean:.3f} ± {error:.3f} ({likelihood}, {method}) beside {aim:.2f}"


if __name__ == "__main__":
    sys.exit(main())
