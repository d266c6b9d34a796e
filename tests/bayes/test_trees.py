"""The trees of NUTS that look back after several leapfrog steps, against looks after every step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from net2gp.bayes import bulk_ess
from net2gp.bayes.chains import nuts as nuts_module
from net2gp.bayes.chains import perceptrons, runs
from net2gp.bayes.chains.flat import flat_model
from net2gp.bayes.chains.nuts import NEVER, STRIDES, Trees, nuts
from net2gp.bayes.chains.perceptrons import array_perceptron
from net2gp.bayes.model.model import Model
from net2gp.errors import InputError
from net2gp.likelihoods import Gaussian


def turns_by_definition(p: np.ndarray) -> int:
    """The first leaf that completes a balanced subtree which turns around, of momenta (leaves, P)."""
    for last in range(len(p)):
        size = 2
        while (last + 1) % size == 0:
            part = p[last + 1 - size : last + 1]
            rho = part.sum(0) - 0.5 * (part[0] + part[-1])
            if rho @ part[0] <= 0 or rho @ part[-1] <= 0:
                return last
            size *= 2
    return NEVER


@pytest.mark.parametrize("count", STRIDES)
@pytest.mark.parametrize("seed", range(4))
def test_turns_are_found_at_the_same_leaf_whatever_the_steps_between_looks(count, seed):
    depth, chains, size = 5, 6, 3
    generator = np.random.default_rng(seed)
    # momenta that turn slowly, so that turns come in subtrees of all sizes
    angle = generator.uniform(0.02, 0.4, (1, chains)) * np.arange(2**depth)[:, None]
    p = np.stack([np.cos(angle), np.sin(angle), np.zeros_like(angle)], 2)
    p += 0.05 * generator.standard_normal(p.shape)
    expected = np.array([turns_by_definition(p[:, chain]) for chain in range(chains)])
    sums = p.cumsum(0)
    state = {
        "kept": np.full((chains, depth + 1, 2, size), np.nan),
        "path": np.zeros((count, chains, 4, size)),
    }
    found = np.full(chains, NEVER)
    for start in range(0, 2**depth, count):
        state["leaf"] = np.full(chains, start)
        state["path"][:, :, 2] = p[start : start + count]
        state["path"][:, :, 3] = sums[start : start + count]
        turn = Trees(max_depth=depth)._turn(state, np.full(chains, count))
        found = np.where((found == NEVER) & (turn < NEVER), start + turn, found)
    assert (found == expected).all()
    assert len(set(expected)) > 1


def test_a_leaf_is_chosen_in_proportion_to_its_weight():
    gain = np.log(np.array([[0.5], [0.0], [1.5], [1.0]]) + 1e-300)
    grid = (np.arange(4000) + 0.5) / 4000
    chains = len(grid)
    state = {
        "part.weight": np.zeros(chains), "part": np.full((chains, 2, 1), -1.0),
        "part.value": np.full(chains, -1.0),
        "path": np.arange(4.0)[:, None, None, None] * np.ones((4, chains, 4, 1)),
    }  # fmt: skip
    value = np.arange(4.0)[:, None] * np.ones((4, chains))
    nuts_module._choose(state, value, np.repeat(gain, chains, 1), np.log(grid))
    share = [(state["part.value"] == leaf).mean() for leaf in (-1, 0, 1, 2, 3)]
    np.testing.assert_allclose(share, np.array([1, 0.5, 0, 1.5, 1]) / 4, atol=1e-3)
    np.testing.assert_allclose(state["part.weight"], np.log(4))
    assert (state["part"][:, 0, 0] == state["part.value"]).all()


@pytest.mark.parametrize("look", [0.0, 100.0], ids=["each step", "sixteen steps"])
def test_the_law_of_draws_does_not_depend_on_the_steps_between_looks(look, monkeypatch):
    monkeypatch.setattr(runs.Run, "_look", lambda self: look)
    x = torch.linspace(-1, 1, 9, dtype=torch.float64)[:, None]
    posterior = nuts(
        nn.Linear(1, 1).double(), (x, 2 * x), Gaussian(noise_var=0.5),
        num_draws=200, num_chains=16, warmup=100,
    )  # fmt: skip
    design = torch.cat([x, torch.ones_like(x)], 1)
    precision = design.mT @ design / 0.5 + torch.eye(2, dtype=torch.float64)
    mean = torch.linalg.solve(precision, design.mT @ (2 * x) / 0.5).flatten()
    draws = torch.cat([v.flatten(1) for v in posterior.process.members.values.values()], 1)
    ess = bulk_ess(draws.reshape(16, 200, 2))
    exact = torch.linalg.inv(precision).diagonal()
    assert float(((draws.mean(0) - mean).abs() / (exact / ess).sqrt()).max()) < 4
    assert float((draws.var(0) / exact).log().abs().max()) < 4 * (3 / float(ess.min())) ** 0.5


@pytest.mark.parametrize("layers", ["deep", "no bias", "input", "end"])
def test_the_program_of_a_perceptron_is_its_log_joint_for_one_and_for_many_groups(
    layers, monkeypatch
):
    torch.manual_seed(0)
    network = {
        "deep": [nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)],
        "no bias": [nn.Linear(2, 3, bias=False), nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)],
        "input": [nn.Tanh(), nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1, bias=False)],
        "end": [nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2), nn.Tanh()],
    }[layers]
    x = torch.randn(5, 2)
    y = torch.randn(5, 2 if layers in ("deep", "end") else 1)
    model = Model.of(nn.Sequential(*network), Gaussian(noise_var=0.3), 2.0, temperature=0.5)
    flat = flat_model(model, (x, y))
    theta = torch.randn(7, flat.num_params, dtype=torch.float64)
    with flat.running():
        expected = flat(theta)
    for cached in (2**15, 30):
        monkeypatch.setattr(perceptrons, "CACHED", cached)
        found = array_perceptron(flat)
        for _ in range(2):
            for own, other in zip(found(theta.numpy()), expected, strict=True):
                np.testing.assert_allclose(own, other, rtol=1e-11, atol=1e-11)


def test_a_tree_ends_at_its_largest_depth():
    x = torch.linspace(-1, 1, 5, dtype=torch.float64)[:, None]
    layer = nn.Linear(1, 1).double()
    options = {"num_draws": 20, "num_chains": 2, "warmup": 0, "step_size": 1e-6}
    for depth in (1, 3, 5):
        found = nuts(layer, (x, x), Gaussian(0.1), max_depth=depth, **options)
        # steps this short never turn around, so every tree grows to its limit
        assert (found.recipe.statistics["gradients"] >= 20 * (2**depth - 1)).all()
        assert (found.recipe.statistics["gradients"] <= 20 * (2**depth + max(STRIDES))).all()
    for wrong in (0, 2.5, 40):
        with pytest.raises(InputError, match="max_depth"):
            nuts(layer, (x, x), Gaussian(0.1), max_depth=wrong, **options)
