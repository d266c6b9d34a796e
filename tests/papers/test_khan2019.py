"""Deep networks turned into Gaussian processes: parts of the program, and its numbers."""

import argparse
import importlib.util
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import net2gp as n2g
from net2gp.methods.selection import EVIDENCE, Selection
from net2gp.methods.training.natural_gradient import (
    GaussianPrior,
    NaturalState,
    converged_evidence,
    draw,
    iteration_evidence,
    natural_step,
)
from net2gp.methods.training.train_many import AdamSettings, train_many
from net2gp.methods.training.vogn import OGGN, VOGN
from shared_data import shared_data, shared_reference

FOLDER = Path(__file__).parents[2] / "papers" / "khan2019"


def load(name):
    sys.path.append(str(FOLDER))
    spec = importlib.util.spec_from_file_location(f"papers_khan2019_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


run = load("run")
toy, variational, wine, snelson = run.toy, run.variational, run.wine, run.snelson
widths = run.widths
SHORT = AdamSettings(learning_rate=0.1, num_steps=40, factor=0.9)


@pytest.fixture
def reference(monkeypatch):
    monkeypatch.setenv("NET2GP_DATA", str(shared_data()))
    return shared_reference()


def test_generated_data_have_the_noise_and_shares_that_are_asked_for():
    made = [toy.generate(seed, low_var=0.04, high_var=4.0, share=0.3) for seed in range(5)]
    x, y = (torch.cat([getattr(one, key) for one in made]) for key in ("x_test", "y_test"))
    middle = x[:, 0].abs() <= 1
    assert float(middle.double().mean()) == pytest.approx(0.3, abs=0.02)
    assert float(x[~middle, 0].abs().min()) >= 1.5
    assert float(x[:, 0].abs().max()) <= 3.5
    gap = y[:, 0] - x[:, 0].sin()
    assert float(gap[middle].var()) == pytest.approx(4.0, rel=0.1)
    assert float(gap[~middle].var()) == pytest.approx(0.04, rel=0.1)
    assert bool((x[:, 1] == 1).all())
    assert made[0].x.shape == (100, 2)
    assert not torch.equal(made[0].x, made[1].x)


def test_evidence_is_the_density_of_the_transformed_targets():
    problem, network, delta = toy.generate(0), toy.network(), 0.3
    linearized = n2g.linearize(network)
    J, theta = linearized.jacobian(problem.x)[:, 0], linearized.flatten(linearized.params)
    targets = J @ theta + (problem.y - linearized(problem.x))[:, 0]
    covariance = J @ J.T / delta + torch.eye(100).double()
    law = torch.distributions.MultivariateNormal(torch.zeros(100).double(), covariance)
    assert toy.evidence(network, problem, delta) == pytest.approx(float(law.log_prob(targets)))


def test_the_start_is_the_same_for_every_network_and_leaves_the_default_dtype():
    before = torch.get_default_dtype()
    one, other = toy.network(), toy.network()
    assert torch.get_default_dtype() == before
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert next(one.parameters()).dtype == torch.float64


def test_a_grid_has_the_networks_where_it_says():
    problems, deltas = [toy.generate(0), toy.generate(1)], [0.1, 1.0, 10.0]
    grid = toy.train_grid(deltas, problems, SHORT)
    table = grid.selection()
    alone = toy.train_grid([10.0], [problems[1]], SHORT)
    torch.testing.assert_close(
        grid.at(2, 1)(problems[1].x), alone.at(0, 0)(problems[1].x), rtol=1e-9, atol=1e-9
    )
    expected = toy.evidence(grid.at(2, 1), problems[1], 10.0)
    assert float(table.evidence[2, 1]) == pytest.approx(expected)
    assert float(table.losses["test loss"][2, 1]) == pytest.approx(
        problems[1].losses(grid.at(2, 1))["test loss"]
    )


def test_widths_are_trained_one_after_the_other_at_one_precision():
    problems = [toy.generate(0), toy.generate(1)]
    table = widths.selection([1, 20], problems, SHORT, [toy.SEED])
    same = toy.train_grid([widths.DELTA], problems, SHORT)
    assert table.values == (1, 20)
    torch.testing.assert_close(table.evidence[1], same.selection().evidence[0])
    assert float(table.losses["train loss"][0].mean()) > float(table.losses["train loss"][1].mean())


def test_columns_of_a_sweep_are_the_data_sets_of_each_start():
    problems = [toy.generate(0), toy.generate(1)]
    table = widths.selection([2, 5], problems, SHORT, [3, 4, 5])
    for index, seed in enumerate((3, 4, 5)):
        alone = widths.selection([2, 5], problems, SHORT, [seed])
        found = widths.by_start(table, 3, EVIDENCE)[index]
        torch.testing.assert_close(found, alone.evidence, rtol=1e-9, atol=1e-9)
    means = widths.averaged(table, 3)
    assert means.evidence.shape == (2, 2)
    torch.testing.assert_close(means.mean(EVIDENCE), table.mean(EVIDENCE))


def test_what_was_drawn_is_most_probable_under_the_law_that_drew_it():
    generator = torch.Generator().manual_seed(0)
    laws = torch.randn(2, 4, 5, generator=generator, dtype=torch.float64)
    draws = laws[:, None] + 0.3 * torch.randn(2, 11, 4, 5, generator=generator, dtype=torch.float64)
    table = [
        [widths.log_density(draws[i, 1:], draws[j, 0].numpy()) for j in range(2)] for i in range(2)
    ]
    assert table[0][0] > table[1][0] + 20
    assert table[1][1] > table[0][1] + 20
    # one more draw of the same law is Student's t, and its scores are of order one, each
    columns = draws[0, 1:].transpose(0, 1).reshape(4, -1)
    scores = widths.apart(Selection("width", tuple(range(4)), {EVIDENCE: columns}), 10, draws[0, 0])
    assert scores.abs().max() < 4


def test_a_padded_network_is_the_same_function_and_trains_as_it_would_alone():
    problem, narrow = toy.generate(0), toy.network(3)
    wide = widths.padded(narrow, 20)
    torch.testing.assert_close(wide(problem.x), narrow(problem.x), rtol=1e-12, atol=1e-12)
    ends = [
        train_many([one], problem.data, toy.NOISE, prior_var=2.0, optimizer=SHORT)[0]
        for one in (narrow, wide)
    ]
    again = widths.narrowed(ends[1], 3)
    assert not bool(ends[1][2].weight[0, 3:].any())
    for one, other in zip(ends[0].parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)


@pytest.mark.gpu
def test_widths_at_once_on_a_gpu_are_those_of_one_after_the_other():
    problems = [toy.generate(0), toy.generate(1)]
    alone = widths.selection([1, 5, 120], problems, SHORT, [0, 1])
    together = widths.selection([1, 5, 120], problems, SHORT, [0, 1], device="cuda")
    torch.testing.assert_close(alone.evidence, together.evidence, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("squares", [False, True])
def test_sums_by_hand_are_those_of_the_jacobian(squares):
    problem, network = toy.generate(0), toy.network()
    linearized = n2g.linearize(network)
    theta = linearized.flatten(linearized.params)
    draws = theta + 0.3 * torch.randn(2, 3, len(theta), generator=torch.Generator().manual_seed(0))
    x, y = problem.x.expand(2, 100, 2), torch.stack([problem.y, problem.y + 1])
    gradient, curvature = variational._sums(draws, x, y, squares)
    for s in range(2):
        J, r = [], []
        for one in draws[s]:
            nn.utils.vector_to_parameters(one, (moved := toy.network()).parameters())
            at = n2g.linearize(moved)
            J.append(at.jacobian(x[s])[:, 0])
            r.append((at(x[s]) - y[s])[:, 0])
        J, r = torch.stack(J), torch.stack(r)
        torch.testing.assert_close(gradient[s], torch.einsum("knp,kn->p", J, r) / 3)
        squared = (J * r[..., None] if squares else J).square()
        torch.testing.assert_close(curvature[s], squared.sum((0, 1)) / 3)


@pytest.mark.parametrize(("kind", "squares", "count"), [(OGGN, False, 30), (VOGN, True, 10)])
def test_inference_at_once_without_draws_is_that_of_the_optimizer(
    kind, squares, count, monkeypatch
):
    problem, delta = toy.generate(0), 2.0
    steps = variational.Steps(squares=squares, num_steps=count, num_samples=0)
    found = variational.infer([0.5, delta], [problem], steps)
    network = toy.network()
    # VOGN always draws: with no noise it stays at the mean
    monkeypatch.setattr(kind, "_noise", lambda self, like, generator: torch.zeros_like(like))
    optimizer = kind(
        network,
        toy.NOISE,
        100,
        prior_var=1 / delta,
        learning_rate=steps.rate,
        decays=(0.0, steps.decay),
        initial_var=1 / (delta + 100),
    )
    for _ in range(count):
        optimizer.step(problem.x, problem.y)
    theta = nn.utils.parameters_to_vector(network.parameters()).detach()
    torch.testing.assert_close(found.mean[1].double(), theta, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(
        found.precision[1].double().reciprocal(), optimizer.variance, rtol=1e-3, atol=0
    )


def test_evidences_of_a_sure_posterior_are_those_at_its_mean():
    problem = toy.generate(0)
    theta = nn.utils.parameters_to_vector(toy.network().parameters()).detach()
    sure = variational.Variational(
        (0.5,), [problem], theta[None], torch.full((1, len(theta)), 1e14).double()
    )
    posterior = sure.posterior(0)
    found = variational.evidences(posterior, 2, torch.Generator().manual_seed(0))
    assert float(found[0]) == pytest.approx(float(converged_evidence(posterior)), rel=1e-6)
    step = iteration_evidence(posterior, rate=variational.STEP)
    assert float(found[1]) == pytest.approx(float(step), rel=1e-6)


def test_inference_of_a_linear_model_finds_its_diagonal_posterior():
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)).double()
    y, prior = x.sum(1), GaussianPrior(torch.zeros(3).double(), torch.full((3,), 2.0).double())
    state = NaturalState(torch.zeros(3).double(), torch.ones(3).double(), torch.zeros(3).double())
    for _ in range(600):
        theta = draw(state.mean, state.precision, torch.zeros(3).double())
        state = natural_step(
            state,
            x.T @ (x @ theta - y),
            x.square().sum(0),
            prior,
            learning_rate=0.1,
            decays=(0.0, 0.9),
        )
    precision = x.T @ x + 2 * torch.eye(3)
    torch.testing.assert_close(state.mean, torch.linalg.solve(precision, x.T @ y))
    torch.testing.assert_close(state.precision, precision.diagonal())


def table_of(values, evidence, loss):
    columns = {EVIDENCE: evidence, "test loss": loss, "train loss": loss}
    return Selection("δ", values, {k: torch.as_tensor(v).double() for k, v in columns.items()})


def test_comparison_counts_cells_between_optima():
    losses = [[3.0, 2.0], [1.0, 1.5], [2.0, 2.0], [4.0, 5.0]]
    found = table_of(
        (0.1, 1.0, 10.0, 100.0), [[-9.0, -8.0], [-7.0, -9.0], [-8.0, -9.0], [-1.0, -2.0]], losses
    )
    stored = table_of(
        (0.1, 1.0, 10.0, 100.0), [[-9.0, -8.0], [-1.0, -2.0], [-8.0, -9.0], [-7.0, -9.0]], losses
    )
    far, near = run.compare("here", found, stored)
    assert (far.found, near.found) == (2, 0)
    assert (far.agrees, near.agrees) == (False, True)


def test_widths_are_compared_by_optima_and_by_means_over_starts():
    losses = torch.tensor([[1.0], [0.5], [0.6]]).expand(3, 6)
    noise = torch.tensor([-0.2, 0.1, 0.3, 0.1, -0.1, -0.2])  # three starts, two data sets each
    means = torch.tensor([[-112.0, -110.0], [-111.0, -109.0], [-130.0, -120.0]])
    scale = torch.tensor([[0.0], [1.0], [10.0]])
    found = table_of((1, 72, 1000), means.repeat(1, 3) + scale * noise, losses)

    def agrees(evidence):
        stored = table_of((1, 72, 1000), evidence, losses[:, :2])
        return [row.agrees for row in run.width_rows(found, stored, 3)]

    assert agrees(means + torch.tensor([[0.0], [0.1], [1.0]])) == [True, True, True, True]
    assert agrees(means + torch.tensor([[0.1], [0.0], [0.0]])) == [False, True, True, True]
    assert agrees(means - torch.tensor([[0.0], [0.9], [0.0]])) == [True, False, True, True]
    assert agrees(means + torch.tensor([[0.0], [0.0], [60.0]])) == [True, False, True, True]


def test_tables_are_kept(tmp_path):
    table = table_of((0.1, 1.0), [[-1.0, -2.0], [-3.0, -5.0]], [[1.0, 2.0], [3.0, 4.0]])
    path = tmp_path / "folder" / "table.npz"
    run.kept(path, lambda: table)
    again = run.kept(path, lambda: pytest.fail("it is there"))
    assert (again.name, again.values) == (table.name, table.values)
    for name, score in table.scores.items():
        assert torch.equal(again.scores[name], score)


def test_expected_points_are_those_of_the_stored_results(reference):
    for kind, archive in (("toy", "dnn2gp_toy_delta_original"), ("wine", "dnn2gp_delta_wine")):
        rows = toy.stored(archive)
        runs = (reference / f"dnn2gp_{kind}_rerun.jsonl").read_text().splitlines()
        again = {row["delta"]: row for row in map(json.loads, runs) if row.get("split") == 0}
        for point in [one for one in run.EXPECTED[kind]["point"] if "width" not in one]:
            at = int(np.argmin(np.abs(rows["params"] - point["delta"])))
            assert rows["params"][at] == pytest.approx(point["delta"])
            stored = rows["mlh"][at, point["set"]], rows["test_loss_map"][at, point["set"]]
            if "again" in point:
                stored = again[point["delta"]]["mlh"], again[point["delta"]]["test"]
            assert stored == pytest.approx((point["evidence"], point["test"]), abs=6e-4)


def test_stored_curves_have_the_optima_of_the_paper(reference):
    like = table_of(toy.DELTAS, [[0.0] * 10] * 21, [[0.0] * 10] * 21)
    stored = run.as_stored("dnn2gp_toy_delta_original", like)
    assert stored.best() == pytest.approx(0.631, abs=1e-3)
    assert -float(stored.mean().max()) == pytest.approx(110.151, abs=1e-3)
    assert stored.best("test loss") == pytest.approx(0.631, abs=1e-3)
    by_vi = run.as_stored("dnn2gp_toy_delta_original", like, "vi", "convimlh")
    assert by_vi.best() == pytest.approx(1.585, abs=1e-3)


def test_the_snelson_network_has_the_stored_law_by_both_ways(reference, tmp_path, monkeypatch):
    monkeypatch.setattr(snelson, "train", snelson.reference)
    rows = run.snelson_numbers(argparse.Namespace(out=tmp_path))
    assert len(rows) == 7
    assert [row.name for row in rows if not row.agrees] == []
    assert len(list(tmp_path.glob("*.png"))) == 2


def test_the_snelson_band_is_the_stored_one_everywhere(reference):
    known = toy.stored("snelson_dnn2gp_laplace")
    law = snelson.reference().dual().gaussian_process().marginal(torch.from_numpy(known["XT"]))
    np.testing.assert_allclose(law.variance[:, 0], known["gp_var"], rtol=0, atol=1e-6)


def test_wine_losses_are_in_grades(reference):
    split = wine.splits(1)[0]
    nothing = lambda x: torch.zeros(len(x), 1).double()
    assert split.losses(nothing)["train loss"] == pytest.approx(split.scale**2)
    assert split.losses(nothing)["test loss"] == pytest.approx(0.734, abs=2e-3)


def test_a_strong_prior_leaves_wine_the_stored_evidence_of_nothing(reference):
    split, setting = wine.splits(1)[0], wine.Setting(delta=wine.DELTAS[-1])
    network = wine.train(
        [(setting, split)], AdamSettings(learning_rate=0.05, num_steps=120, factor=0.8)
    )[0]
    found = wine.fit(network, setting, split).scores
    stored = toy.stored("dnn2gp_delta_wine")
    assert found[EVIDENCE] == pytest.approx(stored["mlh"][-1, 0], abs=1e-2)
    assert found["test loss"] == pytest.approx(stored["test_loss_map"][-1, 0], abs=1e-4)


def test_settings_of_the_sweeps_are_those_of_the_paper():
    assert wine.SWEEPS["sigma"][1](0.5) == wine.Setting(delta=30.0, sigma=0.5, width=20)
    assert wine.SWEEPS["width"][1](3.0) == wine.Setting(3.0, 0.64, width=3, num_hidden=1)
    assert toy.DELTAS[9] == pytest.approx(10**-0.2)
    assert math.log10(wine.DELTAS[-1]) == pytest.approx(3.6)


@pytest.mark.slow
def test_single_cells_are_the_stored_ones(reference, capsys):
    assert run.main(["--only", "points"]) == 0
    assert "differs" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("part", ["fits", "snelson", "noisier"])
def test_program_finds_what_is_expected(part, reference, tmp_path):
    assert run.main(["--only", part, "--out", str(tmp_path), "--sets", "4"]) == 0
    assert list(tmp_path.glob("*.png"))


@pytest.mark.slow
def test_the_curves_of_wine_have_the_stored_optima(reference, tmp_path):
    table = wine.selection("delta", wine.splits(3))
    rows = run.compare("wine δ", table, run.as_stored("dnn2gp_delta_wine", table))
    assert all(row.agrees for row in rows), rows
