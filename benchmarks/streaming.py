"""Laplace's approximation on more and more points: memory and CPU seconds per point, streamed and in memory.

    python benchmarks/streaming.py [--quick]

Points are generated on the fly, 1000 to a batch, for a classifier 64-32-3. Each number is of a process of its
own, on one core: the peak of its resident memory above what it had with the network, the imports and a small
warm-up done. Written to `results/streaming.md`, unless it is the quick run. The exit status is 1 if a claim
(`CLAIMS`, written down before the run) does not hold. CPU seconds are measured without a claim: each step
that needs the points reads a stream again, where data in memory keep what one pass gave.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results" / "streaming.md"
NAMES = ("Diagonal()", "Kron()", "LastLayer()", "Sampled(4 draws)")
BATCH, INPUTS, CLASSES = 1000, 64, 3
MOST_IN_MEMORY = 100_000
REPEATS = 4
MEGABYTES, DIFFERENCE = 24.0, 1e-3
CLAIMS = f"""\
1. Streamed, the peak for the most points is at most {MEGABYTES:.0f} MB above the one for the fewest.
2. Predictions differ from those of the data in memory by at most {DIFFERENCE:g}, in float32."""


@dataclass(frozen=True)
class Run:
    """What a process measured."""

    name: str
    count: int
    way: str
    seconds: float
    peak: float
    probs: list[list[float]]


def worker(name: str, count: int, way: str) -> None:
    """Measure one call of `laplace`, and print it as JSON."""
    import torch
    from torch import Tensor, nn

    import net2gp as n2g
    from measure import peak_memory, resident
    from net2gp.data import Stream
    from net2gp.errors import Net2GPWarning
    from net2gp.structures import Sampled

    torch.set_num_threads(1)
    structures = dict(
        zip(
            NAMES,
            (
                n2g.Diagonal(),
                n2g.Kron(),
                n2g.LastLayer(),
                Sampled(num_samples=4, rank=20, num_points=1000, num_probes=0, max_iterations=8),
            ),
            strict=True,
        )
    )
    teacher = torch.randn(INPUTS, CLASSES, generator=torch.Generator().manual_seed(9))

    class Generated:
        """Points that are made when they are read."""

        def __init__(self, size: int, seed: int = 0) -> None:
            self.size, self.seed = size, seed

        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            for start in range(0, self.size, BATCH):
                generator = torch.Generator().manual_seed(self.seed + start)
                x = torch.randn(min(BATCH, self.size - start), INPUTS, generator=generator)
                noise = torch.randn(len(x), CLASSES, generator=generator)
                yield x, (x @ teacher / 4 + noise).argmax(1)

    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(INPUTS, 32), nn.Tanh(), nn.Linear(32, CLASSES))
    optimizer = torch.optim.Adam(network.parameters(), 3e-3)
    for x, y in Generated(200 * BATCH, seed=10**9):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x), y).backward()
        optimizer.step()
    network.eval()
    prior_var = 0.01 if name == NAMES[3] else None

    def fitted(size: int) -> n2g.Posterior[n2g.Categorical]:
        data = Stream(Generated(size)) if way == "streamed" else Generated(size)
        return n2g.laplace(
            network, data, n2g.Categorical(), structure=structures[name], prior_var=prior_var
        )

    warnings.simplefilter("ignore", Net2GPWarning)
    fitted(3 * BATCH)
    before = resident()
    with peak_memory() as peak:
        start = time.process_time()
        posterior = fitted(count)
        seconds = [time.process_time() - start]
    for _ in range(REPEATS if count <= MOST_IN_MEMORY else 0):
        start = time.process_time()
        fitted(count)
        seconds.append(time.process_time() - start)
    x, _ = next(iter(Generated(100, seed=10**8)))
    probs = posterior.predict(x).probs.tolist()
    print(json.dumps([name, count, way, min(seconds), peak[0] - before, probs]))


def measured(name: str, count: int, way: str) -> Run:
    """One run, in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--worker", name, str(count), way]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    run = Run(*json.loads(done.stdout.splitlines()[-1]))
    print(f"{name:18} {count:>9,} {way:9} {run.seconds:7.1f} s {run.peak:7.0f} MB", flush=True)
    return run


def failures(runs: dict[tuple[str, int, str], Run], counts: list[int]) -> list[str]:
    """The claims that do not hold."""
    wrong = []
    for name in NAMES:
        first, last = (runs[name, count, "streamed"] for count in (counts[0], counts[-1]))
        if last.peak > first.peak + MEGABYTES:
            wrong.append(
                f"{name}: {last.peak:.0f} MB for {last.count}, {first.peak:.0f} for {first.count}"
            )
    for (name, count, way), run in runs.items():
        if way == "streamed" or (name, count, "streamed") not in runs:
            continue
        other = runs[name, count, "streamed"]
        pairs = zip(run.probs, other.probs, strict=True)
        gap = max(abs(p - q) for one, two in pairs for p, q in zip(one, two, strict=True))
        if gap > DIFFERENCE:
            wrong.append(f"{name}, {count} points: predictions differ by {gap:.1e}")
    return wrong


def table(runs: dict[tuple[str, int, str], Run]) -> list[str]:
    """A line for each structure and number of points."""
    lines = ["| structure | points | MB, streamed | in memory | µs a point, streamed | in memory |"]
    lines += ["|---|---:|---:|---:|---:|---:|"]
    for (name, count, way), run in runs.items():
        if way != "streamed":
            continue
        other = runs.get((name, count, "in memory"))
        cells = (
            ["", ""]
            if other is None
            else [f"{other.peak:.0f}", f"{1e6 * other.seconds / count:.0f}"]
        )
        lines.append(
            f"| `{name}` | {count:,} | {run.peak:.0f} | {cells[0]} | {1e6 * run.seconds / count:.0f} "
            f"| {cells[1]} |"
        )
    return lines


def main() -> int:
    """Measure, write, and check the claims."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer points; nothing is written")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        name, count, way = options.worker
        worker(name, int(count), way)
        return 0
    counts = [10_000, 40_000] if options.quick else [10_000, 100_000, 1_000_000]
    runs = {}
    for name in NAMES:
        for count in counts:
            for way in ("streamed", "in memory")[: 1 if count > MOST_IN_MEMORY else 2]:
                runs[name, count, way] = measured(name, count, way)
    wrong = failures(runs, counts)
    if not options.quick:
        write(runs, wrong)
    print("\n".join(["", *table(runs), "", *(wrong or ["All claims hold."])]))
    return 1 if wrong else 0


def write(runs: dict[tuple[str, int, str], Run], wrong: list[str]) -> None:
    """The page of results."""
    told = [f"Does not hold: {line}" for line in wrong] or ["All hold."]
    lines = [
        "# Data that are streamed",
        "",
        "Made by `python benchmarks/streaming.py`: `laplace` of a classifier 64-32-3 in float32 with the",
        "default tuning (`Sampled`: at a given prior, at most 8 iterations), points made on the fly, one",
        "core, each number from a process of its own. Memory is the peak of what is resident above what the",
        "process had before. CPU seconds include making the points, once in each pass; up to 100,000",
        "points they are the least of five calls. This was torch",
        f"{version('torch')} on a shared machine.",
        "",
        *table(runs),
        "",
        "Claims, written down before the run:",
        "",
        CLAIMS,
        "",
        *told,
        "",
    ]
    RESULTS.write_text("\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
