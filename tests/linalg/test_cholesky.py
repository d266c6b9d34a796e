from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from net2gp.errors import InputError, JitterAdded, NotPositiveDefinite
from net2gp.linalg import Cholesky, cholesky


def spd(n: int, seed: int = 0, smallest: float = 0.1) -> Tensor:
    """A well-conditioned positive definite matrix with known spectrum."""
    generator = torch.Generator().manual_seed(seed)
    Q = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))[0]
    return symmetric(Q * torch.linspace(smallest, 2.0, n, dtype=torch.float64) @ Q.mT)


def symmetric(A: Tensor) -> Tensor:
    return 0.5 * (A + A.mT)


def smooth_kernel(n: int, lengthscale: float = 0.5) -> Tensor:
    """Squared exponential on a grid: eigenvalues far below rounding."""
    x = torch.linspace(0, 1, n, dtype=torch.float64)
    return torch.exp(-0.5 * ((x[:, None] - x) / lengthscale) ** 2)


def test_the_factor_is_lower_triangular_and_multiplies_back_to_the_matrix() -> None:
    A = spd(12)
    factor = cholesky(A)
    assert torch.equal(factor.L, factor.L.tril())
    torch.testing.assert_close(factor.L @ factor.L.mT, A, rtol=1e-13, atol=1e-13)
    assert factor.jitter == 0.0


@pytest.mark.parametrize("shape", [(12,), (12, 1), (12, 3)])
def test_solve_inverts_and_half_solve_whitens(shape: tuple[int, ...]) -> None:
    A = spd(12)
    b = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    factor = cholesky(A)
    torch.testing.assert_close(A @ factor.solve(b), b)
    torch.testing.assert_close(factor.L @ factor.half_solve(b), b)
    half = factor.half_solve(b)
    torch.testing.assert_close(half.square().sum(0), (b * torch.linalg.solve(A, b)).sum(0))


def test_log_det_is_the_sum_of_log_eigenvalues() -> None:
    A = spd(12)
    torch.testing.assert_close(cholesky(A).log_det(), torch.linalg.eigvalsh(A).log().sum())


