"""Bayesian inference of a network: prior times likelihood, and three ways to the posterior.

    python papers/lecture/inference.py --out figures [--quick]

Markov chains, variational inference and Laplace's approximation for two models. Of a linear model of
two weights the posterior is known. Stated before the run:

- log p(θ, y) = log p(θ) + log p(y | θ), and the posterior of the linear model is what Gaussian algebra
  gives;
- Laplace's approximation of the linear model is exact, NUTS has its mean within four Monte Carlo errors
  and its covariance within 5 %, with R̂ < 1.01 and more than 400 effective draws;
- mean-field inference finds the mean, and 1/diag(precision) for the variances, which is too little: it
  leaves out the correlation;
- for a network of ten tanh units, variational inference spreads less than the chains do away from the
  data, since KL(q ‖ p) punishes mass where p has none, and every method is less sure away from the data
  than at the data. This did not hold for mean field in the first run, and is an exception.

MacKay (1992), "A practical Bayesian framework for backpropagation networks"; Neal (1996), "Bayesian
learning for neural networks"; Blundell et al. (2015), "Weight uncertainty in neural networks".
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from common import Claim, Study, Topic, at_least, at_most, mlp, panels, run, tidy
from matplotlib.axes import Axes
from torch import Tensor, nn

import net2gp as n2g
from net2gp import bayes
from net2gp.plots import COLORS, FAINT, INK

NOISE = n2g.Gaussian(noise_var=0.25)
SMALL_NOISE = n2g.Gaussian(noise_var=0.01)
Points = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Linear:
    """Two correlated inputs, twelve points, and the posterior N(mean, precision⁻¹) in closed form."""

    network: nn.Module
    points: Points
    mean: Tensor
    precision: Tensor

    @staticmethod
    def problem() -> Linear:
        """A prior of variance 1."""
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(12, 2, generator=generator, dtype=torch.float64)
        x[:, 1] = 0.8 * x[:, 0] + 0.6 * x[:, 1]
        noise = 0.5 * torch.randn(12, 1, generator=generator, dtype=torch.float64)
        y = x @ torch.tensor([[1.0], [-0.5]], dtype=torch.float64) + noise
        precision = x.T @ x / 0.25 + torch.eye(2, dtype=torch.float64)
        mean = torch.linalg.solve(precision, x.T @ y / 0.25)[:, 0]
        network = nn.Linear(2, 1, bias=False).double().eval()
        with torch.no_grad():
            network.weight.copy_(mean[None])
        return Linear(network, (x, y), mean, precision)


def ellipse(ax: Axes, mean: Tensor, covariance: Tensor, color: str, label: str) -> None:
    """The curve of two standard deviations."""
    angle = torch.linspace(0, 2 * torch.pi, 200, dtype=torch.float64)
    circle = torch.stack([angle.cos(), angle.sin()])
    at = mean[:, None] + 2 * torch.linalg.cholesky(covariance) @ circle
    ax.plot(at[0], at[1], color=color, label=label)


def recipe(quick: bool) -> Study:
    """The posterior of a linear model by three methods, beside the closed form."""
    given = Linear.problem()
    exact = given.precision.inverse()
    chains, draws = 16, (1000 if quick else 2000)
    sampled = bayes.nuts(
        given.network, given.points, NOISE, num_draws=draws, num_chains=chains, warmup=500
    )
    found = bayes.diagnose(sampled, given.points[0])
    w = sampled.process.members.values["weight"].double().reshape(chains, -1, 2)
    means = w.mean(1)
    apart = (means.mean(0) - given.mean).abs() / (means.std(0) / chains**0.5)
    sample = torch.cov(w.flatten(0, 1).T)
    factorized = bayes.mean_field(given.network, given.points, NOISE, num_steps=8000, num_samples=8)
    q_mean, q_var = (
        getattr(factorized.recipe.weights, key)["weight"].detach().double()[0]
        for key in ("mean", "variance")
    )
    around = n2g.laplace(given.network, given.points, NOISE, prior_var=1.0)
    covariance = around.joint(torch.eye(2, dtype=torch.float64)).covariance_matrix
    model = bayes.Model.of(given.network, NOISE, 1.0)
    some = {"weight": torch.tensor([[0.3, -0.7]], dtype=torch.float64)}
    parts = model.log_prior(some) + model.log_likelihood(some, given.points)
    curve = lambda theta: model.log_joint({"weight": theta[None]}, given.points)
    hessian = -torch.func.hessian(curve)(given.mean)
    figure, (ax,) = panels(1, 4.2)
    figure.set_figwidth(6.0)
    ax.plot(*w.flatten(0, 1)[::8].T, ".", color=FAINT, ms=1.5, zorder=0)
    ellipse(ax, given.mean, exact, INK, "closed form, Laplace")
    ellipse(ax, means.mean(0), sample, COLORS[0], "NUTS")
    ellipse(ax, q_mean, q_var.diag(), COLORS[1], "mean field")
    ax.set(xlabel="weight 1", ylabel="weight 2", title="Two standard deviations of the posterior")
    ax.legend(frameon=False, labelcolor=INK, fontsize=8)
    tidy(ax)
    return Study(
        "recipe",
        "Prior times likelihood",
        """A linear model of two inputs that go together, so that data say more about the sum of its
