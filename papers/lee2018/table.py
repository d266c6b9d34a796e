"""The table of best models: exact Gaussian processes and trained networks on MNIST and CIFAR-10.

    NET2GP_DATA=... python papers/lee2018/table.py --cells FOLDER [--rows 'gp-MNIST-*' ...] --out figures
    python papers/lee2018/table.py --report --cells FOLDER --out figures
    python papers/lee2018/table.py --quick

Each of the 12 rows of table 1 of the paper (MNIST with 1000, 10,000 and 50,000 training images, CIFAR-10 with
1000, 10,000 and 45,000, ReLU and tanh) is a cell on disk for the Gaussian process and one for the trained
network; accuracy over the width of the network has cells of its own. Names are gp-MNIST-10k-relu,
sgd-CIFAR-45k-tanh, width-MNIST-1k-relu; `--rows` takes patterns. After `--limit` seconds no further cell is
begun, the exit status is 3, and the same command goes on. `--report` runs nothing, and makes tables, figures
and verdicts of the cells that there are. `--quick` has 8 × 8 digits, and needs no data.

A Gaussian process: images standardized one by one, one-hot targets less 0.1, exact regression in float64 with
a jitter of 1e-10, which is grown where a matrix asks for it. Depth and variances are chosen by accuracy on
held-out training images (10,000 of MNIST, 5000 of CIFAR-10) among 60 settings, spread over depths of 1 to 100
and the paper's ranges of σ_w² (0.1 to 5) and σ_b² (0 to 2), and 20 more near the best. Rows with more than
10,000 training images are searched with 10,000 of them, so that they share the search of the row above. The
last fit has all training images. The paper's own setting is run beside it, and so is the tangent kernel of
the chosen one.

A network: MSE loss and weight decay by Adam with a cosine schedule, chosen in the same way among 33 trials of
a random search over learning rate, weight decay, initial variances, depth (1 to 5) and width (200 to 5000);
the paper took far more trials and steps. Such a network is a MAP estimate under a Gaussian prior.

The probability of a class is that of its output being the largest, under independent normal outputs. Their
variance is the posterior's for a Gaussian process, with the kernel's scale by the evidence, and the mean
squared error on the held-out images for a network, which sees more images in this way.

What is judged, written down before the first run (numbers are in expected.toml):

- the accuracy of each Gaussian process, found by the search and with the paper's setting, is within 0.5
  points of the paper's, 1.0 points with 1000 training images. The MNIST digits are those of the authors'
  program; which images of CIFAR-10 the paper has is not known;
- each trained network is at most 1.0 points (MNIST; 1.5 with 1000 images) or 3.0 points (CIFAR-10) below the
  paper's, so that it is a fair rival;
- over the 12 rows, the Gaussian process is better than the network beyond chance (paired t-test); it leads
  in all rows of CIFAR-10, and with all of MNIST neither leads by more than half a point;
- accuracy grows with the number of training images, for both;
- over the 12 rows, the NLL of the Gaussian process is better than that of the MAP network, and its ECE is not
  worse;
- over the width, networks come to the Gaussian process of the row: Spearman's correlation of width and
  accuracy is at least 0.8, and the widest are within 1.0 points of it (1.5 with 1000 images), less than half
  of what the narrowest miss.

On a machine that takes 64 MB at a time, `--pack .carry` writes the data in parts (.carry/part0, part1, part2)
to be sent one after the other. Then, on an H200:

    export PYTHONPATH=src
    run="python papers/lee2018/table.py --packed .carry --cells $OUT/cells --out $OUT"
    $run --limit 400 --rows 'gp-*'                      4.5 minutes
    $run --limit 400 --rows 'sgd-MNIST-*'               3 minutes
    $run --limit 400 --rows 'sgd-CIFAR-*'               3.5 minutes
    $run --limit 400 --rows 'width-*'                   2.5 minutes

by this estimate. A setting of the search with N = 10,000: 2·10⁸ entries of kernels at about ten passes a
layer take 0.1 s, the factor 0.02 s, for tanh the polynomial in the angle 0.1 to 0.3 s on the processor, which
is most of it; 8 searches of 80 settings take 200 s. A fit with N = 50,000: N³/3 = 4·10¹³ operations at
42 Tflop/s take 1 s, variances of 10,000 test images N²·10⁴ = 2.5·10¹³ another second, kernels 1 s; three fits
a row. At most three matrices of 20 GB are in memory at a time, or two and 20 GB of parts. Networks: a step
moves 26 numbers per parameter, 3 ms for three networks of width 5000 and less than 2 ms else; 1500, 3500 or
6000 steps of six groups take 12, 29 and 50 s a row.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

sys.path += [str(folder) for folder in Path(__file__).parents[:2]]
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import findings
from exact_rows import Setting, fitted, search
from regression_images import Problem, problem
from studies import expected_of
from table_report import report
from trained_rows import GROUPS, searched, swept

from cifar_images import pack, use_packed
from net2gp.data import data_folder

UNFINISHED = 3
SEARCHED = 10_000
"""The most training images of a search."""

COUNTS = {
    "1k": 1000,
    "10k": 10_000,
    "45k": 45_000,
    "50k": 50_000,
    "200": 200,
    "400": 400,
    "900": 900,
}
WIDENED = (
    *(f"MNIST-{size}-{activation}" for size in ("1k", "10k") for activation in ("relu", "tanh")),
    "digits-900-relu",
)
"""The rows with cells over the width."""

Cell = dict[str, Any]


@dataclass(frozen=True)
class Budget:
    """Sizes of a run: settings of a search, steps by training images, trials, and widths."""

    first: int
    refined: int
    steps: tuple[int, int, int]
    batches: tuple[int, int, int]
    groups: tuple[tuple[int, tuple[int, ...], int], ...]
    widths: tuple[int, ...]

    def training(self, count: int) -> tuple[int, int]:
        """Steps and images of a batch."""
        place = (count > 1000) + (count > SEARCHED)
        return self.steps[place], self.batches[place]


FULL = Budget(
    60, 20, (1500, 3500, 6000), (64, 128, 256), GROUPS, tuple(2**power for power in range(3, 13))
)
QUICK = Budget(
    8, 4, (1200,) * 3, (32,) * 3, ((64, (1, 2), 3), (256, (1, 2), 3)), (2, 4, 8, 16, 32, 64)
)


@dataclass(frozen=True)
class Place:
    """A row of the table: data, training images and activation."""

    data: str
    size: str
    activation: str

    def __str__(self) -> str:
        """Return the name that cells of the row end with."""
        return f"{self.data}-{self.size}-{self.activation}"

    def problem(self, device: torch.device) -> Problem:
        """Its images."""
        known = loaded(self.data, device)
        return replace(known, train=known.train.first(COUNTS[self.size]))

    @property
    def searched(self) -> Place:
        """The row whose search serves this one."""
        return replace(self, size="10k") if COUNTS[self.size] > SEARCHED else self


@cache
def loaded(name: str, device: torch.device) -> Problem:
    """A data set, read once."""
    return problem(name, device)


def places(quick: bool) -> list[Place]:
    """The rows of expected.toml, or of a quick run."""
    if quick:
        return [Place("digits", n, a) for n in ("200", "400", "900") for a in ("relu", "tanh")]
    rows = expected_of(__file__)["table"]["rows"]
    return [Place(row["data"], row["size"], row["activation"]) for row in rows]


def cells(quick: bool) -> dict[str, Callable[[argparse.Namespace], Cell]]:
    """What computes each cell, in the order in which they run."""
    rows = places(quick)
    found: dict[str, Callable[[argparse.Namespace], Cell]] = {}
    for kind, make in (("gp", exact), ("sgd", trained)):
        found |= {f"{kind}-{row}": partial(make, row) for row in rows}
    wide = [row for row in rows if str(row) in WIDENED]
    return found | {f"width-{row}": partial(widened, row) for row in wide}


def kept(name: str, options: argparse.Namespace, make: Callable[[], Cell]) -> Cell:
    """The cell of this name, from the disk or made and written there."""
    path = options.cells / f"{name}.json"
    if path.is_file():
        return json.loads(path.read_text())
    begun = time.perf_counter()
    cell = make() | {"cell_seconds": time.perf_counter() - begun, "device": device_name(options)}
    part = path.with_suffix(".part")
    part.write_text(json.dumps(cell) + "\n")
    part.replace(path)
    return cell


def exact(row: Place, options: argparse.Namespace) -> Cell:
    """The Gaussian process of the search, its tangent kernel, and the paper's setting."""
    known, budget = row.problem(options.device), options.budget
    tried = kept(f"search-{row.searched}", options, partial(settings, row.searched, options))
    best = Setting(**tried["best"])
    print(
        f"  {best}: {tried['validation']:.4f} by choosing, {tried['cell_seconds']:.1f} s",
        flush=True,
    )
    found: Cell = {"name": str(best), "validation": tried["validation"]}
    found |= fitted(row.activation, best, known)
    found["ntk"] = fitted(row.activation, best, known, tangent=True)
    if budget is FULL:
        theirs = Setting.named(expected_row(row)["gp"])
        found["paper"] = fitted(row.activation, theirs, known)
    return found


