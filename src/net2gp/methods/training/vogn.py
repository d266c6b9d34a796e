"""Optimizers whose state is a Gaussian posterior: VOGN, VOGGN and OGGN."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar, TypedDict, Unpack, final

import torch
from torch import Tensor, nn

from net2gp.errors import InputError, check_count, check_finite, check_positive
from net2gp.inputs import gather, num_rows, ordinary_tensors
from net2gp.keywords import check_known, lists
from net2gp.linalg.chance import random_normal
from net2gp.linear.curvatures.curvature import EmpiricalFisher, ExactFisher
from net2gp.linear.jacobians.capture import Plan, plan
from net2gp.linear.linearized import Linearized, PriorVar, linearize
from net2gp.linear.precision import check_full
from net2gp.methods.training.drawing import DrawingOptimizer
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
from net2gp.posteriors.weights.diagonal import DiagonalCovariance
from net2gp.types import Data, Inputs, Likelihood, Params


class Options(TypedDict, total=False):
    """The options that are seldom changed: see `NaturalGradient`."""

    num_samples: int | None
    initial_var: float | None
    prior_mean: Params | None
    seed: int


class NaturalGradient(DrawingOptimizer):
    """The common part of VOGN, VOGGN and OGGN; use one of them.

    The mean of q is held in the network's own parameters, so that network(x) is the prediction of the mean.
    torch.optim's learning rate schedulers work.
    """

    fisher: ClassVar[ExactFisher | EmpiricalFisher]
    default_samples: ClassVar[int]

    @lists(num_samples=None, initial_var=None, prior_mean=None, seed=0)
    @ordinary_tensors()
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
        """Start from the network's present parameters.

        Args:
            network: The network to train; the parameters that require a gradient are trained. Its layers act
                as in eval mode, since batch statistics and dropout leave no gradient of a single example.
                Pass `linearize(network, only=...)` to choose parameters and outputs.
            likelihood: The likelihood whose negative logarithm is the loss.
            num_data: The number of training points N.
            prior_var: The prior variance 1/δ, a number or a dict by name pattern.
            learning_rate: The step size η of the mean.
            decays: The decay β₁ of the average of gradients, and the decay β₂ of the precision.
            num_samples: The number of weights that are drawn per step. None is 1; OGGN takes no draws.
            initial_var: The first variance of q. None is 1/num_data.
            prior_mean: The prior mean μ₀ by parameter name. None is zero.
            seed: The seed of the draws.

        Raises:
            InputError: If an option is out of range, if no parameter requires a gradient, or if `num_samples`
                is given to OGGN.
            NetworkError: If the network cannot be linearized.
        """
        linearized = network if isinstance(network, Linearized) else _trainable(network)
        check_trainable(linearized.network)
        check_full(linearized.network)
        check_count(num_data, "num_data", meaning="the number of training points, len(train)")
        check_positive(learning_rate, "learning_rate", zero=True)
        check_decays(decays)
        check_known(options, Options)
        self.likelihood, self.num_data, self.prior_var = likelihood, num_data, prior_var
        self.num_samples = self._checked_samples(options.get("num_samples"))
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
        given = options.get("initial_var")
        initial_var = 1 / num_data if given is None else given
        check_positive(initial_var, "initial_var")
        mean = linearized.flatten(linearized.params)
        self._write(
            NaturalState(mean, torch.full_like(mean, 1 / initial_var), torch.zeros_like(mean))
        )

    def _checked_samples(self, num_samples: int | None) -> int:
        if num_samples is None:
            return self.default_samples
        if not self.default_samples:
            if num_samples:
                raise InputError(
                    f"{type(self).__name__} takes its gradients at the mean and draws no weights, but "
                    f"num_samples={num_samples} was given. Leave it out, or use VOGGN."
                )
            return 0
        check_count(num_samples, "num_samples", meaning="how many weights are drawn a step")
        return num_samples

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a second group, since the posterior is over the parameters that were given at first.

        Args:
            param_group: The group, as torch.optim defines it.

        Raises:
            InputError: If there is a group already.
        """
        if self.param_groups:
            raise InputError(
                f"{type(self).__name__} has one group of parameters, from the network that it was made "
                "with. Choose them with linearize(network, only=...), and make a new optimizer for others."
            )
        super().add_param_group(param_group)

    @ordinary_tensors()
    def step(self, x: Inputs, y: Tensor) -> Tensor:  # type: ignore[override]
        """Learn from a batch.

        Args:
            x: The B inputs of the batch.
            y: Their targets.

        Returns:
            The mean negative log-likelihood of the points at the drawn weights, a scalar.
        """
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
        return random_normal(like.shape, generator=generator, device=like.device, dtype=like.dtype)

    @property
    def variance(self) -> Tensor:
        """The variances 1/s of q, flat in the order of `Linearized.flatten`: (P,)."""
        return self._state().precision.reciprocal()

    @ordinary_tensors()
    def posterior(self, data: Data) -> Posterior:
        """Return q(θ) as a posterior over functions, f(x; μ) + J(x)(θ − μ).

        Args:
            data: The training data, (x, y) or a DataLoader.

        Returns:
            The posterior at this moment, which further training does not change. Its evidence is the evidence
            lower bound on `data`, estimated with ten draws.
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

    @ordinary_tensors()
    def elbo(self, x: Inputs, y: Tensor, *, num_samples: int = 10, seed: int = 0) -> Tensor:
        """Return (N/B) Σ_n E_q log p(y_n | f(x_n; θ)) − KL(q ‖ prior), a lower bound on log p(y) on all data.

        Cost: one forward pass per draw.

        Args:
            x: B inputs, at best all training points.
            y: Their targets.
            num_samples: The number of draws of weights that the expectation is averaged over.
            seed: The seed of these draws, which are independent of the draws of the training.

        Returns:
            The estimate of the bound, a scalar.
        """
        check_count(num_samples, "num_samples", meaning="how many weights are drawn")
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

    def _at_mean(self) -> Linearized:
        """The network linearized at its present parameters, with its present buffers."""
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
    """Variational online Gauss–Newton: train a network and its posterior variance together.

    The diagonal Gaussian q(θ) = N(μ, 1/s) moves towards the posterior under the prior N(μ₀, 1/δ),
    δ = 1/prior_var, by natural gradients. A step draws θ = μ + ε/√s and, with
    g_n = −∇_θ log p(y_n | f(x_n; θ)), computes

        s ← β₂ s + (1 − β₂)((N/B) Σ_n g_n² + δ),
        m ← β₁ m + (1 − β₁)(N/B) Σ_n g_n,
        μ ← μ − η (m + δ(μ − μ₀)) / s,

    where the sums run over the batch and N = `num_data`. The squares Σ g_n², the empirical Fisher matrix,
    replace the Hessian; they vanish if all points are fitted. `VOGGN` takes the Gauss–Newton matrix instead,
    with 1 + C backward passes in place of one. The constructor documents the arguments.

    Cost of a step: one forward pass and one backward pass per draw, and two matrix products per layer.

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
    and the variances 1/diag(precision). The arguments are the same as for `VOGN`. Cost of a step: 1 + C
    backward passes per draw, for C outputs.

    Reference: Khan et al., Approximate inference turns deep networks into Gaussian processes, NeurIPS 2019.
    """

    fisher = ExactFisher()
    default_samples = 1


@final
class OGGN(NaturalGradient):
    """VOGGN at the mean, θ = μ, without draws: a diagonal Gauss–Newton method, and Laplace during training.

    At a fixed point, μ is a mode of the posterior and s is the diagonal of Laplace's precision there. The
    arguments are the same as for `VOGN`, except that `num_samples` must be left out.

    Reference: Khan et al., Approximate inference turns deep networks into Gaussian processes, NeurIPS 2019.
    """

    fisher = ExactFisher()
    default_samples = 0


def check_decays(decays: tuple[float, float]) -> None:
    """Raise unless both decays are at least 0 and below 1."""
    if len(decays) != 2 or not all(0 <= beta < 1 for beta in decays):
        raise InputError(
            f"decays must be two numbers from 0 up to below 1, but are {decays!r}. Pass decays=(0.9, 0.999)."
        )


def check_trainable(network: nn.Module) -> None:
    """Raise if parameters of the network were made in inference mode: torch lets nothing change them."""
    if any(value.is_inference() for value in network.parameters()):
        raise InputError(
            "the network was made within torch.inference_mode(), so that its parameters cannot be trained. "
            "Make it outside, or train copy.deepcopy(network) outside."
        )


def _trainable(network: nn.Module) -> Linearized:
    """The network, linearized in the parameters that require a gradient."""
    names = [name for name, value in network.named_parameters() if value.requires_grad]
    if not names:
        raise InputError(
            "no parameter of the network requires a gradient, so there is nothing to train. "
            "Call network.requires_grad_(), or pass linearize(network, only=...)."
        )
    return linearize(network, only=names)
