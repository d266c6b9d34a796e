"""Hamiltonian Monte Carlo and NUTS: laws on models whose posterior is known."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from net2gp import bayes, condition
from net2gp.bayes import (
    Model,
    NormalPrior,
    bulk_ess,
    diagnose,
    from_arviz,
    hmc,
    nuts,
    r_hat,
    tail_ess,
    to_arviz,
)
from net2gp.bayes.chains import nuts as nuts_module
from net2gp.bayes.chains import runs
from net2gp.bayes.chains.adaptation import Metric, windows
from net2gp.bayes.chains.flat import flat_model
from net2gp.bayes.chains.perceptrons import array_perceptron
from net2gp.errors import ChainStuck, Divergences, InputError, NotAvailable, NotMixed
from net2gp.kernels import RBF
from net2gp.likelihoods import Bernoulli, Categorical, Gaussian
from net2gp.posteriors.recipes.drawn import drawn_posterior

DOUBLE = torch.float64


def linear_problem(num_data=30):
    """Five weights with a Gaussian prior, and the closed form of their posterior."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_data, 4, dtype=DOUBLE, generator=generator)
    x[:, 1] += x[:, 0]
    y = x @ torch.tensor([[1.0], [-1.0], [0.5], [2.0]], dtype=DOUBLE) + 0.3
    y = y + 0.5 * torch.randn(num_data, 1, dtype=DOUBLE, generator=generator)
    design = torch.cat([x, torch.ones(num_data, 1, dtype=DOUBLE)], 1)
    precision = design.mT @ design / 0.25 + torch.eye(5, dtype=DOUBLE) / 2.0
    covariance = torch.linalg.inv(precision)
    return (x, y), (covariance @ design.mT @ y)[:, 0] / 0.25, covariance


def draws_of(posterior):
    values = posterior.process.members.values
    return torch.cat([value.flatten(1) for value in values.values()], 1)


NOISE = Gaussian(noise_var=0.25)


class Product(nn.Module):
    """A network that is no perceptron."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 2)
        self.b = nn.Linear(3, 2)

    def forward(self, x):
        return self.a(x).tanh() * self.b(x).exp()


class Wall(nn.Module):
    """A network whose outputs grow without bound on one side only."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(-1.0))

    def forward(self, x):
        return x * (4 * self.weight).exp()


class Branching(Product):
    """A network that vmap cannot run, since it asks for a value."""

    def forward(self, x):
        return super().forward(x) if float(self.a(x).detach().sum()) > 0 else self.a(x)


NETWORKS = {
    "tanh": lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
    "relu": lambda: nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU(), nn.Linear(4, 2)),
    "gelu": lambda: nn.Sequential(nn.Linear(3, 4), nn.GELU(approximate="tanh"), nn.Linear(4, 2)),
    "deep": lambda: nn.Sequential(
        *(nn.Linear(3, 4), nn.SiLU(), nn.Linear(4, 3), nn.Sigmoid(), nn.Linear(3, 2))
    ),
    "softplus": lambda: nn.Sequential(nn.Linear(3, 4), nn.Softplus(), nn.Linear(4, 2)),
    "product": Product,
    "branching": Branching,
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("kind", ["one noise", "noise per point", "classes"])
def test_the_flat_log_joint_and_its_gradient_are_those_of_the_model(name, kind):
    torch.manual_seed(0)
    network = NETWORKS[name]()
    x = torch.randn(6, 3)
    y = torch.randint(2, (6,)) if kind == "classes" else torch.randn(6, 2)
    noise = 0.3 if kind == "one noise" else torch.rand(6, 1) + 0.1
    likelihood = Categorical() if kind == "classes" else Gaussian(noise_var=noise)
    prior = NormalPrior({"*": 2.0, "*.bias": 0.5})
    flat = flat_model(Model.of(network, likelihood, prior, temperature=0.7), (x, y))
    theta = torch.randn(3, flat.num_params, dtype=DOUBLE)
    with flat.running():
        value, grad = flat(theta)
    for row, one, slope in zip(theta, value, grad, strict=True):
        leaf = row.clone().requires_grad_()
        params = flat.model.architecture.unflatten(leaf)
        log_joint = flat.model.log_joint(params, flat.data)
        torch.testing.assert_close(one, log_joint.detach(), rtol=1e-12, atol=1e-12)
        expected = torch.autograd.grad(log_joint, leaf)[0]
        torch.testing.assert_close(slope, expected, rtol=1e-11, atol=1e-11)
    arrays = array_perceptron(flat)
    assert (arrays is not None) == (name in ("tanh", "relu") and kind != "classes")
    if arrays is not None:
        for own, other in zip(arrays(theta.numpy()), (value, grad), strict=True):
            np.testing.assert_allclose(own, other, rtol=1e-11, atol=1e-11)
    assert flat.vectorized == (name != "branching")
    assert (flat.stacked is not None) == (name in ("tanh", "relu", "gelu", "deep"))


