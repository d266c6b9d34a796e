"""Signals of an infinitely wide network as expressions: what each depends on, and how.

A signal is a vector of infinitely many channels, at each position of each input. Its channels are
independent copies of one random variable, a function of Gaussian ones; an expression says which
function. Two signals that share weights are dependent, and their joint moments follow from the
expressions, so that sums and products of dependent branches come out right.

Reference: Yang, Tensor Programs I–III, 2019–2020.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from math import prod

import torch
from torch import Tensor

from net2gp.limits.duals.activations import Activation
from net2gp.limits.signals.layout import Factor, Heads
from net2gp.limits.signals.positions import PositionMap, Window

_ORDER = count()

Root = tuple[str, tuple[int, int] | None]


def _next() -> int:
    return next(_ORDER)


@dataclass(frozen=True, eq=False)
class Raw:
    """Channels `first` to `last` of a tensor of the data: deterministic, finitely many channels.

    Its moments are means over those channels, x·x'/C. `tokens`: integers, equal or not.
    """

    reference: str
    channel: int
    first: int
    last: int
    positions: tuple[int, ...]
    tokens: bool = False
    order: int = field(default_factory=_next)


@dataclass(frozen=True, eq=False)
class Weighted:
    """Weights times a signal: W u, Gaussian by the central limit theorem.

    `inputs` are the blocks of channels that the weights see, with their fractions. The window averages
    positions; the axes `averaged` were flattened into the channels, in the order of `axis`. Expressions
    with the same `weight` (and `rows`) share their weights, those with the same `shift` their biases,
    whose variance the prior has under the name `bias`. `local`: weights of their own at each position.
    `fan_in` is the module's own, for the standard parameterization. `finite`: each channel sees finitely
    many others (depthwise), so the result has these moments but is not Gaussian.
    """

    weight: str
    inputs: tuple[tuple[float, Expression], ...]
    positions: tuple[int, ...]
    fan_in: int
    bias: str | None = None
    window: Window | None = None
    averaged: tuple[int, ...] = ()
    rows: tuple[int, int] | None = None
    local: bool = False
    finite: bool = False
    axis: tuple[Factor, ...] = ()
    shift: str | None = None
    order: int = field(default_factory=_next)


@dataclass(frozen=True, eq=False)
class Parameter:
    """A parameter as a signal of its own (positional embedding, class token): one value a position.

    `shape` is the one it is used with, (1, ...), and `channel` its axis of channels.
    """

    weight: str
    positions: tuple[int, ...]
    rows: tuple[int, int] | None = None
    shape: tuple[int, ...] = ()
    channel: int = -1
    order: int = field(default_factory=_next)


@dataclass(frozen=True, eq=False)
class Sum:
    """Σ coefficient · term."""

    terms: tuple[tuple[float, Expression], ...]
    positions: tuple[int, ...]
    order: int = field(default_factory=_next)


@dataclass(frozen=True, eq=False)
class Mapped:
    """A linear map of the positions, the same for every input."""

    map: PositionMap
    input: Expression
    positions: tuple[int, ...]
    order: int = field(default_factory=_next)


@dataclass(frozen=True, eq=False)
class Gained:
    """A factor for each position of each input, computed from the data alone (a mask)."""

    reference: str
    input: Expression
    positions: tuple[int, ...]
    order: int = field(default_factory=_next)


@dataclass(frozen=True, eq=False)
class Routed:
    """A matrix over the positions for each input, from the data alone (the adjacency of a graph)."""

    reference: str
    input: Expression
    positions: tuple[int, ...]
    order: int = field(default_factory=_next)


@dataclass(frozen=True, eq=False)
class Part:
    """Channels `first` to `last` of another expression, of which this one has the law."""

    whole: Expression
    first: int
    last: int


@dataclass(frozen=True, eq=False)
class Attended:
    """Attention whose logits become deterministic: A(x) v(x), A = f(gain · E[q kᵀ]).

    `mechanism` takes logits (..., from, to) to weights; `masks` name data that it needs.
    """

    query: Expression
    key: Expression
    value: Expression
    gain: float
    mechanism: Callable[[Tensor, tuple[Tensor, ...]], Tensor]
    masks: tuple[str, ...]
    positions: tuple[int, ...]
    heads: Heads | None = None
    part: Part | None = None
    order: int = field(default_factory=_next)


@dataclass(frozen=True, eq=False)
class RandomlyAttended:
    """Attention with Gaussian logits used as they are, gain · q kᵀ v, of independent q, k and v."""

    query: Expression
    key: Expression
    value: Expression
    gain: float
    positions: tuple[int, ...]
    heads: Heads | None = None
    part: Part | None = None
    order: int = field(default_factory=_next)


@dataclass(frozen=True, eq=False)
class Point:
    """A function applied to each channel of a Gaussian signal."""

    activation: Activation
    input: Expression
    positions: tuple[int, ...]
    order: int = field(default_factory=_next)


@dataclass(frozen=True, eq=False)
class Normalized:
    """A signal over its root mean square over channels and the axes `over`; centered first if asked.

    The channels of each of the `groups` have statistics of their own, with the same limit.
    """

    input: Expression
    over: tuple[int, ...]
    center: bool
    eps: float
    positions: tuple[int, ...]
    groups: int = 1
    part: Part | None = None
    order: int = field(default_factory=_next)


@dataclass(frozen=True, eq=False)
class Dropped:
    """Dropout in training: each value kept with probability `keep` and divided by it.

    `mask` tells one dropout from another; parts of the same channels have the same mask.
    """

    input: Expression
    keep: float
    positions: tuple[int, ...]
    mask: int = field(default_factory=_next)
    span: tuple[int, int] | None = None
    order: int = field(default_factory=_next)


@dataclass(frozen=True, eq=False)
class Product:
    """Channel by channel, of two signals that are independent or jointly Gaussian."""

    left: Expression
    right: Expression
    positions: tuple[int, ...]
    order: int = field(default_factory=_next)


Expression = (
    Raw
    | Weighted
    | Parameter
    | Sum
    | Mapped
    | Gained
    | Routed
    | Attended
    | RandomlyAttended
    | Point
    | Normalized
    | Dropped
    | Product
)


def children(e: Expression) -> tuple[Expression, ...]:
    """The expressions that `e` is made of."""
    match e:
        case Raw() | Parameter():
            return ()
        case Weighted():
            return tuple(part for _, part in e.inputs)
        case Sum():
            return tuple(term for _, term in e.terms)
        case Attended() | RandomlyAttended():
            return (e.query, e.key, e.value)
        case Product():
            return (e.left, e.right)
        case _:
            return (e.input,)


def inherits(e: Expression) -> tuple[Expression, ...]:
    """The expressions whose channels `e` takes over one by one: it depends on what they depend on."""
    match e:
        case Raw() | Parameter() | Weighted():
            return ()
        case Attended():
            return (e.value,)
        case _:
            return children(e)


def ordered(root: Expression) -> list[Expression]:
    """All expressions below and with `root`, each after what it is made of."""
    found: dict[int, Expression] = {}
    stack = [root]
    while stack:
        e = stack.pop()
        if e.order not in found:
            found[e.order] = e
            stack.extend(children(e))
    return [found[number] for number in sorted(found)]


def roots(e: Expression) -> frozenset[Root]:
    """The weights and data that the channels of `e` depend on, one by one."""
    return frozenset(root for leaf in _closure(e) if not inherits(leaf) for root in _roots(leaf))


def _closure(e: Expression) -> list[Expression]:
    found: dict[int, Expression] = {}
    stack = [e]
    while stack:
        one = stack.pop()
        if one.order not in found:
            found[one.order] = one
            stack.extend(inherits(one))
    return list(found.values())


def _roots(leaf: Expression) -> tuple[Root, ...]:
    if isinstance(leaf, Raw):
        return (
            ("data", None),
        )  # all of the data is given: no part of it is independent of another
    assert isinstance(leaf, Weighted | Parameter)
    weights = (leaf.weight, leaf.rows)
    if isinstance(leaf, Parameter) or leaf.shift is None:
        return (weights,)
    return (weights, (f"bias {leaf.shift}", leaf.rows))


def independent(a: Expression, b: Expression) -> bool:
    """Whether no channel of `a` shares weights or data with one of `b`."""
    return not roots(a) & roots(b)


def moves_positions(e: Expression) -> bool:
    """Whether positions were mixed or weighted since the last weights."""
    return any(
        isinstance(one, Routed | Attended | RandomlyAttended)
        or (isinstance(one, Mapped) and not one.map.keeps)
        for one in _closure(e)
    )


def is_gaussian(e: Expression) -> bool:
    """Whether the signal is Gaussian given the data, jointly with every other that is."""
    match e:
        case Weighted():
            return not e.finite
        case Parameter():
            return True
        case Raw() | Point() | Dropped() | Product() | RandomlyAttended():
            return False
        case Attended():
            return is_gaussian(e.value)
        case _:
            return all(is_gaussian(part) for part in children(e))


def is_centered(e: Expression) -> bool:
    """Whether the mean over channels is zero for certain."""
    if is_gaussian(e):
        return True
    match e:
        case Weighted() | RandomlyAttended():
            return True
        case Normalized():
            return (e.center and not e.over) or is_centered(e.input)
        case Sum() | Mapped() | Gained() | Routed() | Dropped():
            return all(is_centered(part) for part in children(e))
        case Attended():
            return is_centered(e.value)
        case Product():
            return independent(e.left, e.right) and (is_centered(e.left) or is_centered(e.right))
        case _:
            return False


def as_function(e: Expression) -> tuple[Callable[[Tensor], Tensor], Expression] | None:
    """`e` as a function of one Gaussian signal, channel by channel, if it is one."""
    if is_gaussian(e):
        return _multiple(e)
    match e:
        case Point():
            inner = as_function(e.input)
            if inner is None or inner[1] is e.input:
                return e.activation, e.input
            function, base = inner
            return (lambda u: e.activation(function(u))), base
        case Sum():
            parts = [(c, as_function(term)) for c, term in e.terms]
            if any(part is None for _, part in parts):
                return None
            bases = {part[1].order: part[1] for _, part in parts if part is not None}
            if len(bases) != 1:
                return None
            functions = [(c, part[0]) for c, part in parts if part is not None]
            return (lambda u: sum_of(functions, u)), next(iter(bases.values()))
        case Product():
            left, right = as_function(e.left), as_function(e.right)
            if left is None or right is None or left[1] is not right[1]:
                return None
            return (lambda u: left[0](u) * right[0](u)), left[1]
        case _:
            return None


def _multiple(e: Expression) -> tuple[Callable[[Tensor], Tensor], Expression]:
    """A Gaussian signal as a number times another that is not itself such a multiple."""
    factor, base = 1.0, e
    while isinstance(base, Sum) and len(base.terms) == 1:
        factor, base = factor * base.terms[0][0], base.terms[0][1]
    return (lambda u: u) if base is e else (lambda u: factor * u), base


def sum_of(functions: list[tuple[float, Callable[[Tensor], Tensor]]], u: Tensor) -> Tensor:
    """Σ c f(u)."""
    return torch.stack([c * f(u) for c, f in functions]).sum(0)


def size(e: Expression) -> int:
    """The number of positions."""
    return prod(e.positions)
