"""Priors of weights: their densities, what they do to an estimate, and the functions that they give.

    python papers/lecture/priors.py --out figures [--quick]

Stated before the run:

- a Gaussian whose variance is random has a closed form: variances from IG(5/2, 5/2) give Student's law
  with five degrees of freedom, 0.219679797 at 1, variances from Exp(1/2) Laplace's law with b = 1, and
  so e^−1/2 = 0.183939721, and variances from Gamma(2, 1) the density 0.207513113;
- draws have the variances and kurtoses of their laws;
- the most probable weights are sparser under Laplace's prior than under a Gaussian one of the same
  variance;
- functions of a network with one hidden layer and independent Gaussian weights have the variance of the
  NNGP, whatever the width; at width 100 they are nearly Gaussian;
- Cauchy weights in the last layer have no central limit, so functions far beyond six standard
  deviations stay common. Student's weights with three degrees of freedom have a variance, and a hundred
  of them are close to a Gaussian: about 4.55 % of functions are beyond two standard deviations, and by
  the tail of one unit about 0.02 % beyond six;
- one variance v ~ IG(3/2, 1/2) for the last layer makes f(x) a Student-t variable with three degrees of
  freedom, which is beyond six standard deviations of the Gaussian in 0.19 % of draws, and makes
  functions large or small as a whole: |f(x)| and |f(x')| are correlated.

Neal (1996), "Bayesian learning for neural networks"; Fortuin (2022), "Priors in Bayesian deep
learning".
"""

from __future__ import annotations

import math

import torch
from common import Study, Topic, at_least, at_most, panels, run, tidy
from matplotlib.figure import Figure
from scipy.stats import t as student_t
from torch import Tensor, nn

import net2gp as n2g
from net2gp import bayes
from net2gp.plots import COLORS, FAINT, INK

KNOWN = {
    "inverse gamma(5/2, 5/2): Student's t": (bayes.InverseGamma(2.5, 2.5), 0.219679797),
    "exponential(1/2): Laplace": (bayes.Exponential(0.5), math.exp(-1) / 2),
    "gamma(2, 1): variance gamma": (bayes.Gamma(2.0, 1.0), 0.207513113),
}
"""Mixing laws and the densities of their mixtures at 1."""

WIDTH = 100


def density(prior: bayes.WeightPrior, at: Tensor) -> Tensor:
    """The density of one weight."""
    return torch.stack([prior.log_prob({"weight": value.reshape(1)}) for value in at]).exp()


def moments(prior: bayes.WeightPrior, count: int) -> tuple[float, float, float]:
    """Of draws: the variance, its standard error, and the kurtosis."""
    start = {"weight": torch.zeros(1, dtype=torch.float64)}
    w = prior.sample(start, count, torch.Generator().manual_seed(0))["weight"][:, 0]
    squares = w.square()
    error = squares.std() / count**0.5
    return float(squares.mean()), float(error), float(w.pow(4).mean() / squares.mean().square())


