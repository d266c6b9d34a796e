"""Tangent kernels side by side with the peers, in one run on two cores.

    python benchmarks/run.py

Each measurement has a process of its own, in the environment of its library: best of at least three
runs after a warm-up (fewer only where they take minutes), process CPU seconds, wall seconds, and
peak resident memory above the process with its imports and inputs. Weights and inputs are the same
arrays everywhere, and every kernel is compared with ours. Writes `results/tangent.json` and
`results/tangent.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from peers import PEERS, ROOT, NotInstalled, ensure
from problems import PROBLEMS, QUANTITIES, Problem, read

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
NUM_CORES = 2
TOLERANCE = 1e-4
"""Largest difference from our kernel, relative to its largest entry, that counts as agreement."""


@dataclass(frozen=True)
class Method:
    """A library's way to the kernel: its worker, and whose environment it runs in (ours if None)."""

    name: str
    worker: str
    peer: str | None = None
    compiles: bool = False


METHODS = (
    Method("net2gp", "worker_net2gp.py"),
    Method("neural-tangents", "worker_neural_tangents.py", "neural-tangents", compiles=True),
    Method("torch.func", "worker_torch_func.py"),
    Method("laplace-torch", "worker_laplace.py", "laplace"),
)


@dataclass(frozen=True)
class Measurement:
    """One method on one problem; `failed` says why there are no figures."""

    problem: str
    quantity: str
    method: str
    figures: dict[str, Any] = field(default_factory=dict)
    compile_s: float | None = None
    error: float | None = None
    failed: str = ""


def main() -> int:
    options = parse(sys.argv[1:])
    console = Console()
    if not console.is_terminal:
        console = Console(width=110)
    pythons = interpreters(options.methods, console)
    measurements: list[Measurement] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.problems:
            arrays = Path(folder) / f"{name}.npz"
            np.savez(arrays, **PROBLEMS[name].arrays())
            for quantity in options.quantities:
                for found in compare(arrays, quantity, pythons, options):
                    said = found.failed or f"{found.figures['cpu_s']:.3f} CPU s"
                    console.print(f"{name} {quantity}: {found.method} {said}", style="dim")
                    measurements.append(found)
    show(measurements, options, console)
    store(measurements, options)
    wrong = [m for m in measurements if m.error is not None and not m.error <= TOLERANCE]
    for m in wrong:
        console.print(f"{m.problem} {m.quantity}: {m.method} is off by {m.error:.1e}", style="red")
    ours_failed = any(m.failed and m.method == METHODS[0].name for m in measurements)
    return 1 if wrong or ours_failed else 0


