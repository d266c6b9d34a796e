"""Dropout: masks as functions, and the mixtures that it is a variational inference with."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional as F

import net2gp as n2g
from net2gp.bayes import (
    DropoutMixture,
    MaskedMembers,
    Model,
    NormalPrior,
    draw_masks,
    drop_units,
    dropout_elbo,
    mc_dropout,
)
from net2gp.errors import InputError, NetworkError, NotAvailable
from net2gp.likelihoods import Categorical, Gaussian
from net2gp.linear import linearize

DOUBLE = torch.float64


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=DOUBLE)


def filled(network: nn.Module) -> nn.Module:
    """The network with repeatable parameters."""
    generator = seeded()
    with torch.no_grad():
        for value in network.parameters():
            value.copy_(0.5 * torch.randn(value.shape, generator=generator, dtype=DOUBLE))
    return network


def dropping(drop: float = 0.4) -> nn.Sequential:
    layers = (nn.Linear(3, 8), nn.ReLU(), nn.Dropout(drop), nn.Linear(8, 2))
    return filled(nn.Sequential(*layers).double())


def points() -> tuple[Tensor, Tensor]:
    return random(6, 3, seed=5), random(6, 2, seed=6)


class Functional(nn.Module):
    """Dropout as a function that a network calls with its own mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(torch.relu(self.norm(self.first(x))), 0.4, self.training)
        return self.last(F.dropout(h, p=0.0, training=self.training))


def test_masked_units_have_the_mean_of_the_unit_and_raw_masks_keep_times_it():
    drop, h = 0.4, random(1, 5).abs() + 1
    network = nn.Sequential(nn.Identity(), nn.Dropout(drop), nn.Linear(5, 1)).double().eval()
    members = draw_masks(linearize(network), h, 20000)
    mask = members.values["dropout 0"]
    error = (drop * (1 - drop) / len(mask)) ** 0.5
    # E[z h] = (1 − p) h, with the keep probability 1 − p
    assert (((mask * h).mean(0) - (1 - drop) * h[0]).abs() < 5 * error * h[0]).all()
    # torch divides by it in training, so that the network itself is the mean over masks of a linear layer
    outputs = members(h)
    assert (
        float((outputs.mean(0) - network(h).detach()).abs()) < 5 * float(outputs.std()) / 20000**0.5
    )


