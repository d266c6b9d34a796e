"""The law of an ensemble of networks at every time of its training, by gradient flow in function space."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor

from net2gp.errors import InputError, NotAvailable
from net2gp.inputs import chunks, num_rows
from net2gp.likelihoods import Gaussian
from net2gp.likelihoods.laws import gaussian_law
from net2gp.linalg import kron_identity
from net2gp.memory import check_memory
from net2gp.methods.flow.kernels import (
    Part,
    Single,
    Source,
    begin_at,
    check_like,
    check_matrix,
)
from net2gp.methods.flow.modes import (
    Descent,
    Modes,
    Ridge,
    Times,
    decompose,
    parse_times,
    warn_never_learned,
)
from net2gp.posteriors.conditioning.problem import predictive
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.recipes.trained_ensemble import ByGradientFlow, TrainedEnsemble
from net2gp.types import Inputs, Likelihood, Mean

TEST_BYTES = 2**28
"""How much memory the cross-covariances of one chunk of test points may take."""


@dataclass(frozen=True, eq=False)
class Flow:
    """An ensemble of networks trained by gradient flow on the squared loss, as a law at each time.

    With L(f) = ‖f(X) − y‖² / (2NC), functions move by df/dτ = −Θ(·, X) ∇_f L, where τ = learning_rate·t
    and t counts steps of gradient descent. The outputs start as GP(m, K) and stay Gaussian. With
    Θ(X, X) = Q diag(λ) Qᵀ and the decay D = exp(−λτ/NC) of each direction, a function f₀ becomes

        f_t(x) = f₀(x) + A_t(x) (y − f₀(X)),    A_t(x) = Θ(x, X) Q diag((1 − D)/λ) Qᵀ,

    so that the ensemble has mean m(x) + A_t(x)(y − m(X)) and covariance

        K(x, x') + A_t(x) K A_t(x')ᵀ − A_t(x) K(X, x') − K(x, X) A_t(x')ᵀ.

    At t = 0 this is the law at the start, and at t = ∞ (`math.inf`) the law of the trained ensemble. The
    latter is not a posterior: `ntk_gp()` is Gaussian process regression with kernel Θ, and `nngp()` is the
    ensemble in which only the readout layer is trained, which at t = ∞ is the posterior of GP(m, K).
    Directions in which λ is zero are never learned. With momentum, D is a damped oscillation instead.

    The ridge gives each training output a weight of its own, f(x_n) + √ridge·w_n, which is trained as well
    but does not enter predictions at x. The weight starts at zero, or as N(0, 1) in `nngp()` and `ntk_gp()`,
    where the ridge becomes the noise variance of a regression. Outputs at the training points (x left out)
    include it, so at t = ∞ they are y; pass x for the outputs of the network alone.

    Wherever `t` is an argument, it is a time in steps, or an array of times whose axes lead the result. All
    is computed in float64, without gradients, and returned in the dtype of y. Cost: O(R³) once, for R = N
    rows (R = N·C for coupled outputs); then O(MR²) per time at M points, and O(MR + R²) for means alone.

    Args:
        source: The kernels that the ensemble starts with and moves along.
        initial: Which kernel is the covariance at the start; None for a single network.
        tangent: Which kernel the functions move along.
        x: The training points X.
        y: Their targets: (N, C).
        descent: The learning rate and the momentum.
        ridge: What is added to the diagonal of Θ(X, X).
        modes: The eigendecomposition of Θ(X, X) with the ridge.
        spread: The covariance at the start in the basis Q: (R, R), its diagonal (R,), or None for zero.

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

    @property
    def num_outputs(self) -> int:
        """The number of outputs C."""
        return self.y.shape[1]

    def mean(self, t: Times, x: Inputs | None = None) -> Tensor:
        """Return the mean of the ensemble, by one product with Θ(x, X), which is not stored.

        Args:
            t: A time, or an array of times.
            x: M points. None takes the training points.

        Returns:
            The means: (…, M, C).
        """
        return self._path(t, x, self.source.start)

    def path(self, t: Times, x: Inputs | None = None, *, start: Mean) -> Tensor:
        """Return the function of the ensemble that begins as `start`.

        Args:
            t: A time, or an array of times.
            x: M points. None takes the training points.
            start: The function at t = 0, from N points to (N, C).

        Returns:
            Its values at time t: (…, M, C).
        """
        return self._path(t, x, start)

    @torch.no_grad()
    def covariance(self, t: Times, x: Inputs | None = None) -> Tensor:
        """Return the covariance of the ensemble between points.

        Args:
            t: A time, or an array of times.
            x: M points. None takes the training points.

        Returns:
            The covariance (…, M, M) that all outputs share, or (…, M·C, M·C) if outputs are coupled.
        """
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
        """Return the law of the ensemble at time t for each point by itself.

        Args:
            t: A time, or an array of times.
            x: M points. None takes the training points.

        Returns:
            A Gaussian with batch shape (…, M) and event shape C.

        >>> import math
        >>> from net2gp.linear import linearize
        >>> from net2gp.methods import gradient_flow
        >>> network = torch.nn.Linear(1, 1).double().eval()
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
        """Return the law of the ensemble at all points together.

        Args:
            t: A time, or an array of times.
            x: M points. None takes the training points.

        Returns:
            A Gaussian with batch shape (…) and event shape M·C, where output c of point n has index n·C + c.
        """
        mean, covariance = self.mean(t, x), self.covariance(t, x)
        if not self.source.joint and self.num_outputs > 1:
            shared = covariance.reshape(-1, *covariance.shape[-2:])
            parts = [kron_identity(c, self.num_outputs) for c in shared]
            covariance = torch.stack(parts).reshape(*covariance.shape[:-2], *parts[0].shape)
        return gaussian_law(mean.flatten(-2), covariance)

    def posterior(self, t: float, likelihood: Likelihood | None = None) -> Posterior:
        """Return the law of the ensemble at one time as a posterior, with its surface and its files.

        Its prior is the ensemble before training, so `novelty(x)` is the share of the variance at the start
        that training leaves. Unlike the laws of `at` and `joint`, it is differentiable in x.

        Args:
            t: One time in steps; `math.inf` is convergence.
            likelihood: How targets follow the outputs. None is Gaussian noise with the ridge as its variance,
                which is none without a ridge.

        Returns:
            The posterior. It has no evidence, and takes in no more data.

        Raises:
            InputError: If `t` is not one time, or `likelihood` is not a likelihood.
            NotAvailable: If there is no covariance at the start, or if the pair of kernels of the flow does
                not have them as `nngp` and `ntk`.

        >>> from net2gp.methods import gradient_flow
        >>> network = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> x = torch.tensor([[0.5], [1.0]], dtype=torch.float64)
        >>> flow = gradient_flow(network.double(), (x, 3 * x))
        >>> flow.posterior(float("inf")).mean(x).round(decimals=3)
        tensor([[1.5000], [3.0000]], dtype=torch.float64)
        """
        times, shape = self._times(t)
        if shape != ():
            raise InputError(f"t must be one time, but has shape {shape}. Pass e.g. t=10.0.")
        kernel, tangent = self.source.alone(self.initial), self.source.alone(self.tangent)
        if kernel is None or tangent is None:
            raise NotAvailable(
                "a posterior needs the covariance of the ensemble at its start and its tangent kernel as "
                "kernels of their own. Pass infinite_width(network) to gradient_flow; for one linearized "
                "network, use flow.mean(t, x), or flow.ntk_gp().posterior(t)."
            )
        ridge = self.modes.added(self.ridge)
        with torch.no_grad():
            begin = begin_at(self.source.start, self.x, self.num_outputs)
            weight, Q = self.modes.weights(self.descent, times)[0], self.modes.Q
            scaled = Q * weight
            W = scaled @ Q.mT
            process = TrainedEnsemble(
                kernel=kernel,
                tangent=None if self.initial is self.tangent else tangent,
                prior_mean=self.source.mean,
                x=self.x,
                num_outputs=self.num_outputs,
                alpha=W @ (self._rows(self.y) - self._rows(begin)),
                W=W,
                B=self._spread_times(scaled) @ scaled.mT,
                noise=ridge if self.initial is self.tangent else 0.0,
            )
        chosen = predictive(likelihood, Gaussian(ridge))
        return Posterior(process, chosen, self.x, self.y, None, ByGradientFlow(float(times[0])))

    @torch.no_grad()
    def nngp(self) -> Flow:
        """Return the flow of the ensemble in which only the readout layer is trained: K replaces Θ.

        At t = ∞ it is the posterior of GP(m, K) with noise variance `ridge`. Cost: one eigendecomposition.

        Returns:
            A new flow.

        Raises:
            InputError: If this is the flow of one linearized network, which has no covariance at its start.

        Reference: Lee et al., Deep neural networks as Gaussian processes, ICLR 2018.
        """
        if isinstance(self.source, Single):
            raise InputError(
                "one linearized network has no covariance at its start. For training of its readout "
                'alone, choose its parameters: gradient_flow(linearize(network, only="head.*"), data).'
            )
        kernels = self.source.both(self.x)
        return assemble(self, Part.NNGP, Part.NNGP, kernels)

    def ntk_gp(self) -> Flow:
        """Return the flow of the ensemble that starts as GP(m, Θ) and ends as the posterior with kernel Θ.

        The noise variance is `ridge`: at t = ∞ the mean is Θ(x, X)(Θ + ridge)⁻¹(y − m) + m, and the
        covariance Θ(x, x') − Θ(x, X)(Θ + ridge)⁻¹Θ(X, x'). Networks that are trained as usual do not have
        this law.

        Returns:
            A new flow.

        Raises:
            InputError: If this flow trains the readout alone, as after `nngp()`.

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
        if not isinstance(self.source, Single):
            # A single network with few parameters ends as least squares, so its residual is no surprise.
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
        """k(x, X) Q for the tangent kernel and for the covariance at the start: (M, R) each."""
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
        """The covariance at each point: (…, M, C, C), or (…, M, 1, 1) for independent outputs; float64."""
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
        """The blocks (M, C, C) of A K Aᵀ, minus A K(X, x) and its transpose if `initial` is given."""
        A, by = A.unflatten(0, (-1, C)), self._spread_times(A).unflatten(0, (-1, C))
        blocks = A @ by.mT
        if initial is not None:
            crossed = A @ initial.unflatten(0, (-1, C)).mT
            blocks = blocks - crossed - crossed.mT
        return 0.5 * (blocks + blocks.mT)


def assemble(
    flow: Flow, initial: Part | None, tangent: Part, kernels: tuple[Tensor | None, Tensor]
) -> Flow:
    """The flow in which these kernels are the covariance at the start and the tangent kernel.

    `kernels` are both kernels at the training points.
    """
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
