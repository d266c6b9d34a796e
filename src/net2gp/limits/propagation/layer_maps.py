"""What one wide fully connected layer does to a variance, and the slopes of these maps."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from net2gp.errors import InputError, check_positive
from net2gp.inputs import ordinary_tensors
from net2gp.limits.duals.activations import Activation, activation_of
from net2gp.limits.propagation.roots import LARGEST, SMALLEST


def variance_map(
    activation: nn.Module | Activation,
    q: float | Tensor,
    weight_var: float | Tensor,
    bias_var: float | Tensor,
) -> Tensor:
    """Return V(q) = σ_w² E[φ(√q z)²] + σ_b², the variance after one more layer.

    Args:
        activation: φ, a module of torch or an activation that `activation_of` returns.
        q: The variance of the pre-activations, zero or positive.
        weight_var: σ_w², zero or positive.
        bias_var: σ_b², zero or positive.

    Returns:
        V(q) in float64, in the shape to which the arguments broadcast.

    Raises:
        InputError: If a variance is negative or NaN.

    >>> variance_map(nn.ReLU(), 3.0, weight_var=2.0, bias_var=0.5)
    tensor(3.5000, dtype=torch.float64)
    """
    phi = resolved(activation)
    q, weight, bias = broadcast(q=q, weight_var=weight_var, bias_var=bias_var)
    return weight * phi.variance(q, False)[0] + bias


def slope(
    activation: nn.Module | Activation, q: float | Tensor, weight_var: float | Tensor
) -> Tensor:
    """Return χ₁ = σ_w² E[φ'(√q z)²], the factor by which a layer stretches small squared distances.

    It is R'(1), and also the growth of the squared gradient from layer to layer. The network is ordered
    where χ₁ < 1 and chaotic where χ₁ > 1.

    Args:
        activation: φ, a module of torch or an activation that `activation_of` returns.
        q: The variance of the pre-activations; 0 and infinity stand for the limits.
        weight_var: σ_w², zero or positive.

    Returns:
        χ₁ in float64, in the shape to which the arguments broadcast.

    Raises:
        InputError: If a variance is negative or NaN.

    >>> slope(nn.ReLU(), 1.0, weight_var=1.5)
    tensor(0.7500, dtype=torch.float64)
    """
    phi = resolved(activation)
    q, weight = broadcast(q=q, weight_var=weight_var)
    return weight * mean_square_slope(phi, q)


def variance_slope(
    activation: nn.Module | Activation, q: float | Tensor, weight_var: float | Tensor
) -> Tensor:
    """Return V'(q) = σ_w² (E[φ'²] + E[φ φ'']), by which a layer stretches deviations of the variance.

    It is computed as the derivative of E[φ²] in q, which stays right where φ has kinks and φ'' is a delta.

    Args:
        activation: φ, a module of torch or an activation that `activation_of` returns.
        q: The variance of the pre-activations; 0 and infinity stand for the limits.
        weight_var: σ_w², zero or positive.

    Returns:
        V'(q) in float64, in the shape to which the arguments broadcast.

    >>> variance_slope(nn.ReLU(), 1.0, weight_var=1.5)
    tensor(0.7500, dtype=torch.float64)
    """
    phi = resolved(activation)
    q, weight = broadcast(q=q, weight_var=weight_var)
    with ordinary_tensors(), torch.enable_grad():
        point = q.clamp(SMALLEST, LARGEST).detach().requires_grad_()
        (derivative,) = torch.autograd.grad(phi.variance(point, False)[0].sum(), point)
    return weight * derivative


def resolved(activation: nn.Module | Activation) -> Activation:
    """Return the activation with its Gaussian expectations, for a module of torch or for itself."""
    return activation_of(activation) if isinstance(activation, nn.Module) else activation


def broadcast(**values: float | Tensor) -> list[Tensor]:
    """Return the values in float64 and in one shape; raise unless all are zero or positive."""
    tensors = [torch.as_tensor(value, dtype=torch.float64).detach() for value in values.values()]
    for tensor, name in zip(tensors, values, strict=True):
        if bool((tensor.isnan() | (tensor < 0)).any()):
            raise InputError(
                f"{name} must be zero or positive, but has {tensor.min():g}. Variances, not standard "
                f"deviations, are meant: pass for example {name}=1.5."
            )
    return list(torch.broadcast_tensors(*tensors))


def hyperparameters(weight_var: float | Tensor, bias_var: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return both variances in float64 and in one shape; raise unless σ_w² > 0 and σ_b² ≥ 0."""
    check_positive(weight_var, "weight_var")
    check_positive(bias_var, "bias_var", zero=True)
    weight, bias = broadcast(weight_var=weight_var, bias_var=bias_var)
    return weight, bias


def mean_square_slope(phi: Activation, q: Tensor) -> Tensor:
    """Return E[φ'(√q z)²] for variances q in float64."""
    # clamped: 0 and infinity stand for the limits, which the ends of the range approximate
    slopes = phi.variance(q.clamp(SMALLEST, LARGEST), True)[1]
    assert slopes is not None
    return slopes
