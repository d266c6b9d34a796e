"""The checked inputs of every way to a posterior: kernel, mean, likelihood and data."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from net2gp.errors import InputError
from net2gp.inputs import (
    check_batch,
    check_inputs,
    check_made,
    copied,
    describe,
    gather,
    map_inputs,
    num_rows,
    rows,
    tensors,
)
from net2gp.kernels import IndependentOutputs
from net2gp.kernels.base import dtype_of
from net2gp.kernels.features import FeatureSum
from net2gp.likelihoods.traits import has_gaussian_noise, num_outputs, tied_points
from net2gp.linear.jacobians.tangent import TangentKernel
from net2gp.memory import available_memory
from net2gp.posteriors.conditioning.solvers import (
    ADASAP,
    CG,
    Centers,
    Cholesky,
    Solver,
    WeightCholesky,
)
from net2gp.types import Data, FeatureKernel, Inputs, Kernel, Likelihood, Mean, Outcome

WEIGHT_LIMIT = 12_000
"""The most parameters for which weight space is chosen by default."""


@dataclass(frozen=True, eq=False)
class Problem:
    """Checked data, the prior and the likelihood, ready to be solved.

    Args:
        kernel: The prior covariance.
        mean: The prior mean m, or None for zero.
        likelihood: How the targets depend on f.
        x: The training points X.
        y: The targets.
        offset: The prior mean at the training points, m(X): (N, C), float64.
        coupled: Whether rows of the Gram matrix run n·C + c; if not, the outputs share one of N rows.
    """

    kernel: Kernel
    mean: Mean | None
    likelihood: Likelihood
    x: Inputs
    y: Tensor
    offset: Tensor
    coupled: bool = True

    @property
    def num_outputs(self) -> int:
        """The number of outputs C."""
        return self.offset.shape[1]

    @property
    def num_rows(self) -> int:
        """The number of rows of the Gram matrix: N·C if the outputs are coupled, else N."""
        return self.offset.shape[0] * self.rows_per_point

    @property
    def rows_per_point(self) -> int:
        """How many rows of the Gram matrix belong to a point: C, or 1 if the outputs share it."""
        return self.num_outputs if self.coupled else 1

    @property
    def noise(self) -> Tensor:
        """Gaussian noise variances: (N, C)."""
        assert has_gaussian_noise(self.likelihood)
        return self.likelihood.noise_variance(self.offset)

    @property
    def target(self) -> Tensor:
        """y − m(X) for Gaussian noise: (N, C), float64."""
        return self.y.reshape(self.offset.shape).to(torch.float64) - self.offset

    @property
    def precise_kernel(self) -> Kernel:
        """The kernel with products in float64; rounding to float32 would act as noise of either sign."""
        return self.kernel.precise()

    def gram(self) -> Tensor:
        """k(X, X), multiplied in float64."""
        return self.precise_kernel(self.x)

    def features(self) -> Tensor:
        """Φ(X) in float64: (N, C, P), for kernels with features."""
        precise = self.precise_kernel
        assert isinstance(precise, FeatureKernel)
        return precise.features(self.x)


def make_problem(kernel: Kernel, data: Data, likelihood: Likelihood, mean: Mean | None) -> Problem:
    """Gather and check everything; raise `InputError` or `NetworkError` that says what to change."""
    if not isinstance(kernel, Kernel) or isinstance(kernel, type):
        raise InputError(
            f"kernel must be a Kernel, but is {describe(kernel)}. "
            "Pass linearize(network).kernel(), or use adapt(network, data, likelihood)."
        )
    _check_likelihood(likelihood)
    if mean is not None and not callable(mean):
        raise InputError(f"mean must be a function of x, or None, but is {describe(mean)}.")
    x, y = gather(data)
    # A posterior is a value: editing the data in place later must not change it.
    x, y = map_inputs(x, copied), copied(y)
    count = checked_outputs(kernel, x)
    kernel = kernel.at(x) if isinstance(kernel, FeatureSum) else kernel
    C = _num_outputs(likelihood, mean, x, y) if count is None else count
    offset = tensors(x)[0].new_zeros(num_rows(x), C, dtype=dtype_of(kernel, x))
    if mean is not None:
        given = mean(x)
        if not isinstance(given, Tensor) or given.shape != offset.shape:
            raise InputError(
                f"the mean gives {describe(given)}, but {tuple(offset.shape)} is needed for {num_rows(x)} "
                f"points and {C} outputs."
            )
        offset = given.detach()
    likelihood.check(offset, y)
    problem = Problem(kernel, mean, likelihood, x, y, offset.to(torch.float64), count is not None)
    if has_gaussian_noise(likelihood):
        _check_noise(problem)
        if isinstance(kernel, TangentKernel):
            _check_ratio(problem)
    return _with_joint_kernel(problem)


def _check_likelihood(likelihood: Likelihood) -> None:
    check_made(likelihood, "likelihood")
    if not isinstance(likelihood, Likelihood):
        raise InputError(f"likelihood must be e.g. Gaussian(0.1), but is {describe(likelihood)}.")


def checked_outputs(kernel: Kernel, x: Inputs) -> int | None:
    """C of the kernel at points like those in `x`, or None; raises if it cannot take them."""
    if not isinstance(kernel, TangentKernel):  # which checks the points when it counts
        kernel.check(x)
    return kernel.outputs(x)


def check_points(kernel: Kernel, num_outputs: int, x: Inputs, known: Inputs | None = None) -> None:
    """Raise unless `x` can be inputs of the kernel and give as many outputs as the data `known` did."""
    check_inputs(x)
    if known is not None:
        check_batch(x, known)
    count = checked_outputs(kernel, x)
    if count not in (None, num_outputs):
        raise InputError(
            f"the network gives {count} outputs for a point of x, {describe(x)}, but gave {num_outputs} for "
            "the data. Pass points of the same shape."
        )


def predictive(
    likelihood: Likelihood[Outcome] | None, own: Likelihood[Outcome]
) -> Likelihood[Outcome]:
    """The likelihood to predict with: the given one, or `own` if it is not tied to the training points."""
    points = tied_points(own)
    if likelihood is None and points is not None:
        if has_gaussian_noise(own):
            raise InputError(
                f"noise_var holds the noise of {points} points, the training data, not of these. Pass "
                "likelihood=Gaussian(noise_var=...) with the noise of the new points, or use marginal(x)."
            )
        raise InputError(
            f"the likelihood has numbers for each of {points} points, the training data, not of these. Pass "
            f"likelihood={type(own).__name__}(...) with numbers for the new points, or use marginal(x)."
        )
    if likelihood is None:
        return own
    _check_likelihood(likelihood)
    return likelihood


def kernel_facts(kernel: Kernel) -> dict[str, str]:
    """The lines that the text of a posterior shows about its kernel."""
    features = {"P": f"{kernel.num_features}"} if isinstance(kernel, FeatureKernel) else {}
    return {"_kernel": repr(kernel), **features}


def kernel_name(kernel: Kernel) -> str:
    """The class of a kernel as the user wrote it, without the copies that `condition` may have added."""
    return type(kernel.kernel if isinstance(kernel, IndependentOutputs) else kernel).__name__


def kernel_variances(kernel: Kernel, num_outputs: int, x: Inputs) -> Tensor:
    """The diagonal of k(x, x) for each output: (N, C)."""
    diagonal = kernel.precise().diag(x).reshape(num_rows(x), -1)
    return diagonal.expand(-1, num_outputs)


def _num_outputs(likelihood: Likelihood, mean: Mean | None, x: Inputs, y: Tensor) -> int:
    """The number of outputs for a kernel that treats outputs as independent copies."""
    if mean is not None and isinstance(value := mean(rows(x, slice(0, 1))), Tensor):
        return value.shape[-1]
    return num_outputs(likelihood, y)


def _with_joint_kernel(problem: Problem) -> Problem:
    """Use a joint kernel unless the outputs share one Gram matrix and one noise.

    Independent outputs remain one problem of N rows only if Gaussian noise is the same for all of them, and
    if the kernel has no features, since features of one output are no features of several.
    """
    if problem.coupled:
        return problem
    alone = problem.num_outputs > 1 and isinstance(problem.kernel, FeatureKernel)
    if has_gaussian_noise(problem.likelihood) and not alone:
        noise = problem.noise
        if bool((noise == noise[:, :1]).all()):
            return problem
    joint = IndependentOutputs(problem.kernel, problem.num_outputs)
    return replace(problem, kernel=joint, coupled=True)


def _check_noise(problem: Problem) -> None:
    silent = (problem.noise == 0).any(1)
    if not bool(silent.any()):
        return
    flat = torch.cat(
        [v[silent].reshape(int(silent.sum()), -1).double() for v in tensors(problem.x)], 1
    )
    distinct = torch.unique(flat, dim=0).shape[0]
    if distinct < flat.shape[0]:
        raise InputError(
            f"{flat.shape[0] - distinct} of {flat.shape[0]} points with noise_var=0 are duplicates, so "
            "the Gram matrix is singular. Drop them, or pass a positive variance: Gaussian(noise_var=1e-4)."
        )


def _check_ratio(problem: Problem) -> None:
    """Raise if the noise is below the rounding error of the prior variance of f at the first point."""
    noise = float(problem.noise.detach().min())
    if noise <= 0.0:
        return
    with torch.no_grad():
        prior = float(problem.kernel.diag(rows(problem.x, slice(0, 1))).max())
    if noise < prior * torch.finfo(torch.float64).eps:
        raise InputError(
            f"the prior variance of the outputs is {prior:.3g} and the noise {noise:.3g}: beside the one the "
            "other is lost in rounding, and no variance would be right. Pass a smaller prior_var, or "
            "Gaussian(noise_var=0) to interpolate."
        )


def choose_solver(problem: Problem, solver: Solver | None) -> Solver:
    """The given solver, checked, or a solver by size if none is given.

    The default is weight space if there are fewer parameters than rows (and no noise is zero), else a
    Cholesky factor of the Gram matrix if three copies of it fit into half of the free memory, else one in
    float32 that is refined if a matrix in float32 does and the noise allows it, else conjugate gradients.
    """
    features = problem.kernel.num_features if isinstance(problem.kernel, FeatureKernel) else None
    silent = has_gaussian_noise(problem.likelihood) and bool((problem.noise == 0).any())
    if isinstance(solver, WeightCholesky):
        if features is None:
            raise InputError(
                f"WeightCholesky() needs a kernel with features, but {type(problem.kernel).__name__} has "
                "none. Pass solver=Cholesky() or CG()."
            )
        if silent:
            raise InputError(
                "WeightCholesky() needs noise_var > 0. Pass solver=Cholesky(), or some noise."
            )
    if isinstance(solver, CG | ADASAP | Centers) and silent:
        name = type(solver).__name__
        raise InputError(f"{name}() needs noise_var > 0. Pass solver=Cholesky(), or some noise.")
    if solver is not None:
        if not isinstance(solver, Solver):
            raise InputError(
                "solver must be Cholesky(), WeightCholesky(), CG(), ADASAP(), Centers() or None, but is "
                f"{describe(solver)}."
            )
        return solver
    if features is not None and features < min(problem.num_rows, WEIGHT_LIMIT) and not silent:
        return WeightCholesky()
    size, half = problem.num_rows, available_memory(problem.offset.device) / 2
    if 3 * 8 * size**2 < half or silent:
        return Cholesky()
    return (
        Cholesky(dtype=torch.float32) if 4 * size**2 < half and _allows_float32(problem) else CG()
    )


def _allows_float32(problem: Problem) -> bool:
    """Whether the noise is above the rounding of the trace of k(x, x), which bounds its eigenvalues."""
    if not has_gaussian_noise(problem.likelihood):
        return False
    trace = float(problem.kernel.diag(problem.x).double().sum())
    return float(problem.noise.min()) > 8 * torch.finfo(torch.float32).eps * trace
