"""How sure is a real image classifier of test images, corrupted images and images of another kind?

    NET2GP_DATA=... python benchmarks/certainty_cifar.py --cells FOLDER [--methods network laplace ...]
    python benchmarks/certainty_cifar.py --quick

The trained ResNet-20 (BatchNorm frozen) and CIFAR-10. Each method (`certainty_methods.py`) is a cell on disk:
its scores on test images, on test images under five corruptions of five strengths (`cifar_images.py`), and
for telling Fashion-MNIST, notMNIST and noise apart. Methods run in the order in which they are given, by
default the most important first; after `--limit` seconds none is begun, the exit status is 3, and the same
command goes on from there. `--report` runs nothing and makes the tables of the cells that there are. A quick
run has a small network of digits.

On a machine that takes 64 MB at a time, `--pack .carry` writes the data in three parts. Send one part after
the other (.carry/part0, .carry/part1, .carry/part2), then, at 600 seconds a command, with all of CIFAR-10 on
one H200 (the minutes are rounded up):

    export PYTHONPATH=src
    run="python benchmarks/certainty_cifar.py --packed .carry --cells .carry-cells --output .carry-cells"
    $run --methods network temperature energy Mahalanobis "nearest neighbors" novelty laplace \
        "laplace, held out"                                                                  1 minute
    $run --methods mixture                                                                   4 minutes
    $run --methods Kron "Kron, held out" "all parameters, held out" --corrupted 200          5 minutes
    $run --methods "laplace-torch, last layer" "laplace-torch, Kron" --corrupted 200 --peer .carry-peer
                                                                                             1 minute
    tar cf cells.tar -C .carry-cells .

and here `--report --cells FOLDER` with these cells writes `results/certainty_cifar.md` and `.json`.
laplace-torch is pure Python, so that a folder can be sent: `pip install --no-deps --target .carry-peer
laplace-torch==0.3.* curvlinops-for-pytorch backpack-for-pytorch asdfghjkl einops opt_einsum torchmetrics
lightning-utilities unfoldNd einconv tqdm`. Without `--peer`, or the package, its methods are left out.

Claims; the exit status says whether they hold, as far as their methods were run:

- `laplace` by default, from training images alone, is at least as good as the bare network in accuracy (to
  .0005), NLL, ECE, Brier score, each AUROC and FPR95, and on corrupted images in NLL, ECE and Brier score;
- with 1000 held-out images it is at least as good as a temperature that is chosen on them, in NLL and ECE
  (beyond chance: the error of the difference over the test images, for ECE by 200 bootstrap samples);
- `posterior.novelty` has the best AUROC, on average over the strangers, of all scores of a single network.

Goals, which are shown and do not decide: the posterior with held-out images comes 90 % of the way from the
network to a mixture of four networks in NLL; the default takes one pass over the training images, and twice
the time of a forward pass to predict.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import net2gp as n2g
from certainty_methods import METHODS, Predict, Problem, Settings, by_parts
from certainty_tables import report
from cifar_images import STRENGTHS, corrupted, pack, strangers, use_packed
from net2gp import data, metrics
from run import RESULTS, made_by, processor

sys.path.append(str(Path(__file__).resolve().parent.parent / "papers"))
from by_heart import digits_by_heart, small

UNFINISHED = 3
NUM_HELD_OUT = 1000
WITHOUT_CORRUPTIONS = ("energy", "Mahalanobis", "nearest neighbors", "novelty")
"""Scores of strangeness, whose probabilities are the network's."""


