"""Priors of parameters: densities by slow and obviously right references, and draws that follow them."""

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import integrate, special, stats
from torch import nn
from torch.func import grad, vmap

import net2gp as n2g
from net2gp import bayes
from net2gp.bayes.model.exponential_integral import log_scaled_exponential_integral
from net2gp.errors import InputError, NotAvailable

GRID = torch.cat([torch.logspace(-6, 1.5, 40), -torch.logspace(-6, 1.5, 40)]).double()
PARAMS = {
    "0.weight": torch.linspace(-1.0, 1.5, 12, dtype=torch.float64).reshape(3, 1, 2, 2),
    "0.bias": torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64),
    "2.weight": torch.tensor([[0.5, -1.0, 2.0]], dtype=torch.float64),
}
FILTERS = bayes.CorrelatedPrior.spatial((2, 2), variance=0.5, lengthscale=2.0)
PRIORS = {
    "normal": bayes.NormalPrior({"*": 1.0, "*bias": 0.3}),
    "laplace": bayes.LaplacePrior({"*": 1.0, "*bias": 0.3}),
    "student_t": bayes.StudentTPrior({"*": 1.0, "*bias": 0.3}, 3.0),
    "horseshoe": bayes.Horseshoe(0.5),
    "horseshoe per layer": bayes.Horseshoe(0.5, per="layer"),
    "gamma": bayes.ScaleMixture(bayes.Gamma(2.0, 1.0)),
    "gamma per layer": bayes.ScaleMixture(bayes.Gamma(2.0, 1.0), "layer", {"*": 2.0, "*bias": 1.0}),
    "inverse gamma per network": bayes.ScaleMixture(bayes.InverseGamma(2.0, 1.0), "network"),
    "exponential per layer": bayes.ScaleMixture(bayes.Exponential(0.5), "layer"),
    "by name": bayes.PriorByName({"*": bayes.LaplacePrior(1.0), "0.weight": FILTERS, "*bias": 0.1}),
}


def test_all_of_them_are_priors():
    assert all(isinstance(prior, bayes.WeightPrior) for prior in PRIORS.values())


def density(mixing, values, per="weight"):
    params = {"weight": torch.as_tensor(values, dtype=torch.float64)}
    return bayes.ScaleMixture(mixing, per).log_prob(params).exp()


def by_quadrature(law, weights):
    """∫ Π N(w_i; 0, v) p(v) dv by scipy, with p the density of the variance."""

    count, squares = len(weights), sum(w**2 for w in weights)

    def integrand(u):
        gaussian = math.exp(-0.5 * squares * math.exp(-u)) * (2 * math.pi) ** (-0.5 * count)
        return gaussian * math.exp((1 - 0.5 * count) * u) * law(math.exp(u))

    edges = [-20, -5, 0, 5, 20, 80]
    parts = pairwise(edges)
    return sum(
        integrate.quad(integrand, a, b, epsabs=0, epsrel=1e-11, limit=400)[0] for a, b in parts
    )


@pytest.mark.parametrize(
    ("mixing", "value"),
    [
        (bayes.InverseGamma(2.5, 2.5), 0.219679797),
        (bayes.Exponential(0.5), 0.183939721),
        (bayes.Gamma(2.0, 1.0), 0.207513113),
    ],
)
def test_mixtures_have_the_known_densities_at_one(mixing, value):
    assert density(mixing, [1.0]).item() == pytest.approx(value, abs=1e-9)
    by_rule = bayes.Mixing.log_marginal(mixing, torch.ones((), dtype=torch.float64), 1).exp()
    assert by_rule.item() == pytest.approx(value, abs=1e-9)


