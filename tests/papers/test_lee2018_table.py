"""The whole table of Lee et al. (2018): its parts against slow ones, cells that go on, and verdicts."""

import importlib
import json
import math
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

import net2gp as n2g
from shared_data import shared_data

FOLDER = Path(__file__).parents[2] / "papers" / "lee2018"
BEFORE = list(sys.path)
sys.path.insert(0, str(FOLDER))
try:
    table = importlib.import_module("table")  # which finds the others
    exact_rows, images, scores, report, trained = (
        importlib.import_module(name)
        for name in (
            "exact_rows", "regression_images", "table_scores", "table_report", "trained_rows"
        )
    )  # fmt: skip
finally:
    sys.path[:] = BEFORE  # the program adds folders whose modules have names of test folders

CPU = torch.device("cpu")


def some_digits(train=60, valid=40, test=50):
    known = images.problem("digits", CPU)
    cut = lambda part, count: images.Digits(part.x[:count], part.labels[:count])
    return images.Problem(*map(cut, (known.train, known.valid, known.test), (train, valid, test)))


def expected():
    return table.expected_of(table.__file__)["table"]


def test_training_images_are_the_first_of_each_class_in_the_order_of_the_file():
    known = images.problem("digits", CPU).train
    few = known.first(50)
    assert few.labels.bincount().tolist() == [5] * 10
    places = [int((known.x == row).all(1).nonzero()[0, 0]) for row in few.x]
    assert places == sorted(places)
    fifth = (known.labels == 3).nonzero()[4, 0]
    assert max(place for place in places if known.labels[place] == 3) == fifth
    assert known.first(10**6) is known


def test_images_for_choosing_are_no_training_images():
    known = images.problem("digits", CPU)
    assert len(known.train.labels) + len(known.valid.labels) == 1352
    assert not (known.train.x[:, None, :] == known.valid.x[None, :50]).all(-1).any()


def test_mnist_is_split_as_in_the_program_of_the_authors(monkeypatch):
    monkeypatch.setenv("NET2GP_DATA", str(shared_data()))
    known = images.problem("MNIST", CPU)
    x, labels = n2g.data.mnist("train")
    assert torch.equal(known.valid.labels, labels[:10_000])
    assert torch.equal(known.train.labels, labels[10_000:])
    assert torch.equal(known.train.x[:5], images.Digits.of(x[10_000:10_005], labels[:5]).x)


@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("tangent", [False, True])
def test_a_matrix_in_blocks_is_that_of_the_library(activation, tangent):
    x = some_digits().train.x
    setting = exact_rows.Setting(2, 1.5, 0.2)
    kernel = exact_rows.kernel_of(activation, setting, 64, tangent=tangent)
    small = exact_rows.InBlocks(kernel.kernel, 500)
    torch.testing.assert_close(small(x), kernel.kernel(x), rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(small(x, x[:7]), kernel.kernel(x, x[:7]), rtol=1e-8, atol=1e-9)
    assert torch.equal(small(x).diagonal(), kernel.kernel.diag(x))


def test_a_setting_is_validated_by_the_posterior_mean():
    known, setting = some_digits(), exact_rows.Setting(2, 1.5, 0.2)
    right, error = exact_rows.validated("relu", setting, known)
    kernel = exact_rows.kernel_of("relu", setting, 64, tangent=False)
    posterior, grown = exact_rows.posterior_of(kernel, known.train)
    mean = posterior.mean(known.valid.x)
    assert not grown
    assert right == pytest.approx(float((mean.argmax(1) == known.valid.labels).double().mean()))
    assert error == pytest.approx(float((mean - known.valid.y).square().mean()), rel=1e-7)


def test_the_scale_of_the_kernel_is_where_the_evidence_is_largest():
    known, setting = some_digits(), exact_rows.Setting(1, 1.5, 0.2)
    scale = exact_rows.fitted("relu", setting, known)["scale"]
    kernel = exact_rows.kernel_of("relu", setting, 64, tangent=False)
    data = known.train.x, known.train.y

    def evidence(factor):
        noise = n2g.Gaussian(noise_var=exact_rows.JITTER * factor)
        return float(n2g.condition(factor * kernel, data, noise).evidence)

    best, near = evidence(scale), [evidence(scale * factor) for factor in (0.99, 1.01)]
    assert best > max(near)
    assert near[0] == pytest.approx(near[1], abs=0.02)  # flat to second order


def test_probabilities_are_those_of_the_largest_of_normal_outputs():
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(4, 10, generator=generator).double()
    variance = torch.tensor([0.3, 1.0, 2.0, 0.1], dtype=torch.float64)
    found = scores.log_probabilities(mean, variance).exp()
    draws = torch.randn(200_000, 4, 10, generator=generator).double()
    largest = (mean + draws * variance.sqrt()[:, None]).argmax(-1)
    shares = torch.stack([torch.bincount(row, minlength=10) for row in largest.T]) / len(draws)
    torch.testing.assert_close(found, shares.double(), rtol=0, atol=5e-3)


def test_probabilities_of_two_outputs_have_a_closed_form():
    mean = torch.tensor([[0.4, 0.0], [3.0, -1.0]], dtype=torch.float64)
    variance = torch.tensor([0.5, 0.7], dtype=torch.float64)
    known = torch.special.ndtr((mean[:, 0] - mean[:, 1]) / (2 * variance).sqrt())
    found = scores.log_probabilities(mean, variance).exp()[:, 0]
    torch.testing.assert_close(found, known, rtol=1e-10, atol=0)


def test_settings_lie_on_the_grid_of_the_paper_and_are_different():
    found = exact_rows.spread(60)
    assert len(set(found)) == 60
    assert {one.depth for one in found} <= set(exact_rows.DEPTHS)
    assert sum(one.depth >= 50 for one in found) <= 6
    best = exact_rows.Setting.named("7-0.61-0.07")
    near = lambda value, grid: min(abs(value - one) for one in grid) < 0.005
    assert near(best.weight_var, exact_rows.WEIGHT_VARS)
    assert near(best.bias_var, exact_rows.BIAS_VARS)
    assert str(found[0]) == "{}-{:.2f}-{:.2f}".format(*vars(found[0]).values())


def test_a_stack_gives_the_outputs_of_its_networks():
    generator = torch.Generator().manual_seed(0)
    trials = [trained.Trial(2, 5, 1.0, 0.5, 1e-3, 0.0) for _ in range(3)]
    stack = trained.Stack(trials, "tanh", 7, generator)
    x = torch.randn(4, 7, generator=generator)
    for place, outputs in enumerate(stack(x)):
        network = nn.Sequential(
            nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 10)
        )
        with torch.no_grad():
            for p, layer in zip(network.parameters(), stack.layers, strict=True):
                p.copy_(layer[place].reshape(p.shape))
        torch.testing.assert_close(outputs, network(x))


