"""A convolution and the ReLU behind it in one pass over all pairs of positions, for NVIDIA GPUs.

Between two images, moments of all pairs of positions are H²W² numbers a layer, and reading and writing
them is what a layer costs. The kernel reads the nine neighbors (which caches hold), applies weights, bias
and the arc-cosine formula, and writes once.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from net2gp.limits import expressions as ex
from net2gp.limits.power_forms import ABReLU

if TYPE_CHECKING:
    from net2gp.limits.evaluate import Evaluation, Pair

try:
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice
except ImportError:
    triton = None

BLOCK = 1024


def fusible(e: ex.Expression, users: dict[int, int], full: dict[int, bool]) -> bool:
    """Whether `e` is a ReLU-like function of a convolution on all pairs of positions that nothing else uses."""
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


def available(t: Tensor) -> bool:
    """Whether tensors like `t` can be given to the kernel."""
    return triton is not None and t.is_cuda and not (torch.is_grad_enabled() and t.requires_grad)


def window_and_relu(run: Evaluation, e: ex.Point, w: ex.Weighted) -> Pair:
    """The moments of φ(W u) from those of u, as `weighted` and `point` give them one after the other."""
    cov, ntk = run.get(w.inputs[0][1], True)
    assert w.window is not None
    assert isinstance(e.activation, ABReLU)
    height, width = w.positions
    left, right = (side.contiguous() for side in run.side("variance", w))
    cov = cov.contiguous()
    new = torch.empty_like(cov)
    tangent = run.tangent
    given = cov if ntk is None else ntk.contiguous()
    slopes = torch.empty_like(cov) if tangent else new
    total = w.window.total
    standard = run.prior.standard(w.weight)
    own = w.fan_in / total if standard else float(run.prior.weight(w.weight)) / total
    own_bias = (1.0 if w.bias else 0.0) if standard else float(run.prior.bias(w.bias))
    a, b = e.activation.negative, e.activation.positive
    # numbers given to a kernel as arguments arrive in single precision
    numbers = cov.new_tensor(
        [
            float(run.prior.weight(w.weight)) / total,
            float(run.prior.bias(w.bias)),
            own,
            own_bias,
            (a * a + b * b) / 2,
            (b - a) ** 2 / (2 * math.pi),
        ]
    )
    pairs = left.shape[-1] * right.shape[-1]
    grid = (height * height, triton.cdiv(width * pairs, BLOCK))
    _kernel[grid](
        cov,
        given,
        new,
        slopes,
        left,
        right,
        height,
        width,
        left.shape[-1],
        right.shape[-1],
        numbers,
        KH=w.window.kernel[0],
        KW=w.window.kernel[1],
        PH=w.window.padding[0][0],
        PW=w.window.padding[1][0],
        DH=w.window.dilation[0],
        DW=w.window.dilation[1],
        BLOCK=BLOCK,
        TANGENT=tangent,
        GIVEN=ntk is not None,
        num_warps=4,
    )
    return new, slopes if tangent else None


def _body(  # noqa: PLR0913
    cov, ntk, new, slopes, left, right, height, width, n, m, numbers,
    KH: tl.constexpr, KW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, BLOCK: tl.constexpr, TANGENT: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    """One program: rows h and h' of the two images, a block of (w', pairs), all columns w in turn."""
    pair = tl.program_id(0)
    h, hp = pair // height, pair % height
    pairs = n * m
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = width * pairs
    inside = offset < row
    wp = offset // pairs
    p = offset % pairs
    weight, bias = tl.load(numbers), tl.load(numbers + 1)
    own, own_bias = tl.load(numbers + 2), tl.load(numbers + 3)
    level, bend = tl.load(numbers + 4), tl.load(numbers + 5)
    q2 = tl.load(right + (hp * width + wp) * m + p % m, mask=inside, other=1.0)
    for w in range(width):
        total = tl.zeros((BLOCK,), dtype=cov.dtype.element_ty)
        total_ntk = tl.zeros((BLOCK,), dtype=cov.dtype.element_ty)
        for i in tl.static_range(KH):
            hh = h + i * DH - PH
            hhp = hp + i * DH - PH
            rows = (hh >= 0) & (hh < height) & (hhp >= 0) & (hhp < height)
            for j in tl.static_range(KW):
                ww = w + j * DW - PW
                wwp = wp + j * DW - PW
                here = inside & rows & (ww >= 0) & (ww < width) & (wwp >= 0) & (wwp < width)
                place = ((hh * width + ww) * height + hhp) * row + offset + (j * DW - PW) * pairs
                total += tl.load(cov + place, mask=here, other=0.0)
                if GIVEN:
                    total_ntk += tl.load(ntk + place, mask=here, other=0.0)
        q1 = tl.load(left + (h * width + w) * n + p // m, mask=inside, other=1.0)
        k = total * weight + bias
        scale = tl.sqrt(q1 * q2)
        rho = tl.where(scale > 0, k / scale, 0.0)
        rho = tl.minimum(tl.maximum(rho, -1.0), 1.0)
        rate = level - bend * libdevice.acos(rho)
        value = bend * scale * tl.sqrt((1 - rho) * (1 + rho)) + rate * k
        out = ((h * width + w) * height + hp) * row + offset
        tl.store(new + out, value, mask=inside)
        if TANGENT:
            theta = total * own + own_bias
            if GIVEN:
                theta += total_ntk * weight
            tl.store(slopes + out, theta * rate, mask=inside)


_kernel: Any = None if triton is None else triton.jit(_body)
