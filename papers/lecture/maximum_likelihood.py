"""From a composition of layers to its most probable parameters: architectures, gradients and weight decay.

    python papers/lecture/maximum_likelihood.py --out figures [--quick]

Stated before the run:

- a network is the composition of its layers, and a layer of a perceptron is a(Wx + b); a perceptron has
  Σ (inputs + 1) · outputs parameters, LeNet-5 has 44,426 and ResNet-20 269,722, as published;
- backpropagation gives the gradient of log p(y | θ): it is the product of the layers' derivatives, and it
  agrees with finite differences;
- steps of torch's SGD with momentum and weight decay are steps on the log joint. With
  θ ← θ + η ∇log p(y | θ) − λθ the prior has the variance η/λ, over a thousand steps;
- a prior of variance η/2λ, which is sometimes said, has another path;
- Adam with weight decay in the loss stops at the most probable parameters, AdamW does not.

LeCun et al. (1998), "Gradient-based learning applied to document recognition"; He et al. (2016), "Deep
residual learning"; Loshchilov and Hutter (2019), "Decoupled weight decay regularization".
"""

from __future__ import annotations

from itertools import pairwise

import torch
from common import Study, Topic, at_least, at_most, digits, mlp, panels, run, tidy
from matplotlib.ticker import MaxNLocator
from torch import Tensor, nn
from torch.func import grad, jacrev

import net2gp as n2g
from net2gp import bayes
from net2gp.data import LeNet5, ResNet20
from net2gp.plots import COLORS, FAINT, INK

SIZES = (64, 100, 50, 10)
RATE, SHRINK = 2e-3, 4e-4
Path = dict[str, Tensor]


def parameters_of(network: nn.Module) -> int:
    """How many numbers are trained."""
    return sum(p.numel() for p in network.parameters())


def widths_of(network: nn.Module, x: Tensor) -> list[tuple[str, int, int]]:
    """For each layer with parameters its name, the numbers that leave it, and the number of parameters."""
    found: list[tuple[str, int, int]] = []
    handles = []
    for name, module in network.named_modules():
        own = sum(p.numel() for p in module.parameters(recurse=False))
        if own and isinstance(module, nn.Linear | nn.Conv2d):
            handles.append(
                module.register_forward_hook(
                    lambda _, __, out, name=name, own=own: found.append((name, out[0].numel(), own))
                )
            )
    with torch.no_grad():
        network(x)
    for handle in handles:
        handle.remove()
    return found


def composition_error(network: nn.Sequential, x: Tensor) -> float:
    """Between network(x) and a(Wx + b) written out, layer by layer."""
    h = x
    for layer in network:
        h = h @ layer.weight.T + layer.bias if isinstance(layer, nn.Linear) else layer(h)
    return float((h - network(x)).detach().abs().max())


def architectures(quick: bool) -> Study:
    """Layers of a perceptron, a convolutional and a residual network."""
    networks = {
        "perceptron": (mlp(*SIZES), torch.zeros(1, 64)),
        "LeNet-5, convolutional": (LeNet5().eval(), torch.zeros(1, 1, 28, 28)),
        "ResNet-20, residual": (ResNet20().eval(), torch.zeros(1, 3, 32, 32)),
    }
    figure, axes = panels(3)
    for ax, (name, (network, x)) in zip(axes, networks.items(), strict=True):
        layers = widths_of(network, x)
        places = torch.arange(1, len(layers) + 1)
        ax.bar(places - 0.2, [n for _, n, _ in layers], 0.4, color=COLORS[0], label="outputs")
        ax.bar(places + 0.2, [p for _, _, p in layers], 0.4, color=COLORS[1], label="parameters")
        ax.set(
            yscale="log",
            ylim=(1, 1e5),
            xlabel="layer",
            title=f"{name}: P = {parameters_of(network):,}",
        )
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        tidy(ax)
    axes[0].legend(frameon=False, labelcolor=INK, fontsize=8)
    plain = mlp(*SIZES).double()
    x = digits("test", 50)[0].double()
    counted = sum((a + 1) * b for a, b in pairwise(SIZES))
    shapes = [
        network(x.expand(3, *x.shape[1:])).shape == (3, 10) for network, x in networks.values()
    ]
    return Study(
        "architectures",
        "Networks are compositions of simple functions",
        """f = f_L ∘ … ∘ f_1. A layer of a perceptron is a(Wx + b); convolutions use the same few
weights at every place of an image, and residual blocks add their input to their output. The bars are the
numbers that leave each layer for one input, and the parameters of the layer.""",
        figure,
        (
            at_most(
                "perceptron: difference from a(Wx + b), composed",
                composition_error(plain, x),
                1e-12,
            ),
            at_most(
                "perceptron: parameters less Σ (in + 1) out", abs(parameters_of(plain) - counted), 0
            ),
            at_most("LeNet-5: parameters less 44,426", abs(parameters_of(LeNet5()) - 44_426), 0),
            at_most(
                "ResNet-20: parameters less 269,722", abs(parameters_of(ResNet20()) - 269_722), 0
            ),
            at_least("networks that map 3 inputs to (3, 10)", sum(shapes), 3),
        ),
    )


