"""Networks and posteriors whose programs are measured, and what they say themselves."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import net2gp as n2g
from net2gp import data
from net2gp.errors import Net2GPWarning
from net2gp.links import WeightSamples

DRAWS = WeightSamples(8, seed=0)
LIMITS = {"NNGP": n2g.nngp, "NTK": n2g.ntk}
STRUCTURES = {
    "LastLayer()": n2g.LastLayer(),
    "LastLayer(Kron())": n2g.LastLayer(n2g.Kron()),
    "Kron()": n2g.Kron(),
    "Diagonal()": n2g.Diagonal(),
}
LEAST_VAR = 1e-3
"""The prior variance of LeNets that are drawn. With 1, logits of the drawn networks reach 23,000, where
float32 has steps of .002, and probabilities depend on the order of sums by 7e-5, also the posterior's own."""

CASES = ("LastLayer()", "Kron()", "Diagonal()", "NNGP", "NTK", "draws")
"""What the first claim is about."""


@dataclass(frozen=True, eq=False)
class Problem:
    """A posterior, points, and how it is exported.

    Args:
        network: The network that the program is timed beside.
        posterior: The posterior.
        x: The points.
        settings: Arguments of `export`.
    """

    network: nn.Module
    posterior: Any
    x: Tensor
    settings: dict[str, Any] = field(default_factory=dict)


class Block(nn.Module):
    """Two convolutions, each behind a ReLU, beside a shortcut that is a convolution where sizes change."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        stride = 1 if before == after else 2
        self.conv1 = nn.Conv2d(before, after, 3, stride=stride, padding=1)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1)
        self.shortcut = nn.Conv2d(before, after, 1, stride=stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.shortcut(x) + self.conv2(F.relu(self.conv1(F.relu(x))))


def residual() -> nn.Module:
    """A ResNet-20 with a Gaussian at infinite width in front of each ReLU: no norms, ReLUs before weights.

    A linear layer reads all pixels: a mean over them takes a covariance of each two pixels.
    """
    widths = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64]
    blocks = [Block(before, after) for before, after in pairwise(widths)]
    head = (nn.ReLU(), nn.Flatten(), nn.Linear(64 * 16, 10))
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *blocks, *head)


def strided_lenet() -> nn.Module:
    """LeNet with strides in place of maxima, which have no limit."""
    convolutions = [nn.Conv2d(1, 6, 5, stride=2), nn.ReLU(), nn.Conv2d(6, 16, 5, stride=2)]
    sizes = (256, 120, 84)
    dense = [part for i, o in pairwise(sizes) for part in (nn.Linear(i, o), nn.ReLU())]
    return nn.Sequential(*convolutions, nn.ReLU(), nn.Flatten(), *dense, nn.Linear(84, 10))


def dense(outputs: int, activation: type[nn.Module]) -> nn.Module:
    """Two hidden layers of 256 units."""
    hidden = (nn.Linear(64, 256), activation(), nn.Linear(256, 256), activation())
    return nn.Sequential(*hidden, nn.Linear(256, outputs))


def network_and_points(name: str) -> tuple[nn.Module, Tensor]:
    """A network, and standard normal points of its shape."""
    torch.manual_seed(0)
    if name == "LeNet":
        return data.pretrained("full_mnist_lenet_adaml2"), torch.randn(256, 1, 28, 28)
    if name == "ResNet-20":
        return data.pretrained("resnet20_cifar10"), torch.randn(256, 3, 32, 32)
    network = dense(1 if "one output" in name else 10, nn.Tanh)
    return network.eval(), torch.randn(256, 64)


def problem(name: str, case: str) -> Problem:
    """A network by its name with a posterior by its structure, which may say ", novelty"."""
    if case in LIMITS:
        return _limit(name, case)
    network, x = network_and_points(name)
    structure, _, novelty = case.partition(", ")
    if structure == "draws":
        structure = n2g.Kron() if name == "MLP" else n2g.Diagonal()
        posterior = _fitted(network, x, structure, LEAST_VAR if name == "LeNet" else 1.0)
        return Problem(network, posterior, x, {"draws": DRAWS})
    posterior = _fitted(network, x, STRUCTURES[structure])
    return Problem(network, posterior, x, {"novelty": bool(novelty)})


def _fitted(network: nn.Module, x: Tensor, structure: Any, prior_var: float = 1.0) -> Any:
    """A posterior for a few points, whose labels are what the network says."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", Net2GPWarning)
        out = network(x[:64])
        settings = {"structure": structure, "prior_var": prior_var}
        if out.shape[1] == 1:
            return n2g.laplace(network, (x[:64], out), n2g.Gaussian(0.1), **settings)
        labels = out.argmax(1)
        return n2g.laplace(network, (x[:64], labels), n2g.Categorical(), **settings)


def _limit(name: str, case: str) -> Problem:
    """The limit of an architecture given 50 points; the residual network sees images of 16 by 16."""
    torch.manual_seed(0)
    network, x = {
        "MLP": (dense(10, nn.ReLU), torch.randn(256, 64)),
        "LeNet": (strided_lenet(), torch.randn(256, 1, 28, 28)),
        "ResNet-20": (residual(), torch.randn(256, 3, 16, 16)),
    }[name]
    kernel = LIMITS[case](network, weight_var=1.5, bias_var=0.1)
    y = torch.randn(50, 10)
    return Problem(network.eval(), n2g.condition(kernel, (x[:50], y), n2g.Gaussian(0.1)), x)


def wanted(found: Problem) -> dict[str, Tensor]:
    """What the posterior itself says at all points, under the names of a program's outputs."""
    posterior, x, settings = found.posterior, found.x, found.settings
    if "draws" in settings:
        generator = torch.Generator().manual_seed(DRAWS.seed)
        f = posterior.sample(x, DRAWS.num_samples, generator=generator, linear=False)
        probabilities = posterior.predict(x, samples=DRAWS).probs
        variance = f.double().var(0, unbiased=False)
        return {"mean": f.mean(0), "variance": variance, "probabilities": probabilities}
    if hasattr(posterior.process, "widening"):
        law = posterior.marginal(x)
        classes, novelty = posterior.num_outputs > 1, settings["novelty"]
        if classes:
            own = {"probabilities": posterior.predict(x).probs} if novelty else {}
            return {"mean": law.mean, "variance": law.variance, **own}
        variance = posterior.predict(x).variance
        noise = float(posterior.likelihood.noise_var)
        return {
            "mean": law.mean,
            "variance": variance if novelty else law.variance.reshape(-1, 1) + noise,
        }
    law = posterior.predict(x)
    return {"mean": law.mean, "variance": law.variance}