@pytest.mark.parametrize(
    ("mixing", "law"),
    [
        (bayes.InverseGamma(2.5, 2.5), stats.t(5.0)),
        (bayes.InverseGamma(1.5, 0.75), stats.t(3.0, scale=math.sqrt(0.5))),
        (bayes.Exponential(0.5), stats.laplace()),
        (bayes.Exponential(2.0), stats.laplace(scale=0.5)),
    ],
)
def test_mixtures_with_closed_forms_agree_with_scipy_and_with_the_quadrature(mixing, law):
    reference = torch.from_numpy(law.logpdf(GRID.numpy()))
    assert torch.allclose(mixing.log_prob(GRID), reference, rtol=0, atol=1e-12)
    by_rule = bayes.Mixing.log_marginal(mixing, GRID.square(), 1)
    assert torch.allclose(by_rule, reference, rtol=0, atol=1e-8)


@pytest.mark.parametrize("shape", [0.6, 1.0, 2.0, 3.7, 6.0])
def test_the_gamma_mixture_is_the_variance_gamma_law(shape):
    rate, w = 1.3, GRID.abs().numpy()
    z = np.sqrt(2 * rate) * w
    constant = math.log(2) + shape * math.log(rate) - special.gammaln(shape)
    constant -= 0.5 * math.log(2 * math.pi)
    power = (shape - 0.5) * np.log(w / math.sqrt(2 * rate))
    reference = constant + power + np.log(special.kve(shape - 0.5, z)) - z
    found = bayes.Gamma(shape, rate).log_prob(GRID)
    assert torch.allclose(found, torch.from_numpy(reference), rtol=0, atol=1e-8)


def test_the_horseshoe_agrees_with_the_exponential_integral_and_with_the_quadrature():
    z = GRID.square().numpy() / 2
    reference = np.log(special.exp1(z)) + z - 0.5 * math.log(2 * math.pi**3)
    small = torch.from_numpy(z < 500)
    found = bayes.HalfCauchy().log_prob(GRID)
    assert torch.allclose(found[small], torch.from_numpy(reference)[small], rtol=0, atol=1e-12)
    by_rule = bayes.Mixing.log_prob(bayes.HalfCauchy(), GRID)
    assert torch.allclose(found, by_rule, rtol=0, atol=1e-8)


def test_the_exponential_integral_is_accurate_and_smooth_at_the_split():
    z = torch.cat([torch.logspace(-30, 2.5, 100), torch.linspace(2.9, 3.1, 21)]).double()
    reference = np.log(special.exp1(z.numpy())) + z.numpy()
    found = log_scaled_exponential_integral(z)
    assert torch.allclose(found, torch.from_numpy(reference), rtol=1e-13, atol=1e-13)
    (slope,) = torch.autograd.grad(log_scaled_exponential_integral(z.requires_grad_()).sum(), z)
    assert torch.allclose(slope, 1 - (-found).exp() / z.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("mixing", "law"),
    [
        (
            bayes.InverseGamma(2.5, 2.5),
            lambda v: 2.5**2.5 / math.gamma(2.5) * v**-3.5 * math.exp(-2.5 / v),
        ),
        (bayes.Exponential(0.5), lambda v: 0.5 * math.exp(-0.5 * v)),
        (bayes.Gamma(2.0, 1.0), lambda v: v * math.exp(-v)),
        (bayes.HalfCauchy(2.0), lambda v: v**-0.5 / (math.pi * math.sqrt(2.0) * (1 + v / 2.0))),
    ],
)
def test_weights_that_share_a_variance_have_the_integrated_density(mixing, law):
    weights = [0.5, -1.5, 2.0, 0.1]
    found = density(mixing, weights, per="layer").item()
    assert found == pytest.approx(by_quadrature(law, weights), rel=1e-8)


def test_a_shared_variance_of_many_weights_is_found_where_its_mass_is():
    count, square = 300_000, torch.tensor(2.5e5, dtype=torch.float64)
    closed = bayes.InverseGamma(2.0, 1.0)
    by_rule = bayes.Mixing.log_marginal(closed, square, count)
    assert by_rule.item() == pytest.approx(closed.log_marginal(square, count).item(), rel=1e-12)


