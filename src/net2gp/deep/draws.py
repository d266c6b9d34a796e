"""Draws of composed Gaussian processes, joint over their points and exact in law."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from net2gp.deep.grams import grams, squared_gaps
from net2gp.deep.layers import Layer, Stack, as_layers, draw_blocks
from net2gp.errors import InputError, check_count
from net2gp.inputs import describe, num_rows, tensors
from net2gp.kernels import RBF
from net2gp.linalg.chance import random_normal
from net2gp.linalg.roots import covariance_roots
from net2gp.types import Inputs

Normal = Callable[[tuple[int, ...]], Tensor]
"""From a shape to standard normal numbers in float64."""


@dataclass(frozen=True, eq=False)
class Draws:
    """Draws of every layer of a deep Gaussian process. Made by `draw`.

    Args:
        values: The outputs of each layer in turn, (S, N, width) each, in float64.
        offsets: f_l(x_n) − f_l(x_1) of each layer in turn, (S, N, width) each. Where all points come together
            these differences have digits that the values have lost.
    """

    values: tuple[Tensor, ...] = field(repr=False)
    offsets: tuple[Tensor, ...] = field(repr=False)

    @property
    def outputs(self) -> Tensor:
        """The outputs of the last layer, (S, N, width)."""
        return self.values[-1]

    def log_distances(self) -> Tensor:
        """Return log ‖f_l(x_n) − f_l(x_1)‖ of each draw, layer and point: (S, L, N).

        For squared-exponential layers and two points this is the law of the function `log_distances`.
        """
        return torch.stack([offsets.norm(dim=-1).log() for offsets in self.offsets], 1)


@torch.no_grad()
def draw(
    layers: Stack,
    x: Inputs,
    num_samples: int = 1,
    *,
    input_connected: bool = False,
    generator: torch.Generator | None = None,
) -> Draws:
    """Draw f_L(… f_2(f_1(x))) at the points x, and the outputs of all layers before.

    Given the outputs h of the layer before, a layer is a Gaussian process at h, so each of its outputs is
    N(0, k(h, h)) jointly over the points, and draws are exact in law. With `input_connected` layers from the
    second on see (h, x): then depth does not destroy what x says.

    No jitter is added, since it would keep points apart that come together. Points that are nearer to each
    other than about 1e-7 of the distance of all points become one point. Squared-exponential layers carry
    differences, so that they follow a collapse of all points down to distances of 1e-150; with other kernels
    points become one below about 1e-7 length scales. The cost is O(S L N³), without a loop over draws for
    the kernels of `net2gp.kernels`; other kernels are called once for each few draws.

    Args:
        layers: Layers from the inputs to the outputs; a kernel by itself is a layer of one output.
        x: N points. The first layer takes them as they are.
        num_samples: The number S of draws.
        input_connected: Whether layers from the second on see the inputs too, as further columns. The kernel
            of such a layer takes tensors (N, width of the layer before + D), with D numbers per input.
        generator: The source of random numbers. None means torch's global one.

    Returns:
        The outputs of all layers.

    Raises:
        InputError: If the layers are no list of layers or kernels, a kernel cannot take what comes in, or
            its number of coupled outputs is not the width of its layer.

    >>> from net2gp.kernels import RBF
    >>> x = torch.linspace(-2, 2, 50)[:, None]
    >>> draws = draw([Layer(RBF(), width=3), RBF()], x, num_samples=4)
    >>> [values.shape for values in draws.values]
    [torch.Size([4, 50, 3]), torch.Size([4, 50, 1])]

    References: Damianou & Lawrence, "Deep Gaussian processes", 2013; Duvenaud, Rippel, Adams & Ghahramani,
    "Avoiding pathologies in very deep networks", 2014.
    """
    stack = as_layers(layers)
    check_count(num_samples, "num_samples")
    again = inputs_again(x) if input_connected else None
    stack[0].kernel.check(x)
    widest = max(layer.width for layer in stack)
    numbers = num_rows(x) ** 2 * (widest + (0 if again is None else again.shape[1]) + 2)
    normal = partial(random_normal, generator=generator, device=tensors(x)[0].device)
    blocks = [_block(stack, x, again, normal, count) for count in draw_blocks(num_samples, numbers)]
    clouds = [
        _Cloud(*(torch.cat(part) for part in zip(*parts, strict=True)))
        for parts in zip(*blocks, strict=True)
    ]
    return Draws(tuple(cloud.values for cloud in clouds), tuple(cloud.offsets for cloud in clouds))


def inputs_again(x: Inputs) -> Tensor:
    """Return the inputs as rows of numbers in float64, for layers that see them again: (N, D)."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise InputError(
            f"input_connected=True appends the inputs to the outputs of layers, so x must be one floating "
            f"tensor, but is {describe(x)}. Leave input_connected out for inputs of another form."
        )
    return x.detach().flatten(1).double()


