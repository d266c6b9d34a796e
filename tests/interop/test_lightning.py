"""The callback of Lightning: the posterior of the trained network, saved and logged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import net2gp as n2g
from net2gp.errors import InputError
from net2gp.interop.shards import laplace_of_shards
from net2gp.tuning import Evidence

pytest.importorskip("lightning")

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers.logger import Logger

from net2gp.interop.lightning import FitLaplace

pytestmark = [
    pytest.mark.filterwarnings("ignore::net2gp.errors.Net2GPWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class Module(LightningModule):
    """A classifier with dropout, whose network is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 2))

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, _):
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


class Log(Logger):
    """A logger that remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, float] = {}

    name = "log"
    version = 0

    def log_metrics(self, metrics, step=None):
        self.seen |= metrics

    def log_hyperparams(self, *args, **kwargs):
        pass


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(41, 2, generator=generator)
    return x, (x.sum(1) > 0).long()


def loader():
    """Shuffled and without the last batch: the posterior is of all points all the same."""
    return DataLoader(TensorDataset(*data()), batch_size=8, shuffle=True, drop_last=True)


def trained(tmp_path, callback, **options):
    module, log = Module(), Log()
    trainer = Trainer(
        max_epochs=2,
        accelerator="cpu",
        callbacks=[callback],
        logger=log,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        **options,
    )
    trainer.fit(module, loader())
    return module, log


def test_the_posterior_is_that_of_laplace_on_all_training_points(tmp_path):
    path = tmp_path / "posterior.safetensors"
    callback = FitLaplace(n2g.Categorical(), path, network="model", structure=n2g.Full())
    module, log = trained(tmp_path, callback)
    assert module.model[2].training  # as it was
    network = module.model.eval()
    expected = n2g.laplace(network, data(), n2g.Categorical(), structure=n2g.Full())
    x = data()[0][:5]
    torch.testing.assert_close(callback.posterior.predict(x).probs, expected.predict(x).probs)
    torch.testing.assert_close(n2g.load(path, network).predict(x).probs, expected.predict(x).probs)
    assert log.seen["log_evidence"] == pytest.approx(float(expected.evidence), rel=1e-5)


def test_with_the_evidence_it_is_the_posterior_that_several_processes_find(tmp_path):
    callback = FitLaplace(n2g.Categorical(), structure=n2g.Kron(), tuning=Evidence())
    module, _ = trained(tmp_path, callback)
    module.eval()
    expected = laplace_of_shards(module, data(), n2g.Categorical(), structure=n2g.Kron())
    x = data()[0][:5]
    torch.testing.assert_close(
        callback.posterior.marginal(x).variance, expected.marginal(x).variance
    )


def test_other_data_and_a_function_for_the_network(tmp_path):
    x, y = data()
    held = TensorDataset(x[:20], y[:20])
    callback = FitLaplace(
        n2g.Categorical(),
        network=lambda module: module.model,
        data=held,
        prior_var=1.0,
        structure=n2g.Diagonal(),
    )
    module, _ = trained(tmp_path, callback)
    expected = n2g.laplace(
        module.model.eval(), (x[:20], y[:20]), n2g.Categorical(), prior_var=1.0,
        structure=n2g.Diagonal(),
    )  # fmt: skip
    torch.testing.assert_close(
        callback.posterior.marginal(x).variance, expected.marginal(x).variance
    )


def test_what_cannot_work_is_refused_before_training(tmp_path):
    with pytest.raises(InputError, match=r"Module has no network 'net'.*'model'"):
        trained(tmp_path, FitLaplace(n2g.Categorical(), network="net"))
    with pytest.raises(InputError, match="for the posterior does not exist"):
        trained(tmp_path, FitLaplace(n2g.Categorical(), tmp_path / "none" / "file"))


PROGRAM = """
import sys
sys.path[:0] = [{tests!r}, {source!r}]
if __name__ == "__main__":
    import pathlib, warnings
    warnings.simplefilter("ignore")
    import net2gp as n2g
    import test_lightning as t
    from net2gp.interop.lightning import FitLaplace
    callback = FitLaplace(n2g.Categorical(), sys.argv[1], network="model", structure=n2g.Full(), {options})
    module, log = t.trained(
        pathlib.Path(sys.argv[1]).parent, callback, devices=2, strategy="ddp", num_nodes=1
    )
    import torch
    if callback.posterior is not None and torch.distributed.get_rank() == 0:
        torch.save(module.model.state_dict(), sys.argv[1] + ".network")
        print("EVIDENCE", log.seen["log_evidence"])
"""


def in_two_processes(tmp_path, options):
    source = str(Path(n2g.__file__).resolve().parents[1])
    program = tmp_path / "program.py"
    tests = str(Path(__file__).parent)
    program.write_text(PROGRAM.format(tests=tests, source=source, options=options))
    path = tmp_path / "posterior.safetensors"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, str(program), str(path)],
        capture_output=True, text=True, env=environment, timeout=300,
    )  # fmt: skip
    return done, path


@pytest.mark.slow
def test_two_processes_fit_the_posterior_of_one(tmp_path):
    done, path = in_two_processes(tmp_path, "tuning=n2g.tuning.Evidence()")
    assert done.returncode == 0, done.stderr
    module = Module().eval()
    module.model.load_state_dict(torch.load(f"{path}.network", weights_only=True))
    expected = laplace_of_shards(module.model, data(), n2g.Categorical(), structure=n2g.Full())
    found, x = n2g.load(path, module.model), data()[0]
    torch.testing.assert_close(
        found.marginal(x).covariance_matrix, expected.marginal(x).covariance_matrix, rtol=1e-4,
        atol=1e-6,
    )  # fmt: skip
    logged = float(done.stdout.partition("EVIDENCE")[2].split()[0])
    assert logged == pytest.approx(float(expected.evidence), rel=1e-6)


@pytest.mark.slow
def test_two_processes_ask_for_the_evidence_before_training(tmp_path):
    done, path = in_two_processes(tmp_path, "")
    assert done.returncode != 0
    assert "tuning=net2gp.tuning.Evidence()" in done.stderr
    assert not path.exists()
