"""Transfer between maps: what is compared, on which points, and what is said of it."""

import importlib
import math
import sys
from pathlib import Path

import pytest
import torch

from shared_data import shared_data, shared_reference

FOLDER = Path(__file__).parents[2] / "papers" / "maddox2021"


@pytest.fixture(scope="module")
def programs():
    """maps, map_studies, precipitation and malaria by name."""
    sys.path.insert(0, str(FOLDER))
    names = ("maps", "map_studies", "precipitation", "malaria")
    try:
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(FOLDER))


@pytest.fixture(scope="module")
def maps(programs):
    return programs["maps"]


def surface(x):
    return (x[:, :1] - 40).div(5).sin() + 0.3 * x[:, 1:]


def plane(maps, count=60):
    """From a surface to another that is larger by a half."""
    generator = torch.Generator().manual_seed(0)
    places = [torch.rand(count, 2, generator=generator) * 20 + 30 for _ in range(2)]
    source, target = places
    return maps.Transfer("Plane", "m", (source, surface(source)), [(target, 1.5 * surface(target))])


@pytest.fixture(scope="module")
def trained(maps):
    transfer = plane(maps)
    points = transfer.standardized(transfer.source)
    return transfer, maps.train(maps.untrained(2, seed=0), points, steps=150)


def test_predictions_in_units_undo_the_standardization(maps):
    transfer = plane(maps)
    x, y = transfer.source
    standard_x, standard_y = transfer.standardized((x, y))
    torch.testing.assert_close(standard_y.mean(), torch.tensor(0.0), atol=1e-5, rtol=0)
    torch.testing.assert_close(standard_x.std(0), torch.ones(2))

    def exact(at):
        assert torch.equal(at, standard_x)
        return standard_y, torch.ones_like(standard_y)

    mean, variance = transfer.in_units(exact)(x)
    torch.testing.assert_close(mean, y)
    torch.testing.assert_close(variance.sqrt(), torch.full_like(y, float(y.std())))


def test_points_to_test_at_are_never_learned(maps):
    transfer = plane(maps)
    options = maps.Options(sizes=(5, 20), tests=30)
    (few, _), (rest, _) = transfer.choose(3, options)
    assert (len(few), len(rest)) == (20, 30)
    assert float(torch.cdist(few, rest).min()) > 0
    again, other = transfer.choose(3, options), transfer.choose(4, options)
    assert torch.equal(again[0][0], few)
    assert not torch.equal(other[0][0], few)


def test_every_repetition_has_the_next_target(maps):
    x = torch.rand(40, 2)
    targets = [(x, torch.full((40, 1), float(k))) for k in range(3)]
    transfer = maps.Transfer("Levels", "m", (x, x[:, :1]), targets)
    options = maps.Options(sizes=(10,))
    found = [transfer.choose(k, options)[0][1] for k in range(4)]
    levels = [round(float(y[0]) * transfer.spread + float(x[:, 0].mean())) for y in found]
    assert levels == [0, 1, 2, 0]


def test_tuning_moves_the_chosen_layers_and_is_no_worse_where_it_is_checked(maps, trained):
    transfer, network = trained
    (x, y), _ = transfer.choose(0, maps.Options(sizes=(20,)))
    checked = x[::5], y[::5]
    for only, moving in (("", {"0", "2", "4"}), ("4", {"4"})):
        tuned = maps.tune_network(network, (x, y), only, steps=40)
        pairs = zip(network.named_parameters(), tuned.parameters(), strict=True)
        assert {name[0] for (name, old), new in pairs if not torch.equal(old, new)} == moving
        assert float(maps.surprise(tuned, checked)) < float(maps.surprise(network, checked))


