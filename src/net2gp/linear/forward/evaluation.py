"""How a network is run so that it can be differentiated in every way, and how J v and Jᵀ u follow."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.func import jvp, vjp
from torch.nn.attention import SDPBackend, sdpa_kernel

from net2gp.calling import functional_call
from net2gp.errors import Net2GPError, NetworkError
from net2gp.inputs import describe
from net2gp.linear.forward.plain import PlainFunctions, plain_cosines
from net2gp.types import Inputs, Params

LOCK = threading.RLock()
"""Held while a network runs with other parameters and hooks, since two threads may share one network."""

Function = Callable[[Params], Tensor]


def in_training(network: nn.Module) -> list[nn.Module]:
    """List the modules of a network that are in training mode.

    Every pass asks for it, and `network.modules()` takes several times as long, since it makes up names.
    """
    found, seen, left = [], set(), [network]
    while left:
        module = left.pop()
        if id(module) not in seen:
            seen.add(id(module))
            left.extend(part for part in module._modules.values() if part is not None)
            if module.training:
                found.append(module)
    return found


@contextlib.contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Keep the network in eval mode within this context, even while it is being trained further."""
    with LOCK:
        active = in_training(network)
        for module in active:
            module.training = False
        try:
            yield
        finally:
            for module in active:
                module.training = True


@contextlib.contextmanager
def differentiable(network: nn.Module, *, follow: bool = False) -> Iterator[None]:
    """Run the network within this context on kernels that every kind of differentiation supports.

    Fused attention and recurrent kernels have no forward mode or no double backward, and TensorFloat32
    would cost three digits of the kernel. A checkpoint would recompute with the network's own parameters
    instead of the given ones, and torch.func does not support it. With `follow`, for results that are
    differentiated in the inputs too, norms and bags run in plain arithmetic; cosine similarities always do.
    """
    with LOCK, contextlib.ExitStack() as stack:
        stack.enter_context(_eager(network))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(_plain_recurrence(network))
        stack.enter_context(without_checkpoints())
        stack.enter_context(_full_precision())
        if follow:
            stack.enter_context(PlainFunctions())
        stack.enter_context(plain_cosines(network))
        for module in network.modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                stack.enter_context(_plain_lookup(module))
        stack.callback(
            torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled()
        )
        torch.backends.mha.set_fastpath_enabled(False)
        yield


