"""laplace-torch on one network of `regression.py`: worker_laplace_regression.py STRUCTURE ARRAYS RESULT."""

from __future__ import annotations

import sys
import warnings

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from laplace import Laplace
from problems import read
from regression_module import network

STRUCTURES = {
    "Kron": ("all", "kron", 500),
    "full": ("all", "full", 40),
    "last layer": ("last_layer", "full", 500),
}
"""Subset of weights, structure, and steps of Adam on the marginal likelihood."""


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    name, arrays, stored = sys.argv[1:]
    weights, hessian, steps = STRUCTURES[name]
    found = read(arrays)
    kind = str(found.pop("kind"))
    x, y, x_test = (torch.from_numpy(found.pop(key)) for key in ("x", "y", "x_test"))
    module = network(kind, x.shape[1])
    module.load_state_dict({key: torch.from_numpy(value) for key, value in found.items()})
    module.eval()
    posterior = Laplace(module, "regression", subset_of_weights=weights, hessian_structure=hessian)
    posterior.fit(DataLoader(TensorDataset(x, y), batch_size=256))
    logs = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    optimizer = torch.optim.Adam(logs, lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        (-posterior.log_marginal_likelihood(logs[0].exp(), logs[1].exp())).backward()
        optimizer.step()
    posterior.prior_precision, posterior.sigma_noise = (log.detach().exp() for log in logs)
    mean, variance = posterior(x_test)
    noise = posterior.sigma_noise**2
    np.savez(
        stored,
        mean=mean[:, 0].detach().numpy(),
        variance=(variance[:, 0, 0] + noise).detach().numpy(),
        noise=noise.numpy(),
    )


if __name__ == "__main__":
    main()
