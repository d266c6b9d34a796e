"""Programs as files: written whole or not at all, with facts in plain JSON beside the operations."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from net2gp.errors import NotAvailable
from net2gp.serving.constants import precise_constants

FORMATS = ("pt2", "onnx")

FACTS = "net2gp.json"
"""Where a `.pt2` file keeps its facts, and the key of the metadata of an ONNX file."""

OPSET = 18

PREFIX = "answer_"
"""What the names of outputs begin with until those of the values inside of the graph are known."""


@contextlib.contextmanager
def written(path: Path) -> Iterator[Path]:
    """Give a path to write to, and move the file to `path` once it is whole.

    An interrupted write, or one to a full disk, leaves neither a half-written file nor changes an older one.

    Args:
        path: The file.

    Yields:
        A path beside it.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial{path.suffix}")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_pt2(
    program: fx.GraphModule,
    path: Path,
    inputs: tuple[Tensor, ...],
    names: list[str],
    facts: dict[str, Any],
) -> None:
    """Write a program for torch, without example inputs, which torch would pickle.

    Args:
        program: The graph.
        path: The file.
        inputs: Some points, one tensor for each input.
        names: The names of the inputs.
        facts: What the file says about itself.
    """
    with _quiet():
        exported = exported_program(program, inputs)
        exported.example_inputs = None
        whole = io.BytesIO()
        torch.export.save(exported, whole, extra_files={FACTS: json.dumps(facts, indent=1)})
    with written(path) as partial:
        partial.write_bytes(whole.getbuffer())


def exported_program(
    program: fx.GraphModule, inputs: tuple[Tensor, ...]
) -> torch.export.ExportedProgram:
    """Return the program with a number of rows that is open.

    Args:
        program: The graph.
        inputs: Some points, one tensor for each input.
    """
    batch = torch.export.Dim("batch", min=1)
    shapes = tuple({0: batch} for _ in inputs)
    return torch.export.export(program, inputs, dynamic_shapes=shapes)


def write_onnx(
    program: fx.GraphModule,
    path: Path,
    inputs: tuple[Tensor, ...],
    names: list[str],
    facts: dict[str, Any],
) -> None:
    """Write a program for onnxruntime.

    Args:
        program: The graph.
        path: The file.
        inputs: Some points, one tensor for each input.
        names: The names of the inputs.
        facts: What the file says about itself.

    Raises:
        ImportError: If onnx or onnxscript is missing.
        NotAvailable: If an operation has no counterpart in ONNX.
    """
    try:
        import onnx
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "ONNX files need the packages onnx and onnxscript: pip install 'net2gp[onnx]'."
        ) from error
    with _quiet():
        program = precise_constants(program)
        exported = exported_program(program, inputs)
        with torch.no_grad():
            outputs = list(program(*inputs))
        try:
            made = torch.onnx.export(
                exported,
                inputs,
                dynamo=True,
                verbose=False,
                input_names=names,
                output_names=[PREFIX + name for name in outputs],
                opset_version=OPSET,
            )
        except Exception as error:
            raise NotAvailable(
                "an operation of this posterior has no counterpart in ONNX: "
                f"{_last_cause(error)}. Write a .pt2 file."
            ) from error
    assert made is not None
    model = made.model_proto
    _rename(model.graph, {name: f"{name}_inside" for name in outputs})
    _rename(model.graph, {PREFIX + name: name for name in outputs})
    entry = model.metadata_props.add()
    entry.key, entry.value = FACTS, json.dumps(facts)
    _check_runs(model.SerializeToString())
    with written(path) as partial:
        onnx.save(model, str(partial))


def _rename(graph: Any, new: dict[str, str]) -> None:
    """Give values of a graph other names: a value inside may already have the name of an output."""
    for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        value.name = new.get(value.name, value.name)
    for node in graph.node:
        node.input[:] = [new.get(name, name) for name in node.input]
        node.output[:] = [new.get(name, name) for name in node.output]


def _check_runs(body: bytes) -> None:
    """Raise if onnxruntime is there and lacks an operation, such as the arc cosine in float64."""
    try:
        import onnxruntime
    except ImportError:
        return
    try:
        onnxruntime.InferenceSession(body, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise NotAvailable(
            f"onnxruntime cannot run this program: {str(error).splitlines()[0]} Write a .pt2 file."
        ) from error


def _last_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).splitlines()[0] if str(error) else type(error).__name__


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the notes of torch's exporters on packages that are not installed."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
