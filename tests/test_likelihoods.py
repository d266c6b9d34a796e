from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator import to_linear_operator
from torch import Tensor
from torch.nn.functional import logsigmoid

from net2gp.errors import InputError
from net2gp.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    LogVariance,
    MonteCarlo,
    Probit,
    Quadrature,
    SoftplusScale,
    expected_derivatives,
    shape_targets,
)
from net2gp.likelihoods.integrals import (
    expected_softplus,
    log_expected_sigmoid,
    logistic_rule,
    normal_rule,
    psd_root,
)

MEANS = torch.tensor([-60.0, -7.0, -1.0, 0.0, 0.4, 3.0, 25.0], dtype=torch.float64)
VARIANCES = torch.tensor([0.0, 1e-6, 0.3, 4.499, 4.5, 30.0, 900.0, 1e6], dtype=torch.float64)


def normal(mean: Tensor, covariance: Tensor) -> MultivariateNormal:
    return MultivariateNormal(mean, to_linear_operator(covariance))


def dense_log_expectation(mean: Tensor, variance: Tensor, log_function) -> Tensor:
    """log ∫ g N by the trapezoidal rule on a grid far finer than the logistic function is wide."""
    z = torch.linspace(-40, 40, 400_001, dtype=torch.float64)
    weight = -z.square() / 2 - 0.5 * math.log(2 * math.pi) + (z[1] - z[0]).log()
    return torch.logsumexp(log_function(mean + variance.sqrt() * z) + weight, 0)


