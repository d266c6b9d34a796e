"""Products and sums of a signal with a bare parameter: layer scales, positions, gates."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from architectures import Apply, parameter
from net2gp.linear import linearize
from net2gp.linear.planning.probe import plan
from reference.jacobians import brute_force_jacobian, flat


def images(act) -> nn.Module:
    """A convolution, what `act` makes of its output and a parameter of four channels, and a head."""

    def forward(self, x: Tensor) -> Tensor:
        signal = self.conv(x.reshape(-1, 1, 2, 3))
        return self.head(torch.tanh(act(signal, self.gamma)).flatten(1))

    conv, head = nn.Conv2d(1, 4, 1), nn.Linear(24, 2)
    return Apply(forward, conv=conv, head=head, gamma=parameter(4))


def tokens(act, *shape: int) -> nn.Module:
    """Three tokens of four features, with a parameter of the given shape."""

    def forward(self, x: Tensor) -> Tensor:
        signal = self.embed(x.reshape(-1, 3, 2))
        return self.head(torch.tanh(act(signal, self.gamma)).mean(1))

    return Apply(forward, embed=nn.Linear(2, 4), head=nn.Linear(4, 2), gamma=parameter(*shape))


STRUCTURED = {
    "scale": lambda: images(lambda x, p: x.mul(p.reshape(1, -1, 1, 1))),
    "indexed": lambda: images(lambda x, p: p[None, :, None, None] * x),
    "two axes": lambda: images(lambda x, p: torch.mul(x, p.view(4, 1, 1))),
    "shift": lambda: images(lambda x, p: torch.add(p.view(4, 1, 1), x)),
    "both": lambda: tokens(lambda x, p: x * p, 4),
    "positions": lambda: tokens(lambda x, p: x + p, 1, 3, 4),
    "positions without batch": lambda: tokens(lambda x, p: p + x, 3, 4),
    "per token": lambda: tokens(lambda x, p: x * p.unsqueeze(-1), 3),
    "one number": lambda: tokens(lambda x, p: x * p),
    "twice": lambda: tokens(lambda x, p: torch.sin(x * p) * p, 4),
}
OTHERWISE = {
    "one view twice": lambda: images(
        lambda x, p: (lambda q: torch.sin(x * q) * q)(p[:, None, None])
    ),
    "one view, two uses": lambda: images(
        lambda x, p: (lambda q: x * q + torch.sin(q))(p.reshape(1, 4, 1, 1))
    ),
    "permuted": lambda: images(lambda x, p: x * p[torch.tensor([2, 0, 3, 1])].reshape(4, 1, 1)),
    "turned": lambda: tokens(lambda x, p: x * p.mT, 4, 3),
    "product and sum": lambda: tokens(lambda x, p: x * p + p, 4),
    "in place": lambda: tokens(lambda x, p: (x * 1.0).mul_(p), 4),
    "changed afterwards": lambda: tokens(lambda x, p: (lambda z: x.mul_(2.0) + z)(x + p), 4),
    "with itself": lambda: tokens(lambda x, p: x + (p * p), 4),
    "signal that broadcasts": lambda: tokens(lambda x, p: x.mean(1, keepdim=True) * p, 3, 4),
    "complex signal": lambda: tokens(lambda x, p: torch.fft.irfft(torch.fft.rfft(x) * p, n=4), 3),
    "weighted sum": lambda: tokens(lambda x, p: torch.add(x, p, alpha=3.0), 4),
}


def differs(network: nn.Module, num_points: int) -> float:
    x = torch.randn(num_points, 6, dtype=torch.float64)
    J = flat(brute_force_jacobian(network, x)).flatten(0, 1)
    return float((linearize(network).kernel()(x) - J @ J.mT).abs().max() / (J @ J.mT).abs().max())


@pytest.mark.parametrize("num_points", [1, 3, 4, 6])
@pytest.mark.parametrize("name", [*STRUCTURED, *OTHERWISE])
def test_the_kernel_is_the_product_of_jacobians(name, num_points):
    torch.manual_seed(0)
    network = (STRUCTURED | OTHERWISE)[name]().double().eval()
    assert differs(network, num_points) < 1e-12


@pytest.mark.parametrize("name", STRUCTURED)
def test_a_product_or_sum_with_a_parameter_has_structure(name):
    torch.manual_seed(0)
    network = STRUCTURED[name]().double().eval()
    found = plan(linearize(network), torch.randn(5, 6, dtype=torch.float64))
    assert "gamma" in found.structured
