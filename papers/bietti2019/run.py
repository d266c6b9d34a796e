"""The space of functions of the tangent kernel: norms, smoothness, penalties, and a kernel that moves.

    python papers/bietti2019/run.py --out figures

Checks that the norm of the smallest function through data is the same in functions and in weights,
that the ReLU tangent kernel is rougher than its NNGP, that penalties on weights or on input gradients
lower the norm of trained networks, and that the kernel of a finite network moves early in training.

Bietti & Mairal (2019), "On the inductive bias of neural tangent kernels"; Bietti, Mialon, Chen & Mairal
(2019), "A kernel perspective for regularizing deep neural networks"; Fort et al. (2020), "Deep learning
versus kernel learning".
"""

from __future__ import annotations

import argparse
import math
import sys
from itertools import pairwise
from pathlib import Path

import torch
from matplotlib.axes import Axes
from torch import Tensor, nn
from torch.func import functional_call

import net2gp as n2g
from net2gp.limits import infinite_width
from net2gp.plots import COLORS, INK
from net2gp.training import max_learning_rate

sys.path.append(str(Path(__file__).parents[1]))
import findings
import studies
from studies import Architecture, Networks, Row, Slope

RELU = Architecture(2, 1, nn.ReLU(), weight_var=2.0, bias_var=0.1)
TANH = Architecture(2, 1, nn.Tanh(), weight_var=1.5, bias_var=0.1)
LIMIT = infinite_width(RELU.module(1), **RELU.prior)
ANGLES = torch.linspace(0, 2 * math.pi, 17, dtype=torch.float64)[:-1]
GRID = torch.linspace(0, 2 * math.pi, 65, dtype=torch.float64)[:-1]
STRENGTHS = {"weights": [0.0, 0.3, 1.0, 3.0, 10.0], "input gradient": [0.0, 0.1, 0.3, 1.0, 3.0]}


def target(angles: Tensor) -> Tensor:
    """What is learned: (N, 1)."""
    return (angles.sin() + 0.5 * (2 * angles).cos())[:, None]


def noisy_data() -> tuple[Tensor, Tensor]:
    """Points on the circle, whose targets have noise of standard deviation 0.3."""
    noise = torch.randn(len(ANGLES), 1, generator=torch.Generator().manual_seed(0))
    return studies.circle(ANGLES), target(ANGLES) + 0.3 * noise.double()


def norms() -> list[Row]:
    """αᵀKα in functions and in weights."""
    setting = studies.expected_of(__file__)["norm"]
    x, y = noisy_data()
    torch.manual_seed(0)
    linearized = n2g.linearize(RELU.module(256).double().eval())
    norm, K = n2g.explain.rkhs_norm(linearized.kernel(), (x, y)), linearized.kernel()(x)
    smallest = torch.linalg.lstsq(linearized.jacobian(x)[:, 0], y, driver="gelsd").solution
    found = {
        "yᵀK⁻¹y": y.T @ torch.linalg.inv(K) @ y,
        "square norm of the smallest weights through the data": smallest.square().sum(),
    }
    return [
        Row(f"αᵀKα / {name}", setting[name], float(norm / value), setting["tolerance"])
        for name, value in found.items()
    ]


def smoothness(ax: Axes) -> list[Row]:
    """How far apart in the space of functions two inputs are: √(k(x, x) + k(x', x') − 2k(x, x'))."""
    setting = studies.expected_of(__file__)["smoothness"]
    angles = torch.logspace(-3.5, -1.5, 9, dtype=torch.float64)
    tanh = infinite_width(TANH.module(1), **TANH.prior)
    kernels = {
        "ReLU, tangent kernel": LIMIT.ntk,
        "ReLU, NNGP": LIMIT.nngp,
        "tanh, tangent kernel": tanh.ntk,
    }
    rows, x = [], studies.circle(torch.cat([angles.new_zeros(1), angles]))
    for (name, kernel), color in zip(kernels.items(), COLORS, strict=False):
        K = kernel(x)
        distance = (K[0, 0] + K.diagonal() - 2 * K[0])[1:].sqrt()
        fit = Slope.fit(angles.tolist(), distance)
        ax.loglog(
            angles, distance, "o-", color=color, markersize=4, label=f"{name}: {fit.value:.2f}"
        )
        note = f"± {fit.error:.4f}"
        rows.append(
            Row(f"Hölder exponent, {name}", setting[name], fit.value, setting["tolerance"], note)
        )
    ax.set(xlabel="angle between x and x'", title="distance of features of x and x'")
    return rows


