"""neural-tangents: `empirical_ntk_fn` by structured derivatives, jitted; compilation is the warm-up."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import neural_tangents as nt
import numpy as np
from jax import lax

from measure import Job, main
from problems import Problem


def forward(params: list[tuple[jax.Array, jax.Array]], x: jax.Array) -> jax.Array:
    """The network of any problem, in JAX's layout: images are (N, height, width, channels)."""
    for i, (weight, bias) in enumerate(params):
        if weight.ndim == 4:
            x = lax.conv_general_dilated(
                x, weight, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jax.nn.relu(x + bias)
            x = lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4
        else:
            x = x.reshape(x.shape[0], -1) @ weight + bias
            x = jax.nn.relu(x) if i + 1 < len(params) else x
    return x


def params_of(problem: Problem, arrays: dict[str, np.ndarray]) -> list[tuple[jax.Array, jax.Array]]:
    """The weights in JAX's layout; the first dense layer sees (height, width, channels) flattened."""
    params, previous = [], None
    for i, shape in enumerate(problem.shapes):
        weight = arrays[f"w{i}"]
        if len(shape) == 4:
            weight = weight.transpose(2, 3, 1, 0)
        else:
            if previous is not None and len(previous) == 4:
                channels = previous[0]
                side = int((shape[1] / channels) ** 0.5)
                weight = weight.reshape(-1, channels, side, side).transpose(0, 2, 3, 1)
                weight = weight.reshape(shape)
            weight = weight.T
        params.append((jnp.asarray(weight), jnp.asarray(arrays[f"b{i}"])))
        previous = shape
    return params


def make_job(problem: Problem, quantity: str, arrays: dict[str, np.ndarray]) -> Job:
    x = arrays["x"]
    x = jnp.asarray(x.transpose(0, 2, 3, 1) if x.ndim == 4 else x)
    params = params_of(problem, arrays)
    kernel = jax.jit(
        nt.empirical_ntk_fn(
            forward,
            trace_axes=() if quantity == "full" else (-1,),
            vmap_axes=0,
            implementation=nt.NtkImplementation.STRUCTURED_DERIVATIVES,
        ),
        static_argnums=1,
    )

    def run() -> jax.Array:
        return kernel(x, None, params).block_until_ready()

    def matrix(k: jax.Array) -> np.ndarray:
        k = np.asarray(k)
        return k if k.ndim == 2 else k.transpose(0, 2, 1, 3).reshape(k.shape[0] * k.shape[2], -1)

    version = f"neural-tangents {nt.__version__}, jax {jax.__version__}"
    return Job(run, run, matrix, version, note="structured derivatives, vmap_axes=0, jitted")


if __name__ == "__main__":
    main(make_job)
