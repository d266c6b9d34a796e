"""The state of Markov chains as a file, from which a killed run goes on to the same draws."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from net2gp.errors import Net2GPError
from net2gp.inputs import map_inputs, rows
from net2gp.linalg.checkpoint import Checkpoint
from net2gp.linear.linearized import Linearized
from net2gp.types import Inputs

Tensors = dict[str, Tensor]


def write_checkpoint(
    path: str | os.PathLike, tensors: Tensors, meta: dict[str, Any], *, key: str = ""
) -> None:
    """Write tensors and numbers to one safetensors file.

    The file is written beside `path` first and then moved there, so a process that is killed while it writes
    leaves the previous file.

    Args:
        path: The file, in a folder that exists.
        tensors: Tensors by name; the states of random generators are tensors too.
        meta: Values that JSON can hold, by name.
        key: Identifies the problem, as `problem_key` gives it. `read_checkpoint` refuses another key.

    Raises:
        InputError: If the folder does not exist or cannot be written to.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> path = Path(folder.name) / "chain.safetensors"
    >>> write_checkpoint(path, {"position": torch.ones(2)}, {"step": 3})
    >>> read_checkpoint(path)
    ({'position': tensor([1., 1.])}, {'step': 3})
    """
    Checkpoint(Path(path), key).write(tensors, meta)


def read_checkpoint(
    path: str | os.PathLike, *, key: str = "", device: torch.device | str = "cpu"
) -> tuple[Tensors, dict[str, Any]] | None:
    """Read what `write_checkpoint` wrote. Nothing in the file is executed.

    Args:
        path: The file.
        key: The key of the problem.
        device: Where the tensors go. Move the states of generators back to the CPU.

    Returns:
        Tensors and numbers by name, or None if there is no file.

    Raises:
        InputError: If the file belongs to another problem.
        FileFormatError: If the file is no checkpoint or cannot be read.
    """
    return Checkpoint(Path(path), key).load(device)


def problem_key(*parts: Any) -> str:
    """Compute a short text that changes with every part of a problem.

    Args:
        parts: Tensors, containers of tensors, and values whose text says everything about them.

    Returns:
        A digest in hexadecimal digits.

    >>> problem_key(torch.ones(2), "hmc", 3) == problem_key(torch.ones(2), "hmc", 3)
    True
    >>> problem_key(torch.ones(2)) == problem_key(torch.zeros(2))
    False
    """
    digest = hashlib.sha256()
    for part in parts:
        _digest(part, digest)
    return digest.hexdigest()[:32]


def network_key(architecture: Linearized, x: Inputs) -> str:
    """Compute a short text that changes with the function that a network computes.

    Equal parameters can belong to different networks, such as one with tanh and one with ReLU units. So the
    text has the modules, the fixed values, and the outputs at some points. They are computed in float64 and
    rounded, so that another machine finds the same text.

    Args:
        architecture: The network.
        x: Points, of which the first are taken.

    Returns:
        A digest in hexadecimal digits.

    >>> from torch import nn
    >>> from net2gp.linear.linearized import linearize
    >>> layer, x = nn.Linear(1, 1), torch.ones(1, 1)
    >>> one, other = (linearize(nn.Sequential(layer, act)) for act in (nn.Tanh(), nn.Sigmoid()))
    >>> network_key(one, x) == network_key(one, x), network_key(one, x) == network_key(other, x)
    (True, False)
    """
    some, digits = rows(x, slice(0, 8)), 6
    try:
        doubled = map_inputs(some, lambda v: v.double() if v.is_floating_point() else v)
        outputs = architecture.to(dtype=torch.float64)(doubled)
    except (Net2GPError, RuntimeError):  # a network with a dtype of its own
        outputs, digits = architecture(some), 3
    shown = [f"{float(value):.{digits}e}" for value in outputs.detach().flatten()[:64]]
    return problem_key(repr(architecture.network), architecture.frozen, shown)


def _digest(part: Any, digest: Any) -> None:
    if isinstance(part, Tensor):
        digest.update(f"{part.dtype}{tuple(part.shape)}".encode())
        digest.update(
            part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        )
    elif isinstance(part, dict):
        for name, value in part.items():
            digest.update(str(name).encode())
            _digest(value, digest)
    elif isinstance(part, tuple | list):
        for value in part:
            _digest(value, digest)
    elif hasattr(part, "__dataclass_fields__"):
        digest.update(type(part).__qualname__.encode())
        _digest({name: getattr(part, name) for name in part.__dataclass_fields__}, digest)
    else:
        digest.update(repr(part).encode())
    digest.update(b";")
