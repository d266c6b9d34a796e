"""A step of stochastic gradient Hamiltonian Monte Carlo beside the `posteriors` library's.

    python benchmarks/sghmc_step.py [--quick] [--python PEER]

prints the CPU time of a step of all chains on one core for each, and their ratio. PEER is an interpreter that
has `posteriors`; without it, `peers.py` makes one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from peers import PEERS, ensure

HERE = Path(__file__).resolve().parent
PROBLEMS = {"perceptron": 400, "wide": 60, "convolutional": 60}
"""The steps that are timed for each problem."""


def measured(python: Path, way: str, problem: str, chains: int, steps: int) -> float:
    """CPU seconds of a step, from a process of its own."""
    settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent / "src")}
    job = [
        str(python),
        "-W",
        "ignore",
        str(HERE / "sghmc_peer.py"),
        way,
        problem,
        str(chains),
        str(steps),
    ]
    done = subprocess.run(job, capture_output=True, text=True, env={**os.environ, **settings})
    if done.returncode:
        raise SystemExit(f"{way} failed on {problem}:\n{done.stderr[-2000:]}")
    return float(json.loads(done.stdout.strip().splitlines()[-1])["seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="fewer steps and the first problem only"
    )
    parser.add_argument("--python", type=Path, help="an interpreter that has `posteriors`")
    options = parser.parse_args()
    peer = options.python or ensure(PEERS["posteriors"])
    print(f"{'problem':15} {'chains':>6} {'net2gp ms':>10} {'posteriors ms':>14} {'ratio':>6}")
    for problem, steps in list(PROBLEMS.items())[: 1 if options.quick else None]:
        for chains in (1, 8):
            count = steps // 4 if options.quick else steps
            ours = measured(Path(sys.executable), "net2gp", problem, chains, count)
            theirs = measured(peer, "posteriors", problem, chains, count)
            row = f"{problem:15} {chains:6} {1e3 * ours:10.3f} {1e3 * theirs:14.3f}"
            print(f"{row} {theirs / ours:6.1f}", flush=True)


if __name__ == "__main__":
    main()
