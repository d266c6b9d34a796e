"""Sums, averages, products and compositions of the posteriors of two networks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, Normal

import net2gp as n2g
from net2gp.bayes import (
    average,
    compose,
    draw_composition,
    product_of_experts,
    weighted_sum,
)
from net2gp.errors import InputError, NotAvailable
from net2gp.likelihoods.laws import gaussian_law
from posteriors.ways import network, points, real_targets, seeded, unseen_points

DOUBLE = torch.float64


def around(seed: int, outputs: int = 2, noise_var: float = 0.1, **options: Any) -> n2g.Posterior:
    """Laplace's approximation around a network with weights of its own."""
    x = points(seed=seed)
    net = network(outputs, seed=seed, **options)
    variance = torch.linspace(0.05, 0.5, sum(p.numel() for p in net.parameters()), dtype=DOUBLE)
    data = (x, net(x).detach())
    return n2g.training.from_variances(net, variance, data, n2g.Gaussian(noise_var))


def conditioned(seed: int, outputs: int = 2, **options: Any) -> n2g.Posterior:
    """A Gaussian process on the tangent kernel of a network of its own."""
    linearized = n2g.linearize(network(outputs, seed=seed, **options))
    x = points(seed=seed)
    data = (x, real_targets(x, outputs))
    return n2g.condition(linearized.kernel(0.7), data, n2g.Gaussian(0.1), mean=linearized)


def without_features(seed: int, outputs: int = 2) -> n2g.Posterior:
    """A Gaussian process of independent outputs, whose kernel has no features."""
    x = points(seed=seed)
    return n2g.condition(n2g.RBF(), (x, real_targets(x, outputs)), n2g.Gaussian(0.1))