def test_one_weight_per_layer_is_the_same_as_one_per_weight():
    params = {
        "0.weight": torch.tensor([[0.7]]).double(),
        "1.weight": torch.tensor([[-2.0]]).double(),
    }
    for mixing in (bayes.Gamma(2.0, 1.0), bayes.HalfCauchy(), bayes.Exponential(0.5)):
        single, shared = (bayes.ScaleMixture(mixing, per) for per in ("weight", "layer"))
        assert torch.allclose(single.log_prob(params), shared.log_prob(params), rtol=0, atol=1e-9)


def test_factors_rescale_the_weights():
    params = {n: v / math.sqrt(2.0) for n, v in PARAMS.items()}
    count = sum(value.numel() for value in PARAMS.values())
    for per in ("weight", "layer", "network"):
        plain = bayes.ScaleMixture(bayes.Gamma(2.0, 1.0), per)
        scaled = bayes.ScaleMixture(bayes.Gamma(2.0, 1.0), per, 2.0)
        expected = plain.log_prob(params) - 0.5 * count * math.log(2.0)
        assert torch.allclose(scaled.log_prob(PARAMS), expected, rtol=0, atol=1e-10)


def test_densities_are_those_of_torch_and_scipy():
    flat = torch.cat([value.reshape(-1) for value in PARAMS.values()]).numpy()
    laws = [
        (bayes.NormalPrior(0.7), stats.norm(scale=math.sqrt(0.7))),
        (bayes.LaplacePrior(0.7), stats.laplace(scale=math.sqrt(0.35))),
        (bayes.StudentTPrior(0.7, 3.0), stats.t(3.0, scale=math.sqrt(0.7))),
    ]
    for prior, law in laws:
        assert prior.log_prob(PARAMS).item() == pytest.approx(law.logpdf(flat).sum(), abs=1e-11)


def test_correlated_filters_have_the_multivariate_density():
    covariance = FILTERS.covariance.numpy()
    assert covariance[0, 3] == pytest.approx(0.5 * math.exp(-math.sqrt(2.0) / 2.0))
    rows = PARAMS["0.weight"].reshape(3, 4).numpy()
    expected = stats.multivariate_normal(np.zeros(4), covariance).logpdf(rows).sum()
    found = FILTERS.log_prob({"weight": PARAMS["0.weight"]})
    assert found.item() == pytest.approx(expected, abs=1e-11)


