from __future__ import annotations

import pytest
import torch
from torch import Tensor

from net2gp.errors import InputError, NotPositiveDefinite
from net2gp.linalg import (
    add_blocks,
    block_matmul,
    diagonal_blocks,
    kron_identity,
    psd_root,
    softmax_root,
    symmetric_eigen,
    symmetric_root,
)

N, C = 4, 3


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def softmax_curvature(num: int = N, classes: int = C) -> Tensor:
    p = random(num, classes).softmax(-1)
    return torch.diag_embed(p) - p[:, :, None] * p[:, None, :]


def test_block_matmul_is_multiplication_by_the_block_diagonal_matrix() -> None:
    blocks, v = random(N, C, C), random(N * C, 5, seed=1)
    torch.testing.assert_close(block_matmul(blocks, v), torch.block_diag(*blocks) @ v)


def test_add_blocks_is_adding_the_block_diagonal_matrix_and_leaves_both_alone() -> None:
    K, blocks = random(N * C, N * C), random(N, C, C, seed=1)
    before = K.clone(), blocks.clone()
    torch.testing.assert_close(add_blocks(K, blocks), K + torch.block_diag(*blocks))
    assert torch.equal(K, before[0])
    assert torch.equal(blocks, before[1])
    torch.testing.assert_close(add_blocks(K.mT, blocks), K.mT + torch.block_diag(*blocks))


def test_add_blocks_keeps_the_more_precise_dtype() -> None:
    assert add_blocks(torch.zeros(2, 2), torch.ones(2, 1, 1).double()).dtype == torch.float64
    assert add_blocks(torch.zeros(2, 2).double(), torch.ones(2, 1, 1)).dtype == torch.float64


def test_block_operations_have_the_right_gradients() -> None:
    K = random(4, 4).requires_grad_()
    blocks = random(2, 2, 2, seed=1).requires_grad_()
    v = random(4, 2, seed=2).requires_grad_()
    assert torch.autograd.gradcheck(add_blocks, (K, blocks))
    assert torch.autograd.gradcheck(block_matmul, (blocks, v))
    assert torch.autograd.gradcheck(lambda K: kron_identity(K, 2), (K,))
    assert torch.autograd.gradcheck(lambda K: diagonal_blocks(K, 2), (K,))


@pytest.mark.parametrize("transposed", [False, True])
def test_diagonal_blocks_take_out_what_add_blocks_puts_in(transposed: bool) -> None:
    blocks = random(N, C, C)
    K = torch.block_diag(*blocks)
    out = diagonal_blocks(K.mT if transposed else K, C)
    assert torch.equal(out, blocks.mT if transposed else blocks)
    assert out.untyped_storage().nbytes() == N * C * C * 8
    zero = torch.zeros(N * C, N * C, dtype=torch.float64)
    assert torch.equal(diagonal_blocks(add_blocks(zero, blocks), C), blocks)


def test_kron_identity_is_the_kronecker_product() -> None:
    K = random(4, 2)
    assert torch.equal(kron_identity(K, C), torch.kron(K, torch.eye(C, dtype=torch.float64)))
    assert torch.equal(kron_identity(K, 1), K)


def test_kron_identity_acts_on_each_output_alone() -> None:
    K, f = random(N, N), random(N, C, seed=1)
    torch.testing.assert_close((kron_identity(K, C) @ f.reshape(-1)).reshape(N, C), K @ f)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_root_multiplies_back_and_is_symmetric(size: int) -> None:
    factor = random(N, size, size)
    blocks = factor @ factor.mT
    S = psd_root(blocks)
    torch.testing.assert_close(S @ S.mT, blocks)
    torch.testing.assert_close(S, S.mT)


def test_the_root_of_a_softmax_curvature_is_exact_and_keeps_its_null_space() -> None:
    blocks = softmax_curvature()
    S = psd_root(blocks)
    torch.testing.assert_close(S @ S.mT, blocks, rtol=0, atol=1e-15)
    torch.testing.assert_close(
        S.sum(-1), torch.zeros(N, C, dtype=torch.float64), rtol=0, atol=1e-15
    )


