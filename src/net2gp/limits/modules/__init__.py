"""Modules that torch lacks and that have a limit of infinite width: activations and structural layers.

Put them in a network like any `nn.Module`. What they are in the limit is said elsewhere: in `duals` for the
activations of `pointwise`, and in `rules` for the layers of `layers`.

>>> from torch import nn
>>> from net2gp.limits.modules import Erf
>>> nn.Sequential(nn.Linear(2, 64), Erf(), nn.Linear(64, 1))[1]
Erf(1.0, 1.0, 0.0)
"""

from net2gp.limits.modules.layers import (
    LocallyConnected1d,
    LocallyConnected2d,
    SumPool1d,
    SumPool2d,
    SumPool3d,
)
from net2gp.limits.modules.pointwise import (
    ABReLU,
    Abs,
    Cos,
    Erf,
    Exp,
    ExpNormalized,
    Gabor,
    GaussianBump,
    Hermite,
    Monomial,
    Pointwise,
    Polynomial,
    Rbf,
    RectifiedMonomial,
    SigmoidLike,
    Sign,
    Sin,
    Step,
)

__all__ = [
    "ABReLU",
    "Abs",
    "Cos",
    "Erf",
    "Exp",
    "ExpNormalized",
    "Gabor",
    "GaussianBump",
    "Hermite",
    "LocallyConnected1d",
    "LocallyConnected2d",
    "Monomial",
    "Pointwise",
    "Polynomial",
    "Rbf",
    "RectifiedMonomial",
    "SigmoidLike",
    "Sign",
    "Sin",
    "Step",
    "SumPool1d",
    "SumPool2d",
    "SumPool3d",
]
