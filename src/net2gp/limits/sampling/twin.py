"""A finite network of the same architecture as another, wider and freshly drawn."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from net2gp.errors import InputError, NetworkError
from net2gp.inputs import check_inputs
from net2gp.limits.duals.activations import UnsupportedLayer
from net2gp.limits.graph.trace import attribute_of, shapes
from net2gp.limits.initialization import Slot, slots
from net2gp.limits.kernels import infinite_width
from net2gp.limits.plan import graph_of, weight_names
from net2gp.limits.prior import Parameterization, Prior, Variance, Variances, prior_of
from net2gp.limits.sampling.channels import widened
from net2gp.linalg.chance import random_normal
from net2gp.types import Inputs


class Scaled(nn.Module):
    """The parametrization θ = scale · ω of a parameter by a standard normal one.

    Args:
        scale: The standard deviation of the entries of θ.
    """

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, value: Tensor) -> Tensor:
        """Return scale · ω."""
        return value * self.scale


def twin(
    network: nn.Module,
    width: int,
    *,
    weight_var: Variances = 1.0,
    bias_var: Variances = 0.0,
    parameterization: Parameterization = "ntk",
    example: Inputs | None = None,
    generator: torch.Generator | None = None,
) -> nn.Module:
    """Return a wider, freshly drawn network of the same architecture.

    All hidden numbers of channels are multiplied by one integer, so that concatenations, heads, groups and
    flattened sizes keep their proportions; inputs and outputs keep their sizes. The means over twins of
    f(x) f(x') and of the empirical tangent kernel differ from `infinite_width(network, …)` by O(1/width).
    The cost is the drawing of the parameters.

    In the NTK parameterization parameters are ω ~ N(0, 1), and layers compute with √(weight_var / fan_in) ω
    and √bias_var ω (`torch.nn.utils.parametrize`), so that gradient descent on ω approaches the gradient
    descent of the limit. In the standard one they are N(0, weight_var / fan_in) and N(0, bias_var). Gains
    of norms are one and do not train.

    Numbers written into `forward` cannot follow the width: write `view(n, t, heads, -1)` and
    `scale=1 / q.size(-1)`.

    Args:
        network: The network whose architecture is copied.
        width: The least number of channels of the hidden layers.
        weight_var: σ_w² of all layers, or a mapping from names of layers or patterns to it.
        bias_var: σ_b², likewise.
        parameterization: "ntk" or "standard", likewise.
        example: Inputs of the network. If they are given, the twin is tried on them, and its limit is
            compared with the limit of the network.
        generator: The source of random numbers; None takes the global one.

    Returns:
        The twin, a new module.

    Raises:
        InputError: If `width` is not a positive integer, or a variance does not fit the layers.
        NetworkError: If a number of channels cannot grow, or the network depends on its width in `forward`.

    >>> network = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> wide = twin(network, 500, weight_var=2.0, generator=torch.Generator().manual_seed(0))
    >>> wide[0].weight.shape, wide[2].weight.shape
    (torch.Size([504, 3]), torch.Size([2, 504]))

    Reference: Jacot, Gabriel and Hongler, Neural tangent kernel, 2018.
    """
    result = widened(network, width)
    if example is not None:
        _check_example(network, result, example)
    graph = graph_of(result)
    prior = prior_of(weight_names(graph), weight_var, bias_var, parameterization)
    names = _layer_names(graph)
    drawn: dict[int, float] = {}
    for slot in list(slots(result, shared=True)):
        path, _, own = slot.name.rpartition(".")
        module = result.get_submodule(path)
        value = module._parameters[own]
        assert value is not None
        if slot.kind == "gain":
            nn.init.constant_(value, 0.0 if own == "bias" else 1.0)
            value.requires_grad_(False)
        elif id(value) in names:
            variance = _variance(slot, names[id(value)], prior)
            standard = prior.standard(names[id(value)])
            _draw(module, value, variance if standard else 1.0, drawn, generator)
            if not standard:
                parametrize.register_parametrization(
                    module, own, Scaled(variance**0.5), unsafe=True
                )
        else:
            nn.init.zeros_(value)  # the network never uses it
    return result


def _layer_names(graph: fx.GraphModule) -> dict[int, str]:
    """Return the name under which the prior knows each parameter, by the parameter's id."""
    found: dict[int, str] = {}
    for name in weight_names(graph):
        value = attribute_of(graph, name)
        weight = value if isinstance(value, Tensor) else value._parameters.get("weight")
        if weight is not None:
            found[id(weight)] = name
    for node in graph.graph.nodes:
        if node.op == "call_module":
            layer = graph.get_submodule(str(node.target))
            for own, value in layer.named_parameters(recurse=False):
                weight = layer._parameters.get(own.replace("bias", "weight"))
                if id(weight) in found:
                    found.setdefault(id(value), found[id(weight)])
    return found


def _variance(slot: Slot, name: str, prior: Prior) -> float:
    """Return the variance of the entries of a parameter."""
    if slot.kind == "bias":
        return number(prior.bias(name))
    return number(prior.weight(name)) / (slot.fan_in or 1)


def number(value: Variance) -> float:
    """Return a variance as a number, without gradient."""
    return float(value.detach()) if isinstance(value, Tensor) else float(value)


def _draw(
    module: nn.Module,
    value: nn.Parameter,
    variance: float,
    drawn: dict[int, float],
    generator: torch.Generator | None,
) -> None:
    """Draw one parameter in place; a tensor that several layers share is drawn once."""
    if drawn.setdefault(id(value), variance) != variance:
        raise NetworkError(
            f"two layers share weights that should have variances {drawn[id(value)]:.3g} and {variance:.3g}, "
            "since their fan-ins differ. Take parameterization='ntk', where each has a factor of its own."
        )
    normal = random_normal(value.shape, generator=generator, device=value.device, dtype=value.dtype)
    with torch.no_grad():
        value.copy_(normal * variance**0.5)
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            value[module.padding_idx] = 0


def _check_example(network: nn.Module, wide: nn.Module, example: Inputs) -> None:
    """Raise unless both take the example and have the same limit, as far as there is one."""
    check_inputs(example)
    try:
        before = infinite_width(network, bias_var=0.1)(example)
    except UnsupportedLayer:
        before = None
    try:
        after = None if before is None else infinite_width(wide, bias_var=0.1)(example)
        if after is None:
            graph = graph_of(wide)
            shapes(graph, infinite_width(wide).inputs(example))
    except (InputError, UnsupportedLayer) as error:
        raise NetworkError(
            f"at another width the network cannot be what it was: {error} A number in forward stands for the "
            "number of channels. Write -1 in view and reshape, compute scales from q.size(-1), or take the "
            "width that it has."
        ) from error
    if before is None or after is None:
        return
    for one, other in zip(before, after, strict=True):
        if not torch.allclose(one, other, rtol=1e-4, atol=1e-6 * float(one.abs().max())):
            raise NetworkError(
                "at another width the network has another limit: a number in forward depends on the number "
                "of channels. Compute it there, e.g. scale=1 / q.size(-1)."
            )
