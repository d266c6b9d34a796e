"""Laws that every likelihood obeys. A new likelihood joins by one line in CASES."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator import to_linear_operator
from torch import Tensor

from contributing import example
from net2gp.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    LogVariance,
    MonteCarlo,
    NegativeBinomial,
    Ordinal,
    Poisson,
    Probit,
    SoftplusScale,
    StudentT,
    expected_derivatives,
    integrals,
)
from net2gp.likelihoods.traits import is_canonical
from net2gp.types import Likelihood

Support = Iterator[tuple[Tensor, Tensor]]


def real_support(f: Tensor, mean: Tensor, std: Tensor) -> Support:
    """Gauss–Hermite points in y: exact for the polynomials in y that the laws below average."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(6)
    weights = weights / weights.sum()
    for index in itertools.product(range(6), repeat=mean.shape[1]):
        z = torch.tensor(nodes[list(index)], dtype=f.dtype)
        yield mean + std * z, torch.full(f.shape[:1], np.prod(weights[list(index)]), dtype=f.dtype)


def gaussian_support(likelihood: Gaussian, f: Tensor) -> Support:
    return real_support(f, f, likelihood.noise_variance(f).sqrt())


def heteroscedastic_support(likelihood: HeteroscedasticGaussian, f: Tensor) -> Support:
    mean, raw = f.chunk(2, -1)
    return real_support(f, mean, likelihood.scale.log_std(raw).exp())


def bernoulli_support(likelihood: Bernoulli, f: Tensor) -> Support:
    for bits in itertools.product((0.0, 1.0), repeat=f.shape[1]):
        y = torch.tensor(bits, dtype=f.dtype).expand_as(f)
        yield y, (f.sigmoid() * y + (1 - f.sigmoid()) * (1 - y)).prod(-1)


def categorical_support(likelihood: Categorical, f: Tensor) -> Support:
    for c in range(f.shape[1]):
        yield torch.full(f.shape[:1], c), f.softmax(-1)[:, c]


def count_support(likelihood: Any, f: Tensor) -> Support:
    """All counts that are not improbable, for rates up to some tens."""
    for count in range(200):
        y = torch.full_like(f, count)
        yield y, likelihood.log_density(f, y).exp().prod(-1)


def student_support(likelihood: StudentT, f: Tensor) -> Support:
    """With y = f + s √ν tan θ the law of θ has the density cos^{ν−1} θ, smooth on a bounded interval."""
    nodes, weights = np.polynomial.legendre.leggauss(60)
    df, scale = likelihood.degrees_of_freedom, float(likelihood.scale_var) ** 0.5
    weights = weights * np.cos(nodes * np.pi / 2) ** (df - 1)
    for node, weight in zip(nodes, weights / weights.sum(), strict=True):
        y = f + scale * df**0.5 * float(np.tan(node * np.pi / 2))
        yield y, torch.full(f.shape[:1], weight, dtype=f.dtype)


def ordinal_support(likelihood: Ordinal, f: Tensor) -> Support:
    for level in range(likelihood.num_levels):
        y = torch.full(f.shape[:1], level)
        yield y, likelihood.log_prob(f, y).exp()


def waiting_support(likelihood: Any, f: Tensor) -> Support:
    """Gauss–Laguerre points in y: exact for the polynomials in y that the laws below average."""
    nodes, weights = np.polynomial.laguerre.laggauss(12)
    for node, weight in zip(nodes, weights, strict=True):
        yield node * f.exp(), torch.full(f.shape[:1], weight, dtype=f.dtype)


