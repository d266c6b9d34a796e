"""Mean-field variational inference: exact optima, unbiased gradients, and what it refuses."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

import net2gp as n2g
from net2gp.bayes import (
    GaussianWeights,
    LaplacePrior,
    Model,
    NormalPrior,
    elbo,
    linearized_mean_field,
    mean_field,
)
from net2gp.bayes.variational.ascent import Ascent, Settings
from net2gp.bayes.variational.bound import Passes
from net2gp.bayes.variational.noisy_pass import Spread, find_uses
from net2gp.errors import InputError, NetworkError, NotAvailable
from net2gp.likelihoods import Categorical, Gaussian
from net2gp.linear import linearize

DOUBLE = torch.float64
ESTIMATORS = pytest.mark.parametrize("estimator", ["local", "flipout", "weights"])


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=DOUBLE)


def linear_data() -> tuple[Tensor, Tensor]:
    x = random(40, 5) @ (torch.eye(5, dtype=DOUBLE) + 0.3 * random(5, 5, seed=1))
    return x, x @ random(5, 1, seed=2) + 0.5 * random(40, 1, seed=3)


def linear_network() -> nn.Module:
    return nn.Linear(5, 1, bias=False).double()


def closed_form(prior_var: float, noise: float) -> tuple[Tensor, Tensor]:
    """The mean and the precision of the posterior of five weights."""
    x, y = linear_data()
    precision = x.mT @ x / noise + torch.eye(5, dtype=DOUBLE) / prior_var
    return torch.linalg.solve(precision, x.mT @ y / noise).mT, precision


def filled(network: nn.Module, seed: int = 0) -> nn.Module:
    """The network with repeatable parameters."""
    generator = seeded(seed)
    with torch.no_grad():
        for value in network.parameters():
            value.copy_(0.5 * torch.randn(value.shape, generator=generator, dtype=DOUBLE))
    return network


def images_network() -> nn.Module:
    layers = (nn.Conv2d(1, 2, 2), nn.Tanh(), nn.ConvTranspose2d(2, 2, 2, bias=False), nn.Flatten())
    return filled(nn.Sequential(*layers, nn.Linear(18, 2)).double()).eval()


def vector_network() -> nn.Module:
    layers = (nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return filled(nn.Sequential(*layers).double()).eval()


class Sequences(nn.Module):
    """A linear layer along a sequence, a norm, and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.along, self.norm, self.twice = nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 4)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(torch.tanh(self.along(x)))
        return self.out(torch.tanh(self.twice(self.twice(h.mean(1)))))


NETWORKS = {
    "vectors": (vector_network, (6, 3)),
    "images": (images_network, (12, 1, 3, 3)),
    "sequences": (lambda: filled(Sequences().double()).eval(), (6, 4, 3)),
}


@ESTIMATORS
def test_the_optimum_of_a_linear_model_is_the_posterior_mean_and_the_inverse_diagonal(estimator):
    mean, precision = closed_form(2.0, 0.25)
    count = 128 if estimator == "local" else 1024
    options = {"num_steps": 250, "learning_rate": 0.1, "num_samples": count, "initial_var": 0.01}
    posterior = mean_field(
        linear_network(), linear_data(), Gaussian(0.25), prior=2.0, estimator=estimator, **options
    )
    q, wide = posterior.recipe.weights, 1 / precision.diagonal()
    assert ((q.mean["weight"] - mean).abs() < 0.03 * wide.sqrt()).all()
    torch.testing.assert_close(q.variance["weight"][0], wide, rtol=0.02, atol=0)


def test_a_temperature_multiplies_the_variances_of_a_linear_model():
    _, precision = closed_form(2.0, 0.25)
    options = {"num_steps": 200, "learning_rate": 0.1, "num_samples": 64, "initial_var": 0.01}
    cold = mean_field(
        linear_network(), linear_data(), Gaussian(0.25), prior=2.0, temperature=0.3, **options
    )
    variance = cold.recipe.weights.variance["weight"][0]
    torch.testing.assert_close(variance, 0.3 / precision.diagonal(), rtol=0.04, atol=0)
    assert cold.temperature == 0.3


