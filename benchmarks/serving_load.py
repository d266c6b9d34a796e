"""A server under load: eight clients that ask for one point at a time, with errors counted."""

from __future__ import annotations

import http.client
import json
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from net2gp import serving
from serving_problems import problem

CLIENTS, REQUESTS, MOST_SECONDS = 8, 50, 60


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
    found = problem("MLP", "LastLayer()")
    path, x = folder / "served.pt2", found.x
    serving.export(found.posterior, path, x, novelty=False)
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
