"""Comparisons, kernels, reports, pages and what the machine has."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
import torch

import net2gp as n2g
from cli.conftest import COLUMNS, FIT
from net2gp.cli import app

PAIR = (
    *("model.py:regressor", "train.csv", "--weights", "regressor.safetensors"),
    *("--target", "price", "--standardize", "both"),
)


def test_a_comparison_has_a_row_per_method_beside_the_network(folder, run):
    pytest.importorskip("matplotlib")
    files = ("-o", "table.csv", "--figure", "figure.png", "--held-out", "test.csv")
    methods = ("--methods", "laplace,laplace/kron,nngp,mc_dropout")
    answer = run("compare", *PAIR, *methods, *files, "--json")
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)
    assert [row["method"] for row in found["rows"]] == [
        "network",
        "laplace",
        "laplace/kron",
        "nngp",
    ]
    assert list(found["failed"]) == ["mc_dropout"]
    assert "mc_dropout failed: the variance of the noise is open" in answer.err
    network, laplace, *_ = found["rows"]
    assert laplace["rmse"] == pytest.approx(network["rmse"], rel=1e-5)
    with open("table.csv", newline="", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    assert float(table[1]["nll"]) == laplace["nll"]
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")
    fitted = run(*FIT, "--held-out", "test.csv", "--json")
    assert json.loads(fitted.out)["scores"]["nll"] == pytest.approx(laplace["nll"], rel=1e-6)


def test_a_comparison_of_classifiers_is_a_table_of_aligned_columns(folder, run):
    pytest.importorskip("matplotlib")
    files = ("--held-out", "0.4", "--figure", "figure.png")
    answer = run(
        "compare", "classifier.pt2", "points.npz", "--methods", "laplace,adapt_classes", *files
    )
    assert answer.code == 0, answer.err
    head, *rows = answer.out.rstrip("\n").split("\n")
    assert head.split()[:5] == ["method", "accuracy", "nll", "ece", "brier"]
    assert [row.split()[0] for row in rows] == ["network", "laplace", "adapt_classes"]


@pytest.mark.parametrize("kind", ["nngp", "ntk", "tangent"])
def test_kernels_are_those_of_the_library(folder, run, kind):
    arguments = ("classifier.pt2", "points.npz", "--kind", kind, "-o", "k.npz", "--json")
    assert json.loads(run("kernel", *arguments).out)["kind"] == kind
    network = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(3, 10), torch.nn.Tanh(), torch.nn.Linear(10, 2)
    ).eval()
    network.load_state_dict(torch.load("classifier.pt", weights_only=True)["state_dict"])
    with np.load("points.npz") as points, np.load("k.npz") as found:
        x = torch.from_numpy(points["x"])
        if kind == "tangent":
            expected = n2g.linearize(network).kernel(prior_var=1.0)(x)
        else:
            expected = {"nngp": n2g.nngp, "ntk": n2g.ntk}[kind](network)(x)
        np.testing.assert_allclose(found["kernel"], expected.detach(), rtol=1e-4, atol=1e-5)


def test_a_report_is_a_page_with_its_numbers_beside_it(folder, run):
    assert run(*FIT, "--held-out", "0.4").code == 0
    answer = run("report", "posterior.safetensors", "--fail-under", "coverage90=0.01")
    assert answer.code == 0, answer.err
    assert "<!doctype html>" in (folder / "report.html").read_text(encoding="utf-8").lower()
    values = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert values["n"] == 24
    assert values["command"] == "net2gp report posterior.safetensors --fail-under coverage90=0.01"


def test_a_report_that_misses_a_limit_ends_with_three(fitted, run):
    limits = ("--fail-under", "coverage90=0.01", "--fail-under", "nll=-50")
    answer = run("report", "posterior.safetensors", "--held-out", "test.csv", *limits)
    assert answer.code == 3
    last = answer.out.rstrip("\n").split("\n")[-1]
    assert "nll" in last
    assert "-50" in last
    assert (fitted / "report.html").is_file()
    named = (
        "report",
        "posterior.safetensors",
        "--held-out",
        "test.csv",
        "--fail-under",
        "beauty=1",
    )
    run(*named).refused("beauty")


def test_the_page_and_its_limits_are_in_the_units_of_the_target(fitted, run):
    command = ("report", "posterior.safetensors", "--held-out", "test.csv")
    assert run(*command).code == 0
    scores = json.loads((fitted / "report.json").read_text(encoding="utf-8"))["scores"]
    predicted = json.loads(run("predict", "posterior.safetensors", "test.csv", "--json").out)
    assert scores["rmse"]["value"] == pytest.approx(predicted["scores"]["rmse"], rel=1e-4)
    assert scores["nll"]["value"] == pytest.approx(predicted["scores"]["nll"], rel=1e-4)
    page = (fitted / "report.html").read_text(encoding="utf-8")
    assert "in units of" not in page
    assert f"RMSE goes from {scores['rmse']['value']:.3g}" in page
    for name in ("rmse", "mae", "width90", "nll"):
        own = scores[name]["value"]
        step = 0.01 * abs(own) + 0.01
        assert run(*command, "--fail-under", f"{name}={own + step}").code == 0
        assert run(*command, "--fail-under", f"{name}={own - step}").code == 3


def test_a_report_looks_at_other_data(fitted, run):
    lines = ["area,rooms,age", *(f"{500 + n},{50 + n},{70 + n}" for n in range(20))]
    (fitted / "strange.csv").write_text("\n".join(lines))
    other = ("--held-out", "test.csv", "--other", "castles=strange.csv")
    assert run("report", "posterior.safetensors", *other).code == 0
    values = json.loads((fitted / "report.json").read_text(encoding="utf-8"))
    assert "castles" in json.dumps(values["others"])


def test_without_held_out_data_a_report_says_what_to_pass(fitted, run):
    run("report", "posterior.safetensors").refused(
        "Pass --held-out FILE, or fit with --held-out 0.2"
    )


def test_the_explorer_is_one_page(folder, run):
    assert run("explore", "-o", "page.html").code == 0
    assert (folder / "page.html").stat().st_size > 10_000


def test_a_posterior_can_be_explored_as_it_is(fitted, run):
    assert run("explore", "posterior.safetensors", "-o", "page.html").code == 0
    page = (fitted / "page.html").read_text(encoding="utf-8")
    assert "your posterior at 60 points, structure" in page
    run("explore", "posterior.safetensors", "--structure", "kron").refused(
        "net2gp explore NETWORK DATA", code=2
    )


def test_files_are_as_open_to_others_as_any_new_file(fitted, run):
    plain = fitted / "plain"
    plain.write_text("")
    assert run("explore", "-o", "page.html").code == 0
    for name in ("posterior.safetensors", "page.html"):
        assert (fitted / name).stat().st_mode == plain.stat().st_mode


def test_info_names_versions_devices_and_extras(run):
    found = json.loads(run("info", "--json").out)
    assert found["net2gp"] == n2g.__version__
    assert found["devices"][0] == "cpu"
    assert found["extras"]["sklearn"] in (True, False)
    assert "torch: " in run("info").out


def test_info_of_a_posterior_says_how_it_was_made(fitted, run):
    found = json.loads(run("info", "posterior.safetensors", "--json").out)
    assert found["method"] == "laplace"
    assert found["features"] == list(COLUMNS)
    assert found["network"]["network"].endswith("model.py:regressor")
    assert len(found["network"]["sha256"]) == 64


def test_every_command_has_help_with_examples(run):
    names = [one.name for one in app.registered_commands]
    assert {
        "fit",
        "predict",
        "report",
        "compare",
        "kernel",
        "explore",
        "paper",
        "info",
        "demo",
    } == set(names)
    for name in names:
        answer = run(name, "--help")
        assert answer.code == 0
        assert f"net2gp {name}" in answer.out


@pytest.mark.parametrize(
    "pair",
    [PAIR, ("classifier.pt2", "points.npz")],
    ids=["table", "program"],
)
def test_the_explorer_begins_with_a_network_and_its_data(folder, run, pair):
    assert run("explore", "-o", "plain.html").code == 0
    answer = run("explore", *pair, "-o", "page.html")
    assert answer.code == 0, answer.err
    assert (folder / "page.html").stat().st_size > (folder / "plain.html").stat().st_size
