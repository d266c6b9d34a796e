"""What `laplace_torch.py` asks of both libraries: networks, data and structures, as plain values.

Only NumPy is needed, so that the environment of the peer can import it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from problems import Problem

NUM_TEST = 360
"""Test points whose class probabilities are timed; the rotated and the noise set are as large."""

DIGITS = Problem(
    name="digits",
    title="digits, MLP 64-256-256-10",
    shapes=((256, 64), (256, 256), (10, 256)),
    input_shape=(64,),
    num_points=1237,
)

MANY_CLASSES = Problem(
    name="classes",
    title="random network 64-512-1000",
    shapes=((512, 64), (1000, 512)),
    input_shape=(64,),
    num_points=2000,
    num_outputs=1000,
)

PROBLEMS = {problem.name: problem for problem in (DIGITS, MANY_CLASSES)}


@dataclass(frozen=True)
class Structure:
    """A posterior that both libraries offer.

    `kind` is last_full, kron, diagonal, functional or last_kron; `num_points` the points that a
    functional posterior is conditioned on (None: all). `back_ends` are those of laplace-torch that are
    tried; it predicts `peer_test` points, one at a time, where all at
    once do not fit into memory. `goals` are how many times faster fit and prediction are meant to be.
    """

    name: str
    title: str
    kind: str
    problem: str = "digits"
    num_points: int | None = None
    back_ends: tuple[str, ...] = ("BackPACK", "default")
    tuned: bool = True
    peer_test: int | None = None
    every_seed: bool = True
    goals: tuple[float, float] = (1.0, 1.0)


def functional(num_points: int | None) -> Structure:
    """The Gaussian process in function space, conditioned on so many points."""
    size = num_points or DIGITS.num_points
    return Structure(
        name=f"functional{num_points or 'all'}",
        title=f"functional, {size} points",
        kind="functional",
        num_points=num_points,
        back_ends=("BackPACK",),
        tuned=False,
        every_seed=size <= 200,
        goals=(50.0, 50.0),
    )


STRUCTURES = {
    structure.name: structure
    for structure in (
        Structure("last_full", "last layer, full", "last_full"),
        Structure("kron", "Kron, all layers", "kron", goals=(1.0, 5.0)),
        Structure("diagonal", "diagonal, all layers", "diagonal"),
        functional(200),
        functional(500),
        functional(1000),
        functional(None),
        Structure(
            "last_kron_1000",
            "last layer, Kron, 1000 classes",
            "last_kron",
            problem="classes",
            back_ends=("default",),
            peer_test=2,
            every_seed=False,
            goals=(5.0, 5.0),
        ),
    )
}


def random_classes(seed: int = 0) -> dict[str, np.ndarray]:
    """Weights, inputs and labels that mean nothing: only the size counts."""
    generator = np.random.default_rng(seed)
    arrays = MANY_CLASSES.arrays(seed)
    arrays["y"] = generator.integers(0, MANY_CLASSES.num_outputs, MANY_CLASSES.num_points)
    for name in ("test", "rotated", "noise"):
        arrays[name] = generator.standard_normal((NUM_TEST, 64)).astype(np.float32)
    arrays["y_test"] = generator.integers(0, MANY_CLASSES.num_outputs, NUM_TEST)
    return arrays
