"""Posteriors as files: what a file may hold, and how it is read back. Nothing in a file is executed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

import net2gp.posteriors.weights  # noqa: F401 (its structures and covariances have tags of their own)
from net2gp import kernels, likelihoods
from net2gp._version import __version__
from net2gp.errors import FileFormatError, InputError, check_device
from net2gp.inputs import describe, ordinary_tensors
from net2gp.limits.limit_kernels import InfiniteWidth, LimitKernel
from net2gp.limits.plan import graph_of
from net2gp.limits.prior import Prior
from net2gp.linalg import Cholesky as CholeskyFactor
from net2gp.linalg.large import FactorPlusIdentity, RoundedCholesky
from net2gp.linalg.low_rank import LowRankPlusIdentity
from net2gp.linear.forward.kinds import unwrapped
from net2gp.linear.forward.places import AtPlaces
from net2gp.linear.jacobians.tangent import TangentKernel
from net2gp.linear.jacobians.trace import TraceKernel
from net2gp.linear.linearized import Linearized, Output
from net2gp.posteriors.condition import ByConditioning
from net2gp.posteriors.conditioning import conditioned, solvers, systems
from net2gp.posteriors.conditioning.whitened import Whitened
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.recipes import (
    around_network,
    class_codes,
    drawn,  # noqa: F401 (it has tags of its own)
    dual,
    mixed,  # noqa: F401 (it has tags of its own)
    places,
    trained_ensemble,
)
from net2gp.posteriors.saving.format1 import FORMAT_1
from net2gp.posteriors.writing import FORMAT, KIND, NAMES, VALUE, check_value, digest
from net2gp.tags import class_of

# Files name classes by these tags, or by those of @savable: a class may move or change its name, its tag may
# not.
_CLASSES: dict[str, type] = {
    "linearized.Linearized": Linearized,
    "tangent.TangentKernel": TangentKernel,
    "trace.TraceKernel": TraceKernel,
    "kernels.LimitKernel": LimitKernel,
    "kernels.InfiniteWidth": InfiniteWidth,
    "prior.Prior": Prior,
    "cholesky.Cholesky": CholeskyFactor,
    "low_rank.LowRankPlusIdentity": LowRankPlusIdentity,
    "random_pivots.FactorPlusIdentity": FactorPlusIdentity,
    "rounded.RoundedCholesky": RoundedCholesky,
    "kernels.RBF": kernels.RBF,
    "kernels.IndependentOutputs": kernels.IndependentOutputs,
    "gaussian.Gaussian": likelihoods.Gaussian,
    "heteroscedastic.HeteroscedasticGaussian": likelihoods.HeteroscedasticGaussian,
    "bernoulli.Bernoulli": likelihoods.Bernoulli,
    "categorical.Categorical": likelihoods.Categorical,
    "heteroscedastic.SoftplusScale": likelihoods.SoftplusScale,
    "heteroscedastic.LogVariance": likelihoods.LogVariance,
    "links.Quadrature": likelihoods.Quadrature,
    "links.Probit": likelihoods.Probit,
    "links.MonteCarlo": likelihoods.MonteCarlo,
    "links.LaplaceBridge": likelihoods.LaplaceBridge,
    "links.Contrast": likelihoods.Contrast,
    "dual.AroundZero": dual.AroundZero,
    "solvers.Exact": solvers.Exact,
    "solvers.Lanczos": solvers.Lanczos,
    "solvers.Pathwise": solvers.Pathwise,
    "solvers.Cholesky": solvers.Cholesky,
    "solvers.WeightSpace": solvers.WeightCholesky,
    "solvers.PivotedCholesky": solvers.PivotedCholesky,
    "solvers.ADASAP": solvers.ADASAP,
    "solvers.Centers": solvers.Centers,
    "solvers.RandomPivots": solvers.RandomPivots,
    "solvers.Nystrom": solvers.Nystrom,
    "solvers.CG": solvers.CG,
    "solvers.Laplace": solvers.Laplace,
    "solvers.Variational": solvers.Variational,
    "systems.Sites": systems.Sites,
    "systems.CurvatureFactor": systems.CurvatureFactor,
    "systems.GramProduct": systems.GramProduct,
    "systems.IterativeFactor": systems.IterativeFactor,
    "function_space.NoiseFactor": conditioned.NoiseFactor,
    "function_space.SpectralFactor": conditioned.SpectralFactor,
    "function_space.Refusal": conditioned.Refusal,
    "codes.Standardized": class_codes.Standardized,
    "codes.OneHotCodes": class_codes.OneHotCodes,
    "process.Conditioned": conditioned.Conditioned,
    "process.Whitened": Whitened,
    "process.AroundNetwork": around_network.AroundNetwork,
    "process.AroundPlaces": places.AroundPlaces,
    "process.TrainedEnsemble": trained_ensemble.TrainedEnsemble,
    "recipe.ByGradientFlow": trained_ensemble.ByGradientFlow,
    "recipe.ByConditioning": ByConditioning,
    "recipe.ByExpansion": dual.ByExpansion,
    "recipe.ByTraining": around_network.ByTraining,
    "recipe.ByLaplace": around_network.ByLaplace,
    "recipe.ByLaplaceAtPlaces": places.ByLaplaceAtPlaces,
    "recipe.ByCodes": class_codes.ByCodes,
    "posterior.Posterior": Posterior,
}
NAMES.update({cls: name for name, cls in _CLASSES.items()})


def save(posterior: Posterior, path: str | os.PathLike) -> None:
    """Write a posterior to one file, which `load` reads back with identical predictions.

    The file holds every tensor, the network's parameters and buffers among them, and describes the rest in
    JSON; only the code of the network is not in it. The network may be in training mode, since a posterior
    does not change with it. The file is written beside `path` first and then moved, so that an interrupted
    save leaves an older file intact. `posterior.save(path)` is the same.

    Args:
        posterior: The posterior to save.
        path: The file to write, in a folder that exists.

    Raises:
        InputError: If the folder does not exist, or if the kernel, mean or likelihood is of a class that
            cannot be saved.
    """
    if not isinstance(posterior, Posterior):
        own = " It has a method save of its own." if _posterior_in(posterior) is not None else ""
        raise InputError(f"save takes a posterior of net2gp, but got {describe(posterior)}.{own}")
    posterior.save(path)


def load(
    path: str | os.PathLike,
    network: nn.Module | Linearized | None = None,
    *,
    output: Output | None = None,
    device: torch.device | str = "cpu",
) -> Posterior:
    """Read a posterior that `save` wrote. Nothing in the file is executed.

    Args:
        path: The file.
        network: A module of the architecture that was saved, or its linearization. Its own weights do not
            matter. None if the posterior has no network.
        output: The function that was given to `linearize(output=...)`, if there was one.
        device: Where the tensors go.

    Returns:
        The posterior, which predicts as the saved one did.

    Raises:
        FileFormatError: If there is no such file, or if it is corrupted or of another kind or version.
        InputError: If the network is missing, or if its parameters or outputs differ from the saved ones.
    """
    found = read(path, network, output=output, device=device)
    if not isinstance(found, Posterior):
        kind = type(found).__name__
        hint = " Read it with net2gp.conformal.load." if _posterior_in(found) is not None else ""
        raise FileFormatError(f"{path} does not hold a posterior, but {kind}.{hint}")
    return found


@ordinary_tensors()
def read(
    path: str | os.PathLike,
    network: nn.Module | Linearized | None,
    *,
    output: Output | None,
    device: torch.device | str,
) -> Any:
    """Read what `write` wrote: a posterior, or a value with one.

    Args:
        path: The file.
        network: A module of the architecture that was saved, or its linearization; None if there is none.
        output: The function that was given to `linearize(output=...)`, if there was one.
        device: Where the tensors go.

    Returns:
        The value.

    Raises:
        FileFormatError: If there is no such file, or if it is corrupted or of another kind or version.
        InputError: If the network is missing, or if its parameters or outputs differ from the saved ones.
    """
    path = Path(path).expanduser()
    check_device(device)
    if isinstance(network, Linearized):
        output = output or network.output
        network = network.network
    network = unwrapped(network)
    if not isinstance(network, nn.Module | None):
        raise InputError(
            f"network must be the module itself, but is {describe(network)}. Pass load(path, build())."
        )
    header, tensors = _contents(path, device)
    _check_network(header["tree"], network, tensors)
    made: Mapping[str, Callable[..., Any]] = _CLASSES
    made = {**_CLASSES, **FORMAT_1} if header["format"] == "1" else made
    found = _Reader(tensors, network, output, made).decode(json.loads(header["tree"]))
    posterior = _posterior_in(found)
    if posterior is not None:
        _check_value(posterior, tensors.get(VALUE))
    return found


def note_of(path: str | os.PathLike) -> str:
    """Return the note that was written beside a value, or nothing if there is none.

    The whole file is read, since its checksum is over the note as well.

    Args:
        path: The file.

    Raises:
        FileFormatError: If there is no such file, or if it is corrupted or not one of net2gp.
    """
    header, _ = _contents(Path(path).expanduser(), "cpu")
    return str(header.get("note", ""))


def _contents(path: Path, device: torch.device | str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The header and the tensors of a file, if they are as they were written."""
    if not path.is_file():
        raise FileFormatError(f"there is no file {path}. Pass the path that was given to save.")
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            header = file.metadata() or {}
            names = list(file.keys())
            # Tensors in the file are not aligned in memory, but clones are, so that products with them round
            # as they did before saving.
            tensors = {name: file.get_tensor(name).clone() for name in names}
    except (SafetensorError, OSError, ValueError) as error:
        raise _not_whole(path, error) from None
    if header.get("kind") != KIND:
        raise FileFormatError(f"{path} is a safetensors file, but not of a {KIND}.")
    if header.get("format") not in ("1", str(FORMAT)):
        raise FileFormatError(
            f"{path} has format {header.get('format')} (net2gp {header.get('version')}), but this is net2gp "
            f"{__version__}, which reads formats 1 and {FORMAT}. Save it again with this version."
        )
    text = header.get("version", "") + header.get("tree", "") + header.get("note", "")
    if header.get("sha256") != digest(tensors, text):
        raise FileFormatError(f"{path} is corrupted: its checksum does not match. Save it again.")
    return header, tensors


