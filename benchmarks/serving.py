"""Exported posteriors in fresh environments: differences, latency, and a server under load.

    python benchmarks/serving.py [--quick] [--networks MLP LeNet ResNet-20] [--environments build/serving]

Each posterior is exported as `.pt2` and as `.onnx`. The file is run by `serving_alone.py` in an environment
that has torch and numpy alone, or onnxruntime and numpy alone, for batches of 1, 7 and 256 points, and what
it says is compared with the posterior. Differences are those of mean, variance and probabilities, as a share
of the largest entry. Where a variance differs by more, the gates of the ReLUs that the runtime saw are read
from the program, and the posterior is computed with these (`serving_gates.py`).

Latency is that of the program beside the network alone, exported in the same way and run by the same runtime,
on one thread: the median over repeats of one call, for 1 and for 32 points. The server runs at 127.0.0.1 and
answers a bounded number of requests of one point each from eight clients.

The quick run takes the MLP alone, in this environment with net2gp hidden unless there is one in the folder,
and writes nothing. A run of some networks replaces these in `results/serving.json`, from which
`results/serving.md` is written. The exit status is 1 if a claim (`CLAIMS`, written down before the run) does
not hold; goals are shown with what was reached, and do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from net2gp import serving
from serving_gates import gates, has_gates, rounding, variances_with_gates
from serving_load import Load, under_load
from serving_problems import CASES, Problem, problem, wanted
from serving_tables import DIFFERENCE, HEAD, Row, goals, judged, line, report

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "serving.md"
NETWORKS = ("MLP", "LeNet", "ResNet-20")
MORE = {
    "MLP": [
        *[
            ("MLP", case)
            for case in ("LastLayer(Kron())", "LastLayer(), novelty", "Kron(), novelty")
        ],
        *[("MLP, one output", case) for case in ("LastLayer()", "Kron()")],
    ],
    "LeNet": [("LeNet", case) for case in ("LastLayer(Kron())", "LastLayer(), novelty")],
    "ResNet-20": [],
}
"""Rows beside those of the first claim."""

RUNTIMES = {"pt2": "torch", "onnx": "onnxruntime"}
BATCHES = (1, 32)
MOST_SECONDS = 20.0
"""How long a call is repeated for one time."""


@dataclass(frozen=True, eq=False)
class Environments:
    """Where programs run: an interpreter for each runtime."""

    pythons: dict[str, str]
    fresh: bool

    @staticmethod
    def of(folder: Path | None) -> Environments:
        """Make what is missing of two environments with a runtime and numpy alone."""
        if folder is None:
            return Environments(dict.fromkeys(RUNTIMES, sys.executable), fresh=False)
        pythons = {}
        for kind, runtime in RUNTIMES.items():
            place = folder.resolve() / runtime
            pythons[kind] = str(place / "bin" / "python")
            if not (place / "done").exists():
                print(f"making an environment with {runtime} and numpy: {place}", flush=True)
                subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
                install = [pythons[kind], "-m", "pip", "install", "--quiet"]
                pinned = ["-c", str(HERE.parent / "constraints.txt"), runtime, "numpy"]
                subprocess.run([*install, *pinned], check=True)
                (place / "done").touch()
        return Environments(pythons, fresh=True)

    def run(self, path: Path, x: Tensor, folder: Path) -> dict[int, dict[str, Tensor]]:
        """The answers of a program for batches of 1, 7 and all points."""
        np.save(folder / "x.npy", x.numpy())
        own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [self.pythons[path.suffix[1:]], str(HERE / "serving_alone.py"), str(path)]
        command += [str(folder / "x.npy"), str(folder / "found.npz")]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=own)
        if done.returncode:
            raise RuntimeError(done.stderr)
        others = json.loads(done.stdout.splitlines()[-1])["others"]
        if others:
            raise RuntimeError(f"the program imported {others}")
        found: dict[int, dict[str, Tensor]] = {}
        with np.load(folder / "found.npz") as arrays:
            for key in arrays.files:
                count, _, name = key.partition(" ")
                found.setdefault(int(count), {})[name] = torch.from_numpy(arrays[key])
        return found


class Alone(nn.Module):
    """The network with its output under a name, as programs have it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"mean": self.network(x)}


def bare(network: nn.Module, x: Tensor, kind: str, folder: Path) -> Callable[[Tensor], object]:
    """The network alone, exported in the same way."""
    batch = torch.export.Dim("batch", min=1)
    exported = torch.export.export(Alone(network), (x[:3],), dynamic_shapes={"x": {0: batch}})
    if kind == "pt2":
        return exported.module()
    path = folder / "bare.onnx"
    torch.onnx.export(exported, (x[:3],), str(path), dynamo=True, verbose=False, input_names=["x"])
    return by_onnx(path)