def test_float32_is_factorized_and_solved_in_float64() -> None:
    A = spd(12).float()
    factor = cholesky(A)
    assert factor.L.dtype == torch.float64
    solved = factor.solve(torch.ones(12))
    assert solved.dtype == torch.float64
    torch.testing.assert_close(A.double() @ solved, torch.ones(12).double(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("singular", [False, True])
def test_the_matrix_is_left_alone(dtype: torch.dtype, singular: bool) -> None:
    A = (torch.ones(6, 6) if singular else spd(6)).to(dtype)
    before = A.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", JitterAdded)
        cholesky(A)
    assert torch.equal(A, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_gradients_one_buffer_of_the_size_of_the_matrix_is_allocated(
    dtype: torch.dtype,
) -> None:
    A = spd(20).to(dtype)
    with LargeStorages(A.numel()) as seen:
        factor = cholesky(A)
        factor.solve(torch.ones(20, 2))
        factor.log_det()
    assert seen.storages - {A.untyped_storage().data_ptr()} == {
        factor.L.untyped_storage().data_ptr()
    }
    assert factor.L.mT.is_contiguous()  # else LAPACK copies, where no dispatch mode sees it


class LargeStorages(TorchDispatchMode):
    """Records the storages of at least `size` elements that operations touch."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.storages: set[int] = set()
        self.alive: list[Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple) else (out,):
            if isinstance(value, Tensor) and value.numel() >= self.size:
                self.alive.append(value)
                self.storages.add(value.untyped_storage().data_ptr())
        return out


def test_the_log_determinant_has_the_right_gradient() -> None:
    root = torch.randn(5, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    root.requires_grad_()

    def log_det(r: Tensor) -> Tensor:
        return cholesky(r @ r.mT + torch.eye(5, dtype=torch.float64)).log_det()

    assert torch.autograd.gradcheck(log_det, (root,))
    A = spd(5).requires_grad_()
    cholesky(A).log_det().backward()
    torch.testing.assert_close(symmetric(A.grad), torch.linalg.inv(A.detach()))


def test_solves_and_extensions_have_the_right_gradient() -> None:
    generator = torch.Generator().manual_seed(3)
    root = torch.randn(5, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    b = torch.randn(5, 2, generator=generator, dtype=torch.float64, requires_grad=True)

    def quantities(r: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        A = r @ r.mT + torch.eye(5, dtype=torch.float64)
        factor = cholesky(A[:3, :3]).extend(A[:3, 3:], A[3:, 3:])
        return factor.solve(b), factor.half_solve(b)

    assert torch.autograd.gradcheck(quantities, (root, b))


def test_gradients_also_flow_when_jitter_was_needed() -> None:
    diagonal = torch.tensor([1.0, 2.0, -3e-7], dtype=torch.float64, requires_grad=True)
    with pytest.warns(JitterAdded):
        factor = cholesky(torch.diag(diagonal))
    factor.log_det().backward()
    # log |D + jI| = Σ log(d + j) with j held constant
    torch.testing.assert_close(diagonal.grad, 1 / (diagonal.detach() + factor.jitter))


@pytest.mark.parametrize("m", [1, 4])
@pytest.mark.parametrize("n", [0, 7])
def test_extending_a_factor_is_factorizing_the_whole(n: int, m: int) -> None:
    A = spd(n + m)
    extended = cholesky(A[:n, :n]).extend(A[:n, n:], A[n:, n:])
    torch.testing.assert_close(extended.L, cholesky(A).L, rtol=1e-12, atol=1e-12)
    assert extended.jitter == 0.0


def test_extending_by_nothing_changes_nothing() -> None:
    factor = cholesky(spd(4))
    extended = factor.extend(torch.zeros(4, 0), torch.zeros(0, 0))
    assert torch.equal(extended.L, factor.L)


def test_extending_by_a_duplicated_point_adds_jitter_relative_to_the_block_and_says_so() -> None:
    A = spd(4)
    with pytest.warns(JitterAdded, match="Schur complement of the new rows"):
        extended = cholesky(A).extend(A[:, :1], A[:1, :1])
    assert 0.0 < extended.jitter <= 1e-9 * float(A[0, 0])
    whole = torch.cat([torch.cat([A, A[:, :1]], 1), torch.cat([A[:1], A[:1, :1]], 1)])
    torch.testing.assert_close(extended.L @ extended.L.mT, whole, rtol=0, atol=1e-9)


def test_the_jitter_of_a_factor_carries_on_to_its_extension() -> None:
    A = torch.diag(torch.tensor([1.0, 1.0, -3e-7], dtype=torch.float64))
    cross, block = torch.full((3, 1), 1e-9).double(), torch.ones(1, 1).double()
    with pytest.warns(JitterAdded):
        factor = cholesky(A)
    extended = factor.extend(cross, block)
    added = (extended.L @ extended.L.mT).diagonal() - torch.cat([A.diagonal(), block[0]])
    assert extended.jitter == factor.jitter
    torch.testing.assert_close(added, torch.full_like(added, factor.jitter), rtol=1e-8, atol=0)


def test_extending_with_wrong_shapes_says_which_are_right() -> None:
    with pytest.raises(
        InputError, match=r"cross \(4, m\) and block \(m, m\), but cross is \(2, 4\)"
    ):
        cholesky(spd(4)).extend(torch.zeros(2, 4), torch.eye(2))


def test_an_ill_conditioned_kernel_is_factorized_with_the_least_jitter_that_works() -> None:
    A = 3.0 * smooth_kernel(60)
    with pytest.warns(
        JitterAdded, match=r"the kernel \(60 x 60\).*3e-10 was added.*1e-10 of the mean"
    ):
        factor = cholesky(A, what="the kernel")
    assert factor.jitter == pytest.approx(3e-10)
    shifted = A + factor.jitter * torch.eye(60, dtype=torch.float64)
    torch.testing.assert_close(factor.L @ factor.L.mT, shifted, rtol=0, atol=1e-13)


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_the_ladder_is_relative_to_the_matrix_and_stops_at_the_first_rung_that_holds(
    scale: float,
) -> None:
    A = torch.diag(torch.tensor([1.0, 1.0, -3e-7], dtype=torch.float64)) * scale
    with pytest.warns(JitterAdded, match="1e-06 of the mean"):
        factor = cholesky(A)
    assert factor.jitter == pytest.approx(1e-6 * float(A.diagonal().mean()))


def test_an_indefinite_matrix_is_refused_with_what_to_type() -> None:
    A = torch.eye(4, dtype=torch.float64)
    A[0, 1] = A[1, 0] = 1.5
    with pytest.raises(NotPositiveDefinite, match=r"(?s)the Gram matrix \(4 x 4\).*noise_var=1e-3"):
        cholesky(A, what="the Gram matrix")


def test_a_negative_diagonal_is_named_as_the_cause() -> None:
    with pytest.raises(NotPositiveDefinite, match=r"smallest diagonal entry is -0\.5"):
        cholesky(torch.diag(torch.tensor([1.0, 2.0, -0.5])))


def test_a_matrix_without_positive_diagonal_is_refused_at_once() -> None:
    with pytest.raises(NotPositiveDefinite, match="mean diagonal is 0"):
        cholesky(torch.zeros(3, 3))


def test_asymmetry_is_named_as_the_cause() -> None:
    A = torch.eye(3)
    A[2, 0] = 4.0
    with pytest.raises(NotPositiveDefinite, match="differs from its transpose by up to 4"):
        cholesky(A)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("i", "j"), [(1, 1), (2, 0), (0, 2)])
def test_entries_that_are_not_finite_are_an_input_error(bad: float, i: int, j: int) -> None:
    A = spd(4)
    A[i, j] = bad
    with pytest.raises(InputError, match=rf"must be finite, but 1 of its 16 .*first in row {i}"):
        cholesky(A)


def test_huge_but_finite_float32_matrices_are_not_called_infinite() -> None:
    A = torch.eye(3) * 3e38
    torch.testing.assert_close(cholesky(A).solve(A[:, 0]), torch.eye(3, dtype=torch.float64)[0])


def test_a_matrix_that_is_not_square_is_an_input_error() -> None:
    with pytest.raises(InputError, match=r"must be square, \(n, n\), but has shape \(2, 3\)"):
        cholesky(torch.zeros(2, 3))


def test_a_right_hand_side_of_the_wrong_length_is_an_input_error() -> None:
    with pytest.raises(InputError, match=r"with n = 4, but b has shape \(3, 2\)"):
        cholesky(spd(4)).solve(torch.zeros(3, 2))


def test_the_empty_matrix_has_determinant_one() -> None:
    factor = cholesky(torch.zeros(0, 0))
    assert float(factor.log_det()) == 0.0
    assert factor.solve(torch.zeros(0, 2)).shape == (0, 2)


def test_a_factor_is_a_value() -> None:
    factor = cholesky(spd(3))
    with pytest.raises(AttributeError):
        factor.jitter = 1.0  # type: ignore[misc]
    assert isinstance(factor, Cholesky)
