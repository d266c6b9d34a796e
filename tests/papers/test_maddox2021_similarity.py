"""Whether similar tasks have similar Jacobians: the pairs that are compared, and what is said of them."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from shared_data import shared_data


@pytest.fixture(scope="module")
def program():
    path = Path(__file__).parents[2] / "papers" / "maddox2021" / "similarity.py"
    spec = importlib.util.spec_from_file_location("papers_maddox2021_similarity", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def task(program, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(40, 1, 28, 28, generator=generator)
    y = torch.randint(0, 10, (40,), generator=generator)
    return program.Task((x[:30], y[:30]), (x[30:], y[30:]))


@pytest.fixture(scope="module")
def comparisons(program):
    tasks = {name: task(program, seed) for seed, name in enumerate(program.READERS)}
    options = program.Options(seeds=3, steps=2, images=6, batch=8)
    return {one.words: one for one in program.compare(tasks, options)}


def test_every_setting_is_compared_for_every_seed(program, comparisons):
    assert len(comparisons) == len(program.MEASURES) * 2 * 2 * 2
    assert all(one.values.shape == (3, 3, 3) for one in comparisons.values())
    assert all(bool(((one.values >= 0) & (one.values <= 1)).all()) for one in comparisons.values())


def test_untrained_networks_from_one_start_differ_by_their_images_alone(program, comparisons):
    for measure in program.MEASURES:
        common = comparisons[f"{measure}, untrained, common images, same start"]
        own = comparisons[f"{measure}, untrained, own images, same start"]
        torch.testing.assert_close(common.values, torch.ones(3, 3, 3, dtype=torch.float64))
        assert float(own.pair("KMNIST").max()) < 1 - 1e-6


def test_a_network_is_compared_with_itself_only_from_the_same_start(comparisons):
    for words, one in comparisons.items():
        same = bool((one.values.diagonal(dim1=1, dim2=2) > 1 - 1e-12).all())
        assert same == ("same start" in words)


def test_the_margin_is_of_mnist(program):
    values = torch.tensor([[[1.0, 0.7, 0.2], [0.7, 1.0, 0.3], [0.2, 0.3, 1.0]]])
    one = program.Comparison("Jacobian", "trained", "own", "same", values)
    torch.testing.assert_close(one.margin, torch.tensor([0.5]))


def test_a_margin_has_a_verdict_only_beyond_its_error(program):
    steady = torch.tensor([0.20, 0.21, 0.19], dtype=torch.float64)
    assert program.verdict(steady) == "holds"
    assert program.verdict(-steady) == "reversed"
    assert program.verdict(steady * torch.tensor([1.0, -1.0, 2.0])) == "undecided"
    # t with two degrees of freedom: 4.30 standard errors at 95 %
    mean, error = program.mean_and_error(steady)
    for factor, word in ((4.2, "undecided"), (4.4, "holds")):
        moved = steady - mean + factor * error
        assert program.verdict(moved) == word
    assert program.verdict(torch.zeros(3)) == "undecided"


def test_claims_are_about_settings_that_are_compared(program, comparisons, capsys):
    numbers = program.claims.stated(program.__file__)
    assert set(numbers["claim"]) <= set(comparisons)
    assert set(numbers["exception"]) <= set(numbers["claim"])
    # images of noise, with labels at random
    assert not program.agrees(list(comparisons.values()), quick=False)
    assert " NO\n" in capsys.readouterr().out


def test_too_few_seeds_are_refused(program, capsys):
    with pytest.raises(SystemExit):
        program.main(["--seeds", "2"])
    assert "at least 3" in capsys.readouterr().err


@pytest.mark.slow
def test_claims_come_out_as_stated_and_the_figures_are_drawn(
    program, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("NET2GP_DATA", str(shared_data()))
    assert program.main(["--out", str(tmp_path)]) == 0, capsys.readouterr()
    for measure in program.MEASURES:
        name = measure.lower().replace(" ", "_")
        assert (tmp_path / f"maddox2021_similarity_{name}.png").stat().st_size > 20_000
