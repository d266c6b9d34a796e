"""Calibration errors with intervals that hold although an absolute value makes the estimate too large."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy import fft

from net2gp.report.uncertainty.statistics import LEVEL, Estimate, estimate

CELLS = 512
"""The grid on which residuals are smoothed."""

DRAWS = 200
HALVINGS = 12
"""How often the range of an end of an interval is halved."""


def binned_error(probs: np.ndarray, right: np.ndarray, num_bins: int = 15) -> Estimate:
    """Estimate the expected calibration error θ = Σ_b |E 1_b (right − p)| of bins of equal width.

    The plug-in estimate θ̂ is too large, since noise has an absolute value as well, and so is that of a
    resample. By the triangle inequality |θ̂ − θ| ≤ T = Σ_b |(P_n − P) 1_b (right − p)|, whose law resamples
    follow. The interval is θ̂ ± the 95 % quantile of T, cut off at 0: it holds with at least this probability.

    Args:
        probs: The probability of being right, (N,).
        right: Whether it was, (N,).
        num_bins: The number of bins.

    Returns:
        The error with its interval.

    >>> binned_error(np.array([0.75, 0.75]), np.array([1.0, 0.0]), 1)["value"]
    0.25
    """
    cell = np.clip(np.ceil(probs * num_bins).astype(int) - 1, 0, num_bins - 1)
    mass, moved = _masses(cell, right - probs, num_bins)
    value, off = np.abs(mass).sum(), np.quantile(np.abs(moved).sum(1), LEVEL)
    return estimate(value, max(value - off, 0.0), min(value + off, 1.0), len(probs))


def smooth_error(probs: np.ndarray, right: np.ndarray) -> Estimate:
    """Estimate the smooth calibration error: the σ at which ∫ |E K_σ(t, p)(right − p)| dt = σ.

    K_σ is the Gaussian kernel of width σ, reflected at 0 and 1, which the cosine transform diagonalizes. No
    bins are chosen. At each σ the triangle inequality bounds the error of the integral as in `binned_error`,
    and the interval ends where the integral minus, or plus, that bound equals σ. Cost: N·DRAWS, and some
    thousand transforms of a grid.

    Args:
        probs: The probability of being right, (N,).
        right: Whether it was, (N,).

    Returns:
        The error with its interval.

    >>> found = smooth_error(np.full(400, 0.9), np.tile([1.0, 0.0], 200))
    >>> round(found["value"], 2), found["low"] > 0.3
    (0.4, True)

    Reference: Błasiok & Nakkiran, Smooth ECE: principled reliability diagrams via kernel smoothing, 2023.
    """
    cell = np.clip((probs * CELLS).astype(int), 0, CELLS - 1)
    mass, moved = _masses(cell, right - probs, CELLS)
    waves = fft.dct(mass, norm="ortho")
    moving = fft.dct(moved.astype(np.float32), norm="ortho")

    def size(width: float) -> float:
        return float(_size(waves, width))

    def bound(width: float) -> float:
        return float(np.quantile(_size(moving, width), LEVEL))

    value = _crossing(size, 40)[0]
    low = _crossing(lambda width: size(width) - bound(width), HALVINGS)[0]
    high = _crossing(lambda width: size(width) + bound(width), HALVINGS)[1]
    return estimate(value, min(low, value), max(high, value), len(probs))


def consistent_below(probs: np.ndarray, num_bins: int = 15) -> float:
    """Compute what the binned error of N points stays below in 95 % of cases if the probabilities are right.

    >>> consistent_below(np.ones(10))
    0.0
    """
    rng = np.random.default_rng(1)
    cell = np.clip(np.ceil(probs * num_bins).astype(int) - 1, 0, num_bins - 1)
    drawn = []
    for _ in range(DRAWS):
        right = rng.random(len(probs)) < probs
        drawn.append(np.abs(np.bincount(cell, right - probs, num_bins)).sum() / len(probs))
    return float(np.quantile(drawn, LEVEL))


def _masses(cell: np.ndarray, residual: np.ndarray, cells: int) -> tuple[np.ndarray, np.ndarray]:
    """The mean residual mass of each cell, (cells,), and how it moves in resamples, (DRAWS, cells)."""
    rng, n = np.random.default_rng(0), len(cell)
    mass = np.bincount(cell, residual, cells) / n
    moved = np.empty((DRAWS, cells))
    for draw in moved:
        some = rng.integers(0, n, n)
        draw[:] = np.bincount(cell[some], residual[some], cells) / n - mass
    return mass, moved


def _size(waves: np.ndarray, width: float) -> np.ndarray:
    """∫ |smoothed residual|, from its cosine coefficients."""
    damped = waves * np.exp(-0.5 * (np.pi * width * np.arange(CELLS)) ** 2).astype(waves.dtype)
    return np.abs(fft.idct(damped, norm="ortho")).sum(-1)


def _crossing(size: Callable[[float], float], halvings: int) -> tuple[float, float]:
    """Enclose a width that equals its size: the first end is smaller than its size, the second larger."""
    low, high = 0.0, 1.0
    for _ in range(halvings):
        middle = (low + high) / 2
        low, high = (middle, high) if size(middle) > middle else (low, middle)
    return low, high
