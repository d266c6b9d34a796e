"""What other rooms ask of a likelihood: each answer is the likelihood's own, or a default.

A likelihood needs the five members of `net2gp.types.Likelihood`. Everything else here is optional: a member
of the name that a function's docstring gives takes the place of the default.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol, TypeGuard, TypeVar, runtime_checkable

import torch
from torch import Tensor
from torch.distributions import Distribution

from net2gp.likelihoods.laws import gaussian_law
from net2gp.linalg import psd_root
from net2gp.types import Likelihood

Need = Literal["variances", "contrasts", "covariance"]
"""What a link reads of the law of f: variances, those of differences to the best class, or all of it."""

CURVATURE_NUMBERS = 2**24
"""How many numbers of curvatures are held at once where only their sum is wanted."""

Given = TypeVar("Given", bound=Likelihood)


@runtime_checkable
class GaussianNoise(Likelihood, Protocol):
    """A likelihood y = f + ε with Gaussian ε, under which posteriors are exact."""

    @property
    def noise_var(self) -> float | Tensor | None:
        """The variance of ε, or None if it is to be learned."""

    def noise_variance(self, f: Tensor) -> Tensor:
        """The variance of each entry of f: (N, C)."""

    def with_noise(self, noise_var: float | Tensor) -> GaussianNoise:
        """The same likelihood with this noise."""


@runtime_checkable
class Linked(Likelihood, Protocol):
    """A likelihood with a link whose scale can be matched to a network's own certainty."""

    @property
    def link(self) -> Any:
        """How f is integrated out."""

    @property
    def matched_link(self) -> Any:
        """The class of links of which one is chosen, by its scale."""

    @property
    def open_link(self) -> bool:
        """Whether no link was given, so that one is to be chosen."""

    def with_link(self, link: Any) -> Likelihood:
        """The same likelihood with this link."""

    def cross_entropy(self, f: Tensor, logits: Tensor) -> Tensor:
        """−E log p(y | logits) for y of the law at f, averaged over points."""


def num_outputs(likelihood: Likelihood, y: Tensor) -> int:
    """The number of outputs C for targets y, where no network says it (`num_outputs(y)`).

    By default it is the number of targets per point.

    >>> from net2gp.likelihoods import Categorical
    >>> num_outputs(Categorical(), torch.tensor([0, 3, 1]))
    4
    """
    own = getattr(likelihood, "num_outputs", None)
    if own is not None:
        return int(own(y) if callable(own) else own)
    return y.shape[1] if y.dim() > 1 else 1


def has_gaussian_noise(likelihood: object) -> TypeGuard[GaussianNoise]:
    """Whether y = f + Gaussian noise, so that posteriors are exact: it has the members of `GaussianNoise`."""
    return isinstance(likelihood, GaussianNoise)


def has_open_noise(likelihood: object) -> TypeGuard[GaussianNoise]:
    """Whether Gaussian noise is left to be learned."""
    return has_gaussian_noise(likelihood) and likelihood.noise_var is None


def has_open_link(likelihood: object) -> TypeGuard[Linked]:
    """Whether the link is at its default, to be chosen: it has the members of `Linked`, and `open_link`."""
    return isinstance(likelihood, Linked) and likelihood.open_link


def is_classifier(likelihood: object) -> bool:
    """Whether y are labels, of which a network can be so sure that a point has no curvature left."""
    return bool(getattr(likelihood, "classifier", False))


def has_one_class(likelihood: object) -> bool:
    """Whether the outputs are logits of classes, exactly one of which is the label (`one_class`)."""
    return bool(getattr(likelihood, "one_class", False))


def needs(likelihood: object) -> Need:
    """What `predict` reads of the law of f: what the link says that it `needs`, else the covariance."""
    found: Need = getattr(getattr(likelihood, "link", None), "needs", "covariance")
    return found


def tied_points(likelihood: object) -> int | None:
    """The number of points that the likelihood belongs to, if it has numbers for each (`tied_points`)."""
    found: int | None = getattr(likelihood, "tied_points", None)
    return found


