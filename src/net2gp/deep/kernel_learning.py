"""Deep kernel learning: a Gaussian process on the features of a network."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor, nn

from net2gp.deep.inference.hyperparameters import numbers_of, with_numbers
from net2gp.deep.saturation import saturation
from net2gp.errors import InputError, check_count, check_positive
from net2gp.inputs import check_made, describe, follows, gather, rows
from net2gp.kernels import RBF, BaseKernel
from net2gp.kernels.constant_mean import ConstantMean
from net2gp.kernels.values import moved
from net2gp.likelihoods.traits import has_gaussian_noise, of_points
from net2gp.linear import Linearized, linearize
from net2gp.posteriors.condition import condition
from net2gp.posteriors.posterior import Posterior
from net2gp.progress import progress
from net2gp.tags import savable
from net2gp.types import Data, Inputs, Kernel, Likelihood, Observed, Params


@savable("deep.NetworkFeatures")
@dataclass(frozen=True, eq=False)
class NetworkFeatures:
    """The outputs of a network, shifted and scaled: φ(x) = (network(x) − center) / scale.

    Args:
        network: The network at its present parameters.
        center: What is subtracted, (D,).
        scale: What is divided by, a number for all of them: ().
    """

    network: Linearized
    center: Tensor = field(repr=False)
    scale: Tensor = field(repr=False)

    def __call__(self, x: Inputs) -> Tensor:
        """Compute φ(x), (N, D), differentiable in `x` and in parameters that require a gradient."""
        self.network.check(x)
        free = any(value.requires_grad for value in self.network.params.values())
        with torch.set_grad_enabled(follows(x) or (free and torch.is_grad_enabled())):
            return (self.network.evaluate(self.network.params, x) - self.center) / self.scale

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> NetworkFeatures:
        """The same features on another device or in another dtype."""
        parts = (moved(value, device, dtype) for value in (self.center, self.scale))
        return NetworkFeatures(self.network.to(device, dtype), *parts)


@savable("kernels.NetworkKernel")
@dataclass(frozen=True, eq=False)
class NetworkKernel(BaseKernel):
    """A kernel of features of a network: k(x, x') = k₀(φ(x), φ(x')).

    `NetworkKernel.of` makes one from a module. Cost: a pass of the network per point, and what k₀ costs.

    Args:
        features: The features φ.
        kernel: The kernel k₀ of features.

    >>> network = nn.Linear(1, 2, bias=False)
    >>> x = torch.tensor([[0.0], [1.0]])
    >>> bool(NetworkKernel.of(network, RBF(), x)(x)[0, 1] < 1)
    True

    Reference: Wilson, Hu, Salakhutdinov & Xing, "Deep kernel learning", AISTATS 2016.
    """

    features: NetworkFeatures
    kernel: Kernel

    @classmethod
    def of(cls, network: nn.Module | Linearized, kernel: Kernel | None, x: Inputs) -> NetworkKernel:
        """Put a kernel on the features of a network as it stands.

        Args:
            network: The network, whose outputs are the features: leave its last layer out, as
                `network[:-1]`.
            kernel: The kernel of features. None is an `RBF` with the length scale √D, which suits D features
                of variance 1.
            x: Points over which features get the mean 0 and the average variance 1.

        Returns:
            The kernel. It keeps copies of the parameters.

        Raises:
            InputError: If the features are the same for all points.
        """
        linearized = network if isinstance(network, Linearized) else linearize(network)
        with torch.no_grad():
            found = linearized(x)
            variance = found.var(0, correction=0).mean()
        center = found.mean(0)
        least = torch.finfo(found.dtype).eps ** 2 * center.square().mean()
        if not bool(variance > least):
            raise InputError(
                "the features of the network are the same for all points, so that no kernel can tell them "
                "apart. Train the network, or scale its inputs."
            )
        features = NetworkFeatures(linearized, center, variance.sqrt())
        default = RBF(math.sqrt(found.shape[1]))
        return cls(features, default if kernel is None else kernel)

    def __call__(self, x: Inputs, y: Inputs | None = None) -> Tensor:
        """k₀(φ(x), φ(y)), (N, M)."""
        return self.kernel(self.features(x), None if y is None or y is x else self.features(y))

    def diag(self, x: Inputs) -> Tensor:
        """k₀(φ(x_n), φ(x_n)), (N,)."""
        return self.kernel.diag(self.features(x))

    def precise(self) -> NetworkKernel:
        """The same kernel in float64; features keep the precision of the network."""
        return replace(self, kernel=self.kernel.precise())

    def scaled(self, variance: float | Tensor) -> NetworkKernel:
        """variance · k."""
        return replace(self, kernel=self.kernel.scaled(variance))

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> NetworkKernel:
        """The same kernel with its network on another device or in another dtype."""
        return NetworkKernel(self.features.to(device, dtype), moved(self.kernel, device, dtype))


@dataclass(frozen=True)
class KernelTraining:
    """Settings of `deep.learn_kernel`.

    Args:
        num_steps: The number of steps of Adam; 0 keeps network and kernel as they are.
        learning_rate: The learning rate, which falls to zero along half a cosine.
        weight_decay: The precision of a Gaussian prior of the parameters of the network, which keeps features
            from following single points.
        batch_size: The most rows whose evidence is computed in a step; a step costs the cube of it.
        train_network: Whether the network is trained. False trains the numbers of the kernel and open noise.
        seed: The seed of the batches.

    Raises:
        InputError: If a setting is out of range.

    >>> KernelTraining(train_network=False).num_steps
    200
    """

    num_steps: int = 200
    learning_rate: float = 0.02
    weight_decay: float = 1e-2
    batch_size: int = 256
    train_network: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        check_count(self.num_steps, "num_steps", zero=True)
        check_count(self.batch_size, "batch_size")
        check_positive(self.learning_rate, "learning_rate", single=True)
        if not self.weight_decay >= 0:
            raise InputError(f"weight_decay must not be negative, but is {self.weight_decay}.")


def learn_kernel(
    network: nn.Module | Linearized,
    data: Data,
    likelihood: Observed,
    *,
    kernel: Kernel | None = None,
    training: KernelTraining | None = None,
) -> Posterior[Observed]:
    """Put a Gaussian process on the features of a network, and learn both by the evidence.

    With features φ of the network and a kernel k₀, f ~ GP(m, k₀(φ(x), φ(x'))), where m is the mean of real
    targets. Adam climbs log p(y | φ, k₀) of batches, per row, minus weight_decay · ‖θ‖² / (2N). The process
    is then conditioned on all rows. The evidence of many parameters can overfit, and features can collapse:
    `saturation` of the kernel is measured at the end, and a `SaturatedKernel` warning says what is
    wrong. Cost: B³ per step for batches of B rows, and the cost of `condition` once.

    Args:
        network: The network, whose outputs are the features: leave its last layer out, as `network[:-1]`. It
            is not changed.
        data: Inputs and targets.
        likelihood: How targets follow f. `Gaussian()` learns the variance of the noise.
        kernel: The kernel of features, where training starts; None is an `RBF` of length scale √D.
        training: Settings; None means `KernelTraining()`.

    Returns:
        The posterior. `posterior.process.kernel` has the trained network and kernel.

    Raises:
        InputError: If the data, the network or the settings do not fit together.

    >>> from net2gp.likelihoods import Gaussian
    >>> _ = torch.manual_seed(0)
    >>> x = torch.linspace(-1, 1, 20)[:, None]
    >>> network = nn.Sequential(nn.Linear(1, 10), nn.ReLU())
    >>> short = KernelTraining(num_steps=20)
    >>> learn_kernel(network, (x, x.sin()), Gaussian(), training=short).mean(x).shape
    torch.Size([20, 1])

    References: Wilson, Hu, Salakhutdinov & Xing, "Deep kernel learning", AISTATS 2016; Ober, Rasmussen & van
    der Wilk, "The promises and pitfalls of deep kernel learning", UAI 2021.
    """
    training = KernelTraining() if training is None else training
    if not isinstance(training, KernelTraining):
        raise InputError(
            f"training must be deep.KernelTraining(...) or None, but is {describe(training)}."
        )
    check_made(likelihood, "likelihood")
    x, y = gather(data)
    start = NetworkKernel.of(network, kernel, x)
    learning = _Learning(start, (x, y), likelihood, training)
    if training.num_steps:
        learning.climb()
    found, given = learning.present(free=False)
    mean = learning.mean
    posterior = condition(found, (x, y), given, mean=mean)
    if isinstance(x, Tensor):
        saturation(found, x).warn()
    return cast("Posterior[Observed]", posterior)


class _Learning:
    """The variables of deep kernel learning and the loop that moves them."""

    def __init__(
        self,
        start: NetworkKernel,
        data: tuple[Inputs, Tensor],
        likelihood: Likelihood,
        training: KernelTraining,
    ) -> None:
        self.start, self.training, self.likelihood = start, training, likelihood
        self.x, self.y = data
        self.mean: ConstantMean | None = None
        self.log_noise: Tensor | None = None
        if has_gaussian_noise(likelihood):
            targets = self.y.reshape(len(self.y), -1)
            self.mean = ConstantMean(targets.mean(0))
            if likelihood.noise_var is None:
                spread = targets.var(0, correction=0).mean().double()
                self.log_noise = (0.1 * spread).log().requires_grad_()
        numbers = numbers_of(start.kernel)
        self.numbers = {n: v.log().to(self.y.device).requires_grad_() for n, v in numbers.items()}
        params = start.features.network.params
        self.params: Params = {n: v.detach().clone() for n, v in params.items()}
        if training.train_network:
            self.params = {n: v.requires_grad_() for n, v in self.params.items()}

    def present(self, *, free: bool) -> tuple[NetworkKernel, Likelihood]:
        """The kernel and the likelihood at the present values, with gradients or without."""

        def taken(value: Tensor) -> Tensor:
            return value if free else value.detach()

        numbers = {name: taken(value.exp()) for name, value in self.numbers.items()}
        params = {name: taken(value) for name, value in self.params.items()}
        network = replace(self.start.features.network, params=params)
        features = replace(self.start.features, network=network)
        kernel = NetworkKernel(features, with_numbers(self.start.kernel, numbers))
        if self.log_noise is None:
            return kernel, self.likelihood
        assert has_gaussian_noise(self.likelihood)
        noise = taken(self.log_noise.exp())
        return kernel, self.likelihood.with_noise(noise if free else float(noise))

    def climb(self) -> None:
        """All steps of Adam."""
        training, count = self.training, len(self.y)
        leaves = [v for v in (*self.params.values(), *self.numbers.values()) if v.requires_grad]
        leaves += [] if self.log_noise is None else [self.log_noise]
        if not leaves:
            return
        optimizer = torch.optim.Adam(leaves, lr=training.learning_rate)
        generator = torch.Generator().manual_seed(training.seed)
        with progress("deep kernel learning", training.num_steps) as advance:
            for step in range(training.num_steps):
                falling = 0.5 * (1 + math.cos(math.pi * step / training.num_steps))
                optimizer.param_groups[0]["lr"] = training.learning_rate * falling
                chosen = torch.randperm(count, generator=generator)[: training.batch_size]
                optimizer.zero_grad()
                loss = self.loss(chosen.sort().values.to(self.y.device))
                if not bool(loss.isfinite()):
                    raise InputError(
                        f"the evidence is {-float(loss.detach())} after {step} steps. Pass a smaller "
                        "learning_rate, as KernelTraining(learning_rate=0.005)."
                    )
                loss.backward()
                optimizer.step()
                advance(note=f"evidence per row {-float(loss.detach()):.3f}")

    def loss(self, chosen: Tensor) -> Tensor:
        """Minus the evidence of a batch per row, plus the prior of the parameters."""
        kernel, likelihood = self.present(free=True)
        part = rows(self.x, chosen), self.y[chosen]
        posterior = condition(kernel, part, of_points(likelihood, chosen), mean=self.mean)
        loss = -posterior.log_marginal_likelihood() / len(chosen)
        if self.training.train_network and self.training.weight_decay:
            norm = torch.stack([value.square().sum() for value in self.params.values()]).sum()
            loss = loss + 0.5 * self.training.weight_decay * norm / len(self.y)
        return loss
