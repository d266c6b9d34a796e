"""Perceptrons of many members at once: outputs and gradients by batched matrix products, without a graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from net2gp.linear.linearized import Linearized
from net2gp.types import Inputs

aten = torch.ops.aten

ONE_THREAD = 2**15
"""Torch computes elementwise functions of tensors up to this size on one thread."""

FEW_THREADS = 4
"""With more threads, torch's tanh of a large tensor is as fast as NumPy's."""

Backward = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(gradient of the result, argument, result) → gradient of the argument."""


@dataclass(frozen=True)
class Affine:
    """A linear layer, and where its parameters lie in a flat vector.

    Args:
        shape: The numbers of outputs and inputs.
        weight: The first index of the weight, or its fixed value.
        bias: The first index of the bias, its fixed value, or None.
    """

    shape: tuple[int, int]
    weight: int | Tensor
    bias: int | Tensor | None

    def weights(self, theta: Tensor) -> Tensor:
        """The weights of all members: (K, outputs, inputs)."""
        if isinstance(self.weight, Tensor):
            return self.weight.expand(len(theta), *self.shape)
        rows, columns = self.shape
        piece = theta[:, self.weight : self.weight + rows * columns]
        return piece.view(len(theta), rows, columns)

    def __call__(self, theta: Tensor, h: Tensor, out: Tensor | None = None) -> Tensor:
        """W h + b of all members: (K, N, outputs)."""
        weights = self.weights(theta).mT
        if self.bias is None:
            return torch.bmm(h, weights, out=out)
        if isinstance(self.bias, Tensor):
            return torch.baddbmm(self.bias, h, weights, out=out)
        bias = theta[:, None, self.bias : self.bias + self.shape[0]]
        return torch.baddbmm(bias, h, weights, out=out)

    def add_grad(self, grad: Tensor, h: Tensor, slopes: Tensor) -> None:
        """Add the gradient of the parameters to a flat gradient, (K, P), in place."""
        outputs, inputs = self.shape
        if isinstance(self.weight, int):
            # BLAS takes up to five times as long if the rows of the product are the shorter side
            if inputs < outputs:
                self.weights(grad).add_(torch.bmm(h.mT, slopes).mT)
            else:
                self.weights(grad).baddbmm_(slopes.mT, h)
        if isinstance(self.bias, int):
            grad[:, self.bias : self.bias + outputs].add_(slopes.sum(1))

    def back(self, theta: Tensor, slopes: Tensor, out: Tensor | None = None) -> Tensor:
        """Wᵀu of all members for slopes u: (K, N, inputs)."""
        multiply = torch.mul if self.shape[0] == 1 else torch.bmm
        return multiply(slopes, self.weights(theta), out=out)


@dataclass(frozen=True)
class Elementwise:
    """A nonlinearity and its derivative.

    Args:
        forward: The function.
        backward: Its derivative times a vector.
        name: The name, if other code has the function in a form of its own.
        overwrite: The function, and its derivative that needs the result alone, which change their first
            argument in place. None if the derivative needs the argument.
    """

    forward: Callable[[Tensor], Tensor]
    backward: Backward
    name: str = ""
    overwrite: tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]] | None = None


class Room:
    """Memory that every pass of a training uses again, since the system clears new memory page by page.

    What a pass keeps is overwritten by the next one.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], Tensor] = {}

    def __call__(self, use: str, index: int, like: Tensor, columns: int) -> Tensor:
        """A tensor with the shape of `like` but for its last axis, for one use by one layer."""
        shape, known = (*like.shape[:-1], columns), self._known.get((use, index))
        if known is None or known.shape != shape or known.dtype != like.dtype:
            known = self._known[use, index] = like.new_empty(shape)
        return known


@dataclass(frozen=True, eq=False)
class StackedMLP:
    """A perceptron as a function of the parameters of K members, (K, P), with its gradient.

    Args:
        layers: The linear layers and the nonlinearities between them, in order.
    """

    layers: tuple[Affine | Elementwise, ...] = field(repr=False)

    def forward(
        self, theta: Tensor, x: Inputs, own: bool = False, room: Room | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Compute the outputs of all members.

        Args:
            theta: One vector of parameters per member, (K, P).
            x: N points, the same for all members.
            own: Whether members have points of their own, so that `x` has an axis of length K in front.
            room: The memory of hidden layers; None takes new memory.

        Returns:
            The outputs, (K, N, C), and what `backward` needs.
        """
        assert isinstance(x, Tensor)
        flat = x.flatten(2) if own else x.flatten(1)
        saved = [flat if own else flat.expand(len(theta), *flat.shape)]
        for index, layer in enumerate(self.layers):
            if isinstance(layer, Affine):
                hidden = index < len(self.layers) - 1
                out = room("forward", index, saved[-1], layer.shape[0]) if room and hidden else None
                saved.append(layer(theta, saved[-1], out))
            elif layer.overwrite and self._is_affine(index - 1):
                saved.append(layer.overwrite[0](saved[-1]))
            else:
                saved.append(layer.forward(saved[-1]))
        return saved[-1], saved

    def _is_affine(self, index: int) -> bool:
        """Whether there is such a layer and it is linear, so that what it returns is read nowhere else."""
        return 0 <= index < len(self.layers) and isinstance(self.layers[index], Affine)

    def backward(
        self,
        theta: Tensor,
        saved: list[Tensor],
        slopes: Tensor,
        grad: Tensor,
        room: Room | None = None,
    ) -> None:
        """Add Σ_n J(x_n)ᵀ u_n of each member to `grad` in place.

        Args:
            theta: One vector of parameters per member, (K, P).
            saved: What `forward` returned.
            slopes: The vectors u_n, (K, N, C).
            grad: One gradient per member, (K, P).
            room: The memory of slopes; None takes new memory.
        """
        for index in range(len(self.layers) - 1, -1, -1):
            layer, before, after = self.layers[index], saved[index], saved[index + 1]
            if isinstance(layer, Affine):
                layer.add_grad(grad, before, slopes)
                if index > 0:
                    out = room("backward", index, slopes, layer.shape[1]) if room else None
                    slopes = layer.back(theta, slopes, out)
            elif layer.overwrite and self._is_affine(index + 1):
                slopes = layer.overwrite[1](slopes, after)
            else:
                slopes = layer.backward(slopes, before, after)


