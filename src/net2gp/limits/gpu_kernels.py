"""A convolution and the ReLU behind it in one pass over all pairs of positions, for NVIDIA GPUs.

Between two images, the moments of all pairs of positions are H²W² numbers per layer, and the cost of a layer
is the cost of reading and writing them. The kernel reads the nine neighbors (which are in caches), applies
weights, bias and the arc-cosine formula, and writes once.
"""

from __future__ import annotations

import math
from typing import Any, no_type_check

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice
except ImportError:
    triton = None

BLOCK = 1024
WARPS = 8
CHANNELS = 16
"""With at most this many channels of the data, inner products are taken without a matrix product."""


def available(t: Tensor) -> bool:
    """Whether the kernels can take tensors like `t`."""
    return triton is not None and t.is_cuda and not (torch.is_grad_enabled() and t.requires_grad)


def window_and_relu(
    cov: Tensor,
    ntk: Tensor | None,
    variances: tuple[Tensor, Tensor],
    numbers: list[float],
    geometry: tuple[tuple[int, int], ...],
    tangent: bool,
) -> tuple[Tensor, Tensor | None]:
    """Compute the moments of φ(W u) from the moments of u, and the tangent kernel if `tangent`.

    Args:
        cov: The covariances of u, (H, W, H, W, n, m), or (H, W, H, W, n) for each point with itself.
        ntk: The tangent kernel of u, likewise; None if it is zero.
        variances: The variances of W u, (H, W, n) and (H, W, m).
        numbers: Factor and bias of the covariance, factor and bias of the tangent kernel, and (a² + b²)/2
            and (b − a)²/2π of φ, which is a u for u < 0 and b u for u > 0.
        geometry: Kernel size, padding and dilation, two numbers each.
        tangent: Whether to compute the tangent kernel.

    Returns:
        The covariances of φ(W u), and their tangent kernel or None, in the shape of `cov`.
    """
    left, right = (side.contiguous() for side in variances)
    cov = cov.contiguous()
    given = cov if ntk is None else ntk.contiguous()
    new = torch.empty_like(cov)
    slopes = torch.empty_like(new) if tangent else new
    height, width = cov.shape[:2]
    zipped = cov.dim() == 5
    pairs = math.prod(cov.shape[4:])
    # numbers that are passed to a kernel as arguments arrive in single precision, so they go in a tensor
    constants = cov.new_tensor(numbers)
    (kh, kw), (ph, pw), (dh, dw) = geometry
    sizes = (height, width, left.shape[-1], 1 if zipped else right.shape[-1])
    _kernel[(height * height, triton.cdiv(width * pairs, BLOCK))](
        *(cov, given, new, slopes, left, right, *sizes, constants),
        KH=kh,
        KW=kw,
        PH=ph,
        PW=pw,
        DH=dh,
        DW=dw,
        BLOCK=BLOCK,
        TANGENT=tangent,
        GIVEN=ntk is not None,
        ZIPPED=zipped,
        num_warps=WARPS,
    )
    return new, slopes if tangent else None


def inner_products(x: Tensor, y: Tensor) -> Tensor:
    """Compute x·y over few channels for all pairs of positions: (S, n, C) and (S', m, C) to (S, S', n, m)."""
    x, y = x.contiguous(), y.contiguous()
    (s, n, channels), (t, m, _) = x.shape, y.shape
    new = x.new_empty(s, t, n, m)
    grid = (s, triton.cdiv(t * n * m, BLOCK))
    _products[grid](x, y, new, t, n, m, C=channels, BLOCK=BLOCK)
    return new


def block_sums(t: Tensor, blocks: tuple[int, ...], factor: float) -> Tensor:
    """Return sums over blocks of neighbors on both sides of (H, W, H, W, *pairs), times a factor."""
    height, width = t.shape[0] // blocks[0], t.shape[1] // blocks[1]
    pairs = math.prod(t.shape[4:])
    t = t.contiguous()
    new = t.new_empty(height, width, height, width, *t.shape[4:])
    grid = (height * width * height, triton.cdiv(width * pairs, BLOCK))
    number = t.new_tensor([factor])
    _pool[grid](t, new, number, height, width, pairs, KH=blocks[0], KW=blocks[1], BLOCK=BLOCK)
    return new


@no_type_check
def _body(  # noqa: PLR0913
    cov, ntk, new, slopes, left, right, height, width, n, m, numbers,
    KH: tl.constexpr, KW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, BLOCK: tl.constexpr, TANGENT: tl.constexpr, GIVEN: tl.constexpr,
    ZIPPED: tl.constexpr,
):  # fmt: skip
    """Run one program: rows h and h' of the two images, a block of (w', pairs), all columns w in turn."""
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
    if ZIPPED:
        q2 = tl.load(right + (hp * width + wp) * n + p, mask=inside, other=1.0)
    else:
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


@no_type_check
def _pool_body(  # noqa: PLR0913
    t, new, number, height, width, pairs, KH: tl.constexpr, KW: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Run one program: a new position (h, w) of one image, a row h' of the other, a block of (w', pairs)."""
    place = tl.program_id(0)
    hp = place % height
    w = (place // height) % width
    h = place // (height * width)
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < width * pairs
    wp, p = offset // pairs, offset % pairs
    total = tl.zeros((BLOCK,), dtype=t.dtype.element_ty)
    tall, wide = height * KH, width * KW
    for i in tl.static_range(KH):
        for j in tl.static_range(KW):
            for k in tl.static_range(KH):
                row = (((h * KH + i) * wide + w * KW + j) * tall + hp * KH + k) * wide
                for l in tl.static_range(KW):
                    total += tl.load(t + (row + wp * KW + l) * pairs + p, mask=inside, other=0.0)
    tl.store(new + place * width * pairs + offset, total * tl.load(number), mask=inside)


@no_type_check
def _products_body(x, y, new, t, n, m, C: tl.constexpr, BLOCK: tl.constexpr):
    """Run one program: a position of x, a block of (position of y, pairs)."""
    s = tl.program_id(0)
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pairs = n * m
    inside = offset < t * pairs
    q, p = offset // pairs, offset % pairs
    one = x + (s * n + p // m) * C
    two = y + (q * m + p % m) * C
    total = tl.zeros((BLOCK,), dtype=x.dtype.element_ty)
    for c in tl.static_range(C):
        total += tl.load(one + c, mask=inside, other=0.0) * tl.load(two + c, mask=inside, other=0.0)
    tl.store(new + s * t * pairs + offset, total, mask=inside)


_products: Any = None if triton is None else triton.jit(_products_body)
_kernel: Any = None if triton is None else triton.jit(_body)
_pool: Any = None if triton is None else triton.jit(_pool_body)