def main() -> int:
    options = parse(sys.argv[1:])
    if options.pack:
        pack(options.pack)
        return 0
    started = time.perf_counter()
    # the network was trained with augmented images and batch statistics: these are not its own data
    warnings.simplefilter("ignore", n2g.errors.NotStationary)
    if not options.report:
        if options.packed:
            use_packed(options.packed)
        problem = digits(options) if options.quick else cifar(options)
        for method in options.methods:
            if path_of(options, method).is_file():
                continue
            if time.perf_counter() - started > options.limit:
                print(f"to be continued: {method}", flush=True)
                return UNFINISHED
            advance(problem, method, options)
    names = [name for name in METHODS if path_of(options, name).is_file()]
    cells = {name: json.loads(path_of(options, name).read_text()) for name in names}
    left_out = [name for name in METHODS if name not in cells]
    stem = options.output / ("certainty_cifar_quick" if options.quick else "certainty_cifar")
    return report(cells, left_out, stem, made_by(), quick=options.quick)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cuda = torch.cuda.is_available()
    parser.add_argument("--quick", action="store_true", help="digits: about a minute")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--cells", type=Path, help="folder of what each method gave, kept")
    parser.add_argument("--output", type=Path, help="folder of the tables")
    parser.add_argument("--device", default="cuda" if cuda else "cpu", type=torch.device)
    parser.add_argument("--train", type=int, default=50_000, help="training images")
    parser.add_argument("--test", type=int, default=9_000, help="test images")
    parser.add_argument("--others", type=int, default=2_000, help="images of each other kind")
    parser.add_argument(
        "--corrupted", type=int, default=1_000, help="test images that are corrupted"
    )
    parser.add_argument("--limit", type=float, default=480.0, help="seconds (default 480)")
    parser.add_argument("--members", type=int, default=4, help="networks of the mixture")
    parser.add_argument("--epochs", type=int, default=40, help="of each of them")
    parser.add_argument("--batch", type=int, default=512, help="images of a batch, likewise")
    parser.add_argument("--draws", type=int, default=8, help="of the posterior of all parameters")
    parser.add_argument("--tol", type=float, default=0.1, help="residual of these draws")
    parser.add_argument("--peer", type=Path, help="folder with laplace-torch")
    parser.add_argument("--pack", type=Path, help="write the data in parts, and stop")
    parser.add_argument("--packed", type=Path, help="folder with all parts")
    parser.add_argument("--report", action="store_true", help="only the tables of what is there")
    options = parser.parse_args(arguments)
    scratch = options.cells or Path(tempfile.mkdtemp(prefix="net2gp-certainty-"))
    options.cells, options.output = (
        scratch,
        options.output or (scratch if options.quick else RESULTS),
    )
    if options.quick:
        options.corrupted, options.members, options.epochs, options.batch = 200, 2, 30, 32
    for folder in (options.cells, options.output):
        folder.mkdir(parents=True, exist_ok=True)
    return options


def path_of(options: argparse.Namespace, method: str) -> Path:
    """Where the scores of a method are kept."""
    return Path(options.cells) / f"{method.replace(', ', '_').replace(' ', '-')}.json"


def cifar(options: argparse.Namespace) -> Problem:
    """ResNet-20 and CIFAR-10; test images are the first ones after those that are held out."""
    device = options.device
    x, y = data.cifar10("train")
    chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[: options.train]
    train = data.IMAGENET(x[chosen]).to(device), y[chosen].to(device)
    x, y = (value[: NUM_HELD_OUT + options.test].to(device) for value in data.cifar10("test"))
    return Problem(
        network=data.pretrained("resnet20_cifar10").to(device),
        train=train,
        held_out=(data.IMAGENET(x[:NUM_HELD_OUT]), y[:NUM_HELD_OUT]),
        test=(x[NUM_HELD_OUT:], y[NUM_HELD_OUT:]),
        others={name: other.to(device) for name, other in strangers(options.others).items()},
        prepare=data.IMAGENET,
        fresh=data.ResNet20,
        augment=shifted,
    )


def shifted(x: Tensor) -> Tensor:
    """Images moved by up to four pixels, and half of them mirrored."""
    N, _, H, W = x.shape
    rows, columns = (torch.randint(9, (N, 1), device=x.device) for _ in range(2))
    rows, columns = (
        rows + torch.arange(H, device=x.device),
        columns + torch.arange(W, device=x.device),
    )
    mirrored = torch.rand(N, 1, device=x.device) < 0.5
    columns = torch.where(mirrored, columns.flip(1), columns)
    point = torch.arange(N, device=x.device)[:, None, None]
    moved = F.pad(x, (4, 4, 4, 4))[point, :, rows[:, :, None], columns[:, None, :]]
    return moved.permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)


def digits(options: argparse.Namespace) -> Problem:
    """A small network that has learned 300 digits by heart; turned digits and noise are strangers."""
    known = digits_by_heart(options.device)
    same = lambda images: images
    parts = known.network, known.train, known.held_out, known.test, known.strangers
    return Problem(*parts, same, small, same)


