"""Sums over a batch of per-example gradients and of their squares, without a gradient per example.

The squared gradient of a weight that is used at one place is (g aᵀ)² = g² (a²)ᵀ, so its sum over a batch is
one matrix product. For parameters without a layer rule, gradients are computed for each example.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from net2gp.linear.curvatures.curvature import EmpiricalFisher, ExactFisher
from net2gp.linear.forward.factors import Direct, Factor, Lookup
from net2gp.linear.jacobians.capture import Plan, capture, gradients_apart
from net2gp.linear.linearized import Linearized
from net2gp.types import Inputs, Likelihood


@dataclass(frozen=True, eq=False)
class BatchSums:
    """Sums over a batch of points, flat in the order of `Linearized.flatten`.

    Args:
        log_prob: Σ_n log p(y_n | f_n), a number.
        gradient: Σ_n ∇_θ log p(y_n | f_n): (P,).
        curvature: The diagonal of Σ_n J_nᵀ Λ_n J_n, (P,); for the empirical Fisher matrix it is
            Σ_n (∇_θ log p(y_n | f_n))².
    """

    log_prob: Tensor
    gradient: Tensor
    curvature: Tensor


def batch_sums(
    linearized: Linearized,
    data: tuple[Inputs, Tensor],
    likelihood: Likelihood,
    fisher: ExactFisher | EmpiricalFisher,
    layout: Plan,
) -> BatchSums:
    """The sums at the parameters of `linearized`, from one forward pass.

    Cost: one backward pass for the empirical Fisher matrix or 1 + C for the exact one, both without gradients
    of weights, and two matrix products per weight. `layout` comes from `plan(linearized, x)`, once for all
    batches.

    >>> from net2gp.likelihoods import Gaussian
    >>> from net2gp.linear.jacobians.capture import plan
    >>> from net2gp.linear.linearized import linearize
    >>> zero = {"weight": torch.zeros(1, 1), "bias": torch.zeros(1)}
    >>> linearized = linearize(torch.nn.Linear(1, 1).eval(), zero)
    >>> x, y = torch.tensor([[1.0], [2.0]]), torch.tensor([3.0, 5.0])
    >>> sums = batch_sums(linearized, (x, y), Gaussian(1.0), EmpiricalFisher(), plan(linearized, x))
    >>> sums.gradient, sums.curvature
    (tensor([13.,  8.]), tensor([109.,  34.]))
    """
    x, y = data
    outputs: list[Tensor] = []

    def seeds(f: Tensor) -> Tensor:
        likelihood.check(f, y)
        outputs.append(f)
        residual = likelihood.residual(f, y)[..., None]
        if isinstance(fisher, EmpiricalFisher):
            return residual
        return torch.cat([residual, fisher.root(likelihood, f, y, 0)], -1)

    with torch.no_grad():
        factors = capture(linearized, x, layout, seeds, check=False)
        if layout.leftover:
            u = seeds(outputs[0] if outputs else linearized(x))
            apart = gradients_apart(linearized, x, layout.leftover, u)
            factors |= {name: Direct(J) for name, J in apart.items()}
        found = [factors[name] for name in linearized.params]
        totals = torch.cat([_total(_first(factor)) for factor in found])
        others = found if isinstance(fisher, EmpiricalFisher) else [_behind(f) for f in found]
        squares = torch.cat([sum_of_squares(factor) for factor in others])
        log_prob = likelihood.log_prob(outputs[0], y).sum()
    return BatchSums(log_prob, totals, squares)


def _first(factor: Factor) -> Factor:
    """The factor for the first combination of outputs that was differentiated: the log-likelihood."""
    if isinstance(factor, Direct):
        return Direct(factor.J[:, :1])
    return replace(factor, g=factor.g[:, :1])


def _behind(factor: Factor) -> Factor:
    """The factor for all other combinations: the columns of the root of Λ."""
    if isinstance(factor, Direct):
        return Direct(factor.J[:, 1:])
    return replace(factor, g=factor.g[:, 1:])


def _total(factor: Factor) -> Tensor:
    """The sum of the gradients over points, for one output: (p,)."""
    if isinstance(factor, Direct):
        return factor.J.sum((0, 1))
    if isinstance(factor, Lookup):
        known = factor.ids >= 0
        table = factor.g.new_zeros(factor.num_embeddings, factor.g.shape[3])
        return table.index_add_(0, factor.ids[known], factor.g[:, 0][known]).reshape(-1)
    return factor.entries(torch.einsum("bsot,bsti->soi", factor.g[:, 0], factor.a))


def sum_of_squares(factor: Factor) -> Tensor:
    """The sum over points and outputs of the squared gradients: (p,)."""
    if isinstance(factor, Direct):
        return factor.J.square().sum((0, 1))
    if isinstance(factor, Lookup):
        return _lookup_squares(factor)
    if factor.g.shape[4] == 1:
        squares = factor.g[..., 0].square().sum(1)
        return factor.entries(torch.einsum("bso,bsi->soi", squares, factor.a[:, :, 0].square()))
    S, I = factor.a.shape[1], factor.a.shape[3]
    parts = [J.square().sum(0).reshape(S, -1, I) for J in factor.gradients(factor.step())]
    return factor.entries(torch.cat(parts, 1))


def _lookup_squares(factor: Lookup) -> Tensor:
    """`sum_of_squares` of an embedding, forming only the rows that occur.

    The gradient of a point in a row is the sum over all places of that token, which must be added up before
    squaring.
    """
    B, C, T, O = factor.g.shape
    known = (factor.ids >= 0)[:, None].expand(B, C, T)
    owner = torch.arange(B * C, device=factor.ids.device).reshape(B, C, 1)
    key = owner * factor.num_embeddings + factor.ids[:, None]
    pairs, place = torch.unique(key[known], return_inverse=True)
    sums = factor.g.new_zeros(len(pairs), O).index_add_(0, place, factor.g[known])
    table = factor.g.new_zeros(factor.num_embeddings, O)
    return table.index_add_(0, pairs % factor.num_embeddings, sums.square()).reshape(-1)
