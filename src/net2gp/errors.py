"""Exceptions, warnings, and the checks that raise them.

An error says what was expected, what came, and what to type instead.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "BoundFell",
    "ChainStuck",
    "Divergences",
    "EmptyClass",
    "FileFormatError",
    "InputError",
    "JitterAdded",
    "Net2GPError",
    "Net2GPWarning",
    "NetworkError",
    "NoMinibatches",
    "NotAvailable",
    "NotConverged",
    "NotLogits",
    "NotMixed",
    "NotPositiveDefinite",
    "NotStationary",
    "NothingToTune",
    "TooLarge",
    "TuningAtEdge",
    "UnequalScales",
    "WideVariances",
]


class Net2GPError(Exception):
    """The base class of every error that net2gp raises on purpose."""


class InputError(Net2GPError, ValueError):
    """Data, labels or hyper-parameters cannot be used as they are."""


class NotAvailable(InputError, AttributeError):
    """This kind of posterior does not have what was asked for. The message says why and what to use instead.

    It is also an AttributeError, so `hasattr(posterior, "linearized")` is False where there is none.
    """


class NetworkError(Net2GPError, ValueError):
    """A network cannot be linearized as it is."""


class NotPositiveDefinite(Net2GPError, ArithmeticError):
    """A matrix is indefinite even with the largest jitter."""


class TooLarge(Net2GPError, MemoryError):
    """An allocation cannot fit into memory. It is refused before it is tried."""


class FileFormatError(Net2GPError, ValueError):
    """A saved file is truncated, corrupted, or of another kind."""


class ChainStuck(Net2GPError, ArithmeticError):
    """A Markov chain cannot move: the step size is hopeless, or the log joint is not finite."""


class BoundFell(Net2GPError, ArithmeticError):
    """A variational bound on the evidence is lower at the end of a fit than at its start."""


class Net2GPWarning(UserWarning):
    """The base class of every warning that net2gp gives on purpose."""


class JitterAdded(Net2GPWarning):
    """A Cholesky factorization needed an addition to the diagonal."""


class NotConverged(Net2GPWarning):
    """An iterative method stopped above its tolerance."""


class WideVariances(Net2GPWarning):
    """Variances from draws are clearly other than the exact ones."""


class NothingToTune(Net2GPWarning):
    """The data prefer no change of the network, so they cannot determine how far it may change."""


class TuningAtEdge(Net2GPWarning):
    """A prior variance or a noise ends at a limit of the search, or data set none to the scale of a link."""


class UnequalScales(Net2GPWarning):
    """A single noise variance is learned for outputs of very different scales."""


class NotStationary(Net2GPWarning):
    """The network is not at a stationary point of its loss, as Laplace's approximation requires."""


class Divergences(Net2GPWarning):
    """Trajectories of a Markov chain left the region that its step size can follow."""


class NotMixed(Net2GPWarning):
    """Markov chains give different predictions, so they have not all reached the same law."""


class NoMinibatches(Net2GPWarning):
    """A method that reads its spread off the noise of minibatches got all data in every step."""


class EmptyClass(Net2GPWarning):
    """A class that the network can predict has no example in the data."""


class NotLogits(Net2GPWarning):
    """The network ends in a softmax or sigmoid, which the likelihood would apply a second time."""


LARGEST_COUNT = 2**62
"""Numbers above it do not fit into the integers of torch."""

_INSIDE = tuple(
    os.path.dirname(str(module.__file__)) + os.sep for module in (sys.modules[__name__], torch)
)


_TRYING: ContextVar[bool] = ContextVar("trying", default=False)


@contextlib.contextmanager
def trying() -> Iterator[None]:
    """Within it there are no warnings of jitter or slow convergence, since a search only tries its points.

    What is chosen in the end is computed once more outside, with its warnings.
    """
    token = _TRYING.set(True)
    try:
        yield
    finally:
        _TRYING.reset(token)


