"""net2gp: hand over the PyTorch network you already have and get the Gaussian process it is.

The most common functions are here. The rest is one level down, in `likelihoods`, `structures`, `solvers`,
`links`, `tuning`, `training`, `explain`, `tasks`, `limits`, `deep`, `bayes`, `conformal`, `metrics`, `plots`,
`data` and `errors`; `interop` has doors from other libraries, `distributed` what several processes share,
`serving` programs for servers, `report` and `explorer` pages.
Modules are loaded when they are first used, so `import net2gp` takes little time beyond torch.
"""

import contextlib
import importlib
from typing import TYPE_CHECKING, Any

from net2gp._version import __version__ as __version__

if TYPE_CHECKING:
    from net2gp import (
        bayes,
        data,
        deep,
        errors,
        explain,
        likelihoods,
        limits,
        links,
        metrics,
        solvers,
        structures,
        training,
        tuning,
    )
    from net2gp.citations import cite
    from net2gp.kernels import RBF
    from net2gp.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian
    from net2gp.limits import infinite_width, nngp, ntk
    from net2gp.linear import Linearized, linearize
    from net2gp.methods import adapt, adapt_classes, adapt_tasks, gradient_flow, laplace
    from net2gp.posteriors.condition import condition
    from net2gp.posteriors.posterior import Posterior
    from net2gp.posteriors.saving.save import load, save
    from net2gp.posteriors.tune import tune
    from net2gp.posteriors.weights import Diagonal, Full, FunctionSpace, Kron, LastLayer
    from net2gp.serving import export

__all__ = [
    "RBF",
    "Bernoulli",
    "Categorical",
    "Diagonal",
    "Full",
    "FunctionSpace",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Kron",
    "LastLayer",
    "Linearized",
    "Posterior",
    "adapt",
    "adapt_classes",
    "adapt_tasks",
    "bayes",
    "cite",
    "condition",
    "data",
    "deep",
    "errors",
    "explain",
    "export",
    "gradient_flow",
    "infinite_width",
    "laplace",
    "likelihoods",
    "limits",
    "linearize",
    "links",
    "load",
    "metrics",
    "nngp",
    "ntk",
    "save",
    "solvers",
    "structures",
    "training",
    "tune",
    "tuning",
]

_HOMES = {
    "net2gp.citations": ("cite",),
    "net2gp.kernels": ("RBF",),
    "net2gp.likelihoods": ("Bernoulli", "Categorical", "Gaussian", "HeteroscedasticGaussian"),
    "net2gp.limits": ("infinite_width", "nngp", "ntk"),
    "net2gp.linear": ("Linearized", "linearize"),
    "net2gp.serving": ("export",),
    "net2gp.methods": ("adapt", "adapt_classes", "adapt_tasks", "gradient_flow", "laplace"),
    "net2gp.posteriors": (
        "Diagonal",
        "Full",
        "FunctionSpace",
        "Kron",
        "LastLayer",
        "Posterior",
        "condition",
        "load",
        "save",
        "tune",
    ),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}
_ROOMS = (
    "citations",
    "conformal",
    "distributed",
    "explorer",
    "interop",
    "kernels",
    "linalg",
    "linear",
    "memory",
    "methods",
    "plots",
    "posteriors",
    "report",
    "serving",
    "tasks",
    "types",
)


def __getattr__(name: str) -> Any:
    """Load the name on first use and keep it."""
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    elif name in _ROOMS or (name in __all__ and not name.startswith("_")):
        value = importlib.import_module(f"net2gp.{name}")
    else:
        raise AttributeError(f"net2gp has no {name!r}.{_moved(name)}")
    globals()[name] = value  # Python calls this function only for names that the module lacks
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def _moved(name: str) -> str:
    """Say in which namespace a name lives that was looked up at the top."""
    alike = f" Use net2gp.{name.lower()}." if name.lower() in __all__ else ""
    for room in (
        "structures",
        "solvers",
        "links",
        "tuning",
        "training",
        "explain",
        "tasks",
        "kernels",
        "limits",
        "metrics",
        "plots",
        "data",
        "likelihoods",
        "bayes",
        "conformal",
        "posteriors",
    ):
        with contextlib.suppress(ImportError):  # plots need matplotlib, which may not be there
            if name in importlib.import_module(f"net2gp.{room}").__all__:
                return f"{alike or ' Use'}{' Or use' if alike else ''} net2gp.{room}.{name}."
    return alike
