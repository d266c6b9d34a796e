"""The Jacobian itself, for networks and data where it fits into memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from net2gp.inputs import check_inputs, follows, num_rows, rows
from net2gp.linear.forward.factors import jacobian as factor_jacobian
from net2gp.linear.jacobians.capture import capture, gradients_apart, plan
from net2gp.linear.jacobians.passes import check_device
from net2gp.memory import check_memory
from net2gp.types import Inputs

if TYPE_CHECKING:
    from net2gp.linear.linearized import Linearized


def jacobian(linearized: Linearized, x: Inputs, *, training: bool = True) -> Tensor:
    """Compute J(x) (N, C, P) from the same structured gradients as the kernel.

    With `training`, parameters that no point uses are refused.
    """
    check_inputs(x)
    check_device(x, linearized)
    layout = plan(linearized, x, training=training)
    C, N, P = layout.num_outputs, num_rows(x), linearized.num_params
    like = linearized.example
    check_memory(
        2.2 * like.element_size() * N * C * P,
        like.device,
        f"a Jacobian of {N} × {C} × {P}",
        "use linearized.kernel(), jvp and vjp, which never store it, or fewer parameters with only=",
    )
    # no buffer if autograd records, which would copy all of J for each write into it
    J = None if follows(x) else like.new_empty(N, C, P)
    sizes = [value.numel() for value in linearized.params.values()]
    parts = []
    size = max(1, 2**30 // max(1, 2 * layout.bytes_per_point))
    for start in range(0, N, size):
        part = rows(x, slice(start, start + size))
        factors = capture(linearized, part, layout)
        apart = gradients_apart(linearized, part, layout.leftover)
        columns = (
            apart[n] if n in apart else factor_jacobian(factors[n]) for n in linearized.params
        )
        if J is None:
            parts.append(torch.cat(list(columns), -1))
            continue
        for column, place in zip(columns, J.split(sizes, -1), strict=True):
            place[start : start + size] = column
    return torch.cat(parts) if J is None else J
