"""A LeNet whose posterior is found while it trains, beside the same network trained by Adam.

    python papers/khan2019/vogn_mnist.py --out figures

VOGN and Adam train LeNet-5 on MNIST under the same Gaussian prior, with equally many steps. Both are then
asked about the test digits, and about clothes (Fashion-MNIST), which neither has seen: a network that
knows its limits is less sure of clothes, and the entropy of its predictions tells them from digits.
Predictions of VOGN are those of its mean, the average over networks drawn from the posterior, and the
integral over the network linearized at the mean.

The LeNet that the paper's authors trained by VOGN has 97.54 % accuracy and a loss of 0.0859 on the same
test set, computed with their published weights.

Khan, Immer, Abedi and Korzepa (2019), "Approximate inference turns deep networks into Gaussian processes".
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributions import Categorical as Classes
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from net2gp import Categorical, Posterior, metrics
from net2gp.data import LeNet5, fashion_mnist, mnist
from net2gp.plots import COLORS
from net2gp.training import VOGN

sys.path.append(str(Path(__file__).parents[1]))
import findings
from studies import Row, panels, print_table, save

PUBLISHED_ERROR, PUBLISHED_NLL = 0.0246, 0.0859
PRIOR_VAR = 0.01
BATCH = 64
Predict = Callable[[Tensor], Classes]


@dataclass(frozen=True)
class Size:
    """How much is computed."""

    steps: int
    digits: int
    linearized: int
    draws: int


FULL = Size(steps=3000, digits=10_000, linearized=2000, draws=20)
QUICK = Size(steps=1500, digits=10_000, linearized=500, draws=10)


def batches(x: Tensor, y: Tensor, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Random batches, the same ones for every training."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        index = torch.randint(len(x), (BATCH,), generator=generator)
        yield x[index], y[index]


def falling(optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
    """The schedule of both trainings."""
    return CosineAnnealingLR(optimizer, steps, eta_min=optimizer.param_groups[0]["lr"] / 20)


def train_adam(x: Tensor, y: Tensor, steps: int) -> nn.Module:
    """The mode of the posterior: the mean loss and the prior's penalty."""
    torch.manual_seed(0)
    network = LeNet5().eval()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    scheduler = falling(optimizer, steps)
    for inputs, labels in batches(x, y, steps):
        optimizer.zero_grad()
        squares = sum(p.square().sum() for p in network.parameters())
        penalty = squares / (2 * PRIOR_VAR * len(x))
        (nn.functional.cross_entropy(network(inputs), labels) + penalty).backward()
        optimizer.step()
        scheduler.step()
    return network


def train_vogn(x: Tensor, y: Tensor, steps: int) -> Posterior:
    """The posterior; its evidence, an ELBO, is estimated on ten thousand digits."""
    torch.manual_seed(0)
    network = LeNet5().eval()
    optimizer = VOGN(
        network, Categorical(), len(x), prior_var=PRIOR_VAR, learning_rate=0.02, initial_var=1e-4
    )
    scheduler = falling(optimizer, steps)
    for inputs, labels in batches(x, y, steps):
        optimizer.step(inputs, labels)
        scheduler.step()
    return optimizer.posterior((x[:10_000], y[:10_000]))


def point(network: Callable[[Tensor], Tensor]) -> Predict:
    """One network's own prediction."""

    @torch.no_grad()
    def predict(x: Tensor) -> Classes:
        return Classes(logits=torch.cat([network(part) for part in x.split(1000)]))

    return predict


def averaged(posterior: Posterior, draws: int) -> Predict:
    """The average of the probabilities of networks drawn from the posterior."""

    def predict(x: Tensor) -> Classes:
        parts = []
        for part in x.split(1000):
            # the same networks for every part
            generator = torch.Generator().manual_seed(2)
            f = posterior.sample(part, draws, generator=generator, linear=False)
            parts.append(f.softmax(-1).mean(0))
        return Classes(probs=torch.cat(parts))

    return predict


def linearized(posterior: Posterior) -> Predict:
    """The network linearized at the mean, with its weights integrated out."""

    def predict(x: Tensor) -> Classes:
        return Classes(probs=torch.cat([posterior.predict(part).probs for part in x.split(500)]))

    return predict


@dataclass(frozen=True, eq=False)
class Scores:
    """How good, and how sure, a predictor is."""

    error: float
    nll: float
    calibration: float
    inside: Tensor
    outside: Tensor
    confidence: float

    @property
    def auroc(self) -> float:
        """Of telling clothes from digits by the entropy of the prediction."""
        return float(metrics.auroc(self.inside, self.outside))


