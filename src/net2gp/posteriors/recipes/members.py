"""Several networks of one architecture, evaluated together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.func import vmap

from net2gp.calling import lacks_vmap
from net2gp.errors import InputError
from net2gp.inputs import describe, follows, num_rows, rows
from net2gp.kernels.features import BaseFeatureKernel
from net2gp.linear.forward.evaluation import accepts
from net2gp.linear.forward.modes import in_eval_mode
from net2gp.linear.linearized import Linearized
from net2gp.tags import savable
from net2gp.types import Inputs, Params

VALUES_AT_ONCE = 2**22
"""How many numbers of outputs one vectorized pass may have; hidden layers hold many times as many."""


@savable("members.Members")
@dataclass(frozen=True, eq=False)
class Members:
    """S networks of one architecture: draws of its parameters, or networks that were trained one by one.

    Args:
        architecture: The network, with the values of what all members share.
        values: Parameters by name, each with an axis of length S in front; buffers that differ between
            members, such as the statistics of batch norm, are here too.

    Raises:
        InputError: If a name is not in the network, or a shape does not fit.
    """

    architecture: Linearized = field(repr=False)
    values: Params = field(repr=False)

    def __post_init__(self) -> None:
        known = {**self.architecture.frozen, **self.architecture.params}
        lengths = {len(value) if value.dim() else 0 for value in self.values.values()}
        if len(lengths) != 1 or 0 in lengths:
            raise InputError(
                "the values of members have one axis in front that counts them, the same for all, but the "
                f"lengths are {sorted(lengths)}. Stack the parameters of the networks by name."
            )
        for name, value in self.values.items():
            if name not in known or value.shape[1:] != known[name].shape:
                want = f"(S, {tuple(known[name].shape)})" if name in known else "not in the network"
                raise InputError(f"'{name}' of the members is {describe(value)}, but is {want}.")

    def __len__(self) -> int:
        return len(next(iter(self.values.values())))

    def __call__(self, x: Inputs) -> Tensor:
        """Evaluate every member; the members share vectorized passes where torch can do so.

        Args:
            x: N points.

        Returns:
            The outputs, (S, N, C); differentiable in `x`.
        """
        self.architecture.check(x)
        with torch.set_grad_enabled(follows(x)), accepts(x), in_eval_mode(self.architecture, x):
            first = self._run(self._of(0), rows(x, slice(0, 1)))
            size = max(1, VALUES_AT_ONCE // max(1, num_rows(x) * first.shape[1] * 16))
            if len(self) > 1:
                try:
                    return vmap(lambda part: self._run(part, x), chunk_size=size)(self.values)
                except (RuntimeError, NotImplementedError) as error:
                    if not lacks_vmap(error):
                        raise
            return self._loop(x)

    def _loop(self, x: Inputs) -> Tensor:
        parts = (self._of(index) for index in range(len(self)))
        return torch.stack([self._run(part, x) for part in parts])

    def _run(self, values: Params, x: Inputs) -> Tensor:
        """The outputs of one member, whose own values are given."""
        return self.architecture.run(values, x)

    def _of(self, index: int) -> Params:
        return {name: value[index] for name, value in self.values.items()}

    def __getitem__(self, index: Tensor) -> Members:
        """Some of the members, by their numbers."""
        return replace(self, values={name: v[index] for name, v in self.values.items()})

    def each(self) -> Iterator[Linearized]:
        """The members one by one, each as a linearization at its own parameters."""
        for index in range(len(self)):
            own = self._of(index)
            params = {n: own.get(n, v) for n, v in self.architecture.params.items()}
            frozen = {n: own.get(n, v) for n, v in self.architecture.frozen.items()}
            yield replace(self.architecture, params=params, frozen=frozen)

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Members:
        """Move the members.

        Args:
            device: The device; None keeps it.
            dtype: The dtype of floating-point tensors; None keeps it.

        Returns:
            The same members on another device or in another dtype.
        """
        values = {
            name: value.to(device=device, dtype=dtype if value.is_floating_point() else None)
            for name, value in self.values.items()
        }
        return Members(self.architecture.to(device, dtype), values)

    @property
    def network(self) -> nn.Module:
        """The module that gives the code."""
        return self.architecture.network


@savable("kernels.MemberCovariance")
@dataclass(frozen=True, eq=False)
class MemberCovariance(BaseFeatureKernel):
    """The covariance of f over S networks: k(x, y) = (1/S) Σ_s (f_s(x) − f̄(x))(f_s(y) − f̄(y))ᵀ.

    Args:
        members: The networks.
    """

    members: Members

    @property
    def num_features(self) -> int:
        """S, the number of networks."""
        return len(self.members)

    def outputs(self, x: Inputs) -> int:
        """C, the number of outputs of the network."""
        return self.members.architecture(rows(x, slice(0, 1))).shape[1]

    def features(self, x: Inputs) -> Tensor:
        """The deviations from the mean network, divided by √S: (N, C, S)."""
        values = self.members(x)
        return (values - values.mean(0)).permute(1, 2, 0) / len(values) ** 0.5

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> MemberCovariance:
        """The same kernel on another device or in another dtype."""
        return MemberCovariance(self.members.to(device, dtype))
