"""What all posteriors share, law by law: cheap means, novelty, batches of laws, files, refusals."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import net2gp as n2g
from conformance.test_gradients import assert_gradient
from net2gp.errors import InputError, NotAvailable, NotStationary
from net2gp.linear.precision import rechosen
from net2gp.posteriors.conditioning.conditioned import Conditioned
from net2gp.posteriors.conditioning.whitened import Whitened
from net2gp.posteriors.recipes import seen
from net2gp.posteriors.recipes.around_network import AroundNetwork
from net2gp.posteriors.recipes.drawn import Drawn
from net2gp.posteriors.recipes.mixed import Mixed
from net2gp.posteriors.recipes.trained_ensemble import TrainedEnsemble
from posteriors.methods import EVERY, METHODS, found
from posteriors.ways import WAYS, points, seeded, unseen_points

ANY = pytest.mark.parametrize("name", EVERY)
BY_METHOD = pytest.mark.parametrize("name", METHODS)
NETWORKS = [
    name
    for name in METHODS
    if not (name.startswith(("codes", "method of", "deep", "combined")) or "width" in name)
]
"""Methods that give a Gaussian over a network's parameters."""

ONE_OF_EACH = [
    *("gaussian by cholesky", "gaussian in weight space", "gaussian, rbf", "laplace, kron"),
    *("laplace, function space", "laplace, sampled", "swag", "codes of classes, rbf"),
]


@ANY
def test_the_mean_is_that_of_the_marginal_law(name):
    posterior, x = found(name), unseen_points()
    mean = posterior.mean(x)
    assert mean.shape == (len(x), EVERY[name].outputs)
    torch.testing.assert_close(mean, posterior.marginal(x).mean, rtol=0, atol=1e-10)


@ANY
def test_the_mean_computes_no_variance(name, monkeypatch):
    posterior = found(name)

    def refuse(*args, **kwargs):
        raise AssertionError("a mean needs no variance")

    for kind in (Conditioned, Whitened, AroundNetwork, Drawn, Mixed):
        for method in ("moments", "joint", "diagonal", "contrast"):
            monkeypatch.setattr(kind, method, refuse)
    for function in ("solve_triangular", "cholesky_ex", "eigh", "solve"):
        monkeypatch.setattr(torch.linalg, function, refuse)
    posterior.mean(unseen_points())


@ANY
def test_the_mean_has_gradients_in_x(name):
    assert_gradient(found(name).mean, points(2, seed=9))


def count_passes(network: nn.Module, call) -> int:
    passes = []
    handle = network.register_forward_hook(lambda *_: passes.append(1))
    try:
        call()
    finally:
        handle.remove()
    return len(passes)


@pytest.mark.parametrize("name", ["laplace, full", "laplace, kron", "vogn"])
def test_a_mean_around_a_network_is_one_pass(name):
    posterior, x = found(name), unseen_points()
    posterior.mean(x)
    assert count_passes(posterior.linearized.network, lambda: posterior.mean(x)) <= 1


def share_of_squared_errors(linearized, known, x, *, features: bool) -> torch.Tensor:
    """The share of the prior variance that targets with a little noise at known inputs leave open.

    The noise is relative to the prior variance of each input; for features of a last layer, to its mean.
    """
    J, J_known = (linearized.jacobian(points).flatten(1) for points in (x, known))
    variance = J_known.square().sum(1)
    if features:
        variance = variance.mean().expand(len(J_known))
    noisy = J_known @ J_known.T + seen.NOISE * variance.diag()
    known_part = (J @ J_known.T @ torch.linalg.solve(noisy, J_known @ J.T)).diagonal()
    return 1 - known_part / J.square().sum(1)


@ANY
def test_novelty_is_the_posterior_variance_over_the_prior_variance(name):
    posterior, x = found(name), unseen_points()
    variance = posterior.marginal(x).covariance_matrix.diagonal(dim1=1, dim2=2).sum(1)
    kernel, C = posterior.kernel, EVERY[name].outputs
    prior = kernel(x).diagonal().reshape(len(x), -1)
    prior = prior.sum(1) * (C if kernel.outputs(x) is None else 1)
    novelty = posterior.novelty(x)
    assert novelty.shape == (len(x),)
    known = getattr(posterior.process, "seen", None)
    if known is not None:  # each training input counts alike
        features = isinstance(known, seen.SeenFeatures)
        names = getattr(known, "names", ()) if not features else ()
        own = rechosen(posterior.linearized, names) if names else posterior.linearized
        expected = share_of_squared_errors(own, posterior.x, x, features=features)
        torch.testing.assert_close(novelty, expected, rtol=1e-6, atol=1e-9)
    elif (
        "weights" not in name and "subnetwork" not in name
    ):  # their prior is of some parameters only
        torch.testing.assert_close(novelty, variance / prior, rtol=1e-6, atol=1e-9)


