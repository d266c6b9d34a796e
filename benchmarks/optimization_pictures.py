"""A picture to find in a pool: which has the most contrast along a direction?

A pool is 250 of the 8 × 8 digits of `net2gp.data.digits`, others for each seed, and the seed draws an angle.
The value of a picture is the mean over its 7 × 7 squares of 2 × 2 pixels of (∂x)², where ∂x is the difference
along that angle. So it depends on small patterns, wherever they are. Values are standardized over the pool
and counted from its maximum, which is 0.

Each surrogate gives its joint law at all pictures, and the acquisition functions are evaluated there, at
each picture that was not seen yet. A Gaussian law is conditioned on each value, and the hyper-parameters are
fitted anew after every fourth; an ensemble is trained anew after each. BoTorch's LogEI and qLogNEI take the
law as a model (`Table`). The run ends when the maximum is found.

A Thompson draw is a draw from the law, and the knowledge gradient is computed exactly but for an average over
32 quantiles of the next observation (Frazier, Powell and Dayanik, 2009), which is what qKG estimates.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import torch
from botorch.acquisition import LogExpectedImprovement
from botorch.acquisition.logei import qLogExpectedImprovement, qLogNoisyExpectedImprovement
from botorch.models.ensemble import EnsembleModel
from botorch.models.model import Model
from botorch.posteriors import GPyTorchPosterior
from botorch.sampling import SobolQMCNormalSampler
from botorch.sampling.index_sampler import IndexSampler
from gpytorch.distributions import MultivariateNormal
from torch import Tensor, nn

from net2gp import data
from optimization_problems import SAMPLES
from optimization_surrogates import ENSEMBLE, MEMBERS, Ensemble, Task, fitted

POOL, FIRST, STEPS = 250, 10, 16
"""Pictures in the pool, in the first design, and chosen after it at most."""

BETWEEN_FITS = 4
"""After how many pictures hyper-parameters are fitted anew."""

QUANTILES, JITTER = 32, 1e-8


def convolutional(width: int) -> nn.Sequential:
    """Two convolutions of 3 × 3 pixels, the mean over all positions, and a linear layer."""
    return nn.Sequential(
        *(nn.Conv2d(1, width, 3), nn.ReLU(), nn.Conv2d(width, width, 3), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1)),
    )


TASK = Task(
    torch.tensor([[0.0], [1.0]], dtype=torch.float64).expand(2, 64),
    [convolutional(1)],
    nn.Sequential(nn.Unflatten(1, (1, 8, 8)), convolutional(16)).double(),
    input_shape=(1, 8, 8),
)


def problem(seed: int) -> tuple[Tensor, Tensor]:
    """The pictures (P, 64) of a pool and their values (P, 1)."""
    images, _ = data.digits("train")
    generator = torch.Generator().manual_seed(2000 + seed)
    chosen = torch.randperm(len(images), generator=generator)[:POOL]
    angle = math.pi * torch.rand((), generator=generator).item()
    pictures = images[chosen, 0].double()
    right, down = pictures.diff(dim=2), pictures.diff(dim=1)
    right = (right[:, 1:] + right[:, :-1]) / 2
    down = (down[:, :, 1:] + down[:, :, :-1]) / 2
    along = math.cos(angle) * right + math.sin(angle) * down
    values = along.square().mean((1, 2))
    return pictures.flatten(1), ((values - values.max()) / values.std())[:, None]


@dataclass(frozen=True)
class Law:
    """What a surrogate says of all pictures.

    Args:
        mean: (P,).
        covariance: (P, P).
        noise: The variance of the noise of an observation.
        members: The values of each network of an ensemble (5, P), or None.
    """

    mean: Tensor
    covariance: Tensor
    noise: Tensor
    members: Tensor | None = None

    def given(self, index: int, value: Tensor) -> Law:
        """The Gaussian law given the value of one picture more."""
        row = self.covariance[index]
        gain = row / (row[index] + self.noise)
        mean = self.mean + gain * (value - self.mean[index])
        return Law(mean, self.covariance - torch.outer(gain, row), self.noise)


class Table(Model):
    """A law as a model of BoTorch, whose points are indices of pictures (*b, q, 1)."""

    num_outputs, batch_shape = 1, torch.Size()

    def __init__(self, law: Law) -> None:
        super().__init__()
        self.law = law

    def posterior(self, X: Tensor, *args: object, **keywords: object) -> GPyTorchPosterior:  # type: ignore[override]
        """The law of q pictures in each batch."""
        i = X[..., 0].long()
        covariance = self.law.covariance[i[..., :, None], i[..., None, :]]
        jitter = JITTER * self.law.covariance.diagonal().mean() * torch.eye(i.shape[-1]).double()
        return GPyTorchPosterior(MultivariateNormal(self.law.mean[i], covariance + jitter))


class Members(EnsembleModel):
    """The same for the members of an ensemble."""

    batch_shape = torch.Size()

    def __init__(self, law: Law) -> None:
        super().__init__()
        self._num_outputs, self.values = 1, law.members

    def forward(self, X: Tensor) -> Tensor:
        """Values (*b, 5, q, 1) at indices (*b, q, 1)."""
        return self.values[:, X[..., 0].long()].movedim(0, -2)[..., None]


def law_of(model: Model, pictures: Tensor) -> Law:
    """The law of a surrogate at all pictures."""
    if isinstance(model, Ensemble):
        members, zero = model(pictures)[..., 0], torch.zeros((), dtype=torch.float64)
        return Law(members.mean(0), members.T.cov(), zero, members=members)
    law = model.posterior(pictures)
    mean, covariance = law.mean[:, 0], law.distribution.covariance_matrix
    noisy = model.posterior(pictures[:1], observation_noise=True).variance
    return Law(mean, covariance, (noisy.squeeze() - law.variance[0, 0]).clamp_min(0.0))


def thompson(law: Law, seed: int) -> Tensor:
    """One draw at all pictures."""
    if law.members is not None:
        return law.members[seed % MEMBERS]
    values, vectors = torch.linalg.eigh(law.covariance)
    normal = torch.randn(len(law.mean), generator=torch.Generator().manual_seed(seed)).double()
    return law.mean + vectors @ (values.clamp_min(0.0).sqrt() * normal)


def knowledge_gradient(law: Law) -> Tensor:
    """By how much the largest mean is expected to grow when a picture is observed: (P,).

    The means after an observation at j are μ + z Σ_j / √(Σ_jj + σ²), with z standard normal.
    """
    levels = (torch.arange(QUANTILES, dtype=torch.float64) + 0.5) / QUANTILES
    slopes = law.covariance / (law.covariance.diagonal() + law.noise).clamp_min(1e-12).sqrt()
    z = torch.special.ndtri(levels)
    largest = torch.stack([(law.mean[:, None] + slopes * number).amax(0) for number in z])
    return largest.mean(0) - law.mean.max()


def best_unseen(name: str, law: Law, seen: list[int], Y: Tensor, seed: int) -> int:
    """The picture that was not seen and has the largest value of the acquisition function."""
    rest = [index for index in range(len(law.mean)) if index not in seen]
    if name == "Thompson":
        score = thompson(law, seed)[rest]
    elif name == "qKG":
        score = knowledge_gradient(law)[rest]
    else:
        score = on_table(name, law, seen, rest, Y, seed)
    return rest[int(score.argmax())]


def on_table(name: str, law: Law, seen: list[int], rest: list[int], Y: Tensor, seed: int) -> Tensor:
    """An acquisition function of BoTorch at the pictures `rest`."""
    ensemble = law.members is not None
    table = Members(law) if ensemble else Table(law)
    points = torch.arange(len(law.mean), dtype=torch.float64)[:, None, None]
    sampler = IndexSampler(SAMPLES, seed) if ensemble else SobolQMCNormalSampler(SAMPLES, seed)
    if name == "qLogNEI":
        function = qLogNoisyExpectedImprovement(
            table, points[seen, 0], sampler=sampler, prune_baseline=True, cache_root=False
        )
    elif ensemble:
        function = qLogExpectedImprovement(table, Y.max(), sampler=sampler)
    else:
        function = LogExpectedImprovement(table, Y.max())
    return function(points[rest])


def needed(best: list[float]) -> int:
    """How many pictures were chosen until the best one was found; one more than there were, if it was not."""
    return sum(value < 0 for value in best)


def found_in_pool(model: str, name: str, seed: int, steps: int | None) -> list[float]:
    """The best value after the first design, and after each further picture."""
    pictures, values = problem(seed)
    seen = list(range(FIRST))
    best, surrogate = [float(values[seen].max())], None
    steps = STEPS if steps is None else steps
    for step in range(steps):
        number = 1000 * seed + step
        torch.manual_seed(number)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if model == ENSEMBLE or step % BETWEEN_FITS == 0:
                surrogate = fitted(model, TASK, pictures[seen], values[seen], surrogate, number)
                with torch.no_grad():
                    law = law_of(surrogate, pictures)
            else:
                law = law.given(seen[-1], values[seen[-1], 0])
            with torch.no_grad():
                seen.append(best_unseen(name, law, seen, values[seen], number))
        best.append(float(values[seen].max()))
        if best[-1] == 0:
            break
    return best + [0.0] * (steps + 1 - len(best))
