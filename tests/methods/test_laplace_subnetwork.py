"""Whether a network is trained is judged by the weights that a subnetwork has."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import net2gp as n2g
from net2gp.errors import NotStationary


@pytest.mark.parametrize(("column", "warns"), [(1, False), (0, True)])
def test_the_gradient_of_a_subnetwork_is_that_of_its_own_weights(column: int, warns: bool) -> None:
    """Of the weights (0.3, 1) times the inputs Subnetwork(1) takes the first, which is known least."""
    generator = torch.Generator().manual_seed(0)
    Q = torch.linalg.qr(torch.randn(30, 2, generator=generator, dtype=torch.float64)).Q
    network = nn.Linear(2, 1, bias=False).double().eval()
    with torch.no_grad():
        network.weight.copy_(torch.tensor([[1.0, -1.0]]))
    x = Q * torch.tensor([0.3, 1.0], dtype=torch.float64)
    y = network(x).detach() - 3 * network.weight.detach()[0, column] * Q[:, [column]]
    settings = {"prior_var": 1.0, "structure": n2g.structures.Subnetwork(1)}
    expected = (
        pytest.warns(NotStationary, match="not at a stationary point: the gradient")
        if warns
        else contextlib.nullcontext()
    )
    with expected:
        n2g.laplace(network, (x, y), n2g.Gaussian(1.0), **settings)
