"""Numbers of a graph as tensors of their own precision, for exporters that round them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten

WITH_NUMBERS = (
    *("add", "sub", "rsub", "mul", "div", "clamp", "clamp_min", "clamp_max"),
    *("eq", "ge", "gt", "le", "lt", "scalar_tensor"),
)
"""Operations whose numbers are rounded, by name."""


def precise_constants(program: fx.GraphModule) -> fx.GraphModule:
    """Return the same graph with numbers beside float64 tensors as float64 tensors.

    The exporter for ONNX writes a number as the nearest one of float32, also beside float64: π is then wrong
    in its eighth digit, and 1e-300 is 0. A solve with a Gram matrix makes 1e-4 of that.

    Args:
        program: The graph, which stays as it is.

    >>> from net2gp.serving.programs.tracing import traced
    >>> graph = traced(lambda x: x + torch.pi, [torch.zeros(2, dtype=torch.float64)])
    >>> [str(node.target) for node in precise_constants(graph).graph.nodes][1:3]
    ['number_0', 'aten.add.Tensor']
    """
    program = copy.deepcopy(program)
    graph, count = program.graph, 0
    for node in list(graph.nodes):
        for place, number in _rounded(node):
            name = f"number_{count}"
            count += 1
            program.register_buffer(name, torch.tensor(number, dtype=torch.float64))
            with graph.inserting_before(node):
                _put(graph, node, place, graph.get_attr(name))
    graph.eliminate_dead_code()
    program.recompile()
    return program


def _rounded(node: fx.Node) -> Iterator[tuple[int | str, float]]:
    """The places among the arguments of an operation in float64 of numbers that float32 does not have."""
    name = _name(node)
    if name not in WITH_NUMBERS or (name == "rsub" and node.kwargs):
        return
    values = [node.meta.get("val"), *(one.meta.get("val") for one in node.all_input_nodes)]
    if any(isinstance(one, Tensor) and one.dtype is torch.float64 for one in values):
        given: list[tuple[int | str, Any]] = [*enumerate(node.args), *node.kwargs.items()]
        numbers = [(place, one) for place, one in given if isinstance(one, float)]
        yield from numbers if any(_differs(number) for _, number in numbers) else ()


def _name(node: fx.Node) -> str:
    """The operation without the underscore that says that it is in place, or nothing if it is another."""
    schema = getattr(node.target, "_schema", None)
    return "" if schema is None else str(schema.name).removeprefix("aten::").rstrip("_")


def _differs(number: float) -> bool:
    return float(torch.tensor(number, dtype=torch.float32)) != number


def _put(graph: fx.Graph, node: fx.Node, place: int | str, constant: fx.Node) -> None:
    name = _name(node)
    if name == "scalar_tensor":
        node.replace_all_uses_with(constant)
    elif place == "alpha":  # a + alpha · b
        node.update_arg(1, graph.call_function(aten.mul.Tensor, (node.args[1], constant)))
        node.kwargs = {key: value for key, value in node.kwargs.items() if key != "alpha"}
    elif name == "rsub":
        node.target, node.args = aten.sub.Tensor, (constant, node.args[0])
    else:
        target: Any = node.target
        takes = {one.name: str(one.type) for one in target._schema.arguments}
        key = list(takes)[place] if isinstance(place, int) else place
        node.target = target if takes[key] == "Tensor" else target.overloadpacket.Tensor
        node.update_arg(place, constant) if isinstance(place, int) else node.update_kwarg(
            place, constant
        )
