"""Bad input: one line that says what to type, an exit code, no traceback, and files as they were."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cli.conftest import COLUMNS, FIT, write_csv
from net2gp.cli.methods import METHODS

DATA = ("--target", "price")


def fit(*arguments):
    return ("fit", *arguments, "-o", "new.safetensors")


BAD = {
    "no file": (fit("classifier.pt2", "none.npz"), "there is no file or folder none.npz"),
    "no program": (fit("none.pt2", "points.npz"), "there is no file none.pt2"),
    "a program of another kind": (
        fit("text.pt2", "points.npz"),
        "is not a program of torch.export",
    ),
    "no column": (
        fit("model.py:regressor", "train.csv", "--target", "cost"),
        "has no column 'cost'. It has: 'area', 'rooms', 'age', 'price'",
    ),
    "no target": (fit("model.py:regressor", "train.csv"), "Pass --target COLUMN"),
    "text in a column": (
        fit("model.py:regressor", "text.csv", *DATA),
        "column 'town' of text.csv holds 'Ulm' in line 2, which is not a number",
    ),
    "missing values": (
        fit("model.py:regressor", "holes.csv", *DATA),
        "has 1 missing values (first in line 3)",
    ),
    "another number of columns": (
        fit("model.py:regressor", "train.csv", *DATA, "--features", "area"),
        "cannot take inputs of shape (N, 1)",
    ),
    "another ending": (fit("classifier.pt2", "text.docx"), "ends in .docx, but data are read from"),
    "an empty table": (fit("classifier.pt2", "empty.csv"), "empty.csv is not a readable csv file"),
    "no arrays": (fit("classifier.pt2", "names.npz"), "must hold the arrays x and y, but holds z"),
    "a broken archive": (fit("classifier.pt2", "broken.npz"), "is not a readable .npz"),
    "no targets": (fit("classifier.pt2", "x.npz"), "x.npz has no targets. Add an array y"),
    "rows that do not match": (fit("classifier.pt2", "short.npz"), "60 inputs and 3 targets"),
    "NaN": (fit("classifier.pt2", "nan.npz"), "are NaN or infinite in 1 rows (first in x[4])"),
    "labels out of range": (fit("classifier.pt2", "many.npz"), "the network tells 2 apart"),
    "no colon": (fit("resnet", "points.npz"), "'resnet' is no network"),
    "no module": (fit("nowhere:build", "points.npz"), "nowhere cannot be imported"),
    "no factory": (fit("model.py:nothing", "points.npz"), "has no 'nothing'"),
    "a factory that fails": (
        fit("model.py:broken", "points.npz"),
        "failed with RuntimeError: no such file",
    ),
    "no function": (fit("model.py:number", "points.npz"), "failed with TypeError"),
    "weights that do not fit": (
        fit("model.py:regressor", "train.csv", *DATA, "--weights", "classifier.pt"),
        "do not fit the network",
    ),
    "no weights": (
        fit("model.py:regressor", "train.csv", *DATA, "--weights", "none.pt"),
        "there is no file none.pt",
    ),
    "weights with code": (
        fit("model.py:regressor", "train.csv", *DATA, "--weights", "code.pt"),
        "is not a file of weights alone",
    ),
    "no device": (
        fit("classifier.pt2", "points.npz", "--device", "gpu"),
        "there is no device 'gpu'",
    ),
    "a share of all": (
        fit("classifier.pt2", "points.npz", "--held-out", "1.0"),
        "--held-out 1.0 of 60",
    ),
    "noise of classes": (fit("classifier.pt2", "points.npz", "--noise-var", "1"), "Leave it out"),
    "a whole module as weights": (
        fit("model.py:regressor", "train.csv", *DATA, "--weights", "whole.pt"),
        "it holds a whole module or other objects, and reading these would run code of the file",
    ),
    "columns of one name": (
        fit("model.py:regressor", "twice.csv", *DATA),
        "twice.csv has several columns 'area'. Give each column a name of its own",
    ),
    "rows longer than the head": (
        fit("model.py:regressor", "long.csv", *DATA),
        "line 2 of long.csv has 5 values, but its head names 4 columns",
    ),
    "values between semicolons": (
        fit("model.py:regressor", "german.csv", *DATA),
        "Its values are separated by ';': write it with commas",
    ),
    "one text among numbers": (
        fit("model.py:regressor", "dash.csv", *DATA),
        "column 'b' of dash.csv holds '-' in line 5, which is not a number",
    ),
    "a value that is infinite": (
        fit("model.py:regressor", "far.csv", *DATA),
        "NaN or infinite in 1 rows (first in line 4)",
    ),
    "a target between commas that is not there": (
        fit("model.py:regressor", "train.csv", "--target", "price,cost"),
        "has no column 'cost'",
    ),
    "channels of a table": (
        fit(
            "model.py:regressor",
            "train.csv",
            *DATA,
            "--image-mean",
            "1,1,1",
            "--image-std",
            "1,1,1",
        ),
        "train.csv has rows of 3 numbers. Pass --standardize features",
    ),
    "the size of a table": (
        fit("model.py:regressor", "train.csv", *DATA, "--image-size", "32"),
        "--image-size resizes pictures of a folder, but train.csv is a file",
    ),
    "a negative prior": (fit("classifier.pt2", "points.npz", "--prior-var", "-1"), "prior_var"),
    "dropout that is not there": (
        fit("model.py:regressor", "train.csv", *DATA, "--method", "mc_dropout", "--noise-var", "1"),
        "dropout",
    ),
    "no folder": (
        ("fit", "classifier.pt2", "points.npz", "-o", "none/p.safetensors"),
        "there is no folder none",
    ),
    "another ending of output": (
        ("predict", "classifier.pt2", "points.npz", "-o", "p.xls"),
        "must end in .csv or .parquet or .npz",
    ),
    "no posterior": (
        ("predict", "none.safetensors", "points.npz"),
        "there is no file none.safetensors",
    ),
    "weights in place of a posterior": (
        ("predict", "regressor.safetensors", "train.csv"),
        "but not of a net2gp posterior",
    ),
    "a kernel of nothing": (("kernel", "classifier.pt2", "none.npz"), "there is no file or folder"),
    "a report of nothing": (("report", "none.safetensors"), "there is no file none.safetensors"),
    "info of a table": (("info", "train.csv"), "train.csv is no posterior. Pass the .safetensors"),
    "a table before its posterior": (
        ("predict", "test.csv", "p.safetensors"),
        "test.csv is no posterior. Pass the .safetensors",
    ),
    "a factory that ends Python": (
        fit("model.py:leaves", "points.npz"),
        "failed with SystemExit: 0",
    ),
    "a file that ends Python": (fit("leaves.py:build", "points.npz"), "failed with SystemExit: 0"),
    "one number for all points": (
        fit("model.py:Sum", "train.csv", *DATA),
        "returns a single number for all points",
    ),
    "a share that is no number": (
        fit("classifier.pt2", "points.npz", "--held-out", "nan"),
        "--held-out nan of 60 points",
    ),
    "no output": (
        ("fit", "classifier.pt2", "points.npz", "-o", ""),
        "--output is empty. Pass for example --output result.safetensors",
    ),
    "an empty file of weights": (
        fit("model.py:regressor", "train.csv", *DATA, "--weights", "empty.pt"),
        "is not a file of weights alone (EOFError)",
    ),
    "weights of a program with a changed byte": (
        fit("changed.pt2", "points.npz"),
        "is not a program of torch.export",
    ),
    "a target among the features": (
        fit("model.py:regressor", "train.csv", *DATA, "--features", "area,rooms,price"),
        "column 'price' of train.csv is the target and a feature as well",
    ),
    "numbers whose squares overflow": (
        fit("model.py:regressor", "huge.csv", *DATA, "--standardize", "features"),
        "column 1 has numbers up to 1e+300, whose variance overflows",
    ),
    "all methods failed": (
        ("compare", "model.py:regressor", "train.csv", *DATA, "--methods", "mc_dropout"),
        "the variance of the noise is open",
    ),
}
USAGE = {
    "no such method": (
        fit("classifier.pt2", "points.npz", "--method", "magic"),
        "--method has no 'magic'",
    ),
    "no such structure": (
        fit("classifier.pt2", "points.npz", "--structure", "kfac"),
        "--structure has no 'kfac'. Known: full, kron",
    ),
    "a structure without its number": (
        fit("classifier.pt2", "points.npz", "--structure", "low_rank"),
        "needs a number",
    ),
    "a structure with a number below one": (
        fit("classifier.pt2", "points.npz", "--structure", "low_rank:-3"),
        "the number must be a positive whole number, such as low_rank:50",
    ),
    "a choice that is laplace's": (
        fit("classifier.pt2", "points.npz", "--tuning", "evidence", "--method", "adapt"),
        "--tuning says nothing to the method adapt",
    ),
    "parameters of no network": (
        fit("classifier.pt2", "points.npz", "--only", "0.*", "--method", "nngp"),
        "--only says nothing to the method nngp",
    ),
    "a structure of another method": (
        fit("classifier.pt2", "points.npz", "--structure", "kron", "--method", "adapt"),
        "Leave one of them out",
    ),
    "no such task": (fit("classifier.pt2", "points.npz", "--task", "ranking"), "--task has no"),
    "no such dtype": (fit("classifier.pt2", "points.npz", "--dtype", "int8"), "--dtype has no"),
    "validation without data": (
        fit("classifier.pt2", "points.npz", "--tuning", "validation"),
        "--tuning validation needs --held-out",
    ),
    "half of the channels": (
        fit("classifier.pt2", "points.npz", "--image-mean", "1"),
        "a number per channel each",
    ),
    "quantiles above one": (
        ("predict", "p.safetensors", "points.npz", "--quantiles", "95"),
        "must lie between 0 and 1",
    ),
    "no such kernel": (
        ("kernel", "classifier.pt2", "points.npz", "--kind", "rbf"),
        "--kind has no 'rbf'",
    ),
    "no such method to compare": (
        ("compare", "classifier.pt2", "points.npz", "--methods", "laplace,magic"),
        "--methods has no 'magic'",
    ),
    "a limit without a number": (
        ("report", "p.safetensors", "--fail-under", "coverage90"),
        "--fail-under takes NAME=VALUE",
    ),
    "a network without data": (("explore", "classifier.pt2"), "net2gp explore NETWORK DATA"),
}


class Code:
    """What a pickle could run."""

    def __reduce__(self):
        return print, ("ran",)


@pytest.fixture
def clutter(folder):
    """Files that are wrong in one way each."""
    with np.load("points.npz") as found:
        x, y = found["x"], found["y"]
    holes = x.copy()
    holes[4, 0] = np.nan
    np.savez("x.npz", x=x)
    np.savez("names.npz", z=x)
    np.savez("short.npz", x=x, y=y[:3])
    np.savez("nan.npz", x=holes, y=y)
    np.savez("many.npz", x=x, y=np.arange(60) % 7)
    (folder / "broken.npz").write_bytes((folder / "points.npz").read_bytes()[:500])
    for name in ("text.pt2", "text.docx"):
        (folder / name).write_text("a text")
    (folder / "empty.csv").write_text("")
    (folder / "empty.pt").write_bytes(b"")
    (folder / "leaves.py").write_text("raise SystemExit(0)")
    write_csv(folder / "huge.csv", [(1, 1e300, 2, 3), (1, 2, 3, 4)], (*COLUMNS, "price"))
    program, weights = (
        (folder / "classifier.pt2").read_bytes(),
        torch.load("classifier.pt")["state_dict"],
    )
    place = program.index(weights["1.weight"].numpy().tobytes())
    changed = bytes([program[place] ^ 1])
    (folder / "changed.pt2").write_bytes(program[:place] + changed + program[place + 1 :])
    write_csv(
        folder / "text.csv", [("Ulm", 1, 2, 3), ("Bonn", 2, 3, 4)], ("town", "a", "b", "price")
    )
    write_csv(folder / "holes.csv", [(1, 2, 3, 4), (1, "", 3, 4)], ("a", "b", "c", "price"))
    (folder / "twice.csv").write_text("area,area,age,price\n1,2,3,4\n")
    (folder / "long.csv").write_text("area,rooms,age,price\n1,2,3,4,5\n")
    (folder / "german.csv").write_text("area;rooms;age;price\n1;2;3;4\n")
    (folder / "dash.csv").write_text('"a\na",b,c,price\n1,2,3,4\n\n1,-,3,4\n')
    (folder / "far.csv").write_text("a,b,c,price\n\n1,2,3,4\n1,inf,3,4\n")
    torch.save({"weight": Code()}, "code.pt")
    torch.save(torch.nn.Linear(2, 1), "whole.pt")
    return folder


def contents(folder):
    skipped = ("__pycache__", "user_model")
    return {
        one.name: one.read_bytes()
        for one in folder.iterdir()
        if one.is_file() and one.name not in skipped
    }


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_in_one_line(case, clutter, run):
    arguments, message = BAD[case]
    before = contents(clutter)
    run(*arguments).refused(message)
    assert contents(clutter) == before


def test_messages_have_no_colors(clutter, run):
    answer = run(*fit("model.py:regressor", "train.csv", *DATA, "--weights", "code.pt"))
    assert "\x1b" not in answer.err


@pytest.mark.parametrize("case", USAGE)
def test_wrong_usage_has_a_code_of_its_own(case, folder, run):
    arguments, message = USAGE[case]
    before = contents(folder)
    run(*arguments).refused(message, code=2)
    assert contents(folder) == before


@pytest.mark.parametrize("arguments", [("fit",), ("fit", "a", "b", "--nonsense"), ("nothing",)])
def test_what_the_parser_refuses_has_the_code_of_usage(arguments, run):
    answer = run(*arguments)
    assert answer.code == 2
    assert "Traceback" not in answer.err


@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
@pytest.mark.parametrize("command", ["predict", "report", "info"])
def test_a_damaged_posterior_is_noticed(fitted, run, damage, command):
    path = fitted / "posterior.safetensors"
    whole = path.read_bytes()
    middle = len(whole) // 2
    path.write_bytes(
        {
            "cut": whole[:middle],
            "changed": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
            "empty": b"",
        }[damage]
    )
    arguments = {"predict": ("test.csv",), "report": ("--held-out", "test.csv"), "info": ()}[
        command
    ]
    run(command, path, *arguments).refused("posterior.safetensors is")
    assert not (fitted / "predictions.csv").exists()
    assert not (fitted / "report.html").exists()


def test_a_posterior_that_python_saved_is_told_apart(folder, run):
    import net2gp as n2g

    x = torch.linspace(0, 1, 5)[:, None]
    n2g.condition(n2g.RBF(), (x, x), n2g.Gaussian(0.1)).save("plain.safetensors")
    run("predict", "plain.safetensors", "test.csv").refused("was saved by Python, without a note")


def test_new_data_must_have_the_columns_of_the_fit(fitted, run):
    write_csv(fitted / "less.csv", [(1, 2)], ("area", "rooms"))
    run("predict", "posterior.safetensors", "less.csv").refused("less.csv has no column 'age'")


def test_labels_that_the_fit_did_not_know_are_named(folder, run):
    arguments = (
        "model.py:classifier",
        "words.csv",
        "--weights",
        "classifier.pt",
        "-o",
        "p.safetensors",
    )
    assert run("fit", *arguments, "--standardize", "features").code == 0
    text = (folder / "words.csv").read_text().replace("dear", "costly")
    (folder / "words.csv").write_text(text)
    run("report", "p.safetensors", "--held-out", "words.csv").refused(
        "the label 'costly' is none of"
    )


def test_targets_that_cannot_be_scored_do_not_keep_predictions_back(folder, run):
    given = ("classifier.pt2", "points.npz", "-o", "p.safetensors")
    assert run("fit", *given).code == 0
    with np.load("points.npz") as found:
        np.savez("strange.npz", x=found["x"], y=found["y"] + 5)
    answer = run("predict", "p.safetensors", "strange.npz", "--json")
    assert answer.code == 0
    assert "not scored: the label '5' is none of the 2 classes" in answer.err
    assert (folder / "predictions.csv").is_file()


def test_targets_of_another_shape_do_not_keep_predictions_back(fitted, run):
    np.savez("two.npz", x=np.ones((3, 3)), y=np.ones((3, 2)))
    answer = run("predict", "posterior.safetensors", "two.npz", "-o", "two.csv")
    assert answer.code == 0
    assert "not scored: mean and y must have the same shape" in answer.err


def test_predictions_that_overflow_are_not_written(fitted, run):
    write_csv(fitted / "huge.csv", [(1, 1, 1), (1e39, 1, 1)], COLUMNS)
    run("predict", "posterior.safetensors", "huge.csv").refused(
        "f has no finite mean and variance in torch.float32 at 1 of 2 points (first in row 1)"
    )
    assert not (fitted / "predictions.csv").exists()


def test_weights_that_are_named_must_be_there(fitted, run):
    given = ("posterior.safetensors", "test.csv", "--weights", "none.pt")
    run("predict", *given).refused("there is no file none.pt")


def test_a_table_may_be_followed_by_an_array(fitted, run):
    np.save("new.npy", np.ones((2, 3)))
    assert run("predict", "posterior.safetensors", "new.npy").code == 0


def test_numbers_of_extended_precision_are_read(fitted, run):
    np.savez("long.npz", x=np.ones((2, 3), np.longdouble), y=np.ones(2, np.longdouble))
    assert run("predict", "posterior.safetensors", "long.npz").code == 0


def test_each_level_has_a_column_of_its_own(fitted, run):
    levels = "0.9999999,0.99999999"
    answer = run("predict", "posterior.safetensors", "test.csv", "--quantiles", levels)
    assert "quantile_0.9999999, quantile_0.99999999" in answer.out


def test_a_network_of_half_precision_has_its_posterior(folder, run):
    given = ("model.py:half", "train.csv", *DATA, "--standardize", "both")
    assert run("fit", *given, "-o", "half.safetensors").code == 0
    assert run("predict", "half.safetensors", "test.csv").code == 0
    assert run("compare", *given, "--methods", "laplace").code == 0


def test_an_error_that_nobody_foresaw_is_one_line_too(folder, run, monkeypatch):
    def fails(*_):
        raise ZeroDivisionError("by zero")

    monkeypatch.setitem(METHODS, "laplace", fails)
    answer = run(*FIT)
    assert answer.code == 1
    assert "ZeroDivisionError: by zero (not an error that net2gp foresaw" in answer.err
    assert "Traceback" not in answer.err


def test_a_single_number_as_target_is_told_to_have_points(folder, run):
    np.savez(folder / "one.npz", x=np.zeros((1, 2)), y=np.float64(1.0))
    run("fit", FIT[1], "one.npz", "-o", "a.safetensors").refused("y[None]")
