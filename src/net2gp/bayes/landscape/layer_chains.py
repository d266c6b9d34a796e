"""Networks that are a plain chain of layers, and the hidden units that can change places in them."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from net2gp.errors import NetworkError
from net2gp.limits.modules import Pointwise

DENSE = (nn.Linear,)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
POINTWISE = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU),
    *(nn.Mish, nn.Sigmoid, nn.Hardsigmoid, nn.LogSigmoid, nn.Hardswish, nn.Softplus, nn.Softsign),
    *(nn.Tanh, nn.Hardtanh, nn.Tanhshrink, nn.Hardshrink, nn.Softshrink, nn.Threshold),
)
LARGEST = (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
)
AVERAGES = (
    *(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
)
UNCHANGED = (nn.Identity, nn.Flatten, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)

Weighted = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d


@dataclass(frozen=True, eq=False)
class Stage:
    """A layer with weights and what stands between it and the next such layer.

    Args:
        name: The name of the layer in the network.
        layer: The layer, linear or convolutional.
        between: Activations, pooling and the like, by name.
    """

    name: str
    layer: Weighted
    between: tuple[tuple[str, nn.Module], ...]

    @property
    def num_units(self) -> int:
        """The number of units, or of channels."""
        return int(self.layer.weight.shape[0])


def chain_of(network: nn.Module) -> list[Stage]:
    """The layers with weights, in order.

    Args:
        network: An `nn.Sequential` of linear or convolutional layers, pointwise activations, pooling,
            `nn.Flatten` and dropout, possibly nested.

    Returns:
        The stages; all but the last have hidden units.

    Raises:
        NetworkError: If the network is something else; the message names what.
    """
    if not isinstance(network, nn.Sequential):
        raise NetworkError(
            f"symmetries of hidden units are known for nn.Sequential, but the network is a "
            f"{type(network).__name__}. Write its layers as nn.Sequential(...)."
        )
    modules = list(_flattened(network))
    owners = [id(module) for _, module in modules if next(module.parameters(), None) is not None]
    if len(set(owners)) < len(owners):
        raise NetworkError("a layer stands in the network twice, so its units cannot move alone.")
    places = [i for i, (_, module) in enumerate(modules) if type(module) in DENSE + CONVOLUTIONS]
    stages = []
    for here, following in pairwise([*places, len(modules)]):
        name, layer = modules[here]
        assert isinstance(layer, Weighted)
        stages.append(Stage(name, layer, tuple(modules[here + 1 : following])))
    if not stages:
        raise NetworkError("the network has no nn.Linear and no convolution, so it has no units.")
    for one, other in pairwise(stages):
        _check_join(one, other)
    for name, module in modules:
        known = type(module) in (*DENSE, *CONVOLUTIONS, nn.PReLU) or isinstance(module, Pointwise)
        if not known and id(module) in owners:
            raise NetworkError(
                f"'{name}' ({type(module).__name__}) has parameters of its own, and which units it has is "
                "not known. Use nn.Linear and nn.Conv1d, nn.Conv2d or nn.Conv3d."
            )
    return stages


def columns(one: Stage, other: Stage) -> int:
    """How many inputs of the next layer each unit of a layer feeds: its positions after a Flatten, or 1."""
    return int(other.layer.weight.shape[1]) // one.num_units


def follows_scale(module: nn.Module, factors: Tensor) -> bool:
    """Whether module(s · u) = s · module(u) for all of these factors s, which may be negative."""
    if isinstance(module, UNCHANGED + AVERAGES):
        return True
    if isinstance(module, LARGEST):
        return bool((factors > 0).all())
    own = deepcopy(module).to(device="cpu", dtype=torch.float64)
    size = torch.logspace(-6, 6, 25, dtype=torch.float64)
    points = torch.cat([-size, size])
    tests = [0.5, 3.0] if bool((factors.abs() != 1).any()) else []
    signs = [-1.0] if bool((factors < 0).any()) else []
    with torch.no_grad():
        return all(
            torch.allclose(own(points * s), own(points) * s, rtol=1e-13, atol=0)
            for s in (*tests, *signs)
        )


def _flattened(network: nn.Sequential, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, module in network._modules.items():
        assert module is not None
        if type(module) is nn.Sequential:
            yield from _flattened(module, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", module


def _check_join(one: Stage, other: Stage) -> None:
    """Raise unless the units of a layer are known among the inputs of the next one."""
    dense = isinstance(one.layer, nn.Linear)
    allowed = POINTWISE + UNCHANGED + (() if dense else LARGEST + AVERAGES)
    for name, module in one.between:
        known = type(module) in allowed or isinstance(module, Pointwise)
        if not known or (isinstance(module, nn.PReLU) and module.num_parameters > 1):
            raise NetworkError(
                f"'{name}' ({type(module).__name__}) stands between the layers '{one.name}' and "
                f"'{other.name}', and how it moves with their units is not known. Between layers there may "
                "be pointwise activations, Flatten and dropout, and pooling after convolutions."
            )
    for stage in (one, other):
        if isinstance(stage.layer, CONVOLUTIONS) and stage.layer.groups != 1:
            raise NetworkError(
                f"'{stage.name}' is a convolution in {stage.layer.groups} groups, whose channels cannot "
                "change places freely. Use groups=1."
            )
    inputs, flat = int(other.layer.weight.shape[1]), isinstance(other.layer, nn.Linear)
    has_flatten = any(isinstance(module, nn.Flatten) for _, module in one.between)
    spread = not dense and flat and has_flatten and inputs % one.num_units == 0
    if not spread and (inputs != one.num_units or dense != flat):
        raise NetworkError(
            f"'{one.name}' has {one.num_units} units and '{other.name}' has {inputs} inputs, and which "
            "inputs belong to which unit is not known. Put nn.Flatten() in front of the linear layer."
        )
