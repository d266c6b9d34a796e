"""A Gaussian over the weights of a network, as a program: no training data but what novelty compares with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from net2gp.errors import NotAvailable
from net2gp.inputs import rows
from net2gp.linear.curvatures.head import weights_of
from net2gp.linear.forward.evaluation import LOCK, evaluating
from net2gp.linear.forward.factors import Factor
from net2gp.linear.linearized import Linearized
from net2gp.linear.precision import rechosen
from net2gp.posteriors.recipes.around_network import AroundNetwork
from net2gp.posteriors.weights.covariance import Covariance, ScaledCovariance
from net2gp.posteriors.weights.function_space import ConditionedCovariance
from net2gp.posteriors.weights.last_layer import LastLayerDiagonal, LastLayerFull, LastLayerKron
from net2gp.posteriors.weights.low_rank import Subtracted
from net2gp.serving.programs.covers import head_cover, rooted_cover
from net2gp.serving.programs.gradients import check_network, outputs, outputs_and_gradients
from net2gp.serving.programs.moments import Law, Moments, left_open
from net2gp.serving.programs.novelty import Compared, compared
from net2gp.serving.programs.tangents import (
    Cover,
    difference,
    prior_variances,
    weight_blocks,
)
from net2gp.types import Inputs

HEADS = (LastLayerFull, LastLayerDiagonal, LastLayerKron)
"""Covariances of a last layer, which need its features alone."""

EXPORTED = "LastLayer(), Kron(), Diagonal(), Full(), LowRank() and FunctionSpace(tol=0)"
"""The structures that have a program of their own."""

ROUNDING = 1e-6
"""Up to this share of a point's largest variance, products in float32 may differ from those in float64."""


def around_network(process: AroundNetwork, points: list[Inputs], *, novelty: bool) -> Law:
    """Return the law of a network with a Gaussian over its weights.

    Args:
        process: The process.
        points: Some points, and some of the data if they are at hand.
        novelty: Whether training inputs count.

    Returns:
        The law.

    Raises:
        NotAvailable: If the structure or the network has no program.
    """
    linearized, C = process.linearized, process.num_outputs
    check_network(linearized)
    covariance, factor = process.covariance, 1.0
    while isinstance(covariance, ScaledCovariance):
        factor *= covariance.factor
        covariance = covariance.inner
    noted: dict[str, Compared] = {}
    if novelty:
        wide = None if process.widening is None else process.widening.seen
        for key, seen in (("seen", process.seen), ("wide", wide)):
            if seen is not None:
                noted[key] = compared(seen, linearized, C)
    passes = _Passes.of(linearized, covariance, list(noted.values()), points[0], C)
    cover = _precise_enough(covariance, linearized, passes, points)

    def moments(x: Inputs) -> Moments:
        out, found, phi = passes(x)
        shares = {key: one.shares(found, phi) for key, one in noted.items()}
        covariances = factor * cover(found, phi)
        share = shares.get("seen")
        if novelty and share is None:
            share = left_open(covariances, _prior_variances(process, found, phi))
        return Moments(
            out,
            covariances,
            novelty=share,
            excess=_excess(process, shares),
            gained=_gained(process, shares, found, phi),
        )

    carries = [one.carries for one in noted.values() if one.carries]
    if isinstance(covariance, ConditionedCovariance):
        carries.append("a root of the covariance of the weights, of the size of the training rows")
    return Law(
        moments, C, type(covariance).__name__, "; ".join(dict.fromkeys(carries)) or "nothing"
    )


def _excess(process: AroundNetwork, shares: dict[str, Tensor]) -> Tensor | None:
    if "seen" not in shares or process.seen is None:
        return None
    return (shares["seen"] / process.seen.ordinary - 1).clamp(min=0)


def _gained(
    process: AroundNetwork,
    shares: dict[str, Tensor],
    found: dict[str, Factor],
    phi: Tensor | None,
) -> Tensor | None:
    if "wide" not in shares or process.widening is None:
        return None
    prior = _prior_variances(process, found, phi)
    return process.widening.gained(shares["wide"], prior)


def _prior_variances(
    process: AroundNetwork, found: dict[str, Factor], phi: Tensor | None
) -> Tensor:
    """The diagonal of J diag(prior_var) Jᵀ, (B, C)."""
    prior, free = dict(process.kernel.prior_var), process.covariance.mask()
    params = process.linearized.params
    if free is not None:
        masks = process.linearized.unflatten(free)
        prior = {name: value * masks[name] for name, value in prior.items()}
    if phi is not None:
        wide = {name: prior[name].expand(value.shape) for name, value in params.items()}
        return phi.square() @ weights_of(wide).to(phi).mT
    return prior_variances({name: prior[name] for name in params}, found)


