"""Initial values of a fit: inducing points, mean functions, kernels and the law of each layer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from net2gp.deep.inference.hyperparameters import numbers_of, with_numbers, with_relevances
from net2gp.deep.inference.inducing import factor
from net2gp.deep.inference.problem import (
    DeepProblem,
    chosen_rows,
    has_few_rows,
    has_many_rows,
    in_batches,
)
from net2gp.deep.inference.settings import Ascent, Start
from net2gp.deep.inference.sparse_layer import AffineMean, linear_weight
from net2gp.deep.inference.stack import Batch, Plan, Stack, Working
from net2gp.deep.inference.steps.relevances import relevance_penalty
from net2gp.kernels import RBF
from net2gp.likelihoods.traits import has_gaussian_noise
from net2gp.types import Kernel, Params

SHALLOW_STEPS, SHALLOW_RATE = 100, 0.1
"""The most steps of a shallow fit, and its learning rate."""

SHALLOW_SCALES = (1.0, 0.25)
"""Factors of the length scales from which shallow fits start."""

MOST_ROWS = 2000
"""The most rows that initial values are computed from."""

NEAR_STD, NEARER_STD = 0.05, 0.005
"""The standard deviations of whitened values of inner layers at the start, if they start near given values:
in general, and for batches without Gaussian noise. There the last layer goes a small part of the way in each
step, and noise of the layers before it only holds it up."""


@dataclass(frozen=True)
class Manner:
    """How inner layers start at their mean functions.

    Args:
        share: Their variance around the mean function, relative to the variance of that function.
        std: The standard deviation of their whitened values.
        shrink: The factor of their length scales.
        learns_means: Whether the weights of linear mean functions are trained.
    """

    share: float
    std: float
    shrink: float
    learns_means: bool


def manner(problem: DeepProblem, ascent: Ascent) -> Manner:
    """Choose how inner layers start.

    Few rows say little about inner layers, which then do best to stay near their mean functions. Sigma points
    must lie apart, so that the prediction can have several modes, and many rows outweigh the noise of layers
    that start at their prior with short length scales, from where they find better optima.

    Args:
        problem: The data and the layers.
        ascent: Settings.

    Returns:
        The choice.
    """
    many = in_batches(problem, ascent) and has_many_rows(problem)
    many = many and has_gaussian_noise(problem.likelihood)
    if ascent.objective == "predictive" and not has_few_rows(problem):
        return Manner(1.0, 1.0, 0.3, False)
    if many:
        return Manner(0.7, 1.0, 0.3, True)
    if not in_batches(problem, ascent):
        return Manner(0.1, NEAR_STD, 1.0, False)
    near = NEAR_STD if has_gaussian_noise(problem.likelihood) else NEARER_STD
    return Manner(0.03, near, 1.0, False)


@dataclass(frozen=True, eq=False)
class Shallow:
    """A fit of one layer.

    Args:
        kernel: The kernel of the first layer, with trained numbers.
        values: Means of the outputs at the rows, in units of their own standard deviation: (R, C).
        log_noise: The logarithm of open noise, or None.
        bound: The bound.
    """

    kernel: Kernel
    values: Tensor = field(repr=False)
    log_noise: Tensor | None
    bound: float


def batch_of(problem: DeepProblem, index: Tensor) -> Batch:
    """Some rows of the data."""
    return Batch(problem.x[index], problem.y[index], index, problem.num_rows / len(index))


def shallow_fit(problem: DeepProblem, rows: Tensor, ascent: Ascent) -> Shallow:
    """Fit one layer with the kernel of the first, from several length scales, and return the best.

    Args:
        problem: The data and the layers.
        rows: The rows that are used.
        ascent: Settings.

    Returns:
        The fit.
    """
    batch = batch_of(problem, rows)
    scales = SHALLOW_SCALES if ascent.tune else (1.0,)
    fits = [_shallow_from(problem, batch, scale, ascent) for scale in scales]
    return max(fits, key=lambda one: one.bound)


def _shallow_from(problem: DeepProblem, batch: Batch, scale: float, ascent: Ascent) -> Shallow:
    generator = torch.Generator().manual_seed(ascent.seed)
    first = problem.layers[0]
    assert first.num_inducing is not None
    kernel = matched(_prepared(first.kernel, batch.x, ascent), batch.x, problem, ascent)
    kernel = _stretched(kernel, scale)
    numbers = numbers_of(kernel)
    points = centers_of(batch.x, first.num_inducing, generator)
    plan = Plan(kernel, _output_mean(problem), points, spread(batch.x), problem.num_outputs)
    leaves: Params = {}
    if ascent.tune:
        leaves |= {f"0.kernel.{name}": value.log() for name, value in numbers.items()}
    leaves |= _noise_leaf(problem, None)
    stack = Stack((plan,), _free(leaves, problem), problem.likelihood)
    steps = min(SHALLOW_STEPS, ascent.num_steps)
    optimizer = torch.optim.Adam(stack.leaves.values(), lr=SHALLOW_RATE) if leaves else None
    for step in range(steps):
        estimate = stack.estimate(batch, 1, generator, 1.0 if step == 0 else 0.5)
        if optimizer is not None:
            optimizer.zero_grad()
            prior = relevance_penalty(problem, stack)
            ((prior - estimate.bound) / problem.num_rows).backward()
            optimizer.step()
    with torch.no_grad():
        bound = float(stack.estimate(batch, 1, generator, 0.5).bound)
        center, _ = stack.law(0)
        now = stack.working(0)
        assert isinstance(now, Working)
        f = now.project(batch.x).mean(center)
        values = (f - f.mean(0)) / f.std(0, correction=0).clamp(min=1e-6)
    noise = stack.leaves.get("log_noise")
    log_noise = None if noise is None else noise.detach()
    found = {name: value.detach() for name, value in numbers_of(now.kernel).items()}
    return Shallow(with_numbers(kernel, found), values, log_noise, bound)


def initial(
    problem: DeepProblem, shallow: Shallow, rows: Tensor, start: Start, ascent: Ascent, seed: int
) -> Stack:
    """Make the layers as they are before the first step.

    Args:
        problem: The data and the layers.
        shallow: A shallow fit at the same rows.
        rows: The rows from which values are computed.
        start: "shallow" or "linear".
        ascent: Settings.
        seed: The seed of the choice of inducing points.

    Returns:
        The layers, whose variables require gradients.
    """
    generator, usual = torch.Generator().manual_seed(seed), manner(problem, ascent)
    leaves: Params = {}
    inputs, plans = problem.x[rows], []
    for index, layer in enumerate(problem.layers):
        last = index == len(problem.layers) - 1
        assert layer.num_inducing is not None
        assert layer.width is not None
        points = inducing_points(inputs, layer.num_inducing, generator, spaced=index > 0)
        mean = _output_mean(problem) if layer.mean == "constant" else AffineMean()
        if layer.mean == "linear":
            mean = AffineMean(linear_weight(inputs, layer.width))
        around = index == 0 and start == "shallow" and not last
        if last:
            kernel = shallow.kernel if index == 0 else _prepared(layer.kernel, inputs, ascent)
            kernel = matched(kernel, inputs, problem, ascent) if index else kernel
            outputs = inputs
        else:
            outputs = _wanted(inputs, shallow, layer.width, around)
            kernel = shallow.kernel if around else _prepared(layer.kernel, inputs, ascent)
            gaps = outputs - mean(inputs)
            share = float(gaps.square().mean(0).max())
            std = usual.std if share == 0 or ascent.objective == "predictive" else NEAR_STD
            if ascent.tune and share == 0:
                kernel = _stretched(kernel, usual.shrink)
            share = share or usual.share * _mean_variance(outputs)
            kernel = _scaled(kernel, inputs, share) if ascent.tune else kernel
            leaves |= _inner_leaves(index, kernel, points, (inputs, gaps), layer.width, std)
            if ascent.tune and usual.learns_means and mean.weight is not None:
                leaves[f"{index}.weight"] = torch.zeros_like(mean.weight)
        if ascent.tune:
            leaves |= {f"{index}.kernel.{n}": v.log() for n, v in numbers_of(kernel).items()}
        if ascent.tune and ascent.relevances and not last and layer.width > 1:
            leaves[f"{index}.log_scale"] = problem.x.new_zeros(layer.width)
            if isinstance(kernel, RBF) and inputs.dim() == 2:
                leaves[f"{index}.log_factors"] = inputs.new_zeros(layer.width, inputs.shape[1])
        if ascent.move_points:
            own = (layer.width,) if f"{index}.log_factors" in leaves else ()
            leaves[f"{index}.shift"] = points.new_zeros(*own, *points.shape)
        plans.append(Plan(kernel.precise(), mean, points, spread(inputs), layer.width))
        inputs = outputs
    leaves |= _noise_leaf(problem, shallow.log_noise)
    # After a step towards its batch the last layer knows the batch, and kernels grow to know it better. Under
    # Gaussian noise the step goes to an optimum, and to be there is worth more.
    after = in_batches(problem, ascent) and not has_gaussian_noise(problem.likelihood)
    return Stack(tuple(plans), _free(leaves, problem), problem.likelihood, moves_after=after)


def _free(leaves: Params, problem: DeepProblem) -> Params:
    """Copies on the device of the data that require gradients."""
    like = problem.x
    return {n: v.detach().to(like, copy=True).requires_grad_() for n, v in leaves.items()}


def _mean_variance(outputs: Tensor) -> float:
    """The mean variance of the outputs that vary at all: those beyond the number of inputs are zero."""
    variances = outputs.var(0, correction=0)
    return float(variances.sum() / (variances > 0).sum().clamp(min=1))


def _wanted(inputs: Tensor, shallow: Shallow, width: int, around: bool) -> Tensor:
    """The outputs of an inner layer at the start: principal components, with the shallow fit in front."""
    outputs = inputs.flatten(1) @ linear_weight(inputs, width)
    if around:
        count = min(width, shallow.values.shape[1])
        unit = inputs.flatten(1).std(0, correction=0).mean()
        outputs[:, :count] = unit * shallow.values[:, :count]
    return outputs


def _inner_leaves(
    index: int,
    kernel: Kernel,
    points: Tensor,
    wanted: tuple[Tensor, Tensor],
    width: int,
    std: float,
) -> Params:
    """The law of whitened values under which the layer's mean is nearest to the wanted gaps at the rows."""
    inputs, gaps = wanted
    precise = kernel.precise()
    L = factor(precise, points)
    center = points.new_zeros(len(points), width)
    if bool(gaps.abs().max() > 0):
        A = torch.linalg.solve_triangular(L, precise(points, inputs), upper=False)
        # a ridge of a thousandth keeps the values near the prior where rows say nothing
        system = A @ A.mT + 1e-3 * torch.eye(len(A)).to(A)
        center = torch.linalg.solve(system, A @ gaps)
    logs = center.new_full((width, len(points)), math.log(std))
    return {
        f"{index}.center": center,
        f"{index}.root": center.new_zeros(width, len(points), len(points)),
        f"{index}.log_diagonal": logs,
    }


