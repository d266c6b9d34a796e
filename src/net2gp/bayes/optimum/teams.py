"""Networks in training: one module, or several stacked ones that share vectorized passes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from net2gp.inputs import map_inputs, tensors
from net2gp.linear.forward.evaluation import without_vmap_warnings
from net2gp.linear.linearized import Output
from net2gp.types import Inputs, Params


class Team(Protocol):
    """S networks of one architecture in training."""

    network: nn.Module

    def __len__(self) -> int:
        """The number of networks S."""

    @property
    def leaves(self) -> list[Tensor]:
        """The tensors that an optimizer changes."""

    @property
    def params(self) -> Params:
        """The parameters in training by name, each with an axis of length S in front."""

    def outputs(self, x: Inputs, own: bool) -> Tensor:
        """The outputs (S, B, C); with `own`, `x` has an axis of networks in front."""

    def add_gradients(self, slopes: Params) -> None:
        """Add values with an axis of length S in front to the gradients of the parameters."""

    def state(self) -> Params:
        """Copies of parameters and of buffers that training changes, with an axis of length S in front."""

    def load(self, state: Params) -> None:
        """Take over the values of a state."""


class Single:
    """One network, which runs as the module that it is.

    Args:
        network: The module, which is changed.
        names: The names of the parameters in training.
        output: Picks the tensor of outputs from what the network returns.
    """

    def __init__(self, network: nn.Module, names: Sequence[str], output: Output | None) -> None:
        self.network, self.output = network, output
        known = dict(network.named_parameters())
        for name, value in known.items():
            value.requires_grad_(name in names)
        self._own = {name: known[name] for name in names}

    def __len__(self) -> int:
        return 1

    @property
    def leaves(self) -> list[Tensor]:
        """The parameters of the module."""
        return list(self._own.values())

    @property
    def params(self) -> Params:
        """The parameters with an axis in front."""
        return {name: value[None] for name, value in self._own.items()}

    def outputs(self, x: Inputs, own: bool) -> Tensor:
        """The outputs: (1, B, C)."""
        x = map_inputs(x, lambda value: value[0] if own else value.clone())
        return called(self.network, x, self.output)[None]

    def add_gradients(self, slopes: Params) -> None:
        """Add to the gradients of the parameters."""
        for name, value in self._own.items():
            own = slopes[name][0]
            value.grad = own if value.grad is None else value.grad.add_(own)

    def state(self) -> Params:
        """The parameters and all buffers."""
        values = {**self._own, **dict(self.network.named_buffers())}
        return {name: value.detach().clone()[None] for name, value in values.items()}

    def load(self, state: Params) -> None:
        """Take over parameters and buffers."""
        values = {**self._own, **dict(self.network.named_buffers())}
        with torch.no_grad():
            for name, value in state.items():
                values[name].copy_(value[0])


class Stacked:
    """S networks whose parameters are stacked, so that one vectorized pass evaluates all of them.

    Args:
        networks: The modules, which are not changed; they share buffers and parameters out of training.
        names: The names of the parameters in training.
        output: Picks the tensor of outputs from what a network returns.
    """

    def __init__(
        self, networks: Sequence[nn.Module], names: Sequence[str], output: Output | None
    ) -> None:
        self.network, self.output, self._size = copy.deepcopy(networks[0]), output, len(networks)
        known = [dict(network.named_parameters()) for network in networks]
        self._own = {
            name: torch.stack([one[name].detach() for one in known]).requires_grad_()
            for name in names
        }
        self._shared = {n: p.detach() for n, p in known[0].items() if n not in self._own}

    def __len__(self) -> int:
        return self._size

    @property
    def leaves(self) -> list[Tensor]:
        """The stacked parameters."""
        return list(self._own.values())

    @property
    def params(self) -> Params:
        """The stacked parameters by name."""
        return self._own

    def outputs(self, x: Inputs, own: bool) -> Tensor:
        """The outputs of all networks in one pass: (S, B, C)."""

        def run(params: Params, x: Inputs) -> Tensor:
            values = {**self._shared, **params}
            return called(
                lambda *a, **k: functional_call(self.network, values, a, k), x, self.output
            )

        with without_vmap_warnings():
            many = vmap(run, in_dims=(0, 0 if own else None), randomness="different")
            return many(self._own, x)

    def add_gradients(self, slopes: Params) -> None:
        """Add to the gradients of the stacked parameters."""
        for name, value in self._own.items():
            value.grad = slopes[name] if value.grad is None else value.grad.add_(slopes[name])

    def state(self) -> Params:
        """Copies of the stacked parameters."""
        return {name: value.detach().clone() for name, value in self._own.items()}

    def load(self, state: Params) -> None:
        """Take over the parameters."""
        with torch.no_grad():
            for name, value in state.items():
                self._own[name].copy_(value)


def can_stack(networks: Sequence[nn.Module], names: Sequence[str], x: Inputs) -> bool:
    """Whether networks share all that is not in training, and a pass changes no buffer.

    Args:
        networks: Modules of one architecture, in the modes in which they are trained.
        names: The names of the parameters in training.
        x: A few points.

    Returns:
        False if batch statistics, random features or frozen parameters differ or move.
    """
    rest = [{**dict(n.named_parameters()), **dict(n.named_buffers())} for n in networks]
    shared = [name for name in rest[0] if name not in names]
    if any(not torch.equal(one[name], rest[0][name]) for one in rest[1:] for name in shared):
        return False
    trial = copy.deepcopy(networks[0])
    before = {name: value.clone() for name, value in trial.named_buffers()}
    with torch.no_grad():
        called(trial, map_inputs(x, torch.clone), lambda out: out)
    return all(torch.equal(value, before[name]) for name, value in trial.named_buffers())


def called(network: Callable[..., Any], x: Inputs, output: Output | None) -> Any:
    """Call a network with inputs, a tuple as *x and a dict as **x, and flatten its outputs to (N, C).

    Args:
        network: The network.
        x: N points.
        output: Picks the tensor of outputs from what the network returns.

    Returns:
        The outputs.
    """
    out = network(**x) if isinstance(x, Mapping) else network(*tensors(x))
    if output is not None:
        out = output(out)
    return out.reshape(out.shape[0], -1) if isinstance(out, Tensor) else out
