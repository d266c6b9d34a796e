"""A function of tensors as a graph of tensor operations, for batches of any size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from net2gp.serving.programs.decompositions import table

_REPEATED: ContextVar[dict[str, int] | None] = ContextVar("repeated", default=None)
"""The repeated inputs of the graph that is being made, by their nodes' names, and how often they are."""


def traced(function: Callable[..., Any], inputs: Sequence[Tensor]) -> fx.GraphModule:
    """Return the operations of a function, with derivatives written out, for any number of rows.

    Args:
        function: The function, which may call `torch.autograd.grad`.
        inputs: Some rows, at least two, that share their number.

    Returns:
        A module that computes the same.

    >>> def slope(x):
    ...     with torch.enable_grad():
    ...         x = x.detach().requires_grad_()
    ...         return torch.autograd.grad(x.sin().sum(), x)[0]
    >>> traced(slope, [torch.zeros(5, 1)])(torch.zeros(2, 1))
    tensor([[1.],
            [1.]])
    """
    noted: dict[str, int] = {}
    # sizes that happen to be the number of rows must not be taken for it
    mode = FakeTensorMode(shape_env=ShapeEnv(duck_shape=False), allow_non_fake_inputs=True)
    token = _REPEATED.set(noted)
    try:
        tracer = make_fx(
            function,
            tracing_mode="real",
            decomposition_table=table(),
            _allow_non_fake_inputs=True,
        )
        fake = [_of_any_rows(mode, value, name) for name, value in enumerate(inputs)]
        with torch.no_grad(), mode:
            module: fx.GraphModule = tracer(*fake)
    finally:
        _REPEATED.reset(token)
    _share(module.graph, noted)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def _of_any_rows(mode: FakeTensorMode, value: Tensor, number: int) -> Tensor:
    """Return a tensor without values whose number of rows is a symbol."""
    sizes = [DimDynamic.DYNAMIC if not axis else DimDynamic.STATIC for axis in range(value.dim())]
    context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
    source = ConstantSource(f"rows_of_{number}")
    return mode.from_tensor(value, source=source, symbolic_context=context)


def repeated(x: Tensor, times: int) -> Tensor:
    """Return each row several times.

    What `traced` finds to be computed of the rows and of the repeated rows alike is computed once, and its
    results are repeated. So a network may be differentiated at all of its outputs in one backward pass.

    Args:
        x: B rows.
        times: How often, K.

    Returns:
        B·K rows.

    >>> repeated(torch.tensor([1, 2]), 2)
    tensor([1, 1, 2, 2])
    """
    wide = x[:, None].expand(-1, times, *x.shape[1:]).flatten(0, 1)
    mode, noted = get_proxy_mode(), _REPEATED.get()
    if mode is not None and noted is not None:
        noted[next(reversed(mode.tracer.graph.nodes)).name] = times
    return wide


def _share(graph: fx.Graph, noted: dict[str, int]) -> None:
    """Let operations on repeated rows take repeated results of the same operations on the rows themselves."""
    if not noted:
        return
    times = next(iter(noted.values()))
    known: dict[Any, fx.Node] = {}
    twins: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.name in noted:
            twins[node] = _input_behind(node)
            continue
        key = _key(node, twins)
        if key in known and _is_repeated(node, known[key], times):
            twins[node] = known[key]
        else:
            known.setdefault(key, node)
    for node, twin in twins.items():
        value = node.meta.get("val")
        if isinstance(value, Tensor) and node.name not in noted:
            same = _shape(value) == _shape(twin.meta["val"])
            node.replace_all_uses_with(twin if same else _repeat(graph, node, twin, times))


def _input_behind(node: fx.Node) -> fx.Node:
    """The placeholder that a node is a view or a copy of."""
    while node.op != "placeholder":
        node = cast(fx.Node, node.args[0])
    return node


def _key(node: fx.Node, twins: dict[fx.Node, fx.Node]) -> Any:
    """What an operation is and what it takes, whereby sizes that depend on the number of rows are alike."""

    def one(value: Any) -> Any:
        if isinstance(value, fx.Node):
            if not isinstance(value.meta.get("val"), Tensor | tuple | list | None):
                return "size"
            value = twins.get(value, value)
            return ("constant", value.target) if value.op == "get_attr" else value
        if isinstance(value, list | tuple):
            return tuple(one(item) for item in value)
        if isinstance(value, dict):
            return tuple((name, one(item)) for name, item in value.items())
        return (type(value), str(value))

    if node.op in ("placeholder", "output"):
        return node
    return node.op, node.target, one(node.args), one(node.kwargs)


def _is_repeated(node: fx.Node, twin: fx.Node, times: int) -> bool:
    """Whether a node has the shape of another one, or that with more rows."""
    wide, narrow = node.meta.get("val"), twin.meta.get("val")
    if isinstance(wide, tuple | list) or wide is None:
        return type(wide) is type(narrow)
    if not (isinstance(wide, Tensor) and isinstance(narrow, Tensor)):
        return False
    if _shape(wide) == _shape(narrow):
        return True
    fixed = all(isinstance(size, int) for size in wide.shape[1:])
    return (
        fixed
        and wide.dim() > 0
        and _shape(wide)[1:] == _shape(narrow)[1:]
        and str(wide.shape[0]) == str(times * narrow.shape[0])
    )


def _shape(value: Tensor) -> tuple[str, ...]:
    return tuple(str(size) for size in value.shape)


def _repeat(graph: fx.Graph, node: fx.Node, twin: fx.Node, times: int) -> fx.Node:
    aten = torch.ops.aten
    with graph.inserting_before(node):
        wide = graph.call_function(aten.unsqueeze.default, (twin, 1))
        sizes = [-1, times, *[-1] * (twin.meta["val"].dim() - 1)]
        wide = graph.call_function(aten.expand.default, (wide, sizes))
        return graph.call_function(aten.flatten.using_ints, (wide, 0, 1))
