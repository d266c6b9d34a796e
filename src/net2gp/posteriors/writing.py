"""Writing a value to one safetensors file with a JSON description in its header, never pickle."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from net2gp._version import __version__
from net2gp.errors import InputError
from net2gp.inputs import rows
from net2gp.kernels.base import BaseKernel
from net2gp.limits.limit_kernels import InfiniteWidth, LimitKernel
from net2gp.linear.forward.evaluation import evaluating
from net2gp.linear.forward.places import AtPlaces
from net2gp.linear.jacobians.tangent import TangentKernel
from net2gp.linear.linearized import Linearized
from net2gp.linear.planning.plans import Plans
from net2gp.tags import tag_of
from net2gp.types import Inputs, Kernel

FORMAT = 2
KIND = "net2gp posterior"
VALUE = "network value"

NAMES: dict[type, str] = {}
"""The tags of the classes that files may hold; `net2gp.posteriors.saving.save` fills it."""


def write(
    value: Any, network_value: Tensor | None, path: str | os.PathLike, note: str = ""
) -> None:
    """Write a value, and the output of its network at the first points, to a file.

    The file is written beside `path` first and then moved there, so that an interrupted write leaves an
    older file intact. A note is text about the value, which `note_of` reads without the value.
    """
    path = Path(path).expanduser()
    if not path.parent.is_dir():
        raise InputError(
            f"there is no folder {path.parent} to save in. Create it, or pass another path."
        )
    if path.is_dir():
        raise InputError(
            f"{path} is a folder. Pass a file in it: {path / 'posterior.safetensors'}."
        )
    tensors: dict[str, Tensor] = {}
    tree = encode(value, tensors, {})
    if network_value is not None:
        tensors[VALUE] = network_value.cpu().clone()
    body = json.dumps(tree)
    header = {
        "kind": KIND,
        "format": str(FORMAT),
        "version": __version__,
        "tree": body,
        "sha256": digest(tensors, __version__ + body + note),
    } | ({"note": note} if note else {})
    partial = path.with_name(path.name + ".partial")
    try:
        partial.touch()
        mode = partial.stat().st_mode  # of any new file here; safetensors would hide it from others
        save_file(tensors, partial, metadata=header)
        partial.chmod(mode)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def check_value(posterior: Any) -> Tensor | None:
    """A few outputs of the network behind a posterior, by which `load` knows the right architecture."""
    own = getattr(posterior.process, "network_value", None)
    if own is None:
        return network_value(posterior.kernel, posterior.x)
    return None if posterior.x is None else own(posterior.x)


def network_value(kernel: Kernel, x: Inputs | None) -> Tensor | None:
    """The output of the network behind a kernel at the first training point, or its limit at the first two.

    The network runs in eval mode, as it was linearized; training it further does not change the posterior. A
    sum or product may hold several kernels, but of one network, since `load` takes one.
    """
    found = list(_of_networks(kernel))
    if not found or x is None:
        return None
    modules = {id(k.linearized.network) for k in found if isinstance(k, TangentKernel)}
    limits = {k.limit.graph.code for k in found if isinstance(k, LimitKernel)}
    if len(modules) > 1 or len(limits) > 1:
        raise InputError(
            "the kernel is made of the kernels of two networks or more, but load takes one network, so that "
            "such a posterior cannot be saved. Condition again after load, or put the networks into one."
        )
    values = [_value(one, x) for one in found]
    return values[0] if len(values) == 1 else torch.cat([value.reshape(-1) for value in values])


def limits_of(kernel: Kernel) -> list[LimitKernel]:
    """The limits of networks inside of a kernel."""
    return [one for one in _of_networks(kernel) if isinstance(one, LimitKernel)]


def _of_networks(kernel: Any) -> Iterator[LimitKernel | TangentKernel]:
    """The kernels inside of a kernel that belong to a network."""
    if isinstance(kernel, LimitKernel | TangentKernel):
        yield kernel
    elif is_dataclass(kernel):
        for value in vars(kernel).values():
            for part in value if isinstance(value, tuple) else (value,):
                if isinstance(part, Kernel):
                    yield from _of_networks(part)


def _value(kernel: LimitKernel | TangentKernel, x: Inputs) -> Tensor:
    if isinstance(kernel, LimitKernel):
        return kernel(rows(x, slice(0, 2))).detach()
    with evaluating(kernel.linearized.network):
        return kernel.linearized(rows(x, slice(0, 1)))


def encode(value: Any, tensors: dict[str, Tensor], seen: dict[int, str]) -> Any:
    """A value as JSON; its tensors go to `tensors` by name, each of them once (`seen` holds their ids)."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        # LAPACK lays factors out by columns. The layout is kept in the file, since the rounding of products
        # depends on it, and loaded predictions are to be identical.
        by_columns = value.dim() > 1 and not value.is_contiguous() and value.mT.is_contiguous()
        if id(value) not in seen:
            seen[id(value)] = f"t{len(tensors)}"
            laid_out = (value.mT if by_columns else value).detach().cpu()
            tensors[seen[id(value)]] = laid_out.clone(memory_format=torch.contiguous_format)
        return {"columns" if by_columns else "tensor": seen[id(value)]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, tuple):
        return {"tuple": [encode(item, tensors, seen) for item in value]}
    if isinstance(value, dict):
        return {"dict": {key: encode(item, tensors, seen) for key, item in value.items()}}
    if isinstance(value, BaseKernel):
        value = value.portable()
    tag = NAMES.get(type(value)) or tag_of(type(value))
    if tag is not None and is_dataclass(value):
        names = [f.name for f in fields(value) if not isinstance(getattr(value, f.name), Plans)]
        parts = {name: _field(value, name, tensors, seen) for name in names}
        return {"class": tag, "fields": parts}
    raise InputError(
        f"a {type(value).__name__} cannot be saved without running code at load. Saved are posteriors whose "
        "kernel, mean, likelihood and structure are net2gp's own, or registered with "
        "@net2gp.likelihoods.savable; use mean=linearized or None."
    )


def _field(owner: Any, name: str, tensors: dict[str, Tensor], seen: dict[int, str]) -> Any:
    value = getattr(owner, name)
    if isinstance(owner, Linearized) and name == "output":
        if isinstance(value, AtPlaces):
            return {"output": value.output is not None, "places": [value.axis, value.channels]}
        return {"output": value is not None}
    if isinstance(owner, Linearized) and name == "network":
        return {"network": type(value).__name__}
    if isinstance(owner, InfiniteWidth) and name == "graph":
        return {"graph": value.__class__.__name__}
    if isinstance(owner, InfiniteWidth) and name == "plans":
        return {"dict": {}}
    return encode(value, tensors, seen)


def digest(tensors: dict[str, Tensor], text: str) -> str:
    """SHA-256 over the tensors' names, types, shapes and bytes, and over the text of the header."""
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data if value.numel() else b"")
    return digest.hexdigest()
