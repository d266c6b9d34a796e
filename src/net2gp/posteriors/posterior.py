"""The posterior: one value, whatever method found it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, cast, final

import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor

from net2gp.errors import NotAvailable, check_count, check_positive
from net2gp.inputs import num_rows
from net2gp.likelihoods.laws import gaussian_law
from net2gp.posteriors.conditioning.process import (
    Process,
    check_form,
    joint_of_groups,
    merged_groups,
)
from net2gp.posteriors.conditioning.samples import FunctionSamples, WeightSamples, draw_from
from net2gp.posteriors.move import move
from net2gp.posteriors.parts import Parts
from net2gp.posteriors.predicting import (
    NotGaussian,
    averaged,
    is_gaussian,
    open_share,
    predicted,
    rounded,
    split_targets,
)
from net2gp.posteriors.recipe import Recipe
from net2gp.posteriors.split import Split
from net2gp.posteriors.writing import check_value, write
from net2gp.show import as_html, as_text, likelihood_name, number
from net2gp.types import Data, FeatureKernel, Inputs, Likelihood, Outcome, Own, Params

if TYPE_CHECKING:
    from net2gp.posteriors.recipes.dual import Dual

FACTS = (
    *("_kernel", "_network", "structure", "likelihood", "prior_var", "N", "C", "P", "draws"),
    *(
        "method",
        "chains",
        "members",
        "noise_var",
        "solver",
        "inference",
        "temperature",
        "log_evidence",
    ),
)
"""What the text of a posterior shows, in this order."""


@final
@dataclass(frozen=True, eq=False)
class Posterior(Parts, Generic[Own]):
    """A Gaussian process f given data: what `condition`, `adapt`, `laplace` and all other methods return.

    Methods differ in the law of f: a kernel conditioned on data (`Conditioned` in function space, `Whitened`
    in weight space) or a Gaussian over the parameters of a network (`AroundNetwork`). A method or property
    that a kind of posterior lacks raises `NotAvailable`, which says why and what to use instead. Wherever an
    argument is called `x`, it holds N points: a tensor, or a tuple or dict of tensors, with N rows each.

    Args:
        process: The law of f.
        likelihood: How targets follow f.
        x: The inputs of the data, or None if the posterior does not keep them.
        y: The targets of the data, or None.
        evidence: log p(y), or None if the method does not give one.
        recipe: How the posterior was found, and how it takes in more data.

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

    def mean(self, x: Inputs) -> Tensor:
        """Return the mean E f(x) without computing a variance: one or two passes for a network.

        Args:
            x: N points.

        Returns:
            The means: (N, C).

        Raises:
            InputError: If `x` does not have the shape of the data; likewise in the other methods.
        """
        self._check(x)
        return self.process.mean(x)

    def centered(self, x: Inputs) -> Tensor:
        """Return E f(x) minus the prior mean, without computing a variance or solving a system.

        Args:
            x: N points.

        Returns:
            What the data add to the prior mean: (N, C).

        Raises:
            NotAvailable: If the mean is the network itself, as after `laplace`.
        """
        if not hasattr(self.process, "centered"):
            raise NotAvailable(
                "the mean of this posterior is the network itself, without a prior mean to subtract. "
                "Use posterior.dual().condition().centered(x), or posterior.mean(x)."
            )
        self._check(x)
        return cast(Tensor, self.process.centered(x))

    def marginal(self, x: Inputs) -> MultivariateNormal:
        """Return the law of f(x_n) for each point by itself.

        Args:
            x: N points.

        Returns:
            A Gaussian with batch shape N and event shape C.
        """
        self._check(x)
        return rounded(*self.process.moments(x))

    def joint(self, x: Inputs, *, batch: bool = False) -> MultivariateNormal:
        """Return the law of f at all points together.

        Args:
            x: N points; with `batch`, tensors with two leading axes, for b groups of q points each.
            batch: Whether to return one law per group. The groups share all factorizations.

        Returns:
            A Gaussian with event shape N·C, where output c of point n has index n·C + c; with `batch`, batch
            shape b and event shape q·C.

        Raises:
            InputError: If `batch` is given and the tensors of `x` do not share two leading axes.
        """
        if batch:
            flat, size = merged_groups(x, self.x)
            self._check(flat)
            return gaussian_law(*joint_of_groups(self.process, flat, size))
        self._check(x)
        return gaussian_law(*self.process.joint(x))

    def predict(
        self: Posterior[Likelihood[Outcome]],
        x: Inputs,
        *,
        likelihood: Likelihood[Outcome] | None = None,
        samples: WeightSamples | None = None,
    ) -> Outcome:
        """Return the law of the target y(x_n) at each point, with f integrated out.

        With a `Probit()` or `Contrast()` link the (N, C, C) covariances of f are never stored.

        Args:
            x: N points.
            likelihood: Replaces the posterior's own likelihood. It is needed if that one holds the noise of
                each training point.
            samples: `WeightSamples(100)` averages the network itself over that many draws of its parameters.
                None uses the linearized network.

        Returns:
            The law of y, such as a `MultivariateNormal` for Gaussian noise or a `Categorical` for classes.

        Raises:
            InputError: If the likelihood is tied to the training points and no other one is passed.
            NotAvailable: If `samples` is given and the posterior is not a Gaussian over parameters.
        """
        chosen = self.recipe.predictive(self.likelihood, likelihood)
        if samples is not None:
            return cast(Outcome, averaged(self.sample, x, chosen, samples))
        self._check(x)
        law = predicted(self.process, x, chosen, own=likelihood is None)
        return cast(Outcome, law)

    def contrast(self, x: Inputs) -> Tensor:
        """Return Var[f_c − f_t], where t is the class of the largest mean at a point.

        Args:
            x: N points.

        Returns:
            The variances of the differences of logits: (N, C), zero for c = t.
        """
        self._check(x)
        return self.process.contrast(x)[1]

    def novelty(self, x: Inputs) -> Tensor:
        """Return the share of the prior variance of f at each point that the data leave open.

        It is Σ_c Var[f_c | y] / Σ_c Var[f_c]: near 1 where the data say nothing, near 0 where they determine
        f, and 0 where the prior itself has no variance. The share has no unit, and under Gaussian noise it
        does not depend on the targets. With fewer features than rows of data it is small at every point.

        A classifier that is sure of its training data leaves much of the variance of its logits open there.
        So after `laplace` of labels by default the share is that of squared errors, for which each training
        input counts alike: with the tangent kernel of the parameters that vary (of all, if these are the last
        layer) at 400 inputs, or with the last layer's features at all, if parameters are over 100,000.

        Args:
            x: N points.

        Returns:
            The shares: (N,). They are at most 1 if the covariance comes from this prior, as it does not in
            `Swag` and deep sigma point processes.
        """
        self._check(x)
        return open_share(self.process, x)

    def split(self, x: Inputs, *, likelihood: Likelihood | None = None) -> Split:
        """Return the epistemic and aleatoric variance of the targets: see `explain.split`.

        Args:
            x: N points.
            likelihood: Replaces the posterior's own likelihood.

        Returns:
            Both parts of the variance, with shape (N, D) for D targets or classes.
        """
        chosen = self.recipe.predictive(self.likelihood, likelihood)
        self._check(x)
        return split_targets(self.process, x, chosen, own=likelihood is None)

    def sample(
        self,
        x: Inputs,
        num_samples: int,
        *,
        generator: torch.Generator | None = None,
        linear: bool = True,
    ) -> Tensor:
        """Draw functions from the posterior and return their values at `x`.

        Kernels with features are sampled by drawing weights; other kernels from the joint law at `x`.

        Args:
            x: N points.
            num_samples: The number of draws S.
            generator: Makes the draws repeatable. None uses torch's global random state.
            linear: Whether to evaluate the linearized network. False evaluates the network itself at the
                drawn parameters.

        Returns:
            The values: (S, N, C).

        Raises:
            NotAvailable: If `linear` is False and the posterior is not a Gaussian over parameters.
        """
        check_count(num_samples, "num_samples")
        check_form(self.process, x, self.x)
        if not linear:
            return cast(Tensor, self._drawing("draw_networks")(x, num_samples, generator))
        if not is_gaussian(self.process):
            return cast(NotGaussian, self.process).draw(x, num_samples, generator)
        if isinstance(self.kernel, FeatureKernel):
            return self.process.functions(num_samples, generator)(x)
        return draw_from(self.joint(x), num_rows(x), num_samples, generator)

    def sample_functions(
        self, num_samples: int, *, generator: torch.Generator | None = None
    ) -> FunctionSamples:
        """Draw functions that can be evaluated at any points later, and agree with each other there.

        Args:
            num_samples: The number of functions S.
            generator: Makes the draws repeatable. None uses torch's global random state.

        Returns:
            A function from N points to values (S, N, C).

        Raises:
            NotAvailable: If the kernel has no features, as `RBF`.
        """
        check_count(num_samples, "num_samples")
        return cast(FunctionSamples, self.process.functions(num_samples, generator))

    def sample_weights(
        self, num_samples: int, *, generator: torch.Generator | None = None
    ) -> Params:
        """Draw the parameters of the network from the posterior.

        Args:
            num_samples: The number of draws S.
            generator: Makes the draws repeatable. None uses torch's global random state.

        Returns:
            The parameters by name, each with an axis of length S in front.

        Raises:
            NotAvailable: If the posterior is not a Gaussian over parameters.
        """
        check_count(num_samples, "num_samples")
        return cast(Params, self._drawing("draw_weights")(num_samples, generator))

    def log_marginal_likelihood(self) -> Tensor:
        """Return the evidence log p(y): exact for Gaussian noise, otherwise as the method approximates it.

        Returns:
            A scalar tensor.

        Raises:
            NotAvailable: If the method that found the posterior gives no evidence.
        """
        if self.evidence is None:
            raise NotAvailable(self.recipe.without_evidence())
        return self.evidence

    def update(self, data: Data, *, likelihood: Likelihood | None = None) -> Posterior[Own]:
        """Return the posterior given these data as well, without starting over.

        Under Gaussian noise a Cholesky factor grows by the M new rows, O(N²M) instead of O((N+M)³), and in
        weight space the precision of the new points is added, O(M·P² + P³) for every N. For other likelihoods
        Newton's method continues from the present mode, and conjugate gradients from the present solution.

        Args:
            data: The new data, (x, y) or a DataLoader.
            likelihood: The Gaussian noise of the new data, if it differs from the old. None takes the present
                likelihood for the new data as well.

        Returns:
            A new posterior; this one does not change.

        Raises:
            NotAvailable: If the posterior is centered on a trained network. Use `dual().condition()` then.
            InputError: If the new data do not have the shape of the old ones, or `likelihood` is not
                Gaussian.
        """
        return cast("Posterior[Own]", self.recipe.extend(self, data, likelihood))

    def dual(self) -> Dual:
        """Return the linear model and the Gaussian process that the network at θ* stands for.

        Returns:
            The dual view, whose covariance is exact whatever structure this posterior keeps.

        Raises:
            NotAvailable: If the kernel is not the tangent kernel of a network.
        """
        return self.recipe.dual(self)

    def tempered(self, factor: float) -> Posterior[Own]:
        """Return the posterior with its covariance multiplied by `factor`, at no cost.

        This is the posterior for the prior variance factor·prior_var at the temperature factor·temperature:
        it trusts the data and the prior less, or more, in equal parts. The factor can be chosen on held-out
        data where a new prior variance would need a new solve. A link that was matched to the old covariance
        keeps its scale.

        Args:
            factor: A positive number.

        Returns:
            A posterior without an evidence.

        Raises:
            NotAvailable: If the posterior is not a Gaussian around a network's parameters.
        """
        check_positive(factor, "factor", single=True)
        return cast("Posterior[Own]", self.recipe.tempered(self, float(factor)))

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Posterior[Own]:
        """Return the same posterior on another device, or predicting in another dtype.

        Args:
            device: Where all tensors go. None leaves them where they are.
            dtype: `torch.float32` or `torch.float64`, for kernel, mean and data; solves stay in float64.

        Returns:
            A new posterior; this one does not change.
        """
        return move(self, device, dtype)

    def save(self, path: str | os.PathLike) -> None:
        """Write the posterior to one file, which `load(path, network)` reads back: see `net2gp.save`.

        Args:
            path: The file to write, in a folder that exists.

        Raises:
            InputError: If the folder does not exist, or if the kernel or mean cannot be saved.
        """
        write(self, check_value(self), path)

    def _check(self, x: Inputs) -> None:
        check_form(self.process, x, self.x)
        self.process.check(x)
