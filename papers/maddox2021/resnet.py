"""A residual network with all of its parameters as a Gaussian process, matrix-free.

    NET2GP_DATA=... python papers/maddox2021/resnet.py --out figures --device cuda
    NET2GP_DATA=... python papers/maddox2021/resnet.py --out figures --points 2000 --test 1000 --draws 8
    python papers/maddox2021/resnet.py --out figures --quick

The trained ResNet-20 (269,722 parameters) and CIFAR-10: the posterior over all parameters given all training
images is drawn from by preconditioned conjugate gradients (`Sampled`), where neither the matrix of parameters
nor that of 500,000 latent values could be stored. Beside it the bare network, its temperature, and Laplace
posteriors of the last layer and of Kronecker factors. The temperature, and one number of each posterior (the
prior variance; where it says tempered, and for all parameters, the factor of `tempered`) are chosen on the
same 1000 held-out images; "by training data" are the defaults of `laplace`, which see no held-out images.
Strangers, for AUROC of the predictive entropy, are Fashion-MNIST, notMNIST and noise. A quick run does all of
this with a small network of 300 handwritten digits, which needs no files; its strangers are turned digits and
noise.

Claims, on test images, with errors over them:

- the posterior of all parameters has a better NLL and ECE than the network and than the last layer with the
  best prior variance, and no worse NLL than the last layer tempered;
- over the network it gains at least nine tenths of what temperature scaling and tempered Kronecker factors
  gain in NLL, and it keeps the accuracy within a hundredth;
- what is tuned on the training images alone has an NLL of at most a hundredth more than the network's.

Maddox et al. (2021), "Fast adaptation with linearized neural networks"; Antorán et al. (2023),
"Sampling-based inference for large linear models, with application to linearised Laplace".
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

import net2gp as n2g
from net2gp import data, metrics, plots

sys.path.append(str(Path(__file__).parents[1]))
import claims
import findings
import studies
from by_heart import digits_by_heart

NUM_HELD_OUT = 1000
WIDE = tuple(10 ** (k / 2) for k in range(-4, 15))
"""Prior variances of the last layer: with many images its best is far above those of `Validation`."""

METHODS = [
    "network",
    "temperature",
    "last layer, by training data",
    "last layer",
    "last layer, tempered",
    "Kron, by training data",
    "Kron",
    "Kron, tempered",
    "all parameters",
]
ALL = METHODS[-1]
Data = tuple[Tensor, Tensor]
Structure = n2g.LastLayer | n2g.Kron
Predict = Callable[[Tensor], Tensor]
"""x to class probabilities (N, C)."""


@dataclass(frozen=True, eq=False)
class Problem:
    """A trained network, and images: its own, held-out, test, and those of other kinds by name."""

    network: nn.Module
    train: Data
    held_out: Data
    test: Data
    others: dict[str, Tensor]


def strangers(count: int) -> dict[str, Tensor]:
    """Images of other kinds in the network's format: (N, 3, 32, 32), standardized."""
    generator = torch.Generator().manual_seed(0)
    found = {
        "Fashion-MNIST": data.fashion_mnist("test")[0],
        "notMNIST": data.notmnist()[0],
    }
    images = {
        name: pad(x[:count].reshape(-1, 1, 28, 28), (2, 2, 2, 2)).expand(-1, 3, -1, -1)
        for name, x in found.items()
    }
    images["noise"] = torch.rand(count, 3, 32, 32, generator=generator)
    return {name: data.IMAGENET(x) for name, x in images.items()}


def network_itself(network: nn.Module, temperature: float = 1.0) -> Predict:
    """softmax(f / temperature)."""

    @torch.no_grad()
    def predict(x: Tensor) -> Tensor:
        return torch.cat([network(part) for part in x.split(1000)]).div(temperature).softmax(-1)

    return predict


def best_temperature(network: nn.Module, x: Tensor, y: Tensor) -> float:
    """The temperature of the smallest loss on held-out images."""
    with torch.no_grad():
        f = torch.cat([network(part) for part in x.split(1000)])
    grid = torch.logspace(-1, 1, 401).tolist()
    return min(grid, key=lambda t: float(cross_entropy(f / t, y)))


def posterior_of(
    network: nn.Module, train: Data, structure: Structure, tuning: n2g.tuning.Validation | None
) -> Predict:
    """Laplace, its prior variance from held-out images or, with the link, from the training images."""
    link = n2g.links.MonteCarlo() if tuning is None else n2g.links.Contrast()
    posterior = n2g.laplace(
        network, train, n2g.Categorical(link), structure=structure, tuning=tuning
    )
    print(f"  prior_var {posterior.prior_var:.3g}, {posterior.likelihood}", flush=True)
    return predictor(posterior)


