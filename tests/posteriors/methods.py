"""The registry of posteriors that a method finds, beside those that `condition` gives (ways.py).

A new method or structure joins the laws of every posterior by one line in METHODS.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import net2gp as n2g
from contributing import example
from net2gp.bayes import average, compose
from net2gp.errors import Net2GPWarning, NotStationary
from net2gp.likelihoods import NegativeBinomial, Ordinal, Poisson, StudentT
from net2gp.posteriors.recipes.drawn import drawn_posterior
from net2gp.posteriors.recipes.members import Members
from net2gp.types import Likelihood
from posteriors.ways import (
    WAYS,
    Way,
    binary_targets,
    built,
    class_targets,
    count_targets,
    level_targets,
    network,
    points,
    real_targets,
)

NOISY = n2g.Gaussian(0.1)
Make = Callable[[nn.Sequential, Tensor, Tensor, Likelihood], Any]


def by_adapt(**options: Any) -> Make:
    return lambda model, x, y, likelihood: n2g.adapt(model, (x, y), likelihood, **options)


def by_tasks(model: nn.Sequential, x: Tensor, y: Tensor, likelihood: Likelihood) -> Any:
    return n2g.adapt_tasks(model, {"this": (x, y), "that": (x[:9], -y[:9])}, likelihood)["this"]


def by_tune(model: nn.Sequential, x: Tensor, y: Tensor, likelihood: Likelihood) -> Any:
    kernel = n2g.linearize(model).kernel()
    return n2g.tune(
        lambda noise_var: n2g.condition(kernel, (x, y), n2g.Gaussian(noise_var)), noise_var=0.3
    )


def by_dual(model: nn.Sequential, x: Tensor, y: Tensor, likelihood: Likelihood) -> Any:
    return by_laplace(n2g.Full())(model, x, y, likelihood).dual().condition()


def by_gaussian_process(model: nn.Sequential, x: Tensor, y: Tensor, likelihood: Likelihood) -> Any:
    return by_laplace(n2g.Full())(model, x, y, likelihood).dual().gaussian_process()


def by_natural_gradients(kind: Any) -> Make:
    def make(model: nn.Sequential, x: Tensor, y: Tensor, likelihood: Likelihood) -> Any:
        optimizer = kind(model, likelihood, len(x), prior_var=0.7, learning_rate=0.05)
        for _ in range(5):
            optimizer.step(x, y)
        return optimizer.posterior((x, y))

    return make


def by_evidence(structure: Any) -> Make:
    def make(model: nn.Sequential, x: Tensor, y: Tensor, likelihood: Likelihood) -> Any:
        schedule = n2g.training.Schedule(num_epochs=12, burn_in=5, learning_rate=1e-2)
        return n2g.training.train_by_evidence(
            model, (x, y), likelihood, structure=structure, schedule=schedule
        )

    return make


def by_laplace(structure: Any) -> Make:
    return lambda model, x, y, likelihood: n2g.laplace(
        model, (x, y), likelihood, structure=structure, prior_var=0.7
    )


by_vogn = by_natural_gradients(n2g.training.VOGN)


def by_ivon(model: nn.Sequential, x: Tensor, y: Tensor, likelihood: Likelihood) -> Any:
    model.train()
    optimizer = n2g.training.IVON(model, len(x), prior_var=0.7, learning_rate=0.05)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = -likelihood.log_prob(model(x), y).mean()
        loss.backward()
        return loss

    for _ in range(5):
        optimizer.step(closure)
    model.eval()
    return optimizer.posterior((x, y), likelihood)


def by_swag(model: nn.Sequential, x: Tensor, y: Tensor, likelihood: Likelihood) -> Any:
    optimizer, swag = torch.optim.SGD(model.parameters(), lr=0.05), n2g.training.Swag(rank=4)
    for _ in range(8):
        optimizer.zero_grad()
        (-likelihood.log_prob(model(x), y).mean()).backward()
        optimizer.step()
        swag = swag.collect(model)
    return swag.posterior(model, (x, y), likelihood, prior_var=0.7)


def by_variances(model: nn.Sequential, x: Tensor, y: Tensor, likelihood: Likelihood) -> Any:
    count = sum(p.numel() for p in model.parameters())
    variance = torch.linspace(0.1, 0.6, count, dtype=torch.float64)
    return n2g.training.from_variances(model, variance, (x, y), likelihood, prior_var=0.7)


def by_networks(model: nn.Sequential, x: Tensor, y: Tensor, likelihood: Likelihood) -> Any:
    """Networks around the given one, as draws or an ensemble would be."""
    architecture, generator = n2g.linearize(model), torch.Generator().manual_seed(0)
    values = {
        name: value + 0.1 * torch.randn(40, *value.shape, generator=generator, dtype=value.dtype)
        for name, value in architecture.params.items()
    }
    prior = n2g.bayes.NormalPrior(0.7)
    return drawn_posterior(Members(architecture, values), likelihood, (x, y), prior=prior)


def by_bayes(method: str, **options: Any) -> Make:
    """A method of the Bayesian room with so little work that its posterior is there within a second."""

    def make(model: nn.Sequential, x: Tensor, y: Tensor, likelihood: Likelihood) -> Any:
        find = getattr(n2g.bayes, method)
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", Net2GPWarning
            )  # chains of this length have not converged
            return find(model, (x, y), likelihood, **options)

    return make


def by_sum(*makes: Make) -> Make:
    """The average of posteriors, whose likelihood is that of the case."""

    def make(model: nn.Sequential, x: Tensor, y: Tensor, likelihood: Likelihood) -> Any:
        return average([each(model, x, y, likelihood) for each in makes], likelihood=likelihood)

    return make


def by_composition(model: nn.Sequential, x: Tensor, y: Tensor, likelihood: Likelihood) -> Any:
    """A posterior of a posterior of a function of the inputs to themselves."""
    inner = n2g.condition(n2g.linearize(network(2)).kernel(0.1), (x, 0.9 * x), NOISY)
    return compose(by_adapt(prior_var=0.5)(model, x, y, likelihood), inner)


def by_mixture(*makes: Make) -> Make:
    def make(model: nn.Sequential, x: Tensor, y: Tensor, likelihood: Likelihood) -> Any:
        moved = [copy.deepcopy(model) for _ in makes]
        with torch.no_grad():
            for index, network in enumerate(moved):
                next(network.parameters()).add_(0.1 * index)
        parts = [one(net, x, y, likelihood) for one, net in zip(makes, moved, strict=True)]
        return n2g.bayes.mixture(parts, [1.0, 2.0])

    return make


def by_deep(*layers: Any, objective: str = "bound") -> Make:
    ascent = n2g.deep.Ascent(
        objective=objective, num_steps=6, num_inducing=8, num_samples=2, num_draws=10
    )
    return lambda model, x, y, likelihood: n2g.deep.fit(layers, (x, y), likelihood, ascent=ascent)


def by_layer_chains(*layers: Any) -> Make:
    fitted = by_deep(*layers)
    sizes = {"num_draws": 2, "num_chains": 5, "warmup": 5, "thin": 2}
    return lambda *given: n2g.deep.sghmc(fitted(*given), **sizes)


def by_flow(t: float, source: Callable[[Any], Any]) -> Make:
    return lambda model, x, y, likelihood: source((model, (x, y))).posterior(t, likelihood)


def of_limit(given: Any) -> Any:
    return n2g.gradient_flow(RECTIFIED.limit, given[1])


def of_tangent_process(given: Any) -> Any:
    return n2g.gradient_flow(n2g.linearize(given[0]), given[1], ridge=0.1).ntk_gp()


def by_codes(kernel: Callable[[nn.Sequential], Any]) -> Make:
    return lambda model, x, y, likelihood: n2g.adapt_classes(kernel(model), (x, y), num_classes=3)


def of_contributing(model: nn.Sequential, x: Tensor, y: Tensor, likelihood: Likelihood) -> Any:
    return example("method").adapt_by_leave_one_out(model, (x, y), likelihood)


@dataclass(frozen=True)
class Method:
    """A likelihood, and the method that makes a posterior from a network and data."""

    make: Make
    likelihood: Likelihood = NOISY
    outputs: int = 2
    targets: Callable[[Tensor, int], Tensor] = real_targets

    @property
    def num_targets(self) -> int:
        heteroscedastic = isinstance(self.likelihood, n2g.HeteroscedasticGaussian)
        return self.outputs // 2 if heteroscedastic else self.outputs

    def network(self) -> nn.Sequential:
        return network(self.outputs)

    def data(self) -> tuple[Tensor, Tensor]:
        x = points(20)
        return x, self.targets(x, self.num_targets)

    def build(self, x: Tensor, y: Tensor) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NotStationary)  # laws hold wherever the network stands
            return self.make(self.network(), x, y, self.likelihood)


RECTIFIED = n2g.nngp(nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 1)), bias_var=0.1)
REGRESSION = Method(by_vogn)
CLASSES = Method(by_vogn, n2g.Categorical(n2g.links.MonteCarlo(256)), 3, class_targets)
LABELS = Method(by_vogn, n2g.Bernoulli(), 1, binary_targets)
OPTIMIZERS = {"vogn": by_vogn, "ivon": by_ivon, "swag": by_swag}
"""Of these, those of IVON and SWAG have no evidence: their loss need not be a likelihood."""
STRUCTURES: dict[str, Any] = {
    "full": n2g.Full(),
    "diagonal": n2g.Diagonal(),
    "kron": n2g.Kron(),
    "low rank": n2g.structures.LowRank(5),
    "last layer": n2g.LastLayer(),
    "diagonal last layer": n2g.LastLayer(n2g.Diagonal()),
    "kron last layer": n2g.LastLayer(n2g.Kron()),
    "subnetwork": n2g.structures.Subnetwork(6),
    "function space": n2g.structures.FunctionSpace(),
    "few rows of function space": n2g.structures.FunctionSpace(tol=0.05),
    "points of function space": n2g.structures.FunctionSpace(num_points=8),
    "sampled": n2g.structures.Sampled(20),
    "of contributing": example("structure").Isotropic(),
}

BRIEF = n2g.bayes.Training(num_steps=20)
CHAINS: dict[str, Any] = {"prior": 0.7, "num_draws": 20, "num_chains": 2, "warmup": 40}
BAYES: dict[str, Make] = {
    "ensemble": by_bayes("ensemble", num_members=8, prior=0.7, training=BRIEF),
    "mean field": by_bayes("mean_field", prior=0.7, num_steps=20, num_draws=30),
    **{n: by_bayes(n, **CHAINS) for n in ("hmc", "nuts", "sgld", "sghmc", "microcanonical")},
}
"""Methods that give a set of networks."""

OTHER_LIKELIHOODS: dict[str, Method] = {
    "labels": LABELS,
    "counts": Method(by_vogn, Poisson(), 1, count_targets),
    "dispersed counts": Method(by_vogn, NegativeBinomial(0.5), 1, count_targets),
    "heavy tails": Method(by_vogn, StudentT(0.1, 4.0), 1),
    "levels": Method(by_vogn, Ordinal((-0.4, 0.4)), 1, level_targets),
    "noise of each point": Method(by_vogn, n2g.HeteroscedasticGaussian(n2g.links.LogVariance())),
}
ONE_OF_A_KIND = (
    *("full", "diagonal", "kron", "low rank", "last layer", "subnetwork", "function space"),
    "sampled",
)

METHODS: dict[str, Method] = {
    **{
        f"laplace, {likelihood}, {n}": replace(method, make=by_laplace(STRUCTURES[n]))
        for likelihood, method in OTHER_LIKELIHOODS.items()
        for n in ONE_OF_A_KIND
    },
    "adapt": replace(REGRESSION, make=by_adapt(), likelihood=n2g.Gaussian()),
    "adapt around zero": replace(REGRESSION, make=by_adapt(zero_mean=True)),
    "adapt in weight space": replace(
        REGRESSION, make=by_adapt(solver=n2g.solvers.WeightCholesky())
    ),
    "adapt, classes": replace(CLASSES, make=by_adapt()),
    "adapt, labels": replace(LABELS, make=by_adapt()),
    "adapt, counts": replace(OTHER_LIKELIHOODS["counts"], make=by_adapt()),
    "adapt to tasks": replace(REGRESSION, make=by_tasks, likelihood=n2g.Gaussian()),
    "tune": replace(REGRESSION, make=by_tune),
    "dual": replace(REGRESSION, make=by_dual),
    "dual, classes": replace(CLASSES, make=by_dual),
    "dual as a gaussian process": replace(REGRESSION, make=by_gaussian_process),
    "voggn": replace(REGRESSION, make=by_natural_gradients(n2g.training.VOGGN)),
    "oggn, classes": replace(CLASSES, make=by_natural_gradients(n2g.training.OGGN)),
    "training by evidence": replace(REGRESSION, make=by_evidence(n2g.Kron())),
    "training by evidence, classes": replace(CLASSES, make=by_evidence(n2g.Diagonal())),
    **{f"laplace, {n}": replace(REGRESSION, make=by_laplace(s)) for n, s in STRUCTURES.items()},
    **{
        f"laplace, classes, {n}": replace(CLASSES, make=by_laplace(s))
        for n, s in STRUCTURES.items()
    },
    "laplace, classes, two weights": replace(
        CLASSES, make=by_laplace(n2g.structures.Subnetwork(2))
    ),
    "laplace, contrast, kron last layer": replace(
        CLASSES,
        likelihood=n2g.Categorical(n2g.links.Contrast()),
        make=by_laplace(n2g.LastLayer(n2g.Kron())),
    ),
    "laplace, probit, kron": replace(
        CLASSES, likelihood=n2g.Categorical(n2g.links.Probit()), make=by_laplace(n2g.Kron())
    ),
    "laplace, bridge, diagonal": replace(
        CLASSES,
        likelihood=n2g.Categorical(n2g.links.LaplaceBridge()),
        make=by_laplace(n2g.Diagonal()),
    ),
    **{n: replace(REGRESSION, make=m) for n, m in OPTIMIZERS.items()},
    **{f"{n}, classes": replace(CLASSES, make=m) for n, m in OPTIMIZERS.items()},
    "from variances": replace(REGRESSION, make=by_variances),
    "networks": replace(REGRESSION, make=by_networks),
    "networks, classes": replace(CLASSES, make=by_networks),
    "networks, counts": replace(OTHER_LIKELIHOODS["counts"], make=by_networks),
    **{f"networks by {n}": replace(REGRESSION, make=m) for n, m in BAYES.items()},
    **{f"networks by {n}, classes": replace(CLASSES, make=m) for n, m in BAYES.items()},
    "mixture by multi-swag": replace(
        REGRESSION, make=by_bayes("multi_swag", num_members=2, prior=0.7, training=BRIEF)
    ),
    "mixture": replace(REGRESSION, make=by_mixture(by_laplace(n2g.Full()), by_vogn)),
    "mixture, classes": replace(
        CLASSES, make=by_mixture(by_laplace(n2g.Kron()), by_laplace(n2g.Diagonal()))
    ),
    "combined, sum": replace(
        REGRESSION, make=by_sum(by_laplace(n2g.Full()), by_adapt(prior_var=0.5))
    ),
    "combined, sum, classes": replace(
        CLASSES, make=by_sum(by_laplace(n2g.Kron()), by_laplace(n2g.Diagonal()))
    ),
    "combined, composition": replace(REGRESSION, make=by_composition),
    "mixture of networks": replace(REGRESSION, make=by_mixture(by_networks, by_networks)),
    "deep, one layer": replace(REGRESSION, make=by_deep(n2g.RBF())),
    **{
        f"deep, two layers{n}": replace(m, make=by_deep(n2g.RBF(), n2g.RBF()))
        for n, m in {
            "": REGRESSION,
            ", classes": CLASSES,
            **{f", {name}": one for name, one in OTHER_LIKELIHOODS.items()},
        }.items()
    },
    "deep, sigma points": replace(
        REGRESSION, make=by_deep(n2g.RBF(), n2g.RBF(), objective="predictive")
    ),
    "deep, one layer, chains": replace(REGRESSION, make=by_layer_chains(n2g.RBF())),
    "deep, two layers, chains": replace(REGRESSION, make=by_layer_chains(n2g.RBF(), n2g.RBF())),
    "deep, two layers, chains, classes": replace(
        CLASSES, make=by_layer_chains(n2g.RBF(), n2g.RBF())
    ),
    "flow, infinite width": replace(REGRESSION, make=by_flow(3.0, of_limit)),
    "flow to its end, infinite width": replace(REGRESSION, make=by_flow(float("inf"), of_limit)),
    "flow of a tangent process": replace(REGRESSION, make=by_flow(5.0, of_tangent_process)),
    "codes of classes": replace(CLASSES, make=by_codes(lambda model: model)),
    "codes of classes, rbf": replace(CLASSES, make=by_codes(lambda model: n2g.RBF(0.8))),
    "codes of classes, infinite width": replace(CLASSES, make=by_codes(lambda model: RECTIFIED)),
    "method of contributing": replace(REGRESSION, make=of_contributing),
}

EVERY: dict[str, Way | Method] = {**WAYS, **METHODS}
"""Whatever gives a posterior, by `condition` or by a method."""


@cache
def found(name: str) -> Any:
    """The posterior of one entry of EVERY, built once a session: posteriors are values."""
    return built(name) if name in WAYS else METHODS[name].build(*METHODS[name].data())
