"""Language models with adapters, as transformers and peft make them: what is right, and what it costs.

    python benchmarks/adapters.py            # writes results/adapters.md
    python benchmarks/adapters.py --quick    # one model, no peer, writes nothing

BERT and GPT-2 from small configurations with random weights, adapters of rank 4 and the head of peft's
`SEQ_CLS`, attention masks, sequences of several lengths. Nothing is said beside the model: logits are found
by name, and frozen parameters are left out.

Correctness: the tangent kernel of the adapters (`only="*lora_*"`), the variances of logits under `laplace`
with `Full()` and all that is trained, and the kernel of the same sequences with more padding, beside plain
backward passes of the same model in float64, one for each output. In float64 they must agree to 1e-8. In
bfloat16 the relative error (Frobenius) must be at most three times what rounding explains: the change by
random relative errors of 2⁻⁸ at every operation, forward and backward (`tests/rounding.py`). The program also
asserts that no frozen parameter is held a second time.

Cost: a fit and the predictive variances of 32 sequences, beside laplace-torch in the same environment, each
in a process of its own on one core. The exact diagonals of both must agree to 1e-3.

The exit status is 1 if an assertion fails. The environment is made first (`peers.py`), which takes minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import torch

from peers import PEERS, ROOT, ensure
from real_networks import committed

HERE = Path(__file__).resolve().parent
WORKER = HERE / "worker_adapters.py"
PAGE = HERE / "results" / "adapters.md"
OURS, THEIRS = "net2gp", "laplace-torch"
LIMIT = 900
"""Seconds for a process."""

Row = dict[str, Any]


def answer(python: Path, job: Row) -> Row:
    """What the worker says about a job, or why it failed."""
    paths = os.pathsep.join(str(path) for path in (ROOT / "src", HERE, ROOT / "tests"))
    # products of bfloat16 for AMX crash in some virtual machines
    settings = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    settings |= {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    command = [str(python), str(WORKER), json.dumps(job)]
    kind = {"capture_output": True, "text": True, "timeout": LIMIT}
    try:
        done = subprocess.run(command, env=os.environ | settings, **kind)
    except subprocess.TimeoutExpired:
        return {"failed": f"no answer within {LIMIT} s"}
    said = done.stdout.strip().splitlines()
    if done.returncode or not said:
        return {"failed": (done.stderr.strip().splitlines() or ["no output"])[-1][:200]}
    return json.loads(said[-1])


def checks(quick: bool) -> list[Row]:
    """The jobs that compare with brute force."""
    kinds = [("float64", False, 1e-8), ("bfloat16", False, None), ("bfloat16", True, None)]
    jobs = [
        {"task": "check", "model": model, "kind": kind, "wide": wide, "tolerance": tolerance}
        for model in ("BERT", "GPT-2")
        for kind, wide, tolerance in kinds
    ]
    return [job | {"size": "small"} for job in (jobs[1:2] if quick else jobs)]


def costs(quick: bool) -> list[Row]:
    """The jobs that measure."""
    jobs = [
        {"task": "cost", "model": "BERT", "kind": kind, "library": library, "structure": structure}
        for kind in ("float32", "bfloat16")
        for structure in ("kron", "diag")
        for library in (OURS, THEIRS)
    ]
    return [] if quick else [job | {"size": "medium"} for job in jobs]


def faults_of(row: Row) -> list[str]:
    """What of one comparison is not as it must be."""
    if "failed" in row:
        return [row["failed"]]
    wrong = [
        f"{name}: error {row[name]['error']:.1e}, at most {row[name]['allowed']:.1e} allowed"
        for name in ("kernel", "variances", "padding")
        if not row[name]["error"] <= row[name]["allowed"]
    ]
    wrong += [f"{row['copied']} bytes of frozen parameters were copied"] if row["copied"] else []
    return wrong + ([] if row["structured"] else ["adapters went without a layer rule"])


def disagreements(jobs: list[Row], rows: list[Row]) -> list[str]:
    """Where diagonals of the two libraries differ in full precision, or ours failed."""
    found = [
        f"{job['structure']}, {job['kind']}: {row['failed']}"
        for job, row in zip(jobs, rows, strict=True)
        if "failed" in row and job["library"] == OURS
    ]
    pair = [
        torch.tensor(row["variances"])
        for job, row in zip(jobs, rows, strict=True)
        if (job["kind"], job["structure"]) == ("float32", "diag") and "failed" not in row
    ]
    if len(pair) == 2 and not torch.allclose(*pair, rtol=1e-3):
        found.append("the diagonals of both libraries give other variances")
    return found


def name_of(job: Row) -> str:
    kind = "bfloat16, adapters float32" if job.get("wide") else job["kind"]
    return f"{job['model']}, {kind}"


def check_line(job: Row, row: Row) -> str:
    if "failed" in row:
        return f"| {name_of(job)} | {row['failed']} |"
    cells = [
        f"{row[name]['error']:.1e} (≤ {row[name]['allowed']:.1e})"
        for name in ("kernel", "variances", "padding")
    ]
    return f"| {name_of(job)} | {row['trained']:,} of {row['trained'] + row['frozen']:,} | " + (
        " | ".join(cells) + " |"
    )


def cost_line(job: Row, row: Row) -> str:
    start = f"| {job['kind']} | {job['structure']} | {job['library']} |"
    if "failed" in row:
        return f"{start} fails: {row['failed']} | | | |"
    return (
        f"{start} {row['fit seconds']:.2f} | {row['predict seconds']:.2f} | "
        f"{row['fit memory']:.0f} | {row['predict memory']:.0f} |"
    )


HEAD = """# Language models with adapters

