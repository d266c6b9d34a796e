"""Networks as they come from the package index: what one would type, and what comes.

    python benchmarks/real_networks.py [--only ANI-1x BERT] [--python .../bin/python]

For each network of `real_network_snippets.py`: the tangent kernel beside brute force, `laplace` with its
default and four structures, `adapt`, and a posterior saved and loaded, with a time limit each. The verdicts:

- right: compared with plain backward passes, one for each output (`worker_real_networks.py` says how);
- within bounds: variances of `Kron` above zero and at most the prior's, class probabilities of `adapt`;
- not compared: an answer with more outputs than a plain comparison can hold;
- refused: an error of net2gp, whose message is shown; a refusal that is right is stated beforehand;
- raw: any other error; wrong: an answer that is not that of the comparison; no answer: out of time.

The exit status is 0 if nothing is raw, wrong or without an answer, and nothing refused that is not stated.
Writes `results/real_networks.json` and, from all that is there, `docs/real_networks.md`. The networks'
environment is made first (`peers.py`), which takes some minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peers import PEERS, ROOT, ensure
from real_network_snippets import ATTEMPTS, LIMIT, NETWORKS, Network

WORKER = Path(__file__).with_name("worker_real_networks.py")
PAGE = ROOT / "docs" / "real_networks.md"
RESULTS = Path(__file__).parent / "results" / "real_networks.json"
GOOD = ("right", "within bounds", "not compared")
Outcome = dict[str, Any]


def outcomes(python: Path, network: Network) -> Iterator[tuple[str, Outcome]]:
    """Each attempt, and what came of it."""
    paths = os.pathsep.join(str(path) for path in (ROOT / "src", WORKER.parent))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as said:
        command = [str(python), str(WORKER), network.name, folder]
        kind = {"stdout": subprocess.PIPE, "stderr": said, "text": True}
        with subprocess.Popen(command, env=environment, **kind) as process:
            for line in process.stdout or ():
                if line.startswith("RESULT "):
                    row = json.loads(line.removeprefix("RESULT "))
                    yield row.pop("attempt"), row
        if process.returncode:
            said.seek(0)
            reason = (said.read().strip().splitlines() or ["no output"])[-1]
            yield "all that follows", {"verdict": "raw", "message": reason}


def committed() -> str:
    """The revision of the library that is run, and whether it was changed since."""
    git = ["git", "-C", str(ROOT)]
    short = [*git, "rev-parse", "--short", "HEAD"]
    name = subprocess.run(short, capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "src"]).returncode
    return f"{name}, changed" if changed else name


def is_right(network: Network, attempt: str, outcome: Outcome) -> bool:
    """Whether an outcome is as it must be."""
    if outcome["verdict"] == "refused":
        part = network.refused.get(attempt)
        return part is not None and part in outcome["message"]
    return outcome["verdict"] in GOOD


def cell(network: Network, attempt: str, outcome: Outcome | None) -> str:
    """An entry of the table."""
    if outcome is None:
        return ""
    words = outcome["verdict"]
    if words == "refused":
        words = "refused, rightly" if is_right(network, attempt, outcome) else "**refused**"
    elif words in ("raw", "wrong", "no answer"):
        words = f"**{words}**"
    if outcome.get("error"):
        words += f" ({outcome['error']:.0e})"
    return f"{words}, {outcome['seconds']:.1f} s" if "seconds" in outcome else words


def table(found: dict[str, dict[str, Outcome]]) -> list[str]:
    """A row for each network, a column for each attempt."""
    lines = [
        "| network | parameters | " + " | ".join(ATTEMPTS) + " |",
        "|---|---:|" + "---|" * len(ATTEMPTS),
    ]
    for network in NETWORKS:
        if rows := found.get(network.name):
            size = rows.get("network", {}).get("num_params", 0)
            cells = [cell(network, attempt, rows.get(attempt)) for attempt in ATTEMPTS]
            lines.append(f"| {network.name} | {size:,} | " + " | ".join(cells) + " |")
    return lines


def typed(network: Network, rows: dict[str, Outcome]) -> list[str]:
    """What was typed for one network, and what was said."""
    lines = [
        f"## {network.name}",
        "",
        f"{network.package}. Run at revision {rows.get('network', {}).get('revision', 'unknown')}.",
        "",
        "```text",
        network.setup,
        "```",
        "",
    ]
    if network.absent:
        names = ", ".join(f"`{name}`" for name in network.absent)
        lines += [
            f"The package imports {names}, which its network does not need: empty modules stand in.",
            "",
        ]
    default = rows.get("laplace", {})
    if default.get("verdict") in GOOD:
        lines += [f"`laplace` by default took `{default['message']}()`.", ""]
    for attempt, code in network.extra.items():
        lines += ["```text", code, "```", "", f"{cell(network, attempt, rows.get(attempt))}.", ""]
    for attempt, row in rows.items():
        if row.get("verdict") in ("refused", "raw", "wrong"):
            lines += [f"- {attempt}: {row['verdict']}. {row.get('message', '')}".rstrip()]
        if row.get("warnings"):
            lines += [f"- {attempt}: warned of {', '.join(row['warnings'])}."]
    return [*lines, ""]


def page(found: dict[str, dict[str, Outcome]]) -> str:
    """The whole page."""
    attempts = [f"{name}:\n\n```text\n{code}\n```\n" for name, code in ATTEMPTS.items()]
    return (
        "\n".join(
            [
                "# Networks from the package index",
                "",
                HEAD.format(machine=platform.machine(), limit=LIMIT),
                "",
                *table(found),
                "",
                "What was typed for each column, after what is below for each network:",
                "",
                *attempts,
                *(
                    line
                    for network in NETWORKS
                    if network.name in found
                    for line in typed(network, found[network.name])
                ),
            ]
        ).rstrip()
        + "\n"
    )


HEAD = """Networks as they come from PyPI, with the weights that their packages bring or random ones of small
configurations: what one would type, and what came. Made by `python benchmarks/real_networks.py`, one thread
({machine}), which asserts that nothing is wrong and that no error is raw.

- right: equal to what plain backward passes give, one for each output (in brackets the relative error);
- within bounds: there is nothing plain to compare with; variances of `Kron` are above zero and at most the
  prior's, class probabilities of `adapt` are between zero and one and sum to one;
- not compared: an answer with more outputs than a plain comparison can hold;
- refused: an error of net2gp, shown below; refused, rightly: one that was stated beforehand;
- no answer: not within {limit} s of a core.

Seconds are those of one core for the whole attempt, tuning and prediction included."""


def main(arguments: list[str] | None = None) -> int:
    """Run all, print the table, write the page; 0 if all is as it must be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [network.name for network in NETWORKS]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--python", type=Path, help="an interpreter that has the packages")
    options = parser.parse_args(arguments)
    python = options.python or ensure(PEERS["real-networks"])
    revision = committed()
    faults = []
    for network in NETWORKS:
        if network.name not in options.only:
            continue
        rows: dict[str, Outcome] = {}
        for attempt, row in outcomes(python, network):
            rows[attempt] = row
            if attempt == "network":
                row["revision"] = revision
                continue
            good = is_right(network, attempt, row)
            message = row.get("message", "")[:300] if not good else ""
            print(
                f"{network.name:<16}{attempt:<15}{cell(network, attempt, row)}  {message}",
                flush=True,
            )
            faults += [] if good else [f"{network.name}, {attempt}: {row['verdict']}"]
        found = (json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}) | {
            network.name: rows
        }
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(page(found), encoding="utf-8")
    print(f"{len(faults)} of what came is not as it must be" + "".join(f"\n  {f}" for f in faults))
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
