"""More difficult data: kernels of CIFAR networks, what curvature costs, and SWAG for deep networks.

    NET2GP_DATA=... python papers/lecture/harder_data.py --out figures [--quick]

Stated before the run:

- the trained CIFAR LeNets have the published test accuracies, 68.09 % (Adam) and 67.20 % (VOGN). Their
  tangent kernels find images of one class more alike than images of two, but by less than LeNets on
  MNIST do;
- the full Gauss–Newton matrix of LeNet-5 has P² entries, which do not fit into memory; diagonal,
  Kronecker factors, last layer and function space hold at most a hundredth of them. A step of VOGGN,
  which needs the Gauss–Newton matrix, takes at least twice the time of a step of VOGN, which needs
  squares of gradients: 1 + C backward passes in place of one;
- on a quadratic loss, SWAG has the stationary covariance of stochastic gradient descent, within four
  standard errors;
- on the trained ResNet-20 the average of networks drawn by SWAG has an NLL and a calibration error on
  test images that are no worse than the network's.

Khan et al. (2019), "Approximate inference turns deep networks into Gaussian processes"; Maddox et al.
(2019), "A simple baseline for Bayesian uncertainty in deep learning". Needs cifar10.npz, mnist.npz and
nets/ (see net2gp.data).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import torch
from common import Claim, Study, Topic, at_least, at_most, panels, run, tidy, with_files
from scipy.linalg import solve_discrete_lyapunov
from torch import Tensor, nn

import net2gp as n2g
from net2gp import data, metrics
from net2gp.data import LeNet5, pretrained
from net2gp.explain import similarity
from net2gp.links import WeightSamples
from net2gp.plots import COLORS, INK, plot_class_kernel
from net2gp.structures import Structure
from net2gp.training import VOGGN, VOGN, Swag

Images = tuple[Tensor, Tensor]
ACCURACIES = {"cifar_lenet_adam": 0.6809, "cifar_lenet_vogn": 0.6720}
DIGITS = {
    "cifar_lenet_adam": "full_mnist_lenet_adaml2",
    "cifar_lenet_vogn": "full_mnist_lenet_vogn",
}


def first_of_each(x: Tensor, y: Tensor, count: int) -> Images:
    """The first images of each class, sorted by class."""
    index = torch.cat([(y == c).nonzero()[:count, 0] for c in range(10)])
    return x[index], y[index]


def contrast(K: Tensor, y: Tensor) -> tuple[float, float]:
    """Mean similarity within classes, an image with itself left out, and between them."""
    same = y[:, None] == y
    own = torch.eye(len(y), dtype=torch.bool)
    return float(K[same & ~own].mean()), float(K[~same].mean())


def cifar_kernels(quick: bool) -> Study:
    """Tangent kernels of LeNets on CIFAR-10 and on MNIST."""
    count = 10 if quick else 30
    train, test = data.cifar10("train"), data.cifar10("test")
    some = first_of_each(data.CIFAR10(train[0][:5000]), train[1][:5000], count)
    digits = first_of_each(*(part[:5000] for part in data.mnist("train")), count)
    figure, axes = panels(2, 4.0)
    figure.set_figwidth(9)
    made: list[Claim] = []
    lines = [f"{'network':<28}{'within':>9}{'between':>9}{'difference':>12}{'accuracy':>10}"]
    for ax, (name, published) in zip(axes, ACCURACIES.items(), strict=True):
        network = pretrained(name)
        K = similarity(n2g.linearize(network).kernel(), some[0]).double()
        within, between = contrast(K, some[1])
        easy = similarity(n2g.linearize(pretrained(DIGITS[name])).kernel(), digits[0]).double()
        known = contrast(easy, digits[1])
        with torch.no_grad():
            parts = [network(data.CIFAR10(part)) for part in test[0].split(1000)]
        accuracy = float((torch.cat(parts).argmax(1) == test[1]).double().mean())
        lines += [
            f"{name:<28}{within:>9.3f}{between:>9.3f}{within - between:>12.3f}{accuracy:>10.4f}",
            f"{DIGITS[name]:<28}{known[0]:>9.3f}{known[1]:>9.3f}{known[0] - known[1]:>12.3f}",
        ]
        plot_class_kernel(ax, K, some[1])
        ax.set_title(
            f"{'Adam' if 'adam' in name else 'VOGN'}: within {within:.2f}, between {between:.2f}",
            fontsize=10,
        )
        made += [
            at_most(f"{name}: accuracy less {published}", abs(accuracy - published), 5e-4),
            at_least(f"{name}: similarity within less between classes", within - between, 0.02),
            at_most(
                f"{name}: this difference beside the MNIST network's",
                (within - between) / (known[0] - known[1]),
                1.0,
            ),
        ]
    return Study(
        "cifar_kernels",
        "Kernels of networks on more difficult data",
        f"""The normalized tangent kernels of two LeNets trained on CIFAR-10, at {10 * count} training
