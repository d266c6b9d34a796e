"""Infinite-width kernels on a GPU, against what the hardware allows.

    python benchmarks/limits_gpu.py [--points 20000] [--images 128 256]

Two tables in Markdown: a fully connected network beside the Gram matrix of its inputs alone, and a pooled
Myrtle-10 network in microseconds per kernel entry beside the time in which the device copies the bytes
that must move. Best of several runs after a warm-up, which includes compilation: the limit of a module is
taken once, and what is timed is the way from the inputs to the finished matrices.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from net2gp.limits import InfiniteWidth, infinite_width

WEIGHT_VAR, BIAS_VAR = 2.0, 0.1
WIDTH = 8
NUM_FEATURES = 784
SIDE, NUM_BLOCKS, NUM_LAYERS = 32, 3, 3


def dense() -> nn.Sequential:
    """Three hidden layers of ReLUs."""
    layers: list[nn.Module] = []
    for i in range(3):
        layers += [nn.Linear(WIDTH if i else NUM_FEATURES, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


def myrtle() -> nn.Sequential:
    """Myrtle-10 (Shankar et al., 2020): three blocks of three convolutions, each with a pooling behind."""
    layers: list[nn.Module] = []
    for i in range(NUM_BLOCKS):
        for j in range(NUM_LAYERS):
            layers += [nn.Conv2d(WIDTH if i + j else 3, WIDTH, 3, padding=1), nn.ReLU()]
        layers.append(nn.AvgPool2d(2))
    layers += [nn.AvgPool2d(2), nn.AvgPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


def bytes_per_entry(element_size: int, tangent: bool) -> int:
    """What must move to and from memory for one pair of images, one pass a layer.

    Moments of all pairs of positions are side⁴ numbers. A convolution with its ReLU reads those of its
    input and writes those of its output, a pooling reads and writes; the first convolution starts from the
    images, which are few. The tangent kernel takes as much again.
    """
    numbers, side = 0, SIDE
    for i in range(NUM_BLOCKS):
        for j in range(NUM_LAYERS):
            numbers += side**4 * (2 if i + j else 1)
        numbers += side**4 + (side // 2) ** 4
        side //= 2
    while side > 1:
        numbers += side**4 + (side // 2) ** 4
        side //= 2
    return numbers * element_size * (2 if tangent else 1)


def best(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Seconds of the fastest run after a warm-up of two."""
    times = []
    for _ in range(repeats + 2):
        wait(device)
        start = time.perf_counter()
        result = run()
        wait(device)
        times.append(time.perf_counter() - start)
        del result
    return min(times[2:])


def wait(device: torch.device) -> None:
    """Until all work on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copy_bandwidth(device: torch.device, num_bytes: int) -> float:
    """Bytes a second, read and written, when a large tensor is copied."""
    source = torch.zeros(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * 4 * source.numel() / best(lambda: target.copy_(source), device, 10)


def peak_gigabytes(device: torch.device) -> str:
    """The most memory since the last reset, which is now."""
    if device.type != "cuda":
        return ""
    peak = torch.cuda.max_memory_allocated(device) / 1e9
    torch.cuda.reset_peak_memory_stats(device)
    return f"{peak:.1f}"


def dense_rows(num_points: int, device: torch.device, repeats: int) -> Iterator[str]:
    """Gram matrix alone, and both kernels, in both dtypes; the floor adds one pass that writes both."""
    yield "| dtype | Gram matrix ms | floor ms | NNGP ms | both ms | both / floor | peak GB |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for dtype in (torch.float32, torch.float64):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(num_points, NUM_FEATURES, generator=generator)
        x = (x * (0.5 + torch.rand(num_points, 1, generator=generator))).to(device, dtype)
        kernels = limit(dense().to(device, dtype))

        def floor(x: Tensor = x) -> list[Tensor]:
            gram = x @ x.T
            return [torch.empty_like(gram).copy_(gram) for _ in range(2)]

        gram = best(lambda x=x: x @ x.T, device, repeats)
        least = best(floor, device, repeats)
        nngp = best(lambda k=kernels, x=x: k.nngp(x), device, repeats)
        peak_gigabytes(device)
        both = best(lambda k=kernels, x=x: k(x), device, repeats)
        cells = [str(dtype)[6:], *(f"{1e3 * t:.1f}" for t in (gram, least, nngp, both))]
        cells += [f"{both / least:.2f}", peak_gigabytes(device)]
        yield "| " + " | ".join(cells) + " |"


def limit(module: nn.Module) -> InfiniteWidth:
    return infinite_width(module, weight_var=WEIGHT_VAR, bias_var=BIAS_VAR)


def pooled_rows(
    sizes: list[int], device: torch.device, bandwidth: float, repeats: int
) -> Iterator[str]:
    """Microseconds per kernel entry between two batches, and those that copying the bytes takes."""
    yield "| dtype | N = M | kernels | s | µs per entry | MB per entry | roofline µs | × roofline | peak GB |"
    yield "|---|---:|---|---:|---:|---:|---:|---:|---:|"
    for dtype in (torch.float32, torch.float64):
        kernels = limit(myrtle().to(device, dtype))
        for size in sizes:
            generator = torch.Generator().manual_seed(0)
            images = torch.randn(2, size, 3, SIDE, SIDE, generator=generator).to(device, dtype)
            for tangent in (False, True):

                def run(k=kernels, x=images[0], y=images[1], tangent=tangent) -> object:
                    return k(x, y) if tangent else k.nngp(x, y)

                peak_gigabytes(device)
                seconds = best(run, device, repeats)
                moved = bytes_per_entry(images.element_size(), tangent)
                each, least = 1e6 * seconds / size**2, 1e6 * moved / bandwidth
                cells = [str(dtype)[6:], str(size), "both" if tangent else "NNGP"]
                cells += [f"{seconds:.3f}", f"{each:.1f}", f"{moved / 1e6:.1f}", f"{least:.1f}"]
                cells += [f"{each / least:.2f}", peak_gigabytes(device)]
                yield "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--points", type=int, default=20_000, help="N of the fully connected network"
    )
    parser.add_argument("--images", type=int, nargs="+", default=[128, 256], help="N = M, pooled")
    parser.add_argument("--repeats", type=int, default=3, help="runs after the warm-up (default 3)")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    options = parser.parse_args()
    device = options.device
    cuda = device.type == "cuda"
    if cuda and not torch.cuda.is_available():
        parser.error(
            "no CUDA device here; --device cpu with few points and images shows that it runs"
        )
    torch.backends.cuda.matmul.allow_tf32 = False
    bandwidth = copy_bandwidth(device, 2**32 if cuda else 2**28)
    name = torch.cuda.get_device_name(device) if cuda else "CPU"
    print("# Infinite-width kernels on a GPU\n")
    print(
        f"{name}, torch {torch.__version__}; copy {bandwidth / 1e12:.2f} TB/s (read and written).\n"
    )
    print(f"## ReLU, 3 layers, k(x, x) with N = {options.points}, d = {NUM_FEATURES}\n")
    print("Floor: the Gram matrix, and one pass that writes both results.\n")
    for line in dense_rows(options.points, device, options.repeats):
        print(line, flush=True)
    print("\n## Myrtle-10 with pooling on 32×32×3, k(x, y)\n")
    print("Roofline: bytes that must move (one pass a layer) over the copy bandwidth above.\n")
    for line in pooled_rows(options.images, device, bandwidth, options.repeats):
        print(line, flush=True)


if __name__ == "__main__":
    main()