PAIRS: dict[str, Callable[[], list[n2g.Posterior]]] = {
    "laplace": lambda: [around(1), around(2, hidden=7)],
    "conditioned": lambda: [conditioned(1), conditioned(2, hidden=7)],
    "both": lambda: [around(1), conditioned(2)],
    "without features": lambda: [without_features(1), conditioned(2), around(3)],
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_sum_has_the_summed_means_and_covariances(name) -> None:
    terms, x = PAIRS[name](), unseen_points()
    weights = [0.5, -2.0, 1.5][: len(terms)]
    found = weighted_sum(terms, weights)
    laws = [term.joint(x) for term in terms]
    mean = sum(w * law.mean for w, law in zip(weights, laws, strict=True))
    covariance = sum(w**2 * law.covariance_matrix for w, law in zip(weights, laws, strict=True))
    torch.testing.assert_close(found.joint(x).mean, mean)
    torch.testing.assert_close(found.joint(x).covariance_matrix, covariance)


@pytest.mark.parametrize("name", PAIRS)
def test_all_answers_of_a_sum_are_of_one_law(name) -> None:
    found, x = weighted_sum(PAIRS[name]()), unseen_points()
    joint, marginal = found.joint(x), found.marginal(x)
    torch.testing.assert_close(found.mean(x), marginal.mean)
    torch.testing.assert_close(joint.mean.reshape(-1, 2), marginal.mean)
    blocks = joint.covariance_matrix.reshape(len(x), 2, len(x), 2).diagonal(dim1=0, dim2=2)
    torch.testing.assert_close(blocks.movedim(-1, 0), marginal.covariance_matrix)
    torch.testing.assert_close(found.process.diagonal(x)[1], marginal.variance)
    prior = found.kernel.diag(x).reshape(len(x), -1).expand(-1, 2)
    torch.testing.assert_close(found.process.prior_variances(x), prior)
    novelty = found.novelty(x)
    assert bool(((novelty > 0) & (novelty <= 1)).all())
    predicted = found.predict(x)
    torch.testing.assert_close(predicted.variance, marginal.variance + 0.1)


def test_draws_of_a_sum_are_sums_of_draws() -> None:
    terms, x = PAIRS["both"](), unseen_points()
    found = weighted_sum(terms, [1.0, -0.5])
    draws = found.sample_functions(4000, generator=seeded(0))(x).flatten(1)
    law = found.joint(x)
    error = (law.variance / 4000).sqrt()
    assert bool(((draws.mean(0) - law.mean).abs() < 5 * error).all())
    torch.testing.assert_close(draws.var(0), law.variance, rtol=0.15, atol=0)
    assert found.sample(x, 3).shape == (3, len(x), 2)


def test_the_sum_of_conditioned_priors_is_no_longer_the_posterior_of_the_sum() -> None:
    # Data about f and about g say more than data about f + g.
    first, second, x = without_features(1), without_features(2), unseen_points()
    both = weighted_sum([first, second])
    x1, y1 = first.data
    together = n2g.condition(n2g.RBF() + n2g.RBF(), (x1, 2 * y1), n2g.Gaussian(0.2))
    assert not torch.allclose(both.marginal(x).variance, together.marginal(x).variance, rtol=0.1)


def test_an_average_of_one_is_itself_and_of_two_halves_what_chance_adds() -> None:
    one, x = conditioned(1), unseen_points()
    for a, b in ((average([one]), one), (weighted_sum([one, one], [0.3, 0.7]), one)):
        torch.testing.assert_close(a.mean(x), b.mean(x))
    torch.testing.assert_close(average([one]).marginal(x).variance, one.marginal(x).variance)
    other = conditioned(2)
    both = average([one, other]).marginal(x)
    torch.testing.assert_close(both.mean, (one.mean(x) + other.mean(x)) / 2)
    variance = (one.marginal(x).variance + other.marginal(x).variance) / 4
    torch.testing.assert_close(both.variance, variance)


def test_sums_are_associative_and_follow_inputs() -> None:
    a, b, c = around(1), conditioned(2), without_features(3)
    x = unseen_points().requires_grad_()
    left, right = weighted_sum([weighted_sum([a, b]), c]), weighted_sum([a, weighted_sum([b, c])])
    torch.testing.assert_close(left.joint(x).covariance_matrix, right.joint(x).covariance_matrix)
    gradient = lambda p: torch.autograd.grad(p.marginal(x).variance.sum() + p.mean(x).sum(), x)[0]
    expected = sum(gradient(part) for part in (a, b, c))
    torch.testing.assert_close(gradient(left), expected)


def test_a_sum_moves_to_float32_and_says_what_it_lacks() -> None:
    found, x = weighted_sum(PAIRS["both"]()), unseen_points()
    assert found.to(dtype=torch.float32).mean(x.float()).dtype == torch.float32
    assert "members=2" in repr(found)
    with pytest.raises(NotAvailable, match=r"Update that one, and combine them again"):
        found.update((x, x))
    with pytest.raises(NotAvailable, match=r"is made of others has no evidence"):
        found.log_marginal_likelihood()
    with pytest.raises(NotAvailable, match=r"dual is of one network"):
        found.dual()
    with pytest.raises(NotAvailable, match=r"or temper the others, and combine them"):
        found.tempered(2.0)
    with pytest.raises(InputError, match=r"cannot be saved"):
        found.save("sum.safetensors")


def test_sums_that_have_no_meaning_are_refused() -> None:
    one = conditioned(1)
    mixed = n2g.bayes.mixture([one, one])
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: weighted_sum([]), r"a sum is of one or more posteriors, but got"),
        (lambda: average([]), r"a sum is of one or more posteriors"),
        (lambda: weighted_sum(one), r"a sum is of one or more posteriors"),
        (lambda: weighted_sum([one, 3]), r"a sum is of one or more posteriors"),
        (lambda: weighted_sum([one, one], [1.0]), r"one number for each of the 2 posteriors"),
        (lambda: weighted_sum([one, one], "ab"), r"one number for each of the 2 posteriors"),
        (lambda: weighted_sum([one, one], [1.0, 0.0]), r"weights must not be zero"),
        (lambda: weighted_sum([one, one], [1.0, float("nan")]), r"weights must be finite"),
        (lambda: weighted_sum([one, conditioned(2, 1)]), r"has 1 outputs and posterior 0 has 2"),
        (lambda: weighted_sum([one, mixed]), r"posterior 1 is not Gaussian"),
        (lambda: weighted_sum([one, around(2, noise_var=0.1001)]), r"unlike likelihoods"),
        (lambda: weighted_sum([one], likelihood=0.1), r"likelihood must be"),  # type: ignore[arg-type]
        (lambda: average([one], likelihood=n2g.Gaussian), r"likelihood is the class Gaussian"),  # type: ignore[arg-type]
    ]
    for call, message in cases:
        with pytest.raises(InputError, match=message):
            call()
    chosen = weighted_sum([one, around(2, noise_var=0.3)], likelihood=n2g.Gaussian(0.5))
    assert chosen.likelihood.noise_var == 0.5


def covariance(seed: int, count: int = 4, size: int = 3) -> Tensor:
    root = torch.randn(count, size, size + 2, generator=seeded(seed), dtype=DOUBLE)
    return root @ root.mT / size


