"""Langevin chains without an accept step: their gradients, stationary laws, schedules and restarts."""

import contextlib
import itertools
import math
from functools import partial

import pytest
import torch
from torch import nn

from net2gp.bayes import FlatPrior, Model, microcanonical, sghmc, sgld
from net2gp.bayes.chains.langevin import walks
from net2gp.bayes.chains.langevin.isokinetic import Integrator, Particle, correlation_length, kick
from net2gp.bayes.chains.langevin.mclmc import Microcanonical
from net2gp.bayes.chains.langevin.sghmc import SGHMC
from net2gp.bayes.chains.langevin.sgld import SGLD
from net2gp.bayes.chains.langevin.stochastic import Tuned, curvature
from net2gp.bayes.chains.langevin.targets import Minibatches, Target
from net2gp.bayes.chains.langevin.walks import Plan, Setup
from net2gp.errors import ChainStuck, InputError, NetworkError, NotConverged
from net2gp.likelihoods import Categorical, Gaussian
from net2gp.linear.linearized import linearize
from net2gp.posteriors.recipes.drawn import drawn_posterior
from net2gp.posteriors.recipes.members import Members

METHODS = {"sgld": sgld, "sghmc": sghmc, "microcanonical": microcanonical}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def conjugate(num_weights=5, num_data=40):
    """A linear model, the closed form of its posterior, and a network at the mean."""
    x = normal(num_data, num_weights)
    y = x @ normal(num_weights, 1, seed=1) + 0.5 * normal(num_data, 1, seed=2)
    covariance = (x.T @ x / 0.25 + torch.eye(num_weights, dtype=torch.float64)).inverse()
    mean = (covariance @ x.T @ y / 0.25)[:, 0]
    network = nn.Linear(num_weights, 1, bias=False).double()
    with torch.no_grad():
        network.weight.copy_(mean[None])
    return network, (x, y), mean, covariance


def weights(posterior):
    values = posterior.process.members.values
    return torch.cat([value.flatten(1) for value in values.values()], 1)


def perceptron():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3)).double()


class Gated(nn.Module):
    """A network that has no closed form of its gradient."""

    def __init__(self):
        super().__init__()
        self.inner = perceptron()

    def forward(self, x):
        return self.inner(x) * torch.sigmoid(self.inner(-x))


@pytest.mark.parametrize("network", [perceptron(), Gated()], ids=["stacked", "vmap"])
@pytest.mark.parametrize("vectorized", [True, False])
@pytest.mark.parametrize("chunk_size", [None, 3])
def test_gradients_of_all_chains_are_those_of_the_log_joint(network, vectorized, chunk_size):
    x, y = normal(8, 2), torch.arange(8) % 3
    for heat in (1.0, 0.3):
        model = Model.of(network, Categorical(), 1.0, temperature=heat)
        target = Target(model, (x, y), vectorized=vectorized, chunk_size=chunk_size)
        position = normal(3, model.architecture.num_params, seed=5)
        index = torch.tensor([[0, 3], [7, 7], [2, 5]])
        with target.ready():
            value, slope = target.both(position)
            few, steep = target.both(position, index)
            assert torch.equal(target.gradient(position, index), steep)
        minibatch = Model.of(network, Categorical(), 1.0, temperature=heat, num_data=8)
        found = []
        for chain in range(3):
            leaf = position[chain].clone().requires_grad_()
            params = model.architecture.unflatten(leaf)
            whole = model.log_joint(params, (x, y))
            part = minibatch.log_joint(params, (x[index[chain]], y[index[chain]]))
            found.append((whole.detach(), part.detach()))
            torch.testing.assert_close(
                slope[chain], torch.autograd.grad(whole, leaf, retain_graph=True)[0]
            )
            torch.testing.assert_close(steep[chain], torch.autograd.grad(part, leaf)[0])
        # the constant of a Gaussian prior is left out
        for mine, index_of in ((value, 0), (few, 1)):
            gaps = mine - torch.stack([pair[index_of] for pair in found])
            torch.testing.assert_close(gaps, gaps[:1].expand(3))