def score(predict: Predict, digits: tuple[Tensor, Tensor], clothes: Tensor) -> Scores:
    """On test digits and on clothes."""
    x, y = digits
    law, other = predict(x), predict(clothes)
    return Scores(
        error=1 - float(metrics.accuracy(law.probs, y)),
        nll=float(metrics.nll(law, y)),
        calibration=float(metrics.expected_calibration_error(law.probs, y)),
        inside=law.entropy(),
        outside=other.entropy(),
        confidence=float(other.probs.amax(1).mean()),
    )


def report(scores: dict[str, Scores], seconds: dict[str, float]) -> None:
    """The table."""
    names = "accuracy", "NLL", "ECE", "AUROC", "entropy", "confidence"
    print(f"{'':<26}" + "".join(f"{name:>12}" for name in names))
    print(
        f"{'':<26}{'digits':>12}{'digits':>12}{'digits':>12}{'':>12}{'clothes':>12}{'clothes':>12}"
    )
    for name, s in scores.items():
        numbers = 1 - s.error, s.nll, s.calibration, s.auroc, float(s.outside.mean()), s.confidence
        print(f"{name:<26}" + "".join(f"{number:12.4f}" for number in numbers))
        findings.show({f"{name}: {key}": v for key, v in zip(names, numbers, strict=True)})
    print(", ".join(f"{name}: {value:.0f} s" for name, value in seconds.items()))


def draw_entropies(scores: dict[str, Scores], out: Path) -> None:
    """Histograms of the entropies of predictions, digits beside clothes."""
    figure, axes = panels(len(scores))
    for ax, (name, s) in zip(axes, scores.items(), strict=True):
        for values, label, color in (
            (s.inside, "digits", COLORS[0]),
            (s.outside, "clothes", COLORS[1]),
        ):
            ax.hist(values.numpy(), bins=40, range=(0, 2.31), density=True, alpha=0.6, color=color,
                    label=label)  # fmt: skip
        ax.set(title=f"{name}\nAUROC {s.auroc:.3f}", xlabel="entropy", yscale="log")
    axes[0].legend(frameon=False)
    save(figure, out, "vogn_mnist.png")


def timed(seconds: dict[str, float], name: str, function: Callable, *arguments: object) -> object:
    """The function's value; how long it took goes into `seconds`."""
    start = time.perf_counter()
    value = function(*arguments)
    seconds[name] = time.perf_counter() - start
    return value


def study(size: Size) -> tuple[dict[str, Scores], dict[str, float]]:
    """Train both, and score every prediction."""
    (x, y), (x_test, y_test) = mnist("train"), mnist("test")
    clothes = fashion_mnist("test")[0]
    seconds: dict[str, float] = {}
    adam = timed(seconds, "Adam", train_adam, x, y, size.steps)
    posterior = timed(seconds, "VOGN", train_vogn, x, y, size.steps)
    assert isinstance(adam, nn.Module)
    assert isinstance(posterior, Posterior)
    print(f"ELBO of VOGN: {float(posterior.log_marginal_likelihood()) / len(x):.4f} a digit")
    digits = x_test[: size.digits], y_test[: size.digits]
    few = x_test[: size.linearized], y_test[: size.linearized]
    scores = {
        "Adam": score(point(adam), digits, clothes[: size.digits]),
        "VOGN, its mean": score(point(posterior.linearized), digits, clothes[: size.digits]),
        "VOGN, drawn networks": score(
            averaged(posterior, size.draws), digits, clothes[: size.digits]
        ),
        f"VOGN, linearized ({size.linearized})": score(
            linearized(posterior), few, clothes[: size.linearized]
        ),
    }
    return scores, seconds


def rows(scores: dict[str, Scores]) -> list[Row]:
    """What should hold of the predictions."""
    adam, drawn = scores["Adam"], scores["VOGN, drawn networks"]
    return [
        Row("error of drawn networks", PUBLISHED_ERROR, drawn.error, 0.0, at_most=True),
        Row("NLL of drawn networks", PUBLISHED_NLL, drawn.nll, 0.0, at_most=True),
        Row(
            "confidence on clothes", adam.confidence, drawn.confidence, 0.0, "Adam's", at_most=True
        ),
        Row("1 − AUROC by entropy", 1 - adam.auroc, 1 - drawn.auroc, 0.0, "Adam's", at_most=True),
    ]


def main(out: Path, quick: bool) -> bool:
    """Print the table and draw the figure; whether all holds."""
    scores, seconds = study(QUICK if quick else FULL)
    report(scores, seconds)
    draw_entropies(scores, out)
    return print_table(rows(scores))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("figures"), help="for the figure")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="fewer steps, draws and linearized images: half the time",
    )
    arguments = findings.parse(parser)
    sys.exit(0 if main(arguments.out, arguments.quick) else 1)
