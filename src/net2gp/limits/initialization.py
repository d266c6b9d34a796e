"""The variances with which a network was built: fan-ins of its parameters, and the schemes that draw them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from net2gp.errors import InputError
from net2gp.limits.modules.layers import LocallyConnected1d, LocallyConnected2d
from net2gp.limits.plan import graph_of, weight_names
from net2gp.limits.proof import NORMS

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
LOCAL = (LocallyConnected1d, LocallyConnected2d)
MANY_WEIGHTS = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
GAINS = (*NORMS, nn.modules.instancenorm._InstanceNorm)

Z_LIMIT = 4.0
"""A scheme is refused if mean or variance of the values is this many standard errors away from its own."""

DISTANCE_LIMIT = 2.3
"""Kolmogorov's statistic exceeds this limit with probability 5e-5."""

SAMPLE = 2**17
"""The most values of a parameter that are compared with a law, which needs them sorted."""

CLEAR = math.log(1000.0)
"""A scheme is clearly better than another if it makes the values a thousand times as likely."""


@dataclass(frozen=True)
class Slot:
    """One parameter of a network.

    Args:
        name: Its name.
        layer: The name of the layer whose variances it has.
        kind: What it is to the layer.
        fan_in: The number of terms that the layer sums into one output; one for a gain, an embedding or a
            parameter that is used as a signal, and None for a parameter of no layer of torch.
    """

    name: str
    layer: str
    kind: Literal["weight", "bias", "gain"]
    fan_in: int | None


def slots(network: nn.Module, *, shared: bool = False) -> Iterator[Slot]:
    """Yield the parameters of `network`, each tensor once, or with `shared` once per layer that has it.

    >>> [(slot.name, slot.kind, slot.fan_in) for slot in slots(nn.Conv2d(3, 8, 5))]
    [('weight', 'weight', 75), ('bias', 'bias', 75)]
    """
    seen: set[int] = set()
    for prefix, module in network.named_modules():
        for own, value in module.named_parameters(recurse=False):
            if shared or id(value) not in seen:
                seen.add(id(value))
                name = f"{prefix}.{own}" if prefix else own
                yield _slot(name, prefix, own, module, value)


def _slot(name: str, prefix: str, own: str, module: nn.Module, value: Tensor) -> Slot:
    if isinstance(module, GAINS):
        return Slot(name, prefix, "gain", 1)
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return Slot(name, prefix, "weight", 1)
    if isinstance(module, MANY_WEIGHTS):
        weight = name.replace("bias", "weight") if "bias_k" not in own else name
        kind: Literal["weight", "bias"] = "bias" if "bias" in own else "weight"
        return Slot(name, weight, kind, value.shape[-1] if value.dim() > 1 else 1)
    known = isinstance(module, (nn.Linear, nn.Bilinear, *CONVOLUTIONS, *TRANSPOSED, *LOCAL))
    if known and own in ("weight", "bias"):
        return Slot(name, prefix, "bias" if own == "bias" else "weight", fan_in(module))
    return Slot(name, name, "weight", None)


def fan_in(layer: nn.Module) -> int:
    """Return how many terms the layer sums into one output: channels times the size of the kernel."""
    if isinstance(layer, nn.Linear):
        return layer.in_features
    if isinstance(layer, nn.Bilinear):
        return layer.in1_features * layer.in2_features
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        return 1
    if isinstance(layer, (*CONVOLUTIONS, *TRANSPOSED)):
        return layer.in_channels // layer.groups * math.prod(layer.kernel_size)
    assert isinstance(layer, LOCAL)
    return layer.in_channels * math.prod(layer.kernel_size)


