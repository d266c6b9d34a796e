"""From a Gaussian process to a network: a prior that is stated for functions, as a prior of weights.

    python papers/lecture/gp_to_network.py --out figures [--quick]

`bayes.network_like` finds depth, activation and variances of a network whose infinitely wide limit is a
given Gaussian process. Stated before the run:

- an RBF process, a periodic one with a trend, and the NNGP of a ReLU network are met: the limit's
  kernel is within 1e-4 of the target's in relative Frobenius norm;
- draws of the finite network have the covariance of the process: the error of S draws is that of S
  draws from the process itself, times at most 1.5;
- given data, the network with that prior has the posterior of the process: the mean of Hamiltonian
  chains of a network of 64 units is within 0.15 standard deviations of the prior;
- and back: weights drawn from a posterior, put into modules, are the functions that the posterior
  draws.

Williams (1997), "Computing with infinite networks"; Pearce et al. (2019), "Expressive priors in
Bayesian neural networks".
"""

from __future__ import annotations

import warnings

import torch
from common import WIDTH, Claim, Study, Topic, at_most, panels, run, tidy
from matplotlib.figure import Figure
from torch import Tensor, nn

import net2gp as n2g
from net2gp import bayes
from net2gp.kernels import RBF, BaseKernel, Linear, Periodic
from net2gp.plots import COLORS, FAINT, INK

NOISE = n2g.Gaussian(noise_var=0.01)


def targets() -> dict[str, tuple[BaseKernel, bayes.Family | None]]:
    """Processes by name, each with the shapes to search; None searches all."""
    relu = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1)).double()
    periodic = bayes.Family(("rbf",), depths=(1,), trends=(True,), period=1.0)
    return {
        "RBF, length scale 0.5": (RBF(lengthscale=0.5, output_var=1.0), None),
        "period 1 with a trend": (
            Periodic(period=1.0, lengthscale=1.0) + Linear(weight_var=0.5),
            periodic,
        ),
        "NNGP of a ReLU layer": (
            n2g.nngp(relu, weight_var=2.0, bias_var=0.5),
            bayes.Family(("relu",), depths=(1,), trends=(False,)),
        ),
    }


