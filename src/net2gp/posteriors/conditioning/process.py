"""The law of f: what differs between the methods that find a posterior."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import is_dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, nn

from net2gp.errors import InputError, Net2GPError
from net2gp.inputs import (
    check_batch,
    check_inputs,
    check_tensors,
    chunks,
    describe,
    map_inputs,
    tensors,
)
from net2gp.likelihoods.links import Contrast
from net2gp.limits import LimitKernel
from net2gp.linalg import diagonal_blocks
from net2gp.linear.forward.evaluation import evaluating
from net2gp.linear.linearized import Linearized
from net2gp.types import Inputs, Kernel

BLOCK_NUMBERS = 2**25
"""How many numbers the covariances of one chunk of points may hold."""

BATCH_ROWS = 256
"""How many rows of a joint covariance small groups of points fill together in one pass."""


_INSIDE = threading.local()  # the processes whose networks this thread keeps in eval mode
Owner = TypeVar("Owner")
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Method = Callable[Concatenate[Owner, Arguments], Result]


def evaluated(method: Method[Owner, Arguments, Result]) -> Method[Owner, Arguments, Result]:
    """Run the method of a process with its networks in eval mode, whatever mode the user has left them in."""

    @wraps(method)
    def wrapped(self: Owner, *arguments: Arguments.args, **keywords: Arguments.kwargs) -> Result:
        known = getattr(_INSIDE, "processes", ())
        if id(self) in known:  # one method of a process calls another
            return method(self, *arguments, **keywords)
        _INSIDE.processes = (*known, id(self))
        try:
            with ExitStack() as stack:
                for network in _held(self):
                    stack.enter_context(evaluating(network))
                return method(self, *arguments, **keywords)
        finally:
            _INSIDE.processes = known

    return wrapped


def _held(process: Any) -> tuple[nn.Module, ...]:
    """The networks of a process, which is frozen, so that they are looked for once."""
    found = vars(process).get("_held_networks")
    if found is None:
        found = tuple(_networks(process))
        object.__setattr__(process, "_held_networks", found)
    return found


def _networks(value: Any) -> Iterator[nn.Module]:
    """The linearized networks inside of a process, a kernel or a mean."""
    for linearized in linearizations_of(value):
        yield linearized.network


def linearizations_of(value: Any) -> Iterator[Linearized]:
    """The linearizations inside of a posterior, a process, a kernel or a mean."""
    if isinstance(value, Linearized):
        yield value
    elif is_dataclass(value) and not isinstance(value, LimitKernel):
        for part in vars(value).values():
            for one in part if isinstance(part, tuple) else (part,):
                yield from linearizations_of(one)


class Process(Protocol):
    """A Gaussian process f as predictions and samples need it; its data and likelihood are elsewhere.

    A process that conditions a kernel also has `centered(x)`, its mean minus the prior mean. A process around
    a network also has `linearized`, `covariance`, `prior_var`, `draw_weights` and `draw_networks`. A process
    that is not Gaussian (networks, mixtures) also has `predict(x, likelihood)`, `split(x, likelihood)`,
    `draw(x, num_samples, generator)` and `network_value(x)`, which take the place of what Gaussian laws do.
    """

    @property
    def num_outputs(self) -> int:
        """The number of outputs C."""

    @property
    def kernel(self) -> Kernel:
        """The covariance function of the prior."""

    def facts(self) -> dict[str, str]:
        """The lines that the text of a posterior shows about its process, by name."""

    def check(self, x: Inputs) -> None:
        """Raise an error that says what to change, if `x` cannot be points of this process."""

    def mean(self, x: Inputs) -> Tensor:
        """E f(x): (N, C), without any variance."""

    def moments(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """The mean (N, C) and the covariance of the outputs at each point by itself (N, C, C)."""

    def diagonal(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """The mean and the variances: (N, C) each."""

    def contrast(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """The mean and Var[f_c − f_t] for the class t of the largest mean: (N, C) each."""

    def joint(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """The mean (N·C,) and the covariance (N·C, N·C) of all points together, index n·C + c."""

    def prior_variances(self, x: Inputs) -> Tensor:
        """The variances before any data: (N, C)."""

    def functions(
        self, num_samples: int, generator: torch.Generator | None
    ) -> Callable[[Inputs], Tensor]:
        """Functions drawn from the process, from inputs to (S, N, C), for kernels with features."""


@evaluated
def contrast_by_blocks(process: Process, x: Inputs) -> tuple[Tensor, Tensor]:
    """`Process.contrast` from the covariances (N, C, C), one chunk of points at a time."""
    means, variances = [], []
    for part in chunks(x, max(1, BLOCK_NUMBERS // process.num_outputs**2)):
        mean, blocks = process.moments(part)
        means.append(mean)
        # Variances of contrasts are small differences of large numbers, so they are taken before anything
        # is rounded to the network's dtype.
        variances.append(Contrast.variances(mean.to(blocks.dtype), blocks).to(mean.dtype))
    return torch.cat(means), torch.cat(variances)


def check_form(process: Process, x: Inputs, known: Inputs | None) -> None:
    """Raise unless `x` has the tensors of the training inputs `known`, with as many axes each.

    A network decides for itself what it takes, as some of its inputs may be optional.
    """
    check_inputs(x)
    if known is None:
        return
    check_batch(x, known)
    if _form(x) == _form(known) or _has_network(process):
        return
    text = (
        f"x must have the form of the training inputs, which are {describe(known)}, with any number of rows, "
        f"but is {describe(x)}. Pass points with the same tensors and axes."
    )
    # A kernel with checks of its own can say more about its points; others fail in many ways.
    try:
        process.check(x)
    except Net2GPError as error:
        raise InputError(f"{text} The kernel answers: {error}") from error
    except Exception as error:
        raise InputError(text) from error
    raise InputError(text)


def _has_network(process: Process) -> bool:
    return hasattr(process, "predict") or any(True for _ in _networks(process.kernel))


def _form(x: Inputs) -> object:
    """What does not depend on sizes: the names or the order of the tensors, and their numbers of axes."""
    if isinstance(x, Tensor):
        return x.dim()
    if isinstance(x, Mapping):
        return {name: value.dim() for name, value in x.items()}
    return tuple(value.dim() for value in x)


def merged_groups(x: Inputs, known: Inputs | None) -> tuple[Inputs, int]:
    """The points of all groups along one axis, and q, for groups of q points; `known` are training inputs."""
    check_tensors(x)
    short = known is not None and _form(x) == _form(known)
    shapes = {tuple(value.shape[:2]) for value in tensors(x)}
    if short or len(shapes) != 1 or len(next(iter(shapes))) < 2 or 0 in next(iter(shapes)):
        raise InputError(
            "with batch=True x has two leading axes, groups and the points of a group, the same in all its "
            f"tensors, but is {describe(x)}. Pass x[None] for one group, or leave batch out."
        )
    return map_inputs(x, lambda value: value.flatten(0, 1)), next(iter(shapes))[1]


def joint_of_groups(process: Process, x: Inputs, size: int) -> tuple[Tensor, Tensor]:
    """`Process.joint` of each group of q successive points: (b, q·C) and (b, q·C, q·C)."""
    event = size * process.num_outputs
    means, covariances = [], []
    # A pass takes several groups. The products between groups are wasted, which costs less than more passes.
    for part in chunks(x, size * max(1, BATCH_ROWS // event)):
        mean, covariance = process.joint(part)
        means.append(mean.reshape(-1, event))
        covariances.append(diagonal_blocks(covariance, event))
    return torch.cat(means), torch.cat(covariances)
