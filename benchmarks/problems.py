"""The benchmark problems: networks and inputs as plain arrays that every library can read.

Only NumPy is needed, so that the environments of the peers can import it. Weights have PyTorch's
layout: (out, in) for dense layers and (out, in, height, width) for convolutions.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

QUANTITIES = ("full", "trace")
"""full: the (N·C, N·C) kernel, index n·C + c; trace: (N, N), the trace over outputs divided by C."""


@dataclass(frozen=True)
class Problem:
    """A network and the shape of its inputs; `shapes` are the weights in order, biases follow them."""

    name: str
    title: str
    shapes: tuple[tuple[int, ...], ...]
    input_shape: tuple[int, ...]
    num_points: int
    num_outputs: int = 10

    @property
    def num_params(self) -> int:
        """P: all weights and biases."""
        return sum(int(np.prod(shape)) + shape[0] for shape in self.shapes)

    def arrays(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Weights `w0, b0, w1, …` and inputs `x`, all float32 and drawn from one seed."""
        generator = np.random.default_rng(seed)

        def normal(shape: tuple[int, ...], scale: float) -> np.ndarray:
            return (scale * generator.standard_normal(shape)).astype(np.float32)

        drawn = {}
        for i, shape in enumerate(self.shapes):
            drawn[f"w{i}"] = normal(shape, float(np.sqrt(2 / np.prod(shape[1:]))))
            drawn[f"b{i}"] = normal(shape[:1], 0.1)
        drawn["x"] = normal((self.num_points, *self.input_shape), 1.0)
        return drawn


MLP = Problem(
    name="mlp",
    title="MLP 784-512-512-10, ReLU",
    shapes=((512, 784), (512, 512), (10, 512)),
    input_shape=(784,),
    num_points=256,
)

LENET = Problem(
    name="lenet",
    title="LeNet 28×28: conv 6 5×5, pool, conv 16 5×5, pool, 120-84-10, ReLU",
    shapes=((6, 1, 5, 5), (16, 6, 5, 5), (120, 256), (84, 120), (10, 84)),
    input_shape=(1, 28, 28),
    num_points=128,
)

PROBLEMS = {problem.name: problem for problem in (MLP, LENET)}


def read(path: str | Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz file, without pickle."""
    with np.load(path, allow_pickle=False) as stored:
        return {name: stored[name] for name in stored.files}
