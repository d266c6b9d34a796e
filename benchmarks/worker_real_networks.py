"""Type what `real_network_snippets.py` has for one network, and say what came, a line of JSON an attempt.

Called by `real_networks.py` as `worker_real_networks.py NAME FOLDER` with the interpreter of the networks'
environment. Each attempt runs in a process of its own, which is stopped after its time.

What comes is compared, where it can be, with the Jacobian by one plain backward pass for each output:
kernels with JJᵀ, the posteriors of Laplace and of `adapt` for a Gaussian likelihood with the dense formula at
the hyper-parameters that were tuned, `Kron` with its bounds (more than nothing, at most the prior).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import math
import multiprocessing
import os
import re
import resource
import signal
import sys
import time
import types
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import net2gp as n2g
from real_network_snippets import ATTEMPTS, LIMIT, NETWORKS, Network

WAIT = 1800
"""Seconds on the clock that are waited for an attempt, on a machine with much else to do."""

MAX_ROWS = 200
"""Rows N·C up to which posteriors are compared; of larger kernels some rows are."""


class StandIn(types.ModuleType):
    """A module in which every name is an empty class."""

    __path__ = ()

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        numbers = {word: number for number, word in enumerate(INTERPOLATIONS)}
        return type(name, (), numbers | {"__init__": lambda self, *a, **k: None})


INTERPOLATIONS = ("NEAREST", "LANCZOS", "BILINEAR", "BICUBIC", "BOX", "HAMMING")


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what is absent."""

    def __init__(self, absent: tuple[str, ...]) -> None:
        self.absent = absent

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] in self.absent:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> StandIn:
        return StandIn(spec.name)

    def exec_module(self, module: Any) -> None:
        """Nothing to run."""


def namespace(network: Network) -> dict[str, Any]:
    """What the first snippet leaves behind."""
    torch.manual_seed(0)
    found: dict[str, Any] = {"torch": torch, "nn": nn, "n2g": n2g, "math": math, "Path": Path}
    exec(network.setup, found)
    return found


def jacobian(linearized: Any, x: Any, rows: Tensor | None = None) -> Tensor:
    """By one backward pass for each row of the outputs: (rows, P) in float64."""
    network = linearized.network
    chosen = [dict(network.named_parameters())[name] for name in linearized.params]
    for parameter in chosen:
        parameter.requires_grad_(True)
    f = output_of(linearized, x).flatten()
    found = []
    for row in range(len(f)) if rows is None else rows.tolist():
        parts = torch.autograd.grad(f[row], chosen, retain_graph=True, allow_unused=True)
        pairs = zip(parts, chosen, strict=True)
        filled = [torch.zeros_like(p) if part is None else part for part, p in pairs]
        found.append(torch.cat([part.flatten().double() for part in filled]))
    return torch.stack(found)


def weighted_jacobian(linearized: Any, x: Any, prior_var: Any) -> Tensor:
    """J diag(√prior_var)."""
    prior = linearized.kernel(prior_var).prior_var
    pairs = [(prior[name].double(), p) for name, p in linearized.params.items()]
    return jacobian(linearized, x) * torch.cat([v.expand_as(p).flatten() for v, p in pairs]).sqrt()


def output_of(linearized: Any, x: Any) -> Tensor:
    """The network itself, called as a user would."""
    network = linearized.network
    if isinstance(x, tuple):
        out = network(*x)
    else:
        out = network(x) if isinstance(x, Tensor) else network(**x)
    return out if linearized.output is None else linearized.output(out)


def distance(found: Tensor, expected: Tensor) -> float:
    """The largest difference, of the largest number."""
    return float((found.double() - expected).abs().max() / expected.abs().max())


def kernel_error(names: dict[str, Any]) -> float:
    """Of the kernel matrix, or of some of its rows."""
    size = len(names["found"])
    generator = torch.Generator().manual_seed(0)
    rows = torch.randperm(size, generator=generator)[: min(size, 40)].sort().values
    J = jacobian(names["linearized"], names["x"], rows)
    return distance(names["found"][rows][:, rows], J @ J.T)


def curvature(names: dict[str, Any], likelihood: Any) -> Tensor:
    """Λ of all points, (N·C, N·C), written out for each likelihood."""
    f = output_of(names["linearized"], names["x"]).detach().double()
    if isinstance(likelihood, n2g.Gaussian):
        return torch.eye(f.numel()).double() / float(likelihood.noise_var)
    if isinstance(likelihood, n2g.Bernoulli):
        p = f.sigmoid().flatten()
        return torch.diag(p * (1 - p))
    p = f.softmax(-1)
    blocks = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    return torch.block_diag(*blocks)


def posterior_error(names: dict[str, Any], kind: str) -> float | None:
    """Of the variances at new points; None without a comparison, NaN where only bounds can be checked."""
    posterior, linearized = names["posterior"], names["posterior"].linearized
    outputs = output_of(linearized, names["x"])
    if outputs.numel() > MAX_ROWS:
        return None
    J, new = (weighted_jacobian(linearized, names[x], posterior.prior_var) for x in ("x", "x_new"))
    curve = curvature(names, posterior.likelihood)
    found = posterior.marginal(names["x_new"]).variance.flatten()
    if kind == "Kron":
        largest = new.square().sum(1)
        inside = bool((found > 0).all() and (found.double() <= 1.01 * largest).all())
        return math.nan if inside else math.inf
    if kind == "Diagonal":
        precision = 1 + torch.einsum("ap,ab,bp->p", J, curve, J)
        expected = (new.square() / precision).sum(1)
    else:
        root = torch.linalg.cholesky(curve + 1e-12 * torch.eye(len(curve)).double())
        middle = torch.eye(len(curve)).double() + root.T @ (J @ J.T) @ root
        right = torch.linalg.solve(middle, root.T @ J @ new.T)
        expected = new.square().sum(1) - ((new @ J.T @ root).T * right).sum(0)
    return distance(found, expected)


