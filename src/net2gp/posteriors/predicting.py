"""The law of the targets, from the law of f and a likelihood."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor
from torch.distributions import Distribution

from net2gp.errors import InputError, readable
from net2gp.inputs import describe
from net2gp.likelihoods.laws import Contrasts, Variances, gaussian_law
from net2gp.likelihoods.mixtures import mixture
from net2gp.likelihoods.traits import needs, novelty_var, of_a_row
from net2gp.linear.curvatures.kept_features import keeping_features
from net2gp.posteriors.conditioning.process import Process
from net2gp.posteriors.conditioning.samples import WeightSamples
from net2gp.posteriors.split import Split, split_law
from net2gp.types import Inputs, Likelihood


class NotGaussian(Process, Protocol):
    """A process that predicts, draws and splits variances by itself, since its law is not Gaussian."""

    def predict(self, x: Inputs, likelihood: Likelihood, own: bool) -> Distribution:
        """The law of y at each point; `own` says that the likelihood is the posterior's, not another one."""

    def split(self, x: Inputs, likelihood: Likelihood, own: bool) -> Split:
        """The parts of the variance of y."""

    def draw(self, x: Inputs, num_samples: int, generator: torch.Generator | None) -> Tensor:
        """Draws of f(x): (S, N, C)."""


def is_gaussian(process: Any) -> bool:
    """Whether f is a Gaussian process; networks and mixtures have a `predict` of their own."""
    return not hasattr(process, "predict")


def predicted(process: Process, x: Inputs, likelihood: Likelihood, *, own: bool) -> Distribution:
    """The law of y at each point, with f integrated out; a link may need less than whole covariances."""
    if not is_gaussian(process):
        return cast(NotGaussian, process).predict(x, likelihood, own)
    with keeping_features(x):  # one pass for novelty, mean and covariance
        needed, novel = needs(likelihood), _novel(process, x, likelihood)
        if needed == "variances":
            mean, variances = process.diagonal(x)
            return likelihood.predict(Variances(mean, _finite(variances + novel, mean)))
        if needed == "contrasts":
            mean, variances = process.contrast(x)
            return likelihood.predict(Contrasts(mean, _finite(variances + 2 * novel, mean)))
        return likelihood.predict(rounded(*_widened(process, x, novel)))


def _widened(process: Process, x: Inputs, novel: Tensor | float) -> tuple[Tensor, Tensor]:
    """The mean and the covariance of each point, with what its outputs gain."""
    mean, blocks = process.moments(x)
    if isinstance(novel, Tensor):
        blocks = blocks + torch.diag_embed(novel.to(blocks).expand_as(mean))
    return mean, _finite(blocks, mean)


def _finite(variances: Tensor, mean: Tensor) -> Tensor:
    """The variances of f, or an error where they, or the mean, are beyond the largest number of its dtype."""
    values = [variances, mean]
    wrapped = any(map(torch._C._functorch.is_functorch_wrapped_tensor, values))  # hides its values
    if wrapped or mean.is_meta or not readable(mean):
        return variances
    bad = [~value.detach().to(mean.dtype).isfinite().flatten(1).all(1) for value in values]
    where = (bad[0] | bad[1]).nonzero()
    if len(where) == 0:
        return variances
    raise InputError(
        f"f has no finite mean and variance in {mean.dtype} at {len(where)} of {len(mean)} points (first in "
        f"row {int(where[0])}): x, or outputs there, are so large that their squares are not. Pass inputs on "
        "the scale of the training inputs, or use posterior.to(dtype=torch.float64) and x.double()."
    )


def _novel(process: Process, x: Inputs, likelihood: Likelihood) -> Tensor | float:
    """The variance that each output gains since a point is novel, if the process or the link asks for it."""
    if getattr(process, "widening", None) is not None:
        return cast(Tensor, process.gained(x))  # type: ignore[attr-defined]
    most = novelty_var(likelihood)
    excess = getattr(process, "excess", None)
    return 0.0 if not most or excess is None else most * excess(x)[..., None]


def open_share(process: Process, x: Inputs) -> Tensor:
    """The share of the prior variance that the data leave open, (N,), as the process counts it."""
    if getattr(process, "seen", None) is not None:
        share = cast(Tensor, process.novelty(x))  # type: ignore[attr-defined]
        return _finite(share[:, None], share[:, None])[:, 0]
    mean, left = process.diagonal(x)
    left = _finite(left, mean).sum(-1)
    whole = process.prior_variances(x).sum(-1).to(left.dtype)
    return torch.where(whole > 0, left / torch.where(whole > 0, whole, 1.0), 0.0)


def split_targets(process: Process, x: Inputs, likelihood: Likelihood, *, own: bool) -> Split:
    """The parts of the variance of y at each point."""
    if not is_gaussian(process):
        return cast(NotGaussian, process).split(x, likelihood, own)
    mean, blocks = _widened(process, x, _novel(process, x, likelihood))
    law = rounded(mean.flatten(0, -2), blocks.flatten(0, -3))  # places count as points
    parts = split_law(law, of_a_row(likelihood), x)
    shape = mean.shape[:-1]
    wide = (value.reshape(*shape, -1) for value in (parts.epistemic, parts.aleatoric))
    return Split(*wide)


def averaged(
    sample: Callable[..., Tensor], x: Inputs, likelihood: Likelihood, samples: WeightSamples
) -> Distribution:
    """The law of y as the average over networks whose parameters are drawn."""
    if not isinstance(samples, WeightSamples):
        raise InputError(f"samples must be WeightSamples(100) or None, but is {describe(samples)}.")
    generator = torch.Generator().manual_seed(samples.seed)
    draws = sample(x, samples.num_samples, generator=generator, linear=False)
    return mixture(likelihood, draws)


def rounded(mean: Tensor, blocks: Tensor) -> MultivariateNormal:
    """Round the law to the dtype of its mean; covariances may have more digits up to this point."""
    return gaussian_law(mean, blocks.to(mean.dtype))
