"""The limit of the same network for other variances."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from net2gp.limits.limit_kernels import LimitKernel
from net2gp.limits.prior import Variances, prior_of


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
