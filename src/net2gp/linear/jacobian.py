"""The Jacobian itself, for when it fits."""

from __future__ import annotations

from torch import Tensor

from net2gp.errors import check_memory
from net2gp.inputs import check_inputs, num_rows, rows
from net2gp.linear.capture import capture, gradients_apart, plan
from net2gp.linear.factors import jacobian as factor_jacobian
from net2gp.linear.linearized import Linearized
from net2gp.linear.passes import check_device
from net2gp.types import Inputs


def jacobian(linearized: Linearized, x: Inputs, *, training: bool = True) -> Tensor:
    """J(x): (N, C, P), from the same structured gradients as the kernel.

    For points to be trained on, parameters that none of them uses are refused.
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
    J = like.new_empty(N, C, P)
    size = max(1, 2**30 // max(1, 2 * layout.bytes_per_point))
    for start in range(0, N, size):
        part = rows(x, slice(start, start + size))
        factors = capture(linearized, part, layout)
        apart = gradients_apart(linearized, part, layout.leftover)
        column = 0
        for name, value in linearized.params.items():
            found = apart[name] if name in apart else factor_jacobian(factors[name])
            J[start : start + size, :, column : column + value.numel()] = found
            column += value.numel()
    return J
