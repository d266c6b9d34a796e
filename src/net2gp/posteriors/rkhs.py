"""The norm of functions in the space that a kernel spans."""

from __future__ import annotations

import torch
from torch import Tensor

from net2gp.errors import InputError, check_positive
from net2gp.inputs import gather, num_rows
from net2gp.linalg import cholesky
from net2gp.types import Data, Kernel


def rkhs_norm(kernel: Kernel, data: Data, *, noise_var: float | Tensor = 0.0) -> Tensor:
    """Return the squared norm αᵀKα of the function k(·, X) α that regression finds.

    Here α = (K + noise_var·I)⁻¹ y. Without noise it is yᵀK⁻¹y, the smallest squared norm among all functions
    through the data. It is small if the targets are smooth in the sense of the kernel. The norms of several
    outputs are added. Cost: N³, in float64 for data of every dtype.

    Args:
        kernel: The covariance function.
        data: (x, y) with real targets (N, C), or a DataLoader.
        noise_var: The noise variance, zero or positive.

    Returns:
        The squared norm, a float64 scalar.

    Raises:
        InputError: If the targets are not real numbers of shape (N, C), or the noise is negative.
        NotPositiveDefinite: If the kernel matrix is singular and there is no noise.

    >>> from net2gp.kernels import RBF
    >>> x = torch.tensor([[0.0], [1.0]])
    >>> rkhs_norm(RBF(), (x, torch.tensor([[1.0], [1.0]])))
    tensor(1.2449, dtype=torch.float64)

    Reference: Bietti and Mairal, On the inductive bias of neural tangent kernels, 2019.
    """
    check_positive(noise_var, "noise_var", zero=True)
    x, y = gather(data)
    kernel.check(x)
    K = kernel.precise()(x)
    targets = y.to(K)
    if targets.dim() == 1 or len(K) > num_rows(x):
        targets = targets.reshape(-1, 1)
    if targets.dim() != 2 or len(targets) != len(K):
        raise InputError(
            f"rkhs_norm needs real targets of shape (N, C) for the {num_rows(x)} points, but y has shape "
            f"{tuple(y.shape)}."
        )
    eye = torch.eye(len(K), dtype=K.dtype, device=K.device)
    alpha = cholesky(K + noise_var * eye, what="the kernel matrix").solve(targets)
    return (alpha * (K @ alpha)).sum()
