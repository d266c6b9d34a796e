"""A posterior of a posterior: the law of f(g(x)) where both functions are uncertain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from net2gp.errors import InputError, check_count
from net2gp.inputs import describe, num_rows, ordinary_tensors
from net2gp.kernels import BaseKernel
from net2gp.linalg import kron_identity, psd_root
from net2gp.linalg.chance import random_normal
from net2gp.posteriors.conditioning.process import contrast_by_blocks, evaluated
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.predicting import is_gaussian
from net2gp.posteriors.recipes.sums import ByAlgebra
from net2gp.types import Inputs, Kernel


@dataclass(frozen=True, eq=False)
class Composition:
    """The process f(g(x)), to first order in the deviation of g(x) from its mean h(x).

    With G(x) = ∂E f/∂h at h(x), it is f(h(x)) + G(x)(g(x) − h(x)), which is Gaussian, has the mean E f(h(x))
    and the covariance

        Cov[f(h(x)), f(h(x'))] + G(x) Cov[g(x), g(x')] G(x')ᵀ.

    Args:
        outer: The posterior of f.
        inner: The posterior of g, whose outputs are the inputs of f.
    """

    outer: Posterior
    inner: Posterior

    @property
    def num_outputs(self) -> int:
        """The number of outputs of f."""
        return self.outer.num_outputs

    @property
    def kernel(self) -> Kernel:
        """The same covariance before the data of f and g, at the mean of g given its data."""
        return CompositionKernel(self)

    def facts(self) -> dict[str, str]:
        """What both processes are."""
        kinds = [type(part.kernel).__name__ for part in (self.outer, self.inner)]
        return {"_kernel": f"{kinds[0]} of {kinds[1]}"}

    def check(self, x: Inputs) -> None:
        """Raise unless `x` can be points of the inner process."""
        self.inner.process.check(x)

    @evaluated
    def mean(self, x: Inputs) -> Tensor:
        """E f(h(x)): (N, C)."""
        return self.outer.process.mean(self.inner.process.mean(x))

    @evaluated
    def moments(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """The mean (N, C) and the covariance of each point (N, C, C)."""
        h, blocks = self.inner.process.moments(x)
        mean, own = self.outer.process.moments(h)
        return mean, own + _carried(self.slopes(h), blocks).to(own)

    @evaluated
    def diagonal(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """The mean and the variances: (N, C) each."""
        mean, blocks = self.moments(x)
        return mean, blocks.diagonal(dim1=1, dim2=2).to(mean.dtype)

    contrast = contrast_by_blocks

    @evaluated
    def joint(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """The mean (N·C,) and the covariance (N·C, N·C)."""
        flat, covariance = self.inner.process.joint(x)
        h = flat.reshape(num_rows(x), -1)
        mean, own = self.outer.process.joint(h)
        G = self.slopes(h)
        return mean, own + _between(G, covariance, G).to(own)

    @evaluated
    def prior_variances(self, x: Inputs) -> Tensor:
        """The variances before the data of f and g: (N, C)."""
        return self.kernel.diag(x).reshape(-1, self.num_outputs)

    def functions(
        self, num_samples: int, generator: torch.Generator | None
    ) -> Callable[[Inputs], Tensor]:
        """Functions f_s(h(x)) + G(x)(g_s(x) − h(x)) of drawn f_s and g_s."""
        outer = self.outer.process.functions(num_samples, generator)
        inner = self.inner.process.functions(num_samples, generator)
        return ComposedFunctions(self, outer, inner)

    def slopes(self, h: Tensor) -> Tensor:
        """G, the derivative of the outer mean at h: (N, C, H)."""
        follow = torch.is_grad_enabled() and h.requires_grad
        with ordinary_tensors(), torch.enable_grad():
            at = h if follow else h.detach().clone().requires_grad_()
            mean = self.outer.process.mean(at)
            rows = [
                torch.autograd.grad(mean[:, c].sum(), at, create_graph=follow, retain_graph=True)[0]
                for c in range(mean.shape[1])
            ]
        return torch.stack(rows, 1)


@dataclass(frozen=True, eq=False)
class CompositionKernel(BaseKernel):
    """k_f(h(x), h(x')) + G(x) k_g(x, x') G(x')ᵀ, with rows n·C + c.

    Args:
        process: The composition, which has the kernels k_f and k_g, the mean h and the slopes G.
    """

    process: Composition = field(repr=False)

    def outputs(self, x: Inputs) -> int:
        """The number of outputs of f."""
        return self.process.num_outputs

    @evaluated
    def __call__(self, x: Inputs, y: Inputs | None = None) -> Tensor:
        """The matrix (N·C, M·C)."""
        outer, inner = self.process.outer, self.process.inner
        h, G = self._at(x)
        g, F = (None, G) if y is None else self._at(y)
        own = _coupled(outer.kernel(h, g), outer.kernel.outputs(h), outer.num_outputs)
        carried = _coupled(inner.kernel(x, y), inner.kernel.outputs(x), inner.num_outputs)
        return own + _between(G, carried, F)

    @evaluated
    def diag(self, x: Inputs) -> Tensor:
        """The diagonal (N·C,)."""
        outer, inner = self.process.outer, self.process.inner
        h, G = self._at(x)
        blocks = inner.kernel.blocks(x)
        if blocks.shape[-1] != inner.num_outputs:
            blocks = blocks * torch.eye(inner.num_outputs).to(blocks)
        carried = _carried(G, blocks).diagonal(dim1=1, dim2=2)
        return (outer.process.prior_variances(h) + carried).reshape(-1)

    def _at(self, x: Inputs) -> tuple[Tensor, Tensor]:
        h = self.process.inner.process.mean(x)
        return h, self.process.slopes(h)


@dataclass(frozen=True, eq=False)
class ComposedFunctions:
    """S functions that were drawn from a composition to first order.

    Args:
        process: The composition.
        outer: Drawn functions f_s.
        inner: Drawn functions g_s.
    """

    process: Composition = field(repr=False)
    outer: Callable[[Inputs], Tensor] = field(repr=False)
    inner: Callable[[Inputs], Tensor] = field(repr=False)

    def __call__(self, x: Inputs) -> Tensor:
        """Return the values of the functions.

        Args:
            x: N points.

        Returns:
            The values: (S, N, C).
        """
        h = self.process.inner.process.mean(x)
        moved = torch.einsum("nch,snh->snc", self.process.slopes(h), self.inner(x) - h)
        return self.outer(h) + moved


def compose(outer: Posterior, inner: Posterior) -> Posterior:
    """Return the law of f(g(x)), to first order in the uncertainty of g.

    The outputs of the inner network are the inputs of the outer one, as in a pipeline of two trained
    networks, and both bring their uncertainty. The law is exact if the slopes of f are constant and
    certain, and close if f is nearly linear over the spread of g. `draw_composition` draws without this
    approximation; `deep.fit` is for compositions that are learned as one. Cost: both posteriors, and C
    gradients of the outer mean.

    Args:
        outer: The posterior of f.
        inner: The posterior of g.

    Returns:
        A posterior with the likelihood of `outer`, which holds no data and is not saved as a file.

    Raises:
        InputError: If an argument is no posterior, is not Gaussian, or if the outputs of g do not fit f.

    >>> from net2gp.kernels import Linear
    >>> from net2gp.likelihoods import Gaussian
    >>> from net2gp.posteriors.condition import condition
    >>> x = torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    >>> double, triple = (condition(Linear(), (x, n * x), Gaussian(noise_var=1e-6)) for n in (2, 3))
    >>> compose(triple, double).mean(x).round(decimals=3)
    tensor([[ 6.],
            [12.]], dtype=torch.float64)

    Reference: Girard et al., Gaussian process priors with uncertain inputs, NeurIPS 2003.
    """
    _check_pair(outer, inner)
    return Posterior(Composition(outer, inner), outer.likelihood, None, None, None, ByAlgebra())


def draw_composition(
    outer: Posterior,
    inner: Posterior,
    x: Inputs,
    num_samples: int,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw values f_s(g_s(x)) of functions f_s and g_s from two posteriors, without an approximation.

    Cost: one joint law of f at N points for each draw, O(S (N·C)³).

    Args:
        outer: The posterior of f.
        inner: The posterior of g.
        x: N points.
        num_samples: The number of draws S.
        generator: Makes the draws repeatable. None uses torch's global random state.

    Returns:
        The values: (S, N, C).

    Raises:
        InputError: As for `compose`.

    >>> from net2gp.kernels import RBF
    >>> from net2gp.likelihoods import Gaussian
    >>> from net2gp.posteriors.condition import condition
    >>> x = torch.linspace(-1, 1, 5, dtype=torch.float64)[:, None]
    >>> posterior = condition(RBF(), (x, x.sin()), Gaussian(noise_var=0.01))
    >>> draw_composition(posterior, posterior, x, 3).shape
    torch.Size([3, 5, 1])
    """
    _check_pair(outer, inner)
    check_count(num_samples, "num_samples")
    inside = inner.sample(x, num_samples, generator=generator)
    law = outer.joint(inside, batch=True)
    root = psd_root(law.covariance_matrix.double())
    shape = (*law.mean.shape, 1)
    z = random_normal(shape, generator=generator, device=root.device)
    values = law.mean + (root @ z)[..., 0].to(law.mean.dtype)
    return values.reshape(num_samples, num_rows(x), outer.num_outputs)


def _check_pair(outer: Posterior, inner: Posterior) -> None:
    for name, part in (("outer", outer), ("inner", inner)):
        if not isinstance(part, Posterior):
            raise InputError(
                f"{name} must be a posterior, but is {describe(part)}. Pass for example "
                "compose(outer=laplace(network, data, likelihood), inner=…)."
            )
        if not is_gaussian(part.process):
            raise InputError(
                f"the {name} posterior is not Gaussian, so there is no closed form. Use a Gaussian one, such "
                "as laplace(network, data, likelihood)."
            )
    if isinstance(outer.x, Tensor) and outer.x.shape[1:] != (inner.num_outputs,):
        raise InputError(
            f"the outer posterior takes points of shape {tuple(outer.x.shape[1:])}, but the inner one has "
            f"{inner.num_outputs} outputs. The outputs of the inner one must be the inputs of the outer one."
        )
    _check_dtypes(outer, inner)


def _check_dtypes(outer: Posterior, inner: Posterior) -> None:
    """Raise if the outer posterior takes another dtype than the inner one gives, as far as data show it."""
    if not isinstance(outer.x, Tensor) or inner.y is None or not inner.y.is_floating_point():
        return
    if outer.x.dtype != inner.y.dtype:
        raise InputError(
            f"the outer posterior takes {outer.x.dtype}, but the inner one gives {inner.y.dtype}. Move one "
            f"of them: outer.to(dtype={inner.y.dtype})."
        )


def _coupled(K: Tensor, outputs: int | None, count: int) -> Tensor:
    return K if outputs is not None else kron_identity(K, count)


def _carried(G: Tensor, blocks: Tensor) -> Tensor:
    """G_n S_n G_nᵀ: (N, C, C)."""
    wide = G.to(blocks)
    return wide @ blocks @ wide.mT


def _between(G: Tensor, covariance: Tensor, F: Tensor) -> Tensor:
    """G(x) S(x, x') F(x')ᵀ for all pairs: (N·C, M·C)."""
    parts = covariance.reshape(len(G), G.shape[2], len(F), F.shape[2])
    found = torch.einsum("nch,nhmk,mdk->ncmd", G.to(covariance), parts, F.to(covariance))
    return found.reshape(len(G) * G.shape[1], len(F) * F.shape[1])
