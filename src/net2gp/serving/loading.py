"""`load`: a program from a file, checked before torch reads it."""

from __future__ import annotations

import io
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

FILES = ("torch.ops.aten.from_file", "torch.ops.aten.save")
"""Operations on tensors that read and write files."""

SIZES = re.compile(
    r"(?:Symbol\('[su]\d+'(?:, (?:positive|nonnegative|integer)=True)*\)|Integer\(-?\d+\)"
    r"|Mul|Add|Pow|Mod|FloorDiv|PythonMod|CleanDiv|Max|Min|[su]\d+|\d+|[\s+\-*/(),])*+"
)
"""What the size of a tensor may be written as: torch evaluates these as Python.

The pattern never goes back, so that the time is proportional to the length.
"""


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
        for name, value in found.items():
            if not isinstance(value, Tensor):
                raise InputError(
                    f"{name} must be a tensor, but is {describe(value)}. Pass torch.as_tensor({name})."
                )
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
    facts, checked = _checked(path)
    try:
        module = torch.export.load(checked).module()
    except Exception as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise FileFormatError(f"torch cannot read {path}: {why}") from error

    def run(x: dict[str, Tensor]) -> dict[str, Tensor]:
        with torch.no_grad():
            found = dict(module(*x.values()))
        return found

    return Program(facts, run)


def _checked(path: Path) -> tuple[dict[str, Any], io.BytesIO]:
    """Return the facts of a `.pt2` file and its parts for torch, or raise if it holds more than operations.

    Readers of archives differ in what they make of odd ones, so torch gets a new one of what was checked.
    """
    try:
        parts = _parts(path)
        facts = json.loads(parts[f"extra/{FACTS}"])
        inside = [
            json.loads(body)
            for inner, body in parts.items()
            if inner.endswith(".json") and not inner.startswith("extra/")
        ]
        wrong = [inner for inner, body in parts.items() if inner.endswith(".pt") and body]
        wrong += [inner for inner in parts if inner.startswith("data/aotinductor")]
        wrong += [what for content in inside for what in _foreign(content)]
    except (KeyError, ValueError, RecursionError, NotImplementedError, zipfile.BadZipFile) as error:
        raise FileFormatError(f"{path} is no program of net2gp, or it is corrupted.") from error
    if wrong:
        raise FileFormatError(
            f"{path} holds more than operations on tensors ({wrong[0]}), and was not loaded. Export the "
            "posterior again."
        )
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as archive:
        for inner, body in parts.items():
            archive.writestr(f"archive/{inner}", body)
    whole.seek(0)
    return _of_kind(facts, path), whole


def _parts(path: Path) -> dict[str, bytes]:
    """The parts of an archive as torch writes it: in one folder, not compressed, in lower case, each once."""
    parts: dict[str, bytes] = {}
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        folder = entries[0].filename.partition("/")[0] if entries else ""
        for entry in entries:
            root, _, inner = entry.filename.partition("/")
            plain = entry.compress_type == zipfile.ZIP_STORED and inner == inner.lower()
            if root != folder or not plain or not inner or inner in parts:
                raise zipfile.BadZipFile(entry.filename)
            parts[inner] = archive.read(entry)
    return parts


def _foreign(content: Any) -> Iterator[str]:
    """What in a part of the file torch would unpickle, evaluate or call."""
    if isinstance(content, list):
        for item in content:
            yield from _foreign(item)
    if not isinstance(content, dict):
        return
    for key, value in content.items():
        if key == "target" and isinstance(value, str) and not _on_tensors(value):
            yield f"the operation {value}"
        elif key == "expr_str" and not SIZES.fullmatch(str(value)):
            yield f"the size {value}"
        elif (key == "use_pickle" and value) or (key == "guards_code" and value):
            yield key
        elif key == "path_name" and re.match(r"(custom|opaque)_obj", str(value)):
            yield str(value)
        else:
            yield from _foreign(value)


def _on_tensors(operation: str) -> bool:
    return operation.startswith(OPERATIONS) and not operation.startswith(FILES)


def _load_onnx(path: Path) -> Program:
    try:
        import onnxruntime
    except ImportError as error:
        raise ImportError("ONNX programs need onnxruntime: pip install onnxruntime.") from error
    try:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Exception as error:
        raise FileFormatError(f"{path} is no program of net2gp, or it is corrupted.") from error
    try:
        facts = json.loads(session.get_modelmeta().custom_metadata_map.get(FACTS, "{}"))
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"{path} is no program of net2gp, or it is corrupted.") from error
    names = [one.name for one in session.get_outputs()]

    def run(x: dict[str, Tensor]) -> dict[str, Tensor]:
        given = {name: value.detach().cpu().numpy() for name, value in x.items()}
        found = session.run(names, given)
        return {name: torch.from_numpy(value) for name, value in zip(names, found, strict=True)}

    return Program(_of_kind(facts, path), run)


def _of_kind(facts: Any, path: Path) -> dict[str, Any]:
    known = isinstance(facts, dict) and facts.get("kind") == "net2gp program"
    if not known or not _are_inputs(facts.get("inputs")):
        raise FileFormatError(f"{path} is no program of net2gp.")
    return facts


def _are_inputs(inputs: Any) -> bool:
    """Whether these are the dtype and the shape of each input by its name."""
    if not isinstance(inputs, dict) or not inputs:
        return False
    pairs = [
        one if isinstance(one, list) and len(one) == 2 else [None, None] for one in inputs.values()
    ]
    return all(
        isinstance(getattr(torch, str(kind), None), torch.dtype)
        and isinstance(shape, list)
        and shape
        for kind, shape in pairs
    )
