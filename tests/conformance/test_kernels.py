"""Laws that every kernel obeys. A new kernel joins by one line in KERNELS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from contributing import example
from net2gp import RBF, condition, infinite_width, kernels, linearize, load, nngp, ntk, tune
from net2gp.deep import composed, layers_of
from net2gp.distributed import kernel_store
from net2gp.errors import InputError, NotAvailable
from net2gp.kernels import BaseFeatureKernel, BaseKernel, IndependentOutputs, Product, Sum, savable
from net2gp.likelihoods import Gaussian
from net2gp.limits import monte_carlo_kernel
from net2gp.posteriors.recipes.class_codes import Standardized
from net2gp.solvers import CG, Cholesky, Lanczos, WeightCholesky
from net2gp.types import FeatureKernel, Kernel
from posteriors.ways import network, points, seeded


def linearized(dtype: torch.dtype = torch.float64):
    return linearize(network(3, dtype=dtype))


def convolutional(dtype: torch.dtype = torch.float64):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        convolution = nn.Unflatten(1, (1, 2)), nn.Conv1d(1, 4, 2), nn.ReLU(), nn.Flatten()
        return linearize(nn.Sequential(*convolution, nn.Linear(4, 2)).to(dtype).eval())


Periodic = example("kernel").Periodic


@savable("tests.Coupled")
@dataclass(frozen=True, eq=False)
class Coupled(BaseKernel):
    """A kernel of a user with outputs that are correlated by B, a tensor: k ⊗ B."""

    B: Tensor

    def outputs(self, x):
        return len(self.B)

    def __call__(self, x, y=None):
        return torch.kron(Periodic()(x, y), self.B.to(x))

    def diag(self, x):
        return self.B.to(x).diagonal().repeat(len(x))


@savable("tests.Quadratic")
@dataclass(frozen=True)
class Quadratic(BaseFeatureKernel):
    """A kernel of a user by its features."""

    num_features = 4

    def features(self, x):
        return torch.stack([x[:, 0] ** 0, x[:, 0], x[:, 1], x[:, 0] * x[:, 1]], 1)[:, None]


COUPLING = torch.tensor([[1.0, 0.4, 0.0], [0.4, 2.0, 0.1], [0.0, 0.1, 0.5]], dtype=torch.float64)


def _head(dtype: torch.dtype) -> Kernel:
    return linearize(network(3, seed=3, dtype=dtype), only="2.*").kernel(2.0)


def _behind(dtype: torch.dtype) -> Kernel:
    narrow = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 9), nn.ReLU(), nn.Linear(9, 1))
    return layers_of(narrow, narrow=2, weight_var=1.5)[1].kernel


_FOLDERS: list[TemporaryDirectory] = []  # which are removed when the tests end


@cache
def _stored(coupled: bool, dtype: torch.dtype) -> Kernel:
    """A kernel that reads what it says of 5 points from a folder, or of 6 if outputs are coupled."""
    _FOLDERS.append(TemporaryDirectory())
    kernel = linearized(dtype).kernel(0.7) if coupled else RBF(0.8, 1.5)
    x = points(6 if coupled else 5).to(dtype)
    store = kernel_store(f"{_FOLDERS[-1].name}/k.zarr", kernel, x, tile=2)
    store.fill()
    return store.kernel()


KERNELS: dict[str, tuple[int, Callable[[torch.dtype], Kernel]]] = {
    "tangent": (3, lambda dtype: linearized(dtype).kernel(0.7)),
    "tangent, prior by pattern": (
        3,
        lambda dtype: linearized(dtype).kernel({"*": 1.0, "*.bias": 0.1, "2.weight": 0.0}),
    ),
    "tangent of a convolution": (2, lambda dtype: convolutional(dtype).kernel()),
    "tangent of the head": (
        3,
        lambda dtype: linearize(network(3, dtype=dtype), only="2.*").kernel(2.0),
    ),
    "trace": (1, lambda dtype: linearized(dtype).trace_kernel(0.7)),
    "rbf": (1, lambda dtype: RBF(0.8, 1.5)),
    "rbf, lengthscale per input": (1, lambda dtype: RBF(torch.tensor([0.8, 2.0], dtype=dtype))),
    "periodic": (1, lambda dtype: kernels.Periodic(1.3, 0.7, 1.5)),
    "linear": (1, lambda dtype: kernels.Linear(0.8, 0.3)),
    "nngp": (1, lambda dtype: nngp(network(3, dtype=dtype), weight_var=1.5, bias_var=0.1)),
    "ntk, standard": (
        1,
        lambda dtype: ntk(
            network(3, dtype=dtype), weight_var={"0": 1.5, "2": 0.7}, parameterization="standard"
        ),
    ),
    "ntk of a convolution": (
        1,
        lambda dtype: infinite_width(convolutional(dtype).network, weight_var=2.0).ntk.scaled(0.5),
    ),
    "behind an activation": (1, lambda dtype: _behind(dtype)),
    "composed": (1, lambda dtype: composed(RBF(0.7, 1.5), RBF(0.8), width=2)),
    "matern": (1, lambda dtype: kernels.Matern(1.5, 0.8, 1.5)),
    "independent rbf": (2, lambda dtype: IndependentOutputs(RBF(0.8, 1.5), 2)),
    "monte carlo": (
        1,
        lambda dtype: monte_carlo_kernel(network(3, dtype=dtype), 5, weight_var=1.5, bias_var=0.1),
    ),
    "standardized": (1, lambda dtype: Standardized.of(RBF(0.8), points(6, seed=5).to(dtype))),
    "own": (1, lambda dtype: Periodic()),
    "own, scaled": (1, lambda dtype: 2.0 * Periodic(1.5)),
    "own, coupled": (3, lambda dtype: Coupled(COUPLING.to(dtype))),
    "own, by features": (1, lambda dtype: Quadratic()),
    "own, by features, scaled": (1, lambda dtype: torch.tensor(0.4, dtype=dtype) * Quadratic()),
    "sum": (1, lambda dtype: RBF(0.8) + Periodic() + 0.3 * nngp(network(3, dtype=dtype))),
    "sum with features": (3, lambda dtype: linearized(dtype).kernel(0.7) + _head(dtype)),
    "sum of own features": (1, lambda dtype: Quadratic() + Quadratic().scaled(0.3) + Quadratic()),
    "sum of coupled and independent": (3, lambda dtype: Periodic() + linearized(dtype).kernel()),
    "sum of three": (3, lambda dtype: _head(dtype) + RBF() + Coupled(COUPLING.to(dtype))),
    "product": (1, lambda dtype: RBF(0.8) * Periodic() * RBF(1.5)),
    "product of coupled and independent": (3, lambda dtype: linearized(dtype).kernel() * RBF()),
    "product of coupled": (3, lambda dtype: _head(dtype) * Coupled(COUPLING.to(dtype))),
    "sum of products": (1, lambda dtype: 0.5 * (RBF() * Periodic()) + Quadratic() * RBF(2.0)),
    "stored": (1, lambda dtype: _stored(False, dtype)),
    "stored, coupled": (3, lambda dtype: _stored(True, dtype)),
    "independent trace": (2, lambda dtype: IndependentOutputs(linearized(dtype).trace_kernel(), 2)),
}
EACH = pytest.mark.parametrize("name", KERNELS)


def kernel_of(name: str, dtype: torch.dtype = torch.float64) -> Kernel:
    return KERNELS[name][1](dtype)


def assert_close(a: Tensor, b: Tensor, tol: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


@EACH
def test_it_is_a_kernel_and_its_rows_run_over_points_and_outputs(name):
    kernel, x, z = kernel_of(name), points(5), points(4, seed=2)
    C = KERNELS[name][0]
    assert isinstance(kernel, Kernel)
    assert kernel.outputs(x) == (C if C > 1 else None)
    assert kernel(x, z).shape == (5 * C, 4 * C)
    assert kernel.blocks(x).shape == (5, C, C)
    assert kernel.diag(x).shape == (5 * C,)


@EACH
def test_it_is_symmetric(name):
    kernel, x, z = kernel_of(name), points(5), points(4, seed=2)
    assert_close(kernel(x), kernel(x).T, tol=1e-15)
    assert_close(kernel(x, z), kernel(z, x).T)
    assert_close(kernel(x), kernel(x, x.clone()))


@EACH
def test_it_is_positive_semi_definite(name):
    kernel = kernel_of(name)
    K = kernel(points(12))
    assert float(torch.linalg.eigvalsh(K).min()) > -1e-12 * float(K.trace())
    assert float(kernel.diag(points(12)).min()) >= 0


@EACH
def test_diag_and_blocks_are_those_of_the_matrix(name):
    kernel, x, C = kernel_of(name), points(5), KERNELS[name][0]
    K = kernel(x)
    assert_close(kernel.diag(x), K.diagonal())
    assert_close(kernel.blocks(x), K.reshape(5, C, 5, C).diagonal(dim1=0, dim2=2).permute(2, 0, 1))


@EACH
def test_rows_belong_to_their_points(name):
    kernel, x, C = kernel_of(name), points(5), KERNELS[name][0]
    alone = torch.cat([kernel(x[n : n + 1], x) for n in range(5)])
    assert_close(alone, kernel(x))
    order = torch.tensor([3, 0, 4, 1, 2])
    moved = kernel(x).reshape(5, C, 5, C)[order][:, :, order].reshape(5 * C, 5 * C)
    assert_close(kernel(x[order]), moved)


@EACH
def test_matmul_is_the_dense_product(name):
    kernel, x, z = kernel_of(name), points(5), points(4, seed=2)
    K = kernel(x, z)
    v = torch.randn(K.shape[1], 3, generator=seeded(0), dtype=torch.float64)
    assert_close(kernel.matmul(x, z, v), K @ v)


@EACH
def test_matmul_in_tiles_is_the_dense_product(name, monkeypatch):
    monkeypatch.setattr("net2gp.kernels.base.TILE_BYTES", 100)
    monkeypatch.setattr("net2gp.linear.jacobians.tangent.available_memory", lambda device: 4000)
    kernel, x = kernel_of(name), points(7)
    v = torch.randn(kernel.diag(x).shape[0], 2, generator=seeded(0), dtype=torch.float64)
    assert_close(kernel.matmul(x, x, v), kernel_of(name)(x) @ v)


@EACH
@pytest.mark.parametrize("variance", [0.3, torch.tensor(0.3, dtype=torch.float64)])
def test_scaled_multiplies_everything(name, variance):
    kernel, x = kernel_of(name), points(5)
    scaled = kernel.scaled(variance)
    assert_close(scaled(x), 0.3 * kernel(x))
    assert_close(scaled.blocks(x), 0.3 * kernel.blocks(x))
    assert_close(scaled.diag(x), 0.3 * kernel.diag(x))


@EACH
def test_the_matrix_is_differentiable_in_a_scale(name):
    scale = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    kernel, x = kernel_of(name), points(3)
    (gradient,) = torch.autograd.grad(kernel.scaled(scale)(x).sum(), scale)
    assert_close(gradient, kernel(x).sum())


@EACH
def test_moving_to_another_dtype_and_back_keeps_it(name):
    kernel, x = kernel_of(name), points(5)
    single = kernel.to("cpu", torch.float32)
    assert single(x.float()).dtype == torch.float32
    assert single.diag(x.float()).dtype == single.blocks(x.float()).dtype == torch.float32
    assert_close(single(x.float()).double(), kernel(x), tol=1e-5)
    assert_close(single.to(dtype=torch.float64)(x), kernel(x), tol=1e-5)


@EACH
def test_a_precise_kernel_multiplies_in_float64_what_the_network_gives(name):
    kernel, exact, x = kernel_of(name, torch.float32), kernel_of(name), points(6)
    precise = kernel.precise()
    K = precise(x.float())
    assert K.dtype == precise.blocks(x.float()).dtype == precise.diag(x.float()).dtype
    assert K.dtype == torch.float64
    assert_close(K, exact(x), tol=1e-5)
    assert float(torch.linalg.eigvalsh(K).min()) > -1e-13 * float(K.trace())


WITH_FEATURES = [n for n in KERNELS if n.startswith("tangent") or "features" in n]


@pytest.mark.parametrize("name", WITH_FEATURES)
def test_features_give_the_kernel(name):
    kernel, x, z = kernel_of(name), points(5), points(4, seed=2)
    assert isinstance(kernel, FeatureKernel)
    Phi, Psi = kernel.features(x).flatten(0, 1), kernel.features(z).flatten(0, 1)
    assert Phi.shape[1] == kernel.num_features
    assert_close(Phi @ Psi.T, kernel(x, z))
    w = torch.randn(kernel.num_features, 2, generator=seeded(0), dtype=torch.float64)
    u = torch.randn(len(Phi), 2, generator=seeded(1), dtype=torch.float64)
    assert_close(kernel.apply(x, w), Phi @ w)
    assert_close(kernel.adjoint(x, u), Phi.T @ u)


def test_kernels_without_features_do_not_claim_them():
    for name in KERNELS:
        assert isinstance(kernel_of(name), FeatureKernel) == (name in WITH_FEATURES)


def test_the_trace_kernel_is_the_mean_of_the_diagonal_blocks():
    x, z = points(5), points(4, seed=2)
    K = kernel_of("tangent")(x, z).reshape(5, 3, 4, 3)
    assert_close(kernel_of("trace")(x, z), K.diagonal(dim1=1, dim2=3).mean(-1))


def test_independent_outputs_are_a_kronecker_product():
    x = points(5)
    expected = torch.kron(kernel_of("rbf")(x), torch.eye(2, dtype=torch.float64))
    assert torch.equal(kernel_of("independent rbf")(x), expected)


def test_rbf_is_that_of_scikit_learn_and_gpytorch():
    import gpytorch
    from sklearn.gaussian_process.kernels import RBF as Peer

    x, z, scales = points(8), points(5, seed=2), torch.tensor([0.5, 1.7], dtype=torch.float64)
    kernel = RBF(scales, 2.3)
    sklearn = 2.3 * Peer(scales.numpy())(x.numpy(), z.numpy())
    assert_close(kernel(x, z), torch.as_tensor(sklearn), tol=1e-13)
    peer = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=2)).double()
    peer.base_kernel.lengthscale, peer.outputscale = scales, torch.tensor(2.3, dtype=torch.float64)
    assert_close(kernel(x, z), peer(x, z).to_dense().detach(), tol=1e-13)


def test_rbf_keeps_its_digits_far_from_the_origin_and_at_short_length_scales():
    x = points(30)
    exact = RBF(0.01)(x)
    direct = torch.exp(-0.5 * (x[:, None] - x[None]).square().sum(-1) / 0.01**2)
    assert_close(exact, direct, tol=1e-9)
    assert_close(RBF()(x + 1e6), RBF()(x), tol=1e-8)
    single = RBF(0.01)(x.float())
    assert_close(single.double(), RBF(0.01)(x.float().double()), tol=1e-6)
    assert torch.equal(single.diagonal(), torch.ones(30))


def test_rbf_is_differentiable_in_its_length_scales():
    x = points(6)
    build = lambda scales: RBF(scales, 1.3)(x)
    scales = torch.tensor([0.8, 1.2], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(build, (scales,))


@EACH
def test_what_a_kernel_says_does_not_depend_on_what_it_has_seen(name):
    kernel, x = kernel_of(name), points(4)
    first, count = kernel(x), kernel.outputs(x)
    for other in (points(3, seed=7), points(1, seed=8)):
        kernel(other), kernel.diag(other), kernel.blocks(other), kernel.outputs(other)
    assert torch.equal(kernel(x), first)
    assert kernel.outputs(x) == count


@EACH
def test_its_matrix_is_differentiable_in_the_points(name):
    kernel, x, z = kernel_of(name), points(2), points(3, seed=2)
    assert torch.autograd.gradcheck(lambda a: kernel(a, z), (x.requires_grad_(),), atol=1e-6)


@EACH
def test_a_posterior_can_be_conditioned_on_it_and_moved(name):
    kernel, x = kernel_of(name), points(6)
    C = kernel.outputs(x) or 2
    y = torch.stack([(x[:, 0] * (c + 1)).sin() for c in range(C)], 1)
    posterior = condition(kernel, (x, y), Gaussian(0.1))
    K = kernel(x)
    K = K if len(K) == 6 * C else torch.kron(K, torch.eye(C, dtype=K.dtype))
    z = points(3, seed=2)
    cross = kernel(z, x)
    cross = cross if len(cross) == 3 * C else torch.kron(cross, torch.eye(C, dtype=K.dtype))
    mean = cross @ torch.linalg.solve(K + 0.1 * torch.eye(6 * C).to(K), y.reshape(-1, 1))
    assert_close(posterior.predict(z).mean, mean.reshape(3, C), tol=1e-9)
    assert posterior.sample(z, 2).shape == (2, 3, C)
    single = posterior.to(dtype=torch.float32)
    assert_close(single.predict(z.float()).mean.double(), mean.reshape(3, C), tol=1e-3)


OWN = [
    name for name in KERNELS if name.startswith(("own", "sum of own", "product", "sum of products"))
]


@pytest.mark.parametrize("name", [n for n in OWN if "coupled and independent" not in n])
def test_a_posterior_of_it_comes_back_from_a_file(name, tmp_path):
    kernel, x = kernel_of(name), points(6)
    y = x[:, :1].sin().expand(-1, kernel.outputs(x) or 1)
    posterior = condition(kernel, (x, y), Gaussian(0.1))
    posterior.save(tmp_path / "it")
    again = load(tmp_path / "it", network(3, seed=3))
    z = points(3, seed=2)
    assert torch.equal(again.predict(z).mean, posterior.predict(z).mean)
    assert torch.equal(again.predict(z).variance, posterior.predict(z).variance)


@pytest.mark.parametrize("name", [name for name in WITH_FEATURES if "own" in name or "sum" in name])
def test_weight_space_is_function_space(name):
    kernel, x, z = kernel_of(name), points(9), points(3, seed=2)
    y = x[:, :1].sin().expand(-1, kernel.outputs(x) or 1).contiguous()
    dense = condition(kernel, (x, y), Gaussian(0.1)).predict(z)
    weights = condition(kernel, (x, y), Gaussian(0.1), solver=WeightCholesky()).predict(z)
    assert_close(weights.mean, dense.mean, tol=1e-8)
    assert_close(weights.variance, dense.variance, tol=1e-8)
    draws = condition(kernel, (x, y), Gaussian(0.1)).sample_functions(2)
    assert draws(z).shape == (2, *y[:3].shape)


def test_the_scale_of_a_kernel_of_a_user_is_tuned_by_the_evidence():
    x, y = points(8), points(8)[:, :1].sin()
    build = lambda scale: condition(scale * Periodic() + RBF(), (x, y), Gaussian(0.1))
    tuned = tune(build, scale=1.0)
    best = max(float(build(s).log_marginal_likelihood()) for s in (0.01, 0.1, 1.0, 10.0))
    assert float(tuned.log_marginal_likelihood()) >= best


def test_a_sum_is_solved_by_conjugate_gradients_as_by_cholesky():
    x, z = points(9), points(3, seed=2)
    kernel, y = kernel_of("sum of coupled and independent"), x[:, :1].sin().expand(-1, 3)
    exact = condition(kernel, (x, y), Gaussian(0.1)).predict(z)
    found = condition(kernel, (x, y), Gaussian(0.1), solver=CG(tol=1e-11)).predict(z)
    assert_close(found.mean, exact.mean, tol=1e-8)


def test_sums_and_products_are_entrywise_and_independent_outputs_are_k_times_i():
    x, z = points(5), points(4, seed=2)
    tangent, rbf = kernel_of("tangent"), RBF(0.8)
    wide = torch.kron(rbf(x, z), torch.eye(3, dtype=torch.float64))
    assert_close((tangent + rbf)(x, z), tangent(x, z) + wide)
    assert_close((rbf * tangent)(x, z), tangent(x, z) * wide)
    assert_close((2.0 * rbf + rbf * 3)(x, z), 5 * rbf(x, z))
    assert isinstance(rbf + rbf + rbf, Sum)
    assert len((rbf + (rbf + rbf)).kernels) == 3
    assert isinstance(rbf * rbf, Product)


def test_kernels_of_unlike_numbers_of_outputs_have_no_sum():
    three, two = kernel_of("tangent"), kernel_of("tangent of a convolution")
    for kernel in (three + two, three * two):
        with pytest.raises(InputError, match="kernels of 2 and 3 coupled outputs have no sum"):
            kernel(points(3))
    with pytest.raises(
        InputError, match=r"features of 1 and 3 outputs.*IndependentOutputs\(kernel, 3\)"
    ):
        (three + Quadratic()).features(points(3))
    for refused in (lambda k, x: k.apply(x, x), lambda k, x: k.adjoint(x, x)):
        with pytest.raises(InputError, match="features of 1 and 3 outputs"):
            refused(three + Quadratic(), points(3))


MIXED = {
    "coupled first": lambda: linearized().kernel(0.7) + Quadratic(),
    "independent first": lambda: Quadratic() + linearized().kernel(0.7),
    "scaled": lambda: linearized().kernel() + 2.0 * Quadratic(),
    "scaled together": lambda: 0.5 * (2.0 * Quadratic() + _head(torch.float64)),
    "three": lambda: Quadratic() + linearized().kernel(0.7) + Quadratic(),
}


def assert_mixed(kernel: Kernel, reference: Kernel, solver) -> None:
    x, z = points(9), points(3, seed=2)
    y = torch.stack([(x[:, 0] * (c + 1)).sin() for c in range(3)], 1)
    posterior = condition(kernel, (x, y), Gaussian(0.1), solver=solver)
    K, cross = reference(x) + 0.1 * torch.eye(27, dtype=torch.float64), reference(z, x)
    mean = (cross @ torch.linalg.solve(K, y.reshape(-1, 1))).reshape(3, 3)
    law = posterior.joint(z)
    assert_close(law.mean.reshape(3, 3), mean, tol=1e-7)
    assert_close(
        law.covariance_matrix, reference(z) - cross @ torch.linalg.solve(K, cross.T), tol=1e-7
    )
    draws = posterior.sample(z, 4000, generator=seeded(0))
    errors = (law.covariance_matrix.diagonal() / 4000).sqrt().reshape(3, 3)
    assert bool(((draws.mean(0) - mean).abs() < 5 * errors).all())
    with pytest.raises(NotAvailable, match="features"):
        posterior.sample_functions(2)


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize(
    "solver", [None, Cholesky(), Cholesky(Lanczos(27)), CG(tol=1e-12)], ids=repr
)
def test_coupled_and_independent_features_are_conditioned_as_k_plus_l_times_i(name, solver):
    kernel, x = MIXED[name](), points(5)
    wide = [k if k.outputs(x) else IndependentOutputs(k, 3) for k in kernel.kernels]
    reference = Sum(tuple(wide))
    v = torch.randn(9, 2, generator=seeded(0), dtype=torch.float64)
    assert_close(kernel.matmul(x, x[:3], v), reference(x, x[:3]) @ v)
    assert_mixed(kernel, reference, solver)


def test_mixed_features_are_refused_in_weight_space_by_name_and_serve_one_output():
    x = points(9)
    with pytest.raises(InputError, match="needs a kernel with features"):
        condition(
            MIXED["three"](), (x, points(9, inputs=3)), Gaussian(0.1), solver=WeightCholesky()
        )
    kernel = linearize(network(1)).kernel() + Quadratic()
    dense = condition(kernel, (x, x[:, :1]), Gaussian(0.1), solver=Cholesky())
    weights = condition(kernel, (x, x[:, :1]), Gaussian(0.1), solver=WeightCholesky())
    assert_close(weights.predict(x).mean, dense.predict(x).mean, tol=1e-8)
    assert weights.sample_functions(2)(x).shape == (2, 9, 1)


@EACH
@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_a_scale_of_one_element_is_a_number_with_a_gradient(name, shape):
    scale = torch.full(shape, 0.3, dtype=torch.float64, requires_grad=True)
    kernel, x = kernel_of(name), points(3)
    scaled = kernel.scaled(scale)
    assert_close(scaled(x), 0.3 * kernel(x))
    assert_close(scaled.diag(x), 0.3 * kernel.diag(x))
    assert_close(scaled.blocks(x), 0.3 * kernel.blocks(x))
    (gradient,) = torch.autograd.grad(scaled(x).sum(), scale)
    assert_close(gradient, kernel(x).sum().expand(shape))


@EACH
def test_a_scale_is_one_positive_number(name):
    kernel = kernel_of(name)
    for value in (-1.0, 0.0, float("nan"), torch.tensor(-1.0)):
        with pytest.raises(InputError, match="variance must be positive and finite"):
            kernel.scaled(value)
    for value in ("a", None, 1j, torch.tensor(1j)):
        with pytest.raises(InputError, match="variance must be a number, but is"):
            kernel.scaled(value)
    for value in (torch.arange(1.0, 4.0), np.ones(3), torch.ones(1, 2), torch.ones(0)):
        with pytest.raises(InputError, match=r"one number, but has shape \(.*one element"):
            kernel * value


def test_a_variance_of_an_rbf_is_one_number_and_of_parameters_belongs_to_the_prior():
    x = points(4)
    assert_close(RBF(1.0, torch.tensor([[2.0]])).diag(x), 2 * RBF().diag(x))
    with pytest.raises(InputError, match=r"output_var must be one number, but has shape \(4,\)"):
        RBF(1.0, torch.ones(4))
    with pytest.raises(InputError, match=r"one element\. Variances per parameter .* prior_var"):
        kernel_of("tangent").scaled(torch.ones(2))


@EACH
def test_arrays_of_numpy_scale_it_and_the_built_in_sum_adds_it(name):
    kernel, x = kernel_of(name), points(3)
    for two in (np.array([2.0]), np.array(2.0), np.float32(2.0), np.float64(2.0), np.int64(2)):
        for product in (two * kernel, kernel * two):
            assert isinstance(product, Kernel)
            assert_close(product(x), 2 * kernel(x))
    assert_close(sum([kernel, kernel])(x), 2 * kernel(x))
    with pytest.raises(TypeError, match="unsupported operand"):
        1.0 + kernel


@EACH
def test_a_product_wants_a_row_for_each_column_of_the_matrix(name):
    kernel, x = kernel_of(name), points(5)
    for y, v in ((x[:0], torch.zeros(0, 1)), (x, torch.zeros(3, 1)), (x, torch.zeros(32, 1))):
        with pytest.raises(InputError, match=r"is empty|v of shape|v must have shape|u must have"):
            kernel.matmul(x, y, v.double())


def test_an_rbf_names_the_tensor_of_another_dtype():
    x = points(3)
    with pytest.raises(InputError, match=r"but the other tensor of points is torch\.float32"):
        RBF()(x, x.float())


def test_a_scale_must_be_positive_and_a_kernel_a_dataclass():
    class Plain(BaseKernel):
        __call__, diag = Periodic.__call__, Periodic.diag

    with pytest.raises(InputError, match="variance"):
        -1.0 * Periodic()
    with pytest.raises(InputError, match=r"Plain is no dataclass.*@dataclass\(frozen=True\)"):
        Plain().to(dtype=torch.float32)
    with pytest.raises(TypeError, match="unsupported operand"):
        RBF() + 1.0


def test_one_limit_kernel_serves_vectors_sequences_and_vectors_again():
    body = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    kernel, x = nngp(body), points(4)
    sequences = torch.stack([points(4, seed=s) for s in range(3)], 1)
    y = points(4, seed=9, inputs=3)
    fresh = condition(nngp(body), (x, y), Gaussian(0.1))
    before = condition(kernel, (x, y), Gaussian(0.1))
    assert kernel.outputs(sequences) == 9
    assert kernel.blocks(sequences).shape == (4, 9, 9)
    after = condition(kernel, (x, y), Gaussian(0.1))
    for posterior in (before, after):
        assert kernel.outputs(x) is None
        assert torch.equal(posterior.joint(x).covariance_matrix, fresh.joint(x).covariance_matrix)


def test_a_sum_of_kernels_of_one_network_is_saved_and_of_two_refused(tmp_path):
    one, x = linearized(), points(6)
    y = x[:, :1].sin().expand(-1, 3)
    posterior = condition(one.kernel(0.7) + one.trace_kernel() * RBF(), (x, y), Gaussian(0.1))
    posterior.save(tmp_path / "it")
    again = load(tmp_path / "it", network(3, seed=5))
    assert torch.equal(again.predict(x).mean, posterior.predict(x).mean)
    posterior = condition(kernel_of("sum with features"), (x, y), Gaussian(0.1))
    with pytest.raises(InputError, match="of two networks or more, but load takes one"):
        posterior.save(tmp_path / "other")


def test_a_kernel_that_does_not_say_how_many_outputs_it_couples_is_refused():
    @dataclass(frozen=True)
    class Silent(BaseKernel):
        def __call__(self, x, y=None):
            return torch.kron(RBF()(x, y), torch.eye(2).to(x))

        def diag(self, x):
            return x.new_ones(2 * len(x))

    x = points(4)
    with pytest.raises(InputError, match=r"diag of Silent has shape \(2,\).*Return C from outputs"):
        condition(Silent(), (x, x), Gaussian(0.1))
