"""Moments of two signals jointly, E[a(x) b(x')], and the inner product of their gradients.

Both follow from the expressions by recursion. Linear operations come out of the expectation; different
weights are independent; a Gaussian a and a function of a Gaussian g have E[a φ(g)] = E[a g] E[φ'(g)]
(Stein); and two functions of Gaussians have a two-dimensional integral. None stands for zero.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from net2gp.limits.duals.activations import UnsupportedLayer
from net2gp.limits.duals.quadrature import mixed_dual
from net2gp.limits.moments.evaluation import Evaluation, Pair
from net2gp.limits.moments.weight_moments import added, both, through_weights
from net2gp.limits.signals import expressions as ex
from net2gp.limits.signals.expressions import Expression

Means = tuple[Tensor, Tensor]


def cross(run: Evaluation, a: Expression, b: Expression, full: bool) -> Pair | None:
    """Return the moments of a at x and b at x', or None if they vanish.

    The axes are the positions of a, the positions of b, and the pairs.
    """
    if a is b:
        return run.get(a, full)
    # without positions there is one kind of moments, which must not be computed twice under two keys
    full = full and bool(a.positions or b.positions)
    key = (a.order, b.order, full)
    if key not in run.joint:
        run.joint[key] = _cross(run, a, b, full)
    return run.joint[key]


def _cross(run: Evaluation, a: Expression, b: Expression, full: bool) -> Pair | None:
    if ex.independent(a, b):
        return _of_means(run, a, b, full)
    # before linear operations are taken out, since Stein needs no integral for any Gaussian signal
    if isinstance(a, ex.Point) and ex.is_gaussian(b):
        return _stein(run, a, b, full, left=True)
    if isinstance(b, ex.Point) and ex.is_gaussian(a):
        return _stein(run, b, a, full, left=False)
    # the later signal may contain the earlier one, never the reverse: taking the later one apart first
    # ends at a signal with itself, whose moments are known
    later_first = (True, False) if a.order > b.order else (False, True)
    for left in later_first:
        e = a if left else b
        if _is_linear(e) and not isinstance(e, ex.Dropped):
            return _expanded(run, a, b, full, left)
    # masks come out last of all linear operations: whether two masks are the same is only known when
    # both signals have been reduced to them
    if isinstance(a, ex.Dropped) or isinstance(b, ex.Dropped):
        return _dropped(run, a, b, full)
    if isinstance(a, ex.Raw) and isinstance(b, ex.Raw):
        return _two_tensors(run, a, b, full)
    if isinstance(a, ex.Weighted) and isinstance(b, ex.Weighted):
        return _shared_weights(run, a, b, full)
    if isinstance(a, ex.Point) and isinstance(b, ex.Point):
        return _two_functions(run, a, b, full)
    raise UnsupportedLayer(
        f"no infinite-width rule for {type(a).__name__} and {type(b).__name__} signals that share weights. "
        "Use monte_carlo_kernel(network)."
    )


def _two_tensors(run: Evaluation, a: ex.Raw, b: ex.Raw, full: bool) -> Pair:
    """Compute x·y'/C between two tensors of the data with the same number of channels."""
    x = run.left[a.reference][:, :, a.first : a.last]
    y = (run.left if run.right is None else run.right)[b.reference][:, :, b.first : b.last]
    wide = full or not (a.positions or b.positions)
    if x.shape[-1] != y.shape[-1] or a.tokens != b.tokens:
        raise UnsupportedLayer(
            "no infinite-width rule for weights shared between data of different channels. "
            "Use monte_carlo_kernel(network)."
        )
    if a.tokens:
        one, other = run.on_left(x[..., 0], 1, wide), run.on_right(y[..., 0], 1, wide)
        inner = (one == other).to(run.prior.dtype)
    else:
        names = (
            ("snc,tnc->stn" if wide else "snc,snc->sn")
            if run.zipped
            else ("snc,tmc->stnm" if wide else "snc,smc->snm")
        )
        inner = torch.einsum(names, x / x.shape[-1], y)
    pairs = inner.shape[2:] if wide else inner.shape[1:]
    shape = (*a.positions, *(b.positions if full else ()))
    return inner.reshape(*shape, *pairs), None


