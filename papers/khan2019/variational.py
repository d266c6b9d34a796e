"""The toy regression by natural-gradient variational inference, at many prior precisions δ."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

import net2gp as n2g
from net2gp.training import GaussianPrior, NaturalState, from_variances, natural_step
from net2gp.tuning import EVIDENCE, Selection

sys.path.append(str(Path(__file__).parent))
from toy import NOISE, SEED, Problem, network

STEP = 0.1
"""The share β of the likelihood in the evidence of a step."""


@dataclass(frozen=True)
class Steps:
    """How inference goes: its step, the decay of its precision, and what stands for the curvature.

    That is Σ_n J_n² (VOGGN) or, with `squares`, Σ_n g_n² of the gradients (VOGN), times `share`: only with
    Σ_n J_n² itself does inference end where the mean-field bound is highest. With no samples gradients are
    taken at the mean.
    """

    rate: float = 0.1
    decay: float = 0.9
    squares: bool = False
    share: float = 1.0
    num_steps: int = 5000
    num_samples: int = 25


MEAN_FIELD = Steps()
"""Natural-gradient ascent of the mean-field bound."""
AS_STORED = Steps(rate=0.9, decay=0.1, squares=True, share=100.0)
"""What the stored runs must have done: squares of gradients, which count N = 100 times too often."""


@dataclass(frozen=True, eq=False)
class Variational:
    """Diagonal Gaussians N(mean, 1/precision), (S, P) each, for cells of (δ, data set)."""

    deltas: tuple[float, ...]
    problems: list[Problem]
    mean: Tensor
    precision: Tensor

    def posterior(self, index: int) -> n2g.Posterior:
        """One of them, at the network of its mean."""
        delta = self.deltas[index // len(self.problems)]
        problem = self.problems[index % len(self.problems)]
        one = network()
        nn.utils.vector_to_parameters(self.mean[index].double(), one.parameters())
        variance = self.precision[index].double().reciprocal()
        return from_variances(one, variance, (problem.x, problem.y), NOISE, prior_var=1 / delta)

    def selection(self, num_samples: int = 250, num_draws: int = 10) -> Selection:
        """Evidence and losses of all of them; losses are those of the mean prediction of `num_samples` draws.

        The converged evidence and that of a step are means over `num_draws` linear models, see `evidences`.
        """
        names = (EVIDENCE, "−evidence of a step", "test loss", "train loss")
        scores: dict[str, list[float]] = {name: [] for name in names}
        for index in range(len(self.mean)):
            posterior, problem = self.posterior(index), self.problems[index % len(self.problems)]
            generator = torch.Generator().manual_seed(index)
            x = torch.cat([problem.x, problem.x_test])
            f = posterior.sample(x, num_samples, generator=generator, linear=False).mean(0)
            gap = (f - torch.cat([problem.y, problem.y_test])).square().flatten()
            converged, step = evidences(posterior, num_draws, generator)
            losses = gap[len(problem.x) :].mean(), gap[: len(problem.x)].mean()
            for name, value in zip(names, (converged, -step, *losses), strict=True):
                scores[name].append(float(value))
        shape = (len(self.deltas), len(self.problems))
        columns = {
            name: torch.tensor(v, dtype=torch.float64).reshape(shape) for name, v in scores.items()
        }
        return Selection("δ", self.deltas, columns)


def evidences(
    posterior: n2g.Posterior, num_draws: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """The converged evidence and that of a step, with J and f taken at draws of the parameters.

    That is log N(ỹ | J m, J S Jᵀ + I/β) of ỹ = Jμ + y − f, in the mean over draws: for N(m, S) the prior and
    β = 1, or the law from which a step starts and β = `STEP`. At a draw, as inference takes them, the units
    that the data do not need have features too; at the mean μ they have none.
    """
    (x, y), center = posterior.data, posterior.linearized
    mu = center.flatten(center.params)
    s, delta = posterior.covariance.variance.reciprocal(), 1 / float(posterior.prior_var)
    start = (1 - STEP) * s + STEP * delta
    stack = posterior.sample_weights(num_draws, generator=generator)
    found = []
    for k in range(num_draws):
        at = replace(center, params={name: v[k] for name, v in stack.items()})
        J, r = at.jacobian(x)[:, 0], (y - at(x))[:, 0]
        shift = mu * (1 - (1 - STEP) * s / start)
        laws = [(J @ mu, delta * torch.ones_like(mu), 1.0), (J @ shift, start, STEP)]
        found.append(torch.stack([_density(gap + r, J, p, rate) for gap, p, rate in laws]))
    converged, step = torch.stack(found).mean(0)
    return converged, step


def _density(gap: Tensor, J: Tensor, precision: Tensor, rate: float) -> Tensor:
    """log N(gap | 0, J diag(1/precision) Jᵀ + I/rate)."""
    K = (J / precision) @ J.mT
    K.diagonal().add_(1 / rate)
    return torch.distributions.MultivariateNormal(torch.zeros_like(gap), K).log_prob(gap)


def infer(
    deltas: Sequence[float],
    problems: Sequence[Problem],
    steps: Steps = AS_STORED,
    *,
    device: str = "cpu",
) -> Variational:
    """Inference for every δ and data set, from the network's start, in float32.

    Each step averages gradients and curvatures over draws of the parameters. The first precision is δ + N.
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
        state = NaturalState(theta.expand_as(delta), delta + len(x[0]), torch.zeros_like(delta))
        generator = torch.Generator(device).manual_seed(SEED + start)
        for _ in range(steps.num_steps):
            state = _step(state, delta, (x, y), steps, generator)
        parts.append((state.mean.cpu(), state.precision.cpu()))
    mean, precision = (torch.cat(column) for column in zip(*parts, strict=True))
    return Variational(tuple(deltas), list(problems), mean, precision)


def _step(
    state: NaturalState,
    delta: Tensor,
    data: tuple[Tensor, Tensor],
    steps: Steps,
    generator: torch.Generator,
) -> NaturalState:
    """One step of all cells."""
    noise = delta.new_zeros(len(delta), max(1, steps.num_samples), delta.shape[1])
    if steps.num_samples:
        noise.normal_(generator=generator)
    drawn = state.mean[:, None] + noise * state.precision[:, None].rsqrt()
    gradient, curvature = _sums(drawn, *data, steps.squares)
    prior, betas = GaussianPrior(torch.zeros_like(delta), delta), (0.0, steps.decay)
    return natural_step(
        state, gradient, steps.share * curvature, prior, learning_rate=steps.rate, decays=betas
    )


def _sums(theta: Tensor, x: Tensor, y: Tensor, squares: bool) -> tuple[Tensor, Tensor]:
    """Means over draws (S, K, P) of Jᵀ(f − y) and of Σ_n J_n², or Σ_n (f_n − y_n)² J_n²: (S, P) each.

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

    weight = r * r if squares else torch.ones_like(r)
    gradient, curvature = sums(x, g, r), sums(x * x, g * g, weight)
    return gradient.reshape(S, K, P).mean(1), curvature.reshape(S, K, P).mean(1)
