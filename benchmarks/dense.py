"""Outputs at places: a U-Net that labels pixels, and a language model of characters.

    python benchmarks/dense.py            # writes results/dense.md and results/dense.png
    python benchmarks/dense.py --quick    # small data, the last layer alone, writes nothing

Pixels: images of 128 × 128 with discs and boxes of three textures on a plain ground, noise, labels that are
unsure at borders, patches without labels (-100); a U-Net with 29,644 parameters and 12 images. Characters:
512 pieces of Python's own documentation (PSF licence, from the standard library; another version has another
text), each up to 64 characters long; a causal transformer with two layers and 45,939 parameters. Each network
is trained anew for each seed, until it is surer than it is right, and predicts data that it has not seen.
`dense_problems.py` has both.

Claims, over the seeds (papers/claims.py says what the words mean):

- with the last layer, which `laplace` takes by default at places, NLL and ECE of pixels and of characters are
  on average at most .005 above the network's, and the accuracy changes by at most a hundredth. Neither is
  claimed to be better: the table has the differences;
- `Validation` with some more labels is no worse than the network in either;
- pixels err together: draws of neighbours are correlated more than distant ones.

Two things are measured and not claimed, since runs refuted them. With Kronecker factors the NLL of characters
is above the network's by more than .005, though their ECE is far below it. And `novelty` finds a texture that
no training image has better than entropy with some networks, and worse with others.

Memory, in a process for each number: the peak of a fit and of a prediction grows with the number of outputs,
N·P·C, by an exponent of at most 1.1, whether there are more points or more pixels in each. laplace-torch gets
the same networks, point by point, as they are and with their outputs flattened, in 8 GB: what it says is in
the table. The program does not claim that it fails.

The exit status says whether the claims hold.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn.functional import cross_entropy

import net2gp as n2g
from dense_memory import EXPONENT, exponents, memory_page, memory_rows
from dense_problems import IGNORED, Reader, UNet, scenes, texts
from net2gp import metrics

sys.path.append(str(Path(__file__).resolve().parent.parent / "papers"))
import claims

from run import made_by

RESULTS = Path(__file__).resolve().parent / "results" / "dense.md"
CLOSE = 0.005
"""How far NLL and ECE may be above the network's."""

SCORES = ("NLL", "ECE", "accuracy", "AUROC, entropy", "AUROC, novelty")


@dataclass(frozen=True, eq=False)
class Problem:
    """A network and its data; class probabilities of a place are on the last axis of a prediction."""

    name: str
    network: nn.Module
    data: tuple[Tensor, Tensor]
    held_out: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    strange: Tensor
    where: Tensor
    """The places of `strange` that are unlike the training data."""

    axis: int
    """The axis of the network's outputs with the classes."""

    def logits(self, x: Tensor) -> Tensor:
        """The network's outputs with classes behind the places."""
        with torch.no_grad():
            return self.network(x).movedim(self.axis, -1)


def pixels(seed: int, quick: bool = False) -> Problem:
    """Images of textures, and a texture that no training image has."""
    size, count = (48, 6) if quick else (128, 12)
    known, held_out, test = (
        scenes(n, 10 * seed + k, size=size) for k, n in enumerate((count, 4, 8))
    )
    strange = scenes(3, 10 * seed + 3, size=size, strange=True)
    torch.manual_seed(seed)
    network = trained(UNet(), (known.x, known.y), 1, (4, 120, 1e-2))
    pairs = [(part.x, part.y) for part in (known, held_out, test)]
    return Problem("pixels", network, *pairs, strange.x, strange.unseen, 1)


def characters(seed: int, quick: bool = False) -> Problem:
    """Texts, and the same texts read backwards."""
    counts = (128, 64, 64) if quick else (512, 64, 128)
    known, held_out, test = texts(counts, seed)
    torch.manual_seed(seed)
    network = trained(Reader(), (known.x, known.y), 2, (32, 15, 5e-3))
    pairs = [(part.x, part.y) for part in (known, held_out, test)]
    both = torch.cat([test.x, test.x.flip(1)])
    where = (torch.arange(len(both)) >= len(test.x))[:, None].expand(both.shape)
    return Problem("characters", network, *pairs, both, where, -1)


