"""The surrogates that `bayesian_optimization.py` sets beside each other: ours, BoTorch's, and networks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.ensemble import EnsembleModel
from botorch.models.model import Model
from botorch.models.transforms import Normalize, Standardize
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor, nn
from torch.func import functional_call, vmap

import net2gp as n2g
from net2gp.interop.botorch import NetworkGP, PosteriorModel
from net2gp.interop.kernels import Stretched, with_variances
from net2gp.kernels import BaseKernel
from net2gp.tuning import LogNormal

OURS, AVERAGED, KNOWN = "net2gp", "net2gp averaged", "net2gp true prior"
RIVAL, ENSEMBLE = "SingleTaskGP", "ensemble"

MEMBERS, TRAINING_STEPS = 5, 200
"""Of the ensemble."""

DRAWS, KEPT = 32, 4
"""How many draws of the hyper-parameters are weighted by their evidence, and how many are kept."""

PRIORS: Mapping[str, LogNormal] = {
    "lengthscale": LogNormal(0.4, 1.0),
    "weight_var": LogNormal(1.0, 1.0),
    "bias_var": LogNormal(0.3, 1.0),
    "noise_var": LogNormal(1e-3, 1.5, lower=1e-6),
}


@dataclass(frozen=True)
class Task:
    """What the surrogates of a problem know before they see a value.

    Args:
        bounds: The box of the points, (2, d).
        networks: The networks whose limits are ours: the first one alone, or all, averaged. None is the
            default of `NetworkGP`.
        member: A member of the ensemble, in float64: (N, d) to (N, 1). Its own weights do not matter.
        input_shape: The shape of a point.
        prior: The process that the functions are drawn from, if there is one.
    """

    bounds: Tensor
    networks: Sequence[nn.Module | None]
    member: nn.Module
    input_shape: tuple[int, ...] | None = None
    prior: BaseKernel | None = None

    def unit(self, X: Tensor) -> Tensor:
        """The points in the unit cube."""
        low, high = self.bounds
        return (X - low) / (high - low)


def started(parameter: Tensor, generator: torch.Generator) -> Tensor:
    """Weights of variance 1 / fan-in, or biases of zero, for all members: (5, *shape)."""
    if parameter.dim() == 1:
        return torch.zeros(MEMBERS, *parameter.shape, dtype=torch.float64)
    outputs, inputs = len(parameter), parameter[0].numel()
    drawn = torch.randn(MEMBERS, inputs, outputs, generator=generator).double() / math.sqrt(inputs)
    return drawn.mT.reshape(MEMBERS, *parameter.shape)


class Ensemble(EnsembleModel):
    """Five networks, trained from different starts on all data.

    Args:
        task: Has one of them.
        X: Points.
        Y: Values, (N, 1).
        seed: The seed of the starts.
    """

    def __init__(self, task: Task, X: Tensor, Y: Tensor, seed: int) -> None:
        super().__init__()
        self._num_outputs, self.task = 1, task
        self.middle, self.scale = Y.mean(), Y.std().clamp_min(1e-9)
        generator = torch.Generator().manual_seed(seed)
        self.weights = {
            name: started(value, generator).requires_grad_()
            for name, value in task.member.named_parameters()
        }
        optimizer = torch.optim.AdamW(self.weights.values(), lr=1e-2, weight_decay=1e-3)
        target = (Y - self.middle) / self.scale
        for _ in range(TRAINING_STEPS):
            optimizer.zero_grad()
            (self.values(X) - target).square().mean().mul(MEMBERS).backward()
            optimizer.step()
        self.weights = {name: value.detach() for name, value in self.weights.items()}

    @property
    def batch_shape(self) -> torch.Size:
        """()."""
        return torch.Size()

    def values(self, X: Tensor) -> Tensor:
        """Standardized values at points (N, d): (5, N, 1)."""
        centered = 2 * self.task.unit(X) - 1
        call = lambda weights: functional_call(self.task.member, weights, (centered,))
        return vmap(call)(self.weights)

    def forward(self, X: Tensor) -> Tensor:
        """Values (*b, 5, q, 1) at points (*b, q, d)."""
        flat = self.middle + self.scale * self.values(X.reshape(-1, X.shape[-1]))
        return flat.reshape(MEMBERS, *X.shape[:-1], 1).movedim(0, -3)


@dataclass(frozen=True)
class Average:
    """Limits of several networks, with hyper-parameters drawn from their prior and weighted by the evidence.

    Args:
        models: The models.
        weights: Their probabilities given the data.
    """

    models: Sequence[PosteriorModel]
    weights: Tensor

    @property
    def likely(self) -> PosteriorModel:
        """The most probable model."""
        return self.models[int(self.weights.argmax())]


def averaged(task: Task, X: Tensor, Y: Tensor, seed: int) -> Average:
    """Draw networks and hyper-parameters from the prior, and weigh them by the evidence."""
    box, scale = Normalize(X.shape[1], bounds=task.bounds, center=0.0), Standardize(1)
    y, _ = scale(Y)
    points = box(X).detach()
    uniform = torch.quasirandom.SobolEngine(len(PRIORS), scramble=True, seed=seed).draw(DRAWS)
    normal = torch.special.ndtri(uniform.double().clamp(1e-4, 1 - 1e-4))
    limits, posteriors = [n2g.nngp(network) for network in task.networks], []
    for index, row in enumerate(normal):
        values = {
            name: (prior.median * (prior.spread * number).exp()).clamp_min(prior.lower)
            for (name, prior), number in zip(PRIORS.items(), row, strict=True)
        }
        lengthscale, noise = values.pop("lengthscale"), n2g.Gaussian(values.pop("noise_var"))
        kernel = Stretched(with_variances(limits[index % len(limits)], **values), lengthscale)
        posteriors.append(n2g.condition(kernel, (points, y.detach()), noise))
    evidence = torch.stack([posterior.log_marginal_likelihood() for posterior in posteriors])
    best = evidence.topk(KEPT)
    models = [
        PosteriorModel(posteriors[i], input_transform=box, outcome_transform=scale, train_X=X)
        for i in best.indices.tolist()
    ]
    return Average(models, best.values.softmax(0).detach())


def fitted(
    name: str, task: Task, X: Tensor, Y: Tensor, before: object, seed: int
) -> Model | Average:
    """The surrogate of that name; ours starts where the last fit ended."""
    if name == ENSEMBLE:
        return Ensemble(task, X, Y, seed)
    if name == KNOWN:
        return PosteriorModel(
            n2g.condition(task.prior, (X, Y), n2g.Gaussian(PRIORS["noise_var"].lower))
        )
    if name == AVERAGED:
        return averaged(task, X, Y, seed)
    if name == RIVAL:
        model = SingleTaskGP(task.unit(X), Y)
        fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        return model
    start = before.hyperparameters if isinstance(before, NetworkGP) else None
    return NetworkGP(
        X, Y, task.networks[0], bounds=task.bounds, start=start, input_shape=task.input_shape
    )
