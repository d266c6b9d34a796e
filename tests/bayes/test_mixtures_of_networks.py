"""Mixtures of posteriors: total variance, splits, draws by weight, files, and what cannot be mixed."""

import pytest
import torch
from torch import nn

import net2gp as n2g
from net2gp.bayes import Training, ensemble, map_estimate, mixture, module_of
from net2gp.errors import InputError, NotAvailable

WEIGHTS = [0.5, 0.2, 0.3]


def data(rows=24):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 2, generator=generator, dtype=torch.float64)
    noise = 0.1 * torch.randn(rows, generator=generator, dtype=torch.float64)
    return x, (x[:, 0].sin() + x[:, 1].square() / 4 + noise)[:, None]


NEW = torch.tensor([[0.0, 0.0], [2.0, -1.0], [5.0, 5.0]], dtype=torch.float64)


def network(outputs=1, width=6, seed=0):
    torch.manual_seed(seed)
    layers = [nn.Linear(2, width), nn.Tanh(), nn.Linear(width, outputs)]
    return nn.Sequential(*layers).double().eval()


def lbfgs(params):
    return torch.optim.LBFGS(params, line_search_fn="strong_wolfe")


EXACT = Training(num_steps=10, optimizer=lbfgs, schedule="constant", batch_size=None)
STILL = Training(num_steps=1, learning_rate=1e-15)


def laplaces():
    """Laplace approximations around three networks, each with a noise of its own."""
    noises = (0.1, 0.2, 0.4)
    members = []
    for seed, noise in enumerate(noises):
        found = map_estimate(network(seed=seed), data(), n2g.Gaussian(noise), training=EXACT)
        members.append(n2g.laplace(module_of(found), data(), n2g.Gaussian(noise), prior_var=1.0))
    return members


@pytest.fixture(scope="module")
def members():
    return laplaces()


@pytest.fixture(scope="module")
def mixed(members):
    return mixture(members, WEIGHTS)


def averaged(parts):
    return sum(weight * part for weight, part in zip(WEIGHTS, parts, strict=True))


def test_moments_follow_the_law_of_total_variance(members, mixed):
    joints = [member.joint(NEW) for member in members]
    mean = averaged([law.mean for law in joints])
    squares = averaged([law.covariance_matrix + torch.outer(law.mean, law.mean) for law in joints])
    joint = mixed.joint(NEW)
    assert torch.allclose(joint.mean, mean, atol=1e-12)
    covariance = squares - torch.outer(mean, mean)
    assert torch.allclose(joint.covariance_matrix, covariance, atol=1e-10)
    assert torch.allclose(mixed.mean(NEW).flatten(), mean, atol=1e-12)
    assert torch.allclose(mixed.marginal(NEW).variance[:, 0], covariance.diagonal(), atol=1e-10)


def test_predictions_are_the_weighted_densities_of_the_members(members, mixed):
    y = torch.tensor([[0.3], [1.0], [-2.0]], dtype=torch.float64)
    law = mixed.predict(NEW)
    densities = averaged([member.predict(NEW).log_prob(y).exp() for member in members])
    assert torch.allclose(law.log_prob(y).exp(), densities, rtol=1e-10)
    means = [member.predict(NEW).mean for member in members]
    second = averaged(
        [member.predict(NEW).variance + member.predict(NEW).mean.square() for member in members]
    )
    assert torch.allclose(law.mean, averaged(means), atol=1e-12)
    assert torch.allclose(law.variance, second - averaged(means).square(), atol=1e-10)


def test_the_split_is_noise_and_variance_within_and_between_members(members, mixed):
    split = mixed.split(NEW)
    assert torch.allclose(
        split.aleatoric, torch.full_like(split.aleatoric, 0.5 * 0.1 + 0.04 + 0.12)
    )
    within = averaged([member.marginal(NEW).variance for member in members])
    means = [member.mean(NEW) for member in members]
    between = averaged([(m - averaged(means)).square() for m in means])
    assert torch.allclose(split.within, within, atol=1e-12)
    assert torch.allclose(split.between, between, atol=1e-12)
    assert torch.allclose(split.total, mixed.predict(NEW).variance, atol=1e-10)