def _is_linear(e: Expression) -> bool:
    return isinstance(
        e, ex.Sum | ex.Mapped | ex.Gained | ex.Routed | ex.Attended | ex.Normalized | ex.Dropped
    )


def _of_means(run: Evaluation, a: Expression, b: Expression, full: bool) -> Pair | None:
    """Return the product of the means, which is the joint moment of independent signals.

    Its tangent kernel is zero, since no weight changes both signals.
    """
    if ex.is_centered(a) or ex.is_centered(b):
        return None
    one, other = mean(run, a), mean(run, b)
    if one is None or other is None:
        return None
    product = run.on_left(one[0], len(b.positions), full) * run.on_right(
        other[1], len(a.positions), full
    )
    return product, None


def _expanded(run: Evaluation, a: Expression, b: Expression, full: bool, left: bool) -> Pair | None:
    """Take the outermost linear operation of one side out of the expectation."""
    e = a if left else b
    if isinstance(e, ex.Sum):
        return _sum(run, e, b if left else a, full, left)
    inner = ex.inherits(e)[0]
    # an operation that mixes positions needs all pairs of them, even if only equal ones are wanted after it
    if isinstance(e, ex.Gained | ex.Normalized) or (isinstance(e, ex.Mapped) and e.map.keeps):
        wide = full
    else:
        wide = True
    found = cross(run, inner, b, wide) if left else cross(run, a, inner, wide)
    if found is None:
        return None
    other = b if left else a
    moved = both(found, lambda t: _one_side(run, e, t, other, wide, left))
    if isinstance(e, ex.Normalized) and e.center and mean(run, inner) is not None:
        moved = _recentered(run, e, moved, other, full, left)
    if wide and not full and a.positions:
        return both(moved, lambda t: run.equal_positions(t, a))
    return moved


def _dropped(run: Evaluation, a: Expression, b: Expression, full: bool) -> Pair | None:
    """Take dropout masks out of the expectation.

    Different masks are independent with mean one, and drop out. The square of a mask has the mean 1/keep,
    which counts where a value meets itself: at the same position of the same point.
    """
    if isinstance(a, ex.Dropped) and isinstance(b, ex.Dropped):
        if (a.mask, a.span) == (b.mask, b.span):
            found = cross(run, a.input, b.input, full)
            return None if found is None else run.masked(found, a, full)
        # the signal with the older mask may lie inside the other one, so the younger mask comes out first
        left = a.mask > b.mask
    else:
        left = isinstance(a, ex.Dropped)
    e = a if left else b
    assert isinstance(e, ex.Dropped)
    return cross(run, e.input, b, full) if left else cross(run, a, e.input, full)


def _sum(run: Evaluation, e: ex.Sum, other: Expression, full: bool, left: bool) -> Pair | None:
    cov: Tensor | None = None
    ntk: Tensor | None = None
    for c, term in e.terms:
        found = cross(run, term, other, full) if left else cross(run, other, term, full)
        if found is None:
            continue
        cov = c * found[0] if cov is None else cov + c * found[0]
        ntk = added(ntk, None if found[1] is None else c * found[1])
    return None if cov is None else (cov, ntk)


def _one_side(
    run: Evaluation, e: Expression, t: Tensor, other: Expression, full: bool, left: bool
) -> Tensor:
    """Apply a linear operation to the positions of x (left) or x' of joint moments."""
    rank = len(other.positions)
    place = run.on_left if left else run.on_right
    number = 0 if left else 1
    match e:
        case ex.Mapped():
            return e.map(t, 0 if left or not full else rank)
        case ex.Gained():
            data = run.left if left or run.right is None else run.right
            gain = data[e.reference][..., 0].reshape(*e.positions, -1)
            return t * place(gain, rank, full)
        case ex.Normalized():
            return t * place(run.side("gain", e)[number], rank, full)
        case ex.Routed():
            data = run.left if left or run.right is None else run.right
            return _matrix_on_side(run, e, t, data[e.reference].movedim(1, -1), other, left)
        case _:
            return _matrix_on_side(run, e, t, run.side("attention", e)[number], other, left)


