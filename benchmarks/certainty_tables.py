"""The tables and the claims of `certainty_cifar.py`, from its cells."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from net2gp import metrics

sys.path.append(str(Path(__file__).resolve().parent.parent / "papers"))
import claims

Cell = dict[str, Any]
NETWORK, DEFAULT, HELD_OUT = "network", "laplace", "laplace, held out"
LOWER = ("NLL", "ECE", "Brier")
SAMPLES = 200
"""Bootstrap samples of the difference of two calibration errors."""

CLASSES = 20
"""Other classes of the points whose calibration is measured, which share what the first one leaves."""

NOT_SINGLE = ("mixture",)


def report(
    cells: dict[str, Cell], left_out: list[str], stem: Path, made_by: str, *, quick: bool
) -> int:
    """Write and print the tables; 1 if a claim does not hold."""
    if NETWORK not in cells:
        print("the network itself was not run: nothing to compare with")
        return 1
    text = "\n\n".join([test_table(cells), corruption_table(cells), cost_table(cells)])
    print(text)
    first = cells[NETWORK]
    facts = (
        f"{made_by}\n\nThe network's images: {first['train_images']} for training, "
        f"{len(first['losses'])} for tests. Run on: "
        f"{', '.join(sorted({cell['device'] for cell in cells.values()}))}."
    )
    missing = f"\n\nNot run: {', '.join(left_out)}." if left_out else ""
    head = f"# Certainty of a ResNet-20\n\n{facts}\n\n{EXPLANATION}"
    stem.with_suffix(".md").write_text(f"{head}\n\n{text}{missing}\n", encoding="utf-8")
    kept = {
        name: {key: value for key, value in cell.items() if key not in ("losses", "hits")}
        for name, cell in cells.items()
    }
    stem.with_suffix(".json").write_text(json.dumps({"made_by": made_by, "cells": kept}) + "\n")
    for goal, found in goals(cells):
        print(f"goal: {goal}: {found}")
    return 0 if claims.judge(stated(cells, quick=quick)) else 1


def strangers(cells: dict[str, Cell]) -> list[str]:
    """The names of the images of other kinds."""
    return list(cells[NETWORK]["others"])


def mean(values: list[float]) -> float:
    """The average."""
    return sum(values) / len(values)


def average_auroc(cell: Cell) -> float:
    """Over all strangers."""
    return mean([found["AUROC"] for found in cell["others"].values()])


def corrupted(cell: Cell, score: str) -> float:
    """The average of a score over all corruptions and strengths."""
    return mean([found[score] for each in cell["corrupted"].values() for found in each])


def lines(names: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    head = ["| " + " | ".join(names) + " |", "|---" + "|---:" * (len(names) - 1) + "|"]
    return "\n".join(head + ["| " + " | ".join(row) + " |" for row in rows])


def test_table(cells: dict[str, Cell]) -> str:
    """Test images, and AUROC and FPR95 for each kind of strangers."""
    kinds = strangers(cells)
    names = ["method", "accuracy", *LOWER]
    names += [f"{score}, {kind}" for kind in kinds for score in ("AUROC", "FPR95")]
    rows = []
    for name, cell in cells.items():
        own = cell["corrupted"] or name == NETWORK  # others have the network's probabilities
        row = [f"{cell['test'][score]:.4f}" if own else "" for score in ("accuracy", *LOWER)]
        row += [
            f"{cell['others'][kind][score]:.4f}" for kind in kinds for score in ("AUROC", "FPR95")
        ]
        rows.append([name, *row, f"{average_auroc(cell):.4f}"])
    return "## Test images and strangers\n\n" + lines([*names, "mean AUROC"], rows)


def corruption_table(cells: dict[str, Cell]) -> str:
    """Averages over all corruptions and strengths, and the NLL for each kind."""
    shown = {name: cell for name, cell in cells.items() if cell["corrupted"]}
    kinds = list(next(iter(shown.values()))["corrupted"])
    rows = [
        [name]
        + [f"{corrupted(cell, score):.4f}" for score in ("accuracy", *LOWER)]
        + [f"{mean([found['NLL'] for found in cell['corrupted'][kind]]):.4f}" for kind in kinds]
        for name, cell in shown.items()
    ]
    names = ["method", "accuracy", *LOWER, *(f"NLL, {kind}" for kind in kinds)]
    return "## Corrupted test images\n\n" + lines(names, rows)


def cost_table(cells: dict[str, Cell]) -> str:
    """What each method takes."""
    keys = ("fit_s", "passes", "forwards", "predict_times_forward")
    rows = [[name, *(f"{cell[key]:.2f}" for key in keys)] for name, cell in cells.items()]
    names = ["method", "s to fit", "passes over the training images"]
    names += ["forward passes of an image to predict", "time to predict / of a forward pass"]
    return "## Cost\n\n" + lines(names, rows)


def stated(cells: dict[str, Cell], *, quick: bool) -> Iterator[claims.Claim]:
    """What the head of the program claims."""
    bare = cells[NETWORK]
    if DEFAULT in cells:
        yield from no_worse_than_network(cells[DEFAULT], bare)
    if HELD_OUT in cells and "temperature" in cells:
        ours, rival = cells[HELD_OUT], cells["temperature"]
        margin = torch.tensor(rival["losses"]) - torch.tensor(ours["losses"])
        yield claims.compared(
            f"{HELD_OUT}, NLL, beside temperature", margin, "no worse", quick=quick
        )
        yield calibrated(f"{HELD_OUT}, ECE, beside temperature", ours, rival)
    if "novelty" in cells:
        found = {
            name: average_auroc(cell) for name, cell in cells.items() if name not in NOT_SINGLE
        }
        rival = max((name for name in found if name != "novelty"), key=found.__getitem__)
        gap = found[rival] - found["novelty"]
        yield claims.at_most(f"novelty, mean AUROC, below the best other ({rival})", gap, 0.0)


def no_worse_than_network(ours: Cell, bare: Cell) -> Iterator[claims.Claim]:
    """One claim for each column."""
    change = abs(ours["test"]["accuracy"] - bare["test"]["accuracy"])
    yield claims.at_most(f"{DEFAULT}, change of accuracy", change, 0.0005)
    for score in LOWER:
        gap = ours["test"][score] - bare["test"][score]
        yield claims.at_most(f"{DEFAULT}, {score}, above the network's", gap, 0.0)
        gap = corrupted(ours, score) - corrupted(bare, score)
        yield claims.at_most(f"{DEFAULT}, {score}, corrupted, above the network's", gap, 0.0)
    for kind, found in bare["others"].items():
        mine = ours["others"][kind]
        gap = found["AUROC"] - mine["AUROC"]
        yield claims.at_most(f"{DEFAULT}, AUROC, {kind}, below the network's", gap, 0.0)
        gap = mine["FPR95"] - found["FPR95"]
        yield claims.at_most(f"{DEFAULT}, FPR95, {kind}, above the network's", gap, 0.0)


def calibrated(name: str, ours: Cell, rival: Cell) -> claims.Claim:
    """That an ECE is not larger than another by more than chance, by bootstrap samples of the test images."""
    one, other = (torch.tensor(cell["hits"], dtype=torch.float64) for cell in (ours, rival))
    generator = torch.Generator().manual_seed(0)
    gaps = []
    for _ in range(SAMPLES):
        chosen = torch.randint(one.shape[1], (one.shape[1],), generator=generator)
        gaps.append(error(other[:, chosen]) - error(one[:, chosen]))
    found, spread = error(other) - error(one), float(torch.stack(gaps).std())
    text = f"{float(found):+.3g} ± {2 * spread:.2g}"
    return claims.Claim(f"{name}: no worse", text, float(found) >= -2 * spread)


def error(hits: Tensor) -> Tensor:
    """The ECE of confidences and of whether they were right, (2, N)."""
    confidence, right = hits
    # as many classes as any confidence needs: which of the others is right does not matter
    rest = ((1 - confidence) / CLASSES)[:, None].expand(-1, CLASSES)
    probs = torch.cat([confidence[:, None], rest], 1)
    return metrics.expected_calibration_error(probs, 1 - right.long())


def goals(cells: dict[str, Cell]) -> Iterator[tuple[str, str]]:
    """What is aimed at, and what there is."""
    if HELD_OUT in cells and "mixture" in cells:
        bare, ours, most = (cells[name]["test"]["NLL"] for name in (NETWORK, HELD_OUT, "mixture"))
        way = (bare - ours) / (bare - most)
        yield "90 % of the way from the network to the mixture in NLL", f"{100 * way:.0f} %"
    if DEFAULT in cells:
        cost = cells[DEFAULT]
        yield "one pass over the training images", f"{cost['passes']:.2f}"
        found = f"{cost['predict_times_forward']:.2f}, {cost['forwards']:.2f} forward passes"
        yield "twice the time of a forward pass to predict", found


EXPLANATION = """\
`laplace` and "last layer" are tuned on the training images; "held out" means that 1000 further images chose
what is open, as they chose the temperature. Energy, Mahalanobis distances, nearest neighbors and novelty are
scores of strangeness of the network; everything else is judged by the entropy of its prediction. FPR95 is the
share of strangers that pass where 95 % of the test images do. Corrupted images are averages over five kinds
and five strengths. A pass over the training images counts images that enter the network; backward passes are
in the time only, and laplace-torch, which copies the network, is not counted. The mixture averages networks
of the same kind that this program trained, so that its members are other networks than the one that all other
rows are about."""
