"""Speed of the Bayesian room beside other libraries, in one run.

    python benchmarks/bayes_speed.py [--quick] [--steps 200]

CPU seconds of a step, each library in a process and an environment of its own (`peers.py`), on one core: an
ensemble of ten networks with one hidden layer of 50 on 1000 points (TorchUncertainty, and a plain loop);
mean-field variational inference of a network with two hidden layers of 256, batches of 128 (bayesian-torch);
SGHMC with four chains and batches of 100 (posteriors). `nuts.py` has NUTS beside NumPyro's.
Writes `results/bayes_speed.json` and `results/bayes_speed.md`; the exit status says whether net2gp is ahead
in each task.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from peers import PEERS, NotInstalled, ensure
from run import HERE, RESULTS, environment, made_by, processor

HOMES = {"TorchUncertainty": "torch-uncertainty", "bayesian-torch": "bayesian-torch"}
HOMES |= {"posteriors": "posteriors", "posteriors under vmap": "posteriors"}
TASKS = {
    "ensemble of 10, batches of 100": ("net2gp", "TorchUncertainty", "plain torch"),
    "ensemble of 10, full batches": ("net2gp", "TorchUncertainty", "plain torch"),
    "mean field, weights drawn once": ("net2gp", "bayesian-torch"),
    "mean field, flipout": ("net2gp", "bayesian-torch"),
    "SGHMC, 4 chains": ("net2gp", "posteriors", "posteriors under vmap"),
}
"""The libraries that do each task, ours first."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="20 steps, writes nothing")
    parser.add_argument("--steps", type=int, help="steps of the long run (default 200)")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for a library")
    options = parser.parse_args()
    made_by()
    console, steps = Console(width=110), options.steps or (20 if options.quick else 200)
    rows = []
    for task in options.tasks:
        for library in TASKS[task]:
            row = {"task": task, "library": library, **measured(library, task, steps, options)}
            console.print(json.dumps(row), style="dim", highlight=False)
            rows.append(row)
    lines, behind = tables(rows, console)
    if not options.quick:
        machine = {"processor": processor(), "made_by": made_by(), "steps": steps}
        head = ["# Speed of the Bayesian room", "", f"{machine['processor']}, one core."]
        head += [machine["made_by"], "", " ".join((__doc__ or "").split("\n\n")[2].split())]
        (RESULTS / "bayes_speed.md").write_text("\n".join([*head, "", *lines]) + "\n")
        content = {"machine": machine, "rows": rows}
        (RESULTS / "bayes_speed.json").write_text(json.dumps(content) + "\n")
    return 1 if behind else 0


def measured(library: str, task: str, steps: int, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a step, or why there are none."""
    try:
        python = ensure(PEERS[HOMES[library]]) if library in HOMES else Path(sys.executable)
    except NotInstalled as reason:
        return {"failed": str(reason)}
    command = [str(python), str(HERE / "worker_bayes_speed.py"), library, task, str(steps)]
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent / "src")}
    try:
        done = subprocess.run(
            command,
            env=environment() | own,
            capture_output=True,
            text=True,
            timeout=options.limit,
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"more than {options.limit:.0f} s"}
    if done.returncode:
        return {"failed": (done.stderr.splitlines() or ["no message"])[-1][:200]}
    return json.loads(done.stdout.splitlines()[-1]) | {"failed": ""}


def tables(rows: list[dict[str, Any]], console: Console) -> tuple[list[str], list[str]]:
    """The table as Markdown, and the tasks in which another library is faster."""
    names = ["task", "library", "CPU ms of a step", "beside net2gp"]
    table = Table()
    for name in names:
        table.add_column(name, justify="left" if name in names[:2] else "right")
    lines, behind = ["| " + " | ".join(names) + " |", "|---|---|---:|---:|"], []
    for row in rows:
        ours = next(r for r in rows if r["task"] == row["task"])
        cells = [row["task"], row["library"], row["failed"], ""]
        if not row["failed"]:
            cells[2] = f"{1e3 * row['step_s']:.2f}"
            if not ours["failed"]:
                ratio = row["step_s"] / ours["step_s"]
                cells[3] = f"× {ratio:.2f}"
                behind += [f"{row['task']} ({row['library']})"] if ratio < 1 else []
        table.add_row(*cells)
        lines.append("| " + " | ".join(cells) + " |")
    console.print(table)
    verdict = "net2gp is ahead in each task." if not behind else f"behind: {', '.join(behind)}"
    console.print(verdict, highlight=False)
    return [*lines, "", verdict], behind


if __name__ == "__main__":
    sys.exit(main())