def test_the_published_process_is_the_dense_formula(maps, trained):
    transfer, network = trained
    network = network.double()
    (x, y), (at, _) = transfer.choose(0, maps.Options(sizes=(12,), tests=20))
    x, y, at = x.double(), y.double(), at.double()
    params = dict(network.named_parameters())
    output = lambda p, point: torch.func.functional_call(network, p, (point,))[0]
    jacobian = lambda points: torch.cat(
        [
            v.flatten(1)
            for v in torch.func.vmap(torch.func.grad(output), (None, 0))(params, points).values()
        ],
        1,
    )
    J, Js = jacobian(x), jacobian(at)
    K = J @ J.T + 0.05 * torch.eye(12)
    mean, variance = maps.of_posterior(maps.published(network, (x, y), 0.05))(at)
    torch.testing.assert_close(mean, Js @ J.T @ torch.linalg.solve(K, y), rtol=1e-8, atol=1e-8)
    expected = Js.square().sum(1) - (Js @ J.T @ torch.linalg.inv(K) * (Js @ J.T)).sum(1) + 0.05
    torch.testing.assert_close(variance[:, 0], expected, rtol=1e-6, atol=1e-8)
    network.float()


def test_rbf_processes_return_to_their_base_far_away(maps, trained):
    transfer, network = trained
    (x, y), _ = transfer.choose(0, maps.Options(sizes=(20,)))
    far = torch.tensor([[1e4, -1e4]])
    for base, expected in ((None, y.mean()), (network, network(far)[0, 0])):
        predict = maps.of_rbf((x, y), base)
        mean, variance = predict(far)
        assert float(mean[0, 0]) == pytest.approx(float(expected), abs=1e-4)
        assert float(variance[0, 0]) > float(predict(x)[1].max())


def test_every_method_is_scored_at_every_size(maps, trained):
    transfer, network = trained
    options = maps.Options(repeats=1, tuning_steps=10, sizes=(6, 25))
    makers = maps.methods(network, transfer.standardized(transfer.source), options)
    scores = maps.score(transfer, makers, options)
    assert set(scores.values) == set(importlib.import_module("map_studies").STYLES)
    assert all(
        value.shape == (2, 1, 2) and bool(value.isfinite().all())
        for value in scores.values.values()
    )
    idle = scores.values["source network"]
    assert torch.equal(idle[0], idle[1])
    own = scores.values[maps.GP][..., 0].mean(1)
    assert float(own[1]) < float(idle[1, :, 0].mean()) / 2
    # in the units of the data: the source network by hand
    _, (x, y) = transfer.choose(0, options)
    error = (network(x)[:, :1] - y).square().mean().sqrt() * transfer.spread
    assert float(idle[0, 0, 0]) == pytest.approx(float(error), rel=1e-5)


def test_likelihoods_are_in_the_units_of_the_data(maps):
    """Values in other units, a thousand times as large, shift −log p by log 1000."""
    transfer = plane(maps)
    scaled = maps.Transfer(
        "Plane",
        "mm",
        (transfer.source[0], transfer.source[1] * 1000),
        [(x, y * 1000) for x, y in transfer.targets],
    )
    makers = {"idle": lambda few: maps.of_network(maps.untrained(2, seed=0).requires_grad_(False))}
    options = maps.Options(repeats=1, sizes=(6,))
    one, other = (maps.score(t, makers, options).values["idle"] for t in (transfer, scaled))
    torch.testing.assert_close(other[..., 0], one[..., 0] * 1000, rtol=1e-4, atol=0)
    torch.testing.assert_close(other[..., 1], one[..., 1] + math.log(1000), rtol=1e-4, atol=1e-4)


def test_a_verdict_asks_for_paired_differences_beyond_their_error(maps, capsys, tmp_path):
    base = torch.tensor([1.0, 5.0, 9.0])[None, :, None].repeat(1, 1, 2)
    shift = torch.tensor([0.10, 0.11, 0.12])[None, :, None]
    wild = torch.tensor([1.0, -1.0, 2.0])[None, :, None]
    values = {maps.GP: base, "a": base + shift, "b": base - shift, "c": base + wild}
    scores = maps.Scores((10,), values)
    assert [scores.verdict(name, 10, 0) for name in "abc"] == ["better", "worse", "undecided"]
    (tmp_path / "some.toml").write_text('[claim.nll]\na = "better"\nc = "no worse"\n')
    program = str(tmp_path / "some.py")
    assert maps.compare(program, "Plane", scores, quick=False)
    (tmp_path / "some.toml").write_text('[claim.nll]\nc = "better"\n')
    assert not maps.compare(program, "Plane", scores, quick=False)
    line = capsys.readouterr().out.splitlines()[-2]
    assert line.startswith("Plane, nll, beside c: better")
    assert line.endswith("NO")


