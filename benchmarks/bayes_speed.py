"""Speed of the Bayesian room beside other libraries, in one run.

    python benchmarks/bayes_speed.py [--quick] [--steps 200] [--rounds 3] [--tasks ...]

CPU seconds of a step, each library in a process and an environment of its own (`peers.py`), on one core: an
ensemble of ten networks with one hidden layer of 50 on 1000 points (TorchUncertainty, and a plain loop);
mean-field variational inference of a network with two hidden layers of 256, batches of 128 (bayesian-torch);
SGHMC with four chains and batches of 100 (posteriors). Libraries take turns for several rounds, and a figure
is the median over rounds of the best of three. NUTS is measured in effective samples per CPU second beside
NumPyro's (`nuts.py`, which also compares moments). NumPyro compiles in each of its runs; the ratio beside its
second run counts that, the ratio "steady" leaves it out.

Claims: net2gp is ahead of each library in each task, for NUTS with NumPyro's compilation counted. The exit
status says whether they hold. Writes `results/bayes_speed.json` and `results/bayes_speed.md`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
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

NUTS = "NUTS"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="20 steps, 1 round, writes nothing")
    parser.add_argument("--steps", type=int, help="steps of the long run (default 200)")
    parser.add_argument("--rounds", type=int, help="turns of each library (default 3)")
    parser.add_argument("--tasks", nargs="+", choices=[*TASKS, NUTS], default=[*TASKS, NUTS])
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for a process")
    options = parser.parse_args()
    console = Console(width=110)
    steps = options.steps or (20 if options.quick else 200)
    rounds = options.rounds or (1 if options.quick else 3)
    rows = [
        row
        for task in options.tasks
        if task != NUTS
        for row in in_turns(task, steps, rounds, options.limit)
    ]
    chains = samplers(options.quick, options.limit) if NUTS in options.tasks else []
    lines, behind = tables(rows, chains, console)
    if not options.quick and set(options.tasks) == {*TASKS, NUTS}:
        machine = {"processor": processor(), "made_by": made_by(), "steps": steps, "rounds": rounds}
        head = ["# Speed of the Bayesian room", "", f"{machine['processor']}, one core."]
        head += [str(machine["made_by"]), "", " ".join((__doc__ or "").split("\n\n")[2].split())]
        (RESULTS / "bayes_speed.md").write_text("\n".join([*head, "", *lines]) + "\n")
        content = {"machine": machine, "rows": rows, "chains": chains}
        (RESULTS / "bayes_speed.json").write_text(json.dumps(content) + "\n")
    return 1 if behind else 0


def in_turns(task: str, steps: int, rounds: int, limit: float) -> list[dict[str, Any]]:
    """Seconds of a step of each library, in rounds, so that other work on the machine disturbs all alike."""
    found: dict[str, list[dict[str, Any]]] = {library: [] for library in TASKS[task]}
    for _ in range(rounds):
        for library, known in found.items():
            known.append(measured(library, task, steps, limit))
    rows = []
    for library, known in found.items():
        failed = next((one["failed"] for one in known if one["failed"]), "")
        row = {"task": task, "library": library, "failed": failed}
        if not failed:
            row["all"] = [one["step_s"] for one in known]
            row["step_s"] = statistics.median(row["all"])
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def measured(library: str, task: str, steps: int, limit: float) -> dict[str, Any]:
    """Seconds of a step, or why there are none."""
    try:
        command = ["worker_bayes_speed.py", library, task, str(steps)]
        return json.loads(printed(HOMES.get(library), command, limit)[-1]) | {"failed": ""}
    except Failed as reason:
        return {"failed": str(reason)}


def samplers(quick: bool, limit: float) -> list[dict[str, Any]]:
    """The rows of `nuts.py`, or one that says why there are none."""
    try:
        found = printed("numpyro", ["nuts.py", "--json", *(["--quick"] if quick else [])], limit)
    except Failed as reason:
        return [{"failed": str(reason)}]
    return [json.loads(line) | {"failed": ""} for line in found]


class Failed(Exception):
    """A library that gave no figures, with the reason."""


def printed(home: str | None, command: list[str], limit: float) -> list[str]:
    """The lines that a program of this folder prints in the environment of a library."""
    try:
        python = sys.executable if home is None else str(ensure(PEERS[home]))
        own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent / "src")}
        done = subprocess.run(
            [python, str(HERE / command[0]), *command[1:]],
            env=environment() | own,
            capture_output=True,
            text=True,
            timeout=limit,
        )
    except NotInstalled as reason:
        raise Failed(str(reason)) from reason
    except subprocess.TimeoutExpired as reason:
        raise Failed(f"more than {limit:.0f} s") from reason
    if done.returncode:
        raise Failed((done.stderr.splitlines() or ["unlike moments"])[-1][:200])
    return done.stdout.splitlines()


def tables(
    rows: list[dict[str, Any]], chains: list[dict[str, Any]], console: Console
) -> tuple[list[str], list[str]]:
    """The tables as Markdown, and the tasks in which another library is faster or gave no figures."""
    lines, behind = list[str](), list[str]()
    body = []
    for row in rows:
        ours = next(r for r in rows if r["task"] == row["task"])
        name = f"{row['task']} ({row['library']})"
        if row["failed"] or ours["failed"]:
            body.append([row["task"], row["library"], row["failed"], "–"])
            behind.append(f"{name}: no figures")
            continue
        ratio = row["step_s"] / ours["step_s"]
        body.append([row["task"], row["library"], f"{1e3 * row['step_s']:.2f}", f"× {ratio:.2f}"])
        behind += [name] if ratio < 1 else []
    lines += shown(["task", "library", "CPU ms of a step", "beside net2gp"], body, console)
    body = []
    for row in chains:
        if row["failed"]:
            body.append([NUTS, "", row["failed"], *["–"] * 4])
            behind.append(f"{NUTS}: no figures")
            continue
        rates = [f"{rate:.0f}" for rate in row["rates"]]
        steady = "–" if row["steady"] is None else f"× {row['steady']:.2f}"
        costs = " / ".join(f"{cost:.1f}" for cost in row["gradient_us"])
        ratio = f"× {row['ratio']:.2f}"
        body.append([row["problem"], str(row["chains"]), *rates, ratio, steady, costs])
        behind += [f"{NUTS}, {row['problem']}, {row['chains']} chains"] if row["ratio"] < 1 else []
    names = ["NUTS on", "chains", "ESS per CPU s", "NumPyro's", "ahead by", "steady", "µs/gradient"]
    lines += ["", *shown(names, body, console)]
    verdict = "net2gp is ahead in each task." if not behind else f"behind: {', '.join(behind)}"
    console.print(verdict, highlight=False)
    return [*lines, "", verdict], behind


def shown(names: list[str], body: list[list[str]], console: Console) -> list[str]:
    """Print a table, and return it as Markdown."""
    table = Table()
    for index, name in enumerate(names):
        table.add_column(name, justify="left" if index < 2 else "right")
    for cells in body:
        table.add_row(*cells)
    console.print(table)
    rule = "|---|---|" + "---:|" * (len(names) - 2)
    return [f"| {' | '.join(names)} |", rule, *(f"| {' | '.join(cells)} |" for cells in body)]


if __name__ == "__main__":
    sys.exit(main())
