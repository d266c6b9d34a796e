"""laplace-torch on the networks of `regression.py`, one request a line: [STRUCTURE, ARRAYS, RESULT] as JSON.

Answers each with a line, empty or what went wrong; it stays, as its imports take longer than its work.
`fit` gets all rows in one batch, for Kron its exact way. Prior precision and noise are tuned as in its
regression example, by Adam on their logarithms with `log_marginal_likelihood`. Its Kron has no factors for
BatchNorm, whose parameters stay fixed then. A determinant of its whole precision takes most of a minute on
one core, so that its logarithm comes from the eigenvalues of its Hessian while it is tuned.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from laplace import Laplace
from problems import read
from regression_module import network

STRUCTURES = {
    "Kron": ("all", "kron"),
    "full": ("all", "full"),
    "last layer": ("last_layer", "full"),
}
STEPS, LOOK, SETTLED = 500, 20, 1e-3
"""Steps of Adam at most; it ends where `LOOK` steps move neither logarithm by more than `SETTLED`."""

CHUNK = 100
"""Test rows at a time: Kron makes several copies of their Jacobian."""


Evidence = Callable[[Tensor, Tensor], Tensor]


def answer(name: str, arrays: str, stored: str) -> None:
    """Store the mean and variance of y at the test rows, and the noise."""
    weights, hessian = STRUCTURES[name]
    found = read(arrays)
    kind = str(found.pop("kind"))
    x, y, x_test = (torch.from_numpy(found.pop(key)) for key in ("x", "y", "x_test"))
    module = network(kind, x.shape[1])
    module.load_state_dict({key: torch.from_numpy(value) for key, value in found.items()})
    module.eval()
    if name == "Kron":
        for part in module.modules():
            part.requires_grad_(not isinstance(part, nn.BatchNorm1d))
    posterior = Laplace(module, "regression", subset_of_weights=weights, hessian_structure=hessian)
    posterior.fit(DataLoader(TensorDataset(x, y), batch_size=len(x)))
    evidence = (
        by_eigenvalues(posterior, len(x)) if name == "full" else posterior.log_marginal_likelihood
    )
    posterior.prior_precision, posterior.sigma_noise = tuned(evidence)
    pairs = [posterior(part) for part in x_test.split(CHUNK)]
    noise = posterior.sigma_noise**2
    np.savez(
        stored,
        mean=torch.cat([mean[:, 0] for mean, _ in pairs]).detach().numpy(),
        variance=(torch.cat([var[:, 0, 0] for _, var in pairs]) + noise).detach().numpy(),
        noise=noise.numpy(),
    )


def tuned(evidence: Evidence) -> tuple[Tensor, Tensor]:
    """Prior precision and standard deviation of the noise."""
    logs = torch.zeros(2, requires_grad=True)
    optimizer, before = torch.optim.Adam([logs], lr=0.1), torch.full((2,), torch.inf)
    for step in range(STEPS):
        optimizer.zero_grad()
        (-evidence(logs[:1].exp(), logs[1:].exp())).backward()
        optimizer.step()
        if step % LOOK == LOOK - 1:
            if (logs.detach() - before).abs().max() < SETTLED:
                break
            before = logs.detach().clone()
    found = logs.detach().exp()
    return found[:1], found[1:]


def by_eigenvalues(posterior: Any, rank: int) -> Evidence:
    """Its `log_marginal_likelihood`; the Hessian has at most `rank` eigenvalues that are not zero."""
    values = torch.linalg.eigvalsh(posterior.H)[-rank:].clamp(min=0)

    def evidence(precision: Tensor, noise: Tensor) -> Tensor:
        posterior.prior_precision, posterior.sigma_noise = precision, noise
        ratio = (values / (precision * noise.square())).log1p().sum()
        return posterior.log_likelihood - 0.5 * (ratio + posterior.scatter)

    return evidence


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    answers = sys.stdout
    for line in sys.stdin:
        said = ""
        with redirect_stdout(sys.stderr):
            try:
                answer(*json.loads(line))
            except Exception as error:
                said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        print(said, file=answers, flush=True)


if __name__ == "__main__":
    main()
