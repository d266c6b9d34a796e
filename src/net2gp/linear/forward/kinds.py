"""Which modules can be linearized: wrappers are taken off, exported and quantized ones refused."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from net2gp.calling import entries
from net2gp.errors import InputError, NetworkError
from net2gp.inputs import describe, num_rows, tensors
from net2gp.linear.precision import HALF, quantized_layers
from net2gp.types import Inputs


def unwrapped(network: Any) -> Any:
    """Return the module inside of `torch.compile`, `DataParallel` and `DistributedDataParallel`.

    The wrappers compute what the module computes, and add a prefix to the names of its parameters.

    >>> layer = nn.Linear(1, 1)
    >>> unwrapped(nn.DataParallel(layer)) is layer
    True
    """
    while True:
        if isinstance(network, nn.DataParallel | nn.parallel.DistributedDataParallel):
            network = network.module
        elif isinstance(network, nn.Module) and "_orig_mod" in network._modules:
            network = network._orig_mod
        else:
            return network


def check_kind(network: Any) -> nn.Module:
    """Return the module without wrappers; raise if its parameters cannot be replaced and differentiated."""
    network = unwrapped(network)
    if isinstance(network, torch.export.ExportedProgram):
        raise NetworkError(
            "the network is a program of torch.export, whose graph is fixed. Pass the Python module that "
            "was exported, with load_state_dict(program.state_dict), or what "
            "net2gp.interop.exported.from_program(program) makes of it."
        )
    if not isinstance(network, nn.Module):
        raise NetworkError(f"network must be a torch.nn.Module, but is {describe(network)}.")
    if isinstance(network, torch.jit.ScriptModule):
        raise NetworkError(
            "the network is compiled by torch.jit, which does not let its parameters be replaced. "
            "Pass the Python module that it was made from."
        )
    if any(type(module).__module__.startswith("torch.export.") for module in network.modules()):
        raise NetworkError(
            "the network was exported by torch.export, which keeps one mode and the shapes of its example. "
            "Pass the Python module that was exported, in eval mode, or what "
            "net2gp.interop.exported.from_program(program) makes of the program."
        )
    _check_quantized(network)
    return network


def _check_quantized(network: nn.Module) -> None:
    quantized = [name for name, _ in quantized_layers(network)]
    if quantized and not any(value.is_floating_point() for value in network.parameters()):
        more = f", … ({len(quantized)} in all)" if len(quantized) > 4 else ""
        raise NetworkError(
            f"the network is quantized ({', '.join(quantized[:4])}{more}): weights in integers have no "
            "derivative. Pass the network as it was before quantization, in float32 or float64."
        )


def check_output(output: Any) -> None:
    """Raise unless `output` is a function that picks the tensor of outputs, or None."""
    if output is not None and (isinstance(output, type) or not callable(output)):
        raise InputError(
            f"output must be a function of what the network returns, but is {describe(output)}. Pass for "
            "example output=lambda out: out.logits."
        )


def check_result(out: Any, x: Inputs, rounding: torch.dtype) -> None:
    """Raise unless what a network returned is one real tensor whose rows are the points `x`.

    Args:
        out: The output, as far as it could be picked.
        x: The inputs.
        rounding: The dtype that bounds the digits of the network.
    """
    if not isinstance(out, Tensor):
        raise NetworkError(
            f"the network returns {describe(out)}, where one tensor is needed. Pick it with {_pick(out)}."
        )
    if out.dim() == 0 or out.shape[0] != num_rows(x):
        one = " For one point pass x[None]." if tensors(x)[0].dim() == 1 else ""
        raise NetworkError(
            f"the network maps {num_rows(x)} points to {describe(out)}, but the first axis of the "
            f"output must count points.{one} Pick or reshape the output with linearize(..., output=...)."
        )
    if (out.dtype in HALF and rounding not in HALF) or out.is_complex():
        raise NetworkError(
            f"the network returns {out.dtype}, but derivatives need float32 or float64 numbers. Leave "
            "out its casts, or pick a real output in full precision with linearize(..., output=...)."
        )


def _pick(out: Any) -> str:
    """Return what to type to pick one of the tensors that a network returns."""
    found = [name for name, value in entries(out).items() if isinstance(value, Tensor)]
    fields = [
        name if name.startswith("[") else f".{name}" if hasattr(out, name) else f'["{name}"]'
        for name in found
    ] or [".logits"]
    others = f", or another of {', '.join(f'out{own}' for own in fields[1:])}" if fields[1:] else ""
    return f"linearize(network, output=lambda out: out{fields[0]}){others}"