def _matrix_on_side(
    run: Evaluation, e: Expression, t: Tensor, matrix: Tensor, other: Expression, left: bool
) -> Tensor:
    """Multiply the positions of one side by A(x), given as (to, from, n)."""
    pairs = t.shape[t.dim() - (1 if run.zipped else 2) :]
    matrix = matrix.movedim(-1, 0)
    if left:
        flat = t.reshape(matrix.shape[-1], ex.size(other), *pairs).movedim((0, 1), (-2, -1))
        moved = (matrix if run.zipped else matrix[:, None]) @ flat
        shape = (*e.positions, *other.positions)
    else:
        flat = t.reshape(ex.size(other), matrix.shape[-1], *pairs).movedim((0, 1), (-2, -1))
        moved = flat @ matrix.mT
        shape = (*other.positions, *e.positions)
    return moved.movedim((-2, -1), (0, 1)).reshape(*shape, *pairs)


def _recentered(
    run: Evaluation,
    e: ex.Normalized,
    pair: Pair,
    other: Expression,
    full: bool,
    left: bool,
) -> Pair:
    """Compute E[(a − m) b] g = E[a b] g − m g E[b], where m is the mean and g the gain of a norm."""
    b = mean(run, other)
    if b is None:
        return pair
    rank = len(other.positions)
    shift = [run.side("middle", e)[number] * run.side("gain", e)[number] for number in range(2)]
    if left:
        taken = run.on_left(shift[0], rank, full) * run.on_right(b[1], len(e.positions), full)
    else:
        taken = run.on_left(b[0], len(e.positions), full) * run.on_right(shift[1], rank, full)
    return pair[0] - taken, pair[1]


def _shared_weights(run: Evaluation, a: ex.Weighted, b: ex.Weighted, full: bool) -> Pair | None:
    """Compute Cov(W u + c, W v + c) = σ_w² E[u v] + σ_b², with the terms that are shared."""
    if a.rows != b.rows:
        return None  # channels are paired by number: other rows are other weights
    biased = a.shift is not None and a.shift == b.shift
    if a.weight != b.weight:
        return _shared_biases(run, a, b, full) if biased else None
    parts, others = ([fraction for fraction, _ in e.inputs] for e in (a, b))
    if (a.window, a.axis, parts) != (b.window, b.axis, others) or a.local:
        raise UnsupportedLayer(
            f"no infinite-width rule for the weights '{a.weight}', which are shared between layers of "
            "different geometry. Use monte_carlo_kernel(network)."
        )
    total: Pair | None = None
    for (fraction, one), (_, other) in zip(a.inputs, b.inputs, strict=True):
        found = cross(run, one, other, full)
        if found is None:
            continue
        cov, ntk = fraction * found[0], None if found[1] is None else fraction * found[1]
        total = (cov, ntk) if total is None else (total[0] + cov, added(total[1], ntk))
    if total is None:
        if not biased:
            return None
        total = (_zeros(run, a.inputs[0][1], b.inputs[0][1], full), None)
    return through_weights(run, a, total, full, biased)


def _shared_biases(run: Evaluation, a: ex.Weighted, b: ex.Weighted, full: bool) -> Pair:
    """Return σ_b², the covariance of layers with different weights and the same biases."""
    if a.local or b.local:
        raise UnsupportedLayer(
            f"no infinite-width rule for biases of '{a.weight}' that differ between positions and are shared "
            "with other weights. Use monte_carlo_kernel(network)."
        )
    zeros = _zeros(run, a, b, full)
    cov = zeros + run.prior.bias(a.bias)
    if not run.tangent:
        return cov, None
    return cov, zeros + 1 if run.prior.standard(a.weight) else cov


def _zeros(run: Evaluation, one: Expression, other: Expression, full: bool) -> Tensor:
    example = next(iter(run.left.values()))
    pairs = [example.shape[1]]
    if run.right is not None:
        pairs.append(next(iter(run.right.values())).shape[1])
    shape = (*one.positions, *(other.positions if full else ()), *pairs)
    return torch.zeros(shape, dtype=run.prior.dtype, device=example.device)


