"""IVON: variational learning at the cost of Adam, for any loss."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypedDict, Unpack, final

import torch
from torch import Tensor, nn

from net2gp.errors import InputError, check_count, check_positive
from net2gp.inputs import ordinary_tensors
from net2gp.keywords import check_known, lists
from net2gp.linalg.chance import random_normal
from net2gp.linear.linearized import Linearized, Output, PriorVar, expand_prior, linearize
from net2gp.methods.training.drawing import DrawingOptimizer
from net2gp.methods.training.natural_gradient import NewtonState, newton_step
from net2gp.methods.training.vogn import check_decays, check_trainable
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.recipes.around_network import around_network
from net2gp.posteriors.weights.diagonal import DiagonalCovariance
from net2gp.streams import held_or_streamed
from net2gp.types import Data, Likelihood


class Options(TypedDict, total=False):
    """The options that are seldom changed: see `IVON`."""

    num_samples: int
    initial_var: float | None
    clip_radius: float
    seed: int


@final
class IVON(DrawingOptimizer):
    """The improved variational online Newton method: a diagonal Gaussian from ordinary mini-batch gradients.

    q(θ) = N(μ, σ²) with σ² = 1/(N(h + δ)), where h estimates the diagonal Hessian of the mean loss and
    δ = 1/(N·prior_var) is the precision of the prior per data point, N = `num_data`. A step draws θ = μ + σε,
    takes the gradient of the loss there, ĝ = ∇ℓ̄(θ), and estimates the Hessian by ĥ = ĝ (θ − μ)/σ², without a
    second derivative; `natural_gradient.newton_step` has the updates. The loss is the mean over the batch of
    negative log-likelihoods. Batch norm, dropout and augmentation may be used as in any training.

    Pass a closure as for `torch.optim.LBFGS`, or draw the weights yourself:

        with optimizer.sampled_weights():
            loss = cross_entropy(network(x), y)
            loss.backward()
        optimizer.step()

    Outside that block, the network's parameters hold the mean.

    Cost of a step: one forward and one backward pass per draw, and three numbers per parameter.

    Reference: Shen et al., Variational learning is effective for large deep networks, ICML 2024.

    >>> from net2gp.likelihoods import Gaussian
    >>> x, network = torch.linspace(-1, 1, 20)[:, None], nn.Linear(1, 1)
    >>> optimizer = IVON(network, num_data=20, learning_rate=0.1)
    >>> def closure():
    ...     optimizer.zero_grad()
    ...     loss = (network(x) - 2 * x).square().mean() / 2
    ...     loss.backward()
    ...     return loss
    >>> for _ in range(5):
    ...     loss = optimizer.step(closure)
    >>> network = network.eval()
    >>> optimizer.posterior((x, 2 * x), Gaussian(1.0)).marginal(x).variance.shape
    torch.Size([20, 1])
    """

    @lists(num_samples=1, initial_var=None, clip_radius=float("inf"), seed=0)
    @ordinary_tensors()
    def __init__(
        self,
        network: nn.Module,
        num_data: int,
        *,
        prior_var: PriorVar = 1.0,
        learning_rate: float = 0.1,
        decays: tuple[float, float] = (0.9, 0.9999),
        **options: Unpack[Options],
    ) -> None:
        """Start from the network's present parameters.

        Args:
            network: The network to train; the parameters that require a gradient are trained.
            num_data: The number of training points N.
            prior_var: The prior variance, a number or a dict by name pattern.
            learning_rate: The step size η of the mean.
            decays: The decay β₁ of the average of gradients, and the decay β₂ of the Hessian.
            num_samples: The number of weights that are drawn per step with a closure.
            initial_var: The first variance of q, below the prior's. None is 1/num_data, or half the prior
                variance if that is smaller.
            clip_radius: The largest change of a parameter in one step, before it is multiplied by η.
            seed: The seed of the draws.

        Raises:
            InputError: If an option is out of range, or if no parameter requires a gradient.
        """
        named = {n: value for n, value in network.named_parameters() if value.requires_grad}
        if not named:
            raise InputError(
                "none of the network's parameters requires a gradient, so there is nothing to train. "
                "Call network.requires_grad_()."
            )
        check_trainable(network)
        check_count(num_data, "num_data", meaning="the number of training points, len(train)")
        check_positive(learning_rate, "learning_rate", zero=True)
        check_decays(decays)
        check_known(options, Options)
        self.network, self.num_data, self.prior_var = network, num_data, prior_var
        self.names = list(named)
        self.num_samples = options.get("num_samples", 1)
        check_count(self.num_samples, "num_samples", meaning="how many weights are drawn a step")
        self.clip_radius = options.get("clip_radius", float("inf"))
        self.generator = torch.Generator(next(iter(named.values())).device)
        self.generator.manual_seed(options.get("seed", 0))
        self._collected: list[tuple[list[Tensor], list[Tensor]]] = []
        super().__init__(list(named.values()), {"lr": learning_rate, "betas": tuple(decays)})
        self._start({n: value.detach() for n, value in named.items()}, options.get("initial_var"))

    def _start(self, named: dict[str, Tensor], initial_var: float | None) -> None:
        variances = expand_prior(self.prior_var, named)
        for name, variance in variances.items():
            check_positive(variance, f"prior_var for '{name}'")
        for param, name in zip(self._params, self.names, strict=True):
            decay = (1 / (self.num_data * variances[name])).expand(param.shape).clone()
            most = float(variances[name].min())
            first = min(1 / self.num_data, most / 2) if initial_var is None else initial_var
            check_positive(first, "initial_var")
            if first >= most:
                raise InputError(
                    f"initial_var must be less than the prior's variance, but is {first:g} where "
                    f"prior_var for '{name}' is {most:g}: data only make a posterior narrower. Pass less."
                )
            self.state[param] = {
                "hessian": 1 / (self.num_data * first) - decay,
                "momentum": torch.zeros_like(param, memory_format=torch.preserve_format),
                "decay": decay,
                "step": torch.zeros((), dtype=torch.float64),
            }

    @property
    def _params(self) -> list[nn.Parameter]:
        return self.param_groups[0]["params"]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a second group, since the posterior is over the parameters that were given at first.

        Args:
            param_group: The group, as torch.optim defines it.

        Raises:
            InputError: If there is a group already.
        """
        if self.param_groups:
            raise InputError(
                "IVON has one group of parameters, from the network that it was made with. Choose them with "
                "requires_grad_(False) on the others."
            )
        super().add_param_group(param_group)

    @contextlib.contextmanager
    def sampled_weights(self) -> Iterator[None]:
        """Give the network weights drawn from q inside a `with` block, with gradients cleared at its start.

        Gradients that exist at the end of the block are kept for `step`. If there are none, as after a
        prediction, nothing is kept.
        """
        means = [param.detach().clone() for param in self._params]
        deviations = [self._deviation(param) for param in self._params]
        with torch.no_grad():
            for param, deviation in zip(self._params, deviations, strict=True):
                param.add_(deviation)
                param.grad = None
        try:
            yield
            if any(param.grad is not None for param in self._params):
                gradients = [
                    torch.zeros_like(param) if param.grad is None else param.grad.detach().clone()
                    for param in self._params
                ]
                self._collected.append((gradients, deviations))
        finally:
            with torch.no_grad():
                for param, mean in zip(self._params, means, strict=True):
                    param.copy_(mean)

    def _deviation(self, param: Tensor) -> Tensor:
        noise = random_normal(
            param.shape, generator=self.generator, device=param.device, dtype=param.dtype
        )
        return noise * self._variance(param).sqrt()

    def _variance(self, param: Tensor) -> Tensor:
        state = self.state[param]
        return 1 / (self.num_data * (state["hessian"] + state["decay"]))

    @ordinary_tensors()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:  # type: ignore[override]
        """Learn from the gradients at the draws since the last step, or from a closure.

        Args:
            closure: A function that clears the gradients, computes the loss, calls `backward()` and returns
                the loss. None uses the gradients from `sampled_weights()`.

        Returns:
            The mean loss over the draws, or None without a closure.

        Raises:
            InputError: If there is no gradient to learn from.
        """
        losses = []
        if closure is not None:
            self._collected.clear()
            for _ in range(self.num_samples):
                with torch.enable_grad(), self.sampled_weights():
                    losses.append(closure().detach())
        if not self._collected:
            raise InputError(
                "there is no gradient at drawn weights to learn from. Call loss.backward() within "
                "'with optimizer.sampled_weights():', or pass a closure that does."
            )
        group, count = self.param_groups[0], len(self._collected)
        with torch.no_grad():
            for i, param in enumerate(self._params):
                pairs = [(gradients[i], deviations[i]) for gradients, deviations in self._collected]
                precision = 1 / self._variance(param)
                gradient = torch.stack([g for g, _ in pairs]).sum(0) / count
                hessian = torch.stack([g * d for g, d in pairs]).sum(0) / count * precision
                self._move(param, gradient, hessian, group)
        self._collected.clear()
        return torch.stack(losses).mean() if losses else None

    def _move(
        self, param: Tensor, gradient: Tensor, hessian: Tensor, group: dict[str, Any]
    ) -> None:
        state = self.state[param]
        moved = newton_step(
            NewtonState(param, state["hessian"], state["momentum"], state["step"]),
            gradient,
            hessian,
            state["decay"],
            learning_rate=group["lr"],
            decays=group["betas"],
            clip=self.clip_radius,
        )
        param.copy_(moved.mean)
        state |= {"hessian": moved.hessian, "momentum": moved.momentum, "step": moved.step}

    @property
    def variance(self) -> Tensor:
        """The variances σ² of q, flat in the order of the network's parameters: (P,)."""
        return torch.cat([self._variance(param).reshape(-1) for param in self._params])

    @ordinary_tensors()
    def posterior(
        self, data: Data, likelihood: Likelihood, *, output: Output | None = None
    ) -> Posterior:
        """Return q(θ) as a posterior over functions, f(x; μ) + J(x)(θ − μ).

        Put a network with dropout or batch norm into eval mode first.

        Args:
            data: The training data, (x, y) or a DataLoader.
            likelihood: How targets depend on the outputs.
            output: Picks the outputs out of what the network returns, as in `linearize`.

        Returns:
            A posterior without an evidence, since the loss need not be a likelihood.
        """
        linearized: Linearized = linearize(self.network, only=self.names, output=output)
        covariance = DiagonalCovariance(self.variance)
        kept = held_or_streamed(data, linearized.example)
        return around_network(linearized, covariance, self.prior_var, likelihood, kept)
