"""Features that are kept for a block are those that a pass would give, and are computed once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import net2gp as n2g
from net2gp.linear.curvatures.head import features_and_outputs, last_linearized
from net2gp.linear.curvatures.kept_features import keeping_features, kept, kept_outputs
from net2gp.methods.laplace_approximation import matching, task
from net2gp.posteriors.recipes import seen


class Counted(nn.Module):
    """A classifier that counts the points that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(3, 8).double(), nn.Linear(8, 4).double()
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += len(x)
        return self.head(self.body(x).tanh())


def points(count: int) -> Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_slices_of_the_points_are_computed_once_and_as_without_a_block():
    network, x = Counted().eval(), points(20)
    head = last_linearized(n2g.linearize(network), x)
    parts = [slice(0, 7), slice(5, 12), slice(12, 20), slice(3, 15)]
    plain = [features_and_outputs(head, x[part]) for part in parts]
    network.count = 0
    with keeping_features(x):
        found = [features_and_outputs(head, x[part]) for part in parts]
        assert network.count == 7 + 7 + 8  # the last slice is known
        known = kept_outputs(head, x)
        assert known is not None
        torch.testing.assert_close(known, network(x).detach())
    assert kept(head, x) is None
    for one, other in zip(found, plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    "case", ["changed", "copied", "every second", "other parameters", "no block"]
)
def test_what_is_not_the_same_is_computed_again(case):
    network, x = Counted().eval(), points(20)
    head = last_linearized(n2g.linearize(network), x)
    with keeping_features(None if case == "no block" else x):
        features_and_outputs(head, x)
        asked = {"copied": x.clone(), "every second": x[::2]}.get(case, x)
        if case == "changed":
            x[0] += 1
        if case == "other parameters":
            with torch.no_grad():
                network.body.weight += 1
            head = last_linearized(n2g.linearize(network), x)
        else:
            assert kept(head, asked) is None
        _, f = features_and_outputs(head, asked)
    torch.testing.assert_close(f, network(asked))


def test_features_of_points_with_gradients_are_not_kept():
    x = points(5).requires_grad_()
    head = last_linearized(n2g.linearize(Counted().eval()), x)
    with keeping_features(x):
        phi, _ = features_and_outputs(head, x)
        assert phi.requires_grad
        assert kept(head, x) is None


@pytest.mark.filterwarnings("ignore::net2gp.errors.NotStationary")
def test_a_last_layer_takes_one_pass_over_its_points_and_one_to_predict(monkeypatch):
    monkeypatch.setattr(seen, "MOST_PARAMETERS", 1)
    monkeypatch.setattr(matching, "FEW_SHARES", 50)
    network, new, counts = Counted().eval(), points(600), []
    for number in (4000, 7000):
        x, network.count = points(number), 0
        posterior = n2g.laplace(
            network,
            (x, torch.arange(number) % 4),
            n2g.Categorical(),
            structure=n2g.LastLayer(),
            tuning=n2g.tuning.Matched(num_points=50),
        )
        counts.append(network.count)
    assert counts[1] - counts[0] == 3000
    assert counts[0] < 4000 + 600  # what is looked at and matched at some of the points
    posterior.predict(new[:1])
    network.count = 0
    posterior.predict(new)
    assert network.count == len(new)


@pytest.mark.filterwarnings("ignore::net2gp.errors.NotStationary")
def test_a_large_classifier_has_its_last_layer_as_the_default(monkeypatch):
    network, x = Counted().eval(), points(1100)
    y = torch.arange(len(x)) % 4
    monkeypatch.setattr(task, "SMALL_FULL", 10)
    before = n2g.laplace(network, (x, y), n2g.Categorical())
    monkeypatch.setattr(task, "MOST_PARAMETERS", 10)
    chosen = lambda **options: n2g.laplace(network, (x, y), **options).structure
    assert isinstance(before.structure, n2g.Kron)
    assert isinstance(chosen(likelihood=n2g.Categorical()), n2g.LastLayer)
    own = n2g.Categorical(n2g.links.Probit())
    assert isinstance(chosen(likelihood=own), n2g.Kron)
    assert isinstance(chosen(likelihood=n2g.Categorical(), only="body.*"), n2g.Kron)
