"""The operations of a module in order: `torch.fx` walks it, and a run on zeros finds the shapes."""

from __future__ import annotations

import copy
import inspect
import operator
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn

from net2gp.errors import InputError, NetworkError
from net2gp.inputs import ordinary_tensors

BATCH = 3
"""The size of the batch in the run that finds the shapes; an axis of this size may be the batch."""


HARMLESS = ("extra_repr", "reset_parameters")
"""Methods that a subclass of a layer may override and still compute what the layer computes."""


def keeps_forward(layer: nn.Module, kind: type) -> bool:
    """Whether `layer` computes what layers of class `kind` compute, since it overrides none of their methods.

    >>> class Doubled(nn.Linear):
    ...     def forward(self, x):
    ...         return 2 * super().forward(x)
    >>> keeps_forward(nn.Linear(2, 3), nn.Linear), keeps_forward(Doubled(2, 3), nn.Linear)
    (True, False)
    """
    bases = [base for base in kind.__mro__ if base not in (object, nn.Module)]
    names = {name for base in bases for name in vars(base) if not name.startswith("__")}
    methods = {name for name in names if callable(getattr(kind, name))} - set(HARMLESS)
    return all(
        inspect.getattr_static(type(layer), name) is inspect.getattr_static(kind, name)
        and name not in vars(layer)
        for name in ("forward", "__call__", *methods)
    )


def kind_of(layer: nn.Module, kinds: Iterable[type]) -> type | None:
    """Return the nearest class of the layer among `kinds`, or None."""
    known = set(kinds)
    return next((base for base in type(layer).__mro__ if base in known), None)


class _Value(fx.Proxy):
    """A value of the walk that records augmented assignments, x += y, as changes in place.

    A plain proxy of torch.fx would record x = x + y, and a value that is changed and used again would
    not be noticed.
    """


def _augmented(function: Callable[..., Any]) -> Callable[[_Value, Any], Any]:
    def apply(self: _Value, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return apply


AUGMENTED = (operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ipow)

for _function in AUGMENTED:
    setattr(_Value, f"__{_function.__name__}__", _augmented(_function))


class _Tracer(fx.Tracer):
    """A walk that stops at torch's own modules and at modules with a rule, unless their forward differs."""

    def __init__(self, leaves: tuple[type, ...] = ()) -> None:
        super().__init__()
        self.leaves = leaves
        self.without_gradient: set[str] = set()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, nn.Sequential):
            return False
        kind = kind_of(m, self.leaves)
        if kind is not None:
            return keeps_forward(m, kind)
        return "forward" not in vars(m) and super().is_leaf_module(m, module_qualified_name)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        if not torch.is_grad_enabled():
            self.without_gradient.add(node.name)
        return node


def trace(network: nn.Module, leaves: tuple[type, ...]) -> fx.GraphModule:
    """Return the graph of `network`; raise if Python's control flow depends on the inputs."""
    _check_module(network)
    _check_hooks(network)
    whole = isinstance(network, leaves) or _is_leaf(network, leaves)
    root = nn.Sequential(network) if whole and not isinstance(network, nn.Sequential) else network
    tracer = _Tracer(leaves)
    try:
        defaults = _defaults(root)
        with ordinary_tensors(), torch.enable_grad():
            graph = tracer.trace(root, defaults)
        _without_defaults(graph, set(defaults))
    except Exception as error:
        raise NetworkError(_not_walked(network, error)) from error
    module = fx.GraphModule(tracer.root, graph)
    _with_layers(module, tracer.root)
    _check_in_place(module)
    _check_gradients(module, tracer.without_gradient)
    return module


def _with_layers(module: fx.GraphModule, root: nn.Module) -> None:
    """Put back the layers whose parameters are used directly, since torch.fx keeps only the parameters."""
    for node in module.graph.nodes:
        path, _, _ = str(node.target).rpartition(".")
        if node.op == "get_attr" and path:
            holder, _, name = path.rpartition(".")
            setattr(module.get_submodule(holder), name, root.get_submodule(path))


def _check_module(network: nn.Module) -> None:
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


