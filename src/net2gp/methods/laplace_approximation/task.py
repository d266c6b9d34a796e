"""A network, its data and a likelihood, checked: the task that a structure takes the curvature of."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from net2gp.errors import EmptyClass, InputError, NetworkError, warn
from net2gp.inputs import check_made, chunks, copied, describe, map_inputs, num_rows, rows
from net2gp.likelihoods.traits import bound_to, has_gaussian_noise, has_open_link, has_open_noise
from net2gp.linear import Linearized, linearize
from net2gp.linear.curvatures.head import features_and_outputs, has_features
from net2gp.linear.forward.places import channels_of, output_shape
from net2gp.linear.linearized import Patterns, PriorVar, example_of
from net2gp.linear.planning.probe import ALIKE, check_all_used, check_used, find_used
from net2gp.methods.laplace_approximation.dense import has_last_layer, placed, structure_at_places
from net2gp.posteriors.conditioning.checks import check_class_axis
from net2gp.posteriors.recipes.seen import MOST_PARAMETERS
from net2gp.posteriors.weights import (
    Diagonal,
    Full,
    FunctionSpace,
    Kron,
    LastLayer,
    Structure,
    Task,
)
from net2gp.posteriors.weights.tasks.streamed import (
    POINTS,
    StreamedTask,
    check_tied,
    outputs_at,
    piece_of,
)
from net2gp.posteriors.weights.tasks.sums import Sums
from net2gp.streams import Passes
from net2gp.types import Inputs, Likelihood, Stream

KEPT_POINTS = 32
"""Inputs of a stream from which the network is planned again."""

SMALL_FULL = 2500
"""Parameters up to which the whole precision is the default."""

SMALL_ROWS = 4000
"""Rows N·C up to which function space is the default."""


def owned(data: tuple[Inputs, Tensor] | Stream) -> tuple[Inputs, Tensor] | Stream:
    """Copies of the data, which the caller may change later; a stream as it is."""
    return data if isinstance(data, Stream) else (map_inputs(data[0], copied), copied(data[1]))


def make_task(
    network: nn.Module | Linearized,
    data: tuple[Inputs, Tensor] | Stream,
    likelihood: Likelihood,
    structure: Structure | None = None,
    *,
    only: Patterns | None = None,
    prior_var: PriorVar | None = None,
    temperature: float = 1.0,
) -> tuple[Task, Structure]:
    """Everything checked, the network evaluated at the data, and the structure with its options filled in."""
    check_made(likelihood, "likelihood")
    if not isinstance(likelihood, Likelihood):
        raise InputError(
            f"likelihood must be e.g. Categorical() or Gaussian(), but is {describe(likelihood)}."
        )
    options = has_open_noise(likelihood), prior_var, temperature
    task: Task
    if isinstance(data, Stream):
        task, structure = _streamed(network, data, likelihood, structure, only, options)
    else:
        x, y = data
        whole = _linearized(network, only, structure)
        whole, likelihood, structure = _laid_out(whole, x, y, likelihood, structure)
        linearized = whole if structure is None else structure.chosen(whole, x)
        likelihood = bound_to(likelihood, y)
        f = _outputs(linearized, x, structure)
        likelihood.check(f.to(linearized.example.dtype), y)
        _check_alone(linearized, x, f)
        check_used(linearized, x)
        task = Task(linearized, x, y, _used(likelihood), f, *options)
    check_classes(task)
    return task, (structure or _default(task)).settled(task.linearized)


def _outputs(linearized: Linearized, x: Inputs, structure: Structure | None) -> Tensor:
    """The outputs (N, C) in float64; for a last layer from the pass that gives its features as well."""
    one_layer = structure is not None and structure.traits().one_layer
    if not one_layer or channels_of(linearized) is not None or not has_features(linearized, x):
        return outputs_at(linearized, x)
    parts = [features_and_outputs(linearized, part)[1] for part in chunks(x, POINTS)]
    return torch.cat(parts).double()


def _used(likelihood: Likelihood) -> Likelihood:
    """The likelihood with noise variance 1 where it is open."""
    return likelihood.with_noise(1.0) if has_open_noise(likelihood) else likelihood


def _streamed(
    network: nn.Module | Linearized,
    data: Stream,
    likelihood: Likelihood,
    structure: Structure | None,
    only: Patterns | None,
    options: tuple[bool, PriorVar | None, float],
) -> tuple[StreamedTask, Structure | None]:
    """The task of a stream, whose first pass checks each point and finds the sums that do not change."""
    # beside the curvature: the checks, points for prior and noise, for variances or a link, and the gradient
    most = 4 + (1 if structure is None else structure.traits().passes)
    # what was seen: some points, perhaps all features
    most += 2 if has_open_link(likelihood) or has_gaussian_noise(likelihood) else 0
    passes = Passes(data, example_of(network), most)
    start, targets = passes.first()
    whole = _linearized(network, only, structure)
    whole, likelihood, structure = _laid_out(
        whole, start, targets, likelihood, structure, begins=True
    )
    linearized = whole if structure is None else structure.chosen(whole, start)
    used, known, reached = _used(likelihood), None, set[str]()
    for first, x, y in passes.pieces("checks"):
        piece = piece_of(linearized, used, first, x, y)
        if known is None:
            _check_alone(linearized, x, piece.f)
        _check_same_layer(whole, x, structure, linearized)
        find_used(linearized, x, reached)
        sums = Sums.of(piece.likelihood, piece.f, y)
        known = sums if known is None else known.plus(sums)
    assert known is not None
    check_all_used(linearized, reached)
    check_tied(likelihood, passes)
    start = map_inputs(rows(start, slice(0, KEPT_POINTS)), torch.clone)
    task = StreamedTask(linearized, used, *options, passes=passes, known=known, start=start)
    return task, structure


def _laid_out(
    linearized: Linearized,
    x: Inputs,
    y: Tensor,
    likelihood: Likelihood,
    structure: Structure | None,
    *,
    begins: bool = False,
) -> tuple[Linearized, Likelihood, Structure | None]:
    """The network, the likelihood and the structure for targets of points, or at places of them.

    The points may be all, or those that a stream begins with.
    """
    linearized, likelihood = placed(linearized, x, y, likelihood)
    if channels_of(linearized) is not None:
        return linearized, likelihood, structure_at_places(structure, linearized, x)
    check_class_axis(linearized, x, likelihood)
    if structure is None and has_open_link(likelihood) and _is_large(linearized, x):
        many = begins or num_rows(x) * output_shape(linearized, x).numel() > SMALL_ROWS
        structure = LastLayer() if many else None
    return linearized, likelihood, structure


def _is_large(linearized: Linearized, x: Inputs) -> bool:
    """Whether all parameters of a network vary, so many that novelty is that of its last layer."""
    if linearized.num_params <= MOST_PARAMETERS:
        return False
    every = {name for name, _ in linearized.network.named_parameters()} <= set(linearized.params)
    return every and has_last_layer(linearized, x)


def _check_same_layer(
    whole: Linearized, x: Inputs, structure: Structure | None, linearized: Linearized
) -> None:
    """Raise if a structure that chooses its parameters chooses others at these points."""
    if structure is None or not structure.traits().one_layer:
        return
    found = structure.chosen(whole, x)
    if list(found.params) != list(linearized.params):
        raise NetworkError(
            f"{type(structure).__name__}() takes {list(linearized.params)} at the first points of the "
            f"stream and {list(found.params)} at others. Choose the parameters with only=, and "
            "structure=Full() or Kron()."
        )


def _check_alone(linearized: Linearized, x: Inputs, f: Tensor) -> None:
    """Raise if the network says something else of a point by itself."""
    alone = linearized(rows(x, slice(0, 1))).double()
    gap = float((alone - f[:1]).abs().max())
    if gap > ALIKE[linearized.rounding] * (1 + float(f.abs().max())):
        raise NetworkError(
            f"the network's output at a point changes by {gap:.3g} with the other points of the batch, or "
            "from call to call. Use a network that treats points one by one: no batch statistics, no dropout "
            "in eval mode."
        )


def _linearized(
    network: nn.Module | Linearized, only: Patterns | None, structure: Structure | None
) -> Linearized:
    check_made(structure, "structure")
    if structure is not None and not isinstance(structure, Structure):
        given = repr(structure) if isinstance(structure, str) else describe(structure)
        raise InputError(
            "structure must be Full(), Diagonal(), Kron(), LowRank(rank), LastLayer(), Subnetwork(count), "
            f"FunctionSpace(), Sampled(), a Structure of your own or None, but is {given}. Pass for example "
            "structure=net2gp.Kron()."
        )
    if only is not None and structure is not None and structure.traits().one_layer:
        name = type(structure).__name__
        raise InputError(f"{name}() chooses its parameters itself: leave only out.")
    if isinstance(network, Linearized):
        if only is not None:
            raise InputError("pass only= to linearize, which has chosen the parameters already.")
        return network
    return linearize(network, only=only)


def _default(task: Task) -> Structure:
    """The first structure that has all of it and is small, else `Kron()`, with a diagonal where it must."""
    P, count = task.linearized.num_params, task.sums.num_rows
    if (SMALL_FULL if count >= P else 1000) >= P:
        return Full()
    if count <= SMALL_ROWS and task.kept is not None:
        return FunctionSpace()
    try:
        Kron().curvature(task.at(torch.arange(min(3, task.sums.count), device=task.device)))
    except NetworkError:
        return Kron(rest=Diagonal())
    return Kron()


def check_classes(task: Task) -> None:
    """Warn if a class has no example in the data."""
    if task.sums.classes is None:
        return
    empty = (task.sums.classes == 0).nonzero().flatten().tolist()
    if empty:
        some = ", ".join(str(c) for c in empty[:8]) + (", …" if len(empty) > 8 else "")
        warn(
            f"no example of class {some} in the data: the prior alone says how sure their logits are.",
            EmptyClass,
        )
