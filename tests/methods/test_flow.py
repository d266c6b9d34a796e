"""Gradient flow: laws of ensembles in training, against linear differential equations solved as such."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import net2gp as n2g
from net2gp.errors import InputError, NotPositiveDefinite, TooLarge
from net2gp.limits import infinite_width
from net2gp.limits.modules.pointwise import Erf
from net2gp.methods import (
    Flow,
    NeverLearned,
    Relative,
    gradient_flow,
    loss_flow,
    max_learning_rate,
)
from net2gp.methods.flow import ode
from posteriors.ways import network, points, seeded

DOUBLE = torch.float64
FOLDER = Path(__file__).parents[1] / "reference_data"
REFERENCE = json.loads((FOLDER / "neural_tangents_predict.json").read_text())
RUNS = REFERENCE["runs"]
TIGHT = "neural_tangents_predict_tight.npz"
SOLVED = [run for run in RUNS if run["fn"].startswith("gradient_descent (ODE")]
COUPLING = torch.tensor([[1.0, 0.4], [0.4, 2.0]], dtype=DOUBLE)


@cache
def arrays(file: str = "neural_tangents_predict.npz") -> dict[str, Tensor]:
    with np.load(FOLDER / file) as archive:
        return {name: torch.from_numpy(archive[name]) for name in archive.files}


DEEP = ((1.1, 0.3), (0.9, 0.1))


def erf_kernels(x: Tensor, y: Tensor | None = None, layers=DEEP) -> tuple[Tensor, Tensor]:
    """Hidden erf layers with the deviations of the reference, one after the other (Williams, 1997)."""
    y = x if y is None else y
    d = x.shape[1]
    K, q1, q2 = x @ y.T / d, (x * x).sum(1)[:, None] / d, (y * y).sum(1)[None] / d
    K, q1, q2 = (1.3**2 * k + 0.2**2 for k in (K, q1, q2))
    Theta = K
    for weight, bias in layers:
        norm = ((1 + 2 * q1) * (1 + 2 * q2)).sqrt()
        slope = 4 / math.pi / (norm**2 - 4 * K**2).sqrt()
        K = 2 / math.pi * torch.asin(2 * K / norm)
        q1, q2 = (2 / math.pi * torch.asin(2 * q / (1 + 2 * q)) for q in (q1, q2))
        K, q1, q2 = (weight**2 * k + bias**2 for k in (K, q1, q2))
        Theta = K + weight**2 * slope * Theta
    return K, Theta


@dataclass(frozen=True)
class Coupled:
    """Kernels of outputs that are correlated by B: rows n·C + c."""

    B: Tensor
    joint: bool = True

    def __call__(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        K, Theta = erf_kernels(x, y)
        return torch.kron(K, self.B.to(K)), torch.kron(Theta, self.B.to(K))


@dataclass(frozen=True)
class Kernels:
    """A pair of kernels that are values themselves, as those of an infinitely wide module."""

    nngp: n2g.RBF
    ntk: n2g.RBF

    def __call__(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.nngp(x, y), self.ntk(x, y)


SMOOTH = Kernels(n2g.RBF(1.5), n2g.RBF(0.8, 2.0))
PAIRS = {"independent": erf_kernels, "coupled": Coupled(COUPLING), "kernels": SMOOTH}


def task(count: int = 7, outputs: int = 2, dtype: torch.dtype = DOUBLE) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 3, generator=seeded(0), dtype=DOUBLE)
    y = torch.randn(count, outputs, generator=seeded(1), dtype=DOUBLE)
    return x.to(dtype), y.to(dtype)


def fresh(count: int = 4) -> Tensor:
    return torch.randn(count, 3, generator=seeded(2), dtype=DOUBLE)


def assert_close(a: Tensor, b: Tensor, tol: float = 1e-10) -> None:
    assert a.shape == b.shape
    assert float((a - b).abs().max()) <= tol * max(1.0, float(b.abs().max()))


def slow_law(pair, x, y, test, t, rate, momentum) -> tuple[Tensor, Tensor]:
    """Mean and covariance at the test points by the exponential of the whole linear system.

    The state holds outputs at training and test points together (and their velocities), in rows
    n·C + c, and one constant that carries the targets.
    """
    C, both = y.shape[1], torch.cat([x, test])
    K, Theta = pair(both)
    if not getattr(pair, "joint", False):
        K, Theta = (torch.kron(k, torch.eye(C, dtype=DOUBLE)) for k in (K, Theta))
    n, m = y.numel(), len(both) * C
    pull = torch.zeros(m, m + 1, dtype=DOUBLE)  # −Θ ∇L as a map of (outputs, 1)
    pull[:, :n] = -Theta[:, :n] / n
    pull[:, m] = Theta[:, :n] @ y.reshape(-1) / n
    if momentum is None:
        system = torch.zeros(m + 1, m + 1, dtype=DOUBLE)
        system[:m] = pull
        moved = torch.linalg.matrix_exp(system * rate * t)[:m]
    else:
        system = torch.zeros(2 * m + 1, 2 * m + 1, dtype=DOUBLE)
        system[:m, m : 2 * m] = torch.eye(m)
        system[m : 2 * m, :m], system[m : 2 * m, 2 * m] = pull[:, :m], pull[:, m]
        system[m : 2 * m, m : 2 * m] = -torch.eye(m, dtype=DOUBLE) * (1 - momentum) / rate**0.5
        moved = torch.linalg.matrix_exp(system * rate**0.5 * t)[:m]
        moved = torch.cat([moved[:, :m], moved[:, 2 * m :]], 1)
    mean, E = moved[n:, m], moved[n:, :m]
    return mean.reshape(-1, C), E @ K @ E.mT


@pytest.mark.parametrize("momentum", [None, 0.0, 0.3, 0.9])
@pytest.mark.parametrize("pair", PAIRS.values(), ids=list(PAIRS))
@pytest.mark.parametrize("t", [0.0, 0.5, 30.0])
def test_the_law_solves_the_linear_differential_equation(pair, t, momentum):
    (x, y), test = task(), fresh()
    flow = gradient_flow(pair, (x, y), learning_rate=0.7, momentum=momentum)
    mean, covariance = slow_law(pair, x, y, test, t, 0.7, momentum)
    law = flow.joint(t, test)
    assert_close(flow.mean(t, test), mean)
    assert_close(law.mean, mean.reshape(-1))
    assert_close(law.covariance_matrix, covariance)
    marginal = flow.at(t, test)
    assert_close(marginal.mean, mean)
    points = torch.arange(len(test))
    blocks = covariance.reshape(len(test), 2, len(test), 2)[points, :, points]
    assert_close(marginal.covariance_matrix, blocks)


@pytest.mark.parametrize("momentum", [None, 0.5])
@pytest.mark.parametrize("pair", PAIRS.values(), ids=list(PAIRS))
def test_training_points_left_out_are_training_points_passed(pair, momentum):
    x, y = task()
    flow = gradient_flow(pair, (x, y), momentum=momentum)
    for t in (0.0, 3.0, math.inf):
        assert_close(flow.mean(t), flow.mean(t, x))
        assert_close(flow.covariance(t), flow.covariance(t, x))
        assert_close(flow.at(t).covariance_matrix, flow.at(t, x).covariance_matrix)


@pytest.mark.parametrize("pair", PAIRS.values(), ids=list(PAIRS))
def test_at_time_zero_it_is_the_law_at_the_start(pair):
    flow = gradient_flow(pair, task())
    test = fresh()
    assert_close(flow.mean(0.0, test), torch.zeros(4, 2, dtype=DOUBLE))
    assert_close(flow.covariance(0.0, test), pair(test)[0])


@pytest.mark.parametrize("momentum", [None, 0.8])
def test_late_times_approach_convergence(momentum):
    (x, y), test = task(), fresh()
    flow = gradient_flow(erf_kernels, (x, y), learning_rate=2.0, momentum=momentum)
    late = 1e4
    assert_close(flow.mean(late, test), flow.mean(math.inf, test))
    assert_close(flow.covariance(late, test), flow.covariance(math.inf, test))
    assert_close(flow.mean(math.inf), y)
    assert_close(flow.covariance(math.inf), torch.zeros(7, 7, dtype=DOUBLE))


def test_at_convergence_it_is_the_ensemble_and_not_the_posterior_of_the_tangent_kernel():
    (x, y), test = task(), fresh()
    flow = gradient_flow(erf_kernels, (x, y))
    K, Theta = erf_kernels(x)
    Ks, Ts = erf_kernels(test, x)
    Kss, Tss = erf_kernels(test)
    A = torch.linalg.solve(Theta, Ts.mT).mT
    assert_close(flow.mean(math.inf, test), A @ y)
    ensemble = Kss + A @ K @ A.mT - A @ Ks.mT - Ks @ A.mT
    assert_close(flow.covariance(math.inf, test), ensemble)
    regression = flow.ntk_gp()
    assert_close(regression.mean(math.inf, test), A @ y)
    assert_close(regression.covariance(math.inf, test), Tss - A @ Ts.mT)
    assert float((ensemble - (Tss - A @ Ts.mT)).abs().max()) > 0.01


@pytest.mark.parametrize("ridge", [0.3, Relative(0.1)])
def test_other_ensembles_converge_to_posteriors_with_the_ridge_as_noise(ridge):
    (x, y), test = task(), fresh()
    flow = gradient_flow(SMOOTH, (x, y), ridge=ridge)
    for ensemble, kernel in ((flow.nngp(), SMOOTH.nngp), (flow.ntk_gp(), SMOOTH.ntk)):
        noise = ridge if isinstance(ridge, float) else 0.1 * kernel.output_var
        posterior = n2g.condition(kernel, (x, y), n2g.Gaussian(noise))
        law, expected = ensemble.joint(math.inf, test), posterior.joint(test)
        assert_close(law.mean, expected.mean)
        assert_close(law.covariance_matrix, expected.covariance_matrix)
        assert_close(ensemble.at(0.0, test).variance, kernel.diag(test)[:, None].expand(4, 2))


def test_the_ridge_is_a_weight_of_its_own_for_each_training_output():
    (x, y), test = task(), fresh()
    flow = gradient_flow(erf_kernels, (x, y), ridge=0.5)

    def marked(a: Tensor, b: Tensor | None = None) -> tuple[Tensor, Tensor]:
        b = a if b is None else b
        K, Theta = erf_kernels(a[:, :3], b[:, :3])
        return K, Theta + 0.5 * a[:, 3:] @ b[:, 3:].T

    with_marks = torch.cat([x, torch.eye(7, dtype=DOUBLE)], 1)
    without = torch.cat([test, torch.zeros(4, 7, dtype=DOUBLE)], 1)
    reference = gradient_flow(marked, (with_marks, y))
    for t in (2.0, math.inf):
        assert_close(flow.mean(t, test), reference.mean(t, without))
        assert_close(flow.covariance(t, test), reference.covariance(t, without))
        assert_close(flow.mean(t), reference.mean(t))
        assert_close(flow.covariance(t), reference.covariance(t))
    assert_close(flow.mean(math.inf), y)


@pytest.mark.parametrize("ensemble", [lambda f: f, Flow.nngp, Flow.ntk_gp])
@pytest.mark.parametrize("pair", PAIRS.values(), ids=list(PAIRS))
def test_covariances_are_symmetric_and_positive_semi_definite(pair, ensemble):
    flow = ensemble(gradient_flow(pair, task(), ridge=1e-3))
    covariances = flow.covariance([0.0, 1.0, 50.0, 1e9, math.inf], fresh(6))
    assert torch.equal(covariances, covariances.mT)
    assert float(torch.linalg.eigvalsh(covariances).min()) > -1e-12


def test_the_order_of_the_data_does_not_matter():
    (x, y), test = task(), fresh()
    order = torch.randperm(7, generator=seeded(4))
    one, other = (gradient_flow(erf_kernels, d) for d in ((x, y), (x[order], y[order])))
    for t in (1.0, math.inf):
        assert_close(one.mean(t, test), other.mean(t, test))
        assert_close(one.covariance(t, test), other.covariance(t, test))


def test_times_lead_the_result():
    flow, test = gradient_flow(erf_kernels, task()), fresh()
    times = torch.tensor([[0.0, 1.0, 2.0], [5.0, 7.0, math.inf]])
    mean, covariance, law = (
        flow.mean(times, test),
        flow.covariance(times, test),
        flow.at(times, test),
    )
    assert mean.shape == (2, 3, 4, 2)
    assert covariance.shape == (2, 3, 4, 4)
    assert law.mean.shape == (2, 3, 4, 2)
    assert flow.joint(times, test).covariance_matrix.shape == (2, 3, 8, 8)
    for i in range(2):
        for j in range(3):
            t = float(times[i, j])
            assert_close(mean[i, j], flow.mean(t, test), 1e-14)
            assert_close(covariance[i, j], flow.covariance(t, test), 1e-14)
            assert_close(law.variance[i, j], flow.at(t, test).variance, 1e-14)
    assert_close(flow.mean(times.numpy(), test), mean, 1e-14)
    assert_close(flow.mean([1.0, 2.0]), flow.mean((1.0, 2.0)), 1e-14)


def test_many_test_points_are_taken_in_chunks(monkeypatch):
    sizes, test = [], fresh(9)

    def counted(x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        sizes.append(len(x))
        return erf_kernels(x, y)

    flow = gradient_flow(counted, task())
    whole = flow.at([1.0, 5.0], test).covariance_matrix
    monkeypatch.setattr("net2gp.methods.flow.flow.TEST_BYTES", 16 * 7 * 4)
    before, at = len(sizes), lambda: flow.at([1.0, 5.0], test).covariance_matrix
    assert_close(at(), whole, 1e-14)
    assert sizes[before + 1 :] == [
        4,
        4,
        4,
        4,
        1,
        1,
    ]  # after the mean: k(x, X) and k(x, x) of each chunk


def descend(Theta, Ts, y, rate, steps, momentum=0.0, gradient=None):
    """Gradient descent in function space from zero, at training and test points."""
    gradient = gradient or (lambda f: (f - y) / y.numel())
    f, fs = torch.zeros_like(y), y.new_zeros(len(Ts), y.shape[1])
    v, vs = torch.zeros_like(f), torch.zeros_like(fs)
    for _ in range(steps):
        g = gradient(f)
        v, vs = momentum * v - rate * Theta @ g, momentum * vs - rate * Ts @ g
        f, fs = f + v, fs + vs
    return f, fs


def slope_of(errors: list[float]) -> float:
    return math.log2(errors[0] / errors[-1]) / (len(errors) - 1)


def test_gradient_descent_approaches_the_flow_with_slope_one():
    (x, y), test = task(), fresh()
    Theta, Ts = erf_kernels(x)[1], erf_kernels(test, x)[1]
    errors = []
    for k in range(3):
        rate, steps = 0.5 / 2**k, 40 * 2**k
        flow = gradient_flow(erf_kernels, (x, y), learning_rate=rate)
        f, fs = descend(Theta, Ts, y, rate, steps)
        gap = torch.cat([f - flow.mean(steps), fs - flow.mean(steps, test)])
        errors.append(float(gap.abs().max()))
    assert 0.95 < slope_of(errors) < 1.05
    assert errors[-1] < 0.01


def test_gradient_descent_with_momentum_approaches_the_flow_with_slope_one():
    (x, y), test = task(), fresh()
    Theta, Ts = erf_kernels(x)[1], erf_kernels(test, x)[1]
    errors = []
    for k in range(3):
        step = 0.05 / 2**k  # √learning_rate, with the damping (1 − momentum)/step = 0.5
        steps, momentum = 100 * 2**k, 1 - 0.5 * step
        flow = gradient_flow(erf_kernels, (x, y), learning_rate=step**2, momentum=momentum)
        f, fs = descend(Theta, Ts, y, step**2, steps, momentum)
        gap = torch.cat([f - flow.mean(steps), fs - flow.mean(steps, test)])
        errors.append(float(gap.abs().max()))
    assert 0.95 < slope_of(errors) < 1.05
    assert errors[-1] < 0.02


@pytest.mark.parametrize("momentum", [None, 0.5])
def test_gradient_descent_diverges_just_above_the_largest_rate(momentum):
    x, y = task()
    flow = gradient_flow(erf_kernels, (x, y))
    Theta, rate = erf_kernels(x)[1], max_learning_rate(flow, momentum=momentum)
    below, above = (
        float(descend(Theta, Theta, y, rate * factor, 1500, momentum or 0.0)[0].sub(y).abs().max())
        for factor in (0.98, 1.02)
    )
    assert below < 10.0 < 1e6 < above
    assert rate == pytest.approx(max_learning_rate(Theta, num_outputs=2, momentum=momentum))
    own = gradient_flow(erf_kernels, (x, y), momentum=0.5)
    assert max_learning_rate(own) == pytest.approx(max_learning_rate(flow, momentum=0.5))


@pytest.mark.parametrize("hidden", [2, 30])
def test_a_linearized_network_trains_in_function_space_as_in_its_parameters(hidden):
    linearized = n2g.linearize(network(2, hidden=hidden))
    x, test = points(8), points(3, seed=9)
    y = torch.randn(8, 2, generator=seeded(1), dtype=DOUBLE)
    flow = gradient_flow(linearized, (x, y), learning_rate=0.3)
    J, Js = (linearized.jacobian(p).flatten(0, 1) for p in (x, test))
    P, r = J.shape[1], (y - linearized(x)).reshape(-1)
    system = torch.zeros(P + 1, P + 1, dtype=DOUBLE)
    system[:P, :P], system[:P, P] = -J.mT @ J / 16, J.mT @ r / 16
    for t in (0.0, 2.0, 100.0):
        step = torch.linalg.matrix_exp(system * 0.3 * t)[:P, P]
        assert_close(flow.mean(t), linearized(x) + (J @ step).reshape(8, 2), 1e-9)
        assert_close(flow.mean(t, test), linearized(test) + (Js @ step).reshape(3, 2), 1e-9)
        assert not flow.at(t, test).variance.any()
    step = torch.linalg.lstsq(J, r[:, None], driver="gelsd").solution[:, 0]
    assert_close(flow.mean(math.inf, test), linearized(test) + (Js @ step).reshape(3, 2), 1e-7)


def test_a_linearized_network_with_a_random_start_is_its_posterior():
    linearized = n2g.linearize(network(2, hidden=30))
    x, y, test = points(6), task(6)[1], points(3, seed=9)
    flow = gradient_flow(linearized, (x, y), ridge=0.2).ntk_gp()
    posterior = n2g.condition(linearized.kernel(), (x, y), n2g.Gaussian(0.2), mean=linearized)
    assert_close(flow.at(math.inf, test).mean, posterior.marginal(test).mean, 1e-9)
    law, expected = flow.at(math.inf, test), posterior.marginal(test)
    assert_close(law.covariance_matrix, expected.covariance_matrix, 1e-9)
    with pytest.raises(InputError, match=r'only="head'):
        flow.nngp()


def test_the_mean_of_paths_is_the_path_of_the_mean():
    (x, y), test = task(), fresh()
    flow = gradient_flow(erf_kernels, (x, y))
    up, down = (lambda p, s=s: s * p[:, :2].sin() for s in (1.0, -1.0))
    both = 0.5 * (flow.path(3.0, test, start=up) + flow.path(3.0, test, start=down))
    assert_close(both, flow.mean(3.0, test))
    assert_close(flow.path(0.0, test, start=up), up(test))
    with pytest.raises(InputError, match=r"shape \(7, 2\)"):
        flow.path(1.0, test, start=lambda p: p)


def test_duplicated_points_with_one_target_change_nothing_at_convergence():
    (x, y), test = task(), fresh()
    twice = gradient_flow(erf_kernels, (torch.cat([x, x[:2]]), torch.cat([y, y[:2]])))
    once = gradient_flow(erf_kernels, (x, y))
    assert_close(twice.mean(math.inf, test), once.mean(math.inf, test))
    assert_close(twice.covariance(math.inf, test), once.covariance(math.inf, test))


def test_duplicated_points_with_two_targets_learn_their_mean_and_say_so():
    (x, y), test = task(), fresh()
    data = torch.cat([x, x[:2]]), torch.cat([y, y[:2] + 2.0])
    shifted = torch.cat([y[:2] + 1.0, y[2:]])
    flow = gradient_flow(erf_kernels, data)
    with pytest.warns(NeverLearned, match="2 of its 9 directions"):
        mean = flow.mean(math.inf, test)
    assert_close(mean, gradient_flow(erf_kernels, (x, shifted)).mean(math.inf, test))
    assert torch.isfinite(flow.mean([1.0, 1e30], test)).all()
    gradient_flow(erf_kernels, data, ridge=Relative(1e-6)).mean(math.inf, test)


def test_float32_data_give_float32_results_with_float64_digits():
    (x, y), test = task(dtype=torch.float32), fresh()
    rough = gradient_flow(erf_kernels, (x, y))
    exact = gradient_flow(erf_kernels, (x.double(), y.double()))
    for t in (1.0, math.inf):
        law, expected = rough.at(t, test.float()), exact.at(t, test.float().double())
        assert law.mean.dtype == law.covariance_matrix.dtype == torch.float32
        assert rough.covariance(t, test.float()).dtype == torch.float32
        assert_close(law.mean.double(), expected.mean, 1e-6)
        assert_close(law.covariance_matrix.double(), expected.covariance_matrix, 1e-6)


def solved_flow(run: dict) -> dict[str, Tensor]:
    """Ours for a run that neural-tangents leaves to an ODE solver."""
    values = arrays()
    x, test, y = values["x_train"], values["x_test"], values["y_train"]
    start = lambda p: values["fx_train_0" if len(p) == len(x) else "fx_test_0"]
    settings = {"learning_rate": run["learning_rate"], "momentum": run["momentum"]}
    if run["loss"].startswith("mse"):
        flow = gradient_flow(erf_kernels, (x, y), **settings)
    else:
        labels = values["y_onehot"].argmax(1)
        flow = loss_flow(erf_kernels, (x, labels), n2g.Categorical(), **settings)
    path = lambda p=None: flow.path(run["t"], p, start=start)
    return {"train": path(), "test": path(test)}


def closed_flow(run: dict) -> dict[str, Tensor]:
    """Ours for a run that neural-tangents has in closed form."""
    values = arrays()
    x, test, y = values["x_train"], values["x_test"], values["y_train"]
    start = lambda p: values["fx_train_0" if len(p) == len(x) else "fx_test_0"]
    t = math.inf if run["t"] is None else run["t"]
    part = run.get("diag_reg", 0.0)
    ridge = part if run.get("diag_reg_absolute_scale") else Relative(part)
    if run["fn"] == "gradient_descent_mse":
        pair = Coupled(values["out_cov_B"]) if "trace_axes" in run else erf_kernels
        rate = run.get("learning_rate", 1.0)
        flow = gradient_flow(pair, (x, y), learning_rate=rate, ridge=ridge)
        return {"train": flow.path(t, start=start), "test": flow.path(t, test, start=start)}
    flow = gradient_flow(erf_kernels, (x, y), ridge=ridge)
    ensembles = {"ntk": lambda f: f, "nngp": Flow.nngp, "ntkgp": Flow.ntk_gp}
    flow, p = ensembles[run["get"]](flow), None if "x_test" in run else test
    return {"mean": flow.mean(t, p), "cov": flow.covariance(t, p)}


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run["name"])
def test_reference_numbers_of_neural_tangents(run):
    solved = run in SOLVED
    results = solved_flow(run) if solved else closed_flow(run)
    # its solver's step tolerance of 1.4e-8 adds up to 1.7e-8, as the same solver with 1e-13 shows
    tol = 3e-8 if solved else 1e-12
    for name in run["arrays"]:
        assert_close(results[name], arrays()[f"{run['name']}__{name}"], tol)


@pytest.mark.parametrize("run", SOLVED, ids=lambda run: run["name"])
def test_numbers_of_neural_tangents_with_a_tight_solver(run):
    """`benchmarks/reference_flows.py` makes them; 1e-12 instead of 1e-13 there changes up to 1.2e-12."""
    values = arrays(TIGHT)
    # the squared loss is closed form here; other losses have a solver with errors of their own
    tol = 1e-12 if run["loss"].startswith("mse") else 1e-11
    for name, found in solved_flow(run).items():
        assert_close(found, values[f"{run['name']}__{name}"], tol)


def test_reference_kernels_and_learning_rates_of_neural_tangents():
    values = arrays()
    x, test, y = values["x_train"], values["x_test"], values["y_train"]
    for name, pair in (("dd", (x, None)), ("td", (test, x)), ("tt", (test, None))):
        K, Theta = erf_kernels(*pair)
        assert_close(K, values[f"nngp_{name}"], 1e-13)
        assert_close(Theta, values[f"ntk_{name}"], 1e-13)
    flow = gradient_flow(erf_kernels, (x, y))
    assert max_learning_rate(flow) == pytest.approx(float(values["max_lr"]), rel=1e-11)
    fast = max_learning_rate(flow, momentum=0.9)
    assert fast == pytest.approx(float(values["max_lr_mom0.9"]), rel=1e-11)


def reference_module(width: int = 8) -> tuple[nn.Module, dict[str, dict[str, float]]]:
    """The network of the reference, and its prior."""
    layers = nn.Linear(5, width), Erf(), nn.Linear(width, width), Erf(), nn.Linear(width, 3)
    dense = [layer for layer in REFERENCE["net"] if layer[0] == "Dense"]
    prior = {
        "weight_var": {str(2 * i): layer[1] ** 2 for i, layer in enumerate(dense)},
        "bias_var": {str(2 * i): layer[2] ** 2 for i, layer in enumerate(dense)},
    }
    return nn.Sequential(*layers).eval(), prior


def test_a_module_is_trained_at_infinite_width_whatever_its_own():
    values, (module, prior) = arrays(), reference_module()
    data, test = (values["x_train"], values["y_train"]), values["x_test"]
    flows = [
        gradient_flow(module, data, **prior),
        gradient_flow(infinite_width(reference_module(3)[0], **prior), data),
    ]
    for flow in flows:
        for ensemble, name in ((flow, "ens_ntk"), (flow.nngp(), "ens_nngp")):
            for t, time in ((100.0, "100.0"), (math.inf, "None")):
                run = f"{name}_reg0.0_t{time}"
                assert_close(ensemble.mean(t, test), values[f"{run}__mean"], 1e-11)
                assert_close(ensemble.covariance(t, test), values[f"{run}__cov"], 1e-11)
                covariance = ensemble.at(t, test).covariance_matrix
                assert_close(covariance[:, 1, 1], values[f"{run}__cov"].diagonal(), 1e-11)
    labels = values["y_onehot"].argmax(1)
    entropy = loss_flow(module, (data[0], labels), n2g.Categorical(), **prior)
    start = lambda p: values["fx_train_0" if len(p) == len(labels) else "fx_test_0"]
    assert_close(entropy.path(5.0, test, start=start), arrays(TIGHT)["gd_xent_t5.0__test"], 1e-11)


def test_a_module_with_float32_data_gives_float32_results_with_float64_digits():
    module, prior = reference_module()
    x, y = (arrays()[name].float() for name in ("x_train", "y_train"))
    test = arrays()["x_test"].float()
    rough = gradient_flow(module, (x, y), **prior)
    exact = gradient_flow(module, (x.double(), y.double()), **prior)
    law, expected = rough.at(math.inf, test), exact.at(math.inf, test.double())
    assert law.mean.dtype == torch.float32
    assert_close(law.mean.double(), expected.mean, 1e-6)
    assert_close(law.covariance_matrix.double(), expected.covariance_matrix, 1e-6)


@pytest.mark.parametrize("momentum", [None, 0.9])
@pytest.mark.parametrize("pair", PAIRS.values(), ids=list(PAIRS))
def test_the_solver_agrees_with_the_closed_form_of_the_squared_loss(pair, momentum):
    (x, y), test = task(), fresh()
    closed = gradient_flow(pair, (x, y), learning_rate=0.5, momentum=momentum)
    times = [3.0, 0.0, 40.0]
    losses = (n2g.Gaussian(1.0), lambda f, y: 0.5 * F.mse_loss(f, y))
    for loss in losses:
        solved = loss_flow(pair, (x, y), loss, learning_rate=0.5, momentum=momentum)
        assert_close(solved.path(times), closed.mean(times), 1e-9)
        assert_close(solved.path(times, test), closed.mean(times, test), 1e-9)


def test_stiff_and_explicit_solvers_agree(monkeypatch):
    x, test = task()[0], fresh()
    flow = loss_flow(SMOOTH, (x, torch.arange(7) % 3), n2g.Categorical())
    implicit = flow.path([1.0, 300.0], test)
    monkeypatch.setattr(ode, "STIFF_SIZE", 0)
    assert_close(flow.path([1.0, 300.0], test), implicit, 1e-8)


@pytest.mark.parametrize("momentum", [None, 0.9])
def test_gradient_descent_on_cross_entropy_approaches_its_flow_with_slope_one(momentum):
    x, test, labels = task()[0], fresh(), torch.arange(7) % 3
    Theta, Ts = erf_kernels(x)[1], erf_kernels(test, x)[1]
    gradient = lambda f: -n2g.Categorical().residual(f, labels) / f.numel()
    errors = []
    for k in range(3):
        step = 0.2 / 2**k
        rate, beta = (step, None) if momentum is None else (step**2, 1 - 0.5 * step)
        flow = loss_flow(
            erf_kernels, (x, labels), n2g.Categorical(), learning_rate=rate, momentum=beta
        )
        blank = torch.zeros(7, 3, dtype=DOUBLE)
        f, fs = descend(Theta, Ts, blank, rate, 50 * 2**k, beta or 0.0, gradient)
        gap = torch.cat([f - flow.path(50 * 2**k), fs - flow.path(50 * 2**k, test)])
        errors.append(float(gap.abs().max()))
    assert 0.93 < slope_of(errors) < 1.07


def test_losses_decrease_along_their_flow_until_the_labels_are_fitted():
    x, labels = task()[0], torch.arange(7) % 3
    flow = loss_flow(erf_kernels, (x, labels), n2g.Categorical(), learning_rate=3.0)
    path = flow.path([0.0, 1.0, 10.0, 100.0, 1000.0])
    values = torch.stack([flow.value(f) for f in path])
    assert float(values[0]) == pytest.approx(math.log(3) / 3)
    assert bool((values.diff() < 0).all())
    assert torch.equal(path[-1].argmax(1), labels)


def test_a_mean_over_points_is_faster_by_the_number_of_classes():
    x, labels = task()[0], torch.arange(7) % 3
    by_outputs = loss_flow(erf_kernels, (x, labels), n2g.Categorical())
    by_points = loss_flow(erf_kernels, (x, labels), F.cross_entropy)
    assert_close(by_points.path(2.0), by_outputs.path(6.0), 1e-9)


def test_losses_of_a_linearized_network_start_at_the_network():
    linearized = n2g.linearize(network(2, hidden=20, dtype=torch.float32))
    x, labels = points(6).float(), torch.arange(6) % 2
    flow = loss_flow(linearized, (x, labels), n2g.Categorical())
    assert flow.path(5.0).dtype == torch.float32
    assert_close(flow.path(0.0), linearized(x), 1e-6)
    test = points(3, seed=8).float()
    assert_close(flow.path(0.0, test), linearized(test), 1e-6)
    zero = flow.path(0.0, start=lambda p: p.new_zeros(len(p), 2))
    assert not zero.any()


def test_data_that_cannot_be_used_are_refused():
    x, y = task()
    with pytest.raises(InputError, match="empty"):
        gradient_flow(erf_kernels, (x[:0], y[:0]))
    with pytest.raises(InputError, match="7 rows and y has 6"):
        gradient_flow(erf_kernels, (x, y[:6]))
    with pytest.raises(InputError, match="must be finite"):
        gradient_flow(erf_kernels, (x / 0.0 * 0.0, y))
    with pytest.raises(InputError, match="floating tensor for a regression"):
        gradient_flow(erf_kernels, (x, torch.arange(7)))
    with pytest.raises(InputError, match=r"must have shape \(7, 2\)"):
        gradient_flow(Coupled(COUPLING), (x, y[:, :1]))
    with pytest.raises(InputError, match=r"float32, but .* is torch.float64"):
        gradient_flow(erf_kernels, (x, y.float()))
    flow = gradient_flow(erf_kernels, (x, y))
    with pytest.raises(InputError, match=r"x = x.to\(torch.float64\)"):
        flow.mean(1.0, x.float())
    with pytest.raises(InputError, match="must be finite"):
        flow.at(1.0, x * math.nan)


def test_settings_that_cannot_be_used_are_refused():
    x, y = task()
    for name in ("learning_rate", "ridge"):
        with pytest.raises(InputError, match=f"{name} must be"):
            gradient_flow(erf_kernels, (x, y), **{name: -1.0})
    with pytest.raises(InputError, match="momentum must be at least 0 and below 1"):
        gradient_flow(erf_kernels, (x, y), momentum=1.0)
    with pytest.raises(InputError, match="weight_var set the prior"):
        gradient_flow(erf_kernels, (x, y), weight_var=2.0)
    with pytest.raises(InputError, match="linearized network or a pair of kernels"):
        gradient_flow(n2g.RBF(), (x, y))
    flow = gradient_flow(erf_kernels, (x, y))
    with pytest.raises(InputError, match="zero or positive"):
        flow.mean([1.0, -1.0])
    with pytest.raises(InputError, match="zero or positive"):
        flow.mean(math.nan)
    with pytest.raises(InputError, match="a number or an array"):
        flow.mean("late")
    with pytest.raises(InputError, match="call ntk_gp"):
        flow.nngp().ntk_gp()
    with pytest.raises(InputError, match="must be square"):
        max_learning_rate(y)
    with pytest.raises(InputError, match="loss must be a likelihood"):
        loss_flow(erf_kernels, (x, y), "mse")
    with pytest.raises(InputError, match="one differentiable number"):
        loss_flow(erf_kernels, (x, y), lambda f, y: (f - y).square()).path(1.0)
    with pytest.raises(InputError, match="NaN or infinite on the way"):
        loss_flow(erf_kernels, (x, y), lambda f, y: (f - y).sqrt().mean()).path(1.0)
    with pytest.raises(InputError, match=r"y = y.to\(torch.float64\)"):
        loss_flow(erf_kernels, (x, y.float()), F.mse_loss)
    with pytest.raises(InputError, match=r"labels must be in 0\.\.1"):
        loss_flow(Coupled(COUPLING), (x, torch.arange(7)), n2g.Categorical())
    with pytest.raises(InputError, match="use gradient_flow for the squared loss"):
        loss_flow(erf_kernels, (x, y), n2g.Gaussian(1.0)).path(math.inf)


def test_kernels_that_are_no_kernels_are_refused():
    x, y = task()
    with pytest.raises(InputError, match="give a pair"):
        gradient_flow(lambda a, b=None: erf_kernels(a, b)[0], (x, y))
    with pytest.raises(InputError, match=r"must have shape \(7, 7\).*joint = True"):
        gradient_flow(Coupled(COUPLING, joint=False), (x, y))
    with pytest.raises(NotPositiveDefinite, match="no covariance"):
        gradient_flow(
            lambda a, b=None: (erf_kernels(a, b)[0], -(a @ b.T if b is not None else a @ a.T) + 5),
            (x, y),
        )
    with pytest.raises(InputError, match="training changes nothing"):
        gradient_flow(lambda a, b=None: (erf_kernels(a, b)[0], 0 * erf_kernels(a, b)[1]), (x, y))
    with pytest.raises(InputError, match="the tangent kernel must be finite"):
        gradient_flow(lambda a, b=None: (erf_kernels(a, b)[0], erf_kernels(a, b)[1] / 0), (x, y))


def test_what_does_not_fit_into_memory_is_refused_before_it_is_tried(monkeypatch):
    x, y = task()
    flow = gradient_flow(erf_kernels, (x, y))
    monkeypatch.setattr("net2gp.memory.available_memory", lambda device: 1000)
    with pytest.raises(TooLarge, match="an eigendecomposition of size 7"):
        gradient_flow(erf_kernels, (x, y))
    with pytest.raises(TooLarge, match="ask for fewer times"):
        flow.covariance(torch.ones(100), x)


def test_editing_the_data_later_changes_nothing():
    x, y = task()
    flow, test = gradient_flow(erf_kernels, (x, y)), fresh()
    before = flow.mean(1.0, test)
    x.zero_(), y.zero_()
    assert torch.equal(flow.mean(1.0, test), before)


def trained_networks(x: Tensor, y: Tensor, test: Tensor, rate: float, steps: list[int]) -> Tensor:
    """Outputs at `test` of 1000 networks with 1024 erf units each, after each of the steps: (T, 1000, M)."""
    count, width, draw = 1000, 1024, seeded(0)
    normal = lambda *shape: torch.randn(shape, generator=draw).requires_grad_()
    W, b = normal(count, x.shape[1], width), normal(count, 1, width)
    V, c = normal(count, width, 1), normal(count, 1)

    def outputs(points: Tensor) -> Tensor:
        hidden = torch.erf(1.3 / points.shape[1] ** 0.5 * points @ W + 0.2 * b)
        return 0.9 / width**0.5 * (hidden @ V)[..., 0] + 0.1 * c

    found = []
    for step in range(max(steps) + 1):
        if step in steps:
            found.append(outputs(test).detach())
        loss = 0.5 * (outputs(x) - y[:, 0]).square().mean(1).sum()
        for value, slope in zip((W, b, V, c), torch.autograd.grad(loss, (W, b, V, c)), strict=True):
            value.data.sub_(rate * slope)
    return torch.stack(found)


@pytest.mark.slow
def test_a_thousand_wide_networks_have_the_law_of_the_flow():
    (x, y), test = task(5, 1, torch.float32), fresh(3).float()
    shallow = lambda a, b=None: erf_kernels(a, b, ((0.9, 0.1),))
    flow = gradient_flow(shallow, (x, y))
    rate = 0.02 * max_learning_rate(flow)
    flow, steps = gradient_flow(shallow, (x, y), learning_rate=rate), [0, 40, 400]
    found = trained_networks(x, y, test, rate, steps)
    law = flow.at(torch.tensor(steps), test)
    deviation = law.variance[..., 0].sqrt()
    score = (found.mean(1) - law.mean[..., 0]) / deviation * 1000**0.5
    assert float(score.abs().max()) < 4.0
    covariance = flow.covariance(torch.tensor(steps), test)
    centered = found - found.mean(1, keepdim=True)
    empirical = centered.mT @ centered / 999
    # a covariance from n draws has the variance (s_ii s_jj + s_ij²)/n
    outer = deviation[..., None] * deviation[..., None, :]
    score = (empirical - covariance) / (outer.square() + covariance.square()).sqrt() * 1000**0.5
    assert float(score.abs().max()) < 4.0
    regression = flow.ntk_gp().at(math.inf, test).variance[..., 0]
    assert bool((regression > 1.5 * empirical[-1].diagonal()).any())
