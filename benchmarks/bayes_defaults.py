"""How long the methods of `net2gp.bayes` take with their defaults, and how wide their posteriors are.

    python benchmarks/bayes_defaults.py [--quick]

fits 40 points of a sine with noise 0.1 by a perceptron of 20 tanh units. It prints CPU seconds of one core,
the median ratio of the standard deviations of f to those of NUTS, between the data and outside, and R̂ of f.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import net2gp as n2g
from net2gp import bayes

torch.set_num_threads(1)
NOISE = n2g.Gaussian(noise_var=0.01)


def problem() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    x = torch.linspace(-2, 2, 40)[:, None]
    data = x, torch.sin(2 * x) + 0.1 * torch.randn(40, 1)
    return nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1)).eval(), data


def ways(network: nn.Module, data: Any, quick: bool) -> dict[str, Callable[[], Any]]:
    given = network, data, NOISE
    trained = lambda: bayes.module_of(bayes.map_estimate(*given))
    start = lambda: bayes.ensemble(*given)
    short = {"num_draws": 300, "warmup": 300}
    found = {
        "nuts, 300 draws after 300": lambda: bayes.nuts(*given, **short),
        "ensemble": lambda: bayes.ensemble(*given),
        "ensemble of 20": lambda: bayes.ensemble(*given, num_members=20),
        "ensemble of 20, randomized": lambda: bayes.ensemble(
            *given, num_members=20, randomized=True
        ),
        "ensemble of 20, bootstrap": lambda: bayes.ensemble(*given, num_members=20, bootstrap=True),
        "multi_swag": lambda: bayes.multi_swag(*given),
        "multi_swag, batch_size=10": lambda: bayes.multi_swag(
            *given, training=bayes.Training(batch_size=10)
        ),
        "mean_field": lambda: bayes.mean_field(*given),
        "laplace around map_estimate": lambda: n2g.laplace(trained(), data, NOISE, prior_var=1.0),
        "microcanonical from an ensemble": lambda: bayes.microcanonical(*given, start=start()),
        "microcanonical, thin=10": lambda: bayes.microcanonical(*given, start=start(), thin=10),
        "sghmc from an ensemble": lambda: bayes.sghmc(*given, start=start()),
        "sghmc, thin=20": lambda: bayes.sghmc(*given, start=start(), thin=20),
        "sgld from an ensemble": lambda: bayes.sgld(*given, start=start()),
    }
    if not quick:
        found["nuts"] = lambda: bayes.nuts(*given)
        found["hmc"] = lambda: bayes.hmc(*given)
    return found


def mixed(posterior: Any, x: torch.Tensor) -> str:
    try:
        found = bayes.diagnose(posterior, x[::6])
    except n2g.errors.NotAvailable:
        return ""
    return f"{found.worst_r_hat:.3f} ({found.least_ess:.0f} effective draws)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="leave out nuts and hmc with all draws"
    )
    quick = parser.parse_args().quick
    warnings.simplefilter("ignore")
    grid = torch.linspace(-3, 3, 61)[:, None]
    inside = (grid.abs() <= 2).flatten()
    reference = None
    print("| method | CPU seconds | width between the data | outside | R̂ |\n|---|---|---|---|---|")
    for name, way in ways(*problem(), quick).items():
        start = time.process_time()
        posterior = way()
        seconds = time.process_time() - start
        deviations = posterior.marginal(grid).variance.sqrt().flatten()
        reference = deviations if reference is None else reference
        ratio = deviations / reference
        widths = f"{float(ratio[inside].median()):.2f} | {float(ratio[~inside].median()):.2f}"
        print(f"| {name} | {seconds:.1f} | {widths} | {mixed(posterior, grid)} |", flush=True)


if __name__ == "__main__":
    main()
