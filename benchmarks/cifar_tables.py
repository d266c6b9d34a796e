"""The table and the figure of `fidelity_cifar.py`, from its cells."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributions import Categorical

from net2gp import metrics
from run import made_by

SIZES = (1, 5, 10, 20, 50)
Row = dict[str, Any]


def report(
    options: argparse.Namespace,
    methods: Sequence[str],
    truth: Tensor,
    labels: Tensor,
    console: Console,
) -> int:
    """Score everything in the folder of cells, print the table and write it; 1 if a claim does not hold."""
    rows = list(scored(options.cells, truth, labels))
    rows.append({"method": "HMC (the reference)", **scores(truth, truth, labels)})
    names = ["agreement", "total variation", "accuracy", "NLL", "ECE", "epochs", "seconds"]
    table = Table(title="CIFAR-10, ResNet-20 with filter response normalization")
    for name in ["method", *names]:
        table.add_column(name, justify="left" if name == "method" else "right")
    body = [[row["method"], *(shown(name, row.get(name)) for name in names)] for row in rows]
    for line in body:
        table.add_row(*line)
    console.print(table)
    machine = {
        "made_by": made_by(),
        "devices": sorted({r["device"] for r in rows if "device" in r}),
    }
    options.output.mkdir(parents=True, exist_ok=True)
    stem = options.output / ("fidelity_cifar_quick" if options.quick else "fidelity_cifar")
    stem.with_suffix(".json").write_text(json.dumps({"machine": machine, "rows": rows}) + "\n")
    lines = ["# Fidelity to Hamiltonian Monte Carlo on CIFAR-10", "", machine["made_by"]]
    lines += [f"Networks were trained on: {', '.join(machine['devices'])}.", "", EXPLANATION, ""]
    lines += ["| method | " + " | ".join(names) + " |", "|---" + "|---:" * len(names) + "|"]
    lines += ["| " + " | ".join(line) + " |" for line in body]
    there = {row.get("series") for row in rows}
    missing = [method for method in methods if method.replace(" ", "-") not in there]
    lines += ["", f"Not run yet: {', '.join(missing)}."] if missing else []
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n")
    draw(rows, stem.with_suffix(".png"))
    held = claims(rows, methods, quick=options.quick)
    for claim, holds in held.items():
        console.print(f"{'holds' if holds else 'DOES NOT HOLD'}: {claim}", highlight=False)
    return 0 if all(held.values()) else 1


def claims(rows: Sequence[Row], methods: Sequence[str], *, quick: bool) -> dict[str, bool]:
    """What the full run must show; a quick one only that every method gives probabilities."""
    ours = [row for row in rows if "series" in row]
    there = {row["series"] for row in ours}
    held = {
        "every method gave a result": {method.replace(" ", "-") for method in methods} <= there,
        "all scores are finite": all(np.isfinite(row["NLL"]) for row in ours),
    }
    if quick:
        return held
    wanted = f"agreement of at least {PUBLISHED['agreement']} and total variation of at most"
    close = [
        row
        for row in ours
        if row["epochs"] <= BUDGET
        and row["agreement"] >= PUBLISHED["agreement"]
        and row["total variation"] <= PUBLISHED["total variation"]
    ]
    held[f"{wanted} {PUBLISHED['total variation']} within {BUDGET} epochs"] = bool(close)
    single, ensemble = (
        next(r for r in ours if r["series"] == "sgd" and r["count"] == c) for c in (1, 10)
    )
    better = ensemble["agreement"] > single["agreement"]
    better &= ensemble["total variation"] < single["total variation"]
    held["ten networks are closer to HMC than one, in both"] = better
    return held


BUDGET = 250
"""Epochs of all networks together: a hundredth of those behind the published figures."""

PUBLISHED = {"agreement": 0.91, "total variation": 0.12}
"""Ensembles of 50 networks in Izmailov et al. (2021), 25,000 epochs."""


def draw(rows: Sequence[Row], path: Path) -> None:
    """Agreement and total variation over the epochs of all networks together."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    for axes, key in zip(figure.subplots(1, 2), PUBLISHED, strict=True):
        for name in dict.fromkeys(row["series"] for row in rows if "series" in row):
            line = [(r["epochs"], r[key]) for r in rows if r.get("series") == name]
            axes.plot(*zip(*line, strict=True), "o-", markersize=4, label=name)
        axes.plot(25_000, PUBLISHED[key], "k*", markersize=10, label="published ensemble of 50")
        axes.axhline(PUBLISHED[key], color="k", linewidth=0.5)
        axes.set(xscale="log", xlabel="epochs, all networks", ylabel=f"{key} with HMC")
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=130)