def test_shared_passes_that_are_wrong_are_left_out(monkeypatch):
    network, data = (
        nn.Sequential(nn.Linear(2, 3), nn.PReLU(), nn.Linear(3, 1)).double(),
        (
            normal(4, 2),
            normal(4, 1),
        ),
    )
    target = Target(Model.of(network, Gaussian(noise_var=1.0)), data)
    position = normal(3, target.model.architecture.flatten(target.model.params).numel())
    assert target.checked(position).vectorized
    right = Target._outputs
    wrong = lambda self, leaf, x, axis: right(self, leaf, x, axis) * (1 + 0.1 * self.vectorized)
    monkeypatch.setattr(Target, "_outputs", wrong)
    assert not target.checked(position).vectorized


def test_other_priors_are_differentiated():
    class Sharp:
        def check(self, params):
            pass

        def log_prob(self, params):
            return -sum(value.abs().sum() for value in params.values())

        def sample(self, params, num_samples, generator=None):
            raise NotImplementedError

    network, data, *_ = conjugate()
    flat = Target(Model.of(network, Gaussian(0.25), FlatPrior()), data)
    sharp = Target(Model.of(network, Gaussian(0.25), Sharp()), data)
    position = normal(2, 5)
    with flat.ready():
        gap = sharp.gradient(position) - flat.gradient(position)
    torch.testing.assert_close(gap, -position.sign())


def test_minibatches_shuffle_each_chain_and_keep_no_point_out():
    batches = Minibatches(10, 3, 2, seeded())
    first = torch.cat([batches.draw() for _ in range(3)], 1)
    assert all(len(set(row.tolist())) == 9 for row in first)
    assert first[0].tolist() != first[1].tolist()
    seen = torch.cat([first, *[batches.draw() for _ in range(60)]], 1)
    assert seen.unique().tolist() == list(range(10))
    assert Minibatches(10, 10, 2, seeded()).draw() is None
    apart = Minibatches(10, 4, 2, seeded(), independent=True)
    assert max(len(apart.draw()[0].unique()) < 4 for _ in range(20)), "points may repeat"


def linear_map(dynamics, setup, names):
    """The matrices A and B of z ← A z + B ξ, for z of the named states around the fixed point."""
    centered = setup.start[0]

    def apply(z, noise):
        walk = setup.walk()
        walk.noise = lambda: torch.zeros_like(setup.start)
        dynamics.begin(walk)
        parts = z.split([len(centered)] * len(names))
        for name, part in zip(names, parts, strict=True):
            walk.state[name] = part[None] + (centered if name == "position" else 0)
        walk.noise = lambda: noise[None]
        with setup.target.ready():
            dynamics.step(walk, 0)
        states = [walk.state[n][0] - (centered if n == "position" else 0) for n in names]
        return torch.cat(states)

    size, zero = len(centered) * len(names), torch.zeros(len(centered), dtype=torch.float64)
    rows = torch.eye(size, dtype=torch.float64)
    moves = torch.stack([apply(row, zero) for row in rows], 1)
    kicks = [
        apply(torch.zeros_like(rows[0]), row) for row in torch.eye(len(zero), dtype=torch.float64)
    ]
    return moves, torch.stack(kicks, 1)


def stationary(moves, kicks):
    """The solution of S = A S Aᵀ + B Bᵀ."""
    size = len(moves)
    operator = torch.eye(size * size, dtype=torch.float64) - torch.kron(moves, moves)
    return torch.linalg.solve(operator, (kicks @ kicks.T).reshape(-1)).reshape(size, size)


def quadratic():
    network, data, mean, covariance = conjugate(2)
    target = Target(Model.of(network, Gaussian(0.25)), data)
    setup = Setup("test", target, mean[None].clone(), Plan(10, 0, 1))
    return setup, Tuned(setup, False, False), covariance


