"""One function per kind of expression: its second moments from the moments of its parts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from net2gp.limits import gpu_kernels
from net2gp.limits.moments import fused_convolution
from net2gp.limits.moments.evaluation import Evaluation, Pair, flat_positions
from net2gp.limits.moments.joint_moments import cross, mean
from net2gp.limits.moments.weight_moments import added, both, sum_of, through_weights
from net2gp.limits.signals import expressions as ex
from net2gp.limits.signals.expressions import Expression


def raw(run: Evaluation, e: ex.Raw, full: bool) -> Pair:
    """Compute x·x'/C over the channels of the data, or whether tokens are equal."""
    x, y = run.raw(e)
    rank = len(e.positions)
    if e.tokens:
        x, y = x[..., 0], y[..., 0]
        one, other = run.on_left(x, 1, full), run.on_right(y, 1, full)
        equal = (one == other).to(run.prior.dtype)
        return _positions_back(equal, e, full), None
    channels = x.shape[-1]
    if run.zipped:
        if full and rank:
            inner = torch.einsum("snc,tnc->stn", x / channels, y)
        else:
            inner = (x * y).sum(-1) / channels
    elif full and rank and channels <= gpu_kernels.CHANNELS and gpu_kernels.available(x):
        inner = gpu_kernels.inner_products(x / channels, y)
    elif full and rank:
        inner = (x.reshape(-1, channels) / channels) @ y.reshape(-1, channels).T
        inner = inner.reshape(*x.shape[:2], *y.shape[:2]).permute(0, 2, 1, 3)
    else:
        inner = torch.baddbmm(x.new_zeros(1, 1, 1), x, y.mT, beta=0, alpha=1 / channels)
    return _positions_back(inner, e, full), None


def _positions_back(t: Tensor, e: Expression, full: bool) -> Tensor:
    """Split the axis of positions on each side into its own axes."""
    pairs = t.shape[2:] if full and e.positions else t.shape[1:]
    if not e.positions:
        return t.reshape(pairs if not full else t.shape[-len(pairs) :])
    return t.reshape(*e.positions, *(e.positions if full else ()), *pairs)


def weighted(run: Evaluation, e: ex.Weighted, full: bool) -> Pair:
    """Compute σ_w² E[u u'] + σ_b² for W u + b, and the tangent kernel with the parts of u, W and b."""
    wanted = full and not e.local
    parts = [(fraction, run.get(part, wanted)) for fraction, part in e.inputs]
    if len(parts) == 1:
        cov, ntk = parts[0][1]
    else:
        cov = sum_of([fraction * pair[0] for fraction, pair in parts])
        ntk = None
        for fraction, pair in parts:
            ntk = added(ntk, None if pair[1] is None else fraction * pair[1])
    return through_weights(run, e, (cov, ntk), full)


def parameter(run: Evaluation, e: ex.Parameter, full: bool) -> Pair:
    """Return the moments of one independent Gaussian vector per position, the same for every input."""
    n = next(iter(run.left.values())).shape[1]
    m = () if run.right is None else (next(iter(run.right.values())).shape[1],)
    example = next(iter(run.left.values()))
    count = ex.size(e)
    one = torch.ones(count, dtype=run.prior.dtype, device=example.device)
    square = torch.diag(one) if full and e.positions else one
    shape = (*e.positions, *(e.positions if full else ()))
    square = square.reshape(*shape, *(1,) * (1 + len(m))).expand(*shape, n, *m)
    cov = square * run.prior.weight(e.weight)
    if not run.tangent:
        return cov, None
    return cov, square if run.prior.standard(e.weight) else cov


def total(run: Evaluation, e: ex.Sum, full: bool) -> Pair:
    """Compute Σ_ij c_i c_j E[u_i u_j']."""
    cov: Tensor | None = None
    ntk: Tensor | None = None
    for c, term in e.terms:
        for d, other in e.terms:
            found = run.get(term, full) if term is other else cross(run, term, other, full)
            if found is None:
                continue
            scale = c * d
            one, two = found if scale == 1 else both(found, partial(torch.mul, scale))
            cov = one if cov is None else cov + one
            ntk = added(ntk, two)
    assert cov is not None
    return cov, ntk


def mapped(run: Evaluation, e: ex.Mapped, full: bool) -> Pair:
    """Apply the map to the positions of both sides."""
    if full or not e.map.selects:
        pair = both(run.get(e.input, True), e.map.on_both)
        if full or not e.positions:
            return pair
        return both(pair, lambda t: run.equal_positions(t, e))
    return both(run.get(e.input, False), e.map)


def gained(run: Evaluation, e: ex.Gained, full: bool) -> Pair:
    """Compute g(x) g(x') K with factors from the data."""
    one, other = gains(run, e, full)
    return both(run.get(e.input, full), lambda t: t * one * other)


