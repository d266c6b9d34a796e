"""What simulated counts, levels and outliers were drawn from is found again."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import net2gp as n2g
from net2gp.errors import InputError, Net2GPWarning

F64 = torch.float64
X = torch.linspace(-2.5, 2.5, 240, dtype=F64)[:, None]
TRUTH = 1.0 + (1.5 * X).sin()
NEW = slice(5, -5, 10)
KERNEL = n2g.RBF(1.0, 1.5)
EXPOSURE = 0.2 + 4 * ((7 * X).sin() + 1) / 2


def drawn(make: Callable[[], Tensor]) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()


def dispersed() -> Tensor:
    gamma = torch.distributions.Gamma(torch.tensor(1 / 0.3, dtype=F64), 1 / 0.3)
    return torch.poisson(TRUTH.exp() * gamma.sample(X.shape))


CUTS = (0.0, 1.0, 2.0)


def levels() -> Tensor:
    return (TRUTH + torch.logit(torch.rand_like(TRUTH)) > torch.tensor(CUTS)).sum(1)


def contaminated() -> Tensor:
    y = TRUTH + 0.1 * torch.randn_like(TRUTH)
    y[::8] += 15.0
    return y


CASES: dict[str, tuple[Any, Tensor]] = {
    "poisson": (n2g.likelihoods.Poisson(), drawn(lambda: torch.poisson(TRUTH.exp()))),
    "negative binomial": (n2g.likelihoods.NegativeBinomial(0.3), drawn(dispersed)),
    "student t": (n2g.likelihoods.StudentT(0.01, 3.0), drawn(contaminated)),
    "ordinal": (n2g.likelihoods.Ordinal(CUTS), drawn(levels)),
    "ordinal probit": (
        n2g.likelihoods.Ordinal(CUTS, probit=True),
        drawn(lambda: (TRUTH + torch.randn_like(TRUTH) > torch.tensor(CUTS)).sum(1)),
    ),
}
each = pytest.mark.parametrize("name", CASES)


def check_recovered(posterior: Any, tol: float) -> None:
    """The truth is near the mean, and where the variance says."""
    law = posterior.marginal(X[NEW])
    error = law.mean - TRUTH[NEW]
    assert float(error.square().mean().sqrt()) < tol
    assert float((error.abs() / law.variance.sqrt()).max()) < 4.5
    assert float((error.square() / law.variance).mean()) < 2.5


@each
@pytest.mark.parametrize("inference", [n2g.solvers.Laplace(), n2g.solvers.Variational(tol=1e-5)])
def test_conditioning_finds_what_targets_were_drawn_from(name: str, inference: Any) -> None:
    likelihood, y = CASES[name]
    if name == "student t" and isinstance(inference, n2g.solvers.Variational):
        every = slice(None, None, 4)  # L-BFGS over all sites takes hundreds of steps
        posterior = n2g.condition(KERNEL, (X[every], y[every]), likelihood, inference=inference)
    else:
        posterior = n2g.condition(KERNEL, (X, y), likelihood, inference=inference)
    check_recovered(posterior, 0.35)


def trained(likelihood: Any, y: Tensor) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        network = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1)).double()
    optimizer = torch.optim.LBFGS(network.parameters(), max_iter=400, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        prior = sum(p.square().sum() for p in network.parameters())
        value = 0.05 * prior - likelihood.log_prob(network(X), y).sum()
        value.backward()
        return value

    optimizer.step(loss)
    return network.eval()


@each
def test_networks_with_uncertainty_find_it_as_well(name: str) -> None:
    likelihood, y = CASES[name]
    network = trained(likelihood, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Net2GPWarning)
        check_recovered(n2g.laplace(network, (X, y), likelihood), 0.4)
        # around zero, since the network itself has seen these targets already
        check_recovered(n2g.adapt(network, (X, y), likelihood, zero_mean=True), 0.4)


def test_exposures_belong_to_points() -> None:
    y = drawn(lambda: torch.poisson(EXPOSURE * TRUTH.exp()))
    likelihood = n2g.likelihoods.Poisson(EXPOSURE)
    posterior = n2g.condition(KERNEL, (X, y), likelihood)
    check_recovered(posterior, 0.3)
    with pytest.raises(InputError, match=r"numbers for each of 240 points.*Poisson\(...\)"):
        posterior.predict(X[NEW])
    predicted = posterior.predict(X[NEW], likelihood=n2g.likelihoods.Poisson(2.0)).mean
    law = posterior.marginal(X[NEW])
    torch.testing.assert_close(predicted, 2 * (law.mean + law.variance / 2).exp())
    part = likelihood.of_points(torch.tensor([3, 1]))
    assert torch.equal(part.exposure, EXPOSURE[[3, 1]])


def test_exposures_go_with_the_points_that_are_tuned_on(monkeypatch: pytest.MonkeyPatch) -> None:
    y = drawn(lambda: torch.poisson(EXPOSURE * TRUTH.exp()))
    likelihood = n2g.likelihoods.Poisson(EXPOSURE)
    network = trained(likelihood, y)
    monkeypatch.setattr(sys.modules["net2gp.methods.adapt"], "NEWTON_ROWS", 30)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Net2GPWarning)
        check_recovered(n2g.adapt(network, (X, y), likelihood, zero_mean=True), 0.35)
        for structure in (n2g.Full(), n2g.Kron(), n2g.LastLayer(), n2g.structures.FunctionSpace()):
            found = n2g.laplace(network, (X, y), likelihood, structure=structure)
            assert bool(found.marginal(X[NEW]).mean.isfinite().all())


def test_outliers_move_a_student_t_little() -> None:
    """Every eighth target is 150 standard deviations off."""
    _, y = CASES["student t"]
    robust, plain = (
        n2g.condition(KERNEL, (X, y), likelihood).marginal(X[NEW]).mean
        for likelihood in (n2g.likelihoods.StudentT(0.01, 3.0), n2g.Gaussian(0.01))
    )
    assert float((robust - TRUTH[NEW]).abs().max()) < 0.15
    assert float((plain - TRUTH[NEW]).abs().mean()) > 1.0


@pytest.mark.parametrize(
    ("degrees_of_freedom", "solver"),
    [
        (1.0, n2g.solvers.Cholesky()),
        (3.0, n2g.solvers.Cholesky()),
        (3.0, n2g.solvers.CG(tol=1e-10)),
    ],
)
def test_newton_ends_at_a_stationary_point_where_the_hessian_is_indefinite(
    degrees_of_freedom: float, solver: Any
) -> None:
    likelihood = n2g.likelihoods.StudentT(0.01, degrees_of_freedom)
    x, y = X[::3], CASES["student t"][1][::3]
    posterior = n2g.condition(KERNEL, (x, y), likelihood, solver=solver)
    f = posterior.marginal(x).mean
    # at a mode f = K ∇ log p(y | f)
    torch.testing.assert_close(KERNEL(x) @ likelihood.residual(f, y), f, rtol=0, atol=1e-4)
    zero = likelihood.log_prob(torch.zeros_like(f), y).sum()
    quadratic = (f * likelihood.residual(f, y)).sum()
    assert float(likelihood.log_prob(f, y).sum() - 0.5 * quadratic) > float(zero)


def test_levels_are_predicted_as_often_as_they_occur() -> None:
    likelihood, y = CASES["ordinal"]
    probs = n2g.condition(KERNEL, (X, y), likelihood).predict(X).probs
    assert probs.shape == (240, 4)
    exact = likelihood.predict(distributions_of(TRUTH)).probs
    assert float((probs - exact).abs().max()) < 0.2
    shares = torch.bincount(y, minlength=4) / len(y)
    torch.testing.assert_close(probs.mean(0), shares.to(F64), rtol=0, atol=0.05)


def distributions_of(f: Tensor) -> Any:
    from net2gp.likelihoods.laws import gaussian_law

    return gaussian_law(f, torch.zeros(len(f), 1, 1, dtype=F64))


def test_the_evidence_prefers_the_law_that_counts_were_drawn_from() -> None:
    evidence = {
        (name, type(likelihood).__name__): float(
            n2g.condition(KERNEL, (X, CASES[name][1]), likelihood).log_marginal_likelihood()
        )
        for name in ("poisson", "negative binomial")
        for likelihood in (n2g.likelihoods.Poisson(), n2g.likelihoods.NegativeBinomial(0.3))
    }
    assert evidence["poisson", "Poisson"] > evidence["poisson", "NegativeBinomial"]
    assert (
        evidence["negative binomial", "NegativeBinomial"] > evidence["negative binomial", "Poisson"]
    )
