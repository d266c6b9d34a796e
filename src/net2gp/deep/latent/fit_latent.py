"""`deep.latent_variables`: latent variables of data, below any number of Gaussian process layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from net2gp.deep.latent.layer import Targets
from net2gp.deep.latent.result import LatentVariables
from net2gp.deep.latent.search import LatentSearch, climb
from net2gp.deep.latent.tower import (
    FIRST_NOISE,
    UPPER_NOISES,
    Tower,
    components,
    layer_variables,
    level_variables,
)
from net2gp.errors import InputError, check_count, check_finite
from net2gp.inputs import describe
from net2gp.progress import progress
from net2gp.types import Params

MOST_INDUCING = 30
"""The number of inducing points per layer by default."""

FIXED_SHARE = 0.2
"""The share of the steps in which variances stand still, for the layers right above the data.

Otherwise the search may explain everything as noise before the latent variables have found their places.
"""


def latent_variables(
    y: Tensor,
    widths: int | Sequence[int],
    *,
    inputs: Tensor | None = None,
    missing: bool = False,
    search: LatentSearch | None = None,
) -> LatentVariables:
    """Find latent variables of data: a Bayesian GP-LVM, or a deep Gaussian process with a collapsed bound.

    The model is h_0 → h_1 → … → y. Each arrow is a layer of Gaussian processes with a squared-exponential
    kernel, one length scale per input, and noise. The first level has the prior N(0, I), or is below known
    inputs. Each level has a Gaussian law q(h) with a diagonal covariance, and the values at inducing points
    have their best law, which is known in closed form. The bound on log p(y) that remains has no sampling in
    it, and is climbed in the laws, inducing points, kernels and noises.

    One level without inputs is the Bayesian GP-LVM of Titsias and Lawrence. It starts from principal
    components, and each further level is added on top of a model that was fitted without it. Levels below
    inputs start from the principal components of the inputs, and of the data; the better bound is kept.
    Variances and noises of latent outputs are free for each output. So a model with a further level has the
    model without it as a limit, and a bound that grows speaks for the level. The cost per step is
    N·M²·Q per layer plus M³ per latent output.

    Args:
        y: The data, (N, D). Their means per column are subtracted.
        widths: The number of variables of each level, from the top to the data, as (2, 5); or one number
            for one level. An empty tuple with inputs means plain regression.
        inputs: Known inputs above the first level, (N, P), or None.
        missing: Whether NaN in y means a value that is not known.
        search: Settings; None means `LatentSearch()`.

    Returns:
        Latent means and variances, relevances, the fitted layers and the bound.

    Raises:
        InputError: If data or widths do not fit together, a column is constant, there are more inducing
            points than rows, or y has NaN without `missing=True`.

    >>> angle = torch.linspace(0, 3, 12, dtype=torch.float64)
    >>> y = torch.stack([angle.sin(), angle.cos(), 2 * angle.sin()], 1)
    >>> found = latent_variables(y, 1, search=LatentSearch(num_steps=20, num_inducing=6))
    >>> found.mean.shape, found.reconstruct().mean.shape
    (torch.Size([12, 1]), torch.Size([12, 3]))

    References: Titsias & Lawrence, "Bayesian Gaussian process latent variable model", AISTATS 2010; Damianou
    & Lawrence, "Deep Gaussian processes", AISTATS 2013.
    """
    search = LatentSearch() if search is None else search
    if not isinstance(search, LatentSearch):
        raise InputError(
            f"search must be deep.LatentSearch(...) or None, but is {describe(search)}."
        )
    sizes = _widths(widths, inputs)
    center, targets = _targets(y, missing)
    x = None if inputs is None else _checked_inputs(inputs, len(y))
    count = _num_inducing(search, len(y))
    with torch.inference_mode(False), torch.enable_grad():
        grow = _grown if x is None else _below_inputs
        found = grow(Tower(x, targets, 0, {}), sizes, search, count)
    return LatentVariables.of(found.tower, center, found.bounds, found.depth_bounds, search)


class _Fitted(NamedTuple):
    tower: Tower
    bounds: list[float]
    depth_bounds: list[float]


def _grown(empty: Tower, widths: list[int], search: LatentSearch, count: int) -> _Fitted:
    """Levels one by one, from the data upward."""
    found = _Fitted(empty, [-math.inf], [])
    with progress("latent variables", search.num_steps * len(widths)) as advance:
        for width in reversed(widths):
            lowest, tries = found.tower.num_levels == 0, []
            for noise in (FIRST_NOISE,) if lowest else UPPER_NOISES:
                tower = _with_level(found.tower, width, noise, search, count)
                tries.append(_climbed(tower, search, advance, lowest))
                if tries[-1].bounds[-1] > found.bounds[-1]:
                    break
            best = max(tries, key=lambda one: one.bounds[-1])
            found = best._replace(depth_bounds=[*found.depth_bounds, best.bounds[-1]])
    return found


def _with_level(tower: Tower, width: int, noise: float, search: LatentSearch, count: int) -> Tower:
    """A tower with one more level on top, at its start."""
    generator = torch.Generator().manual_seed(search.seed + tower.num_levels)
    rows, targets = _next_targets(tower)
    mean, share = components(rows, width, generator)
    lifted = {_raised(name): value for name, value in tower.variables.items()}
    idle = noise == UPPER_NOISES[-1]
    mean = 0.1 * mean if idle else mean
    new = level_variables(0, mean, 1.0) if idle else level_variables(0, mean)
    new |= layer_variables(0, mean, share, targets, count, generator, noise)
    return replace(tower, num_levels=tower.num_levels + 1, variables=lifted | new)


def _next_targets(tower: Tower) -> tuple[Tensor, Targets]:
    """What the next layer upward is to explain, and the same in units of its relevance."""
    if tower.num_levels == 0:
        return tower.targets.mean, tower.targets
    top = tower.level(0)
    return top.mean / tower.layer(0).lengthscale, Targets(top.mean, top.variance)


def _raised(name: str) -> str:
    """The name of a variable after a level and a layer were added at the top."""
    kind, rest = name.split(".")
    return f"{kind[:5]}{int(kind[5:]) + 1}.{rest}"


def _below_inputs(empty: Tower, widths: list[int], search: LatentSearch, count: int) -> _Fitted:
    """All levels at once, from both starts."""
    assert empty.inputs is not None
    starts = [empty.inputs] if not widths else [empty.inputs, empty.targets.mean]
    tries: list[_Fitted] = []
    with progress("latent variables", search.num_steps * len(starts)) as advance:
        for start in starts:
            generator = torch.Generator().manual_seed(search.seed)
            variables: Params = {}
            rows, share = empty.inputs, torch.ones(empty.inputs.shape[1]).to(empty.inputs)
            for k, width in enumerate(widths):
                mean, below = components(start, width, generator)
                level = level_variables(k, mean, 0.01)
                targets = Targets(mean, level[f"level{k}.log_var"].exp())
                variables |= level | layer_variables(k, rows, share, targets, count, generator)
                rows, share = mean, below
            last = layer_variables(len(widths), rows, share, empty.targets, count, generator)
            tower = replace(empty, num_levels=len(widths), variables=variables | last)
            tries.append(_climbed(tower, search, advance, True))
    return max(tries, key=lambda one: one.bounds[-1])


def _climbed(
    tower: Tower, search: LatentSearch, advance: Callable[..., None], careful: bool
) -> _Fitted:
    """Climb in all variables; careful means that variances stand still for a part of the steps."""
    bounds = [float(tower.bound())]

    def watch(bound: float) -> None:
        bounds.append(max(bound, bounds[-1]))
        advance(note=f"bound {bound:.2f}")

    names = list(tower.variables)
    still = [name for name in names if not name.endswith(("log_noise", "layer0.log_var"))]
    short = max(1, int(FIXED_SHARE * search.num_steps)) if careful else 0
    for some, steps in ((still, short), (names, search.num_steps - short)):
        if steps:
            start = {name: tower.variables[name] for name in some}
            found = climb(tower.bound_with, start, steps, search.tolerance, watch)
            tower = tower.with_variables(found)
    bounds.append(float(tower.bound()))
    return _Fitted(tower, bounds, [])


def _widths(widths: int | Sequence[int], inputs: Tensor | None) -> list[int]:
    sizes = [widths] if isinstance(widths, int) else widths
    if isinstance(sizes, str) or not isinstance(sizes, Sequence):
        raise InputError(
            f"widths must be a number or a tuple such as (2, 5), but is {describe(widths)}."
        )
    for size in sizes:
        check_count(size, "widths", example=2)
    if not sizes and inputs is None:
        raise InputError(
            "widths is empty, so that there are no latent variables. Pass for example widths=2."
        )
    return list(sizes)


def _targets(y: Tensor, missing: bool) -> tuple[Tensor, Targets]:
    """The means per column, and the data less these."""
    if not isinstance(y, Tensor) or y.dim() != 2 or not y.is_floating_point() or len(y) < 2:
        raise InputError(
            "latent_variables needs y as a floating tensor of shape (N, D) with at least two rows, but y is "
            f"{describe(y)}."
        )
    values = y.detach().double()
    unknown = values.isnan() if missing else torch.zeros_like(values, dtype=torch.bool)
    if bool(values.isnan().any()) and not missing:
        raise InputError(
            f"y has {int(values.isnan().sum())} NaN. Pass missing=True if these are values that are not "
            "known."
        )
    values = values.masked_fill(unknown, 0.0)
    check_finite(values, "y")
    known = (~unknown).double()
    if not bool((known.sum(1) > 0).all()):
        row = int((known.sum(1) == 0).nonzero()[0])
        raise InputError(f"row {row} of y is all NaN. Drop rows without any value.")
    center = values.sum(0) / known.sum(0).clamp(min=1)
    centered = (values - center) * known
    scale = values.abs().amax(0)
    constant = (centered.abs().amax(0) <= 1e-12 * scale).nonzero().flatten().tolist()
    if constant:
        raise InputError(
            f"columns {constant} of y are constant or all NaN, so that no latent variable can explain "
            "them. Drop them: y[:, y.std(0) > 0]."
        )
    return center, Targets(centered, None, known if bool(unknown.any()) else None)


def _checked_inputs(inputs: Tensor, num_rows: int) -> Tensor:
    if not isinstance(inputs, Tensor) or inputs.dim() != 2 or len(inputs) != num_rows:
        raise InputError(f"inputs must have the shape ({num_rows}, P), but is {describe(inputs)}.")
    x = inputs.detach().double()
    check_finite(x, "inputs")
    constant = (x == x[:1]).all(0).nonzero().flatten().tolist()
    if constant:
        raise InputError(
            f"columns {constant} of inputs are constant. Drop them: inputs[:, inputs.std(0) > 0]."
        )
    return x


def _num_inducing(search: LatentSearch, num_rows: int) -> int:
    count = min(MOST_INDUCING, num_rows) if search.num_inducing is None else search.num_inducing
    if count > num_rows:
        raise InputError(
            f"there are more inducing points ({count}) than rows ({num_rows}). Pass at most "
            f"LatentSearch(num_inducing={num_rows})."
        )
    return count
