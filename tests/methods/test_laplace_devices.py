"""The device changes nothing but rounding."""

import warnings

import pytest
import torch
from torch import nn

import net2gp as n2g
from methods.laplace_cases import STRUCTURES

DEVICE = "cuda"
CASES = [one for one in STRUCTURES if not isinstance(one, n2g.structures.Subnetwork)]
# rounding may choose other weights, unless all are chosen
CASES += [n2g.structures.Subnetwork(1000), n2g.structures.FunctionSpace(num_points=10)]


def problem(likelihood):
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)]
    x = torch.randn(40, 1, 6, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (40,), generator=generator)
    if isinstance(likelihood, n2g.Gaussian):
        y = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    return nn.Sequential(*layers).double().eval(), x, y


@pytest.mark.gpu
@pytest.mark.parametrize("structure", CASES, ids=str)
@pytest.mark.parametrize(
    "likelihood", [n2g.Categorical(), n2g.Gaussian()], ids=["classes", "noise"]
)
def test_laplace_is_the_same_on_another_device(structure, likelihood):
    network, x, y = problem(likelihood)
    laws = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for device in ("cpu", DEVICE):
            module, data = network.to(device), (x.to(device), y.to(device))
            posterior = n2g.laplace(module, data, likelihood, structure=structure)
            law = posterior.marginal(data[0][:5])
            assert law.mean.device.type == torch.device(device).type
            predicted = posterior.predict(data[0][:5])
            score = predicted.log_prob(data[1][:5])
            draws = posterior.sample(data[0][:2], 3)
            assert draws.shape == (3, 2, 3)
            evidence = posterior.log_marginal_likelihood()
            laws.append([t.cpu() for t in (law.mean, law.covariance_matrix, score, evidence)])
            moved = posterior.to("cpu").marginal(x[:5])
            torch.testing.assert_close(moved.covariance_matrix, laws[-1][1], rtol=1e-6, atol=1e-9)
    for one, other in zip(*laws, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::net2gp.errors.NotStationary")
def test_training_by_the_evidence_runs_on_another_device():
    x = torch.linspace(-2, 2, 50, device=DEVICE)[:, None]
    network = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1)).to(DEVICE)
    schedule = n2g.training.Schedule(num_epochs=20, burn_in=5)
    posterior = n2g.training.train_by_evidence(
        network, (x, x.sin()), n2g.Gaussian(), schedule=schedule
    )
    assert posterior.marginal(x).mean.device.type == torch.device(DEVICE).type