def model_of(network: nn.Module, variance: float) -> bayes.Model:
    """A classifier with a Gaussian prior."""
    return bayes.Model.of(network, n2g.Categorical(), bayes.NormalPrior(variance))


def gradient_errors(network: nn.Sequential, points: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Of backpropagation: relative to finite differences along 20 directions, and to the chain rule."""
    model = model_of(network, 1.0)
    likelihood = lambda params: model.log_likelihood(params, points)
    slope = grad(likelihood)(model.params)
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for _ in range(20):
        way = {
            n: torch.randn(v.shape, generator=generator, dtype=v.dtype) for n, v in slope.items()
        }
        ahead, behind = (
            likelihood({n: v + step * way[n] for n, v in model.params.items()})
            for step in (1e-5, -1e-5)
        )
        exact = sum((slope[n] * way[n]).sum() for n in slope)
        worst = max(worst, float(abs((ahead - behind) / 2e-5 - exact) / abs(exact)))
    x, y = points
    hidden = network[1](network[0](x)).detach()
    rest = lambda h: n2g.Categorical().log_prob(network[2:](h), y).sum()
    layer = lambda weight: network[1](x @ weight.T + network[0].bias)
    chain = torch.einsum(
        "nh,nhij->ij", grad(rest)(hidden), jacrev(layer)(network[0].weight.detach())
    )
    apart = (chain - slope["0.weight"]).norm() / slope["0.weight"].norm()
    return worst, float(apart.detach())


def torch_path(
    network: nn.Module, points: tuple[Tensor, Tensor], steps: int, **options: float
) -> list[Path]:
    """Parameters along torch's SGD on the sum of negative log-likelihoods."""
    x, y = points
    optimizer = torch.optim.SGD(network.parameters(), **options)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        (-n2g.Categorical().log_prob(network(x), y).sum()).backward()
        optimizer.step()
        found.append({n: p.detach().clone() for n, p in network.named_parameters()})
    return found


def ascent(
    network: nn.Module,
    points: tuple[Tensor, Tensor],
    steps: int,
    variance: float,
    momentum: float = 0.0,
) -> list[Path]:
    """Parameters along gradient steps on the log joint, written out."""
    model = model_of(network, variance)
    params, speed, found = model.params, None, []
    climb = grad(model.log_joint)
    for _ in range(steps):
        slope = climb(params, points)
        speed = slope if speed is None else {n: momentum * speed[n] + slope[n] for n in slope}
        params = {n: v + RATE * speed[n] for n, v in params.items()}
        found.append(params)
    return found


def gap(one: Path, other: Path) -> float:
    """The largest difference of a parameter."""
    return max(float((one[n] - other[n]).abs().max()) for n in one)


def most_probable(points: tuple[Tensor, Tensor], steps: int) -> dict[str, float]:
    """How far Adam and AdamW end from the most probable weights of a linear classifier, relative to them."""
    variance = RATE / SHRINK
    decay = bayes.weight_decay_of_prior(variance)
    x, y = points
    ends: dict[str, Tensor] = {}
    ways = {
        "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=decay),
        "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=decay),
    }
    for name, make in ways.items():
        network = mlp(64, 10).double()
        optimizer = make(list(network.parameters()))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(steps):
            optimizer.zero_grad()
            (-n2g.Categorical().log_prob(network(x), y).sum()).backward()
            optimizer.step()
            schedule.step()
        ends[name] = torch.cat([p.detach().flatten() for p in network.parameters()])
    training = bayes.Training(
        num_steps=60,
        optimizer=lambda p: torch.optim.LBFGS(
            p, line_search_fn="strong_wolfe", tolerance_grad=1e-12
        ),
        schedule="constant",
        batch_size=None,
    )
    best = bayes.module_of(
        bayes.map_estimate(
            mlp(64, 10).double(), points, n2g.Categorical(), prior=variance, training=training
        )
    )
    there = torch.cat([p.detach().flatten() for p in best.parameters()])
    return {name: float((end - there).norm() / there.norm()) for name, end in ends.items()}


def weight_decay(quick: bool) -> Study:
    """Gradients by backpropagation, and weight decay as a prior."""
    x, y = digits("train", 100)
    points, test = (x.double(), y), digits("test", 20)
    network = lambda: mlp(64, 20, 10, activation=nn.Tanh).double().eval()
    differences, chain = gradient_errors(network(), (test[0].double(), test[1]))
    steps = 1000
    decayed = torch_path(network(), points, steps, lr=RATE, weight_decay=SHRINK / RATE)
    right = ascent(network(), points, steps, RATE / SHRINK)
    wrong = ascent(network(), points, steps, RATE / SHRINK / 2)
    moving = torch_path(network(), points, 2, lr=RATE, weight_decay=SHRINK / RATE, momentum=0.9)
    written = ascent(network(), points, 2, RATE / SHRINK, momentum=0.9)
    scale = max(float(v.abs().max()) for v in written[-1].values())
    ends = most_probable(points, 4000)
    figure, axes = panels(2)
    at = range(1, steps + 1)
    for path, color, name in (
        (right, COLORS[0], r"$\eta/\lambda$"),
        (wrong, COLORS[1], r"$\eta/2\lambda$"),
    ):
        distances = [max(gap(a, b), 1e-17) for a, b in zip(decayed, path, strict=True)]
        axes[0].plot(at, distances, color=color, label=f"prior variance {name}")
    axes[0].axhline(1e-12, color=FAINT, linewidth=1, linestyle=":")
    axes[0].set(
        yscale="log", xscale="log", xlabel="steps", ylabel="largest difference of a parameter"
    )
    axes[0].set_title("SGD with weight decay beside ascent of the log joint", fontsize=10)
    axes[0].legend(frameon=False, labelcolor=INK, fontsize=8)
    axes[1].bar(list(ends), list(ends.values()), color=COLORS[2], width=0.5)
    axes[1].set(yscale="log", ylabel="relative distance of the end")
    axes[1].set_title("From the most probable weights", fontsize=10)
    for ax in axes:
        tidy(ax)
    return Study(
        "weight_decay",
        "Weight decay is a Gaussian prior",
        """Steps θ ← θ + η ∇log p(y | θ) − λθ are gradient steps on log p(y | θ) + log p(θ) with the prior
N(0, η/λ) (`bayes.Model.log_joint`), so that training with weight decay looks for the most probable
parameters (`bayes.map_estimate`). The same weight decay in Adam ends there too; AdamW, which does not scale
the decay as it scales the gradient, ends elsewhere. The right panel is a linear classifier, whose most
probable weights are unique.""",
        figure,
        (
            at_most("backpropagation beside finite differences, relative", differences, 1e-6),
            at_most("backpropagation beside the product of derivatives", chain, 1e-12),
            at_most(
                "two steps with momentum and decay, beside torch's",
                gap(moving[-1], written[-1]) / scale,
                1e-14,
            ),
            at_most(
                "1000 steps with variance η/λ: largest difference",
                gap(decayed[-1], right[-1]),
                1e-12,
            ),
            at_least(
                "1000 steps with variance η/2λ: largest difference",
                gap(decayed[-1], wrong[-1]),
                1e-3,
            ),
            at_most("Adam: distance from the most probable weights", ends["Adam"], 1e-2),
            at_least("AdamW: distance from the most probable weights", ends["AdamW"], 1e-1),
        ),
    )


TOPICS: list[Topic] = [architectures, weight_decay]

if __name__ == "__main__":
    raise SystemExit(run(TOPICS, __doc__))