def test_a_mask_of_hidden_units_drops_rows_in_front_and_columns_behind():
    network, (x, _) = dropping(), points()
    members = draw_masks(linearize(network.eval()), x, 7)
    for index, mask in enumerate(members.values["dropout 0"]):
        scale = mask.to(DOUBLE) / 0.6
        columns = drop_units(network[3], inputs=scale)(torch.relu(network[0](x)))
        rows = network[3](torch.relu(drop_units(network[0], outputs=scale)(x)))
        torch.testing.assert_close(members(x)[index], columns, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(members(x)[index], rows, rtol=1e-12, atol=1e-12)
        assert (drop_units(network[3], inputs=mask).weight[:, ~mask] == 0).all()
    with pytest.raises(InputError, match=r"inputs must have shape \(8,\)"):
        drop_units(network[3], inputs=torch.ones(3))


def test_each_point_has_the_moments_of_dropout_in_training_mode():
    network, (x, y) = dropping(), points()
    posterior = mc_dropout(network, (x, y), Gaussian(0.1), num_samples=20000)
    torch.manual_seed(0)
    network.train()
    draws = torch.stack([network(x.repeat(400, 1)).detach().reshape(400, 6, 2) for _ in range(50)])
    plain = draws.flatten(0, 1)
    own = posterior.process.values(x)
    for power in (1, 2):
        a, b = own**power, plain**power
        error = ((a.var(0) + b.var(0)) / 20000).sqrt()
        assert ((a.mean(0) - b.mean(0)).abs() < 5 * error).all()


def test_a_draw_is_a_function_that_does_not_depend_on_the_other_points():
    network, (x, y) = dropping(), points()
    posterior = mc_dropout(network, (x, y), Gaussian(0.1), num_samples=50)
    functions = posterior.sample_functions(4, generator=seeded())
    whole = functions(x)
    assert torch.equal(whole, functions(x))
    torch.testing.assert_close(functions(x[2:3]), whole[:, 2:3], rtol=1e-12, atol=1e-12)
    covariance = posterior.joint(x).covariance_matrix
    values = posterior.process.values(x).flatten(1)
    torch.testing.assert_close(covariance, torch.cov(values.mT, correction=0))
    assert covariance[0, 2].abs() > 1e-3  # points share masks, and so they depend on each other
    wide = mc_dropout(network, (x, y), Gaussian(0.1)).marginal(torch.cat([x, 20 * x])).variance
    assert wide[6:].mean() > 50 * wide[:6].mean()


def test_batch_norm_stays_and_functional_dropout_is_found_in_any_mode():
    network = filled(Functional().double())
    network.norm.running_mean += 0.3
    x, y = points()
    for mode in (True, False):
        network.train(mode)
        posterior = mc_dropout(network, (x, y), Gaussian(0.1), num_samples=5)
        members = posterior.process.members
        assert members.sites == (("units", 0.4),)
        h = torch.relu(network.eval().norm(network.first(x)))
        for index, mask in enumerate(members.values["dropout 0"]):
            want = network.last(h * mask / 0.6)
            torch.testing.assert_close(posterior.process.values(x)[index], want)
        network.train(mode)
        assert posterior.mean(x).shape == (6, 2)
        assert network.training is mode
    assert float((network.norm.running_mean - 0.3).abs().max()) == 0


KINDS = {
    "units": (nn.Dropout(0.3), (4, 3, 3)),
    "channels": (nn.Dropout2d(0.3), (4, 1, 1)),
    "alpha units": (nn.AlphaDropout(0.3), (4, 3, 3)),
    "alpha channels": (nn.FeatureAlphaDropout(0.3), (4, 1, 1)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_dropout_has_its_mask_and_its_moments(kind):
    layer, shape = KINDS[kind]
    network = nn.Sequential(nn.Identity(), layer, nn.Flatten(), nn.Linear(36, 1)).double().eval()
    members = draw_masks(linearize(network), random(1, 4, 3, 3), 4000)
    assert members.sites == ((kind, 0.3),)
    assert members.values["dropout 0"].shape == (4000, *shape)
    network[3] = nn.Identity()
    silent = nn.Sequential(layer, nn.Flatten(), nn.Linear(36, 36, bias=False)).double()
    with torch.no_grad():
        silent[2].weight.copy_(torch.eye(36))
    x = random(1, 4, 3, 3)
    own = draw_masks(linearize(silent.eval()), x, 4000)(x)[:, 0]
    torch.manual_seed(0)
    plain = layer.train()(x.expand(4000, -1, -1, -1)).flatten(1)
    layer.eval()
    for a, b in ((own, plain), (own**2, plain**2)):
        error = ((a.var(0) + b.var(0)) / 4000).sqrt()
        assert ((a.mean(0) - b.mean(0)).abs() < 5 * error).all()


def test_it_has_the_surface_of_all_posteriors_and_is_saved(tmp_path):
    network, x = dropping().eval(), points()[0]
    y = torch.tensor([0, 1, 0, 1, 1, 0])
    posterior = mc_dropout(network, (x, y), Categorical(), num_samples=20)
    probs = torch.softmax(posterior.process.values(x), -1).mean(0)
    torch.testing.assert_close(posterior.predict(x).probs, probs)
    split = posterior.split(x)
    torch.testing.assert_close(split.epistemic + split.aleatoric, probs * (1 - probs))
    posterior.save(tmp_path / "dropout.safetensors")
    again = n2g.load(tmp_path / "dropout.safetensors", dropping())
    assert torch.equal(again.predict(x).probs, posterior.predict(x).probs)
    assert posterior.to(dtype=torch.float32).mean(x.float()).dtype == torch.float32
    assert "mc_dropout" in repr(posterior)
    one = next(posterior.process.members.each())
    torch.testing.assert_close(one(x), posterior.process.values(x)[0])
    mixed = n2g.bayes.mixture([posterior, again])
    torch.testing.assert_close(mixed.mean(x), posterior.mean(x))
    moved = x.clone().requires_grad_()
    assert torch.autograd.grad(posterior.mean(moved).sum(), moved)[0].abs().sum() > 0


def test_what_cannot_be_done_is_refused_by_name():
    x, y = points()
    with pytest.raises(NetworkError, match=r"\(Sequential\) does not call dropout with a positive"):
        mc_dropout(nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.0)).double(), (x, y), Gaussian(0.1))
    with pytest.raises(InputError, match="dropout does not learn it"):
        mc_dropout(dropping(), (x, y), Gaussian())

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(F.dropout(x.T, 0.5, self.training).T)

    with pytest.raises(NetworkError, match="first axis does not count the 2 points"):
        mc_dropout(Flat().double(), (random(3, 3), y[:3]), Gaussian(0.1))
    posterior = mc_dropout(dropping(), (x, y), Gaussian(0.1), num_samples=3)
    with pytest.raises(NotAvailable, match="share their parameters"):
        posterior.sample_weights(2)
    with pytest.raises(NotAvailable, match="has no prior"):
        posterior.novelty(x)
    members = posterior.process.members
    with pytest.raises(InputError, match="masks for each of 2 places"):
        MaskedMembers(members.architecture, members.values, members.sites * 2)


EXAMPLE = DropoutMixture(torch.tensor([[1.2]], dtype=DOUBLE), 0.25, 0.3)


def test_the_divergence_of_a_mixture_is_the_known_number_and_the_average_over_draws():
    assert float(EXAMPLE.divergence(1.0)) == pytest.approx(0.454667439, abs=1e-9)
    estimate = EXAMPLE.drawn_divergence(1.0, num_samples=20000, generator=seeded())
    assert abs(float(estimate.value) - 0.454667439) < 4 * float(estimate.error)
    assert float(estimate.error) < 0.02


def test_the_divergence_is_the_integral_on_a_grid():
    q = DropoutMixture(torch.tensor([0.7], dtype=DOUBLE), 0.16, 0.2)
    grid = torch.linspace(-8, 8, 40001, dtype=DOUBLE)
    kept, gone, prior = (
        Normal(torch.tensor(m, dtype=DOUBLE), v**0.5)
        for m, v in ((0.7, 0.16), (0.0, 0.16), (0.0, 1.5))
    )
    density = 0.8 * kept.log_prob(grid).exp() + 0.2 * gone.log_prob(grid).exp()
    log_prior = prior.log_prob(grid)
    integrand = torch.where(density > 0, density * (density.clamp_min(1e-300).log() - log_prior), 0)
    want = torch.trapezoid(integrand, grid)
    assert float(q.divergence(1.5)) == pytest.approx(float(want), abs=1e-9)
    torch.testing.assert_close(q.log_prob(grid[:, None]).exp(), density)
    never = DropoutMixture(torch.tensor([0.7], dtype=DOUBLE), 0.16, 0.0)
    exact = float(torch.distributions.kl_divergence(kept, prior))
    assert float(never.divergence(1.5)) == pytest.approx(exact, abs=1e-9)


@pytest.mark.parametrize("axis", [0, 1])
def test_units_of_several_weights_are_dropped_together(axis):
    q = DropoutMixture(random(3, 4, seed=1), 0.09, 0.35, axis)
    draws = q.sample(40000, seeded())
    other = 1 - axis
    # where a unit is dropped all of its weights are near zero: fourth moments between them show it
    torch.testing.assert_close(draws.mean(0), 0.65 * q.mean, rtol=0, atol=0.03)
    a, b = draws.select(other + 1, 0), draws.select(other + 1, 1)
    m, n = q.mean.select(other, 0), q.mean.select(other, 1)
    want = 0.35 * 0.65 * m * n
    torch.testing.assert_close((a * b).mean(0) - a.mean(0) * b.mean(0), want, rtol=0, atol=0.05)
    estimate = q.drawn_divergence(0.8, num_samples=20000, generator=seeded(2))
    assert abs(float(estimate.value - q.divergence(0.8))) < 4 * float(estimate.error)


def linear_problem() -> tuple[Model, Tensor, Tensor]:
    x = random(20, 5)
    y = x @ random(5, 1, seed=2) + 0.5 * random(20, 1, seed=3)
    return Model.of(nn.Linear(5, 1, bias=False).double(), Gaussian(0.25), 1.0), x, y


@pytest.mark.parametrize("drop", [0.0, 0.1, 0.5])
def test_the_bound_is_that_of_the_closed_form_and_below_the_evidence(drop):
    model, x, y = linear_problem()
    precision = x.mT @ x / 0.25 + torch.eye(5, dtype=DOUBLE)
    best = torch.linalg.solve(precision, x.mT @ y / 0.25).mT
    q = DropoutMixture(best, float(1 / precision.diagonal().mean()), drop, axis=1)
    bound = dropout_elbo({"weight": q}, model, (x, y), num_samples=1000, generator=seeded())
    mean, spread = (1 - drop) * best, q.variance + drop * (1 - drop) * best.square()
    squares = (y - x @ mean.mT).square().sum() + (x.square() @ spread.mT).sum()
    exact = -0.5 * squares / 0.25 - 10 * math.log(2 * math.pi * 0.25) - q.divergence(1.0)
    assert abs(float(bound.value - exact)) < 4 * float(bound.error)
    covariance = x @ x.mT + 0.25 * torch.eye(20, dtype=DOUBLE)
    law = torch.distributions.MultivariateNormal(torch.zeros(20, dtype=DOUBLE), covariance)
    assert float(exact) < float(law.log_prob(y[:, 0]))
    # the same prior by draws, since it is not one number
    other = Model.of(
        model.architecture, Gaussian(0.25), NormalPrior(torch.ones(1, 5, dtype=DOUBLE))
    )
    drawn = dropout_elbo({"weight": q}, other, (x, y), num_samples=1000, generator=seeded())
    assert abs(float(drawn.value - exact)) < 4 * float(drawn.error)


def test_mixtures_and_bounds_refuse_what_they_cannot_use():
    model, x, y = linear_problem()
    with pytest.raises(InputError, match="drop must be at least 0 and less than 1"):
        DropoutMixture(torch.zeros(2), 1.0, 1.0)
    with pytest.raises(InputError, match="whose axis 2 counts units"):
        DropoutMixture(torch.zeros(2, 2), 1.0, 0.5, axis=2)
    with pytest.raises(InputError, match="a mixture for each parameter, of its shape"):
        dropout_elbo({}, model, (x, y))
    flat = Model.of(model.architecture, Gaussian(0.25), None)
    with pytest.raises(InputError, match="a prior and the temperature 1"):
        dropout_elbo({"weight": DropoutMixture(torch.zeros(1, 5), 1.0, 0.5)}, flat, (x, y))
