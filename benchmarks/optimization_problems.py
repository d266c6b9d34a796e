"""Functions to maximize, in boxes, and the loops that do so: what `bayesian_optimization.py` measures."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from botorch.acquisition import LogExpectedImprovement, PosteriorMean, qKnowledgeGradient
from botorch.acquisition.logei import qLogExpectedImprovement, qLogNoisyExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.deterministic import DeterministicModel, GenericDeterministicModel
from botorch.models.ensemble import EnsembleModel
from botorch.models.model import Model
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from botorch.sampling.index_sampler import IndexSampler
from botorch.sampling.pathwise import get_matheron_path_model
from botorch.test_functions import Branin, Hartmann
from botorch.utils.sampling import draw_sobol_samples
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor, nn

from net2gp.interop.botorch import NetworkGP
from net2gp.limits.modules import Erf


@dataclass(frozen=True)
class Problem:
    """A function to maximize.

    Args:
        make: From a seed to the function of points (N, d); only the third problem depends on the seed.
        bounds: The box, (2, d).
        first: The size of the first design, a scrambled Sobol sequence.
        steps: How many points are chosen after it.
    """

    make: Callable[[int], Callable[[Tensor], Tensor]]
    bounds: Tensor
    first: int
    steps: int


def drawn_network(seed: int) -> Callable[[Tensor], Tensor]:
    """A tanh network of 50 inputs and two hidden layers of 100 units, with random weights."""
    generator = torch.Generator().manual_seed(1000 + seed)
    sizes = ((50, 100, 3.0), (100, 100, 1.5), (100, 1, 1.0))
    weights = [
        spread / math.sqrt(a) * torch.randn(a, b, generator=generator, dtype=torch.float64)
        for a, b, spread in sizes
    ]

    def function(x: Tensor) -> Tensor:
        for weight in weights[:-1]:
            x = torch.tanh(x @ weight)
        return (x @ weights[-1])[:, 0]

    return function


BRANIN, HARTMANN = Branin(negate=True).double(), Hartmann(negate=True).double()
PROBLEMS = {
    "Branin": Problem(lambda seed: BRANIN, BRANIN.bounds.double(), 6, 18),
    "Hartmann-6": Problem(lambda seed: HARTMANN, HARTMANN.bounds.double(), 12, 28),
    "network-50": Problem(
        drawn_network, torch.tensor([[-1.0], [1.0]], dtype=torch.float64).expand(2, 50), 20, 15
    ),
}

ERF = nn.Sequential(nn.Linear(50, 64), Erf(), nn.Linear(64, 64), Erf(), nn.Linear(64, 1))
NETWORKS: dict[str, nn.Module | None] = {"Branin": None, "Hartmann-6": None, "network-50": ERF}
"""The network whose limit is the surrogate; None is the default of `NetworkGP`."""


class Ensemble(EnsembleModel):
    """Five networks of two hidden layers of 64 tanh units, trained from different starts on all data.

    Args:
        X: Inputs.
        Y: Outcomes, (N, 1).
        bounds: The box.
        seed: The seed of the starts.
    """

    def __init__(self, X: Tensor, Y: Tensor, bounds: Tensor, seed: int) -> None:
        super().__init__()
        self._num_outputs, self.bounds = 1, bounds
        self.middle, self.scale = Y.mean(), Y.std().clamp_min(1e-9)
        generator = torch.Generator().manual_seed(seed)
        sizes = [X.shape[1], 64, 64, 1]
        self.weights = [
            (torch.randn(5, a, b, generator=generator).double() / math.sqrt(a)).requires_grad_()
            for a, b in itertools.pairwise(sizes)
        ]
        self.biases = [torch.zeros(5, 1, b).double().requires_grad_() for b in sizes[1:]]
        optimizer = torch.optim.AdamW([*self.weights, *self.biases], lr=1e-2, weight_decay=1e-3)
        target = (Y - self.middle) / self.scale
        for _ in range(200):
            optimizer.zero_grad()
            (self.values(X) - target).square().mean().mul(5).backward()
            optimizer.step()
        for value in (*self.weights, *self.biases):
            value.requires_grad_(False)

    @property
    def batch_shape(self) -> torch.Size:
        """()."""
        return torch.Size()

    def values(self, x: Tensor) -> Tensor:
        """Standardized values at points (N, d): (5, N, 1)."""
        low, high = self.bounds
        x = 2 * (x - low) / (high - low) - 1
        x = x.expand(5, *x.shape)
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            x = torch.tanh(x @ weight + bias)
        return x @ self.weights[-1] + self.biases[-1]

    def forward(self, X: Tensor) -> Tensor:
        """Values (*b, 5, q, 1) at points (*b, q, d)."""
        flat = self.middle + self.scale * self.values(X.reshape(-1, X.shape[-1]))
        return flat.reshape(5, *X.shape[:-1], 1).movedim(0, -3)


def fitted(name: str, problem: str, X: Tensor, Y: Tensor, before: Model | None, seed: int) -> Model:
    """The surrogate of that name; ours starts where the last fit ended."""
    bounds = PROBLEMS[problem].bounds
    if name == "ensemble":
        return Ensemble(X, Y, bounds, seed)
    if name == "SingleTaskGP":
        low, high = bounds
        model = SingleTaskGP((X - low) / (high - low), Y)
        fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        return model
    start = before.hyperparameters if isinstance(before, NetworkGP) else None
    return NetworkGP(X, Y, NETWORKS[problem], bounds=bounds, start=start)


def drawn(model: Model, seed: int) -> DeterministicModel:
    """One function from the posterior of the model."""
    if isinstance(model, NetworkGP):
        return model.draw_function(generator=torch.Generator().manual_seed(seed))
    if isinstance(model, Ensemble):
        member = seed % 5
        return GenericDeterministicModel(lambda X: model(X)[..., member, :, :])
    torch.manual_seed(seed)
    return get_matheron_path_model(model)


def acquisition(name: str, model: Model, X: Tensor, Y: Tensor, seed: int) -> nn.Module:
    """What is maximized to choose the next point."""
    size, ensemble = torch.Size([64]), isinstance(model, Ensemble)
    sampler = IndexSampler(size, seed) if ensemble else SobolQMCNormalSampler(size, seed)
    if name == "Thompson":
        return PosteriorMean(drawn(model, seed))
    if name == "qKG":
        return qKnowledgeGradient(model, num_fantasies=4)
    if name == "qLogNEI":
        return qLogNoisyExpectedImprovement(model, X, sampler=sampler, prune_baseline=True)
    if ensemble:
        return qLogExpectedImprovement(model, Y.max(), sampler=sampler)
    return LogExpectedImprovement(model, Y.max())


def maximized(problem: str, model: str, name: str, seed: int, steps: int | None) -> list[float]:
    """The best value after the first design, and after each further point."""
    task = PROBLEMS[problem]
    function, bounds = task.make(seed), task.bounds
    X = draw_sobol_samples(bounds, n=task.first, q=1, seed=seed).squeeze(1).double()
    Y = function(X)[:, None]
    best, surrogate = [float(Y.max())], None
    unit = torch.stack([torch.zeros_like(bounds[0]), torch.ones_like(bounds[0])])
    inside = model == "SingleTaskGP"  # it sees the unit cube
    box, (low, high) = (unit if inside else bounds), bounds
    for step in range(task.steps if steps is None else steps):
        number = 1000 * seed + step
        torch.manual_seed(number)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            surrogate = fitted(model, problem, X, Y, surrogate, number)
            seen = (X - low) / (high - low) if inside else X
            found, _ = optimize_acqf(
                acquisition(name, surrogate, seen, Y, number),
                bounds=box,
                q=1,
                num_restarts=3,
                raw_samples=64,
                options={"maxiter": 40},
            )
        found = low + (high - low) * found if inside else found
        X = torch.cat([X, found.detach()])
        Y = torch.cat([Y, function(found.detach())[:, None]])
        best.append(float(Y.max()))
    return best
