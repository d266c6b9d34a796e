"""The tangent kernel over depth, against the kernels of modules of that depth."""

import pytest
import torch
from torch import nn

from net2gp.errors import InputError
from net2gp.limits import critical_line, infinite_width, tangent_depth
from net2gp.limits.modules import Erf

WEIGHT_VAR, BIAS_VAR = 1.3, 0.2


class Residual(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.activation, self.layer = activation, nn.Linear(8, 8)

    def forward(self, z):
        return z + self.layer(self.activation(z))


def network(activation, depth, residual):
    layers = [nn.Linear(2, 8)]
    for _ in range(depth - 1):
        layers += [Residual(activation)] if residual else [activation, nn.Linear(8, 8)]
    return nn.Sequential(*layers)


@pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("activation", [nn.ReLU(), Erf()], ids=["relu", "erf"])
def test_every_layer_is_the_kernel_of_a_module_of_that_depth(activation, residual):
    angles = torch.tensor([0.0, 0.7, 2.0], dtype=torch.float64)
    x = torch.stack([angles.cos(), angles.sin()], 1)
    first = WEIGHT_VAR / 2 + BIAS_VAR
    c = ((WEIGHT_VAR * x @ x[0] / 2 + BIAS_VAR) / first)[1:]
    found = tangent_depth(activation, WEIGHT_VAR, BIAS_VAR, c, 4, variance=first, residual=residual)
    for depth in (1, 2, 4):
        limit = infinite_width(
            network(activation, depth, residual), weight_var=WEIGHT_VAR, bias_var=BIAS_VAR
        )
        covariance, tangent = limit(x)
        at = depth - 1
        wanted = covariance[0] / covariance[0, 0]
        torch.testing.assert_close(found.variance[at], covariance[0, 0], rtol=1e-10, atol=0)
        torch.testing.assert_close(found.correlation[at], wanted[1:], rtol=1e-10, atol=0)
        torch.testing.assert_close(found.tangent[at], tangent[0, 0], rtol=1e-10, atol=0)
        wanted = tangent[0] / tangent[0, 0]
        torch.testing.assert_close(found.normalized[at], wanted[1:], rtol=1e-10, atol=0)


@pytest.mark.parametrize(
    ("activation", "limit"), [(nn.ReLU(), 1 / 4), (Erf(), 1 / 3)], ids=["relu", "erf"]
)
def test_on_the_edge_all_pairs_tend_to_one_number(activation, limit):
    bias_var = 0.0 if isinstance(activation, nn.ReLU) else 0.1
    weight_var = float(critical_line(activation, bias_var))
    c = torch.tensor([-0.3, 0.5], dtype=torch.float64)
    variance = 1.0 if bias_var == 0 else None
    found = tangent_depth(activation, weight_var, bias_var, c, 400, variance=variance)
    away = (found.normalized - limit).abs().amax(1)
    assert float(away[-1]) < 0.03
    # a power near −1: four times as deep is between 2.5 and 4.5 times as near
    assert 2.5 < float(away[99] / away[399]) < 4.5


def test_what_cannot_be_followed_is_refused():
    pairs = torch.tensor([0.5])
    with pytest.raises(InputError, match=r"tends to inf.*Pass the variance"):
        tangent_depth(nn.ReLU(), 3.0, 0.1, pairs, 5)
    with pytest.raises(InputError, match="from −1 to 1"):
        tangent_depth(nn.ReLU(), 1.0, 0.1, torch.tensor([1.5]), 5)
