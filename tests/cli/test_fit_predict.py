"""From files to predictions: what the commands write is what the library computes."""

from __future__ import annotations

import csv
import importlib.util
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import net2gp as n2g
from cli.conftest import COLUMNS, FIT, write_csv


def module(folder, name):
    spec = importlib.util.spec_from_file_location("user_model", folder / "model.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return getattr(found, name)().eval()


def rows(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def numbers(path, names=(*COLUMNS, "price")):
    return np.array([[float(row[name]) for name in names] for row in rows(path)])


def column(path, name):
    return np.array([float(row[name]) for row in rows(path)])


def test_predictions_are_those_of_the_library_in_the_units_of_the_file(fitted, run):
    assert run("predict", "posterior.safetensors", "test.csv").code == 0
    train, test = numbers(fitted / "train.csv"), numbers(fitted / "test.csv")
    mean, std = train.mean(0), train.std(0)
    data = torch.from_numpy((train - mean) / std).float()
    network = module(fitted, "regressor")
    network.load_state_dict(load_file(fitted / "regressor.safetensors"))
    posterior = n2g.laplace(network, (data[:, :3], data[:, 3:]), n2g.Gaussian())
    law = posterior.predict(torch.from_numpy((test - mean) / std).float()[:, :3])
    found, width = fitted / "predictions.csv", std[3]
    expected = law.mean[:, 0].numpy() * width + mean[3]
    spread = law.stddev[:, 0].numpy() * width
    np.testing.assert_allclose(column(found, "mean"), expected, rtol=1e-5)
    np.testing.assert_allclose(column(found, "std"), spread, rtol=1e-4)
    upper = column(found, "quantile_0.95")
    np.testing.assert_allclose(upper, expected + 1.6448536 * spread, rtol=1e-5)
    parts = column(found, "epistemic_var") + column(found, "aleatoric_var")
    np.testing.assert_allclose(parts, spread**2, rtol=1e-3)
    assert column(found, "novelty").max() <= 1


def test_all_forms_of_output_hold_the_same_numbers(fitted, run):
    for ending in ("csv", "parquet", "npz"):
        answer = run(
            "predict", "posterior.safetensors", "test.csv", "-o", f"out.{ending}", "--json"
        )
        assert json.loads(answer.out)["points"] == 30
    pandas = pytest.importorskip("pandas")
    table = pandas.read_parquet("out.parquet")
    with np.load("out.npz", allow_pickle=False) as arrays:
        np.testing.assert_array_equal(table["mean"], arrays["mean"][:, 0])
        np.testing.assert_array_equal(table["quantile_0.05"], arrays["quantiles"][:, 0, 0])
    np.testing.assert_array_equal(table["mean"].to_numpy(float), column("out.csv", "mean"))


def test_the_json_of_a_fit_is_all_that_is_on_stdout(folder, run):
    answer = run(*FIT, "--held-out", "test.csv", "--json")
    found = json.loads(answer.out)
    assert found["task"] == "regression"
    assert found["held_out_points"] == 30
    assert 0 < found["scores"]["rmse"] < 3
    assert "task: regression" in answer.err


def test_weights_are_found_in_checkpoints(folder, run):
    code: dict = {}
    exec((folder / "model.py").read_text(), code)
    torch.manual_seed(1)
    weights = code["classifier"]().state_dict()
    prefixed = {f"model.{name}": value for name, value in weights.items()}
    counter = {"metric.seen": torch.zeros(1)}
    forms = {
        "plain": weights,
        "wrapped": {f"module.{name}": value for name, value in weights.items()},
        "lightning": {"epoch": 3, "state_dict": {**prefixed, **counter}},
        "own": {"epoch": 3, "net": weights, "optimizer": {"state": {}, "param_groups": []}},
    }
    found = {}
    for name, form in forms.items():
        torch.save(form, f"{name}.pt")
        given = ("fit", "model.py:classifier", "points.npz", "--weights", f"{name}.pt")
        answer = run(*given, "--held-out", "0.3", "-o", "p.safetensors", "--json")
        assert answer.code == 0, answer.err
        found[name] = json.loads(answer.out)["scores"]
    assert all(one == found["plain"] for one in found.values())


def test_columns_may_be_named_with_commas(folder, run):
    one = [word for name in ("area", "rooms", "age") for word in ("--features", name)]
    for names in (one, ("--features", "area, rooms,age")):
        assert run(*FIT, *names).code == 0
        assert run("predict", "posterior.safetensors", "test.csv").code == 0
        found = json.loads(run("info", "posterior.safetensors", "--json").out)
        assert found["features"] == ["area", "rooms", "age"]


def test_a_prediction_lists_all_that_it_wrote(fitted, run):
    answer = run("predict", "posterior.safetensors", "test.csv", "--json")
    names = json.loads(answer.out)["columns"]
    assert f"columns {', '.join(names)}." in run("predict", "posterior.safetensors", "test.csv").out
    levels = ",".join(str(one / 20) for one in range(1, 20))
    many = run("predict", "posterior.safetensors", "test.csv", "--quantiles", levels)
    assert f"({len(names) + 17} in all)" in many.out


def test_pictures_in_other_units_than_at_the_fit_are_told_of(folder, run):
    generator = np.random.default_rng(0)
    shots = generator.integers(0, 256, (20, 8, 8, 3)).astype(np.uint8)
    plain = (shots.transpose(0, 3, 1, 2) / 255).astype(np.float32)
    labels = np.arange(20) % 2
    for name, x in {"bytes": shots, "shares": plain, "scaled": (plain - 0.5) / 0.2}.items():
        np.savez(f"{name}.npz", x=x, y=labels)
    for name, others in {"scaled": ("bytes", "shares"), "bytes": ("scaled",)}.items():
        given = ("model.py:pictures", f"{name}.npz", "--structure", "last_layer")
        assert run("fit", *given, "-o", "p.safetensors").code == 0
        answer = run("predict", "p.safetensors", f"{name}.npz")
        assert "but the posterior was fitted on" not in answer.err
        for other in others:
            answer = run("predict", "p.safetensors", f"{other}.npz")
            assert answer.code == 0
            assert f"warning: {other}.npz has pictures with" in answer.err
    assert "fitted on" not in run("predict", "p.safetensors", "shares.npz").err


def test_without_json_the_last_line_says_what_is_next(folder, run):
    answer = run(*FIT, "--task", "regression")
    assert answer.err == ""
    assert answer.out.endswith("Next: net2gp predict posterior.safetensors NEW_DATA\n")


def test_predictions_of_a_share_that_was_held_out_repeat(folder, run):
    first = run(*FIT, "--held-out", "0.3", "--json")
    again = run(*FIT, "--held-out", "0.3", "--json")
    other = run(*FIT, "--held-out", "0.3", "--seed", "1", "--json")
    scores = [json.loads(one.out)["scores"] for one in (first, again, other)]
    assert scores[0] == scores[1] != scores[2]
    assert json.loads(first.out)["points"] == 42


def test_a_program_of_torch_export_is_enough(folder, run):
    assert run("fit", "classifier.pt2", "points.npz", "-o", "p.safetensors").code == 0
    answer = run("predict", "p.safetensors", "points.npz", "-o", "out.npz", "--json")
    assert json.loads(answer.out)["scores"]["accuracy"] > 0.9
    with np.load("points.npz") as given, np.load("out.npz") as found:
        x, y = torch.from_numpy(given["x"]), torch.from_numpy(given["y"])
        network = module(folder, "classifier")
        weights = torch.load("classifier.pt", weights_only=True)["state_dict"]
        network.load_state_dict(weights)
        posterior = n2g.laplace(network, (x, y), n2g.Categorical())
        np.testing.assert_allclose(found["probs"], posterior.predict(x).probs, atol=1e-5)
        np.testing.assert_array_equal(found["label"], found["probs"].argmax(1))


def test_classes_keep_their_names(folder, run):
    arguments = ("model.py:classifier", "words.csv", "--weights", "classifier.pt")
    answer = run("fit", *arguments, "--standardize", "features", "-o", "p.safetensors")
    assert answer.code == 0
    assert "task: classification, since the targets are text" in answer.err
    assert run("predict", "p.safetensors", "words.csv").code == 0
    found, given = rows("predictions.csv"), rows("words.csv")
    assert {"prob_cheap", "prob_dear"} < set(found[0])
    right = np.mean([a["label"] == b["class"] for a, b in zip(found, given, strict=True)])
    assert right > 0.8
    total = column("predictions.csv", "prob_cheap") + column("predictions.csv", "prob_dear")
    np.testing.assert_allclose(total, 1, rtol=1e-5)


@pytest.mark.parametrize("method", ["adapt", "nngp", "ntk", "mean_field"])
def test_other_methods_come_back_from_their_files(folder, run, method):
    answer = run(*FIT, "--method", method, "--held-out", "test.csv", "--json")
    assert answer.code == 0, answer.err
    fitted = json.loads(answer.out)
    predicted = run("predict", "posterior.safetensors", "test.csv", "--json")
    assert json.loads(predicted.out)["scores"] == pytest.approx(fitted["scores"], rel=1e-6)
    assert 0 < fitted["scores"]["rmse"] < 3


@pytest.mark.parametrize("structure", ["kron", "diagonal", "last_layer", "low_rank:5"])
def test_structures_are_named_as_in_python(folder, run, structure):
    answer = run(*FIT, "--structure", structure, "--json")
    kind = {"kron": "Kron", "diagonal": "Diagonal", "last_layer": "LastLayer"}
    name = kind.get(structure, "LowRank(rank=5")
    assert f"structure={name}" in json.loads(answer.out)["posterior"]


def test_validation_takes_the_held_out_data(folder, run):
    answer = run(*FIT, "--held-out", "test.csv", "--tuning", "validation", "--json")
    assert answer.code == 0, answer.err


def test_pictures_of_a_folder_are_read_by_class(folder, run):
    image = pytest.importorskip("PIL.Image")
    generator = np.random.default_rng(0)
    for index, name in enumerate(("blue", "red")):
        (folder / "shots" / name).mkdir(parents=True)
        for n in range(8):
            pixels = generator.integers(0, 120, (8, 8, 3), dtype=np.uint8)
            pixels[..., 2 - 2 * index] += 100
            image.fromarray(pixels).save(folder / "shots" / name / f"{n}.png")
    (folder / "shots" / "notes.txt").write_text("of a Sunday")
    given = ("--image-mean", "0.3,0.3,0.3", "--image-std", "0.2,0.2,0.2", "-o", "p.safetensors")
    answer = run("fit", "model.py:pictures", "shots", "--structure", "last_layer", *given)
    assert answer.code == 0, answer.err
    assert run("predict", "p.safetensors", "shots/red").code == 0
    found = rows("predictions.csv")
    assert len(found) == 8
    assert set(found[0]) >= {"label", "prob_blue", "prob_red"}


@pytest.mark.parametrize("method", ["adapt_classes", "nngp"])
def test_classes_may_be_others_than_the_outputs_for_methods_that_allow_it(folder, run, method):
    text = (folder / "words.csv").read_text().replace("cheap", "fair", 20)
    (folder / "three.csv").write_text(text)
    given = (
        "model.py:classifier",
        "three.csv",
        "--weights",
        "classifier.pt",
        "-o",
        "p.safetensors",
    )
    run("fit", *given).refused(
        "the data have 3 classes (cheap, dear, fair), but the network tells 2"
    )
    answer = run("fit", *given, "--method", method, "--standardize", "features")
    assert answer.code == 0, answer.err
    assert run("predict", "p.safetensors", "three.csv").code == 0
    assert {"prob_cheap", "prob_dear", "prob_fair"} < set(rows("predictions.csv")[0])


def test_a_network_that_moved_is_asked_for_and_found(fitted, run):
    (fitted / "model.py").rename(fitted / "other.py")
    run("predict", "posterior.safetensors", "test.csv").refused("Pass --network with its new place")
    moved = ("--network", "other.py:regressor", "--json")
    assert run("predict", "posterior.safetensors", "test.csv", *moved).code == 0


def test_weights_that_changed_since_the_fit_do_not_change_predictions(fitted, run):
    first = run("predict", "posterior.safetensors", "test.csv", "--json")
    (fitted / "regressor.safetensors").write_bytes(
        (fitted / "regressor.safetensors").read_bytes()[:-4] + b"\0\0\0\0"
    )
    again = run("predict", "posterior.safetensors", "test.csv", "--json")
    assert "has changed since fit" in again.err
    assert json.loads(again.out)["scores"] == json.loads(first.out)["scores"]
    (fitted / "regressor.safetensors").unlink()
    assert run("predict", "posterior.safetensors", "test.csv").code == 0


def test_several_targets_have_columns_of_their_own(folder, run):
    (folder / "two.py").write_text(
        "from torch import nn\ndef build():\n    return nn.Linear(2, 2)\n", encoding="utf-8"
    )
    points = np.random.default_rng(0).normal(size=(40, 2))
    values = np.column_stack([points, points @ [1, 2] + 5, 10 * points @ [0, 3]])
    write_csv(folder / "two.csv", values, ("a", "b", "low", "high"))
    targets = ("--target", "low", "--target", "high", "--standardize", "both")
    # one layer is linear in its parameters, so adapting it is least squares
    answer = run(
        "fit", "two.py:build", "two.csv", *targets, "--method", "adapt", "-o", "p.safetensors"
    )
    assert answer.code == 0, answer.err
    assert run("predict", "p.safetensors", "two.csv").code == 0
    np.testing.assert_allclose(column("predictions.csv", "mean_low"), values[:, 2], atol=0.1)
    np.testing.assert_allclose(column("predictions.csv", "mean_high"), values[:, 3], atol=1.0)
    assert {"std_low", "quantile_0.95_high"} < set(rows("predictions.csv")[0])


def test_a_posterior_in_float64_predicts_in_it(folder, run):
    assert run(*FIT, "--dtype", "float64").code == 0
    assert run("predict", "posterior.safetensors", "test.csv", "-o", "out.npz").code == 0
    with np.load("out.npz") as found:
        assert found["mean"].dtype == np.float64


def test_pairs_of_npy_files_and_tables_with_tabs_are_the_same_data(folder, run):
    train = numbers("train.csv")
    np.save("x.npy", train[:, :3])
    np.save("y.npy", train[:, 3])
    (folder / "train.tsv").write_text((folder / "train.csv").read_text().replace(",", "\t"))
    arguments = ("--standardize", "both", "--weights", "regressor.safetensors", "--held-out", "0.3")
    scores = []
    for file, target in (("train.csv", "price"), ("train.tsv", "price"), ("x.npy", "y.npy")):
        given = ("fit", "model.py:regressor", file, "--target", target, *arguments, "--json")
        answer = run(*given, "-o", f"{file}.safetensors")
        assert answer.code == 0, answer.err
        scores.append(json.loads(answer.out)["scores"])
        assert run("report", f"{file}.safetensors", "-o", "page.html").code == 0
    assert scores[0] == scores[1] == scores[2]
    pair = ("--held-out", "x.npy", "--target", "y.npy", "-o", "page.html")
    assert run("report", "train.csv.safetensors", *pair).code == 0
    run(*given, "--held-out", "x.npy").refused("Held-out data of .npy need a share")
