from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from net2gp.errors import InputError, NotPositiveDefinite
from net2gp.linalg import inverse_root, lanczos, log_det_quadrature

NUM = 150


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def noisy(noise_var: float, n: int = NUM) -> Tensor:
    x = torch.rand(n, 2, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    K = torch.exp(-0.5 * (torch.cdist(x, x) / 0.3) ** 2)
    return K + noise_var * torch.eye(n, dtype=torch.float64)


def times(A: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda v: A @ v


@pytest.mark.parametrize("noise_var", [1e-6, 1.0])
def test_the_basis_is_orthonormal_and_compresses_the_matrix_to_a_tridiagonal(
    noise_var: float,
) -> None:
    A, start = noisy(noise_var), random(NUM)
    result = lanczos(times(A), start, 40)
    Q, T = result.Q, result.T
    torch.testing.assert_close(Q.mT @ Q, torch.eye(40, dtype=torch.float64), rtol=0, atol=1e-13)
    torch.testing.assert_close(Q.mT @ A @ Q, T, rtol=0, atol=1e-12)
    assert not T.triu(2).any()
    assert not T.tril(-2).any()
    torch.testing.assert_close(Q[:, 0], start / torch.linalg.vector_norm(start))


def test_the_first_basis_vectors_span_the_krylov_space() -> None:
    A, start = noisy(0.1), random(NUM)
    Q = lanczos(times(A), start, 4).Q
    for power in (start, A @ start, A @ A @ start, A @ A @ A @ start):
        torch.testing.assert_close(Q @ (Q.mT @ power), power)


def test_full_rank_recovers_the_spectrum() -> None:
    A = torch.diag(torch.linspace(1, 5, 12, dtype=torch.float64))
    T = lanczos(times(A), torch.ones(12, dtype=torch.float64), 12).T
    torch.testing.assert_close(torch.linalg.eigvalsh(T), A.diagonal())


@pytest.mark.parametrize("distinct", [1, 3])
def test_an_exhausted_space_stops_early_with_as_many_columns_as_distinct_eigenvalues(
    distinct: int,
) -> None:
    values = torch.arange(1.0, distinct + 1, dtype=torch.float64)
    A = torch.diag(values.repeat(6))
    result = lanczos(times(A), random(6 * distinct), 10)
    assert result.Q.shape == (6 * distinct, distinct)
    torch.testing.assert_close(torch.linalg.eigvalsh(result.T), values)


def test_a_rank_beyond_the_size_is_the_size() -> None:
    assert lanczos(times(noisy(0.1, 8)), random(8), 20).Q.shape[1] <= 8


def test_float32_products_stop_at_float32_rounding() -> None:
    A = torch.diag(torch.tensor([1.0, 2.0, 3.0]).repeat(10))
    result = lanczos(times(A), random(30).float(), 12)
    assert result.T.shape == (3, 3)
    assert result.Q.dtype == torch.float64


def test_a_zero_start_or_rank_is_an_input_error() -> None:
    with pytest.raises(InputError, match="not zero, but has shape"):
        lanczos(times(noisy(0.1, 4)), torch.zeros(4), 2)
    with pytest.raises(InputError, match="rank must be at least 1, but is 0"):
        lanczos(times(noisy(0.1, 4)), torch.ones(4).double(), 0)


def test_the_inverse_root_squares_to_the_compressed_inverse() -> None:
    result = lanczos(times(noisy(0.1)), random(NUM), 20)
    R = inverse_root(result)
    wanted = result.Q @ torch.linalg.inv(result.T) @ result.Q.mT
    torch.testing.assert_close(R @ R.mT, wanted)


def test_cached_inverses_stay_below_the_inverse_and_grow_with_rank() -> None:
    A, start = noisy(0.1), random(NUM)
    inverse = torch.linalg.inv(A)
    before = torch.zeros_like(A)
    for rank in (1, 3, 10, 30, 60):
        R = inverse_root(lanczos(times(A), start, rank))
        cached = R @ R.mT
        assert float(torch.linalg.eigvalsh(inverse - cached).min()) > -1e-11
        assert float(torch.linalg.eigvalsh(cached - before).min()) > -1e-11
        before = cached


def test_the_cached_inverse_is_exact_on_the_vector_it_started_from() -> None:
    A, start = noisy(0.1), random(NUM)
    R = inverse_root(lanczos(times(A), start, 70))
    torch.testing.assert_close(R @ (R.mT @ start), torch.linalg.solve(A, start), rtol=0, atol=1e-8)


def test_an_indefinite_matrix_has_no_inverse_root() -> None:
    A = noisy(0.1) - 2.0 * torch.eye(NUM, dtype=torch.float64)
    with pytest.raises(NotPositiveDefinite, match="the Lanczos matrix"):
        inverse_root(lanczos(times(A), random(NUM), 20))


def test_the_log_determinant_estimate_is_right_within_its_standard_error() -> None:
    A = noisy(0.1)
    generator = torch.Generator().manual_seed(0)
    estimate, error = log_det_quadrature(times(A), NUM, num_probes=64, generator=generator)
    exact = torch.logdet(A)
    assert abs(estimate - exact) < 4 * error
    assert error < 0.05 * abs(exact)


def test_the_standard_error_is_honest_over_repetitions() -> None:
    A = noisy(0.1, 40)
    exact = torch.logdet(A)
    generator = torch.Generator().manual_seed(1)
    scores = []
    for _ in range(60):
        estimate, error = log_det_quadrature(times(A), 40, num_probes=16, generator=generator)
        scores.append((estimate - exact) / error)
    z = torch.stack(scores)
    # Student's t with 15 degrees of freedom has standard deviation 1.07; 60 draws of it.
    assert 0.8 < float(z.std()) < 1.4
    assert abs(float(z.mean())) < 0.5


def test_the_quadrature_is_exact_for_a_diagonal_matrix() -> None:
    # For random signs and diagonal A, zᵀ log(A) z = tr log A whatever z is.
    A = torch.diag(torch.linspace(1, 50, 20, dtype=torch.float64))
    estimate, error = log_det_quadrature(times(A), 20, num_probes=3)
    torch.testing.assert_close(estimate, torch.logdet(A))
    assert float(error) < 1e-10


def test_probes_whose_spaces_end_at_different_steps_are_all_right() -> None:
    # Signs that are constant on the first block stay in fewer dimensions than the others.
    A = torch.block_diag(2 * torch.ones(2, 2), 5 * torch.ones(2, 2)).double()
    A = A + torch.eye(4, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    estimate, error = log_det_quadrature(times(A), 4, num_probes=4000, rank=4, generator=generator)
    assert abs(estimate - torch.logdet(A)) < 4 * error


def test_splitting_the_probes_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    A = noisy(0.1)
    widths: list[int] = []

    def matmul(v: Tensor) -> Tensor:
        widths.append(v.shape[1])
        return A @ v

    def estimate() -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        return log_det_quadrature(matmul, NUM, num_probes=5, rank=10, generator=generator)

    together = estimate()
    assert set(widths) == {5}
    widths.clear()
    # The package exports a function of the same name as the module.
    module = importlib.import_module("net2gp.linalg.lanczos")
    monkeypatch.setattr(module, "_PROBE_BYTES", 2 * 8 * NUM * 10)
    torch.testing.assert_close(estimate(), together)
    assert set(widths) == {1, 2}


def test_quadrature_works_in_the_dtype_of_the_products() -> None:
    A = noisy(0.5).float()
    generator = torch.Generator().manual_seed(0)
    estimate, error = log_det_quadrature(
        times(A), NUM, num_probes=64, generator=generator, dtype=torch.float32
    )
    assert estimate.dtype == torch.float64
    assert abs(estimate - torch.logdet(A.double())) < 4 * error


def test_the_log_determinant_of_an_indefinite_matrix_is_refused() -> None:
    A = noisy(0.1) - 2.0 * torch.eye(NUM, dtype=torch.float64)
    with pytest.raises(NotPositiveDefinite, match=r"a Lanczos eigenvalue is -.*Raise noise_var"):
        log_det_quadrature(times(A), NUM)


def test_one_probe_has_no_standard_error() -> None:
    with pytest.raises(InputError, match=r"num_probes must be at least 2.*but is 1"):
        log_det_quadrature(times(noisy(0.1, 4)), 4, num_probes=1)


@pytest.mark.parametrize("rank", [5, 12, 20])
def test_restarts_complete_the_basis_where_eigenvalues_repeat(rank: int) -> None:
    rotation = torch.linalg.qr(random(12, 12))[0]
    values = torch.tensor([7.0, 7.0, 7.0, 2.0, 2.0, *[0.1] * 7], dtype=torch.float64)
    A = (rotation * values) @ rotation.mT
    found = lanczos(times(A), random(12, seed=1), rank, restart=torch.Generator().manual_seed(0))
    Q, size = found.Q, min(rank, 12)
    torch.testing.assert_close(Q.mT @ Q, torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-13)
    torch.testing.assert_close(Q.mT @ A @ Q, found.T, rtol=0, atol=1e-12)
    R = inverse_root(found)
    missed = torch.linalg.eigvalsh(A.inverse() - R @ R.mT)
    assert missed.min() > -1e-11
    assert (missed.max() < 1e-11) == (rank >= 12)
