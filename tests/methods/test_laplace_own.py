"""A structure that a user writes: the example of CONTRIBUTING.md, and what follows from its two methods."""

import warnings
from dataclasses import dataclass

import pytest
import torch

import net2gp as n2g
from contributing import example
from methods.laplace_cases import NEW, X, labels, mlp, quietly
from net2gp.errors import InputError, Net2GPWarning, NotAvailable
from net2gp.methods.laplace_approximation.task import make_task

Isotropic = example("structure").Isotropic
LIKELIHOODS = [n2g.Gaussian(), n2g.Gaussian(0.3), n2g.Categorical(), n2g.Bernoulli()]
TUNINGS = {
    "default": None,
    "evidence": n2g.tuning.Evidence(),
    "by layer": n2g.tuning.Evidence(per_layer=True),
}


def has_open_noise(likelihood):
    return getattr(likelihood, "noise_var", 1.0) is None


def curvature_matrix(likelihood):
    """(tr H / P) I by brute force, at noise 1 where it is open."""
    linearized = n2g.linearize(mlp())
    J = linearized.jacobian(X)
    used = n2g.Gaussian(1.0) if has_open_noise(likelihood) else likelihood
    Lam = used.curvature(linearized(X))
    trace = torch.einsum("ncp,ncd,ndp->", J, Lam, J)
    return trace / J.shape[2] * torch.eye(J.shape[2]).double()


def flat_prior(posterior):
    params = posterior.linearized.params
    prior = posterior.prior_var
    value = lambda name: prior[name] if isinstance(prior, dict) else prior
    parts = [torch.full((p.numel(),), value(n)).double() for n, p in params.items()]
    return torch.cat(parts)


@pytest.mark.parametrize("tuning", TUNINGS.values(), ids=TUNINGS)
@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=repr)
def test_a_structure_of_two_methods_has_covariance_and_evidence(likelihood, tuning):
    y = labels(likelihood)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Net2GPWarning)
        found = n2g.laplace(mlp(), (X, y), likelihood, structure=Isotropic(), tuning=tuning)
    assert found.structure == Isotropic()
    scale = 1 / found.likelihood.noise_var if has_open_noise(likelihood) else 1.0
    H, v = scale * curvature_matrix(likelihood), flat_prior(found)
    Sigma = torch.linalg.inv(torch.diag(1 / v) + H)
    J = found.linearized.jacobian(NEW)
    wanted = torch.einsum("ncp,pq,ndq->ncd", J, Sigma, J)
    torch.testing.assert_close(found.marginal(NEW).covariance_matrix, wanted)
    theta = found.linearized.flatten(found.linearized.params)
    fit = found.likelihood.log_prob(found.linearized(X), y).sum()
    log_det = torch.logdet(torch.eye(len(v)).double() + v.sqrt()[:, None] * H * v.sqrt())
    evidence = fit - 0.5 * (theta.square() / v).sum() - 0.5 * log_det
    torch.testing.assert_close(found.evidence, evidence)


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=repr)
def test_its_trace_is_the_slope_of_its_determinant(likelihood):
    task, structure = make_task(mlp(), (X, labels(likelihood)), likelihood, Isotropic())
    wanted = float(curvature_matrix(likelihood).trace())
    assert structure.curvature(task).trace() == pytest.approx(wanted, rel=1e-10)


@pytest.mark.parametrize(
    "kind", [n2g.Diagonal(), n2g.structures.LowRank(100), n2g.LastLayer(n2g.Diagonal())]
)
def test_traces_without_a_formula_are_those_of_the_curvature(kind):
    data = (X, labels(n2g.Categorical()))
    task, structure = make_task(mlp(), data, n2g.Categorical(), kind)
    J, Lam = task.linearized.jacobian(X), task.likelihood.curvature(task.f)
    wanted = float(torch.einsum("ncp,ncd,ndp->", J, Lam, J))
    assert structure.curvature(task).trace() == pytest.approx(wanted, rel=1e-6)


def test_held_out_data_choose_its_prior():
    y = labels(n2g.Categorical())
    held_out = n2g.tuning.Validation((X, y), grid=(0.1, 1.0, 10.0))
    found = quietly(mlp(), (X, y), n2g.Categorical(), structure=Isotropic(), tuning=held_out)
    scores = {}
    for prior_var in (0.1, 1.0, 10.0):
        mine = n2g.Categorical(n2g.links.Contrast())
        one = quietly(mlp(), (X, y), mine, structure=Isotropic(), prior_var=prior_var)
        scale, spread = torch.logspace(-3, 2, 150)[:, None, None, None], torch.logspace(0, 3, 40)
        m, v = one.mean(X), spread[:, None, None] * one.contrast(X)
        logits = scale * (m - m.max(1, keepdim=True).values) / (1 + torch.pi / 8 * v).sqrt()
        losses = -logits.log_softmax(-1).gather(-1, y[:, None].expand(*logits.shape[:-1], 1))
        scores[prior_var] = -float(losses.mean((-1, -2)).min())
    # beside the search, the grid of links is coarse
    chosen = min(scores, key=lambda prior_var: abs(prior_var - found.prior_var))
    assert chosen == pytest.approx(found.prior_var)
    assert scores[chosen] >= max(scores.values()) - 1e-3


def test_a_network_is_trained_by_its_evidence():
    schedule = n2g.training.Schedule(num_epochs=4, burn_in=1, every=2)
    data = (X, labels(n2g.Gaussian()))
    train = n2g.training.train_by_evidence
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Net2GPWarning)
        found = train(mlp(), data, n2g.Gaussian(), structure=Isotropic(), schedule=schedule)
    assert found.structure == Isotropic()
    assert len(set(found.prior_var.values())) == 3  # one for each layer


@dataclass(frozen=True)
class WithoutTag(n2g.structures.Structure):
    def curvature(self, task):
        return Isotropic().curvature(task)


def test_without_a_tag_it_is_not_saved(tmp_path):
    data = (X, labels(n2g.Gaussian()))
    found = quietly(mlp(), data, n2g.Gaussian(0.3), prior_var=0.7, structure=WithoutTag())
    with pytest.raises(InputError, match=r"WithoutTag cannot be saved .* structure are .*savable"):
        found.save(tmp_path / "posterior.safetensors")


def test_it_says_what_it_cannot_do():
    data = (X, labels(n2g.Gaussian()))
    found = quietly(mlp(), data, n2g.Gaussian(0.3), prior_var=0.7, structure=Isotropic())
    with pytest.raises(NotAvailable, match="update is for a Gaussian process"):
        found.update(data)
    with pytest.raises(InputError, match=r"structure is the class Isotropic. Write Isotropic\(\)"):
        quietly(mlp(), data, n2g.Gaussian(0.3), structure=Isotropic)
    with pytest.raises(InputError, match=r"structure must be .* a Structure of your own or None"):
        quietly(mlp(), data, n2g.Gaussian(0.3), structure=n2g.structures.Traits())
