"""Fully connected networks as lists of hidden layers, and checks of the inputs that they get."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from net2gp.errors import InputError, NetworkError, check_finite, check_positive
from net2gp.inputs import describe
from net2gp.limits.duals.activations import Activation, activation_of


@dataclass(frozen=True)
class HiddenLayer:
    """A layer of hidden units: a linear layer followed by an activation.

    Args:
        activation: A module of torch, or an activation that `activation_of` returns.
        width: The number n of hidden units.
    """

    activation: nn.Module | Activation
    width: int


Layers = nn.Module | Sequence[HiddenLayer]
"""A network of alternating Linear and activation layers, or the list of its hidden layers."""


def hidden_layers(network: nn.Module) -> tuple[HiddenLayer, ...]:
    """Return the hidden layers of an `nn.Sequential` of Linear, activation, …, activation, Linear.

    Args:
        network: The network; Flatten and Identity layers are skipped.

    Returns:
        A tuple with the activation and the width of each hidden layer.

    Raises:
        NetworkError: If Linear layers and activations do not alternate.

    >>> hidden_layers(nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 1)))
    (HiddenLayer(activation=Tanh(), width=64),)
    """
    modules = [m for m in _flatten(network) if not isinstance(m, nn.Flatten | nn.Identity)]
    linear, activations = modules[::2], modules[1::2]
    if len(linear) != len(activations) + 1 or not all(isinstance(m, nn.Linear) for m in linear):
        kinds = ", ".join(type(m).__name__ for m in modules)
        raise NetworkError(
            f"expected Linear layers with one activation between each two of them, but got {kinds}. "
            "Pass such an nn.Sequential, or the hidden layers: [HiddenLayer(nn.Tanh(), 512)] * 3."
        )
    return tuple(
        HiddenLayer(activation, int(before.out_features))  # type: ignore[arg-type]
        for before, activation in zip(linear, activations, strict=False)
    )


def checked(
    network: Layers, x: Tensor, weight_var: float, bias_var: float
) -> tuple[Tensor, Sequence[HiddenLayer], float]:
    """Return x in float64, the hidden layers, and the bias variance (0 for a network without biases).

    Raises:
        InputError: If x is not a batch of finite rows, or a variance is out of range.
        NetworkError: If the network is not fully connected, or only some of its layers have a bias.
    """
    check_positive(weight_var, "weight_var")
    check_positive(bias_var, "bias_var", zero=True)
    if not isinstance(x, Tensor) or x.dim() < 2:
        raise InputError(
            f"x must be a tensor of inputs in rows, (N, d), but is {describe(x)}. "
            "Pass a single input as x[None]."
        )
    check_finite(x, "x")
    x = x.detach().flatten(1).double()
    if not isinstance(network, nn.Module):
        return x, network, bias_var
    layers = hidden_layers(network)
    linear = [module for module in _flatten(network) if isinstance(module, nn.Linear)]
    biased = {module.bias is not None for module in linear}
    if len(biased) > 1:
        raise NetworkError(
            "some Linear layers have a bias and some have none; these corrections take one bias_var "
            "for all. Use bias=True (or bias=False) throughout."
        )
    return x, layers, bias_var if biased == {True} else 0.0


def activation_in(layer: HiddenLayer) -> Activation:
    """Return the activation of the layer with its Gaussian expectations."""
    given = layer.activation
    return activation_of(given) if isinstance(given, nn.Module) else given


def _flatten(network: nn.Module) -> Iterator[nn.Module]:
    if isinstance(network, nn.Sequential):
        for module in network:
            yield from _flatten(module)
    else:
        yield network
