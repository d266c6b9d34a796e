"""How sure are classifiers, and their Laplace posteriors, on test data and on data of another kind?

    python benchmarks/certainty.py [--seeds 7 8 9 10 11] [--data digits mnist fashion_mnist] [--quick]

For each seed a network is trained on part of the data; then `laplace` with Kronecker factors tuned by the
evidence, by its default for classes, and for a last layer. All is tuned on the training data alone. A table
in Markdown: test NLL, ECE (15 bins), accuracy, Brier score, and for telling other inputs apart AUROC and
FPR95 (the share of other inputs that pass where 95 % of the test inputs do) of the entropy, and AUROC of
`posterior.novelty`. Beside the ECE stands the one that the same probabilities would have if they were right:
with few test points it is far from zero. MNIST and Fashion-MNIST are read from the folder that NET2GP_DATA
names. Writes `results/certainty.md`, and the scores of each seed to `results/certainty.json`.

Claims, for each data set, over the seeds (papers/claims.py says what the words mean):

- the default of `laplace`, with Kronecker factors and for the last layer, is no worse than the network in
  NLL, ECE and Brier score, and changes its accuracy by at most a hundredth;
- it is better than the network at telling other images and noise apart, in AUROC and FPR95;
- with Kronecker factors its NLL is better than that of the prior variance of the largest evidence.

The exit status says whether they hold. A quick run has three seeds of digits, and writes nothing. `--report`
runs nothing, and makes the table and judges the claims of the scores that are stored; `--methods` runs some
of the ways to predict again, and takes the others from there.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

import net2gp as n2g
from net2gp import data, metrics

sys.path.append(str(Path(__file__).resolve().parent.parent / "papers"))
import claims

RESULTS = Path(__file__).parent / "results" / "certainty.md"
NUM_TEST = 2000
DRAWS = 200
"""Sets of labels that are drawn for the ECE of right probabilities."""


@dataclass(frozen=True, eq=False)
class Problem:
    """Training and test data, and inputs of two other kinds."""

    name: str
    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    others: tuple[Tensor, Tensor]


def digits(seed: int) -> Problem:
    """1237 training digits of 1797, 360 others; strangers are turned digits and noise."""
    generator = torch.Generator().manual_seed(seed)
    parts = [data.digits(which) for which in ("train", "test")]
    x, y = (torch.cat([part[i] for part in parts]) for i in (0, 1))
    order = torch.randperm(len(x), generator=generator)
    x, y = x[order].flatten(1), y[order]
    x_test = x[1237:1597]
    turned = x_test.reshape(-1, 8, 8).rot90(1, (1, 2)).flatten(1)
    noise = torch.rand(x_test.shape, generator=generator)
    return Problem("digits", x[:1237], y[:1237], x_test, y[1237:1597], (turned, noise))


def images(name: str, other: str) -> Callable[[int], Problem]:
    """2000 training images, 2000 test images; strangers are those of the other set and noise."""

    def problem(seed: int) -> Problem:
        generator = torch.Generator().manual_seed(seed)
        x, y = read(name, "train")
        chosen = torch.randperm(len(x), generator=generator)[:2000]
        x_test, y_test = (t[:NUM_TEST] for t in read(name, "test"))
        noise = torch.rand(x_test.shape, generator=generator)
        strangers = (read(other, "test")[0][:NUM_TEST], noise)
        return Problem(name, x[chosen], y[chosen], x_test, y_test, strangers)

    return problem


def read(name: str, which: str) -> tuple[Tensor, Tensor]:
    """Images (N, 1, 28, 28) in [0, 1] and labels."""
    x, y = (data.mnist if name == "mnist" else data.fashion_mnist)(which)
    return x.reshape(-1, 1, 28, 28).float(), y.long()


def network(problem: Problem) -> nn.Sequential:
    """An MLP for vectors, LeNet for images."""
    if problem.x.dim() == 2:
        layers = nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
        return nn.Sequential(*layers)
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 120), nn.ReLU()),
        *(nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def trained(problem: Problem, seed: int) -> nn.Sequential:
    """By Adam with a little weight decay, 60 epochs."""
    torch.manual_seed(seed)
    module = network(problem)
    optimizer = torch.optim.Adam(module.parameters(), 1e-3, weight_decay=1e-4)
    for _ in range(60):
        for index in torch.randperm(len(problem.x)).split(128):
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(problem.x[index]), problem.y[index]).backward()
            optimizer.step()
    return module.eval().requires_grad_(False)


WAYS: dict[str, dict[str, Any]] = {
    "network": {},
    "Kron, evidence": {"structure": n2g.Kron(), "tuning": n2g.tuning.Evidence()},
    "Kron": {"structure": n2g.Kron()},
    "last layer, evidence": {"structure": n2g.LastLayer(), "tuning": n2g.tuning.Evidence()},
    "last layer": {"structure": n2g.LastLayer()},
}


def rows(problem: Problem, seed: int, methods: Sequence[str]) -> Iterator[tuple[str, list[float]]]:
    """Scores of some ways to predict."""
    module = trained(problem, seed)
    known = (problem.x, problem.y)
    for name in methods:
        if name == "network":
            yield name, scores(problem, lambda x: Categorical(logits=module(x)))
            continue
        posterior = n2g.laplace(module, known, n2g.Categorical(), **WAYS[name])
        yield name, scores(problem, posterior.predict, posterior.novelty)


def scores(
    problem: Problem,
    predict: Callable[[Tensor], Categorical],
    novelty: Callable[[Tensor], Tensor] | None = None,
) -> list[float]:
    """What `SCORES` names; not a number for the novelty of a network, which has none."""
    law = predict(problem.x_test)
    inside, outside = law.entropy(), [predict(x).entropy() for x in problem.others]
    found = [
        metrics.nll(law, problem.y_test),
        metrics.expected_calibration_error(law.probs, problem.y_test),
        metrics.accuracy(law.probs, problem.y_test),
        *(metrics.auroc(inside, each) for each in outside),
        metrics.brier(law.probs, problem.y_test),
        *(metrics.fpr95(inside, each) for each in outside),
    ]
    known = [math.nan] * len(outside)
    if novelty is not None:
        inside, outside = novelty(problem.x_test), [novelty(x) for x in problem.others]
        known = [metrics.auroc(inside, each) for each in outside]
    return [float(value) for value in [*found, *known, *ece_if_right(law)]]


def ece_if_right(law: Categorical) -> tuple[float, float]:
    """The ECE that these probabilities have for labels that are drawn from them: mean and deviation."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.multinomial(law.probs, DRAWS, replacement=True, generator=generator)
    each = [float(metrics.expected_calibration_error(law.probs, y)) for y in drawn.T]
    return statistics.mean(each), statistics.stdev(each)


