"""Differentiable operations as a network would call them, on tensors whose sizes are all alike.

`CALLS` maps a name to a function and the shapes of its arguments; "n" stands for the common size. The first
argument is one point in a batch of one, or what a layer makes of it; the others are parameters.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Shape = tuple[int | str, ...]
CALLS: dict[str, tuple[Callable[..., Tensor], tuple[Shape, ...]]] = {}

VECTOR, SEQUENCE, IMAGE, VOLUME = (
    (1, "n"),
    (1, "n", "n"),
    (1, "n", "n", "n"),
    (1, "n", "n", "n", "n"),
)
MATRIX, CHANNELS = ("n", "n"), ("n",)


def _add(name: str, function: Callable[..., Tensor], *shapes: Shape) -> None:
    CALLS[name] = function, shapes


def _positive(x: Tensor) -> Tensor:
    return x.square() + 0.3


def _spd(x: Tensor) -> Tensor:
    eye = torch.eye(x.shape[-1], dtype=x.dtype)
    return x @ x.mT + eye * torch.arange(1, x.shape[-1] + 1, dtype=x.dtype)


def _elementwise() -> None:
    names = (
        "abs acos acosh angle arctan asinh atanh ceil cos cosh deg2rad digamma erf erfc erfinv exp "
        "exp2 expm1 floor frac i0 lgamma log log10 log1p log2 logit nan_to_num neg rad2deg reciprocal "
        "relu round rsqrt sgn sigmoid sign sin sinc sinh sqrt square tan tanh trunc"
    )
    inside = {"acos", "atanh", "erfinv", "logit"}
    for name in names.split():
        function = getattr(torch, name)
        if name in inside:
            squash = lambda x, f=function: f(0.4 + 0.3 * x.tanh())
        elif name == "acosh":
            squash = lambda x, f=function: f(1 + _positive(x))
        elif name in {
            "log",
            "log10",
            "log2",
            "sqrt",
            "rsqrt",
            "lgamma",
            "digamma",
            "log1p",
            "reciprocal",
        }:
            squash = lambda x, f=function: f(_positive(x))
        else:
            squash = function
        _add(f"torch.{name}", lambda x, w, f=squash: f(x + w), SEQUENCE, MATRIX)
    names = (
        "celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu6 rrelu selu "
        "silu softplus softshrink softsign tanhshrink threshold"
    )
    for name in names.split():
        function = getattr(F, name)
        if name == "threshold":
            function = lambda x: F.threshold(x, 0.1, 0.2)
        _add(f"F.{name}", lambda x, w, f=function: f(x + w), SEQUENCE, MATRIX)
    for name in ("ndtri", "erfcx", "bessel_j0", "i0e", "i1", "log_ndtr", "entr"):
        function = getattr(torch.special, name)
        squash = lambda x, f=function: f(0.5 + 0.3 * x.tanh())
        _add(f"special.{name}", lambda x, w, f=squash: f(x + w), SEQUENCE, MATRIX)
    names = (
        "add atan2 div fmax fmin fmod hypot logaddexp logaddexp2 maximum minimum mul pow remainder sub "
        "copysign xlogy true_divide float_power"
    )
    for name in names.split():
        function = getattr(torch, name)
        _add(
            f"torch.{name}",
            lambda x, w, f=function: f(_positive(x), _positive(w)),
            SEQUENCE,
            CHANNELS,
        )
    _add("torch.lerp", lambda x, w, v: torch.lerp(x, w, v), SEQUENCE, MATRIX, CHANNELS)
    _add("torch.where", lambda x, w, v: torch.where(x > 0, w, v * x), SEQUENCE, MATRIX, CHANNELS)
    _add("torch.clamp", lambda x, w, v: torch.clamp(x, w, w + v.abs()), SEQUENCE, MATRIX, CHANNELS)
    _add("torch.addcmul", lambda x, w, v: torch.addcmul(x, w, v), SEQUENCE, MATRIX, CHANNELS)
    _add(
        "torch.addcdiv",
        lambda x, w, v: torch.addcdiv(x, w, _positive(v)),
        SEQUENCE,
        MATRIX,
        CHANNELS,
    )
    _add("torch.polar", lambda x, w: torch.polar(_positive(x), w).real, SEQUENCE, MATRIX)


def _layers() -> None:
    _add("F.linear", F.linear, VECTOR, MATRIX, CHANNELS)
    _add("F.linear of a sequence", F.linear, SEQUENCE, MATRIX, CHANNELS)
    _add(
        "F.bilinear",
        lambda x, w, b: F.bilinear(x, x.sin(), w, b),
        VECTOR,
        ("n", "n", "n"),
        CHANNELS,
    )
    for d, shape in ((1, SEQUENCE), (2, IMAGE), (3, VOLUME)):
        conv, back = getattr(F, f"conv{d}d"), getattr(F, f"conv_transpose{d}d")
        one, two = (1,) * d, (2,) * d
        _add(f"F.conv{d}d 1", conv, shape, ("n", "n", *one), CHANNELS)
        pad = lambda x, w, b, f=conv: f(x, w, b, padding=1)
        _add(f"F.conv{d}d padded", pad, shape, ("n", "n", *two), CHANNELS)
        strided = lambda x, w, b, f=conv: f(x, w, b, padding=1, stride=2)
        _add(f"F.conv{d}d strided", strided, shape, ("n", "n", *two), CHANNELS)
        deep = lambda x, w, b, f=conv: f(x, w, b, padding=1, groups=len(w))
        _add(f"F.conv{d}d depthwise", deep, shape, ("n", 1, *two), CHANNELS)
        wide = lambda x, w, b, f=conv: f(x, w, b, padding=2, dilation=2)
        _add(f"F.conv{d}d dilated", wide, shape, ("n", "n", *two), CHANNELS)
        _add(f"F.conv_transpose{d}d", back, shape, ("n", "n", *two), CHANNELS)
        grouped = lambda x, w, b, f=back: f(x, w, b, stride=2, groups=len(w))
        _add(f"F.conv_transpose{d}d depthwise", grouped, shape, ("n", 1, *two), CHANNELS)
        _add(f"F.prelu {d}d", F.prelu, shape, CHANNELS)
        _add(f"F.prelu {d}d, one slope", lambda x, w: F.prelu(x, w[:1]), shape, CHANNELS)
        norm = lambda x, w, b: F.batch_norm(x, b * 0 + 0.3, b * 0 + 2, w, b)
        _add(f"F.batch_norm {d}d", norm, shape, CHANNELS, CHANNELS)
        _add(
            f"F.group_norm {d}d",
            lambda x, w, b: F.group_norm(x, len(w), w, b),
            shape,
            CHANNELS,
            CHANNELS,
        )
        one_group = lambda x, w, b: F.group_norm(x, 1, w, b)
        _add(f"F.group_norm {d}d, one group", one_group, shape, CHANNELS, CHANNELS)
        instance = lambda x, w, b: F.instance_norm(x, weight=w, bias=b)
        _add(f"F.instance_norm {d}d", instance, shape, CHANNELS, CHANNELS)
    _add("F.prelu", F.prelu, VECTOR, CHANNELS)
    _add("F.prelu, one slope", lambda x, w: F.prelu(x, w[:1]), VECTOR, CHANNELS)
    _add(
        "F.layer_norm", lambda x, w, b: F.layer_norm(x, w.shape, w, b), SEQUENCE, CHANNELS, CHANNELS
    )
    _add(
        "F.layer_norm of two axes",
        lambda x, w, b: F.layer_norm(x, w.shape, w, b),
        SEQUENCE,
        MATRIX,
        MATRIX,
    )
    _add("F.rms_norm", lambda x, w: F.rms_norm(x, w.shape, w), SEQUENCE, CHANNELS)
    _add("F.normalize", lambda x, w: F.normalize(x + w, dim=-1), SEQUENCE, CHANNELS)
    _add("F.local_response_norm", lambda x, w: F.local_response_norm(x * w, 2), IMAGE, CHANNELS)
    _add("F.rnn relu cell", torch.rnn_relu_cell, VECTOR, VECTOR, MATRIX, MATRIX, CHANNELS, CHANNELS)
    _add("F.rnn tanh cell", torch.rnn_tanh_cell, VECTOR, VECTOR, MATRIX, MATRIX, CHANNELS, CHANNELS)
    gru = lambda x, h, w, v: torch.gru_cell(x, h, w.repeat(3, 1), v.repeat(3, 1))
    _add("torch.gru_cell", gru, VECTOR, VECTOR, MATRIX, MATRIX)
    lstm = lambda x, h, c, w, v: torch.lstm_cell(x, (h, c), w.repeat(4, 1), v.repeat(4, 1))[0]
    _add("torch.lstm_cell", lstm, VECTOR, VECTOR, VECTOR, MATRIX, MATRIX)
    attend = lambda x, q, k, v: F.scaled_dot_product_attention(x @ q, x @ k, x @ v)
    _add("F.scaled_dot_product_attention", attend, SEQUENCE, MATRIX, MATRIX, MATRIX)
    ids = lambda x: (x > 0).long()
    _add("F.embedding", lambda x, w: F.embedding(ids(x), w), VECTOR, (2, "n"))
    _add("F.embedding_bag", lambda x, w: F.embedding_bag(ids(x), w), VECTOR, (2, "n"))
    biggest = lambda x, w: F.embedding_bag(ids(x), w, mode="max")
    _add("F.embedding_bag max", biggest, VECTOR, (2, "n"))
    _add("rows by index", lambda x, w: w[ids(x)], VECTOR, (2, "n"))
    _add("torch.index_select", lambda x, w: w.index_select(0, ids(x)[0]), VECTOR, (2, "n"))


def _distances() -> None:
    for p in (0.5, 1.0, 2.0, 3.0, float("inf")):
        _add(f"torch.cdist p={p}", lambda x, w, p=p: torch.cdist(x, w, p), VECTOR, MATRIX)
        batched = lambda x, w, p=p: torch.cdist(x, w[None], p)
        _add(f"torch.cdist p={p} of sets", batched, SEQUENCE, MATRIX)
    plain = lambda x, w: torch.cdist(x, w, compute_mode="use_mm_for_euclid_dist")
    _add("torch.cdist by products", plain, VECTOR, MATRIX)
    _add("F.pdist", lambda x, w: F.pdist(torch.cat([x, w])), VECTOR, MATRIX)
    _add("F.pairwise_distance", lambda x, w: F.pairwise_distance(x.expand_as(w), w), VECTOR, MATRIX)
    _add("torch.dist", lambda x, w: torch.dist(x, w)[None], VECTOR, CHANNELS)
    _add("F.cosine_similarity", lambda x, w: F.cosine_similarity(x, w), VECTOR, MATRIX)
    for p in (0.5, 1, 2, 3, float("inf")):
        norm = lambda x, w, p=p: torch.linalg.vector_norm(x + w, p, dim=-1)
        _add(f"vector_norm {p}", norm, SEQUENCE, MATRIX)
    _add("torch.renorm", lambda x, w: torch.renorm(x + w, 2, 1, 0.5), SEQUENCE, MATRIX)


def _products() -> None:
    _add("torch.matmul", torch.matmul, SEQUENCE, MATRIX)
    _add("torch.mm", torch.mm, VECTOR, MATRIX)
    _add("torch.mv", lambda x, w: torch.mv(w, x[0]), VECTOR, MATRIX)
    _add("torch.dot", lambda x, w: torch.dot(x[0], w)[None], VECTOR, CHANNELS)
    _add("torch.outer", lambda x, w: torch.outer(x[0], w), VECTOR, CHANNELS)
    _add("torch.bmm", lambda x, w: torch.bmm(x, w[None]), SEQUENCE, MATRIX)
    _add("torch.baddbmm", lambda x, w, v: torch.baddbmm(v, x, w[None]), SEQUENCE, MATRIX, CHANNELS)
    _add("torch.addmm", lambda x, w, v: torch.addmm(v, x, w), VECTOR, MATRIX, CHANNELS)
    _add("torch.addmv", lambda x, w, v: torch.addmv(v, w, x[0]), VECTOR, MATRIX, CHANNELS)
    _add("torch.addr", lambda x, w, v: torch.addr(w, x[0], v), VECTOR, MATRIX, CHANNELS)
    _add(
        "torch.einsum",
        lambda x, w: torch.einsum("bi,ijk,bk->bj", x, w, x.cos()),
        VECTOR,
        ("n", "n", "n"),
    )
    _add("torch.tensordot", lambda x, w: torch.tensordot(x, w, 1), SEQUENCE, MATRIX)
    _add("torch.kron", lambda x, w: torch.kron(x[0], w), SEQUENCE, MATRIX)
    three = lambda x, w: torch.stack([x[0, 0], w[0] * x[0, 0, 0], x[0, 0] - w[1]], -1)
    _add(
        "linalg.cross",
        lambda x, w: torch.linalg.cross(three(x, w), three(x.cos(), w)),
        SEQUENCE,
        MATRIX,
    )
    _add(
        "torch.chain_matmul",
        lambda x, w, v: torch.linalg.multi_dot([x, w, v]),
        VECTOR,
        MATRIX,
        MATRIX,
    )
    _add("torch.trace", lambda x, w: torch.trace(x[0] @ w)[None], SEQUENCE, MATRIX)


def _algebra() -> None:
    mix = lambda x, w: x + w
    for name in (
        "inv",
        "det",
        "eigvalsh",
        "svdvals",
        "matrix_exp",
        "pinv",
        "cholesky",
        "matrix_power",
    ):
        function = getattr(torch.linalg, name)
        if name == "matrix_power":
            function = lambda A: torch.linalg.matrix_power(A, 3)
        _add(f"linalg.{name}", lambda x, w, f=function: f(_spd(mix(x, w))), SEQUENCE, MATRIX)
    _add("linalg.slogdet", lambda x, w: torch.linalg.slogdet(_spd(x + w))[1], SEQUENCE, MATRIX)
    _add("linalg.eigh", lambda x, w: torch.linalg.eigh(_spd(x + w))[1].abs(), SEQUENCE, MATRIX)
    _add("linalg.svd", lambda x, w: torch.linalg.svd(_spd(x + w))[0].abs(), SEQUENCE, MATRIX)
    _add("linalg.qr", lambda x, w: torch.linalg.qr(_spd(x + w))[1], SEQUENCE, MATRIX)
    _add("linalg.lu", lambda x, w: torch.linalg.lu(_spd(x + w))[2], SEQUENCE, MATRIX)
    _add("linalg.solve", lambda x, w: torch.linalg.solve(_spd(w), x.mT), VECTOR, MATRIX)
    _add("linalg.solve of each", lambda x, w: torch.linalg.solve(_spd(x), w), SEQUENCE, MATRIX)
    triangular = lambda x, w: torch.linalg.solve_triangular(_spd(w).tril(), x.mT, upper=False)
    _add("linalg.solve_triangular", triangular, VECTOR, MATRIX)
    solve = lambda x, w: torch.cholesky_solve(x.mT, torch.linalg.cholesky(_spd(w)))
    _add("torch.cholesky_solve", solve, VECTOR, MATRIX)
    inverse = lambda x, w: torch.cholesky_inverse(torch.linalg.cholesky(_spd(x + w)))
    _add("torch.cholesky_inverse", inverse, SEQUENCE, MATRIX)
    _add("linalg.lstsq", lambda x, w: torch.linalg.lstsq(_spd(w), x.mT).solution, VECTOR, MATRIX)
    _add(
        "linalg.householder_product",
        lambda x, w: torch.linalg.householder_product(x + w, 0.1 * w[0]),
        SEQUENCE,
        MATRIX,
    )
    _add("linalg.vander", lambda x, w: torch.linalg.vander(x + w), VECTOR, CHANNELS)
    _add(
        "linalg.matrix_norm nuclear",
        lambda x, w: torch.linalg.matrix_norm(_spd(x + w), "nuc"),
        SEQUENCE,
        MATRIX,
    )


def _reductions() -> None:
    names = "sum mean prod std var logsumexp amax amin nansum nanmean norm"
    for name in names.split():
        function = lambda h, name=name: getattr(h, name)(dim=-1)
        _add(f"Tensor.{name}", lambda x, w, f=function: f(x + w), SEQUENCE, MATRIX)
    names = "max min median mode nanmedian cummax cummin sort"
    for name in names.split():
        function = lambda h, name=name: getattr(h, name)(dim=-1)[0]
        _add(f"Tensor.{name}", lambda x, w, f=function: f(x + w), SEQUENCE, MATRIX)
    names = "cumsum cumprod logcumsumexp softmax log_softmax"
    for name in names.split():
        function = lambda h, name=name: getattr(h, name)(-1)
        _add(f"Tensor.{name}", lambda x, w, f=function: f(x + w), SEQUENCE, MATRIX)
    _add("Tensor.topk", lambda x, w: (x + w).topk(2, -1)[0], SEQUENCE, MATRIX)
    _add("Tensor.kthvalue", lambda x, w: (x + w).kthvalue(1, -1)[0], SEQUENCE, MATRIX)
    _add("Tensor.quantile", lambda x, w: (x + w).quantile(0.3, -1), SEQUENCE, MATRIX)
    _add("torch.aminmax", lambda x, w: torch.stack(torch.aminmax(x + w, dim=-1)), SEQUENCE, MATRIX)
    _add("torch.trapezoid", lambda x, w: torch.trapezoid(x * w), SEQUENCE, MATRIX)
    _add("torch.diff", lambda x, w: torch.diff(x * w, dim=-1), SEQUENCE, MATRIX)
    _add("torch.gradient", lambda x, w: torch.gradient(x * w, dim=-1)[0], SEQUENCE, MATRIX)
    _add("torch.cov", lambda x, w: torch.cov((x + w)[0]), SEQUENCE, MATRIX)
    wide = lambda h: torch.cat([h, h.sin(), h.square()], -1)
    _add("torch.corrcoef", lambda x, w: torch.corrcoef(wide(x + w)[0]), SEQUENCE, MATRIX)
    _add("Tensor.max of all", lambda x, w: (x + w).max()[None], SEQUENCE, MATRIX)
    _add("Tensor.prod of all", lambda x, w: (x + w).prod()[None], SEQUENCE, MATRIX)
    _add("F.softmin", lambda x, w: F.softmin(x + w, -1), SEQUENCE, MATRIX)
    _add("F.glu", lambda x, w: F.glu(torch.cat([x, x * w], -1)), SEQUENCE, MATRIX)
    _add(
        "segment_reduce",
        lambda x, w: torch.segment_reduce(
            (x + w)[0], "sum", lengths=torch.tensor([1, x.shape[1] - 1])
        ),
        SEQUENCE,
        MATRIX,
    )


def _places() -> None:
    index = lambda x: (x > 0).long()
    half = lambda x: x.shape[-1] - 1
    _add("torch.gather", lambda x, w: torch.gather(x * w, -1, index(x)), SEQUENCE, MATRIX)
    _add(
        "torch.take_along_dim",
        lambda x, w: torch.take_along_dim(x * w, index(x), -1),
        SEQUENCE,
        MATRIX,
    )
    _add("torch.take", lambda x, w: torch.take(w, index(x)), SEQUENCE, MATRIX)
    _add(
        "torch.scatter",
        lambda x, w: torch.scatter(x * w, -1, index(x)[..., :1], w[None, :, :1]),
        SEQUENCE,
        MATRIX,
    )
    _add(
        "torch.scatter_add",
        lambda x, w: torch.scatter_add(x, -1, index(x), x * w),
        SEQUENCE,
        MATRIX,
    )
    for kind in ("sum", "prod", "mean", "amax", "amin"):
        reduce = lambda x, w, kind=kind: torch.scatter_reduce(x, -1, index(x), x * w, kind)
        _add(f"torch.scatter_reduce {kind}", reduce, SEQUENCE, MATRIX)
    _add(
        "torch.index_add",
        lambda x, w: torch.index_add(x, -1, index(x)[0, 0], x * w),
        SEQUENCE,
        MATRIX,
    )
    _add(
        "torch.index_copy",
        lambda x, w: torch.index_copy(x, -1, torch.arange(x.shape[-1]), x * w),
        SEQUENCE,
        MATRIX,
    )
    _add(
        "torch.index_fill",
        lambda x, w: torch.index_fill(x * w, -1, index(x)[0, 0], 0.5),
        SEQUENCE,
        MATRIX,
    )
    _add(
        "torch.index_put",
        lambda x, w: (x * w).index_put((index(x)[0, 0],), w[0, 0]),
        SEQUENCE,
        MATRIX,
    )
    _add(
        "torch.index_reduce",
        lambda x, w: torch.index_reduce(x, -1, torch.arange(x.shape[-1]), x * w, "prod"),
        SEQUENCE,
        MATRIX,
    )
    _add(
        "torch.masked_select",
        lambda x, w: torch.where(x > 0, x * w, 0.0).masked_fill(x < -1, 0.3),
        SEQUENCE,
        MATRIX,
    )
    _add("torch.masked_scatter", lambda x, w: (x * 1).masked_scatter(x > 0, w), SEQUENCE, MATRIX)
    _add(
        "torch.select_scatter",
        lambda x, w: torch.select_scatter(x * w, w[0], 1, 0),
        SEQUENCE,
        MATRIX,
    )
    _add(
        "torch.slice_scatter",
        lambda x, w: torch.slice_scatter(x * w, w[None, :1], 1, 0, 1),
        SEQUENCE,
        MATRIX,
    )
    _add(
        "torch.diagonal_scatter",
        lambda x, w: torch.diagonal_scatter(x * w, w[:1], 0, 1, 2),
        SEQUENCE,
        MATRIX,
    )
    moves: dict[str, Callable[[Tensor], Tensor]] = {
        "roll": lambda h: h.roll(1, 1),
        "flip": lambda h: h.flip(1),
        "rot90": lambda h: h.rot90(1, (1, 2)),
        "tril": torch.tril,
        "triu": torch.triu,
        "unfold": lambda h: h.unfold(1, 2, 1),
        "repeat": lambda h: h.repeat(1, 2, 1),
        "repeat_interleave": lambda h: h.repeat_interleave(2, 1),
        "expand": lambda h: h[:, None].expand(-1, 2, -1, -1),
        "as_strided": lambda h: (h * 1).as_strided((1, 2), (1, 2)),
        "diagonal": lambda h: h.diagonal(dim1=1, dim2=2),
        "diag_embed": torch.diag_embed,
        "narrow": lambda h: h.narrow(1, 0, half(h)),
        "chunk": lambda h: torch.cat(h.chunk(2, 1)[::-1], 1),
        "movedim": lambda h: h.movedim(1, 2),
        "tile": lambda h: h.tile(2),
        "block_diag": lambda h: torch.block_diag(h[0], h[0]),
        "cartesian_prod": lambda h: torch.cartesian_prod(h[0, 0], h[0, 1]),
        "combinations": lambda h: torch.combinations(h[0, 0]),
        "meshgrid": lambda h: torch.stack(torch.meshgrid(h[0, 0], h[0, 1], indexing="ij")),
        "stack": lambda h: torch.stack([h, h.sin()], 1),
        "hstack": lambda h: torch.hstack([h, h.sin()]),
        "unbind": lambda h: torch.stack(h.unbind(1)[::-1], 1),
    }
    for name, move in moves.items():
        _add(f"torch.{name}", lambda x, w, f=move: f(x * w), SEQUENCE, MATRIX)
    names = "fft rfft ifft fft2 hfft"
    for name in names.split():
        transform = getattr(torch.fft, name)
        _add(f"fft.{name}", lambda x, w, f=transform: f(x * w).abs(), SEQUENCE, MATRIX)
    _add(
        "fft.irfft",
        lambda x, w: torch.fft.irfft(torch.fft.rfft(x) * w[0, 0], n=x.shape[-1]),
        SEQUENCE,
        MATRIX,
    )


def _pictures() -> None:
    for mode in ("constant", "reflect", "replicate", "circular"):
        pad = lambda x, w, mode=mode: F.pad(x * w, (1, 1, 1, 1), mode)
        _add(f"F.pad {mode}", pad, IMAGE, MATRIX)
    for mode in ("nearest", "bilinear", "bicubic", "area", "nearest-exact"):
        scale = lambda x, w, mode=mode: F.interpolate(x * w, scale_factor=2.0, mode=mode)
        _add(f"F.interpolate {mode}", scale, IMAGE, MATRIX)
    _add(
        "F.interpolate linear",
        lambda x, w: F.interpolate(x * w, scale_factor=2.0, mode="linear"),
        SEQUENCE,
        MATRIX,
    )
    _add(
        "F.interpolate trilinear",
        lambda x, w: F.interpolate(x * w, scale_factor=2.0, mode="trilinear"),
        VOLUME,
        MATRIX,
    )
    for d, shape in ((1, SEQUENCE), (2, IMAGE), (3, VOLUME)):
        for name in ("max_pool", "avg_pool", "lp_pool"):
            pool = getattr(F, f"{name}{d}d")
            more = (2.0, 2) if name == "lp_pool" else (2,)
            _add(f"F.{name}{d}d", lambda x, w, f=pool, m=more: f(x * w, *m), shape, CHANNELS)
        for name in ("adaptive_avg_pool", "adaptive_max_pool"):
            pool = getattr(F, f"{name}{d}d")
            _add(f"F.{name}{d}d", lambda x, w, f=pool: f(x * w, 2), shape, CHANNELS)
    strided = lambda x, w: F.max_pool2d(x * w, 2, stride=1, padding=1)
    _add("F.max_pool2d strided", strided, IMAGE, CHANNELS)
    samples = lambda x: torch.full((1, x.shape[1], 2), 0.5, dtype=x.dtype)
    fraction = lambda x, w: F.fractional_max_pool2d(x * w, 2, 1, _random_samples=samples(x))
    _add("F.fractional_max_pool2d", fraction, IMAGE, CHANNELS)
    unpool = lambda x, w: F.max_unpool2d(*F.max_pool2d(x * w, 2, return_indices=True), 2)
    _add("F.max_unpool2d", unpool, IMAGE, CHANNELS)
    _add("F.unfold", lambda x, w: F.unfold(x * w, 2, padding=1), IMAGE, CHANNELS)
    fold = lambda x, w: F.fold(F.unfold(x * w, 2, padding=1), x.shape[2:], 2, padding=1)
    _add("F.fold", fold, IMAGE, CHANNELS)
    _add(
        "F.pixel_shuffle",
        lambda x, w: F.pixel_shuffle((x * w).repeat(1, 4, 1, 1), 2),
        IMAGE,
        CHANNELS,
    )
    unshuffle = lambda x, w: F.pixel_unshuffle((x * w).repeat(1, 1, 2, 2), 2)
    _add("F.pixel_unshuffle", unshuffle, IMAGE, CHANNELS)
    shuffle = lambda x, w: F.channel_shuffle((x * w).repeat(1, 2, 1, 1), 2)
    _add("F.channel_shuffle", shuffle, IMAGE, CHANNELS)
    for pad in ("zeros", "border", "reflection"):
        for mode in ("bilinear", "bicubic"):

            def sample(x: Tensor, w: Tensor, pad: str = pad, mode: str = mode) -> Tensor:
                theta = torch.eye(2, 3, dtype=x.dtype)[None] + 0.2 * w[0, 0] * x[:, :1, :1, 0]
                grid = F.affine_grid(theta, list(x.shape), align_corners=False)
                return F.grid_sample(x * w, grid, mode, pad, align_corners=False)

            _add(f"F.grid_sample {mode} {pad}", sample, IMAGE, MATRIX)


def _losses() -> None:
    target = lambda x: (x > 0).to(x.dtype)
    names = (
        "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy_with_logits kl_div "
        "soft_margin_loss poisson_nll_loss"
    )
    for name in names.split():
        loss = getattr(F, name)
        _add(
            f"F.{name}",
            lambda x, w, f=loss: f(x * w, target(x), reduction="none"),
            SEQUENCE,
            MATRIX,
        )
    classes = lambda x: (x[:, 0] > 0).long()
    entropy = lambda x, w: F.cross_entropy(x @ w, classes(x), reduction="none")
    _add("F.cross_entropy", entropy, VECTOR, MATRIX)
    margin = lambda x, w: F.multi_margin_loss(x @ w, classes(x), reduction="none")
    _add("F.multi_margin_loss", margin, VECTOR, MATRIX)
    several = lambda x, w: F.multilabel_margin_loss(
        x @ w, classes(x)[:, None].expand_as(x), reduction="none"
    )
    _add("F.multilabel_margin_loss", several, VECTOR, MATRIX)
    cosine = lambda x, w: F.cosine_embedding_loss(x * w, x, torch.ones(1), reduction="none")
    _add("F.cosine_embedding_loss", cosine, VECTOR, CHANNELS)
    triplet = lambda x, w: F.triplet_margin_loss(x * w, x.sin(), x.cos(), reduction="none")
    _add("F.triplet_margin_loss", triplet, VECTOR, CHANNELS)


for build in (
    _elementwise,
    _layers,
    _distances,
    _products,
    _algebra,
    _reductions,
    _places,
    _pictures,
    _losses,
):
    build()
