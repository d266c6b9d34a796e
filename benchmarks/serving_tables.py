"""The page of results of `serving.py`: claims, goals and tables."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from serving_load import CLIENTS, Load
from serving_problems import CASES

DIFFERENCE, LAST, KRON = 1e-5, 1.5, 5.0
BATCHES = (1, 32)
NETWORKS = ("MLP", "LeNet", "ResNet-20")

CLAIMS = f"""\
1. In a fresh environment, each program differs from its posterior by at most {DIFFERENCE:g} of the largest
   entry, in mean, variance and probabilities, for batches of 1, 7 and 256 points. Where the runtime saw other
   gates of ReLUs than torch, the posterior is that with these gates.
2. The server answers every request."""


@dataclass(frozen=True)
class Row:
    """One program.

    Args:
        network: The network.
        structure: The structure of the posterior.
        runtime: What runs the program.
        kilobytes: The size of the file.
        difference: The largest difference from the posterior, as a share of the largest entry.
        flipped: Points whose variances differ by more, over the batches.
        gated: The largest difference if these are compared with the posterior with the runtime's gates.
        rounding: What float32 leaves open by torch alone, if that was measured.
        times: Seconds of a call, for each of the batches.
        bare: The same of the network alone.
        revision: The commit that was measured.
        fresh: Whether the program ran in an environment of its own.
    """

    network: str
    structure: str
    runtime: str
    kilobytes: float
    difference: float
    flipped: int
    gated: float
    rounding: dict[str, float] | None
    times: list[float]
    bare: list[float]
    revision: str
    fresh: bool

    def ratio(self, place: int) -> float:
        """How many times the network alone."""
        return self.times[place] / self.bare[place]


def judged(found: list[Row], load: Load) -> list[tuple[str, bool]]:
    """The claims, each with whether it holds."""
    largest = max(row.gated for row in found)
    fresh = all(row.fresh for row in found)
    where = "in fresh environments" if fresh else "with net2gp hidden"
    text = f"1. {len(found)} programs {where}, largest difference {largest:.1e}"
    asked = load.answered + load.errors
    return [
        (text, largest <= DIFFERENCE),
        (f"2. {load.errors} errors in {asked} requests", load.errors == 0),
    ]


def goals(found: list[Row]) -> list[str]:
    """What was hoped for, with what was reached, for 32 points by torch and by onnxruntime."""
    lines = []
    for structure, most in (("LastLayer()", LAST), ("LastLayer(Kron())", LAST), ("Kron()", KRON)):
        for network in dict.fromkeys(row.network for row in found):
            ratios = [
                row.ratio(1)
                for row in found
                if (row.network, row.structure) == (network, structure)
            ]
            if ratios:
                reached = "reached" if max(ratios) <= most else "missed"
                reached = "reached by one runtime" if min(ratios) <= most < max(ratios) else reached
                span = " and ".join(f"{ratio:.1f}" for ratio in ratios)
                lines.append(
                    f"- `{structure}` of {network}, at most {most:g} ×: {span} ×, {reached}."
                )
    return lines


HEAD = (
    "| network | structure | runtime | kB | difference | points | with gates | 1 point, ms | × network "
    "| 32 points, ms | × network |\n|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|"
)
ROUNDINGS = (
    "| network | structure | points | float64 differs | largest | other convolutions differ | largest |\n"
    "|---|---|---:|---:|---:|---:|---:|"
)


def line(row: Row) -> str:
    """A line of the table."""
    times = " | ".join(
        f"{1e3 * row.times[i]:.2f} | {row.ratio(i):.1f}" for i in range(len(BATCHES))
    )
    facts = (
        f"{row.kilobytes:.0f} | {row.difference:.0e} | {row.flipped} | {row.gated:.0e} | {times}"
    )
    return f"| {row.network} | `{row.structure}` | {row.runtime} | {facts} |"


def roundings(found: list[Row]) -> str:
    """A table of what float32 leaves open by torch alone."""
    known = {(row.network, row.structure): row.rounding for row in found if row.rounding}
    if not known:
        return "What torch alone leaves open was not measured in this run."
    lines = [
        f"| {network} | `{structure}` | {own['points']} | {own['precise']} | {own['largest']:.0e} "
        f"| {own['other']} | {own['other_largest']:.0e} |"
        for (network, structure), own in known.items()
    ]
    return "\n".join(
        [
            "Torch alone leaves the same open, at points where onnxruntime saw other gates and 16 more:\n",
            ROUNDINGS,
            *lines,
        ]
    )


def missing(found: list[Row]) -> str:
    """The posteriors of the first claim that were not run at this revision, in words."""
    known = {(row.network, row.structure) for row in found}
    parts = []
    for network in NETWORKS:
        left = [f"`{case}`" for case in CASES if (network, case) not in known]
        if left:
            parts.append(f"{', '.join(left)} of {network}")
    if not parts:
        return "All posteriors of the first claim were run."
    return f"**Not run at this revision**, so that nothing is said of them: {'; '.join(parts)}."


def report(found: list[Row], load: Load, verdicts: list[tuple[str, bool]]) -> str:
    """The page of results."""
    claims = "\n".join(
        f"- {text}: {'holds' if holds else '**does not hold**'}" for text, holds in verdicts
    )
    revisions = ", ".join(dict.fromkeys(row.revision for row in found))
    return PAGE.format(
        revisions=revisions,
        torch=torch.__version__,
        claims=CLAIMS,
        verdicts=claims,
        goals="\n".join(goals(found)),
        table="\n".join([HEAD, *map(line, found)]),
        missing=missing(found),
        roundings=roundings(found),
        clients=CLIENTS,
        answered=load.answered,
        per_second=load.per_second,
        errors=load.errors,
        median=1e3 * load.median,
        slowest=1e3 * load.slowest,
    )


PAGE = """\
# Exported posteriors in fresh environments, and beside the bare network