@pytest.mark.parametrize("weights", [None, [0.5, 2.0, 1.0]])
def test_the_product_of_gaussian_experts_adds_precisions(weights) -> None:
    means = [torch.randn(4, 3, generator=seeded(10 + n), dtype=DOUBLE) for n in range(3)]
    covariances = [covariance(n) for n in range(3)]
    laws = [gaussian_law(m, c) for m, c in zip(means, covariances, strict=True)]
    found = product_of_experts(laws, weights)
    powers = weights or [1.0] * 3
    precisions = [w * c.inverse() for w, c in zip(powers, covariances, strict=True)]
    expected = sum(precisions).inverse()
    pulled = sum(p @ m[..., None] for p, m in zip(precisions, means, strict=True))
    torch.testing.assert_close(found.covariance_matrix, expected)
    torch.testing.assert_close(found.mean, (expected @ pulled)[..., 0])


def test_the_product_of_laws_is_their_normalized_product() -> None:
    probs = [torch.softmax(torch.randn(5, 4, generator=seeded(n)), 1) for n in range(2)]
    found = product_of_experts([Categorical(p) for p in probs], [1.0, 0.5])
    expected = probs[0] * probs[1].sqrt()
    torch.testing.assert_close(found.probs, expected / expected.sum(1, keepdim=True))
    chances = [torch.tensor([[0.2], [0.7]]), torch.tensor([[0.6], [0.9]])]
    found = product_of_experts([Bernoulli(c) for c in chances])
    yes, no = chances[0] * chances[1], (1 - chances[0]) * (1 - chances[1])
    torch.testing.assert_close(found.probs, yes / (yes + no))


def test_a_certain_expert_decides_and_two_that_disagree_are_refused() -> None:
    sure = gaussian_law(torch.ones(2, 1, dtype=DOUBLE), torch.zeros(2, 1, 1, dtype=DOUBLE))
    unsure = gaussian_law(torch.zeros(2, 1, dtype=DOUBLE), torch.ones(2, 1, 1, dtype=DOUBLE))
    for order in ([sure, unsure], [unsure, sure]):
        found = product_of_experts(order)
        torch.testing.assert_close(found.mean, sure.mean)
        torch.testing.assert_close(found.variance, torch.zeros(2, 1, dtype=DOUBLE))
    with pytest.raises(InputError, match=r"no variance in the same direction"):
        product_of_experts([sure, sure])
    classes = [Categorical(torch.ones(2, count)) for count in (2, 3)]
    for laws in ([], [Normal(0.0, 1.0)], [sure, classes[0]], classes):
        with pytest.raises(InputError, match=r"a product is of Gaussians, of laws of classes or"):
            product_of_experts(laws)
    with pytest.raises(InputError, match=r"weights must be positive"):
        product_of_experts([sure, unsure], [1.0, -1.0])
    with pytest.raises(InputError, match=r"and 1 weights"):
        product_of_experts([sure, unsure], [1.0])


def affine(seed: int, inputs: int, outputs: int) -> n2g.Posterior:
    """A linear map with certainty but for its bias: composition to first order is then exact."""
    net = nn.Linear(inputs, outputs).to(DOUBLE).eval()
    with torch.no_grad():
        net.weight.copy_(torch.randn(outputs, inputs, generator=seeded(seed), dtype=DOUBLE))
    x = torch.randn(6, inputs, generator=seeded(seed + 1), dtype=DOUBLE)
    variance = torch.cat([torch.full((inputs * outputs,), 1e-14), torch.full((outputs,), 0.3)])
    data = (x, net(x).detach())
    return n2g.training.from_variances(net, variance.double(), data, n2g.Gaussian(0.1))


