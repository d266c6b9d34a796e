"""MLflow's models: a folder without pickle that predicts what the posterior predicts."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch
from torch import nn

import net2gp as n2g
from net2gp.errors import FileFormatError, InputError

pytest.importorskip("mlflow")
pytest.importorskip("pandas")

import mlflow
import pandas as pd

from net2gp.interop.mlflow import load_model, log_model, save_model

FACTORY = """
from torch import nn

def regressor():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

def classifier():
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))

def nothing():
    return 3
"""


@pytest.fixture
def factory(tmp_path, monkeypatch):
    """The name of a module with factories, which only this test can import."""
    name = f"factories_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(FACTORY, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


def regression(double: bool = False):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).eval()
    network = network.double() if double else network
    x = torch.randn(20, 3).to(next(network.parameters()))
    return n2g.laplace(network, (x, x[:, :2].sin()), n2g.Gaussian(0.1), prior_var=1.0), x


def classes():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).eval()
    x, y = torch.randn(24, 1, 2, 2), torch.arange(24) % 3
    return n2g.laplace(network, (x, y), n2g.Categorical(), prior_var=1.0, structure=n2g.Kron()), x


pytestmark = pytest.mark.filterwarnings("ignore::net2gp.errors.Net2GPWarning")


def test_a_regression_predicts_a_table_from_a_table(factory, tmp_path):
    posterior, x = regression()
    save_model(posterior, tmp_path / "model", network=f"{factory}:regressor", quantiles=(0.1, 0.5))
    model = mlflow.pyfunc.load_model(str(tmp_path / "model"))
    table = model.predict(pd.DataFrame(x.numpy(), columns=["a", "b", "c"]))
    law = posterior.predict(x)
    assert list(table) == [
        "mean_0", "mean_1", "std_0", "std_1",
        "quantile_0.1_0", "quantile_0.1_1", "quantile_0.5_0", "quantile_0.5_1",
    ]  # fmt: skip
    np.testing.assert_allclose(table[["mean_0", "mean_1"]], law.mean, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(table[["std_0", "std_1"]], law.stddev, rtol=1e-5)
    lower = torch.distributions.Normal(law.mean, law.stddev).icdf(torch.tensor(0.1))
    np.testing.assert_allclose(table["quantile_0.1_1"], lower[:, 1], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(table["quantile_0.5_0"], table["mean_0"])


def test_classes_are_predicted_from_arrays_and_from_flat_tables(factory, tmp_path):
    posterior, x = classes()
    save_model(posterior, tmp_path / "model", network=f"{factory}:classifier")
    model = mlflow.pyfunc.load_model(str(tmp_path / "model"))
    probs = posterior.predict(x).probs.numpy()
    for given in (x.numpy(), pd.DataFrame(x.flatten(1).numpy())):
        table = model.predict(given)
        found = table[[f"probability_{c}" for c in range(3)]]
        np.testing.assert_allclose(found, probs, rtol=1e-5, atol=1e-6)
        assert (table["label"].to_numpy() == probs.argmax(1)).all()


def test_the_posterior_itself_comes_back_in_its_dtype(factory, tmp_path):
    posterior, x = regression(double=True)
    save_model(posterior, tmp_path / "model", network=f"{factory}:regressor")
    same = load_model(tmp_path / "model")
    assert torch.equal(same.marginal(x).mean, posterior.marginal(x).mean)
    table = mlflow.pyfunc.load_model(str(tmp_path / "model")).predict(x.float().numpy())
    np.testing.assert_allclose(table["mean_0"], posterior.predict(x.float().double()).mean[:, 0])


def test_a_process_without_a_network_needs_no_factory(tmp_path):
    x = torch.linspace(-1, 1, 6)[:, None]
    posterior = n2g.condition(n2g.RBF(), (x, x.sin()), n2g.Gaussian(0.1))
    save_model(posterior, tmp_path / "model")
    table = mlflow.pyfunc.load_model(str(tmp_path / "model")).predict(x.numpy())
    assert list(table) == ["mean", "std", "quantile_0.05", "quantile_0.95"]
    np.testing.assert_allclose(table["mean"], posterior.predict(x).mean[:, 0], rtol=1e-6)


def test_there_is_no_pickle_in_the_folder_and_the_code_can_be_in_it(factory, tmp_path):
    posterior, x = regression()
    code = [str(tmp_path / f"{factory}.py")]
    save_model(posterior, tmp_path / "model", network=f"{factory}:regressor", code_paths=code)
    files = [path for path in (tmp_path / "model").rglob("*") if path.is_file()]
    assert not [path for path in files if path.suffix in (".pkl", ".pickle", ".pt", ".pth")]
    for path in files:
        assert not path.read_bytes().startswith(b"\x80"), path  # how pickles begin
    sys.modules.pop(factory)
    (tmp_path / f"{factory}.py").unlink()
    path = list(sys.path)
    try:
        assert torch.equal(load_model(tmp_path / "model").mean(x), posterior.mean(x))
    finally:
        sys.path[:] = path


def test_a_run_holds_the_model(factory, tmp_path, monkeypatch):
    posterior, x = regression()
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    try:
        with mlflow.start_run():
            logged = log_model(posterior, "model", network=f"{factory}:regressor")
        assert torch.equal(load_model(logged.model_uri).mean(x), posterior.mean(x))
    finally:
        mlflow.set_tracking_uri(before)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (None, "network"),
        ("{}", "Pass 'package.module:factory'"),
        ("{}:missing", "cannot be built"),
        ("no_such_module:factory", "cannot be built"),
        ("{}:nothing", "returned int"),
        ("{}:classifier", "another architecture"),
    ],
)
def test_a_factory_that_does_not_build_the_network_is_refused_before_anything_is_written(
    factory, tmp_path, name, message
):
    posterior, _ = regression()
    with pytest.raises(InputError, match=message):
        save_model(posterior, tmp_path / "model", network=name and name.format(factory))
    assert not (tmp_path / "model").exists()


def test_wrong_input_and_damaged_files_are_refused(factory, tmp_path):
    posterior, _ = regression()
    with pytest.raises(InputError, match="quantiles must lie between 0 and 1"):
        save_model(posterior, tmp_path / "model", network=f"{factory}:regressor", quantiles=(5,))
    save_model(posterior, tmp_path / "model", network=f"{factory}:regressor")
    model = mlflow.pyfunc.load_model(str(tmp_path / "model"))
    with pytest.raises(InputError, match="the columns must hold numbers"):
        model.predict(pd.DataFrame({"a": ["x"], "b": [1.0], "c": [2.0]}))
    file = tmp_path / "model" / "data" / "net2gp" / "posterior.safetensors"
    file.write_bytes(file.read_bytes()[:400])
    with pytest.raises(FileFormatError):
        load_model(tmp_path / "model")
    settings = json.loads((tmp_path / "model/data/net2gp/settings.json").read_text())
    assert settings == {"network": f"{factory}:regressor", "quantiles": [0.05, 0.95]}
