"""Laws of the structural layers that torch lacks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from net2gp.errors import InputError
from net2gp.limits.modules.layers import (
    LocallyConnected1d,
    LocallyConnected2d,
    SumPool1d,
    SumPool2d,
    SumPool3d,
)

POOLS = {1: (SumPool1d, nn.AvgPool1d), 2: (SumPool2d, nn.AvgPool2d), 3: (SumPool3d, nn.AvgPool3d)}


def images(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize(("stride", "padding"), [(None, 0), (1, 1), (2, 1)])
def test_sum_pooling_is_average_pooling_times_the_window(axes, stride, padding):
    total, average = POOLS[axes]
    x = images(2, 3, *(7, 6, 5)[:axes])
    expected = average(3, stride, padding)(x) * 3**axes
    torch.testing.assert_close(total(3, stride, padding)(x), expected, rtol=1e-14, atol=1e-14)


def test_sum_pooling_of_an_uneven_window_sums_every_place_of_it():
    x = images(2, 3, 6, 5)
    y = SumPool2d((3, 2), (2, 1))(x)
    assert y.shape == (2, 3, 2, 4)
    torch.testing.assert_close(y[:, :, 1, 2], x[:, :, 2:5, 2:4].sum((2, 3)))


@pytest.mark.parametrize("mode", ["zeros", "circular"])
@pytest.mark.parametrize(("stride", "padding"), [(1, 0), (1, 1), (2, 1)])
def test_locally_connected_with_equal_weights_everywhere_is_a_convolution_1d(mode, stride, padding):
    conv = nn.Conv1d(3, 4, 3, stride, padding, padding_mode=mode).double()
    local = LocallyConnected1d((3, 8), 4, 3, stride, padding, mode).double()
    share(conv, local)
    x = images(2, 3, 8)
    torch.testing.assert_close(local(x), conv(x), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("mode", ["zeros", "circular"])
@pytest.mark.parametrize(("stride", "padding"), [(1, 0), ((1, 2), (1, 0)), (2, 1)])
def test_locally_connected_with_equal_weights_everywhere_is_a_convolution_2d(mode, stride, padding):
    conv = nn.Conv2d(3, 4, (3, 2), stride, padding, padding_mode=mode).double()
    local = LocallyConnected2d((3, 6, 5), 4, (3, 2), stride, padding, mode).double()
    share(conv, local)
    x = images(2, 3, 6, 5)
    torch.testing.assert_close(local(x), conv(x), rtol=1e-13, atol=1e-13)


def share(conv: nn.Conv1d | nn.Conv2d, local: LocallyConnected1d | LocallyConnected2d) -> None:
    ones = (1,) * len(local.output_size)
    with torch.no_grad():
        local.weight.copy_(conv.weight.reshape(*conv.weight.shape, *ones).expand_as(local.weight))
        local.bias.copy_(conv.bias.reshape(-1, *ones).expand_as(local.bias))


def test_every_place_has_weights_of_its_own():
    local = LocallyConnected2d((3, 6, 5), 4, 3).double()
    x = images(2, 3, 6, 5)
    before = local(x)
    with torch.no_grad():
        local.weight[..., 1, 2] += 1
    changed = (local(x) - before).abs().amax((0, 1)) > 0
    assert changed.nonzero().tolist() == [[1, 2]]


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_of_the_unshared_weights_match_finite_differences(bias):
    local = LocallyConnected1d((2, 5), 2, 3, padding=1, bias=bias).double()
    params = dict(local.named_parameters())

    def apply(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(local, dict(zip(params, values, strict=True)), x)

    assert torch.autograd.gradcheck(apply, (images(2, 2, 5).requires_grad_(), *params.values()))


def test_starting_weights_have_the_spread_of_a_convolution():
    torch.manual_seed(0)
    local, conv = LocallyConnected2d((8, 9, 9), 16, 3), nn.Conv2d(8, 16, 3)
    bound = 1 / (8 * 9) ** 0.5
    assert local.weight.abs().max() <= bound
    assert local.bias.abs().max() <= bound
    assert conv.weight.abs().max() <= bound
    torch.testing.assert_close(local.weight.std(), torch.tensor(bound / 3**0.5), rtol=0.02, atol=0)
    before = local.weight.clone()
    local.reset_parameters()
    assert not torch.equal(local.weight, before)


def test_a_saved_layer_comes_back_the_same():
    local = LocallyConnected2d((3, 6, 5), 4, 3, padding=1, padding_mode="circular")
    other = copy.deepcopy(local)
    other.reset_parameters()
    other.load_state_dict(local.state_dict())
    x = images(1, 3, 6, 5).float()
    assert torch.equal(local(x), other(x))


def test_the_layers_can_be_leaves_of_a_traced_graph():
    network = nn.Sequential(LocallyConnected2d((3, 6, 5), 4, 3), nn.ReLU(), SumPool2d(2))

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, module: nn.Module, name: str) -> bool:
            return module.__module__.startswith(("torch.nn", "net2gp.limits.modules.layers"))

    targets = [node.target for node in Tracer().trace(network).nodes if node.op == "call_module"]
    assert targets == ["0", "1", "2"]


def test_padding_layers_make_the_uneven_padding_that_the_layer_has_not():
    x = images(2, 3, 6)
    local = LocallyConnected1d((3, 6 + 1), 4, 2).double()
    padded = nn.Sequential(nn.ZeroPad1d((0, 1)), local)
    torch.testing.assert_close(padded(x), local(F.pad(x, (0, 1))))
    assert padded(x).shape == (2, 4, 6)


def test_the_printed_layer_names_its_arguments():
    assert repr(SumPool2d(2, padding=1)) == (
        "SumPool2d(kernel_size=(2, 2), stride=(2, 2), padding=(1, 1))"
    )
    assert repr(LocallyConnected1d((3, 8), 4, 3, padding_mode="circular", bias=False)) == (
        "LocallyConnected1d((3, 8), 4, kernel_size=(3,), stride=(1,), padding=(0,), "
        "padding_mode='circular', bias=False)"
    )


def test_errors_say_what_to_type_instead():
    with pytest.raises(
        InputError, match=r"kernel_size must be 2 whole numbers.*kernel_size=\(3, 3\)"
    ):
        SumPool2d((3, 0))
    with pytest.raises(InputError, match=r"stride must be 1 whole number of.*stride=3"):
        SumPool1d(3, -1)
    with pytest.raises(
        InputError, match=r"padding_mode must be 'zeros' or 'circular'.*ReflectionPad"
    ):
        LocallyConnected2d((3, 6, 5), 4, 3, padding_mode="reflect")
    with pytest.raises(
        InputError, match=r"kernel_size must fit into the padded input.*more padding"
    ):
        LocallyConnected2d((3, 6, 5), 4, 7)
    with pytest.raises(InputError, match=r"x must have shape \(N, 3, 8\).*input_shape=\(3, 9\)"):
        LocallyConnected1d((3, 8), 4, 3)(torch.zeros(2, 3, 9))
    with pytest.raises(InputError, match="input_shape must be 3 whole numbers"):
        LocallyConnected2d((3, 8), 4, 3)
