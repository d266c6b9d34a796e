"""Networks that compute in half precision: their parameters, their rounding errors, and their overflows.

The network runs as it stands, forward and backward. Its parameters are linearized in wider numbers, in which
all sums and products of its results are taken: the value that varies is the one that the network rounds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from net2gp.errors import NetworkError, check_dtype_and_device
from net2gp.inputs import tensors
from net2gp.types import Inputs, Params

if TYPE_CHECKING:
    from net2gp.linear.linearized import Linearized

HALF = (torch.bfloat16, torch.float16)
"""The dtypes of half precision, the coarser one first."""


def check_full(network: nn.Module) -> None:
    """Raise if a network that is to be trained has half precision, which would round small steps away."""
    kind = coarsest(network.parameters(), torch.float32)
    if kind in HALF:
        raise NetworkError(f"the parameters are {kind}: use network.float() or network.double().")


def widened(params: Params) -> tuple[Params, dict[str, torch.dtype]]:
    """Return the values with those of half precision in wider numbers, and the dtypes that these had.

    They become float32, or float64 if there are values of float64 beside them.

    >>> values, stored = widened({"a": torch.ones(2, dtype=torch.bfloat16)})
    >>> values["a"].dtype, stored
    (torch.float32, {'a': torch.bfloat16})
    """
    stored = {name: value.dtype for name, value in params.items() if value.dtype in HALF}
    precise = any(value.dtype == torch.float64 for value in params.values())
    wide = torch.float64 if precise else torch.float32
    return {n: v.to(wide) if n in stored else v for n, v in params.items()}, stored


def narrowed(params: Params, stored: Mapping[str, torch.dtype]) -> Params:
    """Return the values as the network takes them."""
    return {n: v.to(stored[n]) if n in stored else v for n, v in params.items()}


def rechosen(linearized: Linearized, names: Iterable[str]) -> Linearized:
    """Return the same linearization with the parameters `names` as the chosen ones."""
    values = {**narrowed(linearized.params, linearized.stored), **linearized.frozen}
    params, stored = widened({name: values[name] for name in names})
    frozen = {name: value for name, value in values.items() if name not in params}
    return replace(linearized, params=params, frozen=frozen, stored=stored)


def coarsest(values: Iterable[Tensor], otherwise: torch.dtype) -> torch.dtype:
    """Return the half precision among the dtypes of a network's values, or `otherwise` if there is none."""
    kinds = {value.dtype for value in values}
    return next((kind for kind in HALF if kind in kinds), otherwise)


def input_dtypes(linearized: Linearized) -> tuple[torch.dtype, ...]:
    """Return the dtypes that floating-point inputs may have, the most usual one first.

    A network of half precision may have parameters of full precision beside it, such as adapters.
    """
    if linearized.rounding not in HALF:
        return (linearized.example.dtype,)
    own = [linearized.stored.get(name, value.dtype) for name, value in linearized.params.items()]
    others = [value.dtype for value in linearized.frozen.values() if value.is_floating_point()]
    return tuple(dict.fromkeys([linearized.rounding, *own, *others]))


def check_kinds(linearized: Linearized, x: Inputs, name: str) -> None:
    """Raise unless inputs have the device and a floating dtype of the network."""
    allowed = input_dtypes(linearized)
    for value in tensors(x):
        kind = value.dtype if value.dtype in allowed else allowed[0]
        like = linearized.example.new_empty(0, dtype=kind)
        check_dtype_and_device(value, name, like, "the network")


def _finite(value: Any) -> bool:
    """Whether all floating-point tensors in what a layer takes or returns are finite."""
    if isinstance(value, Tensor):
        return not value.is_floating_point() or bool(torch.isfinite(value).all())
    if isinstance(value, Mapping):
        return all(map(_finite, value.values()))
    return not isinstance(value, tuple | list) or all(map(_finite, value))


@contextlib.contextmanager
def _watched(network: nn.Module) -> Iterator[list[str]]:
    """Note the first place in a pass within this context where a number is not finite."""
    found: list[str] = []

    def note(side: str, name: str, module: nn.Module, value: Any) -> None:
        if not found and not _finite(value):
            found.append(f"the {side} of layer '{name}' ({type(module).__name__})")

    with contextlib.ExitStack() as stack:
        for name, module in network.named_modules():
            if name:
                # attention masks have infinities on purpose, and come beside the signal
                before = lambda layer, given, name=name: note("input", name, layer, given[:1])
                after = lambda layer, given, out, name=name: note("output", name, layer, out)
                stack.callback(module.register_forward_pre_hook(before).remove)
                stack.callback(module.register_forward_hook(after).remove)
        yield found


def checked(linearized: Linearized, out: Tensor, again: Callable[[], Any]) -> Tensor:
    """Return outputs of a network of half precision, or raise where a layer of it overflowed.

    Args:
        linearized: The linearized network.
        out: The outputs.
        again: Runs the network once more.

    Returns:
        The outputs.

    Raises:
        NetworkError: If an entry is NaN or infinite; it names the layer where that begins.
    """
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(out)  # a transform hides its values
    if wrapped or bool(torch.isfinite(out.detach()).all()):
        return out
    with torch.no_grad(), _watched(linearized.network) as found:
        again()
    raise _overflow(found[0] if found else "the output of the network", linearized.rounding)


def _overflow(place: str, kind: torch.dtype) -> NetworkError:
    return NetworkError(
        f"{place} has NaN or infinite values in {kind}, whose largest number is "
        f"{torch.finfo(kind).max:.3g}. Pass network.float(), network.to(torch.bfloat16) if this is float16, "
        "which has a smaller range, or inputs on a smaller scale."
    )


def check_gradients(linearized: Linearized, gradients: Mapping[str, Sequence[Tensor]]) -> None:
    """Raise if gradients that went through a network of half precision are not finite.

    Args:
        linearized: The linearized network.
        gradients: Tensors with the gradients at each parameter's layer, by name.

    Raises:
        NetworkError: If an entry is NaN or infinite; it names the layer closest to the output.
    """
    kind = linearized.rounding
    if kind not in HALF:
        return
    order = {name: place for place, name in enumerate(linearized.params)}
    for name in sorted(gradients, key=lambda own: order[own], reverse=True):
        if not all(map(_finite, gradients[name])):
            layer = name.rpartition(".")[0] or type(linearized.network).__name__
            raise _overflow(f"the gradient at layer '{layer}' ('{name}')", kind)


@contextlib.contextmanager
def integers_apart(network: nn.Module) -> Iterator[None]:
    """Raise within this context if a derivative would have to pass one of torch's integer layers.

    torch drops that derivative without an error, and gradients of what lies before would be wrong.
    """

    def refuse(name: str) -> Callable[[nn.Module, tuple], None]:
        def before(_: nn.Module, arguments: tuple) -> None:
            if any(isinstance(one, Tensor) and one.requires_grad for one in arguments):
                raise NetworkError(
                    f"chosen parameters act through '{name}', a quantized layer of torch, which passes no "
                    "derivative on. Choose parameters behind it with only=, or use a layer that multiplies "
                    "by its integers converted to floating-point numbers."
                )

        return before

    with contextlib.ExitStack() as stack:
        for name, module in quantized_layers(network):
            stack.callback(module.register_forward_pre_hook(refuse(name)).remove)
        yield


def quantized_layers(network: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return torch's own layers with weights in integers, by name."""
    return [
        (name or type(network).__name__, module)
        for name, module in network.named_modules()
        if ".quantized" in type(module).__module__ and "_packed_params" not in name
    ]