def _eager(network: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Run compiled parts of a network as they were written: compiled code calls no hooks of layers."""
    parts = network.modules()
    if any(p._compiled_call_impl is not None or "_orig_mod" in p._modules for p in parts):
        return torch.compiler.set_stance("force_eager")
    return contextlib.nullcontext()


@contextlib.contextmanager
def _plain_recurrence(network: nn.Module) -> Iterator[None]:
    recurrent = any(isinstance(module, nn.RNNBase) for module in network.modules())
    with contextlib.ExitStack() as stack:
        if torch.backends.cudnn.is_available():
            stack.enter_context(torch.backends.cudnn.flags(enabled=not recurrent, allow_tf32=False))
        if recurrent:
            with warnings.catch_warnings():
                # it warns of Intel GPUs on every call
                warnings.simplefilter("ignore")
                stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
        yield


@contextlib.contextmanager
def without_checkpoints() -> Iterator[None]:
    """Run checkpoints of this thread as plain calls; other threads, which may be training, keep theirs."""
    module: Any = torch.utils.checkpoint
    function, generator = module.CheckpointFunction, module._checkpoint_without_reentrant_generator
    own = threading.get_ident()

    def enclose(*arguments: Any, **keywords: Any) -> Iterator[None]:
        if threading.get_ident() != own:
            return (yield from generator(*arguments, **keywords))
        yield

    class Through:
        @staticmethod
        def apply(run: Any, preserve: bool, *arguments: Any) -> Any:
            if threading.get_ident() != own:
                return function.apply(run, preserve, *arguments)
            return run(*arguments)

    module.CheckpointFunction, module._checkpoint_without_reentrant_generator = Through, enclose
    try:
        yield
    finally:
        module.CheckpointFunction = function
        module._checkpoint_without_reentrant_generator = generator


@contextlib.contextmanager
def _full_precision() -> Iterator[None]:
    """Switch autocast off within this context, whether the network or the caller switched it on.

    Derivatives in half precision have too few digits. Other threads keep their autocast.
    """
    kind: Any = torch.amp.autocast_mode.autocast
    enter, leave, kept = kind.__enter__, kind.__exit__, {}
    own = threading.get_ident()

    def enter_disabled(self: Any) -> Any:
        if threading.get_ident() == own:
            kept[id(self)], self._enabled = self._enabled, False
        return enter(self)

    def leave_disabled(self: Any, *error: Any) -> Any:
        result = leave(self, *error)
        if threading.get_ident() == own:
            self._enabled = kept.pop(id(self), self._enabled)
        return result

    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        kind.__enter__, kind.__exit__ = enter_disabled, leave_disabled
        try:
            yield
        finally:
            kind.__enter__, kind.__exit__ = enter, leave


@contextlib.contextmanager
def _plain_lookup(module: nn.Embedding | nn.EmbeddingBag) -> Iterator[None]:
    """Give an embedding dense gradients that do not depend on the batch, and no gradient for padding."""
    before = module.sparse, module.scale_grad_by_freq
    module.sparse = module.scale_grad_by_freq = False
    hold = isinstance(module, nn.Embedding) and module.padding_idx is not None
    with contextlib.ExitStack() as stack:
        if hold:
            handle = module.register_forward_hook(_hold_padding, prepend=True, with_kwargs=True)
            stack.callback(handle.remove)
        try:
            yield
        finally:
            module.sparse, module.scale_grad_by_freq = before


def _hold_padding(
    module: nn.Embedding, arguments: tuple[Tensor, ...], keywords: dict[str, Tensor], out: Tensor
) -> Tensor:
    # torch leaves padding out of the backward pass, but not out of forward mode
    assert module.padding_idx is not None
    ids = arguments[0] if arguments else keywords["input"]
    return torch.where(ids.eq(module.padding_idx)[..., None], out.detach(), out)


@contextlib.contextmanager
def without_vmap_warnings() -> Iterator[None]:
    """Silence torch's warnings of operations that it vectorizes slowly, which no user can change."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
        yield


def pushforward(function: Function, at: Params, v: Params, *, forward: bool = True) -> Tensor:
    """Compute J v by forward mode.

    If `forward` is false, or an operation has no forward mode, J v is the derivative of u ↦ Jᵀu along v.
    """
    try:
        if forward:
            with LOCK:  # all threads share one level of forward mode
                return jvp(function, (at,), (v,))[1]
    except (NotImplementedError, RuntimeError) as error:
        if not _lacks_transform(error):
            raise
    _refuse_vmap(*v.values())
    out, pull = pullback(function, at, twice=True)
    u = torch.zeros_like(out).requires_grad_()
    with torch.enable_grad():
        pulled = pull(u)
    pairs = [(g, v[name]) for name, g in pulled.items() if g.requires_grad]
    if not pairs:
        return torch.zeros_like(out)
    try:
        outputs, directions = [g for g, _ in pairs], [d for _, d in pairs]
        keep = any(d.requires_grad for d in directions)
        return torch.autograd.grad(outputs, u, directions, create_graph=keep)[0]
    except (NotImplementedError, RuntimeError) as error:
        raise NetworkError(
            "an operation of the network has neither a forward mode nor a second derivative "
            f"({error}), which J v needs. Use linearized.jacobian(x) or kernel(x, y), which do not."
        ) from error


def pullback(
    function: Function, at: Params, *, twice: bool = False, follow: bool = False
) -> tuple[Tensor, Callable[[Tensor], Params]]:
    """Return the value of `function`, and u ↦ Jᵀu, which is differentiable once more in u if `twice`.

    With `follow`, u ↦ Jᵀu is differentiable by plain autograd in the inputs that `function` holds.
    """
    if not twice and not follow:
        try:
            out, pull = vjp(function, at)[:2]
            return out, lambda u: pull(u)[0]
        except (NotImplementedError, RuntimeError) as error:
            if not _lacks_transform(error):
                raise
    leaves = {name: value.detach().requires_grad_() for name, value in at.items()}
    with torch.enable_grad():
        out = function(leaves)

    def pull_back(u: Tensor) -> Params:
        _refuse_vmap(u)
        values = list(leaves.values())
        grads = torch.autograd.grad(
            out,
            values,
            u,
            retain_graph=True,
            create_graph=follow or u.requires_grad,
            materialize_grads=True,
        )
        return dict(zip(leaves, grads, strict=True))

    return out.detach(), pull_back


def is_wrapped(value: Tensor) -> bool:
    """Whether a transform of torch.func is at work on a tensor."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(value))


def _refuse_vmap(*values: Tensor) -> None:
    # whether a vectorized tensor requires a gradient cannot be read off it; the caller loops instead
    if any(is_wrapped(value) for value in values):
        raise RuntimeError("plain autograd cannot be vectorized")


def _lacks_transform(error: Exception) -> bool:
    """Whether torch.func refused an operation, such as an autograd.Function without a rule for it."""
    return any(word in str(error).lower() for word in ("forward", "jvp", "functorch", "torch.func"))


def call(
    network: nn.Module, values: Params, arguments: tuple[Tensor, ...], keywords: Params
) -> Any:
    """Return what the network returns with the parameters and buffers `values` in place of its own.

    A network that differentiates inside its forward (forces, scores) needs a graph to do so, even if the
    caller needs none.
    """
    try:
        return functional_call(network, values, arguments, keywords)
    except RuntimeError as error:
        recording = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        if recording or "does not require grad" not in str(error):
            raise
    with torch.inference_mode(False), torch.enable_grad():
        copies = [{k: _usable(v) for k, v in part.items()} for part in (values, keywords)]
        return functional_call(network, copies[0], tuple(map(_usable, arguments)), copies[1])


def _usable(value: Tensor) -> Tensor:
    return value.clone() if value.is_inference() else value


@contextlib.contextmanager
def differentiates() -> Iterator[None]:
    """Compute derivatives within this context in full precision, and raise errors that name the network."""
    cudnn = torch.backends.cudnn
    try:
        with cudnn.flags(enabled=cudnn.enabled, benchmark=cudnn.benchmark, allow_tf32=False):
            yield
    except (RuntimeError, NotImplementedError) as error:
        if isinstance(error, Net2GPError | torch.OutOfMemoryError):
            raise
        raise NetworkError(
            f"torch cannot differentiate the network in its parameters: {error}. Choose parameters behind "
            'that operation, e.g. linearize(network, only="head.*"), or replace the operation.'
        ) from error


@contextlib.contextmanager
def accepts(x: Inputs) -> Iterator[None]:
    """Raise errors of the network within this context together with a description of the inputs.

    Only kinds of errors that wrong inputs cause blame the inputs; others are faults of the network's code.
    """
    try:
        yield
    except (Net2GPError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
        raise NetworkError(
            f"the network cannot take x, {describe(x)}: {error}. "
            "Pass what network(x) takes, a batch first; a tuple is passed as *x and a dict as **x."
        ) from error
    except Exception as error:
        raise NetworkError(
            f"the code of the network raised {type(error).__name__} for x, {describe(x)}: {error}. Call "
            "network(x) by itself to find the place."
        ) from error
