"""Which numbers of channels in a network are hidden and may grow, and a copy in which they have grown."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from net2gp.errors import InputError, NetworkError
from net2gp.limits.graph.function_registry import name_of
from net2gp.limits.graph.trace import attribute_of
from net2gp.limits.initialization import CONVOLUTIONS, LOCAL, TRANSPOSED
from net2gp.limits.plan import graph_of
from net2gp.limits.rules.functional_layers import NORMS

DATA, FIXED, OUTPUT = " data", " fixed", " output"
"""Sources whose number of channels cannot change. The blank keeps them apart from names of layers."""

RECURRENT = (nn.RNNBase, nn.RNNCellBase)
LAYERS = (nn.Linear, *CONVOLUTIONS, *TRANSPOSED, *LOCAL, nn.Embedding, *RECURRENT)
ADDITIONS = ("add", "iadd", "sub", "isub", "rsub")
PRODUCTS = ("mul", "imul", "multiply", "div", "truediv", "itruediv")
CONCATENATIONS = ("cat", "concat", "concatenate")
SHAPES = (
    "expand",
    "repeat",
    "unsqueeze",
    "squeeze",
    "view",
    "reshape",
    "to",
    "transpose",
    "permute",
)
NUMBERS = ("size", "dim", "len", "getattr")

Sources = frozenset[str]


@dataclass(eq=False)
class Channels:
    """Where the channels of every tensor come from, and which sources must have the same number of them.

    A source is a layer with weights, a parameter used as a signal, the data, or a fixed tensor. Sources
    with the same number of channels form trees, as in union-find.

    Args:
        graph: The network's graph.
        parents: The parent of each source in its tree; roots have none.
        inputs: The sources that each layer with weights sees, per call.
        norms: The sources that each norm layer sees.
        signals: The names of parameters that are used as signals.
        scaled: The nodes that multiply logits of attention by a number.
    """

    graph: fx.GraphModule
    parents: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, list[Sources]] = field(default_factory=dict)
    norms: dict[str, Sources] = field(default_factory=dict)
    signals: set[str] = field(default_factory=set)
    scaled: list[str] = field(default_factory=list)

    def root(self, source: str) -> str:
        """Return the representative of all sources that have as many channels as this one."""
        while source in self.parents:
            source = self.parents[source]
        return source

    def tie(self, sources: Iterable[str]) -> None:
        """Record that all these sources have the same number of channels."""
        roots = sorted({self.root(source) for source in sources})
        for other in roots[1:]:
            self.parents[other] = roots[0]  # a blank sorts first, so that fixed sources stay roots

    def fixed(self, source: str) -> bool:
        """Whether the number of channels cannot change."""
        return self.root(source) in (DATA, FIXED, OUTPUT)

    def widths(self) -> dict[str, int]:
        """Return the number of channels of each hidden layer."""
        return {
            name: width_of(self.graph.get_submodule(name))
            for name in self.inputs
            if not self.fixed(name)
        }


def channels_of(network: nn.Module) -> Channels:
    """Walk the graph of `network` and find where all channels come from."""
    found = Channels(graph_of(network))
    values: dict[str, Sources] = {}
    for node in found.graph.graph.nodes:
        given = [values[one.name] for one in node.all_input_nodes]
        if node.op == "placeholder":
            values[node.name] = frozenset((DATA,))
        elif node.op == "get_attr":
            values[node.name] = _attribute_sources(found, str(node.target))
        elif node.op == "call_module":
            values[node.name] = _module_sources(found, node, given)
        elif node.op == "output":
            found.tie((OUTPUT, *(s for one in given for s in one)))
        else:
            values[node.name] = _function_sources(found, node, values)
    return found


def signal_parameters(network: nn.Module) -> set[str]:
    """Return the names of parameters that are only added to signals or concatenated with them.

    A network without a graph has none.
    """
    try:
        graph = graph_of(network)
    except NetworkError:
        return set()
    found = set()
    for node in graph.graph.nodes:
        if node.op == "get_attr" and isinstance(attribute_of(graph, node.target), nn.Parameter):
            ends, stack = [], list(node.users)
            while stack:
                user = stack.pop()
                if name_of(user.target) in SHAPES:
                    stack.extend(user.users)
                else:
                    ends.append(name_of(user.target))
            if ends and all(name in (*ADDITIONS, *CONCATENATIONS) for name in ends):
                found.add(str(node.target))
    return found


def _attribute_sources(found: Channels, target: str) -> Sources:
    value = attribute_of(found.graph, target)
    if isinstance(value, nn.Parameter):
        found.signals.add(target)
        return frozenset((target,))
    return frozenset((FIXED,)) if isinstance(value, Tensor) and value.numel() > 1 else frozenset()


def _module_sources(found: Channels, node: fx.Node, given: list[Sources]) -> Sources:
    target = str(node.target)
    layer = found.graph.get_submodule(target)
    joined: Sources = frozenset().union(*given)
    if isinstance(layer, LAYERS):
        found.inputs.setdefault(target, []).append(given[0] if given else frozenset())
        if len(given) > 1:
            found.tie((target, *given[1]))
        if is_depthwise(layer) and joined != {DATA}:
            found.tie((target, *joined))
        return frozenset((target,))
    if isinstance(layer, NORMS):
        found.norms[target] = joined
    elif any(True for _ in layer.parameters()):
        raise NetworkError(
            f"a twin cannot have another width of {type(layer).__name__} ('{target}'). Known layers: "
            f"{', '.join(kind.__name__ for kind in (*LAYERS, *NORMS))}."
        )
    return joined


def _function_sources(found: Channels, node: fx.Node, values: dict[str, Sources]) -> Sources:
    name = name_of(node.target)
    given = [values[one.name] for one in node.all_input_nodes]
    joined: Sources = frozenset().union(*given)
    hidden = joined - {DATA}
    if name in NUMBERS:
        return frozenset()
    if name in ADDITIONS:
        found.tie(joined)
    elif name in PRODUCTS:
        _note_number(found, node, given)
        found.tie(hidden)
        return hidden or joined
    elif name in ("matmul", "bmm", "scaled_dot_product_attention"):
        return _contracted(found, node, values)
    elif name in CONCATENATIONS:
        if joined & found.signals:
            found.tie(joined)  # a class token: concatenated along positions
        return joined
    else:
        return hidden or joined
    return joined


def _contracted(found: Channels, node: fx.Node, values: dict[str, Sources]) -> Sources:
    """Return the sources of a matrix product, which are none for logits and the values' for the rest."""
    names = ("query", "key", "value")
    given: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    if "value" in given:
        found.tie(values[given["query"].name] | values[given["key"].name])
        if isinstance(node.kwargs.get("scale"), float | int):
            found.scaled.append(node.name)
        return values[given["value"].name]
    parts = [arg for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, fx.Node)]
    first, second = values[parts[0].name], values[parts[1].name]
    if not first - {DATA} or not second - {DATA}:
        return second - {DATA} or first or second
    found.tie(first | second)
    return frozenset()