def gains(run: Evaluation, e: ex.Gained, full: bool) -> tuple[Tensor, Tensor]:
    """Return the factors of both sides, shaped to broadcast."""
    rank = len(e.positions)
    one = run.left[e.reference][..., 0]
    other = one if run.right is None else run.right[e.reference][..., 0]
    return (
        run.on_left(one.reshape(*e.positions, -1), rank, full),
        run.on_right(other.reshape(*e.positions, -1), rank, full),
    )


def routed(run: Evaluation, e: ex.Routed, full: bool) -> Pair:
    """Compute A(x) K A(x')ᵀ with matrices from the data."""
    one = run.left[e.reference].movedim(1, -1)
    other = one if run.right is None else run.right[e.reference].movedim(1, -1)
    return both(run.get(e.input, True), lambda t: sandwich(run, e, t, one, other, full))


def sandwich(
    run: Evaluation, e: Expression, t: Tensor, one: Tensor, other: Tensor, full: bool
) -> Tensor:
    """Compute A(x) t A(x')ᵀ per pair of points; A(x) is (to, from, n)."""
    rank = len(ex.children(e)[-1].positions)
    t = flat_positions(t, rank, rank)
    one, other = one.movedim(-1, 0), other.movedim(-1, 0)
    if run.zipped:
        moved = one @ t.movedim(-1, 0) @ other.mT
        if not full:
            moved = moved.diagonal(dim1=-2, dim2=-1)
        moved = moved.movedim(0, -1)
    else:
        half = one[:, None] @ t.permute(2, 3, 0, 1)
        if full:
            moved = (half @ other.mT).permute(2, 3, 0, 1)
        else:
            moved = (half * other).sum(-1).permute(2, 0, 1)
    pairs = moved.shape[2:] if full else moved.shape[1:]
    return moved.reshape(*e.positions, *(e.positions if full else ()), *pairs)


def attended(run: Evaluation, e: ex.Attended, full: bool) -> Pair:
    """Compute A(x) K_v A(x')ᵀ; A comes from moments of queries and keys of one input (Hron et al., 2020)."""
    attention_weights(run, e)
    one, other = run.side("attention", e)
    return both(run.get(e.value, True), lambda t: sandwich(run, e, t, one, other, full))


def attention_weights(run: Evaluation, e: ex.Attended) -> None:
    """Write the attention matrices (to, from, n) into the profile."""
    if not run.needs_profile("attention", e):
        return
    found = run.get(e.query, True) if e.query is e.key else cross(run, e.query, e.key, True)
    rank, other = len(e.query.positions), len(e.key.positions)
    n = next(iter(run.left.values())).shape[1]
    if found is None:
        logits = torch.zeros(ex.size(e.query), ex.size(e.key), n, dtype=run.prior.dtype)
        logits = logits.to(next(iter(run.left.values())).device)
    else:
        logits = flat_positions(found[0], rank, other) * e.gain
    masks = tuple(run.left[name].movedim(1, 0) for name in e.masks)
    run.profile["attention", e.order] = e.mechanism(logits.movedim(-1, 0), masks).movedim(0, -1)


def randomly_attended(run: Evaluation, e: ex.RandomlyAttended, full: bool) -> Pair:
    """Compute K_q(p, r) Σ_{p' r'} K_k(p', r') K_v(p', r').

    Logits scaled by 1/√d are Gaussian in the limit of many heads (Hron et al., 2020).
    """
    (q, tq), (k, tk), (v, tv) = (
        run.get(e.query, full),
        run.get(e.key, True),
        run.get(e.value, True),
    )
    axes = tuple(range(2 * len(e.key.positions)))
    contracted = (k * v).sum(axes)
    scale = e.gain**2
    cov = scale * q * contracted
    if not run.tangent:
        return cov, None
    inner = added(
        None if tk is None else (tk * v).sum(axes), None if tv is None else (k * tv).sum(axes)
    )
    ntk = added(
        None if tq is None else scale * tq * contracted,
        None if inner is None else scale * q * inner,
    )
    return cov, ntk


def point(run: Evaluation, e: ex.Point, full: bool) -> Pair:
    """Compute E[φ(u) φ(u')], and the tangent kernel times E[φ'(u) φ'(u')]."""
    cov, ntk = run.get(e.input, full)
    run.variance(e.input)
    slope = run.tangent and ntk is not None
    if run.zipped and not (full and e.positions):
        new, factor = e.activation.variance(cov, slope)
    else:
        one, other = run.both_sides("variance", e.input, full and bool(e.positions))
        new, factor = e.activation.dual(cov, one, other, slope)
        if run.zipped:
            # equal positions of one point have correlation one exactly, which the dual only has to rounding
            exact, steep = e.activation.variance(run.profile["variance", e.input.order], slope)
            new = run.with_equal_positions(new, exact, e)
            factor = (
                None
                if factor is None or steep is None
                else run.with_equal_positions(factor, steep, e)
            )
    if ntk is None or factor is None:
        return new, None
    return new, ntk * factor


