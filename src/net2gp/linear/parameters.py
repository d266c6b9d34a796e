"""The choice of a network's parameters and of their prior variances by patterns of their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from net2gp.errors import InputError, NetworkError, check_dtype_and_device
from net2gp.inputs import describe
from net2gp.linear.precision import HALF, rechosen
from net2gp.types import Params

if TYPE_CHECKING:
    from net2gp.linear.linearized import Linearized

Patterns = str | Sequence[str]
"""A name pattern, or several: a list adds up, and a pattern that starts with "!" takes away."""

PriorVar = float | Tensor | Mapping[str, float | Tensor]
"""One prior variance for all parameters, or variances by name pattern; the last match counts."""


def check_given(params: Params | None, named: Mapping[str, Tensor]) -> Params:
    """Return the values that replace a network's own by name; raise if a name or a shape does not fit."""
    given = dict(params or {})
    for name, value in given.items():
        if name not in named:
            raise InputError(
                f"params has '{name}', which the network does not: {_some(list(named))}."
            )
        if value.shape != named[name].shape:
            raise InputError(
                f"params['{name}'] must have shape {tuple(named[name].shape)}, but is {describe(value)}."
            )
    return given


def check_values(params: Params) -> None:
    """Raise unless all values are finite, real, and share one dtype and device that can be computed with.

    Those of half precision may stand beside others, since they are widened.
    """
    kinds = {(value.dtype, value.device) for value in params.values()}
    wide = {kind for kind in kinds if kind[0] not in HALF}
    if wide and len({device for _, device in kinds}) == 1:
        kinds = wide
    if len(kinds) > 1:
        raise NetworkError(
            f"the chosen parameters must share one dtype and device, but have {sorted(map(str, kinds))}. "
            "Convert the network, e.g. network.float(), or choose fewer parameters with only=."
        )
    dtype, device = next(iter(kinds))
    if device.type == "meta":
        raise NetworkError(
            "the network is on the meta device, which holds shapes and no values. Load its weights: "
            "network.to_empty(device='cpu').load_state_dict(weights)."
        )
    if dtype not in (torch.float32, torch.float64, *HALF):
        raise NetworkError(
            f"the parameters are {dtype}, which have no derivatives: use network.float(), or choose others "
            "with only=."
        )
    for name, value in params.items():
        if not bool(torch.isfinite(value).all()):
            raise NetworkError(
                f"parameter '{name}' has NaN or infinite values: the training diverged."
            )


