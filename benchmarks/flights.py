"""A process of an infinitely wide network on a million flights, exactly, beside what else one would try.

    NET2GP_DATA=... python benchmarks/flights.py --cells FOLDER [--methods exact SVGP ...] [--quick]

The delay of a flight from the day of the week, the day of the year, the minute of the day, the distance and
the coordinates of both airports (three million US flights of 2001, see `flights_data.py`). A hundred thousand
flights are held out. The process is the NNGP of a network with three hidden layers of ReLUs; a length scale
for each column, the variances of weights and biases and the noise maximize the evidence of a thousand
flights (`tuning.fit_kernel`). Each method is a cell on disk, and runs that are cut go on from there:

- `exact`: all training flights, by block conjugate gradients on products with the kernel; the mean and 64
  drawn functions, whose spread gives variances, are one block (`solvers.CG`, `RandomPivots`, `Pathwise`);
- `exact, 100k` and `Cholesky, 100k`: the same process of 100,000 flights both ways;
- `SVGP` (gpytorch, 1024 inducing points, RBF), `network` (the same shape, 512 units, Gaussian noise),
  `boosting` (scikit-learn, with the noise of its residuals on flights that it has not seen), `neighbors` (a
  process of the 128 nearest flights of each new one, with the hyper-parameters of the first), and `mean`.

Claims; the exit status says whether they hold, as far as the methods were run:

- the exact process reaches a relative residual of at most 1e-2 for every column;
- on 100,000 flights its means differ from the Cholesky factor's by less than 2 % of the noise's standard
  deviation on average (root mean square), its deviations by less than 5 %, its NLL by less than .002;
- it has a lower NLL than the mean, and than the same process of 100,000 flights.

On one H200, with the data sent beside the program (--data FOLDER):

    run="python benchmarks/flights.py --data .carry --cells .carry-cells"
    $run --methods exact --rank 2000
    $run --methods "exact, 100k" "Cholesky, 100k" SVGP network boosting neighbors mean

`--report` makes results/flights.md of the cells that there are. A quick run has 3,000 flights and no peers.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import net2gp as n2g
from flights_data import Flights, read
from flights_peers import PEERS
from run import RESULTS, made_by

sys.path.append(str(Path(__file__).resolve().parent.parent / "papers"))
import claims

NUM_SAMPLES = 64
TOLERANCE = 1e-2


@dataclass(frozen=True)
class Sizes:
    """How much is run.

    Args:
        train: Training flights.
        smaller: Training flights of the processes that are compared with a Cholesky factor.
        test: Flights that are held out.
        tuned: Flights that hyper-parameters are chosen on.
        rank: Columns of the preconditioner, or None for the default.
    """

    train: int = 1_000_000
    smaller: int = 100_000
    test: int = 100_000
    tuned: int = 1_000
    rank: int | None = None


Cell = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Tuned:
    """A kernel of stretched flights, and a noise.

    Args:
        kernel: The limit of the network.
        center: What is subtracted from the columns.
        lengthscale: What the columns are divided by.
        noise: The noise variance.
        seconds: How long the search took.
    """

    kernel: Any
    center: Tensor
    lengthscale: Tensor
    noise: float
    seconds: float

    @staticmethod
    def of(flights: Flights, sizes: Sizes) -> Tuned:
        """Choose hyper-parameters by the evidence on some flights."""
        started = time.perf_counter()
        width = flights.x.shape[1]
        network = nn.Sequential(
            *(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU()),
            *(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)),
        )
        count = min(2 * sizes.tuned, len(flights.x))
        some = (flights.x[:count].cpu(), flights.y[:count].cpu())
        fitted = n2g.tuning.fit_kernel(
            n2g.nngp(network), some, num_tuned=sizes.tuned, num_points=count
        )
        stretched = fitted.process.kernel
        noise = float(torch.as_tensor(fitted.likelihood.noise_var))
        found = (stretched.kernel, stretched.center, stretched.lengthscale, noise)
        return Tuned(*found, time.perf_counter() - started)

    def scaled(self, x: Tensor) -> Tensor:
        """The columns as the kernel takes them."""
        return (x - self.center.to(x)) / self.lengthscale.to(x)


def solved(flights: Flights, sizes: Sizes, count: int, solver: Any) -> Cell:
    """Condition the process on some flights, and score it on the held-out ones."""
    device = flights.x.device
    tuned = Tuned.of(flights, sizes)
    x, y = tuned.scaled(flights.x[:count]), flights.y[:count]
    started = time.perf_counter()
    posterior = n2g.condition(
        tuned.kernel.to(device, torch.float32), (x, y), n2g.Gaussian(tuned.noise), solver=solver
    )
    synchronize(device)
    fitted = time.perf_counter()
    law = posterior.marginal(tuned.scaled(flights.x_test))
    mean = law.mean.reshape(-1).double()
    variance = law.variance.reshape(-1).double()
    synchronize(device)
    seconds = {"tune": tuned.seconds, "fit": fitted - started}
    seconds["predict"] = time.perf_counter() - fitted
    cell = flights.scored(mean, variance + tuned.noise, seconds)
    alpha = posterior.process.alpha
    rest = y.double() - posterior.kernel.matmul(x, x, alpha.to(x.dtype)).double()
    residual = float((rest - tuned.noise * alpha).norm() / y.double().norm())
    kept = slice(0, 5000)
    return cell | {
        "residual": residual,
        "noise": tuned.noise,
        "count": count,
        "mean": mean[kept].tolist(),
        "deviation": variance[kept].sqrt().tolist(),
        "memory": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0,
    }


def iterative(sizes: Sizes) -> n2g.solvers.CG:
    """Block conjugate gradients for the mean and the draws together."""
    return n2g.solvers.CG(
        tol=TOLERANCE,
        max_iterations=200,
        preconditioner=n2g.solvers.RandomPivots(sizes.rank),
        variance=n2g.solvers.Pathwise(NUM_SAMPLES),
        num_probes=0,
        store_gram=False,
    )


METHODS: dict[str, Callable[[Flights, Sizes], Cell]] = {
    "exact": lambda flights, sizes: solved(flights, sizes, sizes.train, iterative(sizes)),
    "exact, 100k": lambda flights, sizes: solved(flights, sizes, sizes.smaller, iterative(sizes)),
    "Cholesky, 100k": lambda flights, sizes: solved(
        flights, sizes, sizes.smaller, n2g.solvers.Cholesky(dtype=torch.float32)
    ),
    **{name: (lambda flights, sizes, peer=peer: peer(flights)) for name, peer in PEERS.items()},
}


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def stated(cells: dict[str, Cell]) -> list[claims.Claim]:
    """What the head of this program claims, of the methods that were run."""
    found = []
    for name in ("exact", "exact, 100k"):
        if name in cells:
            residual = cells[name]["residual"]
            found.append(claims.at_most(f"{name}, relative residual", residual, TOLERANCE))
    if {"exact, 100k", "Cholesky, 100k"} <= set(cells):
        ours, dense = cells["exact, 100k"], cells["Cholesky, 100k"]
        means, wide = (
            (torch.tensor(ours[key]), torch.tensor(dense[key])) for key in ("mean", "deviation")
        )
        gap = float((means[0] - means[1]).square().mean().sqrt()) / dense["noise"] ** 0.5
        found.append(claims.at_most("100k, means beside Cholesky's", gap, 0.02))
        ratio = float((wide[0] / wide[1]).log().square().mean().sqrt())
        found.append(claims.at_most("100k, deviations beside Cholesky's", ratio, 0.05))
        change = abs(ours["nll"] - dense["nll"])
        found.append(claims.at_most("100k, NLL beside Cholesky's", change, 0.002))
    for rival in ("mean", "exact, 100k"):
        if {"exact", rival} <= set(cells):
            margin = cells["exact"]["nll"] - cells[rival]["nll"]
            found.append(claims.at_most(f"exact, NLL above {rival}", margin, 0.0))
    return found


HEAD = """# A million flights

