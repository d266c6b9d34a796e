"""One peer's method on one regression, in the peer's environment.

    python worker_bayes_peers.py METHOD arrays.npz result.npz
    python worker_bayes_peers.py import LIBRARY ""

`arrays.npz` has the data, the prior and noise, the numbers of steps and draws, and networks to start from.
The second form only says by its status whether a library can be imported.
`result.npz` gets draws of f at the test points (S, N) and the CPU seconds of the method, without predictions.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ClassVar
from unittest.mock import MagicMock

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

HIDDEN = 50
Arrays = dict[str, Tensor]
Predict = Callable[[], Tensor]
"""Gives draws of f at the test points; what it takes is not counted."""

UNUSED = (
    "torchvision",
    "timm",
    "lightning",
    "torchmetrics",
    "seaborn",
    "matplotlib",
    "jsonargparse",
)
UNUSED += ("torchopt", "huggingface_hub", "pandas", "PIL")
"""What peers import for images, plots, command lines, training loops and optimizers."""

BROKEN: set[str] = set()
"""Those of them that cannot be imported here."""


def network(num_inputs: int) -> nn.Sequential:
    """One hidden layer, tanh, one output; float64."""
    return nn.Sequential(nn.Linear(num_inputs, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1)).double()


def trained(module: nn.Module, loss: Callable[[], Tensor], steps: int, rate: float) -> None:
    """Adam on all data, whose rate falls to zero."""
    optimizer = torch.optim.Adam(module.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        schedule.step()


class Asked(type):
    """The type of a class that has whatever public name is asked for."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return Anything


class Anything(MagicMock, metaclass=Asked):
    """Stands for a class, a function or a module that is not used."""


