"""How well a kernel fits targets: the centered alignment, which feature learning raises."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from net2gp.errors import InputError
from net2gp.inputs import describe, gather
from net2gp.linear.linearized import Linearized, linearize
from net2gp.types import Data, Kernel


def kernel_alignment(kernel: Kernel | Linearized | nn.Module, data: Data) -> Tensor:
    """Compute the centered alignment of a kernel with targets, ⟨K_c, Y_c⟩/(‖K_c‖ ‖Y_c‖).

    K_c = HKH with H = I − 11ᵀ/N is the centered kernel matrix, averaged over outputs if the kernel couples
    them, and Y_c = H y yᵀ H. The alignment is 1 if the kernel is y yᵀ up to a factor and a constant, and
    near 0 if it knows nothing of the targets. Training raises the alignment of a network's tangent kernel
    with what it learns, and raises it less the wider the network is: in the limit of infinite width the
    tangent kernel stays as it was, so nothing is learned about features. Cost: the kernel matrix of N points.

    Args:
        kernel: A kernel; or a network or its linearization, for its tangent kernel with unit prior variances.
        data: Inputs and targets; whole numbers are classes, and real targets are (N,) or (N, C).

    Returns:
        The alignment, a scalar in float64.

    Raises:
        InputError: If `kernel` is no kernel, or the centered kernel or targets are zero.

    >>> from net2gp.kernels import RBF
    >>> x = torch.tensor([[-9.0], [-9.1], [9.0], [9.1]])
    >>> kernel_alignment(RBF(), (x, torch.tensor([0, 0, 1, 1]))) > 0.99
    tensor(True)

    References: Cortes, Mohri & Rostamizadeh, Algorithms for learning kernels based on centered alignment,
    JMLR 2012; Atanasov et al., Neural networks as kernel learners, ICLR 2022.
    """
    if isinstance(kernel, nn.Module):
        kernel = linearize(kernel)
    like = kernel.example if isinstance(kernel, Linearized) else None
    if isinstance(kernel, Linearized):
        kernel = kernel.trace_kernel()
    if not isinstance(kernel, Kernel):
        raise InputError(
            f"kernel must be a kernel, a network or its linearization, but is {describe(kernel)}."
        )
    x, y = gather(data, like)
    matrix = kernel(x).detach().double()
    outputs = kernel.outputs(x)
    if outputs is not None:
        matrix = matrix.reshape(len(y), outputs, len(y), outputs).diagonal(dim1=1, dim2=3).mean(-1)
    targets = _columns(y).to(matrix.device)
    centered, goal = matrix - matrix.mean(0), targets - targets.mean(0)
    centered = centered - centered.mean(1, keepdim=True)
    lengths = centered.norm() * (goal.mT @ goal).norm()
    if not bool(lengths > 0):
        raise InputError(
            "the kernel or the targets are the same at all points, so there is nothing to align. Pass "
            "targets that differ."
        )
    return (goal * (centered @ goal)).sum() / lengths


def _columns(y: Tensor) -> Tensor:
    """Real targets (N, C), or the indicators of the classes."""
    if y.is_floating_point():
        return y.double().reshape(len(y), -1)
    classes = y.reshape(-1).unique(return_inverse=True)[1]
    return torch.nn.functional.one_hot(classes).double()