`python benchmarks/serving.py`, revision {revisions}, torch {torch}, one thread, CPU seconds.

Claims, written down before the run:

{claims}

{verdicts}

{missing}

Goals, for 32 points by torch and by onnxruntime:

{goals}

{table}

The difference is the largest one from the posterior in net2gp. "Points" are those, of 256, at which a
variance differs by more than 1e-05, and "with gates" is the largest difference if the posterior at these
points has the gates of ReLUs that the runtime saw.

## Gates

The gradient of a network jumps where the input of a ReLU is zero, and so do variances that come from
gradients. Sums of convolutions are rounded in an order that depends on the library, the processor and the
batch, so that at a few points one of some hundred thousand inputs has another sign. Both answers are
those of the posterior in float32.

{roundings}

No order of operations avoids it, since the posterior's own gates come from torch's convolutions.
`LastLayer()`, drawn networks and limits have no gradients, and no such points.

## What bounds the latency

The network is exported in the same way and run by the same runtime; beside a limit it is the network that
has this limit. A `.pt2` program is run operation by operation from Python, which is most of the time of
small networks.

`LastLayer()` with C outputs and D features has C(C+1)/2 · D(D+1)/2 different entries in its covariance,
and each counts for each point: 1.8 million for the MLP with ten outputs, whose layers have 84,000
weights. A root of the covariance, the first design, takes four times as many products, and a file of 52
MB in place of 9. Sums are in float32 where that changes no variance of the compared points by more than
1e-06. `LastLayer(n2g.Kron())` has D² + C².

`Kron()` takes a backward pass for each output and the products of inputs and gradients for each output,
which alone are more than twice as many forward passes as there are outputs. Then come the rotations into
the eigenbasis, before or after that product, whichever is less. In float64 throughout, with one product
for each point, the first design took 88 times the network for the MLP with one output by onnxruntime,
where the network itself is six times fewer operations than the program.

`novelty` compares with up to 400 training inputs by the gradients of all layers, also for `LastLayer()`.

## Under load

The server, with a program of the MLP and `LastLayer()`, answered {answered} requests of {clients} clients
at 127.0.0.1, {per_second:.0f} per second, with {errors} errors: {median:.0f} ms in the median,
{slowest:.0f} ms for one in twenty.

The machine runs other programs as well. CPU seconds bear that better than seconds on the clock, which those
of the server are. Triton and TorchServe serve the same files, and were not compared.
"""
