"""Laplace's evidence of classes whose logits share one kernel, class by class."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MOST_STEPS, TOL = 100, 1e-9
"""Newton steps, and the relative change of f at which they end."""


class Mode(NamedTuple):
    """The mode f = K α of the posterior, and Laplace's evidence there.

    Args:
        alpha: α, (N, C).
        evidence: log p(y), approximately.
    """

    alpha: Tensor
    evidence: float


def softmax_mode(K: Tensor, codes: Tensor, weights: Tensor, alpha: Tensor) -> Mode:
    """Find the mode of Σ_n w_n log softmax(f_n)_{y_n} − ½ Σ_c f_cᵀK⁻¹f_c by Newton's method.

    With p = softmax(f) the negative Hessian of the likelihood is W = D − PPᵀ, D = diag(w p), P = √w p. Hence,
    for E_c = (D_c⁻¹ + K)⁻¹ and the stacked identities S,

        (K + W⁻¹)⁻¹ = E − E S (Σ_c E_c)⁻¹ Sᵀ E,
        log|I + KW| = Σ_c log|I + K D_c| + log|Σ_c E_c| − Σ_n log w_n,

    which costs C·N³ for each step, where all logits together would cost (N·C)³/3.

    Args:
        K: The Gram matrix that the logits of all classes share, (N, N), in float64.
        codes: One-hot codes of the labels, (N, C).
        weights: How often each point counts, (N,).
        alpha: Where to start, (N, C).

    Returns:
        The mode and the evidence.

    Reference: Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, algorithm 3.3, whose
    evidence lacks the second and third determinant.
    """
    w = weights[:, None]

    def objective(f: Tensor, alpha: Tensor) -> Tensor:
        return (w * codes * f.log_softmax(1)).sum() - 0.5 * (alpha * f).sum()

    f = K @ alpha
    value = objective(f, alpha)
    for _ in range(MOST_STEPS):
        p = f.softmax(1)
        D = w * p
        b = D * f - p * (D * f).sum(1, keepdim=True) + w * (codes - p)
        E, M, _ = _factors(K, D)
        c = (E @ (K @ b).mT[..., None])[..., 0]
        shared = torch.cholesky_solve(c.sum(0)[:, None], M)
        target = b - c.mT + (E @ shared)[..., 0].mT
        step = 1.0
        while True:
            moved = torch.lerp(alpha, target, step)
            new_f = K @ moved
            new_value = objective(new_f, moved)
            if bool(new_value >= value - 1e-12 * (1 + value.abs())) or step < 1e-6:
                break
            step /= 2
        change = float((new_f - f).abs().max() / (1 + f.abs().max()))
        alpha, f, value = moved, new_f, new_value
        if change < TOL:
            break
    log_det = _factors(K, w * f.softmax(1))[2] - weights.log().sum()
    return Mode(alpha, float(value - 0.5 * log_det))


def _factors(K: Tensor, D: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All E_c (C, N, N), a Cholesky factor of their sum, and Σ_c log|I + K D_c| + log|Σ_c E_c|."""
    root = D.sqrt().mT
    inner = root[:, :, None] * K * root[:, None, :]
    inner.diagonal(dim1=1, dim2=2).add_(1.0)
    L = torch.linalg.cholesky(inner)
    E = root[:, :, None] * torch.cholesky_inverse(L) * root[:, None, :]
    M = torch.linalg.cholesky(E.sum(0))
    diagonals = L.diagonal(dim1=1, dim2=2), M.diagonal()
    return E, M, 2 * sum(diagonal.log().sum() for diagonal in diagonals)
