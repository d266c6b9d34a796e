"""Cached variances and conjugate gradients: what rank buys, what N costs, how far residuals go.

    python benchmarks/solvers.py [--quick]

Three tables, printed and written to `results/solvers.md`:
1. error of cached (Lanczos) variances against their rank, on a trained network's kernel;
2. seconds for 100 predictions against the number of training points, cached and exact;
3. relative residual that preconditioned CG reaches on the kernels of an MLP and of ResNet-20.
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn

import net2gp as n2g
from net2gp import data
from net2gp.errors import InputError, NotConverged

RESULTS = Path(__file__).resolve().parent / "results" / "solvers.md"


def train(network: nn.Module, x: Tensor, y: Tensor, steps: int = 300) -> nn.Module:
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3, weight_decay=1e-4)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x), y).backward()
        optimizer.step()
    return network.eval()


def digits_network() -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """A 64-128-10 network trained on digits, with one-hot targets and test inputs."""
    torch.manual_seed(0)
    x, y = data.digits("train")
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    train(network, x, y)
    return network, x, nn.functional.one_hot(y, 10).float(), data.digits("test")[0]


def error_against_rank(num_points: int, ranks: list[int]) -> list[str]:
    network, x, y, x_test = digits_network()
    linearized = n2g.linearize(network)
    kernel = linearized.kernel(0.01)

    def variance(solver: n2g.solvers.Cholesky) -> Tensor:
        posterior = n2g.condition(
            kernel,
            (x[:num_points], y[:num_points]),
            n2g.Gaussian(0.01),
            mean=linearized,
            solver=solver,
        )
        return posterior.marginal(x_test[:100]).covariance_matrix.diagonal(dim1=1, dim2=2)

    exact = variance(n2g.solvers.Cholesky())
    prior = kernel.diag(x_test[:100]).reshape(exact.shape)
    rows = [
        "| rank | mean error / prior variance | mean variance / exact | lowest cached − exact |"
    ]
    rows += ["|---:|---:|---:|---:|"]
    for rank in ranks:
        cached = variance(n2g.solvers.Cholesky(variance=n2g.solvers.Lanczos(rank)))
        relative = float(((cached - exact) / prior).mean())
        ratio = float((cached / exact).mean())
        rows.append(
            f"| {rank} | {relative:.2e} | {ratio:.3f} | {float((cached - exact).min()):.1e} |"
        )
    return [
        f"{num_points} digits × 10 outputs = {10 * num_points} rows, noise_var = 0.01.",
        "",
        *rows,
    ]


def time_against_points(sizes: list[int]) -> list[str]:
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Linear(8, 100), nn.Tanh(), nn.Linear(100, 100), nn.Tanh(), nn.Linear(100, 1)
    ).eval()
    linearized = n2g.linearize(network)
    x = torch.randn(max(sizes), 8)
    y = x.sin().sum(1, keepdim=True)
    x_test = torch.randn(100, 8)
    rows = [
        "| N | condition s | cached: 100 predictions s | exact: 100 predictions s |",
        "|---:|---:|---:|---:|",
    ]
    for size in sizes:
        row = [f"{size}"]
        for variance in (n2g.solvers.Lanczos(50), n2g.solvers.Exact()):
            start = time.perf_counter()
            posterior = n2g.condition(
                linearized.kernel(),
                (x[:size], y[:size]),
                n2g.Gaussian(0.1),
                solver=n2g.solvers.Cholesky(variance=variance),
            )
            built = time.perf_counter() - start
            posterior.marginal(x_test)
            times = []
            for _ in range(5):
                start = time.perf_counter()
                posterior.marginal(x_test)
                times.append(time.perf_counter() - start)
            row += [f"{built:.2f}"] * (len(row) == 1) + [f"{min(times):.4f}"]
        rows.append("| " + " | ".join(row) + " |")
    return ["MLP 8-100-100-1, rank 50.", "", *rows]


def residuals(quick: bool) -> list[str]:
    rows = [
        "| kernel | rows | dtype | noise / mean eigenvalue | preconditioner | converged | residual | CG s |"
    ]
    rows += ["|---|---:|---|---:|---|---|---:|---:|"]
    network, x, y, _ = digits_network()
    count = 60 if quick else 200
    problems = [("MLP 64-128-10", network, x[:count], y[:count], torch.float64)]
    problems += [("MLP 64-128-10", network, x[:count], y[:count], torch.float32)]
    try:
        resnet = data.pretrained("resnet20_cifar10")
        images, labels = data.cifar10("test")
        count = 8 if quick else 40
        images = data.IMAGENET(images[:count])
        targets = nn.functional.one_hot(labels[:count], 10).float()
        problems.append(("ResNet-20", resnet, images, targets, torch.float64))
    except InputError as error:
        rows.append(f"| ResNet-20 | skipped: {error} | | | | | | |")
    for name, net, inputs, targets, dtype in problems:
        linearized = n2g.linearize(net.to(dtype))
        K = linearized.kernel().precise()(inputs.to(dtype))
        level = float(K.diagonal().mean())
        for noise in (1e-2, 1e-4, 1e-6):
            for preconditioner in (
                None,
                n2g.solvers.PivotedCholesky(200),
                n2g.solvers.Nystrom(200),
            ):
                rows.append(
                    _solve(
                        name,
                        linearized,
                        inputs.to(dtype),
                        targets.to(dtype),
                        K,
                        noise * level,
                        preconditioner,
                        noise,
                    )
                )
    return rows


def _solve(name, linearized, x, y, K, noise, preconditioner, relative) -> str:
    solver = n2g.solvers.CG(
        tol=1e-8, preconditioner=preconditioner, variance=n2g.solvers.Exact(), num_probes=2
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", NotConverged)
        start = time.perf_counter()
        posterior = n2g.condition(linearized.kernel(), (x, y), n2g.Gaussian(noise), solver=solver)
        seconds = time.perf_counter() - start
    t = y.double().reshape(-1, 1)
    residual = float(
        (t - K @ posterior.process.alpha - noise * posterior.process.alpha).norm() / t.norm()
    )
    said = any(issubclass(w.category, NotConverged) for w in caught)
    label = "none" if preconditioner is None else type(preconditioner).__name__
    return (
        f"| {name} | {len(K)} | {str(x.dtype)[6:]} | {relative:.0e} | {label} | "
        f"{'no, and says so' if said else 'yes'} | {residual:.1e} | {seconds:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    quick = parser.parse_args().quick
    ranks = [10, 50, 100] if quick else [10, 25, 50, 100, 200, 400, 800]
    sizes = [100, 200] if quick else [250, 500, 1000, 2000, 4000]
    lines = [
        "# Cached variances and conjugate gradients",
        "",
        "Made by `python benchmarks/solvers.py`.",
        "",
    ]
    lines += [
        "## Error of cached variances against rank",
        "",
        *error_against_rank(40 if quick else 200, ranks),
        "",
    ]
    lines += ["## Prediction time against N", "", *time_against_points(sizes), ""]
    lines += ["## Residuals of preconditioned CG", "", *residuals(quick)]
    Console().print("\n".join(lines), markup=False)
    if not quick:
        RESULTS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
