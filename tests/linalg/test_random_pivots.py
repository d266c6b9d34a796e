"""Cholesky factors with random pivots, and preconditioners of high rank that are made of them."""

import pytest
import torch

from net2gp import RBF
from net2gp.errors import InputError
from net2gp.linalg import block_cg, pivoted_cholesky
from net2gp.linalg.large import FactorPlusIdentity, random_pivots


def matrix(n=300, lengthscale=1.0, columns=2):
    x = torch.randn(n, columns, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return RBF(lengthscale)(x)


def factor(K, rank, seed=0, **options):
    return random_pivots(
        K.diagonal(),
        lambda i: K[:, i],
        lambda i: K[i][:, i],
        rank,
        generator=torch.Generator().manual_seed(seed),
        **options,
    )


@pytest.mark.parametrize("block", [1, 7, 64])
def test_the_remainder_is_positive_semi_definite_and_its_diagonal_is_known(block):
    K = matrix()
    found = factor(K, 40, block=block)
    left = K - found.L @ found.L.mT
    assert torch.linalg.eigvalsh(left).min() > -1e-9
    torch.testing.assert_close(found.remaining, left.diagonal(), rtol=0, atol=1e-9)
    assert len(found.index.unique()) == found.L.shape[1] == 40


def test_rows_of_pivots_are_the_cholesky_factor_among_them():
    K = matrix()
    found = factor(K, 30)
    expected = torch.linalg.cholesky(K[found.index][:, found.index])
    torch.testing.assert_close(found.L[found.index], expected, rtol=1e-6, atol=1e-6)


def test_full_rank_is_exact():
    K = matrix(50, lengthscale=0.2)
    found = factor(K, 50, block=8)
    torch.testing.assert_close(found.L @ found.L.mT, K, rtol=0, atol=1e-8)


def test_a_matrix_of_low_rank_ends_the_search():
    A = torch.randn(100, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = factor(A @ A.mT, 50)
    assert found.L.shape[1] <= 4
    torch.testing.assert_close(found.L @ found.L.mT, A @ A.mT, rtol=0, atol=1e-6)


def test_blocks_do_not_change_the_law_of_the_second_pivot():
    K = matrix(4, lengthscale=2.0)
    chosen = {
        block: torch.bincount(
            torch.stack([factor(K, 2, seed, block=block).index[1] for seed in range(2000)]),
            minlength=4,
        )
        / 2000
        for block in (1, 16)
    }
    # The exact law: first pivots in proportion to the diagonal, then to what remains of it.
    expected = torch.zeros(4, dtype=torch.float64)
    for first in range(4):
        left = (K.diagonal() - K[:, first].square() / K[first, first]).clamp(min=0)
        expected += K[first, first] / K.trace() * left / left.sum()
    for block in (1, 16):
        torch.testing.assert_close(chosen[block].double(), expected, rtol=0, atol=0.045)


def test_the_trace_that_is_left_is_close_to_that_of_the_best_approximation():
    K = matrix(400)
    rank = 40
    best = float(torch.linalg.eigvalsh(K).flip(0)[rank:].sum())
    lefts = [float(factor(K, 2 * rank, seed).remaining.sum()) for seed in range(5)]
    assert max(lefts) < best


def test_random_pivots_resist_outliers_that_mislead_greedy_ones():
    K = torch.block_diag(matrix(300, 0.7), 1.01 * torch.eye(60, dtype=torch.float64))
    greedy = pivoted_cholesky(K.diagonal(), lambda i: K[:, i], 60, block=1)
    left = float(K.trace() - greedy.square().sum())
    assert float(factor(K, 60).remaining.sum()) < 0.8 * left


def test_a_factor_in_float32_is_right_to_its_rounding():
    K = matrix()
    found = factor(K, 60, dtype=torch.float32)
    assert found.L.dtype == torch.float32
    left = K - found.L.double() @ found.L.double().mT
    torch.testing.assert_close(found.remaining, left.diagonal(), rtol=0, atol=1e-4)


def test_same_seed_same_pivots():
    assert torch.equal(factor(matrix(), 20, 3).index, factor(matrix(), 20, 3).index)
    assert not torch.equal(factor(matrix(), 20, 3).index, factor(matrix(), 20, 4).index)


def test_rows_with_infinite_entries_are_named():
    K = matrix(20)
    K[7, 7] = torch.inf
    with pytest.raises(
        InputError, match=r"entries must be finite, but are NaN or infinite in row 7\."
    ):
        factor(K, 5)
    K = matrix(20)
    K[3, :] = K[:, 3] = torch.nan
    K[3, 3] = 1.0
    with pytest.raises(InputError, match="NaN or infinite in"):
        factor(K, 20)


def test_rank_and_block_are_positive():
    with pytest.raises(InputError, match="at least 1, but rank=0"):
        factor(matrix(5), 0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("noise", [1.0, 1e-3])
def test_the_preconditioner_is_the_inverse_of_identity_plus_factor(dtype, noise):
    L = (factor(matrix() / noise, 80).L).to(dtype)
    M = torch.eye(300, dtype=torch.float64) + L.double() @ L.double().mT
    found = FactorPlusIdentity.from_factor(L)
    eye = torch.eye(300, dtype=torch.float64)
    R, Rt = found.inverse_sqrt(eye), found.inverse_sqrt_transposed(eye)
    torch.testing.assert_close(Rt, R.mT)
    torch.testing.assert_close(Rt @ R @ M, eye, rtol=0, atol=1e-7)
    torch.testing.assert_close(found.log_det(), torch.logdet(M), rtol=1e-9, atol=1e-9)


def test_dependent_columns_do_not_spoil_the_preconditioner():
    L = factor(matrix(), 20).L
    twice = FactorPlusIdentity.from_factor(torch.cat([L, L], 1))
    M = torch.eye(300, dtype=torch.float64) + 2 * L @ L.mT
    R = twice.inverse_sqrt(torch.eye(300, dtype=torch.float64))
    torch.testing.assert_close(R.mT @ R @ M, torch.eye(300).double(), rtol=0, atol=1e-6)


def test_conjugate_gradients_take_fewer_iterations_with_a_higher_rank():
    K = matrix(lengthscale=0.5) / 1e-3
    b = torch.ones(300, 2, dtype=torch.float64)
    b[::2, 1] = -1
    A = lambda v: v + K @ v
    counts = []
    for rank in (5, 50, 200):
        M = FactorPlusIdentity.from_factor(factor(K, rank).L)
        solution = block_cg(A, b, preconditioner=M, tol=1e-10)
        assert solution.converged
        torch.testing.assert_close(A(solution.x), b, rtol=0, atol=1e-8)
        counts.append(solution.iterations)
    assert counts[0] > 2 * counts[1] > 4 * counts[2]
