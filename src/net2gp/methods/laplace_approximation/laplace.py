"""Laplace's approximation of a trained network: a Gaussian over its parameters, which is a GP."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from net2gp.errors import EmptyClass, InputError, NetworkError, NotStationary, check_positive
from net2gp.inputs import check_made, chunks, describe, gather, map_inputs, num_rows, rows
from net2gp.likelihoods.traits import has_one_class, has_open_noise, of_points
from net2gp.linalg import psd_root
from net2gp.linear import Linearized, linearize
from net2gp.linear.curvatures.curvature import (
    Curvature,
    Source,
    SubsetCurvature,
    diagonal_curvature,
    full_curvature,
    kron_curvature,
    low_rank_curvature,
    subset_curvature,
)
from net2gp.linear.curvatures.head import has_features, last_linearized
from net2gp.linear.curvatures.last_layer import (
    LastLayerCurvature,
    last_layer_diagonal,
    last_layer_full,
    last_layer_kron,
)
from net2gp.linear.forward.evaluation import pullback
from net2gp.linear.linearized import Patterns, PriorVar, example_of, expand_prior
from net2gp.linear.planning.probe import check_used
from net2gp.methods.laplace_approximation.choosing import tuned
from net2gp.methods.laplace_approximation.functions import by_factors, function_space, with_own_link
from net2gp.methods.laplace_approximation.matching import some_points
from net2gp.methods.laplace_approximation.regression import is_regression
from net2gp.methods.laplace_approximation.sampled import sampled
from net2gp.methods.laplace_approximation.tuning import (
    Evidence,
    Matched,
    Search,
    Task,
    Tuned,
    Tuning,
)
from net2gp.posteriors.conditioning.checks import check_class_axis, check_prior_var, remedy
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.recipes.around_network import ByLaplace, around_network
from net2gp.posteriors.weights.precision import covariance, log_det, prior_vector, trace
from net2gp.posteriors.weights.structures import (
    Diagonal,
    Full,
    FunctionSpace,
    Kron,
    LastLayer,
    LowRank,
    Sampled,
    Structure,
    Subnetwork,
)
from net2gp.types import Data, Inputs, Likelihood, Observed

POINTS = 1500
"""Points that go through the network together."""

SMALL_FULL = 2500
"""Parameters up to which the whole precision is the default."""

TRACE_PROBES = 16
"""Outputs up to which the trace of the curvature is exact at a point, and random directions beyond."""

SMALL_ROWS = 4000
"""Rows N·C up to which function space is the default."""

SMALL_LAST = 4000
"""Weights up to which a last layer's whole precision is the default."""


def laplace(
    network: nn.Module | Linearized,
    data: Data,
    likelihood: Observed,
    *,
    prior_var: PriorVar | None = None,
    structure: Structure | None = None,
    only: Patterns | None = None,
    tuning: Tuning | None = None,
    temperature: float = 1.0,
) -> Posterior[Observed]:
    """The Gaussian posterior of a trained network's parameters around where they are, on its training data.

    θ ~ N(θ*, Σ) with Σ⁻¹ = diag(1/prior_var) + Σ_n J_nᵀ Λ_n J_n / temperature, for the prior
    N(0, prior_var) and the likelihood's curvature Λ: the network's outputs stay what they are, and get the
    covariance J Σ Jᵀ. `structure` says what of Σ⁻¹ is kept: `Full()`, `Diagonal()`, `Kron()`,
    `LowRank(rank)`, `LastLayer()`, `Subnetwork(num_weights)`, or `FunctionSpace()`, which has all of it
    (large classifiers: all but some per cent) without ever forming it. Left out, it is the first of these
    that is small: `Full()`, `FunctionSpace()`, else `Kron()`; the result's `structure` says which. `only`
    chooses parameters by name, as in `linearize`.

    `prior_var` and the noise of `Gaussian()` are tuned where they are left open, by `tuning`. The default,
    `Matched()`, is for regression the evidence of the linear model at its own mode, with predictions on the
    training data that are no surer than the network is right there; for classes it also chooses the link, so
    that predictions are as sure on average as the network's own, and less so away from the data.
    `Evidence()` is the Laplace approximation of the marginal likelihood
    log p(y | θ*) − ½ Σ θ*²/prior_var − ½ log|I + V^{1/2} H V^{1/2}|, and `Validation(data)` takes data that
    were held out. `marginal` does not depend on the link; `Categorical(Probit())` or any other link of your
    own is kept. `tuning` beside a `prior_var` that leaves it nothing to choose is refused.

    The mean is the network's own. Where it is not at a stationary point, `NotStationary` is warned of,
    and the mean of the linear model is another: `posterior.dual()` has it.

    >>> from net2gp.likelihoods import Gaussian
    >>> _ = torch.manual_seed(0)
    >>> network = nn.Linear(1, 1).double().eval()
    >>> x = torch.linspace(-1, 1, 5, dtype=torch.float64)[:, None]
    >>> y = network(x).detach()
    >>> posterior = laplace(network, (x, y), Gaussian(noise_var=0.1), prior_var=1.0)
    >>> posterior.marginal(torch.zeros(1, 1, dtype=torch.float64)).variance  # 1/(1 + 5/0.1)
    tensor([[0.0196]], dtype=torch.float64)

    References: MacKay, A practical Bayesian framework for backpropagation networks, 1992; Daxberger et
    al., Laplace redux, NeurIPS 2021; Khan et al., Approximate inference turns deep networks into Gaussian
    processes, NeurIPS 2019.
    """
    check_positive(temperature, "temperature")
    if prior_var is not None:
        check_prior_var(prior_var)
    with torch.inference_mode(False):
        task = make_task(network, gather(data, example_of(network)), likelihood, only, structure)
        found = _solved(task, prior_var, tuning, temperature)
        return cast("Posterior[Observed]", found)


