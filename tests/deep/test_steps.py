"""The fast parts of a step: the same values and gradients as the plain formulas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import net2gp as n2g
from net2gp import RBF, errors
from net2gp.deep import Ascent, fit
from net2gp.deep.inference import ascent as loop
from net2gp.deep.inference import inducing
from net2gp.deep.inference.problem import make_problem
from net2gp.deep.inference.steps import forms
from net2gp.deep.inference.steps.cross import cross
from net2gp.deep.inference.steps.forms import quadratic_forms
from net2gp.likelihoods import gaussian


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("numbers", [1, 200, 2**17])
@pytest.mark.parametrize("count", [1, 3])
def test_quadratic_forms_are_those_of_the_definition(monkeypatch, numbers, count):
    """Also if rows are taken in blocks."""
    monkeypatch.setattr(forms, "NUMBERS", numbers)
    A, S = normal(5, 150).requires_grad_(), normal(count, 5, 5, seed=1).requires_grad_()
    weights = normal(150, count, seed=2)
    plain = (S.mT @ A).square().sum(1).mT
    fast = quadratic_forms(A, S @ S.mT)
    torch.testing.assert_close(fast, plain)
    for got, wanted in zip(
        torch.autograd.grad((weights * fast).sum(), (A, S)),
        torch.autograd.grad((weights * plain).sum(), (A, S)),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted)


def test_quadratic_forms_of_float32_matrices_have_seven_digits():
    A, S = normal(40, 100), normal(2, 40, 40, seed=1)
    W = S @ S.mT
    rough = quadratic_forms(A, W.float())
    assert rough.dtype == torch.float64
    torch.testing.assert_close(rough, quadratic_forms(A, W), rtol=1e-5, atol=1e-3)


def test_a_matrix_without_a_gradient_gets_none():
    A, W = normal(3, 4).requires_grad_(), torch.eye(3, dtype=torch.float64)[None]
    (got,) = torch.autograd.grad(quadratic_forms(A, W).sum(), A)
    torch.testing.assert_close(got, 2 * A)


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_kernels_between_points_and_rows_are_those_of_the_kernel(offset):
    points, inputs = ((offset + normal(n, 3, seed=n)).requires_grad_() for n in (6, 9))
    scale = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    variance = torch.tensor(1.7, dtype=torch.float64, requires_grad=True)
    kernel, weights = RBF(scale, variance), normal(6, 9)
    found = [(weights * cross(kernel, points, inputs, torch.float64)).sum()]
    found.append((weights * kernel(points, inputs)).sum())
    leaves = (points, inputs, scale, variance)
    torch.testing.assert_close(*found)
    got, wanted = (torch.autograd.grad(value, leaves) for value in found)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_other_kernels_are_called_as_they_are():
    points, inputs = normal(3, 2), normal(4, 2, seed=1)
    kernel = RBF() + n2g.kernels.Linear()
    got = cross(kernel, points, inputs, torch.float32)
    torch.testing.assert_close(got, kernel(points, inputs).float())


def climb_of(batch_size: int | None, device: str = "cpu", kind: str = "noise") -> loop.Climb:
    """A climb of two layers before its first step, for targets with noise, classes or sigma points."""
    x = normal(60, 2).to(device)
    y = x[:, :1].sin() + 0.1 * normal(60, 1, seed=1).to(device)
    settings: dict[str, Any] = {"num_steps": 40, "num_inducing": 8, "num_samples": 2}
    settings |= {"objective": "predictive"} if kind == "sigma points" else {}
    ascent = Ascent(batch_size=batch_size, look_every=10, starts=("linear",), **settings)
    pair = (x, (y[:, 0] > 0).long()) if kind == "classes" else (x, y)
    likelihood = n2g.Categorical() if kind == "classes" else n2g.Gaussian()
    return loop._climbs(make_problem(2, pair, likelihood, ascent), ascent)[0]


def test_gradients_with_batches_are_near_those_in_double_precision():
    """Batches have products in float32, whose errors are far below the noise of a batch."""
    found = []
    for dtype in (torch.float32, torch.float64):
        climb = climb_of(batch_size=20)
        assert climb.stack.dtype == torch.float32
        climb.stack.dtype = dtype
        climb._one()
        found.append({name: leaf.grad for name, leaf in climb.stack.leaves.items()})
    for name, wanted in found[1].items():
        assert wanted is not None
        got = found[0][name]
        assert got is not None
        assert float((got - wanted).norm()) < 1e-3 * float(wanted.norm()) + 1e-6, name


def noisy(seed: int, count: int = 1000) -> tuple[Tensor, Tensor]:
    """Rows whose noise has variance 1."""
    x = normal(count, 2, seed=seed)
    return x, x[:, :1].sin() + normal(count, 1, seed=seed + 1)


@pytest.mark.parametrize("batch_size", [40, 100])
def test_batches_find_the_noise_of_all_rows(batch_size):
    """A last layer at the optimum of one batch fits its noise, which the last steps must undo."""
    settings = Ascent(num_steps=300, num_inducing=20, batch_size=batch_size)
    posterior = fit(1, noisy(0), n2g.Gaussian(), ascent=settings)
    whole = fit(1, noisy(0), n2g.Gaussian(), ascent=Ascent(num_steps=100, num_inducing=20))
    found, wanted = (float(p.likelihood.noise_var) for p in (posterior, whole))
    assert abs(found - wanted) < 0.1 * wanted
    assert float(posterior.log_marginal_likelihood()) > float(whole.log_marginal_likelihood()) - 30


@pytest.mark.parametrize("likelihood", [n2g.Gaussian(), n2g.Categorical()])
def test_steps_after_which_the_bound_collapses_are_taken_back(monkeypatch, likelihood):
    """They are repeated with half of their length, and leave no trace."""
    plain, seen = loop.Climb._plain, []

    def wild(climb, rows, generator, rate):
        seen.append((climb.step, climb.caution))
        bound = plain(climb, rows, generator, rate)
        return bound - 1e9 if climb.step == 17 and climb.caution > 0.3 else bound

    monkeypatch.setattr(loop.Climb, "_plain", wild)
    x, y = noisy(0, 60)
    targets = y if isinstance(likelihood, n2g.Gaussian) else (y[:, 0] > 0).long()
    settings = Ascent(num_steps=30, num_inducing=8, look_every=5, starts=("linear",))
    posterior = fit(2, (x, targets), likelihood, ascent=settings)
    assert float(posterior.recipe.bounds.min()) > -1e5
    assert [step for step, _ in seen].count(17) == 3
    assert {caution for step, caution in seen if step > 19} == {0.25}


def test_steps_are_taken_back_to_the_same_look_after_a_run_was_killed(monkeypatch, tmp_path):
    plain, alive = loop.Climb._plain, [True]

    def wild(climb, rows, generator, rate):
        if climb.step == 17 and alive[0]:
            raise KeyboardInterrupt
        bound = plain(climb, rows, generator, rate)
        return bound - 1e9 if climb.step == 18 and climb.caution == 1.0 else bound

    monkeypatch.setattr(loop.Climb, "_plain", wild)
    settings = Ascent(num_steps=30, num_inducing=8, look_every=5, checkpoint_seconds=0.0)
    kept = replace(settings, checkpoint=tmp_path / "fit.safetensors")
    with pytest.raises(KeyboardInterrupt):
        fit(1, noisy(0, 60), n2g.Gaussian(), ascent=kept)
    alive[0] = False
    resumed = fit(1, noisy(0, 60), n2g.Gaussian(), ascent=kept)
    whole = fit(1, noisy(0, 60), n2g.Gaussian(), ascent=settings)
    assert torch.equal(resumed.recipe.bounds, whole.recipe.bounds)


@pytest.mark.parametrize("look_every", [7, 100])
def test_batches_are_no_fall_of_the_bound(look_every):
    """Bounds of batches to which the last layer was just fitted are not compared with others."""
    settings = Ascent(num_steps=120, num_inducing=10, batch_size=60, look_every=look_every)
    fit(1, noisy(0, 300), n2g.Gaussian(), ascent=settings)


def test_patience_waits_for_bounds_that_can_be_compared():
    settings = Ascent(num_steps=100, num_inducing=10, batch_size=60, look_every=2, patience=3)
    posterior = fit(1, noisy(0, 300), n2g.Gaussian(), ascent=settings)
    assert posterior.recipe.num_steps > 50


def test_a_learning_rate_in_a_tensor_is_not_changed():
    rate = torch.tensor(0.02)
    settings = Ascent(num_steps=5, num_inducing=5, learning_rate=rate)  # type: ignore[arg-type]
    fit(2, noisy(0, 20), n2g.Gaussian(), ascent=settings)
    assert float(rate) == pytest.approx(0.02)


class Looks(TorchDispatchMode):
    """Counts operations that a recording on a GPU cannot hold: values that are read or come from the host."""

    NAMES = ("_local_scalar_dense", "lift_fresh", "nonzero", "is_nonzero", "_linalg_check_errors")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function._schema.name.removeprefix("aten::") in self.NAMES:
            self.found.append(str(function))
        return function(*args, **(kwargs or {}))


KINDS = ["noise", "classes", "sigma points"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_is_recorded_looks_at_no_value(monkeypatch, kind):
    """A GPU would have to wait for it, and a recording would fail."""
    climb = climb_of(20, kind=kind)
    for _ in range(3):
        climb._one()
        climb.step += 1
    for module in (errors, gaussian, inducing):
        monkeypatch.setattr(module, "readable", lambda tensor: False)
    climb.stack.numbers = lambda shape, generator: torch.zeros(shape, dtype=torch.float64)
    rows = climb.rows(3)
    _ignore_adam(climb, monkeypatch)
    with Looks() as looks:
        climb._plain(rows, torch.Generator(), 0.1)
    assert looks.found == []


def _ignore_adam(climb: loop.Climb, monkeypatch) -> None:
    """Adam looks at its count of steps on a CPU, but not on a GPU."""
    assert climb.optimizer is not None
    monkeypatch.setattr(climb.optimizer, "step", lambda: None)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch_size", [None, 20, 45])
def test_recorded_steps_are_the_plain_ones(batch_size, kind):
    """Also if the last layer goes to its optimum in the first half alone, as with batches of 45."""
    found = []
    for records in (True, False):
        climb = climb_of(batch_size, "cuda", kind)
        climb.take.possible = records
        climb.climb(40, lambda note: None, lambda: None)
        assert climb.take.possible == records  # nothing had to be given up
        found.append(climb)
    torch.testing.assert_close(found[0].looks, found[1].looks, rtol=1e-5, atol=1e-5)
    for name, leaf in found[0].stack.leaves.items():
        torch.testing.assert_close(leaf, found[1].stack.leaves[name], rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_a_recorded_step_that_fails_is_taken_again_with_more_jitter(monkeypatch):
    """A singular matrix shows as NaN in a recorded step; the plain one adds to its diagonal."""
    climb = climb_of(None, "cuda")
    climb.climb(10, lambda note: None, lambda: None)
    monkeypatch.setitem(inducing.JITTER, torch.float64, -2.0)
    monkeypatch.setattr(inducing, "TRIES", 1)
    wrong = pytest.raises(n2g.errors.InputError, match="singular")
    with wrong:
        climb.climb(40, lambda note: None, lambda: None)
    assert not climb.take.possible
    assert len(climb.looks) == 1


@pytest.mark.gpu
def test_a_fit_on_a_gpu_goes_on_from_its_checkpoint(tmp_path):
    """Recorded steps leave all state where a checkpoint finds it."""
    x, y = (value.cuda() for value in noisy(0, 100))
    settings = Ascent(num_steps=30, num_inducing=10, batch_size=25, look_every=5)
    whole = fit(2, (x, y), n2g.Gaussian(), ascent=settings)
    path = tmp_path / "state.safetensors"
    kept = replace(settings, checkpoint=path, checkpoint_seconds=0.0)

    class Stop(Exception):
        pass

    taken = []

    def one(climb):
        taken.append(climb.step)
        if len(taken) == 18:
            raise Stop
        return plain(climb)

    plain = loop.Climb._one
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Climb, "_one", one)
        with pytest.raises(Stop):
            fit(2, (x, y), n2g.Gaussian(), ascent=kept)
    again = fit(2, (x, y), n2g.Gaussian(), ascent=kept)
    torch.testing.assert_close(again.predict(x).mean, whole.predict(x).mean, rtol=1e-3, atol=1e-4)
