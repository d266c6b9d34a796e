"""tanh in the limit as the program published with the paper had it: through a coarse table.

It shows what the table does to deep networks, and how an activation of your own is made known to net2gp.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from net2gp.limits import Activation, activation_of


class LookupTanh(nn.Module):
    """tanh whose limit is read off a coarse table, as in the program published with the paper."""

    def forward(self, x: Tensor) -> Tensor:
        """tanh, pointwise."""
        return x.tanh()


@dataclass(frozen=True, eq=False)
class Lookup:
    """E[φ(u) φ(v)] for u, v ~ N(0, q) of correlation c, bilinear in a table over q and c.

    The published table has steps of 0.2 in q and 0.004 in c, and ends at c = ±0.99999: inputs that are more
    alike than that become one. Only its resolution is copied here, the entries are exact.
    """

    exact: Activation
    variances: Tensor
    correlations: Tensor
    squares: Tensor
    products: Tensor

    @staticmethod
    def of(exact: Activation, largest: float) -> Lookup:
        """The table for variances up to `largest`."""
        variances = torch.linspace(1e-8, 100, 501, dtype=torch.float64)[: int(largest / 0.2) + 2]
        correlations = torch.linspace(-0.99999, 0.99999, 500, dtype=torch.float64)
        q = variances[1:, None]
        products = exact.dual(q * correlations, q, q, False)[0]
        squares = exact.variance(q[:, 0], False)[0]
        # at a variance of 1e-8 tanh is linear, to the last digit
        return Lookup(
            exact,
            variances,
            correlations,
            torch.cat([variances[:1], squares]),
            torch.cat([variances[:1, None] * correlations, products]),
        )

    def __call__(self, u: Tensor) -> Tensor:
        """φ(u)."""
        return self.exact(u)

    def mean(self, var: Tensor) -> Tensor:
        """E[φ], not tabulated."""
        return self.exact.mean(var)

    def mean_slope(self, var: Tensor) -> Tensor:
        """E[φ'], not tabulated."""
        return self.exact.mean_slope(var)

    def variance(self, var: Tensor, slope: bool) -> tuple[Tensor, Tensor | None]:
        """E[φ²], linear between entries; slopes are not tabulated."""
        i, f = _cell(var, self.variances)
        value = torch.lerp(self.squares[i], self.squares[i + 1], f)
        return value, self.exact.variance(var, True)[1] if slope else None

    def dual(
        self, cov: Tensor, var1: Tensor, var2: Tensor, slope: bool
    ) -> tuple[Tensor, Tensor | None]:
        """E[φ(u) φ(v)], bilinear between entries; slopes are not tabulated."""
        q = (var1 * var2).sqrt()
        i, f = _cell(q, self.variances)
        j, g = _cell(cov / q, self.correlations)
        columns = self.products.shape[1]
        at, table = i * columns + j, self.products.reshape(-1)
        low = torch.lerp(table[at], table[at + 1], g)
        high = torch.lerp(table[at + columns], table[at + columns + 1], g)
        slopes = self.exact.dual(cov, var1, var2, True)[1] if slope else None
        return torch.lerp(low, high, f), slopes


def _cell(values: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
    """The cell of an even grid that each value is in, and where in it; ends catch what is beyond."""
    place = (values.clamp(grid[0], grid[-1]) - grid[0]) / (grid[1] - grid[0])
    index = place.floor().clamp(0, len(grid) - 2).long()
    return index, place - index


@activation_of.register
def _(layer: LookupTanh) -> Activation:
    return _lookup_tanh()


@cache
def _lookup_tanh() -> Lookup:
    return Lookup.of(activation_of(nn.Tanh()), largest=8.0)
