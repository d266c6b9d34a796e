"""Targets at every place of a point: which axes of outputs and targets are points, places and channels."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from net2gp.errors import InputError, NetworkError
from net2gp.likelihoods.places import EachPlace, each_place
from net2gp.likelihoods.traits import has_gaussian_noise, has_one_class
from net2gp.linear import Linearized
from net2gp.linear.curvatures.curvature import ExactFisher, MonteCarloFisher
from net2gp.linear.curvatures.head import has_features, last_linearized
from net2gp.linear.forward.places import at_places, has_few_outputs, output_shape
from net2gp.posteriors.weights import (
    Diagonal,
    Full,
    FunctionSpace,
    Kron,
    LastLayer,
    LowRank,
    Structure,
    Subnetwork,
)
from net2gp.types import Inputs, Likelihood


def placed(
    linearized: Linearized, x: Inputs, y: Tensor, likelihood: Likelihood
) -> tuple[Linearized, Likelihood]:
    """Take targets at places for what they are.

    They are at places if the likelihood says so (`each_place`), if there is a label for each place, (N, …),
    or if numbers have more axes than (N, C).

    Args:
        linearized: The network.
        x: The points, or some of them.
        y: Their targets.
        likelihood: The likelihood that was given.

    Returns:
        The network with its outputs in the order of places, and the likelihood of whole points; both as they
        are if targets are of points.

    Raises:
        InputError: If no axis of the outputs, or more than one, can be the one of channels.
    """
    explicit = isinstance(likelihood, EachPlace)
    if not explicit and y.dim() < (2 if has_one_class(likelihood) else 3):
        return linearized, likelihood
    shape = tuple(output_shape(linearized, x))
    if len(shape) < 2:
        if explicit:
            raise InputError(
                f"each_place is for outputs with places, (N, C, H, W) or (N, T, C), but the network gives "
                f"{_shown(shape)}. Pass {likelihood.likelihood} itself."  # type: ignore[attr-defined]
            )
        return linearized, likelihood
    found = each_place(likelihood)
    axis = _axis(shape, tuple(y.shape[1:]), found)
    found = replace(found, axis=axis, channels=shape[axis - 1])
    return at_places(linearized, axis, shape[axis - 1]), found


def structure_at_places(
    structure: Structure | None, linearized: Linearized, x: Inputs
) -> Structure:
    """The structure for a network with outputs at places, with a Fisher matrix that can be paid for.

    Args:
        structure: What was asked for; None takes the last layer if it is one that holds at every place and
            is among the parameters that vary, else Kronecker factors.
        linearized: The network with outputs at places.
        x: Some points.

    Returns:
        The structure.

    Raises:
        InputError: If it would have matrices with a row for each place.
    """
    if isinstance(structure, FunctionSpace | LowRank | Subnetwork):
        raise InputError(
            f"{type(structure).__name__} has a row for each place of each point, which are too many. Pass "
            "structure=LastLayer(), Kron(), Diagonal() or Sampled()."
        )
    if structure is None:
        structure = LastLayer() if has_last_layer(linearized, x) else Kron()
    few = has_few_outputs(linearized, x)
    if few or not isinstance(structure, Full | Diagonal | Kron):
        return structure
    exact = isinstance(structure.fisher, ExactFisher)
    return replace(structure, fisher=MonteCarloFisher()) if exact else structure


def has_last_layer(linearized: Linearized, x: Inputs) -> bool:
    """Whether a network has a last layer with features, whose parameters are among those that vary.

    Args:
        linearized: The network.
        x: Some points.

    Returns:
        Whether `LastLayer()` can be used.
    """
    try:
        last = last_linearized(linearized, x)
    except NetworkError:
        return False
    return set(last.params) <= set(linearized.params) and has_features(last, x)


def _axis(shape: tuple[int, ...], targets: tuple[int, ...], likelihood: EachPlace) -> int:
    """The axis of channels of outputs (N, *shape) with targets (N, *targets); 0 counts points."""
    given = likelihood.axis
    axes = range(1, len(shape) + 1)
    if given is not None:
        resolved = given if given > 0 else len(shape) + 1 + given
        if resolved not in axes:
            raise InputError(
                f"axis={given} is no axis of the outputs {_shown(shape)}. Pass axis=1 or axis=-1."
            )
        axes = range(resolved, resolved + 1)
    labels = [a for a in axes if (*shape[: a - 1], *shape[a:]) == targets]
    fewer = not has_gaussian_noise(likelihood)  # two outputs may say what one target is
    columns = [a for a in axes if _fits(shape, targets, a, fewer) and not likelihood.one_class]
    if not likelihood.one_class:
        labels = [a for a in labels if shape[a - 1] <= 2]
    found, usual = labels or columns, 1 if len(shape) > 2 else len(shape)
    if not found:
        raise InputError(_misfit(shape, targets, likelihood, usual if given is None else axes[0]))
    if len(found) > 1 and targets == shape:
        return usual
    if len(found) > 1:
        raise InputError(
            f"outputs {_shown(shape)} and targets {_shown(targets)} do not say which axis counts channels: "
            f"{' or '.join(map(str, found))}. Pass each_place({likelihood.likelihood}, axis={found[0]}) from "
            "net2gp.likelihoods."
        )
    return found[0]


def _fits(shape: tuple[int, ...], targets: tuple[int, ...], axis: int, fewer: bool) -> bool:
    """Whether targets have the axes of outputs, and as many channels, or half as many if that is allowed."""
    if len(shape) != len(targets):
        return False
    others = [i for i in range(len(shape)) if i != axis - 1]
    same = all(shape[i] == targets[i] for i in others)
    return same and (
        targets[axis - 1] == shape[axis - 1] or (fewer and 2 * targets[axis - 1] == shape[axis - 1])
    )


def _misfit(
    shape: tuple[int, ...], targets: tuple[int, ...], likelihood: EachPlace, axis: int
) -> str:
    places = (*shape[: axis - 1], *shape[axis:])
    wanted = _shown(places) if likelihood.one_class else _shown(shape)
    what = "one label for each place has" if likelihood.one_class else "targets at places have"
    again = _again(places, targets) if likelihood.one_class else "y.movedim(...)"
    return (
        f"the network gives {_shown(shape)}, so that {what} the shape {wanted}, but y is {_shown(targets)}. "
        f"Pass y in this shape, with {again} if it holds the same in another layout, or name the axis of "
        f"channels: each_place({likelihood.likelihood}, axis={-1 if axis == 1 else 1})."
    )


def _again(places: tuple[int, ...], targets: tuple[int, ...]) -> str:
    """What makes labels (N, *places) of targets (N, *targets), which may have an axis of classes."""
    for axis, size in enumerate(targets, 1):
        if (*targets[: axis - 1], *targets[axis:]) == places:
            return f"y.squeeze({axis})" if size == 1 else f"y.argmax({axis})"
    return "y.movedim(...)"


def _shown(shape: tuple[int, ...]) -> str:
    return f"(N, {', '.join(map(str, shape))})"
