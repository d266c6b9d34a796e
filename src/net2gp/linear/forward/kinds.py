"""Which modules can be linearized; wrapped, compiled, exported and quantized ones are refused by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from net2gp.errors import InputError, NetworkError
from net2gp.inputs import describe


def check_kind(network: Any) -> None:
    """Raise unless `network` is a module whose parameters can be replaced and differentiated."""
    if isinstance(network, torch.export.ExportedProgram):
        raise NetworkError(
            "the network is a program of torch.export, whose graph is fixed. Pass the Python module that "
            "was exported, with load_state_dict(program.state_dict)."
        )
    if not isinstance(network, nn.Module):
        raise NetworkError(f"network must be a torch.nn.Module, but is {describe(network)}.")
    if isinstance(network, nn.DataParallel | nn.parallel.DistributedDataParallel):
        kind = type(network).__name__
        raise NetworkError(
            f"the network is wrapped in {kind}. Pass what is inside: network.module."
        )
    if isinstance(network, torch.jit.ScriptModule):
        raise NetworkError(
            "the network is compiled by torch.jit, which does not let its parameters be replaced. "
            "Pass the Python module that it was made from."
        )
    if any(type(module).__module__.startswith("torch.export.") for module in network.modules()):
        raise NetworkError(
            "the network was exported by torch.export, which keeps one mode and the shapes of its example. "
            "Pass the Python module that was exported, in eval mode."
        )
    _check_quantized(network)


def _check_quantized(network: nn.Module) -> None:
    quantized = [
        name or type(network).__name__
        for name, module in network.named_modules()
        if ".quantized" in type(module).__module__ and "_packed_params" not in name
    ]
    if quantized:
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
