"""One revision's side of `before_after.py`: runs the jobs that it reads from stdin, by name.

Each job has a part that is prepared without the clock (fresh copies of networks and inputs, or a posterior
to predict with) and a part that is timed. After each run the worker prints a JSON object: the CPU seconds,
and a few numbers of the result, by which the two revisions are compared.
"""

from __future__ import annotations

import copy
import gc
import json
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

import net2gp as n2g

warnings.simplefilter("ignore")
torch.set_num_threads(1)

ENOUGH = 0.25
"""CPU seconds of a measurement: the best of its runs shows differences of a few per cent."""


@dataclass(frozen=True)
class Job:
    """`prepare` makes what `run` takes; `run` is timed and gives numbers."""

    prepare: Callable[[], Any]
    run: Callable[[Any], Tensor]


FORMER = {"WeightCholesky": "WeightSpace"}
"""Names that older revisions have for the same thing."""


def option(name: str, *arguments: Any) -> Any:
    """A solver or structure, which older revisions have at the top and others one level below."""
    for home in (n2g, *(getattr(n2g, room, None) for room in ("structures", "solvers"))):
        for called in (name, FORMER.get(name, name)):
            if called in getattr(home, "__dict__", {}):
                return getattr(home, called)(*arguments)
    raise LookupError(f"this revision has no {name}")


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def points(count: int, inputs: int = 8, seed: int = 0) -> Tensor:
    return torch.randn(count, inputs, generator=seeded(seed))


def images(count: int, size: int = 12, seed: int = 0) -> Tensor:
    return torch.randn(count, 1, size, size, generator=seeded(seed))


def dense(outputs: int, hidden: int = 64, activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    torch.manual_seed(0)
    body = nn.Linear(8, hidden), activation(), nn.Linear(hidden, hidden), activation()
    return nn.Sequential(*body, nn.Linear(hidden, outputs)).eval()


def convolutional(outputs: int = 5) -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2)
    second = nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten()
    return nn.Sequential(*first, *second, nn.Linear(144, outputs)).eval()


@cache
def trained(classes: bool, hidden: int, count: int) -> tuple[nn.Sequential, Tensor, Tensor]:
    """A network near a minimum of its loss, with its data."""
    x = points(count)
    score = torch.stack([x[:, 0].sin() + x[:, 1], x[:, 2] - x[:, 3], x[:, 4] * x[:, 5]], 1)
    score = score + 0.3 * torch.randn(score.shape, generator=seeded(2))
    y = score.argmax(1) if classes else score[:, :1]
    network = dense(3 if classes else 1, hidden)
    loss = nn.functional.cross_entropy if classes else nn.functional.mse_loss
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2, weight_decay=1e-4)
    for _ in range(200):
        optimizer.zero_grad()
        loss(network(x), y).backward()
        optimizer.step()
    return network, x, y


def numbers(law: Any) -> Tensor:
    """A few numbers of a predictive law."""
    if hasattr(law, "probs"):
        return law.probs.reshape(-1)[:20]
    return torch.cat([law.mean.reshape(-1)[:10], law.variance.reshape(-1)[:10]])


