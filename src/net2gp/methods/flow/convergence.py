"""How fast gradient descent fits the data, read off the tangent kernel of a network before any step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from net2gp.errors import InputError
from net2gp.linear import Linearized, linearize
from net2gp.methods.flow.flow import Flow
from net2gp.methods.flow.kernels import KernelPair, begin_at
from net2gp.methods.flow.modes import Times, make_descent, parse_times
from net2gp.methods.flow.squared_loss import gradient_flow, max_learning_rate
from net2gp.show import as_html, as_text, number
from net2gp.types import Data


@dataclass(frozen=True, eq=False)
class Convergence:
    """What the tangent kernel says about gradient descent on L = ‖f(X) − y‖² / (2NC).

    With Θ(X, X) = Q diag(λ) Qᵀ, a step of the linearized network multiplies the residual in direction i by
    1 − ηλ_i/(NC), where η is the learning rate. So directions of a large λ are learned first, of a small
    λ last, and those of λ = 0 never; and descent diverges if η is above 2NC/λ_max, or with momentum μ above
    (1 + μ) times that. All of this is exact for a linear model, and close for a network that is so wide that
    its kernel hardly moves. A network whose measured loss differs from `loss` learns features.

    Args:
        flow: The training over time, with its kernel, data, learning rate and momentum.
        energies: The squared residual in each direction, summed over outputs that share it: (R,). For an
            ensemble it is the expectation over its members.
    """

    flow: Flow = field(repr=False)
    energies: Tensor = field(repr=False)

    @property
    def learning_rate(self) -> float:
        """The learning rate η."""
        return self.flow.descent.learning_rate

    @property
    def momentum(self) -> float | None:
        """The momentum, or None."""
        return self.flow.descent.momentum

    @property
    def eigenvalues(self) -> Tensor:
        """The eigenvalues λ of Θ(X, X), increasing and in float64: (R,). Rounding errors are zero."""
        return self.flow.modes.values

    @property
    def rank(self) -> int:
        """How many directions are learned at all: those of λ > 0."""
        return int((self.eigenvalues > 0).sum())

    @property
    def condition_number(self) -> float:
        """λ_max / λ_min, which is infinite if the kernel is singular."""
        return float(self.eigenvalues[-1] / self.eigenvalues[0])

    @property
    def max_learning_rate(self) -> float:
        """The largest stable learning rate, 2(1 + momentum)·NC/λ_max."""
        return max_learning_rate(self.flow)

    @property
    def stable(self) -> bool:
        """Whether the learning rate is below the largest stable one."""
        return self.learning_rate < self.max_learning_rate

    @property
    def time_constants(self) -> Tensor:
        """Steps in which the residual in each direction shrinks by a factor e, in the long run: (R,).

        They are in the order of `eigenvalues`, and infinite where nothing is learned or descent diverges.
        """
        return self.flow.descent.time_constants(self._rates)

    @property
    def gradient_norm(self) -> float:
        """The norm of the gradient of L at the given parameters; for an ensemble its root mean square."""
        return float((self.eigenvalues * self.energies).sum().sqrt()) / self.flow.modes.size

    @property
    def stationarity(self) -> float:
        """‖Jᵀr‖² / (λ_max ‖r‖²) for the residual r, from 0 to 1.

        It is 0 at a stationary point, where no step reduces the loss, and 1 if all of the residual is where
        learning is fastest. A residual of zero counts as stationary.
        """
        pull = (self.eigenvalues * self.energies).sum() / self.eigenvalues[-1]
        return float(pull / self.energies.sum().clamp(min=1e-300))

    def loss(self, steps: Times) -> Tensor:
        """Predict the training loss L = ‖f(X) − y‖² / (2NC). `mse_loss` of torch is twice that.

        Args:
            steps: A number of steps, or an array of them; `math.inf` is the end of training.

        Returns:
            The loss after that many steps, in float64 and in the shape of `steps`.

        Raises:
            InputError: If a number of steps is negative or not whole.
        """
        numbers, shape = parse_times(steps, self.eigenvalues.device, "steps")
        end = numbers.isinf()
        if not bool((end | (numbers == numbers.round())).all()):
            raise InputError(
                "steps must be whole numbers or math.inf, but has a fraction. For times between steps use "
                "gradient_flow(network, data).mean(t), which is the limit of small steps."
            )
        left = self.flow.descent.remaining(self._rates, torch.where(end, 0.0, numbers))
        lost = self.time_constants.isfinite()
        final = torch.where(lost, 0.0, torch.where(self._rates > 0, torch.inf, 1.0))
        left = torch.where(end[:, None], final, left)
        # Where the residual has no part in a direction that diverges, nothing does.
        parts = torch.where(self.energies > 0, left.square() * self.energies, 0.0)
        return parts.sum(1).reshape(shape) / (2 * self.flow.modes.size)

    @property
    def _rates(self) -> Tensor:
        return self.eigenvalues / self.flow.modes.size

    def _facts(self) -> dict[str, str]:
        values, times = self.eigenvalues, self.time_constants
        learned = times[times.isfinite()]
        return {
            "eigenvalues": number(values),
            "rank": f"{self.rank} of {len(values)}",
            "condition_number": number(self.condition_number),
            "max_learning_rate": number(self.max_learning_rate),
            "learning_rate": f"{number(self.learning_rate)}{'' if self.stable else ' (diverges)'}",
            **({} if self.momentum is None else {"momentum": number(self.momentum)}),
            "time_constants": f"{number(learned)} steps" if len(learned) else "none",
            "gradient_norm": number(self.gradient_norm),
            "stationarity": number(self.stationarity),
            "loss": f"{float(self.loss(0)):.4g}, in the end {float(self.loss(torch.inf)):.4g}",
        }

    __repr__, _repr_html_ = as_text, as_html


@torch.no_grad()
def convergence(
    network: nn.Module | Linearized | KernelPair,
    data: Data,
    *,
    learning_rate: float | None = None,
    momentum: float | None = None,
) -> Convergence:
    """Return whether and how fast gradient descent fits the data, from the tangent kernel.

    Full batches and the loss ‖f(X) − y‖² / (2NC) are meant; with `torch.nn.functional.mse_loss`, which is
    twice that, a learning rate has twice the effect. Cost: one Gram matrix and one eigendecomposition,
    O((NC)³), or O(N³) at infinite width.

    Args:
        network: The network at the parameters where training begins, as torch trains it. Pass
            `linearize(network, only=…)` if only some parameters are trained, or `infinite_width(network)` for
            the expectation over an ensemble in NTK parameterization.
        data: (x, y) with real targets, or a DataLoader.
        learning_rate: The learning rate. None takes half of the largest stable one.
        momentum: The momentum of steps v ← momentum·v − learning_rate·∇L, or None.

    Returns:
        Eigenvalues, the largest stable learning rate, time constants and the predicted loss.

    Raises:
        InputError: If the targets are not real numbers (N, C), or a number is out of range.
        NetworkError: If the network cannot be linearized.
        TooLarge: If the kernel does not fit into memory.

    >>> network = nn.Linear(2, 1, bias=False).double().eval()
    >>> _ = nn.init.zeros_(network.weight)
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    >>> found = convergence(network, (x, torch.ones(2, 1, dtype=torch.float64)), learning_rate=0.5)
    >>> found.eigenvalues, found.max_learning_rate
    (tensor([1., 4.], dtype=torch.float64), 1.0)
    >>> found.loss([0, 1, 2])
    tensor([0.5000, 0.1406, 0.0791], dtype=torch.float64)

    References: Jacot et al., Neural tangent kernel, NeurIPS 2018; Lee et al., Wide neural networks of any
    depth evolve as linear models under gradient descent, NeurIPS 2019; Goh, Why momentum really works,
    Distill 2017.
    """
    source = linearize(network) if isinstance(network, nn.Module) else network
    make_descent(1.0 if learning_rate is None else learning_rate, momentum)
    flow = gradient_flow(source, data, momentum=momentum)
    rate = 0.5 * max_learning_rate(flow) if learning_rate is None else float(learning_rate)
    flow = replace(flow, descent=make_descent(rate, momentum))
    begin = begin_at(flow.source.start, flow.x, flow.num_outputs)
    residual = (flow.y.double() - begin).reshape(len(flow.modes.values), -1)
    energies = (flow.modes.Q.mT @ residual).square().sum(1)
    if flow.spread is not None:
        energies = energies + residual.shape[1] * flow.spread.diagonal().clamp(min=0.0)
    return Convergence(flow, energies)