def test_open_noise_is_learned_to_where_the_bound_has_no_slope():
    x, y = linear_data()
    options = {"num_steps": 250, "learning_rate": 0.1, "num_samples": 16, "initial_var": 0.01}
    posterior = mean_field(linear_network(), (x, y), Gaussian(), **options)
    q = posterior.recipe.weights
    # E_q (y − f)², the optimum of the noise for this q
    spread = (x.square() @ q.variance["weight"].mT).mean()
    best = (y - x @ q.mean["weight"].mT).square().mean() + spread
    assert posterior.likelihood.noise_var == pytest.approx(float(best), rel=0.02)


@pytest.mark.parametrize("name", NETWORKS)
@ESTIMATORS
def test_outputs_have_the_law_of_the_network_at_drawn_weights(name, estimator):
    make, shape = NETWORKS[name]
    model, x = Model.of(make(), Gaussian(1.0)), random(*shape, seed=5)
    deviations = {n: torch.full_like(v, 0.3) for n, v in model.params.items()}
    passes, count = Passes.of(model, estimator, x), 4000
    draw = lambda _: passes.outputs(model.params, Spread(deviations, False), x, generator)
    generator = seeded(1)
    own = torch.func.vmap(draw, randomness="different")(torch.zeros(count))
    q = GaussianWeights(model.params, {n: v.square() for n, v in deviations.items()})
    weights = q.sample(count, seeded(2))
    plain = torch.func.vmap(lambda part: model.architecture.run(part, x))(weights)
    for power in (1, 2):  # both moments of every output, within 5 standard errors
        a, b = own**power, plain**power
        error = ((a.var(0) + b.var(0)) / count).sqrt()
        assert ((a.mean(0) - b.mean(0)).abs() < 5 * error).all()
    # outputs of one point depend on each other as they do at drawn weights
    a, b = own[..., 0] * own[..., 1], plain[..., 0] * plain[..., 1]
    assert ((a.mean(0) - b.mean(0)).abs() < 5 * ((a.var(0) + b.var(0)) / count).sqrt()).all()


def test_the_layers_with_noise_per_point_are_those_that_use_a_weight_once():
    x = random(5, 4, 3)
    uses = find_uses(linearize(NETWORKS["sequences"][0]()), x)
    assert uses.once == {"along.weight", "along.bias", "out.weight", "out.bias"}
    assert not uses.hidden


class Hidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.mT

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return g @ weight, g.mT @ x