@pytest.mark.parametrize("share", [0.1, 0.5, 1.5])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.95])
def test_sghmc_has_the_exact_covariance_on_a_quadratic_for_every_stable_step(share, momentum):
    setup, tuned, covariance = quadratic()
    largest = 1 / torch.linalg.eigvalsh(covariance)[0]
    size = (share / largest.sqrt()).reshape(1, 1)
    with torch.no_grad():
        dynamics = SGHMC(setup, size, tuned, momentum)
        found = stationary(*linear_map(dynamics, setup, ("position", "momentum")))
    torch.testing.assert_close(found[:2, :2], covariance, rtol=1e-9, atol=1e-12)
    # friction and noise keep momenta at unit variance, whatever the share that is refreshed
    one = torch.eye(2, dtype=torch.float64)
    torch.testing.assert_close(found[2:, 2:], one, rtol=1e-9, atol=1e-9)


def test_sgld_is_too_wide_by_a_quarter_of_step_size_times_curvature():
    setup, tuned, covariance = quadratic()
    size = 0.1 * torch.linalg.eigvalsh(covariance)[0]
    with torch.no_grad():
        dynamics = SGLD(setup, size.reshape(1, 1), tuned)
        found = stationary(*linear_map(dynamics, setup, ("position",)))
    precision = covariance.inverse()
    expected = (precision - size * precision @ precision / 4).inverse()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_draws_have_the_law_of_the_conjugate_model(name):
    network, data, mean, covariance = conjugate()
    options = {
        "sgld": {"step_size": 4e-4, "thin": 8, "num_draws": 60, "warmup": 150},
        "sghmc": {"step_size": 0.03, "thin": 6, "num_draws": 60, "warmup": 60},
        "microcanonical": {"thin": 2, "num_draws": 150, "warmup": 300, "energy_variance": 1e-4},
    }[name]
    posterior = METHODS[name](network, data, Gaussian(0.25), num_chains=256, **options)
    drawn = weights(posterior).reshape(256, -1, 5)
    # chains are independent, so their means give the Monte Carlo error of the mean
    error = drawn.mean(1).std(0) / 16
    assert ((drawn.mean((0, 1)) - mean).abs() < 4 * error).all()
    found = torch.cov(drawn.flatten(0, 1).T)
    assert (found - covariance).norm() < 0.05 * covariance.norm()
    assert posterior.recipe.num_chains == 256
    assert posterior.recipe.method == name
    torch.testing.assert_close(
        posterior.mean(data[0]), data[0] @ weights(posterior).mean(0)[:, None]
    )


@pytest.mark.parametrize("name", METHODS)
def test_temperature_divides_the_log_joint(name):
    network, data, _, covariance = conjugate(2)
    options = {"num_chains": 128, "num_draws": 40, "thin": 5, "warmup": 100, "temperature": 0.1}
    cold = METHODS[name](network, data, Gaussian(0.25), **options)
    ratio = torch.cov(weights(cold).T).diagonal() / covariance.diagonal()
    torch.testing.assert_close(ratio, torch.full_like(ratio, 0.1), rtol=0.15, atol=0)
    assert cold.recipe.temperature == 0.1


@pytest.mark.parametrize("method", [sgld, sghmc])
def test_noise_of_minibatches_is_taken_off(method):
    network, data, _, covariance = conjugate(2, 400)
    step = {sgld: 2e-5, sghmc: 0.002}[method]
    options = {"num_chains": 96, "num_draws": 40, "thin": 10, "warmup": 400, "batch_size": 40}
    posterior = method(
        network, data, Gaussian(0.25), step_size=step, gradient_noise=True, **options
    )
    ratio = torch.cov(weights(posterior).T).diagonal() / covariance.diagonal()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0.1, atol=0)
    with pytest.warns(NotConverged, match=r"noisier than the steps.*larger batch_size"):
        method(network, data, Gaussian(0.25), step_size=10 * step, gradient_noise=True, **options)


