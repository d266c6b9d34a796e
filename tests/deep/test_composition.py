"""Composed processes against sampled ones, and against the numbers of the reference data."""

from __future__ import annotations

import json

import pytest
import torch

import net2gp as n2g
from net2gp import RBF
from net2gp.deep import composed, increment_kurtosis
from net2gp.errors import InputError
from shared_data import shared_reference

X = torch.tensor([[0.0], [0.5], [1.7]], dtype=torch.float64)
INNER = RBF(lengthscale=0.8, output_var=1.3**2)
OUTERS = {
    "one inner process": (RBF(lengthscale=0.7), None),
    "three with one length scale": (RBF(lengthscale=0.7, output_var=1.5), 3),
    "three with their own": (RBF(torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)), None),
}
EACH = pytest.mark.parametrize("name", OUTERS)


def sampled(kernel, count: int = 200_000) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws of f(g(x)): (S, N), and of E[f f'ᵀ | g]: (S, N, N)."""
    generator = torch.Generator().manual_seed(0)
    root = torch.linalg.cholesky(kernel.inner(X))
    kind = {"generator": generator, "dtype": torch.float64}
    g = root @ torch.randn(count, kernel.width, len(X), 1, **kind)
    scale = torch.as_tensor(kernel.outer.lengthscale, dtype=torch.float64)
    scale = scale.expand(kernel.width)[:, None, None]
    squared = ((g - g.transpose(2, 3)) / scale).square().sum(1)
    conditional = kernel.outer.output_var * torch.exp(-0.5 * squared)
    jitter = 1e-10 * torch.eye(len(X), dtype=torch.float64)
    f = torch.linalg.cholesky(conditional + jitter) @ torch.randn(count, len(X), 1, **kind)
    return f[..., 0], conditional


@EACH
def test_the_covariance_is_that_of_sampled_compositions(name):
    outer, width = OUTERS[name]
    kernel = composed(outer, INNER, width=width)
    _, conditional = sampled(kernel)
    error = conditional.std(0) / len(conditional) ** 0.5
    assert ((kernel(X) - conditional.mean(0)).abs() <= 4 * error + 1e-12).all()


@EACH
def test_the_kurtosis_is_that_of_sampled_increments(name):
    outer, width = OUTERS[name]
    kernel = composed(outer, INNER, width=width)
    f, _ = sampled(kernel)
    for i, j in ((0, 1), (0, 2)):
        parts = (f[:, i] - f[:, j]).reshape(20, -1)
        estimates = parts.pow(4).mean(1) / parts.square().mean(1).square()
        error = estimates.std() / 20**0.5
        assert abs(increment_kurtosis(kernel, X)[i, j] - estimates.mean()) < 4 * error


def test_the_numbers_of_the_reference():
    stored = json.loads((shared_reference() / "analytic_refs.json").read_text())["lu_SE_SE"]
    p = stored["params"]
    kernel = composed(RBF(p["l2"], p["sigma2"] ** 2), RBF(p["l1"], p["sigma1"] ** 2))
    pair = torch.tensor([[0.0], [p["dx"]]], dtype=torch.float64)
    assert kernel(pair)[0, 1].item() == pytest.approx(stored["k_exact"], rel=1e-12)
    found = increment_kurtosis(kernel, pair)[0, 1].item()
    assert found == pytest.approx(stored["kurt_increment_exact"], rel=1e-11)
    assert kernel(pair)[0, 1].item() == pytest.approx(stored["k_mc"], rel=1e-3)
    assert found == pytest.approx(stored["kurt_mc"], rel=1e-3)


@EACH
def test_the_kurtosis_is_the_ratio_of_moments_as_written(name):
    outer, width = OUTERS[name]
    kernel = composed(outer, INNER, width=width)
    v = 2 * (1.3**2 - INNER(X))
    u = (
        v
        / torch.as_tensor(outer.lengthscale, dtype=torch.float64)
        .expand(kernel.width)[:, None, None]
        .square()
    )
    A, B = (1 + u).prod(0).rsqrt(), (1 + 2 * u).prod(0).rsqrt()
    expected = 3 * (1 - 2 * A + B) / (1 - A).square()
    off = ~torch.eye(len(X), dtype=torch.bool)
    torch.testing.assert_close(
        increment_kurtosis(kernel, X)[off], expected[off], rtol=1e-9, atol=0.0
    )


@EACH
def test_the_kurtosis_tends_to_its_value_for_equal_points(name):
    outer, width = OUTERS[name]
    kernel = composed(outer, INNER, width=width)
    near = torch.tensor([[0.0], [1e-5]], dtype=torch.float64)
    found = increment_kurtosis(kernel, near)
    torch.testing.assert_close(found[0, 1], found[0, 0], rtol=1e-6, atol=0.0)


def test_a_wide_middle_makes_the_increments_gaussian():
    found = [
        increment_kurtosis(composed(RBF(w**0.5), INNER, width=w), X)[0, 1] for w in (1, 10, 1000)
    ]
    assert found[0] > found[1] > found[2] > 3
    assert found[2] == pytest.approx(3.0, abs=0.02)


def test_it_can_be_conditioned_and_tuned():
    x = torch.linspace(-2, 2, 20, dtype=torch.float64)[:, None]
    noise = torch.randn(20, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data = x, torch.sin(2 * x) + 0.1 * noise

    def build(lengthscale, noise_var):
        return n2g.condition(composed(RBF(lengthscale), INNER), data, n2g.Gaussian(noise_var))

    start, tuned = build(2.0, 0.1), n2g.tune(build, lengthscale=2.0, noise_var=0.1)
    assert tuned.log_marginal_likelihood() > start.log_marginal_likelihood() + 1
    error = tuned.predict(x).mean - torch.sin(2 * x)
    assert error.square().mean().sqrt() < 0.1


def test_inputs_that_have_no_composition_are_refused():
    network = torch.nn.Linear(1, 2)
    with pytest.raises(InputError, match=r"squared-exponential outer kernel.*n2g\.RBF"):
        composed(composed(RBF(), RBF()), RBF())
    with pytest.raises(InputError, match="a kernel as inner"):
        composed(RBF(), network)
    with pytest.raises(InputError, match=r"outputs are correlated.*trace_kernel"):
        composed(RBF(), n2g.linearize(network.eval()).kernel())(torch.zeros(2, 1))
    with pytest.raises(InputError, match="one for each of the width = 2"):
        composed(RBF(torch.ones(3)), RBF(), width=2)
    with pytest.raises(InputError, match="width"):
        composed(RBF(), RBF(), width=0)
