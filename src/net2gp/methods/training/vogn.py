"""Optimizers whose state is a Gaussian posterior: VOGN, VOGGN and OGGN."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar, TypedDict, Unpack, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from net2gp.errors import InputError, check_finite, check_positive
from net2gp.inputs import gather, num_rows
from net2gp.linear.curvatures.curvature import EmpiricalFisher, ExactFisher
from net2gp.linear.jacobians.capture import Plan, plan
from net2gp.linear.linearized import Linearized, PriorVar, linearize
from net2gp.methods.training.natural_gradient import (
    NaturalState,
    divergence,
    draw,
    flat_prior,
    natural_step,
)
from net2gp.methods.training.per_example import BatchSums, batch_sums
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.recipes.around_network import around_network
from net2gp.posteriors.weights.covariances import DiagonalCovariance
from net2gp.types import Data, Inputs, Likelihood, Params


class Options(TypedDict, total=False):
    """What has a sensible default: see `VOGN`."""

    num_samples: int
    initial_var: float
    prior_mean: Params
    seed: int


class NaturalGradient(Optimizer):
    """What VOGN, VOGGN and OGGN share; use one of them.

    The mean of q lives in the network's own parameters, so that network(x) is the prediction of the mean.
    """

    fisher: ClassVar[ExactFisher | EmpiricalFisher]
    default_samples: ClassVar[int]

    def __init__(
        self,
        network: nn.Module | Linearized,
        likelihood: Likelihood,
        num_data: int,
        *,
        prior_var: PriorVar = 1.0,
        learning_rate: float = 1e-3,
        decays: tuple[float, float] = (0.9, 0.999),
        **options: Unpack[Options],
    ) -> None:
        linearized = network if isinstance(network, Linearized) else _trainable(network)
        check_count(num_data, "num_data", "the number of training points, len(train)")
        check_positive(learning_rate, "learning_rate", zero=True)
        check_decays(decays)
        check_known(options, Options)
        self.likelihood, self.num_data, self.prior_var = likelihood, num_data, prior_var
        self.num_samples = self._checked_samples(options.get("num_samples", self.default_samples))
        self.prior = flat_prior(linearized, prior_var, options.get("prior_mean"))
        self.generator = torch.Generator(linearized.example.device)
        self.generator.manual_seed(options.get("seed", 0))
        self._linearized = linearized
        self._layout: Plan | None = None
        named = dict(linearized.network.named_parameters())
        super().__init__(
            [named[name] for name in linearized.params],
            {"lr": learning_rate, "betas": tuple(decays)},
        )
        initial_var = options.get("initial_var", 1 / num_data)
        check_positive(initial_var, "initial_var")
        mean = linearized.flatten(linearized.params)
        self._write(
            NaturalState(mean, torch.full_like(mean, 1 / initial_var), torch.zeros_like(mean))
        )

    def _checked_samples(self, num_samples: int) -> int:
        if not self.default_samples:
            if num_samples:
                raise InputError(
                    f"{type(self).__name__} takes its gradients at the mean and draws no weights, but "
                    f"num_samples={num_samples} was given. Leave it out, or use VOGGN."
                )
            return 0
        check_count(num_samples, "num_samples", "how many weights are drawn a step")
        return num_samples

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a second group: the posterior is over the parameters that were given at first."""
        if self.param_groups:
            raise InputError(
                f"{type(self).__name__} has one group of parameters, those of the network it was made "
                "with. Choose them with linearize(network, only=...), and make a new optimizer for others."
            )
        super().add_param_group(param_group)

    def step(self, x: Inputs, y: Tensor) -> Tensor:  # type: ignore[override]
        """Learn from a batch; the mean negative log-likelihood of its points at the drawn weights."""
        linearized, state = self._at_mean(), self._state()
        linearized.check(x)
        check_finite(y, "y")
        if self._layout is None:
            self._layout = plan(linearized, x)
        sums = [
            self._sums(replace(linearized, params=linearized.unflatten(theta)), x, y, self._layout)
            for theta in self._draws(state)
        ]
        scale = self.num_data / (num_rows(x) * len(sums))
        group = self.param_groups[0]
        moved = natural_step(
            state,
            -scale * torch.stack([one.gradient for one in sums]).sum(0),
            scale * torch.stack([one.curvature for one in sums]).sum(0),
            self.prior,
            learning_rate=group["lr"],
            decays=group["betas"],
        )
        self._write(moved)
        return -torch.stack([one.log_prob for one in sums]).mean() / num_rows(x)

    def _sums(self, linearized: Linearized, x: Inputs, y: Tensor, layout: Plan) -> BatchSums:
        return batch_sums(linearized, (x, y), self.likelihood, self.fisher, layout)

    def _draws(self, state: NaturalState) -> Iterator[Tensor]:
        if not self.num_samples:
            yield state.mean
        for _ in range(self.num_samples):
            yield draw(state.mean, state.precision, self._noise(state.mean, self.generator))

    def _noise(self, like: Tensor, generator: torch.Generator) -> Tensor:
        return torch.randn(
            like.shape, generator=generator, dtype=like.dtype, device=generator.device
        ).to(like.device)

    @property
    def variance(self) -> Tensor:
        """The variances 1/s of q, flat in the order of `Linearized.flatten`: (P,)."""
        return self._state().precision.reciprocal()

    def posterior(self, data: Data) -> Posterior:
        """q(θ) as a posterior over functions, f(x; μ) + J(x)(θ − μ), now and for good.

        Its evidence is the ELBO on `data`, estimated with ten draws.
        """
        x, y = gather(data)
        return around_network(
            self._at_mean(),
            DiagonalCovariance(self.variance),
            self.prior_var,
            self.likelihood,
            (x, y),
            evidence=self.elbo(x, y),
        )

    def elbo(self, x: Inputs, y: Tensor, *, num_samples: int = 10, seed: int = 0) -> Tensor:
        """(N/B) Σ_n E_q log p(y_n | f(x_n; θ)) − KL(q ‖ prior): on all data a lower bound on log p(y).

        The expectation is an average over `num_samples` draws of weights, which leave the draws of the
        training alone. Cost: a forward pass each.
        """
        check_count(num_samples, "num_samples", "how many weights are drawn")
        linearized, state = self._at_mean(), self._state()
        linearized.check(x)
        generator = torch.Generator(linearized.example.device).manual_seed(seed)
        total = state.mean.new_zeros(())
        for _ in range(num_samples):
            theta = draw(state.mean, state.precision, self._noise(state.mean, generator))
            with torch.no_grad():
                f = linearized.evaluate(linearized.unflatten(theta), x)
            total += self.likelihood.log_prob(f, y).sum() / num_samples
        loss = divergence(state.mean, state.precision, self.prior)
        return total * (self.num_data / num_rows(x)) - loss

    def state_dict(self) -> dict[str, Any]:
        """The precisions, the averages and the state of the draws; the mean is the network's state_dict()."""
        return {**super().state_dict(), "generator": self.generator.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on exactly where `state_dict` was taken, if the network's own was loaded too."""
        if "generator" not in state_dict:
            raise InputError(
                f"the state has no 'generator': it is not that of a {type(self).__name__}. "
                "Pass what its state_dict() returned."
            )
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "generator"})
        self.generator.set_state(state_dict["generator"].cpu())

    def _at_mean(self) -> Linearized:
        """The network linearized where it stands, with its buffers as they are now."""
        known = self._linearized
        there = linearize(known.network, only=list(known.params), output=known.output)
        return replace(there, plans=known.plans)

    def _state(self) -> NaturalState:
        params = self.param_groups[0]["params"]
        flat = lambda values: torch.cat([value.detach().reshape(-1) for value in values])
        states = [self.state[param] for param in params]
        return NaturalState(
            flat(params),
            flat([state["precision"] for state in states]),
            flat([state["momentum"] for state in states]),
        )

    @torch.no_grad()
    def _write(self, moved: NaturalState) -> None:
        params = self.param_groups[0]["params"]
        sizes = [param.numel() for param in params]
        pieces = zip(params, *(value.split(sizes) for value in moved), strict=True)
        for param, mean, precision, momentum in pieces:
            param.copy_(mean.reshape(param.shape))
            self.state[param] = {
                "precision": precision.reshape(param.shape),
                "momentum": momentum.reshape(param.shape),
            }


