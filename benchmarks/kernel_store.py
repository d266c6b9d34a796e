"""A kernel store whose processes are killed, beside one that a single process filled undisturbed.

    python benchmarks/kernel_store.py [--quick]

The kernel is the limit of a convolutional network with pooling. Two processes make and fill a store; one of
them is ended by SIGKILL at a random moment, another takes its place, and so on until the store is full. That
is a round, and there are as many rounds as the kills take. Written to `results/kernel_store.md`, unless it is
the quick run. The exit status is 1 if a claim (`CLAIMS`, written down before the run) does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn

import net2gp as n2g

RESULTS = Path(__file__).resolve().parent / "results" / "kernel_store.md"
PROCESSES, SIDE = 2, 10
KILLS, POINTS, TILE = 100, 120, 8
QUICK_KILLS, QUICK_POINTS = 6, 32
LEAST_SHARE, DIFFERENCE = 0.5, 1e-9
CLAIMS = f"""\
1. In every round the folder ends with the same files, byte by byte, as the one that was filled undisturbed.
2. At least {LEAST_SHARE:.0%} of the kills meet a process that has claimed a tile; in the quick run, one kill.
3. Predictions of a posterior that reads the last store differ from those of the kernel itself by at most
   {DIFFERENCE:g}."""


@dataclass
class Kills:
    """How many processes were killed, and what they left behind."""

    count: int = 0
    claims: int = 0
    parts: int = 0


def problem(count: int) -> tuple[n2g.kernels.BaseKernel, torch.Tensor, torch.Tensor]:
    """A pooled limit, with as many images and targets."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for channels in (1, 8):
        layers += [nn.Conv2d(channels, 8, 3, padding=1), nn.ReLU()]
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 1))
    x = torch.randn(count, 1, SIDE, SIDE, dtype=torch.float64)
    return n2g.ntk(network.double()), x, x.mean((1, 2, 3))[:, None].sin()


def fill(path: Path, kernel: n2g.kernels.BaseKernel, x: torch.Tensor) -> None:
    """Make the store or open it, and compute what is missing."""
    n2g.distributed.kernel_store(path, kernel, x, tile=TILE).fill()


def started(path: Path, kernel: n2g.kernels.BaseKernel, x: torch.Tensor) -> int:
    """A process that fills the store: a copy of this one, so that its start takes milliseconds."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        fill(path, kernel, x)
        status = 0
    finally:
        os._exit(status)


def ended(pid: int) -> bool:
    """Whether a process has filled the store, and an error if it failed."""
    found, status = os.waitpid(pid, os.WNOHANG)
    if found and os.waitstatus_to_exitcode(status) != 0:
        raise SystemExit(f"a process ended with {os.waitstatus_to_exitcode(status)}")
    return bool(found)


def claimed(path: Path, pid: int) -> list[str]:
    """The tokens of the claims of a process."""
    found = []
    for claim in path.glob(".work/*.claim"):
        try:
            said = json.loads(claim.read_text())
        except (OSError, ValueError):
            continue
        if said["pid"] == pid:
            found.append(said["token"])
    return found


def killed(path: Path, pid: int, kills: Kills) -> None:
    """End a process at once, and look at what it left."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    kills.count += 1
    tokens = claimed(path, pid)
    kills.claims += bool(tokens)
    kills.parts += any(list(path.glob(f".work/*.{token}.part")) for token in tokens)


def one_round(path: Path, kernel, x, pause: float, kills: Kills, wanted: int) -> None:
    """Fill a store with processes of which one is killed about every `pause` seconds."""
    workers = [started(path, kernel, x) for _ in range(PROCESSES)]
    while workers:
        time.sleep(random.expovariate(1 / pause) if kills.count < wanted else 0.01)
        workers = [pid for pid in workers if not ended(pid)]
        if kills.count < wanted and len(workers) == PROCESSES:
            killed(path, workers.pop(random.randrange(PROCESSES)), kills)
            workers.append(started(path, kernel, x))


