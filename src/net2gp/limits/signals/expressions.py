"""Signals of an infinitely wide network as expressions: what each depends on, and how.

A signal is a vector of infinitely many channels, at each position of each input. Its channels are
independent copies of one random variable, which is a function of Gaussian variables; an expression says
which function. Two signals that share weights are dependent, and their joint moments follow from the
expressions, so that sums and products of dependent branches come out right.

Every expression has the shape of its `positions` and an `order`, a number that is larger than the orders of
its parts. It identifies the expression (two equal-looking ones are different signals) and sorts a program.

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
"""What channels depend on: the name of weights, biases or data, and which rows of them (None: all)."""


def _next() -> int:
    return next(_ORDER)


@dataclass(frozen=True, eq=False)
class Raw:
    """Channels `first` to `last` of a tensor of the data, which are deterministic and finitely many.

    The moments are means over these channels, x·x'/C. If `tokens`, the data are integers, and the moments
    say whether two of them are equal.
    """

    reference: str
    first: int
    last: int
    positions: tuple[int, ...]
    tokens: bool = False
    order: int = field(default_factory=_next)


@dataclass(frozen=True, eq=False)
class Weighted:
    """Weights times a signal, W u, which is Gaussian by the central limit theorem.

    Expressions with the same `weight` (and `rows`) share their weights, and expressions with the same
    `shift` share their biases.

    Args:
        weight: The name of the weights.
        inputs: The blocks of channels that the weights see, each with its fraction of the channels.
        fan_in: The module's own fan-in, for the standard parameterization.
        bias: The name of the biases' variance in the prior; None without biases.
        window: The window of a convolution, which averages positions.
        averaged: The axes of positions that were flattened into the channels, in the order of `axis`.
        rows: Which rows of the weights count, from first to before last; None for all.
        local: Whether each position has weights of its own.
        finite: Whether each channel sees finitely many others (depthwise); then it is not Gaussian.
        shift: The name of the biases.
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
    """A parameter as a signal of its own (positional embedding, class token), with a value per position.

    `shape` is the shape with which it is used, (1, ...), and `channel` its axis of channels.
    """

    weight: str
    positions: tuple[int, ...]
    rows: tuple[int, int] | None = None
    shape: tuple[int, ...] = ()
    channel: int = -1
    order: int = field(default_factory=_next)


@dataclass(frozen=True, eq=False)
class Sum:
    """A sum Σ coefficient · term."""

    terms: tuple[tuple[float, Expression], ...]
    positions: tuple[int, ...]
    order: int = field(default_factory=_next)


@dataclass(frozen=True, eq=False)
class Mapped:
    """A linear map of the positions, which is the same for every input."""

    map: PositionMap
    input: Expression
    positions: tuple[int, ...]
    order: int = field(default_factory=_next)


@dataclass(frozen=True, eq=False)
class Gained:
    """A signal times a factor per position and input, which is computed from the data alone (a mask)."""

    reference: str
    input: Expression
    positions: tuple[int, ...]
    order: int = field(default_factory=_next)


@dataclass(frozen=True, eq=False)
class Routed:
    """A matrix over the positions per input, from the data alone (a graph's adjacency), times a signal."""

    reference: str
    input: Expression
    positions: tuple[int, ...]
    order: int = field(default_factory=_next)


@dataclass(frozen=True, eq=False)
class Part:
    """The channels `first` to `last` of the expression `whole`; only a finite draw needs to know this."""

    whole: Expression
    first: int
    last: int


@dataclass(frozen=True, eq=False)
class Attended:
    """Attention whose logits become deterministic: A(x) v(x) with A = f(gain · E[q kᵀ]).

    `mechanism` maps logits (..., from, to) to weights; `masks` are the names of data that it needs.
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
    """Attention gain · q kᵀ v with Gaussian logits and no softmax, for independent q, k and v."""

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
    """A signal, centered if `center`, divided by its root mean square over channels and the axes `over`.

    All `groups` of channels have the same statistics in the limit.
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
    """Dropout in training: each value is kept with probability `keep` and divided by it.

    `mask` identifies the dropout, and `span` the part of its channels.
    """

    input: Expression
    keep: float
    positions: tuple[int, ...]
    mask: int = field(default_factory=_next)
    span: tuple[int, int] | None = None
    order: int = field(default_factory=_next)


@dataclass(frozen=True, eq=False)
class Product:
    """The product, channel by channel, of two signals that are independent or jointly Gaussian."""

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
    """Return the expressions that `e` is made of."""
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
    """Return the expressions on whose channels `e` depends one by one.

    Weights mix infinitely many channels, so their output depends on the weights and on no single channel.
    """
    match e:
        case Raw() | Parameter() | Weighted():
            return ()
        case Attended():
            return (e.value,)
        case _:
            return children(e)


def ordered(root: Expression) -> list[Expression]:
    """Return `root` and all expressions below it, each after its parts."""
    found: dict[int, Expression] = {}
    stack = [root]
    while stack:
        e = stack.pop()
        if e.order not in found:
            found[e.order] = e
            stack.extend(children(e))
    return [found[number] for number in sorted(found)]


def roots(e: Expression) -> frozenset[Root]:
    """Return the weights and data that the channels of `e` depend on, one by one."""
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
        # all of the data is given, so no part of it counts as independent of another
        return (("data", None),)
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
    """Whether the signal is Gaussian given the data, jointly with every other Gaussian signal."""
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
    """Whether the mean over channels is known to be zero."""
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
    """Return `e` as a function of one Gaussian signal, channel by channel, or None if it is not one."""
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
    """Return a Gaussian signal as a multiple of another, so that φ(u) and ψ(2u) are functions of one u."""
    factor, base = 1.0, e
    while isinstance(base, Sum) and len(base.terms) == 1:
        factor, base = factor * base.terms[0][0], base.terms[0][1]
    return (lambda u: u) if base is e else (lambda u: factor * u), base


def sum_of(functions: list[tuple[float, Callable[[Tensor], Tensor]]], u: Tensor) -> Tensor:
    """Compute Σ c f(u)."""
    return torch.stack([c * f(u) for c, f in functions]).sum(0)


def size(e: Expression) -> int:
    """Return the number of positions."""
    return prod(e.positions)
