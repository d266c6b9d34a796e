"""laplace-torch: the training kernel K_MM that `FunctionalLaplace.fit` builds, with its default back-end.

Only the Cholesky factorization at the end of `fit` is left out, which is not part of the kernel. The
trace is the mean over the C kernels of `independent_outputs=True`. `fit` visits the points in the
order of its own sampler; the rows are put back in ours afterwards, untimed.

`fit` computes the Jacobians of every pair of batches anew, so that the batch size trades time for
memory: the largest is taken whose Jacobian stays below `MAX_JACOBIAN_BYTES`, of which `fit` holds
about four at its peak. For the dense network that means batches of 64; batches of 128 took the same
CPU time and twice the memory, batches of 37 took longer, and all points at once do not fit in 24 GB.
"""

from __future__ import annotations

import math
import os
from importlib.metadata import version

import numpy as np
import torch
from laplace.baselaplace import FunctionalLaplace
from torch.utils.data import DataLoader, TensorDataset

from measure import Job, main
from networks import network
from problems import Problem

MAX_JACOBIAN_BYTES = min(2e9, 0.1 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


class KernelOnly(FunctionalLaplace):
    """FunctionalLaplace whose `fit` stops once the kernel is built."""

    _key = ("all", "gp-kernel-only")

    def _build_Sigma_inv(self) -> None:
        """Factorize nothing."""


def make_job(problem: Problem, quantity: str, arrays: dict[str, np.ndarray]) -> Job:
    torch.set_num_threads(2)
    module = network(problem, arrays)
    x = torch.from_numpy(arrays["x"])
    targets = torch.zeros(problem.num_points, dtype=torch.long)
    num_bytes = 4 * problem.num_points * problem.num_outputs * problem.num_params
    num_batches = math.ceil(num_bytes / MAX_JACOBIAN_BYTES)
    batch_size = math.ceil(problem.num_points / num_batches)

    def fit(num_points: int) -> KernelOnly:
        posterior = KernelOnly(
            module,
            "classification",
            n_subset=num_points,
            independent_outputs=quantity == "trace",
        )
        data = TensorDataset(x[:num_points], targets[:num_points])
        posterior.fit(DataLoader(data, batch_size=min(batch_size, num_points)))
        return posterior

    def matrix(posterior: KernelOnly) -> np.ndarray:
        n, c = problem.num_points, problem.num_outputs
        back = np.argsort(np.array([int(i) for i in posterior.train_loader.sampler]))
        if quantity == "trace":
            return torch.stack(posterior.K_MM).mean(0).numpy()[back][:, back]
        k = posterior.K_MM.numpy().reshape(n, c, n, c)[back][:, :, back]
        return k.reshape(n * c, n * c)

    return Job(
        run=lambda: fit(problem.num_points),
        warm_up=lambda: fit(16),
        matrix=matrix,
        version=f"laplace-torch {version('laplace-torch')}, torch {torch.__version__}",
        note=f"FunctionalLaplace, BackPACK Jacobians, batches of {batch_size} for P = {problem.num_params:,}",
    )


if __name__ == "__main__":
    main(make_job)
