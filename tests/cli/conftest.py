"""A folder as a user has it: code of a network, its weights, and tables, arrays and pictures."""

from __future__ import annotations

import signal

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

from net2gp.cli import app

CODE = """
from torch import nn

def regressor():
    return nn.Sequential(nn.Linear(3, 10), nn.Tanh(), nn.Linear(10, 1))

def classifier():
    return nn.Sequential(nn.Flatten(), nn.Linear(3, 10), nn.Tanh(), nn.Linear(10, 2))

def pictures():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2))

def broken():
    raise RuntimeError("no such\\nfile")

number = 3

def half():
    return regressor().half()

def leaves():
    raise SystemExit(0)

class Sum(nn.Linear):
    def __init__(self):
        super().__init__(3, 1)

    def forward(self, x):
        return super().forward(x).sum()
"""

COLUMNS = ("area", "rooms", "age")
TASKS = {"train.csv": (0, 60), "test.csv": (60, 90)}


class Answer:
    """What a command printed, and how it ended."""

    def __init__(self, found) -> None:
        self.code, self.out, self.err = found.exit_code, found.stdout, found.stderr
        self.exception = found.exception

    def refused(self, *parts: str, code: int = 1) -> None:
        """The command said why in one line, and showed no traceback."""
        assert self.code == code, self.err
        assert self.out == ""
        lines = self.err.strip().split("\n")
        assert "Traceback" not in self.err
        assert lines[-1].startswith("net2gp: ")
        assert "not an error that net2gp foresaw" not in self.err
        for part in parts:
            assert part in lines[-1]


@pytest.fixture
def run(monkeypatch):
    def run(*arguments: object) -> Answer:
        words = [str(one) for one in arguments]
        monkeypatch.setattr("sys.argv", ["net2gp", *words])
        return Answer(CliRunner().invoke(app, words))

    return run


def table(seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    x = generator.normal((50, 2, 7), (10, 0.5, 3), (90, 3))
    y = 20 + 3 * np.sin((x[:, 0] - 50) / 10) + x[:, 1] + generator.normal(0, 0.3, 90)
    return np.column_stack([x, y])


def write_csv(path, rows, head) -> None:
    lines = [",".join(head), *(",".join(map(str, row)) for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def trained(network: nn.Module, x: torch.Tensor, y: torch.Tensor, loss) -> nn.Module:
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-2)
    for _ in range(150):
        optimizer.zero_grad()
        loss(network(x), y).backward()
        optimizer.step()
    return network.eval()


@pytest.fixture(scope="session")
def original(tmp_path_factory):
    """The files, made once."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "model.py").write_text(CODE)
    code: dict = {}
    exec(CODE, code)
    torch.manual_seed(0)
    rows = table()
    for name, (start, end) in TASKS.items():
        write_csv(folder / name, rows[start:end], (*COLUMNS, "price"))
    words = np.where(rows[:, 3:] > 22, "dear", "cheap")
    write_csv(folder / "words.csv", np.column_stack([rows[:, :3], words]), (*COLUMNS, "class"))
    scaled = torch.from_numpy((rows[:60] - rows[:60].mean(0)) / rows[:60].std(0)).float()
    network = trained(code["regressor"](), scaled[:, :3], scaled[:, 3:], nn.functional.mse_loss)
    save_file(network.state_dict(), folder / "regressor.safetensors")
    labels = torch.from_numpy((words[:60, 0] == "dear").astype(np.int64))
    loss = nn.functional.cross_entropy
    classifier = trained(code["classifier"](), scaled[:, :3], labels, loss)
    torch.save({"state_dict": classifier.state_dict()}, folder / "classifier.pt")
    batch = torch.export.Dim("batch")
    program = torch.export.export(classifier, (scaled[:2, :3],), dynamic_shapes=({0: batch},))
    torch.export.save(program, folder / "classifier.pt2")
    np.savez(folder / "points.npz", x=scaled[:, :3].numpy(), y=labels.numpy())
    return folder


@pytest.fixture
def folder(original, tmp_path, monkeypatch):
    """A copy of the files, as the current folder."""
    for one in original.iterdir():
        (tmp_path / one.name).write_bytes(one.read_bytes())
    monkeypatch.chdir(tmp_path)
    return tmp_path


FIT = (
    *("fit", "model.py:regressor", "train.csv", "--weights", "regressor.safetensors"),
    *("--target", "price", "--standardize", "both", "-o", "posterior.safetensors"),
)


@pytest.fixture
def fitted(folder, run):
    """The folder with a posterior of the regression."""
    assert run(*FIT).code == 0
    return folder


def heard() -> None:
    """Let a new process hear Ctrl-C, which those of a shell's background do not."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