def trained(
    network: nn.Module, data: tuple[Tensor, Tensor], axis: int, settings: tuple[int, int, float]
) -> nn.Module:
    """By Adam with a little weight decay; `settings` are the size of a batch, epochs and learning rate."""
    (x, y), (batch, epochs, rate) = data, settings
    optimizer = torch.optim.AdamW(network.parameters(), rate, weight_decay=1e-2)
    steps = epochs * math.ceil(len(x) / batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    for _ in range(epochs):
        for index in torch.randperm(len(x)).split(batch):
            optimizer.zero_grad()
            cross_entropy(network(x[index]).movedim(axis, 1), y[index]).backward()
            optimizer.step()
            schedule.step()
    return network.eval().requires_grad_(False)


PROBLEMS: dict[str, Callable[..., Problem]] = {"pixels": pixels, "characters": characters}


def ways(problem: Problem, quick: bool) -> dict[str, dict]:
    """What `laplace` is called with, by the name in the tables."""
    # the 2499 weights of a head for 51 characters have a matrix that takes 20 times as long
    last = n2g.LastLayer() if problem.name == "pixels" else n2g.LastLayer(n2g.Kron())
    found = {
        "last layer": {"structure": last},
        "last layer, held-out labels": {
            "structure": last,
            "tuning": n2g.tuning.Validation(problem.held_out),
        },
    }
    if not quick:
        found |= {
            "Kron": {"structure": n2g.Kron()},
            "diagonal": {"structure": n2g.Diagonal()},
        }
    return found


def rows(problem: Problem, quick: bool) -> Iterator[tuple[str, list[float]]]:
    """Scores and seconds of each way to predict."""

    def scaled(by: float) -> Callable[[Tensor], Categorical]:
        return lambda x: Categorical(logits=problem.logits(x) / by)

    yield "network", [*scores(problem, scaled(1.0), None), 0.0, 0.0]
    x, y = problem.held_out
    logits = problem.logits(x).flatten(0, -2)
    grid = torch.linspace(-1, 1.5, 60).exp().tolist()
    best = min(grid, key=lambda by: float(cross_entropy(logits / by, y.flatten())))
    yield "temperature, held-out labels", [*scores(problem, scaled(best), None), 0.0, 0.0]
    for name, settings in ways(problem, quick).items():
        start = time.process_time()
        posterior = n2g.laplace(problem.network, problem.data, n2g.Categorical(), **settings)
        fitted = time.process_time() - start
        start = time.process_time()
        law = posterior.predict(problem.test[0])
        spent = time.process_time() - start
        values = scores(problem, posterior.predict, posterior.novelty, law)
        yield name, [*values, fitted, spent]
        if name == "last layer":
            plain = n2g.Categorical(n2g.links.Contrast(posterior.likelihood.link.scale))
            without = partial(posterior.predict, likelihood=plain)
            yield "last layer, no novelty", [*scores(problem, without, None), 0.0, 0.0]


def scores(
    problem: Problem,
    predict: Callable[[Tensor], Categorical],
    novelty: Callable[[Tensor], Tensor] | None,
    law: Categorical | None = None,
) -> list[float]:
    """NLL, ECE and accuracy of the places with labels, AUROC of strange places by entropy and novelty."""
    x, y = problem.test
    kept = y != IGNORED
    probs, labels = (law or predict(x)).probs[kept].double(), y[kept]
    maps = [predict(problem.strange).entropy()]
    maps += [] if novelty is None else [novelty(problem.strange)]
    found = [float(metrics.auroc(m[~problem.where], m[problem.where])) for m in maps]
    return [
        float(metrics.nll(Categorical(probs), labels)),
        float(metrics.expected_calibration_error(probs, labels)),
        float(metrics.accuracy(probs, labels)),
        *found,
        *[float("nan")] * (2 - len(found)),
    ]


def together(problem: Problem) -> tuple[float, float]:
    """Correlations of 64 draws of a logit, of pixels side by side and of pixels 64 apart."""
    settings = {"structure": n2g.Kron(), "prior_var": 0.03}
    posterior = n2g.laplace(problem.network, problem.data, n2g.Categorical(), **settings)
    generator = torch.Generator().manual_seed(0)
    draws = posterior.sample(problem.test[0][:1], 64, generator=generator)[:, 0]
    margin = draws[..., 1] - draws[..., 0]
    z = (margin - margin.mean(0)) / margin.std(0, correction=0)
    half = z.shape[-1] // 2
    near, far = z[..., 1:] * z[..., :-1], z[..., half:] * z[..., :-half]
    return float(near.mean()), float(far.mean())


def stated(name: str, found: dict[str, list[list[float]]], quick: bool) -> Iterator[claims.Claim]:
    """What the head of this program claims about scores."""
    by = {
        method: dict(zip(SCORES, torch.tensor(values).T, strict=False))
        for method, values in found.items()
    }
    bare = by["network"]

    own = by["last layer"]
    for score in ("NLL", "ECE"):
        gap = float((own[score] - bare[score]).mean())
        yield claims.at_most(f"{name}, last layer, {score} less the network's", gap, CLOSE)
    change = float((own["accuracy"] - bare["accuracy"]).abs().mean())
    yield claims.at_most(f"{name}, last layer, change of accuracy", change, 0.01)
    for score in ("NLL", "ECE"):
        what = f"{name}, held-out labels, {score}, beside network"
        margin = bare[score] - by["last layer, held-out labels"][score]
        yield claims.compared(what, margin, "no worse", quick=quick)


def table(found: dict[str, dict[str, list[list[float]]]]) -> str:
    """Means over seeds, and the standard error of the difference in NLL."""
    lines = [
        f"| places | prediction | NLL | NLL − network's | {' | '.join(SCORES[1:])} | fit, s | predict, s |",
        "|---|---|" + "---:|" * 8,
    ]
    for name, methods in found.items():
        bare = torch.tensor(methods["network"])[:, 0]
        for method, values in methods.items():
            each = torch.tensor(values)
            mean, gap = each.mean(0).tolist(), each[:, 0] - bare
            error = float(gap.std()) / math.sqrt(len(gap))
            difference = "" if method == "network" else f"{float(gap.mean()):+.4f} ± {error:.4f}"
            cells = [f"{mean[0]:.4f}", difference]
            cells += ["" if math.isnan(v) else f"{v:.4f}" for v in mean[1:3]]
            cells += ["" if math.isnan(v) else f"{v:.3f}" for v in mean[3:5]]
            cells += ["" if not v else f"{v:.1f}" for v in mean[5:]]
            lines.append(f"| {name} | {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def outcome(judged: list[claims.Claim]) -> str:
    """The section of the page on claims."""
    wrong = [f"- {claim.name}: {claim.found}" for claim in judged if not claim.as_stated]
    count = f"{len(judged) - len(wrong)} of {len(judged)} claims hold."
    return "\n".join(["## Claims", "", count, *(["Not these:", "", *wrong] if wrong else [])])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[11, 12, 13])
    parser.add_argument("--quick", action="store_true", help="small data, the last layer alone")
    options = parser.parse_args()
    if len(options.seeds) < 2:
        parser.error("--seeds must be at least two: claims are judged by their spread")
    made = made_by()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: dict[str, dict[str, list[list[float]]]] = {name: {} for name in PROBLEMS}
    near_and_far = []
    for name, make in PROBLEMS.items():
        for seed in options.seeds[: 2 if options.quick else None]:
            problem = make(seed, options.quick)
            for method, values in rows(problem, options.quick):
                found[name].setdefault(method, []).append(values)
            near_and_far += [together(problem)] if name == "pixels" else []
            print(f"{name}, seed {seed} done", flush=True)
            if name == "pixels" and seed == options.seeds[0] and not options.quick:
                from dense_figure import draw

                draw(problem, RESULTS.with_suffix(".png"))
    memory = memory_rows(options.quick)
    near, far = torch.tensor(near_and_far).T
    print(table(found), memory_page(memory), sep="\n\n")
    judged = [c for name, each in found.items() for c in stated(name, each, options.quick)]
    judged.append(
        claims.compared(
            "pixels, correlation, near less far", near - far, "better", quick=options.quick
        )
    )
    judged += [claims.at_most(what, value, EXPONENT) for what, value in exponents(memory)]
    if not options.quick:
        parts = ["# Outputs at places", f"{made} {HEAD}", table(found)]
        parts += [CORRELATED.format(near=float(near.mean()), far=float(far.mean()))]
        RESULTS.write_text(
            "\n\n".join([*parts, memory_page(memory), outcome(judged)]) + "\n", encoding="utf-8"
        )
    return 0 if claims.judge(judged) else 1


HEAD = """One thread of a shared machine. The head of the program says what the data and networks are. Means
over three seeds that were not looked at before; ± is the standard error of the difference. Scores are of the
places with labels of 8 images and 128 texts, CPU seconds those of the fit with its tuning and of the
prediction of these. AUROC says how well entropy, or novelty, finds strange places: pixels of a texture that
no training image has, among the pixels around them, and texts that are read backwards. "no novelty" is the
posterior of the row above, predicted with a link of the same scale that does not look at novelty. Curvatures
of pixels and characters add up as if they were independent, which they are not: images and texts of a test
are ordinary, so that uncertainty about parameters has little to win there, and what a temperature from
held-out labels wins is in the second row."""

CORRELATED = """With Kronecker factors, 64 draws of the difference of two logits have the correlation
{near:.2f} between pixels side by side, and {far:.2f} between pixels half an image apart.

![Image, labels and predictions; maps of entropy, variance and novelty; pixels that err together](dense.png)
"""


if __name__ == "__main__":
    raise SystemExit(main())