def test_a_batch_counts_as_often_as_it_stands_for_all_data():
    (x, y), _, _ = linear_problem()
    flat = flat_model(Model.of(nn.Linear(4, 1).double(), NOISE), (x, y))
    theta = torch.randn(2, 5, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    for form in (flat, replace(flat, stacked=None)):
        with form.running():
            parts = [form(theta, (x[i : i + 10], y[i : i + 10])) for i in (0, 10, 20)]
            value, grad = form(theta)
        torch.testing.assert_close(sum(p[0] for p in parts) / 3, value)
        torch.testing.assert_close(sum(p[1] for p in parts) / 3, grad)


def test_fixed_parameters_stay_and_shared_layers_are_not_taken_for_perceptrons():
    torch.manual_seed(0)
    layer = nn.Linear(3, 3)
    shared = nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(3, 1)).double()
    x, y = torch.randn(5, 3, dtype=DOUBLE), torch.randn(5, 1, dtype=DOUBLE)
    flat = flat_model(Model.of(shared, NOISE), (x, y))
    assert flat.stacked is None
    head = Model.of(
        nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double(), NOISE, only="2.*"
    )
    closed = flat_model(head, (x, y))
    theta = torch.randn(2, 5, dtype=DOUBLE)
    with closed.running():
        one = closed(theta)
    plain = replace(closed, stacked=None)
    with plain.running():
        other = plain(theta)
    assert closed.stacked is not None
    torch.testing.assert_close(one, other)
    for own, plain in zip(array_perceptron(closed)(theta.numpy()), one, strict=True):
        np.testing.assert_allclose(own, plain, rtol=1e-11)


def test_the_places_of_kept_leaves_are_those_of_a_recursion():
    place, compare = nuts_module._levels(4)

    def firsts(leaf):
        """First leaves of the balanced subtrees with two leaves or more that end at this one."""
        return {leaf + 1 - 2**k for k in range(1, 5) if (leaf + 1) % 2**k == 0}

    kept = {}
    for leaf in range(16):
        if leaf % 2 == 0:
            kept[int(place[leaf])] = leaf
        else:
            assert int(place[leaf]) == 4
        assert {kept[int(at)] for at in compare[leaf].nonzero()[0]} == firsts(leaf)


@pytest.mark.parametrize(
    ("method", "mass"), [(hmc, "diagonal"), (nuts, "diagonal"), (nuts, "dense")]
)
def test_chains_of_a_linear_model_have_the_moments_of_the_closed_form(method, mass):
    data, mean, covariance = linear_problem()
    posterior = method(
        nn.Linear(4, 1).double(), data, NOISE,
        prior=2.0, num_draws=150, num_chains=32, warmup=120, mass=mass,
    )  # fmt: skip
    draws = draws_of(posterior)
    chains = draws.reshape(32, 150, 5)
    size = bulk_ess(chains)
    assert float(size.min()) > 400
    error = (draws.mean(0) - mean).abs() / (covariance.diagonal() / size).sqrt()
    assert float(error.max()) < 4
    root = torch.linalg.cholesky(covariance)
    whitened = torch.linalg.solve_triangular(root, (draws - mean).mT, upper=False)
    spread = whitened @ whitened.mT / len(draws)
    assert float((spread - torch.eye(5, dtype=DOUBLE)).abs().max()) < 5 * math.sqrt(
        2 / float(size.min())
    )
    assert int(posterior.recipe.statistics["divergences"].sum()) == 0


