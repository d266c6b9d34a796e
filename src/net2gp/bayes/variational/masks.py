"""Masks of dropout that are the same for all points, so that each draw of them gives one function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from net2gp.errors import InputError, NetworkError, check_count, check_seed
from net2gp.inputs import describe, rows, tensors
from net2gp.linear.forward.evaluation import accepts
from net2gp.linear.linearized import Linearized
from net2gp.posteriors.recipes.members import Members
from net2gp.tags import savable
from net2gp.types import Inputs, Params

UNITS, CHANNELS = "units", "channels"
ALPHA_UNITS, ALPHA_CHANNELS = "alpha units", "alpha channels"
DROPOUTS: dict[Callable[..., Tensor], str] = {
    F.dropout: UNITS,
    torch.dropout: UNITS,
    F.dropout1d: CHANNELS,
    F.dropout2d: CHANNELS,
    F.dropout3d: CHANNELS,
    F.alpha_dropout: ALPHA_UNITS,
    F.feature_alpha_dropout: ALPHA_CHANNELS,
}
"""The functions that drop units, and what they drop."""

LOWEST = -1.7580993408473766
"""−λα, the value of SELU far on the left, which alpha dropout gives to units that it drops."""

Sites = tuple[tuple[str, float], ...]
"""What is dropped at each place of a network, in the order of a pass, and with which probability."""


class _Dropping(TorchFunctionMode):
    """Sees every call of dropout with a positive probability, whether the network is training or not."""

    def __init__(self) -> None:
        super().__init__()
        self.site = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in DROPOUTS:
            return func(*args, **kwargs)
        own = dict(zip(("input", "p"), args, strict=False)) | dict(kwargs)
        drop = float(own.get("p", 0.5))
        if drop == 0:
            return own["input"]
        self.site += 1
        return self.applied(own["input"], DROPOUTS[func], drop)

    def applied(self, value: Tensor, kind: str, drop: float) -> Tensor:
        """What the network goes on with."""
        raise NotImplementedError


class _Finding(_Dropping):
    """Notes where the network drops units, and drops none."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.sites: list[tuple[str, float]] = []
        self.shapes: list[tuple[int, ...]] = []

    def applied(self, value: Tensor, kind: str, drop: float) -> Tensor:
        """Note the place and return the value as it is."""
        if value.dim() < 2 or value.shape[0] != self.count:
            raise NetworkError(
                f"dropout number {self.site} of the network acts on a tensor of shape "
                f"{tuple(value.shape)}, whose first axis does not count the {self.count} points, so a mask "
                "cannot be the same for all points. Put the points on the first axis there."
            )
        whole = kind in (UNITS, ALPHA_UNITS)
        shape = value.shape[1:] if whole else (value.shape[1], *[1] * (value.dim() - 2))
        self.sites.append((kind, drop))
        self.shapes.append(tuple(shape))
        return value


class Masking(_Dropping):
    """Runs a network within it with given masks in place of dropout.

    Args:
        sites: What is dropped at each place.
        masks: The masks by the name of the place, True where a unit is kept.
    """

    def __init__(self, sites: Sites, masks: Params) -> None:
        super().__init__()
        self.sites, self.masks = sites, masks

    def applied(self, value: Tensor, kind: str, drop: float) -> Tensor:
        """The value with dropped units."""
        name = site_name(self.site - 1)
        if name not in self.masks or self.sites[self.site - 1] != (kind, drop):
            raise NetworkError(
                f"the network calls dropout differently than when its masks were drawn, at call {self.site}: "
                f"{kind} with probability {drop:g}. Call mc_dropout again after changing the network."
            )
        mask = self.masks[name]
        if mask.dim() != value.dim() - 1 or (
            kind in (UNITS, ALPHA_UNITS) and mask.shape != value.shape[1:]
        ):
            raise InputError(
                f"the masks of dropout {self.site} were drawn for inputs that give {tuple(mask.shape)} units "
                f"there, but these inputs give {tuple(value.shape[1:])}. Pass inputs of one shape."
            )
        return _masked(value, mask.to(value.dtype), kind, 1 - drop)


