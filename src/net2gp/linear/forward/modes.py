"""Whether a network in training mode computes what it computes in eval mode."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from net2gp.errors import NetworkError
from net2gp.inputs import num_rows, rows, tensors
from net2gp.linear.forward.evaluation import LOCK, evaluating, in_training, is_wrapped
from net2gp.types import Inputs

if TYPE_CHECKING:
    from net2gp.linear.linearized import Linearized


def check_layers(network: nn.Module) -> None:
    """Raise if a layer that acts at random or couples the batch in training mode is in that mode."""
    known = [module for module in network.modules() if module.training and _is_noisy(module)]
    if known:
        names = ", ".join(sorted({type(module).__name__ for module in known}))
        _refuse(network, f"{names} would act at random or couple the batch")


def _is_noisy(module: nn.Module) -> bool:
    kind = type(module).__name__
    if "Dropout" in kind:
        return bool(getattr(module, "p", 1.0) != 0)
    return "BatchNorm" in kind and bool(getattr(module, "track_running_stats", True))


def _refuse(network: nn.Module, reason: str) -> None:
    active = [name or "the network" for name, module in network.named_modules() if module.training]
    more = f", … ({len(active)} in all)" if len(active) > 4 else ""
    raise NetworkError(
        f"the network is in training mode ({reason}): {', '.join(active[:4])}{more}. "
        "Call network.eval() first."
    )


@contextlib.contextmanager
def in_eval_mode(linearized: Linearized, x: Inputs) -> Iterator[None]:
    """Keep the network in eval mode within this context; raise if training mode makes a difference at `x`.

    Callers that record a pass with hooks enter this context first, since it may run the network itself.
    """
    network = linearized.network
    if not in_training(network):
        yield
        return
    check_layers(network)
    # a vectorized pass comes after a plan for plain points, which were checked
    if not any(is_wrapped(value) for value in tensors(x)):
        key = _key(network, x)
        if key not in linearized.plans.modeless:
            _check_outputs(linearized, x)
            linearized.plans.modeless.append(key)
    with evaluating(network):
        yield


def _key(network: nn.Module, x: Inputs) -> tuple[Any, ...]:
    """Return what a check depends on: shapes of inputs, modules, their modes and numbers."""
    plain = (bool, int, float, str)
    parts = [
        (id(m), type(m), *((k, v) for k, v in vars(m).items() if isinstance(v, plain)))
        for m in network.modules()
    ]
    return (*((value.shape[1:], value.dtype, value.device) for value in tensors(x)), *parts)


def _check_outputs(linearized: Linearized, x: Inputs) -> None:
    """Raise unless training mode computes twice, to the last bit, what eval mode computes at three points.

    Training mode may draw random numbers and change buffers only if eval mode does so too.
    """
    picked = torch.tensor([0, (num_rows(x) - 1) // 2, num_rows(x) - 1])
    few = rows(x, picked.to(tensors(x)[0].device))
    with _unchanged(linearized.network, linearized.example.device):
        with evaluating(linearized.network):
            first, again = _trial(linearized, few), _trial(linearized, few)
        if first is None or not _same(first, again):
            return  # the network fails or acts at random in eval mode too, which other checks report
        if not all(_same(first, _trial(linearized, few)) for _ in range(2)):
            _refuse(linearized.network, "it does not do what it does in eval mode")


Trial = tuple[Tensor, bool, bool]
"""The outputs, whether random numbers were drawn, and whether a parameter or a buffer changed."""


def _trial(linearized: Linearized, x: Inputs) -> Trial | None:
    """Run one pass with copies of all tensors; return None if the network raises."""
    own = {name: value.clone() for name, value in linearized.params.items()}
    frozen = {name: value.clone() for name, value in linearized.frozen.items()}
    before = _random_states(linearized.example.device)
    try:
        with torch.no_grad():
            out = replace(linearized, frozen=frozen).run(own, x)
    except Exception:  # whatever the network's own code raises
        return None
    drawn = not all(map(_equal, before, _random_states(linearized.example.device)))
    old, new = {**linearized.params, **linearized.frozen}, {**own, **frozen}
    return out, drawn, not all(_equal(old[name], value) for name, value in new.items())


def _same(one: Trial, other: Trial | None) -> bool:
    return other is not None and one[1:] == other[1:] and _equal(one[0], other[0])


def _equal(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor):
        return bool(one == other)
    kind = one.is_floating_point() or one.is_complex()
    return one.shape == other.shape and bool(torch.isclose(one, other, 0, 0, equal_nan=kind).all())


def _random_states(device: torch.device) -> list[Any]:
    """Return the states of the global generators, from which a network can draw."""
    numpy_state = np.random.get_state(legacy=False)["state"]  # noqa: NPY002
    on_device = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *on_device, random.getstate(), repr(numpy_state)]


@contextlib.contextmanager
def _unchanged(network: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore all generators and the attributes of all modules after this context."""
    numpy_state, python_state = np.random.get_state(), random.getstate()  # noqa: NPY002
    devices = [device] if device.type == "cuda" else []
    with LOCK, torch.random.fork_rng(devices):
        kept = [(module, _attributes(module)) for module in network.modules()]
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)  # noqa: NPY002
            for module, attributes in kept:
                _restore(module, attributes)


def _attributes(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Return each attribute, with a copy of its values if it is a tensor."""
    return {
        name: (value, value.detach().clone() if isinstance(value, Tensor) else None)
        for name, value in vars(module).items()
    }


def _restore(module: nn.Module, attributes: dict[str, tuple[Any, Any]]) -> None:
    own = vars(module)
    for name in set(own) - set(attributes):
        del own[name]
    for name, (value, values) in attributes.items():
        own[name] = value
        if values is not None and not _equal(values, value):
            value.detach().copy_(values)