def stacked_mlp(architecture: Linearized, x: Inputs) -> StackedMLP | None:
    """Read a perceptron from an `nn.Sequential` of linear layers and known nonlinearities.

    Args:
        architecture: The network.
        x: Some points, whose shape decides whether the layers see one vector per point.

    Returns:
        The closed form, or None if the network is anything else.

    >>> from net2gp.linear.linearized import linearize
    >>> network = nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, 1))
    >>> len(stacked_mlp(linearize(network), torch.ones(1, 1)).layers)
    3
    """
    network = architecture.network
    plain = type(network) in (nn.Sequential, nn.Linear) and architecture.output is None
    if not plain or not isinstance(x, Tensor) or not x.is_floating_point() or _watched(network):
        return None
    children = network._modules.items()  # named_children leaves out a module's second place
    named = (
        {"": network}
        if type(network) is nn.Linear
        else {n: m for n, m in children if m is not None}
    )
    if len({id(module) for module in named.values()}) != len(named):
        return None  # a layer that is used twice
    starts, at = {}, 0
    for name, value in architecture.params.items():
        starts[name], at = at, at + value.numel()
    layers: list[Affine | Elementwise] = []
    flat = x.dim() == 2
    for name, module in named.items():
        flat = flat or (type(module) is nn.Flatten and module.start_dim == 1 and not layers)
        if type(module) in (nn.Identity, nn.Flatten):
            continue
        layer = _layer(f"{name}." if name else "", module, architecture, starts)
        if layer is None or not flat:
            return None
        layers.append(layer)
    return StackedMLP(tuple(layers)) if layers and flat else None


def _watched(network: nn.Module) -> bool:
    """Whether hooks could change what the layers compute."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind) for module in network.modules() for kind in kinds)


def _layer(
    prefix: str, module: nn.Module, architecture: Linearized, starts: dict[str, int]
) -> Affine | Elementwise | None:
    if type(module) is not nn.Linear:
        return _elementwise(module)
    places: list[int | Tensor | None] = []
    for name, value in (("weight", module.weight), ("bias", module.bias)):
        if value is None:
            places.append(None)
        elif prefix + name in starts:
            places.append(starts[prefix + name])
        elif prefix + name in architecture.frozen:
            places.append(architecture.frozen[prefix + name])
        else:  # a parameter that two layers share has the name of the first one only
            return None
    weight, bias = places
    assert weight is not None
    return Affine((module.out_features, module.in_features), weight, bias)


def _elementwise(module: nn.Module) -> Elementwise | None:
    kind = type(module)
    if kind is nn.Tanh:
        into = aten.tanh_backward.grad_input
        return Elementwise(
            lambda a: fast_tanh(a, torch.empty_like(a)),
            lambda u, a, b: aten.tanh_backward(u, b),
            "tanh",
            (lambda a: fast_tanh(a, a), lambda u, b: into(u, b, grad_input=u)),
        )
    if kind is nn.ReLU:
        put = aten.threshold_backward.grad_input
        return Elementwise(
            torch.relu,
            lambda u, a, b: aten.threshold_backward(u, b, 0),
            "relu",
            (torch.relu_, lambda u, b: put(u, b, 0, grad_input=u)),
        )
    if kind is nn.Sigmoid:
        return Elementwise(torch.sigmoid, lambda u, a, b: aten.sigmoid_backward(u, b))
    if kind is nn.SiLU:
        return Elementwise(nn.functional.silu, lambda u, a, b: aten.silu_backward(u, a))
    if isinstance(module, nn.GELU) and kind is nn.GELU:
        form = module.approximate
        return Elementwise(
            lambda a: nn.functional.gelu(a, approximate=form),
            lambda u, a, b: aten.gelu_backward(u, a, approximate=form),
        )
    return None


def fast_tanh(a: Tensor, out: Tensor) -> Tensor:
    """Compute tanh(a) into `out`, which may be `a`, without a graph.

    NumPy's tanh took a seventh of the time of torch's on one thread of a CPU with AVX-512 in float32, and a
    third in float64, with errors of at most two units in the last place. It has one thread only, so torch's
    is taken for large tensors where there are many threads.

    >>> fast_tanh(torch.zeros(2), torch.empty(2))
    tensor([0., 0.])
    """
    known = a.is_cpu and a.dtype in (torch.float32, torch.float64) and not a.requires_grad
    if not known or (a.numel() > ONE_THREAD and torch.get_num_threads() > FEW_THREADS):
        return torch.tanh(a, out=out)
    np.tanh(a.numpy(), out=out.numpy())
    return out
