"""Exported posteriors beside the bare network: differences, latency, and a server under load.

    python benchmarks/serving.py [--quick] [--networks MLP LeNet ResNet-20]

Each posterior is exported as `.pt2` and as `.onnx`, and run beside the network alone, exported in the same
way and run by the same runtime, on one thread: the median over repeats of one call, for 1 and for 32
points. The differences are those of mean, variance and probabilities from the posterior's own, for 1 to 256
points, as a share of the largest entry. The server runs at 127.0.0.1 and answers a bounded number of
requests of one point each from eight clients. Written to `results/serving.md`, unless it is the quick run,
which takes the MLP alone. The exit status is 1 if a claim (`CLAIMS`, written down before the run) does not
hold.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import net2gp as n2g
from net2gp import data, serving
from net2gp.errors import Net2GPWarning

RESULTS = Path(__file__).resolve().parent / "results" / "serving.md"
NETWORKS = ("MLP", "LeNet", "ResNet-20")
BATCHES = (1, 32)
DIFFERENCE, LAST, KRON = 1e-5, 1.5, 5.0
CLIENTS, REQUESTS, MOST_SECONDS = 8, 50, 60
CLAIMS = f"""\
1. Programs differ from the posterior by at most {DIFFERENCE:g} of the largest entry, for 1 to 256 points.
2. `LastLayer()` without novelty takes at most {LAST} times as long as the network, for 32 points of the
   convolutional networks.
3. `Kron()` of a network with one output takes at most {KRON:g} times as long as the network, for 32 points of
   the MLP by onnxruntime.
4. The server answers every request."""


@dataclass(frozen=True)
class Row:
    """One program."""

    network: str
    structure: str
    runtime: str
    kilobytes: float
    difference: float
    times: dict[int, float]
    bare: dict[int, float]

    def ratio(self, count: int) -> float:
        """How many times the network alone."""
        return self.times[count] / self.bare[count]


def problem(name: str) -> tuple[nn.Module, Tensor]:
    """A network, and standard normal points of its shape."""
    torch.manual_seed(0)
    if name == "LeNet":
        return data.pretrained("full_mnist_lenet_adaml2"), torch.randn(256, 1, 28, 28)
    if name == "ResNet-20":
        return data.pretrained("resnet20_cifar10"), torch.randn(256, 3, 32, 32)
    outputs = 1 if "one output" in name else 10
    network = nn.Sequential(
        *(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, outputs))
    )
    return network.eval(), torch.randn(256, 64)


def fitted(network: nn.Module, x: Tensor, structure: Any) -> Any:
    """A posterior for a few points, whose labels are what the network says."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", Net2GPWarning)
        out = network(x[:64])
        if out.shape[1] == 1:
            return n2g.laplace(
                network, (x[:64], out), n2g.Gaussian(0.1), structure=structure, prior_var=1.0
            )
        labels = out.argmax(1)
        return n2g.laplace(
            network, (x[:64], labels), n2g.Categorical(), structure=structure, prior_var=1.0
        )


