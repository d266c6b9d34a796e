"""The checked inputs of a fit: rows, targets, likelihood, and the layers with all their sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from net2gp.deep.inference.settings import Ascent
from net2gp.deep.inference.sparse_layer import SparseLayer
from net2gp.errors import InputError, check_count, check_finite
from net2gp.inputs import check_made, copied, describe, gather
from net2gp.kernels import RBF
from net2gp.likelihoods.traits import has_gaussian_noise, is_classifier, num_outputs
from net2gp.types import Data, Kernel, Likelihood

WIDEST = 30
"""The most outputs that an inner layer gets by default."""

CONSTANT_STEPS = 50
"""The most steps towards the most likely constant."""

FEW, MANY = 30, 100
"""How many rows for each inducing point are no longer few, and how many are many."""

UNLIKE = 300.0
"""By which factor standard deviations of columns of x may differ at most, with the usual kernels."""

MOST_INDUCING = 100
"""The number of inducing points by default, if there are as many distinct rows."""


@dataclass(frozen=True, eq=False)
class DeepProblem:
    """What is fitted.

    Args:
        x: The inputs, N rows in float64.
        y: The targets, real ones in float64.
        likelihood: How targets follow the last layer.
        layers: The layers, each with a width, a kind of mean and a number of inducing points.
        given: The inputs and targets as they were given, which the posterior keeps.
    """

    x: Tensor
    y: Tensor
    likelihood: Likelihood
    layers: tuple[SparseLayer, ...]
    given: tuple[Tensor, Tensor]

    @property
    def num_rows(self) -> int:
        """The number of rows N."""
        return len(self.x)

    @property
    def learns_noise(self) -> bool:
        """Whether the variance of Gaussian noise is open."""
        return has_gaussian_noise(self.likelihood) and self.likelihood.noise_var is None

    @property
    def scale(self) -> Tensor:
        """The variance of real targets per output, or 1 for labels and counts: (C,)."""
        if has_gaussian_noise(self.likelihood):
            return self.real_targets.var(0, correction=0)
        return self.x.new_ones(self.num_outputs)

    @cached_property
    def center(self) -> Tensor:
        """The mean of real targets per output, 0 for labels, or the most likely constant otherwise: (C,)."""
        if has_gaussian_noise(self.likelihood):
            return self.real_targets.mean(0)
        zeros = self.x.new_zeros(self.num_outputs)
        if is_classifier(self.likelihood):
            return zeros
        return _best_constant(self.likelihood, self.y, zeros)

    @cached_property
    def log_units(self) -> Tensor:
        """The logarithms of the standard deviations of the columns of x: (D,)."""
        return self.x.std(0, correction=0).clamp(min=1e-300).log()

    @property
    def real_targets(self) -> Tensor:
        """Targets under Gaussian noise: (N, C), float64."""
        return self.y.reshape(len(self.y), -1).double()

    @property
    def num_outputs(self) -> int:
        """The number of outputs of the last layer."""
        width = self.layers[-1].width
        assert width is not None
        return width


def make_problem(
    layers: int | Sequence[SparseLayer | Kernel], data: Data, likelihood: Likelihood, ascent: Ascent
) -> DeepProblem:
    """Gather and check everything; raise `InputError` that says what to change."""
    check_made(likelihood, "likelihood")
    if not isinstance(likelihood, Likelihood):
        raise InputError(f"likelihood must be e.g. Gaussian(), but is {describe(likelihood)}.")
    x, y = gather(data)
    if not isinstance(x, Tensor) or x.dim() < 2 or not x.is_floating_point():
        raise InputError(
            f"deep.fit needs x as one floating tensor of shape (N, D), but x is {describe(x)}."
        )
    given, y = copied(x), copied(y)
    rows = given.double()
    check_finite(rows, "x")
    if y.is_floating_point():
        check_finite(y, "y")
    _check_columns(rows)
    C = num_outputs(likelihood, y)
    filled = _filled(_listed(layers, rows, ascent), rows, C, ascent)
    real = y.double() if y.is_floating_point() else y
    problem = DeepProblem(rows, real, likelihood, filled, (given, y))
    trial = given.new_zeros(len(rows), C)
    if problem.learns_noise:
        assert has_gaussian_noise(likelihood)
        likelihood.with_noise(1.0).check(trial, y)
        if not bool((problem.scale > 0).all()):
            column = int((problem.scale == 0).nonzero()[0])
            raise InputError(
                f"column {column} of y is constant, so that its noise cannot be learned. Drop the column, or "
                "pass Gaussian(noise_var=...)."
            )
    else:
        likelihood.check(trial, y)
    return problem


def _best_constant(likelihood: Likelihood, y: Tensor, start: Tensor) -> Tensor:
    """The outputs that make the targets most likely if they are the same at all rows, or the start."""
    f = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([f], max_iter=CONSTANT_STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = -likelihood.log_prob(f.expand(len(y), -1), y).mean()
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(loss)
    return f.detach() if bool(f.isfinite().all()) else start


def _check_columns(x: Tensor) -> None:
    if x.dim() != 2:  # pixels at the edges of images are constant
        return
    constant = (x == x[:1]).all(0).nonzero().flatten().tolist()
    if constant and len(x) > 1:
        which = (
            f"column {constant[0]} of x is"
            if len(constant) == 1
            else f"columns {constant} of x are"
        )
        raise InputError(
            f"{which} constant, so that the data say nothing about its length scale. Drop constant columns: "
            "x[:, x.std(0) > 0]."
        )


def _listed(
    layers: int | Sequence[SparseLayer | Kernel], x: Tensor, ascent: Ascent
) -> list[SparseLayer]:
    if isinstance(layers, int):
        check_count(layers, "layers")
        _check_units(x)
        return [SparseLayer(_usual_kernel(x)) for _ in range(layers)]
    if not isinstance(layers, Sequence) or not layers:
        raise InputError(
            f"layers must be a number of layers or a list of kernels or Layers, such as [n2g.RBF(), "
            f"n2g.RBF()], but is {describe(layers)}."
        )
    return [_as_sparse(layer) for layer in layers]


def _as_sparse(layer: Any) -> SparseLayer:
    """A kernel, or another value with a kernel and a width, as a layer with inducing points."""
    if isinstance(layer, SparseLayer):
        return layer
    if not isinstance(layer, Kernel) and hasattr(layer, "kernel") and hasattr(layer, "width"):
        return SparseLayer(layer.kernel, layer.width)
    return SparseLayer(layer)


def _usual_kernel(x: Tensor) -> RBF:
    """A squared exponential whose length scale is that of all inputs together."""
    flat = x.flatten(1)
    spread = float(flat.var(0, correction=0).sum().sqrt())
    return RBF(lengthscale=max(spread, 1e-6))


def _check_units(x: Tensor) -> None:
    """Refuse columns whose units are too unlike for one length scale to start from."""
    if x.dim() != 2 or len(x) == 1:
        return
    units = x.std(0, correction=0)
    low, high = float(units.min()), float(units.max())
    if high > UNLIKE * low:
        raise InputError(
            f"columns of x have standard deviations from {low:.3g} to {high:.3g}, and the usual kernels have "
            "one length scale at first. Scale the columns: (x - x.mean(0)) / x.std(0)."
        )


def _filled(
    layers: list[SparseLayer], x: Tensor, num_targets: int, ascent: Ascent
) -> tuple[SparseLayer, ...]:
    """The layers with widths, kinds of means and numbers of inducing points."""
    distinct = len(x.flatten(1).unique(dim=0))
    # As many inducing points as rows can put one of the sigma points through each target.
    enough = max(1, distinct // 10) if ascent.objective == "predictive" else distinct
    usual = min(MOST_INDUCING, enough) if ascent.num_inducing is None else ascent.num_inducing
    filled, columns = [], x[0].numel()
    for index, layer in enumerate(layers):
        last = index == len(layers) - 1
        count = layer.num_inducing or usual
        if count > distinct:
            raise InputError(
                f"layer {index} has {count} inducing points, but there are only {distinct} distinct rows of "
                f"data. Pass num_inducing={distinct} or fewer."
            )
        width = num_targets if last else (layer.width or min(columns, WIDEST))
        if last and layer.width not in (None, num_targets):
            raise InputError(
                f"the last layer has width {layer.width}, but the likelihood needs {num_targets} outputs. "
                "Leave width out in the last layer."
            )
        mean = layer.mean or ("constant" if last else "linear")
        if mean == "constant" and not last:
            raise InputError(
                f'layer {index} has mean="constant", which is the mean of the targets and so only for the '
                'last layer. Pass mean="linear" or mean="zero".'
            )
        filled.append(replace(layer, width=width, mean=mean, num_inducing=count))
        columns = width
    _check_kernel(filled[0].kernel, x)
    return tuple(filled)


def _check_kernel(kernel: Kernel, x: Tensor) -> None:
    kernel.check(x[:2])
    count = kernel.outputs(x[:1])
    if count is not None:
        raise InputError(
            f"the kernel of the first layer couples {count} outputs, but the outputs of a layer are "
            "independent. Use nngp(network) of a network that ends in a linear layer, or "
            "linearize(network).trace_kernel()."
        )


def in_batches(problem: DeepProblem, ascent: Ascent) -> bool:
    """Whether a step has some of the rows only."""
    return ascent.batch_size is not None and ascent.batch_size < problem.num_rows


def has_many_rows(problem: DeepProblem) -> bool:
    """Whether there are many rows for each inducing point."""
    return problem.num_rows >= MANY * _most_inducing(problem)


def has_few_rows(problem: DeepProblem) -> bool:
    """Whether there are few rows for each inducing point."""
    return problem.num_rows < FEW * _most_inducing(problem)


def _most_inducing(problem: DeepProblem) -> int:
    return max(layer.num_inducing or 0 for layer in problem.layers)


def chosen_rows(x: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw that many rows without replacement, in their order, on the device of `x`."""
    order = torch.randperm(len(x), generator=generator)[:count].sort().values
    return order.to(x.device)