def _masked(value: Tensor, mask: Tensor, kind: str, keep: float) -> Tensor:
    if kind in (UNITS, CHANNELS):
        return value * mask * (1 / keep if keep else 0.0)
    # the affine map keeps mean 0 and variance 1 of the units
    scale = (keep * (1 + (1 - keep) * LOWEST**2)) ** -0.5 if keep else 0.0
    return scale * (value * mask + LOWEST * (1 - mask) - LOWEST * (1 - keep))


def site_name(index: int) -> str:
    """The name of the masks of a place."""
    return f"dropout {index}"


def find_sites(architecture: Linearized, x: Inputs) -> tuple[Sites, list[tuple[int, ...]]]:
    """Where a network drops units, and the shapes of masks there, from passes of two and of three points.

    Raises:
        NetworkError: If there is no such place, or if points are not on the first axis at one.
    """
    for count in (3, 2):
        copies = torch.zeros(count, dtype=torch.long, device=tensors(x)[0].device)
        finding = _Finding(count)
        with torch.no_grad(), accepts(x), finding:
            architecture.run(architecture.params, rows(x, copies))
    if not finding.sites:
        raise NetworkError(
            f"the network ({type(architecture.network).__name__}) does not call dropout with a positive "
            "probability, so there is nothing to draw. Train it with nn.Dropout layers, or use another "
            "method, such as laplace. Dropout inside attention and recurrent layers, and behind "
            "'if self.training', is not seen."
        )
    return tuple(finding.sites), finding.shapes


@savable("bayes.MaskedMembers")
@dataclass(frozen=True, eq=False)
class MaskedMembers(Members):
    """S networks that share all parameters and differ in which units are dropped.

    Args:
        architecture: The network.
        values: The masks by name of the place ("dropout 0" is the first of a pass), True where a unit is
            kept, each with an axis of length S in front.
        sites: What is dropped at each place, and with which probability.

    Raises:
        InputError: If the masks do not belong to the places.
    """

    sites: Sites = ()

    def __post_init__(self) -> None:
        if set(self.values) != {site_name(index) for index in range(len(self.sites))}:
            raise InputError(
                f"there must be masks for each of {len(self.sites)} places, but there are "
                f"{sorted(self.values)}. Use draw_masks."
            )
        if len({len(value) for value in self.values.values()}) != 1:
            raise InputError("the masks of all places must be equally many. Use draw_masks.")

    def _run(self, values: Params, x: Inputs) -> Tensor:
        with Masking(self.sites, values):
            return self.architecture.run(self.architecture.params, x)

    def each(self) -> Iterator[Linearized]:
        """The members one by one, each as a linearization of the network with its own masks."""
        for index in range(len(self)):
            module = MaskedNetwork(self.architecture.network, self.sites, self._of(index))
            params, frozen = (
                {f"network.{name}": value for name, value in group.items()}
                for group in (self.architecture.params, self.architecture.frozen)
            )
            plans = type(self.architecture.plans)()
            yield replace(
                self.architecture, network=module, params=params, frozen=frozen, plans=plans
            )

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> MaskedMembers:
        """Move the members.

        Args:
            device: The device; None keeps it.
            dtype: The dtype of floating-point tensors; None keeps it.

        Returns:
            The same members on another device or in another dtype.
        """
        values = {name: value.to(device=device) for name, value in self.values.items()}
        return replace(self, architecture=self.architecture.to(device, dtype), values=values)


