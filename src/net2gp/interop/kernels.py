"""Kernels whose hyper-parameters a search can move cheaply: stretched inputs, variances of a limit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from net2gp.errors import InputError, check_positive
from net2gp.inputs import check_inputs, describe
from net2gp.kernels.base import BaseKernel
from net2gp.limits.limit_kernels import LimitKernel
from net2gp.limits.prior import Variances, prior_of
from net2gp.tags import savable
from net2gp.types import Inputs, Kernel

__all__ = ["Stretched", "with_variances"]


@savable("interop.Stretched")
@dataclass(frozen=True, eq=False)
class Stretched(BaseKernel):
    """k(x / ℓ, x' / ℓ): a kernel of inputs with one length scale per column, or one for all.

    For the limit of a network this is a first layer whose weights have variance weight_var / (d ℓ_j²) for
    input j, so that inputs with a long length scale hardly matter (automatic relevance determination). The
    cost is the kernel's own.

    Args:
        kernel: The kernel k of one tensor of points.
        lengthscale: Positive numbers, in a shape that broadcasts with a point; they may require a gradient.

    Raises:
        InputError: A length scale is not positive, or points are not one tensor.

    >>> import torch
    >>> from net2gp.kernels import RBF
    >>> x = torch.tensor([[0.0, 0.0], [2.0, 4.0]])
    >>> torch.equal(Stretched(RBF(), torch.tensor([2.0, 4.0]))(x), RBF()(x / torch.tensor([2.0, 4.0])))
    True

    Reference: Neal, Bayesian Learning for Neural Networks, 1996, section 1.2.2 (one variance per input).
    """

    kernel: Kernel
    lengthscale: Tensor

    def __post_init__(self) -> None:
        check_positive(self.lengthscale, "lengthscale")

    def check(self, x: Inputs) -> None:
        """Raise unless `x` is one tensor of points for the kernel."""
        self.kernel.check(self._stretched(x))

    def outputs(self, x: Inputs) -> int | None:
        """As the kernel itself."""
        return self.kernel.outputs(self._stretched(x))

    def __call__(self, x: Inputs, y: Inputs | None = None) -> Tensor:
        """k(x / ℓ, y / ℓ)."""
        other = None if y is None or y is x else self._stretched(y)
        return self.kernel(self._stretched(x), other)

    def diag(self, x: Inputs) -> Tensor:
        """The diagonal of k(x / ℓ, x / ℓ)."""
        return self.kernel.diag(self._stretched(x))

    def blocks(self, x: Inputs) -> Tensor:
        """k(x_n / ℓ, x_n / ℓ) for each point."""
        return self.kernel.blocks(self._stretched(x))

    def scaled(self, variance: float | Tensor) -> Stretched:
        """variance · k, by the kernel's own scale."""
        return replace(self, kernel=self.kernel.scaled(variance))

    def _stretched(self, x: Inputs) -> Tensor:
        check_inputs(x)
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise InputError(
                f"Stretched divides one floating tensor of points, but x is {describe(x)}. Pass the kernel "
                "itself for other inputs."
            )
        return x / self.lengthscale.to(x)


def with_variances(
    kernel: LimitKernel,
    *,
    weight_var: Variances | None = None,
    bias_var: Variances | None = None,
) -> LimitKernel:
    """Return the limit of the same network for other variances, without tracing it again.

    Args:
        kernel: `nngp(network)` or `ntk(network)`.
        weight_var: The variance of weights times their fan-in, which may require a gradient; or a mapping
            from names of layers to it. None keeps the present ones.
        bias_var: The variance of biases, likewise.

    Returns:
        The kernel. It shares the plans of the one that was passed.

    >>> import torch
    >>> import net2gp as n2g
    >>> network = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    >>> x = torch.eye(2)
    >>> other = with_variances(n2g.nngp(network), weight_var=2.0, bias_var=0.1)
    >>> torch.equal(other(x), n2g.nngp(network, weight_var=2.0, bias_var=0.1)(x))
    True
    """
    old = kernel.limit.prior
    kinds: Mapping[str, str] = old.parameterizations
    weights = old.weight_vars if weight_var is None else weight_var
    biases = old.bias_vars if bias_var is None else bias_var
    prior = replace(prior_of(list(kinds), weights, biases, kinds), dtype=old.dtype)
    return replace(kernel, limit=replace(kernel.limit, prior=prior))
