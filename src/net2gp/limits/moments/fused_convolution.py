"""A convolution and the function behind it in one GPU kernel."""

from __future__ import annotations

import math

from net2gp.limits import gpu_kernels
from net2gp.limits.duals.power_forms import ABReLU
from net2gp.limits.moments.evaluation import Evaluation, Pair
from net2gp.limits.moments.weight_moments import through_weights
from net2gp.limits.signals import expressions as ex


def window_and_relu(run: Evaluation, e: ex.Point, w: ex.Weighted) -> Pair:
    """Compute the moments of φ(W u) from the moments of u, as `weighted` and `point` do in two steps."""
    assert w.window is not None
    assert isinstance(e.activation, ABReLU)
    cov, ntk = run.get(w.inputs[0][1], True)
    total, prior = w.window.total, run.prior
    weight, bias = float(prior.weight(w.weight)) / total, float(prior.bias(w.bias))
    own, own_bias = weight, bias
    if prior.standard(w.weight):
        own, own_bias = w.fan_in / total, 1.0 if w.bias else 0.0
    a, b = e.activation.negative, e.activation.positive
    numbers = [weight, bias, own, own_bias, (a * a + b * b) / 2, (b - a) ** 2 / (2 * math.pi)]
    kernel, dilation = w.window.kernel, w.window.dilation
    low = (w.window.padding[0][0], w.window.padding[1][0])
    geometry = ((kernel[0], kernel[1]), low, (dilation[0], dilation[1]))
    if not run.zipped:
        sides = run.side("variance", w)
        return gpu_kernels.window_and_relu(cov, ntk, sides, numbers, geometry, run.tangent)
    square, own_slope = through_weights(run, w, run.get(w.inputs[0][1], False), False)
    run.profile["variance", w.order] = square
    sides = (square, square)
    new, slopes = gpu_kernels.window_and_relu(cov, ntk, sides, numbers, geometry, run.tangent)
    exact, steep = e.activation.variance(square, run.tangent)
    new = run.with_equal_positions(new, exact, e)
    if slopes is not None and own_slope is not None and steep is not None:
        slopes = run.with_equal_positions(slopes, own_slope * steep, e)
    return new, slopes
