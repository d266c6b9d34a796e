"""Gradient flow in function space: the law of an ensemble of networks at every time of its training."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor, nn

from net2gp.errors import InputError, check_memory, check_positive
from net2gp.inputs import chunks, gather, num_rows, tensors
from net2gp.likelihoods import Gaussian
from net2gp.likelihoods.laws import gaussian_law
from net2gp.limits.prior import Parameterization, Variances
from net2gp.linalg import kron_identity
from net2gp.linear import Linearized
from net2gp.methods.flow.kernels import (
    KernelPair,
    Part,
    Single,
    Source,
    begin_at,
    check_like,
    check_matrix,
    count_outputs,
    own,
    result_dtype,
    source_of,
)
from net2gp.methods.flow.modes import (
    Descent,
    Modes,
    Relative,
    Ridge,
    Times,
    decompose,
    make_descent,
    parse_times,
    warn_never_learned,
)
from net2gp.types import Data, Inputs, Mean

TEST_BYTES = 2**28
"""What the cross-covariances of one chunk of test points may take."""


@dataclass(frozen=True, eq=False)
class Flow:
    """An ensemble of networks trained by gradient flow on the squared loss, as a law at each time.

    With L(f) = ‖f(X) − y‖² / (2NC), functions move by df/dτ = −Θ(·, X) ∇_f L, where τ = learning_rate·t
    and t counts steps of gradient descent. The outputs start as GP(m, K) and stay Gaussian. With
    Θ(X, X) = Q diag(λ) Qᵀ and the decay D = exp(−λτ/NC) of each direction, a function f₀ becomes

        f_t(x) = f₀(x) + A_t(x) (y − f₀(X)),    A_t(x) = Θ(x, X) Q diag((1 − D)/λ) Qᵀ,

    so that the ensemble has mean m(x) + A_t(x)(y − m(X)) and covariance

        K(x, x') + A_t(x) K A_t(x')ᵀ − A_t(x) K(X, x') − K(x, X) A_t(x')ᵀ.

    At t = 0 this is the law at the start, at t = ∞ (`math.inf`) the law of the trained ensemble, which
    is no posterior: `ntk_gp()` is Gaussian process regression with kernel Θ, and `nngp()` the ensemble
    in which only the readout layer is trained, which at t = ∞ is the posterior of GP(m, K). Directions
    in which λ is zero are never learned. With momentum, D is a damped oscillation instead.

    `ridge` is a weight of its own for each training output, f(x_n) + √ridge·w_n, which is trained too
    but takes no part in predictions at x; it starts at zero, or as N(0, 1) in `nngp()` and `ntk_gp()`,
    where it makes ridge the noise variance of a regression. Outputs at the training points themselves
    (x left out) include it, so at t = ∞ they are y; pass x for what the network alone gives there.

    `t` is a number, or an array whose axes lead the result. Everything is computed in float64, without
    gradients, and returned in the dtype of y. Cost: O(R³) once, for R = N rows (R = N·C of coupled outputs);
    then O(MR²) for each time at M points, and O(MR + R²) for means alone.

    References: Jacot et al., Neural tangent kernel, NeurIPS 2018; Lee et al., Wide neural networks of any
    depth evolve as linear models under gradient descent, NeurIPS 2019; He et al., Bayesian deep
    ensembles via the neural tangent kernel, NeurIPS 2020.
    """

    source: Source = field(repr=False)
    initial: Part | None
    tangent: Part
    x: Inputs = field(repr=False)
    y: Tensor = field(repr=False)
    descent: Descent
    ridge: Ridge
    modes: Modes = field(repr=False)
    spread: Tensor | None = field(repr=False)
    """Covariance at the start of the directions Q: (R, R), its diagonal (R,), or None for zero."""

    @property
    def num_outputs(self) -> int:
        """C."""
        return self.y.shape[1]

    def mean(self, t: Times, x: Inputs | None = None) -> Tensor:
        """The mean of the ensemble: (…, M, C). Costs one product with Θ(x, X), which is not stored."""
        return self._path(t, x, self.source.start)

    def path(self, t: Times, x: Inputs | None = None, *, start: Mean) -> Tensor:
        """The one function of the ensemble that starts as `start`, a map of inputs to (N, C): (…, M, C)."""
        return self._path(t, x, start)

    @torch.no_grad()
    def covariance(self, t: Times, x: Inputs | None = None) -> Tensor:
        """Covariance of the ensemble between points: (…, M, M) for each output, or (…, M·C, M·C) if joint."""
        times, shape = self._times(t)
        if x is not None:
            self._check(x)
        points = num_rows(self.x if x is None else x)
        size = points * (self.num_outputs if self.source.joint else 1)
        check_memory(
            8 * size**2 * (len(times) + 3),
            self.y.device,
            f"{len(times)} covariances between {points} points",
            "ask for fewer times or points, or for flow.at(t, x), each point by itself",
        )
        weights = self.modes.weights(self.descent, times)
        if x is None:
            result = self._training_covariances(self.modes.decays(self.descent, times))
        elif self.initial is None:
            result = weights.new_zeros(len(times), size, size)
        else:
            prior = self.source.one(self.initial, x)
            result = prior + self._changes(weights, *self._cross(x))
        result = 0.5 * (result + result.mT)
        return result.reshape(*shape, size, size).to(self.y.dtype)

    def at(self, t: Times, x: Inputs | None = None) -> MultivariateNormal:
        """The law of the ensemble at time t for each point by itself: batch (…, M), event C.

        >>> import math
        >>> from net2gp.linear import linearize
        >>> network = nn.Linear(1, 1).double().eval()
        >>> x = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
        >>> flow = gradient_flow(linearize(network), (x, 3 * x + 1))
        >>> flow.at(math.inf, 2 * x).mean.round(decimals=6)
        tensor([[1.], [7.]], dtype=torch.float64)
        """
        mean = self.mean(t, x)
        blocks = self._blocks(t, x).to(mean.dtype)
        if blocks.shape[-1] != self.num_outputs:
            blocks = blocks * torch.eye(self.num_outputs).to(blocks)
        return gaussian_law(mean, blocks)

    def joint(self, t: Times, x: Inputs | None = None) -> MultivariateNormal:
        """The law of the ensemble at all points together: batch (…), event M·C, index n·C + c."""
        mean, covariance = self.mean(t, x), self.covariance(t, x)
        if not self.source.joint and self.num_outputs > 1:
            shared = covariance.reshape(-1, *covariance.shape[-2:])
            parts = [kron_identity(c, self.num_outputs) for c in shared]
            covariance = torch.stack(parts).reshape(*covariance.shape[:-2], *parts[0].shape)
        return gaussian_law(mean.flatten(-2), covariance)

    @torch.no_grad()
    def nngp(self) -> Flow:
        """The ensemble of which only the readout layer is trained: K takes the place of Θ.

        At t = ∞ it is the posterior of GP(m, K) with noise variance `ridge`. Costs a decomposition.

        Reference: Lee et al., Deep neural networks as Gaussian processes, ICLR 2018.
        """
        if isinstance(self.source, Single):
            raise InputError(
                "one linearized network has no covariance at its start. For training of its readout "
                'alone, choose its parameters: gradient_flow(linearize(network, only="head.*"), data).'
            )
        kernels = self.source.both(self.x)
        return _assemble(self, Part.NNGP, Part.NNGP, kernels)

    def ntk_gp(self) -> Flow:
        """The ensemble that starts as GP(m, Θ), so that at t = ∞ it is the posterior with kernel Θ.

        The noise variance is `ridge`: mean Θ(x, X)(Θ + ridge)⁻¹(y − m) + m, covariance
        Θ(x, x') − Θ(x, X)(Θ + ridge)⁻¹Θ(X, x'). This is not the law of networks trained as usual.

        Reference: He et al., Bayesian deep ensembles via the neural tangent kernel, NeurIPS 2020.
        """
        if self.tangent is not Part.NTK:
            raise InputError("this flow trains the readout alone: call ntk_gp() on the first flow.")
        return replace(self, initial=Part.NTK, spread=self.modes.values)

    def _times(self, t: Times) -> tuple[Tensor, tuple[int, ...]]:
        return parse_times(t, self.y.device)

    def _check(self, x: Inputs) -> None:
        self.source.check(x)
        check_like(x, self.x)

    def _rows(self, values: Tensor) -> Tensor:
        """(N, C) in float64 as the rows of the kernel: (N·C, 1) if joint."""
        return values.double().reshape(-1, 1) if self.source.joint else values.double()

    @torch.no_grad()
    def _path(self, t: Times, x: Inputs | None, start: Any) -> Tensor:
        times, shape = self._times(t)
        y = self._rows(self.y)
        begin = begin_at(start, self.x, self.num_outputs)
        residual = self.modes.Q.mT @ (y - self._rows(begin))
        if not isinstance(self.source, Single):  # few parameters give least squares, as expected
            warn_never_learned(self.modes, times, residual)
        if x is None:
            decays = self.modes.decays(self.descent, times)
            result = y - self.modes.Q @ (decays[..., None] * residual)
            return result.reshape(*shape, *self.y.shape).to(self.y.dtype)
        self._check(x)
        weights = self.modes.weights(self.descent, times)
        alpha = self.modes.Q @ (weights[..., None] * residual)  # (T, R, columns)
        columns = alpha.movedim(0, 1).flatten(1)
        change = self.source.matmul(self.tangent, x, self.x, columns)
        change = change.unflatten(1, (len(times), -1)).movedim(1, 0)
        change = change.reshape(len(times), num_rows(x), self.num_outputs)
        result = begin_at(start, x, self.num_outputs) + change
        return result.reshape(*shape, num_rows(x), self.num_outputs).to(self.y.dtype)

    def _cross(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """k(x, X) Q of the tangent and of the covariance at the start: (M, R) each."""
        if self.initial is self.tangent:
            cross = self.source.one(self.tangent, x, self.x) @ self.modes.Q
            return cross, cross
        K, Theta = self.source.both(x, self.x)
        assert K is not None
        return Theta.double() @ self.modes.Q, K.double() @ self.modes.Q

    def _changes(self, weights: Tensor, tangent: Tensor, initial: Tensor) -> Tensor:
        """A K Aᵀ − A K(X, x) − K(x, X) Aᵀ for each time: (T, M, M)."""
        result = []
        for weight in weights:
            A = tangent * weight
            crossed = A @ initial.mT
            result.append(self._spread_times(A) @ A.mT - crossed - crossed.mT)
        return torch.stack(result)

    def _spread_times(self, A: Tensor) -> Tensor:
        assert self.spread is not None
        return A * self.spread if self.spread.dim() == 1 else A @ self.spread

    def _training_covariances(self, decays: Tensor) -> Tensor:
        """Q D K D Qᵀ for each time: (T, R, R)."""
        Q = self.modes.Q
        if self.spread is None:
            return Q.new_zeros(len(decays), len(Q), len(Q))
        scaled = [Q * decay for decay in decays]
        return torch.stack([self._spread_times(A) @ A.mT for A in scaled])

    @torch.no_grad()
    def _blocks(self, t: Times, x: Inputs | None) -> Tensor:
        """Covariance of each point: (…, M, C, C), or (…, M, 1, 1) for independent outputs; float64."""
        times, shape = self._times(t)
        C = self.num_outputs if self.source.joint else 1
        points = num_rows(self.x if x is None else x)
        if self.initial is None:
            return self.modes.Q.new_zeros(*shape, points, C, C)
        if x is None:
            decays = self.modes.decays(self.descent, times)
            blocks = torch.stack([self._inner(self.modes.Q * decay, None, C) for decay in decays])
            return blocks.reshape(*shape, points, C, C)
        self._check(x)
        weights, parts = self.modes.weights(self.descent, times), []
        size = max(1, TEST_BYTES // (16 * len(self.modes.Q) * C))
        for part in chunks(x, size):
            tangent, initial = self._cross(part)
            prior = self.source.blocks(self.initial, part)
            changes = [self._inner(tangent * weight, initial, C) for weight in weights]
            parts.append(prior + torch.stack(changes))
        blocks = torch.cat(parts, 1)
        variances = blocks.diagonal(dim1=2, dim2=3)
        blocks = blocks + torch.diag_embed(variances.clamp(min=0.0) - variances)
        return blocks.reshape(*shape, points, C, C)

    def _inner(self, A: Tensor, initial: Tensor | None, C: int) -> Tensor:
        """The blocks (M, C, C) of A K Aᵀ, less those of A K(X, x) and its transpose if these are given."""
        A, by = A.unflatten(0, (-1, C)), self._spread_times(A).unflatten(0, (-1, C))
        blocks = A @ by.mT
        if initial is not None:
            crossed = A @ initial.unflatten(0, (-1, C)).mT
            blocks = blocks - crossed - crossed.mT
        return 0.5 * (blocks + blocks.mT)


@torch.no_grad()
def gradient_flow(
    network: nn.Module | Linearized | KernelPair,
    data: Data,
    *,
    weight_var: Variances | None = None,
    bias_var: Variances | None = None,
    parameterization: Parameterization | None = None,
    learning_rate: float = 1.0,
    momentum: float | None = None,
    ridge: Ridge = 0.0,
) -> Flow:
    """Train a network by gradient flow on the squared loss, in closed form and in function space.

    `network` is a module, whose infinitely wide ensemble under the given prior is trained (`weight_var`,
    `bias_var` and `parameterization` as in `infinite_width`); or kernels that are there already,
    `infinite_width(network)` or any function of (x, y) to (K, Θ); or `linearize(network)`, for the one
    network that starts where its parameters stand, which with fewer parameters than outputs ends as
    least squares. See `Flow` for the law and its parts, and `loss_flow` for other losses.

    The loss is ‖f(X) − y‖² / (2NC), a mean over points and outputs. `momentum` is that of gradient descent
    with steps v ← momentum·v − learning_rate·∇L; then f'' = −(1 − momentum)/√learning_rate · f' − Θ∇L in
    the time √learning_rate·t. `ridge` is added to the diagonal of Θ(X, X): a number, or `Relative(1e-6)`
    of its mean diagonal.

    Cost: one eigendecomposition, O(N³), or O((NC)³) for linearized networks.

    >>> network = nn.Sequential(nn.Linear(1, 50), nn.ReLU(), nn.Linear(50, 1))
    >>> x = torch.linspace(-1, 1, 5)[:, None]
    >>> flow = gradient_flow(network, (x, x.sin()), weight_var=2.0, bias_var=0.1)
    >>> law = flow.at([0.0, 10.0, 1000.0], torch.tensor([[0.25]]))
    >>> law.mean.flatten(), law.variance.flatten()
    (tensor([0.0000, 0.2352, 0.2540]), tensor([0.3250, 0.0276, 0.0038]))

    References: Jacot et al., Neural tangent kernel, NeurIPS 2018; Lee et al., Wide neural networks of any
    depth evolve as linear models under gradient descent, NeurIPS 2019; Yang and Littwin, Tensor
    programs IIb, ICML 2021, for the architectures.
    """
    descent = make_descent(learning_rate, momentum)
    if not isinstance(ridge, Relative):
        check_positive(ridge, "ridge", zero=True)
    prior = {"weight_var": weight_var, "bias_var": bias_var, "parameterization": parameterization}
    source = source_of(network, prior)
    x, y = own(*gather(data))
    source.check(x)
    source = source.at(x)
    N, C = num_rows(x), count_outputs(source, x) or (y.shape[1] if y.dim() > 1 else 1)
    like = torch.zeros(N, C, dtype=result_dtype(x, y), device=tensors(x)[0].device)
    Gaussian().check(like, y)
    y = y.reshape(N, C)
    R = N * C if source.joint else N
    check_memory(
        5 * 8 * R**2,
        y.device,
        f"an eigendecomposition of size {R} and its kernels",
        "train on fewer points",
    )
    blank = Flow(source, None, Part.NTK, x, y, descent, ridge, Modes.empty(y), None)
    initial = None if isinstance(source, Single) else Part.NNGP
    return _assemble(blank, initial, Part.NTK, source.both(x))


def _assemble(
    flow: Flow, initial: Part | None, tangent: Part, kernels: tuple[Tensor | None, Tensor]
) -> Flow:
    """The flow with these two roles, from both kernels at the training points."""
    R = flow.y.numel() if flow.source.joint else len(flow.y)
    chosen = kernels[tangent.value]
    assert chosen is not None
    name = "the tangent kernel" if tangent is Part.NTK else "the covariance at the start"
    modes = decompose(check_matrix(chosen, name, R), flow.ridge, chosen.dtype, flow.y.numel())
    spread = None
    if initial is tangent:
        spread = modes.values
    elif initial is not None:
        K = kernels[initial.value]
        assert K is not None
        K = check_matrix(K, "the covariance at the start", R)
        spread = modes.Q.mT @ K @ modes.Q
        spread = 0.5 * (spread + spread.mT)
    return replace(flow, initial=initial, tangent=tangent, modes=modes, spread=spread)


def max_learning_rate(
    flow: Flow | Tensor, *, num_outputs: int = 1, momentum: float | None = None
) -> float:
    """The learning rate above which gradient descent on the squared loss diverges.

    2(1 + momentum)·NC / λ_max(Θ), with the loss ‖f − y‖² / (2NC): each direction of gradient descent
    shrinks by 1 − learning_rate·λ/(NC) a step. `flow` is a flow, whose own momentum counts if none is
    given, or a Gram matrix Θ(X, X), which `num_outputs` independent outputs share.

    Cost: O(1) for a flow, O(N³) for a matrix.

    >>> max_learning_rate(torch.diag(torch.tensor([1.0, 4.0])))
    1.0

    Reference: Goh, Why momentum really works, Distill 2017.
    """
    if isinstance(flow, Flow):
        largest, size = float(flow.modes.values.max()), flow.y.numel()
        momentum = flow.descent.momentum if momentum is None else momentum
    else:
        if flow.dim() != 2 or flow.shape[0] != flow.shape[1] or not len(flow):
            raise InputError(
                f"a Gram matrix must be square, (N, N), but has shape {tuple(flow.shape)}. "
                "Pass Θ(X, X), or a flow."
            )
        size = len(flow) * num_outputs
        largest = float(torch.linalg.eigvalsh(check_matrix(flow, "the Gram matrix", len(flow)))[-1])
    make_descent(1.0, momentum)
    return 2.0 * (1.0 + (momentum or 0.0)) * size / largest
