"""Programs of `torch.export` as modules: their layers are layers again, so that they can be linearized."""

from __future__ import annotations

import contextlib
import logging
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, fx

from net2gp.errors import FileFormatError, NetworkError
from net2gp.interop.exported.builder import Builder
from net2gp.interop.exported.functions import RECURRENT
from net2gp.interop.exported.layers import EXPORT, shape_of

__all__ = ["from_program", "load_program"]


def load_program(path: str | os.PathLike) -> fx.GraphModule:
    """Read a file of `torch.export.save` as a module: see `from_program`.

    Args:
        path: The `.pt2` file.

    Returns:
        The module, in eval mode.

    Raises:
        FileFormatError: If there is no such file, or it is not a program of `torch.export`.
        NetworkError: If the program cannot be a network: see `from_program`.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise FileFormatError(
            f"there is no file {path}. Write one with torch.export.save(program, '{path.name}')."
        )
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch reads weights without their checksums
        if damaged is not None:
            raise zipfile.BadZipFile(f"{damaged} is damaged")
        with _quiet():
            program = torch.export.load(path)
    except Exception as error:  # whatever torch raises for bytes of another kind
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise FileFormatError(
            f"{path} is not a program of torch.export ({reason}). Write one with torch.export.save(program, "
            f"'{path.name}')."
        ) from None
    return from_program(program)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the traceback that torch logs for archives of another kind, besides its error."""
    logger = logging.getLogger("torch.export")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def from_program(program: torch.export.ExportedProgram) -> fx.GraphModule:
    """Make a module of an exported program, with its parameters under their own names.

    A program is a graph of tensor operations. Those that are a layer (linear maps, convolutions, norms and
    embeddings, also after `run_decompositions`) become layers again, which `linearize`, `Kron` and
    `LastLayer` recognize, and other operations become the functions of torch that they came from. The result
    computes what the program computes, and takes any number of points at a time, also if the program was
    exported with a fixed number. Both are checked on a few random points.

    The cost is four passes of a few points.

    Args:
        program: What `torch.export.export` returns for a network in eval mode.

    Returns:
        The module, in eval mode.

    Raises:
        NetworkError: If the program was exported in training mode, returns several tensors, has operations
            that hold graphs of their own, or depends on the number of points that it was exported with.

    >>> from torch import nn
    >>> network = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).eval()
    >>> module = from_program(torch.export.export(network, (torch.ones(2, 2, 2),)))
    >>> module.get_submodule("3"), [name for name, _ in module.named_parameters()]
    (Linear(in_features=3, out_features=1, bias=True), ['1.weight', '1.bias', '3.weight', '3.bias'])

    Reference: Reed et al., torch.fx: practical program capture and transformation for deep learning in
    Python, 2022.
    """
    if program.graph_signature.buffers_to_mutate:
        raise NetworkError(
            f"the program was exported in training mode: it changes its buffers. Export it with {EXPORT}."
        )
    if len(program.graph_signature.user_outputs) != 1:
        raise NetworkError(
            f"the program returns {len(program.graph_signature.user_outputs)} tensors, where one is needed. "
            "Export a module that returns the outputs, such as the logits, alone."
        )
    module = Builder(program).build()
    _check(program, module)
    return module


def _check(program: torch.export.ExportedProgram, module: fx.GraphModule) -> None:
    """Raise unless the module computes what the program does, and each point by itself."""
    x = _examples(program)
    with torch.no_grad():
        if not _takes_any_number(program, module, x):
            raise NetworkError(
                f"the program takes batches of {len(x[0])} only, or mixes their points. Export it for any "
                f"number of points: {EXPORT}."
            )
        if not _close(program.module()(*x), module.forward(*x)):
            raise NetworkError(
                "the operations of the program could not be turned into layers. Use the Python module that "
                "was exported, with load_state_dict(program.state_dict)."
            )


def _takes_any_number(
    program: torch.export.ExportedProgram, module: fx.GraphModule, x: list[Tensor]
) -> bool:
    """Whether one point, and all twice, give rows of what all give."""
    given = [
        node for node in program.graph.nodes if node.name in program.graph_signature.user_inputs
    ]
    called = {str(node.target) for node in program.graph.nodes}
    if all(isinstance(shape_of(node)[0], int) for node in given) and called & set(RECURRENT):
        return False  # torch does not check the numbers of points of inputs and states, which it reads beyond
    try:
        # forward alone, since a call prints what fails
        whole = module.forward(*x)
        double = module.forward(*(torch.cat([one, one]) for one in x))
        single = module.forward(*(one[:1] for one in x))
    except RuntimeError:
        return False
    again, few = torch.cat([whole, whole]), whole[:1]
    alike = double.shape == again.shape and single.shape == few.shape
    return alike and _close(double, again) and _close(single, few)


def _close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()))


def _examples(program: torch.export.ExportedProgram) -> list[Tensor]:
    """Random inputs of the shapes of the program, with as many points as it was exported for."""
    names = set(program.graph_signature.user_inputs)
    found = []
    generator = torch.Generator().manual_seed(0)
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in names:
            like = node.meta["val"]
            shape = [n if isinstance(n, int) else n.node.hint or 2 for n in like.shape]
            if like.is_floating_point():
                found.append(
                    torch.randn(shape, generator=generator, dtype=torch.float32).to(like.dtype)
                )
            else:
                found.append(torch.zeros(shape, dtype=like.dtype))
    return found
