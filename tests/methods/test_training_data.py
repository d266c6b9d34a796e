"""A network and the very data it was trained on: residuals alone cannot tell how sure to be."""

import pytest
import torch
from torch import nn

import net2gp as n2g
from net2gp.errors import NothingToTune


def trained(x, y, loss, outputs, steps=600):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(x.shape[1], 30), nn.Tanh(), nn.Linear(30, outputs)).double()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(network(x), y).backward()
        optimizer.step()
    return network.eval()


@pytest.fixture(scope="module")
def regression():
    generator = torch.Generator().manual_seed(1)
    x = torch.linspace(-3, 3, 60, dtype=torch.float64)[:, None]
    y = torch.sin(2 * x) + 0.1 * torch.randn(60, 1, generator=generator, dtype=torch.float64)
    return trained(x, y, nn.functional.mse_loss, 1), x, y


@pytest.fixture(scope="module")
def classification():
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(60, 2, generator=generator, dtype=torch.float64)
    y = (x.sum(1) > 0).long()
    return trained(x, y, nn.functional.cross_entropy, 2), x, y


def kept(network, data):
    """`adapt`, which says that there is nothing to learn from these data."""
    with pytest.warns(NothingToTune, match=r"Use laplace\(network, data, Gaussian\(\)\)"):
        return n2g.adapt(network, data, n2g.Gaussian())


def test_uncertainty_grows_away_from_the_training_data(regression):
    network, x, y = regression
    posterior = kept(network, (x, y))
    near, far = posterior.marginal(x).stddev.mean(), posterior.marginal(2 * x[-5:]).stddev.mean()
    assert float(far) > 5 * float(near)


def test_the_noise_of_the_training_data_is_found(regression):
    network, x, y = regression
    posterior = kept(network, (x, y))
    assert posterior.likelihood.noise_var == pytest.approx(0.01, rel=0.4)


def test_a_prior_around_the_network_would_prefer_no_change(regression):
    network, x, y = regression
    linearized = n2g.linearize(network)
    evidence = [
        float(
            n2g.condition(
                linearized.kernel(v), (x, y), n2g.Gaussian(0.01), mean=linearized
            ).evidence
        )
        for v in (1e-6, 1e-3, 1.0)
    ]
    assert evidence[0] > evidence[1] > evidence[2]


def test_the_tuned_prior_maximizes_the_evidence_around_zero(regression):
    network, x, y = regression
    linearized = n2g.linearize(network)
    posterior = kept(linearized, (x, y))
    prior, noise = float(posterior.kernel.prior_var["0.weight"]), posterior.likelihood.noise_var

    def evidence(prior_var, noise_var):
        around_zero = lambda z: linearized(z) - linearized.jvp(z, linearized.params)
        kernel = linearized.kernel(prior_var)
        return float(
            n2g.condition(kernel, (x, y), n2g.Gaussian(noise_var), mean=around_zero).evidence
        )

    best = evidence(prior, noise)
    for factor in (0.8, 1.25):
        assert evidence(prior * factor, noise) < best
        assert evidence(prior, noise * factor) < best


def test_a_classifier_says_that_its_training_data_cannot_tune_a_prior(classification):
    network, x, y = classification
    message = "the evidence prefers no change of the network at all"
    with pytest.warns(NothingToTune, match=message) as caught:
        posterior = n2g.adapt(network, (x, y), n2g.Categorical())
    assert caught[0].filename == __file__
    probs = posterior.predict(x).probs
    assert torch.allclose(probs, network(x).softmax(1).detach(), atol=0.01)


def test_a_classifier_with_a_given_prior_is_unsure_away_from_its_training_data(classification):
    network, x, y = classification
    posterior = n2g.adapt(network, (x, y), n2g.Categorical(), prior_var=0.1)
    far = torch.tensor([[-8.0, 9.0], [9.0, -8.0]], dtype=torch.float64)
    near = posterior.marginal(x).variance.mean()
    assert float(posterior.marginal(far).variance.mean()) > 5 * float(near)
    bare = network(far).softmax(1).detach().max()
    assert float(posterior.predict(far).probs.max()) < float(bare)


def test_the_posterior_mean_stays_that_of_the_network(regression):
    network, x, y = regression
    posterior = kept(network, (x, y))
    moved = (posterior.marginal(x).mean - network(x).detach()).abs().max()
    assert float(moved) < 1e-6
