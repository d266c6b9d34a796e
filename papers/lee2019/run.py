"""Wide networks under gradient descent: the law of an ensemble at every time of its training.

    python papers/lee2019/run.py --out figures
    python papers/lee2019/run.py --out figures --device cuda --count 1000

Trains an ensemble of networks with two hidden layers of width 2048 and holds the mean and covariance of
its functions against the closed form, early, midway, late and at t = ∞; draws the trained networks
beside the law of the ensemble, the NNGP posterior and Gaussian process regression with the tangent
kernel, which are three different Gaussians. Then shows that gradient descent tends to gradient
flow linearly in the step: in function space, and for the two weights of the smallest network.

Lee, Xiao, Schoenholz, Bahri, Novak, Sohl-Dickstein & Pennington (2019), "Wide neural networks of any
depth evolve as linear models under gradient descent", after figure 2.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from gpytorch.distributions import MultivariateNormal
from matplotlib.axes import Axes
from scipy.integrate import solve_ivp
from torch import Tensor, nn

import net2gp as n2g
from net2gp.plots import COLORS, FAINT, INK
from net2gp.training import Flow, gradient_flow, loss_flow, max_learning_rate

sys.path.append(str(Path(__file__).parents[1]))
import findings
import studies
from studies import Architecture, Networks, Row, Slope, circle, expected_of

ARCHITECTURE = Architecture(2, 2, nn.ReLU(), weight_var=2.0, bias_var=0.1)
GRID = torch.linspace(0, 2 * math.pi, 101, dtype=torch.float64)


@dataclass(frozen=True, eq=False)
class Ensemble:
    """Functions of trained networks, (times, S, M) on angles (M,), beside the flow that predicts them."""

    flow: Flow
    times: list[float]
    angles: Tensor
    functions: Tensor


def target(angles: Tensor) -> Tensor:
    """What is learned."""
    return angles.sin() + 0.5 * (2 * angles).cos()


def train(options: argparse.Namespace) -> Ensemble:
    """Descend with `count` networks, a few at once, and keep their functions at each time."""
    setting = expected_of(__file__)["ensemble"]
    angles = torch.tensor(setting["angles"], dtype=torch.float64)
    data = circle(angles), target(angles)
    flow = gradient_flow(ARCHITECTURE.module(1), (data[0], data[1][:, None]), **ARCHITECTURE.prior)
    seen = torch.cat([torch.tensor(setting["test_angles"], dtype=torch.float64), GRID])
    x, y, x_seen = (t.to(options.device, torch.float32) for t in (*data, circle(seen)))
    stable, times = max_learning_rate(flow), setting["times"]
    stages = studies.growing_steps(stable / 200, stable / 1.25, times, growth=1.03)
    generator = torch.Generator(options.device).manual_seed(options.seed)
    functions = []
    for start in range(0, options.count, options.at_once):
        count = min(options.at_once, options.count - start)
        networks = Networks.draw(ARCHITECTURE, options.width, count, generator)
        path = []
        for stage in stages:
            for learning_rate in stage:
                networks.step_(x, y, learning_rate)
            path.append(networks(x_seen).double().cpu())
        functions.append(torch.stack(path))
    return Ensemble(flow, times, seen, torch.cat(functions, 1))


def compare(ensemble: Ensemble) -> list[Row]:
    """Mean and covariance of the networks against the law: standard normal numbers.

    Of S functions with mean m̂ at M points, S(m̂ − μ)ᵀΣ⁻¹(m̂ − μ) is χ² with M degrees of freedom, and
    Σₛ(fₛ − m̂)ᵀΣ⁻¹(fₛ − m̂) with M(S − 1), if they come from N(μ, Σ).
    """
    setting = expected_of(__file__)["ensemble"]
    M = len(setting["test_angles"])
    x = circle(ensemble.angles[:M])
    rows = []
    for index, time in enumerate([*ensemble.times, math.inf]):
        last = min(index, len(ensemble.times) - 1)
        f, law = ensemble.functions[last, :, :M], ensemble.flow.joint(time, x)
        S, mean, var = len(f), law.mean, law.variance
        precision = law.covariance_matrix.inverse()
        center = f.mean(0)
        away, spread = ((v @ precision * v).sum() for v in ((center - mean)[None], f - center))
        found = {
            "mean, all points": studies.as_normal(S * float(away), M),
            "covariance, all points": studies.as_normal(float(spread), M * (S - 1)),
        }
        z = (center - mean) / (var / S).sqrt()
        z_var = (f.var(0) / var - 1) / (2 / (S - 1)) ** 0.5
        note = f"z by point: mean {_range(z)}, variance {_range(z_var)}"
        for name, value in found.items():
            rows.append(Row(f"t = {time:<4g} {name}", 0.0, value, setting["tolerance"], note))
            note = f"variance found/law {float((f.var(0) / var).mean()):.3f} on average"
    return rows


def _range(z: Tensor) -> str:
    return f"{float(z.min()):+.1f}…{float(z.max()):+.1f}"


def draw_ensemble(ensemble: Ensemble, width: int, out: Path) -> None:
    """The ensemble over time, and at the end beside the two posteriors."""
    M = len(ensemble.angles) - len(GRID)
    figure, axes = studies.panels(4)
    flow, x = ensemble.flow, circle(GRID)
    for ax, time, functions in zip(axes, ensemble.times, ensemble.functions, strict=False):
        ax.plot(GRID, functions[:40, M:].T, color=FAINT, linewidth=0.4, alpha=0.6)
        _band(ax, flow.at(time, x), COLORS[0], "law of the ensemble")
        f = functions[:, M:]
        for sign in (-2, 0, 2):
            curve = f.mean(0) + sign * f.std(0)
            ax.plot(GRID, curve, "--", color=INK, linewidth=1, label=None if sign else "networks")
        ax.set_title(f"t = {time:g}: {len(f)} networks of width {width}")
    ends = {"ensemble": flow, "NNGP posterior": flow.nngp(), "NTK-GP": flow.ntk_gp()}
    for (name, one), color in zip(ends.items(), COLORS, strict=False):
        _band(axes[-1], one.at(math.inf, x), color, name)
    axes[-1].set_title("t = ∞: three laws, one data set")
    angles = torch.tensor(expected_of(__file__)["ensemble"]["angles"], dtype=torch.float64)
    for ax in axes:
        ax.plot(angles, target(angles), "o", color=INK, markersize=3.5)
        ax.set(xlabel="angle of x", ylim=(-4.2, 4.2))
        ax.legend(frameon=False, fontsize=7, loc="lower left")
    studies.save(figure, out, "lee2019_ensemble.png")


def _band(ax: Axes, law: MultivariateNormal, color: str, label: str) -> None:
    mean, std = law.mean[:, 0], law.variance[:, 0].sqrt()
    ax.fill_between(GRID, mean - 2 * std, mean + 2 * std, color=color, alpha=0.2)
    ax.plot(GRID, mean, color=color, linewidth=1.5, label=label)


def gap_in_function_space(steps: list[float], likelihood: n2g.Gaussian | n2g.Bernoulli) -> Tensor:
    """Largest gap between descent of a linearized network and its flow, for each step: (len(steps),).

    Steps are fractions of the largest stable one; both go on for the time of 8 of these. Descent is
    in the weights, w ← w + step · Jᵀ ∇log p(y | f) / N with f = f₀ + Jw.
    """
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1)).double().eval()
    linearized = n2g.linearize(network)
    x = circle(torch.linspace(0, 6, 8, dtype=torch.float64))
    y = x[:, :1] * x[:, 1:]
    if isinstance(likelihood, n2g.Bernoulli):
        y = (y > 0).double()
        flow: Callable[[Tensor], Tensor] = loss_flow(linearized, (x, y), likelihood).path
    else:
        flow = gradient_flow(linearized, (x, y)).mean
    start, J, gaps = linearized(x), linearized.jacobian(x)[:, 0], []
    stable = max_learning_rate(J @ J.T)
    for step in steps:
        w, path = J.new_zeros(J.shape[1], 1), [start]
        for _ in range(round(8 / step)):
            w = w + step * stable * J.T @ likelihood.residual(path[-1], y) / len(x)
            path.append(start + J @ w)
        times = torch.arange(len(path)) * step * stable
        gaps.append((torch.stack(path) - flow(times)).abs().max())
    return torch.stack(gaps)


def landscape(weights: Tensor) -> Tensor:
    """Loss of the network a·tanh(b·x) with weights (…, 2), whose data are those of a = 1.5, b = 1."""
    x = torch.linspace(-2, 2, 9, dtype=torch.float64)
    f = weights[..., :1] * (weights[..., 1:] * x).tanh()
    return (f - 1.5 * x.tanh()).square().mean(-1) / 2


def paths(steps: list[float]) -> tuple[Tensor, list[Tensor], Tensor]:
    """Gradient flow and descent in the landscape, and the largest gap between them for each step."""
    start, time, gradient = torch.tensor([-0.6, 0.9]).double(), 32.0, torch.func.grad(landscape)
    downhill = lambda t, w: -gradient(torch.as_tensor(w)).numpy()
    solution = solve_ivp(downhill, (0, time), start, rtol=1e-9, atol=1e-12, dense_output=True).sol
    flow = lambda times: torch.as_tensor(solution(times)).T
    found, gaps = [], []
    for step in steps:
        path = [start]
        for _ in range(round(time / step)):
            path.append(path[-1] - step * gradient(path[-1]))
        found.append(torch.stack(path))
        gaps.append((found[-1] - flow(torch.arange(len(path)) * step)).norm(dim=1).max())
    return flow(torch.linspace(0, time, 600)), found, torch.stack(gaps)


def steps_to_flow(out: Path) -> list[Row]:
    """How the gap between descent and flow falls with the step: slopes, and the figure."""
    setting = expected_of(__file__)["steps"]
    fractions, steps = [2.0**-k for k in range(3, 8)], [1.6 * 2.0**-k for k in range(7)]
    flow, descents, gaps = paths(steps)
    curves = {
        "squared loss": (fractions, gap_in_function_space(fractions, n2g.Gaussian(1.0))),
        "logistic loss": (fractions, gap_in_function_space(fractions, n2g.Bernoulli())),
        "two weights": (steps, gaps),
    }
    figure, (left, right) = studies.panels(2)
    a, b = torch.meshgrid(torch.linspace(-1, 2.4, 150), torch.linspace(-0.4, 2, 150), indexing="xy")
    loss = landscape(torch.stack([a, b], -1).double())
    left.contour(a, b, (loss + 1e-3).log(), 18, colors=FAINT, linewidths=0.5, linestyles="-")
    left.plot(*flow.T, color=INK, linewidth=2, label="gradient flow")
    for step, path, color in zip(steps, descents, COLORS[:3], strict=False):
        left.plot(*path.T, ".-", color=color, linewidth=0.8, markersize=4, label=f"step {step:g}")
    left.set(xlabel="a", ylabel="b", title="loss of a·tanh(bx)")
    left.legend(frameon=False, fontsize=7)
    rows = []
    for (name, (x, y)), color in zip(curves.items(), COLORS, strict=False):
        fit, within = Slope.fit(x[2:], y[2:]), setting["tolerance"]
        right.loglog(x, y, "o-", color=color, label=f"{name}: slope {fit.value:.2f}")
        note = f"± {fit.error:.3f}"
        rows.append(Row(f"descent → flow, {name}", setting["slope"], fit.value, within, note))
    right.set(xlabel="step", ylabel="largest gap to gradient flow", title="order one in the step")
    right.legend(frameon=False, fontsize=7)
    studies.save(figure, out, "lee2019_steps.png")
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Print the tables, write the figures; the exit status says whether the numbers agree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder for the figures")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--count", type=int, default=100, help="networks in the ensemble")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--at-once", type=int, help="networks trained at once; 1, on a GPU 250")
    parser.add_argument("--seed", type=int, default=0)
    options = findings.parse(parser, arguments, quick={"count": 30, "width": 512})
    options.at_once = options.at_once or (1 if options.device == "cpu" else 250)
    ensemble = train(options)
    rows = compare(ensemble) + steps_to_flow(options.out)
    draw_ensemble(ensemble, options.width, options.out)
    return 0 if studies.print_table(rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
