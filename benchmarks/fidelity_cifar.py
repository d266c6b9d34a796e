"""Fidelity on CIFAR-10: predictions beside those of full-batch Hamiltonian Monte Carlo on 512 TPUs.

    NET2GP_DATA=... python benchmarks/fidelity_cifar.py --cells FOLDER [--methods sgd sghmc] [--limit 480]
    python benchmarks/fidelity_cifar.py --quick

Every method gets the network and the prior of the reference (see `cifar_networks.py`). A method runs in
groups of `--group` networks at once, and what a group gave is a cell on disk. After `--limit` seconds no
other group is begun and the exit status is 3: the same command goes on from there. The claims stand in
`cifar_tables.py`, and the exit status is 1 if one of them does not hold. `--report` runs nothing and makes
the table of what there is. `--time` only says how long an epoch takes, on random images. `--pack FOLDER`
writes the data in parts that are small enough to be sent one by one, and `--packed FOLDER` reads them. The
table goes to `results/fidelity_cifar.json` and `.md`, with a figure beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from cifar_methods import PLANS, Plan, run, seed_of
from cifar_networks import Copies
from cifar_tables import report
from net2gp import data
from run import RESULTS, made_by, processor

MEAN, STD = (0.49, 0.48, 0.44), 0.2
"""How the reference standardized images."""

PART = 55_000_000
"""Bytes of a part of the packed data."""

SIZES = {"sgd": 10}
"""Networks at once, where they are not 5."""

UNFINISHED = 3


def main() -> int:
    options = parse(sys.argv[1:])
    made_by()
    started, console = time.perf_counter(), Console(width=150)
    if options.pack:
        return pack(options.pack)
    if options.time:
        return measure(options, console)
    train, test, truth = load(options)
    for method in [] if options.report else options.methods:
        for group in range(options.groups):
            if any(cell(options, method, group, w).is_file() for w in ("done", "diverged")):
                continue
            if time.perf_counter() - started > options.limit:
                console.print(f"to be continued: {method} {group}", highlight=False)
                return UNFINISHED
            advance(options, method, group, (train, test), console)
    return report(options, list(PLANS), truth, test[1].cpu(), console)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="256 images, an epoch or two: minutes")
    parser.add_argument("--methods", nargs="+", choices=PLANS, help="in this order (default: all)")
    parser.add_argument("--group", type=int, help="networks at once (default 5; 10 of sgd)")
    parser.add_argument("--groups", type=int, default=1, help="of each method (default 1)")
    parser.add_argument("--epochs", type=int, help="instead of those in the plan of each method")
    parser.add_argument("--burn-in", type=int, help="epochs, likewise")
    parser.add_argument("--rate", type=float, help="step size, likewise")
    parser.add_argument("--tag", default="", help="a name for a run with such changes")
    parser.add_argument("--batch", type=int, default=125, help="points of a batch (default 125)")
    parser.add_argument("--train", type=int, default=50_000, help="training images (default all)")
    parser.add_argument("--limit", type=float, default=480.0, help="seconds (default 480)")
    parser.add_argument("--cells", type=Path, help="folder of what each group gave, kept")
    parser.add_argument("--output", type=Path, help="folder of the result files")
    parser.add_argument("--reference", type=Path, help="hmc_cifar10.npz")
    parser.add_argument("--pack", type=Path, help="write the data in parts, and stop")
    parser.add_argument("--packed", type=Path, help="folder with all parts")
    parser.add_argument("--time", action="store_true", help="seconds per epoch, and stop")
    parser.add_argument("--report", action="store_true", help="only the table of what is there")
    parser.add_argument("--plain", action="store_true", help="neither compile nor record graphs")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", type=torch.device
    )
    options = parser.parse_args(arguments)
    options.methods = options.methods or list(PLANS)
    scratch = options.cells or Path(tempfile.mkdtemp(prefix="net2gp-cifar-"))
    options.cells, options.test = scratch, 10_000
    options.output = options.output or (scratch if options.quick else RESULTS)
    if options.quick:
        options.train, options.test, options.batch = 128, 100, 32
        options.group = 2
    options.cells.mkdir(parents=True, exist_ok=True)
    return options


def plan_of(options: argparse.Namespace, method: str) -> Plan:
    """The plan with what the command line changes in it."""
    plan = PLANS[method]
    if options.quick:
        own = {**plan.options, **({"swag_epochs": 2} if "swag_epochs" in plan.options else {})}
        return replace(
            plan, epochs=2, burn_in=min(plan.burn_in, 1), cycle=min(plan.cycle, 2), options=own
        )
    changed = {"epochs": options.epochs, "burn_in": options.burn_in, "rate": options.rate}
    return replace(plan, **{key: value for key, value in changed.items() if value is not None})


def cell(options: argparse.Namespace, method: str, group: int, what: str) -> Path:
    """Where something of a group is kept."""
    name = f"{method}{'-' + options.tag if options.tag else ''}_{group}_{what}".replace(" ", "-")
    return Path(options.cells) / name


def load(
    options: argparse.Namespace,
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]:
    """Training and test images on the device, and the reference's probabilities."""
    if options.packed:
        os.environ["NET2GP_DATA"] = str(unpack(options.packed))
    found = []
    for split, count in (("train", options.train), ("test", options.test)):
        pixels, labels = data.cifar10_bytes(split)  # type: ignore[arg-type]
        images = pixels[:count].to(options.device).permute(0, 3, 1, 2).float().div(255)
        mean = torch.tensor(MEAN, device=options.device).reshape(3, 1, 1)
        images = ((images - mean) / STD).contiguous(memory_format=torch.channels_last)
        if options.device.type == "cuda":
            images = images.bfloat16()
        found.append((images, labels[:count].to(options.device)))
    folder = options.packed or data.data_folder().parent / "reference"
    stored = np.load(options.reference or folder / "hmc_cifar10.npz")
    return found[0], found[1], torch.from_numpy(stored["probs"])[: options.test]


