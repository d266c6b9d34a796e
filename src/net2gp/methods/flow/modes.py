"""The directions in which training in function space moves, and how fast each residual decays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from net2gp.errors import InputError, Net2GPWarning, NotPositiveDefinite, check_positive, warn
from net2gp.inputs import describe

Times = float | Sequence[float] | Tensor | np.ndarray
"""A time, or an array of times, in steps of gradient descent; `math.inf` is convergence."""


class NeverLearned(Net2GPWarning):
    """Training never fits a part of the targets, since the tangent kernel is singular in its directions."""


@dataclass(frozen=True)
class Relative:
    """A ridge relative to the mean diagonal of the kernel that it is added to.

    Args:
        part: The ridge divided by the mean diagonal, zero or positive.

    Raises:
        InputError: If the part is negative.

    >>> Relative(1e-3)
    Relative(part=0.001)
    """

    part: float

    def __post_init__(self) -> None:
        check_positive(self.part, "part", zero=True)


Ridge = float | Relative


@dataclass(frozen=True)
class Descent:
    """Gradient descent with small steps, and the decay D of the residual in a direction with rate r.

    Without momentum, D' = −rD in the time τ = learning_rate·t, so D = exp(−rτ). With momentum,
    D'' = −γD' − rD in the time s = √learning_rate·t with γ = (1 − momentum)/√learning_rate, from D(0) = 1 and
    D'(0) = 0, which is a damped oscillator.

    Args:
        learning_rate: The learning rate of gradient descent.
        momentum: Its momentum, or None.
    """

    learning_rate: float
    momentum: float | None = None

    def scaled(self, times: Tensor) -> Tensor:
        """The time of the differential equation, from the number of steps."""
        rate = self.learning_rate
        return times * (rate if self.momentum is None else rate**0.5)

    @property
    def damping(self) -> float:
        """The damping γ."""
        assert self.momentum is not None
        return (1.0 - self.momentum) / self.learning_rate**0.5

    def progress(self, rates: Tensor, times: Tensor) -> Tensor:
        """1 − D for each time (first axis) and rate (second axis)."""
        tau = self.scaled(times)[:, None]
        # An infinite time would give 0 · ∞ in directions that are never learned, so it is handled apart.
        end = torch.isinf(tau)
        tau = torch.where(end, 0.0, tau)
        lost = -torch.expm1(-rates * tau) if self.momentum is None else self._damped(rates, tau)
        return torch.where(end & (rates > 0), 1.0, lost)

    def remaining(self, rates: Tensor, steps: Tensor) -> Tensor:
        """D after whole steps of descent, for each number of steps (first axis) and rate (second axis).

        With η the learning rate and μ the momentum, D_{k+1} = (1 + μ − ηr) D_k − μ D_{k−1} from D_0 = 1 and
        D_1 = 1 − ηr. Flow is its limit for small η.
        """
        first = 1.0 - self.learning_rate * rates
        if self.momentum is None:
            return first ** steps[:, None]
        ones = torch.ones_like(rates)
        moves = [torch.stack([first + self.momentum, -self.momentum * ones], -1)]
        matrix = torch.stack([*moves, torch.stack([ones, 0.0 * ones], -1)], -2)
        begin = torch.stack([first, ones], -1)[..., None]
        left = [torch.linalg.matrix_power(matrix, int(k)) @ begin for k in steps]
        return torch.stack(left)[:, :, 1, 0].nan_to_num(nan=torch.inf)

    def time_constants(self, rates: Tensor) -> Tensor:
        """The steps in which D shrinks by a factor e: −1/log ρ for the factor ρ of a step in the long run.

        It is infinite where a direction is never learned, or diverges.
        """
        momentum, moved = self.momentum or 0.0, self.learning_rate * rates
        middle = 1.0 + momentum - moved
        root = middle.square() - 4.0 * momentum
        real = root.clamp(min=0.0).sqrt()
        # 1 − ρ of a slow direction is not a difference of nearly equal numbers in this form.
        slow = -torch.log1p(-2.0 * moved / (1.0 - momentum + moved + real))
        other = torch.where(root < 0, torch.full_like(root, momentum).sqrt(), (real - middle) / 2.0)
        fall = torch.where((root >= 0) & (middle > 0), slow, -other.log())
        return torch.where(fall > 0, 1.0 / fall, torch.inf)

    def _damped(self, rates: Tensor, s: Tensor) -> Tensor:
        half = 0.5 * self.damping
        below = half**2 >= rates
        omega = (half**2 - rates).abs().sqrt()
        # Over-damped: D = e^{−as}(1 + a s φ(2ωs)), where φ(z) = (1 − e^{−z})/z and a = r/(γ/2 + ω) is the
        # slow root. In this form nothing cancels for small rates, and expm1 keeps the digits of 1 − D.
        slow = rates / (half + omega).clamp(min=1e-300)
        z = 2.0 * omega * s
        phi = torch.where(z > 0, -torch.expm1(-z) / torch.where(z > 0, z, 1.0), 1.0)
        over = -torch.expm1(-slow * s) - torch.exp(-slow * s) * slow * s * phi
        # Under-damped: D = e^{−γs/2}(cos ωs + γ/2·s·sinc ωs), where sinc is finite at ω = 0.
        wave = torch.cos(omega * s) + half * s * torch.sinc(omega * s / torch.pi)
        return torch.where(below, over, 1.0 - torch.exp(-half * s) * wave)


def make_descent(learning_rate: float, momentum: float | None) -> Descent:
    """A checked `Descent`."""
    check_positive(learning_rate, "learning_rate")
    if momentum is not None and not 0.0 <= momentum < 1.0:
        raise InputError(
            f"momentum must be at least 0 and below 1, but is {momentum:g}. Pass e.g. momentum=0.9."
        )
    return Descent(learning_rate, momentum)


@dataclass(frozen=True, eq=False)
class Modes:
    """The eigendecomposition Θ(X, X) + ridge = Q diag(values) Qᵀ.

    Args:
        values: The eigenvalues: (R,). Those within rounding error of zero are zero, and their directions are
            never learned.
        Q: The eigenvectors: (R, R).
        size: The number NC that the loss is divided by.
    """

    values: Tensor
    Q: Tensor
    size: int

    @staticmethod
    def empty(like: Tensor) -> Modes:
        """A decomposition without directions, which takes the place of the real one until it is known."""
        return Modes(like.new_zeros(0).double(), like.new_zeros(0, 0).double(), 1)

    def added(self, ridge: Ridge) -> float:
        """What the ridge has added to the diagonal, found from the trace if it is relative."""
        if isinstance(ridge, Relative):
            return ridge.part / (1.0 + ridge.part) * float(self.values.mean())
        return ridge

    def decays(self, descent: Descent, times: Tensor) -> Tensor:
        """D, the share of the residual in each direction that remains: (T, R)."""
        return 1.0 - descent.progress(self.values / self.size, times)

    def weights(self, descent: Descent, times: Tensor) -> Tensor:
        """(1 − D)/λ, and zero in directions that are never learned: (T, R)."""
        lost = descent.progress(self.values / self.size, times)
        learned = self.values > 0
        return torch.where(learned, lost / torch.where(learned, self.values, 1.0), 0.0)


def decompose(kernel: Tensor, ridge: Ridge, dtype: torch.dtype, size: int) -> Modes:
    """The modes of a tangent kernel (R, R), computed in `dtype`, with the ridge on its diagonal.

    Eigenvalues within the rounding error of the matrix count as zero: below R·eps times the largest one, or
    below the size of a negative one. In these directions Θ(x, X) consists of rounding errors too, which a
    division by the eigenvalue would blow up.
    """
    values, Q = torch.linalg.eigh(0.5 * (kernel + kernel.mT))
    lowest, largest = float(values[0]), float(values[-1])
    eps = torch.finfo(dtype if dtype.is_floating_point else torch.float64).eps
    if not largest > 0.0:
        raise InputError(
            "the tangent kernel is zero at the data, so that training changes nothing. Pass a positive "
            "weight_var, or parameters that have an effect there."
        )
    if lowest < -(eps**0.5) * largest:
        raise NotPositiveDefinite(
            f"the tangent kernel has the eigenvalue {lowest:.3g}, with {largest:.3g} the largest: it is no "
            "covariance. Check the kernel, or compute it in float64."
        )
    floor = max(len(values) * eps * largest, -lowest)
    added = ridge.part * float(kernel.diagonal().mean()) if isinstance(ridge, Relative) else ridge
    values = values.clamp(min=0.0) + added
    return Modes(torch.where(values > floor, values, 0.0), Q, size)


def warn_never_learned(modes: Modes, times: Tensor, residual: Tensor) -> None:
    """Warn if a part of the residual (R, columns) lies in directions that are never learned."""
    lost = modes.values == 0
    if not bool(lost.any()) or not bool(times.isinf().any()):
        return
    part = float(residual[lost].norm() / residual.norm().clamp(min=1e-300))
    if part > 1e-6:
        warn(
            f"the tangent kernel is singular to working precision: {int(lost.sum())} of its {len(lost)} "
            f"directions, with {part:.1e} of the targets, count as never learned. Pass "
            "ridge=Relative(1e-6), or remove duplicated points.",
            NeverLearned,
        )


def parse_times(t: Any, device: torch.device, name: str = "t") -> tuple[Tensor, tuple[int, ...]]:
    """The times as a flat float64 tensor, and their original shape; `name` is what messages call them."""
    try:
        times = torch.as_tensor(t, dtype=torch.float64, device=device)
        if torch.as_tensor(t).dtype == torch.bool:
            raise TypeError
    except (TypeError, ValueError, RuntimeError):
        raise InputError(
            f"{name} must be a number or an array of numbers, but is {describe(t)}. Pass e.g. {name}=10.0."
        ) from None
    if not bool((times >= 0).all()):
        raise InputError(f"{name} must be zero or positive, but has a negative or NaN time.")
    return times.reshape(-1), tuple(times.shape)