WITHOUT_SHARES = ("swag", "sampled", "sigma points")
"""Laws whose variances are not those of the prior given data, or are estimates of them."""


@pytest.mark.parametrize("name", [n for n in EVERY if not any(w in n for w in WITHOUT_SHARES)])
def test_novelty_is_a_share(name):
    novelty = found(name).novelty(unseen_points())
    assert bool((novelty >= 0).all())
    assert bool((novelty <= 1 + 1e-8).all())


def test_novelty_of_a_subnetwork_is_a_share_of_the_variance_that_is_free():
    posterior, x = found("laplace, subnetwork"), unseen_points()
    J = posterior.linearized.jacobian(x)[..., posterior.covariance.index]
    prior = 0.7 * J.square().sum((1, 2))
    left = posterior.marginal(x).variance.sum(1)
    torch.testing.assert_close(posterior.novelty(x), left / prior)


def test_novelty_is_one_far_away_and_small_at_the_data():
    posterior = found("gaussian, rbf")
    assert float(posterior.novelty(torch.full((1, 2), 100.0, dtype=torch.float64))) > 1 - 1e-12
    assert float(posterior.novelty(posterior.x).max()) < 0.2


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_novelty_has_gradients_in_x(name):
    assert_gradient(found(name).novelty, points(2, seed=9))


def test_novelty_is_zero_where_the_prior_is_sure():
    network = nn.Linear(2, 1, bias=False).double().eval()
    x = points(4)
    posterior = n2g.laplace(network, (x, network(x).detach()), n2g.Gaussian(0.1), prior_var=1.0)
    at_zero = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    novelty = posterior.novelty(at_zero)
    assert float(novelty.detach()) == 0.0
    assert bool(torch.autograd.grad(novelty.sum(), at_zero)[0].isfinite().all())


@ANY
def test_a_batch_of_laws_is_the_laws_of_its_groups(name):
    posterior, C = found(name), EVERY[name].outputs
    x = points(12, seed=7).reshape(4, 3, 2)
    together = posterior.joint(x, batch=True)
    assert (together.batch_shape, together.event_shape) == ((4,), (3 * C,))
    for group, mean, covariance in zip(x, together.mean, together.covariance_matrix, strict=True):
        alone = posterior.joint(group)
        torch.testing.assert_close(mean, alone.mean, rtol=0, atol=1e-10)
        torch.testing.assert_close(covariance, alone.covariance_matrix, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ONE_OF_EACH)
@pytest.mark.parametrize("rows", [1, 256])
def test_a_batch_of_laws_has_gradients_in_x(name, rows, monkeypatch):
    monkeypatch.setattr("net2gp.posteriors.conditioning.process.BATCH_ROWS", rows)
    x = points(4, seed=9).reshape(2, 2, 2)
    assert_gradient(lambda z: found(name).joint(z, batch=True).covariance_matrix, x)
    assert_gradient(lambda z: found(name).joint(z, batch=True).mean, x)


def test_batches_of_several_inputs_have_two_axes_each():
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.layer(a + b).tanh()

    x = points(6)
    kernel = n2g.linearize(Sum().double().eval()).kernel()
    posterior = n2g.condition(kernel, ((x, x), x[:, :1]), n2g.Gaussian(0.1))
    groups = x.reshape(3, 2, 2)
    law = posterior.joint((groups, groups), batch=True)
    expected = posterior.joint((groups[1], groups[1])).covariance_matrix
    torch.testing.assert_close(law.covariance_matrix[1], expected)
    with pytest.raises(InputError, match=r"two leading axes.*Pass x\[None\] for one group"):
        posterior.joint((groups, x), batch=True)
    with pytest.raises(InputError, match="with batch=True x has two leading axes"):
        posterior.joint(x[:0, None], batch=True)


@BY_METHOD
def test_what_a_method_found_is_loaded_with_the_same_bits(name, tmp_path):
    posterior, x, path = found(name), unseen_points(), tmp_path / "posterior.safetensors"
    if name.startswith("combined"):  # load takes one network
        with pytest.raises(InputError, match="cannot be saved"):
            posterior.save(path)
        return
    posterior.save(path)
    network = RECTIFIED if "infinite width" in name else EVERY[name].network()
    loaded = n2g.load(path, network)
    assert repr(loaded) == repr(posterior)
    for law in ("marginal", "joint"):
        a, b = getattr(posterior, law)(x), getattr(loaded, law)(x)
        assert torch.equal(a.mean, b.mean)
        assert torch.equal(a.covariance_matrix, b.covariance_matrix)
    one, other = (p.sample(x, 2, generator=seeded(0)) for p in (posterior, loaded))
    assert torch.equal(one, other)
    assert torch.equal(posterior.novelty(x), loaded.novelty(x))


