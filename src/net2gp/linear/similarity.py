"""How alike two networks, or the tasks that they learned, are: by where their gradients are large.

The diagonal of Σ_n J_nᵀ Λ_n J_n has a number per parameter. If Λ is the identity, the matrix is the Gram
matrix JᵀJ of the Jacobian; if Λ is the curvature of a likelihood, it is the Fisher information.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from net2gp.errors import InputError, NetworkError
from net2gp.inputs import check_inputs, describe, num_rows, tensors
from net2gp.likelihoods import Gaussian
from net2gp.linear.curvatures.curvature import Source, diagonal_curvature
from net2gp.linear.linearized import Linearized, Patterns, linearize
from net2gp.streams import Passes, held_or_streamed
from net2gp.types import Data, Inputs, Likelihood, Params, Stream

Points = Data | Tensor | dict[str, Tensor]
"""Inputs alone, or data with targets. Targets are not read: the Fisher information does not need them."""


@dataclass(frozen=True)
class PerParameter:
    """Keep a number per entry of each parameter."""


@dataclass(frozen=True)
class PerFilter:
    """Average over each row of each parameter: over a filter, or over the weights into a unit.

    Rows are indexed by the first axis, so that a bias keeps a number per entry.
    """


@dataclass(frozen=True)
class PerLayer:
    """Average over all parameters of each module."""


Pooling = PerParameter | PerFilter | PerLayer


@dataclass(frozen=True, eq=False)
class TaskEmbedding:
    """The diagonal of the Fisher information, averaged over points.

    Args:
        parts: The numbers in float64, by name of the parameter or module: of the parameter's shape,
            (rows,) for `PerFilter()`, or () for `PerLayer()`.
        per: What was averaged over.
    """

    parts: Params
    per: Pooling = PerParameter()

    @property
    def vector(self) -> Tensor:
        """Return all numbers in one vector, (E,)."""
        return torch.cat([value.reshape(-1) for value in self.parts.values()])

    def pooled(self, per: Pooling) -> TaskEmbedding:
        """Average an embedding of all parameters over filters or layers.

        Args:
            per: `PerFilter()` or `PerLayer()`; `PerParameter()` keeps everything.

        Returns:
            The averaged embedding.

        Raises:
            InputError: If `per` is something else, or this embedding is an average already.

        >>> whole = TaskEmbedding({"0.weight": torch.ones(2, 3), "0.bias": torch.zeros(2)})
        >>> whole.pooled(PerLayer()).parts
        {'0': tensor(0.7500)}
        """
        if not isinstance(per, Pooling):
            raise InputError(
                f"per must be PerParameter(), PerFilter() or PerLayer(), but is {describe(per)}."
            )
        if not isinstance(self.per, PerParameter):
            raise InputError(
                f"this embedding is {self.per} already. Pool the embedding of all parameters, which "
                "task_embedding gives with per=PerParameter()."
            )
        return TaskEmbedding(_pooled(self.parts, per), per)


def task_embedding(
    network: nn.Module | Linearized,
    data: Points,
    likelihood: Likelihood,
    *,
    per: Pooling | None = None,
    only: Patterns | None = None,
) -> TaskEmbedding:
    """Compute diag(1/N Σ_n J_nᵀ Λ_n J_n): how much the law of y changes with each parameter, on average.

    Λ_n is the curvature of the likelihood at the network's outputs, so that this is the exact diagonal of
    the Fisher information, with expectations over the labels that the network predicts. Nothing is
    drawn at random. The cost is a forward and C backward passes over the data in chunks, and memory for P
    numbers; the Jacobian (N, C, P) is never formed.

    Args:
        network: The network, or its linearization.
        data: The inputs, or data with targets, which are not read; a loader of more than 1 GiB, or a
            `data.Stream(loader)`, is summed over batch by batch.
        likelihood: The law of y given the outputs, for example `Categorical()`.
        per: What to average over: `PerFilter()` makes the embedding of the reference. None keeps all.
        only: Chooses parameters by name, as in `linearize`; to compare tasks with different numbers of
            classes, leave the head out.

    Returns:
        The embedding, in float64.

    Raises:
        InputError: If `likelihood` is no likelihood, or `per` no kind of average.

    >>> network = nn.Linear(2, 1, bias=False).eval()
    >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> task_embedding(network, x, Gaussian(noise_var=0.25)).vector  # x²/0.25, on average
    tensor([20., 40.], dtype=torch.float64)

    Reference: Achille et al., Task2Vec: task embedding for meta-learning, ICCV 2019.
    """
    if not isinstance(likelihood, Likelihood) or isinstance(likelihood, type):
        raise InputError(
            f"likelihood must be e.g. Categorical() or Gaussian(1.0), but is {describe(likelihood)}."
        )
    with torch.inference_mode(False):
        linearized = _linearized(network, only)
        diagonal = _diagonal(linearized, data, likelihood)
    return TaskEmbedding(linearized.unflatten(diagonal)).pooled(
        PerParameter() if per is None else per
    )


def jacobian_similarity(
    network_a: nn.Module | Linearized,
    network_b: nn.Module | Linearized,
    data: Points,
    data_b: Points | None = None,
    *,
    only: Patterns | None = None,
) -> Tensor:
    """Compute the cosine between the diagonals of JᵀJ of two networks of one architecture.

    The cosine is Σ_p a_p b_p / (‖a‖ ‖b‖), where a_p = Σ_nc (∂f_c(x_n)/∂θ_p)² for the first network and b_p
    is the same for the second. It is 1 for the same network, for outputs that are multiples of each
    other, and if both Jacobians have the same columns. Parameters are compared by name, not up to
    permutations of hidden units: units of networks from different initializations are paired by number.

    For more than two networks embed each once, with `task_embedding(network, data, Gaussian(1.0))`, and
    take `similarity_matrix`. Each network costs C backward passes over its data, and memory for P numbers.

    Args:
        network_a: The first network, or its linearization.
        network_b: The second one.
        data: The inputs of the first network, or data with targets, which are not read.
        data_b: The inputs of the second network; None takes `data`.
        only: Chooses parameters by name, as in `linearize`.

    Returns:
        The cosine from 0 to 1, a tensor without axes in float64.

    >>> one, other = nn.Linear(2, 1, bias=False).eval(), nn.Linear(2, 1, bias=False).eval()
    >>> jacobian_similarity(one, other, torch.eye(2)[:1])  # a linear map: J is x, whatever the weights
    tensor(1., dtype=torch.float64)
    >>> jacobian_similarity(one, other, torch.eye(2), torch.eye(2)[:1])
    tensor(0.7071, dtype=torch.float64)

    Reference: Maddox et al., Fast adaptation with linearized neural networks, AISTATS 2021.
    """
    identity = Gaussian(noise_var=1.0)
    a = task_embedding(network_a, data, identity, only=only)
    b = task_embedding(network_b, data if data_b is None else data_b, identity, only=only)
    return similarity_matrix([a, b])[0, 1]


def task_distance(a: TaskEmbedding, b: TaskEmbedding, *, balanced: bool = False) -> Tensor:
    """Compute 1 − cos(a, b), which is 0 for embeddings that are multiples of each other.

    Args:
        a: An embedding.
        b: Another embedding, of the same parameters.
        balanced: Whether to compare a/(a + b) with b/(a + b), as the reference does. Parameters with
            little information then count as much as others, and a common factor of one embedding, for
            example from logits that are surer throughout, changes the distance. Parameters without
            information in both count as equal.

    Returns:
        The distance from 0 to 1, a tensor without axes in float64.

    >>> a, b = (TaskEmbedding({"weight": torch.tensor(v)}) for v in ([3.0, 0.0], [3.0, 4.0]))
    >>> task_distance(a, b)
    tensor(0.4000, dtype=torch.float64)
    >>> task_distance(a, b, balanced=True)
    tensor(0.5528, dtype=torch.float64)

    Reference: Achille et al., Task2Vec: task embedding for meta-learning, ICCV 2019.
    """
    one, other = _aligned([a, b])
    if balanced:
        total = one + other
        one, other = (torch.where(total > 0, value / total, 0.5) for value in (one, other))
    return (1 - _cosine(torch.stack([one, other]))[0, 1]).clamp(0.0, 1.0)


def similarity_matrix(embeddings: Sequence[TaskEmbedding]) -> Tensor:
    """Compute cos(a, b) for all pairs of embeddings.

    Args:
        embeddings: K embeddings of the same parameters.

    Returns:
        The cosines, (K, K) in float64, with ones on the diagonal.

    Raises:
        InputError: If there are no embeddings, or they were averaged in different ways.
        NetworkError: If the networks have different parameters, or an embedding is zero or infinite.

    >>> a, b = (TaskEmbedding({"weight": torch.tensor(v)}) for v in ([3.0, 0.0], [3.0, 4.0]))
    >>> similarity_matrix([a, b])
    tensor([[1.0000, 0.6000],
            [0.6000, 1.0000]], dtype=torch.float64)
    """
    if not embeddings:
        raise InputError("there is nothing to compare: pass a list of task_embedding(...).")
    return _cosine(torch.stack(_aligned(embeddings)))


def _cosine(vectors: Tensor) -> Tensor:
    largest = vectors.amax(1, keepdim=True)
    if not bool(torch.isfinite(vectors).all()):
        raise NetworkError(
            "an embedding is not finite: the gradients overflow. Use network.double(), or smaller inputs."
        )
    if not bool((largest > 0).all()):
        raise NetworkError(
            "an embedding is zero: no output depends on the parameters at these data, as with units that "
            "are all dead or with the softmax of a single output. Pass Bernoulli() for one output, or "
            "other data."
        )
    # divide by the largest entry first, since squares of small gradients would underflow
    unit = torch.nn.functional.normalize(vectors / largest, dim=1)
    return (unit @ unit.mT).clamp(0.0, 1.0).fill_diagonal_(1.0)


def _aligned(embeddings: Sequence[TaskEmbedding]) -> list[Tensor]:
    """Return the vectors with parameters in the same order, on the device of the first embedding."""
    first = embeddings[0]
    for other in embeddings:
        if not isinstance(other, TaskEmbedding):
            raise InputError(f"pass what task_embedding returns: this is {describe(other)}.")
        if other.per != first.per:
            raise InputError(
                f"one embedding is {first.per} and another {other.per}: embed both with the same per=."
            )
        _check_same_parts(first.parts, other.parts)
    device = first.vector.device
    return [
        torch.cat([e.parts[name].reshape(-1) for name in first.parts]).to(device, torch.float64)
        for e in embeddings
    ]


def _check_same_parts(one: Params, other: Params) -> None:
    alone = [name for name in (*one, *other) if name not in one or name not in other]
    if alone:
        some = ", ".join(f"'{name}'" for name in alone[:4]) + (", …" if len(alone) > 4 else "")
        raise NetworkError(
            f"the networks must have the same parameters, but only one of them has {some}. Compare "
            "networks of one architecture, or choose what they share, e.g. only='features.*'."
        )
    for name, value in one.items():
        if value.shape != other[name].shape:
            raise NetworkError(
                f"the networks must have parameters of the same shapes, but '{name}' gives "
                f"{tuple(value.shape)} in one and {tuple(other[name].shape)} in another. Leave it out: "
                f"only=['*', '!{name}']."
            )


def _linearized(network: nn.Module | Linearized, only: Patterns | None) -> Linearized:
    if not isinstance(network, Linearized):
        return linearize(network, only=only)
    if only is not None:
        raise InputError("pass only= to linearize, which has chosen the parameters already.")
    return network


def _pieces(linearized: Linearized, data: Points) -> Iterator[tuple[int, Inputs]]:
    """The inputs, all together or as a stream gives them, with the number of the first."""
    if isinstance(data, Tensor | Mapping):
        check_inputs(data)
        yield 0, data
        return
    found = held_or_streamed(data, linearized.example)
    if not isinstance(found, Stream):
        yield 0, found[0]
        return
    for first, x, _ in Passes(found, linearized.example, most=1).pieces("embedding"):
        yield first, x


def _diagonal(linearized: Linearized, data: Points, likelihood: Likelihood) -> Tensor:
    total, count = torch.zeros((), dtype=torch.float64, device=linearized.example.device), 0
    for first, x in _pieces(linearized, data):
        linearized.check(x)
        unread = tensors(x)[0].new_zeros(num_rows(x))
        total = total + diagonal_curvature(Source(linearized, x, unread, likelihood, first=first))
        count += num_rows(x)
    return total / count


def _pooled(parts: Params, per: Pooling) -> Params:
    if isinstance(per, PerParameter):
        return parts
    if isinstance(per, PerFilter):
        return {name: _by_row(value).mean(1) for name, value in parts.items()}
    modules: dict[str, list[Tensor]] = {}
    for name, value in parts.items():
        modules.setdefault(name.rpartition(".")[0], []).append(value.reshape(-1))
    return {name: torch.cat(values).mean() for name, values in modules.items()}


def _by_row(value: Tensor) -> Tensor:
    return value.reshape(value.shape[0] if value.dim() else 1, -1)
