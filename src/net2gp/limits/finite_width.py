"""First corrections to infinite width, for fully connected networks with N(0, σ_w²/n) weights.

Given the activations of the layer before it, every layer is exactly Gaussian, with a random covariance

    K̂ ← σ_b² + σ_w²/n Σ_j φ(u_j) φ(v_j),      (u_j, v_j) ~ N(0, K̂ of the layer before).

A network of width n is therefore a mixture of Gaussian processes, and it differs from a single one only by
the spread of K̂. With g(K) = E[φ(u) φ(v)] over N(0, K), J = σ_w² ∂g/∂K and H = σ_w² ∂²g/∂K²,

    Var K̂ ← J (Var K̂) Jᵀ + σ_w⁴/n Cov[φφ],       E K̂ − K ← J (E K̂ − K) + ½ H : Var K̂,

to first order in 1/n; with one hidden layer this is exact for every n. References: Yaida (2020),
"Non-Gaussian processes and neural networks at finite widths"; Antognini (2019), "Finite size
corrections for neural network Gaussian processes"; Roberts, Yaida & Hanin (2022), "The Principles of
Deep Learning Theory", chapter 4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from net2gp.errors import InputError
from net2gp.inputs import ordinary_tensors
from net2gp.likelihoods.integrals import psd_root
from net2gp.limits.duals.activations import Activation
from net2gp.limits.propagation.hidden_layers import HiddenLayer, Layers, activation_in, checked
from net2gp.limits.propagation.unit_moments import moments, product_covariance, products_of

BLOCK = 2**22
"""The most numbers that a block of sampled networks holds at once (32 MiB in float64)."""


@dataclass(frozen=True)
class FiniteWidth:
    """The random variance K̂(x, x) of one output at each of N inputs, to first order in 1/width.

    Args:
        kernel: K, the limit of K̂ at infinite width, (N,).
        shift: E K̂ − K, (N,); it is zero with one hidden layer.
        variance: Var K̂, (N,).
    """

    kernel: Tensor
    shift: Tensor
    variance: Tensor

    @property
    def excess_kurtosis(self) -> Tensor:
        """Return 3 Var K̂ / K², (N,), which is zero for a Gaussian."""
        return 3 * self.variance / self.kernel.square()

    @property
    def square_correlation(self) -> Tensor:
        """Return the correlation of the squares of two outputs, Var K̂ / (2K² + 3 Var K̂): (N,)."""
        return self.variance / (2 * self.kernel.square() + 3 * self.variance)


def finite_width(
    network: Layers, x: Tensor, *, weight_var: float = 1.0, bias_var: float = 0.0
) -> FiniteWidth:
    """Return mean and variance of the random kernel of a network of finite width.

    With g(q) = E[φ²] at variance q the recursion of this module is, for one input,

        Var K̂ ← (σ_w² g')² Var K̂ + σ_w⁴/n (E[φ⁴] − g²),     E K̂ − K ← σ_w² (g' (E K̂ − K) + ½ g'' Var K̂),

    with g' = (E[u²φ²]/q − g) / 2q and g'' = (E[u⁴φ²]/q² − 6 E[u²φ²]/q + 3g) / 4q². Both come from partial
    integration, so that kinks of φ need no care. The cost is O(N) quadratures per layer, for every width.

    Args:
        network: An `nn.Sequential` of Linear layers and activations, or a list of `HiddenLayer`.
        x: Inputs, (N, d).
        weight_var: σ_w²; weights are drawn from N(0, σ_w² / fan_in).
        bias_var: σ_b², the variance of the biases; it is not used if `network` has no biases.

    Returns:
        K, E K̂ − K and Var K̂ at each input, in float64.

    Raises:
        InputError: If `x` is not a batch of finite rows, or a variance is out of range.
        NetworkError: If `network` is not fully connected, or only some of its layers have a bias.

    >>> from torch import nn
    >>> layers = [HiddenLayer(nn.ReLU(), 100)]
    >>> finite_width(layers, torch.ones(1, 4), weight_var=2.0).excess_kurtosis  # 15 / width
    tensor([0.1500], dtype=torch.float64)
    """
    x, layers, bias_var = checked(network, x, weight_var, bias_var)
    q = weight_var * x.square().mean(1) + bias_var
    shift, variance = torch.zeros_like(q), torch.zeros_like(q)
    for layer in layers:
        phi = activation_in(layer)
        g, fourth, first, second = moments(phi, q)
        shift = weight_var * (first * shift + second * variance / 2)
        variance = (weight_var * first) ** 2 * variance
        variance = variance + weight_var**2 * (fourth - g.square()) / layer.width
        q = weight_var * g + bias_var
    return FiniteWidth(q, shift, variance)


def excess_kurtosis(
    network: Layers, x: Tensor, *, weight_var: float = 1.0, bias_var: float = 0.0
) -> Tensor:
    """Return E[f⁴] / E[f²]² − 3 of an output f over random weights.

    It falls as 1/width and grows with depth. With one hidden layer it is exactly
    3 σ_w⁴ (E[φ⁴] − E[φ²]²) / (n K²), otherwise it is right to first order in 1/n.

    Args:
        network: An `nn.Sequential` of Linear layers and activations, or a list of `HiddenLayer`.
        x: Inputs, (N, d).
        weight_var: σ_w²; weights are drawn from N(0, σ_w² / fan_in).
        bias_var: σ_b², the variance of the biases.

    Returns:
        The excess kurtosis at each input, (N,) in float64. Errors and cost are as in `finite_width`.

    >>> from torch import nn
    >>> excess_kurtosis([HiddenLayer(nn.ReLU(), 100)] * 3, torch.ones(1, 4), weight_var=2.0)
    tensor([0.4500], dtype=torch.float64)
    """
    return finite_width(network, x, weight_var=weight_var, bias_var=bias_var).excess_kurtosis


def square_correlation(
    network: Layers, x: Tensor, *, weight_var: float = 1.0, bias_var: float = 0.0
) -> Tensor:
    """Return the correlation of f_i(x)² and f_j(x)² for outputs i ≠ j.

    The outputs themselves are uncorrelated at any width. Their squares share the random kernel, so
    that they are independent only in the limit. The result is right to first order in 1/n, and exact
    with one hidden layer.

    Args:
        network: An `nn.Sequential` of Linear layers and activations, or a list of `HiddenLayer`.
        x: Inputs, (N, d).
        weight_var: σ_w²; weights are drawn from N(0, σ_w² / fan_in).
        bias_var: σ_b², the variance of the biases.

    Returns:
        The correlation at each input, (N,) in float64. Errors and cost are as in `finite_width`.

    >>> from torch import nn
    >>> square_correlation([HiddenLayer(nn.ReLU(), 100)], torch.ones(1, 4), weight_var=2.0)
    tensor([0.0233], dtype=torch.float64)
    """
    return finite_width(network, x, weight_var=weight_var, bias_var=bias_var).square_correlation


def kernel_variance(
    network: Layers,
    x: Tensor,
    y: Tensor | None = None,
    *,
    weight_var: float = 1.0,
    bias_var: float = 0.0,
) -> Tensor:
    """Return Var K̂(x_n, y_m) over random weights, to first order in 1/width.

    This is the recursion of the module for the three entries of K̂ that belong to a pair of inputs. The
    result is also Cov[f_i(x) f_i(y), f_j(x) f_j(y)] for outputs i ≠ j, which is zero for a Gaussian
    process. It is exact with one hidden layer. The cost is O(N M) quadratures in two dimensions per layer.

    Args:
        network: An `nn.Sequential` of Linear layers and activations, or a list of `HiddenLayer`.
        x: Inputs, (N, d).
        y: Other inputs, (M, d); None means `x`.
        weight_var: σ_w²; weights are drawn from N(0, σ_w² / fan_in).
        bias_var: σ_b², the variance of the biases.

    Returns:
        The variances, (N, M) in float64. Errors are as in `finite_width`.

    >>> from torch import nn
    >>> x = torch.eye(2)
    >>> kernel_variance([HiddenLayer(nn.ReLU(), 10)], x, weight_var=2.0)
    tensor([[0.5000, 0.0899],
            [0.0899, 0.5000]], dtype=torch.float64)
    """
    other, layers, bias_var = checked(network, x if y is None else y, weight_var, bias_var)
    x = checked(network, x, weight_var, bias_var)[0]
    pair = torch.stack(
        torch.broadcast_tensors(
            x.square().mean(1)[:, None], x @ other.T / x.shape[1], other.square().mean(1)[None, :]
        ),
        dim=-1,
    )
    entries = weight_var * pair + bias_var
    covariance = torch.zeros(*entries.shape, 3, dtype=torch.float64)
    for layer in layers:
        phi = activation_in(layer)
        products, jacobian = products_of(phi, entries)
        jacobian = weight_var * jacobian
        noise = weight_var**2 / layer.width * product_covariance(phi, entries, products)
        covariance = jacobian @ covariance @ jacobian.mT + noise
        entries = weight_var * products + bias_var
    return covariance[..., 1, 1]


def sample_kernels(
    network: Layers,
    x: Tensor,
    num_samples: int,
    *,
    weight_var: float = 1.0,
    bias_var: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw random kernels K̂(x, x) of networks of finite width, exact in law at any width.

    Units of a layer are independent given the layer before, so n Gaussian vectors take the place of its
    n² weights. This costs O(S L n N²) for L hidden layers of width n; drawing weights costs O(S L n² N).

    Args:
        network: An `nn.Sequential` of Linear layers and activations, or a list of `HiddenLayer`.
        x: Inputs, (N, d).
        num_samples: S, the number of networks to draw.
        weight_var: σ_w²; weights are drawn from N(0, σ_w² / fan_in).
        bias_var: σ_b², the variance of the biases.
        generator: The source of random numbers; None takes the global one.

    Returns:
        The kernels, (S, N, N) in float64.

    Raises:
        InputError: If `num_samples` is less than 1; others are as in `finite_width`.

    >>> from torch import nn
    >>> layers = [HiddenLayer(nn.Tanh(), 64)] * 2
    >>> sample_kernels(layers, torch.ones(3, 2), num_samples=5).shape
    torch.Size([5, 3, 3])
    """
    x, layers, bias_var = checked(network, x, weight_var, bias_var)
    first = weight_var * x @ x.T / x.shape[1] + bias_var
    widest = max((layer.width for layer in layers), default=1)
    kernels = []
    for count in _blocks(num_samples, widest * len(x)):
        kernel = first.expand(count, *first.shape)
        for layer in layers:
            z = torch.randn(count, len(x), layer.width, dtype=torch.float64, generator=generator)
            active = activation_in(layer)(psd_root(kernel) @ z)
            kernel = weight_var / layer.width * active @ active.mT + bias_var
        kernels.append(kernel)
    return torch.cat(kernels)