@pytest.mark.parametrize("method", [hmc, nuts])
def test_a_skewed_posterior_has_the_moments_of_quadrature(method):
    x = torch.ones(3, 1, dtype=DOUBLE)
    y = torch.tensor([[1.0], [1.0], [1.0]], dtype=DOUBLE)
    posterior = method(
        nn.Linear(1, 1, bias=False).double(), (x, y), Bernoulli(),
        prior=25.0, num_draws=150, num_chains=64, warmup=100, temperature=0.5,
    )  # fmt: skip
    grid = torch.linspace(-30, 60, 20001, dtype=DOUBLE)
    log_joint = (3 * nn.functional.logsigmoid(grid) - grid.square() / 50) / 0.5
    weight = (log_joint - log_joint.max()).exp()
    weight = weight / weight.sum()
    draws = draws_of(posterior).reshape(64, 150)
    for power in (1, 2):
        exact = (weight * grid**power).sum()
        spread = ((weight * grid ** (2 * power)).sum() - exact**2).sqrt()
        error = (draws**power).mean() - exact
        assert abs(float(error / spread)) < 4.5 / float(bulk_ess(draws**power)) ** 0.5


@pytest.mark.parametrize("method", [hmc, nuts])
@pytest.mark.parametrize("stop", [3, 12])
def test_a_killed_run_goes_on_to_the_same_draws(method, stop, tmp_path, monkeypatch):
    data, _, _ = linear_problem(8)
    network = nn.Linear(4, 1).double()
    options = {"num_draws": 30, "num_chains": 3, "warmup": 30, "seed": 5}
    monkeypatch.setattr(nuts_module, "Trees", partial(nuts_module.Trees, block=7))
    whole = method(network, data, NOISE, **options)
    kept = {"checkpoint": tmp_path / "chain.safetensors", "checkpoint_seconds": 0.0}
    write, calls = runs.Run._write, []

    def killed(self, *arguments):
        write(self, *arguments)
        calls.append(1)
        if len(calls) == stop:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runs.Run, "_write", killed)
        with pytest.raises(KeyboardInterrupt):
            method(network, data, NOISE, **options, **kept)
    again = method(network, data, NOISE, **options, **kept)
    assert torch.equal(draws_of(again), draws_of(whole))
    for name, value in whole.recipe.statistics.items():
        assert torch.equal(again.recipe.statistics[name], value)
    monkeypatch.setattr(runs.Run, "_part", lambda *a: pytest.fail("the file has all draws"))
    assert torch.equal(draws_of(method(network, data, NOISE, **options, **kept)), draws_of(whole))
    with pytest.raises(InputError, match="belongs to another problem"):
        method(network, data, NOISE, **{**options, "seed": 6}, **kept)


def test_the_seed_decides_and_global_random_numbers_do_not():
    data, _, _ = linear_problem(6)
    options = {"num_draws": 10, "num_chains": 2, "warmup": 20}
    network = nn.Linear(4, 1).double()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = draws_of(nuts(network, data, NOISE, **options))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(one, draws_of(nuts(network, data, NOISE, **options)))
    assert not torch.equal(one, draws_of(nuts(network, data, NOISE, **options, seed=1)))


def test_draws_have_the_dtype_of_the_network_and_chains_follow_each_other():
    data, _, _ = linear_problem()
    single = tuple(part.float() for part in data)
    network = nn.Linear(4, 1)
    posterior = hmc(network, single, NOISE, num_draws=20, num_chains=3, warmup=40)
    assert posterior.recipe.num_chains == 3
    assert len(posterior.process.members) == 60
    assert posterior.mean(single[0]).dtype == torch.float32
    start = {n: v.detach().expand(3, *v.shape) + 0.1 for n, v in network.named_parameters()}
    moved = hmc(
        network, single, NOISE, num_draws=2, num_chains=3, warmup=0, step_size=1e-7, start=start
    )
    near = draws_of(moved).reshape(3, 2, 5)
    expected = torch.cat([v.detach().flatten() for v in network.parameters()]) + 0.1
    assert float((near - expected).abs().max()) < 0.01