def kernel_job(make: Callable[[], Any], x: Tensor, times: int = 1) -> Job:
    """The Gram matrix of a kernel that is made in the job, from a network that nothing knows yet."""

    def run(inputs: Tensor) -> Tensor:
        for _ in range(times):
            gram = make()(inputs)
        return gram.reshape(-1)[:: max(1, gram.numel() // 20)]

    return Job(x.clone, run)


def tangent(network: nn.Module) -> Any:
    return n2g.linearize(copy.deepcopy(network)).kernel()


def fit_job(
    fit: Callable[[nn.Module, tuple[Tensor, Tensor]], Any],
    made: tuple[nn.Module, Tensor, Tensor],
    times: int,
) -> Job:
    """A posterior from a network that nothing knows yet."""
    network, x, y = made

    def run(copies: list[tuple[nn.Module, Tensor, Tensor]]) -> Tensor:
        found = [fit(one, (a, b)) for one, a, b in copies]
        return found[0].marginal(x[:10]).variance.reshape(-1)

    return Job(lambda: [(copy.deepcopy(network), x.clone(), y.clone()) for _ in range(times)], run)


def predict_job(make: Callable[[], Any], draw: Callable[[int], Tensor], times: int) -> Job:
    """Predictions of new points, from a posterior that has predicted before."""
    posterior: list[Any] = []

    def prepare() -> list[Tensor]:
        if not posterior:
            posterior.append(make())
        return [draw(seed) for seed in range(5, 5 + times)]

    def run(batches: list[Tensor]) -> Tensor:
        laws = [posterior[0].predict(x) for x in batches]
        return numbers(laws[0])

    return Job(prepare, run)


def laplace(structure: Any, classes: bool, network: nn.Module, data: Any) -> Any:
    likelihood = n2g.Categorical() if classes else n2g.Gaussian()
    return n2g.laplace(network, data, likelihood, structure=structure)


def adapt(classes: bool, network: nn.Module, data: Any) -> Any:
    return n2g.adapt(network, data, n2g.Categorical() if classes else n2g.Gaussian())


def solved(solver: Any, network: nn.Module, data: Any) -> Any:
    linearized = n2g.linearize(network)
    likelihood = n2g.Gaussian(0.1)
    return n2g.condition(linearized.kernel(), data, likelihood, mean=linearized, solver=solver)


STRUCTURES: dict[str, tuple[str, tuple[Any, ...], int, int]] = {
    "full": ("Full", (), 20, 200),
    "diagonal": ("Diagonal", (), 64, 600),
    "kron": ("Kron", (), 64, 600),
    "low rank": ("LowRank", (20,), 20, 200),
    "last layer": ("LastLayer", (), 64, 600),
    "subnetwork": ("Subnetwork", (100,), 20, 200),
    "function space": ("FunctionSpace", (), 64, 150),
    "sampled": ("Sampled", (20,), 64, 150),
}
"""The class, its arguments, and the hidden width and number of points that its jobs take."""


def laplace_jobs() -> dict[str, Callable[[], Job]]:
    jobs: dict[str, Callable[[], Job]] = {}
    for classes, task in ((False, "regression"), (True, "classes")):
        for name, (kind, arguments, hidden, count) in STRUCTURES.items():
            made = partial(trained, classes, hidden, count)
            fit = partial(laplace, option(kind, *arguments), classes)
            start = f"laplace, {name}, {task}"

            def build(fit: Any = fit, made: Any = made) -> Any:
                network, x, y = made()
                return fit(network, (x, y))

            jobs[f"{start}: fit"] = lambda fit=fit, made=made: fit_job(fit, made(), 4)
            jobs[f"{start}: predict 3"] = lambda build=build: predict_job(
                build, lambda seed: points(3, seed=seed), 40
            )
            jobs[f"{start}: predict 500"] = lambda build=build: predict_job(
                build, lambda seed: points(500, seed=seed), 5
            )
    return jobs


def adapt_jobs() -> dict[str, Callable[[], Job]]:
    jobs: dict[str, Callable[[], Job]] = {}
    for classes, task in ((False, "regression"), (True, "classes")):
        made = partial(trained, classes, 64, 100 if classes else 300)
        fit = partial(adapt, classes)

        def build(fit: Any = fit, made: Any = made) -> Any:
            network, x, y = made()
            return fit(network, (x, y))

        jobs[f"adapt, {task}: fit"] = lambda fit=fit, made=made: fit_job(fit, made(), 2)
        jobs[f"adapt, {task}: predict 3"] = lambda build=build: predict_job(
            build, lambda seed: points(3, seed=seed), 40
        )
        jobs[f"adapt, {task}: predict 500"] = lambda build=build: predict_job(
            build, lambda seed: points(500, seed=seed), 5
        )
    return jobs


def solver_jobs() -> dict[str, Callable[[], Job]]:
    jobs: dict[str, Callable[[], Job]] = {}
    for name, hidden in (("Cholesky", 64), ("WeightCholesky", 20), ("CG", 64)):
        made = partial(trained, False, hidden, 800)
        fit = partial(solved, option(name))

        def build(fit: Any = fit, made: Any = made) -> Any:
            network, x, y = made()
            return fit(network, (x, y))

        jobs[f"solver {name}: fit"] = lambda fit=fit, made=made: fit_job(fit, made(), 2)
        jobs[f"solver {name}: predict 100"] = lambda build=build: predict_job(
            build, lambda seed: points(100, seed=seed), 10
        )
    return jobs


def limit(network: nn.Module, tangent: bool = True) -> Any:
    return (n2g.ntk if tangent else n2g.nngp)(network, bias_var=0.1)


def limit_predictor(activation: type[nn.Module]) -> Any:
    x = points(100)
    y = x[:, :1].sin()
    return n2g.condition(limit(dense(1, activation=activation)), (x, y), n2g.Gaussian(0.1))


JOBS: dict[str, Callable[[], Job]] = {
    "tangent kernel, dense": lambda: kernel_job(
        partial(tangent, dense(1, 256, nn.ReLU)), points(1000), 2
    ),
    "tangent kernel, dense, 5 outputs": lambda: kernel_job(
        partial(tangent, dense(5, 128, nn.ReLU)), points(200), 2
    ),
    "tangent kernel, convolutions": lambda: kernel_job(
        partial(tangent, convolutional()), images(60), 2
    ),
    "trace kernel, convolutions": lambda: kernel_job(
        lambda: n2g.linearize(copy.deepcopy(convolutional())).trace_kernel(), images(60), 2
    ),
    "limit, ReLU, N=1000": lambda: kernel_job(
        lambda: limit(dense(1, activation=nn.ReLU)), points(1000), 4
    ),
    "limit, tanh, N=1000": lambda: kernel_job(lambda: limit(dense(1)), points(1000)),
    "limit, GELU, N=300": lambda: kernel_job(
        lambda: limit(dense(1, activation=nn.GELU)), points(300)
    ),
    "limit, convolutions": lambda: kernel_job(lambda: limit(convolutional(1)), images(24)),
    "limit, ReLU: predict 3": lambda: predict_job(
        partial(limit_predictor, nn.ReLU), lambda seed: points(3, seed=seed), 40
    ),
    "limit, tanh: predict 3": lambda: predict_job(
        partial(limit_predictor, nn.Tanh), lambda seed: points(3, seed=seed), 10
    ),
    **laplace_jobs(),
    **adapt_jobs(),
    **solver_jobs(),
}


def timed(job: Job) -> tuple[float, Tensor]:
    """CPU seconds of the best run, of as many as take `ENOUGH` seconds together."""
    seconds: list[float] = []
    gc.collect()
    while sum(seconds) < ENOUGH:
        prepared = job.prepare()
        start = time.process_time()
        found = job.run(prepared)
        seconds.append(time.process_time() - start)
    return min(seconds), found


def main() -> None:
    """Answer each line of stdin, which names a job, with one line of JSON."""
    print(json.dumps(list(JOBS)), flush=True)
    gc.disable()
    name, job = "", None
    for line in sys.stdin:
        if line.strip() != name:
            name, job = line.strip(), None
            gc.collect()
            job = JOBS[name]()
            job.run(job.prepare())  # lazy imports, and a posterior's first prediction
        assert job is not None
        seconds, found = timed(job)
        print(json.dumps({"cpu_s": seconds, "numbers": found.double().tolist()}), flush=True)


if __name__ == "__main__":
    main()
