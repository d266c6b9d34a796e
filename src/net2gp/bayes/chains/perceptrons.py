"""The log joint of plain perceptrons on NumPy arrays, quicker than on tensors where networks are small."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from net2gp.bayes.chains.adaptation import Array
from net2gp.bayes.chains.flat import FlatModel
from net2gp.bayes.model.stacked import Affine

KNOWN = ("tanh", "relu")


@dataclass(frozen=True, eq=False)
class ArrayLayer:
    """A linear layer, with places in a flat vector or fixed values, as in `Affine`."""

    shape: tuple[int, int]
    weight: int | Array
    bias: int | Array | None

    def weights(self, theta: Array) -> Array:
        """The weights of all chains, (K, outputs, inputs), as a view."""
        if not isinstance(self.weight, int):
            return self.weight[None]
        piece = theta[:, self.weight : self.weight + self.shape[0] * self.shape[1]]
        return piece.reshape(len(theta), *self.shape)

    def biases(self, theta: Array) -> Array:
        """The biases of all chains, (K, outputs, 1), as a view."""
        if not isinstance(self.bias, int):
            return np.asarray(self.bias)[:, None]
        return theta[:, self.bias : self.bias + self.shape[0], None]


@dataclass(frozen=True, eq=False)
class ArrayPerceptron:
    """The log joint of K chains and its gradient, for a Gaussian prior and Gaussian noise, in float64.

    Hidden layers have the axes chain, unit and point, so that sums over points run over neighbors in memory.

    Args:
        layers: The linear layers, and the names of the nonlinearities between them.
        x: The inputs, (N, D).
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

    def __call__(self, theta: Array) -> tuple[Array, Array]:
        """Compute the log joint, (K,), and its gradient, (K, P).

        Args:
            theta: One vector of parameters per chain, (K, P).
        """
        saved = [self.x.T]
        for layer in self.layers:
            before = saved[-1]
            if isinstance(layer, ArrayLayer):
                after = layer.weights(theta) @ before
                if layer.bias is not None:
                    after += layer.biases(theta)
                saved.append(after)
            else:
                saved.append(np.tanh(before) if layer == "tanh" else np.maximum(before, 0.0))
        left = self.y - saved[-1]
        slopes = left * self.noise
        grad = theta * -self.precision
        value = 0.5 * np.vecdot(theta, grad) + self.constant
        value -= 0.5 * (left * slopes).sum((1, 2))
        self._back(theta, saved, slopes, grad)
        if self.temperature != 1.0:
            value, grad = value / self.temperature, grad / self.temperature
        return value, grad

    def _back(self, theta: Array, saved: list[Array], slopes: Array, grad: Array) -> None:
        """Add the gradient of the likelihood to `grad` in place."""
        for index in range(len(self.layers) - 1, -1, -1):
            layer, before, after = self.layers[index], saved[index], saved[index + 1]
            if not isinstance(layer, ArrayLayer):
                if layer == "tanh":
                    slopes = slopes - slopes * after * after
                else:
                    slopes = slopes * (after > 0)
                continue
            if isinstance(layer.weight, int):
                view = layer.weights(grad)
                view += slopes @ before.mT
            if isinstance(layer.bias, int):
                grad[:, layer.bias : layer.bias + layer.shape[0]] += slopes.sum(2)
            if index:
                back = layer.weights(theta).mT
                slopes = back * slopes if layer.shape[0] == 1 else back @ slopes


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
    layers: list[ArrayLayer | str] = []
    for layer in flat.stacked.layers:
        if isinstance(layer, Affine):
            places = [
                v if isinstance(v, int | None) else v.numpy() for v in (layer.weight, layer.bias)
            ]
            layers.append(ArrayLayer(layer.shape, *places))  # type: ignore[arg-type]
        elif layer.name in KNOWN:
            layers.append(layer.name)
        else:
            return None
    return ArrayPerceptron(
        tuple(layers),
        np.ascontiguousarray(x.flatten(1).numpy()),  # type: ignore[union-attr]
        np.ascontiguousarray(y.numpy().T),
        np.ascontiguousarray(flat.noise.reshape(-1, y.shape[1]).numpy().T),
        flat.precision.numpy(),
        flat.offset + flat.level,
        flat.model.temperature,
    )
