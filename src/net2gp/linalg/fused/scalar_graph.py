"""A function of pairs of points as arithmetic on single numbers, from which programs are written.

Where k(x, x') is a function of the inner product of two rows and of numbers that belong to each row, its
tensor program is recorded once on a few points. Every operation then belongs to one of four levels: numbers
that are the same for all pairs, numbers of a row of x, numbers of a row of x', and numbers of a pair. The
first three are cheap and stay tensor operations; the fourth become lines of a program for one pair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

ROWS, COLUMNS = 5, 7
"""How many points of each side are recorded."""

SAME, LEFT, RIGHT, PAIR = "same", "left", "right", "pair"

Function = Callable[[Tensor, Tensor, list[Tensor], list[Tensor], list[Tensor]], Tensor]
"""From x (n, d), y (m, d), numbers (n, 1) of x, numbers (1, m) of y and numbers () to k(x, y), (n, m)."""

SHAPING = {
    *(
        "view",
        "reshape",
        "_unsafe_view",
        "unsqueeze",
        "squeeze",
        "expand",
        "clone",
        "detach",
        "alias",
    ),
    *("lift_fresh_copy", "contiguous", "_to_copy", "permute", "t", "transpose"),
}
"""Operations that move numbers without changing them."""

OPERATIONS = {
    *(
        "neg",
        "reciprocal",
        "sqrt",
        "rsqrt",
        "exp",
        "log",
        "sin",
        "cos",
        "sinh",
        "cosh",
        "abs",
        "erf",
    ),
    *(
        "acos",
        "asin",
        "atan2",
        "sign",
        "square",
        "mul.Tensor",
        "mul.Scalar",
        "div.Tensor",
        "div.Scalar",
    ),
    *("maximum", "minimum", "clamp_min", "clamp_max", "clamp", "where.self", "masked_fill.Scalar"),
    *(
        "gt.Tensor",
        "gt.Scalar",
        "ge.Tensor",
        "ge.Scalar",
        "lt.Tensor",
        "lt.Scalar",
        "le.Tensor",
        "le.Scalar",
    ),
    *(
        "add.Tensor",
        "add.Scalar",
        "sub.Tensor",
        "sub.Scalar",
        "rsub.Scalar",
        "addcmul",
        "pow.Tensor_Scalar",
    ),
}
"""Operations of pairs that programs can be written of."""

PRODUCTS = {"mm", "bmm", "baddbmm", "addmm"}


@dataclass(frozen=True)
class Operation:
    """One line: what is computed, of which values, at which level.

    Args:
        name: The name of torch's operation with its overload, such as "add.Tensor".
        arguments: Numbers, or the indices of earlier values, as `Value`.
        keywords: Further numbers by name, such as alpha.
        level: To what the result belongs.
    """

    name: str
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]
    level: str


@dataclass(frozen=True)
class Value:
    """The result of the operation of that index."""

    index: int


@dataclass(frozen=True)
class ScalarGraph:
    """Operations in order; those of rows are evaluated as tensors, those of pairs become programs.

    Args:
        operations: All lines. Inputs are operations named "input" with their kind and number.
        result: The index of the result.
        row_values: Indices of numbers of rows of x that pairs need.
        column_values: Likewise of x'.
        shared_values: Likewise of numbers that all pairs share.
    """

    operations: tuple[Operation, ...]
    result: int
    row_values: tuple[int, ...]
    column_values: tuple[int, ...]
    shared_values: tuple[int, ...]

    def pair_operations(self) -> list[tuple[int, Operation]]:
        """Return the lines that are computed for each pair, with their indices."""
        return [(k, one) for k, one in enumerate(self.operations) if one.level == PAIR]

    def numbers(
        self, left: Sequence[Tensor], right: Sequence[Tensor], shared: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Evaluate what belongs to rows or to all pairs.

        Args:
            left: Numbers of rows of x, (n,) each.
            right: Numbers of rows of x', (m,) each.
            shared: Numbers that all pairs share, () each.

        Returns:
            The numbers that pairs need: of x (n,), of x' (m,) and shared ().
        """
        given = {LEFT: left, RIGHT: right, SAME: shared}
        found: dict[int, Any] = {}
        for index, one in enumerate(self.operations):
            if one.level == PAIR:
                continue
            if one.name == "input":
                found[index] = given[one.level][one.arguments[0]]
                continue
            arguments = [_looked_up(found, value) for value in one.arguments]
            keywords = {name: _looked_up(found, value) for name, value in one.keywords}
            found[index] = operation(one.name)(*arguments, **keywords)
        wanted = (self.row_values, self.column_values, self.shared_values)
        first, second, third = ([found[index] for index in each] for each in wanted)
        return first, second, third