def test_shuffled_minibatches_add_less_variance_than_independent_ones(monkeypatch):
    network, data, _, covariance = conjugate(2, 400)
    options = {"num_chains": 128, "num_draws": 40, "thin": 10, "warmup": 100, "batch_size": 40}
    gaps = []
    for independent in (False, True):
        made = partial(Minibatches, independent=independent)
        monkeypatch.setattr(walks, "Minibatches", lambda *given, independent, m=made: m(*given))
        posterior = sghmc(network, data, Gaussian(0.25), step_size=0.004, **options)
        ratio = torch.cov(weights(posterior).T).diagonal() / covariance.diagonal()
        gaps.append(float(ratio.mean()) - 1)
    assert gaps[0] < 0.3 * gaps[1]


@pytest.mark.parametrize("method", [sgld, sghmc])
def test_preconditioned_chains_have_the_right_law_at_unlike_scales(method):
    _, (x, y), *_ = conjugate(2)
    x = x * torch.tensor([1.0, 5.0], dtype=torch.float64)
    covariance = (x.T @ x / 0.25 + torch.eye(2, dtype=torch.float64)).inverse()
    network = nn.Linear(2, 1, bias=False).double()
    with torch.no_grad():
        network.weight.copy_((covariance @ x.T @ y / 0.25).T)
    step = {sgld: 5e-5, sghmc: 0.01}[method]
    options = {"num_chains": 128, "num_draws": 50, "thin": 16, "warmup": 400}
    posterior = method(
        network, (x, y), Gaussian(0.25), step_size=step, precondition=True, **options
    )
    ratio = torch.cov(weights(posterior).T).diagonal() / covariance.diagonal()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0.12, atol=0)


def test_cycles_fall_by_a_cosine_and_give_draws_in_their_second_part_only():
    plan = Plan(num_draws=6, warmup=4, thin=2, num_cycles=2)
    assert (plan.cycle, plan.total) == (10, 20)
    kept = [step for step in range(plan.total) if plan.keeps(step)]
    assert kept == [5, 7, 9, 15, 17, 19]
    assert [step for step in range(10) if plan.quiet(step)] == [0, 1, 2, 3]
    assert plan.scale(0) == plan.scale(10) == 1
    assert plan.scale(5) == pytest.approx(0.5)
    assert plan.scale(9) == pytest.approx(0.5 * (1 + math.cos(0.9 * math.pi)))
    assert not Plan(6, 4, 2).quiet(0)
    with pytest.raises(InputError, match=r"multiple of num_cycles=4.*num_draws=4"):
        Plan(6, 4, 2, 4)


@pytest.mark.parametrize("method", [sgld, sghmc])
def test_cyclical_chains_have_the_law_of_the_conjugate_model(method):
    network, data, _, covariance = conjugate(2)
    step = {sgld: 1e-3, sghmc: 0.04}[method]
    options = {"num_chains": 128, "num_draws": 60, "thin": 8, "warmup": 20, "num_cycles": 2}
    posterior = method(network, data, Gaussian(0.25), step_size=step, **options)
    ratio = torch.cov(weights(posterior).T).diagonal() / covariance.diagonal()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0.15, atol=0)


