"""The toy regression: networks at many prior precisions δ and widths, by Laplace and by VI.

Inputs are pairs (x, 1) of three clusters of x, the middle one of few and noisy points; y = sin x + noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

import net2gp as n2g
from net2gp.data import data_folder
from net2gp.methods.dual import dual
from net2gp.methods.natural_gradient import (
    NaturalState,
    Prior,
    converged_evidence,
    draw,
    iteration_evidence,
    natural_step,
)
from net2gp.methods.selection import EVIDENCE, Selection
from net2gp.methods.train_many import Adam, Trained, train_many
from net2gp.posteriors.covariances import DiagonalCovariance
from net2gp.posteriors.weight_gaussian import WeightGaussian

DELTAS = tuple(float(v) for v in np.logspace(-2, 2, 21))
TRAINING = Adam(learning_rate=0.5, num_steps=10_000, factor=0.99)
NOISE = n2g.Gaussian(noise_var=1.0)
SEED, WIDTH, STEP = 77, 20, 0.1
"""The seed of every network's start, its width, and the step β of natural-gradient inference."""


@dataclass(frozen=True, eq=False)
class Problem:
    """Training points x (N, 2), y (N, 1) and test points, in float64."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        """The pair (x, y)."""
        return self.x, self.y

    def losses(self, network: nn.Module) -> dict[str, float]:
        """Mean squared errors."""
        with torch.no_grad():
            train, test = network(self.x) - self.y, network(self.x_test) - self.y_test
        return {
            "train loss": float(train.square().mean()),
            "test loss": float(test.square().mean()),
        }


@cache
def stored(name: str) -> dict[str, np.ndarray]:
    """An archive of the folder `reference` beside the data."""
    with np.load(data_folder().parent / "reference" / f"{name}.npz", allow_pickle=False) as archive:
        return dict(archive)


def problems(count: int, name: str = "dnn2gp_toy_delta_original") -> list[Problem]:
    """The first data sets that the stored results were found on."""
    keys = ("x_train", "y_train", "x_test", "y_test")
    columns = [torch.from_numpy(stored(name)[f"data_{key}"][:count]) for key in keys]
    return [Problem(x, y[:, None], u, v[:, None]) for x, y, u, v in zip(*columns, strict=True)]


def generate(
    seed: int, *, low_var: float = 0.01, high_var: float = 1.0, share: float = 0.1
) -> Problem:
    """New data of the same kind: 100 points for training and 2000 for testing.

    A point is in [−1, 1] with probability `share`, where the noise has variance `high_var`, and else in
    [−3.5, −1.5] or [1.5, 3.5], where it is `low_var`.
    """
    generator = torch.Generator().manual_seed(seed)
    kind = {"generator": generator, "dtype": torch.float64}
    place, where, noise = (
        torch.rand(2100, **kind),
        torch.rand(2100, **kind),
        torch.randn(2100, **kind),
    )
    middle = where < share
    side = torch.where(where < share + (1 - share) / 2, -1.0, 1.0)
    x = torch.where(middle, 2 * place - 1, side * (1.5 + 2 * place))
    y = x.sin() + torch.where(middle, high_var, low_var) ** 0.5 * noise
    inputs, y = torch.stack([x, torch.ones_like(x)], 1), y[:, None]
    return Problem(inputs[:100], y[:100], inputs[100:], y[100:])


def network(width: int = WIDTH) -> nn.Sequential:
    """The network, at the start of every training."""
    before = torch.get_default_dtype()
    # the stored results come from draws in float64, which are not those of float32
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(SEED)
        return nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 1)).eval()
    finally:
        torch.set_default_dtype(before)


@dataclass(frozen=True, eq=False)
class Grid:
    """Networks trained on every data set at every δ, all at once; index v·D + d."""

    deltas: tuple[float, ...]
    problems: list[Problem]
    trained: Trained

    def at(self, delta: int, problem: int) -> nn.Module:
        """One of the networks."""
        return self.trained[delta * len(self.problems) + problem]

    def selection(self) -> Selection:
        """Evidence and losses of all of them."""
        return tabulate("δ", self.deltas, self.problems, self.deltas, list(self.trained))


def train_grid(
    deltas: Sequence[float], problems: Sequence[Problem], training: Adam = TRAINING
) -> Grid:
    """A network for every δ and data set."""
    cells = [(delta, problem) for delta in deltas for problem in problems]
    trained = train_many(
        [network() for _ in cells],
        [problem.data for _, problem in cells],
        NOISE,
        prior_var=[1 / delta for delta, _ in cells],
        optimizer=training,
        at_once=70,
    )
    return Grid(tuple(deltas), list(problems), trained)


def evidence(network: nn.Module, problem: Problem, delta: float) -> float:
    """log N(ỹ | 0, JJᵀ/δ + I) with ỹ = Jθ* + y − f, of Laplace's linear model."""
    return float(dual(network, problem.data, NOISE, 1 / delta).log_marginal_likelihood())


