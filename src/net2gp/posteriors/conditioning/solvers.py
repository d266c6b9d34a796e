"""Values that say how a posterior is computed; each carries its own settings."""

from __future__ import annotations

from dataclasses import dataclass, field

from net2gp.errors import InputError


def _positive(name: str, value: float) -> None:
    if not value > 0:
        raise InputError(f"{name} must be positive, but is {value}.")


@dataclass(frozen=True)
class Exact:
    """Predictive variances by a full solve for each test point."""


@dataclass(frozen=True)
class Lanczos:
    """Predictive variances from a cached low-rank root of the inverse, of the given rank.

    (K + noise)⁻¹ ≈ R Rᵀ with R of `rank` columns from Lanczos iterations. With a network's kernel the
    cache is carried over to the parameters, so that a prediction costs `rank` forward-mode passes and
    nothing that depends on the number of training points. Cached variances are never below the
    exact ones, and fall towards them as the rank grows.

    Reference: Pleiss et al., Constant-time predictive distributions for Gaussian processes, ICML 2018.
    """

    rank: int = 100

    def __post_init__(self) -> None:
        _positive("rank", self.rank)


@dataclass(frozen=True)
class Cholesky:
    """Function space: factorize the (N·C)² Gram matrix. Exact; (N·C)³/3 operations, once."""

    variance: Exact | Lanczos = field(default_factory=Exact)


@dataclass(frozen=True)
class WeightCholesky:
    """Weight space: factorize the P² precision of the parameters. Exact; N·C·P² + P³/3 operations, once.

    Only for kernels with features, such as a network's tangent kernel.
    """


@dataclass(frozen=True)
class PivotedCholesky:
    """Precondition with a partial Cholesky factor of the given rank, pivots chosen greedily."""

    rank: int = 100

    def __post_init__(self) -> None:
        _positive("rank", self.rank)


@dataclass(frozen=True)
class Nystrom:
    """Precondition with a randomized Nyström approximation of the given rank."""

    rank: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        _positive("rank", self.rank)


@dataclass(frozen=True)
class CG:
    """Function space without the Gram matrix: block conjugate gradients on products with the kernel.

    `tol` is the relative residual to reach, `NotConverged` is warned of otherwise; the evidence is an
    estimate by stochastic Lanczos quadrature with `num_probes` probes (0: none). `store_gram` says whether to
    keep the Gram matrix (in float64) and multiply with it; None does so if it fits into a quarter of
    the free memory. Without it products run through the network, in its own dtype: residuals then
    reach about 1e-6 in float32.

    `variance` None is `Exact()` where the Gram matrix is kept: each chunk of test points is then a solve,
    which goes on until variances are right to 1 %. Without the matrix a solve at each prediction would be too
    slow: variances come from the cache of `Lanczos()`, which is compared with solves at some training
    points, and `WideVariances` warns where they are more than 10 % too wide.
    """

    tol: float = 1e-6
    max_iterations: int = 1000
    preconditioner: PivotedCholesky | Nystrom | None = field(default_factory=PivotedCholesky)
    variance: Exact | Lanczos | None = None
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


Solver = Cholesky | WeightCholesky | CG


@dataclass(frozen=True)
class Laplace:
    """Gaussian around the mode, with the curvature there; Newton's method with a line search."""

    max_iterations: int = 100
    tol: float = 1e-10

    def __post_init__(self) -> None:
        _positive("tol", self.tol)
        _positive("max_iterations", self.max_iterations)


@dataclass(frozen=True)
class Variational:
    """The Gaussian closest to the posterior in KL(q‖p), full covariance, by natural-gradient steps.

    The evidence is then the evidence lower bound. Where log p(y | f) is not concave in f
    (`HeteroscedasticGaussian`), it is the closest of those that the data make narrower than the prior,
    and L-BFGS follows the natural-gradient steps, with up to ten times as many iterations.

    Reference: Khan and Lin, Conjugate-computation variational inference, AISTATS 2017.
    """

    max_iterations: int = 200
    tol: float = 1e-8

    def __post_init__(self) -> None:
        _positive("tol", self.tol)
        _positive("max_iterations", self.max_iterations)


Inference = Laplace | Variational
