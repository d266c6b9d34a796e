"""Few points of a new task: tasks, baselines and verdicts; ReLU networks before and after training."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

import net2gp as n2g
from net2gp import metrics
from shared_data import shared_data, shared_reference

FOLDER = Path(__file__).parents[2] / "papers" / "maddox2021"


def load(name):
    spec = importlib.util.spec_from_file_location(
        f"papers_maddox2021_{name}", FOLDER / f"{name}.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def program():
    return load("sinusoids")


@pytest.fixture(scope="module")
def baselines(program):
    return sys.modules["baselines"]


@pytest.fixture(scope="module")
def relu():
    return load("relu")


def points(baselines, num_tasks=2, num_points=6):
    return baselines.Batch.stack([baselines.sine(s, num_points).data for s in range(num_tasks)])


def networks(baselines, count=2, **keywords):
    return [baselines.mlp(1, 5, 4, 1, seed=seed, **keywords) for seed in range(count)]


def test_families_have_the_same_targets_and_other_sources(program):
    problem = program.problems(3)
    x, y = (v.reshape(3, 3, *v.shape[1:]) for v in (problem.target.x, problem.target.y))
    assert torch.equal(x[0], x[1])
    assert torch.equal(y[0], y[2])
    sources = problem.source.y.reshape(3, 3, -1)
    assert not torch.equal(sources[0], sources[1])
    assert problem.target.x.shape[1] == max(program.SIZES)


def test_the_source_of_the_same_frequency_has_that_of_its_target(program, baselines):
    task, other = baselines.sine(3, 50), baselines.sine(4, 50)
    moved = baselines.with_frequency(task, other.frequency)
    noise = moved.y - task.amplitude * torch.sin(other.frequency * task.x + task.phase)
    torch.testing.assert_close(noise, task.y - task.truth(task.x))
    assert float(noise.std()) < 0.02 * task.amplitude


def test_a_line_is_straight_but_for_its_noise(baselines):
    x, y = baselines.line(0, 2000)
    design = torch.cat([x, torch.ones_like(x)], 1)
    found = torch.linalg.lstsq(design, y)
    assert float(found.solution.abs().max()) < 3
    assert float((y - design @ found.solution).std()) == pytest.approx(0.3, rel=0.1)


def test_stacked_networks_are_the_networks(baselines):
    for end in (False, True):
        each = networks(baselines, tanh_at_the_end=end)
        x = points(baselines).x
        found = baselines.forward(baselines.stacked(each), x, tanh_at_the_end=end)
        torch.testing.assert_close(found, torch.stack([n(v) for n, v in zip(each, x, strict=True)]))
        again = baselines.single(each[0], baselines.stacked(each), 1)
        torch.testing.assert_close(again(x[1]), each[1](x[1]))


def test_networks_trained_together_are_those_trained_alone(baselines):
    stack, both = baselines.stacked(networks(baselines)), points(baselines)
    together = baselines.train_source(stack, both, 10)
    for i in range(2):
        one = baselines.Batch(both.x[i : i + 1], both.y[i : i + 1])
        alone = baselines.train_source([v[i : i + 1] for v in stack], one, 10)
        for a, b in zip(alone, together, strict=True):
            torch.testing.assert_close(a[0], b[i])


def test_fine_tuning_lowers_the_error_and_that_of_the_last_layer_moves_nothing_else(baselines):
    stack, known = baselines.stacked(networks(baselines)), points(baselines)
    for last in (False, True):
        tuned = baselines.fine_tuned(stack, known, 50, last=last)
        before, after = (baselines.squared_errors(s, known) for s in (stack, tuned))
        assert bool((after < before).all())
        moved = [not torch.equal(a, b) for a, b in zip(stack, tuned, strict=True)]
        assert moved == ([False] * 4 + [True] * 2 if last else [True] * 6)


def test_point_predictors_have_the_variance_of_their_residuals_or_the_floor(baselines):
    stack, known = baselines.stacked(networks(baselines)), points(baselines)
    law = baselines.point_law(stack, known, known.x)
    residual = (law.mean - known.y[..., 0]).square().mean(1)
    torch.testing.assert_close(law.var, residual[:, None].expand_as(law.var))
    exact = baselines.Batch(known.x, baselines.forward(stack, known.x))
    assert bool((baselines.point_law(stack, exact, known.x).var == baselines.NOISE_FLOOR).all())


def features(baselines):
    each = networks(baselines, tanh_at_the_end=True)
    return each, baselines.FeatureRegression.start(each)


def test_the_surrogate_has_the_gradient_of_the_marginal_likelihood(baselines):
    _, model = features(baselines)
    known = points(baselines)
    tensors = [
        v.requires_grad_() for v in (*model.stack, model.log_weight_var, model.log_noise_var)
    ]
    fast = torch.autograd.grad(model.surrogate(known), tensors)
    slow = torch.autograd.grad(-model.log_marginal_likelihood(known).sum(), tensors)
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a, b)


def test_ablr_is_bayesian_linear_regression_on_its_features(baselines):
    each, model = features(baselines)
    known = points(baselines)
    x = torch.linspace(-4, 4, 7, dtype=torch.float64)[:, None].expand(2, -1, -1)
    law = model.law(each[0], known, x)
    for i in range(2):
        phi, at = each[i](known.x[i]).detach(), each[i](x[i]).detach()
        weight, noise = float(model.log_weight_var[i].exp()), float(model.log_noise_var[i].exp())
        S = torch.linalg.inv(phi.T @ phi / noise + torch.eye(phi.shape[1]).double() / weight)
        torch.testing.assert_close(law.mean[i], (at @ S @ phi.T @ known.y[i] / noise)[:, 0])
        torch.testing.assert_close(law.var[i], (at @ S @ at.T).diagonal() + noise)


def test_learning_raises_the_marginal_likelihood(baselines):
    _, model = features(baselines)
    known = points(baselines)
    better = model.learned(known, 50)
    before, after = (m.log_marginal_likelihood(known) for m in (model, better))
    assert bool((after > before).all())


def test_the_deep_kernel_without_features_is_an_rbf_process(baselines):
    known = points(baselines)
    model = baselines.DeepKernel(known)
    model.learn(known, 30)
    law = model.law(known.x + 0.1)
    for i in range(2):
        parts = (
            model.kernel.base_kernel.lengthscale,
            model.kernel.outputscale,
            model.likelihood.noise,
        )
        lengthscale, output_var, noise_var = (v.detach()[i].item() for v in parts)
        kernel, likelihood = n2g.RBF(lengthscale, output_var), n2g.Gaussian(noise_var)
        expected = n2g.condition(kernel, known.task(i), likelihood).predict(known.x[i] + 0.1)
        torch.testing.assert_close(law.mean[i], expected.mean[:, 0], rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(law.var[i], expected.variance[:, 0], rtol=1e-6, atol=1e-8)


def test_the_fisher_kernel_does_not_depend_on_the_scale_of_the_network(baselines):
    """Twice the output: gradients in the hidden layers double, and so does their standard deviation."""
    each, known = networks(baselines), points(baselines)
    stack = baselines.stacked(each)
    doubled = [*stack[:-2], 2 * stack[-2], 2 * stack[-1]]
    laws = [
        baselines.fisher_kernel(
            [baselines.single(each[0], s, i) for i in range(2)],
            known,
            known,
            known.x + 0.1,
            [0.01] * 2,
        )
        for s in (stack, doubled)
    ]
    torch.testing.assert_close(laws[0].mean, laws[1].mean)
    torch.testing.assert_close(laws[0].var, laws[1].var)


@pytest.fixture(scope="module")
def laws(program):
    options = program.Options(
        seeds=1, epochs=5, converging=5, fine_tuning=5, ablr=5, dkl=5, rbf=5, further=5
    )
    problem = program.problems(1)
    models = program.Models.learn(problem.source, options)
    return problem, models.laws(problem.target[slice(0, 5)], problem.test.x[:, :9])


def test_every_method_predicts_every_point_with_some_variance(program, laws):
    _, found = laws
    assert set(program.SHOWN) <= set(found)
    for law in found.values():
        assert law.mean.shape == law.var.shape == (len(program.FAMILIES), 9)
        assert bool(law.mean.isfinite().all())
        assert bool((law.var > 0).all())


def test_methods_without_a_source_are_the_same_in_all_families(laws):
    _, found = laws
    for name, law in found.items():
        own = name == "RBF GP" or (name.startswith("untrained") and name.endswith("own noise"))
        assert own == bool((law.mean == law.mean[0]).all()), name


def test_scores_are_those_of_the_test_points_of_each_task(program, baselines, laws):
    problem, found = laws
    test = baselines.Batch(problem.test.x[:, :7], problem.test.y[:, :7])
    surprise, error = program.score([found, found], test)
    law = found["RBF GP"]
    for f in range(len(program.FAMILIES)):
        y = test.y[f, :, 0]
        expected = metrics.gaussian_nll((law.mean[f, :7], law.var[f, :7]), y)
        torch.testing.assert_close(surprise["RBF GP"][:, f, 0], expected.repeat(2))
        expected = metrics.rmse(law.mean[f, :7], y)
        torch.testing.assert_close(error["RBF GP"][1, f, 0], expected)


def test_a_sign_is_given_only_beyond_chance(program):
    zeros, steady = torch.zeros(8), torch.arange(1.0, 9.0)
    assert program.verdict(zeros, steady, 0.95) == "+"
    assert program.verdict(steady, zeros, 0.95) == "−"
    assert program.verdict(zeros, zeros, 0.95) == "·"
    mixed = steady * torch.tensor([1.0, -1.0] * 4)
    assert program.verdict(zeros, mixed, 0.95) == "·"
    # one gross outlier decides nothing
    assert program.verdict(zeros, torch.cat([steady[1:], torch.tensor([-1e6])]), 0.95) == "·"


def test_signs_run_over_families_and_sizes(program):
    steps = torch.arange(1.0, 9.0)
    ours = torch.zeros(3, 3, 8)
    theirs = steps.expand(3, 3, 8).clone()
    theirs[2, 1] *= -1
    found = program.verdicts({"ours": ours, "theirs": theirs}, "ours", 0.95)
    assert found == {"theirs": "+++ ++− +++"}


def test_claims_are_about_methods_and_families(program, laws):
    numbers = program.claims.stated(program.__file__)
    assert set(numbers["claim"]) == set(program.CLAIMS)
    assert all(set(rivals) <= set(laws[1]) for rivals in numbers["claim"].values())
    assert set(numbers["exception"]) <= set(program.FAMILIES)
    for keys in numbers["exception"].values():
        for key, reasons in keys.items():
            assert set(reasons) <= set(numbers["claim"][key])


def test_claims_are_judged_by_ranks_over_the_targets(program):
    steady = torch.arange(1.0, 9.0)
    outlier = torch.cat([steady[1:], torch.tensor([-1e6])])
    assert program.ranked("a", steady, "better").holds
    assert not program.ranked("a", outlier, "better").holds
    assert program.ranked("a", outlier, "better", quick=True).holds
    assert program.ranked("a", outlier, "no worse").holds
    assert not program.ranked("a", -steady, "no worse").holds


def test_scores_of_all_families_are_judged(program, capsys):
    numbers = program.claims.stated(program.__file__)
    rivals = {rival for part in numbers["claim"].values() for rival in part}
    steps = torch.arange(1.0, 9.0).expand(3, 3, 8)
    ours = {program.CLAIMED: 0 * steps, program.CONVERGED: 0 * steps}
    assert program.agrees(ours | dict.fromkeys(rivals, steps), quick=True)
    assert not program.agrees(ours | dict.fromkeys(rivals, -steps), quick=True)
    # exceptions that hold all the same are a fault of what was stated
    assert not program.agrees(ours | dict.fromkeys(rivals, steps), quick=False)
    assert "though stated not to" in capsys.readouterr().out


def test_the_published_adaptations_are_reproduced(program, monkeypatch):
    shared_reference()
    monkeypatch.setenv("NET2GP_DATA", str(shared_data()))
    rows = program.published_rows(program.claims.stated(program.__file__)["published"])
    assert len(rows) == 8
    assert all(row.agrees for row in rows)


def test_too_few_seeds_are_refused(program, capsys):
    with pytest.raises(SystemExit):
        program.main(["--seeds", "5"])
    assert "at least 6" in capsys.readouterr().err


def test_clusters_are_noisy_around_the_curve(relu):
    x, y = relu.clusters(0, num_points=2000)
    assert float(x[:2000].mean()) == pytest.approx(-5, abs=0.1)
    assert float(x.abs().std()) == pytest.approx(0.8, rel=0.05)
    assert float((y - relu.truth(x)).square().mean()) == pytest.approx(relu.NOISE_VAR, rel=0.1)


def test_training_brings_the_residual_down_to_the_noise(relu):
    found = relu.linearizations((20,), 2, 400)
    assert [one.kind for one in found] == ["untrained"] * 2 + ["trained"] * 2
    before, after = (relu.mean_residual(found, 20, kind) for kind in relu.KINDS)
    assert before > 10
    assert after < 1.3 * relu.NOISE_VAR
    for one in found:
        noise = float(one.posterior.likelihood.noise_var)
        assert noise == pytest.approx(one.residual)
        assert set(one.errors()) == {"at the data", "between", "beyond"}


def test_residuals_of_another_size_are_marked(relu):
    numbers = relu.expected()
    parts = {
        kind: dict(zip(relu.WIDTHS, numbers[kind]["residuals"], strict=True)) for kind in relu.KINDS
    }
    build = lambda factor: [
        relu.Linearization(width, kind, factor * value, None, None)
        for kind, values in parts.items()
        for width, value in values.items()
    ]
    assert all(row.agrees for row in relu.residual_rows(build(1.0), numbers))
    assert not any(row.agrees for row in relu.residual_rows(build(3.0), numbers))


@pytest.mark.slow
def test_the_claim_holds_where_expected_and_the_figures_are_drawn(
    program, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("NET2GP_DATA", str(shared_data()))
    assert program.main(["--out", str(tmp_path)]) == 0, capsys.readouterr()
    for name in ("sinusoids", "sinusoids_nll"):
        assert (tmp_path / f"maddox2021_{name}.png").stat().st_size > 20_000


@pytest.mark.slow
def test_the_residuals_of_relu_networks_are_as_expected(relu, tmp_path, capsys):
    assert relu.main(["--out", str(tmp_path)]) == 0
    assert "differs" not in capsys.readouterr().out
    assert (tmp_path / "maddox2021_relu.png").stat().st_size > 20_000
