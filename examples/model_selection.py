"""How strong should weight decay be? Ask the training data.

One learns: the marginal likelihood of a network's Gaussian process, from the training data alone, falls and
rises with the test loss; `train_many` trains the networks of a sweep at once, and `sweep` with a `fit` of
your own makes the table for any hyper-parameter.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

import net2gp as n2g
from net2gp.explain import dual
from net2gp.plots import plot_selection
from net2gp.training import AdamSettings, train_many
from net2gp.tuning import Fit, sweep

torch.set_default_dtype(torch.float64)
NOISE = n2g.Gaussian(noise_var=0.09)


def dataset(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = 6 * torch.rand(count, 1, generator=generator) - 3
    return x, (2 * x).sin() + 0.3 * torch.randn(count, 1, generator=generator)


def build(width: int = 30) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 1)).eval()


def main(out: Path) -> None:
    sets, prior_vars = (
        [dataset(seed, 40) for seed in range(3)],
        [10.0**k for k in (-2, -1, 0, 1, 2, 3)],
    )
    x_test, y_test = dataset(100, 500)
    optimizer = AdamSettings(learning_rate=0.05, num_steps=1000, factor=0.9)

    cells = [(prior_var, index) for prior_var in prior_vars for index in range(len(sets))]
    trained = train_many(
        [build() for _ in cells],
        [sets[index] for _, index in cells],
        NOISE,
        prior_var=[prior_var for prior_var, _ in cells],
        optimizer=optimizer,
    )
    networks = dict(zip(cells, trained, strict=True))

    def fit(prior_var: float, index: int) -> Fit:
        network = networks[prior_var, index]
        posterior = dual(network, sets[index], NOISE, prior_var).condition()
        test, train = network(x_test) - y_test, network(sets[index][0]) - sets[index][1]
        losses = {"test loss": test.square().mean(), "train loss": train.square().mean()}
        return Fit(posterior, losses)

    table = sweep(fit, prior_vars, range(len(sets)), name="prior_var")
    print(table)
    print(f"by evidence prior_var {table.best():g}, by test loss {table.best('test loss'):g}")
    figure, ax = plt.subplots(figsize=(6, 4), layout="constrained")
    plot_selection(ax, table)
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "model_selection.png", dpi=120)
    print("wrote", out / "model_selection.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("example_output"), help="for the figure")
    main(parser.parse_args().out)
