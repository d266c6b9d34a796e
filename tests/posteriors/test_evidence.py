"""Gradients of the evidence, and its maximization."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from net2gp import (
    RBF,
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    condition,
    linearize,
    tune,
)
from net2gp.errors import InputError, JitterAdded, NotPositiveDefinite, trying
from net2gp.inputs import same_inputs
from net2gp.links import LogVariance, MonteCarlo, SoftplusScale
from net2gp.posteriors.spectrum import share_spectrum
from net2gp.posteriors.tune import tune_spectra
from net2gp.solvers import CG, Cholesky, Laplace, Variational, WeightCholesky
from net2gp.tuning import spectrum
from posteriors.ways import (
    binary_targets,
    class_targets,
    network,
    points,
    real_targets,
    seeded,
)

DOUBLE = torch.float64


def differences(evidence: Callable[[Tensor], Tensor], at: Tensor, step: float = 1e-4) -> Tensor:
    """Central differences in each entry."""
    result = torch.zeros_like(at)
    for index in range(at.numel()):
        change = torch.zeros_like(at)
        change.view(-1)[index] = step
        with torch.no_grad():
            rise = evidence(at + change) - evidence(at - change)
        result.view(-1)[index] = rise / (2 * step)
    return result


def assert_gradient(evidence, at: Tensor, *, rtol: float = 1e-6, step: float = 1e-4) -> None:
    leaf = at.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(evidence(leaf), leaf)
    assert float(gradient.abs().min()) > 1e-3  # else the comparison says little
    torch.testing.assert_close(
        gradient,
        differences(evidence, at, step),
        rtol=rtol,
        atol=rtol * float(gradient.abs().max()),
    )


SOLVERS = pytest.mark.parametrize(
    "solver", [Cholesky(), WeightCholesky()], ids=["function space", "weight space"]
)


@SOLVERS
@pytest.mark.parametrize("shape", [(), (2,), (7, 1), (7, 2)], ids=str)
def test_the_gradient_in_the_noise_is_right(solver, shape):
    linearized, x = linearize(network(2)), points(7)
    data = (x, real_targets(x, 2))
    at = 0.1 + 0.2 * torch.rand(shape, generator=seeded(0), dtype=DOUBLE)
    assert_gradient(
        lambda noise: condition(
            linearized.kernel(), data, Gaussian(noise), mean=linearized, solver=solver
        ).log_marginal_likelihood(),
        at,
    )


PRIORS: dict[str, tuple[Callable, Tensor]] = {
    "one": (lambda v: v, torch.tensor(0.5, dtype=DOUBLE)),
    "by pattern": (
        lambda v: {"0.*": v[0], "2.weight": v[1], "2.bias": v[2]},
        torch.tensor([0.5, 0.2, 1.5], dtype=DOUBLE),
    ),
}
POSTERIORS: dict[str, tuple] = {
    "gaussian": (Gaussian(0.1), 2, real_targets, None, 1e-6),
    "bernoulli, laplace": (Bernoulli(), 2, binary_targets, Laplace(), 1e-6),
    "bernoulli, variational": (Bernoulli(), 2, binary_targets, Variational(1000, 1e-13), 1e-5),
    "categorical, laplace": (Categorical(), 3, class_targets, Laplace(), 1e-6),
    # the sample that stands for the expectations leaves the bound stationary to its own accuracy
    "categorical, variational": (
        Categorical(MonteCarlo(4096)),
        3,
        class_targets,
        Variational(tol=1e-10),
        2e-3,
    ),
    "heteroscedastic, laplace": (
        HeteroscedasticGaussian(LogVariance()),
        2,
        lambda x, c: real_targets(x, 1),
        Laplace(),
        1e-6,
    ),
    "heteroscedastic with softplus, laplace": (
        HeteroscedasticGaussian(SoftplusScale(0.1)),
        2,
        lambda x, c: real_targets(x, 1),
        Laplace(),
        1e-6,
    ),
    "heteroscedastic, variational": (
        HeteroscedasticGaussian(LogVariance()),
        2,
        lambda x, c: real_targets(x, 1),
        Variational(1000, 1e-11),
        1e-3,
    ),
}


SEARCHED = "heteroscedastic, variational"  # by L-BFGS, which takes seconds: one prior shows it


@SOLVERS
@pytest.mark.parametrize(
    ("name", "prior"),
    [(n, p) for n in POSTERIORS for p in PRIORS if (n, p) != (SEARCHED, "by pattern")],
)
def test_the_gradient_in_the_prior_variance_is_right(name, prior, solver):
    likelihood, outputs, targets, inference, rtol = POSTERIORS[name]
    searched = name == SEARCHED
    expand, at = PRIORS[prior]
    linearized, x = linearize(network(outputs)), points(4 if searched else 7)
    data = (x, targets(x, outputs))

    def evidence(values: Tensor) -> Tensor:
        kernel = linearized.kernel(expand(values))
        return condition(
            kernel, data, likelihood, mean=linearized, solver=solver, inference=inference
        ).log_marginal_likelihood()

    assert_gradient(evidence, at, rtol=rtol, step=1e-2 if searched else 1e-4)


@pytest.mark.parametrize("name", ["gaussian", "bernoulli, laplace", "bernoulli, variational"])
def test_the_gradient_in_length_scales_is_right(name):
    likelihood, outputs, targets, inference, rtol = POSTERIORS[name]
    x = points(7)
    data = (x, targets(x, outputs))
    assert_gradient(
        lambda scales: condition(
            RBF(scales[:2], scales[2]), data, likelihood, inference=inference
        ).log_marginal_likelihood(),
        torch.tensor([0.6, 1.4, 2.0], dtype=DOUBLE),
        rtol=rtol,
    )


def test_the_gradient_in_one_variance_for_each_entry_is_right_in_weight_space():
    linearized, x = linearize(network(1)), points(7)
    data = (x, real_targets(x, 1))
    fixed = linearized.kernel().prior_var

    def evidence(values: Tensor) -> Tensor:
        prior = {**fixed, "2.weight": values}
        kernel = linearized.kernel(prior)
        return condition(
            kernel, data, Gaussian(0.1), solver=WeightCholesky()
        ).log_marginal_likelihood()

    assert_gradient(evidence, torch.full((1, 5), 0.5, dtype=DOUBLE))


def test_the_gradient_of_a_spectrum_is_right():
    for hidden in (2, 30):
        linearized, x = linearize(network(1, hidden=hidden)), points(12)
        fixed = spectrum(linearized.kernel(), (x, real_targets(x, 1)))
        assert_gradient(
            lambda v, fixed=fixed: fixed.log_marginal_likelihood(v[0], v[1]),
            torch.tensor([0.2, 0.7], dtype=DOUBLE),
        )


def test_a_shared_spectrum_is_that_of_the_other_targets(monkeypatch):
    for hidden in (2, 30):
        linearized, x = linearize(network(2, hidden=hidden)), points(12)
        y, other = real_targets(x, 2), real_targets(x, 2).flip(0)
        one, expected = (spectrum(linearized.kernel(), (x, t), mean=linearized) for t in (y, other))
        with monkeypatch.context() as patch:
            patch.setattr(torch.linalg, "eigh", None)
            shared = share_spectrum(one, expected.problem)
        evidence = expected.log_marginal_likelihood(0.2, 0.7)
        torch.testing.assert_close(shared.log_marginal_likelihood(0.2, 0.7), evidence)
        torch.testing.assert_close(
            shared.condition(0.2).marginal(x).mean, expected.condition(0.2).marginal(x).mean
        )


def test_same_inputs_are_recognized_by_value():
    x = points(3)
    assert same_inputs(x, x)
    assert same_inputs((x, x), (x.clone(), x))
    assert not same_inputs(x, x + 1)
    assert not same_inputs((x,), (x, x))
    assert not same_inputs(x, x[:2])


def line(count: int = 40) -> tuple[Tensor, Tensor]:
    """A draw from an RBF process with length scale 0.7, variance 2 and noise variance 0.05."""
    x = torch.linspace(0, 8, count, dtype=DOUBLE)[:, None]
    K = RBF(0.7, 2.0)(x) + 0.05 * torch.eye(count, dtype=DOUBLE)
    z = torch.randn(count, 1, generator=seeded(3), dtype=DOUBLE)
    return x, torch.linalg.cholesky(K) @ z


def test_tuning_finds_the_optimum_of_a_known_problem():
    """y ~ N(0, v I): the evidence in v is largest at the mean square of y."""
    x, y = points(30), real_targets(points(30), 1)
    kernel = RBF(1.0, 1e-12)
    tuned = tune(lambda noise_var: condition(kernel, (x, y), Gaussian(noise_var)), noise_var=3.0)
    assert tuned.likelihood.noise_var == pytest.approx(float(y.square().mean()), rel=1e-5)


def test_tuning_stops_where_the_gradient_vanishes_and_no_neighbor_is_better():
    data = line()
    build = lambda lengthscale, output_var, noise_var: condition(
        RBF(lengthscale, output_var), data, Gaussian(noise_var)
    )
    tuned = tune(build, lengthscale=1.0, output_var=1.0, noise_var=0.1)
    best = float(tuned.log_marginal_likelihood())
    found = [tuned.kernel.lengthscale, tuned.kernel.output_var, tuned.likelihood.noise_var]
    logs = torch.tensor(found, dtype=DOUBLE).log().requires_grad_()
    (gradient,) = torch.autograd.grad(build(*logs.exp()).log_marginal_likelihood(), logs)
    assert float(gradient.abs().max()) < 1e-3
    for index in range(3):
        for factor in (0.9, 1.1):
            moved = list(found)
            moved[index] *= factor
            assert float(build(*moved).log_marginal_likelihood()) < best
    assert found[0] == pytest.approx(0.7, rel=0.4)
    assert found[2] == pytest.approx(0.05, rel=0.6)
    assert not tuned.log_marginal_likelihood().requires_grad


@pytest.mark.parametrize("start", [0.01, 1.0, 30.0])
def test_tuning_without_gradients_finds_the_same_optimum(start):
    """At 1 the logarithm is 0, from which a relative first step would not move."""
    data = line()
    build = lambda solver: (
        lambda noise_var: condition(RBF(0.7, 2.0), data, Gaussian(noise_var), solver=solver)
    )
    smooth = tune(build(Cholesky()), noise_var=0.1).likelihood.noise_var
    rough = tune(build(CG(num_probes=8)), noise_var=start)
    assert rough.likelihood.noise_var == pytest.approx(smooth, rel=1e-2)


def test_tuning_tensors_keeps_their_shape():
    linearized, x = linearize(network(2)), points(12)
    data = (x, real_targets(x, 2))
    tuned = tune(
        lambda noise_var: condition(linearized.kernel(), data, Gaussian(noise_var)),
        noise_var=torch.tensor([0.1, 0.5]),
    )
    assert tuned.likelihood.noise_var.shape == (2,)


@pytest.mark.parametrize("start", [1e-6, 1e6])
def test_tuning_recovers_from_a_bad_start(start):
    x, y = points(30), real_targets(points(30), 1)
    build = lambda noise_var: condition(RBF(1.0), (x, y), Gaussian(noise_var))
    good = tune(build, noise_var=0.1).log_marginal_likelihood()
    bad = tune(build, noise_var=start).log_marginal_likelihood()
    assert float(bad) == pytest.approx(float(good), abs=1e-4)


def test_tuning_turns_back_where_the_posterior_cannot_be_built():
    x, y = points(20), real_targets(points(20), 1)

    def build(noise_var):
        if noise_var < 0.5:
            raise NotPositiveDefinite("too small")
        return condition(RBF(1.0), (x, y), Gaussian(noise_var))

    assert tune(build, noise_var=2.0).likelihood.noise_var >= 0.5


def test_tuning_says_when_nothing_can_be_built():
    def build(noise_var):
        raise NotPositiveDefinite("never")

    with pytest.raises(InputError, match=r"could not be computed anywhere near the start.*0\.1"):
        tune(build, noise_var=0.1)


def test_tuning_says_what_it_needs():
    with pytest.raises(InputError, match=r"something to tune: tune\(builder, noise_var=0.1\)"):
        tune(lambda: None)
    with pytest.raises(InputError, match="noise_var must be positive and finite, but -1"):
        tune(lambda noise_var: None, noise_var=-1.0)


def test_tuning_spectra_finds_the_optimum_over_noise_and_scale():
    linearized, x = linearize(network(1, hidden=30)), points(40)
    y = linearized.kernel(0.3).features(x)[:, 0] @ torch.randn(
        121, 1, generator=seeded(0), dtype=DOUBLE
    ) + 0.2 * torch.randn(40, 1, generator=seeded(1), dtype=DOUBLE)
    fixed = spectrum(linearized.kernel(), (x, y))
    noise, scale = tune_spectra([fixed])
    best = float(fixed.log_marginal_likelihood(noise, scale))
    for a in (0.9, 1.0, 1.1):
        for b in (0.9, 1.0, 1.1):
            assert float(fixed.log_marginal_likelihood(noise * a, scale * b)) <= best + 1e-9
    assert noise == pytest.approx(0.04, rel=0.6)
    kept = tune_spectra([fixed], noise_var=0.5)
    assert kept[0] == pytest.approx(0.5)
    assert tune_spectra([fixed], scale=0.3)[1] == pytest.approx(0.3)


@pytest.mark.parametrize("hidden", [2, 30], ids=["weight space", "function space"])
def test_a_grid_of_noises_and_scales_is_each_pair_alone(hidden):
    x = points(12)
    fixed = spectrum(linearize(network(2, hidden=hidden)).kernel(), (x, real_targets(x, 2)))
    noises, scales = torch.tensor([0.1, 0.5, 2.0]).double(), torch.tensor([0.3, 4.0]).double()
    grid = fixed.log_marginal_likelihood(noises[:, None], scales)
    alone = [[fixed.log_marginal_likelihood(float(n), float(s)) for s in scales] for n in noises]
    torch.testing.assert_close(grid, torch.tensor(alone, dtype=DOUBLE))


def smooth(count: int, noise_var: float = 0.0) -> tuple[Tensor, Tensor]:
    """A line, of which every tangent kernel with biases and weights makes sense without noise."""
    x = torch.linspace(-2, 2, count, dtype=DOUBLE)[:, None].repeat(1, 2)
    noise = torch.randn(count, 1, generator=seeded(2), dtype=DOUBLE)
    return x, x[:, :1] + noise_var**0.5 * noise


def test_the_noise_of_few_points_does_not_vanish_though_their_evidence_would_have_it_so():
    x, y = smooth(5)
    fixed = spectrum(linearize(network(1, hidden=30)).kernel(), (x, y))
    noise, scale = tune_spectra([fixed])
    variance = float(y.square().mean())
    less = tune_spectra([fixed], noise_var=1e-9 * variance)
    assert fixed.log_marginal_likelihood(*less) > fixed.log_marginal_likelihood(noise, scale)
    assert noise > 1e-7 * variance


@pytest.mark.parametrize("count", [5, 40])
def test_the_noise_has_the_largest_evidence_times_prior(count):
    """Which is log-normal around 1 % of the variance, a factor of 100 wide, and no prior of the scale."""
    x, y = smooth(count, 0.03)
    fixed = spectrum(linearize(network(1, hidden=30)).kernel(), (x, y))
    variance = float(y.square().mean())

    def score(noise: float, scale: float) -> float:
        away = math.log(noise / (0.01 * variance)) / math.log(100)
        return float(fixed.log_marginal_likelihood(noise, scale)) - 0.5 * away**2

    noise, scale = tune_spectra([fixed])
    for a, b in [(0.95, 1), (1.05, 1), (1, 0.95), (1, 1.05), (0.01, 1), (100, 1)]:
        assert score(noise * a, scale * b) < score(noise, scale)


def test_what_is_expected_of_the_noise_vanishes_against_many_points():
    """The shift of log σ² is below 1/N, where its standard error is √(2/N)."""
    linearized = linearize(network(1, hidden=30))
    for count in (100, 400):
        x, y = smooth(count, 0.03)
        fixed = spectrum(linearized.kernel(), (x, y))
        noise, scale = tune_spectra([fixed])
        logs = torch.linspace(-0.05, 0.05, 2001, dtype=DOUBLE)
        evidence = fixed.log_marginal_likelihood(noise * logs.exp(), scale)
        assert abs(float(logs[evidence.argmax()])) < 1 / count


def test_a_spectrum_refuses_a_noise_without_a_density():
    fixed = spectrum(RBF(), (points(5), real_targets(points(5), 1)))
    for noise in (0.0, -1.0, math.nan):
        with pytest.raises(InputError, match="noise_var must be positive and finite"):
            fixed.log_marginal_likelihood(noise)
        with pytest.raises(InputError, match="noise_var must be positive and finite"):
            fixed.condition(noise)


@pytest.mark.filterwarnings("ignore::net2gp.errors.NotConverged")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_tuning_is_the_same_whatever_the_caller_switched_off(mode):
    x = torch.linspace(-2, 2, 12, dtype=torch.float64)[:, None]
    build = lambda length, noise: condition(RBF(length), (x, x.sin()), Gaussian(noise))
    expected = tune(build, length=1.0, noise=0.1)
    with mode():
        found = tune(build, length=1.0, noise=0.1)
    assert float(found.likelihood.noise_var) == float(expected.likelihood.noise_var)
    assert float(found.kernel.lengthscale) == float(expected.kernel.lengthscale)


@pytest.mark.parametrize("plain", [True, False], ids=["values", "gradients"])
def test_tuning_turns_back_where_a_number_is_refused(plain):
    x, y = points(20), real_targets(points(20), 1)

    def build(noise_var):
        if noise_var < 0.5:
            raise InputError("noise_var must be at least 0.5.")
        number = noise_var.item() if plain and torch.is_tensor(noise_var) else noise_var
        return condition(RBF(1.0), (x, y), Gaussian(number))

    assert tune(build, noise_var=2.0).likelihood.noise_var >= 0.5
    with pytest.raises(InputError, match=r"noise_var must be at least 0\.5"):
        tune(build, noise_var=0.4)


def test_points_that_are_only_tried_do_not_warn_of_jitter():
    """Points that lie on each other, and a noise that is too small only on the way."""
    x = torch.tensor([0.0, 0.0, 1.0, 1.0, 2.0, 2.0], dtype=torch.float64)[:, None]
    y = torch.tensor([0.0, 1.0, 0.5, -0.5, 0.2, 0.9], dtype=torch.float64)[:, None]
    build = lambda noise: condition(RBF(), (x, y), Gaussian(noise))
    with pytest.warns(JitterAdded, match="was added to its diagonal"):
        build(1e-18)
    with trying():
        build(1e-18)
    first = iter([1e-18])
    found = tune(lambda noise: build(next(first, noise)), noise=0.1)
    assert float(found.likelihood.noise_var) > 0.01
    with pytest.warns(JitterAdded, match="was added to its diagonal"):
        tune(lambda noise: build(1e-18), noise=1.0)
