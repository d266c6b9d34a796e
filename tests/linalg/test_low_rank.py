from __future__ import annotations

import pytest
import torch
from torch import Tensor

from net2gp.errors import InputError
from net2gp.linalg import LowRankPlusIdentity, nystrom, pivoted_cholesky, pivots, psd_eigen
from net2gp.linalg.low_rank import orthonormal

NUM = 120


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def kernel(n: int = NUM, lengthscale: float = 0.3) -> Tensor:
    x = torch.rand(n, 2, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return torch.exp(-0.5 * (torch.cdist(x, x) / lengthscale) ** 2)


def pivoted(K: Tensor, rank: int, **options: float) -> Tensor:
    return pivoted_cholesky(K.diagonal(), lambda i: K[:, i], rank, **options)  # type: ignore[arg-type]


def eye(n: int) -> Tensor:
    return torch.eye(n, dtype=torch.float64)


@pytest.mark.parametrize("block", [1, 5])
def test_pivoted_cholesky_at_full_rank_is_exact(block: int) -> None:
    factor = random(30, 30)
    K = factor @ factor.mT + eye(30)
    L = pivoted(K, 30, block=block)
    assert L.shape == (30, 30)
    torch.testing.assert_close(L @ L.mT, K)


@pytest.mark.parametrize("block", [1, 4, 200])
def test_pivoted_cholesky_lies_below_the_matrix_and_improves_with_rank(block: int) -> None:
    K = kernel()
    errors = []
    for rank in (5, 10, 20, 40):
        L = pivoted(K, rank, block=block)
        assert L.shape == (NUM, rank)
        assert float(torch.linalg.eigvalsh(K - L @ L.mT).min()) > -1e-12
        errors.append(float(K.trace() - L.square().sum()))
    assert errors == sorted(errors, reverse=True)


def test_pivoted_cholesky_of_low_rank_finds_the_rank_and_stops() -> None:
    factor = random(NUM, 7)
    for block in (1, 3):
        L = pivoted(factor @ factor.mT, 50, block=block)
        assert L.shape[1] == 7
        torch.testing.assert_close(L @ L.mT, factor @ factor.mT)


@pytest.mark.parametrize("block", [1, 6])
def test_pivoted_cholesky_stops_at_the_tolerance_on_the_trace(block: int) -> None:
    K = kernel()
    L = pivoted(K, NUM, block=block, tol=1e-3)
    left = [float(K.trace() - L[:, :r].square().sum()) for r in (L.shape[1] - block, L.shape[1])]
    assert left[1] <= 1e-3 * NUM < left[0]


def test_greedy_pivots_are_the_largest_remaining_diagonal_entries() -> None:
    K = kernel()
    asked: list[int] = []

    def columns(indices: Tensor) -> Tensor:
        asked.extend(indices.tolist())
        return K[:, indices]

    L = pivoted_cholesky(K.diagonal(), columns, 12)
    for step, pivot in enumerate(asked):
        remaining = K.diagonal() - L[:, :step].square().sum(1)
        assert float(remaining[pivot]) == pytest.approx(float(remaining.max()))
    assert len(set(asked)) == 12


def test_blocks_of_candidates_cost_little_quality_and_few_calls() -> None:
    K = kernel(lengthscale=0.15)
    calls: list[int] = []

    def columns(indices: Tensor) -> Tensor:
        calls.append(len(indices))
        return K[:, indices]

    blocked = pivoted_cholesky(K.diagonal(), columns, 40, block=8)
    greedy = pivoted(K, 40)
    assert len(calls) < 25
    assert K.trace() - blocked.square().sum() < 1.5 * (K.trace() - greedy.square().sum())


def test_duplicated_points_are_used_once() -> None:
    K = kernel(10)
    index = torch.arange(10).repeat(3)
    K = K[index][:, index]
    for block in (1, 7):
        L = pivoted(K, 30, block=block)
        assert L.shape[1] <= 10
        torch.testing.assert_close(L @ L.mT, K, rtol=0, atol=1e-7)


def test_pivoted_cholesky_of_float32_columns_stops_at_float32_rounding() -> None:
    K = kernel()
    L = pivoted(K.float(), NUM)
    assert L.dtype == torch.float64
    assert L.shape[1] < NUM
    torch.testing.assert_close(L @ L.mT, K, rtol=0, atol=1e-4)


def test_rank_zero_and_the_zero_matrix_give_no_columns() -> None:
    assert pivoted(kernel(), 0).shape == (NUM, 0)
    assert pivoted(torch.zeros(4, 4), 3).shape == (4, 0)
    with pytest.raises(InputError, match="rank=-1 and block=1"):
        pivoted(kernel(), -1)


def test_nystrom_lies_below_the_matrix_and_improves_with_rank() -> None:
    K = kernel()
    errors = []
    for rank in (5, 10, 20, 40):
        U, values = nystrom(lambda v: K @ v, NUM, rank, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(U.mT @ U, eye(rank))
        assert bool((values >= 0).all())
        assert bool((values.diff() <= 0).all())
        assert float(torch.linalg.eigvalsh(K - U * values @ U.mT).min()) > -1e-11
        errors.append(float(torch.linalg.matrix_norm(K - U * values @ U.mT, 2)))
    assert errors == sorted(errors, reverse=True)
    exact = torch.linalg.eigvalsh(K).flip(0)
    assert errors[-1] < 30 * float(exact[40])


def test_nystrom_of_a_matrix_of_lower_rank_is_exact() -> None:
    factor = random(NUM, 6)
    A = factor @ factor.mT
    U, values = nystrom(lambda v: A @ v, NUM, 15, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(U * values @ U.mT, A, rtol=1e-9, atol=1e-9)
    assert float(values[6:].max()) < 1e-9


def test_nystrom_of_the_zero_matrix_is_zero() -> None:
    U, values = nystrom(torch.zeros_like, 10, 3)
    assert float((U * values @ U.mT).abs().sum()) == 0.0


def test_nystrom_passes_its_dtype_on_and_survives_float32() -> None:
    K = kernel().float()
    seen: list[torch.dtype] = []

    def matmul(v: Tensor) -> Tensor:
        seen.append(v.dtype)
        return K @ v

    U, values = nystrom(
        matmul, NUM, 60, generator=torch.Generator().manual_seed(0), dtype=torch.float32
    )
    assert seen == [torch.float32]
    assert U.dtype == values.dtype == torch.float64
    torch.testing.assert_close(U * values @ U.mT, K.double(), rtol=0, atol=5e-3)


def test_nystrom_is_repeated_by_its_generator() -> None:
    K = kernel()
    first, second = (
        nystrom(lambda v: K @ v, NUM, 8, generator=torch.Generator().manual_seed(3))
        for _ in range(2)
    )
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_a_rank_beyond_the_size_is_an_input_error() -> None:
    with pytest.raises(InputError, match="between 1 and n = 4, but is 5"):
        nystrom(lambda v: v, 4, 5)


@pytest.mark.parametrize("shape", [(20, 4), (4, 20)])
def test_low_rank_plus_identity_is_the_dense_matrix(shape: tuple[int, int]) -> None:
    L = 3 * random(*shape)
    n = shape[0]
    dense = eye(n) + L @ L.mT
    matrix = LowRankPlusIdentity.from_factor(L)
    v = random(n, 2, seed=1)
    torch.testing.assert_close(matrix.matmul(v), dense @ v)
    torch.testing.assert_close(matrix.inverse(v), torch.linalg.solve(dense, v))
    torch.testing.assert_close(matrix.log_det(), torch.logdet(dense))
    torch.testing.assert_close(matrix.inverse(v[:, 0]), matrix.inverse(v)[:, 0])


def test_the_inverse_root_is_symmetric_positive_and_squares_to_the_inverse() -> None:
    matrix = LowRankPlusIdentity.from_factor(3 * random(20, 4))
    root = matrix.inverse_sqrt(eye(20))
    torch.testing.assert_close(root, root.mT)
    torch.testing.assert_close(root @ root, matrix.inverse(eye(20)))
    assert float(torch.linalg.eigvalsh(root).min()) > 0


@pytest.mark.parametrize("scale", [1e-9, 1e9])
def test_low_rank_plus_identity_is_exact_at_extreme_scales(scale: float) -> None:
    U = torch.linalg.qr(random(20, 2))[0]
    matrix = LowRankPlusIdentity.from_factor(scale * U)
    wanted = 1 / (1 + scale**2)
    torch.testing.assert_close(matrix.inverse(U), wanted * U, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(matrix.inverse_sqrt(U), wanted**0.5 * U, rtol=1e-6, atol=1e-14)
    log1p = torch.tensor(2.0, dtype=torch.float64) * torch.tensor(scale**2).double().log1p()
    torch.testing.assert_close(matrix.log_det(), log1p, rtol=1e-6, atol=0)


def test_a_float32_factor_does_not_round_a_float64_vector() -> None:
    U = torch.linalg.qr(random(20, 2))[0]
    matrix = LowRankPlusIdentity(U.float(), torch.tensor([3.0, 1.0]))
    v = random(20, 1, seed=2)
    v = v - U @ (U.mT @ v)
    assert matrix.inverse(v).dtype == torch.float64
    torch.testing.assert_close(matrix.inverse(v), v, rtol=0, atol=1e-6)


@pytest.mark.parametrize("n", [40, 4000], ids=["reflections", "products"])
def test_nystrom_of_a_tall_matrix_has_the_largest_eigenvalues(n: int) -> None:
    """Ten eigenvalues over twelve decades: those above the rounding of the largest come back."""
    generator = torch.Generator().manual_seed(0)
    B = torch.linalg.qr(torch.randn(n, 10, dtype=torch.float64, generator=generator)).Q
    true = torch.logspace(0, -12, 10, dtype=torch.float64)
    U, values = nystrom(lambda v: B @ (true[:, None] * (B.mT @ v)), n, 20, generator=generator)
    torch.testing.assert_close(U.mT @ U, torch.eye(U.shape[1]).double(), rtol=0, atol=1e-12)
    torch.testing.assert_close(values[:7], true[:7], rtol=1e-3, atol=0)
    A = B * true @ B.mT
    torch.testing.assert_close(U * values @ U.mT, A, rtol=0, atol=1e-9)


@pytest.mark.parametrize("n", [30, 3000])
def test_an_orthonormal_basis_spans_the_columns(n: int) -> None:
    columns = torch.randn(n, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    Q = orthonormal(columns)
    torch.testing.assert_close(Q.mT @ Q, torch.eye(12).double(), rtol=0, atol=1e-13)
    torch.testing.assert_close(Q @ (Q.mT @ columns), columns, rtol=0, atol=1e-12)


def test_dependent_columns_fall_back_to_reflections() -> None:
    columns = torch.ones(600, 3, dtype=torch.float64)
    Q = orthonormal(columns)
    torch.testing.assert_close(Q.mT @ Q, torch.eye(3).double(), rtol=0, atol=1e-13)


@pytest.mark.parametrize("block", [1, 7, 200])
def test_pivots_stop_where_every_entry_that_remains_is_small_enough(block: int) -> None:
    K = kernel()
    found = pivots(K.diagonal(), lambda i: K[:, i], NUM, block=block, largest=1e-4)
    rest = K - found.L @ found.L.mT
    assert 0 < len(found.index) < NUM
    assert float(rest.diagonal().max()) <= 1e-4
    torch.testing.assert_close(found.remaining, rest.diagonal(), rtol=0, atol=1e-12)
    own = found.L[found.index]
    torch.testing.assert_close(own, own.tril(), rtol=0, atol=1e-7)
    torch.testing.assert_close(own @ own.mT, K[found.index][:, found.index])


def test_a_block_of_pivots_needs_few_more_than_the_greedy_rule() -> None:
    K = kernel(lengthscale=0.1)
    sizes = [
        len(pivots(K.diagonal(), lambda i: K[:, i], NUM, block=b, largest=1e-2).index)
        for b in (1, 32)
    ]
    assert sizes[1] <= 1.15 * sizes[0]


@pytest.mark.parametrize("rank", [0, 1, 7, 20, 60])
def test_eigenvectors_of_low_rank_are_those_of_the_matrix(rank, monkeypatch):
    monkeypatch.setattr("net2gp.linalg.low_rank.LARGE", 16)
    n, generator = 64, torch.Generator().manual_seed(rank)
    root = torch.randn(n, rank, generator=generator, dtype=torch.float64)
    root = root * torch.logspace(0, -6, max(rank, 1), dtype=torch.float64)[:rank]
    A = root @ root.mT
    values, Q = psd_eigen(A)
    assert bool((values.diff() >= 0).all())
    torch.testing.assert_close(values, torch.linalg.eigvalsh(A), rtol=1e-9, atol=1e-13)
    torch.testing.assert_close(Q.mT @ Q, torch.eye(n, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(Q @ torch.diag(values) @ Q.mT, A, rtol=0, atol=1e-12)