class Alone(nn.Module):
    """The network with its output under a name, as programs have it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"mean": self.network(x)}


def bare(network: nn.Module, x: Tensor, runtime: str, folder: Path) -> Callable[[Tensor], object]:
    """The network alone, exported in the same way."""
    exported = torch.export.export(
        Alone(network), (x[:3],), dynamic_shapes={"x": {0: torch.export.Dim("batch", min=1)}}
    )
    if runtime == "torch":
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
    found = []
    with torch.no_grad():
        run(x)
        for _ in range(repeats):
            start = time.process_time()
            run(x)
            found.append(time.process_time() - start)
    return statistics.median(found)


def difference(program: serving.Program, posterior: Any, x: Tensor, *, novelty: bool) -> float:
    """The largest difference from the posterior, as a share of the largest entry."""
    law = posterior.marginal(x)
    wanted = {"mean": law.mean}
    if posterior.num_outputs > 1:
        wanted["variance"] = law.variance
        if novelty:
            wanted["probabilities"] = posterior.predict(x).probs
    elif novelty:
        wanted["variance"] = posterior.predict(x).variance
    gaps = []
    for count in (1, 7, len(x)):
        answers = program(x[:count])
        found = {**answers, "variance": answers["std"] ** 2}
        for name, value in wanted.items():
            gaps.append(float((found[name] - value[:count]).abs().max() / value.abs().max()))
    return max(gaps)


def rows(name: str, repeats: int, formats: tuple[str, ...], folder: Path) -> list[Row]:
    """All programs of a network."""
    network, x = problem(name)
    cases = [("LastLayer()", n2g.LastLayer(), False), ("Kron()", n2g.Kron(), False)]
    cases += [
        ("LastLayer(), novelty", n2g.LastLayer(), True),
        ("Kron(), novelty", n2g.Kron(), True),
    ]
    found = []
    alone = {f: bare(network, x, "torch" if f == "pt2" else "onnxruntime", folder) for f in formats}
    for shown, structure, novelty in cases if name != "ResNet-20" else cases[:2]:
        posterior = fitted(network, x, structure)
        for kind in formats:
            path = folder / f"program.{kind}"
            serving.export(posterior, path, x, novelty=novelty)
            program = serving.load(path)
            run = by_onnx(path) if kind == "onnx" else program
            times = {count: timed(run, x[:count], repeats) for count in BATCHES}
            own = {count: timed(alone[kind], x[:count], repeats) for count in BATCHES}
            gap = difference(program, posterior, x, novelty=novelty)
            size = path.stat().st_size / 1024
            runtime = "torch" if kind == "pt2" else "onnxruntime"
            found.append(Row(name, shown, runtime, size, gap, times, own))
            print(line(found[-1]), flush=True)
    return found


@dataclass(frozen=True)
class Load:
    """What clients saw."""

    answered: int
    errors: int
    per_second: float
    median: float
    slowest: float


def under_load(folder: Path) -> Load:
    """Serve an MLP's program in a process of its own, and ask from several clients."""
    network, x = problem("MLP")
    path = folder / "served.pt2"
    serving.export(fitted(network, x, n2g.LastLayer()), path, x, novelty=False)
    code = (
        "import sys, uvicorn\n"
        "from net2gp import serving\n"
        "from net2gp.serving.server import create_app\n"
        "app = create_app(serving.load(sys.argv[1]))\n"
        "uvicorn.run(app, host='127.0.0.1', port=int(sys.argv[2]), log_level='error')\n"
    )
    port = 18765
    server = subprocess.Popen([sys.executable, "-c", code, str(path), str(port)])
    try:
        wait_for(port)
        return ask(port, x)
    finally:
        server.terminate()
        server.wait(10)


def wait_for(port: int) -> None:
    """Wait until the server is healthy."""
    for _ in range(240):
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            time.sleep(0.5)
    raise RuntimeError("the server did not start")


