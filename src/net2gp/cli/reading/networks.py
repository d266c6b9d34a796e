"""Networks: programs of torch.export, or functions that build a module, with weights from a file."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from net2gp.cli.files import digest
from net2gp.errors import FileFormatError, InputError, NetworkError

WAYS = (
    "Pass a program of torch.export (network.pt2), or what builds the module (package.module:factory or "
    "file.py:factory) with --weights FILE"
)

COLORS = re.compile(r"\x1b\[[0-9;]*m")
"""What makes text bold or colored on terminals."""


@dataclass(frozen=True)
class Source:
    """Where a network comes from.

    Args:
        network: A `.pt2` file, `module:factory` or `file.py:factory`.
        weights: A file of weights, or nothing.
    """

    network: str
    weights: str = ""

    @property
    def files(self) -> list[Path]:
        """The files whose bytes are the network's parameters."""
        named = (
            [self.weights] if self.weights else [self.network] if is_program(self.network) else []
        )
        return [Path(name).expanduser() for name in named]

    def as_dict(self) -> dict[str, str]:
        """The source for a file: paths in full, and SHA-256 of the parameters."""
        network = self.network
        name, colon, factory = network.partition(":")
        if is_program(network) or name.endswith(".py"):
            network = f"{Path(name).expanduser().resolve()}{colon}{factory}"
        weights = str(Path(self.weights).expanduser().resolve()) if self.weights else ""
        known = {"sha256": digest(self.files[0])} if self.files else {}
        return {"network": network, "weights": weights, "folder": os.getcwd(), **known}


def is_program(name: str) -> bool:
    """Whether a network is named by the file of a program."""
    return name.endswith(".pt2")


def build(source: Source) -> nn.Module:
    """Build a network in eval mode.

    Args:
        source: Where it comes from.

    Returns:
        The module.

    Raises:
        InputError: If there is no such module, function or file.
        NetworkError: If the function fails or returns something else, or weights do not fit.
        FileFormatError: If a file cannot be read.
    """
    if is_program(source.network):
        from net2gp.interop.exported import load_program

        network: nn.Module = load_program(source.network)
    else:
        network = _built(source.network)
    if source.weights:
        _load_weights(network, Path(source.weights).expanduser())
    return network.eval()


def _built(name: str) -> nn.Module:
    home, colon, factory = name.partition(":")
    if not colon or not home or not factory:
        raise InputError(f"'{name}' is no network. {WAYS}.")
    found: Any = _imported(home)
    for part in factory.split("."):
        if not hasattr(found, part):
            raise InputError(
                f"{home} has no '{factory}'. Pass {home}:NAME of a function that returns the module."
            )
        found = getattr(found, part)
    if not isinstance(found, nn.Module):
        try:
            found = found()
        except (Exception, SystemExit) as error:  # whatever the user's own code raises
            raise NetworkError(f"{name}() failed with {type(error).__name__}: {error}") from None
    if not isinstance(found, nn.Module):
        raise NetworkError(
            f"{name}() returned {type(found).__name__}, but must return a torch.nn.Module."
        )
    return found


def _imported(home: str) -> Any:
    """Import a module by name, with the current folder on the path, or a file with its own."""
    path = Path(home).expanduser()
    if path.suffix == ".py" and not path.is_file():
        raise InputError(f"there is no file {path}. {WAYS}.")
    folders = [os.getcwd(), str(path.parent.resolve())] if path.suffix == ".py" else [os.getcwd()]
    sys.path[:0] = folders
    try:
        return _run(path) if path.suffix == ".py" else importlib.import_module(home)
    except ModuleNotFoundError as error:
        raise InputError(f"{home} cannot be imported: {error}. {WAYS}.") from None
    except (Exception, SystemExit) as error:  # whatever the user's own code raises
        raise NetworkError(
            f"importing {home} failed with {type(error).__name__}: {error}"
        ) from None
    finally:
        for folder in folders:
            sys.path.remove(folder)


def _run(path: Path) -> ModuleType:
    """Run a file as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def _load_weights(network: nn.Module, path: Path) -> None:
    weights = _without_prefix(read_weights(path), list(network.state_dict()))
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split()).partition(":")[2].strip()
        raise NetworkError(
            f"the weights of {path} do not fit the network: {reason[:300]} Pass the weights of this "
            "architecture."
        ) from None


def _without_prefix(weights: dict[str, Tensor], names: list[str]) -> dict[str, Tensor]:
    """The weights without a prefix of all names, which wrappers and Lightning put there."""
    for key in weights:
        prefix = key.removesuffix(names[0]) if names and key.endswith("." + names[0]) else ""
        if prefix and all(prefix + name in weights for name in names):
            return {name: weights[prefix + name] for name in names}
    return weights


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read weights by name from safetensors, npz, or a state dict of torch, without running code.

    Args:
        path: The file.

    Returns:
        The weights by name.

    Raises:
        FileFormatError: If the file is not there, or holds something else.
    """
    if not path.is_file():
        raise FileFormatError(f"there is no file {path}. Pass --weights FILE.")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        if path.suffix == ".npz":
            from net2gp.data import state_dict

            return state_dict(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch and safetensors raise many kinds for bytes of another kind
        reason = COLORS.sub("", str(error)).strip().split("\n")[0] or type(error).__name__
        if reason.startswith("Weights only load failed"):
            reason = "it holds a whole module or other objects, and reading these would run code of the file"
        raise FileFormatError(
            f"{path} is not a file of weights alone ({reason}). Write it with "
            "safetensors.torch.save_file(network.state_dict(), 'weights.safetensors')."
        ) from None
    return _state_dict(path, found)


def _state_dict(path: Path, found: Any) -> dict[str, Tensor]:
    """The tensors by name, also if they are one entry of a checkpoint."""
    for name in ("state_dict", "model_state_dict", "model"):
        if isinstance(found, dict) and isinstance(found.get(name), dict):
            found = found[name]
    if isinstance(found, dict) and not _are_weights(found):
        inside = [one for one in found.values() if _are_weights(one)]
        found = inside[0] if len(inside) == 1 else found
    if not _are_weights(found):
        raise FileFormatError(
            f"{path} holds no weights by name. Save network.state_dict(), alone or as the entry 'state_dict'."
        )
    return found


def _are_weights(found: Any) -> bool:
    return (
        isinstance(found, dict)
        and bool(found)
        and all(isinstance(v, Tensor) for v in found.values())
    )
