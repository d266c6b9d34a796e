"""Samples of kernels: outputs and gradients of a network for many draws of its parameters at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from net2gp.calling import functional_call
from net2gp.errors import NetworkError
from net2gp.inputs import chunks, describe, follows, map_inputs, num_rows, ordinary_tensors, tensors
from net2gp.limits.sampling.draws import Draws
from net2gp.types import Inputs, Params

BUDGET = 2**27
"""The number of bytes that one chunk of draws may take."""


@dataclass(eq=False)
class Sampling:
    """Samples of the kernels of x and y, vectorized over draws unless the module cannot be vectorized.

    Args:
        network: The network that is evaluated.
        draws: Its random parameters, by number.
        x: The first inputs.
        y: The second inputs; None if they are x.
        tangent: Whether the tangent kernel is sampled too.
        diagonal: Whether only k(x_n, x_n) is computed.
        vectorized: Whether many draws run at once; set to false when the module turns out not to allow it.
    """

    network: nn.Module
    draws: Draws
    x: Inputs
    y: Inputs | None
    tangent: bool
    diagonal: bool
    vectorized: bool = True

    def batch(self, first: int, count: int) -> Iterator[Tensor]:
        """Yield samples of the NNGP and, if `tangent`, of the tangent kernel: (count, N, M) or (count, N)."""
        device = next(self.network.parameters()).device
        drawn = [self.draws(number) for number in range(first, first + count)]
        params = {name: torch.stack([one[name] for one in drawn]).to(device) for name in drawn[0]}
        with settings(device, self.draws.mixed(first)):
            a = self._outputs(params, self.x)
            b = a if self.y is None else self._outputs(params, self.y)
            num_outputs = a.shape[2]
            yield _products(a.double(), b.double(), self.diagonal) / num_outputs
            if self.tangent:
                signs = self._signs(first, count, num_outputs).to(a)
                yield self._tangents(params, signs) / num_outputs

    def _signs(self, first: int, count: int, num_outputs: int) -> Tensor:
        """Return random signs u = ±1 per draw and output.

        Since E[u uᵀ] = I, one gradient of u · f estimates the trace over outputs without bias.
        """
        found = []
        for number in range(first, first + count):
            generator = torch.Generator().manual_seed(self.draws.mixed(number) ^ 1)
            found.append(torch.randint(2, (num_outputs,), generator=generator) * 2 - 1)
        return torch.stack(found)

    def _tangents(self, params: Params, signs: Tensor) -> Tensor:
        """Compute Σ_p rate_p ∂f(x_n) ∂f(y_m), a block of points at a time."""
        size = self.points_at_once(sum(value[0].numel() for value in params.values()))
        others = self.x if self.y is None else self.y
        result = []
        for part in chunks(self.x, size):
            mine = self._gradients(params, signs, part)
            if self.diagonal:
                result.append(_summed(mine, mine, True))
            elif self.y is None and size >= num_rows(self.x):
                result.append(_summed(mine, mine, False))
            else:
                across = [
                    _summed(mine, self._gradients(params, signs, other), False)
                    for other in chunks(others, size)
                ]
                result.append(torch.cat(across, 2))
        return torch.cat(result, 1)

    def points_at_once(self, numbers: int) -> int:
        """Return for how many points the gradients, of this many numbers each, fit into the budget."""
        return max(1, BUDGET // (8 * max(1, numbers)))

    def call(self, params: Params, x: Inputs) -> Tensor:
        """Compute the outputs (N, C) with these parameters."""
        given = {**params, **dict(self.network.named_buffers())}
        args = (x,) if isinstance(x, Tensor) else x if isinstance(x, tuple) else ()
        out = functional_call(
            self.network, given, args, dict(x) if isinstance(x, Mapping) else None
        )
        if not isinstance(out, Tensor) or out.dim() == 0 or out.shape[0] != num_rows(x):
            raise NetworkError(
                f"the network must return a tensor with one row for each of the {num_rows(x)} points, but "
                f"returns {describe(out)}. Wrap it in a module that picks the tensor."
            )
        return out.reshape(out.shape[0], -1)

    def _each(self, function: Callable[..., Any], *stacked: Any) -> Any:
        """Apply `function` to every draw and stack the results."""
        if self.vectorized:
            try:
                return vmap(function, randomness="different")(*stacked)
            except (RuntimeError, ValueError, TypeError, NotImplementedError):
                # if the module itself is at fault, the loop below raises the module's own error
                self.vectorized = False
        count = tensors(stacked[0])[0].shape[0]
        parts = [function(*(_index(one, n) for one in stacked)) for n in range(count)]
        if isinstance(parts[0], Tensor):
            return torch.stack(parts)
        return {name: torch.stack([part[name] for part in parts]) for name in parts[0]}

    def _outputs(self, params: Params, x: Inputs) -> Tensor:
        """Compute the outputs of every draw, (S, N, C)."""
        with torch.set_grad_enabled(follows(x)):
            return self._each(lambda p: self.call(p, x), params)

    def _gradients(self, params: Params, signs: Tensor, x: Inputs) -> Params:
        """Compute ∂(signs · f(x_n)) per draw and point, times √rate: (S, N, *shape) by parameter."""
        chosen = [name for name, rate in self.draws.rates.items() if rate > 0]

        def of_point(free: Params, held: Params, signs: Tensor, point: Inputs) -> Tensor:
            out = self.call({**free, **held}, map_inputs(point, lambda t: t[None]))
            return (out[0] * signs).sum()

        def of_draw(params: Params, signs: Tensor) -> Params:
            free = {name: params[name] for name in chosen}
            held = {name: value for name, value in params.items() if name not in free}
            if self.vectorized and not follows(x):
                over = vmap(grad(of_point), (None, None, None, 0), randomness="different")
                return over(free, held, signs, x)
            return _one_by_one(of_point, free, held, signs, x)

        if follows(x):
            # plain autograd differentiates fused norms twice, where torch.func fails
            parts = [of_draw(_index(params, n), signs[n]) for n in range(len(signs))]
            found = {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
        else:
            found = self._each(of_draw, params, signs)
        return {name: g * self.draws.rates[name] ** 0.5 for name, g in found.items()}


def _index(value: Any, number: int) -> Any:
    if isinstance(value, dict):
        return {name: one[number] for name, one in value.items()}
    return value[number]


def _products(a: Tensor, b: Tensor, diagonal: bool) -> Tensor:
    """Compute the inner products of the rows of a and b, per draw."""
    return (a * b).sum(2) if diagonal else a @ b.transpose(1, 2)


def _summed(a: Params, b: Params, diagonal: bool) -> Tensor:
    total: Tensor | float = 0.0
    for name in a:
        total = total + _products(a[name].flatten(2), b[name].flatten(2), diagonal).double()
    return torch.as_tensor(total)


def _one_by_one(
    of_point: Callable[..., Tensor], free: Params, held: Params, signs: Tensor, x: Inputs
) -> Params:
    """Compute gradients point by point, for modules that cannot be vectorized."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in free.items()}
    found: dict[str, list[Tensor]] = {name: [] for name in leaves}
    follow = follows(x)
    # cuDNN's recurrent layers have no backward pass outside training
    with ordinary_tensors(), torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):
        for point in chunks(x, 1):
            value = of_point(leaves, held, signs, map_inputs(point, lambda t: t[0]))
            slopes = torch.autograd.grad(
                value, tuple(leaves.values()), create_graph=follow, materialize_grads=True
            )
            for name, slope in zip(leaves, slopes, strict=True):
                found[name].append(slope)
    return {name: torch.stack(values) for name, values in found.items()}


@contextmanager
def settings(device: torch.device, seed: int) -> Iterator[None]:
    """Let dropout draw from a random state of its own, and attention run in a form that vmap can take."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), sdpa_kernel(SDPBackend.MATH):
        torch.manual_seed(seed)
        yield