def _looked_up(found: dict[int, Any], value: Any) -> Any:
    if isinstance(value, Value):
        return found[value.index]
    if isinstance(value, tuple):
        return [_looked_up(found, each) for each in value]
    return value


def operation(name: str) -> Callable[..., Any]:
    """Return torch's operation of that name, which takes numbers in place of tensors of one element too."""
    return getattr(torch.ops.aten, name.partition(".")[0])


class NotScalar(Exception):
    """The program is not arithmetic on single numbers of pairs."""


def recorded(
    function: Function, width: int, counts: tuple[int, int, int], dtype: torch.dtype
) -> ScalarGraph | None:
    """Record a function of pairs.

    Args:
        function: The function.
        width: The number of columns of x.
        counts: How many numbers each row of x has, each row of x', and all pairs share.
        dtype: The dtype in which it is recorded.

    Returns:
        The graph, or None if something in it is not arithmetic on single numbers, such as a table.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    left, right, shared = counts

    def flat(*values: Tensor) -> Tensor:
        numbers = list(values[2:])
        one, rest = numbers[:left], numbers[left:]
        return function(values[0], values[1], one, rest[:right], rest[right:])

    ones = [torch.ones(size, dtype=dtype) for size in ((ROWS, 1),) * left + ((1, COLUMNS),) * right]
    alone = [torch.ones((), dtype=dtype) for _ in range(shared)]
    x, y = (torch.ones(size, width, dtype=dtype) for size in (ROWS, COLUMNS))
    with torch.no_grad():
        try:
            graph = make_fx(torch.func.functionalize(flat))(x, y, *ones, *alone)
            levels = ["x", "y", *[LEFT] * left, *[RIGHT] * right, *[SAME] * shared]
            return _graph_of(graph, levels)
        except (NotScalar, RuntimeError):  # such as a table that looks at the numbers
            return None


def _graph_of(graph: fx.GraphModule, kinds: Sequence[str]) -> ScalarGraph:
    """Sort the nodes of a recorded program into levels, from its inputs to its result."""
    operations: list[Operation] = []
    known: dict[fx.Node, Any] = {}
    counts = dict.fromkeys((LEFT, RIGHT, SAME), 0)
    inputs = iter(kinds)
    result: Any = None
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            kind = next(inputs)
            if kind in counts:
                known[node] = Value(len(operations))
                operations.append(Operation("input", (counts[kind],), (), kind))
                counts[kind] += 1
            else:
                known[node] = kind
        elif node.op == "get_attr":
            constant = getattr(graph, str(node.target))
            if constant.numel() != 1:
                raise NotScalar
            known[node] = constant.item()
        elif node.op == "call_function":
            known[node] = _line(node, known, operations)
        elif node.op == "output":
            result = known[node.args[0]]
    if not isinstance(result, Value) or operations[result.index].level != PAIR:
        raise NotScalar
    return _used(operations, result.index)


def _line(node: fx.Node, known: dict[fx.Node, Any], operations: list[Operation]) -> Any:
    """Translate one node into a line, or into the value that it only moves."""
    name = _name_of(node)
    base = name.partition(".")[0]
    arguments = [_argument(value, known) for value in node.args]
    if base in SHAPING:
        return arguments[0]
    if base in PRODUCTS:
        return _inner_product(base, arguments, node, operations)
    if base in ("zeros_like", "ones_like", "full_like"):
        return {"zeros_like": 0.0, "ones_like": 1.0}.get(base, arguments[-1])
    if base in ("full", "scalar_tensor"):
        return arguments[-1]
    if base in ("zeros", "ones", "new_zeros"):
        return 1.0 if base == "ones" else 0.0
    keywords = tuple(
        (key, _argument(value, known))
        for key, value in node.kwargs.items()
        if key in ("alpha", "value")
    )
    level = _level([*arguments, *(value for _, value in keywords)], operations)
    if level is None:  # of plain numbers alone
        raise NotScalar
    if level == PAIR and name not in OPERATIONS:
        raise NotScalar
    operations.append(Operation(name, tuple(arguments), keywords, level))
    return Value(len(operations) - 1)


def _name_of(node: fx.Node) -> str:
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        raise NotScalar
    base, kind = target._schema.name.removeprefix("aten::"), target._overloadname
    return base if kind == "default" else f"{base}.{kind}"


def _argument(value: Any, known: dict[fx.Node, Any]) -> Any:
    if isinstance(value, fx.Node):
        return known[value]
    if isinstance(value, list | tuple):
        return tuple(_argument(each, known) for each in value)
    return value


def _inner_product(
    base: str, arguments: list[Any], node: fx.Node, operations: list[Operation]
) -> Value:
    """The inner product of a row of x and a row of y, times the factor of `baddbmm`."""
    first, second = arguments[-2:]
    if (first, second) != ("x", "y"):
        raise NotScalar
    if base in ("baddbmm", "addmm") and node.kwargs.get("beta", 1) != 0:
        raise NotScalar
    operations.append(Operation("inner", (), (), PAIR))
    inner = Value(len(operations) - 1)
    alpha = node.kwargs.get("alpha", 1)
    if alpha == 1:
        return inner
    operations.append(Operation("mul.Scalar", (inner, alpha), (), PAIR))
    return Value(len(operations) - 1)


def _level(values: Sequence[Any], operations: Sequence[Operation]) -> str | None:
    """The level of what is made of these values; None of plain numbers."""
    found = set()
    for value in values:
        if isinstance(value, tuple):
            found.add(_level(value, operations))
        elif isinstance(value, Value):
            found.add(operations[value.index].level)
        elif isinstance(value, str):
            raise NotScalar  # the points themselves
    found -= {None}
    if not found:
        return None
    if PAIR in found or {LEFT, RIGHT} <= found:
        return PAIR
    return next((level for level in (LEFT, RIGHT) if level in found), SAME)


def _used(operations: Sequence[Operation], result: int) -> ScalarGraph:
    """The graph without what the result does not need."""
    wanted, stack = set(), [result]
    while stack:
        index = stack.pop()
        if index not in wanted:
            wanted.add(index)
            one = operations[index]
            stack += [v.index for v in _values_in((one.arguments, dict(one.keywords).values()))]
    order = sorted(wanted)
    place = {old: new for new, old in enumerate(order)}
    lines = tuple(_renumbered(operations[old], place) for old in order)
    needed: dict[str, list[int]] = {LEFT: [], RIGHT: [], SAME: []}
    for one in lines:
        if one.level == PAIR:
            for value in _values_in((one.arguments, dict(one.keywords).values())):
                level = lines[value.index].level
                if level != PAIR and value.index not in needed[level]:
                    needed[level].append(value.index)
    sides = (tuple(needed[level]) for level in (LEFT, RIGHT, SAME))
    return ScalarGraph(lines, place[result], *sides)


def _values_in(values: Any) -> list[Value]:
    if isinstance(values, Value):
        return [values]
    if isinstance(values, str) or not hasattr(values, "__iter__"):
        return []
    return [found for each in values for found in _values_in(each)]


def _renumbered(one: Operation, place: dict[int, int]) -> Operation:
    def new(value: Any) -> Any:
        if isinstance(value, Value):
            return Value(place[value.index])
        return tuple(new(each) for each in value) if isinstance(value, tuple) else value

    keywords = tuple((key, new(value)) for key, value in one.keywords)
    return Operation(one.name, tuple(new(value) for value in one.arguments), keywords, one.level)