Made by `python benchmarks/adapters.py` at revision {revision}, one thread. BERT and GPT-2 of transformers
from configurations, random weights, LoRA of rank 4 and the head by peft. The head of the program says how
each number is found.

## Beside brute force in float64

Two layers of 32 units, eight sequences. Relative errors, and in brackets what is allowed: 1e-8 in float64, in
bfloat16 three times what rounding of every operation explains. No frozen parameter is held a second time.

| model | trained parameters | kernel of adapters | variances of Laplace | kernel, more padding |
|---|---:|---:|---:|---:|
"""

COSTS = """
## Beside laplace-torch

BERT with four layers of 128 units, adapters and head, 64 sequences of 32 tokens, prior variance .1. CPU
seconds of a fit and of the predictive variances of 32 sequences (the second of two runs), and megabytes above
the model and its data (the first run, after one with four sequences). laplace-torch gets
its data in batches of 32; where it has no output, its process ended without a message.

| dtype | structure | | fit, s | predict, s | fit, MB | predict, MB |
|---|---|---|---:|---:|---:|---:|
"""


def main(arguments: list[str] | None = None) -> int:
    """Run all jobs, print and write what came; 0 if all is as it must be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one comparison, nothing written")
    parser.add_argument("--python", type=Path, help="an interpreter that has the packages")
    options = parser.parse_args(arguments)
    python = options.python or ensure(PEERS["adapters"])
    faults, page = [], HEAD.format(revision=committed())
    for job in checks(options.quick):
        row = answer(python, job)
        faults += [f"{name_of(job)}: {fault}" for fault in faults_of(row)]
        page += check_line(job, row) + "\n"
        print(check_line(job, row), flush=True)
    jobs, rows = costs(options.quick), []
    page += COSTS
    for job in jobs:
        rows.append(answer(python, job))
        page += cost_line(job, rows[-1]) + "\n"
        print(cost_line(job, rows[-1]), flush=True)
    faults += disagreements(jobs, rows)
    print(f"{len(faults)} faults" + "".join(f"\n  {fault}" for fault in faults))
    if not options.quick:
        PAGE.write_text(page, encoding="utf-8")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
