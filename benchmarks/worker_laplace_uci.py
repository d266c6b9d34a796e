"""laplace-torch on the splits of a regression table, prior precision and noise tuned together.

Called by `uci.py` as `worker_laplace_uci.py STRUCTURE ARRAYS RESULT`. The tuning is that of its regression
example: Adam on the logarithms of prior precision and noise, with `log_marginal_likelihood`.
"""

from __future__ import annotations

import sys
import time
import warnings

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from laplace import Laplace
from problems import read

STRUCTURES = {
    "Kron": ("all", "kron"),
    "full": ("all", "full"),
    "last layer": ("last_layer", "full"),
}
STEPS, RATE = 1000, 1e-1


def network(weights: dict[str, Tensor]) -> nn.Sequential:
    hidden, inputs = weights["0.weight"].shape
    module = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, 1)).double()
    module.load_state_dict(weights)
    return module.eval()


def predict(
    module: nn.Module, data: tuple[Tensor, Tensor], x: Tensor, structure: tuple[str, str]
) -> tuple[Tensor, Tensor]:
    """Mean and variance of y at the test points: (m,) each."""
    weights, hessian = structure
    posterior = Laplace(module, "regression", subset_of_weights=weights, hessian_structure=hessian)
    posterior.fit(DataLoader(TensorDataset(*data), batch_size=len(data[0])))
    logs = [torch.ones(1, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    optimizer = torch.optim.Adam(logs, lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (-posterior.log_marginal_likelihood(logs[0].exp(), logs[1].exp())).backward()
        optimizer.step()
    posterior.prior_precision, posterior.sigma_noise = (
        logs[0].detach().exp(),
        logs[1].detach().exp(),
    )
    mean, variance = posterior(x)
    return mean[:, 0].detach(), (variance[:, 0, 0] + posterior.sigma_noise**2).detach()


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(2)
    torch.set_default_dtype(torch.float64)
    name, arrays, stored = sys.argv[1:]
    found = {key: torch.from_numpy(value) for key, value in read(arrays).items()}
    params = {key: found[key] for key in ("0.weight", "0.bias", "2.weight", "2.bias")}
    results, start = {}, time.process_time()
    for i, test in enumerate(found["test"]):
        x, y = found["x"][i], found["y"][i]
        module = network({key: value[i] for key, value in params.items()})
        data = (x[~test], y[~test][:, None])
        mean, variance = predict(module, data, x[test], STRUCTURES[name])
        results[f"mean{i}"], results[f"variance{i}"] = mean.numpy(), variance.numpy()
    results["cpu_s"] = np.array(time.process_time() - start)
    np.savez(stored, **results)


if __name__ == "__main__":
    main()
