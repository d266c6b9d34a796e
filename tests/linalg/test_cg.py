from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from net2gp.errors import InputError, NotConverged
from net2gp.linalg import LowRankPlusIdentity, Solution, block_cg, nystrom, pivoted_cholesky

NUM = 300


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def kernel(n: int = NUM, lengthscale: float = 0.2) -> Tensor:
    """Squared exponential on random points of the square: a quickly decaying spectrum."""
    x = torch.rand(n, 2, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return torch.exp(-0.5 * (torch.cdist(x, x) / lengthscale) ** 2)


def noisy(noise_var: float, n: int = NUM) -> Tensor:
    return kernel(n) + noise_var * torch.eye(n, dtype=torch.float64)


def times(A: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda v: A @ v


def true_residuals(A: Tensor, x: Tensor, b: Tensor) -> Tensor:
    return torch.linalg.vector_norm(b - A @ x, dim=0) / torch.linalg.vector_norm(b, dim=0)


def energy(A: Tensor, x: Tensor, b: Tensor) -> Tensor:
    return 0.5 * (x * (A @ x)).sum(0) - (x * b).sum(0)


def after(iterations: int, A: Tensor, b: Tensor, **options: object) -> Solution:
    """What block CG has after so many iterations."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotConverged)
        return block_cg(times(A), b, max_iterations=iterations, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("noise_var", [1.0, 1e-2])
def test_the_solution_has_the_residual_that_it_states_and_that_was_asked_for(
    k: int, noise_var: float
) -> None:
    A, b = noisy(noise_var), random(NUM, k)
    solution = block_cg(times(A), b, tol=1e-9)
    assert solution.converged
    residuals = true_residuals(A, solution.x, b)
    assert float(residuals.max()) <= 1e-9
    torch.testing.assert_close(solution.relative_residuals, residuals, rtol=1e-3, atol=1e-14)
    torch.testing.assert_close(solution.x, torch.linalg.solve(A, b), rtol=1e-5, atol=1e-6)


def test_a_vector_gives_a_vector() -> None:
    A, b = noisy(0.1), random(NUM)
    solution = block_cg(times(A), b)
    assert solution.x.shape == b.shape
    assert solution.relative_residuals.shape == (1,)
    torch.testing.assert_close(A @ solution.x, b, rtol=0, atol=1e-6)


def test_columns_that_depend_on_each_other_are_solved() -> None:
    A = noisy(1e-2)
    b = random(NUM, 2) @ random(2, 6, seed=1)
    b[:, 5] = b[:, 0]
    solution = block_cg(times(A), b, tol=1e-10)
    assert float(true_residuals(A, solution.x, b).max()) <= 1e-10
    torch.testing.assert_close(solution.x[:, 5], solution.x[:, 0], rtol=1e-6, atol=1e-6)


def test_zero_columns_give_exactly_zero_even_from_another_start() -> None:
    A, b = noisy(0.1), random(NUM, 3)
    b[:, 1] = 0.0
    for x0 in (None, random(NUM, 3, seed=5)):
        solution = block_cg(times(A), b, x0=x0)
        assert solution.converged
        assert torch.equal(solution.x[:, 1], torch.zeros(NUM, dtype=torch.float64))
        assert float(solution.relative_residuals[1]) == 0.0


def test_nothing_to_solve_takes_no_iteration() -> None:
    solution = block_cg(times(noisy(0.1)), torch.zeros(NUM, 2))
    assert solution.iterations == 0
    assert solution.converged
    assert not solution.x.any()


def test_columns_that_finish_at_different_times_all_finish() -> None:
    A = noisy(1e-2)
    _, vectors = torch.linalg.eigh(A)
    b = torch.stack([vectors[:, -1], vectors[:, :3].sum(1), random(NUM)], 1)
    solution = block_cg(times(A), b, tol=1e-10)
    assert float(true_residuals(A, solution.x, b).max()) <= 1e-10


def test_the_scale_of_a_column_does_not_matter() -> None:
    A, b = noisy(0.1), random(NUM, 3)
    scales = torch.tensor([1e-150, 1.0, 1e150], dtype=torch.float64)
    plain, scaled = block_cg(times(A), b), block_cg(times(A), b * scales)
    assert scaled.iterations == plain.iterations
    torch.testing.assert_close(scaled.x / scales, plain.x, rtol=1e-6, atol=1e-9)


def test_more_columns_than_rows_are_solved_in_one_iteration() -> None:
    A, b = noisy(0.1, 10), random(10, 25)
    solution = block_cg(times(A), b, tol=1e-12)
    assert solution.iterations == 1
    torch.testing.assert_close(A @ solution.x, b)


def test_iterations_are_at_most_the_number_of_distinct_eigenvalues() -> None:
    values = torch.tensor([1.0, 3.0, 10.0, 40.0], dtype=torch.float64).repeat(10)
    Q = torch.linalg.qr(random(40, 40))[0]
    solution = block_cg(times(Q * values @ Q.mT), random(40, 2), tol=1e-10)
    assert solution.iterations <= 4


def test_a_block_takes_fewer_iterations_than_its_columns_one_by_one() -> None:
    A, b = noisy(1e-2), random(NUM, 8)
    together = block_cg(times(A), b).iterations
    alone = [block_cg(times(A), b[:, j]).iterations for j in range(8)]
    assert together < min(alone)


@pytest.mark.parametrize("preconditioned", [False, True])
@pytest.mark.parametrize("warm", [False, True])
def test_the_energy_falls_with_every_iteration_to_its_minimum(
    preconditioned: bool, warm: bool
) -> None:
    noise_var = 1e-3
    A, b = noisy(noise_var), random(NUM, 3)
    options: dict[str, object] = {"tol": 1e-13}
    if preconditioned:
        U, eigenvalues = nystrom(
            times(kernel()), NUM, 20, generator=torch.Generator().manual_seed(0)
        )
        options["preconditioner"] = LowRankPlusIdentity(U, eigenvalues / noise_var)
    if warm:
        options["x0"] = random(NUM, 3, seed=4)
    energies = torch.stack([energy(A, after(t, A, b, **options).x, b) for t in range(30)])
    lowest = energy(A, torch.linalg.solve(A, b), b)
    assert bool((energies.diff(dim=0) < 0).all())
    assert bool((energies > lowest).all())
    assert bool((energies[-1] - lowest < 0.1 * (energies[0] - lowest)).all())


def test_running_out_of_iterations_keeps_progress_even_if_the_residual_rose() -> None:
    A, b = noisy(1e-5), random(NUM, 2)
    stopped = after(10, A, b)
    assert not stopped.converged
    assert stopped.iterations == 10
    assert float(stopped.relative_residuals.max()) > 1.0
    assert bool((energy(A, stopped.x, b) < 0).all())


def test_running_out_of_iterations_says_so_and_what_to_try() -> None:
    expected = (
        r"above the tolerance of 1.00e-08, after 5 iterations: the iterations ran out.*higher rank"
    )
    with pytest.warns(NotConverged, match=expected):
        solution = block_cg(times(noisy(1e-2)), random(NUM, 2), max_iterations=5)
    assert not solution.converged


def test_history_has_the_start_and_every_iteration_and_on_step_hears_of_them() -> None:
    A, b = noisy(0.1), random(NUM, 2)
    heard: list[tuple[int, float]] = []
    solution = block_cg(times(A), b, on_step=lambda *step: heard.append(step))
    assert [step for step, _ in heard] == list(range(1, solution.iterations + 1))
    assert len(solution.history) == solution.iterations + 1
    assert solution.history[0] == pytest.approx(1.0)
    assert solution.history[-1] == pytest.approx(float(solution.relative_residuals.max()))
    assert [value for _, value in heard][:-1] == list(solution.history[1:-1])


def test_a_warm_start_at_the_solution_takes_no_iteration_and_nearby_takes_fewer() -> None:
    A, b = noisy(1e-2), random(NUM, 3)
    exact = torch.linalg.solve(A, b)
    assert block_cg(times(A), b, x0=exact).iterations == 0
    near = block_cg(times(A), b, x0=exact * (1 + 1e-5))
    assert near.converged
    assert 0 < near.iterations < block_cg(times(A), b).iterations


@pytest.mark.parametrize("kind", ["pivoted", "nystrom"])
def test_a_preconditioner_saves_iterations_and_changes_nothing_else(kind: str) -> None:
    noise_var = 1e-3
    K, A, b = kernel(), noisy(noise_var), random(NUM, 3)
    if kind == "pivoted":
        L = pivoted_cholesky(K.diagonal(), lambda i: K[:, i], 60, block=8)
        preconditioner = LowRankPlusIdentity.from_factor(L / noise_var**0.5)
    else:
        U, eigenvalues = nystrom(times(K), NUM, 60, generator=torch.Generator().manual_seed(0))
        preconditioner = LowRankPlusIdentity(U, eigenvalues / noise_var)
    plain = block_cg(times(A), b)
    helped = block_cg(times(A), b, preconditioner=preconditioner)
    assert helped.converged
    assert helped.iterations < 0.5 * plain.iterations
    assert float(true_residuals(A, helped.x, b).max()) <= 1e-8
    torch.testing.assert_close(helped.x, plain.x, rtol=1e-4, atol=1e-4)


def test_the_exact_preconditioner_needs_one_iteration() -> None:
    K = kernel()
    values, vectors = torch.linalg.eigh(K)
    exact = LowRankPlusIdentity(vectors, values.clamp(min=0.0))
    assert block_cg(times(noisy(1.0)), random(NUM, 2), preconditioner=exact).iterations == 1


def test_the_stopping_rule_is_the_plain_residual_also_under_a_misleading_preconditioner() -> None:
    # The preconditioned residual hides the direction U by a factor of 1e4.
    A, b = noisy(0.1), random(NUM, 2)
    U = torch.linalg.qr(random(NUM, 1, seed=3))[0]
    misleading = LowRankPlusIdentity(U, torch.tensor([1e8], dtype=torch.float64))
    solution = block_cg(times(A), b, preconditioner=misleading, tol=1e-8)
    assert float(true_residuals(A, solution.x, b).max()) <= 1e-8


def test_a_recursion_that_drifts_is_restarted_from_the_true_residual() -> None:
    # The first products are off by 1e-3, so the recursion and the true residual part ways.
    A, b = noisy(1.0), random(NUM, 1)
    calls: list[int] = []

    def rough(v: Tensor) -> Tensor:
        calls.append(len(calls))
        error = 1e-3 * random(*v.shape, seed=len(calls)) * torch.linalg.vector_norm(v) / NUM**0.5
        return A @ v + (error if len(calls) < 10 else 0.0)

    solution = block_cg(rough, b, tol=1e-9)
    assert solution.converged
    assert len(calls) > solution.iterations + 1
    assert float(true_residuals(A, solution.x, b).max()) <= 1e-9


def test_float32_products_reach_a_float32_tolerance() -> None:
    A, b = noisy(0.1), random(NUM, 3)
    A32 = A.float()
    solution = block_cg(lambda v: A32 @ v.float(), b, tol=1e-4)
    assert solution.converged
    assert solution.x.dtype == torch.float64
    assert float(true_residuals(A, solution.x, b).max()) <= 2e-4


def test_float32_products_stall_at_what_float32_allows_and_say_so() -> None:
    A, b = noisy(0.1), random(NUM, 3)
    A32 = A.float()
    with pytest.warns(
        NotConverged, match=r"the residual stalled.*precision of the products.*float64"
    ):
        solution = block_cg(lambda v: A32 @ v.float(), b, tol=1e-12)
    assert not solution.converged
    assert solution.iterations < 500
    # eps ‖A‖ ‖x‖ / ‖b‖ is the size of rounding in one product
    size = torch.linalg.matrix_norm(A, 2) * torch.linalg.vector_norm(solution.x, dim=0)
    rounding = torch.finfo(torch.float32).eps * size / torch.linalg.vector_norm(b, dim=0)
    assert bool((true_residuals(A, solution.x, b) < 3 * rounding).all())


def test_float32_products_do_not_spend_the_budget_below_what_float32_allows() -> None:
    A, b = noisy(1e-2), random(NUM, 3)
    A32 = A.float()
    with pytest.warns(NotConverged, match="the residual stalled"):
        stalled = block_cg(lambda v: A32 @ v.float(), b, tol=1e-12)
    assert stalled.iterations < 2 * block_cg(times(A), b, tol=1e-12).iterations


def test_an_indefinite_matrix_is_noticed() -> None:
    A = kernel() - torch.eye(NUM, dtype=torch.float64)
    with pytest.warns(NotConverged, match=r"curvature was not positive.*Raise noise_var"):
        solution = block_cg(times(A), random(NUM, 2))
    assert not solution.converged


def test_no_graph_is_built() -> None:
    A, b = noisy(0.1).requires_grad_(), random(NUM, 1).requires_grad_()
    assert not block_cg(times(A), b).x.requires_grad


def test_what_cannot_be_solved_is_an_input_error() -> None:
    A, b = noisy(0.1, 5), random(5, 2)
    with pytest.raises(InputError, match=r"b must be finite"):
        block_cg(times(A), b * float("nan"))
    with pytest.raises(InputError, match=r"matmul\(v\) must be finite"):
        block_cg(lambda v: v * float("nan"), b)
    with pytest.raises(InputError, match=r"shape of b, \(5, 2\), but has shape \(5, 1\)"):
        block_cg(times(A), b, x0=b[:, :1])
    with pytest.raises(InputError, match=r"must keep the shape \(5, 2\), but gave \(4, 2\)"):
        block_cg(lambda v: v[:4], b)
    with pytest.raises(InputError, match=r"tol must be positive, but is 0"):
        block_cg(times(A), b, tol=0.0)
    with pytest.raises(InputError, match=r"\(n,\) or \(n, k\), but has shape \(\)"):
        block_cg(times(A), torch.tensor(1.0))
