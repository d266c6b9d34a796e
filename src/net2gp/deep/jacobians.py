"""Draws of composed Gaussian processes together with their Jacobians, and the spectra of these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from net2gp.deep.draws import Normal, inputs_again
from net2gp.deep.grams import grams
from net2gp.deep.layers import Layer, Stack, as_layers, draw_blocks
from net2gp.errors import InputError, NotAvailable, check_count
from net2gp.inputs import describe
from net2gp.linalg.chance import random_normal
from net2gp.linalg.roots import covariance_roots
from net2gp.types import Kernel


@dataclass(frozen=True, eq=False)
class JacobianDraws:
    """Draws of every layer, with the derivatives of its outputs in x. Made by `draw_jacobians`.

    Args:
        values: The outputs of each layer in turn, (S, N, width) each, in float64.
        directions: The Jacobians ∂f_l/∂x of each layer in turn, divided by their norms: (S, N, width, D).
        log_norms: The logarithms of the Jacobians' norms (Frobenius), (S, N) each.
    """

    values: tuple[Tensor, ...] = field(repr=False)
    directions: tuple[Tensor, ...] = field(repr=False)
    log_norms: tuple[Tensor, ...] = field(repr=False)

    @property
    def jacobian(self) -> Tensor:
        """∂f/∂x of the last layer: (S, N, width, D)."""
        return self.directions[-1] * self.log_norms[-1].exp()[..., None, None]

    def log_singular_values(self, num_layers: int | None = None) -> Tensor:
        """Compute the logarithms of the Jacobian's singular values, largest first.

        Values that are smaller than the largest by more than a factor of 1e15 are rounding.

        Args:
            num_layers: The number of layers up to which the Jacobian goes. None means all.

        Returns:
            Log singular values, (S, N, min(width, D)).

        Raises:
            InputError: If there are not that many layers.
        """
        count = len(self.values) if num_layers is None else num_layers
        check_count(count, "num_layers", example=len(self.values))
        if count > len(self.values):
            raise InputError(
                f"num_layers is {count}, but only {len(self.values)} layers were drawn. Pass num_layers="
                f"{len(self.values)} at most, or draw more layers."
            )
        singular = torch.linalg.svdvals(self.directions[count - 1])
        return singular.log() + self.log_norms[count - 1][..., None]


@torch.no_grad()
def draw_jacobians(
    layers: Stack,
    x: Tensor,
    num_samples: int = 1,
    *,
    input_connected: bool = False,
    generator: torch.Generator | None = None,
) -> JacobianDraws:
    """Draw f_L(… f_1(x)) together with its derivatives in x, exact in law.

    A Gaussian process and its gradient are jointly Gaussian: Cov[f(h), ∂f(h')] = ∂'k(h, h') and
    Cov[∂f(h), ∂f(h')] = ∂∂'k(h, h'), where automatic differentiation takes the derivatives of the kernel. The
    gradients of a layer times the Jacobian of the layers before are the Jacobian of the composition. With
    depth, one singular value grows away from the others: functions vary in one direction only. With
    `input_connected` they do not. Points are drawn jointly, in O(S L (N(H + 1))³) for H outputs per layer.

    Args:
        layers: Layers from the inputs to the outputs; a kernel by itself is a layer of one output.
        x: N points, (N, D).
        num_samples: The number S of draws.
        input_connected: Whether layers from the second on see the inputs too, as further columns.
        generator: The source of random numbers. None means torch's global one.

    Returns:
        Values and Jacobians of all layers.

    Raises:
        InputError: If x is no floating tensor (N, D), or a kernel couples outputs.
        NotAvailable: If a kernel has no second derivatives, or torch cannot compute them.

    >>> from net2gp.kernels import RBF
    >>> draws = draw_jacobians([Layer(RBF(), width=5)] * 3, torch.zeros(1, 5), num_samples=100)
    >>> draws.jacobian.shape, draws.log_singular_values().shape
    (torch.Size([100, 1, 5, 5]), torch.Size([100, 1, 5]))

    Reference: Duvenaud, Rippel, Adams & Ghahramani, "Avoiding pathologies in very deep networks", 2014.
    """
    stack = as_layers(layers)
    check_count(num_samples, "num_samples")
    if not isinstance(x, Tensor) or x.dim() != 2 or not x.is_floating_point():
        raise InputError(
            f"Jacobians need x as a floating tensor of shape (N, D), but x is {describe(x)}."
        )
    stack[0].kernel.check(x)
    points = inputs_again(x)
    widths = [x.shape[1] * (1 + input_connected) + layer.width for layer in stack]
    numbers = (len(x) * (1 + max(widths))) ** 2
    normal = partial(random_normal, generator=generator, device=x.device)
    blocks = [
        _block(stack, points, input_connected, normal, count)
        for count in draw_blocks(num_samples, numbers)
    ]
    values, directions, log_norms = (
        tuple(torch.cat(parts) for parts in zip(*column, strict=True))
        for column in zip(*blocks, strict=True)
    )
    return JacobianDraws(values, directions, log_norms)


def _block(
    stack: Sequence[Layer], x: Tensor, input_connected: bool, normal: Normal, count: int
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Draw values, unit Jacobians and log norms of `count` functions, a tensor of each per layer."""
    values: list[Tensor] = []
    directions: list[Tensor] = []
    log_norms: list[Tensor] = []
    h, columns = x[None], x.expand(count, *x.shape)
    for number, layer in enumerate(stack, start=1):
        f, slopes = _with_slopes(layer, number, h, normal, count)
        jacobian, log_norm = slopes, slopes.new_zeros(slopes.shape[:2])
        if number > 1 and input_connected:
            through, beside = slopes.split([slopes.shape[-1] - x.shape[1], x.shape[1]], -1)
            jacobian = beside + through @ (directions[-1] * log_norms[-1].exp()[..., None, None])
        elif number > 1:
            jacobian, log_norm = slopes @ directions[-1], log_norms[-1]
        norm = jacobian.flatten(-2).norm(dim=-1)
        values.append(f)
        directions.append(jacobian / torch.where(norm > 0, norm, 1.0)[..., None, None])
        log_norms.append(log_norm + norm.log())
        h = torch.cat([f, columns], -1) if input_connected else f
    return values, directions, log_norms


def _with_slopes(
    layer: Layer, number: int, h: Tensor, normal: Normal, count: int
) -> tuple[Tensor, Tensor]:
    """Draw a layer at h (S or 1, N, D) with its gradients: (count, N, width), (count, N, width, D)."""
    kernel = layer.kernel.precise()
    if kernel.outputs(h[0]) is not None:
        raise InputError(
            f"Jacobians need kernels of independent outputs, but the kernel of layer {number} couples them. "
            "For a network, use nngp(network) or linearize(network).trace_kernel()."
        )
    covariance = slope_covariance(kernel, h, what=f"the kernel of layer {number}")
    root = covariance_roots(covariance, what=f"the covariance of layer {number}")
    _, N, D = h.shape
    drawn = (root @ normal((count, N * (1 + D), layer.width))).reshape(count, 1 + D, N, layer.width)
    return drawn[:, 0], drawn[:, 1:].permute(0, 2, 3, 1)


def slope_covariance(kernel: Kernel, h: Tensor, *, what: str = "the kernel") -> Tensor:
    """Compute the covariance of f and ∂f/∂h_1 … ∂f/∂h_D at each set of points, in this order.

    k(a_i, b_j) depends on a_i and b_j alone, so one derivative along all points at once gives a derivative of
    the whole matrix. Forward derivatives are taken as gradients of gradients, since more kernels have these.

    Args:
        kernel: The kernel, of independent outputs, in float64.
        h: Sets of points, (S, N, D).
        what: The name of the kernel in messages.

    Returns:
        Covariances, (S, N(1 + D), N(1 + D)), with row d·N + n for derivative d at point n.

    Raises:
        NotAvailable: If the second derivatives do not exist, or torch cannot compute them.
    """
    D = h.shape[-1]
    K = grams(kernel, h, h)
    try:
        with torch.enable_grad():
            a, b = (h.detach().clone().requires_grad_() for _ in range(2))
            first = _along_each(grams(kernel, a, b), b, range(D))
            # ∂_e∂'_d k(a, b) is ∂_d∂'_e k(b, a), so that half of them are enough
            half = [_along_each(one, a, range(d, D)) for d, one in enumerate(first)]
    except (RuntimeError, NotImplementedError, NotAvailable) as error:
        raise _no_slopes(what, f"torch cannot compute them ({str(error)[:80]} …)") from error
    rows = [torch.cat([K, *first], -1)]
    for e in range(D):
        known = [half[d][e - d] if d <= e else half[e][d - e].mT for d in range(D)]
        rows.append(torch.cat([first[e].mT, *known], -1))
    covariance = torch.cat(rows, -2).detach()
    _check_by_differences(kernel, h, covariance, what)
    return (covariance + covariance.mT) / 2


def _along_each(K: Tensor, points: Tensor, coordinates: range) -> list[Tensor]:
    """Differentiate K along a coordinate of all points at once, for each coordinate: (S, N, N) each.

    The gradient of Σ v K in the points is linear in v, and its derivative in v is what is wanted.
    """
    nothing = [torch.zeros_like(K) for _ in coordinates]
    if not K.requires_grad:
        return nothing
    v = torch.zeros_like(K, requires_grad=True)
    (gradient,) = torch.autograd.grad(K, points, v, create_graph=True, materialize_grads=True)
    if not gradient.requires_grad:
        return nothing
    return [
        torch.autograd.grad(gradient[..., d].sum(), v, create_graph=True, materialize_grads=True)[0]
        for d in coordinates
    ]


def _check_by_differences(kernel: Kernel, h: Tensor, covariance: Tensor, what: str) -> None:
    """Compare the slope's variance in one direction at one point with a difference quotient.

    Kernels that clamp distances, or are not smooth, have gradients of gradients that are wrong.
    """
    _, N, D = h.shape
    point, direction = h[0, :1], torch.full((D,), D**-0.5, dtype=h.dtype, device=h.device)
    slopes = covariance[0, N::N, N::N]
    found = float(direction @ slopes @ direction)
    variance = float(covariance[0, 0, 0])
    step = 1e-3 * ((variance / found) ** 0.5 if variance > 0 and found > 0 else 1.0)
    ends = torch.cat([point + step * direction, point - step * direction])
    # two arguments: the diagonal of k(x, x) may be set apart from the rest
    difference = kernel(ends, ends.clone())
    expected = float(difference[0, 0] - 2 * difference[0, 1] + difference[1, 1]) / (4 * step**2)
    if not abs(found - expected) <= 1e-2 * max(abs(found), abs(expected)) + 1e-9 * variance:
        raise _no_slopes(
            what, f"automatic differentiation gives {found:.3g}, differences {expected:.3g}"
        )


def _no_slopes(what: str, reason: str) -> NotAvailable:
    return NotAvailable(
        f"Jacobians need second derivatives ∂∂'k, which {what} does not have here: {reason}. Use "
        "n2g.RBF(...), or the limit of a network with ReLU, GELU, erf or another closed form."
    )