PROBLEMS = {
    "digits": digits,
    "mnist": images("mnist", "fashion_mnist"),
    "fashion_mnist": images("fashion_mnist", "mnist"),
}


def table(found: dict[str, dict[str, list[list[float]]]]) -> str:
    """Means and standard errors over seeds."""
    names = ["NLL", "NLL − network's", *SCORES[1:-1]]
    lines = [
        "| data | prediction | " + " | ".join(names) + " |",
        "|---|---" + "|---:" * len(names) + "|",
    ]
    for name, methods in found.items():
        bare = torch.tensor(methods["network"])[:, 0]
        for method, values in methods.items():
            each = torch.tensor(values)
            mean = each.mean(0).tolist()
            gap = each[:, 0] - bare
            error = float(gap.std()) / math.sqrt(len(gap)) if len(gap) > 1 else float("nan")
            difference = "" if method == "network" else f"{float(gap.mean()):+.4f} ± {error:.4f}"
            others = ["" if math.isnan(value) else f"{value:.3f}" for value in mean[1:-1]]
            others[-1] += f" ± {float(each[:, -1].square().mean()) ** 0.5 / len(each) ** 0.5:.3f}"
            cells = [f"{mean[0]:.4f}", difference, *others]
            lines.append(f"| {name} ({len(each)} seeds) | {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


NOISE = "no worse, and not better beyond chance over five networks"
EXCEPTIONS = {
    ("fashion_mnist", "last layer", score): NOISE for score in ("AUROC, noise", "FPR95, noise")
}
SCORES = (
    *("NLL", "ECE", "accuracy", "AUROC, other images", "AUROC, noise", "Brier"),
    *("FPR95, other images", "FPR95, noise"),
    *("AUROC by novelty, other images", "AUROC by novelty, noise"),
    *("ECE if right", "its deviation"),
)
LOWER = ("NLL", "ECE", "Brier")
DETECTED = SCORES[3:5]
PASSED = SCORES[6:8]


def stated(name: str, found: dict[str, list[list[float]]], quick: bool) -> Iterator[claims.Claim]:
    """What the head of this program claims, of one data set."""
    scores = {
        method: dict(zip(SCORES, torch.tensor(values).T, strict=True))
        for method, values in found.items()
    }
    bare = scores["network"]

    def claim(method: str, score: str, margin: Tensor, word: str, rival: str) -> claims.Claim:
        return claims.compared(
            f"{name}, {method}, {score}, beside {rival}",
            margin,
            word,
            exception=EXCEPTIONS.get((name, method, score), ""),
            quick=quick,
        )

    for method in ("Kron", "last layer"):
        ours = scores[method]
        for score in LOWER:
            yield claim(method, score, bare[score] - ours[score], "no worse", "network")
        for score in DETECTED:
            yield claim(method, score, ours[score] - bare[score], "better", "network")
        for score in PASSED:
            yield claim(method, score, bare[score] - ours[score], "better", "network")
        change = float((ours["accuracy"] - bare["accuracy"]).mean().abs())
        yield claims.at_most(f"{name}, {method}, change of accuracy", change, 0.01)
    margin = scores["Kron, evidence"]["NLL"] - scores["Kron"]["NLL"]
    yield claim("Kron", "NLL", margin, "better", "Kron, evidence")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[7, 8, 9, 10, 11])
    parser.add_argument("--data", nargs="+", choices=list(PROBLEMS), default=list(PROBLEMS))
    parser.add_argument("--methods", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--quick", action="store_true", help="three seeds of digits")
    parser.add_argument("--report", action="store_true", help="judge the scores that are stored")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the file of the table")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.data = options.seeds[:3], ["digits"]
    if len(options.seeds) < 2:
        parser.error("--seeds must be at least two: claims are judged by their spread")
    stored, found = options.output.with_suffix(".json"), {}
    if options.report or len(options.methods) < len(WAYS):
        if not stored.exists():
            parser.error(f"some methods, or a report, go on from {stored}: run all methods first")
        before = json.loads(stored.read_text())
        found, options.seeds = before["found"], before["seeds"]
    if not options.report:
        warnings.simplefilter("ignore")
        for name in options.data:
            new = found.get(name, {}) | all_seeds(name, options.seeds, options.methods)
            found[name] = {method: new[method] for method in WAYS}
    text = table(found)
    print(text)
    if not options.quick:
        head = f"# Certainty of classifiers\n\n{HEAD}"
        options.output.write_text(f"{head}\n\n{text}\n", encoding="utf-8")
        facts = {"scores": SCORES, "seeds": options.seeds, "found": found}
        stored.write_text(json.dumps(facts) + "\n", encoding="utf-8")
    judged = [claim for name, each in found.items() for claim in stated(name, each, options.quick)]
    return 0 if claims.judge(judged) else 1


def all_seeds(
    name: str, seeds: Sequence[int], methods: Sequence[str]
) -> dict[str, list[list[float]]]:
    """The scores of some ways to predict, for each seed."""
    found: dict[str, list[list[float]]] = {}
    for seed in seeds:
        for method, values in rows(PROBLEMS[name](seed), seed, methods):
            found.setdefault(method, []).append(values)
        print(f"{name}, seed {seed} done", flush=True)
    return found


HEAD = """Networks: an MLP 64-256-256-10 on 1237 digits, LeNet on 2000 images; Adam, weight decay 1e-4,
60 epochs. "evidence" is the prior variance of the largest Laplace evidence, predicted by Monte Carlo; the
others are the default of `laplace`. Everything is tuned on the training data. Other images: turned digits, or
Fashion-MNIST for MNIST and the reverse. FPR95 is the share of other images that pass where 95 % of the test
images do. Means over seeds; ± is the standard error of the difference. "ECE if right" is the one that the
same probabilities have for labels that are drawn from them, with its standard deviation: what chance alone
makes of perfect calibration. Where novelty begins to count and how much was chosen on digits of the seeds 7
to 9 and garments of 7 and 8. Made by `python benchmarks/certainty.py`."""


if __name__ == "__main__":
    raise SystemExit(main())