def test_another_likelihood_replaces_the_noise_of_all_members(members, mixed):
    other = n2g.Gaussian(2.0)
    difference = mixed.predict(NEW, likelihood=other).variance - mixed.marginal(NEW).variance
    assert torch.allclose(difference, torch.full_like(difference, 2.0))
    assert mixed.likelihood.noise_var == pytest.approx(0.5 * 0.1 + 0.2 * 0.2 + 0.3 * 0.4)


def test_draws_come_from_members_by_their_weights(mixed):
    generator = torch.Generator().manual_seed(0)
    S = 4000
    draws = mixed.sample(NEW, S, generator=generator)[:, :, 0]
    law = mixed.joint(NEW)
    errors = (draws.mean(0) - law.mean) / (law.variance / S).sqrt()
    assert errors.abs().max() < 4
    scale = law.variance.sqrt()[:, None] * law.variance.sqrt()
    assert ((torch.cov(draws.T) - law.covariance_matrix) / scale).abs().max() < 0.15


def test_drawn_functions_weights_and_networks_agree_with_each_other(mixed):
    draws = [torch.Generator().manual_seed(1) for _ in range(3)]
    functions = mixed.sample_functions(20, generator=draws[0])
    assert functions(NEW).shape == (20, 3, 1)
    assert torch.allclose(functions(NEW)[:, :1], functions(NEW[:1]))
    weights = mixed.sample_weights(20, generator=draws[1])
    values = mixed.sample(NEW, 20, generator=draws[2], linear=False)
    linearized = n2g.linearize(network())
    expected = [
        linearized.evaluate({name: value[s] for name, value in weights.items()}, NEW)
        for s in range(20)
    ]
    assert torch.allclose(values, torch.stack(expected), atol=1e-10)


def test_a_mixture_is_saved_and_loaded_as_one_file(mixed, tmp_path):
    mixed.save(tmp_path / "mixture.pt")
    again = n2g.load(tmp_path / "mixture.pt", network(seed=9))
    assert torch.equal(again.process.weights, mixed.process.weights)
    assert torch.equal(again.joint(NEW).covariance_matrix, mixed.joint(NEW).covariance_matrix)
    one, other = again.split(NEW), mixed.split(NEW)
    assert torch.equal(one.between, other.between)
    assert torch.equal(one.aleatoric, other.aleatoric)
    y = torch.zeros(3, 1, dtype=torch.float64)
    assert torch.equal(again.predict(NEW).log_prob(y), mixed.predict(NEW).log_prob(y))


def test_a_mixture_of_single_networks_is_their_ensemble():
    x, y = data()
    together = ensemble(
        network(), (x, y), n2g.Gaussian(0.1), num_members=3, training=Training(num_steps=30)
    )
    members = []
    for index in range(3):
        start = module_of(together, index)
        members.append(map_estimate(start, (x, y), n2g.Gaussian(0.1), training=STILL))
    mixed = mixture(members)
    assert torch.allclose(mixed.mean(NEW), together.mean(NEW), atol=1e-10)
    one, other = mixed.joint(NEW).covariance_matrix, together.joint(NEW).covariance_matrix
    assert torch.allclose(one, other, atol=1e-10)
    targets = torch.zeros(3, 1, dtype=torch.float64)
    laws = [posterior.predict(NEW).log_prob(targets) for posterior in (mixed, together)]
    assert torch.allclose(*laws, atol=1e-10)
    split = mixed.split(NEW)
    assert split.within.abs().max() < 1e-12
    assert torch.allclose(split.between, together.split(NEW).epistemic, atol=1e-10)