def _note_number(found: Channels, node: fx.Node, given: list[Sources]) -> None:
    """Remember where logits of attention are multiplied by a number, which may depend on the width."""
    number = any(isinstance(arg, float | int) for arg in node.args)
    if number and len(given) == 1 and not given[0] and _is_logits(node):
        found.scaled.append(node.name)


def _is_logits(node: fx.Node) -> bool:
    stack = list(node.all_input_nodes)
    while stack:
        one = stack.pop()
        name = name_of(one.target)
        if one.op != "call_module" and name in ("matmul", "bmm"):
            return True
        if name not in NUMBERS and one.op != "call_module":
            stack.extend(one.all_input_nodes)
    return False


def is_depthwise(layer: nn.Module) -> bool:
    """Whether every group is a single channel."""
    return isinstance(layer, CONVOLUTIONS) and 1 < layer.groups == layer.in_channels


def width_of(layer: Any) -> int:
    """Return the number of channels of a layer's output."""
    for name in ("out_features", "out_channels", "embedding_dim", "hidden_size"):
        if hasattr(layer, name):
            return int(getattr(layer, name))
    raise AssertionError(type(layer).__name__)


def widened(network: nn.Module, width: int) -> nn.Module:
    """Return a copy in which all hidden numbers of channels are multiplied by one integer.

    It is the least integer that makes each of them at least `width`. Parameters that had to grow are NaN; the
    others keep their values.
    """
    if not isinstance(width, int) or width < 1:
        raise InputError(f"width must be a positive integer, but {width!r} was given.")
    found = channels_of(network)
    _check(found)
    widths = found.widths()
    factor = max((math.ceil(width / own) for own in widths.values()), default=1)
    result = copy.deepcopy(network)
    if factor == 1:
        return result
    if found.scaled:
        raise NetworkError(
            f"attention logits are multiplied with a number ('{found.scaled[0]}'), which may depend on the "
            "width of the heads and would stay. Compute it in forward: scale=1 / q.size(-1), or "
            "logits / q.size(-1)."
        )
    grown: dict[int, nn.Parameter] = {}
    for name, calls in found.inputs.items():
        into = 1 if calls[0] <= {DATA} else factor
        out = 1 if found.fixed(name) else factor
        _grow_layer(result.get_submodule(name), into, out, grown)
    for name, sources in found.norms.items():
        if not any(found.fixed(source) for source in sources):
            _grow_norm(name, result.get_submodule(name), factor, _origin(found, sources), grown)
    for name in found.signals:
        if not found.fixed(name):
            _grow_signal(result, name, factor, _origin(found, frozenset((name,))), grown)
    return result


