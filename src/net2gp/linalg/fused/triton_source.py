"""The text of programs for NVIDIA GPUs, from a kernel as arithmetic on pairs."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from net2gp.linalg.fused.scalar_graph import Operation, ScalarGraph, Value

DEGREE = 8
"""Of the polynomial in acos(t) = √(1 − t) P(t), for an error of 4e-9 on [0, 1]."""

CODE: dict[str, str] = {
    "neg": "(-{0})",
    "reciprocal": "(1.0 / {0})",
    "sqrt": "tl.sqrt({0})",
    "rsqrt": "tl.rsqrt({0})",
    "exp": "tl.exp({0})",
    "log": "tl.log({0})",
    "sin": "tl.sin({0})",
    "cos": "tl.cos({0})",
    "sinh": "(0.5 * (tl.exp({0}) - tl.exp(-{0})))",
    "cosh": "(0.5 * (tl.exp({0}) + tl.exp(-{0})))",
    "abs": "tl.abs({0})",
    "erf": "tl.erf({0})",
    "acos": "_acos({0})",
    "asin": "(1.5707963267948966 - _acos({0}))",
    "atan2": "_atan2({0}, {1})",
    "sign": "tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, 0.0))",
    "square": "({0} * {0})",
    "mul": "({0} * {1})",
    "div": "({0} / {1})",
    "maximum": "tl.maximum({0}, {1})",
    "minimum": "tl.minimum({0}, {1})",
    "clamp_min": "tl.maximum({0}, {1})",
    "clamp_max": "tl.minimum({0}, {1})",
    "clamp": "tl.minimum(tl.maximum({0}, {1}), {2})",
    "where": "tl.where({0}, {1}, {2})",
    "masked_fill": "tl.where({1}, {2}, {0})",
    "gt": "({0} > {1})",
    "ge": "({0} >= {1})",
    "lt": "({0} < {1})",
    "le": "({0} <= {1})",
    "add": "({0} + {alpha} * {1})",
    "sub": "({0} - {alpha} * {1})",
    "rsub": "({1} - {alpha} * {0})",
    "addcmul": "({0} + {value} * {1} * {2})",
}
"""How Triton writes the operations of pairs."""

SOURCE = """
import triton
import triton.language as tl


@triton.jit
def _acos(t):
    a = tl.minimum(tl.abs(t), 1.0)
    angle = tl.sqrt(1.0 - a) * {polynomial}
    return tl.where(t < 0, 3.141592653589793 - angle, angle)


@triton.jit
def _atan2(y, x):
    angle = _acos(x * tl.rsqrt(tl.maximum(x * x + y * y, 1e-37)))
    return tl.where(y < 0, -angle, angle)


