"""Whether Markov chains have mixed: R̂ and effective sample sizes of predictions."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from scipy import stats
from torch import Tensor

from net2gp.errors import InputError, NotAvailable, NotMixed, check_positive, warn
from net2gp.inputs import describe
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.recipes.drawn import ByDrawing, Drawn, check_posterior
from net2gp.types import Inputs

INDEPENDENT = ("map_estimate", "ensemble", "mean_field", "mc_dropout")
"""Methods whose networks do not follow one another as the draws of a chain do."""


def r_hat(values: Tensor) -> Tensor:
    """Compute the rank-normalized split R̂, the larger one of bulk and tail.

    Each chain is split in two halves, all values are replaced by normal scores of their ranks, and R̂ is the
    root of the pooled variance over the mean variance within the halves. The tail's one takes the distances
    from the median in place of the values. It is near 1 if all chains have the same law.

    Args:
        values: Draws, with chains and draws as the first two axes, (K, D, ...).

    Returns:
        One R̂ per remaining entry, in float64; NaN where nothing varies.

    Raises:
        InputError: If there are fewer than four draws per chain.

    >>> chains = torch.randn(4, 100, generator=torch.Generator().manual_seed(0))
    >>> r_hat(chains)
    tensor(1.0032, dtype=torch.float64)

    Reference: Vehtari et al., Rank-normalization, folding, and localization: an improved R̂, Bayesian
    Analysis 2021.
    """
    halves = _split(_checked(values))
    middle = halves.flatten(0, 1).quantile(0.5, 0)
    return torch.maximum(_r_hat(_scores(halves)), _r_hat(_scores((halves - middle).abs())))


def bulk_ess(values: Tensor) -> Tensor:
    """Compute the effective sample size for means: of the normal scores of the ranks.

    Args:
        values: Draws, (K, D, ...).

    Returns:
        The number of independent draws that would be worth as much, per remaining entry, in float64.

    Raises:
        InputError: If there are fewer than four draws per chain.

    Reference: Vehtari et al., as in `r_hat`.
    """
    return _ess(_scores(_split(_checked(values))))


def tail_ess(values: Tensor) -> Tensor:
    """Compute the effective sample size for the 5 % and 95 % quantiles, the smaller one.

    Args:
        values: Draws, (K, D, ...).

    Returns:
        One number per remaining entry, in float64.

    Raises:
        InputError: If there are fewer than four draws per chain.

    Reference: Vehtari et al., as in `r_hat`.
    """
    values = _checked(values)
    ends = [_quantile(values, level) for level in (0.05, 0.95)]
    return torch.minimum(*(_ess(_split((values <= end).double())) for end in ends))


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """How well the chains of a posterior have mixed, judged by their predictions.

    Args:
        r_hat: The rank-normalized split R̂ of f at each point and output, (N, C).
        bulk_ess: The effective sample size for means of f, (N, C).
        tail_ess: The effective sample size for the 5 % and 95 % quantiles of f, (N, C).
        divergences: The number of divergent trajectories of each chain, (K,); zeros if the method has none.
        acceptance: The mean acceptance probability of each chain, (K,), or None if the method has none.
    """

    r_hat: Tensor = field(repr=False)
    bulk_ess: Tensor = field(repr=False)
    tail_ess: Tensor = field(repr=False)
    divergences: Tensor = field(repr=False)
    acceptance: Tensor | None = field(default=None, repr=False)

    @property
    def worst_r_hat(self) -> float:
        """The largest R̂."""
        return float(self.r_hat.nan_to_num(nan=1.0).max())

    @property
    def least_ess(self) -> float:
        """The smallest effective sample size, of bulk and tail."""
        return float(torch.minimum(self.bulk_ess, self.tail_ess).min())

    def __repr__(self) -> str:
        rate = (
            "" if self.acceptance is None else f", acceptance={float(self.acceptance.mean()):.2f}"
        )
        return (
            f"Diagnosis(worst_r_hat={self.worst_r_hat:.4f}, least_ess={self.least_ess:.0f}, "
            f"divergences={int(self.divergences.sum())}{rate})"
        )


def diagnose(posterior: Posterior, x: Inputs, *, largest_r_hat: float = 1.01) -> Diagnosis:
    """Judge Markov chains by the predictions f(x) of their draws.

    The weights of a network are not identifiable: hidden units can be permuted, and signs can change, without
    a change of f. Chains in different copies of one mode have an R̂ of the weights far above 1 though their
    predictions agree. So R̂ and effective sample sizes belong to f(x). Take points where predictions matter,
    some of them away from the data.

    Args:
        posterior: What `hmc`, `nuts` or another method with chains returned.
        x: N points.
        largest_r_hat: The R̂ above which a warning is given.

    Returns:
        R̂ and effective sample sizes per point and output, divergences and acceptance per chain.

    Raises:
        NotAvailable: If the posterior does not come from Markov chains.

    Warns:
        NotMixed: If an R̂ is too large.

    >>> from torch import nn
    >>> from net2gp.bayes.chains.nuts import nuts
    >>> from net2gp.likelihoods import Gaussian
    >>> x = torch.ones(4, 1)
    >>> posterior = nuts(nn.Linear(1, 1), (x, x), Gaussian(noise_var=1.0), num_draws=200, warmup=100)
    >>> diagnose(posterior, x[:1], largest_r_hat=1.1).r_hat.shape
    torch.Size([1, 1])

    Reference: Vehtari et al., as in `r_hat`. Izmailov et al., What are Bayesian neural network posteriors
    really like?, ICML 2021, on R̂ in weight space and function space.
    """
    check_positive(largest_r_hat, "largest_r_hat", single=True)
    values, recipe = chain_values(posterior, x)
    if recipe.method in INDEPENDENT:
        raise NotAvailable(
            f"the networks of {recipe.method} are no Markov chain, so they have no R̂. Use hmc or nuts of "
            "net2gp.bayes; diversity(posterior, x) compares the networks."
        )
    found = Diagnosis(
        r_hat(values),
        bulk_ess(values),
        tail_ess(values),
        recipe.statistics.get("divergences", torch.zeros(recipe.num_chains, dtype=torch.int64)),
        recipe.statistics.get("acceptance"),
    )
    if found.worst_r_hat > largest_r_hat:
        warn(
            f"the chains have not mixed: R̂ of f(x) is up to {found.worst_r_hat:.3f}, and should be at most "
            f"{largest_r_hat:g}. Draw more (num_draws, warmup), or start chains closer to the posterior with "
            "start=; averages over the chains are still better than one chain.",
            NotMixed,
        )
    return found


def chain_values(posterior: Posterior, x: Inputs) -> tuple[Tensor, ByDrawing]:
    """Return f(x) with the axes chain, draw, point and output, (K, D, N, C), and the recipe."""
    check_posterior(posterior)
    process, recipe = posterior.process, posterior.recipe
    if not isinstance(process, Drawn) or not isinstance(recipe, ByDrawing):
        raise NotAvailable(
            "this posterior does not come from Markov chains, so it has no R̂. Use hmc or nuts "
            "of net2gp.bayes."
        )
    values = process.values(x)
    return values.reshape(recipe.num_chains, -1, *values.shape[1:]), recipe


def _checked(values: Tensor) -> Tensor:
    if not isinstance(values, Tensor) or values.dim() < 2 or values.shape[1] < 4:
        raise InputError(
            "values must have chains and at least four draws as the first two axes, but is "
            f"{describe(values)}. Pass for example posterior draws as (4, 1000)."
        )
    return values.detach().cpu().double()


def _split(values: Tensor) -> Tensor:
    """Take the first and the last half of each chain as chains of their own."""
    half = values.shape[1] // 2
    return torch.cat([values[:, :half], values[:, -half:]])


def _scores(values: Tensor) -> Tensor:
    """Replace values by normal scores of their ranks over all chains and draws."""
    flat = values.flatten(0, 1)
    ranks = torch.as_tensor(stats.rankdata(flat.numpy(), axis=0))
    return torch.special.ndtri((ranks - 0.375) / (len(flat) + 0.25)).reshape(values.shape)


def _quantile(values: Tensor, level: float) -> Tensor:
    ordered = values.flatten(0, 1).sort(0).values
    place = level * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return torch.lerp(ordered[below], ordered[above], place - below)


def _r_hat(values: Tensor) -> Tensor:
    count = values.shape[1]
    within = values.var(1).mean(0)
    between = count * values.mean(1).var(0)
    return ((between / within + count - 1) / count).sqrt()


def _ess(values: Tensor) -> Tensor:
    """K·D / τ with Geyer's initial monotone sequence for the autocorrelation time τ."""
    chains, count = values.shape[:2]
    centered = values - values.mean(1, keepdim=True)
    spectrum = torch.fft.rfft(centered, n=2 * count, dim=1).abs().square()
    covariance = (torch.fft.irfft(spectrum, n=2 * count, dim=1)[:, :count] / count).mean(0)
    within = covariance[0] * count / (count - 1)
    total = covariance[0] + values.mean(1).var(0)
    rho = 1 - (within - covariance) / total
    rho[0] = 1.0
    pairs = rho[: count // 2 * 2].unflatten(0, (-1, 2)).sum(1)
    longest = max(0, -(-(count - 4) // 2))  # the last pair that is looked at
    places = torch.arange(longest + 1).reshape(-1, *[1] * (pairs.dim() - 1))
    negative = pairs[: longest + 1] <= 0
    last = torch.where(negative, places, longest).amin(0)
    sums = torch.where(places < last, pairs[: longest + 1].cummin(0).values, 0.0).sum(0)
    even = rho.gather(0, 2 * last[None])[0]
    kept = (even > 0) | (pairs.gather(0, last[None])[0] >= 0)
    tau = -1 + 2 * sums + torch.where(kept, even, 0.0)
    size = chains * count
    found = size / tau.clamp(min=1 / torch.tensor(float(size)).log10())
    spread = values.flatten(0, 1)
    constant = spread.amax(0) - spread.amin(0) < 1e-15
    return torch.where(constant, float(size), found)
