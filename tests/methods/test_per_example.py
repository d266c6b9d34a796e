"""Sums of per-example gradients and their squares, against a loop over examples."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from architectures import ARCHITECTURES, OUTPUTS
from methods.training import DOUBLE, random, seeded
from net2gp.errors import InputError
from net2gp.inputs import map_inputs, num_rows
from net2gp.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian
from net2gp.linear import linearize
from net2gp.linear.curvatures.curvature import EmpiricalFisher, ExactFisher
from net2gp.linear.forward.factors import Lookup, Outer, jacobian
from net2gp.linear.jacobians.capture import plan
from net2gp.methods.training.per_example import BatchSums, batch_sums, sum_of_squares
from net2gp.types import Likelihood
from reference.jacobians import brute_force_jacobian, flat


def reference(
    J: Tensor, f: Tensor, y: Tensor, likelihood: Likelihood, fisher: ExactFisher | EmpiricalFisher
) -> BatchSums:
    """Gradients of the examples one by one, from the full Jacobian, and matrices J_nᵀ Λ_n J_n."""
    gradients = torch.einsum("ncp,nc->np", J, likelihood.residual(f, y))
    if isinstance(fisher, EmpiricalFisher):
        curvature = gradients.square().sum(0)
    else:
        Lam = likelihood.curvature(f)
        curvature = torch.stack([(j.T @ lam @ j).diagonal() for j, lam in zip(J, Lam, strict=True)])
        curvature = curvature.sum(0)
    return BatchSums(likelihood.log_prob(f, y).sum(), gradients.sum(0), curvature)


def assert_same(found: BatchSums, expected: BatchSums, tolerance: float = 1e-10) -> None:
    for name in ("log_prob", "gradient", "curvature"):
        a, b = getattr(found, name), getattr(expected, name)
        assert a.shape == b.shape
        assert float((a - b).abs().max()) <= tolerance * float(b.abs().max()), name


@pytest.fixture(scope="module", params=ARCHITECTURES)
def case(request):
    network, x = ARCHITECTURES[request.param]()
    output = OUTPUTS.get(request.param)
    J = flat(brute_force_jacobian(network, x, output or (lambda out: out)))
    linearized = linearize(network, output=output)
    return linearized, x, J, plan(linearized, x)


@pytest.mark.parametrize(
    "fisher", [EmpiricalFisher(), ExactFisher()], ids=lambda f: type(f).__name__
)
def test_the_sums_are_those_of_a_loop_for_every_architecture(case, fisher):
    linearized, x, J, layout = case
    f = linearized(x)
    if f.shape[1] > 1:
        likelihood, y = Categorical(), torch.randint(f.shape[1], (len(f),), generator=seeded())
    else:
        likelihood, y = Bernoulli(), (random(len(f)) > 0).to(DOUBLE)
    found = batch_sums(linearized, (x, y), likelihood, fisher, layout)
    assert_same(found, reference(J, f, y, likelihood, fisher))


@pytest.mark.parametrize(
    "fisher", [EmpiricalFisher(), ExactFisher()], ids=lambda f: type(f).__name__
)
def test_the_sums_are_those_of_a_loop_for_every_likelihood(fisher):
    network = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double().eval()
    linearized, x, layout = linearize(network), random(7, 3), plan(linearize(network), random(7, 3))
    J, f, real = flat(brute_force_jacobian(network, x)), linearized(x), random(7, 4, seed=1)
    for likelihood, y in (
        (Gaussian(torch.tensor([0.1, 0.2, 0.3, 0.4])), real),
        (Gaussian(random(7, 1).square()), real),
        (Bernoulli(), (real > 0).to(DOUBLE)),
        (Categorical(), torch.arange(7) % 4),
        (HeteroscedasticGaussian(), real[:, :2]),
    ):
        found = batch_sums(linearized, (x, y), likelihood, fisher, layout)
        assert_same(found, reference(J, f, y, likelihood, fisher))


def test_the_gradient_is_that_of_autograd_at_other_weights_and_batches():
    """The plan of one batch serves others of another size, at other weights."""
    network, x = ARCHITECTURES["lenet_max_pool"]()
    linearized = linearize(network)
    layout = plan(linearized, map_inputs(x, lambda v: v[:3]))
    theta = linearized.flatten(linearized.params)
    moved = linearized.unflatten(theta + 0.1 * random(len(theta)))
    y = torch.arange(num_rows(x)) % 3
    at = replace(linearized, params=moved)
    sums = batch_sums(at, (x, y), Categorical(), EmpiricalFisher(), layout)
    leaves = {name: value.clone().requires_grad_() for name, value in moved.items()}
    loss = Categorical().log_prob(linearized.evaluate(leaves, x), y).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    expected = linearized.flatten(dict(zip(leaves, grads, strict=True)))
    assert float((sums.gradient - expected).abs().max()) <= 1e-10 * float(expected.abs().max())


def test_only_the_chosen_parameters_have_gradients():
    network, x = ARCHITECTURES["mlp"]()
    y = torch.arange(num_rows(x)) % 3
    whole, head = linearize(network), linearize(network, only="4.*")
    everything = batch_sums(whole, (x, y), Categorical(), ExactFisher(), plan(whole, x))
    some = batch_sums(head, (x, y), Categorical(), ExactFisher(), plan(head, x))
    assert_same(
        some,
        BatchSums(
            everything.log_prob,
            everything.gradient[-head.num_params :],
            everything.curvature[-head.num_params :],
        ),
    )


class Branching(nn.Module):
    """A bare parameter and Python that depends on the data: vmap cannot take it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3, generator=seeded(5)))
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        rows = [row * self.scale if float(row.sum()) > 0 else row - self.scale for row in x]
        return self.head(torch.stack(rows).tanh())


