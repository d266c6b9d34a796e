"""How often a prediction runs the network: plans and the training points' gradients are not made again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from net2gp.likelihoods import Categorical, Gaussian
from net2gp.linear import linearize
from net2gp.methods import adapt, laplace
from net2gp.posteriors import condition
from net2gp.solvers import CG, Cholesky, WeightCholesky
from net2gp.structures import (
    Diagonal,
    Full,
    FunctionSpace,
    Kron,
    LastLayer,
    LowRank,
    Subnetwork,
)

STRUCTURES = (
    Full(),
    Kron(),
    Diagonal(),
    LastLayer(),
    FunctionSpace(),
    LowRank(5),
    Subnetwork(10),
)
Fit = Callable[[nn.Module, tuple[Tensor, Tensor]], Any]


def network(num_outputs: int) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, num_outputs)
    return nn.Sequential(*layers).double().eval()


def inputs(num_points: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_points, 4, generator=generator, dtype=torch.float64)


def predictions(fit: Fit, classes: bool) -> list[int]:
    """The passes of three predictions in a row, each of three new points, without those of the fit.

    The hook that counts makes a new plan, as any hook does, so it stays from the fit on.
    """
    module, x = network(3 if classes else 1), inputs(20, seed=0)
    y = x[:, :3].argmax(1) if classes else x[:, :1].sin()
    calls: list[int] = []
    module.register_forward_hook(lambda *given: calls.append(1))
    posterior = fit(module, (x, y))
    counts = []
    for seed in (1, 2, 3):
        calls.clear()
        posterior.predict(inputs(3, seed))
        counts.append(len(calls))
    return counts


@pytest.mark.parametrize("classes", [False, True])
@pytest.mark.parametrize("solver", [None, Cholesky(), CG(num_probes=0), WeightCholesky()], ids=repr)
def test_a_prediction_of_adapt_runs_the_network_at_most_five_times(solver, classes: bool) -> None:
    likelihood = Categorical() if classes else Gaussian(0.1)
    counts = predictions(
        lambda module, data: adapt(module, data, likelihood, prior_var=1.0, solver=solver), classes
    )
    assert max(counts) <= 5
    assert max(counts[1:]) <= 4


def test_a_prediction_of_adapt_with_all_settings_open_runs_the_network_at_most_five_times() -> None:
    assert max(predictions(lambda module, data: adapt(module, data, Gaussian()), False)) <= 5


@pytest.mark.filterwarnings("ignore")  # the network is not trained
@pytest.mark.parametrize("classes", [False, True])
@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda s: type(s).__name__)
def test_a_prediction_of_laplace_runs_the_network_four_times_and_once_for_novelty(
    structure, classes: bool
) -> None:
    likelihood = Categorical() if classes else Gaussian(0.1)
    counts = predictions(
        lambda module, data: laplace(module, data, likelihood, prior_var=1.0, structure=structure),
        classes,
    )
    # the certainty of classes falls with novelty, which compares gradients with those of training points
    most = 4 + classes
    assert max(counts[1:]) <= most
    # the first prediction also makes the gradients of training points, for novelty and function space
    assert counts[0] <= most + 2 * classes + isinstance(structure, FunctionSpace)


def test_conditioning_reads_the_number_of_outputs_from_the_plan() -> None:
    """Two passes to look at the first, the middle and the last point, none for a first entry of k."""
    module, x = network(3), inputs(20, seed=0)
    linearized = linearize(module)
    calls: list[int] = []
    module.register_forward_hook(lambda *given: calls.append(len(given[1][0])))
    kernel = linearized.kernel()
    kernel.check(x)
    assert calls == [3, 2, 2]
    calls.clear()
    condition(kernel, (x, x[:, :3].argmax(1)), Categorical())
    assert 1 not in calls