def warn(message: str, category: type[Net2GPWarning]) -> None:
    """Warn, and point at the line outside of net2gp that led here, however deep it is called."""
    if _TRYING.get() and issubclass(category, JitterAdded | NotConverged):
        return
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _is_inside(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def _is_inside(path: str) -> bool:
    # decorators such as torch.no_grad() stand between two of our own functions
    return path.startswith(_INSIDE) or path == contextlib.__file__


def check_finite(tensor: Tensor, name: str) -> None:
    """Raise if a tensor has a NaN or an infinity.

    Args:
        tensor: The tensor. Tensors of integers and on the meta device pass.
        name: Its name in the message.

    Raises:
        InputError: If an entry is NaN or infinite.

    >>> check_finite(torch.tensor([1.0, float("nan")]), "y")
    Traceback (most recent call last):
    ...
    net2gp.errors.InputError: y must be finite, but 1 of 2 values is NaN or infinite ...
    """
    # A sum propagates every NaN and infinity and, unlike isfinite(), needs no copy.
    if (
        tensor.is_meta
        or not tensor.is_floating_point()
        or not readable(tensor)
        or bool(torch.isfinite(tensor.detach().sum()))
    ):
        return
    bad = ~torch.isfinite(tensor.detach())
    if not bool(bad.any()):  # the sum overflowed, but no entry did
        return
    rows = bad.reshape(bad.shape[0] if bad.dim() else 1, -1).any(1)
    count, first = int(bad.sum()), int(rows.nonzero()[0])
    verb = "is" if count == 1 else "are"
    raise InputError(
        f"{name} must be finite, but {count} of {tensor.numel()} values {verb} NaN or infinite "
        f"(first in row {first}). Drop or impute those rows, e.g. keep = {name}.isfinite()."
    )


def readable(tensor: Tensor) -> bool:
    """Whether the entries of a tensor can be looked at: not while operations are recorded for a GPU."""
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def check_positive(
    value: float | Tensor, name: str, *, zero: bool = False, single: bool = False
) -> None:
    """Raise unless every entry of `value` is finite and positive.

    Args:
        value: A number or a tensor.
        name: Its name in the message.
        zero: Whether zero is allowed too.
        single: Whether `value` must be one number.

    Raises:
        InputError: If it is not.

    >>> check_positive("small", "tol")
    Traceback (most recent call last):
    ...
    net2gp.errors.InputError: tol must be a number, but is 'small'. Pass for example tol=0.1.
    """
    kind = None if isinstance(value, Tensor) else torch.float64
    try:
        if isinstance(value, Tensor) and value.is_complex():
            raise TypeError
        tensor = torch.as_tensor(value, dtype=kind).detach()
    except (TypeError, ValueError, RuntimeError):
        raise InputError(
            f"{name} must be a number, but is {value!r}. Pass for example {name}=0.1."
        ) from None
    if single and tensor.numel() != 1:
        raise InputError(
            f"{name} must be one number, but has shape {tuple(tensor.shape)}. Pass for example {name}=0.1."
        )
    good = torch.isfinite(tensor) & ((tensor >= 0) if zero else (tensor > 0))
    if readable(tensor) and not bool(good.all()):
        wanted = "zero or positive" if zero else "positive"
        said = f"{name} must be {wanted} and finite, but {tensor[~good].reshape(-1)[0].item():g} was given."
        raise InputError(f"{said} Pass for example {name}=0.1.")


def one_number(value: Any, name: str, hint: str = "") -> float | Tensor:
    """Take one positive number, in whatever form it comes.

    Args:
        value: A number, or a tensor or array of one element of any shape, which may require a gradient.
        name: Its name in the messages.
        hint: What to do with several numbers, a sentence for the message.

    Returns:
        The number, as a tensor of at most one axis if it came as a tensor.

    Raises:
        InputError: It is not positive and finite, not a number, or has several elements.

    >>> one_number(torch.tensor([[2.0]]), "variance")
    tensor(2.)
    """
    check_positive(value, name)
    if isinstance(value, float | int):
        return value
    found = value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=torch.float64)
    if found.numel() != 1:
        raise InputError(
            f"{name} must be one number, but has shape {tuple(found.shape)}. Pass a number, for example "
            f"{name}=0.1, or a tensor of one element.{hint and ' ' + hint}"
        )
    if not isinstance(value, Tensor):
        return float(found)
    return value if value.dim() < 2 else value.reshape(())


