"""The operations of a module, in order: `torch.fx` walks it, a run on zeros gives the shapes."""

from __future__ import annotations

import copy
import inspect
import traceback
from typing import Any

import torch
from torch import Tensor, fx, nn

from net2gp.errors import InputError, NetworkError

BATCH = 3
"""Size of the batch in the run that finds the shapes."""


class _Tracer(fx.Tracer):
    """Stops at torch's own modules and at those that have a rule."""

    def __init__(self, leaves: tuple[type, ...] = ()) -> None:
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
            f"an infinite-width limit needs an nn.Module, but got {type(network).__name__}. Wrap a "
            "function of layers in a module: the layers as attributes, the function as forward."
        )
    for attribute in ("module", "_orig_mod"):
        if type(network).__module__.startswith("torch.") and hasattr(network, attribute):
            raise NetworkError(
                f"{type(network).__name__} wraps a network: pass network.{attribute} instead."
            )
    if isinstance(network, torch.jit.ScriptModule):
        raise NetworkError("a scripted module has no code to walk: pass the original module.")
    _check_hooks(network)
    root = nn.Sequential(network) if _is_leaf(network, leaves) else network
    tracer = _Tracer(leaves)
    try:
        defaults = _defaults(root)
        graph = tracer.trace(root, defaults)
        _without_defaults(graph, set(defaults))
    except Exception as error:
        where = _place(error)
        raise NetworkError(
            f"{type(network).__name__} cannot be walked by torch.fx: {error} {where}"
            "Control flow that depends on the inputs has no graph: make it depend on attributes of the "
            "module, or use monte_carlo_kernel(network), which only calls the module."
        ) from error
    module = fx.GraphModule(tracer.root, graph)
    _check_in_place(module)
    return module


def _check_hooks(network: nn.Module) -> None:
    """Refuse functions that a walk over the layers would not see."""
    for name, module in network.named_modules():
        if module._forward_hooks or module._forward_pre_hooks:
            raise NetworkError(
                f"'{name}' ({type(module).__name__}) has forward hooks, which the limit would not see. "
                "Remove them, or write what they do into forward."
            )


def _check_in_place(module: fx.GraphModule) -> None:
    """Refuse a value that is used again after it was changed in place."""
    order = {node: number for number, node in enumerate(module.graph.nodes)}
    for node in module.graph.nodes:
        if not node.all_input_nodes or not _in_place(module, node):
            continue
        changed = node.all_input_nodes[0]
        later = [user for user in changed.users if order[user] > order[node]]
        if later or not node.users:
            raise NetworkError(
                f"'{changed.name}' is changed in place by '{node.name}' and used again. Write the operation "
                "out of place: inplace=False, x = x + y, torch.relu(x)."
            )


def _in_place(module: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_module":
        return bool(getattr(module.get_submodule(str(node.target)), "inplace", False))
    if node.kwargs.get("inplace"):
        return True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if node.op == "call_method":
        return name.endswith("_") and not name.endswith("__")
    return node.op == "call_function" and name.endswith("_") and not name.endswith("__")


def _defaults(network: nn.Module) -> dict[str, Any]:
    """The arguments of forward that have a default: they keep it."""
    if isinstance(network, nn.Sequential):
        return {}
    parameters = inspect.signature(network.forward).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def _without_defaults(graph: fx.Graph, names: set[str]) -> None:
    """Take out the arguments that keep their default, and torch.fx's checks of them."""
    for node in reversed(list(graph.nodes)):
        checks = node.op == "call_function" and "_assert" in getattr(node.target, "__name__", "")
        unused = not node.users and node.op == "call_function"
        given = node.op == "placeholder" and any(
            str(node.target) == name or str(node.target).startswith(f"{name}_") for name in names
        )
        if checks or (names and unused) or (given and not node.users):
            graph.erase_node(node)


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
    """What each node gives on zeros of these inputs' shapes: tensors, numbers or tuples."""
    example = tuple(x.new_zeros(BATCH, *x.shape[1:]) for x in inputs)
    # a copy, since a run may change buffers; zeros cost less than torch's first use of the meta device
    module = copy.deepcopy(graph).to(inputs[0].device).eval()
    dtype = next((x.dtype for x in inputs if x.is_floating_point()), None)
    if dtype is not None:
        module = module.to(dtype)
    recorder = _Recorder(module)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            recorder.run(*example)
    except Exception as error:
        sizes = ", ".join(str(tuple(x.shape)) for x in inputs)
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"the network cannot take inputs of shape {sizes}: {reason}. "
            f"Check that network(x) runs on such an x."
        ) from error
    return recorder.found
