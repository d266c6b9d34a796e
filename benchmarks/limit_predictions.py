"""One prediction with the limit of a network, for activations without a closed form against ReLU.

    python benchmarks/limit_predictions.py [--quick]

A process is conditioned on 50 points, then one new point is predicted: CPU seconds of the prediction on one
thread, the best of five runs of ten predictions. Prints a table and writes it to
`results/limit_predictions.md`; exits with 1 if a smooth activation takes more than three times as long as
ReLU. `--quick` has two activations and writes nothing.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import nn

import net2gp as n2g

RESULTS = Path(__file__).resolve().parent / "results" / "limit_predictions.md"
LIMIT = 3.0
SMOOTH = (nn.Tanh, nn.Sigmoid, nn.Softplus, nn.SiLU, nn.Mish, nn.LogSigmoid)
OTHER = (nn.GELU, nn.ELU, nn.Hardtanh)
"""GELU has a closed form; the others have kinks, which tables do not serve: they are shown and not judged."""


def network(activation: type[nn.Module], depth: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(3, 64)]
    for _ in range(depth - 1):
        layers += [activation(), nn.Linear(64, 64)]
    return nn.Sequential(*layers, activation(), nn.Linear(64, 1)).double()


def seconds(activation: type[nn.Module], depth: int, num_points: int = 50) -> tuple[float, float]:
    """CPU seconds of conditioning, which builds the tables, and of one prediction."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_points + 1, 3, generator=generator, dtype=torch.float64)
    kernel = n2g.nngp(network(activation, depth), weight_var=1.5, bias_var=0.1)
    start = time.process_time()
    posterior = n2g.condition(kernel, (x[1:], x[1:, :1].sin()), n2g.Gaussian(0.01))
    conditioning = time.process_time() - start
    times = []
    for _ in range(5):
        start = time.process_time()
        for _ in range(10):
            posterior.predict(x[:1]).variance.sum()
        times.append((time.process_time() - start) / 10)
    return conditioning, min(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two activations, nothing written")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    seconds(nn.ReLU, 1)
    lines = [
        "| activation | hidden layers | condition, ms | predict, ms | against ReLU |",
        "|---|--:|--:|--:|--:|",
    ]
    worst = 0.0
    for depth in (1,) if quick else (1, 3):
        base = min(seconds(nn.ReLU, depth)[1] for _ in range(3))
        lines.append(f"| ReLU | {depth} | | {1e3 * base:.2f} | 1.0 |")
        for activation in SMOOTH[:2] if quick else (*SMOOTH, *OTHER):
            conditioning, best = seconds(activation, depth)
            ratio = best / base
            worst = max(worst, ratio) if activation in SMOOTH else worst
            row = f"{activation.__name__} | {depth} | {1e3 * conditioning:.0f} | {1e3 * best:.2f}"
            lines.append(f"| {row} | {ratio:.1f} |")
    verdict = f"The slowest smooth activation takes {worst:.1f} times as long as ReLU."
    lines += ["", f"{verdict} At most {LIMIT:.0f} is asked for."]
    print("\n".join(lines))
    if not quick:
        title = "# One prediction with the limit of a network"
        said = "Made by `python benchmarks/limit_predictions.py`: 50 training points, one thread, float64."
        RESULTS.write_text("\n".join([title, "", said, "", *lines, ""]), encoding="utf-8")
    return int(worst > LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