@dataclass(frozen=True)
class Scheme:
    """A way to draw parameters with independent entries.

    Args:
        name: What messages call it.
        variance: The variance of the entries.
        uniform: Whether entries are uniform within ±√(3·variance), or else normal.
    """

    name: str
    variance: float
    uniform: bool = False

    def log_likelihood(self, values: Tensor) -> float:
        """Return the log-likelihood of the values, or −∞ if mean, variance or law rule the scheme out."""
        count, found = values.numel(), float(values.square().mean())
        if self.variance == 0:
            return math.inf if found == 0 else -math.inf
        deviation = math.sqrt(self.variance)
        spread = math.sqrt((1.8 if self.uniform else 3.0) - 1)
        root = math.sqrt(count)
        if (
            abs(found / self.variance - 1) * root > Z_LIMIT * spread
            or abs(float(values.mean())) * root > Z_LIMIT * deviation
            or self._distance(values) > DISTANCE_LIMIT
        ):
            return -math.inf
        if not self.uniform:
            return -0.5 * count * (math.log(2 * math.pi * self.variance) + found / self.variance)
        bound = math.sqrt(3) * deviation
        inside = float(values.abs().max()) <= bound * (1 + 1e-6)
        return -count * math.log(2 * bound) if inside else -math.inf

    def _distance(self, values: Tensor) -> float:
        """Return Kolmogorov's statistic √n · sup |F_n − F| for at most `SAMPLE` of the values."""
        flat = values.reshape(-1)
        flat = flat[:: max(1, flat.numel() // SAMPLE)].sort().values
        unit = flat / math.sqrt(self.variance)
        if self.uniform:
            law = (0.5 + unit / math.sqrt(12)).clamp(0, 1)
        else:
            law = torch.special.ndtr(unit)
        steps = torch.arange(len(flat), dtype=law.dtype, device=law.device)
        gap = torch.maximum((steps + 1) / len(flat) - law, law - steps / len(flat))
        return float(gap.max()) * math.sqrt(len(flat))


def as_built(network: nn.Module) -> tuple[dict[str, float], dict[str, float]]:
    """Return the variances (weight_var, bias_var) of every layer, from how the module was initialized.

    The values of each layer are compared with what the known schemes draw: PyTorch's default, Kaiming, Xavier
    and LeCun (normal and uniform), orthogonal, N(0, 1), N(0, 0.02²) and zeros. A scheme fits if mean and
    variance are within four standard errors of its own, the values follow its law (Kolmogorov's test) and, if
    it is uniform, no value is outside its bounds. If several schemes with different variances fit, one must
    make the values a thousand times as likely as any other; small layers follow other layers of their kind.
    The cost is one pass over the parameters.

    Args:
        network: A network that has not been trained since it was built.

    Returns:
        The variances of weights times their fan-in, and the variances of biases, by the name of the layer:
        the arguments `weight_var` and `bias_var` of `infinite_width`.

    Raises:
        InputError: If no scheme or several different ones explain the values of a layer, for example
            because the network was trained.

    >>> network = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 10))
    >>> weight_var, bias_var = as_built(network)
    >>> round(weight_var["0"], 3), round(bias_var["2"], 5)
    (0.333, 0.00667)

    References: He et al., Delving deep into rectifiers, 2015; Glorot and Bengio, 2010; `torch.nn.init`.
    """
    graph = graph_of(network)
    params = dict(graph.named_parameters())
    by_id = {id(params[slot.name]): slot for slot in slots(graph)}
    layers = {
        name: [by_id[id(value)] for value in _parameters(graph, name)]
        for name in weight_names(graph)
    }
    fits = {slot.name: _fit(slot, graph) for found in layers.values() for slot in found}
    clear: dict[str, set[str]] = {"weight": set(), "bias": set(), "table": set(), "gain": set()}
    for fit in fits.values():
        if fit.scheme is not None:
            clear[fit.group].add(fit.scheme.name)
    weight_var, bias_var = {}, {}
    for name, found in layers.items():
        chosen = {slot.kind: _variance(fits[slot.name], clear) for slot in found}
        weight_var[name] = chosen.get("weight", 1.0)
        bias_var[name] = chosen.get("bias", 0.0)
    return weight_var, bias_var


def _parameters(network: nn.Module, name: str) -> list[nn.Parameter]:
    """Return the weights and biases under a name of `weight_names`: of a layer, or of one of its tensors."""
    path, _, own = name.rpartition(".")
    holder = network.get_submodule(path)
    if own in holder._modules:
        return list(network.get_submodule(name).parameters(recurse=False))
    names = dict.fromkeys((own, own.replace("weight", "bias")))
    found = (holder._parameters.get(one) for one in names)
    return [value for value in found if value is not None]


@dataclass(frozen=True, eq=False)
class _Fit:
    """How well schemes explain the values of a parameter.

    Args:
        slot: The parameter.
        group: What kind of parameter it is, among which small ones follow others.
        variance: The mean square of its values.
        schemes: The schemes that fit, with their log-likelihoods, best first.
        known: All schemes that were tried.
    """

    slot: Slot
    group: str
    variance: float
    schemes: tuple[tuple[float, Scheme], ...]
    known: tuple[Scheme, ...]

    @property
    def likely(self) -> list[Scheme]:
        """Return the schemes that fit, without those that are clearly worse than the best one."""
        best = self.schemes[0][0] if self.schemes else 0.0
        return [one for value, one in self.schemes if value == best or best - value < CLEAR]

    @property
    def scheme(self) -> Scheme | None:
        """Return the best scheme, or None if likely schemes have different variances."""
        return self.likely[0] if len(_variances(self.likely)) == 1 else None


def _variances(schemes: list[Scheme]) -> set[float]:
    return {float(f"{one.variance:.6g}") for one in schemes}


def _fit(slot: Slot, network: nn.Module) -> _Fit:
    owner = network.get_submodule(slot.name.rpartition(".")[0])
    value = network.get_parameter(slot.name).detach()
    if isinstance(owner, nn.Embedding) and owner.padding_idx is not None:
        value = value[torch.arange(value.shape[0], device=value.device) != owner.padding_idx]
    value = value.double()
    known = candidates(slot, owner, value)
    found = [(one.log_likelihood(value), one) for one in known]
    table = slot.fan_in is None or isinstance(owner, nn.Embedding | nn.EmbeddingBag)
    if slot.kind == "weight" and not table:
        found += [(math.inf, one) for one in _orthogonal(value)]
    schemes = sorted((pair for pair in found if pair[0] > -math.inf), key=lambda pair: -pair[0])
    group = "table" if table else slot.kind
    variance = float(value.square().mean())
    return _Fit(slot, group, variance, tuple(schemes), tuple(known))


def _variance(fit: _Fit, clear: dict[str, set[str]]) -> float:
    """Return the variance of a parameter, times the fan-in for weights.

    A parameter with too few values to decide between schemes follows others of its kind, then weights.
    """
    likely = fit.likely
    for names in (clear[fit.group], clear["weight"]):
        if len(_variances(likely)) > 1:
            likely = [one for one in likely if one.name in names] or likely
    slot = fit.slot
    factor = (slot.fan_in or 1) if slot.kind == "weight" else 1
    if len(_variances(likely)) == 1:
        return likely[0].variance * factor
    argument, times = (
        ("weight_var", "variance · fan_in") if slot.kind == "weight" else ("bias_var", "variance")
    )
    problem = (
        f"fits several schemes ({', '.join(one.name for one in likely)})"
        if likely
        else "fits no known scheme (was the network trained?)"
    )
    found = f"{fit.variance * factor:.3g}"
    known = ", ".join(f"{one.name} {one.variance * factor:.3g}" for one in fit.known)
    raise InputError(
        f"how '{slot.name}' was initialized is not clear: its {times} is {found}, which {problem}. "
        f"Known: {known}. Say which you want, e.g. {argument}={{'{slot.layer}': {found}, '*': 1.0}}."
    )


def candidates(slot: Slot, owner: nn.Module, value: Tensor) -> list[Scheme]:
    """Return the schemes that may have drawn a parameter of the layer `owner`."""
    fixed = [Scheme("N(0, 1)", 1.0), Scheme("N(0, 0.02²)", 4e-4), Scheme("zeros", 0.0)]
    if slot.fan_in is None or isinstance(owner, nn.Embedding | nn.EmbeddingBag):
        return fixed
    if isinstance(owner, nn.RNNBase | nn.RNNCellBase):
        fans, default = (value.shape[-1], value.shape[0]), owner.hidden_size
    else:
        fans = _torch_fans(owner)
        default = fan_in(owner) if isinstance(owner, LOCAL) else fans[0]
    first = Scheme("PyTorch's default", 1 / (3 * default), True)
    if slot.kind == "bias":
        return [first, *fixed]
    variances = {
        "LeCun": 1 / fans[0],
        "Kaiming (fan_in)": 2 / fans[0],
        "Kaiming (fan_out)": 2 / fans[1],
        "Xavier": 2 / sum(fans),
    }
    drawn = [
        Scheme(f"{name} {'uniform' if uniform else 'normal'}", variance, uniform)
        for name, variance in variances.items()
        for uniform in (False, True)
    ]
    return [first, *drawn, *fixed]


def _torch_fans(layer: Any) -> tuple[int, int]:
    """Return the fans as `torch.nn.init` counts them, which reads all weights as (out, in, *kernel)."""
    area = math.prod(getattr(layer, "kernel_size", ()))
    return layer.weight.shape[1] * area, layer.weight.shape[0] * area


def _orthogonal(values: Tensor) -> list[Scheme]:
    """Return the scheme of a matrix whose rows or columns are orthogonal and of one length, if it is one."""
    matrix = values.reshape(values.shape[0], -1)
    if min(matrix.shape) < 4:
        return []
    gram = matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix
    scale = float(gram.diagonal().mean())
    identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    if not torch.allclose(gram, scale * identity, rtol=0, atol=1e-4 * scale):
        return []
    return [Scheme("orthogonal", scale / max(matrix.shape))]
