"""What a posterior refuses where a kernel of a user would fail or give something else."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import net2gp as n2g
from net2gp.errors import InputError, NotAvailable
from net2gp.kernels import BaseFeatureKernel, BaseKernel
from posteriors.ways import network, points, real_targets

X = points(6)
Y = real_targets(X, 2)
Z = points(4, seed=5)


@dataclass(frozen=True)
class Waves(BaseKernel):
    """A kernel without checks of its own."""

    def __call__(self, x, y=None):
        gaps = x[:, None] - (x if y is None else y)
        return torch.exp(-2 * torch.sin(gaps).square().sum(-1))

    def diag(self, x):
        return torch.ones_like(x[:, 0])


@dataclass(frozen=True)
class Lines(BaseFeatureKernel):
    """A kernel by its features, without checks of its own."""

    num_features = 2

    def features(self, x):
        return x[:, None]


KERNELS = {"matrix": Waves(), "scaled": 2.0 * Waves(), "features": Lines()}
CALLS = {
    "mean": lambda p, x: p.mean(x),
    "centered": lambda p, x: p.centered(x),
    "marginal": lambda p, x: p.marginal(x),
    "joint": lambda p, x: p.joint(x),
    "predict": lambda p, x: p.predict(x),
    "novelty": lambda p, x: p.novelty(x),
    "sample": lambda p, x: p.sample(x, 2),
}
POINTS = {
    "a dict": {"x": Z},
    "a tuple": (Z, Z),
    "an axis more": Z[:, :, None],
    "an axis less": Z[:, 0],
}


def conditioned(kernel):
    return n2g.condition(kernel, (X, Y), n2g.Gaussian(0.1))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", POINTS)
def test_points_have_the_form_of_the_training_inputs(kernel, call, name):
    posterior = conditioned(KERNELS[kernel])
    with pytest.raises(InputError, match=r"form of the training inputs, .*shape \(6, 2\)"):
        CALLS[call](posterior, POINTS[name])
    CALLS[call](posterior, Z)


@pytest.mark.parametrize("kernel", KERNELS)
def test_groups_have_an_axis_more_than_the_training_inputs(kernel):
    posterior = conditioned(KERNELS[kernel])
    for x in (Z, Z[:1]):
        with pytest.raises(InputError, match=r"with batch=True .* Pass x\[None\] for one group"):
            posterior.joint(x, batch=True)
    with pytest.raises(InputError, match="form of the training inputs"):
        posterior.joint({"x": Z[None]}, batch=True)
    for x in (None, 1.0, [Z]):
        with pytest.raises(InputError, match="x must be a tensor, or a tuple or dict of tensors"):
            posterior.joint(x, batch=True)
    assert posterior.joint(Z[None], batch=True).batch_shape == (1,)


def test_a_network_decides_for_itself_which_inputs_it_takes():
    posterior = n2g.condition(n2g.linearize(network(2)).kernel(), (X, Y), n2g.Gaussian(0.1))
    torch.testing.assert_close(posterior.mean((Z,)), posterior.mean(Z))


@pytest.mark.parametrize("given", ["a", 0.1, n2g.Gaussian])
def test_what_predicts_is_a_likelihood(given):
    posterior = conditioned(Waves())
    for call in (posterior.predict, posterior.split):
        with pytest.raises(
            InputError, match=r"likelihood (must be e.g.|is the class.*) Gaussian\("
        ):
            call(Z, likelihood=given)


@pytest.mark.filterwarnings("ignore::net2gp.errors.NotStationary")
def test_the_factor_of_a_temperature_is_one_number():
    posterior = n2g.laplace(network(2), (X, Y), n2g.Gaussian(0.1), prior_var=1.0)
    with pytest.raises(InputError, match=r"factor must be one number, but has shape \(2,\)"):
        posterior.tempered(torch.tensor([2.0, 3.0]))
    twice = posterior.tempered(torch.tensor(2.0)).marginal(Z).variance
    torch.testing.assert_close(twice, 2 * posterior.marginal(Z).variance)


def test_a_refusal_names_the_kernel_that_the_user_wrote():
    posterior = n2g.condition(Waves(), (X, (Y[:, :1] > 0).double()), n2g.Bernoulli())
    with pytest.raises(NotAvailable, match="but the kernel is Waves"):
        posterior.dual()
    classes = n2g.condition(Waves(), (X, torch.arange(6) % 3), n2g.Categorical())
    with pytest.raises(NotAvailable, match="but the kernel is Waves"):
        classes.dual()
    with pytest.raises(NotAvailable, match="but the kernel is Waves"):
        _ = classes.linearized