def test_classes_average_probabilities():
    x, y = data()
    labels = (y[:, 0] > 0.3).long()
    members = []
    for seed in range(2):
        start = network(2, seed=seed)
        found = map_estimate(start, (x, labels), n2g.Categorical(), training=EXACT)
        members.append(n2g.laplace(module_of(found), (x, labels), n2g.Categorical(), prior_var=1.0))
    mixed = mixture(members, [1, 3])
    probs = [member.predict(NEW).probs for member in members]
    assert torch.allclose(mixed.predict(NEW).probs, 0.25 * probs[0] + 0.75 * probs[1], atol=1e-12)
    split = mixed.split(NEW)
    center = 0.25 * probs[0] + 0.75 * probs[1]
    between = 0.25 * (probs[0] - center).square() + 0.75 * (probs[1] - center).square()
    assert torch.allclose(split.between, between, atol=1e-12)


def test_tempered_and_updated_mixtures_are_mixtures_of_the_members(members, mixed):
    hot = mixed.tempered(4.0)
    variances = [member.marginal(NEW).variance for member in members]
    grown = hot.marginal(NEW).variance - mixed.marginal(NEW).variance
    assert torch.allclose(grown, 3 * averaged(variances), atol=1e-10)
    x = data()[0][:, :1]
    parts = [n2g.condition(n2g.kernels.RBF(s), (x, x), n2g.Gaussian(0.1)) for s in (1.0, 2.0)]
    more = mixture(parts).update((x[:2] + 5, x[:2]))
    again = mixture([part.update((x[:2] + 5, x[:2])) for part in parts])
    assert torch.allclose(more.mean(x), again.mean(x))


def test_the_dtype_moves_with_all_members(mixed):
    moved = mixed.to(dtype=torch.float32)
    assert moved.mean(NEW.float()).dtype == torch.float32
    assert torch.allclose(moved.mean(NEW.float()).double(), mixed.mean(NEW), atol=1e-5)


def test_what_cannot_be_mixed_is_refused_by_name(members, mixed):
    x, y = data()
    wide = map_estimate(network(width=7), (x, y), n2g.Gaussian(0.1), training=STILL)
    with pytest.raises(InputError, match=r"'0.bias' has shape \(7,\) in posterior 1 and \(6,\)"):
        mixture([members[0], wide])
    two = map_estimate(network(2), (x, y[:, [0, 0]]), n2g.Gaussian(0.1), training=STILL)
    with pytest.raises(InputError, match="posterior 1 has 2 outputs and posterior 0 has 1"):
        mixture([members[0], two])
    labels = (y > 0.3).long()
    other = map_estimate(network(), (x, labels), n2g.Bernoulli(), training=STILL)
    with pytest.raises(InputError, match="posterior 1 has the likelihood Bernoulli"):
        mixture([members[0], other])
    with pytest.raises(InputError, match="there are 3 posteriors and 2 weights"):
        mixture(members, [1.0, 2.0])
    with pytest.raises(InputError, match="weights must be"):
        mixture(members, [1.0, 0.0, 1.0])
    with pytest.raises(InputError, match="a mixture is of one or more posteriors"):
        mixture([])
    with pytest.raises(InputError, match="a mixture is of one or more posteriors"):
        mixture([network()])
    with pytest.raises(NotAvailable, match="a mixture of posteriors has no evidence of its own"):
        mixed.log_marginal_likelihood()


def test_networks_that_compute_something_else_are_not_mixed():
    x = torch.linspace(-1, 1, 5)[:, None]
    nets = [
        nn.Sequential(nn.Linear(1, 4), act(), nn.Linear(4, 1)).eval() for act in (nn.Tanh, nn.ReLU)
    ]
    quick = Training(num_steps=2)
    found = [map_estimate(one, (x, x), n2g.Gaussian(0.1), training=quick) for one in nets]
    with pytest.raises(InputError, match="posterior 1 computes something else than posterior 0's"):
        mixture(found)
