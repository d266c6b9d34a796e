"""Snelson's data with a gap: where a network's Gaussian process is unsure, and where its parts are not."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import net2gp as n2g
from net2gp import Diagonal, laplace
from net2gp.explain import Dual, dual
from net2gp.plots import COLORS, FAINT, INK
from net2gp.training import AdamSettings, train_many

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parent))
import studies
from toy import stored

DELTA, SIGMA, WIDTH = 0.1, 0.286, 32
TRAINING = AdamSettings(learning_rate=0.1, num_steps=20_000, factor=0.99)
PLACES = (1.0, 2.25, 9.0)
"""Within the data, in the gap, and outside."""


@dataclass(frozen=True, eq=False)
class Snelson:
    """The data without those in the gap, (148, 1) each, and a network that was trained on them."""

    x: Tensor
    y: Tensor
    network: nn.Sequential

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        """The pair (x, y)."""
        return self.x, self.y

    @property
    def likelihood(self) -> n2g.Gaussian:
        """The noise that the network was trained with."""
        return n2g.Gaussian(noise_var=SIGMA**2)

    def dual(self) -> Dual:
        """Its linear model and Gaussian process."""
        return dual(self.network, self.data, self.likelihood, 1 / DELTA)


def architecture(seed: int = 0) -> nn.Sequential:
    """1-32-1 with sigmoids, in float64."""
    torch.manual_seed(seed)
    layers = nn.Linear(1, WIDTH), nn.Sigmoid(), nn.Linear(WIDTH, 1)
    return nn.Sequential(*layers).double().eval()


def reference() -> Snelson:
    """The stored data and the stored network."""
    rows = stored("snelson_dnn2gp_laplace")
    network = architecture()
    nn.utils.vector_to_parameters(torch.from_numpy(rows["theta"]), network.parameters())
    return Snelson(torch.from_numpy(rows["X"]), torch.from_numpy(rows["Y"])[:, None], network)


def train(seed: int = 0, training: AdamSettings = TRAINING) -> Snelson:
    """The stored data and a network of our own, trained from a random start."""
    x, y = reference().data
    likelihood = n2g.Gaussian(noise_var=SIGMA**2)
    options = {"prior_var": 1 / DELTA, "optimizer": training, "finish": 2000}
    trained = train_many([architecture(seed)], (x, y), likelihood, **options)
    network = trained[0]
    assert isinstance(network, nn.Sequential)
    return Snelson(x, y, network)


def rbf_process(x: Tensor, y: Tensor) -> n2g.Posterior:
    """Gaussian process regression with a squared exponential kernel, tuned by its evidence."""

    def build(lengthscale: float, output_var: float, noise_var: float) -> n2g.Posterior:
        kernel = n2g.RBF(lengthscale=lengthscale, output_var=output_var)
        return n2g.condition(kernel, (x, y), n2g.Gaussian(noise_var=noise_var))

    return n2g.tune(build, lengthscale=0.5, output_var=1.0, noise_var=0.1)


def draw(model: Snelson, out: Path, name: str) -> None:
    """The network with the band of its Gaussian process, with a diagonal one, and an RBF process."""
    x = torch.linspace(-1.5, 8, 400, dtype=torch.float64)[:, None]
    options = {"prior_var": 1 / DELTA}
    whole = laplace(model.network, model.data, model.likelihood, **options).marginal(x)
    parts = laplace(
        model.network, model.data, model.likelihood, structure=Diagonal(), **options
    ).marginal(x)
    rbf = rbf_process(*model.data).marginal(x)
    laws = {"network, GP band": whole, "network, diagonal Laplace band": parts, "RBF GP": rbf}
    figure, axes = studies.panels(3)
    for (ax, color), (title, law) in zip(
        zip(axes, COLORS, strict=False), laws.items(), strict=True
    ):
        mean, std = law.mean[:, 0], law.variance[:, 0].sqrt()
        for width, alpha in ((2, 0.15), (1, 0.2)):
            low, high = mean - width * std, mean + width * std
            ax.fill_between(x[:, 0], low, high, color=color, alpha=alpha, linewidth=0)
        ax.plot(x[:, 0], mean, color=color)
        ax.plot(model.x, model.y, ".", color=INK, markersize=3, alpha=0.6)
        ax.axvspan(1.5, 3.0, color=FAINT, alpha=0.12, linewidth=0)
        ax.set(title=title, xlabel="x", ylim=(-4, 4))
    studies.save(figure, out, name)