def _prepared(kernel: Kernel, inputs: Tensor, ascent: Ascent) -> Kernel:
    if ascent.tune and ascent.relevances and inputs.dim() == 2:
        return with_relevances(kernel, inputs.shape[1])
    return kernel


def matched(kernel: Kernel, inputs: Tensor, problem: DeepProblem, ascent: Ascent) -> Kernel:
    """The kernel with the variance of the targets, unless its numbers are to stay."""
    return _scaled(kernel, inputs, float(problem.scale.mean())) if ascent.tune else kernel


def _stretched(kernel: Kernel, factor: float) -> Kernel:
    """The kernel with all its length scales multiplied by a factor."""
    found = {n: factor * v for n, v in numbers_of(kernel).items() if "lengthscale" in n}
    return with_numbers(kernel, found)


def _scaled(kernel: Kernel, inputs: Tensor, variance: float) -> Kernel:
    own = float(kernel.diag(inputs).detach().mean())
    return kernel.scaled(max(variance, 1e-12) / own) if own > 0 else kernel


def _output_mean(problem: DeepProblem) -> AffineMean:
    return AffineMean(None, problem.center)


def _noise_leaf(problem: DeepProblem, known: Tensor | None) -> Params:
    """The logarithm of open noise: one number, or one for each of several outputs."""
    if not problem.learns_noise:
        return {}
    assert has_gaussian_noise(problem.likelihood)
    if known is not None:
        return {"log_noise": known}
    logs = (0.1 * problem.scale).log()
    return {"log_noise": logs if len(logs) > 1 else logs[0]}