{made_by}

Delays of US flights of 2001 from the day of the week, the day of the year, the minute of the day, the
distance and the coordinates of both airports; 100,000 flights are held out. The process is the NNGP of a
network with three hidden layers of ReLUs, whose hyper-parameters have the largest evidence on 1,000 flights.
RMSE is in minutes, NLL in nats of a delay in minutes. "Residual" is ‖y − (K + noise) α‖ / ‖y‖, computed at
the end.
"""


def page(cells: dict[str, Cell], made: str) -> str:
    """The table in Markdown."""
    lines = [
        HEAD.format(made_by=made),
        "| method | flights | RMSE | NLL | s to tune | s to fit | s to predict | residual | GB | on |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for name, cell in cells.items():
        seconds = [cell["seconds"].get(part) for part in ("tune", "fit", "predict")]
        times = " | ".join("" if one is None else f"{one:.1f}" for one in seconds)
        residual = f"{cell['residual']:.1e}" if "residual" in cell else ""
        memory = f"{cell['memory']:.0f}" if cell.get("memory") else ""
        lines.append(
            f"| {name} | {cell.get('count', cell.get('train', '')):,} | {cell['rmse']:.3f} | "
            f"{cell['nll']:.4f} | {times} | {residual} | {memory} | {cell['device']} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--cells", type=Path, help="folder of what each method gave, kept")
    parser.add_argument("--data", type=Path, help="folder with flights3m.npz")
    parser.add_argument("--train", type=int, default=Sizes.train)
    parser.add_argument("--rank", type=int, default=None, help="of the preconditioner")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="3,000 flights, no peers")
    parser.add_argument("--report", action="store_true", help="judge the cells that there are")
    options = parser.parse_args()
    sizes = Sizes(train=options.train, rank=options.rank)
    if options.quick:
        sizes = Sizes(3000, 2000, 1000, 300, 200)
        options.methods = [name for name in METHODS if name not in PEERS or name == "mean"]
    with tempfile.TemporaryDirectory() as folder:
        path = options.cells or Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        if not options.report:
            flights = read(options.data, sizes.train, sizes.test, options.device)
            for name in options.methods:
                file = path / f"{name.replace(', ', '_')}.json"
                if file.is_file():
                    continue
                cell = METHODS[name](flights, sizes) | {"train": sizes.train}
                file.write_text(json.dumps(cell))
                print(name, {k: v for k, v in cell.items() if not isinstance(v, list)}, flush=True)
        files = {name: path / f"{name.replace(', ', '_')}.json" for name in METHODS}
        cells = {n: json.loads(f.read_text()) for n, f in files.items() if f.is_file()}
    text = page(cells, made_by())
    print(text)
    if options.report:
        (RESULTS / "flights.md").write_text(text, encoding="utf-8")
    return 0 if claims.judge(stated(cells)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
