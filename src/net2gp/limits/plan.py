"""The program of a network for inputs of one shape: a walk over the graph translates node by node."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor, fx, nn

from net2gp.errors import InputError, NetworkError
from net2gp.limits.duals.activations import UnsupportedLayer, activation_of
from net2gp.limits.duals.torch_functions import from_function
from net2gp.limits.graph.trace import (
    BATCH,
    attribute_of,
    keeps_forward,
    kind_of,
    parameter_of,
    shapes,
    trace,
)
from net2gp.limits.graph.translate import Data, Parameter, Signal, Translation, module_of
from net2gp.limits.modules import pointwise
from net2gp.limits.moments.evaluation import Program
from net2gp.limits.proof import NORMS, check
from net2gp.limits.rules import recurrent_layers, weighted_layers
from net2gp.limits.rules.arithmetic import Shift
from net2gp.limits.rules.function_rules import translate_call
from net2gp.limits.rules.layer_rules import hint_of, is_activation, rule
from net2gp.limits.signals import expressions as ex
from net2gp.limits.signals.layout import Layout, LayoutError

WEIGHTED = (*weighted_layers.KINDS, *recurrent_layers.KINDS)


NUM_KNOWN = 16
"""The most plans, and polynomials and compiled functions of each plan, that are held at a time."""


def remember(known: dict[Any, Any], key: Any, value: Any) -> Any:
    """Put `value` into a dict of at most `NUM_KNOWN` entries, drop the oldest, and return `value`."""
    while len(known) >= NUM_KNOWN:
        known.pop(next(iter(known)), None)
    known[key] = value
    return value


@dataclass(frozen=True, eq=False)
class Plan:
    """The program of a network for inputs of one shape.

    Args:
        graph: The network's graph.
        program: The program, which computes moments.
        extract: How to get the data that the program needs: the node it comes from, and a function of it.
        layout: The layout of the output.
        compiled: Compiled programs for tiles: the last few that were needed.
        polynomials: Polynomials in the angle: the last few that were needed.
    """

    graph: fx.GraphModule
    program: Program
    extract: Mapping[str, tuple[str, Callable[[Tensor], Tensor]]]
    layout: Layout
    compiled: dict[tuple, Callable[..., Any]] = field(default_factory=dict, repr=False)
    polynomials: dict[tuple, Any] = field(default_factory=dict, repr=False)

    def data(self, inputs: tuple[Tensor, ...], dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of the data that the program uses, each (positions, points, channels)."""
        wanted = {source for source, _ in self.extract.values()}
        found = _run_data(self.graph, inputs, wanted)
        result = {}
        for name, (source, extract) in self.extract.items():
            t = extract(found[source])
            result[name] = t if "tokens" in name else t.to(dtype)
        return result


def leaves() -> tuple[type, ...]:
    """Return the classes of layers with a rule."""
    known = {*rule.registry, *activation_of.registry}
    return tuple(
        kind for kind in known if isinstance(kind, type) and kind not in (object, nn.Module)
    )


def graph_of(network: nn.Module) -> fx.GraphModule:
    """Return the graph of a network; the walk stops at every layer with a rule."""
    return trace(network, leaves())


def weight_names(graph: fx.GraphModule) -> tuple[str, ...]:
    """Return the names of the layers and parameters with a prior, each tensor once."""
    seen: dict[int, str] = {}
    for node in graph.graph.nodes:
        if node.op == "call_module":
            layer = graph.get_submodule(node.target)
            if isinstance(layer, nn.RNN | nn.RNNCell):
                for name in recurrent_layers.weight_names(layer):
                    seen.setdefault(id(parameter_of(layer, name)), f"{node.target}.{name}")
            elif isinstance(layer, WEIGHTED) or type(layer) in _registered():
                weight = parameter_of(layer, "weight")
                seen.setdefault(id(layer if weight is None else weight), str(node.target))
        elif node.op == "get_attr":
            value = attribute_of(graph, node.target)
            if isinstance(value, nn.Parameter):
                layer_name, own = _home(graph, str(node.target))
                if layer_name is None or own == "weight":
                    seen.setdefault(id(value), layer_name or str(node.target))
    return tuple(seen.values())


