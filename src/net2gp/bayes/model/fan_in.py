"""Prior variances that are divided by the fan-in of each layer."""

from __future__ import annotations

from torch import Tensor, nn

from net2gp.errors import InputError
from net2gp.inputs import describe
from net2gp.limits.initialization import slots
from net2gp.limits.prior import Variances, prior_of
from net2gp.linear.linearized import Linearized


def fan_in_variances(
    network: nn.Module | Linearized, weight_var: Variances = 1.0, bias_var: Variances = 1.0
) -> dict[str, float | Tensor]:
    """Compute weight_var / fan_in for weights and bias_var for biases, by the names of the parameters.

    Outputs of layers then have a variance that does not depend on the width, as in the infinite-width limit.
    Every prior that takes variances by name takes the result.

    Args:
        network: The network, or a linearization that chooses some of its parameters.
        weight_var: σ_w² for all layers, or a mapping from names of layers, as in `nngp`.
        bias_var: σ_b², likewise.

    Returns:
        One variance per parameter, by name.

    Raises:
        InputError: If a parameter is no weight or bias of a layer, such as the gain of a norm layer.

    >>> fan_in_variances(nn.Conv2d(3, 8, 5), weight_var=1.5, bias_var=0.1)
    {'weight': 0.02, 'bias': 0.1}
    """
    if not isinstance(network, nn.Module | Linearized):
        raise InputError(
            f"fan-ins are read from the layers of a network, but network is {describe(network)}. Pass "
            "NormalPrior.by_fan_in(network, weight_var=2.0, bias_var=0.1)."
        )
    module = network.network if isinstance(network, Linearized) else network
    chosen = set(network.params) if isinstance(network, Linearized) else None
    found = [slot for slot in slots(module) if chosen is None or slot.name in chosen]
    for slot in found:
        if slot.kind == "gain" or slot.fan_in is None:
            kind = (
                "belongs to a norm layer" if slot.kind == "gain" else "belongs to no layer of torch"
            )
            raise InputError(
                f"'{slot.name}' {kind}, so that its variance does not follow from a fan-in. Leave it out: "
                f"linearize(network, only=['*', '!{slot.name}']), or name all variances."
            )
    layers = list(dict.fromkeys(slot.layer for slot in found))
    prior = prior_of(layers, weight_var, bias_var, "standard")
    return {
        slot.name: prior.bias(slot.layer)
        if slot.kind == "bias"
        else prior.weight(slot.layer) / (slot.fan_in or 1)
        for slot in found
    }
