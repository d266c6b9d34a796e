"""Tasks with few points, and what a linearized network is compared with on them, for B tasks at once.

Networks are tanh MLPs, stacked: a list of weights (B, out, in) and biases (B, out), layer by layer. Tasks
share nothing, so the sum of their losses has the gradients of B single trainings.

- Fine-tuning of all layers, or of the last one, from the source network.
- ABLR (Perrone et al., 2018): Bayesian linear regression on features that are learned with the marginal
  likelihood of the source, and then a little further of the target.
- DKL (Wilson et al., 2016): an RBF kernel on the source network's last hidden layer, learned likewise.
- A Gaussian process with an RBF kernel, from the target alone.
- The Fisher kernel of the source network.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import gpytorch
import numpy as np
import torch
from gpytorch.constraints import GreaterThan
from torch import Tensor, nn

import net2gp as n2g
from net2gp.data import Sinusoid, sinusoid_task
from net2gp.errors import NothingToTune

FAMILIES = ("sine to sine", "same frequency", "line to sine")
SIZES = (5, 10, 20)
SOURCE_POINTS, TEST_POINTS = 40, 200
"""What the source is to the target, how many points are known of it, and of the source, and are tested on."""

Stack = list[Tensor]

NOISE_FLOOR = 1e-3
"""The smallest noise variance of a network's prediction, as in the published experiment."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Points x, y of B tasks: (B, N, 1)."""

    x: Tensor
    y: Tensor

    @staticmethod
    def stack(pairs: Sequence[tuple[Tensor, Tensor]]) -> Batch:
        """From the pairs (x, y) of each task."""
        return Batch(torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs]))

    def __getitem__(self, some: slice | Tensor) -> Batch:
        """Some of the points of every task."""
        return Batch(self.x[:, some], self.y[:, some])

    def task(self, index: int) -> tuple[Tensor, Tensor]:
        """The pair (x, y) of one task."""
        return self.x[index], self.y[index]


@dataclass(frozen=True, eq=False)
class Problems:
    """B = F·S pairs of tasks: families behind each other, and in each the same S targets."""

    source: Batch
    target: Batch
    test: Batch
    truths: list[Sinusoid]


def line(seed: int, num_points: int) -> tuple[Tensor, Tensor]:
    """y = A x + b + 0.3 ε with A, b ~ U(−3, 3) and x ~ U(−5, 5)."""
    generator = torch.Generator().manual_seed(seed)
    kind: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    slope, offset = (6 * torch.rand(2, **kind) - 3).tolist()
    x = 10 * torch.rand(num_points, 1, **kind) - 5
    return x, slope * x + offset + 0.3 * torch.randn(num_points, 1, **kind)