def _not_walked(network: nn.Module, error: Exception) -> str:
    """Return why torch.fx did not get through, and what to do."""
    reason, kind = str(error), type(network).__name__
    if "co_varnames" in reason or "*args expansion" in reason:
        return (
            f"{kind} cannot be walked by torch.fx: its forward is wrapped by a decorator, or takes *args or "
            "**kwargs, so that its arguments are not known. Wrap it in a module whose forward has plain "
            "arguments, or use monte_carlo_kernel(network), which only calls the module."
        )
    return (
        f"{kind} cannot be walked by torch.fx: {reason} {_place(error)}"
        "Control flow that depends on the inputs has no graph: make it depend on attributes of the "
        "module, or use monte_carlo_kernel(network), which only calls the module."
    )


def _check_hooks(network: nn.Module) -> None:
    """Refuse functions that a walk over the layers would not see."""
    for name, module in network.named_modules():
        hooks = (module._forward_hooks, module._forward_pre_hooks)
        if any((*hooks, module._backward_hooks, module._backward_pre_hooks)):
            raise NetworkError(
                f"'{name}' ({type(module).__name__}) has forward hooks or backward hooks, which the limit "
                "would not see. Remove them, or write what they do into forward."
            )
    for name, value in network.named_parameters():
        if value._backward_hooks:
            raise NetworkError(
                f"the parameter '{name}' has hooks that change its gradient, which the limit would not see. "
                "Remove them."
            )


def _check_gradients(module: fx.GraphModule, names: set[str]) -> None:
    """Refuse what is computed from weights under torch.no_grad(), which changes the tangent kernel."""
    weighty: set[str] = set()
    for node in module.graph.nodes:
        own = False
        if node.op == "call_module":
            own = any(True for _ in module.get_submodule(str(node.target)).parameters())
        elif node.op == "get_attr":
            own = isinstance(attribute_of(module, str(node.target)), nn.Parameter)
        if own or any(one.name in weighty for one in node.all_input_nodes):
            weighty.add(node.name)
            if node.name in names:
                raise NetworkError(
                    f"'{node.name}' is computed from weights under torch.no_grad(), so that they do not "
                    "train there: the tangent kernel of all weights would be another. Leave no_grad out of "
                    "forward."
                )


def parameter_of(layer: nn.Module, name: str) -> Tensor | None:
    """Return a parameter of a layer, or the original parameter behind a parametrization."""
    forms: Any = getattr(layer, "parametrizations", {})
    if name in forms:
        return getattr(forms[name], "original", None)
    return layer._parameters.get(name)


def attribute_of(network: nn.Module, target: str) -> Any:
    """Return the value at a dotted path."""
    value: Any = network
    for part in target.split("."):
        value = getattr(value, part)
    return value


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
    if node.kwargs.get("inplace") or "out" in node.kwargs or node.target in AUGMENTED:
        return True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if node.op == "call_method":
        return name.endswith("_") and not name.endswith("__")
    return node.op == "call_function" and name.endswith("_") and not name.endswith("__")


def _defaults(network: nn.Module) -> dict[str, Any]:
    """Return the arguments of forward that have a default, which they keep."""
    if isinstance(network, nn.Sequential):
        return {}
    parameters = inspect.signature(network.forward).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def _without_defaults(graph: fx.Graph, names: set[str]) -> None:
    """Take out the arguments that keep their default, and torch.fx's checks of them."""
    # from the end, so that the users of a node are gone before the node itself
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
    """Return the line of the user's code where tracing stopped."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if "torch" not in frame.filename and "net2gp" not in frame.filename:
            return f"(in {frame.name}, line {frame.lineno}: {frame.line}). "
    return ""


class _Recorder(fx.Interpreter):
    """An interpreter that keeps what every node of a graph gives."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.found: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self.found[n.name] = result
        return result


def shapes(graph: fx.GraphModule, inputs: tuple[Tensor, ...]) -> dict[str, Any]:
    """Return what each node gives on zeros of these inputs' shapes: tensors, numbers or tuples, by name."""
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
