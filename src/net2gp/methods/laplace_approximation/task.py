"""A network, its data and a likelihood, checked: the task that a structure takes the curvature of."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from net2gp.errors import EmptyClass, InputError, NetworkError, warn
from net2gp.inputs import check_made, chunks, copied, describe, map_inputs, rows
from net2gp.likelihoods.traits import has_one_class, has_open_noise
from net2gp.linear import Linearized, linearize
from net2gp.linear.linearized import Patterns, PriorVar
from net2gp.linear.planning.probe import ALIKE, check_used
from net2gp.posteriors.conditioning.checks import check_class_axis
from net2gp.posteriors.weights import Diagonal, Full, FunctionSpace, Kron, Structure, Task
from net2gp.types import Inputs, Likelihood

POINTS = 1500
"""Points that go through the network together."""

SMALL_FULL = 2500
"""Parameters up to which the whole precision is the default."""

SMALL_ROWS = 4000
"""Rows N·C up to which function space is the default."""


def make_task(
    network: nn.Module | Linearized,
    data: tuple[Inputs, Tensor],
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
    x, y = map_inputs(data[0], copied), copied(data[1])
    linearized = _linearized(network, x, only, structure)
    check_class_axis(linearized, x, likelihood)
    f = torch.cat([linearized(part) for part in chunks(x, POINTS)]).double()
    likelihood.check(f.to(linearized.example.dtype), y)
    _check_alone(linearized, x, f)
    check_used(linearized, x)
    open_noise = has_open_noise(likelihood)
    _check_classes(f, y, likelihood)
    used = likelihood.with_noise(1.0) if has_open_noise(likelihood) else likelihood
    task = Task(linearized, x, y, used, f, open_noise, prior_var, temperature)
    return task, (structure or _default(task)).settled(linearized)


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
    network: nn.Module | Linearized, x: Inputs, only: Patterns | None, structure: Structure | None
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
        linearized = network
    else:
        linearized = linearize(network, only=only)
    return linearized if structure is None else structure.chosen(linearized, x)


def _default(task: Task) -> Structure:
    """The first structure that has all of it and is small, else `Kron()`, with a diagonal where it must."""
    P, count = task.linearized.num_params, task.f.numel()
    if (SMALL_FULL if count >= P else 1000) >= P:
        return Full()
    if count <= SMALL_ROWS:
        return FunctionSpace()
    try:
        Kron().curvature(task.at(torch.arange(min(3, len(task.f)), device=task.f.device)))
    except NetworkError:
        return Kron(rest=Diagonal())
    return Kron()


def _check_classes(f: Tensor, y: Tensor, likelihood: Likelihood) -> None:
    if not has_one_class(likelihood):
        return
    counts = torch.bincount(y.long(), minlength=f.shape[1])
    empty = (counts == 0).nonzero().flatten().tolist()
    if empty:
        some = ", ".join(str(c) for c in empty[:8]) + (", …" if len(empty) > 8 else "")
        warn(
            f"no example of class {some} in the data: the prior alone says how sure their logits are.",
            EmptyClass,
        )