def small_weights(count: int) -> dict[str, Tensor]:
    """The most probable weights of a linear model of 20 inputs, of which two matter."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 20, generator=generator, dtype=torch.float64)
    y = (
        x[:, :1]
        - 2 * x[:, 1:2]
        + 0.5 * torch.randn(40, 1, generator=generator, dtype=torch.float64)
    )
    found = {}
    for name, prior in (
        ("Gaussian", bayes.NormalPrior(0.01)),
        ("Laplace", bayes.LaplacePrior(0.01)),
    ):
        training = bayes.Training(num_steps=count, learning_rate=0.02, batch_size=None)
        linear = nn.Linear(20, 1, bias=False).double()
        best = bayes.map_estimate(
            linear, (x, y), n2g.Gaussian(0.25), prior=prior, training=training
        )
        found[name] = bayes.module_of(best).weight.detach()[0]
    return found


def share_near_zero(weights: Tensor) -> float:
    """The share of weights below a hundredth of the largest."""
    return float((weights.abs() < 0.01 * weights.abs().max()).double().mean())


def scale_mixtures(quick: bool) -> Study:
    """Densities of scale mixtures, moments of draws, and sparsity."""
    figure, axes = panels(2)
    at = torch.linspace(-6, 6, 121, dtype=torch.float64)
    made = []
    axes[0].plot(at, density(bayes.NormalPrior(1.0), at), color=INK, label="Gaussian")
    for color, (name, (mixing, value)) in zip(COLORS, KNOWN.items(), strict=False):
        prior = bayes.ScaleMixture(mixing, "weight")
        axes[0].plot(at, density(prior, at), color=color, label=name)
        found = float(density(prior, torch.ones(1, dtype=torch.float64)))
        made.append(at_most(f"{name}: density at 1 less {value:.9f}", abs(found - value), 1e-8))
    axes[0].set(
        yscale="log", ylim=(1e-6, 1), xlabel="weight", ylabel="density", title="Random variances"
    )
    axes[0].legend(frameon=False, labelcolor=INK, fontsize=7, loc="lower center")
    laws = {
        "Gaussian": (bayes.NormalPrior(2.0), 2.0, 3.0),
        "Laplace": (bayes.LaplacePrior(2.0), 2.0, 6.0),
        "gamma(2, 1) mixture": (bayes.ScaleMixture(bayes.Gamma(2.0, 1.0), "weight"), 2.0, 4.5),
    }
    for name, (prior, variance, kurtosis) in laws.items():
        mean, error, fourth = moments(prior, 200_000)
        made.append(
            at_most(f"{name}: errors of the variance of draws", abs(mean - variance) / error, 4)
        )
        made.append(
            at_most(
                f"{name}: kurtosis of draws beside {kurtosis:g}", abs(fourth / kurtosis - 1), 0.05
            )
        )
    weights = small_weights(2000 if quick else 6000)
    for place, (name, values) in enumerate(weights.items()):
        axes[1].plot(range(1, 21), values, "o", color=COLORS[place], ms=4, label=name)
    axes[1].axhline(0, color=FAINT, linewidth=1)
    axes[1].set(xlabel="input", ylabel="most probable weight", title="Two of 20 inputs matter")
    axes[1].legend(frameon=False, labelcolor=INK, fontsize=8)
    for ax in axes:
        tidy(ax)
    shares = {name: share_near_zero(values) for name, values in weights.items()}
    made.append(
        at_least(
            "share of weights near zero, Laplace less Gaussian",
            shares["Laplace"] - shares["Gaussian"],
            0.25,
        )
    )
    return Study(
        "scale_mixtures",
        "Priors of weights: Gaussian, sparse and heavy-tailed",
        f"""A Gaussian with a random variance (`bayes.ScaleMixture`) has heavier tails than a Gaussian.
