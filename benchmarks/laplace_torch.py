"""Laplace posteriors side by side with laplace-torch, in one run on two cores.

    python benchmarks/laplace_torch.py

The same trained networks, data and structures for both, each measurement in a process of its own, in the
environment of its library: best of at least three runs (fewer only where they outlast `--patience`),
process CPU seconds, wall seconds, and peak resident memory above the process with its imports and inputs.
Scores are means over seeds. Writes `results/laplace.json` and `results/laplace.md`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from laplace_problems import DIGITS, NUM_TEST, STRUCTURES, random_classes
from laplace_tables import OURS, THEIRS, report
from net2gp import metrics
from networks import network
from peers import PEERS, NotInstalled, ensure
from problems import read
from run import HERE, NUM_CORES, RESULTS, environment, made_by, pin, processor

WORKERS = {OURS: "worker_laplace_net2gp.py", THEIRS: "worker_laplace_torch.py"}
BACK_ENDS = ("BackPACK", "default")
"""Of laplace-torch: those that compute its curvatures and Jacobians."""

EPOCHS, BATCH = 50, 128


@dataclass(frozen=True)
class Measurement:
    """One library on one structure of one seed's network; `failed` says why there are no figures.

    `variances` are those of the logits of a few test points, at a prior variance of one.
    """

    structure: str
    method: str
    seed: int
    back_end: str = ""
    found: dict[str, Any] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)
    variances: list[float] = field(default_factory=list)
    failed: str = ""


def main() -> int:
    options = parse(sys.argv[1:])
    made_by()
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    pythons = interpreters(options.methods, console)
    measurements = kept(options) if options.keep else []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.savez(folder / "classes.npz", **random_classes())
        for seed in options.seeds:
            arrays = trained_digits(seed)
            np.savez(folder / "digits.npz", **arrays)
            if not any((m.structure, m.seed) == ("network", seed) for m in measurements):
                measurements.append(plain(arrays, seed))
            for measurement in compare(seed, pythons, options, folder):
                console.print(said(measurement), style="dim", highlight=False)
                measurements.append(measurement)
                store(measurements, options)
    return report(options.output, console)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = list(STRUCTURES)
    parser.add_argument("--structures", nargs="+", choices=names, default=names)
    parser.add_argument("--methods", nargs="+", choices=WORKERS, default=list(WORKERS))
    parser.add_argument("--back-ends", nargs="+", choices=BACK_ENDS, default=list(BACK_ENDS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--repeats", type=int, default=3, help="at least so many runs (default 3)")
    parser.add_argument(
        "--patience",
        type=float,
        default=40.0,
        help="begin no further run of a stage after so many seconds (default 40)",
    )
    parser.add_argument(
        "--limit", type=float, default=900.0, help="seconds for a process (default 900)"
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="keep what is stored of other structures, libraries and seeds",
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the result files")
    return parser.parse_args(arguments)


def kept(options: argparse.Namespace) -> list[Measurement]:
    """The stored measurements that this run does not make anew."""
    stored = json.loads((options.output / "laplace.json").read_text())["measurements"]
    found = [Measurement(**row) for row in stored]
    return [
        m
        for m in found
        if m.structure not in options.structures
        or m.method not in options.methods
        or m.seed not in options.seeds
    ]


def interpreters(wanted: Sequence[str], console: Console) -> dict[str, Path | str]:
    """The interpreter of each library, or the reason why there is none."""
    found: dict[str, Path | str] = {OURS: Path(sys.executable)} if OURS in wanted else {}
    if THEIRS in wanted:
        try:
            with console.status(f"environment of {THEIRS}"):
                found[THEIRS] = ensure(PEERS["laplace"])
        except NotInstalled as reason:
            console.print(f"missing: {reason}", style="yellow")
            found[THEIRS] = str(reason)
    return found


def trained_digits(seed: int) -> dict[str, np.ndarray]:
    """A trained network, its data, and two sets that are no digits: turned by 90°, and noise."""
    from sklearn.datasets import load_digits

    bunch, generator = load_digits(), np.random.default_rng(seed)
    images, labels = (bunch.images / 16).astype(np.float32), bunch.target.astype(np.int64)
    order = generator.permutation(len(labels))
    train, test = order[: DIGITS.num_points], order[-NUM_TEST:]
    arrays = DIGITS.arrays(seed)
    arrays |= {"x": images[train].reshape(-1, 64), "y": labels[train]}
    arrays |= {"test": images[test].reshape(-1, 64), "y_test": labels[test]}
    arrays["rotated"] = np.rot90(images[test], axes=(1, 2)).reshape(-1, 64).copy()
    arrays["noise"] = generator.random((NUM_TEST, 64), dtype=np.float32)
    torch.manual_seed(seed)
    module = train_network(network(DIGITS, arrays), arrays)
    for i, layer in enumerate(m for m in module if isinstance(m, nn.Linear)):
        arrays[f"w{i}"] = layer.weight.detach().numpy()
        arrays[f"b{i}"] = layer.bias.detach().numpy()
    return arrays


def train_network(module: nn.Sequential, arrays: dict[str, np.ndarray]) -> nn.Sequential:
    """Adam with weight decay, in mini-batches."""
    torch.set_num_threads(1)
    x, y = torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"])
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3, weight_decay=1e-4)
    for _ in range(EPOCHS):
        for chosen in torch.randperm(len(x)).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x[chosen]), y[chosen]).backward()
            optimizer.step()
    return module.eval()


def plain(arrays: dict[str, np.ndarray], seed: int) -> Measurement:
    """The bare network, as a row of its own."""
    module = network(DIGITS, arrays)
    with torch.no_grad():
        probs = {
            name: module(torch.from_numpy(arrays[name])).softmax(-1).numpy()
            for name in ("test", "rotated", "noise")
        }
    return Measurement("network", "network", seed, scores=scores(probs, arrays))


def scores(found: dict[str, np.ndarray], arrays: dict[str, np.ndarray]) -> dict[str, float]:
    """Accuracy, NLL, calibration; and how well entropy tells what is no digit, where it was predicted."""
    y = torch.from_numpy(arrays["y_test"])
    result: dict[str, float] = {}
    for suffix in ("", "_default"):
        if len(found.get("test" + suffix, ())) != len(y):
            continue
        probs = torch.from_numpy(found["test" + suffix]).double()
        if probs.isnan().any():  # a failed factorization of the library's, which has no score
            result |= {name + suffix: math.nan for name in ("accuracy", "nll", "ece")}
            continue
        result["accuracy" + suffix] = float(metrics.accuracy(probs, y))
        # float32 probabilities may be zero where they are small
        result["nll" + suffix] = float(-probs.clamp(min=1e-12).log().gather(1, y[:, None]).mean())
        result["ece" + suffix] = float(metrics.expected_calibration_error(probs, y))
        for name in ("rotated", "noise"):
            if name + suffix in found:
                outside = torch.from_numpy(found[name + suffix]).double()
                result[name + suffix] = float(metrics.auroc(entropy(probs), entropy(outside)))
    return result


def entropy(probs: Tensor) -> Tensor:
    return torch.special.entr(probs).sum(-1)


def compare(
    seed: int, pythons: dict[str, Path | str], options: argparse.Namespace, folder: Path
) -> Iterator[Measurement]:
    """Both libraries on all structures of one network: all back-ends for the first, then one."""
    first = seed == options.seeds[0]
    for name in options.structures:
        structure = STRUCTURES[name]
        for method, python in pythons.items():
            again = structure.every_seed if method == THEIRS else structure.problem == "digits"
            wanted = tuple(b for b in structure.back_ends if b in options.back_ends)
            back_ends = wanted if method == THEIRS else ("",)
            for back_end in back_ends if first else back_ends[: int(again)]:
                job = asdict(structure) | {"seed": seed, "back_end": back_end, "first": first}
                yield one(method, python, job, options, folder)


def one(
    method: str,
    python: Path | str,
    job: dict[str, Any],
    options: argparse.Namespace,
    folder: Path,
) -> Measurement:
    """A measurement with its scores."""
    arrays, stored = folder / f"{job['problem']}.npz", folder / "result.npz"
    limits = (str(options.repeats if job["first"] else 1), str(options.patience))
    arguments = (json.dumps(job), str(arrays), str(stored), *limits)
    found, failed = measured(WORKERS[method], python, arguments, options.limit)
    label = (job["name"], method, job["seed"], job["back_end"])
    if failed:
        return Measurement(*label, failed=failed)
    results = read(stored)
    scored = scores(results, read(arrays)) if job["problem"] == "digits" else {}
    variances = [float(f"{v:.5g}") for v in results["variances"]] if job["first"] else []
    return Measurement(*label, found, scored, variances)


def measured(
    worker: str, python: Path | str, job: Sequence[str], limit: float
) -> tuple[dict[str, Any], str]:
    """What a worker in a process of its own on two cores says, or why it says nothing."""
    if isinstance(python, str):
        return {}, f"missing: {python}"
    try:
        done = subprocess.run(
            [str(python), str(HERE / worker), *job],
            env=environment(),
            preexec_fn=confine,
            capture_output=True,
            text=True,
            timeout=limit,
        )
    except subprocess.TimeoutExpired:
        return {}, f"more than {limit:.0f} s"
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()][-1:] or ["no message"]
        return {}, "killed, out of memory?" if done.returncode == -9 else lines[0]
    return json.loads(done.stdout.splitlines()[-1]), ""


def confine() -> None:
    """Two cores, and three quarters of the memory: a job that wants more fails, and takes nothing along."""
    pin()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    resource.setrlimit(resource.RLIMIT_AS, (3 * memory // 4, 3 * memory // 4))


def said(m: Measurement) -> str:
    """A line for the log."""
    label = f"seed {m.seed}, {m.structure}: {m.method} {m.back_end}".rstrip()
    if m.failed:
        return f"{label}: {m.failed}"
    times = ", ".join(f"{k} {v['cpu_s']:.3f}" for k, v in m.found["stages"].items())
    return f"{label}: {times} CPU s; " + ", ".join(f"{k} {v:.3f}" for k, v in m.scores.items())


def store(measurements: Sequence[Measurement], options: argparse.Namespace) -> None:
    folder = options.output
    folder.mkdir(parents=True, exist_ok=True)
    machine = {
        "processor": processor(),
        "cores": NUM_CORES,
        "omp_wait_policy": "PASSIVE",
        "python": platform.python_version(),
        "load": round(os.getloadavg()[2], 1),
        "repeats": options.repeats,
        "made_by": made_by(),
    }
    content = {"machine": machine, "measurements": [asdict(m) for m in measurements]}
    (folder / "laplace.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