def of_points(likelihood: Given, part: Tensor | slice) -> Given:
    """The likelihood of some of the points: numbers that belong to points go with them (`of_points`).

    >>> from net2gp.likelihoods import Gaussian
    >>> of_points(Gaussian(torch.tensor([[0.1], [0.2]])), slice(1, 2)).noise_var
    tensor([[0.2000]])
    """
    own = getattr(likelihood, "of_points", None)
    return likelihood if own is None else own(part)


def law_of_targets(likelihood: Likelihood, f: Tensor) -> Distribution:
    """The law of y given outputs f (N, C): `law(f)`, or the prediction from an f without variance.

    >>> from net2gp.likelihoods import Bernoulli
    >>> law_of_targets(Bernoulli(), torch.zeros(1, 1)).mean
    tensor([[0.5000]])
    """
    own = getattr(likelihood, "law", None)
    if own is not None:
        return own(f)
    return likelihood.predict(gaussian_law(f, f.new_zeros(*f.shape, f.shape[1])))


def negative_hessian(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    """−∇²_f log p(y_n | f_n), which may be indefinite: (N, C, C), by C backward passes."""
    with torch.enable_grad():
        f = f.detach().requires_grad_()
        residual = likelihood.residual(f, y)
        columns = [
            torch.autograd.grad(residual[:, c].sum(), f, retain_graph=True)[0]
            for c in range(f.shape[1])
        ]
    return -torch.stack(columns, 1)


def is_canonical(likelihood: Likelihood, f: Tensor, y: Tensor) -> bool:
    """Whether the curvature is the negative Hessian itself, so that log p is concave (`canonical`).

    A likelihood that does not say so is tried: with the given targets, at outputs f (N, C) and at random
    outputs around them. Cost: 2·C backward passes through the residual.

    >>> from net2gp.likelihoods import Bernoulli
    >>> is_canonical(Bernoulli(), torch.zeros(2, 1), torch.tensor([0, 1]))
    True
    """
    own = getattr(likelihood, "canonical", None)
    if own is not None:
        return bool(own)
    generator = torch.Generator().manual_seed(0)
    around = f.detach() + torch.randn(f.shape, generator=generator, dtype=f.dtype).to(f.device)
    return all(_has_hessian(likelihood, place, y) for place in (f.detach(), around))


def _has_hessian(likelihood: Likelihood, f: Tensor, y: Tensor) -> bool:
    curvature, hessian = likelihood.curvature(f).detach(), negative_hessian(likelihood, f, y)
    tol = 1e2 * torch.finfo(f.dtype).eps ** 0.75
    return torch.allclose(curvature, hessian, rtol=tol, atol=tol * float(curvature.abs().max()))


def curvature_root(likelihood: Likelihood, f: Tensor) -> Tensor:
    """R with R Rᵀ the curvature: (N, C, K) with K ≤ C columns (`curvature_root(f)`).

    >>> from net2gp.likelihoods import Gaussian
    >>> curvature_root(Gaussian(0.25), torch.zeros(1, 1))
    tensor([[[2.]]])
    """
    own = getattr(likelihood, "curvature_root", None)
    return psd_root(likelihood.curvature(f)).to(f.dtype) if own is None else own(f)


def summed_curvature(likelihood: Likelihood, f: Tensor) -> Tensor:
    """Σ_n Λ_n: (C, C), by parts that fit into memory (`summed_curvature(f)`)."""
    own = getattr(likelihood, "summed_curvature", None)
    if own is not None:
        return own(f)
    size = max(1, CURVATURE_NUMBERS // f.shape[1] ** 2)
    pieces = [slice(start, start + size) for start in range(0, len(f), size)]
    sums = [of_points(likelihood, piece).curvature(f[piece]).sum(0) for piece in pieces]
    return torch.stack(sums).sum(0)


def inverse_curvature(likelihood: Likelihood, f: Tensor, curvature: Tensor) -> Tensor:
    """The pseudo-inverse Λ⁺ of each point's curvature at f: (N, C, C) (`inverse_curvature(f)`)."""
    own = getattr(likelihood, "inverse_curvature", None)
    if own is not None:
        return own(f)
    diagonal = curvature.diagonal(dim1=1, dim2=2)
    if bool((curvature == torch.diag_embed(diagonal)).all()):
        return torch.diag_embed(diagonal.reciprocal())
    return torch.linalg.pinv(curvature, hermitian=True)
