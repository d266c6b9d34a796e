"""laplace-torch: fit, tuning of the prior precision and class probabilities of one structure.

Called by `laplace_torch.py` as `worker_laplace_torch.py JOB ARRAYS RESULT REPEATS PATIENCE`, where JOB is
JSON. `fit` gets all points in one batch, which is its fastest and for Kron its exact way, except where
Jacobians of all points do not fit into memory: then in the largest batches that do. The prior is tuned by
the marginal likelihood (`optimize_prior_precision(method="marglik")`, its default), but not for functional
posteriors, for which it advises against.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from laplace.curvature import BackPackGGN, CurvlinopsGGN
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from laplace import Laplace
from laplace_problems import PROBLEMS
from measure import Job, measure, resident
from networks import network
from problems import Problem, read

BACK_ENDS = {"default": CurvlinopsGGN, "BackPACK": BackPackGGN}
KINDS = {
    "last_full": ("last_layer", "full"),
    "last_kron": ("last_layer", "kron"),
    "kron": ("all", "kron"),
    "diagonal": ("all", "diag"),
    "functional": ("all", "gp"),
}
MAX_JACOBIAN_BYTES = 4e8
"""Largest Jacobian of a batch in `fit`, where it makes one."""

AGREEMENT_POINTS = 10
"""Test points of which the variances of the logits are stored, at a prior variance of one."""


def batch_size(job: dict[str, Any], problem: Problem) -> int:
    """All points where no Jacobian is made; else as many as fit."""
    default = job["back_end"] == "default"
    makes = job["kind"] == "functional" or (job["kind"] == "diagonal" and default)
    if job["kind"] == "last_full" and default:
        return 128
    if not makes:
        return problem.num_points if problem.num_outputs < 100 else 200
    fitting = int(MAX_JACOBIAN_BYTES / (4 * problem.num_outputs * problem.num_params))
    return min(problem.num_points, fitting)


class Worker:
    """The stages of one job."""

    def __init__(self, job: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        self.job, self.problem = job, PROBLEMS[job["problem"]]
        self.module = network(self.problem, arrays)
        self.x, self.y = torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"])
        self.inputs = {k: torch.from_numpy(arrays[k]) for k in ("test", "rotated", "noise")}
        self.functional = job["kind"] == "functional"

    def fit(self, num_points: int | None = None) -> Any:
        """A posterior with prior precision one."""
        x, y = self.x[:num_points], self.y[:num_points]
        weights, structure = KINDS[self.job["kind"]]
        options = (
            {"n_subset": min(self.job["num_points"] or len(x), len(x))} if self.functional else {}
        )
        posterior = Laplace(
            self.module,
            "classification",
            subset_of_weights=weights,
            hessian_structure=structure,
            backend=BACK_ENDS[self.job["back_end"]],
            **options,
        )
        size = min(batch_size(self.job, self.problem), len(x))
        posterior.fit(DataLoader(TensorDataset(x, y), batch_size=size))
        return posterior

    def predict(self, posterior: Any, x: Tensor) -> Tensor:
        """Class probabilities by the probit link, of all points at once or one at a time."""
        kind = "gp" if self.functional else "glm"
        size = 1 if self.job["peer_test"] else len(x)
        parts = [posterior(part, pred_type=kind, link_approx="probit") for part in x.split(size)]
        return torch.cat(parts)

    def variances(self, posterior: Any) -> np.ndarray:
        """The variances of the logits of the first test points."""
        count = 1 if self.job["peer_test"] else AGREEMENT_POINTS
        _, covariance = posterior._glm_predictive_distribution(self.inputs["test"][:count])
        return covariance.diagonal(dim1=1, dim2=2).flatten()[:100].numpy()


def stage(
    run: Callable[[], Any], warm_up: Callable[[], Any], options: tuple[float, int, float]
) -> tuple[dict[str, Any], Any]:
    """Figures and result of one stage."""
    return measure(Job(run, warm_up, np.asarray, version=""), *options)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(2)
    text, arrays, stored, repeats, patience = sys.argv[1:]
    job = json.loads(text)
    worker = Worker(job, read(arrays))
    options = (resident(), int(repeats), float(patience))
    stages, results = {}, {}
    stages["fit"], posterior = stage(worker.fit, lambda: worker.fit(16), options)
    if job["first"]:
        results["variances"] = worker.variances(posterior)
    if job["tuned"]:
        tune = posterior.optimize_prior_precision
        stages["tune"], _ = stage(lambda: tune(method="marglik"), lambda: None, options)
    x = worker.inputs["test"][: job["peer_test"]]
    stages["predict"], probs = stage(lambda: worker.predict(posterior, x), lambda: None, options)
    results["test"] = probs.numpy()
    if job["problem"] == "digits" and not probs.isnan().any():
        for name in ("rotated", "noise"):
            results[name] = worker.predict(posterior, worker.inputs[name]).numpy()
    np.savez(stored, **results)
    note = f"{BACK_ENDS[job['back_end']].__name__}, batches of {batch_size(job, worker.problem)}"
    found = {
        "stages": stages,
        "prior_var": float(1 / posterior.prior_precision),
        "version": f"laplace-torch {version('laplace-torch')}, torch {torch.__version__}",
        "note": note,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
