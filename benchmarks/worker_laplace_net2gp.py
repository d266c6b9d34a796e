"""net2gp: fit at a fixed and at the tuned prior, and class probabilities of one structure.

Called by `laplace_torch.py` as `worker_laplace_net2gp.py JOB ARRAYS RESULT REPEATS PATIENCE`, where JOB is
JSON. Everything is timed from the module on.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import net2gp as n2g
from laplace_problems import PROBLEMS
from measure import Job, measure, resident
from networks import network
from problems import read

AGREEMENT_POINTS = 10
"""Test points of which the variances of the logits are stored, at a prior variance of one."""


def structure(job: dict[str, Any]) -> Any:
    """The value that steers `n2g.laplace`."""
    return {
        "last_full": n2g.LastLayer(n2g.Full()),
        "last_kron": n2g.LastLayer(n2g.Kron()),
        "kron": n2g.Kron(),
        "diagonal": n2g.Diagonal(),
        "functional": n2g.structures.FunctionSpace(job["num_points"]),
    }[job["kind"]]


def stage(
    run: Callable[[], Any], warm_up: Callable[[], Any], options: tuple[float, int, float]
) -> tuple[dict[str, Any], Any]:
    """Figures and result of one stage."""
    return measure(Job(run, warm_up, np.asarray, version=""), *options)


def prior_variance(posterior: Any) -> float:
    """The one prior variance of all parameters."""
    if hasattr(posterior, "covariance"):
        return float(torch.as_tensor(posterior.prior_var).mean())
    return float(next(iter(posterior.kernel.prior_var.values())).mean())


def main() -> None:
    torch.set_num_threads(2)
    text, arrays, stored, repeats, patience = sys.argv[1:]
    job, found = json.loads(text), read(arrays)
    module = network(PROBLEMS[job["problem"]], found)
    data = (torch.from_numpy(found["x"]), torch.from_numpy(found["y"]))
    inputs = {name: torch.from_numpy(found[name]) for name in ("test", "rotated", "noise")}
    likelihood, kind = n2g.Categorical(link=n2g.links.Probit()), structure(job)
    options = (resident(), int(repeats), float(patience))

    def fit(prior_var: float | None) -> Any:
        return n2g.laplace(module, data, likelihood, prior_var=prior_var, structure=kind)

    def spread(one: Any, count: int) -> np.ndarray:
        covariance = one.marginal(inputs["test"][:count]).covariance_matrix
        return covariance.diagonal(dim1=1, dim2=2).flatten()[:100].numpy()

    stages, results, exact = {}, {}, []
    stages["fit"], posterior = stage(lambda: fit(1.0), lambda: fit(1.0), options)
    if job["first"]:
        count = 1 if job["problem"] == "classes" else AGREEMENT_POINTS
        results["variances"] = spread(posterior, count)
    stages["tuned"], posterior = stage(lambda: fit(None), lambda: None, options)

    def predict(name: str = "test") -> np.ndarray:
        return posterior.predict(inputs[name]).probs.numpy()

    stages["predict"], results["test"] = stage(predict, predict, options)
    names = ("test", "rotated", "noise") if job["problem"] == "digits" else ()
    for name in names:
        results[name] = predict(name)
    if names:
        default = n2g.laplace(module, data, n2g.Categorical(), structure=kind)
        for name in names:
            results[f"{name}_default"] = default.predict(inputs[name]).probs.numpy()
    if job["first"] and isinstance(kind, n2g.structures.FunctionSpace):
        # after all that is measured, as it takes much more memory
        whole = n2g.structures.FunctionSpace(kind.num_points, tol=0.0)
        reference = n2g.laplace(module, data, likelihood, prior_var=1.0, structure=whole)
        ratio = results["variances"] / spread(reference, AGREEMENT_POINTS)
        exact = [float(v) for v in np.quantile(ratio, [0.0, 0.5, 1.0])]
    np.savez(stored, **results)
    report = {
        "stages": stages,
        "prior_var": prior_variance(posterior),
        "version": f"net2gp {n2g.__version__}, torch {torch.__version__}",
        "note": "default settings",
        "exact": exact,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