def tabulate(
    name: str,
    values: Sequence[float],
    problems: Sequence[Problem],
    deltas: Sequence[float],
    networks: Sequence[nn.Module],
) -> Selection:
    """The table of networks trained on each data set for each value, at one δ a value."""
    scores: dict[str, list[float]] = {EVIDENCE: [], "test loss": [], "train loss": []}
    cells = [(delta, problem) for delta in deltas for problem in problems]
    for (delta, problem), one in zip(cells, networks, strict=True):
        scores[EVIDENCE].append(evidence(one, problem, delta))
        for key, loss in problem.losses(one).items():
            scores[key].append(loss)
    shape = (len(values), len(problems))
    columns = {
        key: torch.tensor(v, dtype=torch.float64).reshape(shape) for key, v in scores.items()
    }
    return Selection(name, tuple(values), columns)


def width_selection(
    widths: Sequence[int], problems: Sequence[Problem], training: Adam = TRAINING
) -> Selection:
    """A network of each width on each data set, at δ = 10^(−1/5)."""
    delta, networks = 10**-0.2, []
    for width in widths:
        trained = train_many(
            [network(width) for _ in problems],
            [problem.data for problem in problems],
            NOISE,
            prior_var=1 / delta,
            optimizer=training,
        )
        networks += list(trained)
    return tabulate("width", widths, problems, [delta] * len(widths), networks)


