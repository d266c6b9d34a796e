"""Speed of revisions side by side in one run: kernels, limits, Laplace, adapt, solvers.

    python benchmarks/before_after.py [--quick] [--only TEXT] [--before REVISION …] [--after REVISION]

The revisions are copied out of git, and a process of each (one thread) runs the same jobs in turn: before,
after, before, after, … A job's figure is its CPU seconds, best of five rounds. A job that is slower by more
than 5 % than just before is repeated in new processes before it is judged: where memory lies makes the same
program faster or slower by a tenth. The numbers that the jobs give are compared too. Writes
`results/before_after.json` and `results/before_after.md`, and exits with 1 if a job is slower than just
before by more than 5 %.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from revisions import AFTER, BEFORE, extract, named, surroundings

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
WORKER = HERE / "worker_before_after.py"

ROUNDS, ATTEMPTS = 5, 12
SLOWER = 1.05
QUICK = ("tangent kernel, conv", "limit, ReLU", "laplace, kron, reg", "adapt, reg", "solver Chol")


@dataclass(frozen=True)
class Timing:
    """Best CPU seconds of a job in each revision, the last is after; and how far numbers are apart."""

    job: str
    seconds: list[float]
    rounds: int
    difference: float

    @property
    def ratios(self) -> list[float]:
        """After, divided by each revision before."""
        return [self.seconds[-1] / before for before in self.seconds[:-1]]

    @property
    def is_slower(self) -> bool:
        return self.ratios[-1] > SLOWER


class Side:
    """A process that runs jobs of one revision."""

    def __init__(self, source: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER)],
            env=surroundings(source),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.jobs: list[str] = self._read()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("a worker has ended; its message is above")
        return json.loads(line)

    def run(self, job: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(job + "\n")
        self.process.stdin.flush()
        return dict(self._read())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def compare(job: str, sides: list[Side], rounds: int) -> Timing:
    """Best of `rounds` in turn."""
    best = [math.inf] * len(sides)
    values: list[list[float]] = [[]] * len(sides)
    for _ in range(rounds):
        for n, side in enumerate(sides):
            found = side.run(job)
            best[n] = min(best[n], found["cpu_s"])
            values[n] = found["numbers"]
    return Timing(job, best, rounds, apart(values[-2], values[-1]))


def judged(timing: Timing, sources: list[Path], rounds: int) -> Timing:
    """The same job in new processes, as long as it seems to be slower, and at most `ATTEMPTS` times."""
    for _ in range(ATTEMPTS):
        if not timing.is_slower:
            break
        sides = [Side(source) for source in sources]
        again = compare(timing.job, sides, rounds)
        for side in sides:
            side.close()
        best = [min(pair) for pair in zip(timing.seconds, again.seconds, strict=True)]
        timing = replace(timing, seconds=best, rounds=timing.rounds + again.rounds)
    return timing


def apart(one: list[float], other: list[float]) -> float:
    """The largest difference, relative to the largest number."""
    if len(one) != len(other):
        return math.inf
    largest = max(map(abs, one))
    return max(abs(a - b) for a, b in zip(one, other, strict=True)) / (largest or 1.0)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few jobs, two rounds, no files")
    parser.add_argument("--only", default="", help="jobs whose name has this text; no files")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--before", nargs="+", default=[BEFORE])
    parser.add_argument("--after", default=AFTER)
    return parser.parse_args(arguments)


def table(timings: list[Timing], revisions: list[str]) -> str:
    before, after = revisions[:-1], revisions[-1]
    columns = [f"{name} (ms)" for name in revisions] + [f"{after} / {name}" for name in before]
    lines = [
        "# Best CPU milliseconds of at least five rounds in turn",
        "",
        f"| job | {' | '.join(columns)} | rounds | numbers differ by |",
        f"|---|{'--:|' * (len(columns) + 2)}",
    ]
    for t in timings:
        figures = [f"{1e3 * s:.2f}" for s in t.seconds] + [f"{ratio:.2f}" for ratio in t.ratios]
        lines.append(f"| {t.job} | {' | '.join(figures)} | {t.rounds} | {t.difference:.0e} |")
    slower = [t.job for t in timings if t.is_slower]
    lines += ["", f"Slower than {before[-1]} by more than 5 %: {', '.join(slower) or 'none'}.", ""]
    for n, name in enumerate(before):
        every = [t.ratios[n] for t in timings]
        predictions = [t.ratios[n] for t in timings if "predict" in t.job]
        faster = sum(ratio < 1 for ratio in predictions)
        lines.append(
            f"Geometric mean of {after} / {name}: {mean(every):.2f} of all jobs, {mean(predictions):.2f} of "
            f"predictions ({faster} of {len(predictions)} are faster)."
        )
    return "\n".join(lines)


def mean(ratios: list[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan


def store(timings: list[Timing], text: str, revisions: list[str]) -> None:
    found = {
        "revisions": revisions,
        "python": platform.python_version(),
        "jobs": [asdict(t) | {"ratios": t.ratios} for t in timings],
    }
    (RESULTS / "before_after.json").write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / "before_after.md").write_text(text + "\n")


def main() -> int:
    options = parse(sys.argv[1:])
    revisions = [named(revision) for revision in (*options.before, options.after)]
    with tempfile.TemporaryDirectory() as folder:
        sources = [extract(r, Path(folder) / f"{n}") for n, r in enumerate(revisions)]
        sides = [Side(source) for source in sources]
        chosen = [job for job in sides[-1].jobs if options.only in job]
        if options.quick:
            chosen = [job for job in chosen if job.startswith(QUICK)]
        rounds = 2 if options.quick else options.rounds
        timings = []
        for job in chosen:
            timings.append(compare(job, sides, rounds))
            print(job, *(f"{ratio:.2f}" for ratio in timings[-1].ratios), file=sys.stderr)
        for side in sides:
            side.close()
        timings = [judged(timing, sources, rounds) for timing in timings]
    text = table(timings, revisions)
    print(text)
    if not options.quick and not options.only:
        store(timings, text, revisions)
    return 1 if any(t.is_slower for t in timings) else 0


if __name__ == "__main__":
    sys.exit(main())
