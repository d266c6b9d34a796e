"""`deep.fit`: a posterior of a deep Gaussian process by doubly stochastic variational inference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from net2gp.deep.inference.ascent import Found
from net2gp.deep.inference.problem import DeepProblem, make_problem
from net2gp.deep.inference.process import Deep, InnerDraws, draw_inner
from net2gp.deep.inference.settings import Ascent
from net2gp.deep.inference.sigma_points import SigmaPoints, SigmaStack
from net2gp.deep.inference.sparse_layer import SparseLayer
from net2gp.deep.inference.stack import Stack
from net2gp.deep.inference.starts import batch_of
from net2gp.deep.inference.steps.restarts import climb_all
from net2gp.errors import InputError, NotAvailable
from net2gp.inputs import describe
from net2gp.likelihoods.traits import has_gaussian_noise
from net2gp.linalg.checkpoint import Checkpoint
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.recipe import Recipe
from net2gp.posteriors.writing import digest, encode
from net2gp.tags import savable
from net2gp.types import Data, Kernel, Likelihood, Observed

FINAL_DRAWS = 64
"""The number of draws per row from which the bound at the end is estimated."""

FINAL_ROWS = 1000
"""The number of rows that the bound at the end takes at a time."""

MOST_LAYERS = 5
"""The most layers that are tried where the bound chooses their number."""


@savable("recipe.ByAscent")
@dataclass(frozen=True, eq=False)
class ByAscent(Recipe):
    """The recipe of `deep.fit`.

    Args:
        start: The name of the start that had the best bound.
        bounds: The average bound between successive looks.
        num_steps: The number of steps.
        depth_bounds: The bounds of one layer, two layers and so on, as far as they were tried, where the
            bound chose the number of layers. Empty where the number was given.
    """

    start: str
    bounds: Tensor = field(repr=False)
    num_steps: int
    depth_bounds: tuple[float, ...] = ()

    def extend(self, posterior: Posterior, data: Data, likelihood: Likelihood | None) -> Posterior:
        """Refuse: all layers would move."""
        raise NotAvailable(
            "update is for a Gaussian process that was conditioned on data, and new data would move all "
            "layers of a deep one. Call deep.fit with all data."
        )

    def without_evidence(self) -> str:
        """Why there is no evidence."""
        return (
            "a deep sigma point process maximizes the density of its predictions, which is no bound on the "
            'evidence. Use Ascent(objective="bound") to compare models.'
        )

    def facts(self, posterior: Posterior) -> dict[str, str]:
        """The method, and how many depths were compared."""
        count = len(self.depth_bounds)
        return {"method": f"deep.fit (best of {count} depths)" if count else "deep.fit"}


def fit(
    layers: int | Sequence[SparseLayer | Kernel] | None,
    data: Data,
    likelihood: Observed,
    *,
    ascent: Ascent | None = None,
) -> Posterior[Observed]:
    """Fit a deep Gaussian process f = f_L ∘ … ∘ f_1 to data, and return its posterior.

    Each layer has whitened values v ~ N(0, I) at inducing points, and a Gaussian q over them. With draws h
    through the inner layers, each row by itself, the bound

        log p(y) ≥ Σ_n E_q log p(y_n | f_L(h_n)) − Σ_l KL(q(v_l) ‖ N(0, I))

    is estimated from batches of rows and climbed: by natural gradients in the last layer, by Adam in the
    inner layers, inducing points, kernels and open noise. The first layer starts at a shallow fit of the
    targets, or at its mean function if that has a clearly better bound after half of the steps. Cost per
    step: B·S·M² per layer and output, for B rows, S draws and M inducing points, plus M³ per layer.

    Without a number of layers the bound chooses it. Fits of L = 1, 2, … layers have bounds b_L, and

        L* = argmax over L ≤ K of b_L, with K the first depth where b_K ≤ b_{K−1}, and 5 at most.

    Each depth is a fit of its own, so this costs as much as the fits of 1, …, K layers together. The bound of
    many layers needs more steps than that of few: if there are too few steps, the choice is too shallow.

    Args:
        layers: The number of squared-exponential layers, or a list of kernels or `SparseLayer`s. None lets
            the bound choose the number; `recipe.depth_bounds` of the posterior has the bounds of all depths
            that were tried.
        data: The inputs (N, D) and targets.
        likelihood: How targets follow the last layer. `Gaussian()` learns the variance of the noise.
        ascent: Settings; None means `Ascent()`. If the bound chooses the number of layers, each depth has a
            checkpoint of its own: `checkpoint="fit.safetensors"` writes fit_1.safetensors for one layer,
            fit_2.safetensors for two, and so on.

    Returns:
        The posterior. Its evidence is the bound, or none for `Ascent(objective="predictive")`.

    Raises:
        InputError: If the data or layers do not fit together, a column is constant, there are more inducing
            points than distinct rows, the fit diverges, or the number of layers is left to the objective
            "predictive", which has no bound.
        BoundFell: If the bound is lower at the end than at the start.

    >>> from net2gp.likelihoods import Gaussian
    >>> x = torch.linspace(-1, 1, 8, dtype=torch.float64)[:, None]
    >>> posterior = fit(1, (x, x.sin()), Gaussian(0.01), ascent=Ascent(num_steps=20))
    >>> posterior.num_outputs, posterior.recipe.num_steps
    (1, 20)
    >>> chosen = fit(None, (x, x.sin()), Gaussian(0.01), ascent=Ascent(num_steps=20))
    >>> len(chosen.process.layers), len(chosen.recipe.depth_bounds)  # two layers had a lower bound than one
    (1, 2)

    References: Salimbeni & Deisenroth, "Doubly stochastic variational inference for deep Gaussian
    processes", NeurIPS 2017; Damianou & Lawrence, "Deep Gaussian processes", AISTATS 2013; Salimbeni,
    Eleftheriadis & Hensman, "Natural gradients in practice", AISTATS 2018; Jankowiak, Pleiss & Gardner,
    "Deep sigma point processes", UAI 2020.
    """
    ascent = Ascent() if ascent is None else ascent
    if not isinstance(ascent, Ascent):
        raise InputError(f"ascent must be deep.Ascent(...) or None, but is {describe(ascent)}.")
    if layers is None:
        return cast("Posterior[Observed]", _best_depth(data, likelihood, ascent))
    problem = make_problem(layers, data, likelihood, ascent)
    return cast("Posterior[Observed]", _fitted(problem, ascent))


def _fitted(problem: DeepProblem, ascent: Ascent) -> Posterior:
    """The posterior of layers whose number is known."""
    with torch.inference_mode(False), torch.enable_grad():
        found = climb_all(problem, ascent, _checkpoint(problem, ascent))
    return posterior_of(problem, found, ascent)


def _best_depth(data: Data, likelihood: Likelihood, ascent: Ascent) -> Posterior:
    """The fit with the largest bound: layers are added until one more does not raise it."""
    if ascent.objective == "predictive":
        raise InputError(
            'the number of layers is None, but objective="predictive" has no bound that could choose it. '
            'Pass a number of layers, such as deep.fit(2, ...), or Ascent(objective="bound").'
        )
    tried: list[Posterior] = []
    bounds: list[float] = []
    for depth in range(1, MOST_LAYERS + 1):
        problem = make_problem(depth, data, likelihood, ascent)
        data = problem.given  # a loader is read once
        tried.append(_fitted(problem, _of_depth(ascent, depth)))
        bounds.append(float(tried[-1].log_marginal_likelihood()))
        if depth > 1 and bounds[-1] <= bounds[-2]:
            break
    best = tried[bounds.index(max(bounds))]
    assert isinstance(best.recipe, ByAscent)
    return replace(best, recipe=replace(best.recipe, depth_bounds=tuple(bounds)))


def _of_depth(ascent: Ascent, depth: int) -> Ascent:
    """The settings with a checkpoint for one of several depths."""
    if ascent.checkpoint is None:
        return ascent
    path = Path(ascent.checkpoint)
    Checkpoint(path).check_writable()  # a folder has no file name to which the depth could be added
    return replace(ascent, checkpoint=path.with_name(f"{path.stem}_{depth}{path.suffix}"))


def posterior_of(problem: DeepProblem, found: Found, ascent: Ascent) -> Posterior:
    """The posterior of a fit that has ended."""
    layers = found.stack.fitted()
    draws = ascent.num_draws if len(layers) > 1 else 1
    by_points = isinstance(found.stack, SigmaStack)
    inner: InnerDraws | SigmaPoints = draw_inner(layers[:-1], draws, ascent.seed)
    if isinstance(found.stack, SigmaStack):
        inner = found.stack.sigma_points(layers)
    process = Deep(layers[-1], inner, ascent.seed)
    likelihood = found.stack.likelihood
    if problem.learns_noise:
        assert has_gaussian_noise(likelihood)
        assert isinstance(likelihood.noise_var, Tensor)
        noise = likelihood.noise_var.detach()
        likelihood = likelihood.with_noise(noise if noise.dim() else float(noise))
    recipe = ByAscent(found.start, torch.tensor(found.looks, dtype=torch.float64), found.num_steps)
    bound = None if by_points else final_bound(problem, found.stack, ascent)
    return Posterior(process, likelihood, *problem.given, bound, recipe)


@torch.no_grad()
def final_bound(problem: DeepProblem, stack: Stack, ascent: Ascent) -> Tensor:
    """The bound from all rows and many draws, with a fixed seed."""
    generator = torch.Generator().manual_seed(ascent.seed)
    total, divergences = problem.x.new_zeros(()), problem.x.new_zeros(())
    for part in torch.arange(problem.num_rows, device=problem.x.device).split(FINAL_ROWS):
        batch = batch_of(problem, part)._replace(weight=1.0)
        estimate = stack.estimate(batch, FINAL_DRAWS, generator)
        total, divergences = total + estimate.log_probs.mean(0).sum(), estimate.divergence
    return total - divergences


def _checkpoint(problem: DeepProblem, ascent: Ascent) -> Checkpoint | None:
    if ascent.checkpoint is None:
        return None
    tensors: dict[str, Tensor] = {}
    plain = replace(ascent, checkpoint=None, checkpoint_seconds=1.0)
    settings = tuple(f"{name}={value}" for name, value in vars(plain).items())
    layers = tuple((one.kernel, one.width, one.mean, one.num_inducing) for one in problem.layers)
    tree = encode((problem.x, problem.y, problem.likelihood, layers, settings), tensors, {})
    key = digest(tensors, f"{tree}")[:32]
    checkpoint = Checkpoint(Path(ascent.checkpoint), key, ascent.checkpoint_seconds)
    checkpoint.check_writable()
    return checkpoint
