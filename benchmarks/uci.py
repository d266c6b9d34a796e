"""Regression tables: test likelihood and error of Laplace posteriors, laplace-torch and a plain GP.

    NET2GP_DATA=... python benchmarks/uci.py [--data yacht energy]
    NET2GP_DATA=... python benchmarks/uci.py --quick

The same trained networks (one hidden layer of 50, see `uci_networks.py`) for every method, on the customary
splits; every method but the bare network finds its prior and noise itself. Writes `results/uci.json` and
`results/uci.md`. The exit status asserts, for every table and by two standard errors over its splits, that
the test likelihoods of the whole covariance (`net2gp full`) and of `net2gp Kron` are no worse than the bare
network's. laplace-torch stands beside them for comparison, without a claim.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

import net2gp as n2g
from net2gp import metrics
from peers import PEERS, NotInstalled, ensure
from run import HERE, NUM_CORES, RESULTS, environment, made_by, pin, processor
from uci_networks import DECAYS, STEPS, TRIAL_STEPS, Splits, module_of, splits, train

TABLES = {
    "bostonHousing": 20,
    "concrete": 20,
    "energy": 20,
    "yacht": 20,
    "wine-quality-red": 20,
    "power-plant": 20,
}
"""Tables and how many of their splits are used."""

TUNING_POINTS = 500
"""The plain GP tunes on so many points at most, and is then conditioned on all."""

QUICK_TABLES, QUICK_SPLITS = ("yacht", "energy"), 5
QUICK_METHODS = ["network", "net2gp full", "net2gp Kron"]
"""Those that claims are about: tuning the plain GP takes longer than all of them."""

PEER = "laplace-torch Kron"
CLAIMS = (("net2gp full", "network"), ("net2gp Kron", "network"))
"""Whose test likelihood is claimed to be no worse than whose."""

Prediction = tuple[Tensor, Tensor]
Method = Callable[[nn.Module, tuple[Tensor, Tensor], Tensor], Prediction]


def bare(module: nn.Module, data: tuple[Tensor, Tensor], x: Tensor) -> Prediction:
    """The network itself, with the mean squared residual of the training points as noise."""
    with torch.no_grad():
        noise = (module(data[0]) - data[1]).square().mean()
        mean = module(x)[:, 0]
    return mean, noise.expand_as(mean)


def laplace(structure: Any) -> Method:
    """n2g.laplace with its own prior and noise."""

    def predict(module: nn.Module, data: tuple[Tensor, Tensor], x: Tensor) -> Prediction:
        posterior = n2g.laplace(module, data, n2g.Gaussian(), structure=structure)
        found = posterior.predict(x)
        return found.mean[:, 0].detach(), found.variance[:, 0].detach()

    return predict


def plain_process(
    _: nn.Module,
    data: tuple[Tensor, Tensor],
    x: Tensor,
    *,
    tuning: int = TUNING_POINTS,
    most: int | None = None,
) -> Prediction:
    """A GP with a squared-exponential kernel, one length scale for each input, of at most `most` points."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(data[0]), generator=generator)
    few = (data[0][order[:tuning]], data[1][order[:tuning]])
    if most is not None and len(order) > most:
        data = (data[0][order[:most]], data[1][order[:most]])

    def build(lengthscale: Tensor, output_var: float, noise_var: float) -> Any:
        return n2g.condition(n2g.RBF(lengthscale, output_var), few, n2g.Gaussian(noise_var))

    start = torch.full((x.shape[1],), math.sqrt(x.shape[1]), dtype=torch.float64)
    tuned = n2g.tune(build, lengthscale=start, output_var=1.0, noise_var=0.1)
    posterior = n2g.condition(tuned.kernel, data, tuned.likelihood)
    found = posterior.predict(x)
    return found.mean[:, 0].detach(), found.variance[:, 0].detach()


def methods() -> dict[str, Method]:
    """What runs in this process, by name."""
    return {
        "network": bare,
        "net2gp full": laplace(n2g.Full()),
        "net2gp Kron": laplace(n2g.Kron()),
        "net2gp diagonal": laplace(n2g.Diagonal()),
        "net2gp last layer": laplace(n2g.LastLayer(n2g.Full())),
        "RBF GP": plain_process,
    }


PEERS_STRUCTURES = {PEER: "Kron", "laplace-torch full": "full"}
PEERS_STRUCTURES["laplace-torch last layer"] = "last layer"


