"""What is known of a network for inputs of one shape, as a value that its linearization holds."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from net2gp.inputs import tensors
from net2gp.types import Inputs

if TYPE_CHECKING:
    from net2gp.linear.forward.calls import Key
    from net2gp.linear.planning.layouts import Layout

NUM_KNOWN = 8
"""How many shapes of inputs, and inputs of each shape, are remembered: enough for training and test points
in two dtypes, each in two tensors."""


@dataclass(frozen=True)
class Plan:
    """Which parameters have structured gradients, and how their layers lay out the points.

    Args:
        num_outputs: C, the number of outputs.
        layouts: Where each call of a layer keeps the points; None if that is not known.
        structured: The parameters whose gradients come from the rules of their layers.
        leftover: All other chosen parameters.
        bytes_per_point: What gradients at one point take.
        layers: The layers in the order of their calls.
        unreached: The parameters that the points of the probe do not use.
    """

    num_outputs: int
    layouts: tuple[Layout | None, ...]
    structured: tuple[str, ...]
    leftover: tuple[str, ...]
    bytes_per_point: int
    layers: tuple[Key, ...] = ()
    unreached: tuple[str, ...] = ()

    def without(self, names: set[str]) -> Plan:
        """Return the same plan, with the parameters `names` moved to the leftover ones."""
        if not names & set(self.structured):
            return self
        structured = tuple(name for name in self.structured if name not in names)
        moved = tuple(name for name in self.structured if name in names)
        return replace(self, structured=structured, leftover=self.leftover + moved)


@dataclass(frozen=True, eq=False)
class Span:
    """A part of a storage, at one version of its values, by which views of the same points are recognized."""

    storage: weakref.ref[torch.UntypedStorage]
    version: int
    start: int
    stop: int

    @staticmethod
    def of(value: Tensor) -> Span:
        """Return the part of its storage that a tensor is a view of."""
        reach = sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
        start, version = int(value.storage_offset()), -1 if value.is_inference() else value._version
        return Span(weakref.ref(value.untyped_storage()), version, start, start + reach + 1)

    def covers(self, other: Span) -> bool:
        """Whether the other is a part of this one."""
        own = self.storage()
        return (
            own is not None
            and own is other.storage()
            and self.version == other.version >= 0
            and self.start <= other.start
            and other.stop <= self.stop
        )


@dataclass(frozen=True, eq=False)
class Known:
    """What is known for inputs of one shape.

    Args:
        plan: The plan.
        output: The function that picks the outputs. It is held because plans are looked up by its id, which
            no other function can get while it lives.
        values: The parameters and buffers at the time, with their versions; with others nothing here counts.
        found: Other results by the name of the function that found them.
        seen: The points that were checked most recently.
    """

    plan: Plan
    output: Any
    values: tuple[tuple[weakref.ref[Tensor], int], ...]
    found: dict[str, Any] = field(default_factory=dict)
    seen: deque[list[Span]] = field(default_factory=lambda: deque(maxlen=NUM_KNOWN))

    @staticmethod
    def of(plan: Plan, output: Any, values: Iterable[Tensor]) -> Known:
        """Return a value that knows nothing but the plan."""
        versions = tuple((weakref.ref(value), value._version) for value in values)
        return Known(plan, output, versions)

    def counts_for(self, values: Iterable[Tensor]) -> bool:
        """Whether these are the same tensors that the plan was found with, and unchanged since."""
        return all(
            known() is value and version == value._version
            for (known, version), value in zip(self.values, values, strict=True)
        )

    def has_seen(self, x: Inputs) -> bool:
        """Whether `x` consists of points that were checked, or of a part of them."""
        spans = [Span.of(value) for value in tensors(x)]
        # a copy, since another thread may add to the deque meanwhile
        old = tuple(self.seen)
        return any(all(o.covers(s) for o, s in zip(each, spans, strict=True)) for each in old)

    def see(self, x: Inputs) -> None:
        """Remember that `x` was checked, unless it is of inference mode, where changes cannot be noticed."""
        if not any(value.is_inference() for value in tensors(x)):
            self.seen.append([Span.of(value) for value in tensors(x)])


class Plans:
    """Everything that was found out about a network, which copies of a linearization by `replace` share.

    A plan is found once for inputs of one shape. `modeless` says for which inputs training mode was seen to
    change nothing. A copy by pickle or `deepcopy` starts with no plans.

    Args:
        demoted: Parameters that some points use in another way than their layers' rules say.
        reached: Parameters that some training point uses. Like `demoted`, this is a fact about the network
            for inputs of every shape.
    """

    def __init__(self, demoted: Iterable[str] = (), reached: Iterable[str] = ()) -> None:
        self.demoted = set(demoted)
        self.reached = set(reached)
        self.modeless: deque[tuple[Any, ...]] = deque(maxlen=NUM_KNOWN)
        self._known: dict[tuple[Any, ...], Known] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Plans, (sorted(self.demoted), sorted(self.reached))

    def __len__(self) -> int:
        """Return how many shapes are known."""
        return len(self._known)

    def __iter__(self) -> Iterator[Known]:
        """Yield what is known of each shape, with the most recently used one at the end."""
        return iter(list(self._known.values()))

    def get(self, key: tuple[Any, ...], values: Iterable[Tensor]) -> Known | None:
        """Return what is known under `key` for these parameters and buffers."""
        # taken out and put back at the end, as most recent; another thread may have taken it out meanwhile
        known = self._known.pop(key, None)
        if known is None or not known.counts_for(values):
            return None
        self._known[key] = known
        return known

    def remember(self, key: tuple[Any, ...], known: Known) -> None:
        """Keep `known`, and the most recently used of the others."""
        self._known.pop(key, None)
        self._known[key] = known
        for old in list(self._known)[:-NUM_KNOWN]:
            self._known.pop(old, None)
