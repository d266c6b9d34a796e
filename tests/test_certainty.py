"""What the programs about the certainty of image classifiers are made of: corruptions, packing, claims."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad

from net2gp import data, metrics

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
KINDS = ("noise", "blur", "contrast", "brightness", "pixels")


@pytest.fixture
def load(monkeypatch):
    """Import a module of the programs, as they import each other."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or ".").parent == FOLDER:
            del sys.modules[name]


def images(count: int = 6) -> Tensor:
    coarse = torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return interpolate(coarse, (32, 32), mode="bilinear")


@pytest.mark.parametrize("kind", KINDS)
def test_corruptions_grow_with_their_strength_and_repeat(load, kind):
    program, x = load("cifar_images"), images()
    assert tuple(program.STRENGTHS) == KINDS
    found = [program.corrupted(x, kind, strength) for strength in range(1, 6)]
    sizes = [float((each - x).abs().mean()) for each in found]
    if kind != "pixels":  # sides of 30 and 29 pixels displace about as much
        assert sizes == sorted(sizes)
    assert 0 < 1.1 * sizes[0] < sizes[-1]
    assert all(each.shape == x.shape and each.amin() >= 0 and each.amax() <= 1 for each in found)
    assert torch.equal(program.corrupted(x, kind, 3), found[2])


@pytest.mark.parametrize("kind", ["blur", "contrast", "pixels"])
def test_images_of_one_color_stay_as_they_are(load, kind):
    x = torch.full((2, 3, 32, 32), 0.3, dtype=torch.float64)
    torch.testing.assert_close(load("cifar_images").corrupted(x, kind, 5), x)


def test_a_blur_is_the_sum_over_neighbors(load):
    x, width = images(1).double()[:, :1], 0.7
    reach = torch.arange(-3, 4).double()
    weights = (-0.5 * (reach / width).square()).exp()
    weights = weights[:, None] * weights / weights.sum() ** 2
    wide = pad(x, (3, 3, 3, 3), mode="replicate")
    expected = sum(
        weights[i, j] * wide[:, :, i : i + 32, j : j + 32] for i in range(7) for j in range(7)
    )
    torch.testing.assert_close(load("cifar_images").blurred(x, width), expected)


def test_augmented_images_are_crops_of_padded_or_mirrored_ones(load):
    torch.manual_seed(0)
    x, seen = images(8), set()
    for image, moved in zip(x, load("certainty_cifar").shifted(x), strict=True):
        crops = {
            (mirror, i, j): pad(image.flip(2) if mirror else image, (4, 4, 4, 4))[
                :, i : i + 32, j : j + 32
            ]
            for mirror in (False, True)
            for i in range(9)
            for j in range(9)
        }
        (same,) = [key for key, crop in crops.items() if torch.equal(crop, moved)]
        seen.add(same)
    assert len(seen) > 4


def test_data_that_are_packed_in_parts_are_read_as_they_were(load, monkeypatch, tmp_path):
    program, source = load("cifar_images"), tmp_path / "source"
    (source / "nets").mkdir(parents=True)
    draw = np.random.default_rng(0)
    square = lambda count: draw.integers(0, 256, (count, 28, 28), dtype=np.uint8)
    y = draw.integers(0, 10, 20)
    planes = draw.integers(0, 256, (3, 20, 32, 32), dtype=np.uint8)
    np.savez(source / "cifar10.npz", r_train=planes, y_train=y, r_test=planes, y_test=y)
    np.savez(source / "fashion_mnist.npz", x_train=square(9), y_train=y, x_test=square(5), y_test=y)
    np.savez(source / "notmnist.npz", x=square(4), y=y[:4])
    np.savez(source / "nets/resnet20_cifar10.npz", weight=np.ones(2, np.float32))
    monkeypatch.setenv("NET2GP_DATA", str(source))
    monkeypatch.setattr(program, "PART", 30_000)
    before = data.cifar10_bytes("train"), program.strangers(3), data.state_dict("resnet20_cifar10")
    program.pack(tmp_path / "packed")
    parts = sorted((tmp_path / "packed").glob("part*/bytes"))
    assert len(parts) > 2
    assert max(part.stat().st_size for part in parts) <= 30_000
    program.use_packed(tmp_path / "packed")
    assert os.environ["NET2GP_DATA"] != str(source)
    after = data.cifar10_bytes("train"), program.strangers(3), data.state_dict("resnet20_cifar10")
    assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))
    for one, other in zip(before[1:], after[1:], strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_parts_that_were_not_all_sent_are_missed(load, tmp_path):
    (tmp_path / "part0").mkdir()
    with pytest.raises(SystemExit, match="lacks parts"):
        load("cifar_images").use_packed(tmp_path)


def test_the_error_of_confidences_is_that_of_all_probabilities(load):
    generator = torch.Generator().manual_seed(0)
    probs = (3 * torch.randn(500, 10, generator=generator, dtype=torch.float64)).softmax(1)
    y = torch.randint(10, (500,), generator=generator)
    hits = torch.tensor(load("certainty_cifar").hits(probs.log(), y), dtype=torch.float64)
    expected = metrics.expected_calibration_error(probs, y)
    torch.testing.assert_close(load("certainty_tables").error(hits), expected)


def cell(load, f: Tensor, y: Tensor, auroc: float) -> dict:
    program, log_probs = load("certainty_cifar"), f.log_softmax(1)
    scores = program.scores(log_probs, y)
    return {
        "test": scores,
        "losses": (-log_probs.gather(1, y[:, None])[:, 0]).tolist(),
        "hits": program.hits(log_probs, y),
        "others": {"noise": {"AUROC": auroc, "FPR95": 1 - auroc}},
        "corrupted": {"blur": [scores]},
    }


def test_claims_hold_for_a_better_default_and_fail_for_a_worse_one(load):
    tables = load("certainty_tables")
    generator = torch.Generator().manual_seed(0)
    f = 2 * torch.randn(800, 10, generator=generator, dtype=torch.float64)
    y = torch.distributions.Categorical(logits=f).sample()
    network, right = cell(load, 3 * f, y, 0.8), cell(load, f, y, 0.9)
    cells = {"network": network, "temperature": right, "laplace": right}
    cells |= {"laplace, held out": right, "novelty": {**network, **cell(load, 3 * f, y, 0.95)}}
    judged = list(tables.stated(cells, quick=False))
    assert len(judged) == 12
    assert all(claim.holds for claim in judged)
    worse = cell(load, 4 * f, y, 0.7)
    for name, failing in (("laplace", 8), ("laplace, held out", 2), ("novelty", 1)):
        found = list(tables.stated(cells | {name: worse}, quick=False))
        assert sum(not claim.holds for claim in found) == failing
