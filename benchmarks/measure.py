"""One measurement in one process: CPU seconds, wall seconds and peak memory of a job.

Imported by every worker, in the environment of its library; needs NumPy alone. A worker is called as
`worker_*.py PROBLEM QUANTITY ARRAYS RESULT REPEATS PATIENCE`: it reads the weights and inputs from
ARRAYS, writes the kernel to RESULT, and prints a JSON object on its last line.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from problems import PROBLEMS, Problem, read

MIN_SECONDS, MAX_REPEATS = 2.0, 20
"""Jobs are repeated until they took this long together, or so many times."""


@dataclass(frozen=True)
class Job:
    """What a library is asked to do, after its imports and with its inputs in memory.

    `run` is timed; `warm_up` is called once before, untimed; `matrix` turns the result of `run` into
    the common layout, untimed, so that no library pays for a layout that it does not use.
    """

    run: Callable[[], Any]
    warm_up: Callable[[], Any]
    matrix: Callable[[Any], np.ndarray]
    version: str
    note: str = ""


def resident(field: str = "VmRSS") -> float:
    """Resident memory of this process now (VmRSS) or at its highest (VmHWM), in MB."""
    with open("/proc/self/status") as lines:
        for line in lines:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError(f"/proc/self/status has no {field}: the benchmarks need Linux")


@contextmanager
def peak_memory() -> Iterator[list[float]]:
    """Append to the yielded list the highest resident memory (MB) while the block ran.

    The kernel's own high-water mark is reset and read, which misses nothing; where that is not
    allowed, a thread samples every 2 ms.
    """
    seen: list[float] = []
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        samples, done = [resident()], threading.Event()

        def sample() -> None:
            while not done.wait(0.002):
                samples.append(resident())

        thread = threading.Thread(target=sample, daemon=True)
        thread.start()
        yield seen
        done.set()
        thread.join()
        seen.append(max(samples))
    else:
        yield seen
        seen.append(resident("VmHWM"))


def _another(wall: list[float], repeats: int, patience: float) -> bool:
    if not wall or sum(wall) > patience:
        return not wall
    return len(wall) < repeats or (sum(wall) < MIN_SECONDS and len(wall) < MAX_REPEATS)


def measure(job: Job, baseline: float, repeats: int, patience: float) -> tuple[dict[str, Any], Any]:
    """Best of `repeats` runs after one warm-up: of more if they are short.

    No run is begun once they have taken `patience` seconds together. Memory is the peak above
    `baseline` (MB).
    """
    with peak_memory() as warm_up_peak:
        start = time.perf_counter()
        job.warm_up()
        warm_up_wall = time.perf_counter() - start
    cpu, wall, result = [], [], None
    with peak_memory() as peak:
        while _another(wall, repeats, patience):
            result = None  # two results at once would count one of them as working memory
            cpu_start, start = time.process_time(), time.perf_counter()
            result = job.run()
            wall.append(time.perf_counter() - start)
            cpu.append(time.process_time() - cpu_start)
    return {
        "cpu_s": min(cpu),
        "wall_s": min(wall),
        "peak_mb": peak[0] - baseline,
        "baseline_mb": baseline,
        "warm_up_s": warm_up_wall,
        "warm_up_peak_mb": warm_up_peak[0] - baseline,
        "all_cpu_s": cpu,
        "all_wall_s": wall,
        "version": job.version,
        "note": job.note,
    }, result


def main(make_job: Callable[[Problem, str, dict[str, np.ndarray]], Job]) -> None:
    """Run a worker: build the job, measure it, store its kernel and print the figures."""
    name, quantity, arrays, stored, repeats, patience = sys.argv[1:]
    job = make_job(PROBLEMS[name], quantity, read(arrays))
    figures, result = measure(job, resident(), int(repeats), float(patience))
    np.savez(stored, kernel=job.matrix(result))
    print(json.dumps(figures))
