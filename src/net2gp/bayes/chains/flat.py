"""The log joint of a network and its gradient, as a fast function of flat vectors of many chains."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.func import vmap

from net2gp.bayes.model.model import Batch, Model
from net2gp.bayes.model.prior import FlatPrior, NormalPrior
from net2gp.bayes.model.stacked import StackedMLP, stacked_mlp
from net2gp.calling import called_with, lacks_vmap
from net2gp.inputs import gather, map_inputs, num_rows
from net2gp.likelihoods.targets import shape_targets
from net2gp.likelihoods.traits import has_gaussian_noise, tied_points
from net2gp.linear.forward.evaluation import differentiable, evaluating
from net2gp.linear.parameters import expand_prior
from net2gp.types import Data, Inputs, Params


@dataclass(frozen=True, eq=False)
class FlatModel:
    """A model as a function of K vectors of all P parameters, one per chain, in float64.

    Use `flat_model` to make one. Calls belong inside `with flat.running():`, which keeps the network in eval
    mode and on operations that can be differentiated, once for many calls.

    Args:
        model: The model, with parameters in float64.
        data: All inputs and targets; floating tensors are in float64.
        vectorized: Whether one pass can serve all chains; otherwise the chains run one by one.
        stacked: The closed form of the network's outputs and gradients, if it is a plain perceptron.
        precision: The inverse variances of a Gaussian prior, (P,), or None for another prior.
        offset: What the log density of that Gaussian prior adds at zero.
        noise: The inverse variances of Gaussian noise, (C,) or (N, C), or None for another likelihood.
        level: What the log density of that noise adds at zero, for all data.
    """

    model: Model
    data: Batch
    vectorized: bool = True
    stacked: StackedMLP | None = field(default=None, repr=False)
    precision: Tensor | None = field(default=None, repr=False)
    offset: float = 0.0
    noise: Tensor | None = field(default=None, repr=False)
    level: float = 0.0

    @property
    def num_params(self) -> int:
        """P, the number of parameters."""
        return self.model.architecture.num_params

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Keep the network in eval mode and differentiable inside this context."""
        network = self.model.architecture.network
        with torch.inference_mode(False):
            if self.stacked is not None:
                yield
                return
            with evaluating(network), differentiable(network):
                yield

    def flatten(self, params: Params) -> Tensor:
        """Join parameters with an axis of length K in front to vectors, (K, P)."""
        return torch.cat(
            [params[n].reshape(len(params[n]), -1).double() for n in self.model.params], 1
        )

    def unflatten(self, theta: Tensor) -> Params:
        """Invert `flatten`: parameters by name, views of `theta` with an axis of length K in front."""
        own = self.model.params
        pieces = theta.split([value.numel() for value in own.values()], 1)
        return {
            name: piece.reshape(len(theta), *value.shape)
            for (name, value), piece in zip(own.items(), pieces, strict=True)
        }

    def __call__(self, theta: Tensor, batch: Batch | None = None) -> tuple[Tensor, Tensor]:
        """Compute the log joint of all data, or its estimate from a batch, and the gradient.

        Args:
            theta: One vector of parameters per chain, (K, P), in float64.
            batch: Inputs and targets of some points, in float64; None for all data.

        Returns:
            (log p(θ) + (N/B) Σ_n log p(y_n | f(x_n; θ))) / temperature for each chain, (K,), and its
            gradient, (K, P).
        """
        value, grad = self._prior(theta)
        x, y = self.data if batch is None else batch
        share = num_rows(self.data[0]) / num_rows(x)
        with torch.no_grad():
            if self.stacked is not None:
                f, saved = self.stacked.forward(theta, x)
                logs, slopes = self._likelihood(f, y)
                self.stacked.backward(theta, saved, slopes * share if batch else slopes, grad)
            else:
                logs, slopes = self._differentiate(theta, x, y)
                grad = grad.add_(slopes, alpha=share)
        value = value.add(logs, alpha=share)
        heat = self.model.temperature
        return (value, grad) if heat == 1.0 else (value / heat, grad.div_(heat))

    def outputs(self, theta: Tensor, x: Inputs) -> Tensor:
        """Compute the outputs of all chains.

        Args:
            theta: One vector of parameters per chain, (K, P).
            x: N points, in float64.

        Returns:
            The outputs, (K, N, C); autograd can follow them.
        """
        if self.vectorized and len(theta) > 1:
            return vmap(lambda params: self._outputs(params, x))(self.unflatten(theta))
        return torch.stack(
            [self._outputs(self.model.architecture.unflatten(one), x) for one in theta]
        )

    def _outputs(self, params: Params, x: Inputs) -> Tensor:
        architecture = self.model.architecture
        own = map_inputs(x, torch.clone)  # a network may change its inputs in place
        values = {**architecture.frozen, **params}
        return called_with(architecture.network, values, own, architecture.output)

    def _likelihood(self, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Σ_n log p(y_n | f_n) of each chain, (K,), and the gradients in f, (K, N, C)."""
        chains, points, _ = f.shape
        if self.noise is not None:
            left = y - f
            slopes = left * self.noise
            level = self.level * points / num_rows(self.data[0])
            return (left * slopes).sum((1, 2)).mul_(-0.5).add_(level), slopes
        flat = f.reshape(chains * points, -1)
        if chains == 1:
            own, targets = self.model.likelihood, y
        else:
            targets = y.expand(chains, *y.shape).reshape(chains * points, *y.shape[1:])
            own = self.model.likelihood
            if getattr(own, "tied_points", None) is not None:
                own = own.of_points(  # type: ignore[attr-defined]
                    torch.arange(points, device=f.device).repeat(chains)
                )
        logs = own.log_prob(flat, targets).reshape(chains, points).sum(1)
        return logs, own.residual(flat, targets).reshape(f.shape)

    def _differentiate(self, theta: Tensor, x: Inputs, y: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaf = theta.detach().requires_grad_()
            f = self.outputs(leaf, x)
            with torch.no_grad():
                logs, slopes = self._likelihood(f.detach().double(), y)
            grad = torch.autograd.grad(f, leaf, slopes.to(f.dtype), allow_unused=True)[0]
        return logs, torch.zeros_like(theta) if grad is None else grad

    def _prior(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """The log prior of each chain, (K,), and a new tensor with its gradient, (K, P)."""
        if self.model.prior is None or isinstance(self.model.prior, FlatPrior):
            return theta.new_zeros(len(theta)), torch.zeros_like(theta)
        if self.precision is not None:
            grad = theta * -self.precision
            return (theta * grad).sum(1).mul_(0.5).add_(self.offset), grad
        log_prob = self.model.prior.log_prob
        with torch.enable_grad():
            leaf = theta.detach().requires_grad_()
            if self.vectorized and len(theta) > 1:
                value = vmap(log_prob)(self.unflatten(leaf))
            else:
                one = self.model.architecture.unflatten
                value = torch.stack([log_prob(one(part)) for part in leaf])
            grad = torch.autograd.grad(value.sum(), leaf)[0]
        return value.detach(), grad


def flat_model(model: Model, data: Data) -> FlatModel:
    """Turn a model and its data into a function of flat vectors in float64.

    A perceptron made by `nn.Sequential` gets its gradient in closed form by batched matrix products. Other
    networks are vectorized over the chains by vmap where torch can do so, and run chain by chain otherwise.

    Args:
        model: The model, in any dtype.
        data: The data, as `gather` takes them.

    Returns:
        The log joint and its gradient for many chains at once.

    Raises:
        InputError: If the data do not fit the network or the likelihood.
        NetworkError: If the network cannot take the data.

    >>> from torch import nn
    >>> from net2gp.likelihoods import Gaussian
    >>> x = torch.ones(1, 1)
    >>> flat = flat_model(Model.of(nn.Linear(1, 1, bias=False), Gaussian(noise_var=1.0)), (x, x))
    >>> with flat.running():
    ...     flat(torch.zeros(2, 1, dtype=torch.float64))
    (tensor([-2.3379, -2.3379], dtype=torch.float64), tensor([[1.],
            [1.]], dtype=torch.float64))
    """
    x, y = gather(data, model.architecture.example)
    outputs = model.architecture(x)
    model.likelihood.check(outputs, y)
    precise = replace(model, architecture=model.architecture.to(dtype=torch.float64))
    inputs = map_inputs(x, _doubled)
    precision, offset = _gaussian(precise)
    stacked = stacked_mlp(precise.architecture, inputs)
    targets, noise, level = _noise(precise, outputs.double(), _doubled(y))
    flat = FlatModel(precise, (inputs, targets), True, stacked, precision, offset, noise, level)
    if stacked is None:
        precise.architecture(inputs)  # a network with a dtype of its own cannot run in float64
    if stacked is None or precision is None:
        flat = replace(flat, vectorized=_can_vectorize(flat))
    return flat


def _doubled(value: Tensor) -> Tensor:
    with torch.inference_mode(False):
        value = value.detach()
        return value.double() if value.is_floating_point() else value.clone()


def _noise(model: Model, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None, float]:
    """The targets in the shape of the outputs, the inverse noise and the level, if noise is Gaussian."""
    likelihood = model.likelihood
    if not has_gaussian_noise(likelihood):
        return y, None, 0.0
    targets = shape_targets(f, y)
    variance = likelihood.noise_variance(f).detach()
    level = -0.5 * float((2 * math.pi * variance).log().sum())
    if tied_points(likelihood) is None:
        variance = variance[0]
    return targets, variance.reciprocal(), level


def _gaussian(model: Model) -> tuple[Tensor | None, float]:
    if type(model.prior) is not NormalPrior:
        return None, 0.0
    variances = expand_prior(model.prior.variance, model.params)
    parts = {name: variances[name].expand_as(value) for name, value in model.params.items()}
    at_zero = {name: torch.zeros_like(value) for name, value in model.params.items()}
    flat = model.architecture.flatten(parts)
    if bool((flat == 0).any()):  # a parameter without variance, whose density is not finite
        return None, 0.0
    return flat.reciprocal(), float(model.prior.log_prob(at_zero))


def _can_vectorize(flat: FlatModel) -> bool:
    """Whether vmap runs the network and the prior, and agrees with single passes."""
    start = flat.model.architecture.flatten(flat.model.params)
    pair = torch.stack([start, start + 0.01])
    with flat.running():
        alone = replace(flat, vectorized=False)(pair)
        try:
            together = flat(pair)
        except (RuntimeError, NotImplementedError) as error:
            if not lacks_vmap(error):
                raise
            return False
    return all(torch.allclose(a, b, 1e-8, 1e-10) for a, b in zip(together, alone, strict=True))