Laplace's prior is one of these mixtures, and its peak at zero makes estimates sparse: of 20 weights
{20 * shares["Laplace"]:.0f} are below a hundredth of the largest, and {20 * shares["Gaussian"]:.0f} under
a Gaussian prior of the same variance (`bayes.map_estimate`).""",
        figure,
        tuple(made),
    )


def laws_of_functions(network: nn.Module) -> dict[str, bayes.WeightPrior]:
    """Priors of the same scale, by name."""
    normal = bayes.NormalPrior.by_fan_in(network, {"0": 25.0, "2": 1.0}, {"0": 25.0, "2": 0.1})
    scales = normal.variance
    last = {name: v for name, v in scales.items() if name.startswith("2")}
    return {
        "Gaussian": normal,
        "Laplace in the last layer": bayes.PriorByName(
            {"*": normal, "2.*": bayes.LaplacePrior(last)}
        ),
        "Student's t, ν = 3, all layers": bayes.StudentTPrior(
            {n: v / 3 for n, v in scales.items()}, 3.0
        ),
        "Cauchy in the last layer": bayes.PriorByName(
            {"*": normal, "2.*": bayes.StudentTPrior({"*": 1e-4, "*.bias": 0.1}, 1.0)}
        ),
        "horseshoe": bayes.Horseshoe({name: v / 30 for name, v in scales.items()}),
        "one variance per layer": bayes.ScaleMixture(bayes.InverseGamma(1.5, 0.5), "layer", scales),
    }


def correlation(one: Tensor, other: Tensor) -> float:
    """Of ranks, since heavy tails have no moments."""
    ranks = torch.stack([v.argsort().argsort().double() for v in (one, other)])
    return float(torch.corrcoef(ranks)[0, 1])


def prior_functions(quick: bool) -> Study:
    """Functions drawn from a network under six priors."""
    count = 4000 if quick else 20_000
    network = nn.Sequential(nn.Linear(1, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)).double().eval()
    x = torch.linspace(-3, 3, 121, dtype=torch.float64)[:, None]
    limit = n2g.nngp(network, weight_var={"0": 25.0, "2": 1.0}, bias_var={"0": 25.0, "2": 0.1})
    spread = limit.diag(x).sqrt()
    figure = Figure(figsize=(12.6, 6.2), layout="constrained")
    drawn: dict[str, Tensor] = {}
    for ax, (name, prior) in zip(
        figure.subplots(2, 3).flat, laws_of_functions(network).items(), strict=True
    ):
        generator = torch.Generator().manual_seed(1)
        f = bayes.prior_functions(network, prior, count, generator=generator)(x)[:, :, 0].detach()
        drawn[name] = f / spread
        ax.fill_between(x[:, 0], -2 * spread, 2 * spread, color=FAINT, alpha=0.35, linewidth=0)
        for one, color in zip(f[:7], 2 * COLORS, strict=False):
            ax.plot(x[:, 0], one, color=color, linewidth=1.2)
        far = float((drawn[name][:, 80].abs() > 6).double().mean())
        ax.set_title(f"{name}: {far:.2%} beyond 6 deviations", fontsize=9)
        ax.set(ylim=(-5, 5), xlabel="x", ylabel="f(x)")
        tidy(ax)
    squares = drawn["Gaussian"].square()
    errors = (squares.mean(0) - 1).abs() / (squares.std(0) / count**0.5)
    beyond = {name: float((f[:, 80].abs() > 6).double().mean()) for name, f in drawn.items()}
    tail = float((drawn["Gaussian"][:, 80].abs() > 2).double().mean())
    student = drawn["Student's t, ν = 3, all layers"][:, 80].abs()
    expected = 2 * float(student_t.sf(6 * 3**0.5, 3))
    scale = (expected / count) ** 0.5
    sizes = {
        name: correlation(drawn[name][:, 0].abs(), drawn[name][:, 80].abs())
        for name in ("Gaussian", "one variance per layer")
    }
    return Study(
        "prior_functions",
        "Functions before data",
        f"""What a prior of weights means is seen in its functions (`bayes.prior_functions`): seven
draws of a network with {WIDTH} tanh units under each prior. The grey band is ±2 standard deviations of
the NNGP, the limit of the Gaussian prior. With heavy-tailed weights some functions jump at a single
unit, and with one variance per layer whole functions are large or small.""",
        figure,
        (
            at_most(
                "Gaussian: errors of the variance from the NNGP's, worst of 121 points",
                float(errors.max()),
                4.5,
            ),
            at_most("Gaussian: share beyond 2 deviations less 4.55 %", abs(tail - 0.0455), 0.015),
            at_most("Gaussian: share beyond 6 deviations", beyond["Gaussian"], 1e-3),
            at_most(
                "Student's t: share beyond 2 deviations less 4.55 %",
                abs(float((student > 2).double().mean()) - 0.0455),
                0.02,
            ),
            at_least("Cauchy: share beyond 6 deviations", beyond["Cauchy in the last layer"], 1e-2),
            at_most(
                f"one variance per layer: errors of the share beyond 6 from {expected:.2%}",
                abs(beyond["one variance per layer"] - expected) / scale,
                4,
            ),
            at_least(
                "rank correlation of |f(−3)| and |f(1)|, one variance per layer less Gaussian",
                sizes["one variance per layer"] - sizes["Gaussian"],
                0.1,
            ),
        ),
    )


TOPICS: list[Topic] = [scale_mixtures, prior_functions]

if __name__ == "__main__":
    raise SystemExit(run(TOPICS, __doc__))