def test_a_metric_gives_the_gradient_in_its_own_coordinates():
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(4, 4, dtype=DOUBLE, generator=generator).tril() + 3 * torch.eye(4)
    theta = torch.randn(2, 4, dtype=DOUBLE, generator=generator).numpy()
    for one in (root, root.diagonal().abs()):
        metric = Metric(one.numpy())
        z = metric.locate(theta)
        np.testing.assert_allclose(metric.place(z), theta, rtol=1e-12)
        leaf = torch.tensor(z, requires_grad=True)
        placed = leaf * one if one.dim() == 1 else leaf @ one.mT
        (-0.5 * placed.square().sum()).backward()
        value, grad = metric.density(lambda t: (-0.5 * (t**2).sum(1), -t))(z)
        np.testing.assert_allclose(grad, leaf.grad, rtol=1e-12)
        np.testing.assert_allclose(value, -0.5 * (theta**2).sum(1), rtol=1e-12)


@pytest.mark.parametrize("warmup", [0, 1, 19, 20, 60, 149, 150, 500, 1000])
def test_the_windows_add_up_to_the_warmup(warmup):
    assert sum(length for length, _ in windows(warmup)) == warmup


def test_hopeless_chains_are_errors_and_divergences_warnings():
    data, _, _ = linear_problem()
    network = nn.Linear(4, 1).double()
    with pytest.raises(ChainStuck, match="Leave out step_size"):
        hmc(network, data, NOISE, num_draws=10, num_chains=2, warmup=0, step_size=1e3)
    wall = {"prior": 1.0, "num_draws": 20, "num_chains": 8, "warmup": 0, "step_size": 1.0}
    with pytest.warns(Divergences, match="trajectories diverged"):
        posterior = nuts(
            Wall(), (torch.ones(2, 1), torch.zeros(2, 1)), NOISE, **wall, start="network"
        )
    assert posterior.recipe.statistics["divergences"].sum() > 0
    wild = {
        n: torch.full((2, *v.shape), 1e200, dtype=DOUBLE) for n, v in network.named_parameters()
    }
    with pytest.raises(ChainStuck, match="is not finite where chain 0 starts"):
        hmc(network, data, NOISE, num_draws=5, num_chains=2, start=wild)
    with pytest.raises(InputError, match="the variance of the noise is open"):
        nuts(network, data, Gaussian())
    with pytest.raises(TypeError, match="there is no option 'burn_in'"):
        nuts(network, data, NOISE, burn_in=3)
    with pytest.raises(InputError, match=r"'bias' has shape \(1,\) in the network and None in"):
        nuts(network, data, NOISE, start={"weight": torch.zeros(4, 1, 4)})
    with pytest.raises(InputError, match='mass must be "diagonal" or "dense"'):
        nuts(network, data, NOISE, mass="full")
    with pytest.raises(InputError, match="target_acceptance must lie between 0 and 1"):
        nuts(network, data, NOISE, target_acceptance=1.5)


def reference_r_hat(values):
    """The definition of split R̂ for one quantity, (K, D), without ranks."""
    half = values.shape[1] // 2
    parts = [chain[:half] for chain in values] + [chain[-half:] for chain in values]
    within = sum(float(part.var()) for part in parts) / len(parts)
    means = torch.stack([part.mean() for part in parts])
    return math.sqrt((half - 1) / half + float(means.var()) / within)