def test_a_stack_starts_with_the_variances_of_each_trial():
    trials = [trained.Trial(1, 2000, variance, 2 * variance, 1e-3, 0.0) for variance in (0.5, 2.0)]
    stack = trained.Stack(trials, "relu", 100, torch.Generator().manual_seed(0))
    for place, trial in enumerate(trials):
        assert 100 * float(stack.layers[0][place].var()) == pytest.approx(
            trial.weight_var, rel=0.02
        )
        assert float(stack.layers[1][place].var()) == pytest.approx(trial.bias_var, rel=0.1)


def test_training_is_adam_with_decay_network_by_network():
    """Beside torch.optim.Adam on each network, with all images in a batch."""
    digits = some_digits(train=20).train
    trials = [
        trained.Trial(1, 6, 1.0, 0.5, rate, decay) for rate, decay in ((1e-2, 0.1), (3e-2, 0.0))
    ]
    stack = trained.Stack(trials, "tanh", 64, torch.Generator().manual_seed(0))
    starts = [layer.clone() for layer in stack.layers]
    trained.train(stack, digits, 15, 20, torch.Generator().manual_seed(1))
    x, y = digits.x.float(), digits.y.float()
    for place, trial in enumerate(trials):
        leaves = [start[place].clone().requires_grad_() for start in starts]
        optimizer = torch.optim.Adam(leaves, lr=1.0, weight_decay=trial.decay)
        for step in range(15):
            optimizer.param_groups[0]["lr"] = trial.learning_rate * trained.share(step, 15)
            optimizer.zero_grad()
            h = (x @ leaves[0].T + leaves[1]).tanh() @ leaves[2].T + leaves[3]
            (0.5 * (h - y).square().sum() / len(x)).backward()
            optimizer.step()
        for leaf, layer in zip(leaves, stack.layers, strict=True):
            torch.testing.assert_close(layer[place], leaf.detach(), rtol=1e-3, atol=1e-4)


