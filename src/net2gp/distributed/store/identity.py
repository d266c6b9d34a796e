"""What a store says about the kernel and the points that it belongs to, and how another one is told apart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from net2gp.errors import InputError
from net2gp.inputs import follows, num_rows, rows, tensors
from net2gp.kernels.base import dtype_of
from net2gp.posteriors.writing import digest, encode
from net2gp.types import Inputs, Kernel

KIND = "net2gp kernel store"
FORMAT = 1

PROBES = 8
"""The most points at which the values of a kernel are noted."""

ROWS, VALUES = 64, 256
"""The most rows that these points have together, and the most values that are noted."""

TOLERANCES = {torch.float64: 1e-9}
"""How far values of one kernel may lie apart on two machines, by its dtype, of the largest of them."""

TOLERANCE = 1e-5
"""The same for other dtypes."""


def identity_of(kernel: Kernel, x: Inputs, tile: int) -> dict[str, Any]:
    """Describe a kernel and points in a way that JSON can hold.

    Points are known by a digest of their bytes. A kernel is known by two things. Its fields and tensors, as a
    file of a posterior has them, have a digest where all of its classes are savable; this tells kernels apart
    that differ at few points, but says nothing about the functions that a network is made of. Its values at
    some of the points tell what it computes, whatever it consists of.

    Args:
        kernel: The kernel.
        x: N points.
        tile: The number of points of a tile.

    Returns:
        The description.
    """
    count = kernel.outputs(x)
    probes = _probes(num_rows(x), count or 1)
    return {
        "kind": KIND,
        "format": FORMAT,
        "points": num_rows(x),
        "outputs": count,
        "tile": tile,
        "data": _digest_of_points(x),
        "kernel": _digest_of_kernel(kernel),
        "probes": probes,
        "values": _values(kernel, x, probes),
    }


def differences(
    found: dict[str, Any], wanted: dict[str, Any], kernel: Kernel, x: Inputs
) -> list[str]:
    """Say in what a store differs from the one that is wanted.

    Args:
        found: What the store says.
        wanted: What `identity_of` says.
        kernel: The kernel that is wanted.
        x: The points that are wanted.

    Returns:
        A sentence without its end for each difference.
    """
    said = []
    if found["points"] != wanted["points"]:
        said.append(f"it is of {found['points']} points and x has {wanted['points']}")
    elif found["data"] != wanted["data"]:
        said.append("the numbers in x are others, in another order, or of another dtype")
    if found["tile"] != wanted["tile"]:
        said.append(f"its tiles have {found['tile']} points and not {wanted['tile']}")
    if said and found["data"] != wanted["data"]:
        return said  # values at other points say nothing about the kernel
    if found["outputs"] != wanted["outputs"]:
        coupled = [one["outputs"] or "no" for one in (found, wanted)]
        return [*said, f"its kernel couples {coupled[0]} outputs and this one {coupled[1]}"]
    return said + _other_kernel(found, wanted, kernel, x)


def _other_kernel(
    found: dict[str, Any], wanted: dict[str, Any], kernel: Kernel, x: Inputs
) -> list[str]:
    pairs = list(zip(found["values"], wanted["values"], strict=False))
    largest = max(abs(value) for value, _ in pairs)
    apart = max(abs(one - other) for one, other in pairs)
    if not apart <= TOLERANCES.get(dtype_of(kernel, x), TOLERANCE) * largest:
        return [
            f"its kernel has other values: at the points {found['probes']} they differ by up to {apart:.3g}, "
            f"where the largest is {largest:.3g}"
        ]
    if found["kernel"] and wanted["kernel"] and found["kernel"] != wanted["kernel"]:
        return [
            "its kernel has other fields or parameters, although it has the same values at the points "
            f"{found['probes']}"
        ]
    return []


def check_no_gradient(kernel: Kernel, x: Inputs) -> None:
    """Raise if values of the kernel follow a tensor that requires a gradient, which a file does not.

    Args:
        kernel: The kernel.
        x: The points.

    Raises:
        InputError: They do.
    """
    with torch.enable_grad():
        found = follows(x) or kernel(rows(x, slice(0, 2))).requires_grad
    if found:
        raise InputError(
            "the kernel or x requires a gradient, which numbers in files do not have. Pass detached tensors: "
            "weight_var=value.detach(), x.detach()."
        )


def _probes(count: int, outputs: int) -> list[int]:
    """Points from the first to the last, evenly spaced."""
    number = min(count, PROBES, max(1, ROWS // outputs))
    return [round(k * (count - 1) / max(1, number - 1)) for k in range(number)]


def _values(kernel: Kernel, x: Inputs, probes: list[int]) -> list[float]:
    with torch.no_grad():
        K = kernel(rows(x, torch.tensor(probes, device=tensors(x)[0].device))).double().reshape(-1)
    found = K[torch.linspace(0, len(K) - 1, min(len(K), VALUES)).round().long().to(K.device)]
    if not all(math.isfinite(value) for value in found.tolist()):
        raise InputError(
            f"the kernel is not finite at some of the points {probes} of x. Divide x by its standard "
            "deviation, or pass x.double()."
        )
    return found.tolist()


def _digest_of_points(x: Inputs) -> str:
    names = list(x) if isinstance(x, Mapping) else [str(k) for k in range(len(tensors(x)))]
    return digest(dict(zip(names, tensors(x), strict=True)), type(x).__name__)


def _digest_of_kernel(kernel: Kernel) -> str | None:
    """The digest of all fields and tensors, or None if a class has no name in files."""
    values: dict[str, Tensor] = {}
    try:
        return digest(values, f"{encode(kernel, values, {})}")
    except InputError:
        return None
