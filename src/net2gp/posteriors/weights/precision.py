"""From a curvature H and a prior N(0, V) to Σ = (V⁻¹ + scale·H)⁻¹ and log|I + scale·V^{1/2} H V^{1/2}|.

`scale` multiplies the curvature: the inverse of a temperature, or of a noise variance that H was found
without. Everything is in float64; the determinant is differentiable in V and `scale`.
"""

from __future__ import annotations

from functools import singledispatch
from typing import Any

import torch
from torch import Tensor

from net2gp.errors import InputError
from net2gp.linalg import cholesky
from net2gp.linear.curvatures.curvature import (
    DiagonalCurvature,
    FullCurvature,
    KronCurvature,
    LowRankCurvature,
    SubsetCurvature,
)
from net2gp.linear.curvatures.head import weights_of
from net2gp.linear.curvatures.kron_blocks import DenseBlock, DiagonalBlock, KronBlock
from net2gp.linear.curvatures.last_layer import LastLayerCurvature
from net2gp.posteriors.weights.covariances import (
    Covariance,
    DiagonalCovariance,
    FullCovariance,
    SubsetCovariance,
    Subtracted,
)
from net2gp.posteriors.weights.kron import DenseRoot, DiagonalRoot, KronCovariance, KronRoot
from net2gp.posteriors.weights.last_layer import (
    LastLayerDiagonal,
    LastLayerFull,
    LastLayerKron,
)
from net2gp.types import Params


def prior_vector(prior: Params, params: Params) -> Tensor:
    """V as a vector over all parameters: (P,), in float64."""
    parts = [prior[name].double().expand(value.shape).reshape(-1) for name, value in params.items()]
    return torch.cat(parts)


def common_variance(prior: Params) -> Tensor | None:
    """The one variance that all parameters have, if it is one."""
    values = list(prior.values())
    first = values[0]
    if any(v.dim() for v in values) or not all(v is first or bool(v == first) for v in values):
        return None
    return first.double()


@singledispatch
def log_det(curvature: Any, prior: Params, params: Params, scale: float | Tensor) -> Tensor:
    """log|I + scale·V^{1/2} H V^{1/2}|."""
    raise TypeError(f"no determinant for {type(curvature).__name__}")


@singledispatch
def covariance(curvature: Any, prior: Params, params: Params, scale: float) -> Covariance:
    """Σ = (V⁻¹ + scale·H)⁻¹."""
    raise TypeError(f"no covariance for {type(curvature).__name__}")


def _log1p_sum(values: Tensor) -> Tensor:
    return torch.log1p(values).sum()


@log_det.register
def _(curvature: FullCurvature, prior: Params, params: Params, scale: float | Tensor) -> Tensor:
    return _full_log_det(curvature, prior, prior_vector(prior, params), scale)


def _full_log_det(
    curvature: FullCurvature | DenseBlock | SubsetCurvature,
    prior: Params,
    v: Tensor,
    scale: float | Tensor,
) -> Tensor:
    """By eigenvalues where a search asks again and again, by one Cholesky factor where it does not."""
    one = common_variance(prior)
    searching = v.requires_grad or (isinstance(scale, Tensor) and scale.requires_grad)
    if one is not None and (searching or "eigenvalues" in vars(curvature)):
        return _log1p_sum(scale * one * curvature.eigenvalues)
    return _dense_log_det(curvature.H, v, scale)


def _dense_log_det(H: Tensor, v: Tensor, scale: float | Tensor) -> Tensor:
    root = v.sqrt()
    return cholesky(
        torch.eye(len(H)).to(H) + scale * (root[:, None] * H * root), what="I + V^½HV^½"
    ).log_det()


@covariance.register
def _(curvature: FullCurvature, prior: Params, params: Params, scale: float) -> FullCovariance:
    return FullCovariance(_dense_root(curvature.H, prior_vector(prior, params), scale))