def compare(
    arrays: Path, quantity: str, pythons: dict[str, Path | str], options: argparse.Namespace
) -> Iterator[Measurement]:
    """All methods on one problem, each result compared with that of the first, which is ours."""
    reference: np.ndarray | None = None
    for method in METHODS:
        if method.name not in pythons:
            continue
        stored = arrays.with_name("result.npz")
        limits = (str(options.repeats), str(options.patience))
        job = (arrays.stem, quantity, str(arrays), str(stored), *limits)
        found = measure(method, pythons[method.name], job)
        if not found.failed:
            kernel = read(stored)["kernel"]
            reference = kernel if reference is None else reference
            found = replace(found, error=distance(kernel, reference))
        yield found


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [method.name for method in METHODS]
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--quantities", nargs="+", choices=QUANTITIES, default=list(QUANTITIES))
    parser.add_argument("--methods", nargs="+", choices=names, default=names)
    parser.add_argument("--repeats", type=int, default=3, help="at least so many runs (default 3)")
    parser.add_argument(
        "--patience",
        type=float,
        default=300.0,
        help="begin no further run of a method after so many seconds (default 300)",
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the result files")
    return parser.parse_args(arguments)


def interpreters(wanted: Sequence[str], console: Console) -> dict[str, Path | str]:
    """The interpreter of each method, or the reason why there is none."""
    found: dict[str, Path | str] = {}
    for method in METHODS:
        if method.name not in wanted:
            continue
        if method.peer is None:
            found[method.name] = Path(sys.executable)
            continue
        try:
            with console.status(f"environment of {method.peer}"):
                found[method.name] = ensure(PEERS[method.peer])
        except NotInstalled as reason:
            console.print(f"missing: {reason}", style="yellow")
            found[method.name] = str(reason)
    return found


def measure(method: Method, python: Path | str, job: Sequence[str]) -> Measurement:
    """Run a worker in a process of its own, on two cores."""
    problem, quantity = job[:2]
    if isinstance(python, str):
        return Measurement(problem, quantity, method.name, failed=f"missing: {python}")
    done = subprocess.run(
        [str(python), str(HERE / method.worker), *job],
        env=environment(),
        preexec_fn=pin,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()][-1:] or ["no message"]
        reason = "killed, out of memory?" if done.returncode == -9 else said[0]
        return Measurement(problem, quantity, method.name, failed=reason)
    figures = json.loads(done.stdout.splitlines()[-1])
    spent = figures["warm_up_s"] - figures["wall_s"] if method.compiles else None
    return Measurement(problem, quantity, method.name, figures, compile_s=spent)


def environment() -> dict[str, str]:
    """Two threads for every library, and threads that sleep while they wait.

    By default OpenMP's threads spin at a barrier, which counts as CPU time: next to another process on
    the same cores a job then shows up to ten times the CPU seconds that it computes.
    """
    threads = {name: str(NUM_CORES) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **threads, **quiet, "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": path}


@cache
def made_by() -> str:
    """The command line of this run and the revision of its code as it began, for the head of a result."""
    line = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    try:
        revision = git("rev-parse", "--short", "HEAD")
        changed = git("status", "--porcelain", "--", "*.py")
    except (OSError, subprocess.SubprocessError):
        return f"Made by `{line}`, revision unknown."
    return f"Made by `{line}` at revision {revision}{', with changes' if changed else ''}."


def git(*arguments: str) -> str:
    """What git says of the folder that holds this project."""
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()


def pin() -> None:
    """Keep the process on two cores; XLA sizes its thread pool by this."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:NUM_CORES])


def distance(kernel: np.ndarray, reference: np.ndarray) -> float:
    """Largest difference relative to the largest entry; infinite if the shapes differ."""
    if kernel.shape != reference.shape:
        return float("inf")
    difference = np.abs(kernel.astype(np.float64) - reference.astype(np.float64)).max()
    return float(difference / np.abs(reference).max())


COLUMNS = ("method", "CPU s", "wall s", "peak MB", "runs", "compile s", "max rel. error")


def cells(m: Measurement, ours: Measurement | None) -> list[str]:
    """A row of the table: each figure with its ratio to ours."""
    if m.failed:
        return [m.method, m.failed] + [""] * (len(COLUMNS) - 2)

    def figure(key: str, digits: int) -> str:
        value = m.figures[key]
        text = f"{value:.{digits}f}"
        if ours is None or ours.failed or m is ours:
            return text
        return f"{text} ({value / ours.figures[key]:.1f}×)"

    return [
        m.method,
        figure("cpu_s", 3),
        figure("wall_s", 3),
        figure("peak_mb", 0),
        str(len(m.figures["all_cpu_s"])),
        "" if m.compile_s is None else f"{m.compile_s:.1f}",
        "" if m.error is None else ("–" if m is ours else f"{m.error:.0e}"),
    ]


def tables(
    measurements: Sequence[Measurement], options: argparse.Namespace
) -> Iterator[tuple[str, list[list[str]]]]:
    """A title and the rows for each problem and quantity."""
    for name in options.problems:
        for quantity in options.quantities:
            chosen = [m for m in measurements if (m.problem, m.quantity) == (name, quantity)]
            ours = next((m for m in chosen if m.method == METHODS[0].name), None)
            yield title(PROBLEMS[name], quantity), [cells(m, ours) for m in chosen]


def title(problem: Problem, quantity: str) -> str:
    size = problem.num_points * (problem.num_outputs if quantity == "full" else 1)
    what = "full kernel" if quantity == "full" else "trace over outputs"
    return f"{problem.title}; N = {problem.num_points}, P = {problem.num_params:,}: {what} {size} × {size}"


def show(
    measurements: Sequence[Measurement], options: argparse.Namespace, console: Console
) -> None:
    for heading, body in tables(measurements, options):
        table = Table(title=heading, title_justify="left")
        for i, column in enumerate(COLUMNS):
            table.add_column(column, justify="right" if i else "left")
        for row in body:
            table.add_row(*row)
        console.print(table)
    console.print("(k×): that many times ours; more than 1 is slower or larger than net2gp.")


def store(measurements: Sequence[Measurement], options: argparse.Namespace) -> None:
    options.output.mkdir(parents=True, exist_ok=True)
    machine = {
        "processor": processor(),
        "cores": NUM_CORES,
        "omp_wait_policy": "PASSIVE",
        "python": platform.python_version(),
    }
    content = {"machine": machine, "measurements": [asdict(m) for m in measurements]}
    (options.output / "tangent.json").write_text(json.dumps(content, indent=1) + "\n")
    lines = [
        "# Tangent kernels, side by side",
        "",
        f"{processor()}, {NUM_CORES} cores, float32.",
        "",
    ]
    lines += [
        "Best of the given number of runs after a warm-up, each method in a process of its own; memory is",
        "the peak above the process with its imports and inputs; (k×) is the ratio to net2gp.",
        "OpenMP threads sleep while they wait (`OMP_WAIT_POLICY=PASSIVE`), for all methods: spinning",
        "threads would count as CPU time. Made by `make bench`.",
    ]
    for heading, body in tables(measurements, options):
        lines += ["", f"## {heading}", "", "| " + " | ".join(COLUMNS) + " |"]
        lines += ["|---" + "|---:" * (len(COLUMNS) - 1) + "|"]
        lines += ["| " + " | ".join(row) + " |" for row in body]
    measured = [m for m in measurements if m.figures]
    said = [f"- {m.method}: {m.figures['version']}; {m.figures['note']}" for m in measured]
    lines += ["", "## Versions and settings", "", *dict.fromkeys(said)]
    (options.output / "tangent.md").write_text("\n".join(lines) + "\n")


def processor() -> str:
    with open("/proc/cpuinfo") as file:
        names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    sys.exit(main())
