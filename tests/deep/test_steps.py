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
from net2gp.deep import Ascent, SparseLayer, fit
from net2gp.deep.inference import ascent as loop
from net2gp.deep.inference import inducing
from net2gp.deep.inference import stack as stacks
from net2gp.deep.inference.inducing import Law, factor, project
from net2gp.deep.inference.problem import make_problem
from net2gp.deep.inference.sparse_layer import AffineMean
from net2gp.deep.inference.starts import batch_of, manner
from net2gp.deep.inference.steps import forms, own_kernels, restarts
from net2gp.deep.inference.steps.cross import cross
from net2gp.deep.inference.steps.forms import quadratic_forms
from net2gp.deep.inference.steps.own_kernels import OwnLayer, own_grams
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
    found = [(weights * cross(kernel, points, inputs)).sum()]
    found.append((weights * kernel(points, inputs)).sum())
    leaves = (points, inputs, scale, variance)
    torch.testing.assert_close(*found)
    got, wanted = (torch.autograd.grad(value, leaves) for value in found)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_other_kernels_are_called_as_they_are():
    points, inputs = normal(3, 2), normal(4, 2, seed=1)
    kernel = RBF() + n2g.kernels.Linear()
    torch.testing.assert_close(cross(kernel, points, inputs), kernel(points, inputs))


def climb_of(batch_size: int | None, device: str = "cpu", kind: str = "noise") -> loop.Climb:
    """A climb of two layers before its first step, for targets with noise, classes or sigma points."""
    x = normal(60, 2).to(device)
    y = x[:, :1].sin() + 0.1 * normal(60, 1, seed=1).to(device)
    settings: dict[str, Any] = {"num_steps": 40, "num_inducing": 8, "num_samples": 2}
    settings |= {"objective": "predictive"} if kind == "sigma points" else {}
    ascent = Ascent(batch_size=batch_size, look_every=10, starts=("linear",), **settings)
    pair = (x, (y[:, 0] > 0).long()) if kind == "classes" else (x, y)
    likelihood = n2g.Categorical() if kind == "classes" else n2g.Gaussian()
    return restarts._climbs(make_problem(2, pair, likelihood, ascent), ascent)[0]


def test_gradients_are_near_those_in_double_precision(monkeypatch):
    """Products for variances are float32, whose errors are far below the noise of draws."""

    found = []
    for precise in (False, True):
        climb = climb_of(batch_size=20)
        if precise:
            monkeypatch.setattr(Law, "covariance", lambda law: law.root @ law.root.mT)
        climb._one()
        found.append({name: leaf.grad for name, leaf in climb.stack.leaves.items()})
    for name, wanted in found[1].items():
        assert wanted is not None
        got = found[0][name]
        assert got is not None
        assert float((got - wanted).norm()) < 1e-3 * float(wanted.norm()) + 1e-6, name


def test_inducing_points_leave_no_variance_open_at_themselves():
    """Also where a layer is nearly linear, so that variances are small differences of large numbers."""
    points, kernel = normal(30, 2), RBF(100.0, 1e4)
    found = project(kernel, points, factor(kernel, points), AffineMean(), points)
    assert float(found.residual.max()) < 1e-4


@pytest.mark.parametrize(
    ("kind", "batch_size"), [("classes", 20), ("classes", None), ("noise", 20)]
)
def test_only_classes_in_batches_have_the_bound_of_rows_not_seen(kind, batch_size):
    climb = climb_of(batch_size, kind=kind)
    batch = batch_of(climb.problem, climb.rows(0))
    with torch.no_grad():
        before = float(climb.stack.estimate(batch, 2, loop._seeded(climb.seed, 0, 0)).bound)
    found = float(climb._one())
    unseen = kind == "classes" and batch_size is not None
    assert (abs(found - before) < 1e-3 * abs(before)) == unseen
    assert unseen or found > before


def test_numbers_of_kernels_stay_within_their_range(monkeypatch):
    """They can grow together for ever where a layer is nearly linear, at almost the same bound."""
    monkeypatch.setattr(stacks, "RANGE", 1e-3)
    climb = climb_of(batch_size=20)
    start = {name: leaf.detach().clone() for name, leaf in climb.stack.leaves.items()}
    for _ in range(5):
        climb._one()
        climb.step += 1
    moved = {n: float((v.detach() - start[n]).abs().max()) for n, v in climb.stack.leaves.items()}
    limited = {n for n, size in moved.items() if size < 1.1e-3}
    assert limited == {n for n in moved if "kernel" in n or "log_scale" in n or "log_factors" in n}


