"""Layers of modern networks before and after they had rules: attention, recurrence, tables, transposed maps.

    python benchmarks/layer_rules.py [--quick] [--only TEXT] [--before REVISION]

A process of each revision (one thread) runs the same jobs: the tangent kernel at new points, first plan and
proof included, and a posterior of Kronecker factors with its variances. torch.func computes the same
kernels as a peer, by `vmap(jacrev)`. CPU seconds of kernels are the best of two rounds, and memory is the
highest of the process while the job ran.

What is asserted, also with `--quick`: kernels of both revisions and of torch.func are equal up to rounding,
`Kron` finds a posterior for every network, and, without `--quick`, no kernel is slower than before by more
than a tenth. Writes `results/layer_rules.md`, unless `--quick` or `--only` is given. Exit status 1 if an
assertion fails.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from revisions import ROOT, extract, named, surroundings

HERE = Path(__file__).resolve().parent
WORKER = HERE / "worker_layer_rules.py"
BEFORE = "b5afc08"
"""The last revision without these rules."""

NETWORKS = (
    *("encoder", "RMSNorm blocks", "LSTM", "GRU", "LSTM cells"),
    *("transposed convolutions", "bilinear", "bag of embeddings", "tied embedding"),
)
KERNEL, PEER, KRON, REST = (
    *("tangent kernel", "tangent kernel by torch.func"),
    *("Kron", "Kron, else diagonal"),
)
ROUNDS, SLOWER, APART = 2, 1.1, 1e-3
Found = dict[str, Any]


class Side:
    """A process that runs the jobs of one revision."""

    def __init__(self, source: Path) -> None:
        kind = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [sys.executable, str(WORKER)]
        self.process = subprocess.Popen(command, env=surroundings(source), **kind)

    def best(self, network: str, quantity: str, quick: bool) -> Found:
        """The best of some rounds for kernels, of which the first warms torch up, and of one for the rest."""
        job = {"network": network, "quantity": quantity, "quick": quick}
        rounds = 1 if quick or quantity != KERNEL else ROUNDS
        answers = [self._run(job) for _ in range(rounds)]
        return min(answers, key=lambda answer: answer.get("seconds", 0.0))

    def _run(self, job: Found) -> Found:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("a worker has ended; its message is above")
        return dict(json.loads(line))

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def apart(one: Found, other: Found) -> float:
    """The largest difference of two answers, relative to the largest number; 0 if one has none."""
    if "numbers" not in one or "numbers" not in other:
        return 0.0
    pairs = list(zip(one["numbers"], other["numbers"], strict=True))
    return max(abs(a - b) for a, b in pairs) / max(abs(a) for a, _ in pairs)


def faults(network: str, row: dict[str, Found], quick: bool) -> list[str]:
    """What is not as it must be."""
    found = []
    for other in ("kernel before", "kernel by torch.func"):
        if (distance := apart(row["kernel"], row[other])) > APART:
            found.append(f"{network}: the kernel and the {other} differ by {distance:.0e}")
    found += [
        f"{network}, {name}: {row[name]['error']}"
        for name in ("kernel", "Kron")
        if "error" in row[name]
    ]
    seconds = [row[name].get("seconds", 0.0) for name in ("kernel", "kernel before")]
    if not quick and seconds[1] and seconds[0] > SLOWER * seconds[1]:
        found.append(
            f"{network}: the kernel takes {seconds[0]:.2f} s, and {seconds[1]:.2f} s before"
        )
    return found


def cell(answer: Found, after: Found | None = None) -> str:
    """Seconds, and how many times as long as afterwards."""
    if "seconds" not in answer:
        return "refused" if "NetworkError" in answer["error"] else answer["error"].split(":")[0]
    ratio = (
        f" ({answer['seconds'] / after['seconds']:.1f}×)" if after and "seconds" in after else ""
    )
    return f"{answer['seconds']:.2f}{ratio}"


def table(rows: dict[str, dict[str, Found]], revisions: Sequence[str]) -> str:
    """The page."""
    lines = [
        "# Layers of modern networks before and after they had rules",
        "",
        f"CPU seconds on one thread at revision {revisions[1]}, and before at {revisions[0]} (in brackets: "
        "how many times as long), and the highest memory. Made by `python benchmarks/layer_rules.py`, which "
        "says what is asserted.",
        "",
        "| network | kernel | before | torch.func | MB | before | Kron | before | else diagonal, before |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for network, row in rows.items():
        kernel, kron = row["kernel"], row["Kron"]
        memory = [f"{row[name].get('megabytes', 0):.0f}" for name in ("kernel", "kernel before")]
        others = [cell(row[name], kernel) for name in ("kernel before", "kernel by torch.func")]
        krons = [cell(row[name], kron) for name in ("Kron before", "Kron, else diagonal, before")]
        cells = [cell(kernel), *others, *memory, cell(kron), *krons]
        lines.append(f"| {network} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all, print the table; 0 if all is as it must be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small networks, one round, no file")
    parser.add_argument("--only", default="", help="networks whose name has this text; no file")
    parser.add_argument("--before", default=BEFORE)
    options = parser.parse_args(arguments)
    rows: dict[str, dict[str, Found]] = {}
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        before, after = Side(extract(options.before, Path(folder))), Side(ROOT / "src")
        jobs = {
            "kernel": (after, KERNEL),
            "kernel before": (before, KERNEL),
            "kernel by torch.func": (after, PEER),
            "Kron": (after, KRON),
            "Kron before": (before, KRON),
            "Kron, else diagonal, before": (before, REST),
        }
        for network in (name for name in NETWORKS if options.only in name):
            rows[network] = {
                name: side.best(network, quantity, options.quick)
                for name, (side, quantity) in jobs.items()
            }
            wrong += faults(network, rows[network], options.quick)
            print(
                network, {name: cell(answer) for name, answer in rows[network].items()}, flush=True
            )
        before.close()
        after.close()
    text = table(rows, (named(options.before), named("HEAD")))
    print(text + "".join(f"\n{fault}" for fault in wrong))
    if not options.quick and not options.only:
        (HERE / "results" / "layer_rules.md").write_text(text)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
