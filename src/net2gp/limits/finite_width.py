"""First corrections to infinite width, for fully connected networks of N(0, σ_w²/n) weights.

Given the activations before it, every layer is exactly Gaussian, with a random covariance

    K̂ ← σ_b² + σ_w²/n Σ_j φ(u_j) φ(v_j),      (u_j, v_j) ~ N(0, K̂ of the layer before).

A network of width n is therefore a mixture of Gaussian processes, and all that it does beyond one is
the spread of K̂. With g(K) = E[φ(u) φ(v)] over N(0, K), J = σ_w² ∂g/∂K and H = σ_w² ∂²g/∂K²,

    Var K̂ ← J (Var K̂) Jᵀ + σ_w⁴/n Cov[φφ],       E K̂ − K ← J (E K̂ − K) + ½ H : Var K̂,

to first order in 1/n; at one hidden layer exactly, whatever n is. References: Yaida (2020),
"Non-Gaussian processes and neural networks at finite widths"; Antognini (2019), "Finite size
corrections for neural network Gaussian processes"; Roberts, Yaida & Hanin (2022), "The Principles of
Deep Learning Theory", chapter 4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from net2gp.errors import InputError, NetworkError, check_finite, check_positive
from net2gp.inputs import describe, ordinary_tensors
from net2gp.likelihoods.integrals import psd_root
from net2gp.limits.duals.activations import Activation, activation_of
from net2gp.limits.duals.quadrature import Quadrature, mixed_dual

BLOCK = 2**22
"""How many numbers a block of sampled networks may hold at once."""


@dataclass(frozen=True)
class HiddenLayer:
    """`width` units of an activation, fed by a linear layer."""

    activation: nn.Module | Activation
    width: int


Layers = nn.Module | Sequence[HiddenLayer]
"""A network of alternating Linear and activation layers, or what counts of it: its hidden layers."""


@dataclass(frozen=True)
class FiniteWidth:
    """The random variance K̂(x, x) of one output at each of N inputs, to first order in 1/width."""

    kernel: Tensor
    """K, its limit at infinite width: (N,)."""
    shift: Tensor
    """E K̂ − K: (N,); zero at one hidden layer."""
    variance: Tensor
    """Var K̂: (N,)."""

    @property
    def excess_kurtosis(self) -> Tensor:
        """3 Var K̂ / K²: (N,). Zero for a Gaussian."""
        return 3 * self.variance / self.kernel.square()

    @property
    def square_correlation(self) -> Tensor:
        """Correlation of the squares of two different outputs, Var K̂ / (2K² + 3 Var K̂): (N,)."""
        return self.variance / (2 * self.kernel.square() + 3 * self.variance)


def hidden_layers(network: nn.Module) -> tuple[HiddenLayer, ...]:
    """The hidden layers of an `nn.Sequential` Linear, activation, Linear, …, activation, Linear.

    >>> hidden_layers(nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 1)))
    (HiddenLayer(activation=Tanh(), width=64),)
    """
    modules = [m for m in _flatten(network) if not isinstance(m, nn.Flatten | nn.Identity)]
    linear, activations = modules[::2], modules[1::2]
    if len(linear) != len(activations) + 1 or not all(isinstance(m, nn.Linear) for m in linear):
        kinds = ", ".join(type(m).__name__ for m in modules)
        raise NetworkError(
            f"expected Linear layers with one activation between each two of them, but got {kinds}. "
            "Pass such an nn.Sequential, or the hidden layers: [HiddenLayer(nn.Tanh(), 512)] * 3."
        )
    return tuple(
        HiddenLayer(activation, int(before.out_features))  # type: ignore[arg-type]
        for before, activation in zip(linear, activations, strict=False)
    )


def finite_width(
    network: Layers, x: Tensor, *, weight_var: float = 1.0, bias_var: float = 0.0
) -> FiniteWidth:
    """Mean and variance of the random kernel of a network of finite width, at inputs x (N, d).

    With g(q) = E[φ²] at variance q the recursion of this module is, for one input,

        Var K̂ ← (σ_w² g')² Var K̂ + σ_w⁴/n (E[φ⁴] − g²),     E K̂ − K ← σ_w² (g' (E K̂ − K) + ½ g'' Var K̂),

    with g' = (E[u²φ²]/q − g) / 2q and g'' = (E[u⁴φ²]/q² − 6 E[u²φ²]/q + 3g) / 4q² by partial
    integration, so that kinks need no care. Float64. Cost O(N) quadratures a layer, whatever the width.

    >>> layers = [HiddenLayer(nn.ReLU(), 100)]
    >>> finite_width(layers, torch.ones(1, 4), weight_var=2.0).excess_kurtosis  # 15 / width
    tensor([0.1500], dtype=torch.float64)
    """
    x, layers, bias_var = _checked(network, x, weight_var, bias_var)
    q = weight_var * x.square().mean(1) + bias_var
    shift, variance = torch.zeros_like(q), torch.zeros_like(q)
    for layer in layers:
        phi = _activation(layer)
        g, fourth, first, second = _moments(phi, q)
        shift = weight_var * (first * shift + second * variance / 2)
        variance = (weight_var * first) ** 2 * variance
        variance = variance + weight_var**2 * (fourth - g.square()) / layer.width
        q = weight_var * g + bias_var
    return FiniteWidth(q, shift, variance)


def excess_kurtosis(
    network: Layers, x: Tensor, *, weight_var: float = 1.0, bias_var: float = 0.0
) -> Tensor:
    """E[f⁴] / E[f²]² − 3 of an output f over random weights, at inputs x (N, d): (N,).

    It falls as 1/width and grows with depth; at one hidden layer it is exactly
    3 σ_w⁴ (E[φ⁴] − E[φ²]²) / (n K²), else to first order in 1/n. Cost as `finite_width`.

    >>> excess_kurtosis([HiddenLayer(nn.ReLU(), 100)] * 3, torch.ones(1, 4), weight_var=2.0)
    tensor([0.4500], dtype=torch.float64)
    """
    return finite_width(network, x, weight_var=weight_var, bias_var=bias_var).excess_kurtosis


def square_correlation(
    network: Layers, x: Tensor, *, weight_var: float = 1.0, bias_var: float = 0.0
) -> Tensor:
    """Correlation of f_i(x)² and f_j(x)² for outputs i ≠ j, at inputs x (N, d): (N,).

    The outputs themselves are uncorrelated at any width; their squares share the random kernel, so
    that they are independent only in the limit. First order in 1/n; exact at one hidden layer.

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
    """Var K̂(x_n, y_m) over random weights, to first order in 1/width: (N, M); y = x if left out.

    The recursion of this module for the three entries of K̂ that a pair of inputs has. It is also
    Cov[f_i(x) f_i(y), f_j(x) f_j(y)] for outputs i ≠ j, which a Gaussian process would have at zero.
    Exact at one hidden layer. Float64. Cost O(N M) quadratures in two dimensions a layer.

    >>> x = torch.eye(2)
    >>> kernel_variance([HiddenLayer(nn.ReLU(), 10)], x, weight_var=2.0)
    tensor([[0.5000, 0.0899],
            [0.0899, 0.5000]], dtype=torch.float64)
    """
    other, layers, bias_var = _checked(network, x if y is None else y, weight_var, bias_var)
    x = _checked(network, x, weight_var, bias_var)[0]
    pair = torch.stack(
        torch.broadcast_tensors(
            x.square().mean(1)[:, None], x @ other.T / x.shape[1], other.square().mean(1)[None, :]
        ),
        dim=-1,
    )
    entries = weight_var * pair + bias_var
    covariance = torch.zeros(*entries.shape, 3, dtype=torch.float64)
    for layer in layers:
        phi = _activation(layer)
        products, jacobian = _products(phi, entries)
        jacobian = weight_var * jacobian
        noise = weight_var**2 / layer.width * _product_covariance(phi, entries, products)
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
    """Random kernels K̂(x, x) of networks of finite width, exact in law at any width: (S, N, N).

    Units of a layer are independent given the layer before, so that n Gaussian vectors stand for its
    n² weights. Float64. Cost O(S L n N²) for L hidden layers of width n, against O(S L n² N) by weights.

    >>> layers = [HiddenLayer(nn.Tanh(), 64)] * 2
    >>> sample_kernels(layers, torch.ones(3, 2), num_samples=5).shape
    torch.Size([5, 3, 3])
    """
    x, layers, bias_var = _checked(network, x, weight_var, bias_var)
    first = weight_var * x @ x.T / x.shape[1] + bias_var
    widest = max((layer.width for layer in layers), default=1)
    kernels = []
    for count in _blocks(num_samples, widest * len(x)):
        kernel = first.expand(count, *first.shape)
        for layer in layers:
            z = torch.randn(count, len(x), layer.width, dtype=torch.float64, generator=generator)
            active = _activation(layer)(psd_root(kernel) @ z)
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
    """Outputs at x (N, d) of random networks of finite width, exact in law: (S, N, C).

    Given its kernel (see `sample_kernels`) a network is a Gaussian process. Float64.

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
    """Random empirical tangent kernels Θ̂(x, x) of one output in NTK parameterization: (S, N, N).

    With activations a_l and gradients δ_l of the output in the pre-activations of layer l,
    Θ̂ = Σ_l ⟨δ_l, δ_l⟩ (σ_w² ⟨a_{l−1}, a_{l−1}⟩ / n_{l−1} + σ_b²). Mean and variance over S show how far
    a width is from the limit. Float64. Cost O(S L n² N). Reference: Jacot, Gabriel & Hongler (2018),
    "Neural tangent kernel"; Hanin & Nica (2020), "Finite depth and width corrections to the NTK".

    >>> layers = [HiddenLayer(nn.Tanh(), 64)] * 2
    >>> sample_ntks(layers, torch.ones(3, 2), num_samples=5).shape
    torch.Size([5, 3, 3])
    """
    x, layers, bias_var = _checked(network, x, weight_var, bias_var)
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
        a, slope = _with_slope(_activation(layers[len(slopes)]), u)
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


def _moments(phi: Activation, q: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """E[φ²], E[φ⁴], and the first two derivatives of E[φ²] in q, at u ~ N(0, q)."""
    g = phi.variance(q, False)[0]
    fourth = _monomial(phi, 0, 2).variance(q, False)[0]
    once = _monomial(phi, 1, 1).variance(q, False)[0] / q
    twice = _monomial(phi, 2, 1).variance(q, False)[0] / q.square()
    return g, fourth, (once - g) / (2 * q), (twice - 6 * once + 3 * g) / (4 * q.square())


def _products(phi: Activation, entries: Tensor) -> tuple[Tensor, Tensor]:
    """E[φ(u)²], E[φ(u) φ(v)], E[φ(v)²] (…, 3) for entries (…, 3) of K, and their Jacobian (…, 3, 3)."""
    with ordinary_tensors(), torch.enable_grad():
        entries = entries.detach().clone().requires_grad_()
        var1, cov, var2 = entries.unbind(-1)
        values = (
            phi.variance(var1, False)[0],
            phi.dual(cov, var1, var2, False)[0],
            phi.variance(var2, False)[0],
        )
        rows = [torch.autograd.grad(value.sum(), entries)[0] for value in values]
    return torch.stack(values, -1).detach(), torch.stack(rows, -2)


def _product_covariance(phi: Activation, entries: Tensor, products: Tensor) -> Tensor:
    """Covariance (…, 3, 3) of φ(u)², φ(u) φ(v), φ(v)²."""
    var1, cov, var2 = entries.unbind(-1)
    square, cube = _monomial(phi, 0, 2), _monomial(phi, 0, 3)
    mixed = square.dual(cov, var1, var2, False)[0]
    left = mixed_dual(cube, phi, cov, var1, var2, False)[0]
    right = mixed_dual(phi, cube, cov, var1, var2, False)[0]
    fourth1, fourth2 = square.variance(var1, False)[0], square.variance(var2, False)[0]
    rows = ((fourth1, left, mixed), (left, mixed, right), (mixed, right, fourth2))
    second = torch.stack([torch.stack(row, -1) for row in rows], -2)
    return second - products[..., :, None] * products[..., None, :]


@dataclass(frozen=True)
class _Monomial:
    """u^p φ(u)^k; a value, so that what quadrature finds out about it is found out once."""

    phi: Activation
    p: int
    k: int

    def __call__(self, u: Tensor) -> Tensor:
        return u**self.p * self.phi(u) ** self.k


def _monomial(phi: Activation, p: int, k: int) -> Activation:
    # smooth wherever φ is; a search for kinks could miss those that powers have smoothed
    return Quadrature(_Monomial(phi, p, k), getattr(phi, "kinks", None))


def _activation(layer: HiddenLayer) -> Activation:
    given = layer.activation
    return activation_of(given) if isinstance(given, nn.Module) else given


def _flatten(network: nn.Module) -> Iterator[nn.Module]:
    if isinstance(network, nn.Sequential):
        for module in network:
            yield from _flatten(module)
    else:
        yield network


def _blocks(total: int, size: int) -> Iterator[int]:
    """`total` split into counts of which each keeps count · size within BLOCK."""
    if total < 1:
        raise InputError(f"num_samples must be at least 1, but is {total}. Pass num_samples=1000.")
    step = max(1, BLOCK // size)
    for start in range(0, total, step):
        yield min(step, total - start)


def _checked(
    network: Layers, x: Tensor, weight_var: float, bias_var: float
) -> tuple[Tensor, Sequence[HiddenLayer], float]:
    """x in float64, the hidden layers, and the bias variance (0 for a network without biases)."""
    check_positive(weight_var, "weight_var")
    check_positive(bias_var, "bias_var", zero=True)
    if not isinstance(x, Tensor) or x.dim() < 2:
        raise InputError(
            f"x must be a tensor of inputs in rows, (N, d), but is {describe(x)}. "
            "Pass a single input as x[None]."
        )
    check_finite(x, "x")
    x = x.detach().flatten(1).double()
    if not isinstance(network, nn.Module):
        return x, network, bias_var
    layers = hidden_layers(network)
    linear = [module for module in _flatten(network) if isinstance(module, nn.Linear)]
    biased = {module.bias is not None for module in linear}
    if len(biased) > 1:
        raise NetworkError(
            "some Linear layers have a bias and some have none; these corrections take one bias_var "
            "for all. Use bias=True (or bias=False) throughout."
        )
    return x, layers, bias_var if biased == {True} else 0.0
