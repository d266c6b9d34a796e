"""Random networks at infinite width against Monte Carlo of finite ones.

    python tests/fuzz/limits.py --count 300 --seed 0

prints a line for each network and a table at the end: how many agree within sampling error, are refused by
name, are wrong, raise another error, or take too long. The exit status is not zero if there are any of the
last three.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

import torch


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=300, help="number of networks")
    parser.add_argument("--seed", type=int, default=0, help="number of the first network")
    parser.add_argument(
        "--quiet", action="store_true", help="print only what is wrong, and the table"
    )
    given = parser.parse_args()
    root = Path(__file__).parents[2]
    sys.path[:0] = [str(root / "tests"), str(root / "src")]
    from fuzz.limit_networks import BAD, outcome

    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    for number, seed in enumerate(range(given.seed, given.seed + given.count), 1):
        found = outcome(seed)
        counts[found.verdict] += 1
        if not given.quiet or found.verdict in BAD:
            line = f"{number}/{given.count} {seed} {found.verdict}: {found.title}. {found.text}"
            print(line[:240], flush=True)
    for verdict in ("agrees", "refused", *BAD):
        print(f"{verdict:8s} {counts[verdict]}")
    return int(any(counts[verdict] for verdict in BAD))


if __name__ == "__main__":
    raise SystemExit(main())
