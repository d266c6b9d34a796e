"""MLflow: posteriors as models of the flavor `pyfunc`, without pickle.

A model is a folder with the posterior as safetensors, and the name of a function that builds the network.
MLflow loads it by this module's name, so that nothing is unpickled; the network's code is imported, not
stored, unless `code_paths` puts it into the folder.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import (
    Bernoulli,
    Categorical,
    Distribution,
    Independent,
    MultivariateNormal,
    Normal,
)

from net2gp._version import __version__
from net2gp.errors import FileFormatError, InputError, NotAvailable
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.saving.save import load
from net2gp.types import Inputs

try:
    import mlflow
    import mlflow.pyfunc
    import pandas as pd
    from mlflow.models import Model
except ImportError as error:
    raise ImportError(
        "models of MLflow need mlflow-skinny and pandas: pip install 'net2gp[mlflow,tables]'."
    ) from error

__all__ = ["PosteriorModel", "load_model", "log_model", "save_model"]

FLAVOR = "net2gp"
POSTERIOR, SETTINGS = "posterior.safetensors", "settings.json"


def save_model(
    posterior: Posterior,
    path: str | os.PathLike,
    *,
    network: str | None = None,
    quantiles: Sequence[float] = (0.05, 0.95),
    mlflow_model: Model | None = None,
    **options: Any,
) -> None:
    """Write a posterior as a folder that MLflow loads and serves.

    `mlflow.pyfunc.load_model(path).predict(table)` gives a table: for a regression the columns `mean`, `std`
    and one for each quantile (with the number of the output behind, if there are several), for classes their
    probabilities and the most probable one. The folder is read back once before it is kept.

    Args:
        posterior: The posterior.
        path: The folder, which must not exist yet.
        network: Where the network's architecture comes from: "package.module:factory", a function without
            arguments that returns the module. None for a posterior without a network.
        quantiles: Which quantiles of a regression are predicted.
        mlflow_model: MLflow's description of the model, as `log_model` passes it.
        **options: Those of `mlflow.pyfunc.save_model`, such as `code_paths`, `signature`, `metadata`.

    Raises:
        InputError: If the posterior cannot be saved, or the factory does not build its network.
    """
    levels = [float(level) for level in quantiles]
    if not all(0 < level < 1 for level in levels):
        raise InputError(f"quantiles must lie between 0 and 1, but are {levels}. Try (0.05, 0.95).")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / FLAVOR
        folder.mkdir()
        posterior.save(folder / POSTERIOR)
        settings = {"network": network, "quantiles": levels}
        (folder / SETTINGS).write_text(json.dumps(settings), encoding="utf-8")
        _read(folder)
        model = Model() if mlflow_model is None else mlflow_model
        model.add_flavor(FLAVOR, net2gp_version=__version__, network=network, data=f"data/{FLAVOR}")
        torch_version = torch.__version__.partition("+")[0]
        options.setdefault(
            "pip_requirements", [f"net2gp=={__version__}", f"torch=={torch_version}"]
        )
        mlflow.pyfunc.save_model(
            path=os.fspath(path),
            loader_module=__name__,
            data_path=str(folder),
            mlflow_model=model,
            **options,
        )


def log_model(
    posterior: Posterior, name: str, *, network: str | None = None, **options: Any
) -> Any:
    """Write a posterior into the current run of MLflow.

    Args:
        posterior: The posterior.
        name: The name of the model within the run.
        network: "package.module:factory", as for `save_model`.
        **options: Those of `save_model` and of `mlflow.models.Model.log`.

    Returns:
        What MLflow says of the model, with its `model_uri`.
    """
    flavor = importlib.import_module(__name__)
    return Model.log(name, flavor, posterior=posterior, network=network, **options)


def load_model(model_uri: str | os.PathLike) -> Posterior:
    """Read the posterior of a model that `save_model` or `log_model` wrote.

    Args:
        model_uri: A folder, or an address of MLflow such as "runs:/…/model" or "models:/name/1".

    Returns:
        The posterior itself.

    Raises:
        FileFormatError: If the model is of another flavor, or its file is damaged.
    """
    uri = os.fspath(model_uri)
    place = Path(mlflow.artifacts.download_artifacts(uri) if ":/" in uri else uri)
    flavors = Model.load(str(place)).flavors
    if FLAVOR not in flavors:
        raise FileFormatError(
            f"{uri} is no model of net2gp, but of {', '.join(flavors)}. Load it with "
            "mlflow.pyfunc.load_model."
        )
    code = flavors[mlflow.pyfunc.FLAVOR_NAME].get("code")
    if code is not None and str(place / code) not in sys.path:
        sys.path.insert(0, str(place / code))
    return _read(place / flavors[FLAVOR]["data"]).posterior


class PosteriorModel:
    """What `mlflow.pyfunc` calls: a table in, a table out.

    Args:
        posterior: The posterior.
        quantiles: Which quantiles of a regression are predicted.
    """

    def __init__(self, posterior: Posterior, quantiles: Sequence[float]) -> None:
        self.posterior = posterior
        self.quantiles = tuple(quantiles)

    def predict(self, model_input: Any, params: Mapping[str, Any] | None = None) -> pd.DataFrame:
        """Predict targets.

        Args:
            model_input: A table with a row for each point, an array, or a dict of arrays for a network with
                named inputs.
            params: Nothing yet; MLflow passes it.

        Returns:
            A table with a row for each point.
        """
        x = self._inputs(model_input)
        with torch.no_grad():
            law: Distribution = self.posterior.predict(x)
        return pd.DataFrame(_columns(law, self.quantiles))

    def _inputs(self, given: Any) -> Inputs:
        known = self.posterior.x
        if isinstance(given, Mapping):
            like = known if isinstance(known, Mapping) else {}
            return {name: self._tensor(value, like.get(name)) for name, value in given.items()}
        value = given.to_numpy() if isinstance(given, pd.DataFrame) else given
        return self._tensor(value, known if isinstance(known, Tensor) else None)

    def _tensor(self, value: Any, like: Tensor | None) -> Tensor:
        """In the dtype and the shape of the training inputs, if the posterior keeps them."""
        array = np.asarray(value)
        if array.dtype == object:
            raise InputError(
                "the columns must hold numbers, but some hold text or objects. Encode them as for training."
            )
        if like is None:
            return torch.from_numpy(np.ascontiguousarray(array)).to(self._dtype())
        found = torch.from_numpy(np.ascontiguousarray(array)).to(like)
        return found.reshape(len(found), *like.shape[1:]) if found.dim() == 2 else found

    def _dtype(self) -> torch.dtype:
        try:
            return self.posterior.linearized.example.dtype
        except NotAvailable:
            return torch.get_default_dtype()


def _columns(law: Distribution, quantiles: Sequence[float]) -> dict[str, np.ndarray]:
    """The table of a law."""
    if isinstance(law, Categorical):
        probs = law.probs.double()
        columns = {f"probability_{c}": probs[:, c] for c in range(probs.shape[1])}
        return _arrays(columns | {"label": probs.argmax(1)})
    mean = law.mean.double()
    mean = mean.reshape(len(mean), -1)
    if isinstance(law, Bernoulli):
        return _arrays(_numbered("probability", mean))
    variance = law.variance.double().reshape(mean.shape)
    columns = _numbered("mean", mean) | _numbered("std", variance.sqrt())
    base = law.base_dist if isinstance(law, Independent) else law
    if isinstance(base, MultivariateNormal | Normal):
        normal = Normal(mean, variance.sqrt().clamp(min=torch.finfo(mean.dtype).tiny))
        for level in quantiles:
            columns |= _numbered(f"quantile_{level:g}", normal.icdf(torch.tensor(level).to(mean)))
    return _arrays(columns)


def _numbered(name: str, values: Tensor) -> dict[str, Tensor]:
    if values.shape[1] == 1:
        return {name: values[:, 0]}
    return {f"{name}_{c}": values[:, c] for c in range(values.shape[1])}


def _arrays(columns: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: value.cpu().numpy() for name, value in columns.items()}


def _load_pyfunc(data_path: str) -> PosteriorModel:
    """What MLflow calls to load a model."""
    return _read(Path(data_path))


def _read(folder: Path) -> PosteriorModel:
    settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    posterior = load(folder / POSTERIOR, _built(settings["network"]))
    return PosteriorModel(posterior, settings["quantiles"])


def _built(name: str | None) -> nn.Module | None:
    """The network that a factory builds."""
    if name is None:
        return None
    module, _, factory = name.partition(":")
    if not module or not factory:
        raise InputError(
            f"network must name a module and a function, but is {name!r}. Pass 'package.module:factory'."
        )
    try:
        found = getattr(importlib.import_module(module), factory)
    except (ImportError, AttributeError) as error:
        raise InputError(
            f"the network {name!r} cannot be built ({error}). Put the module where Python finds it, or pass "
            "code_paths=[its file] to save_model."
        ) from error
    network = found()
    if not isinstance(network, nn.Module):
        raise InputError(
            f"{name!r} returned {type(network).__name__}. Name a function without arguments that returns the "
            "nn.Module."
        )
    return network.eval()