def penalized(networks: Networks, index: int, penalty: str, strength: float) -> Tensor:
    """Train f(x; θ) − f(x; θ₀) on noisy data with a penalty; its values on the grid: (G, 1).

    `weights` adds strength · Σ (θ − θ₀)²/variance / 2N, the square norm of the function as long as the
    kernel does not move; `input gradient` adds strength · mean ‖∂f/∂x‖² / 2.
    """
    network, variances = networks.module(index).double(), networks.variances
    begin = {key: value.detach().clone() for key, value in network.named_parameters()}
    now = {key: value.clone().requires_grad_() for key, value in begin.items()}

    def function(x: Tensor) -> Tensor:
        return functional_call(network, now, (x,)) - functional_call(network, begin, (x,))

    x, y = noisy_data()
    rate = max_learning_rate(LIMIT.ntk(x)) / 4
    for _ in range(1500):
        inputs = x.clone().requires_grad_()
        f = function(inputs)
        loss = (f - y).square().mean() / 2
        if penalty == "weights":
            moves = [(now[key] - begin[key]).square().sum() / variances[key] for key in now]
            loss = loss + strength * torch.stack(moves).sum() / (2 * len(x))
        else:
            slopes = torch.autograd.grad(f.sum(), inputs, create_graph=True)[0]
            loss = loss + strength * slopes.square().sum(1).mean() / 2
        for key, gradient in zip(now, torch.autograd.grad(loss, list(now.values())), strict=True):
            now[key].data.sub_(gradient, alpha=rate * variances[key])
    return function(studies.circle(GRID)).detach()


def penalties(left: Axes, right: Axes, num_networks: int) -> list[Row]:
    """The norm of trained networks over the strength of a penalty, and what they learned."""
    setting, x_grid = studies.expected_of(__file__), studies.circle(GRID)
    networks = Networks.draw(RELU, 1024, num_networks, torch.Generator().manual_seed(0))
    found: dict[str, list[float]] = {}
    for penalty in setting["penalty"]:
        found[penalty] = []
        for strength in STRENGTHS[penalty]:
            fits = [penalized(networks, index, penalty, strength) for index in range(num_networks)]
            norm = [n2g.explain.rkhs_norm(LIMIT.ntk, (x_grid, f)) for f in fits]
            found[penalty].append(float(torch.stack(norm).mean()))
            if strength == STRENGTHS[penalty][-1] or not (strength or right.lines):
                label = f"{penalty} {strength:g}" if strength else "no penalty"
                color = COLORS[len(found) - 1] if strength else INK
                right.plot(GRID, fits[0], color=color, linewidth=1.2, label=label)
    for (penalty, values), color in zip(found.items(), COLORS, strict=False):
        left.plot(STRENGTHS[penalty], values, "o-", color=color, label=f"penalty on {penalty}")
    ridges = [
        float(n2g.explain.rkhs_norm(LIMIT.ntk, noisy_data(), noise_var=s))
        for s in STRENGTHS["weights"]
    ]
    left.plot(STRENGTHS["weights"], ridges, "--", color=INK, label="ridge regression, NTK")
    left.set_xscale("symlog", linthresh=0.03)
    left.set(xlabel="strength", title="square norm of what networks learn", yscale="log")
    right.plot(ANGLES, noisy_data()[1], ".", color=INK)
    right.plot(GRID, target(GRID), "--", color=INK, linewidth=0.8, label="truth")
    right.set(xlabel="angle of x", title="networks with the strongest penalty")
    return _penalty_rows(setting, found, ridges)


