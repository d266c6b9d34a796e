"""The networks of the page as modules of torch."""

from __future__ import annotations

from torch import Tensor, nn

from net2gp.limits import modules

ACTIVATIONS: dict[str, nn.Module] = {
    "relu": nn.ReLU(),
    "leaky": nn.LeakyReLU(0.1),
    "gelu": nn.GELU(),
    "erf": modules.Erf(),
    "sin": modules.Sin(),
    "abs": modules.Abs(),
    "bump": modules.GaussianBump(),
    "linear": nn.Identity(),
    "tanh": nn.Tanh(),
    "silu": nn.SiLU(),
    "softplus": nn.Softplus(),
    "sigmoid": nn.Sigmoid(),
}

TABLES = ("tanh", "silu", "softplus", "sigmoid")


class Residual(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(x)


def same_network(net: dict, width: int = 8) -> nn.Sequential:
    """What the page calls a network, whose width the limit ignores."""
    layers: list[nn.Module] = [nn.Linear(1, width)]
    for level in range(net["depth"]):
        last = level == net["depth"] - 1
        norm = [nn.LayerNorm(width)] if net["norm"] else []
        block = [*norm, ACTIVATIONS[net["activation"]], nn.Linear(width, 1 if last else width)]
        skips = net["skip"] and not last
        layers += [Residual(nn.Sequential(*block))] if skips else block
    return nn.Sequential(*layers).double()


def net_of(activation: str, depth: int = 2, **changes: object) -> dict:
    return {
        "depth": depth,
        "activation": activation,
        "weightVar": 1.7,
        "biasVar": 0.2,
        "norm": False,
        "skip": False,
        **changes,
    }