class Stub(ModuleType):
    """A module that has whatever is asked for."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything


class Stubs(MetaPathFinder, Loader):
    """Finds modules of packages that no method here needs, after all that are installed."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        known = name.partition(".")[0] in BROKEN
        return ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing."""


def without_unused() -> None:
    """Let peers import packages that are not installed and that the methods here do not need."""
    for name in UNUSED:  # a package that is there and broken counts as one that is not
        try:
            __import__(name)
        except Exception:  # a build for another torch raises errors of many kinds
            for loaded in [known for known in sys.modules if known.partition(".")[0] == name]:
                del sys.modules[loaded]
            BROKEN.add(name)
    sys.meta_path.insert(0, Stubs())


def ensemble(a: Arrays, count: int) -> Predict:
    """deep_ensembles of TorchUncertainty, trained to the most probable parameters."""
    from torch_uncertainty.methods.deep_ensembles import deep_ensembles

    x, y = a["x"], a["y"]
    module = deep_ensembles(
        network(x.shape[1]), num_estimators=count, task="regression", probabilistic=False
    ).double()

    def loss() -> Tensor:
        found = module(x).reshape(count, *y.shape)
        error = (found - y).square().mean((1, 2)).sum() / (2 * a["noise_var"])
        decay = sum(p.square().sum() for p in module.parameters()) / (2 * a["prior_var"] * len(x))
        return error + decay

    trained(module, loss, int(a["steps"]), float(a["rate"]))
    return lambda: module(a["x_test"]).reshape(count, -1)


def mean_field(a: Arrays) -> Predict:
    """dnn_to_bnn of bayesian-torch from the most probable parameters on; its law is put into `a`.

    Its `get_kl_loss` averages over the weights of a layer where the bound has a sum, so that the divergence
    is computed here from its parameters.
    """
    from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn

    x, y = a["x"], a["y"]
    module = network(x.shape[1])
    start = {name: a[name][0] for name in module.state_dict()}
    prior = {"prior_mu": 0.0, "prior_sigma": float(a["prior_var"].sqrt()), "posterior_mu_init": 0.0}
    prior |= {"posterior_rho_init": -4.6, "type": "Reparameterization"}
    dnn_to_bnn(module, prior | {"moped_enable": False, "moped_delta": 0.5})
    module = module.double()
    for layer in (0, 2):
        module[layer].mu_weight.data.copy_(start[f"{layer}.weight"])
        module[layer].mu_bias.data.copy_(start[f"{layer}.bias"])
    named = dict(module.named_parameters())

    def loss() -> Tensor:
        divergence = torch.zeros((), dtype=x.dtype)
        for name, mu in named.items():
            if ".mu_" in name:
                sigma = F.softplus(named[name.replace("mu_", "rho_")])
                ratio = (sigma.square() + mu.square()) / a["prior_var"]
                divergence = (
                    divergence + 0.5 * (ratio - 1 - (sigma.square() / a["prior_var"]).log()).sum()
                )
        return (module(x) - y).square().mean() / (2 * a["noise_var"]) + divergence / len(x)

    trained(module, loss, int(a["steps"]), 0.01)
    for name, value in named.items():
        layer, _, kind = name.partition(".")
        what, _, part = kind.partition("_")
        found = value.detach() if what == "mu" else F.softplus(value.detach()).square()
        a[f"{'mean' if what == 'mu' else 'variance'} {layer}.{part}"] = found
    return lambda: torch.stack([module(a["x_test"])[:, 0] for _ in range(500)])


def sghmc(a: Arrays) -> Predict:
    """posteriors.sgmcmc.sghmc, chains one after the other from the same networks and with the same steps."""
    import posteriors

    x, y = a["x"], a["y"]
    module = network(x.shape[1])
    names = list(module.state_dict())
    constant = 0.5 * math.log(2 * math.pi) * len(x)

    def log_posterior(params: Arrays, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        found = functional_call(module, params, batch[0])
        fit = -(found - batch[1]).square().sum() / (2 * a["noise_var"]) - constant
        prior = -sum(p.square().sum() for p in params.values()) / (2 * a["prior_var"])
        return fit + prior, found

    step, kept = float(a["step_size"]), float(a["momentum"])
    friction = (1 - kept) / step
    chain = posteriors.sgmcmc.sghmc.build(log_posterior, lr=step, alpha=friction)
    draws = []
    for i in range(int(a["chains"])):
        state = chain.init({name: a[name][i].clone() for name in names})
        for number in range(int(a["warmup"]) + int(a["draws"]) * int(a["thin"])):
            state, _ = chain.update(state, (x, y), inplace=False)
            after = number + 1 - int(a["warmup"])
            if after > 0 and after % int(a["thin"]) == 0:
                draws.append({name: state.params[name] for name in names})
    return lambda: torch.stack([functional_call(module, p, a["x_test"])[:, 0] for p in draws])


MODULES = {
    "torch-uncertainty": "torch_uncertainty.methods.deep_ensembles",
    "bayesian-torch": "bayesian_torch.models.dnn_to_bnn",
    "posteriors": "posteriors.sgmcmc",
}
LIBRARIES = {
    "TorchUncertainty ensemble of 5": "torch-uncertainty",
    "TorchUncertainty ensemble of 10": "torch-uncertainty",
    "bayesian-torch mean field": "bayesian-torch",
    "posteriors SGHMC": "posteriors",
}
METHODS: dict[str, Callable[[Arrays], Predict]] = {
    "TorchUncertainty ensemble of 5": lambda a: ensemble(a, 5),
    "TorchUncertainty ensemble of 10": lambda a: ensemble(a, 10),
    "bayesian-torch mean field": mean_field,
    "posteriors SGHMC": sghmc,
}


def main() -> None:
    method, source, target = sys.argv[1:]
    torch.set_num_threads(1)
    without_unused()
    if method == "import":
        import_module(MODULES[source])
        return
    # What is imported here and at a first step of an optimizer is not counted.
    import_module(MODULES[LIBRARIES[method]])
    first = network(1)
    trained(first, lambda: first(torch.ones(1, 1).double()).sum(), 2, 0.01)
    torch.manual_seed(0)
    with np.load(source) as stored:
        arrays = {key: torch.from_numpy(np.asarray(stored[key])) for key in stored.files}
    start = time.process_time()
    predict = METHODS[method](arrays)
    seconds = time.process_time() - start
    with torch.no_grad():
        draws = predict()
    law = {key: value.numpy() for key, value in arrays.items() if " " in key}
    np.savez(target, draws=draws.detach().numpy(), cpu_s=seconds, **law)


if __name__ == "__main__":
    main()
