"""Changes of a network's parameters that leave its function as it is, and networks matched up to them."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from itertools import pairwise

import torch
from torch import Tensor, nn

from net2gp.bayes.landscape.alike import check_modules
from net2gp.bayes.landscape.layer_chains import Stage, chain_of, columns, follows_scale
from net2gp.errors import InputError, NetworkError, check_count, check_seed
from net2gp.inputs import describe


def permute_units(network: nn.Module, orders: Mapping[str, Tensor]) -> nn.Module:
    """Let hidden units change places, which leaves the function of the network as it is.

    Unit i of a layer becomes the unit that had the number `orders[layer][i]`: the rows of W and b of the
    layer are permuted, and the columns of the next layer alike. A layer of H units has H! such symmetries,
    so every minimum of the loss exists that many times.

    Args:
        network: An `nn.Sequential` of linear or convolutional layers, activations, pooling, Flatten and
            dropout.
        orders: A permutation of 0, …, H−1 for each hidden layer that changes, by the layer's name.

    Returns:
        A copy of the network with the units in the new order.

    Raises:
        InputError: If a name is not a hidden layer, or an order is no permutation of its units.
        NetworkError: If the network is not such a chain of layers; the message names what is in the way.

    >>> network = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    >>> turned = permute_units(network, {"0": torch.tensor([2, 0, 1])})
    >>> bool((turned[0].bias == network[0].bias[[2, 0, 1]]).all())
    True

    Reference: Hecht-Nielsen, On the algebraic structure of feedforward network weight spaces, 1990.
    """
    copy = deepcopy(network)
    stages = chain_of(copy)
    _check_names(orders, stages, "orders")
    for one, other in pairwise(stages):
        if one.name not in orders:
            continue
        order = torch.as_tensor(orders[one.name])
        if order.is_floating_point() or not torch.equal(
            order.sort().values.cpu(), torch.arange(one.num_units)
        ):
            raise InputError(
                f"orders['{one.name}'] must be a permutation of the {one.num_units} units, such as "
                f"torch.randperm({one.num_units}), but is {describe(orders[one.name])}."
            )
        with torch.no_grad():
            _move_rows(one, order)
            _input_groups(one, other).copy_(_input_groups(one, other)[:, order].clone())
    return copy


def scale_units(network: nn.Module, factors: Mapping[str, Tensor]) -> nn.Module:
    """Multiply hidden units by numbers and divide what the next layer makes of them by the same numbers.

    The function stays as it is if φ(s u) = s φ(u) for every activation φ up to the next layer: for all s > 0
    with ReLU and leaky ReLU, for s = −1 with odd activations such as tanh, and for all s ≠ 0 in linear
    networks. The activation itself is asked whether this holds.

    Args:
        network: An `nn.Sequential` as `permute_units` takes it.
        factors: A number for each unit of each hidden layer that changes, by the layer's name: (H,).

    Returns:
        A copy of the network with scaled units.

    Raises:
        InputError: If a name is not a hidden layer, or its factors are not H numbers other than 0.
        NetworkError: If an activation does not have this symmetry, or the network is not a chain of layers.

    >>> network = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> scale_units(network, {"0": torch.tensor([1.0, -1.0, 1.0])})
    Traceback (most recent call last):
    ...
    net2gp.errors.NetworkError: '1' (ReLU) does not follow the factors of '0': ...

    Reference: Dinh et al., Sharp minima can generalize for deep nets, ICML 2017.
    """
    copy = deepcopy(network)
    stages = chain_of(copy)
    _check_names(factors, stages, "factors")
    for one, other in pairwise(stages):
        if one.name not in factors:
            continue
        scale = torch.as_tensor(factors[one.name])
        if scale.shape != (one.num_units,) or not bool((scale.isfinite() & (scale != 0)).all()):
            raise InputError(
                f"factors['{one.name}'] must be {one.num_units} numbers other than 0, but is "
                f"{describe(factors[one.name])}."
            )
        for name, module in one.between:
            if not follows_scale(module, scale):
                raise NetworkError(
                    f"'{name}' ({type(module).__name__}) does not follow the factors of '{one.name}': "
                    "positive factors need an activation like ReLU, −1 an odd one like Tanh, and others a "
                    "linear network."
                )
        with torch.no_grad():
            for value in _own(one):
                value.mul_(scale.to(value).reshape(-1, *[1] * (value.dim() - 1)))
            groups = _input_groups(one, other)
            groups.div_(scale.to(groups).reshape(1, -1, *[1] * (groups.dim() - 2)))
    return copy


def match_weights(
    network: nn.Module, reference: nn.Module, *, max_sweeps: int = 100, seed: int = 0
) -> dict[str, Tensor]:
    """Find the order of hidden units in which a network is closest to another one.

    The orders π minimize ‖π(θ) − θ'‖² over permutations of all hidden layers. Given the orders of its
    neighbors, the best order of one layer is a linear assignment problem, which is solved exactly; the
    layers take turns in random order until none changes. This is a local optimum, since the whole problem
    is NP-hard. The turns start once from the present order and once from the order by incoming weights
    alone, layer by layer, which finds any permutation of the same network; the better end is taken. Each
    turn costs O(H² I) for the products, with I inputs and outputs per unit, and O(H³) for the assignment.

    Args:
        network: An `nn.Sequential` as `permute_units` takes it.
        reference: Another network of the same architecture.
        max_sweeps: The most turns that each layer takes.
        seed: Makes the order of the turns repeatable.

    Returns:
        The orders by name of the hidden layer, for `permute_units(network, orders)`.

    Raises:
        NetworkError: If the networks are unlike, or not chains of layers.

    >>> network = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    >>> turned = permute_units(network, {"0": torch.tensor([2, 0, 1])})
    >>> match_weights(network, turned)
    {'0': tensor([2, 0, 1])}

    Reference: Ainsworth et al., Git Re-Basin: merging models modulo permutation symmetries, ICLR 2023.
    """
    check_count(max_sweeps, "max_sweeps")
    check_seed(seed)
    own, wanted = chain_of(network), chain_of(reference)
    shapes, others = ([(s.name, s.layer.weight.shape) for s in chain] for chain in (own, wanted))
    if shapes != others:
        raise NetworkError(
            "the networks are of unlike architectures: their layers are "
            f"{[(n, tuple(s)) for n, s in shapes]} and {[(n, tuple(s)) for n, s in others]}."
        )
    check_modules(network, reference)
    as_it_is = {stage.name: torch.arange(stage.num_units) for stage in own[:-1]}
    from_inputs = dict(as_it_is)
    for index, stage in enumerate(own[:-1]):
        from_inputs[stage.name] = _assigned(_incoming(own, wanted, from_inputs, index))
    generator = torch.Generator().manual_seed(seed)
    ends = [
        _improved(own, wanted, start, max_sweeps, generator) for start in (as_it_is, from_inputs)
    ]
    return max(ends, key=lambda orders: _agreement(own, wanted, orders))


Orders = dict[str, Tensor]


def _improved(
    own: list[Stage], wanted: list[Stage], start: Orders, sweeps: int, generator: torch.Generator
) -> Orders:
    """The orders after the layers took turns, none of which made the networks less alike."""
    orders = dict(start)
    for _ in range(sweeps):
        changed = False
        for index in torch.randperm(len(own) - 1, generator=generator).tolist():
            name = own[index].name
            gains = _incoming(own, wanted, orders, index) + _outgoing(own, wanted, orders, index)
            found = _assigned(gains)
            places = torch.arange(len(found))
            better = gains[places, found].sum() - gains[places, orders[name]].sum()
            if float(better) > 1e-12 * float(gains.abs().max()):
                orders[name] = found
                changed = True
        if not changed:
            break
    return orders


def _agreement(own: list[Stage], wanted: list[Stage], orders: Orders) -> float:
    """The inner product of all parameters of the reference and of the network in these orders."""
    total = 0.0
    for index, stage in enumerate(own):
        gains = _incoming(own, wanted, orders, index)
        order = orders.get(stage.name, torch.arange(stage.num_units))
        total += float(gains[torch.arange(len(order)), order].sum())
    return total


def _incoming(own: list[Stage], wanted: list[Stage], orders: Orders, index: int) -> Tensor:
    """⟨weights into unit i of the reference, weights into unit j of the network⟩: (H, H)."""
    values = [value.detach().double().cpu() for value in _own(own[index])]
    if index:
        before = own[index - 1]
        groups = _input_groups(before, own[index]).detach().double().cpu()
        values[0] = groups[:, orders[before.name]]
    aims = [value.detach().double().cpu() for value in _own(wanted[index])]
    size = own[index].num_units
    pairs = zip(aims, values, strict=True)
    return torch.stack([a.reshape(size, -1) @ b.reshape(size, -1).mT for a, b in pairs]).sum(0)


def _outgoing(own: list[Stage], wanted: list[Stage], orders: Orders, index: int) -> Tensor:
    """⟨weights out of unit i of the reference, weights out of unit j of the network⟩: (H, H)."""
    following = own[index + 1]
    out = _input_groups(own[index], following).detach().double().cpu()
    if following.name in orders:
        out = out[orders[following.name]]
    goal = _input_groups(wanted[index], wanted[index + 1]).detach().double().cpu()
    size = own[index].num_units
    return goal.transpose(0, 1).reshape(size, -1) @ out.transpose(0, 1).reshape(size, -1).mT


def _assigned(gains: Tensor) -> Tensor:
    from scipy.optimize import linear_sum_assignment

    return torch.as_tensor(linear_sum_assignment(gains.numpy(), maximize=True)[1])


def _own(stage: Stage) -> list[Tensor]:
    """The weight and, if there is one, the bias."""
    bias = stage.layer.bias
    return [stage.layer.weight] if bias is None else [stage.layer.weight, bias]


def _move_rows(stage: Stage, order: Tensor) -> None:
    for value in _own(stage):
        value.copy_(value[order.to(value.device)].clone())


def _input_groups(one: Stage, other: Stage) -> Tensor:
    """A view of the next layer's weight whose axis 1 counts the units of this layer: (out, H, …)."""
    weight = other.layer.weight
    return weight.view(weight.shape[0], one.num_units, columns(one, other), *weight.shape[2:])


def _check_names(given: Mapping[str, Tensor], stages: list[Stage], argument: str) -> None:
    known = [stage.name for stage in stages[:-1]]
    if not isinstance(given, Mapping):
        raise InputError(
            f"{argument} must be a dict by the names of hidden layers, {known}, but is {describe(given)}."
        )
    for name in given:
        if name not in known:
            raise InputError(
                f"{argument} has '{name}', which is not a hidden layer of the network: {known}."
            )
