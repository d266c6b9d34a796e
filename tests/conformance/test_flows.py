"""Laws of ensembles in training, at every time: a new flow joins by one line in FLOWS."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import net2gp as n2g
from posteriors.methods import RECTIFIED
from posteriors.ways import network, points, real_targets, unseen_points

TIMES = (0.0, 0.3, 20.0)


def data(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = points(8)
    return x.to(dtype), real_targets(x, 2).to(dtype)


FLOWS: dict[str, Callable[[torch.dtype], Any]] = {
    "limit": lambda dtype: n2g.gradient_flow(RECTIFIED.limit, data(dtype)),
    "linearized network": lambda dtype: n2g.gradient_flow(
        n2g.linearize(network(2, dtype=dtype)), data(dtype)
    ),
    "limit with momentum": lambda dtype: n2g.gradient_flow(
        RECTIFIED.limit, data(dtype), momentum=0.5
    ),
}
EACH = pytest.mark.parametrize("name", FLOWS)
AT = pytest.mark.parametrize("t", TIMES)


@cache
def flow_of(name: str, dtype: torch.dtype = torch.float64) -> Any:
    return FLOWS[name](dtype)


@EACH
@AT
def test_marginals_are_the_diagonal_blocks_of_the_covariance(name, t):
    flow, x = flow_of(name), unseen_points()
    law, whole = flow.at(t, x), flow.covariance(t, x)
    blocks = law.covariance_matrix
    if len(whole) == len(x):
        expected = whole.diagonal()[:, None, None] * torch.eye(2, dtype=torch.float64)
    else:
        expected = whole.reshape(len(x), 2, len(x), 2).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    torch.testing.assert_close(blocks, expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(law.mean, flow.mean(t, x), rtol=0, atol=1e-12)


@EACH
@AT
def test_points_one_by_one_have_the_law_that_they_have_together(name, t):
    flow, x = flow_of(name), unseen_points()
    together, some = flow.at(t, x), flow.at(t, x[2:4])
    torch.testing.assert_close(some.mean, together.mean[2:4], rtol=0, atol=1e-9)
    torch.testing.assert_close(
        some.covariance_matrix, together.covariance_matrix[2:4], rtol=0, atol=1e-9
    )


@EACH
@AT
def test_gradients_in_x_are_absent(name, t):
    flow, x = flow_of(name), unseen_points().requires_grad_()
    law = flow.at(t, x)
    assert not law.mean.requires_grad
    assert not law.covariance_matrix.requires_grad


@EACH
@AT
def test_float32_is_near_float64(name, t):
    x = unseen_points()
    single, exact = flow_of(name, torch.float32).at(t, x.float()), flow_of(name).at(t, x)
    assert single.mean.dtype == single.covariance_matrix.dtype == torch.float32
    torch.testing.assert_close(single.mean.double(), exact.mean, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        single.covariance_matrix.double(), exact.covariance_matrix, rtol=1e-4, atol=1e-4
    )
