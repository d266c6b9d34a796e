"""Sums and averages of independent posteriors, as one posterior."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from net2gp.errors import InputError, NotAvailable, check_finite
from net2gp.inputs import describe
from net2gp.likelihoods.laws import weighted
from net2gp.posteriors.conditioning.problem import predictive
from net2gp.posteriors.conditioning.process import contrast_by_blocks, evaluated
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.predicting import is_gaussian
from net2gp.posteriors.recipe import Recipe
from net2gp.posteriors.recipes.dual import Dual
from net2gp.types import Data, Inputs, Kernel, Likelihood


@dataclass(frozen=True, eq=False)
class WeightedSum:
    """The process Σ_m w_m f_m of independent Gaussian processes f_m.

    Its mean is Σ w_m μ_m and its covariance Σ w_m² Σ_m.

    Args:
        terms: The posteriors of f_m.
        weights: The numbers w_m, of either sign: (M,), float64.
    """

    terms: tuple[Posterior, ...]
    weights: Tensor = field(repr=False)

    @property
    def num_outputs(self) -> int:
        """The number of outputs C."""
        return self.terms[0].num_outputs

    @property
    def kernel(self) -> Kernel:
        """Σ w_m² k_m, the covariance before the data."""
        squares = self.weights.square().tolist()
        parts = [p.kernel.scaled(w) for p, w in zip(self.terms, squares, strict=True)]
        return reduce(add, parts)

    def facts(self) -> dict[str, str]:
        """What the first term is, and how many there are."""
        return {**self.terms[0].process.facts(), "members": f"{len(self.terms)}"}

    def check(self, x: Inputs) -> None:
        """Raise unless `x` can be points of every term."""
        for term in self.terms:
            term.process.check(x)

    @evaluated
    def mean(self, x: Inputs) -> Tensor:
        """Σ w_m μ_m: (N, C)."""
        return weighted([term.process.mean(x) for term in self.terms], self.weights)

    @evaluated
    def moments(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """The mean (N, C) and the covariance of each point (N, C, C)."""
        return self._added([term.process.moments(x) for term in self.terms])

    @evaluated
    def diagonal(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """The mean and the variances: (N, C) each."""
        return self._added([term.process.diagonal(x) for term in self.terms])

    contrast = contrast_by_blocks

    @evaluated
    def joint(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """The mean (N·C,) and the covariance (N·C, N·C)."""
        return self._added([term.process.joint(x) for term in self.terms])

    @evaluated
    def prior_variances(self, x: Inputs) -> Tensor:
        """Σ w_m² Var f_m before the data: (N, C)."""
        parts = [term.process.prior_variances(x) for term in self.terms]
        return weighted(parts, self.weights.square())

    def functions(
        self, num_samples: int, generator: torch.Generator | None
    ) -> Callable[[Inputs], Tensor]:
        """The weighted sums of functions drawn from each term."""
        parts = tuple(term.process.functions(num_samples, generator) for term in self.terms)
        return SummedFunctions(parts, self.weights)

    def _added(self, laws: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        means, covariances = zip(*laws, strict=True)
        # Structures differ in the digits that they keep of covariances.
        widest = max(covariances, key=lambda c: torch.finfo(c.dtype).bits).dtype
        parts = [covariance.to(widest) for covariance in covariances]
        return weighted(means, self.weights), weighted(parts, self.weights.square())


@dataclass(frozen=True, eq=False)
class SummedFunctions:
    """S functions, each the weighted sum of one function of every term.

    Args:
        parts: S functions of each term.
        weights: The numbers w_m: (M,).
    """

    parts: tuple[Callable[[Inputs], Tensor], ...] = field(repr=False)
    weights: Tensor = field(repr=False)

    def __call__(self, x: Inputs) -> Tensor:
        """Return the values of the functions.

        Args:
            x: N points.

        Returns:
            The values: (S, N, C).
        """
        return weighted([part(x) for part in self.parts], self.weights)


@dataclass(frozen=True)
class ByAlgebra(Recipe):
    """The recipe of posteriors that are made of other posteriors, which is where data go."""

    def extend(self, posterior: Posterior, data: Data, likelihood: Likelihood | None) -> Posterior:
        """Refused: it is not known which of the posteriors the data are of."""
        raise NotAvailable(
            "this posterior is made of others, and data are of one of them. Update that one, and combine "
            "them again: weighted_sum([first.update(data), second])."
        )

    def dual(self, posterior: Posterior) -> Dual:
        """Refused: there are several networks."""
        raise NotAvailable(
            "dual is of one network, and this posterior is made of others. Ask each of them: first.dual()."
        )

    def tempered(self, posterior: Posterior, factor: float) -> Posterior:
        """Refused: each has a temperature of its own."""
        raise NotAvailable(
            "this posterior is made of others. Condition with another prior variance or noise, or temper the "
            "others, and combine them again: weighted_sum([first.tempered(2.0), second])."
        )

    def without_evidence(self) -> str:
        """Why there is no evidence."""
        return "a posterior that is made of others has no evidence of its own. Ask each of them."


def weighted_sum(
    posteriors: Sequence[Posterior],
    weights: Sequence[float] | None = None,
    *,
    likelihood: Likelihood | None = None,
) -> Posterior:
    """Return the law of Σ_m w_m f_m for posteriors of independent functions f_m.

    The networks may be of any architectures, and the weights of either sign: `weighted_sum([p, q], [1, -1])`
    is the law of the difference. Functions are independent if they were found from different data, with
    priors that share nothing. Posteriors of one task are two opinions about the same function instead: see
    `mixture` for "one of them is right", and `product_of_experts` for "both are". Cost: that of all terms.

    Args:
        posteriors: The terms, with the same number of outputs.
        weights: A number for each, not zero. None is 1 for each.
        likelihood: How targets follow the sum. None takes the likelihood that all terms have.

    Returns:
        A posterior that holds no data. It is not saved as a file; save the terms, and add them again.

    Raises:
        InputError: If there are no terms, if outputs, likelihoods or numbers differ, or if a law is not
            Gaussian.

    >>> from net2gp.kernels import RBF
    >>> from net2gp.likelihoods import Gaussian
    >>> from net2gp.posteriors.condition import condition
    >>> x = torch.zeros(1, 1, dtype=torch.float64)
    >>> first, second = (condition(RBF(), (x, x + y), Gaussian(noise_var=1.0)) for y in (2.0, 6.0))
    >>> law = weighted_sum([first, second], [1.0, -2.0]).marginal(x)  # of f₁ − 2 f₂
    >>> law.mean.round(decimals=4), law.variance
    (tensor([[-5.]], dtype=torch.float64), tensor([[2.5000]], dtype=torch.float64))

    Reference: Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, section 4.2.4.
    """
    terms = tuple(posteriors) if isinstance(posteriors, Sequence) else ()
    if not terms or not all(isinstance(term, Posterior) for term in terms):
        kinds = ", ".join(map(describe, terms[:3])) if terms else describe(posteriors)
        raise InputError(
            f"a sum is of one or more posteriors, but got {kinds}. Pass for example "
            "weighted_sum([first, second], [0.5, 0.5])."
        )
    for index, term in enumerate(terms):
        _check_term(term, terms[0], index)
    numbers = _numbers(weights, len(terms))
    process = WeightedSum(terms, numbers)
    chosen = _shared(terms) if likelihood is None else predictive(likelihood, terms[0].likelihood)
    return Posterior(process, chosen, None, None, None, ByAlgebra())


def average(posteriors: Sequence[Posterior], *, likelihood: Likelihood | None = None) -> Posterior:
    """Return the law of the mean (f₁ + … + f_M) / M of posteriors of independent functions.

    Its variance is the mean of the variances divided by M, unlike that of `mixture`, the law of one of the
    functions chosen at random.

    Args:
        posteriors: The terms, with the same number of outputs.
        likelihood: How targets follow the mean. None takes the likelihood that all terms have.

    Returns:
        A posterior, as from `weighted_sum`.

    >>> from net2gp.kernels import RBF
    >>> from net2gp.likelihoods import Gaussian
    >>> from net2gp.posteriors.condition import condition
    >>> x = torch.zeros(1, 1, dtype=torch.float64)
    >>> terms = [condition(RBF(), (x, x + y), Gaussian(noise_var=1.0)) for y in (2.0, 6.0)]
    >>> average(terms).mean(x).round(decimals=4), average(terms).marginal(x).variance
    (tensor([[2.]], dtype=torch.float64), tensor([[0.2500]], dtype=torch.float64))
    """
    count = len(posteriors) if isinstance(posteriors, Sequence) else 0
    return weighted_sum(posteriors, [1 / count] * count if count else None, likelihood=likelihood)


def _numbers(weights: Sequence[float] | None, count: int) -> Tensor:
    if weights is None:
        return torch.ones(count, dtype=torch.float64)
    try:
        found = torch.as_tensor(weights, dtype=torch.float64).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        found = None
    if found is None or found.shape != (count,):
        raise InputError(
            f"weights must be one number for each of the {count} posteriors, but is {describe(weights)}. "
            f"Pass for example {[1.0] * count}."
        )
    check_finite(found, "weights")
    if bool((found == 0).any()):
        raise InputError("weights must not be zero. Leave out the posterior that has no part.")
    return found


def _check_term(term: Posterior, first: Posterior, index: int) -> None:
    if not is_gaussian(term.process):
        raise InputError(
            f"posterior {index} is not Gaussian, so its sums have no closed form. Use a Gaussian one, such "
            "as laplace(network, data, likelihood), or add draws: first.sample(x, S) + second.sample(x, S)."
        )
    if term.num_outputs != first.num_outputs:
        raise InputError(
            f"posterior {index} has {term.num_outputs} outputs and posterior 0 has {first.num_outputs}. "
            "Combine posteriors of the same number of outputs; linearize(network, output=…) picks some."
        )


def _shared(terms: tuple[Posterior, ...]) -> Likelihood:
    likelihood = terms[0].likelihood
    if not all(_equal(term.likelihood, likelihood) for term in terms):
        known = " and ".join(sorted({type(term.likelihood).__name__ for term in terms}))
        raise InputError(
            f"the posteriors have unlike likelihoods ({known}, or unlike noise), so it is not known how "
            "targets follow the sum. Pass likelihood=, for example likelihood=Gaussian(0.1)."
        )
    return likelihood


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        alike = isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape
        return alike and bool((one.to(other) == other).all())
    if type(one) is not type(other) or not is_dataclass(one):
        return bool(one == other)
    return all(_equal(getattr(one, f.name), getattr(other, f.name)) for f in fields(one))