def settings(row: Place, options: argparse.Namespace) -> Cell:
    """All settings of a search, and the best."""
    known, budget = row.problem(options.device), options.budget
    tried = list(search(row.activation, known, budget.first, budget.refined))
    setting, right, error = min(tried, key=lambda one: (-one[1], one[2]))
    # infinite errors are no JSON
    listed = [[str(one), r, e if e < float("inf") else None] for one, r, e in tried]
    return {"best": vars(setting), "validation": right, "mse": error, "tried": listed}


def expected_row(row: Place) -> Cell:
    """What the paper has for a row."""
    rows = expected_of(__file__)["table"]["rows"]
    return next(r for r in rows if (r["data"], r["size"], r["activation"]) == vars_of(row))


def vars_of(row: Place) -> tuple[str, str, str]:
    """Data, size and activation."""
    return row.data, row.size, row.activation


def trained(row: Place, options: argparse.Namespace) -> Cell:
    """The network of the random search."""
    known, budget = row.problem(options.device), options.budget
    steps, batch = budget.training(len(known.train.labels))
    seed = zlib.crc32(str(row).encode())
    return searched(row.activation, known, steps, batch, seed, budget.groups)


def widened(row: Place, options: argparse.Namespace) -> Cell:
    """Accuracy over the width."""
    known, budget = row.problem(options.device), options.budget
    steps, batch = budget.training(len(known.train.labels))
    return swept(row.activation, known, steps, batch, budget.widths)


