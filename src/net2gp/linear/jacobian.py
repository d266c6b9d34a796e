"""The Jacobian itself, for when it fits."""

from __future__ import annotations

from torch import Tensor

from net2gp.errors import check_memory
from net2gp.inputs import check_inputs, num_rows, rows
from net2gp.linear.capture import capture, leftover_jacobian, plan
from net2gp.linear.factors import Direct
from net2gp.linear.factors import jacobian as factor_jacobian
from net2gp.linear.linearized import Linearized
from net2gp.linear.passes import check_device
from net2gp.types import Inputs


def jacobian(linearized: Linearized, x: Inputs) -> Tensor:
    """J(x): (N, C, P), from the same structured gradients as the kernel."""
    check_inputs(x)
    check_device(x, linearized)
    layout = plan(linearized, x)
    C, N, P = layout.num_outputs, num_rows(x), linearized.num_params
    like = linearized.example
    check_memory(
        2.2 * like.element_size() * N * C * P,
        like.device,
        f"a Jacobian of {N} × {C} × {P}",
        "use linearized.kernel(), jvp and vjp, which never store it, or fewer parameters with only=",
    )
    J = like.new_empty(N, C, P)
    size = max(1, 2**30 // max(1, 2 * layout.bytes_per_point))
    for start in range(0, N, size):
        part = rows(x, slice(start, start + size))
        factors = capture(linearized, part, layout)
        column = 0
        for name, value in linearized.params.items():
            factor = factors.get(name) or Direct(leftover_jacobian(linearized, part, [name]))
            J[start : start + size, :, column : column + value.numel()] = factor_jacobian(factor)
            column += value.numel()
    return J
