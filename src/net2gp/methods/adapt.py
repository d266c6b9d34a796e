"""Adapt a trained network to a task in closed form: its linearization, conditioned on the task's data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from net2gp.errors import InputError
from net2gp.inputs import describe, gather, num_rows, ordinary_tensors, rows, same_inputs
from net2gp.likelihoods import Gaussian
from net2gp.likelihoods.traits import GaussianNoise, has_gaussian_noise, of_points
from net2gp.linear import Linearized, TangentKernel, linearize
from net2gp.linear.linearized import PriorVar
from net2gp.methods.adapt_tuning import Choice, tune_scale, tune_spectrum
from net2gp.methods.laplace_approximation.regression import warn_of_scales
from net2gp.posteriors.condition import condition, conditioned
from net2gp.posteriors.conditioning.problem import Problem, choose_solver, make_problem
from net2gp.posteriors.conditioning.solve import choose_inference, with_gram
from net2gp.posteriors.conditioning.solvers import Cholesky, Inference, Laplace, Solver
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.spectrum import Spectrum, decompose, share_spectrum
from net2gp.posteriors.tune import tune_spectra
from net2gp.progress import progress
from net2gp.types import Data, Inputs, Likelihood, Observed

SPECTRUM_ROWS = 6000
"""Rows up to which hyper-parameters are tuned on all points under Gaussian noise."""

NEWTON_ROWS = 2000
"""Rows up to which the prior is tuned on all points under other likelihoods."""


def adapt(
    network: nn.Module | Linearized,
    data: Data,
    likelihood: Observed,
    *,
    prior_var: PriorVar | None = None,
    zero_mean: bool = False,
    solver: Solver | None = None,
    inference: Inference | None = None,
) -> Posterior[Observed]:
    """The Gaussian process posterior of a trained network on a task, from all of its parameters.

    f(x) = f(x; θ*) + J(x)(θ − θ*) with θ − θ* ~ N(0, prior_var): linearize, tune the prior variance
    (if not given) and the noise (if the likelihood leaves it open) by the evidence, condition. The
    network itself is the prior mean, or with `zero_mean` nothing is, and the network only gives the
    kernel. Pass a `Linearized` to choose parameters or outputs: adapt(linearize(net, only="head.*"), …).

    Few points of a smooth function leave open whether they have noise at all. An open noise is therefore
    weighed by a log-normal prior around 1 % of the variance of y − m(x), a factor of 100 wide, beside the
    evidence: it decides among 5 or 10 points, and is not noticed among 50. `log_marginal_likelihood()` is
    that of the data alone, at the noise that was chosen.

    **On data that the network was trained on** its residuals are noise, and the evidence of a prior around
    the network prefers no change at all: it cannot tell how far the parameters may be from θ*. Where the
    changes would be below the noise, or would predict points that are left out no better than the network
    does, the outputs of the network stay what they are, `NothingToTune` is warned of, and prior and noise
    are found as `laplace` does, around zero: θ ~ N(0, prior_var) must explain the trained parameters
    themselves, with mean f(x; θ*) − J(x)θ* (Khan et al., 2019). `laplace` is the function for such data; it
    has other structures, too. Fewer than 20 rows N·C cannot say by themselves how far to go if they prefer
    no change (the outputs then stay, and `NothingToTune` is warned of) or if their squared error is below a
    thousandth of the variance of y; three or fewer never can: prior and noise are then found around zero as
    well, so that one or two points bring no certainty. One noise is found for all outputs: `UnequalScales`
    warns where their scales are ten times apart.
    Other likelihoods have no such evidence that could be trusted (Laplace's grows without bound on
    separable classes): there `NothingToTune` is warned of, and `prior_var` or `zero_mean` asked for.

    Tuning uses all points up to 6000 rows (N·C) under Gaussian noise, 2000 otherwise, and a fixed
    random subset of that size beyond; conditioning always uses all.

    >>> _ = torch.manual_seed(0)
    >>> network = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1)).eval()
    >>> x = torch.linspace(-2, 2, 20)[:, None]
    >>> posterior = adapt(network, (x, x.sin()), Gaussian())
    >>> float((posterior.marginal(x).mean - x.sin()).abs().max()) < 0.05
    True

    References: Maddox et al., Fast adaptation with linearized neural networks, AISTATS 2021; Khan et al.,
    Approximate inference turns deep networks into Gaussian processes, NeurIPS 2019.
    """
    with ordinary_tensors():
        found = _adapted(network, data, likelihood, prior_var, zero_mean, solver, inference)
    return cast("Posterior[Observed]", found)


def _adapted(
    network: nn.Module | Linearized,
    data: Data,
    likelihood: Likelihood,
    prior_var: PriorVar | None,
    zero_mean: bool,
    solver: Solver | None,
    inference: Inference | None,
) -> Posterior:
    linearized = network if isinstance(network, Linearized) else linearize(network)
    mean = None if zero_mean else linearized
    data = gather(data, linearized.example)
    kernel = linearized.kernel(1.0 if prior_var is None else prior_var)
    if not has_gaussian_noise(likelihood):
        if prior_var is None:
            return _tuned_by_inference(kernel, data, likelihood, mean, solver, inference)
        return condition(kernel, data, likelihood, mean=mean, solver=solver, inference=inference)
    if inference is not None:
        raise InputError("with Gaussian noise the posterior is exact: leave inference out.")
    if prior_var is not None and likelihood.noise_var is not None:
        return condition(kernel, data, likelihood, mean=mean, solver=solver)
    noise, scale = _open(likelihood), None if prior_var is None else 1.0
    if noise is None:
        warn_of_scales(data[1])
    tuning = decompose(_tuning_problem(kernel, data, likelihood, mean, SPECTRUM_ROWS))
    found = tune_spectrum(tuning, noise, scale)
    if not found.moves:
        return _around_network(tuning, data, found, solver)
    if solver is None and num_rows(tuning.problem.x) == num_rows(data[0]):
        return tuning.condition(found.noise_var, found.scale)
    scaled, noise_model = kernel.scaled(found.scale), likelihood.with_noise(found.noise_var)
    return condition(scaled, data, noise_model, mean=mean, solver=solver)


def _tuned_by_inference(
    kernel: TangentKernel,
    data: tuple[Inputs, Tensor],
    likelihood: Likelihood,
    mean: Linearized | None,
    solver: Solver | None,
    inference: Inference | None,
) -> Posterior:
    """Tuned and conditioned under a likelihood that is not Gaussian, with one Gram matrix for both."""
    problem = _tuning_problem(kernel, data, likelihood, mean, NEWTON_ROWS)
    scale, K = tune_scale(problem, inference or Laplace())
    scaled = replace(problem, kernel=kernel.scaled(scale))
    if K is not None and num_rows(problem.x) == num_rows(data[0]):
        chosen = choose_solver(scaled, solver)
        if isinstance(chosen, Cholesky):
            approximation = choose_inference(scaled, chosen, inference) or Laplace()
            solved = with_gram(scaled, chosen, approximation, K * scale, None)
            return conditioned(scaled, solved, chosen, approximation)
    return condition(scaled.kernel, data, likelihood, mean=mean, solver=solver, inference=inference)


def _around_network(
    tuning: Spectrum, data: tuple[Inputs, Tensor], found: Choice, solver: Solver | None
) -> Posterior:
    """Conditioned on what the network says of the points: its mean stays, here and after an update.

    The evidence is that of y.
    """
    problem = tuning.problem
    assert problem.mean is not None
    own = problem.mean(data[0]).detach().reshape(data[1].shape).to(data[1].dtype)
    if solver is None and num_rows(problem.x) == num_rows(data[0]):
        settled = replace(problem, y=own, offset=own.reshape(problem.offset.shape).double())
        posterior = share_spectrum(tuning, settled).condition(found.noise_var, found.scale)
        evidence = tuning.log_marginal_likelihood(found.noise_var, found.scale)
        return replace(posterior, evidence=evidence)
    kernel, likelihood = problem.kernel.scaled(found.scale), Gaussian(found.noise_var)
    of_y, of_own = (
        condition(kernel, (data[0], y), likelihood, mean=problem.mean, solver=solver)
        for y in (data[1], own)
    )
    return replace(of_own, evidence=of_y.evidence)


@ordinary_tensors()
def adapt_tasks(
    network: nn.Module | Linearized,
    tasks: Mapping[str, Data],
    likelihood: Gaussian | None = None,
    *,
    prior_var: PriorVar | None = None,
    zero_mean: bool = False,
) -> dict[str, Posterior]:
    """Adapt one network to several regression tasks: a posterior for each, by name.

    Shared are the linearization, the prior variance and noise (tuned on the sum of all evidences, so
    that tasks with few points lend each other strength), and, between tasks with the same inputs, the
    Gram matrix and its eigendecomposition.

    Cost: one eigendecomposition per distinct set of inputs.
    """
    likelihood = likelihood or Gaussian()
    if not has_gaussian_noise(likelihood):
        raise InputError(
            "adapt_tasks is for Gaussian noise; call adapt for each task of another likelihood."
        )
    if not isinstance(tasks, Mapping):
        raise InputError(
            f"tasks must map names to data, {{name: (x, y)}}, but is {describe(tasks)}."
        )
    if not tasks:
        raise InputError("tasks is empty: pass {name: (x, y)}.")
    linearized = network if isinstance(network, Linearized) else linearize(network)
    mean = None if zero_mean else linearized
    kernel = linearized.kernel(1.0 if prior_var is None else prior_var)
    spectra: dict[str, Spectrum] = {}
    with progress("tasks", len(tasks)) as advance:
        for name, data in tasks.items():
            pair = gather(data, linearized.example)
            problem = make_problem(kernel, pair, Gaussian(1.0), mean)
            known = next((s for s in spectra.values() if same_inputs(s.problem.x, problem.x)), None)
            spectra[name] = decompose(problem) if known is None else share_spectrum(known, problem)
            advance()
    noise, scale = tune_spectra(
        list(spectra.values()), _open(likelihood), None if prior_var is None else 1.0
    )
    return {name: spectrum.condition(noise, scale) for name, spectrum in spectra.items()}


def _open(likelihood: GaussianNoise) -> float | None:
    """The noise to keep while tuning, or None if it is to be tuned."""
    if likelihood.noise_var is None:
        return None
    if isinstance(likelihood.noise_var, Tensor) and likelihood.noise_var.numel() > 1:
        raise InputError(
            "with a noise_var per point or output, pass prior_var too, or tune it: "
            "tune(lambda prior_var: condition(linearize(network).kernel(prior_var), …), prior_var=1.0)."
        )
    if not float(likelihood.noise_var) > 0:
        raise InputError(
            "with noise_var=0 the prior variance cannot be tuned on its spectrum: pass prior_var too, or "
            "some noise, Gaussian(noise_var=1e-6)."
        )
    return float(likelihood.noise_var)


def _subset(
    data: tuple[Inputs, Tensor], likelihood: Likelihood, size: int
) -> tuple[tuple[Inputs, Tensor], Likelihood]:
    """All points, or a fixed random choice of `size` of them, and their likelihood."""
    count = num_rows(data[0])
    if count <= size:
        return data, likelihood
    chosen = torch.randperm(count, generator=torch.Generator().manual_seed(0))[:size].sort().values
    chosen = chosen.to(data[1].device)
    return (rows(data[0], chosen), data[1][chosen]), of_points(likelihood, chosen)


def _tuning_problem(
    kernel: TangentKernel,
    data: tuple[Inputs, Tensor],
    likelihood: Likelihood,
    mean: Linearized | None,
    limit: int,
) -> Problem:
    if has_gaussian_noise(likelihood):
        likelihood = likelihood.with_noise(1.0)
    outputs = kernel.linearized(rows(data[0], slice(0, 1))).shape[1]
    size = (
        max(1, limit // outputs) if kernel.num_features > limit else max(limit, num_rows(data[0]))
    )
    return make_problem(kernel, *_subset(data, likelihood, size), mean)