def test_r_hat_finds_chains_that_differ_and_ess_counts_autocorrelated_draws():
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(4, 2000, dtype=DOUBLE, generator=generator)
    assert float(r_hat(noise)) < 1.003
    assert abs(float(r_hat(noise)) - reference_r_hat(noise)) < 0.002
    apart = noise + torch.tensor([0.0, 0.0, 0.0, 1.0])[:, None]
    assert abs(float(r_hat(apart)) / reference_r_hat(apart) - 1) < 0.03
    assert float(r_hat(noise * torch.tensor([1.0, 1.0, 1.0, 3.0])[:, None])) > 1.1
    slow = torch.zeros_like(noise)
    for t in range(1, 2000):
        slow[:, t] = 0.8 * slow[:, t - 1] + 0.6 * noise[:, t]
    # the autocorrelation time of this process is (1 + 0.8) / (1 − 0.8) = 9
    assert abs(float(bulk_ess(slow)) / (8000 / 9) - 1) < 0.25
    assert abs(float(bulk_ess(noise)) / 8000 - 1) < 0.1
    assert abs(float(tail_ess(noise)) / 8000 - 1) < 0.2
    assert float(bulk_ess(torch.ones(2, 10))) == 20
    with pytest.raises(InputError, match="at least four draws"):
        r_hat(torch.zeros(4, 3))


def test_diagnose_judges_predictions_and_warns_of_chains_that_have_not_mixed():
    data, _, _ = linear_problem()
    network = nn.Linear(4, 1).double()
    posterior = nuts(network, data, NOISE, num_draws=100, num_chains=4, warmup=60)
    found = diagnose(posterior, data[0][:3], largest_r_hat=1.1)
    values = posterior.process.values(data[0][:3]).reshape(4, 100, 3, 1)
    assert torch.equal(found.r_hat, r_hat(values))
    assert torch.equal(found.bulk_ess, bulk_ess(values))
    assert torch.equal(found.tail_ess, tail_ess(values))
    assert torch.equal(found.divergences, posterior.recipe.statistics["divergences"])
    assert "worst_r_hat=" in repr(found)
    assert found.least_ess > 50
    members = posterior.process.members
    shift = torch.repeat_interleave(torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=DOUBLE), 100)
    moved = {**members.values, "bias": members.values["bias"] + shift[:, None]}
    frozen = drawn_posterior(replace(members, values=moved), NOISE, data, recipe=posterior.recipe)
    with pytest.warns(NotMixed, match="the chains have not mixed"):
        assert diagnose(frozen, data[0]).worst_r_hat > 1.5
    gaussian = condition(RBF(), data, NOISE)
    with pytest.raises(NotAvailable, match="does not come from Markov chains"):
        diagnose(gaussian, data[0])


def test_r_hat_and_ess_are_those_of_arviz():
    stats = pytest.importorskip("arviz_stats.base").array_stats
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(4, 101, 6, dtype=DOUBLE, generator=generator)
    values = noise.clone()
    for t in range(1, 101):
        values[:, t] += torch.tensor([0.0, 0.3, 0.9, -0.5, 0.99, 0.0]) * values[:, t - 1]
    values[0, :, 5] += 2
    values[:, :, 0] = values[:, :, 0].round()  # ties
    for index in range(6):
        one = values[:, :, index]
        array = one.numpy()
        options = {"chain_axis": 0, "draw_axis": 1}
        pairs = [
            (r_hat(one), stats.rhat(array, method="rank", **options)),
            (bulk_ess(one), stats.ess(array, method="bulk", **options)),
            (tail_ess(one), stats.ess(array, method="tail", prob=(0.05, 0.95), **options)),
        ]
        for ours, theirs in pairs:
            assert abs(float(ours) / float(theirs) - 1) < 1e-6


def test_draws_go_to_arviz_and_come_back():
    pytest.importorskip("arviz_base")
    data, _, _ = linear_problem()
    network = nn.Linear(4, 1).double()
    posterior = nuts(network, data, NOISE, num_draws=20, num_chains=3, warmup=30)
    tree = to_arviz(posterior, data[0][:2])
    assert tree["posterior"]["weight"].shape == (3, 20, 1, 4)
    assert tree["posterior_predictive"]["f"].dims == ("chain", "draw", "point", "output")
    back = from_arviz(tree, network, data, NOISE, prior=1.0)
    assert torch.equal(draws_of(back), draws_of(posterior))
    assert torch.equal(back.mean(data[0]), posterior.mean(data[0]))
    assert back.recipe.num_chains == 3
    assert torch.equal(
        back.recipe.statistics["gradients"], posterior.recipe.statistics["gradients"]
    )
    with pytest.raises(InputError, match="none of which is a parameter"):
        from_arviz(tree, Product().double(), data, NOISE)


