"""A trained network, linearized in its parameters around the point where it stands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import jvp

from net2gp.errors import InputError, NetworkError, check_dtype_and_device
from net2gp.inputs import check_inputs, describe, follows, map_inputs, num_rows, tensors
from net2gp.linear.forward.evaluation import (
    accepts,
    call,
    check_eval_mode,
    differentiable,
    pushforward,
)
from net2gp.linear.forward.kinds import check_kind
from net2gp.linear.jacobians.jacobian import jacobian
from net2gp.linear.jacobians.passes import pulling, pushed
from net2gp.linear.jacobians.tangent import TangentKernel
from net2gp.linear.jacobians.trace import TraceKernel
from net2gp.linear.planning.plans import Plans
from net2gp.types import Inputs, Params

Output = Callable[[Any], Tensor]
Patterns = str | Sequence[str]
PriorVar = float | Tensor | Mapping[str, float | Tensor]


@dataclass(frozen=True, eq=False)
class Linearized:
    """f(x; θ) ≈ f(x; θ*) + J(x)(θ − θ*): the first-order Taylor expansion of a network in θ.

    `params` are the chosen parameters θ*, `frozen` all other parameters and buffers; both are copies,
    so that training the network further does not change this value. Outputs are flattened to (N, C).
    `plans` is what was found out about the network for inputs of each shape, which copies share.
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
        """Take it that training points used all parameters: those of a posterior that was kept did."""
        self.plans.reached.update(name for name, _ in self.network.named_parameters())

    @property
    def num_params(self) -> int:
        """P, the number of chosen parameters."""
        return sum(value.numel() for value in self.params.values())

    @property
    def example(self) -> Tensor:
        """One of the parameters, to read dtype and device from."""
        return next(iter(self.params.values()))

    def __call__(self, x: Inputs) -> Tensor:
        """f(x; θ*): (N, C); differentiable in `x`."""
        self.check(x)
        with torch.set_grad_enabled(follows(x)), accepts(x):
            return self.evaluate(self.params, x)

    def check(self, x: Inputs, name: str = "x") -> None:
        """Raise unless `x` is finite and has the network's dtype and device."""
        check_inputs(x, name)
        for value in tensors(x):
            check_dtype_and_device(value, name, self.example, "the network")

    def evaluate(self, params: Params, x: Inputs) -> Tensor:
        """f(x; θ) of the network itself at other values of the chosen parameters: (N, C).

        Differentiable with torch.func and with autograd.
        """
        check_eval_mode(self.network)
        own = map_inputs(x, torch.clone)  # which the network may change in place
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
        """J(x) v: (N, C), one forward-mode pass.

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
        """J(x)ᵀ u for u of shape (N, C): a value for each chosen parameter, one backward pass."""
        self.check(x)
        with accepts(x):
            out, pull = pulling(self, x)
        if u.shape != out.shape:
            raise InputError(
                f"u must have the shape {tuple(out.shape)} of the output, but is {describe(u)}."
            )
        return pull(u.to(out.dtype))

    def jacobian(self, x: Inputs) -> Tensor:
        """J(x): (N, C, P), columns in the order of `params`. Costs N·C·P memory: see `kernel` instead."""
        return jacobian(self, x)

    def taylor(self, x: Inputs, params: Params, order: int = 1) -> Tensor:
        """The Taylor polynomial of the network in θ around θ*, at θ = `params`: (N, C).

        Σ_k dᵏf/dtᵏ f(x; θ* + t(θ − θ*))|₀ / k!, by nested forward-mode; order 1 is the linearized
        network itself, whose error is O(‖θ − θ*‖²).
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
        """J diag(prior_var) Jᵀ over all outputs: the linearized network's law under θ ~ N(θ*, prior_var).

        `prior_var` is a number, or maps parameter names or patterns to numbers or to tensors of the
        parameter's shape: `{"*": 1.0, "*.bias": 0.1}`; of several patterns that match, the last counts.
        """
        return TangentKernel(self, expand_prior(prior_var, self.params))

    def trace_kernel(self, prior_var: PriorVar = 1.0) -> TraceKernel:
        """(1/C) Σ_c J_c diag(prior_var) J_cᵀ, one covariance shared by independent outputs.

        For tasks with another number of outputs than the network.
        """
        return TraceKernel(self.kernel(prior_var))

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Linearized:
        """The same linearization with its tensors on another device or in another dtype."""

        def move(values: Params) -> Params:
            return {
                name: value.to(device=device, dtype=dtype if value.is_floating_point() else None)
                for name, value in values.items()
            }

        return replace(self, params=move(self.params), frozen=move(self.frozen))

    def flatten(self, params: Params) -> Tensor:
        """The chosen parameters' values one behind the other: (P,), or (P, k) if each ends in an axis k."""
        lead = {name: value.dim() for name, value in self.params.items()}
        return torch.cat(
            [
                params[name].reshape(value.numel(), *params[name].shape[lead[name] :])
                for name, value in self.params.items()
            ]
        )

    def unflatten(self, vector: Tensor) -> Params:
        """The inverse of `flatten`, for a vector of shape (P,)."""
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
    """Linearize `network` in its parameters.

    `params` replaces the network's own values by name. `only` chooses parameters by name pattern
    ("head.*"); a list adds up, and a pattern that starts with "!" takes away: ["*", "!embed.*"].
    `output` picks the tensor from a richer return value.

    The network must be in eval mode: dropout and batch statistics have no single Jacobian.
    Cost: a copy of the parameters.

    >>> network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).eval()
    >>> linearize(network, only="2.*").num_params
    5

    Reference: Maddox et al., Fast adaptation with linearized neural networks, AISTATS 2021.
    """
    check_kind(network)
    check_eval_mode(network)
    named = dict(network.named_parameters())
    if not named:
        raise NetworkError(
            f"the network ({type(network).__name__}) has no parameters, so there is nothing to linearize. "
            "Pass a module with nn.Parameter weights."
        )
    given = _check_given(params, named)
    with torch.inference_mode(False):  # copies made in inference mode could not be differentiated
        everything = {n: given.get(n, value).detach().clone() for n, value in named.items()}
        buffers = {name: value.detach().clone() for name, value in network.named_buffers()}
    chosen = choose(list(everything), only)
    frozen = {name: value for name, value in everything.items() if name not in chosen} | buffers
    values = {name: everything[name] for name in chosen}
    _check_params(values)
    return Linearized(network, values, frozen, output)