@pytest.mark.parametrize("name", PRIORS)
def test_gradients_under_vmap_equal_a_loop(name):
    prior = PRIORS[name]
    prior.check(PARAMS)
    generator = torch.Generator().manual_seed(0)
    draws = prior.sample(PARAMS, 4, generator)
    together = vmap(grad(prior.log_prob))(draws)
    values = vmap(prior.log_prob)(draws)
    for index in range(4):
        one = {n: v[index].clone().requires_grad_() for n, v in draws.items()}
        value = prior.log_prob(one)
        assert value.dim() == 0
        assert torch.allclose(values[index], value, rtol=1e-13, atol=1e-12)
        found = torch.autograd.grad(value, list(one.values()))
        for key, slope in zip(one, found, strict=True):
            assert torch.allclose(together[key][index], slope, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", PRIORS)
def test_gradients_are_those_of_finite_differences(name):
    flat = torch.cat([value.reshape(-1) for value in PARAMS.values()])

    def log_prob(vector):
        parts = vector.split([v.numel() for v in PARAMS.values()])
        return PRIORS[name].log_prob(
            {n: p.reshape(v.shape) for (n, v), p in zip(PARAMS.items(), parts, strict=True)}
        )

    assert torch.autograd.gradcheck(log_prob, flat.clone().requires_grad_(), atol=1e-5)


def test_densities_of_float32_parameters_are_float32():
    params = {n: v.float() for n, v in PARAMS.items()}
    for prior in PRIORS.values():
        found = prior.log_prob(params)
        assert found.dtype == torch.float32
        assert found.item() == pytest.approx(prior.log_prob(PARAMS).item(), rel=1e-5)
        drawn = prior.sample(params, 2, torch.Generator().manual_seed(0))
        assert {v.dtype for v in drawn.values()} == {torch.float32}


@pytest.mark.parametrize(
    ("prior", "law"),
    [
        (bayes.NormalPrior(2.0), stats.norm(scale=math.sqrt(2.0))),
        (bayes.LaplacePrior(2.0), stats.laplace()),
        (bayes.StudentTPrior(2.0, 3.0), stats.t(3.0, scale=math.sqrt(2.0))),
        (bayes.ScaleMixture(bayes.InverseGamma(1.5, 3.0)), stats.t(3.0, scale=math.sqrt(2.0))),
        (bayes.ScaleMixture(bayes.Exponential(0.5), "weight", 4.0), stats.laplace(scale=2.0)),
        (bayes.ScaleMixture(bayes.Gamma(1.0, 0.5)), stats.laplace()),
    ],
)
def test_draws_follow_their_law(prior, law):
    params = {"weight": torch.zeros(10, 10, dtype=torch.float64)}
    drawn = prior.sample(params, 100, torch.Generator().manual_seed(1))["weight"]
    assert drawn.shape == (100, 10, 10)
    assert stats.kstest(drawn.reshape(-1).numpy(), law.cdf).pvalue > 0.01


def test_draws_of_the_horseshoe_have_its_quantiles():
    """Half-Cauchy scales times Gaussians by numpy, and the density integrated, as two references."""
    params = {"weight": torch.zeros(200, dtype=torch.float64)}
    drawn = bayes.Horseshoe(4.0).sample(params, 200, torch.Generator().manual_seed(0))["weight"]
    other = np.random.default_rng(0)
    scales = 2.0 * np.abs(other.standard_cauchy(40_000))
    reference = scales * other.standard_normal(40_000)
    assert stats.ks_2samp(drawn.reshape(-1).numpy(), reference).pvalue > 0.01
    u = torch.linspace(-30, math.log(1.5), 4001, dtype=torch.float64)
    inside = 2 * torch.trapezoid((bayes.HalfCauchy(4.0).log_prob(u.exp()) + u).exp(), u)
    share = (drawn.abs() < 1.5).double().mean()
    assert abs(share - inside) < 4 * math.sqrt(0.25 / drawn.numel())


@pytest.mark.parametrize(("per", "together"), [("weight", 0), ("layer", 1), ("network", 2)])
def test_weights_are_large_together_within_their_group(per, together):
    """Squares of weights that share a variance are correlated; squares of others are not."""
    params = {n: torch.zeros(1, dtype=torch.float64) for n in ("0.weight", "0.bias", "1.weight")}
    prior = bayes.ScaleMixture(bayes.InverseGamma(4.0, 3.0), per)
    drawn = prior.sample(params, 20_000, torch.Generator().manual_seed(0))
    logs = torch.stack([value[:, 0].square().log() for value in drawn.values()])
    correlation = torch.corrcoef(logs)
    # Var log v = ψ₁(4) = 0.284 and Var log ε² = π²/2
    shared = special.polygamma(1, 4) / (special.polygamma(1, 4) + math.pi**2 / 2)
    for entry, level in ((correlation[0, 1], 1), (correlation[0, 2], 2)):
        expected = shared if together >= level else 0.0
        assert abs(entry - expected) < 4 / math.sqrt(20_000)


def test_draws_of_correlated_filters_have_their_covariance():
    params = {"weight": torch.zeros(50, 2, 3, 3, dtype=torch.float64)}
    prior = bayes.CorrelatedPrior.spatial((3, 3), variance=2.0, lengthscale=1.5)
    drawn = prior.sample(params, 200, torch.Generator().manual_seed(0))["weight"].reshape(-1, 9)
    found = drawn.mT @ drawn / len(drawn)
    assert (found - prior.covariance).abs().max() < 5 * 2.0 * math.sqrt(2 / len(drawn))


def test_a_covariance_may_be_of_whole_filters_with_their_channels():
    prior = bayes.CorrelatedPrior(torch.eye(8) + 0.5)
    weight = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(3, 2, 2, 2)
    expected = stats.multivariate_normal(np.zeros(8), np.eye(8) + 0.5).logpdf(weight.reshape(3, 8))
    found = prior.log_prob({"weight": weight}).item()
    assert found == pytest.approx(expected.sum(), abs=1e-10)


def test_draws_repeat_with_a_generator_and_leave_the_global_state_alone():
    before = torch.get_rng_state()
    for prior in PRIORS.values():
        one, two = (prior.sample(PARAMS, 3, torch.Generator().manual_seed(5)) for _ in range(2))
        assert list(one) == list(PARAMS)
        assert all(torch.equal(one[name], two[name]) for name in PARAMS)
    assert torch.equal(before, torch.get_rng_state())


def test_the_last_matching_prior_counts():
    prior = bayes.PriorByName({"*": 1.0, "0.*": bayes.LaplacePrior(1.0), "0.bias": None})
    expected = bayes.NormalPrior(1.0).log_prob({"2.weight": PARAMS["2.weight"]})
    expected = expected + bayes.LaplacePrior(1.0).log_prob({"0.weight": PARAMS["0.weight"]})
    assert torch.allclose(prior.log_prob(PARAMS), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("priors", "text"),
    [
        ({"0.*": 1.0}, r"priors leaves out 2\.weight\. Add a pattern such as '\*': 1\.0 in front"),
        ({"*": 1.0, "1.*": 2.0}, r"priors has '1\.\*', which matches none of: 0\.weight, 0\.bias"),
        ({"0.*": 1.0, "*": 2.0}, r"priors\['0\.\*'\] decides nothing: '\*' behind it"),
        ({"*": bayes.NormalPrior({"3.*": 1.0})}, r"'3\.\*', which matches none of"),
        ({"*": 0.0}, r"the prior variance of '0\.weight' is zero, which leaves no density"),
        (
            {"*": FILTERS},
            r"a filter has 4 entries by the covariance, but no last axes of '0\.bias'",
        ),
    ],
)
def test_priors_that_do_not_cover_the_parameters_are_refused(priors, text):
    with pytest.raises(InputError, match=text):
        bayes.PriorByName(priors).check(PARAMS)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: bayes.PriorByName({}), "priors must be a dict of priors by name pattern"),
        (lambda: bayes.PriorByName({1: 1.0}), "priors must have name patterns as keys, but has 1"),
        (
            lambda: bayes.PriorByName({"*": "normal"}),
            r"priors\['\*'\] must be a prior of parameters, a variance",
        ),
        (lambda: bayes.ScaleMixture(2.0), "mixing must be the law of a variance"),
        (lambda: bayes.ScaleMixture(bayes.HalfCauchy(), "row"), "per must be 'weight', 'layer' or"),
        (lambda: bayes.Horseshoe(per="row"), "per must be 'weight', 'layer' or 'network'"),
        (lambda: bayes.StudentTPrior(1.0, 0.0), "degrees_of_freedom must be positive"),
        (lambda: bayes.InverseGamma(-1.0, 1.0), "shape must be positive"),
        (lambda: bayes.Gamma(1.0, 0.0), "rate must be positive"),
        (lambda: bayes.Exponential(-1.0), "rate must be positive"),
        (lambda: bayes.HalfCauchy(0.0), "scale_var must be positive"),
        (lambda: bayes.CorrelatedPrior(torch.ones(3)), r"covariance must be a matrix \(K, K\)"),
        (lambda: bayes.CorrelatedPrior(-torch.eye(3)), "covariance must be symmetric and positive"),
        (lambda: bayes.CorrelatedPrior.spatial((3, 0)), "kernel_size must be a positive whole"),
    ],
)
def test_what_is_no_prior_is_refused(make, text):
    with pytest.raises(InputError, match=text):
        make()


