"""What the programs on training share: many networks trained at once, slopes, tables and figures.

A network here is Linear, activation, …, Linear with weights N(0, weight_var / fan_in) and biases
N(0, bias_var). The NTK parameterization writes them as √(weight_var / fan_in) ω and √bias_var β, with ω and
β standard normal, and descends in ω and β. For W and b themselves that is gradient descent with a
learning rate of its own for each parameter: the variance that it is drawn with. These variances
therefore serve three times: to draw, to train, and as `prior_var` of the tangent kernel.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.stats import chi2, norm
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parent))
import findings

Factors = list[tuple[Tensor, Tensor]]
"""Of each Linear layer its inputs and the gradients of the output in its outputs: (S, N, ·) each."""


@dataclass(frozen=True)
class Architecture:
    """A fully connected network, but for its width, and the law of its parameters."""

    num_inputs: int
    num_hidden: int
    activation: nn.Module
    weight_var: float
    bias_var: float
    skewed: bool = False
    """Whether the last layer's weights are exponential, less their mean: as variable, but E w³ > 0."""

    def module(self, width: int) -> nn.Sequential:
        """The network as torch knows it, with one output."""
        sizes = [self.num_inputs, *[width] * self.num_hidden]
        layers = [
            layer
            for one, other in pairwise(sizes)
            for layer in (nn.Linear(one, other), self.activation)
        ]
        return nn.Sequential(*layers, nn.Linear(width, 1))

    @property
    def prior(self) -> dict[str, Any]:
        """The keywords that name this law to net2gp."""
        return {"weight_var": self.weight_var, "bias_var": self.bias_var}


@dataclass(frozen=True, eq=False)
class Networks:
    """S networks of one width, trained at once: weights (S, out, in) and biases (S, 1, out) by layer."""

    architecture: Architecture
    weights: list[Tensor]
    biases: list[Tensor]

    @staticmethod
    def draw(
        architecture: Architecture, width: int, count: int, generator: torch.Generator
    ) -> Networks:
        """`count` networks at initialization, on the device of the generator and in float32."""
        kind: dict[str, Any] = {"generator": generator, "device": generator.device}
        weights, biases = [], []
        with torch.device("meta"):
            shapes = [p.shape for p in architecture.module(width).parameters() if p.dim() == 2]
        for shape in shapes:
            scale = (architecture.weight_var / shape[1]) ** 0.5
            weights.append(torch.randn(count, *shape, **kind).mul_(scale))
            biases.append(torch.randn(count, 1, shape[0], **kind) * architecture.bias_var**0.5)
        if architecture.skewed:
            weights[-1].exponential_(generator=generator).sub_(1.0).mul_(scale)
        return Networks(architecture, weights, biases)

    def copy(self) -> Networks:
        """The same networks, to be trained apart."""
        weights, biases = ([p.clone() for p in ps] for ps in (self.weights, self.biases))
        return Networks(self.architecture, weights, biases)

    @property
    def rates(self) -> list[float]:
        """weight_var / fan_in of each layer: the variance of a weight, and its learning rate."""
        return [self.architecture.weight_var / w.shape[2] for w in self.weights]

    @property
    def variances(self) -> dict[str, float]:
        """`prior_var` of `linearize(module).kernel` for the tangent kernel of this parameterization."""
        names = [2 * layer for layer in range(len(self.weights))]
        weights = {f"{name}.weight": rate for name, rate in zip(names, self.rates, strict=True)}
        return weights | {f"{name}.bias": self.architecture.bias_var for name in names}

    def module(self, index: int) -> nn.Sequential:
        """One of the networks as a module."""
        with torch.device("meta"):
            module = self.architecture.module(self.weights[0].shape[1])
        state: dict[str, Tensor] = {}
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            state |= {f"{2 * layer}.weight": weight[index], f"{2 * layer}.bias": bias[index, 0]}
        module.load_state_dict(state, assign=True)
        return module.eval()

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """f(x) of every network: (S, N)."""
        h = x.expand(len(self.weights[0]), *x.shape)
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            h = torch.baddbmm(bias, self.architecture.activation(h) if layer else h, weight.mT)
        return h[..., 0]

    def factors(self, x: Tensor) -> tuple[Tensor, Factors]:
        """f(x), (S, N), and the layers' inputs and gradients: the gradient of a weight is their product."""
        inputs, slopes = [x.expand(len(self.weights[0]), *x.shape)], []
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            u = torch.baddbmm(bias, inputs[-1], weight.mT).requires_grad_()
            h = self.architecture.activation(u)
            slopes.append(torch.autograd.grad(h.sum(), u)[0])
            inputs.append(h.detach())
        f = torch.baddbmm(self.biases[-1], inputs[-1], self.weights[-1].mT)
        gradients = [torch.ones_like(f)]
        for weight, slope in zip(self.weights[:0:-1], reversed(slopes), strict=True):
            gradients.insert(0, (gradients[0] @ weight) * slope)
        return f[..., 0], list(zip(inputs, gradients, strict=True))

    def step_(self, x: Tensor, y: Tensor, learning_rate: float) -> None:
        """One step of gradient descent on ‖f(x) − y‖² / 2N, in place."""
        f, factors = self.factors(x)
        residual = (f - y)[..., None] / len(x)
        layers = zip(self.weights, self.biases, self.rates, factors, strict=True)
        for weight, bias, rate, (inputs, gradients) in layers:
            error = gradients * residual
            weight.baddbmm_(error.mT, inputs, alpha=-learning_rate * rate)
            bias.sub_(error.sum(1, keepdim=True), alpha=learning_rate * self.architecture.bias_var)