def test_a_kick_is_the_flow_of_the_direction_and_returns_on_its_way_back():
    u = torch.nn.functional.normalize(normal(3, 4), dim=1)
    g, size = 5 * normal(3, 4, seed=1), torch.tensor([[0.3], [1.0], [4.0]], dtype=torch.float64)
    turned, work = kick(u, g, size)
    torch.testing.assert_close(turned.norm(dim=1), torch.ones(3, dtype=torch.float64))
    back, _ = kick(-turned, g, size)  # the flow is reversible
    torch.testing.assert_close(-back, u)
    slow, done = u.clone(), torch.zeros(3, dtype=torch.float64)
    for _ in range(4000):
        middle = slow + 0.5 * size / 4000 * (g - slow * (slow * g).sum(1, keepdim=True)) / 3
        rate = (g - middle * (middle * g).sum(1, keepdim=True)) / 3
        slow, done = slow + size / 4000 * rate, done + (size[:, 0] / 4000) * (middle * g).sum(1)
    torch.testing.assert_close(slow, turned, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(done, work, rtol=1e-4, atol=1e-4)
    assert torch.isfinite(kick(u, 1e6 * g, size)[1]).all()


def banana(position):
    """log p = −½ (a² + (b − a²)²/s²) for s = 0.5: a is N(0, 1) and b is a² + N(0, 0.25)."""
    a, b = position.unbind(1)
    gap = (b - a.square()) / 0.25
    value = -0.5 * (a.square() + gap * (b - a.square()))
    return value, torch.stack([-a + 2 * a * gap, -gap], 1)


@pytest.mark.parametrize("kind", ["minimal_norm", "leapfrog"])
def test_the_energy_error_of_a_step_is_of_third_order(kind):
    position = 0.5 * normal(64, 2, seed=3)
    direction = nn.functional.normalize(normal(64, 2, seed=4), dim=1)
    particle = Particle(position, direction, *banana(position))
    move = Integrator(banana, kind)
    errors = []
    for size in (0.004, 0.002, 0.001):
        _, change = move(particle, torch.full((64, 1), size, dtype=torch.float64))
        errors.append(float(change.square().mean().sqrt()))
    for large, small in itertools.pairwise(errors):
        assert math.log2(large / small) == pytest.approx(3, abs=0.15)


def test_a_step_of_the_integrator_is_reversible():
    position = normal(5, 2)
    particle = Particle(
        position, nn.functional.normalize(normal(5, 2, seed=1), dim=1), *banana(position)
    )
    size = torch.full((5, 1), 0.1, dtype=torch.float64)
    there, change = Integrator(banana)(particle, size)
    back, again = Integrator(banana)(there._replace(direction=-there.direction), size)
    torch.testing.assert_close(back.position, position)
    torch.testing.assert_close(again, -change)


class Known:
    """A target that is a plain function."""

    num_data = 1

    def __init__(self, density):
        self.both = density

    @contextlib.contextmanager
    def ready(self):
        yield


def walk_of(density, start, plan, **options):
    """Draws of microcanonical chains on a plain density: (C, S, P)."""
    setup = Setup("microcanonical", Known(density), start, plan)
    chosen = {"target": 1e-4, "step_size": None, "length": None, "precondition": False, **options}
    dynamics, walk, draws = Microcanonical(setup, Integrator(density), **chosen), setup.walk(), []
    dynamics.begin(walk)
    for step in range(plan.total):
        dynamics.step(walk, step)
        if plan.keeps(step):
            draws.append(walk.state["position"])
    return torch.stack(draws, 1), dynamics.statistics(walk.state)


def test_microcanonical_chains_have_the_moments_of_a_banana():
    draws, _ = walk_of(banana, normal(256, 2), Plan(200, 300, 4))
    a, b = draws.flatten(0, 1).unbind(1)
    assert float(a.mean()) == pytest.approx(0, abs=0.08)
    assert float(a.var()) == pytest.approx(1, rel=0.1)
    assert float(b.mean()) == pytest.approx(1, rel=0.1)
    assert float((b - a.square()).var()) == pytest.approx(0.25, rel=0.1)


@pytest.mark.parametrize("precondition", [False, True])
def test_microcanonical_chains_have_the_variances_of_an_ill_conditioned_gaussian(precondition):
    variances = torch.logspace(-2, 2, 10, dtype=torch.float64)

    def density(position):
        slope = -position / variances
        return 0.5 * (position * slope).sum(1), slope

    start = normal(128, 10) * variances.sqrt()
    draws, statistics = walk_of(density, start, Plan(250, 400, 4), precondition=precondition)
    ratio = draws.flatten(0, 1).var(0) / variances
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0.12, atol=0)
    assert float(statistics["energy_variance"].median()) == pytest.approx(1e-4, rel=1.0)