def _check(found: Channels) -> None:
    """Raise unless every layer sees either data or channels that can grow."""
    for name, calls in found.inputs.items():
        if len({sources <= {DATA} for sources in calls}) > 1 or any(
            DATA in sources and sources != {DATA} for sources in calls
        ):
            raise NetworkError(
                f"'{name}' sees both raw inputs and hidden channels, whose ratio would change with the "
                "width. Put a layer of weights between the inputs and their concatenation."
            )
        stuck = [s for sources in calls for s in sources if s != DATA and found.fixed(s)]
        if stuck:
            why = {
                DATA: "added to raw inputs",
                FIXED: "added to a fixed tensor",
                OUTPUT: "part of the output",
            }[found.root(stuck[0])]
            raise NetworkError(
                f"the channels of '{stuck[0]}' cannot grow, since they are {why}, but '{name}' sums over "
                "them. Put a layer of weights in between."
            )


def _origin(found: Channels, sources: Sources) -> set[int]:
    """Return the numbers of channels of the layers that these sources are tied to."""
    roots = {found.root(source) for source in sources}
    return {width for name, width in found.widths().items() if found.root(name) in roots}


def _resize(
    module: nn.Module, name: str, shape: Iterable[int], grown: dict[int, nn.Parameter]
) -> None:
    """Replace a parameter by one of another shape, filled with NaN; shared tensors stay shared."""
    old = module._parameters.get(name)
    if old is None:
        return
    if id(old) not in grown:
        new = torch.full(tuple(shape), float("nan"), dtype=old.dtype, device=old.device)
        grown[id(old)] = nn.Parameter(new, requires_grad=old.requires_grad)
    new_value = grown[id(old)]
    if tuple(new_value.shape) != tuple(shape):
        raise NetworkError(
            f"the parameter '{name}' is shared by layers that would need the shapes "
            f"{tuple(new_value.shape)} and {tuple(shape)} at another width."
        )
    setattr(module, name, new_value)


def _grow_layer(layer: Any, into: int, out: int, grown: dict[int, nn.Parameter]) -> None:
    """Multiply the numbers of channels of a layer in place."""
    if isinstance(layer, RECURRENT):
        return _grow_recurrent(layer, into, out, grown)
    if isinstance(layer, nn.Embedding):
        layer.embedding_dim *= out
        return _resize(layer, "weight", (layer.num_embeddings, layer.embedding_dim), grown)
    shape, places = list(layer.weight.shape), tuple(getattr(layer, "output_size", ()))
    if isinstance(layer, nn.Linear):
        layer.in_features, layer.out_features = layer.in_features * into, layer.out_features * out
    else:
        layer.in_channels, layer.out_channels = layer.in_channels * into, layer.out_channels * out
        if is_depthwise(layer) or getattr(layer, "groups", 1) == layer.in_channels // into > 1:
            layer.groups *= into
            into = 1
    first, second = (into, out) if isinstance(layer, TRANSPOSED) else (out, into)
    shape[0], shape[1] = shape[0] * first, shape[1] * second
    _resize(layer, "weight", shape, grown)
    wide = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
    return _resize(layer, "bias", (wide, *places), grown)


def _grow_recurrent(layer: Any, into: int, out: int, grown: dict[int, nn.Parameter]) -> None:
    if getattr(layer, "proj_size", 0):
        raise NetworkError("a twin cannot have another width of a recurrent layer with proj_size.")
    layer.input_size, layer.hidden_size = layer.input_size * into, layer.hidden_size * out
    for name, value in list(layer._parameters.items()):
        if value is not None:
            columns = into if name in ("weight_ih", "weight_ih_l0", "weight_ih_l0_reverse") else out
            shape = (value.shape[0] * out, *(size * columns for size in value.shape[1:]))
            _resize(layer, name, shape, grown)
    if isinstance(layer, nn.RNNBase):
        layer._init_flat_weights()


def _grow_norm(
    name: str, layer: Any, factor: int, widths: set[int], grown: dict[int, nn.Parameter]
) -> None:
    if isinstance(layer, nn.GroupNorm):
        layer.num_channels *= factor
        shape: tuple[int, ...] = (layer.num_channels,)
    else:
        shape = tuple(layer.normalized_shape)
        axis = _axis(shape, widths, f"'{name}'")
        shape = (*shape[:axis], shape[axis] * factor, *shape[axis + 1 :])
        layer.normalized_shape = shape
    for own in ("weight", "bias"):
        if own in layer._parameters:
            _resize(layer, own, shape, grown)


def _grow_signal(
    network: nn.Module, name: str, factor: int, widths: set[int], grown: dict[int, nn.Parameter]
) -> None:
    path, _, own = name.rpartition(".")
    module = network.get_submodule(path)
    shape = list(getattr(module, own).shape)
    shape[_axis(tuple(shape), widths, f"the parameter '{name}'")] *= factor
    _resize(module, own, shape, grown)


def _axis(shape: tuple[int, ...], widths: set[int], what: str) -> int:
    """Return the axis of the channels: the last axis whose length is a number of channels."""
    if len(shape) == 1:
        return 0
    found = [axis for axis, size in enumerate(shape) if size in widths]
    if not found:
        raise NetworkError(
            f"none of the axes of {what}, of sizes {shape}, has as many entries as there are channels "
            f"({sorted(widths)}), so that it is not clear which one grows with the width."
        )
    return found[-1]