def _solved(
    task: Task, prior_var: PriorVar | None, tuning: Tuning | None, temperature: float
) -> Posterior:
    if isinstance(task.structure, FunctionSpace):
        around = function_space(task, prior_var, tuning, temperature)
        # that of a subset has the noise of its points alone
        of_all = around.likelihood if task.open_noise else task.likelihood
        _check_stationary(task, of_all, _sampled_trace(task, of_all))
        return around
    if isinstance(task.structure, Sampled):
        drawn, size = sampled(task, prior_var, tuning, temperature)
        _check_stationary(task, drawn.likelihood, size)
        return drawn
    curvature = curvature_of(task, prior_var, temperature)
    if isinstance(curvature, SubsetCurvature):
        task = replace(task, free=curvature.index)
    params = task.params

    def build(found: Tuned) -> Posterior:
        prior = expand_prior(found.prior_var, params)
        return around_network(
            task.linearized,
            covariance(curvature, prior, params, found.scale),
            found.prior_var,
            found.likelihood,
            (task.x, task.y),
            evidence=found.evidence,
            recipe=ByLaplace(temperature, task.structure),
        )

    determinant = lambda prior, scale: log_det(curvature, prior, params, scale)
    by_default = isinstance(tuning, Matched | None) and not is_regression(task)
    if prior_var is None and by_default and _leaves_out(task):
        # the directions that are left out would make a wide prior cost nothing
        found = tuned(task, *by_factors(task), prior_var, tuning, temperature)
        own = Search(task, determinant, found.prior_var, temperature, Evidence())
        found = replace(found, evidence=own.at(_log_noise(task, found)).evidence)
        posterior = with_own_link(build(found), task, tuning)
    else:
        found = tuned(task, determinant, build, prior_var, tuning, temperature)
        posterior = build(found)
    _check_stationary(task, found.likelihood, trace(curvature) * found.scale * temperature)
    return posterior


def _log_noise(task: Task, found: Tuned) -> np.ndarray:
    """What `Search` has open once the prior is chosen."""
    noise = getattr(found.likelihood, "noise_var", None) if task.open_noise else None
    return np.array([]) if noise is None else np.array([np.log(float(noise))])


def _leaves_out(task: Task) -> bool:
    """Whether the determinant is of some directions only."""
    whole = min(task.linearized.num_params, task.f.numel())
    return isinstance(task.structure, LowRank) and task.structure.rank < whole


def make_task(
    network: nn.Module | Linearized,
    data: tuple[Inputs, Tensor],
    likelihood: Likelihood,
    only: Patterns | None,
    structure: Structure | None,
) -> Task:
    """Everything checked, and the network evaluated at the data."""
    check_made(likelihood, "likelihood")
    if not isinstance(likelihood, Likelihood):
        raise InputError(
            f"likelihood must be e.g. Categorical() or Gaussian(), but is {describe(likelihood)}."
        )
    x, y = map_inputs(data[0], _copy), _copy(data[1])
    linearized = _linearized(network, x, only, structure)
    check_class_axis(linearized, x, likelihood)
    f = torch.cat([linearized(part) for part in chunks(x, POINTS)]).double()
    likelihood.check(f.to(linearized.example.dtype), y)
    _check_alone(linearized, x, f)
    check_used(linearized, x)
    open_noise = has_open_noise(likelihood)
    _check_classes(f, y, likelihood)
    used = likelihood.with_noise(1.0) if has_open_noise(likelihood) else likelihood
    chosen = structure or _default(linearized, (x, y), used, f)
    if isinstance(chosen, LastLayer) and chosen.structure is None:
        chosen = LastLayer(Full() if linearized.num_params <= SMALL_LAST else Kron())
    return Task(linearized, x, y, used, chosen, f, open_noise)