class MaskedNetwork(nn.Module):
    """A network with fixed masks in place of dropout, which is one function of its inputs.

    Args:
        network: The network.
        sites: What is dropped at each place.
        masks: A mask for each place, by its name.
    """

    def __init__(self, network: nn.Module, sites: Sites, masks: Params) -> None:
        super().__init__()
        self.network, self.sites, self.masks = network, sites, masks

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Run the network with the masks.

        Args:
            arguments: What the network takes.
            keywords: What the network takes by name.

        Returns:
            What the network returns.
        """
        with Masking(self.sites, self.masks):
            return self.network(*arguments, **keywords)


def draw_masks(
    architecture: Linearized, x: Inputs, num_samples: int, *, seed: int = 0
) -> MaskedMembers:
    """Draw masks z ~ Bernoulli(1 − p) for every place of a network that drops units with probability p.

    A mask is the same for all points, so that a draw of all masks is one function. Kept units are divided
    by 1 − p, as torch does in training, so that E[z h / (1 − p)] = h and no scaling is needed at test time.
    (Without the division E[z h] = (1 − p) h, and outgoing weights are multiplied by 1 − p at test time.)

    Args:
        architecture: The network, in eval mode.
        x: Points; one is enough.
        num_samples: The number of draws S.
        seed: The seed of the draws.

    Returns:
        The network with S draws of masks.

    Raises:
        InputError: If an argument is of the wrong kind.
        NetworkError: If the network does not call dropout, or does so where points are not on the first
            axis.

    >>> from net2gp.linear import linearize
    >>> network = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5), nn.Linear(4, 1)).eval()
    >>> draw_masks(linearize(network), torch.zeros(1, 1), 10).values["dropout 0"].shape
    torch.Size([10, 4])

    Reference: Srivastava et al., Dropout, JMLR 2014.
    """
    check_count(num_samples, "num_samples")
    check_seed(seed)
    if not isinstance(architecture, Linearized):
        raise InputError(
            f"architecture must be linearize(network), but is {describe(architecture)}. For a posterior use "
            "mc_dropout(network, data, likelihood)."
        )
    architecture.check(x)
    sites, shapes = find_sites(architecture, x)
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for index, ((_, drop), shape) in enumerate(zip(sites, shapes, strict=True)):
        uniform = torch.rand((num_samples, *shape), generator=generator, dtype=torch.float64)
        values[site_name(index)] = (uniform >= drop).to(architecture.example.device)
    return MaskedMembers(architecture, values, sites)


def drop_units(
    layer: nn.Linear, *, inputs: Tensor | None = None, outputs: Tensor | None = None
) -> nn.Linear:
    """Return the layer whose weights do to h what masks of its inputs and outputs do to its units.

    W (z ∘ x) + b = (W diag z) x + b, so a mask of the inputs drops *columns* of W. A mask of the outputs,
    z ∘ (W x + b), drops *rows* of W and entries of b, and an activation with a(0) = 0 keeps these units at
    zero.

    Args:
        layer: The layer.
        inputs: The mask or scale of each input unit, (in_features,); None keeps all.
        outputs: The mask or scale of each output unit, (out_features,); None keeps all.

    Returns:
        A new layer.

    Raises:
        InputError: If a mask has another shape.

    >>> layer = nn.Linear(3, 2)
    >>> drop_units(layer, inputs=torch.tensor([1.0, 0.0, 1.0])).weight[:, 1].abs().tolist()
    [0.0, 0.0]
    """
    if not isinstance(layer, nn.Linear):
        raise InputError(f"layer must be an nn.Linear, but is {describe(layer)}.")
    weight = layer.weight.detach()
    bias: Tensor | None = None if layer.bias is None else layer.bias.detach()
    for name, mask, count in (
        ("inputs", inputs, weight.shape[1]),
        ("outputs", outputs, len(weight)),
    ):
        if mask is not None and (not isinstance(mask, Tensor) or mask.shape != (count,)):
            raise InputError(
                f"{name} must have shape ({count},), one number per unit, but is {describe(mask)}."
            )
    if inputs is not None:
        weight = weight * inputs.to(weight)
    if outputs is not None:
        weight = weight * outputs.to(weight)[:, None]
        bias = None if bias is None else bias * outputs.to(bias)
    made = nn.utils.skip_init(
        nn.Linear,
        layer.in_features,
        layer.out_features,
        bias=bias is not None,
        device=weight.device,
    )
    made.weight = nn.Parameter(weight.clone())
    if bias is not None:
        made.bias = nn.Parameter(bias.clone())
    return made
