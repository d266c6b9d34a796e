"""Labels that name one of C classes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor, distributions

from net2gp.errors import InputError
from net2gp.likelihoods.integrals import by_points, mean_and_variance, moments, psd_root
from net2gp.likelihoods.laws import contrasts
from net2gp.likelihoods.links import Contrast, LaplaceBridge, MonteCarlo, Probit
from net2gp.likelihoods.targets import (
    ONLY_LAPLACE,
    check_targets,
    warn_of_probabilities,
    without_ignored,
)
from net2gp.linalg import softmax_root


@dataclass(frozen=True)
class Categorical:
    """Labels y ∈ {0, …, C − 1} with p(y = c | f) = softmax(f)_c, for C ≥ 2 logits f.

    log p(y | f) = f_y − log Σ_c e^{f_c}. With p = softmax(f), the residual is e_y − p and the
    curvature diag(p) − p pᵀ. The cost is O(N·C), and O(N·C²) for the curvature.

    Args:
        link: How `predict` integrates f out: `MonteCarlo()` (the default, with a fixed sample), `Probit()`
            (the mean-field closed form, which ignores the correlations of the logits), `Contrast()` (which
            compares each class with the best one) or `LaplaceBridge()` (the Dirichlet law that matches the
            Gaussian).

    Raises:
        InputError: If `link` is something else.

    >>> Categorical().residual(torch.zeros(1, 2), torch.tensor([1]))
    tensor([[-0.5000,  0.5000]])

    Reference: Rasmussen & Williams (2006), Gaussian Processes for Machine Learning, section 3.5.
    """

    link: MonteCarlo | Probit | LaplaceBridge | Contrast = field(default_factory=MonteCarlo)
    canonical: ClassVar[bool] = True
    classifier: ClassVar[bool] = True
    matched_link: ClassVar[type[Contrast]] = Contrast
    one_class: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.link, MonteCarlo | Probit | LaplaceBridge | Contrast):
            raise InputError(
                f"link must be MonteCarlo(), Probit(), Contrast() or LaplaceBridge(), but is {self.link!r}. "
                "One-dimensional quadrature is for Bernoulli()."
            )

    @property
    def open_link(self) -> bool:
        """Whether the link is the default, which `laplace` replaces by a matched `Contrast`."""
        return self.link == MonteCarlo()

    def with_link(self, link: MonteCarlo | Probit | LaplaceBridge | Contrast) -> Categorical:
        """Return the same likelihood with another link."""
        return replace(self, link=link)

    @staticmethod
    def cross_entropy(f: Tensor, logits: Tensor) -> Tensor:
        """Compute −E log p(y | logits) for labels y drawn at f, averaged over points."""
        return -(f.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()

    @staticmethod
    def num_outputs(y: Tensor) -> int:
        """Count the classes that targets need.

        Args:
            y: Labels (N,), or codes (N, C) of the classes.

        Returns:
            The largest label plus one and at least 2, or the width of the codes.
        """
        return max(2, int(y.max()) + 1) if y.dim() == 1 else y.shape[1]

    def check(self, f: Tensor, y: Tensor) -> None:
        """Check that `y` holds integers from 0 to C − 1, as (N,).

        Raises:
            InputError: If it does not, or if the network has fewer than two outputs.
        """
        check_targets(f, y)
        points, classes = f.shape
        if classes < 2:
            raise InputError(
                f"Categorical needs two outputs or more, but the network has {classes}. "
                "Use Bernoulli() for one logit."
            )
        if tuple(y.shape) != (points,):
            one_hot_like = tuple(y.shape) == (points, classes)
            again = f"Pass y = y.{'argmax(-1)' if one_hot_like else 'reshape(-1)'}."
            raise InputError(
                f"y must have shape ({points},), one class index per point, but has shape "
                f"{tuple(y.shape)}. {again if y.numel() <= points or one_hot_like else ONLY_LAPLACE}"
            )
        if y.is_floating_point() or y.dtype == torch.bool:
            raise InputError(
                f"y must hold integer class indices, but is {y.dtype}. Pass y = y.long()."
            )
        wrong = (y < 0) | (y >= classes)
        if bool(wrong.any()):
            raise InputError(
                without_ignored(y)
                or f"labels must be in 0..{classes - 1} for a network with {classes} outputs, "
                f"but y holds {int(y[wrong][0])}. Widen the last layer, or renumber the labels: "
                "y = torch.unique(y, return_inverse=True)[1]."
            )
        warn_of_probabilities(f, binary=False)

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """Compute log p(y_n | f_n): (N,)."""
        return f.log_softmax(-1).gather(-1, y.long()[:, None])[:, 0]

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        """Compute e_y − softmax(f): (N, C)."""
        # one_hot would look at the labels
        classes = torch.arange(f.shape[-1], device=f.device)
        return (y.long()[:, None] == classes).to(f) - f.softmax(-1)

    def curvature(self, f: Tensor) -> Tensor:
        """Compute diag(p) − p pᵀ: (N, C, C)."""
        p = f.softmax(-1)
        return torch.diag_embed(p) - p[..., :, None] * p[..., None, :]

    def curvature_root(self, f: Tensor) -> Tensor:
        """Compute a root of the curvature with C − 1 columns, which is its rank.

        Args:
            f: Outputs, (N, C).

        Returns:
            R with R Rᵀ = diag(p) − p pᵀ, of shape (N, C, C − 1).
        """
        return softmax_root(f.double().softmax(-1)).to(f.dtype)

    def summed_curvature(self, f: Tensor) -> Tensor:
        """Compute the sum of the curvatures without a matrix for each point.

        Args:
            f: Outputs, (N, C).

        Returns:
            Σ_n diag(p_n) − p_n p_nᵀ, of shape (C, C).
        """
        p = f.softmax(-1)
        return torch.diag(p.sum(0)) - p.mT @ p

    def inverse_curvature(self, f: Tensor) -> Tensor:
        """Compute the pseudo-inverse of each point's curvature.

        It is (diag p − p pᵀ)⁺ = P diag(1/p) P with P = I − 11ᵀ/C. The closed form needs no decision about
        which eigenvalues are zero.

        Args:
            f: Outputs, (N, C).

        Returns:
            One matrix per point, of shape (N, C, C).
        """
        P = torch.eye(f.shape[1]).to(f) - 1 / f.shape[1]
        return (P * f.softmax(-1).reciprocal()[:, None, :]) @ P

    def predict(self, f: MultivariateNormal) -> distributions.Categorical:
        """Compute p(y_n = c) = E softmax(f_n)_c, as `.probs` (N, C)."""
        if isinstance(self.link, Probit):
            return distributions.Categorical(logits=self.link.shrink(*mean_and_variance(f)))
        if isinstance(self.link, Contrast):
            return distributions.Categorical(logits=self.link.shrink(f.mean, contrasts(f)))
        mean, _, covariance = moments(f)
        if isinstance(self.link, LaplaceBridge):
            alpha = self.link.concentration(mean, covariance)
            return distributions.Categorical(probs=alpha / alpha.sum(-1, keepdim=True))
        num_samples, classes = self.link.num_samples, mean.shape[-1]
        z = self.link.base_sample(classes, like=mean.double())

        def average(m: Tensor, root: Tensor) -> tuple[Tensor]:
            log_probs = logit_samples(m, root, z).log_softmax(-1)
            return (log_probs.logsumexp(0) - math.log(num_samples),)

        arguments = (mean.double(), psd_root(covariance.double()))
        (logits,) = by_points(average, arguments, numbers=num_samples * classes)
        return distributions.Categorical(logits=logits.to(mean.dtype))


def logit_samples(mean: Tensor, root: Tensor, z: Tensor) -> Tensor:
    """Draw logits as mean + root z.

    Args:
        mean: Means, (N, C).
        root: Roots of the covariances, (N, C, C).
        z: Base points, (S, C).

    Returns:
        Samples of shape (S, N, C).
    """
    return mean + torch.einsum("ncd,sd->snc", root, z)