def _check_alone(linearized: Linearized, x: Inputs, f: Tensor) -> None:
    """Raise if the network says something else of a point by itself."""
    alone = linearized(rows(x, slice(0, 1))).double()
    gap = float((alone - f[:1]).abs().max())
    if gap > 1e-3 * (1 + float(f.abs().max())):
        raise NetworkError(
            f"the network's output at a point changes by {gap:.3g} with the other points of the batch, or "
            "from call to call. Use a network that treats points one by one: no batch statistics, no dropout "
            "in eval mode."
        )


def _copy(value: Tensor) -> Tensor:
    # a posterior is a value: editing the data in place later must not change it
    with torch.inference_mode(False):
        return value.detach().clone()


def _linearized(
    network: nn.Module | Linearized, x: Inputs, only: Patterns | None, structure: Structure | None
) -> Linearized:
    check_made(structure, "structure")
    if structure is not None and not isinstance(structure, Structure):
        raise InputError(
            "structure must be Full(), Diagonal(), Kron(), LowRank(rank), LastLayer(), Subnetwork(count), "
            f"FunctionSpace(), Sampled() or None, but is {describe(structure)}."
        )
    if only is not None and isinstance(structure, LastLayer | None) and structure is not None:
        raise InputError("LastLayer() chooses its parameters itself: leave only out.")
    if isinstance(network, Linearized):
        if only is not None:
            raise InputError("pass only= to linearize, which has chosen the parameters already.")
        return last_linearized(network, x) if isinstance(structure, LastLayer) else network
    if isinstance(structure, LastLayer):
        return last_linearized(linearize(network), x)
    return linearize(network, only=only)


def _default(
    linearized: Linearized, data: tuple[Inputs, Tensor], likelihood: Likelihood, f: Tensor
) -> Structure:
    """The first structure that has all of it and is small, else `Kron()`, with a diagonal where it must."""
    small = linearized.num_params <= (SMALL_FULL if linearized.num_params <= f.numel() else 1000)
    if small:
        return Full()
    if f.numel() <= SMALL_ROWS:
        return FunctionSpace()
    try:
        kron_curvature(Source(linearized, rows(data[0], slice(0, 3)), data[1][:3], likelihood))
    except NetworkError:
        return Kron(rest=Diagonal())
    return Kron()


def _check_classes(f: Tensor, y: Tensor, likelihood: Likelihood) -> None:
    if not has_one_class(likelihood):
        return
    counts = torch.bincount(y.long(), minlength=f.shape[1])
    empty = (counts == 0).nonzero().flatten().tolist()
    if empty:
        some = ", ".join(str(c) for c in empty[:8]) + (", …" if len(empty) > 8 else "")
        warnings.warn(
            f"no example of class {some} in the data: the prior alone says how sure their logits are.",
            EmptyClass,
            stacklevel=4,
        )


def curvature_of(
    task: Task, prior_var: PriorVar | None = None, temperature: float = 1.0
) -> Curvature | LastLayerCurvature:
    """H of the task in its structure; a prior that is given counts for which subnetwork is chosen."""
    structure = task.structure
    if isinstance(structure, LastLayer):
        return _last_layer_curvature(task, structure)
    if isinstance(structure, LowRank):
        source = Source(task.linearized, task.x, task.y, task.likelihood)
        return low_rank_curvature(source, structure.rank, structure.seed)
    if isinstance(structure, Subnetwork):
        return _subnetwork_curvature(task, structure, prior_var, temperature)
    assert isinstance(structure, Full | Diagonal | Kron)
    return _plain_curvature(task, structure)


def _plain_curvature(task: Task, structure: Full | Diagonal | Kron) -> Curvature:
    source = Source(task.linearized, task.x, task.y, task.likelihood, structure.fisher)
    if isinstance(structure, Full):
        return full_curvature(source)
    if isinstance(structure, Diagonal):
        return diagonal_curvature(source)
    return kron_curvature(source, diagonal_rest=structure.rest is not None)


