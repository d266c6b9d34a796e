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
and writes nothing. Other runs keep their rows in `results/serving.json`, go on where an interrupted run of
the same revision was, and write `results/serving.md`. The exit status is 1 if a claim (`CLAIMS`, written down
before the run) does not hold; goals are shown with what was reached, and do not count.
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
from serving_load import under_load
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
MOST_SECONDS = 5.0
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
        flipped: The points where a variance differs by more than 1e-5.
        gated: The largest difference, where these are compared with the posterior with the runtime's gates.
    """

    plain: float
    flipped: list[int]
    gated: float


def compared(
    found: Problem,
    expected: dict[str, Tensor],
    path: Path,
    answers: dict[int, dict[str, Tensor]],
) -> Gap:
    """Compare what a program said with what its posterior says."""
    plain, gated, flipped = [0.0], [0.0], set()
    for count, own in answers.items():
        own = {**own, "variance": own["std"].double() ** 2}
        for name, value in expected.items():
            gaps = (own[name] - value[:count]).abs().flatten(1).amax(1) / value.abs().max()
            plain.append(float(gaps.max()))
            above = [n for n, gap in enumerate(gaps.tolist()) if not gap <= DIFFERENCE]
            if name == "variance" and above and kinked(found):
                flipped |= {*above}
                seen = gates(path, found.x[:count])
                for n in above:
                    point, own_gates = found.x[n : n + 1], [one[n : n + 1] for one in seen]
                    exact = variances_with_gates(found, point, own_gates)
                    gaps[n] = (own[name][n] - exact).abs().max() / value.abs().max()
            gated.append(float(gaps.max()))
    return Gap(max(plain), sorted(flipped), max(gated))


def kinked(found: Problem) -> bool:
    """Whether variances are those of gradients of a network with ReLUs."""
    around = "draws" not in found.settings and hasattr(found.posterior.process, "widening")
    return around and has_gates(found.network, found.x)


def rows(one: str, case: str, places: Environments, quick: bool, folder: Path) -> list[Row]:
    """Both programs of a posterior."""
    found: list[Row] = []
    made = problem(one, case)
    expected = wanted(made)
    for kind, runtime in RUNTIMES.items():
        path = folder / f"program.{kind}"
        serving.export(made.posterior, path, made.x, **made.settings)
        gap = compared(made, expected, path, places.run(path, made.x, folder))
        rounded = None
        if kind == "onnx" and case == "Kron()" and kinked(made):
            points = sorted({*gap.flipped, *range(16)})
            rounded = asdict(rounding(made, expected["variance"], points))
        run = by_onnx(path) if kind == "onnx" else torch.export.load(path).module()
        alone = bare(made.network, made.x, kind, folder)
        repeats = 5 if quick else 15
        times = [timed(run, made.x[:count], repeats) for count in BATCHES]
        own = [timed(alone, made.x[:count], repeats) for count in BATCHES]
        facts = (path.stat().st_size / 1024, gap.plain, len(gap.flipped), gap.gated, rounded)
        found.append(Row(one, case, runtime, *facts, times, own, REVISION, places.fresh))
        print(line(found[-1]), flush=True)
    return found


def revision() -> str:
    """The last commit of what is measured."""
    measured = ["serving.py", "serving_alone.py", "serving_gates.py", "serving_problems.py"]
    places = [str(HERE / name) for name in measured]
    command = ["git", "log", "-1", "--format=%h", "--", str(HERE.parent / "src"), *places]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


REVISION = revision()
"""That of the code that runs, whatever is committed while it does."""


@dataclass(frozen=True)
class Kept:
    """Rows in a file, so that a run that was interrupted goes on where it was."""

    path: Path

    def rows(self) -> list[Row]:
        """All rows of this revision."""
        if not self.path.exists():
            return []
        rows = [Row(**row) for row in json.loads(self.path.read_text(encoding="utf-8"))]
        return [row for row in rows if row.revision == REVISION]

    def add(self, more: list[Row]) -> None:
        """Add rows, in the order of the table."""
        names = [(one, case) for name in NETWORKS for one, case in cases(name)]
        found = [*self.rows(), *more]
        found.sort(key=lambda row: names.index((row.network, row.structure)))
        whole = json.dumps([asdict(row) for row in found], indent=1)
        self.path.write_text(whole + "\n", encoding="utf-8")


def cases(name: str) -> list[tuple[str, str]]:
    """What is measured of a network."""
    return [(name, case) for case in CASES] + MORE[name]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the MLP alone, without results")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--cases", nargs="+", help="structures, such as 'Kron()'; all if not given")
    parser.add_argument("--environments", type=Path, help="a folder for two environments")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    folder = options.environments
    places = Environments.of(folder if folder or options.quick else Path("build/serving"))
    kept, found = Kept(RESULTS.with_suffix(".json")), []
    print(HEAD)
    with tempfile.TemporaryDirectory() as temporary:
        for name in ["MLP"] if options.quick else options.networks:
            for one, case in cases(name):
                if options.cases and case not in options.cases:
                    continue
                known = [] if options.quick else kept.rows()
                if (one, case) not in [(row.network, row.structure) for row in known]:
                    found += rows(one, case, places, options.quick, Path(temporary))
                    if not options.quick:
                        kept.add(found[-2:])
        load = under_load(Path(temporary))
    found = found if options.quick else kept.rows()
    verdicts = judged(found, load)
    for text, holds in verdicts:
        print(f"{text}: {'holds' if holds else 'DOES NOT HOLD'}")
    print("\n".join(goals(found)))
    if not options.quick:
        RESULTS.write_text(report(found, load, verdicts), encoding="utf-8")
    return 0 if all(holds for _, holds in verdicts) else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    raise SystemExit(main())
