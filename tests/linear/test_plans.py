"""What is known of a network belongs to its linearization: found once a shape, and only where it holds."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from architectures import Apply
from net2gp.errors import NetworkError
from net2gp.linear import linearize
from net2gp.linear.jacobians.capture import capture
from net2gp.linear.jacobians.passes import capacity
from net2gp.linear.planning import probe
from net2gp.linear.planning.plans import NUM_KNOWN, Plans
from net2gp.linear.planning.probe import check_used, demote, once, plan
from reference.jacobians import brute_force_jacobian, flat


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double().eval()


def inputs(num_points: int = 5, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_points, 2, generator=generator, dtype=torch.float64)


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows by one with every network that is probed."""
    calls: list[int] = []
    probed = probe._probed
    monkeypatch.setattr(probe, "_probed", lambda *given: calls.append(1) or probed(*given))
    return calls


def test_every_shape_is_probed_once_whatever_points_come_in_between(probes: list[int]) -> None:
    linearized, shapes = linearize(network()), [(), (1,), (3,)]
    for seed in range(4):
        for shape in shapes:
            x = inputs(6, seed)
            plan(linearized, x[:, None].expand(6, *shape, 2) if shape else x)
    assert len(probes) == len(linearized.plans) == len(shapes)


def test_a_bounded_number_of_shapes_is_remembered_those_asked_for_last(probes: list[int]) -> None:
    linearized = linearize(network())
    for places in range(1, 3 * NUM_KNOWN):
        plan(linearized, inputs()[:, None].expand(5, places, 2))
        plan(linearized, inputs())
    assert len(linearized.plans) == NUM_KNOWN
    assert len(probes) == 3 * NUM_KNOWN


def test_copies_share_what_is_known_and_other_linearizations_do_not(probes: list[int]) -> None:
    module = network()
    linearized, x = linearize(module), inputs()
    plan(linearized, x)
    assert replace(linearized).plans is linearized.plans is linearized.to("cpu").plans
    plan(replace(linearized), x)
    assert len(probes) == 1
    assert plan(linearize(module), x) == plan(linearized, x)
    assert len(probes) == 2


def test_a_copy_with_other_parameters_buffers_or_outputs_has_a_plan_of_its_own(
    probes: list[int],
) -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).double().eval()
    linearized, x = linearize(module), inputs()
    first = plan(linearized, x)
    moved = {name: 2 * value for name, value in linearized.params.items()}
    frozen = {name: value.clone() for name, value in linearized.frozen.items()}
    chosen = {name: value for name, value in linearized.params.items() if name != "0.bias"}
    rest = {**frozen, "0.bias": linearized.params["0.bias"]}
    for count, changes in enumerate(
        [{"params": moved}, {"frozen": frozen}, {"params": chosen, "frozen": rest}], start=2
    ):
        found = plan(replace(linearized, **changes), x)
        assert len(probes) == count
        assert found.structured == tuple(changes.get("params", linearized.params))
    for _ in range(5):  # a function that is gone may leave its place in memory to the next one
        assert plan(replace(linearized, output=lambda out: out[:, :1]), x).num_outputs == 1
        assert plan(replace(linearized, output=lambda out: out + 0), x).num_outputs == 2
    assert plan(linearized, x) == first


def test_a_buffer_that_is_changed_in_place_makes_a_new_plan(probes: list[int]) -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).double().eval()
    linearized, x = linearize(module), inputs()
    plan(linearized, x)
    linearized.frozen["1.running_var"].mul_(2.0)
    plan(linearized, x)
    assert len(probes) == 2


def test_a_part_of_another_kind_in_the_place_of_one_makes_a_new_plan() -> None:
    module = network()
    linearized, x = linearize(module), inputs()
    kernel = linearized.kernel()
    for part in (nn.Tanh(), nn.ReLU(), nn.Sigmoid()):
        module[1] = part.eval()
        J = flat(brute_force_jacobian(module, x)).flatten(0, 1)
        torch.testing.assert_close(kernel(x), J @ J.mT)


def test_a_demoted_parameter_is_left_over_in_every_shape_and_copy_and_nowhere_else() -> None:
    module = network()
    linearized, x = linearize(module), inputs()
    plan(linearized, x)
    demote(linearized, ["0.weight"])
    other = {name: value + 0.1 for name, value in linearized.params.items()}
    for known in (linearized, replace(linearized, params=other)):
        for points in (x, x[:, None]):
            assert plan(known, points).leftover == ("0.weight",)
    assert plan(linearize(module), x).leftover == ()