def test_single_precision_tunes_the_same_steps():
    network, data, *_ = conjugate()
    options = {"num_chains": 64, "num_draws": 20, "warmup": 300}
    exact = microcanonical(network, data, Gaussian(0.25), **options)
    # weights of 1e-3, whose steps have sixth powers that single precision cannot hold
    scaled = data[0].float() * 1e3, data[1].float()
    single = nn.Linear(5, 1, bias=False)
    with torch.no_grad():
        single.weight.copy_(network.weight * 1e-3)
    found = microcanonical(single, scaled, Gaussian(0.25), prior=1e-6, **options)
    assert weights(found).dtype == torch.float32
    sizes = [p.recipe.statistics["step_size"].median() for p in (exact, found)]
    assert float(sizes[1]) == pytest.approx(1e-3 * float(sizes[0]), rel=0.2)


def test_the_correlation_length_of_an_autoregression():
    noise, series = normal(20000, 2, 3), [torch.zeros(2, 3, dtype=torch.float64)]
    for step in noise:
        series.append(0.8 * series[-1] + step)
    torch.testing.assert_close(
        correlation_length(torch.stack(series)),
        torch.full((2,), 9.0, dtype=torch.float64),
        rtol=0.15,
        atol=0,
    )


def test_curvature_is_the_largest_eigenvalue():
    _, _, _, covariance = conjugate()
    precision = covariance.inverse()
    found = curvature(lambda p: -p @ precision, normal(3, 5), seeded())
    largest = torch.linalg.eigvalsh(precision)[-1]
    assert ((found > 0.8 * largest) & (found <= 1.0001 * largest)).all()


@pytest.mark.parametrize("name", METHODS)
def test_a_killed_run_goes_on_to_the_same_draws(name, tmp_path, monkeypatch):
    network, data = perceptron(), (normal(12, 2), torch.arange(12) % 3)
    options = {"num_chains": 2, "num_draws": 60, "warmup": 60, "checkpoint": tmp_path / "chain"}
    if name != "microcanonical":
        options |= {
            "batch_size": 5,
            "step_size": 0.01,
            "precondition": True,
            "gradient_noise": True,
        }
    monkeypatch.setattr(walks, "SAVE_EVERY", 30)
    monkeypatch.setattr(walks, "BLOCK", 7)
    whole = METHODS[name](network, data, Categorical(), **{**options, "checkpoint": None})
    kind = {"sgld": SGLD, "sghmc": SGHMC, "microcanonical": Microcanonical}[name]
    step = kind.step

    def killed(self, walk, number):
        if number == 100:
            raise KeyboardInterrupt
        step(self, walk, number)

    monkeypatch.setattr(kind, "step", killed)
    with pytest.raises(KeyboardInterrupt):
        METHODS[name](network, data, Categorical(), **options)
    steps = []

    def counted(self, walk, number):
        steps.append(number)
        step(self, walk, number)

    monkeypatch.setattr(kind, "step", counted)
    rest = METHODS[name](network, data, Categorical(), **options)
    assert 60 < steps[0] < 100
    assert torch.equal(weights(rest), weights(whole))
    steps.clear()
    assert torch.equal(
        weights(METHODS[name](network, data, Categorical(), **options)), weights(whole)
    )
    assert not steps, "a finished run is read from its file"
    with pytest.raises(InputError, match=r"another|other"):
        METHODS[name](network, data, Categorical(), **{**options, "seed": 1})


def test_chains_start_at_the_network_the_prior_or_given_parameters():
    network, data, mean, _ = conjugate(2)
    options = {"num_draws": 1, "warmup": 0, "step_size": 1e-12, "num_chains": 3}
    found = {}
    for start in ("network", "prior", {"weight": normal(3, 1, 2)}, None):
        posterior = sgld(network, data, Gaussian(0.25), start=start, **options)
        found[str(start)[:4]] = weights(posterior)
    torch.testing.assert_close(found["netw"], mean.expand(3, 2), atol=1e-4, rtol=0)
    assert torch.equal(found["netw"], found["None"])
    torch.testing.assert_close(found["{'we"], normal(3, 1, 2)[:, 0], atol=1e-4, rtol=0)
    assert found["prio"].std() > 0.1
    with pytest.raises(InputError, match='"prior" if there is one'):
        sgld(network, data, Gaussian(0.25), start="prior", prior=None, **options)


