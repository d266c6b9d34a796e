"""Networks in training: one module, or several stacked ones that share vectorized passes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import vmap

from net2gp.bayes.model.stacked import Room, StackedMLP
from net2gp.calling import called, called_with
from net2gp.inputs import map_inputs
from net2gp.linear.forward.evaluation import without_vmap_warnings
from net2gp.linear.linearized import Linearized, Output
from net2gp.types import Inputs, Params

Pull = Callable[[Tensor], None]
"""What adds Jᵀu to the gradients of parameters, for slopes u."""


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

    def forward(self, x: Inputs, own: bool) -> tuple[Tensor, Pull]:
        """The outputs, and a function that adds Jᵀu to the gradients of the leaves for slopes u (S, B, C)."""

    def laid_out(self, params: Params) -> list[Tensor]:
        """Values by name, with an axis of length S or 1 in front, as a matrix of such rows per leaf."""

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

    def forward(self, x: Inputs, own: bool) -> tuple[Tensor, Pull]:
        """The outputs, and how to go back."""
        f = self.outputs(x, own)
        return f.detach(), partial(_pull, f)

    def laid_out(self, params: Params) -> list[Tensor]:
        """A matrix per parameter."""
        return [_rows(params[name]) for name in self._own]

    def _values(self) -> Params:
        return {**dict(self.network.named_parameters()), **dict(self.network.named_buffers())}

    def state(self) -> Params:
        """All parameters and buffers, since networks of a factory may differ in those out of training."""
        return {name: value.detach().clone()[None] for name, value in self._values().items()}

    def load(self, state: Params) -> None:
        """Take over parameters and buffers."""
        values = self._values()
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
            return called_with(self.network, {**self._shared, **params}, x, self.output)

        with without_vmap_warnings():
            many = vmap(run, in_dims=(0, 0 if own else None), randomness="different")
            return many(self._own, x)

    def forward(self, x: Inputs, own: bool) -> tuple[Tensor, Pull]:
        """The outputs, and how to go back."""
        f = self.outputs(x, own)
        return f.detach(), partial(_pull, f)

    def laid_out(self, params: Params) -> list[Tensor]:
        """A matrix per parameter."""
        return [_rows(params[name]) for name in self._own]

    def state(self) -> Params:
        """Copies of the stacked parameters."""
        return {name: value.detach().clone() for name, value in self._own.items()}

    def load(self, state: Params) -> None:
        """Take over the parameters."""
        with torch.no_grad():
            for name, value in state.items():
                self._own[name].copy_(value)


class Perceptrons:
    """S perceptrons of linear layers whose parameters are the rows of one matrix, without a graph of torch.

    Args:
        networks: The modules, which are not changed.
        architecture: The first of them in eval mode, with the parameters in training.
        layers: What it computes as a function of such a matrix.
    """

    def __init__(
        self, networks: Sequence[nn.Module], architecture: Linearized, layers: StackedMLP
    ) -> None:
        self.network, self._layers, self._room = architecture.network, layers, Room()
        self._shapes = {name: value.shape for name, value in architecture.params.items()}
        known = [dict(network.named_parameters()) for network in networks]
        rows = [torch.cat([one[n].detach().reshape(-1) for n in self._shapes]) for one in known]
        self._theta = torch.stack(rows).requires_grad_()

    def __len__(self) -> int:
        return len(self._theta)

    @property
    def leaves(self) -> list[Tensor]:
        """The matrix of all parameters."""
        return [self._theta]

    @property
    def params(self) -> Params:
        """The parameters by name, as parts of the matrix."""
        pieces = self._theta.split([shape.numel() for shape in self._shapes.values()], 1)
        named = zip(self._shapes.items(), pieces, strict=True)
        return {name: piece.reshape(-1, *shape) for (name, shape), piece in named}

    def outputs(self, x: Inputs, own: bool) -> Tensor:
        """The outputs by batched matrix products: (S, B, C)."""
        return self._layers.forward(self._theta.detach(), x, own)[0]

    def forward(self, x: Inputs, own: bool) -> tuple[Tensor, Pull]:
        """The outputs, and how to go back."""
        theta = self._theta.detach()
        f, saved = self._layers.forward(theta, x, own, self._room)

        def pull(slopes: Tensor) -> None:
            if self._theta.grad is None:
                self._theta.grad = torch.zeros_like(theta)
            self._layers.backward(theta, saved, slopes, self._theta.grad, self._room)

        return f, pull

    def laid_out(self, params: Params) -> list[Tensor]:
        """One matrix."""
        return [torch.cat([_rows(params[name]) for name in self._shapes], 1)]

    def state(self) -> Params:
        """Copies of the parameters."""
        return {name: value.detach().clone() for name, value in self.params.items()}

    def load(self, state: Params) -> None:
        """Take over the parameters."""
        with torch.no_grad():
            self._theta.copy_(self.laid_out(state)[0])


def _rows(value: Tensor) -> Tensor:
    """All but the first axis as one."""
    return value.reshape(len(value), -1)


def _pull(f: Tensor, slopes: Tensor) -> None:
    torch.autograd.backward(f, slopes)


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
