"""Files of format 1, which an earlier revision wrote, still load and predict what they did then."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from net2gp import load
from posteriors.ways import class_targets, network, points, real_targets, unseen_points

DATA = Path(__file__).parent.parent / "data"
EXPECTED = json.loads((DATA / "format1.json").read_text())
"""The numbers that the posteriors gave when they were saved, at the first three unseen points."""


def near(found: Tensor, expected: list, tol: float = 1e-9) -> None:
    torch.testing.assert_close(found, torch.tensor(expected).to(found), rtol=tol, atol=tol)


@pytest.fixture(autouse=True)
def in_float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def opened(name: str):
    expected = EXPECTED[name]
    file = DATA / f"format1_{name}.safetensors"
    return load(file, network(expected["outputs"])), expected, unseen_points()[:3]


@pytest.mark.parametrize("name", EXPECTED)
def test_an_old_file_predicts_what_it_did(name):
    posterior, expected, x = opened(name)
    law = posterior.marginal(x)
    near(law.mean, expected["mean"])
    near(law.covariance_matrix.diagonal(dim1=1, dim2=2), expected["variance"])
    near(posterior.joint(x).covariance_matrix[0], expected["joint_row"])
    targets = class_targets if expected["outputs"] == 3 else real_targets
    log_prob = posterior.predict(x).log_prob(targets(x, expected["outputs"]))
    near(log_prob, expected["log_prob"])
    if expected["evidence"] is not None:
        near(posterior.log_marginal_likelihood(), expected["evidence"])


@pytest.mark.parametrize("name", [n for n, row in EXPECTED.items() if "updated_mean" in row])
def test_an_old_file_takes_in_more_data_as_it_did(name):
    posterior, expected, x = opened(name)
    seen = points(8)
    y = class_targets(seen, 3) if expected["outputs"] == 3 else real_targets(seen, 2)
    grown = posterior.update((seen[:2] + 0.1, y[:2]))
    near(grown.marginal(x).mean, expected["updated_mean"], 1e-7)
