"""The curvature H = Σ_n J_nᵀ Λ_n J_n of a network's log-likelihood in its parameters, in four structures.

Λ_n (C, C) is the likelihood's curvature in the outputs, and Λ_n = R_n R_nᵀ. All structures are made of
the gradients of the columns of R_nᵀ f_n, K of them a point: H = Σ_n G_nᵀ G_n with G_n = R_nᵀ J_n (K, P).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from net2gp.errors import InputError, available_memory, check_memory
from net2gp.inputs import num_rows, rows
from net2gp.likelihoods.traits import curvature_root, of_points
from net2gp.linear.curvatures.ggn import GaussNewton
from net2gp.linear.curvatures.kron_blocks import Block, check_factors, layers, make_block
from net2gp.linear.forward.factors import Direct, Factor, Outer, jacobian, sum_of_squares
from net2gp.linear.jacobians.capture import Plan, Seeds, capture, each_output, gradients_apart, plan
from net2gp.progress import progress
from net2gp.types import Inputs, Likelihood

if TYPE_CHECKING:
    from net2gp.linear.linearized import Linearized

CHUNK_BYTES = 2**28
"""What the gradients of one chunk of points may take."""

POWER_ITERATIONS = 12
"""The most rounds of subspace iteration for the largest eigenvalues."""


@dataclass(frozen=True)
class ExactFisher:
    """Λ_n is the Fisher information of the likelihood at f_n, exactly: K = C backward passes.

    The generalized Gauss–Newton matrix, which is the Fisher information of the network. For classes Λ_n has
    the rank C − 1, and so many passes do.

    Reference: Martens, New insights and perspectives on the natural gradient method, JMLR 2020.
    """

    def root(self, likelihood: Likelihood, f: Tensor, y: Tensor, start: int) -> Tensor:
        """R_n: (N, C, K)."""
        return curvature_root(of_points(likelihood, slice(start, start + len(f))), f)


@dataclass(frozen=True)
class EmpiricalFisher:
    """Λ_n = r_n r_nᵀ with the residual of the label that was seen: outer products of gradients, K = 1.

    Not an estimate of the Fisher information: it vanishes where the network fits its labels.

    Reference: Kunstner, Balles, Hennig, Limitations of the empirical Fisher approximation, NeurIPS 2019.
    """

    def root(self, likelihood: Likelihood, f: Tensor, y: Tensor, start: int) -> Tensor:
        """r_n: (N, C, 1)."""
        return of_points(likelihood, slice(start, start + len(f))).residual(f, y)[..., None]


@dataclass(frozen=True)
class MonteCarloFisher:
    """Λ_n estimated with `num_samples` random combinations of the columns of its root: E = the GGN.

    For many outputs, where C backward passes are too many.
    """

    num_samples: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise InputError(f"num_samples must be at least 1, but is {self.num_samples}.")

    def root(self, likelihood: Likelihood, f: Tensor, y: Tensor, start: int) -> Tensor:
        """R_n z/√K with random signs z, which have the identity as their second moment: (N, C, K)."""
        exact = ExactFisher().root(likelihood, f, y, start)
        generator = torch.Generator().manual_seed(self.seed + 7919 * start)
        shape = (len(f), exact.shape[2], self.num_samples)
        signs = torch.randint(0, 2, shape, generator=generator).to(exact) * 2 - 1
        return exact @ signs / self.num_samples**0.5


Fisher = ExactFisher | EmpiricalFisher | MonteCarloFisher


@dataclass(frozen=True, eq=False)
class FullCurvature:
    """H itself: (P, P) in float64."""

    H: Tensor

    @cached_property
    def eigenvalues(self) -> Tensor:
        """Of H, none negative."""
        return torch.linalg.eigvalsh(self.H).clamp(min=0)


@dataclass(frozen=True, eq=False)
class DiagonalCurvature:
    """The diagonal of H: (P,) in float64."""

    diagonal: Tensor


@dataclass(frozen=True, eq=False)
class KronCurvature:
    """H block by block, one a layer, with nothing between layers; in float64."""

    blocks: tuple[Block, ...]


@dataclass(frozen=True, eq=False)
class LowRankCurvature:
    """H ≈ U diag(values) Uᵀ with the largest eigenvalues: U (P, k)."""

    U: Tensor
    values: Tensor


@dataclass(frozen=True, eq=False)
class SubsetCurvature:
    """H between the parameters `index` (k,) alone: (k, k) in float64."""

    index: Tensor
    H: Tensor

    @cached_property
    def eigenvalues(self) -> Tensor:
        """Of H, none negative."""
        return torch.linalg.eigvalsh(self.H).clamp(min=0)


Curvature = FullCurvature | DiagonalCurvature | KronCurvature | LowRankCurvature | SubsetCurvature


@dataclass(frozen=True, eq=False)
class Source:
    """What the curvature is of: a linearized network, its data, its likelihood, and which Fisher."""

    linearized: Linearized
    x: Inputs
    y: Tensor
    likelihood: Likelihood
    fisher: Fisher = ExactFisher()

    def gradients(self, *, compress: bool = True) -> Iterator[dict[str, Factor]]:
        """G_n of the points chunk by chunk, a factor for each parameter."""
        for x, seeds, layout in self.parts():
            found = capture(self.linearized, x, layout, seeds, compress=compress)
            yield found | self.leftover(x, seeds, layout)

    def parts(self) -> Iterator[tuple[Inputs, Seeds, Plan]]:
        """The points chunk by chunk, with the roots of their curvature."""
        layout, count = plan(self.linearized, self.x), num_rows(self.x)
        size = chunk_size(self.linearized, layout)
        with progress("curvature", count) as advance:
            for start in range(0, count, size):
                y = self.y[start : start + size]
                root = partial(self.fisher.root, self.likelihood, y=y, start=start)
                yield rows(self.x, slice(start, start + size)), root, layout
                advance(len(y))

    def leftover(self, x: Inputs, seeds: Seeds, layout: Plan) -> dict[str, Factor]:
        """G_n of the parameters that are not structured."""
        if not layout.leftover:
            return {}
        mix = seeds(self.linearized(x))
        found = gradients_apart(self.linearized, x, layout.leftover, mix)
        return {name: Direct(J) for name, J in found.items()}


def low_rank_curvature(source: Source, rank: int, seed: int = 0) -> LowRankCurvature:
    """The `rank` largest eigenvalues of the GGN, by subspace iteration on products with it.

    Cost: some ten products with rank + 10 vectors, each a forward-mode and a backward pass over the data;
    memory P · (rank + 10).

    Reference: Halko, Martinsson, Tropp, Finding structure with randomness, SIAM Review 2011.
    """
    if not isinstance(source.fisher, ExactFisher):
        raise InputError("LowRank() is of the GGN: leave its fisher out.")
    like = source.linearized.example
    P = source.linearized.num_params
    width = min(rank + 10, P, num_rows(source.x) * plan(source.linearized, source.x).num_outputs)
    generator = torch.Generator().manual_seed(seed)
    Q = torch.randn(P, width, generator=generator, dtype=torch.float64).to(like.device)
    operator = GaussNewton(source.linearized, source.x, source.likelihood)
    values = Q.new_zeros(width)
    with progress("largest eigenvalues", POWER_ITERATIONS) as advance:
        for _ in range(POWER_ITERATIONS):
            Q = torch.linalg.qr(Q).Q
            product = operator.matmul(Q.to(like)).double()
            found, rotation = torch.linalg.eigh(Q.mT @ product)
            change = (found - values).abs()[-rank:].max() / found.max().clamp(min=1e-300)
            values, Q, basis = found, product, Q @ rotation
            advance(note=f"change {float(change):.1e}")
            if change < 1e-4:
                break
    return LowRankCurvature(basis[:, -rank:], values[-rank:].clamp(min=0))


def chunk_size(linearized: Linearized, layout: Plan) -> int:
    """How many points' gradients are kept at a time."""
    left = sum(linearized.params[name].numel() for name in layout.leftover)
    each = layout.bytes_per_point + layout.num_outputs * left * linearized.example.element_size()
    device = linearized.example.device
    # a GPU needs larger chunks to be busy than stay in a CPU's cache
    budget = CHUNK_BYTES if device.type == "cpu" else available_memory(device) // 16
    return max(1, budget // max(1, 2 * each))


def full_curvature(source: Source) -> FullCurvature:
    """H by one matrix product a chunk, in float64. Cost N·K·P² operations, P² memory."""
    P = source.linearized.num_params
    check_memory(
        2 * 8 * P**2,
        source.linearized.example.device,
        f"the curvature of {P} parameters as a matrix",
        "structure=Kron(), Diagonal() or FunctionSpace(), or fewer parameters with only=",
    )
    H = source.linearized.example.new_zeros(P, P, dtype=torch.float64)
    for found in source.gradients():
        parts = [jacobian(found[name]).flatten(0, 1) for name in source.linearized.params]
        G = torch.cat(parts, 1).double()
        H.addmm_(G.mT, G)
    return FullCurvature(H)


def subset_curvature(source: Source, index: Tensor) -> SubsetCurvature:
    """H between the parameters `index`, sorted, in the order of `Linearized.flatten`. Cost N·K·k²."""
    H = source.linearized.example.new_zeros(len(index), len(index), dtype=torch.float64)
    for found in source.gradients():
        parts = [jacobian(found[name]).flatten(0, 1) for name in source.linearized.params]
        G = torch.cat(parts, 1)[:, index].double()
        H.addmm_(G.mT, G)
    return SubsetCurvature(index, H)


def diagonal_curvature(source: Source) -> DiagonalCurvature:
    """Σ_n Σ_k G_nk², never storing a point's gradient of a weight that is used once. In float64."""
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
    return DiagonalCurvature(torch.cat(list(totals.values())))


def _used_once(factor: Factor) -> bool:
    """Whether squares of what a point's gradient is made of can be summed over outputs first."""
    if isinstance(factor, Direct):
        return True
    return isinstance(factor, Outer) and factor.g.shape[4] == 1 and not factor.scale.dim()


def _sum_of_squares(factor: Factor, squares: Tensor) -> Tensor:
    """Σ over points of a gradient's squares, from those of its part that differs between outputs."""
    if not isinstance(factor, Outer):
        return squares.sum((0, 1))
    # (g aᵀ)² = g² a²ᵀ, so the sum over points is one matrix product
    inputs = factor.a[:, :, 0].square()  # (B, S, I)
    each = torch.einsum("bso,bsi->soi", squares[:, 0, :, :, 0], inputs).reshape(-1)
    return each * factor.scale**2


def kron_curvature(source: Source, *, diagonal_rest: bool = False) -> KronCurvature:
    """A = Σ a aᵀ and G = Σ g gᵀ over points and places, layer by layer; weight and bias together.

    Exact for a layer that is used at one place, if the inputs and the output gradients of a point are
    independent of each other over the data: always for one linear layer under Gaussian noise. Parameters
    that are not weights of a linear map have a matrix each if they are small; others are refused, or with
    `diagonal_rest` have the diagonal of theirs.

    Reference: Martens, Grosse, Optimizing neural networks with Kronecker-factored approximate curvature,
    ICML 2015; Eschenhagen et al., Kronecker-factored approximate curvature for modern neural network
    architectures, NeurIPS 2023 (its "expand" setting for weights that are used at several places).
    """
    blocks = None
    while blocks is None:
        # each further turn knows of one more parameter that has no factors, so it ends
        blocks = _kron_blocks(source, diagonal_rest)
    return KronCurvature(tuple(blocks.values()))


def _kron_blocks(source: Source, diagonal_rest: bool) -> dict[tuple[str, ...], Block] | None:
    """The blocks summed over all points, or None where some points showed that a layer has no factors.

    Sums of points before that would be of another kind, and of other parameters, than sums of those after.
    """
    blocks: dict[tuple[str, ...], Block] = {}
    for found in source.gradients(compress=False):
        if not diagonal_rest:
            check_factors(found)
        more = {names: make_block(names, found, diagonal_rest) for names in layers(found)}
        if blocks and _kinds(blocks) != _kinds(more):
            return None
        blocks = {names: blocks[names].plus(more[names]) for names in blocks} if blocks else more
    return blocks


def _kinds(blocks: dict[tuple[str, ...], Block]) -> dict[tuple[str, ...], type[Block]]:
    return {names: type(block) for names, block in blocks.items()}
