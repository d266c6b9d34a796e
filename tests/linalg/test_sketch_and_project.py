"""Accelerated sketch-and-project on blocks of rows."""

import pytest
import torch

from net2gp import RBF
from net2gp.errors import InputError, NotConverged
from net2gp.linalg import Checkpoint
from net2gp.linalg.large import Blocks, sketch_and_project
from reference.dual_descent import dual_descent


def system(n=200, lengthscale=0.7, noise=0.1, columns=3):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 2, generator=generator, dtype=torch.float64)
    b = torch.randn(n, columns, generator=generator, dtype=torch.float64)
    return RBF(lengthscale)(x) / noise, b


def solved(G, b, blocks, **options):
    return sketch_and_project(lambda i, v: G[i] @ v, lambda i: G[i][:, i], b, blocks, **options)


@pytest.mark.parametrize("noise", [1.0, 0.1, 0.02])
@pytest.mark.parametrize(("size", "rank"), [(40, 20), (70, 70), (200, 50)])
def test_it_reaches_the_dense_solution(noise, size, rank):
    G, b = system(noise=noise)
    found = solved(G, b, Blocks(size, rank, 300, 1e-7))
    assert found.converged
    exact = torch.linalg.solve(torch.eye(200).double() + G, b)
    torch.testing.assert_close(found.x, exact, rtol=0, atol=1e-5)


def test_the_residual_that_is_told_is_the_true_one():
    G, b = system()
    with pytest.warns(NotConverged, match=r"after 3 passes: the passes ran out\. Pass passes=6"):
        found = solved(G, b, Blocks(40, 20, 3, 1e-12))
    left = b - found.x - G @ found.x
    torch.testing.assert_close(found.relative_residuals, left.norm(dim=0) / b.norm(dim=0))
    assert list(found.history) == sorted(found.history, reverse=True)


def test_zero_columns_give_zero_and_a_good_guess_costs_nothing():
    G, b = system()
    b[:, 1] = 0
    found = solved(G, b, Blocks(40, 40, 200, 1e-6))
    assert bool((found.x[:, 1] == 0).all())
    again = solved(G, b, Blocks(40, 40, 200, 1e-5), x0=found.x)
    assert again.iterations == 0
    assert again.converged


def test_groups_of_rows_stay_together():
    G, b = system()
    seen = []

    def square(index):
        seen.append(index)
        return G[index][:, index]

    sketch_and_project(lambda i, v: G[i] @ v, square, b, Blocks(10, 20, 100, 1e-4, group=4))
    for index in seen:
        assert torch.equal(index.reshape(-1, 4) // 4, (index[::4] // 4)[:, None].expand(-1, 4))


class Killed(Exception):
    pass


@pytest.mark.parametrize("kill_at", [3, 17, 25])
def test_a_solve_that_is_killed_continues_with_the_same_numbers(tmp_path, kill_at):
    G, b = system()
    blocks = Blocks(40, 20, 40, 1e-9)
    with pytest.warns(NotConverged):
        whole = solved(G, b, blocks)

    def stop(step, residual):
        if step == kill_at:
            raise Killed

    checkpoint = Checkpoint(tmp_path / "solve.safetensors", "toy", every_seconds=0.0)
    with pytest.raises(Killed):
        solved(G, b, blocks, on_step=stop, checkpoint=checkpoint)
    with pytest.warns(NotConverged):
        resumed = solved(G, b, blocks, checkpoint=checkpoint)
    assert torch.equal(resumed.x, whole.x)
    assert resumed.history == whole.history
    with pytest.warns(NotConverged):  # the file answers
        ended = sketch_and_project(None, None, b, blocks, checkpoint=checkpoint)
    assert torch.equal(ended.x, whole.x)


def test_it_agrees_with_dual_descent_and_needs_fewer_passes():
    G, b = system(noise=1.0)
    exact = torch.linalg.solve(torch.eye(200).double() + G, b)
    found = solved(G, b, Blocks(40, 40, 100, 1e-4))
    # A pass is 200 rows; checks of the residual count as another one.
    passes = 2 * found.iterations
    descent = dual_descent(G, 1.0, b, steps=passes * 5, batch=40)
    assert (found.x - exact).norm() < 0.1 * (descent - exact).norm()
    slow = dual_descent(G, 1.0, b, steps=4000, batch=40)
    assert (slow - exact).norm() < 0.05 * exact.norm()


def test_entries_that_are_not_finite_are_named():
    G, b = system(20)
    G[5, 5] = torch.nan
    with pytest.raises(InputError, match=r"NaN or infinite in .* of 20 rows, among them .*5"):
        solved(G, b, Blocks(20, 5, 10, 1e-4))
