"""Doors from other libraries: scikit-learn, BoTorch, GPyTorch and more, each in a module of its own."""

import importlib
from typing import Any

_MODULES = (
    *("botorch", "exported", "gpytorch", "kernels", "lightning", "mlflow", "shards", "sklearn"),
    "torchmetrics",
)


def __getattr__(name: str) -> Any:
    """Load a door when it is first used, since each needs another library."""
    if name in _MODULES:
        return importlib.import_module(f"net2gp.interop.{name}")
    raise AttributeError(f"net2gp.interop has no {name!r}. It has {', '.join(_MODULES)}.")