def main() -> int:
    options = parse(sys.argv[1:])
    made_by()
    torch.set_num_threads(NUM_CORES)
    console = Console()
    if not console.is_terminal:
        console = Console(width=170)
    rows = kept(options) if options.keep else []
    for name in options.data:
        console.print(f"{name}: training", style="dim")
        tables = splits(name, min(TABLES[name], options.splits or TABLES[name]))
        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(name, total=STEPS + len(DECAYS) * TRIAL_STEPS)
            params, decay = train(tables, partial(bar.advance, task))
        for row in compare(tables, params, options, console):
            row |= {"data": name, "num_points": tables.x.shape[1], "decay": decay.tolist()}
            said = row["failed"] or f"NLL {np.mean(row['nll']):.3f}, {row['cpu_s']:.1f} CPU s"
            console.print(f"{name}: {row['method']}: {said}", style="dim", highlight=False)
            rows.append(row)
        store(rows, options.output)
    return report(options.output, console)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [*methods(), *PEERS_STRUCTURES]
    parser.add_argument("--quick", action="store_true", help="two tables, five splits: minutes")
    parser.add_argument("--data", nargs="+", choices=TABLES)
    parser.add_argument("--methods", nargs="+", choices=names)
    parser.add_argument("--splits", type=int, help="at most so many splits of each table")
    parser.add_argument(
        "--limit", type=float, default=1200.0, help="seconds for a method on a table (default 1200)"
    )
    parser.add_argument(
        "--keep", action="store_true", help="keep what is stored of other tables and methods"
    )
    parser.add_argument("--output", type=Path, help="folder of the result files")
    options = parser.parse_args(arguments)
    options.data = options.data or list(QUICK_TABLES if options.quick else TABLES)
    options.methods = options.methods or (QUICK_METHODS if options.quick else names)
    if options.quick:
        options.splits = options.splits or QUICK_SPLITS
        options.output = options.output or Path(tempfile.mkdtemp(prefix="net2gp-uci-"))
    options.output = options.output or RESULTS
    return options