def _dense_root(H: Tensor, v: Tensor, scale: float) -> Tensor:
    """R = V^{1/2} L⁻ᵀ with L Lᵀ = I + scale·V^{1/2} H V^{1/2}: R Rᵀ = Σ."""
    identity = torch.eye(len(H)).to(H)
    L = _dense_factor(H, v, scale)
    return v.sqrt()[:, None] * torch.linalg.solve_triangular(L.mT, identity, upper=True)


def _dense_factor(H: Tensor, v: Tensor, scale: float) -> Tensor:
    """L with L Lᵀ = I + scale·V^{1/2} H V^{1/2}."""
    root = v.sqrt()
    inner = scale * (root[:, None] * H * root)
    inner.diagonal().add_(1.0)
    return cholesky(inner, what="I + V^½HV^½").L


@log_det.register
def _(curvature: SubsetCurvature, prior: Params, params: Params, scale: float | Tensor) -> Tensor:
    return _full_log_det(curvature, prior, prior_vector(prior, params)[curvature.index], scale)


@covariance.register
def _(curvature: SubsetCurvature, prior: Params, params: Params, scale: float) -> SubsetCovariance:
    v = prior_vector(prior, params)
    root = _dense_root(curvature.H, v[curvature.index], scale)
    return SubsetCovariance(curvature.index, root, len(v))


@log_det.register
def _(curvature: DiagonalCurvature, prior: Params, params: Params, scale: float | Tensor) -> Tensor:
    return _log1p_sum(scale * prior_vector(prior, params) * curvature.diagonal)


@covariance.register
def _(
    curvature: DiagonalCurvature, prior: Params, params: Params, scale: float
) -> DiagonalCovariance:
    v = prior_vector(prior, params)
    return DiagonalCovariance(v / (1 + scale * v * curvature.diagonal))


@log_det.register
def _(curvature: LowRankCurvature, prior: Params, params: Params, scale: float | Tensor) -> Tensor:
    one = common_variance(prior)
    if one is not None:
        return _log1p_sum(scale * one * curvature.values)
    root = curvature.U * (scale * curvature.values).sqrt()
    inner = root.mT @ (prior_vector(prior, params)[:, None] * root)
    return cholesky(torch.eye(len(inner)).to(inner) + inner, what="I + UᵀVU").log_det()


@covariance.register
def _(curvature: LowRankCurvature, prior: Params, params: Params, scale: float) -> Subtracted:
    v = prior_vector(prior, params)
    B = v.sqrt()[:, None] * curvature.U * (scale * curvature.values).sqrt()
    Q, s, _ = torch.linalg.svd(B, full_matrices=False)
    return Subtracted(v, v.sqrt()[:, None] * Q, s.square() / (1 + s.square()))


@log_det.register
def _(curvature: KronCurvature, prior: Params, params: Params, scale: float | Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=next(iter(params.values())).device)
    for block in curvature.blocks:
        if isinstance(block, KronBlock):
            total = total + _kron_log_det(block, prior, scale)
            continue
        own = {n: prior[n] for n in block.names}
        v = prior_vector(own, {n: params[n] for n in block.names})
        if isinstance(block, DiagonalBlock):
            total = total + _log1p_sum(scale * v * block.diagonal)
        else:
            total = total + _full_log_det(block, own, v, scale)
    return total


def _kron_log_det(block: KronBlock, prior: Params, scale: float | Tensor) -> Tensor:
    inputs = _input_variances(block, prior)
    A, _, G, _ = block.spectrum
    if bool((inputs == inputs[0]).all()):
        A = inputs[0] * A
    else:
        root = inputs.sqrt()
        A = torch.linalg.eigvalsh(root[:, None] * block.A * root).clamp(min=0)
    return _log1p_sum(scale * A[:, None, :] * G[:, :, None] / block.places)