def test_inner_layers_start_with_a_share_of_the_variance_of_their_mean():
    """Few principal components of many columns vary much more than a column does."""
    x = torch.cat([5 * normal(60, 2), 0.01 * normal(60, 30, seed=1)], 1)
    ascent = Ascent(num_steps=5, batch_size=20, num_inducing=8, starts=("linear",))
    layers = [SparseLayer(RBF(), width=2), RBF()]
    problem = make_problem(layers, (x, x[:, :1]), n2g.Gaussian(), ascent)
    stack = restarts._climbs(problem, ascent)[0].stack
    inner, outputs = stack.plans[0], x @ stack.plans[0].mean.weight
    wanted = manner(problem, ascent).share * outputs.var(0, correction=0).mean()
    torch.testing.assert_close(inner.kernel.diag(x)[0], wanted)


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
    monkeypatch.setattr(inducing, "JITTER", -2.0)
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


def own_layer(num_outputs: int = 3) -> tuple[OwnLayer, Tensor, Tensor]:
    """A layer whose outputs have kernels of their own, and the law of its whitened values."""
    points, factors = normal(num_outputs, 6, 2), 1 + normal(num_outputs, 2, seed=1).square()
    kernel = RBF(torch.tensor([0.5, 1.0], dtype=torch.float64), 1.7)
    scale = 1 + normal(num_outputs, seed=2).square()
    leaves = [value.requires_grad_() for value in (points, factors, scale)]
    L = torch.linalg.cholesky(own_grams(kernel, points, factors)).detach()
    layer = OwnLayer(kernel, leaves[0], L, AffineMean(), leaves[2], leaves[1])
    root = (normal(num_outputs, 6, 6, seed=3) / 3).tril().requires_grad_()
    return layer, normal(6, num_outputs, seed=4).requires_grad_(), root


@pytest.mark.parametrize("rows", [4, 1024])
def test_outputs_with_kernels_of_their_own_are_processes_of_their_own(monkeypatch, rows):
    """Values and gradients, also if rows are taken in blocks."""
    monkeypatch.setattr(own_kernels, "ROWS", rows)
    layer, center, root = own_layer()
    x = normal(9, 2, seed=5).requires_grad_()
    found = layer.moments(x, Law(center, root, torch.zeros(())))
    means, variances = [], []
    for c in range(3):
        Z, h = layer.points[c] * layer.factors[c], x * layer.factors[c]
        L = torch.linalg.cholesky(layer.kernel(Z))
        A = torch.linalg.solve_triangular(L, layer.kernel(Z, h), upper=False)
        spread = (root[c].mT @ A).square().sum(0) - A.square().sum(0)
        means.append(layer.scale[c] * A.mT @ center[:, c])
        variances.append(layer.scale[c] ** 2 * (layer.kernel.diag(h) + spread))
    wanted = torch.stack(means, 1), torch.stack(variances, 1)
    weights, leaves = normal(9, 3, seed=6), (x, layer.points, layer.factors, layer.scale)
    for got, value in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, value)
        pair = [(weights * v).sum() for v in (got, value)]
        grads = [
            torch.autograd.grad(p, (*leaves, center, root), retain_graph=True, allow_unused=True)
            for p in pair
        ]
        for one, other in zip(*grads, strict=True):
            other = torch.zeros_like(one) if other is None else other
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


def test_kernels_of_far_points_are_never_denormal():
    """Products of such numbers would be a hundred times as slow."""
    far = torch.tensor([[0.0], [1000.0]], dtype=torch.float64)
    K = cross(RBF(), far, far)
    assert 0 < float(K.min()) < 1e-40
    assert float((K * K).min()) > 1e-300


@pytest.mark.parametrize("width", [1, 3])
def test_several_outputs_of_an_inner_layer_have_kernels_of_their_own(width):
    x = normal(30, 3)
    layers = [SparseLayer(RBF(), width=width), RBF()]
    quick = Ascent(num_steps=4, num_inducing=6, num_samples=2, starts=("linear",))
    inner = fit(layers, (x, x[:, :1]), n2g.Gaussian(), ascent=quick).process.layers[0]
    assert (inner.factors is None) == (width == 1)
    if width > 1:
        assert inner.points.shape == (3, 6, 3)
        assert float(inner.factors.std(0).min()) > 0
        assert float(inner.points.std(0).min()) > 0


def test_with_many_rows_inner_layers_start_at_their_prior_and_learn_linear_means():
    x = normal(400, 2)
    few, many = (
        Ascent(num_steps=5, batch_size=100, num_inducing=count, starts=("linear",))
        for count in (8, 4)
    )
    stacks = []
    for ascent in (few, many):
        problem = make_problem(2, (x, x[:, :1]), n2g.Gaussian(), ascent)
        stacks.append(restarts._climbs(problem, ascent)[0].stack)
    assert "0.weight" not in stacks[0].leaves
    assert float(stacks[1].leaves["0.log_diagonal"].detach().max()) == 0
    posterior = fit(2, (x, x[:, :1]), n2g.Gaussian(), ascent=many)
    learned = posterior.process.layers[0].mean.weight
    assert 0 < float((learned - torch.eye(2, dtype=torch.float64)).abs().max()) < 1