@triton.jit
def product(
    X, Y, V, OUT, OWN, L, R, C, n, m, k,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, TOGETHER: tl.constexpr,
    SAME: tl.constexpr, GRAM: tl.constexpr, OUTER: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    within = rows < n
    depth = tl.arange(0, BD)
{row_numbers}
    if SAME:
        own = tl.load(OWN + rows, mask=within, other=0.0)
    if D <= BD:
        inputs = within[:, None] & (depth[None, :] < D)
        x = tl.load(X + rows[:, None] * D + depth[None, :], mask=inputs, other=0.0)
    for start in range(0, m, TOGETHER):
{zeros}
        for first in range(start, tl.minimum(start + TOGETHER, m), BN):
            columns = first + tl.arange(0, BN).to(tl.int64)
            known = columns < m
{column_numbers}
            if D <= BD:
                others = known[None, :] & (depth[:, None] < D)
                y = tl.load(Y + columns[None, :] * D + depth[:, None], mask=others, other=0.0)
                inner = tl.dot(x, y, input_precision=GRAM)
            else:
                inner = tl.zeros((BM, BN), dtype=tl.float32)
                for d in range(0, D, BD):
                    x = tl.load(
                        X + rows[:, None] * D + d + depth[None, :],
                        mask=within[:, None] & (d + depth[None, :] < D), other=0.0,
                    )
                    y = tl.load(
                        Y + columns[None, :] * D + d + depth[:, None],
                        mask=known[None, :] & (d + depth[:, None] < D), other=0.0,
                    )
                    inner = tl.dot(x, y, inner, input_precision=GRAM)
{lines}
            value = {result}
            if SAME:
                value = tl.where(rows[:, None] == columns[None, :], own[:, None], value)
            value = tl.where(known[None, :], value, 0.0)
{sums}
{writes}


@triton.jit
def entries(
    X, Y, OUT, OWN, L, R, C, n, m,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SAME: tl.constexpr,
    GRAM: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN).to(tl.int64)
    within = rows < n
    known = columns < m
    depth = tl.arange(0, BD)
{row_numbers}
{entry_numbers}
    inner = tl.zeros((BM, BN), dtype=tl.float32)
    for d in range(0, D, BD):
        inputs = within[:, None] & (d + depth[None, :] < D)
        x = tl.load(X + rows[:, None] * D + d + depth[None, :], mask=inputs, other=0.0)
        others = known[None, :] & (d + depth[:, None] < D)
        y = tl.load(Y + columns[None, :] * D + d + depth[:, None], mask=others, other=0.0)
        inner = tl.dot(x, y, inner, input_precision=GRAM)
{entry_lines}
    value = {result}
    if SAME:
        own = tl.load(OWN + rows, mask=within, other=0.0)
        value = tl.where(rows[:, None] == columns[None, :], own[:, None], value)
    inside = within[:, None] & known[None, :]
    tl.store(OUT + rows[:, None] * m + columns[None, :], value, mask=inside)
"""


def source(graph: ScalarGraph, blocks: tuple[int, ...]) -> str:
    """Return the text of a program for these blocks of columns of the vectors."""
    names: dict[int, str] = {}
    rows, columns = [], []
    for number, index in enumerate(graph.row_values):
        names[index] = f"l{number}[:, None]"
        rows.append(f"l{number} = tl.load(L + {number} * n + rows, mask=within, other=1.0)")
    for number, index in enumerate(graph.column_values):
        names[index] = f"r{number}[None, :]"
        columns.append(f"r{number} = tl.load(R + {number} * m + columns, mask=known, other=1.0)")
    for number, index in enumerate(graph.shared_values):
        names[index] = f"c{number}"
        rows.append(f"c{number} = tl.load(C + {number})")
    lines = []
    for index, one in graph.pair_operations():
        names[index] = "inner" if one.name == "inner" else f"t{index}"
        if one.name != "inner":
            lines.append(f"t{index} = {line(one, names)}")
    zeros, sums, writes = _sums(blocks)
    return SOURCE.format(
        polynomial=polynomial(),
        row_numbers=_indented(rows, 1),
        column_numbers=_indented(columns, 3),
        entry_numbers=_indented(columns, 1),
        entry_lines=_indented(lines, 1),
        zeros=_indented(zeros, 2),
        lines=_indented(lines, 3),
        result=names[graph.result],
        sums=_indented(sums, 3),
        writes=_indented(writes, 2),
    )


def _sums(blocks: tuple[int, ...]) -> tuple[list[str], list[str], list[str]]:
    """The lines that begin, add to and write the products with blocks of columns."""
    zeros, sums, writes = [], [], []
    first = 0
    for number, width in enumerate(blocks):
        zeros.append(f"sum{number} = tl.zeros((BM, {width}), dtype=tl.float32)")
        at = f"{first} + tl.arange(0, {width})"
        sums += [
            f"place{number} = {at}",
            f"v{number} = tl.load(V + columns[:, None] * k + place{number}[None, :], "
            f"mask=known[:, None] & (place{number}[None, :] < k), other=0.0)",
            f"sum{number} = tl.dot(value, v{number}, sum{number}, input_precision=OUTER)",
        ]
        writes += [
            f"at{number} = {at}",
            f"to{number} = OUT + rows[:, None] * k + at{number}[None, :]",
            f"inside{number} = within[:, None] & (at{number}[None, :] < k)",
            f"before{number} = tl.load(to{number}, mask=inside{number})",
            f"tl.store(to{number}, before{number} + sum{number}, mask=inside{number})",
        ]
        first += width
    return zeros, sums, writes


def _indented(lines: list[str], depth: int) -> str:
    return "\n".join("    " * depth + one for one in lines)


def line(one: Operation, names: dict[int, str]) -> str:
    """Write one operation of pairs, with the names of the values that it takes."""

    def text(value: Any) -> str:
        return names[value.index] if isinstance(value, Value) else f"{float(value)!r}"

    base = one.name.partition(".")[0]
    arguments = [text(value) for value in one.arguments]
    if base == "pow":
        return _power(arguments[0], one.arguments[1])
    keywords = {"alpha": "1.0", "value": "1.0"}
    keywords |= {key: text(value) for key, value in one.keywords}
    return CODE[base].format(*arguments, **keywords)


def _power(base: str, exponent: float) -> str:
    if exponent == int(exponent) and 1 <= exponent <= 8:
        return "(" + " * ".join([base] * int(exponent)) + ")"
    if exponent == 0.5:
        return f"tl.sqrt({base})"
    return f"tl.exp({float(exponent)!r} * tl.log({base}))"


@lru_cache(maxsize=1)
def polynomial() -> str:
    """Return P of acos(a) = √(1 − a) P(a) by Horner's rule, fitted at Chebyshev nodes of [0, 1]."""
    nodes = (1 + np.cos((2 * np.arange(400) + 1) * np.pi / 800)) / 2
    values = np.arccos(nodes) / np.sqrt(1 - nodes)
    found = np.polynomial.Chebyshev.fit(nodes, values, DEGREE, domain=[0, 1])
    *rest, top = found.convert(kind=np.polynomial.Polynomial).coef.tolist()
    text = repr(top)
    for coefficient in reversed(rest):
        text = f"({text} * a + {coefficient!r})"
    return text
