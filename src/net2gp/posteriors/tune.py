"""Maximize the evidence over the positive numbers that a posterior is built from."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch
from scipy.optimize import OptimizeResult, minimize
from torch import Tensor

from net2gp.errors import (
    InputError,
    NotConverged,
    NotPositiveDefinite,
    check_positive,
    trying,
    warn,
)
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.spectrum import Spectrum
from net2gp.progress import progress

P = TypeVar("P", bound=Posterior)

BOX, BOXES = 2.0, 12
"""Half the width of the box that L-BFGS searches, in logarithms, and how many boxes it may search."""

TYPICAL_NOISE, NOISE_SPREAD = 0.01, math.log(100)
"""The ratio of noise to variance that `tune_spectra` expects, and the standard deviation of its logarithm."""

FAILED = 1e25
"""The value of the objective where the posterior cannot be built, so that the search turns back."""


def tune(builder: Callable[..., P], *, max_iterations: int = 100, **initial: float | Tensor) -> P:
    """Return the posterior that `builder` makes from the arguments that maximize its evidence.

    The search runs over the logarithms of the arguments: by L-BFGS if the evidence has gradients in them,
    otherwise by Nelder–Mead. Cost: one call of `builder` per evaluation of the evidence.

    Args:
        builder: A function from the keywords to a posterior, such as a lambda that calls `condition`.
        max_iterations: The most iterations of L-BFGS in each of its boxes, or the most evaluations per
            argument of Nelder–Mead.
        **initial: The arguments to tune, by name, with the values to start from: positive numbers, or
            tensors of positive numbers. An argument cannot be called `max_iterations` or `builder`.

    Returns:
        The posterior, built once more from plain numbers.

    Raises:
        InputError: If there is nothing to tune, if a start is not positive, or if the evidence cannot be
            computed near the start.

    >>> from net2gp.kernels import RBF
    >>> from net2gp.likelihoods import Gaussian
    >>> from net2gp.posteriors.condition import condition
    >>> x = torch.linspace(0, 6, 30, dtype=torch.float64)[:, None]
    >>> build = lambda lengthscale: condition(RBF(lengthscale), (x, x.sin()), Gaussian(0.01))
    >>> tuned = tune(build, lengthscale=0.3)
    >>> bool(tuned.log_marginal_likelihood() > build(0.3).log_marginal_likelihood())
    True

    Reference: Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, ch. 5.
    """
    if not initial:
        raise InputError("tune needs something to tune: tune(builder, noise_var=0.1).")
    for name, value in initial.items():
        check_positive(value, name)
    shapes = {name: torch.as_tensor(value).shape for name, value in initial.items()}
    start = np.concatenate(
        [
            torch.as_tensor(v, dtype=torch.float64).detach().cpu().log().reshape(-1)
            for v in initial.values()
        ]
    )
    with progress("evidence", max_iterations) as advance:
        objective = _Objective(builder, shapes, advance)
        with torch.inference_mode(False), torch.enable_grad():
            best = objective.maximize(start, max_iterations)
    plain = {name: v if v.dim() else v.item() for name, v in objective.arguments(best).items()}
    return builder(**plain)


class _Objective:
    """The negative evidence as a function of the logarithms of the arguments, for scipy."""

    def __init__(
        self,
        builder: Callable[..., Posterior],
        shapes: dict[str, torch.Size],
        advance: Callable[..., None],
    ) -> None:
        self.builder, self.shapes, self.advance = builder, shapes, advance

    def arguments(self, logs: np.ndarray | Tensor) -> dict[str, Tensor]:
        values = torch.as_tensor(logs, dtype=torch.float64).exp()
        pieces = values.split([shape.numel() for shape in self.shapes.values()])
        return {n: p.reshape(s) for (n, s), p in zip(self.shapes.items(), pieces, strict=True)}

    def evidence(self, logs: Tensor) -> Tensor:
        with trying():
            return self.builder(**self.arguments(logs)).log_marginal_likelihood()

    def maximize(self, start: np.ndarray, max_iterations: int) -> np.ndarray:
        if self.differentiable(start):
            found = self.climb(start, max_iterations)
        else:
            # The default simplex of scipy is proportional to the start, and so empty at a logarithm of zero.
            simplex = np.vstack([start, start + 0.5 * np.eye(len(start))])
            options = {"maxfev": max_iterations * len(start), "xatol": 1e-3, "fatol": 1e-4}
            found = minimize(
                self.value,
                start,
                method="Nelder-Mead",
                options={**options, "initial_simplex": simplex},
            )
        if not np.isfinite(found.fun) or found.fun >= FAILED:
            raise InputError(
                "the evidence could not be computed anywhere near the start: "
                f"{ {n: v.tolist() for n, v in self.arguments(start).items()} }. Start from other values."
            )
        return found.x

    def climb(self, start: np.ndarray, max_iterations: int) -> OptimizeResult:
        """Run L-BFGS in a box around the start, and move the box while the best point is on its edge.

        Without the box, the first step on a steep slope can land on a plateau far away.
        """
        options = {"maxiter": max_iterations, "ftol": 1e-12, "gtol": 1e-7}
        center = start
        for _ in range(BOXES):
            bounds = [(value - BOX, value + BOX) for value in center]
            found = minimize(
                self.with_gradient,
                center,
                jac=True,
                method="L-BFGS-B",
                bounds=bounds,
                options=options,
            )
            if np.all(np.abs(found.x - center) < 0.99 * BOX):
                return found
            center = found.x
        warn(
            f"the evidence still grows at { {n: v.tolist() for n, v in self.arguments(found.x).items()} }, "
            "far from the start. Start from there, or fix what the data do not determine.",
            NotConverged,
        )
        return found

    def differentiable(self, start: np.ndarray) -> bool:
        try:
            return self.evidence(torch.as_tensor(start).requires_grad_()).requires_grad
        except NotPositiveDefinite:
            return False

    def with_gradient(self, point: np.ndarray) -> tuple[float, np.ndarray]:
        logs = torch.as_tensor(point).requires_grad_()
        try:
            value = -self.evidence(logs)
            (gradient,) = torch.autograd.grad(value, logs)
        except (NotPositiveDefinite, InputError):  # too far away: the start was accepted
            return FAILED, np.zeros_like(point)
        self.advance(note=f"log evidence {-float(value.detach()):.4f}")
        if not bool(torch.isfinite(value)) or not bool(torch.isfinite(gradient).all()):
            return FAILED, np.zeros_like(point)
        return float(value.detach()), gradient.numpy()

    def value(self, point: np.ndarray) -> float:
        try:
            value = -float(self.evidence(torch.as_tensor(point)).detach())
        except (NotPositiveDefinite, InputError):  # too far away: the start was accepted
            return FAILED
        self.advance(note=f"log evidence {-value:.4f}")
        return value if math.isfinite(value) else FAILED


def tune_spectra(
    spectra: Sequence[Spectrum], noise_var: float | None = None, scale: float | None = None
) -> tuple[float, float]:
    """Return the noise and the scale of the kernel that maximize the summed evidence of one or more tasks.

    A few points of a smooth function can be explained without any noise. Their evidence then grows, or stays
    constant, all the way down to σ² = 0, where predictions at new points are far too certain. So if the noise
    is open, the search adds a log-normal prior to the evidence,

        log p(y | σ², s) − ½ [log(σ² / 0.01 v) / log 100]²,   v = mean of (y − m)²:

    the noise is expected to be 1 % of the targets' variance, within a factor of 100 at one standard
    deviation. The prior moves log σ² by its slope, log(σ² / 0.01 v) / (log 100)², divided by the curvature of
    the evidence, which is N/2 if all points are informative about the noise. The shift is below 1/N down to
    σ² = 1e-6 v, while the standard error is √(2/N). The evidence that a posterior reports remains log p(y).

    A grid over both numbers finds the basin, since the evidence can have two (all noise or no noise), and
    L-BFGS refines. Each evaluation costs O(N).

    Args:
        spectra: The decomposed Gram matrix of each task, with its targets.
        noise_var: A noise to keep, or None to choose one.
        scale: A scale of the kernel to keep, or None to choose one.

    Returns:
        The noise variance and the scale.

    Reference: Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, ch. 5.2 (a prior on
    the hyper-parameters, and its mode).
    """
    power = sum(float(s.energies.sum() + s.remainder.sum()) for s in spectra)
    count = sum(s.energies.shape[1] * (len(s.eigenvalues) + s.num_zeros) for s in spectra)
    level = sum(float(s.eigenvalues.sum()) for s in spectra) / max(1, count)
    variance = power / count
    if variance == 0.0 or level == 0.0:
        return noise_var or 1e-6, scale or 1.0
    free = np.array([noise_var is None, scale is None])
    noises = variance * 10.0 ** np.arange(-8, 1.5, 0.5) if free[0] else np.array([noise_var])
    scales = variance / level * 10.0 ** np.arange(-6, 6.5, 0.5) if free[1] else np.array([scale])
    typical = math.log(TYPICAL_NOISE * variance) if free[0] else None
    start = _best_of_grid(spectra, torch.from_numpy(noises), torch.from_numpy(scales), typical)

    def objective(point: np.ndarray) -> tuple[float, np.ndarray]:
        logs = start.copy()
        logs[free] = point
        values = np.exp(logs)
        total = sum(float(spectrum.log_marginal_likelihood(*values)) for spectrum in spectra)
        slopes = values * np.sum([spectrum.slopes(*values) for spectrum in spectra], axis=0)
        if typical is not None:
            away = (logs[0] - typical) / NOISE_SPREAD
            total, slopes[0] = total - 0.5 * away**2, slopes[0] - away / NOISE_SPREAD
        return -total, -slopes[free]

    if free.any():
        bounds = np.array([(math.log(variance * 1e-10), np.inf), (-np.inf, np.inf)])[free]
        start[free] = minimize(objective, start[free], jac=True, method="L-BFGS-B", bounds=bounds).x
    best_noise, best_scale = (float(value) for value in np.exp(start))
    return best_noise if noise_var is None else noise_var, best_scale if scale is None else scale


def _best_of_grid(
    spectra: Sequence[Spectrum], noises: Tensor, scales: Tensor, typical: float | None
) -> np.ndarray:
    """The logarithms of the best pair of noise and scale; all pairs are evaluated at once."""
    total = sum(
        spectrum.log_marginal_likelihood(noises[:, None], scales).cpu() for spectrum in spectra
    )
    assert isinstance(total, Tensor)
    if typical is not None:
        total = total - 0.5 * ((noises.log() - typical) / NOISE_SPREAD)[:, None] ** 2
    row, column = divmod(int(total.argmax()), len(scales))
    return np.log([float(noises[row]), float(scales[column])])
