from __future__ import annotations

import pytest
import torch
from torch import Tensor

from net2gp.linalg import (
    LowRankPlusIdentity,
    add_blocks,
    block_cg,
    block_matmul,
    cholesky,
    diagonal_blocks,
    inverse_root,
    kron_identity,
    lanczos,
    log_det_quadrature,
    nystrom,
    pivoted_cholesky,
    psd_root,
)

NUM = 50


def everything(device: str) -> dict[str, Tensor]:
    """One result of each function, computed from the same numbers on `device`."""
    x = torch.linspace(0, 1, NUM, dtype=torch.float64, device=device)
    K = torch.exp(-0.5 * ((x[:, None] - x) / 0.2) ** 2)
    A = K + 0.1 * torch.eye(NUM, dtype=torch.float64, device=device)
    b = torch.stack([torch.sin(9 * x), x], 1)
    generator = torch.Generator().manual_seed(0)
    factor = cholesky(A[:30, :30]).extend(A[:30, 30:], A[30:, 30:])
    L = pivoted_cholesky(K.diagonal(), lambda i: K[:, i], 20, block=4)
    U, values = nystrom(lambda v: K @ v, NUM, 10, generator=generator, device=device)
    preconditioner = LowRankPlusIdentity(U, values / 0.1)
    R = inverse_root(lanczos(lambda v: A @ v, b[:, 0], 10))
    estimate, error = log_det_quadrature(lambda v: A @ v, NUM, generator=generator, device=device)
    blocks = diagonal_blocks(A, 2)
    return {
        "factor": factor.L,
        "solve": factor.solve(b),
        "log_det": factor.log_det(),
        "cg": block_cg(lambda v: A @ v, b, preconditioner=preconditioner, tol=1e-10).x,
        "pivoted": L @ L.mT,
        "nystrom": U * values @ U.mT,
        "inverse": preconditioner.inverse(b),
        "cached": R @ R.mT,
        "quadrature": torch.stack([estimate, error]),
        "root": psd_root(blocks),
        "block_matmul": block_matmul(blocks, b),
        "add_blocks": add_blocks(K, blocks),
        "kron": kron_identity(K, 2),
    }


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_results_live_on_the_device_of_the_input_and_do_not_depend_on_it(device: str) -> None:
    here, reference = everything(device), everything("cpu")
    for name, value in here.items():
        assert value.device.type == device, name
        torch.testing.assert_close(value.cpu(), reference[name], rtol=1e-6, atol=1e-6)