@pytest.mark.parametrize("p", [1e-12, 1e-200, 0.0])
def test_the_root_of_a_tiny_singular_block_is_exact(p: float) -> None:
    block = p * torch.tensor([[1.0, -1.0, 0.0], [-1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]).double()
    S = psd_root(block[None])[0]
    torch.testing.assert_close(S @ S.mT, block, rtol=1e-14, atol=1e-15 * p)


def test_a_saturated_float32_softmax_has_a_root_up_to_rounding() -> None:
    p = torch.tensor([[25.0, 0.0, 1.0], [17.0, 0.0, 0.0], [200.0, 0.0, 0.0]]).softmax(-1)
    blocks = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    assert float(torch.linalg.eigvalsh(blocks.double()).min()) < 0
    S = psd_root(blocks)
    torch.testing.assert_close(S @ S.mT, blocks.double(), rtol=0, atol=1e-7)


def test_float32_blocks_have_float64_roots_without_noise_from_rounding() -> None:
    blocks = softmax_curvature().float()
    S = psd_root(blocks)
    assert S.dtype == torch.float64
    torch.testing.assert_close(S @ S.mT, blocks.double(), rtol=0, atol=2e-7)
    assert float(S.sum(-1).abs().max()) < 1e-6


def test_the_root_of_one_by_one_blocks_is_the_square_root() -> None:
    values = torch.tensor([0.0, 1e-30, 4.0], dtype=torch.float64)
    assert torch.equal(psd_root(values.reshape(3, 1, 1)).flatten(), values.sqrt())


def test_the_root_of_one_by_one_blocks_has_a_finite_gradient_at_zero() -> None:
    values = torch.tensor([0.0, 4.0], dtype=torch.float64, requires_grad=True)
    psd_root(values.reshape(2, 1, 1)).sum().backward()
    torch.testing.assert_close(values.grad, torch.tensor([0.0, 0.25], dtype=torch.float64))


@pytest.mark.parametrize("size", [1, 2])
def test_a_negative_block_has_no_root(size: int) -> None:
    blocks = torch.eye(size).repeat(3, 1, 1)
    blocks[2, 0, 0] = -0.5
    with pytest.raises(NotPositiveDefinite, match=r"block 2 has the eigenvalue -0\.5"):
        psd_root(blocks)


def test_wrong_shapes_are_input_errors_that_name_the_right_ones() -> None:
    with pytest.raises(InputError, match=r"v of shape \(12, k\), but v has shape \(4, 3\)"):
        block_matmul(torch.zeros(N, C, C), torch.zeros(N, C))
    with pytest.raises(InputError, match=r"pass kron_identity\(K, 3\)"):
        add_blocks(torch.zeros(N, N), torch.zeros(N, C, C))
    with pytest.raises(InputError, match=r"multiple of C = 3 rows, but has shape \(4, 4\)"):
        diagonal_blocks(torch.zeros(4, 4), 3)
    with pytest.raises(InputError, match=r"shape \(N, C, C\), but have shape \(2, 3\)"):
        psd_root(torch.zeros(2, 3))
    with pytest.raises(InputError, match=r"shape \(N, C, C\), but have shape \(2, 3\)"):
        add_blocks(torch.zeros(6, 6), torch.zeros(2, 3))


@pytest.mark.parametrize("scale", [0.1, 3.0, 40.0, 400.0])
def test_the_root_of_a_softmax_is_one_at_any_certainty(scale):
    generator = torch.Generator().manual_seed(0)
    f = scale * torch.randn(50, 6, generator=generator, dtype=torch.float64)
    p = f.softmax(-1)
    R = softmax_root(p)
    # 1 − p_i by the others, which has all of its digits where p_i is nearly one
    rest = torch.stack([p[:, [k for k in range(6) if k != i]].sum(1) for i in range(6)], 1)
    expected = -p[:, :, None] * p[:, None, :]
    expected.diagonal(dim1=1, dim2=2).copy_(p * rest)
    assert R.shape == (50, 6, 5)
    size = expected.diagonal(dim1=1, dim2=2).sqrt()
    error = (R @ R.mT - expected).abs() / (size[:, :, None] * size[:, None, :] + 1e-290)
    assert error.max() < 1e-14


def test_the_root_of_a_single_class_is_zero():
    assert softmax_root(torch.ones(3, 1)).tolist() == [[[0.0]]] * 3


def test_the_symmetric_root_has_gradients_at_equal_eigenvalues_and_at_singular_matrices() -> None:
    factor = random(2, 4, 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda f: symmetric_root(f @ f.mT), (factor,))
    move = torch.zeros(3, 3, dtype=torch.float64, requires_grad=True)
    equal = 2 * torch.eye(3, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda m: symmetric_root(equal + m + m.mT), (move,))
    A = random(4, 4)
    S = symmetric_root(A @ A.mT)
    torch.testing.assert_close(S @ S, A @ A.mT)
    torch.testing.assert_close(S, S.mT)


def test_eigenvalues_are_found_where_divide_and_conquer_fails(monkeypatch):
    def fails(A):
        raise RuntimeError("the algorithm failed to converge")

    A = torch.randn(6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    A = A @ A.mT
    expected = symmetric_eigen(A)[0]
    monkeypatch.setattr(torch.linalg, "eigh", fails)
    values, Q = symmetric_eigen(A)
    torch.testing.assert_close(values, expected)
    torch.testing.assert_close(Q @ torch.diag(values) @ Q.mT, A)
