"""Values that choose how a posterior is computed; each carries its own settings."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from net2gp.errors import InputError
from net2gp.linalg.checkpoint import check_path


def _positive(name: str, value: float) -> None:
    if not value > 0:
        raise InputError(f"{name} must be positive, but is {value}.")


@dataclass(frozen=True)
class Exact:
    """Compute predictive variances by a full solve for each test point."""


@dataclass(frozen=True)
class Lanczos:
    """Compute predictive variances from a cached low-rank root of the inverse.

    Lanczos iterations give (K + noise)⁻¹ ≈ R Rᵀ. With a network's kernel the cache is carried over to the
    parameters, so that the cost of a prediction, `rank` forward-mode passes, does not depend on the number of
    training points. Cached variances are never below the exact ones, and fall towards them as the rank grows.
    With as many columns as rows they are exact.

    Args:
        rank: The number of columns of R.

    Raises:
        InputError: If the rank is not positive.

    Reference: Pleiss et al., Constant-time predictive distributions for Gaussian processes, ICML 2018.
    """

    rank: int = 100

    def __post_init__(self) -> None:
        _positive("rank", self.rank)


@dataclass(frozen=True)
class Pathwise:
    """Compute predictive variances from functions that are drawn from the prior and see data like these.

    The draws are solved for together with the mean, in one block. A prediction then costs k(x, X) and the
    drawn functions at x, and no solve. A part of low rank is known exactly, so that only the remainder has a
    sampling error, relative to the variance at most √(2 / num_samples). It is unbiased for kernels with
    features, squared-exponential and periodic ones, and sums, products and multiples of these; limits of
    networks (NNGP) are drawn as networks of finite width, whose small bias is compared with solves at some
    training points (`WideVariances`).

    Args:
        num_samples: The number of drawn functions, at least 4.
        rank: The rank of the part that is known exactly. None means 10 √N, at most 1000; 0 leaves it out.
        seed: The seed of the draws.

    Raises:
        InputError: If there are fewer than 4 draws, or the rank is negative.

    Reference: Wilson et al., Pathwise conditioning of Gaussian processes, JMLR 2021.
    """

    num_samples: int = 64
    rank: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_samples < 4:
            raise InputError(
                f"num_samples must be at least 4, but is {self.num_samples}. Pass for example 64."
            )
        if self.rank is not None and self.rank < 0:
            raise InputError(f"rank must be 0 or positive, but is {self.rank}.")


@dataclass(frozen=True)
class Cholesky:
    """Factorize the (N·C)² Gram matrix in function space: exact, (N·C)³/3 operations, once.

    Args:
        variance: How predictive variances are computed, `Exact()` or `Lanczos()`.
        dtype: float64, or float32, which takes half of the memory: the factor then preconditions conjugate
            gradients with products in float64, so that the mean is as exact as with float64. The noise has to
            be above the rounding of the largest eigenvalue of the Gram matrix. There are no gradients, and
            variances cost a few products with the kernel at each prediction.

    Raises:
        InputError: If the variance or the dtype is anything else.
    """

    variance: Exact | Lanczos = field(default_factory=Exact)
    dtype: torch.dtype = torch.float64

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float32, torch.float64):
            raise InputError(f"dtype must be torch.float64 or torch.float32, but is {self.dtype}.")
        if not isinstance(self.variance, Exact | Lanczos):
            raise InputError(
                "a Cholesky factor gives variances by Exact() or Lanczos(rank=...), but variance is "
                f"{self.variance!r}. Pathwise() is for CG() and ADASAP()."
            )


@dataclass(frozen=True)
class WeightCholesky:
    """Factorize the P² precision of the parameters in weight space: exact, N·C·P² + P³/3 operations, once.

    It needs a kernel with features, such as a network's tangent kernel.
    """


@dataclass(frozen=True)
class PivotedCholesky:
    """Precondition with a partial Cholesky factor, whose pivots are chosen greedily.

    Args:
        rank: The number of columns of the factor.

    Raises:
        InputError: If the rank is not positive.
    """

    rank: int = 100

    def __post_init__(self) -> None:
        _positive("rank", self.rank)


@dataclass(frozen=True)
class Nystrom:
    """Precondition with a randomized Nyström approximation.

    Args:
        rank: The rank of the approximation.
        seed: The seed of its random directions.

    Raises:
        InputError: If the rank is not positive.
    """

    rank: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        _positive("rank", self.rank)


@dataclass(frozen=True)
class RandomPivots:
    """Precondition with a Cholesky factor of high rank, whose pivots are drawn at random.

    Setting it up costs `rank` columns of the kernel matrix, N·rank² operations as matrix products, and one
    matrix (N, rank), which is in float32 where rounding stays below the noise.

    Args:
        rank: The number of columns. None means 10 √N, at most 10,000, and at most what fits into a quarter of
            the free memory.
        seed: The seed of the choice of pivots.

    Raises:
        InputError: If the rank is not positive.

    References: Chen, Epperly, Tropp and Webber, Randomly pivoted Cholesky, 2023; Epperly, Tropp and Webber,
    Embrace rejection, 2024; Díaz et al., Robust, randomized preconditioning for kernel ridge regression,
    2023.
    """

    rank: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rank is not None:
            _positive("rank", self.rank)


@dataclass(frozen=True)
class CG:
    """Solve in function space by block conjugate gradients on products with the kernel.

    The solver warns with `NotConverged` if it does not reach the tolerance. The evidence is an estimate by
    stochastic Lanczos quadrature.

    Args:
        tol: The relative residual to reach. Products that run through the network in float32 allow about
            1e-6.
        max_iterations: The most iterations of one solve.
        preconditioner: `RandomPivots()`, `PivotedCholesky()`, `Nystrom()` or None.
        variance: How predictive variances are computed. None means `Exact()` if the Gram matrix is stored:
            each chunk of test points is then solved for until its variances are right to 1 %. Without the
            matrix None means `Pathwise()` if functions can be drawn from the prior, else `Exact()`.
        num_probes: The number of random probes for the evidence, 2 or more, or 0 for no evidence.
        seed: The seed of the probes.
        store_gram: Whether to store the Gram matrix in float64 and multiply with it. None stores it if it
            fits into a quarter of the free memory.

    Raises:
        InputError: If `tol` or `max_iterations` is not positive, or if `num_probes` is 1 or negative.
    """

    tol: float = 1e-6
    max_iterations: int = 1000
    preconditioner: RandomPivots | PivotedCholesky | Nystrom | None = field(
        default_factory=RandomPivots
    )
    variance: Exact | Lanczos | Pathwise | None = None
    num_probes: int = 16
    seed: int = 0
    store_gram: bool | None = None

    def __post_init__(self) -> None:
        _positive("tol", self.tol)
        _positive("max_iterations", self.max_iterations)
        if self.num_probes != 0 and self.num_probes < 2:
            raise InputError(
                f"num_probes must be 2 or more, or 0 for no evidence, but is {self.num_probes}."
            )


@dataclass(frozen=True)
class ADASAP:
    """Solve in function space by accelerated sketch-and-project, block after block, for Gaussian noise.

    A step sees `block_size` rows of the kernel matrix and factorizes a Nyström approximation of their own
    square, so that memory is O(N) and one block. The true residuals are computed after each pass, and
    `NotConverged` warns if `tol` is not reached. There is no evidence. Variances are those of `Pathwise`,
    whose draws are solved for in the same block.

    Args:
        block_size: The number of points in a block. None means N / 100, at least 1000 and at most 10,000.
        rank: The rank of the approximation of a block.
        passes: The most passes over the data; each costs two products with the kernel matrix.
        tol: The relative residual to reach.
        variance: `Pathwise()`, or None for the mean alone.
        checkpoint: A file that keeps the state; a call that was killed continues from it.
        every_seconds: The least time between two writes.
        seed: The seed of the blocks.

    Raises:
        InputError: If a setting is not positive, or the variance is anything else.

    Reference: Rathore, Frangella, Garg, Fazliani, Dereziński and Udell, Turbocharging Gaussian process
    inference with approximate sketch-and-project, NeurIPS 2025.
    """

    block_size: int | None = None
    rank: int = 100
    passes: int = 200
    tol: float = 1e-4
    variance: Pathwise | None = field(default_factory=Pathwise)
    checkpoint: str | None = None
    every_seconds: float = 60.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("block_size", "rank", "passes", "tol"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        if self.variance is not None and not isinstance(self.variance, Pathwise):
            raise InputError(
                f"ADASAP gives variances by Pathwise(), or none for None, but variance is {self.variance!r}."
            )
        check_path(self.checkpoint)


@dataclass(frozen=True)
class Centers:
    """Fit the mean alone, as k(x, Z) a for M training points Z, by least squares over all data.

    a minimizes Σ_n (y_n − k(x_n, Z) a)² / noise_n + aᵀ k(Z, Z) a, which conjugate gradients solve with a
    preconditioner of M² numbers. An iteration costs N·M entries of the kernel, twice. There are no variances
    and no evidence.

    Args:
        num_centers: M. None means 10 √N, at most 20,000.
        tol: The relative residual to reach.
        max_iterations: The most iterations.
        seed: The seed of the choice of centers.

    Raises:
        InputError: If a setting is not positive.

    Reference: Rudi, Carratino and Rosasco, Falkon: an optimal large scale kernel method, NeurIPS 2017.
    """

    num_centers: int | None = None
    tol: float = 1e-6
    max_iterations: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_centers", "tol", "max_iterations"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))


Solver = Cholesky | WeightCholesky | CG | ADASAP | Centers


@dataclass(frozen=True)
class Laplace:
    """Approximate the posterior by a Gaussian at its mode, with the curvature there.

    Newton's method with a line search finds the mode. It warns with `NotConverged` if it does not converge.

    Args:
        max_iterations: The most Newton steps.
        tol: The relative change of f at which the search stops.

    Raises:
        InputError: If a setting is not positive.
    """

    max_iterations: int = 100
    tol: float = 1e-10

    def __post_init__(self) -> None:
        _positive("tol", self.tol)
        _positive("max_iterations", self.max_iterations)


@dataclass(frozen=True)
class Variational:
    """Approximate the posterior by the Gaussian with the smallest KL(q‖p), by natural-gradient steps.

    The covariance is full, and the evidence is the evidence lower bound. If log p(y | f) is not concave in f
    (`HeteroscedasticGaussian`), only Gaussians that are narrower than the prior are considered, and L-BFGS
    follows the natural-gradient steps, with up to ten times as many iterations.

    Args:
        max_iterations: The most natural-gradient steps.
        tol: The relative gain of the bound at which the search stops.

    Raises:
        InputError: If a setting is not positive.

    Reference: Khan and Lin, Conjugate-computation variational inference, AISTATS 2017.
    """

    max_iterations: int = 200
    tol: float = 1e-8

    def __post_init__(self) -> None:
        _positive("tol", self.tol)
        _positive("max_iterations", self.max_iterations)


Inference = Laplace | Variational
