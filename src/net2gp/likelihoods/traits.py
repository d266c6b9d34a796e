"""What other rooms ask of a likelihood. The likelihood answers itself, or a default applies.

A likelihood needs the five members of `net2gp.types.Likelihood`. Everything here is optional: the docstring
of a function names the member that replaces the default.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeGuard, TypeVar, runtime_checkable

import torch
from torch import Tensor
from torch.distributions import Distribution

from net2gp.likelihoods.laws import gaussian_law
from net2gp.likelihoods.targets import shape_targets
from net2gp.linalg import block_matmul, psd_root
from net2gp.types import Likelihood

Need = Literal["variances", "contrasts", "covariance"]
"""What a link reads of the law of f: variances, variances of differences to the best class, or everything."""

CURVATURE_NUMBERS = 2**24
"""The most numbers of curvatures that are held at once if only their sum is needed."""

Given = TypeVar("Given", bound=Likelihood)


@runtime_checkable
class GaussianNoise(Likelihood, Protocol):
    """A likelihood y = f + ε with Gaussian ε, under which posteriors are exact."""

    @property
    def noise_var(self) -> float | Tensor | None:
        """The variance of ε, or None if it is to be learned."""

    def noise_variance(self, f: Tensor) -> Tensor:
        """Expand the noise variance to the shape of `f`.

        Args:
            f: Outputs, (N, C).

        Returns:
            The variance of each entry, (N, C).
        """

    def with_noise(self, noise_var: float | Tensor) -> GaussianNoise:
        """Return the same likelihood with another noise.

        Args:
            noise_var: The variance of ε.

        Returns:
            The likelihood with this noise.
        """


@runtime_checkable
class Linked(Likelihood, Protocol):
    """A likelihood with a link whose scale can be matched to the certainty of a network."""

    @property
    def link(self) -> Any:
        """The way in which f is integrated out."""

    @property
    def matched_link(self) -> Any:
        """The class of link that is chosen, with a matched scale, if the link is open."""

    @property
    def open_link(self) -> bool:
        """Whether no link was given, so that one is chosen."""

    def with_link(self, link: Any) -> Likelihood:
        """Return the same likelihood with another link.

        Args:
            link: How f is integrated out.

        Returns:
            The likelihood with this link.
        """

    def cross_entropy(self, f: Tensor, logits: Tensor) -> Tensor:
        """Compute −E log p(y | logits) for targets y drawn at f.

        Args:
            f: Outputs that give the law of y, (N, C).
            logits: Outputs whose log density is averaged, (N, C).

        Returns:
            The average over points, a number.
        """


def num_outputs(likelihood: Likelihood, y: Tensor) -> int:
    """Count the outputs C that targets need, for kernels that do not say it themselves (`num_outputs(y)`).

    The default is the number of targets per point.

    Args:
        likelihood: The likelihood of the targets.
        y: Targets, (N,) or (N, D).

    Returns:
        The number of outputs.

    >>> from net2gp.likelihoods import Categorical
    >>> num_outputs(Categorical(), torch.tensor([0, 3, 1]))
    4
    """
    own = getattr(likelihood, "num_outputs", None)
    if own is not None:
        return int(own(y) if callable(own) else own)
    return y.shape[1] if y.dim() > 1 else 1


def has_gaussian_noise(likelihood: object) -> TypeGuard[GaussianNoise]:
    """Whether y = f + Gaussian noise (the members of `GaussianNoise`), so that posteriors are exact."""
    return isinstance(likelihood, GaussianNoise)


def has_open_noise(likelihood: object) -> TypeGuard[GaussianNoise]:
    """Whether the variance of Gaussian noise is to be learned."""
    return has_gaussian_noise(likelihood) and likelihood.noise_var is None


def has_open_link(likelihood: object) -> TypeGuard[Linked]:
    """Whether the likelihood has the members of `Linked` and `open_link` asks to choose a link."""
    return isinstance(likelihood, Linked) and likelihood.open_link


def is_classifier(likelihood: object) -> bool:
    """Whether y are labels (`classifier`).

    A network can be so certain of a label that the point has no curvature left.
    """
    return bool(getattr(likelihood, "classifier", False))


def has_one_class(likelihood: object) -> bool:
    """Whether the outputs are logits of classes and exactly one class is the label (`one_class`)."""
    return bool(getattr(likelihood, "one_class", False))


def needs(likelihood: object) -> Need:
    """What `predict` reads of the law of f: the member `needs` of the link, by default the covariance.

    >>> from net2gp.likelihoods import Categorical, Probit
    >>> needs(Categorical(Probit())), needs(Categorical())
    ('variances', 'covariance')
    """
    found: Need = getattr(getattr(likelihood, "link", None), "needs", "covariance")
    return found


def novelty_var(likelihood: object) -> float:
    """The variance that each output gains at a novel point (`novelty_var` of the link), by default none.

    >>> from net2gp.likelihoods import Categorical, Contrast
    >>> novelty_var(Categorical(Contrast(novelty_var=2.0))), novelty_var(Categorical())
    (2.0, 0.0)
    """
    return float(getattr(getattr(likelihood, "link", None), "novelty_var", 0.0))


def tied_points(likelihood: object) -> int | None:
    """The number of points if the likelihood holds numbers for each of them (`tied_points`), else None."""
    found: int | None = getattr(likelihood, "tied_points", None)
    return found


def of_points(likelihood: Given, part: Tensor | slice) -> Given:
    """Select the likelihood of some of the points, with the numbers that belong to them (`of_points(part)`).

    Args:
        likelihood: The likelihood of all points.
        part: Indices or a slice of the points.

    Returns:
        The likelihood of the selected points. It is unchanged if no number belongs to a point.

    >>> from net2gp.likelihoods import Gaussian
    >>> of_points(Gaussian(torch.tensor([[0.1], [0.2]])), slice(1, 2)).noise_var
    tensor([[0.2000]])
    """
    own = getattr(likelihood, "of_points", None)
    return likelihood if own is None else own(part)


def law_of_targets(likelihood: Likelihood, f: Tensor) -> Distribution:
    """Return the law of y given outputs: `law(f)`, or the prediction from an f without variance.

    Args:
        likelihood: The likelihood p(y | f).
        f: Outputs, (N, C).

    Returns:
        The law of y.

    >>> from net2gp.likelihoods import Bernoulli
    >>> law_of_targets(Bernoulli(), torch.zeros(1, 1)).mean
    tensor([[0.5000]])
    """
    own = getattr(likelihood, "law", None)
    if own is not None:
        return own(f)
    return likelihood.predict(gaussian_law(f, f.new_zeros(*f.shape, f.shape[1])))


def negative_hessian(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    """Compute −∇²_f log p(y_n | f_n), which may be indefinite, with C backward passes.

    Args:
        likelihood: The likelihood p(y | f).
        f: Outputs, (N, C).
        y: Targets.

    Returns:
        One matrix per point, (N, C, C).
    """
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

    For a likelihood that does not say so, both are compared with the given targets, at the outputs f and at
    random outputs around them. The cost is 2·C backward passes through the residual.

    Args:
        likelihood: The likelihood p(y | f).
        f: Outputs, (N, C).
        y: Targets.

    Returns:
        The answer of the likelihood, or of the comparison.

    >>> from net2gp.likelihoods import Bernoulli
    >>> is_canonical(Bernoulli(), torch.zeros(2, 1), torch.tensor([0, 1]))
    True
    """
    own = getattr(likelihood, "canonical", None)
    if own is not None:
        return bool(own)
    # At a special place, such as f = 0 of a symmetric law, the two may agree by accident.
    generator = torch.Generator().manual_seed(0)
    around = f.detach() + torch.randn(f.shape, generator=generator, dtype=f.dtype).to(f.device)
    return all(_has_hessian(likelihood, place, y) for place in (f.detach(), around))


