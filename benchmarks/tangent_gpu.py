"""Tangent kernels of residual networks on a GPU, against the fastest matrix product of the same device.

    python benchmarks/tangent_gpu.py [--points 3000] [--blocks 3 9] [--quick]

ResNets for CIFAR-10 (He et al., 2016) with three stages of n blocks, 6n + 2 layers, at random inputs. Their
kernel of all C = 10 outputs needs (N·C)²·P operations, since only the half on one side of the diagonal is
computed; shares are of this number over the time and the peak of a square product in the same precision,
measured in the same run. Products in float32, and in parts of bfloat16 (`kernel.within(1e-4)`). Everything is
timed after a call that warms up. Writes `results/tangent_gpu.md`.

Stated before the run: errors of float32 kernels, beside products in float64 at 200 of the points and relative
to √(k(x, x) k(x', x')), are below 1e-5, those of parts below 1e-4. The exit status asserts this. A share of
30 % is the goal; the table says whether it is reached. A quick run has 40 points and one block, anywhere, and
writes nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import net2gp as n2g
from run import made_by

RESULTS = Path(__file__).parent / "results" / "tangent_gpu.md"
CHECKED = 200
GOAL = 0.3
LARGEST_ERROR = {"float32": 1e-5, "bfloat16 × 3": 1e-4}


class Block(nn.Module):
    """Two convolutions with BatchNorm, beside the input, which is thinned out and padded where it shrinks."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.stride = 1 if inputs == outputs else 2
        self.first = nn.Conv2d(inputs, outputs, 3, self.stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outputs) for _ in range(2))
        self.more = outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        beside = x[:, :, :: self.stride, :: self.stride]
        beside = nn.functional.pad(beside, (0, 0, 0, 0, 0, self.more))
        h = self.norms[1](self.second(self.norms[0](self.first(x)).relu()))
        return (h + beside).relu()


def residual(blocks: int, device: str) -> nn.Module:
    """A ResNet with 6·blocks + 2 layers, with the statistics of one batch of random images."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    for inputs, outputs in ((16, 16), (16, 32), (32, 64)):
        layers += [Block(inputs if i == 0 else outputs, outputs) for i in range(blocks)]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    network = nn.Sequential(*layers).to(device)
    with torch.no_grad():
        network(images(256, device))
    return network.eval()


def images(count: int, device: str) -> Tensor:
    """Random images, the same for all networks."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 3, 32, 32, generator=generator).to(device)


def seconds(run: Callable[[], object], device: str, repeats: int) -> float:
    """The median time of a call, after one that is not counted."""
    run()
    times = []
    for _ in range(repeats):
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def peaks(device: str, size: int) -> dict[str, float]:
    """Operations a second of a square product, in each precision; three products in bfloat16 count as one."""
    found = {}
    for name, dtype, factor in (("float32", torch.float32, 1), ("bfloat16 × 3", torch.bfloat16, 3)):
        if device == "cpu" and dtype == torch.bfloat16:
            continue
        A, B = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        found[name] = 2 * size**3 / factor / seconds(lambda a=A, b=B: a @ b, device, 5)
    return found


def error(kernel: n2g.linear.TangentKernel, x: Tensor) -> float:
    """The largest difference to products in float64, relative to both standard deviations."""
    exact = kernel.precise()(x)
    scale = exact.diagonal().sqrt()
    return float(((kernel(x) - exact).abs() / scale / scale[:, None]).max())


def main() -> int:
    options = parser().parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if not options.quick and device == "cpu":
        raise SystemExit("this needs a CUDA device; --quick runs anywhere")
    points, blocks = (40, [1]) if options.quick else (options.points, options.blocks)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    best = peaks(device, 1024 if options.quick else 16384)
    rows, right = [], True
    x = images(points, device)
    for count in blocks:
        linearized = n2g.linearize(residual(count, device))
        operations = (10 * points) ** 2 * linearized.num_params
        for kind, peak in best.items():
            kernel = linearized.kernel()
            kernel = kernel if kind == "float32" else kernel.within(1e-4)
            took = seconds(lambda k=kernel: k(x), device, 1 if options.quick else options.repeats)
            wrong = error(kernel, x[:CHECKED])
            right &= wrong < LARGEST_ERROR[kind]
            share = operations / took / peak
            rows.append(
                f"| ResNet-{6 * count + 2} | {linearized.num_params:,} | {kind} | {took:.2f} | "
                f"{operations / took / 1e12:.1f} | {peak / 1e12:.1f} | {share:.0%} | "
                f"{'yes' if share >= GOAL else 'no'} | {wrong:.1e} |"
            )
            print(rows[-1], flush=True)
    if not options.quick:
        write(rows, points, name)
    print("errors are as stated" if right else "an error is larger than stated")
    return 0 if right else 1


def write(rows: list[str], points: int, device: str) -> None:
    """The table, with what made it."""
    lines = [
        "# Tangent kernels of residual networks on a GPU",
        "",
        f"{device}. {made_by()}",
        "",
        f"Kernels of all ten outputs at {points} random images, {10 * points:,} rows. Operations are",
        "(N·C)²·P; the peak is that of a square product, measured in the same run.",
        "",
        "| network | parameters | products | seconds | TFLOP/s | peak | share | 30 %? | largest error |",
        "|---|---:|---|---:|---:|---:|---:|---|---:|",
        *rows,
    ]
    RESULTS.write_text("\n".join(lines) + "\n")


def parser() -> argparse.ArgumentParser:
    """The options."""
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    found.add_argument("--points", type=int, default=3000)
    found.add_argument("--blocks", type=int, nargs="+", default=[3, 9], help="blocks in each stage")
    found.add_argument("--repeats", type=int, default=3, help="timed calls of each (default 3)")
    found.add_argument("--quick", action="store_true", help="40 points, one block, any device")
    return found


if __name__ == "__main__":
    raise SystemExit(main())