def free_names(named: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the parameters that vary unless `only` is given.

    These are the ones that require a gradient. If none does, as in an exported network or one that only
    predicts, nothing was left out on purpose, and all floating-point parameters vary.
    """
    trained = [name for name, value in named.items() if value.requires_grad]
    return trained or [n for n, v in named.items() if v.is_floating_point()] or list(named)


def all_layers(linearized: Linearized) -> Linearized:
    """Return the same linearization with all parameters chosen that vary unless `only` is given."""
    values = {**linearized.params, **linearized.frozen}
    names = free_names(dict(linearized.network.named_parameters()))
    return rechosen(linearized, [name for name in names if name in values])


def kept(network: nn.Module, given: Params, chosen: Sequence[str]) -> Params:
    """Return the values that do not vary: buffers and parameters that are not chosen, by name.

    They are copies, except for parameters that nobody trains and weights in integers of eight bits: so a
    frozen base of a large network takes no memory a second time.
    """
    found: Params = {}
    for name, value in network.named_parameters():
        if name not in chosen:
            own = given.get(name, value)
            found[name] = _kept(own, shared=own is value and not value.requires_grad)
    integers = (torch.int8, torch.uint8)
    return found | {n: _kept(v, shared=v.dtype in integers) for n, v in network.named_buffers()}


def _kept(value: Tensor, *, shared: bool) -> Tensor:
    value = value.detach()
    return value if shared and not value.is_inference() else value.clone()


def check_tangent(v: Params, params: Params) -> None:
    """Raise unless `v` has a value for each of the parameters, of the same shape, dtype and device."""
    if not isinstance(v, Mapping) or set(v) != set(params):
        came = sorted(v) if isinstance(v, Mapping) else describe(v)
        raise InputError(f"expected a value for each of {sorted(params)}, but got {came}.")
    for name, value in params.items():
        if v[name].shape != value.shape:
            raise InputError(
                f"'{name}' must have shape {tuple(value.shape)}, but is {describe(v[name])}."
            )
        check_dtype_and_device(v[name], f"'{name}'", value, "the network")


def choose(names: list[str], only: Patterns | None) -> list[str]:
    """Choose names by pattern.

    Args:
        names: The names to choose from.
        only: A pattern or a list of patterns; those that start with "!" take names away. None chooses all.

    Returns:
        The chosen names, in the order of `names`.

    Raises:
        InputError: If a pattern matches nothing, or no name is left.

    >>> choose(["a.weight", "a.bias", "b.weight"], ["*", "!*.bias"])
    ['a.weight', 'b.weight']
    """
    if only is None:
        return names
    patterns = [only] if isinstance(only, str) else only
    if not isinstance(patterns, Sequence) or not all(isinstance(one, str) for one in patterns):
        raise InputError(
            f"only must be a name pattern or a list of them, but is {describe(only)}. Pass for example "
            'only="head.*", or only=["*", "!embed.*"].'
        )
    chosen: set[str] = set()
    for pattern in patterns:
        matched = {name for name in names if fnmatchcase(name, pattern.removeprefix("!"))}
        if not matched:
            raise InputError(
                f"only='{pattern}' matches no parameter. The network has: {_some(names)}."
            )
        chosen = chosen - matched if pattern.startswith("!") else chosen | matched
    if not chosen:
        raise InputError(f"only={only!r} leaves no parameter. The network has: {_some(names)}.")
    return [name for name in names if name in chosen]


def expand_prior(prior_var: PriorVar, params: Params, name: str = "prior_var") -> Params:
    """Expand a prior variance to one per parameter.

    Args:
        prior_var: A number, a tensor, or a mapping from name patterns to these; of several patterns that
            match a parameter, the last counts.
        params: The parameters, by name.
        name: The name of the variance in the messages.

    Returns:
        A scalar tensor or a tensor of the parameter's shape, by name.

    Raises:
        InputError: If a value is no variance, has another shape than its parameter, or if a pattern
            matches nothing or is overruled by a later one, or if a parameter is left out.
    """
    patterns = prior_var if isinstance(prior_var, Mapping) else {"*": prior_var}
    like = next(iter(params.values()))
    expanded: Params = {}
    reach: dict[str, set[str]] = {}
    for pattern, value in patterns.items():
        several = isinstance(prior_var, Mapping)
        one, place = (f"['{pattern}']", f" for '{pattern}'") if several else ("", "")
        try:
            variance = torch.as_tensor(value, dtype=like.dtype, device=like.device)
        except (TypeError, ValueError, RuntimeError):
            raise InputError(
                f"{name} must be a number, a tensor, or a dict of these by parameter name, but is "
                f"{value!r}{place}. Pass for example {name}=1.0."
            ) from None
        if not bool(torch.isfinite(variance).all()) or bool((variance < 0).any()):
            raise InputError(f"{name}{one} must be finite and not negative, but is {value}.")
        matched = [own for own in params if fnmatchcase(own, pattern)]
        if not matched:
            raise InputError(
                f"{name} has '{pattern}', which matches none of: {_some(list(params))}."
            )
        for own in matched:
            if variance.dim() and variance.shape != params[own].shape:
                raise InputError(
                    f"{name} for '{own}' must be a number or have the parameter's shape "
                    f"{tuple(params[own].shape)}, but is {describe(variance)}."
                )
            expanded[own] = variance
        reach[pattern] = set(matched)
        for earlier in reach if len(matched) > 1 else ():
            if reach[earlier] < reach[pattern]:
                raise InputError(
                    f"{name}['{earlier}'] decides nothing: '{pattern}' behind it matches the same "
                    f"parameters and more, and the last counts. Put '{earlier}' behind '{pattern}'."
                )
    missing = [own for own in params if own not in expanded]
    if missing:
        raise InputError(
            f"{name} leaves out {_some(missing)}. Add a pattern such as '*': 1.0 in front."
        )
    return expanded


def _some(names: list[str], limit: int = 8) -> str:
    more = f", … ({len(names)} in all)" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
