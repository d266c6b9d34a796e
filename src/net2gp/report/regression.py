"""The scene of the demo about regression: uncertainty where there are no data."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

import net2gp as n2g
from net2gp import data, metrics, plots
from net2gp.report.page import Figure, Section, Table
from net2gp.report.tools import Stopwatch, canvas, mlp, shown, train

REPEATS = 5
"""The number of data sets over which calibration is measured, each with its own network."""

NAMES = ("GP with zero mean", "network", "GP around the network")

Prediction = tuple[Tensor, Tensor]


def scene() -> list[Section]:
    """Show a small network on a curve with a gap, its process, and the calibration of both."""
    watch = Stopwatch()
    curve = data.snelson_like()
    with watch("training the network"):
        network = _network(curve)
    grid = torch.linspace(-0.5, 6.5, 281)[:, None]
    with watch("these lines"):
        posterior, f, curves = _uncertainty(network, *curve.data, grid)
    deviation = f.variance.sqrt()
    inside = _in_gap(curve, grid)
    at_data = posterior.marginal(curve.x).variance.sqrt().mean()
    text = f"""
        A tanh network with {sum(p.numel() for p in network.parameters()):,} parameters was fitted to
        150 noisy points, with none between {curve.gap[0]:g} and {curve.gap[1]:g}. The network
        alone gives one curve (dashed) and no warning. As a Gaussian process it gives a mean, a band of
        two standard deviations, and whole functions that agree with the data (thin lines).

        The band is wide where data are missing: the standard deviation of f is
        {float(at_data):.2f} on average at the data and reaches {float(deviation[inside].max()):.2f}
        inside the gap. The evidence determined prior variance and noise: the noise variance is
        {posterior.likelihood.noise_var:.3f}, and the data were made with {curve.noise_var:.3f}.

        `zero_mean=True` says that the network provides only the kernel, so prior and noise must explain the
        data by themselves. Without it, the network is also the prior mean. Since it was fitted to the same
        points, the residuals say less about prior and noise, and the band becomes wider. The next section
        compares both.
        """
    first = Section(
        "Regression: uncertain where there are no data",
        text,
        (_draw(curve, network, grid, f, curves),),
        shown(_uncertainty),
        seconds=watch.seconds,
    )
    return [first, _calibration(curve, network)]


def _network(curve: data.Curve) -> nn.Module:
    network = train(mlp(1, 64, 64, 1), curve.data, nn.functional.mse_loss, steps=1000)
    return network.requires_grad_(False)


def _in_gap(curve: data.Curve, x: Tensor) -> Tensor:
    return (x > curve.gap[0]) & (x < curve.gap[1])


def _uncertainty(network: nn.Module, x: Tensor, y: Tensor, grid: Tensor) -> tuple[Any, Any, Tensor]:
    posterior = n2g.adapt(network, (x, y), n2g.Gaussian(), zero_mean=True)
    f = posterior.marginal(grid)  # f.mean and f.variance at every point
    curves = posterior.sample(grid, 4, generator=torch.Generator().manual_seed(0))
    return posterior, f, curves


def _draw(curve: data.Curve, network: nn.Module, grid: Tensor, f: Any, curves: Tensor) -> Figure:
    figure = canvas(9, 4.2)
    ax = figure.subplots()
    ax.axvspan(*curve.gap, color="#f0f0f0", zorder=0, linewidth=0)
    plots.plot_regression(
        ax, grid, f.mean, f.variance, data=curve.data, label="GP mean ± 2 standard deviations"
    )
    x = grid[:, 0]
    for number, values in enumerate(curves[..., 0]):
        label = "functions drawn from the GP" if number == 0 else None
        ax.plot(x, values, color=plots.COLORS[0], linewidth=0.7, alpha=0.6, label=label)
    ax.plot(x, network(grid)[:, 0], "--", color=plots.COLORS[1], linewidth=1.5, label="network")
    ax.text(sum(curve.gap) / 2, 2.35, "no data", ha="center", color=plots.INK, fontsize=9)
    ax.set_xlim(-0.5, 6.5)
    ax.set_ylim(-4.4, 2.7)
    ax.legend(frameon=False, loc="lower left", fontsize=9, ncols=2)
    return Figure.draw("regression", figure, "Network curve and Gaussian process over a data gap")


def _calibration(curve: data.Curve, network: nn.Module) -> Section:
    """Measure coverage over the whole range, including the gap, against a network with constant noise."""
    watch = Stopwatch()
    x = torch.linspace(0, 6, 1001)[:, None]
    found: dict[str, list[Prediction]] = {name: [] for name in NAMES}
    observed = []
    for seed in range(REPEATS):
        if seed > 0:
            curve = data.snelson_like(seed)
            with watch(f"training {REPEATS - 1} more networks"):
                network = _network(curve)
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(100 + seed))
        y = curve.truth(x) + math.sqrt(curve.noise_var) * noise
        with watch(f"these lines, {REPEATS} times"):
            law, _ = _intervals(network, curve, x, y)
        spread = metrics.rmse(network(curve.x), curve.y) ** 2
        around = n2g.laplace(network, curve.data, n2g.Gaussian()).predict(x)
        found[NAMES[0]].append((law.mean, law.variance))
        found[NAMES[1]].append((network(x), spread.expand(y.shape)))
        found[NAMES[2]].append((around.mean, around.variance))
        observed.append(y)
    y, gap = torch.cat(observed), _in_gap(curve, x).repeat(REPEATS, 1)
    pooled = {
        name: (torch.cat([mean for mean, _ in parts]), torch.cat([var for _, var in parts]))
        for name, parts in found.items()
    }
    text = f"""
        Is the band honest? For {REPEATS} data sets, each with its own network, fresh observations over the
        whole range, including the gap, are compared with central intervals of every probability. On the
        diagonal, an interval of 80% holds 80% of the observations. Below it, a prediction is overconfident;
        above it, underconfident.
        """
    figure = canvas(4.6, 4.4)
    plots.plot_coverage(figure.subplots(), pooled, y)
    return Section(
        "Regression: intervals that hold what they promise",
        text,
        (Figure.draw("coverage", figure, "Observed against nominal coverage of intervals"),),
        shown(_intervals),
        _table(pooled, y, gap),
        watch.seconds,
    )


def _intervals(network: nn.Module, curve: data.Curve, x: Tensor, y: Tensor) -> tuple[Any, Tensor]:
    posterior = n2g.adapt(network, curve.data, n2g.Gaussian(), zero_mean=True)
    law = posterior.predict(x)  # the law of y, noise included
    share = metrics.coverage(law.mean, law.variance, y, level=0.95)
    return law, share


def _table(predictions: dict[str, Prediction], y: Tensor, gap: Tensor) -> Table:
    rows = []
    for name, (mean, var) in predictions.items():
        scores = [f"{metrics.rmse(mean, y):.3f}", f"{metrics.gaussian_nll((mean, var), y):.3f}"]
        for part in (~gap, gap):
            scores.append(f"{metrics.coverage(mean[part], var[part], y[part], 0.95):.1%}")
        rows.append((name, *scores))
    note = """Share of fresh observations inside the central 95% interval; 95% is ideal. NLL is the mean
        negative log density; lower is better. The network gets a constant variance, its mean squared
        error on the training data."""
    head = ("", "RMSE", "NLL", "95% interval, with data", "95% interval, in the gap")
    return Table(head, tuple(rows), note)
