"""One way to steps of stochastic gradient Hamiltonian Monte Carlo, in a process of its own.

    python benchmarks/sghmc_peer.py net2gp|posteriors PROBLEM CHAINS STEPS

prints a JSON object with the CPU seconds of a step of all chains. Both ways draw fresh minibatches from data
in memory, for each chain its own.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

BATCH = 64
POINTS = 2000


def network(problem: str) -> nn.Module:
    """The network of a problem, at fixed values."""
    torch.manual_seed(0)
    if problem == "perceptron":
        return nn.Sequential(nn.Linear(13, 50), nn.ReLU(), nn.Linear(50, 1))
    if problem == "wide":
        return nn.Sequential(
            *(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()),
            nn.Linear(256, 10),
        )
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 5, stride=2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(256, 10)),
    )


def data(problem: str) -> tuple[Tensor, Tensor]:
    """Inputs and targets of the shapes of the problem."""
    generator = torch.Generator().manual_seed(0)
    shape = (POINTS, 13) if problem == "perceptron" else (POINTS, 1, 28, 28)
    x = torch.randn(shape, generator=generator)
    if problem == "perceptron":
        return x, x[:, :1].sin()
    return x, torch.randint(10, (POINTS,), generator=generator)


def ours(problem: str, chains: int, steps: int) -> float:
    """CPU seconds of a step of all chains by net2gp."""
    from net2gp.bayes import sghmc
    from net2gp.likelihoods import Categorical, Gaussian

    module, pair = network(problem), data(problem)
    likelihood = Gaussian(0.1) if problem == "perceptron" else Categorical()

    def run(count: int) -> None:
        options = {"step_size": 1e-4, "batch_size": BATCH, "num_chains": chains}
        sghmc(module, pair, likelihood, warmup=count, num_draws=1, **options)

    return timed(run, steps)


def theirs(problem: str, chains: int, steps: int) -> float:
    """CPU seconds of a step by `posteriors`: chain by chain in place, or by vmap, whichever is faster."""
    warnings.simplefilter("ignore")
    from torch.func import functional_call

    import posteriors

    module, (x, y) = network(problem), data(problem)

    def log_posterior(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]):
        out = functional_call(module, params, (batch[0],))
        if problem == "perceptron":
            logs = -0.5 * (out - batch[1]).square().mean() / 0.1
        else:
            logs = -nn.functional.cross_entropy(out, batch[1])
        return logs + posteriors.diag_normal_log_prob(params) / POINTS, torch.tensor([])

    params = {name: value.detach().clone() for name, value in module.named_parameters()}
    build = posteriors.sgmcmc.sghmc.build(log_posterior, lr=1e-4, alpha=0.1, temperature=1 / POINTS)

    def loop(count: int) -> None:
        states = [build.init({n: v.clone() for n, v in params.items()}) for _ in range(chains)]
        for _ in range(count):
            for chain, state in enumerate(states):
                index = torch.randint(POINTS, (BATCH,))
                states[chain], _ = build.update(state, (x[index], y[index]), inplace=True)

    def together(count: int) -> None:
        stacked = {n: v.repeat(chains, *(1,) * v.dim()) for n, v in params.items()}
        states = torch.vmap(build.init, randomness="different")(stacked)
        update = torch.vmap(partial(build.update, inplace=False), randomness="different")
        for _ in range(count):
            index = torch.randint(POINTS, (chains, BATCH))
            states, _ = update(states, (x[index], y[index]))

    return min(timed(run, steps) for run in ((loop, together) if chains > 1 else (loop,)))


def timed(run: Callable[[int], None], steps: int) -> float:
    """The CPU seconds of a step: a longer run less a shorter one, the least of three."""
    run(2)
    found = []
    for _ in range(3):
        begin = time.process_time()
        run(1)
        middle = time.process_time()
        run(steps + 1)
        found.append((time.process_time() - middle - (middle - begin)) / steps)
    return min(found)


def main() -> None:
    way, problem, chains, steps = sys.argv[1:]
    torch.set_num_threads(1)
    seconds = (ours if way == "net2gp" else theirs)(problem, int(chains), int(steps))
    print(json.dumps({"way": way, "problem": problem, "chains": int(chains), "seconds": seconds}))


if __name__ == "__main__":
    main()
