"""The tangent kernel of deep wide networks, layer by layer, and what it becomes with depth."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from net2gp.errors import InputError, check_count, check_positive
from net2gp.limits.duals.activations import Activation
from net2gp.limits.phase import fixed_point
from net2gp.limits.propagation.layer_maps import resolved


@dataclass(frozen=True)
class TangentDepth:
    """Covariances and tangent kernels of pairs of inputs after 1, 2, …, L linear layers.

    Args:
        depths: The numbers of linear layers, (L,).
        variance: The variance K(x, x), (L,).
        correlation: K(x, x') / K(x, x), (L, M) for M pairs.
        tangent: Θ(x, x), (L,).
        normalized: Θ(x, x') / Θ(x, x), (L, M).
    """

    depths: Tensor
    variance: Tensor
    correlation: Tensor
    tangent: Tensor
    normalized: Tensor


def tangent_depth(
    activation: nn.Module | Activation,
    weight_var: float,
    bias_var: float,
    correlation: Tensor,
    depth: int,
    *,
    variance: float | None = None,
    residual: bool = False,
) -> TangentDepth:
    """Follow the tangent kernel of pairs of inputs of equal length through a deep wide network.

    With (u, v) ~ N(0, K_l) the layers of a fully connected network are

        K_{l+1} = σ_w² E[φ(u) φ(v)] + σ_b²,      Θ_{l+1} = K_{l+1} + σ_w² E[φ'(u) φ'(v)] Θ_l,

    and a residual network z ← z + W φ(z) + b has K_{l+1} = K_l + σ_w² E[φφ] + σ_b² and
    Θ_{l+1} = Θ_l + σ_w² E[φφ] + σ_b² + σ_w² E[φ'φ'] Θ_l. The normalized kernel Θ(x, x') / Θ(x, x) forgets
    the data: in the ordered phase it tends to 1 exponentially, in the chaotic phase to 0 exponentially, and
    on the edge between them only as 1/L, up to logarithms: to 1/3 for smooth activations and to 1/4 for
    ReLU. Residual ReLU networks behave like the edge at every weight variance. The cost is one evaluation of
    both expectations per layer and pair.

    Args:
        activation: φ, a module of torch or an activation that `activation_of` returns.
        weight_var: σ_w², positive.
        bias_var: σ_b², zero or positive.
        correlation: The correlations of the M pairs after the first linear layer, (M,), from −1 to 1.
        depth: The number of linear layers L.
        variance: The variance after the first linear layer; None takes the fixed point q*.
        residual: Whether each further layer is added to the signal before it.

    Returns:
        All layers, in float64.

    Raises:
        InputError: If a number is out of range, or no variance is given and q* is zero or infinite.

    >>> found = tangent_depth(nn.ReLU(), 2.0, 0.0, torch.tensor([0.0]), 500, variance=1.0)
    >>> found.normalized[-1].round(decimals=2)
    tensor([0.2600], dtype=torch.float64)

    Reference: Hayou, Doucet and Rousseau, Mean-field behaviour of neural tangent kernel for deep neural
    networks, 2019; Jacot, Gabriel and Hongler, Freeze and chaos, 2019.
    """
    phi = resolved(activation)
    check_positive(weight_var, "weight_var", single=True)
    check_positive(bias_var, "bias_var", zero=True, single=True)
    check_count(depth, "depth", example=100)
    c = torch.as_tensor(correlation, dtype=torch.float64)
    if c.dim() != 1 or bool((c.abs() > 1).any()):
        raise InputError(
            "correlation must be a vector of numbers from −1 to 1, but is "
            f"{c.tolist() if c.numel() < 5 else tuple(c.shape)}. Pass for example torch.tensor([0.0, 0.5])."
        )
    own = _start(phi, weight_var, bias_var, variance)
    pair, kept = c * own, float(residual)
    tangent, cross = own, pair
    layers = [(own, pair, tangent, cross)]
    for _ in range(depth - 1):
        values, slopes = phi.variance(own, True)
        both, steep = phi.dual(pair, own, own, True)
        assert slopes is not None
        assert steep is not None
        own_new = weight_var * values + bias_var
        pair_new = weight_var * both + bias_var
        tangent = own_new + (weight_var * slopes + kept) * tangent
        cross = pair_new + (weight_var * steep + kept) * cross
        own, pair = own_new + kept * own, pair_new + kept * pair
        layers.append((own, pair, tangent, cross))
    owns, pairs, tangents, crosses = (torch.stack(part) for part in zip(*layers, strict=True))
    return TangentDepth(
        torch.arange(1, depth + 1),
        owns,
        pairs / owns[:, None],
        tangents,
        crosses / tangents[:, None],
    )


def _start(phi: Activation, weight_var: float, bias_var: float, variance: float | None) -> Tensor:
    if variance is not None:
        check_positive(variance, "variance", single=True)
        return torch.tensor(float(variance), dtype=torch.float64)
    found = fixed_point(phi, weight_var, bias_var)
    if not bool((found > 0) & found.isfinite()):
        raise InputError(
            f"the variance of the signal tends to {float(found):g} in such a network, so that there is no "
            "fixed point to start from. Pass the variance after the first layer, e.g. variance=1.0."
        )
    return found
