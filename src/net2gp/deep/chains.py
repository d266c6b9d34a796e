"""`deep.sghmc`: draws of all layers of a deep Gaussian process, in place of the Gaussians of its fit."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from net2gp.deep.inference.expectations import expectations
from net2gp.deep.inference.fit import ByAscent
from net2gp.deep.inference.inducing import InducingLayer
from net2gp.deep.inference.process import Deep, InnerDraws
from net2gp.errors import InputError, NotAvailable, check_count, check_positive, check_seed
from net2gp.inputs import describe
from net2gp.likelihoods.traits import of_points
from net2gp.linalg.langevin import sghmc_step
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.recipe import Recipe
from net2gp.progress import progress
from net2gp.tags import savable
from net2gp.types import Data, Likelihood, Observed

MEMORY = 1.0
"""The time over which a chain forgets its momentum, in units in which a layer has unit variance."""


@savable("recipe.ByLayerChains")
@dataclass(frozen=True, eq=False)
class ByLayerChains(Recipe):
    """The recipe of `deep.sghmc`.

    Args:
        num_chains: The number of chains. Draw s of the posterior belongs to chain s mod num_chains.
        step_size: The length of a step.
        log_joints: The average log joint of all chains before each kept draw: (draws of a chain,).
    """

    num_chains: int
    step_size: float
    log_joints: Tensor = field(repr=False)

    def extend(self, posterior: Posterior, data: Data, likelihood: Likelihood | None) -> Posterior:
        """Refuse: all layers would move."""
        raise NotAvailable(
            "update is for a Gaussian process that was conditioned on data, and new data would move all "
            "layers of a deep one. Call deep.fit with all data, and deep.sghmc after it."
        )

    def without_evidence(self) -> str:
        """Why there is no evidence."""
        return (
            "draws of a chain have no evidence. Call log_marginal_likelihood on the posterior of deep.fit, "
            "whose bound compares models."
        )

    def facts(self, posterior: Posterior) -> dict[str, str]:
        """The method."""
        return {"method": "deep.sghmc"}


class Target(NamedTuple):
    """What the chains draw from: the whitened values of all layers, given data."""

    layers: tuple[InducingLayer, ...]
    likelihood: Likelihood
    x: Tensor
    y: Tensor

    def log_joint(self, values: list[Tensor], rows: Tensor, generator: torch.Generator) -> Tensor:
        """Estimate log p(y, v) of K chains from some rows: (K,).

        What the inducing points leave open of an inner layer is drawn, and integrated out of the last one.

        Args:
            values: The whitened values of each layer, (K, M, C).
            rows: The numbers of the rows.
            generator: The source of random numbers.
        """
        count, current = len(values[0]), self.x[rows]
        for index, (layer, v) in enumerate(zip(self.layers, values, strict=True)):
            mean, open_var = layer.project(current).given(v, len(rows))
            if index < len(self.layers) - 1:
                z = torch.randn(mean.shape, generator=generator, dtype=mean.dtype).to(mean)
                current = (mean + open_var.sqrt() * z).flatten(0, 1)
        y = self.y[rows].repeat(count, *[1] * (self.y.dim() - 1))
        likelihood = of_points(self.likelihood, rows.repeat(count))
        flat = mean.flatten(0, 1), open_var.expand_as(mean).flatten(0, 1)
        fits = expectations(likelihood, *flat, y).log_prob.reshape(count, -1).sum(1)
        prior = sum(-0.5 * v.square().sum((1, 2)) for v in values)
        return prior + len(self.x) / len(rows) * fits


def sghmc(
    posterior: Posterior[Observed],
    *,
    num_draws: int = 10,
    num_chains: int = 10,
    warmup: int = 200,
    thin: int = 20,
    step_size: float = 0.2,
    batch_size: int | None = None,
    seed: int = 0,
) -> Posterior[Observed]:
    """Draw the values of all layers at their inducing points, from where `deep.fit` ended.

    A fit has a Gaussian for each layer, independent of the other layers. Chains draw from

        p(v | y) ∝ Π_l N(v_l; 0, I) · exp Σ_n E[log p(y_n | f_L(x_n)) | v],

    in which the layers depend on each other and can have several modes. Kernels, inducing points and noise
    stay as they were fitted. The chains move by stochastic gradient Hamiltonian Monte Carlo in coordinates
    in which the fit has unit variance, each from a draw of the fit. Cost per step: as a step of `deep.fit`
    with one draw per chain.

    Args:
        posterior: A posterior of `deep.fit` with the objective "bound".
        num_draws: The number of draws that are kept of each chain.
        num_chains: The number of chains, which move together.
        warmup: The number of steps before the first draw.
        thin: The number of steps between two draws.
        step_size: The length of a step, in standard deviations of the fit.
        batch_size: The number of rows of a step; None takes all rows.
        seed: The seed of all random numbers.

    Returns:
        The posterior, a mixture over num_chains·num_draws draws.

    Raises:
        InputError: If the posterior is of another method, a number is out of range, or a chain diverges.

    >>> from net2gp.deep import Ascent, fit
    >>> from net2gp.likelihoods import Gaussian
    >>> x = torch.linspace(-1, 1, 8, dtype=torch.float64)[:, None]
    >>> fitted = fit(2, (x, x.sin()), Gaussian(0.01), ascent=Ascent(num_steps=20))
    >>> sghmc(fitted, num_draws=2, num_chains=3, warmup=10, thin=2).mean(x).shape
    torch.Size([8, 1])

    References: Havasi, Hernández-Lobato and Murillo-Fuentes, "Inference in deep Gaussian processes using
    stochastic gradient Hamiltonian Monte Carlo", NeurIPS 2018; Chen, Fox and Guestrin, "Stochastic gradient
    Hamiltonian Monte Carlo", ICML 2014.
    """
    process = _fitted(posterior)
    counts = {"num_draws": num_draws, "num_chains": num_chains, "thin": thin}
    for name, value in counts.items():
        check_count(value, name)
    check_count(warmup, "warmup", example=200, zero=True)
    if batch_size is not None:
        check_count(batch_size, "batch_size", example=256)
    check_positive(step_size, "step_size", single=True)
    check_seed(seed)
    if posterior.x is None or posterior.y is None:
        raise InputError(
            "this posterior does not keep its data, which the chains need. Call deep.fit."
        )
    x, y = cast(Tensor, posterior.x), posterior.y
    y = y.double() if y.is_floating_point() else y
    target = Target(process.layers, posterior.likelihood, x.double(), y)
    with torch.inference_mode(False), torch.enable_grad():
        chains = Chains.begin(target, num_chains, step_size, batch_size, seed)
        chains.run(warmup, thin, num_draws)
    values = tuple(torch.cat(parts) for parts in zip(*chains.kept, strict=True))
    *inner, last = values
    generator = torch.Generator().manual_seed(seed)
    open_parts = tuple(
        torch.randn(len(v), v.shape[2], generator=generator, dtype=torch.float64).to(v)
        for v in inner
    )
    drawn = InnerDraws(process.layers[:-1], tuple(inner), open_parts)
    found = Deep(process.last, drawn, process.seed, last)
    recipe = ByLayerChains(num_chains, step_size, torch.tensor(chains.looks, dtype=torch.float64))
    return replace(posterior, process=found, evidence=None, recipe=recipe)


class Chains:
    """Chains over the values of all layers, in coordinates in which the fit has unit variance.

    Args:
        target: What they draw from.
        position: Where they are, (K, P).
        step_size: The length of a step.
        batch_size: The number of rows of a step, or None.
        generator: The source of random numbers.
    """

    def __init__(
        self,
        target: Target,
        position: Tensor,
        step_size: float,
        batch_size: int | None,
        generator: torch.Generator,
    ) -> None:
        self.target, self.position, self.generator = target, position, generator
        self.momentum = self._noise()
        self.step_size, self.batch_size = step_size, batch_size
        self.kept: list[tuple[Tensor, ...]] = []
        self.looks: list[float] = []

    @classmethod
    def begin(
        cls, target: Target, count: int, step_size: float, batch_size: int | None, seed: int
    ) -> Chains:
        """Start each chain at a draw of the fit."""
        generator = torch.Generator().manual_seed(seed)
        size = sum(layer.center.numel() for layer in target.layers)
        start = torch.randn(count, size, generator=generator, dtype=torch.float64)
        return cls(target, start.to(target.x), step_size, batch_size, generator)

    def values(self, position: Tensor) -> list[Tensor]:
        """The whitened values of each layer, v = m + S z: (K, M, C)."""
        found, start = [], 0
        for layer in self.target.layers:
            count, width = layer.center.shape
            z = position[:, start : start + count * width].reshape(-1, width, count)
            found.append(layer.center + torch.einsum("cmk,sck->smc", layer.root, z))
            start += count * width
        return found

    def run(self, warmup: int, thin: int, num_draws: int) -> None:
        """Move all chains, and keep their values after the warmup.

        Raises:
            InputError: If a chain diverges.
        """
        kept = math.exp(-self.step_size / MEMORY)
        step = torch.full((1, 1), self.step_size).to(self.position)
        total = warmup + thin * num_draws
        with progress("chains of a deep Gaussian process", total) as advance:
            for number in range(1, total + 1):
                log_joint, slope = self._slope()
                if not math.isfinite(log_joint):
                    raise InputError(
                        f"the chains diverged after {number} steps. Pass a smaller step_size, as "
                        f"{self.step_size / 4:g}, or a larger batch_size."
                    )
                sghmc_step(self.position, self.momentum, slope, step, kept, self._noise())
                if number > warmup and (number - warmup) % thin == 0:
                    with torch.no_grad():
                        self.kept.append(tuple(self.values(self.position)))
                    self.looks.append(log_joint)
                advance(note=f"log joint {log_joint:.1f}")

    def _slope(self) -> tuple[float, Tensor]:
        """The average log joint of the chains, and its gradient for each of them."""
        rows = self._rows()
        position = self.position.detach().requires_grad_()
        found = self.target.log_joint(self.values(position), rows, self.generator)
        (slope,) = torch.autograd.grad(found.sum(), position)
        return float(found.detach().mean()), slope

    def _rows(self) -> Tensor:
        count = len(self.target.x)
        if self.batch_size is None or self.batch_size >= count:
            return torch.arange(count, device=self.target.x.device)
        order = torch.randperm(count, generator=self.generator)
        return order[: self.batch_size].to(self.target.x.device)

    def _noise(self) -> Tensor:
        z = torch.randn(self.position.shape, generator=self.generator, dtype=torch.float64)
        return z.to(self.position)


def _fitted(posterior: Any) -> Deep:
    process = getattr(posterior, "process", None)
    if not isinstance(posterior, Posterior) or not isinstance(process, Deep):
        raise InputError(f"sghmc needs a posterior of deep.fit, but got {describe(posterior)}.")
    if not isinstance(posterior.recipe, ByAscent) or not isinstance(process.inner, InnerDraws):
        raise InputError(
            'sghmc starts from a posterior of deep.fit with Ascent(objective="bound"), and this one is of '
            "another method."
        )
    return process
