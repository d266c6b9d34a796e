"""`load`: a program from a file, checked before torch reads it."""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from net2gp.errors import FileFormatError, InputError
from net2gp.inputs import describe, tensors
from net2gp.serving.files import FACTS
from net2gp.types import Inputs

OPERATIONS = ("torch.ops.aten.", "torch.ops.prims.", "_operator.", "math.", "torch.sym_")
"""What the operations of a program may be: operations on tensors, and arithmetic on their sizes."""

SIZES = re.compile(
    r"(?:Symbol\('[su]\d+'(?:, (?:positive|nonnegative|integer)=True)*\)|Integer\(-?\d+\)"
    r"|Mul|Add|Pow|Mod|FloorDiv|PythonMod|CleanDiv|Max|Min|[su]\d+|\d+|[\s+\-*/(),])*"
)
"""What the size of a tensor may be written as: torch evaluates these as Python."""


@dataclass(frozen=True, eq=False)
class Program:
    """A posterior that was exported, as a function from points to named tensors.

    Args:
        facts: What the file says about itself.
        run: The function of the runtime.
    """

    facts: dict[str, Any]
    run: Callable[[dict[str, Tensor]], dict[str, Tensor]] = field(repr=False)

    def __call__(self, x: Inputs) -> dict[str, Tensor]:
        """Compute all answers.

        Args:
            x: N points, of the shape and dtype that `facts["inputs"]` says.

        Returns:
            The answers by name, with a row for each point.

        Raises:
            InputError: If points have another shape or dtype.
        """
        return self.run(self.named(x))

    def named(self, x: Inputs) -> dict[str, Tensor]:
        """Check points, and give their tensors the names of the program's inputs.

        Args:
            x: N points.

        Raises:
            InputError: If names, shapes or dtypes are others, or there is no point.
        """
        expected = self.facts["inputs"]
        found = dict(x) if isinstance(x, Mapping) else dict(zip(expected, tensors(x), strict=False))
        if set(found) != set(expected) or (isinstance(x, tuple) and len(x) != len(expected)):
            raise InputError(f"x must have the inputs {', '.join(expected)}, but is {describe(x)}.")
        counts = {len(value) if value.dim() else 0 for value in found.values()}
        for name, (kind, shape) in expected.items():
            value, dtype = found[name], getattr(torch, kind)
            if list(value.shape[1:]) != shape[1:] or value.dim() != len(shape):
                sizes = ", ".join(map(str, shape))
                raise InputError(
                    f"{name} must have the shape ({sizes}), but has {tuple(value.shape)}."
                )
            if value.dtype != dtype:
                raise InputError(
                    f"{name} must be {kind}, but is {value.dtype}. Pass x.to({dtype})."
                )
        if len(counts) != 1 or 0 in counts:
            raise InputError(f"x must hold one point or more, but is {describe(x)}.")
        return {name: found[name] for name in expected}


def load(path: str | os.PathLike) -> Program:
    """Read a program that `export` wrote. Nothing in the file is unpickled or run as Python.

    A `.pt2` file is searched first: whatever torch would unpickle, evaluate or call beside operations on
    tensors is refused. Without net2gp, `torch.export.load(path).module()` and
    `onnxruntime.InferenceSession(path)` read the same files, which is safe for files that you trust.

    Args:
        path: A `.pt2` or `.onnx` file.

    Returns:
        The program.

    Raises:
        FileFormatError: If there is no such file, or it is no program of net2gp.
        ImportError: If an ONNX file is read without onnxruntime.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise FileFormatError(f"there is no file {path}. Write one with net2gp.serving.export.")
    return _load_pt2(path) if zipfile.is_zipfile(path) else _load_onnx(path)


def _load_pt2(path: Path) -> Program:
    facts = _checked(path)
    try:
        module = torch.export.load(str(path)).module()
    except Exception as error:
        raise FileFormatError(f"torch cannot read {path}: {str(error).splitlines()[0]}") from error

    def run(x: dict[str, Tensor]) -> dict[str, Tensor]:
        with torch.no_grad():
            found = dict(module(*x.values()))
        return found

    return Program(facts, run)


def _checked(path: Path) -> dict[str, Any]:
    """Return the facts of a `.pt2` file, or raise if it holds more than operations on tensors."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = {name.partition("/")[2]: name for name in archive.namelist()}
            facts = json.loads(archive.read(names[f"extra/{FACTS}"]))
            inside = {
                inner: json.loads(archive.read(name))
                for inner, name in names.items()
                if inner.endswith(".json") and not inner.startswith("extra/")
            }
            pickled = [
                inner
                for inner, name in names.items()
                if inner.startswith("data/sample_inputs") and archive.getinfo(name).file_size
            ]
    except (KeyError, ValueError, zipfile.BadZipFile) as error:
        raise FileFormatError(f"{path} is no program of net2gp, or it is corrupted.") from error
    pickled += [inner for inner in names if re.match(r"data/(weights|constants)/.*\.pt$", inner)]
    pickled += [inner for inner in names if inner.startswith("data/aotinductor")]
    wrong = pickled or [what for content in inside.values() for what in _foreign(content)]
    if wrong:
        raise FileFormatError(
            f"{path} holds more than operations on tensors ({wrong[0]}), and was not loaded. Export the "
            "posterior again."
        )
    return _of_kind(facts, path)


def _foreign(content: Any) -> Iterator[str]:
    """What in a part of the file torch would unpickle, evaluate or call."""
    if isinstance(content, list):
        for item in content:
            yield from _foreign(item)
    if not isinstance(content, dict):
        return
    for key, value in content.items():
        if key == "target" and isinstance(value, str) and not value.startswith(OPERATIONS):
            yield f"the operation {value}"
        elif key == "expr_str" and not SIZES.fullmatch(str(value)):
            yield f"the size {value}"
        elif (key == "use_pickle" and value) or (key == "guards_code" and value):
            yield key
        elif key == "path_name" and re.match(r"(custom|opaque)_obj", str(value)):
            yield str(value)
        else:
            yield from _foreign(value)


def _load_onnx(path: Path) -> Program:
    try:
        import onnxruntime
    except ImportError as error:
        raise ImportError("ONNX programs need onnxruntime: pip install onnxruntime.") from error
    try:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Exception as error:
        raise FileFormatError(f"{path} is no program of net2gp, or it is corrupted.") from error
    body = session.get_modelmeta().custom_metadata_map.get(FACTS, "{}")
    names = [one.name for one in session.get_outputs()]

    def run(x: dict[str, Tensor]) -> dict[str, Tensor]:
        given = {name: value.detach().cpu().numpy() for name, value in x.items()}
        found = session.run(names, given)
        return {name: torch.from_numpy(value) for name, value in zip(names, found, strict=True)}

    return Program(_of_kind(json.loads(body), path), run)


def _of_kind(facts: Any, path: Path) -> dict[str, Any]:
    if not isinstance(facts, dict) or facts.get("kind") != "net2gp program":
        raise FileFormatError(f"{path} is no program of net2gp.")
    return facts
