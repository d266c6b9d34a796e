"""Four new tasks from ten points each, in closed form: the network is trained once, on another task.

One learns: `adapt_tasks`, which shares the linearization and the prior variance between tasks, and
gives a posterior for each without a single step of fine-tuning.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

import net2gp as n2g
from net2gp import data, metrics, plots


def main(out: Path) -> None:
    torch.manual_seed(0)
    source = data.sinusoid_task(seed=5, num_points=200)
    network = nn.Sequential(
        nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1)
    )
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)
    for _ in range(1200):
        optimizer.zero_grad()
        nn.functional.mse_loss(network(source.x), source.y).backward()
        optimizer.step()
    network.eval().requires_grad_(False)

    tasks = {f"task {number}": data.sinusoid_task(10 + number, 10) for number in range(4)}
    noise_var = metrics.rmse(network(source.x), source.y).item() ** 2
    posteriors = n2g.adapt_tasks(
        network,
        {name: task.data for name, task in tasks.items()},
        n2g.Gaussian(noise_var),
        zero_mean=True,
    )

    x = torch.linspace(-5, 5, 201)[:, None]
    figure, panels = plt.subplots(2, 2, figsize=(9, 6), sharex=True, layout="constrained")
    print(f"{'':8}{'RMSE network':>14}{'RMSE GP':>10}{'NLL network':>14}{'NLL GP':>10}")
    for ax, (name, task) in zip(panels.flat, tasks.items(), strict=True):
        y, law, guess = task.truth(x), posteriors[name].predict(x), network(x)
        # a network has no variance of its own; it gets its squared error on the ten points
        spread = (network(task.x) - task.y).square().mean().expand(y.shape)
        errors = f"{metrics.rmse(guess, y):14.2f}{metrics.rmse(law.mean, y):10.2f}"
        losses = (
            f"{metrics.gaussian_nll((guess, spread), y):14.2f}{metrics.gaussian_nll(law, y):10.2f}"
        )
        print(f"{name:8}{errors}{losses}")
        plots.plot_regression(
            ax, x, law.mean, law.variance, data=task.data, truth=y, label="GP ± 2σ"
        )
        ax.plot(x, guess, color=plots.FAINT, label="source network")
        ax.set(title=name, ylim=(-6.5, 6.5))
        ax.label_outer()
        handles, labels = ax.get_legend_handles_labels()
        ax.get_legend().remove()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "few_shot_transfer.png", dpi=120)
    print("wrote", out / "few_shot_transfer.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("example_output"), help="for the figure")
    main(parser.parse_args().out)
