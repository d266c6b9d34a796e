"""One polynomial for all layers of a network whose kernels depend only on the angle between two inputs.

Without positions, and with inputs of equal norm, all inputs have the same variance in every layer, so both
kernels are functions g(θ) of the angle between two inputs. Without biases, and with ReLU-like functions
only, they are |x||x'| g(θ) for inputs of any norm. g is smooth in the angle: a polynomial in
π/2 − θ = asin(ρ) of degree 12 approximates it to about 1e-7, and of degree 24 to 1e-13, at any depth. It is
fitted to the values of the program at Chebyshev nodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from net2gp.limits.duals.power_forms import ABReLU
from net2gp.limits.duals.quadrature import Quadrature
from net2gp.limits.moments.evaluation import Evaluation, Program
from net2gp.limits.moments.expression_moments import run
from net2gp.limits.prior import Prior
from net2gp.limits.signals import expressions as ex

DEGREES = (8, 12, 16, 24, 32, 48)
"""The degrees that are tried in turn."""

NODES = 1024
"""The number of angles at which the program is run, enough for activations to use tables of quadrature."""


@dataclass(frozen=True, eq=False)
class AnglePolynomial:
    """The function g(ρ) = Σ_k coefficients[k] asin(ρ)^k.

    Args:
        coefficients: The coefficients of each kernel, lowest power first.
        scaled: Whether the kernels are g times the product of the inputs' norms.
    """

    coefficients: tuple[tuple[float, ...], ...]
    scaled: bool

    def __call__(self, rho: Tensor) -> list[Tensor]:
        """Return the kernels at these cosines, and overwrite the cosines."""
        u = rho.clamp_(-1.0, 1.0).asin_()
        results = []
        for row in self.coefficients:
            value = torch.full_like(u, row[-1])
            for c in reversed(row[:-1]):
                torch.addcmul(
                    torch.full((), c, dtype=u.dtype, device=u.device), value, u, out=value
                )
            results.append(value)
        return results


def only_data(program: Program) -> ex.Raw | None:
    """Return the one tensor of the data that a program without positions reads, or None if there is none."""
    raws = [e for e in program.nodes if isinstance(e, ex.Raw)]
    if len({(e.reference, e.first, e.last) for e in raws}) != 1 or raws[0].tokens or raws[0].first:
        return None
    if any(
        e.positions or isinstance(e, ex.Gained | ex.Routed | ex.Attended) for e in program.nodes
    ):
        return None
    return raws[0]


def is_short(program: Program) -> bool:
    """Whether the program has few activations."""
    return sum(isinstance(e, ex.Point) for e in program.nodes) < 20


def has_closed_forms(program: Program) -> bool:
    """Whether no activation is integrated numerically."""
    points = [e for e in program.nodes if isinstance(e, ex.Point)]
    return not any(isinstance(e.activation, Quadrature) for e in points)


def is_homogeneous(program: Program, prior: Prior) -> bool:
    """Whether scaling the input scales the output, since there are no biases and only ReLU-like functions."""
    for e in program.nodes:
        match e:
            case ex.Point():
                if not isinstance(e.activation, ABReLU):
                    return False
            case ex.Weighted():
                if e.bias is not None and not _is_zero(prior.bias(e.bias)):
                    return False
            case ex.Raw() | ex.Sum() | ex.Mapped():
                pass
            case _:
                return False
    return True


def _is_zero(value: float | Tensor) -> bool:
    return not isinstance(value, Tensor) and value == 0


def fitted(
    program: Program, prior: Prior, tangent: bool, square: float, scaled: bool, tolerance: float
) -> AnglePolynomial | None:
    """Return the polynomial for inputs of mean square `square`, or None if no degree reaches the tolerance.

    It is a Chebyshev series that is fitted to the values at many nodes. The tolerance bounds the largest
    error at these nodes, relative to the largest value.
    """
    raw = only_data(program)
    assert raw is not None
    exact = prior.to("cpu", torch.float64)
    turns = (2 * np.arange(NODES) + 1) * math.pi / (2 * NODES)
    nodes = np.cos(turns) * math.pi / 2
    # near equal and opposite vectors acos magnifies the rounding of the program, which must not be fitted
    judged = np.abs(nodes) < 0.999 * math.pi / 2
    values = [value[judged] for value in _values(program, exact, raw, tangent, square, nodes)]
    top = max(np.abs(value).max() for value in values)
    for degree in DEGREES:
        waves = np.cos(np.outer(turns[judged], np.arange(degree + 1)))
        cut = [np.linalg.lstsq(waves, value, rcond=None)[0] for value in values]
        errors = [
            np.abs(waves @ row - value).max() / np.abs(value).max()
            for row, value in zip(cut, values, strict=True)
        ]
        rows = [_in_powers(row) for row in cut]
        spread = max(
            float(np.polynomial.polynomial.polyval(math.pi / 2, np.abs(row))) for row in rows
        )
        # a sum whose terms are much larger than its value would lose digits
        if max(errors) <= tolerance and spread < 100 * top:
            return AnglePolynomial(tuple(tuple(row.tolist()) for row in rows), scaled)
    return None


def _in_powers(series: np.ndarray) -> np.ndarray:
    """Convert a Chebyshev series on [−π/2, π/2] to coefficients of powers."""
    domain = [-math.pi / 2, math.pi / 2]
    chebyshev = np.polynomial.Chebyshev(series, domain)
    return chebyshev.convert(kind=np.polynomial.Polynomial, domain=domain, window=domain).coef


def _values(
    program: Program, prior: Prior, raw: ex.Raw, tangent: bool, square: float, angles: np.ndarray
) -> list[np.ndarray]:
    """Return both kernels between one vector and others at ρ = sin(angle).

    The vectors have two channels and the mean square `square`.
    """
    size = math.sqrt(2 * square)
    u = torch.from_numpy(np.ascontiguousarray(angles))
    one = {raw.reference: torch.tensor([[[0.0, size]]], dtype=torch.float64)}
    others = {raw.reference: size * torch.stack([u.cos(), u.sin()], -1)[None]}
    profiles = []
    for data in (one, others):
        alone = Evaluation(program, prior, tangent, data)
        run(alone)
        profiles.append(alone.profile)
    found = run(Evaluation(program, prior, tangent, one, others, (profiles[0], profiles[1])))
    return [t.detach()[0].numpy() for t in found if t is not None]