RECTIFIED = nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 1))


@ANY
def test_every_posterior_is_one_class_and_splits_its_variance_or_says_why_not(name):
    posterior, x = found(name), unseen_points()
    assert type(posterior) is n2g.Posterior
    if name.startswith("codes"):
        with pytest.raises(NotAvailable, match="of one-hot codes, whose variance is not split"):
            posterior.split(x)
        return
    parts = posterior.split(x)
    assert torch.equal(parts.total, n2g.explain.split(posterior, x).total)


@pytest.mark.parametrize("name", NETWORKS)
def test_drawn_functions_of_a_network_are_its_samples(name):
    posterior, x = found(name), unseen_points()
    drawn = posterior.sample_functions(3, generator=seeded(0))
    expected = posterior.sample(x, 3, generator=seeded(0))
    assert torch.equal(drawn(x), expected)
    torch.testing.assert_close(drawn(x[2:4]), expected[:, 2:4])


@BY_METHOD
def test_a_tempered_posterior_has_the_same_novelty_or_is_refused(name):
    posterior, x = found(name), unseen_points()
    if isinstance(posterior.process, Drawn | Mixed):
        return  # tests/bayes/test_mixtures.py has their laws
    if not isinstance(posterior.process, AroundNetwork):
        trained = isinstance(posterior.process, TrainedEnsemble)
        text = "another ridge" if trained else "Condition with another prior variance or noise"
        with pytest.raises(NotAvailable, match=text):
            posterior.tempered(3.0)
        return
    torch.testing.assert_close(posterior.tempered(3.0).novelty(x), posterior.novelty(x))


def test_what_a_kind_cannot_do_says_why_and_what_to_use():
    x, y = WAYS["gaussian, rbf"].data()
    rbf, codes, kron = (found(n) for n in ("gaussian, rbf", "codes of classes", "laplace, kron"))
    refusals = [
        (lambda: kron.update((x, y)), r"train.*network.*posterior\.dual\(\)\.condition\(\)"),
        (lambda: codes.update((x, y[:, 0].long())), "Call adapt_classes with all data"),
        (lambda: rbf.tempered(2.0), "as laplace, VOGN, IVON and Swag give it"),
        (lambda: rbf.dual(), "but the kernel is RBF. Use dual"),
        (lambda: codes.dual(), "but the kernel is Standardized"),
        (lambda: rbf.sample_functions(3), r"Use posterior\.sample\(x, num_samples\)"),
        (lambda: rbf.sample_weights(3), "or laplace"),
        (lambda: rbf.sample(x, 3, linear=False), "parameters are drawn from a Gaussian around"),
        (lambda: rbf.linearized, "Use adapt"),
        (lambda: rbf.prior_var, "but the kernel is RBF"),
        (lambda: rbf.covariance, r"Use joint\(x\) for the covariance of its outputs"),
        (lambda: rbf.structure, "found without a structure, as laplace"),
        (lambda: kron.solver, "found without a solver, as condition"),
        (lambda: kron.centered(x), r"Use posterior\.dual\(\)\.condition\(\)\.centered"),
        (lambda: found("swag").log_marginal_likelihood(), "without an evidence"),
        (lambda: replace(rbf, x=None, y=None).update((x, y)), "does not hold the data"),
    ]
    for refused, message in refusals:
        with pytest.raises(NotAvailable, match=message):
            refused()
    assert hasattr(kron, "linearized")
    assert not hasattr(rbf, "linearized")


def test_a_posterior_without_data_predicts_all_the_same():
    posterior, x = found("laplace, full"), unseen_points()
    alone = replace(posterior, x=None, y=None)
    assert torch.equal(alone.predict(x).mean, posterior.predict(x).mean)
    assert "N=none" in repr(alone)


def test_the_dual_of_a_dual_keeps_its_temperature():
    way = METHODS["laplace, full"]
    x, y = way.data()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotStationary)
        hot = n2g.laplace(way.network(), (x, y), n2g.Gaussian(0.1), prior_var=0.7, temperature=3.0)
    process = hot.dual().gaussian_process()
    assert process.temperature == process.dual().temperature == 3.0
    again = process.dual().gaussian_process().joint(unseen_points())
    torch.testing.assert_close(
        again.covariance_matrix, process.joint(unseen_points()).covariance_matrix
    )