def tempered(posterior: n2g.Posterior, held_out: Data) -> Predict:
    """The posterior with its covariance times the factor of the smallest loss on held-out images."""
    x, y = held_out
    link = n2g.links.Contrast()
    with torch.no_grad():
        f = torch.cat([posterior.linearized(part) for part in x.split(500)])
        variances = torch.cat([posterior.contrast(part) for part in x.split(500)])
    losses = {
        factor: float(cross_entropy(link.shrink(f, factor * variances), y))
        for factor in torch.logspace(-6, 4, 81).tolist()
    }
    best = min(losses, key=lambda factor: losses[factor])
    print(f"  factor {best:.3g}, held-out NLL {losses[best]:.4f}", flush=True)
    if posterior.evidence is not None:
        print(f"  log evidence {float(posterior.evidence):.1f}", flush=True)
    return predictor(posterior.tempered(best))


def by_evidence(network: nn.Module, train: Data, structure: Structure, held_out: Data) -> Predict:
    """Laplace with the prior variance of the evidence, its scale from held-out images."""
    likelihood = n2g.Categorical(n2g.links.Contrast())
    posterior = n2g.laplace(
        network, train, likelihood, structure=structure, tuning=n2g.tuning.Evidence()
    )
    return tempered(posterior, held_out)


def all_parameters(
    network: nn.Module,
    train: Data,
    held_out: Data,
    prior_var: float,
    structure: n2g.structures.Sampled,
) -> Predict:
    """Draws of the posterior of all parameters, their scale from held-out images."""
    likelihood = n2g.Categorical(n2g.links.Contrast())
    posterior = n2g.laplace(network, train, likelihood, prior_var=prior_var, structure=structure)
    return tempered(posterior, held_out)


def predictor(posterior: n2g.Posterior) -> Predict:
    """Class probabilities, some hundred images at a time."""

    @torch.no_grad()
    def predict(x: Tensor) -> Tensor:
        return torch.cat([posterior.predict(part).probs for part in x.split(500)])

    return predict


def measure(predict: Predict, x: Tensor, y: Tensor, others: dict[str, Tensor]) -> dict[str, Any]:
    """Scores on test images, and AUROC of the entropy for strangers."""
    probs = predict(x).double().cpu()
    entropy = lambda p: -(p * p.clamp(min=1e-300).log()).sum(-1)
    row: dict[str, Any] = {
        "accuracy": float(metrics.accuracy(probs, y.cpu())),
        "NLL": float(-probs[torch.arange(len(y)), y.cpu()].clamp(min=1e-300).log().mean()),
        "ECE": float(metrics.expected_calibration_error(probs, y.cpu())),
    }
    for name, images in others.items():
        strange = predict(images).double().cpu()
        row[name] = float(metrics.auroc(entropy(probs), entropy(strange)))
    return row | {"probs": probs}


def cifar(options: argparse.Namespace) -> Problem:
    """ResNet-20 and CIFAR-10."""
    device = torch.device(options.device)
    network = data.pretrained("resnet20_cifar10").to(device)
    x, y = data.cifar10("train")
    chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[: options.points]
    train = data.IMAGENET(x[chosen]).to(device), y[chosen].to(device)
    x, y = data.cifar10("test")
    x, y = data.IMAGENET(x[: NUM_HELD_OUT + options.test]).to(device), y.to(device)
    held_out = x[:NUM_HELD_OUT], y[:NUM_HELD_OUT]
    test = x[NUM_HELD_OUT:], y[NUM_HELD_OUT : len(x)]
    others = {name: s.to(device) for name, s in strangers(min(2000, options.test)).items()}
    return Problem(network, train, held_out, test, others)


def digits(options: argparse.Namespace) -> Problem:
    """A small network that has learned 300 digits by heart, so that it is too sure of others."""
    known = digits_by_heart(options.device)
    return Problem(known.network, known.train, known.held_out, known.test, known.strangers)


def methods_of(problem: Problem, options: argparse.Namespace) -> dict[str, Callable[[], Predict]]:
    """By name, what makes a prediction."""
    network, train, held_out = problem.network, problem.train, problem.held_out
    validation = n2g.tuning.Validation(held_out)
    sampled = n2g.structures.Sampled(
        num_samples=options.draws,
        tol=options.tol,
        max_iterations=options.iterations,
        rank=options.rank,
        num_points=options.sketch,
        num_probes=options.probes,
        leave_out=options.leave_out,
        checkpoint=options.checkpoint,
    )
    return {
        "network": lambda: network_itself(network),
        "temperature": lambda: network_itself(network, best_temperature(network, *held_out)),
        "last layer, by training data": lambda: posterior_of(network, train, n2g.LastLayer(), None),
        "last layer": lambda: posterior_of(
            network, train, n2g.LastLayer(), n2g.tuning.Validation(held_out, grid=WIDE)
        ),
        "last layer, tempered": lambda: by_evidence(network, train, n2g.LastLayer(), held_out),
        "Kron, by training data": lambda: posterior_of(network, train, n2g.Kron(), None),
        "Kron": lambda: posterior_of(network, train, n2g.Kron(), validation),
        "Kron, tempered": lambda: by_evidence(network, train, n2g.Kron(), held_out),
        "all parameters": lambda: all_parameters(
            network, train, held_out, options.prior_var, sampled
        ),
    }


