"""What a user sees: texts and tables of values, progress bars, the command line, `~` in paths."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import net2gp as n2g
from net2gp import progress as bars
from net2gp.errors import Net2GPWarning
from net2gp.linalg.checkpoint import Checkpoint
from net2gp.progress import progress

SOURCES = Path(__file__).parent.parent / "src"
X = torch.linspace(-1, 1, 12)[:, None]


def regressor() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)).eval()


def laplace(**settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Net2GPWarning)
        return n2g.laplace(regressor(), (X, X.sin()), n2g.Gaussian(0.25), prior_var=0.5, **settings)


def test_posteriors_say_what_they_are_of() -> None:
    text = repr(laplace(structure=n2g.Diagonal()))
    assert text.startswith(
        "Posterior(Linearized(Sequential, 13 parameters), structure=Diagonal(fisher=ExactFisher()), "
        "likelihood=Gaussian(noise_var=0.25), prior_var=0.5, N=12, C=1, P=13, log_evidence="
    )
    text = repr(n2g.adapt(regressor(), (X, X.sin()), n2g.Gaussian(0.25), prior_var=0.5))
    assert "TangentKernel(Linearized(Sequential, 13 parameters), prior_var=0.5)" in text
    assert "likelihood=Gaussian(noise_var=0.25), N=12, C=1, P=13, solver=" in text
    classes = n2g.adapt_classes(regressor(), (X, torch.arange(12) % 3))
    assert "N=12, C=3, noise_var=" in repr(classes)
    tempered = laplace(structure=n2g.Full()).tempered(2.0)
    assert "prior_var=1, N=12, C=1, P=13, temperature=2, log_evidence=none)" in repr(tempered)


def test_the_prior_variances_of_several_parameters_are_a_range() -> None:
    kernel = n2g.linearize(regressor()).kernel({"*": 1.0, "*.bias": 0.25})
    assert repr(kernel).endswith("prior_var=0.25 to 1)")


def test_limits_do_not_print_their_graph() -> None:
    kernel = n2g.nngp(nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 1)))
    assert repr(kernel) == (
        "LimitKernel(InfiniteWidth(Linear, ReLU, Linear), kernel=NNGP, variance=1)"
    )
    assert "kernel=NTK, variance=2" in repr(kernel.limit.ntk.scaled(2.0))


def test_predictions_say_their_ranges() -> None:
    law = laplace(structure=n2g.Full()).predict(X)
    mean, std = law.mean, law.stddev
    assert repr(law) == (
        f"Law(shape=(12, 1), mean={float(mean.min()):.4g} to {float(mean.max()):.4g}, "
        f"stddev={float(std.min()):.4g} to {float(std.max()):.4g})"
    )


@pytest.mark.parametrize("structure", [n2g.Full(), n2g.LastLayer(), n2g.structures.FunctionSpace()])
def test_tables_of_notebooks_have_the_same_facts(structure) -> None:
    posterior = laplace(structure=structure)
    for value in (posterior, posterior.predict(X), posterior.linearized.kernel()):
        table = value._repr_html_()
        assert table.startswith(f"<table><caption>{type(value).__name__}</caption>")
        assert table.count("<tr>") == table.count("</tr>") == len(value._facts())
    assert "<th style='text-align:left'>N</th><td style='text-align:left'>12</td>" in (
        posterior._repr_html_()
    )


class Pictures:
    """IPython.display, as far as a bar uses it."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.HTML = str

    def display(self, content: str, display_id: bool) -> Pictures:
        self.shown.append(content)
        return self

    def update(self, content: str) -> None:
        self.shown.append(content)


@pytest.fixture
def notebook(monkeypatch) -> Pictures:
    pictures = Pictures()
    shell = type("Shell", (type("ZMQInteractiveShell", (), {}),), {})()
    module = SimpleNamespace(get_ipython=lambda: shell, display=pictures)
    monkeypatch.setitem(sys.modules, "IPython", module)
    monkeypatch.setitem(sys.modules, "IPython.display", pictures)
    monkeypatch.setattr(bars, "SECONDS", 0.0)
    return pictures


def test_a_notebook_has_a_bar_that_goes_when_it_is_done(notebook: Pictures) -> None:
    with progress("tiles <b>", total=3) as advance:
        advance()
        with progress("inside", total=9) as nested:
            nested(5)
        advance(2, note="residual 1e-9")
    assert notebook.shown == [
        'tiles &lt;b&gt; <progress value="0" max="3"></progress> 0/3 ',
        'tiles &lt;b&gt; <progress value="1" max="3"></progress> 1/3 ',
        'tiles &lt;b&gt; <progress value="3" max="3"></progress> 3/3 residual 1e-9',
        "",
    ]


def test_a_bar_in_a_notebook_goes_after_an_error_too(notebook: Pictures) -> None:
    with pytest.raises(ZeroDivisionError, match="division"), progress("open end") as advance:
        advance(1 / 0)
    assert notebook.shown == ["open end <progress></progress> 0 ", ""]


def test_long_calls_show_a_bar_in_a_notebook(notebook: Pictures) -> None:
    laplace(structure=n2g.Full())
    assert any(text.startswith("curvature") for text in notebook.shown)


def test_nothing_is_shown_where_nobody_looks(monkeypatch, capfd) -> None:
    terminal = type("TerminalInteractiveShell", (), {})()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: terminal))
    with progress("tiles", total=2) as advance:
        advance()
    assert capfd.readouterr() == ("", "")


def test_the_package_runs_as_a_program() -> None:
    for flag in ("-h", "--help"):
        done = subprocess.run(
            [sys.executable, "-m", "net2gp", flag],
            env=os.environ | {"PYTHONPATH": str(SOURCES), "NO_COLOR": "1", "COLUMNS": "100"},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        assert "Usage: net2gp " in done.stdout
        assert "demo" in done.stdout


def test_the_home_folder_is_known_to_all_that_write(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    Checkpoint("~/solve.safetensors").write({"x": torch.ones(2)}, {"step": 3})
    assert (tmp_path / "solve.safetensors").is_file()
    posterior = laplace(structure=n2g.Full())
    n2g.save(posterior, "~/posterior.safetensors")
    assert (tmp_path / "posterior.safetensors").is_file()
    again = n2g.load("~/posterior.safetensors", regressor())
    assert torch.equal(again.predict(X).mean, posterior.predict(X).mean)
