"""Count the conformance suite: python tests/conformance/count.py prints ways × laws.

Tests are collected by pytest, not run. A way is a method, structure, likelihood and solver that give a
posterior; a check is one law of one way.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from conformance.laws import LAWS  # noqa: E402

QUANTITIES = (
    *("mean", "variance", "covariance", "joint covariance", "prediction", "drawn functions"),
)
FOLDERS = ("tests/conformance", "tests/posteriors/test_save.py")


def collected() -> list[str]:
    """The ids of all tests of the suite."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    answer = subprocess.run([*command, *FOLDERS], cwd=ROOT, capture_output=True, text=True)
    if answer.returncode != 0:
        raise RuntimeError(answer.stdout[-3000:] + answer.stderr[-3000:])
    return [line for line in answer.stdout.splitlines() if "::" in line]


def ways(ids: list[str]) -> set[str]:
    """The ways among the parameters of a law's tests: a quantity behind a way is no way of its own."""
    quantity = re.compile(f"-({'|'.join(QUANTITIES)})$")
    return {quantity.sub("", one.partition("[")[2].rstrip("]")) for one in ids}


def main() -> None:
    """Print the table of laws of posteriors, and what else the suite holds."""
    ids = collected()
    functions = Counter(one.partition("[")[0] for one in ids)
    print("| law of posteriors | ways | checks |\n|---|--:|--:|")
    every: set[str] = set()
    total = 0
    for law, tests in LAWS.items():
        missing = [test for test in tests if not functions[test]]
        if missing:
            raise LookupError(f"no such test: {missing}")
        own = [one for one in ids if one.partition("[")[0] in tests]
        every |= ways(own)
        total += len(own)
        print(f"| {law} | {len(ways(own))} | {len(own)} |")
    print(f"| all | {len(every)} | {total} |\n")
    print("| file | laws | checks |\n|---|--:|--:|")
    for path in sorted({name.partition("::")[0] for name in functions}):
        own = [name for name in functions if name.startswith(path + "::")]
        print(f"| {path} | {len(own)} | {sum(functions[name] for name in own)} |")
    print(f"| all | {len(functions)} | {len(ids)} |")


if __name__ == "__main__":
    main()
