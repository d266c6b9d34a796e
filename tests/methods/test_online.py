"""Hyper-parameters learned while a network trains."""

import pytest
import torch
from torch import nn

import net2gp as n2g
from net2gp.errors import InputError
from net2gp.methods.training.online import Schedule, train_by_evidence


def data(noise_var=0.04, count=80):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(count, 1, generator=generator, dtype=torch.float64) * 6 - 3
    return x, x.sin() + noise_var**0.5 * torch.randn(
        count, 1, generator=generator, dtype=torch.float64
    )


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 1)).double()


SCHEDULE = Schedule(num_epochs=200, learning_rate=0.02, batch_size=16, every=20, burn_in=80)
LONG = Schedule(num_epochs=500, learning_rate=0.02, batch_size=16, every=20, burn_in=100)


@pytest.mark.parametrize("structure", [n2g.Full(), n2g.Kron(), n2g.Diagonal()], ids=str)
def test_the_noise_is_found_and_the_network_learns(structure):
    module = network()
    posterior = train_by_evidence(
        module, data(), n2g.Gaussian(), structure=structure, schedule=SCHEDULE
    )
    if not isinstance(structure, n2g.Diagonal):  # which counts too many parameters as determined
        assert 0.02 < posterior.likelihood.noise_var < 0.08
    x = torch.linspace(-3, 3, 50, dtype=torch.float64)[:, None]
    assert float((posterior.marginal(x).mean - x.sin()).square().mean()) < 0.05
    torch.testing.assert_close(posterior.marginal(x).mean, module(x).detach())
    assert set(posterior.prior_var) == {name for name, _ in module.named_parameters()}


@pytest.mark.slow
def test_useless_inputs_get_no_weights():
    generator = torch.Generator().manual_seed(1)
    x, y = data()
    wide = torch.cat([x, torch.randn(80, 10, generator=generator, dtype=torch.float64)], 1)
    torch.manual_seed(0)
    parts = nn.ModuleDict({"signal": nn.Linear(1, 20), "noise": nn.Linear(10, 20)})

    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts, self.head = parts, nn.Linear(20, 1)

        def forward(self, x):
            return self.head(
                (self.parts["signal"](x[:, :1]) + self.parts["noise"](x[:, 1:])).tanh()
            )

    posterior = train_by_evidence(
        Split().double(), (wide, y), n2g.Gaussian(), structure=n2g.Full(), schedule=LONG
    )
    prior = posterior.prior_var
    assert prior["parts.noise.weight"] < 0.2 * prior["parts.signal.weight"]


def test_only_the_evidence_can_choose_on_the_way():
    with pytest.raises(InputError, match=r"tuning must be Evidence\(\)"):
        train_by_evidence(network(), data(), n2g.Gaussian(), tuning=n2g.tuning.Validation(data()))