def _subnetwork_curvature(
    task: Task, structure: Subnetwork, prior_var: PriorVar | None, temperature: float
) -> SubsetCurvature:
    """Of the parameters with the largest variance v/(1 + v·h), whose order is the same for any common v.

    Those without curvature, such as the weights of inputs that are always zero, are the least known of all
    and matter at none of the data: they come last.
    """
    source = Source(task.linearized, task.x, task.y, task.likelihood)
    prior = expand_prior(1.0 if prior_var is None else prior_var, task.params)
    v = prior_vector(prior, task.params)
    h = diagonal_curvature(source).diagonal / temperature
    variance = torch.where(h > 0, v / (1 + v * h), 0.0)
    count = min(structure.num_weights, task.linearized.num_params)
    return subset_curvature(source, torch.topk(variance, count).indices.sort().values)


def _last_layer_curvature(task: Task, structure: LastLayer) -> Curvature | LastLayerCurvature:
    inner = structure.structure
    assert inner is not None
    if not has_features(task.linearized, task.x):
        return _plain_curvature(task, inner)
    source = Source(task.linearized, task.x, task.y, task.likelihood, inner.fisher)
    if isinstance(inner, Full):
        return last_layer_full(source)
    return last_layer_diagonal(source) if isinstance(inner, Diagonal) else last_layer_kron(source)


def _sampled_trace(task: Task, likelihood: Likelihood, count: int = 200) -> float:
    """tr Σ_n J_nᵀ Λ_n J_n, from some of the points.

    With many outputs as E‖Σ_n J_nᵀ S_n z_n‖², SSᵀ = Λ, of standard normal z (Hutchinson 1990): a backward
    pass for each of a few z in place of one for each output.
    """
    index = some_points(torch.arange(num_rows(task.x)), count)
    assert isinstance(index, Tensor)
    index = index.to(task.f.device)
    part, curvature = rows(task.x, index), of_points(likelihood, index).curvature(task.f[index])
    if task.f.shape[1] <= TRACE_PROBES:
        total = float((task.linearized.kernel().blocks(part).double() * curvature).sum())
    else:
        generator = torch.Generator().manual_seed(0)
        z = torch.randn(len(index), task.f.shape[1], TRACE_PROBES, generator=generator)
        seeds = (psd_root(curvature) @ z.to(curvature.device).double()).flatten(0, 1)
        pulled = task.linearized.kernel().adjoint(part, seeds)
        total = float(pulled.double().square().sum()) / TRACE_PROBES
    return total * num_rows(task.x) / len(index)


def _check_stationary(task: Task, likelihood: Likelihood, trace: float) -> None:
    """Warn if the gradient is larger than labels drawn from the network itself would make it.

    At a stationary point Σ_n J_nᵀ r_n = θ*/prior_var for the prior of the training, whatever it was: what
    no multiple of θ* explains is compared with the size E‖Jᵀr‖² = tr H of a random gradient.
    """
    linearized, count = task.linearized, num_rows(task.x)
    residual = likelihood.residual(task.f, task.y)
    gradient = torch.zeros(linearized.num_params, dtype=torch.float64, device=task.f.device)
    size = -(-count // -(-count // POINTS))  # pieces of the same size
    for start in range(0, count, size):
        part, u = rows(task.x, slice(start, start + size)), residual[start : start + size]
        # plain autograd has less overhead than torch.func
        out, pull = pullback(partial(linearized.evaluate, x=part), linearized.params, twice=True)
        gradient += linearized.flatten(pull(u.to(out.dtype))).double()
    theta = linearized.flatten(task.params).double()
    if task.free is not None:  # the trace is that of the chosen weights alone
        gradient, theta = gradient[task.free], theta[task.free]
    share = (gradient @ theta) / (theta @ theta).clamp(min=1e-300)
    rest = float((gradient - share.clamp(min=0) * theta).norm())
    if rest > trace**0.5:
        warnings.warn(
            f"the network is not at a stationary point: the gradient of its log-likelihood has norm "
            f"{float(gradient.norm()):.3g}, of which {rest:.3g} is not explained by weight decay, where "
            f"{trace**0.5:.3g} would be by chance. {remedy(linearized.network)} The mean stays the "
            "network's; that of the linear model is posterior.dual().condition().",
            NotStationary,
            stacklevel=4,
        )