EXPLANATION = """\
Agreement: the share of test images with the same most probable class as under HMC. Total variation: half the
L1 distance to HMC's probabilities, averaged. Epochs: passes over the training images for all networks of the
row together, with those of the networks that a chain starts from. Seconds: of the method itself, on the
device above, when the networks of a group run together. For comparison, Izmailov et al. (2021) report for
ensembles of 50 networks, 25,000 epochs, an agreement of about .91 and a total variation of about .12."""


def shown(name: str, value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if name in ("epochs", "seconds") else f"{value:.4f}"


def scores(probs: Tensor, truth: Tensor, labels: Tensor) -> Row:
    """How close probabilities come to the reference and to the labels."""
    probs, truth = (p.double() / p.double().sum(-1, keepdim=True) for p in (probs, truth))
    return {
        "agreement": float(metrics.agreement(probs, truth)),
        "total variation": float(metrics.total_variation(probs, truth)),
        "accuracy": float(metrics.accuracy(probs, labels)),
        "NLL": float(metrics.nll(Categorical(probs=probs.clamp(min=1e-12)), labels)),
        "ECE": float(metrics.expected_calibration_error(probs, labels)),
    }


TITLES = {"probs": "", "laplace": ", each with a Laplace posterior of its last layer"}
TITLES["swag"] = ", each with a SWAG posterior (multi-SWAG)"


def scored(folder: Path, truth: Tensor, labels: Tensor) -> Iterator[Row]:
    """A row for each method, prediction and number of networks."""
    names = sorted({path.name.rsplit("_", 2)[0] for path in Path(folder).glob("*_done")})
    for name in names:
        facts = [json.loads(path.read_text()) for path in paths(folder, name, "done")]
        files = [np.load(path) for path in paths(folder, name, "probs.npz")]
        whole = sum(f["seconds"] for f in facts) / sum(f["count"] for f in facts)
        for key in files[0].files:
            # only SWAG needs the epochs in which it collects
            each = facts[0]["all_epochs" if key == "swag" else "epochs"]
            seconds = whole * each / facts[0]["all_epochs"]
            probs = torch.cat([torch.from_numpy(file[key]).float() for file in files])
            for size in [s for s in SIZES if s < len(probs)] + [len(probs)]:
                row = {
                    "method": f"{name}, {size} network{'s' * (size > 1)}{TITLES[key]}",
                    "count": size,
                }
                row["series"] = name + ("" if key == "probs" else f" + {key}")
                # a single network is averaged over those that there are
                chosen = [probs[i : i + 1] for i in range(5)] if size == 1 else [probs[:size]]
                found = [scores(part.mean(0), truth, labels) for part in chosen if len(part)]
                mean = {k: sum(f[k] for f in found) / len(found) for k in found[0]}
                row |= mean | {"epochs": each * size, "seconds": seconds * size}
                yield row | {"device": facts[0]["device"], "how": facts[0]["how"]}


def paths(folder: Path, name: str, what: str) -> list[Path]:
    """The files of all groups of a method, in order."""
    found = Path(folder).glob(f"{name}_*_{what}")
    return sorted(found, key=lambda path: int(path.name.rsplit("_", 2)[1]))