def test_a_flat_prior_has_no_draws():
    assert bayes.FlatPrior().log_prob(PARAMS).item() == 0.0
    slopes = vmap(grad(bayes.FlatPrior().log_prob))({n: v[None] for n, v in PARAMS.items()})
    assert all(torch.equal(slopes[n][0], torch.zeros_like(v)) for n, v in PARAMS.items())
    with pytest.raises(NotAvailable, match=r"a flat prior cannot be drawn from, and 0\.weight"):
        bayes.FlatPrior().sample(PARAMS, 1)


def test_variances_by_name_of_a_whole_network_serve_a_part_of_it():
    whole = bayes.NormalPrior({"0.weight": 1.0, "0.bias": 2.0, "2.weight": torch.full((1, 3), 3.0)})
    prior = bayes.PriorByName({"*": whole, "0.*": bayes.LaplacePrior(1.0)})
    prior.check(PARAMS)
    last = {"2.weight": PARAMS["2.weight"]}
    expected = bayes.NormalPrior(3.0).log_prob(last)
    first = {n: v for n, v in PARAMS.items() if n != "2.weight"}
    expected = expected + bayes.LaplacePrior(1.0).log_prob(first)
    assert torch.allclose(prior.log_prob(PARAMS), expected, rtol=0, atol=1e-13)
    assert prior.sample(PARAMS, 2)["2.weight"].shape == (2, 1, 3)
    wrong = bayes.PriorByName({"*": bayes.NormalPrior({"0.*": 1.0}), "0.bias": 1.0})
    with pytest.raises(InputError, match=r"variance leaves out 2\.weight"):
        wrong.check(PARAMS)


