"""The scene of the demo about transfer: one network, new tasks, eight points each."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

import net2gp as n2g
from net2gp import data, metrics, plots
from net2gp.report.page import Figure, Section, Table
from net2gp.report.tools import Stopwatch, canvas, mlp, shown, train

SOURCE = 5
TARGETS = (10, 11, 12, 13)
POINTS = 8


def scene() -> list[Section]:
    """Adapt a network that knows one sinusoid to four others in closed form."""
    watch = Stopwatch()
    source = data.sinusoid_task(SOURCE, num_points=200)
    targets = {f"task {n}": data.sinusoid_task(s, POINTS) for n, s in enumerate(TARGETS, 1)}
    with watch("training the source network"):
        network = train(
            mlp(1, 40, 40, 1), source.data, nn.functional.mse_loss, steps=1200, rate=5e-3
        ).requires_grad_(False)
    noise_var = float(metrics.rmse(network(source.x), source.y) ** 2)
    grid = torch.linspace(-5, 5, 201)[:, None]
    tasks = {name: target.data for name, target in targets.items()}
    with watch("these lines"):
        predictions = _adapt(network, tasks, noise_var, grid)
    curves: dict[str, dict[str, Tensor]] = {
        name: {"source network": network(grid)} for name in tasks
    }
    for label, layers in (("last layer fine-tuned", "4."), ("all layers fine-tuned", "")):
        with watch(label):
            for name, pair in tasks.items():
                curves[name][label] = _fine_tuned(network, pair, layers)(grid)
    text = f"""
        A tanh network learned one sinusoid from 200 points. Four new sinusoids, of other amplitude, phase
        and frequency, come with {POINTS} points each. The linearized network is conditioned on each of them
        in closed form: no training, no learning rate, all {sum(p.numel() for p in network.parameters()):,}
        parameters. The tasks share one prior variance, which maximizes the sum of their evidences. The
        noise is the mean squared error of the source network.

        The band widens between and beyond the points. Fine-tuning gives a curve too, but does not say where
        it is uncertain.
        """
    picture = _draw(source, targets, grid, predictions, curves)
    return [
        Section(
            "Transfer: a new task from eight points, in closed form",
            text,
            (picture,),
            shown(_adapt),
            _table(targets, grid, predictions, curves),
            watch.seconds,
        )
    ]


def _adapt(
    network: nn.Module, tasks: dict[str, tuple[Tensor, Tensor]], noise_var: float, grid: Tensor
) -> dict[str, Any]:
    likelihood = n2g.Gaussian(noise_var)
    posteriors = n2g.adapt_tasks(network, tasks, likelihood, zero_mean=True)
    predictions = {name: posterior.predict(grid) for name, posterior in posteriors.items()}
    return predictions


def _fine_tuned(network: nn.Module, pair: tuple[Tensor, Tensor], layers: str) -> nn.Module:
    """Copy the network and train the layers whose names start with `layers`."""
    tuned = copy.deepcopy(network)
    for name, parameter in tuned.named_parameters():
        parameter.requires_grad_(name.startswith(layers))
    train(tuned, pair, nn.functional.mse_loss, steps=400)
    return tuned.requires_grad_(False)


def _draw(
    source: data.Sinusoid,
    targets: dict[str, data.Sinusoid],
    grid: Tensor,
    predictions: dict[str, Any],
    curves: dict[str, dict[str, Tensor]],
) -> Figure:
    figure = canvas(9, 6.4)
    panels = figure.subplots(2, 2, sharex=True, sharey=True).flat
    for ax, (name, target) in zip(panels, targets.items(), strict=True):
        law = predictions[name]
        plots.plot_regression(
            ax,
            grid,
            law.mean,
            law.variance,
            data=target.data,
            truth=target.truth(grid),
            label="GP mean ± 2 standard deviations",
        )
        x = grid[:, 0]
        ax.plot(x, curves[name]["source network"][:, 0], color=plots.FAINT, label="source network")
        tuned = curves[name]["last layer fine-tuned"][:, 0]
        ax.plot(x, tuned, color=plots.COLORS[1], linewidth=1.2, label="last layer fine-tuned")
        ax.plot(*(values[:, 0] for values in target.data), "o", color=plots.INK, markersize=5)
        ax.set_ylim(-7, 7)
        ax.set_title(name, fontsize=11)
        ax.label_outer()
        handles, labels = ax.get_legend_handles_labels()
        ax.get_legend().remove()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return Figure.draw("transfer", figure, "Four sinusoids, eight points each, and the adapted GP")


def _table(
    targets: dict[str, data.Sinusoid],
    grid: Tensor,
    predictions: dict[str, Any],
    curves: dict[str, dict[str, Tensor]],
) -> Table:
    """Compute the RMSE of each task, and NLL and coverage over all of them, on fresh observations."""
    generator = torch.Generator().manual_seed(2)
    observed = {
        name: target.truth(grid)
        + math.sqrt(target.noise_var) * torch.randn(grid.shape, generator=generator)
        for name, target in targets.items()
    }
    rows = []
    for label in next(iter(curves.values())):
        errors = {name: float(metrics.rmse(curves[name][label], y)) for name, y in observed.items()}
        losses = [0.5 * math.log(2 * math.pi * math.e * error**2) for error in errors.values()]
        rows.append(_row(label, errors, losses, "–"))
    errors = {name: float(metrics.rmse(predictions[name].mean, y)) for name, y in observed.items()}
    losses = [float(metrics.gaussian_nll(predictions[name], y)) for name, y in observed.items()]
    inside = [
        float(metrics.coverage(predictions[name].mean, predictions[name].variance, y, 0.95))
        for name, y in observed.items()
    ]
    rows.append(_row("GP, closed form", errors, losses, f"{sum(inside) / len(inside):.1%}"))
    head = ("", *(f"RMSE {name}" for name in targets), "mean NLL", "95% interval")
    note = """Scores on 201 fresh observations of each task. A network has no variance of its own. For its NLL
        it gets the best constant variance in hindsight, its squared error on these observations, which favors
        it. The last column is the share of observations inside the GP's 95% interval."""
    return Table(head, tuple(rows), note)


def _row(
    label: str, errors: dict[str, float], losses: list[float], covered: str
) -> tuple[str, ...]:
    mean = sum(losses) / len(losses)
    return (label, *(f"{error:.2f}" for error in errors.values()), f"{mean:.2f}", covered)
