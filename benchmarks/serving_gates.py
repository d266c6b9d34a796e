"""What a runtime's rounding does to gradients: the gates of ReLUs that it saw, and the posterior with these.

The gradient of a network jumps where the input of a ReLU is zero. A network rounds its sums in an order that
depends on the runtime, the processor and the size of the batch, so that a few of some hundred thousand inputs
have another sign, and gradients and variances at such a point are those on the other side of the kink. Both
are answers of the same posterior in float32. To tell this from an error, the gates are read from the run of
the program, and the posterior is computed in float64, by plain reverse mode, with exactly these gates.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from net2gp.linear import Direct
from net2gp.structures import Covariance
from serving_problems import Problem

RELUS = (nn.functional.relu, torch.relu, torch.relu_, torch.Tensor.relu)


class Noting(fx.Interpreter):
    """Runs a graph, and notes where the outputs of ReLUs are positive."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.gates: list[Tensor] = []

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.target is torch.ops.aten.relu.default:
            self.gates.append(value > 0)
        return value


def gates(path: Path, x: Tensor) -> list[Tensor]:
    """The gates of all ReLUs of the forward pass in order, each with a row for each point."""
    if path.suffix == ".onnx":
        return _gates_by_onnxruntime(path, x)
    module = torch.export.load(path).module()
    run = Noting(module)
    with torch.no_grad():
        run.run(x)
    return run.gates


def _gates_by_onnxruntime(path: Path, x: Tensor) -> list[Tensor]:
    import onnx
    import onnxruntime

    model = onnx.load(path)
    names = [node.output[0] for node in model.graph.node if node.op_type == "Relu"]
    del model.graph.output[:]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    found = session.run(names, {"x": x.numpy()})
    return [torch.from_numpy(value) > 0 for value in found]


class Gated(TorchFunctionMode):
    """ReLUs with given gates, in the order in which they are called."""

    def __init__(self, gates: list[Tensor]) -> None:
        super().__init__()
        self.gates = iter(gates)

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in RELUS:
            return args[0] * next(self.gates)
        return function(*args, **(kwargs or {}))


def variances_with_gates(found: Problem, point: Tensor, gates: list[Tensor]) -> Tensor:
    """The variances (C,) of one point (1, …), in float64, if ReLUs have these gates.

    Args:
        found: The problem, whose posterior is a Gaussian over the weights of a network.
        point: The point.
        gates: The gates of all ReLUs, each (1, …).
    """
    process = found.posterior.process
    network = copy.deepcopy(found.network).double()
    params = dict(network.named_parameters())
    chosen = {name: params[name] for name in process.linearized.params}
    with Gated(gates):
        out = network(point.double())[0]
    rows = [torch.autograd.grad(value, list(chosen.values()), retain_graph=True) for value in out]
    J = {
        name: Direct(torch.stack([row[i].flatten() for row in rows])[None])
        for i, name in enumerate(chosen)
    }
    covariance, factor = _plain(process.covariance)
    total = torch.zeros(len(out), dtype=torch.float64)
    for rooted in covariance.rooted(J):
        assert isinstance(rooted, Direct)  # gradients that are written out stay so
        total += rooted.J[0].double().square().sum(-1)
    return factor * total


def _plain(covariance: Covariance) -> tuple[Covariance, float]:
    """The covariance under its tempering, and the product of the factors."""
    factor = 1.0
    while hasattr(covariance, "inner"):
        factor, covariance = factor * covariance.factor, covariance.inner
    return covariance, factor


def has_gates(network: nn.Module, x: Tensor) -> bool:
    """Whether the network calls a ReLU."""
    seen: list[int] = []

    class Seen(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if function in RELUS:
                seen.append(1)
            return function(*args, **(kwargs or {}))

    with torch.no_grad(), Seen():
        network(x[:1])
    return bool(seen)


@dataclass(frozen=True)
class Rounding:
    """What float32 leaves open by torch alone, at points whose gates a runtime saw otherwise, and some more.

    Args:
        points: The number of points.
        precise: At how many of them variances differ from those in float64 by more than 1e-5.
        largest: The largest difference, as a share of the largest variance.
        other: The number where float32 differs by more than 1e-5 between torch's two kinds of convolution.
        other_largest: The largest of these differences.
    """

    points: int
    precise: int
    largest: float
    other: int
    other_largest: float


def rounding(found: Problem, variance: Tensor, points: list[int]) -> Rounding:
    """Compare the posterior's variances in float32 with those in float64, and without oneDNN.

    Args:
        found: The problem.
        variance: Its variances in float32.
        points: The points.
    """
    x, own = found.x[points], variance[points]
    wide = found.posterior.to(dtype=torch.float64).marginal(x.double()).variance
    with torch.backends.mkldnn.flags(enabled=False):
        other = found.posterior.marginal(x).variance
    gaps = [(own - one).abs().amax(1) / variance.max() for one in (wide, other)]
    above = [int((gap > 1e-5).sum()) for gap in gaps]
    largest = [float(gap.max()) for gap in gaps]
    return Rounding(len(points), above[0], largest[0], above[1], largest[1])
