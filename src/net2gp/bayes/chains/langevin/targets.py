"""The log joint of many chains at once with its gradient, on all data or on minibatches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.func import vmap

from net2gp.bayes.model.model import Batch, Model
from net2gp.bayes.model.prior import FlatPrior, NormalPrior
from net2gp.bayes.model.stacked import StackedMLP, stacked_mlp
from net2gp.calling import lacks_vmap, picked
from net2gp.inputs import map_inputs, num_rows, rows, tensors
from net2gp.linear.forward.evaluation import call, differentiable
from net2gp.linear.forward.modes import in_eval_mode
from net2gp.linear.parameters import expand_prior
from net2gp.types import Inputs, Likelihood, Params


@dataclass(frozen=True, eq=False)
class Target:
    """The density exp(log_joint) of a model, for C chains whose parameters are rows of a matrix.

    Chains share one vectorized pass, and each may have a minibatch of its own. Its methods run within
    `ready()`, which puts the network into eval mode once for many steps.

    Args:
        model: The network, prior, likelihood and temperature.
        data: The inputs and targets of all N points.
        fixed: Values that are not sampled but differ between chains, such as the statistics of batch norm, by
            name with an axis of length C in front.
        vectorized: Whether chains share passes; if not, a loop runs over them.
        chunk_size: The number of points whose gradients are computed together on all data; None takes all.
    """

    model: Model
    data: Batch = field(repr=False)
    fixed: Params = field(default_factory=dict, repr=False)
    vectorized: bool = True
    chunk_size: int | None = None
    precision: Tensor | None = field(init=False, repr=False, default=None)
    """The diagonal precision of a Gaussian prior, whose gradient needs no graph: (P,)."""
    stacked: StackedMLP | None = field(init=False, repr=False, default=None)
    """The closed form of a perceptron, whose gradient needs no graph either."""

    def __post_init__(self) -> None:
        prior, network = self.model.prior, self.model.architecture
        if type(prior) is NormalPrior:
            variances = expand_prior(prior.variance, network.params)
            parts = [variances[n].expand(v.shape).reshape(-1) for n, v in network.params.items()]
            object.__setattr__(self, "precision", 1 / torch.cat(parts).to(network.example))
        if not self.fixed and self.vectorized:
            object.__setattr__(self, "stacked", stacked_mlp(network, self.data[0]))

    @property
    def num_data(self) -> int:
        """The number of points N."""
        return num_rows(self.data[0])

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """Keep the network in eval mode, on kernels that can be differentiated and vectorized."""
        network = self.model.architecture
        # a perceptron has its gradient in closed form, which needs no such kernels
        closed = self.stacked is not None
        plain = contextlib.nullcontext() if closed else differentiable(network.network)
        with in_eval_mode(network, self.data[0]), plain:
            yield

    def checked(self, position: Tensor) -> Target:
        """Run the network once, and return this target, without shared passes if torch lacks them or errs.

        Args:
            position: The parameters of all chains: (C, P).

        Returns:
            The target.

        Raises:
            InputError: If the targets do not fit the likelihood.
            NetworkError: If the network cannot take the inputs.
        """
        network, (x, y) = self.model.architecture, self.data
        with torch.no_grad():
            first = network(rows(x, slice(0, 1)))
            self.model.likelihood.check(first.expand(self.num_data, -1), y)
        if not self.vectorized or len(position) == 1 or self.stacked is not None:
            return self
        alone = replace(self, vectorized=False)
        index = torch.arange(min(2, self.num_data)).expand(len(position), -1)
        try:
            with self.ready():
                together, single = (target.gradient(position, index) for target in (self, alone))
        except (RuntimeError, NotImplementedError) as error:
            if not lacks_vmap(error):
                raise
            return alone
        tolerance = 1e-8 if position.dtype == torch.float64 else 1e-3
        agrees = (together - single).norm() <= tolerance * single.norm()
        return self if bool(agrees) else alone

    def gradient(self, position: Tensor, index: Tensor | None = None) -> Tensor:
        """Compute the gradient of the log joint of every chain.

        Args:
            position: The parameters of all chains: (C, P).
            index: The points of each chain's minibatch, which stand for all N: (C, B). None takes all points.

        Returns:
            The gradients, (C, P), in memory of their own.
        """
        return self._compute(position, index, False)[1]

    def both(self, position: Tensor, index: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Compute the log joint of every chain too.

        Args:
            position: The parameters of all chains: (C, P).
            index: The points, as in `gradient`.

        Returns:
            The log joints, (C,), up to a constant if the prior is Gaussian, and their gradients, (C, P).
        """
        return self._compute(position, index, True)

    def _compute(
        self, position: Tensor, index: Tensor | None, whole: bool
    ) -> tuple[Tensor, Tensor]:
        value, slope = self._prior(position)
        if index is not None:
            share = self.num_data / index.shape[1]
            logs = self._likelihood(position, slope, index.to(position.device), share)
            value = value + share * logs(whole)
        else:
            size = self.chunk_size or self.num_data
            for start in range(0, self.num_data, size):
                value = value + self._likelihood(position, slope, slice(start, start + size))(whole)
        if self.model.temperature != 1.0:
            value, slope = value / self.model.temperature, slope.div_(self.model.temperature)
        return value, slope

    def _likelihood(
        self, position: Tensor, slope: Tensor, index: Tensor | slice, share: float = 1.0
    ) -> Callable[[bool], Tensor | float]:
        """Add share·∇ Σ_n log p(y_n | f_n) to `slope`, and return what computes the sums themselves.

        The index has a row per chain, or is a slice of points that all chains share.
        """
        x, y, own = self._points(index, len(position))
        shared = isinstance(index, slice)
        if self.stacked is not None:
            f, saved = self.stacked.forward(position, x, not shared)
            flat = f.reshape(len(y), -1)
            push = own.residual(flat, y).reshape(f.shape)
            push = push if share == 1.0 else push * share
            self.stacked.backward(position, saved, push, slope)
        else:
            with torch.enable_grad():
                leaf = position.detach().requires_grad_()
                f = self._outputs(leaf, x, None if shared else 0)
                flat = f.detach().reshape(len(y), -1)
                push = own.residual(flat, y).reshape(f.shape)
                (found,) = torch.autograd.grad(f, leaf, push)
            slope.add_(found, alpha=share)
        sums = (len(position), -1)
        return lambda whole: own.log_prob(flat, y).reshape(sums).sum(1) if whole else 0.0

    def _points(self, index: Tensor | slice, chains: int) -> tuple[Inputs, Tensor, Likelihood]:
        """Inputs, and targets and their likelihood for the points of all chains in one row."""
        own = self.model.likelihood
        tied = getattr(own, "tied_points", None) is not None
        if isinstance(index, slice):
            x = map_inputs(
                rows(self.data[0], index), torch.clone
            )  # a network may change its inputs
            y = self.data[1][index]
            y = y if chains == 1 else y.repeat(chains, *(1,) * (y.dim() - 1))
            if tied:
                every = torch.arange(self.num_data, device=y.device)[index]
                own = own.of_points(every.repeat(chains))  # type: ignore[attr-defined]
            return x, y, own
        x, flat = map_inputs(self.data[0], lambda value: value[index]), index.reshape(-1)
        return x, self.data[1][flat], own.of_points(flat) if tied else own  # type: ignore[attr-defined]

    def _outputs(self, leaf: Tensor, x: Inputs, axis: int | None) -> Tensor:
        if len(leaf) > 1 and self.vectorized:
            over = (0, 0 if self.fixed else None, axis)
            return vmap(self._run, in_dims=over)(leaf, self.fixed, x)
        parts = []
        for chain in range(len(leaf)):
            fixed = {name: value[chain] for name, value in self.fixed.items()}
            own = x if axis is None else rows(x, chain)  # type: ignore[arg-type]
            parts.append(self._run(leaf[chain], fixed, own))
        return parts[0][None] if len(parts) == 1 else torch.stack(parts)

    def _run(self, flat: Tensor, fixed: Params, x: Inputs) -> Tensor:
        network = self.model.architecture
        values = {**network.frozen, **network.unflatten(flat), **fixed}
        keywords = dict(x) if isinstance(x, Mapping) else {}
        inputs = () if isinstance(x, Mapping) else tuple(tensors(x))
        out = picked(call(network.network, values, inputs, keywords), network.output)
        return out.reshape(out.shape[0], -1)

    def _prior(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """The log prior, (C,), and a new tensor with its gradient, (C, P)."""
        if self.model.prior is None or isinstance(self.model.prior, FlatPrior):
            return position.new_zeros(len(position)), torch.zeros_like(position)
        if self.precision is not None:
            pull = self.precision * position
            return torch.linalg.vecdot(pull, position).mul_(-0.5), pull.neg_()
        unflatten, log_prior = self.model.architecture.unflatten, self.model.log_prior
        with torch.enable_grad():
            leaf = position.detach().requires_grad_()
            values = vmap(lambda flat: log_prior(unflatten(flat)))(leaf)
            (pull,) = torch.autograd.grad(values.sum(), leaf)
        return values.detach(), pull.contiguous()


class Minibatches:
    """The points of each chain's next minibatch, from a generator whose state can be kept.

    A chain goes through its own shuffled order of all points, and shuffles again when fewer than a batch are
    left. Over one order the noise of the gradients cancels, so that chains are less biased than with
    independent minibatches, which `independent` gives.

    Args:
        num_data: The number of points N.
        batch_size: The number of points B of a minibatch; None takes all points each time.
        num_chains: The number of chains C.
        generator: The generator, on the CPU.
        independent: Whether each minibatch is drawn with replacement, independently of all others.
    """

    def __init__(
        self,
        num_data: int,
        batch_size: int | None,
        num_chains: int,
        generator: torch.Generator,
        *,
        independent: bool = False,
    ) -> None:
        self.shape, self.size, self.generator = (num_chains, num_data), batch_size, generator
        self.independent = independent
        self.order = torch.zeros(num_chains, 0, dtype=torch.long)
        self.place = 0

    def draw(self) -> Tensor | None:
        """Return the points of the next minibatches, (C, B), or None for all points."""
        if self.size is None or self.size >= self.shape[1]:
            return None
        if self.independent:
            count = (self.shape[0], self.size)
            return torch.randint(self.shape[1], count, generator=self.generator)
        if self.place + self.size > self.order.shape[1]:
            orders = [
                torch.randperm(self.shape[1], generator=self.generator)
                for _ in range(self.shape[0])
            ]
            self.order, self.place = torch.stack(orders), 0
        self.place += self.size
        return self.order[:, self.place - self.size : self.place]
