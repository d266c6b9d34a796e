"""How good is the best point that Bayesian optimization finds, with a network at infinite width as surrogate?

    python benchmarks/bayesian_optimization.py --cells FOLDER [--seeds 10] [--quick] [--report]

Three functions are maximized: Branin (2 inputs), Hartmann (6 inputs), and for each seed another random tanh
network of 50 inputs and two hidden layers of 100 units (`optimization_problems.py`). The first design is a
scrambled Sobol sequence, the same for all surrogates of a seed; then one point at a time maximizes an
acquisition function: the logarithm of expected improvement (LogEI), its noisy Monte Carlo form (qLogNEI), a
knowledge gradient with four fantasies (qKG), or a drawn function (Thompson). Everything outside of the
surrogate is BoTorch's: 64 raw candidates, 3 restarts, 40 iterations.

Surrogates: `NetworkGP` with its default network on the first two functions and with the limit of an erf
network of two hidden layers on the third; BoTorch's `SingleTaskGP` with its default kernel, on inputs in
the unit cube; and an ensemble of five tanh networks as BoTorch's `EnsembleModel`, which has no fantasies
and so no qKG. The default of `NetworkGP` and the network for 50 inputs were chosen by predictions and runs
of LogEI on these functions with other seeds, so the choice has seen them.

Claims, on the best value found (papers/claims.py says what the words mean; differences are paired by seed):

- on Branin and Hartmann, no worse than SingleTaskGP with each of the four acquisition functions;
- on the network of 50 inputs, better than SingleTaskGP and than the ensemble with each of them. The second
  half is a goal more than an expectation: where it does not hold, the table says so.

The exit status is 1 if a claim does not hold, or if a run is missing. What each run found is kept in
`--cells`, one file each, so that a run which was stopped goes on. A quick run has two seeds of a few steps
of Branin and asserts only what so few can. Writes `results/bayesian_optimization.md`; `--report` writes
what there is.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "papers"))

from claims import Claim, compared, judge

from optimization_problems import PROBLEMS, maximized
from run import git, processor

RESULTS = Path(__file__).resolve().parent / "results" / "bayesian_optimization.md"
OURS, RIVAL, ENSEMBLE = "net2gp", "SingleTaskGP", "ensemble"
ACQUISITIONS = ("LogEI", "Thompson", "qLogNEI", "qKG")
BEST = {"Branin": -0.397887, "Hartmann-6": 3.32237}
"""The maxima, where they are known."""

QUICK_STEPS, FIRST_SEED = 4, 100
"""How many steps a quick run has, and the first seed: lower ones were used while the defaults were chosen."""


@dataclass(frozen=True)
class Cell:
    """One run: a function, a surrogate, an acquisition function and a seed."""

    problem: str
    model: str
    acquisition: str
    seed: int

    def path(self, folder: Path) -> Path:
        """Where what it found is kept."""
        return folder / f"{self.acquisition}-{self.problem}-{self.model}-{self.seed}.json"

    def found(self, folder: Path) -> dict | None:
        """What it found, or None if it has not run."""
        path = self.path(folder)
        return json.loads(path.read_text()) if path.exists() else None

    def run(self, folder: Path, steps: int | None) -> None:
        """Run it, and keep what it found."""
        start = time.process_time()
        best = maximized(self.problem, self.model, self.acquisition, self.seed, steps)
        seconds = time.process_time() - start
        content = {"best": best, "seconds": seconds, "revision": revision()}
        part = self.path(folder).with_suffix(".part")
        part.write_text(json.dumps(content))
        part.replace(self.path(folder))


@cache
def revision() -> str:
    """The revision of the code as this program began."""
    return git("rev-parse", "--short", "HEAD").strip()


def seeds(options: argparse.Namespace) -> range:
    """The seeds of all runs."""
    return range(FIRST_SEED, FIRST_SEED + options.seeds)


def cells(options: argparse.Namespace) -> list[Cell]:
    """All runs, the acquisition functions one after the other, and last those that no claim is about."""
    found = [
        Cell(problem, model, acquisition, seed)
        for acquisition in options.acquisitions
        for seed in seeds(options)
        for problem in options.problems
        for model in (OURS, RIVAL, ENSEMBLE)
        if (model, acquisition) != (ENSEMBLE, "qKG")
    ]
    return sorted(found, key=lambda cell: cell.model == ENSEMBLE and cell.problem in BEST)


def finals(
    options: argparse.Namespace, problem: str, model: str, acquisition: str
) -> dict[int, float]:
    """The best values in the end, by seed, of the runs that there are."""
    found = {}
    for seed in seeds(options):
        cell = Cell(problem, model, acquisition, seed).found(options.cells)
        if cell is not None:
            found[seed] = cell["best"][-1]
    return found


def claims(options: argparse.Namespace) -> Iterator[Claim]:
    """The claims, each for the seeds that both surrogates have run."""
    for acquisition in options.acquisitions:
        for problem in options.problems:
            known = problem in BEST
            ours = finals(options, problem, OURS, acquisition)
            for rival in (RIVAL,) if known else (RIVAL, ENSEMBLE):
                other = finals(options, problem, rival, acquisition)
                both = sorted(set(ours) & set(other))
                if len(both) > 1:
                    margin = torch.tensor([ours[seed] - other[seed] for seed in both])
                    name = f"{problem}, {acquisition}, beside {rival} ({len(both)} seeds)"
                    word = "no worse" if known else "better"
                    yield compared(name, margin.double(), word, quick=options.quick)


def mean_and_error(values: list[float]) -> str:
    """A mean with its standard error."""
    t = torch.tensor(values, dtype=torch.float64)
    if len(t) == 1:
        return f"{float(t):.3f}"
    return f"{float(t.mean()):.3f} ± {float(t.std()) / len(t) ** 0.5:.3f}"


def rows(options: argparse.Namespace, problem: str) -> Iterator[str]:
    """The table of a problem."""
    task = PROBLEMS[problem]
    yield "| acquisition | surrogate | seeds | first design | halfway | in the end | CPU s a step |"
    yield "|---|---|---:|---:|---:|---:|---:|"
    for acquisition in options.acquisitions:
        for model in (OURS, RIVAL, ENSEMBLE):
            each = [
                Cell(problem, model, acquisition, s).found(options.cells) for s in seeds(options)
            ]
            runs = [run for run in each if run is not None]
            if not runs:
                continue
            places = (0, len(runs[0]["best"]) // 2, -1)
            values = [mean_and_error([run["best"][place] for run in runs]) for place in places]
            seconds = sum(run["seconds"] for run in runs) / len(runs) / task.steps
            yield f"| {acquisition} | {model} | {len(runs)} | {' | '.join(values)} | {seconds:.2f} |"


def write(options: argparse.Namespace, judged: list[Claim], missing: int) -> None:
    """Write the report."""
    versions = (
        f"botorch {version('botorch')}, gpytorch {version('gpytorch')}, torch {torch.__version__}"
    )
    found = [cell.found(options.cells) for cell in cells(options)]
    revisions = sorted({cell["revision"] for cell in found if cell is not None})
    lines = [
        "# Bayesian optimization",
        "",
        "Made by `python benchmarks/bayesian_optimization.py --cells FOLDER` at revision",
        f"{', '.join(revisions)}, on one core of {processor()}; {versions}.",
        "",
        "The best value found, mean ± standard error over seeds (larger is better). The program says what",
        "functions, surrogates and claims are. CPU seconds were measured beside other programs.",
    ]
    if missing:
        lines += [
            "",
            f"**{missing} runs are missing**: it was stopped. Claims are about seeds that both have.",
        ]
    for problem in options.problems:
        task = PROBLEMS[problem]
        best = f", whose maximum is {BEST[problem]:.3f}" if problem in BEST else ""
        lines += ["", f"## {problem}{best}", ""]
        lines += [f"{task.first} points of the first design and {task.steps} more.", ""]
        lines += list(rows(options, problem))
    lines += ["", "## Claims", "", "| claim | difference | holds |", "|---|---:|---|"]
    lines += [f"| {claim.name} | {claim.found} | {claim.verdict} |" for claim in judged]
    RESULTS.write_text("\n".join(lines) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cells", type=Path, help="folder of what each run found, kept")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--problems", nargs="+", choices=list(PROBLEMS), default=list(PROBLEMS))
    parser.add_argument(
        "--acquisitions", nargs="+", choices=ACQUISITIONS, default=list(ACQUISITIONS)
    )
    parser.add_argument("--quick", action="store_true", help="about a minute, without a report")
    parser.add_argument("--report", action="store_true", help="only write what is in the cells")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.problems = 2, ["Branin"]
    return options


def main() -> int:
    torch.set_num_threads(1)
    options = parse()
    revision()
    with tempfile.TemporaryDirectory() as scratch:
        options.cells = options.cells or Path(scratch)
        options.cells.mkdir(parents=True, exist_ok=True)
        missing = 0
        for cell in cells(options):
            if cell.found(options.cells) is not None:
                continue
            if options.report:
                missing += 1
                continue
            cell.run(options.cells, QUICK_STEPS if options.quick else None)
            print(cell, f"{cell.found(options.cells)['best'][-1]:.4f}", flush=True)
        judged = list(claims(options))
        if not options.quick:
            write(options, judged, missing)
        return 0 if judge(judged) and not missing else 1


if __name__ == "__main__":
    sys.exit(main())
