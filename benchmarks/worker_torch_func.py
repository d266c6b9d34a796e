"""PyTorch by itself: the Jacobian from `vmap(jacrev)`, contracted parameter by parameter.

This is the recipe of PyTorch's own tutorial on neural tangent kernels. All Jacobians are kept at
once, since they fit in the memory of the benchmark machine; `MAX_JACOBIAN_BYTES` splits the points
into as few groups as needed where they would not.
"""

from __future__ import annotations

import math
import os

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, jacrev, vmap

from measure import Job, main
from networks import network
from problems import Problem

MAX_JACOBIAN_BYTES = 0.45 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def make_job(problem: Problem, quantity: str, arrays: dict[str, np.ndarray]) -> Job:
    torch.set_num_threads(2)
    module = network(problem, arrays)
    params = {name: value.detach() for name, value in module.named_parameters()}
    x = torch.from_numpy(arrays["x"])
    num_bytes = 4 * problem.num_points * problem.num_outputs * problem.num_params
    num_groups = math.ceil(num_bytes / MAX_JACOBIAN_BYTES)

    def single(params: dict[str, Tensor], point: Tensor) -> Tensor:
        return functional_call(module, params, (point.unsqueeze(0),)).squeeze(0)

    def jacobian(points: Tensor) -> list[Tensor]:
        found = vmap(jacrev(single), (None, 0))(params, points)
        return [j.flatten(2) for j in found.values()]

    def contract(left: list[Tensor], right: list[Tensor]) -> Tensor:
        pattern = "naf,mbf->namb" if quantity == "full" else "naf,maf->nm"
        total = torch.einsum(pattern, left[0], right[0])
        for a, b in zip(left[1:], right[1:], strict=True):
            total += torch.einsum(pattern, a, b)
        return total.flatten(2).flatten(0, 1) if quantity == "full" else total / problem.num_outputs

    def kernel(points: Tensor, groups: int) -> Tensor:
        parts = points.chunk(groups)
        if groups == 1:
            left = jacobian(points)
            return contract(left, left)
        rows = []
        for part in parts:
            left = jacobian(part)
            rows.append(torch.cat([contract(left, jacobian(other)) for other in parts], 1))
        return torch.cat(rows)

    return Job(
        run=lambda: kernel(x, num_groups),
        warm_up=lambda: kernel(x[:16], 1),
        matrix=lambda k: k.numpy(),
        version=f"torch {torch.__version__}",
        note=f"vmap(jacrev) and einsum, points in {num_groups} group(s)",
    )


if __name__ == "__main__":
    main(make_job)