def _input_variances(block: KronBlock, prior: Params) -> Tensor:
    """The prior variance of a weight by the input that it multiplies: (I,)."""
    for name in block.names:
        if prior[name].dim():
            raise InputError(
                f"Kron() takes one prior variance for each parameter tensor, but prior_var for '{name}' has "
                f"shape {tuple(prior[name].shape)}. Pass a number, or structure=Full(), Diagonal() or "
                "FunctionSpace()."
            )
    I = block.A.shape[-1]
    weight = prior[block.names[0]].double()
    if len(block.names) == 1:
        return weight.expand(I)
    return torch.cat([weight.expand(I - 1), prior[block.names[1]].double()[None]])


@covariance.register
def _(curvature: KronCurvature, prior: Params, params: Params, scale: float) -> KronCovariance:
    layers: list[KronRoot | DenseRoot | DiagonalRoot] = []
    for block in curvature.blocks:
        if isinstance(block, KronBlock):
            layers.append(kron_root(block, prior, scale))
            continue
        v = prior_vector(prior, {n: params[n] for n in block.names})
        if isinstance(block, DiagonalBlock):
            variance = v / (1 + scale * v * block.diagonal)
            shape = params[block.names[0]].shape
            layers.append(DiagonalRoot(block.names, variance.reshape(shape)))
        else:
            layers.append(DenseRoot(block.names, _dense_root(block.H, v, scale)))
    return KronCovariance(tuple(layers), tuple(params))


def kron_root(block: KronBlock, prior: Params, scale: float) -> KronRoot:
    """One layer's Σ in the eigenbasis of its factors."""
    root = _input_variances(block, prior).sqrt()
    A, QA, G, QG = block.spectrum
    if bool((root == root[0]).all()):
        A = A * root[0].square()
    else:
        A, QA = torch.linalg.eigh(root[:, None] * block.A * root)
    gain = A.clamp(min=0)[:, None, :] * G[:, :, None] / block.places
    return KronRoot(block.names, root, QA, QG, (1 + scale * gain).rsqrt())


@log_det.register
def _(
    curvature: LastLayerCurvature, prior: Params, params: Params, scale: float | Tensor
) -> Tensor:
    inner = curvature.inner
    if isinstance(inner, KronBlock):
        return _kron_log_det(inner, prior, scale)
    v = _by_class(curvature, prior, params)
    if isinstance(inner, DiagonalCurvature):
        return _log1p_sum(scale * v * inner.diagonal)
    return _full_log_det(inner, prior, v, scale)


def _by_class(curvature: LastLayerCurvature, prior: Params, params: Params) -> Tensor:
    """Prior variances in the order (c, i), the bias behind each class's weights: (C·D',)."""
    return weights_of(
        {n: prior[n].double().expand(params[n].shape) for n in curvature.names}
    ).reshape(-1)


@covariance.register
def _(curvature: LastLayerCurvature, prior: Params, params: Params, scale: float) -> Covariance:
    inner, bias = curvature.inner, len(curvature.names) == 2
    if isinstance(inner, KronBlock):
        return LastLayerKron(kron_root(inner, prior, scale))
    v = _by_class(curvature, prior, params)
    C = params[curvature.names[0]].shape[0]
    if isinstance(inner, DiagonalCurvature):
        return LastLayerDiagonal((v / (1 + scale * v * inner.diagonal)).reshape(C, -1), bias)
    return LastLayerFull(_dense_factor(inner.H, v, scale), v.sqrt(), C, bias)


def trace(curvature: object) -> float:
    """tr H."""
    if isinstance(curvature, LastLayerCurvature):
        return trace(curvature.inner)
    if isinstance(curvature, KronCurvature):
        return sum(trace(block) for block in curvature.blocks)
    if isinstance(curvature, KronBlock):
        sizes = [m.diagonal(dim1=1, dim2=2).sum(1) for m in (curvature.A, curvature.G)]
        return float((sizes[0] * sizes[1]).sum()) / curvature.places
    if isinstance(curvature, FullCurvature | DenseBlock | SubsetCurvature):
        return float(curvature.H.trace())
    if isinstance(curvature, DiagonalCurvature | DiagonalBlock):
        return float(curvature.diagonal.sum())
    assert isinstance(curvature, LowRankCurvature)
    return float(curvature.values.sum())
