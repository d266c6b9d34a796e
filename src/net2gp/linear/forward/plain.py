"""Functions in plain arithmetic, where torch's own have derivatives that are wrong or missing.

torch's fused norms compute means and deviations beside their result. Derivatives beyond the second, or
nested by torch.func, treat these as constants. Its cosine similarity clamps norms at eps where reverse mode
does not see it, so that rows of J for vectors shorter than eps are off while forward mode is right. Its bags
of embeddings have no second derivative.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from net2gp.linear.forward.recurrence import embedding_bag

COSINE = torch.cosine_similarity
"""torch's own function, which is also the one of torch.nn.functional."""


class PlainFunctions(TorchFunctionMode):
    """A context in which norms and bags of embeddings are sums, products and roots."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call the plain form of a norm or a bag, and every other function unchanged."""
        return _PLAIN.get(func, func)(*args, **(kwargs or {}))


class PlainCosines(TorchFunctionMode):
    """A context in which cosine similarities are sums, products and roots, however they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.ran = self.used = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call the plain form of a cosine, and every other function unchanged."""
        self.ran, self.used = True, self.used or func is COSINE
        return (_cosine_similarity if func is COSINE else func)(*args, **(kwargs or {}))


_HOLDS_COSINE: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""Whether a network called torch's own function in a pass in which torch's names had the plain one."""


@contextlib.contextmanager
def plain_cosines(network: nn.Module) -> Iterator[None]:
    """Run cosine similarities of a network in plain arithmetic.

    Most networks look the function up by its name in torch, where the plain one stands within this context;
    it has the same values, so that other threads may see it. Some hold the function itself, in a closure,
    an attribute or a name of their file. These need a mode, which slows down every operation: it is on in the
    first pass of every network, and in later ones if it found such a call.
    """
    module: Any
    with contextlib.ExitStack() as stack:
        for module in (torch, F):
            stack.callback(setattr, module, "cosine_similarity", module.cosine_similarity)
            module.cosine_similarity = _cosine_similarity
        if not _HOLDS_COSINE.get(network, True):
            yield
            return
        mode = stack.enter_context(PlainCosines())
        yield
        if mode.ran:
            _HOLDS_COSINE[network] = mode.used


def _normalized(x: Tensor, axes: tuple[int, ...], eps: float) -> Tensor:
    centered = x - x.mean(axes, keepdim=True)
    return centered * (centered.square().mean(axes, keepdim=True) + eps).rsqrt()


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    axes = range(-len(normalized_shape), 0)
    return _affine(_normalized(input, tuple(axes), eps), weight, bias)


def _rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    axes = tuple(range(-len(normalized_shape), 0))
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    return _affine(input * (input.square().mean(axes, keepdim=True) + eps).rsqrt(), weight, None)


def _group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    grouped = input.reshape(input.shape[0], num_groups, -1)
    return _by_channel(_normalized(grouped, (2,), eps).reshape(input.shape), weight, bias)


def _by_channel(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    shape = (-1, *[1] * (x.dim() - 2))
    return _affine(x, *(None if v is None else v.reshape(shape) for v in (weight, bias)))


def _functional_instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not use_input_stats:
        return F.instance_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    return _by_channel(_normalized(input, tuple(range(2, input.dim())), eps), weight, bias)


def _functional_batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if training or running_mean is None or running_var is None:
        axes = (0, *range(2, input.dim()))
        return _by_channel(_normalized(input, axes, eps), weight, bias)
    normalized = _by_channel(input, None, -running_mean)
    return _by_channel(_by_channel(normalized, (running_var + eps).rsqrt(), None), weight, bias)


def _embedding_bag(ids: Tensor, weight: Tensor, *given: Any, **named: Any) -> Tensor:
    found = embedding_bag(lambda i, table, _: F.embedding(i, table), ids, weight, *given, **named)
    return F.embedding_bag(ids, weight, *given, **named) if found is None else found


def _cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    if not (x1.is_floating_point() and x2.is_floating_point()):
        return COSINE(x1, x2, dim, eps)
    x1, x2 = torch.broadcast_tensors(x1, x2)
    return (_directed(x1, dim, eps) * _directed(x2, dim, eps)).sum(dim)


def _directed(x: Tensor, axis: int, eps: float) -> Tensor:
    return x / torch.linalg.vector_norm(x, dim=axis, keepdim=True).clamp_min(eps)


_PLAIN: dict[Any, Callable[..., Tensor]] = {
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    F.group_norm: _group_norm,
    torch.group_norm: _group_norm,
    F.instance_norm: _functional_instance_norm,
    F.batch_norm: _functional_batch_norm,
    F.embedding_bag: _embedding_bag,
}