images sorted by class (0 airplane, 1 automobile, 2 bird, 3 cat, 4 deer, 5 dog, 6 frog, 7 horse, 8 ship,
9 truck). Blocks on the diagonal are classes. They stand out less than on MNIST, as the networks are
right on 68 % and 67 % of test images only.""",
        figure,
        tuple(made),
        "\n".join(lines),
    )


def cpu_seconds(action: Callable[[], object], repeats: int = 3) -> float:
    """The least CPU time of some repetitions, after one that does not count."""
    found = []
    for _ in range(repeats + 1):
        start = time.process_time()
        action()
        found.append(time.process_time() - start)
    return min(found[1:])


def stored(network: nn.Module, outputs: int) -> dict[str, int]:
    """How many numbers each form of the curvature holds."""
    layers = [m for m in network.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    total = sum(p.numel() for p in network.parameters())
    sides = [(m.weight[0].numel() + 1, len(m.weight)) for m in layers]
    last = sum(p.numel() for p in layers[-1].parameters())
    return {
        "full": total**2,
        "Kronecker factors": sum(a * a + b * b for a, b in sides),
        "diagonal": total,
        "last layer": last**2,
        "function space": outputs**2,
    }


def curvature_costs(quick: bool) -> Study:
    """Time and memory of the forms of the Gauss–Newton matrix of LeNet-5."""
    count = 100 if quick else 300
    x, y = (part[:count] for part in data.mnist("train"))
    network = pretrained("full_mnist_lenet_adaml2")
    structures: dict[str, Structure] = {
        "Kronecker factors": n2g.Kron(),
        "diagonal": n2g.Diagonal(),
        "last layer": n2g.LastLayer(),
        "function space": n2g.FunctionSpace(),
    }

    def fit(structure: Structure) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", n2g.errors.NotStationary)
            n2g.laplace(network, (x, y), n2g.Categorical(), prior_var=1.0, structure=structure)

    def gradient() -> None:
        network.zero_grad()
        n2g.Categorical().log_prob(network(x), y).sum().backward()

    seconds = {"gradient": cpu_seconds(gradient)}
    seconds |= {name: cpu_seconds(lambda s=s: fit(s), 1) for name, s in structures.items()}
    steps = {}
    for kind in (VOGN, VOGGN):
        optimizer = kind(LeNet5().eval(), n2g.Categorical(), num_data=60_000, learning_rate=1e-4)
        steps[kind.__name__] = cpu_seconds(lambda o=optimizer: o.step(x[:64], y[:64]))
    numbers = stored(network, 10 * count)
    lines = [f"{'LeNet-5, ' + str(count) + ' digits':<24}{'CPU seconds':>12}{'numbers held':>16}"]
    for name in ("gradient", *numbers):
        held = sum(p.numel() for p in network.parameters()) if name == "gradient" else numbers[name]
        cost = f"{seconds[name]:>12.4f}" if name in seconds else f"{'not run':>12}"
        lines.append(f"{name:<24}{cost}{held:>16,}")
    lines += [
        f"{'step of ' + name:<24}{value:>12.4f}   (64 digits)" for name, value in steps.items()
    ]
    figure, axes = panels(2)
    axes[0].barh(list(numbers), list(numbers.values()), color=[COLORS[1], *[COLORS[0]] * 4])
    axes[0].set(xscale="log", xlabel="numbers held", title=f"LeNet-5, {count} digits")
    both = seconds | {f"step of {name}": value for name, value in steps.items()}
    axes[1].barh(list(both), list(both.values()), color=[INK, *[COLORS[0]] * 4, *[COLORS[2]] * 2])
    axes[1].set(xscale="log", xlabel="seconds of a core")
    for ax in axes:
        ax.invert_yaxis()
        tidy(ax)
    largest = max(value for name, value in numbers.items() if name != "full")
    return Study(
        "curvature_costs",
        "What the Gauss–Newton matrix costs",
        f"""The full Gauss–Newton matrix of LeNet-5 has {numbers["full"] / 1e9:.1f}·10⁹ entries,
{8 * numbers["full"] / 2**30:.0f} GiB. Its diagonal, Kronecker factors, the last layer and function
space (`structure=` of `laplace`) are small, but the exact Gauss–Newton matrix needs a backward pass for
each class: a step of VOGGN takes {steps["VOGGN"] / steps["VOGN"]:.1f} times as long as a step of VOGN,
which squares gradients.""",
        figure,
        (
            at_least("entries of the full matrix, in GiB", 8 * numbers["full"] / 2**30, 10),
            at_most("largest other form beside the full matrix", largest / numbers["full"], 0.01),
            at_least("step of VOGGN beside a step of VOGN", steps["VOGGN"] / steps["VOGN"], 2),
            at_least("diagonal beside one gradient", seconds["diagonal"] / seconds["gradient"], 2),
        ),
        "\n".join(lines),
    )


def wandering(count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """SWAG of θ ← θ − η(Aθ + ξ): its covariance, the stationary one, their allowed error, and the weights."""
    generator = torch.Generator().manual_seed(0)
    A = torch.tensor([[1.0, 0.5], [0.5, 0.6]], dtype=torch.float64)
    root = torch.tensor([[0.8, 0.0], [-0.5, 0.6]], dtype=torch.float64)
    rate = 0.5
    keep = torch.eye(2, dtype=torch.float64) - rate * A
    exact = torch.from_numpy(
        solve_discrete_lyapunov(keep.numpy(), (rate**2 * root @ root.T).numpy())
    )
    theta, network, swag = (
        torch.zeros(2, dtype=torch.float64),
        nn.Linear(2, 1, bias=False).double(),
        Swag(rank=count),
    )
    weights = []
    for _ in range(count):
        for step in torch.randn(25, 2, generator=generator, dtype=torch.float64) @ root.T:
            theta = keep @ theta - rate * step
        with torch.no_grad():
            network.weight.copy_(theta[None])
        swag = swag.collect(network)
        weights.append(theta)
    found = swag.covariance()
    low_rank = 2 * found.factor @ found.factor.T
    spread = exact.diagonal()
    error = ((exact.square() + spread[:, None] * spread) / count).sqrt()
    return low_rank, exact, error, torch.stack(weights)


def wander(network: nn.Module, train: Images, epochs: int) -> Swag:
    """SWAG of descent from a trained network, with mirrored images; batch norm stays frozen."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    generator, swag = torch.Generator().manual_seed(0), Swag(rank=20)
    for _ in range(epochs):
        for index in torch.randperm(len(train[0]), generator=generator).split(64):
            x = train[0][index]
            turned = torch.rand(len(x), 1, 1, 1, generator=generator) < 0.5
            optimizer.zero_grad()
            nn.functional.cross_entropy(
                network(torch.where(turned, x.flip(3), x)), train[1][index]
            ).backward()
            optimizer.step()
        swag = swag.collect(network)
    return swag