def test_the_composition_with_a_certain_linear_map_is_exact() -> None:
    outer, inner, x = affine(0, 2, 3), conditioned(1), unseen_points()
    A, bias = outer.linearized.network.weight, outer.linearized.network.bias
    found, g = compose(outer, inner), inner.joint(x)
    mean = inner.mean(x) @ A.T + bias
    wide = torch.kron(torch.eye(len(x), dtype=DOUBLE), A)
    everywhere = torch.ones(len(x), len(x), dtype=DOUBLE)
    shift = torch.kron(everywhere, 0.3 * torch.eye(3, dtype=DOUBLE))
    covariance = wide @ g.covariance_matrix @ wide.T + shift
    torch.testing.assert_close(found.mean(x), mean)
    torch.testing.assert_close(found.joint(x).covariance_matrix, covariance, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("inner", [around, conditioned, without_features])
def test_all_answers_of_a_composition_are_of_one_law(inner) -> None:
    found, x = compose(conditioned(3, 3), inner(1)), unseen_points()
    joint, marginal = found.joint(x), found.marginal(x)
    torch.testing.assert_close(found.mean(x), marginal.mean)
    torch.testing.assert_close(joint.mean.reshape(-1, 3), marginal.mean)
    blocks = joint.covariance_matrix.reshape(len(x), 3, len(x), 3).diagonal(dim1=0, dim2=2)
    torch.testing.assert_close(blocks.movedim(-1, 0), marginal.covariance_matrix)
    K = found.kernel(x)
    torch.testing.assert_close(K, K.mT)
    torch.testing.assert_close(K, found.kernel(x, x.clone()))
    torch.testing.assert_close(K.diagonal(), found.kernel.diag(x))
    assert float(torch.linalg.eigvalsh(K).min()) > -1e-8 * float(K.diagonal().max())
    novelty = found.novelty(x)
    assert bool(((novelty > 0) & (novelty <= 1)).all())


def test_a_composition_is_the_law_of_drawn_functions_where_they_are_nearly_linear() -> None:
    # Functions that deviate little from their means: the second order is below the Monte Carlo error.
    x, count = unseen_points()[:4], 10000
    outer, inner = small(conditioned(3, 1)), small(conditioned(1))
    found = compose(outer, inner).joint(x)
    f, g = (
        part.sample_functions(count, generator=seeded(n)) for n, part in enumerate((outer, inner))
    )
    inside = g(x)  # (S, N, 2)
    weights, kernel = f.weights, f.kernel
    picked = range(0, count, 20)
    exact = torch.stack(
        [
            f.mean(h) + kernel.apply(h, weights[:, [s]])
            for s, h in zip(picked, inside[::20], strict=True)
        ]
    ).flatten(1)
    covariance = torch.cov(exact.T.detach())
    error = (found.variance / len(exact)).sqrt()
    assert bool(((exact.mean(0) - found.mean).abs() < 5 * error + 1e-4).all())
    scale = torch.outer(found.stddev, found.stddev)
    assert float(((covariance - found.covariance_matrix) / scale).abs().max()) < 0.16


def small(posterior: n2g.Posterior) -> n2g.Posterior:
    """The posterior given its data with little noise, so that its functions hardly differ."""
    x, y = posterior.data
    kernel, mean = posterior.kernel.scaled(1e-3), posterior.process.prior_mean
    return n2g.condition(kernel, (x, y), n2g.Gaussian(0.1), mean=mean)


def test_exact_draws_of_a_composition_have_its_moments_to_second_order() -> None:
    x = unseen_points()[:3]
    outer, inner = small(conditioned(3, 1)), small(without_features(1))
    draws = draw_composition(outer, inner, x, 600, generator=seeded(0)).flatten(1)
    law = compose(outer, inner).joint(x)
    error = (law.variance / 600).sqrt()
    assert bool(((draws.mean(0) - law.mean).abs() < 5 * error + 1e-3).all())
    torch.testing.assert_close(draws.var(0), law.variance, rtol=0.2, atol=0)


def test_draws_of_the_composition_to_first_order_have_its_law() -> None:
    found, x = compose(conditioned(3, 1), conditioned(1)), unseen_points()
    draws = found.sample_functions(4000, generator=seeded(0))(x).flatten(1)
    law = found.joint(x)
    assert bool(((draws.mean(0) - law.mean).abs() < 5 * (law.variance / 4000).sqrt()).all())
    torch.testing.assert_close(draws.var(0), law.variance, rtol=0.15, atol=0)


def test_a_composition_follows_inputs() -> None:
    found, x = compose(conditioned(3, 1), conditioned(1)), unseen_points()[:2].requires_grad_()
    assert torch.autograd.gradcheck(lambda x: found.mean(x).sum(), x)
    assert torch.autograd.gradcheck(lambda x: found.marginal(x).variance.sum(), x, rtol=1e-3)


def test_a_composition_is_the_same_in_inference_mode() -> None:
    found, x = compose(conditioned(3, 1), conditioned(1)), unseen_points()
    expected = found.joint(x).covariance_matrix
    with torch.inference_mode():
        torch.testing.assert_close(found.joint(x).covariance_matrix, expected)


def test_compositions_that_do_not_fit_are_refused() -> None:
    one = conditioned(1)
    with pytest.raises(InputError, match=r"takes points of shape \(2,\), but the inner one has 3"):
        compose(one, conditioned(1, 3))
    with pytest.raises(
        InputError, match=r"takes torch\.float32, .* outer\.to\(dtype=torch\.float64\)"
    ):
        compose(one.to(dtype=torch.float32), one)
    with pytest.raises(InputError, match=r"inner must be a posterior, but is"):
        compose(one, network())
    with pytest.raises(InputError, match=r"the outer posterior is not Gaussian"):
        draw_composition(n2g.bayes.mixture([one, one]), one, unseen_points(), 2)
    with pytest.raises(InputError, match=r"num_samples"):
        draw_composition(one, one, unseen_points(), 0)
