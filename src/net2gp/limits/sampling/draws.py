"""Random parameters of a network: by the layers' own initialization, or normal with given variances."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from net2gp.errors import InputError, NetworkError
from net2gp.limits.initialization import Slot, slots
from net2gp.limits.prior import Parameterization, Variances, prior_of
from net2gp.limits.sampling.channels import signal_parameters
from net2gp.limits.sampling.twin import Scaled, number
from net2gp.types import Params


@dataclass(frozen=True, eq=False)
class Draws:
    """Random parameters by number: the same number gives the same parameters, on every device.

    Args:
        network: The network whose parameters are drawn.
        seed: The seed of all draws.
        rates: The factor of ∂f ∂f' in the tangent kernel, by parameter: one, or the variance of the
            entries in the NTK parameterization.
        scales: The standard deviation of the entries, by parameter; None draws with each layer's own
            `reset_parameters()`.
        fixed: The value of parameters that are not random, such as the gains of norms.
    """

    network: nn.Module
    seed: int
    rates: Mapping[str, float]
    scales: Mapping[str, float] | None = None
    fixed: Mapping[str, float] | None = None

    def __call__(self, number: int) -> Params:
        """Return the parameters of draw `number`, on the CPU."""
        if self.scales is None:
            return self._reset(number)
        generator = torch.Generator().manual_seed(self.mixed(number))
        found = {}
        for name, value in self.network.named_parameters():
            if self.fixed and name in self.fixed:
                found[name] = torch.full_like(value, self.fixed[name], requires_grad=False)
            else:
                normal = torch.randn(value.shape, dtype=value.dtype, generator=generator)
                found[name] = normal.mul_(self.scales[name])
        for name, row in _padding_rows(self.network):
            found[name][row] = 0
        return found

    def mixed(self, number: int) -> int:
        """Return the seed of draw `number`."""
        # an odd multiplier spreads consecutive numbers over all 64 bits
        return (self.seed + (number + 1) * 0x9E3779B97F4A7C15) % 2**63

    def _reset(self, number: int) -> Params:
        network = copy.deepcopy(self.network)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.mixed(number))
            # NaN marks the parameters that no method has drawn
            for value in network.parameters():
                value.fill_(float("nan"))
            # children first, so that a module's own method decides about everything that it holds
            for module in reversed(list(network.modules())):
                for method in ("reset_parameters", "_reset_parameters"):
                    if callable(getattr(module, method, None)):
                        getattr(module, method)()
                        break
        found = {name: value.detach() for name, value in network.named_parameters()}
        missed = [name for name, value in found.items() if bool(value.isnan().any())]
        if missed:
            raise NetworkError(
                f"no layer's reset_parameters() draws {', '.join(map(repr, missed))}. Give the module that "
                "holds it such a method, or say the variances: monte_carlo_kernel(network, weight_var=1.0)."
            )
        return found


def _padding_rows(network: nn.Module) -> Iterator[tuple[str, int]]:
    for name, module in network.named_modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            yield (f"{name}.weight" if name else "weight"), module.padding_idx


def own_draws(template: nn.Module, seed: int, parameterization: object) -> Draws:
    """Return draws by the layers' own `reset_parameters()`, in the layers' own parameterization.

    The parameters of a twin in the NTK parameterization are drawn from N(0, 1), since its layers scale them.
    """
    if parameterization not in (None, "standard"):
        raise InputError(
            "parameterization='ntk' needs the variances that the parameters are multiplied with. Pass them, "
            "e.g. weight_var=1.0, bias_var=0.0."
        )
    names = [name for name, _ in template.named_parameters()]
    scaled = {f"{name}.original" for name, module in template.named_modules() if _is_scaled(module)}
    if not scaled:
        return Draws(template, seed, dict.fromkeys(names, 1.0))
    fixed = {slot.name: _gain(slot) for slot in slots(template) if slot.kind == "gain"}
    rates = {name: 0.0 if name in fixed else 1.0 for name in names}
    unknown = [name for name in names if name not in scaled | set(fixed)]
    if unknown:
        raise NetworkError(
            "a twin in the NTK parameterization has only parameters that its layers scale, but "
            f"'{unknown[0]}' is not. Pass the network itself, with width= and weight_var=."
        )
    return Draws(template, seed, rates, dict.fromkeys(scaled, 1.0), fixed)


def _is_scaled(module: nn.Module) -> bool:
    return isinstance(module, ParametrizationList) and isinstance(module[0], Scaled)


def _gain(slot: Slot) -> float:
    return 0.0 if slot.name.endswith("bias") else 1.0


def normal_draws(
    template: nn.Module,
    seed: int,
    weight_var: Variances,
    bias_var: Variances,
    parameterization: Parameterization,
) -> Draws:
    """Return draws of weights N(0, weight_var / fan_in) and biases N(0, bias_var); gains of norms are one."""
    found = list(slots(template))
    _check_shared(template)
    signals = signal_parameters(template) if any(s.fan_in is None for s in found) else set()
    named = set(weight_var) if isinstance(weight_var, Mapping) else set()
    for slot in found:
        if slot.fan_in is None and slot.name not in signals | named:
            raise InputError(
                f"the fan-in of the parameter '{slot.name}' is not known, since it lies in no layer of "
                f"torch. Say the variance of its entries: weight_var={{'{slot.name}': 0.01, '*': 1.0}}."
            )
    names = dict.fromkeys(slot.layer for slot in found if slot.kind != "gain")
    prior = prior_of(names, weight_var, bias_var, parameterization)
    scales, rates, fixed = {}, {}, {}
    for slot in found:
        if slot.kind == "gain":
            fixed[slot.name] = _gain(slot)
            rates[slot.name] = 0.0
            continue
        variance = number(
            prior.bias(slot.layer)
            if slot.kind == "bias"
            else prior.weight(slot.layer) / (slot.fan_in or 1)
        )
        scales[slot.name] = variance**0.5
        rates[slot.name] = 1.0 if prior.standard(slot.layer) else variance
    return Draws(template, seed, rates, scales, fixed)


def _check_shared(template: nn.Module) -> None:
    """Raise if layers of different fan-ins share their weights, since no single variance fits both."""
    seen: dict[int, Slot] = {}
    for slot in slots(template, shared=True):
        first = seen.setdefault(id(template.get_parameter(slot.name)), slot)
        if first.fan_in != slot.fan_in:
            raise NetworkError(
                f"'{first.name}' and '{slot.name}' are the same weights, but have the fan-ins "
                f"{first.fan_in} and {slot.fan_in}. Take the kernel of a twin, where each layer has a factor "
                "of its own: monte_carlo_kernel(twin(network, width))."
            )