def by_onnx(path: Path) -> Callable[[Tensor], object]:
    """A file run by onnxruntime on one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda x: session.run(None, {"x": x.numpy()})


def timed(run: Callable[[Tensor], object], x: Tensor, repeats: int) -> float:
    """The median of the CPU seconds of a call, which other processes on the machine disturb least."""
    found: list[float] = []
    with torch.no_grad():
        run(x)
        while len(found) < repeats and sum(found) < MOST_SECONDS:
            start = time.process_time()
            run(x)
            found.append(time.process_time() - start)
    return statistics.median(found)


@dataclass(frozen=True)
class Gap:
    """How far a program is from its posterior.

    Args:
        plain: The largest difference, as a share of the largest entry.
        flipped: At how many points a variance differs by more than 1e-5, over the batches.
        gated: The largest difference, where these are compared with the posterior with the runtime's gates.
    """

    plain: float
    flipped: int
    gated: float


def compared(
    found: Problem,
    expected: dict[str, Tensor],
    path: Path,
    answers: dict[int, dict[str, Tensor]],
) -> Gap:
    """Compare what a program said with what its posterior says."""
    plain, gated, flipped = [0.0], [0.0], 0
    kinked = "draws" not in found.settings and hasattr(found.posterior.process, "widening")
    kinked = kinked and has_gates(found.network, found.x)
    for count, own in answers.items():
        own = {**own, "variance": own["std"].double() ** 2}
        for name, value in expected.items():
            gaps = (own[name] - value[:count]).abs().flatten(1).amax(1) / value.abs().max()
            plain.append(float(gaps.max()))
            above = [n for n, gap in enumerate(gaps.tolist()) if not gap <= DIFFERENCE]
            if name == "variance" and above and kinked:
                flipped += len(above)
                seen = gates(path, found.x[:count])
                for n in above:
                    point, own_gates = found.x[n : n + 1], [one[n : n + 1] for one in seen]
                    exact = variances_with_gates(found, point, own_gates)
                    gaps[n] = (own[name][n] - exact).abs().max() / value.abs().max()
            gated.append(float(gaps.max()))
    return Gap(max(plain), flipped, max(gated))


def rows(name: str, places: Environments, quick: bool, folder: Path) -> list[Row]:
    """All programs of a network."""
    found: list[Row] = []
    for one, case in [(name, case) for case in CASES] + MORE[name]:
        made = problem(one, case)
        expected, rounded = wanted(made), None
        if case == "Kron()" and has_gates(made.network, made.x):
            rounded = asdict(rounding(made, expected["variance"]))
        for kind, runtime in RUNTIMES.items():
            path = folder / f"program.{kind}"
            serving.export(made.posterior, path, made.x, **made.settings)
            gap = compared(made, expected, path, places.run(path, made.x, folder))
            run = by_onnx(path) if kind == "onnx" else torch.export.load(path).module()
            alone = bare(made.network, made.x, kind, folder)
            repeats = 5 if quick else 15
            times = [timed(run, made.x[:count], repeats) for count in BATCHES]
            own = [timed(alone, made.x[:count], repeats) for count in BATCHES]
            size = path.stat().st_size / 1024
            facts = (one, case, runtime, size, gap.plain, gap.flipped, gap.gated, rounded)
            found.append(Row(*facts, times, own, revision(), places.fresh))
            print(line(found[-1]), flush=True)
    return found


def revision() -> str:
    """The commit of the code that runs."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the MLP alone, without results")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--environments", type=Path, help="a folder for two environments")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", UserWarning)
    folder = options.environments
    places = Environments.of(folder if folder or options.quick else Path("build/serving"))
    found: list[Row] = []
    print(HEAD)
    with tempfile.TemporaryDirectory() as temporary:
        for name in ["MLP"] if options.quick else options.networks:
            found += rows(name, places, options.quick, Path(temporary))
        load = under_load(Path(temporary))
    if not options.quick:
        found = kept(found, load)
    verdicts = judged(found, load)
    for text, holds in verdicts:
        print(f"{text}: {'holds' if holds else 'DOES NOT HOLD'}")
    print("\n".join(goals(found)))
    if not options.quick:
        RESULTS.write_text(report(found, load, verdicts), encoding="utf-8")
    return 0 if all(holds for _, holds in verdicts) else 1


def kept(found: list[Row], load: Load) -> list[Row]:
    """All rows: those of this run, and of earlier ones those of other networks."""
    path, names = RESULTS.with_suffix(".json"), {row.network for row in found}
    older = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    everything = [*found, *(Row(**row) for row in older if row["network"] not in names)]
    everything.sort(key=lambda row: [*NETWORKS].index(row.network.partition(",")[0]))
    whole = {"rows": [asdict(row) for row in everything], "load": asdict(load)}
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    return everything


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    raise SystemExit(main())
