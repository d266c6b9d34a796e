"""What a program claims, written down before its run and judged after it.

A claim is about paired differences, one for each repetition, positive where it is right:

- "better": their mean is above zero by more than Student's t allows for chance (95 %);
- "no worse": their mean is not below zero by more than that.

The .toml beside a program has its claims, for all of its tasks, and exceptions with a reason for each, where
what the paper says is known not to hold:

    [claim.rmse]
    "fine-tuned" = "better"

    [exception.East.rmse]
    "RBF GP" = "why it does not hold there"

The exit status of a program says whether all came out as written: claims hold, and nothing that is excepted
is better beyond chance after all. A quick run has too few repetitions for such a test: there the mean of a
"better" claim must be above zero, and exceptions are only shown.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy.stats import t as student
from torch import Tensor

sys.path.append(str(Path(__file__).parent))
import findings

Margins = Callable[[str, str], Tensor]
"""By measure and rival, the paired differences over the repetitions, positive where the claim is right."""

WORDS = ("better", "no worse")


@dataclass(frozen=True)
class Claim:
    """What was said before the run, what came, and whether that is what was said."""

    name: str
    found: str
    holds: bool
    exception: str = ""
    """Why the claim is known not to hold here."""

    stale: bool = False
    """Whether an exception is wrong: what it excuses is better beyond chance all the same."""

    @property
    def as_stated(self) -> bool:
        """Whether it came out as written."""
        return not self.stale if self.exception else self.holds

    @property
    def verdict(self) -> str:
        """The last column of the table."""
        if not self.exception:
            return "yes" if self.holds else "NO"
        if self.as_stated:
            return f"{'yes' if self.holds else 'no'}, an exception: {self.exception}"
        return "YES, though stated not to: drop the exception"

    @property
    def entry(self) -> findings.Entry:
        """The same for the file that --json writes."""
        bound, note = ("exception", self.verdict) if self.exception else ("claim", "")
        return findings.Entry(self.name, None, self.found, None, self.as_stated, bound, note)


def margin_and_limit(margin: Tensor, confidence: float = 0.95) -> tuple[float, float]:
    """The mean of paired differences, and how far from zero chance would bring it."""
    count = len(margin)
    error = float(margin.std()) / count**0.5
    return float(margin.mean()), float(student.ppf((1 + confidence) / 2, count - 1)) * error


def verdict(margin: Tensor, confidence: float = 0.95) -> str:
    """Whether the differences are positive ("better"), negative ("worse") or "undecided"."""
    mean, limit = margin_and_limit(margin, confidence)
    if abs(mean) <= limit:
        return "undecided"
    return "better" if mean > 0 else "worse"


def compared(
    name: str, margin: Tensor, word: str, *, exception: str = "", quick: bool = False
) -> Claim:
    """That one thing is "better", or "no worse", than another, by the paired differences."""
    if word not in WORDS:
        raise ValueError(f'a claim says "better" or "no worse", not {word!r}: {name}')
    mean, limit = margin_and_limit(margin)
    holds = mean >= -limit if word == "no worse" else mean > (0 if quick else limit)
    found = f"{mean:+.3g} ± {limit:.2g}"
    return Claim(f"{name}: {word}", found, holds, exception, stale=mean > limit and not quick)


def at_most(name: str, found: float, bound: float) -> Claim:
    """That a number is not larger than a bound."""
    return Claim(f"{name}: at most {bound:g}", f"{found:.3g}", found <= bound)


def stated(program: str) -> dict[str, Any]:
    """The .toml beside a program."""
    return tomllib.loads(Path(program).with_suffix(".toml").read_text())


def claims_of(
    program: str,
    task: str,
    margins: Margins,
    *,
    quick: bool,
    compare: Callable[..., Claim] = compared,
) -> Iterator[Claim]:
    """The claims that a program makes for each of its tasks, judged for one of them by `compare`."""
    numbers = stated(program)
    exceptions = numbers.get("exception", {}).get(task, {})
    for measure, rivals in numbers["claim"].items():
        for rival, word in rivals.items():
            yield compare(
                f"{task}, {measure}, beside {rival}",
                margins(measure, rival),
                word,
                exception=exceptions.get(measure, {}).get(rival, ""),
                quick=quick,
            )


def judge(claims: Iterable[Claim]) -> bool:
    """Print claim, what was found, and whether it holds; whether all came out as stated."""
    found = list(claims)
    width = max((len(claim.name) for claim in found), default=0) + 2
    print(f"\n{'claim':<{width}}{'found':>22}  holds?")
    for claim in found:
        print(f"{claim.name:<{width}}{claim.found:>22}  {claim.verdict}")
    findings.add(claim.entry for claim in found)
    wrong = sum(not claim.as_stated for claim in found)
    print(f"{len(found) - wrong} of {len(found)} came out as stated")
    return not wrong
