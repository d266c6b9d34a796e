"""net2gp: both kernels of an infinitely wide network, or the floor below which no library gets.

Called by `limits.py` as `worker_limits_net2gp.py JOB ARRAYS RESULT REPEATS PATIENCE`, where JOB is JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import net2gp as n2g
from measure import Job, measure, resident
from net2gp.limits import infinite_width
from problems import read

WIDTH = 8
"""Channels of the hidden layers, which the limit ignores."""


class Erf(nn.Module):
    """The error function as a layer, which torch.nn does not have."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.erf(x)


ACTIVATIONS = {"relu": nn.ReLU, "erf": Erf, "tanh": nn.Tanh}


def network(job: dict[str, Any], x: Tensor) -> nn.Sequential:
    """The module that a PyTorch user would write."""
    activation, size = ACTIVATIONS[job["activation"]], x.shape[1]
    layers: list[nn.Module] = []
    for _ in range(job["depth"]):
        if job["network"] == "dense":
            layers += [nn.Linear(size, WIDTH), activation()]
        else:
            layers += [nn.Conv2d(size, WIDTH, 3, padding=1), activation()]
        size = WIDTH
    if job["network"] == "pool":
        layers.append(nn.AdaptiveAvgPool2d(1))
    if job["network"] != "dense":
        layers.append(nn.Flatten())
    inputs = WIDTH * (x[0, 0].numel() if job["network"] == "flatten" else 1)
    return nn.Sequential(*layers, nn.Linear(inputs, 1)).to(x.dtype)


def kernel_job(job: dict[str, Any], x: Tensor, y: Tensor | None) -> Job:
    """Everything is timed, from the module to both matrices."""
    module = network(job, x)

    def run() -> tuple[Tensor, Tensor]:
        limit = infinite_width(module, weight_var=job["weight_var"], bias_var=job["bias_var"])
        return limit(x, y)

    def matrix(found: tuple[Tensor, Tensor]) -> np.ndarray:
        return np.stack([t.numpy() for t in found])

    version = f"net2gp {n2g.__version__}, torch {torch.__version__}"
    return Job(run, run, matrix, version, note="default settings")


def floor_job(job: dict[str, Any], x: Tensor, y: Tensor | None) -> Job:
    """The inputs' Gram matrix at the positions that the network needs, and writing two arrays of its size.

    The Gram matrix goes into memory that is there already; the two results into fresh memory.
    """
    y = x if y is None else y
    if job["network"] == "dense":
        left, right = x, y.T
    elif job["network"] == "flatten":
        left, right = (t.flatten(2).movedim(2, 0).contiguous() for t in (x, y))
        right = right.mT
    else:
        left, right = (t.movedim(1, -1).reshape(-1, t.shape[1]) for t in (x, y))
        right = right.T
    gram = left @ right

    def run() -> list[Tensor]:
        torch.matmul(left, right, out=gram)
        return [torch.empty_like(gram).copy_(gram) for _ in range(2)]

    return Job(run, run, lambda _: np.zeros(0), f"torch {torch.__version__}", note="")


def main() -> None:
    torch.set_num_threads(2)
    text, arrays, stored, repeats, patience = sys.argv[1:]
    job = json.loads(text)
    inputs = {k: torch.from_numpy(v.astype(job["dtype"])) for k, v in read(arrays).items()}
    make = floor_job if job["floor"] else kernel_job
    made = make(job, inputs["x"], inputs.get("y"))
    figures, result = measure(made, resident(), int(repeats), float(patience))
    np.save(stored, made.matrix(result))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