def ask(port: int, x: Tensor) -> Load:
    """Ask from several clients at once, at most so often and so long."""
    seconds: list[float] = []
    errors: list[str] = []
    end = time.monotonic() + MOST_SECONDS

    def client(number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        for i in range(REQUESTS):
            if time.monotonic() > end:
                return
            body = json.dumps({"x": x[(number + i) % len(x)][None].tolist()})
            start = time.perf_counter()
            try:
                connection.request("POST", "/predict", body)
                answer = connection.getresponse()
                text = answer.read()
                if answer.status != 200:
                    errors.append(text.decode())
                else:
                    seconds.append(time.perf_counter() - start)
            except OSError as error:
                errors.append(str(error))
                connection.close()

    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    total = time.monotonic() - start
    ordered = sorted(seconds)
    slow = ordered[int(0.95 * (len(ordered) - 1))]
    return Load(len(seconds), len(errors), len(seconds) / total, statistics.median(seconds), slow)


def judged(found: list[Row], load: Load) -> list[tuple[str, bool]]:
    """The claims, each with whether it holds."""
    gaps = max(row.difference for row in found)
    last = [
        row.ratio(32)
        for row in found
        if row.structure == "LastLayer()" and "MLP" not in row.network
    ]
    kron = [
        row.ratio(32)
        for row in found
        if row.structure == "Kron()"
        and "one output" in row.network
        and row.runtime == "onnxruntime"
    ]
    return [
        (f"1. largest difference {gaps:.1e}", gaps <= DIFFERENCE),
        *([(f"2. LastLayer() at most {max(last):.2f} ×", max(last) <= LAST)] if last else []),
        *([(f"3. Kron() with one output {max(kron):.2f} ×", max(kron) <= KRON)] if kron else []),
        (f"4. {load.errors} errors in {load.answered + load.errors} requests", load.errors == 0),
    ]


HEAD = """\
| network | structure | runtime | kB | difference | 1 point, ms | × network | 32 points, ms | × network |
|---|---|---|---:|---:|---:|---:|---:|---:|"""


def line(row: Row) -> str:
    """A line of the table."""
    times = " | ".join(f"{1e3 * row.times[c]:.2f} | {row.ratio(c):.2f}" for c in BATCHES)
    facts = f"{row.kilobytes:.0f} | {row.difference:.0e} | {times}"
    return f"| {row.network} | `{row.structure}` | {row.runtime} | {facts} |"


def revision() -> str:
    """The commit of the code that ran."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def report(found: list[Row], load: Load, verdicts: list[tuple[str, bool]], command: str) -> str:
    """The page of results."""
    claims = "\n".join(
        f"- {text}: {'holds' if holds else '**does not hold**'}" for text, holds in verdicts
    )
    table = "\n".join([HEAD, *map(line, found)])
    return f"""\
# Exported posteriors beside the bare network

`{command}`, revision {revision()}, torch {torch.__version__}, one thread, CPU seconds.

Claims, written down before the run:

{CLAIMS}

{claims}

{table}

The network is exported in the same way and run by the same runtime. A `.pt2` program is run operation by
operation from Python, which is most of the time of small networks. `Kron()` of ten outputs takes ten
backward passes and the products of inputs and gradients for each output: of a convolutional network some
thirty times the arithmetic of a forward pass, which no way to write it down avoids. `novelty` compares with
up to 400 training inputs by the gradients of all layers, also for `LastLayer()`; ResNet-20 has more than
100,000 parameters and would compare features of its last layer.

The server, with a program of the MLP and `LastLayer()`, answered {load.answered} requests of {CLIENTS}
clients at 127.0.0.1, {load.per_second:.0f} per second, with {load.errors} errors:
{1e3 * load.median:.0f} ms in the median, {1e3 * load.slowest:.0f} ms for one in twenty.

The machine runs other programs as well. CPU seconds bear that better than seconds on the clock, which those
of the server are. Triton and TorchServe serve the same files, and were not compared.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="the MLP alone, without a page of results"
    )
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", UserWarning)
    names = ["MLP"] if options.quick else options.networks
    repeats = 5 if options.quick else 15
    found: list[Row] = []
    print(HEAD)
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            both = [name, "MLP, one output"] if name == "MLP" else [name]
            for one in both:
                found += rows(one, repeats, ("pt2", "onnx"), Path(folder))
        load = under_load(Path(folder))
    verdicts = judged(found, load)
    for text, holds in verdicts:
        print(f"{text}: {'holds' if holds else 'DOES NOT HOLD'}")
    print(f"{load.per_second:.0f} requests per second, median {1e3 * load.median:.0f} ms")
    if not options.quick:
        command = " ".join(["python benchmarks/serving.py", *sys.argv[1:]])
        RESULTS.write_text(report(found, load, verdicts, command), encoding="utf-8")
    return 0 if all(holds for _, holds in verdicts) else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    raise SystemExit(main())