def _has_hessian(likelihood: Likelihood, f: Tensor, y: Tensor) -> bool:
    curvature, hessian = likelihood.curvature(f).detach(), negative_hessian(likelihood, f, y)
    tol = 1e2 * torch.finfo(f.dtype).eps ** 0.75
    return torch.allclose(curvature, hessian, rtol=tol, atol=tol * float(curvature.abs().max()))


def curvature_root(likelihood: Likelihood, f: Tensor) -> Tensor:
    """Compute R with R Rᵀ equal to the curvature (`curvature_root(f)`).

    Args:
        likelihood: The likelihood p(y | f).
        f: Outputs, (N, C).

    Returns:
        Roots of shape (N, C, K) with K ≤ C columns.

    >>> from net2gp.likelihoods import Gaussian
    >>> curvature_root(Gaussian(0.25), torch.zeros(1, 1))
    tensor([[[2.]]])
    """
    own = getattr(likelihood, "curvature_root", None)
    return psd_root(likelihood.curvature(f)).to(f.dtype) if own is None else own(f)


def summed_curvature(likelihood: Likelihood, f: Tensor) -> Tensor:
    """Compute the sum Σ_n Λ_n of the curvatures, in parts that fit into memory (`summed_curvature(f)`).

    Args:
        likelihood: The likelihood p(y | f).
        f: Outputs, (N, C).

    Returns:
        The sum, (C, C).
    """
    own = getattr(likelihood, "summed_curvature", None)
    if own is not None:
        return own(f)
    size = max(1, CURVATURE_NUMBERS // f.shape[1] ** 2)
    pieces = [slice(start, start + size) for start in range(0, len(f), size)]
    sums = [of_points(likelihood, piece).curvature(f[piece]).sum(0) for piece in pieces]
    return torch.stack(sums).sum(0)


def inverse_curvature(likelihood: Likelihood, f: Tensor, curvature: Tensor) -> Tensor:
    """Compute the pseudo-inverse Λ⁺ of each point's curvature at f (`inverse_curvature(f)`).

    Args:
        likelihood: The likelihood p(y | f).
        f: Outputs, (N, C).
        curvature: The curvatures at f, (N, C, C).

    Returns:
        One matrix per point, (N, C, C).
    """
    own = getattr(likelihood, "inverse_curvature", None)
    if own is not None:
        return own(f)
    diagonal = curvature.diagonal(dim1=1, dim2=2)
    if bool((curvature == torch.diag_embed(diagonal)).all()):
        return torch.diag_embed(diagonal.reciprocal())
    return torch.linalg.pinv(curvature, hermitian=True)


def curvature_times(likelihood: Likelihood, f: Tensor, v: Tensor) -> Tensor:
    """Multiply the curvatures of points by columns (`curvature_times(f, v)`, which need not form them).

    Args:
        likelihood: The likelihood p(y | f).
        f: Outputs, (N, C).
        v: Columns, (N·C, k).

    Returns:
        Λ v, (N·C, k).
    """
    own = getattr(likelihood, "curvature_times", None)
    return block_matmul(likelihood.curvature(f), v) if own is None else own(f, v)


def root_times(likelihood: Likelihood, f: Tensor, draw: Callable[[int], Tensor]) -> Tensor:
    """Multiply a root R of the curvature by numbers that are drawn for it (`root_times(f, draw)`).

    Args:
        likelihood: The likelihood p(y | f).
        f: Outputs, (N, C).
        draw: Returns numbers (N, K, S) for the number K of columns of R.

    Returns:
        R z, (N, C, S).
    """
    own = getattr(likelihood, "root_times", None)
    if own is not None:
        found: Tensor = own(f, draw)
        return found
    root = curvature_root(likelihood, f)
    return root @ draw(root.shape[2]).to(root)


def class_counts(likelihood: Likelihood, y: Tensor, num_classes: int) -> Tensor:
    """Count how often each class is the label (`class_counts(y)`): (C,)."""
    own = getattr(likelihood, "class_counts", None)
    return torch.bincount(y.long(), minlength=num_classes) if own is None else own(y)


def target_columns(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    """Return targets in the shape of outputs (N, C) that they are noisy values of (`columns(f, y)`)."""
    own = getattr(likelihood, "columns", None)
    return shape_targets(f, y) if own is None else own(f, y)


def scores(likelihood: Likelihood, law: Distribution, y: Tensor) -> Tensor:
    """Compute log p(y) of targets under a prediction (`scores(law, y)`), one number for each that counts."""
    own = getattr(likelihood, "scores", None)
    if own is not None:
        found: Tensor = own(law, y)
        return found
    return law.log_prob(y.reshape(law.batch_shape + law.event_shape).to(law.mean.dtype))


def bound_to(likelihood: Given, y: Tensor) -> Given:
    """The likelihood of points with these targets, some of which may not count (`bound(y)`)."""
    own = getattr(likelihood, "bound", None)
    return likelihood if own is None else own(y)


def of_any_points(likelihood: Given) -> Given:
    """The likelihood without what belongs to training points alone (`free()`), as a posterior has it."""
    own = getattr(likelihood, "free", None)
    return likelihood if own is None else own()


def of_a_row(likelihood: Likelihood) -> Likelihood:
    """The likelihood of one row of outputs: of a place (`likelihood`) where it holds at each, else itself."""
    return likelihood if rows_per_point(likelihood) is None else likelihood.likelihood  # type: ignore[attr-defined]


def rows_per_point(likelihood: Likelihood) -> Callable[[Tensor], Tensor] | None:
    """What turns outputs (N, P·C) into rows (N·P, C) if the likelihood holds at places, else None."""
    found: Callable[[Tensor], Tensor] | None = getattr(likelihood, "rows", None)
    return found