class Passes:
    """How many images have entered the network."""

    def __init__(self, network: nn.Module) -> None:
        self.count = 0
        first = next(module for module in network.modules() if isinstance(module, nn.Conv2d))
        first.register_forward_pre_hook(self.see)

    def see(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Count the images of a call."""
        self.count += len(inputs[0])

    def since(self, before: int, images: int) -> float:
        """Passes over so many images since the count was `before`."""
        return (self.count - before) / images


def advance(problem: Problem, method: str, options: argparse.Namespace) -> None:
    """Run a method, and keep its scores."""
    print(method, flush=True)
    passes, device = Passes(problem.network), options.device
    limits = {"num_samples": options.draws, "tol": options.tol, "max_iterations": 20, "rank": 100}
    settings = Settings(
        folder=options.cells,
        members=options.members,
        epochs=options.epochs,
        batch=options.batch,
        sampled=limits
        | {"num_points": min(1000, len(problem.train[0])), "leave_out": 0.01, "num_probes": 0},
        peer=options.peer,
    )
    begun = seconds(device)
    try:
        predict = METHODS[method](problem, settings)
    except (ImportError, NotImplementedError) as error:  # a peer that is not here, or refuses
        print(f"  left out: {error}", flush=True)
        return
    fit, before = seconds(device) - begun, passes.count
    x = problem.prepare(problem.test[0])
    predict(x[:100])  # plans, and what is computed once
    ready, begun = passes.count, seconds(device)
    log_probs, inside = predict(x)
    spent = seconds(device) - begun
    forwards = passes.since(ready, len(x))
    begun = seconds(device)
    by_parts(problem.network, x)
    cell: dict[str, Any] = {
        "fit_s": fit,
        "passes": before / len(problem.train[0]),
        "forwards": forwards,
        "predict_times_forward": spent / (seconds(device) - begun),
        "test": scores(log_probs, problem.test[1]),
        "losses": (-log_probs.gather(1, problem.test[1][:, None])[:, 0]).tolist(),
        "hits": hits(log_probs, problem.test[1]),
        "others": {},
        "corrupted": {},
        "train_images": len(problem.train[0]),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else processor(),
    }
    for name, other in problem.others.items():
        outside = predict(problem.prepare(other))[1]
        found = metrics.auroc(inside, outside), metrics.fpr95(inside, outside)
        cell["others"][name] = dict(zip(("AUROC", "FPR95"), map(float, found), strict=True))
    if method not in WITHOUT_CORRUPTIONS:
        cell["corrupted"] = under_corruptions(problem, predict, options.corrupted)
    path_of(options, method).write_text(json.dumps(cell) + "\n")
    shown = {key: cell[key] for key in ("fit_s", "passes", "forwards", "test", "others")}
    print(f"  {json.dumps(shown)}", flush=True)


def under_corruptions(
    problem: Problem, predict: Predict, count: int
) -> dict[str, list[dict[str, float]]]:
    """For each kind the scores at all strengths."""
    x, y = (value[:count] for value in problem.test)
    return {
        kind: [
            scores(predict(problem.prepare(corrupted(x, kind, strength)))[0], y)
            for strength in range(1, len(amounts) + 1)
        ]
        for kind, amounts in STRENGTHS.items()
    }


def scores(log_probs: Tensor, y: Tensor) -> dict[str, float]:
    """Accuracy, NLL, ECE and Brier score."""
    probs = log_probs.exp()
    found = {
        "accuracy": metrics.accuracy(probs, y),
        "NLL": F.nll_loss(log_probs, y),
        "ECE": metrics.expected_calibration_error(probs, y),
        "Brier": metrics.brier(probs, y),
    }
    return {name: float(value) for name, value in found.items()}


def hits(log_probs: Tensor, y: Tensor) -> list[list[float]]:
    """The confidence in the most probable class, and whether it is right, for each point."""
    confidence, label = log_probs.max(-1)
    return [confidence.exp().tolist(), (label == y).double().tolist()]


def seconds(device: torch.device) -> float:
    """The time, when all work on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


if __name__ == "__main__":
    sys.exit(main())
