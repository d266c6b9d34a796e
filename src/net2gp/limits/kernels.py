"""The Gaussian process that a network is at infinite width: NNGP and tangent kernel."""

from __future__ import annotations

from torch import nn

from net2gp.errors import InputError
from net2gp.limits.initialization import as_built
from net2gp.limits.limit_kernels import InfiniteWidth, LimitKernel
from net2gp.limits.plan import graph_of, weight_names
from net2gp.limits.prior import Parameterization, Variances, prior_of


def infinite_width(
    network: nn.Module,
    *,
    weight_var: Variances | None = None,
    bias_var: Variances | None = None,
    parameterization: Parameterization = "ntk",
    initialization: str | None = None,
) -> InfiniteWidth:
    """Return the limit of `network` at infinite width: call it for the pair (NNGP, tangent kernel).

    The module is used as it is, except that **its hidden widths are ignored**: they go to infinity, with
    weights N(0, weight_var / fan_in) and biases N(0, bias_var). For a fully connected layer
    z = W φ(z') + b that means K = σ_w² E[φ(u) φ(v)] + σ_b² with (u, v) ~ N(0, K'), and
    Θ = K + σ_w² Θ' E[φ'(u) φ'(v)]; the kernel of the inputs is x·x'/d.

    A matrix costs N²·(d + a few dozen operations per layer). Positions of images multiply this by their
    number, or by its square if a later layer, such as pooling, needs all pairs of them.

    Args:
        network: The module. It is traced, and neither changed nor run.
        weight_var: The variance of weights times their fan-in (1 if left out): a number, a tensor of one
            element, which may require a gradient, or a mapping from names of layers (or patterns such as
            `"body.*"`) to these.
        bias_var: The variance of biases (0 if left out), in the same forms.
        parameterization: "ntk", or "standard" for gradients with respect to W and b themselves, with the
            module's own widths; for all layers or as a mapping.
        initialization: "as_built" reads the variances off the module's weights, if they come from a known
            initialization. None uses `weight_var` and `bias_var`.

    Returns:
        The limit, whose kernels are `nngp` and `ntk`.

    Raises:
        InputError: If `initialization` is another word, or is given together with variances.

    >>> import torch
    >>> network = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 1))
    >>> limit = infinite_width(network, weight_var=2.0)
    >>> nngp, ntk = limit(torch.eye(2, dtype=torch.float64))
    >>> nngp
    tensor([[1.0000, 0.3183],
            [0.3183, 1.0000]], dtype=torch.float64)
    >>> ntk
    tensor([[2.0000, 0.3183],
            [0.3183, 2.0000]], dtype=torch.float64)

    References: Lee et al., Deep neural networks as Gaussian processes, 2018; Jacot, Gabriel and Hongler,
    Neural tangent kernel, 2018; Yang, Tensor programs I and II, 2019–2020.
    """
    graph = graph_of(network)
    if initialization is not None:
        if initialization != "as_built" or weight_var is not None or bias_var is not None:
            raise InputError(
                "initialization must be 'as_built', without weight_var and bias_var, or left out, but "
                f"initialization={initialization!r}, weight_var={weight_var!r} and bias_var={bias_var!r} "
                "were given."
            )
        weight_var, bias_var = as_built(network)
    weight_var = 1.0 if weight_var is None else weight_var
    bias_var = 0.0 if bias_var is None else bias_var
    prior = prior_of(weight_names(graph), weight_var, bias_var, parameterization)
    return InfiniteWidth(graph, prior)


def nngp(
    network: nn.Module,
    *,
    weight_var: Variances | None = None,
    bias_var: Variances | None = None,
    initialization: str | None = None,
) -> LimitKernel:
    """Return the covariance of the outputs of `network` at initialization, at infinite width.

    The network is then a Gaussian process. **Hidden widths are ignored**: they go to infinity. Outputs are
    independent and have the same kernel, unless the network keeps positions to the end. Cost and references
    are as for `infinite_width`.

    Args:
        network: The module. It is traced, and neither changed nor run.
        weight_var: The variance of weights times their fan-in (1 if left out): a number, a tensor of one
            element, or a mapping from names of layers to these.
        bias_var: The variance of biases (0 if left out), in the same forms.
        initialization: "as_built" reads the variances off the module's weights. None uses `weight_var` and
            `bias_var`.

    Returns:
        The kernel.

    >>> import torch
    >>> network = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 1))
    >>> nngp(network, weight_var=2.0, bias_var=0.1)(torch.eye(2, dtype=torch.float64))
    tensor([[1.2000, 0.5016],
            [0.5016, 1.2000]], dtype=torch.float64)
    """
    return infinite_width(
        network, weight_var=weight_var, bias_var=bias_var, initialization=initialization
    ).nngp


def ntk(
    network: nn.Module,
    *,
    weight_var: Variances | None = None,
    bias_var: Variances | None = None,
    parameterization: Parameterization = "ntk",
    initialization: str | None = None,
) -> LimitKernel:
    """Return the tangent kernel of `network` at infinite width, where training does not change it.

    **Hidden widths are ignored**, except as factors of the layers' gradients in the standard
    parameterization. Use `infinite_width` for both kernels: the second costs little in addition to the
    first. Cost and references are as for `infinite_width`.

    Args:
        network: The module. It is traced, and neither changed nor run.
        weight_var: The variance of weights times their fan-in (1 if left out): a number, a tensor of one
            element, or a mapping from names of layers to these.
        bias_var: The variance of biases (0 if left out), in the same forms.
        parameterization: "ntk", or "standard" for gradients with respect to W and b themselves.
        initialization: "as_built" reads the variances off the module's weights. None uses `weight_var` and
            `bias_var`.

    Returns:
        The kernel.

    >>> import torch
    >>> network = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 1))
    >>> ntk(network, weight_var=2.0).diag(torch.eye(2, dtype=torch.float64))
    tensor([2., 2.], dtype=torch.float64)
    """
    return infinite_width(
        network,
        weight_var=weight_var,
        bias_var=bias_var,
        parameterization=parameterization,
        initialization=initialization,
    ).ntk