def draws_of(kernel: BaseKernel, x: Tensor, count: int) -> Tensor:
    """Functions of the Gaussian process at the points: (S, N)."""
    K = kernel(x)
    values, vectors = torch.linalg.eigh(K)
    root = vectors * values.clamp(min=0).sqrt()
    return (
        torch.randn(count, len(x), generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        @ root.T
    )


def error_of(draws: Tensor, K: Tensor) -> float:
    """Of the second moments of draws, relative."""
    return float((draws.T @ draws / len(draws) - K).norm() / K.norm())


def gp_to_network(quick: bool) -> Study:
    """Draws of processes beside draws of the networks that were found for them."""
    count, width = (2000, 512) if quick else (10_000, 1024)
    x = torch.linspace(-2, 2, 81, dtype=torch.float64)[:, None]
    figure = Figure(figsize=(3 * WIDTH, 5.6), layout="constrained")
    grid = figure.subplots(2, 3, sharex=True)
    made: list[Claim] = []
    for column, (name, (kernel, family)) in enumerate(targets().items()):
        options = {} if family is None else {"family": family}
        match = bayes.network_like(kernel, x, width=width, **options)
        K = kernel(x)
        print(f"{name}: {match}")
        generator = torch.Generator().manual_seed(1)
        rows = {
            "process": draws_of(kernel, x, count),
            "network": match.sample(x, count, generator=generator)[..., 0].detach(),
        }
        for ax, (kind, draws) in zip(grid[:, column], rows.items(), strict=True):
            sd = K.diagonal().sqrt()
            ax.fill_between(x[:, 0], -2 * sd, 2 * sd, color=FAINT, alpha=0.35, linewidth=0)
            for one, color in zip(draws[:6], COLORS, strict=False):
                ax.plot(x[:, 0], one, color=color, linewidth=1.2)
            ax.set_title(f"{kind}: {name}", fontsize=9)
            ax.set_ylim(-4.5, 4.5)
            tidy(ax)
        made.append(at_most(f"{name}: distance of the limit's kernel", match.distance, 1e-4))
        ratio = error_of(rows["network"], K) / error_of(rows["process"], K)
        made.append(
            at_most(f"{name}: error of {count} networks beside {count} functions", ratio, 1.5)
        )
    return Study(
        "gp_to_network",
        "From a Gaussian process to a network",
        f"""Above: functions of Gaussian processes. Below: networks of width {width}, whose depth,
activation and variances `bayes.network_like` has found for these processes, with weights drawn from the
prior that it returns. Bands: ±2 standard deviations of the process.""",
        figure,
        tuple(made),
    )


def there_and_back(quick: bool) -> Study:
    """The posterior of a network that was made for a process, and its weights as modules."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(8, 1, generator=generator, dtype=torch.float64) * 3 - 1.5
    y = (2.5 * x).sin() + 0.1 * torch.randn(8, 1, generator=generator, dtype=torch.float64)
    at = torch.linspace(-2, 2, 81, dtype=torch.float64)[:, None]
    kernel = RBF(lengthscale=0.5, output_var=1.0)
    match = bayes.network_like(kernel, at, width=64)
    process = n2g.condition(kernel, (x, y), NOISE).marginal(at)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", n2g.errors.Divergences)
        draws, warmup = (100, 200) if quick else (500, 500)
        posterior = bayes.hmc(
            match.module,
            (x, y),
            NOISE,
            prior=match.prior,
            num_draws=draws,
            num_chains=16,
            warmup=warmup,
        )
    law = posterior.marginal(at)
    weights = posterior.sample_weights(5, generator=torch.Generator().manual_seed(3))
    modules = [bayes.module_with(match.module, weights, index) for index in range(5)]
    values = posterior.sample(at, 5, generator=torch.Generator().manual_seed(3))[..., 0]
    again = torch.stack([module(at).detach()[:, 0] for module in modules])
    figure, axes = panels(2)
    for mean, variance, color, name in (
        (process.mean, process.variance, INK, "process"),
        (law.mean, law.variance, COLORS[0], "network, by chains"),
    ):
        middle, sd = mean[:, 0].detach(), variance[:, 0].detach().sqrt()
        axes[0].plot(at[:, 0], middle, color=color, label=f"{name}, mean ± 2 deviations")
        for sign in (-2, 2):
            axes[0].plot(at[:, 0], middle + sign * sd, "--", color=color, linewidth=1)
    for value, module in zip(values, again, strict=True):
        axes[1].plot(at[:, 0], value.detach(), color=FAINT, linewidth=4)
        axes[1].plot(at[:, 0], module, color=COLORS[1], linewidth=1)
    axes[0].legend(frameon=False, labelcolor=INK, fontsize=8, loc="upper left")
    axes[0].set(title="Posterior of both", xlabel="x", ylim=(-3, 4))
    axes[1].set(title="Draws (grey) and modules of their weights", xlabel="x")
    for ax in axes:
        ax.plot(x, y, "o", color=INK, ms=4)
        tidy(ax)
    apart = float((law.mean - process.mean).square().mean().sqrt())
    return Study(
        "there_and_back",
        "A prior of functions, given to a network, and back",
        """Left: the posterior of an RBF process given eight points, and of a network of 64 units with
the prior that was found for it, by Hamiltonian chains. Right: weights that the chains drew, and modules
that hold them (`bayes.module_with`): the same functions.""",
        figure,
        (
            at_most("distance of the posterior means, in deviations of the prior", apart, 0.15),
            at_most(
                "modules less the functions that were drawn",
                float((again - values).detach().abs().max()),
                1e-12,
            ),
        ),
    )


TOPICS: list[Topic] = [gp_to_network, there_and_back]

if __name__ == "__main__":
    raise SystemExit(run(TOPICS, __doc__))