def test_no_global_random_number_is_drawn():
    network, data, *_ = conjugate(2)
    before = torch.get_rng_state()
    for method in METHODS.values():
        one, two = (
            method(network, data, Gaussian(0.25), num_chains=2, num_draws=5, warmup=40)
            for _ in "ab"
        )
        assert torch.equal(weights(one), weights(two))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("method", [sgld, sghmc])
def test_a_hopeless_step_size_is_named(method):
    network, data, *_ = conjugate()
    with pytest.raises(ChainStuck, match=r"diverged before step.*smaller step_size"):
        method(network, data, Gaussian(0.25), step_size=10.0, num_draws=200, warmup=10)


def test_microcanonical_chains_that_jump_are_named():
    network, data, *_ = conjugate()
    options = {"step_size": 1e4, "length": 1.0, "num_draws": 20, "warmup": 0}
    with pytest.raises(ChainStuck, match=r"diverged: their energy jumps.*energy_variance"):
        microcanonical(network, data, Gaussian(0.25), **options)


@pytest.mark.parametrize("name", METHODS)
def test_batch_statistics_in_training_mode_are_refused(name):
    network = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)).double()
    data = normal(6, 2), torch.arange(6) % 3
    with pytest.raises(NetworkError, match=r"BatchNorm1d.*Call network.eval\(\) first"):
        METHODS[name](network, data, Categorical())
    options = {"num_chains": 2, "num_draws": 3, "warmup": 40}
    posterior = METHODS[name](network.eval(), data, Categorical(), **options)
    assert posterior.predict(data[0]).probs.shape == (6, 3)


def ensemble_of(network, data, likelihood, count, buffers=()):
    architecture = linearize(network)
    values = {
        n: v + 0.1 * torch.randn(count, *v.shape, generator=seeded(3), dtype=v.dtype)
        for n, v in architecture.params.items()
    }
    for name in buffers:
        value = architecture.frozen[name]
        values[name] = value + torch.arange(count, dtype=value.dtype)[:, None].expand(
            -1, len(value)
        )
    return drawn_posterior(Members(architecture, values), likelihood, data)


@pytest.mark.parametrize("name", METHODS)
def test_each_network_of_an_ensemble_starts_a_chain_with_its_own_buffers(name):
    network = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)).double().eval()
    data = normal(6, 2), torch.arange(6) % 3
    start = ensemble_of(network, data, Categorical(), 3, ("1.running_mean",))
    options = {"num_chains": 3, "num_draws": 2, "warmup": 0, "step_size": 1e-9}
    if name == "microcanonical":
        options["length"] = 1.0
        del options["num_chains"]
    posterior = METHODS[name](network, data, Categorical(), start=start, **options)
    assert posterior.recipe.num_chains == 3
    for key, value in posterior.process.members.values.items():
        own = start.process.members.values[key].repeat_interleave(2, 0)
        torch.testing.assert_close(value, own, atol=1e-3, rtol=0)
    means = [p.process.members.values["1.running_mean"] for p in (posterior, start)]
    assert torch.equal(means[0][::2], means[1])


WRONG = {
    "num_draws": (0, "num_draws must be a positive whole number"),
    "thin": (0, "thin must be a positive whole number"),
    "warmup": (-1, "warmup must be zero or a positive whole number"),
    "step_size": (-1.0, "step_size must be positive"),
    "start": ("mode", r"start must be a posterior, such as ensemble"),
    "num_chains": (0, "num_chains must be a positive whole number"),
}


@pytest.mark.parametrize("option", WRONG)
@pytest.mark.parametrize("name", METHODS)
def test_wrong_options_are_named(name, option):
    network, data, *_ = conjugate(2)
    value, message = WRONG[option]
    with pytest.raises(InputError, match=message):
        METHODS[name](network, data, Gaussian(0.25), **{option: value})