def test_variances_of_entries_are_taken_one_by_one():
    entries = {"2.weight": torch.tensor([[0.5, 1.0, 2.0]], dtype=torch.float64)}
    scales, value = entries["2.weight"].sqrt().numpy(), PARAMS["2.weight"]
    laws = [
        (bayes.NormalPrior, stats.norm(scale=scales)),
        (bayes.LaplacePrior, stats.laplace(scale=scales / math.sqrt(2.0))),
        (bayes.StudentTPrior, stats.t(4.0, scale=scales)),
        (bayes.Horseshoe, None),
    ]
    for kind, law in laws:
        prior = kind({"*": 1.0, **entries})
        apart = [
            kind(float(v)).log_prob({"w": w.reshape(1)})
            for v, w in zip(entries["2.weight"][0], value[0], strict=True)
        ]
        rest = {n: v for n, v in PARAMS.items() if n != "2.weight"}
        found = prior.log_prob(PARAMS) - kind(1.0).log_prob(rest)
        assert found.item() == pytest.approx(sum(apart).item(), abs=1e-10)
        if law is not None:
            assert found.item() == pytest.approx(law.logpdf(value.numpy()).sum(), abs=1e-10)


@dataclass(frozen=True)
class OneOrFour(bayes.Mixing):
    """v is near 1 or near 4: log v is a mixture of two narrow Gaussians."""

    def log_density(self, log_variance):
        parts = [
            torch.distributions.Normal(m, 0.05, validate_args=False).log_prob(log_variance)
            for m in (0.0, math.log(4.0))
        ]
        return torch.logaddexp(*parts) - math.log(2.0)

    def sample(self, shape, generator=None, device="cpu"):
        picks = torch.randint(2, shape, generator=generator)
        return 4.0 ** picks.double()


def test_a_law_of_your_own_can_mix():
    found = density(OneOrFour(), [0.7]).item()
    expected = 0.5 * (stats.norm.pdf(0.7) + stats.norm.pdf(0.7, scale=2.0))
    assert found == pytest.approx(expected, rel=2e-3)


