"""A trained network, linearized in its parameters around the point where it stands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import jvp

from net2gp.calling import picked
from net2gp.errors import InputError, NetworkError
from net2gp.inputs import check_inputs, describe, follows, map_inputs, tensors
from net2gp.linear.forward.evaluation import accepts, call, differentiable, pushforward
from net2gp.linear.forward.kinds import check_kind, check_output, check_result
from net2gp.linear.forward.modes import check_layers, in_eval_mode
from net2gp.linear.jacobians.jacobian import jacobian
from net2gp.linear.jacobians.passes import pulling, pushed
from net2gp.linear.jacobians.tangent import TangentKernel
from net2gp.linear.jacobians.trace import TraceKernel
from net2gp.linear.parameters import (
    Patterns,
    PriorVar,
    check_given,
    check_tangent,
    check_values,
    choose,
    expand_prior,
    free_names,
    kept,
)
from net2gp.linear.planning.plans import Plans
from net2gp.linear.precision import (
    HALF,
    check_gradients,
    check_kinds,
    checked,
    coarsest,
    input_dtypes,
    narrowed,
    widened,
)
from net2gp.types import Inputs, Params

__all__ = [
    "Linearized",
    "Output",
    "Patterns",
    "PriorVar",
    "choose",
    "example_of",
    "expand_prior",
    "linearize",
]

Output = Callable[[Any], Tensor]
"""What picks the tensor of outputs from all that a network returns."""


@dataclass(frozen=True, eq=False)
class Linearized:
    """The first-order Taylor expansion of a network in its parameters, f(x; θ*) + J(x)(θ − θ*).

    Use `linearize` to make one. Parameters and buffers are copies, so that training the network further
    does not change this value; only parameters with `requires_grad=False` that are not chosen are shared
    with the network. Outputs are flattened to (N, C).

    Args:
        network: The module, which provides the code; its own parameter values are not used.
        params: The chosen parameters θ* by name, in which the network is linearized.
        frozen: All other parameters and the buffers, by name.
        output: Picks the tensor of outputs from what the network returns; None if it returns a tensor.
        plans: What is known of the network for inputs of each shape; copies share it.
        stored: The dtypes in which the network takes chosen parameters of half precision, by name; `params`
            has their values in float32.
    """

    network: nn.Module = field(repr=False)
    params: Params = field(repr=False)
    frozen: Params = field(repr=False)
    output: Output | None = field(default=None, repr=False)
    plans: Plans = field(default_factory=Plans, repr=False)
    stored: dict[str, torch.dtype] = field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        return f"Linearized({type(self.network).__name__}, {self.num_params} parameters)"

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({"plans": Plans(), "stored": {}, **state})
        self.trust()

    def trust(self) -> None:
        """Take it for granted that training points use all parameters.

        This holds for a linearization that was saved or pickled with a posterior, since it was checked then.
        """
        self.plans.reached.update(name for name, _ in self.network.named_parameters())

    @property
    def num_params(self) -> int:
        """Return P, the number of chosen parameters."""
        return sum(value.numel() for value in self.params.values())

    @property
    def example(self) -> Tensor:
        """Return one of the parameters, to read dtype and device from."""
        return next(iter(self.params.values()))

    @property
    def rounding(self) -> torch.dtype:
        """Return the dtype that bounds the digits of a pass: half precision if any of it has that."""
        if self.stored:
            return next(kind for kind in HALF if kind in self.stored.values())
        return coarsest(self.frozen.values(), self.example.dtype)

    def __call__(self, x: Inputs) -> Tensor:
        """Compute the network's own outputs f(x; θ*); differentiable in `x`.

        Args:
            x: N inputs: a tensor, or a tuple or dict of tensors with N rows each.

        Returns:
            The outputs, (N, C).
        """
        self.check(x)
        with torch.set_grad_enabled(follows(x)), accepts(x):
            return self.evaluate(self.params, x)

    def check(self, x: Inputs, name: str = "x") -> None:
        """Check that `x` is finite and has the network's dtype and device.

        Args:
            x: The inputs.
            name: What messages call them.

        Raises:
            InputError: If they do not.
        """
        check_inputs(x, name)
        check_kinds(self, x, name)

    def evaluate(self, params: Params, x: Inputs) -> Tensor:
        """Compute f(x; θ) of the network itself at other values of the chosen parameters.

        The network is in eval mode, and the result is differentiable with torch.func and with autograd.

        Args:
            params: The values θ, by name.
            x: N inputs.

        Returns:
            The outputs, (N, C).

        Raises:
            NetworkError: If the network does not return one real tensor whose rows are the points, or is in
                training mode and does something else there.
        """
        with in_eval_mode(self, x):
            return self.run(params, x)

    def run(self, params: Params, x: Inputs) -> Tensor:
        """Compute what `evaluate` does, in the mode that the network is in.

        Args:
            params: The values θ, by name.
            x: N inputs.

        Returns:
            The outputs, (N, C).

        Raises:
            NetworkError: If the network does not return one real tensor whose rows are the points.
        """
        own = map_inputs(x, torch.clone)  # a network may change its inputs in place
        keywords = dict(own) if isinstance(own, Mapping) else {}
        arguments: tuple[Tensor, ...] = () if isinstance(own, Mapping) else tuple(tensors(own))
        values = {**self.frozen, **narrowed(params, self.stored)}
        with differentiable(self.network, follow=follows(x)):
            out = picked(call(self.network, values, arguments, keywords), self.output)
        check_result(out, x, self.rounding)
        if self.rounding in HALF:
            again = lambda: call(self.network, values, arguments, keywords)
            out = checked(self, out, again).to(self.example.dtype)
        out = out.reshape(out.shape[0], -1)
        return out.detach() if out.requires_grad and not torch.is_grad_enabled() else out

    def jvp(self, x: Inputs, v: Params) -> Tensor:
        """Compute J(x) v in one forward-mode pass.

        Args:
            x: N inputs.
            v: A value per chosen parameter, by name, each with the parameter's shape.

        Returns:
            The products, (N, C).

        >>> linearized = linearize(nn.Linear(2, 1).eval())
        >>> linearized.jvp(torch.ones(3, 2), {"weight": torch.ones(1, 2), "bias": torch.ones(1)})
        tensor([[3.],
                [3.],
                [3.]])
        """
        self.check(x)
        check_tangent(v, self.params)
        with accepts(x):
            return pushed(self, x, v)

    def vjp(self, x: Inputs, u: Tensor) -> Params:
        """Compute J(x)ᵀ u in one backward pass.

        Args:
            x: N inputs.
            u: A tensor of the outputs' shape, (N, C).

        Returns:
            A value per chosen parameter, by name, each with the parameter's shape.

        Raises:
            InputError: If `u` has another shape than the outputs.
        """
        self.check(x)
        with accepts(x):
            out, pull = pulling(self, x)
        if u.shape != out.shape:
            raise InputError(
                f"u must have the shape {tuple(out.shape)} of the output, but is {describe(u)}."
            )
        found = pull(u.to(out.dtype))
        check_gradients(self, {name: [value] for name, value in found.items()})
        return found

    def jacobian(self, x: Inputs) -> Tensor:
        """Compute the Jacobian J(x). It takes memory for N·C·P numbers; `kernel` does without it.

        Args:
            x: N inputs.

        Returns:
            The Jacobian, (N, C, P), with columns in the order of `params`.
        """
        return jacobian(self, x)

    def taylor(self, x: Inputs, params: Params, order: int = 1) -> Tensor:
        """Compute the Taylor polynomial Σ_k dᵏ/dtᵏ f(x; θ* + t(θ − θ*))|₀ / k! by nested forward mode.

        Args:
            x: N inputs.
            params: The values θ at which the polynomial is taken, by name.
            order: The degree; 1 is the linearized network itself, whose error is O(‖θ − θ*‖²).

        Returns:
            The values of the polynomial, (N, C).

        Raises:
            InputError: If `order` is negative, or `params` does not fit the network.
        """
        self.check(x)
        check_tangent(params, self.params)
        if order < 0:
            raise InputError(f"order must be 0 or more, but is {order}. Pass order=1.")
        step = {name: params[name] - value for name, value in self.params.items()}
        term: Callable[[Params], Tensor] = lambda p: self.evaluate(p, x)
        total, factorial = term(self.params), 1.0
        for k in range(1, order + 1):
            factorial *= k
            slope = pushed(self, x, step) if k == 1 else pushforward(term, self.params, step)
            total = total + slope / factorial
            term = _directional(term, step)
        return total

    def kernel(self, prior_var: PriorVar = 1.0) -> TangentKernel:
        """Return J diag(prior_var) Jᵀ, the covariance of all outputs under θ ~ N(θ*, prior_var).

        Args:
            prior_var: A number, or a mapping from parameter names or patterns to numbers or to tensors of
                the parameter's shape: `{"*": 1.0, "*.bias": 0.1}`. The last pattern that matches counts.

        Returns:
            The tangent kernel; nothing is computed yet.
        """
        return TangentKernel(self, expand_prior(prior_var, self.params))

    def trace_kernel(self, prior_var: PriorVar = 1.0) -> TraceKernel:
        """Return (1/C) Σ_c J_c diag(prior_var) J_cᵀ, one covariance shared by independent outputs.

        It serves tasks with another number of outputs than the network.

        Args:
            prior_var: The prior variances of the parameters, as in `kernel`.

        Returns:
            The kernel; nothing is computed yet.
        """
        return TraceKernel(self.kernel(prior_var))

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Linearized:
        """Return the same linearization with its tensors on another device or in another dtype.

        Args:
            device: The device; None keeps it.
            dtype: The dtype of floating-point tensors; None keeps it.

        Returns:
            A new linearization.
        """

        def move(values: Params) -> Params:
            return {
                name: value.to(device=device, dtype=dtype if value.is_floating_point() else None)
                for name, value in values.items()
            }

        params, stored = widened(move(self.params))
        stored = stored if dtype is not None else self.stored
        return replace(self, params=params, frozen=move(self.frozen), stored=stored)

    def flatten(self, params: Params) -> Tensor:
        """Concatenate values of the chosen parameters.

        Args:
            params: A value per parameter, by name; all may have one more axis of length k at the end.

        Returns:
            The numbers in the order of the parameters, (P,), or (P, k) with the additional axis.
        """
        lead = {name: value.dim() for name, value in self.params.items()}
        return torch.cat(
            [
                params[name].reshape(value.numel(), *params[name].shape[lead[name] :])
                for name, value in self.params.items()
            ]
        )

    def unflatten(self, vector: Tensor) -> Params:
        """Invert `flatten`.

        Args:
            vector: P numbers, (P,).

        Returns:
            A value per chosen parameter, by name, each with the parameter's shape.
        """
        pieces = vector.split([value.numel() for value in self.params.values()])
        return {
            name: piece.reshape(value.shape)
            for (name, value), piece in zip(self.params.items(), pieces, strict=True)
        }


def linearize(
    network: nn.Module,
    params: Params | None = None,
    *,
    only: Patterns | None = None,
    output: Output | None = None,
) -> Linearized:
    """Linearize `network` in its parameters: f(x; θ) ≈ f(x; θ*) + J(x)(θ − θ*).

    The network is evaluated in eval mode. It must be in eval mode if it does something else in training mode,
    since dropout and batch statistics have no single Jacobian.
    The cost is a copy of the parameters.

    Args:
        network: The trained network.
        params: Values that replace the network's own, by name; None keeps all.
        only: Chooses parameters by name pattern ("head.*"). A list adds up, and a pattern that starts with
            "!" takes away: ["*", "!embed.*"]. None chooses those with `requires_grad`, or all if none has it.
        output: Picks the tensor of outputs from what the network returns, for example
            `lambda out: out.last_hidden_state[:, 0]`; None takes a tensor, the entry `logits`, or the only
            tensor that there is.

    Returns:
        The linearized network.

    Raises:
        NetworkError: If the network has no parameters, or parameters that are not finite or of mixed
            dtypes or devices, or a layer such as dropout that is in training mode.
        InputError: If `params` or `only` does not fit the network's parameters.

    >>> network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).eval()
    >>> linearize(network, only="2.*").num_params
    5

    Reference: Maddox et al., Fast adaptation with linearized neural networks, AISTATS 2021.
    """
    network = check_kind(network)
    check_layers(network)
    check_output(output)
    named = dict(network.named_parameters())
    if not named:
        raise NetworkError(
            f"the network ({type(network).__name__}) has no parameters, so there is nothing to linearize. "
            "Pass a module with nn.Parameter weights."
        )
    given = check_given(params, named)
    chosen = free_names(named) if only is None else choose(list(named), only)
    values = {name: given.get(name, named[name]).detach() for name in chosen}
    check_values(values)
    with torch.inference_mode(False):  # copies made in inference mode could not be differentiated
        frozen = kept(network, given, chosen)
        params, _ = widened({name: value.clone() for name, value in values.items()})
    stored = {name: named[name].dtype for name in chosen if named[name].dtype in HALF}
    return Linearized(network, params, frozen, output, stored=stored)


def example_of(network: nn.Module | Linearized) -> Tensor | None:
    """Return a tensor with the dtype and device of inputs of a network, or None if there is none."""
    if isinstance(network, Linearized):
        return network.example.new_empty(0, dtype=input_dtypes(network)[0])
    values = network.parameters() if isinstance(network, nn.Module) else ()
    return next((value for value in values if value.is_floating_point()), None)


def _directional(function: Callable[[Params], Tensor], step: Params) -> Callable[[Params], Tensor]:
    return lambda params: jvp(function, (params,), (step,))[1]
