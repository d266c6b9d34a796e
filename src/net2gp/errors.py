"""Exceptions, warnings, and the checks that raise them.

An error says what was expected, what came, and what to type instead.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

__all__ = [
    "EmptyClass",
    "FileFormatError",
    "InputError",
    "JitterAdded",
    "Net2GPError",
    "Net2GPWarning",
    "NetworkError",
    "NotAvailable",
    "NotConverged",
    "NotLogits",
    "NotPositiveDefinite",
    "NotStationary",
    "NothingToTune",
    "TooLarge",
    "TuningAtEdge",
    "UnequalScales",
    "WideVariances",
    "available_memory",
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


class Net2GPWarning(UserWarning):
    """The base class of every warning that net2gp gives on purpose."""


class JitterAdded(Net2GPWarning):
    """A Cholesky factorization needed an addition to the diagonal."""


class NotConverged(Net2GPWarning):
    """An iterative method stopped above its tolerance."""


class WideVariances(Net2GPWarning):
    """Variances from a low-rank cache are clearly wider than the exact ones."""


class NothingToTune(Net2GPWarning):
    """The data prefer no change of the network, so they cannot determine how far it may change."""


class TuningAtEdge(Net2GPWarning):
    """A prior variance or a noise variance was chosen at an end of the range that is searched."""


class UnequalScales(Net2GPWarning):
    """A single noise variance is learned for outputs of very different scales."""


class NotStationary(Net2GPWarning):
    """The network is not at a stationary point of its loss, as Laplace's approximation requires."""


class EmptyClass(Net2GPWarning):
    """A class that the network can predict has no example in the data."""


class NotLogits(Net2GPWarning):
    """The network ends in a softmax or sigmoid, which the likelihood would apply a second time."""


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
        or bool(torch.isfinite(tensor.detach().sum()))
    ):
        return
    bad = ~torch.isfinite(tensor.detach())
    if not bool(bad.any()):  # the sum overflowed, but no entry did
        return
    count, first = (
        int(bad.sum()),
        int(bad.reshape(bad.shape[0] if bad.dim() else 1, -1).any(1).nonzero()[0]),
    )
    verb = "is" if count == 1 else "are"
    raise InputError(
        f"{name} must be finite, but {count} of {tensor.numel()} values {verb} NaN or infinite "
        f"(first in row {first}). Drop or impute those rows, e.g. keep = {name}.isfinite()."
    )


def check_positive(value: float | Tensor, name: str, *, zero: bool = False) -> None:
    """Raise unless every entry of `value` is finite and positive.

    Args:
        value: A number or a tensor.
        name: Its name in the message.
        zero: Whether zero is allowed too.

    Raises:
        InputError: If it is not.

    >>> check_positive("small", "tol")
    Traceback (most recent call last):
    ...
    net2gp.errors.InputError: tol must be a number, but is 'small'. Pass for example tol=0.1.
    """
    kind = None if isinstance(value, Tensor) else torch.float64
    try:
        tensor = torch.as_tensor(value, dtype=kind).detach()
    except (TypeError, ValueError, RuntimeError):
        raise InputError(
            f"{name} must be a number, but is {value!r}. Pass for example {name}=0.1."
        ) from None
    good = torch.isfinite(tensor) & ((tensor >= 0) if zero else (tensor > 0))
    if not bool(good.all()):
        wanted = "zero or positive" if zero else "positive"
        shown = tensor[~good].reshape(-1)[0].item()
        raise InputError(
            f"{name} must be {wanted} and finite, but {shown:g} was given."
            f" Pass for example {name}=0.1."
        )


def check_count(value: int, name: str, *, example: int = 10, zero: bool = False) -> None:
    """Raise unless `value` is a whole number of at least 1.

    Args:
        value: The number.
        name: Its name in the message.
        example: A value that the message suggests.
        zero: Whether zero is allowed too.

    Raises:
        InputError: If it is not.

    >>> check_count(0, "num_samples")
    Traceback (most recent call last):
    ...
    net2gp.errors.InputError: num_samples must be a positive whole number, but is 0. Try num_samples=10.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < (0 if zero else 1):
        wanted = "zero or a positive" if zero else "a positive"
        raise InputError(
            f"{name} must be {wanted} whole number, but is {value!r}. Try {name}={example}."
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


def available_memory(device: torch.device | str = "cpu") -> int:
    """Estimate how many bytes can still be allocated.

    Args:
        device: The device. For the CPU, the answer respects the memory limit of a container.

    Returns:
        The number of bytes.
    """
    device = torch.device(device)
    if device.type == "cuda":
        # torch's allocator keeps freed memory, which the driver counts as used but torch can hand out.
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + idle
    return min(_system_memory(), _container_memory())


def _system_memory() -> int:
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 2**63 - 1


def _container_memory() -> int:
    """Return the bytes left under the memory limits of this process's control groups (versions 1 and 2)."""
    left = 2**63 - 1
    try:
        groups = [line.strip().split(":", 2) for line in _read("/proc/self/cgroup").splitlines()]
    except OSError:
        return left
    for _, controllers, path in groups:
        if controllers not in ("", "memory"):
            continue
        root = f"/sys/fs/cgroup/{controllers}".rstrip("/")
        limit, usage = (
            ("max", "current") if not controllers else ("limit_in_bytes", "usage_in_bytes")
        )
        # Inside a container its own group is mounted at the root, while the path is the one on the host.
        for folder in (f"{root}{path}", root):
            try:
                used = int(_read(f"{folder}/memory.{usage}")) - _inactive_files(folder)
                left = min(left, max(0, int(_read(f"{folder}/memory.{limit}")) - used))
            except (OSError, ValueError):
                continue
    return left


def _inactive_files(folder: str) -> int:
    """Return the bytes of cached files that the system frees on demand."""
    entries = dict(line.split() for line in _read(f"{folder}/memory.stat").splitlines())
    return int(entries.get("total_inactive_file", entries.get("inactive_file", 0)))


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


def check_memory(num_bytes: float, device: torch.device, what: str, instead: str) -> None:
    """Refuse an allocation that the device cannot hold, before it is tried.

    Args:
        num_bytes: The size of the allocation.
        device: The device.
        what: What would be allocated, for the message.
        instead: What to use instead, for the message.

    Raises:
        TooLarge: If fewer bytes are free.
    """
    free = available_memory(device)
    if num_bytes > free:
        raise TooLarge(
            f"{what} would take {num_bytes / 2**30:.1f} GiB, but {free / 2**30:.1f} GiB are free on "
            f"{device}. Instead: {instead}."
        )
