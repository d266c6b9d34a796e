"""NUTS of net2gp beside NumPyro's: the same posteriors, moments, and effective samples per CPU second.

    python benchmarks/nuts.py [--quick] [--json]

The problems are a linear model of 5 weights and perceptrons with one hidden layer of 10 and 50 tanh units.
Both sample in float64 on one thread from the same log joint, with the same numbers of chains, warmup and
draws, a diagonal mass matrix and a target acceptance of 0.8. Chains start at draws from the prior, and
NumPyro vectorizes them. "first" is its first run, "again" is a second one, which traces and compiles most of
the program again, and "steady" is the time of a gradient alone, from other runs of more draws (– if the
difference is lost in the noise).
Effective samples are the smallest bulk ESS of f(x) over 5 points, by one formula for both. CPU seconds are
those of the process with all its threads, warmup included. NumPyro has an environment of its own
(`peers.py`).

Claims: the means of both agree within 4.5 Monte Carlo standard errors, and so do their variances. The exit
status says whether that holds. "ratio" compares effective samples per CPU second with NumPyro's second run,
and "steady ratio" with what NumPyro would need without any compilation. Writes `results/nuts.md`; with
`--json`, prints an object per row instead, for `bayes_speed.py`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault(
    "XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
)

import torch
from torch import Tensor, nn

from net2gp import bayes
from net2gp.likelihoods import Gaussian
from peers import PEERS, ROOT, NotInstalled, ensure

RESULTS = Path(__file__).parent / "results" / "nuts.md"
NOISE = 0.1


@dataclass(frozen=True, eq=False)
class Problem:
    """A network and its data; `width` is None for a linear model."""

    name: str
    width: int | None
    x: Tensor
    y: Tensor
    points: Tensor

    def network(self) -> nn.Module:
        inputs = self.x.shape[1]
        if self.width is None:
            return nn.Linear(inputs, 1).double()
        first, last = nn.Linear(inputs, self.width), nn.Linear(self.width, 1)
        return nn.Sequential(first, nn.Tanh(), last).double()


@dataclass(frozen=True)
class Outcome:
    """f(x) of all draws, (K, D, N), CPU seconds, gradients of a chain, and seconds of a gradient alone."""

    values: Tensor
    first: float
    seconds: float
    gradients: float
    steady: float

    @property
    def ess(self) -> float:
        return float(bayes.bulk_ess(self.values).min())


def problem(name: str, width: int | None, num_data: int, inputs: int) -> Problem:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_data, inputs, dtype=torch.float64, generator=generator)
    noise = torch.randn(num_data, 1, dtype=torch.float64, generator=generator)
    y = (x[:, :1] * 1.5).sin() + 0.5 * x[:, -1:] + NOISE**0.5 * noise
    points = torch.randn(5, inputs, dtype=torch.float64, generator=generator)
    return Problem(name, width, x, y, points)


def ours(task: Problem, chains: int, draws: int, warmup: int) -> Outcome:
    network = task.network()
    options = {"num_chains": chains, "num_draws": draws, "warmup": warmup}
    start = time.process_time()
    posterior = bayes.nuts(network, (task.x, task.y), Gaussian(noise_var=NOISE), **options)
    seconds = time.process_time() - start
    values = _values(posterior, task.points)
    work = float(posterior.recipe.statistics["gradients"].double().mean())
    steady = seconds / (work * (1 + warmup / draws))
    return Outcome(values.reshape(chains, draws, -1), seconds, seconds, work, steady)


def _values(posterior, x: Tensor) -> Tensor:
    return posterior.process.values(x)[..., 0]


def theirs(task: Problem, chains: int, draws: int, warmup: int) -> Outcome:
    import jax
    import jax.numpy as jnp
    from numpyro.infer import MCMC, NUTS

    jax.config.update("jax_enable_x64", True)
    x, y = jnp.asarray(task.x.numpy()), jnp.asarray(task.y.numpy())
    inputs, width = task.x.shape[1], task.width

    def outputs(theta, points):
        if width is None:
            return points @ theta[:inputs, None] + theta[inputs]
        w, rest = theta[: width * inputs].reshape(width, inputs), theta[width * inputs :]
        hidden = jnp.tanh(points @ w.T + rest[:width])
        return hidden @ rest[width : 2 * width, None] + rest[-1]

    def energy(theta):
        return 0.5 * jnp.sum((y - outputs(theta, x)) ** 2) / NOISE + 0.5 * jnp.sum(theta**2)

    size = sum(p.numel() for p in task.network().parameters())
    start = jax.random.normal(jax.random.PRNGKey(7), (chains, size))
    seconds, steps, kept = [], [], []
    # with few chains the compilation takes so long that its noise would hide the time of a gradient
    longer = 2 if chains > 4 else 8
    for count in (draws, longer * draws):
        mcmc = MCMC(
            NUTS(potential_fn=energy, target_accept_prob=0.8), num_warmup=warmup, num_samples=count,
            num_chains=chains, chain_method="vectorized", progress_bar=False,
        )  # fmt: skip
        for seed in (1, 2):
            begin = time.process_time()
            mcmc.run(jax.random.PRNGKey(seed), init_params=start, extra_fields=("num_steps",))
            kept.append(mcmc.get_samples(group_by_chain=True).block_until_ready())
            seconds.append(time.process_time() - begin)
            steps.append(float(mcmc.get_extra_fields()["num_steps"].sum()) / chains)
    points = jnp.asarray(task.points.numpy())
    values = jax.vmap(jax.vmap(lambda theta: outputs(theta, points)[:, 0]))(kept[1])
    steady = max(seconds[3] - seconds[1], 0.0) / (steps[3] - steps[1])
    return Outcome(torch.tensor(jax.device_get(values)), seconds[0], seconds[1], steps[1], steady)


def moments_agree(one: Outcome, other: Outcome) -> tuple[float, float]:
    """The largest difference of means in standard errors, and of standard deviations likewise."""
    variances, ess = [], []
    for outcome in (one, other):
        variances.append(outcome.values.flatten(0, 1).var(0))
        ess.append(bayes.bulk_ess(outcome.values))
    means = [outcome.values.flatten(0, 1).mean(0) for outcome in (one, other)]
    error = (variances[0] / ess[0] + variances[1] / ess[1]).sqrt()
    squares = [
        bayes.bulk_ess((o.values - m).square()) for o, m in zip((one, other), means, strict=True)
    ]
    # Var of log s² is about (kurtosis − 1)/ESS; 3 covers tails that are a little heavier than Gaussian
    spread = (3 / squares[0] + 3 / squares[1]).sqrt()
    logs = (variances[0].log() - variances[1].log()).abs()
    return float(((means[0] - means[1]).abs() / error).max()), float((logs / spread).max())


def beside_numpyro() -> int:
    """Run this program in the environment that has NumPyro, which is made first."""
    try:
        python = ensure(PEERS["numpyro"])
    except NotInstalled as reason:
        print(f"missing: {reason}")
        return 2
    source = {"PYTHONPATH": str(ROOT / "src")}
    return subprocess.run([str(python), *sys.argv], env={**os.environ, **source}).returncode


def chosen(quick: bool) -> list[tuple[Problem, int, int, int]]:
    """Problems with their numbers of chains, draws and warmup."""
    linear, narrow = problem("linear, 5 weights", None, 50, 4), problem("width 10", 10, 50, 2)
    wide = problem("width 50", 50, 100, 5)
    if quick:
        return [(linear, 16, 200, 200), (narrow, 32, 25, 60)]
    linears = ((linear, k, 1000, 500) for k in (4, 64))
    return [*linears, (narrow, 4, 100, 100), (narrow, 64, 50, 100), (wide, 16, 50, 100)]


def compare(task: Problem, chains: int, draws: int, warmup: int) -> dict[str, Any]:
    """Both samplers on one problem; the second run of each counts."""
    first = ours(task, chains, draws, warmup)
    other = theirs(task, chains, draws, warmup)
    one = ours(task, chains, draws, warmup)
    mean, spread = moments_agree(one, other)
    rates = [o.ess / o.seconds for o in (one, other)]
    per_ess = [o.steady * o.gradients * (1 + warmup / draws) / o.ess for o in (one, other)]
    return {
        "problem": task.name, "chains": chains, "mean": mean, "spread": spread,
        "ess": [one.ess, other.ess], "rates": rates, "seconds": [one.seconds, other.seconds],
        "first": [first.seconds, other.first], "ratio": rates[0] / rates[1],
        "gradient_us": [1e6 * o.steady / chains for o in (one, other)],
        "steady": per_ess[1] / per_ess[0] if other.steady else None,
    }  # fmt: skip


def cells(row: dict[str, Any]) -> str:
    """A row of the table."""
    costs = [f"{cost:.1f}" if cost else "–" for cost in row["gradient_us"]]
    steady = "–" if row["steady"] is None else f"{row['steady']:.2f}"
    return (
        f"| {row['problem']} | {row['chains']} | {row['ess'][0]:.0f} | {row['seconds'][0]:.2f} "
        f"| {row['rates'][0]:.0f} | {costs[0]} | {row['ess'][1]:.0f} | {row['first'][1]:.2f} "
        f"| {row['seconds'][1]:.2f} | {row['rates'][1]:.0f} | {costs[1]} | {row['mean']:.1f} s.e. "
        f"| {row['spread']:.1f} s.e. | {row['ratio']:.2f} | {steady} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two short problems, writes nothing")
    parser.add_argument("--json", action="store_true", help="print objects, write nothing")
    options = parser.parse_args()
    if importlib.util.find_spec("numpyro") is None:
        return beside_numpyro()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    lines = [
        "| problem | chains | ESS | CPU s | ESS/s | µs/gradient | NumPyro ESS | first s | again s | ESS/s "
        "| steady µs/gradient | means differ by | variances by | ratio | steady ratio |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    if not options.json:
        print("\n".join(lines))
    rows = []
    for run in chosen(options.quick):
        rows.append(compare(*run))
        lines.append(cells(rows[-1]))
        print(json.dumps(rows[-1]) if options.json else lines[-1], flush=True)
    good = all(max(row["mean"], row["spread"]) < 4.5 for row in rows)
    if not options.json:
        ahead = all(row["ratio"] > 1 for row in rows)
        print(f"moments agree: {good}; net2gp is ahead in every row: {ahead}")
    if not (options.quick or options.json):
        RESULTS.write_text("# NUTS beside NumPyro\n\n" + "\n".join(lines) + "\n", encoding="utf-8")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