def contents(path: Path) -> dict[str, str]:
    """The digest of each file in a folder."""
    files = sorted(one for one in path.rglob("*") if one.is_file())
    return {str(one.relative_to(path)): sha256(one.read_bytes()).hexdigest() for one in files}


def difference(path: Path, kernel, x: torch.Tensor, y: torch.Tensor) -> float:
    """Between predictions of a posterior that reads the store and of one that does not."""
    stored = n2g.distributed.kernel_store(path, kernel, x).kernel()
    z = x[:10] + 0.1
    found = [n2g.condition(one, (x, y), n2g.Gaussian(0.01)).predict(z) for one in (kernel, stored)]
    gaps = (found[0].mean - found[1].mean, found[0].variance - found[1].variance)
    return max(float(gap.abs().max()) for gap in gaps)


def write(facts: list[str], wrong: list[str]) -> None:
    """The page of results."""
    told = [f"Does not hold: {line}" for line in wrong] or ["All hold."]
    lines = [
        "# A kernel store whose processes are killed",
        "",
        "Made by `python benchmarks/kernel_store.py`: the tangent kernel of two convolutions, average",
        f"pooling and a dense layer for {POINTS} images of {SIDE} × {SIDE} pixels, in float64, in tiles of",
        f"{TILE} images. Processes are copies of one that is ready to compute, on two cores of a shared",
        f"machine, which others used as well. This was torch {version('torch')} with zarr {version('zarr')}.",
        "Random moments rarely meet the milliseconds in which a tile is written; the tests kill a process at",
        "each step of that by name (`tests/distributed/test_store_kills.py`).",
        "",
        *facts,
        "",
        "Claims, written down before the run:",
        "",
        CLAIMS,
        "",
        *told,
        "",
    ]
    RESULTS.write_text("\n".join(lines))


def main() -> int:
    """Fill, kill, compare, and check the claims."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer kills; nothing is written")
    options = parser.parse_args()
    torch.set_num_threads(1)  # threads do not survive a fork
    random.seed(0)
    wanted, count = (QUICK_KILLS, QUICK_POINTS) if options.quick else (KILLS, POINTS)
    kernel, x, y = problem(count)
    kills, wrong, rounds = Kills(), [], 0
    with tempfile.TemporaryDirectory() as folder:
        fill(Path(folder) / "first", kernel, x[: 2 * TILE])  # imports, and the plan of the kernel
        alone, started_at = Path(folder) / "alone", time.perf_counter()
        fill(alone, kernel, x)
        undisturbed, expected = time.perf_counter() - started_at, contents(alone)
        pause = 3 * undisturbed / len(expected)
        while kills.count < wanted:
            rounds += 1
            path = Path(folder) / f"round{rounds}"
            one_round(path, kernel, x, pause, kills, wanted)
            if contents(path) != expected:
                wrong.append(f"round {rounds} ended with other files")
        gap = difference(path, kernel, x, y)
    if kills.claims < (1 if options.quick else LEAST_SHARE * kills.count):
        wrong.append(f"{kills.claims} of {kills.count} kills met a claim")
    if not gap <= DIFFERENCE:
        wrong.append(f"predictions differ by {gap:.3g}")
    facts = [
        "| | |",
        "|---|---:|",
        f"| tiles, and metadata | {len(expected)} files |",
        f"| one process, undisturbed | {undisturbed:.1f} s |",
        f"| kills | {kills.count} in {rounds} rounds |",
        f"| … of a process with a claim | {kills.claims} |",
        f"| … while it wrote a tile | {kills.parts} |",
        f"| all rounds together | {time.perf_counter() - started_at - undisturbed:.1f} s |",
        f"| largest difference of predictions | {gap:.1e} |",
    ]
    if not options.quick:
        write(facts, wrong)
    print("\n".join([*facts, "", *(wrong or ["All claims hold."])]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