def example_of(network: nn.Module | Linearized) -> Tensor | None:
    """A floating parameter, to read dtype and device from; None where there is none to be had."""
    if isinstance(network, Linearized):
        return network.example
    values = network.parameters() if isinstance(network, nn.Module) else ()
    return next((value for value in values if value.is_floating_point()), None)


def _check_given(params: Params | None, named: Mapping[str, Tensor]) -> Params:
    given = dict(params or {})
    for name, value in given.items():
        if name not in named:
            raise InputError(
                f"params has '{name}', which the network does not: {_some(list(named))}."
            )
        if value.shape != named[name].shape:
            raise InputError(
                f"params['{name}'] must have shape {tuple(named[name].shape)}, but is {describe(value)}."
            )
    return given


def _check_params(params: Params) -> None:
    kinds = {(value.dtype, value.device) for value in params.values()}
    if len(kinds) > 1:
        raise NetworkError(
            f"the chosen parameters must share one dtype and device, but have {sorted(map(str, kinds))}. "
            "Convert the network, e.g. network.float(), or choose fewer parameters with only=."
        )
    dtype, device = next(iter(kinds))
    if device.type == "meta":
        raise NetworkError(
            "the network is on the meta device, which holds shapes and no values. Load its weights: "
            "network.to_empty(device='cpu').load_state_dict(weights)."
        )
    if dtype not in (torch.float32, torch.float64):
        raise NetworkError(f"the parameters are {dtype}: use network.float() or network.double().")
    for name, value in params.items():
        if not bool(torch.isfinite(value).all()):
            raise NetworkError(
                f"parameter '{name}' has NaN or infinite values: the training diverged."
            )


def choose(names: list[str], only: Patterns | None) -> list[str]:
    """The names that the patterns pick, in the order of `names`.

    >>> choose(["a.weight", "a.bias", "b.weight"], ["*", "!*.bias"])
    ['a.weight', 'b.weight']
    """
    if only is None:
        return names
    chosen: set[str] = set()
    for pattern in [only] if isinstance(only, str) else only:
        matched = {name for name in names if fnmatchcase(name, pattern.removeprefix("!"))}
        if not matched:
            raise InputError(
                f"only='{pattern}' matches no parameter. The network has: {_some(names)}."
            )
        chosen = chosen - matched if pattern.startswith("!") else chosen | matched
    if not chosen:
        raise InputError(f"only={only!r} leaves no parameter. The network has: {_some(names)}.")
    return [name for name in names if name in chosen]


def expand_prior(prior_var: PriorVar, params: Params) -> Params:
    """A prior variance for each parameter: a scalar tensor, or one of the parameter's own shape."""
    patterns = prior_var if isinstance(prior_var, Mapping) else {"*": prior_var}
    like = next(iter(params.values()))
    expanded: Params = {}
    reach: dict[str, set[str]] = {}
    for pattern, value in patterns.items():
        try:
            variance = torch.as_tensor(value, dtype=like.dtype, device=like.device)
        except (TypeError, ValueError, RuntimeError):
            raise InputError(
                "prior_var must be a number, a tensor, or a dict of these by parameter name, but is "
                f"{value!r} for '{pattern}'. Pass for example prior_var=1.0."
            ) from None
        if not bool(torch.isfinite(variance).all()) or bool((variance < 0).any()):
            raise InputError(
                f"prior_var['{pattern}'] must be finite and not negative, but is {value}."
            )
        matched = [name for name in params if fnmatchcase(name, pattern)]
        if not matched:
            raise InputError(
                f"prior_var has '{pattern}', which matches none of: {_some(list(params))}."
            )
        for name in matched:
            if variance.dim() and variance.shape != params[name].shape:
                raise InputError(
                    f"prior_var for '{name}' must be a number or have the parameter's shape "
                    f"{tuple(params[name].shape)}, but is {describe(variance)}."
                )
            expanded[name] = variance
        reach[pattern] = set(matched)
        for earlier in reach if len(matched) > 1 else ():
            if reach[earlier] < reach[pattern]:
                raise InputError(
                    f"prior_var['{earlier}'] decides nothing: '{pattern}' behind it matches the same "
                    f"parameters and more, and the last counts. Put '{earlier}' behind '{pattern}'."
                )
    missing = [name for name in params if name not in expanded]
    if missing:
        raise InputError(
            f"prior_var leaves out {_some(missing)}. Add a pattern such as '*': 1.0 in front."
        )
    return expanded


def _some(names: list[str], limit: int = 8) -> str:
    more = f", … ({len(names)} in all)" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _directional(function: Callable[[Params], Tensor], step: Params) -> Callable[[Params], Tensor]:
    return lambda params: jvp(function, (params,), (step,))[1]
