"""The second moments of every signal of a network, and its tangent kernel, between two batches.

Moments come as a pair (covariance, tangent kernel) of tensors (*positions of x, *positions of x', *pairs),
or (*positions, *pairs) where only equal positions matter. The pairs are (n, m), for all points of x against
all points of x', or (n,), for each point with itself. Runs of the second kind come first, since they
compute the `profile`: what the functions need of a single input (variances, norms, attention weights).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from net2gp.limits.duals.power_forms import ABReLU
from net2gp.limits.prior import Prior
from net2gp.limits.signals import expressions as ex
from net2gp.limits.signals.expressions import Expression

Pair = tuple[Tensor, Tensor | None]
Profile = dict[tuple[str, int], Tensor]


@dataclass(frozen=True, eq=False)
class Program:
    """An expression with all its parts in order, and where all pairs of positions are needed.

    Args:
        output: The expression.
        nodes: All expressions, each after its parts.
        full: Whether all pairs of positions are needed, by the order of the expression.
        users: How many expressions use the moments of each; they are freed after the last use.
        fusible: The functions that a GPU computes in one pass with the convolution before them.
    """

    output: Expression
    nodes: tuple[Expression, ...]
    full: Mapping[int, bool]
    users: Mapping[int, int]
    fusible: frozenset[int] = frozenset()

    @staticmethod
    def of(output: Expression) -> Program:
        """Return the program that computes `output` for all pairs of its positions."""
        nodes = ex.ordered(output)
        full = dict.fromkeys((e.order for e in nodes), False)
        full[output.order] = bool(output.positions)
        users = dict.fromkeys((e.order for e in nodes), 0)
        # from the output back: whether pairs of positions are needed of a part depends on its users
        for e in reversed(nodes):
            for child, needed in zip(ex.children(e), _needs(e, full[e.order]), strict=True):
                full[child.order] = full[child.order] or (needed and bool(child.positions))
                users[child.order] += 1
        together = {e.order for e in nodes if _fusible(e, users, full)}
        if any(_joins(e) for e in nodes):
            # joint moments may ask for any signal, so that none is left out by fusion or freed early
            together = set()
            users = dict.fromkeys(users, len(nodes) + 1)
        users[output.order] += 1
        return Program(output, tuple(nodes), full, users, frozenset(together))


def _fusible(e: ex.Expression, users: dict[int, int], full: dict[int, bool]) -> bool:
    """Whether `e` is a ReLU-like function of a convolution, for all pairs of positions, and its only user."""
    if not (isinstance(e, ex.Point) and isinstance(e.activation, ABReLU)):
        return False
    w = e.input
    return (
        isinstance(w, ex.Weighted)
        and w.window is not None
        and len(w.positions) == 2
        and len(w.inputs) == 1
        and not (w.local or w.averaged or w.finite)
        and full[w.order]
        and users[w.order] == 1
        and w.window.keeps_size
    )


def _joins(e: Expression) -> bool:
    """Whether the moments of `e` need joint moments of two signals."""
    match e:
        case ex.Sum():
            terms = [term for _, term in e.terms]
            return any(
                not ex.independent(a, b) or not (ex.is_centered(a) or ex.is_centered(b))
                for number, a in enumerate(terms)
                for b in terms[:number]
            )
        case ex.Product():
            return not ex.independent(e.left, e.right)
        case ex.Attended() | ex.RandomlyAttended():
            return True
        case ex.Normalized():
            return not ex.is_gaussian(e.input)
        case _:
            return False


def _needs(e: Expression, full: bool) -> tuple[bool, ...]:
    """Return per child of `e` whether all pairs of its positions are needed."""
    parts = ex.children(e)
    match e:
        case ex.Weighted():
            return (full and not e.local,) * len(parts)
        case ex.Mapped():
            return (full or not e.map.selects,)
        case ex.Routed() | ex.Attended() | ex.RandomlyAttended():
            return (True,) * len(parts)
        case ex.Sum() | ex.Product():
            moved = _joins(e) and any(ex.moves_positions(part) for part in parts)
            return (full or moved,) * len(parts)
        case _:
            return (full,) * len(parts)


@dataclass(eq=False)
class Evaluation:
    """One run of a program on a pair of batches.

    Args:
        program: The program.
        prior: The variances of the weights.
        tangent: Whether to compute the tangent kernel too.
        left: The data of x by reference, (positions, n, channels).
        right: The data of x', likewise; None for each point of x with itself.
        profiles: What was found about single inputs of x and of x', in a run over pairs.
        profile: What this run finds about single inputs, in a run of each point with itself.
        memory: The moments found so far, by the order of the expression.
        joint: The joint moments found so far, by the orders and whether for all pairs of positions.
        compute: How moments are computed, for signals that need all pairs of positions after all.
    """

    program: Program
    prior: Prior
    tangent: bool
    left: Mapping[str, Tensor]
    right: Mapping[str, Tensor] | None = None
    profiles: tuple[Profile, Profile] | None = None
    profile: Profile = field(default_factory=dict)
    memory: dict[int, Pair] = field(default_factory=dict)
    joint: dict[tuple[int, int, bool], Pair | None] = field(default_factory=dict)
    compute: Callable[[Evaluation, Expression, bool], Pair] | None = None

    @property
    def zipped(self) -> bool:
        """Whether the pairs are each point with itself."""
        return self.right is None

    def get(self, e: Expression, full: bool) -> Pair:
        """Return the moments of a signal that was computed before, for all pairs or for equal positions."""
        cov, ntk = self.memory[e.order]
        if self.program.full[e.order] and not full:
            return self.equal_positions(cov, e), None if ntk is None else self.equal_positions(
                ntk, e
            )
        if full and e.positions and not self.program.full[e.order]:
            return self._all_pairs(e)
        return cov, ntk

    def _all_pairs(self, e: Expression) -> Pair:
        """Return moments for all pairs of positions of a signal that was planned for equal ones only.

        Signals that share weights at different positions ask for them, such as steps of a recurrent network.
        """
        key = (e.order, e.order, True)
        if key not in self.joint:
            assert self.compute is not None
            self.joint[key] = self.compute(self, e, True)
        found = self.joint[key]
        assert found is not None
        return found

    def equal_positions(self, t: Tensor, e: Expression) -> Tensor:
        """Pick equal positions: (*S, *S, *pairs) → (*S, *pairs)."""
        count = ex.size(e)
        pairs = t.shape[2 * len(e.positions) :]
        flat = t.reshape(count, count, *pairs)
        return torch.diagonal(flat, 0, 0, 1).movedim(-1, 0).reshape(*e.positions, *pairs)

    def with_equal_positions(self, t: Tensor, exact: Tensor, e: Expression) -> Tensor:
        """Replace the entries of equal positions by exact ones.

        The angle between a vector and itself is zero, but rounding of a correlation near one is not.
        """
        count = ex.size(e)
        pairs = t.shape[2 * len(e.positions) :]
        flat = t.reshape(count, count, *pairs)
        inner = exact.reshape(count, *pairs).movedim(0, -1)
        return torch.diagonal_scatter(flat, inner, 0, 0, 1).reshape(t.shape)

    def masked(self, pair: Pair, e: ex.Dropped, full: bool) -> Pair:
        """Return moments under one dropout mask: where a value meets itself they are divided by `keep`."""
        if not self.zipped:
            return pair
        cov, ntk = (None if t is None else self._masked(t, e, full) for t in pair)
        assert cov is not None
        return cov, ntk

    def _masked(self, t: Tensor, e: ex.Dropped, full: bool) -> Tensor:
        if not (full and e.positions):
            return t / e.keep
        return self.with_equal_positions(t, self.equal_positions(t, e) / e.keep, e)

    def side(self, kind: str, e: Expression) -> tuple[Tensor, Tensor]:
        """Return an entry of the profiles of x and x': (..., n) and (..., m)."""
        if self.profiles is None:
            found = self.profile[kind, e.order]
            return found, found
        return self.profiles[0][kind, e.order], self.profiles[1][kind, e.order]

    def on_left(self, t: Tensor, other_rank: int, full: bool) -> Tensor:
        """Return a tensor (*positions, n) of x, shaped to broadcast with moments."""
        shape = (*t.shape[:-1], *(1,) * (other_rank if full else 0), t.shape[-1])
        return t.reshape(shape if self.zipped else (*shape, 1))

    def on_right(self, t: Tensor, other_rank: int, full: bool) -> Tensor:
        """Return a tensor (*positions, m) of x', shaped to broadcast with moments."""
        ones = (1,) * (other_rank if full else 0)
        pairs = (t.shape[-1],) if self.zipped else (1, t.shape[-1])
        return t.reshape(*ones, *t.shape[:-1], *pairs)

    def both_sides(self, kind: str, e: Expression, full: bool) -> tuple[Tensor, Tensor]:
        """Return an entry of the profiles of x and x', shaped to broadcast with moments of e."""
        rank = len(e.positions)
        one, other = self.side(kind, e)
        return self.on_left(one, rank, full), self.on_right(other, rank, full)

    def needs_profile(self, kind: str, e: Expression) -> bool:
        """Whether this entry of the profile is still to be computed in this run."""
        return self.zipped and (kind, e.order) not in self.profile

    def variance(self, e: Expression) -> None:
        """Write the variances of `e` into the profile, in a run over each point with itself."""
        if self.needs_profile("variance", e):
            self.profile["variance", e.order] = self.get(e, False)[0]

    def raw(self, e: ex.Raw) -> tuple[Tensor, Tensor]:
        """Return the channels of the data at its positions: (S, n, C) and (S, m, C)."""
        one = self.left[e.reference][:, :, e.first : e.last]
        if self.right is None:
            return one, one
        return one, self.right[e.reference][:, :, e.first : e.last]


def flat_positions(t: Tensor, rank: int, other_rank: int) -> Tensor:
    """Flatten the positions of both sides: (*S, *S', *pairs) → (S, S', *pairs)."""
    return t.reshape(
        prod(t.shape[:rank]),
        prod(t.shape[rank : rank + other_rank]),
        *t.shape[rank + other_rank :],
    )