def test_the_fan_in_prior_gives_functions_with_the_covariance_of_the_nngp():
    """With one hidden layer the second moment of f is the NNGP's at every width."""
    network = nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 1)).double().eval()
    prior = bayes.NormalPrior.by_fan_in(network, {"0": 1.5, "*": 2.0}, 0.3)
    expected_variances = {"0.weight": 0.75, "0.bias": 0.3, "2.weight": 0.4, "2.bias": 0.3}
    assert prior.variance == pytest.approx(expected_variances)
    x = torch.tensor([[1.0, 0.0], [0.5, -1.0], [-2.0, 1.0]], dtype=torch.float64)
    kernel = n2g.nngp(network, weight_var={"0": 1.5, "*": 2.0}, bias_var=0.3)(x)
    generator = torch.Generator().manual_seed(0)
    f = bayes.prior_functions(network, prior, 20_000, generator=generator)(x)[:, :, 0]
    products = f[:, :, None] * f[:, None, :]
    error = products.std(0) / math.sqrt(len(f))
    assert ((products.mean(0) - kernel).abs() < 4 * error).all()


def test_fan_ins_are_those_of_the_layers():
    network = nn.Sequential(
        nn.Conv2d(4, 6, 3, groups=2), nn.ConvTranspose2d(6, 2, 2, bias=False), nn.Embedding(7, 3)
    )
    found = bayes.fan_in_variances(network, 1.0, 0.5)
    assert found == pytest.approx(
        {"0.weight": 1 / 18, "0.bias": 0.5, "1.weight": 1 / 24, "2.weight": 1.0}
    )


def test_parameters_without_a_fan_in_are_refused():
    network = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    with pytest.raises(InputError, match=r"'1\.weight' belongs to a norm layer"):
        bayes.NormalPrior.by_fan_in(network)
    chosen = n2g.linearize(network, only="0.*")
    assert set(bayes.NormalPrior.by_fan_in(chosen).variance) == {"0.weight", "0.bias"}
    with pytest.raises(InputError, match="fan-ins are read from the layers of a network"):
        bayes.NormalPrior.by_fan_in(2.0, 0.1)


def test_drawn_functions_are_the_network_at_drawn_weights():
    network = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 2)).double().eval()
    functions = bayes.prior_functions(
        network, bayes.Horseshoe(), 3, generator=torch.Generator().manual_seed(0)
    )
    x = torch.linspace(-1, 1, 5, dtype=torch.float64)[:, None]
    values = functions(x)
    assert values.shape == (3, 5, 2)
    assert torch.equal(values, functions(x))
    for index in range(3):
        own = {name: value[index] for name, value in functions.members.values.items()}
        assert torch.allclose(values[index], torch.func.functional_call(network, own, (x,)))


def outputs_at_one(width, last, count=4000):
    """Draws of f(1) of a network with one hidden layer, and E|h| and E h² of its units."""
    network = nn.Sequential(nn.Linear(1, width, bias=False), nn.Tanh(), nn.Linear(width, 1, False))
    prior = bayes.PriorByName({"*": 1.0, "2.weight": last})
    functions = bayes.prior_functions(
        network.double().eval(), prior, count, generator=torch.Generator().manual_seed(0)
    )
    f = functions(torch.ones(1, 1, dtype=torch.float64)).reshape(-1).numpy()
    nodes = stats.norm.ppf((np.arange(20_000) + 0.5) / 20_000)
    return f, np.abs(np.tanh(nodes)).mean(), np.square(np.tanh(nodes)).mean()


