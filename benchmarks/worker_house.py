"""One revision's side of `house.py`: what is found by importing it, as a JSON object on the last line."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

HEAVY = ("gpytorch", "matplotlib", "sklearn", "typer")
ROOMS = (
    *("structures", "solvers", "links", "tuning", "training", "explain", "tasks", "limits", "deep"),
    *("metrics", "plots", "data", "likelihoods", "linear", "kernels", "posteriors", "methods"),
)
POSTERIOR = ("marginal", "joint", "predict", "sample")
KERNEL = ("diag", "blocks", "matmul", "scaled", "__call__")
PLUMBING = ("check", "blocks", "matmul", "precise", "scaled", "to", "joint")


def imported() -> dict[str, Any]:
    """CPU seconds of the import beside torch, also with two names, and which heavy packages it loads."""
    import torch  # noqa: F401

    start = time.process_time()
    import net2gp

    seconds = time.process_time() - start
    loaded = [name for name in HEAVY if name in sys.modules]
    _ = net2gp.adapt, net2gp.Gaussian
    return {"cpu_s": seconds, "used_s": time.process_time() - start, "loaded": loaded}


def classes() -> dict[str, Any]:
    """Posterior and kernel classes, and docstrings without sections for parameters."""
    every = list(_concrete())
    kernels = [c for c in every if all(_has(c, name) for name in KERNEL)]
    functions, kinds = _public()
    return {
        "posterior classes": sum(all(_has(c, name) for name in POSTERIOR) for c in every),
        "kernel classes": len(kernels),
        "plumbing": sum(name in vars(c) for c in kernels for name in PLUMBING),
        "functions without Args": sum(_lacks(f, f) for f in functions),
        "classes without Args": sum(_lacks(c, c) for c in kinds),
    }


def _has(kind: type, name: str) -> bool:
    return callable(getattr(kind, name, None))


def _concrete() -> Iterator[type]:
    """Each class of the package but protocols and classes that others derive from."""
    import net2gp

    found: dict[str, type] = {}
    for info in pkgutil.walk_packages(net2gp.__path__, "net2gp."):
        if info.name.endswith("__main__"):
            continue
        try:
            module = importlib.import_module(info.name)
        except ImportError:  # GPU kernels, where their compiler is missing
            continue
        for value in vars(module).values():
            if inspect.isclass(value) and value.__module__ == info.name:
                found[f"{info.name}.{value.__qualname__}"] = value
    for kind in found.values():
        derived = any(kind in other.__mro__[1:] for other in found.values())
        if not getattr(kind, "_is_protocol", False) and not derived:
            yield kind


def _public() -> tuple[list[Any], list[type]]:
    """Functions and classes that users can name in the package and its rooms."""
    modules = [importlib.import_module("net2gp")]
    for room in ROOMS:
        try:
            modules.append(importlib.import_module(f"net2gp.{room}"))
        except ModuleNotFoundError:
            continue
    found: dict[int, Any] = {}
    for module in modules:
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            if getattr(value, "__module__", "").startswith("net2gp"):
                found[id(value)] = value
    functions = [v for v in found.values() if inspect.isfunction(v)]
    kinds = [
        v
        for v in found.values()
        if inspect.isclass(v)
        and not issubclass(v, BaseException)
        and not getattr(v, "_is_protocol", False)
    ]
    return functions, kinds


def _lacks(value: Any, signed: Any) -> bool:
    """Whether something with parameters has no section that explains them."""
    try:
        parameters = list(inspect.signature(signed).parameters.values())
    except ValueError:
        return False
    named = [p for p in parameters if p.name not in ("args", "kwargs") and p.name[0] != "_"]
    text = (value.__doc__ or "") + (getattr(value.__init__, "__doc__", "") or "")
    return bool(named) and "Args:" not in text


def passes() -> dict[str, Any]:
    """Calls of a network in a prediction of three new points, after two others."""
    import torch
    from torch import nn

    import net2gp as n2g

    warnings.simplefilter("ignore")
    found = {"adapt passes": 0, "laplace passes": 0}
    for name in ("adapt", "laplace"):
        for likelihood, outputs in ((n2g.Gaussian(), 1), (n2g.Categorical(), 3)):
            torch.manual_seed(0)
            network = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, outputs)).eval()
            calls: list[int] = []
            network.register_forward_hook(lambda *_, calls=calls: calls.append(1))
            x = torch.randn(30, 2)
            y = x[:, :1].sin() if outputs == 1 else (x[:, 0] > 0).long()
            posterior = getattr(n2g, name)(network, (x, y), likelihood)
            for _ in range(3):
                calls.clear()
                posterior.predict(torch.randn(3, 2))
            found[f"{name} passes"] = max(found[f"{name} passes"], len(calls))
    return found


if __name__ == "__main__":
    print(json.dumps({"import": imported, "classes": classes, "passes": passes}[sys.argv[1]]()))
