"""Rows of the table by exact Gaussian processes: the search for depth and variances, and the last fit."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from regression_images import Digits, Problem, multilayer
from scipy.stats import qmc
from table_scores import scores
from torch import Tensor, nn

import net2gp as n2g
from net2gp.errors import JitterAdded, NotPositiveDefinite
from net2gp.kernels import BaseKernel
from net2gp.limits import LimitKernel
from net2gp.linalg import cholesky
from net2gp.metrics import accuracy

JITTER = 1e-10
ENTRIES = {"relu": 2**25, "tanh": 2**29}
"""Entries of a kernel matrix in work at a time, at most 4 GB. For ReLU they are too few for the library to
compile for a GPU, which would take longer than the matrix; for tanh they are many, since each part may fit a
polynomial of its own."""

WEIGHT_VARS = np.linspace(0.1, 5, 30).tolist()
BIAS_VARS = np.linspace(0, 2, 30).tolist()
DEPTHS = (1, 2, 3, 5, 7, 10, 20, 50, 100)
CYCLE = (*DEPTHS[:7], 50, *DEPTHS[:7] * 2, 100)
"""The depths of the search in turn: deep networks, which take longer and rarely win, are few."""

ACTIVATIONS = {"relu": nn.ReLU(), "tanh": nn.Tanh()}


@dataclass(frozen=True, order=True)
class Setting:
    """A Gaussian process as the paper names it: depth, weight and bias variance."""

    depth: int
    weight_var: float
    bias_var: float

    @staticmethod
    def named(name: str) -> Setting:
        """The setting that the paper writes as, for example, 20-1.45-0.28."""
        depth, weight_var, bias_var = name.split("-")
        return Setting(int(depth), float(weight_var), float(bias_var))

    def __str__(self) -> str:
        """Return the name in the paper's table."""
        return f"{self.depth}-{self.weight_var:.2f}-{self.bias_var:.2f}"


