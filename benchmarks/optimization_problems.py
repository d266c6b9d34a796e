"""Functions to maximize, in boxes, and the loops that do so: what `bayesian_optimization.py` measures."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from botorch.acquisition import (
    AcquisitionFunction,
    LogExpectedImprovement,
    PosteriorMean,
    qKnowledgeGradient,
)
from botorch.acquisition.logei import qLogExpectedImprovement, qLogNoisyExpectedImprovement
from botorch.models.deterministic import DeterministicModel, GenericDeterministicModel
from botorch.models.model import Model
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from botorch.sampling.index_sampler import IndexSampler
from botorch.sampling.pathwise import get_matheron_path_model
from botorch.test_functions import Branin, Hartmann
from botorch.utils.sampling import draw_sobol_samples
from torch import Tensor, nn

import net2gp as n2g
from net2gp.interop.botorch import PosteriorModel
from net2gp.kernels import BaseKernel
from net2gp.limits.modules import Erf
from optimization_surrogates import MEMBERS, RIVAL, Average, Ensemble, Task, fitted

SAMPLES = torch.Size([64])
"""Of Monte Carlo acquisition functions."""


@dataclass(frozen=True)
class Problem:
    """A function to maximize.

    Args:
        make: From a seed to the function of points (N, d); only the third problem depends on the seed.
        task: What surrogates know of it, with the box.
        first: The size of the first design, a scrambled Sobol sequence.
        steps: How many points are chosen after it.
    """

    make: Callable[[int], Callable[[Tensor], Tensor]]
    task: Task
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


def erf_network(depth: int) -> nn.Module:
    """An erf network of 50 inputs with `depth` hidden layers, whose width does not matter."""
    sizes = itertools.pairwise([50, *[64] * depth])
    hidden = [layer for a, b in sizes for layer in (nn.Linear(a, b), Erf())]
    return nn.Sequential(*hidden, nn.Linear(64, 1))


def drawn_prior() -> BaseKernel:
    """The limit of the networks that `drawn_network` draws, with tanh x ≈ erf(√π x / 2)."""
    steepness = math.pi / 4
    variances = {"0": 9 * steepness, "2": 2.25 * steepness, "4": 1.0}
    return n2g.nngp(erf_network(2), weight_var=variances, bias_var=0.0)


def tanh_network(inputs: int) -> nn.Module:
    """A network of two hidden layers of 64 tanh units."""
    hidden = (nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    return nn.Sequential(*hidden, nn.Linear(64, 1)).double()


BRANIN, HARTMANN = Branin(negate=True).double(), Hartmann(negate=True).double()
CUBE = torch.tensor([[-1.0], [1.0]], dtype=torch.float64).expand(2, 50)
PROBLEMS = {
    "Branin": Problem(
        lambda seed: BRANIN, Task(BRANIN.bounds.double(), [None], tanh_network(2)), 6, 18
    ),
    "Hartmann-6": Problem(
        lambda seed: HARTMANN, Task(HARTMANN.bounds.double(), [None], tanh_network(6)), 12, 28
    ),
    "network-50": Problem(
        drawn_network,
        Task(
            CUBE,
            [erf_network(2), erf_network(1), erf_network(3)],
            tanh_network(50),
            prior=drawn_prior(),
        ),
        20,
        15,
    ),
}


def drawn(model: Model | Average, seed: int) -> DeterministicModel:
    """One function from the posterior of the model."""
    if isinstance(model, Average):
        generator = torch.Generator().manual_seed(seed)
        return drawn(model.models[int(model.weights.multinomial(1, generator=generator))], seed)
    if isinstance(model, PosteriorModel):
        return model.draw_function(generator=torch.Generator().manual_seed(seed))
    if isinstance(model, Ensemble):
        return GenericDeterministicModel(lambda X: model(X)[..., seed % MEMBERS, :, :])
    torch.manual_seed(seed)
    return get_matheron_path_model(model)


class Averaged(AcquisitionFunction):
    """The logarithm of the average of acquisition functions, given their logarithms.

    Args:
        parts: The acquisition functions.
        average: The models that they belong to, with their weights.

    Reference: Snoek, Larochelle and Adams, Practical Bayesian optimization, 2012 (integrated acquisition).
    """

    def __init__(self, parts: list[AcquisitionFunction], average: Average) -> None:
        super().__init__(model=average.likely)
        self.parts = nn.ModuleList(parts)
        self.weights = average.weights

    def forward(self, X: Tensor) -> Tensor:
        """Values (*b) at points (*b, q, d)."""
        logs = torch.stack([part(X) for part in self.parts])
        return torch.logsumexp(logs + self.weights.log()[:, None], 0)


def acquisition(
    name: str, model: Model | Average, X: Tensor, Y: Tensor, seed: int
) -> AcquisitionFunction:
    """What is maximized to choose the next point."""
    if name == "Thompson":
        return PosteriorMean(drawn(model, seed))
    if isinstance(model, Average):
        return Averaged([acquisition(name, one, X, Y, seed) for one in model.models], model)
    ensemble = isinstance(model, Ensemble)
    sampler = IndexSampler(SAMPLES, seed) if ensemble else SobolQMCNormalSampler(SAMPLES, seed)
    if name == "qKG":
        return qKnowledgeGradient(model, num_fantasies=4)
    if name == "qLogNEI":
        return qLogNoisyExpectedImprovement(model, X, sampler=sampler, prune_baseline=True)
    if ensemble:
        return qLogExpectedImprovement(model, Y.max(), sampler=sampler)
    return LogExpectedImprovement(model, Y.max())


def maximized(problem: str, model: str, name: str, seed: int, steps: int | None) -> list[float]:
    """The best value after the first design, and after each further point."""
    of = PROBLEMS[problem]
    function, bounds = of.make(seed), of.task.bounds
    X = draw_sobol_samples(bounds, n=of.first, q=1, seed=seed).squeeze(1).double()
    Y = function(X)[:, None]
    best, surrogate = [float(Y.max())], None
    unit = torch.stack([torch.zeros_like(bounds[0]), torch.ones_like(bounds[0])])
    inside = model == RIVAL  # it sees the unit cube
    box, (low, high) = (unit if inside else bounds), bounds
    for step in range(of.steps if steps is None else steps):
        number = 1000 * seed + step
        torch.manual_seed(number)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            surrogate = fitted(model, of.task, X, Y, surrogate, number)
            seen = of.task.unit(X) if inside else X
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