def test_wide_networks_are_gaussian_only_if_variances_are_finite_and_independent():
    """Gaussian weights give a Gaussian, Cauchy's a Cauchy law, and a shared scale Student's, at any width."""
    width = 200
    f, mean, square = outputs_at_one(width, bayes.NormalPrior(1.0 / width))
    assert stats.kstest(f, stats.norm(scale=math.sqrt(square)).cdf).pvalue > 0.01
    f, mean, square = outputs_at_one(width, bayes.StudentTPrior(1.0 / width**2, 1.0))
    assert stats.kstest(f, stats.cauchy(scale=mean).cdf).pvalue > 0.01
    for width in (50, 200):
        last = bayes.ScaleMixture(bayes.InverseGamma(2.0, 2.0), "layer", 1.0 / width)
        f, mean, square = outputs_at_one(width, last)
        assert stats.kstest(f, stats.t(4.0, scale=math.sqrt(square)).cdf).pvalue > 0.01
        assert stats.kstest(f / f.std(), stats.norm().cdf).pvalue < 1e-6
    # independent variances of the same law average out
    last = bayes.ScaleMixture(bayes.InverseGamma(3.0, 2.0), "weight", 1.0 / width)
    f, mean, square = outputs_at_one(width, last)
    assert stats.kstest(f, stats.norm(scale=math.sqrt(square)).cdf).pvalue > 0.01


def test_a_posterior_with_any_prior_can_be_saved(tmp_path):
    from net2gp.posteriors.recipes.drawn import drawn_posterior
    from net2gp.posteriors.recipes.members import Members

    network = nn.Sequential(nn.Conv2d(1, 3, 2), nn.Flatten(), nn.Linear(3, 1, bias=False))
    network = network.double().eval()
    linearized = n2g.linearize(network)
    x = torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(2, 1, 2, 2)
    for index, prior in enumerate(PRIORS.values()):
        values = bayes.prior_functions(linearized, prior, 3).members.values
        members = Members(linearized, values)
        data = (x, torch.zeros(2, 1, dtype=torch.float64))
        posterior = drawn_posterior(members, n2g.Gaussian(0.1), data, prior=prior)
        posterior.save(tmp_path / f"{index}.safetensors")
        loaded = n2g.load(tmp_path / f"{index}.safetensors", network)
        again = loaded.process.prior
        assert type(again) is type(prior)
        assert torch.equal(again.log_prob(linearized.params), prior.log_prob(linearized.params))


@pytest.mark.parametrize("given", [None, "gaussian", n2g.Gaussian])
@pytest.mark.parametrize(
    "name",
    ["map_estimate", "ensemble", "multi_swag", "mean_field", "mc_dropout", "nuts", "sgld"],
)
def test_what_is_no_likelihood_is_refused(name, given):
    x = torch.ones(2, 1)
    network = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5)).eval()
    with pytest.raises(InputError, match="likelihood must be"):
        getattr(bayes, name)(network, (x, x), given)


@pytest.mark.parametrize(
    "name",
    ["map_estimate", "ensemble", "mean_field", "nuts", "hmc", "sgld", "sghmc", "microcanonical"],
)
def test_a_module_that_is_used_twice_keeps_its_parameters(name):
    x, layer = torch.linspace(-1, 1, 6)[:, None], nn.Linear(3, 3)
    network = nn.Sequential(nn.Linear(1, 3), layer, nn.Tanh(), layer, nn.Linear(3, 1)).eval()
    before = {n: v.clone() for n, v in network.state_dict().items()}
    options = {"map_estimate": {}, "ensemble": {}, "mean_field": {"num_steps": 2}}
    chain = {"num_draws": 2, "warmup": 0, "num_chains": 2, "step_size": 0.05}
    options["microcanonical"] = {**chain, "length": 1.0}
    if name in ("map_estimate", "ensemble"):
        options[name] = {"training": bayes.Training(num_steps=2)}
    getattr(bayes, name)(network, (x, x), n2g.Gaussian(1.0), **options.get(name, chain))
    assert isinstance(layer.weight, nn.Parameter)
    assert len(list(network.parameters())) == 6
    for n, value in network.state_dict().items():
        assert torch.equal(value, before[n])


def test_shared_modules_and_shared_parameters_take_one_new_value():
    network = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    network[1].weight = network[0].weight
    model = bayes.Model.of(network.append(network[0]), n2g.Gaussian(1.0))
    x = torch.ones(1, 1)
    assert float(model.outputs({"0.weight": 3 * x}, x)) == 27.0
    assert isinstance(network[2].weight, nn.Parameter)
    assert network[1].weight is network[0].weight