def pack(folder: Path) -> int:
    """Write the file of images in parts, and the reference."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = (data.data_folder() / "cifar10.npz").read_bytes()
    for number, start in enumerate(range(0, len(whole), PART)):
        part = folder / f"part{number}"
        part.mkdir(exist_ok=True)
        (part / "bytes").write_bytes(whole[start : start + PART])
        print(part, len(whole[start : start + PART]))
    stored = data.data_folder().parent / "reference" / "hmc_cifar10.npz"
    (folder / "part0" / "hmc_cifar10.npz").write_bytes(stored.read_bytes())
    return 0


def unpack(folder: Path) -> Path:
    """Put the parts together, once: the folder that then holds the images."""
    whole = folder / "cifar10.npz"
    if not whole.is_file():
        parts = sorted(folder.glob("part*/bytes"))
        whole.write_bytes(b"".join(part.read_bytes() for part in parts))
        (folder / "hmc_cifar10.npz").write_bytes((folder / "part0/hmc_cifar10.npz").read_bytes())
    return folder


def measure(options: argparse.Namespace, console: Console) -> int:
    """Seconds per epoch of 50,000 images and network, on random images."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(4000, 3, 32, 32, generator=generator).to(options.device)
    images = images.contiguous(memory_format=torch.channels_last)
    if options.device.type == "cuda":
        images = images.bfloat16()
    labels = torch.randint(10, (4000,), generator=generator).to(options.device)
    slopes = {}
    for fast in (False, True):
        for count, batch in ((1, 500), (10, 125), (20, 125), (10, 500)):
            begun = time.perf_counter()
            copies = Copies(count, images, labels, batch, fast=fast and not options.plain)
            copies.start(range(count))
            ready = time.perf_counter() - begun
            chosen = torch.arange(count * batch, device=options.device).reshape(count, batch) % 4000
            slopes[fast] = copies.gradient(chosen)[:1].clone()
            waited(options.device)
            start, steps = time.perf_counter(), 0
            while time.perf_counter() - start < 2:
                for _ in range(5):
                    copies.gradient(chosen)
                waited(options.device)
                steps += 5
            seconds = (time.perf_counter() - start) / (steps * batch * count) * 50_000
            console.print(
                f"{copies.how}: {count} × batch {batch}: {seconds:.3f} s per epoch and network, "
                f"{ready:.1f} s to get ready",
                highlight=False,
            )
    gap = (slopes[True] - slopes[False]).norm() / slopes[False].norm()
    console.print(f"gradients of both ways differ by {float(gap):.1e}", highlight=False)
    return 0


def waited(device: torch.device) -> None:
    """Until all work on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def advance(
    options: argparse.Namespace,
    method: str,
    group: int,
    sets: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]],
    console: Console,
) -> None:
    """Run a group, and keep what it predicts, and the networks of sgd for methods that start there."""
    plan, (train, test) = plan_of(options, method), sets
    count = options.group or SIZES.get(method, 5)
    rate = plan.options.get("dropout", 0.0)
    copies = Copies(count, *train, options.batch, dropout=rate, fast=not options.plain)
    trained = None
    if plan.begin == "sgd":
        path = Path(options.cells) / f"sgd_{group}_networks.pt"
        if not path.is_file():
            raise SystemExit(f"{method} starts from the networks of sgd: run --methods sgd first.")
        trained = torch.load(path, weights_only=True)
    begun = time.perf_counter()
    try:
        found = run(plan, copies, test[0], seed_of(method, group), trained)
    except FloatingPointError as error:
        console.print(f"{method} {group}: {error}", highlight=False)
        cell(options, method, group, "diverged").write_text(f"{error}\n")
        return
    waited(options.device)
    spent = time.perf_counter() - begun
    networks = found.pop("networks", None)
    if method == "sgd" and not options.tag and networks is not None:
        torch.save(networks.cpu(), cell(options, method, group, "networks.pt"))
    arrays = {key or "probs": value.half().numpy() for key, value in found.items()}
    np.savez_compressed(cell(options, method, group, "probs.npz"), **arrays)
    before = plan_of(options, "sgd").epochs if plan.begin == "sgd" else 0
    facts = {"seconds": spent, "epochs": before + plan.epochs, "count": count, "how": copies.how}
    more = int(plan.options.get("swag_epochs", 0))
    facts |= {"all_epochs": before + plan.epochs + more, "train": options.train}
    facts |= {"batch": options.batch, "rate": plan.rate}
    facts["device"] = torch.cuda.get_device_name() if options.device.type == "cuda" else processor()
    cell(options, method, group, "done").write_text(json.dumps(facts) + "\n")
    console.print(f"{method} {group}: {spent:.0f} s ({copies.how})", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