def normalized(run: Evaluation, e: ex.Normalized, full: bool) -> Pair:
    """Compute K / (s s'); the mean square s² over channels (and positions) is deterministic in the limit."""
    statistics(run, e)
    one, other = run.both_sides("gain", e, full and bool(e.positions))
    cov, ntk = run.get(e.input, full)
    middle = mean(run, e.input) if e.center else None
    if middle is not None:
        wide = full and bool(e.positions)
        m, m_other = run.both_sides("middle", e, wide)
        rank = len(e.positions)
        mu = run.on_left(middle[0], rank, wide)
        mu_other = run.on_right(middle[1], rank, wide)
        cov = cov - m * mu_other - mu * m_other + m * m_other
    return both((cov, ntk), lambda t: t * one * other)


def statistics(run: Evaluation, e: ex.Normalized) -> None:
    """Write 1/s, and the mean that is subtracted, into the profile."""
    if not run.needs_profile("gain", e):
        return
    square = run.get(e.input, False)[0]
    middle = mean(run, e.input) if e.center else None
    if e.over:
        square = square.mean(e.over, keepdim=True).expand_as(square)
    if middle is not None:
        m = middle[0]
        m = m.mean(e.over, keepdim=True).expand_as(m) if e.over else m
        run.profile["middle", e.order] = m
        square = square - m * m
    run.profile["gain", e.order] = torch.rsqrt(square + e.eps)


def dropped(run: Evaluation, e: ex.Dropped, full: bool) -> Pair:
    """Return the moments under masks that are drawn for each evaluation of the network.

    Only where a value meets itself do they change, by 1/keep.
    """
    return run.masked(run.get(e.input, full), e, full)


def product(run: Evaluation, e: ex.Product, full: bool) -> Pair:
    """Compute E[ab a'b'] for factors that are independent, or jointly Gaussian (Isserlis' theorem)."""
    (a, ta), (b, tb) = run.get(e.left, full), run.get(e.right, full)
    cov = a * b
    ntk = added(None if ta is None else ta * b, None if tb is None else a * tb)
    if ex.independent(e.left, e.right):
        return cov, ntk
    ab, ba = cross(run, e.left, e.right, full), cross(run, e.right, e.left, full)
    assert ab is not None
    assert ba is not None
    if run.zipped:
        equal = cross(run, e.left, e.right, False)
        assert equal is not None
        run.profile["product", e.order] = equal[0]
    one, other = run.both_sides("product", e, full and bool(e.positions))
    cov = cov + ab[0] * ba[0] + one * other
    extra = added(
        None if ab[1] is None else ab[1] * ba[0], None if ba[1] is None else ba[1] * ab[0]
    )
    return cov, added(ntk, extra)


MOMENTS: dict[type, Callable[[Evaluation, Any, bool], Pair]] = {
    ex.Raw: raw,
    ex.Weighted: weighted,
    ex.Parameter: parameter,
    ex.Sum: total,
    ex.Mapped: mapped,
    ex.Gained: gained,
    ex.Routed: routed,
    ex.Attended: attended,
    ex.RandomlyAttended: randomly_attended,
    ex.Point: point,
    ex.Normalized: normalized,
    ex.Dropped: dropped,
    ex.Product: product,
}


def _moments(evaluation: Evaluation, e: Expression, full: bool) -> Pair:
    return MOMENTS[type(e)](evaluation, e, full)


def run(evaluation: Evaluation) -> Pair:
    """Compute the moments of the output, signal by signal, and free each after its last use."""
    program = evaluation.program
    evaluation.compute = _moments
    left = dict(program.users)
    fuses = gpu_kernels.available(next(iter(evaluation.left.values())))
    inner = {
        e.input.order
        for e in program.nodes
        if isinstance(e, ex.Point) and e.order in program.fusible
    }
    for e in program.nodes:
        used = ex.children(e)
        if fuses and e.order in inner:
            continue
        if fuses and isinstance(e, ex.Point) and e.order in program.fusible:
            assert isinstance(e.input, ex.Weighted)
            evaluation.memory[e.order] = fused_convolution.window_and_relu(evaluation, e, e.input)
            used = ex.children(e.input)
        else:
            evaluation.memory[e.order] = _moments(evaluation, e, program.full[e.order])
        for child in used:
            left[child.order] -= 1
            if left[child.order] == 0:
                del evaluation.memory[child.order]
    return evaluation.memory[program.output.order]
