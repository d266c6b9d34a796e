"""Ensembles: the same networks vectorized and one by one, exact draws for linear models, better NLL."""

import copy

import pytest
import torch
from torch import nn

import net2gp as n2g
from net2gp.bayes import (
    FlatPrior,
    Horseshoe,
    LaplacePrior,
    NormalPrior,
    StudentTPrior,
    Training,
    ensemble,
    map_estimate,
    module_of,
)
from net2gp.errors import InputError, NetworkError


def data(rows=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 2, generator=generator, dtype=torch.float64)
    noise = 0.1 * torch.randn(rows, generator=generator, dtype=torch.float64)
    return x, (x[:, 0].sin() + x[:, 1].square() / 4 + noise)[:, None]


def mlp():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()


SHORT = Training(num_steps=40, batch_size=16)


def weights(posterior):
    values = posterior.process.members.values
    return torch.cat([value.flatten(1) for value in values.values()], 1)


def sgd(params):
    return torch.optim.SGD(params, lr=0.02, momentum=0.9, weight_decay=0.01)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"randomized": True},
        {"bootstrap": True},
        {"training": Training(num_steps=40, batch_size=None)},
        {"training": Training(num_steps=40, batch_size=None), "bootstrap": True},
        {"training": Training(num_steps=60, held_out=0.3, look_every=5, patience=2)},
        {"training": Training(num_steps=40, batch_size=16, optimizer=sgd, schedule="constant")},
        {"likelihood": n2g.Gaussian()},
        {"likelihood": n2g.Gaussian(), "training": Training(num_steps=60, held_out=0.3)},
        {"likelihood": n2g.Gaussian(torch.linspace(0.1, 1, 40, dtype=torch.float64)[:, None])},
        {"only": ["2.*"], "prior": NormalPrior({"2.weight": 2.0, "2.bias": 0.5})},
    ],
    ids=str,
)
def test_vectorized_members_are_those_of_a_loop(options):
    given = {"training": SHORT, "likelihood": n2g.Gaussian(0.1), **options}
    one, other = (
        ensemble(mlp(), data(), num_members=3, vectorize=way, **given) for way in (True, False)
    )
    assert torch.allclose(weights(one), weights(other), rtol=1e-10, atol=1e-10)
    assert len(weights(one)) == 3
    assert (weights(one)[0] - weights(one)[1]).abs().max() > 1e-2
    for name, value in one.recipe.statistics.items():
        assert torch.allclose(value, other.recipe.statistics[name], rtol=1e-9), name


@pytest.mark.parametrize("options", [{}, {"randomized": True}, {"bootstrap": True}], ids=str)
@pytest.mark.parametrize("kind", ["norm", "convolution", "pair"])
def test_networks_that_are_no_perceptrons_are_vectorized_too(kind, options):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(2, 3).double(), nn.Linear(1, 3).double()

        def reset_parameters(self):
            pass

        def forward(self, left, right):
            return (self.left(left).tanh() * self.right(right)).sum(1, keepdim=True)

    x, y = data()
    networks = {
        "norm": nn.Sequential(
            nn.Linear(2, 6), nn.LayerNorm(6), nn.ReLU(inplace=True), nn.Linear(6, 1)
        ),
        "convolution": nn.Sequential(nn.Conv1d(1, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(3, 1)),
        "pair": Pair(),
    }
    inputs = {"norm": x, "convolution": x[:, None], "pair": (x, x[:, :1].square())}
    given = {"num_members": 2, "training": SHORT, **options}
    one, other = (
        ensemble(
            networks[kind].double(), (inputs[kind], y), n2g.Gaussian(0.1), vectorize=way, **given
        )
        for way in (True, False)
    )
    assert torch.allclose(weights(one), weights(other), rtol=1e-10, atol=1e-10)


def test_an_optimizer_that_looks_at_shapes_trains_members_one_by_one():
    def grouped(params):
        decayed = [p for p in params if p.dim() > 1]
        others = [p for p in params if p.dim() == 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others}]
        return torch.optim.SGD([group for group in groups if group["params"]], lr=0.02)

    training = Training(num_steps=20, optimizer=grouped)
    with pytest.raises(InputError, match="the optimizer or its schedule would mix the members"):
        ensemble(mlp(), data(), n2g.Gaussian(0.1), training=training, vectorize=True)
    one, other = (
        ensemble(mlp(), data(), n2g.Gaussian(0.1), num_members=2, training=training, vectorize=way)
        for way in (None, False)
    )
    assert torch.equal(weights(one), weights(other))


