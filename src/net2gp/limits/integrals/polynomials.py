"""Polynomials by their coefficients, lowest power first: their values, and Hermite polynomials."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from net2gp.errors import InputError


def horner(coefficients: Sequence[float], x: Tensor) -> Tensor:
    """Compute Σ_i coefficients[i] x^i.

    >>> horner([1.0, 0.0, 2.0], torch.tensor([3.0]))
    tensor([19.])
    """
    result = torch.zeros_like(x)
    for coefficient in reversed(coefficients):
        result = result * x + coefficient
    return result


def hermite_coefficients(degree: int) -> tuple[float, ...]:
    """Return the coefficients of h_n = He_n/√n!, which are orthonormal under a standard Gaussian.

    >>> hermite_coefficients(1), hermite_coefficients(0)
    ((0.0, 1.0), (1.0,))
    """
    if degree < 0:
        raise InputError(f"degree must be zero or positive, but {degree} was given.")
    root = math.sqrt(math.factorial(degree))
    coefficients = [0.0] * (degree + 1)
    for i in range(degree // 2 + 1):
        power = degree - 2 * i
        size = root / (2**i * math.factorial(i))
        coefficients[power] = (-1) ** i * size / math.factorial(power)
    return tuple(coefficients)