def _home(graph: fx.GraphModule, target: str) -> tuple[str | None, str]:
    """Return the layer that a parameter belongs to (None if to none), and the parameter's name there."""
    path, _, own = target.rpartition(".")
    layer = graph.get_submodule(path)
    known = isinstance(layer, (*WEIGHTED, *NORMS)) and own in ("weight", "bias")
    return (path if known else None), own


def _registered() -> set[type]:
    """Return the layers for which users registered a rule."""
    return set(rule.registry) - _OWN


_OWN = frozenset({*rule.registry, *activation_of.registry})
"""The layers whose rules come with the library; all others were registered later, by users."""


def _believed() -> tuple[type, ...]:
    """Return the layers that are not compared with their rule.

    These are users' layers, for which users vouch, RReLU, which is random, and ExpNormalized, which divides
    by a root mean square over finitely many channels.
    """
    users = {*rule.registry, *activation_of.registry} - _OWN
    return (*users, nn.RReLU, pointwise.ExpNormalized)


def plan_of(graph: fx.GraphModule, inputs: tuple[Tensor, ...]) -> Plan:
    """Return the plan for inputs of these shapes."""
    count = sum(node.op == "placeholder" for node in graph.graph.nodes)
    if count != len(inputs):
        names = [str(node.target) for node in graph.graph.nodes if node.op == "placeholder"]
        raise InputError(
            f"the network takes {count} inputs ({', '.join(names)}), but {len(inputs)} were given. Pass "
            f"a tuple of {count} tensors, or a dict with those names."
        )
    translation = Translation(graph, shapes(graph, inputs))
    output: Any = None
    for node in graph.graph.nodes:
        if node.op == "output":
            output = translation.value(node.args[0])
        else:
            translation.values[node.name] = _named_value(translation, node)
    plan = _finished(translation, output)
    _check_rows_apart(plan, inputs)
    check(translation, inputs, _believed())
    return plan


def _finished(translation: Translation, output: Any) -> Plan:
    if isinstance(output, tuple | list) and len(output) == 1:
        output = output[0]
    if not isinstance(output, Signal):
        what = "data that no weights have touched."
        if not isinstance(output, Data):
            key = next(iter(output), 0) if isinstance(output, dict) else 0
            what = (
                f"{type(output).__name__.removeprefix('immutable_')}. Wrap it in a module whose "
                f"forward(self, x) returns one entry, such as self.network(x)[{key!r}]."
            )
        raise UnsupportedLayer(
            f"the network must return one tensor that its weights made, but returns {what}"
        )
    if len(output.blocks) != 1:
        raise UnsupportedLayer(
            "no infinite-width rule for a network that returns a concatenation of channels: its outputs "
            "have different laws. Take the limit of each part."
        )
    _check_output(output.blocks[0][1])
    program = Program.of(output.blocks[0][1])
    used = {e.reference for e in program.nodes if isinstance(e, ex.Raw | ex.Gained | ex.Routed)}
    used |= {name for e in program.nodes if isinstance(e, ex.Attended) for name in e.masks}
    extract = {name: how for name, how in translation.extract.items() if name in used}
    if not extract:
        raise UnsupportedLayer("the network's output does not depend on its inputs.")
    return Plan(translation.graph, program, extract, output.layout)


def _check_output(e: ex.Expression) -> None:
    """Refuse outputs whose mean is not zero because something fixed was added, however far back."""
    stack: list[ex.Expression] = [e]
    while stack:
        term = stack.pop()
        function = getattr(getattr(term, "activation", None), "function", None)
        if isinstance(term, ex.Raw) or isinstance(function, Shift):
            raise UnsupportedLayer(
                "no infinite-width rule for a network that adds something fixed (a number, or its inputs) to "
                "its output: a kernel has no mean. Leave it out, and pass it as mean= where you condition."
            )
        if not isinstance(term, ex.Point | ex.Product):
            stack.extend(ex.inherits(term))


