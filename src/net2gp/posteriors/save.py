"""Posteriors as files: one safetensors file with a JSON description in its header, never pickle."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from net2gp import kernels, likelihoods
from net2gp._version import __version__
from net2gp.errors import FileFormatError, InputError, check_device
from net2gp.inputs import describe, ordinary_tensors, rows
from net2gp.limits.kernels import InfiniteWidth, LimitKernel
from net2gp.limits.plan import graph_of
from net2gp.limits.prior import Prior
from net2gp.linalg import Cholesky as CholeskyFactor
from net2gp.linalg.low_rank import LowRankPlusIdentity
from net2gp.linear.curvatures import curvature
from net2gp.linear.jacobians.tangent import TangentKernel
from net2gp.linear.jacobians.trace import TraceKernel
from net2gp.linear.linearized import Linearized, Output
from net2gp.linear.planning.plans import Plans
from net2gp.posteriors import (
    codes,
    conditioned,
    covariances,
    drawn,
    dual,
    function_space,
    kron,
    last_layer,
    pivoted,
    solvers,
    structures,
    systems,
)
from net2gp.posteriors.function_space import FunctionPosterior
from net2gp.posteriors.weight_gaussian import WeightGaussian, evaluating
from net2gp.posteriors.weight_space import WeightPosterior
from net2gp.tags import class_of, tag_of

Saved = FunctionPosterior | WeightPosterior | WeightGaussian | codes.ClassPosterior

FORMAT = 1
KIND = "net2gp posterior"
VALUE = "network value"

# Files name classes by these tags: a class may move or change its name, its tag may not.
_CLASSES: dict[str, type] = {
    "linearized.Linearized": Linearized,
    "tangent.TangentKernel": TangentKernel,
    "trace.TraceKernel": TraceKernel,
    "kernels.LimitKernel": LimitKernel,
    "kernels.InfiniteWidth": InfiniteWidth,
    "prior.Prior": Prior,
    "cholesky.Cholesky": CholeskyFactor,
    "low_rank.LowRankPlusIdentity": LowRankPlusIdentity,
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
    "curvature.GGN": curvature.ExactFisher,
    "curvature.EmpiricalFisher": curvature.EmpiricalFisher,
    "curvature.MonteCarloFisher": curvature.MonteCarloFisher,
    "structures.Full": structures.Full,
    "structures.Diagonal": structures.Diagonal,
    "structures.Kron": structures.Kron,
    "structures.LowRank": structures.LowRank,
    "structures.Sampled": structures.Sampled,
    "structures.LastLayer": structures.LastLayer,
    "structures.Subnetwork": structures.Subnetwork,
    "structures.FunctionSpace": structures.FunctionSpace,
    "covariances.DiagonalCovariance": covariances.DiagonalCovariance,
    "covariances.LowRankPlusDiagonal": covariances.LowRankPlusDiagonal,
    "covariances.Subtracted": covariances.Subtracted,
    "covariances.FullCovariance": covariances.FullCovariance,
    "covariances.SubsetCovariance": covariances.SubsetCovariance,
    "kron.KronRoot": kron.KronRoot,
    "kron.DenseRoot": kron.DenseRoot,
    "kron.DiagonalRoot": kron.DiagonalRoot,
    "kron.KronCovariance": kron.KronCovariance,
    "drawn.DrawnCovariance": drawn.DrawnCovariance,
    "covariances.ScaledCovariance": covariances.ScaledCovariance,
    "conditioned.Conditioned": conditioned.Conditioned,
    "pivoted.Pivoted": pivoted.Pivoted,
    "last_layer.LastLayerFull": last_layer.LastLayerFull,
    "last_layer.LastLayerDiagonal": last_layer.LastLayerDiagonal,
    "last_layer.LastLayerKron": last_layer.LastLayerKron,
    "dual.AroundZero": dual.AroundZero,
    "solvers.Exact": solvers.Exact,
    "solvers.Lanczos": solvers.Lanczos,
    "solvers.Cholesky": solvers.Cholesky,
    "solvers.WeightSpace": solvers.WeightCholesky,
    "solvers.PivotedCholesky": solvers.PivotedCholesky,
    "solvers.Nystrom": solvers.Nystrom,
    "solvers.CG": solvers.CG,
    "solvers.Laplace": solvers.Laplace,
    "solvers.Variational": solvers.Variational,
    "systems.Sites": systems.Sites,
    "systems.CurvatureFactor": systems.CurvatureFactor,
    "systems.GramProduct": systems.GramProduct,
    "systems.IterativeFactor": systems.IterativeFactor,
    "function_space.NoiseFactor": function_space.NoiseFactor,
    "function_space.SpectralFactor": function_space.SpectralFactor,
    "function_space.FunctionPosterior": FunctionPosterior,
    "weight_space.WeightPosterior": WeightPosterior,
    "weight_gaussian.WeightGaussian": WeightGaussian,
    "codes.Standardized": codes.Standardized,
    "codes.ClassPosterior": codes.ClassPosterior,
}
_NAMES = {cls: name for name, cls in _CLASSES.items()}


def save(posterior: Saved, path: str | os.PathLike) -> None:
    """Write a posterior to one file, which `load` reads back with identical predictions.

    The file holds every tensor (the network's parameters and buffers too) and describes the rest in
    JSON; only the network's code is not in it. The network may be in training mode: a posterior does not
    change with it. The file is written beside `path` first and then moved, so that an interrupted save
    leaves an older file whole.
    """
    if not isinstance(posterior, Saved):
        raise InputError(f"save takes a posterior of net2gp, but got {describe(posterior)}.")
    path = Path(path).expanduser()
    if not path.parent.is_dir():
        raise InputError(
            f"there is no folder {path.parent} to save in. Create it, or pass another path."
        )
    if path.is_dir():
        raise InputError(
            f"{path} is a folder. Pass a file in it: {path / 'posterior.safetensors'}."
        )
    tensors: dict[str, Tensor] = {}
    tree = _encode(posterior, tensors, {})
    value = _network_value(posterior)
    if value is not None:
        tensors[VALUE] = value.cpu().clone()
    body = json.dumps(tree)
    header = {
        "kind": KIND,
        "format": str(FORMAT),
        "version": __version__,
        "tree": body,
        "sha256": _digest(tensors, __version__ + body),
    }
    partial = path.with_name(path.name + ".partial")
    try:
        save_file(tensors, partial, metadata=header)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@ordinary_tensors()
def load(
    path: str | os.PathLike,
    network: nn.Module | Linearized | None = None,
    *,
    output: Output | None = None,
    device: torch.device | str = "cpu",
) -> Saved:
    """Read a posterior that `save` wrote. Nothing in the file is executed.

    `network` is a module of the architecture that was saved (its own weights do not matter), or its
    linearization, and `output` the function that was given to `linearize`, if any.
    """
    path = Path(path).expanduser()
    check_device(device)
    if isinstance(network, Linearized):
        output = output or network.output
        network = network.network
    if not isinstance(network, nn.Module | None):
        raise InputError(
            f"network must be the module itself, but is {describe(network)}. Pass load(path, build())."
        )
    if not path.is_file():
        raise FileFormatError(f"there is no file {path}. Pass the path that was given to save.")
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            header = file.metadata() or {}
            names = list(file.keys())
            # clones are aligned in memory, which the file's tensors are not: products round alike
            tensors = {name: file.get_tensor(name).clone() for name in names}
    except (SafetensorError, OSError, ValueError) as error:
        raise FileFormatError(
            f"{path} is not a whole safetensors file ({error}): it is truncated, corrupted or of another "
            "kind. Save the posterior again."
        ) from None
    if header.get("kind") != KIND:
        raise FileFormatError(f"{path} is a safetensors file, but not of a {KIND}.")
    if header.get("format") != str(FORMAT):
        raise FileFormatError(
            f"{path} has format {header.get('format')} (net2gp {header.get('version')}), but this is net2gp "
            f"{__version__}, which reads format {FORMAT}. Save it again with this version."
        )
    text = header.get("version", "") + header.get("tree", "")
    if header.get("sha256") != _digest(tensors, text):
        raise FileFormatError(f"{path} is corrupted: its checksum does not match. Save it again.")
    _check_network(header["tree"], network, tensors)
    posterior = _decode(json.loads(header["tree"]), tensors, network, output)
    if not isinstance(posterior, Saved):
        raise FileFormatError(f"{path} does not hold a posterior.")
    _check_value(posterior, tensors.get(VALUE))
    return posterior


def _network_value(posterior: Saved) -> Tensor | None:
    """What the network says of the first training point, or its limit of the first two.

    In eval mode, as it was linearized: training it further changes nothing of the posterior.
    """
    posterior = posterior.process if isinstance(posterior, codes.ClassPosterior) else posterior
    kernel: Any = None if isinstance(posterior, WeightGaussian) else posterior.kernel
    kernel = kernel.kernel if isinstance(kernel, codes.Standardized) else kernel
    kernel = kernel.kernel if isinstance(kernel, kernels.IndependentOutputs) else kernel
    kernel = kernel.tangent if isinstance(kernel, TraceKernel) else kernel
    if isinstance(kernel, LimitKernel):
        return kernel(rows(posterior.x, slice(0, 2))).detach()
    if isinstance(posterior, WeightGaussian):
        linearized = posterior.linearized
    elif isinstance(kernel, TangentKernel):
        linearized = kernel.linearized
    else:
        return None
    with evaluating(linearized.network):
        return linearized(rows(posterior.x, slice(0, 1)))


def _check_value(posterior: Saved, saved: Tensor | None) -> None:
    """A network with the same parameters may still compute something else: another activation, say."""
    try:
        value = _network_value(posterior)
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


def _encode(value: Any, tensors: dict[str, Tensor], seen: dict[int, str]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        # factors are stored by columns, and come back so: products round by how memory is laid out
        by_columns = value.dim() > 1 and not value.is_contiguous() and value.mT.is_contiguous()
        if id(value) not in seen:
            seen[id(value)] = f"t{len(tensors)}"
            laid_out = (value.mT if by_columns else value).detach().cpu()
            tensors[seen[id(value)]] = laid_out.clone(memory_format=torch.contiguous_format)
        return {"columns" if by_columns else "tensor": seen[id(value)]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, tuple):
        return {"tuple": [_encode(item, tensors, seen) for item in value]}
    if isinstance(value, dict):
        return {"dict": {key: _encode(item, tensors, seen) for key, item in value.items()}}
    tag = _NAMES.get(type(value)) or tag_of(type(value))
    if tag is not None and is_dataclass(value):
        names = [f.name for f in fields(value) if not isinstance(getattr(value, f.name), Plans)]
        parts = {name: _encode_field(value, name, tensors, seen) for name in names}
        return {"class": tag, "fields": parts}
    raise InputError(
        f"a {type(value).__name__} cannot be saved without running code at load. Saved are posteriors whose "
        "kernel, mean and likelihood are net2gp's own, or registered with @net2gp.likelihoods.savable; use "
        "mean=linearized or None."
    )


def _encode_field(owner: Any, name: str, tensors: dict[str, Tensor], seen: dict[int, str]) -> Any:
    value = getattr(owner, name)
    if isinstance(owner, Linearized) and name == "output":
        return {"output": value is not None}
    if isinstance(owner, Linearized) and name == "network":
        return {"network": type(value).__name__}
    if isinstance(owner, InfiniteWidth) and name == "graph":
        return {"graph": value.__class__.__name__}
    if isinstance(owner, InfiniteWidth) and name == "plans":
        return {"dict": {}}
    return _encode(value, tensors, seen)


def _decode(
    tree: Any, tensors: dict[str, Tensor], network: nn.Module | None, output: Output | None
) -> Any:
    if not isinstance(tree, dict):
        return tree
    again = lambda part: _decode(part, tensors, network, output)
    if "tensor" in tree:
        return tensors[tree["tensor"]]
    if "columns" in tree:
        return tensors[tree["columns"]].mT
    if "dtype" in tree:
        return {"float32": torch.float32, "float64": torch.float64}[tree["dtype"]]
    if "tuple" in tree:
        return tuple(again(item) for item in tree["tuple"])
    if "dict" in tree:
        return {key: again(item) for key, item in tree["dict"].items()}
    if "network" in tree:
        return network
    if "graph" in tree:
        if network is None:
            raise InputError(
                "this posterior holds the infinite-width limit of a network: pass one of the same "
                "architecture, load(path, network)."
            )
        return graph_of(network)
    if "output" in tree:
        if tree["output"] and output is None:
            raise InputError(
                "this posterior was made with linearize(output=...): pass the same output= to load."
            )
        return output if tree["output"] else None
    cls = _CLASSES.get(tree.get("class", "")) or class_of(tree.get("class", ""))
    if cls is None:
        raise FileFormatError(
            f"the file names {tree.get('class')!r}, which this version does not know. If the class is your "
            "own, import the module that registers it with @net2gp.likelihoods.savable before load."
        )
    value = cls(**{name: again(part) for name, part in tree["fields"].items()})
    if isinstance(value, Linearized):
        value.trust()
    return value


def _check_network(body: str, network: nn.Module | None, tensors: dict[str, Tensor]) -> None:
    """The module must be there if the posterior has one, and have the parameters of the file."""
    found = _find(json.loads(body), _NAMES[Linearized])
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


def _digest(tensors: dict[str, Tensor], text: str) -> str:
    """SHA-256 over the tensors' names, types, shapes and bytes, and over the text of the header."""
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data if value.numel() else b"")
    return digest.hexdigest()
