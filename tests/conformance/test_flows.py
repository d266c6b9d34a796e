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


@AT
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", ["limit", "limit with momentum", "nngp", "ntk process"])
def test_the_posterior_at_a_time_is_the_law_of_the_flow(kind, dtype, t):
    flow = flow_of(kind if kind in FLOWS else "limit", dtype)
    flow = flow.nngp() if kind == "nngp" else flow.ntk_gp() if kind == "ntk process" else flow
    x, posterior = unseen_points().to(dtype), flow.posterior(t)
    tolerance = {"rtol": 1e-10, "atol": 1e-10} if dtype is torch.float64 else {}
    for own, law in (
        (posterior.marginal(x), flow.at(t, x)),
        (posterior.joint(x), flow.joint(t, x)),
    ):
        assert own.mean.dtype == own.covariance_matrix.dtype == dtype
        torch.testing.assert_close(own.mean, law.mean, **tolerance)
        torch.testing.assert_close(own.covariance_matrix, law.covariance_matrix, **tolerance)
    start = flow.posterior(0.0).novelty(x)
    torch.testing.assert_close(start, torch.ones_like(start), **tolerance)


def test_at_its_end_the_flow_of_the_readout_is_conditioning():
    x, y = data(torch.float64)
    flow = n2g.gradient_flow(RECTIFIED.limit, (x, y), ridge=0.2).nngp()
    posterior = flow.posterior(float("inf"))
    expected = n2g.condition(flow.source.pair.nngp, (x, y), n2g.Gaussian(0.2))
    z = unseen_points()
    assert posterior.likelihood.noise_var == 0.2
    for one, other in (
        (posterior.joint(z), expected.joint(z)),
        (posterior.predict(z), expected.predict(z)),
    ):
        torch.testing.assert_close(one.mean, other.mean, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(one.variance, other.variance, rtol=1e-8, atol=1e-8)


def test_a_relative_ridge_is_the_noise_that_it_adds():
    x, y = data(torch.float64)
    relative = n2g.gradient_flow(RECTIFIED.limit, (x, y), ridge=n2g.explain.Relative(0.1))
    Theta = relative.source.pair.ntk(x)
    noise = relative.posterior(1.0).likelihood.noise_var
    assert noise == pytest.approx(0.1 * float(Theta.diagonal().mean()), rel=1e-10)


def test_what_an_ensemble_cannot_do_is_refused():
    flow = flow_of("limit")
    posterior = flow.posterior(1.0)
    with pytest.raises(n2g.errors.NotAvailable, match="Call gradient_flow with all data"):
        posterior.update(data(torch.float64))
    with pytest.raises(n2g.errors.NotAvailable, match="law of an ensemble in training"):
        posterior.dual()
    with pytest.raises(n2g.errors.NotAvailable, match="needs a kernel with features"):
        posterior.sample_functions(2)
    with pytest.raises(n2g.errors.NotAvailable, match="has no evidence"):
        posterior.log_marginal_likelihood()
    with pytest.raises(n2g.errors.NotAvailable, match=r"flow.posterior\(t\) at another time, or"):
        posterior.tempered(2.0)
    with pytest.raises(n2g.errors.InputError, match=r"likelihood must be e.g. Gaussian\(0.1\)"):
        flow.posterior(1.0, "x")
    for t in (True, torch.tensor(True), [False, True]):
        with pytest.raises(n2g.errors.InputError, match=r"t must be a number .* Pass e.g. t=10.0"):
            flow.posterior(t)
    with pytest.raises(n2g.errors.InputError, match=r"t must be one time, but has shape \(2,\)"):
        flow.posterior([1.0, 2.0])
    with pytest.raises(n2g.errors.NotAvailable, match=r"flow.ntk_gp\(\).posterior\(t\)"):
        flow_of("linearized network").posterior(1.0)