def _named_value(translation: Translation, node: fx.Node) -> Any:
    """Return the value of a node; errors name the node."""
    try:
        return _value(translation, node)
    except (NetworkError, InputError):
        raise
    except LayoutError as error:
        raise translation.refuse(f"the change of axes: {error}", node) from error
    except Exception as error:
        called = node.target if isinstance(node.target, str) else node.target.__name__
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise translation.refuse(f"this use of {called} ({reason})", node) from error


def _value(translation: Translation, node: fx.Node) -> Any:
    found = translation.found[node.name]
    if node.op == "placeholder":
        return Data(node.name, tuple(found.shape[1:]), found.is_floating_point())
    if node.op == "get_attr":
        value = attribute_of(translation.graph, str(node.target))
        if isinstance(value, nn.Parameter):
            target, shape = str(node.target), tuple(value.shape)
            layer, own = _home(translation.graph, target)
            used = layer if layer is not None and own == "weight" else target
            return Parameter(translation.owner(value, used), shape, shape, layer, target)
        return value
    given = [translation.values[one.name] for one in node.all_input_nodes]
    weighty = [value for value in given if not isinstance(value, Data | Tensor | int | float)]
    if node.op == "call_module":
        return _module_value(translation, node, not any(_holds(value) for value in weighty))
    if any(_holds(value) for value in weighty):
        return translate_call(translation, node)
    if any(isinstance(value, Data) for value in given) and _has_tensors(found):
        if not isinstance(found, Tensor) or found.dim() == 0 or found.shape[0] != BATCH:
            name = node.target if isinstance(node.target, str) else node.target.__name__
            raise translation.refuse(
                f"the function {name} of the inputs", node, "It does not give one row per point. "
            )
        _check_no_activation(translation, node)
        return Data(node.name, tuple(found.shape[1:]), found.is_floating_point())
    return found


def _has_tensors(found: Any) -> bool:
    """Whether a result is a tensor or holds one."""
    if isinstance(found, tuple | list):
        return any(_has_tensors(one) for one in found)
    return isinstance(found, Tensor)


def _holds(value: Any) -> bool:
    """Whether a value came through weights."""
    if isinstance(value, tuple | list):
        return any(_holds(one) for one in value)
    return not isinstance(
        value, Data | Tensor | int | float | str | bool | torch.dtype | torch.device | None
    )


def _module_value(translation: Translation, node: fx.Node, data_only: bool) -> Any:
    layer = module_of(translation, node)
    kind = kind_of(layer, leaves())
    if kind is not None and not keeps_forward(layer, kind):
        raise translation.refuse(
            f"{type(layer).__name__}, whose forward differs from the one of {kind.__name__}", node
        )
    found = translation.found[node.name]
    if data_only and not isinstance(layer, WEIGHTED) and type(layer) not in _registered():
        _refuse_activation(node, layer)
        _check_fixed(translation, node, layer)
        return Data(node.name, tuple(found.shape[1:]), found.is_floating_point())
    args = translation.value(node.args)
    return rule(layer, translation, node, *args, *translation.value(node.kwargs).values())


def _check_fixed(translation: Translation, node: fx.Node, layer: nn.Module) -> None:
    """Refuse layers before the first weights that are more than a fixed function of each input."""
    kind = type(layer).__name__
    moving = nn.modules.batchnorm._BatchNorm | nn.modules.dropout._DropoutNd
    if layer.training and isinstance(layer, moving):
        raise translation.refuse(f"{kind} of the inputs in training", node, "Call network.eval(). ")
    parameters = dict(layer.named_parameters())
    if parameters and not isinstance(layer, NORMS):
        raise translation.refuse(kind, node, hint_of(layer))
    shifts = (value - float(name == "weight") for name, value in parameters.items())
    if any(bool(shift.detach().any()) for shift in shifts):
        raise translation.refuse(
            f"{kind} of the inputs with a scale or shift that is not 1 and 0",
            node,
            "Apply it to the data yourself. ",
        )


