"""The curvature H = Σ_n J_nᵀ Λ_n J_n of a network's log-likelihood in its parameters, from gradients.

Λ_n (C, C) is the likelihood's curvature in the outputs, and Λ_n = R_n R_nᵀ. All structures are made from
the gradients of the entries of R_nᵀ f_n, K of them per point: H = Σ_n G_nᵀ G_n with G_n = R_nᵀ J_n (K, P).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from net2gp.errors import InputError
from net2gp.inputs import num_rows, rows
from net2gp.likelihoods.traits import bound_to, curvature_root, of_points, root_times
from net2gp.linalg.chance import by_rows
from net2gp.linear.forward.factors import Direct, Factor, Outer, sum_of_squares
from net2gp.linear.jacobians.capture import Plan, Seeds, capture, each_output, gradients_apart, plan
from net2gp.memory import available_memory
from net2gp.progress import progress
from net2gp.tags import savable
from net2gp.types import Inputs, Likelihood

if TYPE_CHECKING:
    from net2gp.linear.linearized import Linearized

CHUNK_BYTES = 2**28
"""The number of bytes that the gradients of one chunk of points may take."""


class Fisher:
    """How the curvature Λ_n of the likelihood at a point is computed, as a root R_n with Λ_n = R_n R_nᵀ."""

    def root(self, likelihood: Likelihood, f: Tensor, y: Tensor, start: int) -> Tensor:
        """Compute R_n of some points; its columns are the directions of the backward passes.

        Args:
            likelihood: The likelihood of all points.
            f: The outputs of the network at the points, (N, C).
            y: Their targets.
            start: The index of the first of these points among all points.

        Returns:
            The roots, (N, C, K), for K backward passes.

        Raises:
            NotImplementedError: If a subclass has no `root`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no root.")


@savable("curvature.GGN")
@dataclass(frozen=True)
class ExactFisher(Fisher):
    """The exact Fisher information Λ_n of the likelihood at f_n, with K = C backward passes.

    The curvature is then the generalized Gauss–Newton matrix, which is the Fisher information of the network.
    For classes Λ_n has rank C − 1, and that many passes are enough.

    Reference: Martens, New insights and perspectives on the natural gradient method, JMLR 2020.
    """

    def root(self, likelihood: Likelihood, f: Tensor, y: Tensor, start: int) -> Tensor:
        """Compute the exact root R_n, (N, C, K)."""
        part = of_points(likelihood, slice(start, start + len(f)))
        return curvature_root(bound_to(part, y), f)


@savable("curvature.EmpiricalFisher")
@dataclass(frozen=True)
class EmpiricalFisher(Fisher):
    """Outer products Λ_n = r_n r_nᵀ of the residuals of the observed labels, with K = 1 backward pass.

    This is not an estimate of the Fisher information: it vanishes where the network fits its labels.

    Reference: Kunstner, Balles, Hennig, Limitations of the empirical Fisher approximation, NeurIPS 2019.
    """

    def root(self, likelihood: Likelihood, f: Tensor, y: Tensor, start: int) -> Tensor:
        """Compute the residuals r_n, (N, C, 1)."""
        return of_points(likelihood, slice(start, start + len(f))).residual(f, y)[..., None]


@savable("curvature.MonteCarloFisher")
@dataclass(frozen=True)
class MonteCarloFisher(Fisher):
    """An unbiased estimate of the exact Λ_n from random combinations of the columns of its root.

    It serves networks with many outputs, for which C backward passes are too many.

    Args:
        num_samples: How many combinations per point, each a backward pass.
        seed: The seed of the random signs.

    Raises:
        InputError: If `num_samples` is less than 1.
    """

    num_samples: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise InputError(f"num_samples must be at least 1, but is {self.num_samples}.")

    def root(self, likelihood: Likelihood, f: Tensor, y: Tensor, start: int) -> Tensor:
        """Compute R_n z/√K, (N, C, K), with random signs z, whose second moment is the identity."""

        def signs(width: int) -> Tensor:
            def draw(count: int, generator: torch.Generator) -> Tensor:
                shape = (count, width, self.num_samples)
                return torch.randint(0, 2, shape, generator=generator)

            numbers = width * self.num_samples
            return by_rows(draw, start, len(f), self.seed, width=numbers).to(f) * 2 - 1

        part = of_points(likelihood, slice(start, start + len(f)))
        return root_times(bound_to(part, y), f, signs) / self.num_samples**0.5


