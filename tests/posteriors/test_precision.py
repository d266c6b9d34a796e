"""Float32 networks, and moves between dtypes and devices."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from net2gp import RBF, Categorical, Gaussian, Kron, LastLayer, adapt, condition, laplace, linearize
from net2gp.solvers import CG, Cholesky, Exact, Lanczos, WeightCholesky
from net2gp.structures import LowRank
from posteriors.ways import WAYS, built, class_targets, network, points, real_targets, unseen_points

SOLVERS = {
    "cholesky": Cholesky(),
    "cache": Cholesky(Lanczos(200)),
    "weight space": WeightCholesky(),
    "conjugate gradients": CG(tol=1e-9, variance=Exact()),
}


def pair(outputs: int = 1, hidden: int = 40) -> tuple[nn.Module, nn.Module]:
    """A float32 network and its exact copy in float64."""
    single = network(outputs, hidden=hidden, dtype=torch.float32)
    return single, copy.deepcopy(single).double()


def variances(posterior, x):
    return posterior.marginal(x).covariance_matrix.diagonal(dim1=1, dim2=2)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("noise", [1e-2, 1e-4, 1e-6])
def test_a_float32_network_predicts_as_its_float64_copy(solver, noise):
    """Features are rounded to 6e-8, and solves with K + noise amplify a part of it.

    The mean moves by about 6e-8 · √(k/noise) of the targets, which is 1e-3 at the least noise here;
    variances by as much of themselves.
    """
    single, double = pair()
    x, test = points(25).float(), points(50, seed=5).float()
    y = real_targets(x.double(), 1).float()
    settings = SOLVERS[solver]
    ours = condition(linearize(single).kernel(), (x, y), Gaussian(noise), solver=settings)
    exact = condition(
        linearize(double).kernel(), (x.double(), y.double()), Gaussian(noise), solver=Cholesky()
    )
    mean, expected = ours.marginal(test).mean, exact.marginal(test.double()).mean
    assert mean.dtype == torch.float32
    size = 6e-8 * (30 / noise) ** 0.5 * 10
    torch.testing.assert_close(
        mean.double(), expected, rtol=0, atol=size * float(expected.abs().max())
    )
    got, wanted = variances(ours, test).double(), variances(exact, test.double())
    assert bool((got > 0).all())
    torch.testing.assert_close(got, wanted, rtol=10 * size, atol=1e-9)


@pytest.mark.parametrize(
    "structure", [Kron(), LastLayer(Kron()), LowRank(30)], ids=["kron", "last layer", "low rank"]
)
def test_a_structure_in_float32_has_the_variances_of_its_float64_copy(structure):
    """Inputs of scales from 1e-3 to 100 under a wide prior: small eigenvalues decide the variances."""
    generator = torch.Generator().manual_seed(0)
    single = network(2, inputs=3, hidden=10, dtype=torch.float32)
    with torch.no_grad():
        single[2].weight.mul_(1e-4)
    double = copy.deepcopy(single).double()
    scales = torch.tensor([1.0, 100.0, 1e-3])
    x, test = (torch.randn(n, 3, generator=generator) * scales for n in (40, 7))
    with torch.no_grad():
        y = single(x) + 1e-5 * torch.randn(40, 2, generator=generator)
    noise = Gaussian(1e-10)
    ours = laplace(single, (x, y), noise, prior_var=0.7, structure=structure)
    exact = laplace(double, (x.double(), y.double()), noise, prior_var=0.7, structure=structure)
    got, wanted = ours.marginal(test).variance, exact.marginal(test.double()).variance
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), wanted, rtol=1e-2, atol=0)
    joint, wanted = (
        p.joint(z).covariance_matrix.diagonal() for p, z in ((ours, test), (exact, test.double()))
    )
    torch.testing.assert_close(joint.double(), wanted, rtol=1e-2, atol=0)


@pytest.mark.parametrize("solver", SOLVERS)
def test_variances_of_float32_networks_are_never_negative_or_missing(solver):
    single, _ = pair()
    x = points(30).float()
    for noise in (1e-1, 1e-5):
        posterior = condition(
            linearize(single).kernel(),
            (x, real_targets(x.double(), 1).float()),
            Gaussian(noise),
            solver=SOLVERS[solver],
        )
        for test in (x, x * 1e-3, x * 100):
            got = variances(posterior, test)
            assert bool(got.isfinite().all())
            assert bool((got >= 0).all())


def test_adapting_a_float32_network_to_data_without_noise():
    single, double = pair()
    x = torch.linspace(-2, 2, 20)[:, None].expand(20, 2).contiguous()
    y = x[:, :1].sin()
    ours = adapt(single, (x, y), Gaussian())
    exact = adapt(double, (x.double(), y.double()), Gaussian())
    assert float((ours.marginal(x).mean - y).abs().max()) < 1e-3
    assert float((exact.marginal(x.double()).mean - y).abs().max()) < 1e-3
    assert bool((variances(ours, x) >= 0).all())


def test_a_float32_classifier_predicts_as_its_float64_copy():
    single, double = pair(3)
    x, test = points(25), points(50, seed=5)
    y = class_targets(x, 3)
    for solver in (Cholesky(), WeightCholesky(), CG()):
        ours = condition(linearize(single).kernel(), (x.float(), y), Categorical(), solver=solver)
        exact = condition(linearize(double).kernel(), (x, y), Categorical())
        probabilities = ours.predict(test.float()).probs
        assert probabilities.dtype == torch.float32
        torch.testing.assert_close(
            probabilities.double(), exact.predict(test).probs, rtol=1e-3, atol=1e-4
        )


def test_an_rbf_in_float32_is_one_in_float64():
    x, test = points(60).float(), points(20, seed=5).float()
    y = real_targets(x.double(), 1).float()
    ours = condition(RBF(0.3), (x, y), Gaussian(1e-4))
    exact = condition(RBF(0.3), (x.double(), y.double()), Gaussian(1e-4))
    mean, expected = ours.marginal(test).mean, exact.marginal(test.double()).mean
    assert mean.dtype == torch.float32
    torch.testing.assert_close(mean.double(), expected, rtol=1e-6, atol=1e-6)


def test_moving_leaves_the_original_and_its_network_alone():
    module = network(1)
    x = points(8)
    posterior = condition(RBF(), (x, real_targets(x, 1)), Gaussian(0.1), mean=module)
    with torch.no_grad():
        moved = posterior.to(dtype=torch.float32)
        assert moved.marginal(x.float()).mean.dtype == torch.float32
        assert posterior.marginal(x).mean.dtype == torch.float64
    assert next(module.parameters()).dtype == torch.float64


def test_solves_stay_in_float64_after_a_move():
    moved = built("gaussian by cholesky").to(dtype=torch.float32)
    assert moved.process.alpha.dtype == moved.process.factor.cholesky.L.dtype == torch.float64
    assert moved.x.dtype == moved.y.dtype == torch.float32


def test_labels_stay_integers_after_a_move():
    moved = built("categorical by laplace").to(dtype=torch.float32)
    assert moved.y.dtype == torch.int64


def test_the_evidence_of_a_moved_posterior_is_a_value_that_was():
    posterior = built("gaussian by cholesky")
    moved = posterior.to("cpu", torch.float32)
    assert torch.equal(moved.log_marginal_likelihood(), posterior.log_marginal_likelihood())


gpu = pytest.mark.gpu


@gpu
@pytest.mark.parametrize("name", WAYS)
def test_a_posterior_moves_to_the_gpu_and_back(name):
    posterior, x = built(name), unseen_points()
    there = posterior.to("cuda")
    law, expected = there.marginal(x.cuda()), posterior.marginal(x)
    assert law.mean.is_cuda
    torch.testing.assert_close(law.mean.cpu(), expected.mean, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(
        law.covariance_matrix.cpu(), expected.covariance_matrix, rtol=1e-7, atol=1e-7
    )
    back = there.to("cpu").marginal(x)
    torch.testing.assert_close(back.mean, expected.mean, rtol=1e-12, atol=1e-12)


@gpu
@pytest.mark.parametrize("name", [name for name in WAYS if "conjugate" not in name])
def test_conditioning_on_the_gpu_is_conditioning_on_the_cpu(name):
    way, test = WAYS[name], unseen_points()
    x, y = way.data()
    linearized = linearize(way.network().cuda())
    there = way.build(
        x.cuda(),
        y.cuda(),
        kernel=way.kernel(linearized).to("cuda"),
        mean=linearized if way.with_mean else None,
    )
    law, expected = there.marginal(test.cuda()), built(name).marginal(test)
    tol = max(way.tol, 1e-7)
    torch.testing.assert_close(law.mean.cpu(), expected.mean, rtol=tol, atol=tol)
    torch.testing.assert_close(
        law.covariance_matrix.cpu(), expected.covariance_matrix, rtol=tol, atol=tol
    )
    draws = there.sample(test.cuda(), 2, generator=torch.Generator().manual_seed(0))
    assert draws.is_cuda
    updated = there.update((x[:1].cuda() + 0.1, y[:1].cuda()))
    assert bool(updated.marginal(test.cuda()).mean.isfinite().all())


@gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_adapting_on_the_gpu_is_adapting_on_the_cpu(dtype):
    single, double = pair(2)
    module = single if dtype == torch.float32 else double
    x, test = points(25).to(dtype), points(10, seed=5).to(dtype)
    y = real_targets(x, 2)
    here = adapt(module, (x, y), Gaussian())
    there = adapt(copy.deepcopy(module).cuda(), (x.cuda(), y.cuda()), Gaussian())
    tol = 1e-6 if dtype == torch.float64 else 1e-3
    assert there.likelihood.noise_var == pytest.approx(here.likelihood.noise_var, rel=1e-3)
    torch.testing.assert_close(
        there.marginal(test.cuda()).mean.cpu(), here.marginal(test).mean, rtol=tol, atol=tol
    )


@gpu
def test_data_on_another_device_than_the_network_is_refused():
    from net2gp.errors import InputError

    x = points(5)
    y = real_targets(x, 1)
    kernel = linearize(network(1).cuda()).kernel()
    with pytest.raises(InputError, match=r"x is on cpu, but the network is on cuda"):
        condition(kernel, (x, y), Gaussian(0.1))
    with pytest.raises(InputError, match=r"y is on cpu.*y = y.to\('cuda:0'\)"):
        condition(kernel, (x.cuda(), y), Gaussian(0.1))


@gpu
def test_a_posterior_is_loaded_onto_the_gpu(tmp_path):
    from net2gp import load, save

    for name in ("gaussian by cholesky", "categorical by laplace in weight space"):
        save(built(name).to("cuda"), tmp_path / "file")
        loaded = load(tmp_path / "file", WAYS[name].network(), device="cuda")
        law = loaded.marginal(unseen_points().cuda())
        expected = built(name).marginal(unseen_points())
        torch.testing.assert_close(law.mean.cpu(), expected.mean, rtol=1e-8, atol=1e-8)


@gpu
def test_a_cached_prediction_on_the_gpu_needs_no_training_points():
    posterior = built("gaussian by conjugate gradients").to("cuda")
    process = replace(posterior.process, x=None, factor=None)
    forgetful = replace(posterior, process=process, x=None, y=None)
    law = forgetful.marginal(unseen_points().cuda())
    assert bool((law.covariance_matrix.diagonal(dim1=1, dim2=2) >= 0).all())
