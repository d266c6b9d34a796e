"""neural-tangents: both kernels of an infinitely wide network, jitted; compilation is the warm-up.

Called by `limits.py` as `worker_limits_neural_tangents.py JOB ARRAYS RESULT REPEATS PATIENCE`, where JOB
is JSON.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import neural_tangents as nt
import numpy as np
from neural_tangents import stax

from measure import Job, measure, resident
from problems import read

DEGREE = 25
"""Gauss–Hermite nodes for tanh: what its documentation says is a good place to start."""


def tanh() -> Any:
    return stax.ElementwiseNumerical(jnp.tanh, deg=DEGREE, df=lambda u: 1 - jnp.tanh(u) ** 2)


ACTIVATIONS = {"relu": stax.Relu, "erf": stax.Erf, "tanh": tanh}


def network(job: dict[str, Any]) -> Any:
    """Its kernel function of the network in its own layers."""
    scales = {"W_std": job["weight_var"] ** 0.5, "b_std": job["bias_var"] ** 0.5}
    layers = []
    for _ in range(job["depth"]):
        if job["network"] == "dense":
            layers.append(stax.Dense(8, **scales))
        else:
            layers.append(stax.Conv(8, (3, 3), padding="SAME", **scales))
        layers.append(ACTIVATIONS[job["activation"]]())
    layers += {"dense": [], "flatten": [stax.Flatten()], "pool": [stax.GlobalAvgPool()]}[
        job["network"]
    ]
    return stax.serial(*layers, stax.Dense(1, **scales))[2]


def make_job(job: dict[str, Any], x: jax.Array, y: jax.Array | None) -> Job:
    kernel = network(job)
    if y is None:
        jitted = jax.jit(lambda x: tuple(kernel(x, None, ("nngp", "ntk"))))
    else:
        jitted = jax.jit(lambda x, y: tuple(kernel(x, y, ("nngp", "ntk"))))
    inputs = (x,) if y is None else (x, y)

    def run() -> tuple[jax.Array, jax.Array]:
        return jax.block_until_ready(jitted(*inputs))

    def matrix(found: tuple[jax.Array, jax.Array]) -> np.ndarray:
        return np.stack([np.asarray(t) for t in found])

    version = f"neural-tangents {nt.__version__}, jax {jax.__version__}"
    note = "jitted, get=('nngp', 'ntk')"
    note += f", ElementwiseNumerical(deg={DEGREE})" if job["activation"] == "tanh" else ""
    return Job(run, run, matrix, version, note)


def main() -> None:
    warnings.simplefilter("ignore")
    text, arrays, stored, repeats, patience = sys.argv[1:]
    job = json.loads(text)
    jax.config.update("jax_enable_x64", job["dtype"] == "float64")
    inputs = {}
    for name, value in read(arrays).items():
        last = np.moveaxis(value, 1, -1) if value.ndim == 4 else value
        inputs[name] = jnp.asarray(np.ascontiguousarray(last.astype(job["dtype"])))
    made = make_job(job, inputs["x"], inputs.get("y"))
    figures, result = measure(made, resident(), int(repeats), float(patience))
    np.save(stored, made.matrix(result))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