@dataclass(frozen=True)
class Case:
    likelihood: Any
    num_outputs: int
    support: Callable[[Any, Tensor], Support]

    def outputs(self, num_points: int = 5, dtype: torch.dtype = torch.float64) -> Tensor:
        generator = torch.Generator().manual_seed(3)
        return torch.randn(num_points, self.num_outputs, generator=generator, dtype=dtype)

    def targets(self, f: Tensor) -> Tensor:
        """A y for each point that differs from point to point."""
        values = [y for y, _ in self.support(self.likelihood, f)]
        return torch.stack([values[n % len(values)][n] for n in range(len(f))])

    def gaussian(self, num_points: int = 5, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(4)
        shape = (num_points, self.num_outputs, self.num_outputs)
        root = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
        return self.outputs(num_points), root @ root.mT


NOISE = torch.tensor([[0.3, 0.5], [0.1, 2.0], [0.2, 0.2], [1.0, 0.4], [0.7, 0.9]])
CASES = {
    "gaussian": Case(Gaussian(0.3), 1, gaussian_support),
    "gaussian per output": Case(Gaussian(torch.tensor([0.3, 0.5])), 2, gaussian_support),
    "gaussian per point": Case(Gaussian(NOISE), 2, gaussian_support),
    "softplus": Case(HeteroscedasticGaussian(), 2, heteroscedastic_support),
    "softplus, two targets": Case(
        HeteroscedasticGaussian(SoftplusScale(floor=0.1)), 4, heteroscedastic_support
    ),
    "log variance": Case(HeteroscedasticGaussian(LogVariance()), 2, heteroscedastic_support),
    "bernoulli": Case(Bernoulli(), 1, bernoulli_support),
    "bernoulli probit": Case(Bernoulli(Probit()), 1, bernoulli_support),
    "bernoulli monte carlo": Case(Bernoulli(MonteCarlo(256)), 1, bernoulli_support),
    "three labels": Case(Bernoulli(), 3, bernoulli_support),
    "categorical": Case(Categorical(), 3, categorical_support),
    "categorical probit": Case(Categorical(Probit()), 3, categorical_support),
    "two classes": Case(Categorical(MonteCarlo(1024, seed=5)), 2, categorical_support),
    "poisson": Case(Poisson(), 1, count_support),
    "poisson with exposure": Case(Poisson(exposure=2.5), 1, count_support),
    "negative binomial": Case(NegativeBinomial(dispersion=0.4), 1, count_support),
    "student t": Case(StudentT(scale_var=0.3, degrees_of_freedom=4.0), 1, student_support),
    "ordinal": Case(Ordinal((-1.0, 0.2, 1.5)), 1, ordinal_support),
    "ordinal probit": Case(Ordinal((-1.0, 0.2, 1.5), probit=True), 1, ordinal_support),
    "of contributing": Case(example("likelihood").Waiting(), 1, waiting_support),
}
each = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
CANONICAL = {name: case for name, case in CASES.items() if case.likelihood.canonical}
canonical = pytest.mark.parametrize("case", CANONICAL.values(), ids=CANONICAL.keys())


def normal(mean: Tensor, covariance: Tensor) -> MultivariateNormal:
    # A dense covariance would be factored at once, which a singular one does not survive.
    return MultivariateNormal(mean, to_linear_operator(covariance))


def negative_hessian(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    def total(f: Tensor) -> Tensor:
        return likelihood.log_prob(f, y).sum()

    full = torch.func.hessian(total)(f)
    return -torch.stack([full[n, :, n] for n in range(len(f))])


def predictive_log_prob(
    likelihood: Likelihood, mean: Tensor, covariance: Tensor, y: Tensor
) -> Tensor:
    value = likelihood.predict(normal(mean, covariance)).log_prob(y)
    return value.sum(-1) if value.dim() == 2 else value


@each
def test_each_implements_the_protocol(case: Case) -> None:
    assert isinstance(case.likelihood, Likelihood)


@each
def test_the_residual_is_the_gradient_of_log_prob(case: Case) -> None:
    f = case.outputs().requires_grad_()
    y = case.targets(f.detach())
    (gradient,) = torch.autograd.grad(case.likelihood.log_prob(f, y).sum(), f)
    torch.testing.assert_close(case.likelihood.residual(f, y), gradient, rtol=1e-10, atol=1e-10)


@each
def test_the_curvature_is_the_expected_negative_hessian(case: Case) -> None:
    f = case.outputs()
    targets, weights = (
        torch.stack(part) for part in zip(*case.support(case.likelihood, f), strict=True)
    )
    hessians = torch.vmap(lambda y: negative_hessian(case.likelihood, f, y))(targets)
    total = (weights[:, :, None, None] * hessians).sum(0)
    torch.testing.assert_close(case.likelihood.curvature(f), total, rtol=1e-10, atol=1e-10)


@canonical
def test_the_curvature_is_the_negative_hessian_whatever_y_is(case: Case) -> None:
    f = case.outputs()
    hessian = negative_hessian(case.likelihood, f, case.targets(f))
    torch.testing.assert_close(case.likelihood.curvature(f), hessian, rtol=1e-10, atol=1e-10)


@each
def test_whether_the_curvature_is_the_hessian_is_found_by_trying(case: Case) -> None:
    class Undeclared:
        log_prob, residual = case.likelihood.log_prob, case.likelihood.residual
        curvature = case.likelihood.curvature

    f = case.outputs()
    assert is_canonical(Undeclared(), f, case.targets(f)) == case.likelihood.canonical  # type: ignore[arg-type]


@each
def test_the_curvature_is_the_covariance_of_the_residual(case: Case) -> None:
    f = case.outputs()
    first, second = 0.0, 0.0
    for y, weight in case.support(case.likelihood, f):
        r = case.likelihood.residual(f, y)
        first = first + weight[:, None] * r
        second = second + weight[:, None, None] * r[:, :, None] * r[:, None, :]
    torch.testing.assert_close(first, torch.zeros_like(f), rtol=0, atol=1e-9)
    torch.testing.assert_close(case.likelihood.curvature(f), second, rtol=1e-9, atol=1e-9)


@each
def test_the_curvature_is_symmetric_and_positive_semi_definite(case: Case) -> None:
    curvature = case.likelihood.curvature(4 * case.outputs())
    assert torch.equal(curvature, curvature.mT)
    assert torch.linalg.eigvalsh(curvature).min() > -1e-14


@each
def test_each_accepts_its_own_targets(case: Case) -> None:
    f = case.outputs()
    case.likelihood.check(f, case.targets(f))


@each
def test_zero_covariance_predicts_the_plug_in(case: Case) -> None:
    f = case.outputs()
    y = case.targets(f)
    zero = torch.zeros(*f.shape, f.shape[1], dtype=f.dtype)
    torch.testing.assert_close(
        predictive_log_prob(case.likelihood, f, zero, y),
        case.likelihood.log_prob(f, y),
        rtol=1e-9,
        atol=1e-9,
    )


PROBIT = ("bernoulli probit", "categorical probit")
exact = pytest.mark.parametrize(
    "case",
    [case for name, case in CASES.items() if name not in PROBIT],
    ids=[name for name in CASES if name not in PROBIT],
)


def uncorrelated_targets(covariance: Tensor, case: Case) -> Tensor:
    """Predictions treat labels, and heteroscedastic targets, one at a time; so must the sample."""
    if isinstance(case.likelihood, Bernoulli):
        return torch.diag_embed(covariance.diagonal(dim1=-2, dim2=-1))
    if isinstance(case.likelihood, HeteroscedasticGaussian):
        index = torch.arange(case.num_outputs) % (case.num_outputs // 2)
        return covariance * (index[:, None] == index[None, :])
    return covariance


@exact
def test_the_prediction_is_the_average_over_functions(case: Case) -> None:
    mean, covariance = case.gaussian()
    covariance = uncorrelated_targets(covariance, case)
    y = case.targets(mean)
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(100_000, *mean.shape, generator=generator, dtype=torch.float64)
    functions = mean + (z[..., None, :] @ torch.linalg.cholesky(covariance).mT).squeeze(-2)
    densities = torch.vmap(lambda f: case.likelihood.log_prob(f, y))(functions).exp()
    standard_error = densities.std(0) / len(densities) ** 0.5
    value = predictive_log_prob(case.likelihood, mean, covariance, y).exp()
    # Five standard errors of the plain sample, plus the error of 256 quasi-random points.
    quasi = 2e-3 if isinstance(getattr(case.likelihood, "link", None), MonteCarlo) else 0.0
    assert ((value - densities.mean(0)).abs() < 5 * standard_error + quasi).all()


@pytest.mark.parametrize(
    "case",
    [case for name, case in CASES.items() if name != "gaussian per point"],
    ids=[name for name in CASES if name != "gaussian per point"],
)
def test_permuting_the_points_permutes_everything(case: Case) -> None:
    mean, covariance = case.gaussian()
    y, order = case.targets(mean), torch.tensor([3, 1, 4, 0, 2])
    likelihood = case.likelihood
    assert torch.equal(
        likelihood.log_prob(mean, y)[order], likelihood.log_prob(mean[order], y[order])
    )
    torch.testing.assert_close(
        predictive_log_prob(likelihood, mean, covariance, y)[order],
        predictive_log_prob(likelihood, mean[order], covariance[order], y[order]),
    )


@each
def test_float32_in_gives_float32_out(case: Case) -> None:
    mean, covariance = (value.float() for value in case.gaussian())
    y = case.targets(mean)
    likelihood = case.likelihood
    assert likelihood.log_prob(mean, y).dtype == torch.float32
    assert likelihood.residual(mean, y).dtype == torch.float32
    assert likelihood.curvature(mean).dtype == torch.float32
    assert likelihood.predict(normal(mean, covariance)).mean.dtype == torch.float32
    for value in expected_derivatives(likelihood, mean, covariance, y):
        assert value.dtype == torch.float32


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("variance", [0.0, 1e-12, 1.0, 1e4])
def test_extreme_outputs_give_no_nan(case: Case, dtype: torch.dtype, variance: float) -> None:
    signs = torch.tensor(list(itertools.product((-1e3, 0.0, 1e3), repeat=2)), dtype=dtype)[:5]
    mean = signs.repeat(1, 2)[:, : case.num_outputs]
    covariance = (variance * torch.eye(case.num_outputs, dtype=dtype)).expand(5, -1, -1)
    y = case.targets(torch.zeros_like(mean))
    values = [
        case.likelihood.log_prob(mean, y),
        case.likelihood.residual(mean, y),
        case.likelihood.curvature(mean),
        predictive_log_prob(case.likelihood, mean, covariance, y),
        *expected_derivatives(case.likelihood, mean, covariance, y),
    ]
    assert not any(value.isnan().any() for value in values)


@each
def test_predictions_are_deterministic_and_leave_the_random_state_alone(case: Case) -> None:
    mean, covariance = case.gaussian()
    y = case.targets(mean)
    state = torch.get_rng_state()
    first = (
        predictive_log_prob(case.likelihood, mean, covariance, y),
        *expected_derivatives(case.likelihood, mean, covariance, y),
    )
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(7)
    again = (
        predictive_log_prob(case.likelihood, mean, covariance, y),
        *expected_derivatives(case.likelihood, mean, covariance, y),
    )
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@each
def test_predictions_do_not_depend_on_the_size_of_the_blocks(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    mean, covariance = case.gaussian()
    y = case.targets(mean)
    whole = predictive_log_prob(case.likelihood, mean, covariance, y)
    monkeypatch.setattr(integrals, "BLOCK", 1)
    torch.testing.assert_close(predictive_log_prob(case.likelihood, mean, covariance, y), whole)


@each
def test_expectations_at_zero_covariance_are_the_plug_in(case: Case) -> None:
    f = case.outputs()
    y = case.targets(f)
    covariance = torch.zeros(*f.shape, f.shape[1], dtype=f.dtype)
    log_prob, residual, curvature = expected_derivatives(case.likelihood, f, covariance, y)
    torch.testing.assert_close(log_prob, case.likelihood.log_prob(f, y))
    torch.testing.assert_close(residual, case.likelihood.residual(f, y))
    torch.testing.assert_close(curvature, case.likelihood.curvature(f))


@canonical
def test_expectations_are_derivatives_of_the_expected_log_prob(case: Case) -> None:
    mean, covariance = case.gaussian()
    y = case.targets(mean)

    def expected(mean: Tensor) -> Tensor:
        return expected_derivatives(case.likelihood, mean, covariance, y).log_prob.sum()

    value = expected_derivatives(case.likelihood, mean, covariance, y)
    torch.testing.assert_close(
        value.residual, torch.func.grad(expected)(mean), rtol=1e-10, atol=1e-10
    )
    full = torch.func.hessian(expected)(mean)
    hessian = -torch.stack([full[n, :, n] for n in range(len(mean))])
    torch.testing.assert_close(value.curvature, hessian, rtol=1e-10, atol=1e-10)


@each
def test_expectations_agree_with_a_plain_sample(case: Case) -> None:
    mean, covariance = case.gaussian(scale=0.5)
    y = case.targets(mean)
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(20_000, *mean.shape, generator=generator, dtype=torch.float64)
    functions = mean + (z[..., None, :] @ torch.linalg.cholesky(covariance).mT).squeeze(-2)
    samples = [
        torch.vmap(lambda f: case.likelihood.log_prob(f, y))(functions),
        torch.vmap(lambda f: case.likelihood.residual(f, y))(functions),
        torch.vmap(case.likelihood.curvature)(functions),
    ]
    values = expected_derivatives(case.likelihood, mean, covariance, y)
    for value, sample in zip(values, samples, strict=True):
        standard_error = sample.std(0) / len(sample) ** 0.5
        quasi = 2e-3 if isinstance(case.likelihood, Categorical) else 1e-12
        assert ((value - sample.mean(0)).abs() < 5 * standard_error + quasi).all()


@pytest.mark.gpu
@each
def test_cuda_agrees_with_the_cpu(case: Case) -> None:
    mean, covariance = case.gaussian()
    y = case.targets(mean)
    here = [
        case.likelihood.log_prob(mean, y),
        predictive_log_prob(case.likelihood, mean, covariance, y),
        *expected_derivatives(case.likelihood, mean, covariance, y),
    ]
    mean, covariance, y = mean.cuda(), covariance.cuda(), y.cuda()
    there = [
        case.likelihood.log_prob(mean, y),
        predictive_log_prob(case.likelihood, mean, covariance, y),
        *expected_derivatives(case.likelihood, mean, covariance, y),
    ]
    for a, b in zip(here, there, strict=True):
        assert b.is_cuda
        torch.testing.assert_close(a, b.cpu(), rtol=1e-9, atol=1e-9)
