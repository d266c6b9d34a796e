"""The posterior: one value, whatever method found it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, cast, final

import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor
from torch.distributions import Distribution

from net2gp.errors import InputError, NotAvailable, check_count, check_positive
from net2gp.inputs import check_batch, chunks, describe, map_inputs, num_rows, tensors
from net2gp.likelihoods.laws import Contrasts, Variances, gaussian_law
from net2gp.likelihoods.mixtures import mixture
from net2gp.likelihoods.traits import needs
from net2gp.linalg import diagonal_blocks
from net2gp.linear.linearized import Linearized, PriorVar
from net2gp.posteriors.conditioning.process import Process
from net2gp.posteriors.conditioning.samples import FunctionSamples, WeightSamples, draw_from
from net2gp.posteriors.conditioning.solvers import Inference, Solver
from net2gp.posteriors.move import move
from net2gp.posteriors.recipe import Recipe
from net2gp.posteriors.split import Split, split_law
from net2gp.posteriors.weights.covariances import Covariance
from net2gp.posteriors.writing import network_value, write
from net2gp.show import as_html, as_text, likelihood_name, number
from net2gp.types import Data, FeatureKernel, Inputs, Kernel, Likelihood, Outcome, Own, Params

if TYPE_CHECKING:
    from net2gp.posteriors.recipes.dual import Dual

BATCH_ROWS = 256
"""Rows of the joint covariance from which the covariances of small groups of points are taken together."""

FACTS = (
    *("_kernel", "_network", "structure", "likelihood", "prior_var", "N", "C", "P"),
    *("noise_var", "solver", "inference", "temperature", "log_evidence"),
)
"""What the text of a posterior says, in this order."""


@final
@dataclass(frozen=True, eq=False)
class Posterior(Generic[Own]):
    """A Gaussian process f given data: what `condition`, `adapt`, `laplace` and all other methods return.

    What differs between methods is the `process`, the law of f: a kernel conditioned on data (`Conditioned`
    in function space, `Whitened` in weight space) or a Gaussian over the parameters of a network
    (`AroundNetwork`). `likelihood` says how targets follow f, and `x` and `y` are the data, or None. The
    `recipe` is how the posterior was found, and knows how it takes in more data. What a kind of posterior
    cannot do raises `NotAvailable`, which says why and what to use instead.

    >>> from net2gp.kernels import RBF
    >>> from net2gp.likelihoods import Gaussian
    >>> from net2gp.posteriors.condition import condition
    >>> x = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    >>> posterior = condition(RBF(), (x, x), Gaussian(noise_var=1.0))
    >>> posterior.mean(x).flatten(), posterior.novelty(torch.tensor([[0.0], [9.0]], dtype=torch.float64))
    (tensor([0.1670, 0.4494], dtype=torch.float64), tensor([0.4494, 1.0000], dtype=torch.float64))

    Reference: Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, ch. 2 and 3.
    """

    process: Process
    likelihood: Own
    x: Inputs | None
    y: Tensor | None
    evidence: Tensor | None
    recipe: Recipe

    def _facts(self) -> dict[str, str]:
        found = {
            **self.process.facts(),
            "likelihood": likelihood_name(self.likelihood),
            "N": "none" if self.x is None else f"{num_rows(self.x)}",
            "C": f"{self.num_outputs}",
            "log_evidence": "none" if self.evidence is None else number(self.evidence),
            **self.recipe.facts(self),
        }
        return {name: found[name] for name in FACTS if name in found}

    __repr__, _repr_html_ = as_text, as_html

    @property
    def num_outputs(self) -> int:
        """C."""
        return self.process.num_outputs

    @property
    def kernel(self) -> Kernel:
        """The covariance function of the prior; for a network its tangent kernel with `prior_var`."""
        return self.process.kernel

    @property
    def data(self) -> tuple[Inputs, Tensor]:
        """The data (x, y)."""
        if self.x is None or self.y is None:
            raise NotAvailable(
                "this posterior does not hold the data that it was found with. Pass them to the method that "
                "finds it, as condition, adapt and laplace take them."
            )
        return self.x, self.y

    @property
    def linearized(self) -> Linearized:
        """The network, linearized at its parameters."""
        return cast(Linearized, self._of_network("linearized"))

    @property
    def prior_var(self) -> Any:
        """The prior variances of a network's parameters: a number, or by name."""
        return cast(PriorVar, self._of_network("prior_var"))

    @property
    def covariance(self) -> Covariance:
        """Σ of a network's parameters, for posteriors around a network's own outputs."""
        if not hasattr(self.process, "covariance"):
            raise NotAvailable(
                "this posterior has no covariance of parameters around those of a network. Use joint(x) for "
                "the covariance of its outputs, or laplace(network, data, likelihood)."
            )
        return cast(Covariance, self.process.covariance)

    @property
    def structure(self) -> Any:
        """What `laplace` keeps of the covariance, such as `Kron()`."""
        return self._setting("structure", "laplace(network, data, likelihood, structure=...)")

    @property
    def solver(self) -> Solver:
        """How the linear systems were solved."""
        return cast(
            Solver, self._setting("solver", "condition(kernel, data, likelihood, solver=...)")
        )

    @property
    def inference(self) -> Inference | None:
        """How f was approximated, or None where it is exact."""
        found = self._setting("inference", "condition(kernel, data, likelihood, inference=...)")
        return cast("Inference | None", found)

    @property
    def temperature(self) -> float:
        """What the curvature of the data was divided by."""
        return float(getattr(self.recipe, "temperature", 1.0))

    def _of_network(self, name: str) -> object:
        owner = self.process if hasattr(self.process, name) else self.process.kernel
        if not hasattr(owner, name):
            raise NotAvailable(
                f"{name} is of a network's tangent kernel, but the kernel is {type(owner).__name__}. Use "
                "adapt(network, data, likelihood) or laplace for a posterior of a network."
            )
        return getattr(owner, name)

    def _setting(self, name: str, source: str) -> object:
        if not hasattr(self.recipe, name):
            raise NotAvailable(f"this posterior was found without a {name}, as {source} takes it.")
        return getattr(self.recipe, name)

    def mean(self, x: Inputs) -> Tensor:
        """E f(x): (N, C). No variance is computed for it: for a network one pass, or two."""
        self._check(x)
        return self.process.mean(x)

    def centered(self, x: Inputs) -> Tensor:
        """E f(x) less the mean of the prior: (N, C); without variances, and so without a solve."""
        if not hasattr(self.process, "centered"):
            raise NotAvailable(
                "the mean of this posterior is the network itself, of which no prior mean can be taken away. "
                "Use posterior.dual().condition().centered(x), or posterior.mean(x)."
            )
        return cast(Tensor, self.process.centered(x))

    def marginal(self, x: Inputs) -> MultivariateNormal:
        """f(x_n) for each point by itself: batch N, event C."""
        self._check(x)
        return _rounded(*self.process.moments(x))

    def joint(self, x: Inputs, *, batch: bool = False) -> MultivariateNormal:
        """f at all points together: event N·C, index n·C + c.

        With `batch`, x has two leading axes, b groups of q points each, and the result is b laws of q points:
        batch b, event q·C. They share all that was factorized.
        """
        if batch:
            return self._joints(x)
        self._check(x)
        return gaussian_law(*self.process.joint(x))

    def _joints(self, x: Inputs) -> MultivariateNormal:
        size = _group_size(x)
        flat = map_inputs(x, lambda value: value.flatten(0, 1))
        self._check(flat)
        event = size * self.num_outputs
        means, covariances = [], []
        # several groups a pass: between groups some products are wasted, which costs less than passes
        for part in chunks(flat, size * max(1, BATCH_ROWS // event)):
            mean, covariance = self.process.joint(part)
            means.append(mean.reshape(-1, event))
            covariances.append(diagonal_blocks(covariance, event))
        return gaussian_law(torch.cat(means), torch.cat(covariances))

    def predict(
        self: Posterior[Likelihood[Outcome]],
        x: Inputs,
        *,
        likelihood: Likelihood[Outcome] | None = None,
        samples: WeightSamples | None = None,
    ) -> Outcome:
        """y(x_n) for each point, f integrated out; `likelihood` replaces the one conditioned with.

        `samples` averages networks instead of linearizing. With a `Probit()` or `Contrast()` link the
        (N, C, C) covariances of f are not kept.
        """
        chosen = self.recipe.predictive(self.likelihood, likelihood)
        if samples is not None:
            return cast(Outcome, self._averaged(x, chosen, samples))
        self._check(x)
        needed = needs(chosen)
        if needed == "variances":
            law = chosen.predict(Variances(*self.process.diagonal(x)))
        elif needed == "contrasts":
            law = chosen.predict(Contrasts(*self.process.contrast(x)))
        else:
            law = chosen.predict(_rounded(*self.process.moments(x)))
        return cast(Outcome, law)

    def _averaged(self, x: Inputs, chosen: Likelihood, samples: WeightSamples) -> Distribution:
        if not isinstance(samples, WeightSamples):
            raise InputError(
                f"samples must be WeightSamples(100) or None, but is {describe(samples)}."
            )
        generator = torch.Generator().manual_seed(samples.seed)
        return mixture(
            chosen, self.sample(x, samples.num_samples, generator=generator, linear=False)
        )

    def contrast(self, x: Inputs) -> Tensor:
        """Var[f_c − f_t] for the class t of the largest mean, at each point: (N, C)."""
        self._check(x)
        return self.process.contrast(x)[1]

    def novelty(self, x: Inputs) -> Tensor:
        """The share of the prior variance of f at each point that the data leave open: (N,).

        Σ_c Var[f_c | y] / Σ_c Var[f_c]: near 1 where the data say nothing, near 0 where they determine f, and
        0 where the prior itself has no variance. It has no unit, and does not depend on the targets under
        Gaussian noise: points that are unlike all data stand out by it. Cost: `marginal(x)`.
        """
        self._check(x)
        left = self.process.diagonal(x)[1].sum(-1)
        whole = self.process.prior_variances(x).sum(-1).to(left.dtype)
        return torch.where(whole > 0, left / torch.where(whole > 0, whole, 1.0), 0.0)

    def split(self, x: Inputs, *, likelihood: Likelihood | None = None) -> Split:
        """Epistemic and aleatoric variance of the targets at each point, by the delta method: see `split`."""
        chosen = self.recipe.predictive(self.likelihood, likelihood)
        return split_law(self.marginal(x), chosen, x)

    def sample(
        self,
        x: Inputs,
        num_samples: int,
        *,
        generator: torch.Generator | None = None,
        linear: bool = True,
    ) -> Tensor:
        """(S, N, C) values at `x` of functions drawn from the posterior; of networks, if not `linear`.

        By drawn weights for kernels with features; otherwise from the joint law at `x`.
        """
        check_count(num_samples, "num_samples")
        self._check_batch(x)
        if not linear:
            networks = self._of_weights("draw_networks")
            return cast(Tensor, networks(x, num_samples, generator))
        if isinstance(self.kernel, FeatureKernel):
            return self.process.functions(num_samples, generator)(x)
        return draw_from(self.joint(x), num_rows(x), num_samples, generator)

    def sample_functions(
        self, num_samples: int, *, generator: torch.Generator | None = None
    ) -> FunctionSamples:
        """Functions drawn from the posterior, which can be evaluated anywhere, in any order."""
        check_count(num_samples, "num_samples")
        return cast(FunctionSamples, self.process.functions(num_samples, generator))

    def sample_weights(
        self, num_samples: int, *, generator: torch.Generator | None = None
    ) -> Params:
        """Draws of the chosen parameters of a network, each with an axis of samples in front."""
        check_count(num_samples, "num_samples")
        return cast(Params, self._of_weights("draw_weights")(num_samples, generator))

    def _of_weights(self, name: str) -> Any:
        if not hasattr(self.process, name):
            raise NotAvailable(
                "parameters are drawn from a Gaussian around those of a network, but this posterior is one "
                "of functions. Use sample_functions(num_samples), or laplace(network, data, likelihood)."
            )
        return getattr(self.process, name)

    def log_marginal_likelihood(self) -> Tensor:
        """log p(y): exact for Gaussian noise; otherwise as the method that found it approximates it."""
        if self.evidence is None:
            raise NotAvailable(self.recipe.without_evidence())
        return self.evidence

    def update(self, data: Data, *, likelihood: Likelihood | None = None) -> Posterior[Own]:
        """The posterior given more data too, without starting over.

        Gaussian noise: with Cholesky the factor grows by the new rows, O(N²M) instead of O((N+M)³); in weight
        space the new points' precision is added, O(M·P² + P³) whatever N was. Other likelihoods: Newton
        continues from the present mode, and conjugate gradients from the present solution.
        """
        return cast("Posterior[Own]", self.recipe.extend(self, data, likelihood))

    def dual(self) -> Dual:
        """The linear model and the Gaussian process that the network at θ* stands for, exact in Σ."""
        return self.recipe.dual(self)

    def tempered(self, factor: float) -> Posterior[Own]:
        """The posterior with `factor` times the covariance, at no cost.

        It is that of prior variance factor·prior_var at temperature factor·temperature: the data and the
        prior are trusted less, or more, in equal parts. One number to choose on held-out data where a new
        prior variance would ask for a new solve. It has no evidence; and of a link that was matched to the
        old covariance only the old scale is kept.
        """
        check_positive(factor, "factor")
        return cast("Posterior[Own]", self.recipe.tempered(self, float(factor)))

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Posterior[Own]:
        """The same posterior on another device, or predicting in another dtype (solves stay float64)."""
        return move(self, device, dtype)

    def save(self, path: str | os.PathLike) -> None:
        """Write the posterior to one file, which `load(path, network)` reads back: see `save`."""
        write(self, network_value(self.kernel, self.x), path)

    def _check(self, x: Inputs) -> None:
        self._check_batch(x)
        self.process.check(x)

    def _check_batch(self, x: Inputs) -> None:
        if self.x is not None:
            check_batch(x, self.x)


def _group_size(x: Inputs) -> int:
    """q, for groups of q points."""
    shapes = {tuple(value.shape[:2]) for value in tensors(x)}
    if len(shapes) != 1 or len(next(iter(shapes))) < 2 or 0 in next(iter(shapes)):
        raise InputError(
            "with batch=True x has two leading axes, groups and the points of a group, the same in all its "
            f"tensors, but is {describe(x)}. Pass x[None] for one group, or leave batch out."
        )
    return next(iter(shapes))[1]


def _rounded(mean: Tensor, blocks: Tensor) -> MultivariateNormal:
    """The law in the dtype of its mean: covariances may be more precise until here."""
    return gaussian_law(mean, blocks.to(mean.dtype))
