"""How posteriors, kernels and predictions print themselves: a line of text, and a table in notebooks."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any, Protocol

from torch import Tensor


class Described(Protocol):
    """A value with named facts about itself, in the order in which they are shown."""

    def _facts(self) -> dict[str, str]: ...


def as_text(self: Described) -> str:
    """Return the text for `__repr__`: Name(fact, name=fact, …). Facts without a name come first."""
    return f"{type(self).__name__}({', '.join(_pairs(self._facts()))})"


def as_html(self: Described) -> str:
    """Return the table for `_repr_html_`, with a row for each fact."""
    rows = "".join(
        f"<tr><th style='text-align:left'>{escape(name.strip('_'))}</th>"
        f"<td style='text-align:left'>{escape(value)}</td></tr>"
        for name, value in self._facts().items()
    )
    return f"<table><caption>{escape(type(self).__name__)}</caption>{rows}</table>"


def _pairs(facts: dict[str, str]) -> list[str]:
    # Names that start with an underscore are shown only in the table.
    return [v if name.startswith("_") else f"{name}={v}" for name, v in facts.items()]


def number(value: Any) -> str:
    """Format a number with four digits, or the range of a tensor or of a dict of numbers.

    >>> number(0.123456), number({"a": 1.0, "b": 0.25}), number(None)
    ('0.1235', '0.25 to 1', 'open')
    """
    if value is None:
        return "open"
    parts = list(value.values()) if isinstance(value, Mapping) else [value]
    flat = [v.detach().double().reshape(-1) if isinstance(v, Tensor) else None for v in parts]
    tensors = [v for v in flat if v is not None]
    plain = [float(v) for v, t in zip(parts, flat, strict=True) if t is None]
    low = min([float(v.min()) for v in tensors] + plain)
    high = max([float(v.max()) for v in tensors] + plain)
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"


def likelihood_name(likelihood: Any) -> str:
    """Return Gaussian(noise_var=0.1) with four digits, or the likelihood's own text."""
    if hasattr(likelihood, "noise_var"):
        return f"{type(likelihood).__name__}(noise_var={number(likelihood.noise_var)})"
    return repr(likelihood)