def _two_functions(run: Evaluation, a: ex.Point, b: ex.Point, full: bool) -> Pair | None:
    """Compute E[φ(u) ψ(v)], and the tangent kernel times E[φ'(u) ψ'(v)]."""
    found = cross(run, a.input, b.input, full)
    # these write the variances into the profile while points meet themselves; runs over pairs read them
    run.variance(a.input)
    run.variance(b.input)
    one = run.on_left(run.side("variance", a.input)[0], len(b.positions), full)
    other = run.on_right(run.side("variance", b.input)[1], len(a.positions), full)
    if found is None:
        found = (torch.zeros_like(one * other), None)
    cov, ntk = found
    slope = run.tangent and ntk is not None
    if a.activation is b.activation or a.activation == b.activation:
        new, factor = a.activation.dual(cov, one, other, slope)
    else:
        new, factor = mixed_dual(a.activation, b.activation, cov, one, other, slope)
    return new, None if ntk is None or factor is None else ntk * factor


def _stein(run: Evaluation, e: ex.Point, other: Expression, full: bool, left: bool) -> Pair | None:
    """Compute E[φ(g) b] = E[φ'(g)] E[g b] by Stein's lemma.

    A jump of φ is a delta in E[φ'], but the gradients of a network do not see it, so that the tangent
    kernel has the mean slope without jumps.
    """
    found = cross(run, e.input, other, full) if left else cross(run, other, e.input, full)
    if found is None:
        return None
    run.variance(e.input)
    var = run.side("variance", e.input)[0 if left else 1]
    place = run.on_left if left else run.on_right
    rank = len(other.positions)
    cov = found[0] * place(e.activation.mean_slope(var), rank, full)
    if found[1] is None:
        return cov, None
    gradient = getattr(e.activation, "mean_gradient", e.activation.mean_slope)
    return cov, found[1] * place(gradient(var), rank, full)


def mean(run: Evaluation, e: Expression) -> Means | None:
    """Return the means over channels at x and x', (*positions, n) and (*positions, m), or None for zero."""
    if ex.is_centered(e):
        return None
    match e:
        case ex.Point():
            run.variance(e.input)
            return _twice(run.side("variance", e.input), e.activation.mean)
        case ex.Raw():
            return _twice(run.raw(e), lambda t: t.mean(-1).reshape(*e.positions, -1))
        case ex.Sum():
            return _mean_of_sum(run, e)
        case ex.Dropped():
            return mean(run, e.input)
        case ex.Mapped():
            inner = mean(run, e.input)
            return None if inner is None else _twice(inner, e.map)
        case ex.Product() if ex.independent(e.left, e.right):
            one, other = mean(run, e.left), mean(run, e.right)
            if one is None or other is None:
                return None
            return one[0] * other[0], one[1] * other[1]
        case ex.Gained():
            inner = mean(run, e.input)
            if inner is None:
                return None
            gain = run.left[e.reference][..., 0].reshape(*e.positions, -1)
            if run.right is None:
                return inner[0] * gain, inner[1] * gain
            return inner[0] * gain, inner[1] * run.right[e.reference][..., 0].reshape(
                *e.positions, -1
            )
        case ex.Attended():
            inner = mean(run, e.value)
            if inner is None:
                return None
            first, second = run.side("attention", e)
            return _routed_mean(first, inner[0], e), _routed_mean(second, inner[1], e)
        case _:
            raise UnsupportedLayer(
                f"no infinite-width rule for the mean of a {type(e).__name__} signal. "
                "Use monte_carlo_kernel(network)."
            )


def _twice(pair: Means, function: Callable[[Tensor], Tensor]) -> Means:
    # where each point meets itself both sides are one tensor, which is computed once
    first = function(pair[0])
    return first, first if pair[1] is pair[0] else function(pair[1])


def _routed_mean(matrix: Tensor, m: Tensor, e: Expression) -> Tensor:
    flat = m.reshape(matrix.shape[1], m.shape[-1])
    return (matrix * flat).sum(1).reshape(*e.positions, m.shape[-1])


def _mean_of_sum(run: Evaluation, e: ex.Sum) -> Means | None:
    total: Means | None = None
    for c, term in e.terms:
        found = mean(run, term)
        if found is None:
            continue
        found = (c * found[0], c * found[1])
        total = found if total is None else (total[0] + found[0], total[1] + found[1])
    return total
