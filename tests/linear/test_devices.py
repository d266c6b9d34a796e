from __future__ import annotations

import pytest
import torch
from torch import Tensor

from architectures import ARCHITECTURES, OUTPUTS
from net2gp.inputs import map_inputs
from net2gp.linear import linearize

DEVICE = "cuda"
WITHOUT_FORWARD_MODE = {"embedding_bag"}
PRECISION = {"weight_norm": 1e-7}
"""Of the network's own values: torch's fused weight norm has nine digits in float64 on a GPU."""


@pytest.fixture(autouse=True)
def needs_a_gpu() -> None:
    if DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def results(name: str, device: str, dtype: torch.dtype) -> list[Tensor]:
    network, x = ARCHITECTURES[name]()
    linearized = linearize(network, output=OUTPUTS.get(name)).to(device, dtype)
    x = map_inputs(x, lambda v: v.to(device, dtype if v.is_floating_point() else None))
    kernel = linearized.kernel({"*": 0.5, next(iter(linearized.params)): 1.5})
    values = [linearized(x), linearized.jacobian(x), kernel(x), kernel.blocks(x)]
    if name not in WITHOUT_FORWARD_MODE:
        v = torch.linspace(-1, 1, 2 * len(values[2]), dtype=dtype, device=device).reshape(-1, 2)
        values.append(kernel.matmul(x, x, v))
    assert all(value.device.type == torch.device(device).type for value in values)
    return [value.double().cpu() for value in values]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_device_changes_nothing(name: str) -> None:
    expected = results(name, "cpu", torch.float64)
    for dtype, tolerance in ((torch.float64, PRECISION.get(name, 1e-9)), (torch.float32, 1e-4)):
        for value, here in zip(results(name, DEVICE, dtype), expected, strict=True):
            assert float((value - here).abs().max()) <= tolerance * float(here.abs().max())


@pytest.mark.gpu
def test_inputs_on_another_device_are_refused() -> None:
    network, x = ARCHITECTURES["mlp"]()
    with pytest.raises(
        ValueError, match=r"x is on cpu, but the network is on cuda:0\. Move it: x = x\.to"
    ):
        linearize(network).to(DEVICE).kernel()(x)


@pytest.mark.gpu
def test_dropout_that_stays_on_is_noticed_on_the_device() -> None:
    network = torch.nn.Sequential(torch.nn.Linear(3, 4), Dropout(), torch.nn.Linear(4, 2)).eval()
    kernel = linearize(network).to(DEVICE).kernel()
    for _ in range(5):
        with pytest.raises(ValueError, match="acts at random"):
            kernel(torch.randn(5, 3, device=DEVICE))


class Dropout(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x, 0.01)