def _penalty_rows(setting: dict, found: dict[str, list[float]], ridges: list[float]) -> list[Row]:
    rows, name = [], "norm of a network held to its start / ridge regression"
    tolerance = setting["training"]["tolerance"]
    for strength, norm, ridge in zip(STRENGTHS["weights"], found["weights"], ridges, strict=True):
        if strength:
            rows.append(Row(f"{name}, {strength:g}", 1.0, norm / ridge, tolerance))
    for penalty, values in found.items():
        falls = all(later < earlier for earlier, later in pairwise(values))
        ratio, limit = values[-1] / values[0], setting["penalty"][penalty]
        rows.append(Row(f"norm with / without penalty: {penalty}", limit, ratio, 0.0, at_most=True))
        rows.append(Row(f"norm falls with each strength: {penalty}", 1.0, float(falls), 0.0))
    return rows


def movement(ax: Axes, num_networks: int) -> list[Row]:
    """How fast the kernel moves, ‖dΘ/dt‖ / ‖Θ‖, and how far the weights do."""
    setting = studies.expected_of(__file__)
    x, y = studies.circle(ANGLES).float(), target(ANGLES)[:, 0].float()
    stable, times = max_learning_rate(LIMIT.ntk(x.double())), [0.25 * 2.0**k for k in range(10)]
    for width, color in zip((64, 256, 1024), COLORS, strict=False):
        networks = Networks.draw(RELU, width, num_networks, torch.Generator().manual_seed(width))
        start = networks.copy()
        path = [_kernels(networks, x)]
        for stage in studies.growing_steps(stable / 20, stable / 2, times):
            for step in stage:
                networks.step_(x, y, step)
            path.append(_kernels(networks, x))
        speeds = []
        for (one, other), (begin, end) in zip(pairwise(path), pairwise([0.0, *times]), strict=True):
            size = torch.linalg.matrix_norm(one) * (end - begin)
            speeds.append(float((torch.linalg.matrix_norm(other - one) / size).mean()))
        ax.loglog(times, speeds, "o-", color=color, markersize=4, label=f"width {width}")
    ax.set(xlabel="time", title="velocity of the kernel")
    moves = sum(
        ((a - b).square().flatten(1).sum(1) / variance).double()
        for a, b, variance in zip(*_parameters(networks, start), strict=True)
    )
    changes = (networks(x) - start(x)).double()[..., None]
    norm = torch.stack(
        [n2g.explain.rkhs_norm(LIMIT.ntk, (x.double(), change)) for change in changes]
    )
    name, key = "square move of the weights / norm of the move", "last / first"
    ratio, tolerance = float((moves / norm).mean()), setting["training"]["tolerance"]
    slowed = speeds[-1] / speeds[0]
    return [
        Row(name, setting["training"][name], ratio, tolerance),
        Row(f"velocity of the kernel, {key}", setting["velocity"][key], slowed, 0.0, at_most=True),
    ]


def _parameters(one: Networks, other: Networks) -> tuple[list[Tensor], list[Tensor], list[float]]:
    variances = [*one.rates, *[one.architecture.bias_var] * len(one.biases)]
    return [*one.weights, *one.biases], [*other.weights, *other.biases], variances


def _kernels(networks: Networks, x: Tensor) -> Tensor:
    modules = [networks.module(index) for index in range(len(networks.weights[0]))]
    kernels = [n2g.linearize(m).kernel(prior_var=networks.variances).precise() for m in modules]
    return torch.stack([kernel(x) for kernel in kernels])


def main(arguments: list[str] | None = None) -> int:
    """Print the table, write the figure; the exit status says whether the numbers agree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder for the figure")
    parser.add_argument("--networks", type=int, default=4, help="networks for each average")
    options = findings.parse(parser, arguments, quick={"networks": 2})
    figure, axes = studies.panels(4)
    rows = [
        *norms(),
        *smoothness(axes[0]),
        *penalties(axes[1], axes[2], options.networks),
        *movement(axes[3], options.networks),
    ]
    for ax in axes:
        ax.legend(frameon=False, fontsize=7)
    studies.save(figure, options.out, "bietti2019.png")
    return 0 if studies.print_table(rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