def kept(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The stored rows that this run does not make anew."""
    rows = json.loads((options.output / "uci.json").read_text())["rows"]
    return [
        row
        for row in rows
        if row["data"] not in options.data or row["method"] not in options.methods
    ]


def compare(
    tables: Splits, params: dict[str, Tensor], options: argparse.Namespace, console: Console
) -> Iterator[dict[str, Any]]:
    """Every method on one table."""
    for name, method in methods().items():
        if name not in options.methods:
            continue
        start, wall = time.process_time(), time.perf_counter()
        predictions: list[Prediction] = []
        for i in range(len(tables)):
            if time.perf_counter() - wall > options.limit:
                break
            module, (x, _) = module_of(params, i), tables.test_pair(i)
            predictions.append(method(module, tables.train_pair(i), x))
        yield scored(name, predictions, tables, time.process_time() - start)
    for name, structure in PEERS_STRUCTURES.items():
        if name in options.methods:
            yield peer(name, structure, tables, params, options.limit)


def peer(
    name: str, structure: str, tables: Splits, params: dict[str, Tensor], limit: float
) -> dict[str, Any]:
    """laplace-torch on one table, in its own environment."""
    try:
        python = ensure(PEERS["laplace"])
    except NotInstalled as reason:
        return {"method": name, "failed": f"missing: {reason}"}
    with tempfile.TemporaryDirectory() as folder:
        arrays, stored = Path(folder) / "arrays.npz", Path(folder) / "result.npz"
        inputs = {"x": tables.x, "y": tables.y, "test": tables.test, **params}
        np.savez(arrays, **{key: value.numpy() for key, value in inputs.items()})
        command = [str(python), str(HERE / "worker_laplace_uci.py"), structure]
        try:
            done = subprocess.run(
                [*command, str(arrays), str(stored)],
                env=environment(),
                preexec_fn=pin,
                capture_output=True,
                text=True,
                timeout=limit,
            )
        except subprocess.TimeoutExpired:
            return {"method": name, "failed": f"more than {limit:.0f} s"}
        if done.returncode:
            return {"method": name, "failed": (done.stderr.splitlines() or ["no message"])[-1]}
        with np.load(stored, allow_pickle=False) as found:
            pairs = [
                (torch.from_numpy(found[f"mean{i}"]), torch.from_numpy(found[f"variance{i}"]))
                for i in range(len(tables))
            ]
            return scored(name, pairs, tables, float(found["cpu_s"]))


def scored(
    name: str, predictions: Sequence[Prediction], tables: Splits, cpu_s: float
) -> dict[str, Any]:
    """Negative log likelihood and root mean squared error of each split, in the table's units."""
    nll, rmse = [], []
    for i, (mean, variance) in enumerate(predictions):
        y, scale = tables.test_pair(i)[1][:, 0], tables.scale[i]
        nll.append(float(metrics.gaussian_nll((mean, variance), y) + scale.log()))
        rmse.append(float(metrics.rmse(mean, y) * scale))
    return {"method": name, "nll": nll, "rmse": rmse, "cpu_s": cpu_s, "failed": ""}


def store(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    machine = {"processor": processor(), "cores": NUM_CORES, "made_by": made_by()}
    content = {"machine": machine, "rows": rows}
    (folder / "uci.json").write_text(json.dumps(content) + "\n")


EXPLANATION = """\
One network for each split, the same for all methods: one hidden layer of 50 tanh units, full-batch Adam on
standardized data, weight decay chosen on a tenth of the training points. Mean ± standard error over the
customary splits (Hernández-Lobato & Adams, 2015), in the units of the table. `network`: the bare network with
the mean squared training residual as its noise. net2gp: `n2g.laplace(network, data, n2g.Gaussian(),
structure=...)`, which finds prior and noise itself. laplace-torch: prior precision and noise by 1000 steps
of Adam on its marginal likelihood, as in its regression example (for Kron, the gradient of version 0.3 leaves
out how the determinant depends on the noise, which ends at the mean squared training residual). RBF GP, where
shown: one length scale for each input, tuned on at most 500 points and conditioned on all."""


def cells(rows: Sequence[dict[str, Any]], key: str) -> tuple[list[str], list[list[str]]]:
    """A column for each method, a row for each table; the best mean is bold."""
    names = list(dict.fromkeys(row["method"] for row in rows))
    body = []
    for data in dict.fromkeys(row["data"] for row in rows):
        chosen = {row["method"]: row for row in rows if row["data"] == data}
        known = {n: np.mean(r[key]) for n, r in chosen.items() if not r["failed"] and r[key]}
        best = min(known, key=lambda n: known[n])
        first = chosen[best]
        line = [f"{data} ({first['num_points']} × {len(first[key])} splits)"]
        for name in names:
            if name not in known:
                line.append(chosen[name]["failed"] if name in chosen else "")
                continue
            values = np.array(chosen[name][key])
            error = values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else 0.0
            mark = "**" if name == best else ""
            line.append(f"{mark}{values.mean():.3f}{mark} ± {error:.3f}")
        body.append(line)
    return ["table", *names], body


def paired(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Test likelihood beside laplace-torch Kron, split by split: negative is better than it."""
    names = [n for n in dict.fromkeys(row["method"] for row in rows) if n != PEER]
    body = []
    for data in dict.fromkeys(row["data"] for row in rows):
        chosen = {row["method"]: row for row in rows if row["data"] == data and not row["failed"]}
        line = [data]
        for name in names:
            if PEER not in chosen or name not in chosen:
                line.append("")
                continue
            count = min(len(chosen[n]["nll"]) for n in (name, PEER))
            gap = np.array(chosen[name]["nll"][:count]) - np.array(chosen[PEER]["nll"][:count])
            error = gap.std(ddof=1) / math.sqrt(count) if count > 1 else 0.0
            line.append(f"{gap.mean():+.3f} ± {error:.3f}")
        body.append(line)
    return ["table", *names], body


def report(folder: Path, console: Console) -> int:
    """Print the tables and write them to uci.md."""
    stored = json.loads((folder / "uci.json").read_text())
    rows, machine = stored["rows"], stored["machine"]
    lines = ["# Regression tables", "", f"{machine['processor']}, {machine['cores']} cores."]
    lines += [machine[key] for key in ("made_by", "note") if key in machine]
    lines += ["", EXPLANATION]
    found = [("Test negative log likelihood", *cells(rows, "nll"))]
    found += [(f"The same, minus that of {PEER}, split by split", *paired(rows))]
    found += [("Test root mean squared error", *cells(rows, "rmse"))]
    for heading, columns, body in found:
        table = Table(title=heading, title_justify="left")
        for i, column in enumerate(columns):
            table.add_column(column, justify="right" if i else "left")
        for line in body:
            table.add_row(*line)
        console.print(table)
        lines += ["", f"## {heading}", "", "| " + " | ".join(columns) + " |"]
        lines += ["|---" + "|---:" * (len(columns) - 1) + "|"]
        lines += ["| " + " | ".join(line) + " |" for line in body]
    broken = list(failures(rows))
    verdict = [f"- fails: {line}" for line in broken] or [CLAIM]
    lines += ["", "## Claims", "", *verdict]
    (folder / "uci.md").write_text("\n".join(lines) + "\n")
    console.print("\n".join(verdict), highlight=False)
    return 1 if broken else 0


CLAIM = (
    "On no table is the NLL worse by more than two standard errors of the difference: "
    + "; ".join(f"{one} than {other}" for one, other in CLAIMS)
    + "."
)


def failures(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What is not as it is claimed."""
    for row in rows:
        if row["failed"] and row["method"].startswith("net2gp"):
            yield f"{row['data']}: {row['method']} failed: {row['failed']}"
    found = {(row["data"], row["method"]): row for row in rows if not row["failed"]}
    for name in dict.fromkeys(row["data"] for row in rows):
        for pair in CLAIMS:
            one, other = (found.get((name, method)) for method in pair)
            if one is None or other is None:
                continue
            count = min(len(one["nll"]), len(other["nll"]))
            gap = np.array(one["nll"][:count]) - np.array(other["nll"][:count])
            error = gap.std(ddof=1) / math.sqrt(count) if count > 1 else 0.0
            if gap.mean() > 2 * error:
                yield f"{name}: {pair[0]} is worse than {pair[1]}: {gap.mean():.3f} ± {error:.3f}"


if __name__ == "__main__":
    sys.exit(main())
