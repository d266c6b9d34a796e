"""One pass of a network whose weights are Gaussian, with as little noise in its gradients as possible."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from net2gp.calling import called_with
from net2gp.errors import NetworkError
from net2gp.inputs import rows, tensors
from net2gp.linalg.chance import normal_like
from net2gp.linear.linearized import Linearized
from net2gp.types import Inputs, Params

Estimator = Literal["local", "flipout", "weights"]
"""How a pass draws: outputs of layers, weights with signs per point, or weights for all points."""

LINEAR: tuple[Callable[..., Tensor], ...] = (F.linear,)
CONVOLUTIONS: tuple[Callable[..., Tensor], ...] = (
    *(torch.conv1d, torch.conv2d, torch.conv3d),
    *(torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d),
)
LAYERS = frozenset((*LINEAR, *CONVOLUTIONS))
"""The functions that map inputs, a weight and a bias to outputs, and are linear in the weight."""

_PROPERTIES = ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "requires_grad")
HARMLESS = frozenset(
    (
        *(vars(torch._C.TensorBase)[name].__get__ for name in _PROPERTIES),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex),
    )
)
"""What asks a tensor for its form and not for its values."""


@dataclass(frozen=True, eq=False)
class Spread:
    """How wide the law of each parameter is.

    Args:
        values: Variances σ² or standard deviations σ, by name.
        squared: Whether they are variances. What is not given is computed where it is needed.
    """

    values: Params
    squared: bool

    def deviation(self, name: str) -> Tensor:
        """The standard deviation of a parameter."""
        return self.values[name].sqrt() if self.squared else self.values[name]

    def variance(self, name: str) -> Tensor:
        """The variance of a parameter."""
        return self.values[name] if self.squared else self.values[name].square()


@dataclass(frozen=True)
class Uses:
    """How a network uses its parameters, as two passes of a few points showed.

    Args:
        once: The parameters that a linear or convolutional layer uses once per pass, with the points on the
            first axis.
        hidden: Whether some parameter is used where torch does not show it, such as in an autograd.Function.
    """

    once: frozenset[str]
    hidden: bool


class _Seeing(TorchFunctionMode):
    """Finds the stochastic parameters among the arguments of every function of torch."""

    def __init__(self, marks: Params) -> None:
        super().__init__()
        self.names = {id(value): name for name, value in marks.items()}
        self.marks = marks

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in HARMLESS:
            return func(*args, **kwargs)
        if func in LAYERS:
            inputs, weight, bias, rest, named = _arguments(args, kwargs)
            if id(inputs) not in self.names:
                found = self.layer(func, (inputs, weight, bias), rest, named)
                if found is not None:
                    return found
        args = tuple(self._replaced(one) for one in args)
        return func(*args, **{name: self._replaced(one) for name, one in kwargs.items()})

    def _replaced(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            name = self.names.get(id(value))
            return value if name is None else self.drawn(name)
        if type(value) in (tuple, list):
            return type(value)(self._replaced(one) for one in value)
        return value

    def layer(
        self,
        func: Callable[..., Tensor],
        parts: tuple[Tensor, Tensor, Tensor | None],
        rest: tuple[Any, ...],
        named: dict[str, Any],
    ) -> Tensor | None:
        """The output of a layer, or None if its parameters are to be drawn."""
        raise NotImplementedError

    def drawn(self, name: str) -> Tensor:
        """A draw of a parameter, the same one for the whole pass."""
        raise NotImplementedError


def _arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Inputs, weight and bias of a layer, and its other arguments, however they were passed."""
    own = dict(zip(("input", "weight", "bias"), args, strict=False)) | {
        name: value for name, value in kwargs.items() if name in ("input", "weight", "bias")
    }
    named = {name: value for name, value in kwargs.items() if name not in own}
    return own["input"], own["weight"], own.get("bias"), args[3:], named


def fits(func: Callable[..., Tensor], inputs: Tensor, weight: Tensor, count: int) -> bool:
    """Whether the first axis of a layer's inputs counts the points."""
    dims = inputs.dim() == weight.dim() if func in CONVOLUTIONS else inputs.dim() >= 2
    return dims and inputs.shape[0] == count


class _Counting(_Seeing):
    """Notes for each parameter whether its uses are those of a layer with points on the first axis."""

    def __init__(self, marks: Params, values: Params, count: int) -> None:
        super().__init__(marks)
        self.values, self.count = values, count
        self.seen: dict[str, list[bool]] = {name: [] for name in marks}
        self.without_gradient = False

    def _note(self, name: str, good: bool) -> Tensor:
        # the forward of an autograd.Function has no gradients, so its backward would not know of a draw
        self.without_gradient |= not torch.is_grad_enabled()
        self.seen[name].append(good)
        return self.values[name]

    def layer(
        self,
        func: Callable[..., Tensor],
        parts: tuple[Tensor, Tensor, Tensor | None],
        rest: tuple[Any, ...],
        named: dict[str, Any],
    ) -> Tensor | None:
        """Note the uses and compute the layer at the values of the parameters."""
        inputs, weight, bias = parts
        good = fits(func, inputs, weight, self.count)
        own = []
        for value in (weight, bias):
            name = self.names.get(id(value))
            own.append(value if name is None else self._note(name, good))
        return func(inputs, *own, *rest, **named)

    def drawn(self, name: str) -> Tensor:
        """Note another use."""
        return self._note(name, False)


