"""New classes from a few labeled points: the standardized kernel, and regression of codes."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

import net2gp as n2g
from net2gp.errors import InputError
from net2gp.methods.few_shot import CAUTION, NOISE_SHARE, SPREAD
from net2gp.posteriors import Posterior
from net2gp.types import Kernel
from posteriors.ways import network, points, seeded

DOUBLE = torch.float64


def assert_close(a: Tensor, b: Tensor, tol: float = 1e-9) -> None:
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def task(shots: int = 4, classes: int = 3, apart: float = 1.5) -> tuple[Tensor, Tensor]:
    """Clusters in the plane, as many points of each."""
    y = torch.arange(classes).repeat(shots)
    angle = 2 * math.pi * y / classes
    noise = torch.randn(len(y), 2, generator=seeded(7), dtype=DOUBLE)
    return apart * torch.stack([angle.cos(), angle.sin()], 1) + noise, y


def correlations(a: Tensor, b: Tensor, at: Tensor) -> Tensor:
    """By features: those of the averaged tangent kernel, less their mean, at length one."""
    linearized = n2g.linearize(network(4))

    def features(x: Tensor) -> Tensor:
        centered = linearized.jacobian(x).flatten(1) - linearized.jacobian(at).flatten(1).mean(0)
        return centered / centered.norm(dim=1, keepdim=True)

    return features(a) @ features(b).T


def standardized(at: Tensor) -> n2g.posteriors.Standardized:
    return n2g.posteriors.Standardized.of(n2g.linearize(network(4)).trace_kernel(), at)


def test_the_standardized_kernel_is_the_cosine_of_centered_features():
    X, z, w = points(6), points(4, seed=2), points(3, seed=3)
    kernel = standardized(X)
    for a, b in ((X, X), (X, z), (z, X), (z, w), (z, z.clone())):
        assert_close(kernel(a, b), correlations(a, b, X))
    assert_close(kernel(z), correlations(z, z, X))
    assert_close(kernel(X), correlations(X, X, X))


def test_the_standardized_kernel_is_a_kernel():
    X, z = points(6), points(9, seed=2)
    kernel = standardized(X).scaled(0.7)
    assert isinstance(kernel, Kernel)
    assert kernel.outputs(z) is None
    assert_close(kernel(z), kernel(z).T, tol=1e-15)
    assert float(torch.linalg.eigvalsh(kernel(z)).min()) > -1e-12
    assert_close(kernel.diag(z), kernel(z).diagonal())
    assert_close(kernel.blocks(z)[:, 0, 0], kernel(z).diagonal())
    v = torch.randn(6, 2, generator=seeded(0), dtype=DOUBLE)
    assert_close(kernel.matmul(z, X, v), kernel(z, X) @ v)


def test_the_standardized_kernel_forgets_constants_and_scales():
    X, z = points(6), points(4, seed=2)
    flat = n2g.linearize(network(4))
    weights = {"0.*": 1.0, "2.weight": 1.0, "2.bias": 0.0}
    more = {"0.*": 3.0, "2.weight": 3.0, "2.bias": 50.0}  # a last bias is the same at all points
    one, other = (n2g.posteriors.Standardized.of(flat.trace_kernel(p), X) for p in (weights, more))
    assert_close(one(X, z), other(X, z))


def test_the_standardized_kernel_moves_and_rounds_like_others():
    X, z = points(6), points(4, seed=2)
    kernel = standardized(X)
    single = kernel.to(dtype=torch.float32)
    assert single(z.float()).dtype == single.diag(z.float()).dtype == torch.float32
    assert single.precise()(z.float()).dtype == DOUBLE
    assert_close(single.precise()(z.float(), X.float()), kernel(z, X), tol=1e-5)


def test_a_point_at_the_mean_is_correlated_with_none():
    linear = torch.nn.Linear(1, 1).double().eval()
    X = torch.tensor([[-1.0], [1.0]], dtype=DOUBLE)
    kernel = n2g.posteriors.Standardized.of(n2g.linearize(linear).trace_kernel(), X)
    assert_close(kernel(X, torch.zeros(1, 1, dtype=DOUBLE)), torch.zeros(2, 1, dtype=DOUBLE))


def test_it_is_a_posterior_of_classes_that_the_network_has_no_outputs_for():
    x, y = task(classes=5)
    posterior = n2g.adapt_classes(network(3), (x, y))
    assert isinstance(posterior, Posterior)
    probs = posterior.predict(points(8)).probs
    assert probs.shape == (8, 5)
    assert_close(probs.sum(1), torch.ones(8, dtype=DOUBLE))
    assert posterior.sample(points(8), 2, generator=seeded(0)).shape == (2, 8, 5)
    assert posterior.joint(points(8)).mean.shape == (40,)


def test_the_codes_are_regressed_by_the_formula():
    x, y = task()
    z = points(5)
    posterior = n2g.adapt_classes(network(4), (x, y))
    kernel, noise = posterior.process.kernel, posterior.likelihood.noise_var
    A = kernel(x) + noise * torch.eye(len(x), dtype=DOUBLE)
    codes = one_hot(y, 3).to(DOUBLE) - 1 / 3
    law = posterior.marginal(z)
    assert_close(law.mean, kernel(z, x) @ torch.linalg.solve(A, codes))
    explained = kernel(z, x) @ torch.linalg.solve(A, kernel(x, z))
    variance = (kernel(z) - explained).diagonal()
    assert_close(law.variance, variance[:, None].expand(-1, 3))
    logits = law.mean / (posterior.likelihood.temperature * (variance + noise)[:, None])
    doubt = 1 / (len(x) + 2)
    assert_close(posterior.predict(z).probs, (1 - doubt) * logits.softmax(1) + doubt / 3)


def test_few_labels_leave_some_doubt_where_they_can_be_fitted():
    """Between two groups on a line codes are fitted exactly, and say nothing of how sharp the border is."""
    x = torch.tensor([-1.2, -1.0, -0.8, 0.8, 1.0, 1.2], dtype=DOUBLE)[:, None]
    y = (x[:, 0] > 0).long()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 2)).double().eval()
    probs = (
        n2g.adapt_classes(module, (x, y)).predict(torch.linspace(-3, 3, 61).double()[:, None]).probs
    )
    assert float(probs.min()) >= 0.5 / (len(x) + 2) - 1e-12


def test_the_evidence_is_the_density_of_the_codes_where_they_differ():
    x, y = task()
    posterior = n2g.adapt_classes(network(4), (x, y))
    A = posterior.process.kernel(x) + posterior.likelihood.noise_var * torch.eye(
        len(x), dtype=DOUBLE
    )
    # the whole density of C columns, of which one direction is always zero
    law = torch.distributions.MultivariateNormal(torch.zeros(len(x), dtype=DOUBLE), A)
    codes = one_hot(y, 3).to(DOUBLE) - 1 / 3
    whole = law.log_prob(codes.T).sum() - law.log_prob(torch.zeros_like(codes[:, 0]))
    assert_close(posterior.log_marginal_likelihood(), whole)


def test_no_nearby_noise_or_scale_has_more_evidence_and_prior():
    x, y = task(apart=0.8)
    posterior = n2g.adapt_classes(network(4), (x, y))
    K = posterior.process.kernel(x)
    scale, noise = float(K[0, 0]), posterior.likelihood.noise_var
    codes = one_hot(y, 3).to(DOUBLE) - 1 / 3

    def objective(scale: float, noise: float, share: Tensor) -> float:
        A = scale * share + noise * torch.eye(len(x), dtype=DOUBLE)
        law = torch.distributions.MultivariateNormal(torch.zeros(len(x), dtype=DOUBLE), A)
        zero = law.log_prob(torch.zeros_like(codes[:, 0]))
        surprise = [math.log(3 * noise / NOISE_SHARE), math.log(3 * scale)]
        prior = -0.5 * sum((s / SPREAD) ** 2 for s in surprise)
        return float(law.log_prob(codes.T).sum() - zero) + prior

    best = objective(scale, noise, K / scale)
    for a, b in ((1.1, 1.0), (0.9, 1.0), (1.0, 1.1), (1.0, 0.9), (1.1, 0.9), (0.9, 1.1)):
        assert objective(a * scale, b * noise, K / scale) < best + 1e-6


def test_the_temperature_is_that_of_labels_left_out_one_by_one():
    x, y = task(shots=4, apart=0.5)
    posterior = n2g.adapt_classes(network(4), (x, y))
    kernel, likelihood = posterior.process.kernel, n2g.Gaussian(posterior.likelihood.noise_var)
    codes = one_hot(y, 3).to(DOUBLE) - 1 / 3
    logits = []
    for n in range(len(y)):
        others = torch.arange(len(y)) != n
        left = n2g.condition(kernel, (x[others], codes[others]), likelihood).marginal(x[n : n + 1])
        logits.append(left.mean / (left.variance + posterior.likelihood.noise_var))
    tried = torch.linspace(0, 4, 4001, dtype=DOUBLE)
    tempered = (torch.cat(logits) / tried.exp()[:, None, None]).log_softmax(-1)
    fits = tempered[:, torch.arange(len(y)), y].sum(1) - 0.5 * (tried / CAUTION) ** 2
    best = float(tried[fits.argmax()])
    assert best > 0.02  # the clusters overlap, so that it is not at its least
    assert math.log(posterior.likelihood.temperature) == pytest.approx(best, abs=2e-3)


def test_one_point_of_each_class_leaves_the_temperature_at_one():
    assert n2g.adapt_classes(network(4), task(shots=1)).temperature == 1.0


def test_the_order_of_points_and_the_names_of_classes_do_not_matter():
    x, y = task()
    z = points(5)
    probs = n2g.adapt_classes(network(4), (x, y)).predict(z).probs
    order = torch.randperm(len(y), generator=seeded(0))
    assert_close(n2g.adapt_classes(network(4), (x[order], y[order])).predict(z).probs, probs, 1e-4)
    names = torch.tensor([2, 0, 1])
    renamed = n2g.adapt_classes(network(4), (x, names[y])).predict(z).probs
    assert_close(renamed[:, names], probs, 1e-4)


def test_separate_clusters_are_told_apart_and_noise_is_not():
    x, y = task(shots=10, apart=6.0)
    half = slice(0, 15)
    posterior = n2g.adapt_classes(network(4), (x[half], y[half]))
    assert bool((posterior.predict(x[15:]).probs.argmax(1) == y[15:]).all())
    blind = n2g.adapt_classes(network(4), (points(60), torch.arange(3).repeat(20)))
    assert float(blind.predict(points(50, seed=5)).probs.max()) < 0.6


def test_where_nothing_is_known_classes_have_their_frequencies():
    y = torch.tensor([0] * 30 + [1] * 10)[torch.randperm(40, generator=seeded(0))]
    posterior = n2g.adapt_classes(n2g.RBF(0.01), (points(40), y), num_classes=3)
    far = torch.full((1, 2), 99.0, dtype=DOUBLE)
    expected = torch.tensor([31.0, 11.0, 1.0], dtype=DOUBLE) / 43
    assert_close(posterior.predict(far).probs[0], expected, tol=0.02)


def test_editing_the_data_later_changes_nothing():
    x, y = task()
    z = points(5)
    posterior = n2g.adapt_classes(network(4), (x, y))
    before = posterior.predict(z).probs
    x.zero_()
    assert torch.equal(posterior.predict(z).probs, before)


def test_single_precision_comes_back_as_such():
    x, y = task()
    exact = n2g.adapt_classes(network(4), (x, y)).predict(points(5)).probs
    rounded = n2g.adapt_classes(network(4, dtype=torch.float32), (x.float(), y))
    probs = rounded.predict(points(5).float()).probs
    assert probs.dtype == torch.float32
    assert_close(probs.double(), exact, tol=1e-3)


@pytest.mark.gpu
def test_a_gpu_finds_the_same():
    x, y = task()
    here = n2g.adapt_classes(network(4), (x, y)).predict(points(5)).probs
    there = n2g.adapt_classes(network(4).cuda(), (x.cuda(), y.cuda()))
    assert_close(there.predict(points(5).cuda()).probs.cpu(), here, tol=1e-4)


def test_parameters_can_be_chosen():
    x, y = task()
    head = n2g.linearize(network(4), only="2.*")
    a = n2g.adapt_classes(head, (x, y)).predict(points(5)).probs
    b = n2g.adapt_classes(network(4), (x, y), prior_var={"*": 0.0, "2.*": 1.0})
    assert_close(a, b.predict(points(5)).probs, tol=1e-6)


def test_wrong_arguments_are_named():
    x, y = task()
    joint = n2g.linearize(network(4)).kernel()
    with pytest.raises(InputError, match=r"kernel of one output.*trace_kernel"):
        n2g.adapt_classes(joint, (x, y))
    with pytest.raises(InputError, match=r"integer class indices.*y.long\(\)"):
        n2g.adapt_classes(network(4), (x, y.to(DOUBLE)))
    with pytest.raises(
        InputError,
        match=r"num_classes must be a whole number above the largest label, at least 3 here",
    ):
        n2g.adapt_classes(network(4), (x, y), num_classes=2)
    with pytest.raises(InputError, match=r"does not tell the 12 points of x apart"):
        n2g.adapt_classes(network(4), (torch.ones_like(x), y))
    with pytest.raises(InputError, match=r"one-hot codes, not of logits"):
        n2g.adapt_classes(network(4), (x, y)).predict(x, likelihood=n2g.Categorical())


@pytest.mark.parametrize("way", ["network", "kernel"])
def test_a_classifier_is_saved_whole(way, tmp_path):
    x, y = task()
    source = network(4) if way == "network" else n2g.RBF(1.3)
    posterior = n2g.adapt_classes(source, (x, y), num_classes=5)
    n2g.save(posterior, tmp_path / "classes.safetensors")
    fresh = copy.deepcopy(network(4))
    nn.utils.vector_to_parameters(torch.randn(10_000, dtype=DOUBLE), fresh.parameters())
    again = n2g.load(tmp_path / "classes.safetensors", fresh if way == "network" else None)
    assert isinstance(again, n2g.Posterior)
    z = points(7, seed=5)
    assert torch.equal(again.predict(z).probs, posterior.predict(z).probs)
    assert torch.equal(again.log_marginal_likelihood(), posterior.log_marginal_likelihood())
    if way == "network":
        with pytest.raises(InputError, match="another architecture"):
            n2g.load(tmp_path / "classes.safetensors", nn.Linear(2, 4))
        other = nn.Sequential(*[nn.ReLU() if isinstance(m, nn.Tanh) else m for m in fresh])
        with pytest.raises(InputError, match="computes something else"):
            n2g.load(tmp_path / "classes.safetensors", other.eval())


def test_a_classifier_moves_to_another_precision():
    x, y = task()
    posterior = n2g.adapt_classes(network(4), (x, y))
    moved = posterior.to(dtype=torch.float32)
    z = points(7, seed=5)
    found = moved.predict(z.float()).probs
    assert found.dtype == torch.float32
    assert_close(found.double(), posterior.predict(z).probs, 1e-4)


def test_classes_without_labels_are_said_unless_they_are_meant():
    x, y = task()
    with pytest.warns(n2g.errors.EmptyClass, match="labels go up to 7, but only 3 of these 8"):
        n2g.adapt_classes(network(4), (x, y + 5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        n2g.adapt_classes(network(4), (x, y + 5), num_classes=8)
    with pytest.raises(InputError, match="labels must be 0, 1, …, but the smallest is -1"):
        n2g.adapt_classes(network(4), (x, y - 1))


def test_codes_are_not_split():
    posterior = n2g.adapt_classes(network(4), task())
    for likelihood in (None, n2g.Categorical()):
        with pytest.raises(InputError, match="this posterior is of one-hot codes"):
            n2g.explain.split(posterior, points(3), likelihood=likelihood)
