"""A new user's way with a real network: fit, predict and report, from files alone."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import net2gp as n2g
from net2gp.errors import InputError

CHANNELS = ("--image-mean", "0.485,0.456,0.406", "--image-std", "0.229,0.224,0.225")


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    """A ResNet-20 as a program, and some CIFAR-10 images as they are stored."""
    try:
        network, (x, y) = n2g.data.pretrained("resnet20_cifar10"), n2g.data.cifar10_bytes("test")
    except InputError as error:
        pytest.skip(str(error))
    batch = torch.export.Dim("batch")
    program = torch.export.export(
        network, (torch.randn(2, 3, 32, 32),), dynamic_shapes=({0: batch},)
    )
    monkeypatch.chdir(tmp_path)
    torch.export.save(program, "resnet20.pt2")
    np.savez("known.npz", x=x[:150].numpy(), y=y[:150].numpy())
    np.savez("new.npz", x=x[150:350].numpy(), y=y[150:350].numpy())
    np.savez("noise.npz", x=np.random.default_rng(0).integers(0, 256, (60, 32, 32, 3), np.uint8))
    return network, n2g.data.IMAGENET(x[150:350].permute(0, 3, 1, 2) / 255), y[150:350]


@pytest.mark.slow
def test_a_resnet_gets_a_posterior_and_a_report_from_files_alone(pictures, run):
    network, x, y = pictures
    answer = run(
        "fit", "resnet20.pt2", "known.npz", *CHANNELS, "-o", "posterior.safetensors", "--json"
    )
    assert answer.code == 0, answer.err
    assert "structure=LastLayer" in json.loads(answer.out)["posterior"]
    assert run("predict", "posterior.safetensors", "new.npz", "-o", "out.npz").code == 0
    with np.load("out.npz") as found, torch.no_grad():
        logits = network(x)
        agree = (found["label"] == logits.argmax(1).numpy()).mean()
        surest = logits.softmax(1).max(1).values.numpy()
        assert agree > 0.97
        assert (found["probs"].max(1) <= surest + 1e-3).mean() > 0.95
        assert (found["label"] == y.numpy()).mean() > 0.85
    other = ("--other", "noise=noise.npz", "--fail-under", "accuracy=0.85")
    answer = run("report", "posterior.safetensors", "--held-out", "new.npz", *other, "--json")
    assert answer.code == 0, answer.err
    scores = json.loads(answer.out)["scores"]
    assert scores["novelty_auroc_noise"]["value"] > 0.95
    strict = ("--held-out", "new.npz", "--fail-under", "accuracy=0.999")
    assert run("report", "posterior.safetensors", *strict).code == 3


@pytest.mark.slow
@pytest.mark.parametrize("points", [3, 150])
def test_a_resnet_can_be_explored_within_a_minute(pictures, run, points):
    with np.load("known.npz") as found:
        np.savez("some.npz", x=found["x"][:points], y=found["y"][:points])
    start = time.process_time()
    answer = run("explore", "resnet20.pt2", "some.npz", *CHANNELS, "-o", "page.html")
    assert answer.code == 0, answer.err
    assert time.process_time() - start < 60
    page = Path("page.html").read_text(encoding="utf-8")
    assert f"269,722 parameters on {points} points, structure LastLayer()" in page
