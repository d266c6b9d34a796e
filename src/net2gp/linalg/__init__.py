"""Pure tensor maths: factorizations and iterative methods, without kernels or networks."""

from net2gp.linalg.blocks import (
    add_blocks,
    block_matmul,
    diagonal_blocks,
    kron_identity,
    psd_root,
    softmax_root,
    symmetric_eigen,
    symmetric_root,
)
from net2gp.linalg.cg import Preconditioner, Solution, block_cg
from net2gp.linalg.checkpoint import Checkpoint
from net2gp.linalg.cholesky import Cholesky, cholesky
from net2gp.linalg.lanczos import Tridiagonal, inverse_root, lanczos, log_det_quadrature
from net2gp.linalg.low_rank import (
    LowRankPlusIdentity,
    Pivots,
    nystrom,
    pivoted_cholesky,
    pivots,
    psd_eigen,
)

__all__ = [
    "Checkpoint",
    "Cholesky",
    "LowRankPlusIdentity",
    "Pivots",
    "Preconditioner",
    "Solution",
    "Tridiagonal",
    "add_blocks",
    "block_cg",
    "block_matmul",
    "cholesky",
    "diagonal_blocks",
    "inverse_root",
    "kron_identity",
    "lanczos",
    "log_det_quadrature",
    "nystrom",
    "pivoted_cholesky",
    "pivots",
    "psd_eigen",
    "psd_root",
    "softmax_root",
    "symmetric_eigen",
    "symmetric_root",
]
