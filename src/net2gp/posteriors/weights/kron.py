"""`Kron()`: Kronecker factors for each layer, with nothing between layers."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from net2gp.errors import InputError, NetworkError
from net2gp.linear.curvatures.curvature import ExactFisher, Fisher, Source
from net2gp.linear.forward.factors import (
    Direct,
    Factor,
    Lookup,
    Outer,
    jacobian,
    sum_of_squares,
)
from net2gp.posteriors.weights.covariance import Covariance, num_entries
from net2gp.posteriors.weights.diagonal import Diagonal
from net2gp.posteriors.weights.kron_blocks import (
    Block,
    DenseBlock,
    DiagonalBlock,
    KronBlock,
    Root,
    TableBlock,
    inputs_with_bias,
)
from net2gp.posteriors.weights.structure import Curvature, Structure, check_fisher, shown
from net2gp.posteriors.weights.tasks.task import Task
from net2gp.tags import savable
from net2gp.types import Params

DENSE_BLOCK = 4096
"""Entries of a parameter without Kronecker factors up to which its block is kept as a matrix."""

SMALL_BLOCK = 256
"""The same where larger ones keep their variances: matrices of many such parameters cost minutes."""


@savable("structures.Kron")
@dataclass(frozen=True)
class Kron(Structure):
    """A Kronecker product for each layer (KFAC): layers are independent. It takes some passes over the data.

    The weights of linear maps have factors: Linear and Bilinear layers, convolutions and transposed ones, the
    projections of attention, recurrent layers and cells, and embeddings, which are linear maps of one-hot
    inputs. A weight that is used at several places (positions, tokens, times) is treated as if the places
    were points of their own: "expand" in the words of Eschenhagen et al., and for recurrent layers the
    independence of times in those of Martens et al. (2018).

    Other parameters, such as gains, and small embeddings keep a matrix each if they have up to 4096 entries.
    Larger ones, such as a table that is the output layer too, are refused by name, unless `rest` is given.

    Args:
        fisher: Which Fisher matrix the curvature is: `ExactFisher()` (the default), `EmpiricalFisher()` or
            `MonteCarloFisher(num_samples)`.
        rest: What is kept of parameters without factors. With `Diagonal()` those of more than 256 entries
            keep their variances alone. None keeps a matrix of each.

    Raises:
        InputError: `fisher` is no Fisher matrix, or `rest` is neither `Diagonal()` nor None.

    References: Martens, Grosse, Optimizing neural networks with Kronecker-factored approximate curvature,
    ICML 2015; Martens, Ba, Johnson, Kronecker-factored curvature approximations for recurrent neural
    networks, ICLR 2018; Eschenhagen et al., Kronecker-factored approximate curvature for modern neural
    network architectures, NeurIPS 2023.
    """

    fisher: Fisher = field(default_factory=ExactFisher)
    rest: Diagonal | None = None

    def __post_init__(self) -> None:
        check_fisher(self, self.fisher)
        if not isinstance(self.rest, Diagonal | None):
            raise InputError(
                f"rest must be Diagonal() or None, but is {shown(self.rest)}. Pass Kron(rest=Diagonal())."
            )
        if self.rest is not None and self.rest.fisher != ExactFisher():
            raise InputError(
                "rest takes the fisher of Kron() itself: pass Kron(fisher, rest=Diagonal())."
            )

    def curvature(self, task: Task) -> KronCurvature:
        """A = Σ a aᵀ and G = Σ g gᵀ over points and places, layer by layer; weight and bias together.

        Places without a gradient, such as padding, do not count.
        Exact for a layer that is used at one place, if the inputs and the output gradients of a point are
        independent of each other over the data: always for one linear layer under Gaussian noise.
        """
        source, blocks = task.source(self.fisher), None
        while blocks is None:
            # each further turn knows of one more parameter that has no factors, so it ends
            blocks = _blocks(source, self.rest is not None)
        return KronCurvature(task, tuple(blocks.values()))


def factors(task: Task) -> Curvature:
    """The Kronecker factors of a task, or the diagonal where a parameter has none."""
    try:
        return Kron().curvature(task)
    except NetworkError:
        return Diagonal().curvature(task)


def _blocks(source: Source, diagonal_rest: bool) -> dict[tuple[str, ...], Block] | None:
    """The blocks summed over all points, or None where some points showed that a layer has no factors.

    Sums of points before that would be of another kind, and of other parameters, than sums of those after.
    """
    blocks: dict[tuple[str, ...], Block] = {}
    for found in source.gradients(compress=False):
        if not diagonal_rest:
            _check_factors(found)
        more = {names: _make_block(names, found, diagonal_rest) for names in _layers(found)}
        if blocks and _kinds(blocks) != _kinds(more):
            return None
        blocks = {names: blocks[names].plus(more[names]) for names in blocks} if blocks else more
    return blocks


def _layers(found: dict[str, Factor]) -> list[tuple[str, ...]]:
    """The parameters in groups: a weight with the bias of its layer, all else alone."""
    owners = {
        "bias".join(
            name.rsplit("weight", 1)
        ): name  # a recurrent layer has weight_ih_l0 and bias_ih_l0
        for name, factor in found.items()
        if isinstance(factor, Outer) and "weight" in name
    }
    biases = {
        owners[name]: name
        for name, factor in found.items()
        if name in owners and _belongs(factor, found[owners[name]])
    }
    return [
        (name, biases[name]) if name in biases else (name,)
        for name in found
        if name not in biases.values()
    ]


def _belongs(bias: Factor, weight: Factor) -> bool:
    """Whether a bias has no other gradient than through the layer of this weight, at some of the points."""
    assert isinstance(weight, Outer)
    some = slice(None, None, max(1, len(weight.g) // 8))
    total = weight.g[some].sum(4).flatten(2)
    if not isinstance(bias, Direct) or bias.J.shape[2] != total.shape[2]:
        return False
    return torch.allclose(bias.J[some], total, rtol=1e-4, atol=1e-6)


def _check_factors(found: dict[str, Factor]) -> None:
    """Raise, with all their names, if parameters have neither factors nor a block that is small."""
    alone = {names[0]: found[names[0]] for names in _layers(found)}
    large = {
        name: num_entries(factor)
        for name, factor in alone.items()
        if isinstance(factor, Direct) and num_entries(factor) > DENSE_BLOCK
    }
    if large:
        shown = ", ".join(f"'{name}' ({size} entries)" for name, size in large.items())
        left = ", ".join(f"'!{name}'" for name in large)
        raise NetworkError(
            f"Kron() has no factors for {shown}: these are no weights of a layer with a rule "
            "that treats all points alike, and have "
            f"more than the {DENSE_BLOCK} entries of which a matrix is kept. Pass "
            "structure=Kron(rest=Diagonal()) to keep only their variances, leave them out with "
            f"only=['*', {left}], or pass structure=Diagonal(), LowRank() or FunctionSpace()."
        )


def _make_block(
    names: tuple[str, ...], found: dict[str, Factor], diagonal_rest: bool = False
) -> Block:
    """The curvature of a layer from the gradients of some points."""
    factor = found[names[0]]
    if not isinstance(factor, Outer):
        limit = min(SMALL_BLOCK, DENSE_BLOCK) if diagonal_rest else DENSE_BLOCK
        if num_entries(factor) <= limit:
            J = jacobian(factor).flatten(0, 1).double()
            return DenseBlock(names, J.mT @ J)
        if isinstance(factor, Lookup):
            return _table_block(names, factor)
        return DiagonalBlock(names, sum_of_squares(factor).double())
    a = inputs_with_bias(factor, len(names) == 2)
    count, S, T, _ = a.shape
    flat = a.transpose(1, 2).reshape(count * T, S, -1)
    g = factor.g.permute(0, 1, 4, 2, 3).reshape(-1, S, factor.g.shape[3])
    if T > 1:  # places of padding have inputs but no gradient, and must not count
        flat = flat[(factor.g != 0).any(3).any(2).any(1).flatten()]
    places = max(1, len(flat))
    return KronBlock(names, _outer_products(flat), _outer_products(g), places, factor.turned)


def _table_block(names: tuple[str, ...], factor: Lookup) -> TableBlock:
    known = factor.ids >= 0
    counts = torch.bincount(factor.ids[known], minlength=factor.num_embeddings).double()
    g = factor.g.transpose(1, 2)[known].flatten(0, 1)[:, None]
    return TableBlock(names, counts, _outer_products(g)[0], int(known.sum()))


def _outer_products(rows: Tensor) -> Tensor:
    """Σ_n rows_n rows_nᵀ of each group, (N, S, I) to (S, I, I), in float64.

    Summed in float32, small eigenvalues would be rounding of large ones, which a wide prior brings out.
    """
    precise = rows.double().transpose(0, 1)
    return precise.mT @ precise


def _kinds(blocks: dict[tuple[str, ...], Block]) -> dict[tuple[str, ...], type[Block]]:
    return {names: type(block) for names, block in blocks.items()}


@dataclass(frozen=True, eq=False)
class KronCurvature(Curvature):
    """H block by block, one for each layer, with nothing between layers; in float64."""

    blocks: tuple[Block, ...]

    def log_det(self, prior: Params, scale: float | Tensor) -> Tensor:
        """The sum over the layers."""
        total = torch.zeros((), dtype=torch.float64, device=self.task.device)
        for block in self.blocks:
            total = total + block.log_det(prior, self.task.params, scale)
        return total

    def covariance(self, prior: Params, scale: float) -> KronCovariance:
        """A root for each layer."""
        params = self.task.params
        roots = tuple(block.root(prior, params, scale) for block in self.blocks)
        return KronCovariance(roots, tuple(params))

    def trace(self) -> float:
        """The sum over the layers."""
        return sum(block.trace() for block in self.blocks)


@savable("kron.KronCovariance")
@dataclass(frozen=True, eq=False)
class KronCovariance(Covariance):
    """Σ layer by layer; `order` are the parameters' names as `Linearized.flatten` has them."""

    layers: tuple[Root, ...]
    order: tuple[str, ...]

    def rooted(self, found: dict[str, Factor]) -> list[Factor]:
        """A factor for each layer."""
        return [layer.rooted(found) for layer in self.layers]

    def draw(self, num_samples: int, generator: torch.Generator | None) -> Tensor:
        """Layer by layer."""
        found: dict[str, Tensor] = {}
        for layer in self.layers:
            found |= layer.draw(num_samples, generator)
        return torch.cat([found[name] for name in self.order])