def _not_whole(path: Path, error: Exception) -> FileFormatError:
    return FileFormatError(
        f"{path} is not a whole safetensors file ({error}): it is truncated, corrupted or of another kind. "
        "Save the posterior again."
    )


def _posterior_in(value: Any) -> Posterior | None:
    """The value itself if it is a posterior, or the one that it is about."""
    found = value if isinstance(value, Posterior) else getattr(value, "posterior", None)
    return found if isinstance(found, Posterior) else None


def _check_value(posterior: Posterior, saved: Tensor | None) -> None:
    """Raise if the network computes something else than the saved one, for example by another activation."""
    try:
        value = check_value(posterior)
    except KeyError as error:  # a node of the saved limit that the network does not have
        raise InputError(
            f"the network is of another architecture than the saved one: it has no part {error}. Pass one "
            "of the same."
        ) from None
    if value is None or saved is None:
        return
    if value.shape != saved.shape or not torch.allclose(value, saved, rtol=1e-3, atol=1e-3):
        raise InputError(
            "the network has the saved one's parameters but computes something else: at the first training "
            f"points {value.reshape(-1)[:3].tolist()} in place of {saved.reshape(-1)[:3].tolist()}. Pass a "
            "network of the same architecture, activations and output= included."
        )


_DTYPES = {
    str(kind).removeprefix("torch."): kind
    for kind in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
}


