"""The Jacobian of a network in its parameters, slow and obviously right."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.backends import mha

from net2gp.inputs import num_rows, rows
from net2gp.types import Inputs


def call(network: nn.Module, x: Inputs) -> Tensor:
    if isinstance(x, dict):
        return network(**x)
    return network(*x) if isinstance(x, tuple) else network(x)


def brute_force_jacobian(
    network: nn.Module, x: Inputs, output=lambda out: out
) -> dict[str, Tensor]:
    """∂f_c(x_n)/∂θ by one autograd.grad per example and output: (N, C, *shape) for each parameter."""
    params = dict(network.named_parameters())
    fastpath = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    pieces: dict[str, list[Tensor]] = {name: [] for name in params}
    for n in range(num_rows(x)):
        out = output(call(network, rows(x, slice(n, n + 1)))).reshape(-1)
        for value in out:
            grads = torch.autograd.grad(
                value, list(params.values()), retain_graph=True, materialize_grads=True
            )
            for name, g in zip(params, grads, strict=True):
                pieces[name].append(g.detach().to_dense())
    mha.set_fastpath_enabled(fastpath)
    return {
        name: torch.stack(grads).unflatten(0, (num_rows(x), -1)) for name, grads in pieces.items()
    }


def flat(jacobian: dict[str, Tensor]) -> Tensor:
    """(N, C, P): the parameters' columns side by side."""
    return torch.cat([J.reshape(*J.shape[:2], -1) for J in jacobian.values()], -1)