@dataclass(frozen=True, eq=False)
class InBlocks(BaseKernel):
    """A kernel whose matrices are filled some rows at a time, so that little memory is needed beside them."""

    kernel: LimitKernel
    entries: int

    def __call__(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """k(x, y) with an exact diagonal where y is None."""
        other = x if y is None else y
        result = torch.empty(len(x), len(other), dtype=torch.float64, device=x.device)
        count = -(-result.numel() // self.entries)
        for rows, block in zip(x.chunk(count), result.chunk(count), strict=True):
            block.copy_(self.kernel(rows, other))
        if y is None:
            result.diagonal().copy_(self.kernel.diag(x))
        return result

    def diag(self, x: Tensor) -> Tensor:
        """k(x_n, x_n): (N,)."""
        return self.kernel.diag(x)

    def precise(self) -> InBlocks:
        """The same kernel, in float64."""
        return replace(self, kernel=self.kernel.precise())


def kernel_of(activation: str, setting: Setting, num_inputs: int, *, tangent: bool) -> InBlocks:
    """The NNGP or the tangent kernel of a fully connected network."""
    network = multilayer(ACTIVATIONS[activation], setting.depth, num_inputs)
    build = n2g.ntk if tangent else n2g.nngp
    kernel = build(network, weight_var=setting.weight_var, bias_var=setting.bias_var)
    return InBlocks(kernel, ENTRIES[activation])


def posterior_of(kernel: InBlocks, train: Digits) -> tuple[n2g.Posterior, bool]:
    """The exact posterior, and whether more than `JITTER` had to be added to the diagonal."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", JitterAdded)
        solver = n2g.solvers.Cholesky()
        noise = n2g.Gaussian(noise_var=JITTER)
        posterior = n2g.condition(kernel, (train.x, train.y), noise, solver=solver)
    return posterior, any(issubclass(one.category, JitterAdded) for one in caught)


@torch.no_grad()
def search(
    activation: str, known: Problem, first: int, refined: int
) -> Iterator[tuple[Setting, float, float]]:
    """Settings with their accuracy and mean squared error on the images for choosing.

    `first` settings are spread over the paper's grid of variances (30 × 30) by a Sobol sequence, with depths
    in turn; `refined` more lie near the best six of them.
    """
    tried: dict[Setting, tuple[float, float]] = {}
    for setting in spread(first):
        tried[setting] = validated(activation, setting, known)
        yield setting, *tried[setting]
    best = sorted(tried, key=lambda one: (-tried[one][0], tried[one][1]))[:6]
    generator = np.random.default_rng(0)
    wanted = min(first + refined, first * 20)
    while len(tried) < wanted:
        setting = neighbor(best[int(generator.integers(len(best)))], generator)
        if setting not in tried:
            tried[setting] = validated(activation, setting, known)
            yield setting, *tried[setting]


def spread(count: int) -> list[Setting]:
    """Different settings on the grid, evenly spread."""
    found: dict[Setting, None] = {}
    sobol = qmc.Sobol(2, seed=0)
    while len(found) < count:
        weight, bias = (int(30 * value) for value in sobol.random(1)[0])
        depth = CYCLE[len(found) % len(CYCLE)]
        found[Setting(depth, WEIGHT_VARS[weight], BIAS_VARS[bias])] = None
    return list(found)


def neighbor(setting: Setting, generator: np.random.Generator) -> Setting:
    """A setting at most two steps of the grid away in the variances, and one in the depth."""
    steps = generator.integers(-2, 3, 2)
    weight = int(np.clip(WEIGHT_VARS.index(setting.weight_var) + steps[0], 0, 29))
    bias = int(np.clip(BIAS_VARS.index(setting.bias_var) + steps[1], 0, 29))
    depth = int(np.clip(DEPTHS.index(setting.depth) + generator.integers(-1, 2), 0, 7))
    return Setting(DEPTHS[depth], WEIGHT_VARS[weight], BIAS_VARS[bias])


def validated(activation: str, setting: Setting, known: Problem) -> tuple[float, float]:
    """Accuracy and mean squared error of the mean; none where the matrix cannot be factorized.

    Both matrices come from one call of the kernel, which then finds only once what is the same for all pairs.
    """
    kernel = kernel_of(activation, setting, known.train.x.shape[1], tangent=False)
    count = len(known.train.x)
    both = kernel(torch.cat([known.train.x, known.valid.x]), known.train.x)
    gram, cross = both[:count], both[count:]
    gram.diagonal().copy_(kernel.diag(known.train.x[:1]).expand(count)).add_(JITTER)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", JitterAdded)
            factor = cholesky(gram)
    except NotPositiveDefinite:
        return 0.0, float("inf")
    mean = cross @ factor.solve(known.train.y)
    return float(accuracy(mean, known.valid.labels)), float((mean - known.valid.y).square().mean())


@torch.no_grad()
def fitted(
    activation: str, setting: Setting, known: Problem, *, tangent: bool = False
) -> dict[str, Any]:
    """All training images; scores on the test images.

    The kernel's variance does not change the mean. It is set to where the evidence is largest,
    s = Σ_c y_cᵀ K⁻¹ y_c / (10 N), and the law of the outputs at a test image is N(mean, s · variance).
    """
    begun = time.perf_counter()
    kernel = kernel_of(activation, setting, known.train.x.shape[1], tangent=tangent)
    posterior, jittered = posterior_of(kernel, known.train)
    y = known.train.y
    scale = float((y * posterior.process.alpha).sum() / y.numel())
    marginal = posterior.marginal(known.test.x)
    found = scores(marginal.mean, scale * (marginal.variance[:, 0] + JITTER), known.test)
    spent = time.perf_counter() - begun
    extra = {"scale": scale, "jitter_grown": jittered, "seconds": spent}
    return asdict(setting) | found | extra
