"""`Kron()`: Kronecker factors for each layer, with nothing between layers."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from net2gp.errors import InputError, NetworkError
from net2gp.linear.curvatures.curvature import ExactFisher, Fisher, Source
from net2gp.linear.forward.factors import Factor
from net2gp.posteriors.weights.covariance import Covariance
from net2gp.posteriors.weights.diagonal import Diagonal
from net2gp.posteriors.weights.kron_blocks import Block, Root, check_factors, layers, make_block
from net2gp.posteriors.weights.structure import Curvature, Structure, Task, check_fisher, shown
from net2gp.tags import savable
from net2gp.types import Params


@savable("structures.Kron")
@dataclass(frozen=True)
class Kron(Structure):
    """A Kronecker product for each layer (KFAC): layers are independent. It takes some passes over the data.

    Parameters that are not weights of a Linear or a convolution, such as gains, keep a matrix each if they
    have up to 4096 entries. Larger ones, such as embeddings, are refused by name, unless `rest` is given.

    Args:
        fisher: Which Fisher matrix the curvature is: `ExactFisher()` (the default), `EmpiricalFisher()` or
            `MonteCarloFisher(num_samples)`.
        rest: What is kept of parameters without factors. With `Diagonal()` those of more than 256 entries
            keep their variances alone. None keeps a matrix of each.

    Raises:
        InputError: `fisher` is no Fisher matrix, or `rest` is neither `Diagonal()` nor None.

    References: Martens, Grosse, Optimizing neural networks with Kronecker-factored approximate curvature,
    ICML 2015; Eschenhagen et al., Kronecker-factored approximate curvature for modern neural network
    architectures, NeurIPS 2023 (its "expand" setting for weights that are used at several places).
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
            check_factors(found)
        more = {names: make_block(names, found, diagonal_rest) for names in layers(found)}
        if blocks and _kinds(blocks) != _kinds(more):
            return None
        blocks = {names: blocks[names].plus(more[names]) for names in blocks} if blocks else more
    return blocks


def _kinds(blocks: dict[tuple[str, ...], Block]) -> dict[tuple[str, ...], type[Block]]:
    return {names: type(block) for names, block in blocks.items()}


@dataclass(frozen=True, eq=False)
class KronCurvature(Curvature):
    """H block by block, one for each layer, with nothing between layers; in float64."""

    blocks: tuple[Block, ...]

    def log_det(self, prior: Params, scale: float | Tensor) -> Tensor:
        """The sum over the layers."""
        total = torch.zeros((), dtype=torch.float64, device=self.task.f.device)
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