def sine(seed: int, num_points: int) -> Sinusoid:
    """A sinusoid in float64, whatever the default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return sinusoid_task(seed, num_points)
    finally:
        torch.set_default_dtype(before)


def with_frequency(task: Sinusoid, frequency: float) -> Sinusoid:
    """The same sinusoid, points and noise at another frequency."""
    moved = replace(task, frequency=frequency)
    return replace(moved, y=task.y - task.truth(task.x) + moved.truth(task.x))


def problems(seeds: int) -> Problems:
    """All families, for seeds 0 … seeds − 1: the targets are the same, the sources are not."""
    truths = [sine(seed, max(SIZES) + TEST_POINTS) for seed in range(seeds)]
    sines = [sine(10_000 + seed, SOURCE_POINTS) for seed in range(seeds)]
    pairs = [one.data for one in sines]
    pairs += [with_frequency(a, b.frequency).data for a, b in zip(sines, truths, strict=True)]
    pairs += [line(20_000 + seed, SOURCE_POINTS) for seed in range(seeds)]
    source = Batch.stack(pairs)
    points = Batch.stack([truth.data for truth in truths] * len(FAMILIES))
    known = slice(0, max(SIZES))
    return Problems(source, points[known], points[slice(max(SIZES), None)], truths)


@dataclass(frozen=True, eq=False)
class Law:
    """Means and variances of y, each point by itself: (B, M)."""

    mean: Tensor
    var: Tensor

    @staticmethod
    def stack(laws: Sequence[torch.distributions.Distribution]) -> Law:
        """From the predictions of each task."""
        return Law(
            torch.stack([law.mean.reshape(-1) for law in laws]),
            torch.stack([law.variance.reshape(-1) for law in laws]),
        )

    def repeat(self, times: int) -> Law:
        """The same laws for several blocks of the same tasks."""
        return Law(self.mean.repeat(times, 1), self.var.repeat(times, 1))


def mlp(*sizes: int, seed: int, tanh_at_the_end: bool = False) -> nn.Sequential:
    """Linear, tanh, …, Linear as torch initializes it, in float64."""
    layers: list[nn.Module] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for one, other in pairwise(sizes):
            layers += [nn.Linear(one, other), nn.Tanh()]
    return nn.Sequential(*layers[: len(layers) - (not tanh_at_the_end)]).double().eval()


def stacked(networks: Sequence[nn.Module]) -> Stack:
    """Copies of the parameters of all networks."""
    columns = zip(*(network.parameters() for network in networks), strict=True)
    return [torch.stack([p.detach() for p in column]) for column in columns]


def single(network: nn.Module, stack: Stack, index: int) -> nn.Module:
    """One of the stacked networks as a module like `network`."""
    one = copy.deepcopy(network).requires_grad_(False)
    for parameter, values in zip(one.parameters(), stack, strict=True):
        parameter.copy_(values[index])
    return one


def forward(stack: Stack, x: Tensor, tanh_at_the_end: bool = False) -> Tensor:
    """Outputs (B, N, C) of every network at its own points (B, N, D)."""
    for layer in range(0, len(stack), 2):
        x = torch.baddbmm(stack[layer + 1][:, None], x, stack[layer].mT)
        if tanh_at_the_end or layer + 2 < len(stack):
            x = x.tanh()
    return x


def squared_errors(stack: Stack, points: Batch) -> Tensor:
    """Of each network, the mean over its points: (B,)."""
    return (forward(stack, points.x) - points.y).square().mean((1, 2))


def train_source(stack: Stack, points: Batch, num_epochs: int, seed: int = 0) -> Stack:
    """Stochastic descent on the squared error, as published.

    Learning rate 1e-3, a tenth of it after every fifth of the epochs, momentum 0.9, three batches an epoch.
    """
    stack = [values.clone().requires_grad_() for values in stack]
    optimizer = torch.optim.SGD(stack, lr=1e-3, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, max(1, num_epochs // 5), 0.1)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_epochs):
        for some in torch.randperm(points.x.shape[1], generator=generator).chunk(3):
            optimizer.zero_grad()
            squared_errors(stack, points[some]).sum().backward()
            optimizer.step()
        schedule.step()
    return [values.detach() for values in stack]


def adam(loss: Callable[[], Tensor], tensors: Sequence[Tensor], num_steps: int) -> None:
    """Minimize in place, with learning rate 1e-2."""
    optimizer = torch.optim.Adam(tensors, lr=1e-2)
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()


def fine_tuned(stack: Stack, points: Batch, num_steps: int, last: bool = False) -> Stack:
    """The networks after further training on the points, in all layers or the last one only."""
    stack = [values.clone() for values in stack]
    moving = [values.requires_grad_() for values in (stack[-2:] if last else stack)]
    adam(lambda: squared_errors(stack, points).sum(), moving, num_steps)
    return [values.detach() for values in stack]


def point_law(stack: Stack, points: Batch, x: Tensor) -> Law:
    """A network's prediction with its residual variance on the points of the target.

    That variance is at least `NOISE_FLOOR`: networks that go through all points have none left.
    """
    with torch.no_grad():
        mean = forward(stack, x)[..., 0]
        noise = squared_errors(stack, points).clamp(min=NOISE_FLOOR)
    return Law(mean, noise[:, None].expand_as(mean))


@dataclass(frozen=True, eq=False)
class FeatureRegression:
    """y = Φ(x)w + ε with w ~ N(0, weight_var) and ε ~ N(0, noise_var); both variances (B,) as logarithms."""

    stack: Stack
    log_weight_var: Tensor
    log_noise_var: Tensor

    @staticmethod
    def start(networks: Sequence[nn.Module]) -> FeatureRegression:
        """Features of these networks; features are at most 1, so their weights start with variance 1 / D."""
        stack = stacked(networks)
        zeros = stack[-1].new_zeros(len(networks))
        return FeatureRegression(stack, zeros - math.log(stack[-1].shape[1]), zeros + math.log(0.1))

    def covariance(self, x: Tensor) -> Tensor:
        """weight_var ΦΦᵀ + noise_var I: (B, N, N)."""
        phi = forward(self.stack, x, tanh_at_the_end=True)
        noise = self.log_noise_var.exp()[:, None].expand(phi.shape[:2])
        return self.log_weight_var.exp()[:, None, None] * phi @ phi.mT + torch.diag_embed(noise)

    def log_marginal_likelihood(self, points: Batch) -> Tensor:
        """log N(y | 0, weight_var ΦΦᵀ + noise_var I): (B,)."""
        y = points.y[..., 0]
        law = torch.distributions.MultivariateNormal(torch.zeros_like(y), self.covariance(points.x))
        return law.log_prob(y)

    def surrogate(self, points: Batch) -> Tensor:
        """A number with the gradient of −log N(y | 0, K): ½ ⟨K⁻¹ − ααᵀ, K⟩ with α = K⁻¹y.

        The first factor is held fixed: several times cheaper than to differentiate Cholesky factors.
        """
        K = self.covariance(points.x)
        with torch.no_grad():
            inverse = torch.cholesky_inverse(torch.linalg.cholesky(K))
            alpha = inverse @ points.y
        return 0.5 * ((inverse - alpha @ alpha.mT) * K).sum()

    def learned(self, points: Batch, num_steps: int) -> FeatureRegression:
        """After steps of Adam up the marginal likelihood, in features and variances."""
        stack = [values.clone().requires_grad_() for values in self.stack]
        weight, noise = (
            values.clone().requires_grad_() for values in (self.log_weight_var, self.log_noise_var)
        )
        model = FeatureRegression(stack, weight, noise)
        adam(lambda: model.surrogate(points), [*stack, weight, noise], num_steps)
        return FeatureRegression([v.detach() for v in stack], weight.detach(), noise.detach())

    def law(self, features: nn.Sequential, points: Batch, x: Tensor) -> Law:
        """The posterior predictive: that of a network which is linearized in its last layer alone."""
        head = nn.Linear(self.stack[-1].shape[1], 1, bias=False).double()
        laws = []
        for index, (weight, noise) in enumerate(
            zip(self.log_weight_var.exp(), self.log_noise_var.exp(), strict=True)
        ):
            network = nn.Sequential(single(features, self.stack, index), head).eval()
            kernel = n2g.linearize(network, only="1.*").kernel(float(weight))
            likelihood = n2g.Gaussian(float(noise))
            laws.append(n2g.condition(kernel, points.task(index), likelihood).predict(x[index]))
        return Law.stack(laws)


class DeepKernel(gpytorch.models.ExactGP):
    """GP regression of B tasks with an RBF kernel, on x or on the features of stacked networks."""

    def __init__(self, points: Batch, features: Stack | None = None) -> None:
        """With the defaults of gpytorch, but for the noise variance, which starts at 0.1."""
        batch = points.x.shape[:1]
        likelihood = gpytorch.likelihoods.GaussianLikelihood(
            batch_shape=batch, noise_constraint=GreaterThan(1e-6)
        )
        super().__init__(points.x, points.y[..., 0], likelihood)
        base = gpytorch.kernels.RBFKernel(batch_shape=batch)
        self.kernel = gpytorch.kernels.ScaleKernel(base, batch_shape=batch)
        self.mean = gpytorch.means.ZeroMean()
        self.features = nn.ParameterList([nn.Parameter(v.clone()) for v in features or []])
        self.double()
        self.likelihood.noise = 0.1

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        """The prior at x."""
        z = forward(list(self.features), x, tanh_at_the_end=True)
        return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(z))

    def learn(self, points: Batch, num_steps: int) -> None:
        """Adam up the marginal likelihood of these points, which the model then is conditioned on."""
        self.set_train_data(points.x, points.y[..., 0], strict=False)
        self.train()
        evidence = gpytorch.mlls.ExactMarginalLogLikelihood(self.likelihood, self)
        loss = lambda: -evidence(self(points.x), points.y[..., 0]).sum()
        adam(loss, list(self.parameters()), num_steps)
        self.eval()

    def law(self, x: Tensor) -> Law:
        """The posterior predictive."""
        with torch.no_grad():
            found = self.likelihood(self(x))
        return Law(found.mean, found.variance)


def adapt_to_few(
    network: nn.Module | n2g.Linearized, few: Any, noise: n2g.Gaussian, **keywords: Any
) -> Any:
    """`n2g.adapt`, without a word where few points prefer no change: these are counted like all others."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NothingToTune)
        return n2g.adapt(network, few, noise, **keywords)


