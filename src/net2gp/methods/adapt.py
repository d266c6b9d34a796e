"""Adapt a trained network to a task in closed form: its linearization, conditioned on the task's data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

from torch import Tensor, nn

from net2gp.errors import InputError
from net2gp.inputs import describe, gather, num_rows, ordinary_tensors, rows, same_inputs
from net2gp.likelihoods import Gaussian
from net2gp.likelihoods.traits import GaussianNoise, has_gaussian_noise, of_points
from net2gp.linalg.chance import fixed_choice
from net2gp.linear import Linearized, TangentKernel, linearize
from net2gp.linear.linearized import PriorVar, example_of
from net2gp.methods.adapt_tuning import Choice, tune_scale, tune_spectrum
from net2gp.methods.laplace_approximation.regression import warn_of_scales
from net2gp.posteriors.condition import condition, conditioned
from net2gp.posteriors.conditioning.problem import Problem, choose_solver, make_problem
from net2gp.posteriors.conditioning.solve import choose_inference, with_gram
from net2gp.posteriors.conditioning.solvers import Cholesky, Inference, Laplace, Solver
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.spectrum import Spectrum, decompose, share_spectrum
from net2gp.posteriors.tune import tune_spectra
from net2gp.posteriors.weights.tasks.sums import Moments
from net2gp.progress import progress
from net2gp.types import Data, Inputs, Likelihood, Observed

SPECTRUM_ROWS = 6000
"""The most rows with which hyper-parameters are tuned on all points under Gaussian noise."""

NEWTON_ROWS = 2000
"""The most rows with which the prior is tuned on all points under other likelihoods."""


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
    """Return the Gaussian process posterior of a trained network on a new task, from all its parameters.

    The model is f(x) = f(x; θ*) + J(x)(θ − θ*) with θ − θ* ~ N(0, prior_var). `adapt` linearizes the network,
    tunes what is open (prior variance, noise) by the evidence, and conditions on the data.

    **Few points.** A few points of a smooth function do not determine whether they have noise. The tuning of
    an open noise therefore adds a log-normal prior to the evidence, centered at 1 % of the variance of
    y − m(x) and a factor of 100 wide. It matters for 5 or 10 points and is negligible for 50. The evidence
    that the posterior reports is log p(y) without this prior. Fewer than 20 rows (N·C) cannot say how far the
    parameters may move if they prefer no change, or if their squared error is below a thousandth of the
    variance of y; three rows or fewer never can. Prior and noise are then found as for the next case.

    **Data that the network was trained on.** Their residuals are noise, and the evidence of a prior around
    the network prefers no change at all, so it does not determine how far the parameters may be from θ*.
    `adapt` recognizes this if the changes would be below the noise, or would not improve predictions of
    points that are left out. The outputs of the network then stay what they are, `NothingToTune` warns, and
    prior and noise are found around zero as `laplace` does: θ ~ N(0, prior_var) must explain the trained
    parameters themselves, with mean f(x; θ*) − J(x)θ* (Khan et al., 2019). Use `laplace` for such data. For
    other likelihoods there is no evidence that could be trusted (Laplace's grows without bound on separable
    classes), so `NothingToTune` only warns, and asks for `prior_var` or `zero_mean`.

    All outputs share one noise; `UnequalScales` warns if their scales differ by a factor of ten. Tuning uses
    all points up to 6000 rows under Gaussian noise and 2000 rows otherwise, and beyond that a fixed random
    subset of this size; conditioning always uses all points.

    Args:
        network: The trained network. Pass `linearize(network, only="head.*")` to choose parameters or
            outputs.
        data: (x, y) with N rows each, or a DataLoader.
        likelihood: How targets depend on the outputs: `Gaussian()` with open noise, `Gaussian(0.1)`,
            `Categorical()` and others.
        prior_var: The prior variance of θ − θ*, a number or a dict by name pattern. None tunes one number.
        zero_mean: Whether the prior mean is zero, so that the network only gives the kernel. By default the
            network itself is the prior mean.
        solver: How the linear system is solved: `Cholesky()`, `WeightCholesky()` or `CG()`. None chooses by
            size, as in `condition`.
        inference: How a Gaussian approximates the posterior if the noise is not Gaussian: `Laplace()`, which
            is also the meaning of None, or `Variational()`.

    Returns:
        The posterior, with its evidence.

    Raises:
        InputError: If the data do not suit the likelihood, if `inference` is given for Gaussian noise, or if
            a noise per point or a zero noise is combined with an open prior variance.
        NetworkError: If the network cannot be linearized, for example in training mode with dropout.

    >>> import torch
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
    data = gather(data, example_of(linearized))
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
        warn_of_scales(Moments.of(data[1].reshape(len(data[1]), -1)))
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
    """Tune and condition under a likelihood that is not Gaussian, with one Gram matrix for both."""
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
    """Condition on the network's own outputs at the points, so that the mean stays the network's.

    It also stays after an update, since the network remains the prior mean. The evidence is log p(y).
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
    """Adapt one network to several regression tasks.

    All tasks share the linearization, and the prior variance and noise, which are tuned on the sum of all
    evidences, so that tasks with few points support each other. Tasks with the same inputs also share the
    Gram matrix and its eigendecomposition. Cost: one eigendecomposition per distinct set of inputs.

    Args:
        network: The trained network, or `linearize(network, ...)` to choose parameters or outputs.
        tasks: The data (x, y) of each task, by name.
        likelihood: `Gaussian()` noise, open or given. None is `Gaussian()`.
        prior_var: The prior variance of θ − θ*, a number or a dict by name pattern. None tunes one number.
        zero_mean: Whether the prior mean is zero instead of the network.

    Returns:
        One posterior per task, by name.

    Raises:
        InputError: If the noise is not Gaussian, or if `tasks` is empty or does not map names to data.

    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> network = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1)).eval()
    >>> x = torch.linspace(-2, 2, 20)[:, None]
    >>> found = adapt_tasks(network, {"sine": (x, x.sin()), "cosine": (x, x.cos())})
    >>> float((found["cosine"].mean(x) - x.cos()).abs().max()) < 0.05
    True
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
            pair = gather(data, example_of(linearized))
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
    """All points or a fixed random choice of `size` of them, and their likelihood."""
    count = num_rows(data[0])
    if count <= size:
        return data, likelihood
    chosen = fixed_choice(count, size).to(data[1].device)
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
