"""Networks, posteriors and their answers, for the tests of programs."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import nn

import net2gp as n2g
from net2gp.errors import Net2GPWarning

TOLERANCE = 1e-5
"""Of the largest entry, in float32."""


@functools.cache
def table():
    """Sixty rows of four columns, with a number and a label each."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 4, generator=generator)
    return x, (2 * x[:, :1]).sin() + 0.1 * x[:, 1:2], (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def trained(network: nn.Module, loss, x, y, steps: int = 150) -> nn.Module:
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(network(x), y).backward()
        optimizer.step()
    return network.eval()


@functools.cache
def regressor() -> nn.Module:
    torch.manual_seed(0)
    x, y, _ = table()
    network = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    return trained(network, nn.functional.mse_loss, x, y)


@functools.cache
def classifier() -> nn.Module:
    torch.manual_seed(0)
    x, _, labels = table()
    network = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    return trained(network, nn.functional.cross_entropy, x, labels)


class Convolutions(nn.Module):
    """Strides, groups, norms, a residual sum, padding and two kinds of pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, padding=1, groups=2)
        self.third = nn.Conv2d(4, 6, 3, stride=2)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        h = nn.functional.max_pool2d(self.norm(self.first(x)).relu(), 2)
        h = h + nn.functional.gelu(self.second(h))
        h = nn.functional.avg_pool2d(nn.functional.silu(self.third(h)), 2)
        return self.head(h.flatten(2).mean(-1))


def fitted(kind: str, **settings):
    """A posterior by the name of what it is made of."""
    x, y, labels = table()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Net2GPWarning)
        if kind in ("nngp", "ntk"):
            network = nn.Sequential(
                nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 9), nn.GELU(), nn.Linear(9, 1)
            )
            kernel = getattr(n2g, kind)(network, weight_var=1.5, bias_var=0.1)
            return n2g.condition(kernel, (x, y), n2g.Gaussian(0.01))
        if kind == "adapt":
            return n2g.adapt(regressor(), (x, y), n2g.Gaussian())
        task, _, name = kind.partition(" ")
        structure = eval(f"n2g.{name}", {"n2g": n2g}) if name else None
        if task == "numbers":
            return n2g.laplace(regressor(), (x, y), n2g.Gaussian(), structure=structure, **settings)
        return n2g.laplace(
            classifier(), (x, labels), n2g.Categorical(), structure=structure, **settings
        )


def wanted(posterior, x) -> dict[str, torch.Tensor]:
    """What the posterior itself says, under the names of a program's outputs."""
    law, parts = posterior.predict(x), posterior.split(x)
    found = {"epistemic": parts.epistemic, "aleatoric": parts.aleatoric}
    found["novelty"] = posterior.novelty(x)
    if hasattr(law, "probs"):
        own = posterior.marginal(x)
        return found | {"probabilities": law.probs, "mean": own.mean, "variance": own.variance}
    return found | {"mean": law.mean, "variance": law.variance}


def check(answers, expected, tolerance: float = TOLERANCE) -> None:
    """Compare the answers at the first points with what is expected at all, which gives the scale."""
    answers = {**answers, "variance": answers["std"] ** 2}
    for name, value in expected.items():
        own = value[: len(answers[name])]
        gap = float((answers[name].double() - own.double()).abs().max() / value.abs().max())
        assert gap < tolerance, f"{name}: {gap:.1e}"


ALONE = """
import json, sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {hidden}:
            raise ImportError(name + " is hidden")

sys.meta_path.insert(0, Hidden())
import numpy as np
x = np.load(sys.argv[2])
{run}
np.savez(sys.argv[3], **found)
print(json.dumps(sorted(set(sys.modules) & {hidden})))
"""

BY_TORCH = """
import torch
program = torch.export.load(sys.argv[1]).module()
found = {name: value.numpy() for name, value in program(torch.from_numpy(x)).items()}
"""

BY_ONNXRUNTIME = """
import onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1])
names = [one.name for one in session.get_outputs()]
found = dict(zip(names, session.run(names, {"x": x})))
"""


def run_alone(path: Path, x: torch.Tensor, folder: Path) -> dict[str, torch.Tensor]:
    """Run a program in a process that can import neither net2gp nor gpytorch; torch only for `.pt2`."""
    hidden = {"net2gp", "gpytorch", "safetensors"} | (
        {"torch"} if path.suffix == ".onnx" else set()
    )
    run = BY_ONNXRUNTIME if path.suffix == ".onnx" else BY_TORCH
    code = ALONE.replace("{hidden}", repr(hidden)).replace("{run}", run)
    np.save(folder / "x.npy", x.numpy())
    command = [sys.executable, "-c", code, path, folder / "x.npy", folder / "found.npz"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []
    with np.load(folder / "found.npz") as found:
        return {name: torch.from_numpy(found[name]) for name in found.files}
