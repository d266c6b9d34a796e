"""The log joint of plain perceptrons on NumPy arrays, quicker than on tensors where networks are small."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from net2gp.bayes.chains.adaptation import Array
from net2gp.bayes.chains.flat import FlatModel
from net2gp.bayes.model.stacked import Affine

KNOWN = ("tanh", "relu")

CACHED = 2**15
"""How many numbers of a hidden layer are computed together: three such arrays fit into a cache of 1 MiB."""

SURE = 20.0
"""The hyperbolic tangent of it is 1 in float64."""


@dataclass(frozen=True, eq=False)
class ArrayLayer:
    """A linear layer, with places in a flat vector or fixed values, as in `Affine`."""

    shape: tuple[int, int]
    weight: int | Array
    bias: int | Array | None


@dataclass(frozen=True, eq=False)
class ArrayPerceptron:
    """The log joint of K chains and its gradient, for a Gaussian prior and Gaussian noise, in float64.

    Hidden layers have the axes chain, unit and point, so that sums over points run over neighbors in memory.

    Args:
        layers: The linear layers, the first of all, and the name of the nonlinearity after a layer.
        x: The inputs, (D, N).
        y: The targets, (C, N).
        noise: The inverse variances of the noise, (C, 1) or (C, N).
        precision: The inverse variances of the prior, (P,).
        constant: What does not depend on the parameters.
        temperature: Divides the log joint.
    """

    layers: tuple[ArrayLayer | str, ...]
    x: Array = field(repr=False)
    y: Array = field(repr=False)
    noise: Array = field(repr=False)
    precision: Array = field(repr=False)
    constant: float = 0.0
    temperature: float = 1.0
    _programs: dict[int, Program] = field(default_factory=dict, init=False, repr=False)

    def __call__(self, theta: Array) -> tuple[Array, Array]:
        """Compute the log joint, (K,), and its gradient, (K, P).

        Args:
            theta: One vector of parameters per chain, (K, P).
        """
        program = self._programs.get(len(theta))
        if program is None:
            program = self._programs[len(theta)] = Program(self, len(theta))
        return program(theta)


class Program:
    """The log joint of K chains as a list of calls of NumPy on memory that is there already.

    A pass over a small network is some twenty operations of a microsecond. To find their arguments again in
    each pass, and memory for their results, takes as long as the operations themselves. The bias is a last
    column of the weights of a layer, and each hidden layer has a last unit that is always 1. Chains are
    computed in groups whose hidden layers fit into the cache.

    Args:
        model: What to compute.
        chains: The number of chains K.
    """

    def __init__(self, model: ArrayPerceptron, chains: int) -> None:
        self.model, self.calls = model, list[Callable[[], object]]()
        self.room: dict[tuple[str, int], Array] = {}
        size, num_points = len(model.precision), model.x.shape[1]
        self.x = np.concatenate([model.x, np.ones((1, num_points))])
        self._lay_out(chains, size)
        self.value, self.loss = np.empty(chains), np.empty(chains)
        self.grad, self.pull = np.empty((chains, size)), np.empty((chains, size))
        theta = self.source[:, :size]
        self._add(np.multiply, theta, -model.precision, self.pull)
        self._add(np.vecdot, theta, self.pull, self.value)
        self.calls.append(
            partial(self.source.take, self.order, axis=1, out=self.weights, mode="clip")
        )
        most = max(1, CACHED // (num_points * max(rows for _, rows, _ in self.blocks.values())))
        for start in range(0, chains, most):
            part = slice(start, start + most)
            saved = self._forward(part)
            self._backward(part, saved, self._likelihood(part, saved[-1]))
        self.calls.append(
            partial(self.slopes.take, self.places, axis=1, out=self.grad, mode="clip")
        )
        self._add(np.subtract, self.value, self.loss, self.value)
        self._add(np.multiply, self.value, 0.5, self.value)

    def __call__(self, theta: Array) -> tuple[Array, Array]:
        """Compute the log joint, (K,), and its gradient, (K, P)."""
        self.source[:, : theta.shape[1]] = theta
        for call in self.calls:
            call()
        value, grad, heat = (
            self.value + self.model.constant,
            self.grad + self.pull,
            self.model.temperature,
        )
        return (value, grad) if heat == 1.0 else (value / heat, grad / heat)

    def _lay_out(self, chains: int, size: int) -> None:
        """Find where each entry of the matrices [W b; 0 c] comes from: parameters, then fixed values."""
        layers, fixed = self.model.layers, [np.array([0.0, 1.0, SURE])]
        self.blocks: dict[int, tuple[int, int, int]] = {}
        orders, at = list[Array](), 0
        linear = [index for index, layer in enumerate(layers) if isinstance(layer, ArrayLayer)]
        for index in linear:
            layer = layers[index]
            assert isinstance(layer, ArrayLayer)
            outputs, inputs = layer.shape
            hidden = index != linear[-1]
            order = np.full((outputs + hidden, inputs + 1), size)
            for value, block in (
                (layer.weight, order[:outputs, :-1]),
                (layer.bias, order[:outputs, -1]),
            ):
                if value is None:
                    continue
                if isinstance(value, int):
                    start = value
                else:
                    start = size + sum(map(len, fixed))
                    fixed.append(value.reshape(-1))
                block[...] = start + np.arange(block.size).reshape(block.shape)
            if hidden:
                order[-1, -1] = size + (2 if layers[index + 1] == "tanh" else 1)
            self.blocks[index] = (at, *order.shape)
            orders.append(order.reshape(-1))
            at += order.size
        self.order, constants = np.concatenate(orders), np.concatenate(fixed)
        self.places = np.empty(size, dtype=np.int64)
        own = (self.order < size).nonzero()[0]
        self.places[self.order[own]] = own
        self.source = np.empty((chains, size + len(constants)))
        self.source[:, size:] = constants
        self.weights, self.slopes = np.empty((chains, at)), np.zeros((chains, at))

    def _add(self, function: Callable[..., object], *arguments: Any) -> None:
        """Append a call whose last argument takes the result."""
        *given, out = arguments
        self.calls.append(partial(function, *given, out=out))

    def _memory(self, use: str, index: int, shape: tuple[int, ...]) -> Array:
        """Memory that all groups share; the last one may be smaller."""
        if (use, index) not in self.room:
            self.room[use, index] = np.empty(shape)
        return self.room[use, index][: shape[0]]

    def _block(self, index: int, whole: Array) -> Array:
        """The matrices [W b; 0 c] of a layer, (K, outputs, inputs + 1), as a view."""
        start, rows, columns = self.blocks[index]
        return whole[:, start : start + rows * columns].reshape(len(whole), rows, columns)

    def _forward(self, part: slice) -> list[Array]:
        """Compute all layers, (K, units, N)."""
        saved = [self.x]
        for index, layer in enumerate(self.model.layers):
            before = saved[-1]
            if isinstance(layer, ArrayLayer):
                weights = self._block(index, self.weights[part])
                after = self._memory("after", index, (*weights.shape[:2], before.shape[-1]))
                self._add(np.matmul, weights, before, after)
                saved.append(after)
                continue
            # what the linear layer returned is needed nowhere else
            self._add(
                *((np.tanh, before) if layer == "tanh" else (np.maximum, before, 0.0)), before
            )
            saved.append(before)
        return saved

    def _likelihood(self, part: slice, f: Array) -> Array:
        """Compute Σ (y − f)²/v of each chain, and return the memory of the slopes (y − f)/v."""
        left, slopes = self._memory("left", 0, f.shape), self._memory("slopes", 0, f.shape)
        self._add(np.subtract, self.model.y, f, left)
        self._add(np.multiply, left, self.model.noise, slopes)
        flat = (len(f), -1)
        self._add(np.vecdot, left.reshape(flat), slopes.reshape(flat), self.loss[part])
        return slopes

    def _backward(self, part: slice, saved: list[Array], slopes: Array) -> None:
        """Compute the gradient of the likelihood in all weights."""
        for index in range(len(self.model.layers) - 1, -1, -1):
            layer, before, after = self.model.layers[index], saved[index], saved[index + 1]
            if isinstance(layer, str):
                scale = self._memory("scale", index, slopes.shape)
                if layer == "tanh":
                    self._add(np.square, after, scale)
                    self._add(np.subtract, 1.0, scale, scale)
                else:
                    self._add(np.sign, after, scale)
                self._add(np.multiply, slopes, scale, slopes)
                continue
            self._add(np.matmul, slopes, before.mT, self._block(index, self.slopes[part]))
            if index:
                back = self._block(index, self.weights[part]).mT
                shape = (len(slopes), back.shape[1], slopes.shape[2])
                below = self._memory("slopes", index, shape)
                self._add(np.multiply if back.shape[2] == 1 else np.matmul, back, slopes, below)
                slopes = below


def array_perceptron(flat: FlatModel) -> ArrayPerceptron | None:
    """Read a perceptron on arrays from a flat model.

    Args:
        flat: The model.

    Returns:
        The same function of arrays, or None if the network, the prior or the likelihood is another one, or
        the data are not on the CPU.
    """
    x, y = flat.data
    if flat.stacked is None or flat.precision is None or flat.noise is None or not y.is_cpu:
        return None
    assert isinstance(x, Tensor)
    inputs = np.ascontiguousarray(x.flatten(1).numpy().T)
    layers: list[ArrayLayer | str] = []
    for layer in flat.stacked.layers:
        if isinstance(layer, Affine):
            places = [
                v if isinstance(v, int | None) else v.numpy() for v in (layer.weight, layer.bias)
            ]
            layers.append(ArrayLayer(layer.shape, *places))  # type: ignore[arg-type]
        elif layer.name not in KNOWN:
            return None
        elif not layers:  # a nonlinearity of the inputs themselves
            inputs = np.tanh(inputs) if layer.name == "tanh" else np.maximum(inputs, 0.0)
        elif isinstance(layers[-1], str):  # two in a row
            return None
        else:
            layers.append(layer.name)
    return ArrayPerceptron(
        tuple(layers),
        inputs,
        np.ascontiguousarray(y.numpy().T),
        np.ascontiguousarray(flat.noise.reshape(-1, y.shape[1]).numpy().T),
        flat.precision.numpy(),
        flat.offset + flat.level,
        flat.model.temperature,
    )
