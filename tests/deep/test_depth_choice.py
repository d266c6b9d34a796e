"""The number of layers, chosen by the bound: laws of the choice, files and refusals."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import net2gp as n2g
from net2gp import Gaussian
from net2gp.deep import Ascent, fit, sghmc
from net2gp.deep.inference import ascent as loop
from net2gp.deep.inference import fit as fits
from net2gp.deep.inference import problem
from net2gp.errors import InputError
from net2gp.posteriors.writing import digest

QUICK = Ascent(num_steps=6, num_inducing=6, num_draws=10, num_samples=2, look_every=3)

ENOUGH = Ascent(
    num_steps=100, num_inducing=10, num_samples=4, learning_rate=0.1, starts=("shallow",)
)
"""As many steps as two layers need to follow a step."""


def data_of(function) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.linspace(-2, 2, 40, dtype=torch.float64)[:, None]
    return x, function(x) + 0.05 * torch.randn(40, 1, generator=generator, dtype=torch.float64)


def a_step(x: torch.Tensor) -> torch.Tensor:
    return (x > 0).double()


def a_line(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x


def with_bounds(monkeypatch, *bounds: float) -> None:
    """Let fits of one layer, two layers and so on have these bounds."""

    def bound(asked, stack, ascent):
        return torch.tensor(bounds[len(asked.layers) - 1], dtype=torch.float64)

    monkeypatch.setattr(fits, "final_bound", bound)


@pytest.mark.parametrize(
    ("bounds", "chosen", "tried"),
    [
        ((3.0, 2.0, 9.0, 9.0, 9.0), 1, 2),
        ((1.0, 2.0, 3.0, 2.5, 9.0), 3, 4),
        ((1.0, 2.0, 2.0, 9.0, 9.0), 2, 3),
        ((1.0, 2.0, 3.0, 4.0, 5.0), 5, 5),
    ],
)
def test_layers_are_added_as_long_as_the_bound_grows(monkeypatch, bounds, chosen, tried):
    with_bounds(monkeypatch, *bounds)
    posterior = fit(None, data_of(a_line), Gaussian(), ascent=replace(QUICK, num_steps=1))
    assert len(posterior.process.layers) == chosen
    assert posterior.recipe.depth_bounds == bounds[:tried]
    assert float(posterior.log_marginal_likelihood()) == max(bounds[:tried])
    assert len(bounds) == fits.MOST_LAYERS


def test_a_line_is_one_layer():
    posterior = fit(None, data_of(a_line), Gaussian(), ascent=ENOUGH)
    assert len(posterior.process.layers) == 1
    assert len(posterior.recipe.depth_bounds) == 2


def test_a_step_is_more_than_one_layer_and_the_fit_is_that_of_the_chosen_number(monkeypatch):
    monkeypatch.setattr(fits, "MOST_LAYERS", 2)
    data = data_of(a_step)
    posterior = fit(None, data, Gaussian(), ascent=ENOUGH)
    bounds, depth = posterior.recipe.depth_bounds, len(posterior.process.layers)
    assert depth > 1
    assert bounds[depth - 1] == max(bounds) == float(posterior.log_marginal_likelihood())
    same = fit(depth, data, Gaussian(), ascent=ENOUGH)
    assert torch.equal(posterior.mean(data[0]), same.mean(data[0]))
    assert same.recipe.depth_bounds == ()
    assert f"method=deep.fit (best of {len(bounds)} depths)" in repr(posterior)
    assert "method=deep.fit," in repr(same)


def test_it_works_with_classes_and_reads_a_loader_once(monkeypatch):
    x, _ = data_of(a_line)
    labels = (x[:, 0] > 0).long() + (x[:, 0] > 1).long()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, labels), batch_size=10)
    passes = []
    gathered = problem.gather
    monkeypatch.setattr(problem, "gather", lambda data: (passes.append(data), gathered(data))[1])
    posterior = fit(None, loader, n2g.Categorical(), ascent=QUICK)
    assert len(posterior.recipe.depth_bounds) >= 2
    assert [data is loader for data in passes].count(True) == 1
    assert posterior.predict(x).probs.shape == (40, 3)


def test_chains_start_from_the_chosen_fit(monkeypatch):
    with_bounds(monkeypatch, 1.0, 2.0, 1.0)
    posterior = fit(None, data_of(a_line), Gaussian(), ascent=QUICK)
    drawn = sghmc(posterior, num_draws=1, num_chains=2, warmup=2, thin=1)
    assert len(drawn.process.layers) == 2


class Killed(Exception):
    """Stands for a process that ends."""


def test_a_killed_choice_goes_on_to_the_same_result(tmp_path, monkeypatch):
    data, path = data_of(a_line), tmp_path / "fit.safetensors"
    with_bounds(monkeypatch, 1.0, 2.0, 1.0)
    whole = fit(None, data, Gaussian(), ascent=QUICK)
    kept = replace(QUICK, checkpoint=path, checkpoint_seconds=0.0)
    taken: list[tuple[int, int]] = []
    step = loop.Climb._one
    deadly = True

    def one(climb):
        now = (len(climb.stack.plans), climb.step)
        if deadly and now == (2, 4):
            raise Killed
        taken.append(now)
        return step(climb)

    monkeypatch.setattr(loop.Climb, "_one", one)
    with pytest.raises(Killed):
        fit(None, data, Gaussian(), ascent=kept)
    before = set(taken)
    deadly = False
    taken.clear()
    for steps_are_left in (True, False):
        resumed = fit(None, data, Gaussian(), ascent=kept)
        assert bool(taken) == steps_are_left
        assert not before & set(taken)
        assert torch.equal(resumed.mean(data[0]), whole.mean(data[0]))
        assert torch.equal(resumed.recipe.bounds, whole.recipe.bounds)
        assert resumed.recipe.depth_bounds == whole.recipe.depth_bounds == (1.0, 2.0, 1.0)
        taken.clear()
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == [f"fit_{depth}.safetensors" for depth in (1, 2, 3)]


def test_a_second_call_answers_from_the_checkpoints_of_all_depths(tmp_path):
    data = data_of(a_line)
    kept = replace(QUICK, checkpoint=tmp_path / "fit")
    first, second = (fit(None, data, Gaussian(), ascent=kept) for _ in range(2))
    assert first.recipe.depth_bounds == second.recipe.depth_bounds
    assert torch.equal(first.mean(data[0]), second.mean(data[0]))
    with pytest.raises(InputError, match="belongs to another problem"):
        fit(None, data, Gaussian(), ascent=replace(kept, learning_rate=0.01))


def test_a_file_keeps_the_bounds_of_all_depths_and_older_files_load(tmp_path):
    data = data_of(a_line)
    posterior = fit(None, data, Gaussian(), ascent=QUICK)
    new, old = tmp_path / "new.safetensors", tmp_path / "old.safetensors"
    posterior.save(new)
    loaded = n2g.load(new)
    assert loaded.recipe.depth_bounds == posterior.recipe.depth_bounds
    assert posterior.to(dtype=torch.float32).recipe.depth_bounds == posterior.recipe.depth_bounds
    with safe_open(new, framework="pt") as file:
        header, names = file.metadata(), list(file.keys())
        tensors = {name: file.get_tensor(name) for name in names}
    tree = json.loads(header["tree"])
    del tree["fields"]["recipe"]["fields"]["depth_bounds"]
    header["tree"] = json.dumps(tree)
    header["sha256"] = digest(tensors, header["version"] + header["tree"])
    save_file(tensors, old, metadata=header)
    older = n2g.load(old)
    assert older.recipe.depth_bounds == ()
    assert torch.equal(older.mean(data[0]), posterior.mean(data[0]))


def test_what_cannot_choose_is_refused(tmp_path):
    data = data_of(a_line)
    with pytest.raises(InputError, match=r"has no bound that could choose it\. Pass a number"):
        fit(None, data, Gaussian(), ascent=replace(QUICK, objective="predictive"))
    with pytest.raises(InputError, match="is a folder"):
        fit(None, data, Gaussian(), ascent=replace(QUICK, checkpoint=tmp_path))
    assert not list(tmp_path.iterdir())
