"""The variances of weights and biases, and which parameterization each layer has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from net2gp.errors import InputError, check_positive

Variance = float | Tensor
"""A variance: a number, or a tensor of one element, which may require gradients."""

Variances = Variance | Mapping[str, Variance]
"""One variance for all layers, or variances by layer name or pattern."""

Parameterization = str | Mapping[str, str]
"""The word "ntk" or "standard" for all layers, or one per layer name or pattern."""

KNOWN = ("ntk", "standard")


@dataclass(frozen=True, eq=False)
class Prior:
    """Weights N(0, weight_var / fan_in) and biases N(0, bias_var), by the name of their layer.

    In the NTK parameterization a layer is √(weight_var / fan_in) ω x + √bias_var β with ω, β ~ N(0, 1); in
    the standard one it is W x + b. Both give the same functions at initialization, but different tangent
    kernels.

    Args:
        weight_vars: The variances of the weights times their fan-in, by name.
        bias_vars: The variances of the biases, by name.
        parameterizations: "ntk" or "standard", by name.
        dtype: The dtype in which moments are computed.
    """

    weight_vars: Mapping[str, Variance]
    bias_vars: Mapping[str, Variance]
    parameterizations: Mapping[str, str]
    dtype: torch.dtype = torch.float64

    def weight(self, name: str) -> Variance:
        """Return the variance of the weights of a layer, times their fan-in."""
        return self.weight_vars[name]

    def bias(self, name: str | None) -> Variance:
        """Return the variance of the biases of a layer, which is zero without a name."""
        return 0.0 if name is None else self.bias_vars[name]

    def standard(self, name: str) -> bool:
        """Whether the layer has the standard parameterization."""
        return self.parameterizations[name] == "standard"

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> Prior:
        """Return the same variances, with tensors moved to another device and dtype."""
        weights, biases = (
            {
                name: value.to(device=device, dtype=dtype) if isinstance(value, Tensor) else value
                for name, value in values.items()
            }
            for values in (self.weight_vars, self.bias_vars)
        )
        return replace(
            self, weight_vars=weights, bias_vars=biases, dtype=dtype if dtype else self.dtype
        )

    def values(self) -> tuple[float | str, ...]:
        """Return all numbers and words, by which priors are compared."""
        numbers = (*self.weight_vars.values(), *self.bias_vars.values())
        return (*(float(value) for value in numbers), *self.parameterizations.values())

    @property
    def requires_grad(self) -> bool:
        """Whether a variance requires gradients."""
        values = (*self.weight_vars.values(), *self.bias_vars.values())
        return any(isinstance(value, Tensor) and value.requires_grad for value in values)


def prior_of(
    names: Iterable[str],
    weight_var: Variances,
    bias_var: Variances,
    parameterization: Parameterization,
) -> Prior:
    """Return the prior of layers with these names.

    Args:
        names: The names of all layers with weights.
        weight_var: σ_w² for all layers, or a mapping from names or patterns; the first match counts.
        bias_var: σ_b², likewise.
        parameterization: "ntk" or "standard", likewise.

    Returns:
        The prior, with one entry per name.

    Raises:
        InputError: If a value is no variance or no parameterization, or if a mapping leaves a layer out,
            or has a pattern that matches nothing or stands behind a wider one.

    >>> prior = prior_of(["body.0", "head"], {"head": 1.0, "*": 2.0}, 0.1, "ntk")
    >>> prior.weight("body.0"), prior.weight("head"), prior.bias("head")
    (2.0, 1.0, 0.1)
    """
    names = list(names)
    weights = _spread(weight_var, names, "weight_var")
    biases = _spread(bias_var, names, "bias_var")
    kinds = _spread(parameterization, names, "parameterization")
    for values, argument in ((weights, "weight_var"), (biases, "bias_var")):
        for name, value in values.items():
            if not isinstance(value, int | float | Tensor) or isinstance(value, bool):
                raise InputError(
                    f"{argument} must be a number, a tensor of one element or a mapping from names of layers "
                    f"to these, but for '{name}' it is {value!r}. Pass for example {argument}=1.0."
                )
            if isinstance(value, Tensor) and value.numel() != 1:
                raise InputError(
                    f"{argument} of '{name}' must have one element, but has shape {tuple(value.shape)}. "
                    f"Pass a mapping with one variance for each layer: {argument}={{'{name}': ...}}."
                )
            check_positive(value, argument, zero=True)
    for name, kind in kinds.items():
        if kind not in KNOWN:
            raise InputError(
                f"parameterization must be 'ntk' or 'standard', but for '{name}' it is {kind!r}."
            )
    return Prior(
        {name: _scalar(value) for name, value in weights.items()},
        {name: _scalar(value) for name, value in biases.items()},
        kinds,
    )


def _scalar(value: Variance) -> Variance:
    return value.reshape(()) if isinstance(value, Tensor) else float(value)


def _spread(value: object, names: list[str], argument: str) -> dict:
    if not isinstance(value, Mapping):
        return dict.fromkeys(names, value)
    for pattern in value:
        if not isinstance(pattern, str):
            raise InputError(
                f"{argument} must map names to values, but has the key {pattern!r}. Names are strings: "
                f"{', '.join(repr(name) for name in names)}."
            )
        if not any(_matches(name, pattern) for name in names):
            raise InputError(
                f"{argument} names '{pattern}', but no layer with weights has such a name. "
                f"There are: {', '.join(names)}."
            )
    result = {}
    for name in names:
        found = [value[pattern] for pattern in value if _matches(name, pattern)]
        if not found:
            raise InputError(
                f"{argument} says nothing about '{name}'. Add '{name}' to the mapping, or '*' for all others."
            )
        result[name] = value[name] if name in value else found[0]
    _check_order([pattern for pattern in value if pattern not in names], names, argument)
    return result


def _check_order(patterns: list[str], names: list[str], argument: str) -> None:
    """Raise if a pattern has no effect because an earlier one matches the same layers and more."""
    reach = [{name for name in names if _matches(name, pattern)} for pattern in patterns]
    for i, pattern in enumerate(patterns):
        for j in range(i):
            if reach[i] < reach[j]:
                raise InputError(
                    f"{argument}['{pattern}'] decides nothing: '{patterns[j]}' in front of it matches the "
                    "same layers and more, and the first counts. "
                    f"Put '{pattern}' in front of '{patterns[j]}'."
                )


def _matches(name: str, pattern: str) -> bool:
    """Whether the pattern is the layer's name, a wildcard for it, or the name of a module that holds it."""
    return fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")