weights than about each of them. `bayes.nuts` draws from the posterior, `laplace` is exact for a linear
model, and `bayes.mean_field` has the right mean, but an upright ellipse that is too small.""",
        figure,
        (
            at_most(
                "log joint less log prior and log likelihood",
                float((model.log_joint(some, given.points) - parts).abs()),
                1e-12,
            ),
            at_most(
                "curvature of the log joint beside the precision",
                float((hessian / given.precision - 1).abs().max()),
                1e-10,
            ),
            at_most(
                "Laplace: covariance beside the closed form",
                float((covariance / exact - 1).abs().max()),
                1e-8,
            ),
            at_most("NUTS: errors of the mean", float(apart.max()), 4),
            at_most(
                "NUTS: covariance beside the closed form",
                float((sample - exact).norm() / exact.norm()),
                0.05,
            ),
            at_most("NUTS: largest R̂", found.worst_r_hat, 1.01),
            at_least("NUTS: smallest effective sample size", found.least_ess, 400),
            at_most(
                "mean field: mean, in standard deviations",
                float(((q_mean - given.mean) / exact.diagonal().sqrt()).abs().max()),
                0.05,
            ),
            at_most(
                "mean field: variances beside 1/diag(precision)",
                float((q_var * given.precision.diagonal() - 1).abs().max()),
                0.02,
            ),
            at_most(
                "mean field: variances beside the marginal ones",
                float((q_var / exact.diagonal()).max()),
                0.9,
            ),
        ),
    )


def curve_points() -> Points:
    """Two clusters of points of a sine."""
    generator = torch.Generator().manual_seed(1)
    x = torch.cat([torch.linspace(-1.6, -0.6, 12), torch.linspace(0.6, 1.6, 12)]).double()[:, None]
    return x, (2 * x).sin() + 0.1 * torch.randn(x.shape, generator=generator, dtype=torch.float64)


def methods(quick: bool) -> dict[str, Callable[[Points], n2g.Posterior]]:
    """From data to a posterior of a network of ten units, by name."""
    network = mlp(1, 10, 1, activation=nn.Tanh).double().eval()
    prior = bayes.NormalPrior({"*": 4.0, "2.*": 1.0})
    steps = bayes.Training(num_steps=2000, learning_rate=0.02, batch_size=None)

    def chains(points: Points) -> n2g.Posterior:
        draws, warmup = (100, 200) if quick else (500, 800)
        return bayes.nuts(
            network, points, SMALL_NOISE, prior=prior, num_draws=draws, num_chains=8, warmup=warmup
        )

    def best(points: Points) -> n2g.Posterior:
        return bayes.map_estimate(network, points, SMALL_NOISE, prior=prior, training=steps)

    def around(points: Points) -> n2g.Posterior:
        variances = {"*": 4.0, "2.*": 1.0}
        return n2g.laplace(bayes.module_of(best(points)), points, SMALL_NOISE, prior_var=variances)

    def factorized(points: Points) -> n2g.Posterior:
        start = bayes.module_of(best(points))
        return bayes.mean_field(
            start, points, SMALL_NOISE, prior=prior, num_steps=4000 if quick else 10_000
        )

    return {"NUTS": chains, "Laplace": around, "mean field": factorized}


def grows(name: str, ratio: float) -> Claim:
    """That a posterior spreads more away from the data than at the data."""
    claim = at_least(f"{name}: spread away from the data beside at the data", ratio, 2)
    if name != "mean field":
        return claim
    reason = "tanh units are flat far away, and mean field has no correlations that cancel at the data only"
    return replace(claim, exception=reason, stale=claim.holds)


def network_posteriors(quick: bool) -> Study:
    """The posterior of a small network by the same three methods."""
    points = curve_points()
    at = torch.linspace(-4, 4, 161, dtype=torch.float64)[:, None]
    size = at[:, 0].abs()
    inside, away = (size > 0.6) & (size < 1.6), size > 3
    figure, axes = panels(3)
    spreads: dict[str, Tensor] = {}
    for ax, color, (name, fit) in zip(axes, COLORS, methods(quick).items(), strict=False):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", n2g.errors.Divergences)
            warnings.simplefilter("ignore", n2g.errors.NotStationary)
            start = time.perf_counter()
            posterior = fit(points)
        print(f"{name}: {time.perf_counter() - start:.1f} s")
        law = posterior.marginal(at)
        mean, sd = law.mean[:, 0].detach(), law.variance[:, 0].detach().sqrt()
        spreads[name] = sd
        ax.fill_between(
            at[:, 0], mean - 2 * sd, mean + 2 * sd, color=color, alpha=0.25, linewidth=0
        )
        ax.plot(at[:, 0], mean, color=color)
        ax.plot(*points, ".", color=INK)
        ax.set(title=name, xlabel="x", ylim=(-6, 6))
        tidy(ax)
    at_data = {name: float(sd[inside].mean()) for name, sd in spreads.items()}
    beyond = {name: float(sd[away].mean()) for name, sd in spreads.items()}
    return Study(
        "network_posteriors",
        "Three approximations of a network's posterior",
        """A network of ten tanh units and 24 points. Chains are the reference: they draw from the
posterior itself. Laplace's Gaussian around the most probable weights, with the network linearized
there, and mean-field inference are fast, and see one mode. Bands: mean ± 2 standard deviations of f.""",
        figure,
        (
            at_most(
                "mean field: spread away from the data beside NUTS",
                beyond["mean field"] / beyond["NUTS"],
                1.0,
            ),
            *(grows(name, beyond[name] / at_data[name]) for name in spreads),
        ),
    )


TOPICS: list[Topic] = [recipe, network_posteriors]

if __name__ == "__main__":
    raise SystemExit(run(TOPICS, __doc__))