def test_the_learning_rate_rises_then_falls_to_zero():
    shares = [trained.share(step, 100) for step in range(100)]
    assert shares[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert all(a >= b for a, b in pairwise(shares[4:]))
    assert shares[-1] < 1e-3


def test_networks_that_diverge_are_not_chosen():
    trial = trained.Trial(1, 4, 1.0, 0.1, 1e-3, 0.0)
    stack = trained.Stack([trial], "relu", 3, torch.Generator().manual_seed(0))
    stack.theta.fill_(math.inf)
    assert torch.equal(stack.predict(torch.ones(2, 3)), torch.zeros(1, 2, 10))


def test_the_rows_are_the_twelve_of_the_paper():
    rows = table.places(quick=False)
    assert len(rows) == len(set(rows)) == 12
    names = list(table.cells(quick=False))
    assert sum(name.startswith("gp-") for name in names) == 12
    assert {row["gp_accuracy"] for row in expected()["rows"]} >= {0.9279, 0.9879, 0.5566}
    for row in expected()["rows"]:
        exact_rows.Setting.named(row["gp"])
    big = table.Place("MNIST", "50k", "relu")
    assert str(big.searched) == "MNIST-10k-relu"


def made(gp, sgd, row):
    one = {"mse": 0.02, "NLL": 0.2, "ECE": 0.02, "name": "2-1.00-0.10"}
    exact = one | {"accuracy": gp}
    return {
        f"gp-{row}": exact | {"ntk": exact, "paper": exact},
        f"sgd-{row}": one | {"accuracy": sgd, "NLL": 0.3, "ECE": 0.03, "name": "2-500-1.00-0.10"},
    }


def cells_of_the_paper():
    numbers, cells = expected(), {}
    for name, row in report.of_paper(numbers).items():
        cells |= made(row["gp_accuracy"], row["network_accuracy"], name)
    return numbers, cells


def test_the_numbers_of_the_paper_agree_with_themselves():
    numbers, cells = cells_of_the_paper()
    found = list(report.entries(cells, numbers))
    assert len(found) == 36
    assert all(one.holds for one in found)
    claims = list(report.claims(cells, numbers, quick=False))
    failed = [one.name for one in claims if not one.as_stated]
    assert failed == []


def test_what_is_off_is_said(tmp_path, capsys):
    numbers, cells = cells_of_the_paper()
    cells["gp-MNIST-10k-relu"] = cells["gp-MNIST-10k-relu"] | {"accuracy": 0.95}
    cells["sgd-CIFAR-45k-tanh"] = cells["sgd-CIFAR-45k-tanh"] | {"accuracy": 0.6}
    assert not report.report(cells, ["width-MNIST-1k-relu"], numbers, tmp_path, quick=False)
    printed = capsys.readouterr().out
    assert "MNIST 10k ReLU: GP-2-1.00-0.10 is 0.9500, the paper has 0.9765 ± 0.005" in printed
    assert "cells that are not there: width-MNIST-1k-relu" in printed
    assert "CIFAR-10: the Gaussian process leads in all rows" in printed
    assert {path.name for path in tmp_path.glob("*.png")} == {
        "lee2018_table.png", "lee2018_table_certainty.png"
    }  # fmt: skip


def test_widths_come_to_the_gaussian_process():
    cell = {"widths": [8, 64, 512], "accuracies": [[0.7, 0.72], [0.85, 0.86], [0.915, 0.92]]}
    cells = made(0.92, 0.9, "MNIST-1k-relu") | {"width-MNIST-1k-relu": cell}
    found = list(report.widening(cells, "MNIST-1k-relu", expected()))
    assert len(found) == 3
    assert all(one.as_stated for one in found)
    short = cells | {"width-MNIST-1k-relu": cell | {"accuracies": [[0.9], [0.85], [0.8]]}}
    assert not any(one.as_stated for one in report.widening(short, "MNIST-1k-relu", expected()))


def test_without_data_nothing_runs_and_it_says_so(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("NET2GP_DATA", raising=False)
    assert table.main(["--cells", str(tmp_path), "--out", str(tmp_path)]) == 0
    assert "NET2GP_DATA names no folder with mnist.npz and cifar10.npz" in capsys.readouterr().out


def small(monkeypatch):
    budget = table.Budget(2, 1, (20,) * 3, (16,) * 3, ((8, (1,), 2),), (2, 4))
    monkeypatch.setattr(table, "QUICK", budget)


def test_a_run_that_reached_its_limit_goes_on_with_the_same_command(monkeypatch, tmp_path, capsys):
    small(monkeypatch)
    command = ["--quick", "--cells", str(tmp_path), "--out", str(tmp_path), "--device", "cpu"]
    command += ["--rows", "gp-digits-200-relu", "sgd-digits-200-*"]
    assert table.main([*command, "--limit", "-1"]) == table.UNFINISHED
    assert "to be continued: gp-digits-200-relu" in capsys.readouterr().out
    table.main(command)
    cells = {path.stem for path in tmp_path.glob("*.json")}
    assert cells == {
        "search-digits-200-relu", "gp-digits-200-relu", "sgd-digits-200-relu", "sgd-digits-200-tanh"
    }  # fmt: skip
    before = (tmp_path / "gp-digits-200-relu.json").read_text()
    capsys.readouterr()
    table.main(command)
    assert (tmp_path / "gp-digits-200-relu.json").read_text() == before
    assert "seconds" in json.loads(before)
    table.main([*command, "--report"])
    assert "cells that are not there: gp-digits-200-tanh" in capsys.readouterr().out


@pytest.mark.slow
def test_the_quick_run_agrees(tmp_path, capsys):
    assert table.main(["--quick", "--out", str(tmp_path), "--device", "cpu"]) == 0
    assert "10 of 10 came out as stated" in capsys.readouterr().out
    assert len(list(tmp_path.glob("*.png"))) == 3
