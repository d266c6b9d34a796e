"""Laplace's approximation where each process has a part of the data: sums are added up across processes."""

from __future__ import annotations

import warnings
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, distributed, nn

from net2gp.errors import EmptyClass, InputError, check_positive
from net2gp.linear.linearized import Linearized, Patterns, PriorVar
from net2gp.methods.laplace_approximation.choosing import tuned
from net2gp.methods.laplace_approximation.laplace import check_stationary, gradient_at
from net2gp.methods.laplace_approximation.search import Search
from net2gp.methods.laplace_approximation.task import check_classes, make_task
from net2gp.methods.laplace_approximation.tuning import Evidence
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.weights import Diagonal, Full, Kron, LastLayer, Structure
from net2gp.posteriors.weights.tasks.streamed import StreamedTask
from net2gp.posteriors.weights.tasks.sums import Sums
from net2gp.types import Data, Observed, Stream

__all__ = ["laplace_of_shards"]

SMALL_FULL = 1000
"""Parameters up to which the whole precision is the default."""

Value = TypeVar("Value")


def laplace_of_shards(
    network: nn.Module | Linearized,
    shard: Data,
    likelihood: Observed,
    *,
    prior_var: PriorVar | None = None,
    structure: Structure | None = None,
    only: Patterns | None = None,
    per_layer: bool = False,
    temperature: float = 1.0,
) -> Posterior[Observed]:
    """Return the Laplace posterior of all data, of which each process has a part.

    All processes of `torch.distributed` call this together, with the same network and their own shard. The
    curvature H = Σ_n J_nᵀ Λ_n J_n, the log-likelihood and the gradient are sums over the points: each process
    computes those of its shard, and the sums are added up. Every process then has the same posterior, which
    is that of `laplace(network, all_data, likelihood, structure=structure, tuning=Evidence())` but for
    rounding, and which keeps no data. What is open of prior and noise is chosen by the evidence, since it
    depends on the data by sums alone; links stay as they are. Cost: that of `laplace` on the shard, and one
    exchange of what the structure keeps. Without `torch.distributed` the shard is all data.

    Args:
        network: The trained network, the same in each process.
        shard: The process's own part of the data, at least one point; no point may be in two shards.
        likelihood: How targets follow the outputs.
        prior_var: The prior variance of the parameters. None leaves it open.
        structure: `Full()`, `Diagonal()`, `Kron()` or `LastLayer()`. None is `Full()` up to 1000 parameters,
            else `Kron()`.
        only: Which parameters vary, by name patterns as in `linearize`.
        per_layer: Whether each layer has a prior variance of its own.
        temperature: What the curvature is divided by.

    Returns:
        The posterior, with the evidence of all data.

    Raises:
        InputError: The structure is no sum over the points, or processes disagree about the network.

    >>> from net2gp.likelihoods import Gaussian
    >>> network = nn.Linear(1, 1).double().eval()
    >>> x = torch.linspace(-1, 1, 5, dtype=torch.float64)[:, None]
    >>> data = (x, network(x).detach())
    >>> laplace_of_shards(network, data, Gaussian(0.1), prior_var=1.0).marginal(0 * x[:1]).variance
    tensor([[0.0196]], dtype=torch.float64)

    Reference: Daxberger et al., Laplace redux, NeurIPS 2021.
    """
    check_positive(temperature, "temperature")
    with torch.inference_mode(False):
        chosen = _checked(network, structure)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EmptyClass)  # a class may be in another shard
            task, chosen = make_task(
                network,
                shard if isinstance(shard, Stream) else Stream(shard),
                likelihood,
                chosen,
                only=only,
                prior_var=prior_var,
                temperature=temperature,
            )
        assert isinstance(task, StreamedTask)
        task = replace(task, known=_total(task.known))
        check_classes(task)
        search = Search(task, added_up(chosen.curvature(task)), chosen, Evidence(per_layer))
        found = search.solve(tuned(search))
        gradient = gradient_at(search, found)
        _add_up([gradient])
        check_stationary(search, found, gradient)
        return cast("Posterior[Observed]", search.posterior(found))


def _checked(network: nn.Module | Linearized, structure: Structure | None) -> Structure:
    """The structure, which must be a sum over the points; raise unless all processes have one network."""
    parameters = list(
        (network.network if isinstance(network, Linearized) else network).parameters()
    )
    if structure is None:
        structure = Full() if sum(p.numel() for p in parameters) <= SMALL_FULL else Kron()
    if not isinstance(structure, Full | Diagonal | Kron | LastLayer):
        raise InputError(
            f"with the data in several processes the curvature must be a sum over points, as {structure!r} "
            "is not. Pass structure=Full(), Diagonal(), Kron() or LastLayer()."
        )
    totals = [float(p.detach().double().sum()) for p in parameters]
    if any(other != totals for other in _from_all(totals)):
        raise InputError(
            "the processes have networks with different parameters. Pass the network after training has "
            "synchronized it, or broadcast its state dict from one process."
        )
    return structure


def added_up(curvature: Value) -> Value:
    """The same curvature with each of its sums added up across processes.

    Args:
        curvature: A dataclass of tensors and counts that are sums over points, or of such dataclasses.

    Returns:
        The curvature of the points of all processes, the same in each.

    Raises:
        InputError: Processes have curvatures of different forms.
    """
    forms = _from_all(_form(curvature))
    if any(form != forms[0] for form in forms):
        raise InputError(
            "the processes found curvatures of different forms, as happens if a layer is used in other ways "
            "by some points. Pass structure=Diagonal() or Full()."
        )
    summed = _copied(curvature)
    _add_up(_tensors(summed))
    return summed


def _parts(value: Any) -> list[tuple[str, Any]]:
    """The fields of a dataclass that are of its own points, not of the task."""
    return [(f.name, getattr(value, f.name)) for f in fields(value) if f.name != "task"]


def _form(value: Any) -> object:
    if isinstance(value, Tensor):
        return tuple(value.shape)
    if isinstance(value, tuple):
        return tuple(_form(one) for one in value)
    if is_dataclass(value):
        return type(value).__name__, tuple(_form(one) for _, one in _parts(value))
    return None if _is_count(value) else value


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _copied(value: Any) -> Any:
    """The same with sums of its own; counts are added up at once."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, tuple):
        return tuple(_copied(one) for one in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{name: _copied(one) for name, one in _parts(value)})
    return sum(_from_all(value)) if _is_count(value) else value


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple):
        return [tensor for one in value for tensor in _tensors(one)]
    return _tensors(tuple(one for _, one in _parts(value))) if is_dataclass(value) else []


def _together() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def _add_up(values: list[Tensor]) -> None:
    """Replace each tensor by its sum over the processes, in place."""
    if _together():
        for value in values:
            distributed.all_reduce(value)


def _from_all(value: Value) -> list[Value]:
    """What each process has, in the order of the processes."""
    if not _together():
        return [value]
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, value)
    return found


def _total(sums: Sums) -> Sums:
    """The sums over the points of all processes."""
    device = sums.log_prob.device
    first, *rest = _from_all(_moved(sums, torch.device("cpu")))
    for other in rest:
        first = first.plus(other)
    return cast(Sums, _moved(first, device))


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{f.name: _moved(getattr(value, f.name), device) for f in fields(value)}
        )
    return value
