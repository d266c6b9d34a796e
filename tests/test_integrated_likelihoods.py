"""Counts, outliers and ordered levels: densities as scipy has them, and predictions as integrals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, distributions

import net2gp as n2g
from net2gp.errors import InputError
from net2gp.likelihoods import LawLikelihood
from net2gp.likelihoods.laws import average, gaussian_law
from net2gp.likelihoods.responses import divergence

F64 = torch.float64
CUTS = (-1.0, 0.2, 1.5)
Reference = Callable[[float, np.ndarray], np.ndarray]


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F64)[:, None]


def law(mean: float, variance: float) -> Any:
    return gaussian_law(column(mean), column(variance)[..., None])


def poisson(y: float, f: np.ndarray) -> np.ndarray:
    return stats.poisson.logpmf(y, 2.5 * np.exp(f))


def negative_binomial(y: float, f: np.ndarray) -> np.ndarray:
    return stats.nbinom.logpmf(y, 1 / 0.4, 1 / (1 + 0.4 * np.exp(f)))


def student_t(y: float, f: np.ndarray) -> np.ndarray:
    return stats.t.logpdf(y, 4.0, f, 0.3**0.5)


def ordinal(distribution: Any) -> Reference:
    def log_prob(y: float, f: np.ndarray) -> np.ndarray:
        low, high = (-np.inf, *CUTS)[int(y)], (*CUTS, np.inf)[int(y)]
        with np.errstate(divide="ignore"):
            return np.log(distribution.cdf(high - f) - distribution.cdf(low - f))

    return log_prob


@dataclass(frozen=True)
class Case:
    likelihood: Any
    reference: Reference
    targets: tuple[float, ...]


LEVELS = (0, 1, 2, 3)
CASES = {
    "poisson": Case(n2g.likelihoods.Poisson(exposure=2.5), poisson, (0.0, 3.0, 700.0)),
    "negative binomial": Case(
        n2g.likelihoods.NegativeBinomial(0.4), negative_binomial, (0.0, 3.0, 700.0)
    ),
    "student t": Case(n2g.likelihoods.StudentT(0.3, 4.0), student_t, (-20.0, 0.1, 3.0)),
    "ordinal": Case(n2g.likelihoods.Ordinal(CUTS), ordinal(stats.logistic), LEVELS),
    "ordinal probit": Case(n2g.likelihoods.Ordinal(CUTS, probit=True), ordinal(stats.norm), LEVELS),
}
each = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def as_targets(case: Case, y: float) -> Tensor:
    levels = isinstance(case.likelihood, n2g.likelihoods.Ordinal)
    return torch.tensor([int(y)]) if levels else column(y)


@each
def test_densities_are_those_of_scipy(case: Case) -> None:
    for f in (-1.3, 0.0, 0.8):
        for y in case.targets:
            found = case.likelihood.log_prob(column(f), as_targets(case, y))
            assert float(found) == pytest.approx(float(case.reference(y, np.array(f))), rel=1e-11)


def integral(case: Case, y: float, mean: float, std: float) -> float:
    """∫ p(y | f) N(f | mean, std²) df on a grid so fine that no narrow peak is missed."""
    f = np.linspace(mean - 12 * std, mean + 12 * std, 100_001)
    density = np.exp(case.reference(y, f)) * stats.norm.pdf(f, mean, std)
    return float(np.trapezoid(density, f))


@each
@pytest.mark.parametrize(("mean", "std"), [(0.3, 0.02), (-0.5, 1.1), (2.0, 3.0)])
def test_predictions_are_integrals_over_f(case: Case, mean: float, std: float) -> None:
    # the rules of the logistic function are right to 1e-6, all others to many digits
    tol = 3e-6 if case.likelihood == n2g.likelihoods.Ordinal(CUTS) else 1e-8
    for y in case.targets:
        expected = integral(case, y, mean, std)
        if expected > 1e-200:
            found = case.likelihood.predict(law(mean, std**2)).log_prob(as_targets(case, y))
            assert float(found.exp()) == pytest.approx(expected, rel=tol, abs=tol * 1e-3)


@pytest.mark.parametrize("count", [10_000.0, 1e6])
def test_large_counts_are_not_missed_by_a_wide_prediction(count: float) -> None:
    """Of p(y | f) only a width of 1/√y counts: there it is nearly Gaussian, and the integral its mass."""
    mean, std = math.log(count) - 1.0, 2.0
    found = n2g.likelihoods.Poisson().predict(law(mean, std**2)).log_prob(column(count))
    # ∫ e^{y f − e^f} df / y! = Γ(y)/y! = 1/y, and the normal density is constant over the peak
    expected = stats.norm.logpdf(math.log(count), mean, std) - math.log(count)
    assert float(found) == pytest.approx(expected, rel=1e-5)


COUNTS = {name: CASES[name] for name in ("poisson", "negative binomial")}


@pytest.mark.parametrize("case", COUNTS.values(), ids=COUNTS.keys())
def test_predictions_of_counts_sum_to_one_and_have_the_stated_moments(case: Case) -> None:
    predicted = case.likelihood.predict(law(0.2, 0.25))
    y = torch.arange(2000, dtype=F64)[:, None, None]
    probs = predicted.log_prob(y).exp()
    assert float(probs.sum()) == pytest.approx(1, abs=1e-9)
    mean = float((probs * y).sum())
    assert float(predicted.mean) == pytest.approx(mean, rel=1e-8)
    assert float(predicted.variance) == pytest.approx(
        float((probs * (y - mean).square()).sum()), rel=1e-6
    )


def test_the_variance_of_a_student_t_is_that_of_noise_and_function() -> None:
    predicted = n2g.likelihoods.StudentT(0.3, 4.0).predict(law(0.7, 0.5))
    assert float(predicted.mean) == pytest.approx(0.7)
    assert float(predicted.variance) == pytest.approx(0.5 + 0.3 * 4 / 2)
    assert float(n2g.likelihoods.StudentT(0.3, 2.0).predict(law(0.7, 0.5)).variance) == math.inf


@pytest.mark.parametrize("name", ["poisson", "negative binomial", "student t"])
def test_closed_moments_are_those_that_follow_from_the_law(name: str) -> None:
    likelihood = CASES[name].likelihood
    mean, variance = column(-0.4, 1.2), column(0.3, 0.9)
    for found, expected in zip(
        likelihood.moments(mean, variance),
        LawLikelihood.moments(likelihood, mean, variance),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["poisson", "negative binomial", "student t"])
def test_closed_derivatives_are_those_that_follow_from_the_law(name: str) -> None:
    likelihood, f = CASES[name].likelihood, column(-0.4, 1.2)
    y = column(1.0, 4.0)
    residual = LawLikelihood.residual(likelihood, f, y)
    torch.testing.assert_close(likelihood.residual(f, y), residual)
    information = LawLikelihood.information(likelihood, f)
    torch.testing.assert_close(likelihood.information(f), information, rtol=1e-6, atol=1e-9)


D = distributions
LAWS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor], Tensor]]] = {
    "exponential": (lambda f: D.Exponential(f.exp()), torch.ones_like),
    "gamma": (lambda f: D.Gamma(2.5, f.exp()), lambda f: 2.5 * torch.ones_like(f)),
    "geometric": (lambda f: D.Geometric(logits=f), lambda f: (-f).sigmoid()),
    "binomial": (
        lambda f: D.Binomial(torch.tensor(10.0, dtype=F64), logits=f),
        lambda f: 10 * f.sigmoid() * (-f).sigmoid(),
    ),
    "laplace, whose divergence has a kink": (lambda f: D.Laplace(f, 0.5), lambda f: 4 + 0 * f),
    "weibull, without a divergence": (lambda f: D.Weibull(f.exp(), 1.7), lambda f: 2.89 + 0 * f),
    "weibull, infinite density at zero": (
        lambda f: D.Weibull(f.exp(), 0.7 * torch.ones_like(f)),
        lambda f: 0.49 + 0 * f,
    ),
    "student t, without a divergence": (lambda f: D.StudentT(5.0, f, 0.5), lambda f: 3 + 0 * f),
    "negative binomial, without a divergence": (
        lambda f: D.NegativeBinomial(2.0, logits=f),
        lambda f: 2 * f.sigmoid(),
    ),
}


@pytest.mark.parametrize("name", LAWS)
def test_the_information_of_any_law_is_found(name: str) -> None:
    law, expected = LAWS[name]

    class Own(LawLikelihood):
        def law(self, f: Tensor) -> Any:
            return law(f)

    f = column(-1.2, 0.0, 1.7)
    torch.testing.assert_close(Own().information(f), expected(f), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("law", "text"),
    [
        (lambda f: D.StudentT(1.0, f), r"StudentT has no finite mean.*information\(f\)"),
        (lambda f: D.NegativeBinomial(0.1, logits=f + 30), r"spreads over .* counts, too many"),
    ],
)
def test_laws_whose_information_cannot_be_averaged_are_named(law: Any, text: str) -> None:
    class Own(LawLikelihood):
        def law(self, f: Tensor) -> Any:
            return law(f)

    with pytest.raises(InputError, match=text):
        Own().information(column(0.0))


@pytest.mark.parametrize("name", ["poisson", "negative binomial", "student t"])
def test_samples_have_the_moments_of_the_prediction(name: str) -> None:
    torch.manual_seed(0)
    predicted = CASES[name].likelihood.predict(law(0.2, 0.1))
    draws = predicted.sample((40_000,))
    assert draws.shape == (40_000, 1, 1)
    error = 5 * float(predicted.stddev) / 200
    assert float(draws.mean()) == pytest.approx(float(predicted.mean), abs=error)


def test_predictions_have_gradients_in_the_law_of_f() -> None:
    def value(mean: Tensor, variance: Tensor) -> Tensor:
        predicted = n2g.likelihoods.Poisson().predict(
            gaussian_law(mean, torch.diag_embed(variance))
        )
        return predicted.log_prob(column(3.0, 0.0)) + predicted.mean

    arguments = (column(0.2, 1.0).requires_grad_(), column(0.5, 0.1).requires_grad_())
    assert torch.autograd.gradcheck(value, arguments)


def test_two_levels_are_a_bernoulli() -> None:
    f, y = torch.linspace(-4, 4, 9, dtype=F64)[:, None], torch.arange(9) % 2
    levels, binary = n2g.likelihoods.Ordinal((0.0,)), n2g.Bernoulli()
    torch.testing.assert_close(levels.log_prob(f, y), binary.log_prob(f, y))
    torch.testing.assert_close(levels.residual(f, y), binary.residual(f, y))
    torch.testing.assert_close(levels.curvature(f), binary.curvature(f))
    for variance in (0.0, 1.0, 40.0):
        wide = gaussian_law(f, torch.full((9, 1, 1), variance, dtype=F64))
        expected = binary.predict(wide).probs[:, 0]
        torch.testing.assert_close(levels.predict(wide).probs[:, 1], expected, rtol=0, atol=2e-6)


def test_limits_are_the_simpler_laws() -> None:
    f, y = column(-1.0, 0.5, 2.0), column(0.0, 2.0, 9.0)
    few = n2g.likelihoods.NegativeBinomial(dispersion=1e-6).log_prob(f, y)
    torch.testing.assert_close(few, n2g.likelihoods.Poisson().log_prob(f, y), rtol=1e-4, atol=1e-4)
    many = n2g.likelihoods.StudentT(0.5, 1e7).log_prob(f, y)
    torch.testing.assert_close(many, n2g.Gaussian(0.5).log_prob(f, y), rtol=1e-5, atol=1e-5)


def test_the_default_divergence_is_that_of_torch_to_second_order() -> None:
    f, step = column(-0.5, 0.3, 1.0), 1e-3
    laws = (distributions.Poisson((f + shift).exp()) for shift in (0.0, step))
    exact = distributions.kl_divergence(*laws).sum(-1)
    torch.testing.assert_close(
        divergence(n2g.likelihoods.Poisson(), f, f + step), exact, rtol=3 * step, atol=0.0
    )


def test_an_average_of_laws_is_their_mixture() -> None:
    means = torch.tensor([[0.0, 1.0], [2.0, -1.0], [0.5, 0.5]], dtype=F64)
    found = average([distributions.Normal(m, torch.full((2,), 0.7, dtype=F64)) for m in means])
    weights = distributions.Categorical(logits=torch.zeros(2, 3))
    parts = distributions.Normal(means.T, 0.7)
    expected = distributions.MixtureSameFamily(weights, parts)
    y = torch.tensor([0.3, 0.1], dtype=F64)
    torch.testing.assert_close(found.mean, expected.mean)
    torch.testing.assert_close(found.variance, expected.variance)
    torch.testing.assert_close(found.log_prob(y), expected.log_prob(y))
    torch.manual_seed(0)
    torch.testing.assert_close(found.sample((20_000,)).mean(0), expected.mean, rtol=0, atol=0.05)


ONE, TWO = torch.zeros(4, 1), torch.zeros(4, 2)
WRONG = [
    (
        n2g.likelihoods.Poisson(),
        ONE,
        torch.tensor([0, 1, -2, 3]),
        r"counts must be 0, 1, 2.*holds -2",
    ),
    (n2g.likelihoods.Poisson(), ONE, torch.tensor([0, 1, 0.5, 3]), r"holds 0.5.*use Gaussian\(\)"),
    (n2g.likelihoods.Poisson(), TWO, torch.ones(4), r"must have shape \(4, 2\)"),
    (
        n2g.likelihoods.Poisson(torch.ones(3, 1)),
        ONE,
        torch.ones(4),
        r"of 3 points, but there are 4",
    ),
    (n2g.likelihoods.Poisson(torch.ones(4)), ONE, torch.ones(4), r"pass exposure\[:, None\]"),
    (
        n2g.likelihoods.NegativeBinomial(),
        ONE,
        torch.tensor([0, 1, -2, 3]),
        r"counts must be.*holds -2",
    ),
    (
        n2g.likelihoods.StudentT(),
        ONE,
        torch.tensor([0, 1, 2, 3]),
        r"floating tensor for a regression",
    ),
    (n2g.likelihoods.StudentT(torch.ones(3)), TWO, torch.ones(4, 2), r"but there are 2 outputs"),
    (
        n2g.likelihoods.Ordinal(CUTS),
        TWO,
        torch.zeros(4).long(),
        r"one output, but the network has 2",
    ),
    (
        n2g.likelihoods.Ordinal(CUTS),
        ONE,
        torch.tensor([0, 1, 2, 4]),
        r"levels must be in 0..3.*holds 4",
    ),
    (n2g.likelihoods.Ordinal(CUTS), ONE, torch.ones(4), r"integer levels.*y.long\(\)"),
]


@pytest.mark.parametrize(("likelihood", "f", "y", "text"), WRONG)
def test_wrong_targets_are_refused(likelihood: Any, f: Tensor, y: Tensor, text: str) -> None:
    with pytest.raises(InputError, match=text):
        likelihood.check(f, y)


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: n2g.likelihoods.Poisson(0.0), r"exposure must be positive"),
        (
            lambda: n2g.likelihoods.Poisson(torch.ones(1, 1, 1)),
            r"exposure must be a number.*\(1, 1, 1\)",
        ),
        (
            lambda: n2g.likelihoods.NegativeBinomial(0.0),
            r"dispersion must be a number from 1e-6.*Poisson\(\)",
        ),
        (lambda: n2g.likelihoods.StudentT(-1.0), r"scale_var must be positive"),
        (
            lambda: n2g.likelihoods.StudentT(torch.ones(2, 2)),
            r"scale_var must be a number.*\(2, 2\)",
        ),
        (lambda: n2g.likelihoods.StudentT(1.0, 0.0), r"degrees_of_freedom must be positive"),
        (lambda: n2g.likelihoods.Ordinal(()), r"tuple of K − 1 numbers"),
        (lambda: n2g.likelihoods.Ordinal((1.0, 0.0)), r"must be finite and increase"),
        (lambda: n2g.likelihoods.Ordinal((0.0, math.inf)), r"must be finite and increase"),
    ],
)
def test_wrong_settings_are_refused(build: Callable[[], Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        build()