def run(problem: Problem, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every method, one after the other."""
    device = problem.test[0].device
    rows = []
    for name, make in methods_of(problem, options).items():
        if name not in options.methods:
            continue
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        predict = make()
        fitted = time.perf_counter()
        row = {"method": name} | measure(predict, *problem.test, problem.others)
        ended = time.perf_counter()
        memory = (
            torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else float("nan")
        )
        row |= {"fit s": fitted - started, "predict s": ended - fitted, "GiB": memory}
        print("  " + json.dumps({k: v for k, v in row.items() if k != "probs"}), flush=True)
        rows.append(row)
    draw(rows, problem.test[1].cpu(), options.out)
    return rows


def draw(rows: list[dict[str, Any]], y: Tensor, out: Path) -> None:
    """Accuracy against confidence of the network and of what was tuned on the same held-out images."""
    shown = {
        str(row["method"]): row["probs"]
        for row in rows
        if "by training data" not in str(row["method"])
    }
    figure, ax = studies.panels(1, height=3.6)
    plots.plot_reliability(ax, shown, y)
    ax.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.02, 1.0))
    studies.save(figure, out, "maddox2021_resnet.png")


def print_rows(rows: list[dict[str, Any]]) -> None:
    """As a table."""
    columns = [key for key in rows[0] if key not in ("method", "probs")]
    print(f"{'':<30}" + "".join(f"{name:>14}" for name in columns))
    for row in rows:
        print(f"{row['method']:<30}" + "".join(f"{row[name]:>14.4f}" for name in columns))


def stated(rows: list[dict[str, Any]], y: Tensor, quick: bool) -> list[claims.Claim]:
    """What the head of this program claims, of the methods that were run."""
    found = {row["method"]: row for row in rows}
    losses = {
        name: -row["probs"][torch.arange(len(y)), y].clamp(min=1e-300).log()
        for name, row in found.items()
    }
    judged = []
    if (ours := found.get(ALL)) and "network" in found:
        for rival in [name for name in ("network", "last layer") if name in found]:
            margin = losses[rival] - losses[ALL]
            judged += [
                claims.compared(f"{ALL}, NLL, beside {rival}", margin, "better", quick=quick),
                claims.at_most(f"{ALL}, ECE, beside {rival}", ours["ECE"], found[rival]["ECE"]),
            ]
        if (rival := "last layer, tempered") in found:
            margin = losses[rival] - losses[ALL]
            name = f"{ALL}, NLL, beside {rival}"
            judged.append(claims.compared(name, margin, "no worse", quick=quick))
        for rival in [name for name in ("temperature", "Kron, tempered") if name in found]:
            ours_gain, their_gain = (losses["network"] - losses[name] for name in (ALL, rival))
            margin = ours_gain - 0.9 * their_gain
            name = f"{ALL}, NLL gained, beside nine tenths of {rival}"
            judged.append(claims.compared(name, margin, "no worse", quick=quick))
        change = abs(ours["accuracy"] - found["network"]["accuracy"])
        judged.append(claims.at_most(f"{ALL}, change of accuracy", change, 0.01))
    for name in found:
        if "by training data" in name and "network" in found:
            worse = found[name]["NLL"] - found["network"]["NLL"]
            judged.append(claims.at_most(f"{name}, NLL above the network's", worse, 0.01))
    return judged


def main(arguments: list[str] | None = None) -> int:
    """Print the table, write the figure; 0 if all claims hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder for the figure")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--points", type=int, default=50_000, help="training images")
    parser.add_argument("--test", type=int, default=9_000, help="test images, after 1000 held out")
    parser.add_argument("--prior-var", type=float, default=0.01, help="of all parameters")
    parser.add_argument("--draws", type=int, default=16, help="draws of the posterior")
    parser.add_argument("--tol", type=float, default=0.03, help="relative residual of the draws")
    parser.add_argument("--iterations", type=int, default=60, help="at most, for the draws")
    parser.add_argument("--rank", type=int, default=100, help="of the preconditioner")
    parser.add_argument("--sketch", type=int, default=2000, help="images of the preconditioner")
    parser.add_argument("--probes", type=int, default=0, help="Lanczos runs for the evidence")
    parser.add_argument(
        "--leave-out", type=float, default=1e-3, help="share of the curvature, by points"
    )
    parser.add_argument("--checkpoint", type=Path, help="file that keeps the state of the draws")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--quick", action="store_true", help="a small network of digits")
    options = findings.parse(parser, arguments)
    # the checkpoint was trained with augmented images and batch statistics: these are not its own data
    warnings.simplefilter("ignore", n2g.errors.NotStationary)
    problem = digits(options) if options.quick else cifar(options)
    rows = run(problem, options)
    print_rows(rows)
    scores = "accuracy", "NLL", "ECE", *problem.others, "fit s", "predict s"
    findings.show({f"{row['method']}: {key}": row[key] for row in rows for key in scores})
    return 0 if claims.judge(stated(rows, problem.test[1].cpu(), options.quick)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