class HiddenLayer(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Hidden.apply(x, self.weight)


def test_parameters_that_torch_does_not_show_are_drawn_as_weights():
    network = HiddenLayer(5, 1, bias=False).double()
    x, y = linear_data()
    assert Passes.of(Model.of(network, Gaussian(1.0)), "local", x).estimator == "weights"
    options = {"num_steps": 20, "seed": 3}
    one = mean_field(network, (x, y), Gaussian(0.25), **options)
    other = mean_field(network, (x, y), Gaussian(0.25), estimator="weights", **options)
    assert torch.equal(one.mean(x), other.mean(x))


def gradients(estimator: str, name: str, count: int, seed: int) -> Tensor:
    """Gradients of the bound in the means and variances, one row per draw: (S, 2·P)."""
    make, shape = NETWORKS[name]
    model, x = Model.of(make(), Gaussian(1.0), num_data=30), random(*shape, seed=5)
    y, generator = random(shape[0], 2, seed=6), seeded(seed)
    passes = Passes.of(model, estimator, x)

    def bound(means, variances):
        args = (means, Spread(variances, True), (x, y), model.likelihood, generator, 1)
        return passes.log_likelihood(*args)

    variances = {n: torch.full_like(v, 0.09) for n, v in model.params.items()}
    slope = torch.func.grad(bound, argnums=(0, 1))
    each = torch.func.vmap(lambda _: slope(model.params, variances), randomness="different")
    found = each(torch.zeros(count))
    return torch.cat([v.flatten(1) for part in found for v in part.values()], 1)


@pytest.mark.parametrize("name", ["vectors", "images"])
@pytest.mark.parametrize("estimator", ["local", "flipout"])
def test_gradients_are_unbiased_with_less_variance_than_by_weight_draws(estimator, name):
    count = 4000
    own, plain = gradients(estimator, name, count, 1), gradients("weights", name, count, 2)
    error = ((own.var(0) + plain.var(0)) / count).sqrt()
    assert ((own.mean(0) - plain.mean(0)).abs() < 5 * error).all()
    assert own.var(0).sum() < 0.8 * plain.var(0).sum()


def test_the_divergence_from_a_gaussian_prior_is_torchs():
    params = {"0.weight": random(3, 2), "0.bias": random(3, seed=1)}
    variance = {name: random(*v.shape, seed=2).square() + 0.1 for name, v in params.items()}
    prior = NormalPrior({"*": 2.0, "*.bias": torch.tensor([0.1, 0.2, 0.3])})
    wide = {"0.weight": torch.tensor(2.0), "0.bias": torch.tensor([0.1, 0.2, 0.3])}
    want = sum(
        kl_divergence(Normal(m, variance[n].sqrt()), Normal(0, wide[n].to(DOUBLE).sqrt())).sum()
        for n, m in params.items()
    )
    got = GaussianWeights(params, variance).divergence(prior)
    torch.testing.assert_close(got, want, rtol=1e-7, atol=0)  # the tensor of the prior is float32


def test_the_divergence_from_another_prior_is_drawn():
    q = GaussianWeights(
        {"w": torch.tensor([0.7], dtype=DOUBLE)}, {"w": torch.tensor([0.25]).double()}
    )
    grid = torch.linspace(-6, 7, 20001, dtype=DOUBLE)
    density = Normal(0.7, 0.5).log_prob(grid)
    want = torch.trapezoid(density.exp() * (density + grid.abs() + math.log(2)), grid)
    got = q.divergence(LaplacePrior(2.0), num_samples=20000, generator=seeded())
    assert float((got - want).abs()) < 4 * 0.5 / math.sqrt(
        20000
    )  # the deviation of |w| is at most σ
    fitted = mean_field(
        linear_network(), linear_data(), Gaussian(0.25), prior=LaplacePrior(2.0), num_steps=50
    )
    assert (
        fitted.recipe.statistics["elbo"][-5:].mean() > fitted.recipe.statistics["elbo"][:5].mean()
    )


@pytest.mark.parametrize(
    "prior", [2.0, NormalPrior({"*": 1.0, "*.bias": 0.1}), LaplacePrior(2.0), None], ids=str
)
@ESTIMATORS
def test_the_gradients_of_a_step_are_those_of_the_bound(estimator, prior):
    x, y = random(7, 3), random(7, 2, seed=1)
    model = Model.of(vector_network(), Gaussian(0.3), prior, num_data=20, temperature=0.7)
    ascent = Ascent.of(Passes.of(model, estimator, x), (x, y), Settings(initial_var=0.04), False)
    value = ascent.climb((x, y), model.likelihood, seeded(3))
    means = {n: v.clone().requires_grad_() for n, v in model.params.items()}
    logs = {n: torch.full_like(v, math.log(0.2)).requires_grad_() for n, v in means.items()}
    q = GaussianWeights(means, {n: (2 * v).exp() for n, v in logs.items()})
    bound = elbo(q, model, (x, y), estimator=estimator, generator=seeded(3))
    slopes = torch.autograd.grad(-bound / 20, [*means.values(), *logs.values()])
    own = torch.cat([ascent.mean.grad, ascent.log_deviation.grad])
    torch.testing.assert_close(
        own, torch.cat([v.flatten() for v in slopes]), rtol=1e-10, atol=1e-12
    )
    torch.testing.assert_close(value, bound.detach(), rtol=1e-12, atol=1e-12)


def test_batches_give_the_bound_of_all_points_on_average():
    x, y = linear_data()
    q = GaussianWeights(
        {"weight": random(1, 5, seed=7)}, {"weight": torch.full((1, 5), 0.1, dtype=DOUBLE)}
    )
    model = Model.of(linear_network(), Gaussian(0.25), 2.0, num_data=40)
    parts = [
        elbo(q, model, (x[i : i + 10], y[i : i + 10]), num_samples=4000, generator=seeded(i))
        for i in range(0, 40, 10)
    ]
    mean = x @ q.mean["weight"].mT
    spread = (x.square() @ q.variance["weight"].mT).sum()
    expected = -0.5 * ((y - mean).square().sum() + spread) / 0.25
    expected = expected - 20 * math.log(2 * math.pi * 0.25) - q.divergence(NormalPrior(2.0))
    assert float(torch.stack(parts).mean()) == pytest.approx(float(expected), rel=0.01)
    # a quarter counted once, or the divergence counted four times, would be far away
    assert abs(float(parts[0] - parts[1])) > 0.01 * abs(float(expected))


def test_the_bound_of_the_posterior_of_one_weight_is_the_evidence():
    x, y = random(8, 1), random(8, 1, seed=1)
    precision = x.square().sum() / 0.3 + 1
    best = GaussianWeights(
        {"weight": ((x * y).sum() / 0.3 / precision).reshape(1, 1)},
        {"weight": (1 / precision).reshape(1, 1)},
    )
    model = Model.of(nn.Linear(1, 1, bias=False).double(), Gaussian(0.3))
    bound = elbo(best, model, (x, y), num_samples=20000)
    covariance = x @ x.mT + 0.3 * torch.eye(8, dtype=DOUBLE)
    law = torch.distributions.MultivariateNormal(torch.zeros(8, dtype=DOUBLE), covariance)
    assert float(bound) == pytest.approx(float(law.log_prob(y[:, 0])), abs=0.05)


def test_only_chooses_what_is_stochastic_and_leaves_the_rest():
    network, x = vector_network(), random(6, 3)
    before = {name: value.clone() for name, value in network.named_parameters()}
    y = torch.tensor([0, 1, 0, 1, 1, 0])
    posterior = mean_field(network, (x, y), Categorical(), only="2.*", num_steps=20, batch_size=4)
    assert set(posterior.recipe.weights.mean) == {"2.weight", "2.bias"}
    assert posterior.sample_weights(3)["2.weight"].shape == (3, 2, 4)
    assert all(torch.equal(before[n], v) for n, v in network.named_parameters())
    assert posterior.predict(x).probs.shape == (6, 2)


def test_a_seed_repeats_a_fit_and_no_global_state_is_touched():
    state = torch.get_rng_state()
    options = {"num_steps": 30, "batch_size": 7, "num_draws": 5}
    x, y = linear_data()
    one, again, other = (
        mean_field(linear_network_at(), (x, y), Gaussian(0.25), seed=s, **options)
        for s in (3, 3, 4)
    )
    assert torch.equal(one.mean(x), again.mean(x))
    assert not torch.equal(one.mean(x), other.mean(x))
    assert torch.equal(state, torch.get_rng_state())


def linear_network_at() -> nn.Module:
    return filled(nn.utils.skip_init(nn.Linear, 5, 1, bias=False).double())


def test_the_draws_are_of_the_gaussian_and_the_linearized_posterior_is_around_its_mean():
    x, y = linear_data()
    posterior = mean_field(linear_network(), (x, y), Gaussian(0.25), num_steps=200, num_draws=4000)
    q, around = posterior.recipe.weights, linearized_mean_field(posterior)
    draws = posterior.process.members.values["weight"]
    torch.testing.assert_close(draws.var(0), q.variance["weight"], rtol=0.12, atol=0)
    torch.testing.assert_close(around.mean(x), x @ q.mean["weight"].mT)
    want = x.square() @ q.variance["weight"].mT
    torch.testing.assert_close(around.marginal(x).variance, want)
    torch.testing.assert_close(posterior.marginal(x).variance, want, rtol=0.12, atol=0)


def test_it_is_saved_and_loaded_with_its_gaussian(tmp_path):
    network, x, y = vector_network(), random(6, 3), random(6, 2, seed=1)
    posterior = mean_field(network, (x, y), Gaussian(), num_steps=20, num_draws=5)
    posterior.save(tmp_path / "q.safetensors")
    again = n2g.load(tmp_path / "q.safetensors", vector_network())
    assert torch.equal(again.mean(x), posterior.mean(x))
    assert torch.equal(again.recipe.weights.mean["0.bias"], posterior.recipe.weights.mean["0.bias"])
    assert torch.equal(
        linearized_mean_field(again).marginal(x).variance,
        linearized_mean_field(posterior).marginal(x).variance,
    )
    assert posterior.to(dtype=torch.float32).mean(x.float()).dtype == torch.float32


def test_a_process_that_has_not_used_bayes_yet_can_load(tmp_path):
    x, y = linear_data()
    network = nn.Linear(5, 1, bias=False).double()
    posterior = mean_field(network, (x, y), Gaussian(0.25), num_steps=2, num_draws=3)
    posterior.save(tmp_path / "q.safetensors")
    code = (
        "import torch, net2gp as n2g\n"
        f"found = n2g.load({str(tmp_path / 'q.safetensors')!r}, torch.nn.Linear(5, 1, bias=False).double())\n"
        "print(float(found.mean(torch.ones(1, 5, dtype=torch.float64))))"
    )
    paths = {**os.environ, "PYTHONPATH": str(Path(n2g.__file__).parent.parent)}
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=paths
    )
    want = posterior.mean(torch.ones(1, 5, dtype=DOUBLE))
    assert float(said.stdout) == pytest.approx(float(want), rel=1e-12)