def growing_steps(
    first: float, largest: float, times: Sequence[float], growth: float = 1.1
) -> list[list[float]]:
    """Learning rates that grow from `first` up to `largest`, for each stage up to one of the times.

    Time is the sum of learning rates. Steep directions ask for small steps, but only while they are
    learned: growing steps stay near gradient flow at a fraction of what `first` alone would cost.
    """
    stages, now, step = [], 0.0, first
    for time in times:
        stage: list[float] = []
        while now < time * (1 - 1e-9):
            stage.append(min(step, time - now))
            now, step = now + stage[-1], min(step * growth, largest)
        stages.append(stage)
    return stages


def circle(angles: Tensor) -> Tensor:
    """Points on the circle of radius √2, for which x·x/d = 1: (N, 2)."""
    return 2**0.5 * torch.stack([angles.cos(), angles.sin()], 1)


def spectral(matrices: Tensor) -> Tensor:
    """The largest singular value of each: (S,)."""
    rank = min(6, *matrices.shape[1:])
    return torch.svd_lowrank(matrices, q=rank, niter=12)[1][:, 0].double().cpu()


@dataclass(frozen=True)
class Slope:
    """y ∝ xᵖ: the exponent p by least squares of log y on log x, and its standard error.

    `error` is by the distances of the means from the line; `chance` by the spread of the repetitions, which
    says how far the exponent would move with others, and nothing about whether the law is a power.
    """

    value: float
    error: float
    chance: float = 0.0

    @staticmethod
    def fit(x: Sequence[float], y: Tensor) -> Slope:
        """`y` is (len(x), S) for S repetitions; geometric means over them are what is fitted."""
        u = np.log(np.asarray(x, float))
        logs = np.log(y.double().cpu().numpy().reshape(len(u), -1))
        v, count = logs.mean(1), logs.shape[1]
        (value, _), covariance = np.polyfit(u, v, 1, cov="unscaled")
        residual = v - np.polyval(np.polyfit(u, v, 1), u)
        noise = float(residual @ residual) / max(1, len(u) - 2)
        each = (u - u.mean()) / ((u - u.mean()) ** 2).sum()
        spread = logs.var(1, ddof=1) / count if count > 1 else np.zeros(len(u))
        return Slope(
            float(value), float((covariance[0, 0] * noise) ** 0.5), float((each**2 @ spread) ** 0.5)
        )


def as_normal(value: float, freedom: int) -> float:
    """A χ² number as the standard normal number that is as unlikely."""
    below, above = chi2.cdf(value, freedom), chi2.sf(value, freedom)
    return float(norm.ppf(below) if below < above else norm.isf(above))


@dataclass(frozen=True)
class Row:
    """A line of a table: `found` should be within `tolerance` of `expected`, or `at_most` that."""

    name: str
    expected: float
    found: float
    tolerance: float
    note: str = ""
    at_most: bool = False

    @property
    def agrees(self) -> bool:
        """Whether it is."""
        over = self.found - self.expected
        return (over if self.at_most else abs(over)) <= self.tolerance

    @property
    def entry(self) -> findings.Entry:
        """The same for the file that --json writes."""
        bound, note = "at most" if self.at_most else "within", " ".join(self.note.split())
        return findings.Entry(
            self.name, self.expected, self.found, self.tolerance, self.agrees, bound, note
        )


def expected_of(program: str) -> dict[str, Any]:
    """The expected.toml beside a program."""
    return tomllib.loads(Path(program).with_name("expected.toml").read_text())


def print_table(rows: Iterable[Row]) -> bool:
    """Print expected beside found; whether all agree."""
    rows = list(rows)
    print(f"{'':<60}{'expected':>10}{'found':>10}{'within':>9}")
    for row in rows:
        mark = "" if row.agrees else "   <-- differs"
        expected = f"{'≤ ' if row.at_most else ''}{row.expected:.3g}"
        print(
            f"{row.name:<60}{expected:>10}{row.found:>10.3f}{row.tolerance:>9.2g}  {row.note}{mark}"
        )
    findings.add(row.entry for row in rows)
    return all(row.agrees for row in rows)


def panels(columns: int, height: float = 3.2) -> tuple[Figure, Any]:
    """A row of axes in the programs' common style."""
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(1, columns, figsize=(3.6 * columns, height), layout="constrained")
    return figure, axes


def save(figure: Figure, out: Path, name: str) -> None:
    """Write a figure to the folder `out` and say where it is."""
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / name, dpi=160)
    plt.close(figure)
    print(out / name)
