"""Block-diagonal matrices of N blocks C × C, and roots of blocks. Rows run point by point, index n·C + c."""

from __future__ import annotations

from typing import Any

import torch
from scipy.linalg import eigh
from torch import Tensor

from net2gp.errors import InputError, NotPositiveDefinite
from net2gp.linalg.once import once


def block_matmul(blocks: Tensor, v: Tensor) -> Tensor:
    """Compute blockdiag(blocks) @ v in O(N C² k).

    Args:
        blocks: N blocks, (N, C, C).
        v: A matrix, (N·C, k).

    Returns:
        The product, (N·C, k).

    Raises:
        InputError: If `v` has another number of rows.

    >>> blocks = torch.stack([torch.eye(2), 3 * torch.eye(2)])
    >>> block_matmul(blocks, torch.ones(4, 1)).flatten()
    tensor([1., 1., 3., 3.])
    """
    N, C = _check_blocks(blocks)
    if v.dim() != 2 or v.shape[0] != N * C:
        raise InputError(
            f"{N} blocks of size {C} act on v of shape ({N * C}, k), but v has shape "
            f"{tuple(v.shape)}. Reshape an (N, C) tensor with v.reshape(-1, 1)."
        )
    return torch.bmm(blocks, v.reshape(N, C, -1)).reshape(v.shape)


def add_blocks(K: Tensor, blocks: Tensor) -> Tensor:
    """Compute K + blockdiag(blocks) as a new matrix, differentiable in both.

    Args:
        K: A matrix, (N·C, N·C).
        blocks: N blocks, (N, C, C).

    Returns:
        The sum, (N·C, N·C).

    Raises:
        InputError: If the sizes do not match.

    >>> add_blocks(torch.zeros(2, 2), torch.tensor([[[1.0]], [[2.0]]]))
    tensor([[1., 0.],
            [0., 2.]])
    """
    N, C = _check_blocks(blocks)
    if K.shape != (N * C, N * C):
        raise InputError(
            f"{N} blocks of size {C} are added to a matrix of shape ({N * C}, {N * C}), but K has "
            f"shape {tuple(K.shape)}. For independent outputs pass kron_identity(K, {C})."
        )
    total = K.to(torch.promote_types(K.dtype, blocks.dtype), copy=True)
    _on_the_diagonal(total, C).add_(blocks)
    return total


def diagonal_blocks(K: Tensor, C: int) -> Tensor:
    """Copy the diagonal blocks out of a matrix, which can then be freed.

    Args:
        K: A matrix, (N·C, N·C).
        C: The size of a block.

    Returns:
        The blocks, (N, C, C).

    Raises:
        InputError: If K is not square or C does not divide its size.

    >>> diagonal_blocks(torch.arange(16.0).reshape(4, 4), 2)[1]
    tensor([[10., 11.],
            [14., 15.]])
    """
    if K.dim() != 2 or K.shape[0] != K.shape[1] or K.shape[0] % C:
        raise InputError(
            f"K must be square with a multiple of C = {C} rows, but has shape {tuple(K.shape)}."
        )
    return _on_the_diagonal(K, C).clone(memory_format=torch.contiguous_format)


def psd_root(blocks: Tensor, *, symmetric: bool = True) -> Tensor:
    """Compute a root S of each positive semi-definite block, S Sᵀ = block, in O(N C³).

    The root comes from an eigendecomposition, S = V √λ Vᵀ, so it is exact for singular blocks too, such as
    the curvature diag(p) − p pᵀ of a softmax. Its null space stays null: eigenvalues that are negative, or
    zero up to the rounding of the input, are set to zero. Gradients flow through eigh, so they exist where
    the eigenvalues of a block differ.

    Args:
        blocks: Positive semi-definite matrices, (…, C, C).
        symmetric: Whether S is symmetric. With False, S = V √λ, whose columns are orthogonal and small where
            the eigenvalue is small.

    Returns:
        Roots, (…, C, C), in float64.

    Raises:
        InputError: If the blocks are not square.
        NotPositiveDefinite: If an eigenvalue is clearly negative, below −1e-4 both in absolute terms and
            relative to the block.

    >>> psd_root(torch.tensor([[[4.0, 0.0], [0.0, 0.0]]]))
    tensor([[[2., 0.],
             [0., 0.]]], dtype=torch.float64)

    Reference: Higham, Functions of Matrices, 2008, chapter 6.
    """
    C = blocks.shape[-1]
    if blocks.dim() < 2 or blocks.shape[-2] != C:
        raise InputError(f"blocks must have shape (N, C, C), but have shape {tuple(blocks.shape)}.")
    work = blocks.to(torch.float64)
    if C == 1:
        values, vectors = work[..., 0], None
    else:
        values, vectors = torch.linalg.eigh(work)
    largest = values.detach().abs().amax(-1, keepdim=True)
    _check_not_negative(values.detach(), largest)
    rounding = C * torch.finfo(blocks.dtype).eps * largest
    small = values <= (0.0 if vectors is None else rounding)
    roots = torch.where(small, 0.0, values.where(~small, torch.ones_like(values)).sqrt())
    if vectors is None:
        return roots.unsqueeze(-1)
    columns = vectors * roots.unsqueeze(-2)
    return columns @ vectors.mT if symmetric else columns


def symmetric_root(A: Tensor) -> Tensor:
    """Compute the symmetric root S = V √λ Vᵀ of positive semi-definite A in O(n³).

    Eigenvalues that are negative by rounding count as zero. The derivative solves S dS + dS S = dA. Unlike
    the derivative of eigh, it exists where eigenvalues are equal, and at singular A too, as long as the rank
    does not change. There are first derivatives only.

    Args:
        A: Positive semi-definite matrices, (…, n, n).

    Returns:
        Roots, (…, n, n).

    >>> symmetric_root(torch.ones(2, 2, dtype=torch.float64))
    tensor([[0.7071, 0.7071],
            [0.7071, 0.7071]], dtype=torch.float64)

    Reference: Higham, Functions of Matrices, 2008, chapter 6.
    """
    return _SymmetricRoot.apply(A)


