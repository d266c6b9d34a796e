"""GPflux's deep Gaussian process on one regression, in the environment of GPflux.

    python worker_gpflux.py arrays.npz result.npz

`arrays.npz` has inputs x (N, D) and targets y (N, 1), points x_test and grid, and the settings num_layers,
num_inducing, num_steps, learning_rate and seed. The model and its training are those of GPflux's tutorials:
targets of mean 0 and variance 1, `build_constant_input_dim_deep_gp` with the tutorial's settings, one draw
through the layers per row and step, and Adam with a constant rate, here with all rows in each step.

`result.npz` gets means and variances of y, the noise included, given each of 100 draws of the inner layers,
at both sets of points ("means test", "variances test", "means grid", "variances grid": (S, N)), the mean of
what enters the last layer on the grid ("hidden": (N, D)), and the CPU seconds of the fit ("cpu_s"), which
include the tracing of TensorFlow's graph.
"""

from __future__ import annotations

import os
import sys
import time

import numpy as np

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import gpflux
import tensorflow as tf
from gpflow.keras import tf_keras
from gpflux.architectures import Config, build_constant_input_dim_deep_gp

PREDICTION_DRAWS = 100

Arrays = dict[str, np.ndarray]


def fitted(a: Arrays, targets: np.ndarray) -> gpflux.models.DeepGP:
    """The tutorial's model after as many steps of Adam as are asked for."""
    settings = {"inner_layer_qsqrt_factor": 1e-5, "likelihood_noise_variance": 1e-2, "whiten": True}
    config = Config(num_inducing=int(a["num_inducing"]), **settings)
    model = build_constant_input_dim_deep_gp(a["x"], int(a["num_layers"]), config=config)
    training = model.as_training_model()
    training.compile(optimizer=tf_keras.optimizers.Adam(learning_rate=float(a["learning_rate"])))
    data = {"inputs": a["x"], "targets": targets}
    training.fit(data, batch_size=len(targets), epochs=int(a["num_steps"]), verbose=0)
    return model


def given_draws(model: gpflux.models.DeepGP, x: np.ndarray) -> tuple[np.ndarray, ...]:
    """Means and variances of y given draws of the inner layers (S, N); what enters the last one (N, D)."""
    inner = tf.convert_to_tensor(np.tile(x, (PREDICTION_DRAWS, 1)))
    center = inner
    for layer in model.f_layers[:-1]:
        center, variance = layer.predict(inner)
        inner = center + tf.sqrt(variance) * tf.random.normal(tf.shape(center), dtype=center.dtype)
    mean, variance = model.f_layers[-1].predict(inner)
    variance = variance + model.likelihood_layer.likelihood.variance
    found = [value.numpy().reshape(PREDICTION_DRAWS, len(x)) for value in (mean, variance)]
    return *found, center.numpy().reshape(PREDICTION_DRAWS, *x.shape).mean(0)


def main() -> None:
    source, target = sys.argv[1:]
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf_keras.backend.set_floatx("float64")
    with np.load(source) as stored:
        arrays = {key: stored[key] for key in stored.files}
    tf_keras.utils.set_random_seed(int(arrays["seed"]))
    shift, scale = arrays["y"].mean(), arrays["y"].std()
    start = time.process_time()
    model = fitted(arrays, (arrays["y"] - shift) / scale)
    result: dict[str, np.ndarray | float] = {"cpu_s": time.process_time() - start}
    for name, key in (("test", "x_test"), ("grid", "grid")):
        means, variances, hidden = given_draws(model, arrays[key])
        result[f"means {name}"] = shift + scale * means
        result[f"variances {name}"] = scale**2 * variances
        if name == "grid":
            result["hidden"] = hidden
    np.savez(target, **result)


if __name__ == "__main__":
    main()
