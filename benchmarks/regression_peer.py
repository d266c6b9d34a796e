"""laplace-torch on the networks of `regression.py`: one worker in its own environment for each process."""

from __future__ import annotations

import json
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from peers import PEERS, ensure
from regression_networks import Rows
from run import HERE, environment


class Failed(Exception):
    """What the worker could not do."""


@cache
def worker() -> subprocess.Popen[str]:
    """Started with the first request; it ends with the process that asked."""
    return subprocess.Popen(
        [str(ensure(PEERS["laplace"])), str(HERE / "worker_laplace_regression.py")],
        env={**environment(), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def predict(
    module: nn.Module, kind: str, rows: Rows, structure: str
) -> tuple[tuple[Tensor, Tensor], float]:
    """Mean and variance of y at the test rows, and the noise that was found."""
    with tempfile.TemporaryDirectory() as folder:
        arrays, stored = Path(folder) / "arrays.npz", Path(folder) / "result.npz"
        inputs = {"x": rows.x, "y": rows.y, "x_test": rows.x_test, **module.state_dict()}
        np.savez(arrays, kind=np.array(kind), **{key: v.numpy() for key, v in inputs.items()})
        ask(structure, str(arrays), str(stored))
        with np.load(stored, allow_pickle=False) as found:
            pair = torch.from_numpy(found["mean"]), torch.from_numpy(found["variance"])
            return pair, float(found["noise"])


def ask(*request: str) -> None:
    """Wait for the worker's answer."""
    process = worker()
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        said = process.stdout.readline()
    except BrokenPipeError:
        said = ""
    if not said:
        worker.cache_clear()
        raise Failed("the worker of laplace-torch ended without an answer")
    if said.strip():
        raise Failed(said.strip())
