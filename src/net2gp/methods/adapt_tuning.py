"""How far `adapt` may move a network, and how noisy the targets are: the evidence, and its limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from net2gp.errors import InputError, NothingToTune, trying, warn
from net2gp.linear import TangentKernel
from net2gp.methods.laplace_approximation.regression import (
    Regression,
    around_zero,
    scale_of,
    size_of,
)
from net2gp.posteriors.conditioning.gaussian import as_rows, feature_system
from net2gp.posteriors.conditioning.inference import infer
from net2gp.posteriors.conditioning.problem import Problem
from net2gp.posteriors.conditioning.solvers import Inference
from net2gp.posteriors.conditioning.systems import DenseSystem, FeatureSystem, System
from net2gp.posteriors.spectrum import Spectrum, share_spectrum
from net2gp.posteriors.tune import tune_spectra
from net2gp.progress import progress

SMALLEST_LEVEL = 1e-3
"""The smallest prior variance of f that is tried; smaller ones make no difference."""

FEW_ROWS, MANY_ROWS = 4, 20
"""Below the first number of rows, residuals are too few to say how far to move from θ*. From the second on,
`adapt` decides by predicting points that are left out."""

BY_HEART = 1e-3
"""A few points whose squared error is below this share of the variance of y may have been trained on."""


@dataclass(frozen=True)
class Choice:
    """A noise variance and a scale of the kernel, and whether the data may move the mean."""

    noise_var: float
    scale: float
    moves: bool = True


def tune_spectrum(tuning: Spectrum, noise_var: float | None, scale: float | None) -> Choice:
    """Choose noise and scale by the evidence of a prior around the network, or else of one around zero.

    A prior around the network explains its residuals. If they are noise (the network was trained on these
    data) or too few, they do not determine how far the parameters may move. Then a prior around zero is used,
    which must explain the trained parameters themselves.
    """
    problem = tuning.problem
    own = Choice(*tune_spectra([tuning], noise_var, scale))
    if problem.mean is None or scale is not None:
        return own
    assert isinstance(problem.kernel, TangentKernel)
    y = problem.y.reshape(problem.offset.shape).double()
    error, spread = float(problem.target.square().mean()), scale_of(y)
    count, small = problem.offset.numel(), _is_small(tuning, own)
    if count < MANY_ROWS:
        trusted = count >= FEW_ROWS and not small and error >= BY_HEART * spread
    else:
        trusted = error > 0 and not small and _helps(tuning, own, error)
    if trusted:
        return own
    around = share_spectrum(tuning, around_zero(problem))
    model = Regression(around, error, spread, size_of(problem.kernel.linearized))
    noise, scale = model.best(noise_var, None)
    if count < MANY_ROWS:
        moves = count < FEW_ROWS or not small
        if not moves and error > 0:
            warn(
                f"{count} rows prefer no change of the network: its outputs stay what they are, and only "
                "their uncertainty is found. Pass prior_var=... to move it nevertheless, or more data.",
                NothingToTune,
            )
        return Choice(noise, scale, moves)
    model.warn_at_edges(noise if noise_var is None else None, scale)
    if error > 0:
        warn(
            "the network has learned what these data say, as where it was trained on them: its outputs "
            "stay what they are, and only their uncertainty is found. Use laplace(network, data, Gaussian()) "
            "for the data that a network was trained on; pass prior_var=... to move it nevertheless.",
            NothingToTune,
        )
    return Choice(noise, scale, moves=False)


def _helps(tuning: Spectrum, found: Choice, error: float) -> bool:
    """Whether the adapted network predicts points that are left out better than the network itself does."""
    residual = as_rows(tuning.problem, tuning.problem.target)
    return float(left_out(tuning, found.noise_var / found.scale, residual).square().mean()) < error


def _is_small(tuning: Spectrum, found: Choice) -> bool:
    """Whether the changes of f that the prior allows are below the noise."""
    count = len(tuning.eigenvalues) + tuning.num_zeros
    return found.scale * float(tuning.eigenvalues.sum()) / count < found.noise_var


def left_out(tuning: Spectrum, ratio: float, residual: Tensor) -> Tensor:
    """The residual of each row when it is predicted from all others: [A⁻¹r]_n / [A⁻¹]_nn, A = K + ratio·I."""
    if tuning.Q is not None:
        weights = 1 / (tuning.eigenvalues + ratio)
        solved = tuning.Q @ (weights[:, None] * (tuning.Q.mT @ residual))
        return solved / (tuning.Q.square() @ weights)[:, None]
    assert tuning.U is not None
    Phi = tuning.problem.features().detach().flatten(0, 1) @ tuning.U
    weights = 1 / (tuning.eigenvalues + ratio)
    hat = (Phi.square() @ weights)[:, None]
    return (residual - Phi @ (weights[:, None] * (Phi.mT @ residual))) / (1 - hat)


def tune_scale(problem: Problem, inference: Inference) -> tuple[float, Tensor | None]:
    """The scale of the kernel with the largest evidence, and the Gram matrix unless features were used.

    Warns if the evidence prefers no change of the network.
    """
    kernel = problem.kernel
    assert isinstance(kernel, TangentKernel)
    weights = kernel.num_features < problem.num_rows
    base = feature_system(problem).features if weights else problem.gram()
    level = float((base.square().sum(-1) if weights else base.diagonal()).mean())
    if level == 0.0:
        raise InputError(
            "the tangent kernel is zero at the data: the chosen parameters have no effect there."
        )
    system = lambda s: FeatureSystem(base * s**0.5) if weights else DenseSystem(base * s)
    scale = _best_scale(problem, inference, system, level)
    if scale * level <= 1.1 * SMALLEST_LEVEL:
        warn(
            "the evidence prefers no change of the network at all, as on the data that it was trained "
            f"on: with prior_var={scale:.1e} predictions are the network's own, without uncertainty "
            "about it. Pass prior_var=..., or zero_mean=True to use the network as a kernel only.",
            NothingToTune,
        )
    return scale, None if weights else base


def _best_scale(
    problem: Problem,
    inference: Inference,
    system: Callable[[float], System],
    level: float,
) -> float:
    """The scale with the largest Laplace evidence (or bound), by a grid and then Brent's method.

    The solution at one scale is the first guess at the next.
    """
    # Newton's method may fail at the ends of the grid, which does not matter.
    with progress("prior variance", None) as advance, torch.no_grad(), trying():
        start: Tensor | None = None

        def loss(log_scale: float) -> float:
            nonlocal start
            prior = system(float(np.exp(log_scale)))
            found = infer(prior, problem.likelihood, problem.offset, problem.y, inference, start)
            start = found.state.f
            advance(note=f"log evidence {float(found.evidence):.3f}")
            return -float(found.evidence)

        grid = [np.log(SMALLEST_LEVEL * 10.0**e / level) for e in range(8)]
        values = [loss(point) for point in grid]
        best = int(np.argmin(values))
        low, high = grid[max(0, best - 1)], grid[min(len(grid) - 1, best + 1)]
        found = minimize_scalar(loss, bounds=(low, high), method="bounded", options={"xatol": 0.02})
        return float(np.exp(found.x if found.fun <= values[best] else grid[best]))
