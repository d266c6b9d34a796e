"""Every feature works with every likelihood, those of a user included, from one file."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributions, nn

import net2gp as n2g
from contributing import example
from net2gp import metrics
from net2gp.errors import FileFormatError, InputError, Net2GPWarning
from net2gp.likelihoods import LawLikelihood, expected_derivatives, savable, traits
from net2gp.likelihoods.responses import response
from net2gp.posteriors import WeightSamples
from net2gp.posteriors.conditioning import inference
from net2gp.tags import _CLASSES
from net2gp.types import Likelihood

F64 = torch.float64


@savable("tests.Counts")
@dataclass(frozen=True)
class Counts:
    """Poisson counts by the five members of a likelihood alone: a file of less than 25 lines."""

    def check(self, f: Tensor, y: Tensor) -> None:
        if (y < 0).any():
            raise ValueError("counts are not negative")

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return (y * f - f.exp() - torch.lgamma(y + 1)).sum(-1)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        return y - f.exp()

    def curvature(self, f: Tensor) -> Tensor:
        return torch.diag_embed(f.exp())

    def predict(self, f: Any) -> distributions.Distribution:
        z = torch.linspace(-5, 5, 101).to(f.mean)
        std = f.covariance_matrix.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()
        rates = (f.mean[..., None] + std[..., None] * z).exp()
        weights = distributions.Categorical(logits=(-0.5 * z.square()).expand(rates.shape))
        return distributions.MixtureSameFamily(weights, distributions.Poisson(rates))


@savable("tests.Waiting")
@dataclass(frozen=True)
class Waiting(LawLikelihood):
    """Waiting times, by their law alone."""

    def law(self, f: Tensor) -> distributions.Distribution:
        return distributions.Exponential((-f).exp(), validate_args=False)


X = torch.linspace(-2, 2, 40, dtype=F64)[:, None]
RATE = (0.5 + X.sin()).exp()
NEW = X[::8] + 0.05
CUTS = (-1.0, 1.0)


@dataclass(frozen=True)
class Case:
    likelihood: Any
    targets: Callable[[], Tensor]

    def data(self) -> tuple[Tensor, Tensor]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return X, self.targets()


def counts() -> Tensor:
    return torch.poisson(RATE)


def times() -> Tensor:
    return -RATE * torch.rand_like(RATE).log()


def with_outliers() -> Tensor:
    return X.sin() + 0.1 * torch.randn_like(X) / torch.rand_like(X).sqrt()


def levels() -> Tensor:
    latent = 2 * X + torch.logit(torch.rand_like(X))
    return (latent > torch.tensor(CUTS)).sum(1)


CASES = {
    "own, five members": Case(Counts(), counts),
    "own, law": Case(Waiting(), times),
    "of contributing": Case(example("likelihood").Waiting(), times),
    "poisson": Case(n2g.likelihoods.Poisson(), counts),
    "negative binomial": Case(n2g.likelihoods.NegativeBinomial(0.3), counts),
    "student t": Case(n2g.likelihoods.StudentT(0.01, 3.0), with_outliers),
    "ordinal": Case(n2g.likelihoods.Ordinal(CUTS), levels),
}
each = pytest.mark.parametrize("name", CASES)


@cache
def network(name: str) -> nn.Sequential:
    """Trained to a stationary point of the log posterior."""
    likelihood, (x, y) = CASES[name].likelihood, CASES[name].data()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = torch.optim.LBFGS(module.parameters(), max_iter=300, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        prior = sum(p.square().sum() for p in module.parameters())
        value = 0.5 * prior - likelihood.log_prob(module(x), y).sum()
        value.backward()
        return value

    optimizer.step(loss)
    return module.eval()


def quietly(make: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Net2GPWarning)
        return make()


def check(posterior: Any, y: Tensor, model: nn.Module, folder: Path) -> None:
    """It predicts, is split, saved and loaded, with finite numbers throughout."""
    law = posterior.predict(NEW)
    assert bool(law.log_prob(y[::8]).isfinite().all())
    parts = n2g.explain.split(posterior, NEW)
    assert bool((parts.total > 0).all())
    assert bool((parts.epistemic >= 0).all())
    n2g.save(posterior, folder / "posterior")
    again = n2g.load(folder / "posterior", model)
    assert type(again.likelihood) is type(posterior.likelihood)
    assert torch.equal(again.predict(NEW).log_prob(y[::8]), law.log_prob(y[::8]))


SOLVED: dict[str, Any] = {
    "laplace by cholesky": {"solver": n2g.solvers.Cholesky()},
    "laplace in weight space": {"solver": n2g.solvers.WeightCholesky()},
    "laplace by conjugate gradients": {"solver": n2g.solvers.CG()},
    "variational": {"inference": n2g.solvers.Variational(tol=1e-6)},
}


@each
@pytest.mark.parametrize("how", SOLVED)
def test_conditioning(name: str, how: str, tmp_path: Path) -> None:
    likelihood, (x, y) = CASES[name].likelihood, CASES[name].data()
    linearized = n2g.linearize(network(name))
    kernel = linearized.kernel(0.5)
    given = {"mean": linearized, **SOLVED[how]}
    posterior = quietly(lambda: n2g.condition(kernel, (x, y), likelihood, **given))
    assert bool(posterior.log_marginal_likelihood().isfinite())
    check(posterior, y, network(name), tmp_path)


@each
def test_adapting_and_leaving_one_out(name: str, tmp_path: Path) -> None:
    likelihood, data = CASES[name].likelihood, CASES[name].data()
    posterior = quietly(lambda: n2g.adapt(network(name), data, likelihood))
    check(posterior, data[1], network(name), tmp_path)
    assert bool(n2g.explain.leave_one_out(posterior).mean.isfinite().all())


STRUCTURES = {
    "full": n2g.Full(),
    "diagonal": n2g.Diagonal(),
    "kron": n2g.Kron(),
    "low rank": n2g.structures.LowRank(5),
    "last layer": n2g.LastLayer(),
    "subnetwork": n2g.structures.Subnetwork(10),
    "functions": n2g.structures.FunctionSpace(),
    "sampled": n2g.structures.Sampled(),
}


@each
@pytest.mark.parametrize("structure", STRUCTURES)
def test_laplace_in_every_structure(name: str, structure: str, tmp_path: Path) -> None:
    likelihood, data = CASES[name].likelihood, CASES[name].data()
    chosen = STRUCTURES[structure]
    posterior = quietly(lambda: n2g.laplace(network(name), data, likelihood, structure=chosen))
    check(posterior, data[1], network(name), tmp_path)


@each
def test_laplace_with_samples_validation_and_dual(name: str) -> None:
    likelihood, (x, y) = CASES[name].likelihood, CASES[name].data()
    model, tuning = network(name), n2g.tuning.Validation((x, y), grid=(0.1, 1.0))
    posterior = quietly(lambda: n2g.laplace(model, (x, y), likelihood, tuning=tuning))
    law = posterior.predict(x, samples=WeightSamples(10))
    assert bool(metrics.nll(law, y).isfinite())
    assert bool(metrics.nll(posterior.predict(x), y).isfinite())
    assert bool(posterior.dual().targets.isfinite().all())


@each
def test_training(name: str, tmp_path: Path) -> None:
    likelihood, (x, y) = CASES[name].likelihood, CASES[name].data()
    model = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1)).double().eval()
    optimizer = n2g.training.VOGN(model, likelihood, len(x), prior_var=1.0, learning_rate=0.01)
    for _ in range(3):
        optimizer.step(x, y)
    check(optimizer.posterior((x, y)), y, model.eval(), tmp_path)
    schedule = n2g.training.Schedule(num_epochs=10, learning_rate=0.01)
    found = quietly(
        lambda: n2g.training.train_by_evidence(model.train(), (x, y), likelihood, schedule=schedule)
    )
    check(found, y, model, tmp_path)
    flow = n2g.training.loss_flow(model.eval(), (x, y), likelihood, learning_rate=0.01)
    assert bool(flow.value(flow.path(20.0)) < flow.value(flow.path(0.0)))


@each
def test_finite_differences_are_products_with_the_fisher(name: str) -> None:
    linearized = n2g.linearize(network(name))
    fisher = n2g.linear.GaussNewton(linearized, X, CASES[name].likelihood)
    v = torch.linspace(-1, 1, linearized.num_params, dtype=F64)
    exact = fisher.matmul(v[:, None])[:, 0]
    error = (fisher.finite_difference(v, 1e-4) - exact).norm() / exact.norm()
    assert float(error) < 3e-3


def test_a_likelihood_of_five_members_gets_what_poisson_has() -> None:
    x, y = CASES["poisson"].data()
    linearized = n2g.linearize(network("poisson"))
    own, ours = (
        n2g.condition(linearized.kernel(), (x, y), likelihood, mean=linearized)
        for likelihood in (Counts(), n2g.likelihoods.Poisson())
    )
    f = own.marginal(NEW)
    torch.testing.assert_close(f.mean, ours.marginal(NEW).mean)
    torch.testing.assert_close(own.predict(NEW).mean, ours.predict(NEW).mean, rtol=1e-4, atol=0.0)
    followed = response(Counts(), f.mean)
    torch.testing.assert_close(followed.slope, torch.diag_embed(f.mean.exp()))
    torch.testing.assert_close(followed.variance, f.mean.exp())
    expected = expected_derivatives(n2g.likelihoods.Poisson(), f.mean, f.covariance_matrix, y[::8])
    given = expected_derivatives(Counts(), f.mean, f.covariance_matrix, y[::8])
    for a, b in zip(given, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("name", "steps"), [("own, five members", False), ("own, law", True)])
def test_only_a_curvature_that_is_not_the_hessian_asks_for_one(
    name: str, steps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A canonical likelihood takes Newton's steps as they are, though it does not say that it is one."""
    calls: list[Likelihood] = []

    def counted(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
        calls.append(likelihood)
        return traits.negative_hessian(likelihood, f, y)

    monkeypatch.setattr(inference, "negative_hessian", counted)
    x, y = CASES[name].data()
    n2g.condition(n2g.RBF(), (x, y), CASES[name].likelihood)
    assert bool(calls) == steps


def test_classes_are_saved_by_tags_that_were_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = CASES["own, law"].data()

    @dataclass(frozen=True)
    class Unknown(Waiting):
        pass

    posterior = n2g.condition(n2g.RBF(), data, Unknown())
    with pytest.raises(InputError, match=r"Unknown cannot be saved.*@net2gp.likelihoods.savable"):
        n2g.save(posterior, tmp_path / "file")
    n2g.save(n2g.condition(n2g.RBF(), data, Waiting()), tmp_path / "file")
    monkeypatch.delitem(_CLASSES, "tests.Waiting")
    with pytest.raises(FileFormatError, match=r"'tests.Waiting'.*import the module"):
        n2g.load(tmp_path / "file")
    with pytest.raises(InputError, match=r"words with dots between them, but is 'Waiting'"):
        savable("Waiting")
    with pytest.raises(InputError, match=r"the tag 'tests.Counts' already belongs to .*Counts"):
        savable("tests.Counts")(Waiting)
    with pytest.raises(InputError, match=r"savable is for dataclasses"):
        savable("tests.Number")(int)


def test_targets_outside_the_support_of_a_law_are_refused() -> None:
    x, y = CASES["own, law"].data()
    with pytest.raises(InputError, match=r"y holds -\S+, which Waiting gives no probability"):
        n2g.condition(n2g.RBF(), (x, -y), Waiting())


def test_a_law_without_gradients_has_no_slope() -> None:
    class Detached(Counts):
        def predict(self, f: Any) -> distributions.Distribution:
            return distributions.Poisson(f.mean.detach().exp())

    with pytest.raises(InputError, match=r"Detached predicts has no gradient in f"):
        response(Detached(), NEW)