def spread(inputs: Tensor) -> Tensor:
    """Compute the unit in which inducing points move.

    Args:
        inputs: N inputs of a layer.

    Returns:
        Their standard deviations, and the average one for entries that are constant.

    >>> spread(torch.tensor([[0.0, 0.0], [2.0, 4.0]]))
    tensor([1., 2.])
    """
    values = inputs.detach()
    own, whole = values.std(0, correction=0), values.var(0, correction=0).mean().sqrt()
    return torch.where(own > 1e-9 * whole, own, whole.clamp(min=1e-12))


def inducing_points(
    inputs: Tensor, count: int, generator: torch.Generator, *, spaced: bool
) -> Tensor:
    """Choose inducing points among inputs of a layer.

    Images of the data under the layers before can lie close together, so those of a single column are spread
    evenly over their range.
    """
    if spaced and inputs.shape[1] == 1:
        low, high = float(inputs.min()), float(inputs.max())
        return torch.linspace(low, high, count).to(inputs)[:, None]
    return centers_of(inputs, count, generator)


def centers_of(inputs: Tensor, count: int, generator: torch.Generator, rounds: int = 10) -> Tensor:
    """Compute k-means centers, or the distinct rows themselves if there are not more of them.

    Args:
        inputs: N rows.
        count: The number of centers.
        generator: Chooses the rows to start from.
        rounds: The number of rounds of Lloyd's algorithm.

    Returns:
        That many centers at most, with the axes of the rows.

    >>> centers_of(torch.tensor([[0.0], [0.2], [5.0]]), 2, torch.Generator().manual_seed(0)).flatten()
    tensor([0.1000, 5.0000])
    """
    flat = inputs.detach().flatten(1)
    distinct = flat.unique(dim=0)
    if len(distinct) <= count:
        return distinct.reshape(-1, *inputs.shape[1:]).clone()
    unit = flat.std(0, correction=0)
    unit = torch.where(unit > 0, unit, 1.0)
    rows, centers = distinct / unit, (distinct / unit)[chosen_rows(distinct, count, generator)]
    for _ in range(rounds):
        owner = torch.cdist(rows, centers).argmin(1)
        sums = torch.zeros_like(centers).index_add_(0, owner, rows)
        sizes = torch.bincount(owner, minlength=count).to(rows)[:, None]
        centers = torch.where(sizes > 0, sums / sizes.clamp(min=1), centers)
    return (centers * unit).reshape(-1, *inputs.shape[1:])
