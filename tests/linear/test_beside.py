"""A last layer is taken only if nothing else that has parameters reaches the output beside it."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import net2gp as n2g
from architectures import Apply
from net2gp.errors import NetworkError
from net2gp.linear.curvatures.head import features_and_outputs, last_linearized
from reference.jacobians import brute_force_jacobian, flat

N = 12


def body() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh())


def parts(**heads: int) -> dict[str, nn.Module]:
    return {"body": body(), **{name: nn.Linear(6, size) for name, size in heads.items()}}


def mean_and_scale(self, x: Tensor) -> Tensor:
    h = self.body(x)
    return torch.cat([self.mean(h), self.scale(h)], 1)


def tasks(self, x: Tensor) -> Tensor:
    h = self.body(x)
    return torch.cat([self.a(h), self.b(h), self.c(h)], 1)


def chosen(self, x: Tensor) -> Tensor:
    h = self.body(x)
    return torch.where(x[:, :1] > 0, self.a(h), self.b(h))


def routed(self, x: Tensor) -> Tensor:
    h, own = self.body(x), x[:, 0] > 0
    out = x.new_zeros(len(x), 1)
    if own.any():
        out[own] = self.a(h[own])
    if not own.all():
        out[~own] = self.b(h[~own])
    return out


def mixed(self, x: Tensor) -> Tensor:
    h, weights = self.body(x), self.gate(x).softmax(1)
    return weights[:, :1] * self.a(h) + weights[:, 1:] * self.b(h)


def averaged(self, x: Tensor) -> Tensor:
    h = self.body(x)
    return (self.a(h) + self.b(h)) / 2


def dueling(self, x: Tensor) -> Tensor:
    h = self.body(x)
    advantage = self.advantage(h)
    return self.value(h) + advantage - advantage.mean(1, keepdim=True)


SEVERAL = {
    "mean and scale": (mean_and_scale, parts(mean=1, scale=1), "scale", ["mean"]),
    "tasks": (tasks, parts(a=1, b=2, c=1), "c", ["a", "b"]),
    "where": (chosen, parts(a=1, b=1), "b", ["a"]),
    "experts": (routed, parts(a=1, b=1), "b", ["a"]),
    "soft experts": (mixed, {**parts(a=1, b=1), "gate": nn.Linear(3, 2)}, "b", ["a", "gate"]),
    "ensemble": (averaged, parts(a=1, b=1), "b", ["a"]),
    "wide and deep": (
        lambda self, x: self.deep(self.body(x)) + self.skip(x),
        {**parts(deep=1), "skip": nn.Linear(3, 1)},
        "skip",
        ["deep"],
    ),
    "dueling": (dueling, parts(value=1, advantage=3), "value", ["advantage"]),
}


def points() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 3, generator=generator, dtype=torch.float64)
    x[0] = -x[0].abs()  # the expert of the first point is b
    x[1] = x[1].abs()
    return x


@pytest.mark.parametrize("case", SEVERAL.values(), ids=SEVERAL.keys())
def test_several_heads_are_refused_and_the_way_out_has_them_all(case) -> None:
    forward, modules, head, others = case
    network, x = Apply(forward, **modules).double().eval(), points()
    shown = ", ".join(f"'{name}'" for name in others)
    only = [f"{name}.*" for name in (head, *others)]
    listed = ", ".join(rf"'{name.replace('.*', '[.][*]')}'" for name in only)
    message = (
        rf"found '{head}', but {shown} reach the output beside it.*"
        rf"only=\[{listed}\] and structure=Full\(\) or Kron\(\).*to take '{head}' alone"
    )
    y = network(x).detach()
    with pytest.raises(NetworkError, match=message):
        n2g.laplace(network, (x, y), n2g.Gaussian(0.1), prior_var=1.0, structure=n2g.LastLayer())
    posterior = n2g.laplace(
        network, (x, y), n2g.Gaussian(0.1), prior_var=1.0, only=only, structure=n2g.Full()
    )
    assert bool((posterior.marginal(x).variance > 1e-6).all())


def test_one_point_of_another_expert_is_enough_to_refuse() -> None:
    torch.manual_seed(0)
    network = Apply(routed, **parts(a=1, b=1)).double().eval()
    x = -torch.rand(300, 3, dtype=torch.float64)
    assert list(last_linearized(n2g.linearize(network), x).params) == ["b.weight", "b.bias"]
    x[101, 0] = 1.0
    with pytest.raises(NetworkError, match="found 'b', but 'a' reach the output beside it"):
        last_linearized(n2g.linearize(network), x)


def test_more_than_four_layers_beside_it_are_counted() -> None:
    heads = [f"h{index}" for index in range(6)]
    forward = lambda self, x: torch.cat([getattr(self, name)(self.body(x)) for name in heads], 1)
    network = Apply(forward, **parts(**dict.fromkeys(heads, 1))).double().eval()
    message = r"found 'h5', but 'h0', 'h1', 'h2', 'h3', … \(5 in all\) .* Pass structure=Kron\(\)"
    with pytest.raises(NetworkError, match=message):
        last_linearized(n2g.linearize(network), points())


def test_a_free_parameter_beside_the_head_is_named_as_it_is() -> None:
    network = Apply(lambda self, x: self.head(self.body(x)) + self.shift, **parts(head=1))
    network.shift = nn.Parameter(torch.zeros(1))
    message = r"found 'head', but 'shift' reach .* only=\['head\.\*', 'shift'\]"
    with pytest.raises(NetworkError, match=message):
        last_linearized(n2g.linearize(network.double().eval()), points())


def test_outputs_that_the_head_does_not_move_are_refused() -> None:
    forward = lambda self, x: torch.cat([self.mean(self.body(x)), x[:, :2]], 1)
    network = Apply(forward, **parts(mean=1)).double().eval()
    message = r"found 'mean', on which 2 of the 3 outputs do not depend \(index 1, 2\)\. Pick the"
    with pytest.raises(NetworkError, match=message):
        last_linearized(n2g.linearize(network), points())


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: x.sum(1, keepdim=True) + self.head(self.body(x)),
        lambda self, x: (1 + x[:, :1] ** 2) * self.head(self.body(x)),
    ],
    ids=["skip of the input", "scale by the input"],
)
def test_what_has_no_parameters_may_be_beside_the_head(forward) -> None:
    torch.manual_seed(0)
    network, x = Apply(forward, **parts(head=1)).double().eval(), points()
    y = network(x).detach()
    posterior = n2g.laplace(
        network, (x, y), n2g.Gaussian(0.1), prior_var=1.0, structure=n2g.LastLayer()
    )
    own = {n: v for n, v in brute_force_jacobian(network, x).items() if n.startswith("head")}
    J = flat(own)[:, 0]
    S = torch.linalg.inv(J.mT @ J / 0.1 + torch.eye(7, dtype=torch.float64))
    torch.testing.assert_close(posterior.marginal(x).variance[:, 0], (J @ S * J).sum(1))


def test_points_that_are_routed_past_the_head_have_no_features() -> None:
    def forward(self, x):
        own, out = x[:, 0] > 0, x.new_zeros(len(x), 1)
        if own.any():
            out[own] = self.head(self.body(x[own]))
        return out

    network, x = Apply(forward, **parts(head=1)).double().eval(), points().abs()
    found = last_linearized(n2g.linearize(network), x)
    phi, out = features_and_outputs(found, -x)
    assert torch.equal(phi, torch.zeros(N, 7, dtype=torch.float64))
    assert torch.equal(out, torch.zeros(N, 1, dtype=torch.float64))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = n2g.laplace(
            network, (x, out + 1), n2g.Gaussian(0.1), prior_var=1.0, structure=n2g.LastLayer()
        )
    assert torch.equal(posterior.marginal(-x).variance, torch.zeros(N, 1, dtype=torch.float64))


@pytest.mark.parametrize(
    "norm",
    [
        nn.utils.parametrizations.weight_norm,
        nn.utils.parametrizations.spectral_norm,
        nn.utils.weight_norm,
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_weight_that_is_computed_from_others_is_no_head(norm) -> None:
    network = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), norm(nn.Linear(6, 1))).double().eval()
    with pytest.raises(NetworkError, match=r"found no layer in whose weights .* only=\['2\.\*'\]"):
        last_linearized(n2g.linearize(network), points())