@final
class VOGN(NaturalGradient):
    """Variational online Gauss–Newton: trains a network and its posterior variance together.

    q(θ) = N(μ, 1/s), diagonal, is moved towards the posterior under the prior N(μ₀, 1/δ), δ = 1/prior_var, by
    natural gradients. A step draws θ = μ + ε/√s and takes, with g_n = −∇_θ log p(y_n | f(x_n; θ)),

        s ← β₂ s + (1 − β₂)((N/B) Σ_n g_n² + δ),
        m ← β₁ m + (1 − β₁)(N/B) Σ_n g_n,
        μ ← μ − η (m + δ(μ − μ₀)) / s,

    sums over the batch, N = `num_data`. The squares Σ g_n² stand for the Hessian: the empirical Fisher, which
    vanishes where all points are fitted; `VOGGN` takes the Gauss–Newton matrix instead, at 1 + C backward
    passes in place of one.

    `network` is in eval mode: batch statistics and dropout leave no gradient of one example. A `Linearized`
    in its place chooses parameters and outputs. `prior_var` is a number or maps name patterns to variances.
    torch.optim's schedulers work. Further options: `num_samples` draws a step; `initial_var`, the first
    variance (1/num_data); `prior_mean` μ₀ (zero); `seed` of the draws.

    Cost of a step: a forward pass and a backward pass for each draw, and two matrix products a layer.

    Reference: Khan et al., Fast and scalable Bayesian deep learning by weight-perturbation in Adam, ICML
    2018; Osawa et al., Practical deep learning with Bayesian principles, NeurIPS 2019.

    >>> from net2gp.likelihoods import Gaussian
    >>> x = torch.linspace(-1, 1, 20)[:, None]
    >>> network = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).eval()
    >>> optimizer = VOGN(network, Gaussian(0.01), num_data=20, learning_rate=0.01)
    >>> for _ in range(5):
    ...     loss = optimizer.step(x, x**2)
    >>> optimizer.posterior((x, x**2)).marginal(x).variance.shape
    torch.Size([20, 1])
    """

    fisher = EmpiricalFisher()
    default_samples = 1