@dataclass(frozen=True, eq=False)
class _Reader:
    """Turns the description in a file into values, with the tensors and the network that belong to it."""

    tensors: dict[str, Tensor]
    network: nn.Module | None
    output: Output | None
    made: Mapping[str, Callable[..., Any]]

    def decode(self, tree: Any) -> Any:
        """The value that a part of the description stands for."""
        if not isinstance(tree, dict):
            return tree
        if "tensor" in tree:
            return self.tensors[tree["tensor"]]
        if "columns" in tree:
            return self.tensors[tree["columns"]].mT
        if "dtype" in tree:
            return _DTYPES[tree["dtype"]]
        if "tuple" in tree:
            return tuple(self.decode(item) for item in tree["tuple"])
        if "dict" in tree:
            return {key: self.decode(item) for key, item in tree["dict"].items()}
        if "network" in tree:
            return self.network
        if "graph" in tree:
            return self._graph()
        if "output" in tree:
            picked = self._picked(tree["output"])
            if "places" not in tree:
                return picked
            axis, channels = tree["places"]
            return AtPlaces(axis, channels, picked)
        tag = tree.get("class", "")
        make = self.made.get(tag) or class_of(tag)
        if make is None:
            # rooms above register their classes when they are imported, which a new process may not have done
            for room in ("net2gp.deep", "net2gp.bayes", "net2gp.conformal"):
                import_module(room)
            make = class_of(tag)
        if make is None:
            raise FileFormatError(
                f"the file names {tree.get('class')!r}, which this version does not know. If the class is "
                "your own, import the module that registers it with @net2gp.likelihoods.savable before load."
            )
        value = make(**{name: self.decode(part) for name, part in tree["fields"].items()})
        if isinstance(value, Linearized):
            value.trust()
        return value

    def _graph(self) -> Any:
        if self.network is None:
            raise InputError(
                "this posterior holds the infinite-width limit of a network: pass one of the same "
                "architecture, load(path, network)."
            )
        return graph_of(self.network)

    def _picked(self, was_given: bool) -> Output | None:
        if was_given and self.output is None:
            raise InputError(
                "this posterior was made with linearize(output=...): pass the same output= to load."
            )
        return self.output if was_given else None


def _check_network(body: str, network: nn.Module | None, tensors: dict[str, Tensor]) -> None:
    """Raise unless a network is given if the posterior has one, with parameters of the saved shapes."""
    found = _find(json.loads(body), NAMES[Linearized])
    if found is None:
        return
    if network is None:
        kind = found["fields"]["network"]["network"]
        raise InputError(f"this posterior holds a network ({kind}): pass one, load(path, network).")
    saved = {
        name: tuple(tensors[part["tensor"]].shape)
        for group in ("params", "frozen")
        for name, part in found["fields"][group]["dict"].items()
    }
    given = {n: tuple(v.shape) for n, v in [*network.named_parameters(), *network.named_buffers()]}
    if saved != given:
        wrong = sorted(n for n in saved.keys() | given.keys() if saved.get(n) != given.get(n))
        name = wrong[0]
        raise InputError(
            f"the network is of another architecture than the saved one: '{name}' has shape "
            f"{given.get(name)} here and {saved.get(name)} in the file ({len(wrong)} differ)."
        )


def _find(tree: Any, name: str) -> Any:
    if isinstance(tree, list):
        return next((hit for part in tree if (hit := _find(part, name)) is not None), None)
    if not isinstance(tree, dict):
        return None
    if tree.get("class") == name:
        return tree
    return _find(list(tree.values()), name)
