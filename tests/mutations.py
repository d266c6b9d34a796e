"""Ten faults, one per law of posteriors: does the conformance suite catch each of them?

    python tests/mutations.py [--quick] [--only TEXT]

A fault is one small change of the source, made in a copy of it. The tests of its law (`conformance/laws.py`)
must pass on an unchanged copy, and at least one of them must fail with the fault. Prints a table, and exits
with 0 only if every fault is caught. `--quick` tries three of them, `--only` those whose law has this text.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from conformance.laws import LAWS  # noqa: E402

POSTERIORS = "posteriors"
NUM_QUICK = 3


@dataclass(frozen=True)
class Fault:
    """A change of one file's text, and words of the ways whose tests of the law are run (as in -k)."""

    law: str
    says: str
    path: str
    text: str
    instead: str
    ways: str


FAULTS = (
    Fault(
        "marginals are blocks of the joint law",
        "marginal covariances are a thousandth too large",
        f"{POSTERIORS}/predicting.py",
        "return gaussian_law(mean, blocks.to(mean.dtype))",
        "return gaussian_law(mean, 1.001 * blocks.to(mean.dtype))",
        "rbf or kron",
    ),
    Fault(
        "samples have the moments of the joint law",
        "draws from a joint law are a fifth too narrow",
        f"{POSTERIORS}/conditioning/samples.py",
        "+ symmetric_root(covariance) @ z",
        "+ 0.8 * symmetric_root(covariance) @ z",
        "rbf",
    ),
    Fault(
        "samples differ from call to call",
        "without a generator the seed is always the same",
        f"{POSTERIORS}/posterior.py",
        "        if not linear:\n",
        "        generator = generator or torch.Generator().manual_seed(0)\n        if not linear:\n",
        "cholesky or diagonal",
    ),
    Fault(
        "samples repeat with a generator",
        "the generator that is given is not used",
        f"{POSTERIORS}/posterior.py",
        "        if not linear:\n",
        "        generator = None\n        if not linear:\n",
        "cholesky or diagonal",
    ),
    Fault(
        "gradients in x are finite differences",
        "the covariance around a network does not follow x",
        f"{POSTERIORS}/recipes/around_network.py",
        "return self._outputs(x), blocks",
        "return self._outputs(x), blocks.detach()",
        "full",
    ),
    Fault(
        "update is conditioning on all",
        "in weight space an update counts the prior twice",
        f"{POSTERIORS}/recipes/weight_sums.py",
        " - torch.eye(len(A)).to(A)",
        "",
        "gaussian and weight",
    ),
    Fault(
        "saved and loaded it is equal",
        "a factor that is stored by columns comes back transposed",
        f"{POSTERIORS}/writing.py",
        '{"columns" if by_columns else "tensor": seen[id(value)]}',
        '{"tensor": seen[id(value)]}',
        "cholesky or kron",
    ),
    Fault(
        "moved and moved back it is the same",
        "moving changes the posterior that is moved",
        f"{POSTERIORS}/move.py",
        "    return replace(value, **changes)\n",
        "    for name, changed in changes.items():\n"
        "        object.__setattr__(value, name, changed)\n"
        "    return value\n",
        "rbf or diagonal",
    ),
    Fault(
        "float32 is near float64",
        "means of a float32 process are not rounded to float32",
        f"{POSTERIORS}/conditioning/conditioned.py",
        "(cross.mT @ self.alpha).to(self._dtype(x))",
        "(cross.mT @ self.alpha)",
        "rbf",
    ),
    Fault(
        "a second prediction solves nothing",
        "every variance factorizes the Gram matrix again",
        f"{POSTERIORS}/conditioning/conditioned.py",
        "return self.cholesky.half_solve(v)",
        "L = torch.linalg.cholesky(self.cholesky.L @ self.cholesky.L.mT)\n"
        "        return torch.linalg.solve_triangular(L, v, upper=False)",
        "gaussian and cholesky",
    ),
)


def put_in(fault: Fault, source: Path) -> None:
    """Change the copy of one file."""
    path = source / "net2gp" / fault.path
    before = path.read_text()
    if before.count(fault.text) != 1:
        raise LookupError(
            f"{fault.path} has {before.count(fault.text)} times, where it should have once: {fault.text!r}"
        )
    path.write_text(before.replace(fault.text, fault.instead))


def run(source: Path, fault: Fault) -> tuple[int, str]:
    """How many tests of the law fail with this source, and pytest's last line; -1 if it could not run."""
    options = ["-q", "-p", "no:cacheprovider", "-o", f"pythonpath={source} tests", "--tb=no"]
    command = [sys.executable, "-m", "pytest", *options, "-k", fault.ways, *LAWS[fault.law]]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = answer.stdout.strip().splitlines() or [answer.stderr[-500:]]
    if answer.returncode not in (0, 1):
        return -1, lines[-1]
    return sum(line.startswith("FAILED") for line in lines), lines[-1]


def tried(fault: Fault, folder: Path) -> tuple[bool, str]:
    """Whether the fault is caught by tests that pass without it."""
    source = folder / "src"
    shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
    clean, said = run(source, fault)
    if clean != 0:
        return False, f"fails without the fault: {said}"
    put_in(fault, source)
    failed, said = run(source, fault)
    return failed > 0, said


def main() -> int:
    """Try the faults, print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=f"{NUM_QUICK} faults")
    parser.add_argument("--only", default="", help="faults whose law has this text")
    options = parser.parse_args()
    assert {fault.law for fault in FAULTS} == LAWS.keys()
    chosen = [fault for fault in FAULTS if options.only in fault.law]
    chosen = chosen[:NUM_QUICK] if options.quick else chosen
    caught = 0
    print(
        "| law | fault | caught | tests of the law with the fault |\n|---|---|---|---|", flush=True
    )
    for fault in chosen:
        with tempfile.TemporaryDirectory() as folder:
            is_caught, said = tried(fault, Path(folder))
        caught += is_caught
        print(
            f"| {fault.law} | {fault.says} | {'yes' if is_caught else 'NO'} | {said} |", flush=True
        )
    print(f"\n{caught} of {len(chosen)} faults are caught.")
    return 0 if chosen and caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
