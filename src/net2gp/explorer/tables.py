"""Tables of Gaussian expectations for the activations that have no closed form."""

from __future__ import annotations

import base64
import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn

from net2gp.limits import activation_of

LOW, HIGH = 1e-6, 400.0
"""The range of variances. Beyond it a page takes the correlations at its end."""

TERMS, DEGREE = 240, 64
_GROWTH = {"tanh": (0.0, -0.5), "silu": (1.0, 0.0), "softplus": (1.0, 0.0)}
"""Exponents of V(q) and E[φ'²] for large q, where tanh is a step, and the others are ramps."""

_REACH, _NODES = (
    42.0,
    6401,
)  # Hermite functions of 240 terms end at 31, and tanh(20z) has poles at 0.08i
_TABLES = {"tanh": nn.Tanh(), "silu": nn.SiLU(), "softplus": nn.Softplus()}


def tables() -> dict[str, dict[str, object]]:
    """Return the table of each activation without a closed form, as the page reads them.

    Each has `values`, the rows of Chebyshev coefficients in log q as float32 in base64: one row for each
    n of `powers`, the normalized Hermite coefficient E[φ(√q z) h_n(z)] / √V(q), then log V(q) = log E[φ²]
    and log E[φ'²]. Costs about a second, once.

    Returns:
        The tables by the names that the page has for activations.

    >>> sorted(tables())
    ['silu', 'softplus', 'tanh']
    """
    return {name: _table(name) for name in _TABLES}


@lru_cache
def _table(name: str) -> dict[str, object]:
    phi = activation_of(_TABLES[name])
    nodes = np.cos(np.pi * (np.arange(DEGREE) + 0.5) / DEGREE)
    q = torch.tensor(np.exp((nodes + 1) / 2 * math.log(HIGH / LOW) + math.log(LOW)))
    value, slope = phi.variance(q, True)
    assert slope is not None
    scaled = hermite_coefficients(phi(q[:, None].sqrt() * _grid())) / value.sqrt()[:, None]
    powers = [n for n in range(TERMS) if float(scaled[:, n].abs().max()) > 1e-9]
    rows = torch.cat([scaled[:, powers], torch.stack([value.log(), slope.log()], 1)], 1)
    angles = np.arange(DEGREE)[:, None] * (np.arange(DEGREE) + 0.5) * np.pi / DEGREE
    series = 2 / DEGREE * np.cos(angles) @ rows.numpy()  # (degree, rows)
    series[0] /= 2
    return {
        "low": LOW,
        "high": HIGH,
        "degree": DEGREE,
        "powers": powers,
        "growth": _GROWTH[name],
        "vanishes": float(phi(torch.zeros(1))) == 0.0,
        "odd": all(n % 2 for n in powers),
        "values": base64.b64encode(series.T.astype("<f4").tobytes()).decode(),
    }


def _grid() -> Tensor:
    return torch.linspace(-_REACH, _REACH, _NODES, dtype=torch.float64)


def hermite_coefficients(values: Tensor) -> Tensor:
    """Compute E[f(z) h_n(z)] for n < 240 by the trapezoidal rule, which is exact to rounding for smooth f.

    Args:
        values: f at the nodes of the rule, (Q, 6401).

    Returns:
        The coefficients, (Q, 240).
    """
    z = _grid()
    before, now = torch.zeros_like(z), (2 * math.pi) ** -0.25 * torch.exp(-z * z / 4)
    weighted = values * now * (z[1] - z[0])
    columns = []
    for n in range(TERMS):
        columns.append(weighted @ now)
        before, now = now, (z * now - math.sqrt(n) * before) / math.sqrt(n + 1)
    return torch.stack(columns, 1)
