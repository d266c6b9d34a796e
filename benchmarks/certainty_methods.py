"""The ways to predict that `certainty_cifar.py` compares, and how its mixture of networks is trained.

Each is made from the training images, some also from held-out ones; it then gives for images x the logarithms
of class probabilities (N, C) and a score of strangeness (N,), by default the entropy of the probabilities.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import net2gp as n2g

Data = tuple[Tensor, Tensor]
Predict = Callable[[Tensor], tuple[Tensor, Tensor]]
"""x to log-probabilities (N, C) and scores (N,)."""

BATCH = 500
PRECISIONS = tuple(10.0**k for k in range(-2, 4))
"""Prior precisions that laplace-torch chooses from; its own grid search ended at its edge."""

NEIGHBOR = 50
"""Which of the nearest neighbors counts, as Sun et al. (2022) have it for CIFAR-10."""

RIDGE = 1e-6
"""Of the covariance of features, relative to its mean eigenvalue: some channels are always zero."""


@dataclass(frozen=True, eq=False)
class Problem:
    """A trained network, its images, others by name, and what makes and trains networks like it.

    `test` and `others` are images in [0, 1]; `prepare` standardizes them, as `train` and `held_out` are.
    """

    network: nn.Module
    train: Data
    held_out: Data
    test: Data
    others: dict[str, Tensor]
    prepare: Callable[[Tensor], Tensor]
    fresh: Callable[[], nn.Module]
    augment: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Settings:
    """What the methods are given beside the problem."""

    folder: Path
    members: int = 4
    epochs: int = 40
    batch: int = 512
    rate: float = 0.3
    sampled: dict[str, Any] = field(default_factory=dict)
    prior_var: float = 0.01
    peer: Path | None = None


def by_parts(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A function of images, some hundred at a time, without gradients."""
    with torch.no_grad():
        return torch.cat([function(part) for part in x.split(BATCH)])


def entropy(log_probs: Tensor) -> Tensor:
    """−Σ p log p: (N,)."""
    return -(log_probs.exp() * log_probs.clamp(min=-1e30)).sum(-1)


def from_logits(logits: Callable[[Tensor], Tensor]) -> Predict:
    """A prediction by a softmax, and its entropy."""

    def predict(x: Tensor) -> tuple[Tensor, Tensor]:
        found = by_parts(logits, x).double().log_softmax(-1)
        return found, entropy(found)

    return predict


def scored(network: nn.Module, score: Callable[[Tensor], Tensor]) -> Predict:
    """The network's probabilities with another score."""
    plain = from_logits(network)
    return lambda x: (plain(x)[0], by_parts(score, x).double())


def tempered(problem: Problem) -> Predict:
    """The network at the temperature of the smallest loss on held-out images."""
    x, y = problem.held_out
    f, grid = by_parts(problem.network, x), torch.logspace(-1, 1, 401).tolist()
    best = min(grid, key=lambda t: float(F.cross_entropy(f / t, y)))
    print(f"  temperature {best:.3g}", flush=True)
    return from_logits(lambda x: problem.network(x) / best)


def features_of(network: nn.Module) -> Callable[[Tensor], Tensor]:
    """What the last linear layer of the network multiplies: (N, D)."""
    head = [module for module in network.modules() if isinstance(module, nn.Linear)][-1]

    def features(x: Tensor) -> Tensor:
        found: list[Tensor] = []
        handle = head.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0]))
        try:
            network(x)
        finally:
            handle.remove()
        return found[0]

    return features


def mahalanobis(problem: Problem) -> Predict:
    """The distance of features to the nearest mean of a class, under one covariance (Lee et al., 2018)."""
    features, (x, y) = features_of(problem.network), problem.train
    phi = by_parts(features, x).double()
    means = torch.stack([phi[y == c].mean(0) for c in y.unique()])
    apart = phi - means[torch.searchsorted(y.unique(), y)]
    covariance = apart.mT @ apart / len(apart)
    covariance.diagonal().add_(RIDGE * covariance.diagonal().mean())
    L = torch.linalg.cholesky(covariance)

    def score(x: Tensor) -> Tensor:
        gaps = (features(x).double()[:, None] - means).flatten(0, 1)
        white = torch.linalg.solve_triangular(L, gaps.mT, upper=False)
        return white.square().sum(0).reshape(len(x), -1).amin(1)

    return scored(problem.network, score)


def neighbors(problem: Problem) -> Predict:
    """The distance to the 50th nearest of the training images' normalized features (Sun et al., 2022)."""
    features = features_of(problem.network)
    known = F.normalize(by_parts(features, problem.train[0]))
    number = min(NEIGHBOR, len(known))

    def score(x: Tensor) -> Tensor:
        return torch.cdist(F.normalize(features(x)), known).kthvalue(number, 1).values

    return scored(problem.network, score)


def laplace(problem: Problem, *, held_out: bool = False, **options: Any) -> n2g.Posterior:
    """`n2g.laplace` of classes, tuned on the training images or on held-out ones."""
    tuning = n2g.tuning.Validation(problem.held_out) if held_out else None
    found = n2g.laplace(problem.network, problem.train, n2g.Categorical(), tuning=tuning, **options)
    print(f"  {found.structure}, prior_var {found.prior_var:.3g}, {found.likelihood}", flush=True)
    return found


def predictor(posterior: n2g.Posterior) -> Predict:
    """The predictions of a posterior, and their entropy."""
    return from_logits(lambda x: posterior.predict(x).logits)


