"""One odd layer does not slow the rest: which parameters are structured, and which are left over."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from architectures import ARCHITECTURES, OUTPUTS, Apply, N, parameter, points
from net2gp.errors import NetworkError
from net2gp.linear import linearize
from net2gp.linear.forward.layers import RULES, Part, Scale, Shift, Turned
from net2gp.linear.planning import probe
from net2gp.linear.planning.plans import Plan
from net2gp.linear.planning.probe import plan
from reference.jacobians import brute_force_jacobian, flat

GRU = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
UNBATCHED = ("table", "position.weight", "mix.weight", "mix.bias")

LEFTOVER = {
    "attention_to_something_else": ("apart.bias_k", "apart.bias_v"),
    "convolution_without_a_batch": ("image", "conv.weight", "conv.bias"),
    "data_dependent_branch": ("scale",),
    "encoder_and_decoder_with_a_learned_start": ("start",),
    "forward_replaced_on_the_instance": ("0.weight",),
    "in_place_assignment": ("shift",),
    "instance_and_rms_norm": ("1.weight", "1.bias"),
    "pruned": ("0.weight_orig", "2.weight_orig"),
    "recurrent_over_packed_lengths": tuple(f"recurrent.{name}" for name in GRU),
    "spectral_norm": ("0.parametrizations.weight.original",),
    "three_unbatched_positions": UNBATCHED,
    "two_unbatched_positions": UNBATCHED,
    "unbatched_positions": UNBATCHED,
    "unbatched_positions_as_many_as_points": UNBATCHED,
    "vision_transformer": ("token",),
    "weight_norm": (
        "0.parametrizations.weight.original0", "0.parametrizations.weight.original1",
    ),
}  # fmt: skip
"""Parameters that have no structured gradient; every other parameter of every architecture has one."""


def planned(name: str) -> Plan:
    network, x = ARCHITECTURES[name]()
    return plan(linearize(network, output=OUTPUTS.get(name)), x)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_only_parameters_outside_known_layers_are_left_over(name: str) -> None:
    found = planned(name)
    assert found.leftover == LEFTOVER.get(name, ())
    everything = [n for n, _ in ARCHITECTURES[name]()[0].named_parameters()]
    assert sorted(found.structured + found.leftover) == sorted(everything)


def test_every_rule_is_used_by_some_architecture() -> None:
    used = {
        type(module)
        for name, build in ARCHITECTURES.items()
        if not LEFTOVER.get(name)
        for module in build()[0].modules()
    }
    # products and sums, and parts of other layers, are no modules of a network
    assert set(RULES) - used == {nn.BatchNorm3d, Scale, Shift, Part, Turned}


def test_batch_norm_in_three_dimensions_has_a_rule_too() -> None:
    torch.manual_seed(0)
    layers = nn.Conv3d(1, 2, 2), nn.BatchNorm3d(2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 2)
    network, x = nn.Sequential(*layers).double().eval(), points(1, 3, 3, 3)
    linearized = linearize(network)
    assert plan(linearized, x).leftover == ()
    J = flat(brute_force_jacobian(network, x)).flatten(0, 1)
    torch.testing.assert_close(linearized.kernel()(x), J @ J.T, rtol=1e-10, atol=1e-10)


def test_a_module_with_a_rule_and_a_bare_parameter_leaves_only_the_latter_over() -> None:
    network = Apply(
        lambda self, x: self.layer(x) * self.scale.exp(), layer=nn.Linear(2, 2), scale=parameter()
    )
    found = plan(linearize(network.eval()), torch.randn(4, 2))
    assert (found.structured, found.leftover) == (("layer.weight", "layer.bias"), ("scale",))


def test_frozen_parameters_are_in_no_part_of_the_plan() -> None:
    network, x = ARCHITECTURES["mlp"]()
    found = plan(linearize(network, only=["2.*", "0.bias"]), x)
    assert found.structured == ("0.bias", "2.weight", "2.bias")


@pytest.mark.parametrize("only", ["0.weight", "2.bias", ["*", "!4.*"], ["*", "!*.bias"]])
def test_the_kernel_of_chosen_parameters_is_that_of_their_columns(only) -> None:
    network, x = ARCHITECTURES["mlp"]()
    linearized = linearize(network, only=only)
    chosen = brute_force_jacobian(network, x)
    J = flat({name: chosen[name] for name in linearized.params}).flatten(0, 1)
    torch.testing.assert_close(linearized.kernel()(x), J @ J.T, rtol=1e-10, atol=1e-12)


def test_layers_that_sort_their_points_are_left_over() -> None:
    """An order that depends on the data may be right by chance for the points that are looked at."""

    def forward(self, x):
        order = x[:, 0].argsort(descending=True)
        return self.head(self.inner(x[order]).tanh()[order.argsort()])

    torch.manual_seed(1)
    network = Apply(forward, inner=nn.Linear(3, 4), head=nn.Linear(4, 2)).double().eval()
    for seed in range(6):
        x = torch.randn(N, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        linearized = linearize(network)
        assert "inner.weight" in plan(linearized, x).leftover
        J = flat(brute_force_jacobian(network, x)).flatten(0, 1)
        torch.testing.assert_close(linearized.kernel()(x), J @ J.T, rtol=1e-10, atol=1e-12)


def test_a_layer_that_the_number_of_points_decides_on_is_refused() -> None:
    def forward(self, x):
        h = self.layer(x)
        return self.layer(h) if len(x) > 3 else h

    network = Apply(forward, layer=nn.Linear(2, 2)).eval()
    with pytest.raises(
        NetworkError,
        match=r"gradients of layer\.weight, layer\.bias at a point depend on the other points of its batch",
    ):
        linearize(network).kernel()(torch.randn(5, 2))


def test_a_plan_is_remembered_for_inputs_of_the_same_shape_until_the_parameters_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []
    probed = probe._probed
    monkeypatch.setattr(probe, "_probed", lambda *given: calls.append(1) or probed(*given))
    network = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).eval()
    linearized, x = linearize(network), torch.randn(5, 2)
    plan(linearized, x)
    assert plan(linearized, x) == plan(linearized, x[1:]) == plan(linearized, x.clone())
    x.mul_(2.0)
    plan(linearized, x)
    assert len(calls) == 1
    plan(linearized, x[:, None])
    assert len(calls) == 2
    with torch.no_grad():
        next(iter(linearized.params.values())).mul_(2.0)
    plan(linearized, x)
    assert len(calls) == 3
    plan(linearize(network), x)
    assert len(calls) == 4


def test_points_of_a_known_shape_are_still_looked_at_unless_they_are_the_same_points() -> None:
    sizes: list[int] = []

    def forward(self, x):
        sizes.append(len(x))
        return self.layer(x)

    linearized = linearize(Apply(forward, layer=nn.Linear(2, 2)).eval())
    x = torch.randn(8, 2)
    plan(linearized, x)
    sizes.clear()
    for same in (x, x[:], x[2:5], x[:1]):
        plan(linearized, same)
    assert sizes == []
    plan(linearized, x.clone())
    assert sizes == [3, 2]
    x.mul_(2.0)
    plan(linearized, x)
    assert sizes == [3, 2, 3, 2]


def test_points_of_a_known_shape_that_see_each_other_are_refused() -> None:
    def forward(self, x):
        return self.layer(torch.where(x.abs().max() > 10, x - x.mean(0), x))

    linearized = linearize(Apply(forward, layer=nn.Linear(2, 2)).eval())
    x = torch.randn(8, 2)
    linearized.kernel()(x)
    with pytest.raises(NetworkError, match="couples the points of a batch"):
        linearized.kernel()(x * 100)


def test_points_of_a_known_shape_without_finite_outputs_are_refused() -> None:
    network = Apply(lambda self, x: self.layer(x).exp(), layer=nn.Linear(2, 2)).eval()
    linearized, x = linearize(network), torch.randn(8, 2)
    linearized.kernel()(x)
    with pytest.raises(NetworkError, match="NaN or infinite values on the given inputs"):
        linearized.kernel()(x * 1e4)


def test_a_hook_or_a_flag_makes_a_new_plan() -> None:
    network = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double().eval()
    linearized, x = linearize(network), torch.randn(5, 2, dtype=torch.float64)
    kernel = linearized.kernel()
    kernel(x)
    handle = network[0].register_forward_hook(
        lambda module, given, out: out + nn.functional.linear(given[0], module.weight.square())
    )
    J = flat(brute_force_jacobian(network, x)).flatten(0, 1)
    torch.testing.assert_close(kernel(x), J @ J.mT)
    handle.remove()
    J = flat(brute_force_jacobian(network, x)).flatten(0, 1)
    torch.testing.assert_close(kernel(x), J @ J.mT)


def test_an_output_that_is_zero_but_for_rounding_is_no_sign_of_coupling():
    """Climbing an acquisition function leads across zeros of the network."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1)).eval()
    low, high = torch.tensor([[-3.0]]), torch.tensor([[3.0]])
    with torch.no_grad():
        network[2].bias -= network(torch.zeros(1, 1))[0]
        for _ in range(60):  # bisection, to the float32 next to a zero
            middle = 0.5 * (low + high)
            if bool((network(middle) > 0) == (network(high) > 0)):
                high = middle
            else:
                low = middle
    for x in (low, high, 0.5 * (low + high), torch.zeros(1, 1)):
        assert plan(linearize(network), x).num_outputs == 1
