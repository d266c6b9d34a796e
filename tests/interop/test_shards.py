"""Laplace with the data in several processes is that of one process with all data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import net2gp as n2g
from net2gp.errors import InputError, Net2GPWarning
from net2gp.interop.shards import laplace_of_shards
from net2gp.tuning import Evidence

STRUCTURES = {
    "Full": n2g.Full(),
    "Diagonal": n2g.Diagonal(),
    "Kron": n2g.Kron(),
    "LastLayer": n2g.LastLayer(n2g.Full()),
    "LastLayer Kron": n2g.LastLayer(n2g.Kron()),
}


def problem(kind: str):
    """A network that was trained a little, data that do not divide evenly by two, and a likelihood."""
    torch.manual_seed(0)
    x = torch.randn(31, 3, dtype=torch.float64)
    if kind == "regression":
        network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double().eval()
        return network, (x, x.sum(1, keepdim=True).sin()), n2g.Gaussian()
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double().eval()
    return network, (x, (x[:, 0] > 0).long() + (x[:, 1] > 1).long()), n2g.Categorical()


def found(posterior, x) -> dict:
    law = posterior.marginal(x)
    return {
        "evidence": float(posterior.evidence),
        "mean": law.mean.tolist(),
        "covariance": law.covariance_matrix.tolist(),
        "prior_var": posterior.prior_var if isinstance(posterior.prior_var, float) else None,
        "noise_var": getattr(posterior.likelihood, "noise_var", None),
    }


def everything(rank: int, size: int) -> dict:
    """Every structure and task, with the part of the data that a process has."""
    results = {}
    for kind in ("regression", "classes"):
        network, (x, y), likelihood = problem(kind)
        for name, structure in STRUCTURES.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Net2GPWarning)
                posterior = laplace_of_shards(
                    network, (x[rank::size], y[rank::size]), likelihood, structure=structure
                )
            results[f"{kind} {name}"] = found(posterior, x[:5])
    return results


PROGRAM = """
import json, sys
sys.path[:0] = [{tests!r}, {source!r}]
import torch
from torch import distributed
rank, file = int(sys.argv[1]), sys.argv[2]
distributed.init_process_group("gloo", init_method="file://" + file, rank=rank, world_size=2)
import test_shards
results = test_shards.everything(rank, 2)
from net2gp.errors import InputError
network, data, likelihood = test_shards.problem("classes")
with torch.no_grad():
    network[0].weight.add_(rank)
try:
    test_shards.laplace_of_shards(network, data, likelihood)
except InputError as error:
    results["different"] = str(error)
metric = test_shards.metric_of(slice(rank, None, 2))
results["metric"] = float(metric.compute())
print("RESULT" + json.dumps(results))
distributed.destroy_process_group()
"""


def metric_of(part: slice):
    from net2gp.interop.torchmetrics import CalibrationError

    network, (x, y), _ = problem("classes")
    metric = CalibrationError()
    metric.update(network(x[part]).softmax(1), y[part])
    return metric


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """What two processes with gloo found, from every second point each."""
    pytest.importorskip("torchmetrics")
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("torch has no gloo here")
    source = str(Path(n2g.__file__).resolve().parents[1])
    code = PROGRAM.format(tests=str(Path(__file__).parent), source=source)
    meeting = str(tmp_path_factory.mktemp("gloo") / "meeting")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), meeting],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    results = []
    for process in started:
        out, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        results.append(json.loads(out.partition("RESULT")[2]))
    return results


def test_all_processes_have_the_posterior_of_one_with_all_data(two_processes):
    alone = everything(0, 1)
    for results in two_processes:
        for name, expected in alone.items():
            for key, value in expected.items():
                if value is not None:
                    torch.testing.assert_close(
                        torch.tensor(results[name][key]), torch.tensor(value), rtol=1e-5, atol=1e-8
                    )
    first, second = two_processes
    assert all(first[name] == second[name] for name in alone)


@pytest.mark.filterwarnings("ignore::net2gp.errors.Net2GPWarning")
def test_with_prior_and_noise_given_it_is_laplace_to_rounding():
    network, (x, y), _ = problem("regression")
    options = {"prior_var": 0.7, "structure": n2g.Full()}
    one = laplace_of_shards(network, (x, y), n2g.Gaussian(0.1), **options)
    other = n2g.laplace(network, (x, y), n2g.Gaussian(0.1), **options)
    torch.testing.assert_close(one.evidence, other.evidence, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        one.marginal(x).covariance_matrix,
        other.marginal(x).covariance_matrix,
        rtol=1e-9,
        atol=1e-12,
    )


@pytest.mark.parametrize("kind", ["regression", "classes"])
@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.filterwarnings("ignore::net2gp.errors.Net2GPWarning")
def test_in_one_process_it_is_laplace_with_the_evidence(kind, name):
    network, (x, y), likelihood = problem(kind)
    one = laplace_of_shards(network, (x, y), likelihood, structure=STRUCTURES[name])
    other = n2g.laplace(network, (x, y), likelihood, structure=STRUCTURES[name], tuning=Evidence())
    torch.testing.assert_close(one.evidence, other.evidence, rtol=1e-8, atol=0)
    torch.testing.assert_close(
        one.marginal(x).covariance_matrix, other.marginal(x).covariance_matrix, rtol=1e-5, atol=1e-9
    )


def test_processes_with_different_networks_are_refused(two_processes):
    for results in two_processes:
        assert "the processes have networks with different parameters" in results["different"]


def test_torchmetrics_adds_up_the_states_of_both_processes(two_processes):
    whole = float(metric_of(slice(None)).compute())
    assert [results["metric"] for results in two_processes] == pytest.approx([whole, whole])


def test_structures_that_are_no_sums_are_refused():
    network, data, likelihood = problem("regression")
    with pytest.raises(InputError, match="the curvature must be a sum over points"):
        laplace_of_shards(network, data, likelihood, structure=n2g.structures.LowRank(2))