def test_the_margin_is_pooled_over_sizes(maps):
    """Twice and eight times our error: four times in the geometric mean; surprise in the plain one."""
    ours = torch.full((2, 3, 2), 0.5)
    theirs = ours * torch.tensor([2.0, 8.0])[:, None, None]
    scores = maps.Scores((10, 20), {maps.GP: ours, "a": theirs})
    torch.testing.assert_close(scores.margin("rmse", "a").exp(), torch.full((3,), 4.0))
    torch.testing.assert_close(scores.margin("nll", "a"), torch.full((3,), 2.0))


def test_the_square_of_a_normal_number_has_these_moments(programs):
    mean, variance = torch.tensor([0.0, 2.0]).double(), torch.tensor([1.0, 0.25]).double()
    found = programs["precipitation"].squared(mean, variance)
    draws = (
        mean
        + variance.sqrt()
        * torch.randn(400_000, 2, generator=torch.Generator().manual_seed(0)).double()
    )
    torch.testing.assert_close(found[0], draws.square().mean(0), rtol=0.01, atol=0)
    torch.testing.assert_close(found[1], draws.square().var(0), rtol=0.02, atol=0)


def test_land_is_where_stations_are_near(programs):
    stations = torch.tensor([[0.0, 0.0], [10.0, 5.0]])
    grid = programs["precipitation"].land(stations, 0.5)
    x, _ = grid.points()
    near = torch.cdist(x, stations).min(1).values
    assert float(near.max()) < 0.8
    cells = torch.cartesian_prod(grid.lon, grid.lat)
    assert int((torch.cdist(cells, stations).min(1).values < 0.8).sum()) == len(x)


def test_a_grid_is_drawn_with_each_value_in_its_cell(programs):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    studies, nan = programs["map_studies"], float("nan")
    values = torch.tensor([[1.0, nan, 2.0], [nan, 3.0, 4.0]])
    grid = programs["malaria"].data.Grid(torch.arange(3.0), torch.arange(2.0), values)
    canvas = studies.Canvas.of(grid)
    figure, ax = pyplot.subplots()
    image = canvas.draw(ax, canvas.x[:, 0] + 10 * canvas.x[:, 1], (0.0, 12.0), "viridis")
    shown = image.get_array().filled(nan).reshape(2, 3)
    assert shown[~values.isnan().numpy()].tolist() == [0, 2, 11, 12]
    pyplot.close(figure)


def test_too_few_repeats_are_refused(programs, capsys):
    program = programs["precipitation"]
    with pytest.raises(SystemExit):
        programs["map_studies"].run_studies(program.__file__, program.STUDIES, ["--repeats", "2"])
    assert "at least 3" in capsys.readouterr().err


def test_claims_are_about_methods_that_are_compared(maps, programs):
    known = set(programs["map_studies"].STYLES) - {maps.GP}
    for name in ("precipitation", "malaria"):
        numbers = maps.claims.stated(programs[name].__file__)
        assert set(numbers["claim"]) == set(maps.MEASURES)
        for rivals in numbers["claim"].values():
            assert set(rivals) < known
            assert set(rivals.values()) <= set(maps.claims.WORDS)
        assert set(numbers["exception"]) <= set(programs[name].STUDIES)
        for measures in numbers["exception"].values():
            for measure, reasons in measures.items():
                assert set(reasons) <= set(numbers["claim"][measure])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["precipitation", "malaria"])
def test_claims_come_out_as_stated_and_maps_are_drawn(
    programs, name, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("NET2GP_DATA", str(shared_data()))
    shared_reference()
    program = programs[name]
    run = programs["map_studies"].run_studies
    assert run(program.__file__, program.STUDIES, ["--out", str(tmp_path)]) == 0, (
        capsys.readouterr()
    )
    for transfer in program.STUDIES:
        for kind in ("curves", "maps"):
            file = f"maddox2021_{transfer.lower().replace(' ', '_')}_{kind}.png"
            assert (tmp_path / file).stat().st_size > 30_000