def test_optimizers_schedules_and_early_stopping():
    x, y = linear_data()
    rates = []

    def schedule(optimizer):
        rates.append(optimizer)
        return torch.optim.lr_scheduler.StepLR(optimizer, 10)

    posterior = mean_field(
        linear_network(),
        (x, y),
        Gaussian(0.25),
        num_steps=20,
        optimizer=lambda leaves: torch.optim.SGD(leaves, lr=0.01),
        schedule=schedule,
    )
    assert rates[0].param_groups[0]["lr"] == pytest.approx(1e-4)
    assert len(posterior.recipe.statistics["elbo"]) == 20
    options = {"num_steps": 5000, "learning_rate": 0.1, "patience": 50}
    short = mean_field(linear_network(), (x, y), Gaussian(0.25), **options)
    assert 100 <= len(short.recipe.statistics["elbo"]) < 2500


def test_what_cannot_be_done_is_refused_by_name():
    data = linear_data()
    fit = lambda network=None, likelihood=None, **options: mean_field(
        network or linear_network(), data, likelihood or Gaussian(0.25), num_steps=2, **options
    )
    with pytest.raises(InputError, match=r'estimator must be "local", "flipout" or "weights"'):
        fit(estimator="exact")
    with pytest.raises(NetworkError, match="Dropout would act at random"):
        fit(nn.Sequential(nn.Linear(5, 1), nn.Dropout()).double())
    with pytest.raises(InputError, match="variance has 'head"):
        fit(prior=NormalPrior({"*": 1.0, "head.*": 2.0}))
    with pytest.raises(TypeError, match="there is no option 'steps'"):
        fit(steps=3)
    with pytest.raises(InputError, match="the bound became infinite or NaN at step"):
        mean_field(
            linear_network(),
            data,
            Gaussian(1e-300),
            num_steps=3,
            optimizer=lambda leaves: torch.optim.SGD(leaves, lr=1e300),
        )
    with pytest.raises(NotAvailable, match="lower bound of the evidence"):
        fit().log_marginal_likelihood()
    with pytest.raises(NotAvailable, match="compares with a Gaussian prior"):
        linearized_mean_field(fit(prior=LaplacePrior(2.0)))
    with pytest.raises(NotAvailable, match="is for the posterior of mean_field"):
        linearized_mean_field(n2g.condition(n2g.kernels.RBF(), data, Gaussian(0.25)))
    with pytest.raises(InputError, match="mean and variance must have the same names and shapes"):
        GaussianWeights({"a": torch.zeros(2)}, {"a": torch.ones(3)})
