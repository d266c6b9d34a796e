"""Gradient flow in function space for any loss, by a solver of differential equations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy.integrate import solve_ivp
from torch import Tensor, nn

from net2gp.errors import InputError, Net2GPError, check_dtype_and_device
from net2gp.inputs import describe, gather, num_rows, ordinary_tensors, tensors
from net2gp.likelihoods.traits import num_outputs
from net2gp.limits.prior import Variances
from net2gp.linear import Linearized
from net2gp.memory import check_memory
from net2gp.methods.flow.kernels import (
    KernelPair,
    Part,
    Source,
    begin_at,
    check_like,
    check_matrix,
    count_outputs,
    own,
    result_dtype,
    source_of,
)
from net2gp.methods.flow.modes import Descent, Modes, Times, decompose, make_descent, parse_times
from net2gp.progress import progress
from net2gp.types import Data, Inputs, Likelihood, Mean

Loss = Likelihood | Callable[[Tensor, Tensor], Tensor]
"""A likelihood, or a differentiable function of outputs (N, C) and targets to a scalar."""

RELATIVE_TOLERANCE = 1e-10
ABSOLUTE_TOLERANCE = 1e-12
"""The errors of the weights that the solver may add in one step."""

STIFF_SIZE = 2000
"""The most weights for which stiff equations are solved implicitly; memory grows with their square."""


@dataclass(frozen=True, eq=False)
class LossFlow:
    """Functions in training by gradient flow on a loss L: df/dτ = −Θ(·, X) ∇L(f(X)), τ = learning_rate·t.

    With features Φ = Q√λ of the training points, Θ(X, X) = ΦΦᵀ, a function is f₀ + Φw at X and
    f₀(x) + Θ(x, X) Q w/√λ at other points, and its weights follow dw/dτ = −Φᵀ∇L from w = 0. The equation is
    solved in float64 to a relative tolerance of 1e-10 per step; results have the dtype of the inputs. With
    momentum it is w'' = −(1 − momentum)/√learning_rate · w' − Φᵀ∇L in the time √learning_rate·t.

    L is a loss, such as −log p(y | f), so that training decreases it. Each start has its own path: unlike for
    the squared loss (`Flow`), the path of the mean is not the mean of the paths.

    Args:
        source: The tangent kernel, and the function at the start.
        x: The training points X.
        y: Their targets.
        loss: A likelihood, or a function of outputs (N, C) and targets.
        descent: The learning rate and the momentum.
        num_outputs: The number of outputs C.
        dtype: The dtype of the results.
        modes: The eigendecomposition of Θ(X, X).
    """

    source: Source = field(repr=False)
    x: Inputs = field(repr=False)
    y: Tensor = field(repr=False)
    loss: Loss
    descent: Descent
    num_outputs: int
    dtype: torch.dtype
    modes: Modes = field(repr=False)

    @torch.no_grad()
    def path(self, t: Times, x: Inputs | None = None, *, start: Mean | None = None) -> Tensor:
        """Return the function that begins as `start`, at each time t.

        Cost: O(R²) per evaluation of ∇L, with some dozens of evaluations per unit of λ_max·τ/(NC), then one
        product with Θ(x, X) for all times.

        Args:
            t: A time, or an array of times in any order. They must be finite, since most losses other than
                the squared one have no minimum.
            x: M points. None takes the training points.
            start: The function at t = 0, from N points to (N, C). None is zero, or the network itself if one
                was linearized.

        Returns:
            The values of the function: (…, M, C).

        Raises:
            InputError: If a time is infinite or negative.
            Net2GPError: If the solver cannot follow the training to this time.
        """
        times, shape = parse_times(t, self.y.device)
        if bool(times.isinf().any()):
            raise InputError(
                "t must be finite for a loss that is integrated step by step. Pass a late time, e.g. "
                "t=1e4, or use gradient_flow for the squared loss."
            )
        begins: Any = self.source.start if start is None else start
        weights = self._integrate(
            begin_at(begins, self.x, self.num_outputs), times
        )  # (T, R, columns)
        if x is None:
            change = self._features @ weights
        else:
            self.source.check(x)
            check_like(x, self.x)
            learned = self.modes.values > 0
            inverse = torch.where(learned, self.modes.values.clamp(min=1e-300).rsqrt(), 0.0)
            alpha = (self.modes.Q * inverse) @ weights
            product = self.source.matmul(Part.NTK, x, self.x, alpha.movedim(0, 1).flatten(1))
            change = product.unflatten(1, (len(times), -1)).movedim(1, 0)
        points = num_rows(self.x if x is None else x)
        begin = begin_at(begins, self.x if x is None else x, self.num_outputs)
        result = begin + change.reshape(len(times), points, self.num_outputs)
        return result.reshape(*shape, points, self.num_outputs).to(self.dtype)

    def value(self, f: Tensor) -> Tensor:
        """Return the loss L(f), which is −(1/NC) Σ log p(y | f) for a likelihood.

        Args:
            f: Outputs at the training points: (N, C).

        Returns:
            The loss, a scalar.
        """
        y = self.y.to(f.dtype) if self.y.is_floating_point() else self.y
        if isinstance(self.loss, Likelihood):
            return -self.loss.log_prob(f, y).sum() / f.numel()
        return self.loss(f, y)

    @property
    def _features(self) -> Tensor:
        return self.modes.Q * self.modes.values.sqrt()

    def _integrate(self, begin: Tensor, times: Tensor) -> Tensor:
        """The weights at each time: (T, R, columns), float64."""
        Phi, momentum = self._features, self.descent.momentum is not None
        gradient_at = _gradient_of(self.loss, self.y)
        shape = (len(Phi), 1 if self.source.joint else self.num_outputs)
        count, device = shape[0] * shape[1], begin.device

        def force(weights: np.ndarray) -> np.ndarray:
            w = torch.from_numpy(weights).to(device).reshape(shape)
            gradient = gradient_at(begin + (Phi @ w).reshape(begin.shape))
            pulled = -(Phi.mT @ gradient.reshape(shape)).reshape(-1).cpu().numpy()
            if not np.isfinite(pulled).all():  # the solver would never end
                raise InputError(
                    "the gradient of the loss is NaN or infinite on the way. Check the loss at the start, "
                    "and that it is smooth: flow.value(flow.path(0.0))."
                )
            return pulled

        def slope(time: float, state: np.ndarray) -> np.ndarray:
            advance(note=f"{time / float(ends[-1]):.0%} of the time")
            if not momentum:
                return force(state)
            w, v = state[:count], state[count:]
            return np.concatenate([v, force(w) - self.descent.damping * v])

        ends, index = torch.unique(self.descent.scaled(times), return_inverse=True)
        state = np.zeros(count * (2 if momentum else 1))
        with progress("gradient flow") as advance:
            # Fast directions that have died out make the equation stiff at long times, which LSODA detects.
            # With momentum they oscillate instead, and an explicit method is better.
            method = "DOP853" if momentum or count > STIFF_SIZE else "LSODA"
            states = _solve(slope, state, ends.cpu().numpy(), method)
        return torch.from_numpy(states[:, :count]).to(device).reshape(-1, *shape)[index]


def _gradient_of(loss: Loss, y: Tensor) -> Callable[[Tensor], Tensor]:
    """∇L as a function of outputs (N, C), in float64."""
    y = y.double() if y.is_floating_point() else y
    if isinstance(loss, Likelihood):
        residual = loss.residual
        return lambda f: -residual(f, y) / f.numel()

    def gradient(f: Tensor) -> Tensor:
        with ordinary_tensors(), torch.enable_grad():
            f = f.detach().clone().requires_grad_()
            value = loss(f, y)
            if not isinstance(value, Tensor) or value.dim() != 0 or not value.requires_grad:
                raise InputError(
                    "loss must give one differentiable number for outputs (N, C) and targets, but gives "
                    f"{describe(value)}. Average it, e.g. loss(f, y).mean()."
                )
            return torch.autograd.grad(value, f)[0]

    return gradient


def _solve(
    slope: Callable[[float, np.ndarray], np.ndarray],
    state: np.ndarray,
    ends: np.ndarray,
    method: str,
) -> np.ndarray:
    """The solution at increasing times from zero: (T, size)."""
    if ends[-1] == 0.0:
        return state[None]
    found = solve_ivp(
        slope,
        (0.0, ends[-1]),
        state,
        method=method,
        t_eval=ends,
        rtol=RELATIVE_TOLERANCE,
        atol=ABSOLUTE_TOLERANCE,
    )
    if not found.success or not np.isfinite(found.y).all():
        raise Net2GPError(
            f"the training could not be followed to t: {found.message} Check that the loss is finite "
            "and smooth, or ask for earlier times."
        )
    return np.ascontiguousarray(found.y.T)


@torch.no_grad()
def loss_flow(
    network: nn.Module | Linearized | KernelPair,
    data: Data,
    loss: Loss,
    *,
    weight_var: Variances | None = None,
    bias_var: Variances | None = None,
    learning_rate: float = 1.0,
    momentum: float | None = None,
) -> LossFlow:
    """Train a network by gradient flow on any loss, in function space.

    Cost: one eigendecomposition, O(N³), or O((NC)³) for linearized networks; see `LossFlow.path`.

    Args:
        network: A module at infinite width, a pair of kernels, or `linearize(network)`, as in
            `gradient_flow`.
        data: (x, y), or a DataLoader.
        loss: A likelihood, whose −log p(y | f) is averaged over the N·C outputs, so that `Gaussian(1.0)` is
            the squared loss of `gradient_flow`; or a function loss(f, y) of outputs (N, C) to a scalar, which
            is not divided: `torch.nn.functional.cross_entropy` is the mean over points.
        weight_var: The prior variance of the weights, as in `infinite_width`. Only for modules.
        bias_var: The prior variance of the biases, as in `infinite_width`. Only for modules.
        learning_rate: The learning rate of gradient descent, whose steps are the unit of time.
        momentum: The momentum of gradient descent, or None.

    Returns:
        The flow: the path of any function in training.

    Raises:
        InputError: If the loss is neither a likelihood nor a function, or if the targets do not suit it.
        TooLarge: If the kernels do not fit into memory.

    >>> from net2gp.likelihoods import Categorical
    >>> from net2gp.linear import linearize
    >>> network = nn.Linear(1, 2).double().eval()
    >>> x = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    >>> flow = loss_flow(linearize(network), (x, torch.tensor([0, 1])), Categorical())
    >>> flow.path(100.0).argmax(1)
    tensor([0, 1])

    References: Jacot et al., Neural tangent kernel, NeurIPS 2018; Lee et al., Wide neural networks of any
    depth evolve as linear models under gradient descent, NeurIPS 2019.
    """
    descent = make_descent(learning_rate, momentum)
    if isinstance(loss, type) or not (isinstance(loss, Likelihood) or callable(loss)):
        raise InputError(
            "loss must be a likelihood such as Categorical(), or a function of outputs and targets, but "
            f"is {describe(loss)}."
        )
    source = source_of(network, {"weight_var": weight_var, "bias_var": bias_var})
    x, y = own(*gather(data))
    source.check(x)
    source = source.at(x)
    N, C = num_rows(x), count_outputs(source, x) or _outputs_of(loss, y)
    R = N * C if source.joint else N
    check_memory(5 * 8 * R**2, y.device, f"an eigendecomposition of size {R}", "pass fewer points")
    kernel = source.both(x)[1]
    matrix = check_matrix(kernel, "the tangent kernel", R)
    modes = decompose(matrix, 0.0, kernel.dtype, N * C)
    flow = LossFlow(source, x, y, loss, descent, C, result_dtype(x, y), modes)
    like = torch.zeros(N, C, dtype=flow.dtype, device=tensors(x)[0].device)
    check_dtype_and_device(y, "y", like, "x")
    if isinstance(loss, Likelihood):
        loss.check(like, y)
    return flow


def _outputs_of(loss: Loss, y: Tensor) -> int:
    """The number of outputs C for kernels of independent outputs."""
    if isinstance(loss, Likelihood):
        return num_outputs(loss, y)
    if y.dim() > 1:
        return y.shape[1]
    return 1 if y.is_floating_point() else max(2, int(y.max()) + 1)
