"""Peak memory of `laplace` for a network with outputs at places, or of laplace-torch for the same network.

Called by `dense.py` as `worker_dense.py JOB` with JSON. Prints megabytes above the process with the network,
its data and the imports: those of the fit and those of the prediction, or why there are none. The address
space is limited, so that what does not fit raises an error. The network has its initial weights, on which
memory does not depend.
"""

from __future__ import annotations

import ctypes
import json
import resource
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dense_problems import IGNORED, Reader, UNet, scenes, texts
from measure import peak_memory, resident

Fit = Callable[[Tensor, Tensor], Any]


def main() -> None:
    """Run one job."""
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    network, x, y = problem(job["problem"], job["points"], job["size"])
    fit, predict = (ours if job["library"] == "net2gp" else theirs)(network, job)
    if job["library"] == "net2gp":  # what is imported and made once
        few = problem(job["problem"], 2, 16)[1:]
        predict(fit(*few), few[0])
    limit = int(job["limit_gb"] * 1e9)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    print(json.dumps(measured(fit, predict, x, y)))


def problem(name: str, points: int, size: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A network, so many images of `size`² pixels or texts of `size` characters, and their labels."""
    if name == "pixels":
        found = scenes(points, 1, size=size)
        return UNet().eval(), found.x, found.y
    texts_, *_ = texts((points,), 1, length=size)
    return Reader().eval(), texts_.x, texts_.y


def measured(fit: Fit, predict: Callable[[Any, Tensor], Any], x: Tensor, y: Tensor) -> dict:
    """Peaks and CPU seconds of both steps, until one fails."""
    found: dict[str, Any] = {}
    ctypes.CDLL(None).malloc_trim(0)  # gives back what the C library kept
    before, posterior = resident(), None
    for name in ("fit", "predict"):
        start = time.process_time()
        with peak_memory() as seen:
            try:
                if posterior is None:
                    posterior = fit(x, y)
                else:
                    predict(posterior, x)
            except Exception as error:
                found["failed"] = f"{type(error).__name__}: {' '.join(str(error).split())}"
        found[f"{name} MB"] = seen[0] - before
        found[f"{name} s"] = time.process_time() - start
        if "failed" in found:
            break
        ctypes.CDLL(None).malloc_trim(0)
    return found


def ours(network: nn.Module, job: dict[str, Any]) -> tuple[Fit, Callable]:
    """Fit with the default tuning, and predict every place."""
    import net2gp as n2g

    last = n2g.LastLayer() if job["problem"] == "pixels" else n2g.LastLayer(n2g.Kron())
    kinds = {"last layer": last, "Kron": n2g.Kron(), "diagonal": n2g.Diagonal()}
    structure = kinds[job["structure"]]

    def fit(x: Tensor, y: Tensor) -> Any:
        return n2g.laplace(network, (x, y), n2g.Categorical(), structure=structure)

    return fit, lambda posterior, x: posterior.predict(x).probs


class Flat(nn.Module):
    """The same network with the classes of each place behind each other, one row of outputs for a point."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """Outputs (N, P·C)."""
        return self.network(x).flatten(1)


def theirs(network: nn.Module, job: dict[str, Any]) -> tuple[Fit, Callable]:
    """Fit and predict by laplace-torch, point by point, where it needs the least memory."""
    from torch.utils.data import DataLoader, TensorDataset

    from laplace import Laplace

    weights, structure = {
        "last layer": ("last_layer", "full"),
        "Kron": ("all", "kron"),
        "diagonal": ("all", "diag"),
    }[job["structure"]]

    def fit(x: Tensor, y: Tensor) -> Any:
        module = Flat(network) if job["flat"] else network
        found = Laplace(
            module, "classification", subset_of_weights=weights, hessian_structure=structure
        )
        y = y.masked_fill(y == IGNORED, 0)  # it has no ignored labels
        found.fit(DataLoader(TensorDataset(x, y), batch_size=1))
        return found

    return fit, lambda posterior, x: [posterior(one[None]) for one in x]


if __name__ == "__main__":
    main()