@dataclass(frozen=True, eq=False)
class Variational:
    """Diagonal Gaussians N(mean, 1/precision), (S, P) each, for cells of (δ, data set)."""

    deltas: tuple[float, ...]
    problems: list[Problem]
    mean: Tensor
    precision: Tensor

    def posterior(self, index: int) -> WeightGaussian:
        """One of them, at the network of its mean."""
        delta = self.deltas[index // len(self.problems)]
        problem = self.problems[index % len(self.problems)]
        one = network()
        nn.utils.vector_to_parameters(self.mean[index].double(), one.parameters())
        covariance = DiagonalCovariance(self.precision[index].double().reciprocal())
        linearized = n2g.linearize(one)
        return WeightGaussian(linearized, NOISE, covariance, problem.x, problem.y, 1 / delta)

    def selection(self, num_samples: int = 100) -> Selection:
        """The converged evidence, that of the last step, and losses of the mean prediction."""
        names = (EVIDENCE, "−evidence of a step", "test loss", "train loss")
        scores: dict[str, list[float]] = {name: [] for name in names}
        for index in range(len(self.mean)):
            posterior, problem = self.posterior(index), self.problems[index % len(self.problems)]
            generator = torch.Generator().manual_seed(index)
            x = torch.cat([problem.x, problem.x_test])
            f = posterior.sample(x, num_samples, generator=generator, linear=False).mean(0)
            gap = (f - torch.cat([problem.y, problem.y_test])).square().flatten()
            found = (
                converged_evidence(posterior),
                -iteration_evidence(posterior, rate=STEP),
                gap[len(problem.x) :].mean(),
                gap[: len(problem.x)].mean(),
            )
            for name, value in zip(names, found, strict=True):
                scores[name].append(float(value))
        shape = (len(self.deltas), len(self.problems))
        columns = {
            name: torch.tensor(v, dtype=torch.float64).reshape(shape) for name, v in scores.items()
        }
        return Selection("δ", self.deltas, columns)


def infer(
    deltas: Sequence[float],
    problems: Sequence[Problem],
    *,
    num_steps: int = 5000,
    num_samples: int = 25,
    device: str = "cpu",
) -> Variational:
    """VOGGN for every δ and data set: natural-gradient steps from the network's start.

    Each step averages gradients and the diagonals of JᵀJ over `num_samples` draws of the parameters; with
    none it takes them at the mean, which is OGGN. Computed in float32.
    """
    cells = [(delta, problem) for delta in deltas for problem in problems]
    theta = nn.utils.parameters_to_vector(network().parameters()).detach().float().to(device)
    at_once = 10 if device == "cpu" else len(cells)  # a core's cache, or a whole GPU
    parts = []
    for start in range(0, len(cells), at_once):
        some = cells[start : start + at_once]
        x, y = (
            torch.stack([getattr(p, key) for _, p in some]).float().to(device) for key in ("x", "y")
        )
        delta = torch.tensor([delta for delta, _ in some], device=device)
        delta = delta[:, None].expand(-1, len(theta))
        prior = Prior(torch.zeros_like(delta), delta)
        state = NaturalState(theta.expand_as(delta), delta + len(x[0]), torch.zeros_like(delta))
        generator = torch.Generator(device).manual_seed(SEED + start)
        for _ in range(num_steps):
            shape = (len(some), max(1, num_samples), len(theta))
            noise = torch.zeros(shape, device=device)
            if num_samples:
                noise.normal_(generator=generator)
            drawn = draw(state.mean[:, None], state.precision[:, None], noise)
            gradient, curvature = _sums(drawn, x, y)
            state = natural_step(state, gradient, curvature, prior, lr=STEP, betas=(0.0, 1 - STEP))
        parts.append((state.mean.cpu(), state.precision.cpu()))
    mean, precision = (torch.cat(column) for column in zip(*parts, strict=True))
    return Variational(tuple(deltas), list(problems), mean, precision)


def _sums(theta: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Means over draws (S, K, P) of Jᵀ(f − y) and of the diagonal of JᵀJ, (S, P) each.

    By hand for one hidden layer: autograd would need a gradient for each of S·K·N points.
    """
    S, K, P = theta.shape
    width = (P - 1) // 4
    split = theta.reshape(S * K, P).split([2 * width, width, width, 1], 1)
    W, b, v, c = split[0].reshape(-1, width, 2), split[1], split[2][:, None], split[3][:, None]
    x, y = x.repeat_interleave(K, 0), y.repeat_interleave(K, 0)
    h = torch.baddbmm(b[:, None], x, W.mT).tanh_()
    r = torch.baddbmm(c, h, v.mT) - y
    g = torch.addcmul(v.expand_as(h), h, h * v, value=-1.0)
    ones = x.new_ones(1, len(x[0]), 1).expand(S * K, -1, -1)

    def sums(left: Tensor, inner: Tensor, outer: Tensor) -> Tensor:
        """Σ_n outer_n · [x_n, 1] g_n and Σ_n outer_n [h_n, 1], in the order of the parameters."""
        first = (inner * outer).mT @ torch.cat([left, ones], 2)
        last = (outer.mT @ torch.cat([h if inner is g else h * h, ones], 2))[:, 0]
        return torch.cat([first[..., :2].flatten(1), first[..., 2], last], 1)

    gradient, curvature = sums(x, g, r), sums(x * x, g * g, torch.ones_like(r))
    return gradient.reshape(S, K, P).mean(1), curvature.reshape(S, K, P).mean(1)
