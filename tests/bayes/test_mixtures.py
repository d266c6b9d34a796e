"""Mixtures and sets of networks: temperatures, the law of total variance, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import net2gp as n2g
from net2gp.errors import InputError, NotAvailable
from net2gp.posteriors.recipes.members import Members
from posteriors.methods import METHODS, found
from posteriors.ways import unseen_points


@pytest.mark.parametrize("name", [n for n in METHODS if n.startswith("mixture")])
def test_moments_of_a_mixture_obey_the_law_of_total_variance(name):
    posterior, x = found(name), unseen_points()
    members, weights = posterior.process.members, posterior.process.weights
    laws = [member.joint(x) for member in members]
    mean = sum(w * law.mean for w, law in zip(weights, laws, strict=True))
    total = sum(
        w * (law.covariance_matrix + torch.outer(law.mean - mean, law.mean - mean))
        for w, law in zip(weights, laws, strict=True)
    )
    torch.testing.assert_close(posterior.joint(x).mean, mean)
    torch.testing.assert_close(posterior.joint(x).covariance_matrix, total)


def test_the_variance_of_a_mixture_splits_into_noise_within_and_between():
    posterior, x = found("mixture"), unseen_points()
    parts = posterior.split(x)
    assert parts.between is not None
    torch.testing.assert_close(parts.total, posterior.predict(x).variance)
    torch.testing.assert_close(parts.within + parts.between + parts.aleatoric, parts.total)
    assert bool((parts.between > 0).any())


@pytest.mark.parametrize("name", ["networks", "networks, classes", "networks, counts"])
def test_the_split_of_networks_is_exact(name):
    posterior, x = found(name), unseen_points()
    parts, law = posterior.split(x), posterior.predict(x)
    total = law.probs * (1 - law.probs) if "classes" in name else law.variance
    torch.testing.assert_close(parts.total, total.reshape(parts.total.shape))


def test_a_tempered_mixture_tempers_its_members():
    posterior, x = found("mixture"), unseen_points()
    hot = posterior.tempered(3.0)
    for cold, warm in zip(posterior.process.members, hot.process.members, strict=True):
        torch.testing.assert_close(warm.marginal(x).variance, 3 * cold.marginal(x).variance)
    with pytest.raises(NotAvailable, match="this posterior is a set of networks"):
        found("networks").tempered(2.0)


def test_members_are_evaluated_as_one_by_one():
    posterior, x = found("networks"), unseen_points()
    members = posterior.process.members
    alone = torch.stack([network(x) for network in members.each()])
    torch.testing.assert_close(members(x), alone, rtol=1e-12, atol=1e-12)


def test_members_keep_their_own_batch_statistics():
    network = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double().eval()
    architecture = n2g.linearize(network)
    values = {n: v.expand(2, *v.shape).clone() for n, v in architecture.params.items()}
    means = torch.tensor([[0.0, 0.0, 0.0], [1.0, 2.0, 3.0]], dtype=torch.float64)
    members = Members(architecture, {**values, "1.running_mean": means})
    x = unseen_points()
    with torch.no_grad():
        network[1].running_mean.copy_(means[1])
        expected = network(x)
    torch.testing.assert_close(members(x)[1], expected)


def test_what_does_not_belong_together_is_refused_by_name():
    x = unseen_points()
    y = torch.zeros(len(x), 1, dtype=torch.float64)

    def fit(width: int):
        network = nn.Sequential(nn.Linear(2, width), nn.Linear(width, 1)).double().eval()
        return n2g.adapt(network, (x, y), n2g.Gaussian(0.1), prior_var=1.0)

    with pytest.raises(InputError, match=r"unlike architectures: '0.bias' has shape \(4,\)"):
        n2g.bayes.mixture([fit(3), fit(4)])
    with pytest.raises(InputError, match="2 outputs"):
        n2g.bayes.mixture([fit(3), found("networks")])
    with pytest.raises(InputError, match="a mixture is of one or more posteriors"):
        n2g.bayes.mixture([])
    with pytest.raises(InputError, match="1 posteriors and 2 weights"):
        n2g.bayes.mixture([fit(3)], [1.0, 2.0])
    with pytest.raises(InputError, match="weights"):
        n2g.bayes.mixture([fit(3)], [-1.0])
