"""Conditioning in weight space by sums over the data, which need not be together, and over new data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from net2gp.errors import InputError, NotAvailable
from net2gp.inputs import chunks, gather, num_rows, rows
from net2gp.likelihoods.traits import has_gaussian_noise, of_points, tied_points
from net2gp.linalg import cholesky
from net2gp.memory import check_memory
from net2gp.posteriors.conditioning.gaussian import Solved, whitened
from net2gp.posteriors.conditioning.problem import Problem, choose_solver, make_problem
from net2gp.posteriors.conditioning.solvers import Solver, WeightCholesky
from net2gp.posteriors.conditioning.systems import precision
from net2gp.posteriors.conditioning.whitened import Whitened
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.weights.tasks.streamed import check_tied
from net2gp.streams import Passes
from net2gp.types import Data, FeatureKernel, Kernel, Likelihood, Mean, Stream

FEATURE_NUMBERS = 2**25
"""Numbers of the features of one chunk of points."""


@dataclass(frozen=True, eq=False)
class WeightSums:
    """A = I + ΦᵀD⁻¹Φ (P, P), b = ΦᵀD⁻¹t (P, 1) and s = Σ t²/D + log(2πD), t = y − m: all of a regression.

    Then w ~ N(A⁻¹b, A⁻¹), and log p(y) = −½(s − bᵀA⁻¹b + log|A|).
    """

    A: Tensor
    b: Tensor
    s: Tensor

    @staticmethod
    def of(process: Whitened, evidence: Tensor) -> WeightSums:
        """The sums that a process was found with."""
        A = process.precision.L @ process.precision.L.mT
        b = A @ process.weights
        s = (b * process.weights).sum() - process.precision.log_det() - 2 * evidence
        return WeightSums(A, b, s)

    def plus(self, problem: Problem, start: int = 0) -> WeightSums:
        """With the points of a problem from the number `start` on."""
        new, noise, t = (
            rows(problem.x, slice(start, None)),
            problem.noise[start:],
            problem.target[start:],
        )
        kernel = problem.precise_kernel
        assert isinstance(kernel, FeatureKernel)
        A, b, first = self.A, self.b, 0
        size = max(1, FEATURE_NUMBERS // (problem.num_outputs * kernel.num_features))
        for part in chunks(new, size):
            some = slice(first, first + num_rows(part))
            Phi = kernel.features(part).to(torch.float64)
            added = precision(Phi, torch.diag_embed(noise[some].reciprocal()))
            A = A + added - torch.eye(len(A)).to(A)
            b = b + torch.einsum("ncp,nc->p", Phi, t[some] / noise[some])[:, None]
            first = some.stop
        s = self.s + (t * t / noise).sum() + (2 * math.pi * noise).log().sum()
        return WeightSums(A, b, s)

    def solved(self, problem: Problem) -> Solved:
        """The process, with the kernel, the mean and the number of outputs of a problem."""
        factor = cholesky(self.A, what="I + ΦᵀΛΦ")
        weights = factor.solve(self.b)
        quadratic = self.s - (self.b * weights).sum()
        return whitened(problem, weights, factor, -0.5 * (quadratic + factor.log_det()))


def solve_stream(
    kernel: Kernel, data: Stream, likelihood: Likelihood, mean: Mean | None, solver: Solver | None
) -> Solved:
    """The process given a stream, in one pass."""
    sums = None
    for problem in _problems(kernel, data, likelihood, mean, solver):
        sums = _nothing(problem) if sums is None else sums
        sums = sums.plus(problem)
    assert sums is not None
    return sums.solved(problem)


def extend_sums(posterior: Posterior, data: Data, likelihood: Likelihood | None) -> Solved:
    """The process given more data, of a posterior that does not keep those that it was found with."""
    process = posterior.process
    assert isinstance(process, Whitened)
    assert posterior.evidence is not None
    sums = WeightSums.of(process, posterior.evidence)
    stream = data if isinstance(data, Stream) else Stream([gather(data)])
    used = posterior.likelihood if likelihood is None else likelihood
    if likelihood is None and tied_points(used) is not None:
        raise InputError(
            f"noise_var holds the noise of {tied_points(used)} points, but the new data are others. Pass "
            "their noise: update(data, likelihood=Gaussian(noise_var=...))."
        )
    for problem in _problems(process.kernel, stream, used, process.prior_mean, None):
        sums = sums.plus(problem)
    return sums.solved(problem)


def _problems(
    kernel: Kernel,
    data: Stream,
    likelihood: Likelihood,
    mean: Mean | None,
    solver: Solver | None,
) -> Iterator[Problem]:
    """A checked problem of each piece of a stream."""
    if (
        not isinstance(kernel, FeatureKernel)
        or not has_gaussian_noise(likelihood)
        or not isinstance(solver, WeightCholesky | None)
    ):
        raise NotAvailable(
            "condition sums over a Stream in weight space only: with a kernel with features, Gaussian noise "
            "and solver=WeightCholesky() or None. Function space and other likelihoods need all points "
            "together: pass some of them as a pair (x, y), or use laplace(network, Stream(loader), "
            "likelihood)."
        )
    like = getattr(getattr(kernel, "linearized", None), "example", None)
    passes = Passes(data, like, most=1)
    for first, x, y in passes.pieces("sums of features"):
        own = of_points(likelihood, slice(first, first + len(y)))
        problem = make_problem(kernel, (x, y), own, mean)
        choose_solver(problem, WeightCholesky())
        yield problem
    check_tied(likelihood, passes)


def _nothing(problem: Problem) -> WeightSums:
    """The sums over no points."""
    assert isinstance(problem.kernel, FeatureKernel)
    P, like = problem.kernel.num_features, problem.offset
    check_memory(
        4 * 8 * P**2,
        like.device,
        f"the weight space of {P} parameters",
        "laplace(network, Stream(loader), likelihood, structure=Kron()), or fewer parameters with only=",
    )
    zeros = like.new_zeros(P, 1)
    return WeightSums(torch.eye(P).to(like), zeros, like.new_zeros(()))