def novelty(problem: Problem) -> Predict:
    """`posterior.novelty` as the score: it is the same for all structures of a network of this size."""
    posterior = laplace(problem, structure=n2g.LastLayer())
    return scored(problem.network, posterior.novelty)


def all_parameters(problem: Problem, settings: Settings) -> Predict:
    """Draws of the posterior of all parameters; their scale is the best one for held-out images."""
    structure = n2g.structures.Sampled(**settings.sampled)
    likelihood, (x, y) = n2g.Categorical(n2g.links.Contrast()), problem.held_out
    posterior = n2g.laplace(
        problem.network,
        problem.train,
        likelihood,
        prior_var=settings.prior_var,
        structure=structure,
    )
    f, variances = by_parts(posterior.mean, x), by_parts(posterior.contrast, x)
    best = min(
        torch.logspace(-6, 4, 81).tolist(),
        key=lambda factor: float(F.cross_entropy(likelihood.link.shrink(f, factor * variances), y)),
    )
    print(f"  prior_var {settings.prior_var:.3g}, factor {best:.3g}", flush=True)
    return predictor(posterior.tempered(best))


def trained(problem: Problem, settings: Settings, seed: int) -> nn.Module:
    """A network by stochastic gradient descent with augmented images; it is kept in the folder of cells."""
    path = settings.folder / f"member{seed}.pt"
    torch.manual_seed(seed)
    (x, y), network = problem.train, problem.fresh()
    network.to(x.device)
    if path.is_file():
        network.load_state_dict(torch.load(path, weights_only=True))
        return network.eval().requires_grad_(False)
    network.train().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(network.parameters(), 0.1, 0.9, weight_decay=5e-4, nesterov=True)
    steps, begun = math.ceil(len(x) / settings.batch), time.perf_counter()
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, settings.rate, total_steps=steps * settings.epochs, pct_start=0.2
    )
    half = x.device.type == "cuda"
    for _ in range(settings.epochs):
        for chosen in torch.randperm(len(x), device=x.device).split(settings.batch):
            optimizer.zero_grad()
            with torch.autocast(x.device.type, torch.bfloat16, enabled=half):
                logits = network(problem.augment(x[chosen]))
            F.cross_entropy(logits.float(), y[chosen]).backward()
            optimizer.step()
            schedule.step()
    network.eval().requires_grad_(False)
    torch.save(network.state_dict(), path)
    print(f"  network {seed}: {time.perf_counter() - begun:.0f} s", flush=True)
    return network


def mixture(problem: Problem, settings: Settings) -> Predict:
    """The average of the softmax of networks that were trained from independent starts."""
    networks = [trained(problem, settings, seed) for seed in range(settings.members)]

    def logits(x: Tensor) -> Tensor:
        each = torch.stack([network(x).double().log_softmax(-1) for network in networks])
        return each.logsumexp(0) - math.log(len(networks))

    return from_logits(logits)


def laplace_torch(problem: Problem, settings: Settings, weights: str, structure: str) -> Predict:
    """laplace-torch, its prior precision by the likelihood of held-out images, its probit predictions."""
    if settings.peer is not None:
        sys.path.append(str(settings.peer))
    from torch.utils.data import DataLoader, TensorDataset

    from laplace import Laplace

    network = problem.network.requires_grad_(True)
    posterior = Laplace(
        network, "classification", subset_of_weights=weights, hessian_structure=structure
    )
    device = problem.train[0].device
    with device:  # it makes some tensors on the default device
        posterior.fit(DataLoader(TensorDataset(*problem.train), batch_size=100))
    size = BATCH if weights == "last_layer" else 50

    def predict(x: Tensor) -> tuple[Tensor, Tensor]:
        with device:
            parts = x.split(size)
            probs = [posterior(part, pred_type="glm", link_approx="probit") for part in parts]
        found = torch.cat(probs).detach().double().clamp(min=1e-300).log()
        return found, entropy(found)

    x, y = problem.held_out
    losses: dict[float, float] = {}
    for precision in PRECISIONS:
        posterior.prior_precision = precision
        with contextlib.suppress(RuntimeError):  # in float32 small ones are not positive definite
            losses[precision] = float(F.nll_loss(predict(x)[0], y))
    best = min(losses, key=lambda precision: losses[precision])
    posterior.prior_precision = best
    print(f"  prior precision {best:.3g}", flush=True)
    return predict


Make = Callable[[Problem, Settings], Predict]
METHODS: dict[str, Make] = {
    "network": lambda p, s: from_logits(p.network),
    "temperature": lambda p, s: tempered(p),
    "energy": lambda p, s: scored(p.network, lambda x: -p.network(x).logsumexp(-1)),
    "Mahalanobis": lambda p, s: mahalanobis(p),
    "nearest neighbors": lambda p, s: neighbors(p),
    "novelty": lambda p, s: novelty(p),
    "laplace": lambda p, s: predictor(laplace(p)),
    "laplace, held out": lambda p, s: predictor(laplace(p, held_out=True)),
    "last layer": lambda p, s: predictor(laplace(p, structure=n2g.LastLayer())),
    "last layer, held out": lambda p, s: predictor(
        laplace(p, structure=n2g.LastLayer(), held_out=True)
    ),
    "Kron": lambda p, s: predictor(laplace(p, structure=n2g.Kron())),
    "Kron, held out": lambda p, s: predictor(laplace(p, structure=n2g.Kron(), held_out=True)),
    "mixture": mixture,
    "all parameters, held out": all_parameters,
    "laplace-torch, last layer": lambda p, s: laplace_torch(p, s, "last_layer", "full"),
    "laplace-torch, Kron": lambda p, s: laplace_torch(p, s, "all", "kron"),
}