def sample_outputs(
    network: Layers,
    x: Tensor,
    num_samples: int,
    *,
    num_outputs: int = 1,
    weight_var: float = 1.0,
    bias_var: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw the outputs of random networks of finite width, exact in law.

    Given its kernel (see `sample_kernels`) a network is a Gaussian process.

    Args:
        network: An `nn.Sequential` of Linear layers and activations, or a list of `HiddenLayer`.
        x: Inputs, (N, d).
        num_samples: S, the number of networks to draw.
        num_outputs: C, the number of outputs of each network.
        weight_var: σ_w²; weights are drawn from N(0, σ_w² / fan_in).
        bias_var: σ_b², the variance of the biases.
        generator: The source of random numbers; None takes the global one.

    Returns:
        The outputs, (S, N, C) in float64. Errors are as in `sample_kernels`.

    >>> from torch import nn
    >>> layers = [HiddenLayer(nn.Tanh(), 64)] * 2
    >>> sample_outputs(layers, torch.ones(3, 2), num_samples=5, num_outputs=4).shape
    torch.Size([5, 3, 4])
    """
    kernels = sample_kernels(
        network, x, num_samples, weight_var=weight_var, bias_var=bias_var, generator=generator
    )
    shape = (num_samples, len(x), num_outputs)
    return psd_root(kernels) @ torch.randn(*shape, dtype=torch.float64, generator=generator)


def sample_ntks(
    network: Layers,
    x: Tensor,
    num_samples: int,
    *,
    weight_var: float = 1.0,
    bias_var: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw random empirical tangent kernels Θ̂(x, x) of one output in NTK parameterization.

    With activations a_l and gradients δ_l of the output in the pre-activations of layer l,
    Θ̂ = Σ_l ⟨δ_l, δ_l⟩ (σ_w² ⟨a_{l−1}, a_{l−1}⟩ / n_{l−1} + σ_b²). Mean and variance over the draws show
    how far a width is from the limit. The cost is O(S L n² N).

    Args:
        network: An `nn.Sequential` of Linear layers and activations, or a list of `HiddenLayer`.
        x: Inputs, (N, d).
        num_samples: S, the number of networks to draw.
        weight_var: σ_w²; weights are drawn from N(0, σ_w² / fan_in).
        bias_var: σ_b², the variance of the biases.
        generator: The source of random numbers; None takes the global one.

    Returns:
        The kernels, (S, N, N) in float64. Errors are as in `sample_kernels`.

    Reference: Jacot, Gabriel & Hongler (2018), "Neural tangent kernel"; Hanin & Nica (2020), "Finite
    depth and width corrections to the NTK".

    >>> from torch import nn
    >>> layers = [HiddenLayer(nn.Tanh(), 64)] * 2
    >>> sample_ntks(layers, torch.ones(3, 2), num_samples=5).shape
    torch.Size([5, 3, 3])
    """
    x, layers, bias_var = checked(network, x, weight_var, bias_var)
    widest = max((layer.width for layer in layers), default=1)
    draws = [
        _ntk_block(layers, x, count, weight_var, bias_var, generator)
        for count in _blocks(num_samples, widest * max(widest, len(x)))
    ]
    return torch.cat(draws)


def _ntk_block(
    layers: Sequence[HiddenLayer],
    x: Tensor,
    count: int,
    weight_var: float,
    bias_var: float,
    generator: torch.Generator | None,
) -> Tensor:
    def normal(*shape: int) -> Tensor:
        return torch.randn(count, *shape, dtype=torch.float64, generator=generator)

    a = x.T.expand(count, x.shape[1], len(x))
    grams: list[Tensor] = []
    slopes: list[Tensor] = []
    weights: list[Tensor] = []
    for width in [*(layer.width for layer in layers), 1]:
        grams.append(weight_var / a.shape[1] * a.mT @ a + bias_var)
        weights.append((weight_var / a.shape[1]) ** 0.5 * normal(width, a.shape[1]))
        if len(weights) > len(layers):
            break
        u = weights[-1] @ a + bias_var**0.5 * normal(width, 1)
        a, slope = _with_slope(activation_in(layers[len(slopes)]), u)
        slopes.append(slope)
    ntk, delta = grams[-1], torch.ones(count, 1, len(x), dtype=torch.float64)
    for gram, slope, weight in zip(grams[-2::-1], slopes[::-1], weights[::-1], strict=False):
        delta = slope * (weight.mT @ delta)
        ntk = ntk + delta.mT @ delta * gram
    return ntk


def _with_slope(phi: Activation, u: Tensor) -> tuple[Tensor, Tensor]:
    with ordinary_tensors(), torch.enable_grad():
        point = u.detach().clone().requires_grad_()
        value = phi(point)
        (slope,) = torch.autograd.grad(value.sum(), point)
    return value.detach(), slope


def _blocks(total: int, size: int) -> Iterator[int]:
    """Split `total` into counts such that count · size stays within BLOCK."""
    if total < 1:
        raise InputError(f"num_samples must be at least 1, but is {total}. Pass num_samples=1000.")
    step = max(1, BLOCK // size)
    for start in range(0, total, step):
        yield min(step, total - start)