def test_a_missing_arviz_is_an_error_that_says_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "arviz_base", None)
    data, _, _ = linear_problem(6)
    posterior = hmc(nn.Linear(4, 1).double(), data, NOISE, num_draws=4, num_chains=2, warmup=5)
    with pytest.raises(InputError, match="pip install"):
        to_arviz(posterior)
    with pytest.raises(InputError, match="must be a DataTree"):
        from_arviz({}, nn.Linear(4, 1), data, NOISE)


@pytest.mark.parametrize("prior", [None, bayes.LaplacePrior(2.0), bayes.StudentTPrior(1.0, 5.0)])
def test_every_prior_gives_the_mean_of_quadrature(prior):
    x = torch.tensor([[0.5], [1.0]], dtype=DOUBLE)
    y = torch.tensor([[1.0], [0.5]], dtype=DOUBLE)
    network = nn.Linear(1, 1, bias=False).double()
    posterior = nuts(network, (x, y), NOISE, prior=prior, num_draws=60, num_chains=64, warmup=60)
    grid = torch.linspace(-8, 8, 4001, dtype=DOUBLE)
    model = Model.of(network, NOISE, prior)
    at = lambda one: model.log_joint({"weight": one.reshape(1, 1)}, (x, y))
    log_joint = torch.func.vmap(at)(grid[::4])
    weight = (log_joint - log_joint.max()).exp()
    weight = weight / weight.sum()
    mean = (weight * grid[::4]).sum()
    spread = (weight * (grid[::4] - mean).square()).sum().sqrt()
    draws = draws_of(posterior).reshape(64, 60)
    assert abs(float((draws.mean() - mean) / spread)) < 4.5 / float(bulk_ess(draws)) ** 0.5
    assert abs(float(draws.std() / spread) - 1) < 0.1


def test_some_parameters_can_be_sampled_while_the_others_stay():
    data, _, _ = linear_problem(8)
    network = nn.Linear(4, 1).double()
    posterior = hmc(network, data, NOISE, num_draws=5, num_chains=2, warmup=30, only="weight")
    assert set(posterior.process.members.values) == {"weight"}


@pytest.mark.parametrize("method", [hmc, nuts])
def test_a_file_is_refused_for_another_network_with_equal_parameters(method, tmp_path):
    data, _, _ = linear_problem(8)
    layer, last = nn.Linear(4, 3).double(), nn.Linear(3, 1).double()
    options = {"num_draws": 4, "num_chains": 2, "warmup": 10, "checkpoint": tmp_path / "chain"}
    method(nn.Sequential(layer, nn.Tanh(), last), data, NOISE, **options)
    with pytest.raises(InputError, match="belongs to another problem"):
        method(nn.Sequential(layer, nn.ReLU(), last), data, NOISE, **options)


def test_a_file_is_refused_for_another_output_of_the_network(tmp_path):
    data, _, _ = linear_problem(8)
    network = nn.Linear(4, 1).double()
    options = {"num_draws": 4, "num_chains": 2, "warmup": 10, "checkpoint": tmp_path / "chain"}
    nuts(network, data, NOISE, output=lambda out: out, **options)
    with pytest.raises(InputError, match="belongs to another problem"):
        nuts(network, data, NOISE, output=lambda out: 2 * out, **options)


def test_independent_networks_are_not_judged_as_a_chain():
    data, _, _ = linear_problem(8)
    members = bayes.ensemble(
        nn.Linear(4, 1).double(), data, NOISE, num_members=8, training=bayes.Training(num_steps=2)
    )
    with pytest.raises(NotAvailable, match="the networks of ensemble are no Markov chain"):
        bayes.diagnose(members, data[0])
