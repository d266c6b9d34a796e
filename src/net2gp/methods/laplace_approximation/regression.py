"""Prior and noise of a regression's Laplace approximation: the evidence at the linear model's own mode."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from net2gp.errors import NetworkError, TuningAtEdge, UnequalScales, warn
from net2gp.likelihoods import Gaussian
from net2gp.likelihoods.traits import has_gaussian_noise
from net2gp.linear import Linearized, TangentKernel
from net2gp.linear.parameters import all_layers
from net2gp.methods.laplace_approximation.some_rows import SomeRows
from net2gp.posteriors.conditioning.problem import Problem
from net2gp.posteriors.spectrum import Spectrum, decompose
from net2gp.posteriors.tune import NOISE_SPREAD, TYPICAL_NOISE
from net2gp.posteriors.weights import Task, Traits
from net2gp.posteriors.weights.tasks.sums import Moments

NUM_ROWS = 1500
"""Rows N·C that prior and noise are tuned on; a fixed random choice of points, where there are more."""

LAST_LAYER_ROWS = 1000
"""The same where only the last layer is asked for, of a network that may be large."""

FEATURE_NUMBERS = 2 * 10**7
"""Entries of a Jacobian up to which all rows are used, if the parameters are at most `NUM_ROWS`."""

DECADES, STEP, ZOOMS = 6.0, 0.25, 5
"""The range of the prior around the scale of the data, in powers of ten, the grid, and its refinements."""

SMALLEST_NOISE = 1e-8
"""The smallest noise that is tried, of the variance of y."""

LARGEST_RATIO = 10.0
"""Standard deviations of outputs that one noise is found for, at most."""


@dataclass(frozen=True, eq=False)
class Regression:
    """y = f(x; θ*) + J(x)(θ − θ*) + ε with θ ~ N(0, v) and ε ~ N(0, σ²), seen in the basis of JJᵀ.

    `error` is the network's mean squared residual, `spread` the variance of y, both over all rows, `size` the
    mean square of θ*, and `repeats` the number of rows for each one that was decomposed.
    """

    spectrum: Spectrum
    error: float
    spread: float
    size: float
    repeats: float = 1.0

    def determined(self, ratio: Tensor) -> Tensor:
        """γ/N at σ²/v: the share of the rows that the parameters take up, tr K(K + σ²/v)⁻¹ / N."""
        values = self.spectrum.eigenvalues * self.repeats
        return (values / (values + ratio[..., None])).sum(-1) / self._count

    def left_out(self, noise_var: float, scale: float) -> float:
        """The variance of f at a row that was left out, on average: σ² γ/(N − γ).

        Of some rows: the geometric mean of what they say of themselves, which is too much for all, and of
        what their eigenvalues say, grown with the rows, which misses the directions that only all show.
        """
        values = self.spectrum.eigenvalues
        ratio = noise_var / scale
        count = len(values) + self.spectrum.num_zeros
        found = []
        for repeats in (1.0, self.repeats):
            grown, rows = values * repeats, count * repeats
            # not N − γ, which few rows make a difference of nearly equal numbers
            free = (ratio / (grown + ratio)).sum() + rows - len(values)
            found.append(float(noise_var * (grown / (grown + ratio)).sum() / free))
        return math.sqrt(found[0] * found[1])

    @property
    def _count(self) -> float:
        """N."""
        return self.repeats * (len(self.spectrum.eigenvalues) + self.spectrum.num_zeros)

    def best(self, noise_var: float | None, scale: float | None) -> tuple[float, float]:
        """The noise and the prior variance of the largest evidence among those that are possible.

        An open noise is possible if the average predictive variance at the training rows, σ²(1 + γ/N), is
        no smaller than the error that the network makes there. All pairs of a grid are tried, then of finer
        grids around the best one; each pair costs O(N).
        """
        energy = self.spectrum.energies.sum() + self.spectrum.remainder.sum()
        if float(energy) == 0.0 or float(self.spectrum.eigenvalues.sum()) == 0.0:
            least = max(TYPICAL_NOISE, self.smallest_noise) * self.spread
            return noise_var or max(self.error, least), scale or 1.0
        ends = self.ranges()
        noises, scales = _grid(noise_var, *ends[0]), _grid(scale, *ends[1])
        for zoom in range(ZOOMS + 1):
            score = self._score(noises, scales, noise_var is None, scale is None)
            row, column = divmod(int(score.argmax()), len(scales))
            best = float(noises[row]), float(scales[column])
            step = STEP / 4 ** (zoom + 1)
            noises = _finer(best[0], step, ends[0]) if noise_var is None else noises
            scales = _finer(best[1], step, ends[1]) if scale is None else scales
        return noise_var or 10.0 ** best[0], scale or 10.0 ** best[1]

    def _score(self, noises: Tensor, scales: Tensor, open_noise: bool, open_scale: bool) -> Tensor:
        """The evidence of all pairs, with weak priors of what is open; −∞ where a pair is not possible."""
        noise, scale = 10.0 ** noises[:, None], 10.0**scales
        total = self.spectrum.log_marginal_likelihood(noise, scale).cpu()
        if open_scale and self.size > 0:
            total = total - 0.5 * ((scale / self.size).log() / NOISE_SPREAD) ** 2
        if not open_noise:
            return total
        total = total - 0.5 * ((noise / (TYPICAL_NOISE * self.spread)).log() / NOISE_SPREAD) ** 2
        ratio = (noise / scale).to(self.spectrum.eigenvalues.device)
        known = noise * (1 + self.determined(ratio).cpu())
        return torch.where(known >= self.error * (1 - 1e-9), total, -torch.inf)

    def warn_at_edges(self, noise_var: float | None, scale: float | None) -> None:
        """Say so where a noise or a prior variance that was chosen is at an end of what was tried."""
        said = []
        (quietest, loudest), (narrowest, widest) = self.ranges()
        near = lambda value, end: abs(math.log10(value) - end) < 0.1 * STEP
        if noise_var is not None and near(noise_var, loudest):
            if self.error < self.spread:
                end = "square" if self._count == 1 else "variance"
                said.append(f"the noise ends at the {end} of y, {noise_var:.2g}")
        elif noise_var is not None and near(noise_var, quietest):
            said.append(f"the noise ends at the smallest that is tried, {noise_var:.2g}")
        if scale is not None and (near(scale, narrowest) or near(scale, widest)):
            said.append(f"the prior variance ends at an end of its range, {scale:.2g}")
        if said:
            warn(
                f"{' and '.join(said)}: the data do not determine it. Pass Gaussian(noise_var=...) or "
                "prior_var=..., or tuning=Validation((x, y)) with rows that were held out.",
                TuningAtEdge,
            )

    def ranges(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """The ends of the noises and of the prior variances that are tried, in powers of ten."""
        top = math.log10(max(self.spread, self.error))
        energy = self.spectrum.energies.sum() + self.spectrum.remainder.sum()
        middle = math.log10(float(energy / self.spectrum.eigenvalues.sum()))
        low = top + math.log10(self.smallest_noise)
        return (low, top), (middle - DECADES, middle + DECADES)

    @property
    def smallest_noise(self) -> float:
        """The smallest noise that is tried, as a share of the variance of y: 1/N², at least 1e-8.

        A network knows N rows by heart, so small residuals of few rows are no sign of little noise.
        """
        return max(SMALLEST_NOISE, self._count**-2)


def is_regression(task: Task) -> bool:
    """Whether the noise is one number, open or given."""
    if not has_gaussian_noise(task.likelihood):
        return False
    noise = task.likelihood.noise_var
    return task.open_noise or not (isinstance(noise, Tensor) and noise.numel() > 1)


def regression(task: Task, traits: Traits) -> Regression:
    """The linear model of a task, at the prior that was given or at prior variance 1.

    One layer whose noise and prior are open takes them from the model of all layers: what the hidden ones
    leave open is an error, too. Cost: a Gram matrix of `NUM_ROWS` rows at most and its eigenvalues.
    """
    if traits.one_layer and task.open_noise and task.prior_var is None:
        try:
            return _model(task, all_layers(task.linearized), LAST_LAYER_ROWS)
        except NetworkError:
            return _model(task, task.linearized, NUM_ROWS)
    return _model(task, task.linearized, NUM_ROWS)


def _model(task: Task, linearized: Linearized, limit: int) -> Regression:
    sums = task.sums
    if linearized.num_params <= NUM_ROWS:
        limit = max(limit, FEATURE_NUMBERS // linearized.num_params)
    chosen = SomeRows.of(task, limit)
    size = min(sums.count, max(1, limit // chosen.num_outputs))
    part = task.some(size)
    f, y = chosen.values(part)
    kernel = chosen.chosen(linearized).kernel(1.0 if task.prior_var is None else task.prior_var)
    kernel.check(part.x)
    problem = Problem(kernel, None, Gaussian(1.0), part.x, y, f)
    assert sums.targets is not None
    return Regression(
        decompose(around_zero(problem)),
        error=sums.error,
        spread=sums.targets.scale(),
        size=size_of(linearized),
        repeats=sums.num_rows / (size * chosen.num_outputs),
    )


def scale_of(y: Tensor) -> float:
    """The variance of the targets y (N, C), as `Moments.scale` has it."""
    return Moments.of(y).scale()


def warn_of_scales(y: Moments) -> None:
    """Say so where one noise is to be found for targets whose scales have nothing to do with each other."""
    if y.count < 2:
        return
    deviations = y.deviations()
    deviations = deviations[deviations > 0]
    if len(deviations) < 2 or float(deviations.max()) < LARGEST_RATIO * float(deviations.min()):
        return
    warn(
        f"the standard deviations of the targets go from {float(deviations.min()):.2g} to "
        f"{float(deviations.max()):.2g}, and one noise is found for all of them, which is too much for the "
        "small ones. Train on targets of one scale, (y - y.mean(0)) / y.std(0), or pass a noise for each, "
        "Gaussian(noise_var=torch.tensor([...])), with a prior_var.",
        UnequalScales,
    )


def size_of(linearized: Linearized) -> float:
    """The mean square of the parameters."""
    return float(linearized.flatten(linearized.params).double().square().mean())


def around_zero(problem: Problem) -> Problem:
    """The problem with the mean of θ ~ N(0, prior_var): f(x; θ*) − J(x)θ*."""
    assert isinstance(problem.kernel, TangentKernel)
    linearized = problem.kernel.linearized
    theta = linearized.flatten(linearized.params)[:, None]
    own = linearized.kernel().apply(problem.x, theta).to(torch.float64)
    return replace(problem, offset=problem.offset - own.reshape(problem.offset.shape))


def _grid(given: float | None, low: float, high: float) -> Tensor:
    if given is not None:
        return torch.tensor([math.log10(given)], dtype=torch.float64)
    count = math.ceil((high - low) / STEP) + 1
    return torch.linspace(low, high, count, dtype=torch.float64)


def _finer(best: float, step: float, ends: tuple[float, float]) -> Tensor:
    """Nine points around the best one, within the range."""
    return (best + step * torch.arange(-4, 5, dtype=torch.float64)).clamp(*ends)