def adapted_error(names: dict[str, Any]) -> float | None:
    """Of means and variances of adaptation, for a Gaussian likelihood; NaN for classes within bounds."""
    posterior, linearized = names["posterior"], names["linearized"]
    if not isinstance(posterior.likelihood, n2g.Gaussian):
        probs = names["prediction"].probs.double()
        total = probs.sum(-1) if probs.shape[-1] > 1 else torch.ones(1).double()
        inside = bool(((probs >= 0) & (probs <= 1)).all() and ((total - 1).abs() < 1e-6).all())
        return math.nan if inside else math.inf
    J, new = (weighted_jacobian(linearized, names[x], posterior.prior_var) for x in ("x", "x_new"))
    before, mean = (output_of(linearized, names[x]).detach().double() for x in ("x", "x_new"))
    K = J @ J.T + float(posterior.likelihood.noise_var) * torch.eye(len(J)).double()
    residual = (names["y_task"].double() - before).flatten()
    found = posterior.marginal(names["x_new"])
    # where the points prefer no change of the network, `adapt` keeps its outputs
    kept = distance(found.mean.flatten(), mean.flatten()) < 1e-6
    mean = mean.flatten() + (0.0 if kept else new @ J.T @ torch.linalg.solve(K, residual))
    variance = new.square().sum(1) - ((new @ J.T).T * torch.linalg.solve(K, J @ new.T)).sum(0)
    return max(distance(found.mean.flatten(), mean), distance(found.variance.flatten(), variance))


def error_of(attempt: str, names: dict[str, Any]) -> float | None:
    """How far what came is from what is right; None where that is not known."""
    if attempt.startswith("kernel"):
        return kernel_error(names)
    if attempt == "adapt":
        return adapted_error(names)
    if attempt == "save, load":
        first, second = (names[name].predict(names["x_new"]) for name in ("posterior", "again"))
        parts = [(p.probs if hasattr(p, "probs") else p.mean) for p in (first, second)]
        return 0.0 if torch.equal(*parts) else math.inf
    if attempt in ATTEMPTS or attempt.startswith("Diagonal"):
        return posterior_error(names, type(names["posterior"].structure).__name__)
    return None


def tolerance(network: Network, attempt: str) -> float:
    """Of a relative error."""
    if network.precise:
        return 1e-8 if attempt.startswith("kernel") else 1e-4
    return 1e-4 if attempt.startswith("kernel") else 5e-2


def tried(network: Network, attempt: str, code: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run one snippet; the verdict, in words and numbers."""
    started = time.process_time()
    try:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            exec(code, names)
    except n2g.errors.Net2GPError as refusal:
        kind, message = "refused", str(refusal)
    except Exception as raw:
        kind, message = "raw", f"{type(raw).__name__}: {raw}"
    else:
        seconds = time.process_time() - started
        names["heard"] = [w.category for w in heard]
        kinds = {w.category for w in heard if issubclass(w.category, n2g.errors.Net2GPWarning)}
        return {
            "seconds": seconds,
            "warnings": sorted(kind.__name__ for kind in kinds),
            **judged(network, attempt, names),
        }
    message = re.sub(r"\s+", " ", message)
    return {"verdict": kind, "message": message, "seconds": time.process_time() - started}


def judged(network: Network, attempt: str, names: dict[str, Any]) -> dict[str, Any]:
    """Whether an answer is right, and how far it is from what it is compared with."""
    message = ""
    if attempt == "laplace":
        message = type(names["posterior"].structure).__name__
    try:
        error = error_of(attempt, names)
    except Exception as raw:
        message = f"in the comparison, {type(raw).__name__}: {raw}"
        return {"verdict": "raw", "message": message}
    if error is None:
        return {"verdict": "not compared", "message": message}
    if math.isnan(error):
        return {"verdict": "within bounds", "message": message}
    right = error <= tolerance(network, attempt)
    return {"verdict": "right" if right else "wrong", "error": error, "message": message}


def child(pipe: Any, network: Network, attempt: str, code: str, names: dict[str, Any]) -> None:
    """One attempt in a process of its own."""
    used = math.ceil(time.process_time())
    resource.setrlimit(resource.RLIMIT_CPU, (used + LIMIT, used + 2 * LIMIT))
    pipe.send(tried(network, attempt, code, names))
    pipe.close()


def within_limit(
    network: Network, attempt: str, code: str, names: dict[str, Any]
) -> dict[str, Any]:
    """The outcome of an attempt, or that none came in time: that of a core, which others may share."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(theirs, network, attempt, code, names))
    process.start()
    theirs.close()
    try:
        found = ours.recv() if ours.poll(WAIT) else {"verdict": "no answer"}
    except EOFError:
        process.join()
        found = {"verdict": "raw", "message": f"the process ended with {process.exitcode}"}
        if process.exitcode == -signal.SIGXCPU:
            found = {"verdict": "no answer"}
    process.kill()
    process.join()
    return found


def main() -> None:
    torch.set_num_threads(1)
    network = next(one for one in NETWORKS if one.name == sys.argv[1])
    sys.meta_path.append(StandIns(network.absent))
    os.chdir(sys.argv[2])
    names = namespace(network)
    size = sum(p.numel() for p in names["linearized"].params.values())
    print("RESULT " + json.dumps({"attempt": "network", "num_params": size}), flush=True)
    for attempt, code in (ATTEMPTS | network.extra).items():
        found = within_limit(network, attempt, code, names)
        print("RESULT " + json.dumps({"attempt": attempt} | found), flush=True)


if __name__ == "__main__":
    main()
