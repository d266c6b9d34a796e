"""Slow and independent Gaussian expectations: trapezoidal rules in doubly exponential variables.

They resolve functions whose features lie next to zero, however large the variance: nodes run through all
scales, and the two lines on which the factors change are ends of intervals.
"""

import math
from collections.abc import Callable

import numpy as np

Function = Callable[[np.ndarray], np.ndarray]


def _half_line(step: float, low: float, top: float, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights on (0, scale·top): u = scale·exp(x − exp(−x))."""
    x = np.arange(low, math.log(top), step)
    u = scale * np.exp(x - np.exp(-x))
    return u, step * u * (1 + np.exp(-x))


def _interval(step: float = 0.05) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Nodes on (0, 1), their distances from one, and weights."""
    x = np.arange(-3.6, 3.6 + step / 2, step)
    g = math.pi / 2 * np.sinh(x)
    weight = step * math.pi / 4 * np.cosh(x) / np.cosh(g) ** 2
    return 1 / (1 + np.exp(-2 * g)), 1 / (1 + np.exp(2 * g)), weight


def _density(x: np.ndarray) -> np.ndarray:
    return np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def line(f: Function, var: float) -> float:
    """E[f(u)], u ~ N(0, var)."""
    root = math.sqrt(var)
    scale = min(root, 1.0)
    u, weight = _half_line(0.02, -5.5, 12 * root / scale, scale)
    return float(((f(u) + f(-u)) * weight * _density(u / root)).sum() / root)


def pair(f: Function, g: Function, angle: float, var1: float, var2: float) -> float:
    """E[f(u) g(v)] for variances var1, var2 and correlation cos(angle).

    u = √var1·(c·a + s·b) and v = √var2·(c·a − s·b) with c, s = cos, sin of angle/2; the integral over a is
    cut where one of them is zero.
    """
    if angle > math.pi / 2 + 1e-9:
        return pair(f, lambda x: g(-x), math.pi - angle, var1, var2)
    roots = math.sqrt(var1), math.sqrt(var2)
    c, s = math.cos(angle / 2), math.sin(angle / 2)
    scale = min(1.0, 1 / max(roots))
    out, out_weight = _half_line(0.04, -4.5, 12 / scale, scale)
    inside, distance, in_weight = _interval()
    total = 0.0
    for sign in (1.0, -1.0):
        for part in range(0, len(out), 64):
            b = out[part : part + 64, None]
            zero = s * b / c  # where c·a = s·b
            inner = 0.0
            for side in (1.0, -1.0):
                for a, gap, weight in (
                    (zero * inside, -zero * distance, zero * in_weight),
                    (zero + out, out + 0 * zero, out_weight),
                ):
                    far, near = side * c * (a + zero), side * c * gap
                    first, second = (far, near) if side == sign else (near, far)
                    values = f(roots[0] * first) * g(roots[1] * second) * _density(a) * weight
                    inner = inner + values.sum(1)
            total += float((inner * _density(b[:, 0]) * out_weight[part : part + 64]).sum())
    return total
