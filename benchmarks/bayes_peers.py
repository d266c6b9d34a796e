"""Counterparts of the Bayesian room in other libraries, each in the environment of its library."""

from __future__ import annotations

import math
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bayes_methods import Problem
from peers import PEERS, ensure
from run import HERE, environment

PEER_METHODS = {
    "TorchUncertainty ensemble of 5": "torch-uncertainty",
    "TorchUncertainty ensemble of 10": "torch-uncertainty",
    "bayesian-torch mean field": "bayesian-torch",
    "posteriors SGHMC": "posteriors",
}
"""Which environment each counterpart runs in."""

STARTS = {"bayesian-torch mean field": "optimum", "posteriors SGHMC": "ensemble"}
MOMENTUM = 0.9


class Failed(Exception):
    """A counterpart that gave no result, with the reason."""


def peer_draws(method: str, p: Problem, limit: float = 1800.0) -> tuple[Tensor, float]:
    """Draws of f at the test points (S, N), and CPU seconds with those of what the method starts from."""
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
        command = [str(ensure(PEERS[PEER_METHODS[method]])), str(HERE / "worker_bayes_peers.py")]
        done = subprocess.run(
            [*command, method, str(source), str(target)],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=limit,
        )
        if done.returncode:
            raise Failed((done.stderr.splitlines() or ["no message"])[-1])
        with np.load(target) as found:
            draws = torch.from_numpy(found["draws"])
            if not bool(draws.isfinite().all()):
                raise Failed("predictions are not finite")
            return draws, before + float(found["cpu_s"])


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
