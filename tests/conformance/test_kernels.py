"""Laws that every kernel obeys. A new kernel joins by one line in KERNELS."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from net2gp import RBF, infinite_width, linearize, nngp, ntk
from net2gp.deep import composed
from net2gp.kernels import IndependentOutputs
from net2gp.types import FeatureKernel, Kernel
from posteriors.ways import network, points, seeded


def linearized(dtype: torch.dtype = torch.float64):
    return linearize(network(3, dtype=dtype))


def convolutional(dtype: torch.dtype = torch.float64):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        convolution = nn.Unflatten(1, (1, 2)), nn.Conv1d(1, 4, 2), nn.ReLU(), nn.Flatten()
        return linearize(nn.Sequential(*convolution, nn.Linear(4, 2)).to(dtype).eval())


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
    "composed": (1, lambda dtype: composed(RBF(0.7, 1.5), RBF(0.8), width=2)),
    "independent rbf": (2, lambda dtype: IndependentOutputs(RBF(0.8, 1.5), 2)),
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
    assert kernel.joint is (C > 1)
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
    monkeypatch.setattr("net2gp.kernels.TILE_BYTES", 100)
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


@pytest.mark.parametrize("name", [name for name in KERNELS if name.startswith("tangent")])
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
    for name in ("trace", "rbf", "independent rbf", "independent trace"):
        assert not isinstance(kernel_of(name), FeatureKernel)


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