def find_uses(architecture: Linearized, x: Inputs) -> Uses:
    """Run the network at two and at three copies of the first point and see how it uses its parameters.

    The parameters are replaced by NaN, and where a function of torch takes one, by its value. If a NaN comes
    out, some parameter was used without such a function.
    """
    values = architecture.params
    once = set(values)
    for count in (2, 3):
        copies = torch.zeros(count, dtype=torch.long, device=tensors(x)[0].device)
        marks = {name: torch.full_like(value, float("nan")) for name, value in values.items()}
        counting = _Counting(marks, values, count)
        try:
            with torch.enable_grad(), counting:
                out = run(architecture, marks, rows(x, copies)).detach()
        except RuntimeError:  # code that cannot run in this mode draws weights outside of it
            return Uses(frozenset(), True)
        if counting.without_gradient or not bool(out.isfinite().all()):
            return Uses(frozenset(), True)
        once &= {name for name, seen in counting.seen.items() if seen == [True]}
    return Uses(frozenset(once), False)


def run(architecture: Linearized, params: Params, x: Inputs) -> Tensor:
    """The outputs (N, C) in the mode that the network is in, without checks."""
    values = {**architecture.frozen, **params}
    return called_with(architecture.network, values, x, architecture.output)


class NoisyPass(_Seeing):
    """Runs a network within it with θ ~ N(μ, diag σ²), drawn independently for each point where possible.

    A linear layer of N points has the outputs W x_n + b, which are Gaussian: "local" draws them by their mean
    and variance. A layer that uses its weights at several places of a point (a convolution, or a linear layer
    along a sequence) has outputs that depend on each other, and so both "local" and "flipout" draw
    W_n = μ + (σ ∘ E) ∘ r_n s_nᵀ there, with one E for all points and random signs r_n and s_n. All other
    parameters are drawn once for all points.

    Args:
        means: The means μ, by name; pass these same tensors as the parameters of the network.
        spread: How wide their laws are.
        uses: How the network uses its parameters.
        estimator: "local" or "flipout".
        count: The number of points N.
        generator: Draws the noise.

    References: Kingma et al., Variational dropout and the local reparameterization trick, NeurIPS 2015; Wen
    et al., Flipout, ICLR 2018.
    """

    def __init__(
        self,
        means: Params,
        spread: Spread,
        uses: Uses,
        estimator: Estimator,
        count: int,
        generator: torch.Generator,
    ) -> None:
        super().__init__(means)
        self.spread, self.uses, self.estimator = spread, uses, estimator
        self.count, self.generator = count, generator
        self.draws: Params = {}
        self.left = set(uses.once)

    def drawn(self, name: str) -> Tensor:
        """A draw of a parameter, the same one for the whole pass."""
        if name not in self.draws:
            if name in self.uses.once and name not in self.left:
                raise NetworkError(_unlike(name))
            self.left.discard(name)
            mean = self.marks[name]
            noise = normal_like(mean, self.generator)
            self.draws[name] = mean + self.spread.deviation(name) * noise
        return self.draws[name]

    def layer(
        self,
        func: Callable[..., Tensor],
        parts: tuple[Tensor, Tensor, Tensor | None],
        rest: tuple[Any, ...],
        named: dict[str, Any],
    ) -> Tensor | None:
        """The output of a layer with noise of its own for each point; None if the parameters are drawn."""
        inputs, weight, bias = parts
        if not fits(func, inputs, weight, self.count):
            return None
        weight, wide = self._own(weight)
        bias, high = (None, None) if bias is None else self._own(bias)
        if wide is None and high is None:
            return None
        if self.estimator == "local" and func in LINEAR and inputs.dim() == 2:
            return self._local(inputs, weight, bias, wide, high)
        mean = func(inputs, weight, bias, *rest, **named)
        if wide is not None:
            shape = (self.count, inputs.shape[1], *[1] * (inputs.dim() - 2))
            out = (self.count, mean.shape[1], *[1] * (mean.dim() - 2))
            if func in LINEAR:
                shape = (self.count, *[1] * (inputs.dim() - 2), inputs.shape[-1])
                out = (self.count, *[1] * (mean.dim() - 2), mean.shape[-1])
            noise = self.spread.deviation(wide) * normal_like(weight, self.generator)
            signed = inputs * self._signs(inputs, shape)
            mean = mean + func(signed, noise, None, *rest, **named) * self._signs(mean, out)
        if high is not None:
            places = [1] * (mean.dim() - 2)
            own = self.spread.deviation(high)
            noise = own * normal_like(mean, self.generator, (self.count, len(own)))
            order = (self.count, *places, len(own)) if func in LINEAR else (*noise.shape, *places)
            mean = mean + noise.reshape(order)
        return mean

    def _local(
        self,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        wide: str | None,
        high: str | None,
    ) -> Tensor:
        mean = F.linear(inputs, weight, bias)
        if wide is None:
            assert high is not None
            return mean + self.spread.deviation(high) * normal_like(mean, self.generator)
        squares = None if high is None else self.spread.variance(high)
        variance = F.linear(inputs.square(), self.spread.variance(wide), squares)
        # At inputs of zero a root of zero would have an infinite derivative, and infinity times zero is NaN.
        deviation = variance.add_(torch.finfo(variance.dtype).tiny).sqrt_()
        return torch.addcmul(mean, deviation, normal_like(mean, self.generator))

    def _own(self, value: Tensor) -> tuple[Tensor, str | None]:
        """The mean and the name of a parameter with noise per point, or a draw and None."""
        name = self.names.get(id(value))
        if name is None:
            return value, None
        if name not in self.uses.once:
            return self.drawn(name), None
        if name not in self.left:
            raise NetworkError(_unlike(name))
        self.left.discard(name)
        return value, name

    def _signs(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        kind: Any = {"generator": self.generator, "device": like.device, "dtype": like.dtype}
        return 2 * torch.randint(0, 2, shape, **kind) - 1


def _unlike(name: str) -> str:
    return (
        f"the network uses '{name}' more than once in this pass, but once for other inputs. Pass "
        'estimator="weights".'
    )