def adapted(
    networks: Sequence[nn.Module],
    points: Batch,
    x: Tensor,
    noises: Sequence[float] | None,
    **keywords: Any,
) -> Law:
    """`n2g.adapt` of every network to its task, with these noise variances or those of most evidence."""
    laws = []
    for i, network in enumerate(networks):
        likelihood = n2g.Gaussian(None if noises is None else noises[i])
        laws.append(adapt_to_few(network, points.task(i), likelihood, **keywords).predict(x[i]))
    return Law.stack(laws)


def fisher_kernel(
    networks: Sequence[nn.Module], source: Batch, points: Batch, x: Tensor, noises: Sequence[float]
) -> Law:
    """k(x, x') = s J(x) F⁻¹ J(x')ᵀ with the diagonal Fisher information F on the source, s by the evidence.

    Jaakkola & Haussler (1998), "Exploiting generative models in discriminative classifiers".
    """
    laws = []
    for i, (network, noise) in enumerate(zip(networks, noises, strict=True)):
        fisher = n2g.tasks.task_embedding(network, source.x[i], n2g.Gaussian(1.0)).parts
        kernel = n2g.linearize(network).kernel({name: 1 / part for name, part in fisher.items()})
        spectrum = n2g.tuning.spectrum(kernel, points.task(i))
        evidence = lambda s, at=spectrum, noise=noise: float(at.log_marginal_likelihood(noise, s))
        scale = max(np.logspace(-8, 4, 97).tolist(), key=evidence)
        laws.append(spectrum.condition(noise, scale).predict(x[i]))
    return Law.stack(laws)