@pytest.mark.parametrize("variance", VARIANCES)
@pytest.mark.parametrize("mean", MEANS)
def test_the_logistic_integral_equals_dense_quadrature_at_every_variance(mean, variance) -> None:
    dense = dense_log_expectation(mean, variance, logsigmoid)
    value = log_expected_sigmoid(mean[None], variance[None], 32)[0]
    torch.testing.assert_close(value.exp(), dense.exp(), rtol=0, atol=5e-7)
    torch.testing.assert_close(value, dense, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variance", VARIANCES)
@pytest.mark.parametrize("mean", MEANS)
def test_expected_softplus_equals_dense_quadrature_at_every_variance(mean, variance) -> None:
    logs = (
        lambda f: torch.logaddexp(f, torch.zeros_like(f)).log().clamp(min=-700),
        logsigmoid,
        lambda f: logsigmoid(f) + logsigmoid(-f),
    )
    values = expected_softplus(mean[None], variance[None], 32)
    for value, log_function, tolerance in zip(values, logs, (5e-7, 5e-7, 2e-6), strict=True):
        dense = dense_log_expectation(mean, variance, log_function).exp()
        torch.testing.assert_close(value[0], dense, rtol=1e-9, atol=tolerance)


def test_more_quadrature_points_are_more_accurate() -> None:
    mean, variance = torch.tensor([0.7]).double(), torch.tensor([3.0]).double()
    dense = dense_log_expectation(mean[0], variance[0], logsigmoid)
    errors = [float((log_expected_sigmoid(mean, variance, k) - dense).abs()) for k in (4, 16, 64)]
    assert errors[0] > 100 * errors[1] > 100 * errors[2]


def test_small_probabilities_keep_their_relative_accuracy() -> None:
    mean = torch.tensor([-1e3, -200.0, -40.0]).double()
    variance = torch.tensor([9.0, 25.0, 4.0]).double()
    value = log_expected_sigmoid(mean, variance, 32)
    torch.testing.assert_close(value, mean + variance / 2, rtol=0, atol=1e-6)


@pytest.mark.parametrize("num_points", [1, 5, 32, 128])
def test_gauss_rules_integrate_polynomials_exactly(num_points) -> None:
    like = torch.zeros(1).double()
    for rule, second, fourth in (
        (normal_rule, 1.0, 3.0),
        (logistic_rule, math.pi**2 / 3, 7 * math.pi**4 / 15),
    ):
        nodes, weights = rule(num_points, like)
        assert float(weights.sum()) == pytest.approx(1, rel=1e-12)
        if num_points > 2:
            assert float((weights * nodes**2).sum()) == pytest.approx(second, rel=1e-10)
            assert float((weights * nodes**4).sum()) == pytest.approx(fourth, rel=1e-10)


def test_probit_is_within_its_known_error_of_the_integral() -> None:
    mean, variance = torch.meshgrid(MEANS, VARIANCES, indexing="ij")
    f = normal(mean.reshape(-1, 1), variance.reshape(-1, 1, 1))
    error = (Bernoulli(Probit()).predict(f).probs - Bernoulli().predict(f).probs).abs()
    assert 1e-3 < error.max() < 0.02


def test_monte_carlo_approaches_quadrature() -> None:
    generator = torch.Generator().manual_seed(0)
    mean = 2 * torch.randn(20, 3, generator=generator, dtype=torch.float64)
    covariance = torch.diag_embed(4 * torch.rand(20, 3, generator=generator, dtype=torch.float64))
    f = normal(mean, covariance)
    exact = Bernoulli().predict(f).probs
    errors = [
        float((Bernoulli(MonteCarlo(size)).predict(f).probs - exact).abs().max())
        for size in (32, 4096)
    ]
    assert errors[1] < 3e-4 < errors[0] < 5e-2


def test_two_classes_are_one_logit_difference() -> None:
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(30, 2, generator=generator, dtype=torch.float64)
    root = torch.randn(30, 2, 2, generator=generator, dtype=torch.float64)
    covariance = root @ root.mT
    contrast = torch.tensor([[-1.0], [1.0]]).double()
    difference = normal(mean @ contrast, contrast.T @ covariance @ contrast)
    probs = Categorical(MonteCarlo(4096)).predict(normal(mean, covariance)).probs
    torch.testing.assert_close(
        probs[:, 1:], Bernoulli().predict(difference).probs, rtol=0, atol=1e-3
    )


def test_a_certain_direction_of_the_logits_does_not_matter() -> None:
    # Softmax ignores a common shift, so an arbitrarily uncertain one changes nothing but rounding.
    mean = torch.tensor([[1.0, 0.0, -2.0]]).double()
    shift = 100.0 * torch.ones(1, 3, 3).double()
    probs = Categorical().predict(normal(mean, shift)).probs
    torch.testing.assert_close(probs, mean.softmax(-1), rtol=1e-7, atol=1e-7)


def test_uncertainty_moves_probabilities_towards_even_odds() -> None:
    mean = torch.tensor([[2.0, 0.0, -1.0]]).double()
    variances = (0.0, 1.0, 10.0, 1000.0)
    for likelihood in (Categorical(), Categorical(Probit())):
        tops = [
            float(likelihood.predict(normal(mean, v * torch.eye(3)[None].double())).probs.max())
            for v in variances
        ]
        assert tops == sorted(tops, reverse=True)


def test_extreme_logits_keep_their_log_probability() -> None:
    f = normal(torch.tensor([[1000.0]]), torch.zeros(1, 1, 1))
    assert float(Bernoulli().predict(f).log_prob(torch.zeros(1, 1))) == -1000.0


def test_heteroscedastic_variance_is_the_sum_of_both_kinds() -> None:
    mean = torch.tensor([[1.0, 0.3]]).double()
    covariance = torch.tensor([[[0.8, -0.5], [-0.5, 0.6]]]).double()
    y = HeteroscedasticGaussian(LogVariance()).predict(normal(mean, covariance))
    torch.testing.assert_close(y.mean, mean[:, :1])
    aleatoric = torch.tensor([[math.exp(0.3 + 0.6 / 2)]]).double()
    torch.testing.assert_close(y.variance, 0.8 + aleatoric)


def test_mean_and_scale_that_move_together_skew_the_prediction() -> None:
    # Var(y | r) = e^r and E[y | r] = r: the third central moment is 3 E[r e^r] − 3 E r · E e^r.
    mean, covariance = torch.zeros(1, 2).double(), torch.ones(1, 2, 2).double()
    law = HeteroscedasticGaussian(LogVariance()).predict(normal(mean, covariance)).base_dist
    parts, weights = law.component_distribution, law.mixture_distribution.probs
    third = weights * (parts.mean**3 + 3 * parts.mean * parts.variance)
    torch.testing.assert_close(third.sum(), torch.tensor(3 * math.exp(0.5)).double())


@pytest.mark.parametrize(
    ("noise_var", "shape"),
    [
        (0.1, (3, 2)),
        (torch.tensor(0.1), (3, 2)),
        (torch.tensor([0.1, 0.2]), (3, 2)),
        (torch.tensor([[0.1], [0.2], [0.3]]), (3, 2)),
    ],
)
def test_noise_of_every_shape_reaches_each_entry(noise_var, shape) -> None:
    f = torch.zeros(shape, dtype=torch.float64)
    noise = Gaussian(noise_var).noise_variance(f)
    expected = torch.as_tensor(noise_var, dtype=torch.float64).expand(shape)
    assert noise.shape == shape
    assert noise.dtype == torch.float64
    torch.testing.assert_close(noise, expected, rtol=0, atol=0)


def test_the_gaussian_prediction_adds_the_noise() -> None:
    noise = torch.tensor([[0.1], [0.2]]).double()
    covariance = torch.ones(2, 2, 2).double()
    y = Gaussian(noise).predict(normal(torch.zeros(2, 2).double(), covariance))
    assert isinstance(y, MultivariateNormal)
    assert y.batch_shape == (2,)
    assert y.event_shape == (2,)
    expected = covariance + noise[:, :, None] * torch.eye(2).double()
    torch.testing.assert_close(y.covariance_matrix, expected)


def test_a_noise_free_certain_prediction_exists() -> None:
    y = Gaussian(0.0).predict(normal(torch.ones(3, 1), torch.zeros(3, 1, 1)))
    assert torch.equal(y.mean, torch.ones(3, 1))
    assert torch.equal(y.covariance_matrix, torch.zeros(3, 1, 1))


def test_the_noise_gets_a_gradient() -> None:
    noise_var = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    f, y = torch.zeros(4, 1), torch.tensor([1.0, -1.0, 2.0, 0.5])
    Gaussian(noise_var).log_prob(f, y).sum().backward()
    expected = 0.5 * (y.square().sum() / 0.4**2 - 4 / 0.4)
    assert noise_var.grad is not None
    assert float(noise_var.grad) == pytest.approx(float(expected), rel=1e-6)


def test_predictions_are_differentiable_in_mean_and_covariance() -> None:
    mean = torch.tensor([[0.3, -1.0], [2.0, 0.0]]).double().requires_grad_()
    root = torch.tensor([[1.0, 0.0], [0.5, 3.0]]).double().requires_grad_()
    for likelihood in (Bernoulli(), Bernoulli(MonteCarlo(64)), Categorical(), Bernoulli(Probit())):
        assert torch.autograd.gradcheck(
            lambda m, r: likelihood.predict(normal(m, (r @ r.T).expand(2, 2, 2))).probs,
            (mean, root),
        )


def test_a_singular_covariance_leaves_the_gradients_of_the_others_finite() -> None:
    covariance = torch.stack([torch.eye(3), torch.ones(3, 3)]).double().requires_grad_()
    psd_root(covariance)[0].sum().backward()
    assert covariance.grad is not None
    assert covariance.grad[0].isfinite().all()


@pytest.mark.parametrize("rank", [0, 1, 2, 4])
def test_a_root_of_a_singular_covariance_gives_it_back(rank) -> None:
    generator = torch.Generator().manual_seed(rank)
    factor = torch.randn(6, 4, rank, generator=generator, dtype=torch.float64)
    root = psd_root(factor @ factor.mT)
    torch.testing.assert_close(root @ root.mT, factor @ factor.mT, rtol=1e-9, atol=1e-9)


def test_the_base_sample_is_standard_normal_and_antithetic() -> None:
    z = MonteCarlo(1024, seed=7).base_sample(4, like=torch.zeros(1).double())
    assert torch.equal(z[:512], -z[512:])
    torch.testing.assert_close(z.T @ z / 1024, torch.eye(4).double(), rtol=0, atol=0.02)
    other = MonteCarlo(1024, seed=8).base_sample(4, like=z)
    assert not torch.equal(z, other)


@dataclasses.dataclass(frozen=True)
class Poisson:
    """A likelihood that net2gp does not know, written as its protocol asks."""

    link: MonteCarlo

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return (y * f - f.exp() - torch.lgamma(y + 1)).sum(-1)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        return y - f.exp()

    def curvature(self, f: Tensor) -> Tensor:
        return torch.diag_embed(f.exp())


def test_expectations_of_an_unknown_likelihood_come_from_its_own_methods() -> None:
    mean, variance = torch.tensor([[0.2], [1.0]]).double(), torch.tensor([[0.5], [0.1]]).double()
    y = torch.tensor([[2.0], [0.0]]).double()
    value = expected_derivatives(Poisson(MonteCarlo(8192)), mean, variance[..., None], y)
    rate = (mean + variance / 2).exp()
    torch.testing.assert_close(value.residual, y - rate, rtol=0, atol=5e-3)
    torch.testing.assert_close(value.curvature, rate[..., None], rtol=0, atol=5e-3)
    exact = (y * mean - rate - torch.lgamma(y + 1)).sum(-1)
    torch.testing.assert_close(value.log_prob, exact, rtol=0, atol=5e-3)


def test_targets_are_never_broadcast() -> None:
    f = torch.zeros(3, 1)
    assert shape_targets(f, torch.ones(3)).shape == (3, 1)
    for likelihood in (Gaussian(0.1), Bernoulli()):
        assert likelihood.log_prob(f, torch.ones(3)).shape == (3,)
        assert likelihood.residual(f, torch.ones(3)).shape == (3, 1)
    two = torch.zeros(3, 2)
    assert HeteroscedasticGaussian().residual(two, torch.ones(3)).shape == (3, 2)
    with pytest.raises(InputError, match=r"must have shape \(3, 2\).*has shape \(3,\)"):
        Gaussian(0.1).log_prob(two, torch.ones(3))
    with pytest.raises(InputError, match=r"has shape \(1, 2\). Pass one row per point"):
        Gaussian(0.1).residual(two, torch.ones(1, 2))
    with pytest.raises(InputError, match=r"has shape \(2, 3\). Pass y = y.reshape\(3, 2\)"):
        Bernoulli().residual(two, torch.ones(2, 3))


F2, F3 = torch.zeros(4, 2), torch.zeros(4, 3)
MISTAKES = [
    (Gaussian(), F2, torch.zeros(4), r"must have shape \(4, 2\)"),
    (Gaussian(0.1), F2, torch.zeros(4, 2).double(), r"y = y.to\(torch.float32\)"),
    (
        Gaussian(0.1),
        F2,
        torch.zeros(4, 2).long(),
        r"floating tensor for a regression, but is torch.int64",
    ),
    (Gaussian(0.1), F2, torch.full((4, 2), torch.nan), r"y must be finite"),
    (Gaussian(0.1), F2, [1.0], r"y must be a tensor, but is a list"),
    (
        Gaussian(0.1),
        torch.zeros(4),
        torch.zeros(4),
        r"shape \(N, C\), but are a tensor of shape \(4,\)",
    ),
    (HeteroscedasticGaussian(), F3, torch.zeros(4), r"2·D outputs.*the network has 3"),
    (HeteroscedasticGaussian(), F2, torch.zeros(4, 2), r"must have shape \(4, 1\)"),
    (Bernoulli(), F2, torch.full((4, 2), 2), r"labels must be 0 or 1, but y holds 2"),
    (Bernoulli(), F2, torch.full((4, 2), -1.0), r"y holds -1.*pass y = y > 0"),
    (
        Categorical(),
        F3,
        torch.tensor([0, 1, 3, 2]),
        r"in 0..2 for a network with 3 outputs, but y holds 3",
    ),
    (Categorical(), F3, torch.tensor([0, -1, 1, 2]), r"but y holds -1"),
    (Categorical(), F3, torch.zeros(4), r"but is torch.float32. Pass y = y.long\(\)"),
    (Categorical(), F3, torch.zeros(4, 3).long(), r"Pass y = y.argmax\(-1\)"),
    (Categorical(), F3, torch.zeros(4, 1).long(), r"Pass y = y.reshape\(-1\)"),
    (Categorical(), torch.zeros(4, 1), torch.zeros(4).long(), r"Use Bernoulli\(\) for one logit"),
]


@pytest.mark.parametrize(("likelihood", "f", "y", "message"), MISTAKES)
def test_a_check_says_what_is_wrong_with_the_targets(likelihood, f, y, message) -> None:
    with pytest.raises(InputError, match=message):
        likelihood.check(f, y)


def test_labels_of_every_integer_type_are_accepted() -> None:
    for dtype in (torch.uint8, torch.int32, torch.int64):
        y = torch.tensor([0, 2, 1, 0], dtype=dtype)
        Categorical().check(F3, y)
        assert Categorical().log_prob(F3, y).shape == (4,)
    for dtype in (torch.bool, torch.int64, torch.float32):
        y = torch.tensor([[0, 1], [1, 1], [0, 0], [1, 0]]).to(dtype)
        Bernoulli().check(F2, y)
        torch.testing.assert_close(Bernoulli().residual(F2, y), y.float() - 0.5)


def test_a_missing_noise_says_how_to_get_one() -> None:
    with pytest.raises(InputError, match=r"Pass Gaussian\(noise_var=0.1\), or let n2g.adapt"):
        Gaussian().log_prob(F2, F2)
    with pytest.raises(InputError, match="has no noise variance yet"):
        Gaussian().predict(normal(F2, torch.eye(2).expand(4, 2, 2)))


def test_zero_noise_has_no_density() -> None:
    for call in (
        lambda g: g.log_prob(F2, F2),
        lambda g: g.residual(F2, F2),
        lambda g: g.curvature(F2),
    ):
        with pytest.raises(InputError, match=r"p\(y \| f\) has no density"):
            call(Gaussian(0.0))


def test_noise_of_the_wrong_shape_says_what_to_pass() -> None:
    with pytest.raises(InputError, match=r"pass noise_var\[:, None\]"):
        Gaussian(torch.ones(4)).noise_variance(F2)
    with pytest.raises(
        InputError, match=r"noise of 5 points.*likelihood=Gaussian\(noise_var=...\)"
    ):
        Gaussian(torch.ones(5, 1)).predict(normal(F2, torch.eye(2).expand(4, 2, 2)))
    with pytest.raises(InputError, match=r"must have shape \(4, 1\) or \(4, 2\)"):
        Gaussian(torch.ones(4, 3)).noise_variance(F2)
    with pytest.raises(InputError, match=r"but has shape \(1, 1, 1\)"):
        Gaussian(torch.ones(1, 1, 1))
    with pytest.raises(InputError, match=r"noise_var must be zero or positive"):
        Gaussian(-0.1)


def test_a_link_that_does_not_fit_is_refused() -> None:
    with pytest.raises(InputError, match=r"Contrast\(\) or LaplaceBridge\(\), but is Quadrature"):
        Categorical(Quadrature())  # type: ignore[arg-type]
    with pytest.raises(InputError, match="but is 'probit'"):
        Bernoulli("probit")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="num_samples must be a positive whole number, but is 0"):
        MonteCarlo(0)
    with pytest.raises(InputError, match="at most 128, but is 1000"):
        Quadrature(1000)
    with pytest.raises(InputError, match=r"must be positive, but is 0.0"):
        SoftplusScale(floor=0.0)


def test_likelihoods_are_frozen_values() -> None:
    assert Categorical() == Categorical(MonteCarlo(512, seed=0))
    assert HeteroscedasticGaussian() != HeteroscedasticGaussian(LogVariance())
    with pytest.raises(dataclasses.FrozenInstanceError):
        Bernoulli().link = Probit()  # type: ignore[misc]


@pytest.mark.gpu
def test_targets_on_another_device_are_refused() -> None:
    with pytest.raises(InputError, match=r"y is on cpu.*y = y.to\('cuda:0'\)"):
        Gaussian(0.1).check(F2.cuda(), F2)
