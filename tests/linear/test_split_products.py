"""Products of float32 matrices in parts of bfloat16: how wrong they may be, and who uses them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from net2gp.errors import InputError
from net2gp.linalg import split_products
from net2gp.linalg.split_products import SPLIT_ERROR, add_product, joined, product, split
from net2gp.linear import linearize

SIZES = [(1, 1, 1), (3, 700, 2), (40, 5, 30)]


def matrices(n: int, k: int, m: int, spread: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n * k)
    A, B = torch.randn(n, k, generator=generator), torch.randn(k, m, generator=generator)
    return A * torch.logspace(-spread, spread, k), B


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("spread", [0.0, 4.0])
def test_the_error_is_small_beside_the_product_of_absolute_values(sizes, spread):
    A, B = matrices(*sizes, spread)
    left, right = (side.double() for side in joined(A, B))
    exact, scale = A.double() @ B.double(), A.abs().double() @ B.abs().double()
    assert ((left @ right - exact).abs() <= SPLIT_ERROR * scale).all()
    one = A.bfloat16().double() @ B.bfloat16().double()
    assert (one - exact).norm() > 20 * (left @ right - exact).norm()


def test_two_parts_have_all_but_the_last_bits_of_a_number():
    numbers = torch.logspace(-20, 20, 500)
    large, small = (part.double() for part in split(numbers))
    assert ((large + small - numbers.double()).abs() <= 2**-16 * numbers.double()).all()


@pytest.mark.parametrize("tolerance", [0.0, 1e-3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_cpu_multiplies_as_it_does(tolerance, dtype):
    A, B = (side.to(dtype) for side in matrices(4, 5, 6))
    assert torch.equal(product(A, B, tolerance), A @ B)
    K = torch.ones(4, 6, dtype=dtype)
    add_product(K, A, B, tolerance)
    torch.testing.assert_close(K, 1 + A @ B)


def test_a_kernel_says_what_error_it_may_have_to_every_product(monkeypatch):
    asked = []
    monkeypatch.setattr(
        split_products, "applies", lambda matrix, tolerance: asked.append(tolerance)
    )
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)).eval()
    x = torch.randn(5, 1, 4, 4)
    kernel = linearize(network).kernel(0.5)
    for rough in (kernel.within(1e-3), linearize(network).trace_kernel(0.5).within(1e-3)):
        asked.clear()
        rough(x)
        assert asked
        assert set(asked) == {1e-3}
    asked.clear()
    kernel(x)
    assert set(asked) == {0.0}


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), "high"])
def test_a_tolerance_is_a_number_that_is_not_negative(wrong):
    kernel = linearize(nn.Linear(2, 1).eval()).kernel()
    with pytest.raises(InputError, match="tolerance must be"):
        kernel.within(wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [*SIZES, (900, 3000, 700)])
def test_a_gpu_multiplies_in_parts_where_the_error_is_allowed(sizes):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    A, B = (side.cuda() for side in matrices(*sizes))
    exact, scale = A.double() @ B.double(), A.abs().double() @ B.abs().double()
    found = product(A, B, 1e-4)
    assert found.dtype == torch.float32
    assert ((found - exact).abs() <= SPLIT_ERROR * scale).all()
    K = torch.full_like(found, 2.0)
    add_product(K, A, B, 1e-4)
    torch.testing.assert_close(K, found + 2, rtol=1e-6, atol=1e-5 * float(scale.max()))


@pytest.mark.gpu
def test_a_kernel_on_a_gpu_keeps_its_tolerance():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    network, x = network.eval().cuda(), torch.randn(60, 3, 8, 8, device="cuda")
    kernel = linearize(network).kernel()
    exact = kernel.precise()(x)
    scale = exact.diagonal().sqrt()
    error = (kernel.within(1e-4)(x) - exact).abs() / scale / scale[:, None]
    assert float(error.max()) < 1e-4
