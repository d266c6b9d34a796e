"""How far results of a network in half precision may be off, from nothing but the unit roundoff.

Each operation rounds each number that it returns by a factor 1 + δ with |δ| ≤ u, forward and backward. The
same network in float64, in which every operation multiplies what it returns by 1 ± u with random signs, shows
how such errors add up. A single rounding is uniform rather than at the ends, so that errors of a real pass
have 1/√3 of this size, and three times this size is more than five standard deviations.
"""

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Half of the distance between one and the next number."""


class Rounding(TorchFunctionMode):
    """A context in which all functions round, up or down by chance, in both directions of a pass."""

    def __init__(self, unit: float, seed: int) -> None:
        super().__init__()
        self.unit, self.generator = unit, torch.Generator().manual_seed(seed)

    def noise(self, value: Tensor) -> Tensor:
        signs = torch.randint(0, 2, value.shape, generator=self.generator).to(value) * 2 - 1
        return 1 + self.unit * signs

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        out = function(*arguments, **(keywords or {}))
        inside = [value for value in arguments if isinstance(value, Tensor)]
        if not isinstance(out, Tensor) or not out.is_floating_point():
            return out
        if any(
            value.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
            for value in inside
        ):
            return out  # a view, which rounds nothing
        rounded = out * self.noise(out)
        if rounded.requires_grad:
            rounded.register_hook(lambda g: g * self.noise(g))
        return rounded


def same(passes: Tensor) -> Tensor:
    return passes


def spread(passes, kind: torch.dtype, then=same, draws: int = 4) -> float:
    """The root mean square of the relative change of `then(passes())` by rounding within `passes`."""
    exact = then(passes().detach())
    errors = []
    for seed in range(draws):
        with Rounding(UNIT[kind], seed):
            found = passes().detach()
        errors.append(float((then(found) - exact).norm() / exact.norm()))
    return (sum(error**2 for error in errors) / draws) ** 0.5


def assert_rounds_to(found, passes, kind: torch.dtype, then=same) -> None:
    """Compare results of half precision with `then(passes())`, whose passes are in float64."""
    exact, expected = then(passes().detach()), spread(passes, kind, then)
    assert expected < 0.1, "rounding alone changes the result, so that nothing is compared"
    for one in found if isinstance(found, tuple) else (found,):
        error = float((one.double() - exact).norm() / exact.norm())
        assert error <= 3 * expected, (
            f"relative error {error:.2g}, rounding explains {expected:.2g}"
        )
