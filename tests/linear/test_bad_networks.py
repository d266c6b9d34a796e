"""Networks and inputs that cannot be linearized: each is told what to change."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from architectures import Apply
from net2gp.errors import InputError, NetworkError
from net2gp.linear import linearize

IN_ANOTHER_BATCH = (
    "gives other outputs for the same points in another batch: it acts at random .*"
    r"Switch that off, e\.g\. F\.dropout\(x, training=self\.training\)"
)


def mlp(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 8), *layers, nn.Linear(8, 2)).eval()


def x(num_points: int = 5) -> torch.Tensor:
    return torch.randn(num_points, 3, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("layer", [nn.Dropout(0.1), nn.BatchNorm1d(8)])
def test_a_part_in_training_mode_is_named_with_its_reason(layer: nn.Module) -> None:
    network = mlp(layer)
    network[1].train()
    kind = type(layer).__name__
    with pytest.raises(
        NetworkError, match=rf"training mode \({kind} would act at random .*\): 1\. Call"
    ):
        linearize(network)


def test_a_network_set_to_training_mode_later_is_refused() -> None:
    network = mlp(nn.Dropout(0.5))
    linearized = linearize(network)
    network.train()
    for use in (linearized, linearized.kernel(), linearized.kernel().blocks, linearized.jacobian):
        with pytest.raises(
            NetworkError, match=r"training mode \(Dropout would .*network\.eval\(\)"
        ):
            use(x())


@pytest.mark.parametrize("rate", [0.5, 0.1, 0.01])
def test_dropout_that_stays_on_is_noticed(rate: float) -> None:
    network = Apply(
        lambda self, x: self.head(F.dropout(self.inner(x), rate)),
        inner=nn.Linear(3, 8), head=nn.Linear(8, 2),
    ).eval()  # fmt: skip
    kernel = linearize(network).kernel()
    for _ in range(10):
        with pytest.raises(NetworkError, match=IN_ANOTHER_BATCH):
            kernel(x())


def test_random_numbers_without_effect_are_allowed() -> None:
    def forward(self, x):
        torch.rand(())
        return self.layer(x)

    assert linearize(Apply(forward, layer=nn.Linear(3, 2)).eval()).kernel()(x()).shape == (10, 10)


def couple(function) -> nn.Module:
    return Apply(lambda self, x: self.layer(function(x)), layer=nn.Linear(3, 2)).double().eval()


@pytest.mark.parametrize("num_points", [2, 3, 7])
@pytest.mark.parametrize(
    "network",
    [
        mlp(nn.BatchNorm1d(8, track_running_stats=False)).double(),
        couple(lambda x: x - x.mean(0)),
        couple(lambda x: x.softmax(0)),
        couple(lambda x: x.cumsum(0)),
    ],
    ids=["batch norm", "mean", "softmax", "cumulative sum"],
)
def test_networks_that_couple_their_points_are_refused(network, num_points: int) -> None:
    linearized = linearize(network)
    for use in (linearized.kernel(), linearized.kernel().blocks, linearized.jacobian):
        with pytest.raises(
            NetworkError, match=r"couples the points of a batch \(batch statistics\)"
        ):
            use(x(num_points).double())


@pytest.mark.parametrize("largest", [0, 2, 4])
def test_a_division_by_the_largest_value_of_the_batch_is_noticed(largest: int) -> None:
    """Wherever it is among the first, the middle and the last point, which are looked at."""
    points = x().double()
    points[largest] *= 100
    with pytest.raises(NetworkError, match="couples the points of a batch"):
        linearize(couple(lambda x: x / x.abs().max())).kernel()(points)


def test_a_module_is_needed() -> None:
    with pytest.raises(
        NetworkError, match=r"must be a torch\.nn\.Module, but is an object of type builtin_func"
    ):
        linearize(torch.sin)


def test_modules_compiled_by_jit_are_refused() -> None:
    with pytest.raises(NetworkError, match=r"compiled by torch\.jit, .* Pass the Python module"):
        linearize(torch.jit.trace(mlp(), x()))


def test_parameters_are_needed() -> None:
    with pytest.raises(
        NetworkError, match=r"\(Tanh\) has no parameters, so there is nothing to lin"
    ):
        linearize(nn.Tanh().eval())


def test_parameters_must_reach_the_output() -> None:
    network = Apply(lambda self, x: self.used(x), used=nn.Linear(3, 2), idle=nn.Linear(3, 2)).eval()
    message = (
        r"2 of the chosen parameters do not reach the output: idle\.weight, idle\.bias\. Leave them "
        r'out: linearize\(network, only=\["\*", "!idle\.weight", "!idle\.bias"\]\)'
    )
    with pytest.raises(NetworkError, match=message):
        linearize(network).kernel()(x())
    kernel = linearize(network, only=["*", "!idle.weight", "!idle.bias"]).kernel()
    assert kernel(x()).shape == (10, 10)


def test_an_output_without_a_graph_reaches_no_parameter() -> None:
    network = Apply(lambda self, x: self.layer(x).detach(), layer=nn.Linear(3, 2)).eval()
    with pytest.raises(NetworkError, match=r"parameters do not reach the output: layer\.weight"):
        linearize(network).jacobian(x())


def test_parameters_must_share_one_dtype() -> None:
    network = mlp()
    network[1].double()
    with pytest.raises(
        NetworkError, match=r"share one dtype and device, but have .*float64.*network\.fl"
    ):
        linearize(network)
    assert linearize(network, only="1.*").num_params == 18


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int8])
def test_parameters_must_have_derivatives(dtype: torch.dtype) -> None:
    network = mlp()
    network.code = nn.Parameter(torch.ones(2, dtype=dtype), requires_grad=False)
    with pytest.raises(NetworkError, match=rf"the parameters are {dtype}, which have no deriv"):
        linearize(network, only="code")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_parameters_must_be_finite(value: float) -> None:
    network = mlp()
    with torch.no_grad():
        network[1].bias[0] = value
    with pytest.raises(NetworkError, match=r"parameter '1\.bias' has NaN or infinite values"):
        linearize(network)


def test_outputs_must_be_finite() -> None:
    network = Apply(lambda self, x: self.layer(x) / 0, layer=nn.Linear(3, 2)).eval()
    with pytest.raises(NetworkError, match="output has NaN or infinite values on the given inputs"):
        linearize(network).kernel()(x())


def test_the_output_must_be_one_tensor() -> None:
    network = Apply(lambda self, x: (self.layer(x), x), layer=nn.Linear(3, 2)).eval()
    message = (
        r"returns a tuple of \[a tensor of shape \(5, 2\).*\], where one tensor is needed\. Pick it"
    )
    with pytest.raises(NetworkError, match=message):
        linearize(network)(x())
    assert linearize(network, output=lambda out: out[0])(x()).shape == (5, 2)


@pytest.mark.parametrize(
    "reshape", [lambda out: out.sum(), lambda out: out.T, lambda out: out[None]]
)
def test_the_first_axis_of_the_output_must_count_points(reshape) -> None:
    network = Apply(lambda self, x: reshape(self.layer(x)), layer=nn.Linear(3, 2)).eval()
    with pytest.raises(
        NetworkError, match=r"maps 5 points to a tensor .*first axis of the output must"
    ):
        linearize(network)(x())


def products(linearized):
    """Everything that takes inputs."""
    kernel, trace = linearized.kernel(), linearized.trace_kernel()
    u = torch.ones(10, 1)
    step = {name: torch.ones_like(value) for name, value in linearized.params.items()}
    return {
        "value": linearized,
        "jacobian": linearized.jacobian,
        "jvp": lambda z: linearized.jvp(z, step),
        "vjp": lambda z: linearized.vjp(z, u.reshape(5, 2)),
        "taylor": lambda z: linearized.taylor(z, step),
        "kernel": kernel,
        "check": kernel.check,
        "blocks": kernel.blocks,
        "diag": kernel.diag,
        "features": kernel.features,
        "apply": lambda z: kernel.apply(z, torch.ones(linearized.num_params, 1)),
        "adjoint": lambda z: kernel.adjoint(z, u),
        "matmul": lambda z: kernel.matmul(z, x(), u),
        "trace": trace,
        "trace diag": trace.diag,
        "trace matmul": lambda z: trace.matmul(z, x(), torch.ones(5, 1)),
    }


PRODUCTS = list(products(linearize(mlp())))


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            x().double(),
            r"x is torch\.float64, but the network is torch\.float32\. Convert it: x = x\.to",
        ),
        (x().to("meta"), r"x is on meta, but the network is on cpu\. Move it: x = x\.to\('cpu'\)"),
        (x() / 0, r"x must be finite, but 15 of 15 values are NaN or infinite \(first in row 0\)"),
        (x()[:0], r"x is empty: at least one point is needed"),
        (
            x().numpy(),
            r"x must be a tensor, or a tuple or dict of tensors, but is an object of type ndarray",
        ),
        ([x(), x()], r"x must be a tensor, or a tuple or dict of tensors, but is a list"),
        ((x(), x(4)), r"the tensors in x must have equally many rows, but have \[5, 4\]"),
        (
            torch.tensor(1.0),
            r"x must have a first axis that counts points, but is a tensor of shape \(\)",
        ),
        ({}, r"x must have a first axis that counts points, but is a dict"),
    ],
    ids=["dtype", "device", "infinite", "empty", "array", "list", "rows", "number", "nothing"],
)
def test_inputs_that_do_not_fit_are_refused(product: str, bad, message: str) -> None:
    with pytest.raises(InputError, match=message):
        products(linearize(mlp(nn.Tanh())))[product](bad)


def test_the_second_input_is_checked_as_well() -> None:
    kernel = linearize(mlp()).kernel()
    with pytest.raises(InputError, match=r"y must be finite, but 15 of 15 values"):
        kernel(x(), x() / 0)
    with pytest.raises(InputError, match=r"y is torch\.float64, but the network is torch\.float32"):
        kernel(x(), x().double())


def test_inputs_that_the_network_cannot_take_are_described() -> None:
    linearized = linearize(nn.Linear(3, 1).double().eval())
    x = torch.zeros(4, 2, dtype=torch.float64)
    for use in (linearized, linearized.kernel(), linearized.jacobian):
        with pytest.raises(NetworkError, match=r"cannot take x, a tensor of shape \(4, 2\)"):
            use(x)