@pytest.mark.parametrize(
    "prior", [LaplacePrior(), StudentTPrior(), Horseshoe(), FlatPrior(), None], ids=str
)
def test_vectorized_members_of_classes_under_any_prior_are_those_of_a_loop(prior):
    x, y = data()
    labels = (y[:, 0] > 0.5).long()
    network = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    given = {"num_members": 2, "prior": prior, "training": SHORT}
    one, other = (
        ensemble(network, (x, labels), n2g.Categorical(), vectorize=way, **given)
        for way in (True, False)
    )
    assert torch.allclose(weights(one), weights(other), rtol=1e-10, atol=1e-10)
    if prior is not None:
        for index, value in enumerate(one.recipe.statistics["log_joint"]):
            model = n2g.bayes.Model.of(module_of(one, index), n2g.Categorical(), prior)
            assert torch.allclose(model.log_joint(model.params, (x, labels)), value)


def test_randomized_members_of_a_linearized_network_are_draws_of_the_gaussian_process():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1)).double().eval()
    linearized = n2g.linearize(network)
    x = torch.linspace(-1.5, 1.5, 6, dtype=torch.float64)[:, None]
    new = torch.tensor([[-2.0], [0.1], [3.0]], dtype=torch.float64)
    y, noise_var, prior_var = x.sin() + 1, 0.2, 0.7
    exact = n2g.condition(linearized.kernel(prior_var), (x, y), n2g.Gaussian(noise_var)).joint(new)
    features = nn.Linear(linearized.num_params, 1, bias=False).double()
    J, J_new = linearized.jacobian(x)[:, 0], linearized.jacobian(new)[:, 0]
    S = 1000
    drawn = ensemble(
        features,
        (J, y),
        n2g.Gaussian(noise_var),
        num_members=S,
        prior=prior_var,
        training=Training(num_steps=400, learning_rate=0.1, batch_size=None),
        randomized=True,
    )
    values = drawn.process.values(J_new)[:, :, 0]
    root = torch.linalg.cholesky(exact.covariance_matrix)
    white = torch.linalg.solve_triangular(root, (values - exact.mean).T, upper=False)
    assert white.mean(1).abs().max() < 4 / S**0.5
    error = torch.cov(white) - torch.eye(3, dtype=torch.float64)
    assert error.abs().max() < 4 * (2 / S) ** 0.5


def test_bootstrap_members_see_their_own_rows():
    x, y = data()
    linear = nn.Linear(2, 1, bias=False).double()
    lbfgs = lambda params: torch.optim.LBFGS(params, tolerance_grad=1e-12)
    training = Training(num_steps=10, optimizer=lbfgs, schedule="constant", batch_size=None)
    posterior = ensemble(
        linear, (x, y), n2g.Gaussian(0.1), num_members=3, training=training, bootstrap=True
    )
    index = torch.randint(40, (3, 40), generator=torch.Generator().manual_seed(0))
    for member, rows in enumerate(index):
        own, targets = x[rows], y[rows]
        precision = own.T @ own / 0.1 + torch.eye(2, dtype=x.dtype)
        expected = torch.linalg.solve(precision, own.T @ targets / 0.1).T
        assert torch.allclose(module_of(posterior, member).weight, expected, atol=1e-6)


def test_snapshots_are_one_network_at_the_ends_of_its_cycles():
    x, y = data()
    network = mlp()
    training = Training(num_steps=60, batch_size=None)
    posterior = ensemble(
        network, (x, y), n2g.Gaussian(0.1), num_members=3, training=training, snapshots=True
    )
    first = map_estimate(
        network, (x, y), n2g.Gaussian(0.1), training=Training(num_steps=20, batch_size=None)
    )
    assert torch.allclose(weights(posterior)[0], weights(first)[0], atol=1e-12)
    joint = posterior.recipe.statistics["log_joint"]
    assert joint[2] > joint[1] > joint[0]


def test_batch_norm_trains_one_by_one_and_members_keep_their_statistics():
    x, y = data()
    network = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)).double()
    posterior = ensemble(network, (x, y), n2g.Gaussian(), num_members=2, training=SHORT)
    assert "1.running_mean" in posterior.process.members.values
    for index in range(2):
        own = module_of(posterior, index)
        assert own[1].num_batches_tracked == 40
        assert torch.allclose(own(x), posterior.process.values(x)[index])
    with pytest.raises(InputError, match="a pass changes buffers, as batch norm does"):
        ensemble(network, (x, y), n2g.Gaussian(), training=SHORT, vectorize=True)
    still = ensemble(
        network.eval(), (x, y), n2g.Gaussian(), training=SHORT, num_members=2, vectorize=True
    )
    assert len(still.process.members) == 2


def test_dropout_is_vectorized_with_masks_of_its_own_for_each_member():
    x, y = data()
    network = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1)).double()
    state = torch.get_rng_state()
    given = {"num_members": 2, "training": SHORT, "vectorize": True}
    one, other = (ensemble(network, (x, y), n2g.Gaussian(0.1), **given) for _ in range(2))
    assert torch.equal(weights(one), weights(other))
    assert torch.equal(torch.get_rng_state(), state)