def device_name(options: argparse.Namespace) -> str:
    """The GPU, or "processor"."""
    return torch.cuda.get_device_name() if options.device.type == "cuda" else "processor"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options, with the folder of the cells made."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cuda = torch.cuda.is_available()
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder for the figures")
    parser.add_argument("--cells", type=Path, help="folder of the cells [OUT/lee2018_cells]")
    parser.add_argument("--rows", nargs="+", default=["*"], metavar="PATTERN", help="which cells")
    parser.add_argument("--limit", type=float, default=480.0, help="seconds (default 480)")
    parser.add_argument("--device", default="cuda" if cuda else "cpu", type=torch.device)
    parser.add_argument("--report", action="store_true", help="only what the cells on disk say")
    parser.add_argument("--pack", type=Path, help="write the data in parts, and stop")
    parser.add_argument("--packed", type=Path, help="folder with all parts")
    options = findings.parse(parser, arguments, quick={"limit": 3600.0})
    options.budget = QUICK if options.quick else FULL
    if options.cells is None:
        scratch = tempfile.mkdtemp(prefix="net2gp-lee2018-") if options.quick else ""
        options.cells = Path(scratch) if scratch else options.out / "lee2018_cells"
    options.cells.mkdir(parents=True, exist_ok=True)
    return options


def pack_images(folder: Path) -> None:
    """CIFAR-10 in parts, and MNIST beside the last of them."""
    pack(folder)
    last = sorted(folder.glob("part*"))[-1]
    (last / "mnist.npz").write_bytes((data_folder() / "mnist.npz").read_bytes())


def main(arguments: list[str] | None = None) -> int:
    """Run the cells that are missing; the exit status says whether what is there agrees."""
    options = parse(arguments)
    if options.pack:
        pack_images(options.pack)
        return 0
    if options.packed:
        use_packed(options.packed)
    if not (options.quick or options.report or os.environ.get("NET2GP_DATA")):
        findings.leave_out("all rows: NET2GP_DATA names no folder with mnist.npz and cifar10.npz.")
        return 0
    torch.set_float32_matmul_precision("high")
    begun, made = time.perf_counter(), cells(options.quick)
    chosen = [name for name in made if any(fnmatch(name, p) for p in options.rows)]
    missing = [name for name in chosen if not (options.cells / f"{name}.json").is_file()]
    for name in [] if options.report else missing:
        if time.perf_counter() - begun > options.limit:
            print(f"to be continued: {name}", flush=True)
            return UNFINISHED
        print(name, flush=True)
        cell = kept(name, options, partial(made[name], options))
        keys = ("name", "accuracy", "NLL", "ECE", "jitter_grown", "seconds")
        brief = {key: cell[key] for key in keys if key in cell}
        print(f"  {json.dumps(brief)} {cell['cell_seconds']:.1f} s", flush=True)
    paths = {name: options.cells / f"{name}.json" for name in made}
    there = {name: json.loads(path.read_text()) for name, path in paths.items() if path.is_file()}
    left_out = [name for name in made if name not in there]
    numbers = {} if options.quick else expected_of(__file__)["table"]
    return 0 if report(there, left_out, numbers, options.out, quick=options.quick) else 1


if __name__ == "__main__":
    raise SystemExit(main())
