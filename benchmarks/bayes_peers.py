"""Counterparts of the Bayesian room in other libraries, each in the environment of its library.

Where nothing can be installed, `NET2GP_PEERS` names a folder with the packages of all of them, made by

    pip install --target FOLDER --no-deps --only-binary=:all: [--python-version 3.12] torch-uncertainty \
        einops bayesian-torch posteriors tensordict optree pyvers cloudpickle

and they run with the interpreter of this process. What they import and do not use is replaced by stand-ins
(`worker_bayes_peers.py`).
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bayes_methods import Problem, bound
from net2gp.bayes import GaussianWeights
from peers import PEERS, NotInstalled, ensure
from run import HERE, environment
from worker_bayes_peers import LIBRARIES

PEER_METHODS = LIBRARIES
"""Which environment each counterpart runs in."""

STARTS = {"bayesian-torch mean field": "optimum", "posteriors SGHMC": "ensemble"}
MOMENTUM = 0.9


class Failed(Exception):
    """A counterpart that gave no result, with the reason."""


def peer_draws(
    method: str, p: Problem, limit: float = 1800.0
) -> tuple[Tensor, float, dict[str, float]]:
    """Draws of f at the test points (S, N), CPU seconds with the training of its start, and more figures."""
    before, start = 0.0, {}
    if method in STARTS:
        posterior, before = p.optimum if STARTS[method] == "optimum" else p.five
        start = {name: value.numpy() for name, value in posterior.process.members.values.items()}
    arrays = {"x": p.data[0], "y": p.data[1], "x_test": p.x}
    numbers = {"prior_var": p.prior_var, "noise_var": p.noise_var, "momentum": MOMENTUM}
    numbers |= {key: getattr(p.sizes, key) for key in ("steps", "rate", "chains", "draws")}
    numbers |= {"thin": p.sizes.thin, "warmup": p.sizes.warmup, "step_size": step_size(p)}
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "arrays.npz", Path(folder) / "result.npz"
        np.savez(source, **{k: v.numpy() for k, v in arrays.items()}, **numbers, **start)
        worker(PEER_METHODS[method], method, str(source), str(target), limit=limit)
        with np.load(target) as found:
            draws = torch.from_numpy(found["draws"])
            if not bool(draws.isfinite().all()):
                raise Failed("predictions are not finite")
            law = {key: torch.from_numpy(found[key]) for key in found.files if " " in key}
            return draws, before + float(found["cpu_s"]), bound_of(p, law)


def bound_of(p: Problem, law: dict[str, Tensor]) -> dict[str, float]:
    """The variational bound per point of a mean-field law, if there is one."""
    if not law:
        return {}
    parts = [
        {key.removeprefix(f"{what} "): value for key, value in law.items() if key.startswith(what)}
        for what in ("mean", "variance")
    ]
    return {"bound": bound(p, GaussianWeights(*parts))}


def worker(library: str, *arguments: str, limit: float) -> None:
    """Run `worker_bayes_peers.py` with one thread in the environment of a library."""
    env, folder = environment() | {"OMP_NUM_THREADS": "1"}, os.environ.get("NET2GP_PEERS")
    if folder:
        env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], folder])
    python = sys.executable if folder else str(ensure(PEERS[library]))
    command = [python, str(HERE / "worker_bayes_peers.py"), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=limit)
    if done.returncode:
        raise Failed((done.stderr.splitlines() or ["no message"])[-1])


def missing(library: str) -> str:
    """Why a library cannot run here, or nothing."""
    try:
        worker(library, "import", library, "", limit=600)
    except (NotInstalled, Failed, subprocess.TimeoutExpired) as reason:
        return f"{library}: {reason}"
    return ""


def step_size(p: Problem) -> float:
    """0.3/√λ for the largest curvature λ of the log joint at the network, as `bayes.sghmc` has it."""
    module, (x, _) = p.trained, p.data
    params = dict(module.named_parameters())
    flat = torch.cat([value.detach().reshape(-1) for value in params.values()])
    vector = torch.randn(flat.shape, generator=torch.Generator().manual_seed(0)).to(flat)
    size = 1.0
    for _ in range(30):
        vector = vector / vector.norm()
        parts = vector.split([value.numel() for value in params.values()])
        tangent = {n: v.view_as(params[n]) for n, v in zip(params, parts, strict=True)}
        run = lambda values: torch.func.functional_call(module, values, x)
        fixed = {name: value.detach() for name, value in params.items()}
        _, moved = torch.func.jvp(run, (fixed,), (tangent,))
        _, pull = torch.func.vjp(run, fixed)
        back = torch.cat([value.reshape(-1) for value in pull(moved)[0].values()])
        vector = back / p.noise_var + vector / p.prior_var
        size = float(vector.norm())
    return 0.3 / math.sqrt(size)
