"""Infinite-width kernels side by side with neural-tangents, in one run on two cores.

    python benchmarks/limits.py

Each measurement has a process of its own, in the environment of its library: best of at least three
runs after a warm-up (fewer only where they outlast `--patience`), process CPU seconds, wall seconds, and
peak resident memory above the process with its imports and inputs. Both kernels (NNGP and tangent kernel)
are asked for at once. The floor is measured likewise: the inputs' Gram matrix at the positions that the
network needs, and writing two arrays of its size. Writes `results/limits.json` and `results/limits.md`.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from peers import PEERS, NotInstalled, ensure
from run import HERE, NUM_CORES, RESULTS, distance, environment, pin, processor

DTYPES = ("float64", "float32")
"""The first one's result from net2gp is what all others are compared with."""

OURS, THEIRS, FLOOR = "net2gp", "neural-tangents", "floor"
WORKERS = {
    OURS: "worker_limits_net2gp.py",
    THEIRS: "worker_limits_neural_tangents.py",
    FLOOR: "worker_limits_net2gp.py",
}


@dataclass(frozen=True)
class Problem:
    """A network with `depth` hidden layers, and its inputs: one batch for k(x, x) or two for k(x, y).

    `goal` is how many times faster than neural-tangents we mean to be, `near` how many times the floor;
    `agreement` the largest difference between the two libraries in float64, relative to the largest
    entry, or None where neural-tangents only approximates. Without `peer` it is not asked, because its
    memory would not do.
    """

    name: str
    title: str
    network: str
    depth: int
    num_points: int
    input_shape: tuple[int, ...]
    activation: str = "relu"
    weight_var: float = 2.0
    bias_var: float = 0.1
    equal_norms: bool = False
    two_batches: bool = False
    goal: float | None = None
    near: float | None = None
    agreement: float | None = 1e-6
    peer: bool = True

    def arrays(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Inputs `x` (and `y`) of mean squares between 1/4 and 9/4, or all one.

        They are rounded to float32, so that all dtypes see the same; but equal norms must stay equal.
        """
        generator = np.random.default_rng(seed)
        drawn = {}
        for name in ("x", "y") if self.two_batches else ("x",):
            x = generator.standard_normal((self.num_points, *self.input_shape))
            flat = x.reshape(self.num_points, -1)
            flat /= np.sqrt((flat * flat).mean(1, keepdims=True))
            if not self.equal_norms:
                flat *= generator.uniform(0.5, 1.5, (self.num_points, 1))
            drawn[name] = x if self.equal_norms else x.astype(np.float32)
        return drawn


def dense(name: str, title: str, num_points: int, depth: int = 3, **options: Any) -> Problem:
    """A fully connected network on 784 inputs, k(x, x)."""
    return Problem(name, title, "dense", depth, num_points, (784,), near=2.0, **options)


def convolutional(name: str, title: str, network: str, side: int, **options: Any) -> Problem:
    """Five 3 × 3 convolutions with ReLU, on 64 images or 64 × 64 pairs of them."""
    return Problem(name, title, network, 5, 64, (3, side, side), **options)


PROBLEMS = {
    problem.name: problem
    for problem in (
        dense("relu2000", "ReLU, 3 layers, N = 2000", 2000, goal=5.0),
        dense("relu5000", "ReLU, 3 layers, N = 5000", 5000, goal=5.0),
        dense("equal2000", "ReLU, 3 layers, equal norms, N = 2000", 2000, equal_norms=True),
        dense("equal5000", "ReLU, 3 layers, equal norms, N = 5000", 5000, equal_norms=True),
        dense("deep2000", "ReLU, 20 layers, N = 2000", 2000, depth=20),
        dense("erf2000", "erf, 3 layers, N = 2000", 2000, activation="erf", goal=3.0),
        dense("erf5000", "erf, 3 layers, N = 5000", 5000, activation="erf", goal=3.0),
        dense("tanh500", "tanh, 3 layers, N = 500", 500, activation="tanh", agreement=None),
        dense("tanh2000", "tanh, 3 layers, N = 2000", 2000, activation="tanh", peer=False),
        convolutional(
            "flatten",
            "CNN flatten 32×32×3, 64 × 64 pairs",
            "flatten",
            32,
            two_batches=True,
            goal=3.0,
        ),
        convolutional("flatten_own", "CNN flatten 32×32×3, k(x, x) of 64", "flatten", 32),
        convolutional(
            "pool", "CNN global pool 8×8×3, 64 × 64 pairs", "pool", 8, two_batches=True, goal=10.0
        ),
    )
}


@dataclass(frozen=True)
class Measurement:
    """One method on one problem in one dtype; `failed` says why there are no figures."""

    problem: str
    dtype: str
    method: str
    figures: dict[str, Any] = field(default_factory=dict)
    error: float | None = None
    failed: str = ""


def main() -> int:
    options = parse(sys.argv[1:])
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    pythons = interpreters(options.methods, console)
    measurements: list[Measurement] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.problems:
            for found in compare(PROBLEMS[name], pythons, options, Path(folder)):
                said = found.failed or f"{found.figures['cpu_s']:.3f} CPU s"
                console.print(f"{name} {found.dtype}: {found.method} {said}", style="dim")
                measurements.append(found)
    rows = [
        Row(PROBLEMS[name], dtype, measurements)
        for name in options.problems
        for dtype in options.dtypes
    ]
    show(rows, console)
    store(rows, measurements, options.output)
    return verdict(rows, console)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--methods", nargs="+", choices=WORKERS, default=list(WORKERS))
    parser.add_argument("--repeats", type=int, default=3, help="at least so many runs (default 3)")
    parser.add_argument(
        "--patience",
        type=float,
        default=40.0,
        help="begin no further run of a method after so many seconds (default 40)",
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the result files")
    return parser.parse_args(arguments)


def interpreters(wanted: Sequence[str], console: Console) -> dict[str, Path | str]:
    """The interpreter of each method, or the reason why there is none."""
    found: dict[str, Path | str] = {name: Path(sys.executable) for name in wanted if name != THEIRS}
    if THEIRS in wanted:
        try:
            with console.status(f"environment of {THEIRS}"):
                found[THEIRS] = ensure(PEERS[THEIRS])
        except NotInstalled as reason:
            console.print(f"missing: {reason}", style="yellow")
            found[THEIRS] = str(reason)
    return found


def compare(
    problem: Problem, pythons: dict[str, Path | str], options: argparse.Namespace, folder: Path
) -> Iterator[Measurement]:
    """All methods in all dtypes; each result is compared with our first."""
    arrays, stored = folder / "arrays.npz", folder / "result.npy"
    np.savez(arrays, **problem.arrays())
    reference: np.ndarray | None = None
    for dtype in options.dtypes:
        for method, python in pythons.items():
            if method == THEIRS and not problem.peer:
                continue
            job = {**asdict(problem), "dtype": dtype, "floor": method == FLOOR}
            files = (str(arrays), str(stored), str(options.repeats), str(options.patience))
            figures, failed = measured(method, python, (json.dumps(job), *files))
            error = None
            if not failed and method != FLOOR:
                kernels = np.load(stored, allow_pickle=False)
                reference = kernels if reference is None else reference
                pairs = zip(kernels, reference, strict=True)
                error = float(np.max([distance(one, other) for one, other in pairs]))
            yield Measurement(problem.name, dtype, method, figures, error, failed)


def measured(method: str, python: Path | str, job: Sequence[str]) -> tuple[dict[str, Any], str]:
    """The figures of a worker in a process of its own on two cores, or why there are none."""
    if isinstance(python, str):
        return {}, f"missing: {python}"
    done = subprocess.run(
        [str(python), str(HERE / WORKERS[method]), *job],
        env=environment(),
        preexec_fn=pin,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()][-1:] or ["no message"]
        return {}, "killed, out of memory?" if done.returncode == -9 else said[0]
    return json.loads(done.stdout.splitlines()[-1]), ""


class Row:
    """One problem in one dtype, all methods beside each other."""

    def __init__(self, problem: Problem, dtype: str, measurements: Sequence[Measurement]) -> None:
        self.problem, self.dtype = problem, dtype
        key = (problem.name, dtype)
        self.of = {m.method: m for m in measurements if (m.problem, m.dtype) == key}

    def figure(self, method: str, key: str) -> float | None:
        """A measured figure, or None."""
        found = self.of.get(method)
        return None if found is None or found.failed else found.figures[key]

    def ratio(self, one: str, other: str, key: str = "cpu_s") -> float | None:
        """How many times the figure of `other` that of `one` is."""
        above, below = self.figure(one, key), self.figure(other, key)
        return above / below if above is not None and below else None

    def error(self, method: str) -> str:
        """The difference from the reference, which is ours in the first dtype."""
        found = self.of.get(method)
        if found is None or found.error is None:
            return ""
        return "–" if method == OURS and self.dtype == DTYPES[0] else f"{found.error:.0e}"

    def agrees(self) -> bool:
        """Whether the two libraries give the same kernels, as far as float64 and the problem promise."""
        found, bound = self.of.get(THEIRS), self.problem.agreement
        if self.dtype != DTYPES[0] or bound is None or found is None or found.error is None:
            return True
        return found.error <= bound

    def times(self) -> list[str]:
        """CPU seconds beside the peer's and the floor's, with the goals."""
        faster, above = self.ratio(THEIRS, OURS), self.ratio(OURS, FLOOR)
        return [
            self.problem.title,
            self.dtype,
            text(self.figure(OURS, "cpu_s"), 3),
            text(self.figure(THEIRS, "cpu_s"), 3),
            text(faster, 1, "×"),
            text(self.problem.goal, 0, "×", "≥ "),
            text(self.figure(FLOOR, "cpu_s"), 3),
            text(above, 1, "×"),
            text(self.problem.near, 0, "×", "≤ "),
        ]

    def others(self) -> list[str]:
        """Wall seconds, memory and errors."""
        runs = [
            len(m.figures["all_cpu_s"])
            for m in (self.of.get(OURS), self.of.get(THEIRS))
            if m and m.figures
        ]
        return [
            self.problem.title,
            self.dtype,
            text(self.figure(OURS, "wall_s"), 3),
            text(self.figure(THEIRS, "wall_s"), 3),
            text(self.figure(THEIRS, "warm_up_s"), 1),
            text(self.figure(OURS, "peak_mb"), 0),
            text(self.figure(THEIRS, "peak_mb"), 0),
            text(self.ratio(THEIRS, OURS, "peak_mb"), 1, "×"),
            self.error(OURS),
            self.error(THEIRS),
            " / ".join(map(str, runs)),
        ]


def text(value: float | None, digits: int, after: str = "", before: str = "") -> str:
    """A number with its signs, or nothing."""
    return "" if value is None else f"{before}{value:.{digits}f}{after}"


TIMES = (
    "job",
    "dtype",
    "net2gp",
    "neural-tangents",
    "faster",
    "goal",
    "floor",
    "above floor",
    "goal",
)
OTHERS = ("job", "dtype", "net2gp wall s", "n.-t. wall s", "n.-t. first s", "net2gp MB", "n.-t. MB")
OTHERS = (*OTHERS, "less memory", "net2gp error", "n.-t. error", "runs")


def tables(rows: Sequence[Row]) -> Iterator[tuple[str, tuple[str, ...], list[list[str]]]]:
    yield "CPU seconds", TIMES, [row.times() for row in rows]
    yield "Wall time, peak memory and errors", OTHERS, [row.others() for row in rows]


def show(rows: Sequence[Row], console: Console) -> None:
    for heading, columns, body in tables(rows):
        table = Table(title=heading, title_justify="left")
        for i, column in enumerate(columns):
            table.add_column(column, justify="right" if i > 1 else "left", no_wrap=i < 2)
        for line in body:
            table.add_row(*line)
        console.print(table)


EXPLANATION = """\
NNGP and tangent kernel together, weight_var = 2, bias_var = 0.1. Fully connected networks have 784 inputs
of different norms (or of equal ones, where said) and k(x, x) is asked for: net2gp computes one half of it,
neural-tangents does not use the symmetry. The convolutional networks have five 3 × 3 convolutions, and
pairs are those of two different batches, so that there is no symmetry to use. neural-tangents has no
closed form for tanh: it uses Gauss–Hermite quadrature, whose memory (about 4 GB for 500 points in float64)
leaves N = 2000 to net2gp alone.

Best of the given numbers of runs (net2gp / neural-tangents) after a warm-up, each library in a process of
its own; OpenMP threads sleep while they wait (`OMP_WAIT_POLICY=PASSIVE`), for both. neural-tangents is
jitted, and compiled in the warm-up, its first call; net2gp is timed from the module on. Floor: the inputs'
Gram matrix (all of it; for convolutional networks at all positions or pairs of positions that the network
needs) and one pass over memory that writes two arrays of its size. Memory is the peak above the process
with its imports and inputs. Errors are the largest difference from net2gp in float64, relative to the
largest entry, over both kernels. Made by `make bench`."""


def store(rows: Sequence[Row], measurements: Sequence[Measurement], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    machine = {
        "processor": processor(),
        "cores": NUM_CORES,
        "omp_wait_policy": "PASSIVE",
        "python": platform.python_version(),
    }
    content = {"machine": machine, "measurements": [asdict(m) for m in measurements]}
    (folder / "limits.json").write_text(json.dumps(content, indent=1) + "\n")
    lines = ["# Infinite-width kernels, side by side", "", f"{processor()}, {NUM_CORES} cores."]
    lines += ["", EXPLANATION]
    for heading, columns, body in tables(rows):
        lines += ["", f"## {heading}", "", "| " + " | ".join(columns) + " |"]
        lines += ["|---|---" + "|---:" * (len(columns) - 2) + "|"]
        lines += ["| " + " | ".join(line) + " |" for line in body]
    lines += ["", "## Versions and settings", ""]
    found = [m for m in measurements if m.figures and m.method != FLOOR]
    lines += dict.fromkeys(f"- {m.figures['version']}; {m.figures['note']}" for m in found)
    (folder / "limits.md").write_text("\n".join(lines) + "\n")


def verdict(rows: Sequence[Row], console: Console) -> int:
    """What failed, what disagrees, and which goals were missed; only the first two are errors."""
    wrong = 0
    for row in rows:
        label = f"{row.problem.title}, {row.dtype}"
        for method, found in row.of.items():
            if found.failed:
                console.print(f"{label}: {method}: {found.failed}", style="red")
                wrong += method != THEIRS
        if not row.agrees():
            console.print(f"{label}: the libraries differ by {row.error(THEIRS)}", style="red")
            wrong += 1
        faster, above = row.ratio(THEIRS, OURS), row.ratio(OURS, FLOOR)
        if faster and row.problem.goal and faster < row.problem.goal:
            console.print(f"{label}: {faster:.1f}× faster, goal {row.problem.goal:.0f}×")
        if above and row.problem.near and above > row.problem.near:
            console.print(f"{label}: {above:.1f}× the floor, goal {row.problem.near:.0f}×")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
