from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import net2gp as n2g
from net2gp import bayes

DEVICE = "cuda"
NOISE_VAR = 0.25

STARTS = {"num_chains": 64, "num_draws": 100, "warmup": 300}
CHAINS = {
    "hmc": lambda *problem: bayes.hmc(*problem, num_chains=64, num_draws=100, warmup=100),
    "nuts": lambda *problem: bayes.nuts(*problem, num_chains=64, num_draws=100, warmup=100),
    "sgld": lambda *problem: bayes.sgld(*problem, **STARTS),
    "sghmc": lambda *problem: bayes.sghmc(*problem, **STARTS),
    "sghmc, minibatches": lambda *problem: bayes.sghmc(*problem, batch_size=10, **STARTS),
    "microcanonical": lambda *problem: bayes.microcanonical(*problem, **STARTS),
}
FITS = {
    "map_estimate": lambda *problem: bayes.map_estimate(*problem),
    "ensemble": lambda *problem: bayes.ensemble(*problem, num_members=3),
    "multi_swag": lambda *problem: bayes.multi_swag(
        *problem, num_members=2, training=bayes.Training(batch_size=7)
    ),
    "mean_field": lambda *problem: bayes.mean_field(*problem),
    "sghmc": lambda *problem: bayes.sghmc(*problem, num_chains=2, num_draws=20, warmup=20),
    "nuts": lambda *problem: bayes.nuts(*problem, num_chains=2, num_draws=5, warmup=10),
}


@pytest.fixture(autouse=True)
def needs_a_gpu() -> None:
    if DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def line() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(20, 3, dtype=torch.float64)
    y = x @ torch.tensor([[1.0], [-0.5], [0.2]], dtype=torch.float64) + 0.5 * torch.randn(20, 1)
    network = nn.Linear(3, 1, bias=False).double()
    precision = x.T @ x / NOISE_VAR + torch.eye(3)
    with torch.no_grad():
        network.weight.copy_(torch.linalg.solve(precision, x.T @ y / NOISE_VAR).T)
    return network, x, y


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHAINS)
def test_chains_on_the_device_have_the_closed_form(name: str) -> None:
    network, x, y = line()
    mean, precision = network.weight.detach()[0], x.T @ x / NOISE_VAR + torch.eye(3)
    data = x.to(DEVICE), y.to(DEVICE)
    posterior = CHAINS[name](network.to(DEVICE), data, n2g.likelihoods.Gaussian(NOISE_VAR))
    draws = posterior.process.members.values["weight"].reshape(64, -1, 3)
    assert draws.device.type == DEVICE
    # averages of chains are independent of each other, so they give the error of their mean
    error = draws.mean(1).std(0).cpu() / 8
    assert bool(((draws.mean((0, 1)).cpu() - mean).abs() < 5 * error).all())
    found = torch.cov(draws.flatten(0, 1).T).cpu() @ precision
    assert float((found - torch.eye(3)).norm()) < 0.35


@pytest.mark.gpu
@pytest.mark.parametrize("name", FITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_posterior_of_the_device_predicts_the_same_on_the_cpu(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3)).to(DEVICE, dtype)
    x = torch.randn(30, 2, device=DEVICE, dtype=dtype)
    y = (x.sum(1) > 0).long() + (x[:, 0] > 1).long()
    posterior = FITS[name](network, (x, y), n2g.Categorical())
    there = posterior.predict(x).probs
    assert there.device.type == DEVICE
    assert bool(there.isfinite().all())
    posterior.save(tmp_path / "posterior.safetensors")
    own = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
    here = n2g.load(tmp_path / "posterior.safetensors", own, device="cpu").predict(x.cpu()).probs
    torch.testing.assert_close(there.cpu(), here, rtol=0, atol=2e-3)
