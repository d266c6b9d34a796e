"""Independent starts of one architecture: layers initialized again, or networks from a factory."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import nn

from net2gp.bayes.optimum.descent import seeded
from net2gp.errors import InputError, NetworkError, check_count
from net2gp.inputs import describe, rows
from net2gp.linear.linearized import Linearized, Patterns, choose
from net2gp.types import Inputs, Params

Factory = Callable[[], nn.Module]
"""A function that makes a new network in each call, from torch's global random state."""


def member_seeds(seed: int, count: int) -> list[int]:
    """Seeds of the members of an ensemble, which depend on the seed of the ensemble alone.

    Args:
        seed: The seed of the ensemble.
        count: The number of members.

    Returns:
        One seed per member.
    """
    return [((seed + 1) * 1_000_003 + index) % 2**63 for index in range(count)]


def starts(
    network: nn.Module | Factory, count: int, seed: int, only: Patterns | None
) -> list[nn.Module]:
    """Make networks of one architecture with independent parameters.

    Args:
        network: A network whose layers are initialized again by their `reset_parameters`, or a factory.
        count: The number of networks.
        seed: The seed of the parameters; torch's global random state is restored.
        only: The parameters to draw, by name pattern; the others keep their values.

    Returns:
        New modules.

    Raises:
        InputError: If the factory does not return modules, or the same parameters twice.
        NetworkError: If a parameter belongs to no layer that can be initialized again.
    """
    check_count(count, "num_members")
    seeds = member_seeds(seed, count)
    if isinstance(network, nn.Module):
        return [_restarted(network, one, only) for one in seeds]
    if not callable(network) or not _takes_nothing(network):
        raise InputError(
            f"network must be an nn.Module or a function without arguments that makes one, but is "
            f"{describe(network)}. Pass for example lambda: MyNetwork(3)."
        )
    found = []
    for one in seeds:
        with seeded(one, _drawing_device()):
            made = network()
        if not isinstance(made, nn.Module):
            raise InputError(
                f"the factory must return an nn.Module, but returned {describe(made)}."
            )
        found.append(copy.deepcopy(made))
    _check_different(found)
    return found


def _takes_nothing(factory: Factory) -> bool:
    """Whether a function can be called without arguments."""
    try:
        inspect.signature(factory).bind()
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True


def _drawing_device() -> torch.device:
    """Where a factory may draw besides the CPU."""
    busy = torch.cuda.is_available() and torch.cuda.is_initialized()
    return torch.device("cuda", torch.cuda.current_device()) if busy else torch.device("cpu")


def _restarted(network: nn.Module, seed: int, only: Patterns | None) -> nn.Module:
    fresh, covered = copy.deepcopy(network), set()
    names = choose([name for name, _ in network.named_parameters()], only)
    kept = {n: v.detach().clone() for n, v in network.named_parameters() if n not in names}
    # from the inside out, so that a module that initializes its layers in its own way has the last word
    with seeded(seed, next(network.parameters()).device):
        for prefix, module in reversed(list(fresh.named_modules())):
            own = {f"{prefix}.{n}".lstrip(".") for n, _ in module.named_parameters(recurse=False)}
            reset = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
            if callable(reset) and own & set(names):
                reset()
                covered |= own
    left = [name for name in names if name not in covered]
    if left:
        raise NetworkError(
            f"'{left[0]}' belongs to no layer with reset_parameters(), so that it cannot be initialized "
            "again. Pass a function that makes a new network, as ensemble(lambda: MyNetwork(), ...)."
        )
    with torch.no_grad():
        for name, value in fresh.named_parameters():
            if name in kept:
                value.copy_(kept[name])
    return fresh


def _check_different(networks: Sequence[nn.Module]) -> None:
    for one, other in pairwise(networks):
        pairs = list(zip(one.parameters(), other.parameters(), strict=False))
        if pairs and all(p.shape == q.shape and torch.equal(p, q) for p, q in pairs):
            raise InputError(
                "the factory returned networks with the same parameters: it makes none, or it sets a seed. "
                "Let it draw from torch's global random state, as lambda: nn.Linear(3, 1) does."
            )


@torch.no_grad()
def check_alike(networks: Sequence[nn.Module], architecture: Linearized, x: Inputs) -> None:
    """Raise unless all networks have the same code, since the first one's runs for all of them.

    Args:
        networks: The networks.
        architecture: The first one in eval mode.
        x: The inputs.

    Raises:
        NetworkError: If names, shapes or outputs differ.
    """
    few = rows(x, slice(0, 3))
    kinds = [{name: value.shape for name, value in n.state_dict().items()} for n in networks]
    for index, network in enumerate(networks[1:], start=1):
        alike = kinds[index] == kinds[0]
        if alike:
            own = copy.deepcopy(network).eval()
            values: Params = {**dict(own.named_parameters()), **dict(own.named_buffers())}
            theirs = Linearized(own, values, {}, architecture.output).run(values, few)
            alike = torch.allclose(architecture.run(values, few), theirs, equal_nan=True)
        if not alike:
            raise NetworkError(
                f"the members must have one architecture, but network {index} of the factory computes "
                "something else than network 0 does with its parameters. Mix posteriors of unlike networks "
                "by averaging their predictions."
            )
