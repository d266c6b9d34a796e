"""Training to the most probable parameters: closed forms, torch's own steps, the user's module as it was."""

import copy

import pytest
import torch
from torch import nn

import net2gp as n2g
from net2gp.bayes import NormalPrior, Training, map_estimate, module_of


def line(rows=30, noise=0.3, seed=0):
    """Rows of a linear model with 3 weights."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    weights = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    y = x @ weights[:, None] + noise * torch.randn(
        rows, 1, generator=generator, dtype=torch.float64
    )
    return x, y


def linear():
    torch.manual_seed(1)
    return nn.Linear(3, 1, bias=False).double()


def lbfgs(params):
    return torch.optim.LBFGS(params, line_search_fn="strong_wolfe", tolerance_grad=1e-12)


EXACT = Training(num_steps=5, optimizer=lbfgs, schedule="constant", batch_size=None)


def ridge(x, y, noise_var, prior_var):
    precision = x.T @ x / noise_var + torch.eye(3, dtype=x.dtype) / prior_var
    return torch.linalg.solve(precision, x.T @ y / noise_var).T


def test_a_linear_model_gets_the_weights_of_ridge_regression():
    x, y = line()
    posterior = map_estimate(linear(), (x, y), n2g.Gaussian(0.5), prior=0.2, training=EXACT)
    found = module_of(posterior).weight
    assert torch.allclose(found, ridge(x, y, 0.5, 0.2), atol=1e-7)
    assert torch.equal(posterior.mean(x), module_of(posterior)(x))


def test_a_flat_prior_gives_least_squares_and_a_prior_by_pattern_its_own_ridge():
    x, y = line()
    flat = map_estimate(linear(), (x, y), n2g.Gaussian(0.5), prior=None, training=EXACT)
    assert torch.allclose(module_of(flat).weight, torch.linalg.lstsq(x, y).solution.T, atol=1e-7)
    own = NormalPrior({"weight": 0.01})
    posterior = map_estimate(linear(), (x, y), n2g.Gaussian(0.5), prior=own, training=EXACT)
    assert torch.allclose(module_of(posterior).weight, ridge(x, y, 0.5, 0.01), atol=1e-7)


def test_open_noise_and_weights_are_at_their_joint_optimum():
    x, y = line()
    training = Training(num_steps=250, learning_rate=0.1, batch_size=None)
    posterior = map_estimate(linear(), (x, y), n2g.Gaussian(), prior=0.2, training=training)
    weights, noise = module_of(posterior).weight.detach(), posterior.likelihood.noise_var
    assert noise == pytest.approx(float((y - x @ weights.T).square().mean()), rel=1e-10)
    assert torch.allclose(weights, ridge(x, y, noise, 0.2), atol=1e-5)


def test_mini_batches_of_open_noise_find_the_same_optimum():
    x, y = line(rows=200)
    training = Training(num_steps=400, learning_rate=0.05, batch_size=50)
    posterior = map_estimate(linear(), (x, y), n2g.Gaussian(), prior=0.2, training=training)
    weights, noise = module_of(posterior).weight.detach(), posterior.likelihood.noise_var
    assert torch.allclose(weights, ridge(x, y, noise, 0.2), atol=0.02)


def test_steps_are_those_of_torch_on_the_mean_loss_with_weight_decay():
    x, y = line()
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    N, noise_var, prior_var = len(x), 0.5, 0.2
    sgd = lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9)
    training = Training(num_steps=100, optimizer=sgd, schedule="constant", batch_size=None)
    posterior = map_estimate(
        network, (x, y), n2g.Gaussian(noise_var), prior=prior_var, training=training
    )
    theirs = copy.deepcopy(network)
    decay = 1 / (N * prior_var)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.05, momentum=0.9, weight_decay=decay)
    for _ in range(100):
        optimizer.zero_grad()
        ((theirs(x) - y).square().sum() / (2 * noise_var * N)).backward()
        optimizer.step()
    for ours, other in zip(module_of(posterior).parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(ours, other, atol=1e-12)


def test_the_log_joint_is_that_of_the_model():
    x, y = line()
    posterior = map_estimate(linear(), (x, y), n2g.Gaussian(0.5), prior=0.2, training=EXACT)
    model = n2g.bayes.Model.of(module_of(posterior), n2g.Gaussian(0.5), 0.2)
    expected = model.log_joint(model.params, (x, y))
    assert torch.allclose(posterior.recipe.statistics["log_joint"], expected[None])


def test_the_network_of_the_user_and_the_global_random_state_do_not_change():
    x, y = line()
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 1))
    network = network.double().requires_grad_(False)
    before, state = copy.deepcopy(network.state_dict()), torch.get_rng_state()
    posterior = map_estimate(network, (x, y), n2g.Gaussian(), training=Training(num_steps=20))
    assert torch.equal(torch.get_rng_state(), state)
    assert network.training
    assert not any(p.requires_grad for p in network.parameters())
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert not module_of(posterior).training


def test_batch_norm_trains_its_statistics_and_predicts_with_them():
    x, y = line()
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1)).double()
    posterior = map_estimate(network, (x, y), n2g.Gaussian(), training=Training(num_steps=20))
    trained = module_of(posterior)
    assert trained[1].num_batches_tracked == 20
    assert network[1].num_batches_tracked == 0
    assert torch.allclose(posterior.mean(x), trained(x))
    frozen = map_estimate(network.eval(), (x, y), n2g.Gaussian(), training=Training(num_steps=20))
    assert module_of(frozen)[1].num_batches_tracked == 0


def test_training_repeats_with_its_seed_alone():
    x, y = line()
    network = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()
    means = []
    for seed in (0, 0, 1):
        torch.rand(3)
        training = Training(num_steps=30, batch_size=10, seed=seed)
        means.append(map_estimate(network, (x, y), n2g.Gaussian(0.1), training=training).mean(x))
    assert torch.equal(means[0], means[1])
    assert not torch.allclose(means[0], means[2])


def test_early_stopping_keeps_the_best_look():
    x, y = line(rows=20, noise=2.0)
    network = nn.Sequential(nn.Linear(3, 50), nn.ReLU(), nn.Linear(50, 1)).double()
    other = line(rows=100, noise=2.0, seed=5)
    losses = {}
    for steps in range(10, 101, 10):  # the same steps with a constant rate, stopped from outside
        training = Training(num_steps=steps, schedule="constant")
        posterior = map_estimate(network, (x, y), n2g.Gaussian(1.0), prior=None, training=training)
        law = posterior.predict(other[0])
        losses[steps] = float(-law.log_prob(other[1]).mean())
    training = Training(
        num_steps=100, schedule="constant", held_out=other, look_every=10, patience=20
    )
    stopped = map_estimate(network, (x, y), n2g.Gaussian(1.0), prior=None, training=training)
    best = min(losses, key=losses.__getitem__)
    assert best < 100
    assert int(stopped.recipe.statistics["steps"]) == best
    assert float(stopped.recipe.statistics["held_out_loss"]) == pytest.approx(losses[best])
    short = Training(num_steps=100, schedule="constant", held_out=other, look_every=10, patience=1)
    shorter = map_estimate(network, (x, y), n2g.Gaussian(1.0), prior=None, training=short)
    assert int(shorter.recipe.statistics["steps"]) <= best


def test_a_share_is_held_out_and_gives_the_noise():
    x, y = line(rows=40)
    training = Training(num_steps=50, held_out=0.25)
    posterior = map_estimate(linear(), (x, y), n2g.Gaussian(), training=training)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))[:10]
    expected = (y - posterior.mean(x))[order].square().mean()
    assert posterior.likelihood.noise_var == pytest.approx(float(expected))
    assert len(posterior.x) == 40


def test_schedules_of_torch_step_with_the_optimizer_or_with_the_looks():
    x, y = line()
    rates = []

    def halving(optimizer):
        rates.append(optimizer)
        return torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.5)

    training = Training(num_steps=10, learning_rate=0.4, schedule=halving)
    map_estimate(linear(), (x, y), n2g.Gaussian(0.1), training=training)
    assert rates[-1].param_groups[0]["lr"] == pytest.approx(0.1)
    plateau = lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    training = Training(num_steps=40, schedule=plateau, held_out=0.2, look_every=10)
    map_estimate(linear(), (x, y), n2g.Gaussian(0.1), training=training)


def test_chosen_parameters_alone_are_trained():
    x, y = line()
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    training = Training(num_steps=10)
    posterior = map_estimate(network, (x, y), n2g.Gaussian(0.1), only="2.*", training=training)
    trained = module_of(posterior)
    assert torch.equal(trained[0].weight, network[0].weight)
    assert not torch.equal(trained[2].weight, network[2].weight)


def test_noise_of_each_point_follows_the_batches():
    x, y = line()
    noise = torch.linspace(0.1, 2.0, 30, dtype=torch.float64)[:, None]
    training = Training(num_steps=400, batch_size=10, learning_rate=0.1)
    posterior = map_estimate(linear(), (x, y), n2g.Gaussian(noise), training=training)
    precision = x.T @ (x / noise) + torch.eye(3, dtype=x.dtype)
    expected = torch.linalg.solve(precision, x.T @ (y / noise)).T
    assert torch.allclose(module_of(posterior).weight, expected, atol=0.02)


def test_classes_and_saving(tmp_path):
    x, _ = line()
    y = (x[:, 0] > 0).long()
    network = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    posterior = map_estimate(network, (x, y), n2g.Categorical(), training=Training(num_steps=200))
    assert (posterior.predict(x).probs.argmax(1) == y).double().mean() > 0.95
    posterior.save(tmp_path / "map.pt")
    again = n2g.load(tmp_path / "map.pt", network)
    assert torch.equal(again.mean(x), posterior.mean(x))


def test_what_does_not_fit_is_refused():
    x, y = line()
    sgd = lambda params: torch.optim.SGD(params, lr=1e6)
    training = Training(num_steps=200, optimizer=sgd, schedule="constant")
    with pytest.raises(n2g.errors.InputError, match="the training diverged"):
        map_estimate(linear(), (x, y), n2g.Gaussian(0.1), training=training)
    with pytest.raises(n2g.errors.InputError, match="optimizer must return a torch optimizer"):
        map_estimate(linear(), (x, y), n2g.Gaussian(0.1), training=Training(optimizer=lambda p: 3))
    with pytest.raises(n2g.errors.InputError, match="training must be Training"):
        map_estimate(linear(), (x, y), n2g.Gaussian(0.1), training=0.1)
    plateau = Training(schedule=torch.optim.lr_scheduler.ReduceLROnPlateau)
    with pytest.raises(n2g.errors.InputError, match="follows the loss of held-out rows"):
        map_estimate(linear(), (x, y), n2g.Gaussian(0.1), training=plateau)
    with pytest.raises(n2g.errors.InputError, match="held_out must be a share"):
        Training(held_out=2.0)
    with pytest.raises(n2g.errors.InputError, match="schedule must be"):
        Training(schedule="linear")
    with pytest.raises(n2g.errors.InputError, match="y must have shape"):
        map_estimate(linear(), (x, y[:, [0, 0]]), n2g.Gaussian(0.1))
    posterior = map_estimate(linear(), (x, y), n2g.Gaussian(0.1), training=EXACT)
    with pytest.raises(n2g.errors.InputError, match="there are 1 networks"):
        module_of(posterior, 1)