@dataclass(frozen=True, eq=False)
class Source:
    """Everything that a curvature depends on.

    Args:
        linearized: The linearized network.
        x: The points.
        y: Their targets.
        likelihood: The likelihood.
        fisher: How the curvature of the likelihood is computed.
        first: The number of the first of these points among those of the likelihood.
    """

    linearized: Linearized
    x: Inputs
    y: Tensor
    likelihood: Likelihood
    fisher: Fisher = ExactFisher()
    first: int = 0

    def gradients(self, *, compress: bool = True) -> Iterator[dict[str, Factor]]:
        """Yield G_n chunk by chunk of points, as a factor per parameter."""
        for x, seeds, layout in self.parts():
            found = capture(self.linearized, x, layout, seeds, compress=compress)
            yield found | self.leftover(x, seeds, layout)

    def parts(self) -> Iterator[tuple[Inputs, Seeds, Plan]]:
        """Yield the points chunk by chunk, with the roots of their curvature and the plan."""
        layout, count = plan(self.linearized, self.x), num_rows(self.x)
        size = chunk_size(self.linearized, layout)
        with progress("curvature", count) as advance:
            for start in range(0, count, size):
                y = self.y[start : start + size]
                root = partial(self.fisher.root, self.likelihood, y=y, start=self.first + start)
                yield rows(self.x, slice(start, start + size)), root, layout
                advance(len(y))

    def leftover(self, x: Inputs, seeds: Seeds, layout: Plan) -> dict[str, Factor]:
        """Return G_n of the parameters that are not structured."""
        if not layout.leftover:
            return {}
        mix = seeds(self.linearized(x))
        found = gradients_apart(self.linearized, x, layout.leftover, mix)
        return {name: Direct(J) for name, J in found.items()}


def chunk_size(linearized: Linearized, layout: Plan) -> int:
    """Return for how many points gradients are kept at a time."""
    left = sum(linearized.params[name].numel() for name in layout.leftover)
    each = layout.bytes_per_point + layout.num_outputs * left * linearized.example.element_size()
    device = linearized.example.device
    # a GPU needs larger chunks to be busy; on a CPU small ones stay in the cache
    budget = CHUNK_BYTES if device.type == "cpu" else available_memory(device) // 16
    return max(1, budget // max(1, 2 * each))


def diagonal_curvature(source: Source) -> Tensor:
    """Compute the diagonal of H, Σ_n Σ_k G_nk², (P,) in float64.

    For a weight that is used once per point, the gradients of single points are never stored.
    """
    totals = {
        name: value.new_zeros(value.numel(), dtype=torch.float64)
        for name, value in source.linearized.params.items()
    }
    for x, seeds, layout in source.parts():
        once: dict[str, tuple[Factor, Tensor]] = {}
        for found in each_output(source.linearized, x, layout, seeds):
            for name, factor in found.items():
                if not _used_once(factor):
                    totals[name] += sum_of_squares(factor).double()
                    continue
                part = factor.g if isinstance(factor, Outer) else factor.J  # type: ignore[union-attr]
                if name in once:
                    once[name][1].addcmul_(part, part)
                else:
                    once[name] = factor, part.square()
        for name, (factor, squares) in once.items():
            totals[name] += _sum_of_squares(factor, squares).double()
        for name, factor in source.leftover(x, seeds, layout).items():
            totals[name] += sum_of_squares(factor).double()
    return torch.cat(list(totals.values()))


def _used_once(factor: Factor) -> bool:
    """Whether the parts of a point's gradient can be squared and summed over outputs first."""
    if isinstance(factor, Direct):
        return True
    return isinstance(factor, Outer) and factor.g.shape[4] == 1 and not factor.scale.dim()


def _sum_of_squares(factor: Factor, squares: Tensor) -> Tensor:
    """Sum squared gradients over points, from the squares of the part that differs between outputs."""
    if not isinstance(factor, Outer):
        return squares.sum((0, 1))
    # (g aᵀ)² = g² a²ᵀ, so the sum over points is one matrix product
    inputs = factor.a[:, :, 0].square()  # (B, S, I)
    each = torch.einsum("bso,bsi->soi", squares[:, 0, :, :, 0], inputs)
    return factor.entries(each) * factor.scale**2