def _check_rows_apart(plan: Plan, inputs: tuple[Tensor, ...]) -> None:
    """Raise if what is computed from the inputs alone is random, or mixes the points of a batch."""
    wanted = {source for source, _ in plan.extract.values()}
    placeholders = {node.name for node in plan.graph.graph.nodes if node.op == "placeholder"}
    if wanted <= placeholders:
        return
    # a single point gets a second one beside it, since a mixture of one point cannot be seen
    few = tuple(x[:3] if len(x) > 1 else torch.cat([x, x.flip(0) * 2 + 1]) for x in inputs)
    together = _run_data(plan.graph, few, wanted)
    for number, name in product(range(len(few[0])), wanted):
        row = tuple(x[number : number + 1] for x in few)
        ours, alone = together[name][number : number + 1], _run_data(plan.graph, row, {name})[name]
        if not torch.allclose(ours, alone, rtol=1e-3, atol=1e-5, equal_nan=True):
            raise UnsupportedLayer(
                f"what the network computes of its inputs before the first weights ('{name}') is random, or "
                "depends on the other inputs of the batch. Do it to the data, before the network."
            )


def _check_no_activation(translation: Translation, node: fx.Node) -> None:
    """Refuse an activation of the raw inputs; functions of features computed from them are preprocessing."""
    if any(one.op != "placeholder" for one in node.all_input_nodes):
        return
    layer = from_function(
        node.target, translation.value(node.args), dict(translation.value(node.kwargs))
    )
    if layer is not None and type(layer).__name__ in _NAMED:
        _refuse_activation(node, layer)


_NAMED = {
    "ReLU",
    "LeakyReLU",
    "ELU",
    "SELU",
    "GELU",
    "SiLU",
    "Tanh",
    "Sigmoid",
    "Softplus",
    "Erf",
}


def _refuse_activation(node: fx.Node, layer: nn.Module) -> None:
    if not is_activation(layer) or isinstance(layer, nn.Identity | pointwise.Pointwise):
        return
    name = node.target if node.op == "call_module" else node.name
    raise UnsupportedLayer(
        f"the activation {type(layer).__name__} ('{name}') acts on the raw inputs, which are not Gaussian. "
        "Put a Linear or convolution before it, or apply the function to the data yourself."
    )


class _DataRun(fx.Interpreter):
    """An interpreter that runs layers in the dtype and on the device of their input."""

    def call_module(self, target: Any, args: tuple, kwargs: dict) -> Any:
        layer = self.fetch_attr(target)
        given = args[0] if args and isinstance(args[0], Tensor) else None
        if any(True for _ in layer.state_dict()) and given is not None:
            dtype = given.dtype if given.is_floating_point() else None
            layer = copy.deepcopy(layer).to(given.device, dtype)
        return layer(*args, **kwargs)


def _run_data(
    graph: fx.GraphModule, inputs: tuple[Tensor, ...], wanted: set[str]
) -> dict[str, Tensor]:
    """Return the tensors of the nodes `wanted`, which depend on the inputs alone."""
    nodes: dict[str, fx.Node] = {}
    stack = [node for node in graph.graph.nodes if node.name in wanted]
    while stack:
        node = stack.pop()
        if node.name not in nodes:
            nodes[node.name] = node
            stack.extend(node.all_input_nodes)
    runner = _DataRun(graph)
    given = iter(inputs)
    with torch.set_grad_enabled(torch.is_grad_enabled() and any(x.requires_grad for x in inputs)):
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                runner.env[node] = next(given)
            elif node.name in nodes:
                runner.env[node] = runner.run_node(node)
    return {node.name: runner.env[node] for node in graph.graph.nodes if node.name in wanted}