def test_points_that_use_a_layer_otherwise_demote_it_for_those_after_them() -> None:
    """The three points that a plan looks at are in order, all of them are not: only capture sees that."""

    def forward(self, x):
        order = (x[:, 0] > 0).to(torch.int8).argsort(stable=True)
        return self.head(torch.tanh(self.inner(x[order])[order.argsort()]))

    torch.manual_seed(0)
    module = Apply(forward, inner=nn.Linear(2, 3), head=nn.Linear(3, 1)).double().eval()
    linearized, x = linearize(module), inputs(9)
    x[:, 0] = torch.tensor([-1.0, 1, -1, 1, -1, 1, -1, 1, 1])
    layout = plan(linearized, x[[0, 2, 4]])
    assert layout.leftover == ()
    capture(linearized, x, layout)
    assert set(plan(linearized, x[[0, 2, 4]]).leftover) == {"inner.weight", "inner.bias"}


def test_used_parameters_are_known_to_a_linearization_and_its_copies_alone() -> None:
    def forward(self, x):
        return torch.where(x[:, :1] > 0, self.right(x), 0) if (x[:, 0] > 0).any() else self.left(x)

    module = Apply(forward, left=nn.Linear(2, 1), right=nn.Linear(2, 1)).double().eval()
    linearized, x = linearize(module), inputs().abs()
    message = "2 of the chosen parameters do not reach the output: left.weight, left.bias"
    with pytest.raises(NetworkError, match=message):
        plan(linearized, x)
    check_used(linearize(module, only="left.*"), -x)
    with pytest.raises(NetworkError, match=message):
        plan(linearized, x)
    check_used(replace(linearized, params={n: linearized.params[n] for n in ("left.weight",)}), -x)
    check_used(replace(linearized, params={n: linearized.params[n] for n in ("left.bias",)}), -x)
    assert plan(linearized, x).unreached == ("left.weight", "left.bias")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_by_value_knows_facts_and_no_plans(copied) -> None:
    linearized, x = linearize(network()), inputs()
    demote(linearized, ["0.weight"])
    plan(linearized, x)
    other = copied(linearized)
    assert len(other.plans) == 0
    assert other.plans.demoted == {"0.weight"}
    assert other.plans.reached == set(linearized.params)
    torch.testing.assert_close(other.kernel()(x), linearized.kernel()(x))


def test_a_linearization_that_was_stored_without_plans_gets_them() -> None:
    linearized, x = linearize(network()), inputs()
    state = {name: value for name, value in vars(linearized).items() if name != "plans"}
    other = object.__new__(type(linearized))
    other.__setstate__(state)
    assert isinstance(other.plans, Plans)
    torch.testing.assert_close(other.kernel()(x), linearized.kernel()(x))


def test_what_is_found_out_once_is_found_anew_for_other_shapes_and_parameters() -> None:
    linearized, x = linearize(network()), inputs()
    asked: list[int] = []

    def find(known, points) -> int:
        asked.append(len(points))
        return len(asked)

    for _ in range(2):
        plan(linearized, x)
        assert once(linearized, x, find) == 1
    plan(linearized, x[:, None])
    assert once(linearized, x[:, None], find) == 2
    linearized.params["0.weight"].mul_(2.0)
    plan(linearized, x)
    assert once(linearized, x, find) == 3
    assert asked == [3, 3, 3]


def test_nothing_is_kept_alive_by_what_is_known() -> None:
    linearized = linearize(network())
    plan(linearized, inputs())
    assert not any(
        span.storage() for known in linearized.plans for spans in known.seen for span in spans
    )
    values = [ref() for known in linearized.plans for ref, _ in known.values]
    assert all(value is own for value, own in zip(values, linearized.params.values(), strict=True))
    moved = replace(linearized, params={n: v.clone() for n, v in linearized.params.items()})
    plan(moved, inputs())
    del moved
    newest = list(linearized.plans)[-1]
    assert all(ref() is None for ref, _ in newest.values)


def test_what_a_point_takes_is_measured_once_and_the_same_in_inference_mode() -> None:
    sizes: list[int] = []

    def forward(self, x):
        sizes.append(len(x))
        return self.layer(x).repeat(1, 100).sin().unflatten(1, (100, 2)).sum(1)

    torch.manual_seed(0)
    module = Apply(forward, layer=nn.Linear(2, 2)).double().eval()
    linearized, x = linearize(module), inputs()
    with torch.inference_mode():
        there = capacity(linearized, inputs(), 2**20)
    plan(linearized, x)
    assert there == capacity(linearized, x, 2**20)
    # 200 numbers that the sine keeps, less the six parameters, and the layer's input
    assert there == 2**20 // (4 * 8 * (200 - 6 + 2))
    sizes.clear()
    assert capacity(linearized, inputs(seed=1), 2**20) == there
    assert sizes == []
