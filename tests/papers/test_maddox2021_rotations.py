"""Angles of turned pictures: what is turned, who sees what, and what is said of it."""

import importlib
import math
import sys
from pathlib import Path

import pytest
import torch

import net2gp as n2g

FOLDER = Path(__file__).parents[2] / "papers" / "maddox2021"


@pytest.fixture(scope="module")
def program():
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module("rotations")
    finally:
        sys.path.remove(str(FOLDER))


def pictures(count=6, size=12):
    return torch.rand(count, 1, size, size, generator=torch.Generator().manual_seed(0))


def small(program, **keywords):
    """A few distinct levels of gray for each of the pictures, so that they can be told apart."""
    source, target = (torch.linspace(a, a + 0.4, 40)[:, None, None, None] for a in (0.0, 0.6))
    both = source.expand(-1, 1, 12, 12), target.expand(-1, 1, 12, 12)
    return program.Transfer("gray", lambda seed: both, **keywords)


def disk(size):
    place = (torch.arange(size) + 0.5) * 2 / size - 1
    return place[:, None] ** 2 + place**2 <= 1


def test_a_picture_turned_by_nothing_is_itself_inside_the_disk(program):
    x = pictures()
    torch.testing.assert_close(program.turned(x, torch.zeros(6)), x * disk(12))


def test_a_right_angle_is_that_of_rot90(program):
    x = pictures()
    expected = x.rot90(1, (-2, -1)) * disk(12)
    torch.testing.assert_close(program.turned(x, torch.full((6,), 90.0)), expected)


def test_the_disk_does_not_tell_the_angle(program):
    x = torch.ones(5, 1, 12, 12)
    found = program.turned(x, torch.tensor([-45.0, -20.0, 0.0, 10.0, 45.0]))
    torch.testing.assert_close(found, found[:1].expand_as(found))


def test_angles_are_uniform_and_in_units_of_their_standard_deviation(program):
    _, y = program.task(pictures(), 20_000, 1, torch.Generator().manual_seed(1))
    assert float(y.abs().max()) <= 3**0.5
    assert float(y.std()) == pytest.approx(1.0, rel=0.02)
    assert float(y.mean()) == pytest.approx(0.0, abs=0.03)


def test_no_picture_is_in_two_parts(program):
    parts = program.problem(small(program), 0, program.Options(sizes=(10, 30)))
    levels = [
        {round(v, 4) for v in part[0].amax((1, 2, 3)).tolist()}
        for part in (parts.train, parts.held_out, parts.few, parts.test)
    ]
    assert len(parts.few[0]) == 30
    assert sum(len(one) for one in levels) == len(set().union(*levels)) == 80


def test_repetitions_are_reproducible_and_differ(program):
    options = program.Options(sizes=(10,))
    first, again, other = (program.problem(small(program), s, options) for s in (0, 0, 1))
    assert torch.equal(first.few[1], again.few[1])
    assert not torch.equal(first.few[1], other.few[1])


def test_the_networks_last_layer_is_the_one_that_is_called_so(program):
    for size in (12, 14, 16):
        network = program.untrained(size, 0)
        assert network(pictures(size=size)).shape == (6, 1)
        names = [name for name, _ in network.named_parameters()]
        assert [name for name in names if name.startswith(program.LAST)] == names[-2:]


def test_a_network_has_the_variance_of_its_residuals_or_the_floor(program):
    network = program.untrained(12, 0).requires_grad_(False)
    x, y = pictures(), torch.ones(6, 1)
    error = float((network(x) - y).square().mean())
    for floor in (0.5 * error, 2 * error):
        mean, variance = program.of_network(network, (x, y), floor)(x)
        torch.testing.assert_close(mean, network(x))
        torch.testing.assert_close(variance, torch.full((6, 1), max(error, floor)))


def test_the_process_of_pixels_is_that_of_their_mean_far_away(program):
    x, y = pictures(12), torch.linspace(0, 2, 12)[:, None]
    mean, variance = program.of_pixels((x, y))(100 + pictures(2))
    torch.testing.assert_close(mean, torch.ones(2, 1), atol=1e-4, rtol=0)
    assert float(variance.min()) > 0.01


def test_every_method_is_scored_in_degrees(program, monkeypatch):
    monkeypatch.setattr(program, "NUM_SOURCE", 100)
    options = program.Options(repeats=2, steps=3, tuning_steps=2, sizes=(5, 10), tests=30)
    scores, source = program.score(small(program), options)
    assert set(scores.values) <= set(program.STYLES)
    assert source.shape == (2,)
    for name, values in scores.values.items():
        assert values.shape == (2, 2, 3), name
        assert bool(values.isfinite().all()), name
    # all pictures of a gray disk look the same: nothing can be better than the angles' own spread
    alone = scores.values["source network"][..., :2]
    assert float(alone[..., 0].min()) > 0.7 * program.SPREAD
    assert float(alone[..., 1].min()) > math.log(program.SPREAD)


def test_claims_are_about_transfers_and_methods(program):
    network, start = (program.untrained(12, seed) for seed in (0, 1))
    known = set(program.methods(network, start, 0.1, 1))
    numbers = program.maps.claims.stated(program.__file__)
    for rivals in numbers["claim"].values():
        assert set(rivals) <= known - {program.GP}
    assert set(numbers["exception"]) <= set(program.TRANSFERS)
    for measures in numbers["exception"].values():
        for measure, reasons in measures.items():
            assert set(reasons) <= set(numbers["claim"][measure])


def test_transfers_without_their_data_are_left_out(program, monkeypatch, capsys, tmp_path):
    monkeypatch.delenv("NET2GP_DATA", raising=False)
    assert program.run(["faces"], program.OPTIONS, tmp_path)
    assert "faces left out" in capsys.readouterr().out
    with pytest.raises(n2g.errors.InputError):
        program.faces()


def test_too_few_repetitions_are_refused(program, capsys):
    with pytest.raises(SystemExit):
        program.main(["--repeats", "2"])
    assert "at least 3" in capsys.readouterr().err
