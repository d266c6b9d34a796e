"""A trained network, linearized in its parameters around the point where it stands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import jvp

from net2gp.errors import InputError, NetworkError, check_dtype_and_device
from net2gp.inputs import check_inputs, describe, follows, map_inputs, num_rows, tensors
from net2gp.linear.forward.evaluation import accepts, call, differentiable, pushforward
from net2gp.linear.forward.kinds import check_kind, check_output
from net2gp.linear.forward.modes import check_layers, in_eval_mode
from net2gp.linear.jacobians.jacobian import jacobian
from net2gp.linear.jacobians.passes import pulling, pushed
from net2gp.linear.jacobians.tangent import TangentKernel
from net2gp.linear.jacobians.trace import TraceKernel
from net2gp.linear.parameters import (
    Patterns,
    PriorVar,
    check_given,
    check_values,
    choose,
    expand_prior,
)
from net2gp.linear.planning.plans import Plans
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
    does not change this value. Outputs are flattened to (N, C).

    Args:
        network: The module, which provides the code; its own parameter values are not used.
        params: The chosen parameters θ* by name, in which the network is linearized.
        frozen: All other parameters and the buffers, by name.
        output: Picks the tensor of outputs from what the network returns; None if it returns a tensor.
        plans: What is known of the network for inputs of each shape; copies share it.
    """

    network: nn.Module = field(repr=False)
    params: Params = field(repr=False)
    frozen: Params = field(repr=False)
    output: Output | None = field(default=None, repr=False)
    plans: Plans = field(default_factory=Plans, repr=False)

    def __repr__(self) -> str:
        return f"Linearized({type(self.network).__name__}, {self.num_params} parameters)"

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({"plans": Plans(), **state})
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
        for value in tensors(x):
            check_dtype_and_device(value, name, self.example, "the network")

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
        with differentiable(self.network, follow=follows(x)):
            out = call(self.network, {**self.frozen, **params}, arguments, keywords)
        out = self.output(out) if self.output is not None else out
        if not isinstance(out, Tensor):
            raise NetworkError(
                f"the network returns {describe(out)}, where one tensor is needed. Pick it with "
                "linearize(network, output=lambda out: out.logits), or out[0] for a tuple."
            )
        if out.dim() == 0 or out.shape[0] != num_rows(x):
            one = " For one point pass x[None]." if tensors(x)[0].dim() == 1 else ""
            raise NetworkError(
                f"the network maps {num_rows(x)} points to {describe(out)}, but the first axis of the "
                f"output must count points.{one} Pick or reshape the output with linearize(..., output=...)."
            )
        if out.dtype in (torch.float16, torch.bfloat16) or out.is_complex():
            raise NetworkError(
                f"the network returns {out.dtype}, but derivatives need float32 or float64 numbers. Leave "
                "out its casts, or pick a real output in full precision with linearize(..., output=...)."
            )
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
        self._check_tangent(v)
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
        return pull(u.to(out.dtype))

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
        self._check_tangent(params)
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

        return replace(self, params=move(self.params), frozen=move(self.frozen))

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

    def _check_tangent(self, v: Params) -> None:
        if not isinstance(v, Mapping) or set(v) != set(self.params):
            came = sorted(v) if isinstance(v, Mapping) else describe(v)
            raise InputError(f"expected a value for each of {sorted(self.params)}, but got {came}.")
        for name, value in self.params.items():
            if v[name].shape != value.shape:
                raise InputError(
                    f"'{name}' must have shape {tuple(value.shape)}, but is {describe(v[name])}."
                )
            check_dtype_and_device(v[name], f"'{name}'", value, "the network")


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
            "!" takes away: ["*", "!embed.*"]. None chooses all.
        output: Picks the tensor of outputs from what the network returns, for example
            `lambda out: out.logits`; None if it returns a tensor.

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
    check_kind(network)
    check_layers(network)
    check_output(output)
    named = dict(network.named_parameters())
    if not named:
        raise NetworkError(
            f"the network ({type(network).__name__}) has no parameters, so there is nothing to linearize. "
            "Pass a module with nn.Parameter weights."
        )
    given = check_given(params, named)
    with torch.inference_mode(False):  # copies made in inference mode could not be differentiated
        everything = {n: given.get(n, value).detach().clone() for n, value in named.items()}
        buffers = {name: value.detach().clone() for name, value in network.named_buffers()}
    chosen = choose(list(everything), only)
    frozen = {name: value for name, value in everything.items() if name not in chosen} | buffers
    values = {name: everything[name] for name in chosen}
    check_values(values)
    return Linearized(network, values, frozen, output)


def example_of(network: nn.Module | Linearized) -> Tensor | None:
    """Return a floating-point parameter, to read dtype and device from, or None if there is none."""
    if isinstance(network, Linearized):
        return network.example
    values = network.parameters() if isinstance(network, nn.Module) else ()
    return next((value for value in values if value.is_floating_point()), None)


def _directional(function: Callable[[Params], Tensor], step: Params) -> Callable[[Params], Tensor]:
    return lambda params: jvp(function, (params,), (step,))[1]