@dataclass(frozen=True, eq=False)
class _Passes:
    """One forward pass, with the gradients and the features that a law reads."""

    linearized: Linearized
    head: nn.Module | None
    bias: bool
    differentiated: bool
    num_outputs: int

    @staticmethod
    def of(
        linearized: Linearized,
        covariance: Covariance,
        noted: list[Compared],
        x: Inputs,
        num_outputs: int,
    ) -> _Passes:
        heads = {one.head for one in noted if one.head}
        names = {name for one in noted for name in one.names}
        if isinstance(covariance, HEADS):
            heads.add(tuple(linearized.params))
        else:
            names |= set(linearized.params)
        head = None
        if heads:
            head = linearized.network.get_submodule(next(iter(heads))[0].rpartition(".")[0])
            _check_head(linearized, head, x)
        everything = [*linearized.params, *linearized.frozen]
        chosen = [name for name in everything if name in names]
        wide = rechosen(linearized, chosen) if chosen else linearized
        bias = head is not None and head.bias is not None
        return _Passes(wide, head, bias, bool(names), num_outputs)

    def __call__(self, x: Inputs) -> tuple[Tensor, dict[str, Factor], Tensor | None]:
        found: dict[str, Factor] = {}
        with _recorded(self.linearized, self.head) as inputs:
            if self.differentiated:
                out, found = outputs_and_gradients(self.linearized, x, self.num_outputs)
            else:
                out = outputs(self.linearized, x)
        if self.head is None:
            return out, found, None
        phi = inputs[0].detach()
        phi = torch.cat([phi, torch.ones_like(phi[:, :1])], 1) if self.bias else phi
        return out, found, phi


@contextlib.contextmanager
def _recorded(linearized: Linearized, head: nn.Module | None) -> Iterator[list[Tensor]]:
    """Collect the inputs of the last layer."""
    inputs: list[Tensor] = []
    with LOCK, evaluating(linearized.network), contextlib.ExitStack() as stack:
        if head is not None:
            note = lambda module, given: inputs.append(given[0])
            stack.callback(head.register_forward_pre_hook(note).remove)
        yield inputs


def _check_head(linearized: Linearized, head: nn.Module, x: Inputs) -> None:
    """Raise unless the outputs are those of a linear layer, once per point."""
    ends: list[Tensor] = []
    few = rows(x, slice(0, 2))
    handle = head.register_forward_hook(lambda module, given, out: ends.append(out.detach()))
    try:
        with torch.no_grad(), evaluating(linearized.network):
            out = outputs(linearized, few)
    finally:
        handle.remove()
    plain = isinstance(head, nn.Linear) and len(ends) == 1 and ends[0].shape == out.shape
    if not plain or not torch.equal(ends[0], out):
        raise NotAvailable(
            "export reads the features of a last nn.Linear that is called once and whose outputs are the "
            f"network's own, which those of {type(linearized.network).__name__} are not. Use "
            "structure=Kron() or Diagonal(), or pass draws=32."
        )


def _cover(covariance: Covariance, linearized: Linearized, dtype: torch.dtype) -> Cover:
    """The function from gradients and features to J Σ Jᵀ, with products in `dtype` where that is a choice."""
    if isinstance(covariance, HEADS):
        head = head_cover(covariance, dtype)
        return lambda found, phi: head(phi)  # type: ignore[arg-type]
    if isinstance(covariance, ConditionedCovariance):
        return weight_blocks(covariance.process, linearized)
    if isinstance(covariance, Subtracted):
        prior = linearized.unflatten(covariance.prior.double())
        return difference(prior, covariance.U.double() * covariance.shrink.double().sqrt())
    if type(covariance).rooted is Covariance.rooted:
        raise NotAvailable(
            f"a covariance of the kind {type(covariance).__name__} cannot be exported exactly. Use one of "
            f"{EXPORTED}, or pass draws=32, which serves draws of the weights."
        )
    rooted = rooted_cover(covariance, tuple(linearized.params), dtype)
    return lambda found, phi: rooted(found)


def _precise_enough(
    covariance: Covariance, linearized: Linearized, passes: _Passes, points: list[Inputs]
) -> Cover:
    """Products in float32 if at all of these points they are as good as those in float64, else in float64.

    Rounding is the larger a share of a variance the more the data say of a point. So the points to compare
    are training points where there are any.
    """
    wide = _cover(covariance, linearized, torch.float64)
    if linearized.example.dtype != torch.float32:
        return wide
    narrow = _cover(covariance, linearized, torch.float32)
    for some in points:
        with torch.no_grad():
            _, found, phi = passes(some)
            exact = wide(found, phi)
            gap = (narrow(found, phi).double() - exact).abs().amax((1, 2))
        if not bool((gap <= ROUNDING * exact.diagonal(dim1=1, dim2=2).amax(1)).all()):
            return wide
    return lambda found, phi: narrow(found, phi).double()
