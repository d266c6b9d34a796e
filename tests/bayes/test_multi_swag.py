"""Multi-SWAG: the Gaussians of wandering members, fresh statistics of batch norm, one mixture."""

import pytest
import torch
from torch import nn

import net2gp as n2g
from net2gp.bayes import Training, module_of, multi_swag
from net2gp.errors import InputError, NoMinibatches
from net2gp.links import WeightSamples


def data(rows=40):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 2, generator=generator, dtype=torch.float64)
    noise = 0.1 * torch.randn(rows, generator=generator, dtype=torch.float64)
    return x, (x[:, 0].sin() + x[:, 1].square() / 4 + noise)[:, None]


def mlp(norm=False):
    torch.manual_seed(3)
    middle = [nn.BatchNorm1d(8)] if norm else []
    return nn.Sequential(nn.Linear(2, 8), *middle, nn.Tanh(), nn.Linear(8, 1)).double()


SHORT = Training(num_steps=40, batch_size=20)


def test_vectorized_members_are_those_of_a_loop():
    given = {"num_members": 2, "training": SHORT, "num_collected": 6, "rank": 3}
    one, other = (
        multi_swag(mlp(), data(), n2g.Gaussian(), vectorize=way, **given) for way in (True, False)
    )
    x, y = data()
    assert torch.allclose(one.joint(x).covariance_matrix, other.joint(x).covariance_matrix)
    assert torch.allclose(one.predict(x).log_prob(y), other.predict(x).log_prob(y))
    noises = [member.likelihood.noise_var for member in one.process.members]
    assert noises[0] != noises[1]
    for index, noise in enumerate(noises):
        residual = (module_of(one, index)(x) - y).detach()
        assert noise == pytest.approx(float(residual.square().mean()))


def test_it_recovers_the_stationary_covariance_of_stochastic_gradients():
    """Σ of θ ← θ − η(Hθ − g_B), whose batches B of one row have gradients of covariance C.

    In one dimension θ' = (1 − η h_B) θ + η g_B has the mean E[g]/E[h] and the variance
    η² Var[h_B θ̄ − g_B] / (1 − E[(1 − η h_B)²]).
    """
    generator = torch.Generator().manual_seed(0)
    x = 1 + 0.3 * torch.randn(50, 1, generator=generator, dtype=torch.float64)
    y = x + 0.5 * torch.randn(50, 1, generator=generator, dtype=torch.float64)
    rate, prior_var, N = 0.1, 1.0, 50
    h, g = x.square() + 1 / (prior_var * N), x * y
    mean = g.mean() / h.mean()
    variance = rate**2 * (h * mean - g).var(correction=0) / (1 - (1 - rate * h).square().mean())
    sgd = lambda params: torch.optim.SGD(params, lr=rate)
    # an epoch visits each row once; with 400 copies of the rows batches are nearly independent
    training = Training(num_steps=100, batch_size=1, optimizer=sgd)
    posterior = multi_swag(
        nn.Linear(1, 1, bias=False).double(),
        (x.repeat(400, 1), y.repeat(400, 1)),
        n2g.Gaussian(1.0),
        num_members=4,
        prior=prior_var / 400,
        training=training,
        num_collected=400,
        collect_every=5,
        rank=0,
    )
    found = [member.process for member in posterior.process.members]
    means = torch.stack([process.linearized.params["weight"].reshape(()) for process in found])
    variances = torch.stack([process.covariance.variance.reshape(()) for process in found])
    assert float(means.mean()) == pytest.approx(float(mean), abs=0.03)
    assert float(variances.mean()) == pytest.approx(float(variance), rel=0.15)


def test_batch_norm_gets_the_statistics_of_the_mean_weights():
    x, y = data()
    posterior = multi_swag(
        mlp(norm=True), (x, y), n2g.Gaussian(0.1), num_members=2, training=SHORT, num_collected=4
    )
    for index in range(2):
        own = module_of(posterior, index)
        hidden = own[0](x).reshape(2, 20, 8)
        assert torch.allclose(own[1].running_mean, hidden.mean((0, 1)))
        assert torch.allclose(own[1].running_var, hidden.var(1).mean(0))
        assert torch.allclose(own(x), posterior.process.members[index].mean(x))


def test_the_networks_themselves_can_be_averaged():
    x, y = data()
    posterior = multi_swag(
        mlp(), (x, y), n2g.Gaussian(0.1), num_members=2, training=SHORT, collecting_rate=1e-4
    )
    law = posterior.predict(x, samples=WeightSamples(50))
    # with tiny steps the weights hardly wander, so that the network is linear on their way
    assert torch.allclose(law.mean, posterior.predict(x).mean, atol=0.05)


def test_it_is_saved_and_loaded(tmp_path):
    x, _ = data()
    posterior = multi_swag(mlp(), data(), n2g.Gaussian(), num_members=2, training=SHORT)
    posterior.save(tmp_path / "swag.pt")
    again = n2g.load(tmp_path / "swag.pt", mlp())
    assert torch.equal(again.joint(x).covariance_matrix, posterior.joint(x).covariance_matrix)


def test_what_does_not_fit_is_refused():
    with pytest.raises(InputError, match="whose prior must be Gaussian too"):
        multi_swag(mlp(), data(), n2g.Gaussian(), prior=None, training=SHORT)
    with pytest.raises(InputError, match="2 collected weights are needed"):
        multi_swag(mlp(), data(), n2g.Gaussian(), training=SHORT, num_collected=1)
    with pytest.raises(InputError, match="rank must be a whole number"):
        multi_swag(mlp(), data(), n2g.Gaussian(), rank=-1, training=SHORT)


@pytest.mark.parametrize("size", [None, 40, 128])
def test_steps_on_all_rows_are_warned_of_since_they_have_no_noise(size):
    training = Training(num_steps=5, batch_size=size)
    with pytest.warns(NoMinibatches, match=r"no noise of minibatches.*Training\(batch_size=10\)"):
        multi_swag(mlp(), data(), n2g.Gaussian(0.1), num_members=2, training=training)
