"""The operations of a module, in order: `torch.fx` walks it, a run on the meta device gives the shapes."""

from __future__ import annotations

import copy
import traceback
from typing import Any

import torch
from torch import Tensor, fx, nn

from net2gp.errors import InputError, NetworkError

BATCH = 3
"""Size of the batch in the run that finds the shapes."""


class _Tracer(fx.Tracer):
    """Stops at torch's own modules and at those that have a rule."""

    def __init__(self, leaves: tuple[type, ...]) -> None:
        super().__init__()
        self.leaves = leaves

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, nn.Sequential):
            return False
        return isinstance(m, self.leaves) or super().is_leaf_module(m, module_qualified_name)


def trace(network: nn.Module, leaves: tuple[type, ...]) -> fx.GraphModule:
    """The graph of `network`; raises if Python's control flow depends on the inputs."""
    if not isinstance(network, nn.Module):
        raise NetworkError(
            f"an infinite-width limit needs an nn.Module, but got {type(network).__name__}."
        )
    root = nn.Sequential(network) if _is_leaf(network, leaves) else network
    tracer = _Tracer(leaves)
    try:
        graph = tracer.trace(root)
    except Exception as error:
        where = _place(error)
        raise NetworkError(
            f"{type(network).__name__} cannot be walked by torch.fx: {error} {where}"
            "Control flow that depends on the inputs has no graph: make it depend on attributes of the "
            "module, or use monte_carlo_kernel(network), which only calls the module."
        ) from error
    return fx.GraphModule(tracer.root, graph)


def _is_leaf(network: nn.Module, leaves: tuple[type, ...]) -> bool:
    return _Tracer(leaves).is_leaf_module(network, "")


def _place(error: Exception) -> str:
    """The line of the user's code where tracing stopped."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if "torch" not in frame.filename and "net2gp" not in frame.filename:
            return f"(in {frame.name}, line {frame.lineno}: {frame.line}). "
    return ""


class _Recorder(fx.Interpreter):
    """Runs a graph and keeps what every node gave."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.found: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self.found[n.name] = result
        return result


def shapes(graph: fx.GraphModule, inputs: tuple[Tensor, ...]) -> dict[str, Any]:
    """What each node gives on meta tensors of these inputs' shapes: tensors, numbers or tuples."""
    example = tuple(torch.empty(BATCH, *x.shape[1:], dtype=x.dtype, device="meta") for x in inputs)
    module = copy.deepcopy(graph).to("meta")
    dtype = next((x.dtype for x in inputs if x.is_floating_point()), None)
    if dtype is not None:
        module = module.to(dtype)
    recorder = _Recorder(module)
    try:
        with torch.no_grad():
            recorder.run(*example)
    except Exception as error:
        sizes = ", ".join(str(tuple(x.shape)) for x in inputs)
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"the network cannot take inputs of shape {sizes}: {reason}. "
            f"Check that network(x) runs on such an x."
        ) from error
    return recorder.found
