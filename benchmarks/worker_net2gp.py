"""net2gp: the structured tangent kernel of a linearized network."""

from __future__ import annotations

import numpy as np
import torch

import net2gp as n2g
from measure import Job, main
from networks import network
from problems import Problem


def make_job(problem: Problem, quantity: str, arrays: dict[str, np.ndarray]) -> Job:
    torch.set_num_threads(2)
    module = network(problem, arrays)
    x = torch.from_numpy(arrays["x"])

    def run() -> torch.Tensor:
        linearized = n2g.linearize(module)
        kernel = linearized.kernel() if quantity == "full" else linearized.trace_kernel()
        return kernel(x)

    version = f"net2gp {n2g.__version__}, torch {torch.__version__}"
    return Job(run, run, lambda k: k.numpy(), version, note="structured, default settings")


if __name__ == "__main__":
    main(make_job)
