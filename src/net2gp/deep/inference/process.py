"""A fitted deep Gaussian process as the law of f: a mixture over draws of its inner layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, distributions
from torch.distributions import Distribution

from net2gp.deep.inference.expectations import standard_points
from net2gp.deep.inference.inducing import InducingLayer, Projection
from net2gp.deep.inference.sigma_points import SigmaPoints
from net2gp.deep.inference.stack import mirrored
from net2gp.errors import InputError, NotAvailable
from net2gp.inputs import describe, follows
from net2gp.kernels import BaseKernel
from net2gp.likelihoods.laws import Variances, average
from net2gp.likelihoods.links import Contrast
from net2gp.likelihoods.mixtures import mixture
from net2gp.likelihoods.responses import target_moments
from net2gp.likelihoods.traits import has_gaussian_noise, has_one_class
from net2gp.linalg import symmetric_root
from net2gp.linalg.chance import random_normal
from net2gp.posteriors.split import Split
from net2gp.tags import savable
from net2gp.types import Inputs, Kernel, Likelihood

NUMBERS = 2**24
"""How many numbers the projections of one chunk of points may hold."""

NODES, ALL_NODES, ONE_OUTPUT = 8, 512, 4096
"""Values of the last layer per draw of the inner layers, and at least how many there are in all for several
outputs and for one, where an integral has no closed form. One output can have a rate, which is an exponential
of it, so that its moments need more."""


@savable("deep.InnerDraws")
@dataclass(frozen=True, eq=False)
class InnerDraws:
    """S functions drawn from the inner layers, one composition each.

    A draw fixes the whitened values v of every layer and a number e per output: its function is
    h(x) = m(x) + s (Aᵀv + e √(k(x, x) − AᵀA)), with the factor s of the output. At each point it has the law
    of the layer. What the inducing points leave open is the same multiple of its standard deviation at all
    points.

    Args:
        layers: The inner layers.
        values: The whitened values of each layer, (S, M, C).
        open_parts: The numbers e of each layer, (S, C).
    """

    layers: tuple[InducingLayer, ...]
    values: tuple[Tensor, ...] = field(repr=False)
    open_parts: tuple[Tensor, ...] = field(repr=False)

    def __len__(self) -> int:
        return len(self.values[0]) if self.layers else 1

    def __call__(self, x: Tensor) -> Tensor:
        """Return the values of the functions: (S, N, C)."""
        current, count = x, len(self)
        if not self.layers:
            return x[None]
        for layer, v, e in zip(self.layers, self.values, self.open_parts, strict=True):
            found = layer.project(current)
            mean, open_part = found.given(v, len(x))
            current = (mean + open_part.sqrt() * e[:, None]).reshape(count * len(x), -1)
        return current.reshape(count, len(x), -1)


def draw_inner(
    layers: tuple[InducingLayer, ...], num_draws: int, seed: int, *, prior: bool = False
) -> InnerDraws:
    """Draw functions from the inner layers, half of them mirrored, with a fixed seed.

    Args:
        layers: The inner layers.
        num_draws: The number of functions S.
        seed: The seed.
        prior: Whether to draw from the prior of the layers instead.

    Returns:
        The functions.
    """
    generator = torch.Generator().manual_seed(seed)
    values, parts = [], []
    for layer in layers:
        count, width = layer.center.shape
        z = mirrored(torch.Size((num_draws, count, width)), generator).to(layer.center)
        drawn = layer.center + torch.einsum("cmk,skc->smc", layer.root, z)
        values.append(z if prior else drawn)
        parts.append(mirrored(torch.Size((num_draws, width)), generator).to(layer.center))
    return InnerDraws(layers, tuple(values), tuple(parts))


@savable("kernels.DeepCovariance")
@dataclass(frozen=True, eq=False)
class DeepCovariance(BaseKernel):
    """The covariance of the outputs before the data: k(x, y) = (1/S) Σ_s k_L(h_s(x), h_s(y)).

    Args:
        kernel: The kernel of the last layer.
        inner: Functions drawn from the prior of the inner layers.
        variance: A factor.
    """

    kernel: Kernel
    inner: InnerDraws
    variance: float | Tensor = 1.0

    def __call__(self, x: Inputs, y: Inputs | None = None) -> Tensor:
        """Compute k(x, y), (N, M)."""
        precise, first = self.kernel.precise(), self.inner(_rows(x))
        second = first if y is None or y is x else self.inner(_rows(y))
        matrices = [precise(a, b) for a, b in zip(first, second, strict=True)]
        return self.variance * torch.stack(matrices).mean(0)

    def diag(self, x: Inputs) -> Tensor:
        """k(x_n, x_n), (N,)."""
        draws = self.inner(_rows(x))
        own = self.kernel.precise().diag(draws.flatten(0, 1)).reshape(draws.shape[:2])
        return self.variance * own.mean(0)

    def scaled(self, variance: float | Tensor) -> DeepCovariance:
        """variance · k."""
        return replace(self, variance=self.variance * variance)


@savable("process.Deep")
@dataclass(frozen=True, eq=False)
class Deep:
    """The law of f that a deep Gaussian process has after a fit.

    Given functions h_s drawn from the inner layers, f is a Gaussian process. The law is the mixture of S such
    processes, with equal weights unless they are sigma points. So it is not Gaussian: predictions average
    over the draws, and f can be bimodal where the inner layers are uncertain.

    Args:
        last: The last layer.
        inner: Functions drawn from the inner layers, or their sigma points.
        seed: The seed of draws from the prior.
        values: The whitened values of the last layer in each draw, (S, M, C), or None if they have the law
            of `last` in all of them.
    """

    last: InducingLayer
    inner: InnerDraws | SigmaPoints
    seed: int = 0
    values: Tensor | None = field(default=None, repr=False)

    @property
    def num_outputs(self) -> int:
        """The number of outputs C."""
        return self.last.width

    @property
    def count(self) -> int:
        """The number of draws S."""
        return len(self.inner) if self.values is None else len(self.values)

    @property
    def weights(self) -> Tensor | None:
        """The weights of the S processes, (S,), or None if they are equal."""
        return self.inner.weights if isinstance(self.inner, SigmaPoints) else None

    def _average(self, values: Tensor) -> Tensor:
        """The average over the draws, which are the first axis."""
        weights = self.weights
        return values.mean(0) if weights is None else torch.tensordot(weights.to(values), values, 1)

    def _shares(self, like: Tensor) -> Tensor:
        """The weights of the S processes, also if they are equal: (S,)."""
        equal = like.new_full((self.count,), 1 / self.count)
        return equal if self.weights is None else self.weights.to(like)

    @property
    def layers(self) -> tuple[InducingLayer, ...]:
        """All layers, from the inputs to f."""
        return (*self.inner.layers, self.last)

    @cached_property
    def kernel(self) -> DeepCovariance:
        """The covariance of f before the data."""
        prior = draw_inner(self.inner.layers, self.count, self.seed, prior=True)
        return DeepCovariance(self.last.kernel, prior)

    def facts(self) -> dict[str, str]:
        """The kernels, and the number of draws."""
        names = " → ".join(type(layer.kernel).__name__ for layer in self.layers)
        return {"_kernel": names, "draws": f"{self.count}"}

    def check(self, x: Inputs) -> None:
        """Raise unless `x` can be points of the first layer."""
        if not isinstance(x, Tensor) or x.shape[1:] != self.layers[0].input_shape:
            shape = ", ".join(["N", *map(str, self.layers[0].input_shape)])
            raise InputError(
                f"x must be a tensor of shape ({shape}), as in the fit, but is {describe(x)}."
            )
        self.layers[0].kernel.precise().check(_rows(x))

    def hidden(self, x: Tensor) -> Tensor:
        """Return the values that enter the last layer, for each draw of the inner layers: (S, N, D)."""
        found = self.inner(_rows(x))
        return found.expand(self.count, *found.shape[1:])

    def mean(self, x: Inputs) -> Tensor:
        """The average over the draws: (N, C)."""
        return self._average(self._by_chunks(x, lambda found: (self._means(found),))[0])

    def components(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """Means and variances of f given each draw of the inner layers: (S, N, C) each."""

        def both(found: Projection) -> tuple[Tensor, ...]:
            if self.values is None:
                return self._means(found), found.variance(self.last.root)
            return self._means(found), found.residual.expand(-1, self.num_outputs)

        means, variances = self._by_chunks(x, both)
        return means, variances

    def _means(self, found: Projection) -> Tensor:
        """The means of f for the S draws of some points, one draw after the other: (S·N, C)."""
        if self.values is None:
            return found.mean(self.last.center)
        num_rows = found.weights.shape[-1] // self.count
        return found.given(self.values, num_rows)[0].flatten(0, 1)

    def _covariance(self, hidden: Tensor) -> Tensor:
        """The covariance of each output over N inputs of the last layer in one draw: (C, N, N)."""
        return self.last.covariance(hidden, given=self.values is not None)

    def _by_chunks(
        self, x: Inputs, take: Callable[[Projection], tuple[Tensor, ...]]
    ) -> tuple[Tensor, ...]:
        assert isinstance(x, Tensor)
        count = self.count
        most = max(len(layer.center) * max(1, layer.width) for layer in self.layers)
        parts = []
        with torch.set_grad_enabled(torch.is_grad_enabled() and follows(x)):
            for chunk in x.split(max(1, NUMBERS // (count * most))):
                found = take(self.last.project(self.hidden(chunk).flatten(0, 1)))
                parts.append(tuple(v.reshape(count, len(chunk), -1) for v in found))
        return tuple(torch.cat(group, 1).to(x.dtype) for group in zip(*parts, strict=True))

    def moments(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """The mean (N, C) and the covariance of each point (N, C, C)."""
        means, variances = self.components(x)
        mean = self._average(means)
        centered = means - mean
        between = torch.einsum("s,snc,snd->ncd", self._shares(means), centered, centered)
        return mean, torch.diag_embed(self._average(variances)) + between

    def diagonal(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """The mean and the variances: (N, C) each."""
        means, variances = self.components(x)
        mean = self._average(means)
        return mean, self._average(variances) + self._average((means - mean).square())

    def contrast(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """The mean and Var[f_c − f_t] for the class t of the largest mean: (N, C) each."""
        mean, blocks = self.moments(x)
        return mean, Contrast.variances(mean, blocks)

    def joint(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """The mean (N·C,) and the covariance (N·C, N·C)."""
        assert isinstance(x, Tensor)
        means, _ = self.components(x)
        mean, count = self._average(means), means.shape[2]
        shares = self._shares(means)
        within: Tensor | float = 0.0
        for hidden, share in zip(self.hidden(x), shares, strict=True):
            within = within + share * self._covariance(hidden)
        assert isinstance(within, Tensor)
        flat = (means - mean).flatten(1)
        whole = torch.einsum("cnm,cd->ncmd", within, torch.eye(count).to(within))
        size = mean.numel()
        between = (shares[:, None] * flat).mT @ flat
        return mean.reshape(-1), whole.reshape(size, size).to(mean.dtype) + between

    def prior_variances(self, x: Inputs) -> Tensor:
        """The variances before any data: (N, C)."""
        return self.kernel.diag(x)[:, None].expand(-1, self.num_outputs)

    def predict(self, x: Inputs, likelihood: Likelihood, own: bool) -> Distribution:
        """The average of p(y | h_s) over the draws of the inner layers."""
        means, variances = self.components(x)
        if has_gaussian_noise(likelihood):
            noise = torch.stack([likelihood.noise_variance(mean) for mean in means])
            std = (variances + noise).sqrt()
            parts = distributions.Normal(means.movedim(0, -1), std.movedim(0, -1))
            logits = torch.zeros_like(parts.mean)
            if self.weights is not None:
                logits = logits + self.weights.log().to(logits)
            weights = distributions.Categorical(logits=logits)
            return distributions.Independent(distributions.MixtureSameFamily(weights, parts), 1)
        if has_one_class(likelihood) or means.shape[2] > 1:
            f = self._outputs(means, variances)
            if self.weights is None:
                return mixture(likelihood, f)
            each = f.reshape(self.count, -1, *f.shape[1:])
            return average([mixture(likelihood, part) for part in each], self.weights)
        laws = [likelihood.predict(Variances(m, v)) for m, v in zip(means, variances, strict=True)]
        return average(laws, self.weights)

    def split(self, x: Inputs, likelihood: Likelihood, own: bool) -> Split:
        """The variance of E[y | f], and the average of Var[y | f]."""
        if has_gaussian_noise(likelihood):
            mean, variance = self.diagonal(x)
            return Split(variance, likelihood.noise_variance(mean))
        f = self._outputs(*self.components(x))
        parts = target_moments(likelihood, f.flatten(0, 1))
        means, variances = (v.reshape(self.count, -1, len(x), v.shape[-1]) for v in parts)
        mean = self._average(means.mean(1))
        spread = self._average((means - mean).square().mean(1))
        return Split(spread, self._average(variances.mean(1)))

    def _outputs(self, means: Tensor, variances: Tensor) -> Tensor:
        """Values of f, a fixed quasi-random sample in which each draw of the inner layers has its own part.

        Args:
            means: Means of the outputs in S draws, (S, N, C).
            variances: Their variances, (S, N, C).

        Returns:
            The values, one draw after the other, (S·K, N, C).
        """
        S, C = len(means), means.shape[2]
        K = max(NODES, -(-(ALL_NODES if C > 1 else ONE_OUTPUT) // S))
        nodes = standard_points(S * K, C, means.dtype, means.device).reshape(K, S, 1, C)
        return (means + variances.sqrt() * nodes).transpose(0, 1).flatten(0, 1)

    def functions(
        self, num_samples: int, generator: torch.Generator | None
    ) -> Callable[[Inputs], Tensor]:
        """Refuse: the kernels have no features."""
        raise NotAvailable(
            "sample_functions needs a kernel with features, and the layers of a deep Gaussian process have "
            "none. Use posterior.sample(x, num_samples)."
        )

    def draw(self, x: Inputs, num_samples: int, generator: torch.Generator | None) -> Tensor:
        """Draws of f(x), each from the Gaussian process of a draw of the inner layers: (S, N, C)."""
        assert isinstance(x, Tensor)
        means, _ = self.components(x)
        own = torch.device("cpu") if generator is None else generator.device
        if self.weights is None:
            chosen = torch.randint(
                len(means), (num_samples,), generator=generator, device=own
            ).cpu()
        else:
            shares = self.weights.to(own)
            chosen = torch.multinomial(shares, num_samples, True, generator=generator).cpu()
        shape = (num_samples, self.num_outputs, len(x), 1)
        z = random_normal(shape, generator=generator, device=x.device)
        hidden = self.hidden(x)
        draws: list[Tensor | None] = [None] * num_samples
        for index in chosen.unique().tolist():
            root = symmetric_root(self._covariance(hidden[index]))
            for place in (chosen == index).nonzero().flatten().tolist():
                draws[place] = means[index] + (root @ z[place])[..., 0].mT.to(means.dtype)
        return torch.stack([value for value in draws if value is not None])

    def network_value(self, x: Inputs) -> Tensor | None:
        """None: there is no network to compare."""
        return None


def _rows(x: Inputs) -> Tensor:
    """The inputs in float64."""
    assert isinstance(x, Tensor)
    return x.double()