@final
class VOGGN(NaturalGradient):
    """VOGN with the diagonal of the generalized Gauss–Newton matrix, Σ_n diag(J_nᵀ Λ_n J_n), for the Hessian.

    On a linear model with Gaussian noise q converges to the best diagonal Gaussian: the exact posterior mean
    and the variances 1/diag(precision). Arguments are those of `VOGN`. Cost of a step: 1 + C backward passes
    for each draw, C outputs.

    Reference: Khan et al., Approximate inference turns deep networks into Gaussian processes, NeurIPS 2019.
    """

    fisher = ExactFisher()
    default_samples = 1


@final
class OGGN(NaturalGradient):
    """VOGGN at the mean, θ = μ, without draws: a diagonal Gauss–Newton method, and Laplace as it trains.

    At rest μ is a mode of the posterior and s the diagonal of Laplace's precision there. Arguments are those
    of `VOGN` but `num_samples`.

    Reference: Khan et al., Approximate inference turns deep networks into Gaussian processes, NeurIPS 2019.
    """

    fisher = ExactFisher()
    default_samples = 0


def check_count(value: int, name: str, meaning: str) -> None:
    """Raise unless `value` is a positive whole number."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{name} must be a positive whole number, {meaning}, but is {value!r}.")


def check_decays(decays: tuple[float, float]) -> None:
    """Raise unless both averages forget."""
    if len(decays) != 2 or not all(0 <= beta < 1 for beta in decays):
        raise InputError(
            f"decays must be two numbers from 0 up to below 1, but are {decays!r}. Pass decays=(0.9, 0.999)."
        )


def check_known(options: Any, known: Any) -> None:
    """Raise a TypeError, as Python does, for an option that is not among those of the type `known`."""
    for name in options:
        if name not in known.__annotations__:
            names = ", ".join(known.__annotations__)
            raise TypeError(f"there is no option '{name}'. The options are: {names}.")


def _trainable(network: nn.Module) -> Linearized:
    """The network, linearized in the parameters that require a gradient."""
    names = [name for name, value in network.named_parameters() if value.requires_grad]
    if not names:
        raise InputError(
            "no parameter of the network requires a gradient, so there is nothing to train. "
            "Call network.requires_grad_(), or pass linearize(network, only=...)."
        )
    return linearize(network, only=names)