def test_networks_that_cannot_be_vectorized_are_looped_over():
    network = Branching().double().eval()
    linearized, x = linearize(network), random(8, 3, seed=2)
    layout = plan(linearized, x)
    assert layout.leftover == ("scale",)
    J, f = flat(brute_force_jacobian(network, x)), linearized(x)
    y = torch.arange(8) % 2
    for fisher in (ExactFisher(), EmpiricalFisher()):
        found = batch_sums(linearized, (x, y), Categorical(), fisher, layout)
        assert_same(found, reference(J, f, y, Categorical(), fisher))


def test_squares_of_a_lookup_are_those_of_its_jacobian_with_repeated_tokens_and_padding():
    ids = torch.tensor([[0, 2, 2, -1], [1, 1, 1, 3], [-1, -1, 4, 0]])
    factor = Lookup(ids, random(3, 2, 4, 3), torch.ones((), dtype=DOUBLE), 6)
    expected = jacobian(factor).square().sum((0, 1))
    torch.testing.assert_close(sum_of_squares(factor), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("places", [1, 4])
@pytest.mark.parametrize("groups", [1, 3])
def test_squares_of_an_outer_product_are_those_of_its_jacobian(places, groups, monkeypatch):
    factor = Outer(
        random(5, groups, places, 4), random(5, 2, groups, 7, places), torch.ones((), dtype=DOUBLE)
    )
    expected = jacobian(factor).square().sum((0, 1))
    # pieces of the layer's outputs at a time, as for a layer that is too large
    monkeypatch.setattr("net2gp.linear.forward.factors.CHUNK_BYTES", 5 * 2 * groups * 4 * 8 * 2)
    torch.testing.assert_close(sum_of_squares(factor), expected, rtol=1e-12, atol=1e-12)


def test_a_target_of_the_wrong_shape_is_refused():
    network, x = ARCHITECTURES["mlp"]()
    linearized = linearize(network)
    y: Tensor = torch.zeros(num_rows(x), 2, dtype=DOUBLE)
    with pytest.raises(InputError, match=r"y must have shape \(6, 3\)"):
        batch_sums(linearized, (x, y), Gaussian(1.0), ExactFisher(), plan(linearized, x))


def test_nothing_that_is_given_is_changed():
    network, x = ARCHITECTURES["lenet_max_pool"]()
    linearized, y = linearize(network), torch.arange(num_rows(x)) % 3
    before, params = x.clone(), {n: v.clone() for n, v in linearized.params.items()}
    batch_sums(linearized, (x, y), Categorical(), ExactFisher(), plan(linearized, x))
    assert torch.equal(x, before)
    assert all(torch.equal(params[n], v) for n, v in linearized.params.items())
    assert all(value.grad is None for value in network.parameters())