def test_the_network_stays_as_it_is_and_starts_are_independent_draws_of_its_initialization():
    network = mlp()
    before = copy.deepcopy(network.state_dict())
    tiny = Training(num_steps=1, learning_rate=1e-12)
    posterior = ensemble(network, data(), n2g.Gaussian(0.1), num_members=200, training=tiny)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    drawn = posterior.process.members.values["0.weight"].flatten()
    bound = 2**-0.5  # torch's: uniform in ±1/√fan_in
    assert drawn.abs().max() <= bound
    assert float(drawn.var()) == pytest.approx(bound**2 / 3, rel=0.1)
    assert len(drawn.unique()) == len(drawn)


def test_a_factory_gives_the_starts():
    made = []

    def factory():
        made.append(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double())
        return made[-1]

    state = torch.get_rng_state()
    tiny = Training(num_steps=1, learning_rate=1e-12)
    posterior = ensemble(factory, data(), n2g.Gaussian(0.1), num_members=3, training=tiny)
    assert torch.equal(torch.get_rng_state(), state)
    found = posterior.process.members.values["0.weight"]
    assert torch.allclose(found, torch.stack([one[0].weight for one in made]), atol=1e-10)


def test_members_of_a_factory_keep_what_is_not_trained():
    build = lambda: nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x, y = data()
    posterior = ensemble(
        build, (x, y), n2g.Gaussian(0.1), num_members=2, training=SHORT, only="2.*"
    )
    values = posterior.process.members.values
    assert not torch.equal(values["0.weight"][0], values["0.weight"][1])
    features = values["0.weight"] @ x.T + values["0.bias"][:, :, None]
    heads = (values["2.weight"] @ features.tanh() + values["2.bias"][:, :, None]).mT
    assert torch.allclose(posterior.process.values(x), heads)


def test_the_average_of_members_predicts_better_than_each_of_them():
    x, y = data(rows=240)
    train, test = (x[:40], y[:40]), (x[40:], y[40:])
    network = nn.Sequential(nn.Linear(2, 50), nn.ReLU(), nn.Linear(50, 1)).double()
    posterior = ensemble(
        network, train, n2g.Gaussian(0.01), training=Training(num_steps=300, batch_size=None)
    )
    together = -posterior.predict(test[0]).log_prob(test[1]).mean()
    f = posterior.process.values(test[0])
    alone = [-n2g.Gaussian(0.01).log_prob(one, test[1]).mean() for one in f]
    assert together < min(alone)


def test_learned_noise_keeps_the_variance_of_the_mixture_of_members():
    posterior = ensemble(mlp(), data(), n2g.Gaussian(), num_members=3, training=SHORT)
    noise = posterior.recipe.statistics["noise_var"]
    assert posterior.likelihood.noise_var == pytest.approx(float(noise.mean()))
    x, y = data()
    f = posterior.process.values(x)
    assert torch.allclose(noise, (y - f).square().mean((1, 2)))


def test_an_ensemble_is_saved_and_loaded(tmp_path):
    posterior = ensemble(mlp(), data(), n2g.Gaussian(), num_members=3, training=SHORT)
    posterior.save(tmp_path / "ensemble.pt")
    again = n2g.load(tmp_path / "ensemble.pt", mlp())
    x, _ = data()
    assert torch.equal(again.process.values(x), posterior.process.values(x))
    one, other = again.recipe.statistics, posterior.recipe.statistics
    assert all(torch.equal(one[name], value) for name, value in other.items())


def test_what_does_not_fit_is_refused():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))

        def forward(self, x):
            return self.scale * x[:, :1]

    noisy = n2g.Gaussian(0.1)
    with pytest.raises(NetworkError, match="'scale' belongs to no layer with reset_parameters"):
        ensemble(Own(), data(), noisy)
    with pytest.raises(InputError, match="the factory returned networks with the same parameters"):
        ensemble(mlp, data(), noisy)
    kinds = iter([nn.Tanh(), nn.ReLU()])
    with pytest.raises(NetworkError, match="network 1 of the factory computes something else"):
        ensemble(
            lambda: nn.Sequential(nn.Linear(2, 4), next(kinds), nn.Linear(4, 1)).double(),
            data(),
            noisy,
            num_members=2,
        )
    with pytest.raises(InputError, match="randomized=True draws noise"):
        ensemble(mlp(), data(), n2g.Gaussian(), randomized=True)
    with pytest.raises(InputError, match="needs a Gaussian prior with mean zero"):
        ensemble(mlp(), data(), noisy, randomized=True, prior=None)
    with pytest.raises(InputError, match="but the prior is LaplacePrior"):
        ensemble(mlp(), data(), noisy, randomized=True, prior=LaplacePrior())
    with pytest.raises(InputError, match="snapshots are of one network"):
        ensemble(mlp(), data(), noisy, snapshots=True, bootstrap=True)
    training = Training(optimizer=torch.optim.LBFGS)
    with pytest.raises(InputError, match="the optimizer or its schedule would mix the members"):
        ensemble(mlp(), data(), noisy, training=training, vectorize=True)
    with pytest.raises(TypeError, match="there is no option 'random'"):
        ensemble(mlp(), data(), noisy, random=True)