def swag(quick: bool) -> Study:
    """SWAG on a quadratic loss and on a trained ResNet-20."""
    images, epochs, tested, draws = (512, 6, 1000, 10) if quick else (4000, 15, 4000, 20)
    x, y = (part[:images] for part in data.cifar10("train"))
    test_x, test_y = (part[:tested] for part in data.cifar10("test"))
    train, test_x = (data.IMAGENET(x), y), data.IMAGENET(test_x)
    network = pretrained("resnet20_cifar10")
    with torch.no_grad():
        bare = torch.cat([network(part) for part in test_x.split(500)]).double().softmax(1)
    collected = wander(network, train, epochs)
    posterior = collected.posterior(network, train, n2g.Categorical())
    with torch.no_grad():
        parts = [
            posterior.predict(part, samples=WeightSamples(draws)).probs
            for part in test_x.split(500)
        ]
        network.load_state_dict({k: v.float() for k, v in collected.mean.items()}, strict=False)
        middle = torch.cat([network(part) for part in test_x.split(500)]).double().softmax(1)
    laws = {"network": bare, "mean of the path": middle, "SWAG": torch.cat(parts).double()}
    scores = {
        name: (
            float(metrics.accuracy(p, test_y)),
            float(-p[range(len(test_y)), test_y].log().mean()),
            float(metrics.expected_calibration_error(p, test_y)),
        )
        for name, p in laws.items()
    }
    lines = [f"{'ResNet-20, ' + str(tested) + ' images':<26}{'accuracy':>10}{'NLL':>9}{'ECE':>9}"]
    for name, values in scores.items():
        lines.append(f"{name:<26}{values[0]:>10.4f}{values[1]:>9.4f}{values[2]:>9.4f}")
    low_rank, exact, error, weights = wandering(1000 if quick else 4000)
    figure, axes = panels(3)
    axes[0].plot(*weights.T, ".", color=COLORS[0], ms=1.5)
    angle = torch.linspace(0, 2 * torch.pi, 200, dtype=torch.float64)
    circle = torch.stack([angle.cos(), angle.sin()])
    for K, color, style, name in (
        (exact, INK, "-", "stationary"),
        (low_rank, COLORS[1], "--", "SWAG"),
    ):
        axes[0].plot(*(2 * torch.linalg.cholesky(K) @ circle), style, color=color, label=name)
    axes[0].set_title("A quadratic loss: two deviations", fontsize=10)
    axes[0].legend(frameon=False, labelcolor=INK, fontsize=8)
    for ax, place, title in (
        (axes[1], 1, "NLL of test images"),
        (axes[2], 2, "expected calibration error"),
    ):
        ax.bar(list(scores), [v[place] for v in scores.values()], color=COLORS[:3], width=0.6)
        ax.set_title(f"ResNet-20: {title}", fontsize=10)
    for ax in axes:
        tidy(ax)
    return Study(
        "swag",
        "SWAG for deep networks",
        f"""Left: the weights of stochastic gradient descent on a quadratic loss, their stationary
covariance and SWAG's. Middle and right: the trained ResNet-20 (269,722 parameters) goes on for {epochs}
epochs over {images} images with a constant learning rate; `training.Swag` collects its weights, and
{draws} networks drawn from its Gaussian are averaged.""",
        figure,
        (
            at_most(
                "quadratic: errors of the covariance",
                float(((low_rank - exact).abs() / error).max()),
                4,
            ),
            at_most(
                "ResNet-20: NLL of SWAG beside the network's",
                scores["SWAG"][1] / scores["network"][1],
                1.0,
            ),
            at_most(
                "ResNet-20: ECE of SWAG less the network's",
                scores["SWAG"][2] - scores["network"][2],
                0.0,
            ),
            at_most(
                "ResNet-20: accuracy of the network less SWAG's",
                scores["network"][0] - scores["SWAG"][0],
                0.02,
            ),
        ),
        "\n".join(lines),
    )


TOPICS: list[Topic] = with_files(
    [cifar_kernels, curvature_costs, swag], "cifar10.npz", "mnist.npz", "nets"
)

if __name__ == "__main__":
    raise SystemExit(run(TOPICS, __doc__))