class _Cloud(NamedTuple):
    """Points of S draws: the first, (S, 1, H), and what each has beyond the first, (S, N, H).

    Offsets keep their digits when all points come together, which values would lose.
    """

    first: Tensor
    offsets: Tensor

    @staticmethod
    def of(values: Tensor) -> _Cloud:
        return _Cloud(values[:, :1], values - values[:, :1])

    @property
    def values(self) -> Tensor:
        return self.first + self.offsets

    def joined(self, x: Tensor | None) -> _Cloud:
        """Append the inputs to every point, where layers see them."""
        if x is None:
            return self
        shape = (len(self.offsets), *x.shape)
        columns = _Cloud.of(x[None]).offsets.expand(shape)
        first = torch.cat([self.first, x[:1].expand(shape[0], 1, -1)], -1)
        return _Cloud(first, torch.cat([self.offsets, columns], -1))


def _block(
    stack: Sequence[Layer], x: Inputs, again: Tensor | None, normal: Normal, count: int
) -> list[_Cloud]:
    """Draw `count` functions: a cloud for each layer."""
    clouds: list[_Cloud] = []
    for number, layer in enumerate(stack, start=1):
        kernel, what = layer.kernel.precise(), f"the covariance of layer {number}"
        if clouds:
            cloud = clouds[-1].joined(again)
            kernel.check(cloud.values.flatten(0, 1))
            check_outputs(layer, number, kernel.outputs(cloud.values[0]))
        elif isinstance(kernel, RBF) and isinstance(x, Tensor):
            cloud = _Cloud.of(x.double()[None])
        else:
            check_outputs(layer, number, kernel.outputs(x))
            root = covariance_roots(kernel(x)[None], what=what)
            clouds.append(_Cloud.of(_through(root, num_rows(x), layer.width, count, normal)))
            continue
        if isinstance(kernel, RBF):
            clouds.append(_next_by_offsets(kernel, cloud.offsets, layer.width, count, normal, what))
            continue
        points = cloud.values
        root = covariance_roots(grams(kernel, points, points), what=what)
        clouds.append(_Cloud.of(_through(root, points.shape[1], layer.width, count, normal)))
    return clouds


def _through(root: Tensor, points: int, width: int, count: int, normal: Normal) -> Tensor:
    """Multiply roots by standard normal numbers: (count, N, width)."""
    coupled = root.shape[-1] > points
    z = normal((count, root.shape[-1], 1 if coupled else width))
    return (root @ z).reshape(count, points, width)


def _next_by_offsets(
    kernel: RBF, offsets: Tensor, width: int, count: int, normal: Normal, what: str
) -> _Cloud:
    """Draw a squared-exponential layer at points that are given by their offsets from the first.

    With e_ij = 1 − k_ij/σ², which expm1 computes to all digits, and u = f(x_1), the increments f(x_i) − u are
    Gaussian given u, with mean −e_1i u and covariance σ²(e_1i + e_1j − e_ij − e_1i e_1j).
    """
    scale, variance = (
        torch.as_tensor(value, dtype=offsets.dtype, device=offsets.device)
        for value in (kernel.lengthscale, kernel.output_var)
    )
    scaled = offsets / scale
    apart = -torch.expm1(-0.5 * squared_gaps(scaled, scaled))
    near, far = apart[:, 0, 1:], apart[:, 1:, 1:]
    rest = near[:, :, None] + near[:, None] - far - near[:, :, None] * near[:, None]
    first = variance.sqrt() * normal((count, 1, width))
    noise = normal((count, offsets.shape[1] - 1, width))
    increments = covariance_roots(variance * rest, what=what) @ noise - near[..., None] * first
    return _Cloud(first, torch.cat([torch.zeros_like(first), increments], 1))


def check_outputs(layer: Layer, number: int, coupled: int | None) -> None:
    """Raise unless a kernel that couples outputs couples as many as its layer has."""
    if coupled is not None and coupled != layer.width:
        raise InputError(
            f"the kernel of layer {number} couples {coupled} outputs, but its width is {layer.width}. Pass "
            f"Layer(kernel, width={coupled}), or for independent outputs nngp(network) or "
            "linearize(network).trace_kernel()."
        )