def check_count(
    value: int, name: str, *, example: int = 10, zero: bool = False, meaning: str = ""
) -> None:
    """Raise unless `value` is a whole number of at least 1.

    Args:
        value: The number.
        name: Its name in the message.
        example: A value that the message suggests.
        zero: Whether zero is allowed too.
        meaning: What the number counts, which the message says in place of the example.

    Raises:
        InputError: If it is not.

    >>> check_count(0, "num_samples")
    Traceback (most recent call last):
    ...
    net2gp.errors.InputError: num_samples must be a positive whole number, but is 0. Try num_samples=10.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < (0 if zero else 1):
        wanted = "zero or a positive" if zero else "a positive"
        said, advice = (f", {meaning}", "") if meaning else ("", f" Try {name}={example}.")
        raise InputError(f"{name} must be {wanted} whole number{said}, but is {value!r}.{advice}")
    if value > LARGEST_COUNT:
        raise InputError(
            f"{name} must be at most 2⁶² ≈ 4.6e18, but is {value}. Try {name}={example}."
        )


def check_seed(value: int, name: str = "seed") -> None:
    """Raise unless `value` can seed a generator of torch.

    Args:
        value: The seed.
        name: Its name in the message.

    Raises:
        InputError: If it is no whole number between −2⁶² and 2⁶².

    >>> check_seed("a")
    Traceback (most recent call last):
    ...
    net2gp.errors.InputError: seed must be a whole number of Python, but is 'a'. Pass for example seed=0.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        shown = repr(value) if isinstance(value, str | float) else f"of type {type(value).__name__}"
        raise InputError(
            f"{name} must be a whole number of Python, but is {shown}. Pass for example {name}=0."
        )
    if abs(value) > LARGEST_COUNT:
        raise InputError(
            f"{name} must lie between −2⁶² and 2⁶², but is {value}. Pass for example {name}=0."
        )


def check_flag(value: bool, name: str) -> None:
    """Raise unless `value` is True or False.

    Args:
        value: The value.
        name: Its name in the message.

    Raises:
        InputError: If it is anything else.

    >>> check_flag("yes", "bootstrap")
    Traceback (most recent call last):
    ...
    net2gp.errors.InputError: bootstrap must be True or False, but is of type str.
    """
    if not isinstance(value, bool):
        raise InputError(f"{name} must be True or False, but is of type {type(value).__name__}.")


def check_generator(value: torch.Generator | None) -> None:
    """Raise unless `value` is a generator of torch or None.

    Args:
        value: What was passed as `generator`.

    Raises:
        InputError: If it is anything else.
    """
    if value is not None and not isinstance(value, torch.Generator):
        raise InputError(
            f"generator must be a torch.Generator or None, but is of type {type(value).__name__}. Pass for "
            "example generator=torch.Generator().manual_seed(0)."
        )


def check_device(device: torch.device | str) -> None:
    """Raise unless this machine has the device.

    Args:
        device: The device.

    Raises:
        InputError: If it has not.

    >>> check_device("gpu")
    Traceback (most recent call last):
    ...
    net2gp.errors.InputError: there is no device 'gpu' here. Pass device="cpu" ...
    """
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f'there is no device {str(device)!r} here. Pass device="cpu" ({reason}).'
        ) from None


def check_dtype_and_device(tensor: Tensor, name: str, like: Tensor, like_name: str) -> None:
    """Raise unless a tensor has the floating dtype and the device of another.

    Args:
        tensor: The tensor.
        name: Its name in the message.
        like: The tensor to agree with.
        like_name: The name of that one.

    Raises:
        InputError: If dtype or device differ.
    """
    if tensor.device != like.device:
        raise InputError(
            f"{name} is on {tensor.device}, but {like_name} is on {like.device}. "
            f"Move it: {name} = {name}.to('{like.device}')."
        )
    if tensor.is_floating_point() and like.is_floating_point() and tensor.dtype != like.dtype:
        raise InputError(
            f"{name} is {tensor.dtype}, but {like_name} is {like.dtype}. "
            f"Convert it: {name} = {name}.to({like.dtype})."
        )
