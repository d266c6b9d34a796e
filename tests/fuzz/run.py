"""Random networks against plain autograd: `python tests/fuzz/run.py --count 2000 --seed 0 --jobs 2`.

Prints how many are right, refused, raised a raw error or came out wrong, each refusal by its message, and
each fault with the network and its seed; `--only SEED` examines one network again. The exit status is 1 where
an answer is wrong or an error is raw.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import re
import sys
import time
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from fuzz.referee import OK, RAW, REFUSED, VERDICTS, WRONG, Finding, examine, subject


@dataclass(frozen=True)
class Result:
    """What came of one network: its findings, and its text where one of them is a fault."""

    seed: int
    findings: tuple[Finding, ...]
    ingredients: tuple[str, ...]
    text: str

    @property
    def verdict(self) -> str:
        return max((f.verdict for f in self.findings), key=VERDICTS.index, default=OK)

    def faults(self) -> list[Finding]:
        return [f for f in self.findings if f.verdict in (RAW, WRONG)]

    def report(self) -> str:
        lines = [f"{f.verdict:8s}{f.what}: {f.detail}" for f in self.faults()]
        return "\n".join([*lines, self.text])


def judge(seed: int, share: float = 1.0) -> Result:
    """All questions about the network of this seed, or a share of them."""
    case, right = subject(seed)
    chance = random.Random(seed)
    found = tuple(examine(case, right, lambda what: chance.random() < share))
    faulty = any(f.verdict in (RAW, WRONG) for f in found)
    text = f"{case.describe()}\n{case.source()}" if faulty else case.describe()
    return Result(seed, found, case.ingredients, text)


def summary(results: list[Result]) -> str:
    counts = Counter(result.verdict for result in results)
    lines = ["", f"{'networks':24s}" + "".join(f"{v:>9s}" for v in VERDICTS)]
    lines.append(f"{len(results):<24d}" + "".join(f"{counts[v]:9d}" for v in VERDICTS))
    by_question: dict[str, Counter[str]] = defaultdict(Counter)
    refusals: dict[str, list[int]] = defaultdict(list)
    for result in results:
        for finding in result.findings:
            by_question[finding.what][finding.verdict] += 1
            if finding.verdict == REFUSED:
                refusals[_kind(finding.detail)].append(result.seed)
    lines.append("")
    for what, found in by_question.items():
        lines.append(f"{what:24s}" + "".join(f"{found[v]:9d}" for v in VERDICTS))
    lines += ["", *_suspects(results)]
    lines.append("\nrefusals, with the networks that met them:")
    for message, seeds in sorted(refusals.items(), key=lambda item: -len(set(item[1]))):
        some = ", ".join(map(str, list(dict.fromkeys(seeds))[:6]))
        lines.append(f"{len(set(seeds)):5d}  {message}\n       e.g. seeds {some}")
    return "\n".join(lines)


def _suspects(results: list[Result]) -> list[str]:
    """The parts that faulty networks have more often than others."""
    seen, faulty = Counter(), Counter()
    for result in results:
        seen.update(set(result.ingredients))
        if result.faults():
            faulty.update(set(result.ingredients))
    ranked = sorted(faulty, key=lambda name: -(faulty[name] ** 2) / seen[name])[:15]
    return [
        f"{faulty[name]:4d} of {seen[name]:<4d} networks with {name} have a fault"
        for name in ranked
    ]


def _kind(message: str) -> str:
    """A message without the names and numbers of one network."""
    message = re.sub(r"'[^']*'|\([^()]*\)|\d+", "…", message)
    return message[:150]


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--count", type=int, default=300)
    arguments.add_argument("--seed", type=int, default=0, help="of the first network")
    arguments.add_argument("--jobs", type=int, default=1)
    arguments.add_argument("--share", type=float, default=1.0, help="of the questions, at random")
    arguments.add_argument("--only", type=int, help="examine the network of this seed alone")
    given = arguments.parse_args()
    torch.set_num_threads(1)
    if given.only is not None:
        result = judge(given.only)
        for finding in result.findings:
            print(f"{finding.verdict:8s}{finding.what:24s}{finding.detail}")
        print(result.report())
        return int(bool(result.faults()))
    seeds, results, start = range(given.seed, given.seed + given.count), [], time.time()
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(given.jobs, context) as pool:  # raises where a worker dies
        waiting = [pool.submit(judge, seed, given.share) for seed in seeds]
        for done in as_completed(waiting):
            results.append(result := done.result())
            if result.faults():
                print(f"\n{result.report()}", flush=True)
            if len(results) % 50 == 0:
                good = sum(r.verdict == OK for r in results)
                print(
                    f"{len(results)} of {len(seeds)}: {good} ok, {time.time() - start:.0f} s",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
    print(summary(sorted(results, key=lambda r: r.seed)))
    return int(any(result.faults() for result in results))


if __name__ == "__main__":
    raise SystemExit(main())