class _SymmetricRoot(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, A: Tensor) -> Tensor:
        values, V = torch.linalg.eigh(A)
        rounding = A.shape[-1] * torch.finfo(A.dtype).eps * values[..., -1:]
        roots = torch.where(values > rounding, values, 0.0).sqrt()
        ctx.save_for_backward(roots, V, A)
        return (V * roots[..., None, :]) @ V.mT

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        roots, V, A = ctx.saved_tensors
        grad = grads[0].detach()
        sums = roots[..., :, None] + roots[..., None, :]
        inner = V.mT @ (0.5 * (grad + grad.mT)) @ V
        # Between two null directions, a semi-definite A of fixed rank does not change at first order.
        found = V @ torch.where(sums > 0, inner / sums.where(sums > 0, 1.0), 0.0) @ V.mT
        return once([found], [A, grads[0]], "a symmetric root")[0]


def kron_identity(K: Tensor, C: int) -> Tensor:
    """Compute K ⊗ I_C, the covariance of C independent outputs that share K.

    Args:
        K: A matrix, (N, M).
        C: The number of outputs.

    Returns:
        The covariance, (N·C, M·C).

    >>> kron_identity(torch.tensor([[1.0, 2.0]]), 2)
    tensor([[1., 0., 2., 0.],
            [0., 1., 0., 2.]])
    """
    N, M = K.shape
    out = K.new_zeros(N, C, M, C)
    out.diagonal(dim1=1, dim2=3).copy_(K.unsqueeze(-1).expand(N, M, C))
    return out.reshape(N * C, M * C)


def _on_the_diagonal(K: Tensor, C: int) -> Tensor:
    """Return a view (N, C, C) of the diagonal blocks of K."""
    N = K.shape[0] // C
    return K.unflatten(0, (N, C)).unflatten(2, (N, C)).diagonal(dim1=0, dim2=2).permute(2, 0, 1)


def _check_blocks(blocks: Tensor) -> tuple[int, int]:
    if blocks.dim() != 3 or blocks.shape[1] != blocks.shape[2]:
        raise InputError(f"blocks must have shape (N, C, C), but have shape {tuple(blocks.shape)}.")
    return blocks.shape[0], blocks.shape[1]


def _check_not_negative(values: Tensor, largest: Tensor) -> None:
    """Raise if an eigenvalue is below zero by more than a float32 computation explains."""
    # The scale is at least 1, since 1 − p rounds by eps however small p − p² is for a saturated p.
    negative = (values < -1e-4 * largest.clamp(min=1.0)).any(-1)
    if bool(negative.any()):
        first = int(negative.reshape(-1).nonzero()[0])
        lowest = float(values.reshape(-1, values.shape[-1])[first].min())
        raise NotPositiveDefinite(
            f"a root needs positive semi-definite blocks, but block {first} has the eigenvalue "
            f"{lowest:.3g}. Pass the Fisher information (likelihood.curvature), which is never "
            "negative, in place of a Hessian."
        )


def softmax_root(p: Tensor) -> Tensor:
    """Compute R with R Rᵀ = diag(p) − p pᵀ.

    R is the Cholesky factor without its last column, which is zero. With the tails q_j = Σ_{k > j} p_k,
    column j is √(p_j q_j / q_{j−1}) times 1 on the diagonal and −p_i / q_j below it. The formula has no
    differences, so small probabilities keep their digits. For a single class, R is one column of zeros.

    Args:
        p: Probabilities, (N, C).

    Returns:
        Roots, (N, C, C − 1).

    >>> p = torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.float64)
    >>> R = softmax_root(p)
    >>> torch.allclose(R @ R.mT, torch.diag_embed(p) - p[:, :, None] * p[:, None, :])
    True

    Reference: Tanabe, Sagae, An exact Cholesky decomposition and the generalized inverse of the
    variance-covariance matrix of the multinomial distribution, with applications, 1992.
    """
    if p.shape[-1] == 1:
        return torch.zeros_like(p)[..., None]
    tails = p.flip(-1).cumsum(-1).flip(-1)  # q_{j−1}, as it starts with p_j
    tiny = torch.finfo(p.dtype).tiny
    before, after = tails[:, :-1], tails[:, 1:]
    size = (p[:, :-1] * (after / before.clamp(min=tiny))).sqrt()
    below = -(p[:, :, None] / after.clamp(min=tiny)[:, None, :]).tril(-1)
    unit = torch.eye(p.shape[-1], dtype=p.dtype, device=p.device)[:, :-1]
    return (unit + below) * size[:, None, :]


def symmetric_eigen(A: Tensor) -> tuple[Tensor, Tensor]:
    """Compute eigenvalues and eigenvectors of a symmetric matrix.

    torch's divide and conquer can fail where eigenvalues span hundreds of powers of ten or repeat many
    times. Relatively robust representations (LAPACK's syevr, Dhillon & Parlett 2004) then replace it.

    Args:
        A: A symmetric matrix, (n, n).

    Returns:
        Ascending eigenvalues (n,) and eigenvectors (n, n).

    >>> symmetric_eigen(torch.diag(torch.tensor([3.0, 1.0])))[0]
    tensor([1., 3.])
    """
    try:
        values, vectors = torch.linalg.eigh(A)
    except RuntimeError:
        found = eigh(A.detach().cpu().numpy(), driver="evr")
        values, vectors = (torch.from_numpy(part).to(A) for part in found)
    return values, vectors