def test_other_mistakes_are_named():
    network, data, *_ = conjugate(2)
    noise = Gaussian(0.25)
    with pytest.raises(TypeError, match="there is no option 'num_steps'"):
        sgld(network, data, noise, num_steps=3)
    with pytest.raises(InputError, match="momentum must be at least 0 and less than 1"):
        sghmc(network, data, noise, momentum=1.0)
    with pytest.raises(InputError, match="learned during warmup, but warmup is 0"):
        sghmc(network, data, noise, precondition=True, warmup=0)
    with pytest.raises(InputError, match="batch_size must be a positive whole number"):
        sgld(network, data, noise, batch_size=0)
    with pytest.raises(InputError, match="the variance of the noise is open"):
        sgld(network, data, Gaussian(noise_var=None))
    with pytest.raises(InputError, match="integrator must be one of minimal_norm, leapfrog"):
        microcanonical(network, data, noise, integrator="euler")
    with pytest.raises(InputError, match="must be 40 steps or more, but is 10"):
        microcanonical(network, data, noise, warmup=10)
    with pytest.raises(InputError, match="two parameters or more"):
        microcanonical(nn.Linear(1, 1, bias=False).double(), (data[0][:, :1], data[1]), noise)
    start = ensemble_of(network, data, noise, 2)
    with pytest.raises(InputError, match=r"2 networks for 4 chains. Pass num_chains=2"):
        sgld(network, data, noise, start=start, num_chains=4)
    other = nn.Sequential(nn.Linear(2, 1, bias=False)).double()
    with pytest.raises(InputError, match=r"'0.weight' has shape .* and None in start"):
        sgld(other, data, noise, start=start, num_chains=2)


@pytest.mark.parametrize("name", METHODS)
def test_a_file_is_refused_for_another_network_with_equal_parameters(name, tmp_path):
    data = normal(12, 2), torch.arange(12) % 3
    first, last = nn.Linear(2, 4).double(), nn.Linear(4, 3).double()
    options = {"num_chains": 2, "num_draws": 4, "warmup": 40, "checkpoint": tmp_path / "chain"}
    METHODS[name](nn.Sequential(first, nn.Tanh(), last), data, Categorical(), **options)
    with pytest.raises(InputError, match="belongs to another problem"):
        METHODS[name](nn.Sequential(first, nn.ReLU(), last), data, Categorical(), **options)


def test_a_file_is_refused_for_other_fixed_parameters(tmp_path):
    data = normal(12, 2), torch.arange(12) % 3
    last = nn.Linear(4, 3).double()
    options = {"num_draws": 4, "warmup": 4, "step_size": 1e-3, "checkpoint": tmp_path / "chain"}
    one, other = (nn.Sequential(nn.Linear(2, 4).double(), nn.Tanh(), last) for _ in range(2))
    sgld(one, data, Categorical(), only="2.*", **options)
    with pytest.raises(InputError, match="belongs to another problem"):
        sgld(other, data, Categorical(), only="2.*", **options)


def test_a_network_that_only_runs_in_float32_keeps_a_file(tmp_path):
    class Single(nn.Linear):
        def forward(self, x):
            return super().forward(x.float())

    torch.manual_seed(0)
    network, x = Single(2, 1), torch.randn(6, 2)
    options = {"num_draws": 4, "warmup": 4, "step_size": 1e-3, "checkpoint": tmp_path / "chain"}
    first, again = (sgld(network, (x, x[:, :1]), Gaussian(1.0), **options) for _ in range(2))
    assert torch.equal(first.mean(x), again.mean(x))


@pytest.mark.parametrize("name", METHODS)
def test_a_file_that_cannot_be_written_is_refused_before_the_first_step(name, tmp_path):
    data = normal(12, 2), torch.arange(12) % 3
    options = {"num_draws": 10**6, "num_chains": 1, "warmup": 40}
    with pytest.raises(InputError, match="does not exist"):
        METHODS[name](
            perceptron(), data, Categorical(), checkpoint=tmp_path / "no" / "chain", **options
        )
    with pytest.raises(InputError, match="is a folder"):
        METHODS[name](perceptron(), data, Categorical(), checkpoint=tmp_path, **options)
