"""The papers behind a posterior: its method, structure, kernel, link, and what else it consists of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from net2gp.citations.parts import FOUND_BY, NOT_RECORDED, PARTS
from net2gp.citations.reference import Reference
from net2gp.citations.works import WORKS
from net2gp.errors import InputError

SKIPPED = ("Linearized", "SeenPoints", "SeenFeatures", "Widening", "ConditionedCovariance")
"""Parts that every posterior of their kind has, and that say nothing of a choice."""


@dataclass(frozen=True)
class Citations:
    """Papers, each with what it is behind. It prints as text.

    Args:
        entries: The papers in the order of their years, each with what they are behind.
        not_recorded: What a posterior does not know about itself, so that its papers may be missing.
    """

    entries: tuple[tuple[Reference, tuple[str, ...]], ...]
    not_recorded: tuple[str, ...] = ()

    @property
    def references(self) -> tuple[Reference, ...]:
        """The papers alone."""
        return tuple(reference for reference, _ in self.entries)

    @property
    def bibtex(self) -> str:
        """The entries for BibTeX, in UTF-8."""
        return "\n\n".join(reference.bibtex for reference in self.references)

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Reference]:
        return iter(self.references)

    def __str__(self) -> str:
        lines = [f"{reference}\n    for {'; '.join(parts)}" for reference, parts in self.entries]
        lines += [
            f"Not recorded in the posterior: {what}. If it matters, pass it too: "
            "cite(posterior, ...)."
            for what in self.not_recorded
        ]
        return "\n".join(lines) or "No paper is behind this but textbooks."

    __repr__ = __str__


def cite(*used: Any) -> Citations:
    """Return the papers behind what you ran.

    A posterior is searched for its method, the structure of its covariance, its kernel, its likelihood's
    link, its prior and its members. It does not know everything: not the optimizer that found a Gaussian over
    weights, and not how `laplace` chose prior and noise. Pass these as well. The list has the papers that
    net2gp's docstrings name for these parts; it is not a history of the field. Cost: nothing is computed.

    Args:
        *used: Posteriors, estimators and BoTorch models, which have one, and values, classes or functions of
            net2gp such as `net2gp.training.VOGN` or `net2gp.tuning.Evidence()`.

    Returns:
        The papers, which print as text; `.bibtex` has them for BibTeX.

    Raises:
        InputError: If something passed is not of net2gp.

    >>> import torch
    >>> from net2gp.kernels import RBF
    >>> from net2gp.likelihoods import Gaussian
    >>> from net2gp.posteriors import condition
    >>> posterior = condition(RBF(), (torch.ones(1, 1), torch.ones(1, 1)), Gaussian(0.1))
    >>> print(cite(posterior))
    Rasmussen, C. E. and Williams, C. K. I. (2006). Gaussian processes for machine learning. MIT Press,
        doi:10.7551/mitpress/3206.001.0001.
        for conditioning a Gaussian process
    """
    if not used:
        raise InputError(
            "cite needs what was used: cite(posterior), or cite(net2gp.training.VOGN)."
        )
    names: dict[str, None] = {}
    for one in used:
        names |= dict.fromkeys(_names(one))
    parts: dict[str, list[str]] = {}
    for name in names:
        words, keys = PARTS.get(name, ("", ()))
        for key in keys:
            if words not in parts.setdefault(key, []):
                parts[key].append(words)
    alone = len(used) == 1 and "Swag" not in names
    missing = [what for name, what in NOT_RECORDED.items() if alone and name in names]
    found = sorted(((WORKS[key], tuple(words)) for key, words in parts.items()), key=_by_year)
    return Citations(tuple(found), tuple(missing))


def _by_year(entry: tuple[Reference, tuple[str, ...]]) -> tuple[int, str]:
    return entry[0].year, entry[0].key


def _names(one: Any) -> list[str]:
    """The names in PARTS, or in NOT_RECORDED, of what was passed and of what it consists of."""
    for behind in ("posterior_", "fitted"):  # of an estimator, of a BoTorch model
        one = getattr(one, behind, one)
    named = one if isinstance(one, type) or hasattr(one, "__qualname__") else type(one)
    if not str(getattr(named, "__module__", "")).startswith("net2gp") and not is_dataclass(named):
        raise InputError(
            f"cite knows the parts of net2gp, but got {one!r}. Pass a posterior, or a function, class or "
            "value of net2gp: cite(posterior, net2gp.tuning.Evidence())."
        )
    if named is one:
        return [one.__name__]
    found: dict[str, None] = {}
    for part in _inside(one, set()):
        found |= dict.fromkeys(_names_of(part))
    if "condition" in found and "TangentKernel" in found:
        found["adapt"] = None
    return list(found)


def _names_of(part: Any) -> Iterator[str]:
    for cls in type(part).__mro__:
        yield FOUND_BY.get(cls.__name__, cls.__name__)
        if cls.__name__ in NOT_RECORDED:
            yield cls.__name__
            return  # a kind of posterior is one kind, not its base as well
    method = getattr(part, "method", None)
    if isinstance(method, str):
        yield method
    if type(part).__name__ == "LimitKernel":
        yield "ntk" if part.tangent else "nngp"


def _inside(value: Any, seen: set[int]) -> Iterator[Any]:
    """A dataclass of net2gp and all that are inside of it."""
    if isinstance(value, tuple | list):
        for one in value:
            yield from _inside(one, seen)
    elif isinstance(value, Mapping):
        yield from _inside(list(value.values()), seen)
    elif is_dataclass(value) and not isinstance(value, type) and id(value) not in seen:
        seen.add(id(value))
        if type(value).__name__ not in SKIPPED:
            yield value
            yield from _inside([getattr(value, field.name) for field in fields(value)], seen)
